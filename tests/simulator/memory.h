// The memory that fibres share: an arena of named regions, and the values that loads may return.
//
// Real memory always has the newest value of each cell, and in `sc` mode loads return it. In `weak`
// mode an operational model decides (C11 release/acquire and relaxed atomics, with PTX's scopes and
// fences, without load buffering):
//   - A cell (8 bytes, or 4 in regions of 32-bit words) keeps its last messages: value, writer, the
//     writer's time. A store adds one at the end of the cell's modification order.
//   - A fibre has a vector clock: the time up to which it knows each fibre's stores. A load may
//     return any kept message, unless its fibre knows a newer one, or a load of one.
//   - A release attaches the clock to the message, an acquire joins it. Fences do so for the
//     relaxed accesses after (release) and before (acquire) them. A read-modify-write reads the
//     newest message and continues its release sequence. Sequential fences join one global clock.
//   - A device-scope release or acquire means nothing between a device thread and a controller.
//   - Data that a controller moves into a frame carries the controller's clock at the begin of the
//     move: it does not overtake its command. PCIe transfers behave so, and stores of processors
//     that become visible to all others at once (x86, ARMv8).
//   - A later fence orders a plain load of racy memory as it orders a relaxed one, because copies
//     store what they have loaded.
//   - warp::sync joins the clocks of its lanes; no other collective orders memory.
//   - A plain access that is not ordered after a conflicting one is reported as a data race, in
//     regions that are declared `kChecked`.
// Not covered: load buffering (a load sees no store that is scheduled after it); stores that come
// before a store that was scheduled earlier. Accesses of different sizes work on whole cells. A
// message is forgotten once there are four newer ones, or `window` accesses after a newer one.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "flashwarp/base/platform.cuh"
#include "random.h"

namespace fw::simulator {

enum class MemoryMode : uint8_t { kSequential, kWeak };

enum class Sharing : uint8_t {
  kAtomic,   // only atomic accesses
  kChecked,  // plain accesses too, which must be ordered
  kRacy,     // plain accesses that may race: readers find out by themselves
};

struct Region {
  std::string name;
  char* base = nullptr;
  uint64_t bytes = 0;
  uint32_t element_bytes = 8;
  uint32_t cell_bytes = 8;
  Sharing sharing = Sharing::kAtomic;
  int volume = -1;  // for reports: the volume that it belongs to; -1: none
  // For reports; may be null. Gets the element's index, and its value where it is one word.
  std::string (*describe)(uint64_t value) = nullptr;
  // Called at every change of a cell, with its index: invariants that hold at all times.
  void (*check)(void* owner, uint64_t index, uint64_t before, uint64_t after) = nullptr;
  void* owner = nullptr;
  // Whether a controller may read what another one writes meanwhile; gets `owner`.
  bool (*forgives_controllers)(const void* owner) = nullptr;
  bool of_block = false;  // stands for a GPU's shared memory: base::scope_of
  bool is_unmapped = false;
  bool keeps_loads = false;  // for `check_handed_over`; kChecked ones are kept anyway
};

class Memory {
 public:
  static constexpr uint64_t kArenaBytes = 1 << 20;

  Memory();

  // Starts a run with an empty arena.
  void begin(MemoryMode mode, uint64_t seed);
  // Zero-filled memory for a region, 128-byte aligned. Throws std::bad_alloc beyond the arena.
  char* allocate(const Region& region);
  // Unmaps the regions of a volume: every later access to them fails.
  void unmap(int volume);
  // Starts a launch: all fibres know everything written so far.
  void begin_launch(uint32_t fibres);

  bool contains(const void* p) const {
    return uint64_t(static_cast<const char*>(p) - arena_) < used_;
  }
  bool of_block(const void* p) const { return contains(p) && region_of(offset(p)).of_block; }
  uint64_t offset_of(const void* p) const { return contains(p) ? offset(p) + 1 : 0; }
  std::string describe(const void* p, uint64_t value) const;
  bool weak() const { return weak_; }
  // Of the arena's contents: the same again when every change has been undone, as locks are.
  uint64_t digest() const { return digest_; }

  uint64_t load(const void* p, uint32_t bytes, order o, scope s, site at);
  void store(void* p, uint64_t value, uint32_t bytes, order o, scope s, site at);
  // Returns the old value. change(old, new) sets the new one, or returns false to keep the old.
  template <typename Change>
  uint64_t modify(void* p, uint32_t bytes, order o, site at, Change change);
  void fence(fence_kind kind);
  void synchronize(uint32_t first_fibre, uint32_t lanes);
  // Makes all stores so far visible to all fibres, because stores take a finite time.
  void settle_stores();
  // A controller begins to move data.
  void begin_transfer();
  // The running fibre allows a controller, by a relaxed store, to overwrite these bytes. A fence
  // before that store must order every load of them so far. Weak mode.
  void check_handed_over(const void* p, uint64_t bytes);

