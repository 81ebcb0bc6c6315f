"""Host memory that several processes map: an anonymous file each, sealed so that none can cut it.

A mapping of a file that is cut kills the process that touches it. The seals forbid that, and for
memory that clients only read they also forbid every later mapping or write that could change it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

from flashwarp import _native
from flashwarp.device import host_memory
from flashwarp.errors import DeviceError, DeviceOutOfMemory, SharedCacheError

# Of linux/fcntl.h; fcntl has the last one from Python 3.13 on.
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEAL_FUTURE_WRITE = 0x0010

HUGE_PAGE_BYTES = 2 << 20


class Mapped(NamedTuple):
    """Memory that is mapped here: whoever holds `owner` keeps it mapped."""

    owner: _native.HostMemory
    address: int
    nbytes: int


def create(nbytes: int, *, read_only: bool) -> tuple[int, Mapped]:
    """Make memory of zeros, and map it for reading and writing.

    If it is `read_only`, nobody but this mapping may ever change it. Returns the descriptor that
    other processes map it by, which the caller closes; and the mapping, which a forked child does
    not have.
    """
    descriptor = -1
    try:
        descriptor = os.memfd_create("flashwarp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes)
        mapped = _map(descriptor, nbytes, writable=True)
        seals = _SEALS | (_SEAL_FUTURE_WRITE if read_only else 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        # A child could otherwise change what its parent's clients read.
        mapped.owner.keep_from_children()
    except BaseException as error:
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(error, OSError | RuntimeError | MemoryError | TypeError | OverflowError):
            raise DeviceOutOfMemory(
                f"{nbytes} bytes of memory to share cannot be had: {error} (Linux 5.1 or newer is "
                "needed)"
            ) from error
        raise
    return descriptor, mapped


def map_memory(descriptor: int, nbytes: int, *, writable: bool) -> Mapped:
    """Map memory that another process has made; raises SharedCacheError if it is no such memory."""
    try:
        status = os.fstat(descriptor)
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise SharedCacheError(f"the owner sent a descriptor of no memory: {error}") from None
    if not stat.S_ISREG(status.st_mode) or status.st_size < nbytes or seals & _SEALS != _SEALS:
        raise SharedCacheError(
            f"the owner sent {status.st_size} bytes of memory with the seals {seals:#x}, not "
            f"{nbytes} that nobody can cut"
        )
    try:
        return _map(descriptor, nbytes, writable=writable)
    except (RuntimeError, MemoryError, TypeError) as error:
        raise DeviceError(f"mapping {nbytes} bytes of the owner's memory: {error}") from error


def _map(descriptor: int, nbytes: int, *, writable: bool) -> Mapped:
    alignment = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else mmap.PAGESIZE
    owner = _native.HostMemory(nbytes, alignment, descriptor, writable)
    return Mapped(owner, owner.address, nbytes)


def take_huge_pages(owners: Sequence[object], nbytes: int) -> None:
    """Take huge pages for all of the memory that `owners` keep mapped, while they do.

    At the first access Linux takes small ones for such memory by default. Does nothing if that
    took more than three quarters of the memory that the system has left.
    """
    if host_memory.available_bytes() * 3 // 4 < nbytes:
        return
    for begin in range(0, nbytes - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
        # EAGAIN and EBUSY are of a page that is in use right now.
        owner = next(iter(owners), None)
        if not isinstance(owner, _native.HostMemory):
            return
        if owner.take_huge_page(begin) not in (0, errno.EAGAIN, errno.EBUSY):
            return
