"""Moves the bytes of versions: between the user's memory, cache tiers, and storage.

Host memory is copied by the calling thread, GPU memory by the copy engine on its own streams.
Memory that storage cannot read, or that the copy engine cannot reach, goes through pinned buffers
within a fixed budget. Nothing here decides anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from flashwarp import endings
from flashwarp.checkpoint import straight
from flashwarp.checkpoint.capture import Bytes
from flashwarp.checkpoint.directory import VersionReader, VersionWriter
from flashwarp.checkpoint.pieces import STORAGE_THREADS, Pieces
from flashwarp.checkpoint.region import Region
from flashwarp.checkpoint.straight import Part
from flashwarp.checkpoint.tier import Entry, Tier
from flashwarp.checkpoint.workers import Crew
from flashwarp.device import Device
from flashwarp.errors import ClosedError, DeviceError, StorageError
from flashwarp.transfer import LinkBandwidth

if TYPE_CHECKING:
    from flashwarp.transfer import Copy, CopyEngine, TransferBuffer, TransferClient

LINKS = ("within", "down", "up", "to storage", "from storage", "to remote")
"""Links whose bandwidth is measured: inside the device or host memory, from the GPU cache to the
host, back, and those of storage."""

_PIECE_BYTES = 16 << 20
"""Largest piece between two looks at whether a copy is still wanted."""

_STORED_BYTES = 4 << 20
"""Largest piece from and to storage. Readers take larger ones apart again."""

_LOAD_BYTES = 256 << 20
"""Of the host memory of the CPU device, which restores pass through on their way from a disk."""

_LINK_BYTES_MIN = 64 << 10
"""Smaller copies say more about the latency of a link than about its bandwidth."""


def _parts_of_block(tier: Tier, entry: Entry) -> list[Part]:
    base = tier.block(entry)
    return [
        Part(region, base + entry.offsets[region.name], tier.on_host, ())
        for region in entry.regions
    ]


def _parts_of_arrays(arrays: list[Bytes]) -> list[Part]:
    return [
        Part(each.region, each.address, not each.on_device, each.stream, each) for each in arrays
    ]


class Pending:
    """Copies that are queued on a GPU, or nothing to wait for."""

    def __init__(self, copies: list[Copy] | None = None) -> None:
        self._copies = copies or []

    def wait(self, timeout_s: float) -> None:
        """Block until all are over; raises what failed, or DeviceTimeout."""
        for copy in self._copies:
            copy.wait(timeout_s)

    def before(self, stream: object) -> None:
        """Make later work on a stream wait for them."""
        for copy in self._copies:
            copy.before(stream)

    def __bool__(self) -> bool:
        return bool(self._copies)


def host_view(address: int, nbytes: int) -> memoryview:
    """View host memory as writable bytes; whoever owns it must live longer."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def pieces(nbytes: int, most: int = _PIECE_BYTES) -> Iterator[tuple[int, int]]:
    """Cut bytes into pieces: offsets and sizes."""
    for offset in range(0, nbytes, most):
        yield offset, min(most, nbytes - offset)


