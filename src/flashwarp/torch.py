"""Operators and modules of torch that read and store rows of arrays larger than memory.

    import flashwarp.torch

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def layer(table, ids, weight):
        return flashwarp.torch.gather(table, ids) @ weight

Eager code, `torch.compile` and captures of CUDA graphs may call them. On a GPU they work in the
order of torch's current stream and wait for nothing; the next call on the array, or
`Array.check`, raises what went wrong. On the CPU device they raise it themselves.

`Embedding`, `EmbeddingBag` and `EmbeddingGroup` look rows up in tables that stay in files. `Loader`
makes batches of rows, and `NeighborSampler` mini-batches of a graph. `save` and `load` keep state
dicts as versions of a checkpoint, without pickle. `Partners` keeps copies of a rank's checkpoints
on another rank, and `StoreVotes` lets ranks commit versions together that share no folder.
`offload_activations` keeps what autograd saves for backward in host memory and a file.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    raise ImportError(
        f"flashwarp.torch needs torch, which cannot be imported ({_error}): install it with: "
        "pip install 'flashwarp[torch]'"
    ) from _error

from flashwarp.interop.torch.activations import offload_activations
from flashwarp.interop.torch.embedding import Embedding, EmbeddingBag
from flashwarp.interop.torch.group import EmbeddingGroup
from flashwarp.interop.torch.loader import Loader
from flashwarp.interop.torch.offload import Offloaded, offload
from flashwarp.interop.torch.operators import gather, scatter
from flashwarp.interop.torch.optim import SGD, Adagrad, Adam, AdamW, RowWiseAdagrad
from flashwarp.interop.torch.partners import Partners
from flashwarp.interop.torch.sampling import NeighborSampler, Sample
from flashwarp.interop.torch.states import load, save
from flashwarp.interop.torch.votes import StoreVotes
from flashwarp.table.checkpoint import restore_table
from flashwarp.table.making import create_table

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingGroup",
    "Loader",
    "NeighborSampler",
    "Offloaded",
    "Partners",
    "RowWiseAdagrad",
    "Sample",
    "StoreVotes",
    "create_table",
    "gather",
    "load",
    "offload",
    "offload_activations",
    "restore_table",
    "save",
    "scatter",
]
