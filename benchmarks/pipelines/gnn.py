"""Graph networks on mini-batches, with features on storage (figures 1 and 9 of the CAM paper).

A step samples two hops of neighbours, reads the features of all vertices it has found, and trains.
Serial steps gather in the step; pipelined ones read the next batch meanwhile; the baseline has
threads that read into pinned memory. All sample by the same kernels and train the same model.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import flashwarp as fw
from benchmarks.base import listed
from benchmarks.pipelines import models, power_law
from benchmarks.pipelines.base import Bench
from benchmarks.pipelines.host import Ahead
from benchmarks.pipelines.lines import lines_that_mention
from flashwarp.errors import ArgumentError

__all__ = ["measure"]

_FANOUTS = (25, 10)
_HIDDEN = 128
_CLASSES = 32
_DEGREE = 15
_OF_LONGER, _SERIAL, _POSIX, _POSIX_SMALL = 0.9, 1.5, 1.0, 1.5
_LINES = 10
_ROOM = 1.25  # of buffers, beside the largest batch that was seen
_DIM_MIN = 128  # 512 bytes, the least that O_DIRECT reads
_PAPER = "up to 1.84 of serial (CAM figure 9)"


def measure(
    bench: Bench, nbytes: int, dims: str, models: str, storages: list[str], batch: int, steps: int
) -> None:
    """Train each model on features of each width from each storage."""
    for dim in map(int, listed("dims", dims)):
        if dim < _DIM_MIN or dim % _DIM_MIN:
            raise ArgumentError(f"dims={dims!r}: {dim} is no multiple of {_DIM_MIN}, as disks need")
        data = _Features(bench, max(batch, nbytes // (4 * dim)), dim)
        with data.sampler() as sampler:
            for storage in storages:
                with data.open(storage) as features:
                    for model in listed("models", models):
                        job = _Job(bench, data, sampler, features, model, storage, batch, steps)
                        job.measure()
        data.remove()
    lines = lines_that_mention(_pipelined)
    bench.add(
        "lines of a pipelined step that mention flashwarp", lines, "lines", ("allowed", _LINES),
        checked=lines <= _LINES, paper="66, and 65 with calls that wait (CAM table VI)",
    )  # fmt: skip


def _serial(
    features: fw.Array, sampler: Any, gather: Callable[..., Any], batches: list[Any],
    train: Callable[[Any, Any], Any],
) -> None:  # fmt: skip
    for seeds in batches:
        sample = sampler.sample(seeds)
        train(gather(features, sample.nodes), sample)


def _pipelined(
    features: fw.Array, sampler: Any, batches: list[Any], train: Callable[[Any, Any], Any],
    most: int, **options: Any,
) -> None:  # fmt: skip
    samples: deque[Any] = deque()

    def nodes() -> Iterator[Any]:
        for sample in sampler.iterate(batches):
            samples.append(sample)
            yield sample.nodes

    with fw.Pipeline(features, most, **options) as pipeline:
        for rows, _ in pipeline.iterate(nodes()):
            train(rows, samples.popleft())


class _Features:
    """A graph, and a row of features for each vertex that says whose it is."""

    def __init__(self, bench: Bench, vertices: int, dim: int) -> None:
        self.bench, self.vertices, self.dim = bench, vertices, dim
        self.path = bench.folder / f"features{dim}.bin"
        self.graph = power_law.power_law(vertices, _DEGREE, bench.seed, bench.place)
        self.ahead: Ahead | None = None
        """The baseline's buffers, once they are made."""
        self.memory = np.empty((vertices, dim), np.float32)
        step = max(1, (256 << 20) // (4 * dim))
        for first in range(0, vertices, step):
            ids = bench.torch.arange(first, min(first + step, vertices), device=bench.place)
            self.memory[first : first + len(ids)] = self.rows_of(ids).cpu().numpy()

    def rows_of(self, ids: Any) -> Any:
        """Compute the features of vertices: numbers from -1 to 1 that differ between rows."""
        torch = self.bench.torch
        there = torch.arange(self.dim, device=ids.device)
        mixed = (ids[:, None] * 2654435761 + there * 40503) % 8191
        return mixed.to(torch.float32) / 4096 - 1

    @contextlib.contextmanager
    def sampler(self) -> Iterator[Any]:
        """Open the graph, in memory, for samples."""
        with contextlib.ExitStack() as undo:
            arrays = []
            for part in self.graph:
                memory = fw.storage.Memory(part, writable=False)
                array = fw.open(memory, "r", part.dtype, part.shape, device=self.bench.device)
                arrays.append(undo.enter_context(array))
            made = self.bench.operators.NeighborSampler(
                tuple(arrays), _FANOUTS, seed=self.bench.seed
            )
            yield undo.enter_context(made)

    @contextlib.contextmanager
    def open(self, storage: str) -> Iterator[fw.Array]:
        """Open the features."""
        settings: dict[str, Any] = {
            "dtype": np.float32, "shape": self.memory.shape, "device": self.bench.device,
            "cache": min(16 << 20, self.memory.nbytes // 16),
            # As long as a row: what is gathered without a pipeline reads no row that nobody wants.
            "line": min(4096, 4 * self.dim),
        }  # fmt: skip
        source: Any = fw.storage.Memory(self.memory, writable=False)
        if storage != "memory":
            if not self.path.exists():
                with self.path.open("wb") as file:
                    file.write(self.memory.data)
                    os.fsync(file.fileno())
            source = self.path
            settings |= {"o_direct": storage == "O_DIRECT", "immutable": True}
        with fw.open(source, **settings) as array:
            yield array

    def remove(self) -> None:
        """Give the room back."""
        self.path.unlink(missing_ok=True)


@dataclass
class _Job:
    """One model on one storage."""

    bench: Bench
    data: _Features
    sampler: Any
    features: fw.Array
    model: str
    storage: str
    batch: int
    steps: int

    def __post_init__(self) -> None:
        bench, torch = self.bench, self.bench.torch
        torch.manual_seed(bench.seed)
        self.net = models.make(self.model, self.data.dim, _HIDDEN, _CLASSES).to(bench.place)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        self.label = f"{self.model}, {self.data.dim} features, {self.storage}"
        self.batches = [
            bench.draw(number, self.batch, self.data.vertices) for number in range(self.steps)
        ]
        self.most = 0
        self.wrong = torch.zeros((), dtype=torch.int64, device=bench.place)
        self.rows = 0

    def train(self, rows: Any, sample: Any) -> None:
        """Take a step of training."""
        functional = self.bench.torch.nn.functional
        wanted = sample.nodes[: sample.batch_size] % _CLASSES
        loss = functional.cross_entropy(self.net(rows, sample), wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.rows += len(rows)

    def check(self, rows: Any, sample: Any) -> None:
        """Count rows that are not those of the sample."""
        step = max(1, (256 << 20) // (8 * self.data.dim))
        for first in range(0, len(rows), step):
            nodes = sample.nodes[first : first + step]
            self.wrong += (rows[first : first + step] != self.data.rows_of(nodes)).any(1).sum()
        self.wrong += abs(len(rows) - len(sample.nodes))

    # Ways to take the steps.

    def serial(self, train: Callable[[Any, Any], Any]) -> None:
        """Gather in the step."""
        _serial(self.features, self.sampler, self.bench.operators.gather, self.batches, train)

    def pipelined(self, options: dict[str, Any], train: Callable[[Any, Any], Any]) -> None:
        """Read batches ahead."""
        _pipelined(self.features, self.sampler, self.batches, train, self.most, **options)

    def by_posix(self, train: Callable[[Any, Any], Any]) -> None:
        """Read into pinned memory by threads."""
        bench, width = self.bench, 4 * self.data.dim
        samples: deque[Any] = deque()

        def sampled() -> Iterator[Any]:
            for sample in self.sampler.iterate(self.batches):
                samples.append(sample)
                yield sample.nodes.cpu().numpy()

        flags = os.O_RDONLY | (os.O_DIRECT if self.storage == "O_DIRECT" else 0)
        file = -1 if self.storage == "memory" else os.open(self.data.path, flags)

        def fill(into: Any, nodes: Any) -> int:
            if file < 0:
                bench.loops.gather(self.data.memory.view(np.uint8), into, nodes * width, width)
            else:
                bench.loops.read(file, into, nodes * width, width)
            return len(nodes)

        try:
            for rows, _ in self._posix(fill).iterate(sampled()):
                sample = samples.popleft()
                if bench.on_gpu:
                    # It was made by another thread, on another stream.
                    sample.record_stream(bench.stream)
                train(rows, sample)
        finally:
            if file >= 0:
                os.close(file)

    def _posix(self, fill: Callable[[Any, Any], int]) -> Ahead:
        # Pinned memory takes seconds to make: once for all runs.
        if self.data.ahead is None or self.data.ahead.rows < self.most:
            torch = self.bench.torch
            shape = (self.most, self.data.dim)
            self.data.ahead = Ahead(torch, self.bench.place, shape, torch.float32, fill)
        self.data.ahead.fill = fill
        return self.data.ahead

    # What they took.

    def measure(self) -> None:
        """Take the steps in all ways."""
        phases = self._phases()
        ways: dict[str, Callable[[Any], None]] = {"serial": self.serial, "POSIX": self.by_posix}
        for name, options in self.bench.ways.items():
            ways[f"pipelined, {name}"] = partial(self.pipelined, options)
        seconds, right = {}, {}
        for name, way in ways.items():
            self.wrong.zero_()
            way(self.check)
            right[name] = int(self.wrong) == 0
            seconds[name] = self.bench.median_cost(partial(way, self.train)).seconds
        self._tell(phases, {name: s / self.steps for name, s in seconds.items()}, right)

    def _phases(self) -> dict[str, float]:
        """Return the seconds of a step's phases, each waited for."""
        seen = {"sample": 0.0, "extract": 0.0, "train": 0.0}
        for number, seeds in enumerate([self.batches[0], *self.batches]):
            if number == 1:
                seen, self.rows = dict.fromkeys(seen, 0.0), 0
            times = [self._now()]
            sample = self.sampler.sample(seeds)
            times.append(self._now())
            self.most = max(self.most, int(_ROOM * len(sample.nodes)))
            rows = self.bench.operators.gather(self.features, sample.nodes)
            times.append(self._now())
            self.train(rows, sample)
            times.append(self._now())
            for name, start, end in zip(seen, times, times[1:], strict=False):
                seen[name] += end - start
        self.read = self.rows * 4 * self.data.dim / self.steps
        return {name: spent / self.steps for name, spent in seen.items()}

    def _now(self) -> float:
        self.bench.wait()
        return time.perf_counter()

    def _tell(
        self, phases: dict[str, float], seconds: dict[str, float], right: dict[str, bool]
    ) -> None:
        add, total = self.bench.add, sum(phases.values())
        for name, spent in phases.items():
            add(
                f"{self.label}: {name}, part of a serial step", spent / total, "of the step",
                note=f"{spent * 1e3:.3g} ms of {total * 1e3:.3g} ms",
                paper="extract 0.40 to 0.65, train 0.16 to 0.44 (CAM figure 1)",
            )  # fmt: skip
        computing, extract = phases["sample"] + phases["train"], phases["extract"]
        longer, comparable = max(computing, extract), 0.5 < computing / extract < 2
        small = 4 * self.data.dim <= 16 << 10
        rate = self.read / extract / 1e9
        note = f"{self.read / 1e6:.4g} MB of rows in a step, {rate:.3g} GB/s when gathered"
        for way in self.bench.ways:
            key = f"pipelined, {way}"
            name, ours = f"{self.label}: {key}", 1 / seconds[key]
            add(
                name, ours, "steps/s", ("the longer of computing and reading", 1 / longer),
                _OF_LONGER, right[key], note=note,
            )  # fmt: skip
            add(
                name, ours, "steps/s", ("serial", 1 / seconds["serial"]),
                _SERIAL if comparable else 0.0, right["serial"], paper=_PAPER,
            )  # fmt: skip
            add(
                name, ours, "steps/s", ("POSIX baseline", 1 / seconds["POSIX"]),
                _POSIX_SMALL if small else _POSIX, right["POSIX"],
                note=f"{self.bench.threads} threads, three pinned buffers",
            )  # fmt: skip
