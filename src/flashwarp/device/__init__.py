"""Where kernels run: `CpuDevice` and `CudaDevice`, their memory, launches and streams.

A device owns what it allocates: closing it frees everything, in reverse. Waits have a time limit.
`view` inspects arrays of other libraries without importing these. Importing this package imports
numpy, but neither CUDA nor any other array library.
"""

from __future__ import annotations

import logging
import os
from functools import partial

from flashwarp import endings
from flashwarp._jit import cuda_api
from flashwarp.config import warn_of_misspelt
from flashwarp.device.base import Device
from flashwarp.device.cpu import CpuDevice
from flashwarp.device.cuda import CudaDevice
from flashwarp.device.foreign import ArrayView, Stream, stream_handle, view
from flashwarp.device.kernels import PreparedLaunch
from flashwarp.device.memory import DeviceArray, DeviceMemory, MemoryInfo, OwnedStream, Registration
from flashwarp.device.streams import Event
from flashwarp.errors import ArgumentError, DeviceError

__all__ = [
    "ArrayView",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "DeviceArray",
    "DeviceMemory",
    "Event",
    "MemoryInfo",
    "OwnedStream",
    "PreparedLaunch",
    "Registration",
    "Stream",
    "find",
    "resolve",
    "stream_handle",
    "view",
]

_log = logging.getLogger(__name__)

# There is one where the driver of a GPU is loaded.
_GPUS = "/dev/nvidiactl"

_opened: dict[str, Device] = {}
_opened_lock = endings.Lock()


def resolve(device: object = None) -> Device:
    """Return the device that the user names; the process shares one object for each device.

    Parameters
    ----------
    device : Device, str or torch.device, optional
        "cpu", "cuda", "cuda:N". Default: "cuda:0" if a GPU works, else "cpu".

    Returns
    -------
    Device
        Lives until it is closed or the process ends.
    """
    if isinstance(device, Device):
        device._check_open()
        return device
    if device is not None:
        return _open(str(device))
    try:
        return _open("cuda:0")
    except DeviceError as error:
        # Who has a GPU and no word of this would measure the CPU.
        level = logging.WARNING if os.path.exists(_GPUS) else logging.INFO
        _log.log(level, "running on the CPU: %s", error)
        return _open("cpu")


def find(kind: str, identity: str) -> Device:
    """Return the device that has this `Device.identity`; raises DeviceError if there is none."""
    if kind == "cpu":
        return _open("cpu")
    uuids = cuda_api.device_uuids()
    if identity not in uuids:
        raise DeviceError(
            f"this process sees no GPU {identity}, only {', '.join(uuids) or 'none'}: let "
            "CUDA_VISIBLE_DEVICES show it"
        )
    return _open(f"cuda:{uuids.index(identity)}")


def _open(name: str) -> Device:
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or not (number.isdecimal() or name == kind):
        raise ArgumentError(f"device {name!r} is neither 'cpu' nor 'cuda:N'")
    warn_of_misspelt()
    ordinal = int(number or 0)
    return endings.holding([_opened_lock], partial(_find_or_make, kind, ordinal))


def _find_or_make(kind: str, ordinal: int) -> Device:
    key = f"{kind}:{ordinal}"
    found = _opened.get(key)
    if found is None or found._closed:
        found = _opened[key] = CpuDevice() if kind == "cpu" else CudaDevice(ordinal)
    return found


def _forget_opened() -> None:
    """Forget all devices in a forked child, where none works and the lock may be held for ever."""
    global _opened_lock
    _opened_lock = endings.Lock()
    _opened.clear()


os.register_at_fork(after_in_child=_forget_opened)
