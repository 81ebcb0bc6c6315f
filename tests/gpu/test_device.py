"""The CUDA device on a GPU: memory, copies, launches, streams, limits, neighbours."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwarp._jit.compiler import Source
from flashwarp.device import CudaDevice, resolve, view
from flashwarp.errors import DeviceError, DeviceOutOfMemory, DeviceTimeout
from flashwarp.policy import CLOCK
from support.built_in import built_in_kernels, launch

pytestmark = pytest.mark.gpu

SOURCE = """
typedef unsigned long long u64;

struct add_params {
  const u64* input;
  u64* output;
  u64 count;
  u64 amount;
};
__global__ void fw_add(const __grid_constant__ add_params p) {
  const u64 step = u64(gridDim.x) * blockDim.x;
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count; i += step)
    p.output[i] = p.input[i] + p.amount;
}

// Waits until the host stores to a flag, as a kernel that waits for I/O does.
struct wait_params {
  volatile unsigned* flag;
  u64 limit_ns;
};
__device__ u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
__global__ void fw_wait(const __grid_constant__ wait_params p) {
  const u64 start = now_ns();
  while (*p.flag == 0 && now_ns() - start < p.limit_ns) __nanosleep(1000);
}

struct launch_params {
  u64* blocks;
};
__global__ void fw_count_blocks(const __grid_constant__ launch_params p) {
  if (threadIdx.x == 0) atomicAdd(p.blocks, 1ull);
}
"""


class AddParams(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("input", "output", "count", "amount"))


class WaitParams(ctypes.Structure):
    _fields_ = (("flag", ctypes.c_uint64), ("limit_ns", ctypes.c_uint64))


class LaunchParams(ctypes.Structure):
    _fields_ = (("blocks", ctypes.c_uint64),)


def stand_in(device: CudaDevice, source: Path) -> None:
    """Give a device these kernels in place of the built-in ones."""
    device._built_in[CLOCK] = device.load_program(Source.read(source)).by_name()


@pytest.fixture
def device(tmp_path: Path) -> Iterator[CudaDevice]:
    try:
        device = CudaDevice(0)
    except DeviceError as error:
        pytest.skip(str(error))
    source = tmp_path / "kernels.cuh"
    source.write_text(SOURCE)
    stand_in(device, source)
    with device:
        yield device


def test_device_describes_itself(device: CudaDevice) -> None:
    info = device.memory_info()

    assert device.describe().startswith("cuda:0 (")
    assert device.context.multiprocessors > 0
    assert 0 < info.free_bytes <= info.total_bytes
    assert resolve().name == "cuda:0"


# Memory.


def test_memory_is_zero_and_holds_what_was_uploaded(device: CudaDevice) -> None:
    values = np.random.default_rng(1).integers(0, 1 << 60, 1 << 20, dtype=np.uint64)

    with device.allocate(values.nbytes) as memory:
        assert not any(device.download(memory.address, 4096))
        device.upload(memory.address, values)
        device.fill(memory.address + 8, 0xFF, 8)
        back = np.empty_like(values)
        device.download_into(memory.address, back)

    values[1] = (1 << 64) - 1
    assert np.array_equal(back, values)


def test_memory_is_given_back(device: CudaDevice) -> None:
    for _ in range(30):  # other processes may allocate and free meanwhile
        before = device.memory_info().free_bytes
        memory = device.allocate(1 << 30)
        during = device.memory_info().free_bytes
        memory.close()
        after = device.memory_info().free_bytes
        if before - during >= 1 << 30 and after >= before - (16 << 20):
            return
    raise AssertionError(f"{before} bytes were free, then {during}, then {after}")


def test_out_of_memory_is_typed_and_leaves_the_device_usable(device: CudaDevice) -> None:
    total = device.memory_info().total_bytes

    with pytest.raises(DeviceOutOfMemory, match=r"CUDA_ERROR_OUT_OF_MEMORY.*bytes are free"):
        device.allocate(2 * total)

    device.allocate(1 << 20).close()


def test_kernel_reads_and_writes_host_memory_at_its_own_address(device: CudaDevice) -> None:
    count = 100_000
    source, target = (device.allocate_host(8 * count, 1 << 21) for _ in range(2))
    source.as_numpy().view(np.uint64)[:] = np.arange(count)

    launch(device, "add", AddParams(source.address, target.address, count, 5), warps=1000)
    device.wait()

    assert np.array_equal(target.as_numpy().view(np.uint64), np.arange(count) + 5)


@pytest.mark.parametrize("read_only", [False, True])
def test_kernel_reads_registered_memory_at_its_own_address(
    device: CudaDevice, read_only: bool
) -> None:
    count = 1 << 16
    mapping = mmap.mmap(-1, 8 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    values = np.frombuffer(mapping, np.uint64)
    values[:] = np.arange(count)
    target = device.allocate(8 * count)

    with device.register_host(values.ctypes.data, values.nbytes, read_only) as registration:
        assert registration.address == values.ctypes.data
        params = AddParams(registration.address, target.address, count, 7)
        launch(device, "add", params, warps=1000)
        device.wait()

    result = np.frombuffer(device.download(target.address, 8 * count), np.uint64)
    assert np.array_equal(result, values + np.uint64(7))


def test_kernel_reads_a_read_only_file_in_the_page_cache_in_place(
    device: CudaDevice, tmp_path: Path
) -> None:
    count = 1 << 16
    path = tmp_path / "values.bin"
    np.arange(count, dtype=np.uint64).tofile(path)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    values = np.frombuffer(mapping, np.uint64)
    target = device.allocate(8 * count)

    with device.register_host(values.ctypes.data, values.nbytes, read_only=True) as registration:
        params = AddParams(registration.address, target.address, count, 7)
        launch(device, "add", params, warps=1000)
        device.wait()

    result = np.frombuffer(device.download(target.address, 8 * count), np.uint64)
    assert np.array_equal(result, values + np.uint64(7))


def test_memory_registered_twice_is_a_clear_error(device: CudaDevice) -> None:
    memory = np.zeros(1 << 20, np.uint8)
    address = (memory.ctypes.data + 4095) & ~4095

    refused = pytest.raises(DeviceError, match="close the other registration")
    with device.register_host(address, 8192, read_only=False), refused:
        device.register_host(address, 8192, read_only=False)

    device.register_host(address, 8192, read_only=False).close()


# Launches.


@pytest.mark.parametrize(("warps", "threads", "blocks"), [(1, 256, 1), (9, 256, 2), (9, 32, 9)])
def test_small_launch_has_the_blocks_that_are_useful(
    device: CudaDevice, warps: int, threads: int, blocks: int
) -> None:
    counter = device.allocate(8)

    launch(
        device, "count_blocks", LaunchParams(counter.address), warps=warps, block_threads=threads
    )
    device.wait()

    assert int.from_bytes(device.download(counter.address, 8), "little") == blocks


def test_large_launch_has_the_blocks_that_run_at_a_time(device: CudaDevice) -> None:
    counter = device.allocate(8)

    launch(device, "count_blocks", LaunchParams(counter.address), warps=1 << 30)
    device.wait()

    blocks = int.from_bytes(device.download(counter.address, 8), "little")
    kernel = device.built_in("count_blocks")
    assert blocks == device.resident_threads(kernel, 256) // 256
    assert blocks % device.context.multiprocessors == 0
    assert blocks >= device.context.multiprocessors


def test_all_kernels_load_and_know_their_resources(device: CudaDevice) -> None:
    for kernel in device._built_in[CLOCK].values():
        _, function = kernel.handle
        assert kernel.resources is not None
        assert function.registers == kernel.resources.registers
        assert function.threads_max >= 256


def test_built_in_kernels_load() -> None:
    try:
        device = CudaDevice(0)
    except DeviceError as error:
        pytest.skip(str(error))
    with device:
        print(f"\n{device.describe()}")
        for name in built_in_kernels():
            start = time.perf_counter()
            kernel = device.built_in(name)
            seconds = time.perf_counter() - start
            registers = kernel.handle[1].registers
            blocks = device.resident_threads(kernel, 256) // 256 // device.context.multiprocessors
            print(
                f"  {name:26} {registers:4} registers, {blocks} blocks of 256 a processor, "
                f"compiled or found, and loaded, in {seconds:.2f} s"
            )


# Waits.


def test_wait_times_out_while_a_kernel_waits_and_other_work_goes_on(device: CudaDevice) -> None:
    flag = device.allocate_host(4096)
    memory = device.allocate(64)
    other = device.context.create_stream()

    # Ten seconds bound the kernel should the test fail before it sets the flag.
    launch(device, "wait", WaitParams(flag.address, 10_000_000_000), warps=1, stream=other)
    with pytest.raises(DeviceTimeout, match=r"limit 0\.2 s"):
        device.wait(other, timeout_s=0.2)
    device.upload(memory.address, bytes(64))
    launch(device, "count_blocks", LaunchParams(memory.address), warps=1)
    assert int.from_bytes(device.download(memory.address, 8), "little") == 1
    assert not device.context.stream_done(other)

    flag.as_numpy()[0] = 1
    device.wait(other, timeout_s=5)
    device.context.call("cuStreamDestroy", other)


def test_close_under_a_waiting_kernel_times_out_and_can_be_repeated(device: CudaDevice) -> None:
    flag = device.allocate_host(4096)
    launch(device, "wait", WaitParams(flag.address, 10_000_000_000), warps=1)

    with pytest.raises(DeviceTimeout):
        device.close(timeout_s=0.1)

    flag.as_numpy()[0] = 1
    device.close()
    assert flag.closed


def test_events_measure_a_kernel(device: CudaDevice) -> None:
    flag = device.allocate_host(4096)
    start, end = device.event(), device.event()

    start.record()
    launch(device, "wait", WaitParams(flag.address, 20_000_000), warps=1)
    end.record()
    end.wait(timeout_s=5)

    assert end.elapsed_ms(start) > 15


def test_order_makes_one_stream_wait_for_another(device: CudaDevice) -> None:
    flag = device.allocate_host(4096)
    other = device.context.create_stream()

    launch(device, "wait", WaitParams(flag.address, 10_000_000_000), warps=1, stream=other)
    device.order(other, None)
    with pytest.raises(DeviceTimeout):
        device.wait(timeout_s=0.1)

    flag.as_numpy()[0] = 1
    device.wait(timeout_s=5)
    device.context.call("cuStreamDestroy", other)


# Other libraries.


def test_torch_tensors_are_seen_and_made(device: CudaDevice) -> None:
    torch: Any = pytest.importorskip("torch")
    tensor = torch.arange(1000, dtype=torch.int64, device="cuda:0")
    seen = view(tensor)
    result = device.empty_like_library("torch", (1000,), "int64")
    stream = device.current_stream("torch")

    params = AddParams(seen.address, result.data_ptr(), 1000, 3)
    launch(device, "add", params, warps=32, stream=stream)

    assert (seen.library, seen.device_kind, seen.ordinal) == ("torch", "cuda", 0)
    assert stream.handle == torch.cuda.current_stream(0).cuda_stream
    assert torch.equal(result, tensor + 3)


def test_torch_stream_is_taken_and_captured_into_a_graph(device: CudaDevice) -> None:
    torch: Any = pytest.importorskip("torch")
    values = torch.zeros(1000, dtype=torch.int64, device="cuda:0")
    graph = torch.cuda.CUDAGraph()

    params = AddParams(values.data_ptr(), values.data_ptr(), 1000, 1)
    device.resident_threads(device.built_in("add"))
    with torch.cuda.graph(graph):
        launch(device, "add", params, warps=32, stream=torch.cuda.current_stream())
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()

    assert values.tolist() == [3] * 1000


def test_torch_and_cupy_take_a_device_array_without_a_copy(device: CudaDevice) -> None:
    torch: Any = pytest.importorskip("torch")
    array = device.empty_array((10, 10), "float32")
    device.upload(array.address, np.arange(100, dtype=np.float32))

    tensor = torch.as_tensor(array, device="cuda:0")

    assert tensor.data_ptr() == array.address
    assert float(tensor.sum()) == 4950.0
    assert np.asarray(array).sum() == 4950.0


def test_cupy_arrays_are_seen_and_made(device: CudaDevice) -> None:
    cupy: Any = pytest.importorskip("cupy")
    array = cupy.arange(1000, dtype=cupy.int64)
    seen = view(array)
    result = device.empty_like_library("cupy", (1000,), "int64")

    params = AddParams(seen.address, result.data.ptr, 1000, 3)
    launch(device, "add", params, warps=32, stream=device.current_stream("cupy"))

    assert (seen.library, seen.device_kind, seen.ordinal) == ("cupy", "cuda", 0)
    assert seen.contiguous
    assert bool((result == array + 3).all())
    assert cupy.asarray(device.empty_array((3,), "int32")).tolist() == [0, 0, 0]


def test_dlpack_arrays_are_seen(device: CudaDevice) -> None:
    torch: Any = pytest.importorskip("torch")
    pytest.importorskip("cuda.core")
    tensor = torch.arange(12, dtype=torch.float32, device="cuda:0").reshape(3, 4)

    class Exported:
        def __dlpack_device__(self) -> Any:
            return tensor.__dlpack_device__()

        def __dlpack__(self, **arguments: Any) -> Any:
            return tensor.__dlpack__(**arguments)

    seen = device.view(Exported())

    assert (seen.address, seen.shape) == (tensor.data_ptr(), (3, 4))
    assert (seen.dtype, seen.contiguous) == (np.dtype("float32"), True)
    assert (seen.device_kind, seen.ordinal, seen.library) == ("cuda", 0, "other")


# Faults.

FAULT = """
import sys
import numpy as np
from flashwarp.device import CudaDevice
from flashwarp.errors import DeviceError
sys.path[:0] = [{folder!r}, {folder!r} + '/..']
import test_device as t
device = CudaDevice(0)
t.stand_in(device, t.Path({source!r}))
memory = device.allocate(100)
t.launch(device, "add", t.AddParams(8, 16, 1, 1), warps=1)
try:
    device.wait()
except DeviceError as error:
    print(error)
memory.close()
device.close()
print("closed")
"""


def test_fault_of_a_kernel_is_a_clear_error_and_close_still_works(
    device: CudaDevice, tmp_path: Path
) -> None:
    code = FAULT.format(folder=str(Path(__file__).parent), source=str(tmp_path / "kernels.cuh"))

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in done.stdout, done.stderr
    assert done.stdout.rstrip().endswith("closed"), done.stderr
    assert done.returncode == 0
