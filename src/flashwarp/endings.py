"""How things end: open arrays are closed before the interpreter ends, and no step ends half way.

One registry knows every open array. When the interpreter ends, or the array's device is closed, the
registry flushes and closes it, whichever code still holds it. A forked child owns no array of its
parent. `uninterrupted` and `holding` keep signal handlers that raise, such as that of Ctrl-C, out
of steps that must be done as a whole. The locks, events and threads of the library are those of
this module: a handler that raises can leave those of `threading` taken for ever.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, Self, SupportsIndex, TypeVar

from flashwarp import _native
from flashwarp.errors import ClosedError, CopyError, FlashwarpError, ForkError

T = TypeVar("T")

_SLEEP_S = 0.5


def uninterrupted(act: Callable[[], T], lost: Callable[[T], object] | None = None) -> T:
    """Call a function in a thread in which no signal handler runs.

    Python runs handlers in the main thread only. So a call from the main thread runs in another
    thread, which takes about 10 us, and signals wait until it has returned. If a handler raises
    then, the caller gets no result: `lost` ends what the function has returned.
    """
    if lost is None:
        return _elsewhere(act, partial(_native.uninterrupted, act))
    made: list[T] = []

    def make() -> T:
        made.append(act())
        return made[0]

    return _elsewhere(make, partial(_native.uninterrupted, make, lambda: lost(made[0])))


def aside(act: Callable[[], T], stop: Callable[[], object]) -> T:
    """Call a function as `uninterrupted` does, but call `stop` at once if a handler raises.

    The function should end soon then. Its end is waited for, and what the handler raised comes out.
    """
    return _elsewhere(act, partial(_native.aside, act, stop))


def _elsewhere(act: Callable[[], T], make: Callable[[], T]) -> T:
    if threading.get_ident() != threading.main_thread().ident or sys.is_finalizing():
        return act()
    handled = sys.exception()
    try:
        return make()
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


_RLock: Any = type(threading.RLock())


class Lock(_native.Held, _RLock):  # type: ignore[misc]
    """A lock for ``with`` statements; the thread that holds it may take it again.

    Wherever a signal handler raises, the end of the statement releases it. Those of `threading` can
    stay taken: between two lines, and conditions also between their own.
    """


class Condition(_native.Held, threading.Condition):
    """A condition whose lock no signal handler leaves taken, or leaves free in a statement."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock: Any = lock or Lock()
        self._waiters: deque[Any]
        super().__init__(self._lock)
        # `uninterrupted` calls in another thread, for the one that has the lock.
        self._is_owned = lambda: True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified; return False if the time has passed. Then the lock is held again."""
        waiter = threading.Lock()  # of this call alone
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            return _native.released(self._lock, waiter, -1 if timeout is None else timeout)
        finally:
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)


class Event(threading.Event):
    """An event that stays usable if a signal handler raises in its calls."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = Condition()


class _Waiters(list[Any]):
    """What the functions of `concurrent.futures` wait by for a future."""

    def append(self, waiter: Any) -> None:
        """Give the waiter an event of ours: nobody waits for it before it has been entered."""
        if not isinstance(waiter.event, Event):
            waiter.event = Event()
        super().append(waiter)


_Base = concurrent.futures._base


