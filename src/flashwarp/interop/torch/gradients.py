"""The gradients of rows that were looked up: who keeps them, and what each row of a bag gets.

Nothing here waits for a GPU, but for lookups of several tables with offsets, whose backward asks
for the ids of each table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from flashwarp.device import Device
from flashwarp.interop.torch.lookups import TensorLookup, keep_gradients, look_up
from flashwarp.interop.torch.operators import _stream_of
from flashwarp.table.lookup import Pooling


class Kept(tuple[torch.Tensor, torch.Tensor]):
    """What a backward has left: ids, and the gradients of their rows."""

    # The capture of a CUDA graph of which the backward is part: only its replays store to the
    # tensors.
    capture: int | None

    def __new__(cls, ids: torch.Tensor, gradients: torch.Tensor, device: Device) -> Kept:
        """Note which capture the current stream takes part in."""
        self = super().__new__(cls, (ids, gradients))
        self.capture = capture_of(device, ids)
        return self


def capture_of(device: Device, tensor: torch.Tensor) -> int | None:
    """Return the number of the capture in which torch's current stream takes part, or None."""
    stream = _stream_of(tensor)
    return None if stream is None else device.capture(stream)


class Part(NamedTuple):
    """One table of a lookup, as its backward needs it."""

    lookup: TensorLookup  # whose `keep` takes the gradients
    single: TensorLookup  # its rows as float32, for gradients of weights and of maxima
    trains: bool

    @property
    def padding(self) -> int | None:
        """The id that gets no gradient."""
        return self.lookup.lookup.tables[0].padding


