"""The calls of one array that are in flight: what they are, and how they end.

A worker thread ends calls and runs their callbacks, and the interpreter waits for it. On the CPU
device it lives while calls are in flight. On a GPU most calls need no thread: whoever asks about
one, or makes another, ends what is over by one call of the extension. The worker is started for the
others: those with callbacks or waiters of `concurrent.futures`, with rows for the host, and those
that have failed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flashwarp import endings
from flashwarp._jit.cuda_context import End
from flashwarp._waiting import STEP_MAX_S, Waited
from flashwarp.array.failures import Failures
from flashwarp.array.futures import Future
from flashwarp.cache.structs import ErrorRecordStruct, FailureStruct
from flashwarp.config import time_limit_s
from flashwarp.device import Device, OwnedStream
from flashwarp.endings import first_of
from flashwarp.errors import ArgumentError, CaptureError, ClosedError, DeviceError, DeviceTimeout
from flashwarp.launch.launcher import Launcher, Verb
from flashwarp.launch.operands import Index, Rows

_log = logging.getLogger(__name__)

# How long the worker waits for another call before it ends.
_LINGER_S = 0.05

# How often the worker looks for calls whose end it should wait for, too. Between, it waits in the
# extension, without holding up threads of Python.
LOOK_S = 200e-6

# Of `Device.end_calls`: what calls need of the worker.
_NO_THREAD = 0
_FAILED = 2

# How long the worker leaves Python to the thread that makes calls while nobody waits for one, and
# how many calls it ends before it lets threads make new ones: a thread that makes calls goes on
# without it, and each time that both want Python costs more than a call.
_REST_S = 5e-3
_ENDED_AT_ONCE = 32


class Seat:
    """What one call in flight uses alone: an error record, and an event at its end."""

    def __init__(self, launcher: Launcher, side: OwnedStream) -> None:
        self.volume = launcher.volume.with_own_errors(side)
        self.launcher = launcher.on(self.volume)
        self.event = launcher.volume.device.event()
        self.marked = True  # whether the event marks the end of the call
        # For `Device.end_calls`: the event, and words that are 0 until kernels note a failure.
        errors = self.volume.errors.address + FailureStruct.number.offset
        self.watched = (
            self.event.handle,
            errors + ErrorRecordStruct.commands.offset,
            errors + ErrorRecordStruct.indices.offset,
        )

    def close(self) -> None:
        """Release all of it."""
        self.event.close()
        self.launcher.let_go()
        self.volume.release()


@dataclass(eq=False)
class Call:
    """What a call moves, which lives as long as the call, and how far it has come."""

    verb: Verb
    chosen: range | Index
    rows: Rows
    after: tuple[int, ...]  # streams whose present work runs before the call
    future: Future[Any]
    lines: int = 0  # that a prefetch of its rows asks for
    fetching: bool = False
    seat: Seat | None = None
    ordered: bool = True  # behind what it conflicts with, and before what follows
    quick: bool = False  # whether `Device.end_calls` may end it, with this result
    result: Any = None

    @property
    def what(self) -> str:
        """The method that made it, for errors."""
        return f"{self.verb}_async"

    def start(
        self,
        launcher: Launcher,
        stream: int | None = None,
        end: End | None = None,
        others: tuple[int, ...] = (),
    ) -> bool:
        """Launch it, in no order; see `Launcher.move`."""
        at = self.rows.address
        return launcher.move(self.verb, self.chosen, at, stream, end, ordered=False, others=others)

    def finish(self, stream: object) -> Any:
        """Return its result, once its launch is over."""
        return self.rows.finish(stream) if self.verb == "gather" else None

    def release(self) -> None:
        """Give back the copies in device memory."""
        self.rows.release()
        if isinstance(self.chosen, Index) and self.chosen.held is not None:
            self.chosen.held.close()


@dataclass
class Queue:
    """A stream, its calls in the order in which they run, and seats, which calls have or not.

    Calls end in their order, so they take the seats in turns: the last has the last one.
    """

    stream: OwnedStream
    calls: deque[Call] = field(default_factory=deque)
    seats: deque[Seat] = field(default_factory=deque)

    def free_seat(self) -> Seat | None:
        """Return the seat that is free for the longest time, if one is."""
        last = _at(self.calls, -1)
        if last is not None and self.seats[0] is last.seat:
            self.seats.rotate(-1)
        return self.seats[0] if len(self.calls) < len(self.seats) else None


def _at(calls: deque[Call], index: int) -> Call | None:
    """Return one of calls that other threads may end meanwhile, or None if there are none."""
    try:
        return calls[index]
    except IndexError:
        return None


class InFlight:
    """The calls of one array that are in flight. Any thread may wait for them, and end them.

    It holds no reference to the array, which may be lost while calls run.
    """

    def __init__(self, launcher: Launcher, device: Device, failures: Failures) -> None:
        self._launcher = launcher
        self._device = device
        self._failures = failures
        # Guards everything below, and is notified of each change.
        self._changed = endings.Condition()
        self._queues: list[Queue] = []
        self._all: list[Any] = []  # the calls of each queue, for `Device.end_calls`
        self._ending: set[Call] = set()  # that left their queues, until their futures are done
        self._wanted: set[Future[Any]] = set()  # that threads wait for
        self._hurry = endings.Event()
        self._worker: endings.Thread | None = None
        # Unobserved failures: those of futures that are gone, and the futures that have one.
        self._lost: deque[BaseException] = deque()
        self._failed: weakref.WeakSet[Future[Any]] = weakref.WeakSet()

    # The worker.

    def _start_worker(self) -> None:
        if self._worker is not None:
            return
        # Not a daemon: a launch that runs while the interpreter is torn down would crash.
        worker = endings.Thread(self._work, "flashwarp calls", daemon=False)
        try:
            worker.start()
        except RuntimeError as error:
            raise DeviceError(
                f"the thread that ends asynchronous calls cannot be started ({error}): raise "
                "the limit of processes (ulimit -u) or of memory (ulimit -v)"
            ) from error
        self._worker = worker

    def _need_worker(self) -> None:
        """Let the worker look, and start it on a GPU if it does not live."""
        self._hurry.set()
        if self._launcher.on_cpu:  # it lives while there are calls
            return
        # The worker leaves while it holds `_changed`, and only if `_hurry` is not set.
        start = functools.partial(endings.uninterrupted, self._start_worker)
        endings.holding([self._changed], lambda: self._worker or start())

    # Ending calls.

    @property
    def on_worker(self) -> bool:
        """Whether the calling thread is the one that ends calls, as in a callback."""
        worker = self._worker  # which may end meanwhile
        return worker is not None and threading.get_ident() == worker.ident

    @property
    def ends_here(self) -> bool:
        """Whether the calling thread ends calls while it waits: on a GPU, or in a callback."""
        return not self._launcher.on_cpu or self.on_worker

    def _work(self) -> None:
        progress = time.monotonic()
        while self._stays():
            ended = 0
            while ended < _ENDED_AT_ONCE and self._end_next():
                ended += 1
            if ended:
                self._notify()
                progress = time.monotonic()
                continue
            waited = time.monotonic() - progress
            if waited > time_limit_s() and not threading.main_thread().is_alive():
                self._abandon("the interpreter ends")
            if self._wanted:
                self._pause(LOOK_S)
            else:
                self._hurry.wait(_REST_S)

    def _stays(self) -> bool:
        """Wait for work, and return whether the worker stays; if not, it has left."""
        if not self._launcher.on_cpu:
            if not self._needed():
                self._hurry.wait(_LINGER_S)
            self._hurry.clear()
        with self._changed:
            if self._launcher.on_cpu:
                stays = self._changed.wait_for(self._has_calls, _LINGER_S)
                self._hurry.clear()
            else:
                stays = self._needed() or self._hurry.is_set()
            if not stays:
                self._worker = None
            return stays

    def _needed(self) -> bool:
        """Whether calls on a GPU need the worker."""
        return bool(self._wanted) or self._device.end_calls(self._all) != _NO_THREAD

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def look(self) -> int:
        """End what is over now: a thread asks for it, and does not wait.

        Returns what `Device.end_calls` does; the worker looks at what it has left.
        """
        if self._launcher.on_cpu:
            self._hurry.set()
            return _NO_THREAD
        left = self._device.end_calls(self._all)
        if left == _NO_THREAD:
            return left
        if endings.ended():  # no thread can be started, and none is left
            while self._step():
                pass
        else:
            self._need_worker()
        return left

    def hurry(self, future: Future[Any]) -> None:
        """End a future as soon as its call is over: a thread or a callback waits for it."""
        future.hurried = True
        self._wanted.add(future)
        if concurrent.futures.Future.done(future):  # meanwhile: nothing takes it out any more
            self._wanted.discard(future)
        else:
            self._need_worker()

    def _has_calls(self) -> bool:
        return any(queue.calls for queue in self._queues)

    def _step(self) -> bool:
        """End one call, if one is over, and say so. Only the worker's thread may call it."""
        ended = self._end_next()
        if ended:
            self._notify()
        return ended

    def _end_next(self) -> bool:
        for queue in self._queues:
            call = _at(queue.calls, 0)
            if call is not None and (self._launcher.on_cpu or self._is_over(queue, call)):
                self._end(queue, call)
                return True
        return False

    def _pause(self, seconds: float) -> None:
        """Wait until a GPU has ended a call, but no longer than this."""
        oldest = [call for calls in self._all if (call := _at(calls, 0)) is not None]
        seats = [call.seat for call in oldest]
        events = [seat.event for seat in seats if seat is not None and seat.marked]
        self._device.wait_any(events, seconds)

    def _is_over(self, queue: Queue, call: Call) -> bool:
        try:
            if call.seat is None or call.seat.marked:
                return call.seat is None or call.seat.event.done()
            return self._device.done(queue.stream)
        except Exception:  # the device failed: `_end` asks again and gives the future the error
            return True

    def _end(self, queue: Queue, call: Call) -> None:
        # From here on `Device.end_calls` leaves it alone. It may have ended it already.
        call.quick = False
        if not queue.calls or queue.calls[0] is not call:
            return
        seat = call.seat
        cancelled = self._launcher.on_cpu and not call.future.set_running_or_notify_cancel()
        result, error = None, None
        try:
            if seat is not None and not cancelled:
                result = self._outcome(queue, call, seat)
        except Exception as raised:  # any exception goes to the future
            # Its frames would keep the future alive, which reports its loss when it is freed.
            error = raised.with_traceback(None)
        call.release()
        with self._changed:
            if call in queue.calls:
                self._ending.add(call)
                queue.calls.popleft()
                call.seat = None
        if cancelled:
            self._wanted.discard(call.future)
        else:
            self._deliver(call.future, result, error)
        with self._changed:
            self._ending.discard(call)

    def _outcome(self, queue: Queue, call: Call, seat: Seat) -> Any:
        if self._launcher.on_cpu:
            self._fetch_ahead(queue)
            call.start(seat.launcher)
        elif seat.marked:
            seat.event.done()
        else:
            self._device.done(queue.stream)
        failure = self._failures.take(call.what, seat.volume)
        if failure is not None:
            raise failure
        return call.finish(None if self._launcher.on_cpu else queue.stream)

    def _fetch_ahead(self, queue: Queue) -> None:
        """Prefetch the lines of the reads behind the running one, as far as they fit."""
        if len(queue.calls) < 2:
            return
        choose = functools.partial(self._reads_behind, queue, self._launcher.lines_ahead())
        for rows in endings.holding([self._changed], choose):
            # If the array was closed meanwhile, no caller needs the lines any more.
            with contextlib.suppress(ClosedError):
                self._launcher.prefetch(rows, threads=1)

    @staticmethod
    def _reads_behind(queue: Queue, room: int) -> list[range | Index]:
        chosen = []
        for call in itertools.islice(queue.calls, 1, None):
            room -= call.lines
            if room < 0:
                break
            if call.verb == "gather" and not call.fetching:
                call.fetching = True
                chosen.append(call.chosen)
        return chosen

    def _deliver(self, future: Future[Any], result: object, error: Exception | None) -> None:
        try:
            if error is None:
                future.set_result(result)
            else:
                self._failed.add(future)
                future.set_exception(error)
        except concurrent.futures.InvalidStateError:
            pass  # `_abandon` has failed it
        except BaseException:  # of a callback; the other calls must end all the same
            _log.critical(
                "a callback of %r ended with more than an exception", future, exc_info=True
            )
        self._wanted.discard(future)

    # Waiting for them.

    @property
    def busy(self) -> bool:
        """Whether any is in flight."""
        if self._all and not self._launcher.on_cpu:
            self.look()
        return bool(self._ending) or any(queue.calls for queue in self._queues)

    def _unfinished(self) -> list[Call]:
        """Return the calls whose futures are not done; `_changed` must be held."""
        return [*self._ending, *(call for calls in self._all for call in [*calls])]

    def wait_for(self, futures: Iterable[Future[Any]], timeout: float | None) -> bool:
        """Wait for futures, and return whether all are done."""
        futures = list(futures)
        if not self.ends_here:
            return self._wait_for(futures, timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while not all(future.done() for future in futures):
            left = math.inf if end is None else end - time.monotonic()
            if left <= 0:
                return False
            if self.on_worker or endings.ended():
                if self._step():
                    continue
            elif self._worker is not None:
                # Some need it, so it ends all: it and this thread would only take turns.
                return self._wait_for(futures, None if end is None else left)
            self._pause(min(LOOK_S, left))
        return True

    def _wait_for(self, futures: list[Future[Any]], timeout: float | None) -> bool:
        """Wait for futures that the worker ends."""
        for future in futures:
            self.hurry(future)
        return endings.wait(futures, timeout)

    def wait(self) -> None:
        """Wait for all calls made so far. Their failures stay with their futures."""
        futures = endings.holding(
            [self._changed], lambda: [call.future for call in self._unfinished()]
        )
        # Launches on the CPU have their own limits, and need their memory until they have ended.
        limit_s = math.inf if self._launcher.on_cpu else time_limit_s()
        waited = Waited()
        while not self.wait_for(futures, STEP_MAX_S):
            if waited.look() < limit_s:
                continue
            raise DeviceTimeout(f"asynchronous calls of the array did not end in {limit_s:g} s")

    def come_behind(self, stores: bool) -> None:
        """Wait on the CPU device for the calls in flight that a load, or a store, comes behind.

        On a GPU the array's order makes its stream wait. Blocks; a callback runs them itself.
        """
        if not self._launcher.on_cpu or not any(self._all):
            return
        futures = [
            call.future
            for calls in self._all
            for call in [*calls]
            if call.ordered and (stores or call.verb == "scatter")
        ]
        while not self.wait_for(futures, STEP_MAX_S):
            pass  # launches on the CPU device have their own limits

    def hold_stream(self, future: Future[Any], stream: object) -> None:
        """Make a stream wait for the call; see `Future.before`."""
        if self._launcher.on_cpu:
            self.wait_for([future], None)
            return
        if future._on_host:
            raise ArgumentError(
                "the rows go to host memory, where no stream can wait for them: use result(), or "
                "give gather_async an `out` on the GPU"
            )
        if not future.done() and self._device.capture(stream) is not None:
            raise CaptureError(
                "a stream in a capture cannot wait for an asynchronous call, which no replay would "
                "repeat: wait before the capture, or capture gather(.., stream=)"
            )
        endings.holding([self._changed], functools.partial(self._order_after, future, stream))

    def _order_after(self, future: Future[Any], stream: object) -> None:
        call = next((call for call in self._unfinished() if call.future is future), None)
        seat = None if call is None else call.seat
        if call is None or seat is None:
            return
        if seat.marked:
            seat.event.before(stream)
            return
        queue = next(queue for queue in self._queues if call in queue.calls)
        self._device.order(queue.stream, stream)

    # Unobserved failures.

    def lose(self, error: BaseException | None) -> None:
        """Keep the failure of a future that is gone.

        Takes no lock, because the garbage collector calls it.
        """
        if error is not None:
            error.add_note("an asynchronous call failed with this, and its future was dropped")
            self._lost.append(error)

    def raise_lost(self) -> None:
        """Raise the failures of dropped futures: the first, with notes about the others."""
        looks = self._all and not self._launcher.on_cpu and not self.on_worker
        if looks and self.look() == _FAILED:
            # The worker reads the failure, and notifies.
            endings.holding([self._changed], functools.partial(self._changed.wait, STEP_MAX_S))
        if self._lost:
            error = first_of(self._take_lost())
            if error is not None:
                raise error

    def _take_lost(self) -> list[BaseException]:
        return [self._lost.popleft() for _ in range(len(self._lost))]

    def _abandon(self, why: str) -> None:
        """Fail the futures of calls that do not end. The device keeps what these calls use."""
        with self._changed:
            calls = self._unfinished()
            for queue in self._queues:
                queue.calls.clear()
            self._ending.clear()
        for call in calls:
            self._deliver(call.future, None, DeviceTimeout(f"{call.what} did not end: {why}"))
