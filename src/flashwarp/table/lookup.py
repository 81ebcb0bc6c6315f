"""`Lookup`: launches of the kernels that look rows up in one table, or in several at once.

It knows addresses and numbers, and no library that owns them: `interop` has the tensors. On a GPU a
call is queued on the caller's stream, waits for nothing and allocates nothing, so it can be part of
a CUDA graph. On the CPU device it is done when it returns.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from flashwarp.array.array import Array
from flashwarp.array.turns import in_turns
from flashwarp.device import DeviceMemory, PreparedLaunch
from flashwarp.errors import ArgumentError, ClosedError
from flashwarp.launch.launcher import Launcher, deferred_by
from flashwarp.launch.operands import Index
from flashwarp.launch.order import in_order
from flashwarp.launch.rows import NOT_DEFERRED, Deferred
from flashwarp.table.structs import LookupParams, LookupTableStruct, TableScalesStruct

# Lanes of a warp on a GPU, and bytes that a lane loads at a time.
_LANES = 32
_WORD_BYTES = 16

# Words of a row that one warp takes together: on the CPU device one lane takes all of them.
_TILE_WORDS = 32

# Waking a thread of the CPU device takes 50 us, as long as converting about this much.
_BYTES_WORTH_A_THREAD = 64 << 10

# A GPU that has this many times the warps that fill it is better given longer runs.
_WARPS_WANTED = 2

_CALL = struct.Struct("=12Q6I2Q2I")
assert LookupParams.ids.offset + _CALL.size == ctypes.sizeof(LookupParams)

_NO_PADDING = (1 << 64) - 1


class Number(enum.IntEnum):
    """How a number is stored: `base::number` of the headers."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    FLOAT8_E4M3 = 3
    FLOAT8_E5M2 = 4
    INT8 = 5
    FLOAT4_E2M1 = 6
    FLOAT8_E8M0 = 7

    @property
    def bits(self) -> int:
        """Bits of one."""
        return (32, 16, 16, 8, 8, 8, 4, 8)[self]


class Pooling(enum.IntEnum):
    """What becomes of the rows of a bag: `kernels::pooling` of the headers."""

    NONE = 0
    SUM = 1
    MEAN = 2
    MAX = 3


