"""How files are opened for arrays: in place, through the page cache, or past it by O_DIRECT.

`choose_o_direct` decides at open, from facts that `file_storage` collects. For a file that is only
read, the choice may change later: each time that a number of bytes were read, `ChoiceReview` looks
at the reads, and `reconsider` decides. Both rules are pure functions.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from flashwarp import _native, config, endings
from flashwarp.device import Device, host_memory
from flashwarp.errors import PathError
from flashwarp.storage import npy
from flashwarp.storage.base import Namespace, Storage
from flashwarp.storage.composite import Concatenated
from flashwarp.storage.file import File, Mapping
from flashwarp.storage.lease import Lease
from flashwarp.storage.memory import Memory
from flashwarp.storage.source import FilePart, Source

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """Whether a file is read and written past the page cache, and why."""

    o_direct: bool
    why: str


# At open.


@dataclass(frozen=True)
class FileFacts:
    """What the choice depends on."""

    nbytes: int
    """Bytes of the array in it."""
    available_bytes: int
    """Host memory that can be used, what the page cache holds now included."""
    reserved_bytes: int
    """Of it, what frames and host tier of the array's cache will take."""
    resident: float | None
    """Share of the file in the page cache; None: unknown."""
    writable: bool
    allocated_bytes: int
    """Bytes that the file takes on its medium; the rest are holes, which were never written."""
    direct_refusal: str
    """Why the file cannot be read with O_DIRECT; empty if it can."""

    @property
    def share(self) -> str:
        """How much of the file is in the page cache, for people."""
        found = "an unknown part" if self.resident is None else f"{self.resident:.0%}"
        return f"{found} of the file is in the page cache"

    def is_cached(self, defaults: config.Config) -> bool:
        """Whether nearly all of the file is known to be in the page cache."""
        return self.resident is not None and self.resident >= defaults.in_place_residency


def choose_o_direct(facts: FileFacts, defaults: config.Config) -> Choice:
    """Choose between page cache and O_DIRECT.

    A file that fits the memory goes through the page cache, however little of it is there now. The
    first read costs about the same by either, and every later one a tenth of what the drive takes.
    A larger file goes past it: a miss of the page cache would cost several times a direct read,
    because other pages must make room, so O_DIRECT is faster even if most of the file is cached. A
    large file that is yet to be filled goes through the page cache nevertheless: each direct write
    into a hole waits for the file system to allocate it, and the kernel writes pages back together.
    """
    room = room_for_pages(facts.available_bytes, facts.reserved_bytes, defaults)
    share = facts.share
    if facts.direct_refusal:
        return Choice(False, f"{share}; through it, O_DIRECT cannot: {facts.direct_refusal}")
    if facts.is_cached(defaults):
        return Choice(False, f"{share}; through it")
    size = f"its {facts.nbytes} bytes"
    if facts.nbytes <= room:
        return Choice(False, f"{share}, and {size} fit the {room} that it may take; through it")
    if facts.writable and 2 * facts.allocated_bytes < facts.nbytes:
        return Choice(False, f"{share}, and most of {size} were never written; through it")
    kept = "; a writable file keeps this way" if facts.writable else ""
    return Choice(True, f"{share}, but {size} exceed the {room} that it may take; O_DIRECT{kept}")


def room_for_pages(available_bytes: int, reserved_bytes: int, defaults: config.Config) -> int:
    """Return the bytes of the page cache that one file may count on."""
    return max(0, int((available_bytes - reserved_bytes) * defaults.page_cache_share))


# Later.


@dataclass(frozen=True)
class ReadFigures:
    """Sums over the reads of a file since the last change of the choice, from `ReadCensus`."""

    reads: int
    nbytes: int
    waited_nbytes: int
    """Of the bytes, those that were not in the page cache."""
    near_reads: int
    """Reads close behind an earlier one, which the kernel's read-ahead is for."""
    touched_nbytes: int
    """Different bytes among those read; an estimate."""
    busy_ns: int
    """Time in which reads came, pauses of the caller left out."""

    @property
    def in_order(self) -> bool:
        """Whether nearly all reads followed another."""
        return self.near_reads >= _IN_ORDER * self.reads

    def memory_decides(self, o_direct: bool) -> bool:
        """Whether a change depends on what fits the memory."""
        if self.in_order:
            return False
        if o_direct:
            return self.nbytes >= _REUSE * self.touched_nbytes
        return 2 * self.waited_nbytes >= self.nbytes

    @property
    def bytes_per_s(self) -> float:
        """What the reads reached; 0 before the first."""
        return self.nbytes / self.busy_ns * 1e9 if self.busy_ns else 0.0


