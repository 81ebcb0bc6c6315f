// fw::array<T>: an array larger than memory, as a kernel holds it.
//
//   fw::array<float> data;  float x = data[i];  data.store(i, x);  data.prefetch(j);
//
// A view of 72 bytes, passed by value: as part of a kernel's `__grid_constant__` parameters it lies
// in constant memory. Any thread may call any method at any time, in divergent code too: lanes that
// are active together share one probe, one fill, one command a line. A load that hits looks at the
// tag, loads the element and looks again; no atomic, no fence. `fw::cursor<T>` keeps the line of
// the last load, for threads that stay on a line, and loads several elements for one second look.
// Reads see the last store to the element that finished before them, as with global memory; a
// failed transfer yields T() and is raised by the host after the launch.
#pragma once

#include "flashwarp/cache/access.cuh"

namespace fw {

using policy = cache::clock_policy;

namespace detail {

// Loads one element of each lane.
template <uint32_t kBytes>
struct load_element {
  static constexpr bool kStores = false;
  uint64_t offset;
  typename atomic::raw<kBytes>::type value;

  FW_DEVICE void visit(uint32_t, uint32_t members, uint64_t frame) {
    if ((members >> warp::lane()) & 1) {
      value = atomic::raw<kBytes>::load(reinterpret_cast<const char*>(frame) + offset);
    }
  }
};

// Stores one element of each lane.
template <uint32_t kBytes>
struct store_element {
  static constexpr bool kStores = true;
  uint64_t offset;
  typename atomic::raw<kBytes>::type value;

  FW_DEVICE void visit(uint32_t, uint32_t members, uint64_t frame) {
    if ((members >> warp::lane()) & 1) {
      atomic::raw<kBytes>::store(reinterpret_cast<char*>(frame) + offset, value);
    }
  }
};

// The lanes that are here together and mean the same array: each array has queues of its own.
FW_DEVICE uint32_t active_on(const cache::volume* v) {
  return warp::match(warp::active(), reinterpret_cast<uint64_t>(v));
}

// The slow half of an element access: a miss, or a line in motion. Returns the status. Like the two
// below it is called through base::opaque: a kernel pays its registers only when it gets here.
template <typename Op>
FW_DEVICE_NOINLINE uint32_t access_slow(cache::page_cache* c, cache::volume* v, uint64_t line,
                                        Op& op) {
  const uint32_t mask = active_on(v);
  cache::tally count;
  const uint32_t status =
      cache::access<policy>(c->shape, *c, *v, mask, true, line, false, op, count);
  count.add_to(*v, mask);
  return status;
}

// The slow half of several loads: the elements at byte offsets `first`, `first + step`, .. of the
// array, one by one, to `values` in the caller's own memory.
template <uint32_t kBytes>
FW_DEVICE_NOINLINE void load_slow(cache::page_cache* c, cache::volume* v, uint64_t line_begin,
                                  uint64_t first, uint64_t step, uint32_t count,
                                  typename atomic::raw<kBytes>::type* values) {
  for (uint32_t k = 0; k < count; k++) {
    const uint64_t byte = first + k * step;
    load_element<kBytes> op = {byte & (cache::line_bytes(c->shape) - 1), {}};
    const uint32_t status = access_slow(c, v, line_begin + (byte >> c->shape.line_shift), op);
    values[k] = op.value;
    // A try that lost its race may have left another line's bytes before the transfer failed.
    if (status != nvme::kSuccess) values[k] = {};
  }
}

FW_DEVICE_NOINLINE void prefetch_slow(cache::page_cache* c, cache::volume* v, uint64_t line) {
  const uint32_t mask = active_on(v);
  cache::tally count;
  cache::prefetch<policy>(*c, *v, mask, true, line, count);
  count.add_to(*v, mask);
}

template <typename To, typename From>
FW_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) <= sizeof(From));
  union {
    From from;
    To to;
  } both;
  both.from = from;
  return both.to;
}
template <typename To, typename From>
FW_DEVICE To bit_extend(const From& from) {
  static_assert(sizeof(From) <= sizeof(To));
  union {
    To to;
    From from;
  } both;
  both.to = To();
  both.from = from;
  return both.to;
}

}  // namespace detail

template <typename T>
struct array {
  static_assert(sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0,
                "elements are 1, 2, 4, 8 or 16 bytes: they never straddle lines");
  using word = typename atomic::raw<sizeof(T)>::type;

  fw::cache::geometry shape;  // the cache's
  cache::page_cache* cache;
  fw::cache::volume* volume;
  uint64_t line_begin;  // first line of the array, in the cache's numbering
  uint64_t length;      // elements

  FW_DEVICE uint64_t size() const { return length; }

  // The line of element `i` and its byte offset there.
  FW_DEVICE uint64_t line_of(uint64_t i) const {
    return line_begin + ((i * sizeof(T)) >> shape.line_shift);
  }
  FW_DEVICE uint64_t offset_of(uint64_t i) const {
    return (i * sizeof(T)) & (fw::cache::line_bytes(shape) - 1);
  }

  // Loads element `i`, which must be below `length`.
  FW_DEVICE T operator[](uint64_t i) const {
    FW_ASSERT(i < length);
    const uint64_t line = line_of(i);
    const fw::cache::place at = fw::cache::probe(shape, line);
    if (at.found) {
      const char* frame = fw::cache::frame_of(shape, at.way);
      // Acquire: our load before the second look at the tag.
      const word value = atomic::raw<sizeof(T)>::load_acquire(frame + offset_of(i));
      if (fw::cache::still_holds(shape, at.way, at.word)) {
        policy::on_hit(&shape.tags[at.way], at.word);
        return detail::bit_cast<T>(value);
      }
    }
    return load_slow(i);
  }

