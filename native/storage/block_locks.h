// Who may write the blocks of a file that is written past the page cache.
//
// Transfers of whole blocks share them. A transfer of a part of a block reads it and writes all of
// it, so it owns the block: it would else write back what another has replaced. The last block of a
// file is no whole block if the file ends inside of it; it is written through the page cache, by
// one who owns the neighbourhood that Linux may keep in one folio with it.
//
// Nothing here waits. A transfer takes all that it needs, or nothing. A would-be owner is counted,
// and no transfer begins to share its block then, so its turn comes. Blocks are told apart by their
// page modulo a number. A large transfer shares regions of many pages instead, in which there are
// no owners then, so it costs a few atomic additions, too.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace fw::native {

// Of one file, in one process. Any number of threads.
class BlockLocks {
 public:
  static constexpr uint64_t kPageBytes = 4096;
  static constexpr uint64_t kPages = 1024;
  static constexpr uint64_t kRegionBytes = 64 << 10;
  static constexpr uint64_t kRegions = 256;
  static constexpr uint64_t kFolioBytesMax = 2 << 20;

  // How many share it, how many wait to be inside, and how many are.
  using Word = std::atomic<uint64_t>;
  static constexpr uint64_t kWaiter = uint64_t(1) << 32;
  static constexpr uint64_t kInside = uint64_t(1) << 48;
  static constexpr uint64_t kShared = kWaiter - 1;
  static constexpr uint64_t kTaken = ~(kInside - kWaiter);

  Word& tail() { return tail_; }
  Word& page(uint64_t offset) { return pages_[offset / kPageBytes % kPages]; }
  Word& region(uint64_t offset) { return regions_[offset / kRegionBytes % kRegions]; }

  // Acquire here, and release below: who owns a block sees what those before it have written.
  static bool share(Word& word) {
    if (word.fetch_add(1, std::memory_order_acquire) < kWaiter) return true;
    give(word);
    return false;
  }
  static void give(Word& word) { word.fetch_sub(1, std::memory_order_release); }

  // Beside nobody of `others`. `waits` is of the caller, and tells whether it is counted.
  static bool enter(Word& word, uint64_t others, bool& waits) {
    uint64_t seen = word.load(std::memory_order_relaxed);
    while ((seen & others) == 0) {
      const uint64_t inside = seen + kInside - (waits ? kWaiter : 0);
      if (!word.compare_exchange_weak(seen, inside, std::memory_order_acquire)) continue;
      waits = false;
      return true;
    }
    if (!waits) word.fetch_add(kWaiter, std::memory_order_relaxed);
    waits = true;
    return false;
  }
  static void leave(Word& word) { word.fetch_sub(kInside, std::memory_order_release); }
  static void stop_waiting(Word& word, bool& waits) {
    if (waits) word.fetch_sub(kWaiter, std::memory_order_relaxed);
    waits = false;
  }

 private:
  Word tail_{0};
  Word pages_[kPages] = {};
  Word regions_[kRegions] = {};
};

// What one transfer needs of them.
struct BlockClaim {
  enum class Kind : uint8_t { kWhole, kPart, kTail };

  BlockLocks* blocks = nullptr;  // null: nothing is needed
  Kind kind = Kind::kWhole;
  bool beside_tail = false;
  bool waits = false;            // for its page, or the tail
  bool waits_in_region = false;  // until nobody shares it
  uint64_t offset = 0;
  uint64_t nbytes = 0;

  bool take() {
    if (kind == Kind::kTail) return BlockLocks::enter(blocks->tail(), BlockLocks::kTaken, waits);
    if (beside_tail && !BlockLocks::share(blocks->tail())) return false;
    if (kind == Kind::kPart ? own() : share_all()) return true;
    if (beside_tail) BlockLocks::give(blocks->tail());
    return false;
  }

  // Of what was taken.
  void release() {
    if (kind == Kind::kTail) return BlockLocks::leave(blocks->tail());
    if (kind == Kind::kPart) {
      BlockLocks::leave(blocks->page(offset));
      BlockLocks::leave(blocks->region(offset));
    } else {
      give_first(count());
    }
    if (beside_tail) BlockLocks::give(blocks->tail());
  }

  // Of what was not taken: it is not counted until it is tried again.
  void withdraw() {
    BlockLocks::stop_waiting(kind == Kind::kTail ? blocks->tail() : blocks->page(offset), waits);
    BlockLocks::stop_waiting(blocks->region(offset), waits_in_region);
  }

 private:
  static constexpr uint64_t kLargeBytes = 16 << 10;

  bool own() {
    BlockLocks::Word& region = blocks->region(offset);
    if (!BlockLocks::enter(region, BlockLocks::kShared, waits_in_region)) return false;
    if (BlockLocks::enter(blocks->page(offset), BlockLocks::kTaken, waits)) return true;
    BlockLocks::leave(region);
    return false;
  }

  uint64_t unit() const {
    return nbytes < kLargeBytes ? BlockLocks::kPageBytes : BlockLocks::kRegionBytes;
  }
  BlockLocks::Word& word(uint64_t index) const {
    const uint64_t at = offset + index * unit();
    return nbytes < kLargeBytes ? blocks->page(at) : blocks->region(at);
  }
  uint64_t count() const {
    return std::min(BlockLocks::kRegions, (offset + nbytes - 1) / unit() - offset / unit() + 1);
  }
  bool share_all() {
    for (uint64_t i = 0, end = count(); i < end; ++i) {
      if (BlockLocks::share(word(i))) continue;
      give_first(i);
      return false;
    }
    return true;
  }
  void give_first(uint64_t end) {
    for (uint64_t i = 0; i < end; ++i) BlockLocks::give(word(i));
  }
};

}  // namespace fw::native
