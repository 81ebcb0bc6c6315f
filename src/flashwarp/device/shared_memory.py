"""Host memory that several processes map: an anonymous file each, sealed so that none can cut it.

A mapping of a file that is cut kills the process that touches it. The seals forbid that, and for
memory that clients only read they also forbid every later mapping or write that could change it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
from typing import NamedTuple

import numpy as np

from flashwarp.errors import DeviceError, DeviceOutOfMemory, SharedCacheError

# Of linux/fcntl.h; fcntl has the last one from Python 3.13 on.
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEAL_FUTURE_WRITE = 0x0010


class Mapped(NamedTuple):
    """Memory that is mapped here: whoever holds `owner` keeps it mapped."""

    owner: mmap.mmap
    address: int
    nbytes: int


def create(
    nbytes: int, *, read_only: bool, alignment: int = mmap.PAGESIZE
) -> tuple[int, int, Mapped]:
    """Make memory of zeros, and map it for reading and writing, at a multiple of `alignment`.

    If it is `read_only`, nobody but this mapping may ever change it. Returns the descriptor that
    other processes map it by, which the caller closes; where the memory begins in the file; and the
    mapping, which a forked child does not have.
    """
    slack = alignment if alignment > mmap.PAGESIZE else 0  # pages that nobody touches
    descriptor = -1
    try:
        descriptor = os.memfd_create("flashwarp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes + slack)
        mapped = _map(descriptor, nbytes + slack, writable=True)
        seals = _SEALS | (_SEAL_FUTURE_WRITE if read_only else 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        # A child could otherwise change what its parent's clients read.
        mapped.owner.madvise(mmap.MADV_DONTFORK)
    except BaseException as error:
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(error, OSError | ValueError | OverflowError):
            raise DeviceOutOfMemory(
                f"{nbytes} bytes of memory to share cannot be had: {error} (Linux 5.1 or newer is "
                "needed)"
            ) from error
        raise
    offset = -mapped.address % alignment
    return descriptor, offset, Mapped(mapped.owner, mapped.address + offset, nbytes)


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
    except (OSError, ValueError) as error:
        raise DeviceError(f"mapping {nbytes} bytes of the owner's memory: {error}") from error


def _map(descriptor: int, nbytes: int, *, writable: bool) -> Mapped:
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    owner = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, access)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        # Taken where /sys/kernel/mm/transparent_hugepage/shmem_enabled says "advise".
        owner.madvise(mmap.MADV_HUGEPAGE)
    return Mapped(owner, np.frombuffer(owner, np.uint8).ctypes.data, nbytes)