def look_up_rows(
    lookup: TensorLookup, parts: tuple[Part, ...], anchor: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Look up rows; backward comes to them by way of `anchor`, a tensor that needs a gradient."""
    rows: torch.Tensor = _Rows.apply(anchor, ids, lookup, parts)
    return rows


def look_up_bags(
    lookup: TensorLookup,
    parts: tuple[Part, ...],
    anchor: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Look up bags, as `look_up_rows`."""
    pooled: torch.Tensor = _Bags.apply(anchor, ids, offsets, weights, lookup, parts)
    return pooled


class _Rows(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        _anchor: torch.Tensor,
        ids: torch.Tensor,
        lookup: TensorLookup,
        parts: tuple[Part, ...],
    ) -> Any:
        ctx.save_for_backward(ids)
        ctx.parts = parts
        return look_up(lookup, ids)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        column = 0
        for place, part in enumerate(ctx.parts):
            own = ids if len(ctx.parts) == 1 else ids[place]
            after = column + part.lookup.dim
            if part.trains:
                _keep_rows(part, own, gradient[..., column:after])
            column = after
        return None, None, None, None


def _keep_rows(part: Part, ids: torch.Tensor, gradient: torch.Tensor) -> None:
    ids = ids.reshape(-1).long()
    rows = gradient.reshape(-1, part.lookup.dim)
    if part.padding is not None:
        rows = rows.masked_fill((ids == part.padding).unsqueeze(-1), 0)
    keep_gradients(part.lookup, ids, rows)


class _Bags(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        _anchor: torch.Tensor,
        ids: torch.Tensor,
        offsets: torch.Tensor | None,
        weights: torch.Tensor | None,
        lookup: TensorLookup,
        parts: tuple[Part, ...],
    ) -> Any:
        pooled = look_up(lookup, ids, offsets, weights)
        kept = pooled if lookup.pooling is Pooling.MAX else None
        ctx.save_for_backward(ids, offsets, weights, kept)
        ctx.parts = parts
        ctx.last_offset = lookup.last_offset
        return pooled

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ids, offsets, weights, pooled = ctx.saved_tensors
        if len(gradient) == 0:  # without bags no id is in one
            none = None if weights is None else torch.zeros_like(weights)
            return None, None, None, none, None, None
        of_weights: list[torch.Tensor] = []
        column = 0
        pieces = _pieces(ids, offsets, weights, len(ctx.parts), ctx.last_offset)
        for part, bags in zip(ctx.parts, pieces, strict=True):
            columns = slice(column, column + part.lookup.dim)
            column = columns.stop
            rows = bags.of_rows(gradient[:, columns], part.padding)
            if ctx.needs_input_grad[3]:
                found = look_up(part.single, bags.ids)
                of_weights.append((rows.float() * found).sum(-1))
            if part.trains:
                maxima = None if pooled is None else pooled[:, columns]
                keep_gradients(
                    part.lookup, bags.ids, _of_table(part, bags, rows, maxima, len(gradient))
                )
        summed = None
        if of_weights:
            summed = torch.cat(of_weights).reshape(weights.shape).to(weights.dtype)
        return None, None, None, summed, None, None


class _BagsOfTable:
    """The ids of one table, and the bag of each.

    `inside` says which ids are in their bag: some may come before the first offset, or behind the
    last.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        bag: torch.Tensor,
        weights: torch.Tensor | None,
        inside: torch.Tensor | None,
    ) -> None:
        self.ids = ids.reshape(-1).long()
        self.bag = bag
        self.weights = None if weights is None else weights.reshape(-1, 1)
        self.counts = torch.ones_like(self.ids, dtype=torch.bool) if inside is None else inside

    def of_rows(self, gradient: torch.Tensor, padding: int | None) -> torch.Tensor:
        """Return the gradient of its bag for each id; zeros for ids that are in none."""
        if padding is not None:
            self.counts = self.counts & (self.ids != padding)
        return gradient[self.bag].masked_fill(~self.counts.unsqueeze(-1), 0)

    def sizes(self, bags: int) -> torch.Tensor:
        """Return for each id how many ids its bag has."""
        counts = self.counts.float()
        sizes = torch.zeros(bags, device=counts.device).index_add(0, self.bag, counts)
        return sizes[self.bag].clamp(min=1).unsqueeze(-1)


def _pieces(
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    tables: int,
    last_offset: bool,
) -> Iterator[_BagsOfTable]:
    """Divide what a lookup has taken by tables."""
    if offsets is None:
        for place in range(tables):
            own = ids if tables == 1 else ids[place]
            factors = weights if weights is None or tables == 1 else weights[place]
            places = torch.arange(own.numel(), device=ids.device)
            yield _BagsOfTable(own, places // max(1, own.shape[-1]), factors, None)
        return
    begins = (offsets[:-1] if last_offset else offsets).long()
    places = torch.arange(ids.numel(), device=ids.device)
    inside = places >= begins[0]
    if last_offset:
        inside &= places < offsets[-1]
    count = len(begins) // tables
    bounds = [0, ids.numel()]
    if tables > 1:
        bounds = [0, *begins[count::count].tolist(), ids.numel()]
    for place in range(tables):
        of_table = slice(bounds[place], bounds[place + 1])
        first = place * count
        bag = torch.searchsorted(begins[first : first + count], places[of_table], right=True) - 1
        bag = bag.clamp_(min=0)  # of ids before the first bag, which are not inside
        yield _BagsOfTable(
            ids[of_table],
            bag,
            None if weights is None else weights[of_table],
            inside[of_table],
        )


def _of_table(
    part: Part, bags: _BagsOfTable, rows: torch.Tensor, maxima: torch.Tensor | None, count: int
) -> torch.Tensor:
    """Return what of the gradients of their bags, of which there are `count`, rows of ids get."""
    if maxima is not None:
        found = look_up(part.single, bags.ids).to(maxima.dtype)
        return rows * _first_maxima(found, bags, maxima)
    if part.lookup.pooling is Pooling.MEAN:
        return rows / bags.sizes(count).to(rows.dtype)
    return rows if bags.weights is None else rows * bags.weights.to(rows.dtype)


def _first_maxima(rows: torch.Tensor, bags: _BagsOfTable, maxima: torch.Tensor) -> torch.Tensor:
    """Return one where a row is the first of its bag that has the maximum, else zero."""
    none = rows.shape[0]
    places = torch.arange(none, device=rows.device).unsqueeze(-1)
    here = (rows == maxima[bags.bag]) & bags.counts.unsqueeze(-1)
    found = torch.where(here, places, none)
    first = torch.full(maxima.shape, none, device=rows.device, dtype=found.dtype)
    first = first.scatter_reduce(0, bags.bag.unsqueeze(-1).expand_as(found), found, "amin")
    return (first[bags.bag] == places).to(maxima.dtype)
