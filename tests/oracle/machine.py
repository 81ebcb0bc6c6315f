"""What programs run on: the CPU device, the driver without a GPU, or a GPU; and their operands."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import flashwarp as fw
from flashwarp.cache import miss_list
from flashwarp.launch import deferral
from oracle.folders import DISK

_KERNELS = """
#include "flashwarp/array.cuh"
typedef ELEMENT element;
FW_KERNEL load(fw::array<const element> x, const uint64_t* at, element* out, uint64_t n) {
  for (uint64_t i = fw::base::thread_index(); i < n; i += fw::base::thread_count()) {
    out[i] = x[at[i]];
  }
}
FW_KERNEL store(fw::array<element> x, const uint64_t* at, const element* from, uint64_t n) {
  for (uint64_t i = fw::base::thread_index(); i < n; i += fw::base::thread_count()) {
    x.store(at[i], from[i]);
  }
}
"""
_OF_TORCH = [np.dtype(each) for each in ("u1", "i2", "i4", "i8", "f4", "f8")]
ELEMENTS = {"u1": "uint8_t", "i4": "int32_t", "f4": "float", "i8": "int64_t", "f8": "double"}


class Machine:
    """A device for all programs of a process.

    Attributes
    ----------
    kind : str
        "cpu", "fake" or "cuda".
    streams : list
        What calls are given as `stream=`; on the CPU device only None.
    torch : module or None
        Whose tensors are operands.
    peers : list
        GPUs that reach each other's memory; empty if there are no two.
    """

    def __init__(self, device: str, seed: int = 0) -> None:
        self.kind = device.partition(":")[0]
        self.torch: Any = None
        if self.kind == "fake":
            from support import host_kernels

            self.devices: list[Any] = [host_kernels.gpu(delay_us=300, seed=seed)]
        elif self.kind == "cuda":
            self.devices = [fw.device.CudaDevice(int(device.partition(":")[2] or 0))]
            with contextlib.suppress(ImportError):
                import torch

                self.torch = torch
        else:
            self.devices = [fw.device.CpuDevice(1), fw.device.CpuDevice(2)]
        self.peers = self._find_peers()
        self.streams: list[Any] = [None]
        if self.on_gpu:
            self.streams += [self.devices[0].create_stream() for _ in range(2)]
        if self.torch is not None:
            self.streams += [self.torch.cuda.Stream(), self.torch.cuda.current_stream()]

    def _find_peers(self) -> list[Any]:
        if self.kind == "fake":
            from support.fake_cuda import fake

            fake().fake_devices(2, 1)
            return [self.devices[0], fw.device.CudaDevice(1)]
        if self.kind == "cuda":
            with contextlib.suppress(fw.errors.DeviceError):
                return [self.devices[0], fw.device.CudaDevice(1 - self.devices[0].ordinal)]
        return []

    @property
    def on_gpu(self) -> bool:
        """Whether the library takes the ways of a GPU."""
        return self.kind != "cpu"

    def place(self, host: npt.NDArray[Any], library: str) -> Any:
        """Return a copy of a host array in the device's memory; it is there when this returns."""
        if library == "torch":
            tensor = self.torch.from_numpy(np.ascontiguousarray(host).copy()).to("cuda")
            self.torch.cuda.current_stream().synchronize()
            return tensor
        device = self.devices[0]
        array = device.empty_array(host.shape, host.dtype)
        if host.size:
            device.upload(array.address, np.ascontiguousarray(host))
        return array

    def libraries(self, dtype: np.dtype[Any]) -> list[str]:
        """Name what operands on the device may be of."""
        if not self.on_gpu:
            return []
        return ["flashwarp", "torch"] if self.torch and dtype in _OF_TORCH else ["flashwarp"]

    def fetch(self, array: Any, stream: Any = None) -> npt.NDArray[Any]:
        """Copy an array of the device to the host, behind what is queued on a stream."""
        if isinstance(array, np.ndarray):
            return array
        if not self.on_gpu:
            return np.asarray(array)
        device = self.devices[0]
        if hasattr(array, "data_ptr"):
            host = np.empty(tuple(array.shape), str(array.dtype).removeprefix("torch."))
            address = array.data_ptr()
            stream = stream or self.torch.cuda.current_stream()
        else:
            host, address = np.empty(array.shape, array.dtype), array.address
        if host.size:
            device.download_into(address, host, stream)
        return host

    def make_late(self, stream: Any) -> None:
        """Let a stream of a GPU do nothing for some 100 us; the other devices' are late by luck."""
        if self.torch is None or stream is None:
            return
        if not hasattr(stream, "cuda_stream"):
            stream = self.torch.cuda.ExternalStream(stream.handle)
        with self.torch.cuda.stream(stream):
            self.torch.cuda._sleep(200_000)

    def on_a_stream(self, number: int) -> Any:
        """Make one of torch's streams the current one, for calls that are given none."""
        if self.torch is None or number % 3:
            return contextlib.nullcontext()
        return self.torch.cuda.stream(self.streams[-1 - number % 2])

    def wait_with_the_interpreter(self) -> None:
        """Wait for the GPU in a thread that keeps the interpreter's lock, as some libraries do."""
        with self.devices[0].context:
            assert _rude_driver().cuCtxSynchronize() == 0

    def leave_memory_in_a_cycle(self) -> None:
        """Let the collector free memory of the GPU, which waits for it, in whichever thread."""
        cycle: list[Any] = [self.devices[0].empty_array((64,), "u1")]
        cycle.append(cycle)

    @contextlib.contextmanager
    def few_blocks(self, seed: int) -> Iterator[None]:
        """Let small launches leave what misses to a few blocks, in a third of a GPU's programs."""
        with pytest.MonkeyPatch.context() as patch:
            if self.kind == "cuda" and seed % 3 == 0:
                patch.setenv("FLASHWARP_DRAIN_BLOCKS", str(1 + seed // 3 % 2))
                patch.setattr(miss_list, "_LINES_MIN", 1)
                patch.setattr(deferral, "_WARPS_PER_DRAIN", 1)
            yield

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a machine lives as long as its process
    def program(self, dtype: str, device: int) -> Any:
        """Return kernels that load and store elements of a type."""
        return self.program_for(dtype, self.devices[device], "clock")

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def program_for(self, dtype: str, device: Any, policy: Any) -> Any:
        """Return the same for the caches of a policy."""
        return fw.compile(_KERNELS.replace("ELEMENT", ELEMENTS[dtype]), device, policy=policy)

    def close(self) -> None:
        """Close what was opened."""
        for device in {*self.devices, *self.peers}:
            device.close()


@functools.cache
def _rude_driver() -> Any:
    return ctypes.PyDLL("libcuda.so.1")


@functools.cache
def takes_direct_io() -> bool:
    """Whether files on `DISK` can be opened with O_DIRECT."""
    with tempfile.NamedTemporaryFile(dir=DISK) as file:
        try:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            return False
    return True


def use_fake(library: str) -> None:
    """Let this process find the driver without a GPU, before anything looks for one."""
    assert "flashwarp._jit.driver" not in sys.modules or not fw.device._opened
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
