"""Asynchronous calls of one array: from their submission to the end of their futures.

On a GPU a call is launched at once, on one of a few streams that the library owns. On the CPU
device, where launches end before they return, a worker thread launches one call after the other,
and prefetches the lines of the next calls meanwhile. Each call has its own error record, so a
failure belongs to exactly one call. At most `config.async_calls` are in flight.

The worker ends calls and runs their callbacks, and the interpreter waits for it. On the CPU device
it lives while calls are in flight. On a GPU most calls need no thread: whoever asks about one, or
makes another, ends what is over by one call of the extension. The worker is started for the others:
those with callbacks or waiters of `concurrent.futures`, with rows for the host, and those that have
failed.
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashwarp import _native, config, endings
from flashwarp._jit.cuda_context import End
from flashwarp._waiting import STEP_MAX_S, Waited
from flashwarp.array.failures import Failures
from flashwarp.array.futures import Future
from flashwarp.cache.structs import ErrorRecordStruct, FailureStruct
from flashwarp.device import DeviceArray, Event, OwnedStream, stream_handle
from flashwarp.device.scratch import Scratch
from flashwarp.endings import first_of
from flashwarp.errors import (
    ArgumentError,
    CaptureError,
    ClosedError,
    DeviceError,
    DeviceTimeout,
)
from flashwarp.launch.launcher import Launcher, Verb
from flashwarp.launch.operands import Index, Operands, Rows

__all__ = ["Calls", "time_limit_s"]

_log = logging.getLogger(__name__)

# How long the worker waits for another call before it ends.
_LINGER_S = 0.05

# Streams of a GPU on which an array's asynchronous calls run.
_STREAMS = 8

# How often the worker looks for calls whose end it should wait for, too. Between, it waits in the
# extension, without holding up threads of Python.
_LOOK_S = 200e-6

# Of `Device.end_calls`: what calls need of the worker.
_NO_THREAD = 0
_FAILED = 2

# How long the worker leaves Python to the thread that makes calls while nobody waits for one, and
# how many calls it ends before it lets threads make new ones: a thread that makes calls goes on
# without it, and each time that both want Python costs more than a call.
_REST_S = 5e-3
_ENDED_AT_ONCE = 32


def time_limit_s() -> float:
    """Return how long host calls wait for launches: twice a command's limit, at least 60 s."""
    return max(2 * config.current("timeout_s").timeout_s, 60.0)


class _Lane:
    """What one call in flight uses alone: an error record, and an event at its end."""

    def __init__(self, launcher: Launcher, side: OwnedStream) -> None:
        self.volume = launcher.volume.with_own_errors(side)
        self.launcher = launcher.on(self.volume)
        self.event = launcher.volume.cache.device.event()
        self.marked = True  # whether the event marks the end of the call
        # For `Device.end_calls`: the event, and words that are 0 until kernels note a failure.
        errors = self.volume.errors.address + FailureStruct.number.offset
        self.watched = (
            self.event.handle,
            errors + ErrorRecordStruct.commands.offset,
            errors + ErrorRecordStruct.indices.offset,
        )

    def close(self) -> None:
        self.event.close()
        self.launcher.let_go()
        self.volume.release()


@dataclass(eq=False)
class _Call:
    """What a call moves, which lives as long as the call, and how far it has come."""

    verb: Verb
    chosen: range | Index
    rows: Rows
    after: Sequence[int]  # streams whose present work runs before the call
    future: Future[Any]
    lines: int = 0  # that a prefetch of its rows asks for
    fetching: bool = False
    lane: _Lane | None = None
    tensors: tuple[int, int, int, int] | None = None  # for `Launcher.gather_launch`
    ordered: bool = True  # behind what it conflicts with, and before what follows
    quick: bool = False  # whether `Device.end_calls` may end it, with this result
    result: Any = None

    @property
    def what(self) -> str:
        return f"{self.verb}_async"

    def start(self, launcher: Launcher, stream: int | None, end: End | None = None) -> None:
        launcher.move(self.verb, self.chosen, self.rows.address, stream, end, ordered=False)

    def finish(self, stream: object) -> Any:
        return self.rows.finish(stream) if self.verb == "gather" else None

    def release(self) -> None:
        """Give back the copies in device memory."""
        self.rows.release()
        if isinstance(self.chosen, Index) and self.chosen.held is not None:
            self.chosen.held.close()


