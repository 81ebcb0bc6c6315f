// Gather and scatter of rows of a few elements: each lane takes one element at a time.
#pragma once

#include "rows.cuh"

namespace fw::kernels {

// Moves one element of a row for each lane that `wants`: the launch's `item`, in the row's `part`.
template <uint32_t kBytes, bool kStores, typename Misses>
FW_DEVICE void serve_elements(const row_params& p, uint64_t item, uint64_t row, uint64_t part,
                              bool wants, const Misses& misses, cache::tally& tally) {
  using word = atomic::raw<kBytes>;
  cache::line_cache& c = *p.cache;
  cache::volume& v = *p.volume;
  const lanes here = lanes::all();
  const uint64_t byte = row * p.row_bytes + part * kBytes;
  const uint64_t line = v.line_begin + (byte >> p.geometry.line_shift);
  const uint64_t offset = byte & (cache::line_bytes(p.geometry) - 1);
  char* mine = p.rows + item * kBytes;
  uint32_t status;
  if constexpr (kStores) {
    detail::store_element<kBytes> op = {offset, {}};
    if (wants) op.value = word::load_stream(mine);
    status = cache::access<policy>({p.geometry, c, v, here}, {line, wants}, op, tally, misses);
  } else {
    detail::load_element<kBytes> op = {offset, {}};
    status = cache::access<policy>({p.geometry, c, v, here}, {line, wants}, op, tally, misses);
    if (wants && status == nvme::kSuccess) word::store(mine, op.value);
  }
  if (wants && status != cache::kDeferred) tally.bytes_used += kBytes;
}

template <uint32_t kBytes, bool kStores>
FW_DEVICE_NOINLINE void drain_elements(const row_params& p, bool entered) {
  cache::volume& v = *p.volume;
  cache::tally tally;
  const uint64_t parts = p.row_bytes / kBytes;
  const uint32_t multiprocessors = (p.misses.blocks + 3) / 4;
  cache::end_deferring(p.misses, v, multiprocessors, entered, [&](uint32_t item, bool active) {
    const uint64_t k = item / parts;
    const uint64_t row = active ? row_of(p, k) : p.row_count;
    const cache::fetch_misses misses;
    serve_elements<kBytes, kStores>(p, item, row, item - k * parts, row < p.row_count, misses,
                                    tally);
  });
  add_events(v, lanes::all(), tally, {});
}

// The same launch for a thread of the CPU device, which has no lanes to divide a row among.
FW_DEVICE row_params rows_of_elements(const row_params& p) {
  row_params rows = p;
  rows.segments = cache::line_bytes(p.geometry) % p.row_bytes == 0 ? 1 : 2;
  rows.bundle = cache::piece_reader<policy>::kBundle;
  return rows;
}

// Moves rows of a few elements: each lane takes one element at a time.
template <uint32_t kBytes, bool kStores>
FW_DEVICE void for_each_element(const row_params& p) {
  if constexpr (!kStores && warp::kWarpWidth == 1) {
    if (p.misses.blocks == 0) return gather_by_thread<policy>(rows_of_elements(p));
  }
  using word = atomic::raw<kBytes>;
  if (kStores && !may_store(p)) return;
  cache::line_cache& c = *p.cache;
  cache::volume& v = *p.volume;
  const lanes here = lanes::all();
  const uint64_t parts = p.row_bytes / kBytes;
  const warp::share share = warp::share_of(p.index_count * parts, warp::kWarpWidth);
  bool entered = false;
  cache::tally tally;
  cache::tally ahead;
  cache::refresh(c, v, here);
  for (uint64_t first = share.begin; first < share.end; first += share.stride) {
    const uint64_t item = first + warp::lane();
    const uint64_t k = parts == 1 ? item : item / parts;
    const uint64_t row = item < share.end ? row_of(p, k) : p.row_count;
    const bool wants = row < p.row_count;
    if (!wants && item < share.end) {
      if constexpr (!kStores) word::store(p.rows + item * kBytes, {});
      if (item == k * parts) note_stray(p, k);
    }
    if (kLooksAhead && p.look_ahead != 0) {
      const uint64_t later = item + p.look_ahead * share.stride;
      const uint64_t there =
          later < share.end ? row_of(p, parts == 1 ? later : later / parts) : p.row_count;
      base::opaque (&cache::prefetch<policy>)(
          c, v, here, there < p.row_count,
          v.line_begin + ((there * p.row_bytes) >> p.geometry.line_shift), ahead);
    }
    const cache::deferral misses = {p.misses, entered, item};
    serve_elements<kBytes, kStores>(p, item, row, item - k * parts, wants, misses, tally);
  }
  add_events(v, here, tally, ahead);
  if (p.misses.blocks != 0) base::opaque (&drain_elements<kBytes, kStores>)(p, entered);
}

}  // namespace fw::kernels

#define FW_ELEMENT_KERNEL(NAME, BYTES, STORES)                                             \
  FW_KERNEL_RESIDENT(4) NAME##_##BYTES(const FW_GRID_CONSTANT fw::kernels::row_params p) { \
    fw::kernels::for_each_element<BYTES, STORES>(p);                                       \
  }
#if FW_BUILDS(gather_elements_1)
FW_ELEMENT_KERNEL(fw_gather_elements, 1, false)
#endif
#if FW_BUILDS(scatter_elements_1)
FW_ELEMENT_KERNEL(fw_scatter_elements, 1, true)
#endif
#if FW_BUILDS(gather_elements_2)
FW_ELEMENT_KERNEL(fw_gather_elements, 2, false)
#endif
#if FW_BUILDS(scatter_elements_2)
FW_ELEMENT_KERNEL(fw_scatter_elements, 2, true)
#endif
#if FW_BUILDS(gather_elements_4)
FW_ELEMENT_KERNEL(fw_gather_elements, 4, false)
#endif
#if FW_BUILDS(scatter_elements_4)
FW_ELEMENT_KERNEL(fw_scatter_elements, 4, true)
#endif
#if FW_BUILDS(gather_elements_8)
FW_ELEMENT_KERNEL(fw_gather_elements, 8, false)
#endif
#if FW_BUILDS(scatter_elements_8)
FW_ELEMENT_KERNEL(fw_scatter_elements, 8, true)
#endif
#if FW_BUILDS(gather_elements_16)
FW_ELEMENT_KERNEL(fw_gather_elements, 16, false)
#endif
#if FW_BUILDS(scatter_elements_16)
FW_ELEMENT_KERNEL(fw_scatter_elements, 16, true)
#endif
#undef FW_ELEMENT_KERNEL
