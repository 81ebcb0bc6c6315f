// The host's side of batches (nvme/batch.cuh): controllers count their completions, and a watch
// sees to it that no stream waits for one for ever. Nothing here calls CUDA, or waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flashwarp/base/atomic.cuh"
#include "flashwarp/nvme/batch.cuh"

namespace fw::native {

// Where the records of batches are, and how many.
struct BatchRecords {
  uint64_t address = 0;
  uint32_t count = 0;

  nvme::batch_record& operator[](uint32_t i) const {
    return reinterpret_cast<nvme::batch_record*>(address)[i];
  }
};

// Counts the completed commands of one queue pair. One thread at a time.
class BatchCounts {
 public:
  BatchCounts(const BatchRecords& records, uint32_t depth)
      : records_(records), batch_of_(records.count == 0 ? 0 : depth) {}

  // A command was fetched. What names no batch, or none that exists, is not counted.
  void fetched(const nvme::command& entry) {
    const uint32_t number = nvme::batch_of(entry);
    const uint32_t cid = entry.opcode_cid >> 16;
    if (number == 0 || number > records_.count || cid >= batch_of_.size()) return;
    if (batch_of_[cid] == 0) ++outstanding_;
    batch_of_[cid] = number;
  }

  // Its completion was posted.
  void posted(uint16_t cid) {
    if (outstanding_ != 0) count(cid);
  }

 private:
  void count(uint16_t cid) {
    if (cid >= batch_of_.size() || batch_of_[cid] == 0) return;
    nvme::batch_record& record = records_[batch_of_[cid] - 1];
    batch_of_[cid] = 0;
    --outstanding_;
    // Release: whoever ends the batch passes on every command's completion.
    const uint32_t completed = atomic::add_release(&record.completed, 1u) + 1;
    // The last warp of the launch stores `submitted` and looks at `completed`, with the same fence
    // in between: one of the two sees equal numbers.
    atomic::fence_sequential_system();
    if (atomic::load_relaxed(&record.submitted) == completed) {
      atomic::store_release(&record.done, 1u);
    }
  }

  const BatchRecords records_;
  std::vector<uint32_t> batch_of_;  // by command identifier; 0: none
  uint32_t outstanding_ = 0;
};

// Ends batches whose commands do not complete. One thread at a time.
class BatchWatch {
 public:
  // `limit_ns` is how long commands of a batch may take.
  BatchWatch(const BatchRecords& records, int64_t limit_ns)
      : records_(records), limit_ns_(limit_ns), seen_(records.count) {}

  // Launches may begin to rely on it.
  void begin() {
    for (uint32_t i = 0; i < records_.count; ++i) {
      atomic::store_release(&records_[i].done, 1u);
      atomic::store_release(&records_[i].watched, 1u);
    }
  }

  // Nobody looks any more: ends all batches. A launch that still finds itself watched has stored
  // `done` = 0 before its fence, and so before what is stored here.
  void end() {
    for (uint32_t i = 0; i < records_.count; ++i) {
      atomic::store_release(&records_[i].watched, 0u);
    }
    atomic::fence_sequential_system();
    for (uint32_t i = 0; i < records_.count; ++i) {
      atomic::store_release(&records_[i].done, 1u);
    }
  }

  // Ends the batches that were outstanding, with the same commands, for longer than the limit.
  void look(int64_t now_ns) {
    for (uint32_t i = 0; i < records_.count; ++i) {
      nvme::batch_record& record = records_[i];
      Seen& seen = seen_[i];
      if (atomic::load_relaxed(&record.done) != 0) {
        seen.since_ns = 0;
        continue;
      }
      const uint32_t submitted = atomic::load_relaxed(&record.submitted);
      if (seen.since_ns == 0 || seen.submitted != submitted) {
        seen = {submitted, now_ns};
      } else if (now_ns - seen.since_ns > limit_ns_) {
        atomic::store_release(&record.done, 1u);
      }
    }
  }

 private:
  struct Seen {
    uint32_t submitted = 0;
    int64_t since_ns = 0;
  };

  const BatchRecords records_;
  const int64_t limit_ns_;
  std::vector<Seen> seen_;
};

}  // namespace fw::native
