// What a replacement policy may see and change: the cache in a hit, one set in a fill.
//
// Each way is checked in every build. A way that does not exist reads as 0, is not stored to, and
// is counted.
#pragma once

#include "flashwarp/cache/geometry.cuh"
#include "flashwarp/cache/line_state.cuh"

namespace fw::cache {

inline constexpr uint32_t kNoWay = ~uint32_t(0);

// The bits of a set's control word that belong to the policy.
inline constexpr uint32_t kHandBits = ~(1u << 31);

// The most iterations of all loops in one call of a policy written in Python. Three nested loops
// over the ways of a set of 16 make 4368.
inline constexpr uint32_t kPolicySteps = 1u << 14;

// Counts a policy's request for a way or word that does not exist. Any thread.
FW_DEVICE void refuse(const geometry& g) { atomic::add_relaxed(policy_refusals(g), uint64_t(1)); }

namespace detail {

// What both views do to way `i` of the cache, after their checks.
FW_DEVICE uint32_t load_word(const geometry& g, uint64_t i) {
  return atomic::load_relaxed(policy_word(g, i));
}
FW_DEVICE bool change_word(const geometry& g, uint64_t i, uint32_t mask, uint32_t bits) {
  uint32_t* at = policy_word(g, i);
  const uint32_t seen = atomic::load_relaxed(at);
  return atomic::cas_acq_rel(at, seen, (seen & ~mask) | bits);
}

}  // namespace detail

// The cache, for `on_hit` of a user's policy. Ways count in the whole cache.
struct hit_view {
  const cache::geometry& geometry;

  FW_DEVICE uint64_t ways() const { return geometry.ways; }
  FW_DEVICE uint32_t word(uint64_t way) const {
    return has_word(way) ? detail::load_word(geometry, way) : 0;
  }
  // Tries once: if that fails, another hit has stored.
  FW_DEVICE void set_word(uint64_t way, uint32_t mask, uint32_t bits) const {
    if (has_word(way)) detail::change_word(geometry, way, mask, bits);
  }
  FW_DEVICE void mark(uint64_t way) const {
    if (has_way(way)) atomic::or_relaxed(&geometry.tags[way], tag::kReferenced);
  }

 private:
  FW_DEVICE bool has_way(uint64_t way) const {
    if (way < geometry.set_count * geometry.ways) return true;
    refuse(geometry);
    return false;
  }
  FW_DEVICE bool has_word(uint64_t way) const {
    if constexpr (FW_POLICY_WORDS == 0) way = ~uint64_t(0);
    return has_way(way);
  }
};

// A set, for its policy, while a fill holds its lock. Bit w of a mask stands for way w.
struct set_view {
  const cache::geometry& geometry;
  const uint64_t first;  // index of the set's first way in the cache
  const uint64_t line;   // the line of the fill
  uint32_t resident;     // ways that hold a line, or that a fill has taken
  uint32_t candidates;   // ways that may be chosen: clean ones; if none is clean, dirty ones
  uint32_t referenced;   // ways whose mark is set
  uint32_t dirty;        // ways that may be chosen after a write-back
  uint32_t hand;         // 31 bits of the set that belong to the policy; 0 at first
  // choose_victim may set this to the way that it expects to choose next. If that way is dirty, its
  // write-back starts now, so that the next fill does not wait for it.
  uint32_t next;
  const bool prefetched;  // the fill is a prefetch: the line's first hit is its use
  // The tag words of the first ways, as the look at the set has loaded them.
  uint64_t words[4];
  uint32_t moving = 0;  // ways that are being filled or written back

  FW_DEVICE uint32_t ways() const { return geometry.ways; }
  FW_DEVICE static bool has(uint32_t mask, uint64_t way) {
    return way < 32 && ((mask >> way) & 1) != 0;
  }

  FW_DEVICE uint32_t word(uint64_t way) const {
    return has_word(way) ? detail::load_word(geometry, first + way) : 0;
  }
  // Replaces the bits of `mask`. Repeats while hits change other bits: each failure is a hit.
  FW_DEVICE void set_word(uint64_t way, uint32_t mask, uint32_t bits) const {
    if (!has_word(way)) return;
    while (!detail::change_word(geometry, first + way, mask, bits)) {
    }
  }
  FW_DEVICE uint64_t line_at(uint64_t way) const {
    return has_way(way) ? tag::line_of(atomic::load_relaxed(&geometry.tags[first + way])) : 0;
  }
  // Clears the mark that a hit has set.
  FW_DEVICE void clear_mark(uint64_t way) {
    if (!has_way(way)) return;
    referenced &= ~(1u << way);
    atomic::and_relaxed(&geometry.tags[first + way], ~tag::kReferenced);
  }

  // The tag word of `way`, without another trip to memory if it is known. It may be old.
  FW_DEVICE uint64_t seen(uint32_t way) const {
    if (way >= 4) return atomic::load_relaxed(&geometry.tags[first + way]);
    const uint64_t low = (way & 1) == 0 ? words[0] : words[1];
    const uint64_t high = (way & 1) == 0 ? words[2] : words[3];
    const uint64_t word = (way & 2) == 0 ? low : high;
    // `clear_mark` has cleared the mark in memory.
    return has(referenced, way) ? word : word & ~tag::kReferenced;
  }

  FW_DEVICE bool has_way(uint64_t way) const {
    if (way < geometry.ways) return true;
    refuse(geometry);
    return false;
  }
  FW_DEVICE bool has_word(uint64_t way) const {
    if constexpr (FW_POLICY_WORDS == 0) way = ~uint64_t(0);
    return has_way(way);
  }
};

}  // namespace fw::cache
