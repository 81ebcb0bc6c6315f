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
    if (i >= array_.length) {
      forget();
      return array_.refuse(i);
    }
    if constexpr (array<T>::kWord) {
      const uint32_t here = warp::active();
      word value = {};
      bool hit = hold(array_.line_of(i));
      if (hit) {
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
    const uint64_t last = i + (kCount - 1) * stride;
    if (last >= array_.length || i >= array_.length) {
      FW_UNROLL
      for (uint32_t k = 0; k < kCount; k++) values[k] = value_type();
      array_.refuse(last);
      return;
    }
    const uint32_t here = warp::active();
    word words[kCount];
    const uint64_t line = array_.line_of(i);
    const bool one_line = array_.line_of(last) == line;
    const bool hit = one_line ? load_line(i, stride, line, words) : load_lines(i, stride, words);
    detail::call_for(here, !hit, [&] {
      word slow[kCount];
      base::opaque (&detail::load_several_slow<kAccessBytes>)(array_.cache, array_.volume,
                                                              array_.line_begin, i * sizeof(T),
                                                              stride * sizeof(T), kCount, slow);
      forget();
      FW_UNROLL
      for (uint32_t k = 0; k < kCount; k++) words[k] = slow[k];
    });
    FW_UNROLL
    for (uint32_t k = 0; k < kCount; k++) values[k] = detail::bit_cast<value_type>(words[k]);
  }

 private:
  static constexpr uint32_t kAccessBytes = array<T>::kAccessBytes;
  using word = typename array<T>::word;

  // Finds `line`, unless it is the one that we found last. False when it is not readable now.
  FW_DEVICE bool hold(uint64_t line) {
    if (cache::tag::holds(word_, line)) return true;
    forget();
    const cache::place at = cache::probe(array_.shape, line);
    if (!at.found) return false;
    policy::on_hit(array_.shape, at.way, at.word);
    word_ = at.word;
    way_ = uint32_t(at.way);
    return true;
  }

  // Holds nothing. Before all that takes long or needs registers, so that ours are free meanwhile.
  FW_DEVICE void forget() {
    word_ = 0;
    way_ = 0;
  }

  FW_DEVICE const char* frame() const { return cache::frame_of(array_.shape, way_); }

  // The second look at the tag: unchanged since the probe, so the frame was too.
  FW_DEVICE bool still_held() const { return cache::still_holds(array_.shape, way_, word_); }

  // Loads elements that all lie on `line`. False when it is not readable, or was lost meanwhile.
  template <uint32_t kCount>
  FW_DEVICE bool load_line(uint64_t i, uint64_t stride, uint64_t line, word (&words)[kCount]) {
    if (!hold(line)) return false;
    const char* from = frame() + array_.offset_of(i);
    FW_UNROLL
    for (uint32_t k = 0; k < kCount; k++) {
      words[k] = atomic::raw<kAccessBytes>::load(from + k * stride * sizeof(T));
    }
    // One fence for all in place of an acquire load each: our loads before the second look.
    atomic::fence();
    return still_held();
  }

  // The same for elements on several lines: a second look at each line before the next is held.
  template <uint32_t kCount>
  FW_DEVICE bool load_lines(uint64_t i, uint64_t stride, word (&words)[kCount]) {
    FW_UNROLL
    for (uint32_t k = 0; k < kCount; k++) {
      const uint64_t at = i + k * stride;
      const uint64_t line = array_.line_of(at);
      if (!cache::tag::holds(word_, line)) {
        atomic::fence();
        if (k != 0 && !still_held()) return false;
        if (!hold(line)) return false;
      }
      words[k] = atomic::raw<kAccessBytes>::load(frame() + array_.offset_of(at));
    }
    // Our loads before the second look, here as above.
    atomic::fence();
    return still_held();
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
    line_elements_ = cache::line_bytes(a.shape) / sizeof(T);
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
