"""Writes past the page cache that begin and end anywhere: each byte is its last writer's.

Linux reports EIO, once for the whole file, if a direct write finds a page there that is being
written through the page cache; and a block that two threads read, change and write back loses what
one of them has stored.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import _native
from flashwarp.errors import StorageError
from flashwarp.storage import File
from flashwarp.testing.faults import FaultPlan, Faulty

NBYTES = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "probe").write_bytes(bytes(8192))
    refusal = _native.direct_io_alignment(str(tmp_path / "probe"))
    if isinstance(refusal, str):
        pytest.skip(f"no O_DIRECT here: {refusal}")
    return tmp_path


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "threads":
        monkeypatch.setenv("FLASHWARP_IO_ENGINE", "threads")
    return str(request.param)


def made(path: Path, nbytes: int) -> Path:
    path.write_bytes(bytes(nbytes))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


def direct(path: Path, offset: int = 0, nbytes: int | None = None) -> File:
    return File(path, offset, nbytes, writable=True, o_direct=True, lock=False)


def run_together(*acts: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    assert failed == []


@pytest.mark.parametrize("nbytes", [NBYTES, NBYTES + 77])
def test_lines_beside_parts_of_blocks_cause_no_error(
    folder: Path, engine: str, nbytes: int
) -> None:
    file = direct(made(folder / "f", nbytes))
    ended = threading.Event()

    def parts() -> None:
        at = random.Random(1)
        while not ended.is_set():
            file.native.write(at.randrange(nbytes - 100), b"x" * 100)
            file.native.write(nbytes - 50, b"y" * 50)

    def lines() -> None:
        try:
            for i in range(20):
                x[:] = i
                x.flush()
        finally:
            ended.set()

    with file, fw.open(file, "r+", np.uint8, device="cpu", cache="2 MiB", line="64 KiB") as x:
        run_together(parts, lines)

    assert os.stat(folder / "f").st_size == nbytes


@pytest.mark.parametrize("end", [65536, 65536 + 300])
def test_parts_of_blocks_beside_whole_blocks_lose_neither(folder: Path, end: int) -> None:
    file = direct(made(folder / "f", end))
    at = random.Random(1)
    with file:
        for i in range(150):
            places = [at.randrange(end - 100) for _ in range(8)]
            run_together(
                lambda i=i: file.native.write(0, bytes([i]) * end),
                lambda places=places[:4]: [file.native.write(p, b"\xff" * 99) for p in places],
                lambda places=places[4:]: [file.native.write(p, b"\xff" * 99) for p in places],
            )
            assert set(file.native.read(0, end)) <= {i, 0xFF}


def test_two_storages_of_one_file_share_its_blocks(folder: Path) -> None:
    path = made(folder / "f", 8192)
    with direct(path, 0, 3000) as head, direct(path, 3000, 5000) as rest:
        for i in range(300):
            run_together(
                lambda i=i: head.native.write(2900, bytes([i & 255]) * 100),
                lambda i=i: rest.native.write(0, bytes([255 - (i & 255)]) * 100),
            )
            assert path.read_bytes()[2900:3100] == (
                bytes([i & 255]) * 100 + bytes([255 - (i & 255)]) * 100
            )


def test_bytes_beside_a_range_stay_as_they_are(folder: Path) -> None:
    around = np.random.default_rng(1).integers(0, 256, 50_000, np.uint8)
    around.tofile(folder / "f")
    want = around.copy()
    want[777:30_778] = 5

    with direct(folder / "f", 777, 30_001) as file:
        file.native.write(0, bytes([5]) * 30_001)
        file.native.flush()

    np.testing.assert_array_equal(np.fromfile(folder / "f", np.uint8), want)


@pytest.mark.parametrize("row_bytes", [4, 100, 512, 6000])
def test_rows_of_any_size_behind_any_header(folder: Path, engine: str, row_bytes: int) -> None:
    rows = np.zeros((301, row_bytes // 4), "i4")
    np.save(folder / "x.npy", rows)
    random_rows = np.random.default_rng(row_bytes)
    options: dict[str, Any] = {"device": "cpu", "cache": "64 KiB", "line": 512, "o_direct": True}
    with fw.open(folder / "x.npy", "r+", **options) as x:
        for i in range(1, 8):
            ids = random_rows.permutation(301)[:100]
            rows[ids] = i
            x.scatter(ids, rows[ids])
    np.testing.assert_array_equal(np.load(folder / "x.npy"), rows)


@pytest.mark.parametrize("plan", ["write short p=0.3; read short p=0.3", "write delay=200us"])
def test_transfers_that_stop_go_on_as_they_began(folder: Path, engine: str, plan: str) -> None:
    rows = np.zeros((1001, 250), "i4")
    np.save(folder / "x.npy", rows)
    inner = File(folder / "x.npy", 128, writable=True, o_direct=True)
    with (
        inner,
        Faulty(inner, FaultPlan.parse(plan)) as storage,
        fw.open(storage, "r+", "i4", rows.shape, device="cpu", cache="64 KiB") as x,
    ):
        for i in range(1, 6):
            rows[i::5] = i
            x[i::5] = rows[i::5]
    np.testing.assert_array_equal(np.load(folder / "x.npy"), rows)


def test_a_write_that_fails_gives_its_blocks_back(folder: Path, engine: str) -> None:
    inner = direct(made(folder / "f", 65_636), 100)

    def store() -> None:
        with fw.open(storage, "r+", np.uint8, device="cpu", cache="64 KiB") as x:
            x[:] = 3

    with inner, Faulty(inner, FaultPlan.parse("write eio p=0.5")) as storage:
        with pytest.raises(StorageError):
            store()
        inner.native.write(0, bytes([4]) * 65_536)  # waits for nothing
        assert inner.native.read(0, 65_536) == bytes([4]) * 65_536


def test_zeros_and_discards_that_fill_no_pages(folder: Path) -> None:
    data = np.random.default_rng(1).integers(1, 256, 100_000, np.uint8)
    data.tofile(folder / "f")
    with direct(folder / "f") as file:
        for begin, end in ((10, 50), (5000, 30_000), (40_000, 40_960), (99_000, 100_000)):
            file.native.write_zeroes(begin, end - begin)
            data[begin:end] = 0
        file.native.discard(60_000, 10_000)
        kept = np.frombuffer(file.native.read(0, 100_000), np.uint8)
    inside = slice(61_440, 69_632)
    assert (kept[inside] == 0).all()
    data[inside] = kept[inside]
    np.testing.assert_array_equal(kept, data)
