// Rows of a client of a shared cache: a thread has many requests to the owner under way.
//
// For threads of the CPU device, of which there are few. A warp of a GPU has as many lanes as these
// have requests.
#pragma once

#include "flashwarp/cache/owner_access.cuh"
#include "segments.cuh"

namespace fw::kernels {

// The segments that a thread has asked the owner for, in their order.
template <bool kStores>
class asked_segments {
 public:
  FW_DEVICE asked_segments(cache::line_cache& c, cache::volume& v) : cache_(c), volume_(v) {}

  // Asks for a segment, and waits for earlier ones if there is no room.
  FW_DEVICE void add(const segment& piece) {
    cache::owner_requests& o = *cache_.owner;
    nvme::deadline limit(volume_.queues[0].data);
    if (count_ == kMost) end_oldest();
    uint32_t slot = cache::take_slot(o);
    for (; slot == cache::kNoSlot; slot = cache::take_slot(o)) {
      if (count_ != 0) {
        end_oldest();
      } else if (limit.passed() || cache::has_failed(volume_)) {
        atomic::store_relaxed(&cache::failure_mark(volume_), 1u);
        fail(nvme::kTimedOut, piece);
        return;
      } else {
        base::pause(nvme::kBackOffNs);  // others have all slots
      }
    }
    if constexpr (kStores) {
      const uint64_t buffer = reinterpret_cast<uint64_t>(cache::buffer_of(o, slot));
      warp::copy<warp::source::kStream>(lanes::all(), buffer, piece.buffer, piece.bytes);
      atomic::add_relaxed(&cache::shard_of(volume_).bytes_written, piece.bytes);
    }
    const uint64_t begin = (piece.line << cache_.geometry.line_shift) + piece.offset;
    cache::ask(o, slot, kStores ? cache::kOwnerStore : cache::kOwnerRead, begin, piece.bytes);
    asked_[(first_ + count_++) % kMost] = {piece, slot};
  }

  // Waits for all of them.
  FW_DEVICE void end() {
    while (count_ != 0) end_oldest();
  }

 private:
  static constexpr uint32_t kMost = 128;

  struct asked {
    segment piece;
    uint32_t slot;
  };

  FW_DEVICE void end_oldest() {
    cache::owner_requests& o = *cache_.owner;
    const lanes here = lanes::all();
    const asked& oldest = asked_[first_];
    const uint32_t status = cache::wait_for_owner(o, volume_, here, here, oldest.slot);
    if (!kStores && status == nvme::kSuccess) {
      const uint64_t buffer = reinterpret_cast<uint64_t>(cache::buffer_of(o, oldest.slot));
      warp::copy<warp::source::kFrame>(here, oldest.piece.buffer, buffer, oldest.piece.bytes);
    }
    if (status != nvme::kTimedOut) cache::free_slot(o, oldest.slot);
    if (status != nvme::kSuccess) fail(status, oldest.piece);
    first_ = (first_ + 1) % kMost;
    count_--;
  }

  FW_DEVICE void fail(uint32_t status, const segment& piece) {
    cache::record_error(volume_, status, kStores ? nvme::kWrite : nvme::kRead, piece.line);
  }

  cache::line_cache& cache_;
  cache::volume& volume_;
  uint32_t first_ = 0;
  uint32_t count_ = 0;
  asked asked_[kMost];
};

// Sends a thread's segments to the owner.
FW_DEVICE void scatter_to_owner(const row_params& p) {
  cache::volume& v = *p.volume;
  asked_segments<true> sent(*p.cache, v);
  cache::tally tally;
  const warp::share mine = warp::share_of(segment_count(p), 1);
  for (uint64_t item = mine.begin; item < mine.end; item += mine.stride) {
    const segment piece = segment_at(p, v.line_begin, item);
    if (piece.bytes == 0) continue;  // strays were noted by the check before
    tally.misses++;
    tally.bytes_used += piece.bytes;
    sent.add(piece);
  }
  sent.end();
  add_events(v, lanes::all(), tally, {});
}

}  // namespace fw::kernels
