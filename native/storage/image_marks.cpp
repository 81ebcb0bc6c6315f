// Pages of marks; see image_marks.h. `flashwarp.file.gvdk.layout` reads them.
#include "storage/image_marks.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "base/crc32c.h"
#include "storage/file_io.h"

namespace fw::native {
namespace {

struct Page {
  char magic[4] = {'G', 'V', 'D', 'M'};
  uint32_t reserved = 0;
  uint64_t index = 0;
  uint64_t generation = 0;
  ImageMarks::Identity identity = {};
  char padding[24] = {};
  uint32_t checksum = 0;
  char rest_of_checksum[28] = {};
  uint64_t marks[ImageMarks::kPageRanges / 64] = {};
};
static_assert(sizeof(Page) == ImageMarks::kPageBytes);

}  // namespace

ImageMarks::ImageMarks(int fd, const Layout& layout, const std::string& identity,
                       uint64_t generation, const std::string& marked)
    : fd_(fd),
      layout_(layout),
      ranges_((layout.nbytes - 1) / layout.range_bytes + 1),
      generation_(generation),
      marks_(((ranges_ - 1) / kPageRanges + 1) * kPageWords) {
  if (identity.size() != identity_.size()) throw std::invalid_argument("an identity of 16 bytes");
  std::memcpy(identity_.data(), identity.data(), identity_.size());
  if (marked.find_first_not_of('\0') == std::string::npos) return;
  older_.resize(marks_.size());
  std::memcpy(older_.data(), marked.data(),
              std::min(marked.size(), older_.size() * sizeof(uint64_t)));
}

bool ImageMarks::are_made(uint64_t first, uint64_t end) const {
  for (uint64_t range = first; range != end; ++range) {
    // Acquire: the mark is durable.
    const uint64_t word = marks_[range / kWordBits].load(std::memory_order_acquire);
    if ((word >> range % kWordBits & 1) == 0) return false;
  }
  return true;
}

int ImageMarks::make(uint64_t offset, uint64_t n) {
  if (const int error = broken()) return error;
  const uint64_t first = offset / layout_.range_bytes;
  const uint64_t end = (offset + n - 1) / layout_.range_bytes + 1;
  if (are_made(first, end)) return 0;
  const std::lock_guard guard(making_);
  if (are_made(first, end)) return 0;
  // Each call costs a sync, so each one marks twice as much as the one before.
  const uint64_t window = uint64_t(1) << std::min(calls_, 62u);
  const uint64_t from = first / window * window;
  const uint64_t to = std::min(ranges_, ((end - 1) / window + 1) * window);
  for (uint64_t page = from / kPageRanges; page <= (to - 1) / kPageRanges; ++page) {
    if (const int error = write_page(page, from, to)) return error;
  }
  if (fdatasync(fd_) != 0) {
    // Linux drops pages that it could not write. A second sync would then succeed without them.
    const int error = errno;
    break_off(error);
    return error;
  }
  ++calls_;
  any_.store(true, std::memory_order_release);
  for (uint64_t range = from; range != to; ++range) {
    // Release: see above.
    marks_[range / kWordBits].fetch_or(uint64_t(1) << range % kWordBits, std::memory_order_release);
  }
  return 0;
}

// Writes a page with the marks that there are, and those of [first, end).
int ImageMarks::write_page(uint64_t index, uint64_t first, uint64_t end) const {
  Page page;
  page.index = index;
  page.generation = generation_;
  page.identity = identity_;
  for (uint64_t i = 0; i != kPageWords; ++i) {
    const uint64_t word = index * kPageWords + i;
    page.marks[i] = marks_[word].load(std::memory_order_relaxed);
    if (!older_.empty()) page.marks[i] |= older_[word];
  }
  const uint64_t begin = index * kPageRanges;
  for (uint64_t range = std::max(first, begin); range != std::min(end, begin + kPageRanges);
       ++range) {
    page.marks[(range - begin) / kWordBits] |= uint64_t(1) << (range - begin) % kWordBits;
  }
  page.checksum = crc32c(0, &page, sizeof page);
  return write_fully(fd_, &page, sizeof page, layout_.begin + index * kPageBytes);
}

void ImageMarks::begin(uint64_t generation) {
  const std::lock_guard guard(making_);
  if (generation == generation_) return;
  generation_ = generation;
  calls_ = 0;
  older_.resize(marks_.size());
  for (size_t i = 0; i != marks_.size(); ++i) {
    older_[i] |= marks_[i].exchange(0, std::memory_order_relaxed);
  }
  any_.store(false, std::memory_order_release);
}

void ImageMarks::forget_older() {
  const std::lock_guard guard(making_);
  older_.clear();
}

}  // namespace fw::native
