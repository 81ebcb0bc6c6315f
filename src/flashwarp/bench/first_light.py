"""How close rows, elements and files come to the ceilings of the machine, in one run.

Every figure stands beside its ceiling (the link, the plain gather, the disk) or its alternative
(numpy and torch), measured in the same process on the same data. The data is a counter, so that any
row can be checked against its index.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

import flashwarp as fw
from flashwarp._jit.compiler import Source
from flashwarp._jit.program import LoadedKernel
from flashwarp.array.rows import ArrayStruct
from flashwarp.device import CudaDevice, Device, resolve
from flashwarp.probe.disk import measure_ceiling
from flashwarp.probe.report import Report, Row, machine_facts
from flashwarp.probe.timing import device_seconds, in_turns, median_of, wall_seconds
from flashwarp.storage.npy import read_layout

__all__ = ["run"]

_ROW_WORDS = 1024
# How often ours and the alternative are measured in turn, where the machine drifts.
_TURNS = 3


def load_kernels(device: Device) -> dict[str, LoadedKernel]:
    """Compile the kernels of first_light.cu, or find them compiled; by name."""
    source = Source.read(Path(__file__).with_name("first_light.cu"))
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
    gib: Annotated[float, "Size of the file in GiB."] = 1.0,
    seed: Annotated[int, "Of the random rows."] = 1,
) -> Report:
    """Measure everything that `device` can; needs `gib` GiB of disk in `folder` and of memory."""
    where = resolve(device)
    report = Report(
        title="First light",
        settings={"file_gib": gib, "seed": seed, "row_bytes": 4 * _ROW_WORDS},
        machine=machine_facts(where.describe()),
    )
    rows = int(gib * 2**30) // (4 * _ROW_WORDS)
    path = folder / "flashwarp-bench.npy"
    try:
        _write_counter(path, rows)
        if isinstance(where, CudaDevice):
            _Gpu(where, report, seed).measure(path, rows)
        else:
            _cpu(where, report, path, rows, seed)
    finally:
        path.unlink(missing_ok=True)
    return report


def _cpu(device: Device, report: Report, path: Path, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = min(rows, 65536)
    batches = [rng.permutation(rows)[:count] for _ in range(6)]
    out = np.empty((count, _ROW_WORDS), np.uint32)
    plain = np.load(path, mmap_mode="r")
    _ = int(plain[:, 0].sum())  # every page in the page cache and in the page table
    gb = out.nbytes / 1e9
    turn = itertools.cycle(batches)

    def take() -> None:
        np.take(plain, next(turn), axis=0, out=out, mode="clip")

    # Like against like: both allocate their result, then both are given it.
    with fw.open(path, device=device, cache=out.nbytes // 4) as x:
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
    name = "page-cached file, 4 KiB rows"
    speed = {way: gb / taken for way, taken in seconds.items()}
    report.add(Row(name, speed["new"], "GB/s", "memmap[idx]", speed["numpy new"], 1.0, checked))
    report.add(
        Row(f"{name} into out=", speed["given"], "GB/s", "np.take(out=)", speed["numpy given"])
    )
    _direct(device, report, path, rows, rng)


def _direct(
    device: Device, report: Report, path: Path, rows: int, rng: np.random.Generator
) -> None:
    """Rows past the page cache, against a plain loop at the same depth on the same file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    count = min(rows // 4, 131072)
    wide_words = (1 << 20) // 4
    wide_rows = rows // 4 * _ROW_WORDS // wide_words
    storage = fw.storage.File(path, read_layout(str(path)).offset, o_direct=True)
    narrow = fw.open(path, device=device, cache="64 MiB", o_direct=True)
    wide = fw.open(
        storage,
        "r",
        "uint32",
        (rows * _ROW_WORDS // wide_words, wide_words),
        device=device,
        cache="256 MiB",
        line="1 MiB",
        controller=fw.SoftwareController(depth=32),
    )
    # The disk drifts, so its own speed and ours take turns; results stay where the device has them.
    ceilings, random, sequential = [], [], []
    with narrow, wide:
        for turn in range(_TURNS):
            ceilings.append(measure_ceiling(path, 4096, 1.0))
            index = rng.permutation(rows)[:count]
            there = _on(device, index)
            random.append(count / 1e3 / wall_seconds(partial(narrow.gather, there)))
            # A part of the file in order, as rows of one line each.
            first = wide_rows // _TURNS * turn
            order = _on(device, np.arange(first, first + wide_rows // _TURNS))
            seconds = wall_seconds(partial(wide.gather, order))
            sequential.append(len(order) * (1 << 20) / 1e9 / seconds)
        checked = bool((narrow.gather(index[:64]) == _expected(index[:64], _ROW_WORDS)).all())
        last = np.asarray(wide[first : first + 1])
        checked_wide = bool((last == _expected(np.array([first]), wide_words)).all())
    ceilings.append(measure_ceiling(path, 4096, 1.0))
    report.settings["disk_itself"] = sorted({ceiling.note for ceiling in ceilings})
    ceilings = [ceiling for ceiling in ceilings if ceiling.random_reads_per_s > 0]
    if not ceilings:
        print(f"the disk itself: {report.settings['disk_itself']}", flush=True)
    reads = median([ceiling.random_reads_per_s for ceiling in ceilings] or [0.0])
    plain = median([ceiling.sequential_gb_per_s for ceiling in ceilings] or [0.0])
    name = "plain O_DIRECT loop, depth 256"
    report.add(
        Row(
            "O_DIRECT file, 4 KiB random rows",
            median(random),
            "k/s",
            name,
            reads / 1e3,
            0.95,
            checked,
        )
    )
    report.add(
        Row(
            "O_DIRECT file, sequential, 1 MiB lines",
            median(sequential),
            "GB/s",
            "plain 1 MiB loop",
            plain,
            0.95,
            checked_wide,
        )
    )


def _on(device: Device, index: npt.NDArray[np.int64]) -> Any:
    """Return indices where results are to go: on a GPU a torch tensor, else themselves."""
    if isinstance(device, CudaDevice):
        return importlib.import_module("torch").from_numpy(index).cuda()
    return index


class _Gpu:
    """The measurements of one GPU."""

    def __init__(self, device: CudaDevice, report: Report, seed: int) -> None:
        self.device = device
        self.kernels = load_kernels(device)
        self.report = report
        self.seed = seed
        self.torch: Any = importlib.import_module("torch")
        self.rng = np.random.default_rng(seed)

    def measure(self, path: Path, rows: int) -> None:
        held = _counter(rows, _ROW_WORDS)
        memory = fw.storage.Memory(held)
        ceilings = {}
        for line in (4096, 512):
            ceilings[line] = self.mapped(memory, held.nbytes, line)
        for line in (4096, 512):
            self.resident(memory, min(held.nbytes, 1 << 30), line)
        del memory
        gc.collect()
        self.file_mapped(path, rows, ceilings[4096])
        self.file_bounce(path, rows)
        _direct(self.device, self.report, path, rows, self.rng)

    def mapped(self, memory: Any, nbytes: int, line: int) -> float:
        """Cold rows and raw queues over pinned memory. Returns the pull ceiling in GB/s."""
        torch = self.torch
        words = line // 4
        blocks = nbytes // line
        count = min(blocks // 2, 1 << 20 if line == 4096 else 1 << 22)
        with fw.open(
            memory,
            "r",
            "uint32",
            (blocks, words),
            device=self.device,
            cache=nbytes // 4,
            line=line,
        ) as x:
            out = torch.empty((count, words), dtype=torch.uint32, device="cuda")
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

            def rate(kernel: str, warps: int = -(-count // 32)) -> float:
                x.controller.wake()
                seconds = device_seconds(
                    self.device,
                    lambda: self.device.run_kernel(
                        self.kernels[kernel], [bytes(params)], warps=warps
                    ),
                )
                return count / seconds

            pull = median_of(lambda: rate("pull_blocks")) * line / 1e9
            raw = median_of(lambda: rate("queue_read")) * line / 1e9
            ceiling = f"pull ceiling, {line} B"
            self.report.add(
                Row(
                    f"raw queues, {line} B reads",
                    raw,
                    "GB/s",
                    ceiling,
                    pull,
                    0.98 if line == 4096 else 0.95,
                )
            )
            params.data = 0
            if line == 512:
                params.commands = 1 << 24
                best = max(
                    median_of(partial(rate, "queue_read", 8 * many), 3) * params.commands / count
                    for many in (16, 32, 64, 132)
                )
                self.report.add(
                    Row("raw queues, commands without data", best / 1e6, "M/s", "target", 80, 1.0)
                )
            index = torch.randperm(blocks, device="cuda")[:count]

            def cold() -> float:
                x.drop_cache()
                torch.cuda.synchronize()
                return float(out.nbytes / 1e9 / wall_seconds(lambda: x.gather(index, out=out)))

            ours = median_of(cold)
            some = torch.randint(0, count, (2000,))
            got = out.view(torch.int32)[some.cuda()].cpu().numpy().view(np.uint32)
            checked = bool((got == _expected(index.cpu().numpy()[some], words)).all())
            self.report.add(
                Row(
                    f"Array.gather, cold, {line} B rows",
                    ours,
                    "GB/s",
                    ceiling,
                    pull,
                    0.92 if line == 4096 else 0.80,
                    checked,
                )
            )
            stats = x.stats
            self.report.settings[f"mapped_{line}"] = {**stats.as_dict(), "pull_gb_s": pull}
        return pull

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
            everything = torch.arange(rows, device="cuda")
            x.gather(everything, out=plain.view(torch.uint32))
            index = torch.randint(0, rows, (1 << 21 if line == 512 else 1 << 19,), device="cuda")
            out = torch.empty((len(index), words), dtype=torch.uint32, device="cuda")
            view = out.view(torch.int32)
            params = x._attachment.launcher.row_params(x._index(index, None), out.data_ptr())
            moved = out.nbytes / 1e9

            def ours() -> float:
                return float(
                    moved
                    / device_seconds(
                        self.device,
                        lambda: self.device.launch("gather_rows", params, warps=len(index) // 32),
                    )
                )

            def theirs() -> float:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                torch.index_select(plain, 0, index, out=view)
                end.record()
                end.synchronize()
                return float(moved / (start.elapsed_time(end) / 1e3))

            speed = median_of(ours)
            copy = out.clone()
            reference = median_of(theirs)
            self.report.add(
                Row(
                    f"resident, {line} B rows",
                    speed,
                    "GB/s",
                    "torch.index_select",
                    reference,
                    0.90 if line == 4096 else 0.0,
                    bool((copy.view(torch.int32) == view).all()),
                )
            )
            self.elements(x, plain, line)

    def elements(self, x: fw.Array, plain: Any, line: int) -> None:
        """Single words in a kernel: `data[i]` against a plain pointer."""
        total = self.torch.zeros(1, dtype=self.torch.int64, device="cuda")
        for random, name in ((1, "random"), (0, "consecutive")):
            results = {}
            for kernel in ("reduce_array", "reduce_plain"):
                params = ReduceParams(
                    array=x.kernel_handle,
                    plain=plain.data_ptr(),
                    sum=total.data_ptr(),
                    count=1 << 30 if not random else 1 << 29,
                    span=line // 4,
                    seed=self.seed,
                    random=random,
                )
                if not random:
                    params.count = min(params.count, x.size)

                def rate(kernel: str = kernel, params: ReduceParams = params) -> float:
                    total.zero_()
                    self.torch.cuda.synchronize()
                    seconds = device_seconds(
                        self.device,
                        lambda: self.device.run_kernel(
                            self.kernels[kernel], [bytes(params)], warps=1 << 20
                        ),
                    )
                    return float(params.count / seconds / 1e9)

                results[kernel] = (median_of(rate), int(total.item()))
            ours, theirs = results["reduce_array"], results["reduce_plain"]
            self.report.add(
                Row(
                    f"resident, {name} 4 B elements, {line} B lines",
                    ours[0],
                    "G/s",
                    "plain loads",
                    theirs[0],
                    (0.5 if random else 0.7) if line == 4096 else 0.0,
                    ours[1] == theirs[1],
                )
            )

    def file_mapped(self, path: Path, rows: int, pull: float) -> None:
        """A page-cached file in place, and what people do today with the same file."""
        torch = self.torch
        _ = int(np.load(path, mmap_mode="r")[:, 0].sum())  # every page in the page cache
        count = min(rows // 2, 1 << 19)
        index = self.rng.permutation(rows)[:count]
        device_index = torch.from_numpy(index).cuda()
        out = torch.empty((count, _ROW_WORDS), dtype=torch.uint32, device="cuda")
        with fw.open(path, device=self.device, cache=rows * 1024, strict="in_place") as x:

            def cold() -> float:
                x.drop_cache()
                torch.cuda.synchronize()
                seconds = wall_seconds(lambda: x.gather(device_index, out=out))
                return float(out.nbytes / 1e9 / seconds)

            ours = median_of(cold)
            checked = bool((out[:500].cpu().numpy() == _expected(index[:500], _ROW_WORDS)).all())
            self.todays_ways(path, x, index[:65536])
        self.report.add(
            Row(
                "page-cached file, mapped in place, cold 4 KiB rows",
                ours,
                "GB/s",
                "pull ceiling, 4096 B",
                pull,
                0.92,
                checked,
            )
        )

    def todays_ways(self, path: Path, x: fw.Array, batch: npt.NDArray[np.int64]) -> None:
        """The same batch of a warm file by the ways of today, and by ours, in turn."""
        torch = self.torch
        gb = batch.size * 4 * _ROW_WORDS / 1e9
        plain = np.load(path, mmap_mode="r")
        tensor = torch.from_numpy(np.load(path, mmap_mode="c").view(np.int32))
        pinned = torch.empty((batch.size, _ROW_WORDS), dtype=torch.int32, pin_memory=True)
        host_index = torch.from_numpy(batch)
        device_index = host_index.cuda()
        out = torch.empty((batch.size, _ROW_WORDS), dtype=torch.uint32, device="cuda")

        def ours() -> None:
            x.gather(device_index, out=out)

        def indexing() -> None:
            torch.from_numpy(plain[batch].view(np.int32)).cuda()
            torch.cuda.synchronize()

        def selecting() -> None:
            torch.index_select(tensor, 0, host_index, out=pinned)
            pinned.cuda()
            torch.cuda.synchronize()

        ways = {"ours": ours, "memmap[idx].cuda()": indexing, "index_select to pinned": selecting}

        def cold(way: Callable[[], None]) -> float:
            x.drop_cache()
            torch.cuda.synchronize()
            return float(gb / wall_seconds(way))

        speed = in_turns({name: partial(cold, way) for name, way in ways.items()})
        for name, target in (("memmap[idx].cuda()", 12.0), ("index_select to pinned", 1.8)):
            self.report.add(
                Row(
                    f"65,536 cold rows of a page-cached file, against {name}",
                    speed["ours"],
                    "GB/s",
                    name,
                    speed[name],
                    target,
                )
            )

    def file_bounce(self, path: Path, rows: int) -> None:
        """A page-cached writable file: through the controller's buffers, with eight threads."""
        torch = self.torch
        count = min(rows // 2, 1 << 19)
        index = torch.from_numpy(self.rng.permutation(rows)[:count]).cuda()
        out = torch.empty((count, _ROW_WORDS), dtype=torch.uint32, device="cuda")
        with fw.open(
            path,
            "r+",
            device=self.device,
            cache=rows * 1024,
            o_direct=False,
            controller=fw.SoftwareController(threads=8),
        ) as x:

            def cold() -> float:
                x.drop_cache()
                torch.cuda.synchronize()
                return float(out.nbytes / 1e9 / wall_seconds(lambda: x.gather(index, out=out)))

            ours = median_of(cold, 3)
            host = index[:500].cpu().numpy()
            checked = bool((out[:500].cpu().numpy() == _expected(host, _ROW_WORDS)).all())
        self.report.add(
            Row(
                "page-cached file, bounce, 8 threads, cold 4 KiB rows",
                ours,
                "GB/s",
                "target",
                10,
                1.0,
                checked,
            )
        )
