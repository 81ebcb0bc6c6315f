// fw::array<T>: an array larger than memory, as a kernel holds it.
//
// A view of 72 bytes, passed by value: as part of a kernel's `__grid_constant__` parameters it lies
// in constant memory. Any thread may call any method at any time, in divergent code too: lanes that
// are active together share one probe, one fill, one command a line. A load that hits looks at the
// tag, loads the element and looks again; no atomic, no fence. Reads see the last store to the
// element that finished before them, as with global memory; a failed transfer yields T() and is
// raised by the host after the launch. So is an index out of bounds, which reads T() and stores
// nothing; where FW_DEBUG is defined it traps.
#pragma once

#include "flashwarp/cache/access.cuh"

namespace fw {

using policy = FW_POLICY;

template <typename T, uint32_t kRank = 1>
struct array;

class token;

namespace detail {

template <typename T>
struct without_const {
  using type = T;
  static constexpr bool kConst = false;
};
template <typename T>
struct without_const<const T> {
  using type = T;
  static constexpr bool kConst = true;
};

// The widest access that elements of this size are aligned for, wherever they lie in the array.
FW_HOST_DEVICE constexpr uint32_t access_bytes(uint64_t size) {
  const uint64_t lowest = size & (~size + 1);
  return lowest < 16 ? uint32_t(lowest) : 16;
}

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

// Adds to one element of each lane, and keeps what was there. The line is pinned meanwhile.
template <typename T>
struct add_to_element {
  static constexpr bool kStores = true;
  uint64_t offset;
  T value;

  FW_DEVICE void visit(uint32_t, uint32_t members, uint64_t frame) {
    if ((members >> warp::lane()) & 1) {
      value = atomic::add(reinterpret_cast<T*>(reinterpret_cast<char*>(frame) + offset), value);
    }
  }
};

// The lanes that are here together and mean the same array: each array has queues of its own.
FW_DEVICE uint32_t active_on(const cache::volume* v) {
  return warp::match(warp::active(), reinterpret_cast<uint64_t>(v));
}

// Calls `slow` for those of the lanes `here` that need it; all of them call, and go on together.
// `here` is who was there before any of them looked at the cache: lanes that part at such a call do
// not always meet again where the compiler would have them, because the callee saves the registers
// that say who is waited for. Each would go on alone, and what a kernel computes with what it has
// loaded would take as many times as long.
template <typename Slow>
FW_DEVICE void call_for(uint32_t here, bool needed, Slow slow) {
  if (!warp::any(here, needed)) return;
  if (needed) slow();
  warp::sync(here);
}

// The slow half of an element access: a miss, or a line in motion. Returns the status. Like those
// below it is called through base::opaque: a kernel pays its registers only when it gets here.
template <typename Op>
FW_DEVICE_NOINLINE uint32_t access_slow(cache::line_cache* c, cache::volume* v, uint64_t line,
                                        Op& op) {
  const uint32_t mask = active_on(v);
  cache::tally count;
  const uint32_t status =
      cache::access<policy>(c->geometry, *c, *v, mask, true, line, false, op, count);
  count.add_kernel_to(*v, mask);
  warp::sync(mask);
  return status;
}

// Notes an index out of bounds for the host, which names the array.
FW_DEVICE_NOINLINE void refuse_index(cache::volume* v, uint64_t i) {
  cache::note_failure(v->indices, v->errors->indices, i, 0, 0);
  base::trap_in_debug();
}

// The slow half of a load: of a miss, of a line in motion, of an index out of bounds. The element
// comes back by value: for a place in memory, a kernel would keep an address of its stack in
// registers.
template <uint32_t kBytes>
FW_DEVICE_NOINLINE typename atomic::raw<kBytes>::type load_slow(cache::line_cache* c,
                                                                cache::volume* v,
                                                                uint64_t line_begin,
                                                                uint64_t length, uint64_t i) {
  if (i >= length) {
    refuse_index(v, i);
    return {};
  }
  const uint64_t byte = i * kBytes;
  load_element<kBytes> op = {byte & (cache::line_bytes(c->geometry) - 1), {}};
  const uint32_t status = access_slow(c, v, line_begin + (byte >> c->geometry.line_shift), op);
  // A try that lost its race may have left another line's bytes before the transfer failed.
  if (status != nvme::kSuccess) return {};
  return op.value;
}

// Elements that are loaded together.
template <uint32_t kBytes, uint32_t kCount>
struct several {
  typename atomic::raw<kBytes>::type words[kCount];
};

// The same for the elements i, i + stride, .., one by one: for all of them or none.
template <uint32_t kBytes, uint32_t kCount>
FW_DEVICE_NOINLINE several<kBytes, kCount> load_several_slow(cache::line_cache* c, cache::volume* v,
                                                             uint64_t line_begin, uint64_t length,
                                                             uint64_t i, uint64_t stride) {
  several<kBytes, kCount> loaded = {};
  const uint64_t last = i + (kCount - 1) * stride;
  if (i >= length || last >= length) {
    refuse_index(v, last);
    return loaded;
  }
  for (uint32_t k = 0; k < kCount; k++) {
    loaded.words[k] = load_slow<kBytes>(c, v, line_begin, length, i + k * stride);
  }
  return loaded;
}

FW_DEVICE_NOINLINE void prefetch_slow(cache::line_cache* c, cache::volume* v, uint64_t line) {
  const uint32_t mask = active_on(v);
  cache::tally count;
  cache::prefetch<policy>(*c, *v, mask, true, line, count);
  count.add_kernel_to(*v, mask);
  warp::sync(mask);
}

// Bytes of an array that a thread moves, and where they go to or come from.
struct span {
  uint64_t begin;       // byte offset in the array
  uint64_t end;         // past the last one
  uint64_t buffer;      // address of the bytes outside, in any memory
  uint32_t first = 0;   // of the lines that it touches, the first that is this lane's
  uint32_t stride = 1;  // from one line of this lane's to the next: more where lanes share a span
};

// Which of its lines a span means.
enum class lines : uint32_t { kAll, kWhole, kPartial };

// A lane's walk over the lines of its span.
struct walk {
  uint64_t line;  // of the array
  uint64_t end;
  uint32_t stride;

