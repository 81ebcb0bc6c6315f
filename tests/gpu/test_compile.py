"""Kernels of one's own on a GPU: arrays, pointers of other libraries, streams, errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.device import CudaDevice, resolve
from flashwarp.errors import ArgumentError, ClosedError, CompileError, DtypeError, StorageError
from flashwarp.testing.faults import Faulty

pytestmark = pytest.mark.gpu

SOURCE = """
#include "flashwarp/array.cuh"

struct pair {
  int32_t key;
  double value;
};

FW_KERNEL gather(fw::array<float> x, const uint64_t* indices, float* out, uint64_t n) {
  for (uint64_t i = fw::base::thread_index(); i < n; i += fw::base::thread_count()) {
    out[i] = x[indices[i]];
  }
}

namespace mine {
FW_KERNEL scale(fw::array<float> x, float factor) {
  for (uint64_t i = fw::base::thread_index(); i < x.size(); i += fw::base::thread_count()) {
    x.store(i, x[i] * factor);
  }
}
}  // namespace mine

FW_KERNEL transpose(fw::array<const int32_t, 2> from, fw::array<int32_t, 2> to) {
  const uint64_t step = fw::base::thread_count();
  for (uint64_t i = fw::base::thread_index(); i < from.extent(0); i += step) {
    for (uint64_t j = 0; j < from.extent(1); j++) to.store_at(from(i, j), j, i);
  }
}

FW_KERNEL add(fw::array<const double> a, fw::array<const double> b, fw::array<double> sum) {
  for (uint64_t i = fw::base::thread_index(); i < sum.size(); i += fw::base::thread_count()) {
    sum.store(i, a[i] + b[i]);
  }
}

FW_KERNEL sum_pairs(fw::array<const pair> pairs, double* out) {
  if (fw::base::thread_index() != 0) return;
  for (uint64_t i = 0; i < pairs.size(); i++) *out += pairs[i].value;
}

FW_KERNEL keep(double* to, bool flag, int8_t small, uint64_t large, pair p) {
  if (fw::base::thread_index() != 0) return;
  to[0] = flag;
  to[1] = small;
  to[2] = double(large);
  to[3] = p.key;
  to[4] = p.value;
}

