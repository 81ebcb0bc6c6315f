"""A simulation of shots on many nodes, from the figures of one that was measured.

Each node writes and restores a history, with links as fast as those measured, and caches of the
paper's ratio. Nodes share nothing but, if they are coupled, a barrier in each step. Computation
varies from step to step and from node to node. Versions have one size, and what is consumed is
discarded. A prefetch from storage takes free room alone. The simulation says how much waiting for
the slowest node costs; it has no network, and no parallel file system.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.base import Record
from benchmarks.checkpoints.shots import Links, order_of
from flashwarp.errors import ArgumentError

__all__ = ["Node", "add_checks", "add_nodes", "links_of", "simulate"]

_SPREAD = 0.05
_MEASURED = re.compile(r"shots, uniform (?P<order>\w+), (?P<ms>[0-9.]+) ms, at once, hints: all")


@dataclass(eq=False)
class Signal:
    """What processes wait for; all of them go on when it is given."""

    waiting: list[Process] = field(default_factory=list)


Process = Generator["float | Signal", None, None]


class Clock:
    """Runs processes in the order of simulated time; they yield seconds, or a signal."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Process]] = []
        self._numbers = count()

    def start(self, process: Process, delay: float = 0.0) -> None:
        """Let a process go on after a delay."""
        heapq.heappush(self._queue, (self.now + delay, next(self._numbers), process))

    def give(self, signal: Signal) -> None:
        """Let all processes go on that wait for a signal."""
        waiting, signal.waiting = signal.waiting, []
        for process in waiting:
            self.start(process)

    def run(self) -> None:
        """Run until nothing is left to happen."""
        while self._queue:
            self.now, _, process = heapq.heappop(self._queue)
            wanted = next(process, None)
            if isinstance(wanted, Signal):
                wanted.waiting.append(process)
            elif wanted is not None:
                self.start(process, wanted)


@dataclass
class Barrier:
    """Lets nodes go on when all have come."""

    clock: Clock
    nodes: int
    come: int = 0
    signal: Signal = field(default_factory=Signal)

    def arrive(self) -> Signal | float:
        """Come, and return what to wait for."""
        self.come += 1
        if self.come < self.nodes:
            return self.signal
        self.come = 0
        opened, self.signal = self.signal, Signal()
        self.clock.give(opened)
        return 0.0


class Link:
    """Moves bytes of one transfer after the other."""

    def __init__(self, clock: Clock, rate: float) -> None:
        self._clock = clock
        self._rate = rate
        self._free = 0.0

    def seconds(self, nbytes: int) -> float:
        """Return how long a transfer takes that begins now, with its wait."""
        self._free = max(self._clock.now, self._free) + nbytes / self._rate
        return self._free - self._clock.now


@dataclass(frozen=True)
class Node:
    """What is the same on all nodes, and for each of their GPUs."""

    links: Links
    nbytes: int
    """Of a version."""
    steps: int
    slots: tuple[int, int]
    """Versions that the GPU cache and the host cache hold."""
    interval_s: float
    call_s: float = 0.0
    """What a call costs beside its copy."""


