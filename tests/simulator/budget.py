"""How much the simulator's tests explore, and from which seed on."""

from __future__ import annotations

import os

FIRST_SEED = int(os.environ.get("FLASHWARP_SIMULATE_SEED") or "1")
"""Of each exploring test: another one explores other schedules."""

SEEDS = int(os.environ.get("FLASHWARP_SIMULATE_SEEDS", "64"))
"""Of each exploring test at one lane. Each seed is one schedule of each scenario."""


def new_seeds(width: int, times: int = 1) -> tuple[int, int]:
    """The seeds of a test, `times` as many as usual: wider warps take that much longer for one."""
    share = {1: 1, 4: 4, 32: 16}[width]
    return FIRST_SEED, FIRST_SEED + max(1, times * SEEDS // share)
