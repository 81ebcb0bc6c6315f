"""What ranks do in the tests of two GPUs: each on its own."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import flashwarp as fw
import flashwarp.torch
from flashwarp.errors import RankError

COUNT = 1 << 20  # float32: 4 MiB
VERSIONS = 24


def opened(folder: Path, rank: int, *, remote: Any = None, **config: Any) -> fw.Checkpointer:
    config = {"timeout_s": 60, "retry_s": 0.05, **config}
    return fw.Checkpointer(
        folder, f"cuda:{rank}", "16 MiB", "64 MiB", remote, rank=rank, config=config
    )


def value(rank: int, version: int) -> float:
    return 1000.0 * version + rank


def write_together(rank: int, folder: Path, tell: Callable[[Any], None]) -> None:
    state = torch.empty(COUNT, device=f"cuda:{rank}")
    with opened(folder, rank, ranks=2) as made:
        made.protect("state", state)
        for version in range(VERSIONS):
            state.fill_(value(rank, version))
            made.checkpoint(version)
        made.wait()
        for version in reversed(range(VERSIONS)):
            made.restart(version)
            assert bool((state == value(rank, version)).all())
        tell(made.versions())


def write_until_killed(rank: int, folder: Path, tell: Callable[[Any], None]) -> None:
    state = torch.empty(COUNT, device=f"cuda:{rank}")
    made = opened(folder, rank, ranks=2)
    made.protect("state", state)
    state.fill_(value(rank, 0))
    made.checkpoint(0)
    made.wait()
    tell("durable")
    if rank == 1:
        signal.pause()  # until it is killed
    state.fill_(value(rank, 1))
    made.checkpoint(1)
    with pytest.raises(RankError, match="rank 1"):
        made.wait(1)
    state.fill_(-1)
    made.restart(1)  # it stays in the caches
    assert bool((state == value(rank, 1)).all())
    tell(made.versions())
    made.close(drain=False)


def keep_copies(rank: int, folder: Path, part: str) -> None:
    own = folder / f"node-{rank}" / "own"
    if part == "read" and rank == 0:
        shutil.rmtree(own)
    state = torch.empty(COUNT, device=f"cuda:{rank}")
    with flashwarp.torch.Partners(folder / f"node-{rank}" / "kept") as partners:
        with opened(own, rank, remote=partners) as made:
            made.protect("state", state)
            if part == "write":
                for version in range(3):
                    state.fill_(value(rank, version))
                    made.checkpoint(version)
                made.wait(tier="remote")
            else:
                for version in range(3):
                    made.restart(version)
                    assert bool((state == value(rank, version)).all()), version
        distributed.barrier()
