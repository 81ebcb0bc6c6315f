"""Shots of several processes of one node at a time, each on its GPU (Score, figure 9).

They share a folder, each with a rank and caches of its own. With a barrier in each step they are
coupled as those of one shot on several GPUs. Beside them stands the simulation of such a node.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashwarp as fw
from benchmarks.base import Record
from benchmarks.checkpoints.disk import Disk
from benchmarks.checkpoints.nodes import Node, simulate
from benchmarks.checkpoints.shots import Links, Plan, shoot, sizes_of
from benchmarks.checkpoints.state import finish, new_array, wait_until_pinned
from flashwarp._jit import driver
from flashwarp.device import Device, resolve
from flashwarp.errors import FlashwarpError, WaitTimeout

__all__ = ["add_gpus"]

_LIMIT_S = 120.0
_DISK_BYTES = 768 << 20


@dataclass(frozen=True)
class _Order:
    """What a process is to do; all arrive at the barrier before the shot, or in each step too."""

    folder: Path
    lengths: NDArray[np.int64]
    caches: tuple[int, int]
    plan: Plan
    coupled: bool


@dataclass(frozen=True)
class _Answer:
    """What a process saw: seconds that calls blocked, times of its clock, and whether all came."""

    write_s: float
    read_s: float
    began_s: float
    ended_s: float
    right: bool
    restarts_from: dict[str, int]


def add_gpus(
    report: Record,
    device: Device,
    folder: Path,
    total: int,
    steps: int,
    counts: list[int],
    plans: list[Plan],
    links: Links,
) -> None:
    """Add shots of so many processes at a time, each of so many bytes, without and with barriers.

    On the CPU device all processes use it, and no link is limited.
    """
    most = driver.device_count() if device.kind == "cuda" else max(counts)
    before = Disk(links.writes, links.reads)
    alone: dict[str, float] = {}
    for count in counts:
        if count > most:
            report.leave_out(f"{_count_of(count)} at a time", f"the driver sees {_count_of(most)}")
            continue
        devices = [f"cuda:{each}" if device.kind == "cuda" else "cpu" for each in range(count)]
        with _processes(devices) as processes:
            for plan in plans:
                for coupled in (False, True):
                    name = f"{'a barrier in each step' if coupled else 'no barrier'}, {plan}"
                    if report.is_late(f"{_count_of(count)}, {name}"):
                        continue
                    lengths = sizes_of(plan.sizes, steps, total, plan.sigma)
                    caches = int(total * plan.cache / 12), int(total * plan.cache * 8 / 12)
                    place = folder / "gpus"
                    try:
                        found = processes(_Order(place, lengths, caches, plan, coupled))
                    finally:
                        shutil.rmtree(place, ignore_errors=True)
                    # The disk is slower at one time than at another.
                    after = Disk.measure(folder, min(total, _DISK_BYTES))
                    given, before = before.best(after), after
                    beside = replace(links, writes=given.writes, reads=given.reads)
                    _add(report, count, name, plan, coupled, lengths, caches, found, beside, alone)


def _add(
    report: Record,
    count: int,
    name: str,
    plan: Plan,
    coupled: bool,
    lengths: NDArray[np.int64],
    caches: tuple[int, int],
    found: list[_Answer],
    links: Links,
    alone: dict[str, float],
) -> None:
    total, steps = int(lengths.sum()), len(lengths)
    rates = [total / each.read_s / 1e9 for each in found]
    written = [total / each.write_s / 1e9 for each in found]
    one = alone.setdefault(name, rates[0]) if count == 1 else alone.get(name, 0.0)
    tiers = [each.restarts_from for each in found]
    report.row(
        f"restore, {_count_of(count)}, {name}",
        sum(rates),
        "GB/s",
        f"{_count_of(count)} as fast as 1",
        count * one,
        checked=all(each.right for each in found),
        note=(
            f"each process: {', '.join(f'{rate:.3g}' for rate in rates)} GB/s restored and "
            f"{', '.join(f'{rate:.3g}' for rate in written)} GB/s written; from {tiers}"
        ),
        footprint=count * total,
    )
    slots = max(1, steps * caches[0] // total), max(1, steps * caches[1] // total)
    node = Node(links, total // steps, steps, slots, plan.interval_s)
    hinted = plan.hints != "none"
    predicted = simulate(node, 1, plan.order, coupled=coupled, hints=hinted, gpus=count)
    wall_s = max(each.ended_s for each in found) - min(each.began_s for each in found)
    report.row(
        f"shots, {_count_of(count)}, {name}",
        count / wall_s,
        "shots/s",
        "the simulation",
        count / predicted.end_s,
        note=(
            f"{wall_s:.2f} s, and {predicted.end_s:.2f} simulated, with the disk at "
            f"{links.writes / 1e9:.2f} GB/s of writes and {links.reads / 1e9:.2f} of reads, "
            "beside the shots, and all versions of one size"
        ),
    )


def _count_of(count: int) -> str:
    return f"{count} GPU" + "s" * (count != 1)


@contextmanager
def _processes(devices: list[str]) -> Iterator[Callable[[_Order], list[_Answer]]]:
    """Start a process for each device; yields a call that lets all of them do the same."""
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(len(devices))
    ends = [spawn.Pipe() for _ in devices]
    started = [
        spawn.Process(target=_serve, args=(rank, name, theirs, barrier), daemon=True)
        for rank, (name, (_, theirs)) in enumerate(zip(devices, ends, strict=True))
    ]

    def ask(order: _Order) -> list[_Answer]:
        for ours, _ in ends:
            ours.send(order)
        answers: list[_Answer] = []
        failures: list[FlashwarpError] = []
        for rank, (ours, _) in enumerate(ends):
            try:
                answers.append(_answer_of(rank, ours))
            except FlashwarpError as error:
                failures.append(error)
        if failures:
            # A broken barrier is what the others see of a failure.
            raise min(failures, key=lambda error: "BrokenBarrierError" in str(error))
        return answers

    for process in started:
        process.start()
    for _, theirs in ends:
        theirs.close()
    try:
        yield ask
    finally:
        for ours, _ in ends:
            ours.close()  # which ends the process
        for process in started:
            process.join(_LIMIT_S)
            process.kill()


def _answer_of(rank: int, connection: Any) -> _Answer:
    if not connection.poll(_LIMIT_S):
        raise WaitTimeout(f"the process of rank {rank} has not answered (limit {_LIMIT_S:g} s)")
    try:
        answer = connection.recv()
    except EOFError:
        raise FlashwarpError(f"the process of rank {rank} has died") from None
    if isinstance(answer, str):
        raise FlashwarpError(f"the process of rank {rank} has failed:\n{answer}")
    found: _Answer = answer
    return found


def _serve(rank: int, name: str, connection: Any, barrier: Any) -> None:
    """Do what is asked until nobody asks any more."""
    os.environ["OMP_NUM_THREADS"] = "1"
    device = resolve(name)
    new_array(device, 1 << 20)
    finish(device)
    while True:
        try:
            order = connection.recv()
        except EOFError:
            return
        try:
            answer: _Answer | str = _shoot(rank, device, order, barrier)
        except BaseException:
            barrier.abort()  # the others do not wait
            answer = traceback.format_exc()
        connection.send(answer)


def _shoot(rank: int, device: Device, order: _Order, barrier: Any) -> _Answer:
    def arrive() -> None:
        barrier.wait(_LIMIT_S)

    config = {"discard_consumed": not order.plan.wait}
    made = fw.Checkpointer(order.folder, device, *order.caches, rank=rank, config=config)
    try:
        wait_until_pinned(made, sum(order.caches))
        arrive()
        began_s = time.monotonic()
        if order.coupled:
            shot = shoot(made, device, order.lengths, order.plan, arrive)
        else:
            shot = shoot(made, device, order.lengths, order.plan)
        ended_s = time.monotonic()
        arrive()  # nobody closes, and frees pinned memory, beside a shot
    finally:
        made.close(drain=False)
    taken = shot.stats.restarts_from
    return _Answer(shot.write_s, shot.read_s, began_s, ended_s, shot.right, dict(taken))
