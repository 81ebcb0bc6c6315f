"""How close rows, elements and files come to the ceilings of the machine, in one run.

Every figure stands beside its ceiling (the link, the plain gather, the disk) or its best
alternative (numpy and torch), measured in the same process on the same data. The data is a counter,
so that any row can be checked against its index.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt

import flashwarp as fw
from benchmarks.base import Record
from flashwarp._jit.compiler import Source
from flashwarp._jit.program import LoadedKernel
from flashwarp.device import CudaDevice, Device, resolve
from flashwarp.launch.rows import ArrayStruct
from flashwarp.probe.disk import drop_page_cache, fill_page_cache, measure_ceiling
from flashwarp.probe.timing import device_seconds, in_turns, median_of, wall_seconds
from flashwarp.storage.npy import read_layout

__all__ = ["run"]

_ROW_WORDS = 1024
_ROW_BYTES = 4 * _ROW_WORDS
_LINES = (4096, 512)
# How often a row and its alternative are measured in turn, since the disk drifts.
_TURNS = 3
# Launches that submit commands without data, by their number of warps.
_GRIDS = (128, 256, 512, 1024, 4096)
_BATCH_ROWS = 65536


class _Figure(NamedTuple):
    """What a row is called, what it stands against, and the least ratio, by the bytes of a line."""

    name: str
    unit: str
    against: str
    target: float = 0.0
    target_512: float = 0.0


_PULL = "UVA gather, {line} B"
_PLAIN = "plain loads"
_BATCH = f"page cache: {_BATCH_ROWS:,} cold 4 KiB rows"
_FIGURES = {
    "queues": _Figure("host memory: raw queues, {line} B reads", "GB/s", _PULL, 0.98, 0.95),
    "commands": _Figure("no data: raw queues, default launch", "M/s", "best of all launches", 0.9),
    "gather": _Figure("host memory: gather cold {line} B rows", "GB/s", _PULL, 0.92, 0.80),
    "resident": _Figure("GPU cache: gather {line} B rows", "GB/s", "torch.index_select", 0.9),
    "random": _Figure("GPU cache: random 4 B elements, {line} B lines", "G/s", _PLAIN, 0.5),
    "ordered": _Figure("GPU cache: consecutive 4 B elements, {line} B lines", "G/s", _PLAIN, 0.7),
    "mapped": _Figure("page cache: gather cold 4 KiB rows in place", "GB/s", _PULL, 0.92),
    "bounce": _Figure("page cache: the same by buffers, 8 host threads", "GB/s", _PULL, 0.2),
    "torch": _Figure(_BATCH, "GB/s", "torch.index_select to pinned memory, then a copy", 1.8),
    "numpy": _Figure(_BATCH, "GB/s", "torch.from_numpy(memmap[idx]).cuda()", 12.0),
    "new": _Figure("page cache: 4 KiB rows", "GB/s", "memmap[idx]", 1.0),
    "given": _Figure("page cache: 4 KiB rows into out=", "GB/s", "np.take(out=)"),
    "direct": _Figure("flash: random 4 KiB rows", "k/s", "asynchronous I/O, depth 256", 0.95),
    "wide": _Figure("flash: rows in order, 1 MiB lines", "GB/s", "asynchronous I/O, 8 reads", 0.95),
}


def load_kernels(device: Device) -> dict[str, LoadedKernel]:
    """Compile the kernels of arrays.cu, or find them compiled; by name."""
    source = Source.read(Path(__file__).with_name("arrays.cu"))
    return device.load_program(source).by_name()


class QueueParams(ctypes.Structure):
    """Mirror of `bench::queue_params`."""

    _fields_ = (
        ("cache", ctypes.c_uint64),
        ("volume", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("target_blocks", ctypes.c_uint64),
        ("commands", ctypes.c_uint64),
        ("blocks", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("block_bytes", ctypes.c_uint32),
        ("data", ctypes.c_uint32),
        ("warps_max", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class ReduceParams(ctypes.Structure):
    """Mirror of `bench::reduce_params`."""

    _fields_ = (
        ("array", ArrayStruct),
        ("plain", ctypes.c_uint64),
        ("sum", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("span", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("random", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


def _counter(rows: int, words: int) -> npt.NDArray[np.uint32]:
    return np.arange(rows * words, dtype=np.uint32).reshape(rows, words)


def _write_counter(path: Path, rows: int) -> None:
    """Make the file as `fw.create` does, with its data at the start of a page."""
    fw.create(path, "uint32", (rows, _ROW_WORDS), overwrite=True).close()
    data = np.load(path, mmap_mode="r+")
    data[...] = _counter(rows, _ROW_WORDS)
    data.flush()


def _expected(index: npt.NDArray[np.int64], words: int) -> npt.NDArray[np.uint32]:
    return (index[:, None] * words + np.arange(words)).astype(np.uint32)


def run(
    device: str | None,
    folder: Path,
    gib: Annotated[float, "Size of the data in GiB; default 16 on a GPU, else 1."] = 0.0,
    seed: Annotated[int, "Of the random rows."] = 1,
) -> Record:
    """Measure everything that `device` can; needs `gib` GiB of disk in `folder` and of memory."""
    where = resolve(device)
    gib = gib or (16.0 if isinstance(where, CudaDevice) else 1.0)
    report = Record(
        title="First light",
        device=where.describe(),
        settings={"gib": gib, "row_bytes": _ROW_BYTES},
        seeds={"rows": seed},
    )
    rows = int(gib * 2**30) // _ROW_BYTES
    path = folder / "flashwarp-bench.npy"
    kind = _Gpu if isinstance(where, CudaDevice) else _Measurement
    try:
        _write_counter(path, rows)
        kind(where, report, seed).measure(path, rows)
    finally:
        path.unlink(missing_ok=True)
    return report


class _Measurement:
    """What every device can measure: rows of a file."""

    def __init__(self, device: Device, report: Record, seed: int) -> None:
        self.device = device
        self.report = report
        self.seed = seed
        self.rng = np.random.default_rng(seed)

    def add(
        self,
        row: str,
        value: float,
        reference: float,
        footprint: int,
        checked: bool | None = None,
        line: int = 4096,
    ) -> None:
        """Report a row of the table."""
        figure = _FIGURES[row]
        name, against = (each.format(line=line) for each in (figure.name, figure.against))
        target = figure.target if line == 4096 else figure.target_512
        self.report.row(
            name, value, figure.unit, against, reference, target, checked, footprint=footprint
        )

    def measure(self, path: Path, rows: int) -> None:
        """Measure rows of a file in the page cache, and past it."""
        self.warm(path, rows)
        self.direct(path, rows)

    def warm(self, path: Path, rows: int) -> None:
        count = min(rows, 65536)
        batches = [self.rng.permutation(rows)[:count] for _ in range(6)]
        out = np.empty((count, _ROW_WORDS), np.uint32)
        plain = np.load(path, mmap_mode="r")
        _ = int(plain[:, 0].sum())  # every page in the page cache and in the page table
        turn = itertools.cycle(batches)

        def take() -> None:
            np.take(plain, next(turn), axis=0, out=out, mode="clip")

        # Like against like: both allocate their result, or both are given it.
        with fw.open(path, device=self.device, cache=out.nbytes // 4) as x:
            checked = bool((x[batches[0]] == _expected(batches[0], _ROW_WORDS)).all())
            seconds = in_turns(
                {
                    "new": partial(wall_seconds, lambda: x[next(turn)]),
                    "numpy new": partial(wall_seconds, lambda: plain[next(turn)]),
                    "given": partial(wall_seconds, lambda: x.gather(next(turn), out=out)),
                    "numpy given": partial(wall_seconds, take),
                },
                runs=7,
            )
        speed = {way: out.nbytes / 1e9 / taken for way, taken in seconds.items()}
        self.add("new", speed["new"], speed["numpy new"], rows * _ROW_BYTES, checked)
        self.add("given", speed["given"], speed["numpy given"], rows * _ROW_BYTES)

    def there(self, index: npt.NDArray[np.int64]) -> Any:
        """Return indices that leave the results of a gather on the device."""
        return index

    def direct(self, path: Path, rows: int) -> None:
        """Rows past the page cache, against asynchronous I/O at the same depth on the same file."""
        drop_page_cache(path)
        count = min(rows // 4, 131072)
        wide_words = (1 << 20) // 4
        wide_rows = rows // 4 * _ROW_WORDS // wide_words
        storage = fw.storage.File(path, read_layout(str(path)).offset, o_direct=True)
        narrow = fw.open(path, device=self.device, cache="64 MiB", o_direct=True)
        wide = fw.open(
            storage,
            "r",
            "uint32",
            (rows * _ROW_WORDS // wide_words, wide_words),
            device=self.device,
            cache="256 MiB",
            line="1 MiB",
            controller=fw.nvme.SoftwareController(depth=32),
        )
        # The disk drifts, so it and the arrays take turns.
        ceilings, random, ordered = [], [], []
        with narrow, wide:
            for turn in range(_TURNS):
                ceilings.append(measure_ceiling(path, _ROW_BYTES, 1.0))
                index = self.rng.permutation(rows)[:count]
                there = self.there(index)
                random.append(count / 1e3 / wall_seconds(partial(narrow.gather, there)))
                # A part of the file in order, as rows of one line each.
                first = wide_rows // _TURNS * turn
                there = self.there(np.arange(first, first + wide_rows // _TURNS))
                seconds = wall_seconds(partial(wide.gather, there))
                ordered.append(len(there) * (1 << 20) / 1e9 / seconds)
            checked = bool((narrow.gather(index[:64]) == _expected(index[:64], _ROW_WORDS)).all())
            last = np.asarray(wide[first : first + 1])
            checked_wide = bool((last == _expected(np.array([first]), wide_words)).all())
        ceilings.append(measure_ceiling(path, _ROW_BYTES, 1.0))
        notes = self.report.settings["disk_itself"] = sorted({each.note for each in ceilings})
        ceilings = [each for each in ceilings if each.random_reads_per_s > 0]
        if not ceilings:
            print(f"the disk itself: {notes}", flush=True)
        reads = median([each.random_reads_per_s for each in ceilings] or [0.0])
        plain = median([each.sequential_gb_per_s for each in ceilings] or [0.0])
        self.add("direct", median(random), reads / 1e3, rows * _ROW_BYTES, checked)
        self.add("wide", median(ordered), plain, wide_rows << 20, checked_wide)


class _Gpu(_Measurement):
    """The measurements of one GPU."""

    def __init__(self, device: Device, report: Record, seed: int) -> None:
        super().__init__(device, report, seed)
        self.kernels = load_kernels(device)
        self.torch: Any = importlib.import_module("torch")
        self.pull: dict[int, float] = {}

    def measure(self, path: Path, rows: int) -> None:
        """Measure memory, the cache, and the file."""
        held = _counter(rows, _ROW_WORDS)
        memory = fw.storage.Memory(held)
        for line in _LINES:
            self.memory(memory, held.nbytes, line)
        for line in _LINES:
            self.resident(memory, min(held.nbytes, 1 << 30), line)
        del memory, held
        gc.collect()
        self.page_cached(path, rows)
        self.bounced(path, rows)
        self.direct(path, rows)

    def there(self, index: npt.NDArray[np.int64]) -> Any:
        return self.torch.from_numpy(index).cuda()

    def seconds(self, kernel: str, params: ctypes.Structure, warps: int) -> float:
        return device_seconds(
            self.device,
            lambda: self.device.run_kernel(self.kernels[kernel], [bytes(params)], warps=warps),
        )

    def gather(self, x: fw.Array, index: Any, out: Any, runs: int = 5) -> float:
        """GB/s of a gather that finds none of its rows in the cache."""

        def cold() -> float:
            x.drop_cache()
            self.torch.cuda.synchronize()
            return wall_seconds(lambda: x.gather(index, out=out))

        return float(out.nbytes / 1e9 / median_of(cold, runs))

    def right(self, out: Any, index: Any) -> bool:
        """Tell whether a sample of gathered rows is right."""
        some = self.rng.integers(0, len(index), 2000)
        there = self.there(some)
        # torch indexes no tensors of uint32.
        rows = out.view(self.torch.int32)[there].cpu().numpy().view(np.uint32)
        return bool((rows == _expected(index[there].cpu().numpy(), out.shape[1])).all())

    def empty(self, count: int, words: int) -> Any:
        return self.torch.empty((count, words), dtype=self.torch.uint32, device="cuda")

    def memory(self, memory: Any, nbytes: int, line: int) -> None:
        """Cold rows and raw queues over pinned memory."""
        words, blocks = line // 4, nbytes // line
        count = min(blocks // 2, 1 << 20 if line == 4096 else 1 << 22)
        with fw.open(
            memory, "r", "uint32", (blocks, words), device=self.device, cache=nbytes // 4, line=line
        ) as x:
            out = self.empty(count, words)
            params = QueueParams(
                cache=x.kernel_handle.cache,
                volume=x.kernel_handle.volume,
                target=out.data_ptr(),
                target_blocks=count,
                commands=count,
                blocks=blocks,
                seed=self.seed,
                block_bytes=line,
                data=1,
            )

            def per_s(kernel: str, warps: int = -(-count // 32)) -> float:
                x.service.wake()
                return float(params.commands / self.seconds(kernel, params, warps))

            self.pull[line] = median_of(lambda: per_s("pull_blocks")) * line / 1e9
            raw = median_of(lambda: per_s("queue_read")) * line / 1e9
            self.add("queues", raw, self.pull[line], nbytes, line=line)
            if line == 512:
                self.commands(params, per_s)
            index = self.torch.randperm(blocks, device="cuda")[:count]
            ours = self.gather(x, index, out)
            right = self.right(out, index)
            self.add("gather", ours, self.pull[line], nbytes, right, line)
            self.report.settings[f"memory_{line}"] = {
                **x.stats.as_dict(),
                "pull_gb_s": self.pull[line],
            }

    def commands(self, params: QueueParams, per_s: Callable[[str, int], float]) -> None:
        """Commands without data: by the launch that a user makes, and by launches of each size."""
        params.data, params.commands = 0, 1 << 24
        rates = {}
        for params.warps_max in (0, *_GRIDS):
            warps = params.warps_max or params.commands // 32
            rates[params.warps_max] = median_of(partial(per_s, "queue_read", warps), 3) / 1e6
        default = rates.pop(0)
        self.report.settings["commands_m_s_by_warps"] = rates
        self.add("commands", default, max(default, *rates.values()), 0)

    def resident(self, memory: Any, part: int, line: int) -> None:
        """Hits: rows against torch.index_select, elements against plain loads."""
        torch = self.torch
        words, rows = line // 4, part // line
        with fw.open(
            memory,
            "r",
            "uint32",
            (rows, words),
            device=self.device,
            cache=part + (8 << 20),
            line=line,
        ) as x:
            plain = torch.empty((rows, words), dtype=torch.int32, device="cuda")
            x.gather(torch.arange(rows, device="cuda"), out=plain.view(torch.uint32))
            # 8 GiB of rows: a call then takes much longer than its launch.
            index = torch.randint(0, rows, ((8 << 30) // line,), device="cuda")
            out = self.empty(len(index), words)

            def selected() -> None:
                torch.index_select(plain, 0, index, out=out.view(torch.int32))
                torch.cuda.synchronize()

            seconds = median_of(lambda: wall_seconds(lambda: x.gather(index, out=out)))
            checked = self.right(out, index)
            theirs = median_of(lambda: wall_seconds(selected))
            gb = out.nbytes / 1e9
            self.add("resident", gb / seconds, gb / theirs, part, checked, line)
            self.elements(x, plain, line)

    def elements(self, x: fw.Array, plain: Any, line: int) -> None:
        """Single words in a kernel: `data[i]` against a plain pointer."""
        total = self.torch.zeros(1, dtype=self.torch.int64, device="cuda")
        for random, row in ((1, "random"), (0, "ordered")):
            params = ReduceParams(
                array=x.kernel_handle,
                plain=plain.data_ptr(),
                sum=total.data_ptr(),
                count=1 << 30 if random else min(1 << 29, x.size),
                span=line // 4,
                seed=self.seed,
                random=random,
            )

            def seconds(kernel: str, params: ReduceParams = params) -> float:
                total.zero_()
                self.torch.cuda.synchronize()
                return self.seconds(kernel, params, 1 << 20)

            found = {}
            for kernel in ("reduce_array", "reduce_plain"):
                taken = median_of(partial(seconds, kernel))
                found[kernel] = params.count / 1e9 / taken, int(total.item())
            (ours, sum_ours), (theirs, sum_theirs) = found.values()
            self.add(row, ours, theirs, plain.nbytes, sum_ours == sum_theirs, line)

    def page_cached(self, path: Path, rows: int) -> None:
        """A file in the page cache, read in place, and other ways to the same batch."""
        fill_page_cache(path)
        count = min(rows // 2, 1 << 19)
        index = self.rng.permutation(rows)[:count]
        there, out = self.there(index), self.empty(count, _ROW_WORDS)
        with fw.open(path, device=self.device, cache=rows * 1024, strict="in_place") as x:
            ours = self.gather(x, there, out)
            right = self.right(out, there)
            self.add("mapped", ours, self.pull[4096], rows * _ROW_BYTES, right)
            self.other_ways(path, x, index[:_BATCH_ROWS])

    def other_ways(self, path: Path, x: fw.Array, batch: npt.NDArray[np.int64]) -> None:
        """One batch of a warm file by numpy, by torch, and by an array, in turn."""
        torch = self.torch
        plain = np.load(path, mmap_mode="r")
        tensor = torch.from_numpy(np.load(path, mmap_mode="c").view(np.int32))
        pinned = torch.empty((batch.size, _ROW_WORDS), dtype=torch.int32, pin_memory=True)
        host_index, there = torch.from_numpy(batch), self.there(batch)
        out = self.empty(batch.size, _ROW_WORDS)

        def selecting() -> None:
            torch.index_select(tensor, 0, host_index, out=pinned)
            pinned.cuda()

        ways: dict[str, Callable[[], object]] = {
            "ours": lambda: x.gather(there, out=out),
            "torch": selecting,
            "numpy": lambda: torch.from_numpy(plain[batch].view(np.int32)).cuda(),
        }

        def whole(way: Callable[[], object]) -> None:
            way()
            torch.cuda.synchronize()

        def cold(way: Callable[[], object]) -> float:
            x.drop_cache()
            torch.cuda.synchronize()
            return float(out.nbytes / 1e9 / wall_seconds(partial(whole, way)))

        speed = in_turns({name: partial(cold, way) for name, way in ways.items()})
        right = self.right(out, there)
        for name in ("torch", "numpy"):
            self.add(name, speed["ours"], speed[name], x.nbytes, right)

    def bounced(self, path: Path, rows: int) -> None:
        """A writable file in the page cache: through the controller's buffers, eight threads."""
        count = min(rows // 2, 1 << 19)
        there = self.there(self.rng.permutation(rows)[:count])
        out = self.empty(count, _ROW_WORDS)
        with fw.open(
            path,
            "r+",
            device=self.device,
            cache=rows * 1024,
            o_direct=False,
            controller=fw.nvme.SoftwareController(threads=8),
        ) as x:
            ours = self.gather(x, there, out, runs=3)
            right = self.right(out, there)
        self.add("bounce", ours, self.pull[4096], rows * _ROW_BYTES, right)
