"""What ranks do in the tests of sharded arrays on GPUs: each has one of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import flashwarp as fw
import flashwarp.torch
from distributed.programs import RECORD, content, create, failure, reopen, same
from distributed.training import DIM, ROWS, batches, learn, make
from flashwarp.distributed import Embedding, gather, load, loading

TIMEOUT_S = 5.0


def gpu(rank: int) -> str:
    torch.cuda.set_device(rank)
    return f"cuda:{rank}"


def filled(rank: int, group: Any, path: Path, truth: Any, deal: Any = "hash", **how: Any) -> Any:
    made = create(group, path, truth.dtype, truth.shape, deal, device=gpu(rank), **how)
    made.local[:] = truth[made.local_ids()]
    return made


def rows(rank: int, group: Any, folder: Path, deal: str, dtype: str, count: int) -> None:
    truth = content(dtype, (count, 33))
    draw = np.random.default_rng(rank)
    with filled(rank, group, folder, truth, deal) as x:
        for shape in ((0,), (7,), (3, 50), (rank * 1000,)):
            ids = draw.integers(-count, count, shape)
            for kind in (torch.int64, torch.int32):
                got = x.gather(torch.from_numpy(ids).to(kind).cuda())
                assert got.is_cuda
                same(got.cpu().numpy(), truth[ids])
            same(x.gather(ids), truth[ids])
            got = x.gather(torch.from_numpy(ids).cuda(), capacity=1000)
            same(got.cpu().numpy(), truth[ids])
        x.check()
        # Of a row that repeats, the last of the highest rank stays.
        values = torch.from_numpy(content(dtype, (4, 33), 1 + rank)).cuda()
        x.scatter(torch.tensor([0, count - 1, 0, -1]).cuda(), values)
        last = content(dtype, (4, 33), x.ranks)
        same(x.gather(np.array([0, count - 1])), last[2:])
        x.scatter(np.array([0]), last[:1])
        same(x.gather(torch.tensor([0]).cuda()).cpu().numpy(), last[:1])
    with reopen(group, folder, "r", device=gpu(rank)) as x:
        ids = np.arange(1, count - 1)
        same(x.gather(ids), truth[ids])


def several_tables(rank: int, group: Any, folder: Path) -> None:
    for widths in ((16, 16, 16), (3, 16, 5)):
        truths = [content("f4", (100 + k, width), k) for k, width in enumerate(widths)]
        draw = np.random.default_rng(rank)
        with contextlib.ExitStack() as held:
            tables = [
                held.enter_context(filled(rank, group, folder / f"{widths}{number}", truth))
                for number, truth in enumerate(truths)
            ]
            assert len({id(table._ranks._communicator) for table in tables}) == 1
            for capacity in (None, 40):
                ids = [draw.integers(0, len(truth), 5 * rank + 20) for truth in truths]
                wanted = [
                    (table, torch.from_numpy(each).cuda())
                    for table, each in zip(tables, ids, strict=True)
                ]
                found = gather(wanted, capacity=capacity)
                for got, truth, each in zip(found, truths, ids, strict=True):
                    same(got.cpu().numpy(), truth[each])


def streams(rank: int, group: Any, folder: Path) -> None:
    """Rows are there in the order of the caller's stream, which the host does not wait for."""
    truth = content("f4", (4096, 64))
    with filled(rank, group, folder, truth) as x:
        ids = torch.arange(4096, device="cuda")
        for capacity in (None, 4096):
            x.gather(ids, capacity=capacity)
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                x.gather(ids, capacity=capacity)  # now its memory is there
                later = torch.zeros_like(ids)
                if capacity:
                    torch.cuda._sleep(200_000_000)
                later.copy_(ids.flip(0))
                got = x.gather(later, capacity=capacity)
                if capacity:
                    assert not side.query()
                changed = got + 1
            side.synchronize()
            same(changed.cpu().numpy(), truth[::-1] + 1)


def graphs(rank: int, group: Any, folder: Path) -> None:
    truth = content("f4", (500, 24))
    truth[0] = 1
    with filled(rank, group, folder, truth, "range") as x:
        ids = torch.arange(64, device="cuda")
        x.gather(ids, capacity=48)
        torch.cuda.synchronize()
        with contextlib.suppress(fw.errors.BoundsError):
            x.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = x.gather(ids, capacity=48)
        draw = np.random.default_rng(rank)
        for _ in range(10):
            chosen = np.concatenate([draw.integers(0, 250, 32), draw.integers(250, 500, 32)])
            ids.copy_(torch.from_numpy(chosen))
            graph.replay()
            torch.cuda.synchronize()
            same(got.cpu().numpy(), truth[chosen])
            x.check()
        ids.copy_(torch.tensor([0] * 60 + [500] * 4))
        graph.replay()
        torch.cuda.synchronize()
        there = got.cpu().numpy()[:, 0]
        assert there.tolist() == [1.0] * 48 + [0.0] * 16
        kind, text = failure(x.check)
        assert kind == "BoundsError"
        assert "index 500 is out of bounds" in text
        assert "larger by 12" in text
        x.check()
        graph.reset()
        same(x.gather(np.arange(500)), truth)


