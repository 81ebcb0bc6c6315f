"""`Lease`: a file that no process can write or cut before we have stopped reading it in place.

Linux holds a writer's open, and a truncate, until the lease is released (fcntl(2), F_SETLEASE; at
most /proc/sys/fs/lease-break-time, 45 s). A signal wakes one thread of the process, the keeper,
which makes the reader leave the file's pages, and then releases the lease. When no writer has the
file open any more, it takes the lease again. That proves that later reads see the newest contents.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import struct
import threading
import time
import weakref
from collections.abc import Callable

from flashwarp import endings
from flashwarp.errors import StorageError

_log = logging.getLogger(__name__)

# What Linux sends the keeper, and nobody else, when a writer waits: a real-time signal, or SIGIO
# when too many of these are queued. The keeper blocks both, and waits for them.
_BREAK = signal.SIGRTMIN + 11
_SIGNALS = {_BREAK, signal.SIGIO}
_F_SETOWN_EX, _F_OWNER_TID = 15, 0
# How often the keeper looks although no signal has come: at leases of which it can get none.
_POLL_S = 0.01
_SWEEP_S = 1.0
# How long to wait before taking the lease again. So a process that opens the file for writing again
# and again waits for at most ten breaks a second.
_RETAKE_S = 0.1
# Bound of the wait for the keeper when the interpreter ends: a break takes milliseconds.
_STOP_S = 2.0

_REFUSALS = {
    errno.EACCES: "the file is another user's, and only its owner may take a lease",
    errno.EAGAIN: "a process has the file open for writing",
    errno.EINVAL: "its file system, or a file of its kind, has no leases",
    errno.ENOLCK: "its file system has no leases",
    errno.EOPNOTSUPP: "its file system has no leases",
}


class Lease:
    """A lease on a file, through an open file description of its own.

    A read lease; with `excludes_readers` a write lease, which no process can even open the file
    beside. It is taken again after a break, unless `once`. Raises OSError if none can be taken;
    `refusal` says why, for people.

    The lease stays the parent's after a fork: the child's copy of the descriptor is closed. A break
    sends a signal to the keeper's thread alone, which blocks it.
    """

    def __init__(self, path: str, *, excludes_readers: bool = False, once: bool = False) -> None:
        self.path = path
        self._kind = fcntl.F_WRLCK if excludes_readers else fcntl.F_RDLCK
        self._once = once
        self._turn = endings.Lock()
        self._leave: Callable[[], bool] | None = None
        self._changed: Callable[[StorageError | None], None] | None = None
        self._held = True
        self._retake_at = 0.0
        self._heard_by = 0  # the keeper's thread that gets a signal at a break
        self._fd = -1
        # Not blocking: another process's lease would make even an open for reading wait.
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._take()
        except BaseException:
            os.close(self._fd)
            self._fd = -1
            raise
        _keeper.know(self)

    @staticmethod
    def refusal(error: OSError) -> str:
        """Say why there is no lease."""
        number = error.errno or errno.EIO
        return _REFUSALS.get(number, os.strerror(number))

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of the file that is held, even if its path names another by now."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    @property
    def descriptor(self) -> int:
        """The open file. Any other that this process opens would break a write lease."""
        return self._fd

    @property
    def held(self) -> bool:
        """Whether no process waits for the file, or has had it since the lease was taken."""
        return self._held and fcntl.fcntl(self._fd, fcntl.F_GETLEASE) == self._kind

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._fd < 0

    def watch(
        self, leave: Callable[[], bool], changed: Callable[[StorageError | None], None]
    ) -> None:
        """Let the keeper answer breaks from now on.

        `leave` stops all reading in place, kernels' too, before it returns whether there was any;
        it runs in the keeper's thread, while the writer waits, and again at later breaks. `changed`
        is called after each break, and when the lease was taken again: the file may have other
        contents now. It gets an error if reads in place may have seen such a change.
        """
        self._leave, self._changed = leave, changed
        _keeper.start()

    def close(self) -> None:
        """Release the lease; all reading in place must have stopped. May be called twice."""
        with self._turn:
            if self._fd < 0:
                return
            self._unlock()
            os.close(self._fd)
            self._fd = -1
            self._leave = self._changed = None

    def __del__(self) -> None:
        # The lease ends with the last descriptor of the open file description.
        if self._fd >= 0:
            os.close(self._fd)

    # In the keeper's thread.

    def attend(self) -> float:
        """Answer a break, or ask for the lease again; return after how many seconds at the latest.

        Before that a signal tells the thread that calls if there is a break.
        """
        with self._turn:
            if self._fd < 0 or self._leave is None or self._changed is None:
                return _SWEEP_S
            if not self._held and not self._once and time.monotonic() >= self._retake_at:
                try:
                    self._take()
                except OSError:  # a process still writes it
                    self._retake_at = time.monotonic() + _RETAKE_S
                else:
                    self._held = True
                    self._changed(None)
            if not self._held:
                return _SWEEP_S if self._once else _RETAKE_S
            # First the signal, then the look: no break comes between them.
            is_told = self._tell_this_thread()
            if fcntl.fcntl(self._fd, fcntl.F_GETLEASE) != self._kind:
                self._break(self._leave, self._changed)
                return _RETAKE_S
            return _SWEEP_S if is_told else _POLL_S

    def _break(
        self, leave: Callable[[], bool], changed: Callable[[StorageError | None], None]
    ) -> None:
        begin = time.monotonic()
        failure: str | None = None
        was_in_place = True
        try:
            was_in_place = leave()
        except Exception as error:  # of the reader; the writer must not wait for it
            _log.exception("the pages of %s could not be left", self.path)
            failure = f"its pages could not be left: {error}"
        if not self._unlock() and was_in_place:
            failure = failure or "the system ended the lease before we had answered"
        self._held = False
        self._retake_at = time.monotonic() + _RETAKE_S
        _log.info(
            "%s is opened%s: its lease was given up after %.1f ms",
            self.path,
            " for writing" if self._kind == fcntl.F_RDLCK else "",
            1e3 * (time.monotonic() - begin),
        )
        lost = None
        if failure is not None:
            lost = StorageError(
                errno.ESTALE,
                "the file was written while it was read in place, so rows read since the last call "
                f"may be old or torn ({failure}); rows read from now on are not",
                self.path,
            )
        changed(lost)

    # The system calls.

    def _take(self) -> None:
        # A break signals the owner of the description, which F_SETLEASE makes the process, by
        # SIGIO, which ends it. Until the owner is nobody it is a signal that is ignored by default.
        self._heard_by = 0
        fcntl.fcntl(self._fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(self._fd, fcntl.F_SETLEASE, self._kind)
        fcntl.fcntl(self._fd, fcntl.F_SETOWN, 0)

    def _tell_this_thread(self) -> bool:
        """Let a break signal the calling thread; return whether it does."""
        thread = threading.get_native_id()
        if self._heard_by != thread:
            try:
                owner = struct.pack("ii", _F_OWNER_TID, thread)
                fcntl.fcntl(self._fd, _F_SETOWN_EX, owner)
                fcntl.fcntl(self._fd, fcntl.F_SETSIG, _BREAK)
            except OSError:
                return False
            self._heard_by = thread
        return True

    def _unlock(self) -> bool:
        """Release the lease; return whether it was ours until now."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    def _forget_in_child(self) -> None:
        """Close the child's descriptor, without ending the parent's lease."""
        self._turn = endings.Lock()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Keeper:
    """The thread that attends to all leases of the process, while there are any."""

    def __init__(self) -> None:
        self._lock = endings.Lock()
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._thread: endings.Thread | None = None
        self._waits = False  # whether the thread blocks the signals
        self._stop = endings.Event()
        os.register_at_fork(after_in_child=self._forget_in_child)
        endings.at_exit(self._end)

    def know(self, lease: Lease) -> None:
        with self._lock:
            self._leases.add(lease)

    def start(self) -> None:
        """Attend to the leases now, and from now on."""
        with self._lock:
            if self._stop.is_set():
                return
            if self._thread is None:
                # A daemon, which `_end` stops before the interpreter ends: writers are answered as
                # long as any thread of the program runs.
                self._thread = endings.Thread(self._run, "flashwarp leases")
                self._thread.start()
            elif self._waits:
                self._wake(self._thread)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._waits = True
        while (seconds := self._attend_all()) is not None:
            signal.sigtimedwait(_SIGNALS, seconds)

    def _attend_all(self) -> float | None:
        """Look at each lease; return after how many seconds again, if no signal comes.

        Returns None if there is no lease any more, or the program ends: then the thread ends, too.
        """
        with self._lock:
            leases = [lease for lease in self._leases if not lease.closed]
            if not leases or self._stop.is_set():
                self._thread, self._waits = None, False
                return None
        limits = [_SWEEP_S]
        for lease in leases:
            try:
                limits.append(lease.attend())
            except Exception:  # of one reader; the others' writers wait
                limits.append(_POLL_S)
                _log.exception("the lease on %s", lease.path)
        return min(limits)

    def _end(self) -> None:
        with self._lock:
            self._stop.set()
            thread = self._thread
            if thread is not None and self._waits:
                self._wake(thread)
        if thread is not None:
            thread.join(_STOP_S)

    @staticmethod
    def _wake(thread: endings.Thread) -> None:
        """Wake the thread, which blocks the signal by now, with the lock held: it has not ended."""
        if thread.ident is not None:
            signal.pthread_kill(thread.ident, _BREAK)

    def _forget_in_child(self) -> None:
        self._lock = endings.Lock()
        self._stop = endings.Event()
        self._thread, self._waits = None, False
        for lease in list(self._leases):
            lease._forget_in_child()


_keeper = _Keeper()
