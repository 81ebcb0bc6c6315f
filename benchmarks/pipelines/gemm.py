"""An out-of-core product of matrices (figures 10b and 10c of the CAM paper), by three kinds of I/O.

`examples/matmul_files.py` does it with pipelines. Serial steps gather in the step. The baseline has
threads that read ahead into pinned memory and write behind. All multiply by the same calls.
"""

from __future__ import annotations

import os
from itertools import chain, islice, repeat
from typing import Any

import numpy as np

import flashwarp as fw
from benchmarks.pipelines.base import Bench, example
from benchmarks.pipelines.job import Job

__all__ = ["measure"]

_SAMPLED = 16
_ERROR = 0.02  # of the root of the mean square; TF32 has ten bits
_PAPER_LINES = "130 of 158 and 165 (CAM table VI)"


def measure(bench: Bench, side: int, panel: int, slab: int, storages: list[str]) -> None:
    """Multiply matrices of some side in each storage."""
    bench.torch.backends.cuda.matmul.allow_tf32 = True
    try:
        for storage in storages:
            _Gemm(bench, side, panel, slab, storage).measure()
    finally:
        bench.torch.backends.cuda.matmul.allow_tf32 = False
    _Gemm.count_lines(bench, "gemm", example("matmul_files").multiply, _PAPER_LINES)


def _cut(rows: int, at_a_time: int) -> list[range]:
    ranges: list[range] = example("matmul_files").cut(rows, at_a_time)
    return ranges


class _Gemm(Job):
    """Two matrices on one storage, and where their product goes."""

    computes, unit, posix, paper = "multiplying", "TFLOP/s", 1.0, "1.84 of BaM (CAM figure 10)"
    modes = ("r", "r", "r+")

    def __init__(self, bench: Bench, side: int, panel: int, slab: int, storage: str) -> None:
        paths = [bench.folder / f"{name}.bin" for name in ("a", "b", "product")]
        label = f"gemm of {side}, {storage}"
        super().__init__(bench, storage, label, paths, (side, side), np.float32, 64 << 20)
        self.side, self.panel, self.slab = side, min(panel, side), min(slab, side)
        made = bench.torch.Generator(bench.place).manual_seed(bench.seed)
        self.memories = [
            bench.torch.randn((side, side), generator=made, device=bench.place).cpu().numpy()
            for _ in "ab"
        ] + [np.zeros((side, side), np.float32)]
        if storage != "memory":
            for path, matrix in zip(self.paths, self.memories, strict=True):
                with path.open("wb") as file:
                    file.write(matrix.data)
                    os.fsync(file.fileno())

    def right(self) -> bool:
        """Compare some rows of the product with what float64 gives."""
        chosen = np.random.default_rng(1).integers(0, self.side, _SAMPLED)
        torch = self.bench.torch
        rows = torch.from_numpy(self.memories[0][chosen]).to(self.bench.place, torch.float64)
        wanted = torch.zeros((_SAMPLED, self.side), dtype=torch.float64, device=self.bench.place)
        for first in range(0, self.side, 2048):
            part = torch.from_numpy(self.memories[1][first : first + 2048])
            wanted += rows[:, first : first + 2048] @ part.to(self.bench.place, torch.float64)
        if self.storage == "memory":
            found = self.memories[2][chosen]
        else:
            found = np.memmap(self.paths[2], np.float32, "r", shape=(self.side, self.side))[chosen]
        error = (torch.from_numpy(np.array(found)).to(self.bench.place) - wanted).abs().max()
        return bool(error < _ERROR * wanted.square().mean().sqrt())

    def reset(self) -> None:
        """Leave no product of another way."""
        if self.storage == "memory":
            self.memories[2][:] = 0
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
        panels, slabs = _cut(self.side, self.panel), _cut(self.side, self.slab)
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
        panels, slabs = _cut(self.side, self.panel), _cut(self.side, self.slab)
        behind = self.behind(product, self.panel)
        every = self.ahead(b, self.slab).iterate(chain.from_iterable(repeat(slabs, len(panels))))
        for panel, rows in self.ahead(a, self.panel).iterate(panels):
            total = torch.zeros((len(rows), self.side), device=self.bench.place)
            for slab, columns in islice(every, len(slabs)):
                total.addmm_(panel[:, columns.start : columns.stop], slab)
            behind.write(total, rows)
        behind.close()
        next(every, None)
        os.fdatasync(product)

    def computing(self) -> float:
        """Return the seconds of all products, with data that is there."""
        torch, place = self.bench.torch, self.bench.place
        panel = torch.ones((self.panel, self.slab), device=place)
        slab = torch.ones((self.slab, self.side), device=place)
        total = torch.zeros((self.panel, self.side), device=place)
        each = self.bench.median_cost(lambda: total.addmm_(panel, slab)).seconds
        return each * -(-self.side // self.panel) * -(-self.side // self.slab)

    def work(self) -> tuple[float, int]:
        """Return tera-operations, and the bytes of both matrices and the product."""
        panels = -(-self.side // self.panel)
        return 2 * self.side**3 / 1e12, 4 * self.side**2 * (2 + panels)
