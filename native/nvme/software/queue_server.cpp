// Fetch, execute, complete; see queue_server.h. Commands in an engine are in
// queue_server_async.cpp.
#include "nvme/software/queue_server.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <thread>

#include "base/fault_guard.h"
#include "nvme/software/identify.h"

namespace fw::native {
namespace {

// Commands a visit: long enough to spread the cost of the doorbell's cache miss, short enough that
// other queues are not kept waiting.
constexpr uint32_t kBatchMax = 256;

// How far ahead entries are prefetched: the other side wrote them, so each one is a cache miss of
// about 100 ns, and a command takes about 5 ns.
constexpr uint32_t kPrefetchEntries = 16;

constexpr uint32_t kNlbMask = 0xFFFF;
constexpr uint32_t kForceUnitAccess = 1u << 30;
constexpr uint32_t kBroadcastNamespace = 0xFFFFFFFF;
constexpr size_t kDatasetRangesMax = 256;
constexpr uint32_t kIdentifyNamespace = 0;
constexpr uint32_t kIdentifyController = 1;
constexpr uint32_t kIdentifyActiveNamespaces = 2;

uint32_t lba_count(const nvme::command& entry) { return (entry.cdw12 & kNlbMask) + 1; }

}  // namespace

uint16_t status_of_error(int error, bool is_write) {
  if (error == 0) return nvme::kSuccess;
  if (error == EROFS) return nvme::kNamespaceWriteProtected;
  if (error == ECANCELED || error == kForked) return nvme::kCommandAborted;
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) return nvme::kCapacityExceeded;
  return is_write ? nvme::kWriteFault : nvme::kUnrecoveredReadError;
}

QueueServer::QueueServer(const QueuePairAddresses& addresses, ControllerContext& context,
                         std::unique_ptr<IoEngine> engine)
    : sq_(reinterpret_cast<nvme::command*>(addresses.sq)),
      cq_(reinterpret_cast<nvme::completion*>(addresses.cq)),
      sq_doorbell_(reinterpret_cast<const uint32_t*>(addresses.sq_doorbell)),
      cq_doorbell_(reinterpret_cast<const uint32_t*>(addresses.cq_doorbell)),
      depth_(addresses.depth),
      id_(addresses.id),
      refreshes_backing_(context.storage->mapping_can_shrink()),
      context_(context),
      drive_(context.drive.get()),
      storage_(*context.storage),
      mapped_base_(context.storage->mapped_base()),
      lbas_((context.storage->nbytes() + nvme::kLbaBytes - 1) / nvme::kLbaBytes),
      engine_(std::move(engine)) {
  segments_.reserve(context.max_transfer_bytes / context.page_bytes + 2);
  if (engine_ != nullptr) allocate_in_flight();
  if (drive_ != nullptr) {
    held_ = std::make_unique<HeldCompletions>(depth_ - 1, monotonic_ns());
    arrivals_.reserve(kBatchMax);
    arrival_cids_.reserve(kBatchMax);
    arrival_dues_.resize(kBatchMax);
  }
}

// Acquire and release: the ring state of the last server is seen.
bool QueueServer::try_lock() { return atomic::try_lock(&lock_); }

void QueueServer::lock() {
  while (!try_lock()) std::this_thread::yield();
}

void QueueServer::unlock() { atomic::unlock(&lock_); }

uint32_t QueueServer::serve() {
  if (!try_lock()) return 0;
  const GuardedVisit visit;
  uint32_t moved = 0;
  if (open_.load(std::memory_order_relaxed)) {
    if (drive_ != nullptr) moved += post_due();
    if (has_in_flight()) moved += reap();
    moved += fetch();
    if (engine_ != nullptr) kick_engine();
    if (drive_ != nullptr) next_due_ns_.store(held_->next_ns(), std::memory_order_relaxed);
  }
  unlock();
  return moved;
}

uint32_t QueueServer::fetch() {
  if (failed_) return 0;
  // Acquire: the submitter wrote the entries before it rang.
  const uint32_t tail = atomic::load_acquire(sq_doorbell_);
  counters_.doorbell_reads.add(1);
  if (tail == head_) return 0;
  if (tail >= depth_) {
    fail_ring("the SQ tail doorbell is outside of the ring", tail);
    return 0;
  }
  const uint32_t count = fetchable(tail);
  if (count == 0) return 0;
  // Others may truncate the file; how many of the mapped blocks are there is looked up per batch.
  if (refreshes_backing_) storage_.refresh_backing(monotonic_ns());
  const uint32_t fetched = execute_batch(count);
  published_head_.store(head_, std::memory_order_relaxed);
  return fetched;
}

