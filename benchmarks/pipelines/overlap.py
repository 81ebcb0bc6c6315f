"""Batches beside computation, from four times as much of one to four times as much of the other.

Stands beside figure 11 of the CAM paper: calls that read as if they were synchronous, against calls
by hand, each beside the longer one of computing and reading alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashwarp as fw
from benchmarks.pipelines.base import Bench, Data

__all__ = ["measure"]

_ROW_BYTES = 4096
_RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
_EQUAL, _SWEEP = 1 / 1.08, 1 / 1.10
_SERIAL = 1.5
# Rows and columns of a product, and what it sums over. The blocks of a small one fill a GPU a few
# times only, so fewer multiprocessors can cost it a whole round of blocks.
_LARGE = {"cuda": (8192, 2048), "cpu": (192, 192)}
_SMALL = {"cuda": (4096, 4096), "cpu": (128, 128)}
_DEPTH = 2
_STORAGES = ("memory", "page cache")


def measure(bench: Bench, data: Data, batch: int, steps: int) -> None:
    """Sweep the ratio of reading to computing, by pulled batches and by those without SMs."""
    rows = max(1, min(batch, data.nbytes // 2) // _ROW_BYTES)
    large, small = (_Work(bench, *sizes[bench.device.kind]) for sizes in (_LARGE, _SMALL))
    for storage in _STORAGES:
        with data.open(storage, _ROW_BYTES) as array:
            ids = [bench.draw(number, rows, len(array)) for number in range(steps)]
            for name, options in bench.ways.items():
                ratios = _RATIOS if storage == "memory" else (1.0,)
                _sweep(bench, array, ids, large, f"{storage}, {name}", options, ratios)
                if storage == "memory":
                    label = f"{storage}, {name}, small products"
                    _sweep(bench, array, ids, small, label, options, (1.0,))


class _Work:
    """Computation of a length that can be chosen: products of matrices."""

    def __init__(self, bench: Bench, side: int, depth: int) -> None:
        torch = bench.torch
        made = torch.Generator(bench.place).manual_seed(1)
        dtype = torch.bfloat16 if bench.on_gpu else torch.float32
        self._a, self._b = (
            torch.randn(shape, generator=made, device=bench.place).to(dtype)
            for shape in ((side, depth), (depth, side))
        )
        self._out = torch.empty((side, side), dtype=dtype, device=bench.place)
        self._torch = torch
        many = 50
        self.seconds = bench.median_cost(lambda: self.compute(many)).seconds / many

    def compute(self, products: int) -> None:
        """Queue some products."""
        for _ in range(products):
            self._torch.mm(self._a, self._b, out=self._out)


def _sweep(
    bench: Bench, array: fw.Array, ids: list[Any], work: _Work, label: str,
    options: dict[str, Any], ratios: tuple[float, ...],
) -> None:  # fmt: skip
    rows, steps = len(ids[0]), len(ids)
    sums = bench.torch.zeros((), dtype=bench.torch.int64, device=bench.place)
    with fw.Pipeline(array, rows, depth=_DEPTH, **options) as pipeline:

        def use(batch: Any, products: int) -> None:
            # A consumer of the data, so that a batch that came too late is noticed.
            sums.add_(batch[:, 0].sum())
            work.compute(products)

        def serial(products: int) -> None:
            for each in ids:
                use(bench.operators.gather(array, each), products)

        def by_iterate(products: int) -> None:
            for batch, _ in pipeline.iterate(ids):
                use(batch, products)

        def by_hand(products: int) -> None:
            for each in ids[:_DEPTH]:
                pipeline.prefetch(each)
            for number in range(steps):
                batch = pipeline.synchronize()
                # Before the step's own work, behind which it would begin too late.
                if number + _DEPTH < steps:
                    pipeline.prefetch(ids[number + _DEPTH])
                use(batch, products)

        label = f"{label} ({pipeline.explain().way})"
        reading = bench.median_cost(lambda: by_iterate(0)).seconds / steps
        wanted = int(sum(int(each.sum()) for each in ids)) * (_ROW_BYTES // 4)
        for ratio in ratios:
            products = max(1, round(reading / ratio / work.seconds))

            def alone(products: int = products) -> None:
                for _ in range(steps):
                    work.compute(products)

            computing = bench.median_cost(alone).seconds / steps
            longer = max(computing, reading)
            found: dict[str, tuple[float, bool]] = {}
            for name, way in (("by hand", by_hand), ("iterate", by_iterate), ("serial", serial)):
                found[name] = _checked(bench, way, products, sums, wanted)
            _tell(bench, f"{label}, reading {ratio:g} of computing", found, steps, longer, reading)


def _checked(
    bench: Bench, way: Callable[[int], None], products: int, sums: Any, wanted: int
) -> tuple[float, bool]:
    way(products)
    sums.zero_()
    seconds = bench.cost(lambda: way(products)).seconds
    right = int(sums) == wanted
    seen = sorted([seconds, *(bench.cost(lambda: way(products)).seconds for _ in range(2))])
    return seen[1], right


def _tell(
    bench: Bench, label: str, found: dict[str, tuple[float, bool]], steps: int, longer: float,
    reading: float,
) -> None:  # fmt: skip
    note = f"{reading * 1e3:.3g} ms to read a batch, {longer * 1e3:.3g} ms the longer one"
    equal = " 1 " in label
    for name, (seconds, right) in found.items():
        target = 0.0 if name == "serial" else _EQUAL if equal else _SWEEP
        bench.add(
            f"{label}: {name}", steps / seconds, "steps/s", ("the longer one alone", 1 / longer),
            target, right, note=note,
        )  # fmt: skip
    serial = found["serial"][0]
    for name in ("iterate", "by hand"):
        bench.add(
            f"{label}: {name}", steps / found[name][0], "steps/s", ("serial", steps / serial),
            _SERIAL if equal else 0.0, found[name][1], paper="CAM figure 11",
        )  # fmt: skip
