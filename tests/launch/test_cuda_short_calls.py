"""The short ways of calls with tensors and of launches of callers' kernels, on the fake driver."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")
pytest.importorskip("cuda.bindings.nvrtc")

import flashwarp as fw
from flashwarp._jit.program import LoadedKernel
from flashwarp.array.array import Array
from flashwarp.cache import miss_list
from flashwarp.errors import (
    ArgumentError,
    BoundsError,
    CaptureError,
    ClosedError,
    DeviceError,
    DtypeError,
    ReadOnlyError,
)
from flashwarp.launch.deferral import Deferral
from flashwarp.launch.launcher import Launcher
from flashwarp.launch.rows import RowParams
from flashwarp.program.compiling import Kernel
from support import fake_cuda
from support.cuda_arrays import (
    Tensor,
    gpu,
    note,
    open_array,
    own_kernel,
    stream_of_last_launch,
    tensor,
    torch_on,
)
from support.fake_cuda import failing, fake

LAUNCH_REFUSED = 719
ARRAY = "N2fw5arrayIxLj1EEE"  # fw::array<long long, 1>, mangled


def ordinary_way_is_closed(patch: pytest.MonkeyPatch) -> None:
    """Let whatever leaves the short way fail."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("went the ordinary way")

    patch.setattr(Array, "_gather", fail)
    patch.setattr(Array, "_prefetch", fail)
    patch.setattr(Kernel, "_launch", fail)


# Tensors.


def check_tensors_go_the_short_way() -> None:
    with open_array() as x:
        torch_on(1)
        index, out = tensor(x, 2), tensor(x, 2)
        before = fake().fake_count(b"cuStreamGetCaptureInfo")
        assert x.gather(index, out=out, stream=1) is out
        assert fake().fake_count(b"cuStreamGetCaptureInfo") == before + 1


def check_tensor_is_not_filled_with_bytes_in_another_order() -> None:
    memory = fw.storage.Memory(np.zeros(64, ">i8"))
    with gpu() as device, fw.open(memory, "r", ">i8", device=device, cache="64 KiB") as x:
        torch_on(1)
        index, out = Tensor(device.empty_array((2,), "i8"), sys.modules["torch"].int64), None
        out = Tensor(device.empty_array((2,), "i8"), sys.modules["torch"].int64)
        with pytest.raises(DtypeError, match="out has dtype int64, the array >i8"):
            x.gather(index, out=out)
        with pytest.raises(DtypeError, match="torch has no dtype for >i8"):
            x.gather(index)


def check_short_calls_are_one_launch_and_no_query() -> None:
    counted = ["cuLaunchKernel", "cuStreamGetCaptureInfo", "cuStreamQuery", "cuEventRecord"]
    with open_array() as x, pytest.MonkeyPatch.context() as patch:
        fake().fake_hold(0)
        torch_on(1)
        index, out = tensor(x, 2), tensor(x, 2)
        x.gather(index, out, stream=1)
        x.prefetch(index, stream=1)
        ordinary_way_is_closed(patch)

        before = [fake().fake_count(name.encode()) for name in counted]
        for _ in range(5):
            assert x.gather(index, out, stream=1) is out
            x.prefetch(index, stream=1)
        made = [fake().fake_count(name.encode()) for name in counted]

        assert [now - then for now, then in zip(made, before, strict=True)] == [10, 10, 0, 10]
        assert stream_of_last_launch(x) == 1
        moved = x._attachment.launcher.moved
        assert (moved.calls, moved.rows) == (6, 12)


def check_kept_plan_does_not_keep_how_a_launch_deferred_its_misses() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(miss_list, "_LINES_MIN", 1)
        patch.setenv("FLASHWARP_DRAIN_BLOCKS", "1")
        with open_array() as x:
            fake().fake_hold(0)
            torch_on(1)
            index, out, asked = tensor(x, 2), tensor(x, 2), []
            prepare = Launcher.prepare_rows
            patch.setattr(
                Launcher, "prepare_rows", lambda *size: asked.append(size[-1]) or prepare(*size)
            )
            for blocks in (0, 1, 0, 1):
                patch.setattr(Deferral, "blocks", blocks)
                x.gather(index, out, stream=1)
                assert x.gather([1, 2]) is not None
            assert asked == [0, 1], "each choice has one plan, for tensors and for ids on the host"


