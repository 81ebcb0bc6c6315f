// Holds completions that are not due yet: a hierarchical timer wheel for one queue pair.
//
// Level 0 has a slot for each 256 ns, level 1 for each 64 of those, and so on. An entry is at the
// level of the highest digit in which its time differs from the wheel's. So every occupied slot is
// ahead of the wheel, and two bit scans find the first: the lowest occupied level has it. Hold and
// release take constant time. An entry is released up to 256 ns late and never early. One thread at
// a time.
#pragma once

#include <bit>
#include <cassert>
#include <cstdint>
#include <limits>
#include <vector>

namespace fw::native {

class HeldCompletions {
 public:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  // Room for `capacity` entries; `now_ns` is where the wheel stands.
  HeldCompletions(uint32_t capacity, int64_t now_ns)
      : nodes_(capacity), tick_(uint64_t(now_ns) >> kTickBits) {
    for (uint32_t i = capacity; i-- > 0;) release(i);
    for (auto& level : slots_) {
      for (uint32_t& slot : level) slot = kNone;
    }
  }

  uint32_t size() const { return size_; }

  // No entry is released before this; kNever if none is held.
  int64_t next_ns() const { return size_ == 0 ? kNever : int64_t(next_tick() << kTickBits); }

  void hold(int64_t due_ns, uint16_t cid, uint16_t status) {
    assert(free_ != kNone);
    const uint32_t index = free_;
    Node& node = nodes_[index];
    free_ = node.next;
    // Rounded up, so that no entry is released early.
    node.tick = (uint64_t(due_ns) + kTickNs - 1) >> kTickBits;
    if (node.tick < tick_) node.tick = tick_;
    node.cid = cid;
    node.status = status;
    place(index);
    ++size_;
  }

  // Calls post(cid, status) for each entry that is due. Returns their number.
  template <typename Post>
  uint32_t release_until(int64_t now_ns, Post post) {
    const uint64_t now = uint64_t(now_ns) >> kTickBits;
    const uint32_t before = size_;
    while (size_ != 0 && next_tick() <= now) {
      const uint32_t level = uint32_t(std::countr_zero(levels_));
      tick_ = next_tick();
      uint32_t index = take_first_slot(level);
      while (index != kNone) {
        Node& node = nodes_[index];
        const uint32_t next = node.next;
        if (node.tick == tick_) {
          post(node.cid, node.status);
          release(index);
          --size_;
        } else {
          place(index);  // at a lower level: one digit more agrees
        }
        index = next;
      }
    }
    // No entry is in between, so all keep their slots.
    if (now > tick_) tick_ = now;
    return before - size_;
  }

  // Releases all entries, whatever their time, and leaves the wheel where it stands.
  template <typename Post>
  void release_all(Post post) {
    while (size_ != 0) {
      uint32_t index = take_first_slot(uint32_t(std::countr_zero(levels_)));
      while (index != kNone) {
        const Node node = nodes_[index];
        post(node.cid, node.status);
        release(index);
        --size_;
        index = node.next;
      }
    }
  }

 private:
  static constexpr uint32_t kTickBits = 8;
  static constexpr uint64_t kTickNs = 1 << kTickBits;
  static constexpr uint32_t kDigitBits = 6;
  static constexpr uint32_t kLevels = 10;  // 60 bits of ticks: more than a clock has
  static constexpr uint32_t kNone = ~0u;

  struct Node {
    uint64_t tick;
    uint32_t next;
    uint16_t cid, status;
  };
  static_assert(sizeof(Node) == 16);

  // The tick at which the first occupied slot begins.
  uint64_t next_tick() const {
    const uint32_t level = uint32_t(std::countr_zero(levels_));
    const uint32_t shift = level * kDigitBits;
    const uint64_t upper = tick_ >> (shift + kDigitBits) << (shift + kDigitBits);
    return upper | uint64_t(std::countr_zero(occupied_[level])) << shift;
  }

  void place(uint32_t index) {
    Node& node = nodes_[index];
    const uint64_t difference = node.tick ^ tick_;
    const uint32_t level =
        difference == 0 ? 0 : uint32_t(63 - std::countl_zero(difference)) / kDigitBits;
    const uint32_t slot = uint32_t(node.tick >> (level * kDigitBits)) & ((1u << kDigitBits) - 1);
    node.next = slots_[level][slot];
    slots_[level][slot] = index;
    occupied_[level] |= uint64_t(1) << slot;
    levels_ |= 1u << level;
  }

  uint32_t take_first_slot(uint32_t level) {
    const uint32_t slot = uint32_t(std::countr_zero(occupied_[level]));
    occupied_[level] &= occupied_[level] - 1;
    if (occupied_[level] == 0) levels_ &= ~(1u << level);
    const uint32_t first = slots_[level][slot];
    slots_[level][slot] = kNone;
    return first;
  }

  void release(uint32_t index) {
    nodes_[index].next = free_;
    free_ = index;
  }

  std::vector<Node> nodes_;
  uint32_t free_ = kNone;
  uint32_t size_ = 0;
  uint32_t levels_ = 0;  // those with an occupied slot
  uint64_t tick_ = 0;    // where the wheel stands; never behind an entry
  uint64_t occupied_[kLevels] = {};
  uint32_t slots_[kLevels][1u << kDigitBits];
};

}  // namespace fw::native
