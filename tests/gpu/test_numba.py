"""Python kernels on a GPU: every dtype, axes, bounds, transfers, streams, errors."""

# Imports come after the shim that they need.
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# numba of today asks numpy for a name that numpy 2.5 has dropped.
if not hasattr(np, "row_stack"):
    vars(np)["row_stack"] = np.vstack

pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")

from numba import cuda

import flashwarp as fw
from flashwarp.device import CudaDevice
from flashwarp.errors import ArgumentError, ClosedError, StorageError
from flashwarp.interop.numba import atomic_add, jit, prefetch, read_async, write_async
from flashwarp.testing.faults import Faulty

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::Warning:numba")]

DTYPES = [
    "bool",
    *(f"{kind}{bits}" for bits in (8, 16, 32, 64) for kind in ("int", "uint")),
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


@jit
def gather(out: Any, data: Any, indices: Any) -> None:
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = data[indices[i]]


@jit
def scatter(data: Any, indices: Any, values: Any) -> None:
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        data[indices[i]] = values[i]


def random_values(dtype: str, count: int) -> np.ndarray[Any, Any]:
    raw = np.random.default_rng(3).integers(0, 256, count * 16, dtype=np.uint8)
    kind = np.dtype(dtype).kind
    if kind == "b":
        return raw[:count] > 127
    if kind in "iu":
        return raw.view(dtype)[:count].copy()
    real = raw.view(np.int64)[: 2 * count].astype(np.float64) / (1 << 60)
    if kind == "c":
        return (real[:count] + 1j * real[count:]).astype(dtype)
    return real[:count].astype(dtype)


@pytest.fixture
def floats(tmp_path: Path, device: CudaDevice) -> Iterator[fw.Array]:
    """Sixteen times the size of its cache."""
    with fw.create(tmp_path / "x.npy", "f4", (1 << 22,), device=device, cache="1 MiB") as x:
        x[:] = np.arange(1 << 22)
        yield x


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_loaded_and_stored(dtype: str, tmp_path: Path, device: CudaDevice) -> None:
    values = random_values(dtype, 50_000)
    np.save(tmp_path / "x.npy", values)
    order = np.random.default_rng(4).permutation(len(values))
    out = cuda.device_array(len(values), values.dtype)
    with (
        fw.open(tmp_path / "x.npy", device=device, cache="64 KiB") as x,
        fw.create(
            tmp_path / "y.npy", values.dtype, values.shape, device=device, cache="64 KiB"
        ) as y,
    ):
        # From the end, as negative indices count.
        gather[64, 128](out, x, cuda.to_device(order - len(values)))
        scatter[64, 128](y, cuda.to_device(order.astype(np.uint32)), out)
        x.wait(0)
        y.wait(0)

        assert (out.copy_to_host() == values[order]).all()
        assert (y[:] == values).all()


def test_transfers_of_ones_own_buffers(floats: fw.Array) -> None:
    @jit
    def double(data: Any, polls: Any) -> None:
        buffer = cuda.local.array(64, np.float32)
        for start in range(cuda.grid(1) * 64, data.size, cuda.gridsize(1) * 64):
            prefetch(data, start)
            token = read_async(data, start, 64, buffer)
            while not token.done():
                polls[cuda.grid(1)] += 1
            if token.wait() == 0 and token.wait() == 0 and token.status() == 0:
                for i in range(64):
                    buffer[i] *= 2
                token.wait()  # what was waited for is not read again
                write_async(data, start, 64, buffer).wait()

    polls = cuda.to_device(np.zeros(16 * 64, np.uint32))
    double[16, 64](floats, polls)
    floats.wait(0)

    assert (floats[:] == 2 * np.arange(floats.size, dtype=np.float32)).all()


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64", "float32", "float64"])
def test_numbers_are_added_to_in_one_step(dtype: str, tmp_path: Path, device: CudaDevice) -> None:
    @jit
    def count(data: Any) -> None:
        atomic_add(data, cuda.grid(1) % data.size - data.size, 1)

    with fw.create(tmp_path / "x.npy", dtype, (100,), device=device) as x:
        count[100, 100](x)
        x.wait(0)

        assert (x[:] == 100).all()


def test_device_functions_take_arrays_and_tokens(floats: fw.Array) -> None:
    @jit(device=True)
    def pick(data: Any, i: Any) -> Any:
        return data[i] + 1

    @jit(device=True)
    def finish(token: Any) -> Any:
        return token.wait()

    @jit
    def kernel(out: Any, data: Any) -> None:
        out[0] = pick(data, 41)
        out[1] = 5
        out[2] = finish(read_async(data, 100, 1, out[1:2]))

    out = cuda.device_array(3, np.float32)
    kernel[1, 1](out, floats)
    floats.wait(0)

    assert out.copy_to_host().tolist() == [42, 100, 0]


def test_launch_on_a_stream_is_waited_for_by_close(tmp_path: Path, device: CudaDevice) -> None:
    @jit
    def fill(data: Any) -> None:
        for i in range(cuda.grid(1), data.size, cuda.gridsize(1)):
            data[i] = i

    stream = cuda.stream()
    with fw.create(tmp_path / "x.npy", "i4", (1 << 20,), device=device, cache="1 MiB") as x:
        fill[64, 256, stream](x)
    with fw.create(tmp_path / "y.npy", "i4", (1 << 20,), device=device, cache="1 MiB") as y:
        fill.forall(1 << 16)(y)

    for name in ("x.npy", "y.npy"):
        assert (np.load(tmp_path / name) == np.arange(1 << 20)).all()


def test_failed_transfers_are_raised_by_wait(tmp_path: Path, device: CudaDevice) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(4096))
    storage = Faulty(fw.storage.File(tmp_path / "x.bin", writable=True), "read eio")
    with fw.open(storage, "r+", "f4", (1000,), device=device) as x:
        out = cuda.device_array(1, np.float32)
        gather[1, 1](out, x, cuda.to_device(np.zeros(1, np.int64)))

        with pytest.raises(StorageError, match="a kernel"):
            x.wait(0)


