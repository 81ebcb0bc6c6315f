// The rows of a table in the cache: found, fetched if they are missing, and their words loaded.
#pragma once

#include "segments.cuh"
#include "table_numbers.cuh"
#include "table_params.cuh"

namespace fw::kernels {

// Loads a word of up to 16 bytes from a frame. What follows it in the result is zero.
FW_DEVICE_NOINLINE atomic::word16 load_narrow(const char* from, uint32_t bytes) {
  atomic::word16 word = {0, 0, 0, 0};
  if (bytes == 8) {
    const uint64_t value = atomic::raw<8>::load(from);
    word.x = uint32_t(value);
    word.y = uint32_t(value >> 32);
  } else if (bytes == 4) {
    word.x = atomic::raw<4>::load(from);
  } else {
    word.x = bytes == 2 ? atomic::raw<2>::load(from) : atomic::raw<1>::load(from);
  }
  return word;
}
FW_DEVICE atomic::word16 load_frame(const char* from, uint32_t bytes) {
  if (bytes == 16) return atomic::raw<16>::load(from);
  return base::opaque(&load_narrow)(from, bytes);
}

// An operation of `cache::access` that loads one word of each lane.
struct load_table_word {
  static constexpr bool kStores = false;
  uint64_t offset;
  uint32_t bytes;
  atomic::word16 value;

