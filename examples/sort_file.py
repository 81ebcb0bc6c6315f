"""Sort a file of numbers that exceeds the memory of the device.

    python examples/sort_file.py [--device cpu | cuda] [--keys 1000000] [--run-keys 200000]

Writes random 32-bit keys to a file, sorts them into another one with `flashwarp.apps.sorting`, and
checks them with numpy. No more than `--run-keys` keys are sorted at a time. Each key is read twice
and written twice, however many there are, by pipelines that read and write while the device sorts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import flashwarp as fw
from flashwarp.apps import sorting

BLOCK = 1024  # keys of a row: 4 KiB


def main() -> None:
    """Sort, and check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--run-keys", type=int, default=200_000)
    options = parser.parse_args()
    blocks = max(1, options.keys // BLOCK)
    run_rows = max(1, options.run_keys // BLOCK)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        random = np.random.default_rng(1)
        keys = random.integers(-(1 << 31), 1 << 31, (blocks, BLOCK), np.int32)
        np.save(folder / "keys.npy", keys)

        start = time.perf_counter()
        with (
            fw.open(folder / "keys.npy", "r+", device=options.device) as unsorted,
            fw.create(folder / "sorted.npy", np.int32, keys.shape, device=options.device) as target,
        ):
            sorting.sort(unsorted, target, run_rows)
        seconds = time.perf_counter() - start

        if not np.array_equal(np.load(folder / "sorted.npy").ravel(), np.sort(keys, axis=None)):
            raise SystemExit("the keys are not sorted")
    print(
        f"{options.device}: {keys.size} keys in {-(-blocks // run_rows)} runs, sorted in "
        f"{seconds:.2f} s, {keys.size / seconds / 1e6:.1f} million keys a second"
    )


if __name__ == "__main__":
    main()
