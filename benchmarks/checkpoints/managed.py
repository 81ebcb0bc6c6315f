"""Managed memory with advice and prefetches in the order of restores, as the paper compares with.

All of it stays in the memory of the GPU and of the host, and nothing is written to storage, which
favours it. As many snapshots as the GPU cache has room for stay on the GPU.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import Any

from numpy.typing import NDArray

from benchmarks.base import Record
from benchmarks.checkpoints.shots import HINTS, Links, order_of
from benchmarks.checkpoints.state import VALUES, blocked, ends_are, finish, new_array

__all__ = ["add_managed"]

_ORDERS = ("reverse", "irregular")
_INTERVAL_S = 0.01
_SHARE = 0.25
"""Of the memory that is free on the GPU: a program that asks for more than there is may hang it."""


def add_managed(report: Record, device: Any, lengths: NDArray[Any], links: Links) -> str:
    """Add how managed memory restores the uniform shot; return why not, if it cannot."""
    total, free = int(lengths.sum()), device.memory_info().free_bytes
    if total > free * _SHARE:
        return f"{total} bytes exceed a quarter of the {free} that are free on the GPU"
    snapshots = _Snapshots(device, int(lengths[0]), len(lengths))
    try:
        for order in _ORDERS:
            for hints in HINTS:
                if report.is_late(f"managed memory, {order}, hints: {hints}"):
                    return ""
                _add(report, device, snapshots, order, hints, links)
    finally:
        snapshots.close()
    return ""


class _Snapshots:
    """Blocks of managed memory, and where the driver is asked to keep them."""

    def __init__(self, device: Any, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self._context = device.context
        self._stream = self._context.create_stream()
        self.blocks: list[int] = []
        try:
            for _ in range(count):
                self.blocks.append(self._context.allocate_managed(nbytes))
        except BaseException:
            self.close()
            raise

    def place(self, block: int, *, on_host: bool) -> None:
        """Advise the driver to keep a block somewhere, and to bring it there in the background."""
        self._context.place_managed(block, self.nbytes, self._stream, on_host=on_host)

    def settle(self) -> None:
        """Wait until all blocks are where they were asked to be."""
        self._context.call("cuStreamSynchronize", self._stream)

    def copy(self, target: int, source: int) -> None:
        """Copy a block, in the order of torch's default stream."""
        self._context.call("cuMemcpyAsync", target, source, self.nbytes, 0)

    def close(self) -> None:
        """Free all of it."""
        self._context.call("cuCtxSynchronize")
        while self.blocks:
            self._context.call("cuMemFree", self.blocks.pop())
        self._context.call("cuStreamDestroy", self._stream)


def _add(
    report: Record, device: Any, snapshots: _Snapshots, order: str, hints: str, links: Links
) -> None:
    blocks, nbytes = snapshots.blocks, snapshots.nbytes
    room = max(1, len(blocks) // 12)
    ahead_max = {"none": 0, "single": 1, "all": room}[hints]
    state = new_array(device, nbytes)
    write_s = read_s = 0.0
    for step, block in enumerate(blocks):
        state[:] = step % VALUES
        snapshots.place(block, on_host=False)
        snapshots.settle()
        finish(device)
        time.sleep(_INTERVAL_S)
        write_s += blocked(device, partial(snapshots.copy, block, state.data_ptr()))
        if step >= room:
            snapshots.place(blocks[step - room], on_host=True)
    snapshots.settle()
    right = True
    steps = order_of(order, len(blocks))
    ahead: deque[int] = deque()
    for turn, step in enumerate(steps):
        ahead = deque(each for each in ahead if each >= turn)
        following = max(turn + (hints == "single"), ahead[-1] + 1 if ahead else 0)
        while len(ahead) < ahead_max and following < len(steps):
            snapshots.place(blocks[steps[following]], on_host=False)
            ahead.append(following)
            following += 1
        state[:] = VALUES
        finish(device)
        time.sleep(_INTERVAL_S)
        read_s += blocked(device, partial(snapshots.copy, state.data_ptr(), blocks[step]))
        right &= ends_are(state, step % VALUES)
        snapshots.place(blocks[step], on_host=True)
    snapshots.settle()
    total = nbytes * len(blocks)
    report.row(
        f"restore from managed memory, uniform {order}, 10 ms, hints: {hints}",
        total / read_s / 1e9,
        "GB/s",
        "copies inside the device",
        links.within / 1e9,
        checked=right,
        note=f"{total / write_s / 1e9:.3g} GB/s written; advice and prefetches by the driver; "
        "in memory alone, never on storage",
        footprint=total,
    )
