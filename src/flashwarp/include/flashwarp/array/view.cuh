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

#include "flashwarp/cache/access.cuh"
#include "flashwarp/cache/short_miss.cuh"

namespace fw {

using policy = FW_POLICY;

template <typename T, uint32_t kRank = 1>
struct array;

class token;

namespace detail {

// The widest access for which every element of this size is aligned.
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

// Adds to one element of each lane, and keeps the old value. The line is pinned meanwhile.
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

// The active lanes that use the same array. Only these cooperate, because each array has queues of
// its own.
FW_DEVICE uint32_t active_on(const cache::volume* v) {
  return warp::match(warp::active(), reinterpret_cast<uint64_t>(v));
}

// Runs `slow` in the lanes that need it. All lanes of `here` call, and go on together; the caller
// takes `here` before any lane looks at the cache. The compiler may not reconverge lanes after such
// a call, because the callee saves the registers that say which lanes are waited for. Without the
// sync, the rest of the kernel would run once for each lane.
template <typename Slow>
FW_DEVICE void call_for(uint32_t here, bool needed, Slow slow) {
  if (!warp::any(here, needed)) return;
  if (needed) slow();
  warp::sync(here);
}

// The slow path of an element access. `looked`: see cache::access. Returns the status. Slow paths
// are called through base::opaque, so that kernels do not keep registers for them.
template <typename Op>
FW_DEVICE_NOINLINE uint32_t access_slow(cache::line_cache* c, cache::volume* v, uint64_t line,
                                        Op& op, bool looked) {
  const uint32_t mask = active_on(v);
  const cache::geometry g = c->geometry;
  // Lanes that come from different places go one way.
  looked = !warp::any(mask, !looked);
  cache::tally count;
  const uint32_t status =
      cache::access<policy>(g, *c, *v, mask, true, line, false, op, count, looked);
  count.add_kernel_to(*v, mask);
  warp::sync(mask);
  return status;
}

// Takes the 16 bytes of a line that have a lane's element, in flight together with the line.
struct take_element {
  static constexpr bool kTakesWords = false;
  uint64_t offset;
  atomic::word16 value;

