"""Rows between ranks: who asks whom for what, and the bytes that follow.

A call has four messages: how much each rank asks, the numbers of the rows, whether a rank has
failed, and the rows. For several arrays another message says how much is of each. Numbers and rows
are tensors where the arrays are, in host memory or on GPUs. All rows lie in one message: by the
rank that has them, and then by arrays.

With a capacity, each rank asks each other one for as many rows of each array, some of which nobody
needs. So no rank waits for what another one asks, and the call can be in a CUDA graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from flashwarp.config import integer
from flashwarp.distributed.asking import Asked
from flashwarp.distributed.ranks import Ranks, attempt
from flashwarp.errors import BoundsError, CaptureError
from flashwarp.launch.operands import host_empty

_ALIGNMENT = 64
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_CAPACITY_MAX = 1 << 40


def _empty(nbytes: int, place: torch.device) -> torch.Tensor:
    if place.type == "cpu":
        return torch.from_numpy(host_empty((nbytes,), np.dtype(np.uint8)))
    return torch.empty(nbytes, dtype=torch.uint8, device=place)


def _words(rows: torch.Tensor, width: int) -> torch.Tensor:
    """View the bytes of rows, each of so many, as words that are as wide as can be."""
    word = next(each for each in _WORDS if width % each.itemsize == 0)
    return rows.view(word).view(-1, width // word.itemsize)


def _picked(rows: torch.Tensor, width: int, which: torch.Tensor) -> torch.Tensor:
    return _words(rows, width).index_select(0, which).view(-1).view(torch.uint8)


class _Piece(NamedTuple):
    """Neighbouring rows of one array in a message: from a slot, and from a byte, on."""

    table: int
    slot: int
    rows: int
    begin: int


class _Layout:
    """Where the rows lie in a message that has ``counts[rank][table]`` of them."""

    def __init__(self, widths: Sequence[int], counts: Sequence[Sequence[int]]) -> None:
        # Rows of one width lie back to back, however many arrays they are of.
        alignment = 1 if len(set(widths)) == 1 else _ALIGNMENT
        self._widths = widths
        self.sizes: list[int] = []
        self.pieces: list[_Piece] = []
        self.slots = [sum(each) for each in counts]
        slot = end = 0
        for each in counts:
            begin = end
            for table, count in enumerate(each):
                self._add(_Piece(table, slot, count, end))
                slot += count
                end += widths[table] * count
                end += -end % alignment
            self.sizes.append(end - begin)
        self.nbytes = end

    def _add(self, piece: _Piece) -> None:
        last = self.pieces[-1] if self.pieces else _Piece(-1, 0, 0, 0)
        width = self._widths[piece.table]
        if last.table == piece.table and last.begin + last.rows * width == piece.begin:
            self.pieces[-1] = last._replace(rows=last.rows + piece.rows)
        elif piece.rows:
            self.pieces.append(piece)

    def rows(self, message: torch.Tensor, piece: _Piece) -> torch.Tensor:
        """Return a view of the bytes of a piece."""
        return message[piece.begin : piece.begin + piece.rows * self._widths[piece.table]]


class _Request:
    """What this rank asks for in one call, in slots: by the rank that has it, then by arrays.

    Attributes
    ----------
    counts : list of list of int
        How many slots are for each rank and array.
    ids : tensor
        Of each slot, the number of the row on the rank that has it.
    rows : tensor
        Of each slot, which of the rows that were asked for it is; of those of a capacity that
        nobody needs, their number.
    """

    def __init__(self, asked: list[Asked], ranks: int, capacity: int | None) -> None:
        self.asked, self.place = asked, asked[0].of.place
        self.widths = [each.row_bytes for each in asked]
        tables, sections = len(asked), ranks * len(asked)
        keys, numbers, self._strays = [], [], []
        for table, each in enumerate(asked):
            owner, number, stray = each.owners()
            key = owner * tables + table
            keys.append(key if stray is None else key.masked_fill(stray, sections))
            numbers.append(number)
            self._strays.append(stray)
        key, order = torch.cat(keys).sort(stable=True)
        number = torch.cat(numbers)[order]
        every = torch.arange(sections + 1, device=self.place)
        first = torch.searchsorted(key, every)
        if capacity is None:
            self.rows, self.ids = order, number
            self.counts = np.diff(self._known(first)).reshape(ranks, tables).tolist()
            return
        for table, (each, stray) in enumerate(zip(asked, self._strays, strict=True)):
            if each.flags is not None:
                counts = first.diff().view(ranks, tables)[:, table]
                each.flags.note(each.ids, stray, counts, capacity)
        place = torch.arange(len(key), device=self.place) - first[key]
        slots = sections * capacity
        slot = torch.where((key < sections) & (place < capacity), key * capacity + place, slots)
        self.ids = number.new_zeros(slots + 1).scatter(0, slot, number)[:slots]
        self.rows = order.new_full((slots + 1,), len(key)).scatter(0, slot, order)[:slots]
        self.counts = [[capacity] * tables] * ranks

    def _known(self, first: torch.Tensor) -> list[int]:
        """Bring the numbers of slots to the host, for which it waits; raises BoundsError."""
        told = [first]
        for each, stray in zip(self.asked, self._strays, strict=True):
            if stray is None or not len(each.ids):
                told.append(first.new_zeros(2))
            else:
                told.append(torch.stack([stray.sum(), each.ids.take(stray.int().argmax())]))
        known: list[int] = torch.cat(told).tolist()
        strays = known[len(first) :]
        for each, count, index in zip(self.asked, strays[::2], strays[1::2], strict=True):
            if count:
                raise BoundsError(
                    f"index {index} is out of bounds for an axis of length {each.length}"
                )
        return known[: len(first)]

    def results(self, got: torch.Tensor, layout: _Layout, zeros: bool) -> list[Any]:
        """Return the rows of a message as they were asked for."""
        counts = [len(each.ids) for each in self.asked]
        if len(set(self.widths)) == 1:
            whole = _Piece(0, 0, sum(layout.slots), 0)
            rows = self._put(got, layout, [whole], 0, sum(counts), zeros)
            parts = rows.split([count * self.widths[0] for count in counts])
        else:
            starts = itertools.accumulate(counts, initial=0)
            parts = []
            for table, (start, count) in enumerate(zip(starts, counts, strict=False)):
                pieces = [piece for piece in layout.pieces if piece.table == table]
                parts.append(self._put(got, layout, pieces, start, count, zeros))
        return [each.result(part) for each, part in zip(self.asked, parts, strict=True)]

    def _put(
        self,
        got: torch.Tensor,
        layout: _Layout,
        pieces: Sequence[_Piece],
        start: int,
        count: int,
        zeros: bool,
    ) -> torch.Tensor:
        width = self.widths[pieces[0].table] if pieces else 0
        # One more, for slots that nobody needs.
        rows = _empty((count + zeros) * width, self.place)
        if zeros:
            rows.zero_()
        for piece in pieces:
            if not width * piece.rows:
                continue
            where = self.rows[piece.slot : piece.slot + piece.rows]
            if start or zeros:
                where = (where - start).clamp(max=count)
            to, of = _words(rows, width), _words(layout.rows(got, piece), width)
            if self.place.type == "cpu":
                to.numpy()[where.numpy()] = of.numpy()  # without waking threads of torch
            else:
                to.index_copy_(0, where, of)
        return rows[: count * width]


class Call:
    """How the ranks make one call: what they do, with which capacity, and whether in a capture."""

    def __init__(self, ranks: Ranks, what: str, capacity: int | None = None) -> None:
        self.ranks, self.capacity, self._what = ranks, capacity, what
        self._in_capture = ranks.on_gpus and torch.cuda.is_current_stream_capturing()
        # Then no message goes over the host.
        self.capturing = self._in_capture and capacity is not None
        self._zeros = capacity is not None

    def _step(self, what: str, act: Callable[[], Any]) -> Any:
        return act() if self.capturing else self.ranks.step(what, act)

    def _ask(self, act: Callable[[], list[Asked]]) -> None:
        """Tell the ranks what this one asks of each, and hear what they ask of it."""
        ranks = self.ranks

        def ask() -> _Request:
            if self.capacity is not None:
                integer("capacity", self.capacity, 1, _CAPACITY_MAX)
            asked = [] if self._in_capture and not self.capturing else act()
            if self._in_capture and not (asked and all(each.is_torch for each in asked)):
                raise CaptureError(
                    "the sizes of messages come from the host, which a stream in a capture cannot "
                    "wait for: give gather capacity=, and ids on the GPU"
                )
            return _Request(asked, ranks.count, self.capacity)

        if self.capturing:
            request, theirs = ask(), None
        else:
            found, error = attempt(ask)
            request = found  # type: ignore[assignment]
            theirs = self._meet(request, error)
        self.request = request
        self.on_host = not all(each.is_torch for each in request.asked)
        self.mine = _Layout(request.widths, request.counts)
        self.theirs = _Layout(request.widths, theirs or request.counts)
        self.wanted = ranks.swap(request.ids, self.mine.slots, self.theirs.slots)
        self._tables = [each.of for each in request.asked]

    def _meet(self, request: _Request | None, error: Exception | None) -> list[list[int]]:
        """Return how many rows of each array each rank asks of this one."""
        ranks, what = self.ranks, self._what
        counts = [[0]] * ranks.count if request is None else request.counts
        if request is not None and request.place.type == "cuda":
            on_host = not all(each.is_torch for each in request.asked)
            what += ", by ids on the host" if on_host else ", by ids on the GPU"
        if self.capacity is not None:
            what += f", capacity {self.capacity}"
        sums = ranks.enter(what, error, [sum(each) for each in counts])
        tables = len(counts[0])
        if tables == 1 or self.capacity is not None:
            return [[each] for each in sums] if tables == 1 else counts
        sizes = [tables] * ranks.count
        told = ranks.tell(torch.tensor(counts).view(-1), sizes, sizes)
        found: list[list[int]] = told.view(ranks.count, tables).tolist()
        return found

    def gather(self, act: Callable[[], list[Asked]]) -> list[Any]:
        """Read the rows of arrays that `act` asks for, on whichever ranks they are."""
        self._ask(act)
        place = self.request.place

        def read() -> tuple[torch.Tensor, torch.Tensor]:
            sent, got = _empty(self.theirs.nbytes, place), _empty(self.mine.nbytes, place)
            for piece in self.theirs.pieces:
                of, ids = self._tables[piece.table], self.wanted[piece.slot :][: piece.rows]
                if of.shape[0]:  # else all ask for nothing, up to their capacity
                    of.read(ids, self.theirs.rows(sent, piece), self.on_host)
            return sent, got

        sent, got = self._step("send the rows", read)
        self.ranks.swap(sent, self.theirs.sizes, self.mine.sizes, got)
        return self.request.results(got, self.mine, self._zeros)

    def scatter(self, act: Callable[[], list[Asked]]) -> None:
        """Store the rows of the array that `act` names, on whichever ranks they are.

        Of a row that repeats, that of the highest rank stays, and of one rank the last one.
        """
        self._ask(act)
        (asked,), width = self.request.asked, self.request.widths[0]

        def collect() -> tuple[torch.Tensor, torch.Tensor]:
            sent = asked.rows
            if len(sent):
                sent = (
                    _words(sent, width)
                    .index_select(0, self.request.rows)
                    .view(-1)
                    .view(torch.uint8)
                )
            return sent, _empty(self.theirs.nbytes, self.request.place)

        sent, got = self._step("send the rows", collect)
        self.ranks.swap(sent, self.mine.sizes, self.theirs.sizes, got)

        def store() -> None:
            # Ranks lie in their order, and a rank's rows in that of its ids. All of one row become
            # the last of them, so that it makes no difference which is stored.
            ids, order = self.wanted.sort(stable=True)
            last = torch.searchsorted(ids, ids, right=True) - 1
            if width and len(ids):
                asked.of.store(ids, _picked(got, width, order[last]))

        self._step("store the rows", store)
