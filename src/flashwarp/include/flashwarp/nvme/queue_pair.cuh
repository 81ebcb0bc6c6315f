// One NVMe queue pair for any number of submitters, and the slots of its commands.
//
// The rings and doorbells are host-visible memory, shared with the controller. The rest is device
// memory. Command identifier, ring entry and slot are one number. A slot's word goes
//   FREE(turn) -> WRITTEN(turn) -> DONE(turn, status) -> FREE(turn + 1)
// where turn counts the passes over the ring. Invariants: each command completes exactly once, to
// exactly one consumer; no thread holds a lock of the queue pair while it waits; every wait drains.
#pragma once

#include "flashwarp/base/assert.cuh"
#include "flashwarp/base/atomic.cuh"
#include "flashwarp/base/warp.cuh"
#include "flashwarp/nvme/drive_addressing.cuh"

namespace fw::nvme {

// How data gets from the namespace to the device; a property of the controller.
enum route : uint32_t {
  kInPlace = 0,  // the device reads the namespace's memory itself
  kBounce = 1,   // the controller fills the slot's pinned buffer, which the device reads
  kDirect = 2,   // the controller writes device memory
};

// A software controller polls doorbells in host memory. A drive's doorbells are registers in its
// BAR, which need MMIO stores.
enum doorbell_kind : uint32_t {
  kDoorbellInMemory = 0,
  kDoorbellRegister = 1,
};

// What the drainer needs to finish a detached command, for which no thread waits.
struct detached_command {
  uint64_t tag;     // address of the line's tag word
  uint64_t frame;   // address of the line's frame
  uint64_t source;  // a read's data, in the namespace or the slot's buffer; of a write to replicas,
                    // the address of its count
  uint32_t opcode;
  uint32_t bytes;
};
static_assert(sizeof(detached_command) == 32);

// Where the commands of a queue pair move their data, and their time limit.
struct transport {
  uint64_t mapped_base;    // kInPlace: device address of LBA 0
  uint64_t buffers;        // kBounce, or leased: pinned buffer of slot 0
  uint64_t buffer_stride;  // bytes between the buffers of neighbouring slots
  uint64_t timeout_ns;     // the bound of every wait
  uint32_t path;           // data_path; see path_of
  uint32_t leased;         // 1: the host may change `path` from kInPlace to kBounce, once
  // Host-visible: the host's process advances it at least each kBeatNs while it runs. If it is 0 or
  // the pointer null, there is no heartbeat.
  const uint32_t* heartbeat;
};
static_assert(sizeof(transport) == 48);

struct alignas(128) queue_pair {
  // Fixed at open.
  command* sq;
  const completion* cq;
  uint32_t* sq_doorbell;
  uint32_t* cq_doorbell;
  uint64_t* slots;
  detached_command* detached;
  transport data;
  uint32_t doorbell_kind;
  // 1: while the path is kInPlace, warps read, or write, the namespace without commands. 0: each
  // read or write must pass the controller, as a modelled drive needs it.
  uint32_t plain_reads;
  uint32_t plain_writes;  // never under a lease, whose path may change
  // 1: while the path is kDirect, threads of the CPU device copy what is in the page cache without
  // commands, to frames or, around them, to callers (cache/read_around.cuh).
  uint32_t cached_reads;
  // If not null: while the path is kInPlace, warps read the namespace here, at device addresses,
  // without commands, and `plain_reads` is 0.
  const namespace_part* parts;
  uint64_t part_count;
  // For submitters: the next ticket. Free-running: entry = ticket mod depth, turn = ticket / depth.
  alignas(128) uint32_t ticket;
  uint32_t depth_log2;
  uint32_t id;
  uint32_t failed;  // a wait ran out of time, or the drive is lost: dead until it is opened again
  const drive_addressing* drive;  // null: commands go as they are, to the software controller
  // For the publisher: how far the SQ tail doorbell has moved (free-running).
  alignas(32) uint32_t publish_lock;
  uint32_t tail;
  // For the drainer: consumed CQEs (free-running), and how many SQEs the controller has fetched.
  alignas(32) uint32_t drain_lock;
  uint32_t head;
  uint32_t fetched;
  // Counters, written under the locks above.
  alignas(32) uint32_t doorbells;
  uint32_t helps;
};
static_assert(sizeof(queue_pair) == 256);

// Nanoseconds between idle polls: a third of a PCIe round trip, so that completions are seen soon.
inline constexpr uint32_t kBackOffNs = 200;

// Status of a wait that ran out of time: vendor specific status code type, never on the wire.
inline constexpr uint32_t kTimedOut = 0x7FF;

// Slot words. Bits 63:32 turn, 31:16 status field, 8 detached, 1:0 phase of the slot's life.
namespace slot {
enum phase : uint64_t { kFree = 0, kWritten = 1, kDone = 2 };
inline constexpr uint64_t kPhaseMask = 3;
inline constexpr uint64_t kDetached = 1u << 8;

FW_HOST_DEVICE uint64_t word(uint32_t turn, phase p) { return (uint64_t(turn) << 32) | p; }
FW_HOST_DEVICE uint64_t done(uint64_t written, uint32_t status) {
  return (written & ~kPhaseMask) | (uint64_t(status) << 16) | kDone;
}
FW_HOST_DEVICE phase phase_of(uint64_t word) { return phase(word & kPhaseMask); }
FW_HOST_DEVICE uint32_t status_of(uint64_t word) { return uint32_t(word >> 16) & 0x7FF; }
FW_HOST_DEVICE bool is_detached(uint64_t word) { return (word & kDetached) != 0; }
}  // namespace slot

FW_HOST_DEVICE uint32_t entry_of(const queue_pair& q, uint32_t ticket) {
  return ticket & ((1u << q.depth_log2) - 1);
}
FW_HOST_DEVICE uint32_t turn_of(const queue_pair& q, uint32_t ticket) {
  return ticket >> q.depth_log2;
}
// The turn after the one of `ticket`: tickets wrap at 2^32, and turns with them.
FW_HOST_DEVICE uint32_t next_turn(const queue_pair& q, uint32_t ticket) {
  return turn_of(q, ticket + (1u << q.depth_log2));
}
FW_HOST_DEVICE uint64_t buffer_of(const queue_pair& q, uint32_t ticket) {
  return q.data.buffers + entry_of(q, ticket) * q.data.buffer_stride;
}

// Rings a doorbell, by one lane. The caller has put a system fence behind what it publishes.
FW_DEVICE void ring(const queue_pair& q, uint32_t* doorbell, uint32_t value) {
  if (q.doorbell_kind == kDoorbellRegister) {
    atomic::store_mmio(doorbell, value);
  } else {
    atomic::store_relaxed_system(doorbell, value);
  }
}

// The host's process advances the heartbeat this often.
inline constexpr uint64_t kBeatNs = 25'000'000;
// A wait looks at the heartbeat, over the PCIe link, only after this time.
inline constexpr uint64_t kAskNs = 2 * kBeatNs;
// The fewest beats that end a wait. So a host that was stopped gets time to serve, however short
// the limit.
inline constexpr uint32_t kBeatsMin = 8;
// If the host does not come back, a wait ends after this many of its time limits.
inline constexpr uint64_t kLimitsUntilDead = 10;
// Polls between two looks at the clock, which on a GPU is far slower than a poll. On a CPU a poll
// may take long, because the thread may lose its core.
inline constexpr uint32_t kPollsPerLook = FW_ON_GPU ? 64 : 8;

FW_DEVICE uint32_t heartbeat_of(const transport& t) {
  return t.heartbeat == nullptr ? 0 : atomic::load_relaxed_system(t.heartbeat);
}

// Whether a wait ends that has taken `waited` nanoseconds, more than its limit, by its own clock.
// Time in which the host's process was stopped does not count: since `first` the heartbeat must
// have advanced for as long as the limit. Without a heartbeat the clock alone counts.
FW_DEVICE_NOINLINE bool has_aged(const transport& t, uint64_t waited, uint32_t first) {
  const uint32_t beat = heartbeat_of(t);
  if (first == 0 || beat == 0) return true;
  const uint32_t beats = beat - first;
  if (beats >= kBeatsMin && beats * kBeatNs >= t.timeout_ns) return true;
  return waited > kLimitsUntilDead * t.timeout_ns;
}

// The path of a command that is submitted now. A namespace is read in place under a lease while no
// process writes it. The host stores kBounce, while kernels run, before it gives the lease up.
FW_DEVICE uint32_t path_of(const queue_pair& q) {
  if (q.data.leased == 0) return q.data.path;
  // Relaxed: a warp that has read data in place looks again, behind a fence (`is_current`).
  return atomic::load_relaxed_system(&q.data.path);
}

// Whether the data read at a command's address is current. Data in a slot's buffer is. Data in the
// namespace is if the host has not changed the path by now. The caller has a system fence behind
// its loads. So if they saw a byte that was stored after the lease ended, this look sees the path
// that was stored before the lease ended.
FW_DEVICE bool is_current(const queue_pair& q, uint64_t address) {
  if (q.data.leased == 0 || path_of(q) == kInPlace) return true;
  return address - q.data.buffers < q.data.buffer_stride << q.depth_log2;
}

// The time limit of one wait loop. Its clock starts at the first look, so a wait that ends at once
// reads no clock. It must stay in registers: fences would wait for stores to local memory.
class deadline {
 public:
  FW_DEVICE explicit deadline(const transport& t) : transport_(t) {}
  FW_DEVICE bool passed() {
    if (++polls_ % kPollsPerLook != 0) return false;
    const uint64_t now = base::clock_ns();
    if (start_ == 0) start_ = now;
    const uint64_t waited = now - start_;
    const uint64_t limit = transport_.timeout_ns;
    if (!asked_ && waited > (limit / 8 < kAskNs ? limit / 8 : kAskNs)) {
      asked_ = true;
      beat_ = heartbeat_of(transport_);
    }
    return waited > limit && base::opaque(&has_aged)(transport_, waited, beat_);
  }

 private:
  const transport& transport_;
  uint64_t start_ = 0;
  uint32_t polls_ = 0;
  uint32_t beat_ = 0;  // the heartbeat at the first look
  bool asked_ = false;
};

}  // namespace fw::nvme
