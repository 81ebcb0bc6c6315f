// Replacement: which frame of a set the next fill takes. Called with the set's lock held.
//
// `clock`: the hand passes referenced lines once (clearing the mark) and takes the first that is
// clean, unpinned and not in flight. Two rounds see every line unreferenced, so the scan is
// bounded.
#pragma once

#include "flashwarp/cache/line_state.cuh"

namespace fw::cache {

struct victim {
  uint32_t way;  // valid when `found` or `dirty`
  bool found;    // the frame may be taken at once
  bool dirty;    // nothing clean: this line wants a write-back first
};

struct clock_policy {
  // `words` are the tags of the set, `hand` the position to start from.
  FW_DEVICE static victim choose(uint64_t* words, uint32_t ways, uint32_t hand) {
    victim result = {0, false, false};
    for (uint32_t step = 0; step < 2 * ways; step++) {
      const uint32_t way = hand + step < ways ? hand + step : (hand + step) % ways;
      const uint64_t word = atomic::load_relaxed(&words[way]);
      if (tag::is_replaceable(word)) {
        const bool second_chance =
            tag::state_of(word) == tag::kValid && (word & tag::kReferenced) != 0 && step < ways;
        if (!second_chance) return {way, true, false};
        update(
            &words[way], [=](uint64_t w) { return tag::identity_of(w) == tag::identity_of(word); },
            [](uint64_t w) { return w & ~tag::kReferenced; });
      } else if (tag::is_cleanable(word) && !result.dirty) {
        result = {way, false, true};
      }
    }
    return result;
  }

  // A hit marks the line, once: the mark is already there for every hit until the hand passes.
  FW_DEVICE static void on_hit(uint64_t* word, uint64_t seen) {
    if ((seen & tag::kReferenced) == 0) atomic::or_relaxed(word, tag::kReferenced);
  }
};

}  // namespace fw::cache
