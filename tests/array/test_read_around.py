"""Misses on the CPU device that take no command: fills, and gathers around flashwarp's cache."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import flashwarp as fw
from flashwarp import _native
from flashwarp.errors import StorageError
from support.samples import sample

LINE = 4096
SMALLEST = "64 KiB"
MANY = 256  # lines
# Of rows: within a line, a line, across two lines and more, of no power of two, of one element.
WIDTHS = (1, 2, 4, 12, 48, 64, 300, 512, 4000, 4096, 5000, 20000)


def saved(folder: Path, row_bytes: int, nbytes: int = 1 << 20) -> npt.NDArray[np.uint8]:
    """Save rows of random bytes as a file; return them."""
    rows = np.random.default_rng(row_bytes).integers(
        0, 256, (max(4, nbytes // row_bytes), row_bytes), np.uint8
    )
    rows.tofile(folder / "rows.bin")
    return rows


def opened(folder: Path, rows: npt.NDArray[np.uint8], mode: str = "r", **options: Any) -> fw.Array:
    options = {"device": "cpu", **options}
    return fw.open(folder / "rows.bin", mode, rows.dtype, rows.shape, **options)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("row_bytes", WIDTHS)
def test_gathers_larger_than_the_cache_leave_no_lines(
    tmp_path: Path, row_bytes: int, threads: int
) -> None:
    rows = saved(tmp_path, row_bytes)
    with opened(tmp_path, rows, device=fw.device.CpuDevice(threads), cache=SMALLEST) as x:
        count = x.cache.capacity // row_bytes + 1
        index = np.random.default_rng(0).integers(-len(rows), len(rows), count)
        for _ in range(2):
            np.testing.assert_array_equal(x.gather(index), rows[index])

        assert x.stats.commands == 0
        assert x.stats.hits == 0
        assert x.stats.bypasses == x.stats.misses >= 2 * count
        assert x.stats.bytes_read == x.stats.bytes_used == 2 * count * row_bytes
        assert "larger than the cache" in x.explain().reason


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("row_bytes", WIDTHS)
def test_gathers_of_few_lines_fill_the_cache_without_commands(
    tmp_path: Path, row_bytes: int, threads: int
) -> None:
    rows = saved(tmp_path, row_bytes)
    with opened(tmp_path, rows, device=fw.device.CpuDevice(threads), cache="4 MiB") as x:
        count = MANY // (row_bytes // LINE + 3)
        index = np.random.default_rng(0).integers(-len(rows), len(rows), count)
        np.testing.assert_array_equal(x.gather(index), rows[index])
        cold = x.stats
        np.testing.assert_array_equal(x.gather(index), rows[index])

        assert x.stats.misses == cold.misses, "the second gather hits"
        assert x.stats.hits > cold.hits
        assert x.stats.bypasses == 0
        assert x.stats.commands == 0
        assert cold.bytes_read == cold.misses * LINE


# Each takes seconds.
@pytest.mark.parametrize(
    ("row_bytes", "threads"), sample(list(itertools.product(WIDTHS, [1, 2, 5])), 6)
)
def test_gathers_of_many_lines_fill_one_of_a_batch(
    tmp_path: Path, row_bytes: int, threads: int
) -> None:
    rows = saved(tmp_path, row_bytes, 16 * LINE + MANY * row_bytes)
    with opened(tmp_path, rows, device=fw.device.CpuDevice(threads), cache="16 MiB") as x:
        index = np.random.default_rng(0).integers(-len(rows), len(rows), 2 * MANY)
        np.testing.assert_array_equal(x.gather(index), rows[index])
        cold = x.stats
        for _ in range(40):
            np.testing.assert_array_equal(x.gather(index), rows[index])

        assert x.stats.commands == 0
        assert 0 < cold.bypasses < cold.misses
        batches = 2 * MANY * (row_bytes // LINE + 2) // 32
        assert cold.misses - cold.bypasses <= 2 * batches + threads, "few are filled"
        assert x.stats.hits - cold.hits > 20 * (cold.hits + cold.misses), "lines have entered"


def test_a_call_larger_than_the_cache_leaves_no_line(tmp_path: Path) -> None:
    rows = saved(tmp_path, LINE)
    with opened(tmp_path, rows, cache=SMALLEST) as x:
        lines = x.cache.capacity // LINE
        x.gather(np.arange(lines))
        assert x.stats.bypasses == 0

        np.testing.assert_array_equal(x.gather(np.arange(lines + 1)), rows[: lines + 1])
        assert x.stats.hits + x.stats.bypasses == lines + 1, "lines that are there hit"
        assert x.stats.bypasses > 0
        bypasses = x.stats.bypasses

        np.testing.assert_array_equal(x[: lines + 1], rows[: lines + 1])
        assert x.stats.bypasses > bypasses


def test_a_controller_with_commands_gets_one_for_each_line(tmp_path: Path) -> None:
    rows = saved(tmp_path, LINE)
    with opened(tmp_path, rows, controller=fw.nvme.SoftwareController(commands=True)) as x:
        np.testing.assert_array_equal(x.gather(np.arange(100)), rows[:100])

        assert x.stats.commands == 100
        assert "without commands" not in x.explain().reason


@pytest.mark.parametrize("row_bytes", [64, 4000, 4096])
def test_rows_come_from_frames_that_hold_newer_bytes(tmp_path: Path, row_bytes: int) -> None:
    rows = saved(tmp_path, row_bytes)
    random = np.random.default_rng(1)
    # So small that lines which were stored to are written back and evicted meanwhile.
    with opened(tmp_path, rows, "r+", cache=SMALLEST) as x:
        for _ in range(30):
            where = np.unique(random.integers(0, len(rows), 40))
            values = random.integers(0, 256, (len(where), row_bytes), np.uint8)
            x.scatter(where, values)
            rows[where] = values

            index = np.concatenate([where, random.integers(0, len(rows), 100)])
            np.testing.assert_array_equal(x.gather(index), rows[index])
        assert x.stats.hits > 0
        assert x.stats.write_backs > 0
    np.testing.assert_array_equal(np.fromfile(tmp_path / "rows.bin", np.uint8), rows.reshape(-1))


def test_prefetched_rows_come_from_the_frames(tmp_path: Path) -> None:
    rows = saved(tmp_path, LINE)
    with opened(tmp_path, rows) as x:
        x.prefetch(np.arange(64))
        np.testing.assert_array_equal(x.gather(np.arange(128)), rows[:128])

        assert x.stats.hits + x.stats.misses == 192
        assert x.stats.commands == 0
        assert x.stats.bypasses == 0


@pytest.mark.parametrize("place", [0, 1, 8, 16, 24, 4080])
@pytest.mark.parametrize("row_bytes", [2048, 4100, 5000, 20000])
def test_rows_go_to_memory_at_any_place_of_its_page(
    tmp_path: Path, row_bytes: int, place: int
) -> None:
    rows = saved(tmp_path, row_bytes, 1 << 18)
    memory = np.zeros(rows.nbytes + 2 * 4096, np.uint8)
    begin = -memory.ctypes.data % 4096 + place
    out = memory[begin : begin + rows.nbytes].reshape(rows.shape)
    with opened(tmp_path, rows, cache="1 MiB") as x:
        for _ in ("around the cache, or by fills", "from frames"):
            out[:] = 0
            x.gather(np.arange(len(rows)), out=out)
            np.testing.assert_array_equal(out, rows)
            x.prefetch(np.arange(len(rows)))

        assert memory[:begin].sum() == memory[begin + rows.nbytes :].sum() == 0


@pytest.mark.parametrize("kind", [fw.storage.Striped, fw.storage.Replicated])
def test_members_of_a_composite_are_read_around(tmp_path: Path, kind: Any) -> None:
    rows = np.random.default_rng(2).integers(0, 256, (256, LINE), np.uint8)
    for number in range(2):
        np.zeros(rows.nbytes, np.uint8).tofile(tmp_path / f"{number}.raw")
    members = [fw.storage.File(tmp_path / f"{n}.raw", writable=True) for n in range(2)]
    storage = kind(members)
    with fw.open(storage, "r+", np.uint8, rows.shape, device="cpu", cache=SMALLEST) as x:
        x[...] = rows
        x.flush()
        commands = x.stats.commands
        index = np.random.default_rng(3).permutation(256)
        np.testing.assert_array_equal(x.gather(index), rows[index])
        x.scatter(index[:20], rows[:20])
        rows[index[:20]] = rows[:20].copy()
        np.testing.assert_array_equal(x.gather(index), rows[index])
        assert x.stats.commands - commands < 256


@pytest.mark.parametrize("cache", [SMALLEST, "4 MiB"])
def test_rows_that_the_file_has_lost_raise_and_are_never_zeros(tmp_path: Path, cache: str) -> None:
    rows = saved(tmp_path, 1000)
    rows[...] |= 1  # no byte is zero
    rows.tofile(tmp_path / "rows.bin")
    with opened(tmp_path, rows, cache=cache) as x:
        index = np.random.default_rng(4).integers(0, len(rows), 500)
        np.testing.assert_array_equal(x.gather(index), rows[index])
        os.truncate(tmp_path / "rows.bin", rows.nbytes // 2)
        x.drop_cache()

        with pytest.raises(StorageError):
            x.gather(index)
        there = index[index < len(rows) // 2 - 5]
        np.testing.assert_array_equal(x.gather(there), rows[there])
        assert x.stats.bypasses > 0


def test_only_rows_whose_pages_are_gone_take_commands(tmp_path: Path) -> None:
    rows = saved(tmp_path, LINE)
    path = tmp_path / "rows.bin"
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # against reading ahead
        os.pread(file.fileno(), 64 * LINE, 0)
        view = np.memmap(path, np.uint8, "r")
        if _native.residency(view.ctypes.data, rows.nbytes) > 0.5:
            pytest.skip("the file system keeps pages of its own accord")
        with opened(tmp_path, rows, o_direct=False) as x:
            np.testing.assert_array_equal(x.gather(np.arange(200)), rows[:200])
            # 136 pages are gone; a busy machine may take back a few of the others.
            assert 1 <= x.stats.commands <= 150

            # What was fetched is in frames.
            commands = x.stats.commands
            np.testing.assert_array_equal(x.gather(np.arange(200)), rows[:200])
            assert x.stats.commands == commands


@pytest.mark.parametrize("cache", [SMALLEST, "4 MiB"])
def test_rows_of_zeros_are_read(tmp_path: Path, cache: str) -> None:
    rows = np.zeros((1000, 512), np.uint8)
    rows.tofile(tmp_path / "rows.bin")
    with opened(tmp_path, rows, cache=cache) as x:
        assert not x.gather(np.arange(1000)).any()
        assert x.stats.commands == 0


# Columns: cells at equal distances.

WIDE = [(2000, 3, "f4"), (500, 7, "f8"), (3000, 64, "u1"), (200, 129, "<i2"), (40, 5000, "c16")]


def table(folder: Path, rows: int, columns: int, kind: str) -> npt.NDArray[Any]:
    cells = np.random.default_rng(rows).integers(0, 100, (rows, columns)).astype(kind)
    cells.tofile(folder / "rows.bin")
    return cells


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("rows", "columns", "kind"), WIDE)
def test_columns_are_read_around_the_cache(
    tmp_path: Path, rows: int, columns: int, kind: str, threads: int
) -> None:
    cells = table(tmp_path, rows, columns, kind)
    with opened(tmp_path, cells, device=fw.device.CpuDevice(threads), cache=SMALLEST) as x:
        for key in (
            *(np.s_[:, 0], np.s_[:, -1], np.s_[5:30, 1], np.s_[3::7, 2], np.s_[-20:, 0]),
            *(np.s_[:, 1:3], np.s_[7:, -2:], np.s_[::-2, :2], np.s_[:, :-1:2]),
            *(np.s_[5::3, -1:0:-1], np.s_[..., 1]),
        ):
            np.testing.assert_array_equal(x[key], cells[key])
            assert x[key].dtype == cells.dtype
            assert x[key].flags.c_contiguous

        assert x.stats.commands == 0
        assert x.stats.hits == 0
        read = x.stats.bytes_read
        x[:, 0]
        assert x.stats.bytes_read - read == rows * cells.itemsize, "of each row only the cell"
        x[:, 1:3]
        assert x.stats.bytes_read - read == 3 * rows * cells.itemsize, "of each row two cells"


@pytest.mark.parametrize(("rows", "columns", "kind"), WIDE)
def test_columns_of_newer_bytes_come_from_the_frames(
    tmp_path: Path, rows: int, columns: int, kind: str
) -> None:
    cells = table(tmp_path, rows, columns, kind)
    random = np.random.default_rng(2)
    with opened(tmp_path, cells, "r+", cache=SMALLEST) as x:
        for _ in range(20):
            where = np.unique(random.integers(0, rows, 10))
            values = random.integers(0, 100, (len(where), columns)).astype(kind)
            x[where] = values
            cells[where] = values
            column = int(random.integers(columns))
            np.testing.assert_array_equal(x[:, column], cells[:, column])
            np.testing.assert_array_equal(x[:, column:], cells[:, column:])
        assert x.stats.hits > 0


@pytest.mark.parametrize("cache", [SMALLEST, "4 MiB"])
def test_columns_are_read_by_commands_where_no_page_cache_helps(tmp_path: Path, cache: str) -> None:
    cells = table(tmp_path, 3000, 64, "f4")
    controller = fw.nvme.SoftwareController(commands=True)
    with opened(tmp_path, cells, cache=cache, controller=controller) as x:
        for column in (0, 63, -2, np.s_[3:5], np.s_[1:63], np.s_[::9]):
            np.testing.assert_array_equal(x[:, column], cells[:, column])
        assert x.stats.commands > 0
        assert x.stats.bypasses == 0


def test_columns_of_more_axes_leave_the_others(tmp_path: Path) -> None:
    cells = table(tmp_path, 600, 4 * 8 * 3, "f4").reshape(600, 4, 8, 3)
    with opened(tmp_path, cells) as x:
        for key in (
            *(np.s_[:, 1, 2, 0], np.s_[10:20, 3], np.s_[::5, 2, 1], np.s_[7:], np.s_[::3]),
            *(np.s_[:, 1:3], np.s_[:, 1:3, 2], np.s_[5:, 2, 1:7:3, 1], np.s_[..., 1:]),
            *(np.s_[::-1, ..., 2], np.s_[3, :, -1:], np.s_[1, 2:, 3, ::-2], np.s_[1, 1, 1, 1]),
            *(np.s_[1, ..., 1, 1, 1], np.s_[:, 2:2], np.s_[9:3:-1, 3, 1:2]),
        ):
            np.testing.assert_array_equal(x[key], cells[key])
            assert type(x[key]) is type(cells[key])
        for key in (np.s_[:, :, 9, 0], np.s_[:, 1:, 0, -9], np.s_[..., ...], np.s_[0, 0, 0, 0, 0]):
            with pytest.raises(IndexError):
                x[key]


def test_columns_that_the_file_has_lost_raise_and_are_never_zeros(tmp_path: Path) -> None:
    cells = table(tmp_path, 3000, 16, "f4") + 1
    cells.tofile(tmp_path / "rows.bin")
    with opened(tmp_path, cells) as x:
        np.testing.assert_array_equal(x[:, 3], cells[:, 3])
        os.truncate(tmp_path / "rows.bin", cells.nbytes // 2 + 100)
        x.drop_cache()

        with pytest.raises(StorageError):
            x[:, 3]
        np.testing.assert_array_equal(x[:1400, 3], cells[:1400, 3])


def test_an_element_takes_few_calls_of_python(tmp_path: Path) -> None:
    """Each costs a tenth of what the rest of such a read does."""
    cells = table(tmp_path, 100, 7, "f4")
    called: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    with opened(tmp_path, cells) as x:
        x[3, 4]
        sys.setprofile(note)
        try:
            x[5, 6]
        finally:
            sys.setprofile(None)

    assert len(called) <= 5, called


def test_a_storage_that_was_closed_serves_its_array_on(tmp_path: Path) -> None:
    cells = table(tmp_path, 100, 7, "f4")
    storage = fw.storage.File(tmp_path / "rows.bin")
    with fw.open(storage, dtype="f4", shape=cells.shape, device="cpu") as x:
        storage.close()
        assert x[5, 6] == cells[5, 6]
        np.testing.assert_array_equal(x.gather(np.arange(100)), cells)
