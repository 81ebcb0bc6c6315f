"""What ranks do in the tests of messages: with a capacity, and by a communicator.

A communicator goes by NCCL between GPUs. On the CPU the same code goes by gloo.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import flashwarp.torch
from distributed.programs import RECORD, content, create, failure, reopen, same
from flashwarp.device import resolve
from flashwarp.distributed import Embedding, communicator, create_table, gather, opening
from flashwarp.distributed import ranks as meeting
from flashwarp.distributed.communicator import Communicator

CPU = torch.device("cpu")


# With a capacity.


def expected(x: Any, truth: Any, ids: Any, capacity: int) -> Any:
    """The rows of ids, as a gather with a capacity returns them."""
    found, had = np.zeros((len(ids), *truth.shape[1:]), truth.dtype), [0] * x.ranks
    for place, number in enumerate(ids):
        if not -len(truth) <= number < len(truth):
            continue
        owner = int(x._save.dealing.owners(torch.tensor([number % len(truth)]))[0])
        had[owner] += 1
        if had[owner] <= capacity:
            found[place] = truth[number]
    return found


def rows_with_a_capacity(rank: int, group: Any, folder: Path, deal: Any, rows: int) -> None:
    """More ranks than rows, duplicates, no ids, ids out of bounds, and too many for a message."""
    truth = content("f4", (rows, 3))
    draw = np.random.default_rng(rank)
    with create(group, folder, "f4", (rows, 3), deal) as x:
        x.local[:] = truth[x.local_ids()]
        for capacity, count in ((20, 20), (1, 6), (3, 40), (9, rank * 5), (1, 0)):
            ids = draw.integers(-rows - 1, rows + 1, count) if rows else draw.integers(-1, 1, count)
            got = x.gather(torch.from_numpy(ids), capacity=capacity)
            same(got.numpy(), expected(x, truth, ids.tolist(), capacity))
            with contextlib.suppress(flashwarp.errors.BoundsError):
                x.check()
        # Numpy's ids are checked at once, and what fits is there.
        same(x.gather(np.arange(rows), capacity=max(1, rows)), truth)
        dist.barrier(group)
        for given in (torch.zeros(2, 2, dtype=torch.int32), np.zeros(0, int)):
            given = given[:0] if not rows else given
            same(np.asarray(x.gather(given, capacity=4)), truth[np.asarray(given)])


def tables_with_a_capacity(rank: int, group: Any, folder: Path) -> None:
    kinds = [("f4", (60, 3)), ("u1", (7, 5)), ("i8", (31,))]
    truths = [content(*kind) for kind in kinds]
    draw = np.random.default_rng(rank)
    with contextlib.ExitStack() as held:
        tables = [
            held.enter_context(create(group, folder / str(number), *kind, "hash"))
            for number, kind in enumerate(kinds)
        ]
        for table, truth in zip(tables, truths, strict=True):
            table.local[:] = truth[table.local_ids()]
        for capacity in (2, 50):
            ids = [draw.integers(0, len(truth), 4 * rank + 5) for truth in truths]
            wanted = [
                (table, torch.from_numpy(each)) for table, each in zip(tables, ids, strict=True)
            ]
            found = gather(wanted, capacity=capacity)
            for got, table, truth, each in zip(found, tables, truths, ids, strict=True):
                same(got.numpy(), expected(table, truth, each.tolist(), capacity))
                with contextlib.suppress(flashwarp.errors.BoundsError):
                    table.check()
            dist.barrier(group)


def bad_capacities(rank: int, group: Any, folder: Path) -> list[tuple[str, str]]:
    """Rank 1 gives what cannot work; what is only noted, the next call raises on all ranks."""
    bad = rank == 1
    with create(group, folder, "f4", (20, 2)) as x:
        x.scatter(np.arange(20), 1)
        found = [
            failure(lambda: x.gather([0], capacity=0 if bad else 1)),
            failure(lambda: x.gather([0], capacity=2 if bad else 1)),
            failure(lambda: x.gather([0], capacity=None if bad else 1)),
            failure(lambda: x.gather([20 if bad else 0], capacity=1)),
        ]
        for ids in ([0, 20], [0, -21, 5, 1, 2]):
            given = torch.tensor(ids if bad else [0])
            got = x.gather(given, capacity=2)
            same(got.numpy()[:2], np.float32([[1, 1], [0, 0] if bad else [1, 1]])[: len(got)])
            found.append(failure(lambda: x.gather([0])))
        x.gather(torch.tensor([4, 20] if bad else []).long(), capacity=2)
        found.append(failure(x.flush))
        x.check()
        x.gather(torch.tensor([20]), capacity=1)
        found.append(failure(x.check))
        x.check()
        same(x.gather([19]), np.ones((1, 2), "f4"))
    return found


# By a communicator.


@contextlib.contextmanager
def connected(rank: int, made: Any) -> Iterator[Any]:
    """An array whose rows go by a communicator, as those between GPUs do."""
    with made as x:
        with x._ranks.together():
            x._ranks.use(CPU, f"GPU-{rank}")
        yield x


def rows_by_a_communicator(rank: int, group: Any, folder: Path) -> None:
    truths = [content("f4", (90, 3)), content("i2", (40, 5))]
    draw = np.random.default_rng(rank)
    create_table(folder / "table", 50, 4, group=group, optimizer="sgd", deal="hash")
    with contextlib.ExitStack() as held:
        tables = []
        for number, truth in enumerate(truths):
            made = create(group, folder / str(number), truth.dtype, truth.shape, "hash")
            tables.append(held.enter_context(connected(rank, made)))
        first, second = (each._ranks._communicator for each in tables)
        assert first is second
        for table, truth in zip(tables, truths, strict=True):
            mine = torch.arange(rank, len(truth), table.ranks)
            table.scatter(mine, torch.from_numpy(truth)[mine])
        for capacity in (None, 30):
            ids = [torch.from_numpy(draw.integers(0, len(each), 9 * rank)) for each in truths]
            found = gather(list(zip(tables, ids, strict=True)), capacity=capacity)
            for got, truth, each in zip(found, truths, ids, strict=True):
                same(got.numpy(), truth[each])
        x = held.enter_context(connected(rank, reopen(group, folder / "table")))
        told = torch.full((5,), rank)
        with x._ranks.together():
            x._ranks.spread(told, x.ranks - 1)
        assert told.tolist() == [x.ranks - 1] * 5
        before = x.gather(np.arange(50))
        table = Embedding(x, dim=4, average=False)
        optimizer = flashwarp.torch.SGD(table, lr=1.0)
        table(torch.tensor([7, 7])).sum().backward()
        optimizer.step()
        before[7, :4] -= 2 * x.ranks
        assert np.allclose(x.gather(np.arange(50)), before)


def one_gpu_for_two(rank: int, group: Any, folder: Path) -> tuple[str, str]:
    with create(group, folder, "f4", (20, 2)) as x:

        def use() -> None:
            with x._ranks.together():
                x._ranks.use(CPU, "GPU-7" if rank else "GPU-0")

        found = failure(use)
        x.gather([0])
    return found


class Silent:
    """A backend whose messages end by an abort alone, as those of NCCL if a rank is lost."""

    def __init__(self) -> None:
        self._aborted = threading.Event()

    def alltoall_base(self, *_: Any) -> None:
        assert self._aborted.wait(30)
        raise RuntimeError("it was aborted")

    def abort(self) -> None:
        self._aborted.set()


def stuck(rank: int, group: Any, folder: Path, hurried: bool) -> list[Any]:
    """Rank 1 does not come to a message. Returns how long the others wait, and what they get."""
    with (
        connected(rank, create(group, folder / "x", "f4", (20, 2))) as x,
        connected(rank, create(group, folder / "y", "f4", (20, 2))) as y,
        pytest.MonkeyPatch.context() as patch,
    ):
        made = x._ranks._communicator
        made._timeout_s = 100 if hurried else 1
        patch.setattr(communicator, "_HURRY_S", 1.0)
        x.scatter([rank], 1)
        x.flush()
        dist.barrier(group)
        if rank == 1:
            dist.barrier(group)
            begin = time.monotonic()
            found = [failure(lambda: x.gather([0]))[0]]
            return [time.monotonic() - begin, found]
        begin = time.monotonic()
        patch.setattr(made, "_backend", Silent())
        if hurried:
            threading.Timer(0.2, made.hurry).start()

        def swap() -> None:
            with x._ranks.together():
                x._ranks.swap(torch.zeros(x.ranks), [1] * x.ranks, [1] * x.ranks)

        found = [failure(swap)[0], failure(lambda: x.gather([0]))[0], failure(x.check)[0]]
        found.append(failure(lambda: y.gather([0]))[0])
        assert "another rank" in y.broken
        waited = time.monotonic() - begin
        dist.barrier(group)
    # All make another one together, whoever still had the old one.
    return [waited, found]


def meets_anew(rank: int, group: Any, folder: Path) -> None:
    with connected(rank, reopen(group, folder / "x")) as x:
        same(x.gather(np.arange(3)), np.ones((3, 2), "f4"))
        assert Communicator.number_of(x._ranks, CPU) == x._ranks._communicator.number


def bad_gpus(rank: int, group: Any, folder: Path) -> list[tuple[str, str]]:
    """What ranks with GPUs raise before they use them; rank 1 differs."""
    bad = rank == 1
    with create(group, folder / "x", "f4", (20, 2)) as x, pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting.Ranks, "on_gpus", bad)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        found = [failure(lambda: x.gather([0]))]
        patch.undo()
        same(x.gather([0]), np.zeros((1, 2), "f4"))
        gpu = SimpleNamespace(kind="cuda", name="cuda:0")
        patch.setattr(opening, "resolve", lambda given: gpu if bad else resolve(given))
        found.append(failure(lambda: create(group, folder / "y", "f4", 9)))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(dist, "is_nccl_available", lambda: True)
        found.append(failure(lambda: create(group, folder / "y", "f4", 9)))
        found.append(failure(lambda: create(group, folder / "y", RECORD, 9)))
        patch.undo()
        found.append(failure(lambda: x.scatter([0], torch.ones(2, device="meta") if bad else 1)))
    return found


def gathers_in_a_capture(rank: int, group: Any, folder: Path) -> None:
    """In the capture of a CUDA graph no message goes over the host, and errors are of one rank."""
    truth = content("f4", (60, 3))

    def refuse(*_: Any) -> None:
        raise AssertionError("a message over the host")

    with (
        connected(rank, create(group, folder, "f4", (60, 3), "hash")) as x,
        pytest.MonkeyPatch.context() as patch,
    ):
        x.local[:] = truth[x.local_ids()]
        dist.barrier(group)
        patch.setattr(meeting.Ranks, "on_gpus", True)
        patch.setattr(meeting.Ranks, "tell", refuse)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        if rank == 1:
            assert failure(lambda: x.gather([0], capacity=8))[0] == "CaptureError"
        ids = torch.tensor([59, rank, -1, 7])
        same(x.gather(ids, capacity=4).numpy(), truth[ids])
        patch.undo()
        same(x.gather(ids).numpy(), truth[ids])
