"""What cold calls leave of a GPU to kernels of other streams.

Calls on rows that are in no cache run on one stream, one after the other: gathers, lookups that
pool bags, or whole steps of training. On another, matrices are multiplied, or two GPUs sum a
vector. All are timed by events, alone and together: the share of its rate that each keeps is the
result. Rows come from a file in three ways: in place, by host threads through bounce buffers, and
past the page cache. What any call must take stands beside it: blocks that only wait, and a copy
engine that fills the link.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import flashwarp as fw
from benchmarks.base import Record, listed
from benchmarks.calls.base import CallsBench
from flashwarp.config import parse_bytes
from flashwarp.device import resolve
from flashwarp.errors import ArgumentError

__all__ = ["run"]

_VECTOR_BYTES = 4 << 20
_BAG_IDS = 16
_AHEAD_S = 2e-3
_WAIT_NS = 500_000
_COPY_BYTES = 16 << 20
_WAYS: Mapping[str, Mapping[str, Any]] = {
    "in place": {},
    "bounce": {
        "o_direct": False,
        "controller": fw.nvme.SoftwareController(route="bounce"),
    },
    "O_DIRECT": {"o_direct": True},
}


def run(
    device: str | None,
    folder: Path,
    row: Annotated[str, "Bytes of a row, and of a line."] = "4 KiB",
    rows: Annotated[int, "Rows of the file; four times those of the cache."] = 256_000,
    calls: Annotated[str, "Of gather, bags and step, with commas."] = "gather,bags,step",
    ways: Annotated[str, f"Of {', '.join(_WAYS)}; with commas."] = ",".join(_WAYS),
    sizes: Annotated[str, "Rows of a call, with commas."] = "500,8000,64000",
    sides: Annotated[str, "Rows of the matrices, with commas."] = "4096,8192",
    blocks: Annotated[str, "Blocks that only wait, with commas."] = "1,2,4,6,8",
    seconds: Annotated[float, "How long each pair runs."] = 0.5,
    seed: Annotated[int, "Of the random rows."] = 1,
) -> Record:
    """Use rows that are in no cache beside products of matrices, and sums of two GPUs."""
    where = resolve(device)
    if where.kind != "cuda":
        raise ArgumentError(f"{where.name} has no streams: a neighbour needs a GPU, device='cuda'")
    bench = CallsBench(where, parse_bytes(row), 1, np.random.default_rng(seed))
    asked = {name: _CALLS[name] for name in listed("calls", calls, tuple(_CALLS))}
    settings = {
        "row": row,
        "rows": rows,
        "calls": calls,
        "ways": ways,
        "sizes": sizes,
        "sides": sides,
        "blocks": blocks,
        "seconds": seconds,
    }
    bench.report = Record("Neighbours", where.describe(), settings, {"rows": seed})
    works = _works(bench, [int(side) for side in listed("sides", sides)])
    for each in _least(bench, [int(count) for count in listed("blocks", blocks)], seconds):
        each.measure(works)
    # Whole numbers, so that sums are exact.
    data = bench.rng.integers(-8, 8, (rows, bench.words)).astype(np.float32)
    path = folder / "neighbours.bin"
    data.tofile(path)
    for way in listed("ways", ways, tuple(_WAYS)):
        for call in asked.values():
            with fw.open(
                path, call.mode, np.float32, data.shape, device=where, cache=data.nbytes // 4,
                line=bench.words * 4, **_WAYS[way],
            ) as array:  # fmt: skip
                for size in listed("sizes", sizes):
                    _Pair(bench, call(array), data, int(size), seconds).measure(way, works)
    return bench.report


class _Gathers:
    """Gathers into buffers of the caller."""

    name, mode, together = "gathers", "r", 1

    def __init__(self, array: fw.Array) -> None:
        self.array = array
        self.outs: list[Any] = []

    def queue(self, index: Any, stream: Any) -> Any:
        """Queue one call; return its rows."""
        import torch

        if not self.outs or len(self.outs[0]) != len(index):
            shape = (len(index), self.array.shape[1])
            self.outs = [torch.empty(shape, device="cuda") for _ in range(2)]
        self.outs.reverse()
        self.array.gather(index, self.outs[0], stream=stream)
        return self.outs[0]

    def expected(self, data: Any, index: Any) -> Any:
        """Return the rows of these ids."""
        return data[index]


class _Bags:
    """Lookups that pool bags of ids."""

    name, mode, together = "lookups of bags", "r", _BAG_IDS

    def __init__(self, array: fw.Array) -> None:
        import flashwarp.torch

        self.array = array
        self.module = flashwarp.torch.EmbeddingBag(array, mode="sum")

    def queue(self, index: Any, _: Any) -> Any:
        """Queue one call on the current stream; return its sums."""
        return self.module(index.view(-1, _BAG_IDS))

    def expected(self, data: Any, index: Any) -> Any:
        """Return the sums of these bags."""
        return data[index].reshape(-1, _BAG_IDS, data.shape[1]).sum(1)


class _Steps:
    """Steps of training: forward, backward, and an update of each row that leaves it as it was."""

    name, mode, together = "steps of SGD", "r+", 1

    def __init__(self, array: fw.Array) -> None:
        import flashwarp.torch

        self.array = array
        self.module = flashwarp.torch.Embedding(array)
        self.optimizer = flashwarp.torch.SGD(self.module, lr=0.0)

    def queue(self, index: Any, _: Any) -> Any:
        """Queue one step on the current stream; return its rows."""
        self.optimizer.zero_grad()
        rows = self.module(index)
        rows.sum().backward()
        self.optimizer.step()
        return rows.detach()

    def expected(self, data: Any, index: Any) -> Any:
        """Return the rows of these ids."""
        return data[index]


_CALLS: Mapping[str, Any] = {"gather": _Gathers, "bags": _Bags, "step": _Steps}


class _Work:
    """What runs on the stream beside, in batches of about two milliseconds."""

    def __init__(self, bench: CallsBench, stream: Any, call: Callable[[], object]) -> None:
        self.torch, self.stream, self.call = bench.torch, stream, call
        self.batch = 1
        self.rate(0.05)
        self.batch = max(1, round(self.rate(0.05) * _AHEAD_S))
        self.alone = self.rate(0.5)

    def queue(self) -> Any:
        """Queue a batch; return an event behind it."""
        with self.torch.cuda.stream(self.stream):
            for _ in range(self.batch):
                self.call()
        return _event(self.torch, self.stream)

    def rate(self, seconds: float) -> float:
        """Return how often a second the work is done alone."""
        self.queue().synchronize()
        start = last = _event(self.torch, self.stream)
        count = 0
        while count == 0 or start.elapsed_time(last) < seconds * 1e3:
            last = self.queue()
            count += self.batch
            last.synchronize()
        return count / float(start.elapsed_time(last)) * 1e3


def _event(torch: Any, stream: Any) -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _works(bench: CallsBench, sides: list[int]) -> dict[str, _Work]:
    torch = bench.torch
    beside = torch.cuda.Stream()

    def products(side: int) -> Callable[[], object]:
        a, b = (torch.randn(side, side, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        c = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=c)

    works = {f"bf16 products of {side}": _Work(bench, beside, products(side)) for side in sides}
    if torch.cuda.device_count() > 1:
        parts = [torch.zeros(_VECTOR_BYTES // 4, device=f"cuda:{place}") for place in (0, 1)]
        streams = [beside, torch.cuda.Stream(device=1)]
        sums = _Work(
            bench,
            beside,
            lambda: torch.cuda.nccl.all_reduce(parts, outputs=parts, streams=streams),
        )
        works["all-reduces of 4 MiB between two GPUs"] = sums
    return works


class _Beside(ABC):
    """Launches on a stream of their own, a neighbour beside, and the rates of both."""

    def __init__(self, bench: CallsBench, size: int, seconds: float) -> None:
        self.bench, self.torch = bench, bench.torch
        self.size, self.seconds = size, seconds
        self.stream = bench.torch.cuda.Stream()

    @abstractmethod
    def queue(self) -> None:
        """Queue a launch."""

    def finish(self) -> bool:
        """Wait for the launches, and return whether they did what they should."""
        return True

    def rates(self, work: _Work | None) -> tuple[float, float, bool]:
        """Launch for a while; return the rates of rows and work, and what `finish` says."""
        self.torch.cuda.synchronize()
        begin = last = _event(self.torch, self.stream)
        launches: deque[Any] = deque()
        done: list[Any] = []
        count = 0
        end = time.monotonic() + self.seconds
        while time.monotonic() < end or not count:
            while launches and launches[0].query():
                launches.popleft()
            if len(launches) < 2:  # the stream never runs dry
                self.queue()
                last = _event(self.torch, self.stream)
                launches.append(last)
                count += self.size
            if work is not None and (len(done) < 3 or done[-3].query()):
                done.append(work.queue())
        last.synchronize()
        right = self.finish()
        self.torch.cuda.synchronize()
        milliseconds = begin.elapsed_time(last)
        inside = [each for each in done if begin.elapsed_time(each) <= milliseconds]
        kept = 0.0
        if work is not None and inside:
            kept = len(inside) * work.batch / begin.elapsed_time(inside[-1]) * 1e3
        return count / milliseconds * 1e3, kept, right


class _Pair(_Beside):
    """Cold calls on so many rows, and a neighbour."""

    def __init__(self, bench: CallsBench, call: Any, data: Any, size: int, seconds: float) -> None:
        super().__init__(bench, size - size % call.together or call.together, seconds)
        self.call, self.data = call, data
        self.order = bench.placed(bench.rng.permutation(len(data)).astype(np.int64))
        self.begin = 0
        self.last: tuple[Any, Any] = (None, None)

    def measure(self, way: str, works: dict[str, _Work]) -> None:
        """Report for each work the rate that it keeps, and the rate that it leaves the calls."""
        calls = f"cold {self.call.name} of {self.size} rows, {way}"
        self.rates(None)  # a first call compiles kernels
        alone, _, checked = self.rates(None)
        for name, work in works.items():
            rate, kept, right = self.rates(work)
            checked = checked and right
            report = self.bench.report
            report.row(f"{name} beside {calls}", kept, "/s", "alone", work.alone, checked=checked)
            report.row(
                f"{calls}, beside {name}", rate / 1e3, "k rows/s", "alone", alone / 1e3,
                checked=checked,
            )  # fmt: skip

    def queue(self) -> None:
        """Queue a call on the next rows, which have left the cache since they came last."""
        if self.begin + self.size > len(self.order):
            self.begin = 0
        index = self.order[self.begin : self.begin + self.size]
        self.begin += self.size
        with self.torch.cuda.stream(self.stream):
            self.last = index, self.call.queue(index, self.stream)

    def finish(self) -> bool:
        """Wait for the calls, and check the rows of the last one."""
        self.call.array.wait(self.stream)
        index, out = self.last
        expected = self.call.expected(self.data, index.cpu().numpy())
        return bool(np.array_equal(out.cpu().numpy(), expected))


class _Least(_Beside):
    """What calls must take: launches that do nothing else."""

    def __init__(self, bench: CallsBench, name: str, launch: Any, seconds: float) -> None:
        super().__init__(bench, 1, seconds)
        self.name, self.launch = name, launch

    def measure(self, works: dict[str, _Work]) -> None:
        """Report for each work the rate that it keeps."""
        for name, work in works.items():
            _, kept, _ = self.rates(work)
            self.bench.report.row(f"{name} beside {self.name}", kept, "/s", "alone", work.alone)

    def queue(self) -> None:
        """Queue a launch."""
        self.launch(self.stream)


def _least(bench: CallsBench, blocks: list[int], seconds: float) -> Iterator[_Least]:
    """Make launches that keep so many blocks waiting, and copies of host memory."""
    torch = bench.torch
    program = fw.compile(Path(__file__).with_suffix(".cu"), bench.device)
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")

    def wait(count: int, stream: Any) -> None:
        program["keep_blocks"](_WAIT_NS, warps=8 * count, stream=stream)

    def copy(stream: Any) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    for count in blocks:
        yield _Least(bench, f"{count} blocks that only wait", partial(wait, count), seconds)
    yield _Least(bench, "a copy engine that fills the link", copy, seconds)
