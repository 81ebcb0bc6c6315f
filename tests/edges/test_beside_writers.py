"""Calls for the whole array beside asynchronous writes: neither loses what the other stores."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import flashwarp as fw


@pytest.mark.parametrize("shared", [False, True])
def test_drop_cache_and_stats_beside_asynchronous_writes(tmp_path: Path, shared: bool) -> None:
    rows = np.zeros((2000, 16), "f4")
    np.save(tmp_path / "rows.npy", rows)
    stop, turns = threading.Event(), 0
    failed: list[BaseException] = []

    def write() -> None:
        random = np.random.default_rng(1)
        value = 0
        try:
            while not stop.is_set():
                value += 1
                index = np.unique(random.integers(0, 2000, 64))
                x.scatter_async(index, np.full((len(index), 16), value, "f4"))
                rows[index] = value
        except BaseException as error:
            failed.append(error)

    cache = fw.Cache("64 KiB", line=512, device="cpu") if shared else "64 KiB"
    with fw.open(tmp_path / "rows.npy", "r+", device="cpu", cache=cache, line=512) as x:
        writer = threading.Thread(target=write)
        writer.start()
        end = time.monotonic() + 1
        while time.monotonic() < end:
            x.drop_cache()
            assert x.stats.errors == 0
            turns += 1
        stop.set()
        writer.join()

    assert failed == []
    assert turns > 3
    np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), rows)


def test_drop_cache_empties_the_cache_of_what_nobody_stores(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(4096, dtype="f4").reshape(256, 16))

    with fw.open(tmp_path / "rows.npy", "r+", device="cpu", cache="1 MiB") as x:
        x[:] = 3
        x.drop_cache()
        before = x.stats
        assert (x[...] == 3).all()
        after = x.stats

    assert after.misses - before.misses >= 4
