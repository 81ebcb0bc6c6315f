"""Batches that kernels start themselves, on the CPU device over the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import device as devices
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    ControllerTimeout,
    DeviceTimeout,
    DtypeError,
    ReadOnlyError,
)
from flashwarp.pipeline.device_calls import DeviceCalls
from flashwarp.pipeline.engine import BatchEngine
from flashwarp.storage import File, Memory
from flashwarp.testing.faults import FaultPlan, Faulty

DEVICE = devices.CpuDevice()
ROWS, WIDTH = 1000, 16
REFUSED, NOT_SYNCHRONIZED = 0, (1 << 64) - 1

SOURCE = """
#include "flashwarp/batch.cuh"

// out: for each block the ticket and the rows that failed.
FW_KERNEL stream_rows(fw::pipeline<const int32_t> p, const int64_t* ids, uint64_t n, int32_t* to,
                      uint64_t* out) {
  const uint64_t ticket = p.prefetch(ids, n, to);
  const uint64_t failed = p.prefetch_wait();
  out[2 * fw::warp::index()] = ticket >> 16;
  out[2 * fw::warp::index() + 1] = failed;
}

// Each block has batches of its own, two at a time.
FW_KERNEL stream_blocks(fw::pipeline<const int32_t> p, const int32_t* ids, uint64_t n,
                        uint64_t batches, int32_t* to, uint64_t width, uint64_t* failed) {
  const uint64_t block = fw::warp::index();
  uint64_t before = 0;
  for (uint64_t i = 0; i <= batches; i++) {
    const uint64_t first = (block * batches + i) * n;
    uint64_t ticket = 0;
    if (i < batches) ticket = fw::block::prefetch(p, ids + first, n, to + first * width);
    if (i > 0) failed[block] += fw::block::prefetch_wait(p, before);
    before = ticket;
  }
}

FW_KERNEL store_rows(fw::pipeline<int32_t> p, const int64_t* ids, uint64_t n, const int32_t* from,
                     uint64_t* out) {
  p.write_back(ids, n, from);
  const uint64_t failed = p.write_back_wait();
  p.write_back_seq(0, 3, from);
  out[fw::warp::index()] = failed + p.write_back_wait();
}

FW_KERNEL statuses_of(fw::pipeline<const int32_t> p, const int64_t* ids, uint64_t n, int32_t* to,
                      uint16_t* statuses, uint64_t* failed) {
  const uint64_t ticket = fw::block::prefetch(p, ids, n, to);
  failed[0] = fw::block::prefetch_wait(p, ticket, statuses);
}

FW_KERNEL begin(fw::pipeline<const int32_t> p, uint64_t start, uint64_t n, int32_t* to,
                uint64_t* out) {
  out[0] = fw::block::prefetch_seq(p, start, n, to);
}

FW_KERNEL finish(fw::pipeline<const int32_t> p, uint64_t ticket, uint64_t* out) {
  out[0] = fw::block::prefetch_wait(p, ticket);
}

FW_KERNEL finish_oldest(fw::pipeline<const int32_t> p, uint64_t* out) {
  out[0] = p.prefetch_wait();
}

// Goes on whatever happens. out: for each batch whether it was waited for.
FW_KERNEL rounds(fw::pipeline<const int32_t> p, uint64_t n, int32_t* to, uint64_t* out) {
  for (uint64_t i = 0; i < n; i++) {
    const uint64_t ticket = fw::block::prefetch_seq(p, i, 1, to + 16 * i);
    out[i] = fw::block::prefetch_wait(p, ticket) == 0;
  }
}

