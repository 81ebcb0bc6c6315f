// fw::array<T>: an array larger than memory, as a kernel holds it.
//
//   fw::array<float> data;  float x = data[i];  data.store(i, x);  data.prefetch(j);
//
// A view of 32 bytes, passed by value. Any thread may call any method at any time, in divergent
// code too: lanes that are active together share one probe, one fill, one command a line. A load
// that hits costs two tag loads and no atomic. `fw::cursor<T>` keeps the line of the last load, for
// threads that stay on a line. Reads see the last store to the element that finished before them,
// as with global memory; a failed transfer yields T() and is raised by the host after the launch.
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

// The slow half of an element access: a miss, or a line in motion. Returns the status. Not inlined:
// a kernel pays its registers only when it gets here.
template <typename Op>
FW_DEVICE_NOINLINE uint32_t access_slow(cache::page_cache* c, cache::volume* v, uint64_t line,
                                        Op& op) {
  const uint32_t mask = active_on(v);
  cache::tally count;
  const uint32_t status = cache::access<policy>(*c, *v, mask, true, line, false, op, count);
  count.add_to(*v, mask);
  return status;
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

  cache::page_cache* cache;
  fw::cache::volume* volume;
  uint64_t line_begin;  // first line of the array, in the cache's numbering
  uint64_t length;      // elements

  FW_DEVICE uint64_t size() const { return length; }

  // The line of element `i` and its byte offset there.
  FW_DEVICE uint64_t line_of(uint64_t i) const {
    return line_begin + ((i * sizeof(T)) >> cache->line_shift);
  }
  FW_DEVICE uint64_t offset_of(uint64_t i) const {
    return (i * sizeof(T)) & (fw::cache::line_bytes(*cache) - 1);
  }

  // Loads element `i`, which must be below `length`.
  FW_DEVICE T operator[](uint64_t i) const {
    FW_ASSERT(i < length);
    const uint64_t line = line_of(i);
    const fw::cache::place at = fw::cache::probe(*cache, line);
    if (at.found) {
      const char* frame = fw::cache::frame_of(*cache, at.way);
      const word value = atomic::raw<sizeof(T)>::load(frame + offset_of(i));
      // Our load before the second look at the tag.
      atomic::fence();
      if (fw::cache::still_holds(*cache, at.way, at.word)) {
        policy::on_hit(&cache->tags[at.way], at.word);
        return detail::bit_cast<T>(value);
      }
    }
    detail::load_element<sizeof(T)> op = {offset_of(i), {}};
    detail::access_slow(cache, volume, line, op);
    return detail::bit_cast<T>(op.value);
  }

  // Stores element `i`. The line is read first when it is absent, and written back later.
  FW_DEVICE void store(uint64_t i, T value) const {
    FW_ASSERT(i < length);
    detail::store_element<sizeof(T)> op = {offset_of(i), detail::bit_extend<word>(value)};
    detail::access_slow(cache, volume, line_of(i), op);
  }

  // Starts bringing in the line of element `i`; does not wait for it.
  FW_DEVICE void prefetch(uint64_t i) const {
    FW_ASSERT(i < length);
    const uint32_t mask = detail::active_on(volume);
    fw::cache::tally count;
    fw::cache::prefetch<policy>(*cache, *volume, mask, true, line_of(i), count);
    count.add_to(*volume, mask);
  }
};
static_assert(sizeof(array<float>) == 32);

// Loads from an array, remembering the line of the last one: a load on the same line costs one tag
// load. Holds no pin, so it may be kept as long as one likes. One per thread.
template <typename T>
class cursor {
 public:
  FW_DEVICE explicit cursor(const array<T>& a) : array_(a) {}

  FW_DEVICE T operator[](uint64_t i) {
    using word = typename atomic::raw<sizeof(T)>::type;
    const uint64_t line = array_.line_of(i);
    if (line != line_) {
      const cache::place at = cache::probe(*array_.cache, line);
      if (!at.found) return array_[i];
      policy::on_hit(&array_.cache->tags[at.way], at.word);
      line_ = line;
      word_ = at.word;
      tag_ = &array_.cache->tags[at.way];
      frame_ = cache::frame_of(*array_.cache, at.way);
    }
    const word value = atomic::raw<sizeof(T)>::load(frame_ + array_.offset_of(i));
    // Our load before the second look at the tag: unchanged since the probe, so the frame was too.
    atomic::fence();
    if (cache::tag::identity_of(atomic::load_relaxed(tag_)) == cache::tag::identity_of(word_)) {
      return detail::bit_cast<T>(value);
    }
    line_ = ~uint64_t(0);
    return array_[i];
  }

 private:
  array<T> array_;
  uint64_t line_ = ~uint64_t(0);
  uint64_t word_ = 0;
  const uint64_t* tag_ = nullptr;
  const char* frame_ = nullptr;
};

}  // namespace fw
