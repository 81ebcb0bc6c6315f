"""What flashwarp reaches on this machine, beside what its disk, link and memory give without it.

One file of rows is read by gathers, a load and a pipeline, first from the page cache and then from
the disk; a state of a quarter of its size is saved and restored. Each stands beside the ceiling of
the same run, and its data is checked. The disk drifts, so it is measured before and after.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from flashwarp.device import Device
from flashwarp.probe import disk
from flashwarp.probe.link import LinkRates, compile_pull, measure_link
from flashwarp.probe.report import Report, Row
from flashwarp.probe.timing import device_seconds, median_of, wall_seconds

_ROW_BYTES = 4096
_WORDS = _ROW_BYTES // 4
_AT_A_TIME = 2048
_TILE_ROWS = 4096
_SAMPLE = 64
_DISK_S = 0.5
_SEED = 1


def reach(device: Device, folder: Path, nbytes: int, parts: list[str], runs: int) -> Report:
    """Measure the machine, and the parts, with files of `nbytes` and a half more in `folder`."""
    report = Report(
        "What flashwarp reaches here",
        device.describe(),
        {"bytes": nbytes, "parts": parts, "runs": runs, "left out": []},
        {"rows": _SEED},
    )
    bench = _Reach(device, folder, nbytes // _ROW_BYTES, report, runs)
    bench.write()
    for name in ("machine", *parts):
        with report.part(name):
            getattr(bench, name)()
    return report


def _content(rows: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the content of rows of the file: a counter."""
    content = rows.astype(np.uint32)[:, None] * _WORDS + np.arange(_WORDS, dtype=np.uint32)
    return content.view(np.int32)


