// Updates of rows by gradients: one step of an optimizer on an embedding table.
//
// A row has `width` weights, and behind them the state that the optimizer keeps for it. The host
// sorts the ids of a step, so equal ids are neighbours. `fw_sum_gradients` adds up the gradients of
// equal ids within chunks of the sorted ids, and `fw_update_rows` adds up the chunks and updates
// each row once: no other warp of the launch stores to it. Both sums have a fixed order, so a step
// gives the same bits each time.
#pragma once

#include "rows.cuh"

namespace fw::kernels {

// Sorted ids whose gradients one warp adds up. An id that fills a whole batch of 32,768 is added up
// by 1,024 warps, and then by one.
inline constexpr uint64_t kChunk = 32;

struct sum_params {
  const int64_t* ids;      // in ascending order
  const int64_t* order;    // the place of each in `gradients`
  const float* gradients;  // rows of `width`
  float* sums;             // rows of `width`: at the first place of each id in each chunk
  uint64_t count;
  uint64_t width;
};
static_assert(sizeof(sum_params) == 48);

enum update_rule : uint32_t { kSgd = 0, kAdagrad = 1, kRowWiseAdagrad = 2, kAdam = 3 };

struct update_params {
  row_params rows;     // `indices`: the sorted ids; `rows`: a row for each warp, if rows take more
                       // than one line; else null
  float* sums;         // as `fw_sum_gradients` leaves them; the sum of each id comes to its first
  const float* scale;  // a factor of `rate` in device memory, then one of `decay`; or null
  uint64_t padding;    // a row that is not updated; all bits set: none
  uint32_t rule;
  uint32_t width;  // weights of a row
  float rate;
  float epsilon;
  float mean_rate;    // Adam: how far a mean moves towards the gradient, 1 - beta1
  float square_rate;  // and a mean square towards its square, 1 - beta2
  float decay;        // SGD and Adam: the part of a weight that goes before the step
};
static_assert(sizeof(update_params) == 224);

FW_DEVICE void sum_chunk(const sum_params& p, uint64_t begin, uint64_t end) {
  for (uint64_t first = begin; first < end;) {
    const int64_t id = p.ids[first];
    uint64_t last = first + 1;
    while (last < end && p.ids[last] == id) last++;
    for (uint64_t i = warp::lane(); i < p.width; i += warp::kWarpWidth) {
      float sum = 0;
      for (uint64_t k = first; k < last; k++) {
        sum += p.gradients[uint64_t(p.order[k]) * p.width + i];
      }
      p.sums[first * p.width + i] = sum;
    }
    first = last;
  }
}

// Adds the sums of later chunks to that at the id's first place. Each lane adds the elements that
// it uses in `update_row`.
FW_DEVICE void add_chunks(const update_params& p, uint64_t first) {
  const int64_t* ids = static_cast<const int64_t*>(p.rows.indices);
  const int64_t id = ids[first];
  const uint64_t next = first - first % kChunk + kChunk;
  for (uint32_t i = warp::lane(); i < p.width; i += warp::kWarpWidth) {
    float sum = p.sums[first * p.width + i];
    for (uint64_t k = next; k < p.rows.index_count && ids[k] == id; k += kChunk) {
      sum += p.sums[k * p.width + i];
    }
    p.sums[first * p.width + i] = sum;
  }
}

// Whether gradients of the id at `first`, its first place, lie in another chunk too.
FW_DEVICE bool spans_chunks(const update_params& p, uint64_t first) {
  const int64_t* ids = static_cast<const int64_t*>(p.rows.indices);
  const uint64_t next = first - first % kChunk + kChunk;
  return next < p.rows.index_count && ids[next] == ids[first];
}

FW_DEVICE float load_element(uint64_t row, uint32_t i) {
  const uint32_t bits = atomic::raw<4>::load(reinterpret_cast<const float*>(row) + i);
  return detail::bit_cast<float>(bits);
}
FW_DEVICE void store_element(uint64_t row, uint32_t i, float value) {
  atomic::raw<4>::store(reinterpret_cast<float*>(row) + i, detail::bit_cast<uint32_t>(value));
}

// The weights that a lane loads before it stores the first, so that several loads are in flight.
inline constexpr uint32_t kWeightsHeld = 4;

// Runs step(weight, first state, second state, gradient) on each weight of a row, with all lanes.
// `kStates` says how many states each weight has.
template <uint32_t kStates, typename Step>
FW_DEVICE void for_each_weight(uint32_t width, uint64_t row, const float* gradient, Step step) {
  constexpr uint32_t kStride = warp::kWarpWidth;
  for (uint32_t first = warp::lane(); first < width; first += kStride * kWeightsHeld) {
    float values[3][kWeightsHeld] = {};
    float slopes[kWeightsHeld] = {};
    FW_UNROLL
    for (uint32_t k = 0; k < kWeightsHeld; k++) {
      const uint32_t i = first + k * kStride;
      if (i >= width) continue;
      slopes[k] = gradient[i];
      FW_UNROLL
      for (uint32_t s = 0; s <= kStates; s++) values[s][k] = load_element(row, s * width + i);
    }
    FW_UNROLL
    for (uint32_t k = 0; k < kWeightsHeld; k++) {
      const uint32_t i = first + k * kStride;
      if (i >= width) continue;
      step(values[0][k], values[1][k], values[2][k], slopes[k]);
      FW_UNROLL
      for (uint32_t s = 0; s <= kStates; s++) store_element(row, s * width + i, values[s][k]);
    }
  }
}

// The sum of a value over all lanes, which call together.
FW_DEVICE float sum_of_lanes(float value) {
  for (uint32_t distance = warp::kWarpWidth / 2; distance != 0; distance /= 2) {
    value += lanes::all().take(value, warp::lane() ^ distance);
  }
  return value;
}

// Updates the row at an address, in a frame or not, by the sum at the id's first place. All lanes
// call together. Not inlined: hits, misses and rows in several lines share it.
FW_DEVICE_NOINLINE void update_row(const update_params& p, uint64_t row, uint64_t first) {
  const uint32_t width = p.width;
  const float* gradient = p.sums + first * width;
  const float rate = p.scale == nullptr ? p.rate : p.rate * *p.scale;
  const float epsilon = p.epsilon;
  // The second factor is there only for a decay.
  const float decay = p.decay == 0 || p.scale == nullptr ? p.decay : p.decay * p.scale[1];
  switch (p.rule) {
    case kSgd:
      for_each_weight<0>(width, row, gradient, [=](float& w, float&, float&, float g) {
        if (decay != 0) w -= decay * w;
        w -= rate * g;
      });
      break;
    case kAdagrad:
      for_each_weight<1>(width, row, gradient, [=](float& w, float& sum, float&, float g) {
        sum += g * g;
        w -= rate * (g / (base::square_root(sum) + epsilon));
      });
      break;
    case kRowWiseAdagrad: {
      float squares = 0;
      for (uint32_t i = warp::lane(); i < width; i += warp::kWarpWidth) {
        squares += gradient[i] * gradient[i];
      }
      // One state for the row: the sum over steps of the gradient's mean square.
      const float sum = load_element(row, width) + sum_of_lanes(squares) / float(width);
      const float factor = rate / (base::square_root(sum) + epsilon);
      // All lanes have loaded the old sum.
      lanes::all().sync();
      if (warp::lane() == 0) store_element(row, width, sum);
      for_each_weight<0>(width, row, gradient,
                         [=](float& w, float&, float&, float g) { w -= factor * g; });
      break;
    }
    case kAdam: {
      const float mean_rate = p.mean_rate;
      const float square_rate = p.square_rate;
      for_each_weight<2>(width, row, gradient, [=](float& w, float& mean, float& square, float g) {
        mean += (g - mean) * mean_rate;
        square += (g * g - square) * square_rate;
        if (decay != 0) w -= decay * w;
        w -= rate * (mean / (base::square_root(square) + epsilon));
      });
      break;
    }
  }
}

// Updates each lane's row in its frame, with the whole warp. The lane's pin keeps the frame.
struct update_in_frame {
  static constexpr bool kStores = true;
  const update_params* params;
  uint64_t offset;  // of the lane's row in its line
  uint64_t first;

