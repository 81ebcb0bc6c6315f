"""Kill -9 of a process that runs a checkpointer, at random times: no durable version is lost.

Children checkpoint, restart, prefetch and discard, and report through a pipe which versions were
durable. The parent kills each, opens the folder, and checks every byte of every version. Others
write few numbers again and again, beside stores that refuse, lose answers or are full: no place may
give another version of a number than the last.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwarp.checkpoint.checkpointer import Checkpointer
from flashwarp.checkpoint.directory import Directory
from flashwarp.checkpoint.storing import Storing
from flashwarp.checkpoint.tier import Entry
from flashwarp.errors import MissingVersionError, PathError, RemoteError

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
    seed = chooser.randrange(1 << 30)
    return killed_after(chooser, lambda pipe: use(path, pipe, seed))


def killed_after(
    chooser: random.Random, run: Callable[[int], None], waits: tuple[int, ...] = (0, 0, 1, 3, 8)
) -> list[Any]:
    """Run a child until it is killed; return the events that it has reported."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run(writing)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(writing)
    reports = reported_lines(reading, chooser.choice(waits))
    time.sleep(chooser.random() * 0.04)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child ended by itself"
    while piece := os.read(reading, 4096):
        reports += piece
    os.close(reading)
    lines = [line.split() for line in reports.decode().splitlines()]
    return [(kind, *map(int, numbers)) for kind, *numbers in lines]


def reported_lines(pipe: int, count: int) -> bytes:
    """Read a child's reports until there are so many lines, or the child has ended."""
    reports = b""
    while reports.count(b"\n") < count and (piece := os.read(pipe, 4096)):
        reports += piece
    return reports


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
    # The first one's reports say when, not the clock: a busy machine takes seconds to begin.
    first = reported_lines(pipes[0], chooser.choice((0, 1, 3, 8)))
    time.sleep(0.1 + chooser.random() * 0.3)
    for rank in chooser.sample(range(RANKS), RANKS):
        os.kill(children[rank], signal.SIGKILL)
        time.sleep(chooser.choice((0, 0.01, 0.1)))
    durable = []
    for child, pipe in zip(children, pipes, strict=True):
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child ended by itself"
        reports = first if pipe == pipes[0] else b""
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


# Versions that are written again, and stores that fail for a while. The contents of a version are
# the count of all that were written, so an old copy shows.