# Share of reads in order that makes a stream: threads that divide it begin pieces of their own.
_IN_ORDER = 0.9

# How often bytes are read, on average, before they count as read again and again.
_REUSE = 2.0

# Reads in order keep a choice that has at least this share of the other's speed.
_KEPT_SPEED = 0.9


def reconsider(
    o_direct: bool, seen: ReadFigures, room: int, rates: dict[bool, float]
) -> str | None:
    """Return why a file that is only read should change between the two now, or None.

    `seen` is what was read since `o_direct` was chosen; `room` are the bytes that the file's pages
    may take; `rates` are bytes per second of reads in order, by choice, as far as seen.
    """
    if seen.in_order:
        return _reconsider_in_order(o_direct, rates)
    if not seen.memory_decides(o_direct):
        return None
    if o_direct and seen.touched_nbytes <= room:
        again = seen.nbytes / max(1, seen.touched_nbytes)
        return (
            f"the same {seen.touched_nbytes} bytes were read {again:.1f} times, and fit the {room} "
            "that the page cache may take"
        )
    if not o_direct and seen.touched_nbytes > room:
        return (
            f"{seen.waited_nbytes / seen.nbytes:.0%} of the bytes read were not in the page cache, "
            f"and {seen.touched_nbytes} different ones exceed the {room} that it may take"
        )
    return None


def _reconsider_in_order(o_direct: bool, rates: dict[bool, float]) -> str | None:
    """Return why to try the kernel's read-ahead, or to end the trial of a slower choice."""
    own, other = rates[o_direct], rates.get(not o_direct)
    if other is None:
        return "reads are in order, and the kernel can read ahead" if o_direct else None
    if own < _KEPT_SPEED * other:
        there = f"{other / 1e6:.0f} the other way"
        return f"reads in order reach {own / 1e6:.0f} MB/s, and reached {there}"
    return None


class ChoiceReview:
    """Changes the choice for an open file when `reconsider` says so.

    It looks first when `every` bytes were read. After a change it waits for twice as many as
    before, so that a varying workload does not make it change for ever. Thread-safe: if one thread
    looks, others do not wait for it.
    """

    def __init__(self, reserved_bytes: int, every: int) -> None:
        self._reserved = reserved_bytes
        self._every = every
        self._next = every
        self._total = 0
        self._rates: dict[bool, float] = {}
        self._lock = endings.Lock()
        self.changes: list[str] = []

    def look(self, file: _native.FileStorage) -> None:
        """If it is time, look at the reads, and change the choice if that pays."""
        if file.nbytes_noted >= self._next:
            _native.holding(self._lock, partial(self._look, file), False)

    def _look(self, file: _native.FileStorage) -> None:
        seen = ReadFigures(*file.read_figures())
        o_direct = bool(file.o_direct)
        if seen.in_order:
            self._rates[o_direct] = seen.bytes_per_s
        room = 0
        if seen.memory_decides(o_direct):
            # This look takes 0.2 ms, as long as copying a megabyte from the page cache.
            available = host_memory.available_bytes()
            room = room_for_pages(available, self._reserved, config.current())
        why = reconsider(o_direct, seen, room, self._rates)
        if why is None:
            self._next = seen.nbytes + self._every
            return
        self._total += seen.nbytes
        to = "the page cache" if o_direct else "O_DIRECT"
        self.changes.append(f"to {to} after {self._total} bytes read: {why}")
        _log.info("%s: %s", file.path, self.changes[-1])
        file.choose_direct(not o_direct)
        file.restart_figures()
        self._every *= 2
        self._next = self._every