def check_call_on_a_stream_comes_after_the_own_stream() -> None:
    with open_array() as x:
        torch_on(1)
        own, kernel = x.device.own_stream(), own_kernel(x)
        index, out = tensor(x, 2), tensor(x, 2)
        fake().fake_hold(0)
        x.gather(index, out, stream=1)
        assert not fake().fake_waits(1, own)

        fake().fake_hold(own)
        kernel(x, None, None, warps=1)
        x.gather(index, out, stream=1)
        assert fake().fake_waits(1, own) == 2, "it has work, and the kernel may have stored"
        fake().fake_hold(0)
        x.gather(index, out, stream=1)
        fake().fake_hold(own)
        x.gather(index, out, stream=1)
        assert fake().fake_waits(1, own) == 2, "it was idle, and nothing was queued since"

        assert x.device.default_stream().handle == own
        x.gather(index, out, stream=1)
        assert fake().fake_waits(1, own) == 3, "others may have queued work"
        fake().fake_hold(0)


def check_refused_launch_is_raised_and_forgets_the_stream() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        torch_on(1)
        index, out = tensor(x, 2), tensor(x, 2)
        x.gather(index, out, stream=1)
        x.wait()
        before = set(x._attachment._streams)
        with failing("cuLaunchKernel", LAUNCH_REFUSED), pytest.raises(DeviceError, match="gather"):
            x.gather(index, out, stream=1)
        assert x._attachment._streams == before
        assert x.gather(index, out, stream=1) is out


def check_what_is_no_stream_is_refused() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        torch_on(1)
        index, out, kernel = tensor(x, 2), tensor(x, 2), own_kernel(x)
        kernel(x, index, out, stream=1)
        for bad in (-1, 1 << 64, True, "1"):
            with pytest.raises(ArgumentError, match="CUDA stream"):
                x.gather(index, out, stream=bad)
            with pytest.raises(ArgumentError, match="CUDA stream"):
                kernel(x, index, out, stream=bad)
        assert x.gather(index, out, stream=1) is out


def check_short_gather_is_refused_after_close() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        torch_on(1)
        index, out = tensor(x, 2), tensor(x, 2)
        x.gather(index, out, stream=1)
        x.close()
        for call in (x.gather, x.prefetch):
            with pytest.raises(ClosedError):
                call(index, stream=1)


class Described(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("axes", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


DESCRIBE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Described))
CURRENT = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)


class Exchange(ctypes.Structure):
    """DLPackExchangeAPI."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("export", ctypes.c_void_p),
        ("import_", ctypes.c_void_p),
        ("describe", DESCRIBE),
        ("current", CURRENT),
    )


CODES = {"int32": (0, 32), "int64": (0, 64), "float64": (2, 64)}


def with_exchange_api(torch: Any, stream: int) -> list[Any]:
    """Give torch's tensors the exchange API of DLPack; return what must be kept."""

    def describe(of: Any, seen: Any) -> int:
        lengths, steps = of.shape, getattr(of, "steps", None)
        of.lengths = (ctypes.c_int64 * len(lengths))(*lengths)
        of.strides = None if steps is None else (ctypes.c_int64 * len(steps))(*steps)
        code, bits = CODES[of.dtype.name]
        place = 0 if of.memory is None else of.memory.address
        seen[0] = Described(place, 2, getattr(of, "ordinal", 0), len(lengths), code, bits, 1)
        seen[0].shape = of.lengths
        if of.strides is not None:
            seen[0].strides = of.strides
        return 0

    def current(_kind: int, _device: int, found: Any) -> int:
        found[0] = stream
        return 0

    class Example(Tensor):
        def __init__(self, dtype: object) -> None:
            self.memory, self.shape, self.dtype = None, (0,), dtype  # type: ignore[assignment]

    torch.empty = lambda _length, dtype: Example(dtype)
    table = Exchange(1, 3, None, None, None, None, DESCRIBE(describe), CURRENT(current))
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
    name = b"dlpack_exchange_api"
    tensors: Any = Tensor
    tensors.__dlpack_c_exchange_api__ = make(ctypes.addressof(table), name, None)
    return [table, name]


def check_tensors_are_described_by_the_exchange_api() -> None:
    with open_array() as x, pytest.MonkeyPatch.context() as patch:
        fake().fake_hold(0)
        kept = with_exchange_api(torch_on(1), 1)
        index, out = tensor(x, 2), tensor(x, 2)
        for name in ("data_ptr", "get_device", "is_contiguous", "numel"):
            patch.delattr(Tensor, name)
        ordinary_way_is_closed(patch)

        assert x.gather(index, out) is out
        assert x.gather(index, out, stream=1) is out
        x.prefetch(index)
        assert x.gather_async(index, out).result() is out
        assert kept


