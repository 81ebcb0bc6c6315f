"""Multiply matrices in files that exceed the memory of the device.

    python examples/matmul_files.py [--device cpu | cuda] [--side 768] [--panel 256] [--slab 128]

Writes two random matrices to files, multiplies them into a third one with `flashwarp.apps.gemm`,
and compares it with numpy's product. Two panels of rows and some slabs are on the device at a time;
the rest arrives and leaves while it multiplies.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import flashwarp as fw
from flashwarp.apps import gemm


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
            gemm.multiply(a, b, product, options.panel, options.slab)
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
