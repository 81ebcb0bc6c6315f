// Rings of one command at a time; see host_queue.h.
#include "vfio/host_queue.h"

#include <ctime>

#include "flashwarp/base/atomic.cuh"
#include "storage/storage.h"
#include "vfio/registers.h"

namespace fw::native::vfio {
namespace {

// A drive answers a read in 10 to 100 us, an admin command in up to seconds.
constexpr int64_t kSpinNs = 200'000;
constexpr timespec kNap = {0, 50'000};

}  // namespace

HostQueue::HostQueue(std::shared_ptr<PciFunction> function, std::shared_ptr<Registers> registers,
                     uint32_t doorbell_stride, uint16_t id)
    : registers_(std::move(registers)),
      memory_(std::move(function), 2 * kMemoryPageBytes),
      sq_doorbell_(uint32_t(sq_doorbell(doorbell_stride, id))),
      cq_doorbell_(uint32_t(cq_doorbell(doorbell_stride, id))),
      id_(id) {}

uint16_t HostQueue::submit(nvme::command entry) {
  const uint16_t cid = ++cid_;
  entry.opcode_cid = (entry.opcode_cid & 0xFFFF) | uint32_t(cid) << 16;
  memory_.as<nvme::command>()[tail_] = entry;
  tail_ = (tail_ + 1) % kDepth;
  // The entry, and a write's data, come before the doorbell.
  atomic::fence_system();
  registers_->write(sq_doorbell_, tail_);
  return cid;
}

bool HostQueue::take(nvme::completion& result) {
  const auto* ring =
      reinterpret_cast<const nvme::completion*>(memory_.as<char>() + kMemoryPageBytes);
  const nvme::completion* entry = &ring[head_];
  // The last half of the entry, which has the phase tag, in one load.
  const uint64_t upper = atomic::load_acquire(reinterpret_cast<const uint64_t*>(entry) + 1);
  if ((upper >> 48 & 1) != phase_) return false;
  result = *entry;
  // The loads of the entry, and of a read's data, come behind the load of its phase tag, and
  // before the doorbell.
  atomic::fence_system();
  head_ = (head_ + 1) % kDepth;
  if (head_ == 0) phase_ ^= 1;
  registers_->write(cq_doorbell_, head_);
  return true;
}

bool HostQueue::wait(uint16_t cid, int64_t limit_ms, const std::atomic<bool>& lost,
                     nvme::completion& result) {
  const int64_t start = monotonic_ns();
  while (true) {
    while (take(result)) {
      if (result.cid == cid) return true;
    }
    const int64_t waited = monotonic_ns() - start;
    // Relaxed: a flag alone, whose reason the caller looks up under a lock.
    if (waited > limit_ms * 1'000'000 || lost.load(std::memory_order_relaxed)) return false;
    if (waited > kSpinNs) nanosleep(&kNap, nullptr);
  }
}

}  // namespace fw::native::vfio
