// Loads in line order: `cursor` remembers the line of its last load. It holds no pin, so a thread
// may keep it as long as it likes. It belongs to one thread.
//
// What a cursor hands out, a second look at the tag has validated: between the first look and the
// loads no warp filled the frame anew.
#pragma once

#include "flashwarp/array/view.cuh"

namespace fw {

template <typename T>
class range;

// Remembers the line of its last load: another load from that line looks at its tag once.
template <typename T>
class cursor {
 public:
  using value_type = typename array<T>::value_type;

  FW_DEVICE explicit cursor(const array<T>& a) : array_(a) {}

  // Loads element `i`.
  FW_DEVICE value_type operator[](uint64_t i) {
    if constexpr (array<T>::kWord) {
      const lanes here = warp::active();
      word value = {};
      bool hit = false;
      if (holds(i) || find(i)) {
        // Acquire: the load comes before the second look at the tag.
        value = atomic::raw<kAccessBytes>::load_acquire(address_of(i));
        hit = still_held();
      }
      value_type result = detail::bit_cast<value_type>(value);
      detail::call_for(here, !hit, [&] {
        forget();
        result = array_.load_slow(i, true);
      });
      return result;
    } else {
      // A record has several words, so its two looks cost little.
      return array_[i];
    }
  }

  // Loads the elements i, i + stride, .. into `values`. All loads are in flight together, and
  // elements of one line share one look at its tag before and one after, so this reads at the speed
  // of plain loads. Lanes of a warp that read side by side pass the warp's width as `stride`; then
  // the elements may lie on several lines.
  template <uint32_t kCount>
  FW_DEVICE void load(uint64_t i, uint64_t stride, value_type (&values)[kCount]) {
    load_some(i, stride, kCount, values);
  }

 private:
  friend class range<T>;

  static constexpr uint32_t kAccessBytes = array<T>::kAccessBytes;
  static constexpr uint64_t kNoRow = uint64_t(1) << 63;  // further than any line
  using word = typename array<T>::word;

  // As `load`, for the first `count` elements; there is at least one. The other values have no
  // meaning.
  template <uint32_t kCount>
  FW_DEVICE void load_some(uint64_t i, uint64_t stride, uint32_t count,
                           value_type (&values)[kCount]) {
    static_assert(array<T>::kWord, "several elements at a time are words of 1, 2, 4, 8, 16 bytes");
    const lanes here = warp::active();
    const uint64_t last = i + (count - 1) * stride;
    detail::several<kAccessBytes, kCount> loaded = {};
    bool hit = false;
    // No index between the first and the last wraps around.
    constexpr uint64_t kStrideMax = (~uint64_t(0) >> 1) / kCount;
    if (stride + kStrideMax <= 2 * kStrideMax) {
      const bool exist = i < array_.length && last < array_.length;
      const bool one_line = (last - i) * sizeof(T) <= array_.rest_of(i);
      if ((holds(i) && holds(last)) || (exist && one_line && find(i))) {
        hit = load_line(i, stride, count, loaded.words);
      } else if (exist && !one_line) {
        hit = load_lines(i, last, stride, count, loaded.words);
      }
    }
    detail::call_for(here, !hit, [&] {
      forget();
      loaded = base::opaque(&detail::load_several_slow<kAccessBytes, kCount>)(
          array_.cache, array_.volume, array_.line_begin, array_.length, i, stride, count);
    });
    FW_UNROLL
    for (uint32_t k = 0; k < kCount; k++) {
      values[k] = detail::bit_cast<value_type>(loaded.words[k]);
    }
  }

  // Whether element `i` exists and lies on the held line.
  FW_DEVICE bool holds(uint64_t i) const {
    return i < array_.length && cache::tag::holds(word_, array_.line_of(i));
  }

  // Holds the line of element `i`. Returns false if it is not readable now, or does not exist.
  FW_DEVICE bool find(uint64_t i) {
    forget();
    if (i >= array_.length) return false;
    const cache::geometry& g = array_.geometry;
    const cache::place at = cache::probe(g, array_.line_of(i));
    if (!at.found) return false;
    policy::on_hit(g, at.way, at.word);
    way_ = uint32_t(at.way);
    word_ = at.word;
    return true;
  }

  // Holds nothing any more. Called before slow paths, which need the registers.
  FW_DEVICE void forget() {
    way_ = 0;
    word_ = 0;
    row_ = kNoRow;
  }

  // Of an element of the held line.
  FW_DEVICE const char* address_of(uint64_t i) const {
    return cache::frame_of(array_.geometry, way_) + array_.offset_of(i);
  }

  // The second look at the tag: if it is unchanged since the probe, so is the frame's line.
  FW_DEVICE bool still_held() const { return cache::still_holds(array_.geometry, way_, word_); }

  // Loads elements of the held line. Returns false if the line was not readable all the time.
  template <uint32_t kCount>
  FW_DEVICE bool load_line(uint64_t i, uint64_t stride, uint32_t count, word (&words)[kCount]) {
    const char* from = address_of(i);
    // A look at `count` for each load would cost more than the loads.
    if (count == kCount) {
      FW_UNROLL
      for (uint32_t k = 0; k < kCount; k++) {
        words[k] = atomic::raw<kAccessBytes>::load(from + k * stride * sizeof(T));
      }
    } else {
      FW_UNROLL
      for (uint32_t k = 0; k < kCount; k++) {
        if (k < count) words[k] = atomic::raw<kAccessBytes>::load(from + k * stride * sizeof(T));
      }
    }
    // The loads come before the second look. Acquire loads would wait for each other.
    atomic::fence_acquire();
    return still_held();
  }

