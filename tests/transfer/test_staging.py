"""The ring of staging buffers: its bound, who may have a buffer when, and how it ends."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from flashwarp.device import CpuDevice, DeviceMemory
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    DeviceOutOfMemory,
    DeviceTimeout,
    FlashwarpError,
    ForkError,
)
from flashwarp.transfer import StagingBuffer, StagingRing

BUFFER = 4096


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with CpuDevice(1) as made:
        yield made


def grown(device: CpuDevice, buffers: int) -> StagingRing:
    ring = StagingRing(device, buffers * BUFFER, BUFFER)
    ring.wait_grown(10)
    return ring


class Copy:
    """A copy that ends when the test says so."""

    ended = False

    def over(self) -> bool:
        return self.ended


def test_the_budget_is_a_limit_of_bytes(device: CpuDevice) -> None:
    with StagingRing(device, "1 MiB", "300 KiB") as ring:
        ring.wait_grown(10)

        assert ring.buffers == 3
        assert ring.allocated_bytes <= 1 << 20
        assert ring.failure is None


def test_a_budget_below_one_buffer_is_refused(device: CpuDevice) -> None:
    with pytest.raises(ArgumentError, match="no room for one buffer of 8192 bytes"):
        StagingRing(device, 4096, 8192)


def test_a_buffer_can_be_used_while_the_ring_grows(device: CpuDevice) -> None:
    go_on = threading.Event()
    made = iter(range(100))
    allocate = device.allocate_host

    def slowly(nbytes: int, alignment: int = 4096) -> DeviceMemory:
        if next(made) > 0:
            assert go_on.wait(30)
        return allocate(nbytes, alignment)

    device.allocate_host = slowly  # type: ignore[method-assign]
    with StagingRing(device, 4 * BUFFER, BUFFER) as ring:
        ring.acquire(10).release()
        assert ring.allocated_bytes == BUFFER
        go_on.set()
        ring.wait_grown(10)
        assert ring.allocated_bytes == 4 * BUFFER


def test_waiting_without_a_free_buffer_says_who_has_them(device: CpuDevice) -> None:
    with grown(device, 2) as ring:
        held = ring.acquire()
        copied, copy = ring.acquire(), Copy()
        copied.joins(copy)
        copied.release()

        with pytest.raises(DeviceTimeout, match=r"1 are held, 1 are released and in copies.*budge"):
            ring.acquire(timeout_s=0.05)

        assert ring.try_acquire() is None
        copy.ended = True
        held.release()


def test_who_waits_gets_a_buffer_before_who_tries(device: CpuDevice) -> None:
    with grown(device, 2) as ring:
        first, second = ring.acquire(), ring.acquire()
        got: list[StagingBuffer] = []
        waiting = threading.Thread(target=lambda: got.append(ring.acquire(30)))
        waiting.start()
        while not ring._line:
            time.sleep(0.001)

        first.release()
        # Whoever holds `second` and tries again and again would keep the other one for ever.
        while not got:
            assert ring._line or got
            tried = ring.try_acquire() if ring._line else None
            assert tried is None
        waiting.join(30)
        got[0].release()
        second.release()
        again = ring.try_acquire()
        assert again is not None
        again.release()


def test_a_buffer_in_a_copy_is_not_lent_again(device: CpuDevice) -> None:
    with grown(device, 1) as ring:
        buffer, first, second = ring.acquire(), Copy(), Copy()
        buffer.joins(first)
        buffer.joins(second)
        buffer.release()

        assert ring.try_acquire() is None
        first.ended = True
        assert ring.try_acquire() is None
        second.ended = True

        assert ring.try_acquire() is not None


def test_the_last_holder_gives_it_back(device: CpuDevice) -> None:
    with grown(device, 1) as ring:
        buffer = ring.acquire()
        assert buffer.retain() is buffer

        buffer.release()
        assert not buffer.released
        assert ring.try_acquire() is None
        buffer.release()

        assert buffer.released
        assert ring.try_acquire() is not None


def test_a_released_buffer_cannot_be_used(device: CpuDevice) -> None:
    with grown(device, 1) as ring:
        buffer = ring.acquire()
        buffer.release()

        for use in (lambda: buffer.address, buffer.as_numpy, buffer.retain, buffer.release):
            with pytest.raises(ClosedError, match="was released"):
                use()
        with pytest.raises(ClosedError, match="was released"):
            buffer.joins(Copy())


def test_a_lost_buffer_comes_back_once_no_array_shows_it(device: CpuDevice) -> None:
    with grown(device, 1) as ring:
        shown = ring.acquire().as_numpy()
        gc.collect()
        assert ring.try_acquire() is None

        del shown
        gc.collect()

        assert ring.try_acquire() is not None


def test_any_thread_may_release(device: CpuDevice) -> None:
    with grown(device, 1) as ring:
        buffer = ring.acquire()
        timer = threading.Timer(0.05, buffer.release)
        timer.start()

        assert ring.acquire(timeout_s=10).nbytes == BUFFER
        timer.join()


def test_threads_never_share_a_buffer(device: CpuDevice) -> None:
    wrong: list[str] = []

    def work(ring: StagingRing, number: int) -> None:
        for turn in range(200):
            buffer = ring.acquire(timeout_s=30)
            data = buffer.as_numpy().view(np.uint64)
            data[:] = number * 1000 + turn
            time.sleep(0)
            if not (data == number * 1000 + turn).all():
                wrong.append(f"{number} in turn {turn}")
            buffer.release()

    with StagingRing(device, 3 * BUFFER, BUFFER) as ring:
        threads = [threading.Thread(target=work, args=(ring, number)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert wrong == []
        assert ring.allocated_bytes <= 3 * BUFFER


def test_what_stops_the_growth_is_said_and_the_ring_goes_on(
    device: CpuDevice, caplog: pytest.LogCaptureFixture
) -> None:
    made, allocate = iter(range(100)), device.allocate_host

    def scarce(nbytes: int, alignment: int = 4096) -> DeviceMemory:
        if next(made) == 2:
            raise DeviceOutOfMemory("no more pinned memory")
        return allocate(nbytes, alignment)

    device.allocate_host = scarce  # type: ignore[method-assign]
    with StagingRing(device, 5 * BUFFER, BUFFER) as ring:
        with pytest.raises(DeviceOutOfMemory, match="no more pinned"):
            ring.wait_grown(10)

        assert isinstance(ring.failure, DeviceOutOfMemory)
        assert ring.allocated_bytes == 2 * BUFFER
        held = ring.acquire(10), ring.acquire(10)
        with pytest.raises(DeviceTimeout, match="pinning more failed"):
            ring.acquire(0.01)
        del held
    assert "pinning stopped at 8192 of 20480 bytes" in caplog.text


def test_a_ring_that_gets_no_memory_raises_why(device: CpuDevice) -> None:
    def none(nbytes: int, alignment: int = 4096) -> DeviceMemory:
        raise DeviceOutOfMemory(f"no {nbytes} bytes at {alignment}")

    device.allocate_host = none  # type: ignore[method-assign]
    with (
        StagingRing(device, 5 * BUFFER, BUFFER) as ring,
        pytest.raises(DeviceOutOfMemory, match="no 4096 bytes"),
    ):
        ring.acquire(10)


def test_after_close_nothing_is_lent_and_what_is_held_stays(device: CpuDevice) -> None:
    ring = grown(device, 2)
    held = ring.acquire()
    data = held.as_numpy()
    data[:] = 5

    ring.close()
    ring.close()

    assert (data == 5).all()
    with pytest.raises(ClosedError, match="ring was closed"):
        ring.acquire()
    memory = held._memory
    assert not memory.closed
    held.release()
    assert memory.closed


def test_its_device_closes_it(device: CpuDevice) -> None:
    ring = grown(device, 1)

    device.close()

    with pytest.raises(ClosedError, match="ring was closed"):
        ring.try_acquire()


def child(ring: StagingRing, answers: object) -> None:
    try:
        ring.try_acquire()
        answers.put("lent")  # type: ignore[attr-defined]
    except ForkError as error:
        answers.put(str(error))  # type: ignore[attr-defined]
    ring.close()


def test_a_forked_child_has_no_ring(device: CpuDevice) -> None:
    fork = multiprocessing.get_context("fork")
    with grown(device, 1) as ring:
        answers = fork.SimpleQueue()
        process = fork.Process(target=child, args=(ring, answers))
        process.start()
        assert "belongs to process" in answers.get()
        process.join()
        assert process.exitcode == 0
        assert ring.try_acquire() is not None


class Rings(RuleBasedStateMachine):
    """Buffers, holders and copies in any order, against counts."""

    buffers = Bundle("buffers")
    copies = Bundle("copies")

    def __init__(self) -> None:
        super().__init__()
        self.device = CpuDevice(1)
        self.ring = grown(self.device, 3)
        self.holders: dict[StagingBuffer, int] = {}
        self.uses: dict[int, list[Copy]] = {}

    @rule(target=buffers)
    def acquire(self) -> object:
        buffer = self.ring.try_acquire()
        in_use = {b._memory.address for b in self.holders}
        in_use |= {at for at, uses in self.uses.items() if any(not c.ended for c in uses)}
        if buffer is None:
            assert len(in_use) == 3, "a buffer was free"
            return None
        assert buffer.address not in in_use, "a buffer in use was lent"
        self.holders[buffer] = 1
        self.uses[buffer.address] = []
        return buffer

    @rule(buffer=buffers)
    def retain(self, buffer: StagingBuffer | None) -> None:
        if buffer in self.holders:
            assert buffer is not None
            buffer.retain()
            self.holders[buffer] += 1

    @rule(buffer=buffers)
    def release(self, buffer: StagingBuffer | None) -> None:
        if buffer is None:
            return
        if buffer not in self.holders:
            with pytest.raises(ClosedError):
                buffer.release()
            return
        buffer.release()
        self.holders[buffer] -= 1
        if not self.holders[buffer]:
            del self.holders[buffer]

    @rule(target=copies, buffer=buffers)
    def copy(self, buffer: StagingBuffer | None) -> object:
        copy = Copy()
        if buffer in self.holders:
            assert buffer is not None
            buffer.joins(copy)
            self.uses[buffer.address].append(copy)
        return copy

    @rule(copy=consumes(copies))
    def end(self, copy: Copy) -> None:
        copy.ended = True

    @invariant()
    def within_the_budget(self) -> None:
        assert self.ring.allocated_bytes <= 3 * BUFFER

    def teardown(self) -> None:
        self.ring.close()
        self.device.close()


Rings.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRings = Rings.TestCase


@pytest.mark.parametrize("size", [0, -1, "lots", 1.5, None])
def test_sizes_are_checked(device: CpuDevice, size: object) -> None:
    with pytest.raises(FlashwarpError):
        StagingRing(device, "1 MiB", size)  # type: ignore[arg-type]
