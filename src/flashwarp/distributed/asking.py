"""Rows that a rank asks for, its own rows, and what is noted of ids that the host does not see.

Rows are the bytes of tensors where their array is, in host memory or on a GPU. A dtype matters only
where they come from the caller, or go there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from flashwarp.array.array import Array
from flashwarp.device.foreign import torch_dtype
from flashwarp.distributed.dealing import Dealing
from flashwarp.errors import ArgumentError, BoundsError, IndexDtypeError
from flashwarp.launch.rows import host_indices


class Rows:
    """The rows of an array, as messages have them: the bytes of tensors where the array is."""

    def __init__(self, array: Array) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.place = torch.device(array.device.name)

    def read(self, ids: torch.Tensor, message: torch.Tensor, waits: bool) -> None:
        """Read rows to the bytes of a message; on a GPU in the order of its stream, or wait."""
        self._move(self.array.gather, ids, message, waits)

    def store(self, ids: torch.Tensor, message: torch.Tensor) -> None:
        """Store the rows in a message; on a GPU in the order of its stream."""
        self._move(self.array.scatter, ids, message, False)

    def _move(
        self, move: Callable[..., Any], ids: torch.Tensor, message: torch.Tensor, waits: bool
    ) -> None:
        shape = (len(ids), *self.shape[1:])
        if self.place.type == "cpu":
            move(ids.numpy(), _host_view(message, self.dtype, shape))
        else:
            stream = None if waits else torch.cuda.current_stream(self.place)
            move(ids, message.view(torch_dtype(torch, self.dtype)).view(shape), stream=stream)


class Flags:
    """What gathers with a capacity have noted where they ran: rows that read as zeros, and why.

    The host reads it without waiting for a GPU.
    """

    def __init__(self, place: torch.device) -> None:
        # Ids out of bounds, the last one, rows without room, and how many of one rank in the last
        # gather that had some.
        self._noted = torch.zeros(4, dtype=torch.int64, device=place)
        on_gpu = place.type == "cuda"
        self._seen = torch.zeros(4, dtype=torch.int64, pin_memory=True) if on_gpu else self._noted
        self._raised = [0, 0]

    def note(
        self, ids: torch.Tensor, stray: torch.Tensor | None, counts: torch.Tensor, capacity: int
    ) -> None:
        """Note what a gather found; `counts` are the rows that it asks each rank for."""
        strays, last, over, most = self._noted.clone()
        if stray is not None and len(ids):
            strays = strays + stray.sum()
            last = torch.where(stray.any(), ids.take(stray.int().argmax()), last)
        beyond = (counts - capacity).clamp(min=0)
        over, most = over + beyond.sum(), torch.where(beyond.any(), beyond.max(), most)
        self._noted.copy_(torch.stack([strays, last, over, most]))
        self._seen.copy_(self._noted, non_blocking=True)

    def check(self, rows: int) -> None:
        """Raise BoundsError for what was noted since the last call."""
        strays, last, over, most = self._seen.tolist()
        new = strays - self._raised[0], over - self._raised[1]
        self._raised = [strays, over]
        said = []
        if new[0]:
            said.append(
                f"index {last} is out of bounds for an axis of length {rows}, one of {new[0]}"
            )
        if new[1]:
            said.append(
                f"{new[1]} rows found no room in messages: give a capacity that is larger by {most}"
            )
        if said:
            raise BoundsError(f"{'; '.join(said)}, in gathers before: such rows read as zeros")


class Asked:
    """Rows of one array that this rank asks for: ids, or ids and rows to store.

    `of` has the rows of this rank: `Rows`, or what has its `shape`, `dtype`, `place` and `read`.
    Raises IndexDtypeError, BoundsError, ArgumentError, DtypeError.
    """

    def __init__(
        self, of: Any, dealing: Dealing, ids: Any, rows: Any = None, flags: Flags | None = None
    ) -> None:
        self.of, self.flags, self._dealing = of, flags, dealing
        self.length = dealing.rows
        self.row_bytes = math.prod(of.shape[1:]) * of.dtype.itemsize
        self.is_torch = isinstance(ids, torch.Tensor)
        self._checked = not self.is_torch or (of.place.type == "cpu" and flags is None)
        if self.is_torch:
            torch_dtype(torch, of.dtype)
            ids = _plain_ids(ids, of.place)
        if self._checked:
            found = host_indices(ids.numpy() if self.is_torch else ids, dealing.rows)
            self.shape, ids = found.shape, torch.from_numpy(found.reshape(-1)).to(of.place)
        else:
            self.shape = tuple(ids.shape)
        self.ids: torch.Tensor = ids.reshape(-1).long()
        if rows is not None:
            self.rows = _row_bytes(of, rows, (*self.shape, *of.shape[1:]))

    def owners(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the rank that has each row, its number there, and which ids are out of bounds."""
        ids, rows, stray = self.ids, self._dealing.rows, None
        if not self._checked:
            ids = torch.where(ids < 0, ids + rows, ids)
            stray = (ids < 0) | (ids >= rows)
            ids = ids.masked_fill(stray, 0)
            if not rows:
                return ids, ids, stray
        return (*self._dealing.owners(ids), stray)

    def result(self, rows: torch.Tensor) -> Any:
        """Return the bytes of rows in the shape of the ids, and for their library."""
        shape = (*self.shape, *self.of.shape[1:])
        if not self.is_torch:
            return _host_view(rows.cpu(), self.of.dtype, shape)
        dtype = torch_dtype(torch, self.of.dtype)
        if not rows.numel():
            return torch.empty(shape, dtype=dtype, device=rows.device)
        return rows.view(dtype).view(shape)


