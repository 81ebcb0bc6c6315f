"""Kill -9 of a process that runs a checkpointer, at random times: no durable version is lost.

Children checkpoint, restart, prefetch and discard, and report through a pipe which versions were
durable. The parent kills each, opens the folder, and checks every byte of every version.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwarp.checkpoint.checkpointer import Checkpointer
from flashwarp.checkpoint.directory import Directory
from flashwarp.checkpoint.storing import Storing
from flashwarp.checkpoint.tier import Entry

KILLS = int(os.environ.get("FLASHWARP_KILLS", "20"))
KEPT = 12
SIZES = {"small": 3, "pages": 5000, "large": 100_000}  # int64: 840 KB, half of the GPU cache


def content(version: int, region: str) -> np.ndarray[Any, Any]:
    return np.arange(SIZES[region], dtype=np.int64) * (version + 1) + len(region)


def opened(path: Path, **config: Any) -> Checkpointer:
    config = {"timeout_s": 60, "discard_consumed": False, **config}
    return Checkpointer(path, "cpu", "2 MiB", "4 MiB", rank=0, config=config)


def use(path: Path, pipe: int, seed: int) -> None:
    """Do what programs do, until killed; each line of the pipe is an event."""
    chooser = random.Random(seed)
    consumes = chooser.random() < 0.5
    checkpointer = opened(path, discard_consumed=consumes)
    state = {region: np.zeros(size, np.int64) for region, size in SIZES.items()}
    for region, array in state.items():
        checkpointer.protect(region, array)
    newest = checkpointer.test()
    version = 0 if newest is None else newest + 1
    pending = {}
    checkpointer.prefetch_start()
    while True:
        for region, array in state.items():
            array[:] = content(version, region)
        pending[version] = checkpointer.checkpoint(version, overlap=chooser.random() < 0.3)
        checkpointer.wait_staged()
        for done in [each for each, saved in pending.items() if saved.done()]:
            os.write(pipe, b"durable %d\n" % pending.pop(done).result(0))
        there = checkpointer.versions()
        action = chooser.random()
        if action < 0.3:
            asked = chooser.choice(there)
            checkpointer.prefetch_enqueue(asked)
            if consumes:
                pending.pop(asked, None)
                os.write(pipe, b"discard %d\n" % asked)
            checkpointer.restart(asked)
            for region, array in state.items():
                assert np.array_equal(array, content(asked, region)), (asked, region)
        elif action < 0.4:
            checkpointer.wait(version)
        elif action < 0.5 and len(there) > KEPT:
            for old in there[:-KEPT]:
                os.write(pipe, b"discard %d\n" % old)
                checkpointer.discard(old)
        version += 1


def run_and_kill(path: Path, chooser: random.Random) -> list[tuple[str, int]]:
    reading, writing = os.pipe()
    seed = chooser.randrange(1 << 30)
    child = os.fork()
    if child == 0:
        try:
            use(path, writing, seed)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(writing)
    wait_for = chooser.choice((0, 0, 1, 3, 8))
    reports = b""
    while reports.count(b"\n") < wait_for and (piece := os.read(reading, 4096)):
        reports += piece
    time.sleep(chooser.random() * 0.04)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), f"the child ended by itself (seed {seed})"
    while piece := os.read(reading, 4096):
        reports += piece
    os.close(reading)
    lines = [line.split() for line in reports.decode().splitlines()]
    return [(kind, int(version)) for kind, version in lines]


def check(path: Path, durable: set[int], maybe: set[int], where: str) -> set[int]:
    """Check all bytes of all versions; return the versions that are there."""
    with opened(path) as checkpointer:
        there = set(checkpointer.versions())
        assert durable - maybe <= there, f"{where}: lost {sorted(durable - maybe - there)}"
        for version in sorted(there):
            found = checkpointer.restart(version)
            for region, array in found.items():
                assert np.array_equal(array, content(version, region)), (where, version, region)
            assert set(found) == set(SIZES), where
    with Directory(path, writable=False) as directory:
        files = list((path / "default").glob("rank-*/*"))
        assert len(files) == 2 * len(directory.versions("default")), f"{where}: leftovers {files}"
    return there


@pytest.mark.timeout(600 + KILLS)
def test_no_durable_version_is_lost_to_kills_of_the_checkpointer(tmp_path: Path) -> None:
    durable: set[int] = set()
    maybe: set[int] = set()
    early = reported = 0
    for kill in range(KILLS):
        chooser = random.Random(f"checkpointer {kill}")
        events = run_and_kill(tmp_path, chooser)
        early += not events
        durable |= {version for kind, version in events if kind == "durable"}
        maybe = {version for kind, version in events if kind == "discard"}
        reported += len([kind for kind, _ in events if kind == "durable"])
        durable = check(tmp_path, durable, maybe, f"kill {kill}")
    print(f"{KILLS} kills, {early} before a first durable version, {reported} reported durable")
    assert reported > KILLS / 4


# Several ranks. A version has the number of the run that wrote it, so that parts of two runs in one
# version show.

RANKS = 2


def use_with_others(path: Path, pipe: int, rank: int, run: int) -> None:
    config = {"ranks": RANKS, "timeout_s": 20, "retry_s": 0.02}
    checkpointer = Checkpointer(path, "cpu", 0, "4 MiB", rank=rank, config=config)
    state = np.zeros(5000, np.int64)
    checkpointer.protect("state", state)
    newest = checkpointer.test()
    version = 0 if newest is None else newest + 1
    pending = []
    while True:
        state[:] = 1_000_000 * run + 10 * version + rank
        pending.append(checkpointer.checkpoint(version))
        version += 1
        while len(pending) > 3 or (pending and pending[0].done()):
            saved = pending.pop(0)
            if saved.exception(30) is None:  # else another rank was killed
                os.write(pipe, b"durable %d\n" % saved.result(0))


def run_ranks(path: Path, chooser: random.Random, run: int) -> list[set[int]]:
    """Run all ranks, kill them one after the other; return what each has called durable."""
    children, pipes = [], []
    for rank in range(RANKS):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                use_with_others(path, writing, rank, run)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        os.close(writing)
        children.append(child)
        pipes.append(reading)
    time.sleep(0.1 + chooser.random() * 0.6)
    for rank in chooser.sample(range(RANKS), RANKS):
        os.kill(children[rank], signal.SIGKILL)
        time.sleep(chooser.choice((0, 0.01, 0.1)))
    durable = []
    for child, pipe in zip(children, pipes, strict=True):
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child ended by itself"
        reports = b""
        while piece := os.read(pipe, 4096):
            reports += piece
        os.close(pipe)
        durable.append({int(line.split()[1]) for line in reports.splitlines()})
    return durable


def check_ranks(path: Path, durable: set[int], where: str) -> set[int]:
    """Check all versions of all ranks; return those that are there, after the old ones are gone."""
    config = {"ranks": RANKS, "timeout_s": 20}
    with contextlib.ExitStack() as held:
        ranks = [
            held.enter_context(Checkpointer(path, "cpu", 0, "1 MiB", rank=rank, config=config))
            for rank in range(RANKS)
        ]
        there = ranks[0].versions()
        assert durable <= set(there), f"{where}: lost {sorted(durable - set(there))}"
        for rank in ranks:
            assert rank.versions() == there, where
            assert rank.test() == max(there, default=None), where
        for version in there:
            runs = set()
            for rank, checkpointer in enumerate(ranks):
                state = checkpointer.restart(version)["state"]
                run, rest = divmod(int(state[0]), 1_000_000)
                assert (state == state[0]).all(), where
                assert rest == 10 * version + rank, where
                runs.add(run)
            assert len(runs) == 1, f"{where}: version {version} has parts of runs {runs}"
        for version in there[:-KEPT]:
            for checkpointer in ranks:
                checkpointer.discard(version)
    return set(there[-KEPT:])


@pytest.mark.timeout(600 + 2 * KILLS)
def test_kills_of_ranks_leave_versions_of_all_ranks_or_none(tmp_path: Path) -> None:
    durable: set[int] = set()
    count = 0
    for kill in range(max(KILLS // 4, 1)):
        reported = run_ranks(tmp_path, random.Random(f"ranks {kill}"), kill)
        count += sum(map(len, reported))
        durable = check_ranks(tmp_path, durable.union(*reported), f"kill {kill}")
    print(f"{RANKS * max(KILLS // 4, 1)} kills of ranks, {count} reported durable")
    assert count > 0


def test_the_suite_notices_versions_that_are_called_durable_too_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Storing._write

    def early(self: Storing, entry: Entry, *arguments: Any) -> bool:
        with self._core.changed:
            self._core.stored_now(entry)
        return real(self, entry, *arguments)

    monkeypatch.setattr(Storing, "_write", early)

    def run() -> None:
        for kill in range(40):
            events = run_and_kill(tmp_path, random.Random(f"early {kill}"))
            durable = {version for kind, version in events if kind == "durable"}
            maybe = {version for kind, version in events if kind == "discard"}
            check(tmp_path, durable, maybe, f"kill {kill}")

    with pytest.raises(AssertionError, match="lost"):
        run()