NUMBERS = 4
REWRITE_KILLS = max(KILLS // 2, 1)


def break_stores(checkpointer: Checkpointer, chooser: random.Random) -> None:
    """Let the folder be full now and then, and the second store refuse, or lose its answer."""

    def failing(act: Callable[..., Any], share: float, error: Callable[[], Exception]) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            lot = chooser.random()
            if lot < share:
                raise error()
            found = act(*arguments, **options)
            if lot < 2 * share and act.__name__ != "begin":
                raise error()  # it is done, and nobody knows
            return found

        return call

    system = checkpointer._system
    full, refused = partial(PathError, errno.ENOSPC, "full", "x"), partial(RemoteError, "refused")
    directory: Any = system.directory
    directory.begin = failing(directory.begin, 0.1, full)
    for name in ("upload", "discard_all"):
        setattr(system.remote, name, failing(getattr(system.remote, name), 0.25, refused))


def rewrite(path: Path, pipe: int, seed: int, run: int) -> None:
    """Write, rewrite and discard until killed; each line of the pipe is what happened last."""
    chooser = random.Random(seed)
    checkpointer = opened_with_remote(path)
    break_stores(checkpointer, chooser)
    state = np.zeros(chooser.choice([50, 5000]), np.int64)
    checkpointer.protect("state", state)
    for count in itertools.count(10_000_000 * run):
        version = chooser.randrange(NUMBERS)
        with contextlib.suppress(MissingVersionError, RemoteError):
            os.write(pipe, b"discard %d %d\n" % (version, count))
            checkpointer.discard(version)
        state[:] = count
        os.write(pipe, b"begin %d %d\n" % (version, count))
        saved = checkpointer.checkpoint(version)
        with contextlib.suppress(PathError):
            os.write(pipe, b"durable %d %d\n" % (saved.result(60), count))
        if chooser.random() < 0.3 and version in checkpointer.versions():
            with contextlib.suppress(RemoteError, PathError):
                checkpointer.wait(version, tier="remote")
                os.write(pipe, b"remote %d %d\n" % (version, count))
        if chooser.random() < 0.3:
            for each in checkpointer.versions():
                size = checkpointer.recover_size(each, "state") // 8
                found = checkpointer.restart(each, into={"state": np.zeros(size, np.int64)})
                assert len(set(found["state"])) == 1


def opened_with_remote(path: Path) -> Checkpointer:
    config = {"timeout_s": 60, "retry_s": 0.005}
    caches = ("64 KiB", "128 KiB")
    return Checkpointer(path / "local", "cpu", *caches, path / "remote", 0, config)


class Contents:
    """Which contents each number may have: after its last event, and those of its last durable."""

    def __init__(self) -> None:
        self.local: dict[int, set[int | None]] = {n: {None} for n in range(NUMBERS)}
        self.remote: dict[int, set[int | None]] = {n: {None} for n in range(NUMBERS)}

    def note(self, event: str, version: int, count: int) -> None:
        for place, settles in ((self.local, ("durable", "remote")), (self.remote, ("remote",))):
            if event == "discard":
                place[version] = place[version] | {None}
            elif event == "begin":
                place[version] = place[version] | {count}
            elif event in settles:
                place[version] = {count}
        # Once a version is durable here, the older ones are gone here, and may be there.

    def check(self, checkpointer: Checkpointer, place: str, why: str) -> None:
        """Check that each number has what it may have in `place`, "local" or "remote"."""
        may = self.local if place == "local" else self.remote
        there = checkpointer.versions()
        for version in range(NUMBERS):
            found: int | None = None
            if version in there:
                state = checkpointer.restart(version)["state"]
                assert len(set(state)) == 1, why
                found = int(state[0])
            assert found in may[version], f"{why}: version {version} is {found}, not of {may}"


@pytest.mark.timeout(600 + 4 * REWRITE_KILLS)
def test_no_store_gives_an_older_version_of_a_number_after_kills(tmp_path: Path) -> None:
    contents, durable = Contents(), 0
    for kill in range(REWRITE_KILLS):
        chooser = random.Random(f"rewrites {kill}")
        seed = chooser.randrange(1 << 30)
        run = partial(rewrite, tmp_path, seed=seed, run=kill)
        events = killed_after(chooser, run, waits=(0, 10, 40, 120))
        for kind, version, count in events:
            contents.note(kind, version, count)
            durable += kind == "durable"
        where = f"kill {kill}"
        with opened_with_remote(tmp_path) as checkpointer:
            contents.check(checkpointer, "local", where)
            checkpointer.wait(tier="remote")
            there = checkpointer.versions()
            identities = {n: checkpointer._system.directory.identity("default", n) for n in there}
            remote = checkpointer._system.remote
            assert identities == {n: remote.identity("default", n) for n in there}, where
            now = {n: int(checkpointer.restart(n)["state"][0]) for n in there}
        contents.local = {n: {now.get(n)} for n in range(NUMBERS)}
        contents.remote = {n: {now.get(n)} for n in range(NUMBERS)}
        if chooser.random() < 0.3:  # the disk is lost
            shutil.rmtree(tmp_path / "local")
            with opened_with_remote(tmp_path) as checkpointer:
                contents.check(checkpointer, "remote", f"{where}, then a loss of the disk")
                checkpointer.wait(tier="remote")
    print(f"{REWRITE_KILLS} kills, {durable} reported durable")
    assert durable > REWRITE_KILLS / 2


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
