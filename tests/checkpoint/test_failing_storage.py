"""Checkpoints to storage that is full, gone or damaged: what is in the caches is not lost."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from checkpoint.faults import Faults, Opener
from checkpoint.test_checkpointer import COUNT, assert_restores, history, until
from flashwarp.checkpoint.checkpointer import Checkpointer
from flashwarp.errors import PathError, StorageError


def full() -> PathError:
    return PathError(errno.ENOSPC, "no space left on the device", "versions")


def test_on_a_full_disk_the_run_goes_on_from_the_caches(
    opened: Opener, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = opened(config={"retry_s": 0.01})
    faults.write_error = full()
    state = history(checkpointer, 8)

    for version in range(8):
        assert_restores(checkpointer, state, version)
    until(lambda: "cannot be written" in str(checkpointer.explain()), "explain says so")
    with pytest.raises(PathError, match="no space left"):
        checkpointer.wait(0)
    assert "the disk is full, and the run goes on from the upper tiers" in caplog.text
    assert checkpointer.stats.memory_only == 8

    faults.write_error = None
    until(lambda: checkpointer.stats.memory_only == 0, "the flushes are tried again")
    checkpointer.wait()
    checkpointer.close()
    assert opened().versions() == list(range(8))


def test_a_flush_that_fails_while_room_is_made_is_tried_again_at_once(
    opened: Opener, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = opened(config={"retry_s": 1e3})
    history(checkpointer, 1)
    checkpointer.wait()
    faults.write_error = full()
    for version in (1, 2):
        checkpointer.checkpoint(version)
    until(lambda: checkpointer.stats.flush_failures == 2, "both fail")
    in_vain = iter([full()])

    def write() -> None:
        Faults.write(faults)
        for error in in_vain:
            raise error

    faults.write_error = None
    faults.hold()
    monkeypatch.setattr(faults, "write", write)
    checkpointer.discard(1)
    faults.until_waiting()
    checkpointer.discard(0)
    faults.release()

    until(lambda: checkpointer.stats.memory_only == 0, "the flush is tried again")
    assert checkpointer.stats.flush_failures == 3


def test_when_the_caches_are_full_too_the_checkpoint_fails_and_loses_nothing(
    opened: Opener, faults: Faults
) -> None:
    checkpointer = opened("64 KiB", "64 KiB")
    faults.write_error = full()
    state = np.zeros(COUNT)
    checkpointer.protect("state", state)
    saved = []

    def fill() -> None:
        for version in range(20):
            state[:] = version + 1
            saved.append(checkpointer.checkpoint(version))

    with pytest.raises(PathError, match="no space left"):
        fill()

    kept = checkpointer.versions()
    assert kept == list(range(len(saved)))
    assert len(kept) >= 4
    for version in kept:
        assert_restores(checkpointer, state, version)


def test_an_unseen_failure_is_raised_by_close(opened: Opener, faults: Faults) -> None:
    checkpointer = opened()
    faults.write_error = StorageError(errno.EIO, "the drive is gone", "versions")
    history(checkpointer, 2)

    with pytest.raises(StorageError, match="the drive is gone") as raised:
        checkpointer.close()

    assert any("2 versions are lost by closing" in note for note in raised.value.__notes__)
    assert checkpointer.closed
    checkpointer.close()


def test_a_failure_that_was_repaired_is_no_failure_at_close(opened: Opener, faults: Faults) -> None:
    checkpointer = opened(config={"retry_s": 1e3})
    faults.write_error = full()
    saved = history(checkpointer, 1)
    del saved
    until(lambda: checkpointer.stats.flush_failures == 1, "it fails once")
    with pytest.raises(PathError):
        checkpointer.wait(0)
    faults.write_error = None

    checkpointer.close()

    assert opened().versions() == [0]


def test_a_version_that_cannot_be_read_fails_its_restore_alone(
    opened: Opener, faults: Faults
) -> None:
    with opened() as first:
        history(first, 3)
    checkpointer = opened()
    state = np.zeros(COUNT)
    checkpointer.protect("state", state)
    faults.read_error = StorageError(errno.EIO, "unreadable", "versions")
    for version in range(3):
        checkpointer.prefetch_enqueue(version)
    checkpointer.prefetch_start()
    until(lambda: checkpointer.stats.prefetch_failures >= 1, "the prefetch fails")

    with pytest.raises(StorageError, match="unreadable"):
        checkpointer.restart(0)
    faults.read_error = None
    for version in range(3):
        assert_restores(checkpointer, state, version)


def test_a_damaged_version_is_skipped_and_the_one_before_offered(
    opened: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened() as first:
        history(first, 3)
    manifest = next((tmp_path / "versions").rglob("*2.manifest"))
    manifest.write_bytes(manifest.read_bytes()[:-7])

    assert opened().test() == 1
    assert "skipped version 2 of 'default'" in caplog.text


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(PathError):
        Checkpointer(tmp_path / "file", "cpu", 0, 0)
