"""What ranks do in the tests of partner copies; each function runs in processes."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import flashwarp as fw
import flashwarp.torch
from flashwarp.errors import DamagedVersionError, MissingVersionError, RemoteError

COUNT = 300_000  # float64: two messages and a part


def content(rank: int, version: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(100 * version + rank).random(COUNT)


def opened(folder: Path, rank: int, partners: Any) -> fw.Checkpointer:
    """Open a checkpointer in a folder of its own, as on a node with an SSD of its own."""
    return fw.Checkpointer(
        folder / f"node-{rank}" / "own", "cpu", 0, "16 MiB", partners, rank, {"timeout_s": 60}
    )


def keep(folder: Path, rank: int) -> Any:
    return flashwarp.torch.Partners(folder / f"node-{rank}" / "kept")


def write(rank: int, folder: Path, versions: int) -> None:
    with keep(folder, rank) as partners:
        with opened(folder, rank, partners) as checkpointer:
            for version in range(versions):
                checkpointer.protect("state", content(rank, version))
                checkpointer.checkpoint(version)
            checkpointer.wait(tier="remote")
            assert checkpointer.stats.uploads == versions
            assert partners.versions("default") == list(range(versions))
            checkpointer.discard(0)
            assert partners.versions("default") == list(range(1, versions))
        dist.barrier()


def lose(folder: Path, rank: int) -> None:
    """Rank 0 loses its disk, and rank 1 a byte of version 2."""
    if rank == 0:
        shutil.rmtree(folder / "node-0" / "own")
    if rank == 1:
        data = next((folder / "node-1" / "own").rglob(f"{2:019d}-*.data"))
        with open(data, "r+b") as file:
            file.seek(1_000_000)
            byte = file.read(1)
            file.seek(1_000_000)
            file.write(bytes([byte[0] ^ 1]))


def read_again(rank: int, folder: Path) -> None:
    lose(folder, rank)
    with opened(folder, rank, None) as alone:
        if rank == 0:
            with pytest.raises(MissingVersionError):
                alone.restart(2)
        if rank == 1:
            with pytest.raises(DamagedVersionError):
                alone.restart(2)
    with keep(folder, rank) as partners, opened(folder, rank, partners) as checkpointer:
        assert checkpointer.versions() == [1, 2]
        assert checkpointer.test() == 2
        for version in (1, 2):
            found = checkpointer.restart(version)["state"]
            assert np.array_equal(found, content(rank, version)), version
        dist.barrier()
    # What was lost is in the rank's own folder again.
    with opened(folder, rank, None) as alone:
        assert np.array_equal(alone.restart(2)["state"], content(rank, 2))


def partner_dies(rank: int, folder: Path) -> None:
    partners = keep(folder, rank)
    checkpointer = opened(folder, rank, partners)
    checkpointer.protect("state", content(rank, 0))
    checkpointer.checkpoint(0)
    checkpointer.wait(tier="remote")
    dist.barrier()
    if rank == 1:
        (folder / "dead").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not (folder / "dead").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    checkpointer.protect("state", content(rank, 1))
    checkpointer.checkpoint(1)
    checkpointer.wait(1)  # the rank's own folder works
    # The second of these says a wait that comes after the upload was tried once more.
    gone = "rank 1(, which keeps copies of rank 0, does not answer| keeps no copies any more)"
    with pytest.raises(RemoteError, match=gone):
        checkpointer.wait(1, tier="remote", timeout_s=30)
    assert np.array_equal(checkpointer.restart(1)["state"], content(rank, 1))
    with pytest.raises(RemoteError):
        checkpointer.close()
    partners.close()
