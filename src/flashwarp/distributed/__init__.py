"""Arrays whose rows are dealt over the ranks of a torch.distributed program.

    import flashwarp.distributed

    with flashwarp.distributed.ShardedArray.open(folder) as table:
        rows = table.gather(ids)  # on all ranks, each with ids of its own

Each rank serves its rows from a file of its own. `gather` reads rows of several arrays at once, and
`reshard` deals the rows over another number of ranks. `create_table` makes a table of embeddings,
and `Embedding` looks its rows up for a model; the optimizers of `flashwarp.torch` train it. `load`
brings the tensors of a checkpoint to all ranks with one read of its files.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    raise ImportError(
        f"flashwarp.distributed needs torch, which cannot be imported ({_error}): install it with: "
        "pip install 'flashwarp[torch]'"
    ) from _error

from flashwarp.distributed.array import ShardedArray, gather
from flashwarp.distributed.embedding import Embedding
from flashwarp.distributed.loading import load
from flashwarp.distributed.resharding import reshard
from flashwarp.distributed.tables import create_table

__all__ = ["Embedding", "ShardedArray", "create_table", "gather", "load", "reshard"]
