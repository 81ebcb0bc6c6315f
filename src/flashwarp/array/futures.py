"""`Future`: the outcome of an asynchronous call, for threads, for asyncio and for streams.

It is a `concurrent.futures.Future`, so `wait`, `as_completed` and callbacks work as with any other.
It can also be awaited, and a stream can wait for it. It remembers whether a caller has observed its
failure: the array raises failures that no caller has observed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from flashwarp import endings
from flashwarp._names import renamed
from flashwarp.endings import NotCopied
from flashwarp.errors import ForkError

T = TypeVar("T")
U = TypeVar("U")


@renamed
class Future(NotCopied, endings.Future[T]):
    """The outcome of `Array.gather_async` or `Array.scatter_async`.

    Attributes
    ----------
    out : array or None
        The array that a read fills, if it is known before the rows have arrived.

    Notes
    -----
    The functions of `concurrent.futures` accept it as their own futures, and ``await future`` does
    not block the event loop. You may close the array meanwhile: `Array.close` waits for its calls,
    and their results stay valid.

    A failure is *observed* when `result`, `exception` or ``await`` has raised or returned it. If a
    future is dropped before, the next call of the array raises its failure. If a failure is still
    unobserved when the array is closed, `Array.close` raises it.

    On a GPU a call that nobody asks about keeps its operands until somebody asks about a call of
    the array, or makes one. A thread of the library's runs only while one is needed: for callbacks,
    ``await``, the functions of `concurrent.futures`, rows that go to the host, and failures.

    Callbacks run in the thread that ends calls, so a slow callback delays the other calls. A
    callback may call the array. Its exceptions are logged, as `concurrent.futures` does.

    Examples
    --------
    >>> import flashwarp as fw, numpy as np
    >>> with fw.create("rows.npy", "float32", (1000, 64), device="cpu") as x:
    ...     reads = [x.gather_async(slice(i, i + 2)) for i in range(0, 8, 2)]
    ...     [read.result().shape for read in reads]
    [(2, 64), (2, 64), (2, 64), (2, 64)]
    """

    def __init__(self, calls: Any, out: object, on_host: bool, running: bool) -> None:
        super().__init__(running)
        self.out: Any = out
        self._calls = calls  # an `InFlight`, which makes futures and so is not imported here
        self._on_host = on_host
        self._pid = os.getpid()
        self._observed = False
        # Whether the thread that ends calls must end this one: others call and wake nobody.
        self.hurried = False

    # The calls end futures for which somebody waits at once, and others when there is time. The
    # functions of `concurrent.futures` wait by what they append to this list.

    @property
    def _waiters(self) -> list[Any]:
        if not super().done():
            self._calls.hurry(self)
        return self._waiting

    @_waiters.setter
    def _waiters(self, waiting: list[Any]) -> None:
        self._waiting = waiting

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn` with the future when it is done; at once if it is."""
        self.hurried = True
        super().add_done_callback(fn)
        if not super().done():
            self._calls.hurry(self)

    def done(self) -> bool:
        """Return whether the call has ended, or was cancelled. Does not block."""
        if super().done():
            return True
        self._calls.look()
        return super().done()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the call and return the rows; None for a write.

        Raises the call's error, TimeoutError if the call has not ended after `timeout` seconds, and
        CancelledError if it was cancelled.
        """
        return self._observing(super().result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call and return its error, or None."""
        return self._observing(super().exception, timeout)

    def _observing(self, wait: Callable[[float | None], U], timeout: float | None) -> U:
        timeout = self._help(timeout)
        try:
            return wait(timeout)
        finally:
            self._observed = self._observed or self.done()

    def cancel(self) -> bool:
        """Cancel the call if it has not begun, and return whether it was cancelled.

        Only calls on the CPU device that wait for earlier calls can be cancelled. On a GPU a call
        is queued on a stream at once, and a running call is never stopped.
        """
        self._check_process()
        return super().cancel()

    def before(self, stream: object) -> Any:
        """Make later work on `stream` wait for the call; return `out`.

        Does not block, and does not report whether the call succeeds: use `result` for that. On
        the CPU device, where launches end before they return, it waits for the call.

        Parameters
        ----------
        stream : stream
            Of torch, cupy or cuda.core, or a handle.

        Raises
        ------
        ArgumentError
            If a GPU reads rows that go to host memory, where no stream can wait for them: use
            `result`.
        CaptureError
            If the call is in flight and the stream is being captured into a CUDA graph.
        """
        self._check_process()
        self._calls.hold_stream(self, stream)
        return self.out

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio  # as slow to import as flashwarp, and code that awaits has imported it

        self._check_process()
        return asyncio.wrap_future(self).__await__()

    def _help(self, timeout: float | None) -> float | None:
        """If this thread can end calls, end those before this one; return what is left to wait."""
        self._check_process()
        if self.done():
            return timeout
        if self._calls.ends_here:
            self._calls.wait_for([self], timeout)
            return 0
        self._calls.hurry(self)
        return timeout

    def _check_process(self) -> None:
        if os.getpid() != self._pid and not self.done():
            raise ForkError(
                f"the call was made by process {self._pid}; a forked child cannot wait for it"
            )

    def __del__(self) -> None:
        # No caller has observed the failure, and none can any more: the array raises it.
        if getattr(self, "_observed", True) or os.getpid() != self._pid or not super().done():
            return
        if not self.cancelled():
            self._calls.lose(super().exception(0))
