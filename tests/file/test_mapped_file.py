"""Files by their blocks on real file systems: ext4 and xfs on loop devices."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.cli.main import run
from flashwarp.errors import ArgumentError, LockedError, PathError, StorageError
from flashwarp.file.block_map import STALE
from flashwarp.file.gvdk import Gvdk
from flashwarp.storage import Memory, Storage
from flashwarp.testing import ControllerContract, StorageContract
from flashwarp.testing.storage_contract import random_content
from support.file_writer import wait_until
from support.loop_devices import Mounted, call, mounted

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
KINDS = ["ext4", "xfs"]


@pytest.fixture(scope="module", params=KINDS)
def volume(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mounted]:
    with mounted(request.param, tmp_path_factory.mktemp("loop")) as found:
        yield found


@pytest.fixture
def path(volume: Mounted) -> Iterator[Path]:
    path = volume.folder / "file"
    yield path
    path.unlink(missing_ok=True)


def store(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)


def fragmented(path: Path, nbytes: int) -> bytes:
    """Write a file, and take parts out of it, so that gaps are left on the device."""
    content = random_content(nbytes)
    part = nbytes // 8
    parts = [content[at : at + part] for at in range(0, nbytes, part)]
    with path.open("wb") as file:
        file.write(bytes(65536).join(parts))
        os.fsync(file.fileno())
    for number in range(1, len(parts)):
        call("fallocate", "--collapse-range", f"--offset={number * part}", "--length=65536", path)
    assert len(fw.file.BlockMap.of(path).extents) >= len(parts)
    return content


def by_blocks(path: Path | fw.file.BlockMap, **options: Any) -> fw.file.MappedFile:
    return fw.file.MappedFile(path, writable=True, allow_raw_writes=True, **options)


def in_process(script: str, *arguments: object) -> str:
    """What another process prints, which opens files as any program does."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout


def dump(path: Path) -> bytes:
    """The file as another process reads it."""
    script = "import sys; print(open(sys.argv[1], 'rb').read().hex())"
    return bytes.fromhex(in_process(script, path))


def is_usable(path: Path) -> bool:
    try:
        fw.file.BlockMap.of(path)
    except PathError:
        return False
    return True


# Contracts.


class Backend:
    @pytest.fixture(autouse=True)
    def _volume(self, path: Path) -> None:
        self.path = path

    def make(self, folder: Path, content: bytes, writable: bool = True) -> Storage:
        store(self.path, content)
        return by_blocks(self.path) if writable else fw.file.MappedFile(self.path)


class TestMappedFile(Backend, StorageContract):
    def held(self, folder: Path) -> bytes:
        return dump(self.path)


class TestControllerOfMappedFile(Backend, ControllerContract):
    pass


# The map.