  FW_DEVICE walk(const cache::geometry& g, const span& s)
      : line((s.begin >> g.line_shift) + s.first),
        end(s.begin < s.end ? ((s.end - 1) >> g.line_shift) + 1 : 0),
        stride(s.stride) {}
  FW_DEVICE bool more() const { return line < end; }
};

// Copies each lane's piece between its frame and its buffer: with all lanes, but for buffers in a
// lane's own registers or stack, which only the lane itself can reach.
template <bool kToFrame>
struct copy_piece {
  static constexpr bool kStores = kToFrame;
  uint64_t offset;
  uint64_t bytes;
  uint64_t buffer;

  FW_DEVICE void visit(uint32_t mask, uint32_t members, uint64_t frame) {
    const uint64_t inside = frame + offset;
    const uint32_t alone = members & warp::ballot(mask, base::is_private(buffer));
    // Each lane has acquired its own line; now all lanes copy all of them.
    warp::sync(mask);
    for (uint32_t rest = members & ~alone; rest != 0; rest &= rest - 1) {
      const uint32_t source = base::lowest_bit(rest);
      copy(mask, warp::broadcast(mask, buffer, source), warp::broadcast(mask, inside, source),
           warp::broadcast(mask, bytes, source));
    }
    if ((alone >> warp::lane()) & 1) copy(1u << warp::lane(), buffer, inside, bytes);
    warp::sync(mask);
  }

