"""How things end: what is open is closed before the interpreter goes, and nothing ends half way.

One registry knows every open array. It closes them, which flushes them, when the interpreter ends
or their device is closed, whoever still holds them. A forked child owns none of it. `uninterrupted`
and `holding` keep signal handlers that raise, such as that of Ctrl-C, out of what must be done as a
whole.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from flashwarp import _native
from flashwarp.errors import ClosedError, CopyError

__all__ = [
    "Closing",
    "NotCopied",
    "Open",
    "after_fork",
    "at_exit",
    "check_not_ended",
    "close_all",
    "first_of",
    "forget",
    "holding",
    "remember",
    "uninterrupted",
]

T = TypeVar("T")


def uninterrupted(act: Callable[[], T]) -> T:
    """Call a function where no signal handler runs; signals wait until it has returned.

    Python runs handlers in the main thread only. There the call takes a thread of its own, and 50
    us; elsewhere nothing.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return act()
    return _native.uninterrupted(act)


def holding(locks: Sequence[Any], act: Callable[[], T]) -> T:
    """Call a function while holding locks, which come free however it ends.

    A handler that raises between two lines of a ``with`` statement could leave its lock taken.
    """
    for lock in locks[:0:-1]:
        act = partial(_native.holding, lock, act)
    return _native.holding(locks[0], act) if locks else act()


class Open(Protocol):
    """What the registry holds."""

    @property
    def device(self) -> object:
        """The device that it is on."""

    def close(self) -> BaseException | None:
        """Flush and release it; return what could not be done. May be called twice."""


_open: dict[int, Open] = {}  # in the order of opening
_last: list[Callable[[], None]] = []  # what ends after everything in the registry
_in_child: list[Callable[[], None]] = []
_ended = False


def check_not_ended() -> None:
    """Raise ClosedError once the interpreter ends: what opens now would never be closed."""
    if _ended:
        raise ClosedError("the interpreter is ending: nothing can be opened any more")


def remember(thing: Open) -> None:
    """Hold something until it is closed."""
    check_not_ended()
    _open[id(thing)] = thing


def forget(thing: Open) -> None:
    """Let go of something that was closed."""
    _open.pop(id(thing), None)


def close_all(device: object = None) -> BaseException | None:
    """Close what is open, on one device or on all, last opened first; return what failed."""
    failures: list[BaseException] = []
    for thing in reversed(list(_open.values())):
        if device is None or thing.device is device:
            try:
                failure = thing.close()
            except Exception as error:  # the others are closed all the same
                failure = error
            if failure is not None:
                failures.append(failure)
    return first_of(failures)


def first_of(errors: Sequence[BaseException]) -> BaseException | None:
    """Return the first of several exceptions, with the others as its notes."""
    for other in errors[1:]:
        errors[0].add_note(f"and another failed: {type(other).__name__}: {other}")
    return errors[0] if errors else None


def at_exit(close: Callable[[], None]) -> Callable[[], None]:
    """Call something when the interpreter ends and the registry is empty; a decorator."""
    _last.append(close)
    return close


@atexit.register
def _end() -> None:
    """Close everything. What fails is printed by the interpreter, as for any exit function."""
    global _ended
    _ended = True
    failure = close_all()
    for close in _last:
        close()
    if failure is not None:
        raise failure


def after_fork(forget: Callable[[], None]) -> None:
    """Call something in each forked child, which has none of its parent's threads."""
    _in_child.append(forget)


def _forget_all() -> None:
    _open.clear()
    for each in _in_child:
        each()


os.register_at_fork(after_in_child=_forget_all)


class NotCopied:
    """Base of objects that own something. Copying is refused: a copy would end what it shares."""

    def __copy__(self) -> Any:
        raise CopyError(f"{self!r} cannot be copied: pass on the object itself")

    def __deepcopy__(self, memo: Any) -> Any:
        raise CopyError(f"{self!r} cannot be copied: pass on the object itself")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CopyError(
            f"{self!r} cannot be pickled: send what it was made from, and make it there"
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
