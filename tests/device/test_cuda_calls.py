"""Every call of the CUDA driver, made for real through cuda.bindings into a driver without a GPU.

The fake checks the arguments, so packing, flags and contexts are tested where there is no GPU, and
so is what each failure becomes. What arrays make of such calls is in `array/test_cuda_arrays.py`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")
pytest.importorskip("cuda.bindings.nvrtc")

import flashwarp as fw
from flashwarp._jit import cuda_context, nvrtc, precompiled
from flashwarp._jit.compiler import Source
from flashwarp.device import CudaDevice, resolve, view
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    DeviceError,
    DeviceOutOfMemory,
    DeviceTimeout,
    DtypeError,
    ForkError,
)
from flashwarp.launch.rows import RowParams
from support import fake_cuda
from support.built_in import built_in_kernels, cubins, launch
from support.fake_cuda import (
    ILLEGAL_ADDRESS,
    NOT_PERMITTED,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    failing,
    fake,
    report,
)

SOURCE = """
struct probe_params {
  unsigned long long report;
  unsigned long long value;
  int more;
};
__global__ void fw_probe(const __grid_constant__ probe_params p) {
  ((unsigned long long*)p.report)[3] = p.value;
}
"""


WAIT_IN_THE_DRIVER = (b"cuMemFree", b"cuMemFreeHost", b"cuMemHostUnregister")


class ProbeParams(ctypes.Structure):
    _fields_ = (
        ("report", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("more", ctypes.c_int),
    )


def device_with_probe() -> CudaDevice:
    device = CudaDevice(0)
    # The built-in kernels take seconds to compile, and the fake runs none of them.
    probe = Source.read(Path(os.environ["PROBE_SOURCE"]))
    device._load_built_in = lambda *_: device.load_program(probe).by_name()
    return device


# Memory.


def check_memory_is_zeroed_and_copied_in_the_context() -> None:
    device = CudaDevice(0)
    memory = device.allocate(1000)
    values = np.arange(100, dtype=np.uint64)

    assert device.download(memory.address, 1000) == bytes(1000)
    device.upload(memory.address, values)
    device.fill(memory.address, 0xFF, 8)

    expected = [(1 << 64) - 1, *range(1, 100)]
    assert np.frombuffer(device.download(memory.address, 800), np.uint64).tolist() == expected
    assert not memory.on_host
    with pytest.raises(DeviceError, match="download"):
        memory.as_numpy()
    assert fake().fake_context_depth() == 0


def check_host_memory_is_zeroed_aligned_and_has_one_address() -> None:
    device = CudaDevice(0)

    host = device.allocate_host(100, 1 << 16)

    assert host.address % (1 << 16) == 0
    assert not host.as_numpy().any()
    assert fake().fake_count(b"cuMemHostGetDevicePointer") == 1


def check_registration_asks_for_what_a_mapped_file_needs() -> None:
    device = CudaDevice(0)
    before = fake().fake_live_allocations()

    writable = device.register_host(4096, 8192, read_only=False)
    assert fake().fake_registered_flags() == 1 | 2  # PORTABLE, DEVICEMAP
    frozen = device.register_host(1 << 20, 8192, read_only=True)
    assert fake().fake_registered_flags() == 1 | 2 | 8  # and READ_ONLY
    writable.close()
    frozen.close()
    frozen.close()

    assert fake().fake_live_allocations() == before


def check_calls_that_wait_in_the_driver_wait_for_served_kernels_first() -> None:
    """A call that holds the driver until kernels end would keep the threads that serve them off."""
    device = CudaDevice(0)
    memory, host = device.allocate(1000), device.allocate_host(1000)
    pinned = device.register_host(1 << 20, 8192, read_only=False)
    stream = device.create_stream()
    for act in (memory.close, host.close, pinned.close):
        device.note_served(stream.handle)
        fake().fake_hold(stream.handle)
        before = [fake().fake_count(name) for name in WAIT_IN_THE_DRIVER]
        calling = threading.Thread(target=act)
        calling.start()
        calling.join(0.05)
        assert calling.is_alive()
        assert [fake().fake_count(name) for name in WAIT_IN_THE_DRIVER] == before
        fake().fake_hold(0)
        calling.join(20)
        assert not calling.is_alive()
        after = [fake().fake_count(name) for name in WAIT_IN_THE_DRIVER]
        assert sum(after) == sum(before) + 1
    made = fake().fake_count(b"cuEventCreate")
    for _ in range(100):
        device.note_served(None)
    assert fake().fake_count(b"cuEventCreate") <= made + 2
    destroyed = fake().fake_count(b"cuEventDestroy")
    device.close()
    assert fake().fake_count(b"cuEventDestroy") > destroyed + 1


def check_a_served_kernel_that_does_not_end_is_logged() -> None:
    device = CudaDevice(0)
    memory = device.allocate(1000)
    device.note_served(None)
    fake().fake_hold(device.own_stream())
    os.environ["FLASHWARP_TIMEOUT_S"] = "0.05"
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger(cuda_context.__name__).addHandler(handler)

    memory.close()

    assert fake().fake_count(b"cuMemFree") == 1
    assert ["its batches may fail" in each.getMessage() for each in records] == [True]


def check_registration_that_fails_names_range_and_reason() -> None:
    device = CudaDevice(0)

    refused = pytest.raises(DeviceError, match=r"8192 writable bytes.*0x1000.*NOT_SUPPORTED")
    with failing("cuMemHostRegister", NOT_SUPPORTED), refused:
        device.register_host(4096, 8192, read_only=False)
    unmapped = pytest.raises(DeviceError, match="cuMemHostGetDevicePointer")
    with failing("cuMemHostGetDevicePointer", NOT_SUPPORTED), unmapped:
        device.register_host(4096, 8192, read_only=False)
    assert fake().fake_count(b"cuMemHostUnregister") == 1


def check_registers_of_a_device_are_io_memory_until_closed() -> None:
    device = CudaDevice(0)
    before = fake().fake_live_allocations()

    with device.register_io(1 << 20, 16384) as registers:
        assert registers.address == 1 << 20
        assert fake().fake_registered_flags() == 2 | 4  # DEVICEMAP, IOMEMORY
    assert fake().fake_live_allocations() == before

    refused = pytest.raises(DeviceError, match=r"16384 bytes of I/O memory at 0x100000.*PERMITTED")
    with failing("cuMemHostRegister", NOT_PERMITTED), refused:
        device.register_io(1 << 20, 16384)
    unmapped = pytest.raises(DeviceError, match="cuMemHostGetDevicePointer")
    with failing("cuMemHostGetDevicePointer", NOT_SUPPORTED), unmapped:
        device.register_io(1 << 20, 16384)
    assert fake().fake_live_allocations() == before


def check_pages_of_a_range_are_exported_as_a_dma_buf() -> None:
    device = CudaDevice(0)
    memory = device.allocate(1 << 16)
    begin = memory.address // 4096 * 4096 + 4096

    file = device.export_dma_buf(begin + 100, 8192)

    assert os.lseek(file, 0, os.SEEK_END) == 3 * 4096
    os.close(file)
    with pytest.raises(DeviceError, match=r"as a dma-buf.*INVALID_VALUE"):
        device.export_dma_buf(begin, 1 << 20)
    fake().fake_for_drives(0, 0)
    with pytest.raises(DeviceError, match=r"as a dma-buf.*NOT_SUPPORTED"):
        device.export_dma_buf(begin, 8192)


def check_gpu_says_what_it_has_for_drives() -> None:
    for exports, ordering, expected in ((1, 100, True), (1, 200, True), (0, 0, False)):
        fake().fake_for_drives(exports, ordering)
        context = CudaDevice(0).context
        assert (context.exports_dma_buf, context.orders_dma_writes) == (bool(exports), expected)


def check_out_of_memory_is_typed_and_says_what_is_free() -> None:
    device = CudaDevice(0)

    with failing("cuMemAlloc", OUT_OF_MEMORY), pytest.raises(MemoryError) as caught:
        device.allocate(1 << 40)
    assert isinstance(caught.value, DeviceOutOfMemory)
    for words in ("1099511627776 bytes on cuda:0", "CUDA_ERROR_OUT_OF_MEMORY", "1073741824 of"):
        assert words in str(caught.value)
    with failing("cuMemHostAlloc", OUT_OF_MEMORY), pytest.raises(DeviceOutOfMemory, match="pin"):
        device.allocate_host(1 << 40)


# Launches.


def check_launch_passes_struct_grid_and_stream() -> None:
    device = device_with_probe()
    memory = device.allocate(64)
    value = 0x1122334455667788

    launch(device, "probe", ProbeParams(memory.address, value, 5), warps=9, block_threads=64)
    assert report(device, memory.address) == (5, 64, device.default_stream().handle, value)

    launch(device, "probe", bytes(ProbeParams(memory.address, 7, 5)), warps=1, stream=1)
    assert report(device, memory.address) == (1, 256, 1, 7)


def check_launch_is_never_larger_than_what_runs_at_a_time() -> None:
    device = device_with_probe()
    memory = device.allocate(64)
    params = ProbeParams(memory.address, 7, 5)

    launch(device, "probe", params, warps=1 << 40, block_threads=128)
    assert report(device, memory.address)[0] == 132 * 2048 // 128
    launch(device, "probe", params, warps=8 * 10)
    assert report(device, memory.address)[0] == 10
    launches = fake().fake_count(b"cuLaunchKernel")
    launch(device, "probe", params, warps=0)
    assert fake().fake_count(b"cuLaunchKernel") == launches


PROGRAM = """
struct head { unsigned long long report, value; };
struct own { int a, b, c; };
__global__ void probe(head h, float* more, own* records, unsigned short n) {
  *more = n + records->a;
  ((unsigned long long*)h.report)[3] = h.value;
}
"""


def check_programs_get_their_arguments_checked_and_one_by_one() -> None:
    device = CudaDevice(0)
    kernel = fw.compile(PROGRAM, device)["probe"]
    memory = device.allocate(64)
    more, records = device.empty_array((1,), "f4"), device.empty_array((1,), "i4,i4,i4")
    head = struct.pack("2Q", memory.address, 7)

    kernel(head, more, records, 3, warps=9, block_threads=64)
    assert report(device, memory.address) == (5, 64, device.default_stream().handle, 7)
    kernel(head, more, records, 3, stream=1)
    assert report(device, memory.address) == (132 * 2048 // 256, 256, 1, 7)

    launches = fake().fake_count(b"cuLaunchKernel")
    with pytest.raises(ArgumentError, match="the array is on cpu, the kernel on cuda:0"):
        kernel(head, np.zeros(1, np.float32), records, 3)
    with pytest.raises(DtypeError, match="elements of 12 bytes"):
        kernel(head, more, device.empty_array((1,), "i4,i4"), 3)
    with pytest.raises(DtypeError, match="16 bytes, not 8"):
        kernel(head[:8], more, records, 3)
    assert fake().fake_count(b"cuLaunchKernel") == launches


def check_programs_are_loaded_once_and_unloaded_with_their_device() -> None:
    device = CudaDevice(0)
    first, second = fw.compile(PROGRAM, device), fw.compile(PROGRAM, device)
    assert fake().fake_count(b"cuModuleLoadData") == 1
    assert first["probe"].resources == second["probe"].resources

    device.close()

    assert fake().fake_count(b"cuModuleUnload") == 1
    with pytest.raises(ClosedError):
        first["probe"](bytes(16), None, None, 3)


def check_a_kernel_is_loaded_before_its_first_launch() -> None:
    device = device_with_probe()
    assert fake().fake_count(b"cuModuleLoadData") == 0

    kernel = device.built_in("probe")

    assert device.built_in("probe") is kernel
    assert fake().fake_count(b"cuModuleLoadData") == 1
    assert fake().fake_count(b"cuFuncLoad") == 1


def check_shipped_kernels_are_loaded_together_without_a_compiler() -> None:
    precompiled.FOLDER = Path(os.environ["CUBINS"])
    nvrtc._nvrtc_call = None  # for good: this process runs one check
    device = CudaDevice(0)

    gather = device.built_in("gather_rows")
    device.built_in("scatter_elements_4")

    assert gather.param_bytes == (ctypes.sizeof(RowParams),)
    assert gather.resources is not None
    assert fake().fake_count(b"cuModuleLoadData") == 1
    assert fake().fake_count(b"cuFuncLoad") == len(built_in_kernels())


def check_wrong_launches_are_refused() -> None:
    device = device_with_probe()

    with pytest.raises(DeviceError, match="24 bytes, but the host's has 3"):
        launch(device, "probe", b"123", warps=1)
    with pytest.raises(ArgumentError, match="no built-in kernel fw_nothing"):
        launch(device, "nothing", b"", warps=1)
    with pytest.raises(DeviceError, match="cannot run with 2048 threads"):
        launch(device, "probe", bytes(24), warps=1, block_threads=2048)
    with pytest.raises(ArgumentError, match="multiple of 32"):
        launch(device, "probe", bytes(24), warps=1, block_threads=100)
    assert fake().fake_count(b"cuLaunchKernel") == 0


def check_code_that_the_driver_cannot_load_is_a_clear_error() -> None:
    device = device_with_probe()

    with failing("cuModuleLoadData", 200), pytest.raises(DeviceError, match="update the driver"):
        device.built_in("probe")
    device.built_in("probe")
    with failing("cuFuncLoad", OUT_OF_MEMORY), pytest.raises(DeviceOutOfMemory, match="fw_probe"):
        device_with_probe().built_in("probe")
    assert fake().fake_count(b"cuModuleUnload") == 1


# Streams and events.


def check_wait_has_a_time_limit_and_waits_for_one_stream_only() -> None:
    device = CudaDevice(0)
    fake().fake_busy(1)

    with pytest.raises(DeviceTimeout, match=r"0x10057 of cuda:0.*limit 0\.05 s") as caught:
        device.wait(timeout_s=0.05)

    assert isinstance(caught.value, TimeoutError)
    fake().fake_busy(0)
    device.wait(1, timeout_s=0)


def check_fault_of_a_kernel_is_raised_by_the_wait() -> None:
    device = CudaDevice(0)

    fault = pytest.raises(DeviceError, match=r"ILLEGAL_ADDRESS.*compute-sanitizer")
    with failing("cuStreamQuery", ILLEGAL_ADDRESS), fault:
        device.wait()


def check_events_measure_and_order() -> None:
    device = CudaDevice(0)
    before = fake().fake_live_allocations()
    start, end = device.event(), device.event()

    start.record()
    end.record(1)
    end.wait()
    assert end.elapsed_ms(start) == 1.5
    del start, end

    own = device.default_stream().handle
    device.order(None, 1)
    assert fake().fake_count(b"cuStreamWaitEvent") == 0, "the stream is idle"
    fake().fake_hold(own)
    device.order(None, 1)
    device.order(None, None)
    assert fake().fake_count(b"cuStreamWaitEvent") == 1
    fake().fake_hold(0)
    device.order(1, None)
    assert fake().fake_count(b"cuStreamWaitEvent") == 2, "it covers streams that are not asked"
    assert fake().fake_live_allocations() == before


# Results.


def check_device_array_speaks_cuda_array_interface() -> None:
    device = CudaDevice(0)
    array = device.empty_array((3, 4), "int32")
    device.upload(array.address, np.arange(12, dtype=np.int32))

    interface = array.__cuda_array_interface__
    seen = view(array)

    assert interface["shape"] == (3, 4)
    assert interface["typestr"] == "<i4"
    assert interface["data"] == (array.address, False)
    assert interface["stream"] == device.default_stream().handle
    assert (seen.device_kind, seen.ordinal, seen.address) == ("cuda", 0, array.address)
    assert np.asarray(array).sum() == 66


# The end.


def check_close_releases_everything_in_any_order() -> None:
    device = device_with_probe()
    memory, host = device.allocate(100), device.allocate_host(100)
    device.register_host(4096, 4096, read_only=True)
    event = device.event()
    device.built_in("probe")
    memory.close()

    device.close()
    device.close()

    assert host.closed
    event.close()
    assert fake().fake_live_allocations() == 0
    assert fake().fake_context_depth() == 0
    assert fake().fake_count(b"cuDevicePrimaryCtxRelease") == 1
    with pytest.raises(ClosedError):
        device.allocate(1)
    with pytest.raises(ClosedError):
        launch(device, "probe", bytes(24), warps=1)


def check_close_during_a_stuck_kernel_times_out_and_can_be_repeated() -> None:
    device = CudaDevice(0)
    memory = device.allocate(100)
    fake().fake_busy(1)

    with pytest.raises(DeviceTimeout):
        device.close(timeout_s=0.05)
    assert not memory.closed

    fake().fake_busy(0)
    device.close()
    assert fake().fake_live_allocations() == 0


def check_close_after_a_fault_hides_nothing_and_hangs_nothing() -> None:
    device = CudaDevice(0)
    device.allocate(100).close()
    memory = device.allocate(100)

    with failing("cuMemFree", ILLEGAL_ADDRESS):
        memory.close()
        with failing("cuStreamQuery", ILLEGAL_ADDRESS), pytest.raises(DeviceError):
            device.wait()
        with failing("cuStreamQuery", ILLEGAL_ADDRESS):
            device.close()


def check_forked_child_is_refused_and_frees_nothing() -> None:
    device = CudaDevice(0)
    memory = device.allocate(100)
    pid = os.getpid()
    os.getpid = lambda: pid + 1

    with pytest.raises(ForkError, match="spawn"):
        device.download(memory.address, 1)
    memory.close()
    device.close()

    assert fake().fake_count(b"cuMemFree") == 0


# Which device.


def check_default_device_is_the_gpu() -> None:
    assert resolve().name == "cuda:0"
    assert resolve("cuda") is resolve("cuda:0") is resolve(None)
    assert "Fake GPU" in resolve().describe()


def check_missing_gpu_is_a_clear_error() -> None:
    with pytest.raises(DeviceError, match=r"cuda:1 does not exist: 1 GPU.*CUDA_VISIBLE_DEVICES"):
        CudaDevice(1)
    with failing("cuDevicePrimaryCtxRetain", OUT_OF_MEMORY):
        with pytest.raises(DeviceOutOfMemory, match="opening cuda:0"):
            CudaDevice(0)
        assert resolve().name == "cpu"


# Running them.


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("fake_cuda")
    probe = folder / "probe.cuh"
    probe.write_text(SOURCE)
    paths = {"PROBE_SOURCE": str(probe), "CUBINS": str(cubins(tmp_path_factory))}
    return {**fake_cuda.build(folder), **paths}


test_cuda = fake_cuda.test_of(globals())
