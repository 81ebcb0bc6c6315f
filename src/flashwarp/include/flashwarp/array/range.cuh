// Loops over elements in order: `range` for one thread, `warp::each` for the lanes of a warp, and
// `each` for all threads of a launch. They load elements in bundles and prefetch the lines ahead.
//
// A bundle is handed out after a second look at the tags has validated all of it, as one load is.
// Its elements were loaded together, when the loop came to the first of them: the loop sees the
// stores that finished before that, and may miss those that come later. None of the loops holds a
// pin.
#pragma once

#include "flashwarp/array/cursor.cuh"

namespace fw {

// Lines that a range prefetches ahead of the one that it reads. Eight lines of 4 KiB are 8192
// words, and visiting these takes longer than a disk's 100 us.
inline constexpr uint32_t kRangeLinesAhead = 8;

// The elements begin, begin + stride, .. below `end`, in order, for a range-based `for`. Lanes of a
// warp that read side by side begin at their lane and pass the warp's width as `stride`. To
// prefetch a line that another lane has prefetched costs one look at its tag.
template <typename T>
class range {
 public:
  using value_type = typename array<T>::value_type;
  // Elements that are loaded together. A narrow one takes a register of 4 bytes, too. Records are
  // loaded one by one.
  static constexpr uint32_t kBundle =
      array<T>::kWord ? FW_BUNDLE_BYTES / (sizeof(T) < 4 ? 4 : sizeof(T)) : 1;
  struct sentinel {};

  class iterator {
   public:
    FW_DEVICE explicit iterator(range& r) : range_(r) {}
    FW_DEVICE value_type operator*() { return range_.current(); }
    FW_DEVICE iterator& operator++() {
      range_.advance();
      return *this;
    }
    FW_DEVICE bool operator!=(sentinel) const { return range_.left_ != range_.stop_; }
    // The index of the current element.
    FW_DEVICE uint64_t index() const {
      return range_.bundle_ + uint64_t(kBundle - range_.left_) * range_.stride_;
    }

   private:
    range& range_;
  };

  FW_DEVICE range(const array<T>& a, uint64_t begin, uint64_t end, uint64_t stride = 1)
      : array_(a), cursor_(a), begin_(begin), end_(end), stride_(stride), ahead_(begin) {}
  FW_DEVICE iterator begin() {
    ahead_ = begin_;
    bundle_ = begin_ - kBundle * stride_;
    left_ = base_ = 0;
    stop_ = begin_ < end_ ? kNever : 0;
    return iterator(*this);
  }
  FW_DEVICE sentinel end() const { return {}; }

  // Calls visit(index, value) for each element in order.
  template <typename Visit>
  FW_DEVICE void each(Visit&& visit) {
    for (uint64_t i = begin_; i < end_;) {
      if constexpr (array<T>::kWord) {
        value_type values[kBundle];
        const uint32_t count = load_bundle(i, values);
        FW_UNROLL
        for (uint32_t k = 0; k < kBundle; k++) {
          if (k < count) visit(i + k * stride_, values[k]);
        }
        i += kBundle * stride_;
      } else {
        look_ahead(i);
        visit(i, cursor_[i]);
        i += stride_;
      }
    }
  }

 private:
  static constexpr uint32_t kNever = ~uint32_t(0);
  // Lines that a range looks for together.
  static constexpr uint32_t kLooks = 4;
  // Elements that move down together. The iterator's element is always in the bundle's first place,
  // because only places that the compiler knows can be registers. To move the whole bundle for each
  // element would take more steps than all else: the loop would wait for the lanes' arithmetic. So
  // each element moves its group by one place, and each group moves the rest by one group.
  static constexpr uint32_t kGroup = kBundle >= 8 ? 4 : kBundle >= 2 ? 2 : 1;

  // The iterator's element.
  FW_DEVICE value_type current() {
    if (left_ == base_) next_group();
    FW_ASSUME(left_ != base_);  // so that `advance` need not look
    if constexpr (array<T>::kWord) {
      return values_[0];
    } else {
      return cursor_[bundle_];
    }
  }

  FW_DEVICE void advance() {
    if (left_ == base_) next_group();
    left_--;
    if constexpr (array<T>::kWord) {
      FW_UNROLL
      for (uint32_t k = 1; k < kGroup; k++) values_[k - 1] = values_[k];
    }
  }

  // Goes on to the next group of the bundle, or to the next bundle. There is another element.
  FW_DEVICE void next_group() {
    if (left_ == 0) {
      next_bundle();
    } else if constexpr (array<T>::kWord) {
      FW_UNROLL
      for (uint32_t k = kGroup; k < kBundle; k++) values_[k - kGroup] = values_[k];
    }
    base_ = left_ - kGroup;
  }

