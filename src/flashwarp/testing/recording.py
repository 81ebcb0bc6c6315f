"""What a power cut may leave behind: a record of changes, and the images that it allows.

The model is that of a drive with a volatile cache and sectors of 512 bytes that are written whole
or not at all. Between two flushes each sector may hold what was durable or any later write of it,
whatever its neighbours hold: writes may be lost, reordered and torn, but a sector never goes back
behind a flush, and no bytes appear that nobody wrote.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from flashwarp import _native
from flashwarp.config import parse_bytes
from flashwarp.storage import Storage

SECTOR_BYTES = 512


@dataclass(frozen=True)
class Event:
    """One change of a recorded storage.

    Attributes
    ----------
    kind : str
        "write", "discard", "write_zeroes", "flush", "flush_range" (a write with FUA) or "mark".
    failed : bool
        It raised; of a failed write anything may have landed, and nothing is durable.
    begin, end : int
        When, in ticks: what ended before a flush began is durable when the flush has ended.
    offset, nbytes : int
        Which bytes; `offset` of a mark is its label.
    data : bytes
        Of a write.
    """

    kind: str
    failed: bool
    begin: int
    end: int
    offset: int
    nbytes: int
    data: bytes


@dataclass(frozen=True)
class CrashState:
    """What a power cut left.

    Attributes
    ----------
    image : bytes
        The whole storage.
    mark : int
        Label of the last mark before the cut, 0 when there was none.
    position : int
        The cut came before this event of the record.
    """

    image: bytes
    mark: int
    position: int


class Recording(Storage):
    r"""A storage that keeps every change with its bytes and its order, around another.

    Parameters
    ----------
    storage : Storage
        Where the bytes are. Its present content, copied here, is taken as durable.
    capacity : int or str
        Most bytes of writes that are kept; further writes fail with ENOMEM.

    Notes
    -----
    Thread-safe; changes are made one at a time. Everything is copied, so use it on small storages.

    Examples
    --------
    >>> from flashwarp.storage import Memory
    >>> from flashwarp.testing import Recording
    >>> storage = Recording(Memory(1024))
    >>> storage.write(0, b"a" * 1024)
    >>> sorted({(s.image[:1], s.image[512:513]) for s in storage.crash_states()})
    [(b'\x00', b'\x00'), (b'\x00', b'a'), (b'a', b'\x00'), (b'a', b'a')]
    """

    def __init__(self, storage: Storage, capacity: int | str = "256 MiB") -> None:
        self.inner = storage
        self._initial = storage.read(0, storage.nbytes)
        super().__init__(_native.RecordingStorage(storage.native, parse_bytes(capacity)))

    @property
    def path(self) -> str | None:
        """The file behind it, when there is one."""
        return self.inner.path

    @property
    def native(self) -> _native.RecordingStorage:
        """The C++ storage, for the controller; ClosedError after `close`."""
        return cast("_native.RecordingStorage", super().native)

    @property
    def initial(self) -> bytes:
        """The content at the beginning of the record."""
        return self._initial

    @property
    def events(self) -> list[Event]:
        """A copy of the record, oldest first."""
        return [Event(*fields) for fields in self.native.events()]

    def mark(self, label: int) -> None:
        """Note in the record that the caller has come so far, such as "version `label` is safe"."""
        self.native.mark(label)

    def restart(self) -> None:
        """Forget the record; what the storage holds now counts as durable. Nobody may write."""
        self._initial = self.inner.read(0, self.nbytes)
        self.native.clear()

    def crash_states(self, limit: int = 256, seed: int = 0) -> Iterator[CrashState]:
        """Yield different images that a power cut may leave, at any point of the record.

        Parameters
        ----------
        limit : int
            Most images. When all of them are fewer, all are yielded.
        seed : int
            Chooses among more: nothing, everything; then for one half prefixes in order, single
            writes alone or missing; for the other half whatever the model allows.
        """
        return crash_states(self._initial, self.events, limit, seed)


def crash_states(
    initial: bytes, events: Sequence[Event], limit: int = 256, seed: int = 0
) -> Iterator[CrashState]:
    """Yield what a power cut may leave of `initial` and `events`; see `Recording.crash_states`."""
    chooser = random.Random(seed)
    cuts = _cuts(initial, events)
    seen: set[tuple[int, bytes]] = set()
    for i, cut in enumerate(cuts):
        # What earlier cuts have left over is shared by the later ones.
        share = (limit - len(seen)) // (len(cuts) - i)
        found = 0
        for choice in cut.choices(share, chooser):
            if found >= share:
                break
            image = cut.image(choice)
            if (cut.mark, image) in seen:
                continue
            seen.add((cut.mark, image))
            found += 1
            yield CrashState(image, cut.mark, cut.position)


# What one sector may hold instead of the durable content: (number of the event, content).
_Version = tuple[int, bytes]


@dataclass(frozen=True)
class _Cut:
    """The state of the medium at a point in time: what is durable, and what may be there."""

    durable: bytes
    versions: dict[int, tuple[_Version, ...]]
    mark: int
    position: int

    def choices(self, share: int, chooser: random.Random) -> Iterator[dict[int, int]]:
        """Which version each sector holds: a number, 0 for the durable one, which is left out."""
        sectors = sorted(self.versions)
        total = 1
        for sector in sectors:
            total *= 1 + len(self.versions[sector])
            if total > share:
                break
        if total <= share:
            for numbers in itertools.product(
                *(range(1 + len(self.versions[sector])) for sector in sectors)
            ):
                yield dict(zip(sectors, numbers, strict=True))
            return
        yield {}
        yield {sector: len(self.versions[sector]) for sector in sectors}
        telling = list(self._telling_choices(sectors))
        yield from chooser.sample(telling, min(len(telling), share // 2))
        # A bound: where versions repeat each other there may be fewer images than `share`.
        for _ in range(8 * share):
            density = chooser.random()
            yield {
                sector: chooser.randint(1, len(self.versions[sector]))
                for sector in sectors
                if chooser.random() < density
            }

    def _telling_choices(self, sectors: list[int]) -> Iterator[dict[int, int]]:
        writes = sorted({number for found in self.versions.values() for number, _ in found})
        newest = {sector: len(self.versions[sector]) for sector in sectors}
        for write in writes:
            alone = {}
            before = {}
            for sector in sectors:
                numbers = [number for number, _ in self.versions[sector]]
                before[sector] = sum(number <= write for number in numbers)
                if write in numbers:
                    alone[sector] = 1 + numbers.index(write)
            yield before
            yield alone
            yield {sector: n for sector, n in newest.items() if sector not in alone}

    def image(self, choice: dict[int, int]) -> bytes:
        result = bytearray(self.durable)
        for sector, number in choice.items():
            if number:
                content = self.versions[sector][number - 1][1]
                result[sector * SECTOR_BYTES : sector * SECTOR_BYTES + len(content)] = content
        return bytes(result)


class _Medium:
    """Replays a record. Each sector has a durable content and the versions written after it."""

    def __init__(self, initial: bytes) -> None:
        self.durable = bytearray(initial)
        self.current = bytearray(initial)
        # (event number, when it ended or None for never durable, content)
        self.versions: dict[int, list[tuple[int, int | None, bytes]]] = {}

    def change(self, number: int, event: Event) -> None:
        data = event.data if event.kind == "write" else bytes(event.nbytes)
        begin, end = event.offset, event.offset + len(data)
        self.current[begin:end] = data
        for sector in range(begin // SECTOR_BYTES, -(-end // SECTOR_BYTES)):
            place = slice(sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES)
            content = bytes(self.current[place])
            ended = None if event.failed else event.end
            self.versions.setdefault(sector, []).append((number, ended, content))

    def flush(self, event: Event) -> None:
        sectors = list(self.versions)
        if event.kind == "flush_range":
            first = event.offset // SECTOR_BYTES
            last = -(-(event.offset + event.nbytes) // SECTOR_BYTES)
            sectors = [sector for sector in sectors if first <= sector < last]
        for sector in sectors:
            versions = self.versions[sector]
            safe = [i for i, (_, end, _) in enumerate(versions) if end is not None]
            safe = [i for i in safe if (versions[i][1] or 0) < event.begin]
            if not safe:
                continue
            content = versions[safe[-1]][2]
            start = sector * SECTOR_BYTES
            self.durable[start : start + len(content)] = content
            self.versions[sector] = versions[safe[-1] + 1 :]
            if not self.versions[sector]:
                del self.versions[sector]

    def fail_flush(self) -> None:
        """Forget when writes ended: a kernel reports lost writes once, and never tries again."""
        for versions in self.versions.values():
            versions[:] = [(number, None, content) for number, _, content in versions]

    def cut(self, mark: int, position: int) -> _Cut:
        versions = {
            sector: tuple((number, content) for number, _, content in found)
            for sector, found in self.versions.items()
        }
        return _Cut(bytes(self.durable), versions, mark, position)


def _cuts(initial: bytes, events: Sequence[Event]) -> list[_Cut]:
    """The points of a record at which most may be lost: before each flush, mark, and the end.

    Between these, every image that an earlier point allows is allowed by the later one too.
    """
    medium = _Medium(initial)
    mark = 0
    changed = True
    cuts = []
    for number, event in enumerate(events):
        if event.kind in ("write", "discard", "write_zeroes"):
            medium.change(number, event)
            changed = True
            continue
        if changed:
            cuts.append(medium.cut(mark, number))
        changed = False
        if event.kind == "mark":
            mark = event.offset
            changed = True
        elif event.failed:
            medium.fail_flush()
        else:
            medium.flush(event)
    if changed:
        cuts.append(medium.cut(mark, len(events)))
    return cuts
