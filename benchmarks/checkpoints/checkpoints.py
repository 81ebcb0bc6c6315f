"""A history of states written and read back, as reverse time migration does (Score, figures 4-9).

A shot is a forward pass that writes a checkpoint in each step, and a backward pass that restores
one in each step. Sizes are those of the paper's uniform case, or drawn: its traces are not public.
The other parts save one large state, and measure what a checkpoint is made of.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from benchmarks.base import Record, listed
from benchmarks.checkpoints import gpus as several
from benchmarks.checkpoints import nodes as many
from benchmarks.checkpoints import others, shots
from benchmarks.checkpoints import state as one
from benchmarks.checkpoints.disk import Disk
from benchmarks.checkpoints.shots import PAPER_LINKS, Links
from flashwarp.config import integer, parse_bytes
from flashwarp.device import Device, resolve
from flashwarp.probe.timing import median_of

__all__ = ["run"]

_PARTS = (
    "decision",
    "saved",
    "training",
    "durable",
    "checksums",
    "shots",
    "gpus",
    "others",
    "nodes",
)
_WAITS = ("no", "yes")
_WAYS = others.STATES + others.SHOTS
_DISK_BYTES_MAX = 2 << 30
_DISK_BYTES_UNUSED = 64 << 20


def run(
    device: str | None,
    folder: Path,
    parts: Annotated[str, f"Of {', '.join(_PARTS)}."] = ",".join(_PARTS),
    mib: Annotated[int, "Data of a shot in MiB; 49152 in the paper."] = 48,
    steps: Annotated[int, "Snapshots of a shot; 384 in the paper."] = 96,
    intervals_ms: Annotated[str, "Computation between two calls, slept; 10 in the paper."] = "10",
    caches: Annotated[str, "Caches over the paper's 4 and 32 of 48 GB."] = "1",
    sigmas: Annotated[str, "Spreads of variable sizes."] = "0.3",
    sizes: Annotated[str, "Of uniform, variable."] = "uniform,variable",
    orders: Annotated[str, "Of sequential, reverse, irregular."] = "sequential,reverse,irregular",
    hints: Annotated[str, "Of none, single, all."] = "none,single,all",
    waits: Annotated[str, "Whether all is durable before the backward pass: no, yes."] = "no",
    eviction: Annotated[str, "Of score, lru, fifo."] = "score",
    state: Annotated[str, "Bytes of the one large state."] = "64 MiB",
    ways: Annotated[str, f"What `others` runs, of {', '.join(_WAYS)}."] = ",".join(_WAYS),
    runs: Annotated[int, "Runs of each short measurement; the median counts."] = 5,
    limit: Annotated[bool, "Limit the links on the CPU device, to the paper's times."] = True,
    seconds: Annotated[float, "Leave out what would begin later."] = 3600,
    gpus: Annotated[str, "Processes at a time, each on its GPU."] = "1,2",
    nodes: Annotated[str, "Nodes to simulate."] = "1,10,100,1000",
    figures: Annotated[str, "Record of this benchmark whose links nodes have; this run's."] = "",
) -> Record:
    """Write and restore histories and one large state, beside plain copies and other libraries."""
    where = resolve(device)
    integer("steps", steps, 2, 1 << 20)
    wanted = listed("parts", parts, _PARTS)
    theirs = listed("ways", ways, _WAYS) if "others" in wanted else []
    plans = shots.plans(
        listed("sizes", sizes, shots.SIZES),
        listed("orders", orders, shots.ORDERS),
        [each == "yes" for each in listed("waits", waits, _WAITS)],
        [float(each) / 1e3 for each in listed("intervals_ms", intervals_ms)],
        [float(each) for each in listed("sigmas", sigmas)],
        [float(each) for each in listed("caches", caches)],
        listed("hints", hints, shots.HINTS),
    )
    total, state_bytes = mib << 20, parse_bytes(state, "state")
    limited = limit and where.kind == "cpu"
    report = Record(
        title="Checkpoints",
        device=where.describe(),
        settings={
            "shot_bytes": total,
            "steps": steps,
            "state_bytes": state_bytes,
            "eviction": eviction,
        },
        seeds={"sizes": 1, "irregular order": 2, "contents of files": 1, "nodes": 3},
    )
    uses_disk = not {"durable", "shots", "gpus", "nodes"}.isdisjoint(wanted)
    most = _DISK_BYTES_MAX if uses_disk else _DISK_BYTES_UNUSED
    disk = Disk.measure(folder, min(max(state_bytes, total), most))
    links = _links(where, disk, total // steps)
    report.settings["measured_bytes_per_s"] = vars(links)
    report.end_in(seconds)
    saved_s, links = _one_state(
        report, where, folder, state_bytes, wanted, theirs, runs, disk, links
    )
    if "gpus" in wanted:
        processes = [integer("gpus", int(each), 1, 64) for each in listed("gpus", gpus)]
        several.add_gpus(report, where, folder, total, steps, processes, plans, links)
    if "shots" in wanted:
        if limited:
            links = _of_paper(links, total // steps)
            report.settings["limits_bytes_per_s"] = vars(links)
        shots.add_shots(
            report, where, folder, total, steps, plans, eviction, links, limited=limited
        )
    if theirs:
        lengths = shots.sizes_of("uniform", steps, total, 0)
        others.add_shot(report, where, folder, lengths, links, theirs)
        later = _among(theirs, others.STATES[1:])
        others.add_state(report, where, folder, state_bytes, saved_s, later)
    if "nodes" in wanted:
        interval_s = float(intervals_ms.split(",")[0]) / 1e3
        counts = [integer("nodes", int(each), 1) for each in listed("nodes", nodes)]
        _nodes(report, links, figures, steps, total // steps, interval_s, counts)
    return report


def _one_state(
    report: Record, where: Device, folder: Path, nbytes: int, wanted: list[str],
    theirs: list[str], runs: int, disk: Disk, links: Links,
) -> tuple[float, Links]:  # fmt: skip
    """Save one large state; return what saving takes, and the links with the disk's new rates."""
    first, saved_s = _among(theirs, others.STATES[:1]), 0.0
    if "decision" in wanted:
        one.add_decision(report, runs)
    # Other ways to save a state stand beside it.
    if "saved" in wanted or _among(theirs, others.STATES):
        saved_s = one.add_saved(report, where, folder, nbytes, runs)
    if first:
        others.add_state(report, where, folder, nbytes, saved_s, first)
    if "saved" in wanted and where.kind == "cuda":
        one.add_overlapped(report, where, folder, nbytes)
    if "durable" in wanted:
        disk = one.add_durable(report, where, folder, nbytes, (1, 16), disk, min(runs, 3))
        links = replace(links, writes=disk.writes, reads=disk.reads)
        report.settings["measured_bytes_per_s"] = vars(links)
    if "checksums" in wanted:
        one.add_checksums(report, folder, min(nbytes, 512 << 20), 3)
    if "training" in wanted and where.kind == "cuda":
        one.add_training(report, where, folder, nbytes)
    return saved_s, links


