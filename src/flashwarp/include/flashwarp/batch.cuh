// Batches of rows that the host's engine moves while the kernel computes.
//
//   fw::pipeline<float> p;                       // a kernel's parameter; on the host fw.Pipeline
//   p.prefetch(ids, n, next);                    // rows of the storage -> memory; returns at once
//   compute(now);
//   p.prefetch_wait();                           // the oldest batch is there
//   p.write_back(ids, n, now);                   // memory -> rows of the storage
//   p.write_back_wait();
//
// The methods are calls of the whole launch: all threads of all its blocks call them with the same
// arguments, and they end in a barrier of the launch. So all its blocks must run at a time, as
// those of flashwarp's launches do. The functions in fw::block are calls of one block: all its
// threads call them with the same arguments, and each block has batches of its own. In a launch of
// one block both are the same.
//
// prefetch and write_back return a ticket, or batch::kRefused. `*_wait` takes the ticket;
// without one it takes the oldest batch of the direction that nobody has waited for. It returns
// how many rows failed, and stores the NVMe status of each row if you give it an array of uint16_t,
// one for each row. Rows that failed to arrive are zeros; other rows and later batches are not
// affected. A batch that is not waited for keeps its slot, also after the launch.
//
// A batch sees the rows that were written by batches that its block had submitted before, or had
// seen the ticket of, and no later ones. Nobody need wait in between.
//
// Ids are integers of 32 or 64 bits. The call copies them, so they may change when it returns. The
// buffer is the engine's until the batch is waited for. A batch that is longer than a slot takes
// several. What a call cannot do, and a wait that runs out of time, is raised by the host.
#pragma once

#include "flashwarp/batch/direction.cuh"

namespace fw {

// T: the elements of rows. A kernel that only prefetches takes fw::pipeline<const T>.
template <typename T>
struct pipeline;

namespace block {

template <typename T, typename Id>
FW_DEVICE uint64_t prefetch(const pipeline<T>& p, const Id* ids, uint64_t n,
                            typename pipeline<T>::value_type* to) {
  return batch::submit(*p.reads, ids, 0, n, to);
}

// The rows start, start + 1, .. start + n - 1.
template <typename T>
FW_DEVICE uint64_t prefetch_seq(const pipeline<T>& p, uint64_t start, uint64_t n,
                                typename pipeline<T>::value_type* to) {
  return batch::submit<int64_t>(*p.reads, nullptr, start, n, to);
}

template <typename T>
FW_DEVICE uint64_t prefetch_wait(const pipeline<T>& p, uint64_t ticket = batch::kOldest,
                                 uint16_t* statuses = nullptr) {
  return batch::wait(*p.reads, ticket, statuses);
}

// If an id occurs more than once, one of its rows is kept.
template <typename T, typename Id>
FW_DEVICE uint64_t write_back(const pipeline<T>& p, const Id* ids, uint64_t n,
                              const typename pipeline<T>::value_type* from) {
  static_assert(!pipeline<T>::kReadOnly, "fw::pipeline<const T> only reads: take fw::pipeline<T>");
  return batch::submit(*p.writes, ids, 0, n, from);
}

template <typename T>
FW_DEVICE uint64_t write_back_seq(const pipeline<T>& p, uint64_t start, uint64_t n,
                                  const typename pipeline<T>::value_type* from) {
  static_assert(!pipeline<T>::kReadOnly, "fw::pipeline<const T> only reads: take fw::pipeline<T>");
  return batch::submit<int64_t>(*p.writes, nullptr, start, n, from);
}

template <typename T>
FW_DEVICE uint64_t write_back_wait(const pipeline<T>& p, uint64_t ticket = batch::kOldest,
                                   uint16_t* statuses = nullptr) {
  static_assert(!pipeline<T>::kReadOnly, "fw::pipeline<const T> only reads: take fw::pipeline<T>");
  return batch::wait(*p.writes, ticket, statuses);
}

}  // namespace block

template <typename T>
struct pipeline {
  using value_type = typename base::without_const<T>::type;
  static constexpr bool kReadOnly = base::without_const<T>::kConst;

  batch::direction* reads;
  batch::direction* writes;  // null: the array was opened for reading

  template <typename Id>
  FW_DEVICE uint64_t prefetch(const Id* ids, uint64_t n, value_type* to) const {
    return batch::meet(*reads, batch::kRefused, [&] { return block::prefetch(*this, ids, n, to); });
  }
  FW_DEVICE uint64_t prefetch_seq(uint64_t start, uint64_t n, value_type* to) const {
    return batch::meet(*reads, batch::kRefused,
                       [&] { return block::prefetch_seq(*this, start, n, to); });
  }
  FW_DEVICE uint64_t prefetch_wait(uint64_t ticket = batch::kOldest,
                                   uint16_t* statuses = nullptr) const {
    return batch::meet(*reads, batch::kNotWaited,
                       [&] { return block::prefetch_wait(*this, ticket, statuses); });
  }
  template <typename Id>
  FW_DEVICE uint64_t write_back(const Id* ids, uint64_t n, const value_type* from) const {
    return batch::meet(*writes, batch::kRefused,
                       [&] { return block::write_back(*this, ids, n, from); });
  }
  FW_DEVICE uint64_t write_back_seq(uint64_t start, uint64_t n, const value_type* from) const {
    return batch::meet(*writes, batch::kRefused,
                       [&] { return block::write_back_seq(*this, start, n, from); });
  }
  FW_DEVICE uint64_t write_back_wait(uint64_t ticket = batch::kOldest,
                                     uint16_t* statuses = nullptr) const {
    return batch::meet(*writes, batch::kNotWaited,
                       [&] { return block::write_back_wait(*this, ticket, statuses); });
  }
};
static_assert(sizeof(pipeline<float>) == 16);

}  // namespace fw
