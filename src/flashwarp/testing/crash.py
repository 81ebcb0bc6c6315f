"""Suites that cut the power and kill the process, for whatever stores and commits.

A subclass says how its subject is made, opened, written, committed and read back; the suites do the
rest, and assert the invariant of all of flashwarp: after a commit has returned nothing of it is
lost; before, each element is old or new, and never something else.
"""

from __future__ import annotations

import inspect
import os
import random
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from flashwarp.errors import FlashwarpError
from flashwarp.storage import Memory, Storage
from flashwarp.testing.faults import Faulty
from flashwarp.testing.recording import Recording

_ELEMENT_BITS = 32


class _Versions(ABC):
    """Numbered elements, each of which holds an integer that tells its version and its place."""

    element_count: ClassVar[int] = 256
    """Elements of the subject; 0 before the first version. Each must lie within a sector."""

    versions: ClassVar[int] = 6
    """How often the suite stores and commits."""

    @abstractmethod
    def store(self, subject: Any, changes: Mapping[int, int]) -> None:
        """Store values by element; they need not be durable yet."""

    @abstractmethod
    def commit(self, subject: Any) -> None:
        """Return when all that was stored is safe; raise a FlashwarpError when it is not."""

    @abstractmethod
    def load(self, subject: Any) -> Sequence[int]:
        """Return the values of all elements."""

    @abstractmethod
    def close(self, subject: Any) -> None:
        """Release the subject."""

    def changes(self, version: int, seed: int) -> dict[int, int]:
        """Choose what a version stores; a function of its arguments alone."""
        chooser = random.Random(f"{seed}/{version}")
        count = chooser.randint(1, self.element_count)
        if chooser.random() < 0.5:
            start = chooser.randrange(self.element_count)
            elements = [(start + i) % self.element_count for i in range(count)]
        else:
            elements = chooser.sample(range(self.element_count), count)
        return {element: version << _ELEMENT_BITS | element for element in elements}

    def check(
        self,
        loaded: Sequence[int],
        sure: Collection[int],
        maybe: Collection[int],
        seed: int,
        where: str,
    ) -> None:
        """Assert that all of the versions `sure` is there, and of those in `maybe` any element."""
        assert len(loaded) == self.element_count, f"{where}: {len(loaded)} elements"
        allowed = [{0} for _ in range(self.element_count)]
        for version in sorted({*sure, *maybe}):
            for element, value in self.changes(version, seed).items():
                allowed[element] = {value, *(allowed[element] if version in maybe else ())}
        for element, value in enumerate(loaded):
            assert int(value) in allowed[element], (
                f"{where}: element {element} holds {_told(int(value))}, not one of "
                f"{sorted(map(_told, allowed[element]))}"
            )


def _told(value: int) -> str:
    version, element = value >> _ELEMENT_BITS, value & ((1 << _ELEMENT_BITS) - 1)
    return f"version {version} of element {element}" if value else "nothing"


