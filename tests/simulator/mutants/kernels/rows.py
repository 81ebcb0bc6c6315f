"""Mistakes in `flashwarp/kernels/rows.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/kernels/rows.cuh"

MUTANTS = (
    Mutant(
        "epoch-unlooked",
        "  cache::refresh(c, v, mask);\n  for (uint64_t first = mine.begin;",
        "  for (uint64_t first = mine.begin;",
        "a replay serves lines of the file from before a writer came",
        "leases_replayed",
        width=4,
    ),
    Mutant(
        "epoch-unlooked-by-threads",
        "  cache::refresh(c, v, mask);\n  // Segments in a row",
        "  // Segments in a row",
        "so does one of the CPU device, whose threads take segments by themselves",
        "leases_replayed",
    ),
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
        "  cache::finish_loads(mask);\n  const bool current =",
        "  warp::sync(mask);\n  const bool current =",
        "its second look at the path may come before its loads",
        "leases_streamed",
        "weak",
        4,
    ),
    Mutant(
        "stream-behind-the-lease",
        "const bool current = absent && nvme::is_current(*way.queue, inside);",
        "const bool current = absent;",
        "it takes pages that another program has got meanwhile",
        "leases_streamed",
        "sc",
        4,
    ),
    Mutant(
        "epoch-unlooked-by-streams",
        "  cache::refresh(c, v, mask);\n  const cache::short_way way",
        "  const cache::short_way way",
        "it takes lines from frames that were filled before a writer came",
        "leases_replayed",
        width=4,
    ),
    Mutant(
        "epoch-unlooked-by-elements",
        "  cache::refresh(c, v, mask);\n  for (uint64_t first = share.begin;",
        "  for (uint64_t first = share.begin;",
        "so does one of rows of a few elements",
        "leases_replayed",
        width=4,
    ),
    Mutant(
        "prefetch-index-unchecked",
        "  if (row >= p.row_count) return {kNoRow, 0, 0, 0};\n",
        "",
        "an index out of bounds, or one that changes while a launch runs, is taken for a row",
        "deferral_prefetch",
    ),
)
