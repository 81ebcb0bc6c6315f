"""Shots: a forward pass that writes a history, and a backward pass that restores it.

Both caches and the data have the paper's ratio, 1 to 8 to 12. What counts is the time that the
calls block their caller and its stream; each rate is the bytes over this time.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from benchmarks.base import Record
from benchmarks.checkpoints.disk import Disk
from benchmarks.checkpoints.state import (
    VALUES,
    blocked,
    ends_are,
    finish,
    new_array,
    wait_until_pinned,
)
from flashwarp.checkpoint import system
from flashwarp.checkpoint.capture import Bytes
from flashwarp.checkpoint.directory import VersionReader, VersionWriter
from flashwarp.checkpoint.mover import Mover, Pending
from flashwarp.checkpoint.region import Region
from flashwarp.checkpoint.report import CheckpointStats
from flashwarp.checkpoint.tier import Entry, Tier
from flashwarp.device import Device

__all__ = [
    "HINTS",
    "ORDERS",
    "PAPER_LINKS",
    "PAPER_SNAPSHOT_BYTES",
    "SIZES",
    "Links",
    "Plan",
    "add_shots",
    "order_of",
    "plans",
    "sizes_of",
]

ORDERS = ("sequential", "reverse", "irregular")
HINTS = ("none", "single", "all")
SIZES = ("uniform", "variable")

PAPER_SNAPSHOT_BYTES = 128 << 20

_DISK_BYTES = 768 << 20
_TIMES = 10.0
"""What is wanted of restores with all hints against those without."""


@dataclass(frozen=True)
class Links:
    """Bytes a second: copies inside the device, to the host, back, and both ways to storage."""

    within: float
    down: float
    up: float
    writes: float
    reads: float

    def times(self, factor: float) -> Links:
        """Return links that are faster by a factor, except copies inside the device."""
        moved = (self.down, self.up, self.writes, self.reads)
        return Links(self.within, *(rate * factor for rate in moved))


PAPER_LINKS = Links(1e12, 25e9, 25e9, 0.685e9, 2e9)
"""Of a rank of the paper's nodes: flushes as it measured them, and an eighth of the drives' reads,
because eight ranks share four drives of 4 GB/s."""


@dataclass(frozen=True)
class Plan:
    """One shot."""

    sizes: str
    order: str
    hints: str
    wait: bool
    interval_s: float
    sigma: float
    cache: float
    """Bytes of the caches over those of the paper's ratio."""

    def __str__(self) -> str:
        cache = "" if self.cache == 1 else f", caches x {self.cache:g}"
        sigma = "" if self.sizes == "uniform" else f" (sigma {self.sigma:g})"
        return (
            f"{self.sizes}{sigma} {self.order}, {self.interval_s * 1e3:g} ms{cache}, "
            f"{'durable first' if self.wait else 'at once'}, hints: {self.hints}"
        )


@dataclass(frozen=True)
class Shot:
    """What one shot blocked for, and whether it restored what it wrote."""

    write_s: float
    drain_s: float
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


def limited_mover(links: Links) -> type[Mover]:
    """Return a mover on the CPU device whose copies take as long as those of the links.

    The two ways of a link to the host are independent. Storage serves reads and writes in turn,
    piece by piece: what reads while others write gets a part of its rate.
    """
    rates = {"down": links.down, "up": links.up, "writes": links.writes, "reads": links.reads}
    lines = {"down": "down", "up": "up", "writes": "storage", "reads": "storage"}
    busy_until_ns = dict.fromkeys(lines.values(), 0.0)
    lock = threading.Lock()

    def take(link: str, nbytes: int, began_ns: int) -> None:
        """Sleep until a link, which transfers share one after the other, has moved the bytes."""
        line = lines[link]
        with lock:
            end_ns = max(began_ns, busy_until_ns[line]) + nbytes / rates[link] * 1e9
            busy_until_ns[line] = end_ns
        time.sleep(max(0.0, (end_ns - time.monotonic_ns()) / 1e9))

    @dataclass(frozen=True)
    class Storage:
        """A reader or writer of a version at the rate of the link."""

        version: Any

        def write(self, region: Region, offset: int, buffer: Any) -> None:
            began_ns = time.monotonic_ns()
            self.version.write(region, offset, buffer)
            take("writes", memoryview(buffer).nbytes, began_ns)

        def read_into(self, region: Region, offset: int, buffer: Any) -> None:
            began_ns = time.monotonic_ns()
            self.version.read_into(region, offset, buffer)
            take("reads", memoryview(buffer).nbytes, began_ns)

    class Limited(Mover):
        def _store(self, parts: Any, writer: VersionWriter, *args: Any, **options: Any) -> bool:
            limited: Any = Storage(writer)
            return super()._store(parts, limited, *args, **options)

        def _load(self, parts: Any, reader: VersionReader, *args: Any, **options: Any) -> bool:
            limited: Any = Storage(reader)
            return super()._load(parts, limited, *args, **options)

        def moved(self, link: str, nbytes: int, began_ns: int) -> None:
            if link in lines:
                take(link, nbytes, began_ns)
            super().moved(link, nbytes, began_ns)

        def deliver(self, tier: Tier, entry: Entry, targets: list[Bytes]) -> Pending:
            began_ns = time.monotonic_ns()
            pending = super().deliver(tier, entry, targets)
            if tier.name == "host":  # over the link of a GPU, as a restore from there is
                nbytes = sum(each.region.nbytes for each in targets)
                take("up", nbytes, began_ns)
            return pending

    return Limited


