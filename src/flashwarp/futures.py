"""`Future`: the outcome of an asynchronous call, for threads, for asyncio and for streams.

A `concurrent.futures.Future`, so that `wait`, `as_completed` and callbacks work as with any other;
it can also be awaited, and streams can be made to wait for it. It remembers whether somebody has
looked at its failure: what nobody looks at is raised by the array.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Generator, Iterable
from typing import Any, Protocol, TypeVar

from flashwarp.endings import NotCopied
from flashwarp.errors import ForkError

__all__ = ["Future"]

T = TypeVar("T")


class Helper(Protocol):
    """What a future needs of the calls of its array."""

    @property
    def on_worker(self) -> bool:
        """Whether the calling thread is the one that ends calls, as in a callback."""

    def wait_for(self, futures: Iterable[Future[Any]], timeout: float | None) -> bool:
        """Wait for futures; tell whether all are done."""

    def hold_stream(self, future: Future[Any], stream: Any) -> None:
        """Make a stream wait for the call of a future."""

    def lose(self, error: BaseException | None) -> None:
        """Keep what nobody has looked at; the array raises it."""


class Future(NotCopied, concurrent.futures.Future[T]):
    """The outcome of `Array.gather_async` or `Array.scatter_async`.

    Attributes
    ----------
    out : array or None
        Of a read: where the rows go, as far as there is such a place before they have come.

    Notes
    -----
    What `concurrent.futures` has works with it as with its own futures, and ``await future`` does
    not block the loop of asyncio. The array may be closed meanwhile: `Array.close` waits for its
    calls, and their results stay valid.

    A failure is *observed* when `result`, `exception` or ``await`` has given it to somebody. One
    whose future was dropped before is raised by the next call of the array; one that is still
    unobserved when the array is closed, by `Array.close`.

    Callbacks run in the thread that ends calls, so one that takes long holds up the others; they
    may make calls of the array. Exceptions in them are logged, as `concurrent.futures` has it.

    Examples
    --------
    >>> import flashwarp as fw, numpy as np
    >>> with fw.create("rows.npy", "float32", (1000, 64), device="cpu") as x:
    ...     reads = [x.gather_async(slice(i, i + 2)) for i in range(0, 8, 2)]
    ...     [read.result().shape for read in reads]
    [(2, 64), (2, 64), (2, 64), (2, 64)]
    """

    def __init__(self, calls: Helper, out: Any, on_host: bool) -> None:
        super().__init__()
        self.out = out
        self._calls = calls
        self._on_host = on_host
        self._pid = os.getpid()
        self._observed = False

    def result(self, timeout: float | None = None) -> T:
        """Wait for the call and return the rows; None for a write.

        Raises what the call met, TimeoutError when it has not ended after `timeout` seconds, and
        CancelledError when it was cancelled.
        """
        timeout = self._help(timeout)
        try:
            return super().result(timeout)
        finally:
            self._observed = self._observed or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call and return what it met, or None."""
        timeout = self._help(timeout)
        try:
            return super().exception(timeout)
        finally:
            self._observed = self._observed or self.done()

    def cancel(self) -> bool:
        """Cancel the call if it has not begun, and tell whether it was.

        Only calls on the CPU device that wait for others can be: on a GPU a call is queued on a
        stream at once, and what runs is never stopped.
        """
        self._check_process()
        return super().cancel()

    def wait_on(self, stream: Any) -> Any:
        """Make what is queued on `stream` from now on wait for the call; return `out`.

        Does not block, and does not tell whether the call succeeds: look at `result` in the end.
        On the CPU device, where launches end before they return, it waits for the call.

        Parameters
        ----------
        stream : stream
            Of torch, cupy or cuda.core, or a handle.

        Raises
        ------
        ArgumentError
            When rows that a GPU reads go to host memory, where no stream can wait for them: wait
            for `result`.
        """
        self._check_process()
        self._calls.hold_stream(self, stream)
        return self.out

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio  # costs as much as all of flashwarp, and who awaits has it already

        self._check_process()
        return asyncio.wrap_future(self).__await__()

    def _help(self, timeout: float | None) -> float | None:
        """Do the calls before this one where the thread that should is the one that waits."""
        self._check_process()
        if self.done() or not self._calls.on_worker:
            return timeout
        self._calls.wait_for([self], timeout)
        return 0

    def _check_process(self) -> None:
        if os.getpid() != self._pid and not self.done():
            raise ForkError(
                f"the call was made by process {self._pid}; a forked child cannot wait for it"
            )

    def __del__(self) -> None:
        # What nobody has looked at, and nobody can look at any more, is the array's to raise.
        if getattr(self, "_observed", True) or os.getpid() != self._pid or not self.done():
            return
        if not self.cancelled():
            self._calls.lose(super().exception(0))
