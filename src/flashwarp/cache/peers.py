"""One cache in the memory of several GPUs, whose arrays read by all of them.

Frames, tags and locks of sets lie at one range of addresses, an equal part of it on each GPU. So
each line has one home, by the number of its set, and a kernel on any GPU finds it there: by plain
loads if it is its own, over NVLink if it is another's. Kernels of such a cache are compiled for
operations at system scope. Whoever misses fills the frame, wherever it is; no other GPU needs to
run for that. What names queues is a GPU's own: the struct of the cache and the table of volumes.

With a name, several processes have the cache, such as the ranks of one node. The first allocates
the memory of all GPUs, and keeps the line numbers; the others map it. None serves another: each
fetches what it misses. The memory stays until the last process has left.

Arrays of one file, one on each GPU, have the same line numbers. They only read.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flashwarp import endings
from flashwarp.cache.memory import CacheMemory, Layout
from flashwarp.cache.peer_lines import AskedLines, Lines, LineSession, OwnLines, identity
from flashwarp.cache.shared import meet
from flashwarp.cache.sizes import divide
from flashwarp.device import CudaDevice, Device, DeviceMemory, gpus, resolve
from flashwarp.errors import ArgumentError, CacheError, SharedCacheError
from flashwarp.policy import Policy
from flashwarp.sharing import names
from flashwarp.sharing.connection import Connection
from flashwarp.sharing.listener import Answer, Listener
from flashwarp.storage import Namespace

_GPUS_MAX = 16


@dataclass(frozen=True)
class _Facts:
    """What all processes must say alike of a cache that has a name."""

    gpus: list[str]
    policy: str
    line: int
    ways: int
    sets: int

    @classmethod
    def of(cls, numbers: Sequence[int], policy: Policy, line: int, ways: int, sets: int) -> _Facts:
        """Describe a cache; policies of one name may differ."""
        digest = hashlib.sha256(policy.source.encode()).hexdigest()[:8]
        return cls(gpus.identities(numbers), f"{policy.name} {digest}", line, ways, sets)

    def check(self, name: str, theirs: object) -> None:
        """Raise SharedCacheError unless another process describes the cache alike."""
        mine = asdict(self)
        if not isinstance(theirs, dict):
            raise SharedCacheError(
                f"the shared cache {name!r} is none of several GPUs: leave peers= out, or take "
                "another name"
            )
        differ = [
            f"{key} is {theirs.get(key)!s:.200} there and {value} here"
            for key, value in mine.items()
            if theirs.get(key) != value
        ]
        if differ:
            raise SharedCacheError(
                f"the GPUs that share the cache {name!r} must be given alike in all processes: "
                + ", ".join(differ)
            )


class Peers:
    """The caches of several GPUs that are one, or one each if the GPUs do not reach each other.

    Parameters
    ----------
    cache : Cache
        What the user made; its capacity is that of each GPU.
    given : sequence of Device or str
        The GPUs.
    device : Device, optional
        The only one of them that this process uses; needs a name.
    name : str, optional
        By which other processes have the cache, too.
    """

    def __init__(
        self,
        cache: Any,
        given: Sequence[object],
        device: Device | None = None,
        name: str | None = None,
    ) -> None:
        if cache._wanted is None or (device is not None and name is None):
            raise CacheError(
                "peers= is for caches of a capacity in bytes; device= chooses among them if the "
                "cache has a name, shared="
            )
        if cache.host_memory:
            raise CacheError("peers= is for caches without host_memory=")
        self.gpus = _numbers(given)
        self._cache, self._name = cache, name
        self.reach = gpus.all_reach(self.gpus)
        if name is not None and not self.reach:
            raise CacheError(
                f"{self._names()} do not reach each other's memory by atomics: leave shared= out, "
                "and each has a cache of its own"
            )
        self.devices = _used(self.gpus, given, device)
        self._members: dict[Device, Any] = {}
        self._lines: Lines = OwnLines(cache.line_bytes)
        self._connection: Connection | None = None
        self._lock: names.OwnerLock | None = None
        self._listener: Listener | None = None
        self._memory: CacheMemory | None = None
        self._descriptors: list[int] = []
        weakref.finalize(self, _close_all, self._descriptors)
        endings.uninterrupted(self._make_or_not, lambda _: self.close())

    def _make_or_not(self) -> None:
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        cache = self._cache
        if not self.reach:
            for each in self.devices:
                self._members[each] = self._member(cache.policy, cache.set_count)
                self._members[each]._allocate(each)
            return
        policy = replace(cache.policy, shared_by_gpus=True)
        sets = divide(cache.capacity * len(self.gpus), cache.ways, cache.line_bytes)
        if self._name is not None:
            names.check_name(self._name)
            met = meet(self._name, may_own=True)
            if isinstance(met, Connection):
                self._connection = met
            else:
                self._lock = met
        made = self._allocate if self._connection is None else self._join
        self._memory = made(policy, sets)
        for each in self.devices:
            member = self._members[each] = self._member(policy, sets)
            member._take(self._memory.for_gpu(each), each)
        if self._lock is not None:
            self._serve(self._lock, policy, sets)

    def _allocate(self, policy: Policy, sets: int) -> CacheMemory:
        """Allocate the memory of all GPUs."""
        cache, first = self._cache, self.devices[0]

        def allocate(nbytes: int) -> DeviceMemory:
            memory, descriptors = first.allocate_across(self.gpus, self.devices, nbytes)
            self._descriptors += descriptors
            return memory

        made = CacheMemory.allocated(
            first, allocate, sets, cache.ways, cache.line_bytes, cache._tier, policy
        )
        if self._name is None:
            _close_all(self._descriptors)
        return made

    def _serve(self, lock: names.OwnerLock, policy: Policy, sets: int) -> None:
        """Let other processes have the cache from now on."""
        cache, lines, descriptors = self._cache, self._lines, self._descriptors
        assert self._name is not None
        assert isinstance(lines, OwnLines)
        facts = _Facts.of(self.gpus, policy, cache.line_bytes, cache.ways, sets)
        body = {"peers": asdict(facts), "pid": os.getpid()}

        def hello() -> Answer:
            return body, tuple(descriptors)

        self._listener = Listener(self._name, lock, lambda pid: LineSession(lines, pid, hello))
        weakref.finalize(self, _end, self._listener, os.getpid())

    def _join(self, policy: Policy, sets: int) -> CacheMemory:
        """Map the memory that another process has allocated."""
        cache, first, connection = self._cache, self.devices[0], self._connection
        assert connection is not None
        ways, line = cache.ways, cache.line_bytes
        made: list[DeviceMemory] = []
        with connection.hello as hello:
            facts = _Facts.of(self.gpus, policy, line, ways, sets)
            facts.check(connection.name, hello.body.get("peers"))
            sizes = (sets * ways * line, Layout.of(sets, ways, policy).nbytes)
            parts = len(self.gpus)
            if len(hello.descriptors) != len(sizes) * parts:
                raise SharedCacheError(
                    f"process {connection.owner_pid} sent {len(hello.descriptors)} descriptors of "
                    f"memory, not {len(sizes) * parts}"
                )
            try:
                for k, nbytes in enumerate(sizes):
                    its = hello.descriptors[k * parts : (k + 1) * parts]
                    made.append(first.map_across(its, self.gpus, self.devices, nbytes))
            except BaseException:
                for each in made:
                    each.close()
                raise
        self._lines = AskedLines(connection)
        frames, metadata = made
        return CacheMemory.mapped(metadata, frames, sets, ways, line, policy)

    def _member(self, policy: Policy, sets: int) -> Any:
        """Make the cache for arrays on one GPU, without memory."""
        cache = self._cache
        nbytes = sets * cache.ways * cache.line_bytes
        made = type(cache)(nbytes, cache.line_bytes, cache.ways, policy)
        made._peers, made._kept = self, True
        return made

    @property
    def capacity(self) -> int:
        """Bytes of the frames of all GPUs."""
        each = [member.capacity for member in self._members.values()]
        return each[0] if self.reach else sum(each)

    def on(self, device: Device) -> Any:
        """Return the cache for arrays on one of the GPUs; raises ArgumentError for another."""
        found = self._members.get(device)
        if found is None:
            used = " and ".join(each.name for each in self.devices)
            raise ArgumentError(
                f"this process has the cache on {used}, the array is on {device.name}: open it "
                "there, device="
            )
        return found

    def lines_of(self, storage: Namespace, nbytes: int) -> int | None:
        """Return the first line number of a storage, which arrays on all GPUs share.

        `begin_to_leave` and `leave` give it back. None: each GPU has a cache of its own.
        """
        if not self.reach:
            return None
        count = max(1, -(-nbytes // self._cache.line_bytes))
        return self._lines.take(identity(storage), count)

    def begin_to_leave(self, begin: int) -> bool:
        """See `Lines`."""
        return self._lines.begin_to_leave(begin)

    def leave(self, begin: int) -> None:
        """See `Lines`."""
        self._lines.leave(begin)

    @property
    def other_process(self) -> str:
        """What an error calls a process that fills lines of the cache; empty if it has no name."""
        if self._name is None:
            return ""
        return f"another process of the cache {self._name!r}, which was reading them,"

    def note(self) -> str:
        """Say for `explain` where the lines are."""
        if self.reach:
            return f"; its lines are in the memory of {self._names()}, each once"
        return (
            f"; {self._names()} do not reach each other's memory by atomics, so each has a cache "
            "of its own"
        )

    def _names(self) -> str:
        return " and ".join(f"cuda:{gpu}" for gpu in self.gpus)

    def close(self) -> None:
        """Free the memory, or leave it to other processes. Raises CacheError if arrays use it."""
        for member in self._members.values():
            member._check_unused(len(member._volumes))
        for member in self._members.values():
            member.close()
        self._lines.close()
        if self._listener is not None:
            self._listener.close()
        elif self._lock is not None:
            self._lock.release()
        if self._connection is not None:
            self._connection.close()
        if self._memory is not None:
            self._memory.close()
        _close_all(self._descriptors)


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _end(listener: Listener, pid: int) -> None:
    """Stop answering other processes: the cache was lost. A forked child has no part in it."""
    if os.getpid() == pid:
        listener.close()


def _numbers(given: Sequence[object]) -> list[int]:
    if isinstance(given, str | Device) or not given:
        raise CacheError(f'peers={given!r}: name the GPUs, such as ["cuda:0", "cuda:1"]')
    found = [gpus.number_of(each) for each in given]
    numbers = [each for each in found if each is not None]
    if len(numbers) != len(found):
        raise CacheError("peers are GPUs: the CPU device has all memory of the host already")
    if len(set(numbers)) != len(numbers):
        raise CacheError(f"peers={[f'cuda:{each}' for each in numbers]}: name each GPU once")
    if len(numbers) > _GPUS_MAX:
        raise CacheError(f"{len(numbers)} peers are more than {_GPUS_MAX}")
    return numbers


def _used(
    numbers: Sequence[int], given: Sequence[object], device: Device | None
) -> list[CudaDevice]:
    """Return the devices of this process: the one it chose, or all of them."""
    if device is not None and getattr(device, "ordinal", None) not in numbers:
        raise CacheError(f"device={device.name} is none of the peers")
    chosen = given if device is None else [device]
    return [each for each in map(resolve, chosen) if isinstance(each, CudaDevice)]
