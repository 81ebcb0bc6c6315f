"""A table larger than memory inside a step, beside what programs do today.

The table has the shape of the n-gram tables of language models: rows of 160 bytes in FP8, a few of
which a step reads at random. A step computes ids, looks their rows up, and feeds them to a model of
some matrices. On a GPU it is one CUDA graph, unless its way needs the ids on the host.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np

import flashwarp as fw
from benchmarks.base import Record, bytes_of
from benchmarks.calls.graphs import MappedRows
from benchmarks.tables.file import DATA_OFFSET, write_table
from benchmarks.tables.processes import Limits, compare_processes
from flashwarp.config import parse_bytes
from flashwarp.device import Device, resolve
from flashwarp.probe import disk
from flashwarp.probe.timing import in_turns

__all__ = ["run"]

_ROW_BYTES = 160
_DECODED = (16, 1024)
_PREFILL = 32_768
_EQUAL = 10_000_000
_THREADS = 32
_QUEUE_DEPTH = 64
_BLOCK = 4096
_WHOLE = 5 * _BLOCK  # rows that fill blocks: O_DIRECT reads whole ones
_MODEL = {"cuda": (4096, 32), "cpu": (128, 2)}  # elements of a layer, and layers
_TOKENS = 512
_COPY_BYTES = 256 << 20
_FIRST_ROW_BYTES = 40 << 30
_WARM_ROWS = 1024
_LEAST_LIMIT = {"cuda": 32 << 20, "cpu": 2 << 20}  # arrays, and the lines of a step

# What this project accepts.
_IN_PLACE_SLOWER = 1.1
_ADDED_US = {16: 100, 1024: 1000}
_GENERATING = 0.97
_OF_CEILING, _OF_MAP = 0.9, 1.5
_FIRST_ROW_S = 2.0


def run(
    device: str | None,
    folder: Path,
    size: Annotated[str, "Bytes of the table; empty: 4 GiB, 16 MiB on the CPU device."] = "",
    budget: Annotated[str, "Bytes of GPU memory for the cache; empty: an eighth."] = "",
    ram: Annotated[str, "Host memory for a process; empty: 256 MiB, 4 MiB on the CPU."] = "",
    hot: Annotated[float, "The part of the table that the decoding steps draw from."] = 0.002,
    steps: Annotated[int, "Steps that one measurement takes."] = 100,
    runs: Annotated[int, "How often each way has its turn."] = 3,
    seed: Annotated[int, "Of the rows and the ids."] = 1,
) -> Record:
    """Time steps that read rows of a table: resident, pinned, by the host, and by us."""
    where = resolve(device)
    nbytes = bytes_of(where, size, "4 GiB", "16 MiB")
    cache = parse_bytes(budget) if budget else nbytes // 8
    host = bytes_of(where, ram, "256 MiB", "4 MiB")
    rows = nbytes // _WHOLE * (_WHOLE // _ROW_BYTES)
    bench = _Tables(where, folder / "table.safetensors", rows, cache, hot, steps, runs, seed)
    bench.report = Record(
        "Tables larger than memory",
        where.describe(),
        {
            "rows": bench.rows, "row_bytes": _ROW_BYTES, "cache": cache, "ram": host, "hot": hot,
            "steps": steps, "hidden": bench.hidden, "layers": bench.layers,
        },
        {"rows and ids": seed},
    )  # fmt: skip
    with bench.written(), bench.ways() as ways:
        for count in _DECODED:
            bench.decode(ways, count)
        bench.equal(ways)
    bench.first_row(folder / "sparse.bin")
    bench.prefill()
    limits = Limits(
        where.name, bench.path, rows, _ROW_BYTES, host,
        max(cache, _LEAST_LIMIT[where.kind]), seed,
    )  # fmt: skip
    compare_processes(bench.report, limits, folder / "small.safetensors")
    return bench.report


@dataclass
class _Way:
    """A way to look rows up: ids on the device in, rows in bfloat16 out."""

    name: str
    lookup: Callable[[Any], Any]
    needs_host: bool = False


class _Model:
    """What a step does beside its lookup, and the state that steps hand on."""

    def __init__(self, bench: _Tables, count: int) -> None:
        torch, place = bench.torch, bench.place
        self.torch, self.rows = torch, bench.rows
        made = torch.Generator().manual_seed(1)

        def weights(*shape: int) -> Any:
            values = torch.randn(shape, generator=made) * (2 / shape[0]) ** 0.5
            return values.to(place, torch.bfloat16)

        self.first = weights(_ROW_BYTES, bench.hidden) / 16
        self.layers = [weights(bench.hidden, bench.hidden) for _ in range(bench.layers)]
        self.last = torch.zeros(count, dtype=torch.int64, device=place)
        self.number = torch.arange(count, dtype=torch.int64, device=place)
        self.place = torch.zeros(1, dtype=torch.int64, device=place)
        self.span = torch.full((1,), bench.hot, dtype=torch.int64, device=place)
        self.history = torch.zeros((_TOKENS, count), dtype=torch.int64, device=place)

    def step(self, lookup: Callable[[Any], Any]) -> None:
        """Compute ids from the last tokens, look their rows up, and choose the next tokens."""
        mixed = self.last * 0x9E3779B1 + self.place * 0x85EBCA6B + self.number * 0xC2B2AE35
        mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
        ids = (mixed >> 7 & (1 << 40) - 1) % self.span * 0x9E3779B1 % self.rows
        hidden = lookup(ids) @ self.first
        for layer in self.layers:
            hidden = (hidden @ layer).relu()
        self.last.copy_(hidden.argmax(1))
        self.history.index_copy_(0, self.place % _TOKENS, self.last[None])
        self.place += 1

    def restart(self) -> None:
        """Begin again."""
        for state in (self.last, self.place, self.history):
            state.zero_()


class _Tables:
    """The table's file, and the ways to look its rows up."""

    report: Record

    def __init__(
        self, device: Device, path: Path, rows: int, cache: int, hot: float, steps: int, runs: int,
        seed: int,
    ) -> None:  # fmt: skip
        # flashwarp.torch says what to install where torch is missing.
        self.modules: Any = importlib.import_module("flashwarp.torch")
        self.torch: Any = importlib.import_module("torch")
        self.device, self.path, self.rows, self.cache = device, path, rows, cache
        self.hot = max(int(rows * hot), 1)
        self.steps, self.runs = steps, runs
        self.on_gpu = device.kind == "cuda"
        self.place = f"cuda:{device.ordinal}" if self.on_gpu else "cpu"
        self.hidden, self.layers = _MODEL[device.kind]
        self.rng = np.random.default_rng(seed)
        write_table({path: ["table.weight"]}, rows, _ROW_BYTES, seed)
        self.map = self._mapped()
        self.pool = ThreadPoolExecutor(_THREADS)

    def _mapped(self) -> np.ndarray[Any, Any]:
        """Map the file, as one does whose rows are far apart: without reading ahead."""
        with self.path.open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        pages.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(pages, np.uint8, offset=DATA_OFFSET).reshape(self.rows, _ROW_BYTES)

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Write the file back beside what needs no disk, so that its pages can be dropped after."""

        def sync() -> None:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

        beside = threading.Thread(target=sync)
        beside.start()
        try:
            yield
        finally:
            beside.join()

    def opened(self, **settings: Any) -> fw.Array:
        """Open the table."""
        return self._opened(self.path, self.rows, offset=DATA_OFFSET, **settings)

    def _opened(self, path: Path, rows: int, **settings: Any) -> fw.Array:
        shape = (rows, _ROW_BYTES)
        return fw.open(path, dtype=np.uint8, shape=shape, device=self.device, **settings)

    def module(self, array: fw.Array) -> Any:
        """Make the module that reads an array."""
        torch = self.torch
        return self.modules.Embedding(array, stored=torch.float8_e4m3fn, dtype=torch.bfloat16)

    def dequantised(self, rows: Any) -> Any:
        """Convert rows of codes, as the ways without us have to."""
        return rows.view(self.torch.float8_e4m3fn).to(self.torch.bfloat16)

    @contextlib.contextmanager
    def ways(self) -> Iterator[dict[str, _Way]]:
        """Open the table in all ways."""
        torch = self.torch
        resident = torch.empty((self.rows, _ROW_BYTES), dtype=torch.uint8, device=self.place)
        step = _COPY_BYTES // _ROW_BYTES
        for first in range(0, self.rows, step):
            part = np.array(self.map[first : first + step])
            resident[first : first + step] = torch.from_numpy(part)

        def select(table: Any) -> Callable[[Any], Any]:
            return lambda ids: self.dequantised(torch.index_select(table, 0, ids))

        ways = {"resident": _Way("the table in the device's memory", select(resident))}
        with contextlib.ExitStack() as undo:
            controller = fw.SoftwareController(data_path="bounce") if self.on_gpu else None
            budget = undo.enter_context(
                self.opened(cache=self.cache, o_direct=False, controller=controller)
            )
            if self.on_gpu:
                place = undo.enter_context(self.opened(o_direct=False, immutable=True))
                ways["in place"] = _Way(f"ours, {place.explain().path}", self.module(place))
                if place.in_place is not None:
                    mapped = MappedRows(place.in_place, (self.rows, _ROW_BYTES // 4))
                    table = torch.as_tensor(mapped, device=self.place).view(torch.uint8)
                    ways["pinned"] = _Way("index_select of pinned memory", select(table))
            ways["budget"] = _Way(
                f"ours, a cache of {self.cache >> 20} MiB, {budget.explain().path}",
                self.module(budget),
            )
            ways["mapped"] = _Way(
                f"{_THREADS} threads that gather from a memory map, and a copy", self._by_map, True
            )
            yield ways

    def _by_map(self, ids: Any) -> Any:
        """Gather on the host, whose map waits for the file."""
        rows = ids.cpu().numpy()
        found = self._pinned(len(rows))
        into, step = found.numpy(), -(-len(rows) // _THREADS)
        parts = range(0, len(rows), step)
        list(
            # Only with a mode that checks no ids does numpy write to `into` itself.
            self.pool.map(
                lambda k: self.map.take(rows[k : k + step], 0, into[k : k + step], "clip"), parts
            )
        )
        return self.dequantised(found.to(self.place, non_blocking=True))

    def _by_queue(self, ids: Any) -> Any:
        """Read the blocks of rows past the page cache, some at a time, and copy the rows out."""
        rows = ids.cpu().numpy()
        first = DATA_OFFSET + rows * _ROW_BYTES
        blocks, where = np.unique(
            np.stack((first, first + _ROW_BYTES - 1)) // _BLOCK, return_inverse=True
        )
        read = disk.read_blocks(self.path, blocks, _BLOCK, _QUEUE_DEPTH)
        offset = where.reshape(2, -1)[0] * _BLOCK + first % _BLOCK
        # A row that ends in the next block: that block is the next of `blocks`, too.
        found = self._pinned(len(rows))
        np.take(read, offset[:, None] + np.arange(_ROW_BYTES), out=found.numpy())
        return self.dequantised(found.to(self.place, non_blocking=True))

    def _pinned(self, count: int) -> Any:
        torch = self.torch
        return torch.empty((count, _ROW_BYTES), dtype=torch.uint8, pin_memory=self.on_gpu)

    def decode(self, ways: dict[str, _Way], count: int) -> None:
        """Steps whose rows come from a part of the table that has been read before."""
        model = _Model(self, count)
        steps = {name: self._stepper(model, way) for name, way in ways.items()}
        timed = {name: self._timed(model, step) for name, step in steps.items()}
        times = in_turns(timed, self.runs)
        generates = count == _DECODED[0]
        tokens, taken = {}, {name: list[float]() for name in steps}
        for _ in range(self.runs if generates else 1):
            for name, step in steps.items():
                taken[name].append(self._take(model, step, _TOKENS if generates else self.steps))
                tokens[name] = model.history.clone()
        del steps, timed  # graphs keep arrays open
        right = {n: bool(self.torch.equal(t, tokens["resident"])) for n, t in tokens.items()}
        self._report_steps(ways, count, times, right)
        if generates:
            self._report_tokens(ways, count, taken, right)

    def _take(self, model: _Model, step: Callable[[], object], count: int) -> float:
        """Take steps from the first one on; return the seconds of all."""
        model.restart()
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            step()
        self._wait()
        return time.perf_counter() - start

    def _report_tokens(
        self,
        ways: Mapping[str, _Way],
        count: int,
        taken: Mapping[str, list[float]],
        right: Mapping[str, bool],
    ) -> None:
        """Add a row for each way beside the resident table: how fast it generates tokens."""
        rates = {name: _TOKENS / median(seconds) for name, seconds in taken.items()}
        reference = rates.pop("resident")
        for name, rate in rates.items():
            self.report.row(
                f"{_TOKENS} tokens generated, {count} rows each, {ways[name].name}",
                rate, "tokens/s", ways["resident"].name, reference,
                _GENERATING if name in ("in place", "budget") else 0.0, right[name],
            )  # fmt: skip

    def _report_steps(
        self,
        ways: Mapping[str, _Way],
        count: int,
        times: Mapping[str, float],
        right: Mapping[str, bool],
    ) -> None:
        """Add a row for each way: how many of its steps there are in a second."""
        best = "pinned" if "pinned" in times else "mapped"
        added = _ADDED_US.get(count, 0)
        for name, way in ways.items():
            if name == best:
                continue
            against, reference, target = ways[best].name, times[best], 0.0
            if name == "in place" and best == "pinned":
                target = 1 / _IN_PLACE_SLOWER
            if name == "budget":
                against = f"the resident table's, and {added} us for each"
                reference, target = times["resident"] + added / 1e6, 1.0
            us = times[name] * 1e6
            self.report.row(
                f"steps with {count} rows, {way.name}", 1 / times[name], "steps/s", against,
                1 / reference, target, right[name],
                note=f"{us:.1f} us; {us - times['resident'] * 1e6:+.1f} us beside the resident "
                "table",
            )  # fmt: skip

    def _stepper(self, model: _Model, way: _Way) -> Callable[[], object]:
        """Return what takes a step: a graph's replay where it can be."""

        def step() -> None:
            model.step(way.lookup)

        with self.torch.no_grad():
            if not self.on_gpu or way.needs_host:
                step()
                return step
            cuda = self.torch.cuda
            side = cuda.Stream()
            side.wait_stream(cuda.current_stream())
            with cuda.stream(side):
                step()
            cuda.current_stream().wait_stream(side)
            graph = cuda.CUDAGraph()
            with cuda.graph(graph):
                step()
        replay: Callable[[], object] = graph.replay
        return replay

    def _timed(self, model: _Model, step: Callable[[], object]) -> Callable[[], float]:
        """Time steps; those before have read the same rows."""
        return lambda: self._take(model, step, self.steps) / self.steps

    def _wait(self) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def equal(self, ways: dict[str, _Way]) -> None:
        """Compare rows of all of the table, many of them twice, with those of a resident table."""
        name = "in place" if "in place" in ways else "budget"
        count = min(_EQUAL, 4 * self.rows)
        right, done, seconds = True, 0, 0.0
        while done < count:
            ids = self.torch.from_numpy(self.rng.integers(0, self.rows, min(count - done, 1 << 20)))
            ids = ids.to(self.place)
            expected = ways["resident"].lookup(ids)
            self._wait()
            start = time.perf_counter()
            found = ways[name].lookup(ids)
            self._wait()
            seconds += time.perf_counter() - start
            right &= bool(self.torch.equal(found, expected))
            done += len(ids)
        self.report.row(
            f"{count} random rows, {ways[name].name}", count / seconds / 1e6, "M rows/s",
            checked=right, footprint=self.rows * _ROW_BYTES,
        )  # fmt: skip

    def prefill(self) -> None:
        """Rows of which none has been read: past the page cache, and by a memory map."""
        blocks = self.rows * _ROW_BYTES // _BLOCK
        count = min(_PREFILL, blocks // (3 * (self.runs + 1)))
        ceiling = disk.measure_ceiling(self.path, _BLOCK)
        # Each block once, so that no row comes with one that has been read before.
        drawn = self.rng.choice(blocks, 3 * (self.runs + 1) * count, replace=False)
        within = self.rng.integers(0, _BLOCK // _ROW_BYTES, len(drawn))
        draws = iter((-(-drawn * _BLOCK // _ROW_BYTES) + within).reshape(-1, count))
        last: list[Any] = []

        def timed(lookup: Callable[[Any], Any]) -> Callable[[], float]:
            def measure() -> float:
                ids = next(draws)
                there = self.torch.from_numpy(ids).to(self.place)
                self._forget()
                self._wait()
                start = time.perf_counter()
                rows = lookup(there)
                self._wait()
                last[:] = [ids, rows]
                return time.perf_counter() - start

            return measure

        with self.opened(cache=self.cache, o_direct=True) as array:
            ways = {"map": self._by_map, "queue": self._by_queue, "ours": self.module(array)}
            times = in_turns({name: timed(lookup) for name, lookup in ways.items()}, self.runs)
            ids, rows = last
            expected = self.dequantised(self.torch.from_numpy(self.map[ids]))
            right = bool(self.torch.equal(rows.cpu(), expected))
        del self.map  # its pages stay in the page cache as long as they are mapped
        first = ids * _ROW_BYTES
        touched = np.unique(np.stack((first, first + _ROW_BYTES - 1)) // _BLOCK)
        rates = {name: count / seconds / 1e3 for name, seconds in times.items()}
        possible = ceiling.random_reads_per_s * count / len(touched) / 1e3
        against = {
            f"the disk's random reads of {_BLOCK} bytes (Linux AIO)": (possible, _OF_CEILING),
            f"{_THREADS} threads that gather from a memory map": (rates["map"], _OF_MAP),
            f"Linux AIO, {_QUEUE_DEPTH} deep, into staging memory": (rates["queue"], 0.0),
        }
        for name, (reference, target) in against.items():
            self.report.row(
                f"{count} rows that nothing has read, O_DIRECT", rates["ours"], "k rows/s",
                name, reference, target, right, note=ceiling.note,
                footprint=self.rows * _ROW_BYTES,
            )  # fmt: skip

    def _forget(self) -> None:
        """Drop the file's pages, which a map would keep."""
        del self.map
        disk.drop_page_cache(self.path)
        self.map = self._mapped()

    def first_row(self, path: Path) -> None:
        """Open a table of 40 GiB, most of it a hole, and read a row."""
        row = self.rng.integers(0, 0x7F, _ROW_BYTES, np.uint8)
        # Kernels are compiled and loaded at their first use, which is no part of opening.
        warm: list[dict[str, Any]] = [{}]
        if self.on_gpu:
            warm.append({"controller": fw.SoftwareController(data_path="bounce")})
        for settings in warm:
            self._open_and_read(path, _WARM_ROWS, row, settings)
        rows = _FIRST_ROW_BYTES // _ROW_BYTES
        opening, reading, how, right = self._open_and_read(path, rows, row, {})
        path.unlink()
        self.report.row(
            f"limit to open a table of {_FIRST_ROW_BYTES >> 30} GiB and read a row, {how}",
            _FIRST_ROW_S, "s", "seconds that it took", opening + reading, 1.0, right,
            note=f"{opening:.3f} s to open it, {reading:.3f} s for the row",
        )  # fmt: skip

    def _open_and_read(
        self, path: Path, rows: int, row: Any, settings: dict[str, Any]
    ) -> tuple[float, float, str, bool]:
        """Make a sparse table, open it and read its last row; return what each took."""
        with path.open("wb") as file:
            file.seek((rows - 1) * _ROW_BYTES)
            file.write(row.tobytes())
        ids = self.torch.tensor([rows - 1], device=self.place)
        self._wait()
        start = time.perf_counter()
        with self._opened(path, rows, **settings) as array:
            module = self.module(array)
            middle = time.perf_counter()
            found = module(ids).cpu()
            end = time.perf_counter()
            how = array.explain().path
        expected = self.dequantised(self.torch.from_numpy(row))
        return middle - start, end - middle, how, bool(self.torch.equal(found[0], expected))
