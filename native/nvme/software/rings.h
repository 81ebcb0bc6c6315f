// The controller's side of a queue pair's two rings: SQ head, CQ tail and phase.
//
// A command is fetched only if a place in the CQ is reserved for its completion, so entries that
// were not consumed are never overwritten. One thread at a time.
#pragma once

#include <cstdint>

#include "flashwarp/base/atomic.cuh"
#include "flashwarp/nvme/command.cuh"
#include "nvme/controller.h"
#include "nvme/error_log.h"
#include "nvme/software/counters.h"

namespace fw::native {

class Rings {
 public:
  // The most commands of one `serve`: enough to spread the cost of the doorbell's cache miss, and
  // few enough that other queues do not wait long.
  static constexpr uint32_t kVisitMax = 256;

  Rings(const QueuePairAddresses& addresses, ErrorLog& errors, QueueCounters& counters);

  uint16_t id() const { return id_; }
  uint32_t depth() const { return depth_; }
  uint32_t head() const { return head_; }

  // Whether a doorbell was invalid. Nothing is fetched from these rings any more.
  bool failed() const { return failed_; }

  // Any thread. Relaxed: `fetchable` looks again.
  uint32_t rung_tail() const { return atomic::load_relaxed(sq_doorbell_); }

  // How many rung commands may be fetched now: at most kVisitMax, and no more than the CQ has room
  // for beside `promised` completions.
  uint32_t fetchable(uint32_t promised) {
    if (failed_) return 0;
    const uint32_t tail = this->tail();
    counters_.doorbell_reads.add(1);
    if (tail == head_) return 0;
    return fetchable_until(tail, promised);
  }

  // As `fetchable`, for a doorbell value that the caller has read and that is not the head.
  uint32_t fetchable_until(uint32_t tail, uint32_t promised);

  // Acquire: the submitter wrote the entries before it rang.
  uint32_t tail() const { return atomic::load_acquire(sq_doorbell_); }

  const nvme::command& next() const { return sq_[head_]; }
  void advance() { head_ = head_ + 1 == depth_ ? 0 : head_ + 1; }

  void prefetch() const {
    __builtin_prefetch(&sq_[head_] + kPrefetchEntries);
    __builtin_prefetch(&cq_[cq_tail_] + kPrefetchEntries, 1);
  }

  void post(uint16_t cid, uint16_t status) {
    auto* entry = reinterpret_cast<uint64_t*>(&cq_[cq_tail_]);
    const uint64_t upper = uint64_t(head_) | uint64_t(id_) << 16 | uint64_t(cid) << 32 |
                           uint64_t(uint16_t(status << 1 | phase_)) << 48;
    // Relaxed, then release: a consumer that sees the phase tag sees the whole entry, and the data.
    atomic::store_relaxed(&entry[0], uint64_t(0));
    atomic::store_release(&entry[1], upper);
    if (++cq_tail_ == depth_) {
      cq_tail_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  // How far ahead entries are prefetched. The submitter wrote them, so each is a cache miss of
  // about 100 ns, and a command takes about 5 ns.
  static constexpr uint32_t kPrefetchEntries = 16;

  bool read_cq_doorbell();
  void fail(const char* what, uint32_t value);

  nvme::command* const sq_;
  nvme::completion* const cq_;
  const uint32_t* const sq_doorbell_;
  const uint32_t* const cq_doorbell_;
  const uint32_t depth_;
  const uint16_t id_;
  uint32_t head_ = 0;          // next SQ entry to fetch
  uint32_t cq_tail_ = 0;       // next CQ entry to post
  uint32_t cq_head_seen_ = 0;  // last value of the CQ head doorbell
  uint16_t phase_ = 1;
  bool failed_ = false;
  ErrorLog& errors_;
  QueueCounters& counters_;
};

}  // namespace fw::native
