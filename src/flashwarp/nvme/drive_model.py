"""Modelled drives: when a drive would have completed a command, on a machine without the drive.

A software controller with a model still moves all data, but posts a completion no earlier than the
modelled drive would. Measurements over such a controller show how this library copes with a drive
of that kind. They say nothing about the drive of that name, and every description says so.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean
from typing import Any

import numpy as np
import numpy.typing as npt

from flashwarp import _native
from flashwarp.config import SIZE_MAX, integer, number
from flashwarp.errors import ArgumentError

_LBA = 512
# Quantiles that the controller is given: exact up to 99.9 %, as the next one is at 99.902 %.
_QUANTILES = 1024
# Service times end here: a logarithmic normal has no end of its own.
_LAST_QUANTILE = 0.99999
_LATENCY_MAX_US = 1e6
_BLOCK_BYTES_MAX = 1 << 30
_COMMANDS_MAX = 1 << 40
_UNITS_MAX = 65536


@dataclass(frozen=True)
class Saturation:
    """Throughput and latency of a modelled drive with a number of commands outstanding.

    Attributes
    ----------
    depth : int
        Commands outstanding.
    per_s : float
        Commands completed in a second.
    latency_us : float
        Mean time from arrival to completion. By Little's law `depth = per_s * latency`.
    """

    depth: int
    per_s: float
    latency_us: float


@dataclass(frozen=True, kw_only=True)
class SSDModel:
    """A modelled drive, for `SoftwareController(model=)`. A model, not a measurement.

    A command passes a pipe, which takes it for as long as the ceilings say, and then one of
    `units`, which takes it for a service time drawn from a logarithmic normal distribution. Reads
    and writes share both. Latency under load and the depth that saturates the drive follow.

    Parameters
    ----------
    name : str
        Its name in descriptions.
    read_iops, write_iops : sequence of (block bytes, commands per second)
        Ceilings by block size, ascending. Between two sizes the time of a command is interpolated;
        beyond them it is constant.
    read_bytes_per_s, write_bytes_per_s : float
        Ceilings by bytes, which bound larger commands.
    read_latency_us, write_latency_us : (least, median, 99th percentile)
        Service time of a command in an idle drive, in microseconds, without its time in the pipe.
    units : int
        Commands in service at a time, 1 to 65536.
    seed : int
        Of the service times: command number n always draws the same one. Give each of several
        drives its own, with `dataclasses.replace` and `nvme.group.ControllerGroup`.
    source : str
        Where the numbers come from.

    Examples
    --------
    >>> import flashwarp as fw
    >>> drive = fw.nvme.SSDModel.named("P5800X")
    >>> round(drive.saturation(256, 4096).per_s, -5)
    1500000.0
    """

    name: str
    read_iops: tuple[tuple[int, float], ...]
    write_iops: tuple[tuple[int, float], ...]
    read_bytes_per_s: float
    write_bytes_per_s: float
    read_latency_us: tuple[float, float, float]
    write_latency_us: tuple[float, float, float]
    units: int
    seed: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ArgumentError(f"name={self.name!r} is not a name")
        for field in ("read_iops", "write_iops"):
            object.__setattr__(self, field, _ceilings(field, getattr(self, field)))
        for field in ("read_bytes_per_s", "write_bytes_per_s"):
            object.__setattr__(self, field, number(field, getattr(self, field), 1e3, 1e15))
        for field in ("read_latency_us", "write_latency_us"):
            object.__setattr__(self, field, _latency(field, getattr(self, field)))
        for field, most in (("units", _UNITS_MAX), ("seed", 2**64 - 1)):
            object.__setattr__(self, field, integer(field, getattr(self, field), 1, most))

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names that `named` knows."""
        return tuple(_PROFILES)

    @staticmethod
    def named(name: str, seed: int = 1) -> SSDModel:
        """Return a built-in profile; `docs/hardware.md` says where its numbers come from."""
        found = {known.lower(): model for known, model in _PROFILES.items()}.get(str(name).lower())
        if found is None:
            raise ArgumentError(f"there is no drive model {name!r}; known: {', '.join(_PROFILES)}")
        return dataclasses.replace(found, seed=seed)

    def __str__(self) -> str:
        return f"modelled drive: {self.name} (a model, not a measurement)"

    def iops(self, block_bytes: int, *, write: bool = False) -> float:
        """Ceiling in commands per second at one block size: of commands, bytes or units."""
        block_bytes = integer("block_bytes", block_bytes, 1, _BLOCK_BYTES_MAX)
        points = self.write_iops if write else self.read_iops
        sizes = [size for size, _ in points]
        seconds = float(np.interp(block_bytes, sizes, [1 / per_s for _, per_s in points]))
        bytes_per_s = self.write_bytes_per_s if write else self.read_bytes_per_s
        busy = max(seconds, block_bytes / bytes_per_s)
        return min(1 / busy, self.units / (self.mean_latency_us(write=write) * 1e-6))

    def mean_latency_us(self, *, write: bool = False) -> float:
        """Mean service time in microseconds."""
        points = _service_us(self.write_latency_us if write else self.read_latency_us)
        return mean((a + b) / 2 for a, b in itertools.pairwise(points))

    # In model time.

    def completion_times(
        self,
        arrival_ns: Sequence[int] | npt.NDArray[np.int64],
        block_bytes: int,
        *,
        write: bool = False,
    ) -> npt.NDArray[np.int64]:
        """Return when an idle drive completes commands that arrive at these times, in nanoseconds.

        Blocks for a microsecond for each command.
        """
        drive, blocks = self.native_model(), _blocks(block_bytes)
        times = [integer("arrival_ns", t, 0, SIZE_MAX) for t in arrival_ns]
        return np.array([drive.admit(t, write, blocks) for t in times], np.int64)

    def saturation(
        self, depth: int, block_bytes: int, *, write: bool = False, commands: int = 20_000
    ) -> Saturation:
        """Return the throughput and latency with `depth` commands outstanding.

        Blocks for microseconds for each command. The first `depth` commands are not counted.
        """
        depth = integer("depth", depth, 1, _COMMANDS_MAX)
        commands = integer("commands", commands, 1, _COMMANDS_MAX)
        drive, blocks = self.native_model(), _blocks(block_bytes)
        outstanding = [drive.admit(0, write, blocks) for _ in range(depth)]
        heapq.heapify(outstanding)
        for _ in range(depth):
            heapq.heapreplace(outstanding, drive.admit(outstanding[0], write, blocks))
        start, waited = outstanding[0], 0
        for _ in range(commands):
            now = outstanding[0]
            due = drive.admit(now, write, blocks)
            waited += due - now
            heapq.heapreplace(outstanding, due)
        elapsed = outstanding[0] - start
        return Saturation(depth, commands / elapsed * 1e9, waited / commands / 1e3)

    # For the controller.

    def native_parameters(self) -> _native.SsdParameters:
        """Return the parameters for the native controller."""
        read, write = (
            _native.SsdDirection(list(iops), bytes_per_s, [1e3 * us for us in _service_us(latency)])
            for iops, bytes_per_s, latency in (
                (self.read_iops, self.read_bytes_per_s, self.read_latency_us),
                (self.write_iops, self.write_bytes_per_s, self.write_latency_us),
            )
        )
        return _native.SsdParameters(read, write, self.units, self.seed)

    def native_model(self) -> _native.SsdModel:
        """Return an unused drive of this kind: ``admit(now_ns, is_write, blocks)``."""
        return _native.SsdModel(self.native_parameters())


