"""Asynchronous calls of one array: how they are made, and their end with the array.

On a GPU a call is launched at once, on one of a few streams that the library owns. On the CPU
device, where launches end before they return, a worker thread launches one call after the other,
and prefetches the lines of the next calls meanwhile. Each call has its own error record, so a
failure belongs to exactly one call. At most `config.async_calls` are in flight.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from flashwarp import _native, config, endings
from flashwarp._jit.cuda_context import End
from flashwarp._waiting import STEP_MAX_S, Waited
from flashwarp.array.failures import Failures
from flashwarp.array.futures import Future
from flashwarp.array.in_flight import LOOK_S, Call, InFlight, Queue, Seat
from flashwarp.config import time_limit_s
from flashwarp.device import DeviceArray, Event, stream_handle
from flashwarp.device.scratch import Scratch
from flashwarp.endings import first_of
from flashwarp.errors import (
    CaptureError,
    ClosedError,
    DeviceError,
    DeviceTimeout,
)
from flashwarp.launch.launcher import Launcher, Verb
from flashwarp.launch.operands import Index, Operands, Rows

# Streams of a GPU on which an array's asynchronous calls run.
_STREAMS = 8


class Calls(InFlight):
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
        super().__init__(launcher, operands.device, failures)
        self._row_calls = row_calls
        # For preparations beside the calls. Nothing that runs for long is ever queued on it.
        self._side = operands.device.create_stream()
        self._scratch = Scratch(operands.device, self._side)
        self._operands = operands.copying_to(self._scratch, self._side)
        # Copies of host operands that streams of the caller's use, each with what comes after.
        self._lent: deque[tuple[Event, Sequence[DeviceArray]]] = deque()
        self._spoiled: list[tuple[Seat, Call]] = []  # of calls that were launched in part
        self._most = config.current("async_calls").async_calls
        self._closed = False
        self._released = False
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
        self._lent.append((self._device.mark(stream), copies))

    # Making calls.

    def make(
        self, verb: Verb, idx: object, operand: object, stream: object, ordered: bool
    ) -> Future[Any]:
        """Start a call; see `Array.gather_async` and `Array.scatter_async`."""
        gather = verb == "gather"
        short: Any = self._row_calls.operands(idx, operand, stream) if gather else None
        after: tuple[int, ...]
        if short is not None:  # of tensors
            out, before, (indices, count, index_bytes, address) = short
            chosen: range | Index = Index(indices, (count,), index_bytes, "torch", idx, False)
            rows, after = Rows(address, out, None, "torch"), (before,)
        else:
            chosen = self._operands.choose(idx)
            library = self._operands.place_of(chosen)[1]
            if gather:
                rows = self._operands.target(operand, chosen, stream)
            else:
                rows = self._operands.source(operand, chosen)
            after = self._streams_before(stream, library, rows.library)
            if not self._launcher.on_cpu:
                self._refuse_capture(verb, after)
        on_host = gather and rows.held is not None
        running = not self._launcher.on_cpu  # a call on a GPU is launched before others have it
        future: Future[Any] = Future(self, rows.array if gather else None, on_host, running)
        lines = self._launcher.lines_of(chosen) if gather and self._launcher.on_cpu else 0
        call = Call(verb, chosen, rows, after, future, lines, ordered=ordered)
        if len(chosen) * self._launcher.format.row_bytes:
            call.quick = not self._launcher.on_cpu and rows.held is None and not _copied(chosen)
            call.result = rows.array if gather else None
            self._submit(call)
        else:
            future.set_result(call.finish(None))
        return future

    def _refuse_capture(self, verb: Verb, after: Sequence[int]) -> None:
        device = self._device
        instead = f"use {verb}(.., stream=)"
        if not after:
            device.refuse_capture(f"{verb}_async", instead)
        if any(device.capture(stream) is not None for stream in after):
            raise CaptureError(
                f"{verb}_async cannot become part of a CUDA graph, because its future is of one "
                f"call: {instead}"
            )

    def _streams_before(self, stream: object, *libraries: str) -> tuple[int, ...]:
        """Return the streams whose work comes first: the caller's, or those of its libraries."""
        if stream is not None:
            return (stream_handle(stream),)
        device = self._device
        return tuple(device.current_stream(name).handle for name in {*libraries} - {"numpy"})

    def _submit(self, call: Call) -> None:
        enter = functools.partial(self._enter, call)
        queue = endings.holding([self._changed], enter)
        if queue is None:
            queue = self._enter_later(enter)
        if self._launcher.on_cpu:
            self._fetch_ahead(queue)

    def _enter_later(self, enter: Callable[[], Queue | None]) -> Queue:
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
                self._pause(LOOK_S)
        return queue

    def _look_again(self) -> bool:
        """End what is over; return whether that has made room."""
        before = len(self._unfinished())
        self.look()
        return len(self._unfinished()) < before

    def _enter(self, call: Call) -> Queue | None:
        """Give the call a seat on the stream that has the fewest calls, and launch it there.

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
        call.seat = queue.free_seat()
        if call.seat is None:
            call.seat = endings.uninterrupted(functools.partial(self._add_seat, queue))
        if self._launcher.on_cpu:
            queue.calls.append(call)
        else:
            self._launch(call, call.seat, queue)
        if not in_flight:
            self._changed.notify_all()
        return queue

    def _prepare(self) -> None:
        """Start the worker if it runs the calls, and create the streams."""
        if self._launcher.on_cpu:
            self._start_worker()
        if not self._queues:
            streams = 1 if self._launcher.on_cpu else _STREAMS
            self._queues = [Queue(self._device.create_stream()) for _ in range(streams)]
            self._all += [queue.calls for queue in self._queues]

    def _add_seat(self, queue: Queue) -> Seat:
        seat = Seat(self._launcher, self._side)
        queue.seats.appendleft(seat)
        return seat

    def _launch(self, call: Call, seat: Seat, queue: Queue) -> None:
        self._launcher.volume.cache.streams.add(queue.stream.handle)
        seat.marked = True
        start = functools.partial(self._start, call, seat, queue)
        try:
            if call.ordered:
                stores = call.verb == "scatter"
                self._launcher.ordered(stores, queue.stream.handle, call.chosen, start)
            else:
                start()
        except DeviceError:
            if call not in queue.calls:
                self._spoil(call, seat, queue)
                raise
            # It runs, so its future raises what went wrong, once the stream is done.
            seat.marked = call.quick = False
        except BaseException:
            self._spoil(call, seat, queue)
            raise

    def _start(self, call: Call, seat: Seat, queue: Queue) -> None:
        end, others = End(seat.event.handle, queue.calls, call), call.after
        if call.verb == "scatter" or isinstance(call.chosen, range):
            for before in call.after:
                self._device.order(before, queue.stream)
            others = ()
        if not call.start(seat.launcher, queue.stream.handle, end, others):
            self._refuse_capture(call.verb, call.after)
            raise CaptureError("a stream of the library's is being captured")

    def _spoil(self, call: Call, seat: Seat, queue: Queue) -> None:
        # A check of its indices may run, and note strays in the seat.
        if call.verb == "scatter" and call not in queue.calls:
            queue.seats.remove(seat)
            self._spoiled.append((seat, call))

    # The end.

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

    def _release(self) -> None:
        with self._changed:
            queues, self._queues = self._queues, []
            self._all.clear()
        for queue in queues:
            for seat in queue.seats:
                seat.close()
            self._launcher.volume.cache.streams.end(queue.stream)
        for seat, call in self._spoiled:
            seat.close()
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
