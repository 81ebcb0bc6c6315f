"""The memory of NVMe queue pairs: rings and doorbells on the host's side, slots on the device's.

Mirrors `nvme/queue_pair.cuh`. Allocated when an array opens, freed after its controller
has stopped.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from flashwarp import _native, endings
from flashwarp.device import Device
from flashwarp.device.layouts import fields_of, size_of
from flashwarp.device.memory import DeviceMemory, OwnedStream, align_up
from flashwarp.endings import NotCopied
from flashwarp.transfer import pool_of

Route = Literal["in_place", "bounce", "direct"]
ROUTES: tuple[Route, ...] = get_args(Route)
"""Names of `nvme::route`, by value."""

_SQE_BYTES = 64
_CQE_BYTES = 16
_DETACHED_BYTES = size_of("detached_command")
# Doorbells lie a cache line apart (CAP.DSTRD = 4), so that two queues' writers never share one.
_DOORBELL_STRIDE = 64


class TransportStruct(ctypes.Structure):
    """Mirror of `nvme::transport`."""

    _fields_ = fields_of("transport")


class QueuePairStruct(ctypes.Structure):
    """Mirror of `nvme::queue_pair`."""

    _fields_ = fields_of("queue_pair", data=TransportStruct)


class NamespacePart(NamedTuple):
    """Mirror of `nvme::namespace_part`."""

    end: int  # the byte of the namespace behind its last
    base: int  # where its first byte lies, less that byte's number in the namespace; modulo 2^64

    @staticmethod
    def table(parts: Sequence[NamespacePart]) -> bytes:
        """Return the parts of a namespace as device code has them."""
        return b"".join(_PART.pack(*part) for part in parts)


_PART = struct.Struct("=2Q")


class DriveAddressingStruct(ctypes.Structure):
    """Mirror of `nvme::drive_addressing`."""

    _fields_ = fields_of("drive_addressing")


class DriveSide(NamedTuple):
    """What queue pairs that a drive serves have of it, in the place of words in memory."""

    ids: tuple[int, ...]
    """The drive's numbers of the queue pairs."""
    doorbells: tuple[tuple[int, int], ...]
    """Device addresses of the registers for the tail of each SQ and the head of each CQ."""
    rings_on_device: bool = False
    """Whether the rings lie in device memory, which the drive then reaches."""


# `nvme::doorbell_kind`.
_DOORBELL_REGISTER = 1
# A drive's ring begins on a page.
_RING_ALIGNMENT = 4096


class LeaseStruct(ctypes.Structure):
    """Mirror of `cache::lease`."""

    _fields_ = fields_of("lease")


