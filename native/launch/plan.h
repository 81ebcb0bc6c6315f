// Launches that are ready to be made again: plain data, of which native code makes a launch.
//
// Python makes each plan once, for one kernel and one size. The array's calls, futures, tables and
// launches of callers' kernels run it. Callers take turns: nothing here is for several threads.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cpu/cpu_device.h"
#include "cuda/context.h"

namespace fw::native {

// One kernel of one size. Whoever made it keeps what it names.
struct Plan {
  // On a GPU.
  cuda::Handle function = nullptr;
  uint32_t blocks = 0, block_threads = 0;
  // On the CPU device.
  CpuPool* pool = nullptr;
  const entry* kernel = nullptr;
  uint32_t threads = 0;
};

// What calls on rows differ in, beyond addresses: calls of one size have one plan.
struct RowSize {
  // Address bits that select the kernel; see `element_bytes`.
  static constexpr uint64_t kAlignmentMax = 16;

  // A stream is a gather of rows that need no frame.
  // Cells are at equal distances, for the CPU device.
  enum class Verb : uint8_t { kGather, kStream, kPrefetch, kScatter, kCells };

  Verb verb = Verb::kGather;
  uint8_t index_bytes = 8;   // 0: a range
  uint8_t alignment = 0;     // of the rows' address, modulo kAlignmentMax
  uint8_t drain_blocks = 0;  // that fetch deferred misses, now; 0: nothing is deferred
  bool one_by_one = false;   // whether a thread of the CPU device takes lines one after the other
  uint16_t sms = 0;          // the most multiprocessors, or threads; 0: as many as are useful
  uint64_t count = 0;        // of indices; of bytes of a range
  // How indices count rows, as `row_params` has it; zeros: as the array does. Of cells: 0, bytes
  // from one to the next, and bytes of one.
  std::array<uint64_t, 3> counting = {};

  bool operator==(const RowSize&) const = default;
};

struct RowSizeHash {
  size_t operator()(const RowSize& size) const {
    const uint64_t small = uint64_t(size.sms) << 20 | uint64_t(size.drain_blocks) << 12 |
                           uint64_t(size.index_bytes) << 8 | size.alignment << 3 |
                           size.one_by_one << 2 | uint64_t(size.verb);
    const auto& [end, front, negative] = size.counting;
    return size_t((size.count << 32 | small) ^ end * 0x9E3779B97F4A7C15 ^
                  front * 0xC2B2AE3D27D4EB4F ^ negative);
  }
};

// What a launch on rows has for itself, as `row_params` has it.
struct RowOperands {
  uint64_t indices = 0;    // their address; 0: a range
  uint64_t count = 0;      // of indices; of bytes of a range
  uint64_t rows = 0;       // the address of the caller's rows
  uint64_t row_bytes = 0;  // of a range: its first byte
};

// Where these members lie in `row_params`, and apart from them look-ahead and strays.
struct RowMembers {
  size_t own_at = 0, look_ahead_at = 0;
};

// The parameter of launches on rows, for calls of one size.
class RowParameter {
 public:
  RowParameter() = default;
  RowParameter(const char* bytes, size_t nbytes, const RowMembers& members)
      : bytes_(bytes, bytes + nbytes), members_(members) {}

  // Makes it the parameter of one launch. One that defers its misses gets a number of its own.
  void point_to(const RowOperands& operands, uint64_t look_ahead = 0, uint64_t strays = 0);
  uint8_t* data() { return bytes_.data(); }
  size_t nbytes() const { return bytes_.size(); }

 private:
  std::vector<uint8_t> bytes_;
  RowMembers members_;
};

// The number of a launch that lists its misses. No two that run at a time have the same.
uint64_t launch_number();

// Plans by what they are for. Forgets all when it is full: callers repeat few sizes.
template <typename Key, typename Made, typename Hash = std::hash<Key>>
class Plans {
 public:
  Made* find(const Key& key) {
    const auto found = made_.find(key);
    return found == made_.end() ? nullptr : &found->second;
  }
  Made& keep(const Key& key, Made made) {
    if (made_.size() >= kMost) made_.clear();
    return made_[key] = std::move(made);
  }

 private:
  static constexpr size_t kMost = 256;
  std::unordered_map<Key, Made, Hash> made_;
};

// How many calls of an array moved rows, and how many rows.
struct Moved {
  std::atomic<uint64_t> calls{0}, rows{0};

  void add(uint64_t count) {
    calls.fetch_add(1, std::memory_order_relaxed);
    rows.fetch_add(count, std::memory_order_relaxed);
  }
};

}  // namespace fw::native
