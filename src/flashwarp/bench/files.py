"""Files read and written by warps of a kernel, beside plain memory (GeminiFS figures 6 to 10).

The paper replaces the drive by a copy in memory, so that its page cache is what is measured. Here
the bytes are resident, beside a copy loop of as many warps inside the device's memory; or they
come from pinned host memory, beside the same loop over that memory. A file past the page cache
shows what offsets and bounds cost against an array on the same rings.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import flashwarp as fw
from flashwarp.config import parse_bytes
from flashwarp.device import Device, DeviceMemory, resolve
from flashwarp.file.kernel_file import KernelFile
from flashwarp.probe.disk import direct_reads_work, drop_page_cache
from flashwarp.probe.report import Report, Row
from flashwarp.probe.timing import device_seconds, in_turns

__all__ = ["run"]

_RUNS = 3
_PREFETCH = 8


def run(
    device: str | None,
    folder: Path,
    size: Annotated[str, "Bytes of the data."] = "2 GiB",
    disk: Annotated[str, "Bytes that are read past the page cache."] = "256 MiB",
    pieces: Annotated[str, "Bytes of a read."] = "4 KiB,64 KiB",
    warps: Annotated[str, "How many warps read; 128 in the paper's figure 10."] = "32,128,1024",
) -> Report:
    """Read and write a file in order from kernels, resident, in host memory and on a disk."""
    where = resolve(device)
    sizes = [parse_bytes(each) for each in pieces.split(",")]
    counts = [int(each) for each in warps.split(",")]
    settings = {"size": size, "disk": disk, "pieces": pieces, "warps": warps}
    report = Report("Files", where.describe(), settings, {})
    with ExitStack() as stack:
        bench = _Files(stack, where, report, max(sizes), max(counts))
        words = parse_bytes(size) // 8
        data = np.arange(words, dtype=np.uint64)
        for piece in sizes:
            for count in counts:
                bench.resident(data, piece, count)
            bench.written(data.nbytes, piece, max(counts))
        for piece in sizes:
            bench.missing(data, piece, max(counts))
        path = folder / "data.bin"
        data[: parse_bytes(disk) // 8].tofile(path)
        os.sync()
        if direct_reads_work(path):
            bench.past_the_page_cache(path, min(sizes), max(counts))
        else:
            print("no O_DIRECT on this file system: give another folder to measure the disk")
    return report


class _Files:
    """Kernels that read one file, and what they need."""

    def __init__(
        self, stack: ExitStack, device: Device, report: Report, piece: int, warps: int
    ) -> None:
        self._device = device
        self._report = report
        self._program = fw.compile(Path(__file__).with_suffix(".cu"), device)
        # A launch may have more warps than it was asked for: as many as fill its last block.
        room = (warps + 8) * piece
        self._buffers = stack.enter_context(device.allocate(room))
        self._wrong = stack.enter_context(device.empty_array((1,), np.uint64))

    def resident(self, data: np.ndarray[Any, Any], piece: int, warps: int) -> None:
        """Bytes that are in the cache, beside a copy loop in the device's memory."""
        whole = data.nbytes // piece * piece
        name = f"{_kib(piece)}, {warps} warps"
        loop = "a copy loop in the device's memory"
        source = fw.storage.Memory(data.view(np.uint8), writable=False)
        with (
            self._opened(source, 2 * data.nbytes, "64 KiB") as x,
            KernelFile(x) as f,
            self._device.allocate(data.nbytes) as copy,
        ):
            x.prefetch(slice(0, len(x)))
            self._device.upload(copy.address, data.view(np.uint8))
            found = in_turns(
                {
                    "plain": lambda: self._launch("read_memory", copy.address, piece, whole, warps),
                    "ours": lambda: self._launch("read_file", f, piece, whole, warps),
                },
                _RUNS,
            )
        self._add(f"{loop}, {name}", whole, found["plain"])
        self._add(f"reads, resident, {name}", whole, found["ours"], loop, found["plain"])

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
            found = in_turns(
                {
                    "plain": lambda: self._launch(
                        "write_memory", copy.address, piece, whole, warps
                    ),
                    "ours": lambda: self._launch("write_file", f, piece, whole, warps),
                },
                _RUNS,
            )
            x.drop_cache(drop_dirty=True)
        self._add(f"{loop}, {name}", whole, found["plain"])
        self._add(f"writes, resident, {name}", whole, found["ours"], loop, found["plain"])

    def missing(self, data: np.ndarray[Any, Any], piece: int, warps: int) -> None:
        """Bytes in pinned host memory, beside a copy loop over it."""
        whole = data.nbytes // piece * piece
        source = fw.storage.Memory(data.view(np.uint8), writable=False)
        loop = "a copy loop over the host's memory"
        with self._opened(source, data.nbytes // 16, _kib(min(piece, 65536))) as x:
            ways: dict[str, Callable[[], float]] = {}
            address = x.in_place
            if address is not None:
                ways["plain"] = lambda: self._launch("read_memory", address, piece, whole, warps)
            with KernelFile(x) as f, KernelFile(x, prefetch=_PREFETCH) as ahead:
                ways["no"] = lambda: self._cold(x, f, piece, whole, warps)
                ways["yes"] = lambda: self._cold(x, ahead, piece, whole, warps)
                found = in_turns(ways, _RUNS)
        name = f"{_kib(piece)}, {warps} warps"
        plain = found.get("plain", 0.0)
        if plain:
            self._add(f"{loop}, {name}", whole, plain)
        other = loop if plain else ""
        self._add(f"reads, missing, {name}", whole, found["no"], other, plain)
        self._add(f"the same, {_PREFETCH} lines ahead", whole, found["yes"], other, plain)

    def past_the_page_cache(self, path: Path, piece: int, warps: int) -> None:
        """A file by O_DIRECT, and an array over it: both through the same rings."""
        whole = path.stat().st_size // piece * piece
        with (
            self._opened(path, 1 << 26, _kib(piece), o_direct=True) as x,
            KernelFile(x) as f,
        ):
            found = in_turns(
                {
                    "array": lambda: self._cold(x, x, piece, whole, warps, path),
                    "file": lambda: self._cold(x, f, piece, whole, warps, path),
                },
                _RUNS,
            )
        name = f"past the page cache, {_kib(piece)}, {warps} warps"
        self._add(f"an array {name}", whole, found["array"])
        self._add(f"reads {name}", whole, found["file"], "an array", found["array"])

    def _cold(
        self,
        x: fw.Array,
        what: fw.Array | KernelFile,
        piece: int,
        whole: int,
        warps: int,
        path: Path | None = None,
    ) -> float:
        x.drop_cache()
        if path is not None:
            drop_page_cache(path)
        kernel = "read_file" if isinstance(what, KernelFile) else "read_array"
        return self._launch(kernel, what, piece, whole, warps)

    def _launch(self, kernel: str, what: object, piece: int, whole: int, warps: int) -> float:
        """Return the seconds of a launch over `whole` bytes; 0 if it read anything else."""
        buffers: DeviceMemory = self._buffers
        self._device.upload(self._wrong.address, np.zeros(1, np.uint64))
        seconds = device_seconds(
            self._device,
            lambda: self._program[kernel](
                what, buffers, piece, whole // piece, self._wrong, warps=warps
            ),
        )
        return seconds if int(self._wrong.copy_to_host()[0]) == 0 else 0.0

    def _add(
        self, name: str, nbytes: int, seconds: float, other: str = "", than: float = 0.0
    ) -> None:
        rate = nbytes / seconds / 1e9 if seconds else 0.0
        reference = nbytes / than / 1e9 if than else 0.0
        self._report.add(
            Row(name, rate, "GB/s", other, reference, checked=seconds > 0, footprint=nbytes)
        )

    def _opened(self, source: Any, cache: int, line: str, **options: Any) -> fw.Array:
        return fw.open(
            source, dtype=np.uint8, device=self._device, line=line, cache=max(cache, 1 << 22),
            mode="r+" if isinstance(source, fw.storage.Memory) and source.writable else "r",
            **options,
        )  # fmt: skip


def _kib(nbytes: int) -> str:
    return f"{nbytes >> 10} KiB"
