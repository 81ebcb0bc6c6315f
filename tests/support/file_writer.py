"""A process that rewrites a file which others read: for tests of leases, on every device."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROWS, COLUMNS = 2048, 64  # 1 MiB; a row is the eighth of a line
ADDED = 1_000_000
# A writer waits for a poll of the keeper, 10 ms, and for its turn on a busy machine.
OPEN_S_MAX = 5.0

# Rewrites a .npy file with ADDED added to all elements, and prints how long its open took.
WRITER = textwrap.dedent("""
    import mmap, os, sys, time
    import numpy as np
    path, how, added = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with open(path, "rb") as file:
        body = bytearray(file.read())
    start = len(body) % 4096 or 128
    values = np.frombuffer(body, np.int64, offset=128)
    values += added
    begin = time.monotonic()
    flags = {"truncate": os.O_TRUNC, "direct": os.O_DIRECT, "write": 0}[how]
    fd = os.open(path, os.O_WRONLY | flags)
    print(time.monotonic() - begin, flush=True)
    room = mmap.mmap(-1, len(body))  # aligned, as O_DIRECT wants it
    room[:] = bytes(body)
    for at in range(0, len(body), 1 << 16):
        piece = memoryview(room)[at : at + (1 << 16)]
        if how == "direct" and len(piece) % 4096:
            os.close(fd)
            fd = os.open(path, os.O_WRONLY)
        os.pwrite(fd, piece, at)
        piece.release()
    os.close(fd)
""")


def rows() -> npt.NDArray[np.int64]:
    return np.arange(ROWS * COLUMNS, dtype=np.int64).reshape(ROWS, COLUMNS)


def start_writer(path: Path, how: str = "write", added: int = ADDED) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), how, str(added)],
        stdout=subprocess.PIPE,
        text=True,
    )


def end_writer(writer: subprocess.Popen[str]) -> float:
    """Seconds that its open took."""
    output, _ = writer.communicate(timeout=60)
    assert writer.returncode == 0
    return float(output)


def rewrite(path: Path, how: str = "write", added: int = ADDED) -> float:
    return end_writer(start_writer(path, how, added))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)
