"""How long the suite may take, and which of its cases a run draws."""

from __future__ import annotations

import os

SECONDS = float(os.environ.get("FLASHWARP_EDGES_SECONDS", "4"))
"""For each test that draws its cases: a budget, not a limit."""

EXITS = int(os.environ.get("FLASHWARP_EDGES_EXITS", "44"))
"""Of 1,980, of which the first 110 are each pair of a holder with a way of ending."""

INTERRUPTED_PROGRAMS = int(os.environ.get("FLASHWARP_INTERRUPTED_PROGRAMS", "12"))
"""Of each kind."""

SEED = int(os.environ.get("FLASHWARP_EDGES_SEED") or "1")
"""Draws the cases: another one draws others, the same one replays a run."""
