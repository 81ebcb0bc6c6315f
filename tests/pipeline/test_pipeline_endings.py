"""How pipelines and their arrays end, in any order; and facts, which never refuse."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp.errors import ArgumentError, ClosedError, StorageError
from flashwarp.testing.faults import FaultPlan, Faulty

ROWS, WIDTH = 100, 4
WAYS: list[dict[str, Any]] = [{}, {"workers": 2}]


def values() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "rows.npy", values())
    return tmp_path / "rows.npy"


def open_rows(path: Path) -> fw.Array:
    return fw.open(path, "r+", device="cpu", cache="64 KiB")


@pytest.mark.parametrize("options", WAYS)
def test_an_array_ends_the_pipelines_that_its_body_has_left_open(
    path: Path, options: dict[str, Any]
) -> None:
    ids, rows = np.arange(10, 20), np.full((10, WIDTH), -1, np.float32)
    made: list[fw.Pipeline] = []

    def body(x: fw.Array) -> None:
        made.append(fw.Pipeline(x, 10, **options))
        made[0].prefetch([1, 2])
        made[0].write_back(ids, rows)
        raise KeyError("body")

    with pytest.raises(KeyError, match="body"), open_rows(path) as x:
        body(x)
    assert x.closed
    assert made[0].closed
    made[0].close()
    with open_rows(path) as again:  # nothing is locked
        np.testing.assert_array_equal(again[10:20], rows)
        np.testing.assert_array_equal(again[:10], values()[:10])


def test_pipelines_of_an_array_end_before_it_last_opened_first(path: Path) -> None:
    ended = []

    class Noted(fw.Pipeline):
        def close(self) -> None:
            if not self.closed:
                ended.append(self.depth)
            super().close()

    x = open_rows(path)
    kept = [Noted(x, 4, depth=depth) for depth in (1, 2, 3)]
    kept[1].close()
    x.close()
    assert ended == [2, 3, 1]


def test_tiles_whose_loop_has_not_ended_are_stored_when_the_array_ends(path: Path) -> None:
    for options in WAYS:
        with open_rows(path) as x:
            tiles = fw.Pipeline.tiles(x, 30, writable=True, **options)
            tile = next(tiles)
            tile += 1
        assert list(tiles) == []
    np.testing.assert_array_equal(np.load(path)[:30], values()[:30] + 2)
    np.testing.assert_array_equal(np.load(path)[30:], values()[30:])


def test_a_pipeline_that_cannot_begin_leaves_the_array_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise MemoryError

    with open_rows(path) as x:
        monkeypatch.setattr("flashwarp.pipeline.pipeline.make_engine", fail)
        with pytest.raises(MemoryError):
            fw.Pipeline(x, 10, workers=2)
        monkeypatch.undo()
        np.testing.assert_array_equal(x[:], values())
        with fw.Pipeline(x, 10, workers=2):
            with pytest.raises(ArgumentError, match="belongs to a pipeline"):
                fw.Pipeline(x, 10, workers=2)
            with pytest.raises(ArgumentError, match="belongs to a pipeline"):
                x.gather([1])
        np.testing.assert_array_equal(x[:], values())


def test_an_array_raises_what_writes_failed_with_and_ends_all_the_same(path: Path) -> None:
    storage = Faulty(fw.storage.File(path, writable=True), FaultPlan.parse("write eio n=1"))
    x = fw.open(storage, "r+", np.float32, (ROWS, WIDTH), device="cpu")
    p = fw.Pipeline(x, 4, workers=1)
    p.write_back([50], np.ones((1, WIDTH), np.float32))
    with pytest.raises(StorageError):
        x.close()
    assert x.closed
    assert p.closed
    storage.close()


@pytest.mark.parametrize("options", WAYS)
def test_facts_never_refuse(path: Path, options: dict[str, Any]) -> None:
    with open_rows(path) as x:
        before = x.explain().route
        with fw.Pipeline(x, 4, **options) as p:
            p.prefetch([1])
            assert x.explain().route == before
            assert x.stats.bytes_written == 0
            assert "flashwarp.Array" in repr(x)
            told = p.explain()
            p.take()
        assert p.explain() == told
        assert "closed" in repr(p)
        assert p.stats.moved[f"{told.route}, prefetch"].rows == 1
    with pytest.raises(ClosedError):
        x.explain()
    assert p.explain() == told


def test_facts_leave_failures_to_the_calls_that_raise_them(path: Path) -> None:
    storage = Faulty(fw.storage.File(path), FaultPlan.parse("read eio n=1"))
    with storage, fw.open(storage, "r", np.float32, (ROWS, WIDTH), device="cpu") as x:
        lost = x.gather_async([7])
        while not lost.done():
            time.sleep(0.001)
        del lost
        assert x.explain().route
        assert x.stats.commands
        with pytest.raises(StorageError):
            x.gather([3])
