// fw::array<T>: an array larger than memory, as a kernel holds it.
//
// A view of 72 bytes, passed by value. As part of a kernel's `__grid_constant__` parameters it is
// in constant memory. Any thread may call any method at any time, in divergent code too: lanes that
// are active together share one probe, one fill and one command for each line. A load that hits
// looks at the tag, loads the element and looks at the tag again, without atomics or fences.
//
// As in global memory, a load sees the last store to its element that finished before it. If a
// transfer fails, the load returns T(), and the host raises the error after the launch. An index
// out of bounds loads T() and stores nothing, and the host raises that too; with FW_DEBUG defined,
// the kernel traps.
#pragma once

#include "flashwarp/array/element.cuh"
#include "flashwarp/array/pieces.cuh"

namespace fw {

template <typename T, uint32_t kRank = 1>
struct array;

class token;

namespace detail {

// The widest access for which every element of this size is aligned.
FW_HOST_DEVICE constexpr uint32_t access_bytes(uint64_t size) {
  const uint64_t lowest = size & (~size + 1);
  return lowest < 16 ? uint32_t(lowest) : 16;
}

// The bytes of `from`, cut or filled up with zeros.
template <typename To, typename From>
FW_DEVICE To bit_cast(const From& from) {
  union {
    To to;
    From from;
  } both;
  if constexpr (sizeof(From) < sizeof(To)) both.to = To();
  both.from = from;
  return both.to;
}

}  // namespace detail

template <typename T>
struct array<T, 1> {
  using value_type = typename base::without_const<T>::type;
  static constexpr bool kReadOnly = base::without_const<T>::kConst;
  // Whether an element is one access of the machine. Such elements never straddle lines.
  static constexpr bool kWord = sizeof(T) <= 16 && (sizeof(T) & (sizeof(T) - 1)) == 0;
  static constexpr uint32_t kAccessBytes = detail::access_bytes(sizeof(T));
  using word = typename atomic::raw<kAccessBytes>::type;
  static_assert(__is_trivially_copyable(T), "elements are moved as bytes");

  fw::cache::geometry geometry;  // the cache's
  cache::line_cache* cache;
  fw::cache::volume* volume;
  uint64_t line_begin;  // first line of the array, in the cache's numbering
  uint64_t length;      // elements

  FW_DEVICE uint64_t size() const { return length; }
  // A kernel that only reads takes fw::array<const T>.
  FW_DEVICE operator array<const value_type>() const
    requires(!kReadOnly)
  {
    return {geometry, cache, volume, line_begin, length};
  }

  // The line of element `i`, and the element's byte offset in it.
  FW_DEVICE uint64_t line_of(uint64_t i) const {
    return line_begin + ((i * sizeof(T)) >> geometry.line_shift);
  }
  FW_DEVICE uint64_t offset_of(uint64_t i) const { return uint32_t(i * sizeof(T)) & line_mask(); }
  // The bytes of the line that follow the element's first byte.
  FW_DEVICE uint64_t rest_of(uint64_t i) const { return ~uint32_t(i * sizeof(T)) & line_mask(); }

  // Loads element `i`.
  FW_DEVICE value_type operator[](uint64_t i) const {
    if (i >= length) return refuse(i);
    if constexpr (kWord) {
      return load_word(i);
    } else {
      return load_record(i);
    }
  }
  FW_DEVICE value_type load(uint64_t i) const { return (*this)[i]; }

  // The slow path of operator[]. The index of a word may be out of bounds (a cursor does not look);
  // other elements must exist. `looked` says that the caller has not found the line in the cache.
  FW_DEVICE value_type load_slow(uint64_t i, bool looked = false) const {
    if constexpr (kWord) {
      return detail::bit_cast<value_type>(base::opaque(&detail::load_slow<kAccessBytes>)(
          cache, volume, line_begin, length, i, looked));
    } else {
      value_type value;
      const detail::span own = span_of(i, 1, &value);
      const uint32_t status = base::opaque(&detail::move_own<false>)(cache, volume, own);
      return status == nvme::kSuccess ? value : value_type();
    }
  }

  // Stores element `i`. An absent line is read first. The line is written back later.
  FW_DEVICE void store(uint64_t i, value_type value) const {
    static_assert(!kReadOnly, "fw::array<const T> is read-only: take an fw::array<T>");
    if (i >= length) {
      refuse(i);
      return;
    }
    if constexpr (kWord) {
      using element = detail::store_element<sizeof(T)>;
      element op = {offset_of(i), detail::bit_cast<word>(value)};
      base::opaque (&detail::access_slow<element>)(cache, volume, line_of(i), op, false);
    } else {
      const detail::span own = span_of(i, 1, &value);
      base::opaque (&detail::move_own<true>)(cache, volume, own);
    }
  }

  // Adds to element `i` atomically. Returns the old value. For 32-bit and 64-bit integers, float
  // and double. Not ordered against accesses to other elements.
  FW_DEVICE value_type atomic_add(uint64_t i, value_type value) const {
    static_assert(!kReadOnly, "fw::array<const T> is read-only: take an fw::array<T>");
    if (i >= length) return refuse(i);
    using element = detail::add_to_element<value_type>;
    element op = {offset_of(i), value};
    const uint32_t status =
        base::opaque(&detail::access_slow<element>)(cache, volume, line_of(i), op, false);
    return status == nvme::kSuccess ? op.value : value_type();
  }

