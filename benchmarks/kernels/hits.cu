// Hits, three ways: through fw::array, through a reference count for each line, and plain.
//
// The reference-counting design is BaM's (section 3.4), written anew: a state word and a frame
// number for every line of the data; lanes that want one line find each other, the first adds
// their number to the line's count, all load, the first takes it off again. Its statistics are left
// out. The count is added to with acquire, for the fill that came before, and taken from with
// release, for the eviction that may come after; where kOrdered is false with neither, which is no
// cache any more, but shows what the counting alone costs.
#include "../bench.cuh"

namespace {

constexpr uint32_t kValid = 1u << 31;
constexpr uint32_t kUnroll = 8;  // elements that a lane has in flight when it reads in order

// Every line has a state word and a frame, wherever the line is: what BaM pays by the data. Where
// kStream is true, the L2 cache gives up elements before it gives up state words.
template <bool kOrdered, bool kStream = false>
struct counted {
  uint32_t* states;
  const uint32_t* frames;
  const char* base;
  uint32_t line_shift;

  FW_DEVICE uint32_t enter(uint64_t line, uint32_t users) const {
    return kOrdered ? fw::atomic::add_acquire(&states[line], users)
                    : fw::atomic::add_relaxed(&states[line], users);
  }
  FW_DEVICE void leave(uint64_t line, uint32_t users) const {
    const uint32_t less = uint32_t(0) - users;
    kOrdered ? fw::atomic::add_release(&states[line], less)
             : fw::atomic::add_relaxed(&states[line], less);
  }

  FW_DEVICE const char* acquire(uint64_t line, fw::lanes& group) const {
    group = fw::warp::active().match(line);
    uint32_t frame = 0;
    if (group.leads()) {
      const uint32_t state = enter(line, group.count());
      frame = (state & kValid) != 0 ? frames[line] : 0;
    }
    frame = group.broadcast(frame);
    return base + (uint64_t(frame) << line_shift);
  }
  FW_DEVICE void release(uint64_t line, fw::lanes group) const {
    group.sync();
    if (group.leads()) {
      leave(line, group.count());
    }
  }
  FW_DEVICE uint32_t load(uint64_t i) const {
    const uint64_t byte = i * sizeof(uint32_t);
    const uint64_t line = byte >> line_shift;
    fw::lanes group;
    const char* frame = acquire(line, group);
    const char* at = frame + (byte & ((1u << line_shift) - 1));
    const uint32_t value =
        kStream ? fw::atomic::raw<4>::load_stream(at) : fw::atomic::raw<4>::load(at);
    release(line, group);
    return value;
  }
};

// A thread's own count on the line that it stays on: BaM's reference reuse.
template <bool kOrdered>
struct counted_cursor {
  const counted<kOrdered>& table;
  uint64_t line = ~uint64_t(0);
  const char* frame = nullptr;

  FW_DEVICE uint32_t load(uint64_t i) {
    const uint64_t byte = i * sizeof(uint32_t);
    const uint64_t wanted = byte >> table.line_shift;
    if (wanted != line) {
      leave();
      table.enter(wanted, 1);
      frame = table.base + (uint64_t(table.frames[wanted]) << table.line_shift);
      line = wanted;
    }
    return fw::atomic::raw<4>::load(frame + (byte & ((1u << table.line_shift) - 1)));
  }
  FW_DEVICE void leave() {
    if (frame != nullptr) table.leave(line, 1);
  }
};

// Warps take spans in turn; their lanes read side by side, kUnroll elements at a time.
template <typename Several>
FW_DEVICE void sum_in_order(uint64_t length, uint64_t span, uint64_t* sum, Several several) {
  constexpr uint64_t kRound = uint64_t(kUnroll) * fw::base::kWarpWidth;
  uint64_t total = 0;
  for (uint64_t first = fw::warp::index() * span; first < length;
       first += fw::warp::count() * span) {
    for (uint64_t i = first; i + kRound <= first + span && i + kRound <= length; i += kRound) {
      uint32_t values[kUnroll];
      several(i + fw::warp::lane(), values);
      FW_UNROLL
      for (uint32_t k = 0; k < kUnroll; k++) total += values[k];
    }
  }
  fw::atomic::add_relaxed(sum, total);
}

// The same, one element at a time.
template <typename Load>
FW_DEVICE void sum_one_by_one(uint64_t length, uint64_t span, uint64_t* sum, Load load) {
  uint64_t total = 0;
  for (uint64_t first = fw::warp::index() * span; first < length;
       first += fw::warp::count() * span) {
    const uint64_t end = first + span < length ? first + span : length;
    for (uint64_t i = first + fw::warp::lane(); i < end; i += fw::base::kWarpWidth) {
      total += load(i);
    }
  }
  fw::atomic::add_relaxed(sum, total);
}

}  // namespace

