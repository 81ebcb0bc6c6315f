"""Arrays that nobody calls cost nothing, so a program may hold many of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.device import CpuDevice
from flashwarp.nvme import SoftwareController

# After 0.1 s without a call a controller's thread sleeps until it is woken, and after another 0.1 s
# it ends.
LONG_IDLE_S = 0.5
SHORTER_THAN_A_TIME_LIMIT_S = 20


def entries(folder: str) -> int:
    return len(os.listdir(f"/proc/self/{folder}"))


def test_many_arrays_share_what_polls_and_need_no_rings_of_the_kernel(tmp_path: Path) -> None:
    count = 200
    rows = np.arange(64 * 64, dtype="f4").reshape(64, 64)
    np.save(tmp_path / "rows.npy", rows)
    device = CpuDevice()
    with fw.open(tmp_path / "rows.npy", device=device) as first:
        first.gather([0])  # the device's own threads run
    threads, descriptors = entries("task"), entries("fd")
    arrays = [fw.open(tmp_path / "rows.npy", device=device) for _ in range(count)]
    try:
        time.sleep(LONG_IDLE_S)
        # One heart for all, and one that answers `flashwarp top`; those that serve have ended.
        assert entries("task") <= threads + 4
        assert entries("fd") <= descriptors + 2 * count + 4
        before = time.process_time()
        time.sleep(1)
        # They took 0.4 % of a core each, and now take less together.
        assert time.process_time() - before < count * 0.001
        for each in arrays:
            assert (each[5] == rows[5]).all()
    finally:
        for each in arrays:
            each.close()
        device.close()


@pytest.mark.parametrize("threads", [None, 2])
def test_idle_controllers_wake_for_stores_and_flushes(tmp_path: Path, threads: int | None) -> None:
    controller = SoftwareController(threads=threads, commands=True)
    path = tmp_path / "x.npy"
    with fw.create(path, "f4", (4096, 128), device="cpu", controller=controller) as x:
        for turn in range(4):
            time.sleep(LONG_IDLE_S)
            start = time.monotonic()
            x.scatter(np.arange(4096), np.full((4096, 128), turn, "f4"))
            x.flush()
            assert time.monotonic() - start < SHORTER_THAN_A_TIME_LIMIT_S
            assert (np.load(path) == turn).all()


def test_a_launch_of_another_array_wakes_who_writes_evicted_lines_back(tmp_path: Path) -> None:
    with fw.Cache(1 << 20, device="cpu") as cache:
        arrays = [
            fw.create(tmp_path / f"{name}.npy", "f4", (4096, 256), cache=cache) for name in "ab"
        ]
        ids = np.arange(4096)
        time.sleep(LONG_IDLE_S)
        for turn in range(1, 4):
            for each in arrays:
                time.sleep(LONG_IDLE_S)
                start = time.monotonic()
                each.scatter(ids, np.full((4096, 256), turn, "f4"))
                assert time.monotonic() - start < SHORTER_THAN_A_TIME_LIMIT_S
        for each in arrays:
            assert (each.gather(ids) == 3).all()
            each.close()


def test_elements_and_rows_are_what_numpy_selects(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 1 << 40, (50, 3, 700))
    np.save(tmp_path / "x.npy", rows)
    with fw.open(tmp_path / "x.npy", "r+", device="cpu", cache=1 << 20) as x:
        for key in [7, -1, np.int64(3), (4, 2), (-50, -3, -700), (49, 2, 699), (1, np.int64(1), 5)]:
            found, expected = x[key], rows[key]
            assert type(found) is type(expected)
            assert np.array_equal(found, expected)
        x.scatter(np.array([7]), rows[8][None])
        assert x[7, 2, 5] == rows[8, 2, 5]
        for stray in [50, -51, (0, 3), (0, 0, 700), (0, 0, 0, 0), 1 << 70]:
            with pytest.raises((fw.errors.BoundsError, fw.errors.ArgumentError)):
                x[stray]