def test_closed_arrays_and_arrays_on_the_cpu_are_refused(floats: fw.Array, tmp_path: Path) -> None:
    out, index = cuda.device_array(1, np.float32), cuda.to_device(np.zeros(1, np.int64))
    floats.close()

    with pytest.raises(ClosedError):
        gather[1, 1](out, floats, index)
    with (
        fw.create(tmp_path / "y.npy", "f4", (10,), device="cpu") as elsewhere,
        pytest.raises(ArgumentError, match=r"flashwarp\.compile"),
    ):
        gather[1, 1](out, elsewhere, index)


def test_registers_leave_room_for_many_warps(floats: fw.Array) -> None:
    out, index = cuda.device_array(1, np.float32), cuda.to_device(np.zeros(1, np.int64))
    gather[1, 1](out, floats, index)
    floats.wait(0)

    registers = gather.get_regs_per_thread()

    assert all(count <= 64 for count in registers.values())


@jit
def log(file: Any, count: int, failed: Any) -> None:
    number = cuda.local.array(1, np.uint32)
    back = cuda.local.array(1, np.uint32)
    for i in range(cuda.grid(1), count, cuda.gridsize(1)):
        number[0] = i
        at = file.append(number, 4)
        if at < 0 or at % 4 or file.read_around(back, at, 4) != 4 or back[0] != i:
            failed[0] = at


def test_kernels_append_to_files(device: CudaDevice, tmp_path: Path) -> None:
    failed = cuda.to_device(np.zeros(1, np.int64))
    with fw.File.create(tmp_path / "f", capacity="1 MiB", device=device) as file:
        log[4, 64](file, 5000, failed)
        assert file.size == 20_000
    assert not failed.copy_to_host()[0]
    assert sorted(np.fromfile(tmp_path / "f", np.uint32)) == list(range(5000))


@jit
def add_one(p: Any, ids: Any, rows: Any, failed: Any) -> None:
    p.prefetch(ids, ids.size, rows)
    lost = p.prefetch_wait()
    for i in range(cuda.grid(1), rows.size, cuda.gridsize(1)):
        rows[i] += 1
    p.write_back(ids, ids.size, rows)
    lost += p.write_back_wait()
    if cuda.grid(1) == 0:
        failed[0] = lost


def test_kernels_start_batches_of_a_pipeline(tmp_path: Path, device: CudaDevice) -> None:
    values = np.random.default_rng(4).integers(0, 1000, (5000, 300)).astype(np.float32)
    np.save(tmp_path / "rows.npy", values)
    ids = np.random.default_rng(5).permutation(5000)[:700]
    rows = cuda.device_array(700 * 300, np.float32)
    failed = cuda.to_device(np.full(1, 9, np.uint64))
    on_device = cuda.to_device(ids)
    with fw.open(tmp_path / "rows.npy", "r+", device=device, cache="1 MiB") as x:
        with fw.Pipeline(x, 700) as p:
            stream = cuda.stream()
            cuda.synchronize()
            add_one[8, 128, stream](p.device_calls, on_device, rows, failed)
            stream.synchronize()
            p.check()
        assert failed.copy_to_host()[0] == 0
        values[ids] += 1
        np.testing.assert_array_equal(x[:], values)


def test_launches_are_calls_in_their_order(floats: fw.Array) -> None:
    late, other = cuda.stream(), cuda.stream()
    indices = cuda.to_device(np.arange(1000))
    out = cuda.device_array(1000, np.float32)
    for step in range(1, 40):
        values = cuda.to_device(np.full(1000, step, np.float32))
        scatter[4, 64, late](floats, indices, values)
        gather[4, 64, other](out, floats, indices)
        other.synchronize()
        assert (out.copy_to_host() == step).all()
        scatter[4, 64, late](floats, indices, cuda.to_device(np.full(1000, -step, np.float32)))
        assert (floats[:1000] == -step).all()
