"""Making a sharded table that is trained: each rank makes its shard, and the record of it."""

from __future__ import annotations

import functools
from typing import Any

from flashwarp.distributed import opening
from flashwarp.distributed.array import ShardedArray
from flashwarp.distributed.dealing import Deal
from flashwarp.errors import ArgumentError
from flashwarp.storage.files import PathLike
from flashwarp.table.making import Initial, NewTable


def create_table(
    folder: PathLike,
    rows: int,
    dim: int,
    *,
    optimizer: str = "rowwise_adagrad",
    init: Initial = "normal",
    scale: float = 1.0,
    state: float = 0.0,
    seed: int = 0,
    deal: Deal = "range",
    group: Any = None,
    timeout_s: float | None = None,
) -> None:
    """Make a sharded table of embeddings, as `flashwarp.torch.create_table` makes one file.

    Collective: all ranks call it with the same arguments. Blocks until the table is durable on all
    of them; after a crash it is there as a whole, or not at all.

    Parameters
    ----------
    folder, deal, group, timeout_s
        As for `ShardedArray.create`.
    rows, dim, optimizer, init, scale, state, seed
        As for `flashwarp.torch.create_table`, whose weights the table has on any number of ranks.
        With ``deal="hash"`` other rows have them, and `init` is a name.

    Raises
    ------
    ArgumentError
        For sizes, names or weights that cannot work, or that differ between ranks.
    ExistingFileError, PathError, RankLostError
        As `ShardedArray.create`.
    """

    def table() -> tuple[str, NewTable]:
        new = NewTable.of(rows, dim, optimizer, init, scale, state, seed)
        by_name = isinstance(init, str)
        if not by_name and deal != "range":
            raise ArgumentError('init has weights for ranges of rows: use deal="range"')
        drawn = f"as {init}, scale {scale}, seed {seed}" if by_name else "from given weights"
        return f", a table for {optimizer} drawn {drawn}, state {state}", new

    options: opening.Options = {"device": "cpu", "cache": "auto", "line": None}
    make = functools.partial(opening.create_shards, table=table)
    ShardedArray._open(make, group, timeout_s, folder, options, None, (), deal).close()