  // As operator[], for a caller who has seen that the element is no plain hit.
  FW_DEVICE T load_slow(uint64_t i) const {
    using element = detail::load_element<sizeof(T)>;
    element op = {offset_of(i), {}};
    const uint32_t status =
        base::opaque(&detail::access_slow<element>)(cache, volume, line_of(i), op);
    // A try that lost its race may have left another line's bytes before the transfer failed.
    return status == nvme::kSuccess ? detail::bit_cast<T>(op.value) : T();
  }

  // Stores element `i`. The line is read first when it is absent, and written back later.
  FW_DEVICE void store(uint64_t i, T value) const {
    FW_ASSERT(i < length);
    using element = detail::store_element<sizeof(T)>;
    element op = {offset_of(i), detail::bit_extend<word>(value)};
    base::opaque (&detail::access_slow<element>)(cache, volume, line_of(i), op);
  }

  // Starts bringing in the line of element `i`; does not wait for it.
  FW_DEVICE void prefetch(uint64_t i) const {
    FW_ASSERT(i < length);
    const uint64_t line = line_of(i);
    if (fw::cache::probe(shape, line).found) return;
    base::opaque (&detail::prefetch_slow)(cache, volume, line);
  }
};
static_assert(sizeof(array<float>) == 72);

// Loads from an array, remembering the line of the last one: a load on the same line costs one tag
// load. Holds no pin, so it may be kept as long as one likes. One per thread.
template <typename T>
class cursor {
 public:
  FW_DEVICE explicit cursor(const array<T>& a) : array_(a) {}

  // Loads element `i`, which must be below the array's length.
  FW_DEVICE T operator[](uint64_t i) {
    FW_ASSERT(i < array_.length);
    if (hold(array_.line_of(i))) {
      // Acquire: our load before the second look at the tag.
      const word value = atomic::raw<sizeof(T)>::load_acquire(frame_ + array_.offset_of(i));
      if (still_held()) return detail::bit_cast<T>(value);
    }
    // Nothing is held across the slow path: less to keep in registers.
    forget();
    return array_.load_slow(i);
  }

  // Loads the elements i, i + stride, .. of `values`, all below the array's length. They travel
  // together, and those that share a line share one look at its tag before and one after: the way
  // to read at the speed of plain loads. Lanes of a warp that read side by side pass the warp's
  // width as `stride`.
  template <uint32_t kCount>
  FW_DEVICE void load(uint64_t i, uint64_t stride, T (&values)[kCount]) {
    word words[kCount];
    const uint64_t line = array_.line_of(i);
    const bool one_line = array_.line_of(i + (kCount - 1) * stride) == line;
    if (!(one_line ? load_line(i, stride, line, words) : load_lines(i, stride, words))) {
      word slow[kCount];
      base::opaque (&detail::load_slow<sizeof(T)>)(array_.cache, array_.volume, array_.line_begin,
                                                   i * sizeof(T), stride * sizeof(T), kCount, slow);
      forget();
      FW_UNROLL
      for (uint32_t k = 0; k < kCount; k++) words[k] = slow[k];
    }
    FW_UNROLL
    for (uint32_t k = 0; k < kCount; k++) values[k] = detail::bit_cast<T>(words[k]);
  }

 private:
  using word = typename atomic::raw<sizeof(T)>::type;

  // Finds `line`, unless it is the one that we found last. False when it is not readable now.
  FW_DEVICE bool hold(uint64_t line) {
    if (line == line_) return true;
    const cache::place at = cache::probe(array_.shape, line);
    if (!at.found) return false;
    policy::on_hit(&array_.shape.tags[at.way], at.word);
    line_ = line;
    word_ = at.word;
    tag_ = &array_.shape.tags[at.way];
    frame_ = cache::frame_of(array_.shape, at.way);
    return true;
  }

  FW_DEVICE void forget() {
    line_ = kNoLine;
    word_ = 0;
    tag_ = nullptr;
    frame_ = nullptr;
  }

  // The second look at the tag: unchanged since the probe, so the frame was too.
  FW_DEVICE bool still_held() const {
    return cache::tag::identity_of(atomic::load_relaxed(tag_)) == cache::tag::identity_of(word_);
  }

  // Loads elements that all lie on `line`. False when it is not readable, or was lost meanwhile.
  template <uint32_t kCount>
  FW_DEVICE bool load_line(uint64_t i, uint64_t stride, uint64_t line, word (&words)[kCount]) {
    if (!hold(line)) return false;
    const char* from = frame_ + array_.offset_of(i);
    FW_UNROLL
    for (uint32_t k = 0; k < kCount; k++) {
      words[k] = atomic::raw<sizeof(T)>::load(from + k * stride * sizeof(T));
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
      if (line != line_) {
        atomic::fence();
        if (k != 0 && !still_held()) return false;
        if (!hold(line)) return false;
      }
      words[k] = atomic::raw<sizeof(T)>::load(frame_ + array_.offset_of(at));
    }
    // Our loads before the second look, here as above.
    atomic::fence();
    return still_held();
  }

  static constexpr uint64_t kNoLine = ~uint64_t(0);

  array<T> array_;
  uint64_t line_ = kNoLine;  // what `word_`, `tag_` and `frame_` are about
  uint64_t word_ = 0;
  const uint64_t* tag_ = nullptr;
  const char* frame_ = nullptr;
};

}  // namespace fw
