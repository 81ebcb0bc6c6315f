"""Arrays of a client of a shared cache on a GPU, where the host asks the owner, and not kernels.

`HostClientAttachment` has the place of an array's attachment, and `HostClientLauncher` that of its
launcher, so that `Array` checks operands and keys as always. A gather launches the kernel that
copies what is resident, asks the owner for the lines that are not, and copies these out of what it
has answered: see `kernels/resident.cuh`. Nothing is retried, so every call ends.
"""

# `Attachment` and `Launcher` document the methods; a client does not need all arguments.
# ruff: noqa: ARG002
from __future__ import annotations

import ctypes
import os
import struct
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from flashwarp import _native, endings
from flashwarp.array.attachment import Attachment
from flashwarp.array.client import REASON, ROUTE, Asking
from flashwarp.array.stats import Stats
from flashwarp.cache.cache import Cache
from flashwarp.device import DeviceMemory
from flashwarp.device.layouts import fields_of
from flashwarp.errors import (
    BoundsError,
    DeviceError,
    FlashwarpError,
    SharedCacheError,
)
from flashwarp.launch.launcher import Verb
from flashwarp.launch.operands import Index, Operands
from flashwarp.launch.rows import (
    BYTES_WORTH_A_THREAD,
    RowFormat,
    RowPacking,
    RowParams,
    Which,
    host_indices,
)
from flashwarp.observing import counting
from flashwarp.policy import CLOCK
from flashwarp.sharing.connection import limit_s
from flashwarp.storage import npy

# Segments that one launch takes: the list of those that it misses has room for all.
_SEGMENTS_MAX = 1 << 16
_LANES = 32

# Lines that are fetched at a time, in so many bytes of memory on the GPU.
_FETCHED_BYTES = 4 << 20

# `cache::owner_operation`, and the status of a wait whose time was up.
_READ, _STORE, _PREFETCH = 1, 2, 3
_TIMED_OUT = 0x7FF

_MISSED = struct.Struct("=6Q")
_LISTED = np.dtype([("item", "<u8"), ("line", "<u8")])


class _Found(NamedTuple):
    """What a launch has found in the cache; mirror of `kernels::missed_pieces`."""

    missed: int
    hits: int
    nbytes: int
    strays: int
    stray: int
    reserved: int


class ClientParams(ctypes.Structure):
    """Mirror of `kernels::client_params`."""

    _fields_ = fields_of("client_params", rows=RowParams)


# The members of `ClientParams` behind `rows`.
_CLIENT_MEMBERS = struct.Struct("=6Q")
assert ctypes.sizeof(RowParams) + _CLIENT_MEMBERS.size == ctypes.sizeof(ClientParams)