FW_KERNEL only_some(fw::pipeline<const int32_t> p, const int64_t* ids, int32_t* to,
                    uint64_t* out) {
  if (fw::warp::index() == 0) out[0] = p.prefetch(ids, 1, to);
}
"""


@pytest.fixture(scope="module")
def program() -> Any:
    return fw.compile(SOURCE, device=DEVICE)


@pytest.fixture
def table() -> np.ndarray:
    return np.random.default_rng(7).integers(-(1 << 30), 1 << 30, (ROWS, WIDTH), np.int32)


class Opened:
    def __init__(self, storage: Any, **options: Any) -> None:
        limit = options.pop("timeout_s", 20.0)
        options = {"batch_rows": 64, "slots": 4, "workers": (1, 2), **options}
        self.engine = BatchEngine(
            DEVICE, storage, rows=ROWS, row_bytes=4 * WIDTH, timeout_s=20, **options
        )
        self.calls = DeviceCalls(self.engine, "int32", limit)

    def __enter__(self) -> DeviceCalls:
        return self.calls

    def __exit__(self, *exception: object) -> None:
        self.calls.close()
        self.engine.close()


@pytest.fixture
def calls(table: np.ndarray) -> Iterator[DeviceCalls]:
    with Opened(Memory(table.copy())) as opened:
        yield opened


def out(count: int = 1) -> np.ndarray:
    return np.zeros(count, np.uint64)


@pytest.mark.parametrize("warps", [1, 2])
@pytest.mark.parametrize("n", [0, 1, 64, 65, 256])
def test_the_blocks_of_a_launch_prefetch_together(
    program: Any, calls: DeviceCalls, table: np.ndarray, warps: int, n: int
) -> None:
    ids = np.random.default_rng(n).integers(0, ROWS, n)
    to, seen = np.zeros((n, WIDTH), np.int32), out(2 * warps)

    for _ in range(3):
        to[:] = 0
        program["stream_rows"](calls, ids, n, to, seen, warps=warps)
        calls.check()
        np.testing.assert_array_equal(to, table[ids])

    # All blocks have the same ticket: that of the first part.
    parts = max(1, -(-n // 64))
    assert seen.reshape(-1, 2).tolist() == [[2 * parts + 1, 0]] * warps  # its number


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_each_block_has_batches_of_its_own(
    program: Any, table: np.ndarray, tmp_path: Path, kind: str
) -> None:
    table.tofile(tmp_path / "t")
    storage = Memory(table.copy()) if kind == "memory" else File(tmp_path / "t")
    blocks, batches, n = 2, 20, 17
    ids = np.random.default_rng(3).integers(0, ROWS, blocks * batches * n).astype(np.int32)
    to, failed = np.zeros((ids.size, WIDTH), np.int32), out(blocks)

    # Two batches of each block are in flight, in four slots.
    with Opened(storage) as calls:
        program["stream_blocks"](calls, ids, n, batches, to, WIDTH, failed, warps=blocks)
        calls.check()

    np.testing.assert_array_equal(to, table[ids])
    assert failed.tolist() == [0] * blocks


def test_rows_are_written_back(program: Any, table: np.ndarray) -> None:
    storage = Memory(table.copy())
    ids = np.random.default_rng(1).permutation(ROWS)[:100]
    rows = np.arange(100 * WIDTH, dtype=np.int32).reshape(100, WIDTH)
    failed = out(2)

    with Opened(storage, directions=("prefetch", "write_back")) as calls:
        program["store_rows"](calls, ids, 100, rows, failed, warps=2)
        calls.check()

    expected = table.copy()
    expected[ids] = rows
    expected[:3] = rows[:3]
    now = np.frombuffer(storage.read(0, table.nbytes), np.int32).reshape(table.shape)
    np.testing.assert_array_equal(now, expected)
    assert failed.tolist() == [0, 0]


def test_each_row_has_a_status(program: Any, calls: DeviceCalls, table: np.ndarray) -> None:
    ids = np.arange(150)
    ids[[3, 70, 149]] = ROWS, -1, 1 << 60
    to = np.full((150, WIDTH), 9, np.int32)
    statuses, failed = np.full(151, 0xABCD, np.uint16), out()

    program["statuses_of"](calls, ids, 150, to, statuses, failed, warps=1)

    bad = np.isin(np.arange(150), [3, 70, 149])
    assert failed[0] == 3
    np.testing.assert_array_equal(statuses[:150] == 0x080, bad)
    assert not statuses[:150][~bad].any()
    assert statuses[150] == 0xABCD
    assert not to[bad].any()
    np.testing.assert_array_equal(to[~bad], table[ids[~bad]])

    # The next batches, one in each slot, are not affected.
    good = np.arange(10)
    for _ in range(4):
        program["statuses_of"](calls, good, 10, to, statuses, failed, warps=1)
        assert failed[0] == 0
        assert not statuses[:10].any()
    calls.check()


def test_a_storage_that_fails_fails_its_rows_alone(
    program: Any, table: np.ndarray, tmp_path: Path
) -> None:
    table.tofile(tmp_path / "t")
    file = File(tmp_path / "t", o_direct=True)
    # Rows in blocks of 512 bytes: the first read fails, once.
    storage = Faulty(file, FaultPlan.parse("read eio n=1"))
    ids, failed = np.arange(0, 64, 8), out()
    to, statuses = np.zeros((8, WIDTH), np.int32), np.zeros(8, np.uint16)

    with Opened(storage) as calls:
        program["statuses_of"](calls, ids, 8, to, statuses, failed, warps=1)
        well = statuses == 0
        assert failed[0] == (~well).sum() > 0
        np.testing.assert_array_equal(to[well], table[ids[well]])
        program["statuses_of"](calls, ids, 8, to, statuses, failed, warps=1)
        assert failed[0] == 0
        np.testing.assert_array_equal(to, table[ids])


def test_batches_outlive_launches(program: Any, calls: DeviceCalls, table: np.ndarray) -> None:
    tickets, results = [], []
    to = [np.zeros((5, WIDTH), np.int32) for _ in range(3)]
    seen = out()
    for i in range(3):
        program["begin"](calls, 10 * i, 5, to[i], seen, warps=1)
        tickets.append(int(seen[0]))
    assert len(set(tickets)) == 3

    # The second one by its ticket; then the oldest ones are the first and the third.
    program["finish"](calls, tickets[1], seen, warps=1)
    results.append(int(seen[0]))
    for _ in range(2):
        program["finish_oldest"](calls, seen, warps=1)
        results.append(int(seen[0]))

    assert results == [0, 0, 0]
    for i in range(3):
        np.testing.assert_array_equal(to[i], table[10 * i : 10 * i + 5])
    calls.check()


def test_synchronize_without_a_batch_is_an_error(program: Any, calls: DeviceCalls) -> None:
    seen = out()

    program["finish_oldest"](calls, seen, warps=1)
    assert seen[0] == NOT_SYNCHRONIZED
    with pytest.raises(ArgumentError, match="any batch is not in flight"):
        calls.check()

    program["finish"](calls, 5 << 16, seen, warps=1)
    assert seen[0] == NOT_SYNCHRONIZED
    with pytest.raises(ArgumentError, match="ticket 5 is not in flight"):
        calls.check()
    calls.check()


def test_a_batch_is_synchronized_once(program: Any, calls: DeviceCalls) -> None:
    to, seen = np.zeros((1, WIDTH), np.int32), out()
    program["begin"](calls, 0, 1, to, seen, warps=1)
    ticket = int(seen[0])

    program["finish"](calls, ticket, seen, warps=1)
    assert seen[0] == 0
    program["finish"](calls, ticket, seen, warps=1)
    assert seen[0] == NOT_SYNCHRONIZED
    with pytest.raises(ArgumentError, match=r"ticket 1 .* waited for before"):
        calls.check()


def test_a_batch_that_no_ring_of_slots_holds_is_refused(program: Any, calls: DeviceCalls) -> None:
    ids, to, seen = np.zeros(257, np.int64), np.zeros((257, WIDTH), np.int32), out(2)

    program["stream_rows"](calls, ids, 257, to, seen, warps=1)

    assert seen.tolist() == [REFUSED, NOT_SYNCHRONIZED]
    with pytest.raises(ArgumentError, match="257 rows: 4 slots of 64 rows hold 256"):
        calls.check()


def test_slots_that_nobody_gives_back_are_named(program: Any, table: np.ndarray) -> None:
    to, seen = np.zeros((1, WIDTH), np.int32), out()
    with Opened(Memory(table), slots=2, timeout_s=0.2) as calls:
        for expected in (1, 2, REFUSED):
            program["begin"](calls, 0, 1, to, seen, warps=1)
            assert seen[0] >> 16 == expected
        with pytest.raises(DeviceTimeout, match=r"free slot for ticket 3.*2 batches"):
            calls.check()

        # One is given back, so the next one fits: the refused call has taken no ticket.
        program["finish_oldest"](calls, seen, warps=1)
        program["begin"](calls, 0, 1, to, seen, warps=1)
        assert seen[0] >> 16 == 3
        calls.check()


def test_all_blocks_must_make_the_call(program: Any, table: np.ndarray) -> None:
    ids, to, seen = np.zeros(1, np.int64), np.zeros((1, WIDTH), np.int32), out(4)
    with Opened(Memory(table), timeout_s=0.2) as calls:
        seen[0] = 77
        program["only_some"](calls, ids, to, seen, warps=2)
        assert seen[0] == REFUSED
        with pytest.raises(DeviceTimeout, match="all 2 blocks of the launch, and only 1"):
            calls.check()

        # The block has left the meeting, so the next launch meets as if nothing had been.
        program["stream_rows"](calls, ids, 1, to, seen, warps=2)
        assert seen.tolist() == [1, 0, 1, 0]
        calls.check()


def test_a_batch_that_does_not_end_may_be_waited_for_again(
    program: Any, table: np.ndarray, tmp_path: Path
) -> None:
    table.tofile(tmp_path / "t")
    storage = Faulty(
        File(tmp_path / "t", o_direct=True), FaultPlan.parse("read delay=700000us n=1")
    )
    to, seen = np.zeros((1, WIDTH), np.int32), out()
    with Opened(storage, timeout_s=0.1) as calls:
        program["begin"](calls, 4, 1, to, seen, warps=1)
        program["finish_oldest"](calls, seen, warps=1)
        assert seen[0] == NOT_SYNCHRONIZED
        with pytest.raises(ControllerTimeout, match="ticket 1, which the engine has not ended"):
            calls.check()

        threading.Event().wait(1)
        program["finish_oldest"](calls, seen, warps=1)
        assert seen[0] == 0
        np.testing.assert_array_equal(to[0], table[4])
        calls.check()


def test_only_the_first_wait_for_a_late_engine_takes_its_time(
    program: Any, table: np.ndarray, tmp_path: Path
) -> None:
    table.tofile(tmp_path / "t")
    plan = FaultPlan.parse("read delay=2000000us n=1")
    storage = Faulty(File(tmp_path / "t", o_direct=True), plan)
    to, seen = np.zeros((30, WIDTH), np.int32), out(30)
    with Opened(storage, timeout_s=0.2) as calls:
        began = time.monotonic()
        program["rounds"](calls, 30, to, seen, warps=1)
        # Else 30 waits for batches, and 26 for slots: 11 s.
        assert time.monotonic() - began < 5.5
        assert not seen.any()

        # Nobody has looked, but the engine has answered: each batch comes again.
        threading.Event().wait(2.2)
        for _ in range(4):
            program["finish_oldest"](calls, seen, warps=1)
            assert seen[0] == 0
        program["rounds"](calls, 30, to, seen, warps=1)
        assert seen.all()
        np.testing.assert_array_equal(to, table[:30])
        with pytest.raises(ControllerTimeout, match=r"ticket 1, .* \(the first of .* such"):
            calls.check()


def test_only_the_first_wait_for_a_slot_takes_its_time(program: Any, table: np.ndarray) -> None:
    to, seen = np.zeros((1, WIDTH), np.int32), out()
    with Opened(Memory(table), slots=2, timeout_s=0.5) as calls:
        took = []
        for _ in range(5):
            began = time.monotonic()
            program["begin"](calls, 0, 1, to, seen, warps=1)
            took.append(time.monotonic() - began)
        assert seen[0] == REFUSED
        assert took[2] >= 0.5
        assert took[3] + took[4] < 0.5

        with pytest.raises(DeviceTimeout, match="first of 3 such"):
            calls.check()
        began = time.monotonic()
        program["begin"](calls, 0, 1, to, seen, warps=1)
        assert time.monotonic() - began >= 0.5, "the host has looked, so it may be freed by now"
        with pytest.raises(DeviceTimeout, match="free slot"):
            calls.check()


def test_arguments_of_a_wrong_kind_are_refused(program: Any, calls: DeviceCalls) -> None:
    seen = out()
    with pytest.raises(ArgumentError, match=r"takes a flashwarp\.Pipeline, not ndarray"):
        program["finish_oldest"](seen, seen)
    with pytest.raises(ReadOnlyError, match="const int"):
        program["store_rows"](calls, np.zeros(1, np.int64), 1, np.zeros(16, np.int32), seen)
    other = DeviceCalls(calls.engine, "float32")
    with other, pytest.raises(DtypeError, match="elements of dtype int32"):
        program["finish_oldest"](other, seen)


def test_closed_calls_are_refused(program: Any, table: np.ndarray) -> None:
    opened = Opened(Memory(table))
    with opened as calls:
        pass
    opened.calls.close()
    with pytest.raises(ClosedError):
        program["finish_oldest"](calls, out())
    with pytest.raises(ClosedError):
        calls.check()
