"""The disk itself: cold starts, and a ceiling to compare with.

The ceiling is measured with the contenders' block size, O_DIRECT and the asynchronous I/O of Linux
at a deep queue. No part of flashwarp takes part in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwarp.storage import npy
from flashwarp.storage.file import Mapping

RANDOM_DEPTH = 256
SEQUENTIAL_DEPTH = 8
SEQUENTIAL_BYTES = 1 << 20
_READ_BYTES = 8 << 20
_HUGE_PAGE_BYTES = 2 << 20
_WRITE_BYTES = 8 << 20
_WRITE_SECONDS = 2.0

# io_setup, io_destroy, io_getevents, io_submit: the C library has no wrappers for them.
_AIO_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}

# struct iocb and struct io_event of <linux/aio_abi.h>, little-endian.
_IOCB = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<i4"),
        ("opcode", "<u2"),
        ("priority", "<i2"),
        ("fd", "<u4"),
        ("buffer", "<u8"),
        ("nbytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("event_fd", "<u4"),
    ]
)
_IO_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])


@dataclass(frozen=True)
class DiskCeiling:
    """What the disk gave to reads that bypass everything; 0 where it could not be measured."""

    random_bytes: int
    random_reads_per_s: float
    sequential_gb_per_s: float
    note: str

    @property
    def random_gb_per_s(self) -> float:
        """The random reads as a bandwidth."""
        return self.random_reads_per_s * self.random_bytes / 1e9


def create_npy(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Write the header of a .npy file whose data starts on a page; return its offset.

    The file gets its full size at once, as a hole, so that parts can be written in any order.
    """
    layout = npy.empty_layout(shape, dtype)
    with path.open("wb") as file:
        npy.write_empty(file.fileno(), layout)
    return layout.offset


def drop_page_cache(path: Path) -> None:
    """Write the file back and drop its clean pages, so that the next reader starts cold.

    Pages that a process has mapped stay: close every mapping of the file first. If a sandbox
    refuses the call, all stay; `resident_fraction` reports how many.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_page_cache(path: Path) -> None:
    """Read the whole file through the page cache, so that the next reader starts warm."""
    with path.open("rb", buffering=0) as file:
        scratch = bytearray(_READ_BYTES)
        while file.readinto(scratch):
            pass


def resident_fraction(path: Path) -> float | None:
    """The part of the file that is in the page cache now; None if a sandbox hides it."""
    return residency(path)[0]


def residency(path: Path) -> tuple[float | None, str]:
    """As `resident_fraction`, and how the system was asked (see `Mapping.residency`)."""
    with contextlib.closing(Mapping(path, path.stat().st_size)) as mapping:
        try:
            return mapping.residency(), mapping.asked_by
        except OSError as error:
            return None, f"{mapping.asked_by}, and mincore: {error.strerror}"


def direct_reads_work(path: Path) -> bool:
    """Whether the file system lets this file be opened with O_DIRECT (some tmpfs do not)."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def measure_ceiling(path: Path, random_bytes: int, seconds: float = 1.0) -> DiskCeiling:
    """Measure random reads of `random_bytes` and sequential reads of 1 MiB, `seconds` each."""
    if not direct_reads_work(path):
        return DiskCeiling(random_bytes, 0.0, 0.0, "not measured: no O_DIRECT on this file system")
    if path.stat().st_size < max(random_bytes, SEQUENTIAL_BYTES):
        return DiskCeiling(random_bytes, 0.0, 0.0, "not measured: the file is less than one read")
    try:
        random = _reads_per_s(path, random_bytes, RANDOM_DEPTH, seconds, sequential=False)
        sequential = _reads_per_s(
            path, SEQUENTIAL_BYTES, SEQUENTIAL_DEPTH, seconds, sequential=True
        )
    except (OSError, NotImplementedError) as error:
        return DiskCeiling(random_bytes, 0.0, 0.0, f"not measured: {error}")
    note = f"O_DIRECT, Linux AIO, depth {RANDOM_DEPTH} random and {SEQUENTIAL_DEPTH} sequential"
    return DiskCeiling(random_bytes, random, sequential * SEQUENTIAL_BYTES / 1e9, note)


