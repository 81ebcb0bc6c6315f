"""Locks, conditions, futures and pools of `flashwarp.endings`, and signal handlers that raise."""

from __future__ import annotations

import contextlib
import functools
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from flashwarp import endings

WAIT_S = 30.0


def is_free(lock: Any, within_s: float = 2.0) -> bool:
    """Whether another thread can take it."""
    found: list[bool] = []

    def take() -> None:
        found.append(lock.acquire(timeout=within_s))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(WAIT_S)
    return found == [True]


class AtLine:
    """Raise KeyboardInterrupt at the n-th line of a function."""

    def __init__(self, function: Callable[[], None], place: int) -> None:
        self._code = function.__code__
        self._left = place

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not self._code:
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("make", [endings.Lock, endings.Condition])
def test_a_with_statement_releases_its_lock_wherever_it_is_interrupted(
    make: Callable[[], Any],
) -> None:
    lock = make()
    interrupted = 0

    def use() -> None:
        with lock:
            with lock:
                pass
            assert lock is not None

    for place in range(1, 12):
        sys.settrace(AtLine(use, place))
        try:
            use()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        assert is_free(lock), f"interrupted at line {place}"
    assert interrupted > 4


def test_a_lock_excludes_other_threads_and_may_be_taken_again() -> None:
    lock = endings.Lock()

    with lock:
        with lock:
            assert not is_free(lock, 0.01)
        assert not is_free(lock, 0.01)
    assert is_free(lock)


def test_a_lock_is_released_by_an_exception_of_its_statement() -> None:
    lock = endings.Lock()

    with pytest.raises(ValueError, match="of the statement"), lock:
        raise ValueError("of the statement")

    assert is_free(lock)


def test_holding_without_waiting_leaves_a_lock_of_another_thread_alone() -> None:
    from flashwarp import _native

    lock = endings.Lock()
    found: list[object] = []

    def look() -> None:
        found.append(_native.holding(lock, lambda: "called", False))

    for taken in (True, False):
        thread = threading.Thread(target=look)
        with lock if taken else endings.Lock():
            thread.start()
            thread.join(WAIT_S)

    assert found == [None, "called"]
    assert is_free(lock)


@pytest.fixture
def interrupts() -> Iterator[Callable[[float], None]]:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda delay_s: signal.setitimer(signal.ITIMER_REAL, delay_s) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_condition_stays_usable_whenever_a_signal_comes(
    interrupts: Callable[[float], None],
) -> None:
    condition, draw = endings.Condition(), random.Random(1)

    for _ in range(400):
        try:
            interrupts(draw.random() * 3e-4 + 1e-6)
            while True:
                with condition:
                    condition.wait(1e-5)
                    condition.notify_all()
        except KeyboardInterrupt:
            pass
        assert is_free(condition)
    assert not condition._waiters


def _again(call: Callable[[], object], interrupts: Callable[[float], None], delay_s: float) -> None:
    """Make a call again and again until a signal comes."""
    try:
        interrupts(delay_s)
        while True:
            call()
    except KeyboardInterrupt:
        pass


@pytest.mark.parametrize("call", ["wait", "result", "as_completed"])
def test_a_future_stays_usable_whenever_a_signal_comes(
    call: str, interrupts: Callable[[float], None]
) -> None:
    draw = random.Random(1)
    for _ in range(400):
        future: endings.Future[int] = endings.Future()
        with ThreadPoolExecutor(1) as other:
            wait = {
                "wait": functools.partial(endings.wait, [future], 1e-5),
                "result": functools.partial(future.exception, 1e-5),
                # Only its wait: while it takes the locks of its futures, Python leaves them taken.
                "as_completed": _waiting_by_an_event(future),
            }[call]

            def quietly(wait: Callable[[], object] = wait) -> None:
                with contextlib.suppress(TimeoutError):
                    wait()

            _again(quietly, interrupts, draw.random() * 3e-4 + 1e-6)
            other.submit(future.set_result, 5).result(WAIT_S)
        assert endings.wait([future], 0)


