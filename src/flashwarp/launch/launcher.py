"""Launches of the built-in kernels on one array: rows by index, rows in a range, maintenance.

Knows the kernels' parameters, and how many warps have something to do. Waits for nothing: the
caller waits, and asks `failures` for errors.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from flashwarp import _native, config
from flashwarp._jit.cuda_context import End
from flashwarp.cache.cache import Cache
from flashwarp.cache.volume import Volume
from flashwarp.device import CpuDevice, CudaDevice, DeviceMemory, PreparedLaunch
from flashwarp.errors import CaptureError, ClosedError, SharedCacheError
from flashwarp.launch.copying import RangeCopies
from flashwarp.launch.deferral import Deferral
from flashwarp.launch.operands import Index
from flashwarp.launch.order import ALL_LINES, Order, in_order
from flashwarp.launch.rows import (
    BYTES_WORTH_A_THREAD,
    NOT_DEFERRED,
    ArrayStruct,
    Counting,
    Deferred,
    MaintenanceParams,
    RowFormat,
    RowPacking,
    RowParams,
    Which,
    element_bytes,
    segments_per_bundle,
    segments_per_row,
)
from flashwarp.nvme import Service
from flashwarp.policy import Policy

Verb: TypeAlias = Literal["gather", "scatter", "stream"]
T = TypeVar("T")

Watcher: TypeAlias = Callable[[npt.NDArray[np.int64], int], None]

# Warps of the blocks of a call that may use a few multiprocessors. Those of rows in place fill one.
_STREAM_BLOCK_WARPS = 32
_BLOCK_WARPS = 8

# Waking a thread takes as long as copying some bytes of so many lines.
_LINES_WORTH_A_THREAD = 1024

# The handle that stands for another stream in each thread.
_PER_THREAD = 2

# Scatters that check their indices on the device: one for each stream, and for each captured one.
_CHECKS_MAX = 4096


class Launcher:
    """The launches of one array's kernels. It owns what these kernels need to know.

    Parameters
    ----------
    volume : Volume
        The array's entry in its cache, which decides cache and device.
    service : Service
        What serves the array's queue pairs.
    format : RowFormat
        The array's.

    Attributes
    ----------
    on_cpu : bool
        Whether kernels run on the CPU device.
    watchers : list of callable
        Each is called with what is about to be moved: byte offsets in the array, and the bytes at
        each offset.
    graphs : CudaGraphs
        Counts the CUDA graphs that contain launches of the array.
    copies : RangeCopies or None
        Chooses which ranges are read by copy engines; None: warps or threads read all.
    order : Order or None
        The order of loads and stores on streams; None: nothing stores, or launches end before they
        return.
    """

    def __init__(self, volume: Volume, service: Service, format: RowFormat) -> None:  # noqa: A002
        self.volume = volume
        self.service = service
        self.format = format
        self.on_cpu = volume.device.kind == "cpu"
        self.watchers: list[Watcher] = []
        # Whether a thread of the CPU device takes segments as they come. Several at a time, it
        # serves those that hit first; a trace is of accesses in their order.
        self.in_order = False
        self.moved = _native.Moved()
        self.copies: RangeCopies | None = None
        self.order: Order | None = None
        self.graphs = _native.CudaGraphs()
        self._capture: int | None = None  # that `graphs` has counted last
        self._wake_call: _native.WakeCall | None = None
        # A word for each scatter that checks its indices on the device; the stream orders its use.
        self._strays: DeviceMemory | None = None
        self._strays_of: dict[object, int] = {}
        self._strays_used = 0
        self.cache = cache = cast(Cache, volume.cache)
        self._kernels = cache.device.kernels_for(cache.kernel_policy)
        # For calls on rows by index.
        members = {"geometry": cache.geometry, "cache": cache.address, "volume": volume.address}
        self._packing = RowPacking(format, cache.line_bytes, **members)
        self._deferral = Deferral(volume, service)
        count_min = self._deferral.count_min(self._packing.segments)
        self.plans = _native.RowPlans(
            RowParams.indices.offset,
            RowParams.look_ahead.offset,
            self._deferral if count_min else None,
            count_min,
        )
        self._launching = None
        if isinstance(cache.device, CudaDevice):
            self._launching = cache.device.launching
        self._warps_at_once = cache.device.warps_at_once
        self._bundle = segments_per_bundle(cache.line_bytes)
        # The struct `fw::array<T>` for kernels.
        self.handle = bytes(
            ArrayStruct(
                geometry=cache.geometry,
                cache=cache.address,
                volume=volume.address,
                line_begin=volume.line_begin,
                length=format.size,
            )
        )
        self._handed_out = False
        # What launches on the CPU device hold, see `Device.run_kernel`. None: they are refused.
        self._uses: tuple[object, ...] | None = ()
        if self.on_cpu:
            self._uses = (*service.natives, *cache.owners, *volume.owners)

    def row_calls(self, streams: set[int]) -> _native.RowCalls:
        """Make the calls on rows that need no Python; see `native/bind/row_calls.h`.

        `streams` has the streams on which the array may have work; those of calls are added.
        """
        rows = self.format
        return _native.RowCalls(
            self._launching,
            row_shape=list(rows.row_shape),
            row_bytes=rows.row_bytes if rows.shape else 0,
            length=rows.row_count,
            dtype=rows.dtype,
            dtype_name=rows.dtype.name if rows.dtype.isnative else None,
            launcher=self,
            streams=streams,
        )

    def on(self, volume: Volume) -> Launcher:
        """Return the same launches with a copy of the array's entry, which notes its own errors."""
        made = Launcher(volume, self.service, self.format)
        made.watchers = self.watchers
        made.moved = self.moved
        made.copies = self.copies
        made.order = self.order
        return made

    def ordered(
        self, stores: bool, stream: int | None, chosen: range | Index, queue: Callable[[], T]
    ) -> T:
        """Queue an access to chosen rows by calling `queue`, in the order of accesses.

        Of an index all rows count: the host need not know it.
        """
        if self.order is None:
            return queue()
        lines = ALL_LINES
        if isinstance(chosen, range):
            (begin, end), line = self._bytes(chosen), self.cache.line_bytes
            lines = begin // line, -(-end // line)
        return self.order.queue(stream, stores, lines, queue)  # type: ignore[no-any-return]

    # Rows.

    def prepare_rows(
        self,
        verb: str,
        count: int,
        index_bytes: int,
        buffer: int,
        counting: Counting | None,
        sms: int | None,
        one_by_one: bool,
        drain_blocks: int,
    ) -> tuple[PreparedLaunch, bytes]:
        """Prepare launches on rows of one size, which `RowSize` describes: the launch, its params.

        Each launch has indices, a buffer and a look-ahead of its own, and a number if it defers its
        misses.
        """
        row = self.format.row_bytes
        if verb == "cells" and counting is not None:
            line_bytes, (_, stride, cell) = self.cache.line_bytes, counting
            lines = min(count * (1 + cell // line_bytes), -(-count * stride // line_bytes))
            params = self._packing.pack((0, count, 0, buffer, 0), 1, counting=counting)
            warps = -(-lines // _LINES_WORTH_A_THREAD)
            return self._prepared_launch("gather_cells", warps, len(params)), params
        # Threads of a client on the CPU device have many requests under way, by rows alone.
        of_client = self.on_cpu and not self.cache.owned
        by_elements = index_bytes and verb != "prefetch" and not of_client
        width = element_bytes(row, buffer) if by_elements else None
        if width is not None:
            items, bundle = count * (row // width), 1
            warps = self._at_most(self._warps(items), sms)
            deferred = self._deferral.of(items, warps, 32, drain_blocks, elements=True)
            name = f"{'gather' if verb == 'stream' else verb}_elements_{width}"
        else:
            line = self.cache.line_bytes
            items = count * self._packing.segments if index_bytes else -(-count // line)
            name = f"{verb}_rows"
            if verb == "stream":
                # Few warps, each with many rows on their way: a lane loads its words of eight
                # together.
                warps = self._at_most(-(-items // 8), sms, _STREAM_BLOCK_WARPS)
                bundle = min(32, -(-items // (8 * warps)) * 8)
                deferred = NOT_DEFERRED
            else:
                bundle = 1 if one_by_one else self._bundle_of(items)
                warps = self._at_most(self._warps(items, bundle), sms)
                deferred = self._deferral.of(items, warps, self._bundle, drain_blocks)
        which = (0, count, index_bytes, buffer, row)
        params = self._packing.pack(which, bundle, counting=counting, deferred=deferred)
        return self._prepared_launch(name, warps, len(params), sms), params

    def _at_most(self, useful: int, sms: int | None, block_warps: int = _BLOCK_WARPS) -> int:
        """Count warps: on so many multiprocessors a block each, or on so many threads."""
        if sms is None:
            return useful
        return min(useful, sms if self.on_cpu else sms * block_warps)

    def _prepared_launch(
        self, name: str, warps: int, param_bytes: int, sms: int | None = None
    ) -> PreparedLaunch:
        threads = None
        if sms is not None:
            # A block each, so that no more can hold one.
            threads = 32 * -(-warps // sms)
        return self._kernels.launch_of(name, warps, param_bytes, threads)

    def _bundle_of(self, segments: int) -> int:
        """Choose how many segments a warp takes at a time."""
        if self.on_cpu:
            return 1 if self.in_order else self._bundle
        # A warp copies one line after the other. So a few lines go to a warp each.
        return min(self._bundle, max(1, segments // self._warps_at_once))

    def lines_ahead(self) -> int:
        """Count the lines that one thread may ask for before they are needed.

        Half a ring, so that the thread finds room in it, and a quarter of the cache. 0 if the
        storage does not make threads wait.
        """
        if not self._waits_for_storage():
            return 0
        return min(self.cache.lines // 4, self.service.queues.depth // 2)

    def look_ahead(self) -> int:
        """Count the rows in flight ahead of the one being copied; 0 if storage is fast."""
        if not self.on_cpu:
            return 0
        device = self.volume.device
        if not isinstance(device, CpuDevice) or not self._waits_for_storage():
            return 0
        queues = self.service.queues
        room = min(self.cache.lines // 4, queues.count * (queues.depth - 1))
        return min(config.current("look_ahead").look_ahead, room // device.threads)

    def _waits_for_storage(self) -> bool:
        if not self.on_cpu or self.service.route == "in_place":
            return False
        return self.service.worth_looking_ahead()

    def lines_of(self, chosen: range | Index) -> int:
        """Count the lines that chosen rows touch at most; an index lies on the host."""
        row, line = self.format.row_bytes, self.cache.line_bytes
        if not chosen or not row:
            return 0
        rows = chosen if isinstance(chosen, range) else np.asarray(chosen.owner)
        first, last = (rows[0], rows[-1]) if isinstance(rows, range) else (rows.min(), rows.max())
        span = _lines_between(int(first) * row, (int(last) + 1) * row, line)
        return min(span, len(chosen) * segments_per_row(row, line))

    def move(
        self,
        verb: Verb,
        chosen: range | Index,
        buffer: int,
        stream: int | None = None,
        end: End | None = None,
        counting: Counting | None = None,
        sms: int | None = None,
        *,
        ordered: bool = True,
        others: tuple[int, ...] = (),
    ) -> bool:
        """Launch the copying of chosen rows; those of a range lie back to back.

        On a GPU at most `sms` multiprocessors copy; default: as many as all rows can use. Copy
        engines read long ranges, past the cache. Without `ordered`, the caller orders it, and a
        gather by an index comes after the present work of `others`. Returns False, and does
        nothing, if these streams are being captured.
        """
        self.moved.add(len(chosen))
        if self.watchers:
            self._show_rows(chosen, counting)
        copies = self.copies if verb == "gather" else None
        if copies is not None and isinstance(chosen, range) and copies.takes(chosen, stream):
            start = functools.partial(self._copy, copies, chosen, buffer, stream, end)
        else:
            operands = (verb, chosen, buffer, stream, sms, counting, end, others)
            start = functools.partial(self._start_rows, *operands)
        if not ordered or self.order is None:
            return start()
        return self.ordered(verb == "scatter", stream, chosen, start)

    def prefetch(
        self, chosen: range | Index, stream: int | None = None, threads: int | None = None
    ) -> None:
        """Launch the prefetch of chosen rows; on the CPU device by at most so many threads."""
        start = functools.partial(self._start_rows, "prefetch", chosen, 0, stream, threads)
        self.ordered(False, stream, chosen, start)

    def update(
        self,
        ids: int,
        count: int,
        buffer: int,
        tail: bytes,
        sums: bytes,
        warps: int,
        stream: int | None,
    ) -> None:
        """Launch the update of rows by gradients: `SumParams`, and `UpdateParams` behind `rows`."""
        row, bundle = self.format.row_bytes, self._bundle_of(count)
        which = (ids, count, 8, buffer, row)
        useful = min(warps, self._warps(count, bundle))
        deferred = self.deferred(count, useful, self._bundle)
        packed = self._packing.pack(which, bundle, look_ahead=self.look_ahead(), deferred=deferred)
        params = packed + tail
        self._start("sum_gradients", sums, self._warps(count, bundle), stream)
        start = functools.partial(self._start, "update_rows", params, useful, stream)
        in_order([(self, True)], stream, start)

    def deferred(self, rows: int, warps: int, bundle: int = 1) -> Deferred:
        """Return how a launch on so many rows by so many warps defers its misses now."""
        return self._deferral.of(rows * self.lines_per_row, warps, bundle, self._deferral.blocks)

    @property
    def deferred_from(self) -> int:
        """How many rows a launch has at least that defers misses; 0: none does."""
        return self._deferral.count_min(self.lines_per_row)

    @property
    def lines_per_row(self) -> int:
        """The most lines that one row touches."""
        return self._packing.segments

    def _start_rows(
        self,
        verb: str,
        chosen: range | Index,
        buffer: int,
        stream: int | None,
        sms: int | None = None,
        counting: Counting | None = None,
        end: End | None = None,
        others: tuple[int, ...] = (),
    ) -> bool:
        """Launch the kernel that moves rows, and waits for those that are not in the cache."""
        row, strays = self.format.row_bytes, 0
        if isinstance(chosen, range):
            which = (0, len(chosen) * row, 0, buffer, chosen.start * row)
        else:
            which = (chosen.address, len(chosen), chosen.itemsize, buffer, row)
            if verb == "scatter" and not chosen.checked:
                strays = self._check_indices(which, stream)
        return _native.launch_rows(
            self.plans, self, self._launching, verb, which, stream, others, end,
            sms or 0, counting, bool(self.watchers), strays,
        )  # fmt: skip

    def _check_indices(self, which: Which, stream: int | None) -> int:
        """Launch a check of indices; returns the address of the word that counts its strays."""
        strays = self._word_for_strays(stream)
        self.volume.device.clear(strays, 4, stream)
        params = self._packing.pack(which, 1, strays=strays)
        self._start("check_indices", params, self._warps(which[1]), stream)
        return strays

    def _copy(
        self, copies: RangeCopies, chosen: range, buffer: int, stream: int | None, end: End | None
    ) -> bool:
        if copies.writable:
            self.maintain("flush_lines", chosen=chosen, stream=stream)
        copies.read(chosen, buffer, stream, end)
        return True

    def _bytes(self, chosen: range) -> tuple[int, int]:
        """Return where neighbouring rows begin and end; a single row may have any step."""
        row_bytes = self.format.row_bytes
        return chosen.start * row_bytes, (chosen.start + len(chosen)) * row_bytes

    def _word_for_strays(self, stream: int | None) -> int:
        """Return the address of the word in which a check counts strays for the next scatter."""
        device = self.volume.device
        if self._strays is None:
            self._strays = device.allocate(4 * _CHECKS_MAX)
        handle: object = -1 if stream is None else stream
        if stream == _PER_THREAD:
            handle = stream, threading.get_ident()
        # Two graphs that were captured on one stream may run at the same time.
        captured = stream is not None and device.capture(stream) is not None
        place = None if captured else self._strays_of.get(handle)
        if place is None:
            place = self._strays_used
            if place == _CHECKS_MAX:
                raise CaptureError(
                    f"an array takes scatters with indices on the GPU from {_CHECKS_MAX} streams "
                    "and captured calls: open it again"
                )
            self._strays_used += 1
            if not captured:
                self._strays_of[handle] = place
        return self._strays.address + 4 * place

    def _show_rows(self, chosen: range | Index, counting: Counting | None) -> None:
        row = self.format.row_bytes
        if isinstance(chosen, range):
            self._show(np.array([chosen.start * row]), len(chosen) * row)
        else:
            self._show(self._rows_of(chosen, counting or self._packing.counting) * row, row)

    def _show(self, starts: npt.NDArray[np.int64], nbytes: int) -> None:
        for watcher in self.watchers:
            watcher(starts, nbytes)

    def _rows_of(self, index: Index, counting: Counting) -> npt.NDArray[np.int64]:
        """Copy indices to the host, as rows of the array."""
        found = index.copy_from(self.volume.device).astype(np.int64)
        _, from_front, from_end = counting
        return found + np.where(found < 0, from_end, from_front)

    def _warps(self, items: int, bundle: int = 32) -> int:
        if self.on_cpu:
            bundle = max(1, BYTES_WORTH_A_THREAD // self.cache.line_bytes)
        return -(-items // bundle)

    # Maintenance.

    def maintain(
        self,
        name: str,
        *,
        warps: int | None = None,
        opcode: int = 0,
        drop: int = 0,
        served: bool = True,
        stream: int | None = None,
        chosen: range | None = None,
    ) -> None:
        """Launch a maintenance kernel over the array's lines; default: warps for all frames.

        If its service has stopped, the array is not `served`. A flush may be of chosen rows only.
        """
        volume, line_bytes = self.volume, self.cache.line_bytes
        first, last = 0, volume.line_count - 1
        if chosen is not None:
            begin, end = self._bytes(chosen)
            first, last = begin // line_bytes, (end - 1) // line_bytes
        params = MaintenanceParams(
            cache=self.cache.address,
            volume=volume.address,
            line_begin=volume.line_begin + first,
            line_end=volume.line_begin + last + 1,
            opcode=opcode,
            drop=drop,
        )
        useful = self._warps(self.cache.lines) if warps is None else warps
        self._start(name, bytes(params), useful, stream, served=served)

    def drop_tier(self, *, drop: int = 0, served: bool = True, stream: int | None = None) -> None:
        """Launch the dropping of the array's lines in the host tier; none may be in a frame."""
        warps = self._warps(self.cache.host_lines)
        self.maintain("drop_tier", warps=warps, drop=drop, served=served, stream=stream)

    def forget_lines(self, drop: int) -> None:
        """Launch the dropping of the array's lines. Its service has stopped."""
        self.maintain("invalidate_lines", drop=drop, served=False)
        if self.volume.in_host_tier:
            self.drop_tier(drop=drop, served=False)

    def _start(
        self,
        name: str,
        params: bytes,
        warps: int,
        stream: int | None,
        *,
        served: bool = True,
    ) -> None:
        launch = self._prepared_launch(name, warps, len(params))
        uses = list(self.wake() if served else (*self.cache.owners, *self.volume.owners))
        try:
            launch((params,), stream, uses)
        finally:
            # A kept exception keeps this frame. That must not keep the array's file open.
            uses.clear()

    def wake(self) -> tuple[object, ...]:
        """Wake what serves the array; returns what a launch uses, see `Device.run_kernel`."""
        uses = self._uses
        if uses is None:
            raise ClosedError("the array is closed")
        self.service.wake()
        return uses

    def hear_launches(self, only: bool) -> None:
        """Tell the controllers whether only launches of this array may submit to them.

        Each of these on the CPU device names the controllers that it serves, but for launches of a
        caller's own making.
        """
        for each in self._uses or ():
            if isinstance(each, _native.Controller):
                each.hear_launches(only and not self._handed_out)

    def hand_out(self, policy: Policy | None = None) -> ArrayStruct:
        """Return the struct for kernels whose launches nobody sees, compiled for a policy."""
        if not self.cache.owned and not (policy is not None and policy.asks_owner):
            raise SharedCacheError(
                "a kernel that takes a file, or that was compiled elsewhere, would mark the lines "
                "that it hits, which only the owner of a shared cache may: let a kernel of "
                "flashwarp.compile take the array"
            )
        if not self._handed_out and self.on_cpu:
            self._handed_out = True
            self.cache.submitters.tell()
        return ArrayStruct.from_buffer_copy(self.handle)

    def join_capture(self, stream: int) -> bool:
        """Return whether a stream is being captured into a CUDA graph.

        If it is, the graph counts as one that uses the array, and each replay of what the stream
        queues next wakes what serves the array.
        """
        device = self.volume.device
        capture = device.capture(stream)
        if capture is None:
            return False
        if capture == 0:
            raise CaptureError(
                "the legacy default stream cannot be used while another stream is being captured: "
                "give the call the stream of the capture"
            )
        if capture != self._capture:
            device.capture_count(stream, self.graphs)
            self._capture = capture
        if self.service.needs_wake:
            if self._wake_call is None:
                self._wake_call = self.service.wake_call()
            if self._wake_call is not None:
                device.capture_call(stream, self._wake_call)
        return True

    def let_go(self) -> None:
        """Refuse launches from now on, and hold nothing for them any more."""
        self._uses = None
        if self._strays is not None:
            self._strays.close()


def _lines_between(begin: int, end: int, line_bytes: int) -> int:
    return (end - 1) // line_bytes - begin // line_bytes + 1


def deferred_by(launchers: Iterable[Launcher], rows: int, warps: int, bundle: int = 1) -> Deferred:
    """Return how a launch on several arrays defers its misses: by the list of one of them."""
    return max((each.deferred(rows, warps, bundle) for each in launchers), key=lambda how: how[2])
