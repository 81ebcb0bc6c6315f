"""Rows of a sharded array, beside an all-to-all of the same bytes and row-wise sharding in torch.

Each rank is a process with a GPU, or with the CPU device over gloo. All gather random rows at once:
resident ones, rows of many tables, and rows that no cache holds, from files in host memory (give
`--folder /dev/shm`, else they are in the page cache).
"""

from __future__ import annotations

import math
import multiprocessing
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from benchmarks.base import Record, by_kind, bytes_of, listed
from flashwarp.config import parse_bytes
from flashwarp.device import resolve
from flashwarp.errors import FlashwarpError
from flashwarp.probe.timing import in_turns

__all__ = ["run"]

_CALLS = 4
_WAIT_S = 600.0
_COLD = 16
"""How many times the rows exceed the cache where they come from storage."""
_TARGETS = {2: 1.9, 4: 3.7}
"""Rates from storage on so many GPUs, beside one."""


def run(
    device: str | None,
    folder: Path,
    ranks: Annotated[str, "How many processes, with commas."] = "1,2",
    size: Annotated[str, "Bytes of the rows of all ranks; default 2 GiB, 4 MiB on CPUs."] = "",
    rows: Annotated[str, "Bytes of a row, with commas."] = "512,4 KiB",
    call: Annotated[str, "Bytes of the rows of a call; default 256 MiB, 256 KiB on CPUs."] = "",
    tables: Annotated[int, "How many tables have the same bytes as one."] = 26,
    seed: Annotated[int, "Of the random rows."] = 1,
    runs: Annotated[int, "Turns that all ways take."] = 5,
) -> Record:
    """Measure gathers of rows that are dealt over ranks."""
    where = resolve(device)
    sizes = bytes_of(where, size, "2 GiB", "4 MiB"), bytes_of(where, call, "256 MiB", "256 KiB")
    settings = {
        "ranks": ranks, "size": sizes[0], "rows": rows, "call": sizes[1], "tables": tables,
        "runs": runs, "calls": _CALLS, "backend": by_kind(where, "", "nccl", "gloo"),
    }  # fmt: skip
    report = Record("Sharded arrays", where.describe(), settings, {"rows": seed})
    for row in listed("rows", rows):
        width = parse_bytes(row) // 4
        count, wanted = sizes[0] // 4 // width, sizes[1] // 4 // width
        alone: dict[str, float] = {}
        for number in map(int, listed("ranks", ranks)):
            home = folder / f"{width}-{number}"
            job = where.kind, str(home), (count, width), wanted, tables, seed, runs
            found = _in_ranks(number, job)
            shutil.rmtree(home)  # the folder may be in memory
            _report(report, f"rows of {width * 4} B, {number} ranks", number, found, sizes, alone)
    return report


def _report(
    report: Record,
    what: str,
    ranks: int,
    found: list[dict[str, Any]],
    sizes: tuple[int, int],
    alone: dict[str, float],
) -> None:
    """Add the rows of one number of ranks; `alone` keeps the rates of one."""
    rates = {
        name: ranks * sizes[1] / max(each["seconds"][name] for each in found) / 1e9
        for name in found[0]["seconds"]
    }
    right = all(each["right"] for each in found)
    add = partial(report.row, unit="GB/s", checked=right, footprint=sizes[0])
    messages, torch_alone = "an all-to-all of the same bytes", "row-wise sharding in torch alone"
    for name in ("resident", "resident, with a capacity"):
        add(
            f"{what}: {name}", rates[name], reference_name=messages,
            reference=rates[messages], target=0.8,
        )  # fmt: skip
        add(
            f"{what}: {name}, beside torch", rates[name], reference_name=torch_alone,
            reference=rates[torch_alone],
        )  # fmt: skip
    add(
        f"{what}: of many tables", rates["tables"], reference_name="one table of the same bytes",
        reference=rates["resident"], target=1 / 1.2,
    )  # fmt: skip
    first = alone.setdefault("storage", rates["storage"] if ranks == 1 else 0.0)
    add(
        f"{what}: from storage", rates["storage"], note=f"route {found[0]['route']}",
        reference_name="one rank" if ranks > 1 and first else "",
        reference=first if ranks > 1 else 0.0, target=_TARGETS.get(ranks, 0.0) if first else 0.0,
    )  # fmt: skip


