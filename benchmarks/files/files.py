"""Files read and written by warps of a kernel, beside plain memory (GeminiFS figures 2, 6 to 10).

The paper replaces the drive by a copy in memory, so that its page cache is what is measured. Here
the bytes are resident, beside a copy loop of as many warps inside the device's memory; or they
come from pinned host memory, beside the same loop over that memory. Reads of 4 KiB through the
rings stand beside an array and beside raw commands on the same rings, out of memory and past the
page cache; and reads of the disk beside asynchronous I/O of Linux at the same depth.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import flashwarp as fw
from benchmarks.base import Record, listed
from flashwarp.config import parse_bytes
from flashwarp.device import Device, DeviceMemory, resolve
from flashwarp.file.kernel_file import KernelFile
from flashwarp.nvme import Controller
from flashwarp.probe.disk import direct_reads_work, drop_page_cache, read_blocks
from flashwarp.probe.timing import device_seconds, in_turns, median_of, wall_seconds

__all__ = ["run"]

_PARTS = ("resident", "writes", "around", "missing", "rings", "disk")
_PREFETCH = 8
_LINE = 4096
# Of each warp on each level of the disk: at 100 us each, a twentieth of a second.
_READS_OF_WARP = 512
_READS = (1024, 32768)

# What this project accepts: of the copy loop by the bytes of a piece, and of the raw rings.
_OF_LOOP = {4 << 10: 0.90, 64 << 10: 0.95}
_OF_RAW = 0.97

# Read bandwidth of the paper's page cache, by warps (figure 9) and by page size (figure 10).
_PAPER = {
    (64 << 10, 1024): "658 of 1,935 GB/s [GeminiFS, figure 9]",
    (4 << 10, 128): "48 of 120 GB/s [GeminiFS, figure 10]",
    (1 << 20, 128): "121 of 120 GB/s [GeminiFS, figure 10]",
}
_PAPER_RINGS = "0.954 of BaM [GeminiFS, figure 6]"


def run(
    device: str | None,
    folder: Path,
    parts: Annotated[str, f"Of {', '.join(_PARTS)}."] = ",".join(_PARTS),
    size: Annotated[str, "Bytes of the data."] = "2 GiB",
    disk: Annotated[str, "Bytes of the file that is read past the page cache."] = "256 MiB",
    pieces: Annotated[str, "Bytes of a read."] = "4 KiB,64 KiB",
    warps: Annotated[str, "How many warps read; 128 in the paper's figure 10."] = "32,128,1024",
    levels: Annotated[str, "How many warps read the disk."] = "1,4,16,64,256,1024",
    runs: Annotated[int, "How often each way has its turn."] = 3,
    seconds: Annotated[float, "Leave out what would begin later."] = 3600,
) -> Record:
    """Read and write a file in order from kernels, resident, in host memory and on a disk."""
    where = resolve(device)
    wanted = listed("parts", parts, _PARTS)
    sizes = list(map(parse_bytes, listed("pieces", pieces)))
    counts = list(map(int, listed("warps", warps)))
    depths = list(map(int, listed("levels", levels)))
    settings = {"size": size, "disk": disk, "pieces": pieces, "warps": warps, "levels": levels}
    report = Record("Files", where.describe(), settings, {})
    report.end_in(seconds)
    with ExitStack() as stack:
        most = max(max(sizes) * max(counts), _LINE * max(depths))
        bench = _Files(stack, where, report, most + 8 * max(sizes), runs)
        data = np.arange(parse_bytes(size) // 8, dtype=np.uint64)
        steps: list[tuple[str, Callable[[], None]]] = []
        for piece in sizes:
            text = _kib(piece)
            steps += [
                (f"resident, {text}", partial(bench.resident, data, piece, counts)),
                (f"writes, {text}", partial(bench.written, data.nbytes, piece, max(counts))),
                (f"around, {text}", partial(bench.around, data, piece, max(counts))),
                (f"missing, {text}", partial(bench.missing, data, piece, max(counts))),
            ]
        steps.append(("rings", lambda: bench.rings(data, max(counts))))
        steps.append(("disk", lambda: bench.levels(folder, data[: parse_bytes(disk) // 8], depths)))
        for name, step in steps:
            if name.partition(",")[0] not in wanted:
                continue
            if report.is_late(name):
                continue
            with report.part(name):
                step()
    return report


class _Files:
    """Kernels that read one file, and what they need."""

    def __init__(
        self, stack: ExitStack, device: Device, report: Record, buffers: int, runs: int
    ) -> None:
        self._device = device
        self._report = report
        self._runs = runs
        self._program = fw.compile(Path(__file__).with_suffix(".cu"), device)
        # A launch may have more warps than it was asked for: as many as fill its last block.
        self._buffers = stack.enter_context(device.allocate(buffers))
        self._wrong = stack.enter_context(device.empty_array((1,), np.uint64))

    def resident(self, data: np.ndarray[Any, Any], piece: int, counts: list[int]) -> None:
        """Bytes that are in the cache, beside a copy loop in the device's memory."""
        whole = data.nbytes // piece * piece
        loop = "a copy loop in the device's memory"
        source = fw.storage.Memory(data.view(np.uint8), writable=False)
        with (
            self._opened(source, 2 * data.nbytes, "64 KiB") as x,
            KernelFile(x) as f,
            self._device.allocate(data.nbytes) as copy,
            self._device.empty_array((data.nbytes // piece + 1,), np.uint64) as words,
        ):
            x.prefetch(slice(0, len(x)))
            self._device.upload(copy.address, data.view(np.uint8))
            self._device.upload(words.address, np.zeros(words.shape, np.uint64))
            address, line = copy.address, 64 << 10
            for warps in counts:
                found = self._turns(
                    {
                        "plain": partial(self._launch, "read_memory", address, piece, whole, warps),
                        "looks": partial(
                            self._launch,
                            "read_looking",
                            (address, words, line),
                            piece,
                            whole,
                            warps,
                        ),
                        "ours": partial(self._launch, "read_file", f, piece, whole, warps),
                    }
                )
                name = f"{_kib(piece)}, {warps} warps"
                self._add(f"{loop}, {name}", whole, found["plain"])
                target = _OF_LOOP.get(piece, 0.0)
                self._add(
                    f"reads, resident, {name}", whole, found["ours"], loop, found["plain"], target,
                    _PAPER.get((piece, warps), ""),
                )  # fmt: skip
                self._add(
                    f"reads, resident, {name}", whole, found["ours"],
                    "the loop with a look at a word before and behind", found["looks"],
                )  # fmt: skip

    def written(self, nbytes: int, piece: int, warps: int) -> None:
        """Bytes that are written to lines in the cache, beside a copy loop."""
        whole = nbytes // piece * piece
        name = f"{_kib(piece)}, {warps} warps"
        loop = "a copy loop in the device's memory, writes"
        with (
            self._opened(fw.storage.Memory(np.zeros(nbytes, np.uint8)), 2 * nbytes, "64 KiB") as x,
            KernelFile(x) as f,
            self._device.allocate(nbytes) as copy,
        ):
            x.prefetch(slice(0, len(x)))
            found = self._turns(
                {
                    "plain": lambda: self._launch(
                        "write_memory", copy.address, piece, whole, warps
                    ),
                    "ours": lambda: self._launch("write_file", f, piece, whole, warps),
                }
            )
            x.drop_cache(drop_dirty=True)
        self._add(f"{loop}, {name}", whole, found["plain"])
        target = _OF_LOOP.get(piece, 0.0)
        self._add(f"writes, resident, {name}", whole, found["ours"], loop, found["plain"], target)

    def around(self, data: np.ndarray[Any, Any], piece: int, warps: int) -> None:
        """Bytes that are written once beside a working set that fills the cache."""
        whole = data.nbytes // piece * piece
        line = min(piece, 65536)
        content = np.full(self._buffers.nbytes, 7, np.uint8)
        written = np.zeros(whole, np.uint8)
        left: dict[str, float] = {}
        with (
            fw.Cache(max(data.nbytes // 16, 1 << 22), _kib(line), device=self._device) as cache,
            fw.open(fw.storage.Memory(written), "r+", np.uint8, cache=cache) as x,
            KernelFile(x) as f,
            self._device.allocate_host(whole) as memory,
        ):
            lines = cache.set_count * cache.ways
            source = data.view(np.uint8)[: lines * line]
            kept = fw.storage.Memory(source, writable=False)
            with fw.open(kept, "r", np.uint8, cache=cache) as y, KernelFile(y) as working_set:

                def read() -> bool:
                    return self._launch("read_file", working_set, line, source.nbytes, warps) > 0

                def beside(kernel: str) -> float:
                    x.drop_cache()
                    y.drop_cache()
                    written[:] = 0
                    right = read()
                    self._device.upload(self._buffers.address, content)
                    seconds = self._launch(kernel, f, piece, whole, warps)
                    x.flush()
                    right = right and bool((written == content[0]).all())
                    before = y.stats.misses
                    right = read() and right
                    left[kernel] = 100 - 100 * (y.stats.misses - before) / lines
                    return seconds if right else 0.0

                host = memory.address
                found = self._turns(
                    {
                        "plain": lambda: self._launch("write_memory", host, piece, whole, warps),
                        "through": partial(beside, "write_file"),
                        "ours": partial(beside, "write_file_around"),
                    }
                )
        name = f"beside a working set, {_kib(piece)}, {warps} warps"
        loop = "a copy loop to the host's memory"
        self._add(f"{loop}, {name}", whole, found["plain"])
        self._add(f"writes {name}", whole, found["through"], loop, found["plain"])
        self._add(f"writes around the cache, {name}", whole, found["ours"], loop, found["plain"])
        self._report.row(
            f"of the working set left by writes around the cache, {name}",
            left["write_file_around"], "%", checked=found["ours"] > 0,
            note=f"writes through it leave {left['write_file']:.0f} %", footprint=whole
        )  # fmt: skip

    def missing(self, data: np.ndarray[Any, Any], piece: int, warps: int) -> None:
        """Bytes in pinned host memory, beside a copy loop over it; prefetch off and on."""
        whole = data.nbytes // piece * piece
        source = fw.storage.Memory(data.view(np.uint8), writable=False)
        loop = "a copy loop over the host's memory"
        with self._opened(source, data.nbytes // 16, _kib(min(piece, 65536))) as x:
            ways: dict[str, Callable[[], float]] = {}
            address = x.in_place
            if address is not None:
                ways["plain"] = lambda: self._launch("read_memory", address, piece, whole, warps)
            with KernelFile(x) as f, KernelFile(x, read_ahead=_PREFETCH) as ahead:
                ways["no"] = lambda: self._cold(x, f, piece, whole, warps)
                ways["yes"] = lambda: self._cold(x, ahead, piece, whole, warps)
                found = self._turns(ways)
        name = f"{_kib(piece)}, {warps} warps"
        plain = found.get("plain", 0.0)
        if plain:
            self._add(f"{loop}, {name}", whole, plain)
        other = loop if plain else ""
        self._add(f"reads, missing, {name}", whole, found["no"], other, plain)
        self._add(f"the same, {_PREFETCH} lines ahead, {name}", whole, found["yes"], other, plain)

    def rings(self, data: np.ndarray[Any, Any], warps: int) -> None:
        """Commands out of memory: a file, an array and raw commands on the same rings."""
        source = fw.storage.Memory(data.view(np.uint8), writable=False)
        with self._opened(source, 1 << 26, _kib(_LINE), controller=_bounce()) as x:
            self._beside_raw(x, data.nbytes // _LINE, warps, "through rings, out of memory", None)

    def levels(self, folder: Path, data: np.ndarray[Any, Any], levels: list[int]) -> None:
        """A file past the page cache, by more and more warps, beside raw commands and Linux."""
        path = folder / "data.bin"
        data.tofile(path)
        os.sync()
        if not direct_reads_work(path):
            print("no O_DIRECT on this file system: give another folder to measure the disk")
            self._report.leave_out("disk", "no O_DIRECT")
            return
        with self._opened(path, 1 << 26, _kib(_LINE), o_direct=True, controller=_bounce()) as x:
            for warps in levels:
                reads = min(max(_READS[0], _READS_OF_WARP * warps), _READS[1], len(x) // _LINE)
                what = "past the page cache"
                ours = self._beside_raw(x, reads, warps, what, path)
                self._beside_linux(x, path, reads, warps, ours, what)

    def _beside_raw(
        self, x: fw.Array, reads: int, warps: int, what: str, path: Path | None
    ) -> float:
        whole = reads * _LINE
        with KernelFile(x) as f:
            found = self._turns(
                {
                    "raw": lambda: self._cold(x, x, _LINE, whole, warps, path, "read_raw"),
                    "array": lambda: self._cold(x, x, _LINE, whole, warps, path, "read_array"),
                    "file": lambda: self._cold(x, f, _LINE, whole, warps, path),
                }
            )
        name = f"{what}, {_kib(_LINE)}, {warps} warps"
        self._add(f"raw commands {name}", whole, found["raw"])
        self._add(f"reads {name}", whole, found["file"], "raw commands", found["raw"], _OF_RAW,
                  _PAPER_RINGS)  # fmt: skip
        self._add(f"reads {name}", whole, found["file"], "an array", found["array"])
        return found["file"]

    def _beside_linux(
        self, x: fw.Array, path: Path, reads: int, warps: int, ours: float, what: str
    ) -> None:
        """The rate, and the time of a read as its warp sees it, beside reads of Linux."""
        blocks = np.arange(reads, dtype=np.int64)
        linux = median_of(
            lambda: wall_seconds(lambda: read_blocks(path, blocks, _LINE, warps)), self._runs
        )
        other, whole = f"Linux AIO at depth {warps}", reads * _LINE
        self._add(f"reads {what}, {_kib(_LINE)}, {warps} warps", whole, ours, other, linux)
        with self._device.empty_array((reads,), np.uint32) as taken, KernelFile(x) as f:
            right = self._cold(x, f, _LINE, whole, warps, path, taken=taken) > 0
            each = taken.copy_to_host() / 1e3
        self._report.row(
            f"mean time of a read, {_kib(_LINE)}, {warps} warps", float(each.mean()), "us",
            other, linux / reads * min(warps, reads) * 1e6, checked=right,
            note=f"99 % within {np.percentile(each, 99):.0f} us; less is better",
            footprint=whole
        )  # fmt: skip

    def _turns(self, ways: dict[str, Callable[[], float]]) -> dict[str, float]:
        """Return the seconds of each way; 0 of one that has read anything else once."""
        wrong = set()

        def checked(name: str, measure: Callable[[], float]) -> Callable[[], float]:
            def measured() -> float:
                seconds = measure()
                if not seconds:
                    wrong.add(name)
                return seconds

            return measured

        found = in_turns({name: checked(name, way) for name, way in ways.items()}, self._runs)
        return {name: 0.0 if name in wrong else taken for name, taken in found.items()}

    def _cold(
        self,
        x: fw.Array,
        what: fw.Array | KernelFile,
        piece: int,
        whole: int,
        warps: int,
        path: Path | None = None,
        kernel: str = "read_file",
        taken: Any = None,
    ) -> float:
        x.drop_cache()
        if path is not None:
            drop_page_cache(path)
        return self._launch(kernel, what, piece, whole, warps, taken)

    def _launch(
        self, kernel: str, what: object, piece: int, whole: int, warps: int, taken: Any = None
    ) -> float:
        """Return the seconds of a launch over `whole` bytes; 0 if it read anything else."""
        buffers: DeviceMemory = self._buffers
        self._device.upload(self._wrong.address, np.zeros(1, np.uint64))
        times = [taken] if kernel.startswith("read") else []
        source = what if isinstance(what, tuple) else (what,)
        seconds = device_seconds(
            self._device,
            lambda: self._program[kernel](
                *source,
                buffers,
                piece,
                whole // piece,
                self._wrong,
                *times,
                warps=warps,
                block_threads=min(256, 32 * warps),
            ),
        )
        return seconds if int(self._wrong.copy_to_host()[0]) == 0 else 0.0

    def _add(
        self,
        name: str,
        nbytes: int,
        seconds: float,
        other: str = "",
        than: float = 0.0,
        target: float = 0.0,
        paper: str = "",
    ) -> None:
        rate = nbytes / seconds / 1e9 if seconds else 0.0
        reference = nbytes / than / 1e9 if than else 0.0
        self._report.row(
            name, rate, "GB/s", other, reference, target if reference else 0.0, seconds > 0,
            paper, footprint=nbytes
        )  # fmt: skip

    def _opened(
        self, source: Any, cache: int, line: str, controller: Controller | None = None,
        **options: Any,
    ) -> fw.Array:  # fmt: skip
        return fw.open(
            source, dtype=np.uint8, device=self._device, line=line, cache=max(cache, 1 << 22),
            mode="r+" if isinstance(source, fw.storage.Memory) and source.writable else "r",
            controller=controller, **options,
        )  # fmt: skip


def _bounce() -> Controller:
    return fw.nvme.SoftwareController(route="bounce", commands=True)


def _kib(nbytes: int) -> str:
    return f"{nbytes >> 10} KiB"
