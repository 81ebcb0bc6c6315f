"""What ranks do in the tests of sharded tables; each function runs in processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flashwarp as fw
import flashwarp.torch
from distributed.programs import TIMEOUT_S, failure, home, reopen, same
from flashwarp.distributed import Embedding, create_table, reshard
from flashwarp.table.record import Record

ROWS, DIM = 203, 6
OPTIMIZERS = {"sgd": fw.torch.SGD, "adagrad": fw.torch.Adagrad, "adam": fw.torch.Adam}


def make(group: Any, path: Path, optimizer: str = "sgd", deal: Any = "range", **how: Any) -> None:
    create_table(
        path, ROWS, DIM, optimizer=optimizer, deal=deal, group=group, timeout_s=TIMEOUT_S, **how
    )


def batches(step: int, ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The ids of each rank in a step, and what the loss multiplies their rows by."""
    draw = np.random.default_rng(step)
    found = []
    for rank in range(ranks):
        # Some ranks have no ids, in some steps none has.
        count = 0 if step % 5 == 3 or (step + rank) % 4 == 1 else int(draw.integers(1, 40))
        ids = draw.integers(0, ROWS // 3 if step % 2 else ROWS, count)
        factors = draw.standard_normal((count, DIM)).astype("f4")
        found.append((torch.from_numpy(ids), torch.from_numpy(factors)))
    return found


def optimizer_of(name: str, table: Any) -> Any:
    options = {} if name == "adam" else {"weight_decay": 0.01} if name == "sgd" else {}
    return OPTIMIZERS[name](torch.nn.ModuleList([table]), lr=0.1, **options)


def learn(optimizer: Any, table: Any, ids: torch.Tensor, factors: torch.Tensor) -> None:
    optimizer.zero_grad()
    if len(ids):
        (table(ids) * factors).sum().backward()
    else:  # the call is one of all ranks
        table(ids)
    optimizer.step()


def trains_as_one_process(
    rank: int, groups: Any, folder: Path, optimizer: str, deal: str, first: int, then: int
) -> None:
    path, alone = home(folder, rank, True), folder / f"alone-{rank}.npy"
    if rank < first:
        make(groups[first], path, optimizer, deal)
    for part, count in enumerate((first, then)):
        if part and rank < max(first, then):
            reshard(path, count, group=groups[max(first, then)], timeout_s=TIMEOUT_S)
        if rank >= count:
            continue
        with reopen(groups[count], path) as x:
            rows, record = x.gather(np.arange(ROWS)), Record.read(path_of(x))
            fw.torch.create_table(alone, ROWS, DIM, optimizer=optimizer, overwrite=True)
            with fw.open(alone, "r+", device="cpu") as other:
                if not part and deal == "range":
                    same(rows, other[:])
                other[:] = rows
            assert record is not None
            replace(record, rows=ROWS).write(alone)
            with fw.torch.Embedding(alone, mode="r+", device="cpu", dim=DIM) as one:
                train_both(Embedding(x, dim=DIM, average=count != 3), one, optimizer, part)
            same(x.gather(np.arange(ROWS)), np.load(alone))
        # Closing has written how far it came.


def train_both(sharded: Embedding, one: Any, optimizer: str, part: int) -> None:
    """Train a sharded table and one that gets what all ranks have."""
    ranks = sharded.table.ranks
    optimizers = optimizer_of(optimizer, sharded), optimizer_of(optimizer, one)
    for step in range(7 * part, 7 * part + 7):
        parts = batches(step, ranks)
        learn(optimizers[0], sharded, *parts[sharded.table.rank])
        ids, factors = (torch.cat(each) for each in zip(*parts, strict=True))
        learn(optimizers[1], one, ids, factors / (1 if ranks == 3 else ranks))
    steps = [next(iter(each.state.values()))["step"].item() for each in optimizers]
    assert steps[0] == steps[1] > 3


def path_of(x: Any) -> str:
    return str(x.local._attachment.storage.path)


def looks_up_as_torch(rank: int, group: Any, folder: Path) -> None:
    weights = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))

    def init(first: int, rows: int) -> Any:
        return weights[first : first + rows].numpy()

    make(group, home(folder, rank, False), "adam", init=init)
    draw = torch.Generator().manual_seed(rank)
    with reopen(group, home(folder, rank, False), "r") as x:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            table = Embedding(x, dim=DIM, dtype=dtype)
            for shape in ((3, 5), (0,), ()):
                ids = torch.randint(ROWS, shape, generator=draw)
                for kind in (torch.int64, torch.int32):
                    found = table(ids.to(kind))
                    assert torch.equal(found, weights[ids].to(dtype))
                    assert not found.requires_grad
        assert "give dim=6" in failure(lambda: Embedding(x))[1]


