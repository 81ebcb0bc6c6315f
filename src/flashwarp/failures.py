"""What went wrong in a launch, as one exception.

Two notes are put together: the device's, which is the error record of the array's volume, and the
controller's log, which knows path and errno.
"""

from __future__ import annotations

import errno
import os

from flashwarp import config
from flashwarp.cache import ErrorRecordStruct, Volume
from flashwarp.controller import SoftwareController
from flashwarp.errors import ControllerError, ControllerTimeout, FlashwarpError, StorageError

__all__ = ["raise_failure"]

_LBA_BYTES = 512

# NVMe status fields, and the one of ours for a wait that ran out of time.
_TIMED_OUT = 0x7FF
_CAPACITY_EXCEEDED = 0x081
_WRITE_FAULT = 0x280
_UNRECOVERED_READ = 0x281
_WRITE = 0x01
_OPERATIONS = {0x00: "flush", _WRITE: "write", 0x02: "read"}


def raise_failure(
    what: str, volume: Volume, controller: SoftwareController, path: str | None
) -> None:
    """Raise what kernels noted since the last call, if they did; the notes are forgotten then.

    `what` is the operation for people, `path` the storage's.
    """
    record = volume.error_record()
    if not record.count:
        return
    noted = ErrorRecordStruct.from_buffer_copy(record)
    volume.clear_errors()
    raise _failure(what, noted, volume.cache.line_bytes, controller, path)


def _failure(
    what: str,
    record: ErrorRecordStruct,
    line_bytes: int,
    controller: SoftwareController,
    path: str | None,
) -> FlashwarpError:
    status, opcode = int(record.status), int(record.opcode)
    failures = controller.take_errors()
    offset = int(record.line) * line_bytes
    if status == _TIMED_OUT:
        return ControllerTimeout(
            f"{what} waited {config.current().timeout_s:g} s for a command on bytes "
            f"{offset}.. of the array, and gave up: the storage does not answer"
        )
    # The controller's log also holds failed prefetches, which nobody asked about: prefer the
    # entry of the very blocks that this record is about.
    operation = _OPERATIONS.get(opcode)
    failures = [e for e in failures if e.get("errno") and operation in (None, e.get("op"))]
    exact = [e for e in failures if e.get("lba") == offset // _LBA_BYTES]
    chosen = next(iter(exact + failures), None)
    if chosen is None:
        return _failure_without_log(what, status, opcode, offset, path)
    number = int(chosen["errno"])
    return StorageError(
        number,
        f"{what}: {chosen['op']} of {chosen['nbytes']} bytes at offset {chosen['offset']} "
        f"failed: {chosen.get('reason') or os.strerror(number)} (NVMe status {status:#05x})",
        str(chosen.get("path") or path or "") or None,
        offset=int(chosen["offset"]),
        status=status,
    )


def _failure_without_log(
    what: str, status: int, opcode: int, offset: int, path: str | None
) -> FlashwarpError:
    if status not in (_CAPACITY_EXCEEDED, _WRITE_FAULT, _UNRECOVERED_READ):
        return ControllerError(
            f"{what} failed at byte {offset} of the array with NVMe status {status:#05x}"
        )
    number = errno.ENOSPC if status == _CAPACITY_EXCEEDED else errno.EIO
    # A write of ours would be in the log: this one made room by a neighbour's line.
    why = ": another array's line could not be written back" if opcode == _WRITE else ""
    return StorageError(
        number,
        f"{what} failed at byte {offset} of the array{why} (NVMe status {status:#05x})",
        path,
        offset=offset,
        status=status,
    )