@dataclass
class _Reach:
    """A device, a file of rows, and what the machine gives without flashwarp."""

    device: Device
    folder: Path
    rows: int
    report: Report
    runs: int

    def __post_init__(self) -> None:
        self.path = self.folder / "rows.npy"
        self.random = np.random.default_rng(_SEED)
        self.on_gpu = self.device.kind == "cuda"
        self.nbytes = self.rows * _ROW_BYTES

    def write(self) -> None:
        """Write the file, and learn whether its file system can pass the page cache by."""
        with self.path.open("r+b" if disk.create_npy(self.path, *self._kind) else "wb") as file:
            file.seek(-self.nbytes, 2)
            for first in range(0, self.rows, _AT_A_TIME):
                file.write(_content(np.arange(first, min(first + _AT_A_TIME, self.rows))).data)
        self.has_disk = disk.direct_reads_work(self.path)
        if not self.has_disk:
            self._leave_out("the disk: no O_DIRECT on this file system")

    @property
    def _kind(self) -> tuple[tuple[int, int], np.dtype[Any]]:
        return (self.rows, _WORDS), np.dtype(np.int32)

    def _leave_out(self, what: str) -> None:
        self.report.settings["left out"].append(what)
        print(f"left out: {what}", flush=True)

    # The machine.

    @cached_property
    def memory(self) -> float:
        """GB/s of copies in the host's memory, by one thread."""
        source = np.ones(min(self.nbytes, 1 << 28), np.uint8)
        target = np.zeros_like(source)
        seconds = median_of(lambda: wall_seconds(lambda: np.copyto(target, source)))
        return source.nbytes / 1e9 / seconds

    @cached_property
    def link(self) -> LinkRates:
        """Bytes a second by the GPU's copy engines."""
        return measure_link(self.device)

    @property
    def _arriving(self) -> tuple[str, float]:
        """The ceiling of bytes that come from the host's memory."""
        if self.on_gpu:
            return "the link, to the GPU", self.link.to_gpu / 1e9
        return "copies in memory", self.memory

    def machine(self) -> None:
        """Measure what everything below stands beside."""
        add = partial(self._add, checked=None)
        add("host memory: copies, one thread", self.memory)
        if self.on_gpu:
            add("link: to the GPU, by its copy engine", self.link.to_gpu / 1e9)
            add("link: to the host", self.link.to_host / 1e9)
            add("GPU memory: filled", self._fill())
        if self.has_disk:
            ceiling = disk.measure_ceiling(self.path, _ROW_BYTES, _DISK_S)
            add("disk: random reads of 4 KiB", ceiling.random_gb_per_s, note=ceiling.note)
            add("disk: reads of 1 MiB in order", ceiling.sequential_gb_per_s)
            add("disk: writes", self._writes())

    def _fill(self) -> float:
        with self.device.allocate(1 << 28) as memory:
            fill = partial(self.device.fill, memory.address, 1, 1 << 28)
            return (1 << 28) / 1e9 / median_of(lambda: device_seconds(self.device, fill))

    def _writes(self) -> float:
        path = self.folder / "written"
        path.touch()
        try:
            return disk.measure_writes(path, max(self.nbytes // 4, 8 << 20))[1] / 1e9
        finally:
            path.unlink()

    @contextlib.contextmanager
    def _beside(self, measure: Callable[[], float]) -> Iterator[list[float]]:
        """Measure the disk before and after; the list holds the mean in the end."""
        found = [measure()]
        yield found
        found[:] = [mean([found[0], measure()])]

    def _ceiling(self, which: str) -> float:
        found = disk.measure_ceiling(self.path, _ROW_BYTES, _DISK_S)
        return float(getattr(found, which))

    # What flashwarp makes of it.

    def gather(self) -> None:
        """Rows at random: in the cache, in the page cache, and on the disk."""
        # So many on a GPU that a call takes much longer than its launch.
        count = min(self.rows // 4, (1 << 17) if self.on_gpu else (1 << 15))
        with (
            self.device.empty_array((count,), np.int64) as index,
            self.device.empty_array((count, _WORDS), np.int32) as out,
        ):
            with self._open(cache=2 * count * _ROW_BYTES, o_direct=False) as x:
                chosen = self.random.permutation(count)
                seconds, right = self._gathers(x, index, out, lambda: chosen)
                name, best = self._plain(index, out, chosen)
                self._add("gather: resident rows", out.nbytes / 1e9 / seconds, name, best, right)
            with self._open(o_direct=False) as x:
                disk.fill_page_cache(self.path)
                seconds, right = self._gathers(x, index, out, self._any(count), x.drop_cache)
                name, best = self._arriving if self.on_gpu else self._taken(count, out)
                rate = out.nbytes / 1e9 / seconds
                self._add("gather: rows in the page cache", rate, name, best, right)
            if self.has_disk:
                disk.drop_page_cache(self.path)
                with (
                    self._open(o_direct=True) as x,
                    self._beside(partial(self._ceiling, "random_gb_per_s")) as best_of,
                ):
                    seconds, right = self._gathers(x, index, out, self._any(count), x.drop_cache)
                name, rate = "its random reads of 4 KiB", out.nbytes / 1e9 / seconds
                self._add("gather: rows on the disk", rate, name, best_of[0], right)

    def _open(self, cache: int = 0, **options: Any) -> fw.Array:
        cache = cache or max(self.nbytes // 8, 1 << 20)
        return fw.open(self.path, device=self.device, cache=cache, **options)

    def _any(self, count: int) -> Callable[[], NDArray[np.int64]]:
        return lambda: self.random.choice(self.rows, count, replace=False)

    def _gathers(
        self,
        x: fw.Array,
        index: Any,
        out: Any,
        choose: Callable[[], NDArray[np.int64]],
        before: Callable[[], object] = lambda: None,
    ) -> tuple[float, bool]:
        """Return the seconds of a gather, and whether all rows of the last one were right."""

        def once() -> float:
            self.chosen = choose()
            before()
            self.device.upload(index.address, self.chosen)
            return wall_seconds(lambda: x.gather(index, out=out))

        seconds = median_of(once, self.runs)
        return seconds, bool((np.asarray(out) == _content(self.chosen)).all())

    def _plain(self, index: Any, out: Any, chosen: NDArray[np.int64]) -> tuple[str, float]:
        """Copy resident rows from plain memory of the device, as its fastest kernel does."""
        table = _content(np.arange(len(chosen)))
        if not self.on_gpu:
            into = np.empty(out.shape, np.int32)
            take = partial(np.take, table, chosen, 0, into, "clip")
            seconds = median_of(partial(wall_seconds, take), self.runs)
            return "numpy.take", out.nbytes / 1e9 / seconds
        pull = compile_pull(self.device)["pull_rows"]
        with self.device.allocate(table.nbytes) as plain:
            self.device.upload(plain.address, table)

            def launch() -> None:
                arguments = (plain.address, index, out.address, len(chosen), _ROW_BYTES)
                pull(*arguments, warps=len(chosen))

            seconds = median_of(lambda: device_seconds(self.device, launch))
        return "a kernel on plain memory", out.nbytes / 1e9 / seconds

    def _taken(self, count: int, out: Any) -> tuple[str, float]:
        plain, into = np.load(self.path, mmap_mode="r"), np.empty(out.shape, np.int32)
        choose = self._any(count)

        def take() -> float:
            chosen = choose()
            return wall_seconds(lambda: np.take(plain, chosen, 0, into, "clip"))

        return "numpy.take of a memmap", out.nbytes / 1e9 / median_of(take, self.runs)

    def load(self) -> None:
        """The whole file into a new tensor."""
        library = self._library()
        if library is None:
            return
        disk.fill_page_cache(self.path)
        rate, right = self._loads(library, cold=False)
        self._add("load: from the page cache", rate, *self._arriving, right)
        if self.has_disk:
            with self._beside(partial(self._ceiling, "sequential_gb_per_s")) as best:
                rate, right = self._loads(library, cold=True)
            self._add("load: from the disk", rate, "its reads in order", best[0], right)

    def _loads(self, library: str, cold: bool) -> tuple[float, bool]:
        found: dict[str, Any] = {}
        options: dict[str, Any] = {"library": library, "o_direct": cold, "progress": False}

        def once() -> float:
            found.clear()
            if cold:
                disk.drop_page_cache(self.path)
            return wall_seconds(lambda: found.update(fw.load(self.path, self.device, **options)))

        seconds = median_of(once, self.runs)
        (tensor,) = found.values()
        return self.nbytes / 1e9 / seconds, self._holds(tensor, 0, self.rows)

    def _library(self) -> str | None:
        """The library whose arrays hold whole files and tiles; None without one for a GPU."""
        if not self.on_gpu:
            return "numpy"
        for name in ("torch", "cupy"):
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)
                return name
        self._leave_out("load and pipeline: tensors on a GPU need torch or cupy")
        return None

    def _holds(self, array: Any, first: int, rows: int) -> bool:
        """Return whether some rows of an array are those of the file from `first` on."""
        address = self.device.view(array).address
        places = np.unique(np.append(self.random.integers(0, rows, _SAMPLE), [0, rows - 1]))
        found = [self.device.download(address + _ROW_BYTES * int(k), _ROW_BYTES) for k in places]
        got = np.frombuffer(b"".join(found), np.int32).reshape(-1, _WORDS)
        return bool((got == _content(first + places)).all())

    def pipeline(self) -> None:
        """The file from front to back, in tiles that arrive while the loop goes on."""
        library = self._library()
        if library is None:
            return
        disk.fill_page_cache(self.path)
        with self._open(o_direct=False) as x:
            seconds, right = self._tiles(x, library)
        name, best = self._arriving
        rate = self.nbytes / 1e9 / seconds
        self._add("pipeline: tiles from the page cache", rate, name, best, right)
        if self.has_disk:
            disk.drop_page_cache(self.path)
            with (
                self._open(o_direct=True) as x,
                self._beside(partial(self._ceiling, "sequential_gb_per_s")) as best_of,
            ):
                seconds, right = self._tiles(x, library)
            name, rate = "its reads in order", self.nbytes / 1e9 / seconds
            self._add("pipeline: tiles from the disk", rate, name, best_of[0], right)

    def _tiles(self, x: fw.Array, library: str) -> tuple[float, bool]:
        tiles = partial(fw.Pipeline.tiles, x, min(_TILE_ROWS, self.rows), library=library)

        def once() -> float:
            x.drop_cache()
            return wall_seconds(self._through(tiles(), library))

        seconds = median_of(once, self.runs)
        right, first = True, 0
        for tile in tiles():
            self.device.wait(self.device.current_stream(library))  # which the tile arrives in
            right &= self._holds(tile, first, len(tile))
            first += len(tile)
        return seconds, right and first == self.rows

    def _through(self, tiles: Iterator[Any], library: str) -> Callable[[], None]:
        def loop() -> None:
            for _ in tiles:
                pass
            self.device.wait(self.device.current_stream(library))

        return loop

    def checkpoint(self) -> None:
        """One array saved, made durable, and restored from its files."""
        rows = max(self.rows // 4, 1)
        size = rows * _ROW_BYTES
        folder = self.folder / "versions"
        opened = partial(
            fw.Checkpointer, folder, self.device, gpu_memory=2 * size, host_memory=2 * size
        )
        with self.device.empty_array((rows, _WORDS), np.int32) as state:
            self.device.upload(state.address, _content(np.arange(rows)))
            returned, durable = [], []
            with (
                opened() as saved,
                self._beside(self._writes) as written,
            ):
                saved.protect("state", state)
                for version in range(self.runs):
                    returned.append(wall_seconds(partial(self._saved, saved, version)))
                    durable.append(returned[-1] + wall_seconds(partial(saved.wait, version)))
            for file in folder.rglob("*"):
                if file.is_file():
                    disk.drop_page_cache(file)
            self.device.upload(state.address, np.zeros((rows, _WORDS), np.int32))
            with (
                opened() as restored,
                self._beside(partial(self._ceiling, "sequential_gb_per_s")) as read,
            ):
                restored.protect("state", state)
                seconds = wall_seconds(partial(restored.restart, self.runs - 1))
            right = self._holds(state, 0, rows)
        copies = "copies in memory", self.memory
        if self.on_gpu:
            copies = "GPU memory, filled", self._fill()
        for what, taken, against, best in (
            ("checkpoint: until the state may change", median(returned), *copies),
            ("checkpoint: until it is durable", median(durable), "the disk's writes", written[0]),
            ("restart: from the disk", seconds, "its reads in order", read[0]),
        ):
            self._add(what, size / 1e9 / taken, against, best, right)

    def _saved(self, checkpointer: fw.Checkpointer, version: int) -> None:
        checkpointer.checkpoint(version)
        self.device.wait()

    def _add(
        self,
        name: str,
        rate: float,
        against: str = "",
        best: float = 0.0,
        checked: bool | None = None,
        note: str = "",
    ) -> None:
        row = Row(name, rate, "GB/s", against, best, 0.0, checked, footprint=self.nbytes, note=note)
        self.report.add(row)
