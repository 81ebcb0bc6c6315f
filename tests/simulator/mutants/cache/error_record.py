"""Mistakes in `flashwarp/cache/error_record.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/error_record.cuh"

MUTANTS = (
    Mutant(
        "failure-over-unread",
        "    if (int32_t(at - read) >= int32_t(kFailuresKept)) {\n",
        "    if (int32_t(at - read) > int32_t(kFailuresKept)) {\n",
        "a failure is stored over one that the host has not read",
        "records",
    ),
    Mutant(
        "failure-uncounted",
        "      atomic::add_relaxed(&log.untold, 1u);\n",
        "",
        "a failure that finds no room is lost",
        "records",
    ),
    Mutant(
        "failure-numbered-early",
        "  // The entry before its number, by which the host knows it.\n"
        "  atomic::fence_system();\n",
        "",
        "the host knows of an entry before it is whole",
        "records",
        "weak",
    ),
    Mutant(
        "failure-stored-early",
        "  // What the host has read of the entry before we store to it.\n"
        "  atomic::fence_system();\n",
        "",
        "an entry is stored to while the host may still read it",
        "records",
        "weak",
    ),
)
