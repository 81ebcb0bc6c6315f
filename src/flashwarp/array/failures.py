"""What went wrong in a launch, as one exception.

Two notes are put together: the device's, which are the sequences of failures of the array's volume,
and the controller's log, which knows path and errno.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import threading
from collections import deque
from typing import Any

from flashwarp import config, endings
from flashwarp.array.operands import Index
from flashwarp.cache.cache import FailureStruct, Noted, Volume
from flashwarp.errors import (
    BoundsError,
    ControllerError,
    ControllerTimeout,
    DeviceError,
    FlashwarpError,
    ShareError,
    StorageError,
)
from flashwarp.nvme import Service

__all__ = ["Failures", "bad_index"]

_LBA_BYTES = 512

# As many as the controller's own log holds.
_LOG_ENTRIES_MAX = 64

# NVMe status fields, and the one of ours for a wait that ran out of time.
_TIMED_OUT = 0x7FF
_SHARE_TIMED_OUT = 0x7F9  # the same for a wait for other users of a share table
_CAPACITY_EXCEEDED = 0x081
_WRITE_FAULT = 0x280
_UNRECOVERED_READ = 0x281
_WRITE = 0x01
_OPERATIONS = {0x00: "flush", _WRITE: "write", 0x02: "read"}


class Failures:
    """Turns the notes about one array's launches into exceptions. Any thread may ask.

    Parameters
    ----------
    controller : Service
        Whose log tells the rest.
    line_bytes : int
    path : str, optional
        The storage's, for failures that no log entry explains.
    shape : tuple of int
        The array's.
    """

    def __init__(
        self,
        controller: Service,
        line_bytes: int,
        path: str | None,
        shape: tuple[int, ...],
    ) -> None:
        self._controller = controller
        self._line_bytes = line_bytes
        self._path = path
        self._shape = shape
        self._lock = threading.Lock()
        # Entries of the controller's log that were taken for another call's failure.
        self._log: deque[dict[str, Any]] = deque(maxlen=_LOG_ENTRIES_MAX)

    def take(self, what: str, volume: Volume, *, alone: bool) -> FlashwarpError | None:
        """Return what kernels noted in `volume` since the last call.

        `what` is the operation for people. `alone` tells that no other call of the array is in
        flight, so that the controller's log is about this one. What is noted meanwhile is for the
        next call.
        """
        failed, strays = volume.commands.read(), volume.indices.read()
        stray = None
        if strays:
            first = int(strays.kept[0].where) if strays.kept else None
            stray = self._stray(first, f", the first of {strays.count} such")
        if not failed:
            return stray
        failure = self._failure(what, failed, alone)
        if stray is not None:
            failure.add_note(f"and {stray}")
        return failure

    def after_fault(self, volume: Volume, fault: DeviceError) -> FlashwarpError:
        """Return why a kernel was stopped, as far as it could note it; the device is dead then."""
        noted = volume.indices.first()
        if noted is None:
            return fault
        return self._stray(int(noted.where), f", where it was stopped ({fault})")

    def _stray(self, index: int | None, how: str) -> BoundsError:
        # A negative index comes as one beyond 2^63.
        known = "an index" if index is None else f"index {index - ((index >> 63) << 64)}"
        return BoundsError(
            f"a kernel used {known}, which is out of bounds for the array "
            f"{self._path or 'in memory'} of shape {self._shape}, {math.prod(self._shape)} "
            f"elements{how}"
        )

    def _failure(self, what: str, failed: Noted, alone: bool) -> FlashwarpError:
        """Make an exception of the first failure, with a note of the others."""
        if not failed.kept:
            # Noted when others had filled the record, and read after those were.
            return ControllerError(
                f"{what}: {failed.count} commands failed, of which no more is known"
            )
        failure = self._described(what, failed.kept[0], alone)
        others = [int(each.where) * self._line_bytes for each in failed.kept[1:]]
        if others:
            places = ", ".join(f"{offset}.." for offset in dict.fromkeys(others))
            unknown = failed.count - len(failed.kept)
            and_more = f", and {unknown} of which no more is known" if unknown else ""
            failure.add_note(
                f"and {failed.count - 1} more commands failed: on bytes {places}{and_more}"
            )
        return failure

    def _described(self, what: str, record: FailureStruct, alone: bool) -> FlashwarpError:
        status, opcode = int(record.status), int(record.opcode)
        offset = int(record.where) * self._line_bytes
        logged = self._logged(offset // _LBA_BYTES, _OPERATIONS.get(opcode), alone)
        if status == _TIMED_OUT:
            return ControllerTimeout(
                f"{what} waited {config.current().timeout_s:g} s for a command on bytes "
                f"{offset}.. of the array, and gave up: {self._controller.silent()} does not answer"
            )
        if status == _SHARE_TIMED_OUT:
            return ShareError(
                f"{what} waited {config.current().timeout_s:g} s for others to release their copy "
                f"of bytes {offset}.. of the array, and gave up: threads wait for each other, or "
                "one has ended without release()"
            )
        if logged is None:
            return _failure_without_log(what, status, opcode, offset, self._path)
        number = int(logged["errno"])
        return StorageError(
            number,
            f"{what}: {logged['op']} of {logged['nbytes']} bytes at offset {logged['offset']} "
            f"failed: {logged.get('reason') or os.strerror(number)} (NVMe status {status:#05x})",
            str(logged.get("path") or self._path or "") or None,
            offset=int(logged["offset"]),
            status=status,
        )

    def _logged(self, lba: int, operation: str | None, alone: bool) -> dict[str, Any] | None:
        """Find the controller's entry for a failure on these blocks."""
        find = functools.partial(self._find, lba, operation, alone)
        return endings.holding([self._lock], find)

    def _find(self, lba: int, operation: str | None, alone: bool) -> dict[str, Any] | None:
        fresh = [e for e in self._controller.take_errors() if e.get("errno")]
        # The log also holds failed prefetches, which nobody asked about: prefer the entry of
        # the very blocks. While other calls are in flight, no other entry will do.
        fitting = [e for e in fresh if operation in (None, e.get("op"))]
        kept = [e for e in self._log if operation in (None, e.get("op"))]
        exact = [e for e in fitting if e.get("lba") == lba]
        earlier = [e for e in reversed(kept) if e.get("lba") == lba]
        if alone:
            self._log.clear()
        # One of them may be of a failure that kernels note right now: the next call tells it.
        self._log.extend(fresh)
        return next(iter(exact + earlier + (fitting if alone else [])), None)