def check_unusual_tensors_go_the_ordinary_way() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        kept = with_exchange_api(torch_on(1), 1)
        index, out = tensor(x, 2), tensor(x, 2)
        x.gather(index, out)
        with pytest.MonkeyPatch.context() as patch:
            ordinary_way_is_closed(patch)
            for change in ({"steps": (2,)}, {"ordinal": 1}, {"requires_grad": True}):
                for name, value in change.items():
                    setattr(out, name, value)
                with pytest.raises(AssertionError, match="ordinary way"):
                    x.gather(index, out)
                for name in change:
                    delattr(out, name)
            with pytest.raises(AssertionError, match="ordinary way"):
                x.gather(index, index)  # which overlap
            x.gather(index, out)
        note(x._attachment.launcher.volume.indices, 70, status=1)
        with pytest.raises(BoundsError, match="index 70"):
            x.gather(index, out)
        assert kept


# Launches of callers' kernels.


def check_own_kernel_is_ordered_with_tensors_by_few_calls() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        beside = x.device.create_stream()
        torch_on(beside.handle)
        own = x.device.own_stream()
        kernel, index, out = own_kernel(x), tensor(x, 2), tensor(x, 2)
        kernel(x, index, out, warps=1)
        calls = "cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent", "cuStreamQuery"
        before = [fake().fake_count(call.encode()) for call in calls]

        kernel(x, index, out, warps=1)

        made = [fake().fake_count(call.encode()) for call in calls]
        assert [now - then for now, then in zip(made, before, strict=True)] == [1, 3, 2, 0]
        assert stream_of_last_launch(x) == own
        assert fake().fake_waits(beside.handle, own) == 2, "torch's next work waits"
        assert fake().fake_waits(own, beside.handle) == 2, "torch's present work comes before"


def check_own_kernel_is_not_launched_into_a_capture_of_its_operands() -> None:
    with open_array() as x:
        beside, captured = x.device.create_stream(), x.device.create_stream()
        torch_on(beside.handle)
        kernel, index, out = own_kernel(x), tensor(x, 2), tensor(x, 2)

        class Foreign:
            @property
            def __cuda_array_interface__(self) -> dict[str, Any]:
                return {**index.__cuda_array_interface__, "stream": captured.handle}

        before = fake().fake_count(b"cuLaunchKernel")
        for stream, given in ((beside.handle, index), (captured.handle, Foreign())):
            fake().fake_capture_begin(stream)
            with pytest.raises(CaptureError, match=r"give (it|the launch) th"):
                kernel(x, given, out, warps=1)
            assert fake().fake_capture_end()
        assert fake().fake_count(b"cuLaunchKernel") == before


def check_own_kernel_looks_anew_at_what_may_have_changed() -> None:
    with open_array() as x:
        torch = torch_on(x.device.create_stream().handle)
        kernel, index, out = own_kernel(x), tensor(x, 2), tensor(x, 2)
        kernel(x, index, out, warps=1)
        index.dtype = torch.float64
        with pytest.raises(DtypeError, match=r"int64.* has float64"):
            kernel(x, index, out, warps=1)
        index.dtype = torch.int64
        index.is_contiguous = lambda: False
        with pytest.raises(ArgumentError, match="not contiguous"):
            kernel(x, index, out, warps=1)
        del index.is_contiguous
        index.get_device = lambda: 1
        with pytest.raises(ArgumentError, match="on cuda:1, the kernel on cuda:0"):
            kernel(x, index, out, warps=1)
        del index.get_device
        x.close()
        with pytest.raises(ClosedError):
            kernel(x, index, out, warps=1)


def kernel_of(x: fw.Array, types: str, *nbytes: int) -> Kernel:
    """A kernel with parameters of these types, as mangled, as if `compile` had made it."""
    handle = x.device.built_in("gather_rows", x.cache.policy, ctypes.sizeof(RowParams)).handle
    loaded = LoadedKernel(f"_Z3own{types}", nbytes, (0,) * len(nbytes), None, handle)
    return Kernel(x.device, loaded, x.cache.policy)


def check_launch_that_was_made_before_goes_the_short_way() -> None:
    with open_array() as x, pytest.MonkeyPatch.context() as patch:
        fake().fake_hold(0)
        torch_on(x.device.create_stream().handle)
        kernel, index, out = own_kernel(x), tensor(x, 2), tensor(x, 2)
        kernel(x, index, out, warps=1)
        kernel(x, None, tensor(x, 3), stream=1)
        ordinary_way_is_closed(patch)

        launches = fake().fake_count(b"cuLaunchKernel")
        kernel(x, index, out, warps=1)
        kernel(x, out, index, warps=1)
        kernel(x, None, index, stream=1)
        assert fake().fake_count(b"cuLaunchKernel") == launches + 3
        assert 1 in x._attachment._streams
        with pytest.raises(AssertionError, match="ordinary way"):
            kernel(x, index, out, warps=2)


