"""A namespace with two controllers: Linux mounts it by one, we use its files by the other.

Both sides read what the other has written, and no side ever reads a block that is not the file's.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import ArgumentError, PathError, ReadOnlyError, StorageError
from flashwarp.file.gvdk import Gvdk
from flashwarp.nvme.drive_namespace import DriveNamespace
from flashwarp.storage import Passthrough, Storage
from flashwarp.testing import StorageContract
from qemu import guest
from qemu.machine import Drive, Machine, Namespace
from qemu.suites.drives import bound, drive

MIB = 1 << 20
# The first drive has two controllers, and namespaces beside the one with ext4: a small one, and one
# that is large enough for xfs.
MACHINE = Machine(
    (
        Drive((Namespace(96 * MIB), Namespace(4 * MIB), Namespace(320 * MIB)), controllers=2),
        Drive((Namespace(96 * MIB),)),
    )
)
LINUX, OURS, OTHER = range(3)  # controllers of the machine


def call(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def device() -> Path:
    """With ext4, as Linux has it; the other controller is taken from Linux first."""
    bound(OURS)
    guest.load("ext4")
    device = guest.block_device(0)
    call("mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", device)
    return device


@pytest.fixture(scope="module")
def folder(device: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("mounted")
    call("mount", device, folder)
    yield folder
    call("umount", folder)
    # What we have written has harmed nothing of the file system's own.
    call("e2fsck", "-f", "-n", device)


@pytest.fixture
def path(folder: Path) -> Iterator[Path]:
    path = folder / "file"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def controller(device: Path) -> Iterator[fw.nvme.VfioController]:
    with drive(OURS, queue_pairs=2, depth=16, allow_raw_writes=True) as controller:
        yield controller


@pytest.fixture
def namespace(controller: fw.nvme.VfioController) -> DriveNamespace:
    return controller.namespace(1)


def random_content(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


def fragmented(path: Path, nbytes: int, seed: int = 0) -> bytes:
    """Write a file, and take parts out of it, so that gaps are left on the drive."""
    content = random_content(nbytes, seed)
    part = nbytes // 4
    parts = [content[at : at + part] for at in range(0, nbytes, part)]
    with path.open("wb") as file:
        file.write(bytes(65536).join(parts))
        os.fsync(file.fileno())
    for number in range(1, len(parts)):
        call("fallocate", "--collapse-range", f"--offset={number * part}", "--length=65536", path)
    assert len(fw.file.BlockMap.of(path).extents) >= len(parts)
    return content


def by_blocks(
    path: Path | fw.file.BlockMap, namespace: DriveNamespace | Passthrough, **options: Any
) -> fw.file.MappedFile:
    return fw.file.MappedFile(path, namespace, writable=True, allow_raw_writes=True, **options)


def dump(path: Path) -> bytes:
    """The file as another process reads it, through Linux."""
    return subprocess.run(["cat", path], check=True, capture_output=True, timeout=60).stdout


class TestFileOnTheOtherController(StorageContract):
    @pytest.fixture(autouse=True)
    def _drive(self, path: Path, namespace: DriveNamespace) -> None:
        self.path, self.namespace = path, namespace

    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        self.path.write_bytes(content)
        if writable:
            return by_blocks(self.path, self.namespace)
        return fw.file.MappedFile(self.path, self.namespace)

    def held(self, folder: Path) -> bytes:
        return dump(self.path)


def test_linux_writes_and_we_read(path: Path, namespace: DriveNamespace) -> None:
    content = fragmented(path, 2 * MIB)
    with path.open("r+b", buffering=0) as file:
        file.seek(MIB)
        file.write(b"new")  # and not synced
    content = content[:MIB] + b"new" + content[MIB + 3 :]

    with fw.file.MappedFile(path, namespace) as storage:
        assert storage.read(0, len(content)) == content
        with fw.open(storage, dtype="u1", device="cpu", cache="128 KiB") as x:
            assert bytes(x[:]) == content
        assert not storage.stale


def test_we_write_and_linux_reads(path: Path, namespace: DriveNamespace, device: Path) -> None:
    content = bytearray(fragmented(path, 2 * MIB))
    assert dump(path) == content  # so that all of it is in the page cache

    with by_blocks(path, namespace) as storage:
        with fw.open(storage, "r+", "u1", device="cpu", cache="128 KiB") as x:
            x[MIB : MIB + 500_000] = 7
            x.flush()
        storage.write(1, b"odd")
    content[MIB : MIB + 500_000] = b"\7" * 500_000
    content[1:4] = b"odd"

    assert dump(path) == content
    folder = path.parent
    call("umount", folder)
    call("mount", device, folder)
    assert dump(path) == content


def test_both_sides_write_in_turns(path: Path, namespace: DriveNamespace) -> None:
    content = bytearray(fragmented(path, MIB))
    chooser = np.random.default_rng(5)
    for turn in range(12):
        begin, end = sorted(int(n) for n in chooser.integers(0, MIB, 2))
        part = random_content(end - begin, turn)
        content[begin:end] = part
        if turn % 2:
            with path.open("r+b") as file:
                file.seek(begin)
                file.write(part)
            with fw.file.MappedFile(path, namespace) as storage:
                assert storage.read(0, MIB) == content, turn
        else:
            with by_blocks(path, namespace) as storage:
                storage.write(begin, part)
            assert dump(path) == content, turn


def test_image_is_written_by_both_sides(path: Path, namespace: DriveNamespace) -> None:
    content = bytearray(random_content(MIB))
    with Gvdk.create(path, MIB, preallocate="zeros") as image:
        image.write(0, bytes(content))
        offset = image.data_offset
    assert offset is not None
    with by_blocks(path, namespace, offset=offset) as storage:
        assert storage.read(0, MIB) == content
        with fw.open(storage, "r+", "u1", device="cpu", cache="128 KiB") as x:
            x[5000:300_000] = 9
    content[5000:300_000] = b"\t" * 295_000
    with Gvdk(path, writable=True) as image:
        assert image.read(0, MIB) == content
        assert image.verify().clean
        image.write(MIB - 3, b"end")
    with fw.file.MappedFile(path, namespace, offset=offset) as storage:
        assert storage.read(MIB - 5, 5) == content[-5:-3] + b"end"


@pytest.mark.skipif(
    shutil.which("mkfs.xfs") is None,
    reason="mkfs.xfs is missing; on Debian: sudo apt-get install xfsprogs",
)
def test_file_of_xfs_is_written_by_both_sides(
    controller: fw.nvme.VfioController, tmp_path: Path
) -> None:
    guest.load("xfs")
    device = guest.block_device(0, 3)
    call("mkfs.xfs", "-q", "-f", device)
    call("mount", device, tmp_path)
    try:
        path = tmp_path / "file"
        content = bytearray(fragmented(path, MIB))
        with by_blocks(path, controller.namespace(3)) as storage:
            assert storage.read(0, MIB) == content
            storage.write(1000, b"by its blocks")
        content[1000:1013] = b"by its blocks"
        assert dump(path) == content
        with path.open("r+b") as file:
            file.write(b"by Linux")
        content[:8] = b"by Linux"
        with fw.file.MappedFile(path, controller.namespace(3)) as storage:
            assert storage.read(0, MIB) == content
    finally:
        call("umount", tmp_path)
    call("xfs_repair", "-n", device)


# The lease.


def test_freed_blocks_are_not_written(path: Path, namespace: DriveNamespace) -> None:
    """The blocks of a file that is cut belong to the next one, which must not change."""
    path.write_bytes(bytes(MIB))
    old = fw.file.BlockMap.of(path)
    with by_blocks(path, namespace) as storage:
        os.truncate(path, 0)
        other = path.with_name("next")
        content = random_content(MIB)
        other.write_bytes(content)
        os.sync()

        with pytest.raises(StorageError, match="stale block map"):
            storage.write(0, b"\xff" * MIB)
    with pytest.raises(StorageError, match="stale block map"):
        by_blocks(old, namespace)

    assert dump(other) == content
    with fw.file.MappedFile(other, namespace) as storage:
        assert storage.read(0, MIB) == content
    other.unlink()


def test_killed_driver_leaves_the_file_whole_and_free(path: Path, device: Path) -> None:
    path.write_bytes(bytes(MIB))
    assert dump(path) == bytes(MIB)
    script = (
        "import sys, time, flashwarp as fw; "
        "drive = fw.nvme.VfioController(sys.argv[2], 2, 16, allow_raw_writes=True); "
        "at = drive.namespace(1); "
        "m = fw.file.MappedFile(sys.argv[1], at, writable=True, allow_raw_writes=True); "
        "m.write(0, b'\\5' * m.nbytes); m.flush(); print('written', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(path), guest.address_of(OURS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
        process.wait(30)

    assert dump(path) == b"\5" * MIB
    with (
        drive(OURS, allow_raw_writes=True) as again,
        fw.file.MappedFile(path, again.namespace(1)) as storage,
    ):
        assert storage.read(0, MIB) == b"\5" * MIB


# Kernels that drive the second controller: they look the extents up themselves.


LINES = ("512", "4 KiB", "16 KiB")


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("route", ["direct", "bounce"])
def test_kernels_read_and_write_by_the_extents(
    path: Path, device: Path, line: str, route: Any
) -> None:
    content = bytearray(fragmented(path, 2 * MIB))
    chooser = np.random.default_rng(11)
    settings = {"route": route, "allow_raw_writes": True}
    with (
        drive(OURS, queue_pairs=2, depth=16, **settings) as controller,
        by_blocks(path, controller.namespace(1)) as storage,
        fw.open(
            storage, "r+", "u1", device="cpu", cache="128 KiB", line=line, controller=controller
        ) as x,
    ):
        assert x.explain().route == route
        assert bytes(x[:]) == content
        for turn in range(8):
            begin, end = sorted(int(n) for n in chooser.integers(0, 2 * MIB, 2))
            part = random_content(end - begin, turn)
            content[begin:end] = part
            x[begin:end] = np.frombuffer(part, "u1")
        x.flush()
        assert x.service.queues.counters().commands > 2 * MIB // (1 << 14)
        # By the host's own commands, through the same extents.
        assert storage.read(0, len(content)) == content

    assert dump(path) == content


def test_kernels_of_an_array_with_a_header_read_by_the_extents(
    path: Path, controller: fw.nvme.VfioController
) -> None:
    values = np.random.default_rng(3).integers(0, 1 << 30, (999, 77), np.int32)
    numbers = path.with_suffix(".npy")
    np.save(numbers, values)
    with numbers.open("rb") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        header = file.tell()
    try:
        with (
            fw.file.MappedFile(numbers, controller.namespace(1)) as storage,
            fw.open(storage, dtype="u1", device="cpu", controller=controller) as x,
        ):
            assert x[header:].tobytes() == values.tobytes()
    finally:
        numbers.unlink()


def test_lines_longer_than_extents_are_refused_and_the_longest_is_named(
    path: Path, controller: fw.nvme.VfioController
) -> None:
    content = random_content(2 * MIB)
    with path.open("wb") as file:
        file.write(content[:MIB] + bytes(4096) + content[MIB:])
        os.fsync(file.fileno())
    call("fallocate", "--collapse-range", f"--offset={MIB}", "--length=4096", path)
    call("fallocate", "--collapse-range", "--offset=8192", "--length=4096", path)
    assert len(fw.file.BlockMap.of(path).extents) >= 3
    settings: dict[str, Any] = {"device": "cpu", "controller": controller}
    with fw.file.MappedFile(path, controller.namespace(1)) as storage:
        with pytest.raises(ArgumentError, match="take line=4096 or less"):
            fw.open(storage, dtype="u1", line="8 KiB", **settings)
        with fw.open(storage, dtype="u1", line="4 KiB", **settings) as x:
            assert bytes(x[:]) == content[:8192] + content[12288:]


def test_last_block_in_part_is_read_and_not_written(
    path: Path, controller: fw.nvme.VfioController
) -> None:
    content = random_content(MIB - 100)
    path.write_bytes(content)
    settings: dict[str, Any] = {"device": "cpu", "controller": controller}
    with (
        fw.file.MappedFile(path, controller.namespace(1)) as storage,
        fw.open(storage, dtype="u1", **settings) as x,
    ):
        assert bytes(x[:]) == content
    with (
        by_blocks(path, controller.namespace(1)) as storage,
        pytest.raises(ArgumentError, match="no multiple of the drive's blocks of 512"),
    ):
        fw.open(storage, "r+", "u1", **settings)
    with (
        by_blocks(path, controller.namespace(1), nbytes=MIB - 512) as storage,
        fw.open(storage, "r+", "u1", **settings) as x,
    ):
        x[-3:] = 0

    assert dump(path) == content[: MIB - 515] + bytes(3) + content[MIB - 512 :]


@pytest.mark.parametrize("route", ["direct", "bounce"])
def test_kernels_that_write_are_stopped_before_the_blocks_are_freed(
    path: Path, device: Path, route: Any
) -> None:
    """A file that is cut, under kernels that write it as fast as they can, frees its blocks."""
    path.write_bytes(bytes(MIB))
    ones = np.ones(MIB // 2, "u1")
    failures: list[BaseException] = []

    def write_until_it_fails(x: fw.Array) -> None:
        try:
            for turn in range(100_000):
                begin = turn % 2 * (MIB // 2)
                x[begin : begin + MIB // 2] = ones
        except BaseException as error:
            failures.append(error)

    settings = {"route": route, "allow_raw_writes": True}
    with (
        drive(OURS, queue_pairs=2, depth=16, **settings) as controller,
        by_blocks(path, controller.namespace(1)) as storage,
    ):
        x = fw.open(storage, "r+", "u1", device="cpu", cache="64 KiB", controller=controller)
        other = fw.open(controller.namespace(2), dtype="u1", device="cpu", controller=controller)
        writer = threading.Thread(target=write_until_it_fails, args=(x,))
        writer.start()
        while x.service.queues.counters().commands < 200:
            time.sleep(0.01)

        script = (
            "import os, sys, time; t = time.monotonic(); os.truncate(sys.argv[1], 0); "
            "print(time.monotonic() - t)"
        )
        waited_s = float(call(sys.executable, "-c", script, path))
        late = x.service.queues.counters().commands
        content = random_content(MIB)
        heir = path.with_name("heir")
        heir.write_bytes(content)
        os.sync()
        writer.join(60)

        assert not writer.is_alive()
        assert waited_s < 20
        assert late > 0
        assert [type(error) for error in failures] == [StorageError], failures
        assert "stale block map" in str(failures[0])
        with pytest.raises(StorageError, match="stale block map"):
            x.gather([0])
        with pytest.raises(StorageError, match="stale block map"):
            x.close()
        with pytest.raises(StorageError, match="stale block map"):
            fw.open(storage, dtype="u1", device="cpu", controller=controller)
        # Other arrays of the controller go on.
        assert len(bytes(other[:8192])) == 8192
        other.close()
    assert dump(heir) == content
    with (
        drive(OURS, allow_raw_writes=True) as again,
        fw.file.MappedFile(heir, again.namespace(1)) as storage,
    ):
        assert storage.read(0, MIB) == content
    heir.unlink()


# By Linux's own controller, and what is refused.


def test_passthrough_serves_the_file_as_well(path: Path, device: Path) -> None:
    content = bytearray(fragmented(path, MIB))
    raw = Passthrough(guest.character_device(0), writable=True, allow_raw_writes=True)
    with raw, by_blocks(path, raw) as storage:
        assert storage.read(0, MIB) == content
        storage.write(4000, b"x" * 5000)
    content[4000:9000] = b"x" * 5000

    assert dump(path) == content


def test_namespaces_of_others_are_refused(
    path: Path, controller: fw.nvme.VfioController, device: Path
) -> None:
    path.write_bytes(bytes(8192))
    with pytest.raises(ArgumentError, match="namespace 2 and 1"):
        fw.file.MappedFile(path, controller.namespace(2))
    with drive(OTHER) as other, pytest.raises(ArgumentError, match="serial number drive1 and dri"):
        fw.file.MappedFile(path, other.namespace(1))
    # Linux counts its controllers in the order in which it has found them.
    with pytest.raises(ArgumentError, match=guest.block_device(0, 2).name):
        fw.file.MappedFile(path, Passthrough(guest.character_device(0, 2)))


def test_drive_with_a_file_system_is_not_written_without_permission(
    path: Path, controller: fw.nvme.VfioController
) -> None:
    path.write_bytes(bytes(8192))
    with pytest.raises(ArgumentError, match="allow_raw_writes=True"):
        fw.file.MappedFile(path, controller.namespace(1), writable=True)
    controller.namespace(1).close()
    controller.allow_raw_writes = False
    try:
        with pytest.raises(ReadOnlyError, match="carries ext2, ext3 or ext4"):
            by_blocks(path, controller.namespace(1))
    finally:
        controller.namespace(1).close()
        controller.allow_raw_writes = True


def test_file_on_the_device_mapper_has_no_places_on_the_drive(tmp_path: Path) -> None:
    """It is used by the volume's own device."""
    guest.bind(guest.address_of(OTHER), "nvme")
    guest.load("dm-mod", "ext4")
    begin = 2048
    sectors = 96 * MIB // 512 - begin
    table = f"0 {sectors} linear {guest.block_device(1)} {begin}"
    call("dmsetup", "create", "volume", "--noudevsync", "--table", table)
    try:
        volume = Path("/dev", next(Path("/sys/block").glob("dm-*")).name)
        guest.wait_until(volume.exists, f"the kernel makes {volume}")
        call("mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", volume)
        call("mount", volume, tmp_path)
        path = tmp_path / "file"
        content = fragmented(path, MIB)

        with fw.file.MappedFile(path) as storage:
            assert storage.read(0, MIB) == content
            assert storage.block_map.volume.path == str(volume)
        with (
            Passthrough(guest.character_device(1)) as raw,
            pytest.raises(PathError, match=r"\(volume\), which is made of nvme"),
        ):
            fw.file.MappedFile(path, raw)
    finally:
        subprocess.run(["umount", tmp_path], capture_output=True)
        call("dmsetup", "remove", "--noudevsync", "volume")
