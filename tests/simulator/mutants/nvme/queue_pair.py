"""Mistakes in `flashwarp/nvme/queue_pair.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/nvme/queue_pair.cuh"

MUTANTS = (
    Mutant(
        "deadline-ignores-heartbeat",
        "  if (beats >= kBeatsMin && beats * kBeatNs >= t.timeout_ns) return true;\n",
        "  return true;\n",
        "waits run out of time while the host's process is stopped",
        "suspended",
    ),
    Mutant(
        "deadline-believes-in-host",
        "  return waited > kLimitsUntilDead * t.timeout_ns;\n",
        "  return false;\n",
        "waits for a host that does not come back have no end",
        "host_lost",
    ),
)
