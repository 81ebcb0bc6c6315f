// Loads in line order: `cursor` remembers the line of its last load; `range` visits elements in
// order and prefetches the lines ahead. Neither holds a pin, so a thread may keep them as long as
// it likes. Each belongs to one thread.
#pragma once

#include "flashwarp/array/view.cuh"

namespace fw {

// Remembers the line of its last load: another load from that line looks at its tag once.
template <typename T>
class cursor {
 public:
  using value_type = typename array<T>::value_type;

  FW_DEVICE explicit cursor(const array<T>& a) : array_(a) {}

  // Loads element `i`.
  FW_DEVICE value_type operator[](uint64_t i) {
    if constexpr (array<T>::kWord) {
      const uint32_t here = warp::active();
      word value = {};
      bool hit = false;
      if (i < array_.length && hold(array_.line_of(i))) {
        // Acquire: the load comes before the second look at the tag.
        value = atomic::raw<kAccessBytes>::load_acquire(frame() + array_.offset_of(i));
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
  // of plain loads. Lanes of a warp that read side by side pass the warp's width as `stride`.
  template <uint32_t kCount>
  FW_DEVICE void load(uint64_t i, uint64_t stride, value_type (&values)[kCount]) {
    static_assert(array<T>::kWord, "several elements at a time are words of 1, 2, 4, 8, 16 bytes");
    const uint32_t here = warp::active();
    const uint64_t span = (kCount - 1) * stride;
    detail::several<kAccessBytes, kCount> loaded;
    bool hit = false;
    // The first and the last element exist, and no index in between wraps around.
    constexpr uint64_t kStrideMax = (~uint64_t(0) >> 1) / kCount;
    const bool in_order = stride + kStrideMax <= 2 * kStrideMax;
    if (in_order && i < array_.length && i + span < array_.length) {
      const bool one_line = span * sizeof(T) <= array_.rest_of(i);
      hit = one_line ? load_line(i, stride, loaded.words) : load_lines(i, stride, loaded.words);
    }
    detail::call_for(here, !hit, [&] {
      forget();
      loaded = base::opaque(&detail::load_several_slow<kAccessBytes, kCount>)(
          array_.cache, array_.volume, array_.line_begin, array_.length, i, stride);
    });
    FW_UNROLL
    for (uint32_t k = 0; k < kCount; k++) {
      values[k] = detail::bit_cast<value_type>(loaded.words[k]);
    }
  }

 private:
  static constexpr uint32_t kAccessBytes = array<T>::kAccessBytes;
  using word = typename array<T>::word;

  // Holds `line`; probes for it unless it is held already. Returns false if it is not readable now.
  FW_DEVICE bool hold(uint64_t line) {
    if (cache::tag::holds(word_, line)) return true;
    forget();
    const cache::place at = cache::probe(array_.geometry, line);
    if (!at.found) return false;
    policy::on_hit(array_.geometry, at.way, at.word);
    word_ = at.word;
    way_ = uint32_t(at.way);
    return true;
  }

  // Holds nothing any more. Called before slow paths, which need the registers.
  FW_DEVICE void forget() {
    word_ = 0;
    way_ = 0;
  }

  FW_DEVICE const char* frame() const { return cache::frame_of(array_.geometry, way_); }

  // The second look at the tag: if it is unchanged since the probe, so is the frame's line.
  FW_DEVICE bool still_held() const { return cache::still_holds(array_.geometry, way_, word_); }

  // Loads elements of one line. Returns false if the line was not readable all the time.
  template <uint32_t kCount>
  FW_DEVICE bool load_line(uint64_t i, uint64_t stride, word (&words)[kCount]) {
    if (!hold(array_.line_of(i))) return false;
    const char* from = frame() + array_.offset_of(i);
    FW_UNROLL
    for (uint32_t k = 0; k < kCount; k++) {
      words[k] = atomic::raw<kAccessBytes>::load(from + k * stride * sizeof(T));
    }
    // The loads come before the second look. One fence costs less than acquire loads.
    atomic::fence();
    return still_held();
  }

  // Loads elements of several lines: those of one line together, then the second look at its tag,
  // then those of the next line.
  template <uint32_t kCount>
  FW_DEVICE bool load_lines(uint64_t i, uint64_t stride, word (&words)[kCount]) {
    const uint64_t step = stride * sizeof(T);
    // Each turn loads at least one element.
    for (uint32_t next = 0; next < kCount;) {
      const uint32_t begin = next;
      const uint64_t first = i + begin * stride;
      if (!hold(array_.line_of(first))) return false;
      const uint64_t rest = array_.rest_of(first);
      // The address that element 0 would have on this line, so that all offsets are constant.
      // Opaque, or the compiler computes an address for each load.
      const uint64_t back = begin * step;
      const char* from = base::opaque(frame() + array_.offset_of(first) - back);
      FW_UNROLL
      for (uint32_t k = 0; k < kCount; k++) {
        if (k < begin || k * step - back > rest) continue;
        words[k] = atomic::raw<kAccessBytes>::load(from + k * step);
        next = k + 1;
      }
      // The loads come before the second look, as above.
      atomic::fence();
      if (!still_held()) return false;
    }
    return true;
  }

  array<T> array_;
  // The held line: its tag word, which has its number, and its way. The rest follows from constants
  // of the array, so a cursor costs three registers.
  uint64_t word_ = 0;  // 0: nothing is held (no readable line has this word)
  uint32_t way_ = 0;
};

// Lines that a range prefetches ahead of the one that it reads. Eight lines of 4 KiB are 8192
// words, and visiting these takes longer than a disk's 100 us.
inline constexpr uint32_t kRangeLinesAhead = 8;
// Elements that `range::each` loads together.
inline constexpr uint32_t kRangeBatch = 8;

// The elements begin, begin + stride, .. below `end`, in order, for a range-based `for`. Lanes of a
// warp that read side by side begin at their lane and pass the warp's width as `stride`. To
// prefetch a line that another lane has prefetched costs one look at its tag.
template <typename T>
class range {
 public:
  using value_type = typename array<T>::value_type;
  struct sentinel {};

  class iterator {
   public:
    FW_DEVICE explicit iterator(range& r) : range_(r), i_(r.begin_) {}
    FW_DEVICE value_type operator*() { return range_.load(i_); }
    FW_DEVICE iterator& operator++() {
      i_ += range_.stride_;
      return *this;
    }
    FW_DEVICE bool operator!=(sentinel) const { return i_ < range_.end_; }
    // The index of the current element.
    FW_DEVICE uint64_t index() const { return i_; }

   private:
    range& range_;
    uint64_t i_;
  };

  FW_DEVICE range(const array<T>& a, uint64_t begin, uint64_t end, uint64_t stride = 1)
      : array_(a), cursor_(a), begin_(begin), end_(end), stride_(stride) {
    line_elements_ = cache::line_bytes(a.geometry) / sizeof(T);
    if (line_elements_ == 0) line_elements_ = 1;
    ahead_ = begin;
  }
  FW_DEVICE iterator begin() { return iterator(*this); }
  FW_DEVICE sentinel end() const { return {}; }

  // Calls visit(index, value) for each element in order. Loads kRangeBatch elements together, which
  // a `for` that may stop anywhere cannot do: several times as fast if the lines are resident.
  template <typename Visit>
  FW_DEVICE void each(Visit visit) {
    uint64_t i = begin_;
    if constexpr (array<T>::kWord) {
      for (; i + (kRangeBatch - 1) * stride_ < end_; i += kRangeBatch * stride_) {
        look_ahead(i);
        value_type values[kRangeBatch];
        cursor_.load(i, stride_, values);
        FW_UNROLL
        for (uint32_t k = 0; k < kRangeBatch; k++) visit(i + k * stride_, values[k]);
      }
    }
    for (; i < end_; i += stride_) visit(i, load(i));
  }

 private:
  FW_DEVICE value_type load(uint64_t i) {
    look_ahead(i);
    return cursor_[i];
  }

  // Prefetches kRangeLinesAhead lines at first, then one more for each line left behind.
  FW_DEVICE void look_ahead(uint64_t i) {
    while (ahead_ < end_ && ahead_ < i + kRangeLinesAhead * line_elements_) {
      array_.prefetch(ahead_);
      ahead_ += line_elements_;
    }
  }

  array<T> array_;
  cursor<T> cursor_;
  uint64_t begin_, end_, stride_;
  uint64_t line_elements_;
  uint64_t ahead_;  // the next element whose line to prefetch
};

}  // namespace fw