# Collecting the facts.


@dataclass(frozen=True)
class Access:
    """How files may be opened."""

    writable: bool
    o_direct: bool | None
    device: Device
    lock: bool = True
    asks_in_place: bool = False
    """Whether a controller's settings ask for the file to be read in place."""
    immutable: bool = False


# Warps copy lines by words from where they lie, and by the byte if these are not aligned at all:
# over a link, that takes longer than the rings. Safetensors files begin their data so.
_WORD_BYTES = 8


def reach(
    source: Source,
    access: Access,
    host_bytes: Callable[[int], int],
    opened: contextlib.ExitStack,
) -> tuple[Namespace, str]:
    """Open the files of a source: all of them to be read in place, or none.

    The storages of `source` stay the caller's. `host_bytes` returns what of the host's memory the
    array's cache will take, for so many bytes in files. `opened` is empty, and closes what is
    opened. Returns the storage, and why its files were opened so, for people. Raises LockedError,
    MissingFileError or PathError.
    """
    files = [part for part in source.parts if isinstance(part, FilePart)]
    nbytes = sum(file.layout.nbytes for file in files)
    # All files together must fit the memory, so each reserves what the others take.
    reserved = host_bytes(nbytes) + nbytes if files else 0
    in_place = all(isinstance(part, FilePart | Memory) for part in source.parts)
    if isinstance(source.composite, Concatenated):
        # A thread of the CPU device would die of SIGBUS if one of the files were cut.
        in_place = in_place and access.device.kind == "cuda" and _words_stay_whole(source.parts)
    storages, why = _open_parts(source.parts, access, reserved, in_place, opened)
    opened_files = [s for s in storages if isinstance(s, File)]
    if len({s.mapping is None for s in opened_files}) > 1:
        refused = [s for s in opened_files if s.lease_refusal]
        opened.close()
        storages, why = _open_parts(source.parts, access, reserved, False, opened)
        if refused:
            name, refusal = refused[0].path, refused[0].lease_refusal
            why += f"; no file is read in place, because of {name}: {refusal}"
    if source.composite is None:
        return storages[0], why
    composite = source.composite.of([s for s in storages if isinstance(s, Storage)])
    opened.callback(composite.close)
    return composite, why


def _words_stay_whole(parts: Sequence[FilePart | Namespace]) -> bool:
    """Whether parts that follow one another begin at words."""
    sizes = [part.layout.nbytes if isinstance(part, FilePart) else part.nbytes for part in parts]
    return all(nbytes % _WORD_BYTES == 0 for nbytes in sizes[:-1])


def _open_parts(
    parts: tuple[FilePart | Namespace, ...],
    access: Access,
    reserved_bytes: int,
    in_place: bool,
    opened: contextlib.ExitStack,
) -> tuple[list[Namespace], str]:
    """Return a storage for each part, and why those that are opened here were opened so."""
    storages: list[Namespace] = []
    reasons = []
    for part in parts:
        if not isinstance(part, FilePart):
            storages.append(part)
            continue
        storage, why = file_storage(
            part,
            access,
            opened,
            in_place=in_place and part.layout.offset % _WORD_BYTES == 0,
            reserved_bytes=reserved_bytes - part.layout.nbytes,
        )
        if isinstance(storage, File) and part.layout.identity not in (None, storage.identity):
            raise PathError(
                errno.ESTALE, "was replaced while it was opened: open it again", part.path
            )
        storages.append(storage)
        reasons.append(why if len(parts) == 1 else f"{part.path}: {why}")
    return storages, "; ".join(reasons)


