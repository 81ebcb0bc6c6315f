"""`Embedding`: torch's module of that name, over a table larger than memory."""

from __future__ import annotations

import os
from typing import Any

import torch

import flashwarp
from flashwarp.array.array import Array
from flashwarp.errors import ArgumentError, DtypeError, ReadOnlyError
from flashwarp.interop.torch.operators import gather

__all__ = ["Embedding"]

_COMPUTED = (torch.float32, torch.float16, torch.bfloat16)


class Embedding(torch.nn.Module):
    """Rows of a table in a storage, as `torch.nn.Embedding` returns those of a parameter."""

    def __init__(
        self,
        table: Array | str | os.PathLike[str],
        *,
        scales: Any = None,
        dim: int | None = None,
        dtype: torch.dtype | None = None,
        stored: torch.dtype | None = None,
        padding_idx: int | None = None,
        **opening: Any,
    ) -> None:
        super().__init__()
        self._owns = not isinstance(table, Array)
        array = table if isinstance(table, Array) else flashwarp.open(table, **opening)
        self.array = array
        if array.ndim != 2:
            raise ArgumentError(f"a table has two axes, rows and elements, not {array.shape}")
        self.num_embeddings, width = array.shape
        self.embedding_dim = width if dim is None else dim
        if not 1 <= self.embedding_dim <= width:
            raise ArgumentError(f"dim={dim} of rows of {width} elements")
        self.stored = stored or getattr(torch, array.dtype.name)
        self.dtype = dtype or (self.stored if self.stored in _COMPUTED else torch.float32)
        if self.dtype not in _COMPUTED:
            raise DtypeError(f"dtype={self.dtype}: use float32, float16 or bfloat16")
        if scales is not None:
            raise ArgumentError("scales= does not work yet")
        if padding_idx is not None and padding_idx < 0:
            padding_idx += self.num_embeddings
        self.padding_idx = padding_idx
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        """Return the rows of `input`, ids of any shape."""
        if self.array.writable and torch.is_grad_enabled():
            rows: torch.Tensor = _Trained.apply(self._anchor, input, self)
            return rows
        return self._rows(input)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        rows = gather(self.array, ids)
        if self.stored != rows.dtype:
            rows = rows.view(self.stored)
        return rows[..., : self.embedding_dim].to(self.dtype)

    def note(self, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        """Append gradients of rows to `pending`, for an optimizer."""
        if not self.array.writable:
            raise ReadOnlyError('the table is read-only: open it with mode="r+" to train it')
        self.pending.append((ids, gradients))

    def prefetch(self, ids: torch.Tensor, stream: object = None) -> None:
        """Start fetching the rows of `ids` into the cache; does not wait for their data."""
        self.array.prefetch(ids.reshape(-1), stream)

    def close(self) -> None:
        """Close the array, if the module has opened it."""
        if self._owns:
            self.array.close()


class _Trained(torch.autograd.Function):
    """A lookup whose backward keeps the gradients of its rows."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, ids: torch.Tensor, table: Embedding) -> Any:
        ctx.save_for_backward(ids)
        ctx.table = table
        return table._rows(ids)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        ctx.table.note(ids.reshape(-1).long(), gradient.reshape(-1, ctx.table.embedding_dim))
        return None, None, None
