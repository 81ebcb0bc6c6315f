// Random reads and writes of a drive by raw queue pairs: data that names its block and version.
//
// Each thread owns a part of the blocks, so that it knows what each must hold, and goes round the
// queue pairs. It fills its window, publishes once, and finishes the oldest commands. No block is
// in a window twice. For the CPU device, whose warps have one lane.
#include "flashwarp/nvme/completion_queue.cuh"

namespace commands {

using namespace fw;

struct params {
  nvme::queue_pair* queues;
  uint32_t* versions;  // of each block: how often it was stored
  uint32_t* tickets;   // `window` of each thread
  char* frames;        // `window` blocks of each thread
  uint64_t* counts;    // wrong blocks, failed commands, and finished ones
  uint64_t commands;   // of each thread
  uint64_t seed;
  uint32_t queue_count;
  uint32_t blocks_log2;  // of each thread's part
  uint32_t window;       // fewer than blocks of a part
  uint32_t block_bytes;
  uint32_t writes;  // of 256 commands
  uint32_t checks;  // 0: data is left alone
};
static_assert(sizeof(params) == 80);

// Word `k` of what a block holds.
FW_DEVICE uint64_t word_of(uint64_t block, uint32_t version, uint32_t k) {
  uint64_t x = (block << 32 | version) * 0x9e3779b97f4a7c15ULL + k;
  x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9ULL;
  return x ^ x >> 32;
}

struct nothing_detached {
  FW_DEVICE uint32_t land(nvme::queue_pair&, lanes, lanes, const nvme::detached_command&,
                          uint32_t status) {
    return status;
  }
  FW_DEVICE void end(const nvme::detached_command&, uint32_t) {}
};

class worker {
 public:
  FW_DEVICE explicit worker(const params& p) : p_(p) {}

  // False when the drive does not answer.
  FW_DEVICE bool run() {
    while (done_ < p_.commands) {
      const uint64_t first = issued_;
      while (issued_ < p_.commands && issued_ - done_ < p_.window) {
        if (!issue()) return false;
      }
      for (uint64_t j = first; j < issued_ && j < first + p_.queue_count; j++) {
        nvme::publish(queue_of(j), lanes::all());
      }
      const uint64_t enough = done_ + (p_.window + 3) / 4;
      while (done_ < issued_ && (done_ < enough || has_ended(done_))) {
        if (!finish_oldest()) return false;
      }
    }
    return true;
  }

 private:
  FW_DEVICE uint64_t draw(uint64_t j) const {
    const uint64_t x = (j + p_.seed) * 0x9e3779b97f4a7c15ULL;
    return (x ^ x >> 31) * 0x94d049bb133111ebULL >> 32;
  }
  FW_DEVICE bool writes(uint64_t j) const { return (draw(j) & 255) < p_.writes; }
  // Odd factors and shifts to the right can be undone: a pass over the part names each block once.
  FW_DEVICE uint64_t block_of(uint64_t j) const {
    const uint64_t here = (uint64_t(1) << p_.blocks_log2) - 1;
    uint64_t x = (j * 0x9e3779b97f4a7c15ULL + p_.seed) & here;
    x ^= x >> (p_.blocks_log2 / 2 + 1);
    x = x * 0xbf58476d1ce4e5b9ULL & here;
    return uint64_t(warp::index()) << p_.blocks_log2 | x;
  }
  FW_DEVICE nvme::queue_pair& queue_of(uint64_t j) const {
    return p_.queues[(j + warp::index()) % p_.queue_count];
  }
  FW_DEVICE uint64_t slot_of(uint64_t j) const {
    return uint64_t(warp::index()) * p_.window + j % p_.window;
  }
  FW_DEVICE uint64_t* data_of(uint64_t j) const {
    return reinterpret_cast<uint64_t*>(p_.frames + slot_of(j) * p_.block_bytes);
  }
  FW_DEVICE uint32_t words() const { return p_.block_bytes / sizeof(uint64_t); }

  FW_DEVICE bool issue() {
    const uint64_t j = issued_;
    nvme::queue_pair& q = queue_of(j);
    const uint32_t ticket = nvme::take_tickets(q, lanes::all(), lanes::all());
    if (!nvme::slot_is_free(q, ticket)) {
      // Whoever waits for a slot holds none.
      for (uint32_t i = 0; i < p_.queue_count; i++) nvme::publish(p_.queues[i], lanes::all());
      while (done_ < issued_) {
        if (!finish_oldest()) return false;
      }
      if (!nvme::wait_for_slots(q, lanes::all(), lanes::all(), ticket, finisher_)) return fail();
    }
    const uint64_t block = block_of(j);
    uint64_t* data = data_of(j);
    if (p_.checks && writes(j)) {
      const uint32_t version = p_.versions[block] + 1;
      for (uint32_t k = 0; k < words(); k++) data[k] = word_of(block, version, k);
      atomic::fence_system();
    }
    const uint32_t lbas = p_.block_bytes >> nvme::kLbaShift;
    nvme::write_entry(q, ticket,
                      nvme::block_command(writes(j) ? nvme::kWrite : nvme::kRead,
                                          uint16_t(nvme::entry_of(q, ticket)), block * lbas, lbas,
                                          reinterpret_cast<uint64_t>(data), 0),
                      0);
    p_.tickets[slot_of(j)] = ticket;
    issued_++;
    return true;
  }

  FW_DEVICE bool has_ended(uint64_t j) const {
    nvme::queue_pair& q = queue_of(j);
    const uint64_t word = atomic::load_acquire(&q.slots[nvme::entry_of(q, p_.tickets[slot_of(j)])]);
    return nvme::slot::phase_of(word) == nvme::slot::kDone;
  }

  FW_DEVICE bool finish_oldest() {
    const uint64_t j = done_;
    nvme::queue_pair& q = queue_of(j);
    const uint32_t ticket = p_.tickets[slot_of(j)];
    const uint32_t status =
        nvme::wait_for_completions(q, lanes::all(), lanes::all(), ticket, finisher_);
    if (status == nvme::kTimedOut) return fail();
    if (status != nvme::kSuccess) {
      fail();
    } else if (p_.checks) {
      check(j);
    }
    nvme::release_slot(q, ticket);
    atomic::add_relaxed(&p_.counts[2], uint64_t(1));
    done_++;
    return true;
  }

  // What was read is what was stored last; what was written is what is stored now.
  FW_DEVICE void check(uint64_t j) {
    const uint64_t block = block_of(j);
    if (writes(j)) {
      p_.versions[block]++;
      return;
    }
    uint64_t* data = data_of(j);
    uint64_t different = 0;
    for (uint32_t k = 0; k < words(); k++) {
      different |= data[k] ^ word_of(block, p_.versions[block], k);
      // So that a read that moves nothing is seen.
      data[k] = 0;
    }
    if (different != 0) atomic::add_relaxed(&p_.counts[0], uint64_t(1));
  }

  FW_DEVICE bool fail() {
    atomic::add_relaxed(&p_.counts[1], uint64_t(1));
    return false;
  }

  const params& p_;
  nothing_detached finisher_;
  uint64_t issued_ = 0;
  uint64_t done_ = 0;
};

}  // namespace commands

FW_KERNEL drive_commands(const FW_GRID_CONSTANT commands::params p) { commands::worker(p).run(); }
