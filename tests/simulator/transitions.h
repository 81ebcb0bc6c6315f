// Words that threads change concurrently (tags, places of the tier, slots): their text, and the
// changes that are allowed. The memory checks every change.
#pragma once

#include <string>

#include "flashwarp/array.cuh"
#include "memory.h"
#include "scheduler.h"

namespace fw::simulator {

// Tags.

inline std::string describe_tag(uint64_t word) {
  constexpr const char* kStates[] = {"INVALID", "BUSY", "VALID", "?"};
  std::string text = kStates[word >> 62];
  text += " line " + std::to_string(cache::tag::line_of(word)) + " generation " +
          std::to_string((word & cache::tag::kGenerationMask) >> cache::tag::kLineBits);
  const uint64_t pins = (word & cache::tag::kPinMask) / cache::tag::kPinOne;
  if (pins != 0) text += " pins " + std::to_string(pins);
  if ((word & cache::tag::kReferenced) != 0) text += " referenced";
  if ((word & cache::tag::kDirty) != 0) text += " dirty";
  if ((word & cache::tag::kWriting) != 0) text += " writing";
  return text;
}

// What `check_tag` is about.
struct TagRules {
  const cache::line_cache* cache = nullptr;
  bool may_drop = false;  // dirty lines, while a scenario gives them up
};

inline void check_tag(void* owner, uint64_t way, uint64_t before, uint64_t after) {
  namespace tag = cache::tag;
  const TagRules& rules = *static_cast<const TagRules*>(owner);
  const cache::geometry& geometry = rules.cache->geometry;
  const auto wrong = [&](const char* what) {
    scheduler.fail(std::string(what) + ": tags[" + std::to_string(way) + "] from " +
                   describe_tag(before) + " to " + describe_tag(after));
  };
  const uint64_t from = tag::state_of(before);
  const uint64_t to = tag::state_of(after);
  // A hit may mark a line that has just lost its frame: the mark means nothing there.
  if (((before ^ after) & ~tag::kReferenced) == 0) return;
  if (from == tag::kValid && to != tag::kValid) {
    if ((before & tag::kPinMask) != 0) wrong("a pinned line loses its frame");
    if ((before & tag::kWriting) != 0) wrong("a line loses its frame while it is written");
    if ((before & tag::kDirty) != 0 && !rules.may_drop) wrong("a dirty line is dropped");
  }
  if (from == tag::kBusy && to == tag::kBusy) wrong("two fills own a frame");
  if (from == tag::kInvalid && to == tag::kValid) wrong("a line appears without a fill");
  if (to == tag::kInvalid || tag::line_of(before) == tag::line_of(after)) return;
  const uint64_t first = way / geometry.ways * geometry.ways;
  for (uint64_t other = first; other < first + geometry.ways; ++other) {
    const uint64_t word = geometry.tags[other];
    if (other == way || tag::state_of(word) == tag::kInvalid) continue;
    if (tag::line_of(word) == tag::line_of(after)) wrong("two ways hold one line");
  }
}

// Places of the host tier.

inline std::string describe_place(uint64_t word) {
  constexpr const char* kStates[] = {"EMPTY", "ENTERING", "HELD", "LEAVING"};
  return std::string(kStates[word >> 62]) + " line " + std::to_string(cache::tier::line_of(word)) +
         " stamp " + std::to_string(cache::tier::stamp_of(word));
}

inline void check_place(void*, uint64_t place, uint64_t before, uint64_t after) {
  namespace tier = cache::tier;
  const uint64_t from = tier::state_of(before);
  const uint64_t to = tier::state_of(after);
  const bool goes_on = (from == tier::kEmpty && to == tier::kEntering) ||
                       (from == tier::kEntering && to == tier::kHeld) ||
                       (from == tier::kHeld && to != tier::kHeld) ||
                       (from == tier::kLeaving && to == tier::kEmpty);
  if (goes_on) return;
  scheduler.fail("tier[" + std::to_string(place) + "] from " + describe_place(before) + " to " +
                 describe_place(after));
}

// Slots.

inline std::string describe_slot(uint64_t word) {
  constexpr const char* kPhases[] = {"FREE", "WRITTEN", "DONE", "?"};
  std::string text =
      std::string(kPhases[word & nvme::slot::kPhaseMask]) + " turn " + std::to_string(word >> 32);
  if (nvme::slot::is_detached(word)) text += " detached";
  if (nvme::slot::status_of(word) != 0) {
    text += " status " + std::to_string(nvme::slot::status_of(word));
  }
  return text;
}

inline void check_slot(void* owner, uint64_t entry, uint64_t before, uint64_t after) {
  using namespace nvme;
  const auto& q = *static_cast<const queue_pair*>(owner);
  const uint64_t turn = before >> 32;
  const slot::phase from = slot::phase_of(before);
  const slot::phase to = slot::phase_of(after);
  const uint64_t next = next_turn(q, uint32_t(turn) << q.depth_log2);
  const bool goes_on = (from == slot::kFree && to == slot::kWritten && after >> 32 == turn) ||
                       (from == slot::kWritten && to == slot::kDone && after >> 32 == turn) ||
                       (from == slot::kDone && to == slot::kFree && after >> 32 == next);
  if (goes_on) return;
  scheduler.fail("slots[" + std::to_string(entry) + "] from " + describe_slot(before) + " to " +
                 describe_slot(after));
}

// Doorbells: word 0 is the SQ tail, word 32 the CQ head. Entries before the head are the
// controller's again.
inline constexpr uint32_t kCqDoorbell = 32;

inline void check_doorbell(void* owner, uint64_t word, uint64_t before, uint64_t after) {
  if (word != kCqDoorbell) return;
  const auto& q = *static_cast<const nvme::queue_pair*>(owner);
  const uint32_t mask = (1u << q.depth_log2) - 1;
  for (uint32_t e = uint32_t(before); e != uint32_t(after); e = (e + 1) & mask) {
    memory.check_handed_over(&q.cq[e], sizeof(nvme::completion));
  }
}

}  // namespace fw::simulator