def bad_index(volume: Volume, index: Index, row_count: int) -> BoundsError | None:
    """Return the error of the first index that a check on the device found, and forget it."""
    noted = volume.indices.read()
    if not noted:
        return None
    if not noted.kept:
        return BoundsError(f"{noted.count} indices are out of bounds for an axis of {row_count}")
    position = int(noted.kept[0].where)
    device = volume.cache.device
    raw = device.download(index.address + position * index.itemsize, index.itemsize, volume.stream)
    value = int.from_bytes(raw, "little", signed=True)
    return BoundsError(f"index {value} is out of bounds for an axis of length {row_count}")


def _failure_without_log(
    what: str, status: int, opcode: int, offset: int, path: str | None
) -> FlashwarpError:
    if status not in (_CAPACITY_EXCEEDED, _WRITE_FAULT, _UNRECOVERED_READ):
        return ControllerError(
            f"{what} failed at byte {offset} of the array with NVMe status {status:#05x}"
        )
    number = errno.ENOSPC if status == _CAPACITY_EXCEEDED else errno.EIO
    # The log tells of that line, which is another's, or not the one that was to be read.
    why = ": a line in its way could not be written back" if opcode == _WRITE else ""
    return StorageError(
        number,
        f"{what} failed at byte {offset} of the array{why} (NVMe status {status:#05x})",
        path,
        offset=offset,
        status=status,
    )
