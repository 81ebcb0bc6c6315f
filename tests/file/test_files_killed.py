"""Processes that append, import, rewrite and cut files, and are killed at any moment.

What a process has reported is there, at most one call after it is, and nothing else is. How many
processes are killed: FLASHWARP_KILLS, for each of the suites.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.file.gvdk import Gvdk
from flashwarp.testing import KillSuite

KILLS = int(os.environ.get("FLASHWARP_KILLS", "2"))
ROOM = 256 << 10
pytestmark = pytest.mark.timeout(120 + 15 * KILLS)


class Killed(KillSuite):
    """One call a version; what it leaves is a number of versions, or of the last."""

    seeds = range(1, KILLS + 1)
    kill_after_commits_max = 6
    kill_after_s_max = 0.03

    def open(self, path: Path) -> Path:
        return path

    def close(self, subject: Path) -> None:
        leftovers = [each.name for each in subject.parent.iterdir()]
        drafts = [name for name in leftovers if name.startswith(".flashwarp-")]
        assert len(drafts) <= len(self.seeds)

    def changes(self, version: int, seed: int) -> dict[int, int]:
        return {version: seed}

    def commit(self, subject: Path) -> None:
        """Do nothing: the call has ended."""


def record_of(version: int, seed: int) -> bytes:
    """Return bytes of a length of their own, which tell whether all of them are there."""
    body = random.Random(f"{seed}/{version}").randbytes(version * 977 % 5000 + 20).hex().encode()
    return b"<%d:%d:%s:%d>" % (seed, version, body, zlib.crc32(body))


RECORD = re.compile(rb"<(\d+):(\d+):([0-9a-f]+):(\d+)>")


def records_in(data: bytes) -> list[tuple[int, int]]:
    """Return author and number of all whole records, in their order."""
    return [
        (int(found[1]), int(found[2]))
        for found in RECORD.finditer(data)
        if zlib.crc32(found[3]) == int(found[4])
    ]


class Appends(Killed):
    options: ClassVar[dict[str, Any]]

    def create(self, path: Path) -> None:
        fw.File.create(path, 0, capacity=16 << 20, device="cpu", **self.options).close()

    def store(self, subject: Path, changes: Mapping[int, int]) -> None:
        (version, seed), room = next(iter(changes.items())), {}
        if not self.options:
            room = {"capacity": os.stat(subject).st_size + ROOM}
        with fw.File.open(subject, "r+", device="cpu", cache="64 KiB", **room) as f:
            f.append(record_of(version, seed))

    def load(self, subject: Path) -> Sequence[int]:
        with fw.File.open(subject, device="cpu", cache="64 KiB") as f:
            return [number for _, number in records_in(f.read(0, f.size))]

    def check(
        self, loaded: Sequence[int], sure: Collection[int], maybe: Collection[int], seed: int,
        where: str,
    ) -> None:  # fmt: skip
        assert loaded in (list(sure), [*sure, *maybe]), where


class TestKilledAppends(Appends):
    options: ClassVar[dict[str, Any]] = {}


class TestKilledAppendsToImages(Appends):
    options: ClassVar[dict[str, Any]] = {"format": "gvdk"}


class Whole(Killed):
    """Each version is all of the file."""

    def check(
        self, loaded: Sequence[int], sure: Collection[int], maybe: Collection[int], seed: int,
        where: str,
    ) -> None:  # fmt: skip
        assert loaded[0] in (len(sure), *maybe), where


class TestKilledImports(Whole):
    def create(self, path: Path) -> None:
        self.store(path, {0: 0})

    def store(self, subject: Path, changes: Mapping[int, int]) -> None:
        ((version, seed),) = changes.items()
        source = subject.with_suffix(".source")
        np.full(200_000 + version, version, "i8").tofile(source)
        Gvdk.import_(source, subject, overwrite=True, preallocate=bool(seed % 2))

    def load(self, subject: Path) -> Sequence[int]:
        with Gvdk(subject) as image:
            assert image.recovered is None
            values = np.frombuffer(image.read(0, image.size), "i8")
        version = int(values[0])
        assert len(values) == 200_000 + version
        assert (values == version).all()
        return [version]


class TestKilledRewrites(Whole):
    """`File.create` in place of a file, which is then written and cut."""

    def create(self, path: Path) -> None:
        self.store(path, {0: 0})

    def store(self, subject: Path, changes: Mapping[int, int]) -> None:
        ((version, seed),) = changes.items()
        made = subject.with_suffix(".new")
        kind = {"format": "gvdk", "preallocate": False} if seed % 2 else {}
        with fw.File.create(made, 0, capacity=ROOM, overwrite=True, device="cpu", **kind) as f:
            f.write_from(np.full(20_000, version, "i8"), 0)
            f.truncate(8 * (10_000 + version))
        os.replace(made, subject)
        # What is there while this runs is what was there, or all zeros.
        with fw.File.create(made, "1 MiB", overwrite=True, device="cpu", **kind) as f:
            assert not any(f.read(0, 1 << 20))

    def load(self, subject: Path) -> Sequence[int]:
        with fw.File.open(subject, device="cpu") as f:
            values = np.frombuffer(f.read(0, f.size), "i8")
        version = int(values[0])
        assert len(values) == 10_000 + version
        assert (values == version).all()
        made = subject.with_suffix(".new")
        if made.exists():
            with fw.File.open(made, device="cpu") as f:
                assert f.size <= 1 << 20
        return [version]


APPENDER = """
import sys
import flashwarp as fw
from flashwarp.errors import LockedError
sys.path.insert(0, {folder!r})
from test_files_killed import ROOM, record_of
path, author = sys.argv[1], int(sys.argv[2])
for number in range(int(sys.argv[3]), 1 << 30):
    while True:
        try:
            f = fw.File.open(path, "r+", device="cpu", cache="64 KiB")
            break
        except LockedError:
            pass
    with f:
        f.extend(f.size + ROOM)
        f.append(record_of(number, author))
    print(number, flush=True)
