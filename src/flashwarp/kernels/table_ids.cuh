// Rows of tables that come into the cache by their ids, before a lookup takes them: as a user's
// prefetch, or so that the lookup waits for none.
//
// A lookup that misses has sums and rows half done, so it cannot leave its misses to other warps:
// it would wait on every multiprocessor. So a lookup of many rows is two launches. In the first,
// few blocks fetch what all warps have missed; see cache/miss_list.cuh.
#pragma once

#include "builds.cuh"
#include "table_rows.cuh"

namespace fw::kernels {

// The lines of one id's row, and the one of its first scale.
struct lines_of_row {
  uint64_t first, last;  // global
  uint64_t scale;
};
FW_DEVICE lines_of_row lines_of(const lookup_table& t, uint64_t id) {
  const uint32_t shift = t.geometry.line_shift;
  const uint64_t from = (t.row_begin + id) * t.row_bytes;
  const uint64_t begin = t.volume->line_begin;
  const uint64_t last = from + t.words * t.word_bytes - 1;
  lines_of_row lines = {begin + (from >> shift), begin + (last >> shift), 0};
  const table_scales& s = t.scales;
  if (s.volume != nullptr) {
    const uint32_t bytes = base::bytes_of(s.number);
    lines.scale =
        place_of(s.geometry, *s.volume, (id >> s.row_shift) * s.stride * bytes, bytes).line;
  }
  return lines;
}

// Whether a line has to be waited for, or started.
template <bool kWaits>
FW_DEVICE bool is_absent(const cache::geometry& g, uint64_t line) {
  bool busy = false;
  return !cache::probe(g, line, busy).found && (kWaits || !busy);
}
template <bool kWaits>
FW_DEVICE bool is_absent(const lookup_table& t, const lines_of_row& lines) {
  for (uint64_t line = lines.first; line <= lines.last; line++) {
    if (is_absent<kWaits>(t.geometry, line)) return true;
  }
  return t.scales.volume != nullptr && is_absent<kWaits>(t.scales.geometry, lines.scale);
}

// An operation of `cache::access` that needs nothing of its lines but that they are there.
struct wait_for_lines {
  static constexpr bool kStores = false;
  FW_DEVICE void visit(lanes, lanes, uint64_t) {}
};

// Starts the fill of a line for each lane that `wants`; or waits for it, if `kWaits`.
template <bool kWaits>
FW_DEVICE_NOINLINE void bring_line(const cache::geometry& g, cache::line_cache& c, cache::volume& v,
                                   bool wants, uint64_t line, cache::tally& count) {
  const lanes here = lanes::all();
  if constexpr (kWaits) {
    wait_for_lines op;
    cache::access<policy>({g, c, v, here}, {line, wants}, op, count);
  } else {
    cache::prefetch<policy>(c, v, here, wants, line, count);
  }
}

// Brings the row of one id for each lane that `wants`, and its scale.
template <bool kWaits>
FW_DEVICE void bring_lines(const lookup_table& t, bool wants, const lines_of_row& lines,
                           cache::tally& rows, cache::tally& scales) {
  for (uint64_t k = 0; lanes::all().any(wants && lines.first + k <= lines.last); k++) {
    const bool has = wants && lines.first + k <= lines.last;
    base::opaque (&bring_line<kWaits>)(t.geometry, *t.cache, *t.volume, has, lines.first + k, rows);
  }
  const table_scales& s = t.scales;
  if (s.volume != nullptr) {
    base::opaque (&bring_line<kWaits>)(s.geometry, *s.cache, *s.volume, wants, lines.scale, scales);
  }
}

// Adds what was fetched. The lookup counts a hit for each access that has caused a miss here.
template <bool kWaits>
FW_DEVICE void count_ahead(const cache::volume& v, cache::tally& count) {
  const lanes here = lanes::all();
  count.hits = 0;
  if (kWaits && here.leads() && count.misses != 0) {
    atomic::add_relaxed(&cache::shard_of(v).hits, uint64_t(0) - count.misses);
  }
  count.add_to(v, here);
}

// Starts the fills of the row of one id for each lane that `wants`, and its scale's; then waits for
// them, if `kWaits`. All lanes call together.
template <bool kWaits>
FW_DEVICE_NOINLINE void bring_rows(const lookup_table& t, bool wants, uint64_t id) {
  const lines_of_row lines = lines_of(t, wants ? id : 0);
  cache::tally rows;
  cache::tally scales;
  bring_lines<false>(t, wants, lines, rows, scales);
  if constexpr (kWaits) bring_lines<true>(t, wants, lines, rows, scales);
  count_ahead<kWaits>(*t.volume, rows);
  if (t.scales.volume != nullptr) count_ahead<kWaits>(*t.scales.volume, scales);
}

FW_DEVICE const lookup_table& table_at(const lookup_params& p, uint64_t table) {
  return p.tables == nullptr ? p.table : p.tables[table];
}

// The id at one lane's place of a warp's item.
struct placed_id {
  uint64_t value;
  bool inside;  // whether the table has the place
};
FW_DEVICE placed_id id_at(const lookup_params& p, uint64_t table, uint64_t warp_item,
                          uint32_t lane) {
  const lookup_run ids = ids_of(p, table);
  const uint64_t k = ids.begin + warp_item * p.run + lane;
  const bool inside = lane < p.run && k >= ids.begin && k < ids.end;
  return {inside ? uint64_t(integer_at(p.ids, p.index_bytes, k)) : 0, inside};
}

// Brings the rows whose ids were left to the calling block.
template <bool kWaits>
FW_DEVICE_NOINLINE void drain_ids(const lookup_params& p, bool entered) {
  const lanes here = lanes::all();
  const auto serve = [&](uint32_t place, bool active) {
    const uint64_t i = place / warp::kWarpWidth;
    const uint64_t table = p.tables == nullptr ? 0 : i / p.warp_items;
    const placed_id id = id_at(p, table, i - table * p.warp_items, place % warp::kWarpWidth);
    for (lanes rest = here.ballot(active); rest;) {
      const uint64_t one = here.broadcast(table, rest.leader());
      const bool mine = active && table == one;
      const lookup_table& t = table_at(p, one);
      cache::refresh(*t.cache, *t.volume, here);
      base::opaque (&bring_rows<kWaits>)(t, mine, id.value);
      rest = rest - here.ballot(mine);
    }
  };
  const uint32_t multiprocessors = (p.misses.blocks + 1) / 2;
  cache::end_deferring(p.misses, *table_at(p, 0).volume, multiprocessors, entered, serve);
}

// Brings the rows of all ids. A fetch, which waits, is of a lookup: that notes ids out of bounds.
template <bool kWaits>
FW_DEVICE void bring_all(const lookup_params& p) {
  const lanes here = lanes::all();
  const warp::share mine = warp::share_of(p.table_count * p.warp_items, 1);
  const lookup_table* current = nullptr;
  bool entered = false;
  for (uint64_t i = mine.begin; i < mine.end; i += mine.stride) {
    const uint64_t table = p.tables == nullptr ? 0 : i / p.warp_items;
    const lookup_table& t = table_at(p, table);
    if (&t != current) {
      current = &t;
      cache::refresh(*t.cache, *t.volume, here);
      if (t.scales.volume != nullptr) cache::refresh(*t.scales.cache, *t.scales.volume, here);
    }
    const placed_id id = id_at(p, table, i - table * p.warp_items, warp::lane());
    const bool pads = p.pooling != pooling::kNone && id.value == t.padding;
    const bool wants = id.inside && id.value < t.row_count && !pads;
    if (!kWaits && id.inside && id.value >= t.row_count) note_id(t, id.value);
    if (p.misses.blocks != 0) {
      const lanes missing = here.ballot(wants && is_absent<kWaits>(t, lines_of(t, id.value)));
      const uint64_t place = i * warp::kWarpWidth + warp::lane();
      if (!missing || cache::append(p.misses, missing, place, entered)) continue;
    }
    base::opaque (&bring_rows<kWaits>)(t, wants, id.value);
  }
  if (p.misses.blocks != 0) base::opaque (&drain_ids<kWaits>)(p, entered);
}

}  // namespace fw::kernels

#if FW_BUILDS(prefetch_ids)
FW_KERNEL_RESIDENT(4) fw_prefetch_ids(const FW_GRID_CONSTANT fw::kernels::lookup_params p) {
  fw::kernels::bring_all<false>(p);
}
#endif
#if FW_BUILDS(fetch_ids)
FW_KERNEL_RESIDENT(2) fw_fetch_ids(const FW_GRID_CONSTANT fw::kernels::lookup_params p) {
  fw::kernels::bring_all<true>(p);
}
#endif