  FW_DEVICE void visit(lanes, lanes members, uint64_t frame) {
    if (members.mine()) {
      value = load_frame(reinterpret_cast<const char*>(frame) + offset, bytes);
    }
  }
};

// A word of an array that a lane wants.
struct word_place {
  uint64_t line;  // global
  uint64_t offset;
  uint32_t bytes;
};

// Loads one word for each lane that `wants`, however long that takes. Zeros if it cannot be read:
// the error is in the volume's record. `failed` says so.
FW_DEVICE_NOINLINE atomic::word16 load_missing(const cache::geometry& g, cache::line_cache& c,
                                               cache::volume& v, lanes here, bool wants,
                                               word_place at, bool& failed) {
  load_table_word op = {at.offset, at.bytes, {0, 0, 0, 0}};
  cache::tally count;
  const uint32_t status = cache::access<policy>({g, c, v, here}, {at.line, wants}, op, count);
  count.add_to(v, here);
  failed = wants && status != nvme::kSuccess;
  return wants && !failed ? op.value : atomic::word16{0, 0, 0, 0};
}

FW_DEVICE word_place place_of(const cache::geometry& g, const cache::volume& v, uint64_t byte,
                              uint32_t bytes) {
  return {v.line_begin + (byte >> g.line_shift), byte & (cache::line_bytes(g) - 1), bytes};
}

// The `k`-th scale of a table whose scales lie in an array, for each lane that `wants`.
FW_DEVICE_NOINLINE float scale_in_array(const table_scales& s, lanes here, bool wants, uint64_t k) {
  const uint32_t bytes = base::bytes_of(s.number);
  bool failed;
  const atomic::word16 word =
      load_missing(s.geometry, *s.cache, *s.volume, here, wants,
                   place_of(s.geometry, *s.volume, k * bytes, bytes), failed);
  return number_at(&word.x, s.number, 0);
}

// What a warp counts of a table's volume beside the events of its misses.
struct lookup_events {
  uint32_t hits = 0;        // the same in each lane
  uint64_t bytes_used = 0;  // the lane's own
  // Of a thread that looks ahead: how far it has, for how many ids nothing was missing since, and
  // the lines that it fetched. An access finds each of them, but the launch caused a miss for it.
  uint64_t looked_to = 0;
  uint64_t quiet = 0;
  uint32_t fetched = 0;
};
FW_DEVICE void add_lookup_events(cache::volume& v, lookup_events& events) {
  cache::counters& shard = cache::shard_of(v);
  if (kLooksAhead && events.fetched != 0) {
    // Some of the accesses that found them have counted themselves.
    const uint64_t hits = atomic::load_relaxed(&shard.hits) + events.hits;
    const uint64_t fetched = events.fetched < hits ? events.fetched : hits;
    atomic::add_relaxed(&shard.hits, uint64_t(0) - fetched);
  }
  if (events.bytes_used != 0) atomic::add_relaxed(&shard.bytes_used, events.bytes_used);
  if (warp::lane() == 0 && events.hits != 0) {
    atomic::add_relaxed(&shard.hits, uint64_t(events.hits));
  }
  events = lookup_events();
}

// What a lane knows of one id, for all lanes of its group.
struct found_row {
  uint64_t row;    // of the array
  bool wants;      // whether it has a row that counts
  bool usable;     // whether all lines of the tile are resident
  uint64_t split;  // bytes of the tile in its first line
  cache::place first, second;
  float weight;
  float scale;  // of the whole row
};

// Looks for the lines of the tile of one id for each lane, and fetches those that are missing.
template <bool kPools>
FW_DEVICE found_row find_row(const lookup_params& p, const lookup_table& t, const lookup_run& run,
                             uint64_t k, lookup_events& events) {
  cache::volume& v = *t.volume;
  const cache::geometry& g = t.geometry;
  const lanes here = lanes::all();
  found_row f = {0, false, false, 0, {0, 0, false}, {0, 0, false}, 1.0f, 1.0f};
  const bool mine = k < run.end;
  const uint64_t id = mine ? uint64_t(integer_at(p.ids, p.index_bytes, k)) : 0;
  const bool stray = mine && id >= t.row_count;
  if (stray && run.tile_begin == 0) note_id(t, id);
  f.row = t.row_begin + id;
  f.wants = mine && !stray && !(kPools && id == t.padding);
  if (kPools && p.weights != nullptr && mine) f.weight = number_at(p.weights, p.weight_number, k);

  const uint64_t from = f.row * t.row_bytes + run.tile_begin;
  const uint64_t line = v.line_begin + (from >> g.line_shift);
  f.split = cache::line_bytes(g) - (from & (cache::line_bytes(g) - 1));
  const bool two = t.straddles != 0 && f.wants && f.split < run.tile_bytes;
  if (f.wants) f.first = cache::probe(g, line);
  if (two) f.second = cache::probe(g, line + 1);
  // A fill is no hit: policies tell lines that are used again from those that are not.
  const bool hit_first = f.first.found;
  const bool hit_second = f.second.found;
  uint32_t hits = here.ballot(f.first.found).count();
  if (t.straddles != 0) hits += here.ballot(f.second.found).count();
  events.hits += hits;
  bool failed = false;
  if (here.any(f.wants && !f.first.found)) {
    if constexpr (kLooksAhead) events.quiet = 0;
    const word_place at = {line, 0, t.word_bytes};
    base::opaque (&load_missing)(g, *t.cache, v, here, f.wants && !f.first.found, at, failed);
    if (f.wants && !f.first.found) f.first = cache::probe(g, line);
  }
  if (t.straddles != 0 && here.any(two && !f.second.found)) {
    const word_place at = {line + 1, 0, t.word_bytes};
    bool lost = false;
    base::opaque (&load_missing)(g, *t.cache, v, here, two && !f.second.found, at, lost);
    failed = failed || lost;
    if (two && !f.second.found) f.second = cache::probe(g, line + 1);
  }
  f.wants = f.wants && !failed;
  f.usable = f.wants && f.first.found && (!two || f.second.found);
  if (f.usable && hit_first) policy::on_hit(g, f.first.way, f.first.word);
  if (f.usable && hit_second) policy::on_hit(g, f.second.way, f.second.word);
  if (f.wants) events.bytes_used += run.tile_bytes;
  return f;
}

// The scale of each lane's own row; of tables with several for a row, their first, so that all of
// them are in the cache.
FW_DEVICE float scale_of_row(const table_scales& s, lanes here, bool wants, uint64_t row) {
  float scale = 1.0f;
  const uint64_t at = (row >> s.row_shift) * s.stride;
  if (s.volume != nullptr) {
    scale = base::opaque(&scale_in_array)(s, here, wants, at);
  } else if (wants) {
    scale = number_at(s.memory, s.number, at);
  }
  return s.divides != 0 ? scale / s.whole : scale;
}

// Whether the lane's loads of a frame since `find_row` saw the data of its lines.
FW_DEVICE bool still_usable(const lookup_table& t, const found_row& f) {
  if (!f.usable || !cache::still_holds(t.geometry, f.first.way, f.first.word)) return false;
  return !f.second.found || cache::still_holds(t.geometry, f.second.way, f.second.word);
}

// Starts the fills of what a thread of the CPU device reads from the `k`-th id on, as long as the
// storage makes it wait.
template <bool kPools>
FW_DEVICE_NOINLINE void look_ahead(const lookup_params& p, const lookup_table& t, uint64_t table,
                                   uint64_t k, lookup_events& events) {
  const lanes here = lanes::all();
  const uint64_t end = ids_of(p, table).end;
  const uint64_t to = k + p.look_ahead < end ? k + p.look_ahead : end;
  const uint32_t shift = t.geometry.line_shift;
  const table_scales& s = t.scales;
  cache::tally rows;
  cache::tally scales;
  events.quiet++;
  bool waits = true;
  uint64_t next = events.looked_to > k ? events.looked_to : k;
  for (; next < to && waits; next++) {
    const uint64_t id = uint64_t(integer_at(p.ids, p.index_bytes, next));
    if (id >= t.row_count || (kPools && id == t.padding)) continue;
    const uint64_t from = (t.row_begin + id) * t.row_bytes;
    const uint64_t last = (from + t.words * t.word_bytes - 1) >> shift;
    for (uint64_t at = from >> shift; at <= last; at++) {
      const uint64_t line = t.volume->line_begin + at;
      const uint32_t misses = rows.misses;
      cache::prefetch<policy>(*t.cache, *t.volume, here, true, line, rows);
      // What is there at once need not be asked for ahead, where it may be evicted before its use.
      if (rows.misses != misses && cache::probe(t.geometry, line).found) waits = false;
    }
    if (s.volume == nullptr) continue;
    const uint64_t scale = (id >> s.row_shift) * s.stride;
    const word_place at =
        place_of(s.geometry, *s.volume, scale * base::bytes_of(s.number), base::bytes_of(s.number));
    cache::prefetch<policy>(*s.cache, *s.volume, here, true, at.line, scales);
  }
  // If the storage is fast, ask again after as many ids as a look ahead has.
  events.looked_to = waits ? next : next + p.look_ahead;
  if (rows.misses != 0 || scales.misses != 0) events.quiet = 0;
  events.fetched += rows.misses;
  // A prefetch counts no hits.
  rows.add_to(*t.volume, here);
  if (s.volume != nullptr) scales.add_to(*s.volume, here);
}

}  // namespace fw::kernels
