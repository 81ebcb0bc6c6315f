// Gathers of cells at equal distances, such as columns of a table, for threads of the CPU device.
//
// Cells of one line share its look-up. Cells of absent lines are copied from the page cache if it
// has them, and fill no frame: one cell is not worth a line. A cell that straddles lines is read in
// parts.
#pragma once

#include "rows.cuh"

namespace fw::kernels {

// Copies cells of a frame, for `access`.
struct copy_cells {
  static constexpr bool kStores = false;
  cache::cells which;

  FW_DEVICE void visit(lanes, lanes, uint64_t frame) {
    cache::copy_from_frame(which, reinterpret_cast<const char*>(frame) + which.offset);
  }
};

// Of `p`: the first cell is at byte `row_bytes`, `index_count` cells lie `from_front` bytes apart,
// and each has `from_end` bytes.
template <typename Policy>
FW_DEVICE void gather_cells(const row_params& p) {
  using reader = cache::piece_reader<Policy, cache::cells>;
  // What a thread takes at a time, in bytes of its caller.
  constexpr uint64_t kTaken = 64 << 10;
  cache::line_cache& c = *p.cache;
  cache::volume& v = *p.volume;
  const lanes here = lanes::all();
  const uint64_t line = cache::line_bytes(p.geometry);
  const uint64_t stride = p.from_front;
  const uint64_t width = p.from_end;
  warp::item_loop loop(p.index_count, width < kTaken ? kTaken / width : 1);
  cache::tally tally;
  cache::tally ahead;
  reader cells_of(p.geometry, v, cache::around::kAll);
  cache::refresh(c, v, here);
  uint64_t k = 0;
  uint64_t end = 0;
  uint64_t done = 0;  // bytes of cell `k`
  while (k < end || loop.next(k, end)) {
    cache::cells bundle[reader::kBundle];
    uint32_t count = 0;
    while (k < end && count < reader::kBundle) {
      const uint64_t begin = p.row_bytes + k * stride + done;
      const uint64_t offset = begin & (line - 1);
      const uint64_t room = line - offset;
      const uint64_t left = width - done;
      const uint64_t part = left < room ? left : room;
      const bool more = part == width && stride < line;
      uint64_t n = more ? (room - width) / stride + 1 : 1;
      if (n > end - k) n = end - k;
      const uint64_t buffer = reinterpret_cast<uint64_t>(p.rows) + k * width + done;
      const uint64_t number = v.line_begin + (begin >> p.geometry.line_shift);
      bundle[count++] = {{number, offset, n * part, buffer}, n, part, stride};
      tally.bytes_used += n * part;
      done = part == left ? 0 : done + part;
      if (done == 0) k += n;
    }
    uint32_t rest = cells_of.read(bundle, count, tally);
    // If the storage makes the thread wait, the lines of a bundle are on their way together.
    uint64_t asked = 0;
    for (uint32_t later = rest; later != 0 && asked < p.look_ahead; later &= later - 1, asked++) {
      const uint64_t number = bundle[base::lowest_bit(later)].line;
      cache::prefetch<Policy>(c, v, here, true, number, ahead);
    }
    for (; rest != 0; rest &= rest - 1) {
      copy_cells op = {bundle[base::lowest_bit(rest)]};
      cache::access<Policy>({p.geometry, c, v, here}, {op.which.line}, op, tally);
    }
  }
  cells_of.add_bypasses();
  add_events(v, here, tally, ahead);
}

}  // namespace fw::kernels

#if FW_BUILDS(gather_cells)
FW_KERNEL fw_gather_cells(const FW_GRID_CONSTANT fw::kernels::row_params p) {
  if constexpr (fw::warp::kWarpWidth == 1) fw::kernels::gather_cells<fw::policy>(p);
}
#endif
