"""One cache in the memory of several GPUs, whose arrays read by all of them.

Frames, tags and locks of sets lie at one range of addresses, an equal part of it on each GPU. So
each line has one home, by the number of its set, and a kernel on any GPU finds it there: by plain
loads if it is its own, over NVLink if it is another's. Kernels of such a cache are compiled for
operations at system scope. Whoever misses fills the frame, wherever it is; no other GPU needs to
run for that. What names queues is a GPU's own: the struct of the cache and the table of volumes.

Arrays of one file, one on each GPU, have the same line numbers. They only read.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flashwarp import endings
from flashwarp.cache.memory import CacheMemory
from flashwarp.cache.sizes import divide
from flashwarp.cache.volume_table import free_lines
from flashwarp.device import CudaDevice, Device, resolve
from flashwarp.errors import ArgumentError, CacheError, ClosedError
from flashwarp.policy import Policy
from flashwarp.storage import File, Memory, Namespace, files


@dataclass
class _Lines:
    """The line numbers of one storage, and how many arrays have them."""

    begin: int
    count: int
    users: int = 0


class Peers:
    """The caches of several GPUs that are one, or one each if the GPUs do not reach each other.

    Parameters
    ----------
    cache : Cache
        What the user made; its capacity is that of each GPU.
    devices : sequence of Device or str
    """

    def __init__(self, cache: Any, devices: Sequence[object]) -> None:
        if cache._wanted is None or cache.shared is not None or cache._asked_device is not None:
            raise CacheError(
                "peers= is for caches of a capacity in bytes, without device= or shared="
            )
        if cache.host_memory:
            raise CacheError("peers= is for caches without host_memory=")
        self.devices = _gpus(devices)
        self._cache = cache
        self._lock = endings.Lock()
        self._lines: dict[Hashable, _Lines] = {}
        contexts = [each.context for each in self.devices]
        self.reach = all(a.reaches(b) for a in contexts for b in contexts)
        self._members: dict[Device, Any] = {}
        endings.uninterrupted(self._make, lambda _: self.close())

    def _make(self) -> None:
        cache = self._cache
        if not self.reach:
            for each in self.devices:
                self._members[each] = self._member(cache.policy, cache.set_count)
                self._members[each]._allocate(each)
            return
        policy = replace(cache.policy, shared_by_gpus=True)
        first = self.devices[0]
        allocate = partial(first.allocate_across, self.devices)
        wanted = cache.capacity * len(self.devices)
        sets = divide(wanted, cache.ways, cache.line_bytes)
        memory = CacheMemory.allocated(
            first, allocate, sets, cache.ways, cache.line_bytes, cache._tier, policy
        )
        self._memory = memory
        for each in self.devices:
            member = self._members[each] = self._member(policy, sets)
            member._take(memory.for_gpu(first, each), each)

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
            names = ", ".join(each.name for each in self.devices)
            raise ArgumentError(
                f"the cache is on its peers {names}, the array on {device.name}: open it on one of "
                "them, device="
            )
        return found

    def lines_of(self, storage: Namespace, nbytes: int) -> int | None:
        """Return the first line number of a storage, which arrays on all GPUs share.

        `begin_to_leave` and `leave` give it back. None: each GPU has a cache of its own.
        """
        if not self.reach:
            return None
        key = _identity(storage)
        count = max(1, -(-nbytes // self._cache.line_bytes))
        with self._lock:
            if self._cache.closed:
                raise ClosedError("the cache is closed")
            found = self._lines.get(key)
            if found is None:
                taken = [(each.begin, each.count) for each in self._lines.values()]
                begin = free_lines(count, self._cache.line_bytes, taken, range(1 << 37))
                found = self._lines[key] = _Lines(begin, count)
            found.users += 1
            return found.begin

    def begin_to_leave(self, begin: int) -> bool:
        """Note that an array with these line numbers is being closed.

        Returns whether it was the last: then it empties the lines. Nobody else gets the numbers
        before `leave`.
        """
        with self._lock:
            for each in self._lines.values():
                if each.begin == begin:
                    each.users -= 1
                    return each.users == 0
        return True

    def leave(self, begin: int) -> None:
        """Let others have the line numbers, unless another array has them by now."""
        with self._lock:
            for key, each in list(self._lines.items()):
                if each.begin == begin and each.users == 0:
                    del self._lines[key]

    def note(self) -> str:
        """Say for `explain` where the lines are."""
        names = " and ".join(each.name for each in self.devices)
        if self.reach:
            return f"; its lines are in the memory of {names}, each once"
        return (
            f"; {names} do not reach each other's memory by atomics, so each has a cache of its own"
        )

    def close(self) -> None:
        """Free the memory. Raises CacheError while arrays are attached."""
        for member in self._members.values():
            member._check_unused(len(member._volumes))
        for member in self._members.values():
            member.close()
        if self.reach and "_memory" in self.__dict__:
            self._memory.close()


def _gpus(devices: Sequence[object]) -> list[CudaDevice]:
    if isinstance(devices, str | Device) or not devices:
        raise CacheError(f'peers={devices!r}: name the GPUs, such as ["cuda:0", "cuda:1"]')
    found = [resolve(each) for each in devices]
    gpus = [each for each in found if isinstance(each, CudaDevice)]
    if len(gpus) != len(found):
        raise CacheError("peers are GPUs: the CPU device has all memory of the host already")
    if len(set(gpus)) != len(gpus):
        raise CacheError(f"peers={[each.name for each in gpus]}: name each GPU once")
    return gpus


def _identity(storage: Namespace) -> Hashable:
    """Return a key that storages of the same bytes share; any other storage has its own."""
    if isinstance(storage, Memory):
        return storage.address, storage.nbytes
    if isinstance(storage, File):
        return files.stamp(storage.native.fd), storage.offset, storage.nbytes
    return object()
