"""Storages on block devices of a drive that the kernel's driver has."""

from __future__ import annotations

import errno
from pathlib import Path

from flashwarp.storage import BlockDevice, Storage
from flashwarp.testing import StorageContract
from qemu.guest import block_device
from qemu.suites.machines import COARSE, DAMAGED, FAULTS, GOOD
from qemu.suites.namespaces import contents, fill

MACHINE = FAULTS


class TestBlockDevice(StorageContract):
    nsid = GOOD

    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        self.device = block_device(nsid=self.nsid)
        fill(self.device, content)
        return BlockDevice(self.device, nbytes=len(content), writable=writable)

    def held(self, folder: Path) -> bytes:
        return contents(self.device, self.nbytes)

    def damage(self, folder: Path, storage: Storage) -> tuple[int, int]:
        return errno.EIO, 0

    def test_failure_names_its_place(self, tmp_path: Path) -> None:
        self.nsid = DAMAGED
        super().test_failure_names_its_place(tmp_path)


class TestBlockDeviceOf4KiBBlocks(TestBlockDevice):
    nsid = COARSE
