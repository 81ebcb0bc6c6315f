"""Ranks for tests of sharded arrays: processes that are started once and run many functions.

They come from a server that has imported torch, so that the start of a process takes milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

WAIT_S = 100.0
MOST = 4

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "flashwarp.distributed", "pytest"])


class Pool:
    """Processes of one program of torch.distributed.

    `run` calls ``act(rank, group, *arguments)`` on the first ranks, whose group it passes.
    """

    def __init__(self, folder: Path, count: int = MOST) -> None:
        self.count = count
        self.processes: list[Any] = []
        self._ends: list[Any] = []
        os.environ["OMP_NUM_THREADS"] = "1"
        store = str(folder / f"store-{os.urandom(4).hex()}")
        for rank in range(count):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(rank, count, store, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._ends.append(ours)

    def start(self, ranks: int, act: Callable[..., Any], *arguments: Any) -> None:
        """Begin a function on some ranks."""
        for end in self._ends[: ranks or self.count]:
            end.send((ranks, act, arguments))

    def result(self, rank: int) -> Any:
        """Return what a rank has returned, or raise what it has failed with."""
        end = self._ends[rank]
        assert connection.wait([end], WAIT_S), f"rank {rank} does not answer"
        found, problem = end.recv()
        assert not problem, f"rank {rank}:\n{problem}"
        return found

    def run(self, ranks: int, act: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function on some ranks, and return what each has returned."""
        self.start(ranks, act, *arguments)
        problems, found = [], []
        for rank in range(ranks or self.count):
            try:
                found.append(self.result(rank))
            except AssertionError as error:
                problems.append(str(error))
        assert not problems, "\n".join(problems)
        return found

    def run_with_groups(self, act: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function on all ranks, which gets the groups by their sizes."""
        return self.run(0, act, *arguments)

    def close(self) -> None:
        """Kill all."""
        for process in self.processes:
            process.kill()
            process.join()
        for end in self._ends:
            end.close()


def _serve(rank: int, count: int, store: str, end: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, count), rank=rank, world_size=count)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, count)} | {count: None}
    while True:
        try:
            ranks, act, arguments = end.recv()
        except EOFError:
            return
        try:
            found, problem = act(rank, groups[ranks] if ranks else groups, *arguments), ""
        except BaseException:
            found, problem = None, traceback.format_exc()
        end.send((found, problem))