class _Owners:
    """What only the owner of a shared cache has, but for some facts. Every other use raises."""

    def __init__(self, what: str, **facts: object) -> None:
        self._what = what
        self.__dict__.update(facts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise SharedCacheError(
            f"{self._what} ({name}) is the owner's, in its process: a client of a shared cache on "
            "a GPU reads by gather and keys, and stores by scatter and keys; kernels, streams and "
            "futures of clients have not run on a GPU yet, so they need arrays of the owner, or of "
            "a cache that is not shared"
        )


def _nothing(*_: object) -> None:
    """Stand for calls of the extension, and waits for asynchronous calls: there are none."""


class HostClientLauncher(_Owners):
    """Moves rows of one array of a client; see the module.

    Attributes
    ----------
    hits, misses, bytes_used : int
        Line accesses that found their line, those that asked the owner, and bytes for the caller.
    line_begin : int
        The array's first line number.
    """

    copies = None
    order = None

    def __init__(
        self,
        asking: Asking,
        format: RowFormat,  # noqa: A002
        line_bytes: int,
    ) -> None:
        super().__init__("a kernel's view of an array")
        self.format = format
        self.service = _Owners(
            "what serves an array",
            changes=0,
            route=ROUTE,
            reason=REASON,
            leased=False,
            in_place=0,
        )
        self.graphs = _native.CudaGraphs()
        self.hits = self.misses = self.bytes_used = 0
        self.stored = False  # since the last flush
        self._asking = asking
        self._client = client = asking.client
        self._device = client.device
        self._line = line_bytes
        self._packing = RowPacking(format, line_bytes, geometry=client.geometry)
        self._segments = self._packing.segments
        self._kernels = self._device.kernels_for(CLOCK)
        # A few lines at once, which leave the cache to others.
        self._at_once = max(1, min(_FETCHED_BYTES // line_bytes, client.facts.lines // 4))
        self._memory: list[DeviceMemory] = []
        self._missed = self._allocate(_MISSED.size)
        self._list = self._allocate(_SEGMENTS_MAX * _LISTED.itemsize)
        self._places = self._allocate(_SEGMENTS_MAX * 4)
        self._handed = self._allocate(self._at_once * line_bytes)
        self.line_begin = asking.line_begin

    def _allocate(self, nbytes: int) -> int:
        self._memory.append(self._device.allocate(nbytes))
        return self._memory[-1].address

    def _ask(self, operation: int, begins: Any, sizes: Any, memory: Any = None) -> None:
        """Ask the owner for moves of bytes that begin so far from the array's start, and wait."""
        begins = np.ascontiguousarray(begins, np.uint64) + self.line_begin * self._line
        sizes = np.ascontiguousarray(np.broadcast_to(sizes, begins.shape), np.uint64)
        address = 0 if memory is None else memory.ctypes.data
        limit_ns = int(limit_s() * 1e9)
        places = begins.ctypes.data, sizes.ctypes.data, len(begins)
        status = self._client.requests.move(operation, *places, address, limit_ns)
        if status == _TIMED_OUT:
            self._client.connection.check()
            self._client.connection.give_up()
            self._client.connection.check()
        if status:
            raise self._asking.why()

    # Reading.

    def move(
        self,
        verb: Verb,
        chosen: range | Index,
        buffer: int,
        stream: int | None = None,
        sms: int | None = None,
    ) -> None:
        """Move chosen rows, and return when they are there."""
        row = self.format.row_bytes
        if verb == "scatter":
            self._scatter(chosen, buffer, stream)
        elif isinstance(chosen, range):
            self._gather_bytes(chosen.start * row, len(chosen) * row, buffer, stream)
        elif self._segments > _SEGMENTS_MAX:
            for k, i in enumerate(self._host_rows(chosen, stream)):
                self._gather_bytes(int(i) * row, row, buffer + k * row, stream)
        else:
            self._gather_rows(chosen, buffer, stream)
        # What a hit has read is good only if the owner lived until then: another could have given
        # the file to another writer.
        self._client.connection.check()

    def _gather_rows(self, index: Index, buffer: int, stream: int | None) -> None:
        row, step = self.format.row_bytes, _SEGMENTS_MAX // self._segments
        for first in range(0, len(index), step):
            count = min(step, len(index) - first)
            indices = index.address + first * index.itemsize
            which = indices, count, index.itemsize, buffer + first * row, row
            self._gather(which, count * self._segments, stream)

    def _gather_bytes(self, begin: int, nbytes: int, buffer: int, stream: int | None) -> None:
        """Gather a range of the array."""
        step = (_SEGMENTS_MAX - 1) * self._line
        for first in range(0, nbytes, step):
            count = min(step, nbytes - first)
            which = 0, count, 0, buffer + first, begin + first
            self._gather(which, -(-count // self._line) + 1, stream)

    def _gather(self, which: Which, segments: int, stream: int | None) -> None:
        """Copy what is resident, and ask the owner for the rest."""
        found = self._copy_resident(which, segments, stream)
        self.hits += found.hits
        self.misses += found.missed
        if found.missed:
            found = self._fetch(found, which, segments, stream)
        self.bytes_used += found.nbytes
        if found.strays:
            bad = found.stray - (1 << 64) if found.stray >> 63 else found.stray
            raise BoundsError(
                f"{found.strays} indices are out of bounds for an axis of length "
                f"{self.format.row_count}, such as {bad}: their rows are zero"
            )

    def _copy_resident(self, which: Which, segments: int, stream: int | None) -> _Found:
        device = self._device
        device.clear(self._missed, _MISSED.size, stream)
        self._launch("gather_resident", which, segments, stream, (self._list, 0, 0))
        return _Found(*_MISSED.unpack(device.download(self._missed, _MISSED.size, stream)))

    def _fetch(self, found: _Found, which: Which, segments: int, stream: int | None) -> _Found:
        """Let the owner fetch the lines that are absent, and copy them."""
        listed, lines, place = self._listed(found.missed, stream)
        # So many lines are cheaper to look for once more in the cache than to take from the owner's
        # hands, unless they would evict each other before.
        if self._at_once < len(lines) <= self._client.facts.lines // 2:
            self._ask(_PREFETCH, lines * self._line, self._bytes_of(lines))
            found = self._copy_resident(which, segments, stream)
            if not found.missed:
                return found
            listed, lines, place = self._listed(found.missed, stream)
        self._take_handed(which, listed, lines, place, stream)
        return found

    def _bytes_of(self, lines: Any) -> Any:
        """Return how many bytes of the array lines have: the last one is partial."""
        left = np.uint64(self.format.nbytes) - lines * np.uint64(self._line)
        return np.minimum(left, np.uint64(self._line))

    def _listed(self, missed: int, stream: int | None) -> tuple[Any, Any, Any]:
        """Return the missed pieces by their lines, the lines, and each piece's place in these."""
        raw = self._device.download(self._list, missed * _LISTED.itemsize, stream)
        listed = np.frombuffer(raw, _LISTED)
        lines, place = np.unique(listed["line"], return_inverse=True)
        order = np.argsort(place, kind="stable")
        return listed[order], lines, place[order]

    def _take_handed(
        self, which: Which, listed: Any, lines: Any, place: Any, stream: int | None
    ) -> None:
        """Copy listed pieces out of what the owner hands over, so that nobody has to try again."""
        device = self._device
        device.upload(self._list, listed.view("u1"), stream)
        handed = np.empty(min(self._at_once, len(lines)) * self._line, np.uint8)
        for first in range(0, len(lines), self._at_once):
            part = lines[first : first + self._at_once]
            begin, end = (int(n) for n in np.searchsorted(place, (first, first + len(part))))
            self._ask(_READ, part * self._line, self._bytes_of(part), handed)
            device.upload(self._handed, handed[: len(part) * self._line], stream)
            places = (place[begin:end] - first).astype(np.uint32)
            device.upload(self._places, places, stream)
            pieces = self._list + begin * _LISTED.itemsize, self._places, end - begin
            self._launch("take_handed", which, end - begin, stream, pieces)
            device.wait(stream)

    def _launch(
        self, name: str, which: Which, items: int, stream: int | None, pieces: tuple[int, int, int]
    ) -> None:
        """Launch a kernel; `pieces` are the list, the places of its lines, and how many it has."""
        # A warp of a GPU copies one line after the other, so a few lines go to a warp each.
        bundle = min(_LANES, max(1, items // self._device.warps_at_once))
        on_cpu = self._device.kind == "cpu"
        each = max(1, BYTES_WORTH_A_THREAD // self._line) if on_cpu else bundle
        listed, *rest = pieces
        params = self._packing.pack(which, bundle)
        params += _CLIENT_MEMBERS.pack(self.line_begin, self._missed, listed, self._handed, *rest)
        # A power of two of warps, so that few launches are prepared.
        warps = 1 << (-(-items // each) - 1).bit_length()
        launch = self._kernels.launch_of(name, warps, len(params))
        client = self._client
        uses = (
            *(owner for each in self._memory for owner in each.owners),
            *client.metadata.owners,
            *client.frames.owners,
        )
        launch((params,), stream, uses)

    def _host_rows(self, index: Index, stream: int | None) -> npt.NDArray[np.int64]:
        """Copy indices to the host, all within bounds."""
        return host_indices(index.copy_from(self._device, stream), self.format.row_count)

    # Storing, and asking ahead.

    def _scatter(self, chosen: range | Index, buffer: int, stream: int | None) -> None:
        row = self.format.row_bytes
        self.stored = True
        if isinstance(chosen, range):
            self._store_bytes(chosen.start * row, len(chosen) * row, buffer, stream)
            return
        rows = self._host_rows(chosen, stream)
        if row > self._line:
            for k, i in enumerate(rows):
                self._store_bytes(int(i) * row, row, buffer + k * row, stream)
            return
        step = max(1, _FETCHED_BYTES // row)
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            self._store(part * row, row, buffer + first * row, stream)

    def _store_bytes(self, begin: int, nbytes: int, buffer: int, stream: int | None) -> None:
        """Store a range of bytes, cut where lines end."""
        for first in range(begin, begin + nbytes, _FETCHED_BYTES):
            end = min(first + _FETCHED_BYTES, begin + nbytes)
            cuts = np.arange(first // self._line + 1, -(-end // self._line)) * self._line
            begins = np.concatenate(([first], cuts))
            sizes = np.diff(begins, append=end)
            self._store(begins, sizes, buffer + first - begin, stream)

    def _store(self, begins: Any, sizes: Any, buffer: int, stream: int | None) -> None:
        nbytes = int(np.broadcast_to(sizes, begins.shape).sum())
        bytes_ = np.empty(nbytes, np.uint8)
        self._device.download_into(buffer, bytes_, stream)
        self._ask(_STORE, begins, sizes, bytes_)

    def prefetch(
        self,
        chosen: range | Index,
        stream: int | None = None,
    ) -> None:
        """Ask the owner to prefetch rows."""
        row = self.format.row_bytes
        if isinstance(chosen, range):
            self._ask(_PREFETCH, [chosen.start * row], len(chosen) * row)
            return
        self._ask(_PREFETCH, self._host_rows(chosen, stream) * row, row)

    def let_go(self) -> None:
        """Free its memory."""
        for each in self._memory:
            each.close()


class HostClientAttachment(Attachment):
    """An array of a client on a GPU; the parameters are those of `Asking`."""

    launcher: HostClientLauncher  # type: ignore[assignment]

    def __init__(self, cache: Cache, path: str, layout: npy.Layout, writable: bool) -> None:
        self._asking = asking = Asking(cache, path, layout, writable)
        client = asking.client
        self._cache = cache
        self._client = client
        facts = {"path": path, "closed": False}
        self.storage = _Owners("the storage of an array", **facts)  # type: ignore[assignment]
        self.controller = _Owners("the controller")  # type: ignore[assignment]
        self.writable = writable
        self.closed = False
        self.device = client.device
        self.opened_by = os.getpid()
        self.flush_failure = None
        self.dependents = []
        self._owns_cache = False
        self._streams: set[int] = set()
        format_ = RowFormat(layout.dtype, layout.shape)
        self.launcher = HostClientLauncher(asking, format_, cache.line_bytes)
        self.operands = Operands(client.device, format_, client.device)
        nothing = dict.fromkeys(("gather", "item", "prefetch", "shut"), _nothing)
        self.row_calls = _Owners("a call", changes=0, **nothing)  # type: ignore[assignment]
        nothing = dict.fromkeys(("raise_lost", "wait", "come_behind"), _nothing)
        self.calls = _Owners(  # type: ignore[assignment]
            "an asynchronous call or one on a stream", busy=False, **nothing
        )
        client.enter(self, [])
        self._counted = counting.enter(self.device, self._counts)
        endings.remember(self)

    @property
    def cache(self) -> Cache:
        """The client's cache."""
        return self._cache

    def stats(self, _: object = None) -> Stats:
        """Count what this client did; the owner counts commands and bytes from the storage."""
        own = self.launcher
        counts = dict.fromkeys(Stats.__dataclass_fields__, 0)
        counts |= {"hits": own.hits, "misses": own.misses}
        return Stats(**{**counts, "bytes_used": own.bytes_used})

    def _counts(self) -> dict[str, tuple[counting.Key, dict[str, int]]]:
        """Return the counters for `flashwarp top`."""
        return {"": (counting.Key("array", "shared"), vars(self.stats()))}

    def note(self) -> str:
        """Return for `explain` what protects the owner's memory."""
        return self._asking.note()

    # Calls have ended when they return, so there is nothing to wait for.

    def finish(self, what: str, stream: int | None) -> None:
        """Forget a stream: the call has waited for it."""
        if stream is not None:
            self._streams.discard(stream)

    def join(
        self,
        stream: int,
        *,
        refreshes: bool = False,
        uses: object = (),
    ) -> NoReturn:
        """Refuse calls on streams of the caller's, which would have to wait for the owner."""
        raise SharedCacheError(
            "a client of a shared cache waits for the owner within each call: leave stream= out"
        )

    def raise_noted(self) -> None:
        """Raise nothing: no kernel notes anything."""

    def check(self) -> None:
        """Raise OwnerLostError if the owner has gone."""
        self._client.connection.check()

    def reason_of(self, error: DeviceError) -> FlashwarpError:
        """Return `error`."""
        return error

    def refuse_graphs(self) -> None:
        """Refuse nothing: no CUDA graph has calls of the array."""

    # What the owner does.

    def flush(self) -> None:
        """Make all stores of all clients durable."""
        self._asking.ask("flush")
        self.launcher.stored = False

    def drop_lines(self, drop_dirty: bool) -> None:
        """Remove the array's lines from the owner's cache."""
        self._asking.ask("drop", dirty=int(drop_dirty))

    def refresh(self) -> None:
        """Remove the array's lines, and check that the file is unchanged."""
        self._asking.ask("refresh")

    # The end.

    def close(self) -> BaseException | None:
        """Leave the array to the owner, whose cache keeps its lines; return what failed."""
        if self.closed or self.in_child:
            self._set_closed()
            return None
        failures = endings.close_each(self.dependents)
        failure = endings.holding((self.cache.turn,), self._close_once)
        return endings.first_of([*failures, *([failure] if failure is not None else [])])

    def _close_once(self) -> BaseException | None:
        if self.closed:
            return None
        failure = endings.uninterrupted(self._leave)
        if self._owns_cache:
            self.cache.close()
        return failure

    def _leave(self) -> BaseException | None:
        self._counted.leave()
        failure = self._asking.close(self.launcher.stored)
        self._set_closed()
        self._client.leave(self)
        self.launcher.let_go()
        return failure

    def close_lost(self) -> None:
        """Close it in another thread: the garbage collector calls this in any."""
        self.cache.closings.start(self.close)
