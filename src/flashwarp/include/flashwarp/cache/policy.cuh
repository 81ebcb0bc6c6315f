// Replacement: which line of a set makes room for the next fill. Six policies, or your own.
//
// A policy is a struct of static functions, chosen at compile time (FW_POLICY):
//   void on_hit(const geometry&, uint64_t way, uint64_t seen)   a line was used; `way` counts in
//   the
//        whole cache and `seen` is its tag word. No lock is held: any number of threads at a time.
//   void on_fill(set_view&, uint32_t way)          a fill has taken `way` of the set
//   uint32_t choose_victim(set_view&)              one of `candidates`, which are never none
// and two constants, each false when it is left out: `kKeepsWords`, whether it uses the word a line
// that `policy_word` finds; `kBornReferenced`, whether a line is filled with its mark set.
//
// The set's lock is held during `on_fill` and `choose_victim`; neither may wait. Nothing that a
// policy answers can break the cache: the fill takes a way only if it is a candidate, by a
// compare-and-swap that looks again. Any other answer is refused, counted, and replaced by the
// lowest candidate. Whatever a policy keeps is a hint: concurrent hits may overwrite each other.
//
// A policy of the user's own reaches memory by `set_view` and `hit_view`, which check each way in
// every build: a way that is not there reads as 0, is not stored to, and is counted. Our own
// policies skip the check in hits, where the way is the one that the probe has found.
#pragma once

#include "flashwarp/cache/geometry.cuh"
#include "flashwarp/cache/line_state.cuh"

namespace fw::cache {

inline constexpr uint32_t kNoWay = ~uint32_t(0);

// The bits of a set that are the policy's own.
inline constexpr uint32_t kHandBits = ~(1u << 31);

// The most rounds that all loops of a policy written in Python make in one call. Loops over all
// ways, three deep, make 4368 in a set of 16.
inline constexpr uint32_t kPolicySteps = 1u << 14;

// Counts a request of a policy for what is not there. Any thread.
FW_DEVICE void refuse(const geometry& g) { atomic::add_relaxed(policy_refusals(g), uint64_t(1)); }

namespace detail {

// What the two views below do to way `i` of the cache, which is there.
FW_DEVICE uint32_t load_word(const geometry& g, uint64_t i) {
  return atomic::load_relaxed(policy_word(g, i));
}
FW_DEVICE bool change_word(const geometry& g, uint64_t i, uint32_t mask, uint32_t bits) {
  uint32_t* at = policy_word(g, i);
  const uint32_t seen = atomic::load_relaxed(at);
  return atomic::cas_acq_rel(at, seen, (seen & ~mask) | bits);
}

}  // namespace detail

// The cache as `on_hit` of a user's policy sees it. Ways count in the whole cache.
struct hit_view {
  const cache::geometry& geometry;

  FW_DEVICE uint64_t ways() const { return geometry.ways; }
  FW_DEVICE uint32_t word(uint64_t way) const {
    return has_word(way) ? detail::load_word(geometry, way) : 0;
  }
  // One try: when it fails, another hit has stored.
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

// A set as its policy sees it while a fill holds its lock. Bit w of a mask stands for way w.
struct set_view {
  const cache::geometry& geometry;
  const uint64_t first;  // index of the set's first way in the cache
  const uint64_t line;   // that the fill brings
  uint32_t resident;     // ways that hold a line, or get one
  uint32_t candidates;   // ways that may be chosen: clean lines, or else dirty ones to be cleaned
  uint32_t referenced;   // ways whose mark is set
  uint32_t dirty;        // ways that could be chosen after a write-back
  uint32_t hand;         // 31 bits of the set that are the policy's own; 0 at first
  // choose_victim may name the way that it expects to choose after this one. If that is dirty, its
  // write-back starts now, so that the next fill need not wait for it.
  uint32_t next;
  const bool prefetched;  // the fill is ahead of its use: the first hit is that use

  FW_DEVICE uint32_t ways() const { return geometry.ways; }
  FW_DEVICE static bool has(uint32_t mask, uint64_t way) {
    return way < 32 && ((mask >> way) & 1) != 0;
  }

