"""What the owner of a shared cache does for clients: opens files, hands lines over, takes rows.

Each client has a session and a *stage*, memory that both map, in which lines go to the client and
rows come from it. An array that was opened for reading stays open when its last client has gone, so
that the next program starts warm. One that was opened for storing is flushed and closed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from flashwarp import endings
from flashwarp.array import handles, opening
from flashwarp.array.array import Array
from flashwarp.cache.cache import Cache
from flashwarp.device import shared_memory
from flashwarp.errors import (
    BoundsError,
    CacheError,
    ClosedError,
    FlashwarpError,
    LockedError,
    PathError,
    ReadOnlyError,
    SharedCacheError,
)
from flashwarp.launch.launcher import Launcher
from flashwarp.launch.operands import Index
from flashwarp.launch.rows import RowFormat
from flashwarp.nvme.queue_pair import Route
from flashwarp.nvme.software import SoftwareController
from flashwarp.sharing.listener import Answer
from flashwarp.sharing.messages import ITEMS_MAX, Message
from flashwarp.storage import File, files

_log = logging.getLogger(__name__)

_BYTES = np.dtype(np.uint8)
_NUMBERS = np.dtype("<i8")
_NUMBER_MAX = (1 << 64) - 1
_SIZE_MAX = (1 << 63) - 1
_OPENED_MAX = 64  # by one client

# Launches on one array that are kept prepared, by the size of their rows.
_WIDTHS_MAX = 16


class _Export:
    """An array of the owner's that clients read."""

    def __init__(self, array: Array, opened_here: bool, stamp: files.Stamp) -> None:
        self.array = array
        self.opened_here = opened_here
        self.stamp = stamp
        self.users = 0
        self._attachment = array._attachment
        self._launchers: dict[int, Launcher] = {}
        self.nbytes = array._attachment.storage.nbytes

    @property
    def closed(self) -> bool:
        return self._attachment.closed

    def act(self, act: Callable[[], None]) -> None:
        """Act in the turn of the array's cache; raises what the array's kernels have noted."""
        self.array._turns.act(act)

    def move(self, verb: str, row_bytes: int, chosen: range | Index, buffer: int) -> None:
        """Launch, in the array's turn, the moving of rows of so many bytes, and wait."""
        launcher = self._launcher(row_bytes)
        if verb == "prefetch":
            launcher.prefetch(chosen)
        elif verb == "gather":
            if launcher.on_cpu:
                # Other clients want the lines, too, and a large gather would leave few.
                launcher.prefetch(chosen)
            launcher.move("gather", chosen, buffer)
        else:
            launcher.move("scatter", chosen, buffer)
        self._attachment.finish("a request of a client", None)

    def _launcher(self, row_bytes: int) -> Launcher:
        found = self._launchers.get(row_bytes)
        if found is None:
            if len(self._launchers) >= _WIDTHS_MAX:
                self.let_go()
            own = self._attachment.launcher
            rows = RowFormat(_BYTES, (self.nbytes // row_bytes, row_bytes))
            found = self._launchers[row_bytes] = Launcher(own.volume, own.service, rows)
            found.order = own.order
        return found

    def let_go(self) -> None:
        """Hold nothing for launches any more."""
        for each in self._launchers.values():
            each.let_go()
        self._launchers.clear()


class Serving:
    """Answers the clients of one cache that this process owns."""

    def __init__(self, cache: Cache) -> None:
        # Weakly: a cache that its program has lost is closed, although its threads serve on.
        self._cache = weakref.ref(cache)
        self._exports: dict[tuple[int, int, int, int], _Export] = {}
        self._lock = endings.Lock()

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

    def take(self, request: Message) -> _Export:
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
    ) -> _Export:
        export = self._exports.get(key)
        if export is None or export.closed:
            found = self._own_array(key)
            export = None if found is None else _Export(found, False, stamp)
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
            export = _Export(self._open(key, path, writable), True, stamp)
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

    def release(self, export: _Export) -> None:
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

    def _end(self, key: tuple[int, int, int, int], export: _Export) -> None:
        export.let_go()
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
        with self._lock:
            for key, export in list(self._exports.items()):
                try:
                    if export.opened_here:
                        self._end(key, export)
                    else:
                        export.let_go()
                except FlashwarpError as error:
                    failures.append(error)
            self._exports.clear()
        if failures:
            raise failures[0]


class _Session:
    """One client: what it has open, and its stage."""

    def __init__(self, serving: Serving, pid: int) -> None:
        self._serving = serving
        self._pid = pid
        self._cache = serving.cache
        self._device = serving.cache.device
        assert self._cache._owner is not None
        self._owner = self._cache._owner
        assert self._owner.facts is not None
        self._facts = self._owner.facts
        # On a GPU, where rows pass through: the kernels do not reach the stage.
        self._buffer = None
        if self._device.kind != "cpu":
            self._buffer = self._device.allocate(self._facts.stage_bytes)
        self._stage_descriptor, _, self._stage = shared_memory.create(
            self._facts.stage_bytes, read_only=False
        )
        self._bytes = np.frombuffer(self._stage.owner, _BYTES)
        self._opened: dict[int, _Export] = {}
        self._numbers = itertools.count(1)

    def greet(self) -> Answer:
        """Describe the cache."""
        return self._owner.greet(self._stage_descriptor)

    def answer(self, request: Message) -> dict[str, Any]:
        """Do what the client asks."""
        asked = request.text("op", 16)
        if asked == "open":
            return self._open(request)
        number = request.integer("array", 1, _SIZE_MAX)
        export = self._opened.get(number)
        if export is None:
            raise SharedCacheError(f"the client has no array {number} open")
        if asked == "close":
            del self._opened[number]
            self._serving.release(export)
        elif asked == "read":
            self._read(export, request)
        elif asked in ("scatter", "prefetch"):
            self._move(asked, export, request)
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
        # Before the look whether it is closed: an array that closes is marked first, then its epoch
        # is raised. A later epoch would let the client read who has the line numbers next.
        epoch = self._cache._epochs[volume.slot]
        if export.closed:
            self._serving.release(export)
            raise ClosedError(f"the owner has just closed its array on {request.text('path')}")
        number = next(self._numbers)
        self._opened[number] = export
        return {
            "array": number,
            "line_begin": volume.line_begin,
            "slot": volume.slot,
            "epoch": epoch,
        }

    def _numbers_of(self, request: Message, below: int) -> npt.NDArray[np.int64]:
        """Return the rows or lines that a request names, all of which exist."""
        if len(request.payload) % 8 or not 8 <= len(request.payload) <= 8 * ITEMS_MAX:
            raise SharedCacheError(
                f"a request names rows by {len(request.payload)} bytes, not 1 to {ITEMS_MAX} "
                "numbers of 8 bytes"
            )
        found = np.frombuffer(request.payload, _NUMBERS).astype(np.int64)
        if found.min() < 0 or found.max() >= below:
            bad = found[(found < 0) | (found >= below)][0]
            raise BoundsError(f"a client asks for {bad} of {below} rows or lines")
        return found

    def _index(self, numbers: npt.NDArray[np.int64]) -> Index:
        if self._device.kind == "cpu":
            return Index(numbers.ctypes.data, numbers.shape, 8, "numpy", numbers)
        copy = self._device.empty_array(numbers.shape, np.int64)
        self._device.upload(copy.address, numbers)
        return Index(copy.address, numbers.shape, 8, "numpy", copy, held=copy)

    def _read(self, export: _Export, request: Message) -> None:
        """Bring lines into the cache, and hand them over in the stage, back to back, if asked."""
        hand = request.integer("hand", 0, 1) == 1
        line = self._cache.line_bytes
        whole, rest = divmod(export.nbytes, line)
        lines = self._numbers_of(request, whole + (rest != 0))
        if len(lines) > self._facts.lines_at_once or (np.diff(lines) <= 0).any():
            raise SharedCacheError(
                f"a request for {len(lines)} lines, of which at most {self._facts.lines_at_once} "
                "are handed over at once, each once and in their order"
            )
        full = lines[lines < whole]
        buffer = self._stage.address if self._buffer is None else self._buffer.address

        def move() -> None:
            if len(full):
                export.move("gather", line, self._index(full), buffer)
            if len(full) != len(lines):
                last = range(whole * line, export.nbytes)
                export.move("gather", 1, last, buffer + len(full) * line)
            if self._buffer is not None and hand:
                self._device.download_into(buffer, self._bytes[: len(lines) * line])

        export.act(move)

    def _move(self, verb: str, export: _Export, request: Message) -> None:
        """Store rows out of the stage, or prefetch rows: by number, or a range of bytes."""
        if verb == "scatter" and not export.array.writable:
            raise ReadOnlyError('the array is read-only: open it with mode="r+"')
        row_bytes = request.integer("row_bytes", 1, export.nbytes)
        chosen: range | npt.NDArray[np.int64]
        if request.payload:
            chosen = self._numbers_of(request, export.nbytes // row_bytes)
        else:
            first = request.integer("first", 0, export.nbytes // row_bytes)
            count = request.integer("count", 1, export.nbytes // row_bytes - first)
            if verb == "prefetch":  # more would evict itself, while others wait
                count = min(count, self._cache.capacity // row_bytes)
            chosen = range(first, first + count)
        nbytes = len(chosen) * row_bytes
        if verb == "scatter" and nbytes > self._facts.stage_bytes:
            raise SharedCacheError(
                f"a request stores {nbytes} bytes, of which the stage holds "
                f"{self._facts.stage_bytes}"
            )
        buffer = self._stage.address if self._buffer is None else self._buffer.address

        def move() -> None:
            if self._buffer is not None and verb == "scatter":
                self._device.upload(buffer, self._bytes[:nbytes])
            index = chosen if isinstance(chosen, range) else self._index(chosen)
            export.move(verb, row_bytes, index, buffer)

        export.act(move)

    def close(self) -> None:
        """Give up what the client had open: it has closed its cache, or has died."""
        for export in self._opened.values():
            try:
                self._serving.release(export)
            except (FlashwarpError, PathError) as error:
                _log.warning(
                    "closing %r, which process %d had open: %s", export.array, self._pid, error
                )
        self._opened.clear()
        os.close(self._stage_descriptor)
        if self._buffer is not None:
            self._buffer.close()
