// One NVMe queue pair with any number of submitters, and the slots that its commands live in.
//
// The rings and doorbells are host-visible memory that the controller shares; everything else is
// device memory. Command identifier = ring entry = slot. A slot's word goes
//   FREE(turn) -> WRITTEN(turn) -> DONE(turn, status) -> FREE(turn + 1)
// where turn counts the passes over the ring. Invariants: each command completes exactly once, to
// exactly one consumer; nobody holds a lock of this file while it waits; every wait drains.
#pragma once

#include "flashwarp/base/assert.cuh"
#include "flashwarp/base/atomic.cuh"
#include "flashwarp/base/warp.cuh"
#include "flashwarp/nvme/command.cuh"

namespace fw::nvme {

// How data gets from the namespace to the device; a property of the controller.
enum data_path : uint32_t {
  kInPlace = 0,  // the namespace is memory that the device can read: it pulls
  kBounce = 1,   // the controller fills the slot's pinned buffer: the device pulls that
  kDirect = 2,   // the controller writes device memory itself
};

// What a doorbell is. A controller in software polls words of host memory; a drive's are registers
// behind its BAR, for which a store has to be one of MMIO.
enum doorbell_kind : uint32_t {
  kDoorbellInMemory = 0,
  kDoorbellRegister = 1,
};

// What the drainer must know to finish a command that nobody waits for.
struct detached_command {
  uint64_t tag;     // address of the line's tag word
  uint64_t frame;   // address of the line's frame
  uint64_t source;  // a read's data: in the namespace (kInPlace) or in the slot's buffer (kBounce)
  uint32_t opcode;
  uint32_t bytes;
};
static_assert(sizeof(detached_command) == 32);

// Where a queue pair's commands move their data, and how long they may take.
struct transport {
  uint64_t mapped_base;    // kInPlace: device address of LBA 0
  uint64_t buffers;        // kBounce, or leased: pinned buffer of slot 0
  uint64_t buffer_stride;  // bytes between the buffers of neighbouring slots
  uint64_t timeout_ns;     // the bound of every wait
  uint32_t path;           // data_path; see path_of
  uint32_t leased;         // 1: the host may change `path` from kInPlace to kBounce, once
  // Host-visible: the host's process advances it while it runs, at least each kBeatNs. 0, or a null
  // pointer: nobody does.
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
  // Submitters: the next ticket. Free-running; entry = ticket mod depth, turn = ticket div depth.
  alignas(128) uint32_t ticket;
  uint32_t depth_log2;
  uint32_t id;
  uint32_t failed;  // a wait ran out of time: the pair is dead until it is opened again
  // The publisher: how far the SQ tail doorbell has moved (free-running).
  alignas(32) uint32_t publish_lock;
  uint32_t tail;
  // The drainer: consumed CQEs (free-running) and how many SQEs the controller has fetched.
  alignas(32) uint32_t drain_lock;
  uint32_t head;
  uint32_t fetched;
  // Counters, written under the locks above.
  alignas(32) uint32_t doorbells;
  uint32_t helps;
};
static_assert(sizeof(queue_pair) == 256);
FW_CHECK_OFFSET(queue_pair, data, 48);
FW_CHECK_OFFSET(queue_pair, doorbell_kind, 96);
FW_CHECK_OFFSET(queue_pair, ticket, 128);
FW_CHECK_OFFSET(queue_pair, depth_log2, 132);
FW_CHECK_OFFSET(queue_pair, id, 136);
FW_CHECK_OFFSET(queue_pair, publish_lock, 160);
FW_CHECK_OFFSET(queue_pair, drain_lock, 192);
FW_CHECK_OFFSET(queue_pair, doorbells, 224);

// Nanoseconds that an idle poll backs off: a third of a PCIe round trip, so a completion is seen
// soon.
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

// Rings a doorbell, by one lane. What it tells of comes before, by a fence of the system.
FW_DEVICE void ring(const queue_pair& q, uint32_t* doorbell, uint32_t value) {
  if (q.doorbell_kind == kDoorbellRegister) {
    atomic::store_mmio(doorbell, value);
  } else {
    atomic::store_relaxed_system(doorbell, value);
  }
}

// How often the host's process advances the heartbeat.
inline constexpr uint64_t kBeatNs = 25'000'000;
// How long a wait goes on before it looks at the heartbeat, over the PCIe link.
inline constexpr uint64_t kAskNs = 2 * kBeatNs;
// The fewest beats that end a wait: a host that was stopped has come round before, however short
// the limit.
inline constexpr uint32_t kBeatsMin = 8;
// A host that does not come back: the wait ends after this many of its time limits.
inline constexpr uint64_t kLimitsUntilDead = 10;
// Polls between two looks at the clock, which on a GPU is far slower than a poll. A CPU thread may
// wait for its core at each of them.
inline constexpr uint32_t kPollsPerLook = FW_ON_GPU ? 64 : 8;

FW_DEVICE uint32_t heartbeat_of(const transport& t) {
  return t.heartbeat == nullptr ? 0 : atomic::load_relaxed_system(t.heartbeat);
}

// Whether a wait is over that has lasted for `waited` nanoseconds, more than its limit, by its own
// clock. A process that was stopped meanwhile has not let it wait: the host must have lived for as
// long, by its beats since `first`. Without a heartbeat the clock counts alone.
FW_DEVICE_NOINLINE bool has_aged(const transport& t, uint64_t waited, uint32_t first) {
  const uint32_t beat = heartbeat_of(t);
  if (first == 0 || beat == 0) return true;
  const uint32_t beats = beat - first;
  if (beats >= kBeatsMin && beats * kBeatNs >= t.timeout_ns) return true;
  return waited > kLimitsUntilDead * t.timeout_ns;
}

// The path that a command submitted now takes. A namespace is read in place under a lease for as
// long as nobody writes it. Before the host gives the lease up it stores kBounce, while kernels
// run.
FW_DEVICE uint32_t path_of(const queue_pair& q) {
  if (q.data.leased == 0) return q.data.path;
  // Relaxed: whoever has pulled data in place looks again, behind a fence (`is_current`).
  return atomic::load_relaxed_system(&q.data.path);
}

// Whether what was read at a command's address may be used. The address is a slot's buffer, or a
// place in the namespace, which was current if the host had not left that path by now. The caller
// has a system fence behind its loads from there. If they saw a byte that was stored after the
// lease ended, this sees the path that was stored before.
FW_DEVICE bool is_current(const queue_pair& q, uint64_t address) {
  if (q.data.leased == 0 || path_of(q) == kInPlace) return true;
  return address - q.data.buffers < q.data.buffer_stride << q.depth_log2;
}

// The bound of one wait loop. Starts its clock at the first look, so that a wait which is over at
// once reads no clock. Registers only: what a warp polls with in local memory, its fences would
// wait for.
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
  uint32_t beat_ = 0;  // when it was asked for first
  bool asked_ = false;
};

}  // namespace fw::nvme
