// One queue pair's commands on the modelled drive, and their held completions.
//
// `admit` passes a command to the drive, which computes when it is due. Its completion is held
// until a visit after that time. One thread at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "nvme/model/held_completions.h"
#include "nvme/model/ssd_model.h"
#include "storage/storage.h"

namespace fw::native {

class DriveQueue {
 public:
  // Room for `held_max` completions, and for `visit_max` plain reads of a visit.
  DriveQueue(ModelledDrive& drive, uint32_t held_max, uint32_t visit_max)
      : drive_(drive), held_(held_max, monotonic_ns()), arrival_dues_(visit_max) {
    arrivals_.reserve(visit_max);
    arrival_cids_.reserve(visit_max);
  }

  uint32_t held() const { return held_.size(); }

  // No held completion is due before this; HeldCompletions::kNever if none is held.
  int64_t next_ns() const { return held_.next_ns(); }

  // When the current command is due. 0: at once, because the drive does not execute it.
  int64_t due_ns() const { return due_ns_; }
  void set_due_ns(int64_t due_ns) { due_ns_ = due_ns; }

  // Begins a visit: reads the clock and calls post(cid, status) for completions that are due.
  // Returns their number.
  template <typename Post>
  uint32_t begin_visit(Post post) {
    now_ns_ = monotonic_ns();
    return held_.release_until(now_ns_, post);
  }

  // Queues a plain read for `admit_arrivals`, which takes the drive's lock once for many.
  void arrive(uint16_t cid, uint32_t blocks) {
    arrivals_.push_back({blocks, false});
    arrival_cids_.push_back(cid);
  }

  // Admits the queued reads and holds their completions; calls post(cid, status) for those that are
  // due already. Returns how many it holds.
  template <typename Post>
  uint32_t admit_arrivals(Post post) {
    if (arrivals_.empty()) return 0;
    drive_.admit(now_ns_, arrivals_, arrival_dues_.data());
    const uint32_t before = held_.size();
    for (size_t i = 0; i < arrivals_.size(); ++i) {
      if (arrival_dues_[i] <= now_ns_) {
        post(arrival_cids_[i], uint16_t(nvme::kSuccess));
      } else {
        held_.hold(arrival_dues_[i], arrival_cids_[i], nvme::kSuccess);
      }
    }
    arrivals_.clear();
    arrival_cids_.clear();
    return held_.size() - before;
  }

  // Admits the current command. Commands without data, such as Flush, have 0 blocks.
  void admit(bool is_write, uint32_t blocks) {
    const ModelledDrive::Arrival arrival = {blocks, is_write};
    drive_.admit(now_ns_, {&arrival, 1}, &due_ns_);
  }

  // Holds the current command's completion. Returns false, and holds nothing, if it is due already.
  bool hold(uint16_t cid, uint16_t status) {
    if (due_ns_ <= now_ns_) return false;
    held_.hold(due_ns_, cid, status);
    return true;
  }

  // Makes everything due until the next visit, for a controller that stops.
  void take_away() { now_ns_ = HeldCompletions::kNever; }
  template <typename Post>
  void release_all(Post post) {
    held_.release_all(post);
  }

 private:
  ModelledDrive& drive_;
  HeldCompletions held_;
  int64_t now_ns_ = 0;
  int64_t due_ns_ = 0;
  // Plain reads of this visit that are not admitted yet.
  std::vector<ModelledDrive::Arrival> arrivals_;
  std::vector<uint16_t> arrival_cids_;
  std::vector<int64_t> arrival_dues_;
};

}  // namespace fw::native
