"""Deliberate mistakes in the device headers, each of which the simulator has to find.

A mutant replaces one passage of one header, in a copy; the headers themselves carry no switches. A
passage that has changed since makes its mutant fail to apply, which is an error and never a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    """One mistake, and where it shows.

    Attributes
    ----------
    name : str
        What `--mutant` calls it.
    header : str
        As it is included: ``flashwarp/cache/...``, or ``flashwarp/kernels/...``.
    old, new : str
        The passage, which occurs exactly once, and what takes its place.
    why : str
        What goes wrong, in a sentence.
    scenario, mode, width, strategy, policy
        Where the simulator finds it.
    """

    name: str
    header: str
    old: str
    new: str
    why: str
    scenario: str
    mode: str = "sc"
    width: int = 1
    strategy: str = "any"
    policy: str = "clock"


_ACCESS = "flashwarp/cache/access.cuh"
_ARRAY = "flashwarp/array/view.cuh"
_CURSOR = "flashwarp/array/cursor.cuh"
_COPY = "flashwarp/base/copy.cuh"
_LINE = "flashwarp/cache/line_state.cuh"
_SETS = "flashwarp/cache/set_associative.cuh"
_SHORT = "flashwarp/cache/short_miss.cuh"
_SHORT_HIT = "flashwarp/cache/short_hit.cuh"
_PLACE = "flashwarp/cache/placement.cuh"
_COMMAND = "flashwarp/cache/line_command.cuh"
_SPREAD = "flashwarp/cache/spread.cuh"
_MOVE = "flashwarp/cache/transfer.cuh"
_VISITS = "flashwarp/cache/visits.cuh"
_WRITE = "flashwarp/cache/write_back.cuh"
_TIER = "flashwarp/cache/host_tier.cuh"
_TIER_MOVES = "flashwarp/cache/tier_moves.cuh"
_LEASE = "flashwarp/cache/lease.cuh"
_RESIDENT = "flashwarp/kernels/resident.cuh"
_ROWS = "flashwarp/kernels/rows.cuh"
_SAMPLING = "flashwarp/sampling.cuh"
_TABLE = "flashwarp/kernels/table.cuh"
_UPDATE = "flashwarp/kernels/update.cuh"
_ASYNC = "flashwarp/array/async.cuh"
_SHARE = "flashwarp/cache/share_table.cuh"
_VIEW = "flashwarp/array/shared.cuh"
_RECORD = "flashwarp/cache/error_record.cuh"
_QUEUE = "flashwarp/nvme/queue_pair.cuh"
_SUBMIT = "flashwarp/nvme/submission_queue.cuh"
_COMPLETE = "flashwarp/nvme/completion_queue.cuh"
_MISSES = "flashwarp/cache/miss_list.cuh"
_DIRECTION = "flashwarp/batch/direction.cuh"
_HOST_REGIONS = "flashwarp/batch/host_regions.cuh"
_FILE = "flashwarp/file/file_view.cuh"
_ABSENT = "flashwarp/cache/read_absent.cuh"

_AROUND_COPY = """\
  if (arrived != 0) op.template copy<warp::source::kStorage>(mask, arrived, address - blocks.begin);
"""
_AROUND_CHECK = """\
  if (q.data.leased != 0) {
    finish_loads(mask);
    // Also after a failure: the file may have been cut before the path changed.
    again = mine && status != nvme::kTimedOut && !nvme::is_current(q, address);
  }
"""
_AROUND_RELEASE = """\
  // The slot of a command that never came back stays taken: the drive may still write its buffer.
  if (mine && status != nvme::kTimedOut) nvme::release_slot(q, ticket);
"""

_EACH_PART = "  for (uint64_t part = 0; part < parts; part++) {\n    request& to"

_LAND = """\
  if (opcode == nvme::kRead) {
    const uint32_t arrived = warp::ballot(mask, mine && status == nvme::kSuccess);
    const uint32_t ended = warp::ballot(mask, mine && status != nvme::kTimedOut);
    again = land_reads(c, v, q, mask, ended, arrived, t, address);
  }
"""
_RELEASE = """\
  // The slot of a command that never came back stays taken: the drive may still write its buffer.
  if (mine && status != nvme::kTimedOut) nvme::release_slot(q, ticket);
"""

_NOTE = """\
      atomic::store_plain(&q.detached[nvme::entry_of(q, ticket)], what);
"""
_MARK = """\
    nvme::write_entry(q, ticket, line_command(c, v, q, opcode, ticket, t, address),
                      FLAGS);
"""

_DETACHED_IN_PLACE = """\
  const uint32_t left = move_in_place(c, v, q, mask, members, opcode, t);
  if (((members & ~left) >> warp::lane()) & 1) {
    line_finisher{c}.end(detached_transfer(c, v, opcode, t, 0), nvme::kSuccess);
  }
"""
_DETACHED_EARLY = """\
  const bool early = opcode == nvme::OPCODE &&
                     (opcode == nvme::kRead ? q.plain_reads : q.plain_writes) != 0 &&
                     nvme::path_of(q) == nvme::kInPlace;
  if (early && ((members >> warp::lane()) & 1) != 0) {
    line_finisher{c}.end(detached_transfer(c, v, opcode, t, 0), nvme::kSuccess);
  }
  const uint32_t left = move_in_place(c, v, q, mask, members, opcode, t);
  if (!early && (((members & ~left) >> warp::lane()) & 1) != 0) {
    line_finisher{c}.end(detached_transfer(c, v, opcode, t, 0), nvme::kSuccess);
  }
