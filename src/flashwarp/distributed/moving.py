"""Rows between ranks: who asks whom for what, and the bytes that follow.

A call has four messages: how much each rank asks, the numbers of the rows, whether a rank has
failed, and the rows. The rows of several arrays lie in one message, each array's from a multiple of
64 bytes on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from flashwarp.array.array import Array
from flashwarp.device.foreign import torch_dtype
from flashwarp.distributed.dealing import Dealing
from flashwarp.distributed.ranks import Ranks, attempt
from flashwarp.errors import ArgumentError, IndexDtypeError
from flashwarp.launch.operands import host_empty
from flashwarp.launch.rows import host_indices

_ALIGNMENT = 64


class Asked:
    """Rows of one array that this rank asks for, sorted by the rank that has them.

    `local` is the array of this rank's rows, or what has its `shape`, `dtype` and `gather`. `rows`
    are those to store, if any. Raises IndexDtypeError, BoundsError, ArgumentError,
    DtypeError.
    """

    def __init__(self, local: Any, dealing: Dealing, ids: Any, rows: Any = None) -> None:
        self.local, self.row_shape = local, local.shape[1:]
        self.is_torch = isinstance(ids, torch.Tensor)
        if self.is_torch:
            torch_dtype(torch, local.dtype)
            ids = _host_ids(ids)
        found = host_indices(ids, dealing.rows)
        self.shape, self.count = found.shape, found.size
        owner, local_ids = dealing.owners(torch.from_numpy(found.reshape(-1)))
        self._order = torch.argsort(owner, stable=True)
        self.ids = local_ids[self._order]
        if rows is not None:
            dense = _host_rows(local, rows, (*self.shape, *self.row_shape))
            self.rows = dense.reshape((self.count, *self.row_shape))
        self.counts: list[int] = torch.bincount(owner, minlength=dealing.ranks).tolist()
        self._first = [0, *itertools.accumulate(self.counts)]

    def order(self, rank: int) -> Any:
        """Return which of the rows a rank has, in the order in which it is asked for them."""
        return self._order[self._first[rank] : self._first[rank + 1]].numpy()

    def result(self, rows: Any) -> Any:
        """Return rows in the shape of the ids, and of their library."""
        rows = rows.reshape((*self.shape, *self.row_shape))
        return torch.from_numpy(rows) if self.is_torch else rows

    def asked(self, rank: int) -> torch.Tensor:
        """Return the numbers, on a rank, of the rows that are asked of it."""
        return self.ids[self._first[rank] : self._first[rank + 1]]


def _host_ids(ids: torch.Tensor) -> Any:
    if ids.device.type != "cpu":
        raise ArgumentError(f"ids are on {ids.device}, and the array is on the CPU device")
    if ids.dtype not in (torch.int64, torch.int32):
        raise IndexDtypeError(f"ids of dtype {ids.dtype}: use int64 or int32")
    if ids.is_nested or ids.layout is not torch.strided:
        raise ArgumentError("ids are a sparse or nested tensor: give a plain one")
    return ids.detach().numpy()


def _host_rows(local: Array, rows: Any, shape: tuple[int, ...]) -> Any:
    """Make rows dense on the host, cast as `Array.scatter` casts them."""
    if isinstance(rows, torch.Tensor):
        if rows.device.type != "cpu":
            raise ArgumentError(f"rows are on {rows.device}, and the array is on the CPU device")
        if rows.requires_grad and torch.is_grad_enabled():
            raise ArgumentError("no gradient flows through an array: give rows.detach()")
        if rows.is_nested or rows.layout is not torch.strided or rows.is_quantized:
            raise ArgumentError("rows are a sparse, nested or quantized tensor: give a plain one")
        rows = rows.detach().numpy()
    return local._attachment.operands_for(None).host_values(rows, shape)


class _Layout:
    """Where the rows of each rank and array lie in a message of `counts` rows."""

    def __init__(self, arrays: Sequence[Array], counts: Sequence[Sequence[int]]) -> None:
        self._arrays = arrays
        self.sizes, self._places, end = [], [], 0
        for each in counts:  # of a rank
            begin = end
            for array, count in zip(arrays, each, strict=True):
                self._places.append((end, count))
                end += _row_bytes(array) * count
                if len(arrays) > 1:  # else the rows of all ranks lie back to back
                    end += -end % _ALIGNMENT
            self.sizes.append(end - begin)
        self.nbytes = end

    def rows(self, message: torch.Tensor, rank: int, number: int) -> Any:
        """Return a view of the rows of an array to or from a rank."""
        array = self._arrays[number]
        begin, count = self._places[rank * len(self._arrays) + number]
        return _view(message, begin, count, array)


def _view(message: torch.Tensor, begin: int, count: int, array: Array) -> Any:
    piece = message[begin : begin + count * _row_bytes(array)].numpy()
    shape = (count, *array.shape[1:])
    return piece.view(array.dtype).reshape(shape) if piece.size else np.empty(shape, array.dtype)


def _row_bytes(array: Array) -> int:
    return math.prod(array.shape[1:]) * array.dtype.itemsize


def _message(nbytes: int) -> torch.Tensor:
    return torch.from_numpy(host_empty((nbytes,), np.dtype(np.uint8)))


class _Exchange:
    """What ranks ask each other in one call: `act` returns what this one does."""

    def __init__(self, ranks: Ranks, what: str, act: Callable[[], list[Asked]]) -> None:
        every = range(ranks.count)
        found, error = attempt(act)
        self.asked = asked = found or []
        parts = [_request(asked, rank) for rank in every]
        sizes = [len(part) for part in parts]
        got = ranks.enter(what, error, sizes)
        requests = ranks.swap(torch.cat(parts), sizes, got).split(got)
        arrays = [each.local for each in asked]
        counts = [request[: len(asked)].tolist() for request in requests]
        self.mine = _Layout(arrays, [[each.counts[rank] for each in asked] for rank in every])
        self.theirs = _Layout(arrays, counts)
        self._wanted = [
            request[len(asked) :].split(count)
            for request, count in zip(requests, counts, strict=True)
        ]

    def wanted(self, rank: int, number: int) -> Any:
        """Return the numbers of this rank's rows that a rank asks for."""
        return self._wanted[rank][number].numpy()