class _Shot:
    """One GPU's shot: the program, two flushes and two prefetches."""

    def __init__(
        self,
        clock: Clock,
        node: Node,
        order: list[int],
        intervals_s: list[float],
        barrier: Barrier | None,
        disk: dict[str, Link],
        *,
        hints: bool,
    ) -> None:
        self.clock = clock
        self.node = node
        self.order = order
        # Without hints, the oldest version goes first.
        needed = order if hints else reversed(range(node.steps))
        self.turns = {version: turn for turn, version in enumerate(needed)}
        self.intervals = iter(intervals_s)
        self.barrier = barrier
        self.write_s = self.read_s = self.end_s = 0.0
        self.changed = Signal()
        self.gpu: set[int] = set()
        self.host: set[int] = set()
        self.disk: set[int] = set()
        self.moving: dict[str, set[int]] = {"gpu": set(), "host": set()}
        self.pinned: dict[str, set[int]] = {"gpu": set(), "host": set()}
        self.consumed: set[int] = set()
        self.started = False
        self.links = {
            name: Link(clock, getattr(node.links, name)) for name in ("down", "up")
        } | disk
        clock.start(self._program())
        clock.start(self._flush_gpu())
        clock.start(self._flush_host())
        if hints:
            clock.start(self._prefetch("gpu"))
            clock.start(self._prefetch("host"))

    def _notify(self) -> None:
        self.clock.give(self.changed)

    def _room(self, tier: str, *, evict: bool) -> bool:
        """Make room in a cache for a version, if there is some."""
        held = self.gpu if tier == "gpu" else self.host
        slots = self.node.slots[0 if tier == "gpu" else 1]
        if len(held) + len(self.moving[tier]) < slots:
            return True
        safe = self.disk | self.host if tier == "gpu" else self.disk
        free = (held & safe) - self.pinned[tier]
        if not evict or not free:
            return False
        held.discard(max(free, key=self.turns.__getitem__))
        return True

    def _step(self) -> Process:
        yield next(self.intervals)
        if self.barrier is not None:
            yield self.barrier.arrive()

    def _program(self) -> Process:
        node, clock = self.node, self.clock
        copy_s = node.nbytes / node.links.within + node.call_s
        for version in range(node.steps):
            yield from self._step()
            began = clock.now
            while not self._room("gpu", evict=True):
                yield self.changed
            self.moving["gpu"].add(version)
            yield copy_s
            self.moving["gpu"].discard(version)
            self.gpu.add(version)
            self.write_s += clock.now - began
            self._notify()
        self.started = True
        self._notify()
        for version in self.order:
            yield from self._step()
            began = clock.now
            while version not in self.gpu:
                if version in self.moving["gpu"] or version in self.moving["host"]:
                    yield self.changed
                    continue
                link = "up" if version in self.host else "reads"
                yield self.links[link].seconds(node.nbytes)
                break
            yield copy_s
            self.read_s += clock.now - began
            self.consumed.add(version)
            for held in (self.gpu, self.host):
                held.discard(version)
            self._notify()
        self.end_s = clock.now

    def _flush_gpu(self) -> Process:
        for version in range(self.node.steps):
            while version not in self.gpu | self.consumed:
                yield self.changed
            while version not in self.consumed and not self._room("host", evict=True):
                yield self.changed
            if version in self.consumed:
                continue
            self.moving["host"].add(version)
            yield self.links["down"].seconds(self.node.nbytes)
            self._arrived("host", version)

    def _flush_host(self) -> Process:
        for version in range(self.node.steps):
            while version not in self.host | self.consumed:
                yield self.changed
            if version in self.consumed:
                continue
            yield self.links["writes"].seconds(self.node.nbytes)
            self.disk.add(version)
            self._notify()

    def _arrived(self, tier: str, version: int) -> None:
        self.moving[tier].discard(version)
        if version not in self.consumed:
            (self.gpu if tier == "gpu" else self.host).add(version)
        self._notify()

    def _prefetch(self, tier: str) -> Process:
        """Fetch in the order of the restores, each version when a slower place has it."""
        held = self.gpu if tier == "gpu" else self.host
        while not self.started:
            yield self.changed
        for version in self.order:
            while True:
                above = self.gpu | self.moving["gpu"] if tier == "host" else set()
                if version in self.consumed | self.moving[tier] | above:
                    break
                if version in held:
                    self.pinned[tier].add(version)
                    break
                source = self.host if tier == "gpu" else self.disk
                if version in source and self._room(tier, evict=tier == "gpu"):
                    self.moving[tier].add(version)
                    link = self.links["up" if tier == "gpu" else "reads"]
                    yield link.seconds(self.node.nbytes)
                    self._arrived(tier, version)
                    self.pinned[tier].add(version)
                    self.pinned["host"] &= self.host - self.gpu
                    break
                yield self.changed