  FW_DEVICE uint32_t word(uint64_t way) const {
    return has_word(way) ? detail::load_word(geometry, first + way) : 0;
  }
  // Replaces the bits of `mask`. Hits may change other bits meanwhile: each failure is one of them.
  FW_DEVICE void set_word(uint64_t way, uint32_t mask, uint32_t bits) const {
    if (!has_word(way)) return;
    while (!detail::change_word(geometry, first + way, mask, bits)) {
    }
  }
  FW_DEVICE uint64_t line_at(uint64_t way) const {
    return has_way(way) ? tag::line_of(atomic::load_relaxed(&geometry.tags[first + way])) : 0;
  }
  // Takes the mark of a hit away, as the clock hand does when it passes.
  FW_DEVICE void clear_mark(uint64_t way) {
    if (!has_way(way)) return;
    referenced &= ~(1u << way);
    update(
        &geometry.tags[first + way], [](uint64_t w) { return (w & tag::kReferenced) != 0; },
        [](uint64_t w) { return w & ~tag::kReferenced; });
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

// Lines in the order of time, by a number in the low kBits of each one's policy word: the higher,
// the later. Before the numbers run out they are given anew, from 1 on, in the same order.
template <uint32_t kBits>
struct sequence {
  static constexpr uint32_t kMask = uint32_t((uint64_t(1) << kBits) - 1);

  FW_DEVICE static uint32_t of(const set_view& s, uint32_t way) { return s.word(way) & kMask; }

  // The first of the ways in `among` whose number is at least `from`; kNoWay when there is none.
  FW_DEVICE static uint32_t first_of(const set_view& s, uint32_t among, uint32_t from = 0) {
    uint32_t best = kNoWay;
    uint32_t best_number = 0;
    for (uint32_t rest = among; rest != 0; rest &= rest - 1) {
      const uint32_t way = base::lowest_bit(rest);
      const uint32_t number = of(s, way);
      if (number < from || (best != kNoWay && number >= best_number)) continue;
      best = way;
      best_number = number;
    }
    return best;
  }

  // Makes `way` the last. `position` is a number that the caller keeps, to be given anew too.
  FW_DEVICE static void put_last(const set_view& s, uint32_t way, uint32_t* position = nullptr) {
    const uint32_t others = s.resident & ~(1u << way);
    uint32_t last = 0;
    for (uint32_t rest = others; rest != 0; rest &= rest - 1) {
      const uint32_t number = of(s, base::lowest_bit(rest));
      if (number > last) last = number;
    }
    if (last == kMask) last = renumber(s, others, position);
    s.set_word(way, kMask, last + 1);
  }

 private:
  // Returns the highest number given, the count of the ways.
  FW_DEVICE static uint32_t renumber(const set_view& s, uint32_t ways, uint32_t* position) {
    uint32_t before = 0;
    uint32_t from = 0;
    uint32_t count = 0;
    while (ways != 0) {
      const uint32_t way = first_of(s, ways);
      from = of(s, way);
      if (position != nullptr && from < *position) before++;
      s.set_word(way, kMask, ++count);
      ways &= ~(1u << way);
    }
    if (position != nullptr) *position = before + 1;
    return count;
  }
};

// A first use that a prefetch was for counts as no hit: the fill has paid for it.
inline constexpr uint32_t kUnusedBit = 14;
inline constexpr uint32_t kUnused = 1u << kUnusedBit;
FW_DEVICE bool is_first_use(uint32_t* word, uint32_t seen) {
  if ((seen & kUnused) == 0) return false;
  atomic::cas_acq_rel(word, seen, seen & ~kUnused);
  return true;
}

// The clock (Corbato 1968; second chance): the hand passes marked lines once, clearing their marks,
// and takes the first unmarked one. Two rounds see every line unmarked. A hit costs nothing when
// the mark is set, which it is until the hand passes.
struct clock_policy {
  static constexpr bool kBornReferenced = true;

  FW_DEVICE static void on_hit(const geometry& g, uint64_t way, uint64_t seen) {
    if ((seen & tag::kReferenced) == 0) atomic::or_relaxed(&g.tags[way], tag::kReferenced);
  }

  FW_DEVICE static void on_fill(set_view&, uint32_t) {}

  FW_DEVICE static uint32_t choose_victim(set_view& s) {
    uint32_t way = s.hand;
    for (uint32_t step = 0; step < 2 * s.ways(); step++, way = after(s, way)) {
      if (!set_view::has(s.candidates, way)) continue;
      if (set_view::has(s.referenced, way)) {
        s.clear_mark(way);
        continue;
      }
      s.hand = after(s, way);
      if (!set_view::has(s.referenced, s.hand)) s.next = s.hand;
      return way;
    }
    return kNoWay;
  }

 private:
  FW_DEVICE static uint32_t after(const set_view& s, uint32_t way) {
    return way + 1 < s.ways() ? way + 1 : 0;
  }
};

// First in, first out, exactly, within each set.
struct fifo_policy {
  static constexpr bool kKeepsWords = true;
  using order = sequence<16>;

  FW_DEVICE static void on_hit(const geometry&, uint64_t, uint64_t) {}

  FW_DEVICE static void on_fill(set_view& s, uint32_t way) { order::put_last(s, way); }

  FW_DEVICE static uint32_t choose_victim(set_view& s) {
    const uint32_t way = order::first_of(s, s.candidates);
    s.next = order::first_of(s, (s.candidates | s.dirty) & ~(1u << way));
    return way;
  }
};

// Least recently used, exactly within each set while hits come one at a time: hits that meet may
// share a number. A hit loads the words of its set (16 bytes for 4 ways), and stores one unless the
// line was the last used already: a price that the other policies do not ask.
template <uint32_t kBits>
struct basic_lru_policy {
  static constexpr bool kKeepsWords = true;
  using order = sequence<kBits>;

  FW_DEVICE static void on_hit(const geometry& g, uint64_t way, uint64_t) {
    // The number of ways is a power of two.
    const uint64_t first = way & ~uint64_t(g.ways - 1);
    uint32_t mine = 0;
    uint32_t last = 0;
    for (uint32_t i = 0; i < g.ways; i++) {
      const uint32_t number = atomic::load_relaxed(policy_word(g, first + i));
      if (first + i == way) {
        mine = number;
      } else if (number > last) {
        last = number;
      }
    }
    // Numbers have run out: hits leave no trace until a fill, which holds the lock, gives new ones.
    if (mine > last || last == order::kMask) return;
    atomic::store_relaxed(policy_word(g, way), last + 1);
  }

  FW_DEVICE static void on_fill(set_view& s, uint32_t way) { order::put_last(s, way); }

  FW_DEVICE static uint32_t choose_victim(set_view& s) {
    const uint32_t way = order::first_of(s, s.candidates);
    s.next = order::first_of(s, (s.candidates | s.dirty) & ~(1u << way));
    return way;
  }
};
using lru_policy = basic_lru_policy<32>;

// Any line with equal chance, from a number that each set draws on. Repeatable; no words, and hits
// cost nothing.
struct random_policy {
  FW_DEVICE static void on_hit(const geometry&, uint64_t, uint64_t) {}

  FW_DEVICE static void on_fill(set_view&, uint32_t) {}

  FW_DEVICE static uint32_t choose_victim(set_view& s) {
    // A linear congruential step (Knuth's 1664525), then the finaliser of MurmurHash3 with the
    // set's number, so that sets do not go in step.
    s.hand = (s.hand * 1664525u + 1013904223u) & 0x7FFFFFFFu;
    uint32_t mixed = s.hand ^ uint32_t((s.first / s.ways()) * 0x9E3779B9u);
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6Bu;
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35u;
    mixed ^= mixed >> 16;
    const uint64_t count = base::popcount(s.candidates);
    uint32_t rest = s.candidates;
    for (uint32_t skip = uint32_t((mixed * count) >> 32); skip != 0; skip--) rest &= rest - 1;
    if (s.dirty != 0) s.next = base::lowest_bit(s.dirty);
    return base::lowest_bit(rest);
  }
};

// SIEVE (Zhang et al., NSDI 2024), exactly, within each set: lines stay in the order of their
// fills; the hand goes from the oldest to the newest, clears the marks (`visited`) that it meets,
// and takes the first line without one; new lines come behind the newest, unmarked. So a line that
// nobody asks for again goes at the hand's next visit, and one that is asked for is never moved. A
// hit costs what it costs the clock.
struct sieve_policy {
  static constexpr bool kKeepsWords = true;
  using order = sequence<12>;

  FW_DEVICE static void on_hit(const geometry& g, uint64_t way, uint64_t seen) {
    if ((seen & tag::kReferenced) != 0) return;
    uint32_t* word = policy_word(g, way);
    if (is_first_use(word, atomic::load_relaxed(word))) return;
    atomic::or_relaxed(&g.tags[way], tag::kReferenced);
  }

  FW_DEVICE static void on_fill(set_view& s, uint32_t way) {
    order::put_last(s, way, &s.hand);
    s.set_word(way, kUnused, s.prefetched ? kUnused : 0);
  }

  FW_DEVICE static uint32_t choose_victim(set_view& s) {
    // The hand is the number from which on it looks. Each step clears a mark, wraps, or is the
    // last.
    for (uint32_t step = 0; step < 2 * s.ways(); step++) {
      const uint32_t way = order::first_of(s, s.candidates, s.hand);
      s.hand = way == kNoWay ? 0 : order::of(s, way) + 1;
      if (way == kNoWay) continue;
      if (set_view::has(s.referenced, way)) {
        s.clear_mark(way);
        continue;
      }
      const uint32_t next = order::first_of(s, s.candidates | s.dirty, s.hand);
      if (next != kNoWay && !set_view::has(s.referenced, next)) s.next = next;
      return way;
    }
    return kNoWay;
  }
};

// S3-FIFO (Yang et al., SOSP 2023) within each set. New lines wait in a small queue, a tenth of the
// ways (of a set: at least one); those used again on the way to its end go to the main queue, the
// others leave, and are remembered as ghosts; a line whose ghost is there goes to the main queue at
// once. The main queue gives lines as many more rounds as they had uses, up to three.
//
// What the set changes: the small queue has one line of 4 or 8, two of 16, so a line is there for
// few fills of its set, and one use on the way is enough to move it. (The paper asks for two, in a
// queue of thousands; here that costs up to a hundredth of the hits, and gains none.) Ghosts are 16
// bits of a hash of the line number, as many as ways: one line in 65536 / ways is taken for
// another.
struct s3_fifo_policy {
  static constexpr bool kKeepsWords = true;
  // 31:16 a ghost of the set, 0 for none; 15 main queue; 14 unused; 13:12 frequency; 11:0 order
  using order = sequence<12>;
  static constexpr uint32_t kMain = 1u << 15;
  static constexpr uint32_t kFrequencyOne = 1u << 12;
  static constexpr uint32_t kFrequency = 3u << 12;
  static constexpr uint32_t kGhostShift = 16;
  static constexpr uint32_t kGhost = 0xFFFFu << kGhostShift;

  FW_DEVICE static void on_hit(const geometry& g, uint64_t way, uint64_t) {
    uint32_t* word = policy_word(g, way);
    const uint32_t seen = atomic::load_relaxed(word);
    if ((seen & kFrequency) == kFrequency || is_first_use(word, seen)) return;
    // One try: when it fails, another hit has counted.
    atomic::cas_acq_rel(word, seen, seen + kFrequencyOne);
  }

  FW_DEVICE static void on_fill(set_view& s, uint32_t way) {
    const bool known = take_ghost(s, ghost_of(s.line));
    s.set_word(way, kMain | kFrequency | kUnused,
               (known ? kMain : 0) | (s.prefetched ? kUnused : 0));
    order::put_last(s, way);
  }

  FW_DEVICE static uint32_t choose_victim(set_view& s) {
    const uint32_t small_max = s.ways() < 16 ? 1 : s.ways() / 8;
    // Each step moves a line to the main queue, takes a use from one there, or is the last.
    for (uint32_t steps_left = 5 * s.ways();; steps_left--) {
      const uint32_t main = in_main(s);
      const uint32_t small = s.resident & ~main;
      const uint32_t small_candidates = s.candidates & small;
      const bool from_small = small_candidates != 0 &&
                              (base::popcount(small) >= small_max || (s.candidates & main) == 0);
      const uint32_t way = order::first_of(s, from_small ? small_candidates : s.candidates & main);
      const uint32_t frequency = s.word(way) & kFrequency;
      // Hits go on meanwhile; without them there are never so many steps.
      if (frequency == 0 || steps_left == 0) {
        // A line that is only cleaned now leaves later.
        if (from_small && !set_view::has(s.dirty, way)) put_ghost(s, ghost_of(s.line_at(way)));
        const uint32_t rest = (s.candidates | s.dirty) & ~(1u << way);
        s.next = order::first_of(s, (rest & small) != 0 ? rest & small : rest);
        return way;
      }
      s.set_word(way, kMain | kFrequency, kMain | (from_small ? 0 : frequency - kFrequencyOne));
      order::put_last(s, way);
    }
  }

 private:
  FW_DEVICE static uint32_t in_main(const set_view& s) {
    uint32_t main = 0;
    for (uint32_t rest = s.resident; rest != 0; rest &= rest - 1) {
      const uint32_t way = base::lowest_bit(rest);
      if ((s.word(way) & kMain) != 0) main |= 1u << way;
    }
    return main;
  }

  // Never 0. Fibonacci hashing: lines of one set differ by multiples of the number of sets.
  FW_DEVICE static uint32_t ghost_of(uint64_t line) {
    const uint32_t hash = uint32_t((line * 0x9E3779B97F4A7C15u) >> 48);
    return (hash == 0 ? 1 : hash) << kGhostShift;
  }
  FW_DEVICE static bool take_ghost(const set_view& s, uint32_t ghost) {
    for (uint32_t way = 0; way < s.ways(); way++) {
      if ((s.word(way) & kGhost) != ghost) continue;
      s.set_word(way, kGhost, 0);
      return true;
    }
    return false;
  }
  // The ghosts are a ring; the hand is the place of the oldest.
  FW_DEVICE static void put_ghost(set_view& s, uint32_t ghost) {
    const uint32_t place = s.hand % s.ways();
    s.set_word(place, kGhost, ghost);
    s.hand = place + 1;
  }
};

// Constants that a policy may leave out.
template <typename Policy>
FW_HOST_DEVICE constexpr bool keeps_words() {
  if constexpr (requires { Policy::kKeepsWords; }) return Policy::kKeepsWords;
  return false;
}
template <typename Policy>
FW_HOST_DEVICE constexpr uint64_t mark_at_birth() {
  if constexpr (requires { Policy::kBornReferenced; }) {
    return Policy::kBornReferenced ? tag::kReferenced : 0;
  }
  return 0;
}

}  // namespace fw::cache
