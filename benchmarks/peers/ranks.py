"""Ranks of one node that share a cache, beside WholeMemory's chunked tensor (of cuGraph).

Each process has a GPU, and gathers random rows that lie in the memory of all GPUs: by one process
while the others wait, and by all at once. WholeMemory is left out where it does not import.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import flashwarp as fw
from benchmarks.base import Record, listed
from benchmarks.peers.peers import devices_of
from flashwarp.config import parse_bytes
from flashwarp.errors import FlashwarpError

__all__ = ["run"]

_ROUNDS = 8
_WAIT_S = 300.0
_OURS, _THEIRS = "flashwarp", "WholeMemory"


def run(
    folder: Path,
    gpus: Annotated[int, "How many share the rows; 0: all."] = 0,
    size: Annotated[str, "Bytes of the rows."] = "2 GiB",
    rows: Annotated[str, "Bytes of a row, and of a line, with commas."] = "4 KiB,512",
    call: Annotated[str, "Bytes of the rows of a call."] = "512 MiB",
    seed: Annotated[int, "Of the random rows."] = 1,
) -> Record:
    """Measure gathers of resident rows by ranks of one node."""
    devices = devices_of(gpus)
    settings = {"gpus": len(devices), "size": size, "rows": rows, "call": call}
    report = Record("Ranks of a node", devices[0].describe(), settings, {"rows": seed})
    for row in listed("rows", rows):
        width = parse_bytes(row) // 4
        path = folder / f"rows{width}.npy"
        data = np.lib.format.open_memmap(path, "w+", "f4", (parse_bytes(size) // 4 // width, width))
        data[:] = np.arange(len(data), dtype="f4")[:, None]
        data.flush()
        count = min(parse_bytes(call) // 4 // width, len(data))
        found = _in_ranks(len(devices), (str(folder), str(path), count, seed))
        if (why := found[0].get("why")) is not None:
            report.leave_out(_THEIRS, why)
        for what in ("one rank", "all ranks at once, in all"):
            rates = {
                name: sum(each[name, what] for each in found if (name, what) in each)
                for name in (_OURS, _THEIRS)
            }
            report.row(
                f"rows of {row} in the memory of all GPUs, by {what}", rates[_OURS], "GB/s",
                _THEIRS if rates[_THEIRS] else "", rates[_THEIRS],
                checked=all(each["right"] for each in found), footprint=data.nbytes,
            )  # fmt: skip
    return report


def _in_ranks(count: int, job: tuple[Any, ...]) -> list[dict[Any, Any]]:
    """Run the job in a process for each GPU; returns what each has found."""
    spawn = multiprocessing.get_context("spawn")
    barrier, answers = spawn.Barrier(count), spawn.Queue()
    ranks = [
        spawn.Process(target=_rank, args=(rank, count, barrier, answers, *job), daemon=True)
        for rank in range(count)
    ]
    for each in ranks:
        each.start()
    found = dict(answers.get(timeout=_WAIT_S) for _ in ranks)
    for each in ranks:
        each.join(_WAIT_S)
    failed = sorted(
        (each["failed"] for each in found.values() if "failed" in each),
        key=lambda text: text.startswith("BrokenBarrierError"),  # of those that waited for it
    )
    if failed:
        raise FlashwarpError(f"a rank failed: {failed[0]}")
    return [found[rank] for rank in range(count)]


def _rank(
    rank: int, count: int, barrier: Any, answers: Any, folder: str, path: str, rows: int, seed: int
) -> None:
    os.environ["FLASHWARP_RUNTIME_DIR"] = str(Path(folder) / "names")
    found: dict[Any, Any] = {"right": True}
    try:
        _measure(rank, count, barrier, found, path, rows, seed)
    except BaseException as error:
        found["failed"] = f"{type(error).__name__}: {error}"
        barrier.abort()
    answers.put((rank, found))


def _measure(
    rank: int, count: int, barrier: Any, found: dict[Any, Any], path: str, rows: int, seed: int
) -> None:
    import torch

    torch.cuda.set_device(rank)
    data = np.load(path, mmap_mode="r")
    names = [f"cuda:{each}" for each in range(count)]
    rng = np.random.default_rng(seed + rank)
    draws = [rng.integers(0, len(data), rows) for _ in range(_ROUNDS)]
    ids = [torch.from_numpy(each).cuda() for each in draws]
    capacity = data.nbytes // count + data.nbytes // 16
    line = data.shape[1] * 4
    gpu = names[rank]
    with (
        fw.Cache(capacity, line, peers=names, shared="ranks", device=gpu) as cache,
        fw.open(path, device=gpu, cache=cache) as x,
    ):

        def gather(index: Any) -> Any:
            return x.gather(index, stream=torch.cuda.current_stream())

        for part in np.array_split(np.arange(len(data)), _ROUNDS):  # all lines are resident then
            gather(torch.from_numpy(part).cuda())
        torch.cuda.synchronize()
        barrier.wait(_WAIT_S)
        _both(rank, barrier, found, _OURS, gather, ids, draws)
        barrier.wait(_WAIT_S)
    try:
        whole = _whole_memory(rank, count, data)
    except (ImportError, OSError) as error:
        found["why"] = f"{type(error).__name__}: {error}"
        return
    barrier.wait(_WAIT_S)
    _both(rank, barrier, found, _THEIRS, whole.gather, ids, draws)


def _both(
    rank: int,
    barrier: Any,
    found: dict[Any, Any],
    name: str,
    gather: Callable[[Any], Any],
    ids: list[Any],
    draws: list[Any],
) -> None:
    """Gather by rank 0 alone, then by all, and note the rates of this rank."""
    import torch

    for what in ("one rank", "all ranks at once, in all"):
        barrier.wait(_WAIT_S)
        if what == "one rank" and rank:
            barrier.wait(_WAIT_S)
            continue
        gather(ids[0])
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for index in ids:
            out = gather(index)
        end.record()
        torch.cuda.synchronize()
        nbytes = sum(len(each) for each in ids) * out.shape[1] * 4
        found[name, what] = nbytes / begin.elapsed_time(end) / 1e6
        right = out[:, 0].cpu().numpy() == draws[-1].astype("f4")
        found["right"] = found["right"] and bool(right.all())
        barrier.wait(_WAIT_S)


def _whole_memory(rank: int, count: int, data: Any) -> Any:
    """Make a tensor whose rows lie in the memory of all GPUs, and fill it."""
    import torch
    from pylibwholegraph.torch import create_wholememory_tensor
    from pylibwholegraph.torch.initialize import init_torch_env_and_create_wm_comm

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29411"}
    comm, _ = init_torch_env_and_create_wm_comm(rank, count, rank, count, wm_log_level="warn")
    whole = create_wholememory_tensor(
        comm, "chunked", "cuda", list(data.shape), torch.float32, None
    )
    mine, begin = whole.get_local_tensor()
    if begin >= len(data):  # counted in elements
        begin //= data.shape[1]
    mine.copy_(torch.from_numpy(np.array(data[begin : begin + len(mine)])))
    torch.cuda.synchronize()
    return whole