@dataclass
class _Queue:
    """A stream, its calls in the order in which they run, and lanes, which calls have or not."""

    stream: OwnedStream
    calls: deque[_Call] = field(default_factory=deque)
    lanes: list[_Lane] = field(default_factory=list)

    def free_lane(self) -> _Lane | None:
        if not self.calls:
            return self.lanes[0] if self.lanes else None
        taken = {id(call.lane) for call in [*self.calls]}  # which other threads may end
        return next((lane for lane in self.lanes if id(lane) not in taken), None)


def _oldest(calls: deque[_Call]) -> _Call | None:
    """Return the first of calls that other threads may end meanwhile."""
    try:
        return calls[0]
    except IndexError:
        return None


class Calls:
    """The asynchronous calls of one array. Any thread may make them.

    It holds no reference to the array, which may be lost while calls run. It takes none of the
    array's locks: a new call waits for room among the calls in flight, but not for other threads
    that use the array.
    """

    def __init__(
        self,
        launcher: Launcher,
        operands: Operands,
        failures: Failures,
        row_calls: _native.RowCalls,
    ) -> None:
        self._launcher = launcher
        self._row_calls = row_calls
        # For preparations beside the calls. Nothing that runs for long is ever queued on it.
        self._side = operands.device.create_stream()
        self._scratch = Scratch(operands.device, self._side)
        self._operands = operands.copying_to(self._scratch, self._side)
        # Copies of host operands that streams of the caller's use, each with what comes after.
        self._lent: deque[tuple[Event, Sequence[DeviceArray]]] = deque()
        self._failures = failures
        # Guards everything below, and is notified of each change.
        self._changed = endings.Condition()
        self._queues: list[_Queue] = []
        self._all: list[Any] = []  # the calls of each queue, for `Device.end_calls`
        self._spoiled: list[tuple[_Lane, _Call]] = []  # of calls that were launched in part
        self._ending: set[_Call] = set()  # that left their queues, until their futures are done
        self._wanted: set[Future[Any]] = set()  # that threads wait for
        self._hurry = endings.Event()
        self._most = config.current("async_calls").async_calls
        self._worker: threading.Thread | None = None
        self._closed = False
        self._released = False
        # Unobserved failures: those of futures that are gone, and the futures that have one.
        self._lost: deque[BaseException] = deque()
        self._failed: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        row_calls.follow(self._all, self._lost)

    # Copies for calls on streams of the caller's.

    @property
    def operands(self) -> Operands:
        """Copies host operands to memory that is lent: freeing it would wait for all kernels."""
        return self._operands

    def lend(self, copies: Sequence[DeviceArray], stream: int) -> None:
        """Keep copies until the present work of a stream is done. In the array's turn."""
        # Two for each that is added, so that few are kept although one stream takes long.
        for event, held in [self._lent.popleft() for _ in range(min(2, len(self._lent)))]:
            if not event.done():
                self._lent.append((event, held))
                continue
            event.close()
            for each in held:
                each.close()
        self._lent.append((self._operands.device.mark(stream), copies))

    # Making calls.

    def make(
        self, verb: Verb, idx: object, operand: object, stream: object, ordered: bool
    ) -> Future[Any]:
        """Start a call; see `Array.gather_async` and `Array.scatter_async`."""
        if verb == "gather":
            found: Any = self._row_calls.operands(idx, operand, stream)
            if found is not None:
                return self._make_short(idx, ordered, *found)
        chosen = self._operands.choose(idx)
        library = self._operands.place_of(chosen)[1]
        gather = verb == "gather"
        if gather:
            rows = self._operands.target(operand, chosen, stream)
        else:
            rows = self._operands.source(operand, chosen)
        after = self._streams_before(stream, library, rows.library)
        if not self._launcher.on_cpu:
            self._refuse_capture(verb, after)
        future: Future[Any] = Future(
            self, rows.array if gather else None, on_host=gather and rows.held is not None
        )
        lines = self._launcher.lines_of(chosen) if gather and self._launcher.on_cpu else 0
        call = _Call(verb, chosen, rows, after, future, lines, ordered=ordered)
        if len(chosen) * self._launcher.format.row_bytes:
            call.quick = not self._launcher.on_cpu and rows.held is None and not _copied(chosen)
            call.result = rows.array if gather else None
            self._submit(call)
        else:
            future.set_running_or_notify_cancel()
            future.set_result(call.finish(None))
        return future

    def _make_short(
        self,
        idx: object,
        ordered: bool,
        out: Any,
        stream: int,
        which: tuple[int, int, int, int],
    ) -> Future[Any]:
        """Start a gather whose operands are tensors."""
        indices, count, index_bytes, address = which
        index = Index(indices, (count,), index_bytes, "torch", idx, checked=False)
        rows = Rows(address, out, None, "torch")
        future: Future[Any] = Future(self, out, on_host=False)
        call = _Call("gather", index, rows, (stream,), future, tensors=which, ordered=ordered)
        call.quick, call.result = True, out
        self._submit(call)
        return future

    def _refuse_capture(self, verb: Verb, after: Sequence[int]) -> None:
        device = self._operands.device
        instead = f"use {verb}(.., stream=)"
        if not after:
            device.refuse_capture(f"{verb}_async", instead)
        if any(device.capture(stream) is not None for stream in after):
            raise CaptureError(
                f"{verb}_async cannot become part of a CUDA graph, because its future is of one "
                f"call: {instead}"
            )

    def _streams_before(self, stream: object, *libraries: str) -> list[int]:
        """Return the streams whose work comes first: the caller's, or those of its libraries."""
        if stream is not None:
            return [stream_handle(stream)]
        device = self._operands.device
        return [device.current_stream(name).handle for name in {*libraries} - {"numpy"}]

    def _submit(self, call: _Call) -> None:
        enter = functools.partial(self._enter, call)
        queue = endings.holding([self._changed], enter)
        if queue is None:
            queue = self._enter_later(enter)
        if self._launcher.on_cpu:
            self._fetch_ahead(queue)

    def _enter_later(self, enter: Callable[[], _Queue | None]) -> _Queue:
        """Wait for room, and enter."""
        limit_s = time_limit_s()
        waited = Waited()
        while (queue := endings.holding([self._changed], enter)) is None:
            if waited.look() >= limit_s:
                raise DeviceTimeout(
                    f"{self._most} asynchronous calls of the array are in flight "
                    f"(FLASHWARP_ASYNC_CALLS), and none ended in {limit_s:g} s"
                )
            self._hurry.set()
            if not self.ends_here:
                endings.holding([self._changed], functools.partial(self._changed.wait, STEP_MAX_S))
            elif not (self._step() if self.on_worker else self._look_again()):
                self._pause(_LOOK_S)
        return queue

    def _look_again(self) -> bool:
        """End what is over; return whether that has made room."""
        before = len(self._unfinished())
        self.look()
        return len(self._unfinished()) < before

    def _enter(self, call: _Call) -> _Queue | None:
        """Give the call a lane on the stream that has the fewest calls, and launch it there.

        Returns None if there is no room. If a signal handler raises in it, the call is in its queue
        and launched, or neither.
        """
        if self._closed:
            raise ClosedError("the array is closed")
        lengths = [*map(len, self._all)]
        in_flight = sum(lengths)
        if in_flight >= self._most:
            return None
        if not lengths or (self._launcher.on_cpu and self._worker is None):
            endings.uninterrupted(self._prepare)
            lengths = [*map(len, self._all)]
        queue = self._queues[lengths.index(min(lengths))]
        call.lane = queue.free_lane()
        if call.lane is None:
            call.lane = endings.uninterrupted(functools.partial(self._add_lane, queue))
        if self._launcher.on_cpu:
            queue.calls.append(call)
        else:
            call.future.set_running_or_notify_cancel()
            self._launch(call, call.lane, queue)
        if not in_flight:
            self._changed.notify_all()
        return queue

    def _prepare(self) -> None:
        """Start the worker if it runs the calls, and create the streams."""
        if self._launcher.on_cpu:
            self._start_worker()
        if not self._queues:
            streams = 1 if self._launcher.on_cpu else _STREAMS
            self._queues = [_Queue(self._operands.device.create_stream()) for _ in range(streams)]
            self._all += [queue.calls for queue in self._queues]

    def _start_worker(self) -> None:
        if self._worker is not None:
            return
        # Not a daemon: a launch that runs while the interpreter is torn down would crash.
        worker = threading.Thread(target=self._work, name="flashwarp calls", daemon=False)
        try:
            endings.start(worker)
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

    def _add_lane(self, queue: _Queue) -> _Lane:
        lane = _Lane(self._launcher, self._side)
        queue.lanes.append(lane)
        return lane

    def _launch(self, call: _Call, lane: _Lane, queue: _Queue) -> None:
        self._launcher.volume.cache.streams.add(queue.stream.handle)
        lane.marked = True
        start = functools.partial(self._start, call, lane, queue)
        try:
            if call.ordered:
                stores = call.verb == "scatter"
                self._launcher.ordered(stores, queue.stream.handle, call.chosen, start)
            else:
                start()
        except DeviceError:
            if call not in queue.calls:
                self._spoil(call, lane, queue)
                raise
            # It runs, so its future raises what went wrong, once the stream is done.
            lane.marked = call.quick = False
        except BaseException:
            self._spoil(call, lane, queue)
            raise

    def _start(self, call: _Call, lane: _Lane, queue: _Queue) -> None:
        stream = queue.stream.handle
        end = End(lane.event.handle, queue.calls, call)
        if call.tensors is None:
            for before in call.after:
                self._operands.device.order(before, queue.stream)
            call.start(lane.launcher, stream, end)
            return
        launch, params = lane.launcher.gather_launch(*call.tensors)
        lane.launcher.wake()
        if not launch.append_after((params,), (*call.after,), stream, end):
            self._refuse_capture(call.verb, call.after)
            raise CaptureError("a stream of the library's is being captured")
        self._launcher.moved.add(call.tensors[1])

    def _spoil(self, call: _Call, lane: _Lane, queue: _Queue) -> None:
        # A check of its indices may run, and note strays in the lane.
        if call.verb == "scatter" and call not in queue.calls:
            queue.lanes.remove(lane)
            self._spoiled.append((lane, call))

    # Ending them.

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
                self._pause(_LOOK_S)
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
        return bool(self._wanted) or self._operands.device.end_calls(self._all) != _NO_THREAD

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
        left = self._operands.device.end_calls(self._all)
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
            call = _oldest(queue.calls)
            if call is not None and (self._launcher.on_cpu or self._is_over(queue, call)):
                self._end(queue, call)
                return True
        return False

    def _pause(self, seconds: float) -> None:
        """Wait until a GPU has ended a call, but no longer than this."""
        oldest = [call for calls in self._all if (call := _oldest(calls)) is not None]
        lanes = [call.lane for call in oldest]
        events = [lane.event for lane in lanes if lane is not None and lane.marked]
        self._operands.device.wait_any(events, seconds)

    def _is_over(self, queue: _Queue, call: _Call) -> bool:
        try:
            if call.lane is None or call.lane.marked:
                return call.lane is None or call.lane.event.done()
            return self._operands.device.done(queue.stream)
        except Exception:  # the device failed: `_end` asks again and gives the future the error
            return True

    def _end(self, queue: _Queue, call: _Call) -> None:
        # From here on `Device.end_calls` leaves it alone. It may have ended it already.
        call.quick = False
        if not queue.calls or queue.calls[0] is not call:
            return
        lane = call.lane
        cancelled = self._launcher.on_cpu and not call.future.set_running_or_notify_cancel()
        result, error = None, None
        try:
            if lane is not None and not cancelled:
                result = self._outcome(queue, call, lane)
        except Exception as raised:  # any exception goes to the future
            # Its frames would keep the future alive, which reports its loss when it is freed.
            error = raised.with_traceback(None)
        call.release()
        with self._changed:
            if call in queue.calls:
                self._ending.add(call)
                queue.calls.popleft()
                call.lane = None
        if cancelled:
            self._wanted.discard(call.future)
        else:
            self._deliver(call.future, result, error)
        with self._changed:
            self._ending.discard(call)

    def _outcome(self, queue: _Queue, call: _Call, lane: _Lane) -> Any:
        if self._launcher.on_cpu:
            self._fetch_ahead(queue)
            call.start(lane.launcher, None)
        elif lane.marked:
            lane.event.done()
        else:
            self._operands.device.done(queue.stream)
        failure = self._failures.take(call.what, lane.volume)
        if failure is not None:
            raise failure
        return call.finish(None if self._launcher.on_cpu else queue.stream)

    def _fetch_ahead(self, queue: _Queue) -> None:
        """Prefetch the lines of the reads behind the running one, as far as they fit."""
        if len(queue.calls) < 2:
            return
        choose = functools.partial(self._reads_behind, queue, self._launcher.lines_ahead())
        for rows in endings.holding([self._changed], choose):
            # If the array was closed meanwhile, no caller needs the lines any more.
            with contextlib.suppress(ClosedError):
                self._launcher.prefetch(rows, warps=1)

    @staticmethod
    def _reads_behind(queue: _Queue, room: int) -> list[range | Index]:
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

    def _unfinished(self) -> list[_Call]:
        """Return the calls whose futures are not done; `_changed` must be held."""
        return [*self._ending, *(call for calls in self._all for call in [*calls])]

    def wait_for(self, futures: Iterable[Future[Any]], timeout: float | None) -> bool:
        """Wait for futures, and return whether all are done."""
        futures = list(futures)
        if not self.ends_here:
            return not concurrent.futures.wait(futures, timeout).not_done
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
                return not concurrent.futures.wait(futures, None if end is None else left).not_done
            self._pause(min(_LOOK_S, left))
        return True

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
        if not future.done() and self._operands.device.capture(stream) is not None:
            raise CaptureError(
                "a stream in a capture cannot wait for an asynchronous call, which no replay would "
                "repeat: wait before the capture, or capture gather(.., stream=)"
            )
        endings.holding([self._changed], functools.partial(self._order_after, future, stream))

    def _order_after(self, future: Future[Any], stream: object) -> None:
        call = next((call for call in self._unfinished() if call.future is future), None)
        lane = None if call is None else call.lane
        if call is None or lane is None:
            return
        if lane.marked:
            lane.event.before(stream)
            return
        queue = next(queue for queue in self._queues if call in queue.calls)
        self._operands.device.order(queue.stream, stream)

    # Unobserved failures, and the end.

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

    def shut(self) -> DeviceTimeout | None:
        """Refuse new calls and wait for those in flight; return DeviceTimeout if some go on."""
        endings.holding([self._changed], functools.partial(self._set_closed, True))
        try:
            self.wait()
        except DeviceTimeout as error:
            return error
        return None

    def reopen(self) -> None:
        """Take calls again after `shut`, unless everything was released."""
        endings.holding([self._changed], functools.partial(self._set_closed, False))

    def _set_closed(self, closed: bool) -> None:
        self._closed = closed or self._released

    def release(self, late: DeviceTimeout | None) -> BaseException | None:
        """Release everything, after `shut` has returned `late`; return unobserved failures."""
        with self._changed:
            self._released = True
        late = self.shut() or late
        unseen: list[BaseException] = [] if late is None else [late]
        if late is not None:
            self._abandon("the array was closed")
        for future in list(self._failed):
            if not future._observed:
                unseen += filter(None, [future.exception()])
        self._release()
        return first_of(unseen + self._take_lost())

    def _abandon(self, why: str) -> None:
        """Fail the futures of calls that do not end. The device keeps what these calls use."""
        with self._changed:
            calls = self._unfinished()
            for queue in self._queues:
                queue.calls.clear()
            self._ending.clear()
        for call in calls:
            self._deliver(call.future, None, DeviceTimeout(f"{call.what} did not end: {why}"))

    def _release(self) -> None:
        with self._changed:
            queues, self._queues = self._queues, []
            self._all.clear()
        for queue in queues:
            for lane in queue.lanes:
                lane.close()
            queue.stream.close()
            self._launcher.volume.cache.streams.discard(queue.stream.handle)
        for lane, call in self._spoiled:
            lane.close()
            call.release()
        for event, held in self._lent:
            event.close()
            for each in held:
                each.close()
        self._scratch.close()
        self._side.close()


def _copied(chosen: range | Index) -> bool:
    """Whether the index is a copy that was made for the call."""
    return isinstance(chosen, Index) and chosen.held is not None
