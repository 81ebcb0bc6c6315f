"""`Attachment`: a storage on a cache, from the first launch through it to its end.

It is what an array is made of. The registry of `endings` holds it, so it outlives an array that is
lost. It waits for what is in flight, raises failures, and brings the array's lines to rest. `close`
then releases service, volume, cache and storage, in this order. Callers of all other methods hold
the cache's turn.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from flashwarp import _native, endings
from flashwarp._waiting import Waited
from flashwarp.array.calls import Calls
from flashwarp.array.failures import Failures
from flashwarp.array.stats import Stats
from flashwarp.cache.cache import Cache
from flashwarp.config import time_limit_s
from flashwarp.device import CudaDevice, OwnedStream
from flashwarp.errors import (
    ArgumentError,
    CaptureError,
    DeviceError,
    DeviceTimeout,
    FlashwarpError,
    ReadOnlyError,
    StorageError,
)
from flashwarp.launch.copying import RangeCopies
from flashwarp.launch.launcher import Launcher
from flashwarp.launch.operands import Operands
from flashwarp.launch.order import Order
from flashwarp.launch.rows import RowFormat
from flashwarp.nvme import Controller, Destination, Service
from flashwarp.observing import counting
from flashwarp.storage import Namespace, Storage
from flashwarp.storage.composite import serve
from flashwarp.transfer import DeviceQueue

_FLUSH = 0x00
_DROP_ALL = 2

# How long `close` waits for the end of CUDA graphs that were deleted, and how often it looks.
_GRAPHS_S = 1.0
_GRAPHS_POLL_S = 0.001

# Attachments whose queues a kernel of another array has not left, or that a CUDA graph uses when
# the interpreter ends: they live as long as the process.
_visited: list[Attachment] = []


class Attachment(endings.NotCopied):
    """A storage that is attached to a cache, and the launches and calls that go through it.

    Parameters
    ----------
    storage : Namespace
    format : RowFormat
        The array's.
    writable : bool
        Whether the array may store to the storage.
    cache : Cache
    owns_cache : bool
        Whether `close` closes the cache too; otherwise other arrays may use it.
    controller : Controller
        Starts the service here, which `close` stops.
    release_storage : callable
        Called last.
    line_begin : int, optional
        Of a client of a shared cache: the first line number, which the owner has chosen.

    Attributes
    ----------
    device : Device
        Where its kernels run.
    launcher : Launcher
        Owns volume, service and format: what kernels need to know.
    operands : Operands
    row_calls : RowCalls
        The calls that run in the extension. It knows which changes of the storage the array has
        seen.
    calls : Calls
        The asynchronous calls.
    dependents : list of Open
        What stands on the array, such as pipelines, in the order of opening. `close` closes it
        first. Each removes itself when it is closed.
    """

    def __init__(
        self,
        storage: Namespace,
        format: RowFormat,  # noqa: A002
        *,
        writable: bool,
        cache: Cache,
        owns_cache: bool,
        controller: Controller,
        release_storage: Callable[[], None] = lambda: None,
        line_begin: int | None = None,
    ) -> None:
        self.storage = storage
        self.controller = controller
        self.writable = writable
        self.closed = False
        self.device = cache.device  # a cache may change its device between arrays
        self.opened_by = os.getpid()
        self.flush_failure: StorageError | None = None
        self.dependents: list[endings.Open] = []
        self._owns_cache = owns_cache
        self._release_storage = release_storage
        self._fault_noted = False
        self._gave_up = False  # on asynchronous calls, whose time is up
        self._streams: set[int] = set()
        # Whether there may be launches for whose end no call has waited.
        self._noted_late = cache.device.kind != "cpu"
        # What CUDA graphs use beside the array, such as tables of a lookup in device memory.
        self._graphs_use: list[object] = []
        with contextlib.ExitStack() as opening, contextlib.ExitStack() as made:
            opening.callback(cache._opened)
            self._end_of_service = serve(storage, writable)
            made.callback(self._end_of_service)
            destination = Destination(
                cache.device, cache.line_bytes, cache.frames, owners=cache.owners
            )
            service = controller.attach(storage, destination)
            made.callback(service.stop)
            self._peers = peers = cache._peers
            self._is_last: bool | None = None
            if peers is not None and line_begin is None:
                line_begin = peers.lines_of(storage, storage.nbytes)
                if line_begin is not None:
                    made.callback(peers.leave, line_begin)
                    made.callback(peers.begin_to_leave, line_begin)
            volume = cache.attach(storage.nbytes, service.queues, line_begin)
            # In the order of `_end`: kernels of other arrays see the volume from now on.
            made.callback(cache.detach, volume)
            made.callback(service.stop)
            made.callback(volume.table_entry.withdraw, time_limit_s())
            self._failures = self._make_failures(service, format)
            self.launcher = Launcher(volume, service, format)
            made.callback(self.launcher.let_go)
            if self.launcher.on_cpu:
                cache.submitters.join(volume.slot, writable, self.launcher.hear_launches)
            if writable and isinstance(cache.device, CudaDevice):
                self.launcher.order = Order(cache.device)
                made.callback(self.launcher.order.close)
            if not self.launcher.on_cpu:
                self.launcher.copies = RangeCopies(
                    volume, service, storage, format.row_bytes, writable=writable
                )
            self.operands = Operands(cache.device, format, cache.device)
            self.row_calls = self.launcher.row_calls(self._streams)
            self.calls = Calls(self.launcher, self.operands, self._failures, self.row_calls)
            self._counted = counting.enter(self.device, self._counts)
            made.callback(self._counted.leave)
            endings.remember(self)
            made.pop_all()

    def _make_failures(self, service: Service, format: RowFormat) -> Failures:  # noqa: A002
        sharing = "" if self._peers is None else self._peers.other_process
        return Failures(service, self.storage.path, format.shape, sharing)

    @property
    def cache(self) -> Cache:
        """The cache that the array's lines enter."""
        return self.launcher.cache

    @property
    def place(self) -> str:
        """The path of its storage, for messages."""
        path = self.storage.path or "in memory"
        return path if path.isprintable() else repr(path)

    @property
    def in_child(self) -> bool:
        """Whether this is a forked child, which has neither its threads nor its memory."""
        return os.getpid() != self.opened_by

    def operands_for(self, stream: object) -> Operands:
        """Return what copies the host operands of a call, perhaps on a stream of the caller's."""
        own = stream is None or self.device.kind == "cpu"
        return self.operands if own else self.calls.operands

    def need_writable(self) -> None:
        """Raise ReadOnlyError if rows cannot be stored."""
        if not self.writable:
            raise ReadOnlyError('the array is read-only: open it with mode="r+"')

    def own_cache(self) -> None:
        """Close the cache with the array from now on: nothing else uses it."""
        self._owns_cache = True

    def stats(self, stream: OwnedStream | None = None) -> Stats:
        """Read the counters, in the order of `stream`; not one snapshot while calls run."""
        queues = self.launcher.service.queues
        queued = queues.counters() if stream is None else queues.counters(stream)
        counters = self.launcher.volume.counters(stream)
        copies = self.launcher.copies
        copied = 0 if copies is None else copies.nbytes
        counters["bytes_read"] += copied
        counters["bytes_used"] += copied
        return Stats(
            **counters,
            bytes_copied=copied,
            commands=queued.commands,
            doorbells=queued.doorbells,
            helps=queued.helps,
        )

    def _counts(self) -> dict[str, tuple[counting.Key, dict[str, int]]]:
        """Read the counters for `flashwarp top`, outside of the turn and beside kernels."""
        stats = self.stats(counting.side_stream(self.device))
        disks = counting.disk_names(self.storage.disks)
        return {"": (counting.Key("array", self.launcher.service.route, disks), vars(stats))}

    def note(self) -> str:
        """Return for `explain` what there is to say of how data moves, beside the route."""
        return "" if self._peers is None else self._peers.note()

    # Waiting.

    def finish(self, what: str, stream: int | None) -> None:
        """Wait for a stream, and raise the failures of its launches; `what` names them."""
        if not self.launcher.on_cpu:  # launches there end before they return
            self.device.wait(stream, timeout_s=time_limit_s())
        if stream is not None:
            self._streams.discard(stream)
        self._raise_failure(what)

    def idle(self, stream: int | None) -> None:
        """Wait for a stream; None: for all that callers named, and the library's own."""
        if stream is None:
            self.idle_streams()
        if self.device.kind != "cpu":
            self.device.wait(stream, timeout_s=time_limit_s())

    def join(self, stream: int, *, refreshes: bool = False, uses: Sequence[object] = ()) -> None:
        """Prepare for a launch on a stream of the caller's, which may be in a capture.

        If it is, the array keeps what the launch `uses` until no CUDA graph has calls of it. If it
        is, and the array is leased, a kernel that does not drop old lines itself `refreshes`
        them by another one before it, in each replay.
        """
        if self._graphs_use and not self.launcher.graphs.count:
            self._graphs_use.clear()
        if not self.launcher.join_capture(stream):
            self.note_stream(stream)
            return
        self._graphs_use += [
            use for use in uses if not any(use is each for each in self._graphs_use)
        ]
        if refreshes and self.launcher.service.leased:
            self.launcher.maintain("refresh_lines", stream=stream)

    def note_launch(self) -> None:
        """Note that there is work on the library's own stream for which no call waits."""
        self._noted_late = True

    def note_stream(self, stream: int) -> None:
        """Note a stream on which there may be work from now on, for which `close` must wait."""
        self._streams.add(stream)
        self.cache.streams.add(stream)

    def end_stream(self, stream: OwnedStream | DeviceQueue) -> None:
        """Destroy a stream of ours that is done: the array must not wait for one that is gone."""
        self.cache.streams.end(stream, self._streams)

    def raise_noted(self) -> None:
        """Raise what earlier calls on streams, and replays, have noted so far. Does not wait."""
        if self._noted_late:
            self.check()

    def check(self) -> None:
        """Raise what kernels have noted so far. Does not wait."""
        volume = self.launcher.volume
        if volume.commands.unread or volume.indices.unread:
            # In the turn, because a call for which another thread waits raises what it has noted:
            # otherwise its rows would pass for good ones.
            take = partial(self._raise_failure, "a kernel or call on a stream")
            endings.holding((self.cache.turn,), take)

    def idle_streams(self) -> None:
        """Wait for the array's accesses on streams, and for all streams that callers named."""
        order = self.launcher.order
        if order is not None and not self._gave_up:
            order.wait(time_limit_s())
        for stream in list(self._streams):
            with self.cache.streams.asking(stream, self._streams) as noted:
                if noted:
                    self.device.wait(stream, timeout_s=time_limit_s())
                    self._streams.discard(stream)

    def _finish_streams(self) -> None:
        self.idle_streams()
        self._raise_failure("a call on a stream")

    def _raise_failure(self, what: str) -> None:
        failure = self._failures.take(what, self.launcher.volume, self._alone)
        if failure is not None:
            raise failure

    def _alone(self) -> bool:
        return not self.calls.busy

    def reason_of(self, error: DeviceError) -> FlashwarpError:
        """Return why a kernel was stopped, if `error` came from that; else `error`."""
        if self.device.alive():
            return error
        reason = self._failures.after_fault(self.launcher.volume, error)
        if self.writable and not self._fault_noted:
            reason.add_note("what was stored in the array since its last flush is lost")
        self._fault_noted = True
        return reason

    # Bringing lines to rest.

    def maintain(
        self, name: str, *, warps: int | None = None, opcode: int = 0, drop: int = 0
    ) -> None:
        """Run a maintenance kernel over the array's lines."""
        self.launcher.maintain(name, warps=warps, opcode=opcode, drop=drop)
        self.finish(name, None)

    def flush(self) -> None:
        """Write dirty lines back and make them durable; see `Array.flush`."""
        self._finish_streams()
        if not self.writable:
            return
        self.maintain("flush_lines")
        if self.flush_failure is not None:
            raise _again(self.flush_failure)
        if isinstance(self.storage, Storage) and self.storage.flushes_in_python:
            self.storage.flush_served()
            return
        try:
            warps = self.launcher.service.namespace_count
            self.maintain("submit_command", warps=warps, opcode=_FLUSH)
        except StorageError as error:
            # The kernel reports lost writes once: a second flush would succeed without them.
            self.flush_failure = error
            raise

    def drop_lines(self, drop_dirty: bool) -> None:
        """Flush, and remove all lines from the cache.

        Lines that cannot be written raise, or, with `drop_dirty`, are given up.
        """
        lost = False
        if self.writable:
            try:
                self.flush()
            except StorageError:
                if not drop_dirty:
                    raise
                lost = True
        self._empty(lost)

    def refresh(self) -> None:
        """Remove all lines from the cache, and check that the storage is unchanged."""
        self.drop_lines(drop_dirty=False)
        self.storage.check_unchanged()

    def _empty(self, drop_dirty: bool) -> None:
        """Remove the array's lines from the cache; dirty lines only with `drop_dirty`."""
        self.maintain("invalidate_lines", drop=int(drop_dirty))
        if self.launcher.volume.in_host_tier:
            # After the frames, because a line in a frame could still enter the tier.
            self.launcher.drop_tier()
            self.finish("drop_tier", None)

    # The end.

    def close(self) -> BaseException | None:
        """Close what stands on the array, flush, and release everything; return what failed.

        Raises CaptureError if a CUDA graph with calls of the array exists, and DeviceTimeout if
        what stands on it cannot end yet, unless the interpreter ends. May be called twice, and by
        any thread. If a signal handler raises meanwhile, the attachment is open and usable
        afterwards, or closed. In a forked child it does nothing.
        """
        if self.closed or self.in_child:
            self._set_closed()
            return None
        if not endings.ended():
            self.refuse_graphs()
        # Without the cache's turn, which it needs itself.
        failures = endings.close_each(self.dependents)
        first = endings.first_of(failures)
        if first is not None and self.dependents and not endings.ended():
            raise first  # what is in flight uses the array
        try:
            # Without the cache's turn, which callbacks of the calls may need.
            late = self.calls.shut()
            failure = endings.holding((self.cache.turn,), partial(self._close, late))
        except BaseException:
            self.calls.reopen()
            raise
        return endings.first_of([each for each in (first, failure) if each is not None])

    def _set_closed(self) -> None:
        self.closed = True
        self.row_calls.shut()
        endings.forget(self)

    def refuse_graphs(self) -> None:
        """Raise CaptureError if a CUDA graph still uses the array, or a capture forbids to wait."""
        if any(self._captured(stream) for stream in list(self._streams)):
            raise CaptureError(
                f"a stream on which the array {self.storage.path or 'in memory'} has work is being "
                "captured into a CUDA graph, so nothing can wait for that work: end the capture"
            )
        graphs, waited = self.launcher.graphs, Waited()
        # The driver counts a graph down some time after it was deleted.
        while graphs.count and waited.look() < _GRAPHS_S:
            time.sleep(_GRAPHS_POLL_S)
        if graphs.count:
            raise CaptureError(
                f"{graphs.count} CUDA graphs with calls of the array "
                f"{self.storage.path or 'in memory'} exist, and a replay would use its memory: "
                "delete them first (torch: graph.reset())"
            )

    def _captured(self, stream: int) -> bool:
        with self.cache.streams.asking(stream, self._streams) as noted:
            try:
                return noted and self.device.capture(stream) is not None
            except (DeviceError, ArgumentError):  # after a fault; or the caller destroyed it
                return False

    def close_lost(self) -> None:
        """Close it after its array was lost. The garbage collector calls this in any thread.

        If a CUDA graph uses the array, it is closed when the interpreter ends.
        """
        if self.launcher.graphs.count:
            return
        turn = self.cache.turn
        # This thread may be in the middle of a call, or of `close`, which holds the turn.
        begun: list[bool] = []

        def close() -> None:
            begun.append(True)
            self._close_or_raise()

        if not turn._is_owned():
            _native.holding(turn, close, False)
        if begun:
            return
        with contextlib.suppress(RuntimeError):  # no thread: the interpreter ends, and closes it
            self.cache.closings.start(self._close_or_raise)

    def _close_or_raise(self) -> None:
        failure = self.close()
        if failure is not None:
            raise failure

    def _close(self, late: DeviceTimeout | None) -> BaseException | None:
        if self.closed:
            return None
        if self._owns_cache and self.cache._serves_besides(self.launcher.volume):
            self._owns_cache = False  # it is freed when the last of the others has lost it
        self._gave_up = late is not None
        failure = self._settle()
        if self.launcher.graphs.count:
            # The interpreter ends. A replay may still run, so nothing is freed.
            _visited.append(self)
            self._set_closed()
            return failure
        return endings.uninterrupted(partial(self._end, failure, late))

    def _settle(self) -> Exception | None:
        """Bring everything to rest: no dirty line, no command, no line in a shared cache.

        Goes as far as it can, and returns what failed first.
        """
        failure: Exception | None = None
        if self._fault_noted and not self.device.alive():
            return None
        steps: list[Callable[[], None]] = [self._finish_streams]
        if self.writable:
            steps.append(self.flush)
        steps.append(self._quiesce)
        if not self._owns_cache and self._leaves_lines():
            steps.append(lambda: self._empty(drop_dirty=True))
        for step in steps:
            try:
                step()
            except DeviceError as error:
                failure = failure or self.reason_of(error)
            except Exception as error:  # the first one counts; later steps still run
                failure = failure or error
            if not self.device.alive():
                break
        return failure

    def _leaves_lines(self) -> bool:
        """Return, once, whether no array on another GPU has the same lines; among peers."""
        if self._peers is None:
            return True
        if self._is_last is None:
            self._is_last = self._peers.begin_to_leave(self.launcher.volume.line_begin)
        return self._is_last

    def _quiesce(self) -> None:
        self.maintain("quiesce", warps=self.launcher.service.queues.count)

    def _end(self, failure: Exception | None, late: DeviceTimeout | None) -> BaseException | None:
        """Release everything, after `_settle` has returned `failure`."""
        cache, volume = self.cache, self.launcher.volume
        self._set_closed()
        self._graphs_use.clear()
        self._counted.leave()
        unobserved = self.calls.release(late)
        # After the fault of a kernel nothing on its device can be saved, only released.
        alive = self.device.alive()
        if not self._owns_cache and alive:
            try:
                volume.table_entry.withdraw(time_limit_s())
            except DeviceError as error:
                # A kernel of another array uses our queues: free nothing that it may touch.
                _visited.append(self)
                return failure or error
        self.launcher.service.stop()
        self.launcher.let_go()
        if self.launcher.order is not None:
            self.launcher.order.close()
        if failure is not None and not self._owns_cache and alive:
            self._forget_lines(failure)
        cache.detach(volume)
        if self._peers is not None:
            self._leaves_lines()  # after a fault nothing was emptied
            self._peers.leave(volume.line_begin)
        if self._owns_cache:
            cache.close()
        self._end_of_service()
        self._release_storage()
        return endings.first_of([each for each in (failure, unobserved) if each is not None])

    def _forget_lines(self, failure: Exception) -> None:
        """Free frames that unanswered commands held, now that no answer can come."""
        try:
            self.launcher.forget_lines(_DROP_ALL)
            self.device.wait()
        except Exception as error:  # the first failure is what the caller must know
            failure.add_note(f"then, in giving up the array's lines: {error}")


def _again(failure: StorageError) -> StorageError:
    """Return the error of a call after a flush that failed."""
    return StorageError(
        failure.errno or errno.EIO,
        f"an earlier flush failed, so what was stored before it may be lost: {failure.strerror}",
        failure.filename,
        offset=failure.offset,
        status=failure.status,
    )
