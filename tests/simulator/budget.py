"""How long the simulator's tests explore, and from which seed on."""

from __future__ import annotations

import os

from simulator.exploration import seed_of_today

SECONDS = float(os.environ.get("FLASHWARP_SIMULATE_SECONDS", "3"))
"""Of each exploring test."""

FIRST_SEED = int(os.environ.get("FLASHWARP_SIMULATE_SEED") or seed_of_today())
"""Another one each day, so that runs add up; given, it replays a run."""