class Future(concurrent.futures.Future[T]):
    """A future that stays usable if a signal handler raises in its calls.

    Also in those of `concurrent.futures`, but while they take the locks of their futures: use
    `wait` instead. Most futures are done before anybody waits for them: the condition, which takes
    as long to make as all else, is made for the first who does.

    Parameters
    ----------
    running : bool
        Whether it cannot be cancelled from the first.
    """

    def __init__(self, running: bool = False) -> None:
        # Not the base's, which makes a condition.
        self._state = _Base.RUNNING if running else _Base.PENDING
        self._result = None
        self._exception = None
        self._waiters = _Waiters()
        self._done_callbacks: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        """Make the condition. Of threads that come at once, all get the one that is there first."""
        if name != "_condition":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.__dict__.setdefault(name, Condition())

    # What is done stays so, and needs no condition.

    def done(self) -> bool:
        """Return whether it has ended, or was cancelled. Does not block."""
        return self._state not in (_Base.PENDING, _Base.RUNNING)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, for `timeout` seconds at most."""
        if self._state == _Base.FINISHED and self._exception is None:
            return self._result  # type: ignore[return-value]
        return super().result(timeout)


def wait(futures: Sequence[concurrent.futures.Future[Any]], timeout: float | None = None) -> bool:
    """Wait for futures of this module, and return whether all are done."""
    end = None if timeout is None else time.monotonic() + timeout
    for future in futures:
        try:
            left = None if end is None else max(end - time.monotonic(), 0)
            concurrent.futures.Future.exception(future, left)
        except concurrent.futures.CancelledError:
            continue
        except TimeoutError:
            return False
    return True


def sleep(seconds: float) -> None:
    """Sleep; a signal's handler runs within half a second.

    A signal that comes just before the system's sleep begins does not end it: after Ctrl-C
    `time.sleep` may go on to its end.
    """
    end = time.monotonic() + seconds
    while (rest := end - time.monotonic()) > 0:
        time.sleep(min(rest, _SLEEP_S))


class Thread(threading.Thread):
    """A thread that a signal handler leaves whole if it raises in its calls.

    One of `threading` that is half started can wait for its starter for ever. And if a handler
    raises in its `join`, Python before 3.13 takes it for ended while it runs.
    """

    def __init__(
        self, target: Callable[..., object], name: str, *args: object, daemon: bool = True
    ) -> None:
        super().__init__(target=target, name=name, args=args, daemon=daemon)
        self._over = Event()
        self._pid = os.getpid()

    def start(self) -> None:
        """Start it as a whole; raises RuntimeError if the process can have no more threads."""
        uninterrupted(super().start)

    def run(self) -> None:
        """Call the target."""
        try:
            super().run()
        finally:
            self._over.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, for `timeout` seconds at most."""
        if self.ident is None or self._pid != os.getpid():
            return
        if self._over.wait(timeout):
            uninterrupted(super().join)

    def is_alive(self) -> bool:
        """Whether it was started, has not ended, and is of this process."""
        return self.ident is not None and not self._over.is_set() and self._pid == os.getpid()


