"""Rows of a feature table in a file, gathered in mini-batches, as a training loop asks for them.

The table is several times larger than the cache, and popular rows are asked for more often than
others. Each value follows from its row and column by arithmetic, so every batch is checked against
numpy without reading the file again. Beside flashwarp, numpy.memmap serves the same batches.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from flashwarp.demo.check import check_equal
from flashwarp.demo.data_path import data_path_of
from flashwarp.demo.progress import Steps
from flashwarp.device import Device
from flashwarp.probe.disk import (
    DiskCeiling,
    create_npy,
    direct_reads_work,
    drop_page_cache,
    fill_page_cache,
    measure_ceiling,
    resident_fraction,
)

__all__ = [
    "SIZES",
    "FeatureSize",
    "FeaturesResult",
    "Pass",
    "draw_batches",
    "expected_rows",
    "run",
    "time_gathers",
    "write_table",
]

Gather = Callable[[NDArray[np.int64]], NDArray[np.float32]]

_OURS = "flashwarp, O_DIRECT"
_OURS_BUFFERED = "flashwarp, page cache"
_MEMMAP = "numpy.memmap"
_MEMMAP_RANDOM = "numpy.memmap, MADV_RANDOM"

# Odd multipliers of Knuth and of xxHash: neighbouring rows and columns differ in all upper bits.
_ROW_FACTOR = np.uint32(2654435761)
_COLUMN_FACTOR = np.uint32(2246822519)
_WRITE_BYTES = 8 << 20


@dataclass(frozen=True)
class FeatureSize:
    """How much the part moves. Rows are float32: 1024 columns make a row one line of 4 KiB."""

    rows: int
    columns: int
    cache_bytes: int
    batch_rows: int
    batches: int


# The file is sixteen times the cache. numpy.memmap reads ahead: a cold pass brings in more of the
# file than it asks for: with fewer than one row in ten asked for, that is not yet all of it.
SIZES = {
    "quick": FeatureSize(1 << 19, 1024, 128 << 20, 4096, 12),
    "full": FeatureSize(1 << 22, 1024, 1 << 30, 8192, 48),
}


@dataclass(frozen=True)
class Pass:
    """One contender's run over all batches."""

    contender: str
    state: str
    """"cold": nothing of the file in memory at the start. "warm": the same batches once more."""
    seconds: float
    rows: int
    row_bytes: int
    bytes_read: int | None
    """From the storage; None where the kernel's page cache decides and does not tell."""

    @property
    def hit_rate(self) -> float | None:
        """Share of the rows, each one line of flashwarp's cache, that needed no read."""
        if self.bytes_read is None:
            return None
        return 1 - self.bytes_read / (self.rows * self.row_bytes)

    @property
    def rows_per_s(self) -> float:
        """Rows delivered a second, checking not counted."""
        return self.rows / self.seconds

    @property
    def gb_per_s(self) -> float:
        """The same in bytes."""
        return self.rows * self.row_bytes / self.seconds / 1e9


@dataclass(frozen=True)
class FeaturesResult:
    """All passes over the same batches, and the disk's ceiling measured in the same run."""

    file_bytes: int
    cache_bytes: int
    row_bytes: int
    batch_rows: int
    passes: tuple[Pass, ...]
    ceiling: DiskCeiling
    cold_note: str
    path: str
    """How flashwarp read the file in its O_DIRECT passes, in its own words."""

    def find(self, contender: str, state: str) -> Pass:
        """Return the one pass of this contender from this start."""
        return next(p for p in self.passes if (p.contender, p.state) == (contender, state))

    def memmap(self, state: str) -> Pass:
        """Return what others are compared with."""
        return self.find(_MEMMAP, state)

    @property
    def cold_ratio(self) -> float:
        """Rows a second of flashwarp, for each of numpy.memmap, both from a cold start."""
        return self.find(_OURS, "cold").rows_per_s / self.memmap("cold").rows_per_s

    @property
    def cold_miss_gb_per_s(self) -> float:
        """What flashwarp read from the disk, a second of its cold pass."""
        cold = self.find(_OURS, "cold")
        return (cold.bytes_read or 0) / cold.seconds / 1e9


def expected_rows(rows: NDArray[np.int64], columns: int) -> NDArray[np.float32]:
    """Compute what the table holds in these rows: numbers in [0, 1) with 24 bits, all exact."""
    by_row = rows.astype(np.uint32) * _ROW_FACTOR
    by_column = np.arange(columns, dtype=np.uint32) * _COLUMN_FACTOR
    bits = by_row[:, None] ^ by_column[None, :]
    bits >>= np.uint32(8)
    values = bits.astype(np.float32)
    values *= np.float32(2.0**-24)
    return values


