"""Copies of one direction on a GPU: a queue of their own, and events from a pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from flashwarp import _waiting, endings
from flashwarp._jit.cuda_context import End, Memory
from flashwarp.config import time_limit_s
from flashwarp.device import CudaDevice
from flashwarp.device.base import quietly
from flashwarp.errors import ArgumentError, DeviceError, DeviceTimeout, FlashwarpError
from flashwarp.transfer.bandwidth import LinkBandwidth
from flashwarp.transfer.buffer import PIECE_BYTES
from flashwarp.transfer.copies import After, Copy, Direction, Piece
from flashwarp.transfer.device_queue import DeviceQueue

# So many copies are queued before their ends are looked for, and so many in all: then a copy waits
# for an earlier one to end.
_SWEPT_AT = 16
_IN_FLIGHT_MAX = 1024

# Shorter copies take their time from the launch, not from the link.
_MEASURED_BYTES_MIN = 1 << 20


class CudaCopier:
    """A queue, its copies in order, and events. `Copier` documents the methods."""

    # ruff: noqa: D102

    def __init__(self, device: CudaDevice, bandwidth: LinkBandwidth) -> None:
        self._context = device.context
        self._bandwidth = bandwidth
        self._lock = endings.Lock()
        self._copies: deque[Copy] = deque()
        self._failed: list[Copy] = []
        self._queue = DeviceQueue(device)
        self._context.provide_events(_SWEPT_AT)
        # Those of the copy that is measured.
        self._timed = [self._context.create_event(timing=True) for _ in range(2)]
        self._timers = [(self._timed[0], self._timed[1])]

    # Copies.

    def submit(self, copy: Copy, pieces: Sequence[Piece], after: After) -> None:
        for each in after.copies:
            if each.copier is not self and not each.over():
                self._context.wait_event(self._queue.handle, each.event)
        if copy.nbytes >= _MEASURED_BYTES_MIN and self._timers:
            copy.begin, copy.event = self._timers.pop()
        else:
            copy.event = self._take_event()
        copy.number = 0
        try:
            end = End(copy.event, self._copies, copy)
            whole = _without_seams(pieces, copy.direction)
            self._queue.copy(whole, after.streams, copy.begin, end)
        except FlashwarpError as error:
            if copy in self._copies:
                copy.number = 1  # what was queued before the failure ends later
                copy.refusal = error
            else:
                self._return_events(copy)
            raise

    def _take_event(self) -> int:
        waited, limit_s = None, time_limit_s()
        if len(self._copies) >= _SWEPT_AT:
            waited = _waiting.until(lambda: self.in_flight() < _IN_FLIGHT_MAX, limit_s)
        if waited is not None:
            raise DeviceTimeout(
                f"{len(self._copies)} copies are in flight, and none ended in {waited:.1f} s "
                f"(limit {limit_s:g} s): a word that they wait for was not stored, or the "
                "work that they come after still runs"
            )
        return self._context.take_event()

    def sweep(self) -> None:
        if self._copies and self._context.usable:
            endings.holding([self._lock], self._sweep)

    def _sweep(self) -> None:
        try:
            while self._copies and self._context.event_done(self._copies[0].event):
                self._end_first(None)
        except DeviceError as error:
            # A fault: nothing runs on the GPU any more.
            while self._copies:
                self._end_first(error)

    def _end_first(self, error: FlashwarpError | None) -> None:
        copy = self._copies[0]
        error = error or copy.refusal
        if error is None and copy.begin:
            nanoseconds = self._context.elapsed_ns(copy.begin, copy.event)
            self._bandwidth.record(copy.nbytes, nanoseconds)
        if error is not None:
            self._failed.append(copy)
        copy.end(error)
        self._return_events(copy)
        self._copies.popleft()

    def _return_events(self, copy: Copy) -> None:
        """Take events back, once; what an interrupt loses is destroyed at the end."""
        begin, event, copy.begin, copy.event = copy.begin, copy.event, 0, 0
        if begin:
            self._timers.append((begin, event))
        elif event:
            self._context.give_event(event)

    def in_flight(self) -> int:
        self.sweep()
        return len(self._copies)

    # Order.

    def order_before(self, copy: Copy, stream: int) -> None:
        endings.holding([self._lock], lambda: self._order_before(copy, stream))

    def _order_before(self, copy: Copy, stream: int) -> None:
        # Under the lock, so that the event is not another copy's yet.
        if copy.event:
            self._context.wait_event(stream, copy.event)

    # The end.

    def take_failures(self) -> list[FlashwarpError]:
        failed, self._failed = self._failed, []
        return [each.error for each in failed if not each.seen and each.error is not None]

    def close(self) -> None:
        for event in self._timed:
            quietly(self._context.releasing("cuEventDestroy", event))
        self._timed.clear()
        self._queue.close()


def direction_of(device: CudaDevice, pieces: Sequence[Piece]) -> Direction:
    """Find out where a copy goes: all of its pieces go in one direction."""
    kind_of = device.context.memory_kind
    kinds = {(kind_of(target), kind_of(source)) for target, source, _ in pieces}
    if len(kinds) > 1:
        raise ArgumentError("the pieces of a copy go different ways: make a copy for each")
    target, source = kinds.pop()
    for kind, address in ((target, pieces[0][0]), (source, pieces[0][1])):
        if kind is Memory.UNKNOWN:
            raise ArgumentError(
                f"the host memory at {address:#x} is not pinned, so a copy would block: copy "
                "through the buffers of a TransferClient, or register it with Device.register_host"
            )
    if target is source is Memory.PINNED:
        raise ArgumentError("target and source are both in host memory: no copy engine is needed")
    if target is Memory.DEVICE:
        return Direction.TO_DEVICE if source is Memory.PINNED else Direction.WITHIN
    return Direction.TO_HOST


def _without_seams(pieces: Sequence[Piece], direction: Direction) -> Sequence[Piece]:
    """Cut copies where pinned pieces may meet on the host: the driver crosses no border."""
    side = {Direction.TO_HOST: 0, Direction.TO_DEVICE: 1}.get(direction)
    if side is None or all(p[side] % PIECE_BYTES + p[2] <= PIECE_BYTES for p in pieces):
        return pieces
    cut = []
    for target, source, nbytes in pieces:
        at, ahead = 0, (target, source)[side] % PIECE_BYTES
        while at < nbytes:
            size = min(nbytes - at, PIECE_BYTES - (ahead + at) % PIECE_BYTES)
            cut.append((target + at, source + at, size))
            at += size
    return cut
