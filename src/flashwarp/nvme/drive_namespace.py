"""A namespace of a real drive as a storage: format, what it carries, whether it takes writes."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

from flashwarp import _native
from flashwarp.errors import (
    ArgumentError,
    ControllerError,
    ControllerLost,
    ControllerTimeout,
    LockedError,
    PathError,
)
from flashwarp.storage import Storage, signatures

# Blocks of 512 and 4096 bytes.
_LBA_SHIFTS = (9, 12)


class DriveNamespace(Storage):
    """A namespace of a drive, which `VfioController.namespace` returns.

    Notes
    -----
    An array on it moves its data through queue pairs of its own. Its methods `read`, `write`,
    `flush`, `discard` and `write_zeroes` send commands of the host's own, one at a time.

    Attributes
    ----------
    drive : native drive
        Whose namespace it is.
    nsid : int
    asked_writable : bool
        Whether it was to take writes; `refusal` says why it does not.
    block_bytes : int
        Size of the drive's logical block, 512 or 4096.
    carries : list of str
        Formats that were found at its begin and end when it was opened, for people.
    """

    def __init__(
        self,
        drive: _native.Drive,
        bdf: str,
        nsid: int,
        writable: bool,
        allow_raw_writes: bool,
    ) -> None:
        self.asked_writable = writable
        self.drive = drive
        self.bdf = bdf
        self.nsid = nsid
        with drive_errors(bdf):
            facts = _check_format(drive, bdf, nsid)
            native = _native.NamespaceStorage(drive, nsid, False)
            self.block_bytes = 1 << int(facts["lba_shift"])
            self.carries = _look_at(native)
            if facts["write_protected"]:
                self.refusal = "it is write protected (NSATTR)"
            elif self.carries and not allow_raw_writes:
                self.refusal = (
                    f"it carries {', '.join(self.carries)}, which writes would destroy: "
                    f"VfioController({bdf!r}, allow_raw_writes=True) permits them"
                )
            if writable and not self.refusal:
                native = _native.NamespaceStorage(drive, nsid, True)
        super().__init__(native)

    @property
    def path(self) -> str:
        """What errors call it: PCI address and number."""
        return f"{self.bdf}/n{self.nsid}"

    def describe(self) -> dict[str, Any]:
        """Return facts for people: model, serial, block size, what it carries."""
        facts = super().describe()
        if self.carries:
            facts["carries"] = ", ".join(self.carries)
        return facts

    def __repr__(self) -> str:
        return f"<namespace {self.nsid} of {self.bdf}, {self._nbytes} bytes>"


def _check_format(drive: _native.Drive, bdf: str, nsid: int) -> dict[str, Any]:
    active = drive.namespaces()
    if nsid not in active:
        raise ArgumentError(
            f"{bdf} has no namespace {nsid}; it has "
            f"{', '.join(map(str, active)) or 'none: see nvme create-ns and attach-ns'}"
        )
    facts: dict[str, Any] = drive.identify_namespace(nsid)
    shift, metadata = int(facts["lba_shift"]), int(facts["metadata_bytes"])
    if shift not in _LBA_SHIFTS or metadata or facts["protection"]:
        raise ArgumentError(
            f"namespace {nsid} of {bdf} has blocks of {1 << shift} bytes with {metadata} bytes of "
            "metadata, and only 512 or 4096 bytes without metadata are supported: while the "
            f"kernel's driver has it, nvme format /dev/nvmeXn{nsid} --lbaf=0 changes that, and "
            "erases it"
        )
    return facts


def _look_at(native: _native.NamespaceStorage) -> list[str]:
    try:
        return signatures.carried_by(native.read, native.nbytes)
    except OSError as error:
        return [f"unknown: its begin or end cannot be read ({error.strerror})"]


@contextlib.contextmanager
def drive_errors(name: str) -> Iterator[None]:
    """Turn failures of a native drive into errors of flashwarp; `name` is the file or device."""
    try:
        yield
    except _native.DriveFailure as failure:
        kind, text, number_, status = failure.args
        raise _typed(str(kind), str(text), int(number_), int(status), name) from failure


def _typed(kind: str, text: str, number_: int, status: int, name: str) -> Exception:
    if kind == "system":
        return (LockedError if number_ == errno.EBUSY else PathError)(number_, text, name)
    if kind == "timeout":
        return ControllerTimeout(text)
    if kind == "lost":
        return ControllerLost(text)
    if kind == "unfit":
        return ArgumentError(text)
    return ControllerError(f"{text} (NVMe status {status:#05x})")
