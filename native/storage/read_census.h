// Statistics of the reads of a file: how many bytes, how many of them repeatedly, how close by.
//
// They decide between the page cache and O_DIRECT. Any thread notes reads, without waiting. Only a
// sample of the reads is counted, so the figures are estimates, accurate to a few percent if many
// different places are read.
#pragma once

#include <atomic>
#include <cstdint>

namespace fw::native {

class ReadCensus {
 public:
  struct Figures {
    uint64_t reads = 0;
    uint64_t nbytes = 0;
    uint64_t waited_nbytes = 0;   // those of them that were not in the page cache
    uint64_t near_reads = 0;      // reads close behind an earlier one
    uint64_t touched_nbytes = 0;  // different bytes among them
    uint64_t busy_ns = 0;         // time between reads of one shard, without pauses, summed
  };

  explicit ReadCensus(uint64_t file_nbytes);
  void note(uint64_t offset, uint64_t n, bool waited);
  uint64_t nbytes() const;
  Figures figures() const;
  void restart();

 private:
  using Counter = std::atomic<uint64_t>;
  static constexpr uint32_t kMarks = 1 << 16;
  static constexpr uint32_t kRecent = 8;
  static constexpr uint32_t kShards = 8;

  // The counters of some threads, so that threads seldom contend for a cache line.
  struct alignas(64) Shard {
    Counter reads{0};
    Counter nbytes{0};
    Counter waited_nbytes{0};
    Counter near_reads{0};
    Counter busy_ns{0};
    std::atomic<int64_t> last_ns{0};
    std::atomic<uint32_t> turn{0};
    Counter recent[kRecent] = {};  // the chunks of the last reads, counted from 1
  };

  static Shard& own(Shard (&shards)[kShards]);
  static bool is_near(Shard& shard, uint64_t offset, uint64_t n);
  static void spend(Shard& shard, int64_t now_ns);
  void mark(uint64_t hash);

  // Reads are marked whose hash begins with so many zero bits. A long file has a smaller sample.
  const uint32_t mark_bits_;
  Shard shards_[kShards];
  alignas(64) Counter marked_{0};
  Counter marks_[kMarks / 64] = {};
};

}  // namespace fw::native
