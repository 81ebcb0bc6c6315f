// The shortcuts of a hit: a piece of one resident line, for all lanes of a full warp.
//
// Whatever is not the common case is left to `access`: a piece that is not aligned, an absent line,
// a lost race. `copy_resident` holds a short piece in registers between the two looks at the tag,
// so that the fence between these waits for no store. `copy_in_line` takes a piece of any length,
// and few registers: a function that is called saves those that it needs, in memory.
#pragma once

#include "flashwarp/cache/read_around.cuh"

namespace fw::cache {

// The words of a piece that a lane holds at a time.
inline constexpr uint32_t kWordsHeld = 8;

inline constexpr uint32_t kWordHeldBytes = 16;

// Whether a piece is one that `copy_in_line` copies.
FW_DEVICE bool is_aligned(const piece& what) {
  return what.bytes != 0 && (what.offset | what.buffer | what.bytes) % kWordHeldBytes == 0;
}

// Whether a piece is one that `copy_resident` copies.
FW_DEVICE bool is_held(const piece& what) {
  return is_aligned(what) && what.bytes <= kWordHeldBytes * warp::kWarpWidth * kWordsHeld;
}

// Copies a piece that `is_aligned`, if its line is resident. Returns false as `copy_resident` does.
template <typename Policy>
FW_DEVICE bool copy_in_line(const geometry& g, const piece& what) {
  const place at = probe(g, what.line);
  if (lanes::all().any(!at.found)) return false;
  warp::copy_words<kWordHeldBytes, warp::source::kFrame>(
      lanes::all(), reinterpret_cast<char*>(what.buffer), frame_of(g, at.way) + what.offset,
      what.bytes);
  // The loads of the frame come before the second look at the tag.
  atomic::fence_acquire();
  if (lanes::all().any(!still_holds(g, at.way, at.word))) return false;
  if (warp::lane() == 0) Policy::on_hit(g, at.way, at.word);
  return true;
}

// Copies a piece that `is_held`, if its line is resident. Returns false if the caller must move it,
// which then overwrites what this has stored. `epoch` is the volume's (see lease.cuh), or 0. It is
// looked at last, so that no load waits for it.
template <typename Policy>
FW_DEVICE bool copy_resident(const geometry& g, const piece& what, uint32_t epoch) {
  using word = atomic::raw<kWordHeldBytes>;
  constexpr uint32_t kStep = kWordHeldBytes * warp::kWarpWidth;
  const place at = probe(g, what.line);
  if (lanes::all().any(!at.found)) return false;
  const uint32_t mine = warp::lane() * kWordHeldBytes;
  const uint32_t bytes = uint32_t(what.bytes);
  const char* from = frame_of(g, at.way) + what.offset + mine;
  char* to = reinterpret_cast<char*>(what.buffer) + mine;
  atomic::word16 values[kWordsHeld];
  FW_UNROLL
  for (uint32_t k = 0; k < kWordsHeld; k++) {
    if (mine + k * kStep < bytes) values[k] = word::load(from + k * kStep);
  }
  // The loads of the frame come before the second look at the tag, and the fence before the stores:
  // behind them it would wait for them.
  atomic::fence_acquire();
  const bool holds = still_holds(g, at.way, at.word);
  FW_UNROLL
  for (uint32_t k = 0; k < kWordsHeld; k++) {
    if (mine + k * kStep < bytes) word::store_plain(to + k * kStep, values[k]);
  }
  if (lanes::all().any(!holds || epoch != 0)) return false;
  if (warp::lane() == 0) Policy::on_hit(g, at.way, at.word);
  return true;
}

}  // namespace fw::cache
