"""Sizes of a checkpointer's caches: defaults fit the machine, and what cannot fit is refused."""

from __future__ import annotations

from flashwarp.config import parse_bytes
from flashwarp.device import Device
from flashwarp.device.host_memory import available_bytes
from flashwarp.errors import DeviceOutOfMemory

_GPU_BYTES_MAX, _HOST_BYTES_MAX = 4 << 30, 32 << 30
# One part in so many of the free memory: the program that is saved grows too. On the CPU device
# both caches are of one memory, and nothing is gained by much of it.
_GPU_PARTS = {"cuda": 8, "cpu": 16}
_HOST_PARTS = {"cuda": 2, "cpu": 8}


def cache_bytes(
    device: Device, gpu_memory: int | str | None, host_memory: int | str | None
) -> tuple[int, int]:
    """Return the bytes of both caches; raises DeviceOutOfMemory for more than is free."""
    gpu_free, host_free = device.memory_info().free_bytes, available_bytes()
    gpu_default = min(_GPU_BYTES_MAX, gpu_free // _GPU_PARTS[device.kind])
    gpu = _size("gpu_memory", gpu_memory, gpu_free, gpu_default)
    if device.kind == "cpu":
        host_free -= gpu
    host_default = min(_HOST_BYTES_MAX, host_free // _HOST_PARTS[device.kind])
    return gpu, _size("host_memory", host_memory, host_free, host_default)


def _size(name: str, wanted: int | str | None, free: int, default: int) -> int:
    if wanted is None:
        return default
    nbytes = parse_bytes(wanted, name)
    if nbytes > free:
        raise DeviceOutOfMemory(
            f"{name}={wanted!r} is more than the {max(free, 0) >> 20} MiB that are free: pass at "
            f"most so much, 0 for no such cache, or leave {name} out, which fits the machine"
        )
    return nbytes
