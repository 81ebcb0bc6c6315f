// A replacement policy that breaks every rule that a user's policy could break.
//
// It chooses ways that are pinned, busy, dirty, empty or do not exist, stores garbage in its words
// and in the set's control word, and asks to clean lines that must not be cleaned. The cache must
// stay intact.
#pragma once

#include "flashwarp/cache/policy.cuh"

namespace fw::simulator {

struct hostile_policy {
  static constexpr bool kKeepsWords = true;
  // Names a way when it is cut to 32 bits.
  static constexpr uint64_t kFar = uint64_t(1) << 40;

  static void on_hit(const cache::geometry& g, uint64_t way, uint64_t seen) {
    atomic::store_relaxed(cache::policy_word(g, way), uint32_t(seen));
    const cache::hit_view all = {g};
    all.set_word(way + g.set_count * g.ways, ~0u, all.word(kFar));
    all.mark(kFar + way);
  }
  static void on_fill(cache::set_view& s, uint32_t way) {
    s.hand = ~s.hand;
    s.next = way;
    // Ways of other sets, and of none.
    s.set_word(s.ways() + way, ~0u, s.word(kFar));
    s.clear_mark(s.ways() + s.line_at(kFar));
  }
  static uint32_t choose_victim(cache::set_view& s) {
    // It keeps no state of its own, so that a seed repeats its run.
    const uint32_t dice = uint32_t((s.hand + s.line) * 0x9E3779B1u);
    s.hand = 0x80000000u | dice;
    s.next = dice >> 27;
    switch ((dice >> 8) % 4) {
      case 0:
        return cache::kNoWay;
      case 1:
        return s.ways() + (dice >> 30);
      case 2:
        s.candidates = ~s.candidates;
        s.dirty = ~s.dirty;
        return base::lowest_bit(s.candidates);
      default:
        return (dice >> 16) % s.ways();
    }
  }
};

}  // namespace fw::simulator