 private:
  FW_DEVICE static void copy(uint32_t mask, uint64_t own, uint64_t frame, uint64_t bytes) {
    if constexpr (kToFrame) {
      warp::copy<warp::source::kOwn>(mask, frame, own, bytes);
    } else {
      warp::copy<warp::source::kFrame>(mask, own, frame, bytes);
    }
  }
};

// Lines that a lane alone, or few lanes, keep on their way while they copy others.
inline constexpr uint32_t kSpanLinesAhead = 8;

// Whether the lane's line is one of those that `which` means, as part of the span.
FW_DEVICE bool is_meant(const cache::line_cache& c, const cache::volume& v, const span& s,
                        uint64_t line, lines which) {
  if (which == lines::kAll) return true;
  const uint64_t begin = line << c.geometry.line_shift;
  const uint64_t bytes = cache::bytes_of_line(c, v, v.line_begin + line);
  const bool whole = s.begin <= begin && s.end >= begin + bytes;
  return whole == (which == lines::kWhole);
}

// Moves each lane's lines. All lanes of `mask`, which is active_on(v), call together. Returns the
// lane's first failure.
template <bool kToFrame>
FW_DEVICE_NOINLINE uint32_t move_span(cache::line_cache* c, cache::volume* v, uint32_t mask,
                                      const span& s, lines which) {
  const cache::geometry& g = c->geometry;
  const uint32_t lead = kToFrame ? 0 : kSpanLinesAhead / base::popcount(mask);
  cache::tally count;
  uint32_t status = 0;
  walk at(g, s);
  walk ahead(g, s);
  ahead.line += s.stride;
  uint32_t asked = 1;  // lines that were met or asked for
  for (uint32_t k = 0; warp::any(mask, at.more()); k++) {
    // At first as many as we keep ahead, then one more for each that we leave behind.
    for (; lead != 0 && asked <= k + lead && warp::any(mask, ahead.more()); asked++) {
      cache::prefetch<policy>(*c, *v, mask, ahead.more(), v->line_begin + ahead.line, count);
      ahead.line += s.stride;
    }
    const bool wants = at.more() && is_meant(*c, *v, s, at.line, which);
    const uint64_t line_start = at.line << g.line_shift;
    const uint64_t line_end = line_start + cache::line_bytes(g);
    const uint64_t from = s.begin > line_start ? s.begin : line_start;
    const uint64_t to = s.end < line_end ? s.end : line_end;
    copy_piece<kToFrame> op = {from - line_start, wants ? to - from : 0,
                               s.buffer + (from - s.begin)};
    const uint64_t global = v->line_begin + at.line;
    const bool whole = wants && op.bytes == cache::bytes_of_line(*c, *v, global);
    const uint32_t got = cache::access<policy>(g, *c, *v, mask, wants, global, whole, op, count);
    if (wants && status == nvme::kSuccess) status = got;
    at.line += s.stride;
  }
  count.add_kernel_to(*v, mask);
  warp::sync(mask);
  return status;
}

// A thread's own span: for elements that straddle lines, or are no power of two.
template <bool kToFrame>
FW_DEVICE_NOINLINE uint32_t move_own(cache::line_cache* c, cache::volume* v, const span& s) {
  return move_span<kToFrame>(c, v, active_on(v), s, lines::kAll);
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
struct array<T, 1> {
  using value_type = typename detail::without_const<T>::type;
  static constexpr bool kReadOnly = detail::without_const<T>::kConst;
  // Whether elements are words of one access, which never straddle lines.
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
  // A parameter may promise more than it needs.
  FW_DEVICE operator array<const value_type>() const
    requires(!kReadOnly)
  {
    return {geometry, cache, volume, line_begin, length};
  }

  // The line of element `i` and its byte offset there.
  FW_DEVICE uint64_t line_of(uint64_t i) const {
    return line_begin + ((i * sizeof(T)) >> geometry.line_shift);
  }
  FW_DEVICE uint64_t offset_of(uint64_t i) const { return uint32_t(i * sizeof(T)) & line_mask(); }
  // The bytes of its line that lie behind its first one.
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

  // As operator[], for a caller who has seen that the element is no plain hit, and that it exists;
  // of words, a cursor asks for others too, which are refused here.
  FW_DEVICE value_type load_slow(uint64_t i) const {
    if constexpr (kWord) {
      return detail::bit_cast<value_type>(
          base::opaque(&detail::load_slow<kAccessBytes>)(cache, volume, line_begin, length, i));
    } else {
      value_type value;
      const detail::span own = span_of(i, 1, &value);
      const uint32_t status = base::opaque(&detail::move_own<false>)(cache, volume, own);
      return status == nvme::kSuccess ? value : value_type();
    }
  }

  // Stores element `i`. The line is read first when it is absent, and written back later.
  FW_DEVICE void store(uint64_t i, value_type value) const {
    static_assert(!kReadOnly, "fw::array<const T> is read-only: take an fw::array<T>");
    if (i >= length) {
      refuse(i);
      return;
    }
    if constexpr (kWord) {
      using element = detail::store_element<sizeof(T)>;
      element op = {offset_of(i), detail::bit_extend<word>(value)};
      base::opaque (&detail::access_slow<element>)(cache, volume, line_of(i), op);
    } else {
      const detail::span own = span_of(i, 1, &value);
      base::opaque (&detail::move_own<true>)(cache, volume, own);
    }
  }

  // Adds to element `i` in one step, whoever else adds meanwhile; returns what was there. For
  // 32-bit and 64-bit integers, float and double. Not ordered against accesses to other elements.
  FW_DEVICE value_type atomic_add(uint64_t i, value_type value) const {
    static_assert(!kReadOnly, "fw::array<const T> is read-only: take an fw::array<T>");
    if (i >= length) return refuse(i);
    using element = detail::add_to_element<value_type>;
    element op = {offset_of(i), value};
    const uint32_t status =
        base::opaque(&detail::access_slow<element>)(cache, volume, line_of(i), op);
    return status == nvme::kSuccess ? op.value : value_type();
  }

  // Starts bringing in the line of element `i`; does not wait for it. Past the end it does nothing.
  FW_DEVICE void prefetch(uint64_t i) const {
    const uint32_t here = warp::active();
    const uint64_t line = line_of(i);
    const bool absent = i < length && !fw::cache::probe(geometry, line).found;
    detail::call_for(here, absent,
                     [&] { base::opaque (&detail::prefetch_slow)(cache, volume, line); });
  }
  // The same for the elements i .. i + n - 1, and for what else asynchronous calls offer:
  // async.cuh.
  FW_DEVICE token prefetch(uint64_t i, uint64_t n) const;
  FW_DEVICE token read_async(uint64_t i, uint64_t n, value_type* to) const;
  FW_DEVICE token write_async(uint64_t i, uint64_t n, const value_type* from) const;
  FW_DEVICE token write_back(uint64_t i, uint64_t n) const;

  // The bytes of the elements i .. i + n - 1, and a buffer for them.
  FW_DEVICE detail::span span_of(uint64_t i, uint64_t n, const void* buffer) const {
    return {i * sizeof(T), (i + n) * sizeof(T), reinterpret_cast<uint64_t>(buffer)};
  }
  // Whether the elements i .. i + n - 1 exist; notes the first that does not.
  FW_DEVICE bool holds(uint64_t i, uint64_t n) const {
    if (i <= length && n <= length - i) return true;
    refuse(i < length ? length : i);
    return false;
  }
  // Notes an index out of bounds.
  FW_DEVICE value_type refuse(uint64_t i) const {
    base::opaque (&detail::refuse_index)(volume, i);
    return value_type();
  }

 private:
  // Lines are of 2 MiB at most.
  FW_DEVICE uint32_t line_mask() const { return (1u << geometry.line_shift) - 1; }

  FW_DEVICE value_type load_word(uint64_t i) const {
    const uint32_t here = warp::active();
    const uint64_t line = line_of(i);
    const fw::cache::place at = fw::cache::probe(geometry, line);
    word value = {};
    bool hit = false;
    if (at.found) {
      const char* frame = fw::cache::frame_of(geometry, at.way);
      // Acquire: our load before the second look at the tag. Elements give way in the L2 cache:
      // tags, which every load looks at twice, are worth more there.
      value = atomic::raw<kAccessBytes>::load_acquire_stream(frame + offset_of(i));
      hit = fw::cache::still_holds(geometry, at.way, at.word);
      if (hit) policy::on_hit(geometry, at.way, at.word);
    }
    value_type result = detail::bit_cast<value_type>(value);
    detail::call_for(here, !hit, [&] { result = load_slow(i); });
    return result;
  }

  // A record in one line travels in the widest words that it is aligned for.
  FW_DEVICE value_type load_record(uint64_t i) const {
    constexpr uint32_t kWords = sizeof(T) / kAccessBytes;
    const uint32_t here = warp::active();
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
        // Our loads before the second look at the tag.
        atomic::fence();
        hit = fw::cache::still_holds(geometry, at.way, at.word);
        if (hit) policy::on_hit(geometry, at.way, at.word);
      }
    }
    detail::call_for(here, !hit, [&] { both.value = load_slow(i); });
    return both.value;
  }
};
static_assert(sizeof(array<float>) == 72);

// An array of several axes, the last one contiguous. As a flat array it is an array<T>.
template <typename T, uint32_t kRank>
struct array : array<T, 1> {
  static_assert(kRank >= 2);
  using flat = array<T, 1>;
  using value_type = typename flat::value_type;

  uint64_t extents[kRank];

  // The length of an axis.
  FW_DEVICE uint64_t extent(uint32_t axis) const { return extents[axis]; }

  // The flat index of an element, or `length` where an index leaves its axis.
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
  // Stores an element: `grid.at(row, column, value)` reads badly, so the value comes first.
  template <typename... Index>
  FW_DEVICE void store_at(value_type value, Index... indices) const {
    flat::store(index(indices...), value);
  }
};
static_assert(sizeof(array<float, 2>) == 88);

}  // namespace fw
