"""`Attachment`: a storage on a cache, from the first launch through it to its end.

What an array is made of, and what the registry of `endings` holds, so that it outlives an array
that is lost. It knows what is in flight, waits for it, raises what failed, and brings it to rest;
`close` then lets go of controller, volume, cache and storage, in this order. Callers hold the
cache's turn, but for `close`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from flashwarp import endings
from flashwarp.array.calls import Calls, time_limit_s
from flashwarp.array.failures import Failures
from flashwarp.array.launcher import Launcher
from flashwarp.array.operands import Operands
from flashwarp.cache.cache import Cache
from flashwarp.device import Device, stream_handle
from flashwarp.errors import DeviceError, DeviceTimeout, FlashwarpError, StorageError
from flashwarp.nvme import Controller, Destination
from flashwarp.storage import Namespace
from flashwarp.storage.composite import serve

__all__ = ["Attachment"]

_FLUSH = 0x00
_DROP_ALL = 2

# Attachments whose queues a neighbour's kernel has not left: kept for the life of the process.
_visited: list[Attachment] = []


class Attachment(endings.NotCopied):
    """A storage that is attached to a cache, and the launches and calls that go through it.

    Parameters
    ----------
    storage : Namespace
    writable : bool
        Whether the array may store to it.
    cache : Cache
    owns_cache : bool
        Whether the cache is closed with it, rather than left to its other arrays.
    controller : Controller
        Attached here; what serves the array is stopped by `close`.
    operands : Operands
        The array's, for its calls.
    shape : tuple of int
        The array's.
    row_bytes, row_count : int
        What its first axis counts.
    release_storage : callable
        Called last.
    """

    def __init__(
        self,
        storage: Namespace,
        *,
        writable: bool,
        cache: Cache,
        owns_cache: bool,
        controller: Controller,
        operands: Operands,
        shape: tuple[int, ...],
        row_bytes: int,
        row_count: int,
        release_storage: Callable[[], None],
    ) -> None:
        self.storage = storage
        self.writable = writable
        self.cache = cache
        self.flush_failure: StorageError | None = None
        self._device = cache.device
        self._owns_cache = owns_cache
        self._release_storage = release_storage
        self._fault_told = False
        self._streams: set[int] = set()
        self._pid = os.getpid()
        self.closed = False
        with contextlib.ExitStack() as made:
            self._end_of_service = serve(storage, writable)
            made.callback(self._end_of_service)
            destination = Destination(
                cache.device, cache.line_bytes, cache.frames, owners=cache.owners
            )
            service = controller.attach(storage, destination)
            self.controller = service
            made.callback(service.stop)
            self.volume = cache.attach(storage.nbytes, service.queues)
            # In the order of `_end`: kernels of neighbours see the volume from now on.
            made.callback(cache.detach, self.volume)
            made.callback(service.stop)
            made.callback(cache.withdraw, self.volume, time_limit_s())
            self._failures = Failures(service, cache.line_bytes, storage.path, shape)
            self.launcher = Launcher(cache, self.volume, service, row_bytes, row_count)
            self.calls = Calls(self.launcher, operands, self._failures)
            endings.remember(self)
            made.pop_all()

    @property
    def device(self) -> Device:
        """Where its kernels run."""
        return self._device

    def own_cache(self) -> None:
        """Close the cache with the array from now on: nobody else holds it."""
        self._owns_cache = True

    @property
    def in_child(self) -> bool:
        """Whether this is a forked child, which has neither its threads nor its memory."""
        return os.getpid() != self._pid

    @property
    def opened_by(self) -> int:
        """The process that opened it."""
        return self._pid

    # Waiting.

    def finish(self, what: str, stream: Any) -> None:
        """Wait for a stream, and raise what its launches met; `what` they were, for people."""
        self._device.synchronize(stream, timeout_s=time_limit_s())
        self._raise_failure(what)

    def note_stream(self, stream: Any) -> None:
        """Remember that something of ours was queued on a stream of the caller's."""
        self._streams.add(stream_handle(stream))
        self.cache.streams.add(stream_handle(stream))

    def idle_streams(self) -> None:
        """Wait for all streams of callers that something was queued on."""
        while self._streams:
            self._device.synchronize(self._streams.pop(), timeout_s=time_limit_s())

    def _finish_streams(self) -> None:
        self.idle_streams()
        self._raise_failure("a call on a stream")

    def _raise_failure(self, what: str) -> None:
        failure = self._failures.take(what, self.volume, alone=not self.calls.busy)
        if failure is not None:
            raise failure

    def reason_of(self, error: DeviceError) -> FlashwarpError:
        """Tell why a kernel was stopped, where that is what a call has met."""
        if self._device.alive():
            return error
        reason = self._failures.after_fault(self.volume, error)
        if self.writable and not self._fault_told:
            reason.add_note("what was stored in the array since its last flush is lost")
        self._fault_told = True
        return reason

    # Bringing lines to rest.

    def maintain(self, name: str, *, warps: int | None = None, **fields: int) -> None:
        """Run a maintenance kernel over the array's lines."""
        self.launcher.maintain(name, warps=warps, **fields)
        self.finish(name, None)

    def flush(self) -> None:
        """Write dirty lines back and make them durable; see `Array.flush`."""
        self._finish_streams()
        if not self.writable:
            return
        self.maintain("flush_lines")
        if self.flush_failure is not None:
            raise _again(self.flush_failure)
        try:
            warps = self.controller.namespace_count
            self.maintain("submit_command", warps=warps, opcode=_FLUSH)
        except StorageError as error:
            # The kernel reports lost writes once: a second flush would succeed without them.
            self.flush_failure = error
            raise

    def drop_lines(self, drop_dirty: bool) -> None:
        """Flush, and leave no line in the cache; give up what cannot be written, or raise."""
        lost = False
        if self.writable:
            try:
                self.flush()
            except StorageError:
                if not drop_dirty:
                    raise
                lost = True
        self._empty(lost)

    def _empty(self, drop_dirty: bool) -> None:
        """Leave no line of the array in the cache, but for dirty ones that are not given up."""
        self.maintain("invalidate_lines", drop=int(drop_dirty))
        if self.volume.in_host_tier:
            # Afterwards: a line in a frame could enter the tier still.
            self.launcher.drop_tier()
            self.finish("drop_tier", None)

    # The end.

    def close(self) -> BaseException | None:
        """Flush, wait for what is in flight, and release everything; return what failed.

        May be called twice, and by any thread. An exception that a signal handler raises meanwhile
        leaves it open and usable, or closed. Nothing to do in a forked child.
        """
        if self.closed or self.in_child:
            self.closed = True
            endings.forget(self)
            return None
        try:
            # Not in the cache's turn: callbacks of the calls may need it.
            late = self.calls.shut()
            return endings.holding((self.cache.turn,), partial(self._close, late))
        except BaseException:
            self.calls.reopen()
            raise

    def close_lost(self) -> None:
        """Close it for an array that is lost, in whatever the calling thread is about to do."""
        turn: Any = self.cache.turn
        # The garbage collector may call in the middle of an array's call, or of its end.
        if not turn._is_owned() and turn.acquire(blocking=False):
            try:
                self._close_or_raise()
            finally:
                turn.release()
            return
        with contextlib.suppress(RuntimeError):  # no thread: the interpreter ends, and closes it
            threading.Thread(target=self._close_or_raise, name="flashwarp closing").start()

    def _close_or_raise(self) -> None:
        failure = self.close()
        if failure is not None:
            raise failure

    def _close(self, late: DeviceTimeout | None) -> BaseException | None:
        if self.closed:
            return None
        failure = self._settle()
        return endings.uninterrupted(partial(self._end, failure, late))

    def _settle(self) -> Exception | None:
        """Bring everything to rest: no dirty line, no command, no line of ours in a shared cache.

        Goes as far as it can, and returns what failed first.
        """
        failure: Exception | None = None
        if self._fault_told and not self._device.alive():
            return None
        steps: list[Callable[[], None]] = [self._finish_streams]
        if self.writable:
            steps.append(self.flush)
        steps.append(lambda: self.maintain("quiesce", warps=self.controller.queues.count))
        if not self._owns_cache:
            steps.append(lambda: self._empty(drop_dirty=True))
        for step in steps:
            try:
                step()
            except DeviceError as error:
                failure = failure or self.reason_of(error)
            except Exception as error:  # the first one counts; later steps still run
                failure = failure or error
            if not self._device.alive():
                break
        return failure

    def _end(self, failure: Exception | None, late: DeviceTimeout | None) -> BaseException | None:
        """Let go of everything, after `_settle` has returned `failure`."""
        self.closed = True
        endings.forget(self)
        unseen = self.calls.release(late)
        # Nothing can be saved from a device whose kernel has faulted; it is only let go.
        alive = self._device.alive()
        if not self._owns_cache and alive:
            try:
                self.cache.withdraw(self.volume, time_limit_s())
            except DeviceError as error:
                # A kernel of a neighbour is at our queues: nothing that it may touch is freed.
                _visited.append(self)
                return failure or error
        self.controller.stop()
        self.launcher.let_go()
        if failure is not None and not self._owns_cache and alive:
            self._forget_lines(failure)
        self.cache.detach(self.volume)
        if self._owns_cache:
            self.cache.close()
        self._end_of_service()
        self._release_storage()
        failures = [each for each in (failure, unseen) if each is not None]
        return endings.first_of(failures)

    def _forget_lines(self, failure: Exception) -> None:
        """Give frames back that commands without an answer held, now that none can come."""
        try:
            self.launcher.forget_lines(_DROP_ALL)
            self._device.synchronize()
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
