// Random blocks of several drives by raw queue pairs, without a cache: how far device threads drive
// them (BaM section 4.3, AGILE section 4.3). A benchmark and a test of the rings.
//
// The work is dealt in batches of one block a lane; batch b goes to drive b mod D, so drives are
// loaded alike. A warp keeps `window` batches outstanding: with 1 it waits for each, as synchronous
// I/O does; with more it issues ahead and waits for the oldest. Mapped namespaces only.
#pragma once

#include "flashwarp/cache/transfer.cuh"

namespace bench {

using namespace fw;

struct drive {
  nvme::queue_pair* queues;
  uint64_t queue_count;
};

struct drives_params {
  const drive* drives;
  uint64_t* failed;    // how many commands did not succeed
  char* buffer;        // blocks that reads fill and writes take their data from
  uint64_t commands;   // of each drive
  uint64_t begin_lba;  // of the part of each namespace that is used
  uint64_t seed;
  uint32_t drive_count;
  uint32_t blocks_log2;  // blocks of that part
  uint32_t buffer_log2;  // blocks of the buffer
  uint32_t block_bytes;  // a multiple of 512
  uint32_t window;       // 1 to kWindowMax
  uint32_t opcode;       // nvme::kRead or nvme::kWrite
};
static_assert(sizeof(drives_params) == 72);

inline constexpr uint32_t kWindowMax = 64;

// A permutation of the numbers below 2^bits: command j of a drive names a block that no other
// command names, until they repeat. Each step can be undone: odd factors, sums, shifts to the
// right.
FW_HOST_DEVICE uint64_t scatter_block(uint64_t j, uint64_t seed, uint32_t bits) {
  const uint64_t mask = (uint64_t(1) << bits) - 1;
  uint64_t x = (j + seed) & mask;
  for (uint32_t round = 0; round < 3; round++) {
    x = (x * 0x9e3779b97f4a7c15ULL + (seed >> 7)) & mask;
    x ^= x >> (bits / 2 + 1);
  }
  return x;
}

// The block of the buffer that command j of a drive uses.
FW_HOST_DEVICE uint64_t buffer_block(const drives_params& p, uint64_t j, uint32_t drive) {
  return ((j * p.drive_count + drive) + p.seed) & ((uint64_t(1) << p.buffer_log2) - 1);
}

// One lane's command of a batch: which it is, and where its data lies.
struct drive_command {
  nvme::queue_pair& q;
  bool valid;
  uint64_t lba;
  uint64_t there;  // in the namespace
  uint64_t here;   // in the buffer
};

// Raw queue pairs carry no detached command, so there is never one to finish.
struct nothing_detached {
  FW_DEVICE uint32_t land(nvme::queue_pair&, lanes, lanes, const nvme::detached_command&,
                          uint32_t status) {
    FW_ASSERT(false);
    return status;
  }
  FW_DEVICE void end(const nvme::detached_command&, uint32_t) { FW_ASSERT(false); }
};

FW_DEVICE drive_command command_of(const drives_params& p, uint64_t batch) {
  const uint32_t number = uint32_t(batch % p.drive_count);
  const drive& d = p.drives[number];
  // A warp stays with its queue pair of each drive.
  nvme::queue_pair& q = d.queues[(warp::index() / p.drive_count) % d.queue_count];
  const uint64_t j = batch / p.drive_count * warp::kWarpWidth + warp::lane();
  const uint64_t repeated = j & ((uint64_t(1) << p.blocks_log2) - 1);
  const uint64_t block = scatter_block(repeated, p.seed + number, p.blocks_log2);
  const uint64_t lba = p.begin_lba + block * (p.block_bytes >> nvme::kLbaShift);
  const uint64_t here = buffer_block(p, repeated, number) * p.block_bytes;
  return {q, j < p.commands, lba, q.data.mapped_base + (lba << nvme::kLbaShift),
          reinterpret_cast<uint64_t>(p.buffer) + here};
}

// Moves the block of each lane of `members`, with the whole warp.
FW_DEVICE void move_blocks(const drives_params& p, lanes members, const drive_command& c) {
  const lanes here = lanes::all();
  const bool writes = p.opcode == nvme::kWrite;
  here.sync();
  for (const uint32_t source : members) {
    warp::copy<warp::source::kStream>(here, here.broadcast(writes ? c.there : c.here, source),
                                      here.broadcast(writes ? c.here : c.there, source),
                                      p.block_bytes);
  }
  here.sync();
}

// What one warp has outstanding: consecutive batches of its own, the oldest at `done`.
class drive_window {
 public:
  FW_DEVICE explicit drive_window(const drives_params& p) : p_(p) {}