  FW_DEVICE void next_bundle() {
    bundle_ += kBundle * stride_;
    left_ = kBundle;
    uint32_t count = 1;
    if constexpr (array<T>::kWord) {
      count = load_bundle(bundle_, values_);
    } else {
      look_ahead(bundle_);
    }
    const bool more = count == kBundle && end_ - bundle_ > kBundle * stride_;
    stop_ = more ? kNever : kBundle - count;
  }

  // Loads the elements from `i` on, as many as a bundle has and the range still has. Returns how
  // many these are.
  FW_DEVICE uint32_t load_bundle(uint64_t i, value_type (&values)[kBundle]) {
    look_ahead(i);
    uint32_t count = kBundle;
    if (end_ - i <= (kBundle - 1) * stride_) {
      count = 0;
      FW_UNROLL
      for (uint32_t k = 0; k < kBundle; k++) count += k * stride_ < end_ - i ? 1 : 0;
    }
    cursor_.load_some(i, stride_, count, values);
    return count;
  }

  // Prefetches lines until at least kRangeLinesAhead are ahead of element `i`.
  FW_DEVICE void look_ahead(uint64_t i) {
    // One line a step, or the line of each element where they are further apart.
    const uint64_t line_elements = cache::line_bytes(array_.geometry) / sizeof(T);
    const uint64_t step = stride_ < line_elements ? line_elements : stride_;
    while (ahead_ < end_ && ahead_ < i + kRangeLinesAhead * step) {
      const uint64_t to = ahead_ + kLooks * step;
      const bool held = likely_held(step);
      do {
        if (!held) array_.prefetch(ahead_);
        ahead_ += step;
      } while (ahead_ < end_ && ahead_ != to);
    }
  }

  // Whether the next kLooks lines to prefetch are all in their likely places. The looks are in
  // flight together, so most ranges over resident lines wait once for several. They are relaxed,
  // because no data is loaded for them.
  FW_DEVICE bool likely_held(uint64_t step) const {
    const cache::geometry& g = array_.geometry;
    atomic::pair64 words[kLooks] = {};
    FW_UNROLL
    for (uint32_t k = 0; k < kLooks; k++) {
      const cache::home at = cache::home_of(g, array_.line_of(ahead_ + k * step));
      if (ahead_ + k * step < end_) {
        words[k] = atomic::load_relaxed_pair(&g.tags[at.set * g.ways + at.likely]);
      }
    }
    bool held = true;
    FW_UNROLL
    for (uint32_t k = 0; k < kLooks; k++) {
      const uint64_t line = array_.line_of(ahead_ + k * step);
      held = held && (ahead_ + k * step >= end_ || cache::tag::holds(words[k].first, line) ||
                      cache::tag::holds(words[k].second, line));
    }
    return held;
  }

  array<T> array_;
  cursor<T> cursor_;
  uint64_t begin_, end_, stride_;
  uint64_t ahead_;   // the next element whose line to prefetch
  uint64_t bundle_;  // the first element of the iterator's bundle
  // Places of the bundle from the iterator's element on; those behind its group; and those behind
  // the range's last element, or kNever if that lies in a later bundle.
  uint32_t left_, base_, stop_;
  value_type values_[kBundle];
};

namespace warp {

// Calls visit(index, value) once for each element begin .. end - 1. All lanes of a warp call it,
// each for its own elements, with the same bounds. They read side by side.
template <typename T, typename Visit>
FW_DEVICE void each(const array<T>& a, uint64_t begin, uint64_t end, Visit&& visit) {
  range<T>(a, begin + lane(), end, kWarpWidth).each(visit);
}

}  // namespace warp

// Bytes of an array that a warp of `each` visits before it goes on to its next part.
inline constexpr uint64_t kEachBytes = 16384;

// Calls visit(index, value) once for each element begin .. end - 1. All threads of the launch call
// it with the same bounds, and divide the elements: on a GPU, warps take parts of kEachBytes in
// turn, and their lanes read side by side; on a CPU each thread has one part.
template <typename T, typename Visit>
FW_DEVICE void each(const array<T>& a, uint64_t begin, uint64_t end, Visit&& visit) {
  if constexpr (warp::kWarpWidth == 1) {
    const warp::share mine = warp::share_of(end - begin, 1);
    range<T>(a, begin + mine.begin, begin + mine.end).each(visit);
  } else {
    // Parts begin at multiples of their size, so that bundles lie on as few lines as possible.
    constexpr uint64_t kPart = sizeof(T) < kEachBytes ? kEachBytes / sizeof(T) : 1;
    for (uint64_t part = begin / kPart + warp::index(); part * kPart < end; part += warp::count()) {
      const uint64_t first = part * kPart;
      const uint64_t last = first + kPart;
      warp::each(a, first > begin ? first : begin, last < end ? last : end, visit);
    }
  }
}
// The same for all elements of `a`.
template <typename T, typename Visit>
FW_DEVICE void each(const array<T>& a, Visit&& visit) {
  each(a, 0, a.size(), visit);
}

}  // namespace fw
