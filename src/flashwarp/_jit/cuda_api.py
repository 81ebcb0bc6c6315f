"""Calls of the CUDA driver by cuda-bindings: which nothing outside of `_jit` imports.

Every failing call raises an exception that names the call, CUDA's error and what to do about it.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from flashwarp.errors import DeviceError, DeviceOutOfMemory

# Ways out of the errors that users can cause. Other errors carry CUDA's own description.
_ADVICE = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free memory or choose a smaller cache",
    "CUDA_ERROR_NO_DEVICE": (
        "no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES, or use device='cpu'"
    ),
    "CUDA_ERROR_INVALID_DEVICE": "no GPU has this number: see CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the kernel driver and libcuda.so.1 differ: reboot",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "remove the cuda-compat package",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": (
        "the compiler is newer than the driver: update the driver or install an older "
        "nvidia-cuda-nvrtc"
    ),
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the code was compiled for another GPU architecture",
    "CUDA_ERROR_INVALID_IMAGE": (
        "the driver cannot read the compiled code: update the driver or install an older "
        "nvidia-cuda-nvrtc"
    ),
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": (
        "a page of this range is registered already: close the other registration first"
    ),
    "CUDA_ERROR_ILLEGAL_ADDRESS": (
        "a kernel touched memory that is not its own; this process cannot use the GPU any more: "
        "restart it, and find the access with compute-sanitizer"
    ),
    "CUDA_ERROR_MISALIGNED_ADDRESS": (
        "a kernel made an unaligned access; this process cannot use the GPU any more: restart it"
    ),
    "CUDA_ERROR_LAUNCH_FAILED": "this process cannot use the GPU any more: restart it",
    "CUDA_ERROR_ASSERT": "a device assertion failed; its text is on standard output",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": (
        "the stream is being captured into a CUDA graph: do this before or after the capture"
    ),
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "the device was closed or reset",
}


def import_package(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError, OSError) as error:
        raise DeviceError(
            f"CUDA was not found: importing {module} failed ({error}). "
            "Install it with: pip install 'flashwarp[cuda]'; or use device='cpu'."
        ) from error


@functools.cache
def driver() -> Any:
    """Return the driver API, initialized once a process."""
    cuda = import_package("cuda.bindings.driver")
    try:
        (status,) = cuda.cuInit(0)
    except RuntimeError as error:
        raise DeviceError(
            f"CUDA's driver was not found: {str(error).rstrip('.')}. "
            "libcuda.so.1 comes with the NVIDIA driver; without one use device='cpu'."
        ) from error
    if int(status) != 0:
        raise error_of(cuda, "cuInit", status)
    return cuda


def error_of(cuda: Any, call: str, status: Any, doing: str = "") -> DeviceError | DeviceOutOfMemory:
    """Make the exception for one failed driver call."""
    code = int(status)
    name, text = f"CUDA error {code}", "unknown to the driver"
    name_status, name_bytes = cuda.cuGetErrorName(status)
    text_status, text_bytes = cuda.cuGetErrorString(status)
    if int(name_status) == 0 and int(text_status) == 0:
        name, text = name_bytes.decode(), text_bytes.decode()
    message = f"{doing + ': ' if doing else ''}{call} failed with {name} ({text})"
    advice = _ADVICE.get(name)
    if advice:
        message += f": {advice}"
    kind = DeviceOutOfMemory if name == "CUDA_ERROR_OUT_OF_MEMORY" else DeviceError
    return kind(message)


def call_driver(call: str, *arguments: Any, doing: str = "") -> Any:
    """Call the driver; return its one value, or None where it gives none."""
    cuda = driver()
    status, *values = getattr(cuda, call)(*arguments)
    if int(status) != 0:
        raise error_of(cuda, call, status, doing)
    return values[0] if len(values) == 1 else (tuple(values) or None)


def device_count() -> int:
    """Count the GPUs this process sees. Raises DeviceError where CUDA does not work."""
    return int(call_driver("cuDeviceGetCount"))


def device_uuids() -> list[str]:
    """Return what names each GPU that this process sees in every process, by ordinal."""
    return [uuid_of(call_driver("cuDeviceGet", ordinal)) for ordinal in range(device_count())]


def uuid_of(device: Any) -> str:
    """Return what names a GPU in every process, whatever its ordinal there."""
    return bytes(call_driver("cuDeviceGetUuid", device).bytes).hex()


def reaches(gpu: int, other: int) -> bool:
    """Whether kernels of a GPU may access the memory of another one, also by atomics.

    Over NVLink they may; over PCIe there are no atomics. Needs no context.
    """
    if gpu == other:
        return True
    devices = [call_driver("cuDeviceGet", each) for each in (gpu, other)]
    if not call_driver("cuDeviceCanAccessPeer", *devices):
        return False
    asked = driver().CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return bool(call_driver("cuDeviceGetP2PAttribute", asked, *devices))


def driver_version() -> tuple[int, int]:
    """Return the newest CUDA version that the installed driver serves, as (major, minor)."""
    version = int(call_driver("cuDriverGetVersion"))
    return version // 1000, version % 1000 // 10
