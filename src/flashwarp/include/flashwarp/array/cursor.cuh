// Loads from an array that stay on a line: `cursor` remembers the line of the last load, `range`
// goes through elements in order with the lines ahead on their way. Neither holds a pin, so both
// may be kept as long as one likes. One per thread.
#pragma once

#include "flashwarp/array/view.cuh"

namespace fw {

// A reference to the line of the last load: a load on the same line costs one tag load.
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
        // Acquire: our load before the second look at the tag.
        value = atomic::raw<kAccessBytes>::load_acquire(frame() + array_.offset_of(i));
        hit = still_held();
      }
      value_type result = detail::bit_cast<value_type>(value);
      detail::call_for(here, !hit, [&] {
        forget();
        result = array_.load_slow(i);
      });
      return result;
    } else {
      // A record takes its own two looks: they are few beside its words.
      return array_[i];
    }
  }

  // Loads the elements i, i + stride, .. of `values`. They travel together, and those that share a
  // line share one look at its tag before and one after: the way to read at the speed of plain
  // loads. Lanes of a warp that read side by side pass the warp's width as `stride`.
  template <uint32_t kCount>
  FW_DEVICE void load(uint64_t i, uint64_t stride, value_type (&values)[kCount]) {
    static_assert(array<T>::kWord, "several elements at a time are words of 1, 2, 4, 8, 16 bytes");
    const uint32_t here = warp::active();
    const uint64_t span = (kCount - 1) * stride;
    detail::several<kAccessBytes, kCount> loaded;
    bool hit = false;
    // The first and the last exist, and what lies between them does not go round all numbers.
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

  // Finds `line`, unless it is the one that we found last. False when it is not readable now.
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

  // Holds nothing. Before all that takes long or needs registers, so that ours are free meanwhile.
  FW_DEVICE void forget() {
    word_ = 0;
    way_ = 0;
  }

  FW_DEVICE const char* frame() const { return cache::frame_of(array_.geometry, way_); }

  // The second look at the tag: unchanged since the probe, so the frame was too.
  FW_DEVICE bool still_held() const { return cache::still_holds(array_.geometry, way_, word_); }

  // Loads elements that all lie on one line. False when it is not readable, or was lost meanwhile.
  template <uint32_t kCount>
  FW_DEVICE bool load_line(uint64_t i, uint64_t stride, word (&words)[kCount]) {
    if (!hold(array_.line_of(i))) return false;
    const char* from = frame() + array_.offset_of(i);
    FW_UNROLL
    for (uint32_t k = 0; k < kCount; k++) {
      words[k] = atomic::raw<kAccessBytes>::load(from + k * stride * sizeof(T));
    }
    // One fence for all in place of an acquire load each: our loads before the second look.
    atomic::fence();
    return still_held();
  }

  // The same for elements on several lines: those of a line together, with a second look at it
  // before the next is held.
  template <uint32_t kCount>
  FW_DEVICE bool load_lines(uint64_t i, uint64_t stride, word (&words)[kCount]) {
    const uint64_t step = stride * sizeof(T);
    // Each turn loads one at least.
    for (uint32_t next = 0; next < kCount;) {
      const uint32_t begin = next;
      const uint64_t first = i + begin * stride;
      if (!hold(array_.line_of(first))) return false;
      const uint64_t rest = array_.rest_of(first);
      // Where the first of all would be if it were on this line too: what is added to it is
      // constant. Opaque, or each load would make an address of its own.
      const uint64_t back = begin * step;
      const char* from = base::opaque(frame() + array_.offset_of(first) - back);
      FW_UNROLL
      for (uint32_t k = 0; k < kCount; k++) {
        if (k < begin || k * step - back > rest) continue;
        words[k] = atomic::raw<kAccessBytes>::load(from + k * step);
        next = k + 1;
      }
      // Our loads before the second look, here as above.
      atomic::fence();
      if (!still_held()) return false;
    }
    return true;
  }

  array<T> array_;
  // The tag word of the line that we found last, which says what line it is, and where. Three
  // registers, for all that a kernel needs of them: the rest is made of constants.
  uint64_t word_ = 0;  // 0, which is no readable line's: nothing is held
  uint32_t way_ = 0;
};

// Lines that a range keeps on their way ahead of the one that it reads: eight 4 KiB lines hide a
// disk's 100 us behind 8192 words.
inline constexpr uint32_t kRangeLinesAhead = 8;
// Elements that `range::each` loads together.
inline constexpr uint32_t kRangeBatch = 8;

// The elements begin, begin + stride, .. below `end`, in order, for a range-based `for`. The lanes
// of a warp that read side by side begin at their lane and pass the warp's width as `stride`; a
// prefetch of a line on its way is a look at its tag.
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
    // The index of the element that it stands on.
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

  // Calls visit(index, value) for each element in order: kRangeBatch of them travel together, which
  // a `for` that stops anywhere cannot ask for. Several times as fast where lines are resident.
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

  // One more line for each that we leave behind; at first, all of them.
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
  uint64_t ahead_;  // the next element whose line to ask for
};

}  // namespace fw
