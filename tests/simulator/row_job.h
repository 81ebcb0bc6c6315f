// A launch of a row kernel by some warps, as its parameters and the records of its elements.
#pragma once

#include "simulator/elements.h"

namespace fw::simulator {

// One launch of a row kernel by some warps, as its parameters and the records of its elements.
class RowJob {
 public:
  RowJob(Elements<>& data, uint32_t row_words, uint32_t rows, bool scatters, Random& random)
      : data_(data), row_words_(row_words), scatters_(scatters), look_ahead_(rows % 2) {
    const uint32_t row_count = data.length() / row_words;
    for (uint32_t k = 0; k < rows; ++k) indices_.push_back(random.below(row_count));
    values_.assign(size_t(rows) * row_words, 0);
    if (!scatters) return;
    for (size_t i = 0; i < values_.size(); ++i) values_[i] = data.next_value(element(i));
  }

  // Leaves the misses to some of the job's warps, by way of a list.
  void defer(fw::cache::list_use misses, uint32_t blocks) {
    misses_ = {misses.list, misses.launch, blocks, 1 + uint32_t(values_.size() % kWidth)};
    look_ahead_ = 0;
  }
  // Has blocks of several warps.
  void divide(uint32_t block_warps, block_barrier* barriers) {
    block_warps_ = block_warps;
    barriers_ = barriers;
  }
  // Uses the lines of a client of the cache, whose structs these are.
  void by_client(const fw::array<uint64_t>& theirs) { theirs_ = &theirs; }
  // Accepts rows that cannot be read.
  void may_fail() { may_fail_ = true; }
  // First prefetches the rows, in a launch of its own that may still run when ours begins.
  void prefetch_first(fw::cache::list_use misses) {
    prefetches_ = true;
    prefetch_misses_ = {misses.list, misses.launch, misses_.blocks, misses_.bundle};
  }

  // Only prefetches the rows.
  void only_prefetches() { only_prefetches_ = true; }
  // Gathers around the cache what is not in it.
  void streams() { streams_ = true; }
  // Replaces an index by any number, of a row or not. A launch of the job may run meanwhile.
  void change_an_index(Random& random) {
    constexpr int64_t kFar[] = {INT64_MIN, INT64_MIN + 1, INT64_MAX, -1, int64_t(1) << 52};
    const int64_t row_count = data_.length() / row_words_;
    const int64_t near = random.below(3);
    const int64_t numbers[] = {random.pick(kFar), row_count + near, -row_count - near,
                               int64_t(random.below(uint32_t(row_count)))};
    indices_[random.below(uint32_t(indices_.size()))] = random.pick(numbers);
  }

  // By every thread of the job, which are `count`. All operations last from the first thread's
  // begin to the last one's end.
  void run(uint32_t index, uint32_t count) {
    become(index, count, block_warps_, barriers_);
    if (only_prefetches_) {
      fw::kernels::row_params p = params();
      p.rows = nullptr;
      fw_prefetch_rows(p);
      return;
    }
    if (running_++ == 0) begin();
    fw::kernels::row_params p = params();
    if (prefetches_) {
      p.misses = prefetch_misses_;
      fw_prefetch_rows(p);
      p.misses = misses_;
    }
    if (row_words_ == 1) {
      scatters_ ? fw_scatter_elements_8(p) : fw_gather_elements_8(p);
    } else {
      scatters_ ? fw_scatter_rows(p) : streams_ ? fw_stream_rows(p) : fw_gather_rows(p);
    }
    if (++done_ == count) end();
  }

 private:
  uint32_t element(size_t i) const {
    return uint32_t(indices_[i / row_words_]) * row_words_ + uint32_t(i % row_words_);
  }

  void begin() {
    for (size_t i = 0; i < values_.size(); ++i) {
      operations_.push_back(data_.begin(element(i), scatters_, values_[i]));
    }
  }
  void end() {
    for (size_t i = 0; i < values_.size(); ++i) {
      if (values_[i] == 0 && !may_fail_) scheduler.fail("a gathered element was not written");
      data_.end(operations_[i], element(i), values_[i]);
    }
  }

  fw::kernels::row_params params() {
    const fw::array<uint64_t>& a = theirs_ != nullptr ? *theirs_ : data_.array();
    fw::kernels::row_params p = {};
    p.geometry = a.geometry;
    p.cache = a.cache;
    p.volume = a.volume;
    p.indices = indices_.data();
    p.index_count = indices_.size();
    p.rows = reinterpret_cast<char*>(values_.data());
    p.row_bytes = row_words_ * 8;
    p.row_count = a.length / row_words_;
    p.from_end = p.row_count;
    p.look_ahead = look_ahead_;
    p.misses = misses_;
    p.index_bytes = 8;
    p.bundle = 1 + uint32_t(indices_.size() % kWidth);
    // A row may begin at the end of a line.
    p.segments = row_words_ == 1 || kLineBytes % p.row_bytes == 0 ? 1 : 2;
    return p;
  }

  Elements<>& data_;
  const fw::array<uint64_t>* theirs_ = nullptr;
  const uint32_t row_words_;
  const bool scatters_;
  uint64_t look_ahead_;
  fw::cache::list_use misses_ = {};
  fw::cache::list_use prefetch_misses_ = {};
  bool prefetches_ = false;
  bool only_prefetches_ = false;
  bool streams_ = false;
  bool may_fail_ = false;
  uint32_t block_warps_ = 1;
  block_barrier* barriers_ = nullptr;
  std::vector<int64_t> indices_;
  std::vector<uint64_t> values_;
  std::vector<uint32_t> operations_;
  uint32_t running_ = 0;
  uint32_t done_ = 0;
};

}  // namespace fw::simulator
