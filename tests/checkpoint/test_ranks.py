"""Ranks that write one history: all commit a version, or none does. Each rank is a process."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.rank_processes import COUNT, WAIT_S, Ranks, content, opened
from flashwarp.checkpoint.checkpointer import Checkpointer
from flashwarp.checkpoint.directory import Directory
from flashwarp.checkpoint.directory.writer import VersionWriter
from flashwarp.errors import (
    ArgumentError,
    CheckpointError,
    PathError,
    RankError,
    StorageError,
)

Tell = Callable[[Any], None]
RAISED_S = 5.0


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def write(checkpointer: Checkpointer, rank: int, versions: range) -> None:
    state = np.zeros(COUNT)
    checkpointer.protect("state", state)
    for version in versions:
        state[:] = content(rank, version)
        checkpointer.checkpoint(version)


def assert_holds(checkpointer: Checkpointer, rank: int, versions: list[int]) -> None:
    assert checkpointer.versions() == versions
    for version in versions:
        found = checkpointer.restart(version)["state"]
        assert (found == content(rank, version)).all()


def votes(folder: Path) -> list[str]:
    place = folder / "default" / "ranks"
    return sorted(set(os.listdir(place)) - {"complete"}) if place.exists() else []


def complete(folder: Path) -> list[int]:
    return sorted(int(each) for each in os.listdir(folder / "default" / "ranks" / "complete"))


# All is well.


def write_history(rank: int, folder: Path, tell: Tell, ranks: int, step: int) -> None:
    with opened(folder, rank, ranks) as checkpointer:
        time.sleep(0.1 * rank)
        write(checkpointer, rank, range(step, step + 6))
        checkpointer.wait()
    with opened(folder, rank, ranks) as checkpointer:
        assert_holds(checkpointer, rank, list(range(step + 6)))
        assert checkpointer.test() == step + 5
    tell(None)


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_commit_a_version(tmp_path: Path, ranks: int) -> None:
    for step in (0, 6):
        with Ranks(ranks, write_history, tmp_path, ranks, step) as run:
            run.heard(ranks)

    assert complete(tmp_path) == list(range(12))
    assert votes(tmp_path) == []


# One rank fails.


def one_fails(rank: int, folder: Path, tell: Tell, where: str) -> None:
    """Rank 1 cannot write version 2. The others have written it, or have seconds to write."""
    real = VersionWriter.write

    def fail(writer: VersionWriter, *arguments: Any) -> None:
        if writer.version == 2 and rank == 1:
            raise StorageError(errno.EIO, "the drive of rank 1 is gone", str(folder))
        if writer.version == 2 and rank == 2 and where == "while others write":
            time.sleep(0.5)
        real(writer, *arguments)

    checkpointer = opened(folder, rank, 3, retry_s=600)
    write(checkpointer, rank, range(2))
    checkpointer.wait()
    VersionWriter.write = fail  # type: ignore[method-assign]
    if rank == 1 and where == "after others have written":
        time.sleep(1)
    state = np.full((1 << 20) // 8 if where == "while others write" else COUNT, 2.0)
    checkpointer.protect("state", state)
    began = time.time()
    saved = checkpointer.checkpoint(2)
    failure = saved.exception(WAIT_S)
    raised = time.time()
    with pytest.raises(type(failure)):
        checkpointer.wait(2, timeout_s=10)
    assert checkpointer.versions() == [0, 1, 2], "version 2 is in the caches"
    tell((began, raised, type(failure).__name__, str(failure), getattr(failure, "rank", None)))
    until((folder / "told").exists, "the parent has heard all")
    # A repaired drive: what is in the caches is written after all.
    VersionWriter.write = real  # type: ignore[method-assign]
    if where == "after others have written":
        checkpointer.close()
        tell("closed")
    else:
        checkpointer.close(drain=False)
        tell("lost")


@pytest.mark.parametrize("where", ["while others write", "after others have written"])
def test_a_failure_of_one_rank_is_raised_on_all_within_5_s(tmp_path: Path, where: str) -> None:
    folder = tmp_path / "versions"
    with Ranks(3, one_fails, folder, where) as run:
        seen = run.heard(3)

        failed = seen[1][0]
        for rank in (0, 2):
            began, raised, kind, message, named = seen[rank]
            assert raised - max(began, failed) < RAISED_S
            assert kind == "RankError"
            assert named == 1
            assert "rank 1 failed" in message
            assert "the drive of rank 1 is gone" in message
        assert seen[1][2] == "StorageError"
        for rank in range(3):
            with Directory(folder, rank, writable=False) as directory:
                assert directory.versions("default") == [0, 1], "no rank has committed version 2"
        (folder / "told").touch()
        run.heard(3)

    for rank in range(3):
        with opened(folder, rank, 3) as checkpointer:
            there = [0, 1, 2] if where == "after others have written" else [0, 1]
            assert checkpointer.versions() == there


def publishing_fails(rank: int, folder: Path, tell: Tell) -> None:
    """Rank 1 can prepare version 0, and cannot give its manifest its name, once."""
    real = VersionWriter.publish

    def fail(writer: VersionWriter) -> None:
        VersionWriter.publish = real  # type: ignore[method-assign]
        writer.abort()
        raise PathError(errno.ENOSPC, "no space left for a name", str(folder))

    if rank == 1:
        VersionWriter.publish = fail  # type: ignore[method-assign]
    with opened(folder, rank, 2, retry_s=0.5) as checkpointer:
        write(checkpointer, rank, range(1))
        with pytest.raises(PathError if rank == 1 else RankError, match="no space left for a name"):
            checkpointer.wait()
        tell(None)
    with opened(folder, rank, 2) as checkpointer:
        assert_holds(checkpointer, rank, [0])
    tell(None)


def test_a_version_that_one_rank_cannot_publish_is_taken_back_and_tried_again(
    tmp_path: Path,
) -> None:
    with Ranks(2, publishing_fails, tmp_path) as run:
        run.heard(2)
        run.heard(2)


# Ranks die.


def die(rank: int, folder: Path, tell: Tell) -> None:
    checkpointer = opened(folder, rank, 2, retry_s=0.2)
    found = checkpointer.test()
    tell(found)
    begin = 0 if found is None else found + 1
    if rank == 1 and begin == 0:
        write(checkpointer, rank, range(3))
        checkpointer.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    write(checkpointer, rank, range(begin, 5))
    if begin == 0:
        began = time.monotonic()
        with pytest.raises(RankError, match="rank 1 failed: its process has ended"):
            checkpointer.wait(3)
        assert time.monotonic() - began < RAISED_S
        tell("raised")
        until(lambda: not checkpointer.stats.memory_only, "rank 1 comes back")
    checkpointer.close()
    tell("closed")


def test_a_rank_that_dies_fails_the_others_and_may_come_back(tmp_path: Path) -> None:
    """What waits in the caches of the others is committed together with what it writes again."""
    with Ranks(2, die, tmp_path) as run:
        assert run.heard(2) == {0: None, 1: None}
        assert run.heard(1) == {0: "raised"}
        run.processes[1].join(WAIT_S)
        run.processes[1] = run.start(1)
        assert run.heard(1) == {1: 2}
        assert run.heard(2) == {0: "closed", 1: "closed"}

    for rank in range(2):
        with opened(tmp_path, rank, 2) as checkpointer:
            assert_holds(checkpointer, rank, list(range(5)))


def write_alone(rank: int, folder: Path, tell: Tell) -> None:
    checkpointer = opened(folder, rank, 2)
    write(checkpointer, rank, range(1))
    time.sleep(WAIT_S)


def test_votes_of_an_earlier_run_count_for_nothing(tmp_path: Path) -> None:
    with Ranks(1, write_alone, tmp_path) as run:
        until(lambda: any(".prepared." in each for each in votes(tmp_path)), "rank 0 votes")
        run.processes[0].kill()
        run.processes[0].join()
        assert any(".prepared." in each for each in votes(tmp_path))

    with opened(tmp_path, 1, 2, timeout_s=1) as checkpointer:
        write(checkpointer, 1, range(1))
        until(
            lambda: "version 0 of 'default' waits for ranks 0" in str(checkpointer.explain()),
            "waits",
        )
        with pytest.raises(RankError, match=r"rank 0 failed: has not written it within 1 s"):
            checkpointer.wait(timeout_s=10)
        checkpointer.close(drain=False)
    with Directory(tmp_path, 1, writable=False) as directory:
        assert directory.versions("default") == []


# Ranks of one node share its SSD.


def flush_for_a_while(rank: int, folder: Path, tell: Tell, sizes: list[int]) -> None:
    nbytes = sizes[rank] << 20
    with Checkpointer(folder, "cpu", 0, "128 MiB", rank=rank, config={"timeout_s": 120}) as mine:
        mine.protect("state", np.full(nbytes, rank, np.uint8))
        (folder / f"{rank}.ready").touch()
        until(lambda: len(list(folder.glob("*.ready"))) == len(sizes), "all ranks are open")
        began, version = time.monotonic(), 0
        while time.monotonic() - began < 3:  # all ranks flush all the time: their caches are full
            mine.checkpoint(version)
            version += 1
        tell(mine.stats.stored_bytes / (time.monotonic() - began))
        mine.close(drain=False)


def test_processes_that_share_the_disk_all_go_on(tmp_path: Path) -> None:
    sizes = [2, 8, 16, 32]
    with Ranks(len(sizes), flush_for_a_while, tmp_path, sizes) as run:
        rates = run.heard(len(sizes))

    # How fairly depends on the machine and what else runs on it: by Jain's index (1 if all have as
    # much) 0.65 where versions were flushed one at a time.
    total, squares = sum(rates.values()), sum(rate**2 for rate in rates.values())
    print({f"{sizes[rank]} MiB": f"{rates[rank] / 1e6:.0f} MB/s" for rank in sorted(rates)})
    print(f"index {total**2 / (len(rates) * squares):.2f}")
    assert min(rates.values()) > 0


# Versions that are not of all ranks.


def test_a_version_that_only_some_ranks_have_is_no_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Ranks(2, write_history, tmp_path, 2, 0) as run:
        run.heard(2)
    with Directory(tmp_path, 1) as directory:
        directory.discard("default", 5)
    with opened(tmp_path, 0, 1) as alone:
        write(alone, 0, range(7, 8))

    with opened(tmp_path, 0, 2) as checkpointer:
        assert checkpointer.versions() == [0, 1, 2, 3, 4, 5], "its own part of 5 is there"
        assert checkpointer.test() == 4, "and rank 1 has no part of 5"
    assert "left out 1 versions of 'default' that not all of 2 ranks have committed" in caplog.text


def test_a_part_that_only_the_remote_store_has_counts(tmp_path: Path) -> None:
    folder, config = tmp_path / "versions", {"ranks": 2, "timeout_s": 30}

    def both(held: contextlib.ExitStack) -> list[Checkpointer]:
        return [
            held.enter_context(
                Checkpointer(folder, "cpu", 0, "1 MiB", tmp_path / "remote", rank, config)
            )
            for rank in range(2)
        ]

    with contextlib.ExitStack() as held:
        ranks = both(held)
        for rank, checkpointer in enumerate(ranks):
            write(checkpointer, rank, range(2))
        for checkpointer in ranks:
            checkpointer.wait(tier="remote")
    with Directory(folder, 1) as directory:
        directory.discard("default", 1)

    with contextlib.ExitStack() as held:
        ranks = both(held)
        assert [checkpointer.test() for checkpointer in ranks] == [1, 1]
        for rank, checkpointer in enumerate(ranks):
            assert_holds(checkpointer, rank, [0, 1])


def discard_and_write_again(rank: int, folder: Path, tell: Tell) -> None:
    with opened(folder, rank, 2) as checkpointer:
        write(checkpointer, rank, range(3))
        checkpointer.wait()
        checkpointer.discard(1)
        write(checkpointer, rank, range(1, 2))
        checkpointer.wait()
        checkpointer.discard(2)
        assert_holds(checkpointer, rank, [0, 1])
    tell(None)


def test_ranks_discard_versions_and_write_them_again(tmp_path: Path) -> None:
    with Ranks(2, discard_and_write_again, tmp_path) as run:
        run.heard(2)

    assert complete(tmp_path) == [0, 1]
    assert votes(tmp_path) == []


def test_bad_numbers_of_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="rank=2, and ranks=2"):
        opened(tmp_path, 2, 2)
    with pytest.raises(ArgumentError, match="ranks"):
        opened(tmp_path, 0, 0)
    with opened(tmp_path, 1, 3), opened(tmp_path, 0, 2, timeout_s=1) as checkpointer:
        write(checkpointer, 0, range(1))
        with pytest.raises(CheckpointError, match="rank 1 was opened with ranks=3"):
            checkpointer.wait()
        checkpointer.close(drain=False)