  // Loads elements of several lines.
  template <uint32_t kCount>
  FW_DEVICE bool load_lines(uint64_t i, uint64_t last, uint64_t stride, uint32_t count,
                            word (&words)[kCount]) {
    if constexpr (warp::kWarpWidth > 1) {
      if (warp::active() == lanes::all()) {
        const row_part used = find_row(i, last);
        if (used.shared) return load_row(i, stride, count, used, words);
      }
    }
    return load_in_turn(i, stride, count, words);
  }

  // A row is as many lines in a row as a warp has lanes. Each lane holds one of them, for all
  // lanes. So one wait finds all lines of a row, one loads elements of several of them, and one
  // sees that they are unchanged.

  // The lines of the row that the warp wants now, and whether the row has them all.
  struct row_part {
    uint32_t begin, end;  // `end` is the last
    bool shared;
  };

  // Finds the lines between those of the elements `i` and `to` of each lane. All lanes of the
  // warp call. Lanes must read in order, from one array.
  FW_DEVICE row_part find_row(uint64_t i, uint64_t to) {
    const lanes all = lanes::all();
    const uint64_t low = array_.line_of(i);
    const uint64_t high = array_.line_of(to);
    bool held = false;
    const auto look = [&] {
      const uint64_t first = low - row_, last = high - row_;
      row_part part;
      part.begin = all.broadcast(uint32_t(first), 0);
      part.end = all.broadcast(uint32_t(last), warp::kWarpWidth - 1);
      const bool fits =
          part.begin <= first && first <= last && last <= part.end && part.end < warp::kWarpWidth;
      const bool wanted = warp::lane() >= part.begin && warp::lane() <= part.end;
      held = all.ballot(fits && (!wanted || word_ != 0)) == all;
      part.shared = held || all.ballot(fits) == all;
      return part;
    };
    row_part part = look();
    if (held) return part;
    forget();
    const uint64_t of = reinterpret_cast<uint64_t>(array_.volume);
    const uint64_t first = all.broadcast(low, 0);
    if (all.broadcast(of, 0) == of) row_ = first;
    const uint64_t own = row_ + warp::lane();
    if (own <= array_.line_of(array_.length - 1)) {
      const cache::place at = cache::probe(array_.geometry, own);
      if (at.found) {
        way_ = uint32_t(at.way);
        word_ = at.word;
      }
    }
    // Each lane has acquired the fill of its own line, and loads from all of them.
    all.sync();
    part = look();
    return part;
  }

  // Loads elements of the row. All lanes of the warp call. Returns false if a line was not readable
  // all the time.
  template <uint32_t kCount>
  FW_DEVICE bool load_row(uint64_t i, uint64_t stride, uint32_t count, const row_part& used,
                          word (&words)[kCount]) {
    const cache::geometry& g = array_.geometry;
    const lanes all = lanes::all();
    // Offsets from the row's first byte. They fit 32 bits: a line has at most 2 MiB.
    const uint32_t begin =
        (uint32_t(array_.line_of(i) - row_) << g.line_shift) + uint32_t(array_.offset_of(i));
    FW_UNROLL
    for (uint32_t k = 0; k < kCount; k++) {
      const uint32_t offset = begin + k * uint32_t(stride * sizeof(T));
      const uint32_t owner = (offset >> g.line_shift) & (warp::kWarpWidth - 1);
      const uint32_t way = all.take(way_, owner);
      const char* from = cache::frame_of(g, way) + (offset & uint32_t(cache::line_bytes(g) - 1));
      if (k < count) words[k] = atomic::raw<kAccessBytes>::load(from);
    }
    // The loads, by all lanes, come before the second looks.
    atomic::fence_acquire();
    all.sync();
    bool same = true;
    if (warp::lane() >= used.begin && warp::lane() <= used.end) {
      same = word_ != 0 && still_held();
      if (same) policy::on_hit(g, way_, word_);
    }
    return all.ballot(same) == all;
  }

  // Loads elements of lines in turn: those of one line together, then the second look at its tag,
  // then those of the next line.
  template <uint32_t kCount>
  FW_DEVICE bool load_in_turn(uint64_t i, uint64_t stride, uint32_t count, word (&words)[kCount]) {
    const uint64_t step = stride * sizeof(T);
    // Each turn loads at least one element.
    for (uint32_t next = 0; next < count;) {
      const uint32_t begin = next;
      const uint64_t first = i + begin * stride;
      if (!holds(first) && !find(first)) return false;
      const uint64_t rest = array_.rest_of(first);
      // The address that element 0 would have on this line, so that all offsets are constant.
      // Opaque, or the compiler computes an address for each load.
      const uint64_t back = begin * step;
      const char* from = base::opaque(address_of(first) - back);
      FW_UNROLL
      for (uint32_t k = 0; k < kCount; k++) {
        if (k < begin || k >= count || k * step - back > rest) continue;
        words[k] = atomic::raw<kAccessBytes>::load(from + k * step);
        next = k + 1;
      }
      // The loads come before the second look, as above.
      atomic::fence_acquire();
      if (!still_held()) return false;
    }
    return true;
  }

  array<T> array_;
  // The held line: its tag word, which has its number, and its way. The rest follows from constants
  // of the array, so that a cursor costs three registers, and two more where it loads several.
  uint64_t word_ = 0;  // 0: nothing is held (no readable line has this word)
  uint32_t way_ = 0;
  // The first line of the row, of which the lane then holds one.
  uint64_t row_ = kNoRow;
};

}  // namespace fw
