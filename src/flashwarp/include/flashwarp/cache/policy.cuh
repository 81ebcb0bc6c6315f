// Replacement policies: which line of a set makes room for the next fill. Six, or your own.
//
// A policy is a struct of static functions, chosen at compile time (FW_POLICY).
//   void on_hit(const geometry&, uint64_t way, uint64_t seen)
//        A line was used. `way` counts in the whole cache; `seen` is the tag word. No lock is held,
//        so any number of threads may call it at a time.
//   void on_fill(set_view&, uint32_t way)
//        A fill has taken `way` of the set.
//   uint32_t choose_victim(set_view&)
//        Returns one of `candidates`, of which there is at least one.
// A policy may also have two constants, which are false by default: `kKeepsWords`, if it uses the
// word of each line that `policy_word` finds, and `kBornReferenced`, if fills set a line's mark.
//
// The set's lock is held during `on_fill` and `choose_victim`, which must not wait. No answer of a
// policy can break the cache: a fill takes a way only if it is a candidate, by compare-and-swap.
// Any other answer is refused and counted, and the lowest candidate takes its place. What a policy
// stores is a hint: concurrent hits may overwrite each other.
//
// A user's policy accesses memory through the checked `set_view` and `hit_view` of policy_view.cuh.
// The policies in this file skip the check in hits, for the way that the probe has found.
#pragma once

#include "flashwarp/cache/policy_view.cuh"

namespace fw::cache {

// Keeps the lines of a set in order, by a number in the low kBits of each line's policy word: later
// lines have higher numbers. Before the numbers run out, all lines get new ones, from 1 on, in the
// same order.
template <uint32_t kBits>
struct sequence {
  static constexpr uint32_t kMask = uint32_t((uint64_t(1) << kBits) - 1);

  FW_DEVICE static uint32_t of(const set_view& s, uint32_t way) { return s.word(way) & kMask; }

  // The first way of `among` whose number is at least `from`; kNoWay if there is none.
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

  // Makes `way` the last. `position` is a number that the caller keeps; renumbering adapts it.
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
  // Returns the highest new number, which is the count of the ways.
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

// The first use of a prefetched line counts as no hit: the fill was made for it.
inline constexpr uint32_t kUnusedBit = 14;
inline constexpr uint32_t kUnused = 1u << kUnusedBit;
FW_DEVICE bool is_first_use(uint32_t* word, uint32_t seen) {
  if ((seen & kUnused) == 0) return false;
  atomic::cas_acq_rel(word, seen, seen & ~kUnused);
  return true;
}

// The clock (Corbato 1968; second chance): the hand clears the marks of the lines that it passes
// and takes the first unmarked one. After two rounds every line is unmarked. A hit stores nothing
// while the mark is set, which it is until the hand passes.
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

// Least recently used within each set, exact if hits come one at a time; concurrent hits may get
// the same number. A hit loads the words of its set (16 bytes for 4 ways) and stores one, unless
// the line was the last used already. The other policies do not have this cost.
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
    // If the numbers have run out, hits store nothing until a fill, which has the lock, renumbers.
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

// Any line with equal probability, from a pseudo-random sequence of each set, so it is repeatable.
// Keeps no words, and hits cost nothing.
struct random_policy {
  FW_DEVICE static void on_hit(const geometry&, uint64_t, uint64_t) {}

  FW_DEVICE static void on_fill(set_view&, uint32_t) {}

  FW_DEVICE static uint32_t choose_victim(set_view& s) {
    // A linear congruential step (Knuth's 1664525), then the finaliser of MurmurHash3 with the
    // set's number, so that sets differ.
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

// SIEVE (Zhang et al., NSDI 2024) within each set, exact. Lines stay in the order of their fills.
// The hand goes from the oldest to the newest, clears marks (the paper's `visited`), and takes the
// first unmarked line. New lines are the newest, and unmarked. So a line that is not used again
// leaves when the hand next reaches it, and a used line is never moved. A hit costs as much as with
// the clock.
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
    // The hand is the lowest number that the search considers. Each step clears a mark, wraps, or
    // is the last.
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

// S3-FIFO (Yang et al., SOSP 2023) within each set. New lines enter a small queue. If a line is
// used again before it reaches the end, it moves to the main queue; otherwise it leaves, and the
// set remembers it as a ghost. A line with a ghost enters the main queue at once. In the main queue
// a line stays for as many more rounds as it had uses, up to three.
//
// Sets need two changes. The small queue has one line of 4 or 8, or two of 16, so a line is there
// for few fills only, and one use is enough to move it. (The paper requires two uses in a queue of
// thousands; in sets that loses up to one hit in a hundred.) There are as many ghosts as ways, and
// a ghost is a 16-bit hash of the line number, so one line in 65536 / ways is taken for another.
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
    // Tries once: if that fails, another hit has counted.
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
    // Each step moves a line to the main queue, takes one use from a line there, or is the last.
    for (uint32_t steps_left = 5 * s.ways();; steps_left--) {
      const uint32_t main = in_main(s);
      const uint32_t small = s.resident & ~main;
      const uint32_t small_candidates = s.candidates & small;
      const bool from_small = small_candidates != 0 &&
                              (base::popcount(small) >= small_max || (s.candidates & main) == 0);
      const uint32_t way = order::first_of(s, from_small ? small_candidates : s.candidates & main);
      const uint32_t frequency = s.word(way) & kFrequency;
      // Only concurrent hits can make more steps than this bound.
      if (frequency == 0 || steps_left == 0) {
        // A dirty line only gets cleaned now, and leaves later.
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

  // Never 0. Fibonacci hashing, because lines of one set differ by multiples of the set count.
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
  // The ghosts are a ring; the hand is the place of the oldest one.
  FW_DEVICE static void put_ghost(set_view& s, uint32_t ghost) {
    const uint32_t place = s.hand % s.ways();
    s.set_word(place, kGhost, ghost);
    s.hand = place + 1;
  }
};

// A policy in kernels of a client of a shared cache, which can store to no tag and no word.
template <typename Policy>
struct unmarked : Policy {
  FW_DEVICE static void on_hit(const geometry&, uint64_t, uint64_t) {}
};

// The values of constants that a policy may leave out.
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
