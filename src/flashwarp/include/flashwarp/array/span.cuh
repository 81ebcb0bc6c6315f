// Copies many elements between an array and a buffer, by the lanes of a warp (`fw::warp::`) or by
// all threads of a block (`fw::block::`) together.
//
// Each lane gets some of the lines. One bundle of commands fetches them, and all lanes copy each
// line. The buffer is in global or shared memory. When the call returns, all callers see the whole
// copy. It returns the NVMe status: kSuccess, or the first failure, which the host raises after the
// launch.
#pragma once

#include "flashwarp/array/view.cuh"
#include "flashwarp/base/block.cuh"

namespace fw {

namespace detail {

// This lane's share of a span that `ranks` groups of lanes divide. The lanes of `here` are group
// `rank`.
FW_DEVICE span dealt(lanes here, span s, uint32_t rank, uint32_t ranks) {
  const uint32_t lanes = here.count();
  s.first = rank * lanes + here.rank();
  s.stride = ranks * lanes;
  return s;
}

// The status of all lanes of `here`, which have a span together: the first failure of any of them.
FW_DEVICE uint32_t status_of_all(lanes here, uint32_t status) {
  here.sync();
  const lanes failed = here.ballot(status != nvme::kSuccess);
  return !failed ? 0 : here.broadcast(status, failed.leader());
}

// Moves a span that was dealt to the lanes of `here`. All of them call together, with the here by
// which it was dealt: if the warp came here in two parts with masks of their own, lanes would
// return before others had moved their shares.
template <bool kToFrame, typename Misses = cache::fetch_misses>
FW_DEVICE_NOINLINE uint32_t move_shared(cache::line_cache* c, cache::volume* v, lanes here,
                                        const span& s) {
  return status_of_all(here, move_span<kToFrame, Misses>(c, v, here, s, lines::kAll));
}

// The common part of warp:: and block::.
template <bool kToFrame, typename T>
FW_DEVICE uint32_t move_together(const array<T>& a, lanes here, uint64_t i, uint64_t n,
                                 const void* buffer, uint32_t rank, uint32_t ranks) {
  if (!a.holds(i, n)) return nvme::kLbaOutOfRange;
  const span s = dealt(here, a.span_of(i, n, buffer), rank, ranks);
  return base::opaque(&move_shared<kToFrame>)(a.cache, a.volume, here, s);
}

}  // namespace detail

namespace warp {

// Copies the elements i .. i + n - 1 of `a` to `to`. All lanes that are active together call with
// the same arguments.
template <typename T>
FW_DEVICE uint32_t read(const array<T>& a, uint64_t i, uint64_t n,
                        typename array<T>::value_type* to) {
  return detail::move_together<false>(a, detail::active_on(a.volume), i, n, to, 0, 1);
}

// Stores `from` to the elements i .. i + n - 1. Lines that it overwrites whole are not read first.
template <typename T>
FW_DEVICE uint32_t write(const array<T>& a, uint64_t i, uint64_t n,
                         const typename array<T>::value_type* from) {
  static_assert(!array<T>::kReadOnly, "fw::array<const T> is read-only: take an fw::array<T>");
  return detail::move_together<true>(a, detail::active_on(a.volume), i, n, from, 0, 1);
}

}  // namespace warp

namespace block {

// As fw::warp::read and write, by all threads of the block, with a barrier of the block before and
// after. Each warp returns the status of its own lines.
template <typename T>
FW_DEVICE uint32_t read(const array<T>& a, uint64_t i, uint64_t n,
                        typename array<T>::value_type* to) {
  sync();
  const uint32_t status =
      detail::move_together<false>(a, lanes::all(), i, n, to, warp_rank(), warp_count());
  sync();
  return status;
}

template <typename T>
FW_DEVICE uint32_t write(const array<T>& a, uint64_t i, uint64_t n,
                         const typename array<T>::value_type* from) {
  static_assert(!array<T>::kReadOnly, "fw::array<const T> is read-only: take an fw::array<T>");
  sync();
  const uint32_t status =
      detail::move_together<true>(a, lanes::all(), i, n, from, warp_rank(), warp_count());
  sync();
  return status;
}

}  // namespace block

}  // namespace fw
