"""Failures of launches, as exceptions.

Each exception combines two records: the device's, which is the sequences of failures in the array's
volume, and the controller's log, which knows path and errno.
"""

from __future__ import annotations

import errno
import functools
import math
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from flashwarp import config, endings
from flashwarp.cache.failures import Noted
from flashwarp.cache.structs import FailureStruct
from flashwarp.cache.volume import Volume
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

_LBA_BYTES = 512

# As many entries as the controller's own log holds.
_LOG_ENTRIES_MAX = 64

# NVMe status fields. The first two are our own: a wait for a command, or for other users of a share
# table, ran out of time.
_TIMED_OUT = 0x7FF
_SHARE_TIMED_OUT = 0x7F9
_CAPACITY_EXCEEDED = 0x081
_WRITE_FAULT = 0x280
_UNRECOVERED_READ = 0x281
_WRITE = 0x01
# `index_of` of the headers: the index counts rows, or the ids of a lookup, not elements.
_ROWS = 1
_OFFSETS = 2
_OPERATIONS = {0x00: "flush", _WRITE: "write", 0x02: "read"}


class Failures:
    """Turns what kernels and controller recorded about an array's launches into exceptions.

    Any thread may call it.

    Parameters
    ----------
    service : Service
        Its log has path and errno of failed transfers.
    path : str, optional
        The storage's, for failures that no log entry explains.
    shape : tuple of int
        The array's.
    sharing : str, optional
        Names another process of the cache, if there may be some that fill its lines, too.
    """

    def __init__(
        self, service: Service, path: str | None, shape: tuple[int, ...], sharing: str = ""
    ) -> None:
        self._service = service
        self._sharing = sharing
        self._path = path
        self._shape = shape
        self._lock = endings.Lock()
        # Entries of the log that were read for another call's failure.
        self._log: deque[dict[str, Any]] = deque(maxlen=_LOG_ENTRIES_MAX)

    def take(
        self, what: str, volume: Volume, alone: Callable[[], bool] = lambda: False
    ) -> FlashwarpError | None:
        """Return the error of what kernels noted in `volume` since the last call, or None.

        Parameters
        ----------
        what : str
            The operation, for the message.
        volume : Volume
        alone : callable
            Returns whether no other call of the array is in flight, so that new entries of the log
            belong to this one.

        Notes
        -----
        The next call returns what kernels note during this one.
        """
        failed, strays = volume.commands.read(), volume.indices.read()
        stray = None
        if strays:
            stray = self._stray(strays, what)
        if not failed:
            return stray
        failure = self._failure(what, failed, volume.cache.line_bytes, alone())
        if stray is not None:
            failure.add_note(f"and {stray}")
        return failure

    def after_fault(self, volume: Volume, fault: DeviceError) -> FlashwarpError:
        """Return why a kernel was stopped by `fault`, if it could note it; else `fault`."""
        noted = volume.indices.first()
        if noted is None:
            return fault
        return self._stray_element(_index(noted), f", where it was stopped ({fault})")

    def _stray(self, strays: Noted, what: str) -> BoundsError:
        first = strays.kept[0] if strays.kept else None
        known = "an index" if first is None else _index(first)
        more = f", the first of {strays.count} such"
        if first is not None and first.status == _OFFSETS:
            return BoundsError(
                f"offset {_signed(first)} of a bag lies before the one in front of it or past the "
                f"last id, or is the first and not 0{more}, in {what}: its bag is empty"
            )
        if first is None or first.status != _ROWS:
            return self._stray_element(known, more)
        length = int(first.limit) or self._shape[0]
        return BoundsError(
            f"{known} is out of bounds for an axis of length {length}{more}, in {what}: "
            "its row reads as zeros, and a scatter with it stores nothing"
        )

    def _stray_element(self, known: str, how: str) -> BoundsError:
        return BoundsError(
            f"a kernel used {known}, which is out of bounds for the array "
            f"{self._path or 'in memory'} of shape {self._shape}, {math.prod(self._shape)} "
            f"elements{how}"
        )

    def _failure(self, what: str, failed: Noted, line_bytes: int, alone: bool) -> FlashwarpError:
        """Make an exception of the first failure, with a note about the others."""
        if not failed.kept:
            # They found the record full, and what filled it was read before.
            return ControllerError(
                f"{what}: {failed.count} commands failed, of which no more is known"
            )
        failure = self._described(what, failed.kept[0], line_bytes, alone)
        others = [int(each.where) * line_bytes for each in failed.kept[1:]]
        if others:
            places = ", ".join(f"{offset}.." for offset in dict.fromkeys(others))
            unknown = failed.count - len(failed.kept)
            and_more = f", and {unknown} of which no more is known" if unknown else ""
            failure.add_note(
                f"and {failed.count - 1} more commands failed: on bytes {places}{and_more}"
            )
        return failure

    def _described(
        self, what: str, record: FailureStruct, line_bytes: int, alone: bool
    ) -> FlashwarpError:
        status, opcode = int(record.status), int(record.opcode)
        offset = int(record.where) * line_bytes
        logged = self._logged(offset // _LBA_BYTES, _OPERATIONS.get(opcode), alone)
        waited_s = config.current("timeout_s").command_timeout_s
        lost = self._service.failure() if status == _TIMED_OUT else None
        if lost is not None:
            lost.add_note(f"{what} was about bytes {offset}.. of the array")
            return lost
        if status == _TIMED_OUT:
            return ControllerTimeout(
                f"{what} waited {waited_s:g} s for a command on bytes "
                f"{offset}.. of the array, and gave up: {self._silent()} does not answer"
            )
        if status == _SHARE_TIMED_OUT:
            return ShareError(
                f"{what} waited {waited_s:g} s for others to release their copy of bytes "
                f"{offset}.. of the array, and gave up: threads wait for each other, or "
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

    def _silent(self) -> str:
        """Name the storage or the process that did not answer a kernel."""
        own = not self._sharing or self._service.queues.unanswered
        return self._service.silent() if own else self._sharing

    def _logged(self, lba: int, operation: str | None, alone: bool) -> dict[str, Any] | None:
        """Return the log's entry for a failure on these blocks, if there is one."""
        find = functools.partial(self._find, lba, operation, alone)
        return endings.holding([self._lock], find)

    def _find(self, lba: int, operation: str | None, alone: bool) -> dict[str, Any] | None:
        fresh = [e for e in self._service.take_errors() if e.get("errno")]
        # The log also holds failed prefetches, which no caller asks about. So prefer the entry for
        # these blocks, and take no other one while other calls are in flight.
        fitting = [e for e in fresh if operation in (None, e.get("op"))]
        kept = [e for e in self._log if operation in (None, e.get("op"))]
        exact = [e for e in fitting if e.get("lba") == lba]
        earlier = [e for e in reversed(kept) if e.get("lba") == lba]
        if alone:
            self._log.clear()
        # Kernels may be noting the failure of one of these entries right now, for the next call.
        self._log.extend(fresh)
        return next(iter(exact + earlier + (fitting if alone else [])), None)


def _index(stray: FailureStruct) -> str:
    return f"index {_signed(stray)}"


def _signed(stray: FailureStruct) -> int:
    # Kernels note a negative index modulo 2^64.
    where = int(stray.where)
    return where - ((where >> 63) << 64)


def _failure_without_log(
    what: str, status: int, opcode: int, offset: int, path: str | None
) -> FlashwarpError:
    if status not in (_CAPACITY_EXCEEDED, _WRITE_FAULT, _UNRECOVERED_READ):
        return ControllerError(
            f"{what} failed at byte {offset} of the array with NVMe status {status:#05x}"
        )
    number = errno.ENOSPC if status == _CAPACITY_EXCEEDED else errno.EIO
    # The log has an entry for that line, which is another array's or another one of this array.
    why = ": a line in its way could not be written back" if opcode == _WRITE else ""
    return StorageError(
        number,
        f"{what} failed at byte {offset} of the array{why} (NVMe status {status:#05x})",
        path,
        offset=offset,
        status=status,
    )
