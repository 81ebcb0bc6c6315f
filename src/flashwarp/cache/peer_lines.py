"""Which line numbers a storage has in a cache that GPUs share, for arrays of one or many processes.

The process that made the cache keeps the numbers. Others ask it, each over a connection; the end of
a connection is the end of its process, whose numbers are taken back then.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from flashwarp import endings
from flashwarp.cache.volume_table import free_lines
from flashwarp.errors import ClosedError, SharedCacheError
from flashwarp.sharing.connection import Connection
from flashwarp.sharing.listener import Answer
from flashwarp.sharing.messages import Message
from flashwarp.storage import File, Memory, Namespace, files

_NUMBERS = range(1 << 37)
_KEY_MAX = 512
_private = itertools.count()


class Lines(Protocol):
    """The line numbers of all storages."""

    def take(self, key: str, count: int) -> int:
        """Return the first number of a storage, for one array more."""

    def begin_to_leave(self, begin: int) -> bool:
        """Note that an array with these numbers is being closed.

        Returns whether it was the last: then it empties the lines. Nobody else gets the numbers
        before `leave`.
        """

    def leave(self, begin: int) -> None:
        """Let others have the numbers, unless another array has them by now."""

    def close(self) -> None:
        """Give no more numbers."""


def identity(storage: Namespace) -> str:
    """Return a key that storages of the same bytes share; any other storage has its own."""
    if isinstance(storage, File):
        return f"file {files.stamp(storage.native.fd)} {storage.offset} {storage.nbytes}"
    if isinstance(storage, Memory):
        return f"memory {os.getpid()} {storage.address} {storage.nbytes}"
    return f"other {os.getpid()} {next(_private)}"


@dataclass
class _Taken:
    """The numbers of one storage, and how many arrays have them."""

    begin: int
    count: int
    users: int = 0
    kept: bool = False
    """Whether a process that had them died: its lines are still there, so no other gets them."""


class OwnLines:
    """The numbers of lines of so many bytes, in the process that made the cache."""

    def __init__(self, line_bytes: int) -> None:
        self._line_bytes = line_bytes
        self._closed = False
        self._lock = endings.Lock()
        self._taken: dict[str, _Taken] = {}
        self._died = 0

    def take(self, key: str, count: int) -> int:
        """See `Lines`; raises SharedCacheError once a process has died in the use of the cache."""
        with self._lock:
            if self._closed:
                raise ClosedError("the cache is closed")
            if self._died:
                raise SharedCacheError(
                    f"process {self._died} ended while it used the cache, and may have left lines "
                    "locked: close the cache in all processes, then they make it anew"
                )
            found = self._taken.get(key)
            if found is None:
                taken = [(each.begin, each.count) for each in self._taken.values()]
                begin = free_lines(count, self._line_bytes, taken, _NUMBERS)
                found = self._taken[key] = _Taken(begin, count)
            found.users += 1
            return found.begin

    def begin_to_leave(self, begin: int) -> bool:
        """See `Lines`."""
        with self._lock:
            for each in self._taken.values():
                if each.begin == begin:
                    each.users -= 1
                    return each.users == 0
        return True

    def leave(self, begin: int) -> None:
        """See `Lines`."""
        with self._lock:
            for key, each in list(self._taken.items()):
                if each.begin == begin and each.users == 0 and not each.kept:
                    del self._taken[key]

    def close(self) -> None:
        """See `Lines`."""
        self._closed = True

    def lose(self, pid: int, held: Counter[int]) -> None:
        """Note that a process died that had these numbers so many times."""
        with self._lock:
            self._died = pid
            for each in self._taken.values():
                each.users -= held[each.begin]
                each.kept = each.kept or held[each.begin] > 0


class LineSession:
    """What one process has of the numbers, in the process that keeps them."""

    def __init__(self, lines: OwnLines, pid: int, hello: Callable[[], Answer]) -> None:
        self._lines, self._pid, self._hello = lines, pid, hello
        self._held: Counter[int] = Counter()

    def greet(self) -> Answer:
        """Describe the cache."""
        return self._hello()

    def answer(self, request: Message) -> dict[str, Any]:
        """Do for a process what its `AskedLines` asks."""
        what = request.text("do")
        if what == "take":
            count = request.integer("count", 1, _NUMBERS.stop)
            begin = self._lines.take(request.text("key", _KEY_MAX), count)
            self._held[begin] += 1
            return {"begin": begin}
        begin = request.integer("begin", 0, _NUMBERS.stop)
        if what == "begin_to_leave" and self._held[begin]:
            self._held[begin] -= 1
            return {"last": self._lines.begin_to_leave(begin)}
        if what == "leave":
            self._lines.leave(begin)
            return {}
        raise SharedCacheError(f"a process asks to {what} the lines from {begin}")

    def close(self) -> None:
        """Note that the process has died, if it has not given all numbers back."""
        held = +self._held
        if held:
            self._lines.lose(self._pid, held)


class AskedLines:
    """The numbers, in a process that asks for them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def take(self, key: str, count: int) -> int:
        """See `Lines`; raises OwnerLostError if who keeps the numbers has gone."""
        answer = self._connection.ask({"do": "take", "key": key, "count": count})
        return answer.integer("begin", 0, _NUMBERS.stop)

    def begin_to_leave(self, begin: int) -> bool:
        """See `Lines`. Where nobody keeps the numbers, no line is emptied: others may read it."""
        with contextlib.suppress(SharedCacheError):
            answer = self._connection.ask({"do": "begin_to_leave", "begin": begin})
            return answer.body.get("last") is True
        return False

    def leave(self, begin: int) -> None:
        """See `Lines`."""
        with contextlib.suppress(SharedCacheError):
            self._connection.ask({"do": "leave", "begin": begin})

    def close(self) -> None:
        """See `Lines`; the connection ends with the cache."""
