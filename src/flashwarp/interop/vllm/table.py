"""The class of n-gram tables that vLLM makes in place of its own: rows stay in the checkpoint.

vLLM's model asks for rows ahead of the layer that needs them, by `start_prefetch`, and takes them
by `finalize_prefetch`. Here the first brings lines into the cache, and the second copies the rows:
both in the order of the current stream, so that CUDA graphs may contain one without the other.
"""

from __future__ import annotations

from typing import Any

import torch

from flashwarp.errors import ArgumentError, DtypeError
from flashwarp.interop.torch.embedding import Embedding
from flashwarp.interop.torch.offload import Offloaded, offload
from flashwarp.interop.torch.offloading.table import STORED
from flashwarp.interop.torch.operators import gather
from flashwarp.interop.vllm.loading import Left

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)


def table_class(
    base: type,
    files: str,
    host_memory: int | str,
    gpu_memory: int | str,
    device: str | None = None,
    left: Left | None = None,
) -> type:
    """Return a subclass of vLLM's abstract class, whose tables lie in a checkpoint.

    `base` is vLLM's ``Qwen4ExpPLEEmbedding``. `files` and the limits of each table's memory are as
    for `flashwarp.torch.offload`; `left` takes the tensors that vLLM's loader need not read.
    """

    class FlashwarpPLEEmbedding(base):  # type: ignore[misc]
        """A table whose rows stay in the checkpoint; vLLM's loader has nothing to copy."""

        supports_prefetch = True

        def __init__(self, *args: Any, prefix: str, **options: Any) -> None:
            super().__init__(*args, prefix=prefix, **options)
            if self.tp_size != 1:
                raise ArgumentError(
                    f"the table {prefix!r} is divided among {self.tp_size} processes: flashwarp "
                    "reads whole tables, so set embedding_across_dp=False and tensor_parallel_size="
                    "1, or unset FLASHWARP_VLLM_TABLES"
                )
            self._ids: torch.Tensor | None = None
            self._held = _open(prefix, self.weight, files, host_memory, gpu_memory, device)
            if left is not None:
                left.add(self._held.tables.tensors)

        def allocate_embedding_weight(
            self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype
        ) -> torch.Tensor:
            """Return a weight without memory, to which loaders copy nothing."""
            if dtype not in _DTYPES:
                raise DtypeError(
                    f"rows of {dtype}: flashwarp reads {', '.join(map(str, _DTYPES))} for vLLM, "
                    "not packed numbers; unset FLASHWARP_VLLM_TABLES for this model"
                )
            return torch.empty(num_embeddings, embedding_dim, dtype=dtype, device="meta")

        def start_prefetch(self, ngram_ids: torch.Tensor) -> None:
            """Start to bring rows into the cache; waits for nothing."""
            self._held.rows.prefetch(ngram_ids)
            self._ids = ngram_ids

        def finalize_prefetch(self, total_tokens: int) -> torch.Tensor:
            """Return the rows of the ids that came last, those of a token side by side."""
            ids = self._ids
            if ids is None or ids.shape[0] != total_tokens:
                given = "no ids" if ids is None else f"the ids of {ids.shape[0]} tokens"
                raise ArgumentError(
                    f"rows of {total_tokens} tokens were asked for, and {given} were given: call "
                    "start_prefetch before"
                )
            self._ids = None
            return self.forward(ids).flatten(-2)

        def forward(self, ngram_ids: torch.Tensor) -> torch.Tensor:
            """Return the rows of ids in the dtype of the storage, as vLLM's own tables do."""
            return gather(self._held.array, ngram_ids).view(self.weight.dtype)

        def close(self) -> None:
            """Close the table."""
            self._held.tables.close()

    return FlashwarpPLEEmbedding


class _Held:
    """An offloaded table, out of sight of vLLM's loaders, which walk through modules."""

    def __init__(self, prefix: str, module: torch.nn.Embedding, tables: Offloaded) -> None:
        self.tables = tables
        self.array = tables.tables[prefix]
        self.rows: Embedding = module.weight.rows


def _open(
    prefix: str,
    weight: torch.Tensor,
    files: str,
    host_memory: int | str,
    gpu_memory: int | str,
    device: str | None,
) -> _Held:
    """Offload a table whose tensors have the name of vLLM's module."""
    # Rows are copied as they are. This module's own lookups, of which prefetches alone are used,
    # convert to a dtype that arithmetic has.
    with torch.device("meta"):
        module = torch.nn.Embedding(*weight.shape, dtype=torch.bfloat16).eval()
    module.weight.requires_grad_(False)
    model: torch.nn.Module = module
    for name in reversed(prefix.split(".")):
        outer = torch.nn.Module()
        outer.add_module(name, model)
        model = outer
    where = device or f"cuda:{torch.cuda.current_device()}"
    tables = offload(
        model, prefix, files, host_memory=host_memory, gpu_memory=gpu_memory, device=where
    )
    stored = {STORED[tensor.dtype][1] for tensor in tables.tensors}
    if stored != {weight.dtype}:
        tables.close()
        raise DtypeError(
            f"{prefix!r} is stored as {', '.join(map(str, stored))}, and vLLM takes its bytes for "
            f"{weight.dtype}: run it with the dtype of the checkpoint, or unset "
            "FLASHWARP_VLLM_TABLES"
        )
    return _Held(prefix, module, tables)