FW_KERNEL
random_array(const FW_GRID_CONSTANT fw::array<const uint32_t> data, uint64_t count, uint64_t seed,
             uint64_t* sum) {
  bench::sum_random(data.size(), count, seed, sum, [&](uint64_t i) { return data[i]; });
}
FW_KERNEL
random_counted(uint32_t* states, const uint32_t* frames, const uint32_t* base, uint32_t line_shift,
               uint64_t length, uint64_t count, uint64_t seed, uint64_t* sum) {
  const counted<true> table = {states, frames, reinterpret_cast<const char*>(base), line_shift};
  bench::sum_random(length, count, seed, sum, [&](uint64_t i) { return table.load(i); });
}
FW_KERNEL
random_unordered(uint32_t* states, const uint32_t* frames, const uint32_t* base,
                 uint32_t line_shift, uint64_t length, uint64_t count, uint64_t seed,
                 uint64_t* sum) {
  const counted<false> table = {states, frames, reinterpret_cast<const char*>(base), line_shift};
  bench::sum_random(length, count, seed, sum, [&](uint64_t i) { return table.load(i); });
}
FW_KERNEL
random_streamed(uint32_t* states, const uint32_t* frames, const uint32_t* base, uint32_t line_shift,
                uint64_t length, uint64_t count, uint64_t seed, uint64_t* sum) {
  const counted<true, true> table = {states, frames, reinterpret_cast<const char*>(base),
                                     line_shift};
  bench::sum_random(length, count, seed, sum, [&](uint64_t i) { return table.load(i); });
}
FW_KERNEL
random_plain(const uint32_t* data, uint64_t length, uint64_t count, uint64_t seed, uint64_t* sum) {
  bench::sum_random(length, count, seed, sum, [&](uint64_t i) { return data[i]; });
}

FW_KERNEL
ordered_array(const FW_GRID_CONSTANT fw::array<const uint32_t> data, uint64_t span, uint64_t* sum) {
  fw::cursor<const uint32_t> line(data);
  sum_in_order(data.size(), span, sum, [&](uint64_t i, uint32_t (&values)[kUnroll]) {
    line.load(i, fw::base::kWarpWidth, values);
  });
}
FW_KERNEL
ordered_counted(uint32_t* states, const uint32_t* frames, const uint32_t* base, uint32_t line_shift,
                uint64_t length, uint64_t span, uint64_t* sum) {
  const counted<true> table = {states, frames, reinterpret_cast<const char*>(base), line_shift};
  sum_in_order(length, span, sum, [&](uint64_t i, uint32_t (&values)[kUnroll]) {
    FW_UNROLL
    for (uint32_t k = 0; k < kUnroll; k++) values[k] = table.load(i + k * fw::base::kWarpWidth);
  });
}
FW_KERNEL
ordered_counted_reused(uint32_t* states, const uint32_t* frames, const uint32_t* base,
                       uint32_t line_shift, uint64_t length, uint64_t span, uint64_t* sum) {
  const counted<true> table = {states, frames, reinterpret_cast<const char*>(base), line_shift};
  counted_cursor<true> line{table};
  sum_in_order(length, span, sum, [&](uint64_t i, uint32_t (&values)[kUnroll]) {
    FW_UNROLL
    for (uint32_t k = 0; k < kUnroll; k++) values[k] = line.load(i + k * fw::base::kWarpWidth);
  });
  line.leave();
}
FW_KERNEL
ordered_plain(const uint32_t* data, uint64_t length, uint64_t span, uint64_t* sum) {
  sum_in_order(length, span, sum, [&](uint64_t i, uint32_t (&values)[kUnroll]) {
    FW_UNROLL
    for (uint32_t k = 0; k < kUnroll; k++) values[k] = data[i + k * fw::base::kWarpWidth];
  });
}

FW_KERNEL
single_cursor(const FW_GRID_CONSTANT fw::array<const uint32_t> data, uint64_t span, uint64_t* sum) {
  fw::cursor<const uint32_t> line(data);
  sum_one_by_one(data.size(), span, sum, [&](uint64_t i) { return line[i]; });
}
// With 64 warps on a multiprocessor, of which each waits for its two looks. In a program of its
// own: functions that kernels share take no more registers than the fewest that one of them may
// have, so all kernels beside it would have 64 warps, too.
#ifdef BENCH_MANY_WARPS
FW_KERNEL_RESIDENT(8)
single_cursor_of_many(const FW_GRID_CONSTANT fw::array<const uint32_t> data, uint64_t span,
                      uint64_t* sum) {
  fw::cursor<const uint32_t> line(data);
  sum_one_by_one(data.size(), span, sum, [&](uint64_t i) { return line[i]; });
}
#endif
FW_KERNEL
single_range(const FW_GRID_CONSTANT fw::array<const uint32_t> data, uint64_t span, uint64_t* sum) {
  uint64_t total = 0;
  for (uint64_t first = fw::warp::index() * span; first < data.size();
       first += fw::warp::count() * span) {
    const uint64_t end = first + span < data.size() ? first + span : data.size();
    for (uint32_t value :
         fw::range<const uint32_t>(data, first + fw::warp::lane(), end, fw::base::kWarpWidth)) {
      total += value;
    }
  }
  fw::atomic::add_relaxed(sum, total);
}
FW_KERNEL
single_each(const FW_GRID_CONSTANT fw::array<const uint32_t> data, uint64_t* sum) {
  uint64_t total = 0;
  fw::each(data, [&](uint64_t, uint32_t value) { total += value; });
  fw::atomic::add_relaxed(sum, total);
}
FW_KERNEL
single_reused(uint32_t* states, const uint32_t* frames, const uint32_t* base, uint32_t line_shift,
              uint64_t length, uint64_t span, uint64_t* sum) {
  const counted<true> table = {states, frames, reinterpret_cast<const char*>(base), line_shift};
  counted_cursor<true> line{table};
  sum_one_by_one(length, span, sum, [&](uint64_t i) { return line.load(i); });
  line.leave();
}
FW_KERNEL
single_plain(const uint32_t* data, uint64_t length, uint64_t span, uint64_t* sum) {
  sum_one_by_one(length, span, sum, [&](uint64_t i) { return data[i]; });
}
