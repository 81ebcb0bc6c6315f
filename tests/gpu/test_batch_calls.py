"""Batches that kernels start themselves, on a GPU over the engine and its pinned ring."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.device import CudaDevice, DeviceMemory
from flashwarp.errors import ArgumentError, DeviceTimeout
from flashwarp.pipeline.device_calls import DeviceCalls
from flashwarp.pipeline.engine import BatchEngine, Ring
from flashwarp.storage import Memory
from flashwarp.testing import Faulty

pytestmark = pytest.mark.gpu

ROWS, WIDTH = 10_000, 256

SOURCE = """
#include "flashwarp/batch.cuh"

// Doubles all rows that the ids name: one batch in flight while the other is computed.
FW_KERNEL double_rows(fw::pipeline<int32_t> p, const int64_t* ids, uint64_t n, uint64_t batches,
                      int32_t* buffers, uint64_t width, uint64_t* failed) {
  p.prefetch(ids, n, buffers);
  for (uint64_t b = 0; b < batches; b++) {
    int32_t* now = buffers + b % 2 * n * width;
    int32_t* next = buffers + (b + 1) % 2 * n * width;
    if (b + 1 < batches) p.prefetch(ids + (b + 1) * n, n, next);
    const uint64_t lost = p.prefetch_wait();
    for (uint64_t i = fw::base::thread_index(); i < n * width; i += fw::base::thread_count()) {
      now[i] *= 2;
    }
    p.write_back(ids + b * n, n, now);
    const uint64_t unwritten = p.write_back_wait();
    if (fw::base::thread_index() == 0) failed[0] += lost + unwritten;
  }
}

FW_KERNEL gather_by_blocks(fw::pipeline<const int32_t> p, const int64_t* ids, uint64_t n,
                           uint64_t batches, int32_t* to, uint64_t width, uint64_t* failed) {
  const uint64_t block = blockIdx.x;
  uint64_t before = 0;
  for (uint64_t i = 0; i <= batches; i++) {
    const uint64_t first = (block * batches + i) * n;
    uint64_t ticket = 0;
    if (i < batches) ticket = fw::block::prefetch(p, ids + first, n, to + first * width);
    if (i > 0) {
      const uint64_t lost = fw::block::prefetch_wait(p, before);
      if (threadIdx.x == 0) failed[block] += lost;
    }
    before = ticket;
  }
}

FW_KERNEL finish(fw::pipeline<const int32_t> p, uint64_t* out) {
  const uint64_t lost = p.prefetch_wait();
  if (fw::base::thread_index() == 0) out[0] = lost;
}