def order_of(name: str, steps: int) -> list[int]:
    """Return the numbers of versions in the order of their restores."""
    if name == "irregular":
        return [int(step) for step in np.random.default_rng(2).permutation(steps)]
    return list(range(steps)) if name == "sequential" else list(reversed(range(steps)))


def shoot(
    made: fw.Checkpointer,
    device: Device,
    lengths: NDArray[np.int64],
    plan: Plan,
    arrive: Callable[[], object] = lambda: None,
) -> Shot:
    """Write and restore one history; `arrive` is called after the computation of each step."""
    order = order_of(plan.order, len(lengths))
    states = _States(device)
    began = time.perf_counter()
    if plan.hints == "all":
        for step in order:
            made.prefetch_enqueue(step)
    write_s = read_s = drain_s = 0.0
    for step, nbytes in enumerate(lengths):
        state = states.filled(int(nbytes), step % VALUES)
        made.protect("state", state)
        time.sleep(plan.interval_s)
        arrive()
        write_s += blocked(device, partial(made.checkpoint, step))
    if plan.wait:
        drain_began = time.perf_counter()
        made.wait()
        drain_s = time.perf_counter() - drain_began
    made.prefetch_start()
    right = True
    for turn, step in enumerate(order):
        if plan.hints == "single" and turn + 1 < len(order):
            made.prefetch_enqueue(order[turn + 1])
        state = states.filled(int(lengths[step]), VALUES)
        time.sleep(plan.interval_s)
        arrive()
        read_s += blocked(device, partial(made.restart, step, into={"state": state}))
        right &= ends_are(state, step % VALUES)
    return Shot(write_s, drain_s, read_s, time.perf_counter() - began, right, made.stats)


