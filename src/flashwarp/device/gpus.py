"""GPUs of this machine by their numbers, of which a process need not use all."""

from __future__ import annotations

from collections.abc import Sequence

from flashwarp._jit import cuda_api
from flashwarp.device.cuda import CudaDevice
from flashwarp.errors import ArgumentError, DeviceError


def number_of(device: object) -> int | None:
    """Return the number of a GPU, a `CudaDevice` or its name; None for another device.

    Raises DeviceError if this process sees no such GPU, and ArgumentError for what is no device.
    Opens nothing.
    """
    if isinstance(device, CudaDevice):
        return device.ordinal
    kind, _, number = str(getattr(device, "name", device)).partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda" or not (number.isdecimal() or not number):
        raise ArgumentError(f"device {device!r:.99} is neither 'cpu' nor 'cuda:N'")
    count = cuda_api.device_count()
    if int(number or 0) >= count:
        raise DeviceError(
            f"cuda:{number} does not exist: {count} GPU(s) visible to this process "
            "(CUDA_VISIBLE_DEVICES)"
        )
    return int(number or 0)


def all_reach(numbers: Sequence[int]) -> bool:
    """Whether each of the GPUs reaches the memory of all others, also by atomics."""
    return all(cuda_api.reaches(a, b) for a in numbers for b in numbers)


def identities(numbers: Sequence[int]) -> list[str]:
    """Return what names each of the GPUs in every process; see `Device.identity`."""
    uuids = cuda_api.device_uuids()
    return [uuids[number] for number in numbers]
