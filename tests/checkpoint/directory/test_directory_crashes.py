"""Power cuts and kill -9 at any point: no committed version is lost, and no wrong byte accepted.

FLASHWARP_KILLS says how many processes are killed, default 40; FLASHWARP_POWER_CUTS how many random
cuts follow each system call, default 5.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_journal import Journal
from versions import CHUNK, bytes_of, regions_of, store

from flashwarp.checkpoint.directory import Directory, directory, writer
from flashwarp.checkpoint.region import Region
from flashwarp.errors import FlashwarpError
from flashwarp.testing import KillSuite

KILLS = int(os.environ.get("FLASHWARP_KILLS", "40"))
CUTS = int(os.environ.get("FLASHWARP_POWER_CUTS", "5"))

# Power cuts.

SIZES = (700, CHUNK + 600)


def history(found: Directory, journal: Journal) -> None:
    """Commit, replace, discard and abort; marks say what is sure from then on."""
    store(found, 1, *SIZES)
    journal.mark(1)
    store(found, 2, *SIZES)
    journal.mark(2)
    with found.begin("run", 3, regions_of(*SIZES)) as aborted:
        aborted.write("r0", 0, bytes(100))
    with found.begin("run", 2, regions_of(900), replace=True) as replaced:
        replaced.write("r0", 0, bytes_of(77, 900))
        replaced.commit()
    journal.mark(3)
    store(found, 3, *SIZES)
    journal.mark(4)
    found.discard("run", 1)
    journal.mark(5)
    found.prune("run", 1)
    journal.mark(6)


def contents(found: Directory) -> dict[int, str]:
    """What each version holds: "stored", "replaced", or the problem."""
    result = {}
    for each in found.examine("run", verify=True):
        if each.problem:
            result[each.version] = each.problem
            continue
        with found.open("run", each.version) as reader:
            loaded = [reader.load(region).tolist() for region in reader.regions]
        wanted = [bytes_of(1000 * each.version + i, n).tolist() for i, n in enumerate(SIZES)]
        replaced = [bytes_of(77, 900).tolist()]
        assert loaded in (wanted, replaced), f"version {each.version} holds what nobody wrote"
        result[each.version] = "stored" if loaded == wanted else "replaced"
    return result


S, R = "stored", "replaced"
ALLOWED: dict[int, list[dict[int, str]]] = {
    0: [{}, {1: S}],
    1: [{1: S}, {1: S, 2: S}],
    2: [{1: S, 2: S}, {1: S, 2: R}],
    3: [{1: S, 2: R}, {1: S, 2: R, 3: S}],
    4: [{1: S, 2: R, 3: S}, {2: R, 3: S}],
    5: [{2: R, 3: S}, {3: S}],
    6: [{3: S}],
}
"""By the last mark: what the version before it and the operation after it may leave."""


def record(root: Path) -> Journal:
    root.mkdir()
    journal = Journal(root)
    with pytest.MonkeyPatch.context() as patch:
        journal.record(patch)
        with Directory(root, chunk_bytes=CHUNK) as found:
            history(found, journal)
    return journal


def run_power_cuts(path: Path, each: int, seed: int) -> int:
    """Check what `each` + 2 cuts after every call leave; return how many differed."""
    journal = record(path / "recorded")
    seen = set()
    for tree in journal.trees(each, seed):
        place = path / "cut"
        tree.make(place)
        files = [(str(p), p.is_file() and p.read_bytes()) for p in place.rglob("*")]
        state = (tree.mark, tuple(sorted(files)))
        if state not in seen:
            seen.add(state)
            check_cut(place, tree.mark, f"seed {seed}, power cut after call {tree.position}")
        shutil.rmtree(place)
    return len(seen)


def check_cut(place: Path, mark: int, where: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # No further cut comes, so nothing needs to be durable.
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(writer.File, "flush", lambda self: None)
        with Directory(place, writable=False, o_direct=False) as found:
            assert contents(found) in ALLOWED[mark], where
        with Directory(place, chunk_bytes=CHUNK, o_direct=False) as found:
            left = contents(found)
            assert left in ALLOWED[mark], where
            names = sorted(p.name for p in place.glob("run/*/*"))
            assert len(names) == 2 * len(left), f"{where}: leftovers in {names}"
            store(found, 9, *SIZES)
            assert contents(found) == {**left, 9: S}, where


@pytest.mark.parametrize("seed", range(2))
def test_power_cut_at_any_point_loses_nothing(tmp_path: Path, seed: int) -> None:
    assert run_power_cuts(tmp_path, CUTS, seed) > 50


# The suite notices what it is for.


def test_missing_sync_of_data_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = writer.VersionWriter._prepare

    def prepare(self: Any, regions: Any) -> None:
        self._file.flush = lambda: None
        real(self, regions)

    monkeypatch.setattr(writer.VersionWriter, "_prepare", prepare)
    with pytest.raises(AssertionError, match="power cut after"):
        run_power_cuts(tmp_path, 6, 0)


@pytest.mark.parametrize("module", [writer, directory], ids=["commit", "discard"])
def test_missing_sync_of_names_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    monkeypatch.setattr(module, "sync_folder", lambda folder: None)
    with pytest.raises(AssertionError, match="power cut after"):
        run_power_cuts(tmp_path, 6, 0)


def test_removal_in_the_wrong_order_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def discard_all(self: Directory, name: str, versions: Any) -> list[int]:
        folder = self._folder(name)
        for version in (found := list(versions)):
            for file in sorted(folder.glob(f"{version:019d}*")):
                file.unlink()
        return found

    monkeypatch.setattr(Directory, "discard_all", discard_all)
    with pytest.raises(AssertionError, match="power cut after"):
        run_power_cuts(tmp_path, 6, 0)


# Failures of every call.

CALLS = ("open", "write", "fsync", "mkdir", "link", "replace", "unlink")


class FailingCall:
    """Lets the n-th system call fail, in the order in which they come."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path, number: int, error: int) -> None:
        self.calls = 0
        self.failed = ""
        for name in CALLS:
            self._patch(patch, root, name, number, error)
        for name in ("write", "flush"):
            self._patch(patch, root, name, number, error, writer.File)

    def _patch(
        self,
        patch: pytest.MonkeyPatch,
        root: Path,
        name: str,
        number: int,
        error: int,
        place: Any = os,
    ) -> None:
        real = getattr(place, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == number:
                self.failed = name
                raise OSError(error, os.strerror(error), str(root))
            return real(*arguments, **options)

        patch.setattr(place, name, call)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_failure_of_any_call_loses_nothing(tmp_path: Path, error: int) -> None:
    failed: list[str] = []
    for number in range(1, 1000):
        root = tmp_path / str(number)
        root.mkdir()
        reached = [0]
        journal = Journal(root)
        journal.mark = reached.append  # type: ignore[method-assign]
        with Directory(root, chunk_bytes=CHUNK) as found, pytest.MonkeyPatch.context() as patch:
            failing = FailingCall(patch, root, number, error)
            try:
                history(found, journal)
            except FlashwarpError:
                assert failing.failed
            except OSError:
                # Patched above the layer that makes errors of transfers ours.
                assert failing.failed in ("write", "flush")
        where = f"call {number}, {failing.failed}, after mark {reached[-1]}"
        for writable in (False, True):
            with Directory(root, chunk_bytes=CHUNK, writable=writable) as found:
                left = contents(found)
                assert left in ALLOWED[reached[-1]], where
        with Directory(root, chunk_bytes=CHUNK) as found:
            store(found, 9, *SIZES)
            assert contents(found) == {**left, 9: S}, where
        shutil.rmtree(root)
        if not failing.failed:
            break
        failed.append(failing.failed)
    assert len(failed) > 40
    assert {*CALLS, "flush"} == set(failed)


# Kill -9.


class Subject:
    """Elements as versions of a checkpoint, beside another that is discarded at once."""

    def __init__(self, path: Path, count: int) -> None:
        self.directory = Directory(path, chunk_bytes=CHUNK)
        newest = self.directory.latest("run", verify=True)
        self.version = newest or 0
        self.values = np.zeros(count, np.int64)
        if newest is not None:
            with self.directory.open("run", newest) as reader:
                self.values = reader.load("values")


class TestKilledDirectory(KillSuite):
    element_count = 3000
    seeds = (1, 2, 3, 4)
    kill_after_commits_max = 4
    kill_after_s_max = 0.03
    keep_last = 2
    keep_every = 5

    def create(self, path: Path) -> None:
        path.mkdir()

    def open(self, path: Path) -> Subject:
        return Subject(path, self.element_count)

    def store(self, subject: Subject, changes: Mapping[int, int]) -> None:
        subject.values[list(changes)] = list(changes.values())

    def commit(self, subject: Subject) -> None:
        found, values = subject.directory, subject.values
        subject.version += 1
        region = Region("values", values.dtype.str, values.shape, values.nbytes)
        with found.begin("run", subject.version, [region]) as begun:
            half = values.nbytes // 2
            begun.write(region, half, values.view("u1")[half:])
            begun.write(region, 0, values.view("u1")[:half])
            begun.commit()
        found.prune("run", self.keep_last, self.keep_every)
        store(found, subject.version, 100, name="other", replace=True)
        found.discard("other", subject.version)

    def load(self, subject: Subject) -> Sequence[int]:
        found, newest = subject.directory, subject.version
        kept = {v for v in range(1, newest + 1) if self.is_kept(v, newest)}
        assert kept <= set(found.versions("run"))
        for name in ("run", "other"):
            problems = [each.problem for each in found.examine(name, verify=True)]
            assert not any(problems)
            files = [each.name for each in found.path.glob(f"{name}/*/*")]
            assert len(files) == 2 * len(found.versions(name)), f"leftovers in {files}"
        return list(subject.values.tolist())

    def close(self, subject: Subject) -> None:
        subject.directory.close()

    def is_kept(self, version: int, newest: int) -> bool:
        return version > newest - self.keep_last or version % self.keep_every == 0


def test_one_directory_survives_kills_at_random_times(tmp_path: Path) -> None:
    """Kills forked children, because these die within milliseconds of their start too."""
    suite = TestKilledDirectory()
    suite.keep_every = 200
    expected = {0: np.zeros(suite.element_count, np.int64)}
    newest = early = 0
    for kill in range(KILLS):
        chooser = random.Random(f"kill {kill}")
        reported = fork_and_kill(suite, tmp_path, chooser)
        early += not reported
        assert reported == list(range(newest + 1, newest + 1 + len(reported)))
        surely = newest + len(reported)
        while max(expected) <= surely:
            version = max(expected) + 1
            expected[version] = expected[version - 1].copy()
            changes = suite.changes(version, 0)
            expected[version][list(changes)] = list(changes.values())

        subject = suite.open(tmp_path)
        where = f"kill {kill}, after version {surely}"
        try:
            newest = subject.version
            assert newest in (surely, surely + 1), where
            loaded = suite.load(subject)
            assert np.array_equal(loaded, expected[newest]), where
            there = subject.directory.versions("run")
            for version in [*there[-4:], *chooser.sample(there, min(1, len(there)))]:
                with subject.directory.open("run", version) as reader:
                    assert np.array_equal(reader.load("values"), expected[version]), where
        finally:
            suite.close(subject)
        # What is kept for good, and what the next check looks at.
        expected = {
            v: x for v, x in expected.items() if v >= newest - 8 or v % suite.keep_every == 0
        }
    print(f"{KILLS} kills, {early} of them before a first commit; {newest} versions committed")


def fork_and_kill(suite: TestKilledDirectory, path: Path, chooser: random.Random) -> list[int]:
    """Let a child commit until it is killed; return the versions that it has reported."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            subject = suite.open(path)
            while True:
                suite.store(subject, suite.changes(subject.version + 1, 0))
                suite.commit(subject)
                os.write(writing, b"%d\n" % subject.version)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(writing)
    wait_for = chooser.choice((0, 0, 1, 2))
    reports = b""
    while reports.count(b"\n") < wait_for and (piece := os.read(reading, 4096)):
        reports += piece
    time.sleep(chooser.random() * 0.03)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child ended by itself"
    while piece := os.read(reading, 4096):
        reports += piece
    os.close(reading)
    return [int(line) for line in reports.split()]