  // Starts the fill of element `i`'s line and does not wait for it. Past the end it does nothing.
  FW_DEVICE void prefetch(uint64_t i) const {
    const lanes here = warp::active();
    const uint64_t line = line_of(i);
    const bool absent = i < length && !fw::cache::probe(geometry, line).found;
    detail::call_for(here, absent,
                     [&] { base::opaque (&detail::prefetch_slow)(cache, volume, line); });
  }
  // Asynchronous calls on the elements i .. i + n - 1: see async.cuh.
  FW_DEVICE token prefetch(uint64_t i, uint64_t n) const;
  FW_DEVICE token read_async(uint64_t i, uint64_t n, value_type* to) const;
  FW_DEVICE token write_async(uint64_t i, uint64_t n, const value_type* from) const;
  FW_DEVICE token write_back(uint64_t i, uint64_t n) const;

  // The bytes of the elements i .. i + n - 1, and a buffer for them.
  FW_DEVICE detail::span span_of(uint64_t i, uint64_t n, const void* buffer) const {
    return {i * sizeof(T), (i + n) * sizeof(T), reinterpret_cast<uint64_t>(buffer)};
  }
  // Whether the elements i .. i + n - 1 exist. Records the first that does not.
  FW_DEVICE bool holds(uint64_t i, uint64_t n) const {
    if (i <= length && n <= length - i) return true;
    refuse(i < length ? length : i);
    return false;
  }
  // Records an index out of bounds.
  FW_DEVICE value_type refuse(uint64_t i) const {
    base::opaque (&detail::refuse_index)(volume, i);
    return value_type();
  }

 private:
  // Fits 32 bits: a line has at most 2 MiB.
  FW_DEVICE uint32_t line_mask() const { return (1u << geometry.line_shift) - 1; }

  FW_DEVICE value_type load_word(uint64_t i) const {
    const lanes here = warp::active();
    const uint64_t line = line_of(i);
    const fw::cache::place at = fw::cache::probe(geometry, line);
    word value = {};
    bool hit = false;
    if (at.found) {
      const char* frame = fw::cache::frame_of(geometry, at.way);
      // Acquire: the load comes before the second look at the tag. The L2 cache evicts elements
      // first, because every load looks at a tag twice.
      value = atomic::raw<kAccessBytes>::load_acquire_stream(frame + offset_of(i));
      hit = fw::cache::still_holds(geometry, at.way, at.word);
      if (hit) policy::on_hit(geometry, at.way, at.word);
    }
    value_type result = detail::bit_cast<value_type>(value);
    detail::call_for(here, !hit, [&] { result = load_slow(i, true); });
    return result;
  }

  // Loads a record of one line by the widest words for which it is aligned.
  FW_DEVICE value_type load_record(uint64_t i) const {
    constexpr uint32_t kWords = sizeof(T) / kAccessBytes;
    const lanes here = warp::active();
    const uint64_t offset = offset_of(i);
    union record {
      FW_DEVICE record() {}
      word words[kWords];
      value_type value;
    } both;
    bool hit = false;
    if (offset + sizeof(T) <= fw::cache::line_bytes(geometry)) {
      const fw::cache::place at = fw::cache::probe(geometry, line_of(i));
      if (at.found) {
        const char* from = fw::cache::frame_of(geometry, at.way) + offset;
        FW_UNROLL
        for (uint32_t k = 0; k < kWords; k++) {
          both.words[k] = atomic::raw<kAccessBytes>::load(from + k * kAccessBytes);
        }
        // The loads come before the second look at the tag.
        atomic::fence_acquire();
        hit = fw::cache::still_holds(geometry, at.way, at.word);
        if (hit) policy::on_hit(geometry, at.way, at.word);
      }
    }
    detail::call_for(here, !hit, [&] { both.value = load_slow(i); });
    return both.value;
  }
};
static_assert(sizeof(array<float>) == 72);

// An array of several axes, of which the last is contiguous. It is also a flat array<T>.
template <typename T, uint32_t kRank>
struct array : array<T, 1> {
  static_assert(kRank >= 2);
  using flat = array<T, 1>;
  using value_type = typename flat::value_type;

  uint64_t extents[kRank];

  // The length of an axis.
  FW_DEVICE uint64_t extent(uint32_t axis) const { return extents[axis]; }

  // The flat index of an element, or `length` if an index is out of its axis' bounds.
  template <typename... Index>
  FW_DEVICE uint64_t index(Index... indices) const {
    static_assert(sizeof...(Index) == kRank, "one index for each axis");
    const uint64_t each[] = {uint64_t(indices)...};
    uint64_t i = 0;
    bool inside = true;
    FW_UNROLL
    for (uint32_t axis = 0; axis < kRank; axis++) {
      inside = inside && each[axis] < extents[axis];
      i = i * extents[axis] + each[axis];
    }
    return inside ? i : this->length;
  }

  // Loads an element.
  template <typename... Index>
  FW_DEVICE value_type operator()(Index... indices) const {
    return (*this)[index(indices...)];
  }
  // Stores an element. The value comes first, because the number of indices varies.
  template <typename... Index>
  FW_DEVICE void store_at(value_type value, Index... indices) const {
    flat::store(index(indices...), value);
  }
};
static_assert(sizeof(array<float, 2>) == 88);

}  // namespace fw