@dataclass(frozen=True)
class Outcome:
    """Of all shots: seconds that their calls blocked in the mean, and until the last had ended."""

    write_s: float
    read_s: float
    end_s: float


def simulate(
    node: Node,
    nodes: int,
    order: str,
    *,
    coupled: bool,
    hints: bool,
    gpus: int = 1,
    seed: int = 3,
) -> Outcome:
    """Run a shot on each GPU of each node. GPUs of a node share its storage alone."""
    clock = Clock()
    barrier = Barrier(clock, nodes * gpus) if coupled else None
    rng = np.random.default_rng(seed)
    numbers = order_of(order, node.steps)
    shots = []
    for _ in range(nodes):
        disk = {name: Link(clock, getattr(node.links, name)) for name in ("writes", "reads")}
        for _ in range(gpus):
            spread = rng.lognormal(-(_SPREAD**2) / 2, _SPREAD, 2 * node.steps)
            intervals = [float(each) for each in node.interval_s * spread]
            shots.append(_Shot(clock, node, numbers, intervals, barrier, disk, hints=hints))
    clock.run()
    stuck = sum(not shot.end_s for shot in shots)
    if stuck:
        raise AssertionError(f"{stuck} of {len(shots)} simulated shots wait for ever")
    return Outcome(
        float(np.mean([shot.write_s for shot in shots])),
        float(np.mean([shot.read_s for shot in shots])),
        max(shot.end_s for shot in shots),
    )


def count_of(nodes: int) -> str:
    """Return a number of nodes in words."""
    return f"{nodes} node" + "s" * (nodes > 1)


def links_of(path: str) -> Links:
    """Return the links that a record of this benchmark has measured."""
    try:
        return Links(**json.loads(Path(path).read_text())["settings"]["measured_bytes_per_s"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"figures={path!r} is no record of benchmarks checkpoints: {error}"
        ) from error


def add_nodes(report: Record, node: Node, counts: list[int]) -> None:
    """Add what shots on many nodes would reach."""
    alone: dict[tuple[bool, bool], Outcome] = {}
    total = node.nbytes * node.steps
    show: Callable[[float], str] = "{:.3g}".format
    for nodes in counts:
        for coupled in (False, True):
            for hints in (False, True):
                found = simulate(node, nodes, "irregular", coupled=coupled, hints=hints)
                one = alone.setdefault((coupled, hints), found)
                coupling = "a barrier in each step" if coupled else "no barrier"
                hinted = "all" if hints else "none"
                report.row(
                    f"simulated: {count_of(nodes)}, {coupling}, irregular, hints: {hinted}",
                    nodes / found.end_s,
                    "shots/s",
                    f"as many nodes as fast as {counts[0]}",
                    nodes / one.end_s,
                    note=f"a simulation; each node writes {show(total / found.write_s / 1e9)} "
                    f"and restores {show(total / found.read_s / 1e9)} GB/s; the last ends "
                    f"after {found.end_s:.2f} s",
                )


def add_checks(report: Record, path: str) -> None:
    """Add what the simulation says of shots that a record has measured on one node."""
    record = json.loads(Path(path).read_text())
    settings = record["settings"]
    steps, nbytes = settings["steps"], settings["shot_bytes"] // settings["steps"]
    slots = max(1, steps // 12), max(1, steps * 8 // 12)
    for row in record["rows"]:
        found = _MEASURED.fullmatch(row["name"])
        if found is None:
            continue
        node = Node(links_of(path), nbytes, steps, slots, float(found["ms"]) / 1e3)
        shot = simulate(node, 1, found["order"], coupled=False, hints=True)
        report.row(
            f"simulated: the measured node, {found['order']}, {found['ms']} ms, hints: all",
            1 / shot.end_s,
            "shots/s",
            "measured",
            row["value"],
            note="a simulation with the best rates that the disk gave in that run",
        )
