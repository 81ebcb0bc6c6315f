"""Arrays on a drive that this process drives: what they need of every controller."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashwarp as fw
from flashwarp.nvme import Controller
from flashwarp.nvme.drive_namespace import DriveNamespace
from flashwarp.testing import ServiceContract
from qemu.machine import Drive, Machine, Namespace
from qemu.suites.drives import drive

NBYTES = 1 << 18
# The second half of the third namespace cannot be read.
_UNREADABLE = tuple(range(NBYTES // 512 // 2, NBYTES // 512))
MACHINE = Machine(
    (
        Drive((Namespace(NBYTES), Namespace(NBYTES), Namespace(NBYTES, unreadable=_UNREADABLE))),
        Drive((Namespace(NBYTES, 4096), Namespace(NBYTES, 4096))),
    )
)


class TestDrive(ServiceContract):
    nbytes = NBYTES
    index = 0
    first_nsid = 1
    route = "direct"

    @pytest.fixture(autouse=True)
    def _drive(self) -> Iterator[None]:
        settings = {"route": self.route, "allow_raw_writes": True}
        with drive(self.index, queue_pairs=2, depth=16, **settings) as self.opened:
            self.next_nsid = self.first_nsid
            yield

    def make(self, folder: Path, content: bytes, writable: bool = True) -> DriveNamespace:
        with self.opened.namespace(self.next_nsid) as whole:
            whole.write(0, content)
            assert whole.nbytes == len(content)
        self.next_nsid += 1
        return self.opened.namespace(self.next_nsid - 1, writable=writable)

    def controller(self) -> Controller:
        return self.opened

    def fail(self, namespace: object) -> int | None:
        # Reads have failed all the time, of the half that the test reads last.
        return errno.EIO if self.first_nsid == 3 else None

    def test_failure_reaches_the_call(self, tmp_path: Path) -> None:
        self.next_nsid = self.first_nsid = 3
        super().test_failure_reaches_the_call(tmp_path)


class TestDriveThroughBuffers(TestDrive):
    """As a GPU takes it whose memory the drive does not reach."""

    route = "bounce"


class TestDriveOf4KiBBlocks(TestDrive):
    index = 1

    def test_failure_reaches_the_call(self, tmp_path: Path) -> None:
        """The same, where the drive's blocks are those of arrays."""

    def test_line_shorter_than_a_block_is_refused(self) -> None:
        with (
            self.opened.namespace(1) as namespace,
            pytest.raises(fw.errors.ArgumentError, match="line=512, but the blocks"),
        ):
            fw.open(namespace, "r", "u1", device="cpu", line=512, controller=self.opened)