class CrashSuite(_Versions):
    """Cuts the power at any point between two commits, and after failed ones.

    pytest runs the `test_` methods of a subclass. Seeds are fixed, and a failure names its own;
    `seeds` of a subclass may ask for more.

    Examples
    --------
    >>> import numpy as np, flashwarp as fw
    >>> from flashwarp.testing import CrashSuite
    >>> class TestArrays(CrashSuite):
    ...     def open(self, storage):
    ...         return fw.open(storage, "r+", "i8", 256, device="cpu", line=512, cache=2048)
    ...     def store(self, x, changes):
    ...         x.scatter(np.array(list(changes)), np.array(list(changes.values())))
    ...     def commit(self, x):
    ...         x.flush()
    ...     def load(self, x):
    ...         return x[...].tolist()
    ...     def close(self, x):
    ...         x.close()
    >>> TestArrays().test_power_cut()
    """

    storage_nbytes: ClassVar[int] = 2048
    """Size of the storage, which begins as zeros. Small: images of all of it are made."""

    seeds: ClassVar[Sequence[int]] = (1, 2, 3)
    states_max: ClassVar[int] = 150
    """Images that are opened for each seed and test."""

    failing_plans: ClassVar[Sequence[str]] = (
        "flush eio n=2",
        "write eio p=0.05",
        "write torn p=0.1",
        "write enospc n=3,4; flush enospc n=3",
    )
    """What `test_power_cut_after_failures` makes happen, as `FaultPlan` reads it."""

    def prepare(self, storage: Storage) -> None:
        """Write what `open` needs to find; by default nothing."""

    @abstractmethod
    def open(self, storage: Storage) -> Any:
        """Open the subject for reading and writing, repairing what a crash left."""

    def test_power_cut(self) -> None:
        """Nothing committed is lost, and nothing else appears."""
        for seed in self.seeds:
            self._run("", seed)

    def test_power_cut_after_failures(self) -> None:
        """A commit that failed promised nothing; one that succeeds afterwards promises all."""
        for plan in self.failing_plans:
            for seed in self.seeds:
                self._run(plan, seed)

    def _run(self, plan: str, seed: int) -> None:
        faulty = Faulty(Memory(self.storage_nbytes), blocking=True)
        self.prepare(faulty)
        faulty.inject(f"seed={seed}; {plan}")
        storage = Recording(faulty)
        subject = self.open(storage)
        commits = [0]
        half_stored = set()
        for version in range(1, self.versions + 1):
            if not self._stores(subject, version, seed):
                half_stored.add(version)
            # A failed commit may be tried again.
            if any(self._attempt(lambda: self.commit(subject)) for _ in range(3)):
                commits.append(version)
                storage.mark(version)
        # What is stored and not committed when the power goes.
        begun = self.versions + 1
        self._attempt(lambda: self.store(subject, self.changes(begun, seed)))
        states = list(storage.crash_states(self.states_max, seed))
        faulty.heal()
        self._attempt(lambda: self.close(subject))
        assert plan or len(commits) == self.versions + 1, "a commit failed without a fault"
        following = dict(zip(commits, [*commits[1:], begun], strict=True))
        for state in states:
            where = f"seed {seed}, faults '{plan}', power cut before event {state.position}"
            pending = range(state.mark + 1, following[state.mark] + 1)
            partly = {version for version in half_stored if version <= state.mark}
            sure = {*range(1, state.mark + 1)} - partly
            again = self.open(Memory(bytearray(state.image)))
            try:
                self.check(self.load(again), sure, partly | {*pending}, seed, where)
            finally:
                self.close(again)

    def _stores(self, subject: Any, version: int, seed: int) -> bool:
        """Store a version, trying again once; a failure may leave each element old or new."""
        return any(
            self._attempt(lambda: self.store(subject, self.changes(version, seed)))
            for _ in range(2)
        )

    @staticmethod
    def _attempt(act: Callable[[], None]) -> bool:
        try:
            act()
        except FlashwarpError:
            return False
        return True


class KillSuite(_Versions):
    """Kills a process that stores and commits, and looks at what is left.

    The page cache outlives a process, so this is about our own write-back: what was reported as
    committed must have left the process. The child imports the file of the subclass by its path;
    that file must be importable alone.
    """

    versions: ClassVar[int] = 100_000
    """How often the child stores and commits at most: it is killed long before."""

    seeds: ClassVar[Sequence[int]] = (1, 2, 3, 4)

    kill_after_commits_max: ClassVar[int] = 12
    kill_after_s_max: ClassVar[float] = 0.004
    """The kill comes a random time after a random commit, so that it hits every phase."""

    @abstractmethod
    def create(self, path: Path) -> None:
        """Make the subject's file or folder."""

    @abstractmethod
    def open(self, path: Path) -> Any:
        """Open the subject for reading and writing."""

    def test_killed_process_loses_nothing_it_reported(self, tmp_path: Path) -> None:
        """What was reported is there; of the version after it, each element is old or new."""
        for seed in self.seeds:
            path = tmp_path / f"seed{seed}"
            self.create(path)
            reported = self._run_and_kill(path, seed)
            subject = self.open(path)
            try:
                where = f"seed {seed}, killed after version {reported}"
                sure = range(1, reported + 1)
                self.check(self.load(subject), sure, [reported + 1], seed, where)
            finally:
                self.close(subject)

    def _run_and_kill(self, path: Path, seed: int) -> int:
        """Return the last version that the child reported before it was killed."""
        chooser = random.Random(seed)
        wait_for = chooser.randint(1, self.kill_after_commits_max)
        then_wait_s = chooser.random() * self.kill_after_s_max
        kind = type(self)
        command = [sys.executable, "-m", "flashwarp.testing.killed", inspect.getfile(kind)]
        with subprocess.Popen(
            [*command, kind.__qualname__, str(path), str(seed)],
            stdout=subprocess.PIPE,
            # What the file imports here, it finds there.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ) as child:
            output = child.stdout
            assert output is not None
            reports = b""
            while reports.count(b"\n") < wait_for:
                piece = os.read(output.fileno(), 4096)
                assert piece, f"seed {seed}: the child ended by itself after {reports!r}"
                reports += piece
            time.sleep(then_wait_s)
            child.kill()
            # What the child wrote before it died is still in the pipe.
            reports += output.read()
        lines = reports.split(b"\n")[:-1]
        assert lines == [str(i + 1).encode() for i in range(len(lines))], reports
        return len(lines)

    def run_child(self, path: Path, seed: int) -> None:
        """Store and commit until killed, reporting each version; runs in the child."""
        subject = self.open(path)
        for version in range(1, self.versions + 1):
            self.store(subject, self.changes(version, seed))
            self.commit(subject)
            os.write(sys.stdout.fileno(), b"%d\n" % version)