// Bounded by the batch and by the CQ entries that are neither unconsumed nor promised.
uint32_t QueueServer::fetchable(uint32_t tail) {
  const uint32_t rung = std::min(kBatchMax, tail >= head_ ? tail - head_ : tail + depth_ - head_);
  const auto room = [this] {
    const uint32_t unconsumed =
        cq_tail_ >= cq_head_seen_ ? cq_tail_ - cq_head_seen_ : cq_tail_ + depth_ - cq_head_seen_;
    const uint32_t held = held_ == nullptr ? 0 : held_->size();
    return depth_ - 1 - unconsumed - held - in_flight_.load(std::memory_order_relaxed);
  };
  if (room() >= rung) return rung;
  if (!read_cq_doorbell()) return 0;
  return std::min(rung, room());
}

bool QueueServer::read_cq_doorbell() {
  // Acquire: the consumer has read the entries that we are about to overwrite.
  const uint32_t value = atomic::load_acquire(cq_doorbell_);
  const auto distance = [&](uint32_t to) {
    return to >= cq_head_seen_ ? to - cq_head_seen_ : to + depth_ - cq_head_seen_;
  };
  if (value >= depth_ || distance(value) > distance(cq_tail_)) {
    fail_ring("the CQ head doorbell is beyond what was posted", value);
    return false;
  }
  cq_head_seen_ = value;
  return true;
}

void QueueServer::fail_ring(const char* what, uint32_t value) {
  ErrorRecord record;
  record.operation = "doorbell";
  record.reason =
      std::string(what) + ": " + std::to_string(value) + ", depth " + std::to_string(depth_);
  record.queue = id_;
  record.unix_time = double(std::time(nullptr));
  context_.errors.add(std::move(record));
  counters_.errors.add(1);
  failed_ = true;
}

// The time of a command without data is the time of this loop: no atomics, calls or divisions.
uint32_t QueueServer::execute_batch(uint32_t count) {
  constexpr uint32_t kPlainRead = nvme::kRead;  // CDW0 bits 15:0 with FUSE and PSDT zero
  const uint64_t base = reinterpret_cast<uint64_t>(mapped_base_);
  const uint64_t backed_lbas = mapped_base_ == nullptr || id_ == 0 ? 0 : whole_backed_lbas();
  const uint64_t lbas_max = context_.max_transfer_bytes / nvme::kLbaBytes;
  uint64_t mapped_commands = 0;
  uint64_t mapped_lbas = 0;
  uint32_t fetched = 0;
  for (; fetched < count; ++fetched) {
    const nvme::command& entry = sq_[head_];
    __builtin_prefetch(&sq_[head_] + kPrefetchEntries);
    __builtin_prefetch(&cq_[cq_tail_] + kPrefetchEntries, 1);
    const uint32_t word = atomic::load_plain(&entry.opcode_cid);
    const uint64_t lba =
        atomic::load_plain(&entry.cdw10) | uint64_t(atomic::load_plain(&entry.cdw11)) << 32;
    const uint64_t blocks = (atomic::load_plain(&entry.cdw12) & kNlbMask) + 1;
    const bool is_mapped_read =
        uint16_t(word) == kPlainRead && atomic::load_plain(&entry.nsid) == nvme::kNamespaceId &&
        lba < backed_lbas && blocks <= backed_lbas - lba && blocks <= lbas_max &&
        atomic::load_plain(&entry.prp1) == base + (lba << nvme::kLbaShift);
    if (is_mapped_read) {
      advance_head();
      if (drive_ != nullptr) {
        arrive(uint16_t(word >> 16), uint32_t(blocks));
      } else {
        post(uint16_t(word >> 16), nvme::kSuccess);
      }
      ++mapped_commands;
      mapped_lbas += blocks;
      continue;
    }
    if (!can_start()) break;
    // A copy: the other side may rewrite the ring while we look at it.
    const nvme::command copy = atomic::load_plain(&entry);
    advance_head();
    admit_arrivals();
    due_ns_ = 0;
    execute(copy);
  }
  admit_arrivals();
  counters_.commands[size_t(CommandKind::kRead)].add(mapped_commands);
  counters_.bytes_read.add(mapped_lbas << nvme::kLbaShift);
  return fetched;
}