def _waiting_by_an_event(future: endings.Future[int]) -> Callable[[], object]:
    waiter = types.SimpleNamespace(event=threading.Event(), add_result=lambda _: None)
    waiter.add_result = lambda _: waiter.event.set()
    future._waiters.append(waiter)
    return lambda: waiter.event.wait(1e-5)


def test_waiting_for_futures_says_whether_all_are_done() -> None:
    futures: list[endings.Future[int]] = [endings.Future() for _ in range(3)]
    futures[0].set_result(1)
    futures[1].set_exception(ValueError("is no failure of the wait"))

    assert not endings.wait(futures, 0.01)
    futures[2].cancel()
    assert endings.wait(futures)


def test_a_thread_lives_until_it_ends_whenever_a_signal_comes(
    interrupts: Callable[[float], None],
) -> None:
    draw = random.Random(1)
    for look in ("join", "is_alive") * 200:
        end = threading.Event()
        thread = endings.Thread(end.wait, "test", WAIT_S)
        thread.start()
        call = functools.partial(thread.join, 1e-5) if look == "join" else thread.is_alive

        _again(call, interrupts, draw.random() * 3e-4 + 1e-6)

        alive = thread.is_alive()
        end.set()
        thread.join(WAIT_S)
        assert alive
        assert not thread.is_alive()


def test_a_call_aside_ends_before_the_signal_that_stops_it_comes_out(
    interrupts: Callable[[float], None],
) -> None:
    stopped, ended = threading.Event(), []

    def work() -> None:
        assert stopped.wait(WAIT_S)
        ended.append(threading.get_ident())

    def call() -> None:
        interrupts(0.05)
        endings.aside(work, stopped.set)

    with pytest.raises(KeyboardInterrupt):
        call()

    assert len(ended) == 1
    assert ended[0] != threading.get_ident()


def test_a_call_aside_returns_and_raises_as_a_call_does() -> None:
    assert endings.aside(lambda: 5, lambda: None) == 5
    with pytest.raises(ZeroDivisionError):
        endings.aside(lambda: 1 // 0, lambda: None)


def test_a_pool_makes_all_calls_and_returns_what_they_return_or_raise() -> None:
    with endings.Pool(3, "test", queued_max=4) as pool:
        squares = [pool.submit(lambda i: i * i, i) for i in range(100)]
        failing = pool.submit(lambda: 1 // 0)

    assert [each.result(WAIT_S) for each in squares] == [i * i for i in range(100)]
    with pytest.raises(ZeroDivisionError):
        failing.result(WAIT_S)
    assert pool.submit(lambda: 7).result(0) == 7, "in this thread, after its end"


def test_a_pool_that_is_left_by_an_exception_cancels_what_has_not_begun() -> None:
    go_on, begun = threading.Event(), threading.Event()
    waiting: list[endings.Future[bool]] = []

    def wait() -> bool:
        begun.set()
        return go_on.wait(WAIT_S)

    def leave() -> None:
        with endings.Pool(1, "test") as pool:
            waiting.extend(pool.submit(wait) for _ in range(6))
            assert begun.wait(WAIT_S)
            threading.Timer(0.05, go_on.set).start()
            raise KeyError

    with pytest.raises(KeyError):
        leave()

    assert waiting[0].result(0) is True
    assert all(each.cancelled() for each in waiting[1:])


def test_what_an_interrupted_caller_does_not_get_is_ended(
    interrupts: Callable[[float], None],
) -> None:
    ended: list[str] = []

    def make() -> str:
        interrupts(0.01)
        time.sleep(0.1)
        return "made"

    with pytest.raises(KeyboardInterrupt):
        endings.uninterrupted(make, ended.append)

    assert ended == ["made"]
    assert endings.uninterrupted(lambda: "kept", ended.append) == "kept"
    assert ended == ["made"]


def test_no_sleep_outlasts_a_signal_that_came_just_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Such a signal does not end the system's sleep, so each of these is short.
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(endings.time, "sleep", sleep)
    monkeypatch.setattr(endings.time, "monotonic", lambda: now[0])
    endings.sleep(1.25)

    assert slept == [0.5, 0.5, 0.25]
