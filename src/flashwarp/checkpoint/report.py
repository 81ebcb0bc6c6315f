"""What a checkpointer did and does: counters for programs, and a text for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flashwarp.checkpoint.core import Core
from flashwarp.checkpoint.hints import ScoreCard
from flashwarp.explanation import Explanation
from flashwarp.observing.counting import Key
from flashwarp.transfer import pool_of


@dataclass(frozen=True)
class CheckpointStats:
    """A snapshot of a checkpointer's counters, which start at 0 when it is opened.

    Attributes
    ----------
    checkpoints, restarts : int
        Calls that succeeded, and restores that began.
    checkpoint_bytes, restart_bytes, stored_bytes : int
        Bytes of their regions; bytes that were committed to storage.
    checkpoint_ns, restart_ns : int
        Time that these calls blocked their callers.
    room_wait_ns : int
        Time that checkpoints and flushes waited for room in a cache.
    restarts_from : dict
        Restores by the place that served them: "gpu", "host", "ssd".
    flushes, prefetches, evictions : dict
        Counts by tier.
    bypassed : dict
        Versions that went to a slower tier at once, by reason: "full", "oversized", "host".
    flush_failures, prefetch_failures, uploads : int
        Flushes and prefetches that failed, some of which were repeated; versions sent to the
        remote.
    prefetch_distance : float
        Mean number of next versions in the fastest cache when a restore began, each up to 64.
    restore_interval_ns : int or None
        Estimated time between two restores.
    bandwidth : dict
        Bytes a second of each link; None if it was not used.
    hints : ScoreCard
        What the hints were worth so far.
    staging_bytes : int
        Staging memory allocated now.
    memory_only : int
        Versions that only the caches have.
    cache_bytes : dict
        Bytes of each cache that can be used now; that of the host grows while it is pinned.
    """

    checkpoints: int = 0
    restarts: int = 0
    checkpoint_bytes: int = 0
    restart_bytes: int = 0
    stored_bytes: int = 0
    checkpoint_ns: int = 0
    restart_ns: int = 0
    room_wait_ns: int = 0
    restarts_from: dict[str, int] = field(default_factory=dict)
    flushes: dict[str, int] = field(default_factory=dict)
    prefetches: dict[str, int] = field(default_factory=dict)
    evictions: dict[str, int] = field(default_factory=dict)
    bypassed: dict[str, int] = field(default_factory=dict)
    flush_failures: int = 0
    prefetch_failures: int = 0
    uploads: int = 0
    prefetch_distance: float = 0.0
    restore_interval_ns: int | None = None
    bandwidth: dict[str, int | None] = field(default_factory=dict)
    hints: ScoreCard = field(default_factory=ScoreCard)
    staging_bytes: int = 0
    memory_only: int = 0
    cache_bytes: dict[str, int] = field(default_factory=dict)


_COUNTED = (
    *("checkpoints", "restarts", "checkpoint_bytes", "restart_bytes", "stored_bytes"),
    *("checkpoint_ns", "restart_ns", "room_wait_ns"),
    *("flush_failures", "prefetch_failures", "uploads"),
)


def stats_of(core: Core) -> CheckpointStats:
    """Return the counters; called under the lock."""
    counts = core.counts
    names = [tier.name for tier in core.tiers]
    restarts = counts["restarts"]
    return CheckpointStats(
        **{name: counts[name] for name in _COUNTED},
        restarts_from={name: counts[f"restarts_{name}"] for name in [*names, "ssd"]},
        flushes={name: counts[f"flushes_{name}"] for name in names},
        prefetches={name: counts[f"prefetches_{name}"] for name in names},
        evictions={tier.name: tier.evictions for tier in core.tiers},
        bypassed={
            "full": counts["full_bypassed"],
            "oversized": counts["oversized"],
            "host": counts["host_bypassed"],
        },
        prefetch_distance=counts["prefetch_distance"] / restarts if restarts else 0.0,
        restore_interval_ns=core.interval.estimate_ns,
        bandwidth={name: link.bytes_per_second for name, link in core.mover.links.items()},
        hints=core.hints.card(),
        staging_bytes=core.mover.staging_bytes,
        memory_only=len(core.lost()),
        cache_bytes={tier.name: tier.table.nbytes for tier in core.tiers},
    )


def counts_of(core: Core) -> dict[str, tuple[Key, dict[str, int]]]:
    """Return what `flashwarp top` shows of a checkpointer: bytes that its regions gave and got."""
    with core.locked():
        counts = core.counts
        failed = counts["flush_failures"] + counts["prefetch_failures"]
        moved = {"bytes_read": counts["restart_bytes"], "bytes_written": counts["checkpoint_bytes"]}
    route = " > ".join([*(tier.name for tier in core.tiers), "ssd"])
    return {"": (Key("checkpointer", route), {**moved, "errors": failed})}


def explain(core: Core, where: str, waiting: Sequence[str] = ()) -> Explanation:
    """Describe the present state; called under the lock."""
    facts: dict[str, Any] = {}
    for tier in core.tiers:
        grown = "" if tier.grown else f" of {tier.nbytes}, still being pinned"
        facts[f"{tier.name} cache"] = (
            f"{tier.table.nbytes} bytes{grown}, evicted {tier.evictions}; "
            f"{core.describe_tier(tier)}"
        )
        if tier.backlog.nbytes:
            ends_ns = tier.backlog.ends_ns(core.now_ns())
            when = "" if ends_ns is None else f", about {(ends_ns - core.now_ns()) / 1e9:.2f} s"
            facts[f"{tier.name} to flush"] = (
                f"{len(tier.backlog)} versions, {tier.backlog.nbytes} bytes{when}"
            )
    for name, link in core.mover.links.items():
        if link.bytes_per_second is not None:
            facts[f"link {name}"] = f"{link.bytes_per_second / 1e9:.2f} GB/s"
    if core.interval.estimate_ns is not None:
        facts["restores"] = f"one every {core.interval.estimate_ns / 1e6:.1f} ms"
    facts["hints"] = str(core.hints.card())
    lost = core.lost()
    if lost:
        failed = [entry for entry in lost if entry.failure is not None]
        facts["memory only"] = (
            f"{len(lost)} versions are in memory only: {_some(lost)}",
            *(f"{entry} cannot be written: {entry.failure}" for entry in failed),
        )
    facts["waiting"] = tuple(waiting)
    facts["pinned"] = pool_of(core.mover.device).note()
    route = " > ".join([*(tier.name for tier in core.tiers), "ssd"])
    return Explanation(route, where, facts)


def _some(things: Sequence[object], most: int = 8) -> str:
    shown = ", ".join(str(each) for each in things[:most])
    return shown if len(things) <= most else f"{shown}, ..."
