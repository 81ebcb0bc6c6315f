"""The operators of torch by which modules look rows up, and the tensors that they take.

As `operators` does, an operator takes a text for what is no tensor, and changes the tensor that
stands for the rows of all arrays on a device, so that compilers keep the order of reads and stores.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from flashwarp.errors import ArgumentError, ClosedError, DtypeError, IndexDtypeError
from flashwarp.interop.torch.operators import (
    _order_of,
    _stream_of,
    check_plain,
    is_eager,
    torch_device,
)
from flashwarp.table.lookup import Bags, Ids, Lookup, Number, Pooling, Table, Weights

NUMBERS = {
    torch.float32: Number.FLOAT32,
    torch.float16: Number.FLOAT16,
    torch.bfloat16: Number.BFLOAT16,
    torch.float8_e4m3fn: Number.FLOAT8_E4M3,
    torch.float8_e5m2: Number.FLOAT8_E5M2,
    torch.int8: Number.INT8,
    torch.float4_e2m1fn_x2: Number.FLOAT4_E2M1,
}
"""What tables may store."""

COMPUTED = (torch.float32, torch.float16, torch.bfloat16)
"""What lookups return, and what weights of ids may be."""

SCALES = {
    **{dtype: NUMBERS[dtype] for dtype in COMPUTED},
    torch.float8_e4m3fn: Number.FLOAT8_E4M3,
    torch.float8_e8m0fnu: Number.FLOAT8_E8M0,
}
"""What scales of rows may be."""

_INDICES = (torch.int64, torch.int32)

Keep: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]

_library = torch.library.Library("flashwarp", "FRAGMENT")
_library.define(
    "look_up(Tensor ids, Tensor? offsets, Tensor? weights, Tensor(a!) order, str lookup) -> Tensor"
)
_library.define("keep_gradients(Tensor ids, Tensor gradients, Tensor(a!) order, str lookup) -> ()")

_numbers = itertools.count(1)
_lookups: weakref.WeakValueDictionary[str, TensorLookup] = weakref.WeakValueDictionary()


class TensorLookup:
    """Lookups with tensors, in one table or in several.

    With `last_offset`, offsets have one more, the end of the last bag. `keep` takes the ids and the
    gradients of rows; it is a method of the module that has the lookup, and not held, so that a
    lost module is freed at once. `handle` stands for the lookups among the arguments of operators.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        dtype: torch.dtype,
        pooling: Pooling = Pooling.NONE,
        *,
        last_offset: bool = False,
        keep: Keep | None = None,
    ) -> None:
        self.lookup = Lookup(tables)
        self.dtype = dtype
        self.pooling = pooling
        self.last_offset = last_offset
        self.keep = None if keep is None else weakref.WeakMethod(keep)
        self._device = torch_device(self.lookup.device)
        self._closed = False
        # With all that compiled code depends on: compilers that keep code find it by this text.
        what = f"{len(tables)} tables, {self.lookup.dim} {dtype} {pooling.name} {last_offset}"
        self.handle = f"lookup {next(_numbers)}: {what}"
        _lookups[self.handle] = self

    @property
    def dim(self) -> int:
        """Numbers of a row of the result."""
        return self.lookup.dim

    @property
    def tables(self) -> int:
        """How many tables it has."""
        return len(self.lookup.tables)

    def close(self) -> None:
        """Let operators know it no more, unless a CUDA graph does."""
        self.lookup.close()
        self._closed = True
        _lookups.pop(self.handle, None)

    # What operators do, and what compilers ask.

    def shape(self, ids: torch.Tensor, offsets: torch.Tensor | None) -> tuple[int, ...]:
        """Return the shape of the result; raises what `check` raises."""
        lead = ids.shape
        if self.tables > 1 and offsets is None:
            if not ids.ndim or ids.shape[0] != self.tables:
                raise ArgumentError(
                    f"ids of shape {tuple(ids.shape)} for {self.tables} tables: the first axis "
                    "counts the tables"
                )
            lead = ids.shape[1:]
        if self.pooling is Pooling.NONE:
            return (*lead, self.dim)
        if offsets is not None:
            bags = offsets.shape[0] - self.last_offset
            return (bags // self.tables, self.dim)
        return (*lead[:-1], self.dim)

    def check(
        self, ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
    ) -> None:
        """Raise for operands that do not fit."""
        device = self.lookup.device
        for name, tensor in (("input", ids), ("offsets", offsets), ("per_sample_weights", weights)):
            if tensor is None:
                continue
            check_plain(**{name: tensor})
            kind, ordinal = tensor.device.type, tensor.device.index
            if kind != device.kind or (kind == "cuda" and ordinal != device.ordinal):
                raise ArgumentError(
                    f"{name} is on {tensor.device}, and the table on {device.name!r}: move {name}"
                )
            if name != "per_sample_weights" and tensor.dtype not in _INDICES:
                raise IndexDtypeError(f"{name} has dtype {tensor.dtype}: use int64 or int32")
        if weights is not None:
            if weights.dtype not in COMPUTED:
                raise DtypeError(
                    f"per_sample_weights has dtype {weights.dtype}: use float32, float16 or "
                    "bfloat16"
                )
            if weights.shape != ids.shape:
                raise ArgumentError(
                    f"per_sample_weights has shape {tuple(weights.shape)}, and the input "
                    f"{tuple(ids.shape)}: give each id its weight"
                )
        if offsets is not None:
            self._check_offsets(offsets)

    def _check_offsets(self, offsets: torch.Tensor) -> None:
        if offsets.ndim != 1:
            raise ArgumentError(f"offsets of shape {tuple(offsets.shape)}: they have one axis")
        bags = offsets.shape[0] - self.last_offset
        if bags < 0 or bags % self.tables:
            raise ArgumentError(
                f"{offsets.shape[0]} offsets for {self.tables} tables"
                f"{', of which the last is the end' if self.last_offset else ''}: give each table "
                "as many bags"
            )

    def run(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None,
        weights: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look up, to `out` if it is given; on a GPU in the order of torch's current stream."""
        if self._closed:
            raise ClosedError(f"the table of {self.handle!r} is closed")
        plain = offsets is None and weights is None and ids.dtype in _INDICES
        plain = plain and ids.layout is torch.strided and not ids.is_nested
        if not plain or ids.device != self._device:
            self.check(ids, offsets, weights)
        found = out
        if found is None:
            found = torch.empty(self.shape(ids, offsets), dtype=self.dtype, device=self._device)
        ids = ids.contiguous()
        places = _ids(ids)
        address, number, stream = found.data_ptr(), NUMBERS[self.dtype], _stream_of(ids)
        if self.pooling is Pooling.NONE:
            self.lookup.rows(places, address, number, stream)
            return found
        factors = None
        if weights is not None:
            weights = weights.contiguous()
            factors = Weights(weights.data_ptr(), NUMBERS[weights.dtype])
        offsets = None if offsets is None else offsets.contiguous()
        bags = self._bags(ids, offsets)
        self.lookup.bags(places, bags, self.pooling, factors, address, number, stream)
        return found

    def prefetch(self, ids: torch.Tensor, offsets: torch.Tensor | None, stream: int | None) -> None:
        """Start fetching what a lookup would read; `stream` is a handle on a GPU."""
        if self._closed:
            raise ClosedError(f"the table of {self.handle!r} is closed")
        self.check(ids, offsets, None)
        self.shape(ids, offsets)
        ids = ids.contiguous()
        offsets = None if offsets is None else offsets.contiguous()
        bags = None if offsets is None else self._bags(ids, offsets)
        handle = _stream_of(ids) if stream is None else stream
        self.lookup.prefetch(_ids(ids), bags, handle)

    def _bags(self, ids: torch.Tensor, offsets: torch.Tensor | None) -> Bags:
        """Return how contiguous ids are divided into bags, as many for each table."""
        if offsets is None:
            return Bags(math.prod(ids.shape[:-1]) // self.tables, ids.shape[-1])
        return Bags(
            (offsets.numel() - self.last_offset) // self.tables,
            offsets=offsets.data_ptr(),
            offset_count=offsets.numel(),
            offset_bytes=offsets.element_size(),
        )


def _ids(ids: torch.Tensor) -> Ids:
    return Ids(ids.data_ptr(), ids.numel(), ids.element_size())


def _lookup_of(handle: str) -> TensorLookup:
    try:
        return _lookups[handle]
    except KeyError:
        raise ClosedError(f"the table of {handle!r} is closed, or of another process") from None


def look_up(
    lookup: TensorLookup,
    ids: torch.Tensor,
    offsets: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Look up without a gradient; as an operator of torch, if that makes a difference."""
    if (
        not torch.compiler.is_compiling()
        and is_eager(ids)
        and (weights is None or is_eager(weights))
    ):
        return lookup.run(ids, offsets, weights)
    order = _order_of(str(ids.device))
    found: torch.Tensor = torch.ops.flashwarp.look_up.default(
        ids, offsets, weights, order, lookup.handle
    )
    return found


def keep_gradients(lookup: TensorLookup, ids: torch.Tensor, gradients: torch.Tensor) -> None:
    """Give the gradients of rows to `TensorLookup.keep`, as an operator of torch."""
    order = _order_of(str(ids.device))
    torch.ops.flashwarp.keep_gradients.default(ids, gradients, order, lookup.handle)


def _look_up(
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    _order: torch.Tensor,
    handle: str,
) -> torch.Tensor:
    return _lookup_of(handle).run(ids, offsets, weights)


def _shape_of_lookup(
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    _order: torch.Tensor,
    handle: str,
) -> torch.Tensor:
    lookup = _lookup_of(handle)
    lookup.check(ids, offsets, weights)
    return ids.new_empty(lookup.shape(ids, offsets), dtype=lookup.dtype)


def _keep_gradients(
    ids: torch.Tensor, gradients: torch.Tensor, _order: torch.Tensor, handle: str
) -> None:
    lookup = _lookup_of(handle)
    keep = None if lookup.keep is None else lookup.keep()
    if keep is not None:
        keep(ids, gradients)


def _nothing(ids: torch.Tensor, gradients: torch.Tensor, _order: torch.Tensor, handle: str) -> None:
    """Stand for `keep_gradients` while compilers trace."""


for _key in ("CPU", "CUDA"):
    _library.impl("look_up", _look_up, _key)
    _library.impl("keep_gradients", _keep_gradients, _key)
torch.library.register_fake("flashwarp::look_up", _shape_of_lookup, lib=_library)
torch.library.register_fake("flashwarp::keep_gradients", _nothing, lib=_library)
