// What first_light measures in kernels: the queue pairs without the cache, by random reads straight
// into a buffer as BaM section 4.3 measures them, and sums over arrays beside plain loads.
#include "../bench.cuh"

namespace bench {

using namespace fw;

// `data` off leaves the bytes where they are.
struct queue_params {
  cache::line_cache* cache;  // to finish detached commands that a drain finds
  cache::volume* volume;
  char* target;  // `target_blocks` blocks, written round robin
  uint64_t target_blocks;
  uint64_t commands;  // in all
  uint64_t blocks;    // of the namespace, of block_bytes each
  uint64_t seed;
  uint32_t block_bytes;  // a multiple of 512
  uint32_t data;         // 1: move the data, 0: commands only
  uint32_t warps_max;    // warps of the launch that submit; 0: what `submitting_warps` chooses
  uint32_t reserved;
};
static_assert(sizeof(queue_params) == 72);

// How many warps of the launch submit. Each holds a slot for every lane from its ticket to the
// release. A full launch holds more slots than all rings have, so warps queue for slots in the
// order of tickets, and poll: on an H200 such a launch submits less than half of what smaller ones
// do. So warps hold half of the slots at most, and the next user of a slot finds it free. Copies of
// data reach the limit of the link long before that of the rings, and need all warps to keep it
// full.
FW_DEVICE uint32_t submitting_warps(const queue_params& p) {
  uint64_t most = p.warps_max;
  if (most == 0 && p.data == 0) {
    const cache::volume& v = *p.volume;
    const uint64_t slots = uint64_t(v.queue_count) << v.queues[0].depth_log2;
    most = slots / (2 * warp::kWarpWidth);
    if (most < v.queue_count) most = v.queue_count;
  }
  return most == 0 || most > warp::count() ? warp::count() : uint32_t(most);
}

struct reduce_params {
  array<uint32_t> data;
  const uint32_t* plain;  // reduce_plain: the same elements in device memory
  uint64_t* sum;          // one word, added to
  uint64_t count;         // elements to read
  uint64_t span;          // consecutive: elements that one warp reads in a row
  uint64_t seed;
  uint32_t random;  // 1: random elements, 0: consecutive ones
  uint32_t reserved;
};
static_assert(sizeof(reduce_params) == 120);

// Elements that a lane has in flight when it reads consecutive ones.
inline constexpr uint32_t kReduceUnroll = 8;

// Adds `count` random elements through `load` to `*sum`.
template <typename Load>
FW_DEVICE void sum_random(const reduce_params& p, uint64_t length, Load load) {
  uint64_t total = 0;
  for (uint64_t k = base::thread_index(); k < p.count; k += base::thread_count()) {
    total += load(mix64(k + p.seed) % length);
  }
  atomic::add_relaxed(p.sum, total);
}

// Adds the elements below `count` to `*sum`. A warp reads spans of consecutive elements, its lanes
// side by side: `load_several` for whole rounds, `load` for what is left.
template <typename LoadSeveral, typename Load>
FW_DEVICE void sum_consecutive(const reduce_params& p, LoadSeveral load_several, Load load) {
  constexpr uint64_t kRound = uint64_t(kReduceUnroll) * warp::kWarpWidth;
  uint64_t total = 0;
  for (uint64_t first = uint64_t(warp::index()) * p.span; first < p.count;
       first += uint64_t(warp::count()) * p.span) {
    const uint64_t end = first + p.span < p.count ? first + p.span : p.count;
    uint64_t i = first + warp::lane();
    // Counted in one register: rounds that it cannot count go the way of what is left.
    for (uint32_t round = uint32_t((end - first) / kRound); round != 0; round--, i += kRound) {
      uint32_t values[kReduceUnroll];
      load_several(i, values);
      FW_UNROLL
      for (uint32_t k = 0; k < kReduceUnroll; k++) total += values[k];
    }
    for (; i < end; i += warp::kWarpWidth) total += load(i);
  }
  atomic::add_relaxed(p.sum, total);
}

}  // namespace bench

// The ceiling of the in-place route: the same random blocks, pulled without any command.
FW_KERNEL pull_blocks(const FW_GRID_CONSTANT bench::queue_params p) {
  using namespace fw;
  const uint64_t base = p.volume->queues[0].data.mapped_base;
  for (uint64_t i = warp::index(); i < p.commands; i += warp::count()) {
    const uint64_t block = bench::mix64(i + p.seed) % p.blocks;
    warp::copy<warp::source::kStream>(
        lanes::all(), reinterpret_cast<uint64_t>(p.target) + (i % p.target_blocks) * p.block_bytes,
        base + block * p.block_bytes, p.block_bytes);
  }
}

FW_KERNEL_RESIDENT(2) queue_read(const FW_GRID_CONSTANT bench::queue_params p) {
  using namespace fw;
  const lanes here = lanes::all();
  cache::volume& v = *p.volume;
  nvme::queue_pair& q = v.queues[warp::index() % v.queue_count];
  const uint32_t warps = bench::submitting_warps(p);
  if (warp::index() >= warps) return;
  const uint32_t blocks = p.block_bytes >> nvme::kLbaShift;
  const uint64_t stride = uint64_t(warps) * warp::kWarpWidth;
  for (uint64_t first = uint64_t(warp::index()) * warp::kWarpWidth; first < p.commands;
       first += stride) {
    const uint64_t item = first + warp::lane();
    const lanes members = here.ballot(item < p.commands);
    const uint64_t lba = bench::mix64(item + p.seed) % p.blocks * blocks;
    const uint64_t target =
        reinterpret_cast<uint64_t>(p.target) + (item % p.target_blocks) * p.block_bytes;
    const auto take = [&](lanes bundle, uint64_t address, bool) {
      if (p.data == 0 || q.data.path == nvme::kDirect) return;
      // Each lane has acquired its own completion; now all lanes read all of the data.
      here.sync();
      for (const uint32_t source : bundle) {
        warp::copy<warp::source::kStream>(here, here.broadcast(target, source),
                                          here.broadcast(address, source), p.block_bytes);
      }
      here.sync();
    };
    if (!bench::read_blocks(*p.cache, v, q, here, members, lba, blocks, target, take)) return;
  }
}

FW_KERNEL_RESIDENT(5) reduce_array(const FW_GRID_CONSTANT bench::reduce_params p) {
  using namespace fw;
  if (p.random != 0) {
    bench::sum_random(p, p.data.length, [&](uint64_t i) { return p.data[i]; });
    return;
  }
  cursor<uint32_t> data(p.data);
  bench::sum_consecutive(
      p,
      [&](uint64_t i, uint32_t (&values)[bench::kReduceUnroll]) {
        data.load(i, warp::kWarpWidth, values);
      },
      [&](uint64_t i) { return data[i]; });
}
FW_KERNEL_RESIDENT(8) reduce_plain(const FW_GRID_CONSTANT bench::reduce_params p) {
  using namespace fw;
  if (p.random != 0) {
    bench::sum_random(p, p.data.length, [&](uint64_t i) { return p.plain[i]; });
    return;
  }
  bench::sum_consecutive(
      p,
      [&](uint64_t i, uint32_t (&values)[bench::kReduceUnroll]) {
        FW_UNROLL
        for (uint32_t k = 0; k < bench::kReduceUnroll; k++) {
          values[k] = p.plain[i + k * warp::kWarpWidth];
        }
      },
      [&](uint64_t i) { return p.plain[i]; });
}
