"""A consumer, another process, reads a history while a producer writes, prunes and discards it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from versions import check, files_of, store

from flashwarp.checkpoint.directory import Directory, names
from flashwarp.errors import ArgumentError, ClosedError, MissingVersionError, WaitTimeout

PRODUCER = """
import sys, time
from versions import store
from flashwarp.checkpoint.directory import Directory
with Directory(sys.argv[1], chunk_bytes=4096) as directory:
    for version in range(int(sys.argv[2])):
        store(directory, version, 20_000, 5)
        if sys.argv[3] != "all":
            directory.prune("run", keep_last=int(sys.argv[3]))
        time.sleep(0.005)
"""


def producer(path: Path, count: int, keep: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PRODUCER, str(path), str(count), keep]
    return subprocess.Popen(command, cwd=Path(__file__).parent)


def test_every_version_of_another_process_is_read_once(tmp_path: Path) -> None:
    with Directory(tmp_path, writable=False) as found, producer(tmp_path, 40, "all"):
        versions = []
        for version in found.follow("run", timeout_s=60, until=39):
            versions.append(version)
            with found.open("run", version) as reader:
                check(reader, version)

    assert versions == list(range(40))


def test_versions_that_are_pruned_while_they_are_read_are_right_or_missing(tmp_path: Path) -> None:
    read, missing = 0, 0
    with Directory(tmp_path, writable=False) as found, producer(tmp_path, 60, "1"):
        for version in found.follow("run", timeout_s=60, until=59):
            try:
                with found.open("run", version) as reader:
                    check(reader, version)
                    read += 1
            except MissingVersionError:
                missing += 1

    assert read > 0
    assert read + missing <= 60


def test_wait_without_a_new_version_ends(tmp_path: Path) -> None:
    with Directory(tmp_path) as found:
        store(found, 4, 10)
        follower = found.follow("run", timeout_s=0.2)
        assert next(follower) == 4
        begin = time.monotonic()
        with pytest.raises(WaitTimeout, match=r"a version of 'run' in .* within 0\.2 s"):
            next(follower)

    assert time.monotonic() - begin < 10


def test_late_lower_version_is_seen_and_a_discarded_one_is_not(tmp_path: Path) -> None:
    with Directory(tmp_path) as found:
        follower = found.follow("run", timeout_s=10)
        store(found, 5, 10)
        assert next(follower) == 5
        store(found, 2, 10)
        store(found, 9, 10)
        found.discard("run", 9)
        store(found, 3, 10)
        assert [next(follower), next(follower)] == [2, 3]


def test_folder_that_does_not_change_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Directory(tmp_path) as found:
        store(found, 1, 10)
        follower = found.follow("run", timeout_s=3, poll_s=0.02)
        assert next(follower) == 1
        listed, looked = [], []
        monkeypatch.setattr(
            names,
            "listed",
            lambda folder, real=names.listed: listed.append(1) or real(folder),
        )
        monkeypatch.setattr(
            Directory,
            "_stamp",
            lambda self, *folders, real=Directory._stamp: looked.append(1) or real(self, *folders),
        )
        with pytest.raises(WaitTimeout):
            next(follower)

    # 3 s of looks, of which only the first 2 s may list: the clock of the folder may be coarse.
    assert len(looked) <= 3 / 0.02 + 2
    assert len(listed) <= 2 / 0.02 + 2


def test_close_and_bad_arguments_end_it(tmp_path: Path) -> None:
    found = Directory(tmp_path)
    for options in (
        {"timeout_s": -1},
        {"timeout_s": 1, "poll_s": 0},
        {"timeout_s": 1, "until": -1},
    ):
        with pytest.raises(ArgumentError):
            found.follow("run", **options)  # type: ignore[arg-type]
    follower = found.follow("run", timeout_s=30)
    threading.Timer(0.1, found.close).start()
    with pytest.raises(ClosedError):
        next(follower)


def test_clock_that_jumps_back_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Directory(tmp_path) as found:
        store(found, 1, 10)
        follower = found.follow("run", timeout_s=10)
        assert next(follower) == 1
        monkeypatch.setattr(time, "time", lambda: 0.0)
        monkeypatch.setattr(time, "gmtime", lambda real=time.gmtime: real(0))
        store(found, 2, 10)
        for each in files_of(tmp_path):
            os.utime(tmp_path / "run" / "rank-00000" / each, (1, 1))

        assert found.latest("run", verify=True) == 2
        assert next(follower) == 2