"""

MUTANTS = {
    mutant.name: mutant
    for mutant in (
        Mutant(
            "load-without-acquire",
            _ARRAY,
            "value = atomic::raw<kAccessBytes>::load_acquire_stream(frame + offset_of(i));",
            "value = atomic::raw<kAccessBytes>::load(frame + offset_of(i));",
            "the second look at the tag overtakes the load, and a refill goes unnoticed",
            "evict",
            "weak",
        ),
        Mutant(
            "no-second-look",
            _ARRAY,
            "      hit = fw::cache::still_holds(geometry, at.way, at.word);\n"
            "      if (hit) policy::on_hit",
            "      hit = true;\n      if (hit) policy::on_hit",
            "a frame refilled during the load yields another line's bytes",
            "elements",
            strategy="random",
        ),
        Mutant(
            "cursor-without-acquire",
            _CURSOR,
            "value = atomic::raw<kAccessBytes>::load_acquire(address_of(i));",
            "value = atomic::raw<kAccessBytes>::load(address_of(i));",
            "the second look at the tag overtakes the load, and a refill goes unnoticed",
            "cursors",
            "weak",
            strategy="rival",
        ),
        Mutant(
            "cursor-no-second-look",
            _CURSOR,
            "    atomic::fence_acquire();\n    return still_held();",
            "    atomic::fence_acquire();\n    return true;",
            "a frame refilled since the cursor found its line yields another line's bytes",
            "cursors",
        ),
        Mutant(
            "cursor-line-left-unlooked",
            _CURSOR,
            "      if (!still_held()) return false;",
            "",
            "of elements on several lines, those of the first may be another line's",
            "cursors",
        ),
        Mutant(
            "cursor-batch-without-fence",
            _CURSOR,
            "    atomic::fence_acquire();\n    return still_held();",
            "    return still_held();",
            "the second look overtakes the loads of a batch, and a refill goes unnoticed",
            "loops",
            "weak",
        ),
        Mutant(
            "row-no-second-look",
            _CURSOR,
            "same = word_ != 0 && still_held();",
            "same = word_ != 0;",
            "a batch on several lines, of which one was refilled meanwhile, is handed out",
            "loops",
            "sc",
            4,
        ),
        Mutant(
            "row-in-any-order",
            _CURSOR,
            "part.begin <= first && first <= last && last <= part.end",
            "part.begin <= first && last <= part.end",
            "a lane's elements lie before the lines that the warp has found for it",
            "loops",
            "sc",
            4,
        ),
        Mutant(
            "row-found-unsynchronised",
            _CURSOR,
            "    // Each lane has acquired the fill of its own line, and loads from all of them.\n"
            "    warp::sync(all);\n",
            "",
            "lanes load from a line whose fill only a neighbour has acquired",
            "loops",
            "weak",
            4,
        ),
        Mutant(
            "hits-no-second-look",
            _ACCESS,
            "const bool served = usable && still_holds(g, at.way, at.word);",
            "const bool served = usable;",
            "a row whose frame was refilled during the copy is another line's",
            "rows",
            "sc",
            4,
        ),
        Mutant(
            "client-no-second-look",
            _RESIDENT,
            "at[k].found && still_ours && cache::still_holds(g, at[k].way, at[k].word);",
            "at[k].found && still_ours;",
            "a client takes the bytes of a frame that the owner has refilled meanwhile",
            "clients",
        ),
        Mutant(
            "client-without-fence",
            _RESIDENT,
            "    atomic::fence_acquire();\n    warp::sync(mask);\n",
            "    warp::sync(mask);\n",
            "a client's second look comes before its loads, and does not see the refill",
            "clients",
            "weak",
        ),
        Mutant(
            "client-lists-for-one-lane",
            _RESIDENT,
            "{item, line - c.line_begin}",
            "{warp::broadcast(mask, item, leader), line - c.line_begin}",
            "a row that was not copied is not asked for, and another one twice",
            "clients",
            "sc",
            4,
        ),
        Mutant(
            "hits-without-fence",
            _ACCESS,
            "    atomic::fence_acquire();\n    warp::sync(mask);\n",
            "    warp::sync(mask);\n",
            "the second look overtakes the loads of a row, and a refill goes unnoticed",
            "rows",
            "weak",
            4,
        ),
        Mutant(
            "hits-unsynchronised",
            _ACCESS,
            "    atomic::fence_acquire();\n    warp::sync(mask);\n",
            "    atomic::fence_acquire();\n",
            "a lane's second look comes before its neighbours have loaded their part of its row",
            "rows",
            "weak",
            4,
            strategy="rival",
        ),
        Mutant(
            "lookup-no-second-look",
            _TABLE,
            "if (!f.usable || !cache::still_holds(t.geometry, f.first.way, f.first.word))",
            "if (!f.usable)",
            "a row whose frame was refilled while it was converted is another row's",
            "lookups",
            "sc",
            4,
        ),
        Mutant(
            "lookup-without-fence",
            _TABLE,
            "      atomic::fence_acquire();\n      warp::sync(mask);\n      const uint32_t good",
            "      warp::sync(mask);\n      const uint32_t good",
            "the second look overtakes the loads of a row, and a refill goes unnoticed",
            "lookups",
            "weak",
            4,
        ),
        Mutant(
            "lookup-unsynchronised",
            _TABLE,
            "    warp::sync(mask);\n    for (uint32_t q = 0;",
            "    for (uint32_t q = 0;",
            "lanes load from a line whose fill only a neighbour has acquired",
            "lookups",
            "weak",
            4,
        ),
        Mutant(
            "update-unpinned",
            _UPDATE,
            "static constexpr bool kStores = true;",
            "static constexpr bool kStores = false;",
            "a row is updated in a frame that is not dirty, or that another line gets meanwhile",
            "updates",
        ),
        Mutant(
            "update-unsynchronised",
            _UPDATE,
            "    // Each lane has acquired its own line; now all lanes use all of them.\n"
            "    warp::sync(mask);\n",
            "",
            "lanes update a row in a line whose fill only a neighbour has acquired",
            "updates",
            "weak",
            4,
        ),
        Mutant(
            "update-of-each-place",
            _UPDATE,
            "(first == 0 || ids[first - 1] != ids[first])",
            "true",
            "a row whose id repeats is updated again, by what no chunk has added up",
            "updates",
        ),
        Mutant(
            "late-fill-frees-frame",
            _ACCESS,
            "if (!outstanding) abandon_fill",
            "if (status != 0) abandon_fill",
            "a fill that ran out of time writes over the line that got its frame",
            "faults",
            strategy="priority",
        ),
        Mutant(
            "no-rescan",
            _SETS,
            "if (present != claim_result::kBlocked) {",
            "if (false) {",
            "a line that was filled before the lock was taken is filled again in another way",
            "elements",
        ),
        Mutant(
            "policy-obeyed",
            _SETS,
            "if (way < s.geometry.ways && set_view::has(allowed, way)) return way;",
            "if (way < 2 * s.geometry.ways) return way;",
            "a policy gets a frame of another set, and its line is never found there",
            "elements",
            policy="hostile",
        ),
        Mutant(
            "policy-keeps-lock",
            _SETS,
            "s.hand & ~kSetLocked;",
            "s.hand;",
            "what a policy leaves in the control word locks the set for ever",
            "elements",
            policy="hostile",
        ),
        Mutant(
            "fill-without-fence",
            _SETS,
            "  atomic::fence();\n  if (locked)",
            "  if (locked)",
            "a set opens before its tags are seen, and a frame's bytes come before its tag",
            "elements",
            "weak",
        ),
        Mutant(
            "set-opened-early",
            _SETS,
            "  atomic::fence();\n  if (locked) atomic::store_relaxed(mine.control, mine.hand);\n",
            "  if (locked) atomic::store_relaxed(mine.control, mine.hand);\n  atomic::fence();\n",
            "of two fills of a line the second does not see the tag of the first",
            "elements",
            "weak",
        ),
        Mutant(
            "pins-ignored",
            _LINE,
            "return (word & (kStateMask | kPinMask | kDirty | kWriting)) == kValid;",
            "return (word & (kStateMask | kDirty | kWriting)) == kValid;",
            "a line is evicted under a store to it",
            "elements",
        ),
        Mutant(
            "generation-stays",
            _LINE,
            "((previous + kGenerationOne) & kGenerationMask)",
            "(previous & kGenerationMask)",
            "a line that left its frame and came back looks as if it had never left",
            "evict",
        ),
        Mutant(
            "store-not-dirty",
            _LINE,
            "(w - tag::kPinOne) | (dirty ? tag::kDirty : 0)",
            "(void(dirty), w - tag::kPinOne)",
            "a store is never written back",
            "elements",
        ),
        Mutant(
            "failed-write-clean",
            _LINE,
            "(succeeded ? 0 : tag::kDirty)",
            "(succeeded ? 0 : 0)",
            "a write-back that failed leaves the line clean, and its stores are lost",
            "faults",
        ),
        Mutant(
            "entry-after-mark",
            _SUBMIT,
            "  using word = atomic::raw<16>;\n",
            "  using word = atomic::raw<16>;\n"
            "  atomic::store_release(&q.slots[e],\n"
            "                        slot::word(turn_of(q, ticket), slot::kWritten) | flags);\n",
            "another warp rings for an entry that is not written yet",
            "queue",
        ),
        Mutant(
            "doorbell-device-fence",
            _SUBMIT,
            "        atomic::fence_system();\n        ring(q, q.sq_doorbell",
            "        atomic::fence();\n        ring(q, q.sq_doorbell",
            "a fence of the device does not order the entries for the controller",
            "queue",
            "weak",
        ),
        Mutant(
            "publish-without-second-look",
            _SUBMIT,
            "    if (count_publishable(q, mask, tail + count) == 0) return;\n",
            "    return;\n",
            "an entry written while the lock was held is never published",
            "queue",
        ),
        Mutant(
            "publish-without-fence",
            _SUBMIT,
            "    atomic::fence_sequential();\n    if (count_publishable",
            "    if (count_publishable",
            "the second look overtakes the unlock, and misses an entry whose writer met the lock",
            "queue",
            "weak",
        ),
        Mutant(
            "phase-stays",
            _COMPLETE,
            "(turn_of(q, position) & 1) ^ 1",
            "1u",
            "completions of the second pass are never seen, those of the first twice",
            "queue",
        ),
        Mutant(
            "head-stays",
            _COMPLETE,
            "atomic::store_relaxed(&q.head, head + count);",
            "atomic::store_relaxed(&q.head, head);",
            "a completion is consumed twice",
            "queue",
        ),
        Mutant(
            "slot-freed-early",
            _COMMAND,
            _LAND + _RELEASE,
            _RELEASE + _LAND,
            "the next command's data replaces ours in the slot's buffer before we have read it",
            "elements",
        ),
        Mutant(
            "fill-published-relaxed",
            _SETS,
            "atomic::store_release(&c.geometry.tags[way], tag::filled(busy_word, dirty));",
            "atomic::store_relaxed(&c.geometry.tags[way], tag::filled(busy_word, dirty));",
            "a reader sees the tag before the data",
            "elements",
            "weak",
        ),
        Mutant(
            "rings-freed-together",
            _SPREAD,
            "if (warp::any(mask, mine && ((done >> n) & 1) == 0)) {",
            "if (warp::any(mask, f.on != done)) {",
            "warps hold slots of one ring while they wait for another, and these for the first",
            "two_rings",
            strategy="random",
        ),
        Mutant(
            "rings-in-any-order",
            _SPREAD,
            "  for (uint32_t n = 0; n < v.namespace_count; n++) {\n    const uint32_t members =",
            "  for (uint32_t k = 0; k < v.namespace_count; k++) {\n"
            "    const uint32_t n = (k + warp::index()) % v.namespace_count;\n"
            "    const uint32_t members =",
            "two warps wait for slots of each other's rings for ever",
            "two_rings",
        ),
        Mutant(
            "first-replica-ends",
            _COMMAND,
            "    if (count != nullptr && !finish_replica(count, status)) return;\n",
            "    (void)count;\n",
            "a line counts as written when the first replica has it",
            "replicate",
        ),
        Mutant(
            "replica-failure-forgotten",
            _PLACE,
            "const uint32_t all = worse_of(seen >> 16, status);",
            "const uint32_t all = status;",
            "a write-back that failed on one replica leaves the line clean",
            "replicate_faults",
        ),
        Mutant(
            "one-replica-asked",
            _SPREAD,
            "  const uint32_t n = choose_replica(v, seat, line, tried);\n",
            "  const uint32_t n =\n"
            "      tried != 0 ? kNamespacesMax : choose_replica(v, seat, line, 0);\n",
            "a read that failed on one replica fails",
            "replica_lost",
        ),
        Mutant(
            "slots-waited-for-idly",
            _COMPLETE,
            """\
      return false;
    }
    help(q, mask, finisher);
