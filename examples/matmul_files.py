"""Multiply matrices in files that exceed the memory of the device.

    python examples/matmul_files.py [--device cpu | cuda] [--side 768] [--panel 256] [--slab 128]

Writes two random matrices to files, multiplies them into a third one, and compares it with
numpy's product. A panel of `a` and its panel of the product are on the device at a time, while the
rows of `b` pass by in slabs. All reads and writes are of whole rows, front to back, and go on while
the device multiplies.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import chain, islice, repeat
from pathlib import Path

import numpy as np
import torch

import flashwarp as fw


def multiply(a: fw.Array, b: fw.Array, product: fw.Array, panel_rows: int, slab_rows: int) -> None:
    """Store the product of two matrices of one dtype of floats; it is durable at the return.

    `panel_rows` rows of `a` and of the product are on the device at a time. `b` is read once for
    each panel, `slab_rows` at a time: the more rows in a panel, the less is read.
    """
    if not a.ndim == b.ndim == product.ndim == 2 or (a.shape[1], len(a), b.shape[1]) != (
        len(b), *product.shape,
    ):  # fmt: skip
        raise ValueError(f"{a.shape} times {b.shape} is not {product.shape}")
    if not a.dtype == b.dtype == product.dtype or a.dtype.kind != "f":
        raise ValueError(f"dtypes {a.dtype}, {b.dtype} and {product.dtype}: give one, of floats")
    panels, slabs = cut(len(a), panel_rows), cut(len(b), slab_rows)
    with (
        fw.Pipeline(a, panel_rows, library="torch") as of_a,
        fw.Pipeline(b, slab_rows, library="torch") as of_b,
        fw.Pipeline(product, panel_rows, library="torch") as sums,
    ):
        every_slab = of_b.iterate(chain.from_iterable(repeat(slabs, len(panels))))
        for panel, rows in of_a.iterate(panels):
            total = torch.zeros((len(rows), b.shape[1]), dtype=panel.dtype, device=panel.device)
            for slab, columns in islice(every_slab, len(slabs)):
                total.addmm_(panel[:, columns.start : columns.stop], slab)
            sums.write_back(rows, total)
        sums.flush()


def cut(rows: int, at_a_time: int) -> list[range]:
    """Cut rows into ranges."""
    return [range(k, min(k + at_a_time, rows)) for k in range(0, rows, at_a_time)]


def main() -> None:
    """Multiply, and check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--side", type=int, default=768)
    parser.add_argument("--panel", type=int, default=256)
    parser.add_argument("--slab", type=int, default=128)
    options = parser.parse_args()
    shape = (options.side, options.side)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        random = np.random.default_rng(1)
        matrices = [random.standard_normal(shape, np.float32) for _ in "ab"]
        for name, matrix in zip("ab", matrices, strict=True):
            np.save(folder / f"{name}.npy", matrix)

        start = time.perf_counter()
        with (
            fw.open(folder / "a.npy", device=options.device) as a,
            fw.open(folder / "b.npy", device=options.device) as b,
            fw.create(folder / "product.npy", np.float32, shape, device=options.device) as product,
        ):
            multiply(a, b, product, options.panel, options.slab)
        seconds = time.perf_counter() - start

        wanted = matrices[0] @ matrices[1]
        error = np.abs(np.load(folder / "product.npy") - wanted).max()
        if error > 1e-3 * options.side**0.5:
            raise SystemExit(f"the product is wrong by {error}")
    print(
        f"{options.device}: {options.side} x {options.side} in {seconds:.2f} s, "
        f"{2 * options.side**3 / seconds / 1e9:.1f} GFLOP/s, off by {error:.2g} at most"
    )


if __name__ == "__main__":
    main()
