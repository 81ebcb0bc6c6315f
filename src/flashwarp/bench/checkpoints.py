"""A history of states written and read back, as reverse time migration does (Score, figures 5, 6).

A shot is a forward pass that writes a checkpoint in each step, and a backward pass that restores
one in each step. Sizes are those of the paper's uniform case, or drawn: its traces are not public.
Both caches and the data have the paper's ratio, 1 to 8 to 12. What counts is the time that the
calls block; each rate is the bytes over this time.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from flashwarp.checkpoint.mover import Mover
from flashwarp.checkpoint.report import CheckpointStats
from flashwarp.config import choice, integer
from flashwarp.device import Device, resolve
from flashwarp.probe.report import Report, Row
from flashwarp.probe.timing import median_of, wall_seconds
from flashwarp.transfer import CopyEngine

__all__ = ["run", "sizes_of"]

_ORDERS = ("sequential", "reverse", "irregular")
_HINTS = ("none", "single", "all")
_SIZES = ("uniform", "variable")
# What a snapshot is filled with is its number modulo this; arrays to be filled hold this number.
_VALUES = 251
# Of the paper's node, divided by 25 so that two cores can keep up: 25 GB/s between GPU and host
# memory, and 0.7 GB/s of flushes for each of its ranks.
_LIMITS = {"down": 1.0e9, "up": 1.0e9, "to storage": 28e6, "from storage": 160e6}


class _Limited(Mover):
    """Copies that take at least as long as links of the limited rates would."""

    def moved(self, link: str, nbytes: int, began_ns: int) -> None:
        if link in _LIMITS:
            left = nbytes / _LIMITS[link] - (time.monotonic_ns() - began_ns) / 1e9
            time.sleep(max(0.0, left))
        super().moved(link, nbytes, began_ns)


@dataclass(frozen=True)
class _Shot:
    """What one shot blocked for, and whether it restored what it wrote."""

    write_s: float
    read_s: float
    wall_s: float
    right: bool
    stats: CheckpointStats


def sizes_of(kind: str, steps: int, total: int, sigma: float, seed: int = 1) -> NDArray[np.int64]:
    """Return the bytes of each snapshot: all the same, or a ramp times a lognormal variation."""
    if kind == "uniform":
        weights = np.ones(steps)
    else:
        ramp = 1 - np.exp(-np.arange(1, steps + 1) / (40 * steps / 384))
        weights = ramp * np.random.default_rng(seed).lognormal(0, sigma, steps)
    sizes: NDArray[np.int64] = (total * weights / weights.sum()).astype(np.int64)
    return np.maximum(sizes // 256 * 256, 256)


def run(
    device: str | None,
    folder: Path,
    mib: Annotated[int, "Data of a shot in MiB."] = 48,
    steps: Annotated[int, "Snapshots of a shot; 384 in the paper."] = 96,
    interval_ms: Annotated[float, "Computation between two calls, slept; 10 in the paper."] = 10,
    sigma: Annotated[float, "Spread of variable sizes."] = 0.3,
    sizes: Annotated[str, "Of uniform, variable."] = "uniform,variable",
    orders: Annotated[str, "Of sequential, reverse, irregular."] = "sequential,reverse,irregular",
    hints: Annotated[str, "Of none, single, all."] = "none,single,all",
    eviction: Annotated[str, "Of score, lru, fifo."] = "score",
    wait: Annotated[bool, "Wait until all is durable before the backward pass."] = False,
    limit: Annotated[bool, "Limit the links on the CPU device, to the paper's ratios."] = True,
) -> Report:
    """Write and restore histories, beside plain copies and torch.save."""
    where = resolve(device)
    integer("steps", steps, 2, 1 << 20)
    total = mib << 20
    limited = limit and where.kind == "cpu"
    report = Report(
        title="Histories of checkpoints",
        device=where.describe(),
        settings={
            "mib": mib,
            "steps": steps,
            "interval_ms": interval_ms,
            "sigma": sigma,
            "eviction": eviction,
            "wait": wait,
            "limits_bytes_per_s": _LIMITS if limited else None,
        },
        seeds={"sizes": 1, "irregular order": 2},
    )
    copy_rate = _copy_rate(where, total // steps)
    for kind in _named("sizes", sizes, _SIZES):
        lengths = sizes_of(kind, steps, total, sigma)
        for order in _named("orders", orders, _ORDERS):
            plain = 0.0
            for hinted in _named("hints", hints, _HINTS):
                number = len(report.rows)
                config = {"eviction": eviction, "make_mover": _Limited if limited else None}
                caches = (total // 12, total * 8 // 12)
                with fw.Checkpointer(folder / str(number), where, *caches, config=config) as made:
                    shot = _shoot(made, where, lengths, order, hinted, interval_ms / 1e3, wait)
                _add(report, shot, f"{kind} {order}, hints: {hinted}", lengths, copy_rate, plain)
                plain = plain or report.rows[-1].value
    _add_torch_save(report, folder, sizes_of("uniform", steps, total, sigma), copy_rate)
    return report


def _order(name: str, steps: int) -> list[int]:
    if name == "irregular":
        return [int(step) for step in np.random.default_rng(2).permutation(steps)]
    return list(range(steps)) if name == "sequential" else list(reversed(range(steps)))


def _shoot(
    made: fw.Checkpointer,
    device: Device,
    lengths: NDArray[np.int64],
    order_name: str,
    hinted: str,
    interval_s: float,
    wait: bool,
) -> _Shot:
    order = _order(order_name, len(lengths))
    began = time.perf_counter()
    if hinted == "all":
        for step in order:
            made.prefetch_enqueue(step)
    write_s = read_s = 0.0
    for step, nbytes in enumerate(lengths):
        state = _state(device, int(nbytes), step % _VALUES)
        made.protect("state", state)
        time.sleep(interval_s)
        write_s += wall_seconds(functools.partial(made.checkpoint, step))
    if wait:
        made.wait()
    made.prefetch_start()
    right = True
    for turn, step in enumerate(order):
        if hinted == "single" and turn + 1 < len(order):
            made.prefetch_enqueue(order[turn + 1])
        state = _state(device, int(lengths[step]), _VALUES)
        time.sleep(interval_s)
        read_s += wall_seconds(functools.partial(made.restart, step, into={"state": state}))
        found = np.asarray(state)
        right &= bool(found[0] == found[-1] == step % _VALUES)
    return _Shot(write_s, read_s, time.perf_counter() - began, right, made.stats)


def _state(device: Device, nbytes: int, value: int) -> Any:
    if device.kind == "cpu":
        return np.full(nbytes, value, np.uint8)
    state = device.empty_array((nbytes,), np.uint8)
    device.fill(state.address, value, nbytes)
    return state


def _copy_rate(device: Device, nbytes: int) -> float:
    """Return the rate of plain copies of a snapshot inside the device, in bytes a second."""
    if device.kind == "cpu":
        source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        return nbytes / median_of(lambda: wall_seconds(lambda: np.copyto(target, source)), 20)
    memories = [device.allocate(nbytes) for _ in range(2)]
    with CopyEngine(device) as engine:

        def copy() -> None:
            engine.copy(memories[1], memories[0]).wait()

        return nbytes / median_of(lambda: wall_seconds(copy), 20)


def _named(option: str, text: str, allowed: Sequence[str]) -> list[str]:
    names = [each.strip() for each in text.split(",")]
    for name in names:
        choice(option, name, allowed)
    return names


def _add(
    report: Report,
    shot: _Shot,
    name: str,
    lengths: Sequence[int] | NDArray[np.int64],
    copy_rate: float,
    plain: float,
) -> None:
    total = int(np.sum(lengths))
    card = shot.stats.hints
    report.add(
        Row(
            f"restore, {name}",
            total / shot.read_s / 1e9,
            "GB/s",
            "plain copies",
            copy_rate / 1e9,
            checked=shot.right,
            note=(
                f"{total / shot.write_s / 1e9:.3g} GB/s written; {shot.wall_s:.2f} s in all; from "
                f"{shot.stats.restarts_from}; {card.useful} hints useful, {card.late} late; "
                f"{shot.stats.prefetch_distance:.1f} versions ahead"
                + (f"; {total / shot.read_s / 1e9 / plain:.1f} of no hints" if plain else "")
            ),
            footprint=total,
        )
    )


def _add_torch_save(
    report: Report, folder: Path, lengths: NDArray[np.int64], copy_rate: float
) -> None:
    if importlib.util.find_spec("torch") is None:
        return
    torch: Any = importlib.import_module("torch")
    write_s = read_s = 0.0
    for step, nbytes in enumerate(lengths):
        state = torch.full((int(nbytes),), step % _VALUES, dtype=torch.uint8)
        save = functools.partial(torch.save, {"state": state}, folder / f"{step}.pt")
        write_s += wall_seconds(save)
    right = True
    for step in range(len(lengths)):
        began = time.perf_counter()
        state = torch.load(folder / f"{step}.pt")["state"]
        read_s += time.perf_counter() - began
        right &= int(state[0]) == int(state[-1]) == step % _VALUES
    total = int(lengths.sum())
    report.add(
        Row(
            "torch.load of each",
            total / read_s / 1e9,
            "GB/s",
            "plain copies",
            copy_rate / 1e9,
            checked=right,
            note=(
                f"{total / write_s / 1e9:.3g} GB/s written by torch.save, which makes nothing "
                "durable; through the page cache, without the limits of links"
            ),
            footprint=total,
        )
    )
