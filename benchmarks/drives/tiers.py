"""The tiers below the frames: a host-memory tier under caches of several sizes, and more drives.

Rows are gathered at random from modelled drives. For the host tier, the choice of rows is skewed,
since a cache helps only then, and each figure stands beside the same cache without a tier. For the
drives, the choice is even, and each figure stands beside the rate of one drive times their number.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from benchmarks.base import Record, by_kind
from benchmarks.drives.modelled import modelled
from flashwarp.device import Device, resolve
from flashwarp.nvme.group import ControllerGroup
from flashwarp.nvme.queue_pair import DataPath
from flashwarp.probe.timing import in_turns, wall_seconds
from flashwarp.storage import Memory, Striped

__all__ = ["run"]

_ROW_BYTES = 4096
# Shares of the data that the frames hold, and what the tier holds beside them.
_CACHE_SHARES = (16, 8, 4)
_TIER_SHARE = 2
_DRIVES = (1, 2, 4, 8)
# Rows near the front are asked for most: the share of row r falls as 1 / r to this power.
_SKEW = 0.9


def run(
    device: str | None,
    mib: Annotated[int, "Size of the data in MiB; 4096 on a GPU."] = 0,
    rows: Annotated[int, "Rows that a call gathers; 262144 on a GPU."] = 0,
    drive: Annotated[str, "Modelled drive."] = "980 Pro",
    slower: Annotated[int, "Divides the drives' ceilings; 50 on the CPU device."] = 0,
    runs: Annotated[int, "How often each way has its turn."] = 3,
) -> Record:
    """Gather rows with and without a host tier, and over more and more drives."""
    where = resolve(device)
    mib = by_kind(where, mib, 4096, 64)
    rows = by_kind(where, rows, 262_144, 8192)
    # A few cores cannot keep up with a drive; slower drives show whether their rates add up.
    slower = by_kind(where, slower, 1, 50)
    report = Record(
        title="Host-memory tier, and drives",
        device=where.describe(),
        settings={"data_mib": mib, "rows": rows, "drive": drive, "slower": slower, "skew": _SKEW},
        seeds={"rows": 1, "drives": 1},
    )
    count = (mib << 20) // _ROW_BYTES
    data = np.arange(count * (_ROW_BYTES // 8), dtype=np.int64).reshape(count, -1)
    model = modelled(drive, slower)
    _sweep_tier(report, where, data, rows, model, runs)
    _sweep_drives(report, where, data, rows, model, runs)
    return report


def _controller(device: Device, model: fw.SSDModel, number: int = 0) -> fw.SoftwareController:
    path: DataPath = "bounce" if device.kind == "cuda" else "direct"
    return fw.SoftwareController(data_path=path, model=replace(model, seed=number + 1))


class _Gather:
    """Rows into memory of the device, which a copy to the host would be slower than."""

    def __init__(self, device: Device, index: NDArray[np.int64]) -> None:
        self.index = index
        self.there: Any = index
        self.out: Any = np.empty((len(index), _ROW_BYTES // 8), np.int64)
        if device.kind == "cuda":
            self.there = device.empty_array(index.shape, np.int64)
            device.upload(self.there.address, index)
            self.out = device.empty_array(self.out.shape, np.int64)

    def rate(self, x: fw.Array, seen: list[bool]) -> float:
        seconds = wall_seconds(lambda: x.gather(self.there, out=self.out))
        found = np.asarray(self.out)[:, 0]
        seen.append(bool((found == self.index * (_ROW_BYTES // 8)).all()))
        return len(self.index) / seconds


def _sweep_tier(
    report: Record,
    device: Device,
    data: NDArray[np.int64],
    rows: int,
    model: fw.SSDModel,
    runs: int,
) -> None:
    weights = 1 / np.arange(1, len(data) + 1) ** _SKEW
    random = np.random.default_rng(1)
    index = random.choice(len(data), rows, p=weights / weights.sum())
    index = random.permutation(len(data))[index]
    for share in _CACHE_SHARES:
        with ExitStack() as stack:
            opened = {}
            for name, tier in (("without", None), ("with", data.nbytes // _TIER_SHARE)):
                opened[name] = stack.enter_context(
                    fw.open(
                        Memory(data, writable=False),
                        "r",
                        np.int64,
                        data.shape,
                        device=device,
                        cache=fw.Cache(data.nbytes // share, host_capacity=tier),
                        controller=_controller(device, model),
                    )
                )
            seen: list[bool] = []
            gather = _Gather(device, index)
            ways = {name: partial(gather.rate, x, seen) for name, x in opened.items()}
            speed = in_turns(ways, runs)
            stats = opened["with"].stats
            report.row(
                f"cache 1/{share} of the data, host tier 1/{_TIER_SHARE}",
                speed["with"],
                "rows/s",
                "without the tier",
                speed["without"],
                checked=all(seen),
                footprint=data.nbytes,
                note=f"the tier answers {stats.tier_hits / max(1, stats.misses):.0%} of misses",
            )


def _sweep_drives(
    report: Record,
    device: Device,
    data: NDArray[np.int64],
    rows: int,
    model: fw.SSDModel,
    runs: int,
) -> None:
    index = np.random.default_rng(2).integers(0, len(data), rows)
    one = 0.0
    for drives in _DRIVES:
        parts = data.reshape(-1, drives, data.shape[1])
        members = [Memory(np.ascontiguousarray(parts[:, n]), writable=False) for n in range(drives)]
        with fw.open(
            Striped(members, _ROW_BYTES),
            "r",
            np.int64,
            data.shape,
            device=device,
            cache=data.nbytes // _CACHE_SHARES[0],
            controller=ControllerGroup([_controller(device, model, n) for n in range(drives)]),
        ) as x:
            seen: list[bool] = []
            gather = _Gather(device, index)
            speed = in_turns({"stripe": partial(gather.rate, x, seen)}, runs)["stripe"]
        one = one or speed
        report.row(
            f"stripes over {drives} drives",
            speed,
            "rows/s",
            f"{drives} times one drive",
            one * drives,
            checked=all(seen),
            footprint=data.nbytes,
        )
