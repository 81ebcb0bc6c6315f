"""How long the suite may take, and which of its cases a run draws."""

from __future__ import annotations

import os
from datetime import UTC, datetime

SECONDS = float(os.environ.get("FLASHWARP_EDGES_SECONDS", "8"))
"""For each test that draws its cases: a budget, not a limit."""

MISUSE_SEQUENCES = int(os.environ.get("FLASHWARP_MISUSE_SEQUENCES", "300"))

INTERRUPTED_PROGRAMS = int(os.environ.get("FLASHWARP_INTERRUPTED_PROGRAMS", "12"))
"""Of each kind."""

SEED = int(os.environ.get("FLASHWARP_EDGES_SEED") or datetime.now(UTC).strftime("%Y%m%d"))
"""Another one each day, so that runs add up; given, it replays a run."""
