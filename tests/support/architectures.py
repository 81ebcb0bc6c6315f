"""The GPU architectures that tests compile for: each day one of them as users do.

For the others most of the optimizer is left out, which takes nine tenths of the time: ten seconds
of twelve for the kernels of graphs. Whether a text compiles depends on it least.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")

_OF_TODAY = ARCHITECTURES[datetime.now(UTC).toordinal() % len(ARCHITECTURES)]


def compiler_options(arch: str) -> tuple[str, ...]:
    """What to tell NVRTC besides the architecture."""
    optimized = arch == _OF_TODAY or os.environ.get("FLASHWARP_ALL_ARCHITECTURES")
    return () if optimized else ("--Ofast-compile=min",)
