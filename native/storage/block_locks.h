// Who may write the blocks of a file that is written past the page cache.
//
// Transfers of whole blocks share them. A transfer of a part of a block reads it and writes all of
// it, so it owns the block: it would else write back what another has replaced. The last block of a
// file is no whole block if the file ends inside of it; it is written through the page cache, by
// one who owns the neighbourhood that Linux may keep in one folio with it.
//
// Nothing here waits. A transfer takes all that it needs, or nothing. A would-be owner is counted,
// and no transfer begins to share its block then, so its turn comes. Blocks are told apart by their
// page modulo a number, which costs a sharer one atomic addition for each page of its transfer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace fw::native {

// Of one file, in one process. Any number of threads.
class BlockLocks {
 public:
  using Word = std::atomic<uint64_t>;  // how many share it, how many wait to own it, and the owner
  static constexpr uint64_t kPageBytes = 4096;
  static constexpr uint64_t kWords = 1024;
  static constexpr uint64_t kFolioBytesMax = 2 << 20;

  Word& tail() { return tail_; }
  Word& of(uint64_t offset) { return words_[offset / kPageBytes % kWords]; }

  // Acquire here, and release below: who owns a block sees what those before it have written.
  static bool share(Word& word) {
    if (word.fetch_add(1, std::memory_order_acquire) < kWaiter) return true;
    give(word);
    return false;
  }
  static void give(Word& word) { word.fetch_sub(1, std::memory_order_release); }

  // `waits` is of the caller, and tells whether it is counted.
  static bool own(Word& word, bool& waits) {
    uint64_t seen = word.load(std::memory_order_relaxed);
    while ((seen & ~kWaiters) == 0) {
      const uint64_t owned = (waits ? seen - kWaiter : seen) | kOwned;
      if (!word.compare_exchange_weak(seen, owned, std::memory_order_acquire)) continue;
      waits = false;
      return true;
    }
    if (!waits) word.fetch_add(kWaiter, std::memory_order_relaxed);
    waits = true;
    return false;
  }
  static void disown(Word& word) { word.fetch_sub(kOwned, std::memory_order_release); }
  static void stop_waiting(Word& word) { word.fetch_sub(kWaiter, std::memory_order_relaxed); }

 private:
  static constexpr uint64_t kWaiter = uint64_t(1) << 32;
  static constexpr uint64_t kOwned = uint64_t(1) << 63;
  static constexpr uint64_t kWaiters = kOwned - kWaiter;

  Word tail_{0};
  Word words_[kWords] = {};
};

// What one transfer needs of them.
struct BlockClaim {
  enum class Kind : uint8_t { kWhole, kPart, kTail };

  BlockLocks* blocks = nullptr;  // null: nothing is needed
  Kind kind = Kind::kWhole;
  bool beside_tail = false;
  bool waits = false;
  uint64_t offset = 0;
  uint64_t nbytes = 0;

  bool take() {
    if (kind == Kind::kTail) return BlockLocks::own(blocks->tail(), waits);
    if (beside_tail && !BlockLocks::share(blocks->tail())) return false;
    if (kind == Kind::kPart ? BlockLocks::own(blocks->of(offset), waits) : share_all()) return true;
    if (beside_tail) BlockLocks::give(blocks->tail());
    return false;
  }

  // Of what was taken.
  void release() {
    if (kind == Kind::kTail) return BlockLocks::disown(blocks->tail());
    kind == Kind::kPart ? BlockLocks::disown(blocks->of(offset)) : give_first(pages());
    if (beside_tail) BlockLocks::give(blocks->tail());
  }

  // Of what was not taken: it is not counted until it is tried again.
  void withdraw() {
    if (waits) BlockLocks::stop_waiting(kind == Kind::kTail ? blocks->tail() : blocks->of(offset));
    waits = false;
  }

 private:
  uint64_t pages() const {
    const uint64_t first = offset / BlockLocks::kPageBytes;
    return std::min(BlockLocks::kWords, (offset + nbytes - 1) / BlockLocks::kPageBytes - first + 1);
  }
  bool share_all() {
    for (uint64_t i = 0, count = pages(); i < count; ++i) {
      if (BlockLocks::share(blocks->of(offset + i * BlockLocks::kPageBytes))) continue;
      give_first(i);
      return false;
    }
    return true;
  }
  void give_first(uint64_t pages) {
    for (uint64_t i = 0; i < pages; ++i) {
      BlockLocks::give(blocks->of(offset + i * BlockLocks::kPageBytes));
    }
  }
};

}  // namespace fw::native