class _States:
    """Arrays of any number of bytes, one at a time in the same memory."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: Any = None
        self._nbytes = 0

    def filled(self, nbytes: int, value: int) -> Any:
        """Return an array with a value in all bytes."""
        if nbytes > self._nbytes:
            self._nbytes = nbytes
            self._memory = new_array(self._device, nbytes)
        state = self._memory[:nbytes]
        state[:] = value
        finish(self._device)
        return state


def plans(
    sizes: list[str],
    orders: list[str],
    waits: list[bool],
    intervals_s: list[float],
    sigmas: list[float],
    caches: list[float],
    hints: list[str],
) -> list[Plan]:
    """Return all combinations; uniform sizes have no sigma. Hints change fastest."""
    return [
        Plan(kind, order, hinted, wait, interval, sigma, cache)
        for kind, order, wait, interval, sigma, cache in product(
            sizes, orders, waits, intervals_s, sigmas, caches
        )
        if kind != "uniform" or sigma == sigmas[0]
        for hinted in hints
    ]


def add_shots(
    report: Record,
    device: Device,
    folder: Path,
    total: int,
    steps: int,
    wanted: list[Plan],
    eviction: str,
    links: Links,
    *,
    limited: bool,
) -> None:
    """Run shots until it is late, and add what each restored and how long it took."""
    plain: tuple[Plan, Shot] | None = None
    before = Disk(links.writes, links.reads)
    for number, plan in enumerate(wanted):
        if report.is_late(str(plan)):
            continue
        lengths = sizes_of(plan.sizes, steps, total, plan.sigma)
        caches = (int(total * plan.cache / 12), int(total * plan.cache * 8 / 12))
        config = {
            "eviction": eviction,
            # An adjoint run reads each version once; what it has read need not be flushed.
            "discard_consumed": not plan.wait,
        }
        place = folder / f"shot{number}"
        mover = limited_mover(links) if limited else Mover
        with mock.patch.object(system, "Mover", mover):
            made = fw.Checkpointer(place, device, *caches, config=config)
        try:
            wait_until_pinned(made, sum(caches))
            shot = shoot(made, device, lengths, plan)
        finally:
            made.close(drain=False)
            shutil.rmtree(place, ignore_errors=True)
        if not limited:
            # The disk is slower at one time than at another: what counts is what it gave beside.
            after = Disk.measure(folder, min(total, _DISK_BYTES))
            given = before.best(after)
            links, before = replace(links, writes=given.writes, reads=given.reads), after
        if plan.hints == "none":
            plain = plan, shot
        same = plain is not None and str(plain[0]).partition(", hints")[0] in str(plan)
        _add(report, plan, shot, lengths, caches, links, plain[1] if plain and same else None)


def least_seconds(
    plan: Plan, lengths: NDArray[np.int64], caches: tuple[int, int], links: Links
) -> tuple[float, float]:
    """Return the least time of both passes that computation and links allow."""
    total = int(lengths.sum())
    computed = len(lengths) * plan.interval_s
    spilled = max(0, total - sum(caches))
    copied = total / links.within
    flushed = total if plan.wait else spilled
    forward = max(computed + copied, (total - caches[0]) / links.down, flushed / links.writes)
    backward = max(computed + copied, (total - caches[0]) / links.up, spilled / links.reads)
    return forward, backward


def wanted_from_s(
    lengths: NDArray[np.int64], caches: tuple[int, int], links: Links, plain_s: float
) -> float:
    """Return from which interval on the links allow `_TIMES` the rate without hints.

    That is `plain_s` for all restores. What a step computes hides as much of the disk's work.
    """
    total = int(lengths.sum())
    read_s = max(0, total - sum(caches)) / links.reads
    return max(0.0, read_s - plain_s / _TIMES) / len(lengths)


def _add(
    report: Record,
    plan: Plan,
    shot: Shot,
    lengths: NDArray[np.int64],
    caches: tuple[int, int],
    links: Links,
    plain: Shot | None,
) -> None:
    total = int(lengths.sum())
    card = shot.stats.hints
    rate = total / shot.read_s
    of_paper = plan.sizes == "uniform" and plan.order == "reverse" and plan.hints == "all"
    against = ("no hints", total / plain.read_s / 1e9) if plain is not None else ("", 0.0)
    if plain is shot:
        against = "copies inside the device", links.within / 1e9
    report.row(
        f"restore, {plan}",
        rate / 1e9,
        "GB/s",
        *against,
        target=_TIMES if of_paper else 0.0,
        checked=shot.right,
        note=(
            f"{total / shot.write_s / 1e9:.3g} GB/s written, durable after {shot.drain_s:.2f} "
            f"s more; {shot.wall_s:.2f} s in all; from {shot.stats.restarts_from}; "
            f"{card.useful} hints useful, {card.late} late; "
            f"{shot.stats.prefetch_distance:.1f} versions ahead"
        ),
        footprint=total,
    )
    if plan.hints != "all":
        return
    forward_s, backward_s = least_seconds(plan, lengths, caches, links)
    computed_s = len(lengths) * plan.interval_s
    if plain is not None and plain.read_s > 0:
        left_s = max(total / links.within, backward_s - computed_s)
        allowed = 1 - left_s / plain.read_s
        from_s = wanted_from_s(lengths, caches, links, plain.read_s)
        report.row(
            f"restores against those without hints, {plan}",
            plain.read_s / shot.read_s,
            "times as fast",
            "what links allow",
            plain.read_s / left_s,
            note=f"with the disk at {links.writes / 1e9:.2f} GB/s of writes and "
            f"{links.reads / 1e9:.2f} of reads, beside the shot; the links allow "
            f"{_TIMES:g} times from {from_s * 1e3:.1f} ms a step on",
        )
        report.row(
            f"restore stall hidden, {plan}",
            1 - shot.read_s / plain.read_s,
            "of that without hints",
            "what links allow",
            allowed,
            note=f"{shot.read_s:.3f} s of {plain.read_s:.3f} s are left; the links leave "
            f"{left_s:.3f} s",
        )
    report.row(
        f"shots, {plan}",
        1 / shot.wall_s,
        "shots/s",
        "computation, or the bytes of the slowest link",
        1 / (forward_s + backward_s),
        target=1 / 1.1,
        note=f"{shot.wall_s:.2f} s; at least {forward_s:.2f} s forward and {backward_s:.2f} s "
        "backward by plain rates of the links",
    )
