"""Sort a file of numbers that exceeds the memory of the device.

    python examples/sort_file.py [--device cpu | cuda] [--keys 1000000] [--run-keys 200000]

Writes random 32-bit keys to a file, sorts them into another one, and checks them with numpy. No
more than `--run-keys` keys are sorted at a time. Each key is read twice and written twice, however
many there are, by pipelines that read and write while the device sorts.

The first pass sorts runs that fit the device, in place. The second merges all runs at once: blocks
of keys arrive in the order of their first keys, which the first pass has noted. No key of a block
that has not arrived is less than that block's first key, so only the last block of each run can
hold keys that must wait. Therefore a pool of as many keys as there are in such blocks, and a tile
more, always holds a tile of keys that can leave. All sizes are known before any data is, and no
step waits on the host.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import flashwarp as fw

BLOCK = 1024  # keys of a row: 4 KiB


class Merge:
    """The second pass, without its reading and writing: which blocks it needs, and what leaves.

    Parameters
    ----------
    firsts : array
        The first key of each block, in the order of blocks.
    run_blocks, tile_blocks : int
        Blocks of a run, and of a tile; the last run may have fewer.

    Attributes
    ----------
    batches : list of array of int64
        Blocks of each step. All but the first and the last have a tile of them.
    """

    def __init__(self, firsts: NDArray[Any], run_blocks: int, tile_blocks: int) -> None:
        # Stable, so that blocks of one run stay in order where their first keys are equal.
        order = np.argsort(firsts, kind="stable").astype(np.int64)
        runs = -(-len(firsts) // run_blocks)
        ahead = min(len(order), runs + tile_blocks)
        cuts = [0, *range(ahead, len(order), tile_blocks), len(order)]
        self.batches = [order[a:b] for a, b in itertools.pairwise(cuts)]
        self._tile = tile_blocks
        self._waiting: Any = None
        self._done, self._blocks = 0, len(order)

    def step(self, blocks: Any) -> Iterator[tuple[range, Any]]:
        """Take a batch of blocks; yield the places, and keys, of sorted blocks that can leave."""
        width, pool = blocks.shape[1], blocks.reshape(-1)
        if self._waiting is not None:
            pool = torch.cat((self._waiting, pool))
        pool = torch.sort(pool).values.view(-1, width)
        last = self._done + len(pool) == self._blocks
        leaving = len(pool) if last else min(self._tile, len(pool))
        for first in range(0, leaving, self._tile):
            tile = pool[first : min(first + self._tile, leaving)]
            yield range(self._done, self._done + len(tile)), tile
            self._done += len(tile)
        self._waiting = None if last else pool[leaving:].reshape(-1)


def sort(keys: fw.Array, target: fw.Array, run_rows: int, tile_rows: int | None = None) -> None:
    """Sort all keys of an array into another one of the same shape and dtype.

    A row is a block of keys, some KiB or more. `keys` is left in sorted runs of `run_rows` rows,
    which are sorted at a time: a third of the device's memory at most. `target` is durable when the
    call returns. `tile_rows` are merged at a time, besides one of each run.
    """
    if tile_rows is None:
        tile_rows = max(1, run_rows // 4)
    if keys.ndim != 2 or (keys.shape, keys.dtype) != (target.shape, target.dtype):
        raise ValueError(
            f"keys of shape {keys.shape} and dtype {keys.dtype}, target of {target.shape} and "
            f"{target.dtype}: give two arrays of two axes that agree"
        )
    if len(keys) == 0:
        return
    firsts = []
    for tile in fw.Pipeline.tiles(keys, run_rows, writable=True, library="torch"):
        tile.copy_(torch.sort(tile.reshape(-1)).values.view_as(tile))
        firsts.append(tile[:, 0].clone())
    merge = Merge(torch.cat(firsts).cpu().numpy(), run_rows, tile_rows)
    with (
        fw.Pipeline(keys, max(map(len, merge.batches)), library="torch") as reading,
        fw.Pipeline(target, tile_rows, library="torch") as writing,
    ):
        for blocks, _ in reading.iterate(merge.batches):
            for rows, tile in merge.step(blocks):
                writing.write_back(rows, tile)
        writing.flush()


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
            sort(unsorted, target, run_rows)
        seconds = time.perf_counter() - start

        if not np.array_equal(np.load(folder / "sorted.npy").ravel(), np.sort(keys, axis=None)):
            raise SystemExit("the keys are not sorted")
    print(
        f"{options.device}: {keys.size} keys in {-(-blocks // run_rows)} runs, sorted in "
        f"{seconds:.2f} s, {keys.size / seconds / 1e6:.1f} million keys a second"
    )


if __name__ == "__main__":
    main()