def _ceilings(field: str, value: Any) -> tuple[tuple[int, float], ...]:
    try:
        points = tuple(
            (integer("size", size, 1, _BLOCK_BYTES_MAX), number("per_s", per_s, 1, 1e9))
            for size, per_s in value
        )
    except (TypeError, ValueError):  # an ArgumentError is a ValueError
        points = ()
    sizes = [size for size, _ in points]
    if not points or sizes != sorted(set(sizes)):
        raise ArgumentError(
            f"{field}={value!r} is not a sequence of (block bytes, commands per second) with "
            "ascending sizes and 1 to 1e9 commands per second"
        )
    return points


def _latency(field: str, value: Any) -> tuple[float, float, float]:
    try:
        least, median, high = (number("part", part, 0, _LATENCY_MAX_US) for part in value)
    except (TypeError, ValueError):
        least, median, high = math.nan, math.nan, math.nan
    if not least < median < high:
        raise ArgumentError(
            f"{field}={value!r} is not (least, median, 99th percentile) in ascending microseconds "
            f"from 0 to {_LATENCY_MAX_US:g}"
        )
    return least, median, high


def _service_us(latency_us: tuple[float, float, float]) -> list[float]:
    """Evenly spaced quantiles of the shifted logarithmic normal through the three given ones."""
    least, median, high = latency_us
    normal = NormalDist()
    sigma = math.log((high - least) / (median - least)) / normal.inv_cdf(0.99)
    chances = [min(i / _QUANTILES, _LAST_QUANTILE) for i in range(1, _QUANTILES + 1)]
    body = [least + (median - least) * math.exp(sigma * normal.inv_cdf(p)) for p in chances]
    return [least, *body]


