"""Files appear whole or not at all, and their end is measured and cut under their lock."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import (
    FlashwarpError,
    LockedError,
    PathError,
    SharedCacheError,
    StorageError,
)
from flashwarp.file.gvdk import Gvdk
from flashwarp.storage import files
from flashwarp.table.record import Record
from flashwarp.trace import Trace
from flashwarp.trace.compare import save as save_comparisons

OLD = b"precious" * 100
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "image": {"format": "gvdk"}}
REFUSED: list[dict[str, Any]] = [
    {"cache": "nonsense"},
    {"cache": 1},
    {"line": 3},
    {"device": "cuda:77"},
    {"prefetch": -1},
    {"prefetch": 1 << 20},
    {"bogus": 1},
    {"shared": 3},
    {"lock": 2},
    {"o_direct": "yes"},
    {"controller": "fast"},
]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.bin"
    path.write_bytes(OLD)
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_a_create_that_fails_leaves_what_was_there(
    old: Path, kind: str, options: dict[str, Any]
) -> None:
    with pytest.raises((FlashwarpError, TypeError)):
        fw.File.create(old, 10, overwrite=True, **{"device": "cpu"} | KINDS[kind] | options)

    assert old.read_bytes() == OLD
    assert list(old.parent.iterdir()) == [old]


@pytest.mark.parametrize("kind", KINDS)
def test_a_create_whose_name_is_taken_meanwhile_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "new.bin"
    publish = files.Draft.publish

    def late(draft: files.Draft) -> None:
        path.write_bytes(OLD)
        publish(draft)

    monkeypatch.setattr(files.Draft, "publish", late)
    with pytest.raises(FileExistsError):
        fw.File.create(path, 10, device="cpu", **KINDS[kind])
    monkeypatch.undo()

    assert path.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [path]
    with fw.File.open(path, "r+", device="cpu"):  # no lock is left
        pass


@pytest.mark.parametrize("options", REFUSED[:4], ids=str)
def test_an_open_that_fails_does_not_touch_the_file(old: Path, options: dict[str, Any]) -> None:
    before = os.stat(old).st_mtime_ns

    with pytest.raises(FlashwarpError):
        fw.File.open(old, "r+", capacity="1 MiB", **{"device": "cpu"} | options)

    assert old.read_bytes() == OLD
    if options != {"cache": 1}:  # how large a cache must be follows from the file
        assert os.stat(old).st_mtime_ns == before
    with fw.File.open(old, "r+", device="cpu"):
        pass


def test_the_file_is_measured_under_its_lock(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = files.opened
    late = [b"theirs"]

    def slow(*arguments: Any, **options: Any) -> Any:
        with old.open("ab") as other:  # another program, before this one has the lock
            other.write(late.pop() if late and options.get("writable") else b"")
        return opened(*arguments, **options)

    monkeypatch.setattr(files, "opened", slow)
    with fw.File.open(old, "r+", device="cpu", capacity="1 MiB") as f:
        f.append(b"ours")

    assert old.read_bytes() == OLD + b"theirs" + b"ours"


def test_close_keeps_what_another_program_has_appended(old: Path) -> None:
    with fw.File.open(old, "r+", device="cpu"), old.open("ab") as other:
        other.write(b"more")

    assert old.read_bytes() == OLD + b"more"


def test_close_cuts_nothing_that_lies_behind_the_capacity(old: Path) -> None:
    f = fw.File.open(old, "r+", device="cpu", capacity=1000)
    with old.open("ab") as other:
        other.write(b"more")

    with pytest.raises(StorageError, match="another program has appended"):
        f.close()

    assert old.read_bytes() == OLD + bytes(200) + b"more"
    assert f.closed
    with fw.File.open(old, "r+", device="cpu"):
        pass


def test_the_lock_lasts_until_the_end_is_cut(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[str] = []
    truncate = os.ftruncate

    def watched(descriptor: int, size: int) -> None:
        with pytest.raises(LockedError):
            fw.File.open(old, "r+", device="cpu")
        cut.append("locked")
        truncate(descriptor, size)

    f = fw.File.open(old, "r+", device="cpu", capacity="1 MiB")
    monkeypatch.setattr(os, "ftruncate", watched)
    f.close()

    assert cut == ["locked"]
    assert old.read_bytes() == OLD


def test_the_lock_is_kept_while_a_file_gets_more_room(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = fw.File._attach_plain

    def watched(*arguments: Any, **options: Any) -> None:
        with old.open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        attach(*arguments, **options)

    with fw.File.open(old, "r+", device="cpu") as f:
        monkeypatch.setattr(fw.File, "_attach_plain", watched)
        f.extend("1 MiB")
        monkeypatch.undo()
        f.append(b"more")

    assert old.read_bytes() == OLD + b"more"
    with fw.File.open(old, "r+", device="cpu"):
        pass


def test_a_file_that_gets_no_more_room_is_closed_and_whole(old: Path) -> None:
    f = fw.File.open(old, "r+", device="cpu", capacity=5000)
    f.append(b"more")

    with pytest.raises(PathError):
        f.extend(1 << 62)

    assert f.closed
    assert old.read_bytes() == OLD + b"more"
    with fw.File.open(old, "r+", device="cpu"):
        pass


def test_a_file_of_size_0_takes_its_space(tmp_path: Path) -> None:
    path = tmp_path / "log.bin"
    with fw.File.create(path, 0, capacity="4 MiB", device="cpu"):
        assert os.stat(path).st_blocks * 512 >= 4 << 20

    assert path.read_bytes() == b""


def test_only_the_owner_of_a_shared_cache_writes_files(old: Path) -> None:
    name = f"whole-{os.getpid()}"
    other = f"""