@dataclass(frozen=True)
class Scales:
    """The factors of a table's weights: in an array, or at an address of device memory.

    Attributes
    ----------
    number : Number
        A float type.
    blocks : int
        Scales of a row; 0: one for the table.
    columns : int
        Weights of a row that share a scale.
    array : Array, optional
    address : int
        If there is no array.
    owner : object
        Keeps the memory at `address`.
    row_shift : int
        2 to this power are the rows that share their scales.
    whole : float
        A scale of the table beside those of blocks.
    divides : bool
        Whether the scales of blocks are divided by `whole`; else the products are multiplied by it.
    """

    number: Number
    blocks: int
    columns: int
    array: Array | None = None
    address: int = 0
    owner: object = dataclasses.field(default=None, compare=False, repr=False)
    row_shift: int = 0
    whole: float = 1.0
    divides: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of an array, and what their bytes mean.

    Attributes
    ----------
    array : Array
        Of two axes.
    number : Number
        What its elements are, whatever dtype the array has.
    dim : int
        Weights of a row; what follows them is not read.
    rows : range
        The rows of the array that are the table's, without gaps.
    padding : int, optional
        The id that is left out of bags.
    scales : Scales, optional
    """

    array: Array
    number: Number
    dim: int
    rows: range
    padding: int | None = None
    scales: Scales | None = None

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        return self.array.shape[1] * self.array.dtype.itemsize

    @functools.cached_property
    def word_bytes(self) -> int:
        """Bytes that a lane loads at a time: of one row, and of one block of scales."""
        block = 0
        if self.scales is not None and self.scales.blocks > 1:
            block = self.scales.columns * self.number.bits // 8
        # A lane takes at most 16 numbers.
        return math.gcd(min(_WORD_BYTES, 2 * self.number.bits), self.row_bytes, block)

    @functools.cached_property
    def words(self) -> int:
        """Words of a row that have weights."""
        return -(-self.dim * self.number.bits // (8 * self.word_bytes))

    @functools.cached_property
    def lanes(self) -> int:
        """Lanes of a GPU that take a row together."""
        return min(_LANES, 1 << (self.words - 1).bit_length())

    @functools.cached_property
    def tile_bytes(self) -> int:
        """Bytes of a row that they take at a time."""
        words = self.lanes if self.array.device.kind == "cuda" else _TILE_WORDS
        return words * self.word_bytes

    @functools.cached_property
    def tiles(self) -> int:
        """Tiles of a row."""
        return -(-self.words * self.word_bytes // self.tile_bytes)

    @property
    def whole(self) -> bool:
        """Whether its rows are the weights of the array's rows, and nothing else."""
        return self.scales is None and self.dim == self.array.shape[1] and self.number.bits >= 8

    @functools.cached_property
    def straddles(self) -> bool:
        """Whether a tile may lie in two lines."""
        line = self.array.cache.line_bytes
        return line % self.row_bytes != 0 and self.row_bytes % self.tile_bytes != 0

    def struct(self, out_column: int) -> LookupTableStruct:
        """Return the table as kernels have it; its weights go to this column of the output."""
        launcher = self.array._attachment.launcher
        cache = launcher.volume.cache
        return LookupTableStruct(
            geometry=cache.geometry,
            cache=cache.address,
            volume=launcher.volume.address,
            row_bytes=self.row_bytes,
            row_begin=self.rows.start,
            row_count=len(self.rows),
            padding=_NO_PADDING if self.padding is None else self.padding,
            out_column=out_column,
            scales=TableScalesStruct() if self.scales is None else _scales_struct(self.scales),
            number=self.number,
            dim=self.dim,
            word_bytes=self.word_bytes,
            words=self.words,
            lanes=self.lanes if self.array.device.kind == "cuda" else 1,
            straddles=self.straddles,
        )


def _scales_struct(scales: Scales) -> TableScalesStruct:
    made = TableScalesStruct(
        memory=scales.address,
        stride=scales.blocks,
        columns=scales.columns,
        number=scales.number,
        row_shift=scales.row_shift,
        divides=scales.divides,
        whole=scales.whole,
    )
    if scales.array is not None:
        volume = scales.array._attachment.launcher.volume
        made.geometry = volume.cache.geometry
        made.cache = volume.cache.address
        made.volume = volume.address
    return made


@dataclass(frozen=True, slots=True)
class Ids:
    """Ids of all tables, one table after the other, where kernels read them."""

    address: int
    count: int
    nbytes: int

    def part(self, first: int, count: int) -> Ids:
        """Return so many of them."""
        return Ids(self.address + first * self.nbytes, count, self.nbytes)


