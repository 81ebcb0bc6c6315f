// Which ranges of an image (docs/files.md) may have been written since the last sync. A mark is
// durable before its range is written.
//
// Marks lie in pages of the file. A page has a generation, and counts under headers up to that one.
// While a sync makes the next header, the marks of the last one count, too: so pages that are
// written meanwhile have the next generation, and the marks of both.
//
// No call runs Python. Threads that serve commands make marks, and the code of Python's that would
// run there may wait for a kernel that waits for them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace fw::native {

class ImageMarks {
 public:
  static constexpr uint64_t kPageBytes = 4096;
  static constexpr uint64_t kPageRanges = 32000;

  struct Layout {
    uint64_t begin = 0;        // of the pages in the file
    uint64_t range_bytes = 0;  // that one mark stands for: a power of two
    uint64_t nbytes = 0;       // of the data
  };
  using Identity = std::array<char, 16>;

  // `fd` stays the caller's. `marked` has a bit for each range that was marked under the header of
  // `generation`. Throws std::invalid_argument for an identity of another length.
  ImageMarks(int fd, const Layout& layout, const std::string& identity, uint64_t generation,
             const std::string& marked);

  // Makes the marks of [offset, offset + n) durable. Returns 0 or an errno value. Any thread.
  int make(uint64_t offset, uint64_t n);

  // Whether marks were made under this generation.
  bool any() const { return any_.load(std::memory_order_acquire); }

  // From now on marks are made under a generation, which may be the one of now. No `make` is under
  // way.
  void begin(uint64_t generation);

  // The header of the generation is durable, so the marks before it count no more.
  void forget_older();

  // Why nothing may be written any more, as an errno value; 0 if it may. The file has lost writes.
  int broken() const { return broken_.load(std::memory_order_acquire); }
  void break_off(int error) { broken_.store(error, std::memory_order_release); }

 private:
  static constexpr uint64_t kWordBits = 64;
  static constexpr uint64_t kPageWords = kPageRanges / kWordBits;

  bool are_made(uint64_t first, uint64_t end) const;
  int write_page(uint64_t page, uint64_t first, uint64_t end) const;

  const int fd_;
  const Layout layout_;
  const uint64_t ranges_;
  Identity identity_;

  std::mutex making_;
  uint64_t generation_;                       // guarded by making_, as are the next two
  uint32_t calls_ = 0;                        // that wrote pages, in this generation
  std::vector<uint64_t> older_;               // of the header that counts; empty: there are none
  std::vector<std::atomic<uint64_t>> marks_;  // of this generation
  std::atomic<bool> any_{false};
  std::atomic<int> broken_{0};
};

}  // namespace fw::native