def write_table(
    path: Path, rows: int, columns: int, track: Callable[[Iterable[int]], Iterable[int]]
) -> None:
    """Write the table to a .npy file, chunk by chunk."""
    offset = create_npy(path, (rows, columns), np.dtype(np.float32))
    step = max(1, _WRITE_BYTES // (4 * columns))
    with open(path, "r+b") as file:
        file.seek(offset)
        for start in track(range(0, rows, step)):
            chunk = np.arange(start, min(start + step, rows), dtype=np.int64)
            file.write(expected_rows(chunk, columns).data)


def draw_batches(rows: int, batch_rows: int, count: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Draw the rows of each batch, popular ones more often, popularity spread over the file.

    The rank of a row is rows * u**3 with u uniform: half of all requests go to an eighth of the
    table, a third to a twenty-seventh.
    """
    random = np.random.default_rng(seed)
    place = random.permutation(rows)
    for _ in range(count):
        rank = (rows * random.random(batch_rows) ** 3).astype(np.int64)
        yield place[rank]


def time_gathers(
    gather: Gather, batches: Iterable[NDArray[np.int64]], columns: int, what: str
) -> float:
    """Gather every batch and check every value of it; return the seconds of the gathers alone."""
    seconds = 0.0
    for number, rows in enumerate(batches):
        start = time.perf_counter()
        got: NDArray[Any] = gather(rows)
        seconds += time.perf_counter() - start
        check_equal(f"{what}, batch {number}", got, expected_rows(rows, columns))
    return seconds


# The part as a whole.


def run(directory: Path, size: FeatureSize, device: Device, steps: Steps) -> FeaturesResult:
    """Write the table, measure the disk, let each contender gather the same batches."""
    path = directory / "features.npy"
    write_table(
        path,
        size.rows,
        size.columns,
        lambda chunks: steps.track(list(chunks), "features: write the table"),
    )
    drop_page_cache(path)
    left_over = resident_fraction(path)
    with steps.step("features: measure the disk itself"):
        ceiling = measure_ceiling(path, 4 * size.columns)
    o_direct = direct_reads_work(path)
    passes: list[Pass] = []
    batches = list(draw_batches(size.rows, size.batch_rows, size.batches, seed=1))
    with fw.open(
        path, device=device, cache=size.cache_bytes, line=4 * size.columns, o_direct=o_direct
    ) as array:
        for state in ("cold", "warm"):
            passes.append(_our_pass(array, batches, _OURS, state, steps))
        explained = data_path_of(array)
    drop_page_cache(path)
    passes += _memmap_passes(path, batches, ("cold", "warm"), _MEMMAP, None, steps)
    # Knowing all of the file in memory, flashwarp takes its fastest way: on a GPU, in place.
    fill_page_cache(path)
    with fw.open(path, device=device, cache=size.cache_bytes, line=4 * size.columns) as array:
        passes.append(_our_pass(array, batches, _OURS_BUFFERED, "warm", steps))
    drop_page_cache(path)
    passes += _memmap_passes(path, batches, ("cold",), _MEMMAP_RANDOM, mmap.MADV_RANDOM, steps)
    return FeaturesResult(
        file_bytes=4 * size.rows * size.columns,
        cache_bytes=size.cache_bytes,
        row_bytes=4 * size.columns,
        batch_rows=size.batch_rows,
        # Cold ones first, in the order of their runs.
        passes=tuple(sorted(passes, key=lambda one: one.state)),
        ceiling=ceiling,
        cold_note=_cold_note(o_direct, left_over),
        path=explained,
    )


def _our_pass(
    array: fw.Array,
    batches: Sequence[NDArray[np.int64]],
    contender: str,
    state: str,
    steps: Steps,
) -> Pass:
    before = array.stats.bytes_read
    what = f"features: {contender}, {state}"
    seconds = time_gathers(array.gather, steps.track(batches, what), array.shape[1], what)
    return Pass(
        contender=contender,
        state=state,
        seconds=seconds,
        rows=sum(map(len, batches)),
        row_bytes=array.nbytes // array.shape[0],
        bytes_read=array.stats.bytes_read - before,
    )


def _memmap_passes(
    path: Path,
    batches: Sequence[NDArray[np.int64]],
    states: Sequence[str],
    contender: str,
    advice: int | None,
    steps: Steps,
) -> list[Pass]:
    # Unmapped when this returns: the caller can drop unmapped pages only.
    array = np.load(path, mmap_mode="r")
    if advice is not None:
        # numpy.memmap has no public way to advise the kernel about its own mapping.
        array._mmap.madvise(advice)
    passes = []
    for state in states:
        what = f"features: {contender}, {state}"
        seconds = time_gathers(array.__getitem__, steps.track(batches, what), array.shape[1], what)
        rows = sum(map(len, batches))
        row_bytes = array.itemsize * array.shape[1]
        passes.append(Pass(contender, state, seconds, rows, row_bytes, None))
    return passes


def _cold_note(o_direct: bool, left_over: float | None) -> str:
    left = "how much of it stayed is unknown" if left_over is None else f"{left_over:.1%} stayed"
    how = (
        "O_DIRECT passes bypass the page cache"
        if o_direct
        else ("This file system has no O_DIRECT: all passes go through the page cache")
    )
    return (
        f"{how}. Before each cold start the file was dropped from the page cache "
        f"({left}); numpy.memmap may keep all of it in memory, "
        "flashwarp only its cache. Warm: the same batches again."
    )
