"""What programs and machines do to a checkpointer: hints out of order, disks full or read-only,
a second process of the rank, clocks that jump. `docs/checkpoints.md` has the table."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from checkpoint.faults import WAIT_S, Faults, Opener
from checkpoint.test_checkpointer import COUNT, assert_restores, history, until
from flashwarp.checkpoint.checkpointer import Checkpointer
from flashwarp.errors import CheckpointError, PathError, StorageError

# Hints.


@pytest.mark.parametrize("caches", [("64 KiB", "128 KiB"), (0, "64 KiB"), (0, 0)])
def test_hints_out_of_order_cost_time_and_nothing_else(
    opened: Opener, caches: tuple[int | str, int | str]
) -> None:
    checkpointer = opened(*caches, config={"passed_max": 4})
    state = history(checkpointer, 16)
    hinted = np.random.default_rng(1).permutation(16).tolist()
    restored = np.random.default_rng(2).permutation(16).tolist()
    for version in [*hinted, *hinted[:4]]:
        checkpointer.prefetch_enqueue(version)
    checkpointer.prefetch_start()

    for version in restored:
        assert_restores(checkpointer, state, version)

    card = checkpointer.stats.hints
    assert card.honoured == 16
    assert card.honoured + card.wrong + card.open == 20


def test_hints_of_discarded_versions_stop_nobody(opened: Opener) -> None:
    checkpointer = opened()
    state = history(checkpointer, 6)
    for version in range(6):
        checkpointer.prefetch_enqueue(version)
    checkpointer.prefetch_start()
    for version in (0, 2, 4):
        checkpointer.discard(version)

    for version in (1, 3, 5):
        assert_restores(checkpointer, state, version)
    assert checkpointer.stats.hints.wrong == 3


# Arrays that change behind the checkpointer.


def test_an_array_resized_while_its_flush_runs_spoils_no_version(
    opened: Opener, faults: Faults
) -> None:
    checkpointer = opened("16 KiB", 0)
    state = np.zeros(COUNT)
    checkpointer.protect("state", state)
    faults.hold()
    checkpointer.checkpoint(0)
    faults.until_waiting()
    state.resize(4, refcheck=False)
    with pytest.raises(CheckpointError, match="protect it again after resizing it"):
        checkpointer.checkpoint(1)
    faults.release()

    assert checkpointer.restart(0, into={"state": np.ones(COUNT)})["state"].sum() == 0


# Disks.


def test_a_full_disk_stops_neither_the_run_nor_its_restarts(
    small_disk: Path, opened: Opener
) -> None:
    checkpointer = opened(0, "4 MiB", path=small_disk / "versions", config={"retry_s": 0.05})
    state = history(checkpointer, 100)  # 1.6 MiB, and manifests
    until(lambda: checkpointer.stats.flush_failures > 0, "the disk is full")

    with pytest.raises((PathError, StorageError)) as raised:
        checkpointer.wait(timeout_s=10)

    assert raised.value.errno == errno.ENOSPC
    for version in range(100):
        assert_restores(checkpointer, state, version)
    assert checkpointer.stats.memory_only > 20
    for version in range(60):
        checkpointer.discard(version)
    until(lambda: not checkpointer.stats.memory_only, "discarded versions make room")
    checkpointer.close()
    assert opened(path=small_disk / "versions").versions() == list(range(60, 100))


def test_a_path_that_becomes_read_only_stops_neither_the_run_nor_its_restarts(
    small_disk: Path, opened: Opener
) -> None:
    folder = small_disk / "versions"
    checkpointer = opened(0, "1 MiB", path=folder, config={"retry_s": 0.05})
    state = history(checkpointer, 4)
    checkpointer.wait()
    # A read-only view on top: the mount itself cannot change while the lock is open for writing.
    for options in (["--bind", str(folder)], ["-o", "remount,bind,ro"]):
        subprocess.run(["mount", *options, str(folder)], check=True)
    try:
        state[:] = 5
        saved = checkpointer.checkpoint(4)
        with pytest.raises(PathError) as raised:
            saved.result(WAIT_S)
        assert raised.value.errno == errno.EROFS
        for version in range(5):
            assert_restores(checkpointer, state, version)
        with pytest.raises(PathError):
            opened(path=folder, rank=1)
        reader = opened(path=folder, config={"read_only": True})
        assert_restores_all(reader, 4)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)

    until(lambda: not checkpointer.stats.memory_only, "the flush is tried again")
    assert_restores_all(opened(path=folder, config={"read_only": True}), 5)


def assert_restores_all(checkpointer: Checkpointer, count: int) -> None:
    state = np.zeros(COUNT)
    checkpointer.protect("state", state)
    assert checkpointer.versions() == list(range(count))
    for version in range(count):
        assert_restores(checkpointer, state, version)


def test_a_limit_of_file_sizes_is_a_typed_error(opened: Opener) -> None:
    checkpointer = opened(0, "1 MiB", config={"retry_s": 1e3})
    checkpointer.protect("state", np.zeros(COUNT))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises((PathError, StorageError)) as raised:
            checkpointer.checkpoint(0).result(WAIT_S)
        assert raised.value.errno == errno.EFBIG
        assert (checkpointer.restart(0)["state"] == 0).all()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpointer.close()
    assert opened().versions() == [0]


# Processes and clocks.


def test_a_second_process_with_the_same_rank_is_refused(opened: Opener, tmp_path: Path) -> None:
    opened(rank=3)
    script = (
        "import sys, flashwarp as fw\n"
        "try: fw.Checkpointer(sys.argv[1], 'cpu', 0, 0, rank=int(sys.argv[2]))\n"
        "except fw.errors.LockedError as error: print(error.holder, error)\n"
        "else: print('opened')\n"
    )

    def second(rank: int) -> str:
        command = [sys.executable, "-c", script, str(tmp_path / "versions"), str(rank)]
        return subprocess.run(
            command, check=True, timeout=60, capture_output=True, text=True
        ).stdout

    assert second(3).startswith(f"{os.getpid()} ")
    assert "writes rank 3 here: use another rank or path" in second(3)
    assert second(4) == "opened\n"


def test_a_clock_that_jumps_back_changes_nothing(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The order of versions is that of their numbers, and waits count on another clock."""
    real = time.time, time.gmtime
    jump = 0.0
    monkeypatch.setattr(time, "time", lambda: real[0]() - jump)
    monkeypatch.setattr(time, "gmtime", lambda seconds=None: real[1]((seconds or real[0]()) - jump))
    checkpointer = opened("32 KiB", "64 KiB")
    state = np.zeros(COUNT)
    checkpointer.protect("state", state)
    for version in range(10):
        jump = version * 1e8  # three years
        state[:] = version + 1
        checkpointer.checkpoint(version)
        checkpointer.prefetch_enqueue(version)
        checkpointer.wait(version)
    manifests = sorted((tmp_path / "versions").rglob("*.manifest"))
    for age, path in enumerate(manifests):
        os.utime(path, (real[0]() - age * 1e6,) * 2)
    written = [path.read_text().split('"written": "')[1][:4] for path in manifests]
    assert written == sorted(written, reverse=True), "the clock did jump"

    assert checkpointer.test() == 9
    for version in range(10):
        assert_restores(checkpointer, state, version)
    checkpointer.close()

    assert opened().test() == 9
