"""Mistakes in `flashwarp/cache/short_miss.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/short_miss.cuh"

MUTANTS = (
    Mutant(
        "short-way-without-fence",
        "  atomic::fence();\n  if (leads)",
        "  if (leads)",
        "bytes of the next line are seen before the tag goes BUSY",
        "elements",
        "weak",
        width=4,
    ),
    Mutant(
        "short-way-tag-first",
        "    atomic::fence();\n    if (frame != kNotClaimed) end_fill",
        "    if (frame != kNotClaimed) end_fill",
        "the tag says filled before the leader's own stores",
        "elements",
        "weak",
        width=4,
    ),
    Mutant(
        "short-way-published-early",
        "    here.sync();\n  }\n  FW_DEVICE void cancel() {}",
        "  }\n  FW_DEVICE void cancel() {}",
        "the tag says filled before the other lanes' stores",
        "elements",
        "weak",
        width=4,
    ),
    Mutant(
        "short-way-lock-unacquired",
        "  atomic::fence_acquire();\n  const bool locked",
        "  const bool locked",
        "the look does not see what was done under the lock before",
        "emptied",
        "weak",
        width=4,
    ),
    Mutant(
        "short-way-look-unacquired",
        "  atomic::fence_acquire();\n  if (!copy.begin(room))",
        "  if (!copy.begin(room))",
        "what another warp has written back, before it emptied the frame, is not read",
        "emptied",
        "weak",
        width=4,
    ),
    Mutant(
        "short-way-of-one-lane",
        "    here.sync();\n    take.begin(source);",
        "    take.begin(source);",
        "nor by the other lanes",
        "emptied",
        "weak",
        width=4,
    ),
    Mutant(
        "short-way-left-locked",
        "  if (holds && !room) undo_short(control, s.hand, true, true, copy);\n",
        "",
        "a set stays locked in which the line has come meanwhile",
        "emptied",
        width=4,
    ),
    Mutant(
        "short-way-undone-relaxed",
        "  atomic::fence();\n  if (locked) atomic::store_relaxed(control, hand);",
        "  if (locked) atomic::store_relaxed(control, hand);",
        "who locks the set next does not see what was done under the lock before",
        "emptied",
        "weak",
        width=4,
    ),
    Mutant(
        "short-way-keeps-left-pages",
        "      current = !here.any(!nvme::is_current(*cut.queue, from.address));\n",
        "",
        "a line that was read while the host left the path is published",
        "leases",
        width=4,
    ),
)
