"""How long the simulator's tests explore, and from which seed on."""

from __future__ import annotations

import os

SECONDS = float(os.environ.get("FLASHWARP_SIMULATE_SECONDS", "2"))
"""Of each exploring test."""

FIRST_SEED = int(os.environ.get("FLASHWARP_SIMULATE_SEED") or "1")
"""Of each exploring test: another one explores other schedules."""
