"""No cut of the power, and no kill, loses what was synced, and what else was written is named."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from file.gvdk.changes import BESIDE, CAPACITY, END
from file.gvdk.disk_states import content_of, recorded
from flashwarp.file.gvdk import Gvdk

RUNS = int(os.environ.get("FLASHWARP_IMAGE_CRASHES", "2"))
KILLS = int(os.environ.get("FLASHWARP_IMAGE_KILLS", "3"))
SEED = int(os.environ.get("FLASHWARP_IMAGE_SEED", "1"))
WAIT_S = 60


@pytest.mark.parametrize("preallocate", [True, False])
@pytest.mark.parametrize("key", ["", "k" * 32])
def test_no_power_cut_loses_what_was_synced(preallocate: bool, key: str, tmp_path: Path) -> None:
    states = 0
    for run in range(RUNS):
        seed = SEED * 1000 + run * 2 + preallocate
        path = tmp_path / f"{run}.gvdk"
        secret = key.encode() or None
        Gvdk.create(
            path, CAPACITY // 2, capacity=CAPACITY, preallocate=preallocate, key=secret
        ).close()
        printed, record = recorded("file.gvdk.changes", path, seed, key)
        known = [
            (synced, size, bytes.fromhex(model), value)
            for synced, size, model, value in json.loads(printed)
        ]
        cut = tmp_path / "cut.gvdk"
        for content, marks in record.states(1, seed):
            cut.write_bytes(content)
            check_cut(cut, [known[each] for each in marks], secret)
            states += 1
    print(f"{states} states of the disk after cuts of {RUNS} runs")
    assert states > 100 * RUNS


def check_cut(path: Path, marks: list[tuple[bool, int, bytes, int]], key: bytes | None) -> None:
    """An image that was cut off is that of the last sync, but for the ranges that it names."""
    last = next(mark for mark in reversed(marks) if mark[0])
    allowed = [last] if marks[-1][0] else [last, marks[-1]]
    with Gvdk(path, key=key) as image:
        seen = image.recovered
    for writable in (False, True):
        with Gvdk(path, writable=writable, key=key) as image:
            content = content_of(image)
            assert image.recovered == seen
            ranges = seen.ranges if seen is not None else ()
            for _, size, model, _ in allowed:
                if size == image.size and same_outside(content[:BESIDE], model[:BESIDE], ranges):
                    break
            else:
                pytest.fail(f"neither of {len(allowed)} states, of size {image.size}, {seen}")
            # Of what a thread writes meanwhile a sync may have the newer.
            beside = content[BESIDE : BESIDE + 4096]
            named = any(begin < BESIDE + 4096 and end > BESIDE for begin, end in ranges)
            if not named and image.size >= END:
                assert beside == beside[:1] * 4096, "a part of a write, without a mark"
                assert beside[0] >= last[3], "what was synced is lost"
            if writable:
                assert not any("not synced" in each for each in image.verify().problems)
                assert not any(content[image.size :]), "zeros follow the end"
                image.write(0, b"goes on")
                assert image.verify().clean
    with Gvdk(path, key=key) as image:
        assert image.recovered is None
        assert content_of(image) == b"goes on" + content[7:]


def same_outside(content: bytes, model: bytes, ranges: tuple[tuple[int, int], ...]) -> bool:
    """Whether two contents are the same but for some ranges."""
    before = 0
    for begin, end in (*ranges, (len(model), len(model))):
        if content[before:begin] != model[before:begin]:
            return False
        before = end
    return True


WRITER = """
import random, sys
from flashwarp.file.gvdk import Gvdk
path, seed = sys.argv[1], int(sys.argv[2])
chooser = random.Random(seed)
with Gvdk(path, writable=True) as image:
    version = int.from_bytes(image.read(0, 8), "little")
    while True:
        version += 1
        for place in range(0, 1 << 20, 4096):
            if chooser.random() < 0.3:
                image.write(place + 8, version.to_bytes(8, "little") * 300)
        image.write(0, version.to_bytes(8, "little"))
        image.flush()
        print(version, flush=True)
"""


@pytest.mark.parametrize("preallocate", [True, False])
def test_no_kill_loses_what_was_synced(preallocate: bool, tmp_path: Path) -> None:
    path = tmp_path / "killed.gvdk"
    Gvdk.create(path, 1 << 20, preallocate=preallocate).close()
    chooser = random.Random(SEED)
    before = 0
    for kill in range(KILLS):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(SEED + kill)],
            stdout=subprocess.PIPE,
            text=True,
        ) as program:
            assert program.stdout is not None
            last = before
            for _ in range(chooser.randrange(1, 12)):
                last = int(program.stdout.readline())
            program.send_signal(signal.SIGKILL)
            rest = program.stdout.read().split()
            program.wait(WAIT_S)
        last = max([last, *map(int, rest)])
        with Gvdk(path, writable=True) as image:
            assert image.verify().clean
            version = int.from_bytes(image.read(0, 8), "little")
            # The next version may have been written, and synced, before it was told.
            assert last <= version <= last + 1
            ranges = image.recovered.ranges if image.recovered is not None else ()
            for place in range(0, 1 << 20, 4096):
                words = image.read(place + 8, 2400)
                named = any(begin < place + 2408 and end > place for begin, end in ranges)
                assert named or words == words[:8] * 300
            before = version
