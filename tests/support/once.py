"""What takes long to make, made once for all processes of a run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` has filled; others wait while the first one makes it."""
    base = factory.getbasetemp()
    # Beside the folders of the processes of pytest-xdist.
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = root / name
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            new = root / f"{name}.new"
            new.mkdir()
            make(new)
            new.rename(folder)
    return folder