  FW_DEVICE void begin(uint64_t source) {
    value = atomic::raw<16>::load_stream(reinterpret_cast<const char*>(source) + (offset & ~15ull));
  }
  FW_DEVICE void word(uint64_t, const atomic::word16&) {}
  FW_DEVICE void piece(uint32_t at, uint32_t from) { warp::load_staged(value, offset - at, from); }
};

// Loads the 16 bytes around byte `offset` of a line on the short way of a miss, if all lanes that
// use the array want the line. They have just looked for it in vain. The same code for elements of
// all sizes.
struct loaded_short {
  atomic::word16 value;
  bool served;
};
FW_DEVICE_NOINLINE loaded_short load_short(cache::line_cache* c, cache::volume* v, uint64_t line,
                                           uint64_t offset) {
  const uint32_t mask = active_on(v);
  const cache::geometry g = c->geometry;
  cache::counters& shard = cache::shard_of(*v);
  const cache::short_way way = cache::short_way_of(*c, *v);
  take_element take = {offset, {}};
  if (warp::any(mask, warp::match(mask, line) != mask)) return {{}, false};
  // Of a mask that the compiler knows, collectives are an instruction each.
  const bool served =
      mask == warp::kFullMask
          ? cache::serve_short<policy, true>(g, *c, way, shard, warp::kFullMask, line, take)
          : cache::serve_short<policy, true>(g, *c, way, shard, mask, line, take);
  warp::sync(mask);
  return {take.value, served};
}

// The element of `kBytes` at byte `offset` of a line, of the 16 bytes around it.
template <uint32_t kBytes>
FW_DEVICE typename atomic::raw<kBytes>::type part_of(const atomic::word16& around,
                                                     uint64_t offset) {
  if constexpr (kBytes == 16) {
    return around;
  } else {
    const uint64_t low = around.x | uint64_t(around.y) << 32;
    const uint64_t high = around.z | uint64_t(around.w) << 32;
    const uint64_t half = (offset & 8) == 0 ? low : high;
    return typename atomic::raw<kBytes>::type(half >> (offset & 7) * 8);
  }
}

// Records an index out of bounds, for the host to raise.
FW_DEVICE_NOINLINE void refuse_index(cache::volume* v, uint64_t i) {
  cache::note_failure(v->indices, v->errors->indices, i, cache::kElements, 0);
  base::trap_in_debug();
}

// The slow path of a load: the line is absent or being filled, or the index is out of bounds. It
// returns the element by value, because an address on the stack would take the kernel's registers.
template <uint32_t kBytes>
FW_DEVICE_NOINLINE typename atomic::raw<kBytes>::type load_slow(cache::line_cache* c,
                                                                cache::volume* v,
                                                                uint64_t line_begin,
                                                                uint64_t length, uint64_t i,
                                                                bool looked) {
  if (i >= length) {
    refuse_index(v, i);
    return {};
  }
  const uint64_t byte = i * kBytes;
  load_element<kBytes> op = {byte & (cache::line_bytes(c->geometry) - 1), {}};
  const uint64_t line = line_begin + (byte >> c->geometry.line_shift);
  if constexpr (warp::kWarpWidth > 1) {
    if (looked) {
      const loaded_short got = load_short(c, v, line, op.offset);
      if (got.served) return part_of<kBytes>(got.value, op.offset);
    }
  }
  const uint32_t status = access_slow(c, v, line, op, looked);
  // If the transfer failed, `op` may hold another line's bytes, from a try that lost its race.
  if (status != nvme::kSuccess) return {};
  return op.value;
}

// Elements that are loaded together.
template <uint32_t kBytes, uint32_t kCount>
struct several {
  typename atomic::raw<kBytes>::type words[kCount];
};

// The slow path of `cursor::load`: loads the first `count` of the elements i, i + stride, .. one by
// one. If one of them is out of bounds, it loads none.
template <uint32_t kBytes, uint32_t kCount>
FW_DEVICE_NOINLINE several<kBytes, kCount> load_several_slow(cache::line_cache* c, cache::volume* v,
                                                             uint64_t line_begin, uint64_t length,
                                                             uint64_t i, uint64_t stride,
                                                             uint32_t count) {
  several<kBytes, kCount> loaded = {};
  for (uint32_t k = 0; k < count; k++) {
    if (i + k * stride < length) continue;
    refuse_index(v, i + k * stride);
    return loaded;
  }
  for (uint32_t k = 0; k < count; k++) {
    loaded.words[k] = load_slow<kBytes>(c, v, line_begin, length, i + k * stride, false);
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

// Bytes of an array that a lane moves to or from a buffer.
struct span {
  uint64_t begin;       // byte offset in the array
  uint64_t end;         // past the last byte
  uint64_t buffer;      // address of the buffer, in any memory
  uint32_t first = 0;   // the lane's first line, counted from the span's first
  uint32_t stride = 1;  // lines from one of the lane's to its next: more if lanes share the span
};

// The lines of a span that an operation is about.
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

// Copies each lane's piece between its frame and its buffer. All lanes copy together, except for
// buffers on a lane's stack, which only the lane itself can reach.
template <bool kToFrame>
struct copy_piece {
  static constexpr bool kStores = kToFrame;
  uint64_t offset;
  uint64_t bytes;
  uint64_t buffer;

  FW_DEVICE void visit(uint32_t mask, uint32_t members, uint64_t frame) {
    copy<kToFrame ? warp::source::kOwn : warp::source::kFrame>(mask, members, frame);
  }

  // `line` is the address of the lane's line, in a frame or in the storage.
  template <warp::source kSource>
  FW_DEVICE void copy(uint32_t mask, uint32_t members, uint64_t line) {
    const uint64_t inside = line + offset;
    const uint64_t to = kToFrame ? inside : buffer;
    const uint64_t from = kToFrame ? buffer : inside;
    const uint32_t alone = members & warp::ballot(mask, base::is_private(buffer));
    // Each lane has acquired its own line; now all lanes copy all of them.
    warp::sync(mask);
    warp::copy_each<kSource>(mask, members & ~alone, to, from, bytes);
    if ((alone >> warp::lane()) & 1) warp::copy<kSource>(1u << warp::lane(), to, from, bytes);
    warp::sync(mask);
  }
};

// The piece of a span in one of its lines, or none of it.
template <bool kToFrame>
FW_DEVICE copy_piece<kToFrame> piece_of(const cache::geometry& g, const span& s, uint64_t line,
                                        bool wants) {
  const uint64_t line_start = line << g.line_shift;
  const uint64_t line_end = line_start + cache::line_bytes(g);
  const uint64_t from = s.begin > line_start ? s.begin : line_start;
  const uint64_t to = s.end < line_end ? s.end : line_end;
  return {from - line_start, wants ? to - from : 0, s.buffer + (from - s.begin)};
}

// Lines of a span that the lanes prefetch ahead of the one that they copy, all lanes together.
inline constexpr uint32_t kSpanLinesAhead = 8;

// Whether the lane's line of the span is one of `which`.
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
template <bool kToFrame, typename Misses = cache::fetch_misses>
FW_DEVICE_NOINLINE uint32_t move_span(cache::line_cache* c, cache::volume* v, uint32_t mask,
                                      const span& s, lines which) {
  const cache::geometry& g = c->geometry;
  const uint32_t lead = kToFrame ? 0 : kSpanLinesAhead / base::popcount(mask);
  cache::tally count;
  uint32_t status = 0;
  walk at(g, s);
  walk ahead(g, s);
  ahead.line += s.stride;
  uint32_t asked = 1;  // lines copied or prefetched so far
  for (uint32_t k = 0; warp::any(mask, at.more()); k++) {
    // Prefetch `lead` lines at first, then one more for each line copied.
    for (; lead != 0 && asked <= k + lead && warp::any(mask, ahead.more()); asked++) {
      cache::prefetch<policy>(*c, *v, mask, ahead.more(), v->line_begin + ahead.line, count);
      ahead.line += s.stride;
    }
    const bool wants = at.more() && is_meant(*c, *v, s, at.line, which);
    copy_piece<kToFrame> op = piece_of<kToFrame>(g, s, at.line, wants);
    const uint64_t global = v->line_begin + at.line;
    const bool whole = wants && op.bytes == cache::bytes_of_line(*c, *v, global);
    const uint32_t got =
        cache::access<policy>(g, *c, *v, mask, wants, global, whole, op, count, Misses());
    if (wants && status == nvme::kSuccess) status = got;
    at.line += s.stride;
  }
  count.add_kernel_to(*v, mask);
  warp::sync(mask);
  return status;
}

// Moves one thread's span: an element that straddles lines, or whose size is no power of two.
template <bool kToFrame, typename Misses = cache::fetch_misses>
FW_DEVICE_NOINLINE uint32_t move_own(cache::line_cache* c, cache::volume* v, const span& s) {
  return move_span<kToFrame, Misses>(c, v, active_on(v), s, lines::kAll);
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
    const uint32_t here = warp::active();
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
    const uint32_t here = warp::active();
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