def check_numbers_are_packed_as_the_ordinary_way_does() -> None:
    given = (-5, 1 << 63, 1.5, -0.25, True)
    with open_array() as x, pytest.MonkeyPatch.context() as patch:
        packed: list[tuple[bytes, ...]] = []
        kernel = kernel_of(x, "imfdb", 4, 8, 4, 8, 1)
        where = x.device.empty_array((8,), "i8")
        first = kernel_of(x, "Px", 8)
        assert first.name == "own"
        ordinary = Kernel._launch

        def keep(*args: Any) -> tuple[bytes, ...]:
            packed.append(ordinary(*args))
            return packed[-1]

        patch.setattr(Kernel, "_launch", keep)
        # The fake reports to the address in the first parameter, so put one before.
        kernel = kernel_of(x, "Pximfdb", 8, 4, 8, 4, 8, 1)
        kernel(where, *given, warps=1)
        assert len(packed) == 1
        kernel(where, *given, warps=1)
        assert len(packed) == 2, "memory of ours goes the ordinary way"

        torch_on(1)
        place = Tensor(where, sys.modules["torch"].int64)
        kernel(place, *given, warps=1)
        kernel(place, *given, warps=1)
        assert len(packed) == 3
        for bad in (
            (1 << 31, *given[1:]),
            (given[0], -1, *given[2:]),
            (given[0], 1 << 64, *given[2:]),
            (*given[:2], 1e39, *given[3:]),
            (*given[:4], 1),
        ):
            with pytest.raises((ArgumentError, DtypeError)):
                kernel(place, *bad, warps=1)
        assert len(packed) == 3


def check_short_launch_is_refused_after_close() -> None:
    device = gpu()
    with device:
        memory = fw.storage.Memory(np.zeros(64, np.int64))
        with fw.open(memory, "r+", "i8", device=device, cache="64 KiB") as x:
            kernel = kernel_of(x, ARRAY, ctypes.sizeof(x.kernel_handle))
            nothing = kernel_of(x, "v")
            kernel(x, warps=1)
            kernel(x, warps=1)
            nothing(warps=1)
        with pytest.raises(ClosedError):
            kernel(x, warps=1)
        nothing(warps=1)
    with pytest.raises(ClosedError):
        nothing(warps=1)


def check_arrays_of_two_caches_and_lost_arrays_are_not_mixed_up() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        nbytes = ctypes.sizeof(x.kernel_handle)
        kernel = kernel_of(x, ARRAY + ARRAY, nbytes, nbytes)
        ids = set()
        for _ in range(12):
            memory = fw.storage.Memory(np.zeros(64, np.int64))
            with fw.open(memory, "r+", "i8", device=x.device, cache="64 KiB") as y:
                for _ in range(2):
                    kernel(x, y, warps=1)
                    kernel(y, y, warps=1)
                ids.add(id(y))
            with pytest.raises(ClosedError):
                kernel(x, y, warps=1)
            del y
        memory = fw.storage.Memory(np.zeros(64, np.int64))
        read_only = fw.open(memory, "r", "i8", device=x.device, cache="64 KiB")
        with read_only, pytest.raises(ReadOnlyError):
            kernel(read_only, x, warps=1)


def check_captured_stream_gets_a_launch_the_ordinary_way() -> None:
    with open_array() as x:
        fake().fake_hold(0)
        torch_on(1)
        kernel = kernel_of(x, ARRAY, ctypes.sizeof(x.kernel_handle))
        kernel(x, warps=1, stream=1)
        kernel(x, warps=1)
        fake().fake_capture_begin(1)
        kernel(x, warps=1, stream=1)
        with pytest.raises(CaptureError, match="give it the stream"):
            kernel(x, warps=1)
        assert fake().fake_capture_end()
        assert fake().fake_host_nodes() == 1, "a replay wakes the controller"
        fake().fake_destroy_graphs()


def check_launch_is_not_made_beside_a_capture_of_cupy() -> None:
    with open_array() as x, pytest.MonkeyPatch.context() as patch:
        cupy: Any = types.ModuleType("cupy")
        stream = types.SimpleNamespace(ptr=1)
        cupy.cuda = types.SimpleNamespace(get_current_stream=lambda _ordinal: stream)
        sys.modules["cupy"] = cupy
        kernel = kernel_of(x, "v")
        kernel(warps=1)
        fake().fake_capture_begin(1)
        with pytest.raises(CaptureError, match="cupy's current stream"):
            kernel(warps=1)
        assert fake().fake_capture_end()
        ordinary_way_is_closed(patch)
        kernel(warps=1)


def check_a_library_that_another_thread_imports_has_no_stream_yet() -> None:
    with open_array() as x:
        sys.modules["cupy"] = types.ModuleType("cupy")

        assert x.device.current_stream("cupy") == x.device.default_stream()
        assert x.device.idle()


test_cuda = fake_cuda.test_of(globals())