// LBAs that the mapping backs completely, or with the namespace's partial last one.
uint64_t QueueServer::whole_backed_lbas() const {
  const uint64_t backed = storage_.backed_nbytes();
  return backed == storage_.nbytes() ? lbas_ : backed / nvme::kLbaBytes;
}

void QueueServer::advance_head() { head_ = head_ + 1 == depth_ ? 0 : head_ + 1; }

// Leaves a plain read to `admit_arrivals`, which takes the drive's lock once for many.
void QueueServer::arrive(uint16_t cid, uint32_t blocks) {
  arrivals_.push_back({blocks, false});
  arrival_cids_.push_back(cid);
}

void QueueServer::admit_arrivals() {
  if (arrivals_.empty()) return;
  drive_->admit(now_ns_, arrivals_, arrival_dues_.data());
  for (size_t i = 0; i < arrivals_.size(); ++i) {
    complete(arrival_cids_[i], nvme::kSuccess, arrival_dues_[i]);
  }
  arrivals_.clear();
  arrival_cids_.clear();
}

// The command at hand is one that the drive carries out. Flush and its like move no blocks.
void QueueServer::admit(bool is_write, uint32_t blocks) {
  if (drive_ == nullptr) return;
  const ModelledDrive::Arrival arrival = {blocks, is_write};
  drive_->admit(now_ns_, {&arrival, 1}, &due_ns_);
}

// Begins a visit: reads the clock and posts what is due.
uint32_t QueueServer::post_due() {
  now_ns_ = monotonic_ns();
  return held_->release_until(now_ns_,
                              [this](uint16_t cid, uint16_t status) { post(cid, status); });
}

void QueueServer::complete(uint16_t cid, uint16_t status, int64_t due_ns) {
  if (due_ns <= now_ns_) return post(cid, status);
  held_->hold(due_ns, cid, status);
  counters_.held.add(1);
}

void QueueServer::post(uint16_t cid, uint16_t status) {
  auto* entry = reinterpret_cast<uint64_t*>(&cq_[cq_tail_]);
  const uint64_t upper = uint64_t(head_) | uint64_t(id_) << 16 | uint64_t(cid) << 32 |
                         uint64_t(uint16_t(status << 1 | phase_)) << 48;
  // Relaxed, then release: whoever sees the phase tag sees the whole entry and the data before it.
  atomic::store_relaxed(&entry[0], uint64_t(0));
  atomic::store_release(&entry[1], upper);
  if (++cq_tail_ == depth_) {
    cq_tail_ = 0;
    phase_ ^= 1;
  }
}

void QueueServer::execute(const nvme::command& entry) {
  const uint8_t flags = uint8_t(entry.opcode_cid >> 8);
  if (flags != 0) return reject(entry, nvme::kInvalidField, "fused commands and SGLs");
  if (id_ == 0) return execute_admin(entry);
  const bool any_namespace = opcode_of(entry) == nvme::kFlush && entry.nsid == kBroadcastNamespace;
  const bool is_ours = entry.nsid == nvme::kNamespaceId || any_namespace;
  switch (opcode_of(entry)) {
    case nvme::kFlush:
      return is_ours ? execute_flush(entry) : reject_namespace(entry);
    case nvme::kWrite:
      return is_ours ? execute_write(entry) : reject_namespace(entry);
    case nvme::kRead:
      return is_ours ? execute_read(entry) : reject_namespace(entry);
    case nvme::kWriteZeroes:
      return is_ours ? execute_write_zeroes(entry) : reject_namespace(entry);
    case nvme::kDatasetManagement:
      return is_ours ? execute_dataset_management(entry) : reject_namespace(entry);
    default:
      return reject(entry, nvme::kInvalidOpcode, "opcode not supported");
  }
}

void QueueServer::reject_namespace(const nvme::command& entry) {
  reject(entry, nvme::kInvalidNamespace, "there is one namespace, 1");
}

