// Queues in a drive; see drive_queues.h.
#include "vfio/drive_queues.h"

#include "base/require.h"
#include "flashwarp/base/atomic.cuh"

namespace fw::native::vfio {

QueueLease::QueueLease(std::shared_ptr<Drive> drive, uint32_t count)
    : drive_(std::move(drive)),
      registers_(drive_->function()->map_registers()),
      ids_(drive_->take_ids(count)) {}

std::vector<std::pair<uint64_t, uint64_t>> QueueLease::doorbells() const {
  const uint32_t stride = drive_->capabilities().doorbell_stride;
  std::vector<std::pair<uint64_t, uint64_t>> all;
  for (uint16_t id : ids_) {
    all.emplace_back(registers_->address() + sq_doorbell(stride, id),
                     registers_->address() + cq_doorbell(stride, id));
  }
  return all;
}

void QueueLease::release() {
  if (released_.exchange(true) || drive_->in_forked_child()) return;
  // A late store must not reach a queue that gets the number next.
  registers_->detach();
  drive_->give_ids(ids_);
}

DriveQueues::DriveQueues(std::shared_ptr<QueueLease> lease, std::vector<QueuePairAddresses> pairs,
                         std::pair<uint64_t, uint64_t> rings, std::shared_ptr<DataRegion> data,
                         int rings_file)
    : Controller(std::move(pairs)),
      lease_(std::move(lease)),
      drive_(lease_->drive()),
      data_(std::move(data)) {
  require(queue_pairs().size() == lease_->ids().size(), "as many queue pairs as the lease has");
  const auto [begin, nbytes] = rings;
  for (const QueuePairAddresses& pair : queue_pairs()) {
    require(pair.depth >= 2 && pair.depth <= drive_->capabilities().entries_max,
            "depth is not within the drive's limits");
    require(pair.sq % kMemoryPageBytes == 0 && pair.cq % kMemoryPageBytes == 0,
            "rings of a drive begin on a page");
    require(pair.sq >= begin && pair.cq >= begin && pair.sq < begin + nbytes &&
                pair.cq < begin + nbytes,
            "the rings lie outside of their memory");
  }
  rings_ = std::make_unique<DmaRegion>(drive_->function(), begin, nbytes, rings_file);
}

std::vector<QueuePairPlace> DriveQueues::places() const {
  std::vector<QueuePairPlace> all;
  for (const QueuePairAddresses& pair : queue_pairs()) {
    all.push_back({pair.id, pair.depth, rings_->iova_of(pair.sq), rings_->iova_of(pair.cq)});
  }
  return all;
}

void DriveQueues::set_failed_words(std::vector<uint64_t> addresses) {
  const std::lock_guard guard(loss_);
  failed_words_ = std::move(addresses);
}

void DriveQueues::start() {
  const std::lock_guard guard(life_);
  if (in_forked_child() || serving()) return;
  require(!stopped_, "a drive's queues cannot be started again: their rings would begin anew");
  drive_->create(places(), *this);
  serving_.store(true, std::memory_order_release);
}

void DriveQueues::stop() {
  if (in_forked_child()) {
    serving_.store(false, std::memory_order_release);
    return;
  }
  const std::lock_guard guard(life_);
  if (stopped_) return;
  stopped_ = true;
  if (rings_ != nullptr) drive_->remove(places(), *this);
  serving_.store(false, std::memory_order_release);
  // From here on the IOMMU keeps the drive out of this memory, whatever state it is in.
  rings_.reset();
  data_.reset();
  if (!lease_->held()) lease_->release();
  set_failed_words({});
}

void DriveQueues::retire(const std::string& why) {
  const std::lock_guard guard(life_);
  if (in_forked_child() || stopped_ || !serving()) return;
  // CPU threads ring no doorbell any more; those of a GPU belong to queues that do not exist.
  lease_->detach();
  drive_->remove(places(), *this);
  lose(why);
}

void DriveQueues::lose(const std::string& why) {
  lease_->detach();
  const std::lock_guard guard(loss_);
  why_lost_ = why;
  // Relaxed: waits look at the word alone.
  for (uint64_t word : failed_words_) {
    atomic::store_relaxed(reinterpret_cast<uint32_t*>(word), uint32_t(1));
  }
}

std::string DriveQueues::lost() const {
  const std::lock_guard guard(loss_);
  return why_lost_;
}

Description DriveQueues::describe() const {
  Description d;
  d.add("kind", std::string("drive"));
  d.add("engine", drive_->identity().model + " at " + drive_->name() + " through VFIO (" +
                      drive_->function()->iommu() + ")");
  d.add("serial", drive_->identity().serial);
  d.add("firmware", drive_->identity().firmware);
  d.add("queue_pairs", uint64_t(queue_pairs().size()));
  d.add("depth", uint64_t(queue_pairs().front().depth));
  const std::string why = lost();
  if (!why.empty()) d.add("lost", why);
  return d;
}

}  // namespace fw::native::vfio
