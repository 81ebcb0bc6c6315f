"""Launches of the built-in kernels on one array: rows by index, rows in a range, maintenance.

Knows the kernels' parameters and how many warps they are worth; waits for nothing. Whoever
launches waits, and asks `failures` what went wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flashwarp import config
from flashwarp.array import rows
from flashwarp.array.operands import Index
from flashwarp.array.rows import MaintenanceParams, RowParams
from flashwarp.cache.cache import Cache, Volume
from flashwarp.device import CpuDevice, Device
from flashwarp.errors import ClosedError
from flashwarp.nvme import Service

__all__ = ["Launcher", "Watcher"]

Watcher: TypeAlias = Callable[[npt.NDArray[np.int64], int], None]

# Waking a thread of the CPU device takes 50 us, as long as copying this much.
_BYTES_WORTH_A_THREAD = 128 << 10


@dataclass
class Moved:
    """How many calls moved rows, and how many rows they moved. Threads may lose each other's."""

    calls: int = 0
    rows: int = 0

    def add(self, rows: int) -> None:
        """Count a call."""
        self.calls += 1
        self.rows += rows


class Launcher:
    """What the kernels of one array need to know, and their launches."""

    def __init__(
        self,
        cache: Cache,
        volume: Volume,
        controller: Service,
        row_bytes: int,
        row_count: int,
    ) -> None:
        self.cache = cache
        self.volume = volume
        self.controller = controller
        self.row_bytes = row_bytes
        self.row_count = row_count
        # Each sees what is about to be moved: byte offsets in the array, and bytes at each.
        self.watchers: list[Watcher] = []
        self._uses: tuple[object, ...] | None = None
        self._closed = False
        self.moved = Moved()

    def on(self, volume: Volume) -> Launcher:
        """Return the same launches with another entry for the array, whose errors are its own."""
        made = Launcher(self.cache, volume, self.controller, self.row_bytes, self.row_count)
        made.watchers = self.watchers
        made.moved = self.moved
        return made

    @property
    def device(self) -> Device:
        """Where the kernels run."""
        return self.cache.device

    # Rows.

    def row_params(self, index: Index, buffer: int) -> RowParams:
        """Return the parameters for rows at `index`, to or from `buffer`."""
        return RowParams(
            geometry=self.cache.geometry,
            cache=self.cache.address,
            volume=self.volume.address,
            indices=index.address,
            index_count=index.size,
            rows=buffer,
            row_bytes=self.row_bytes,
            row_count=self.row_count,
            look_ahead=self.look_ahead(),
            index_bytes=index.itemsize,
            segments=1,
            batch=rows.segments_per_batch(self.cache.line_bytes),
        )

    def lines_ahead(self) -> int:
        """Lines that one thread may ask for before they are needed; 0 where nothing waits.

        Half a ring, so that it finds room in it, and a quarter of the cache.
        """
        if not self._waits_for_storage():
            return 0
        return min(self._lines // 4, self.controller.queues.depth // 2)

    def look_ahead(self) -> int:
        """Rows in flight ahead of the one being copied; only storage that waits needs them."""
        if not isinstance(self.device, CpuDevice) or not self._waits_for_storage():
            return 0
        queues = self.controller.queues
        slots = queues.count * (queues.depth - 1)
        return min(config.current().look_ahead, min(self._lines // 4, slots) // self.device.threads)

    def _waits_for_storage(self) -> bool:
        if self.device.kind != "cpu" or self.controller.path == "in_place":
            return False
        return self.controller.worth_looking_ahead()

    @property
    def _lines(self) -> int:
        return self.cache.set_count * self.cache.ways

    def lines_of(self, first_row: int, last_row: int, count: int) -> int:
        """Most lines that so many rows touch, the first and the last of which are these."""
        if not count or not self.row_bytes:
            return 0
        line = self.cache.line_bytes
        end = (last_row + 1) * self.row_bytes - 1
        span = end // line - first_row * self.row_bytes // line + 1
        return min(span, count * rows.segments_per_row(self.row_bytes, line))

    def move_rows(self, verb: str, index: Index, buffer: int, stream: Any) -> None:
        """Launch "gather" or "scatter" of the rows at `index`."""
        self.moved.add(index.size)
        if self.watchers:
            self._tell(self._rows_of(index) * self.row_bytes, self.row_bytes)
        params = self.row_params(index, buffer)
        width = rows.element_bytes(self.row_bytes, buffer)
        if width is not None:
            name, items = f"{verb}_elements_{width}", index.size * (self.row_bytes // width)
        else:
            params.segments = rows.segments_per_row(self.row_bytes, self.cache.line_bytes)
            name, items = f"{verb}_rows", index.size * params.segments
        self._launch(name, params, items, stream)

    def move_range(
        self, verb: str, first_row: int, buffer: int, nbytes: int, stream: Any = None
    ) -> None:
        """Launch "gather" or "scatter" of rows that lie back to back from `first_row` on."""
        self.moved.add(nbytes // max(1, self.row_bytes))
        if self.watchers:
            self._tell(np.array([first_row * self.row_bytes]), nbytes)
        params = self._range_params(first_row, buffer, nbytes)
        self._launch(f"{verb}_rows", params, self._lines_in_range(params), stream)

    def prefetch_range(self, first_row: int, nbytes: int) -> None:
        """Launch the prefetch of rows that lie back to back, by one warp."""
        self._start("prefetch_rows", self._range_params(first_row, 0, nbytes), 1, None)

    def _range_params(self, first_row: int, buffer: int, nbytes: int) -> RowParams:
        return RowParams(
            geometry=self.cache.geometry,
            cache=self.cache.address,
            volume=self.volume.address,
            index_count=nbytes,
            rows=buffer,
            row_bytes=first_row * self.row_bytes,
            row_count=self.row_count,
            look_ahead=self.look_ahead(),
            index_bytes=8,
            segments=1,
            batch=rows.segments_per_batch(self.cache.line_bytes),
        )

    def _lines_in_range(self, params: RowParams) -> int:
        first, line = int(params.row_bytes), self.cache.line_bytes
        return (first + int(params.index_count) - 1) // line - first // line + 1

    def _tell(self, starts: npt.NDArray[np.int64], nbytes: int) -> None:
        for watcher in self.watchers:
            watcher(starts, nbytes)

    def _rows_of(self, index: Index) -> npt.NDArray[np.int64]:
        """Copy indices to the host, counted from the front."""
        kind = np.int32 if index.itemsize == 4 else np.int64
        raw = self.device.download(index.address, index.size * index.itemsize)
        found = np.frombuffer(raw, kind).astype(np.int64)
        return np.where(found < 0, found + self.row_count, found)

    def prefetch_rows(self, index: Index, stream: Any, warps: int | None = None) -> None:
        """Launch the prefetch of the rows at `index`; default: warps for all of them."""
        params = self.row_params(index, 0)
        params.segments = rows.segments_per_row(self.row_bytes, self.cache.line_bytes)
        useful = self._warps(index.size * params.segments, params.batch)
        self._start("prefetch_rows", params, useful if warps is None else warps, stream)

    def check_indices(self, index: Index, stream: Any) -> None:
        """Launch the check of indices; the volume's error record tells the first bad one."""
        self._launch("check_indices", self.row_params(index, 0), index.size, stream)

    def _launch(self, name: str, params: RowParams, items: int, stream: Any) -> None:
        batch = params.batch if name.endswith("_rows") else 32
        self._start(name, params, self._warps(items, batch), stream)

    def _warps(self, items: int, batch: int = 32) -> int:
        if self.device.kind == "cpu":
            batch = max(1, _BYTES_WORTH_A_THREAD // self.cache.line_bytes)
        return -(-items // batch)

    # Maintenance.

    def maintain(self, name: str, *, warps: int | None = None, **fields: int) -> None:
        """Launch a maintenance kernel over the array's lines; default: warps for all frames."""
        if warps is None:
            warps = self._warps(self._lines)
        self._start(name, self._maintenance(**fields), warps, None)

    def drop_tier(self) -> None:
        """Launch the dropping of the array's lines in the host tier; none may be in a frame."""
        self.maintain("drop_tier", warps=self._warps(self.cache.host_lines))

    def forget_lines(self, drop: int) -> None:
        """Launch the dropping of the array's lines, whose controller has stopped."""
        launches = {"invalidate_lines": self._lines}
        if self.volume.in_host_tier:
            launches["drop_tier"] = self.cache.host_lines
        for name, lines in launches.items():
            params, warps = self._maintenance(drop=drop), self._warps(lines)
            self.device.launch(
                name,
                params,
                warps=warps,
                uses=(*self.cache.owners, *self.volume.owners),
                policy=self.cache.policy,
            )

    def _maintenance(self, **fields: int) -> MaintenanceParams:
        return MaintenanceParams(
            cache=self.cache.address,
            volume=self.volume.address,
            line_begin=self.volume.line_begin,
            line_end=self.volume.line_begin + self.volume.line_count,
            **fields,
        )

    def _start(
        self, name: str, params: RowParams | MaintenanceParams, warps: int, stream: Any
    ) -> None:
        uses = list(self.wake())
        try:
            self.device.launch(
                name, params, warps=warps, stream=stream, uses=uses, policy=self.cache.policy
            )
        finally:
            # A kept exception keeps this frame. That must not keep the array's file open.
            uses.clear()

    def wake(self) -> tuple[object, ...]:
        """Wake what serves the array; returns what a launch uses, see `Device.launch`."""
        uses = self._uses
        if uses is None:
            uses = self._uses = self._used()
        if self._closed:
            raise ClosedError("the array is closed")
        self.controller.wake()
        return uses

    def _used(self) -> tuple[object, ...]:
        if self.device.kind != "cpu":
            return ()
        return (*self.controller.natives, *self.cache.owners, *self.volume.owners)

    def let_go(self) -> None:
        """Hold nothing for launches any more: they are refused."""
        self._closed = True
        self._uses = ()
