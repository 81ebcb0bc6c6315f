"""Rows of a feature table in a file, gathered as a training loop asks for them.

The table is sixteen times the cache. Two things are measured, on a GPU beside their ceilings:

- The file is on the disk only: rows that nobody asked for before, by the number of rows a call.
- On a GPU also: the file is in the page cache, and popular rows are asked for more often.

On the CPU device no rate means anything: the demo shows there what was read, and that it is right.

On a GPU, every way begins with indices in host memory and ends with the rows in GPU memory. Each
value follows from its row and column by arithmetic, so every row is checked against numpy without
reading the file again.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from demo.check import check_equal
from demo.progress import Steps
from flashwarp.device import Device
from flashwarp.device.memory import DeviceArray
from flashwarp.errors import DeviceError
from flashwarp.probe.disk import (
    DiskCeiling,
    create_npy,
    direct_reads_work,
    drop_page_cache,
    fill_page_cache,
    measure_ceiling,
    resident_fraction,
)
from flashwarp.probe.link import measure_link

__all__ = [
    "MEMMAP",
    "OURS",
    "SIZES",
    "FeatureSize",
    "FeaturesResult",
    "Rate",
    "draw_batches",
    "expected_rows",
    "from_page_cache",
    "run",
    "time_gathers",
    "write_table",
]

Gather = Callable[[NDArray[np.int64]], Any]

OURS = "flashwarp"
MEMMAP = "memmap[rows], then a copy"
SELECT = "torch.index_select to pinned, then a copy"
UVA = "UVA gather, all of the table pinned"

# Odd multipliers of Knuth and of xxHash: neighbouring rows and columns differ in all upper bits.
_ROW_FACTOR = np.uint32(2654435761)
_COLUMN_FACTOR = np.uint32(2246822519)
_WRITE_BYTES = 8 << 20
# The disk drifts, so its ceiling is measured before and after us.
_CEILING_SECONDS = 0.5
# A way whose call takes longer is not asked for more rows.
_CALL_SECONDS_MAX = 1.0


@dataclass(frozen=True)
class FeatureSize:
    """How much is moved. Rows are float32: 1024 columns make a row one line of 4 KiB."""

    rows: int
    columns: int
    cache_bytes: int
    calls: tuple[int, ...]
    """Rows that one call asks for, with the file on the disk."""
    seconds: float
    """How long each way is measured with each of `calls`; four times as long with the largest."""
    batch_rows: int
    """Rows that one call asks for, with the file in the page cache."""
    batches: int


_CALLS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
# A file of sixteen caches. Even with 16,384 rows a call, two calls fit the cache.
SIZES = {
    "quick": FeatureSize(1 << 18, 1024, 64 << 20, _CALLS, 0.25, 32768, 6),
    "full": FeatureSize(1 << 22, 1024, 1 << 30, _CALLS, 1.0, 65536, 12),
}


@dataclass(frozen=True)
class Rate:
    """How fast rows arrived by one way."""

    how: str
    call_rows: int
    """Rows that one call asked for."""
    rows: int
    seconds: float
    """Of the calls alone: what is compiled or checked is not in it."""
    hit_rate: float | None = None
    """Share of the rows that were in flashwarp's cache; None if none can be there."""

    @property
    def rows_per_s(self) -> float:
        """Rows a second."""
        return self.rows / self.seconds