void QueueServer::execute_admin(const nvme::command& entry) {
  if (opcode_of(entry) != nvme::kIdentify) {
    return reject(entry, nvme::kInvalidOpcode, "admin opcode not supported");
  }
  IdentifyData data;
  const uint32_t structure = entry.cdw10 & 0xFF;
  if (structure == kIdentifyController) {
    data = identify_controller(context_.max_transfer_bytes);
  } else if (structure == kIdentifyNamespace) {
    if (entry.nsid != nvme::kNamespaceId) return reject_namespace(entry);
    data = identify_namespace(storage_.nbytes(), storage_.writable());
  } else if (structure == kIdentifyActiveNamespaces) {
    data = identify_active_namespaces(entry.nsid);
  } else {
    return reject(entry, nvme::kInvalidField, "CNS not supported");
  }
  if (uint16_t status = walk(entry, data.size())) return reject_prp(entry, status);
  copy_to_segments(0, data.data(), data.size());
  finish(entry, nvme::kSuccess);
}

uint16_t QueueServer::block_range(const nvme::command& entry, bool moves_data, Range& range) const {
  const uint64_t lba = first_lba(entry);
  const uint64_t blocks = lba_count(entry);
  range.total = uint32_t(blocks * nvme::kLbaBytes);
  if (moves_data && range.total > context_.max_transfer_bytes) return nvme::kInvalidField;
  if (lba >= lbas_ || blocks > lbas_ - lba) return nvme::kLbaOutOfRange;
  range.offset = lba * nvme::kLbaBytes;
  range.take = uint32_t(std::min<uint64_t>(range.total, storage_.nbytes() - range.offset));
  return nvme::kSuccess;
}

void QueueServer::reject_range(const nvme::command& entry, uint16_t status) {
  reject(entry, status,
         status == nvme::kInvalidField ? "longer than MDTS" : "beyond the end of the namespace");
}

void QueueServer::reject_prp(const nvme::command& entry, uint16_t status) {
  reject(entry, status,
         status == nvme::kPrpOffsetInvalid ? "a PRP entry is not aligned"
                                           : "a PRP entry names memory that is not registered");
}

uint16_t QueueServer::walk(const nvme::command& entry, uint64_t nbytes) {
  return walk_prps(entry, nbytes, context_.page_bytes, context_.regions, segments_);
}

bool QueueServer::is_identity(const nvme::command& entry, uint64_t offset) const {
  return mapped_base_ != nullptr && entry.prp1 == reinterpret_cast<uint64_t>(mapped_base_) + offset;
}

void QueueServer::execute_read(const nvme::command& entry) {
  Range range;
  if (uint16_t status = block_range(entry, true, range)) return reject_range(entry, status);
  admit(false, lba_count(entry));
  IoFailure failure;
  if (is_identity(entry, range.offset)) {
    const bool backed = range.offset + range.take <= storage_.backed_nbytes();
    return finish_io(entry, range, false, backed ? 0 : kTruncated, failure);
  }
  if (uint16_t status = walk(entry, range.total)) return reject_prp(entry, status);
  const int error = read_now(range, engine_ == nullptr, failure);
  if (error == EAGAIN && engine_ != nullptr) return start(entry, range, false, false);
  finish_io(entry, range, false, error, failure);
}

// Reads into the segments, waiting or not. EAGAIN when it would have to wait.
int QueueServer::read_now(const Range& range, bool may_wait, IoFailure& failure) {
  uint64_t done = 0;
  for (const Segment& segment : segments_) {
    const uint64_t step = std::min<uint64_t>(segment.nbytes, range.take - done);
    if (step == 0) break;
    const uint64_t from = range.offset + done;
    int error = storage_.read_nowait(from, segment.address, step, &failure);
    if (error == EAGAIN && may_wait) error = storage_.read(from, segment.address, step, &failure);
    if (error != 0) return error;
    done += step;
  }
  zero_tail(range);
  return 0;
}

// The bytes of a partial last LBA that lie past the end of the namespace.
void QueueServer::zero_tail(const Range& range) {
  if (range.take == range.total) return;
  uint64_t skip = range.take;
  for (const Segment& segment : segments_) {
    if (skip < segment.nbytes) atomic::fill_plain(segment.address + skip, 0, segment.nbytes - skip);
    skip -= std::min(skip, segment.nbytes);
  }
}

