// The kernels around a stream's wait for storage: submit the misses of a launch of rows, and land
// what has come. See nvme/batch.cuh.
#pragma once

#include "flashwarp/cache/batch_fills.cuh"
#include "maintenance.cuh"
#include "rows.cuh"

namespace fw::kernels {

struct submit_params {
  row_params rows;     // of the launch behind it; `misses`, `rows` and `strays` are not used
  nvme::batch* batch;  // no other launch uses it at the same time
  uint32_t stores;     // 1: the launch stores, and fetches no lines that it overwrites whole
  uint32_t reserved;
};
static_assert(sizeof(submit_params) == 184);

}  // namespace fw::kernels

#if FW_BUILDS(submit_rows)
// Submits reads of the absent lines of a launch of rows, to a batch. Waits for nothing.
FW_KERNEL_RESIDENT(2) fw_submit_rows(const FW_GRID_CONSTANT fw::kernels::submit_params s) {
  const fw::kernels::row_params& p = s.rows;
  fw::cache::line_cache& c = *p.cache;
  fw::cache::volume& v = *p.volume;
  const uint32_t mask = fw::warp::kFullMask;
  const bool in_batch = fw::warp::lane() < fw::kernels::batch_of(p);
  const fw::warp::share mine =
      fw::warp::share_of(fw::kernels::segment_count(p), fw::kernels::batch_of(p));
  fw::cache::tally tally;
  fw::cache::refresh(c, v, mask);
  for (uint64_t first = mine.begin; first < mine.end; first += mine.stride) {
    const uint64_t item = first + fw::warp::lane();
    fw::kernels::segment piece = {0, 0, 0, 0};
    if (in_batch && item < mine.end) piece = fw::kernels::segment_at(p, v.line_begin, item);
    bool wants = piece.bytes != 0;
    if (wants && s.stores != 0) wants = piece.bytes != fw::cache::bytes_of_line(c, v, piece.line);
    fw::cache::submit_fills<fw::policy>(c, v, mask, wants, piece.line, *s.batch, tally);
  }
  fw::kernels::add_events(v, mask, tally, {});
  // All lanes have submitted before one of them says so.
  fw::warp::sync(mask);
  if (fw::warp::lane() == 0) fw::nvme::end_part(*s.batch, fw::warp::count());
}
#endif

#if FW_BUILDS(land_lines)
// Lands the lines of all commands of the volume that have completed. Waits for nothing.
FW_KERNEL_RESIDENT(2) fw_land_lines(const FW_GRID_CONSTANT fw::kernels::maintenance_params p) {
  fw::cache::land_completed(*p.cache, *p.volume, fw::warp::kFullMask);
}
#endif
