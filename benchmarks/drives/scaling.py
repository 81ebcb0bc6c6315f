"""How many drives device threads keep busy, by raw queues, on modelled drives.

BaM's Figure 4 (512-byte random reads and writes, one to ten drives, by the number of threads),
AGILE's Figures 5 and 6 (4 KiB, one to three drives, by the number of requests), and in the manner
of BaM's Figures 9 and 11 other kinds of drives and fewer queue pairs. Each drive has its own
controller, host thread and rings. Latency and ceilings are modelled (docs/hardware.md); commands,
completions and data are real. Each figure stands beside the ceiling of the drives or of the link,
whichever is lower; curves are in the settings. All data is checked by samples.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt

import flashwarp as fw
from benchmarks.base import Record
from flashwarp._jit.compiler import Source
from flashwarp._jit.program import LoadedKernel
from flashwarp.device import CpuDevice, CudaDevice, Device, resolve
from flashwarp.errors import ArgumentError
from flashwarp.nvme import Destination, Service
from flashwarp.probe.timing import device_seconds, median_of

__all__ = ["run"]

_DRIVES_MAX = 16
_WINDOW_MAX = 64
_LBA = 512
_DEPTH = 1024
_BLOCK_THREADS = 256
_SAMPLES = 64
# What counts as saturated: the papers read "peak" off curves, too.
_SATURATED = 0.95
_LINEAR = 0.95
# Where the curves of a device begin and end; a CPU thread is a warp of one lane.
_BUFFER_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
_SOURCE_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}
_READ, _WRITE = 2, 1

# What the papers have: by drive, block size, drives and whether they are written.
_PAPERS = {
    ("P5800X", 512, 1, False): "5.1 M/s [BaM, Table 2]",
    ("P5800X", 512, 1, True): "1.0 M/s [BaM, Table 2]",
    ("P5800X", 512, 10, False): "45.8 M/s [BaM, Figure 4]",
    ("P5800X", 512, 10, True): "10.6 M/s [BaM, Figure 4]",
    ("AGILE", 4096, 1, False): "3.7 GB/s [AGILE, Figure 5]",
    ("AGILE", 4096, 2, False): "7.4 GB/s [AGILE, Figure 5]",
    ("AGILE", 4096, 3, False): "11.1 GB/s [AGILE, Figure 5]",
    ("AGILE", 4096, 1, True): "2.2 GB/s [AGILE, Figure 6]",
    ("AGILE", 4096, 2, True): "4.4 GB/s [AGILE, Figure 6]",
    ("AGILE", 4096, 3, True): "6.7 GB/s [AGILE, Figure 6]",
    ("P5510", 4096, 12, False): "20 GB/s, its link's limit [CAM, Figure 8]",
}


def load_kernels(device: Device) -> dict[str, LoadedKernel]:
    """Compile the kernels of drives.cuh, or find them compiled; by name."""
    source = Source.read(Path(__file__).with_name("drives.cuh"))
    return device.load_program(source).by_name()


class DriveStruct(ctypes.Structure):
    """Mirror of `bench::drive`."""

    _fields_ = (("queues", ctypes.c_uint64), ("queue_count", ctypes.c_uint64))


class DrivesParams(ctypes.Structure):
    """Mirror of `bench::drives_params`."""

    _fields_ = (
        ("drives", ctypes.c_uint64),
        ("failed", ctypes.c_uint64),
        ("buffer", ctypes.c_uint64),
        ("commands", ctypes.c_uint64),
        ("begin_lba", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("drive_count", ctypes.c_uint32),
        ("blocks_log2", ctypes.c_uint32),
        ("buffer_log2", ctypes.c_uint32),
        ("block_bytes", ctypes.c_uint32),
        ("window", ctypes.c_uint32),
        ("opcode", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Load:
    """One point of a curve: what is asked of how many drives, and how.

    `threads` are device threads; each keeps `window` commands outstanding: 1 is synchronous.
    """

    drives: int
    block_bytes: int
    write: bool
    threads: int
    window: int = 1

    @property
    def verb(self) -> str:
        return "writes" if self.write else "reads"

    @property
    def way(self) -> str:
        return "synchronous" if self.window == 1 else f"asynchronous, {self.window} a thread"


@dataclass
class Curve:
    """Rates over one variable, all else being equal."""

    name: str
    variable: str
    points: list[dict[str, float]] = field(default_factory=list)
    right: bool = True

    def add(self, x: float, per_s: float, right: bool) -> None:
        self.points.append({"x": x, "per_s": per_s})
        self.right = self.right and right

    @property
    def best(self) -> float:
        return max(point["per_s"] for point in self.points)

    @property
    def knee(self) -> float:
        """The first x whose rate is nearly the best."""
        return next(p["x"] for p in self.points if p["per_s"] >= _SATURATED * self.best)


def scatter_blocks(
    j: npt.NDArray[np.uint64], seed: npt.NDArray[np.uint64], bits: int
) -> npt.NDArray[np.uint64]:
    """Mirror of `bench::scatter_block`."""
    mask = np.uint64((1 << bits) - 1)
    x = (j + seed) & mask
    for _ in range(3):
        x = (x * np.uint64(0x9E3779B97F4A7C15) + (seed >> np.uint64(7))) & mask
        x = x ^ (x >> np.uint64(bits // 2 + 1))
    return x


class Namespaces:
    """Memory of all drives: in each a half to read, a counter of words, and a half to write."""

    def __init__(self, drives: int, drive_bytes: int) -> None:
        self.drive_bytes = drive_bytes
        self.half_bytes = drive_bytes // 2
        # Whole pages of its own for each drive: a page can be registered once.
        self._memory = mmap.mmap(-1, drives * drive_bytes)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.words = np.frombuffer(self._memory, np.uint32)
        for i in range(drives):
            part = self.words_of(i, 0, self.half_bytes)
            part[:] = np.arange(i * drive_bytes // 4, i * drive_bytes // 4 + len(part))

    def words_of(self, drive: int, offset: int, nbytes: int) -> npt.NDArray[np.uint32]:
        start = (drive * self.drive_bytes + offset) // 4
        return self.words[start : start + nbytes // 4]


class Drives:
    """Modelled drives that serve, and the launches that load them. A context manager."""

    def __init__(
        self,
        device: Device,
        namespaces: Namespaces,
        profile: str,
        count: int,
        queue_pairs: int,
        depth: int = _DEPTH,
    ) -> None:
        self.device = device
        self.namespaces = namespaces
        self.depth = depth
        self.model = fw.SSDModel.named(profile)
        self.queue_pairs = queue_pairs
        self.controllers: list[Service] = []
        self._kernels = load_kernels(device)
        self._seed = 0
        with ExitStack() as stack:
            for i in range(count):
                self._open_drive(stack, profile, i)
            table = b"".join(
                bytes(DriveStruct(c.queues.address, c.queues.count)) for c in self.controllers
            )
            self._table = stack.enter_context(device.allocate(len(table)))
            device.upload(self._table.address, table)
            self._failed = stack.enter_context(device.allocate(8))
            self._landing = stack.enter_context(device.allocate(_BUFFER_BYTES[device.kind]))
            self._source = stack.enter_context(device.allocate(_SOURCE_BYTES[device.kind]))
            self.pattern = ~np.arange(self._source.nbytes // 4, dtype=np.uint32)
            device.upload(self._source.address, self.pattern)
            self._stack = stack.pop_all()

    def _open_drive(self, stack: ExitStack, profile: str, number: int) -> None:
        words = self.namespaces.words_of(number, 0, self.namespaces.drive_bytes)
        storage = stack.enter_context(fw.storage.Memory(words))
        controller = fw.SoftwareController(
            queue_pairs=self.queue_pairs,
            depth=self.depth,
            data_path="in_place",
            model=fw.SSDModel.named(profile, seed=number + 1),
        )
        service = controller.attach(storage, Destination(self.device, _LBA, (0, 0)))
        stack.callback(service.stop)
        self.controllers.append(service)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    # What can be expected.

    def ceiling(self, load: Load) -> float:
        """Commands per second of the drives of a load, by their model."""
        return load.drives * self.model.iops(load.block_bytes, write=load.write)

    def commands_max(self, load: Load) -> int:
        """Commands of a drive whose data has a place of its own in the buffer."""
        return max(1, _BUFFER_BYTES[self.device.kind] // load.block_bytes // load.drives)

    def commands_for(self, load: Load, seconds: float, link: float) -> int:
        """How many commands of each drive take about this long."""
        latency_s = self.model.mean_latency_us(write=load.write) * 1e-6
        rate = min(self.ceiling(load), link, load.threads * load.window / latency_s)
        return max(1, min(int(rate * seconds) // load.drives, self.commands_max(load)))

    # Launches.

    def seconds(self, load: Load, commands: int, kernel: str = "drive_blocks") -> float:
        """Time of one launch of `commands` of each drive; `right` reports failures."""
        self._seed += 0x1234567
        params = self._params(load, commands)
        width = 1 if isinstance(self.device, CpuDevice) else 32
        for controller in self.controllers[: load.drives]:
            controller.wake()
        return device_seconds(
            self.device,
            lambda: self.device.run_kernel(
                self._kernels[kernel],
                [bytes(params)],
                warps=-(-load.threads // width),
                block_threads=max(32, min(load.threads, _BLOCK_THREADS)),
                uses=[native for c in self.controllers[: load.drives] for native in c.natives],
            ),
        )

    def _params(self, load: Load, commands: int) -> DrivesParams:
        blocks = self.namespaces.half_bytes // load.block_bytes
        buffer = self._source if load.write else self._landing
        return DrivesParams(
            drives=self._table.address,
            failed=self._failed.address,
            buffer=buffer.address,
            commands=commands,
            begin_lba=self.namespaces.half_bytes // _LBA if load.write else 0,
            seed=self._seed,
            drive_count=load.drives,
            blocks_log2=blocks.bit_length() - 1,
            buffer_log2=(buffer.nbytes // load.block_bytes).bit_length() - 1,
            block_bytes=load.block_bytes,
            window=load.window,
            opcode=_WRITE if load.write else _READ,
        )

    def right(self, load: Load, commands: int) -> bool:
        """Tell whether the last launch, of this load, moved what it should have."""
        failed = int.from_bytes(self.device.download(self._failed.address, 8), "little")
        if failed:
            self.device.fill(self._failed.address, 0, 8)
            return False
        params = self._params(load, commands)
        rng = np.random.default_rng(self._seed)
        j = rng.integers(0, commands, _SAMPLES).astype(np.uint64)
        j[0], j[-1] = 0, commands - 1
        drive = rng.integers(0, load.drives, _SAMPLES).astype(np.uint64)
        j &= np.uint64((1 << params.blocks_log2) - 1)
        seed = np.uint64(self._seed)
        block = scatter_blocks(j, seed + drive, params.blocks_log2)
        place = (j * np.uint64(load.drives) + drive + seed) & np.uint64(
            (1 << params.buffer_log2) - 1
        )
        check = self._wrote if load.write else self._read
        sizes = load.block_bytes
        return all(
            check(int(d), int(b), int(p), sizes)
            for d, b, p in zip(drive, block, place, strict=True)
        )

    def _read(self, drive: int, block: int, place: int, nbytes: int) -> bool:
        raw = self.device.download(self._landing.address + place * nbytes, nbytes)
        got = np.frombuffer(raw, np.uint32)
        return bool((got == self.namespaces.words_of(drive, block * nbytes, nbytes)).all())

    def _wrote(self, drive: int, block: int, place: int, nbytes: int) -> bool:
        offset = self.namespaces.half_bytes + block * nbytes
        got = self.namespaces.words_of(drive, offset, nbytes)
        return bool((got == self.pattern[place * nbytes // 4 :][: nbytes // 4]).all())


class Scaling:
    """The measurements of one device."""

    def __init__(self, device: Device, report: Record, seconds: float, drive_bytes: int) -> None:
        self.device = device
        self.report = report
        self.seconds = seconds
        self.drive_bytes = drive_bytes
        self.on_gpu = device.kind == "cuda"
        self.links: dict[tuple[int, bool], float] = {}
        self.curves: list[Curve] = []
        report.settings["curves"] = []

    # One point, one curve.

    def rate(self, drives: Drives, load: Load, runs: int = 3) -> tuple[float, bool]:
        """Median rate of some launches, and whether the last one's data was right."""
        link = self.link(drives, load)
        commands = drives.commands_for(load, self.seconds, link)
        taken = median(drives.seconds(load, commands) for _ in range(runs))
        return commands * load.drives / taken, drives.right(load, commands)

    def link(self, drives: Drives, load: Load) -> float:
        """Blocks per second that the device moves to or from the drives' memory, uncommanded."""
        key = load.block_bytes, load.write
        if key not in self.links:
            most = Load(len(drives.controllers), load.block_bytes, load.write, self.threads_max())
            commands = drives.commands_max(most)
            taken = median_of(partial(drives.seconds, most, commands, "link_blocks"))
            self.links[key] = commands * most.drives / taken
        return self.links[key]

    def threads_max(self) -> int:
        """Threads that are resident at a time."""
        if isinstance(self.device, CpuDevice):
            return self.device.threads
        assert isinstance(self.device, CudaDevice)
        kernel = load_kernels(self.device)["drive_blocks"]
        return self.device.resident_threads(kernel, _BLOCK_THREADS)

    def thread_counts(self) -> list[int]:
        """Powers of two up to what is resident, and that."""
        most = self.threads_max()
        least = 32 if self.on_gpu else 1
        counts = [least << k for k in range(20) if least << k < most]
        return [*counts, most]

    def curve(
        self, drives: Drives, name: str, variable: str, points: Sequence[tuple[float, Load]]
    ) -> Curve:
        found = Curve(name, variable)
        for x, load in points:
            found.add(x, *self.rate(drives, load))
        self.keep(found)
        return found

    def keep(self, found: Curve) -> None:
        self.report.settings["curves"].append(
            {"name": found.name, "variable": found.variable, "points": found.points}
        )

    def add(
        self,
        drives: Drives,
        load: Load,
        way: str,
        per_s: float,
        right: bool,
    ) -> None:
        """Report a rate beside the lower one of the ceilings, and how it stands to both."""
        model, link = drives.ceiling(load), self.link(drives, load)
        bound, reference = ("drives' model", model) if model <= link else ("link", link)
        self.report.row(
            f"{_count(load.drives, drives.model.name)}, {load.block_bytes} B random "
            f"{load.verb}, {way}",
            per_s / 1e6,
            "M/s",
            bound,
            reference / 1e6,
            0.0,
            right,
            _PAPERS.get((drives.model.name, load.block_bytes, load.drives, load.write), ""),
            f"{per_s * load.block_bytes / 1e9:.2f} GB/s; {per_s / model:.2f} of the model's "
            f"{model / 1e6:.3g} M/s, {per_s / link:.2f} of the link's {link / 1e6:.3g} M/s",
            load.drives * self.drive_bytes // 2,
        )

    # The figures.

    def bam_figure_4(self, drives: Drives, block_bytes: int) -> None:
        """Threads against drives, synchronous and asynchronous; then linearity."""
        most = len(drives.controllers)
        for write in (False, True):
            rates: dict[int, float] = {}
            for count in sorted({1, 2, 4, 8, most} & set(range(1, most + 1))):
                load = Load(count, block_bytes, write, self.threads_max())
                told = f"{_count(count, drives.model.name)}, {block_bytes} B random {load.verb}"
                whole = count in (1, most)
                waiting = self.sweep(drives, load, told, whole)
                ahead = self.sweep(drives, replace(load, window=self.window()), told, whole)
                self.add(drives, load, load.way, waiting.best, waiting.right)
                self.add(drives, load, "asynchronous", ahead.best, ahead.right)
                rates[count] = max(waiting.best, ahead.best)
                if whole:
                    self.saturation(
                        told, waiting, ahead, "16 K to 64 K threads, 1 drive [BaM, 4.3]"
                    )
            self.linearity(drives, rates, block_bytes, write)

    def window(self) -> int:
        """Commands that a thread keeps outstanding where it does not wait for each."""
        return 16 if self.on_gpu else _WINDOW_MAX

    def sweep(self, drives: Drives, load: Load, told: str, whole: bool) -> Curve:
        """The curve over threads, or four points of its upper part."""
        counts = self.thread_counts()
        if load.window > 1 and self.on_gpu:
            # A few warps keep all rings full; more only wait for them.
            counts = [n for n in counts if 256 <= n <= 32768]
        points = [(float(n), replace(load, threads=n)) for n in counts]
        way = "synchronous" if load.window == 1 else "asynchronous"
        return self.curve(drives, f"{told}, {way}", "threads", points if whole else points[-7::2])

    def saturation(self, told: str, waiting: Curve, ahead: Curve, paper: str) -> None:
        """What it takes: on a GPU a block of 256 threads has a multiprocessor to itself first."""
        for way, found in (("synchronous", waiting), ("asynchronous", ahead)):
            blocks = -(-found.knee // _BLOCK_THREADS)
            self.report.row(
                f"{told}: to saturate, {way}",
                blocks if self.on_gpu else found.knee,
                "SMs" if self.on_gpu else "CPU threads",
                paper=paper,
                note=f"{found.knee:.0f} threads reach {_SATURATED} of the curve's best",
            )

    def linearity(
        self, drives: Drives, rates: dict[int, float], block_bytes: int, write: bool
    ) -> None:
        """N drives against N times one, until the link is full."""
        link = self.links[block_bytes, write]
        verb = "writes" if write else "reads"
        for count in sorted(set(rates) - {1}):
            linear = count * rates[1]
            self.report.row(
                f"modelled drives {drives.model.name}, 1 -> {count}, {block_bytes} B {verb}",
                rates[count] / 1e6,
                "M/s",
                f"{count} x one drive" if linear <= link else "link",
                min(linear, link) / 1e6,
                _LINEAR if count <= 8 and self.on_gpu else 0.0,
                footprint=count * self.drive_bytes // 2,
            )

    def agile_figures_5_and_6(self, drives: Drives) -> None:
        """Requests of each drive, all issued as soon as the rings take them."""
        for write in (False, True):
            for count in range(1, len(drives.controllers) + 1):
                load = Load(count, 4096, write, self.threads_max(), self.window())
                told = f"{_count(count, drives.model.name)}, 4096 B random {load.verb}"
                found = Curve(f"{told}, asynchronous", "requests of each drive")
                link = self.link(drives, load)
                most = min(1 << 18, drives.commands_max(load))
                if not self.on_gpu:
                    most = min(most, max(256, drives.commands_for(load, self.seconds, link)))
                for requests in (1 << k for k in range(0, 19, 2) if 1 << k <= most):
                    runs = 5 if requests < 4096 else 1
                    # No more warps than there are batches of requests.
                    threads = min(load.threads, -(-requests // 32) * 32 * count)
                    point = replace(load, threads=threads)
                    taken = median(drives.seconds(point, requests) for _ in range(runs))
                    found.add(requests, requests * count / taken, drives.right(point, requests))
                self.keep(found)
                self.add(drives, load, load.way, found.best, found.right)
                self.report.row(
                    f"{told}: requests of each drive to saturate",
                    found.knee,
                    "requests",
                    paper="about 32 K" if not write else "",
                    note=f"of the powers of 4 to {most}; {_SATURATED} of the curve's best",
                )

    def bam_figure_9(self, namespaces: Namespaces, count: int, queue_pairs: int) -> None:
        """The kinds of drives of BaM's Table 2."""
        paper = {"PM1735": "BFS 1.0x", "980 Pro": "BFS 3.21x, CC 2.68x"}
        rates: dict[str, float] = {}
        for profile in ("P5800X", "PM1735", "980 Pro"):
            with Drives(self.device, namespaces, profile, count, queue_pairs) as drives:
                load = Load(count, 4096, False, self.threads_max(), 1 if self.on_gpu else 64)
                rates[profile], right = self.rate(drives, load)
                self.add(drives, load, load.way, rates[profile], right)
        for profile, told in paper.items():
            self.report.row(
                f"{count} modelled drives {profile}, slower than P5800X at 4096 B reads",
                rates["P5800X"] / rates[profile],
                "x",
                paper=f"{told} slower [BaM, Figure 9: applications]",
            )

    def bam_figure_11(self, namespaces: Namespaces, count: int) -> None:
        """Fewer queue pairs for all drives together."""
        first = 0.0
        for total in (128, 64, 32, 16, 8, 4):
            pairs = total // count
            if pairs == 0 or (not self.on_gpu and pairs > 16):
                continue
            with Drives(self.device, namespaces, "P5800X", count, pairs) as drives:
                load = Load(count, _LBA, False, self.threads_max(), 1 if self.on_gpu else 64)
                per_s, right = self.rate(drives, load)
            first = first or per_s
            self.report.row(
                f"{count} modelled drives P5800X, 512 B random reads, {total} queue pairs",
                per_s / 1e6,
                "M/s",
                "most queue pairs",
                first / 1e6,
                0.0,
                right,
                "1.0 down to 40 pairs [BaM, Figure 11: BFS]" if total > 40 else "",
                footprint=count * self.drive_bytes // 2,
            )


def _count(drives: int, name: str) -> str:
    return f"{drives} modelled drive{'s' if drives > 1 else ''} {name}"


def run(
    device: str | None,
    drives: Annotated[int, "Most modelled drives at a time, 1 to 16."] = 10,
    profile: Annotated[str, "The drive of the sweep over drives: a name of SSDModel.names()."] = (
        "P5800X"
    ),
    milliseconds: Annotated[float, "About how long one launch takes."] = 40.0,
    drive_mib: Annotated[int, "Memory of each drive, a power of two."] = 256,
    queue_pairs: Annotated[int, "Queue pairs of each drive."] = 16,
) -> Record:
    """Measure all figures; needs `drives * drive_mib` of memory, 4 GiB more on a GPU."""
    if not 1 <= drives <= _DRIVES_MAX:
        raise ArgumentError(f"drives={drives} is not between 1 and {_DRIVES_MAX}")
    if drive_mib < 1 or drive_mib & (drive_mib - 1):
        raise ArgumentError(f"drive_mib={drive_mib} is not a power of two")
    if not 0 < milliseconds <= 10_000:
        raise ArgumentError(f"milliseconds={milliseconds} is not between 0 and 10000")
    where = resolve(device)
    report = Record(
        title="Scaling over modelled drives (models, not measurements of drives)",
        device=where.describe(),
        settings={
            "model": str(fw.SSDModel.named(profile)),
            "drives": drives,
            "drive_mib": drive_mib,
            "queue_pairs_per_drive": queue_pairs,
            "depth": _DEPTH,
            "milliseconds": milliseconds,
            "host_threads": "one a drive" if where.kind == "cuda" else "the waiting ones",
        },
        seeds={"blocks": 0, "drives": 1},
    )
    namespaces = Namespaces(drives, drive_mib << 20)
    scaling = Scaling(where, report, milliseconds / 1e3, drive_mib << 20)
    with Drives(where, namespaces, profile, drives, queue_pairs) as sweep:
        scaling.bam_figure_4(sweep, 512)
        scaling.bam_figure_4(sweep, 4096)
    with Drives(where, namespaces, "AGILE", min(3, drives), queue_pairs) as sweep:
        scaling.agile_figures_5_and_6(sweep)
    scaling.bam_figure_9(namespaces, min(4, drives), queue_pairs)
    scaling.bam_figure_11(namespaces, min(4, drives))
    return report