void QueueServer::execute_write(const nvme::command& entry) {
  Range range;
  if (uint16_t status = block_range(entry, true, range)) return reject_range(entry, status);
  if (!storage_.writable()) {
    return reject(entry, nvme::kNamespaceWriteProtected, "the namespace is read-only");
  }
  admit(true, lba_count(entry));
  IoFailure failure;
  if (is_identity(entry, range.offset)) return finish_io(entry, range, true, 0, failure);
  if (uint16_t status = walk(entry, range.total)) return reject_prp(entry, status);
  const bool durable = (entry.cdw12 & kForceUnitAccess) != 0;
  const bool waits = durable || !storage_.writes_inline();
  if (waits && engine_ != nullptr) return start(entry, range, true, durable);
  finish_io(entry, range, true, write_now(range, durable, failure), failure);
}

int QueueServer::write_now(const Range& range, bool durable, IoFailure& failure) {
  uint64_t done = 0;
  for (const Segment& segment : segments_) {
    const uint64_t step = std::min<uint64_t>(segment.nbytes, range.take - done);
    if (step == 0) break;
    if (int error = storage_.write(range.offset + done, segment.address, step, &failure)) {
      return error;
    }
    done += step;
  }
  return durable ? storage_.flush_range(range.offset, range.take, &failure) : 0;
}

void QueueServer::execute_write_zeroes(const nvme::command& entry) {
  Range range;
  if (uint16_t status = block_range(entry, false, range)) return reject_range(entry, status);
  if (!storage_.writable()) {
    return reject(entry, nvme::kNamespaceWriteProtected, "the namespace is read-only");
  }
  admit(true, 0);
  IoFailure failure;
  const int error = storage_.write_zeroes(range.offset, range.take, &failure);
  finish_io(entry, range, true, error, failure);
}

void QueueServer::execute_dataset_management(const nvme::command& entry) {
  std::array<nvme::dataset_range, kDatasetRangesMax> ranges;
  const size_t count = (entry.cdw10 & 0xFF) + 1;
  if (uint16_t status = walk(entry, count * sizeof(nvme::dataset_range))) {
    return reject_prp(entry, status);
  }
  copy_from_segments(0, ranges.data(), count * sizeof(nvme::dataset_range));
  if ((entry.cdw11 & nvme::kAttributeDeallocate) == 0) return finish(entry, nvme::kSuccess);
  if (!storage_.writable()) {
    return reject(entry, nvme::kNamespaceWriteProtected, "the namespace is read-only");
  }
  for (size_t i = 0; i < count; ++i) {
    if (ranges[i].lba > lbas_ || ranges[i].lba_count > lbas_ - ranges[i].lba) {
      return reject_range(entry, nvme::kLbaOutOfRange);
    }
  }
  admit(true, 0);
  IoFailure failure;
  int error = 0;
  for (size_t i = 0; i < count && error == 0; ++i) {
    const uint64_t offset = std::min(ranges[i].lba * nvme::kLbaBytes, storage_.nbytes());
    const uint64_t nbytes = uint64_t(ranges[i].lba_count) * nvme::kLbaBytes;
    error = storage_.discard(offset, std::min(nbytes, storage_.nbytes() - offset), &failure);
  }
  finish_io(entry, Range{}, true, error, failure);
}

void QueueServer::execute_flush(const nvme::command& entry) {
  admit(true, 0);
  if (engine_ != nullptr) return start_flush(entry);
  IoFailure failure;
  finish_io(entry, Range{}, true, storage_.flush(&failure), failure);
}

void QueueServer::copy_to_segments(uint64_t offset, const void* data, uint64_t nbytes) {
  auto* source = static_cast<const std::byte*>(data);
  for (const Segment& segment : segments_) {
    if (offset >= segment.nbytes) {
      offset -= segment.nbytes;
      continue;
    }
    const uint64_t step = std::min(nbytes, segment.nbytes - offset);
    atomic::copy_plain(segment.address + offset, source, step);
    source += step;
    nbytes -= step;
    offset = 0;
    if (nbytes == 0) return;
  }
}

