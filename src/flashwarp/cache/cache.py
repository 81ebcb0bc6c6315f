"""The cache in which kernels look up lines; mirrors `cache/volume.cuh`.

Several arrays may share a cache: each attaches as a volume with its own range of line numbers.
Metadata takes eight bytes a line, four more if the policy keeps words, and four a set. It does not
grow with the data.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from flashwarp import _native, endings
from flashwarp._names import renamed
from flashwarp.cache.miss_list import allocate_misses
from flashwarp.cache.structs import (
    EPOCH_BYTES,
    FAILURES_KEPT,
    CountersStruct,
    ErrorRecordStruct,
    FailureLogStruct,
    FailureStruct,
    GeometryStruct,
    LineCacheStruct,
    VolumeStruct,
)
from flashwarp.config import integer, parse_bytes
from flashwarp.device import Device, DeviceMemory, OwnedStream, resolve
from flashwarp.device.memory import Exported
from flashwarp.errors import (
    ArgumentError,
    CacheError,
    ClosedError,
    DeviceError,
    DeviceTimeout,
    SharedCacheError,
)
from flashwarp.nvme import Queues
from flashwarp.nvme.queue_pair import ROUTES
from flashwarp.policy import Policy, resolve_policy
from flashwarp.transfer import pool_of

if TYPE_CHECKING:
    from flashwarp.cache.shared import Client, Facts, Owner
    from flashwarp.sharing.connection import Connection

__all__ = ["Cache", "Volume"]

LINE_BYTES_MIN = 512
LINE_BYTES_MAX = 2 << 20
LINE_DEFAULT = "4 KiB"
# Kernels keep the number of a frame in 32 bits: see cursor.cuh.
_FRAMES_MAX = 1 << 32
_VOLUMES_MAX = 64
_LINES_MAX = 1 << 38
# Lines from here on do not enter the host tier: `kTierLines` of the headers.
_TIER_LINES = 1 << 37
_TIER_WAYS_MAX = 16
_TIER_PLACES_MAX = (1 << 32) - 1
_COUNTER_SHARDS = 64
# Share of the free device memory that cache="auto" may take.
_AUTOMATIC_SHARE = 0.25
# Misses that the list of an asynchronous call holds: 2 MiB, of which an array may have 64.
_LANE_MISSES_MAX = 1 << 18
# Interval at which `withdraw` looks: visits last for microseconds, or as long as a command.
_POLL_S = 50e-6
# `kPolicyWordsAlignment`: the words follow the tags at a multiple of this.
_POLICY_WORDS_ALIGNMENT = 128


@dataclass(frozen=True)
class Noted:
    """Failures of one kind since the last read: the entries of some, and the number of all."""

    kept: tuple[FailureStruct, ...]
    count: int

    def __bool__(self) -> bool:
        return self.count != 0


_NOTHING = Noted((), 0)


class FailureSequence:
    """A sequence of failures that kernels append to, and how far the host has read it.

    Any thread may read. The host never writes words that kernels own, so a read misses nothing:
    the next read returns what kernels note meanwhile.

    Parameters
    ----------
    entries : ctypes array of FailureStruct
        Host memory that kernels write.
    log : int
        Device address of its `FailureLogStruct`.
    device : Device
    stream : OwnedStream, optional
        The log is read and changed in the order of this stream.
    """

    def __init__(
        self,
        entries: ctypes.Array[FailureStruct],
        log: int,
        device: Device,
        stream: OwnedStream | None,
    ) -> None:
        self._entries = entries
        self._log = log
        self._device = device
        self._stream = stream
        self._lock = endings.Lock()
        # How many entries were read.
        self.mark = _native.FailureMark(
            ctypes.addressof(entries) + FailureStruct.number.offset,
            ctypes.sizeof(FailureStruct),
            FAILURES_KEPT,
        )
        self._acknowledged = 0  # of them
        self._untold = 0

    @property
    def unread(self) -> bool:
        """Whether kernels have noted a failure that was not read; needs no transfer.

        False, too, if they found the record full after the last read: the next `read` finds those.
        """
        return self.mark.unread

    def first(self) -> FailureStruct | None:
        """Return the oldest unread failure and leave it unread; needs no transfer."""
        return self._entry(self.mark.read)

    def read(self) -> Noted:
        """Return the failures since the last call; needs no transfer if there is none.

        After the first eight entries, later failures may have found the ring full, so each call
        reads their number from the device: a transfer of 4 bytes. If the device fails, so that the
        host cannot acknowledge entries, they stay unread.
        """
        if self.mark.read < FAILURES_KEPT and not self.mark.unread:
            return _NOTHING
        return endings.holding([self._lock], self._read_on)

    def _read_on(self) -> Noted:
        kept: list[FailureStruct] = []
        while len(kept) < FAILURES_KEPT:
            entry = self._entry(self.mark.read + len(kept))
            if entry is None:
                break
            kept.append(FailureStruct.from_buffer_copy(entry))
        before, end = self.mark.read, self.mark.read + len(kept)
        untold = self._download_untold() if end >= FAILURES_KEPT else 0
        count = len(kept) + (untold - self._untold & 0xFFFFFFFF)
        # Advance before acknowledging, because an interrupt may come between: kernels may overwrite
        # acknowledged entries, so these must count as read. The next call acknowledges the rest.
        self.mark.read = end
        try:
            self._acknowledge()
        except DeviceError:
            self.mark.read = before
            raise
        self._untold = untold
        return Noted(tuple(kept), count)

    def _acknowledge(self) -> None:
        if self._acknowledged != self.mark.read:
            word = (self.mark.read & 0xFFFFFFFF).to_bytes(4, "little")
            self._device.upload(self._log + FailureLogStruct.read.offset, word, self._stream)
            self._acknowledged = self.mark.read

    def _entry(self, position: int) -> FailureStruct | None:
        # Kernels write the number last: with it, the entry is complete.
        entry = self._entries[position % FAILURES_KEPT]
        return entry if entry.number == (position + 1) & 0xFFFFFFFF else None

    def _download_untold(self) -> int:
        place = self._log + FailureLogStruct.untold.offset
        return int.from_bytes(self._device.download(place, 4, self._stream), "little")


@dataclass
class Volume:
    """One array's place in a cache."""

    cache: Cache
    slot: int
    line_begin: int
    line_count: int
    address: int
    events: DeviceMemory
    errors: DeviceMemory
    misses: DeviceMemory | None = None
    """Where launches list their misses; None if they fetch them at once."""
    entry: DeviceMemory | None = None
    """The memory of the struct if this is a copy; else the struct lies in the cache's table."""
    stream: OwnedStream | None = None
    """The stream that orders changes of the struct, if this is a copy."""
    commands: FailureSequence = field(init=False)
    """Commands that failed."""
    indices: FailureSequence = field(init=False)
    """Indices out of bounds."""

    def __post_init__(self) -> None:
        record = ErrorRecordStruct.from_address(self.errors.address)
        place, device = self.address, self.cache.device
        self.commands = FailureSequence(
            record.commands, place + VolumeStruct.commands.offset, device, self.stream
        )
        self.indices = FailureSequence(
            record.indices, place + VolumeStruct.indices.offset, device, self.stream
        )

    @property
    def in_host_tier(self) -> bool:
        """Whether its lines enter the host tier of the cache."""
        return self.cache.host_memory != 0 and self.line_begin < _TIER_LINES

    def tier_note(self) -> str:
        """Return for `explain` why the lines do not enter the host tier; empty if they do."""
        if not self.cache.host_memory or self.in_host_tier:
            return ""
        return "; this array's lines do not enter its host memory: their storage is memory already"

    def with_own_errors(self, stream: OwnedStream) -> Volume:
        """Copy the entry, so that its kernels note failures separately. Release the copy.

        It shares lines, queues and counters with the array. `stream` must carry such copies only,
        because kernels on the library's own stream may run for long.
        """
        device = self.cache.device
        errors = device.allocate_host(ctypes.sizeof(ErrorRecordStruct))
        misses = allocate_misses(device, self.line_count, stream, _LANE_MISSES_MAX)
        entry = device.allocate(ctypes.sizeof(VolumeStruct), stream)
        there = device.download(self.address, entry.nbytes, stream)
        struct = VolumeStruct.from_buffer_copy(there)
        struct.errors = errors.address
        struct.commands = struct.indices = FailureLogStruct()
        device.upload(entry.address, bytes(struct), stream)
        return replace(
            self, address=entry.address, errors=errors, misses=misses, entry=entry, stream=stream
        )

    @property
    def owners(self) -> tuple[object, ...]:
        """The owners of its memory, for launches; see `DeviceMemory.owners`."""
        entry = () if self.entry is None else self.entry.owners
        return *self.events.owners, *self.errors.owners, *entry

    def release(self) -> None:
        """Free the memory of a copy."""
        if self.entry is not None:
            self.entry.close()
            self.errors.close()
            if self.misses is not None:
                self.misses.close()

    def counters(self) -> dict[str, int]:
        """Read the sums over all shards."""
        data = self.cache.device.download(self.events.address, self.events.nbytes)
        shards = (CountersStruct * _COUNTER_SHARDS).from_buffer_copy(data)
        return {
            field[0]: sum(int(getattr(shard, field[0])) for shard in shards)
            for field in CountersStruct._fields_
            if not field[0].startswith("_")
        }


