"""How things end: open arrays are closed before the interpreter ends, and no step ends half way.

One registry knows every open array. When the interpreter ends, or the array's device is closed, the
registry flushes and closes it, whichever code still holds it. A forked child owns no array of its
parent. `uninterrupted` and `holding` keep signal handlers that raise, such as that of Ctrl-C, out
of steps that must be done as a whole.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, Self, SupportsIndex, TypeVar

from flashwarp import _native
from flashwarp.errors import ClosedError, CopyError

T = TypeVar("T")


def uninterrupted(act: Callable[[], T]) -> T:
    """Call a function in a thread in which no signal handler runs.

    Python runs handlers in the main thread only. So a call from the main thread runs in another
    thread, which takes 50 us, and signals wait until it has returned.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return act()
    handled = sys.exception()
    try:
        return _native.uninterrupted(act)
    except BaseException as error:
        # The other thread knows nothing of an exception that is being handled here, as at the end
        # of a `with` statement. Without this, that exception would be lost.
        first = error
        while first is not handled and first.__context__ is not None:
            first = first.__context__
        if first is not handled:
            first.__context__ = handled
        raise


def holding(locks: Sequence[object], act: Callable[[], T]) -> T:
    """Call a function while holding locks, and release them however it ends.

    In a ``with`` statement, a signal handler could raise between two lines and leave a lock taken.
    """
    for lock in locks[:0:-1]:
        act = partial(_native.holding, lock, act)
    return _native.holding(locks[0], act) if locks else act()


class Open(Protocol):
    """An object in the registry."""

    @property
    def device(self) -> object:
        """Its device."""

    def close(self) -> BaseException | None:
        """Flush and release it; return what failed. May be called twice."""


_open: dict[int, Open] = {}  # in the order of opening
_last: list[Callable[[], None]] = []  # called after everything in the registry is closed
_ended = False


def check_not_ended() -> None:
    """Raise ClosedError if the interpreter is ending: nothing would close what opens now."""
    if _ended:
        raise ClosedError("the interpreter is ending: nothing can be opened any more")


def ended() -> bool:
    """Return whether the interpreter is ending."""
    return _ended


def remember(thing: Open) -> None:
    """Enter an object into the registry, which holds it until it is closed."""
    check_not_ended()
    _open[id(thing)] = thing


def forget(thing: Open) -> None:
    """Remove an object that was closed from the registry."""
    _open.pop(id(thing), None)


def close_all(device: object = None) -> BaseException | None:
    """Close all open objects, or those on one device, last opened first; return what failed."""
    return first_of(
        close_each([each for each in _open.values() if device is None or each.device is device])
    )


def close_each(things: Sequence[Open]) -> list[BaseException]:
    """Close objects, last opened first, and return what failed."""
    failures: list[BaseException] = []
    for thing in list(things)[::-1]:  # each may leave the list
        try:
            failure = thing.close()
        except Exception as error:  # the others are closed all the same
            failure = error
        if failure is not None:
            failures.append(failure)
    return failures


def first_of(errors: Sequence[BaseException]) -> BaseException | None:
    """Return the first of several exceptions, with the others as its notes."""
    for other in errors[1:]:
        errors[0].add_note(f"and another failed: {type(other).__name__}: {other}")
    return errors[0] if errors else None


def at_exit(close: Callable[[], None]) -> Callable[[], None]:
    """Call a function when the interpreter ends and the registry is empty; a decorator."""
    _last.append(close)
    return close


@atexit.register
def _end() -> None:
    """Close everything. The interpreter prints failures, as for any exit function."""
    global _ended
    _ended = True
    failure = close_all()
    for close in _last:
        close()
    if failure is not None:
        raise failure


# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=_open.clear)


class NotCopied:
    """Base of objects that own something. Copying is refused: a copy would end what it shares."""

    def __copy__(self) -> Self:
        raise CopyError(f"{self!r} cannot be copied: pass on the object itself")

    def __deepcopy__(self, memo: object) -> Self:
        raise CopyError(f"{self!r} cannot be copied: pass on the object itself")

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        raise CopyError(
            f"{self!r} cannot be pickled: send the arguments that made it, and make it there"
        )


class Closing(NotCopied):
    """Base of objects that must be closed; a ``with`` statement closes them at its end."""

    def close(self) -> None:
        """Release everything. May be called twice."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