def _among(names: list[str], group: tuple[str, ...]) -> list[str]:
    return [each for each in names if each in group]


def _nodes(
    report: Record, links: Links, figures: str, steps: int, snapshot: int, interval_s: float,
    counts: list[int],
) -> None:  # fmt: skip
    """Simulate nodes that have these links, or those of a record."""
    if figures:
        links = many.links_of(figures)
        many.add_checks(report, figures)
    report.settings["node_bytes_per_s"] = vars(links)
    slots = max(1, steps // 12), max(1, steps * 8 // 12)
    many.add_nodes(report, many.Node(links, snapshot, steps, slots, interval_s), counts)


def _links(device: Device, disk: Disk, nbytes: int) -> Links:
    """Measure plain copies of a snapshot, in bytes a second."""
    source, target = one.new_array(device, nbytes), one.new_array(device, nbytes)
    host: Any = one.pinned_array(device, nbytes)

    def rate(to: Any, from_: Any) -> float:
        return nbytes / median_of(lambda: one.blocked(device, lambda: one.copy(to, from_)), 10)

    within = rate(target, source)
    return Links(within, rate(host, source), rate(target, host), disk.writes, disk.reads)


def _of_paper(links: Links, nbytes: int) -> Links:
    """Return links that move a snapshot in the time in which the paper's move one of 128 MiB."""
    paper = PAPER_LINKS.times(nbytes / shots.PAPER_SNAPSHOT_BYTES)
    return Links(links.within, paper.down, paper.up, paper.writes, paper.reads)