def _request(asked: list[Asked], rank: int) -> torch.Tensor:
    counts = torch.tensor([each.counts[rank] for each in asked])
    return torch.cat([counts, *(each.asked(rank) for each in asked)])


def gather_rows(ranks: Ranks, what: str, act: Callable[[], list[Asked]]) -> list[Any]:
    """Read the rows of arrays that `act` asks for, on whichever ranks they are."""
    exchange = _Exchange(ranks, what, act)
    asked = exchange.asked
    every = list(itertools.product(range(ranks.count), range(len(asked))))

    def read() -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
        found = [host_empty((each.count, *each.row_shape), each.local.dtype) for each in asked]
        sent, got = _message(exchange.theirs.nbytes), _message(exchange.mine.nbytes)
        for rank, number in every:
            ids = exchange.wanted(rank, number)
            if len(ids):
                asked[number].local.gather(ids, exchange.theirs.rows(sent, rank, number))
        return sent, got, found

    sent, got, found = ranks.step("send the rows", read)
    ranks.swap(sent, exchange.theirs.sizes, exchange.mine.sizes, got)
    for rank, number in every:
        found[number][asked[number].order(rank)] = exchange.mine.rows(got, rank, number)
    return [each.result(rows) for each, rows in zip(asked, found, strict=True)]


def scatter_rows(ranks: Ranks, what: str, act: Callable[[], list[Asked]]) -> None:
    """Store the rows of the array that `act` names, on whichever ranks they are.

    Of a row that repeats, that of the highest rank stays, and of one rank the last one.
    """
    exchange = _Exchange(ranks, what, act)

    def collect() -> tuple[torch.Tensor, torch.Tensor]:
        sent = _message(exchange.mine.nbytes)
        for rank, asked in itertools.product(range(ranks.count), exchange.asked):
            exchange.mine.rows(sent, rank, 0)[...] = asked.rows[asked.order(rank)]
        return sent, _message(exchange.theirs.nbytes)

    sent, got = ranks.step("send the rows", collect)
    ranks.swap(sent, exchange.mine.sizes, exchange.theirs.sizes, got)

    def store() -> None:
        ids = np.concatenate([exchange.wanted(rank, 0) for rank in range(ranks.count)])
        # Ranks lie in their order, and a rank's rows in that of its ids: the last one is stored.
        stored, last = np.unique(ids[::-1], return_index=True)
        if len(stored):
            local = exchange.asked[0].local
            local.scatter(stored, _view(got, 0, len(ids), local)[len(ids) - 1 - last])

    ranks.step("store the rows", store)
