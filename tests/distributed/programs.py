"""What ranks do in the tests of sharded arrays; each function runs in processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flashwarp import errors
from flashwarp.distributed import ShardedArray, gather, reshard, resharding
from flashwarp.distributed import ranks as meeting

RECORD = np.dtype([("key", "<i8"), ("weight", "<f4"), ("name", "S5")])  # 17 bytes
TIMEOUT_S = 60.0


def home(folder: Path, rank: int, shared: bool) -> Path:
    return folder / ("all" if shared else f"node-{rank}")


def content(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Values without pattern, the same on all ranks."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    raw = np.random.default_rng([seed, count]).integers(0, 100, count * dtype.itemsize, np.uint8)
    return raw.view(dtype).reshape(shape) if raw.size else np.empty(shape, dtype)


def create(group: Any, path: Path, dtype: Any, shape: Any, deal: Any = "range", **how: Any) -> Any:
    how = {"group": group, "timeout_s": TIMEOUT_S, "device": "cpu", **how}
    return ShardedArray.create(path, dtype, shape, deal=deal, **how)


def reopen(group: Any, path: Path, mode: Any = "r+", **how: Any) -> Any:
    how = {"group": group, "timeout_s": TIMEOUT_S, "device": "cpu", **how}
    return ShardedArray.open(path, mode, **how)


def same(got: Any, wanted: Any) -> None:
    got = np.asarray(got)
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert got.tobytes() == wanted.tobytes()


def failure(act: Callable[[], Any]) -> tuple[str, str]:
    """Return the type and the text of the error that is raised."""
    with pytest.raises(errors.FlashwarpError) as caught:
        act()
    return type(caught.value).__name__, str(caught.value)


# Rows.


def rows_of_all_ranks(
    rank: int, group: Any, folder: Path, deal: str, dtype: Any, shape: Any, shared: bool
) -> int:
    truth = content(dtype, shape)
    path = home(folder, rank, shared)
    draw = np.random.default_rng(rank)
    with create(group, path, dtype, shape, deal) as x:
        assert (x.shape, x.dtype, x.deal, x.rank) == (shape, np.dtype(dtype), deal, rank)
        same(x.gather(np.arange(shape[0])), np.zeros(shape, dtype))
        own = x.local_ids()
        assert len(own) == x.local.shape[0]
        x.local[:] = truth[own]
        for _ in range(3):
            ids = draw.integers(-shape[0], shape[0], (rank, 2, 5))
            same(x.gather(ids), truth[ids])
        same(x.gather(-1), np.asarray(truth[-1]))
        same(x.gather([]), truth[:0])
        x.flush()
        same(np.load(x._save.path(path, rank)), truth[own])
    with reopen(group, path, "r") as x:
        same(x.gather(np.arange(shape[0])[::-1]), truth[::-1])
    return len(own)


def tensors(rank: int, group: Any, folder: Path) -> None:
    truth = content("f4", (50, 3))
    with create(group, folder, "f4", (50, 3), "hash") as x:
        x.scatter(torch.arange(rank, 50, x.ranks), torch.from_numpy(truth[rank :: x.ranks]))
        for dtype in (torch.int64, torch.int32):
            ids = torch.tensor([[49, rank], [-1, 7]], dtype=dtype)
            got = x.gather(ids)
            assert isinstance(got, torch.Tensor)
            same(got.numpy(), truth[ids])


def who_wins(rank: int, group: Any, folder: Path, deal: str) -> None:
    with create(group, folder, "i8", (10, 2), deal) as x:
        x.scatter([5, 6, 5, rank], np.array([[1, 1], [2, 2], [3, 3], [4, 4]]) + 10 * rank)
        last = 10 * (x.ranks - 1)
        same(x.gather([5, 6]), np.array([[3, 3], [2, 2]]) + last)
        same(x.gather([0]), np.array([[4, 4]]))
        x.scatter([] if rank else [9], 7.9)  # cast as numpy casts
        same(x.gather([9]), np.array([[7, 7]]))


def several_tables(rank: int, group: Any, folder: Path) -> None:
    kinds = [("f4", (100, 3)), ("u1", (7, 5)), (RECORD, (31,)), ("f8", (2, 2, 2))]
    truths = [content(*kind) for kind in kinds]
    messages = []
    tell = meeting.Ranks.tell

    def counted(*arguments: Any) -> Any:
        messages.append(1)
        return tell(*arguments)

    with contextlib.ExitStack() as held:
        tables = []
        for number, (dtype, shape) in enumerate(kinds):
            made = create(group, folder / str(number), dtype, shape, ("range", "hash")[number % 2])
            tables.append(held.enter_context(made))
        for table, truth in zip(tables, truths, strict=True):
            table.local[:] = truth[table.local_ids()]
        held.enter_context(pytest.MonkeyPatch.context()).setattr(meeting.Ranks, "tell", counted)
        tables[0].gather([0])
        one = len(messages)
        draw = np.random.default_rng(rank)
        ids = [draw.integers(0, len(truth), rank * 3) for truth in truths]
        found = gather(list(zip(tables, ids, strict=True)))
        assert len(messages) == 2 * one + 1
        for got, truth, each in zip(found, truths, ids, strict=True):
            same(got, truth[each])
        twice = gather([(tables[0], [1]), (tables[0], [2])])
        same(np.concatenate(twice), truths[0][1:3])


# Bad input.


def bad_calls(rank: int, group: Any, folder: Path) -> list[tuple[str, str]]:
    """Rank 1 gives what cannot work, and all ranks say so."""
    bad = rank == 1
    with create(group, folder / "x", "f4", (20, 2)) as x, create(group, folder / "y", "i4", 9) as y:
        x.scatter(np.arange(20), content("f4", (20, 2)))
        meta = torch.zeros(2, dtype=torch.int64, device="meta")
        found = [
            failure(lambda: x.gather([20] if bad else [0])),
            failure(lambda: x.gather([-21] if bad else [])),
            failure(lambda: x.gather([0.5] if bad else [0])),
            failure(lambda: x.gather(torch.tensor([1.0 if bad else 1]))),
            failure(lambda: x.gather(meta if bad else [0])),
            failure(lambda: x.gather("12" if bad else [0])),
            failure(lambda: x.scatter([0, 20] if bad else [0], 1)),
            failure(lambda: x.scatter([0], [[1, 2, 3]] if bad else 1)),
            failure(lambda: x.scatter([0], "text" if bad else 1)),
            failure(lambda: x.scatter([0], torch.ones(2, requires_grad=True) if bad else 1)),
            failure(lambda: gather([(x, [0]), (y, [9] if bad else [0])])),
            failure(lambda: gather([(x, [0]), (x if bad else y, [0])])),
            failure(lambda: gather([(y, [0]), (x, [0])] if bad else [(x, [0]), (y, [0])])),
            failure(lambda: x.flush() if bad else x.gather([0])),
            failure(lambda: x.scatter([0], 1) if bad else x.gather([0])),
            failure(lambda: reopen(group, folder / "x")),  # its writer has it
        ]
        # Nothing was stored, and everything works.
        same(x.gather(np.arange(20)), content("f4", (20, 2)))
        assert x.broken == ""
        if bad:
            y.local.close()
        found.append(failure(lambda: gather([(x, [0]), (y, [4])])))  # which rank 1 has
    with reopen(group, folder / "x", "r") as x:
        found.append(failure(lambda: x.scatter([], 1)))
        found.append(failure(lambda: reopen(group, folder / "x", "r" if bad else "r+")))
    found.append(failure(lambda: create(group, folder / "x", "f4", (20, 2))))
    found.append(failure(lambda: create(group, folder / "z", "f4", (20, 3 if bad else 2))))
    found.append(failure(lambda: create(group, folder / "z", "f8" if bad else "f4", (20, 2))))
    found.append(failure(lambda: create(group, folder / "z", "f4", 20, "hash" if bad else "range")))
    found.append(failure(lambda: create(group, folder / "z", "f4", ())))
    found.append(failure(lambda: create(group, folder / "z", object, 3)))
    found.append(failure(lambda: create(group, folder / "z", "f4", 3, "random")))
    found.append(failure(lambda: create(group, 7 if bad else folder / "z", "f4", 3)))
    found.append(failure(lambda: create(group, folder / "z", "f4", 3, device="gpu:x")))
    found.append(failure(lambda: reopen(group, folder / "absent")))
    found.append(failure(lambda: reopen(group, folder / "x", "w")))
    found.append(failure(lambda: create(group, folder / "z", "f4", 3, line=3 if bad else 512)))
    assert not list((folder / "z").glob("*.json"))
    return found


def bad_files(rank: int, group: Any, folder: Path) -> dict[str, tuple[str, str]]:
    """Shards in folders of their own, one of which is not what it was."""
    path, other = folder / f"x-{rank}", folder / f"y-{rank}"
    found = {}
    for each in (path, other):
        with create(group, each, "f4", (20, 2)) as x:
            shard = x._save.path(each, rank)
        if each == path:
            mine = Path(shard)
    theirs = Path(shard)
    kept = mine.read_bytes()

    def look(name: str) -> None:
        dist.barrier(group)
        found[name] = failure(lambda: reopen(group, path))
        dist.barrier(group)
        if rank == 1:
            mine.write_bytes(kept)
        dist.barrier(group)
        reopen(group, path).close()

    if rank == 1:
        mine.unlink()
    look("missing")
    if rank == 1:
        np.save(mine, np.zeros((10, 2), "f4"))
    look("replaced")
    if rank == 1:
        mine.write_bytes(theirs.read_bytes())
    look("of another save")
    if rank == 1:
        mine.write_bytes(kept[:4100])
    look("cut short")
    manifest = (path / "sharded.json").read_text()
    if rank == 1:
        (path / "sharded.json").write_text((other / "sharded.json").read_text())
    dist.barrier(group)
    found["mix"] = failure(lambda: reopen(group, path))
    for name, text in {"no text": b"\xff", "no JSON": b"{", "other JSON": b'{"format": 1}'}.items():
        (path / "sharded.json").write_bytes(text)
        dist.barrier(group)
        found[name] = failure(lambda: reopen(group, path))
        dist.barrier(group)
    (path / "sharded.json").write_text(manifest.replace('"ranks": 2', '"ranks": 0'))
    dist.barrier(group)
    found["ranks"] = failure(lambda: reopen(group, path))
    return found


def destroyed(rank: int, group: Any, folder: Path) -> list[tuple[str, str]]:
    """All ranks, then rank 1 alone, end a group under its array."""
    found = []
    for number, who in enumerate((range(dist.get_world_size()), [1])):
        doomed = dist.new_group()
        with create(doomed, folder / str(number), "f4", (20, 2)) as x:
            x.scatter([rank], 1)
            dist.barrier()
            if rank in who:
                dist.destroy_process_group(doomed)
            found += [failure(lambda: x.gather([0])), failure(x.flush)]
            if rank not in who:
                dist.destroy_process_group(doomed)
    return found


def alone(rank: int, group: Any, folder: Path) -> None:
    """What one rank does is its own: copies, ends, forks."""
    x = create(group, folder, "f4", (20, 2))
    with pytest.raises(errors.CopyError):
        __import__("copy").copy(x)
    child = os.fork()
    if child == 0:
        try:
            x.gather([0])
        except errors.ForkError:
            x.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    x.gather([0])
    dist.barrier(group)
    x.close()
    x.close()
    assert x.closed
    assert "closed" in repr(x)
    for act in (lambda: x.gather([0]), lambda: x.scatter([0], 1), x.flush):
        assert failure(act)[0] == "ClosedError"
    assert failure(lambda: gather([]))[0] == "ArgumentError"
    assert failure(lambda: gather([(np.zeros(3), [0])]))[0] == "ArgumentError"
    for bad in (3, "world"):
        assert failure(lambda bad=bad: reopen(bad, folder))[0] == "ArgumentError"
    assert failure(lambda: reopen(group, folder, timeout_s=-1))[0] == "ArgumentError"


# Ranks that are lost.


def leaves(rank: int, group: Any, folder: Path) -> str:
    """Rank 1 ends its statement by an error while the others make a call."""
    with create(group, folder, "f4", (20, 2)) as x:
        x.scatter([rank], 1)
        x.flush()
        if rank == 1:
            return ""
        kind, text = failure(lambda: x.gather([0]))
        assert x.broken
        assert x.broken in text
        assert "broken" in repr(x)
        assert failure(x.flush)[0] == failure(lambda: x.gather([0]))[0] == "RankLostError"
        return kind


def never_comes(rank: int, group: Any, folder: Path) -> tuple[str, str]:
    with create(group, folder, "f4", (20, 2)) as x:
        # Only now: on a busy machine a file may take long to make.
        x._ranks._timeout_s = 2.0
        x._ranks._gloo._set_default_timeout(timedelta(seconds=2))
        dist.barrier(group)
        if rank == 1:
            dist.barrier(group)  # until the others have given up
        found = failure(lambda: x.gather([0]))
        if rank != 1:
            dist.barrier(group)
        return found


def never_opens(rank: int, group: Any, folder: Path) -> str:
    return "" if rank == 1 else failure(lambda: create(group, folder, "f4", 9, timeout_s=2))[0]


def comes_to_the_next(rank: int, group: Any, folder: Path, absent: int) -> Any:
    """One rank stays away from the first meeting, and all come to the second."""
    if rank != absent:
        assert failure(lambda: create(group, folder, "f4", 9, timeout_s=1))[0] == "RankLostError"
    dist.barrier(group)
    with create(group, folder, "f4", 9) as x:
        x.scatter([rank], rank + 1)
        return x.gather(np.arange(4)).tolist()


def until_killed(rank: int, group: Any, folder: Path, shared: bool, connected: bool = False) -> str:
    """Store and flush a new number until another rank is gone."""
    path = home(folder, rank, shared)
    with create(group, path, "i8", (64, 3), "hash") as x:
        if connected:  # as the rows of GPUs are
            with x._ranks.together():
                x._ranks.use(torch.device("cpu"), f"GPU-{rank}")
        for number in range(1, 1_000_000):
            try:
                x.scatter(np.arange(rank, 64, x.ranks), number)
                x.flush()
            except errors.RankLostError:
                assert failure(lambda: x.gather([0]))[0] == "RankLostError"
                return x.broken
            (folder / f"flushed-{rank}").write_text(str(number))
    return ""


def all_rows(rank: int, group: Any, folder: Path, shared: bool) -> Any:
    with reopen(group, home(folder, rank, shared)) as x:
        return x.gather(np.arange(x.shape[0]))


# Other numbers of ranks.


def fill(rank: int, group: Any, folder: Path, deal: str, shape: Any, shared: bool) -> None:
    with create(group, home(folder, rank, shared), "i4", shape, deal) as x:
        x.local[:] = content("i4", shape)[x.local_ids()]


def deal_anew(
    rank: int, group: Any, folder: Path, shared: bool, ranks: int | None
) -> dict[str, int]:
    """Return the bytes that this rank reads and writes."""
    moved = {"read": 0, "written": 0}
    read, write = resharding._Copier.read, resharding._Copier.write

    def counted_read(copier: Any, piece: Any) -> bytes:
        found = read(copier, piece)
        moved["read"] += len(found)
        return found

    def counted_write(copier: Any, piece: Any, content: Any) -> None:
        moved["written"] += piece.nbytes
        write(copier, piece, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resharding._Copier, "read", counted_read)
        patch.setattr(resharding._Copier, "write", counted_write)
        patch.setattr(resharding, "_PIECE_BYTES", 100)
        reshard(home(folder, rank, shared), ranks, group=group, timeout_s=TIMEOUT_S)
    return moved


def check(rank: int, group: Any, folder: Path, shape: Any, shared: bool, mode: str) -> list[str]:
    """Check all rows; return the files of a folder."""
    path = home(folder, rank, shared)
    with reopen(group, path, mode) as x:
        same(x.gather(np.arange(shape[0])), content("i4", shape))
    dist.barrier(group)
    return sorted(each.name for each in path.iterdir())


def bad_reshards(rank: int, group: Any, folder: Path) -> list[tuple[str, str]]:
    bad = rank == 1
    path = folder / f"x-{rank}"

    def dealt(ranks: int | None = None, path: Path = path) -> tuple[str, str]:
        return failure(lambda: reshard(path, ranks, group=group, timeout_s=TIMEOUT_S))

    found = [dealt()]
    with create(group, path, "i4", (30, 2)):
        found.append(dealt(2))  # it is open for writing
    found += [dealt(4), dealt(0), dealt(2 if bad else 1)]
    shard = next(path.glob("shard-*"))
    shard.rename(folder / f"moved-{rank}")
    found.append(dealt())
    (folder / f"moved-{rank}").rename(shard)
    dist.barrier(group)
    reshard(path, 1, group=group, timeout_s=TIMEOUT_S)
    found.append(failure(lambda: reopen(group, path)))
    dist.barrier(group)
    if bad:
        alone = dist.new_group([1], use_local_synchronization=True)
        shutil.rmtree(path)
        create(alone, path, "i4", 3).close()
    dist.barrier(group)
    found.append(dealt(2))
    dist.barrier(group)
    return found


OPERATIONS = ("open", "os.rename", "os.remove", "os.truncate", "os.link")


def until_killed_while_dealing(
    rank: int,
    group: Any,
    folder: Path,
    shared: bool,
    ranks: int,
    doomed: int,
    at: int,
    operations: tuple[str, ...] = OPERATIONS,
) -> None:
    """Deal anew; one rank is killed before one of its operations on files."""
    seen = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in operations and str(folder) in str(arguments[0]):
            seen += 1
            if rank == doomed and seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    with contextlib.suppress(errors.RankLostError):
        reshard(home(folder, rank, shared), ranks, group=group, timeout_s=TIMEOUT_S)