"""


def test_appenders_that_are_killed_beside_others_lose_nothing(tmp_path: Path) -> None:
    """Two authors take turns at one file; each is killed and begins again behind its last."""
    path = tmp_path / "log"
    path.write_bytes(b"")
    at = random.Random(KILLS)
    reported: dict[int, list[int]] = {1: [], 2: []}
    begun = {1: 0, 2: 0}
    script = APPENDER.format(folder=str(Path(__file__).parent))

    def start(author: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, str(path), str(author), str(begun[author])]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with contextlib.ExitStack() as held:
        running = {author: held.enter_context(start(author)) for author in reported}
        held.callback(lambda: [each.kill() for each in running.values()])
        for turn in range(2 * KILLS):
            author = 1 + turn % 2
            victim = running[author]
            assert victim.stdout is not None
            lines = [victim.stdout.readline() for _ in range(at.randint(1, 4))]
            time.sleep(at.random() * 0.05)
            victim.kill()
            lines += victim.stdout.readlines()
            victim.wait()
            numbers = [int(line) for line in lines if line.endswith("\n")]
            reported[author] += numbers
            begun[author] = numbers[-1] + 2  # the next one may be there
            running[author] = held.enter_context(start(author))
        for author, last in running.items():
            last.kill()
            assert last.stdout is not None
            reported[author] += [int(line) for line in last.stdout if line.endswith("\n")]

    found = records_in(path.read_bytes())
    assert len(set(found)) == len(found)
    for author, numbers in reported.items():
        mine = [number for each, number in found if each == author]
        assert mine == sorted(mine)
        assert set(numbers) <= set(mine)
        # One more for each process, which was killed before it could report it.
        assert len(set(mine) - set(numbers)) <= KILLS + 1


@pytest.mark.parametrize("kind", [{}, {"format": "gvdk"}])
def test_a_lock_of_a_killed_process_is_free(tmp_path: Path, kind: dict[str, Any]) -> None:
    path = tmp_path / "f"
    fw.File.create(path, 1000, device="cpu", **kind).close()
    script = f"""
import time, flashwarp as fw
f = fw.File.open({str(path)!r}, "r+", device="cpu")
print("open", flush=True)
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        with pytest.raises(fw.errors.LockedError):
            fw.File.open(path, "r+", device="cpu")
        child.kill()

    with fw.File.open(path, "r+", device="cpu") as f:
        assert f.size == 1000
