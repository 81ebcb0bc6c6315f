// Accesses to one element of each lane: the operations, and the slow paths behind a miss.
//
// Slow paths are called through base::opaque, so that kernels do not keep registers for them.
#pragma once

#include "flashwarp/array/callers.cuh"
#include "flashwarp/cache/short_miss.cuh"

namespace fw {

namespace detail {

// Loads one element of each lane.
template <uint32_t kBytes>
struct load_element {
  static constexpr bool kStores = false;
  uint64_t offset;
  typename atomic::raw<kBytes>::type value;

  FW_DEVICE void visit(lanes, lanes members, uint64_t frame) {
    if (members.mine()) {
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

  FW_DEVICE cache::line_part stored() const { return {offset, kBytes}; }
  FW_DEVICE void visit(lanes, lanes members, uint64_t frame) {
    if (members.mine()) {
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

  FW_DEVICE void visit(lanes, lanes members, uint64_t frame) {
    if (members.mine()) {
      value = atomic::add(reinterpret_cast<T*>(reinterpret_cast<char*>(frame) + offset), value);
    }
  }
};

// The slow path of an element access. `looked`: see cache::access. Returns the status.
template <typename Op>
FW_DEVICE_NOINLINE uint32_t access_slow(cache::line_cache* c, cache::volume* v, uint64_t line,
                                        Op& op, bool looked) {
  const lanes here = active_on(v);
  const cache::geometry g = c->geometry;
  // Lanes that come from different places go one way.
  looked = !here.any(!looked);
  cache::tally count;
  const uint32_t status =
      cache::access<policy>({g, *c, *v, here}, {line, true, false, looked}, op, count);
  count.add_kernel_to(*v, here);
  here.sync();
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

// Loads the 16 bytes around byte `offset` of a line by the shortcut of a miss, if all lanes that
// use the array want the line. They have just looked for it in vain. The same code for elements of
// all sizes.
struct loaded_short {
  atomic::word16 value;
  bool served;
};
FW_DEVICE_NOINLINE loaded_short load_short(cache::line_cache* c, cache::volume* v, uint64_t line,
                                           uint64_t offset) {
  const lanes here = active_on(v);
  const cache::geometry g = c->geometry;
  cache::counters& shard = cache::shard_of(*v);
  const cache::shortcut cut = cache::shortcut_of(*c, *v);
  take_element take = {offset, {}};
  if (here.any(here.match(line) != here)) return {{}, false};
  // Of a here that the compiler knows, collectives are an instruction each.
  const bool served =
      here == lanes::all()
          ? cache::serve_short<policy, true>(g, *c, cut, shard, lanes::all(), line, take)
          : cache::serve_short<policy, true>(g, *c, cut, shard, here, line, take);
  here.sync();
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
  const lanes here = active_on(v);
  cache::tally count;
  cache::prefetch<policy>(*c, *v, here, true, line, count);
  count.add_kernel_to(*v, here);
  here.sync();
}

}  // namespace detail

}  // namespace fw
