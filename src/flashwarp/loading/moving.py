"""Bytes from files to tensors: threads read chunks, and the copy engine takes them on.

There are two pinned buffers for each thread: it reads into one while the other is copied. So
reading, copying and the disk overlap, and the host memory in use is that of the buffers. A thread
that waits for a buffer has released its last one. A `Gatherer` does the work
of the threads: it copies from the page cache by several cores, and has several direct reads in
flight. The pages themselves are not registered for the copy engine: each end of a registration
waits for all work on the GPU, and a load took twice as long. On the CPU device what is in the page
cache is read straight into the tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from flashwarp import _native, _waiting, config, endings
from flashwarp.device import Device
from flashwarp.errors import StorageError
from flashwarp.loading.contents import Content
from flashwarp.loading.places import Place
from flashwarp.storage import files
from flashwarp.storage.file import Mapping as FileMapping
from flashwarp.storage.progress import Progress
from flashwarp.transfer import (
    Copy,
    CopyEngine,
    Direction,
    Gatherer,
    TransferBuffer,
    TransferClient,
)

T = TypeVar("T")

# So many bytes are read and copied at a time: a tenth of a millisecond of Python's lock each.
# There are no more buffers than keep the copy engine busy: to make and pin them takes time.
_CHUNK_BYTES = 16 << 20
_THREADS_MAX = 3
# More take the memory's bandwidth from the copy engine.
_CORES_MAX = 8
# Parts of a chunk: what a core copies at a time, a direct read, and how many of a thread are in
# flight, each followed by another as it ends. A virtual disk gave less to more.
_COPY_BYTES = 1 << 20
_READ_BYTES = 1 << 20
_IN_FLIGHT = 4
_PAGE_BYTES = 4096
STAGING_BYTES_MIN = 2 * _PAGE_BYTES
"""Two buffers of a page."""
# Gaps between tensors up to this size are read with them.
_GAP_BYTES = 64 << 10
# Least share of a chunk that must be in the page cache for the rest to be read through it.
_RESIDENT = 0.5
_PROGRESS_S = 0.05
_COPY_PAUSE_S = 100e-6


class _Piece(NamedTuple):
    """Bytes of one tensor in a chunk."""

    address: int
    offset: int
    nbytes: int


@dataclass
class _Chunk:
    """Bytes [begin, end) of a file, and the tensors' pieces in them."""

    source: _Source
    begin: int
    end: int
    pieces: list[_Piece] = field(default_factory=list)