""",
            """\
      return false;
    }
    base::pause(kBackOffNs);
""",
            "threads that have all started more than the ring holds wait for each other's waits",
            "async",
        ),
        Mutant(
            "token-done-unmoved",
            _ASYNC,
            "    if (arrived) {\n      status_ = finish();\n",
            "    if (arrived) {\n      status_ = nvme::kSuccess;\n",
            "a token is over before its elements are in the buffer",
            "async",
        ),
        Mutant(
            "token-stores-twice",
            _ASYNC,
            "base::opaque(&detail::move_part<true>)(cache_, volume_, span_, "
            "detail::lines::kPartial);",
            "base::opaque(&detail::move_part<true>)(cache_, volume_, span_, detail::lines::kAll);",
            "whole lines that were stored at once are stored again, over what came in between",
            "spans",
        ),
        Mutant(
            "detached-noted-late",
            _COMMAND,
            _NOTE + "    }\n" + _MARK.replace("FLAGS", "detached ? nvme::slot::kDetached : 0"),
            _MARK.replace("FLAGS", "nvme::slot::kDetached")
            + _NOTE
            + "    } else {\n"
            + _MARK.replace("FLAGS", "0")
            + "    }\n",
            "a command that nobody waits for is finished as what the entry was for before",
            "async",
            "weak",
        ),
        Mutant(
            "share-two-owners",
            _SHARE,
            "if (share_find(t, line).entry == kShareNowhere) {",
            "if (true) {",
            "two threads make their buffers the copy of one line",
            "share",
        ),
        Mutant(
            "share-closing-joined",
            _SHARE,
            "!patient && share::references(word) != 0 &&",
            "!patient &&",
            "a user joins a copy that its owner has taken back",
            "share",
        ),
        Mutant(
            "share-patience-endless",
            _VIEW,
            "return looks_ < kSharePatience;",
            "return true;",
            "threads that hold a line each wait for the owners of each other's",
            "share",
            width=4,
        ),
        Mutant(
            "share-users-forgotten",
            _VIEW,
            "held.owner && cache::share::references(word) == 0;",
            "held.owner;",
            "an owner takes its buffer back while others store to it",
            "share",
        ),
        Mutant(
            "share-stores-forgotten",
            _SHARE,
            "| (stored ? share::kModified : 0);\n      });\n}\n\n// Makes the owner's",
            ";\n      });\n}\n\n// Makes the owner's",
            "what users stored to an owner's buffer never reaches the cache",
            "share",
        ),
        Mutant(
            "share-closing-missed",
            _VIEW,
            "cache::share::state_of(at.word) == cache::share::kFilling) {",
            "cache::share::state_of(at.word) != cache::share::kShared) {",
            "a reader takes the cache's old bytes while a copy is being written back",
            "share",
        ),
        Mutant(
            "share-block-forgotten",
            _VIEW,
            "if (scope == 0 || scope == base::own_scope()) return {share_result::kJoined",
            "if (scope != ~0u) return {share_result::kJoined",
            "a thread takes an address in another block's shared memory for its own",
            "share",
        ),
        Mutant(
            "share-overflow-missed",
            _SHARE,
            "    if (atomic::load_acquire(&t.overflows[bucket]) == 0) break;\n",
            "    break;\n",
            "a look ends at a full bucket, and misses the copy that lies in the next",
            "share_full",
        ),
        Mutant(
            "share-store-unguarded",
            _VIEW,
            """\
  if (warp::any(mask, claimed)) {
    store_element<kBytes> op = element;
""",
            """\
  if (claimed) cache::share_end(t, mine.entry, line);
  if (warp::any(mask, claimed)) {
    store_element<kBytes> op = element;
""",
            "a line is brought to a buffer while its cached bytes are stored to",
            "share",
        ),
        Mutant(
            "share-open-relaxed",
            _SHARE,
            "atomic::store_release(&t.words[entry],\n                        share::kShared",
            "atomic::store_relaxed(&t.words[entry],\n                        share::kShared",
            "a user finds a buffer before its bytes",
            "share",
            "weak",
        ),
        Mutant(
            "share-end-relaxed",
            _SHARE,
            "atomic::store_release(&t.words[entry], share::kFree);",
            "atomic::store_relaxed(&t.words[entry], share::kFree);",
            "a reader finds no copy, and the cache as it was before the copy was written back",
            "share",
            "weak",
        ),
        Mutant(
            "share-uncount-unfenced",
            _SHARE,
            "  // The same for threads that find a bucket's count at 0 and so look no further.\n"
            "  atomic::fence();\n",
            "",
            "a reader whose look ends at a bucket has not seen what was behind it written back",
            "share_full",
            "weak",
        ),
        Mutant(
            "share-users-unsynchronised",
            _VIEW,
            "  // The loads and stores of all lanes come before the release by one lane for all.\n"
            "  warp::sync(mask);\n",
            "",
            "a lane lets go of a copy for lanes whose stores are still on their way",
            "share",
            "weak",
            4,
        ),
        Mutant(
            "entering-ignored",
            _SETS,
            "  if (found == tier::kEntering) return;\n",
            "",
            "a line is filled and stored to while its old bytes are on their way to the tier",
            "tier",
        ),
        Mutant(
            "tier-copy-stays",
            _TIER_MOVES,
            "tier::change(c.tier, mine.tier_from, tier::kEmpty);",
            "tier::change(c.tier, mine.tier_from, tier::kHeld);",
            "the tier goes on holding a line that may now be stored to",
            "tier",
        ),
        Mutant(
            "held-relaxed",
            _TIER,
            "  atomic::store_release(&t.tags[place],\n",
            "  atomic::store_relaxed(&t.tags[place],\n",
            "a line is taken out of the tier before its bytes are there",
            "tier",
            "weak",
        ),
        Mutant(
            "tier-moves-unsynchronised",
            _SETS,
            "  // Each lane has claimed its own frame; now all lanes may store to all of them.\n"
            "  warp::sync(mask);\n",
            "",
            "lanes copy a frame, or a place of the tier, that only a neighbour has acquired",
            "tier",
            "weak",
            4,
        ),
        Mutant(
            "drain-leaves-entries",
            _COMPLETE,
            "  if (has_unpublished(q, mask)) publish(q, mask);\n",
            "",
            "an entry that waited for room in the ring is never published",
            "queue",
        ),
        Mutant(
            "unpublished-without-fence",
            _COMPLETE,
            "  atomic::fence_sequential();\n  const bool any",
            "  const bool any",
            "a drainer looks too early for an entry that waits for room, which is never published",
            "queue",
            mode="weak",
        ),
        Mutant(
            "own-volume-only",
            _VISITS,
            "  if ((step & 3) != 3) return v;\n",
            "  return v;\n",
            "a frame that another array's queue fills is waited for in vain",
            "foreign",
        ),
        Mutant(
            "visit-unannounced",
            _VISITS,
            "    if (ours || begin_visit(target)) {\n      if (!ours) visited = &target;\n",
            "    if (ours || atomic::load_acquire(&target.attached) != 0) {\n",
            "a neighbour frees its rings while a warp that waits helps them",
            "neighbour_closes",
        ),
        Mutant(
            "write-back-unannounced",
            _WRITE,
            "const bool visits = !same_array(*v, self);",
            "const bool visits = false;",
            "a neighbour frees its rings while a warp has just written its dirty line back",
            "neighbour_closes",
            strategy="random",
        ),
        Mutant(
            "visit-looks-first",
            _VISITS,
            "  atomic::add_relaxed(&v.visitors, 1u);\n",
            "  const bool there = atomic::load_acquire(&v.attached) != 0;\n"
            "  atomic::add_relaxed(&v.visitors, 1u);\n"
            "  if (there) return true;\n",
            "the neighbour closes between the look and the announcement",
            "neighbour_closes",
        ),
        Mutant(
            "visit-without-fence",
            _VISITS,
            "  atomic::fence_sequential();\n",
            "",
            "the look overtakes the announcement: visitor and host miss each other",
            "neighbour_closes",
            "weak",
        ),
        Mutant(
            "arrays-mixed",
            _ARRAY,
            "return warp::match(warp::active(), reinterpret_cast<uint64_t>(v));",
            "return (void)v, warp::active();",
            "lanes that mean different arrays share one queue's tickets",
            "elements",
            "sc",
            4,
        ),
        Mutant(
            "ring-space-by-lane",
            _SUBMIT,
            "warp::broadcast(mask, atomic::load_relaxed(&q.fetched), base::lowest_bit(mask));",
            "atomic::load_relaxed(&q.fetched);",
            "lanes leave a loop of collectives at different times",
            "elements",
            "sc",
            4,
        ),
        Mutant(
            "leader-rings-unsynchronised",
            _SUBMIT,
            "    // Each lane has acquired the entries that it counted; the leader publishes all of"
            " them.\n    warp::sync(mask);\n",
            "",
            "the leader rings for entries that only its neighbours have acquired",
            "elements",
            "weak",
            4,
        ),
        Mutant(
            "landing-unsynchronised",
            _COMMAND,
            "  // Each lane has acquired its own completion; now all lanes read all of the"
            " data.\n  warp::sync(mask);\n",
            "",
            "lanes read a buffer whose completion only a neighbour has acquired",
            "elements",
            "weak",
            4,
        ),
        Mutant(
            "staging-unsynchronised",
            _COMMAND,
            "  // Each lane has acquired its own line and slot; now all lanes read and write all of"
            " them.\n  warp::sync(mask);\n",
            "",
            "lanes write a buffer whose slot only a neighbour has acquired",
            "elements",
            "weak",
            4,
        ),
        Mutant(
            "drain-unsynchronised",
            _COMPLETE,
            "  // The leader has acquired what the last drainer did; no lane may see an entry of an"
            " older pass.\n  warp::sync(mask);\n",
            "",
            "a lane takes a completion of two passes before for a new one",
            "queue",
            "weak",
            4,
        ),
        Mutant(
            "elements-in-halves",
            _COPY,
            "  if (all % 8 == 0) {\n",
            "  if (false) {\n",
            "a gathered element has parts of two stores",
            "rows",
            "sc",
            4,
        ),
        Mutant(
            "queue-asked-again",
            _SPREAD,
            "    const nvme::queue_pair& q = queue_on(v, f.seat, n);\n",
            "    const nvme::queue_pair& q =\n"
            "        queue_on(v, warp::index() + base::spread_index(), n);\n",
            "a warp that has gone on elsewhere looks its ticket up in another ring",
            "stripe",
        ),
        Mutant(
            "seat-by-lane",
            _PLACE,
            "  return warp::broadcast(mask, warp::index() + base::spread_index(), "
            "base::lowest_bit(mask));\n",
            "  return (void)mask, warp::index() + base::spread_index();\n",
            "lanes that have asked at different times submit to different rings as one",
            "elements",
            "sc",
            4,
        ),
        Mutant(
            "help-by-lane",
            _VISITS,
            "  queue = warp::broadcast(mask, queue, leader);\n",
            "  queue = reinterpret_cast<uint64_t>(&queue_to_help(v, step));\n",
            "lanes that have asked at different times help different rings as one",
            "elements",
            "sc",
            4,
        ),
        Mutant(
            "doorbell-before-loads",
            _COMPLETE,
            "    warp::sync(mask);\n    // The controller's data comes before",
            "    // The controller's data comes before",
            "the controller may overwrite a completion that a lane beside the leader still loads",
            "queue",
            "weak",
            4,
        ),
        Mutant(
            "failure-over-unread",
            _RECORD,
            "    if (int32_t(at - read) >= int32_t(kFailuresKept)) {\n",
            "    if (int32_t(at - read) > int32_t(kFailuresKept)) {\n",
            "a failure is stored over one that the host has not read",
            "records",
        ),
        Mutant(
            "failure-uncounted",
            _RECORD,
            "      atomic::add_relaxed(&log.untold, 1u);\n",
            "",
            "a failure that finds no room is lost",
            "records",
        ),
        Mutant(
            "failure-numbered-early",
            _RECORD,
            "  // The entry before its number, by which the host knows it.\n"
            "  atomic::fence_system();\n",
            "",
            "the host knows of an entry before it is whole",
            "records",
            "weak",
        ),
        Mutant(
            "failure-stored-early",
            _RECORD,
            "  // What the host has read of the entry before we store to it.\n"
            "  atomic::fence_system();\n",
            "",
            "an entry is stored to while the host may still read it",
            "records",
            "weak",
        ),
        Mutant(
            "deadline-ignores-heartbeat",
            _QUEUE,
            "  if (beats >= kBeatsMin && beats * kBeatNs >= t.timeout_ns) return true;\n",
            "  return true;\n",
            "waits run out of time while the host's process is stopped",
            "suspended",
        ),
        Mutant(
            "deadline-believes-in-host",
            _QUEUE,
            "  return waited > kLimitsUntilDead * t.timeout_ns;\n",
            "  return false;\n",
            "waits for a host that does not come back have no end",
            "host_lost",
        ),
        Mutant(
            "prefetch-dies-silently",
            _COMMAND,
            "  if (opcode == nvme::kWrite || v.spread != kReplicated) {\n",
            "  if (opcode == nvme::kWrite) {\n",
            "a queue pair dies under a prefetch, and nobody is told",
            "prefetch_lost",
        ),
        Mutant(
            "vertex-placed-twice",
            _SAMPLING,
            "      if (key == kFree) key = atomic::load_relaxed(&keys[place]);\n",
            "",
            "a vertex gets two places if another thread enters it meanwhile",
            "sampling",
        ),
        Mutant(
            "vertex-of-a-later-slot",
            _SAMPLING,
            "    while (slot < before && !atomic::cas_acq_rel(&first[place], before, slot)) {\n"
            "      before = atomic::load_relaxed(&first[place]);\n"
            "    }\n",
            "    if (slot < before) atomic::store_relaxed(&first[place], slot);\n",
            "the number of a vertex depends on which thread comes last",
            "sampling",
        ),
        Mutant(
            "entry-drawn-twice",
            _SAMPLING,
            "    taken = warp::any(warp::kFullMask, taken);\n",
            "",
            "a lane does not know what the other lanes have drawn before",
            "sampling",
            width=4,
        ),
        Mutant(
            "window-keeps-slots",
            "benchmarks/drives/drives.cuh",
            "      while (outstanding_ != 0) {\n",
            "      while (outstanding_ != 0 && p_.window == 1) {\n",
            "warps wait for slots that each other holds",
            "drives",
        ),
        Mutant(
            "pages-left-unseen",
            _MOVE,
            "    members |= end_lines(c, v, q, mask, batch, opcode, t, ticket, address, got);\n",
            "    end_lines(c, v, q, mask, batch, opcode, t, ticket, address, got);\n",
            "a fill that was read in place after the lease had ended passes for current",
            "leases",
        ),
        Mutant(
            "pages-left-unseen-plain",
            _COMMAND,
            "  if (reads) return land_reads(c, v, q, mask, members, members, t, address);\n",
            "  if (reads) {\n"
            "    land_reads(c, v, q, mask, members, members, t, address);\n"
            "    return 0;\n"
            "  }\n",
            "so does a fill that took no command",
            "leases",
        ),
        Mutant(
            "pages-left-unseen-in-parts",
            _COMMAND,
            "    again |= read_frames(q, mask, now, now, frame, address, bytes);\n",
            "    read_frames(q, mask, now, now, frame, address, bytes);\n",
            "so does one from the parts of a namespace",
            "leases",
        ),
        Mutant(
            "plain-reads-of-some-lanes",
            _COMMAND,
            "  if (warp::any(mask, nvme::path_of(q) != nvme::kInPlace)) return members;\n",
            "  if (nvme::path_of(q) != nvme::kInPlace) return members;\n",
            "lanes of a warp that see the path change go two ways",
            "leases",
            width=4,
        ),
        Mutant(
            "pages-left-unseen-inline",
            "flashwarp/cache/access.cuh",
            "      left = read_frames(*source.queue,",
            "      left = 0;\n      read_frames(*source.queue,",
            "so does a fill of a thread that waits for it",
            "leases",
        ),
        Mutant(
            "plain-source-of-some-lanes",
            "flashwarp/cache/access.cuh",
            "    if (!warp::any(mask, !source.open)) {\n",
            "    if (source.open) {\n",
            "lanes of a warp that see the path change go two ways",
            "leases",
            width=4,
        ),
        Mutant(
            "claim-look-unacquired",
            _SETS,
            "  if (locked) atomic::fence_acquire();\n",
            "",
            "lanes read what the storage had before another warp wrote back and emptied the frame",
            "emptied",
            "weak",
            width=4,
        ),
        Mutant(
            "short-way-without-fence",
            _SHORT,
            "  atomic::fence();\n  if (leads)",
            "  if (leads)",
            "bytes of the next line are seen before the tag goes BUSY",
            "elements",
            "weak",
            width=4,
        ),
        Mutant(
            "short-way-tag-first",
            _SHORT,
            "    atomic::fence();\n    if (frame != kNotClaimed) end_fill",
            "    if (frame != kNotClaimed) end_fill",
            "the tag says filled before the leader's own stores",
            "elements",
            "weak",
            width=4,
        ),
        Mutant(
            "short-way-published-early",
            _SHORT,
            "    warp::sync(mask);\n  }\n  FW_DEVICE void cancel() {}",
            "  }\n  FW_DEVICE void cancel() {}",
            "the tag says filled before the other lanes' stores",
            "elements",
            "weak",
            width=4,
        ),
        Mutant(
            "short-way-lock-unacquired",
            _SHORT,
            "  atomic::fence_acquire();\n  const bool locked",
            "  const bool locked",
            "the look does not see what was done under the lock before",
            "emptied",
            "weak",
            width=4,
        ),
        Mutant(
            "short-way-look-unacquired",
            _SHORT,
            "  atomic::fence_acquire();\n  if (!copy.begin(room))",
            "  if (!copy.begin(room))",
            "what another warp has written back, before it emptied the frame, is not read",
            "emptied",
            "weak",
            width=4,
        ),
        Mutant(
            "short-way-of-one-lane",
            _SHORT,
            "    warp::sync(mask);\n    take.begin(source);",
            "    take.begin(source);",
            "nor by the other lanes",
            "emptied",
            "weak",
            width=4,
        ),
        Mutant(
            "short-way-left-locked",
            _SHORT,
            "  if (holds && !room) undo_short(control, s.hand, true, true, copy);\n",
            "",
            "a set stays locked in which the line has come meanwhile",
            "emptied",
            width=4,
        ),
        Mutant(
            "short-way-undone-relaxed",
            _SHORT,
            "  atomic::fence();\n  if (locked) atomic::store_relaxed(control, hand);",
            "  if (locked) atomic::store_relaxed(control, hand);",
            "who locks the set next does not see what was done under the lock before",
            "emptied",
            "weak",
            width=4,
        ),
        Mutant(
            "short-way-keeps-left-pages",
            _SHORT,
            "      current = !warp::any(mask, !nvme::is_current(*way.queue, from.address));\n",
            "",
            "a line that was read while the host left the path is published",
            "leases",
            width=4,
        ),
        Mutant(
            "pages-left-counted-ahead",
            _COMMAND,
            "  if (((members & ~left) >> warp::lane()) & 1) {\n",
            "  if ((members >> warp::lane()) & 1) {\n",
            "so does a prefetch that took no command",
            "leases",
        ),
        Mutant(
            "plain-write-over-early",
            _COMMAND,
            _DETACHED_IN_PLACE,
            _DETACHED_EARLY.replace("OPCODE", "kWrite"),
            "a write-back is over before the namespace has the line, and its frame gets another",
            "elements",
        ),
        Mutant(
            "plain-read-over-early",
            _COMMAND,
            _DETACHED_IN_PLACE,
            _DETACHED_EARLY.replace("OPCODE", "kRead"),
            "a line that is prefetched without a command is readable before its bytes are there",
            "elements",
        ),
        Mutant(
            "staged-unsynchronised",
            _COMMAND,
            "  // The copies of all lanes come before any lane's command, or its end of the"
            " write-back.\n  warp::sync(mask);\n",
            "",
            "a lane ends its write-back before its neighbours have copied their part of the line",
            "elements",
            "weak",
            4,
        ),
        Mutant(
            "pages-left-unseen-ahead",
            _COMMAND,
            "    return read && !nvme::is_current(q, what.source) ? uint32_t(nvme::kCommandAborted)"
            " : status;\n",
            "    return status;\n",
            "so does a prefetch",
            "leases",
        ),
        Mutant(
            "pages-left-unseen-spread",
            _SPREAD,
            "  again = (outdated >> warp::lane()) & 1;\n",
            "  again = false && outdated != 0;\n",
            "so does a fill of one of several namespaces",
            "leases_spread",
        ),
        Mutant(
            "pages-left-unfenced",
            _COMMAND,
            "  // Acquire what the loads saw: see `nvme::is_current`.\n  atomic::fence_system();\n",
            "",
            "the second look at the path is served before the data that it is about",
            "leases",
            "weak",
        ),
        Mutant(
            "pages-left-unsynchronised",
            _COMMAND,
            "  atomic::fence_system();\n  warp::sync(mask);\n}\n",
            "  atomic::fence_system();\n}\n",
            "a lane looks at the path before its neighbours have copied their part of its line",
            "leases",
            "weak",
            4,
        ),
        Mutant(
            "epoch-unlooked",
            _ROWS,
            "  cache::refresh(c, v, mask);\n  for (uint64_t first = mine.begin;",
            "  for (uint64_t first = mine.begin;",
            "a replay serves lines of the file from before a writer came",
            "leases_replayed",
            width=4,
        ),
        Mutant(
            "epoch-unlooked-by-threads",
            _ROWS,
            "  cache::refresh(c, v, mask);\n  // Segments in a row",
            "  // Segments in a row",
            "so does one of the CPU device, whose threads take segments by themselves",
            "leases_replayed",
        ),
        Mutant(
            "epoch-unlooked-by-residents",
            _SHORT_HIT,
            "!holds || epoch != 0",
            "!holds",
            "so does one of a few rows, which has a way of its own",
            "leases_replayed",
            "sc",
            4,
        ),
        Mutant(
            "residents-unvalidated",
            _SHORT_HIT,
            "!holds || epoch != 0",
            "epoch != 0",
            "a gather of a few rows keeps bytes of a frame that was refilled under it",
            "rows_resident",
            "sc",
            4,
        ),
        Mutant(
            "residents-unfenced",
            _SHORT_HIT,
            "  atomic::fence_acquire();\n  const bool holds = still_holds",
            "  const bool holds = still_holds",
            "so does its second look, if the loads may come after it",
            "rows_resident",
            "weak",
            4,
        ),
        Mutant(
            "stream-of-resident-lines",
            _ROWS,
            "piece.bytes != 0 && cache::look_for_absent(g, piece.line, look, at);",
            "piece.bytes != 0;",
            "a gather around the cache misses what was stored to a frame and not written back",
            "rows_streamed",
            "sc",
            4,
        ),
        Mutant(
            "stream-unfenced",
            _ROWS,
            "  cache::finish_loads(mask);\n  const bool current =",
            "  warp::sync(mask);\n  const bool current =",
            "its second look at the path may come before its loads",
            "leases_streamed",
            "weak",
            4,
        ),
        Mutant(
            "stream-behind-the-lease",
            _ROWS,
            "const bool current = absent && nvme::is_current(*way.queue, inside);",
            "const bool current = absent;",
            "it takes pages that another program has got meanwhile",
            "leases_streamed",
            "sc",
            4,
        ),
        Mutant(
            "epoch-unlooked-by-streams",
            _ROWS,
            "  cache::refresh(c, v, mask);\n  const cache::short_way way",
            "  const cache::short_way way",
            "it takes lines from frames that were filled before a writer came",
            "leases_replayed",
            width=4,
        ),
        Mutant(
            "epoch-unlooked-by-elements",
            _ROWS,
            "  cache::refresh(c, v, mask);\n  for (uint64_t first = share.begin;",
            "  for (uint64_t first = share.begin;",
            "so does one of rows of a few elements",
            "leases_replayed",
            width=4,
        ),
        Mutant(
            "sweep-unwaited",
            _LEASE,
            "    // Other warps have the rest.\n",
            "    break;\n",
            "a warp goes on while others are yet to empty frames that it may hit",
            "leases_replayed",
        ),
        Mutant(
            "sweep-counted-early",
            _LEASE,
            "      if (!warp::any(mask, !sweep_chunk(c, v, mask, chunk))) {\n",
            "      if (leads && take_number(&l.done, epoch, chunks) == chunks - 1) {\n"
            "        note_swept(l, epoch);\n"
            "      }\n"
            "      if (!warp::any(mask, !sweep_chunk(c, v, mask, chunk))) {\n",
            "a sweep is over before its last frames are empty",
            "leases_replayed",
        ),
        Mutant(
            "sweep-once",
            _LEASE,
            "counts_for == epoch ? uint32_t(seen) : 0;",
            "uint32_t(seen);",
            "the sweep of a second epoch finds all chunks taken by that of the first",
            "leases_replayed",
        ),
        Mutant(
            "sweep-unsynchronised",
            _LEASE,
            "        // All lanes have emptied their frames before the leader says so.\n"
            "        warp::sync(mask);\n",
            "",
            "a frame that a neighbour's lane has emptied is hit after the sweep",
            "leases_replayed",
            "weak",
            4,
        ),
        Mutant(
            "swept-relaxed",
            _LEASE,
            "is_before(atomic::load_acquire(&l.swept), epoch)",
            "is_before(atomic::load_relaxed(&l.swept), epoch)",
            "a warp that has not swept still hits frames that others have emptied",
            "leases_replayed",
            "weak",
        ),
        Mutant(
            "fills-unswept",
            _WRITE,
            "    if (pending && (tag::state_of(word) == tag::kInvalid || line",
            "    if (pending && (tag::state_of(word) != tag::kValid || line",
            "a fill that began before the epoch is published after the sweep",
            "leases_replayed",
        ),
        Mutant(
            "misses-of-any-launch",
            _MISSES,
            "    if (list_state::launch(seen) != launch) return false;\n",
            "    if (list_state::launch(seen) != launch) launch = list_state::launch(seen);\n",
            "blocks of one launch take the items of another for their own",
            "deferral",
        ),
        Mutant(
            "misses-without-reserve",
            _MISSES,
            "      if (tail - head + others <= uint64_t(1) << m.capacity_log2) {\n",
            "      if (tail - head <= uint64_t(1) << m.capacity_log2) {\n",
            "warps that append together overwrite entries that nobody has taken",
            "deferral",
        ),
        Mutant(
            "misses-of-the-last-turn",
            _MISSES,
            "uint32_t(entry >> 32) == turn_of(m, ticket) &&",
            "entry != 0 &&",
            "an entry of the ring's last turn is taken for the one that is about to be stored",
            "deferral",
        ),
        Mutant(
            "misses-taken-twice",
            _MISSES,
            "ours = atomic::cas_relaxed(&m.head, head, head + count);",
            "ours = atomic::add_relaxed(&m.head, uint64_t(count)) != ~uint64_t(0);",
            "two warps take the same entries, and skip as many",
            "deferral",
        ),
        Mutant(
            "misses-left-unmarked",
            _MISSES,
            "behind = left | list_state::kLeftBehind;",
            "behind = left;",
            "a block leaves although another has appended and left since it found the list empty",
            "deferral",
            "weak",
        ),
        Mutant(
            "misses-mark-unacquired",
            _MISSES,
            "        atomic::cas_acq_rel(&m.state, seen, seen & ~list_state::kLeftBehind);\n"
            "        continue;\n",
            "",
            "the block that entries are left to does not see them, and leaves too",
            "deferral",
            "weak",
        ),
        Mutant(
            "misses-undrained",
            _MISSES,
            "    if (drains) return at_end::kDrains;\n",
            "    if (drains) return at_end::kLeaves;\n",
            "a block that drains leaves before the list is empty",
            "deferral",
            "weak",
        ),
        Mutant(
            "misses-taken-late",
            _MISSES,
            "    block::sync();\n",
            "",
            "a warp still takes misses after another has left for its block: another launch's",
            "deferral_blocks",
            "sc",
            4,
            "random",
        ),
        Mutant(
            "prefetch-index-unchecked",
            _ROWS,
            "  if (row >= p.row_count) return {kNoRow, 0, 0, 0};\n",
            "",
            "an index out of bounds, or one that changes while a launch runs, is taken for a row",
            "deferral_prefetch",
        ),
        Mutant(
            "append-in-two-steps",
            _FILE,
            "    if (atomic::cas_acq_rel(&f.state->size, size, size + nbytes)) "
            "return int64_t(size);\n",
            "    atomic::store_relaxed(&f.state->size, size + nbytes);\n"
            "    return int64_t(size);\n",
            "two appends get the same place",
            "files",
        ),
        Mutant(
            "resident-lines-unserved",
            _FILE,
            "wants && ((served >> warp::lane()) & 1) == 0",
            "false",
            "a lane returns without its line, whose frame was refilled under it",
            "file_records",
            "sc",
            4,
        ),
        Mutant(
            "end-behind-an-old-look",
            _FILE,
            "    if (atomic::cas_acq_rel(&f.state->size, size, end)) return;\n",
            "    atomic::store_relaxed(&f.state->size, end);\n    return;\n",
            "a write that ends before another one's end takes the other's bytes from the file",
            "file_records",
        ),
        Mutant(
            "sync-past-a-begun-write",
            _ASYNC,
            "pending && (in_flight || (dirty && !taken));",
            "pending && in_flight;",
            "a sync returns while a write-back that another warp began is in flight",
            "files",
        ),
        Mutant(
            "sync-of-one-lane",
            _FILE,
            "status_of_all(mask, wait_clean(c, v, mask, s))",
            "wait_clean(c, v, mask, s)",
            "lanes have different answers, and meet at different places",
            "files",
            "sc",
            4,
        ),
        Mutant(
            "share-by-another-mask",
            _FILE,
            "base::opaque(&make_durable)(f.bytes.cache, f.bytes.volume, mask, s)",
            "base::opaque(&make_durable)(f.bytes.cache, f.bytes.volume, active_on(f.bytes.volume),"
            " s)",
            "a lane returns before another one has written its share back",
            "files",
            "sc",
            4,
        ),
        Mutant(
            "around-resident-lines",
            _ABSENT,
            "if (pending) at = probe(g, line);",
            "",
            "a read around the cache misses what was stored to a frame and not written back",
            "files_around",
        ),
        Mutant(
            "around-slot-freed-early",
            _ABSENT,
            _AROUND_COPY + _AROUND_CHECK + _AROUND_RELEASE,
            _AROUND_RELEASE + _AROUND_COPY + _AROUND_CHECK,
            "the next command's data replaces ours in the slot's buffer before we have read it",
            "loads_around",
            "weak",
        ),
        Mutant(
            "around-behind-the-lease",
            _ABSENT,
            "out.ended = mine && nvme::is_current(q, q.data.mapped_base);",
            "out.ended = mine;",
            "pages that were read in place after the lease had ended pass for the file's",
            "leases_around",
        ),
        Mutant(
            "around-behind-the-lease-by-command",
            _ABSENT,
            "again = mine && status != nvme::kTimedOut && !nvme::is_current(q, address);",
            "",
            "so do those of a command that was on its way then",
            "leases_around",
        ),
        Mutant(
            "around-unfenced",
            _ABSENT,
            "if (q.data.leased != 0) finish_loads(mask);",
            "",
            "the second look at the path is served before the bytes that it is about",
            "leases_around",
            "weak",
        ),
        Mutant(
            "around-on-paths-of-some-lanes",
            _ABSENT,
            "const bool in_place = !warp::any(mask, path != nvme::kInPlace);",
            "const bool in_place = path == nvme::kInPlace;",
            "lanes of a warp that see the path change go two ways",
            "leases_around",
            "sc",
            4,
        ),
        Mutant(
            "passed-line-not-waited-for",
            _ACCESS,
            "const uint32_t status = move_lines(c, v, mask, members, nvme::kWrite, t);",
            "uint32_t status = 0;\n  move_lines_detached(c, v, mask, members, nvme::kWrite, t);",
            "a line that is written around the cache loses its frame before it is written",
            "files_passed",
        ),
        Mutant(
            "passed-line-kept",
            _ACCESS,
            "if (!kPasses) publish_fill(c, mine.way, mine.word, Op::kStores);",
            "publish_fill(c, mine.way, mine.word, Op::kStores);",
            "others find, store to and evict a line that passes through a frame",
            "stores_around",
        ),
        Mutant(
            "passed-lines-in-frames-of-their-own",
            _SETS,
            "why == purpose::kPass && s.resident == all && s.moving != 0",
            "false",
            "lines that are written around the cache at a time evict as many others of their set",
            "passing_in_turns",
        ),
        Mutant(
            "rows-published-unfenced",
            _DIRECTION,
            "  atomic::fence_system();\n" + _EACH_PART,
            _EACH_PART,
            "the engine sees a ticket before its list and arguments",
            "batches",
            "weak",
        ),
        Mutant(
            "rows-published-to-the-device",
            _DIRECTION,
            "  atomic::fence_system();\n" + _EACH_PART,
            "  atomic::fence();\n" + _EACH_PART,
            "the same: a fence of the device means nothing to the host",
            "batches",
            "weak",
        ),
        Mutant(
            "rows-of-one-lane",
            _DIRECTION,
            "  block::sync();\n  if (leads) publish",
            "  if (leads) publish",
            "the lists of other lanes and warps are not complete yet",
            "batches",
            "weak",
            width=4,
        ),
        Mutant(
            "rows-slots-overdrawn",
            _DIRECTION,
            "const bool fits = (seen & 0xffff) + parts <= d.shared.count;",
            "const bool fits = parts <= d.shared.count;",
            "more tickets than slots: a block looks for a free slot for ever",
            "batches",
        ),
        Mutant(
            "rows-slot-held-twice",
            _DIRECTION,
            "atomic::cas_acq_rel(held, 0u, 1u)) return slot;",
            "(atomic::store_relaxed(held, 1u), true)) return slot;",
            "two batches have one slot",
            "batches",
        ),
        Mutant(
            "rows-slot-freed-relaxed",
            _DIRECTION,
            "atomic::store_release(&d.states[slot].held, 0u);",
            "atomic::store_relaxed(&d.states[slot].held, 0u);",
            "a slot's list is overwritten while the engine may still read it",
            "batches",
            "weak",
        ),
        Mutant(
            "rows-tickets-taken-relaxed",
            _DIRECTION,
            "atomic::cas_acq_rel(&d.taken, seen,",
            "atomic::cas_relaxed(&d.taken, seen,",
            "the same, on the other side",
            "batches",
            "weak",
        ),
        Mutant(
            "rows-read-unfenced",
            _DIRECTION,
            "    atomic::fence_system();\n    failed +=",
            "    failed +=",
            "rows are read before they have arrived",
            "batches",
            "weak",
        ),
        Mutant(
            "rows-done-of-any-turn",
            _DIRECTION,
            "atomic::load_relaxed_system(&r.done) != ticket",
            "atomic::load_relaxed_system(&r.done) == 0",
            "the end of the slot's last batch counts as that of the present one",
            "batches",
        ),
        Mutant(
            "rows-slot-freed-early",
            _DIRECTION,
            "  block::sync();\n  if (leads) give_back",
            "  if (leads) give_back",
            "a slot is used again while lanes still read its statuses",
            "batches",
            "weak",
            width=4,
        ),
        Mutant(
            "rows-chain-kept",
            _DIRECTION,
            "    slot = next;\n",
            "    (void)next;\n",
            "the slots of later parts stay taken for ever",
            "batches",
        ),
        Mutant(
            "rows-after-nothing",
            _DIRECTION,
            "  atomic::store_plain(&to.after, s.after);\n",
            "  atomic::store_plain(&to.after, uint64_t(0));\n",
            "a batch overtakes those of the other direction that its block submitted before",
            "batches_order",
        ),
        Mutant(
            "rows-after-the-ticket",
            _DIRECTION,
            "  s.after = after;\n",
            "  if (leads && d.other != nullptr) {\n"
            "    s.after = atomic::load_relaxed(&d.other->taken) >> 16;\n"
            "  }\n",
            "two batches of two blocks come after each other, and the engine takes neither",
            "batches_order",
        ),
        Mutant(
            "rows-claimed-twice",
            _DIRECTION,
            "atomic::cas_acq_rel(issued, seen, seen | issue::kClaimed)) {",
            "(atomic::store_relaxed(issued, seen | issue::kClaimed), true)) {",
            "two blocks synchronize one batch",
            "batches_oldest",
        ),
        Mutant(
            "rows-left-claimed",
            _DIRECTION,
            "      atomic::store_release(&d.states[first].issued, issued & ~issue::kClaimed);\n",
            "",
            "a batch that was late can never be synchronized",
            "batches_late",
        ),
        Mutant(
            "rows-late-unmarked",
            _DIRECTION,
            "      if (!in_vain) leave_mark(d, &d.late, handle::word(ticket, slot));\n",
            "",
            "each wait for an engine that has stopped takes its whole time",
            "batches_late",
        ),
        Mutant(
            "rows-full-unmarked",
            _DIRECTION,
            "      if (!in_vain) leave_mark(d, &d.full, seen);\n",
            "",
            "each wait for a slot that nobody gives back takes its whole time",
            "batches_full",
        ),
        Mutant(
            "rows-late-for-ever",
            _DIRECTION,
            "return atomic::load_relaxed_system(&r.done) < handle::ticket_of(late);",
            "return atomic::load_relaxed_system(&r.done) < ~uint64_t(0);",
            "waits fail at once although the engine has answered",
            "batches_late",
        ),
        Mutant(
            "rows-late-of-one-turn",
            _DIRECTION,
            "return atomic::load_relaxed_system(&r.done) < handle::ticket_of(late);",
            "return atomic::load_relaxed_system(&r.done) != handle::ticket_of(late);",
            "the same, once the slot is used again",
            "batches_late",
        ),
        Mutant(
            "rows-look-unheeded",
            _DIRECTION,
            "  return atomic::load_relaxed_system(&d.log.read) != atomic::load_relaxed(&d.looked);",
            "  return atomic::load_relaxed(&d.looked) == ~0u;",
            "waits fail at once although the host has looked",
            "batches_late",
        ),
        Mutant(
            "rows-full-of-any-turn",
            _DIRECTION,
            "const bool in_vain = !fits && (late || seen == full);",
            "const bool in_vain = !fits && (late || full != 0);",
            "a wait for a slot fails at once although slots were given back meanwhile",
            "batches_full",
        ),
        Mutant(
            "rows-one-look-for-the-oldest",
            _DIRECTION,
            "if (mix == before) return kRefused;",
            "return kRefused;",
            "a block finds no batch although one waits for it",
            "batches_oldest",
            "weak",
        ),
        Mutant(
            "rows-newest-first",
            _DIRECTION,
            "issued < oldest)) {",
            "issued > oldest)) {",
            "the oldest batch is not the one that was prefetched first",
            "batches_grid",
        ),
        Mutant(
            "rows-met-relaxed",
            _DIRECTION,
            "atomic::add_release(&d.meeting, uint64_t(1));",
            "atomic::add_relaxed(&d.meeting, uint64_t(1));",
            "the last block publishes ids and rows that it does not see",
            "batches_grid",
            "weak",
        ),
        Mutant(
            "rows-met-unacquired",
            _DIRECTION,
            "  // The last block acquires what all others have released.\n  atomic::fence();\n",
            "",
            "the same, on the other side",
            "batches_grid",
            "weak",
        ),
        Mutant(
            "rows-parted-relaxed",
            _DIRECTION,
            "atomic::store_release(&d.meeting, ((before >> 32) + 1) << 32);",
            "atomic::store_relaxed(&d.meeting, ((before >> 32) + 1) << 32);",
            "blocks read rows that only the last block has acquired",
            "batches_grid",
            "weak",
        ),
        Mutant(
            "rows-parted-unacquired",
            _DIRECTION,
            "const uint64_t seen = atomic::load_acquire(&d.meeting);",
            "const uint64_t seen = atomic::load_relaxed(&d.meeting);",
            "the same, on the other side",
            "batches_grid",
            "weak",
        ),
        Mutant(
            "rows-left-at-the-meeting",
            _DIRECTION,
            "atomic::cas_relaxed(&d.meeting, seen, seen - 1)) {",
            "true) {",
            "a block that has left counts at the next launch's meeting",
            "batches_missing",
        ),
        Mutant(
            "rows-elsewhere",
            _DIRECTION,
            "atomic::store_plain(&to.place, slot + 1);",
            "atomic::store_plain(&to.place, slot);",
            "the engine reads another slot's list",
            "batches",
        ),
        Mutant(
            "rows-wait-without-limit",
            _DIRECTION,
            "    if (in_vain || limit.passed()) {\n      if (!in_vain) leave_mark(d, &d.late",
            "    if (false) {\n      if (!in_vain) leave_mark(d, &d.late",
            "a block waits for ever for an engine that has stopped",
            "batches_stop",
        ),
        Mutant(
            "rows-slot-without-limit",
            _DIRECTION,
            "    if (in_vain || limit.passed()) {\n      if (!in_vain) leave_mark(d, &d.full",
            "    if (false) {\n      if (!in_vain) leave_mark(d, &d.full",
            "so does one that waits for a slot",
            "batches_stop",
        ),
        Mutant(
            "rows-taken-relaxed",
            _HOST_REGIONS,
            "atomic::load_acquire(&from.ready) != ticket",
            "atomic::load_relaxed(&from.ready) != ticket",
            "the engine reads the arguments before they are stored",
            "batches",
            "weak",
        ),
        Mutant(
            "rows-finished-relaxed",
            _HOST_REGIONS,
            "atomic::store_release(&results[slot(taken)].done, taken.ready);",
            "atomic::store_relaxed(&results[slot(taken)].done, taken.ready);",
            "the end of a batch overtakes its rows",
            "batches",
            "weak",
        ),
    )
}
"""By name."""