class Mover(endings.Closing):
    """Copies of one checkpointer. Any thread may call.

    `staging_bytes` is the budget of pinned memory, used on GPUs alone; `timeout_s` limits each wait
    for a copy or a buffer.
    """

    def __init__(self, device: Device, staging_bytes: int, timeout_s: float) -> None:
        self.device = device
        self.timeout_s = timeout_s
        self.links = {name: LinkBandwidth(name) for name in LINKS}
        self.engine: CopyEngine | None = None
        self._staging: TransferClient | None = None
        self.crew = Crew("storage", endings.Lock(), STORAGE_THREADS)
        # A piece waits for a buffer and for its copy, whose errors come first.
        self._pieces = Pieces(self.crew, 3 * timeout_s)
        self._moved = endings.Lock()
        self._last_ns = dict.fromkeys(LINKS, 0)
        if device.kind == "cuda":
            from flashwarp.transfer import CopyEngine, Direction, TransferClient

            self.engine = CopyEngine(device)
            buffer_bytes = min(_PIECE_BYTES, staging_bytes // 2)
            self._staging = TransferClient(
                device, "checkpoints", staging_bytes, buffer_bytes, ahead=True
            )
            self._directions = {
                "within": Direction.WITHIN,
                "down": Direction.TO_HOST,
                "up": Direction.TO_DEVICE,
            }
            for name, direction in self._directions.items():
                self.links[name] = self.engine.bandwidth[direction]

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging memory that are allocated now."""
        return 0 if self._staging is None else self._staging.allocated_bytes

    # Between the user's memory and a tier.

    def capture(self, sources: list[Bytes], tier: Tier, entry: Entry) -> Pending:
        """Copy a user's arrays into a version's block, in the order of the user's streams."""
        base = tier.block(entry)
        copies: list[Copy] = []
        for source in sources:
            target = base + entry.offsets[source.region.name]
            nbytes = source.region.nbytes
            if source.on_device:
                copies += self._copies(target, source.address, nbytes, source.stream)
            else:
                self._host_to_tier(target, source.address, nbytes, tier.on_host)
        return Pending(copies)

    def deliver(self, tier: Tier, entry: Entry, targets: list[Bytes]) -> Pending:
        """Copy regions of a version's block into a user's arrays."""
        base = tier.block(entry)
        copies: list[Copy] = []
        for target in targets:
            source = base + entry.offsets[target.region.name]
            nbytes = target.region.nbytes
            if target.on_device:
                copies += self._copies(target.address, source, nbytes, target.stream)
            else:
                self._tier_to_host(target.address, source, target.region, tier.on_host)
        return Pending(copies)

    # Between tiers.

    def move(self, source: Tier, target: Tier, entry: Entry, wanted: Callable[[], bool]) -> bool:
        """Copy a block between tiers; return False if it was given up because it is not wanted."""
        link = "up" if source.on_host and not target.on_host else "down"
        if source.on_host == target.on_host:
            # On the CPU device both are host memory; the link is known by the order of the tiers.
            link = "down" if source.name == "gpu" else "up"
        from_block, to_block = source.block(entry), target.block(entry)
        for offset, size in pieces(entry.nbytes):
            if not wanted():
                return False
            self._between(to_block + offset, from_block + offset, size, link)
        return True

    def _between(self, target: int, source: int, nbytes: int, link: str) -> None:
        began_ns = time.monotonic_ns()
        if self.engine is None:
            self._host_copy(target, source, nbytes)
            self.moved(link, nbytes, began_ns)
        else:
            for copy in self._copies(target, source, nbytes, ()):
                copy.wait(self.timeout_s)

    # Between memory and storage.

    def store_block(
        self,
        tier: Tier,
        entry: Entry,
        writer: VersionWriter,
        wanted: Callable[[], bool],
        ending: Callable[[], None] = lambda: None,
    ) -> bool:
        """Write a block to storage; return False if it was given up because it is not wanted.

        `ending` is called when its last piece is on its way: the next version may begin.
        """
        return self._store(_parts_of_block(tier, entry), writer, wanted, ending)

    def store_arrays(self, sources: list[Bytes], writer: VersionWriter) -> None:
        """Write a user's arrays to storage."""
        self._store(_parts_of_arrays(sources), writer, lambda: True)

    def _store(
        self,
        parts: list[Part],
        writer: VersionWriter,
        wanted: Callable[[], bool],
        ending: Callable[[], None] = lambda: None,
    ) -> bool:
        began_ns = time.monotonic_ns()

        def store(part: Part, offset: int, size: int) -> None:
            with self._on_host(part, offset, size) as view:
                writer.write(part.region, offset, view)

        done = self._pieces.move(self._jobs(parts, store), wanted, ending)
        if done:
            self.moved("to storage", sum(part.region.nbytes for part in parts), began_ns)
        return done

    def _jobs(
        self, parts: list[Part], act: Callable[[Part, int, int], None]
    ) -> Iterator[tuple[int, Callable[[], None]]]:
        for part in parts:
            most = min(_STORED_BYTES, self._piece_bytes(part.on_host))
            for offset, size in pieces(part.region.nbytes, most):
                yield size, partial(act, part, offset, size)

    @contextlib.contextmanager
    def _on_host(self, part: Part, offset: int, size: int) -> Iterator[memoryview]:
        """View bytes, after a copy to a staging buffer if the host cannot touch them.

        Whoever holds a buffer waits for no other one: two who did would wait for each other.
        """
        if part.on_host:
            yield host_view(part.address + offset, size)
            return
        assert self._staging is not None
        with _lent(self._staging, self.timeout_s) as buffer:
            for copy in self._copies(buffer, part.address + offset, size, part.after):
                copy.wait(self.timeout_s)
            yield host_view(buffer.address, size)

    def load_block(
        self,
        tier: Tier,
        entry: Entry,
        reader: VersionReader,
        wanted: Callable[[], bool],
        ending: Callable[[], None] = lambda: None,
    ) -> bool:
        """Read a version from storage into its block; as `store_block`."""
        return self._load(_parts_of_block(tier, entry), reader, wanted, ending)

    def load_arrays(
        self, reader: VersionReader, targets: list[Bytes], wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Read regions from storage into a user's arrays, as long as they are wanted."""
        parts = _parts_of_arrays(targets)
        filled: list[tuple[str, int]] = []
        nbytes = sum(part.region.nbytes for part in parts)
        try:
            if reader.descriptor < 0 or nbytes < straight.LEAST_BYTES:
                self._load(parts, reader, wanted, filled=filled)
            else:
                self._load_straight(parts, nbytes, reader, wanted, filled)
        except BaseException as error:
            if isinstance(error, DeviceError):
                filled.clear()  # what was read may not have arrived
            error.add_note(_described(parts, filled))
            raise

    def _load_straight(
        self,
        parts: list[Part],
        nbytes: int,
        reader: VersionReader,
        wanted: Callable[[], bool],
        filled: list[tuple[str, int]],
    ) -> None:
        began_ns = time.monotonic_ns()
        staging = _LOAD_BYTES if self._staging is None else self._staging.budget_bytes
        try:
            done = straight.read_straight(
                reader, parts, self.device, staging, self.timeout_s, wanted, filled
            )
        except StorageError as error:
            if error.errno == errno.ETIMEDOUT:
                # The read that does not end may still write to the arrays.
                with self.crew.lock:
                    self.crew.broken(error)
            raise
        if done:
            self.moved("from storage", nbytes, began_ns)

    def _load(
        self,
        parts: list[Part],
        reader: VersionReader,
        wanted: Callable[[], bool],
        ending: Callable[[], None] = lambda: None,
        filled: list[tuple[str, int]] | None = None,
    ) -> bool:
        began_ns = time.monotonic_ns()

        def load(part: Part, offset: int, size: int) -> None:
            fill(part, offset, size)
            if filled is not None:
                filled.append((part.region.name, size))

        def fill(part: Part, offset: int, size: int) -> None:
            if part.on_host:
                reader.read_into(part.region, offset, host_view(part.address + offset, size))
                return
            assert self._staging is not None
            with _lent(self._staging, self.timeout_s) as buffer:
                reader.read_into(part.region, offset, host_view(buffer.address, size))
                for copy in self._copies(part.address + offset, buffer, size, part.after):
                    copy.wait(self.timeout_s)

        done = self._pieces.move(self._jobs(parts, load), wanted, ending)
        if done:
            self.moved("from storage", sum(part.region.nbytes for part in parts), began_ns)
        return done

    def copy_stored(
        self, entry: Entry, reader: VersionReader, writer: VersionWriter, wanted: Callable[[], bool]
    ) -> bool:
        """Copy a stored version to another store; returns as `store_block`."""
        scratch = bytearray(min(_PIECE_BYTES, max(each.nbytes for each in entry.regions) or 1))
        for region in entry.regions:
            for offset, size in pieces(region.nbytes):
                if not wanted():
                    return False
                view = memoryview(scratch)[:size]
                began_ns = time.monotonic_ns()
                reader.read_into(region, offset, view)
                writer.write(region, offset, view)
                self.moved("to remote", size, began_ns)
        return True

    # The ways that bytes go.

    def moved(self, link: str, nbytes: int, began_ns: int) -> None:
        """Measure a link by a transfer that was made. On GPUs the copy engine measures its own.

        Transfers at the same time share the link: each counts the time since the end of another.
        """
        if nbytes >= _LINK_BYTES_MIN:
            with self._moved:
                began_ns = max(began_ns, self._last_ns[link])
                self._last_ns[link] = time.monotonic_ns()
                self.links[link].record(nbytes, max(self._last_ns[link] - began_ns, 1))

    def _host_copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def _copies(self, target: object, source: object, nbytes: int, after: object) -> list[Copy]:
        if not nbytes:
            return []
        if self.engine is None:
            raise ClosedError("the copy engine was closed")
        return [self.engine.copy(target, source, nbytes, after=after)]

    def _host_to_tier(self, target: int, source: int, nbytes: int, on_host: bool) -> None:
        for offset, size in pieces(nbytes, self._piece_bytes(on_host)):
            began_ns = time.monotonic_ns()
            if on_host:
                self._host_copy(target + offset, source + offset, size)
                self.moved("within", size, began_ns)
                continue
            assert self._staging is not None
            with _lent(self._staging, self.timeout_s) as buffer:
                self._host_copy(buffer.address, source + offset, size)
                self._copies(target + offset, buffer, size, ())[0].wait(self.timeout_s)

    def _tier_to_host(self, target: int, source: int, region: Region, on_host: bool) -> None:
        if on_host:
            for offset, size in pieces(region.nbytes):
                began_ns = time.monotonic_ns()
                self._host_copy(target + offset, source + offset, size)
                self.moved("within", size, began_ns)
            return

        def fetch(part: Part, offset: int, size: int) -> None:
            with self._on_host(part, offset, size) as view:
                host_view(target + offset, size)[:] = view

        part = Part(region, source, False, ())
        self._pieces.move(self._jobs([part], fetch), lambda: True)

    def _piece_bytes(self, on_host: bool) -> int:
        return _PIECE_BYTES if on_host or self._staging is None else self._staging.buffer_bytes

    def close(self) -> None:
        """Wait for copies, and free the staging memory. May be called twice."""
        self.crew.stop()
        self.crew.join(self.timeout_s)
        if self._staging is not None:
            self._staging.close()
        if self.engine is not None:
            self.engine.close(self.timeout_s)


def _described(parts: list[Part], filled: list[tuple[str, int]]) -> str:
    """Say which regions a load that failed has filled."""
    left = {part.region.name: part.region.nbytes for part in parts}
    for name, nbytes in filled:
        left[name] -= nbytes
    whole = [repr(name) for name, nbytes in left.items() if not nbytes]
    torn = [repr(name) for name, nbytes in left.items() if nbytes]
    return (
        f"of the arrays to restore, those of {', '.join(whole) or 'no region'} are filled as "
        f"stored, and the contents of those of {', '.join(torn) or 'no region'} are undefined"
    )


@contextlib.contextmanager
def _lent(staging: TransferClient, timeout_s: float) -> Iterator[TransferBuffer]:
    buffer = staging.take(timeout_s=timeout_s)
    try:
        yield buffer
    finally:
        buffer.release()
