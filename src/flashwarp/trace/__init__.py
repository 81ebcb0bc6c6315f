"""Traces of line accesses: recorded from arrays or made, replayed under any policy, compared.

A replay runs through the device code of the cache itself, on the CPU device, so each policy exists
once, in `cache/policy.cuh`. Only Belady's optimum is computed here.
"""

from __future__ import annotations

from flashwarp.trace.belady import min_misses, min_misses_in_sets
from flashwarp.trace.compare import Comparison, compare
from flashwarp.trace.format import Trace
from flashwarp.trace.record import record, trace_of_indices
from flashwarp.trace.replay import Replay, replay
from flashwarp.trace.synthetic import SYNTHETIC, make

__all__ = [
    "SYNTHETIC",
    "Comparison",
    "Replay",
    "Trace",
    "compare",
    "make",
    "min_misses",
    "min_misses_in_sets",
    "record",
    "replay",
    "trace_of_indices",
]
