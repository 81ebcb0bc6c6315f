"""An out-of-core merge sort with two passes over the keys, whatever their number.

The first pass sorts runs that fit the device, in place. The second merges all runs at once: blocks
of keys arrive in the order of their first keys, which the first pass has noted. No key of a block
that has not arrived is less than that block's first key, so only the last block of each run can
hold keys that must wait. Therefore a pool of as many keys as there are in such blocks, and a tile
more, always holds a tile of keys that can leave. All sizes are known before any data is, and no
step waits on the host.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from flashwarp.array.array import Array
from flashwarp.config import SIZE_MAX, integer
from flashwarp.errors import ArgumentError

__all__ = ["Merge", "sort"]


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
        self._torch: Any = importlib.import_module("torch")
        self._tile = tile_blocks
        self._waiting: Any = None
        self._done, self._blocks = 0, len(order)

    def step(self, blocks: Any) -> Iterator[tuple[range, Any]]:
        """Take a batch of blocks; yield the places, and keys, of sorted blocks that can leave."""
        torch, width = self._torch, blocks.shape[1]
        pool = blocks.reshape(-1)
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


def sort(keys: Array, target: Array, run_rows: int, tile_rows: int | None = None) -> None:
    """Sort all keys of an array into another one.

    Parameters
    ----------
    keys : Array
        Of two axes: a row is a block of keys, some KiB or more. It must be writable: its keys are
        left in sorted runs.
    target : Array
        Of the same shape and dtype, writable, and of other bytes. Its keys ascend, row by row; they
        are durable when the call returns.
    run_rows : int
        Rows that are sorted at a time: a third of the device's memory at most.
    tile_rows : int, optional
        Rows that are merged at a time, besides one of each run; default a quarter of `run_rows`.

    Raises
    ------
    ArgumentError
        If the arrays do not fit each other.
    StorageError, ReadOnlyError
        As `flashwarp.Pipeline` raises them.

    Examples
    --------
    >>> import numpy as np, flashwarp as fw
    >>> from flashwarp.apps import sorting
    >>> data = np.random.default_rng(1).permutation(4096).astype(np.int32).reshape(-1, 64)
    >>> made = np.zeros_like(data)
    >>> with fw.open(fw.storage.Memory(data), "r+", data.dtype, data.shape, device="cpu") as keys:
    ...     with fw.open(
    ...         fw.storage.Memory(made), "r+", data.dtype, data.shape, device="cpu"
    ...     ) as target:
    ...         sorting.sort(keys, target, run_rows=16)
    >>> bool((made.ravel() == np.arange(4096)).all())
    True
    """
    run_rows = integer("run_rows", run_rows, 1, SIZE_MAX)
    if tile_rows is None:
        tile_rows = max(1, run_rows // 4)
    tile_rows = integer("tile_rows", tile_rows, 1, SIZE_MAX)
    if keys.ndim != 2 or (keys.shape, keys.dtype) != (target.shape, target.dtype):
        raise ArgumentError(
            f"keys of shape {keys.shape} and dtype {keys.dtype}, target of {target.shape} and "
            f"{target.dtype}: give two arrays of two axes that agree"
        )
    if len(keys) == 0:
        return
    torch: Any = importlib.import_module("torch")
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
