#include "pipeline/mover.h"

#include <algorithm>
#include <cstring>
#include <ctime>

#include "base/alignment.h"
#include "base/fault_guard.h"
#include "io/nvme_command.h"
#include "nvme/software/completions.h"
#include "transfer/copy_ahead.h"

namespace fw::native::pipeline {
namespace {

// Of a queue pair that the mover serves itself: a run has two pages at most, so needs no list.
constexpr uint64_t kTransferPageBytes = 2 << 20;
constexpr uint64_t kBlock = nvme::kLbaBytes;
// A run with the blocks at its ends that it has only a part of.
constexpr uint64_t kBounceBytes = kRunBytesMax + 4096;
// How many copies the page cache is asked for at a time.
constexpr uint32_t kCachedMax = 32;
constexpr uint64_t kWordMask = 3;  // PRP entries are multiples of 4

std::byte* at(uint64_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace

Mover::Mover(const Options& options)
    : storage_(options.storage),
      drives_(options.drives),
      index_(options.index),
      depth_(options.depth),
      row_bytes_(options.row_bytes),
      in_memory_(options.drives == nullptr && options.storage->mapped_base() != nullptr &&
                 install_fault_guard()),
      context_{
          options.storage, DmaRegions(options.memory), kTransferPageBytes, kRunBytesMax * 2, {}} {
  const bool needs_none = in_memory_ && (!options.is_write || options.storage->writes_inline());
  const uint32_t drives = drives_ == nullptr ? 1 : uint32_t(drives_->controllers.size());
  const uint32_t slots = needs_none ? 0 : std::min((depth_ - 1) * drives, 1u << 15);
  slots_.resize(slots);
  for (uint32_t cid = slots; cid-- > 0;) free_cids_.push_back(uint16_t(cid));
  if (slots != 0) bounce_ = std::make_unique<HostMemory>(slots * kBounceBytes, 4096);
  if (needs_none || drives_ != nullptr) return;
  // The mover's own bounce memory, too.
  auto memory = options.memory;
  memory.emplace_back(reinterpret_cast<uint64_t>(bounce_->address()), bounce_->nbytes());
  context_.regions = DmaRegions(std::move(memory));
  own_pair_ = std::make_unique<HostQueuePair>(depth_, uint16_t(options.index + 1));
  std::unique_ptr<IoEngine> engine;
  if (options.engines != nullptr) {
    engine = options.engines->make(depth_ + PieceList::kCountMax);
    if (engine != nullptr) engine = storage_->decorate(std::move(engine));
  }
  server_ = std::make_unique<QueueServer>(own_pair_->addresses(), context_, std::move(engine));
}

HostQueuePair& Mover::pair_of(uint32_t drive) {
  return drives_ == nullptr ? *own_pair_ : *drives_->pairs[index_][drive];
}

std::byte* Mover::bounce(uint16_t cid) {
  return static_cast<std::byte*>(bounce_->address()) + cid * kBounceBytes;
}

bool Mover::work(std::vector<EndedRun>& ended) {
  const size_t before = ended.size(), first = next_;
  if (next_ != backlog_.size()) {
    if (!in_memory_ && drives_ == nullptr) copy_cached(ended);
    while (next_ != backlog_.size()) {
      if (in_memory_ && !backlog_[next_].is_write) {
        copy_mapped(ended);
      } else if (start(backlog_[next_], ended)) {
        ++next_;
      } else {
        break;
      }
    }
  }
  const bool started = next_ != first;
  if (next_ == backlog_.size() && next_ != 0) {
    backlog_.clear();
    next_ = tried_ = 0;
  }
  if (in_flight_ != 0) {
    if (drives_ == nullptr) {
      own_pair_->ring();
      server_->serve();
      reap(*own_pair_, ended);
    } else {
      for (uint32_t d = 0; d < drives_->controllers.size(); ++d) {
        HostQueuePair& pair = pair_of(d);
        if (pair.in_flight() == 0) continue;
        SoftwareController& controller = *drives_->controllers[d];
        const bool rung = pair.ring();
        if (drives_->served_by_workers) {
          controller.serve_some(index_);
        } else if (rung) {
          // Its threads may sleep.
          controller.wake();
        }
        reap(pair, ended);
      }
    }
  }
  return started || ended.size() != before;
}

// Copies reads out of a storage that is memory. What fails is marked, and the rest goes on.
void Mover::copy_mapped(std::vector<EndedRun>& ended) {
  const auto base = reinterpret_cast<uint64_t>(storage_->mapped_base());
  const bool can_shrink = storage_->mapping_can_shrink();
  while (next_ != backlog_.size() && !backlog_[next_].is_write) {
    size_t end = next_;
    while (end != backlog_.size() && !backlog_[end].is_write) ++end;
    const size_t failed = copy_ahead(next_, end, row_bytes_, [&](uint64_t i) {
      const Run& run = backlog_[i].run;
      return GuardedCopy{at(run.memory), at(base + run.offset), run.nbytes, CopyResult::kFailed};
    });
    for (; next_ != failed; ++next_) {
      const Run run = backlog_[next_].run;
      IoFailure failure;
      // Behind the copy: bytes that were backed then were not zeros of a shorter file.
      const int error = can_shrink ? storage_->validate(run.offset, run.nbytes, &failure) : 0;
      if (error != 0) note(run, false, error, failure);
      finish(run, false, status_of_error(error, false), ended);
    }
    if (failed == end) continue;
    const Run run = backlog_[next_++].run;
    IoFailure failure;
    const int error = storage_->validate(run.offset, run.nbytes, &failure);
    note(run, false, error == 0 ? EFAULT : error, failure);
    finish(run, false, nvme::kUnrecoveredReadError, ended);
  }
}

// Copies reads of what the page cache has. The others are marked as tried.
void Mover::copy_cached(std::vector<EndedRun>& ended) {
  tried_ = std::max(tried_, next_);
  size_t kept = tried_;
  base::host_copy copies[kCachedMax];
  for (size_t i = tried_; i < backlog_.size();) {
    uint32_t count = 0;
    const size_t first = i;
    for (; i < backlog_.size() && count < kCachedMax; ++i, ++count) {
      const Waiting& each = backlog_[i];
      copies[count] = {};
      copies[count].offset = each.run.offset;
      copies[count].target = each.run.memory;
      copies[count].bytes = each.run.nbytes;
      copies[count].done = false;
      if (each.is_write) break;
    }
    if (count != 0) storage_->copy_cached(copies, count);
    for (uint32_t k = 0; k < count; ++k) {
      const Waiting each = backlog_[first + k];
      if (copies[k].done) {
        ended.push_back({each.run, nvme::kSuccess});
      } else {
        backlog_[kept++] = each;
      }
    }
    if (i < backlog_.size() && backlog_[i].is_write) backlog_[kept++] = backlog_[i++];
  }
  backlog_.resize(kept);
  tried_ = kept;
}

// Starts a run. Returns false if there is no room for it now.
bool Mover::start(const Waiting& waiting, std::vector<EndedRun>& ended) {
  const Run run = waiting.run;
  const bool whole = is_aligned(run.offset | run.nbytes, kBlock);
  if (waiting.is_write && drives_ == nullptr && (storage_->writes_inline() || !whole)) {
    // Two runs may share a block, so a part of one is not for a command. The call may wait for
    // blocks, which no command of this mover may hold then.
    if (!storage_->writes_inline() && writes_ != 0) return false;
    write_blocking(run, ended);
    return true;
  }
  HostQueuePair& pair = pair_of(run.drive);
  if (pair.free_slots() == 0 || free_cids_.empty()) return false;
  post(pair, waiting);
  return true;
}

void Mover::post(HostQueuePair& pair, const Waiting& waiting) {
  const Run& run = waiting.run;
  const uint16_t cid = free_cids_.back();
  free_cids_.pop_back();
  Slot& slot = slots_[cid];
  slot = {run, 0, waiting.is_write, false};
  const uint64_t begin = round_down(run.offset, kBlock);
  const uint64_t end = round_up(run.offset + run.nbytes, kBlock);
  slot.lead = uint32_t(run.offset - begin);
  slot.bounced = end - begin != run.nbytes || (run.memory & kWordMask) != 0;
  uint64_t memory = run.memory;
  if (slot.bounced) {
    memory = reinterpret_cast<uint64_t>(bounce(cid));
    if (waiting.is_write) std::memcpy(bounce(cid) + slot.lead, at(run.memory), run.nbytes);
  }
  pair.post(nvme::block_command(waiting.is_write ? nvme::kWrite : nvme::kRead, cid,
                                begin >> nvme::kLbaShift,
                                uint32_t((end - begin) >> nvme::kLbaShift), memory,
                                nvme::second_prp(memory, end - begin, kTransferPageBytes)));
  ++in_flight_;
  writes_ += waiting.is_write;
}

void Mover::reap(HostQueuePair& pair, std::vector<EndedRun>& ended) {
  pair.reap([&](uint16_t cid, uint16_t status) {
    const Slot slot = slots_[cid];
    if (slot.bounced && !slot.is_write && status == nvme::kSuccess) {
      std::memcpy(at(slot.run.memory), bounce(cid) + slot.lead, slot.run.nbytes);
    }
    free_cids_.push_back(cid);
    --in_flight_;
    writes_ -= slot.is_write;
    finish(slot.run, slot.is_write, status, ended);
  });
}

// If a run of several rows fails, each of them is moved alone, so that only those fail that must.
void Mover::finish(const Run& run, bool is_write, uint16_t status, std::vector<EndedRun>& ended) {
  if (status == nvme::kSuccess || run.rows == 1 || status == nvme::kCommandAborted) {
    ended.push_back({run, status});
    return;
  }
  const uint32_t row_bytes = run.nbytes / run.rows;
  for (uint32_t i = 0; i < run.rows; ++i) {
    Run one = run;
    one.rows = 1;
    one.nbytes = row_bytes;
    one.offset += uint64_t(i) * row_bytes;
    one.memory += uint64_t(i) * row_bytes;
    one.first_row += i;
    add(one, is_write);
  }
}

void Mover::write_blocking(const Run& run, std::vector<EndedRun>& ended) {
  IoFailure failure;
  const int error = storage_->write(run.offset, at(run.memory), run.nbytes, &failure);
  if (error != 0) note(run, true, error, failure);
  finish(run, true, status_of_error(error, true), ended);
}

// Records a failure of what was no command.
void Mover::note(const Run& run, bool is_write, int error, const IoFailure& failure) {
  ErrorRecord record;
  record.operation = is_write ? "write" : "read";
  record.path = failure.path;
  record.reason = error_text(error);
  record.file_offset = failure.path.empty() ? run.offset : failure.file_offset;
  record.nbytes = run.nbytes;
  record.lba = run.offset >> nvme::kLbaShift;
  record.error = errno_of(error);
  record.status = status_of_error(error, is_write);
  record.unix_time = double(std::time(nullptr));
  context_.errors.add(std::move(record));
}

bool Mover::abort(std::vector<EndedRun>& ended) {
  for (; next_ != backlog_.size(); ++next_) {
    ended.push_back({backlog_[next_].run, nvme::kCommandAborted});
  }
  if (in_flight_ != 0 && drives_ == nullptr) {
    own_pair_->ring();
    server_->close();
    reap(*own_pair_, ended);
    server_->reopen();
  } else if (in_flight_ != 0) {
    for (uint32_t d = 0; d < drives_->controllers.size(); ++d) {
      HostQueuePair& pair = pair_of(d);
      if (pair.in_flight() == 0) continue;
      pair.ring();
      drives_->controllers[d]->stop();
      reap(pair, ended);
      drives_->controllers[d]->start();
    }
  }
  // What was divided by a failure meanwhile.
  for (; next_ != backlog_.size(); ++next_) {
    ended.push_back({backlog_[next_].run, nvme::kCommandAborted});
  }
  backlog_.clear();
  next_ = tried_ = 0;
  return in_flight_ == 0;
}

std::vector<ErrorRecord> Mover::take_errors() { return context_.errors.take(); }

}  // namespace fw::native::pipeline
