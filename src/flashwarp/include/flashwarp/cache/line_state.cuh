// The tag word: the whole state of one cached line in 64 bits, changed by compare-and-swap.
//
//   63:62 state   61 writing   60 dirty   59 referenced   58:53 pins   52:38 generation   37:0 line
//
// state      INVALID -> BUSY (a fill owns the frame) -> VALID -> BUSY (refilled) ...
// writing    a write-back of this line is in flight; the line stays readable and writable
// dirty      the frame holds stores that no write-back has copied yet
// referenced set by a hit, cleared by the policy; in a BUSY word: whether the line begins with it
// pins       threads that use the frame beyond one load; a pinned line is never evicted
// generation counts the fills of the frame: if a reader finds line and generation unchanged after
//            its loads, the frame was not refilled meanwhile
#pragma once

#include "flashwarp/base/atomic.cuh"

namespace fw::cache {

namespace tag {

inline constexpr uint64_t kLineBits = 38;
inline constexpr uint64_t kLineMask = (uint64_t(1) << kLineBits) - 1;
inline constexpr uint64_t kGenerationOne = uint64_t(1) << kLineBits;
inline constexpr uint64_t kGenerationMask = uint64_t(0x7FFF) << kLineBits;
inline constexpr uint64_t kPinOne = uint64_t(1) << 53;
inline constexpr uint64_t kPinMask = uint64_t(0x3F) << 53;
inline constexpr uint64_t kReferenced = uint64_t(1) << 59;
inline constexpr uint64_t kDirty = uint64_t(1) << 60;
inline constexpr uint64_t kWriting = uint64_t(1) << 61;
inline constexpr uint64_t kStateMask = uint64_t(3) << 62;
inline constexpr uint64_t kInvalid = 0;
inline constexpr uint64_t kBusy = uint64_t(1) << 62;
inline constexpr uint64_t kValid = uint64_t(2) << 62;
static_assert((kLineMask | kGenerationMask | kPinMask | kReferenced | kDirty | kWriting |
               kStateMask) == ~uint64_t(0));

// What an optimistic reader compares. Pins, dirty, writing and referenced may change under it.
inline constexpr uint64_t kIdentityMask = kStateMask | kGenerationMask | kLineMask;

FW_HOST_DEVICE uint64_t line_of(uint64_t word) { return word & kLineMask; }
FW_HOST_DEVICE uint64_t state_of(uint64_t word) { return word & kStateMask; }
FW_HOST_DEVICE uint64_t identity_of(uint64_t word) { return word & kIdentityMask; }

// Whether `word` is of `line` and VALID.
FW_HOST_DEVICE bool holds(uint64_t word, uint64_t line) {
  return (word & (kStateMask | kLineMask)) == (kValid | line);
}
// Whether `word` is of `line` and BUSY.
FW_HOST_DEVICE bool awaits(uint64_t word, uint64_t line) {
  return (word & (kStateMask | kLineMask)) == (kBusy | line);
}
// Whether a fill may take the frame at once.
FW_HOST_DEVICE bool is_replaceable(uint64_t word) {
  if (state_of(word) == kInvalid) return true;
  return (word & (kStateMask | kPinMask | kDirty | kWriting)) == kValid;
}
// Whether the frame would be replaceable after a write-back.
FW_HOST_DEVICE bool is_cleanable(uint64_t word) {
  return (word & (kStateMask | kPinMask | kDirty | kWriting)) == (kValid | kDirty);
}

// The word with which a fill of `line` claims a frame whose word is `previous`.
FW_HOST_DEVICE uint64_t busy(uint64_t previous, uint64_t line) {
  return kBusy | ((previous + kGenerationOne) & kGenerationMask) | line;
}
// The word of a filled frame.
FW_HOST_DEVICE uint64_t filled(uint64_t busy_word, bool dirty) {
  const uint64_t kept = kReferenced | kGenerationMask | kLineMask;
  return kValid | (busy_word & kept) | (dirty ? kDirty : 0);
}
FW_HOST_DEVICE uint64_t emptied(uint64_t busy_word) { return busy_word & kGenerationMask; }

}  // namespace tag

// Replaces `*word` by `change(word)` if `applies(word)`. Returns the word that it replaced, or 0 if
// the change did not apply. (0 is an INVALID word, to which no change applies.)
template <typename Applies, typename Change>
FW_DEVICE uint64_t update(uint64_t* word, Applies applies, Change change) {
  uint64_t seen = atomic::load_relaxed(word);
  while (applies(seen)) {
    if (atomic::cas_acq_rel(word, seen, change(seen))) return seen;
    seen = atomic::load_relaxed(word);
  }
  return 0;
}

// Pins the line if its identity is still `identity` and there is room for one more pin.
FW_DEVICE bool try_pin(uint64_t* word, uint64_t identity) {
  return update(
             word,
             [=](uint64_t w) {
               return tag::identity_of(w) == identity && (w & tag::kPinMask) != tag::kPinMask;
             },
             [](uint64_t w) { return w + tag::kPinOne; }) != 0;
}

// Removes a pin; `dirty` says that its holder stored to the frame. Release: the stores come first.
FW_DEVICE void unpin(uint64_t* word, bool dirty) {
  update(
      word, [](uint64_t) { return true; },
      [=](uint64_t w) { return (w - tag::kPinOne) | (dirty ? tag::kDirty : 0); });
}

// Begins a write-back: dirty becomes writing, so that later stores make the line dirty again.
FW_DEVICE bool begin_write(uint64_t* word, uint64_t line) {
  return update(
             word,
             [=](uint64_t w) {
               return tag::holds(w, line) && (w & tag::kDirty) != 0 && (w & tag::kWriting) == 0;
             },
             [](uint64_t w) { return (w & ~tag::kDirty) | tag::kWriting; }) != 0;
}

// Ends a write-back. If it failed, the line becomes dirty again: no store is lost.
FW_DEVICE void end_write(uint64_t* word, bool succeeded) {
  update(
      word, [](uint64_t) { return true; },
      [=](uint64_t w) { return (w & ~tag::kWriting) | (succeeded ? 0 : tag::kDirty); });
}

}  // namespace fw::cache