class _Source:
    """An open file: through the page cache, and past it if that is possible."""

    def __init__(
        self, path: str, stamp: files.Stamp, o_direct: bool | None, opened: contextlib.ExitStack
    ) -> None:
        self.path = path
        self._stamp = stamp
        self.fd = opened.enter_context(files.open_for_reading(path)).fileno()
        self.direct_fd = -1
        # The open file under any name: another one may get its path.
        self._same = Path(f"/proc/self/fd/{self.fd}")
        self._mapping: FileMapping | None = None
        self._mapped: NDArray[np.uint8] | None = None
        self.check_unchanged()
        if stamp.nbytes and o_direct is not True:
            with contextlib.suppress(OSError, ValueError):
                self._mapping = FileMapping(self._same, stamp.nbytes)
                opened.callback(self._mapping.close)
                self._mapped = _view(self._mapping.address, stamp.nbytes)
        if o_direct is False:
            return
        alignment = _native.direct_io_alignment(str(self._same))
        if isinstance(alignment, str) or max(alignment) > _PAGE_BYTES:
            if o_direct:
                raise files.path_error(
                    OSError(errno.EINVAL, f"cannot be read with O_DIRECT: {alignment}"),
                    path,
                    writable=False,
                )
            return
        self.direct_fd = os.open(self._same, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        opened.callback(os.close, self.direct_fd)
        # Chunks are read in any order, which the kernel would take for the begin of a stream.
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def route(self, begin: int, end: int) -> _Route:
        """Choose how bytes are to be read."""
        share = 0.0
        if self._mapping is not None:
            try:
                share = self._mapping.residency(begin, end)
            except OSError:  # a sandbox may refuse to tell
                return _Route.BUFFERED
        if share == 1:
            return _Route.MAPPED
        return _Route.BUFFERED if self.direct_fd < 0 or share >= _RESIDENT else _Route.DIRECT

    def check_unchanged(self) -> None:
        """Raise StorageError if the file was written or replaced since its header was read."""
        now = files.stamp(self.fd)
        if now == self._stamp:
            return
        same = now[:2] == self._stamp[:2]
        raise StorageError(
            errno.ESTALE,
            "the file was " + ("written" if same else "replaced") + " while it was loaded, so the "
            "tensors may mix old and new bytes: load it again",
            self.path,
        )

    def read(
        self, gatherer: Gatherer, memory: NDArray[np.uint8], offset: int, nbytes: int, route: _Route
    ) -> None:
        """Fill the first bytes of memory with those from `offset` on; blocks.

        For a direct read, memory and `offset` are aligned, and the memory has room for whole pages.
        """
        done = 0
        try:
            if route is _Route.MAPPED and self._mapped is not None:
                done = nbytes - nbytes % _COPY_BYTES
                gatherer.gather(
                    memory, self._mapped, _steps(offset, done, _COPY_BYTES), _COPY_BYTES
                )
                if done < nbytes:
                    rest = memory[done:nbytes]
                    gatherer.gather(rest, self._mapped, [offset + done], nbytes - done)
                return
            if route is _Route.DIRECT:
                whole = nbytes - nbytes % _READ_BYTES
                steps = _steps(offset, whole, _READ_BYTES)
                gatherer.read(memory, self.direct_fd, steps, _READ_BYTES)
                done = whole
        except StorageError as error:
            # EFAULT: a page of the mapping is gone.
            if error.errno in (errno.EFAULT, errno.ENODATA):
                raise self._cut(error.offset or offset) from error
            why = error.strerror or str(error)
            raise StorageError(
                error.errno or errno.EIO, why, self.path, offset=error.offset
            ) from error
        # Past the page cache go whole pages only.
        whole = nbytes - nbytes % _PAGE_BYTES if route is _Route.DIRECT else done
        self._read_on(self.direct_fd, memory[done:whole], offset + done)
        self._read_on(self.fd, memory[whole:nbytes], offset + whole)

    def _read_on(self, fd: int, memory: NDArray[np.uint8], offset: int) -> None:
        """Fill memory by blocking calls."""
        try:
            moved = _native.read_file(fd, offset, memory)
        except OSError as error:
            number = error.errno or errno.EIO
            at = getattr(error, "offset", offset)
            why = f"read: {os.strerror(number)}"
            raise StorageError(number, why, self.path, offset=at) from error
        if moved < memory.nbytes:
            raise self._cut(offset + moved)

    def _cut(self, offset: int) -> StorageError:
        return StorageError(
            errno.ENODATA,
            "the file ends before its tensors do: it was cut while it was loaded",
            self.path,
            offset=offset,
        )


class _Route(enum.Enum):
    """How bytes of a file are read."""

    MAPPED = "copied from the page cache"
    BUFFERED = "read through the page cache"
    DIRECT = "read past the page cache"


def _steps(begin: int, nbytes: int, step: int) -> NDArray[np.int64]:
    return np.arange(begin, begin + nbytes, step, dtype=np.int64)


def move(
    contents: Iterable[Content],
    places: Mapping[str, Place],
    device: Device,
    *,
    o_direct: bool | None,
    staging_bytes: int,
    progress: Progress,
    meanwhile: Callable[[], T],
) -> T:
    """Bring the bytes of tensors to their places; blocks until all have arrived.

    Returns what `meanwhile` returns, which is called while bytes arrive, and owns their memory.

    Raises
    ------
    StorageError
        A read failed, did not end in time, or the file was changed meanwhile. The tensors then hold
        any bytes.
    DeviceError, DeviceOutOfMemory
    """
    wanted = [each for each in contents if each.nbytes]
    with contextlib.ExitStack() as opened:
        opened.callback(_nothing, meanwhile)  # a read that does not end still writes there
        shards: dict[str, list[Content]] = {}
        for each in wanted:
            shards.setdefault(each.path, []).append(each)
        sources = {
            path: _Source(path, inside[0].stamp, o_direct, opened)
            for path, inside in shards.items()
        }
        most = min(_CHUNK_BYTES, staging_bytes // 2 // _PAGE_BYTES * _PAGE_BYTES)
        chunks = [
            chunk
            for path, inside in shards.items()
            for chunk in _chunks(sources[path], inside, places, most)
        ]
        streams = {places[each.name].stream for each in wanted}
        before = tuple(each for each in streams if each is not None)
        mover = _Mover(device, chunks, most, staging_bytes, before)
        try:
            result = mover.run(progress, meanwhile)
        except BaseException:
            mover.leave(opened)
            raise
        for source in sources.values():
            source.check_unchanged()
        return result


def _nothing(_: object) -> None:
    pass


def _chunks(
    source: _Source, inside: Iterable[Content], places: Mapping[str, Place], most: int
) -> Iterator[_Chunk]:
    """Divide the bytes of a file's tensors into chunks that begin on pages."""
    chunk: _Chunk | None = None
    for each in sorted(inside, key=lambda each: each.offset):
        at, end = each.offset, each.offset + each.nbytes
        address = places[each.name].address - at
        while at < end:
            if chunk is None or at >= chunk.begin + most or at > chunk.end + _GAP_BYTES:
                if chunk is not None:
                    yield chunk
                begin = at - at % _PAGE_BYTES
                chunk = _Chunk(source, begin, begin)
            until = min(end, chunk.begin + most)
            _add(chunk.pieces, _Piece(address + at, at, until - at))
            chunk.end = at = until
    if chunk is not None:
        yield chunk


def _add(pieces: list[_Piece], piece: _Piece) -> None:
    """Append a piece, as a part of the last one if both sides continue it."""
    if pieces:
        last = pieces[-1]
        ends = last.address + last.nbytes, last.offset + last.nbytes
        if ends == (piece.address, piece.offset):
            pieces[-1] = last._replace(nbytes=last.nbytes + piece.nbytes)
            return
    pieces.append(piece)


class _Mover:
    """The threads of one load."""

    def __init__(
        self,
        device: Device,
        chunks: list[_Chunk],
        chunk_bytes: int,
        staging_bytes: int,
        streams: tuple[int, ...],
    ) -> None:
        self._device = device
        self._chunks = deque(chunks)
        self._chunk_bytes = chunk_bytes
        self._streams = streams
        self._total = sum(piece.nbytes for chunk in chunks for piece in chunk.pieces)
        self._engine = CopyEngine(device) if device.kind == "cuda" and chunks else None
        self._gatherer = Gatherer(min(_CORES_MAX, config.cores()), _IN_FLIGHT)
        self._ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._done: list[int] = []
        self._limit_s = config.current().timeout_s
        self._stuck: list[endings.Thread] = []
        count = min(_THREADS_MAX, config.cores(), len(chunks), staging_bytes // (2 * chunk_bytes))
        budget = max(count, 1) * 2 * chunk_bytes
        self._buffers = TransferClient(device, "loads", budget, chunk_bytes)
        self._threads = [endings.Thread(self._thread, f"flashwarp-load-{i}") for i in range(count)]

    def run(self, progress: Progress, meanwhile: Callable[[], T]) -> T:
        """Start the threads and wait for them; raise what the first one failed with."""
        failure: BaseException | None = None
        try:
            for each in self._threads:
                each.start()
            result = meanwhile()
            self._collect(progress)
        except BaseException as error:  # Ctrl-C too: what runs must end before its memory is freed
            failure = error
        endings.uninterrupted(self._end)
        if failure is not None:
            raise failure
        return result

    def _collect(self, progress: Progress) -> None:
        """Wait until all threads have ended, or one has failed."""
        running = len(self._threads)
        clock, seen = _waiting.Waited(), 0
        progress(0, self._total)
        while running:
            try:
                end = self._ends.get(timeout=_PROGRESS_S)
            except queue.Empty:
                pass
            else:
                if end is not None:
                    raise end
                running -= 1
            done = sum(self._done)
            progress(done, self._total)
            if done != seen:
                clock, seen = _waiting.Waited(), done
            if clock.look() >= self._limit_s:
                raise self._stalled(done)

    def _end(self) -> None:
        """End the threads, unless one is inside of a read that does not end."""
        self._chunks.clear()
        started = [each for each in self._threads if each.ident is not None]
        clock = _waiting.Waited()
        while any(each.is_alive() for each in started) and clock.look() < self._limit_s:
            time.sleep(_COPY_PAUSE_S)
        self._stuck = [each for each in started if each.is_alive()]
        if self._stuck:
            return
        self._gatherer.close()
        if self._engine is not None:
            self._engine.close()
        self._buffers.close()

    def leave(self, opened: contextlib.ExitStack) -> None:
        """If a thread is inside of a read that does not end, close the files after it."""
        if self._stuck:
            kept = opened.pop_all()

            def close() -> None:
                for each in self._stuck:
                    each.join()
                self._end()
                kept.close()

            endings.Thread(close, "flashwarp-load-close").start()

    def _stalled(self, done: int) -> StorageError:
        return StorageError(
            errno.ETIMEDOUT,
            f"no bytes have arrived for {self._limit_s:g} s, after {done} of {self._total}: the "
            "storage does not answer, or is slower than FLASHWARP_TIMEOUT_S allows",
        )

    # In the threads.

    def _thread(self) -> None:
        copies: deque[Copy] = deque()
        end: BaseException | None = None
        try:
            self._work(copies)
        except BaseException as error:
            end = error
        while copies:
            try:
                copies.popleft().wait(self._limit_s)
            except BaseException as error:
                end = end or error
        self._ends.put(end)

    def _work(self, copies: deque[Copy]) -> None:
        while True:
            while copies and copies[0].over():
                copies.popleft().wait(0)
            try:
                chunk = self._chunks.popleft()
            except IndexError:
                return
            route = chunk.source.route(chunk.begin, chunk.end)
            if self._engine is None and route is not _Route.DIRECT:
                for piece in chunk.pieces:
                    target = _view(piece.address, piece.nbytes)
                    chunk.source.read(self._gatherer, target, piece.offset, piece.nbytes, route)
                    self._done.append(piece.nbytes)
                continue
            buffer = self._buffers.take(timeout_s=self._limit_s)
            try:
                nbytes = chunk.end - chunk.begin
                chunk.source.read(self._gatherer, buffer.as_numpy(), chunk.begin, nbytes, route)
                copies += self._deliver(chunk, buffer)
            finally:
                buffer.release()
            self._done.append(sum(piece.nbytes for piece in chunk.pieces))

    def _deliver(self, chunk: _Chunk, buffer: TransferBuffer) -> list[Copy]:
        targets = [piece.address for piece in chunk.pieces]
        begin = buffer.address - chunk.begin
        sources = [begin + piece.offset for piece in chunk.pieces]
        sizes = [piece.nbytes for piece in chunk.pieces]
        if self._engine is None:
            for target, source, nbytes in zip(targets, sources, sizes, strict=True):
                ctypes.memmove(target, source, nbytes)
            return []
        copy = self._engine.copy_pieces(
            targets, sources, sizes, after=self._streams, direction=Direction.TO_DEVICE
        )
        buffer.joins(copy)
        return [copy]


def _view(address: int, nbytes: int) -> NDArray[np.uint8]:
    """View memory that the caller keeps allocated."""
    held: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(held, np.uint8)
