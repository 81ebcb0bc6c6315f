"""Where a process can be asked for its counters: a socket in the folder of shared caches.

One thread waits in `accept`, which costs nothing, and only processes of the same user get an
answer. A process that is killed leaves its socket, which nobody listens to: the next process or the
next `flashwarp top` removes it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from flashwarp import config
from flashwarp.errors import FlashwarpError

_log = logging.getLogger(__name__)

_begun = False


class _Session:
    """Answers one who asks."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read

    def greet(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        return {}, ()

    def answer(self, _: object) -> dict[str, Any]:
        return self._read()

    def close(self) -> None:
        """Nothing to end."""


def begin(read: Callable[[], dict[str, Any]]) -> None:
    """Answer whoever asks this process, from now on; once a process.

    Without a folder for the socket, or threads, nobody can ask, and all else works.
    """
    global _begun
    if _begun:
        return
    _begun = True
    if not config.current("publish").publish:
        return
    try:
        # Most that the library imports is there by now, but a program may have given up the right
        # to read it.
        from flashwarp.sharing import names
        from flashwarp.sharing.listener import Listener

        mine = names.of_process(os.getpid())
        _sweep(mine)
        Listener(mine, None, lambda _: _Session(read), f"process {os.getpid()}")
    except (FlashwarpError, ImportError, OSError, RuntimeError) as error:
        _log.info("`flashwarp top` cannot see this process: %s", error)


def _sweep(mine: str) -> None:
    """Remove the sockets of processes that have died; their numbers count in our namespace only."""
    from flashwarp.sharing import names

    here = mine.rpartition("-")[0]
    for name in names.processes():
        namespace, _, pid = name.rpartition("-")
        if namespace == here and not os.path.exists(f"/proc/{pid}"):
            names.remove(name)


def _begin_anew() -> None:
    """A forked child has no thread that answers."""
    global _begun
    _begun = False


os.register_at_fork(after_in_child=_begin_anew)
