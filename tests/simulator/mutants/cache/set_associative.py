"""Mistakes in `flashwarp/cache/set_associative.cuh`."""

from simulator.mutant import Mutant

HEADER = "flashwarp/cache/set_associative.cuh"

MUTANTS = (
    Mutant(
        "no-rescan",
        "if (present != claim_result::kBlocked) {",
        "if (false) {",
        "a line that was filled before the lock was taken is filled again in another way",
        "elements",
    ),
    Mutant(
        "policy-obeyed",
        "if (way < s.geometry.ways && set_view::has(allowed, way)) return way;",
        "if (way < 2 * s.geometry.ways) return way;",
        "a policy gets a frame of another set, and its line is never found there",
        "elements",
        policy="hostile",
    ),
    Mutant(
        "policy-keeps-lock",
        "s.hand & ~kSetLocked;",
        "s.hand;",
        "what a policy leaves in the control word locks the set for ever",
        "elements",
        policy="hostile",
    ),
    Mutant(
        "fill-without-fence",
        "  atomic::fence();\n  if (locked)",
        "  if (locked)",
        "a set opens before its tags are seen, and a frame's bytes come before its tag",
        "elements",
        "weak",
    ),
    Mutant(
        "set-opened-early",
        "  atomic::fence();\n  if (locked) atomic::store_relaxed(mine.control, mine.hand);\n",
        "  if (locked) atomic::store_relaxed(mine.control, mine.hand);\n  atomic::fence();\n",
        "of two fills of a line the second does not see the tag of the first",
        "elements",
        "weak",
    ),
    Mutant(
        "fill-published-relaxed",
        "atomic::store_release(&c.geometry.tags[way], tag::filled(busy_word, dirty));",
        "atomic::store_relaxed(&c.geometry.tags[way], tag::filled(busy_word, dirty));",
        "a reader sees the tag before the data",
        "elements",
        "weak",
    ),
    Mutant(
        "entering-ignored",
        "  if (found == tier::kEntering) return;\n",
        "",
        "a line is filled and stored to while its old bytes are on their way to the tier",
        "tier",
    ),
    Mutant(
        "tier-moves-unsynchronised",
        "  // Each lane has claimed its own frame; now all lanes may store to all of them.\n"
        "  here.sync();\n",
        "",
        "lanes copy a frame, or a place of the tier, that only a neighbour has acquired",
        "tier",
        "weak",
        4,
    ),
    Mutant(
        "claim-look-unacquired",
        "  if (locked) atomic::fence_acquire();\n",
        "",
        "lanes read what the storage had before another warp wrote back and emptied the frame",
        "emptied",
        "weak",
        width=4,
    ),
    Mutant(
        "passed-lines-in-frames-of-their-own",
        "why == purpose::kPass && s.resident == all && s.moving != 0",
        "false",
        "lines that are written around the cache at a time evict as many others of their set",
        "passing_in_turns",
    ),
)
