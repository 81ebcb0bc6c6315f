"""Mistakes in `flashwarp/cache/spread.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/spread.cuh"

MUTANTS = (
    Mutant(
        "rings-freed-together",
        "if (here.any(mine && ((done >> n) & 1) == 0)) {",
        "if (here.any(f.on != done)) {",
        "warps hold slots of one ring while they wait for another, and these for the first",
        "two_rings",
        strategy="random",
    ),
    Mutant(
        "rings-in-any-order",
        "  for (uint32_t n = 0; n < v.namespace_count; n++) {\n    const lanes members =",
        "  for (uint32_t k = 0; k < v.namespace_count; k++) {\n"
        "    const uint32_t n = (k + warp::index()) % v.namespace_count;\n"
        "    const lanes members =",
        "two warps wait for slots of each other's rings for ever",
        "two_rings",
    ),
    Mutant(
        "one-replica-asked",
        "  const uint32_t n = choose_replica(v, seat, line, tried);\n",
        "  const uint32_t n =\n"
        "      tried != 0 ? kNamespacesMax : choose_replica(v, seat, line, 0);\n",
        "a read that failed on one replica fails",
        "replica_lost",
    ),
    Mutant(
        "queue-asked-again",
        "    const nvme::queue_pair& q = queue_on(v, f.seat, n);\n",
        "    const nvme::queue_pair& q =\n"
        "        queue_on(v, warp::index() + base::spread_index(), n);\n",
        "a warp that has gone on elsewhere looks its ticket up in another ring",
        "stripe",
    ),
    Mutant(
        "pages-left-unseen-spread",
        "  again = end_lines(r, status).mine();\n",
        "  end_lines(r, status);\n  again = false;\n",
        "so does a fill of one of several namespaces",
        "leases_spread",
    ),
)