def measure_writes(file: Path, size: int) -> tuple[int, float]:
    """Write for a while, at most `size` bytes, past the page cache; return bytes and bytes/s."""
    try:
        fd = os.open(file, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        fd = os.open(file, os.O_WRONLY)
    # Random, so that no compression or deduplication on the way makes the disk look faster. An
    # anonymous mapping is page-aligned, which is all that O_DIRECT can ask of memory.
    chunk = mmap.mmap(-1, _WRITE_BYTES)
    chunk.write(np.random.default_rng().bytes(_WRITE_BYTES))
    written = 0
    try:
        start = time.perf_counter()
        while written + len(chunk) <= size and time.perf_counter() - start < _WRITE_SECONDS:
            written += os.write(fd, chunk)
        os.fdatasync(fd)
        return written, written / (time.perf_counter() - start)
    finally:
        os.close(fd)


def read_blocks(
    path: Path, blocks: NDArray[np.int64], nbytes: int, depth: int
) -> NDArray[np.uint8]:
    """Read blocks of `nbytes` past the page cache, `depth` at a time; return them back to back.

    Raises OSError where a disk or its file system refuses.
    """
    into = np.frombuffer(mmap.mmap(-1, max(len(blocks), 1) * nbytes), dtype=np.uint8)
    with _Queue(path, nbytes, depth) as queue:
        free, begun = queue.slots, 0
        while begun < len(blocks) or len(free) < depth:
            slots = free[: len(blocks) - begun]
            numbers = np.arange(begun, begun + len(slots))
            queue.submit(slots, blocks[numbers], into.ctypes.data + numbers * nbytes)
            begun += len(slots)
            busy = depth - len(free) + len(slots)
            free = np.concatenate((free[len(slots) :], queue.ended(min(busy, max(1, depth // 4)))))
    return into[: len(blocks) * nbytes]


def _reads_per_s(path: Path, nbytes: int, depth: int, seconds: float, sequential: bool) -> float:
    blocks = path.stat().st_size // nbytes
    # An anonymous mapping is page-aligned, which is all that O_DIRECT can ask of memory. Of huge
    # pages, so that the memory does not divide what the disk can take as one request.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(depth * nbytes, _HUGE_PAGE_BYTES), flags=flags)
    memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, dtype=np.uint8)
    random = np.random.default_rng(0)
    done, position = 0, 0
    with _Queue(path, nbytes, depth) as queue:
        free = queue.slots
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            if sequential:
                block = (position + np.arange(len(free))) % blocks
                position += len(free)
            else:
                block = random.integers(0, blocks, len(free))
            queue.submit(free, block, buffer.ctypes.data + free * nbytes)
            # A quarter of the queue at a time, for fewer calls; the disk never runs dry.
            free = queue.ended(max(1, depth // 4))
            done += len(free)
    return done / elapsed


class _Queue:
    """Reads of one size from a file by the asynchronous I/O of Linux."""

    def __init__(self, path: Path, nbytes: int, depth: int) -> None:
        if platform.machine() not in _AIO_CALLS:
            raise NotImplementedError(f"no Linux AIO call numbers for {platform.machine()}")
        self._path, self._nbytes, self._depth = path, nbytes, depth
        self.slots = np.arange(depth, dtype=np.int64)
        self._commands = np.zeros(depth, _IOCB)
        self._commands["data"] = self.slots
        self._commands["nbytes"] = nbytes
        self._addresses = self._commands.ctypes.data + self.slots * _IOCB.itemsize
        self._events = np.zeros(depth, _IO_EVENT)
        self._context = ctypes.c_ulong(0)
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> _Queue:
        setup, destroy, *_ = _AIO_CALLS[platform.machine()]
        with contextlib.ExitStack() as undo:
            fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
            undo.callback(os.close, fd)
            self._commands["fd"] = fd
            _system_call(setup, ctypes.c_long(self._depth), ctypes.byref(self._context))
            undo.callback(_system_call, destroy, self._context)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def submit(
        self, slots: NDArray[np.int64], blocks: NDArray[np.int64], addresses: NDArray[np.int64]
    ) -> None:
        """Start a read of each block to its address, in slots that are free."""
        if not len(slots):
            return
        self._commands["offset"][slots] = blocks * self._nbytes
        self._commands["buffer"][slots] = addresses
        pointers = self._addresses[slots]
        _system_call(
            _AIO_CALLS[platform.machine()][3],
            self._context,
            ctypes.c_long(len(slots)),
            ctypes.c_void_p(pointers.ctypes.data),
        )

    def ended(self, least: int) -> NDArray[np.int64]:
        """Wait until some reads have ended; return their slots."""
        count = _system_call(
            _AIO_CALLS[platform.machine()][2],
            self._context,
            ctypes.c_long(least),
            ctypes.c_long(self._depth),
            ctypes.c_void_p(self._events.ctypes.data),
            None,
        )
        results = self._events["result"][:count]
        if (results != self._nbytes).any():
            bad = int(results[results != self._nbytes][0])
            raise OSError(
                -bad if bad < 0 else errno.EIO, f"read of {self._nbytes} bytes returned {bad}"
            )
        return self._events["data"][:count].astype(np.int64)


def _system_call(number: int, *arguments: Any) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    while (result := int(libc.syscall(ctypes.c_long(number), *arguments))) < 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result
