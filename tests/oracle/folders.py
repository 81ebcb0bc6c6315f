"""Where the files of programs lie."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

DISK = Path("/var/tmp")
"""A file system with O_DIRECT, as most are."""


@contextlib.contextmanager
def folders() -> Iterator[dict[str, Path]]:
    """Make folders for files: in memory, where a flush is quick, and on a disk."""
    shared = Path("/dev/shm")
    memory = shared if os.access(shared, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="oracle-", dir=memory) as quick,
        tempfile.TemporaryDirectory(prefix="oracle-", dir=DISK) as slow,
    ):
        yield {"memory": Path(quick), "disk": Path(slow)}
