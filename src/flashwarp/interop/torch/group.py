"""`EmbeddingGroup`: lookups in several tables by one launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from flashwarp.config import brief
from flashwarp.errors import ArgumentError
from flashwarp.interop.torch.checks import check_bags, check_stream, check_tensors
from flashwarp.interop.torch.embedding import Embedding, EmbeddingBag
from flashwarp.interop.torch.gradients import look_up_bags, look_up_rows
from flashwarp.interop.torch.lookups import TensorLookup, look_up
from flashwarp.table.lookup import Pooling


class EmbeddingGroup(torch.nn.Module):  # type: ignore[misc]
    """Several tables that are looked up together, as the sparse features of a recommender.

    One launch serves all tables, so a call costs what one table costs. Their arrays may be one
    array, of which each module has some rows, or several, in one cache or in several.

    Parameters
    ----------
    tables : sequence of Embedding, or of EmbeddingBag
        All of one kind, with one `dtype`; bags with one `mode` and `include_last_offset`. Their
        weights lie side by side in the result, in this order.

    Attributes
    ----------
    tables : torch.nn.ModuleList
        Each keeps the gradients of its rows in its `pending`.
    dims : list of int
        Numbers that each table has in a row of the result, for `torch.split`.

    Raises
    ------
    ArgumentError
        For modules that differ in more than their tables, or lie on different devices.

    Examples
    --------
    >>> import flashwarp as fw, numpy as np, torch
    >>> import flashwarp.torch
    >>> np.save("group.npy", np.arange(8, dtype="float32").reshape(4, 2))
    >>> with fw.open("group.npy", device="cpu") as x:
    ...     halves = [fw.torch.Embedding(x, rows=range(i, i + 2)) for i in (0, 2)]
    ...     fw.torch.EmbeddingGroup(halves)(torch.tensor([[0, 1], [0, 0]])).tolist()
    [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 4.0, 5.0]]
    """

    def __init__(
        self,
        tables: Sequence[Embedding] | Sequence[EmbeddingBag] | None = None,
        *sizes: object,
        **options: object,
    ) -> None:
        super().__init__()
        several = isinstance(tables, Iterable) and not isinstance(tables, torch.Tensor)
        listed = list(tables) if tables is not None and several else []
        modules = bool(listed) and all(isinstance(e, Embedding | EmbeddingBag) for e in listed)
        if sizes or options or not modules:
            given = [*([] if tables is None else [tables]), *sizes, *options.values()]
            raise ArgumentError(
                f"EmbeddingGroup({', '.join(map(brief, given))}): tables is a sequence of "
                "Embedding, or of EmbeddingBag, which have their rows in files. Make each once, by "
                "flashwarp.torch.create_table(path, rows, dim), and then "
                "EmbeddingGroup([EmbeddingBag(path, dim=dim), ...])"
            )
        kinds = {_kind(each) for each in listed}
        if len(kinds) > 1:
            raise ArgumentError(
                "the tables of a group have one kind, mode, include_last_offset and dtype, not "
                + " and ".join(sorted(map(str, kinds)))
            )
        self.tables = torch.nn.ModuleList(listed)
        self.dims = [each.embedding_dim for each in listed]
        first = listed[0]._lookup
        self._lookup = TensorLookup(
            [each.table for each in listed],
            first.dtype,
            first.pooling,
            last_offset=first.last_offset,
        )

    def forward(
        self,
        input: torch.Tensor | Sequence[torch.Tensor],  # noqa: A002 - as torch names it
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the rows, or pooled rows, of all tables side by side.

        Parameters
        ----------
        input : torch.Tensor, or sequence of torch.Tensor
            The ids of each table along the first axis; or a tensor of one shape for each table. For
            bags with `offsets`: the ids of all tables, one table after the other, in one axis.
        offsets : torch.Tensor, optional
            Where each bag begins among all ids: as many bags for each table, one table after the
            other.
        per_sample_weights : torch.Tensor, optional
            A factor for each id, of the shape of `input`. For ``mode="sum"``.

        Returns
        -------
        torch.Tensor
            Of shape ``(..., sum(dims))``, where ``...`` is the shape of a table's ids, without the
            last axis for bags; or ``(bags of a table, sum(dims))``.

        Raises
        ------
        BoundsError, IndexDtypeError, DtypeError, ArgumentError, ClosedError
            As the modules raise them. An error of the first table's array may be raised by a call
            of any other.

        Notes
        -----
        Streams, graphs and compilers are as for `Embedding.forward`. With `offsets`, a backward
        waits for the GPU once, to divide the ids by tables.
        """
        check_tensors(offsets=offsets, per_sample_weights=per_sample_weights)
        ids = input if isinstance(input, torch.Tensor) else _stacked(input)
        if offsets is None and len(self.tables) == 1:
            self._check_first_axis(ids, per_sample_weights)
            ids = ids[0]
            per_sample_weights = None if per_sample_weights is None else per_sample_weights[0]
        pools = self._lookup.pooling is not Pooling.NONE
        if not pools and (offsets is not None or per_sample_weights is not None):
            raise ArgumentError("offsets and per_sample_weights are for tables of EmbeddingBag")
        if pools:
            axes = 2 if len(self.tables) == 1 else 3
            check_bags(ids, offsets, per_sample_weights, self._lookup.pooling, axes)
        parts = tuple(table._part() for table in self.tables)
        needs = any(part.trains for part in parts)
        if per_sample_weights is not None:
            needs = needs or per_sample_weights.requires_grad
        if not needs or not torch.is_grad_enabled():
            return look_up(self._lookup, ids, offsets, per_sample_weights)
        anchor = self.tables[0]._anchor
        if not pools:
            return look_up_rows(self._lookup, parts, anchor, ids)
        return look_up_bags(self._lookup, parts, anchor, ids, offsets, per_sample_weights)

    @staticmethod
    def _check_first_axis(*tensors: torch.Tensor | None) -> None:
        """Raise ArgumentError unless tensors have one entry, of the one table."""
        for each in tensors:
            if each is not None and (each.ndim == 0 or len(each) != 1):
                raise ArgumentError(
                    f"a tensor of shape {tuple(each.shape)} for 1 table: the first axis counts the "
                    "tables"
                )

    def prefetch(
        self,
        ids: torch.Tensor | Sequence[torch.Tensor],
        offsets: torch.Tensor | None = None,
        stream: object = None,
    ) -> None:
        """Start fetching what forward would read; see `Embedding.prefetch`."""
        tensor = ids if isinstance(ids, torch.Tensor) else _stacked(ids)
        check_tensors(offsets=offsets)
        handle = check_stream(stream, self._lookup.lookup.device)
        self._lookup.prefetch(tensor, offsets, handle)

    def close(self) -> None:
        """Free what the group has in device memory, and close its tables.

        Raises CaptureError while a CUDA graph reads them, and closes nothing then.
        """
        self._lookup.close()
        for table in self.tables:
            table.close()


def _kind(module: Embedding | EmbeddingBag) -> tuple[str, str, bool, torch.dtype]:
    lookup = module._lookup
    return (type(module).__name__, lookup.pooling.name.lower(), lookup.last_offset, lookup.dtype)


def _stacked(ids: Sequence[torch.Tensor]) -> torch.Tensor:
    if not isinstance(ids, list | tuple):
        raise ArgumentError(f"ids of type {type(ids).__name__}: give a tensor, or a list of them")
    for each in ids:
        check_tensors(ids=each)
    if not ids:
        raise ArgumentError("no ids: give a tensor of ids for each table")
    shapes = {tuple(each.shape) for each in ids}
    if len(shapes) != 1:
        raise ArgumentError(
            f"ids of shapes {sorted(shapes)}: give all tables one shape, or concatenate the ids "
            "and give offsets"
        )
    return torch.stack(list(ids))
