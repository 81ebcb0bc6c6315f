"""Copies of one direction on the CPU device: a host thread with memcpy."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

from flashwarp import _native, endings
from flashwarp.errors import ArgumentError, ClosedError, DeviceError, FlashwarpError
from flashwarp.transfer.bandwidth import LinkBandwidth
from flashwarp.transfer.copies import After, Copy, Piece

# Shorter copies take their time from the call, not from memory.
_MEASURED_BYTES_MIN = 1 << 20


class CpuCopier:
    """A thread that starts with the first copy. `Copier` documents the methods."""

    # ruff: noqa: D102

    def __init__(self, bandwidth: LinkBandwidth) -> None:
        self._bandwidth = bandwidth
        self._native = _native.HostCopier()
        self._pid = os.getpid()
        self._lock = endings.Lock()
        self._copies: deque[Copy] = deque()
        self._failed: list[Copy] = []

    def submit(self, copy: Copy, pieces: Sequence[Piece], after: After) -> None:
        try:
            for each in after.copies:
                copier = each.copier
                if isinstance(copier, CpuCopier) and copier is not self:
                    self._native.wait_word(copier._native.ended_address, each.number)
            self._native.copy_and_append(list(pieces), self._copies, copy)
        except RuntimeError as error:
            raise _refusal(error) from error

    def sweep(self) -> None:
        if self._copies and os.getpid() == self._pid:
            endings.holding([self._lock], self._sweep)

    def _sweep(self) -> None:
        """Read the results, note the ends, and only then forget the results."""
        ended = {result[0]: result[1:] for result in self._native.results()}
        while self._copies and self._copies[0].number in ended:
            copy = self._copies[0]
            failed, nanoseconds, withdrawn = ended[copy.number]
            error = _error(copy, failed, withdrawn)
            if error is None and copy.nbytes >= _MEASURED_BYTES_MIN:
                self._bandwidth.record(copy.nbytes, nanoseconds)
            if error is not None:
                self._failed.append(copy)
            copy.end(error)
            self._copies.popleft()
        if ended:
            self._native.forget(max(ended))

    def in_flight(self) -> int:
        self.sweep()
        return len(self._copies)

    def order_before(self, copy: Copy, stream: int) -> None:  # noqa: ARG002
        """Block: launches on the CPU run at once, so none could wait for the copy later."""
        copy.wait()

    def take_failures(self) -> list[FlashwarpError]:
        failed, self._failed = self._failed, []
        return [each.error for each in failed if not each.seen and each.error is not None]

    def close(self) -> None:
        self._native.stop()
        self.sweep()


def _refusal(error: RuntimeError) -> DeviceError | ClosedError:
    if "stopped" in str(error):
        return ClosedError("the copy engine was closed")
    return DeviceError(f"the thread that copies cannot be started: {error}")


def _error(copy: Copy, failed: int, withdrawn: bool) -> FlashwarpError | None:
    if withdrawn:
        return ClosedError(
            f"a copy of {copy.nbytes} bytes was withdrawn: its engine was closed first"
        )
    if failed >= 0:
        return ArgumentError(
            f"piece {failed} of a copy of {copy.nbytes} bytes could not be read: its source is a "
            "mapped file that became shorter, or whose storage failed"
        )
    return None
