"""Your own programs: the same text and the same tests on the CPU device and on a GPU.

What only one of them has is in `test_cpu_programs.py` and in `gpu/test_programs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.device import Device, DeviceArray
from flashwarp.errors import DtypeError, StorageError
from flashwarp.testing.faults import Faulty

KERNELS = Path(__file__).parents[1] / "support" / "program_kernels.cu"
# A program of its own: loads of elements of a new type take NVRTC as long as all of KERNELS.
RECORDS = """
#include "flashwarp/array.cuh"

struct pair {
  int32_t key;
  double value;
};

FW_KERNEL sum_pairs(fw::array<const pair> pairs, double* out) {
  if (fw::base::thread_index() != 0) return;
  for (uint64_t i = 0; i < pairs.size(); i++) *out += pairs[i].value;
}
"""

FIELDS = [("key", "i4"), ("value", "f8")]
PAIR = np.dtype(FIELDS, align=True)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with fw.device.CpuDevice(3) if request.param == "cpu" else fw.device.CudaDevice(0) as made:
        yield made


@pytest.fixture(scope="module")
def program(device: Device) -> fw.program.Program:
    return fw.compile(KERNELS, device)


def on_device(device: Device, values: np.ndarray[Any, Any]) -> DeviceArray:
    array = device.empty_array(values.shape, values.dtype)
    device.upload(array.address, values)
    return array


def test_gather_from_an_array_larger_than_its_cache(
    program: fw.program.Program, tmp_path: Path, device: Device
) -> None:
    """Sixteen times the size of its cache."""
    # On a GPU they are all wanted at once, and many meet on one line.
    count = 20_000 if device.kind == "cpu" else 200_000
    indices = np.random.default_rng(1).integers(0, 1 << 22, count).astype(np.uint64)
    out = device.empty_array(indices.shape, np.float32)
    with fw.create(tmp_path / "x.npy", "f4", (1 << 22,), device=device, cache="1 MiB") as x:
        x[:] = np.arange(1 << 22)

        program["gather"](x, on_device(device, indices), out, count)
        x.wait()

        assert (out.copy_to_host() == indices.astype(np.float32)).all()
        assert x.stats.misses > 10_000


# 0.058 where nearly every access hit: misses of kernels were set against hits of gathers alone.
def test_kernels_leave_the_ratios_of_other_operations_alone(
    program: fw.program.Program, tmp_path: Path, device: Device
) -> None:
    indices = np.tile(np.arange(0, 1 << 16, 1 << 7, dtype=np.uint64), 4)
    out = device.empty_array(indices.shape, np.float32)
    with fw.create(tmp_path / "x.npy", "f4", (1 << 17,), device=device, cache="4 MiB") as x:
        x[:] = np.arange(1 << 17)
        x.drop_cache()
        for _ in range(4):
            x[1 << 16 :]
        before = x.stats

        program["gather"](x, on_device(device, indices), out, len(indices))
        x.wait()
        after = x.stats

        assert after.kernel_misses == after.misses - before.misses > 0
        assert after.kernel_bytes_read == after.bytes_read - before.bytes_read > 0
        assert (before.kernel_misses, before.kernel_bytes_read) == (0, 0)
        assert after.hit_rate == before.hit_rate >= 0.5
        assert after.io_amplification == before.io_amplification


def test_stores_reach_the_file(program: fw.program.Program, tmp_path: Path, device: Device) -> None:
    path = tmp_path / "x.npy"
    with fw.create(path, "f4", (1_000_000,), device=device, cache="1 MiB") as x:
        x[:] = np.arange(1_000_000)
        program["mine::scale"](x, 2)
        x.wait()

    assert (np.load(path) == 2 * np.arange(1_000_000, dtype=np.float32)).all()


def test_arrays_on_caches_of_their_own_and_on_one(
    program: fw.program.Program, tmp_path: Path, device: Device
) -> None:
    rng = np.random.default_rng(2)
    values = rng.random((2, 500_000), np.float32)
    with (
        fw.Cache("1 MiB", device=device) as shared,
        fw.create(tmp_path / "a.npy", "f4", (500_000,), cache=shared) as a,
        fw.create(tmp_path / "b.npy", "f4", (500_000,), device=device, cache="1 MiB") as b,
        fw.create(tmp_path / "c.npy", "f4", (500_000,), cache=shared) as total,
    ):
        a[:], b[:] = values
        program["add"](a, b, total)
        for array in (a, b, total):
            array.wait()

        assert (total[:] == values[0] + values[1]).all()


def test_axes_and_read_only_arrays(
    program: fw.program.Program, tmp_path: Path, device: Device
) -> None:
    values = np.arange(300 * 70, dtype=np.int32).reshape(300, 70)
    np.save(tmp_path / "x.npy", values)
    with (
        fw.open(tmp_path / "x.npy", device=device) as x,
        fw.create(tmp_path / "y.npy", "i4", (70, 300), device=device, cache="64 KiB") as y,
    ):
        assert not x.writable
        program["transpose"](x, y)
        y.wait()

        assert (y[:] == values.T).all()


def test_arrays_of_records_have_the_programs_size(tmp_path: Path, device: Device) -> None:
    records = np.zeros(5000, PAIR)
    records["value"] = 0.5
    np.save(tmp_path / "x.npy", records)
    np.save(tmp_path / "y.npy", records.astype(FIELDS))
    out = device.empty_array((1,), np.float64)
    program = fw.compile(RECORDS, device)

    with fw.open(tmp_path / "x.npy", device=device) as x:
        program["sum_pairs"](x, out)
        x.wait()

    assert out.copy_to_host()[0] == 2500
    with (
        fw.open(tmp_path / "y.npy", device=device) as y,
        pytest.raises(DtypeError, match=r"elements of 16 bytes.* 12"),
    ):
        program["sum_pairs"](y, out)


def test_numbers_and_structures_arrive_as_they_are(
    program: fw.program.Program, device: Device
) -> None:
    out = device.empty_array((9,), np.float64)
    record = np.array((7, 0.25), PAIR)[()]

    program["keep"](out, True, -128, 65535, np.int32(-5), 1 << 53, 0.5, np.float64(1e300), record)

    assert out.copy_to_host().tolist() == [1, -128, 65535, -5, 1 << 53, 0.5, 1e300, 7, 0.25]


def test_device_memory_is_a_pointer(program: fw.program.Program, device: Device) -> None:
    memory = device.allocate(400)

    program["increment"](memory, 100)
    device.wait()

    assert (np.frombuffer(device.download(memory.address, 400), np.float32) == 1).all()


def test_failed_transfers_are_raised_by_wait(
    program: fw.program.Program, tmp_path: Path, device: Device
) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(4096))
    storage = Faulty(fw.storage.File(tmp_path / "x.bin", writable=True), "read eio")
    with fw.open(storage, "r+", "f4", (1000,), device=device) as x:
        out = device.empty_array((1,), np.float32)
        program["gather"](x, on_device(device, np.zeros(1, np.uint64)), out, 1)

        with pytest.raises(StorageError, match="a kernel"):
            x.wait()
