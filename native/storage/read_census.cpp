// Linear counting of a sample, and streams by chunk; see read_census.h.
#include "storage/read_census.h"

#include <algorithm>
#include <cmath>

#include "storage/storage.h"

namespace fw::native {
namespace {

// The default size of a line. A file of shorter lines sets more marks, which costs precision.
constexpr uint64_t kReadBytes = 4096;

// One short read of 16 is counted, and one longer read of four, because threads contend for the
// counters for longer than a read of a cached line takes. Reads in order still count several times
// in each chunk. The offset chooses the sample, so a repeated read is counted each time.
constexpr uint32_t kShortSampleBits = 4;
constexpr uint32_t kLongerSampleBits = 2;
constexpr uint64_t kLongerBytes = 16 << 10;

// Reads in one chunk, or in a chunk and then the next, are a stream. A chunk is twice what the
// kernel reads ahead by default, because threads that share a range read its parts in any order.
constexpr uint32_t kChunkShift = 18;

// A longer pause between reads is the caller's and does not count.
constexpr int64_t kPauseNs = 1'000'000;

uint32_t mark_bits_for(uint64_t file_nbytes, uint64_t marks) {
  uint32_t bits = kShortSampleBits;
  while ((file_nbytes / kReadBytes >> bits) > marks / 2) ++bits;
  return bits;
}

uint32_t sample_bits_for(uint64_t n) {
  if (n <= kReadBytes) return kShortSampleBits;
  return n <= kLongerBytes ? kLongerSampleBits : 0;
}

bool begins_with_zeros(uint64_t hash, uint32_t bits) {
  return bits == 0 || hash >> (64 - bits) == 0;
}

}  // namespace

ReadCensus::ReadCensus(uint64_t file_nbytes) : mark_bits_(mark_bits_for(file_nbytes, kMarks)) {}

// All accesses are relaxed: the figures order no other memory.
void ReadCensus::note(uint64_t offset, uint64_t n, bool waited) {
  constexpr auto relaxed = std::memory_order_relaxed;
  // Fibonacci hashing, of which the upper bits are used.
  const uint64_t hash = (offset >> 9) * 0x9E3779B97F4A7C15;
  const uint32_t bits = sample_bits_for(n);
  if (!begins_with_zeros(hash, bits)) return;
  const uint64_t weight = uint64_t(1) << bits;
  Shard& shard = own(shards_);
  shard.reads.fetch_add(weight, relaxed);
  shard.nbytes.fetch_add(weight * n, relaxed);
  if (waited) shard.waited_nbytes.fetch_add(weight * n, relaxed);
  if (is_near(shard, offset, n)) shard.near_reads.fetch_add(weight, relaxed);
  if (begins_with_zeros(hash, mark_bits_)) mark(hash << mark_bits_);
  spend(shard, monotonic_ns());
}

ReadCensus::Shard& ReadCensus::own(Shard (&shards)[kShards]) {
  static std::atomic<uint32_t> threads{0};
  static thread_local const uint32_t index = threads.fetch_add(1, std::memory_order_relaxed);
  return shards[index % kShards];
}

bool ReadCensus::is_near(Shard& shard, uint64_t offset, uint64_t n) {
  const uint64_t first = (offset >> kChunkShift) + 1;
  const uint64_t last = ((offset + std::max<uint64_t>(n, 1) - 1) >> kChunkShift) + 1;
  bool near = false;
  bool known = false;
  for (const Counter& slot : shard.recent) {
    const uint64_t chunk = slot.load(std::memory_order_relaxed);
    near |= chunk == first || chunk + 1 == first;
    known |= chunk == last;
  }
  if (!known) {
    const uint32_t turn = shard.turn.fetch_add(1, std::memory_order_relaxed);
    shard.recent[turn % kRecent].store(last, std::memory_order_relaxed);
  }
  return near;
}

void ReadCensus::mark(uint64_t hash) {
  static_assert(kMarks == 1 << 16);
  const uint64_t place = hash >> 48;
  std::atomic<uint64_t>& word = marks_[place / 64];
  const uint64_t bit = uint64_t(1) << (place % 64);
  if ((word.load(std::memory_order_relaxed) & bit) != 0) return;
  if ((word.fetch_or(bit, std::memory_order_relaxed) & bit) == 0) {
    marked_.fetch_add(1, std::memory_order_relaxed);
  }
}

void ReadCensus::spend(Shard& shard, int64_t now_ns) {
  const int64_t step = now_ns - shard.last_ns.exchange(now_ns, std::memory_order_relaxed);
  if (step > 0 && step < kPauseNs) {
    shard.busy_ns.fetch_add(uint64_t(step), std::memory_order_relaxed);
  }
}

uint64_t ReadCensus::nbytes() const {
  uint64_t sum = 0;
  for (const Shard& shard : shards_) sum += shard.nbytes.load(std::memory_order_relaxed);
  return sum;
}

ReadCensus::Figures ReadCensus::figures() const {
  constexpr auto relaxed = std::memory_order_relaxed;
  Figures found;
  for (const Shard& shard : shards_) {
    found.reads += shard.reads.load(relaxed);
    found.nbytes += shard.nbytes.load(relaxed);
    found.waited_nbytes += shard.waited_nbytes.load(relaxed);
    found.near_reads += shard.near_reads.load(relaxed);
    found.busy_ns += shard.busy_ns.load(relaxed);
  }
  if (found.reads == 0) return found;
  // Linear counting: n different reads leave m * exp(-n / m) of m marks unset. If all are set,
  // count one as unset; the result is then too small.
  const double unset = double(kMarks - std::min<uint64_t>(marked_.load(relaxed), kMarks - 1));
  const double different = -double(kMarks) * std::log(unset / kMarks) * std::exp2(mark_bits_);
  const double touched = different * double(found.nbytes) / double(found.reads);
  found.touched_nbytes = std::min(found.nbytes, uint64_t(touched));
  return found;
}

void ReadCensus::restart() {
  constexpr auto relaxed = std::memory_order_relaxed;
  for (Shard& shard : shards_) {
    shard.reads.store(0, relaxed);
    shard.nbytes.store(0, relaxed);
    shard.waited_nbytes.store(0, relaxed);
    shard.near_reads.store(0, relaxed);
    shard.busy_ns.store(0, relaxed);
    for (Counter& chunk : shard.recent) chunk.store(0, relaxed);
  }
  marked_.store(0, relaxed);
  for (Counter& word : marks_) word.store(0, relaxed);
}

}  // namespace fw::native
