"""What links allow in a shot, against what can be computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.checkpoints.shots import (
    PAPER_LINKS,
    PAPER_SNAPSHOT_BYTES,
    Plan,
    least_seconds,
    wanted_from_s,
)

STEPS = 384
LENGTHS = np.full(STEPS, PAPER_SNAPSHOT_BYTES, np.int64)
CACHES = int(LENGTHS.sum()) // 12, int(LENGTHS.sum()) * 8 // 12


def left_s(interval_s: float) -> float:
    """Return what the links leave of all restores."""
    plan = Plan("uniform", "reverse", "all", False, interval_s, 0, 1)
    _, backward_s = least_seconds(plan, LENGTHS, CACHES, PAPER_LINKS)
    return backward_s - STEPS * interval_s


def test_ten_times_the_rate_needs_more_than_the_papers_interval_on_its_links() -> None:
    spilled_s = 96 * PAPER_SNAPSHOT_BYTES / 2e9
    plain_s = spilled_s + 256 * PAPER_SNAPSHOT_BYTES / 25e9

    from_s = wanted_from_s(LENGTHS, CACHES, PAPER_LINKS, plain_s)

    assert left_s(0.01) == pytest.approx(spilled_s - STEPS * 0.01)
    assert plain_s / left_s(0.01) < 10
    assert 0.014 < from_s < 0.015
    assert plain_s / left_s(from_s) == pytest.approx(10)
    assert plain_s / left_s(from_s * 1.01) > 10


def test_caches_that_hold_all_allow_it_at_once() -> None:
    total = int(LENGTHS.sum())
    assert wanted_from_s(LENGTHS, (total, 0), PAPER_LINKS, 1.0) == 0