def test_map_is_what_filefrag_says(volume: Mounted, path: Path) -> None:
    content = fragmented(path, 8 * MIB)
    told = call("filefrag", "-v", "-b4096", path)
    rows = re.findall(r"^ *\d+: +(\d+)\.\. *\d+: +(\d+)\.\. *\d+: +(\d+):", told, re.MULTILINE)
    expected = [tuple(4096 * int(number) for number in row) for row in rows]

    found = fw.file.BlockMap.of(path)

    assert [tuple(extent) for extent in found.extents] == expected
    assert found.volume.path == str(volume.device)
    assert found.file_system == volume.kind
    with volume.device.open("rb") as device:
        os.posix_fadvise(device.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for logical, physical, nbytes in found.extents:
            device.seek(physical)
            assert device.read(nbytes) == content[logical : logical + nbytes]


def test_partition_is_added_for_the_whole_disk(tmp_path: Path) -> None:
    with mounted("ext4", tmp_path, partition=True) as volume:
        path = volume.folder / "file"
        content = random_content(MIB)
        store(path, content)

        found = fw.file.BlockMap.of(path)
        on_disk = found.on_disk()

        assert found.volume.name.endswith("p1")
        assert on_disk.volume.path == f"/dev/{volume.device.name.removesuffix('p1')}"
        with volume.image.open("rb") as disk:
            for logical, physical, nbytes in on_disk.extents:
                disk.seek(physical)
                assert disk.read(nbytes) == content[logical : logical + nbytes]
        with fw.file.MappedFile(path) as storage:
            assert storage.read(0, MIB) == content


def test_command_prints_the_map(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fragmented(path, MIB)
    found = fw.file.BlockMap.of(path)

    run(["file", "map", str(path), "--json"])
    facts = json.loads(capsys.readouterr().out)
    run(["file", "map", str(path)])
    table = capsys.readouterr().out

    assert [tuple(each.values()) for each in facts["extents"]] == list(found.extents)
    assert facts["device"] == found.volume.path
    assert all(f"{extent.physical:>20}" in table for extent in found.extents)


# Both ways.


def test_what_linux_writes_is_read_by_blocks(path: Path) -> None:
    content = fragmented(path, 4 * MIB)
    with path.open("r+b", buffering=0) as file:
        file.seek(MIB)
        file.write(b"new")  # and not synced
    content = content[:MIB] + b"new" + content[MIB + 3 :]

    with fw.file.MappedFile(path) as storage, fw.open(storage, dtype="u1", device="cpu") as x:
        assert storage.read(0, len(content)) == content
        assert bytes(x[:]) == content
        assert dump(path) == content, "a reader may have the file beside a map that is only read"
        assert not storage.stale


def test_what_is_written_by_blocks_is_read_by_linux(path: Path) -> None:
    """Although Linux had every page of the file in its cache."""
    content = bytearray(fragmented(path, 4 * MIB))
    assert dump(path) == content
    with by_blocks(path) as storage:
        with fw.open(storage, "r+", "u1", device="cpu", cache="64 KiB") as x:
            x[MIB : 3 * MIB] = 7
            x.flush()
        storage.write(3 * MIB + 1, b"odd")
    content[MIB : 3 * MIB] = b"\7" * (2 * MIB)
    content[3 * MIB + 1 : 3 * MIB + 4] = b"odd"

    assert dump(path) == content
    call("sync")
    assert path.read_bytes() == content


def test_end_of_the_file_stays_zero_behind_it(volume: Mounted, path: Path) -> None:
    """A file that grows later must not show what a last block held."""
    store(path, b"a" * 5000)
    with by_blocks(path) as storage:
        storage.write(0, b"b" * 5000)
    os.truncate(path, 8192)

    assert dump(path) == b"b" * 5000 + bytes(3192)


# The lease.


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("how", ["append", "truncate", "read"])
def test_who_wants_the_file_gets_it_and_the_map_ends(path: Path, how: str, writable: bool) -> None:
    content = random_content(MIB)
    store(path, content)
    act = {
        "append": "open(sys.argv[1], 'ab').write(b'x')",
        "truncate": "os.truncate(sys.argv[1], 0)",
        "read": "open(sys.argv[1], 'rb').read()",
    }[how]
    script = f"import os, sys, time; t = time.monotonic(); {act}; print(time.monotonic() - t)"
    with by_blocks(path) if writable else fw.file.MappedFile(path) as storage:
        waited_s = float(in_process(script, path))

        assert waited_s < 5
        if how == "read" and not writable:
            assert storage.read(0, MIB) == content
            return
        assert storage.stale
        with pytest.raises(StorageError, match="stale block map") as failed:
            storage.read(0, 1)
        assert failed.value.errno == STALE
        with pytest.raises(StorageError, match="stale block map"):
            storage.check_unchanged()


def test_array_on_a_map_that_has_ended_raises(path: Path) -> None:
    store(path, random_content(MIB))
    with by_blocks(path) as storage:
        x = fw.open(storage, "r+", "u1", device="cpu", cache="64 KiB", line=4096)
        x[0] = 1
        dump(path)
        assert storage.stale

        with pytest.raises(StorageError, match="stale block map") as failed:
            x.flush()
        assert failed.value.errno == STALE
        with pytest.raises(StorageError, match="stale block map"):
            x.gather(np.arange(0, MIB, 4096))
        with pytest.raises(StorageError):
            x.close()  # the store is lost, as it says
    assert len(dump(path)) == MIB


def test_reader_sees_writes_that_were_in_flight(path: Path) -> None:
    """The lease is given up behind them, so a reader finds all that was complete."""
    store(path, bytes(4 * MIB))
    done = 0

    with by_blocks(path) as storage:

        def write() -> None:
            nonlocal done
            with contextlib.suppress(StorageError):
                while done < 4 * MIB:
                    storage.write(done, b"\1" * 4096)
                    done += 4096

        writer = threading.Thread(target=write)
        writer.start()
        wait_until(lambda: done > 0, "the writer has begun")
        found = dump(path)
        writer.join()

    assert done > 0
    assert found[:done] == b"\1" * done
    assert found[done:] == bytes(4 * MIB - done)


def test_open_file_is_refused(path: Path) -> None:
    store(path, bytes(8192))
    with path.open("rb"):
        fw.file.MappedFile(path).close()
        with pytest.raises(LockedError, match="somebody has it open"):
            by_blocks(path)
    with path.open("r+b"), pytest.raises(LockedError, match="open for writing"):
        fw.file.MappedFile(path)


def test_killed_process_leaves_the_file_free_and_nothing_old_in_memory(path: Path) -> None:
    store(path, bytes(MIB))
    assert dump(path) == bytes(MIB)
    script = (
        "import sys, time, flashwarp as fw; "
        "m = fw.file.MappedFile(sys.argv[1], writable=True, allow_raw_writes=True); "
        "m.write(0, b'\\5' * m.nbytes); print('written', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
        process.wait(30)

    begin = time.monotonic()
    assert dump(path) == b"\5" * MIB
    assert time.monotonic() - begin < 10


# Stale maps.


def rewritten(path: Path) -> None:
    content = path.read_bytes()
    other = path.with_name("copy")
    other.write_bytes(content)
    other.rename(path)


def defragmented(path: Path) -> None:
    kind = fw.file.BlockMap.of(path).file_system
    call(*(["e4defrag", path] if kind == "ext4" else ["xfs_fsr", path]))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda path: os.truncate(path, MIB), "nbytes was 4194304 and is 1048576"),
        (lambda path: os.truncate(path, 5 * MIB), "hole"),
        (rewritten, "inode was"),
        (defragmented, "its blocks have other places"),
        (lambda path: path.write_bytes(path.read_bytes()), "changed_ns was"),
        (Path.unlink, "no such file"),
    ],
    ids=["truncated", "extended", "replaced", "defragmented", "written", "removed"],
)
def test_map_of_a_file_that_was_changed_is_refused(
    path: Path, change: Callable[[Path], None], match: str
) -> None:
    fragmented(path, 4 * MIB)
    kept = fw.file.BlockMap.of(path)
    kept.check()
    with fw.file.MappedFile(kept) as storage:
        assert storage.nbytes == 4 * MIB
    time.sleep(0.02)  # longer than the file system's clock ticks

    change(path)

    with pytest.raises(StorageError, match=match) as refused:
        kept.check()
    assert refused.value.errno == STALE
    if path.exists():
        with pytest.raises(StorageError, match="stale block map"):
            fw.file.MappedFile(kept)