FW_KERNEL keep(fw::pipeline<const int32_t> p, int32_t* to, uint64_t* out) {
  const uint64_t ticket = p.prefetch_seq(0, 1, to);
  if (fw::base::thread_index() == 0) out[0] = ticket >> 16;
}
"""


@pytest.fixture(scope="module")
def program(device: CudaDevice) -> fw.program.Program:
    return fw.compile(SOURCE, device)


@pytest.fixture
def storage() -> Memory:
    table = np.random.default_rng(5).integers(-1000, 1000, (ROWS, WIDTH), np.int32)
    return Memory(table)


def rows_of(storage: Memory) -> np.ndarray:
    return np.frombuffer(storage.read(0, storage.nbytes), np.int32).reshape(ROWS, WIDTH).copy()


@pytest.fixture
def calls(device: CudaDevice, storage: Memory) -> Iterator[DeviceCalls]:
    with BatchEngine(
        device, storage, rows=ROWS, row_bytes=4 * WIDTH, batch_rows=512, slots=16,
        directions=("prefetch", "write_back"), ring=Ring(1 << 18, 4), copies=True, timeout_s=20,
    ) as engine:  # fmt: skip
        made = DeviceCalls(engine, "int32")
        yield made
        device.wait()
        made.close()


def placed(device: CudaDevice, data: np.ndarray) -> DeviceMemory:
    memory = device.allocate(max(1, data.nbytes))
    device.upload(memory.address, data)
    return memory


def fetched(device: CudaDevice, memory: DeviceMemory, dtype: Any, count: int) -> np.ndarray:
    device.wait()
    return np.frombuffer(device.download(memory.address, count * np.dtype(dtype).itemsize), dtype)


@pytest.mark.parametrize("n", [1, 512, 1300])
def test_a_launch_streams_rows_through_two_buffers(
    n: int, device: CudaDevice, program: fw.program.Program, calls: DeviceCalls, storage: Memory
) -> None:
    batches = 5
    before = rows_of(storage)
    ids = np.random.default_rng(n).permutation(ROWS)[: n * batches].astype(np.int64)
    buffers = device.allocate(2 * n * WIDTH * 4)
    failed = device.allocate(8)

    # The ids are lost at once: their memory must not be freed under the kernel, which would keep
    # the engine from the driver.
    program["double_rows"](calls, placed(device, ids), n, batches, buffers, WIDTH, failed, warps=64)

    assert fetched(device, failed, np.uint64, 1)[0] == 0
    calls.check()
    expected = before.copy()
    expected[ids] *= 2
    np.testing.assert_array_equal(rows_of(storage), expected)


def test_blocks_have_batches_of_their_own(
    device: CudaDevice, program: fw.program.Program, calls: DeviceCalls, storage: Memory
) -> None:
    blocks, batches, n = 6, 10, 300
    ids = np.random.default_rng(2).integers(0, ROWS, blocks * batches * n)
    to, failed = device.allocate(ids.size * WIDTH * 4), device.allocate(8 * blocks)

    program["gather_by_blocks"](
        calls, placed(device, ids), n, batches, to, WIDTH, failed, warps=8 * blocks
    )

    assert not fetched(device, failed, np.uint64, blocks).any()
    calls.check()
    found = fetched(device, to, np.int32, ids.size * WIDTH).reshape(-1, WIDTH)
    np.testing.assert_array_equal(found, rows_of(storage)[ids])


def test_what_a_kernel_cannot_do_is_raised(
    device: CudaDevice, program: fw.program.Program, storage: Memory
) -> None:
    with BatchEngine(
        device, storage, rows=ROWS, row_bytes=4 * WIDTH, batch_rows=4, slots=2,
        ring=Ring(1 << 16, 2), copies=True, timeout_s=20,
    ) as engine:  # fmt: skip
        calls = DeviceCalls(engine, "int32", timeout_s=0.5)
        to, out = device.allocate(4 * WIDTH * 4), device.allocate(8)

        program["finish"](calls, out, warps=16)
        assert fetched(device, out, np.uint64, 1)[0] == (1 << 64) - 1
        with pytest.raises(ArgumentError, match="any batch is not in flight"):
            calls.check()

        for expected in (1, 2, 0):
            program["keep"](calls, to, out, warps=16)
            assert fetched(device, out, np.uint64, 1)[0] == expected
        with pytest.raises(DeviceTimeout, match="free slot"):
            calls.check()
        for _ in range(2):
            program["finish"](calls, out, warps=16)
            assert fetched(device, out, np.uint64, 1)[0] == 0
        calls.check()
        calls.close()


def test_memory_comes_and_goes_while_a_kernel_waits(
    device: CudaDevice, program: fw.program.Program, storage: Memory
) -> None:
    n = 300
    ids = placed(device, np.arange(n))
    buffers, failed, lost = (
        device.allocate(2 * n * WIDTH * 4),
        device.allocate(8),
        device.allocate(1 << 20),
    )
    expected = rows_of(storage)
    expected[:n] *= 2
    slow = Faulty(storage, "read delay=300000us n=1,2,3")
    with BatchEngine(
        device, slow, rows=ROWS, row_bytes=4 * WIDTH, batch_rows=512,
        directions=("prefetch", "write_back"), ring=Ring(1 << 18, 4), copies=True, timeout_s=5,
    ) as engine:  # fmt: skip
        calls = DeviceCalls(engine, "int32")
        program["double_rows"](calls, ids, n, 1, buffers, WIDTH, failed, warps=64)
        assert not device.done(None)
        kept = device.allocate(1 << 20), device.allocate_host(1 << 20)
        # Inside the driver this would wait for the kernel.
        lost.close()
        assert device.done(None)
        for each in kept:
            each.close()
        assert fetched(device, failed, np.uint64, 1)[0] == 0
        calls.check()
        calls.close()
    np.testing.assert_array_equal(rows_of(storage), expected)


def test_closing_waits_for_the_kernel(
    device: CudaDevice, program: fw.program.Program, storage: Memory
) -> None:
    n = 300
    ids = placed(device, np.arange(n))
    buffers, failed = device.allocate(2 * n * WIDTH * 4), device.allocate(8)
    slow = Faulty(storage, "read delay=300000us n=1")
    with BatchEngine(
        device, slow, rows=ROWS, row_bytes=4 * WIDTH, batch_rows=512,
        directions=("prefetch", "write_back"), ring=Ring(1 << 18, 4), copies=True, timeout_s=5,
    ) as engine:  # fmt: skip
        calls = DeviceCalls(engine, "int32")
        program["double_rows"](calls, ids, n, 1, buffers, WIDTH, failed, warps=64)
        calls.close()
        assert device.done(None)
    assert fetched(device, failed, np.uint64, 1)[0] == 0


def test_a_storage_that_fails_fails_rows_of_one_batch(
    device: CudaDevice, program: fw.program.Program, storage: Memory
) -> None:
    batches, n = 3, 100
    ids = np.random.default_rng(4).permutation(ROWS)[: batches * n]
    to, failed = device.allocate(ids.size * WIDTH * 4), device.allocate(8)
    broken = Faulty(storage, "read eio n=5")
    with BatchEngine(
        device, broken, rows=ROWS, row_bytes=4 * WIDTH, batch_rows=n, workers=1,
        ring=Ring(1 << 18, 4), copies=True, timeout_s=5,
    ) as engine:  # fmt: skip
        calls = DeviceCalls(engine, "int32")
        program["gather_by_blocks"](
            calls, placed(device, ids), n, batches, to, WIDTH, failed, warps=8
        )
        assert fetched(device, failed, np.uint64, 1)[0] == 1
        found = fetched(device, to, np.int32, ids.size * WIDTH).reshape(-1, WIDTH)
        wrong = (found != rows_of(storage)[ids]).any(axis=1)
        assert wrong.sum() == 1
        assert not found[wrong].any()
        calls.check()
        calls.close()


def test_kernels_start_batches_of_a_pipeline(
    tmp_path: Path, device: CudaDevice, program: fw.program.Program
) -> None:
    n, batches = 200, 4
    values = np.random.default_rng(6).integers(-1000, 1000, (ROWS, WIDTH), np.int32)
    ids = np.random.default_rng(7).permutation(ROWS)[: n * batches].astype(np.int64)
    values.tofile(tmp_path / "rows")
    with fw.open(tmp_path / "rows", "r+", "i4", (ROWS, WIDTH), device=device, cache="1 MiB") as x:
        buffers, failed = device.allocate(2 * n * WIDTH * 4), device.allocate(8)
        with fw.Pipeline(x, n) as p:
            for _ in range(2):
                program["double_rows"](
                    p, placed(device, ids), n, batches, buffers, WIDTH, failed, warps=64
                )
            assert fetched(device, failed, np.uint64, 1)[0] == 0
            p.check()
        values[ids] *= 4
        np.testing.assert_array_equal(x[:], values)
