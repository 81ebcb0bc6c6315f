"""Calls whose misses are split from their landing, on the CPU device: nothing waits between.

The same kernels run on a GPU, where the stream waits; see `tests/gpu/test_split.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashwarp as fw
from flashwarp.array import splitting
from flashwarp.array.operands import Index
from flashwarp.array.splitting import Splitting
from flashwarp.errors import BoundsError, StorageError
from flashwarp.testing import Faulty

ROWS = 3000

Open = Callable[..., fw.Array]


@pytest.fixture(autouse=True)
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHWARP_SPLIT_MISSES", "1")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    path = tmp_path_factory.mktemp("splitting") / "a.npy"
    content = np.random.default_rng(7).integers(0, 1 << 30, (ROWS, 1024), np.int32)
    np.save(path, content)
    return path, content


def outstanding(x: fw.Array) -> int:
    """Commands of batches that are not completed; counts what was submitted, too."""
    batches = x.service.batches
    assert batches is not None
    submitted = completed = 0
    for i in range(batches.count):
        record = batches.read(batches._batch(i))
        assert record.done == 1 or record.completed != record.submitted
        submitted += record.submitted
        completed += record.completed
    assert submitted > 0, "the calls have submitted nothing to a batch"
    return submitted - completed


WAYS = {
    "bounce": {"route": "bounce"},
    "direct": {"route": "direct", "commands": True},
    "short rings": {"route": "bounce", "queue_pairs": 3, "depth": 32},
}


@pytest.fixture(params=WAYS)
def controller(request: pytest.FixtureRequest) -> fw.nvme.SoftwareController:
    return fw.nvme.SoftwareController(**WAYS[request.param])  # type: ignore[arg-type]


@pytest.mark.parametrize("cache", ["1 MiB", "16 MiB"])
def test_rows_are_gathered(table: Any, controller: Any, cache: str) -> None:
    path, content = table
    rng = np.random.default_rng(1)
    with fw.open(path, device="cpu", cache=cache, controller=controller) as x:
        assert x._attachment.launcher.splitting.on()
        for count in (1, 7, 32, 500, 5000):
            index = rng.integers(-ROWS, ROWS, count)
            assert (x.gather(index) == content[index]).all()
        assert (x[5:-7] == content[5:-7]).all()
        assert x.stats.bytes_used == (5540 + ROWS - 12) * 4096, "each row counts once"
        assert outstanding(x) == 0


@pytest.mark.parametrize("width", [1, 7, 100, 1025])
def test_rows_of_any_width_are_gathered(tmp_path: Path, controller: Any, width: int) -> None:
    content = np.arange(600_000 // width * width, dtype=np.int32).reshape(-1, width)
    np.save(tmp_path / "a.npy", content)
    index = np.random.default_rng(1).integers(0, len(content), 3000)
    with fw.open(
        tmp_path / "a.npy", device="cpu", cache="1 MiB", line=512, controller=controller
    ) as x:
        assert (x.gather(index) == content[index]).all()
        assert (x[17:-3] == content[17:-3]).all()
        # Rows of ten lines are too long for short rings.
        assert not x._attachment.launcher.splitting.on() or outstanding(x) == 0


@pytest.mark.parametrize("width", [1, 300, 1024])
def test_rows_are_scattered(tmp_path: Path, controller: Any, width: int) -> None:
    rng = np.random.default_rng(2)
    content = rng.integers(0, 1 << 30, (ROWS, width), np.int32)
    np.save(tmp_path / "a.npy", content)
    with fw.open(
        tmp_path / "a.npy", "r+", device="cpu", cache="1 MiB", line=512, controller=controller
    ) as x:
        for _ in range(4):
            rows = rng.permutation(ROWS)[: ROWS // 2]
            values = rng.integers(0, 1 << 30, (len(rows), width), np.int32)
            x.scatter(rows, values)
            content[rows] = values
            # Half of the frames hold changed lines, which no batch may write back.
            index = rng.integers(0, ROWS, 500)
            assert (x.gather(index) == content[index]).all()
        x.flush()
        assert (np.load(tmp_path / "a.npy") == content).all()


def test_futures_are_split(table: Any, controller: Any) -> None:
    path, content = table
    rng = np.random.default_rng(3)
    with fw.open(path, device="cpu", cache="4 MiB", controller=controller) as x:
        index = [rng.integers(0, ROWS, 400) for _ in range(20)]
        calls = [x.gather_async(each) for each in index]
        ours = rng.integers(0, ROWS, 400)
        assert (x.gather(ours) == content[ours]).all()
        for each, call in zip(index, calls, strict=True):
            assert (call.result() == content[each]).all()
        assert outstanding(x) == 0


def test_rows_beyond_the_last_round_are_gathered(
    table: Any, controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitting, "ROUNDS_MAX", 2)
    path, content = table
    index = np.random.default_rng(4).integers(0, ROWS, 4000)
    with fw.open(path, device="cpu", cache="1 MiB", controller=controller) as x:
        assert (x.gather(index) == content[index]).all()


def test_failures_are_raised_and_later_calls_work(table: Any, controller: Any) -> None:
    path, content = table
    rng = np.random.default_rng(5)
    with (
        fw.storage.File(path, offset=128) as file,
        fw.open(
            storage := Faulty(file, "read eio p=0.05"), "r", "i4", (ROWS, 1024),
            device="cpu", cache="4 MiB", controller=controller,
        ) as x,
    ):  # fmt: skip
        for _ in range(3):
            with pytest.raises(StorageError):
                x.gather(rng.permutation(ROWS))
            storage.inject("read eio p=0.05")
        storage.inject("")
        index = rng.permutation(ROWS)
        assert (x.gather(index) == content[index]).all()
        assert outstanding(x) == 0


def test_fault_that_only_the_submission_met_is_not_raised(table: Any) -> None:
    path, content = table
    settings = fw.nvme.SoftwareController(route="bounce")
    with (
        fw.storage.File(path, offset=128) as file,
        fw.open(
            Faulty(file, "read eio n=1"), "r", "i4", (ROWS, 1024),
            device="cpu", cache="4 MiB", controller=settings,
        ) as x,
    ):  # fmt: skip
        assert (x.gather([3]) == content[[3]]).all(), "the row is read again"


def test_bad_indices_store_and_read_nothing(tmp_path: Path, controller: Any) -> None:
    content = np.zeros((ROWS, 128), np.int32)
    np.save(tmp_path / "a.npy", content)
    with fw.open(tmp_path / "a.npy", "r+", device="cpu", cache="1 MiB", controller=controller) as x:
        with pytest.raises(BoundsError):
            x.gather([0, ROWS])
        with pytest.raises(BoundsError):
            x.scatter([1, -ROWS - 1], np.ones((2, 128), np.int32))
        assert not x.gather([0, 1]).any()


def test_two_arrays_share_a_cache(tmp_path: Path, table: Any, controller: Any) -> None:
    path, content = table
    other = content[::-1].copy()
    np.save(tmp_path / "b.npy", other)
    rng = np.random.default_rng(6)
    with (
        fw.Cache("1 MiB", device="cpu") as cache,
        fw.open(path, cache=cache, controller=controller) as x,
        fw.open(tmp_path / "b.npy", "r+", cache=cache, controller=controller) as y,
    ):
        for _ in range(4):
            index = rng.integers(0, ROWS, 300)
            assert (x.gather(index) == content[index]).all()
            assert (y.gather(index) == other[index]).all()
            other[index[:9]] = 5
            y.scatter(index[:9], other[index[:9]])


def test_what_cannot_be_split_says_why(table: Any) -> None:
    path, content = table
    settings = fw.nvme.SoftwareController(route="bounce", queue_pairs=1, depth=2)
    with fw.open(path, device="cpu", cache="1 MiB", controller=settings) as x:
        found = x._attachment.launcher.splitting
        assert not found.on()
        assert found.why_not == "0 lines, which may be in flight, are less than 16 rows"
        assert found.why_not in str(x.explain())
        assert (x.gather([1, 2]) == content[[1, 2]]).all()


def test_explanation_says_that_misses_are_split(table: Any, controller: Any) -> None:
    with fw.open(table[0], device="cpu", cache="1 MiB", controller=controller) as x:
        assert "streams wait for misses" in str(x.explain())


def test_nothing_is_split_by_default(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHWARP_SPLIT_MISSES")
    settings = fw.nvme.SoftwareController(route="bounce")
    with fw.open(table[0], device="cpu", cache="1 MiB", controller=settings) as x:
        assert not x._attachment.launcher.splitting.on()
        assert x.service.batches is None
        assert "misses" not in x.explain().reason


# Rounds.


def rounds_of(chosen: Any, rows: int, row_bytes: int = 24) -> Any:
    made = Splitting.__new__(Splitting)
    made.rows, made._row_bytes = rows, row_bytes
    return made.rounds(chosen, 1 << 20)


def spans(parts: Any) -> Iterator[tuple[int, int, int]]:
    for part, buffer in parts:
        first = part.start if isinstance(part, range) else part.address
        yield first, len(part), buffer


@given(st.integers(1, 40_000), st.integers(1, 40).map(lambda n: 16 * n), st.booleans())
def test_rounds_cover_all_rows_once(count: int, rows: int, is_range: bool) -> None:
    index = Index(4096, (count,), 8, "numpy", None)
    chosen = range(100, 100 + count) if is_range else index
    parts, rest = rounds_of(chosen, rows)

    every = list(spans([*parts, *([] if rest is None else [rest])]))
    done = 0
    for first, length, buffer in every:
        assert first == (100 + done if is_range else 4096 + 8 * done)
        assert buffer == (1 << 20) + 24 * done
        assert length > 0
        done += length
    assert done == count
    assert len(parts) <= splitting.ROUNDS_MAX
    assert all(length <= rows for _, length, _ in every[: len(parts)])
    assert (rest is None) == (-(-count // rows) <= splitting.ROUNDS_MAX)
    assert all(length % 16 == 0 for _, length, _ in every[:-1]), "all rounds are aligned alike"