def test_defragmented_file_has_other_places_and_is_read_by_its_new_map(path: Path) -> None:
    content = fragmented(path, 4 * MIB)
    before = fw.file.BlockMap.of(path)

    defragmented(path)

    if fw.file.BlockMap.of(path).extents == before.extents:
        pytest.skip("the file system left the file where it was")
    with fw.file.MappedFile(path) as storage:
        assert storage.read(0, len(content)) == content


# Refusals.


def test_writes_need_permission_by_name(path: Path) -> None:
    store(path, bytes(8192))
    with pytest.raises(ArgumentError, match="allow_raw_writes=True"):
        fw.file.MappedFile(path, writable=True)
    assert dump(path) == bytes(8192)


def test_blocks_that_hold_nothing_of_the_file_are_refused(path: Path) -> None:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, MIB)
    with pytest.raises(PathError, match="unwritten"):
        fw.file.MappedFile(path)
    os.truncate(path, 0)
    os.truncate(path, MIB)
    with pytest.raises(PathError, match="hole"):
        fw.file.MappedFile(path)


def test_shared_blocks_are_refused(volume: Mounted, path: Path) -> None:
    store(path, random_content(MIB))
    try:
        call("cp", "--reflink=always", path, path.with_name("clone"))
    except OSError:
        pytest.skip(f"{volume.kind} shares no blocks here")
    with pytest.raises(PathError, match=r"shared.*--reflink=never"):
        fw.file.MappedFile(path)
    path.with_name("clone").unlink()
    wait_until(lambda: is_usable(path), "the clone's blocks are given up")


