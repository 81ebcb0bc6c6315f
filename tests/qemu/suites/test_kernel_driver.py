"""Storages on a drive that the kernel's driver has."""

from __future__ import annotations

import errno
from pathlib import Path

from flashwarp.storage import BlockDevice, Storage
from flashwarp.testing import StorageContract
from qemu.guest import block_device
from qemu.machine import Drive, Machine, Namespace
from qemu.suites.namespaces import contents, fill

# The second namespace fails where the contract wants damage: beyond byte 24,576.
MACHINE = Machine(
    (Drive((Namespace(), Namespace(unreadable=(48, 93)), Namespace(lba_bytes=4096))),)
)
GOOD, DAMAGED, COARSE = 1, 2, 3


class TestBlockDevice(StorageContract):
    nsid = GOOD

    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        self.device = block_device(nsid=self.nsid)
        fill(self.device, content)
        return BlockDevice(self.device, nbytes=len(content), writable=writable)

    def held(self, folder: Path) -> bytes:
        return contents(self.device, self.nbytes)

    def damage(self, folder: Path, storage: Storage) -> tuple[int, int]:
        return errno.ENODATA, 0  # the kernel's errno of medium errors

    def test_failure_names_its_place(self, tmp_path: Path) -> None:
        self.nsid = DAMAGED
        super().test_failure_names_its_place(tmp_path)


class TestBlockDeviceOf4KiBBlocks(TestBlockDevice):
    nsid = COARSE
