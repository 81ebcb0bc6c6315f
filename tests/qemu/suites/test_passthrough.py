"""NVMe passthrough: namespaces that the kernel's driver keeps, by their character devices."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import ArgumentError, LockedError, PathError, StorageError
from flashwarp.storage import BlockDevice, Passthrough, Storage
from flashwarp.testing import ControllerContract, StorageContract
from qemu.guest import block_device, character_device, load
from qemu.suites.machines import BLANK, COARSE, DAMAGED, FAULTS, GOOD, UNREADABLE, UNWRITABLE
from qemu.suites.namespaces import contents, fill

MACHINE = FAULTS

UNRECOVERED_READ, WRITE_FAULT = 0x281, 0x280


class Backend:
    nsid = GOOD

    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        fill(block_device(nsid=self.nsid), content)
        device = character_device(nsid=self.nsid)
        # Any of the contract's contents may begin as a file system does.
        return Passthrough(device, nbytes=len(content), writable=writable, allow_raw_writes=True)


class TestPassthrough(Backend, StorageContract):
    def held(self, folder: Path) -> bytes:
        return contents(block_device(nsid=self.nsid), self.nbytes)

    def damage(self, folder: Path, storage: Storage) -> tuple[int, int]:
        return errno.EIO, 0

    def test_failure_names_its_place(self, tmp_path: Path) -> None:
        self.nsid = DAMAGED
        super().test_failure_names_its_place(tmp_path)


class TestPassthroughOf4KiBBlocks(TestPassthrough):
    nsid = COARSE


class TestControllerOfPassthrough(Backend, ControllerContract):
    pass


class TestControllerOfPassthroughOf4KiBBlocks(Backend, ControllerContract):
    nsid = COARSE


# The drive's failures.


def test_failed_command_has_the_status_of_the_drive() -> None:
    device = character_device(nsid=DAMAGED)
    # What it carries cannot be read.
    with pytest.raises(StorageError, match="look at what the namespace carries"):
        Passthrough(device, writable=True)
    with Passthrough(device, writable=True, allow_raw_writes=True) as storage:
        with pytest.raises(StorageError) as failed:
            storage.read(UNREADABLE[0] * 512, 512)
        assert failed.value.status == UNRECOVERED_READ
        with pytest.raises(StorageError, match="write fault") as failed:
            storage.write(UNWRITABLE * 512, bytes(512))
        assert failed.value.status == WRITE_FAULT


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_failure_reaches_the_array(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHWARP_IO_ENGINE", "" if engine == "io_uring" else engine)
    with (
        Passthrough(
            character_device(nsid=DAMAGED), writable=True, allow_raw_writes=True
        ) as storage,
        fw.open(storage, "r+", "u1", device="cpu", line=512, cache="64 KiB") as x,
    ):
        assert x.service.describe()["engine"].startswith(engine[:6])
        with pytest.raises(StorageError, match="unrecovered read error") as failed:
            x.gather([UNREADABLE[1] * 512])
        assert failed.value.status == UNRECOVERED_READ
        assert failed.value.errno == errno.EIO
        assert failed.value.offset == UNREADABLE[1] * 512
        x[UNWRITABLE * 512 : UNWRITABLE * 512 + 512] = 1
        x[0] = 2
        with pytest.raises(StorageError) as failed:
            x.flush()
        assert failed.value.status == WRITE_FAULT
        with pytest.raises(StorageError, match="write fault"):
            x.close()  # what could not be written is lost now
    assert contents(block_device(nsid=DAMAGED), 1) == b"\2"


def test_io_uring_sends_all_commands() -> None:
    with (
        Passthrough(character_device(nsid=BLANK), nbytes=1 << 20, writable=True) as storage,
        fw.open(storage, "r+", "i4", device="cpu", cache="128 KiB") as x,
    ):
        x[:] = np.arange(1 << 18, dtype=np.int32)
        x.flush()
        np.testing.assert_array_equal(x[:], np.arange(1 << 18, dtype=np.int32))
        stats: dict[str, Any] = x.service.natives[0].stats
        assert x.service.describe()["engine"] == "io_uring"
        assert stats["engine_operations"] > 256
        assert stats["engine_fallbacks"] == 0


# Who may write.


def mkfs(nsid: int) -> Path:
    load("ext4")
    device = block_device(nsid=nsid)
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", str(device)], check=True)
    return device


def test_file_system_is_not_written(tmp_path: Path) -> None:
    device = mkfs(BLANK)
    drive = character_device(nsid=BLANK)
    try:
        with pytest.raises(PathError, match=r"ext4.*allow_raw_writes=True") as refused:
            Passthrough(drive, writable=True)
        assert refused.value.errno == errno.EBUSY
        # Behind the file system's beginning, too.
        with pytest.raises(PathError, match="ext4"):
            Passthrough(drive, 1 << 20, 4096, writable=True)

        subprocess.run(["mount", str(device), str(tmp_path)], check=True)
        with pytest.raises(PathError, match=f"in use.*mounted on {tmp_path}"):
            Passthrough(drive, writable=True)
        with Passthrough(drive) as storage:
            assert storage.read(0x438, 2) == b"\x53\xef"
        with Passthrough(drive, 63 << 20, 4096, writable=True, allow_raw_writes=True) as storage:
            assert storage.describe()["claim"].startswith("none")
            storage.write(0, storage.read(0, 4096))
        subprocess.run(["umount", str(tmp_path)], check=True)

        with Passthrough(drive, writable=True, allow_raw_writes=True):
            mount = ["mount", str(device), str(tmp_path)]
            refused_by_kernel = subprocess.run(mount, capture_output=True, text=True)
            assert refused_by_kernel.returncode != 0
            assert "busy" in refused_by_kernel.stderr.lower()
    finally:
        subprocess.run(["umount", str(tmp_path)], capture_output=True)
        fill(device, bytes(1 << 20))


def test_users_of_one_namespace_exclude_each_other() -> None:
    drive, device = character_device(nsid=BLANK), block_device(nsid=BLANK)
    with Passthrough(drive, writable=True):
        with pytest.raises(LockedError):
            Passthrough(drive)
        with pytest.raises(LockedError):
            BlockDevice(device)
    with BlockDevice(device, writable=True), pytest.raises(LockedError):
        Passthrough(drive)


def test_kernel_and_passthrough_see_each_others_bytes() -> None:
    drive, device = character_device(nsid=BLANK), block_device(nsid=BLANK)
    with device.open("r+b") as file:
        file.write(b"from the page cache")  # and not synced
        file.flush()
        with Passthrough(drive, writable=True) as storage:
            assert storage.read(9, 10) == b"page cache"
            storage.write(0, b"past the page cache")
    with device.open("rb") as file:
        assert file.read(19) == b"past the page cache"


def test_wrong_paths_and_ranges_are_refused(tmp_path: Path) -> None:
    drive = character_device(nsid=COARSE)
    for path in (block_device(), Path("/dev/nvme0"), Path("/dev/null"), tmp_path / "x"):
        if path.name == "x":
            path.write_bytes(bytes(4096))
        with pytest.raises(PathError, match="ng0n1"):
            Passthrough(path)
    with pytest.raises(ArgumentError, match="4096"):
        Passthrough(drive, 512)
    with pytest.raises(ArgumentError, match="67108864"):
        Passthrough(drive, 0, (64 << 20) + 1)
    with pytest.raises(ArgumentError, match="67108864"):
        Passthrough(drive, 64 << 20)
