"""Measuring in a process that has less memory, so that files need not be large to exceed it.

A memory control group below the present one is made for it, where this user may: the limit counts
the process and what the page cache holds for it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flashwarp.errors import FlashwarpError

__all__ = ["events_of", "small_group"]

_REMOVE_S = 5.0


@contextlib.contextmanager
def small_group(nbytes: int) -> Iterator[Path | None]:
    """Make a control group with so much memory, and remove it again; None where that is refused."""
    place = _own_group() / f"flashwarp-bench-{os.getpid()}"
    try:
        place.mkdir()
    except OSError:
        yield None
        return
    try:
        yield place if _limit(place, nbytes) else None
    finally:
        _remove(place)


def _own_group() -> Path:
    root = Path("/sys/fs/cgroup")
    for entry in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, name = entry.split(":", 2)
        if controllers == "memory":
            return root / "memory" / name.lstrip("/")
        if not controllers and (root / "cgroup.controllers").exists():
            return root / name.lstrip("/")
    return root


def _limit(place: Path, nbytes: int) -> bool:
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError):
            if (place / name).exists():
                (place / name).write_text(str(nbytes))
                return True
    return False


def _remove(place: Path) -> None:
    """Remove the group, which the kernel may hold busy for a moment after its last process."""
    deadline = time.monotonic() + _REMOVE_S
    while True:
        try:
            place.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def events_of(
    call: Callable[..., Iterator[Any]], arguments: tuple[Any, ...], group: Path | None
) -> Generator[Any]:
    """Yield what the generator `call` yields in a process of its own, a member of `group`."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(there, call, arguments, group))
    process.start()
    there.close()
    try:
        while True:
            try:
                kind, value = here.recv()
            except EOFError:
                process.join()
                raise FlashwarpError(
                    f"the process that measures ended with code {process.exitcode}: -9 is what the "
                    "kernel does when its memory is too small"
                ) from None
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value
    finally:
        here.close()
        process.terminate()
        process.join()


def _run(
    there: Connection,
    call: Callable[..., Iterator[Any]],
    arguments: tuple[Any, ...],
    group: Path | None,
) -> None:
    try:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        for value in call(*arguments):
            there.send(("event", value))
        there.send(("end", None))
    except Exception as error:  # raised again where the events are read
        there.send(("error", error))
