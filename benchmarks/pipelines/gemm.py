"""An out-of-core product of matrices (figures 10b and 10c of the CAM paper), by three kinds of I/O.

`examples/matmul_files.py` does it with pipelines. Serial steps gather in the step. The baseline has
threads that read ahead into pinned memory and write behind. All multiply by the same calls.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat
from typing import Any

import numpy as np

import flashwarp as fw
from benchmarks.pipelines.base import Bench, example
from benchmarks.pipelines.host import Ahead, Behind, cut
from benchmarks.pipelines.lines import code_lines

__all__ = ["measure"]

_SAMPLED = 16
_ERROR = 0.02  # of the root of the mean square; TF32 has ten bits
_OF_LONGER, _SERIAL, _POSIX = 0.9, 1.5, 1.0
_PAPER = "1.84 of BaM (CAM figure 10)"


def measure(bench: Bench, side: int, panel: int, slab: int, storages: list[str]) -> None:
    """Multiply matrices of some side in each storage."""
    bench.torch.backends.cuda.matmul.allow_tf32 = True
    try:
        for storage in storages:
            _Gemm(bench, side, panel, slab, storage).measure()
    finally:
        bench.torch.backends.cuda.matmul.allow_tf32 = False
    ours = code_lines(example("matmul_files").multiply)
    posix = code_lines(_Gemm.by_posix, _Gemm._ahead, _Gemm._behind)
    bench.add(
        "gemm: lines that read and write, ours", ours, "lines", ("POSIX baseline", posix),
        paper="130 of 158 and 165 (CAM table VI)",
    )  # fmt: skip


def _cut(rows: int, at_a_time: int) -> list[range]:
    ranges: list[range] = example("matmul_files").cut(rows, at_a_time)
    return ranges


class _Gemm:
    """Two matrices on one storage, and where their product goes."""

    def __init__(self, bench: Bench, side: int, panel: int, slab: int, storage: str) -> None:
        self.bench, self.storage, self.side = bench, storage, side
        self.panel, self.slab = min(panel, side), min(slab, side)
        self.label = f"gemm of {side}, {storage}"
        made = bench.torch.Generator(bench.place).manual_seed(bench.seed)
        self.data = [
            bench.torch.randn((side, side), generator=made, device=bench.place).cpu().numpy()
            for _ in "ab"
        ] + [np.zeros((side, side), np.float32)]
        self.paths = [bench.folder / f"{name}.bin" for name in ("a", "b", "product")]
        if storage != "memory":
            for path, matrix in zip(self.paths, self.data, strict=True):
                with path.open("wb") as file:
                    file.write(matrix.data)
                    os.fsync(file.fileno())

    @contextlib.contextmanager
    def arrays(self) -> Iterator[list[fw.Array]]:
        """Open all three."""
        with contextlib.ExitStack() as undo:
            made = []
            for number in range(3):
                mode: Any = "r+" if number == 2 else "r"
                settings: dict[str, Any] = {"cache": "64 MiB", "device": self.bench.device}
                source: Any = self.paths[number]
                if self.storage == "memory":
                    source = fw.storage.Memory(self.data[number])
                else:
                    settings["o_direct"] = self.storage == "O_DIRECT"
                array = fw.open(source, mode, np.float32, (self.side, self.side), **settings)
                made.append(undo.enter_context(array))
            yield made

    def right(self) -> bool:
        """Compare some rows of the product with what float64 gives."""
        chosen = np.random.default_rng(1).integers(0, self.side, _SAMPLED)
        torch = self.bench.torch
        rows = torch.from_numpy(self.data[0][chosen]).to(self.bench.place, torch.float64)
        wanted = torch.zeros((_SAMPLED, self.side), dtype=torch.float64, device=self.bench.place)
        for first in range(0, self.side, 2048):
            part = torch.from_numpy(self.data[1][first : first + 2048])
            wanted += rows[:, first : first + 2048] @ part.to(self.bench.place, torch.float64)
        if self.storage == "memory":
            found = self.data[2][chosen]
        else:
            found = np.memmap(self.paths[2], np.float32, "r", shape=(self.side, self.side))[chosen]
        error = (torch.from_numpy(np.array(found)).to(self.bench.place) - wanted).abs().max()
        return bool(error < _ERROR * wanted.square().mean().sqrt())

    def clear(self) -> None:
        """Leave no product of another way."""
        if self.storage == "memory":
            self.data[2][:] = 0
            return
        with self.paths[2].open("r+b") as file:
            file.truncate(0)
            file.truncate(4 * self.side**2)
            os.fsync(file.fileno())

    # Ways.

    def ours(self) -> None:
        """Multiply by pipelines."""
        a, b, product = self.opened
        example("matmul_files").multiply(a, b, product, panel_rows=self.panel, slab_rows=self.slab)

    def serial(self) -> None:
        """Gather and scatter in the step."""
        torch, (a, b, product) = self.bench.torch, self.opened

        def rows_of(each: range) -> Any:
            return torch.arange(each.start, each.stop, device=self.bench.place)

        for rows in _cut(self.side, self.panel):
            panel = self.bench.operators.gather(a, rows_of(rows))
            total = torch.zeros((len(rows), self.side), device=self.bench.place)
            for columns in _cut(self.side, self.slab):
                slab = self.bench.operators.gather(b, rows_of(columns))
                total.addmm_(panel[:, columns.start : columns.stop], slab)
            self.bench.operators.scatter(product, rows_of(rows), total)
        product.flush()

    def moving(self) -> None:
        """Read and write as `ours` does, and multiply nothing."""
        torch, (a, b, product) = self.bench.torch, self.opened
        panels, slabs = (
            _cut(self.side, self.panel),
            _cut(self.side, self.slab),
        )
        total = torch.zeros((self.panel, self.side), device=self.bench.place)
        with (
            fw.Pipeline(a, self.panel, library="torch") as of_a,
            fw.Pipeline(b, self.slab, library="torch") as of_b,
            fw.Pipeline(product, self.panel, library="torch") as sums,
        ):
            every = of_b.iterate(chain.from_iterable(repeat(slabs, len(panels))))
            for _, rows in of_a.iterate(panels):
                for _ in islice(every, len(slabs)):
                    pass
                sums.write_back(rows, total[: len(rows)])
            sums.flush()

    def by_posix(self) -> None:
        """Read ahead and write behind by threads."""
        torch, (a, b, product) = self.bench.torch, self.files
        panels, slabs = (
            _cut(self.side, self.panel),
            _cut(self.side, self.slab),
        )
        behind = self._behind(product, self.panel)
        every = self._ahead(b, self.slab).iterate(chain.from_iterable(repeat(slabs, len(panels))))
        for panel, rows in self._ahead(a, self.panel).iterate(panels):
            total = torch.zeros((len(rows), self.side), device=self.bench.place)
            for slab, columns in islice(every, len(slabs)):
                total.addmm_(panel[:, columns.start : columns.stop], slab)
            behind.write(total, rows)
        behind.close()
        next(every, None)
        os.fdatasync(product)

    def _ahead(self, file: int, rows: int) -> Ahead:
        loops, width = self.bench.loops, 4 * self.side

        def fill(into: Any, which: range) -> int:
            offsets, nbytes = cut(which.start * width, len(which) * width)
            loops.read(file, into, offsets, nbytes)
            return len(which)

        torch = self.bench.torch
        return Ahead(torch, self.bench.place, (rows, self.side), torch.float32, fill)

    def _behind(self, file: int, rows: int) -> Behind:
        loops, width = self.bench.loops, 4 * self.side

        def drain(data: Any, which: range) -> None:
            loops.write(file, data, *cut(which.start * width, len(which) * width))

        torch = self.bench.torch
        return Behind(torch, self.bench.place, (rows, self.side), torch.float32, drain)

    # What they took.

    def measure(self) -> None:
        """Multiply in all ways, once each, and move without multiplying beside each."""
        computing = self._computing()
        ways: dict[str, Callable[[], None]] = {"ours": self.ours, "serial": self.serial}
        if self.storage != "memory":
            ways["POSIX baseline"] = self.by_posix
        seconds, right, moving = {}, {}, []
        for name, way in ways.items():
            moving.append(self._seconds(self.moving))
            seconds[name] = self._seconds(way)
            right[name] = self.right()
        self._tell(seconds, right, computing, min(moving))
        for path in self.paths:
            path.unlink(missing_ok=True)

    def _seconds(self, way: Callable[[], None]) -> float:
        # Nothing of the way before is around while this one is timed.
        gc.collect()
        self.clear()
        with contextlib.ExitStack() as undo:
            if way == self.by_posix:
                flags = os.O_RDWR | (os.O_DIRECT if self.storage == "O_DIRECT" else 0)
                self.files = [os.open(path, flags) for path in self.paths]
                for file in self.files:
                    undo.callback(os.close, file)
            else:
                self.opened = undo.enter_context(self.arrays())
            return self.bench.cost(way).seconds

    def _computing(self) -> float:
        """Return the seconds of all products, with data that is there."""
        torch, place = self.bench.torch, self.bench.place
        panel = torch.ones((self.panel, self.slab), device=place)
        slab = torch.ones((self.slab, self.side), device=place)
        total = torch.zeros((self.panel, self.side), device=place)
        each = self.bench.median_cost(lambda: total.addmm_(panel, slab)).seconds
        return each * -(-self.side // self.panel) * -(-self.side // self.slab)

    def _tell(
        self, seconds: dict[str, float], right: dict[str, bool], computing: float, moving: float
    ) -> None:
        work = 2 * self.side**3 / 1e12
        panels = -(-self.side // self.panel)
        moved = 4 * self.side**2 * (2 + panels)
        note = (
            f"{moved / seconds['ours'] / 1e9:.3g} GB/s read and written; products alone take "
            f"{computing:.3g} s of {seconds['ours']:.3g} s, moving {moving:.3g} s"
        )
        longer, comparable = max(computing, moving), 0.5 < computing / moving < 2
        targets = {"serial": _SERIAL if comparable else 0.0, "POSIX baseline": _POSIX}
        for name, target in targets.items():
            if name in seconds:
                self.bench.add(
                    f"{self.label}: ours", work / seconds["ours"], "TFLOP/s",
                    (name, work / seconds[name]), target, right["ours"] and right[name],
                    paper=_PAPER, note=note,
                )  # fmt: skip
        self.bench.add(
            f"{self.label}: ours", work / seconds["ours"], "TFLOP/s",
            ("the longer of multiplying and moving", work / longer), _OF_LONGER, right["ours"],
        )  # fmt: skip
