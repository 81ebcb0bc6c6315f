"""Transfer buffers: their bounds, who may have one when, what stays pinned, and how they end."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from flashwarp import _waiting
from flashwarp.device import CpuDevice
from flashwarp.errors import (
    ArgumentError,
    ClosedError,
    DeviceError,
    DeviceOutOfMemory,
    DeviceTimeout,
    FlashwarpError,
    ForkError,
)
from flashwarp.transfer import TransferBuffer, TransferClient, pool, pool_of
from flashwarp.transfer.buffer import Block

BUFFER = 4096
MIB = 1 << 20


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with CpuDevice(1) as made:
        yield made


def reserved(device: CpuDevice, buffers: int) -> TransferClient:
    return TransferClient(device, "tests", buffers * BUFFER, BUFFER, reserved=True)


def until(done: Callable[[], object]) -> None:
    assert _waiting.until(lambda: bool(done()), 10) is None


class Copy:
    """A copy that ends when the test says so."""

    ended = False

    def over(self) -> bool:
        return self.ended


def test_a_budget_below_one_buffer_is_refused(device: CpuDevice) -> None:
    with pytest.raises(ArgumentError, match="no room for one buffer of 8192 bytes"):
        TransferClient(device, "tests", 4096, 8192)


def before_each(monkeypatch: pytest.MonkeyPatch, pinned: Callable[[int], object]) -> None:
    """Let a call, with the number of the buffer, come before each buffer is pinned."""
    numbers, block = itertools.count(), pool.Block

    def counted(device: CpuDevice, nbytes: int) -> Block:
        pinned(next(numbers))
        return block(device, nbytes)

    monkeypatch.setattr(pool, "Block", counted)


def test_a_buffer_can_be_used_while_others_are_pinned(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    before_each(monkeypatch, lambda number: number == 0 or go_on.wait(30))
    with TransferClient(device, "tests", 4 * BUFFER, BUFFER, reserved=True, ahead=True) as ring:
        until(lambda: ring.room.free)
        ring.take(timeout_s=10).release()
        go_on.set()
        until(lambda: len(ring.room.free) == 4)
        assert ring.allocated_bytes == 4 * BUFFER


def test_buffers_are_pinned_ahead_of_what_is_taken(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_AHEAD_BYTES", 4 * BUFFER)
    with TransferClient(device, "tests", 64 * BUFFER, BUFFER, reserved=True, ahead=True) as ring:
        until(lambda: ring.allocated_bytes == 4 * BUFFER and pool_of(device)._keeper is None)
        held = ring.try_take_several(16)
        assert len(held) == 16
        # A quarter more, but the thread is not started again for the last of it.
        until(lambda: ring.allocated_bytes >= 18 * BUFFER and pool_of(device)._keeper is None)
        assert ring.allocated_bytes <= 22 * BUFFER
        held += ring.try_take_several(8)
        until(lambda: ring.allocated_bytes >= 26 * BUFFER and pool_of(device)._keeper is None)
        assert ring.allocated_bytes <= 32 * BUFFER
        for each in held:
            each.release()


def test_several_buffers_are_as_many_as_there_are(device: CpuDevice) -> None:
    with reserved(device, 5) as ring:
        first = ring.take()
        held = ring.try_take_several(9)
        assert len(held) == 4
        assert len({each.address for each in (first, *held)}) == 5
        assert ring.try_take_several(1) == []
        for each in (first, *held):
            each.release()
        assert len(ring.try_take_several(3)) == 3


def test_waiting_without_a_free_buffer_says_who_has_them(device: CpuDevice) -> None:
    with reserved(device, 2) as ring:
        held = ring.take()
        copied, copy = ring.take(), Copy()
        copied.joins(copy)
        copied.release()

        with pytest.raises(DeviceTimeout, match=r"4096 are held, 4096 are released and in copies"):
            ring.take(timeout_s=0.05)

        assert ring.try_take() is None
        copy.ended = True
        held.release()


def test_who_waits_gets_a_buffer_before_who_tries(device: CpuDevice) -> None:
    with reserved(device, 2) as ring:
        first, second = ring.take(), ring.take()
        got: list[TransferBuffer] = []
        waiting = threading.Thread(target=lambda: got.append(ring.take(timeout_s=30)))
        waiting.start()
        while not ring._line:
            time.sleep(0.001)

        first.release()
        # Whoever holds `second` and tries again and again would keep the other one for ever.
        while not got:
            assert ring._line or got
            tried = ring.try_take() if ring._line else None
            assert tried is None
        waiting.join(30)
        got[0].release()
        second.release()
        again = ring.try_take()
        assert again is not None
        again.release()


def test_a_released_buffer_cannot_be_used(device: CpuDevice) -> None:
    with reserved(device, 1) as ring:
        buffer = ring.take()
        buffer.release()

        for use in (lambda: buffer.address, buffer.as_numpy, buffer.retain, buffer.release):
            with pytest.raises(ClosedError, match="was released"):
                use()
        with pytest.raises(ClosedError, match="was released"):
            buffer.joins(Copy())


def test_a_lost_buffer_comes_back_once_no_array_shows_it(device: CpuDevice) -> None:
    with reserved(device, 1) as ring:
        shown = ring.take().as_numpy()
        gc.collect()
        assert ring.try_take() is None

        del shown
        gc.collect()

        assert ring.try_take() is not None


def test_any_thread_may_release(device: CpuDevice) -> None:
    with reserved(device, 1) as ring:
        buffer = ring.take()
        timer = threading.Timer(0.05, buffer.release)
        timer.start()

        assert ring.take(timeout_s=10).nbytes == BUFFER
        timer.join()


def test_threads_never_share_a_buffer(device: CpuDevice) -> None:
    wrong: list[str] = []

    def work(ring: TransferClient, number: int) -> None:
        for turn in range(200):
            buffer = ring.take(timeout_s=30)
            data = buffer.as_numpy().view(np.uint64)
            data[:] = number * 1000 + turn
            time.sleep(0)
            if not (data == number * 1000 + turn).all():
                wrong.append(f"{number} in turn {turn}")
            buffer.release()

    with TransferClient(device, "tests", 3 * BUFFER, BUFFER) as ring:
        threads = [threading.Thread(target=work, args=(ring, number)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert wrong == []
        assert ring.allocated_bytes <= 3 * BUFFER


def test_what_stops_the_pinning_is_said_and_the_client_goes_on(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def scarce(number: int) -> None:
        if number >= 2:
            raise DeviceOutOfMemory("no more pinned memory")

    before_each(monkeypatch, scarce)
    with TransferClient(device, "tests", 5 * BUFFER, BUFFER, reserved=True) as ring:
        held = ring.take(), ring.take()
        assert ring.try_take() is None

        assert isinstance(ring.failure, DeviceOutOfMemory)
        assert ring.allocated_bytes == 2 * BUFFER
        with pytest.raises(DeviceTimeout, match="pinning more failed"):
            ring.take(timeout_s=0.01)
        del held
    assert "pinning stopped at 8192 of 20480 bytes, with which tests goes on" in caplog.text


@pytest.mark.parametrize("ahead", [False, True])
def test_a_client_that_gets_no_memory_raises_why(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    def none(number: int) -> None:
        raise DeviceOutOfMemory(f"no buffer {number}")

    before_each(monkeypatch, none)
    with (
        TransferClient(device, "tests", 5 * BUFFER, BUFFER, ahead=ahead) as ring,
        pytest.raises(DeviceOutOfMemory, match="no buffer"),
    ):
        ring.take(timeout_s=10)


def test_after_close_nothing_is_lent_and_what_is_held_stays(device: CpuDevice) -> None:
    ring = reserved(device, 2)
    held = ring.take()
    data = held.as_numpy()
    data[:] = 5

    ring.close()
    ring.close()

    assert (data == 5).all()
    with pytest.raises(ClosedError, match="of tests were closed"):
        ring.take()
    memory = held._block.memory
    assert not memory.closed
    held.release()
    assert memory.closed


def test_its_device_closes_it(device: CpuDevice) -> None:
    ring = reserved(device, 1)

    device.close()

    with pytest.raises(ClosedError, match="of tests were closed"):
        ring.try_take()


def child(ring: TransferClient, answers: object) -> None:
    try:
        ring.try_take()
        answers.put("lent")  # type: ignore[attr-defined]
    except ForkError as error:
        answers.put(str(error))  # type: ignore[attr-defined]
    ring.close()


def test_a_forked_child_has_no_ring(device: CpuDevice) -> None:
    fork = multiprocessing.get_context("fork")
    with reserved(device, 1) as ring:
        answers = fork.SimpleQueue()
        process = fork.Process(target=child, args=(ring, answers))
        process.start()
        assert "belongs to process" in answers.get()
        process.join()
        assert process.exitcode == 0
        assert ring.try_take() is not None


class Rings(RuleBasedStateMachine):
    """Buffers, holders and copies in any order, against counts."""

    buffers = Bundle("buffers")
    copies = Bundle("copies")

    def __init__(self) -> None:
        super().__init__()
        self.device = CpuDevice(1)
        self.ring = reserved(self.device, 3)
        self.holders: dict[TransferBuffer, int] = {}
        self.uses: dict[int, list[Copy]] = {}

    @rule(target=buffers)
    def acquire(self) -> object:
        buffer = self.ring.try_take()
        in_use = {b._block.address for b in self.holders}
        in_use |= {at for at, uses in self.uses.items() if any(not c.ended for c in uses)}
        if buffer is None:
            assert len(in_use) == 3, "a buffer was free"
            return None
        assert buffer.address not in in_use, "a buffer in use was lent"
        self.holders[buffer] = 1
        self.uses[buffer.address] = []
        return buffer

    @rule(buffer=buffers)
    def retain(self, buffer: TransferBuffer | None) -> None:
        if buffer in self.holders:
            assert buffer is not None
            buffer.retain()
            self.holders[buffer] += 1

    @rule(buffer=buffers)
    def release(self, buffer: TransferBuffer | None) -> None:
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
    def copy(self, buffer: TransferBuffer | None) -> object:
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
        TransferClient(device, "tests", "1 MiB", size)  # type: ignore[arg-type]


# Blocks of any size.


@pytest.fixture
def blocks(device: CpuDevice) -> Iterator[TransferClient]:
    with TransferClient(device, "tests", "8 MiB", "1 MiB", reserved=True) as made:
        yield made


def test_a_block_that_came_back_is_lent_again(blocks: TransferClient) -> None:
    first = blocks.take(3 * MIB)
    address = first.address
    first.release()

    assert blocks.take(2 * MIB).address == address
    assert blocks.allocated_bytes == 3 * MIB


def test_free_blocks_that_do_not_fit_make_room(blocks: TransferClient) -> None:
    blocks.take(5 * MIB).release()

    assert blocks.take(8 * MIB, timeout_s=1).nbytes == 8 * MIB
    assert blocks.allocated_bytes == 8 * MIB


def test_more_than_the_budget_is_refused_at_once(blocks: TransferClient) -> None:
    with pytest.raises(ArgumentError, match="8388609 bytes are more than the budget of 8388608"):
        blocks.take(8 * MIB + 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4 * MIB)), max_size=40))
def test_the_budget_holds_whatever_is_asked_for(steps: list[tuple[bool, int]]) -> None:
    with (
        CpuDevice(1) as device,
        TransferClient(device, "tests", "8 MiB", "1 MiB", reserved=True) as blocks,
    ):
        held = []
        for release, nbytes in steps:
            if release and held:
                held.pop(nbytes % len(held)).release()
                continue
            try:
                buffer = blocks.take(nbytes, timeout_s=0)
            except DeviceTimeout:
                assert sum(each.nbytes for each in held) + nbytes > 8 * MIB
                continue
            begin, end = buffer.address, buffer.address + buffer.nbytes
            assert all(e.address >= end or e.address + e.nbytes <= begin for e in held)
            held.append(buffer)
            assert blocks.allocated_bytes <= 8 * MIB


# Clients beside each other.


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_LENT_BYTES_MAX", 6 * BUFFER)


def client(device: CpuDevice, buffers: int = 6, minimum: int = 1) -> TransferClient:
    most, least = buffers * BUFFER, minimum * BUFFER
    return TransferClient(device, f"with {minimum}", most, BUFFER, minimum=least)


def taken(client: TransferClient) -> list[TransferBuffer]:
    """Take all that a client gets."""
    return list(iter(client.try_take, None))


@pytest.mark.usefixtures("few")
def test_a_client_leaves_the_others_their_minimum(device: CpuDevice) -> None:
    with client(device, 6, 1) as first, client(device, 6, 2) as second, client(device, 2, 1):
        of_first, of_second = taken(first), taken(second)
        assert (len(of_first), len(of_second)) == (3, 2)

        of_first.pop().release()

        assert second.try_take() is not None


@pytest.mark.usefixtures("few")
def test_a_reservation_takes_nothing_from_others(device: CpuDevice) -> None:
    with reserved(device, 20) as kept, client(device, 6) as lent:
        first, second = taken(kept), taken(lent)

        assert (len(first), len(second)) == (20, 6)
        assert pool_of(device).pinned_bytes == {
            "transfer buffers": 6 * BUFFER,
            "tests": 20 * BUFFER,
        }


@pytest.mark.usefixtures("few")
def test_clients_use_buffers_of_each_other(device: CpuDevice) -> None:
    with client(device) as first, client(device) as second:
        buffer = first.take()
        address = buffer.address
        buffer.release()

        assert second.take().address == address


def test_who_holds_a_buffer_does_not_wait_for_another(device: CpuDevice) -> None:
    with client(device, 1) as first, client(device, 1) as second:
        held = [first.take(), second.take()]

        with pytest.raises(DeviceError, match=r"holds 2 transfer buffers would wait for another"):
            first.take()
        assert held


def test_another_thread_may_wait_for_what_this_one_holds(device: CpuDevice) -> None:
    with client(device, 1) as one:
        held, got = one.take(), []
        waiting = threading.Thread(target=lambda: got.append(one.take(timeout_s=30)))
        waiting.start()
        until(lambda: one._line)
        held.release()
        waiting.join(30)

        assert len(got) == 1


def test_a_large_budget_is_had_alone(device: CpuDevice, few: None) -> None:
    with client(device, 9) as large:
        assert len(taken(large)) == 9


def test_a_forked_child_begins_with_an_empty_pool(device: CpuDevice) -> None:
    def child(answers: object) -> None:
        of_child = pool_of(device)
        before = of_child.pinned_bytes
        with reserved(device, 1) as own:
            data = own.take().as_numpy()
            data[:] = 1
        answers.put((of_child.pid, before))  # type: ignore[attr-defined]

    fork = multiprocessing.get_context("fork")
    with reserved(device, 1) as ring:
        held = ring.take()
        answers = fork.SimpleQueue()
        process = fork.Process(target=child, args=(answers,))
        process.start()

        assert answers.get() == (process.pid, {})
        process.join()
        assert process.exitcode == 0
        assert held.as_numpy().any() == 0