  FW_DEVICE void visit(lanes here, lanes members, uint64_t frame) {
    // Each lane has acquired its own line; now all lanes use all of them.
    here.sync();
    for (const uint32_t member : members) {
      base::opaque (&update_row)(*params, here.broadcast(frame + offset, member),
                                 here.broadcast(first, member));
    }
  }
};

// Copies a row between its lines and the warp's own memory. Returns false if a line failed or was
// deferred.
template <bool kToFrames, typename Misses>
FW_DEVICE bool move_row(const row_params& p, uint64_t line_begin, uint64_t row, uint64_t buffer,
                        const Misses& misses, cache::tally& tally) {
  const lanes here = lanes::all();
  bool good = true;
  for (uint64_t part = 0; part < p.segments; part += warp::kWarpWidth) {
    const segment piece =
        cut(p, line_begin, row * p.row_bytes, p.row_bytes, part + warp::lane(), buffer);
    const bool wants = piece.bytes != 0;
    const bool whole =
        kToFrames && wants && piece.bytes == cache::bytes_of_line(*p.cache, *p.volume, piece.line);
    copy_segments<kToFrames> op = {piece};
    const uint32_t status = cache::access<policy>({p.geometry, *p.cache, *p.volume, here},
                                                  {piece.line, wants, whole}, op, tally, misses);
    good = good && (!wants || status == nvme::kSuccess);
  }
  // What the lanes have stored in the warp's memory comes before what other lanes load there.
  here.sync();
  return !here.any(!good);
}

// Updates a row that lies in several lines, by a copy: no lane holds all of its frames. No other
// warp stores to this row meanwhile. Returns false if the row was deferred, before anything was
// stored.
FW_DEVICE_NOINLINE bool update_copy(const update_params& p, uint64_t line_begin, uint64_t row,
                                    uint64_t first, bool may_defer, bool& entered,
                                    cache::tally& tally) {
  const uint64_t copy = reinterpret_cast<uint64_t>(p.rows.rows) + warp::index() * p.rows.row_bytes;
  bool deferred = false;
  const uint64_t item = may_defer ? first : cache::whole_deferral::kNone;
  const cache::whole_deferral misses = {p.rows.misses, entered, deferred, item};
  if (!move_row<false>(p.rows, line_begin, row, copy, misses, tally)) return !deferred;
  update_row(p, copy, first);
  lanes::all().sync();
  move_row<true>(p.rows, line_begin, row, copy, cache::fetch_misses(), tally);
  return true;
}

// Updates one row for each lane that `wants`, by the sum at the `first` place of its id. `misses`
// may defer rows of one line, and `entered` others.
template <typename Misses>
FW_DEVICE void serve_updates(const update_params& p, uint64_t row, uint64_t first, bool wants,
                             const Misses& misses, bool& entered, cache::tally& tally) {
  const row_params& r = p.rows;
  const lanes here = lanes::all();
  const uint64_t line_begin = r.volume->line_begin;
  const uint32_t shift = r.geometry.line_shift;
  const uint64_t at = row * r.row_bytes;
  const uint64_t line = at >> shift;
  const bool alone = wants && (at + r.row_bytes - 1) >> shift == line;
  update_in_frame op = {&p, at - (line << shift), first};
  const uint32_t status = cache::access<policy>({r.geometry, *r.cache, *r.volume, here},
                                                {line_begin + line, alone}, op, tally, misses);
  bool served = alone && status != cache::kDeferred;
  for (const uint32_t member : here.ballot(wants && !alone)) {
    const bool done = update_copy(p, line_begin, here.broadcast(row, member),
                                  here.broadcast(first, member), misses.allowed(), entered, tally);
    if (warp::lane() == member) served = done;
  }
  if (served) tally.bytes_used += r.row_bytes;
}

// Updates the deferred rows. Their sums are made, and their ids are rows.
FW_DEVICE_NOINLINE void drain_updates(const update_params& p, bool entered) {
  const row_params& r = p.rows;
  const int64_t* ids = static_cast<const int64_t*>(r.indices);
  cache::tally tally;
  const uint32_t multiprocessors = (r.misses.blocks + 1) / 2;
  cache::end_deferring(r.misses, *r.volume, multiprocessors, entered,
                       [&](uint32_t item, bool active) {
                         const uint64_t row = active ? uint64_t(ids[item]) : 0;
                         serve_updates(p, row, item, active, cache::fetch_misses(), entered, tally);
                       });
  add_events(*r.volume, lanes::all(), tally, {});
}

FW_DEVICE void update_rows(const update_params& p) {
  const row_params& r = p.rows;
  const lanes here = lanes::all();
  const int64_t* ids = static_cast<const int64_t*>(r.indices);
  const bool in_bundle = warp::lane() < bundle_of(r);
  const warp::share mine = warp::share_of(r.index_count, bundle_of(r));
  bool entered = false;
  cache::tally tally;
  for (uint64_t begin = mine.begin; begin < mine.end; begin += mine.stride) {
    const uint64_t first = begin + warp::lane();
    bool wants = in_bundle && first < mine.end && (first == 0 || ids[first - 1] != ids[first]);
    // Negative ids are out of bounds, because they would be second names of rows.
    const uint64_t row = wants ? uint64_t(ids[first]) : 0;
    if (wants && row >= r.row_count) {
      note_stray(r, first);
      wants = false;
    }
    wants = wants && row != p.padding;
    const bool folds = wants && spans_chunks(p, first);
    for (const uint32_t member : here.ballot(folds)) {
      add_chunks(p, here.broadcast(first, member));
    }
    const cache::deferral misses = {r.misses, entered, first};
    serve_updates(p, row, first, wants, misses, entered, tally);
  }
  add_events(*r.volume, here, tally, {});
  // By all warps of the block, those without rows too.
  if (r.misses.blocks != 0) base::opaque (&drain_updates)(p, entered);
}

}  // namespace fw::kernels

#if FW_BUILDS(sum_gradients)
FW_KERNEL fw_sum_gradients(const FW_GRID_CONSTANT fw::kernels::sum_params p) {
  const uint64_t chunks = (p.count + fw::kernels::kChunk - 1) / fw::kernels::kChunk;
  const fw::warp::share mine = fw::warp::share_of(chunks, 1);
  for (uint64_t chunk = mine.begin; chunk < mine.end; chunk += mine.stride) {
    const uint64_t begin = chunk * fw::kernels::kChunk;
    const uint64_t end = begin + fw::kernels::kChunk;
    fw::kernels::sum_chunk(p, begin, end < p.count ? end : p.count);
  }
}
#endif

#if FW_BUILDS(update_rows)
FW_KERNEL_RESIDENT(2) fw_update_rows(const FW_GRID_CONSTANT fw::kernels::update_params p) {
  fw::kernels::update_rows(p);
}
#endif
