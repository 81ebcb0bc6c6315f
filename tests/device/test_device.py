"""Devices without a GPU: the CPU device, other libraries' arrays and streams, clear errors."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashwarp._jit import cuda_context
from flashwarp.device import (
    ArrayView,
    CpuDevice,
    DeviceArray,
    Stream,
    resolve,
    stream_handle,
    view,
)
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    DeviceError,
    DeviceOutOfMemory,
    DeviceTimeout,
    DtypeError,
    ForkError,
)
from support.built_in import launch


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice(threads=2)


# Memory of the CPU device.


@pytest.mark.parametrize("nbytes", [1, 4096, (2 << 20) + 1])
def test_memory_is_zero_and_reachable(device: CpuDevice, nbytes: int) -> None:
    with device.allocate(nbytes) as memory:
        assert memory.nbytes == nbytes
        assert memory.address % 4096 == 0
        assert not memory.as_numpy().any()

        memory.as_numpy()[-1] = 7

        assert device.download(memory.address + nbytes - 1, 1) == b"\x07"


@pytest.mark.parametrize("alignment", [1, 4096, 65536, 2 << 20])
def test_host_memory_has_the_alignment_asked_for(device: CpuDevice, alignment: int) -> None:
    with device.allocate_host(10_000, alignment) as memory:
        assert memory.address % alignment == 0
        memory.as_numpy()[:] = 255


@pytest.mark.parametrize("alignment", [0, -4096, 3000])
def test_alignment_that_is_no_power_of_two_is_refused(device: CpuDevice, alignment: int) -> None:
    with pytest.raises(ArgumentError, match="power of two"):
        device.allocate_host(100, alignment)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_allocation_of_nothing_is_refused(device: CpuDevice, nbytes: int) -> None:
    with pytest.raises(ArgumentError, match="cannot allocate"):
        device.allocate(nbytes)


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 70])
def test_out_of_memory_is_typed_and_names_the_size(device: CpuDevice, nbytes: int) -> None:
    with pytest.raises(DeviceOutOfMemory, match=str(nbytes)) as caught:
        device.allocate(nbytes)

    assert isinstance(caught.value, MemoryError)


def test_upload_and_download_move_bytes(device: CpuDevice) -> None:
    memory = device.allocate(64)
    values = np.arange(8, dtype=np.uint64)

    device.upload(memory.address, values)
    device.fill(memory.address, 0xFF, 8)

    assert device.download(memory.address, 8) == b"\xff" * 8
    back = np.empty(7, np.uint64)
    device.download_into(memory.address + 8, back)
    assert back.tolist() == list(range(1, 8))


def test_upload_takes_any_contiguous_buffer(device: CpuDevice) -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("first", ctypes.c_uint32), ("second", ctypes.c_uint32))

    memory = device.allocate(64)
    for data in (b"12345678", bytearray(b"12345678"), memoryview(b"12345678"), Pair(1, 2), b""):
        device.upload(memory.address, data)
        assert device.download(memory.address, len(bytes(data))) == bytes(data)


def test_upload_of_strided_array_is_refused(device: CpuDevice) -> None:
    memory = device.allocate(64)

    with pytest.raises(ArgumentError, match="contiguous"):
        device.upload(memory.address, np.arange(8)[::2])


def test_download_into_read_only_buffer_is_refused(device: CpuDevice) -> None:
    memory = device.allocate(64)

    with pytest.raises(ArgumentError, match="read-only"):
        device.download_into(memory.address, b"1234")


def test_numpy_view_keeps_the_memory_from_being_lost(device: CpuDevice) -> None:
    array = device.allocate(1 << 20).as_numpy()
    gc.collect()

    array[:] = 3

    assert int(array.sum()) == 3 << 20


def test_lost_memory_is_released(device: CpuDevice) -> None:
    memory = device.allocate(4096)
    assert len(device._owned) == 1

    del memory
    gc.collect()

    assert not device._owned


def test_close_releases_everything_and_may_be_called_twice(device: CpuDevice) -> None:
    memory, host = device.allocate(100), device.allocate_host(100)
    registration = device.register_host(host.address, 100, read_only=True)

    memory.close()
    memory.close()
    device.close()
    device.close()

    assert memory.closed
    assert host.closed
    assert registration.closed
    with pytest.raises(ClosedError):
        device.allocate(1)


def test_registration_keeps_the_address(device: CpuDevice) -> None:
    mapping = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))

    with device.register_host(address, 4096, read_only=False) as registration:
        assert registration.address == address


def test_memory_info_is_plausible(device: CpuDevice) -> None:
    info = device.memory_info()

    assert 0 < info.free_bytes <= info.total_bytes


# Streams, events, launches.


def test_cpu_streams_and_events_are_always_done(device: CpuDevice) -> None:
    start, end = device.event(), device.event()

    start.record()
    device.wait(device.default_stream(), timeout_s=0)
    device.order(None, 5)
    end.record(device.current_stream("torch"))
    end.wait(timeout_s=0)

    assert 0 <= end.elapsed_ms(start) < 10_000


def test_cpu_launch_of_unknown_kernel_is_refused(device: CpuDevice) -> None:
    with pytest.raises(ArgumentError, match="no built-in kernel fw_nothing"):
        launch(device, "nothing", b"", warps=1)


def test_cpu_launch_with_a_struct_of_another_size_is_refused(device: CpuDevice) -> None:
    with pytest.raises(DeviceError, match=r"fw_gather_rows takes a struct of 168 bytes.* has 3"):
        launch(device, "gather_rows", b"123", warps=1)


def test_cpu_launch_in_a_forked_child_is_refused(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)

    with pytest.raises(ForkError, match=str(pid)):
        launch(device, "gather_rows", b"", warps=1)


class WithProtocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 7777


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, 0),
        (0, 0),
        (2, 2),
        (1 << 47, 1 << 47),
        (Stream(5000), 5000),
        (WithProtocol(), 7777),
        (SimpleNamespace(__cuda_stream__=(0, 7778)), 7778),
        (SimpleNamespace(cuda_stream=7779), 7779),
        (SimpleNamespace(ptr=7780), 7780),
    ],
)
def test_streams_of_every_library_are_understood(stream: object, handle: int) -> None:
    assert stream_handle(stream) == handle


@pytest.mark.parametrize(
    "stream",
    [
        -1,
        3,
        4095,
        1 << 56,
        1 << 64,
        True,
        "5",
        1.5,
        SimpleNamespace(ptr=None),
        SimpleNamespace(__cuda_stream__=(1, 3)),
    ],
)
def test_what_is_no_stream_is_refused(stream: object) -> None:
    with pytest.raises(ArgumentError):
        stream_handle(stream)


# Which device.


def test_cpu_is_one_device_for_the_process() -> None:
    assert resolve("cpu") is resolve("cpu")
    assert resolve(resolve("cpu")) is resolve("cpu")


def test_closed_device_is_replaced() -> None:
    first = resolve("cpu")
    first.close()

    assert resolve("cpu") is not first
    with pytest.raises(ClosedError):
        resolve(first)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "", "mps", "cpu:0:0"])
def test_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match="neither 'cpu' nor 'cuda:N'"):
        resolve(name)


WITHOUT_CUDA = """
import sys
import time
import flashwarp.device as d
from flashwarp.errors import DeviceError
sys.modules["cuda"] = None
assert d.resolve().name == "cpu"
try:
    d.resolve("cuda")