def refuses(rank: int, group: Any, folder: Path) -> list[tuple[str, str]]:
    bad = rank == 1
    here, there = gpu(rank), f"cuda:{1 - rank}"
    with filled(rank, group, folder / "x", content("f4", (20, 2))) as x:
        zero = torch.zeros(1, dtype=torch.int64, device=here)
        found = [
            failure(lambda: x.gather(torch.tensor([0]) if bad else zero)),
            failure(lambda: x.gather(zero.to(there) if bad else zero)),
            failure(lambda: x.gather([0] if bad else zero)),
            failure(lambda: x.gather(zero + 20 if bad else zero)),
            failure(lambda: x.gather(zero.float() if bad else zero)),
            failure(lambda: x.scatter(zero, torch.ones(2) if bad else torch.ones(2, device=here))),
            failure(lambda: x.scatter(zero, torch.ones(3, device=here) if bad else 1)),
        ]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kind, text = failure(lambda: x.gather(zero))
            found.append((kind, text))
            zero + 1
        same(x.gather(np.arange(20)), content("f4", (20, 2)))
    found.append(failure(lambda: create(group, folder / "y", RECORD, 9, device=here)))
    found.append(failure(lambda: create(group, folder / "y", "f4", 9, device="cuda:0")))
    other = "cpu" if bad else here
    found.append(failure(lambda: create(group, folder / "z", "f4", 9, device=other)))
    return found


def trains(rank: int, group: Any, folder: Path) -> None:
    """Training on GPUs gives what training on CPUs does, but for the order of sums."""
    after = []
    for device in (gpu(rank), "cpu"):
        make(group, folder / str(len(after)), "adam", "hash")
        with reopen(group, folder / str(len(after)), device=device) as x:
            table = Embedding(x, dim=DIM)
            optimizer = fw.torch.Adam(torch.nn.ModuleList([table]), lr=0.1)
            for step in range(7):
                ids, factors = batches(step, x.ranks)[rank]
                learn(optimizer, table, ids.to(device[:4]), factors.to(device[:4]))
            after.append(x.gather(np.arange(ROWS)))
    np.testing.assert_allclose(*after, rtol=1e-4, atol=1e-5)


def loads(rank: int, group: Any, folder: Path, share: int) -> None:
    files = sorted((folder / str(rank)).glob("*.safetensors"))
    wanted = fw.load(files, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_SHARE_BYTES", share)
        found = load(files, gpu(rank), group=group)
        into = {name: torch.empty_like(each, device="cuda") for name, each in wanted.items()}
        load(files, group=group, into=into)
    for made in (found, into):
        assert list(made) == list(wanted)
        for name, each in made.items():
            assert torch.equal(each.cpu(), wanted[name])


# Ranks that are lost.


def in_a_message(rank: int, group: Any, folder: Path, graphed: bool) -> list[Any]:
    """Rank 1 is killed while rank 0 waits for it in a message between GPUs."""
    truth = content("f4", (64, 4))
    x = filled(rank, group, folder, truth, timeout_s=60.0)
    x.flush()
    ids = torch.arange(64, device="cuda")
    x.gather(ids, capacity=64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = x.gather(ids, capacity=64)
    graph.replay()
    torch.cuda.synchronize()
    same(got.cpu().numpy(), truth)
    x._ranks._communicator._timeout_s = TIMEOUT_S
    dist.barrier(group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    if graphed:
        graph.replay()
    else:
        with x._ranks.together():
            x._ranks.swap(ids, [32, 32], [32, 32])
    torch.cuda.synchronize()
    waited = time.monotonic() - begin
    kinds = [failure(lambda: x.gather(ids))[0], failure(x.check)[0]]
    graph.reset()
    x.close()
    return [waited, kinds]


def until_killed(rank: int, group: Any, folder: Path) -> list[Any]:
    """Gather and store until another rank is gone."""
    with create(group, folder, "i8", (64, 3), "hash", device=gpu(rank), timeout_s=10.0) as x:
        ids = torch.arange(64, device="cuda")
        for number in range(1, 1_000_000):
            try:
                x.scatter(ids[rank :: x.ranks], torch.full((), number, device="cuda"))
                x.gather(ids)
                x.flush()
                (folder / f"flushed-{rank}").write_text(str(number))
            except fw.errors.RankLostError:
                begin = time.monotonic()
                torch.cuda.synchronize()
                return [number, time.monotonic() - begin]
    return []


def all_rows(rank: int, group: Any, folder: Path) -> Any:
    with reopen(group, folder, device=gpu(rank)) as x:
        return x.gather(np.arange(x.shape[0]))