def _in_ranks(count: int, job: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Run the job in so many processes; returns what each has found."""
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    store = f"{job[1]}.store"
    processes = [
        spawn.Process(target=_rank, args=(rank, count, store, answers, *job), daemon=True)
        for rank in range(count)
    ]
    for each in processes:
        each.start()
    found = dict(answers.get(timeout=_WAIT_S) for _ in processes)
    for each in processes:
        each.join(_WAIT_S)
    failed = sorted(
        (each["failed"] for each in found.values() if "failed" in each),
        key=lambda text: text.startswith("RankLostError"),  # of those that waited for it
    )
    if failed:
        raise FlashwarpError(f"a rank failed: {failed[0]}")
    return [found[rank] for rank in range(count)]


def _rank(rank: int, count: int, store: str, answers: Any, kind: str, *job: Any) -> None:
    import torch
    import torch.distributed as dist

    found: dict[str, Any] = {}
    try:
        torch.set_num_threads(1)
        backend, device = "gloo", "cpu"
        if kind == "cuda":
            backend, device = "cpu:gloo,cuda:nccl", f"cuda:{rank}"
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend, store=dist.FileStore(store, count), rank=rank, world_size=count
        )
        found = _Bench(rank, count, device, *job).measure()
        dist.destroy_process_group()
    except BaseException as error:
        found = {"failed": f"{type(error).__name__}: {error}"}
    answers.put((rank, found))


class _Bench:
    """What one rank measures, together with the others."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        device: str,
        folder: str,
        shape: tuple[int, int],
        wanted: int,
        tables: int,
        seed: int,
        runs: int,
    ) -> None:
        import torch

        self.rank, self.ranks, self.device, self.folder = rank, ranks, device, Path(folder)
        self.shape, self.wanted, self.tables, self.runs = shape, wanted, tables, runs
        self.nbytes = shape[0] * shape[1] * 4
        rng = np.random.default_rng([seed, rank])
        self.draws = [
            torch.from_numpy(rng.integers(0, shape[0], wanted)).to(device) for _ in range(_CALLS)
        ]
        share = -(-wanted // ranks)
        # Random rows are of one rank more often once in a billion calls.
        self.capacity = min(wanted, share + 6 * math.isqrt(share) + 16)
        self.right = True

    def measure(self) -> dict[str, Any]:
        """Return the seconds of a call of each way, and whether all rows were right."""
        resident = int(self.nbytes / self.ranks * 1.25) + (1 << 20)
        with self._made("one", self.shape, resident) as x:
            alone = _RowWise(x, self.device)
            one = self.draws
            ways: dict[str, Callable[[], float]] = {
                "resident": partial(self._seconds, x.gather, one),
                "resident, with a capacity": partial(
                    self._seconds, partial(x.gather, capacity=self.capacity), one
                ),
                "an all-to-all of the same bytes": self._all_to_all,
                "row-wise sharding in torch alone": partial(self._seconds, alone.gather, one),
                "tables": self._many_tables(resident),
            }
            seconds = in_turns(ways, self.runs)
            x.check()
            self._close_tables()
        cache = max(self.nbytes // self.ranks // _COLD, 1 << 18)
        with self._opened("one", cache) as x:
            route = x.local.service.route
            seconds |= in_turns(
                {"storage": partial(self._seconds, x.gather, self.draws)}, self.runs
            )
        return {"seconds": seconds, "right": self.right, "route": route}

    def _made(self, name: str, shape: tuple[int, int], cache: int) -> Any:
        """Make an array whose rows have their numbers as elements, and read all of it once."""
        from flashwarp.distributed import ShardedArray

        made = ShardedArray.create(
            self.folder / name, "int32", shape, device=self.device, cache=cache
        )
        ids = made.local_ids()
        for part in np.array_split(np.arange(len(ids)), max(1, self.nbytes >> 26)):
            if len(part):
                values = np.broadcast_to(ids[part, None].astype(np.int32), (len(part), shape[1]))
                made.local[part[0] : part[-1] + 1] = values
        made.flush()
        return made

    def _opened(self, name: str, cache: int) -> Any:
        from flashwarp.distributed import ShardedArray

        return ShardedArray.open(self.folder / name, device=self.device, cache=cache)

    def _many_tables(self, cache: int) -> Callable[[], float]:
        """Make tables that have the rows of the array between them."""
        import torch

        from flashwarp.distributed import gather

        rows = max(1, self.shape[0] // self.tables)
        each = cache // self.tables + (1 << 20)
        self._tables = [
            self._made(f"table-{number}", (rows, self.shape[1]), each)
            for number in range(self.tables)
        ]
        draws = [
            [part % rows for part in torch.tensor_split(draw, self.tables)] for draw in self.draws
        ]

        def gather_all(parts: Any) -> Any:
            return torch.cat(gather(list(zip(self._tables, parts, strict=True))))

        def plain(parts: Any) -> Any:
            return gather(list(zip(self._tables, parts, strict=True)))

        self._check(gather_all(draws[0]), torch.cat(draws[0]))
        return partial(self._seconds, plain, draws)

    def _close_tables(self) -> None:
        for each in self._tables:
            each.close()

    def _seconds(self, gather: Callable[[Any], Any], draws: list[Any]) -> float:
        """Return the seconds of a call of which the next ones do not wait."""
        self._meet()
        start = time.perf_counter()
        for ids in draws:
            rows = gather(ids)
        self._idle()
        seconds = (time.perf_counter() - start) / len(draws)
        if not isinstance(rows, list):
            self._check(rows, draws[-1])
        return seconds

    def _check(self, rows: Any, ids: Any) -> None:
        self.right = self.right and bool((rows == ids[:, None]).all())

    def _all_to_all(self) -> float:
        """Send as many bytes to each rank as a call does on average, to which others send, too."""
        import torch
        import torch.distributed as dist

        each = self.wanted // self.ranks
        sent = torch.full((each * self.ranks, self.shape[1]), self.rank, dtype=torch.int32)
        sent = sent.to(self.device)
        got = torch.empty_like(sent)
        self._meet()
        start = time.perf_counter()
        for _ in range(_CALLS):
            dist.all_to_all_single(got, sent)
        self._idle()
        seconds = (time.perf_counter() - start) / _CALLS
        ranks = torch.arange(self.ranks, device=self.device, dtype=torch.int32)
        self._check(got, ranks.repeat_interleave(each))
        return seconds

    def _meet(self) -> None:
        import torch.distributed as dist

        self._idle()
        dist.barrier(device_ids=None if self.device == "cpu" else [self.rank])
        self._idle()

    def _idle(self) -> None:
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()


class _RowWise:
    """Rows dealt over ranks in ranges, with torch alone: all of them in the memory of the GPUs."""

    def __init__(self, x: Any, device: str) -> None:
        import torch

        self.starts = torch.tensor(x._save.dealing.starts, device=device)
        self.ranks = x.ranks
        self.rows = torch.from_numpy(x.local[:]).to(device)

    def gather(self, ids: Any) -> Any:
        """Return the rows of ids."""
        import torch
        import torch.distributed as dist

        owner = torch.searchsorted(self.starts, ids, right=True) - 1
        owner, order = owner.sort(stable=True)
        local = ids[order] - self.starts[owner]
        counts = torch.bincount(owner, minlength=self.ranks)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        to, of = torch.stack([counts, theirs]).tolist()
        asked = ids.new_empty(sum(of))
        dist.all_to_all_single(asked, local, of, to)
        sent = self.rows.index_select(0, asked)
        got = sent.new_empty(len(ids), sent.shape[1])
        dist.all_to_all_single(got, sent, to, of)
        rows = torch.empty_like(got)
        rows[order] = got
        return rows
