"""Mistakes in `flashwarp/kernels/stream.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/kernels/stream.cuh"

MUTANTS = (
    Mutant(
        "stream-of-resident-lines",
        "piece.bytes != 0 && cache::look_for_absent(g, piece.line, look, at);",
        "piece.bytes != 0;",
        "a gather around the cache misses what was stored to a frame and not written back",
        "rows_streamed",
        "sc",
        4,
    ),
    Mutant(
        "stream-unfenced",
        "  cache::finish_loads(here);\n  const bool current =",
        "  here.sync();\n  const bool current =",
        "its second look at the path may come before its loads",
        "leases_streamed",
        "weak",
        4,
    ),
    Mutant(
        "stream-behind-the-lease",
        "const bool current = absent && nvme::is_current(*cut.queue, inside);",
        "const bool current = absent;",
        "it takes pages that another program has got meanwhile",
        "leases_streamed",
        "sc",
        4,
    ),
    Mutant(
        "epoch-unlooked-by-streams",
        "  cache::refresh(c, v, here);\n  const cache::shortcut cut",
        "  const cache::shortcut cut",
        "it takes lines from frames that were filled before a writer came",
        "leases_replayed",
        width=4,
    ),
)