void QueueServer::copy_from_segments(uint64_t offset, void* data, uint64_t nbytes) {
  auto* target = static_cast<std::byte*>(data);
  for (const Segment& segment : segments_) {
    if (offset >= segment.nbytes) {
      offset -= segment.nbytes;
      continue;
    }
    const uint64_t step = std::min(nbytes, segment.nbytes - offset);
    atomic::copy_plain(target, segment.address + offset, step);
    target += step;
    nbytes -= step;
    offset = 0;
    if (nbytes == 0) return;
  }
}

CommandKind QueueServer::kind_of(const nvme::command& entry) const {
  const uint8_t opcode = opcode_of(entry);
  if (id_ == 0) return opcode == nvme::kIdentify ? CommandKind::kIdentify : CommandKind::kOther;
  switch (opcode) {
    case nvme::kFlush:
      return CommandKind::kFlush;
    case nvme::kWrite:
      return CommandKind::kWrite;
    case nvme::kRead:
      return CommandKind::kRead;
    case nvme::kWriteZeroes:
      return CommandKind::kWriteZeroes;
    case nvme::kDatasetManagement:
      return CommandKind::kDatasetManagement;
    default:
      return CommandKind::kOther;
  }
}

const char* command_name(CommandKind kind) {
  static constexpr const char* kNames[kCommandKinds] = {
      "flush", "write", "read", "write_zeroes", "dataset_management", "identify", "other"};
  return kNames[size_t(kind)];
}

void QueueServer::finish(const nvme::command& entry, uint16_t status) {
  counters_.commands[size_t(kind_of(entry))].add(1);
  if (status != nvme::kSuccess) counters_.errors.add(1);
  complete(cid_of(entry), status, due_ns_);
}

void QueueServer::finish_io(const nvme::command& entry, const Range& range, bool is_write,
                            int error, const IoFailure& failure) {
  const uint16_t status = status_of_error(error, is_write);
  if (error != 0) {
    record(entry, status, error, failure, std::strerror(error), false);
  } else if (opcode_of(entry) == nvme::kRead) {
    counters_.bytes_read.add(range.take);
  } else if (opcode_of(entry) == nvme::kWrite) {
    counters_.bytes_written.add(range.take);
  }
  finish(entry, status);
}

void QueueServer::reject(const nvme::command& entry, uint16_t status, const char* reason) {
  record(entry, status, 0, IoFailure{}, reason, false);
  finish(entry, status);
}

void QueueServer::record(const nvme::command& entry, uint16_t status, int error,
                         const IoFailure& failure, const char* reason, bool recovered) {
  ErrorRecord record;
  record.operation = command_name(kind_of(entry));
  record.path = failure.path;
  record.reason = error == 0 ? std::string(reason) : error_text(error);
  record.file_offset = failure.file_offset;
  record.nbytes = failure.nbytes;
  record.lba = first_lba(entry);
  record.error = error;
  record.status = status;
  record.queue = id_;
  record.cid = cid_of(entry);
  record.recovered = recovered;
  record.unix_time = double(std::time(nullptr));
  context_.errors.add(std::move(record));
}

void QueueServer::close() {
  lock();
  closing_ = true;
  // A drive that is taken away owes nobody its latency: from here on everything is due.
  now_ns_ = HeldCompletions::kNever;
  drain_engine();
  if (held_ != nullptr) {
    held_->release_all([this](uint16_t cid, uint16_t status) { post(cid, status); });
    next_due_ns_.store(HeldCompletions::kNever, std::memory_order_relaxed);
  }
  if (!failed_) abort_rung();
  open_.store(false, std::memory_order_relaxed);
  closing_ = false;
  unlock();
}

void QueueServer::reopen() { open_.store(true, std::memory_order_relaxed); }

// Completes what was rung but not fetched, so that nobody waits for a controller that is gone.
void QueueServer::abort_rung() {
  const uint32_t tail = atomic::load_acquire(sq_doorbell_);
  if (tail >= depth_) return;
  while (head_ != tail && fetchable(tail) != 0) {
    const nvme::command copy = atomic::load_plain(&sq_[head_]);
    advance_head();
    reject(copy, nvme::kCommandAborted, "the controller was stopped");
  }
  published_head_.store(head_, std::memory_order_relaxed);
}

}  // namespace fw::native