@dataclass(frozen=True, slots=True)
class Weights:
    """A factor for each id, where kernels read them."""

    address: int
    number: Number

    def behind(self, first: int) -> Weights:
        """Return those from one on."""
        return Weights(self.address + first * self.number.bits // 8, self.number)


@dataclass(frozen=True, slots=True)
class Bags:
    """How ids are divided into bags: by offsets, or, without, each `ids_each`."""

    count: int
    """Of each table."""
    ids_each: int = 0
    offsets: int = 0
    offset_count: int = 0
    offset_bytes: int = 8


@dataclass(frozen=True, slots=True)
class _Piece:
    """What two launches look up."""

    ids: Ids
    bags: Bags
    first: int = 0
    """The first of its bags."""
    fetched: bool = False
    """Whether a launch of its own fetches the lines before."""


class Lookup:
    """The launches of lookups in one or several tables of one device.

    Parameters
    ----------
    tables : sequence of Table
        Whose arrays have caches of one policy. Their weights lie side by side in the output.

    Raises
    ------
    ArgumentError
        For tables on different devices, or with caches of different policies.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tuple(tables)
        first = self.tables[0].array
        self.device = first.device
        self._policy = first.cache.kernel_policy
        for table in self.tables:
            self._check_beside(first, table.array)
            if table.scales is not None and table.scales.array is not None:
                self._check_beside(first, table.scales.array)
        arrays = [table.array for table in self.tables]
        arrays += [
            each.scales.array
            for each in self.tables
            if each.scales is not None and each.scales.array is not None
        ]
        self._arrays = tuple(dict.fromkeys(arrays))
        self._loads = [(array, False) for array in self._arrays]
        self._structs = b"".join(bytes(each) for each in self._table_structs())
        self._memory: DeviceMemory | None = None
        self._closed = False
        if len(self.tables) == 1:
            self._members = self._structs + struct.pack("=Q", 0)
        else:
            self._memory = self.device.allocate(len(self._structs))
            self.device.upload(self._memory.address, self._structs)
            empty = bytes(ctypes.sizeof(LookupTableStruct))
            self._members = empty + struct.pack("=Q", self._memory.address)
        self._on_cpu = self.device.kind == "cpu"
        self._kernels = self.device.kernels_for(self._policy)
        # Ids below 0 are out of bounds, as torch has it.
        rows = self.tables[0].rows
        self._counting = (rows.stop, rows.start, 0)
        self._whole = len(self.tables) == 1 and self.tables[0].whole
        self._longest_run = min(table.lanes for table in self.tables)
        self._deferred_from = 0
        if not self._on_cpu:
            counts = [each.deferred_from for each in self._launchers()]
            self._deferred_from = min(filter(None, counts), default=0)

    @property
    def dim(self) -> int:
        """Numbers of a row of the output."""
        return sum(table.dim for table in self.tables)

    def _check_beside(self, first: Array, other: Array) -> None:
        if other.device is not first.device:
            raise ArgumentError(
                f"arrays on {first.device.name} and {other.device.name}: open all on one device"
            )
        if other.cache.kernel_policy != self._policy:
            raise ArgumentError(
                f"caches of policies {self._policy.name!r} and {other.cache.policy.name!r}: one "
                "kernel serves all tables of a lookup, so give their caches one policy"
            )

    def _table_structs(self) -> list[LookupTableStruct]:
        made, column = [], 0
        for table in self.tables:
            made.append(table.struct(column))
            column += table.dim
        return made

    # Calls.

    def rows(self, ids: Ids, out: int, out_number: Number, stream: int | None) -> None:
        """Copy the rows of ids to `out`, as many ids for each table, converted to `out_number`.

        On a GPU this waits for nothing: the next call on the array, or `Array.check`, raises what
        went wrong. An id that is out of bounds has a row of zeros. Rows that need no conversion
        keep their bits.
        """
        if self._whole and out_number is self.tables[0].number:
            self._gather(ids, out, stream)
            return
        bags = Bags(ids.count // len(self.tables), 1)
        self.bags(ids, bags, Pooling.NONE, None, out, out_number, stream)

    def bags(
        self,
        ids: Ids,
        bags: Bags,
        pooling: Pooling,
        weights: Weights | None,
        out: int,
        out_number: Number,
        stream: int | None,
    ) -> None:
        """Pool the rows of each bag to one row of `out`; empty bags are zeros. As `rows`.

        Bags of one id that are not pooled are rows.
        """
        # A lookup that misses waits on every multiprocessor. So few blocks fetch the lines of a
        # large one before.
        for piece in self._pieces(ids, bags):
            if piece.fetched:
                self._bring("fetch_ids", piece.ids, piece.bags, pooling, stream)
            count = piece.bags.count
            run = self._run(count) if pooling is Pooling.NONE else 1
            warps = self._warp_items(-(-count // run))
            factors = None if weights is None else weights.behind(piece.first * bags.ids_each)
            to = out + piece.first * self.dim * out_number.bits // 8
            params = self._pack(piece.ids, piece.bags, pooling, factors, to, out_number, run, warps)
            name = "look_up_rows" if pooling is Pooling.NONE else "look_up_bags"
            self._launch(name, params, warps, piece.ids, stream)

    def prefetch(self, ids: Ids, bags: Bags | None, stream: int | None) -> None:
        """Start fetching the lines of rows into the cache; as `rows`, or with `bags` as `bags`."""
        if bags is None:
            bags = Bags(ids.count // len(self.tables), 1)
        self._bring("prefetch_ids", ids, bags, Pooling.NONE, stream)

    def _pieces(self, ids: Ids, bags: Bags) -> list[_Piece]:
        """Divide a lookup, if its lines are fetched first, so that the cache has room for them."""
        whole = _Piece(ids, bags)
        if not self._deferred(ids.count, bags)[2]:
            return [whole]
        room = min(each.volume.cache.lines for each in self._launchers())
        lines = ids.count * self._lines_per_row()
        if len(self.tables) > 1 or bags.offsets or lines <= room // 2:
            # Of more lines the first would be gone before their use.
            return [dataclasses.replace(whole, fetched=lines <= room)]
        most = max(1, bags.count * (room // 4) // lines)
        if not self._deferred(most * bags.ids_each, bags)[2]:
            return [whole]
        pieces = []
        for first in range(0, bags.count, most):
            count = min(most, bags.count - first)
            part = dataclasses.replace(bags, count=count)
            pieces.append(
                _Piece(ids.part(first * bags.ids_each, count * bags.ids_each), part, first, True)
            )
        return pieces

    def _bring(self, name: str, ids: Ids, bags: Bags, pooling: Pooling, stream: int | None) -> None:
        """Launch what brings the rows of all ids into the cache."""
        each, warps = self._shares(ids.count, bags)
        how = self._deferred(ids.count, bags)
        params = self._pack(ids, bags, pooling, None, 0, Number.FLOAT32, each, warps, how)
        self._launch(name, params, warps, ids, stream)

    def _launchers(self) -> list[Launcher]:
        return [array._attachment.launcher for array in self._arrays]

    def _lines_per_row(self) -> int:
        return max(each.lines_per_row for each in self._launchers())

    def _shares(self, count: int, bags: Bags) -> tuple[int, int]:
        """Return how many ids a warp brings at a time, and how often, for each table."""
        each = 1
        if not self._on_cpu:
            # Few, because a warp copies one line after the other.
            each = min(_LANES, max(1, count // self.device.warps_at_once))
        # With offsets all ids may be of one table.
        most = count if bags.offsets else bags.count * bags.ids_each
        return each, -(-most // each)

    def _deferred(self, count: int, bags: Bags) -> Deferred:
        """Return how a launch that brings so many rows leaves those that miss to few blocks."""
        for array in self._arrays:
            array._turns.check_usable()
        if not 0 < self._deferred_from <= count:
            return NOT_DEFERRED
        warps = self._shares(count, bags)[1] * len(self.tables)
        return deferred_by(self._launchers(), count, warps, _LANES)

    def _gather(self, ids: Ids, out: int, stream: int | None) -> None:
        """Copy whole rows as they are stored, as a gather of the array does."""
        if not ids.count:
            return
        array = self._arrays[0]
        which = ids.address, ids.count, ids.nbytes, out
        if stream is not None:
            own = self.device.own_stream()
            if array._attachment.row_calls.queue("gather", which, stream, own, 0, self._counting):
                return
        in_turns(self._loads, functools.partial(self._gather_in_turn, ids, out, stream))

    def _gather_in_turn(self, ids: Ids, out: int, stream: int | None) -> None:
        array = self._arrays[0]
        array._turns.begin()
        attachment = array._attachment
        if stream is not None:
            self._join(stream)
        index = Index(ids.address, (ids.count,), ids.nbytes, "", None, checked=False)
        attachment.launcher.move("gather", index, out, stream, counting=self._counting)
        if stream is None:
            attachment.finish("a lookup", None)

    def _join(self, stream: int) -> None:
        """Prepare for launches on a stream that may be in a capture."""
        # The group may be lost, and its memory freed, while a graph reads it.
        uses: list[object] = [] if self._memory is None else [self._memory]
        uses += [table.scales.owner for table in self.tables if table.scales is not None]
        for array in self._arrays:
            array._attachment.join(stream, uses=uses)
        # Uploads, and calls that are queued on the library's own stream, come first.
        self.device.order(None, stream)

    def _run(self, count: int) -> int:
        """Choose how many ids a group takes one after the other."""
        if self._on_cpu:
            return 1
        wanted = _WARPS_WANTED * self.device.warps_at_once
        warps = len(self.tables) * self._warp_items(count)
        return max(1, min(self._longest_run, warps // wanted))

    def _warp_items(self, runs: int) -> int:
        """Count the items of a table's warps, for so many runs of ids."""
        if self._on_cpu:
            return max(runs * table.tiles for table in self.tables)
        return max(-(-runs * each.tiles * each.lanes // _LANES) for each in self.tables)

    def _pack(
        self,
        ids: Ids,
        bags: Bags,
        pooling: Pooling,
        weights: Weights | None,
        out: int,
        out_number: Number,
        run: int,
        warp_items: int,
        deferred: Deferred = NOT_DEFERRED,
    ) -> bytes:
        """Return the bytes of `LookupParams`; raises if an array cannot be used."""
        for array in self._arrays:
            array._turns.check_usable()
        ahead = self._ids_ahead() if self._on_cpu else 0
        factors = (0, Number.FLOAT32) if weights is None else (weights.address, weights.number)
        return self._members + _CALL.pack(
            *(ids.address, bags.offsets, factors[0], out),
            *(ids.count, bags.count, bags.ids_each, bags.offset_count, self.dim, run),
            *(warp_items, ahead),
            *(len(self.tables), ids.nbytes, bags.offset_bytes, factors[1], out_number, pooling),
            *deferred,
        )

    def _ids_ahead(self) -> int:
        """Choose how many ids a thread of the CPU device looks ahead; 0 if storage is fast."""
        launchers = [table.array._attachment.launcher for table in self.tables]
        wanted = [(each.look_ahead(), each.lines_per_row) for each in launchers]
        return min((max(1, lines // each) for lines, each in wanted if lines), default=0)

    def _launch(
        self, name: str, params: bytes, warp_items: int, ids: Ids, stream: int | None
    ) -> None:
        warps = warp_items * len(self.tables)
        if not warps:
            return
        if self._on_cpu:
            moved = ids.count * max(table.row_bytes for table in self.tables)
            warps = max(1, min(warps, moved // _BYTES_WORTH_A_THREAD))
        launch = self._kernels.launch_of(name, warps, len(params))
        # The lookup counts the rows that are fetched for it.
        rows = 0 if name == "fetch_ids" else ids.count
        act = functools.partial(self._launch_in_turn, launch, params, rows, stream)
        in_turns(self._loads, act)

    def _launch_in_turn(
        self, launch: PreparedLaunch, params: bytes, rows: int, stream: int | None
    ) -> None:
        # Taken before the look: what `close` frees later stays until the launch has ended.
        uses: list[object] = [] if self._memory is None else list(self._memory.owners)
        if self._closed:
            raise ClosedError("the lookup is closed")
        try:
            for array in self._arrays:
                array._turns.begin()
                launcher = array._attachment.launcher
                if rows:
                    launcher.moved.add(rows)
                uses += launcher.wake()
            calls = [array._attachment.row_calls for array in self._arrays]
            # Uploads, and calls that are queued on the library's own stream, come first.
            own = (self.device.own_stream(),)
            if stream is None or not launch.among((params,), stream, own, arrays=calls):
                if stream is not None:
                    self._join(stream)
                accesses = [(array._attachment.launcher, False) for array in self._arrays]
                in_order(accesses, stream, functools.partial(launch, (params,), stream, uses))
        finally:
            # A kept exception keeps this frame. That must not keep the arrays' files open.
            uses.clear()
        if stream is None:
            for array in self._arrays:
                array._attachment.finish("a lookup", None)

    def close(self) -> None:
        """Free what it has in device memory; the arrays stay open.

        Raises CaptureError while CUDA graphs use the arrays: a replay would read that memory.
        """
        if self._memory is not None and not self._closed:
            for array in self._arrays:
                array._attachment.refuse_graphs()
        self._closed = True
        if self._memory is not None:
            self._memory.close()
