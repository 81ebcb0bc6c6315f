"""`Progress`: how far a table is trained, which its record says once the table is closed."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import SupportsInt

from flashwarp import _native, endings
from flashwarp.array.attachment import Attachment
from flashwarp.errors import DeviceError
from flashwarp.table.record import Record


class Progress:
    """How far a table is trained. It stands on the array while the record says that rows change.

    Closing the array closes it first. It holds neither the array nor the optimizer: a program may
    lose both before the array is closed.

    Attributes
    ----------
    path : str or None
        Of the table's file.
    record : Record or None
        What the record said last, apart from its mark.
    step : int or tensor
        Steps so far.
    marked : bool
        Whether the record says that rows change.
    failed : bool
        Whether a step is under way, or has failed since the last checkpoint.
    lock : endings.Lock
        Held by steps.
    """

    def __init__(self, attachment: Attachment, path: str | None, record: Record | None) -> None:
        self.device = attachment.device
        self.path, self.record = path, record
        self.step: SupportsInt = 0
        self.marked = self.failed = False
        self.lock = endings.Lock()
        self._attachment = attachment

    def mark(self) -> None:
        """Say in the record, before any row can reach the file, that rows may be newer."""
        if self.marked or self.path is None or self.record is None:
            return
        replace(self.record, changing=True).write(self.path)
        self.marked = True
        if self not in self._attachment.dependents:
            self._attachment.dependents.append(self)

    def note(self, now: Record, changing: bool = False) -> None:
        """Write the record of a table that is durable after its present step."""
        assert self.path is not None
        replace(now, changing=changing).write(self.path)
        self.record, self.marked, self.failed = now, changing, False

    def now(self) -> Record:
        """Return the record of the present step. Waits for the device."""
        assert self.record is not None
        return replace(self.record, step=int(self.step), changing=False)

    def close(self) -> BaseException | None:
        """Make the table durable and write its record; return what failed.

        The record stays as it is if a step is under way or has failed, or if a CUDA graph may
        replay one. May be called twice, and by any thread.
        """
        # Never waits for a step: the garbage collector may call this in the turn, which steps need.
        failure: BaseException | None = _native.holding(self.lock, self._close, False)
        return failure

    def _close(self) -> BaseException | None:
        try:
            if self.marked and not self.failed:
                endings.holding((self._attachment.cache.turn,), self._settle)
        except DeviceError as error:
            return self._attachment.reason_of(error)
        except Exception as error:
            return error
        finally:
            with contextlib.suppress(ValueError):
                self._attachment.dependents.remove(self)
        return None

    def _settle(self) -> None:
        if not self._attachment.closed and not self._attachment.launcher.graphs.count:
            self._attachment.flush()
            self.note(self.now())


def settle(attachment: Attachment) -> None:
    """Write the record of a table that an optimizer has trained, for the next one."""
    trained = [each for each in attachment.dependents if isinstance(each, Progress)]
    failure = endings.first_of(endings.close_each(trained))
    if failure is not None:
        raise failure
