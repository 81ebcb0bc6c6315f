"""Which versions stay (`keep_last`), which one a restart takes, and how large caches may be."""

from __future__ import annotations

import queue
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from checkpoint.faults import WAIT_S, Faults, Opener
from flashwarp.checkpoint import sizes
from flashwarp.checkpoint.checkpointer import Checkpointer
from flashwarp.checkpoint.tier import Entry
from flashwarp.errors import ArgumentError, CheckpointError, DeviceOutOfMemory


def write(checkpointer: Checkpointer, state: np.ndarray, versions: range, name: str = "a") -> None:
    checkpointer.protect("state", state)
    for version in versions:
        state[:] = version
        checkpointer.checkpoint(version, name).result(timeout=WAIT_S)


def damage(folder: Path, version: int) -> None:
    (path,) = folder.glob(f"default/rank-00000/{version:019}-*.data")
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


# keep_last.


def test_the_newest_stay_and_older_ones_go_while_the_run_goes_on(
    opened: Opener, tmp_path: Path
) -> None:
    state = np.zeros(100)
    checkpointer = opened(keep_last=3)
    write(checkpointer, state, range(6), "b")
    write(checkpointer, state, range(8))

    assert checkpointer.versions("a") == [5, 6, 7]
    assert checkpointer.versions("b") == [3, 4, 5], "each name by itself"
    checkpointer.close()
    kept = sorted((tmp_path / "versions" / "a").glob("rank-00000/*.data"))
    assert [int(each.name.partition("-")[0]) for each in kept] == [5, 6, 7]

    again = opened(keep_last=1)
    write(again, state, range(8, 9))
    assert again.versions("a") == [8], "those of earlier runs go too"


def test_a_run_that_went_back_keeps_what_it_writes(opened: Opener) -> None:
    checkpointer = opened(keep_last=2)
    write(checkpointer, np.zeros(10), range(7, 10))
    write(checkpointer, np.zeros(10), range(3, 6))

    assert checkpointer.versions("a") == [4, 5, 8, 9]