  FW_DEVICE bool has_work() const { return done_ < batches(); }
  FW_DEVICE bool may_issue() const { return issued_ < batches() && outstanding_ < p_.window; }

  // False when the drive does not answer.
  FW_DEVICE bool issue() {
    const lanes here = lanes::all();
    const drive_command c = command_of(p_, issued_);
    const lanes members = here.ballot(c.valid);
    const uint32_t ticket = nvme::take_tickets(c.q, here, members);
    // Whoever waits for a slot holds none: a full ring is a wait, never a deadlock.
    if (here.any(c.valid && !nvme::slot_is_free(c.q, ticket))) {
      while (outstanding_ != 0) {
        if (!finish_oldest()) return false;
      }
      if (!nvme::wait_for_slots(c.q, here, members, ticket, finisher_)) return fail(c.valid);
    }
    if (p_.opcode == nvme::kWrite) {
      move_blocks(p_, members, c);
      // The data before the doorbell, whoever rings it.
      atomic::fence_system();
    }
    if (c.valid) {
      nvme::write_entry(
          c.q, ticket,
          nvme::block_command(uint8_t(p_.opcode), uint16_t(nvme::entry_of(c.q, ticket)), c.lba,
                              p_.block_bytes >> nvme::kLbaShift, c.there, 0),
          0);
    }
    here.sync();
    nvme::publish(c.q, here);
    tickets_[newest_] = ticket;
    newest_ = newest_ + 1 == p_.window ? 0 : newest_ + 1;
    outstanding_++;
    issued_ += warp::count();
    return true;
  }

  FW_DEVICE bool finish_oldest() {
    const lanes here = lanes::all();
    const drive_command c = command_of(p_, done_);
    const lanes members = here.ballot(c.valid);
    const uint32_t ticket = tickets_[oldest_];
    const uint32_t status = nvme::wait_for_completions(c.q, here, members, ticket, finisher_);
    const lanes good = here.ballot(c.valid && status == nvme::kSuccess);
    if (p_.opcode == nvme::kRead) move_blocks(p_, good, c);
    if (here.any(status == nvme::kTimedOut)) return fail(c.valid);
    if (c.valid) nvme::release_slot(c.q, ticket);
    if (c.valid && status != nvme::kSuccess) atomic::add_relaxed(p_.failed, uint64_t(1));
    oldest_ = oldest_ + 1 == p_.window ? 0 : oldest_ + 1;
    outstanding_--;
    done_ += warp::count();
    return true;
  }

 private:
  FW_DEVICE uint64_t batches() const {
    return (p_.commands + warp::kWarpWidth - 1) / warp::kWarpWidth * p_.drive_count;
  }
  FW_DEVICE bool fail(bool mine) {
    if (mine) atomic::add_relaxed(p_.failed, uint64_t(1));
    return false;
  }

  const drives_params& p_;
  nothing_detached finisher_;
  uint64_t issued_ = warp::index();
  uint64_t done_ = warp::index();
  uint32_t outstanding_ = 0;
  uint32_t newest_ = 0;
  uint32_t oldest_ = 0;
  uint32_t tickets_[kWindowMax];
};

}  // namespace bench

FW_KERNEL drive_blocks(const FW_GRID_CONSTANT bench::drives_params p) {
  bench::drive_window window(p);
  while (window.has_work()) {
    while (window.may_issue()) {
      if (!window.issue()) return;
    }
    // A full ring may have made `issue` finish all that there was.
    if (!window.finish_oldest()) return;
  }
}

// The ceiling of the link: the same blocks, moved without any command.
FW_KERNEL link_blocks(const FW_GRID_CONSTANT bench::drives_params p) {
  using namespace fw;
  const uint64_t batches = (p.commands + warp::kWarpWidth - 1) / warp::kWarpWidth * p.drive_count;
  for (uint64_t batch = warp::index(); batch < batches; batch += warp::count()) {
    const bench::drive_command c = bench::command_of(p, batch);
    bench::move_blocks(p, lanes::all().ballot(c.valid), c);
  }
}