# Attributes that a cache has only while it has its memory.
_WITH_MEMORY = ("device", "metadata_bytes", "address", "geometry", "_metadata", "_frames")
# Attributes that depend on the capacity, which "auto" derives from the first array.
_WITH_CAPACITY = ("capacity", "set_count", "_tier")


class _NoMemory(CacheError, AttributeError):
    """The cache has no memory now, so it lacks this attribute. `hasattr` returns False."""


@renamed
class Cache(endings.OfProcess):
    """A set-associative cache of lines in device memory.

    Parameters
    ----------
    capacity : int, str or "auto"
        Bytes of frames, rounded down to whole sets; at least one set, `ways` times `line`. "auto":
        as many as the first array has, at most a share of the free memory. May be left out if
        `shared` names a cache that has an owner.
    line : int or str
        Bytes of a line, a power of two from 512 to 2 MiB: the unit of transfer and eviction.
    ways : int
        Frames of a set: 4, 8 or 16.
    policy : str or Policy
        Which line is evicted: "clock", "lru", "fifo", "sieve", "s3_fifo", "random", or your own
        `Policy`. It applies to all arrays that share the cache; docs/caches.md helps to choose.
    device : Device or str, optional
        Where its memory lies. Default: on the device of the first array that uses the cache.
    host_memory : int or str, optional
        Bytes of pinned host memory below the frames, at least one line for each set; default none.
        Evicted clean lines go there, and come back without the storage. Arrays whose storage is
        memory already ("in_place") do not use it.
    shared : str, optional
        A name under which processes of this user share the cache; see docs/caches.md. If a process
        owns a cache of this name, this one becomes its client: without a capacity it takes the
        cache as it is, and with one everything must agree. Otherwise this process becomes the
        owner, which needs a capacity in bytes.

    Attributes
    ----------
    shared : str or None
    owned : bool
        False for a client of a shared cache.

    Notes
    -----
    With a device and a capacity, the cache allocates its memory here; otherwise when the first
    array is opened. A cache that you made without a device gives its memory back when the last
    array that uses it closes, and the next array binds it again, on the device of that array. So
    ``fw.open(path, cache=fw.Cache("8 GiB"))`` leaves nothing behind. To keep the memory between
    arrays, give a device, or use the cache in a ``with`` statement. A share table of the cache also
    keeps it until the table is closed.

    `close` frees the memory; so does losing the cache and all its arrays. Thread-safe. Arrays that
    share a cache must be on its device.

    Raises
    ------
    SharedCacheError
        If the cache cannot be shared so: no owner, another user's, another version or geometry.
    CacheError
        For parameters that do not fit together. Also for an attribute that depends on the device,
        while the cache has none.
    DeviceError, DeviceOutOfMemory

    Examples
    --------
    >>> import flashwarp as fw, numpy as np
    >>> np.save("table.npy", np.arange(12.0).reshape(6, 2))
    >>> with fw.open("table.npy", device="cpu", cache=fw.Cache("1 MiB", policy="sieve")) as x:
    ...     x.cache.policy.name
    'sieve'
    """

    device: Device
    capacity: int
    set_count: int
    metadata_bytes: int
    _kind = "cache"
    address: int
    geometry: GeometryStruct
    _metadata: DeviceMemory
    _frames: DeviceMemory
    _tier: TierShape

    def __init__(
        self,
        capacity: int | str | None = None,
        line: int | str = LINE_DEFAULT,
        ways: int = 4,
        policy: str | Policy = "clock",
        device: object = None,
        host_memory: int | str | None = None,
        *,
        shared: str | None = None,
    ) -> None:
        super().__init__()
        self._owner: Owner | None = None
        self._client: Client | None = None
        self.shared = shared
        if capacity is None and shared is None:
            raise CacheError('a cache needs a capacity, such as "1 GiB" or "auto"')
        self.line_bytes = check_line(line)
        ways = integer("ways", ways, 1, 16)
        if ways not in (4, 8, 16):
            raise CacheError(f"ways={ways} is none of 4, 8, 16")
        self.ways = ways
        self.policy = resolve_policy(policy)
        automatic = isinstance(capacity, str) and capacity == "auto"
        bytes_wanted = None if automatic else capacity
        self._wanted = None if bytes_wanted is None else parse_bytes(bytes_wanted, "capacity")
        self._host_wanted = None if host_memory is None else parse_bytes(host_memory, "host_memory")
        self.host_memory = 0
        self._tier_frames: DeviceMemory | None = None
        # Reentrant: the garbage collector may close a lost array in the middle of `attach`.
        self._lock = endings.Lock()
        # Arrays that share the cache take turns: a kernel of one may finish another's commands, so
        # no array may close while a kernel runs.
        self.turn = endings.Lock()
        # Streams with calls that the library has not waited for.
        self.streams: set[int] = set()
        self._volumes: dict[int, Volume] = {}
        self._epochs = [0] * _VOLUMES_MAX  # how often each entry was given up, if shared
        # What keeps the memory while no array is attached: the user, arrays that are being opened,
        # and share tables.
        self._kept = device is not None
        self._opening = 0
        self._tables: weakref.WeakSet[object] = weakref.WeakSet()
        self._refused = 0  # before the memory was given back
        self._asked_device = None if device is None else resolve(device)
        if self._wanted is not None:
            self._divide(self._wanted)
        if shared is not None:
            endings.uninterrupted(partial(self._share, shared, automatic), lambda _: self._close())
        elif self._wanted is not None and self._asked_device is not None:
            self._allocate(self._asked_device)

    def _share(self, name: str, automatic: bool) -> None:
        """Own the shared cache of this name, or become a client of its owner."""
        from flashwarp.cache.shared import Owner, meet  # most programs share nothing
        from flashwarp.sharing.names import OwnerLock, check_name

        check_name(name)
        if automatic:
            raise CacheError(
                'capacity="auto" depends on the first array, and a shared cache has its memory '
                "before: give bytes, or leave the capacity out to use the owner's"
            )
        met = meet(name, may_own=self._wanted is not None)
        self._kept = True
        if not isinstance(met, OwnerLock):
            self._become_client(met)
            return
        self._owner = Owner(name, met)
        try:
            self._allocate(resolve(self._asked_device))
            self._owner.start(self, self._facts)
            self._held = endings.Holder(self)
        except BaseException:
            self._owner.close()
            self._free()
            raise

    def _facts(self, metadata: Exported, frames: Exported, stage_bytes: int) -> Facts:
        from flashwarp.cache.shared import Facts

        tags = self.geometry.tags - metadata.memory.address
        return Facts(
            kind=self.device.kind,
            device=self.device.identity,
            policy=self.policy.name,
            line=self.line_bytes,
            ways=self.ways,
            sets=self.set_count,
            host_memory=self.host_memory,
            metadata_bytes=metadata.offset + metadata.memory.nbytes,
            tags=metadata.offset + tags,
            epochs=metadata.offset + self._epochs_address - metadata.memory.address,
            frames_bytes=frames.offset + frames.memory.nbytes,
            frames=frames.offset,
            stage_bytes=stage_bytes,
        )

    def _become_client(self, connection: Connection) -> None:
        """Take the cache as its owner has it."""
        from flashwarp.cache.shared import Client

        client = Client.of(connection, self._asked_device)
        facts = client.facts
        if self._wanted is not None:
            asked = (self.set_count, self.line_bytes, self.ways, self.policy.name)
            if asked != (facts.sets, facts.line, facts.ways, facts.policy):
                client.close()
                raise SharedCacheError(
                    f"the shared cache {connection.name!r} has {facts.sets * facts.ways} lines of "
                    f"{facts.line} bytes in sets of {facts.ways} under {facts.policy!r}, not the "
                    f"{asked[0] * asked[2]} of {asked[1]} in sets of {asked[2]} under {asked[3]!r} "
                    "that were asked for: leave capacity, line, ways and policy out to take it as "
                    "it is"
                )
        self._client = client
        self.line_bytes, self.ways, self.set_count = facts.line, facts.ways, facts.sets
        self.capacity = facts.sets * facts.ways * facts.line
        self.host_memory = facts.host_memory
        self.device, self.geometry = client.device, client.geometry
        self._metadata, self._frames = client.metadata, client.frames
        self.device.carries.add(self)

    @property
    def owned(self) -> bool:
        """Whether this process has made its memory; False for a client of a shared cache."""
        return self._client is None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Python also comes here when a property has found such an attribute missing.
            if self.__dict__.get("_client") is not None and not name.startswith("__"):
                raise _NoMemory(
                    f"only the owner of the shared cache {self.shared!r} has its {name}; this "
                    "process is a client"
                )
            missing = isinstance(getattr(type(self), name, None), property)
            if missing or name in _WITH_MEMORY or name in _WITH_CAPACITY:
                raise _NoMemory(
                    f"a cache has no {name} before an array is opened on it: give it a device, and "
                    "a capacity other than 'auto'"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _divide(self, wanted: int) -> None:
        """Divide `wanted` bytes of frames, and the host tier, into sets."""
        set_bytes = self.ways * self.line_bytes
        if wanted < set_bytes:
            raise CacheError(
                f"a cache of {wanted} bytes is smaller than one set of {self.ways} lines of "
                f"{self.line_bytes} bytes: give it at least {set_bytes} bytes"
            )
        # An odd number of sets spreads strides that are powers of two.
        sets = wanted // set_bytes
        sets = sets if sets <= 2 or sets % 2 else sets - 1
        lines = sets * self.ways
        if lines > _FRAMES_MAX:
            raise CacheError(
                f"a cache of {wanted} bytes has {lines} lines of {self.line_bytes} bytes, more "
                f"than {_FRAMES_MAX}: give it longer lines"
            )
        self._tier = TierShape.of(self._host_wanted, sets, self.line_bytes)
        self.host_memory = self._tier.places * self.line_bytes
        self.set_count, self.capacity = sets, lines * self.line_bytes

    @property
    def _bound_device(self) -> Device | None:
        """Where its memory lies or will lie; None: on the device of the next array."""
        return self.__dict__.get("device", self._asked_device)

    @property
    def _has_memory(self) -> bool:
        return "device" in self.__dict__

    def _host_bytes_to_come(self, device: Device, nbytes: int) -> int:
        """Return the host memory that `_bind` would allocate; 0 if the cache has its memory."""
        if self._has_memory:
            return 0
        tier = self._host_wanted or 0
        if device.kind != "cpu":
            return tier
        if self._wanted is not None:
            return tier + self._wanted
        return tier + automatic_capacity(nbytes, self.line_bytes, device)

    def _bind(self, device: Device, nbytes: int) -> None:
        """Allocate the memory, if there is none, for an array of `nbytes` that is being opened.

        `_opened` must follow. Raises ArgumentError if the cache is on another device.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the cache is closed")
            if self._client is not None:
                raise SharedCacheError(
                    f"a client of the shared cache {self.shared!r} opens files by their paths, "
                    "which its owner opens, too: open a storage in the owner's process"
                )
            mine = self._bound_device
            if mine is not None and mine is not device:
                raise ArgumentError(f"the cache is on {mine.name}, the array is on {device.name}")
            if not self._has_memory:
                if self._wanted is None:
                    self._divide(automatic_capacity(nbytes, self.line_bytes, device))
                self._allocate(device)
            self._opening += 1

    def _opened(self) -> None:
        """Note that an array was opened, or that opening it has failed, after `_bind`."""
        with self._lock:
            self._opening = max(0, self._opening - 1)
            self._give_back()

    def _give_back(self) -> None:
        """Free the memory if nothing keeps it. The next `_bind` allocates again."""
        used = self._kept or self._opening or self._volumes or self._tables
        if used or self._closed or not self._has_memory:
            return
        with contextlib.suppress(DeviceError):  # after a fault, only the host's memory counts
            self._refused = self.refusals
        self.device.carries.discard(self)
        self._free()
        self.streams.clear()
        for name in _WITH_MEMORY:
            del self.__dict__[name]
        if self._wanted is None:
            self.host_memory = 0
            for name in _WITH_CAPACITY:
                del self.__dict__[name]

    def __enter__(self) -> Self:
        self._kept = True
        return super().__enter__()

    def _allocate(self, device: Device) -> None:
        lines = self.set_count * self.ways
        struct_bytes = ctypes.sizeof(LineCacheStruct)
        volume_bytes = _VOLUMES_MAX * ctypes.sizeof(VolumeStruct)
        tag_bytes, word_bytes = lines * 8, 0
        if self.policy.keeps_words:
            tag_bytes = -(-tag_bytes // _POLICY_WORDS_ALIGNMENT) * _POLICY_WORDS_ALIGNMENT
            word_bytes = lines * 4
        own_bytes = tag_bytes + word_bytes + -(-self.set_count * 4 // 8) * 8
        self.metadata_bytes = own_bytes + self._tier.places * 8
        owner = self._owner
        allocate = device.allocate if owner is None else partial(owner.allocate, device)
        self._frames = allocate(self.capacity)
        try:
            if self.host_memory:
                self._tier_frames = pool_of(device).reserve("host tiers", self.host_memory)
            epoch_bytes = _VOLUMES_MAX * EPOCH_BYTES
            head_bytes = struct_bytes + volume_bytes + epoch_bytes + _POLICY_WORDS_ALIGNMENT
            self._metadata = allocate(head_bytes + self.metadata_bytes)
        except BaseException:
            self._free()
            raise
        self.address = self._metadata.address
        self._volumes_address = self.address + struct_bytes
        self._epochs_address = self._volumes_address + volume_bytes
        # Before the tags: policy_refusals() in the header.
        tags = self.address + head_bytes
        self.geometry = GeometryStruct(
            tags=tags,
            frames=self._frames.address,
            set_count=self.set_count,
            # ceil(2^64 / sets); set_of() in the header handles a single set separately.
            set_reciprocal=-(-(1 << 64) // self.set_count) if self.set_count > 1 else 0,
            ways=self.ways,
            line_shift=self.line_bytes.bit_length() - 1,
        )
        struct = LineCacheStruct(
            geometry=self.geometry,
            set_control=tags + tag_bytes + word_bytes,
            volumes=self._volumes_address,
            page_bytes=2 << 20,
        )
        if self._tier_frames is not None:
            struct.tier_ways = self._tier.ways
            struct.tier.tags = tags + own_bytes
            struct.tier.frames = self._tier_frames.address
            struct.tier.subsets = self._tier.subsets
        device.upload(self.address, bytes(struct))
        self.device = device
        device.carries.add(self)

    @property
    def frames(self) -> tuple[int, int]:
        """Address and size of the frames."""
        return self._frames.address, self._frames.nbytes

    @property
    def owners(self) -> tuple[object, ...]:
        """The owners of its memory, for launches and controllers; see `DeviceMemory.owners`."""
        tier = () if self._tier_frames is None else self._tier_frames.owners
        return *self._metadata.owners, *self._frames.owners, *tier

    @property
    def lines(self) -> int:
        """Lines that the cache holds."""
        return self.set_count * self.ways

    @property
    def host_lines(self) -> int:
        """Lines that the host tier holds."""
        return self.host_memory // self.line_bytes

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def refusals(self) -> int:
        """How often the policy asked for what it may not have. Nonzero only for a faulty policy.

        Counts victims that cannot be evicted, ways that do not exist, and loops that were ended.
        """
        if self._closed:
            raise ClosedError("the cache is closed")
        if not self._has_memory:
            return self._refused
        victims = self.address + LineCacheStruct.refusals.offset
        places = ((victims, 4), (self.geometry.tags - 8, 8))
        return self._refused + sum(
            int.from_bytes(self.device.download(place, nbytes), "little")
            for place, nbytes in places
        )

    def attach(self, nbytes: int, queues: Queues) -> Volume:
        """Give an array of `nbytes` a range of line numbers and an entry of the volume table.

        Raises CacheError when 64 arrays are attached, or no range of numbers is free.
        """
        count = max(1, -(-nbytes // self.line_bytes))
        with self._lock:
            if self._closed:
                raise ClosedError("the cache is closed")
            slot = next((i for i in range(_VOLUMES_MAX) if i not in self._volumes), None)
            if slot is None:
                raise CacheError(f"the cache carries {_VOLUMES_MAX} arrays already: close one")
            begin = self._free_range(count, *self._lines_for(queues.route))
            address = self._volumes_address + slot * ctypes.sizeof(VolumeStruct)
            volume = Volume(
                cache=self,
                slot=slot,
                line_begin=begin,
                line_count=count,
                address=address,
                events=self.device.allocate(_COUNTER_SHARDS * ctypes.sizeof(CountersStruct)),
                errors=self.device.allocate_host(ctypes.sizeof(ErrorRecordStruct)),
                misses=allocate_misses(self.device, count),
            )
            struct = VolumeStruct(
                line_begin=begin,
                line_count=count,
                bytes=nbytes,
                queues=queues.address,
                events=volume.events.address,
                errors=volume.errors.address,
                queue_count=queues.count,
                path=ROUTES.index(queues.route),
                **queues.volume_fields(),
            )
            self._enter(address, struct)
            self._volumes[slot] = volume
            end = max(self._volumes) + 1
            place = self.address + LineCacheStruct.volume_end.offset
            self.device.upload(place, end.to_bytes(4, "little"))
            self._set_word(volume, VolumeStruct.attached.offset, 1)
            return volume

    def _enter(self, address: int, struct: VolumeStruct) -> None:
        """Write an entry of the table while kernels of other arrays search the table.

        `line_count` is written last: if it is nonzero, the entry is complete. `visitors` stays,
        because it may still count a visitor that came too late.
        """
        count, struct.line_count = struct.line_count, 0
        self.device.upload(address, bytes(struct)[: VolumeStruct.visitors.offset])
        place = address + VolumeStruct.line_count.offset
        self.device.upload(place, int(count).to_bytes(8, "little"))

    def _set_word(self, volume: Volume, offset: int, value: int) -> None:
        self.device.upload(volume.address + offset, value.to_bytes(4, "little"))

    def _visitors(self, volume: Volume) -> int:
        place = volume.address + VolumeStruct.visitors.offset
        return int.from_bytes(self.device.download(place, 4), "little")

    def withdraw(self, volume: Volume, timeout_s: float = 60.0) -> None:
        """Keep kernels of other arrays from an array's queues, and wait until none uses them.

        Call it when no kernel of the array runs any more and its lines are at rest, and before you
        free its memory. Its service must run until this returns, because a kernel may wait for a
        write-back of one of its lines. Kernels of other arrays go on, but no longer help its
        queues. May be called twice. See `cache/visits.cuh`.

        Raises DeviceTimeout if a kernel uses the queues for `timeout_s` seconds. Then the memory of
        the queues must not be freed while that kernel runs.
        """
        self._set_word(volume, VolumeStruct.attached.offset, 0)
        # Store-load order against visitors, which count themselves and then load `attached`: on a
        # GPU the store has reached memory before the load below begins. On the CPU device it needs
        # a barrier between, which a lock gives.
        with endings.Lock():
            end = time.monotonic() + timeout_s
        while inside := self._visitors(volume):
            if time.monotonic() >= end:
                raise DeviceTimeout(
                    f"kernels of other arrays on the cache are still inside the queues of the "
                    f"array after {timeout_s:g} s ({inside} warps): end them before you close it"
                )
            time.sleep(_POLL_S)

    def _lines_for(self, route: str) -> tuple[int, int]:
        """Return the range of a volume's line numbers, which decides whether it uses the tier."""
        if not self.host_memory:
            return 0, _LINES_MAX
        return (_TIER_LINES, _LINES_MAX) if route == "in_place" else (0, _TIER_LINES)

    def _free_range(self, count: int, first: int, last: int) -> int:
        begin = first
        for volume in sorted(self._volumes.values(), key=lambda v: v.line_begin):
            if not first <= volume.line_begin < last:
                continue
            if volume.line_begin - begin >= count:
                break
            begin = volume.line_begin + volume.line_count
        if begin + count > last:
            raise CacheError(
                f"{count} lines of {self.line_bytes} bytes exceed the {last - first} line numbers "
                "of a cache: use longer lines"
            )
        return begin

    def _serves_besides(self, volume: Volume) -> bool:
        """Whether other arrays use the cache, besides that of `volume`."""
        with self._lock:
            return any(each is not volume for each in self._volumes.values())

    def detach(self, volume: Volume) -> None:
        """Remove an array that has no lines left, after `withdraw`."""
        with self._lock:
            if self._volumes.pop(volume.slot, None) is None:
                return
            if self._owner is not None and not self._closed and self.device.alive():
                # Before another array can have these line numbers: see kernels/resident.cuh.
                self._epochs[volume.slot] += 1
                word = self._epochs[volume.slot].to_bytes(EPOCH_BYTES, "little")
                self.device.upload(self._epochs_address + EPOCH_BYTES * volume.slot, word)
            if not self._closed and self.device.alive():
                # `line_count` first, because kernels search the table meanwhile.
                self.device.fill(volume.address + VolumeStruct.line_count.offset, 0, 8)
                self.device.fill(volume.address, 0, VolumeStruct.visitors.offset)
            volume.events.close()
            volume.errors.close()
            if volume.misses is not None:
                volume.misses.close()
            self._give_back()

    def _keep_for(self, table: object) -> None:
        """Keep the memory for a share table until `_leave`, or until the table is lost."""
        with self._lock:
            self._tables.add(table)

    def _leave(self, table: object) -> None:
        """Note that a share table is closed."""
        with self._lock:
            self._tables.discard(table)
            self._give_back()

    def close(self) -> None:
        """Free the memory. May be called twice. In a forked child it does nothing.

        Raises CacheError while arrays are attached: close them first, so that nothing is lost. The
        owner of a shared cache also closes the arrays that clients have open, whose next call
        raises OwnerLostError.
        """
        endings.uninterrupted(self._close)

    def _close(self) -> None:
        if self._in_child:  # it would take the shared cache's name from its owner
            return
        if self._owner is not None and not self._closed:
            # First: it waits for what is being closed for a client, which then is no volume.
            opened = self._owner.opened
            self._check_unused(len(self._volumes) - opened)
            # Without the lock, which the ends of sessions need.
            self._owner.close()
        with self._lock:
            if self._closed:
                return
            client = self._client
            self._check_unused(len(self._volumes) if client is None else len(client.arrays))
            self._closed = True
            if client is not None:
                client.close()
            else:
                self._free()

    def __del__(self) -> None:
        # One that clients have used stays, for them: its sessions, or files that are warm, hold it.
        if "_held" in self.__dict__:
            self._held.lost(self)

    def _check_unused(self, arrays: int) -> None:
        if arrays > 0:
            raise CacheError(f"{arrays} arrays use the cache: close them first")

    def _free(self) -> None:
        for memory in (self.__dict__.get("_metadata"), self.__dict__.get("_frames")):
            if memory is not None:
                memory.close()
        if self._tier_frames is not None:
            self._tier_frames.close()
            self._tier_frames = None

    def __repr__(self) -> str:
        size = self.__dict__.get("capacity", "auto")
        device = self._bound_device
        tier = f"host_memory={self.host_memory}, " if self.host_memory else ""
        if self._client is not None:
            pid = self._client.connection.owner_pid or "of another namespace"
            tier += f"shared={self.shared!r}, owner={pid}, "
        elif self.shared is not None:
            tier += f"shared={self.shared!r}, "
        return (
            f"Cache({size if size == 'auto' else f'{size} bytes'}, line={self.line_bytes}, "
            f"ways={self.ways}, policy={self.policy.name!r}, {tier}"
            f"device={device.name if device else None!r})"
        )


@dataclass(frozen=True)
class TierShape:
    """The division of the host tier: subsets of places for lines, for each set of the cache."""

    sets: int
    subsets: int
    ways: int

    @classmethod
    def of(cls, capacity: int | str | None, sets: int, line_bytes: int) -> TierShape:
        """Divide `capacity` bytes; None makes a tier without places.

        Raises CacheError if it has less than a line for each set, or more lines than can be
        numbered.
        """
        if capacity is None:
            return cls(sets, 1, 0)
        wanted = parse_bytes(capacity, "host_memory")
        each = wanted // (sets * line_bytes)
        if each == 0:
            raise CacheError(
                f"a host tier of {wanted} bytes is smaller than a line for each of the {sets} sets "
                f"of the cache: give it at least {sets * line_bytes} bytes"
            )
        # A miss scans all ways of a subset.
        subsets = -(-each // _TIER_WAYS_MAX)
        shape = cls(sets, subsets, each // subsets)
        if shape.places > _TIER_PLACES_MAX:
            raise CacheError(
                f"a host tier of {wanted} bytes has {shape.places} lines: at most "
                f"{_TIER_PLACES_MAX}, so use longer ones"
            )
        return shape

    @property
    def places(self) -> int:
        """Lines that it holds."""
        return self.sets * self.subsets * self.ways


def check_line(line: int | str) -> int:
    nbytes = parse_bytes(line, "line")
    if not LINE_BYTES_MIN <= nbytes <= LINE_BYTES_MAX or nbytes & (nbytes - 1):
        raise CacheError(
            f"a line of {nbytes} bytes is not a power of two from {LINE_BYTES_MIN} to "
            f"{LINE_BYTES_MAX}"
        )
    return nbytes


def automatic_capacity(nbytes: int, line: int | str, device: Device) -> int:
    """Choose the size for ``cache="auto"``: the whole array, or a share of the free memory."""
    line_bytes = check_line(line)
    whole = (nbytes // line_bytes + 1) * line_bytes
    share = int(device.memory_info().free_bytes * _AUTOMATIC_SHARE)
    # More than the data, because the number of sets is rounded down to an odd one.
    return max(8 * line_bytes, min(whole + 8 * line_bytes, share))
