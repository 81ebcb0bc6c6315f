"""Namespaces of the guest's drives that hold what a test wants."""

from __future__ import annotations

import os
from pathlib import Path


def fill(device: Path, content: bytes) -> None:
    """Write `content` to the front of a namespace, by the kernel's block device."""
    with device.open("r+b", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())


def contents(device: Path, nbytes: int) -> bytes:
    """Return what is on the drive, not what the page cache has."""
    with device.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read(nbytes)
