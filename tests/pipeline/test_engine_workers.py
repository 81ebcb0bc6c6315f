"""How many workers serve batches: decided from the time of I/O and the pauses between batches."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flashwarp import _native

NS = 1_000_000
BYTES = 1 << 20


class Load:
    """A pipeline whose batches take `io_ns(workers)`, beside `compute_ns` or in turn with it."""

    def __init__(self, low: int, high: int, rates: list[float], serial: bool = False) -> None:
        self.low, self.high, self.serial = low, high, serial
        self.rates = rates
        self.state: tuple[int, int, int, int, float, float, int] = (high, 0, 3, 0, 0.0, 0.0, 0)
        self.changes: list[tuple[int, int, str]] = []

    def period_ns(self, workers: int, compute_ns: float, io_ns: float) -> tuple[float, float]:
        """Return the time of I/O with so many workers, and from batch to batch."""
        io = io_ns * self.rates[self.high] / self.rates[workers]
        return io, io + compute_ns if self.serial else max(io, compute_ns)

    def run(self, windows: int, compute_ns: float, io_ns: float) -> list[float]:
        """Return the times from batch to batch; `io_ns` is that of all workers."""
        periods = []
        for _ in range(windows):
            io, period = self.period_ns(self.state[0], compute_ns, io_ns)
            periods.append(period)
            before = self.state[0]
            self.state, reason = _native.decide_workers(
                self.state, int(8 * io), int(8 * (period - io)), 8 * BYTES, self.low, self.high
            )
            assert self.low <= self.state[0] <= self.high
            assert bool(reason) == (before != self.state[0])
            if reason:
                self.changes.append((before, self.state[0], reason))
        return periods

    def best(self, compute_ns: float, io_ns: float) -> float:
        return min(
            self.period_ns(workers, compute_ns, io_ns)[1]
            for workers in range(self.low, self.high + 1)
        )


@st.composite
def loads(draw: Any, serial: bool = False) -> Load:
    controllers = draw(st.integers(1, 64))
    low, high = -(-controllers // 4), -(-controllers // 2)
    # A worker more adds something, and never more than one worker's share.
    shares = draw(st.lists(st.floats(0, 1), min_size=high, max_size=high))
    rates, rate = [0.0], 0.0
    for number, share in enumerate(shares, 1):
        rate += rate / (number - 1) * share if number > 1 else 1.0
        rates.append(rate)
    return Load(low, high, rates, serial)


times = st.floats(0.01 * NS, 100 * NS)


@given(load=loads(), compute=times, io=times)
def test_a_steady_load_comes_to_a_steady_count(load: Load, compute: float, io: float) -> None:
    load.run(20, compute, io)
    load.changes.clear()

    load.run(200, compute, io)

    assert load.changes == []


@given(load=loads(), steps=st.lists(st.tuples(times, times), min_size=1, max_size=8))
def test_no_load_is_much_slower_than_with_the_best_count(
    load: Load, steps: list[tuple[float, float]]
) -> None:
    for compute, io in steps:
        load.run(20, compute, io)

        periods = load.run(50, compute, io)

        assert sum(periods) / 50 <= 1.05 * load.best(compute, io)


@given(load=loads(), io=times)
def test_long_pauses_leave_the_fewest_workers_and_none_bring_all_back(
    load: Load, io: float
) -> None:
    slowest, _ = load.period_ns(load.low, 0, io)
    load.run(20, 10 * load.high * slowest, io)
    assert load.state[0] == load.low

    load.run(1, 0, io)

    assert load.state[0] == load.high


@given(load=loads(), io=times, pause=times)
def test_a_pause_behind_a_change_is_not_blamed_on_it(load: Load, io: float, pause: float) -> None:
    slowest, _ = load.period_ns(load.low, 0, io)
    load.run(20, 10 * load.high * slowest, io)
    load.run(1, 0, io)
    load.changes.clear()

    # The first window with all workers has the end of an epoch in it.
    load.run(1, io + 8 * pause, io)
    load.run(20, 0, io)

    assert load.changes == []
    assert load.state[0] == load.high


@given(load=loads(serial=True), compute=times, io=times)
def test_who_waits_for_each_batch_is_slowed_seldom(load: Load, compute: float, io: float) -> None:
    load.run(20, compute, io)
    load.changes.clear()

    load.run(256, compute, io)

    # Patience has its longest within a few attempts.
    assert len(load.changes) <= 2 * (256 // 64 + math.ceil(math.log2(64 / 3)))


@given(controllers=st.integers(3, 64), io=times, loss=st.floats(0.05, 1))
def test_more_workers_that_slow_each_other_are_sent_away(
    controllers: int, io: float, loss: float
) -> None:
    low, high = -(-controllers // 4), -(-controllers // 2)
    rates = [0.0, *(1 - loss * (count - low) / high for count in range(1, high + 1))]
    load = Load(low, high, rates)
    load.state = (low, 0, 3, 0, 0.0, 0.0, 0)
    load.run(20, 0, io)

    periods = load.run(640, 0, io)

    # They are tried again, ever more seldom.
    assert sum(periods) / 640 <= 1.05 * load.best(0, io) or rates[high] > rates[low] / 1.03


def test_a_window_without_time_or_bytes_changes_nothing() -> None:
    state = (3, 1, 3, 0, 0.0, 0.0, 0)
    assert _native.decide_workers(state, 0, 0, 5, 1, 4) == (state, "")
    assert _native.decide_workers(state, 5, 5, 0, 1, 4) == (state, "")
