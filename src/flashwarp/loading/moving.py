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
from flashwarp.config import time_limit_s
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

# So many bytes are read and copied at a time: a tenth of a millisecond of Python's lock each. The
# first chunks are smaller, so that the copy engine begins at once.
_CHUNK_BYTES = 16 << 20
_FIRST_BYTES = 1 << 20
# There are no more buffers than keep the copy engine busy: to make and pin them takes time.
_THREADS_MAX = 3
# More take the memory's bandwidth from the copy engine; checksums need a core for as long again.
_CORES_MAX = 8
_CHECKING_CORES_MAX = 14
# Parts of a chunk: what a core copies at a time, a direct read, and how many of a thread are in
# flight, each followed by another as it ends. At the end of a chunk there are fewer, so more
# threads read past the page cache. A virtual disk gave less to more than twelve reads.
_COPY_BYTES = 1 << 20
_READ_BYTES = 1 << 20
_IN_FLIGHT = 2
_READERS_MAX = 4
_PAGE_BYTES = 4096
STAGING_BYTES_MIN = 2 * _PAGE_BYTES
"""Two buffers of a page."""
# Gaps between tensors up to this size are read with them.
_GAP_BYTES = 64 << 10
# Least share of a chunk that must be in the page cache for the rest to be read through it.
_RESIDENT = 0.5
_PROGRESS_S = 0.05
_COPY_PAUSE_S = 100e-6
# Chunks of checksums in these limits are those that cores copy; others are read once more.
_CHECKED_MIN, _CHECKED_MAX = 64 << 10, 4 << 20


@dataclass(frozen=True)
class Checks:
    """Checksums of what arrives from one file that is open.

    Attributes
    ----------
    fd : int
        The file, which is read whatever becomes of its name. Nothing asks whether it has changed:
        the checksums say so.
    chunk_bytes : int
        A checksum is of so many bytes of a tensor, the last of fewer. Each tensor begins on a page.
    put : callable
        Called by any thread with a tensor, a place in it and a number of bytes that have been read
        from there on, and the CRC-32C of each chunk of them. What it raises ends the load. On a GPU
        the bytes go to the tensor after it.
    """

    fd: int
    chunk_bytes: int
    put: Callable[[Content, int, int, NDArray[np.uint32]], None]