import flashwarp as fw
from flashwarp.errors import SharedCacheError
try:
    fw.File.open({str(old)!r}, "r+", device="cpu", shared={name!r})
except SharedCacheError as error:
    print(type(error).__name__)
"""
    with fw.Cache("1 MiB", device="cpu", shared=name):
        found = subprocess.run(
            [sys.executable, "-c", other], check=True, timeout=100, capture_output=True, text=True
        )

    assert found.stdout.strip() == SharedCacheError.__name__


# Images.


@pytest.mark.parametrize("preallocate", [False, True])
def test_an_import_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preallocate: bool
) -> None:
    source, path = tmp_path / "source.bin", tmp_path / "old.gvdk"
    source.write_bytes(os.urandom(12 << 20))
    with Gvdk.create(path, "64 KiB") as image:
        image.write(0, b"old data")
    write = Gvdk.write

    def cutting(image: Gvdk, offset: int, data: bytes) -> None:
        write(image, offset, data)
        os.truncate(source, 1000)

    monkeypatch.setattr(Gvdk, "write", cutting)
    with pytest.raises(StorageError, match="was cut short while it was read"):
        Gvdk.import_(source, path, overwrite=True, preallocate=preallocate)
    monkeypatch.undo()

    assert sorted(tmp_path.iterdir()) == [path, source]
    with Gvdk(path) as image:
        assert (image.size, image.read(0, 8)) == (64 << 10, b"old data")


def test_an_import_takes_its_name_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, path = tmp_path / "source.bin", tmp_path / "new.gvdk"
    source.write_bytes(OLD)
    write = Gvdk.write

    def watching(image: Gvdk, offset: int, data: bytes) -> None:
        assert not path.exists()
        assert image.path == str(path)
        write(image, offset, data)

    monkeypatch.setattr(Gvdk, "write", watching)
    Gvdk.import_(source, path)

    with Gvdk(path) as image:
        assert image.read(0, image.size) == OLD


# Stamps.


def test_a_stamp_tells_a_file_whose_time_was_restored(old: Path) -> None:
    with old.open("rb") as file:
        before, status = files.stamp(file.fileno()), os.fstat(file.fileno())
        old.write_bytes(OLD[::-1])
        os.utime(old, ns=(status.st_atime_ns, status.st_mtime_ns))

        after = files.stamp(file.fileno())

    assert before[:4] == after[:4]
    assert before != after


# What is written in one go.


@pytest.mark.parametrize(
    "save",
    [
        lambda path: Trace(np.arange(9), 512, "t").save(path),
        lambda path: save_comparisons([], path, fact=1),
        lambda path: Record("sgd", 3, 2, 4).write(str(path)),
    ],
    ids=["trace", "comparison", "record"],
)
def test_a_file_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path], None]
) -> None:
    path = tmp_path / "f"
    save(path)
    before = {each: each.read_bytes() for each in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PathError, match="full"):
        save(path)

    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == before
