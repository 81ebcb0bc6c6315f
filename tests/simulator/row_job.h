// A launch of a row kernel by some warps, as its parameters and the records of its elements.
#pragma once

#include "simulator/elements.h"

namespace fw::simulator {

// One launch of a row kernel by some warps, as its parameters and the records of its elements.
class RowJob {
 public:
  RowJob(Elements<>& data, uint32_t row_words, uint32_t rows, bool scatters, Random& random)
      : data_(data), row_words_(row_words), scatters_(scatters) {
    const uint32_t row_count = data.length() / row_words;
    for (uint32_t k = 0; k < rows; ++k) indices_.push_back(random.below(row_count));
    values_.assign(size_t(rows) * row_words, 0);
    if (!scatters) return;
    for (size_t i = 0; i < values_.size(); ++i) values_[i] = data.next_value(element(i));
  }

  // By every thread of the job, which are `count`. All operations last from the first thread's
  // begin to the last one's end.
  void run(uint32_t index, uint32_t count) {
    become(index, count);
    if (running_++ == 0) begin();
    const fw::kernels::row_params p = params();
    if (row_words_ == 1) {
      scatters_ ? fw_scatter_elements_8(p) : fw_gather_elements_8(p);
    } else {
      scatters_ ? fw_scatter_rows(p) : fw_gather_rows(p);
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
      if (values_[i] == 0) scheduler.fail("a gathered element was not written");
      data_.end(operations_[i], element(i), values_[i]);
    }
  }

  fw::kernels::row_params params() {
    const fw::array<uint64_t>& a = data_.array();
    fw::kernels::row_params p = {};
    p.geometry = a.geometry;
    p.cache = a.cache;
    p.volume = a.volume;
    p.indices = indices_.data();
    p.index_count = indices_.size();
    p.rows = reinterpret_cast<char*>(values_.data());
    p.row_bytes = row_words_ * 8;
    p.row_count = a.length / row_words_;
    p.look_ahead = indices_.size() % 2;
    p.index_bytes = 8;
    p.batch = 1 + uint32_t(indices_.size() % kWidth);
    // A row may begin at the end of a line.
    p.segments = row_words_ == 1 || kLineBytes % p.row_bytes == 0 ? 1 : 2;
    return p;
  }

  Elements<>& data_;
  const uint32_t row_words_;
  const bool scatters_;
  std::vector<int64_t> indices_;
  std::vector<uint64_t> values_;
  std::vector<uint32_t> operations_;
  uint32_t running_ = 0;
  uint32_t done_ = 0;
};

}  // namespace fw::simulator