@dataclass(frozen=True)
class FeaturesResult:
    """All rates, and the ceilings of the same run."""

    file_bytes: int
    cache_bytes: int
    row_bytes: int
    on_gpu: bool
    disk: tuple[Rate, ...]  # from the disk, in the order of `FeatureSize.calls`
    ceiling: DiskCeiling
    cold_note: str
    rows_read: int  # flashwarp's reads from the disk, in rows
    rows_asked: int  # what it was asked for meanwhile
    path: str  # how flashwarp read the file on the disk
    page_cache: tuple[Rate, ...] = ()  # from the page cache, on a GPU
    page_cache_path: str = ""  # how flashwarp read the file in the page cache
    missing: tuple[str, ...] = ()  # ways that could not be measured, each with its reason
    link_gb_per_s: float = 0.0  # of the copy engine, to the GPU; 0 if not measured

    @property
    def from_disk(self) -> Rate:
        """What flashwarp read from the disk with the most rows a call."""
        return [rate for rate in self.disk if rate.how == OURS][-1]

    @property
    def of_ceiling(self) -> float:
        """The same, in parts of the disk's ceiling; 0 if that was not measured."""
        ceiling = self.ceiling.random_reads_per_s
        return self.from_disk.rows_per_s / ceiling if ceiling else 0.0


def expected_rows(rows: NDArray[np.int64], columns: int) -> NDArray[np.float32]:
    """Compute what the table holds in these rows: numbers in [0, 1) with 24 bits, all exact."""
    by_row = rows.astype(np.uint32) * _ROW_FACTOR
    by_column = np.arange(columns, dtype=np.uint32) * _COLUMN_FACTOR
    bits = by_row[:, None] ^ by_column[None, :]
    bits >>= np.uint32(8)
    values = bits.astype(np.float32)
    values *= np.float32(2.0**-24)
    return values