class Epoch(NotCopied):
    """How often other programs may have changed what an array reads, for its kernels.

    Kernels that begin after `advance` drop what was cached before; see `cache/lease.cuh`.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = device.allocate(ctypes.sizeof(LeaseStruct))
        self.address = self._memory.address
        self.owners = self._memory.owners
        self._value = 0

    def advance(self, stream: Any) -> None:
        """Begin the next epoch. `stream` is idle, and no kernel runs on it."""
        self._value += 1
        word = (self._value & 0xFFFFFFFF).to_bytes(4, "little")
        place = self.address + LeaseStruct.epoch.offset
        self._device.upload(place, word, stream)

    def close(self) -> None:
        """Free the memory. May be called twice."""
        self._memory.close()


class QueueCounters(NamedTuple):
    """Sums over the queue pairs of one controller."""

    commands: int
    doorbells: int
    helps: int


class Transfers(NamedTuple):
    """How the commands of queue pairs move their data."""

    route: str  # one of `ROUTES`
    mapped_base: int = 0  # "in_place": device address of the namespace
    buffer_bytes: int = 0  # "bounce", or `leased`: size of one slot's buffer
    leased: bool = False  # "in_place": whether `leave_in_place` and `advance_epoch` may be called
    # "in_place": whether kernels read, and write, the namespace without commands.
    plain_reads: bool = False
    plain_writes: bool = False
    # "in_place": the device addresses at which kernels read the namespace without commands, if it
    # has no one address.
    parts: Sequence[NamespacePart] = ()
    # "direct": whether threads of the CPU device copy what is in the page cache without commands.
    cached_reads: bool = False


class QueuePairs(NotCopied):
    """`count` queue pairs of `depth` entries, ready for a controller and for kernels.

    `depth` is a power of two, 2 to 32768. `timeout_s` limits every wait of the device code. A
    `drive` serves the pairs once `address_for_drive` was called; without it threads do, which read
    doorbells in memory.
    """

    def __init__(
        self,
        device: Device,
        count: int,
        depth: int,
        transfers: Transfers,
        timeout_s: float,
        drive: DriveSide | None = None,
    ) -> None:
        self.device = device
        self.count = count
        self.depth = depth
        self.route = transfers.route
        parts, buffer_bytes = transfers.parts, transfers.buffer_bytes
        self._buffers = (
            pool_of(device).reserve(
                "slots of queue pairs", count * depth * buffer_bytes, max(4096, buffer_bytes)
            )
            if transfers.route == "bounce" or transfers.leased
            else None
        )
        sq_bytes, cq_bytes = self._allocate_rings(drive)
        sq, _ = self.ring_region
        cq = sq + count * sq_bytes
        doorbells = cq + count * cq_bytes
        pair_bytes = ctypes.sizeof(QueuePairStruct)
        pairs_bytes = count * (pair_bytes + depth * (8 + _DETACHED_BYTES))
        drive_place = pairs_bytes + len(parts) * _PART.size
        drive_bytes = 0 if drive is None else ctypes.sizeof(DriveAddressingStruct)
        self._memory = device.allocate(drive_place + drive_bytes)
        self._extents: DeviceMemory | None = None
        self._epoch = self._own_epoch = Epoch(device) if transfers.leased else None
        # The lease's keeper may come while the structs move into a table.
        self._lock = endings.Lock()
        self.address = self._memory.address
        # What wants to know where the structs lie, called when they have moved.
        self.moved: Callable[[], None] = lambda: None
        # A drive goes on while the process is stopped, so only the clock ends waits for it.
        self.heartbeat = doorbells + 2 * count * _DOORBELL_STRIDE if drive is None else 0
        if drive is None and device.kind == "cpu":
            self.heartbeat = _native.shared_heartbeat()
        detached = self.address + count * pair_bytes
        slots = detached + count * depth * _DETACHED_BYTES
        same = QueuePairStruct(
            data=TransportStruct(
                mapped_base=transfers.mapped_base,
                buffer_stride=buffer_bytes,
                timeout_ns=int(timeout_s * 1e9),
                path=ROUTES.index(transfers.route),
                leased=transfers.leased,
                heartbeat=self.heartbeat,
            ),
            plain_reads=transfers.plain_reads,
            plain_writes=transfers.plain_writes,
            cached_reads=transfers.cached_reads,
            parts=self.address + pairs_bytes if parts else 0,
            part_count=len(parts),
            depth_log2=depth.bit_length() - 1,
        )
        self._structs = (QueuePairStruct * count)(*[same] * count)
        for i, pair in enumerate(self._structs):
            pair.sq = sq + i * sq_bytes
            pair.cq = cq + i * cq_bytes
            pair.sq_doorbell = doorbells + 2 * i * _DOORBELL_STRIDE
            pair.cq_doorbell = pair.sq_doorbell + _DOORBELL_STRIDE
            pair.id = i + 1
            if drive is not None:
                pair.sq_doorbell, pair.cq_doorbell = drive.doorbells[i]
                pair.doorbell_kind = _DOORBELL_REGISTER
                pair.drive = self.address + drive_place
                pair.id = drive.ids[i]
            pair.slots = slots + i * depth * 8
            pair.detached = detached + i * depth * _DETACHED_BYTES
            if self._buffers is not None:
                pair.data.buffers = self._buffers.address + i * depth * buffer_bytes
        own = ("sq", "cq", "sq_doorbell", "cq_doorbell", "id")
        self.native = [
            _native.QueuePair(
                **{name: getattr(pair, name) for name in own}, depth=depth, heartbeat=self.heartbeat
            )
            for pair in self._structs
        ]
        device.upload(self.address, bytes(self._structs))
        if parts:
            device.upload(self.address + pairs_bytes, NamespacePart.table(parts))
        self._drive_place = self.address + drive_place

    def _allocate_rings(self, drive: DriveSide | None) -> tuple[int, int]:
        """Allocate rings and doorbells; return the bytes of a submission and a completion queue."""
        unit = 1 if drive is None else _RING_ALIGNMENT
        sq_bytes = align_up(self.depth * _SQE_BYTES, unit)
        cq_bytes = align_up(self.depth * _CQE_BYTES, unit)
        # Behind the doorbells, one more word shows a GPU's kernels that the process runs.
        ring_bytes = self.count * (sq_bytes + cq_bytes + 2 * _DOORBELL_STRIDE) + _DOORBELL_STRIDE
        if drive is not None and drive.rings_on_device:
            # Whole pages are exported: the last one is ours, too.
            self._rings = self.device.allocate(align_up(ring_bytes, unit) + _RING_ALIGNMENT)
        else:
            self._rings = self.device.allocate_host(ring_bytes)
        # Address and size of the memory in which the rings lie.
        self.ring_region = align_up(self._rings.address, unit), ring_bytes
        return sq_bytes, cq_bytes

    def address_for_drive(
        self, addressing: DriveAddressingStruct, extents: Sequence[NamespacePart] = ()
    ) -> None:
        """Tell kernels how the drive names blocks and memory; once, before any kernel has run.

        `extents` say where the namespace's bytes lie on the drive; without them, where they count.
        """
        if extents:
            table = NamespacePart.table(extents)
            self._extents = self.device.allocate(len(table))
            self.device.upload(self._extents.address, table)
            addressing.extents, addressing.extent_count = self._extents.address, len(extents)
        self.device.upload(self._drive_place, bytes(addressing))

    def move_to(self, address: int, epoch: Epoch | None) -> None:
        """Move the structs that kernels use, and share an epoch; before any kernel has used them.

        The caller closes the epoch, after the controllers have stopped.
        """
        with self._lock:
            self.address = address
            self.device.upload(address, bytes(self._structs))
            if self._epoch is not None:
                self._epoch = epoch
        self.moved()

    @property
    def leased(self) -> bool:
        """Whether the host may leave the in-place route."""
        return self._epoch is not None

    def leave_in_place(self, stream: Any) -> None:
        """Send commands that are submitted from now on through the slots' buffers.

        Kernels may run at the same time. After this call, none of them uses data that it then loads
        from the namespace's own address. `stream` is idle, and no kernel runs on it.
        """
        route = ROUTES.index("bounce")
        place = QueuePairStruct.data.offset + TransportStruct.path.offset
        with self._lock:
            for i, pair in enumerate(self._structs):
                pair.data.path = route
                address = self.address + i * ctypes.sizeof(QueuePairStruct) + place
                self.device.upload(address, route.to_bytes(4, "little"), stream)
            self.route = "bounce"

    def advance_epoch(self, stream: Any) -> None:
        """Let kernels that begin from now on drop what was cached before; see `Epoch.advance`."""
        with self._lock:
            if self._epoch is not None:
                self._epoch.advance(stream)

    def volume_fields(self) -> dict[str, Any]:
        """Return what a volume must know beyond `address`, `count` and `route`."""
        return {} if self._epoch is None else {"lease": self._epoch.address}

    @property
    def failed(self) -> bool:
        """Whether a wait for one of the pairs ran out of time."""
        return any(pair.failed for pair in self._download())

    @property
    def unanswered(self) -> bool:
        """Whether a command of device code has no completion."""
        return any(pair.head != pair.ticket for pair in self._download())

    @property
    def owners(self) -> tuple[object, ...]:
        """What holds the memory; see `DeviceMemory.owners`."""
        parts = (self._rings, self._memory, self._buffers, self._extents, self._own_epoch)
        return tuple(owner for part in parts if part is not None for owner in part.owners)

    @property
    def failed_words(self) -> list[int]:
        """Device addresses of the words that end all waits for a pair; see `queue_pair::failed`."""
        step, place = ctypes.sizeof(QueuePairStruct), QueuePairStruct.failed.offset
        return [self.address + i * step + place for i in range(self.count)]

    @property
    def buffer_regions(self) -> list[tuple[int, int]]:
        """Address and size of the slots' buffers, if any, for the controller's transfers."""
        return [] if self._buffers is None else [(self._buffers.address, self._buffers.nbytes)]

    def counters(self, stream: OwnedStream | None = None) -> QueueCounters:
        """Read the counters; the snapshot is not atomic over the pairs."""
        each = [(pair.ticket, pair.doorbells, pair.helps) for pair in self._download(stream)]
        return QueueCounters(*map(sum, zip(*each, strict=True)))

    def close(self) -> None:
        """Free the memory; the controller must have stopped. May be called twice."""
        self._memory.close()
        self._rings.close()
        if self._buffers is not None:
            self._buffers.close()
        if self._extents is not None:
            self._extents.close()
        if self._own_epoch is not None:
            self._own_epoch.close()

    def _download(self, stream: OwnedStream | None = None) -> list[QueuePairStruct]:
        nbytes = self.count * ctypes.sizeof(QueuePairStruct)
        data = self.device.download(self.address, nbytes, stream)
        return list((QueuePairStruct * self.count).from_buffer_copy(data))


class QueueTable:
    """The queue pairs of several controllers as one table, for one volume.

    `members` are those of each controller, in the order of the namespaces; their controllers close
    them. `fields` of the volume say how its lines lie on the namespaces.
    """

    def __init__(
        self, device: Device, members: Sequence[QueuePairs], fields: dict[str, Any]
    ) -> None:
        self.members = tuple(members)
        self.count = sum(pairs.count for pairs in members)
        self.depth = min(pairs.depth for pairs in members)
        self.route = members[0].route
        self._fields = fields
        pair_bytes = ctypes.sizeof(QueuePairStruct)
        self._memory = device.allocate(self.count * pair_bytes)
        self.address = self._memory.address
        # One for all, since kernels look at one word.
        self._epoch = Epoch(device) if any(pairs.leased for pairs in members) else None
        self.spans = []
        first = 0
        for pairs in members:
            pairs.move_to(self.address + first * pair_bytes, self._epoch)
            self.spans.append((first, pairs.count))
            first += pairs.count

    def volume_fields(self) -> dict[str, Any]:
        """Return what a volume must know beyond `address`, `count` and `route`."""
        lease = {} if self._epoch is None else {"lease": self._epoch.address}
        spans = tuple(self.spans)
        return {**self._fields, **lease, "namespace_count": len(self.members), "spans": spans}

    @property
    def failed(self) -> bool:
        """Whether a wait for one of the pairs ran out of time."""
        return any(pairs.failed for pairs in self.members)

    @property
    def unanswered(self) -> bool:
        """Whether a command of device code has no completion."""
        return any(pairs.unanswered for pairs in self.members)

    def counters(self, stream: OwnedStream | None = None) -> QueueCounters:
        """Read the sums over all members; the snapshot is not atomic."""
        each = [pairs.counters(stream) for pairs in self.members]
        return QueueCounters(*map(sum, zip(*each, strict=True)))

    def close(self) -> None:
        """Free the table; the controllers must have stopped. May be called twice."""
        self._memory.close()
        if self._epoch is not None:
            self._epoch.close()