except DeviceError as error:
    print(error)
"""


def test_without_cuda_the_default_is_the_cpu_and_a_gpu_is_a_clear_error() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_CUDA], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "cuda.bindings.driver" in done.stdout
    assert "pip install" in done.stdout
    assert "device='cpu'" in done.stdout


# Arrays of other libraries.


def test_view_of_numpy_array() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)

    seen = view(array)

    assert seen == ArrayView(
        address=array.ctypes.data,
        shape=(2, 3),
        dtype=np.dtype("float32"),
        contiguous=True,
        device_kind="cpu",
        ordinal=None,
        library="numpy",
        owner=array,
    )
    assert seen.nbytes == 24


def test_view_tells_strided_and_read_only_arrays() -> None:
    array = np.zeros((4, 4))
    frozen = array.copy()
    frozen.flags.writeable = False

    assert not view(array[:, ::2]).contiguous
    assert not view(array.T).contiguous
    assert view(frozen).read_only


@pytest.mark.parametrize("values", [[3, 1, 2], (0, 5), range(3), 7, np.int32(7), b"ab"])
def test_view_of_python_values_is_a_numpy_array(values: Any) -> None:
    seen = view(values)

    assert seen.library == "numpy"
    assert seen.shape == np.asarray(values).shape


def test_view_of_objects_is_refused() -> None:
    with pytest.raises(DtypeError, match="not an array of numbers"):
        view(object())


def cuda_array(**more: object) -> Any:
    fields = {
        "version": 3,
        "shape": (4, 5),
        "typestr": "<i8",
        "data": (4096, False),
        "strides": None,
    }
    return SimpleNamespace(__cuda_array_interface__=fields | more, device=SimpleNamespace(id=1))


def test_view_of_cuda_array_interface() -> None:
    array = cuda_array(stream=9, data=(4096, True))

    assert view(array) == ArrayView(
        address=4096,
        shape=(4, 5),
        dtype=np.dtype("int64"),
        contiguous=True,
        device_kind="cuda",
        ordinal=1,
        library="other",
        owner=array,
        read_only=True,
        stream=9,
    )


@pytest.mark.parametrize(
    ("shape", "strides", "contiguous"),
    [
        ((4, 5), (40, 8), True),
        ((4, 5), (80, 8), False),
        ((4, 5), (8, 32), False),
        ((1, 5), (999, 8), True),
        ((0, 5), (1, 1), True),
        ((), (), True),
    ],
)
def test_view_judges_strides(shape: Any, strides: Any, contiguous: bool) -> None:
    assert view(cuda_array(shape=shape, strides=strides)).contiguous is contiguous


def test_view_of_masked_array_is_refused() -> None:
    with pytest.raises(ArgumentError, match="masked"):
        view(cuda_array(mask=object()))


class Exported:
    """An array that speaks only DLPack."""

    def __init__(self, array: np.ndarray[Any, Any], kind: int | None = None) -> None:
        self.array = array
        self.kind = kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__() if self.kind is None else (self.kind, 0)

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)


def test_view_of_dlpack_array_on_the_host_is_not_a_copy() -> None:
    array = np.arange(10.0)

    seen = view(Exported(array))

    assert (seen.address, seen.library, seen.device_kind) == (array.ctypes.data, "other", "cpu")


def test_view_of_dlpack_array_on_another_accelerator_is_refused() -> None:
    with pytest.raises(ArgumentError, match="device type 10"):
        view(Exported(np.arange(10.0), kind=10))


class FakeTensor:
    """What we ask of a torch tensor."""

    __module__ = "torch"

    def __init__(self, kind: str = "cuda", dtype: str = "float32", layout: str = "strided") -> None:
        self.device = SimpleNamespace(type=kind, index=1 if kind == "cuda" else None)
        self.dtype = f"torch.{dtype}"
        self.layout = f"torch.{layout}"
        self.shape = (2, 3)
        self.is_cuda = kind == "cuda"

    def get_device(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return 512

    def is_contiguous(self) -> bool:
        return False


def test_view_of_torch_tensor() -> None:
    tensor = FakeTensor()

    assert view(tensor) == ArrayView(
        address=512,
        shape=(2, 3),
        dtype=np.dtype("float32"),
        contiguous=False,
        device_kind="cuda",
        ordinal=1,
        library="torch",
        owner=tensor,
    )


def test_view_of_unusable_torch_tensors_is_refused() -> None:
    with pytest.raises(ArgumentError, match="only cpu and cuda"):
        view(FakeTensor(kind="meta"))
    with pytest.raises(ArgumentError, match="make it dense"):
        view(FakeTensor(layout="sparse_coo"))
    with pytest.raises(DtypeError, match="bfloat16"):
        view(FakeTensor(dtype="bfloat16"))


# Results.


def test_device_array_copies_to_numpy(device: CpuDevice) -> None:
    array = device.empty_array((2, 3), "int32")
    device.upload(array.address, np.arange(6, dtype=np.int32))

    assert (array.ndim, array.size, array.nbytes, len(array)) == (2, 6, 24, 2)
    assert array.copy_to_host().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.asarray(array, dtype=np.float64).sum() == 15.0
    assert view(array).address == array.address
    assert not hasattr(array, "__cuda_array_interface__")


def test_device_array_without_elements_needs_no_memory(device: CpuDevice) -> None:
    array = device.empty_array((0, 3), "int32")

    assert array.address == 0
    assert array.copy_to_host().shape == (0, 3)
    array.close()


def test_closed_device_array_is_refused(device: CpuDevice) -> None:
    with device.empty_array((4,), "int32") as array:
        assert isinstance(array, DeviceArray)

    with pytest.raises(ClosedError):
        array.copy_to_host()
    with pytest.raises(ValueError, match="by a copy"):
        np.asarray(array, copy=False)


@pytest.mark.parametrize("library", ["numpy", "torch", "cupy", "other"])
def test_results_on_the_cpu_are_numpy_where_nothing_else_is_there(
    device: CpuDevice, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, library, raising=False) if library != "numpy" else None

    result = device.empty_like_library(library, (2, 3), "float32")

    assert isinstance(result, np.ndarray)
    assert result.shape == (2, 3)


def test_results_for_torch_come_from_torch(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    torch = SimpleNamespace(
        dtype=str, float32="torch.float32", empty=lambda *a, **k: made.append((a, k))
    )
    monkeypatch.setitem(sys.modules, "torch", torch)

    device.empty_like_library("torch", (2, 3), "float32")

    assert made == [(((2, 3),), {"dtype": "torch.float32", "device": "cpu"})]
    with pytest.raises(DtypeError, match="torch has no dtype"):
        device.empty_like_library("torch", (2,), "S3")
    with pytest.raises(DtypeError, match="torch has no dtype"):
        device.empty_like_library("torch", (2,), ">f4")


def test_device_error_is_what_a_reader_expects() -> None:
    assert issubclass(DeviceError, RuntimeError)


def test_host_wait_does_not_count_the_time_of_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped for longer than the limit used to give up at its first look."""
    jumps = iter([0.0, 0.01, 3600.0, 3600.02, 3600.03, 3600.04])
    monkeypatch.setattr(time, "monotonic", lambda: next(jumps))
    answers = iter([False, False, False, True])

    cuda_context.wait_until(lambda: next(answers), 1.0, "a stream")


def test_host_wait_ends_at_its_limit() -> None:
    started = time.monotonic()

    with pytest.raises(DeviceTimeout, match="a stream is not done"):
        cuda_context.wait_until(lambda: False, 0.2, "a stream")

    assert time.monotonic() - started < 5