def test_versions_may_become_durable_in_another_order(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = opened(keep_last=1)
    storing = checkpointer._system.storing
    note = storing._stored
    written: queue.SimpleQueue[Entry] = queue.SimpleQueue()
    checkpointer.protect("state", np.zeros(10))
    monkeypatch.setattr(storing, "_stored", lambda entry: written.put(entry) or True)
    saved = [checkpointer.checkpoint(version, "a") for version in range(3)]
    entries = [written.get(timeout=WAIT_S) for _ in saved]

    for entry in sorted(entries, key=lambda each: each.key, reverse=True):
        note(entry)

    for each in saved:
        each.result(timeout=WAIT_S)
    assert checkpointer.versions("a") == [2]


def test_a_version_that_is_being_restored_stays(opened: Opener) -> None:
    checkpointer = opened(keep_last=1)
    state = np.zeros(10)
    write(checkpointer, state, range(1))

    with checkpointer._core.kept(("a", 0)):
        write(checkpointer, state, range(1, 3))
        assert checkpointer.versions("a") == [0, 2]
        checkpointer.restart(0, name="a")
    write(checkpointer, state, range(3, 4))
    assert checkpointer.versions("a") == [3]


def test_what_is_not_durable_discards_nothing(opened: Opener, faults: Faults) -> None:
    checkpointer = opened(keep_last=1)
    write(checkpointer, np.zeros(10), range(1))
    faults.hold()
    saved = checkpointer.checkpoint(1, "a")

    assert checkpointer.versions("a") == [0, 1]
    faults.release()
    saved.result(timeout=WAIT_S)
    assert checkpointer.versions("a") == [1]


def test_the_second_store_always_has_a_version(opened: Opener, tmp_path: Path) -> None:
    checkpointer = opened(keep_last=1, remote=tmp_path / "remote")
    state = np.zeros(10)
    for version in range(5):
        write(checkpointer, state, range(version, version + 1))
        checkpointer.wait(version, "remote", "a")
        there = list((tmp_path / "remote" / "a").glob("rank-00000/*.manifest"))
        assert there
    checkpointer.checkpoint(5, "a").result(timeout=WAIT_S)
    assert len(checkpointer.versions("a")) <= 2


@pytest.mark.parametrize("keep", [0, -1, 1.5, "3"])
def test_keep_last_is_checked(opened: Opener, keep: object) -> None:
    with pytest.raises(ArgumentError, match="keep_last"):
        opened(keep_last=keep)


# The newest that is whole.


def test_damaged_versions_are_passed_by_and_may_be_written_again(
    opened: Opener, tmp_path: Path
) -> None:
    state = np.zeros(100)
    first = opened()
    write(first, state, range(4), "default")
    first.close()
    for version in (2, 3):
        damage(tmp_path / "versions", version)

    again = opened()
    again.protect("state", state)
    assert again.restart_latest() == 1
    assert (state == 1).all()
    write(again, state, range(2, 4), "default")
    assert again.restart_latest() == 3
    assert (state == 3).all()


def test_none_is_returned_without_versions_and_raised_for_damage_alone(
    opened: Opener, tmp_path: Path
) -> None:
    checkpointer = opened()
    with pytest.raises(CheckpointError, match=r"call protect\(\) before restart_latest"):
        checkpointer.restart_latest()
    state = np.zeros(100)
    checkpointer.protect("state", state)
    assert checkpointer.restart_latest() is None
    write(checkpointer, state, range(2), "default")
    checkpointer.close()
    for version in (0, 1):
        damage(tmp_path / "versions", version)

    again = opened()
    state[:] = 9
    again.protect("state", state)
    with pytest.raises(CheckpointError, match="none of the 2 versions of 'default' can be read"):
        again.restart_latest()
    assert (state == 9).all()


def test_latest_without_a_protected_region_is_refused_unless_the_others_are_named(
    opened: Opener,
) -> None:
    state, more = np.zeros(100), np.full(10, 5.0)
    checkpointer = opened()
    write(checkpointer, state, range(2), "default")
    state[:] = 9
    checkpointer.protect("more", more)

    with pytest.raises(CheckpointError, match=r"version 1 .* no region 'more'.*only=\['state'\]"):
        checkpointer.restart_latest()
    assert (state == 9).all()
    assert checkpointer.restart_latest(only=["state"]) == 1
    assert (state == 1).all()
    assert (more == 5).all()


# The page's first sample.


def test_the_sample_goes_on_after_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    sample = page.partition("```python\n")[2].partition("```")[0]
    assert "restart_latest" in sample
    assert "range(0 if newest is None else newest + 1, 100)" in sample
    endless = sample.replace(", 100)", ", 10**9)")
    seen = tmp_path / "run" / "default"

    with subprocess.Popen([sys.executable, "-c", endless], cwd=tmp_path) as run:
        end = time.monotonic() + 100
        while len(list(seen.glob("rank-00000/*.manifest"))) < 3 and time.monotonic() < end:
            assert run.poll() is None
            time.sleep(0.02)
        run.kill()
    killed = max(int(each.stem) for each in seen.glob("rank-00000/*.manifest"))
    again = sample.replace(", 100)", ", newest + 3)") + "\nprint(newest, checkpointer.closed)"
    result = subprocess.run(
        [sys.executable, "-c", again], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )

    assert result.stdout.split() == [str(killed), "True"], result.stderr
    assert max(int(each.stem) for each in seen.glob("rank-00000/*.manifest")) == killed + 2


# Sizes.


def test_the_defaults_fit_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "available_bytes", lambda: 64 << 20)
    with Checkpointer(tmp_path, "cpu", "1 MiB") as checkpointer:
        assert checkpointer._core.tiers[1].nbytes == 63 << 17


@pytest.mark.parametrize("name", ["gpu_memory", "host_memory"])
def test_more_memory_than_is_free_is_named(tmp_path: Path, name: str) -> None:
    caches = {"gpu_memory": 0, "host_memory": 0, name: "900 TiB"}
    with pytest.raises(DeviceOutOfMemory, match=f"{name}='900 TiB' is more than the .* are free"):
        Checkpointer(tmp_path, "cpu", **caches)  # type: ignore[arg-type]
