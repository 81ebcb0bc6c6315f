"""The part of `bench calls` about work on other streams while a gather waits for its storage.

A gather of rows that no call has read runs on one stream; on another, matrices are multiplied, or
two GPUs sum a vector. Both are timed by events, alone and together: the share of the rate that
each keeps is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import flashwarp as fw
from benchmarks.calls.base import CallsBench

__all__ = ["Pair", "neighbours"]

_BATCH = 10
_SIDE = 8192
_VECTOR_BYTES = 4 << 20
_ALONE_S = 0.5


def neighbours(bench: CallsBench, folder: Path, rows: int) -> None:
    """Measure neighbours of a gather past the page cache, and of one through bounce buffers."""
    data = np.arange(rows * bench.words, dtype=np.uint32).reshape(rows, bench.words)
    path = folder / "neighbours.bin"
    data.tofile(path)
    ways: dict[str, Mapping[str, Any]] = {
        "O_DIRECT": {"o_direct": True},
        "page cache, bounce": {
            "o_direct": False,
            "controller": fw.SoftwareController(data_path="bounce"),
        },
    }
    for name, settings in ways.items():
        with fw.open(
            path, dtype=np.uint32, shape=data.shape, device=bench.device, cache=256 << 20,
            line=bench.words * 4, **settings,
        ) as array:  # fmt: skip
            Pair(bench, array, data, name).measure()


class Pair:
    """A gather of all rows of an array, and its neighbours."""

    def __init__(self, bench: CallsBench, array: fw.Array, data: Any, where: str) -> None:
        self.bench, self.array, self.data, self.where = bench, array, data, where
        self.torch = bench.torch
        self.index = bench.placed(bench.rng.permutation(len(data)).astype(np.int64))
        self.out = bench.out(len(data))
        self.gathering, self.beside = self.torch.cuda.Stream(), self.torch.cuda.Stream()

    def measure(self) -> None:
        """Add a row for each neighbour, and one for what it costs the gather."""
        self.gather_beside(None)  # compiles what has to be
        alone = self.gather_beside(None)[0]
        works: dict[str, Callable[[], object]] = {f"bf16 matmuls of {_SIDE}^3": self.matmuls()}
        if self.torch.cuda.device_count() > 1:
            works["all-reduces of 4 MiB between two GPUs"] = self.sums()
        for name, work in works.items():
            most = self.rate(work)
            seconds, kept = self.gather_beside(work)
            checked = self.bench.right(self.out, self.data, self.index)
            gather = f"a cold gather of {len(self.data)} rows, {self.where}"
            self._add(f"{name}, beside {gather}", kept, "/s", most, checked)
            rate = len(self.data) / 1e3
            self._add(f"{gather}, beside {name}", rate / seconds, "k rows/s", rate / alone, checked)

    def _add(self, name: str, value: float, unit: str, alone: float, checked: bool) -> None:
        self.bench.report.row(name, value, unit, "alone", alone, checked=checked)

    def matmuls(self) -> Callable[[], object]:
        """Return what multiplies two matrices."""
        torch = self.torch
        a, b = (torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        c = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=c)

    def sums(self) -> Callable[[], object]:
        """Return what sums a vector of each of two GPUs on the stream beside, and one there."""
        torch = self.torch
        parts = [torch.zeros(_VECTOR_BYTES // 4, device=f"cuda:{place}") for place in (0, 1)]
        streams = [self.beside, torch.cuda.Stream(device=1)]
        return lambda: torch.cuda.nccl.all_reduce(parts, outputs=parts, streams=streams)

    def rate(self, work: Callable[[], object]) -> float:
        """Return how often a second the work is done alone."""
        self._batch(work).synchronize()
        start = self._event(self.beside)
        count, last = 0, start
        while count == 0 or start.elapsed_time(last) < _ALONE_S * 1e3:
            last = self._batch(work)
            count += _BATCH
            last.synchronize()
        return count / float(start.elapsed_time(last)) * 1e3

    def gather_beside(self, work: Callable[[], object] | None) -> tuple[float, float]:
        """Gather, and return the seconds it takes, and the rate of the work meanwhile."""
        self.array.drop_cache()
        self.torch.cuda.synchronize()
        begin = self._event(self.gathering)
        self.array.gather(self.index, self.out, stream=self.gathering)
        end = self._event(self.gathering)
        ended = [begin]
        while work is not None and not end.query():
            # Two batches are queued at any time, so that the stream never runs dry.
            ended.append(self._batch(work))
            if len(ended) > 2:
                ended[-2].synchronize()
        end.synchronize()
        self.array.synchronize(self.gathering)
        self.torch.cuda.synchronize()
        seconds = begin.elapsed_time(end) / 1e3
        inside = [each for each in ended[1:] if begin.elapsed_time(each) <= seconds * 1e3]
        if not inside:
            return seconds, 0.0
        return seconds, len(inside) * _BATCH / (begin.elapsed_time(inside[-1]) / 1e3)

    def _batch(self, work: Callable[[], object]) -> Any:
        with self.torch.cuda.stream(self.beside):
            for _ in range(_BATCH):
                work()
        return self._event(self.beside)

    def _event(self, stream: Any) -> Any:
        event = self.torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event
