"""Processes that are ranks of one folder, for tests: each runs a function of a test's module."""

from __future__ import annotations

import atexit
import os
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np

from flashwarp.checkpoint.checkpointer import Checkpointer
from support.forks import server

WAIT_S = 100.0
COUNT = 4096


class Ranks:
    """Runs `act(rank, folder, tell, *arguments)` in a process for each rank.

    `tell(thing)` passes what a rank has seen to `heard`. The end of the ``with`` statement kills
    what still runs.
    """

    def __init__(self, ranks: int, act: Callable[..., None], folder: Path, *arguments: Any) -> None:
        self._act = act
        self._arguments = arguments
        self._folder = folder
        # One for each process: a lock that they shared would stay locked if one is killed in it.
        self._ends: list[Any] = []
        self.processes = {rank: self.start(rank) for rank in range(ranks)}

    def start(self, rank: int) -> Any:
        ours, theirs = server().Pipe(duplex=False)
        process = server().Process(
            target=_rank,
            args=(rank, theirs, {**os.environ}, self._act, self._folder, self._arguments),
        )
        process.start()
        theirs.close()
        self._ends.append(ours)
        return process

    def heard(self, count: int) -> dict[int, Any]:
        """Return what so many ranks have told next, or raise what one has failed with."""
        found: dict[int, Any] = {}
        while len(found) < count:
            ready = connection.wait(self._ends, WAIT_S)
            assert ready, f"{count} ranks should tell, and only did: {found}"
            for end in ready[: count - len(found)]:
                try:
                    rank, thing, problem = end.recv()
                except EOFError:  # it has ended
                    self._ends.remove(end)
                    continue
                assert not problem, f"rank {rank}:\n{problem}"
                found[rank] = thing
        return found

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for process in self.processes.values():
            if kind is None:
                process.join(WAIT_S)
            if process.exitcode is None:
                process.kill()
                process.join()
        for end in self._ends:
            end.close()


def _rank(
    rank: int, end: Any, environment: dict[str, str], act: Any, folder: Path, arguments: Any
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        act(rank, folder, lambda thing: end.send((rank, thing, "")), *arguments)
    except BaseException:
        end.send((rank, None, traceback.format_exc()))
    # A process that was forked ends without this.
    atexit._run_exitfuncs()


def opened(folder: Path, rank: int, ranks: int, **config: Any) -> Checkpointer:
    config = {"ranks": ranks, "timeout_s": 30, "retry_s": 0.05, **config}
    return Checkpointer(folder, "cpu", "256 KiB", "1 MiB", rank=rank, config=config)


def content(rank: int, version: int) -> np.ndarray[Any, Any]:
    return np.full(COUNT, 1000.0 * version + rank)