def is_called_by_compiled_models(rank: int, group: Any, folder: Path) -> None:
    make(group, home(folder, rank, True))
    with reopen(group, home(folder, rank, True)) as x:
        model = torch.nn.Sequential(Embedding(x, dim=DIM), torch.nn.Linear(DIM, 2))
        ids = torch.tensor([3, 5, 3])
        compiled = torch.compile(model, backend="eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(2):
                assert torch.equal(compiled(ids), model(ids))


def keeps_padding(rank: int, group: Any, folder: Path) -> None:
    make(group, home(folder, rank, True))
    with reopen(group, home(folder, rank, True)) as x:
        before = x.gather(np.arange(ROWS))
        table = Embedding(x, dim=DIM, padding_idx=-3, average=False)
        optimizer = fw.torch.SGD(table, lr=1.0)
        table(torch.tensor([ROWS - 3, 5])).sum().backward()
        optimizer.step()
        after = x.gather(np.arange(ROWS))
        before[5, :DIM] -= x.ranks
        assert np.allclose(after, before)
        same(after[ROWS - 3], before[ROWS - 3])


def drops_gradients(rank: int, group: Any, folder: Path) -> None:
    make(group, home(folder, rank, True))
    with reopen(group, home(folder, rank, True)) as x:
        before = x.gather(np.arange(ROWS))
        table = Embedding(x, dim=DIM)
        optimizer = fw.torch.SGD(table, lr=1.0)
        for _ in range(2):
            table(torch.tensor([rank, 5])).sum().backward()
            optimizer.zero_grad()
            optimizer.step()
        same(x.gather(np.arange(ROWS)), before)


def steps_again(rank: int, group: Any, folder: Path) -> None:
    """Rank 1 calls something else instead of a step, and then all make the step."""
    make(group, home(folder, rank, True))
    with reopen(group, home(folder, rank, True)) as x:
        before = x.gather(np.arange(ROWS))
        table = Embedding(x, dim=DIM, average=False)
        optimizer = fw.torch.SGD(table, lr=1.0)
        table(torch.tensor([5])).sum().backward()
        assert failure(x.flush if rank == 1 else optimizer.step)[0] == "ArgumentError"
        optimizer.step()
        before[5, :DIM] -= x.ranks
        assert np.allclose(x.gather(np.arange(ROWS)), before)


def refuses(rank: int, group: Any, folder: Path) -> list[Any]:
    """Return what each misuse raises, which all ranks must raise alike."""
    path = home(folder, rank, True)
    found = []

    def note(act: Any) -> None:
        found.append(failure(act))

    note(lambda: make(group, path, "rank" if rank else "sgd"))
    note(lambda: make(group, path, seed=rank))
    note(lambda: make(group, path, deal="hash", init=lambda first, rows: np.zeros((rows, DIM))))
    make(group, path, "adam")
    with reopen(group, path) as x:
        note(lambda: Embedding(x, dim=DIM + rank * 100))
        table = Embedding(x, dim=DIM)
        note(lambda: table(torch.tensor([ROWS if rank else 0])))
        note(lambda: table([1] if rank else torch.tensor([1])))
        note(lambda: table(torch.tensor([1.0 if rank else 1])))
        table(torch.tensor([3])).sum().backward()
        fw.torch.Adam(table).step()
        optimizer = fw.torch.Adam(table)
        if rank == 0:
            optimizer.checkpoint()
            record = Record.read(path_of(x))
            assert record is not None
            Record.write(replace(record, step=77), path_of(x))
        note(lambda: Embedding(x, dim=DIM))
    note(lambda: reshard(path, 1, group=group, timeout_s=TIMEOUT_S))
    return found


def saves(rank: int, groups: Any, folder: Path, shared: bool) -> list[Any]:
    """Train, save, train on; take up the save on other numbers of ranks, and train as before."""
    make(groups[2], home(folder, rank, shared), "adam", "hash") if rank < 2 else None
    kept = folder / "kept" / ("" if shared else str(rank))
    found: list[Any] = []
    truth = np.zeros(0)
    if rank < 2:
        with reopen(groups[2], home(folder, rank, shared)) as x:
            table = Embedding(x, dim=DIM)
            optimizer = fw.torch.Adam(table, lr=0.1)
            some_steps(table, optimizer, range(5))
            found.append(failure(lambda: x.save(kept)))
            optimizer.checkpoint()
            truth = x.gather(np.arange(ROWS))
            x.save(kept)
            found.append(failure(lambda: x.save(kept)))
            some_steps(table, optimizer, range(5, 9))
            assert (x.gather(np.arange(ROWS)) != truth).any()
    for count in (3, 1):
        now = folder / f"now-{count}" / ("" if shared else str(rank))
        if rank < 3:
            reshard(kept, count, to=now, group=groups[3], timeout_s=TIMEOUT_S)
            found.append(failure(lambda now=now: reshard(kept, to=now, group=groups[3])))
        if rank < count:
            with reopen(groups[count], now) as x:
                after = x.gather(np.arange(ROWS))
                if rank < 2:
                    same(after, truth)
                optimizer = fw.torch.Adam(Embedding(x, dim=DIM), lr=0.1)
                assert next(iter(optimizer.state.values()))["step"].item() == 5
    return found


def some_steps(table: Embedding, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(step)
        table(torch.randint(ROWS, (20,), generator=draw)).square().sum().backward()
        optimizer.step()
