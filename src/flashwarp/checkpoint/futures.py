"""`Saved`: the outcome of a checkpoint's way to storage, which no caller can lose by accident."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Generator
from typing import Any

from flashwarp.endings import Future, NotCopied
from flashwarp.errors import ForkError, WaitTimeout


class Saved(NotCopied, Future[int]):
    """The future of one checkpoint: its version number, once it is durable on the SSD.

    `Checkpointer.checkpoint` returns it. The functions of `concurrent.futures` accept it, and
    ``await`` does not block the event loop. It fails if the version was discarded before it was
    durable, or could not be written. If nobody asks for a failure, `Checkpointer.close` raises it.
    """

    def __init__(self, what: str) -> None:
        super().__init__(running=True)
        self.observed = False
        self._what = what
        self._pid = os.getpid()

    def result(self, timeout: float | None = None) -> int:
        """Block until the version is durable, and return its number; raises what failed."""
        self._check_process()
        try:
            return super().result(timeout)
        except concurrent.futures.TimeoutError as error:
            if self.done():
                raise
            raise WaitTimeout(
                f"{self._what} is not durable after {timeout:g} s: wait longer, or see explain()"
            ) from error
        finally:
            self.observed = self.observed or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until the version is durable or has failed; return the failure, or None."""
        self._check_process()
        try:
            return super().exception(timeout)
        except concurrent.futures.TimeoutError as error:
            raise WaitTimeout(
                f"{self._what} is not durable after {timeout:g} s: wait longer, or see explain()"
            ) from error
        finally:
            self.observed = self.observed or self.done()

    def cancel(self) -> bool:
        """Return False: a version that is on its way is given up by `Checkpointer.discard`."""
        return False

    def __await__(self) -> Generator[Any, None, int]:
        import asyncio  # slow to import, and code that awaits has imported it

        self._check_process()
        self.observed = True
        return asyncio.wrap_future(self).__await__()

    def _check_process(self) -> None:
        # Also if it is done: a thread that the child has not may hold the future's lock for ever.
        if os.getpid() != self._pid:
            raise ForkError(
                "the checkpoint was made by the parent process: a forked child cannot wait for it"
            )