def test_another_namespace_is_refused(path: Path) -> None:
    store(path, bytes(8192))
    with Memory(MIB) as memory, pytest.raises(ArgumentError, match="no namespace of a drive"):
        fw.file.MappedFile(path, memory)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "mount", "prepare", "match"),
    [
        (["-O", "inline_data", "-I", "256"], "rw", [], "in the inode"),
        ([], "data=journal", [], "journal"),
        ([], "rw", ["chattr", "+j"], "journal"),
        (["-b", "1024"], "rw", [], "whole blocks of 4096"),
    ],
    ids=["inline", "journal", "journalled file", "small blocks"],
)
def test_file_whose_bytes_are_elsewhere_is_refused(
    tmp_path: Path, options: list[str], mount: str, prepare: list[str], match: str
) -> None:
    with mounted("ext4", tmp_path, *options, mount=mount) as volume:
        path = volume.folder / "file"
        path.touch()
        if prepare:
            try:
                call(*prepare, path)
            except OSError as error:
                pytest.skip(str(error))
        store(path, b"few bytes")
        os.sync()

        with pytest.raises(PathError, match=match) as refused:
            fw.file.MappedFile(path)
        assert refused.value.errno in (errno.EOPNOTSUPP, errno.EINVAL)


def test_image_is_read_and_written_by_blocks(path: Path) -> None:
    content = random_content(300_000)
    with Gvdk.create(path, MIB, preallocate="zeros") as image:
        image.write(0, content)
        offset, capacity = image.data_offset, image.capacity
    assert offset is not None
    with by_blocks(path, offset=offset, nbytes=capacity) as blocks:
        assert blocks.nbytes == MIB
        assert blocks.read(0, len(content)) == content
        blocks.write(1000, b"by its blocks")
        blocks.write(MIB - 3, b"end")
    with Gvdk(path) as image:
        assert image.recovered is None
        assert image.read(998, 17) == content[998:1000] + b"by its blocks" + content[1013:1015]
        assert image.read(MIB - 3, 3) == b"end"
        assert image.verify().clean


def test_part_of_a_file_is_used_alone(path: Path) -> None:
    content = fragmented(path, 4 * MIB)
    for offset, nbytes in [(0, 1), (4096, 5000), (MIB, 2 * MIB), (4 * MIB - 4096, None)]:
        expected = content[offset:] if nbytes is None else content[offset : offset + nbytes]
        with fw.file.MappedFile(path, offset=offset, nbytes=nbytes) as blocks:
            assert blocks.read(0, blocks.nbytes) == expected
    for offset, nbytes in [(1, 1), (-4096, 1), (0, 4 * MIB + 1), (4096, 4 * MIB), (0, 0)]:
        with pytest.raises(ArgumentError):
            fw.file.MappedFile(path, offset=offset, nbytes=nbytes)