class Pool:
    """Threads that make calls. `concurrent.futures` has locks that a signal handler leaves taken.

    Parameters
    ----------
    threads : int
        How many, at most.
    name : str
        Of the threads, with a number.
    queued_max : int, optional
        `submit` waits while so many calls have not ended. Default: it never waits.
    """

    def __init__(self, threads: int, name: str, queued_max: int | None = None) -> None:
        self._most = threads
        self._name = name
        self._queued_max = queued_max
        lock = Lock()
        self._work, self._room = Condition(lock), Condition(lock)
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: list[Thread] = []
        self._under_way = 0
        self._closed = False

    def submit(self, act: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function in one of the threads; in this one if they, or the interpreter, end."""
        future: Future[T] = Future()
        call = future, partial(act, *arguments)
        with self._room:
            # Without a limit: each call in front has those of its own waits.
            while self._queued_max is not None and self._under_way >= self._queued_max:
                self._room.wait()
            queued = uninterrupted(partial(self._enter, call))
        if not queued:
            _settle(*call)
        return future

    def _enter(self, call: tuple[Future[Any], Callable[[], Any]]) -> bool:
        if self._closed or _ended:
            return False
        if self._under_way >= len(self._threads) < self._most:
            name = f"{self._name}_{len(self._threads)}"
            thread = Thread(self._run, name)
            try:
                thread.start()
            except RuntimeError:  # the process has no thread left
                if not self._threads:
                    return False
            else:
                self._threads.append(thread)
        self._calls.append(call)
        self._under_way += 1
        self._work.notify()
        return True

    def _run(self) -> None:
        while True:
            with self._work:
                while not self._calls:
                    if self._closed:
                        return
                    self._work.wait()
                call = self._calls.popleft()
            _settle(*call)
            del call  # it may hold memory
            with self._room:
                self._under_way -= 1
                self._room.notify()

    def close(self, *, cancel: bool = False) -> None:
        """Wait for all calls, and end the threads; or cancel those that have not begun.

        May be called twice.
        """
        with self._work:
            self._closed = True
            while cancel and self._calls:
                self._calls.popleft()[0].cancel()
                self._under_way -= 1
            self._work.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(cancel=exception[0] is not None)


def _settle(future: Future[Any], act: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(act())
    except BaseException as error:
        future.set_exception(error)


class Open(Protocol):
    """An object in the registry."""

    @property
    def device(self) -> object:
        """Its device."""

    def close(self) -> BaseException | None:
        """Flush and release it; return what failed. May be called twice."""


_open: dict[int, Open] = {}  # in the order of opening
_last: list[Callable[[], None]] = []  # called after everything in the registry is closed
# Whoever uses the package first in an exit function imports this module then: the main thread has
# ended already, and later registered functions are not called.
_ended = not threading.main_thread().is_alive()


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


class Holder:
    """The registry's entry of an object that is closed when nobody holds it any more.

    The registry holds the object weakly. Its ``__del__`` calls `lost`.
    """

    def __init__(self, thing: Any) -> None:
        self.device = thing.device
        self._thing: Callable[[], Any] = weakref.ref(thing)
        self._lock = Lock()
        self._pid = os.getpid()

    def close(self) -> BaseException | None:
        """Close the object, if somebody holds it; wait if a thread closes it now."""
        with self._lock:
            thing = self._thing()
            try:
                if thing is not None:
                    thing.close()
            except Exception as error:
                return error
        return None

    def lost(self, thing: Any) -> None:
        """Warn, and close the object in a thread; the registry holds it until then.

        The garbage collector calls this in any thread, which may hold what the end waits for.
        """
        if _ended or thing.closed or os.getpid() != self._pid:
            return
        self._thing = lambda: thing
        try:
            warnings.warn(f"{thing!r} was not closed", ResourceWarning, stacklevel=3)
        finally:  # a warning may be raised as an error
            with contextlib.suppress(RuntimeError):  # no thread: the registry closes it
                Thread(self._end, "flashwarp closing", daemon=False).start()

    def _end(self) -> None:
        failure = self.close()
        if failure is not None:
            raise failure
        # Nothing holds it any more: what it holds need not wait for the garbage collector.
        self._thing = lambda: None


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


class Scoped(_native.Scoped):
    """Base of what a ``with`` statement closes, wherever a signal handler raises for once."""

    def close(self) -> None:
        """Release everything. May be called twice."""
        raise NotImplementedError

    def _end_interrupted(self, error: BaseException) -> None:
        """End what `close` has left at the end of a ``with`` statement, when it raised this."""
        if not isinstance(error, FlashwarpError):  # of a handler, perhaps before the first line
            self.close()


class Closing(Scoped, NotCopied):
    """Base of objects that must be closed; a ``with`` statement closes them at its end."""


class OfProcess(Closing):
    """Base of what has one end, and belongs to the process that made it.

    Subclasses call ``super().__init__()`` first, set `_closed` at their end, and name themselves in
    errors by `_kind`, or by templates of their own, in which ``0`` is the object.
    """

    _kind = "object"
    _when_closed = "the {0._kind} was closed"
    _when_forked = "this {0._kind} belongs to process {0._pid}: a forked child must make its own"
    _closed = False

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    @property
    def _in_child(self) -> bool:
        """Whether this process is a forked child of the one that made it."""
        return os.getpid() != self._pid

    def _check_usable(self) -> None:
        """Raise ClosedError after its end, and ForkError in a forked child."""
        if self._closed:
            raise ClosedError(self._when_closed.format(self))
        if self._in_child:
            raise ForkError(self._when_forked.format(self))
