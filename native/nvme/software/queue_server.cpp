#include "nvme/software/queue_server.h"

#include <thread>
#include <utility>

#include "base/fault_guard.h"

namespace fw::native {

QueueServer::QueueServer(const QueuePairAddresses& addresses, ControllerContext& context,
                         std::unique_ptr<IoEngine> engine)
    : rings_(addresses, context.errors, counters_),
      storage_(*context.storage),
      mapped_base_(context.storage->mapped_base()),
      lbas_(context.lbas()),
      transfer_lbas_max_(context.max_transfer_bytes / nvme::kLbaBytes),
      refreshes_backing_(context.storage->mapping_can_shrink()),
      drive_(context.drive == nullptr ? nullptr
                                      : std::make_unique<DriveQueue>(
                                            *context.drive, addresses.depth - 1, Rings::kVisitMax)),
      memory_(context),
      completions_(rings_, context.errors, counters_, drive_.get()),
      in_flight_(engine == nullptr ? nullptr
                                   : std::make_unique<InFlight>(
                                         context, addresses.depth, std::move(engine), memory_,
                                         completions_, counters_, in_flight_count_)),
      commands_(context, addresses.id, memory_, completions_, drive_.get(), in_flight_.get()) {}

uint32_t QueueServer::serve() {
  // Acquire, and release below: a server sees the ring state of the last one.
  if (!atomic::try_lock(&lock_)) return 0;
  const GuardedVisit visit;
  uint32_t moved = 0;
  if (open_.load(std::memory_order_relaxed)) {
    if (drive_ != nullptr) moved += drive_->begin_visit(poster());
    if (has_in_flight()) moved += in_flight_->reap();
    moved += fetch();
    if (in_flight_ != nullptr) in_flight_->kick();
    if (drive_ != nullptr) next_due_ns_.store(drive_->next_ns(), std::memory_order_relaxed);
  }
  atomic::unlock(&lock_);
  return moved;
}

uint32_t QueueServer::fetch() {
  const uint32_t count = rings_.fetchable(promised());
  if (count == 0) return 0;
  // Other processes may truncate the file, so look once for each visit at how much is backed.
  if (refreshes_backing_) storage_.refresh_backing(monotonic_ns());
  const uint32_t fetched = execute_fetched(count);
  published_head_.store(rings_.head(), std::memory_order_relaxed);
  return fetched;
}

// Completions for which a place in the CQ is reserved.
uint32_t QueueServer::promised() const {
  const uint32_t held = drive_ == nullptr ? 0 : drive_->held();
  return held + in_flight_count_.load(std::memory_order_relaxed);
}

// This loop is nearly all that a read in place costs: no atomics, calls or divisions in it.
uint32_t QueueServer::execute_fetched(uint32_t count) {
  constexpr uint32_t kPlainRead = nvme::kRead;  // CDW0 bits 15:0 with FUSE and PSDT zero
  const uint64_t base = reinterpret_cast<uint64_t>(mapped_base_);
  const uint64_t backed_lbas = mapped_base_ == nullptr || id() == 0 ? 0 : whole_backed_lbas();
  const uint64_t lbas_max = transfer_lbas_max_;
  DriveQueue* const drive = drive_.get();
  uint64_t mapped_commands = 0;
  uint64_t mapped_lbas = 0;
  uint32_t fetched = 0;
  for (; fetched < count; ++fetched) {
    const nvme::command& entry = rings_.next();
    rings_.prefetch();
    const uint32_t word = atomic::load_plain(&entry.opcode_cid);
    const uint64_t lba =
        atomic::load_plain(&entry.cdw10) | uint64_t(atomic::load_plain(&entry.cdw11)) << 32;
    const uint64_t blocks = (atomic::load_plain(&entry.cdw12) & kNlbMask) + 1;
    const bool is_mapped_read =
        uint16_t(word) == kPlainRead && atomic::load_plain(&entry.nsid) == nvme::kNamespaceId &&
        lba < backed_lbas && blocks <= backed_lbas - lba && blocks <= lbas_max &&
        atomic::load_plain(&entry.prp1) == base + (lba << nvme::kLbaShift);
    if (is_mapped_read) {
      rings_.advance();
      if (drive != nullptr) {
        drive->arrive(uint16_t(word >> 16), uint32_t(blocks));
      } else {
        rings_.post(uint16_t(word >> 16), nvme::kSuccess);
      }
      ++mapped_commands;
      mapped_lbas += blocks;
      continue;
    }
    if (in_flight_ != nullptr && !in_flight_->can_start()) break;
    // A copy, because the submitter may overwrite the entry meanwhile.
    const nvme::command copy = atomic::load_plain(&entry);
    rings_.advance();
    admit_arrivals();
    completions_.set_due_ns(0);
    commands_.execute(copy);
  }
  admit_arrivals();
  counters_.commands[size_t(CommandKind::kRead)].add(mapped_commands);
  counters_.bytes_read.add(mapped_lbas << nvme::kLbaShift);
  return fetched;
}

void QueueServer::admit_arrivals() {
  if (drive_ == nullptr) return;
  counters_.held.add(drive_->admit_arrivals(poster()));
}

// The LBAs that the mapping backs; a partial last LBA of the namespace counts as whole.
uint64_t QueueServer::whole_backed_lbas() const {
  const uint64_t backed = storage_.backed_nbytes();
  return backed == storage_.nbytes() ? lbas_ : backed / nvme::kLbaBytes;
}

void QueueServer::close() {
  while (!atomic::try_lock(&lock_)) std::this_thread::yield();
  if (drive_ != nullptr) drive_->take_away();
  if (in_flight_ != nullptr) in_flight_->drain();
  if (drive_ != nullptr) {
    drive_->release_all(poster());
    next_due_ns_.store(HeldCompletions::kNever, std::memory_order_relaxed);
  }
  abort_rung();
  open_.store(false, std::memory_order_relaxed);
  atomic::unlock(&lock_);
}

void QueueServer::reopen() { open_.store(true, std::memory_order_relaxed); }

// Completes commands that were rung but not fetched, so that no thread waits for them.
void QueueServer::abort_rung() {
  if (rings_.failed()) return;
  // Read once, so that this ends even if a submitter goes on to ring.
  const uint32_t tail = rings_.tail();
  if (tail >= rings_.depth()) return;
  while (rings_.head() != tail && rings_.fetchable_until(tail, promised()) != 0) {
    const nvme::command copy = atomic::load_plain(&rings_.next());
    rings_.advance();
    completions_.reject(copy, nvme::kCommandAborted, "the controller was stopped");
  }
  published_head_.store(rings_.head(), std::memory_order_relaxed);
}

}  // namespace fw::native
