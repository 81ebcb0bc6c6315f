"""The cache in which kernels look up lines; mirrors `cache/volume.cuh`.

Several arrays may share a cache: each attaches as a volume with its own range of line numbers.
Metadata takes eight bytes a line, four more if the policy keeps words, and four a set. It does not
grow with the data.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from flashwarp import endings
from flashwarp._names import renamed
from flashwarp.cache.closings import Closings
from flashwarp.cache.memory import VOLUMES_MAX, CacheMemory
from flashwarp.cache.miss_list import allocate_misses
from flashwarp.cache.sizes import LINE_DEFAULT, TierShape, automatic_capacity, check_line, divide
from flashwarp.cache.streams import NotedStreams
from flashwarp.cache.structs import (
    CountersStruct,
    ErrorRecordStruct,
    GeometryStruct,
    LineCacheStruct,
    VolumeStruct,
)
from flashwarp.cache.submitters import Submitters
from flashwarp.cache.volume import Volume
from flashwarp.cache.volume_table import free_lines, line_numbers
from flashwarp.config import integer, parse_bytes
from flashwarp.device import Device, resolve
from flashwarp.errors import ArgumentError, CacheError, ClosedError, DeviceError, SharedCacheError
from flashwarp.nvme import Queues
from flashwarp.nvme.queue_pair import ROUTES
from flashwarp.policy import POLICIES, Policy, resolve_policy

if TYPE_CHECKING:
    from flashwarp.cache.peers import Peers
    from flashwarp.cache.shared import Client, Owner

_COUNTER_SHARDS = 64


# Attributes that a cache has only while it has its memory.
_WITH_MEMORY = ("device", "metadata_bytes", "address", "geometry", "_memory")
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
        Where its memory lies. Default: on the device of the first array that uses the cache. With
        `peers` and `shared`: the only one of the peers that this process uses.
    host_memory : int or str, optional
        Bytes of pinned host memory below the frames, at least one line for each set; default none.
        Evicted clean lines go there, and come back without the storage. Arrays whose storage is
        memory already ("in_place") do not use it.
    shared : str, optional
        A name under which processes of this user share the cache; see docs/caches.md. If a process
        owns a cache of this name, this one becomes its client: without a capacity it takes the
        cache as it is, and with one everything must agree. Otherwise this process becomes the
        owner, which needs a capacity in bytes.
    peers : sequence of Device or str, optional
        GPUs that share the cache, such as ``["cuda:0", "cuda:1"]``. Each gives `capacity` bytes,
        which add up: a line lies on one of them, and all read it there. Open the file once for
        each, ``fw.open(path, device="cuda:1", cache=cache)``, to read. Such arrays have a policy of
        their own, for `fw.compile`: ``policy=x.cache.policy``. With `shared`, processes have the
        cache together, such as the ranks of one node: all give the same GPUs, capacity, line, ways
        and policy. The first one allocates the memory.

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
    _memory: CacheMemory
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
        peers: Sequence[object] | None = None,
    ) -> None:
        super().__init__()
        self._owner: Owner | None = None
        self._client: Client | None = None
        self._peers: Peers | None = None
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
        # Reentrant: the garbage collector may close a lost array in the middle of `attach`.
        self._lock = endings.Lock()
        # Arrays that share the cache take turns: a kernel of one may finish another's commands, so
        # no array may close while a kernel runs.
        self.turn = endings.Lock()
        self.streams = NotedStreams()
        self.closings = Closings()
        self._volumes: dict[int, Volume] = {}
        self.submitters = Submitters()
        # Line numbers that clients read by, so that no array gets them, also after the array that
        # has them is closed.
        self._lines_kept: dict[object, tuple[int, int]] = {}
        # What keeps the memory while no array is attached: the user, arrays that are being opened,
        # and share tables.
        self._kept = device is not None
        self._opening = 0
        self._tables: weakref.WeakSet[object] = weakref.WeakSet()
        self._refused = 0  # before the memory was given back
        self._asked_device = None if device is None else resolve(device)
        if self._wanted is not None:
            self._divide(self._wanted)
        if peers is not None:
            from flashwarp.cache.peers import Peers  # most programs have one GPU

            self._peers = Peers(self, peers, self._asked_device, shared)
            self.capacity = self._peers.capacity
        elif shared is not None:
            endings.uninterrupted(partial(self._share, shared, automatic), lambda _: self._close())
        elif self._wanted is not None and self._asked_device is not None:
            self._allocate(self._asked_device)

    def _take(self, memory: CacheMemory, device: Device) -> None:
        self._memory = memory
        self.address, self.geometry = memory.metadata.address, memory.geometry
        self.metadata_bytes = memory.metadata_bytes
        self.device = device
        device.carries.add(self)

    def _on(self, device: Device) -> Cache:
        """Return the cache for an array on this device: this one, or the device's among peers."""
        return self if self._peers is None else self._peers.on(device)

    def _share(self, name: str, automatic: bool) -> None:
        """Own the shared cache of this name, or become a client of its owner."""
        from flashwarp.cache.shared import Client, Owner, join  # most programs share nothing

        met = join(name, self._wanted, automatic, self._asked_device)
        self._kept = True
        if isinstance(met, Client):
            self._become_client(met)
            return
        self._owner = Owner(name, met)
        try:
            self._allocate(resolve(self._asked_device))
            self._owner.start(self)
            self._held = endings.Holder(self)
        except BaseException:
            self._owner.close()
            self._free()
            raise

    def _become_client(self, client: Client) -> None:
        """Take the cache as its owner has it."""
        facts = client.facts
        if self._wanted is not None:
            client.check_asked(self.set_count, self.line_bytes, self.ways, self.policy.name)
        self._client = client
        self.line_bytes, self.ways, self.set_count = facts.line, facts.ways, facts.sets
        self.capacity = facts.sets * facts.ways * facts.line
        self.host_memory = facts.host_memory
        self.device, self.geometry = client.device, client.geometry
        self._memory = memory = client.memory()
        self.address = memory.metadata.address
        self.device.carries.add(self)

    @property
    def owned(self) -> bool:
        """Whether this process has made its memory; False for a client of a shared cache."""
        return self._client is None

    @property
    def kernel_policy(self) -> Policy:
        """What built-in kernels are compiled for. Those of a client must not mark what they hit."""
        if self._client is None:
            return self.policy
        # On the CPU device, all built-in kernels ask.
        random = POLICIES["random"]
        return random if self.device.kind == "cpu" else random.for_clients

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
        return tier + (self._wanted or automatic_capacity(nbytes, self.line_bytes, device))

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

    def _divide(self, wanted: int) -> None:
        """Divide `wanted` bytes of frames, and the host tier, into sets."""
        sets = divide(wanted, self.ways, self.line_bytes)
        self._tier = TierShape.of(self._host_wanted, sets, self.line_bytes)
        self.host_memory = self._tier.places * self.line_bytes
        self.set_count, self.capacity = sets, sets * self.ways * self.line_bytes

    def _allocate(self, device: Device) -> None:
        owner = self._owner
        allocate = device.allocate if owner is None else partial(owner.allocate, device)
        memory = CacheMemory.allocated(
            device, allocate, self.set_count, self.ways, self.line_bytes, self._tier, self.policy
        )
        self._take(memory, device)

    @property
    def frames(self) -> tuple[int, int]:
        """Address and size of the frames."""
        return self._memory.frames.address, self._memory.frames.nbytes

    @property
    def owners(self) -> tuple[object, ...]:
        """The owners of its memory, for launches and controllers; see `DeviceMemory.owners`."""
        return self._memory.owners

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
        if self._client is not None:
            raise CacheError("only the owner of the shared cache has the policy's refusals")
        if not self._has_memory:
            return self._refused
        return self._refused + self._memory.refusals(self.device)

    def attach(self, nbytes: int, queues: Queues, begin: int | None = None) -> Volume:
        """Give an array of `nbytes` a range of line numbers and an entry of the volume table.

        The owner of a shared cache has chosen where a client's lines `begin`. Raises CacheError
        when 64 arrays are attached, or no range of numbers is free.
        """
        count = max(1, -(-nbytes // self.line_bytes))
        with self._lock:
            if self._closed:
                raise ClosedError("the cache is closed")
            slot = next((i for i in range(VOLUMES_MAX) if i not in self._volumes), None)
            if slot is None:
                raise CacheError(f"the cache carries {VOLUMES_MAX} arrays already: close one")
            if begin is None:
                numbers = line_numbers(self.host_memory, queues.route)
                taken = [(each.line_begin, each.line_count) for each in self._volumes.values()]
                taken += list(self._lines_kept.values())
                begin = free_lines(count, self.line_bytes, taken, numbers)
            address = self._memory.volumes + slot * ctypes.sizeof(VolumeStruct)
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
            volume.table_entry.enter(struct)
            self._volumes[slot] = volume
            end = max(self._volumes) + 1
            place = self.address + LineCacheStruct.volume_end.offset
            self.device.upload(place, end.to_bytes(4, "little"))
            volume.table_entry.set_attached(1)
            return volume

    def _serves_besides(self, volume: Volume) -> bool:
        """Whether other arrays use the cache, besides that of `volume`."""
        with self._lock:
            return any(each is not volume for each in self._volumes.values())

    def detach(self, volume: Volume) -> None:
        """Remove an array that has no lines left, after its entry was withdrawn."""
        with self._lock:
            if self._volumes.pop(volume.slot, None) is None:
                return
            if not self._closed and self.device.alive():
                volume.table_entry.clear()
            volume.release()
            self.submitters.leave(volume.slot)
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
        if not self._in_child and not self.turn._is_owned():  # else an array's own end calls this
            self.closings.wait()
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
                self._free()
            elif self._peers is not None and not self._has_memory:
                self._peers.close()
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
        if "_memory" in self.__dict__:
            self._memory.close()

    def __repr__(self) -> str:
        size = self.__dict__.get("capacity", "auto")
        device = self._bound_device
        tier = f"host_memory={self.host_memory}, " if self.host_memory else ""
        if self._client is not None:
            pid = self._client.connection.owner_pid or "of another namespace"
            tier += f"shared={self.shared!r}, owner={pid}, "
        elif self.shared is not None:
            tier += f"shared={self.shared!r}, "
        if self._peers is not None:
            tier += f"peers={[f'cuda:{each}' for each in self._peers.gpus]}, "
        return (
            f"Cache({size if size == 'auto' else f'{size} bytes'}, line={self.line_bytes}, "
            f"ways={self.ways}, policy={self.policy.name!r}, {tier}"
            f"device={device.name if device else None!r})"
        )
