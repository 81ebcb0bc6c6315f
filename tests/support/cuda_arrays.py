"""Arrays and tensors on the fake driver of `fake_cuda`, for checks: kernels do nothing there."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

import flashwarp as fw
from flashwarp._jit import compiler, precompiled
from flashwarp._jit.compiler import Artifact, KernelResources
from flashwarp._jit.program import LoadedKernel
from flashwarp.cache.failures import FailureSequence
from flashwarp.device import CudaDevice, DeviceArray
from flashwarp.launch.rows import MaintenanceParams, RowParams
from flashwarp.program.compiling import Kernel
from support.fake_cuda import fake, report

LANE = 0x10257  # the first stream after the library's own, and the one beside the calls


def gpu() -> CudaDevice:
    """A GPU whose kernels nobody had to compile."""
    rows, maintenance = ctypes.sizeof(RowParams), ctypes.sizeof(MaintenanceParams)
    names = [f"{verb}_{kind}" for verb in ("gather", "scatter") for kind in ("rows", "elements_8")]
    sizes = dict.fromkeys([*names, "check_indices", "prefetch_rows", "stream_rows"], rows)
    lines = ("flush_lines", "invalidate_lines", "submit_command", "quiesce")
    sizes |= dict.fromkeys(lines, maintenance)
    symbols = {f"_Z{len(name) + 3}fw_{name}y": nbytes for name, nbytes in sizes.items()}
    kernels = {
        symbol: KernelResources(symbol, nbytes, (nbytes,), 32, 0, 0, 0)
        for symbol, nbytes in symbols.items()
    }

    def compiled(arch: str, *_: Any, **__: Any) -> Artifact:
        return Artifact(arch, "built in", b"\x7fELF", "", kernels, from_cache=False)

    # For good: this process runs one check.
    compiler.compile_source = compiled
    precompiled.find = lambda *_: None
    return CudaDevice(0)


@contextlib.contextmanager
def open_array(rows: int = 64) -> Iterator[fw.Array]:
    """Rows of an int64 on such a GPU; the first lane's stream is held."""
    device = gpu()
    memory = fw.storage.Memory(np.zeros(rows, np.int64))
    with device, fw.open(memory, "r+", "i8", device=device, cache="64 KiB") as x:
        fake().fake_hold(LANE)
        yield x
        fake().fake_hold(0)


def calls_of(x: fw.Array) -> list[Any]:
    return [call for queue in x._attachment.calls._queues for call in queue.calls]


def stream_of_last_launch(x: fw.Array) -> int:
    return report(x.device, x.cache.geometry.tags)[2]


def note(failures: FailureSequence, where: int, status: int = 0, opcode: int = 0) -> None:
    """Append an entry, as a kernel does."""
    entry = failures._entries[failures.mark.read % len(failures._entries)]
    entry.where, entry.status, entry.opcode = where, status, opcode
    entry.number = failures.mark.read + 1


class Tensor:
    """A tensor of torch, as far as the library asks."""

    layout, is_cuda, requires_grad = "torch.strided", True, False

    def __init__(self, memory: DeviceArray, dtype: object) -> None:
        self.memory, self.shape, self.dtype, self.device = memory, memory.shape, dtype, "cuda:0"

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.memory.__cuda_array_interface__

    def __dlpack__(self) -> None: ...

    def numel(self) -> int:
        return self.memory.size

    def get_device(self) -> int:
        return 0

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return self.memory.address


class Dtype:
    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"


def torch_on(stream: int) -> Any:
    """Make a torch whose current stream is this one, and import it."""
    Tensor.__module__ = "torch"
    torch: Any = types.ModuleType("torch")
    torch.Tensor, torch.dtype, torch.strided = Tensor, Dtype, Tensor.layout
    for name in ("int64", "int32", "float64"):
        setattr(torch, name, Dtype(name))
    torch._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda _: stream)
    torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)
    sys.modules["torch"] = torch
    return torch


def tensor(x: fw.Array, count: int) -> Any:
    return Tensor(x.device.empty_array((count,), "i8"), sys.modules["torch"].int64)


def own_kernel(x: fw.Array) -> Kernel:
    """`read`, of an array and two pointers, as if `compile` had made it."""
    handle = x.device.built_in("gather_rows", x.cache.policy, ctypes.sizeof(RowParams)).handle
    symbol = "_Z4readN2fw5arrayIxLj1EEEPKxPx"
    sizes = (ctypes.sizeof(x.kernel_handle), 8, 8)
    return Kernel(x.device, LoadedKernel(symbol, sizes, (0,) * 3, None, handle), x.cache.policy)