def file_storage(
    part: FilePart,
    access: Access,
    opened: contextlib.ExitStack,
    *,
    in_place: bool,
    reserved_bytes: int,
) -> tuple[Storage, str]:
    """Open a file: in place, through the page cache, or past it.

    Returns the storage, which `opened` closes, and why it was opened so.
    """
    path, layout = part.path, part.layout
    if layout.nbytes == 0:
        # There are no bytes. One block of memory stands in, so the rest needs no special case.
        return Memory(np.zeros(512, np.uint8), access.writable), "the array is empty"
    resident, mapping, notes = _residency(path, layout.offset, layout.nbytes)
    alignment = _native.direct_io_alignment(path) if access.o_direct is None else ""
    defaults = config.current()
    facts = FileFacts(
        nbytes=layout.nbytes,
        available_bytes=host_memory.available_bytes(),
        reserved_bytes=reserved_bytes,
        resident=resident,
        writable=access.writable,
        allocated_bytes=os.stat(path).st_blocks * 512,
        direct_refusal=alignment if isinstance(alignment, str) else "",
    )
    refusal = ""
    if mapping is not None:
        opened.callback(mapping.close)
        on_cpu = access.device.kind == "cpu"
        # On the CPU only on request: its rings copy what is in the page cache.
        wanted = access.asks_in_place if on_cpu else facts.is_cached(defaults)
        if in_place and wanted and not (access.writable or access.o_direct):
            found = _read_in_place(path, layout, mapping, access, facts.available_bytes)
            if isinstance(found, File):
                opened.callback(found.release_pinned)
                if found.lease is not None:
                    opened.callback(found.lease.close)
                opened.callback(found.close)
                return found, facts.share
            refusal = found
            notes += f"; it is not read in place, because {found}"
        mapping.close()
    choice = choose_o_direct(facts, defaults)
    if access.o_direct is not None:
        how = "O_DIRECT" if access.o_direct else "through the page cache"
        choice = Choice(access.o_direct, f"{how}, as asked for")
    kept = access.o_direct is not None or access.writable or bool(facts.direct_refusal)
    reviewed = not kept and defaults.review_bytes > 0
    storage = File(
        path,
        layout.offset,
        layout.nbytes,
        writable=access.writable,
        o_direct=choice.o_direct,
        lock=access.lock,
        _name=part.shown,
        _may_change=reviewed,
    )
    opened.callback(storage.close)
    storage.lease_refusal = refusal
    if reviewed:
        storage.review = ChoiceReview(reserved_bytes, defaults.review_bytes)
    return storage, choice.why + notes


def _read_in_place(
    path: str, layout: npy.Layout, mapping: Mapping, access: Access, available_bytes: int
) -> File | str:
    """Return the file behind a mapping, under a lease; or why it cannot be read in place."""
    with contextlib.ExitStack() as undo:
        lease = None
        release = None
        if access.device.kind == "cuda":
            budget = int(available_bytes * config.current().in_place_budget)
            release, others = host_memory.pinned_files.reserve(
                mapping.pages, mapping.nbytes, budget
            )
            if release is None:
                return (
                    f"its {mapping.nbytes} bytes, with {others} of other arrays, exceed the "
                    f"{budget} that may be pinned (in_place_budget)"
                )
            undo.callback(release)
        if not (access.immutable and access.device.kind == "cuda"):
            try:
                lease = Lease(path)
            except OSError as error:
                return f"there is no lease on it: {Lease.refusal(error)}"
            undo.callback(lease.close)
        storage = undo.enter_context(
            File(
                path, layout.offset, layout.nbytes, lock=access.lock, _mapping=mapping, _lease=lease
            )
        )
        if not mapping.identity == storage.identity == (lease or storage).identity:
            return "its path names another file than a moment ago"
        if release is not None:
            storage.release_pinned = release
        undo.pop_all()
        return storage


# A look at the pages of a larger file costs more than the answer is worth.
_RESIDENCY_BYTES_MAX = 64 << 30


def _residency(path: str, offset: int, nbytes: int) -> tuple[float | None, Mapping | None, str]:
    """Share of a range in the page cache, the mapping used to look, and why it is unknown."""
    if nbytes > _RESIDENCY_BYTES_MAX:
        return None, None, ""
    try:
        mapping = Mapping(Path(path), offset + nbytes, offset)
    except (OSError, ValueError) as error:
        _log.info("cannot map %s: %s", path, error)
        return None, None, ""
    try:
        return mapping.residency(), mapping, ""
    except OSError as error:  # a sandbox may refuse both ways to ask
        why = f"; how much of the file is in the page cache is unknown (mincore: {error})"
        return None, mapping, why
