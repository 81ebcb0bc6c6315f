"""What ranks do in the tests of distributed checkpoints; each function runs in processes."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flashwarp.dcp
from flashwarp.interop.torch.dcp import writer as writing

ROWS = 1001


def whole(step: int) -> torch.Tensor:
    return torch.arange(ROWS * 16, dtype=torch.float32).view(ROWS, 16) + step


def run(ranks: int, act: Callable[..., None], folder: Path, *arguments: Any) -> list[str]:
    """Run a function on some ranks; return what each has failed with, or ""."""
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    store = folder.parent / f"store-{time.monotonic_ns()}"
    processes = [
        spawn.Process(target=_rank, args=(rank, ranks, store, answers, act, folder, arguments))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=240) for _ in processes)
    for process in processes:
        process.join()
    return [found[rank] for rank in range(ranks)]


def _rank(
    rank: int, ranks: int, store: Path, answers: Any, act: Any, folder: Path, arguments: Any
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks
    )
    try:
        act(rank, folder, *arguments)
        problem = ""
    except BaseException:
        problem = traceback.format_exc()
    answers.put((rank, problem))
    dist.destroy_process_group()


def sharded(content: torch.Tensor) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(content, mesh, [Shard(0)])


def save(rank: int, folder: Path, step: int) -> None:
    state = {"table": sharded(whole(step)), "step": step, "same": torch.full((3,), float(step))}
    with flashwarp.dcp.Stager("1 MiB") as stager:
        saved = dcp.async_save(
            state, storage_writer=flashwarp.dcp.Writer(folder), async_stager=stager
        )
        state["table"].to_local().zero_()
        saved.result()
    assert flashwarp.dcp.verify(folder) > ROWS * 64
    files = list(folder.glob("__*"))
    assert len(files) == dist.get_world_size(), files


def load(rank: int, folder: Path, step: int, checked: bool) -> None:
    state = {"table": sharded(torch.zeros(ROWS, 16)), "step": 0, "same": torch.zeros(3)}
    if checked:
        dcp.load(state, storage_reader=flashwarp.dcp.Reader(folder))
    else:
        dcp.load(state, checkpoint_id=folder)
    assert torch.equal(state["table"].full_tensor(), whole(step))
    assert state["step"] == step
    assert torch.equal(state["same"], torch.full((3,), float(step)))


def one_fails(rank: int, folder: Path) -> None:
    """Rank 1 fails at once, while rank 0 has seconds to write."""
    write = writing._write_record
    if rank == 1:

        def fail(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        writing._write_record = fail
    else:

        def slowly(descriptor: int, offset: int, record: Any, watch: Any) -> int:
            for _ in range(600):
                watch.check()
                time.sleep(0.1)
            return write(descriptor, offset, record, watch)

        writing._write_record = slowly
    state = {f"table{i}": sharded(whole(i)) for i in range(4)}
    dist.barrier()
    begin = time.monotonic()
    with flashwarp.dcp.Stager("4 MiB") as stager:
        saved = dcp.async_save(
            state, storage_writer=flashwarp.dcp.Writer(folder), async_stager=stager
        )
        with pytest.raises(dcp.api.CheckpointException, match="No space left on device"):
            saved.result()
        assert time.monotonic() - begin < 5
    writing._write_record = write
    dist.barrier()
    assert not (folder / ".metadata").exists()
    # The next save is not stopped by what the last one left.
    save(rank, folder, 7)