def _plain_ids(ids: torch.Tensor, place: torch.device) -> torch.Tensor:
    if ids.device != place:
        where = "on the CPU device" if place.type == "cpu" else f"on {place}"
        raise ArgumentError(f"ids are on {ids.device}, and the array is {where}: move them there")
    if ids.dtype not in (torch.int64, torch.int32):
        raise IndexDtypeError(f"ids of dtype {ids.dtype}: use int64 or int32")
    if ids.is_nested or ids.layout is not torch.strided:
        raise ArgumentError("ids are a sparse or nested tensor: give a plain one")
    return ids.detach()


def _row_bytes(of: Any, rows: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Make rows to store dense where the array is, cast as numpy's assignment casts."""
    if isinstance(rows, torch.Tensor):
        if rows.device != of.place:
            raise ArgumentError(
                f"rows are on {rows.device}, and the array is on {of.place}: move them"
            )
        if rows.requires_grad and torch.is_grad_enabled():
            raise ArgumentError("no gradient flows through an array: give rows.detach()")
        if rows.is_nested or rows.layout is not torch.strided or rows.is_quantized:
            raise ArgumentError("rows are a sparse, nested or quantized tensor: give a plain one")
        rows = rows.detach()
        if of.place.type == "cuda":
            return _dense(rows, torch_dtype(torch, of.dtype), shape).view(torch.uint8)
        rows = rows.numpy()
    dense = of.array._attachment.operands_for(None).host_values(rows, shape)
    whole = dense.reshape(-1).view(np.uint8)
    return torch.from_numpy(whole if whole.flags.writeable else whole.copy()).to(of.place)


def _dense(rows: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    while rows.ndim > len(shape) >= 1 and rows.shape[0] == 1:
        rows = rows[0]
    try:
        return rows.to(dtype).broadcast_to(shape).reshape(-1)
    except RuntimeError as error:
        raise ArgumentError(f"rows do not broadcast to {shape}: {error}") from error


def _host_view(message: torch.Tensor, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    found = message.numpy()
    return found.view(dtype).reshape(shape) if found.size else np.empty(shape, dtype)