def _blocks(block_bytes: int) -> int:
    block_bytes = integer("block_bytes", block_bytes, 1, _BLOCK_BYTES_MAX)
    if block_bytes % _LBA:
        raise ArgumentError(f"block_bytes={block_bytes} is not a positive multiple of {_LBA}")
    return block_bytes // _LBA


# Ceilings in commands per second are the papers' where `source` says so; bandwidths, units and the
# shape of latency are assumptions. docs/hardware.md has the table.
_PROFILES = {
    model.name: model
    for model in (
        SSDModel(
            name="P5800X",
            read_iops=((512, 5.1e6), (4096, 1.5e6)),
            write_iops=((512, 1.0e6), (4096, 1.5e6)),
            read_bytes_per_s=7.2e9,
            write_bytes_per_s=6.2e9,
            read_latency_us=(7, 9.5, 20),
            write_latency_us=(7, 9.5, 20),
            units=64,
            source="BaM, Table 2 (Intel P5800X): commands per second, order of the latency",
        ),
        SSDModel(
            name="PM1735",
            read_iops=((512, 1.1e6), (4096, 1.6e6)),
            write_iops=((512, 351e3), (4096, 351e3)),
            read_bytes_per_s=8.0e9,
            write_bytes_per_s=3.8e9,
            read_latency_us=(18, 25, 60),
            write_latency_us=(10, 15, 60),
            units=64,
            source="BaM, Table 2 (Samsung PM1735): commands per second, order of the latency",
        ),
        SSDModel(
            name="980 Pro",
            read_iops=((512, 750e3), (4096, 750e3)),
            write_iops=((512, 172e3), (4096, 172e3)),
            read_bytes_per_s=7.0e9,
            write_bytes_per_s=5.0e9,
            read_latency_us=(60, 100, 250),
            write_latency_us=(12, 20, 200),
            units=128,
            source="BaM, Table 2 (Samsung 980 Pro): commands per second (700 to 800 thousand "
            "reads), order of the latency",
        ),
        SSDModel(
            name="P5510",
            read_iops=((512, 700e3), (4096, 700e3)),
            write_iops=((512, 170e3), (4096, 170e3)),
            read_bytes_per_s=6.5e9,
            write_bytes_per_s=3.4e9,
            read_latency_us=(55, 80, 180),
            write_latency_us=(10, 15, 150),
            units=96,
            source="assumed; CAM shows 12 drives at 20 GB/s of 4 KiB reads, the limit of its link: "
            "407 thousand per second and drive at least",
        ),
        SSDModel(
            name="AGILE",
            read_iops=((4096, 3.7e9 / 4096),),
            write_iops=((4096, 2.2e9 / 4096),),
            read_bytes_per_s=7.0e9,
            write_bytes_per_s=6.0e9,
            read_latency_us=(50, 80, 200),
            write_latency_us=(10, 18, 150),
            units=128,
            source="AGILE, Figures 5 and 6: 3.7 and 2.2 GB/s of 4 KiB reads and writes by one "
            "drive (Dell AIC, Samsung 990 PRO)",
        ),
    )
}
