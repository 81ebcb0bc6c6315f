"""A client's end: one request at a time, each with a time limit, and looks whether the owner lives.

The owner's death shows in two ways: its socket closes, and its process descriptor becomes readable.
A hit asks the owner for nothing, so every call looks at its end: what it returns was read while the
owner lived. Kernels that wait for the owner cannot look, so a thread does for them.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from flashwarp import config, endings
from flashwarp.errors import ForkError, OwnerLostError, SharedCacheError
from flashwarp.sharing import messages, names
from flashwarp.sharing.messages import Message

# Longer than any request may take in the owner, whose own waits end first: see `limit_s`.
_LIMITS = 1.25


def limit_s() -> float:
    """Return how long a request may take: the owner's waits take at most one time limit."""
    return _LIMITS * config.time_limit_s()


class Connection:
    """A connection to the owner of a name. Any thread may ask.

    Attributes
    ----------
    hello : Message
        What the owner has said of the cache; its descriptors are the caller's to take.
    owner_pid : int
        The owner's process; 0 if this one cannot see it.
    signs : list of tuple of int
        Descriptors, and events of each, that show that the owner has gone, or is taken for gone.
    """

    def __init__(self, name: str, client: socket.socket) -> None:
        self.hello: Message
        self.name = name
        self._socket = client
        self._guard = endings.Lock()
        self._lost = ""
        self._hung_up = False
        self._closed = False
        self._pid = os.getpid()
        self._process = -1
        self.signs = [(client.fileno(), 0)]  # of a hang-up alone
        self._end = -1  # a pipe whose other end ends the thread that watches
        self._watched: list[int] = []

    @classmethod
    def to(cls, name: str) -> Connection | None:
        """Connect to the owner of a name; returns None if there is none, it dies or is busy.

        Raises
        ------
        SharedCacheError
            If the owner is of another user or version, or refuses.
        OwnerLostError
            If it does not answer.
        """
        try:
            client = names.reach(name)
        except BlockingIOError:  # there is one, which is busy: the caller tries again
            return None
        if client is None:
            return None
        made = cls(name, client)
        try:
            made.hello = made._greet()
        except BaseException as error:
            made.close()
            if isinstance(error, OwnerLostError) and made._hung_up:
                return None
            raise
        _open.add(made)
        return made

    def _greet(self) -> Message:
        self.owner_pid, uid = messages.peer(self._socket)
        if uid != os.geteuid():
            raise SharedCacheError(
                f"the cache {self.name!r} belongs to user {uid}, and this process runs as "
                f"{os.geteuid()}"
            )
        if self.owner_pid:
            with contextlib.suppress(OSError):  # dead already: its socket says so, too
                self._process = os.pidfd_open(self.owner_pid)
                self.signs.append((self._process, select.POLLIN))
        message = self._exchange(messages.hello(), b"")
        try:
            if "error" in message.body and "cache" not in message.body:
                raise messages.error_of(message)
            messages.check_hello(message, f"the owner of {self.name!r}")
        except BaseException:
            message.close()
            raise
        return message

    def ask(self, body: dict[str, Any], payload: bytes = b"") -> Message:
        """Send a request and return the answer; raises the error that the owner answers with.

        Raises
        ------
        OwnerLostError
            If the owner has gone, or does not answer within 2.5 time limits of commands. Then
            every later request fails, because a late answer would pass for another's.
        """
        message = self._exchange(body, payload)
        message.close()
        if "error" in message.body:
            raise messages.error_of(message)
        return message

    def _exchange(self, body: dict[str, Any], payload: bytes) -> Message:
        """Send a message and return the answer; a signal waits, for as long as an answer may take.

        In between it would leave a connection that nobody can use, and descriptors to nobody.
        """
        return endings.uninterrupted(partial(self._exchange_now, body, payload))

    def _exchange_now(self, body: dict[str, Any], payload: bytes) -> Message:
        with self._guard:
            self.check()
            limit = limit_s()
            try:
                self._socket.settimeout(limit)
                messages.send(self._socket, body, payload)
                message = messages.receive(self._socket)
            except TimeoutError:
                self._lose(f"has not answered for {limit:g} s")
            except OSError as error:
                self._hang_up(f" ({error})")
            except BaseException:  # such as an interrupt, with an answer on its way
                self._take_for_gone("was left in the middle of a request")
                raise
        if message is None:
            self._hang_up()
        return message

    def check(self) -> None:
        """Raise OwnerLostError if the owner is known to be gone. Takes two microseconds."""
        if os.getpid() != self._pid:
            raise ForkError(
                f"the shared cache {self.name!r} was opened by process {self._pid}: a forked "
                "child must open it itself"
            )
        if self._lost:
            self._lose(self._lost)
        if self._closed:
            raise OwnerLostError(f"the shared cache {self.name!r} is closed")
        look = select.poll()  # of this thread: two cannot use one at a time
        for descriptor, events in self.signs:
            look.register(descriptor, events)
        if look.poll(0):
            self._hang_up()

    def watch(self, lose: weakref.WeakMethod[Callable[[], None]]) -> None:
        """Call `lose` in another thread once the owner has gone, unless `close` comes first."""
        # Descriptors of the thread's own: nobody waits for it, who might be the interpreter's end.
        ended, self._end = os.pipe()
        watched = [ended, os.dup(self._socket.fileno())]
        if self._process >= 0:
            watched.append(os.dup(self._process))
        self._watched = watched
        endings.Thread(_watch, "flashwarp sharing owner", watched, lose).start()

    def give_up(self, waited_s: float) -> None:
        """Take the owner for gone, because it has not answered a kernel in so many seconds."""
        self._take_for_gone(f"has not answered for {waited_s:g} s")

    def _take_for_gone(self, how: str) -> None:
        self._lost = self._lost or how
        # Shows in the signs, which is all that short calls look at.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _hang_up(self, why: str = "") -> NoReturn:
        self._hung_up = True
        self._lose(f"has gone{why}")

    def _lose(self, how: str) -> NoReturn:
        self._take_for_gone(how)
        who = f" (process {self.owner_pid})" if self.owner_pid else ""
        raise OwnerLostError(
            f"the owner{who} of the shared cache {self.name!r} {how}: what was flushed is in the "
            "files; close the arrays and the cache, and open them again"
        )

    def close(self) -> None:
        """Leave the owner. May be called twice."""
        self._closed = True
        end, self._end = self._end, -1
        if end >= 0:
            os.close(end)
        if os.getpid() != self._pid:
            while self._watched:  # copies, without their thread
                os.close(self._watched.pop())
        elif end >= 0:
            with contextlib.suppress(OSError):  # it has gone already
                self._socket.shutdown(socket.SHUT_RDWR)  # the thread may have it for a while
        self._socket.close()
        process, self._process = self._process, -1
        if process >= 0:
            os.close(process)

    def __del__(self) -> None:
        self.close()


def _watch(watched: list[int], lose: weakref.WeakMethod[Callable[[], None]]) -> None:
    ended, connection, *process = watched
    poll = select.poll()
    for each in (ended, connection):
        poll.register(each, 0)  # of a hang-up alone
    for each in process:
        poll.register(each, select.POLLIN)
    gone = all(descriptor != ended for descriptor, _ in poll.poll())
    call = lose() if gone else None
    if call is not None:
        call()
    while watched:
        os.close(watched.pop())


_open: weakref.WeakSet[Connection] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close a child's copies, by which the owner would not see its parent's death."""
    for each in list(_open):
        each.close()


os.register_at_fork(after_in_child=_leave_to_parent)
