"""The owner's end: accepts clients of this user, and answers each in a thread of its own.

The owner of a shared cache has one, and each process that can be asked for its counters.

It knows messages, and nothing of arrays: a `Session` answers. The death of a client ends its
connection, and with it its session. There is nothing else to recover, because clients only read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from flashwarp import config, endings
from flashwarp.errors import FlashwarpError, SharedCacheError
from flashwarp.sharing import messages, names
from flashwarp.sharing.messages import Message

_log = logging.getLogger(__name__)

CLIENTS_MAX = 64

# How long a client may take to say hello, and to take an answer off the socket.
_MANNERS_S = 10.0
_RETRY_S = 0.1

Answer: TypeAlias = tuple[dict[str, Any], tuple[int, ...]]
"""The body of an answer, and the descriptors that go with it."""


class Session(Protocol):
    """What one client has of the owner."""

    def greet(self) -> Answer:
        """Describe the cache to a client that has said hello."""

    def answer(self, request: Message) -> dict[str, Any]:
        """Do what a client asks; raises what the client gets as an error."""

    def close(self) -> None:
        """End it: the client has gone, or the listener is closed. Called once."""


class Listener:
    """Listens under a name until it is closed.

    Parameters
    ----------
    name : str
    lock : OwnerLock or None
        Of the name; released last.
    begin : callable
        Makes the session of a client, of which it gets the process.
    what : str, optional
        What clients come for, in messages. Default: the shared cache.
    """

    def __init__(
        self,
        name: str,
        lock: names.OwnerLock | None,
        begin: Callable[[int], Session],
        what: str = "",
    ) -> None:
        self.name = name
        self._what = what or f"the shared cache {name!r}"
        self._lock = lock
        self._begin = begin
        self._clients: dict[int, tuple[socket.socket, endings.Thread]] = {}
        self._guard = endings.Lock()
        self._closing = endings.Event()
        self._server = names.listen(name)
        _open.add(self)
        self._thread = endings.Thread(self._accept, f"flashwarp sharing {name}")
        self._thread.start()

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self._clients)

    def close(self) -> None:
        """End all sessions, and give the name free. May be called twice."""
        with self._guard:
            if self._closing.is_set():
                return
            self._closing.set()
            clients = list(self._clients.values())
        names.remove(self.name)
        for each in (self._server, *(client for client, _ in clients)):
            _shut(each)
        for thread in (self._thread, *(thread for _, thread in clients)):
            if thread is not threading.current_thread():
                thread.join(config.time_limit_s())  # of requests that are answered
        self._server.close()
        if self._lock is not None:
            self._lock.release()
        _open.discard(self)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._server.accept()
            except OSError:
                # Such as out of descriptors: others may end.
                if not self._closing.wait(_RETRY_S):
                    _log.warning("accepting clients of %s failed", self._what, exc_info=True)
                continue
            thread = endings.Thread(self._serve, "flashwarp sharing client", client)
            with self._guard:
                refused = self._closing.is_set() or len(self._clients) >= CLIENTS_MAX
                if not refused:
                    self._clients[id(client)] = client, thread
            if refused:
                why = f"the owner has {CLIENTS_MAX} clients already: close one"
                _refuse(client, SharedCacheError(why))
                client.close()
                continue
            try:
                thread.start()
            except RuntimeError as error:
                self._forget(client)
                _refuse(client, SharedCacheError(f"the owner can start no thread: {error}"))
                client.close()

    def _forget(self, client: socket.socket) -> None:
        with self._guard:
            self._clients.pop(id(client), None)

    def _serve(self, client: socket.socket) -> None:
        session: Session | None = None
        try:
            session = self._greet(client)
            client.settimeout(None)  # clients are idle for as long as they like
            while session is not None and self._answer(client, session):
                client.settimeout(None)
        except OSError as error:
            _log.info("a client of %s has gone: %s", self._what, error)
        except FlashwarpError as error:
            _log.warning("a client of %s is dismissed: %s", self._what, error)
            _refuse(client, error)
        finally:
            client.close()
            if session is not None:
                session.close()
            self._forget(client)  # last: `close` waits for those that are not forgotten

    def _greet(self, client: socket.socket) -> Session | None:
        client.settimeout(_MANNERS_S)
        pid, uid = messages.peer(client)
        if uid != os.geteuid():
            raise SharedCacheError(
                f"{self._what} belongs to user {os.geteuid()}, and the client is of user {uid}"
            )
        message = messages.receive(client)
        if message is None:
            return None
        message.close()
        messages.check_hello(message, "a client")
        session = self._begin(pid)
        try:
            body, descriptors = session.greet()
            messages.send(client, {**messages.hello(), **body}, descriptors=descriptors)
        except BaseException:
            session.close()
            raise
        return session

    def _answer(self, client: socket.socket, session: Session) -> bool:
        """Answer one request; returns False if the client has gone."""
        request = messages.receive(client)
        if request is None or self._closing.is_set():
            return False
        request.close()  # clients have nothing to send by descriptor
        try:
            body = session.answer(request)
        except FlashwarpError as error:
            body = messages.fail(error)
        except Exception as error:
            _log.exception("a request of a client of %s", self._what)
            body = messages.fail(error)
        client.settimeout(_MANNERS_S)
        messages.send(client, body)
        return True


def _refuse(client: socket.socket, why: FlashwarpError) -> None:
    with contextlib.suppress(OSError):
        client.settimeout(_MANNERS_S)
        messages.send(client, {**messages.hello(), **messages.fail(why)})


def _shut(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)


_open: weakref.WeakSet[Listener] = weakref.WeakSet()


@endings.at_exit
def _close_all() -> None:
    for each in list(_open):
        each.close()


def _leave_to_parent() -> None:
    """Close a child's copies of sockets, by which clients would not see its parent's death."""
    for each in list(_open):
        for client, _ in (*each._clients.values(), (each._server, None)):
            client.close()
    _open.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