FW_KERNEL increment(float* x, uint64_t n) {
  for (uint64_t i = fw::base::thread_index(); i < n; i += fw::base::thread_count()) x[i] += 1;
}
"""


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    made = resolve("cuda:0")
    assert isinstance(made, CudaDevice)
    return made


@pytest.fixture(scope="module")
def program(device: CudaDevice) -> fw.Program:
    return fw.compile(SOURCE, device)


@pytest.fixture
def floats(tmp_path: Path, device: CudaDevice) -> Iterator[fw.Array]:
    """Sixteen times the size of its cache."""
    with fw.create(tmp_path / "x.npy", (1 << 22,), "f4", device=device, cache="1 MiB") as x:
        x[:] = np.arange(1 << 22)
        yield x


def to_gpu(device: CudaDevice, values: np.ndarray[Any, Any]) -> fw.device.DeviceArray:
    array = device.empty_array(values.shape, values.dtype)
    device.upload(array.address, values)
    return array


def test_gather_from_an_array_larger_than_its_cache(
    program: fw.Program, floats: fw.Array, device: CudaDevice
) -> None:
    indices = np.random.default_rng(1).integers(0, floats.size, 200_000).astype(np.uint64)
    out = device.empty_array(indices.shape, np.float32)

    program["gather"](floats, to_gpu(device, indices), out, len(indices))
    floats.synchronize()

    assert (out.copy_to_host() == indices.astype(np.float32)).all()
    assert floats.stats.misses > 10_000


def test_stores_reach_the_file(program: fw.Program, tmp_path: Path, device: CudaDevice) -> None:
    path = tmp_path / "x.npy"
    with fw.create(path, (1_000_000,), "f4", device=device, cache="1 MiB") as x:
        x[:] = np.arange(1_000_000)
        program["mine::scale"](x, 2)
        x.synchronize()

    assert (np.load(path) == 2 * np.arange(1_000_000, dtype=np.float32)).all()


def test_arrays_on_caches_of_their_own_and_on_one(
    program: fw.Program, tmp_path: Path, device: CudaDevice
) -> None:
    rng = np.random.default_rng(2)
    values = [rng.random(100_000), rng.random(100_000)]
    with (
        fw.Cache("1 MiB", device=device) as shared,
        fw.create(tmp_path / "a.npy", (100_000,), "f8", cache=shared) as a,
        fw.create(tmp_path / "b.npy", (100_000,), "f8", device=device, cache="1 MiB") as b,
        fw.create(tmp_path / "c.npy", (100_000,), "f8", cache=shared) as total,
    ):
        a[:], b[:] = values
        program["add"](a, b, total)
        for array in (a, b, total):
            array.synchronize()

        assert (total[:] == values[0] + values[1]).all()


def test_axes_and_read_only_arrays(program: fw.Program, tmp_path: Path, device: CudaDevice) -> None:
    values = np.arange(300 * 700, dtype=np.int32).reshape(300, 700)
    np.save(tmp_path / "x.npy", values)
    with (
        fw.open(tmp_path / "x.npy", device=device) as x,
        fw.create(tmp_path / "y.npy", (700, 300), "i4", device=device, cache="64 KiB") as y,
    ):
        program["transpose"](x, y)
        y.synchronize()

        assert (y[:] == values.T).all()


def test_numbers_and_structures_arrive_as_they_are(program: fw.Program, device: CudaDevice) -> None:
    pair = np.array((7, 0.25), np.dtype([("key", "i4"), ("value", "f8")], align=True))
    out = device.empty_array((5,), np.float64)

    program["keep"](out, True, -128, 1 << 53, pair)

    assert out.copy_to_host().tolist() == [1, -128, 1 << 53, 7, 0.25]


def test_device_memory_is_a_pointer(program: fw.Program, device: CudaDevice) -> None:
    memory = device.allocate(400)

    program["increment"](memory, 100)
    device.synchronize()

    assert (np.frombuffer(device.download(memory.address, 400), np.float32) == 1).all()


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_arrays_of_other_libraries_are_used_in_the_order_of_their_stream(
    library: str, program: fw.Program
) -> None:
    module = pytest.importorskip(library)
    size = 1 << 24
    x = (
        module.zeros(size, dtype=module.float32, device="cuda:0")
        if library == "torch"
        else module.zeros(size, module.float32)
    )

    for _ in range(20):
        x *= 2
        program["increment"](x, size)
    x -= 1

    # After n rounds of doubling and adding one: 2^n - 1; float32 is exact up to 2^24.
    assert float(x[0]) == float(x[-1]) == (1 << 20) - 2


def test_launch_on_a_stream_of_ones_own_is_waited_for_by_close(
    program: fw.Program, tmp_path: Path, device: CudaDevice
) -> None:
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    path = tmp_path / "x.npy"
    with fw.create(path, (1_000_000,), "f4", device=device, cache="1 MiB") as x:
        x[:] = 1
        program["mine::scale"](x, 3, stream=stream)

    assert (np.load(path) == 3).all()


def test_failed_transfers_are_raised_by_synchronize(
    program: fw.Program, tmp_path: Path, device: CudaDevice
) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(4096))
    storage = Faulty(fw.storage.File(tmp_path / "x.bin", writable=True), "read eio")
    with fw.from_storage(storage, "f4", (1000,), device=device) as x:
        out = device.empty_array((1,), np.float32)
        program["gather"](x, to_gpu(device, np.zeros(1, np.uint64)), out, 1)

        with pytest.raises(StorageError, match="a kernel"):
            x.synchronize()


def test_resources_are_told(program: fw.Program) -> None:
    resources = program["gather"].resources

    assert resources is not None
    assert 0 < (resources.registers or 0) <= 255
    assert resources.each_param_bytes[1:] == (8, 8, 8)


def test_size_of_records_is_checked(
    program: fw.Program, tmp_path: Path, device: CudaDevice
) -> None:
    records = np.zeros(5000, np.dtype([("key", "i4"), ("value", "f8")], align=True))
    records["value"] = 0.5
    np.save(tmp_path / "x.npy", records)
    np.save(tmp_path / "y.npy", records.astype([("key", "i4"), ("value", "f8")]))
    out = device.empty_array((1,), np.float64)
    with fw.open(tmp_path / "x.npy", device=device) as x:
        program["sum_pairs"](x, out)
        x.synchronize()

    assert out.copy_to_host()[0] == 2500
    with (
        fw.open(tmp_path / "y.npy", device=device) as y,
        pytest.raises(DtypeError, match=r"elements of 16 bytes.* 12"),
    ):
        program["sum_pairs"](y, out)


def test_what_does_not_fit_is_refused(
    program: fw.Program, floats: fw.Array, tmp_path: Path, device: CudaDevice
) -> None:
    with pytest.raises(ArgumentError, match="the array is on cpu"):
        program["increment"](np.zeros(3, np.float32), 3)
    with pytest.raises(DtypeError):
        program["increment"](device.empty_array((3,), np.float64), 3)
    with pytest.raises(ArgumentError, match="multiple of 32"):
        program["mine::scale"](floats, 1, block_threads=100)
    with (
        fw.create(tmp_path / "y.npy", (10,), "f4", device="cpu") as elsewhere,
        pytest.raises(ArgumentError, match="the array is on cpu"),
    ):
        program["mine::scale"](elsewhere, 1)
    floats.close()
    with pytest.raises(ClosedError):
        program["mine::scale"](floats, 1)


def test_extern_c_kernel_is_refused(device: CudaDevice) -> None:
    with pytest.raises(CompileError, match="write FW_KERNEL"):
        fw.compile('extern "C" __global__ void plain(int* p) { *p = 1; }', device)