class _Piece(NamedTuple):
    """Bytes of one tensor in a chunk; without checks, also of tensors that continue it."""

    address: int
    offset: int
    nbytes: int
    content: Content


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
        self,
        path: str,
        stamp: files.Stamp | None,
        o_direct: bool | None,
        opened: contextlib.ExitStack,
        fd: int,
    ) -> None:
        self.path = path
        name = path if fd < 0 else f"/proc/self/fd/{fd}"
        self.fd = opened.enter_context(files.open_for_reading(name)).fileno()
        self._stamp = stamp
        nbytes = files.stamp(self.fd).nbytes
        self.direct_fd = -1
        # The open file under any name: another one may get its path.
        self._same = Path(f"/proc/self/fd/{self.fd}")
        self._mapping: FileMapping | None = None
        self._mapped: NDArray[np.uint8] | None = None
        self.check_unchanged()
        if nbytes and o_direct is not True:
            with contextlib.suppress(OSError, ValueError):
                self._mapping = FileMapping(self._same, nbytes)
                opened.callback(self._mapping.close)
                self._mapped = _view(self._mapping.address, nbytes)
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
        if self._stamp is None or now == self._stamp:
            return
        same = now[:2] == self._stamp[:2]
        raise StorageError(
            errno.ESTALE,
            "the file was " + ("written" if same else "replaced") + " while it was loaded, so the "
            "tensors may mix old and new bytes: load it again",
            self.path,
        )

    def read(
        self,
        gatherer: Gatherer,
        memory: NDArray[np.uint8],
        offset: int,
        nbytes: int,
        route: _Route,
        step: int = _COPY_BYTES,
        checksums: NDArray[np.uint32] | None = None,
    ) -> None:
        """Fill the first bytes of memory with those from `offset` on; blocks.

        For a direct read, memory and `offset` are aligned, and the memory has room for whole pages.
        From the page cache cores copy `step` bytes at a time, and make the checksum of each.
        """
        done = 0
        try:
            if route is _Route.MAPPED and self._mapped is not None:
                done = nbytes - nbytes % step
                places = _steps(offset, done, step)
                gatherer.gather(memory, self._mapped, places, step, checksums)
                if done < nbytes:
                    rest = memory[done:nbytes]
                    last = None if checksums is None else checksums[-1:]
                    gatherer.gather(rest, self._mapped, [offset + done], nbytes - done, last)
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
    checks: Checks | None = None,
    timeout_s: float | None = None,
) -> T:
    """Bring the bytes of tensors to their places; blocks until all have arrived.

    Returns what `meanwhile` returns, which is called while bytes arrive, and owns their memory.
    With `checks` all tensors are in one file. `timeout_s` limits the time without a byte; default
    `Config.timeout_s`.

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
        fd = -1 if checks is None else checks.fd
        sources = {
            path: _Source(path, None if checks else inside[0].stamp, o_direct, opened, fd)
            for path, inside in shards.items()
        }
        most = min(_CHUNK_BYTES, staging_bytes // 2 // _PAGE_BYTES * _PAGE_BYTES)
        chunks = [
            chunk
            for path, inside in shards.items()
            for chunk in _chunks(sources[path], inside, places, most, apart=checks is not None)
        ]
        streams = {places[each.name].stream for each in wanted}
        before = tuple(each for each in streams if each is not None)
        limit_s = time_limit_s(timeout_s)
        mover = _Mover(device, chunks, most, staging_bytes, before, checks, limit_s)
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
    source: _Source,
    inside: Iterable[Content],
    places: Mapping[str, Place],
    most: int,
    *,
    apart: bool,
) -> Iterator[_Chunk]:
    """Divide the bytes of a file's tensors into chunks that begin on pages.

    The first chunks are small. With `apart` a piece is of one tensor, and a large one begins a
    chunk.
    """
    chunk: _Chunk | None = None
    size = min(_FIRST_BYTES, most)
    for each in sorted(inside, key=lambda each: each.offset):
        at, end = each.offset, each.offset + each.nbytes
        address = places[each.name].address - at
        begins = apart and each.nbytes >= _COPY_BYTES
        while at < end:
            full = chunk is None or at >= chunk.begin + size or at > chunk.end + _GAP_BYTES
            if chunk is None or full or begins:
                if chunk is not None:
                    yield chunk
                    size = min(2 * size, most)
                begin = at - at % _PAGE_BYTES
                chunk = _Chunk(source, begin, begin)
            until = min(end, chunk.begin + size)
            _add(chunk.pieces, _Piece(address + at, at, until - at, each), apart=apart)
            chunk.end = at = until
            begins = False
    if chunk is not None:
        yield chunk


def _add(pieces: list[_Piece], piece: _Piece, *, apart: bool) -> None:
    """Append a piece, as a part of the last one if both sides continue it."""
    if pieces and (pieces[-1].content is piece.content or not apart):
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
        streams: tuple[object, ...],
        checks: Checks | None,
        limit_s: float,
    ) -> None:
        self._device = device
        self._chunks = deque(chunks)
        self._chunk_bytes = chunk_bytes
        self._streams = streams
        self._checks = checks
        self._total = sum(piece.nbytes for chunk in chunks for piece in chunk.pieces)
        self._engine = CopyEngine(device) if device.kind == "cuda" and chunks else None
        most = _CORES_MAX if checks is None else _CHECKING_CORES_MAX
        self._gatherer = Gatherer(min(most, config.cores()), _IN_FLIGHT)
        self._growing = endings.Lock()
        self._ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._done: list[int] = []
        self._limit_s = limit_s
        self._stuck: list[endings.Thread] = []
        threads = min(config.cores(), len(chunks), staging_bytes // (2 * chunk_bytes))
        self._readers = min(_READERS_MAX, threads)
        budget = max(self._readers, 1) * 2 * chunk_bytes
        self._buffers = TransferClient(device, "loads", budget, chunk_bytes)
        self._threads = [self._new_thread(i) for i in range(min(_THREADS_MAX, threads))]

    def run(self, progress: Progress, meanwhile: Callable[[], T]) -> T:
        """Start the threads and wait for them; raise what the first one failed with."""
        failure: BaseException | None = None
        try:
            for each in tuple(self._threads):  # which may start others
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
        ended = 0
        clock, seen = _waiting.Waited(), 0
        progress(0, self._total)
        while ended < len(self._threads):
            try:
                end = self._ends.get(timeout=_PROGRESS_S)
            except queue.Empty:
                pass
            else:
                if end is not None:
                    raise end
                ended += 1
            done = sum(self._done)
            progress(done, self._total)
            if done != seen:
                clock, seen = _waiting.Waited(), done
            if clock.look() >= self._limit_s:
                raise self._stalled(done)

    def _end(self) -> None:
        """End the threads, unless one is inside of a read that does not end."""
        with self._growing:
            self._readers = 0
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

    def _new_thread(self, number: int) -> endings.Thread:
        return endings.Thread(self._thread, f"flashwarp-load-{number}")

    # In the threads.

    def _read_with_more(self) -> None:
        """Start another thread, as the chunks come from a disk."""
        with self._growing:
            number = len(self._threads)
            if number >= self._readers or not self._chunks:
                return
            thread = self._new_thread(number)
            try:
                thread.start()
            except RuntimeError:  # the process has no thread left
                self._readers = number
            else:
                self._threads.append(thread)

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
            if route is _Route.DIRECT:
                self._read_with_more()
            elif self._engine is None:
                for piece in chunk.pieces:
                    target = _view(piece.address, piece.nbytes)
                    self._read(chunk, target, piece.offset, piece.nbytes, route, [piece])
                    self._done.append(piece.nbytes)
                continue
            buffer = self._buffers.take(timeout_s=self._limit_s)
            try:
                memory, nbytes = buffer.as_numpy(), chunk.end - chunk.begin
                self._read(chunk, memory, chunk.begin, nbytes, route, chunk.pieces)
                del memory  # it holds the buffer
                copies += self._deliver(chunk, buffer)
            finally:
                buffer.release()
            self._done.append(sum(piece.nbytes for piece in chunk.pieces))

    def _read(
        self,
        chunk: _Chunk,
        memory: NDArray[np.uint8],
        begin: int,
        nbytes: int,
        route: _Route,
        pieces: list[_Piece],
    ) -> None:
        """Fill the first bytes of memory with those from `begin` on, and check pieces of them."""
        checks, step, sums = self._checks, _COPY_BYTES, None
        if checks is not None and route is _Route.MAPPED:
            size, at = checks.chunk_bytes, begin - pieces[0].content.offset
            fits = pieces[0].nbytes == nbytes and at >= 0 and at % size == 0
            if fits and _CHECKED_MIN <= size <= _CHECKED_MAX:
                step, sums = size, np.empty(-(-nbytes // size), np.uint32)
        chunk.source.read(self._gatherer, memory, begin, nbytes, route, step, sums)
        if checks is None:
            return
        for piece in pieces:
            at = piece.offset - piece.content.offset
            found = sums
            if found is None:
                view = memory[piece.offset - begin :][: piece.nbytes].data
                size = checks.chunk_bytes
                made = _native.crc32c_chunks(view, size, size - at % size)
                found = np.frombuffer(made, np.uint32)
            checks.put(piece.content, at, piece.nbytes, found)

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
