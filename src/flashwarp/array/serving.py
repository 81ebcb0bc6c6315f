"""What the owner of a shared cache does for clients: opens files, and answers requests for lines.

Each client has a session, and memory for its requests, which both map: see `answering`. An array
that was opened for reading stays open when its last client has gone, so that the next program
starts warm. One that was opened for storing is flushed and closed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import os
import weakref
from typing import Any

import numpy as np

from flashwarp import endings
from flashwarp.array import handles, opening
from flashwarp.array.answering import Answering, Export, Readers
from flashwarp.array.array import Array
from flashwarp.cache.cache import Cache
from flashwarp.device import shared_memory
from flashwarp.errors import (
    CacheError,
    ClosedError,
    FlashwarpError,
    LockedError,
    PathError,
    SharedCacheError,
)
from flashwarp.nvme.queue_pair import Route
from flashwarp.nvme.software import SoftwareController
from flashwarp.sharing.listener import Answer
from flashwarp.sharing.messages import Message
from flashwarp.storage import File, files

_log = logging.getLogger(__name__)

_BYTES = np.dtype(np.uint8)
_NUMBERS = np.dtype("<i8")
_NUMBER_MAX = (1 << 64) - 1
_SIZE_MAX = (1 << 63) - 1
_OPENED_MAX = 64  # by one client


class Serving:
    """Answers the clients of one cache that this process owns."""

    def __init__(self, cache: Cache) -> None:
        # Weakly: a cache that its program has lost is closed, although its threads serve on.
        self._cache = weakref.ref(cache)
        self._exports: dict[tuple[int, int, int, int], Export] = {}
        self._lock = endings.Lock()
        self._readers: Readers | None = None

    def readers(self) -> Readers | None:
        """Return what reads files for clients on a GPU, from the first one on."""
        owner = self.cache._owner
        if self.cache.device.kind == "cpu" or owner is None or owner.facts is None:
            return None
        with self._lock:
            if self._readers is None:
                self._readers = Readers.of(self.cache.device, owner.facts)
            return self._readers

    def begin(self, pid: int) -> _Session:
        """Make the session of a client."""
        return _Session(self, pid)

    @property
    def cache(self) -> Cache:
        """The cache; raises SharedCacheError if its program has lost it."""
        found = self._cache()
        if found is None:
            raise SharedCacheError("the owner closes the shared cache")
        return found

    @property
    def opened(self) -> int:
        """How many arrays are open on behalf of clients. Waits for one that is being closed."""
        with self._lock:
            return sum(each.opened_here and not each.closed for each in self._exports.values())

    def take(self, request: Message) -> Export:
        """Return the array that a client asks for, with one user more."""
        path = request.text("path")
        offset = request.integer("offset", 0, _SIZE_MAX)
        nbytes = request.integer("nbytes", 1, _SIZE_MAX)
        device, inode = (request.integer(name, 0, _NUMBER_MAX) for name in ("device", "inode"))
        writable = request.integer("writable", 0, 1) == 1
        if not os.path.isabs(path):
            raise SharedCacheError(f"a client asks for {path!r}, no absolute path")
        with files.open_for_reading(path) as file:
            stamp = files.stamp(file.fileno())
        if stamp[:2] != (device, inode):
            raise SharedCacheError(
                f"{path} is another file in the owner's process than in the client's: both must "
                "see the same file systems"
            )
        with self._lock:
            export = self._find((device, inode, offset, nbytes), path, stamp, writable)
            export.users += 1
            return export

    def _find(
        self, key: tuple[int, int, int, int], path: str, stamp: files.Stamp, writable: bool
    ) -> Export:
        export = self._exports.get(key)
        if export is None or export.closed:
            found = self._own_array(key)
            export = None if found is None else Export(found, False, stamp)
        if export is not None and writable and not export.array.writable:
            if export.users or not export.opened_here:
                raise LockedError(
                    errno.EWOULDBLOCK,
                    "is open for reading in the shared cache: close it there first",
                    path,
                )
            self._end(key, export)
            export = None
        if export is None:
            export = Export(self._open(key, path, writable), True, stamp)
        elif export.stamp != stamp and not export.array.writable:
            export.array.refresh()  # somebody has written the file since it was opened
            export.stamp = stamp
        self._exports[key] = export
        return export

    def _own_array(self, key: tuple[int, int, int, int]) -> Array | None:
        """Find an array of this program on the cache, so that its lines are shared, too."""
        for array in handles.arrays():
            attachment = array.__dict__.get("_attachment")
            if attachment is None or attachment.closed or attachment.cache is not self.cache:
                continue
            storage, service = attachment.storage, attachment.launcher.service
            if not isinstance(storage, File) or service.route == "in_place" or service.leased:
                continue
            if (*storage.identity, storage.offset, storage.nbytes) == key:
                assert isinstance(array, Array)
                return array
        return None

    def _open(self, key: tuple[int, int, int, int], path: str, writable: bool) -> Array:
        _, _, offset, nbytes = key
        # Not in place: a client does not see that a lease has ended.
        route: Route | None = None if self.cache.device.kind == "cpu" else "bounce"
        opened = functools.partial(
            opening.open,
            path,
            "r+" if writable else "r",
            _BYTES,
            (nbytes,),
            offset=offset,
            cache=self.cache,
            controller=SoftwareController(route=route),
        )
        while True:
            try:
                return opened()
            except CacheError:
                # As many arrays as a cache carries: one that nobody uses makes room.
                idle = next(
                    (k for k, e in self._exports.items() if e.opened_here and not e.users), None
                )
                if idle is None:
                    raise
                self._end(idle, self._exports[idle])

    def release(self, export: Export) -> None:
        """Take one user off an array, whose stores are durable when this returns."""
        with self._lock:
            export.users -= 1
            if export.closed or not export.array.writable:
                return
            if export.users or not export.opened_here:
                export.array.flush()
                return
            # The next writer may be another program.
            self._end(next(k for k, e in self._exports.items() if e is export), export)

    def _end(self, key: tuple[int, int, int, int], export: Export) -> None:
        export.close()
        try:
            export.array.close()
        finally:
            del self._exports[key]

    def give_up(self, path: str) -> None:
        """Close a file that clients have read and none has open."""
        with contextlib.suppress(OSError), self._lock:
            status = os.stat(path)
            for key, export in list(self._exports.items()):
                idle = export.opened_here and not export.users
                if idle and key[:2] == (status.st_dev, status.st_ino):
                    self._end(key, export)

    def close(self) -> None:
        """Close what was opened for clients; no session is left."""
        failures = []
        readers, self._readers = self._readers, None
        if readers is not None:
            readers.close()
        with self._lock:
            for key, export in list(self._exports.items()):
                try:
                    if export.opened_here:
                        self._end(key, export)
                    else:
                        export.close()
                except FlashwarpError as error:
                    failures.append(error)
            self._exports.clear()
        if failures:
            raise failures[0]


class _Session:
    """One client: what it has open, and its requests."""

    def __init__(self, serving: Serving, pid: int) -> None:
        self._serving = serving
        self._pid = pid
        self._cache = serving.cache
        assert self._cache._owner is not None
        self._owner = self._cache._owner
        facts = self._owner.facts
        assert facts is not None
        self._opened: dict[int, Export] = {}
        self._numbers = itertools.count(1)
        self._descriptor, mapped = shared_memory.create(facts.requests_bytes, read_only=False)
        try:
            parts = facts, mapped, self._opened, serving.readers()
            self._answering = Answering(self._cache.device, *parts)
        except BaseException:
            os.close(self._descriptor)
            raise

    def greet(self) -> Answer:
        """Describe the cache."""
        return self._owner.greet(self._descriptor)

    def answer(self, request: Message) -> dict[str, Any]:
        """Do what the client asks."""
        asked = request.text("op", 16)
        if asked == "open":
            return self._open(request)
        number = request.integer("array", 1, _SIZE_MAX)
        export = self._opened.get(number)
        if export is None and asked == "close":
            return {}  # a signal has kept our first answer from it
        if export is None:
            raise SharedCacheError(f"the client has no array {number} open")
        if asked == "close":
            self._close(number)
        elif asked == "why":
            self._answering.raise_failure()
        elif asked == "flush":
            export.array.flush()
        elif asked == "refresh":
            export.array.refresh()
        elif asked == "drop":
            export.array.drop_cache(request.integer("dirty", 0, 1) == 1)
        elif asked == "stats":
            return {"stats": export.array.stats.as_dict()}
        else:
            raise SharedCacheError(f"there is no request {asked!r}")
        return {}

    def _open(self, request: Message) -> dict[str, Any]:
        if len(self._opened) >= _OPENED_MAX:
            raise SharedCacheError(f"a client has at most {_OPENED_MAX} arrays open: close one")
        export = self._serving.take(request)
        volume = export.array._attachment.launcher.volume
        number = next(self._numbers)
        # Before the look whether it is closed: an array that closes is marked first, and its line
        # numbers are free later.
        self._cache._lines_kept[self, number] = volume.line_begin, volume.line_count
        self._opened[number] = export
        if export.closed:
            self._close(number)
            raise ClosedError(f"the owner has just closed its array on {request.text('path')}")
        return {"array": number, "line_begin": volume.line_begin}

    def _close(self, number: int) -> None:
        export = self._opened.pop(number)
        del self._cache._lines_kept[self, number]
        self._serving.release(export)

    def close(self) -> None:
        """Give up what the client had open: it has closed its cache, or has died."""
        self._answering.close()
        for number, export in list(self._opened.items()):
            try:
                self._close(number)
            except (FlashwarpError, PathError) as error:
                _log.warning(
                    "closing %r, which process %d had open: %s", export.array, self._pid, error
                )
        os.close(self._descriptor)
