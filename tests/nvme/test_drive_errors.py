"""Failures of a real drive are errors of their own types, whoever found them."""

from __future__ import annotations

import errno

import pytest

from flashwarp import _native
from flashwarp.errors import (
    ArgumentError,
    ControllerError,
    ControllerLost,
    ControllerTimeout,
    LockedError,
    PathError,
)
from flashwarp.nvme.drive_namespace import drive_errors


@pytest.mark.parametrize(
    ("kind", "number", "status", "error", "message"),
    [
        ("system", errno.EBUSY, 0, LockedError, "what happened"),
        ("system", errno.EACCES, 0, PathError, "what happened"),
        ("timeout", 0, 0, ControllerTimeout, "what happened"),
        ("lost", 0, 0, ControllerLost, "what happened"),
        ("unfit", 0, 0, ArgumentError, "what happened"),
        ("status", 0, 0x281, ControllerError, r"what happened \(NVMe status 0x281\)"),
    ],
)
def test_failure_has_its_type(
    kind: str, number: int, status: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised, drive_errors("/dev/vfio/7"):
        raise _native.DriveFailure(kind, "what happened", number, status)

    assert type(raised.value) is error
    if kind == "system":
        assert (raised.value.errno, raised.value.filename) == (
            number,
            "/dev/vfio/7",
        )
