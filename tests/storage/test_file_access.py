"""Page cache or O_DIRECT: chosen at open by what fits, and changed when that turns out wrong."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashwarp as fw
from flashwarp import _native
from flashwarp.config import Config
from flashwarp.device import host_memory
from flashwarp.probe.disk import drop_page_cache
from flashwarp.storage.file_access import FileFacts, ReadFigures, choose_o_direct, reconsider

MIB = 1 << 20
GIB = 1 << 30
DEFAULTS = Config()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(8192))
    refusal = _native.direct_io_alignment(str(probe))
    if isinstance(refusal, str):
        pytest.skip(f"no O_DIRECT here: {refusal}")
    return tmp_path


def make_table(path: Path, rows: int = 4096) -> np.ndarray:
    """Save rows of 4 KiB, and drop them from the page cache."""
    data = np.random.default_rng(rows).integers(0, 1 << 30, (rows, 512))
    np.save(path, data)
    drop_page_cache(path)
    return data


# The choice at open.

COLD = FileFacts(
    nbytes=GIB,
    available_bytes=8 * GIB,
    reserved_bytes=0,
    resident=0.0,
    writable=False,
    allocated_bytes=GIB,
    direct_refusal="",
)
LARGE = replace(COLD, nbytes=9 * GIB, allocated_bytes=9 * GIB)


@pytest.mark.parametrize(
    ("facts", "o_direct", "told"),
    [
        (COLD, False, "fit the"),
        (replace(COLD, resident=None), False, "an unknown part of the file"),
        (replace(COLD, nbytes=int(7.9 * GIB)), False, "fit the"),
        (replace(COLD, nbytes=int(8.1 * GIB)), True, "exceed the"),
        (replace(COLD, nbytes=9 * GIB, resident=0.95), False, "95% of the file"),
        (replace(COLD, nbytes=9 * GIB, resident=0.6), True, "60% of the file"),
        (replace(COLD, reserved_bytes=int(7.5 * GIB)), True, "exceed the"),
        (replace(COLD, reserved_bytes=9 * GIB), True, "exceed the 0 "),
        (replace(LARGE, writable=True), True, "a writable file keeps this way"),
        # To be filled: but holes that are only read cost nothing by either.
        (replace(LARGE, writable=True, allocated_bytes=4 * GIB), False, "were never written"),
        (replace(LARGE, allocated_bytes=0), True, "exceed the"),
        (replace(COLD, nbytes=9 * GIB, direct_refusal="no such flag"), False, "no such flag"),
    ],
)
def test_the_way_is_chosen_by_what_fits_the_memory(
    facts: FileFacts, o_direct: bool, told: str
) -> None:
    choice = choose_o_direct(facts, DEFAULTS)

    assert choice.o_direct is o_direct
    assert told in choice.why


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize(
    ("share", "o_direct", "told"), [("1", False, "fit the"), ("1e-6", True, "exceed the")]
)
def test_a_cold_file_goes_through_the_page_cache_if_it_fits_the_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, share: str, o_direct: bool, told: str
) -> None:
    make_table(folder / "x.npy")
    monkeypatch.setenv("FLASHWARP_PAGE_CACHE_SHARE", share)

    with fw.open(folder / "x.npy", mode, device="cpu", cache="1 MiB") as x:
        explained = x.explain()

    assert explained.facts["storage"]["o_direct"] is o_direct
    assert told in explained.reason


@pytest.mark.parametrize("share", ["1", "1e-6"])
def test_a_table_that_was_just_created_goes_through_the_page_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    monkeypatch.setenv("FLASHWARP_PAGE_CACHE_SHARE", share)

    with fw.create(folder / "x.npy", "i8", (4096, 512), device="cpu", cache="1 MiB") as x:
        assert x.explain().facts["storage"]["o_direct"] is False


def test_the_frames_of_a_cpu_device_are_not_counted_for_the_page_cache(folder: Path) -> None:
    make_table(folder / "x.npy")
    available = host_memory.available_bytes()

    with fw.open(folder / "x.npy", device="cpu", cache=int(available * 0.9999)) as x:
        assert x.explain().facts["storage"]["o_direct"] is True


@pytest.mark.parametrize("o_direct", [True, False])
def test_a_way_that_was_asked_for_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, o_direct: bool
) -> None:
    data = make_table(folder / "x.npy")
    monkeypatch.setenv("FLASHWARP_REVIEW_BYTES", "4096")

    with fw.open(folder / "x.npy", device="cpu", cache="64 KiB", o_direct=o_direct) as x:
        for _ in range(4):
            assert np.array_equal(x[:], data)
        told = x.explain()

    assert told.facts["storage"]["o_direct"] is o_direct
    assert "changed" not in told.facts["storage"]
    assert "as asked for" in told.reason


# The rule for later.

SEEN = ReadFigures(
    reads=10_000,
    nbytes=400 * MIB,
    waited_nbytes=400 * MIB,
    near_reads=100,
    touched_nbytes=390 * MIB,
    busy_ns=10**9,
)


@pytest.mark.parametrize(
    ("o_direct", "seen", "room", "told"),
    [
        # Read once: nobody knows whether it will be again.
        (True, SEEN, GIB, None),
        (True, replace(SEEN, touched_nbytes=200 * MIB), GIB, "read 2.0 times"),
        (True, replace(SEEN, touched_nbytes=200 * MIB), 199 * MIB, None),
        # Brought in for the first time, and it fits.
        (False, SEEN, GIB, None),
        (False, SEEN, 300 * MIB, "100% of the bytes read were not in the page cache"),
        (False, replace(SEEN, waited_nbytes=199 * MIB), 300 * MIB, None),
    ],
)
def test_the_way_is_reconsidered_by_what_was_read_again(
    o_direct: bool, seen: ReadFigures, room: int, told: str | None
) -> None:
    why = reconsider(o_direct, seen, room, {})

    assert (why is None) if told is None else (why is not None and told in why)


@pytest.mark.parametrize(
    ("o_direct", "rates", "told"),
    [
        (True, {True: 1e8}, "read ahead"),
        (True, {True: 1e8, False: 9e7}, None),
        (True, {True: 1e8, False: 3e8}, "300 the other way"),
        (False, {False: 1e8}, None),
        (False, {True: 1e8, False: 3e8}, None),
        (False, {True: 5e8, False: 3e8}, "500 the other way"),
    ],
)
def test_reads_in_order_keep_the_faster_way(
    o_direct: bool, rates: dict[bool, float], told: str | None
) -> None:
    # Whatever else is seen: of a stream, the page cache keeps nothing that is read again.
    seen = replace(SEEN, near_reads=9500, touched_nbytes=100 * MIB)

    why = reconsider(o_direct, seen, 50 * MIB, rates)

    assert (why is None) if told is None else (why is not None and told in why)


# The change of an open file.


def test_rows_that_are_read_again_come_from_the_page_cache_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_table(folder / "x.npy")
    rows = np.random.default_rng(1).permutation(len(data))
    monkeypatch.setenv("FLASHWARP_PAGE_CACHE_SHARE", "1e-6")
    monkeypatch.setenv("FLASHWARP_REVIEW_BYTES", "1000000")
    with fw.open(folder / "x.npy", device="cpu", cache="64 KiB") as x:
        assert np.array_equal(x.gather(rows), data[rows])
        assert x.explain().facts["storage"]["o_direct"] is True

        # As when whatever took the memory has ended.
        monkeypatch.setenv("FLASHWARP_PAGE_CACHE_SHARE", "0.9")
        for _ in range(3):
            assert np.array_equal(x.gather(rows), data[rows])

        told = x.explain()
        assert told.facts["storage"]["o_direct"] is False
        assert "to the page cache after" in told.facts["storage"]["changed"]
        assert "times, and fit the" in str(told)
        before = x.service.stats["engine_operations"]
        assert np.array_equal(x.gather(rows), data[rows])
        assert x.service.stats["engine_operations"] - before < len(rows) // 20


def test_a_page_cache_that_keeps_nothing_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_table(folder / "x.npy", rows=8192)
    rows = np.random.default_rng(1).permutation(len(data))
    monkeypatch.setenv("FLASHWARP_REVIEW_BYTES", "1000000")
    with fw.open(folder / "x.npy", device="cpu", cache="64 KiB") as x:
        assert x.explain().facts["storage"]["o_direct"] is False

        # As when something else takes the memory.
        monkeypatch.setenv("FLASHWARP_PAGE_CACHE_SHARE", "1e-6")
        for part in np.array_split(rows, 16):
            assert np.array_equal(x.gather(part), data[part])

        told = x.explain().facts["storage"]
        assert told["o_direct"] is True
        assert "were not in the page cache" in told["changed"]


def test_no_review_without_bytes_to_review(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_table(folder / "x.npy")
    monkeypatch.setenv("FLASHWARP_PAGE_CACHE_SHARE", "1e-6")
    monkeypatch.setenv("FLASHWARP_REVIEW_BYTES", "0")
    with fw.open(folder / "x.npy", device="cpu", cache="64 KiB") as x:
        monkeypatch.setenv("FLASHWARP_PAGE_CACHE_SHARE", "0.9")
        for _ in range(6):
            x[:]

        assert x.explain().facts["storage"]["o_direct"] is True


# The native file.


def test_only_a_file_for_reading_can_change_its_way(folder: Path) -> None:
    make_table(folder / "x.npy")
    kept = _native.FileStorage(str(folder / "x.npy"))

    with pytest.raises(ValueError, match="keeps its way"):
        kept.choose_direct(True)
    assert kept.read_figures() == (0, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="read-only"):
        _native.FileStorage(str(folder / "x.npy"), writable=True, may_change=True)


def test_bytes_are_the_same_while_the_way_changes(folder: Path) -> None:
    content = np.random.default_rng(3).integers(0, 256, 4 * MIB + 777, dtype=np.uint8)
    (folder / "f").write_bytes(content.tobytes())
    storage = _native.FileStorage(str(folder / "f"), may_change=True)
    wrong: list[int] = []
    stop = threading.Event()

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        while not stop.is_set():
            offset = int(random.integers(0, len(content) - 70_000))
            count = int(random.integers(1, 70_000))
            if storage.read(offset, count) != content[offset : offset + count].tobytes():
                wrong.append(offset)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(200):
        storage.choose_direct(turn % 2 == 0)
        if turn % 20 == 0:
            os.posix_fadvise(storage.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        stop.wait(0.003)
    stop.set()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert storage.read_figures()[0] > 200


@pytest.mark.parametrize(("reads", "distinct"), [(1000, 1000), (30_000, 20_000), (200_000, 3000)])
def test_different_bytes_are_estimated(tmp_path: Path, reads: int, distinct: int) -> None:
    file_nbytes = 4 * GIB
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(file_nbytes)
    storage = _native.FileStorage(str(tmp_path / "sparse"), may_change=True)
    random = np.random.default_rng(reads)
    lines = random.choice(file_nbytes // 4096, distinct, replace=False)
    asked = np.concatenate([lines, random.choice(lines, reads - distinct)])

    for line in asked:
        storage.read(int(line) * 4096, 512)

    count, nbytes, waited, near, touched, _ = storage.read_figures()
    # A sixteenth of the places is looked at: what it estimates of n is off by 1 / sqrt(n / 16).
    assert count == pytest.approx(reads, rel=max(0.05, 4 * (16 / distinct) ** 0.5))
    assert (nbytes, waited) == (512 * count, 512 * count)
    assert near < reads // 5
    assert touched == pytest.approx(512 * distinct, rel=max(0.1, 4 * (32 / distinct) ** 0.5))


def test_reads_in_order_are_near_each_other(folder: Path) -> None:
    (folder / "f").write_bytes(bytes(64 * MIB))
    storage = _native.FileStorage(str(folder / "f"), may_change=True)

    # Two threads, each with its half.
    for offset in range(0, 32 * MIB, 16384):
        storage.read(offset, 16384)
        storage.read(32 * MIB + offset, 16384)

    reads, _, _, near, _, busy_ns = storage.read_figures()
    assert near > 0.99 * reads
    assert busy_ns > 0
    storage.restart_figures()
    assert storage.read_figures() == (0, 0, 0, 0, 0, 0)