  // Happens-before between fibres, for oracles. Weak mode only.
  using Clock = const uint32_t*;
  uint32_t own_time(uint32_t fibre) const { return clock(fibre)[fibre]; }
  bool knows(uint32_t fibre, uint32_t other, uint32_t time) const {
    return clock(fibre)[other] >= time;
  }
  uint32_t snapshot(uint32_t fibre);
  bool snapshot_knows(uint32_t snapshot, uint32_t other, uint32_t time) const {
    return snapshots_[uint64_t(snapshot) * fibres_ + other] >= time;
  }

 private:
  static constexpr uint32_t kMessages = 3;
  static constexpr uint32_t kNone = 0;  // no snapshot, no table
  struct Message {
    uint64_t value;
    uint64_t superseded_at;
    uint32_t time;
    uint32_t release_device;  // snapshots
    uint32_t release_system;
    uint32_t seen;  // table: when each fibre first saw this message
    uint16_t writer;
    bool plain;
    bool transferred;  // by a controller into a racy region
    site at;
  };
  struct Cell {
    uint32_t count;  // kept messages, newest first
    uint32_t loads;  // table: when each fibre last loaded; the same for plain loads after it
    Message messages[kMessages];
  };

  uint64_t offset(const void* p) const { return uint64_t(static_cast<const char*>(p) - arena_); }
  const Region& region_of(uint64_t offset) const { return regions_[region_index_[offset >> 7]]; }
  uint32_t* clock(uint32_t fibre) { return &clocks_[uint64_t(fibre) * fibres_]; }
  const uint32_t* clock(uint32_t fibre) const { return &clocks_[uint64_t(fibre) * fibres_]; }
  Cell& cell_of(uint64_t offset, const Region& region, uint64_t& cell_offset);
  Cell& outside_cell(const void* p, uint32_t bytes);
  Cell& add_cell(const void* p, uint32_t bytes);
  uint32_t make_table(uint32_t fibres, uint32_t fill);
  uint32_t join(uint32_t snapshot, uint32_t other);
  bool knows_message(uint32_t fibre, const Message& m) const;
  void join_clock(uint32_t* into, uint32_t snapshot);
  void see(uint32_t fibre, Cell& cell, uint32_t index);
  uint32_t visible(uint32_t fibre, Cell& cell);
  void receive(uint32_t fibre, const Message& m, order o, scope s);
  void push(uint32_t fibre, Cell& cell, const Region& region, uint64_t value, order o, scope s,
            bool continues, site at);
  bool forgiven(const Region& region, uint32_t one, uint32_t other) const;
  void check_load(uint32_t fibre, Cell& cell, const Region& region, bool plain, const void* p,
                  site at);
  void check_store(uint32_t fibre, Cell& cell, const Region& region, bool plain, const void* p,
                   site at);
  void write(void* p, uint64_t value, uint32_t bytes);
  void check_mapped(const void* p, site at) const;
  [[noreturn]] void report_race(const void* p, const char* what, uint32_t other, site at,
                                site other_at);

  char* arena_;
  uint64_t used_ = 0;
  uint64_t digest_ = 0;
  std::vector<Region> regions_;
  bool some_unmapped_ = false;
  std::vector<uint16_t> region_index_;  // by 128 bytes of the arena

  bool weak_ = false;
  Random random_;
  uint64_t window_ = 0;
  uint32_t stale_percent_ = 0;
  uint64_t horizon_ = 0;  // messages superseded before are gone

  uint32_t fibres_ = 0;
  std::vector<uint32_t> clocks_;          // fibres_ for each fibre
  std::vector<uint32_t> pending_device_;  // joined by the next acquire fence
  std::vector<uint32_t> pending_system_;
  std::vector<uint32_t> fence_device_;  // snapshot that relaxed stores carry
  std::vector<uint32_t> fence_system_;
  std::vector<uint32_t> transfer_;       // snapshot that a controller's data carries
  std::vector<uint32_t> global_;         // of sequential fences of the device
  std::vector<uint32_t> global_system_;  // of those at system scope
  std::vector<uint32_t> snapshots_;      // fibres_ for each; the first is empty
  std::vector<uint32_t> last_received_;  // by fibre: a snapshot that it has joined already
  std::vector<uint32_t> tables_;
  std::vector<uint32_t> cell_index_;  // by 4 bytes of the arena; valid when stamped
  std::vector<uint32_t> cell_stamp_;
  uint32_t stamp_ = 0;
  std::vector<Cell> cells_;
  // Atomics in objects of the host's, such as the lock of a queue server: cells too.
  std::unordered_map<const void*, uint32_t> outside_;
};

extern Memory memory;

}  // namespace fw::simulator