def write_table(path: Path, rows: int, columns: int) -> None:
    """Write the table to a .npy file, chunk by chunk."""
    offset = create_npy(path, (rows, columns), np.dtype(np.float32))
    step = max(1, _WRITE_BYTES // (4 * columns))
    with open(path, "r+b") as file:
        file.seek(offset)
        for start in range(0, rows, step):
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


class _Order:
    """Rows of the table in a random order: none comes twice before all have come."""

    def __init__(self, rows: int) -> None:
        self._rows = np.random.default_rng(1).permutation(rows)
        self._next = 0

    def take(self, count: int) -> NDArray[np.int64]:
        if self._next + count > len(self._rows):
            self._next = 0
        self._next += count
        return self._rows[self._next - count : self._next]


def time_gathers(
    gather: Gather,
    batches: Iterable[NDArray[np.int64]],
    columns: int,
    what: str,
    seconds_max: float = float("inf"),
) -> tuple[int, float]:
    """Gather batches until the time is up, and check every value; return rows and seconds."""
    count, seconds = 0, 0.0
    for number, rows in enumerate(batches):
        start = time.perf_counter()
        got = gather(rows)
        seconds += time.perf_counter() - start
        check_equal(f"{what}, batch {number}", np.asarray(got), expected_rows(rows, columns))
        count += len(rows)
        if seconds >= seconds_max:
            break
    return count, seconds


# The ways of a row to the device.


@dataclass(frozen=True)
class _Buffers:
    """Device memory of a gather: on a GPU, neither indices nor rows come back to the host."""

    device: Device
    index: DeviceArray
    out: DeviceArray


@contextmanager
def _buffers(device: Device, rows: int, columns: int) -> Iterator[_Buffers]:
    with (
        device.empty_array((rows,), np.int64) as index,
        device.empty_array((rows, columns), np.float32) as out,
    ):
        yield _Buffers(device, index, out)


def _ours(array: fw.Array, to: _Buffers) -> Gather:
    def gather(rows: NDArray[np.int64]) -> DeviceArray:
        to.device.upload(to.index.address, rows)
        array.gather(to.index, out=to.out)
        return to.out

    return gather


def _memmap(table: NDArray[np.float32], to: _Buffers) -> Gather:
    # What `torch.from_numpy(table[rows]).cuda()` does.
    def gather(rows: NDArray[np.int64]) -> DeviceArray:
        to.device.upload(to.out.address, table[rows])
        return to.out

    return gather


def _uva(program: fw.program.Program, table: int, to: _Buffers) -> Gather:
    pull, row_bytes = program["pull_rows"], to.out.nbytes // len(to.out)

    def gather(rows: NDArray[np.int64]) -> DeviceArray:
        to.device.upload(to.index.address, rows)
        pull(table, to.index, to.out.address, len(rows), row_bytes, warps=len(rows))
        to.device.wait()
        return to.out

    return gather


def _select(torch: Any, table: NDArray[np.float32], to: _Buffers) -> Gather:
    source = torch.from_numpy(table)
    pinned = torch.empty(to.out.shape, dtype=torch.float32, pin_memory=True)

    def gather(rows: NDArray[np.int64]) -> DeviceArray:
        torch.index_select(source, 0, torch.from_numpy(rows), out=pinned)
        to.device.upload(to.out.address, pinned.numpy())
        return to.out

    return gather


def _find_torch() -> tuple[Any, str]:
    """Return torch, or None and the reason."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None, "torch is not installed"
    return (torch, "") if torch.cuda.is_available() else (None, "torch finds no GPU")


# The file is on the disk.


def _from_disk(
    path: Path, size: FeatureSize, device: Device
) -> tuple[list[Rate], tuple[int, int], str]:
    """Measure flashwarp, and on a GPU the way of numpy, for each number of rows a call.

    Returns rates, the rows that flashwarp read and was asked for, and its route.
    """
    order, rates = _Order(size.rows), []
    calls = size.calls if _on_gpu(device) else size.calls[-1:]  # rates by calls are a GPU's
    with _open(path, size, device, direct_reads_work(path)) as array:
        for count in calls:
            with _buffers(device, count, size.columns) as to:
                gather = _ours(array, to)
                gather(order.take(count))  # warm-up
                rates.append(_measure(OURS, gather, order, count, size))
        explained = array.explain()
        asked = sum(rate.rows for rate in rates) + sum(calls)
        counts = array.stats.bytes_read // (4 * size.columns), asked
    if _on_gpu(device):
        for count in size.calls:
            # numpy's reads also bring in what lies beside, so each measurement starts anew.
            drop_page_cache(path)
            table = np.load(path, mmap_mode="r")
            with _buffers(device, count, size.columns) as to:
                rates.append(_measure(MEMMAP, _memmap(table, to), order, count, size))
            del table
            if rates[-1].seconds > _CALL_SECONDS_MAX:
                break
    return rates, counts, f"{explained.route}: {explained.reason}"


def _measure(how: str, gather: Gather, order: _Order, count: int, size: FeatureSize) -> Rate:
    batches = map(order.take, repeat(count))
    what = f"rows: {how}, {count} a call"
    # Two of the largest calls already fill the time, and the title is about them: take eight.
    limit = size.seconds * (4 if count == size.calls[-1] else 1)
    rows, seconds = time_gathers(gather, batches, size.columns, what, limit)
    return Rate(how, count, rows, seconds)


def _open(path: Path, size: FeatureSize, device: Device, o_direct: bool | None) -> fw.Array:
    return fw.open(
        path, device=device, cache=size.cache_bytes, line=4 * size.columns, o_direct=o_direct
    )


# The file is in the page cache.


def from_page_cache(
    path: Path, size: FeatureSize, device: Device, pull: fw.program.Program
) -> tuple[list[Rate], list[str], str]:
    """Measure all ways on the same batches; return rates, what is missing, and our route.

    Needs pinned memory for all of the file, for the UVA gather. What is missing has its reason.
    """
    fill_page_cache(path)
    warm_up, *batches = draw_batches(size.rows, size.batch_rows, 1 + size.batches, seed=1)
    missing = []
    table = np.load(path, mmap_mode="r")

    def measure(how: str, gather: Gather) -> Rate:
        gather(warm_up)
        seconds = time_gathers(gather, batches, size.columns, f"rows: {how}")
        return Rate(how, size.batch_rows, *seconds)

    with ExitStack() as stack:
        to = stack.enter_context(_buffers(device, size.batch_rows, size.columns))
        with _open(path, size, device, None) as array:
            ours = measure(OURS, _ours(array, to))
            rates = [replace(ours, hit_rate=array.stats.hit_rate)]
            explained = array.explain()
        try:
            pinned = stack.enter_context(device.allocate_host(table.nbytes))
        except DeviceError as error:
            missing.append(f"{UVA}: {error}")
        else:
            np.copyto(pinned.as_numpy(), table.view(np.uint8).reshape(-1))
            rates.append(measure(UVA, _uva(pull, pinned.address, to)))
        torch, why_not = _find_torch()
        if torch is None:
            missing.append(f"{SELECT}: {why_not}")
        else:
            # torch wants writable memory; nothing is written.
            writable = np.load(path, mmap_mode="c")
            rates.append(measure(SELECT, _select(torch, writable, to)))
        rates.append(measure(MEMMAP, _memmap(table, to)))
    return rates, missing, f"{explained.route}: {explained.reason}"


def _on_gpu(device: Device) -> bool:
    return device.kind != "cpu"


# The part as a whole.


def run(
    directory: Path,
    size: FeatureSize,
    device: Device,
    steps: Steps,
    pull: fw.program.Program | None = None,
) -> FeaturesResult:
    """Write the table, measure the disk, gather rows of it; with `pull`, also from the page cache.

    `pull` is what `compile_pull` returned.
    """
    path = directory / "features.npy"
    row_bytes = 4 * size.columns
    with steps.step("rows: write the table"):
        write_table(path, size.rows, size.columns)
        drop_page_cache(path)
    left_over = resident_fraction(path)
    before = _ceiling(path, row_bytes, device, steps, "rows: measure the disk itself")
    with steps.step("rows: gather from the disk"):
        disk, counts, explained = _from_disk(path, size, device)
    after = _ceiling(path, row_bytes, device, steps, "rows: measure the disk itself again")
    result = FeaturesResult(
        file_bytes=row_bytes * size.rows,
        cache_bytes=size.cache_bytes,
        row_bytes=row_bytes,
        on_gpu=_on_gpu(device),
        disk=tuple(disk),
        ceiling=_mean(before, after),
        cold_note=_cold_note(direct_reads_work(path), left_over),
        rows_read=counts[0],
        rows_asked=counts[1],
        path=explained,
    )
    if pull is None:
        return result
    with steps.step("rows: gather from the page cache"):
        rates, missing, explained = from_page_cache(path, size, device, pull)
        link = measure_link(device).to_gpu / 1e9
    return replace(
        result,
        page_cache=tuple(rates),
        page_cache_path=explained,
        missing=tuple(missing),
        link_gb_per_s=link,
    )


def _ceiling(path: Path, row_bytes: int, device: Device, steps: Steps, step: str) -> DiskCeiling:
    if not _on_gpu(device):
        return DiskCeiling(row_bytes, 0.0, 0.0, "not measured on the CPU device")
    with steps.step(step):
        return measure_ceiling(path, row_bytes, _CEILING_SECONDS)


def _mean(one: DiskCeiling, other: DiskCeiling) -> DiskCeiling:
    if not (one.random_reads_per_s and other.random_reads_per_s):
        return one  # its note says why
    return replace(
        one,
        random_reads_per_s=(one.random_reads_per_s + other.random_reads_per_s) / 2,
        sequential_gb_per_s=(one.sequential_gb_per_s + other.sequential_gb_per_s) / 2,
    )


def _cold_note(o_direct: bool, left_over: float | None) -> str:
    if o_direct:
        how = "flashwarp read it with O_DIRECT, past the page cache"
    else:
        how = "This file system has no O_DIRECT: flashwarp read it through the page cache"
    left = "how much of it stayed is unknown" if left_over is None else f"{left_over:.1%} stayed"
    return f"{how}.\nBefore, the file was dropped from the page cache ({left})."
