// PRP entries and lists (NVM Express Base Specification 2.0, section 4.1.1), and copies; see
// command_memory.h.
#include "nvme/software/command_memory.h"

#include <algorithm>
#include <cerrno>

#include "flashwarp/base/atomic.cuh"

namespace fw::native {
namespace {

// PRP addresses are dword aligned, list pointers qword aligned.
constexpr uint64_t kAddressMask = 3;
constexpr uint64_t kListMask = 7;

}  // namespace

CommandMemory::CommandMemory(const ControllerContext& context)
    : context_(context), storage_(*context.storage) {
  segments_.reserve(context.max_transfer_bytes / context.page_bytes + 2);
}

uint16_t CommandMemory::append(uint64_t address, uint64_t nbytes) {
  if (!context_.regions.contains(address, nbytes)) return nvme::kDataTransferError;
  auto* start = reinterpret_cast<std::byte*>(address);
  if (!segments_.empty() && segments_.back().address + segments_.back().nbytes == start) {
    segments_.back().nbytes += nbytes;
  } else {
    segments_.push_back({start, nbytes});
  }
  return nvme::kSuccess;
}

// Walks a list from `list` to the end of its page. If more pages remain, its last entry points to
// the next list. This ends, because each entry except that link takes a page of the transfer, and
// each list but the first begins at a page and so has more than the link.
uint16_t CommandMemory::walk_list(uint64_t list, uint64_t remaining) {
  const uint64_t page_bytes = context_.page_bytes;
  if ((list & kListMask) != 0) return nvme::kPrpOffsetInvalid;
  while (remaining != 0) {
    const uint64_t entries = (page_bytes - (list & (page_bytes - 1))) / sizeof(uint64_t);
    const uint64_t pages = (remaining + page_bytes - 1) / page_bytes;
    const uint64_t used = std::min(entries, pages);
    if (!context_.regions.contains(list, used * sizeof(uint64_t))) return nvme::kDataTransferError;
    const auto* entry = reinterpret_cast<const uint64_t*>(list);
    const uint64_t data_entries = pages > entries ? entries - 1 : pages;
    for (uint64_t i = 0; i < data_entries; ++i) {
      const uint64_t address = entry[i];
      if ((address & (page_bytes - 1)) != 0) return nvme::kPrpOffsetInvalid;
      const uint64_t step = std::min(remaining, page_bytes);
      if (uint16_t status = append(address, step)) return status;
      remaining -= step;
    }
    if (remaining == 0) break;
    list = entry[entries - 1];
    if ((list & (page_bytes - 1)) != 0) return nvme::kPrpOffsetInvalid;
  }
  return nvme::kSuccess;
}

uint16_t CommandMemory::walk(const nvme::command& entry, uint64_t nbytes) {
  const uint64_t page_bytes = context_.page_bytes;
  segments_.clear();
  if ((entry.prp1 & kAddressMask) != 0) return nvme::kPrpOffsetInvalid;
  const uint64_t first = std::min(nbytes, page_bytes - (entry.prp1 & (page_bytes - 1)));
  if (uint16_t status = append(entry.prp1, first)) return status;
  const uint64_t remaining = nbytes - first;
  if (remaining == 0) return nvme::kSuccess;
  if (remaining > page_bytes) return walk_list(entry.prp2, remaining);
  if ((entry.prp2 & (page_bytes - 1)) != 0) return nvme::kPrpOffsetInvalid;
  return append(entry.prp2, remaining);
}

// Calls move(address, done, nbytes) for each part of the bytes from `offset` on, until one call
// returns an error.
template <typename Move>
int CommandMemory::for_each_part(uint64_t offset, uint64_t nbytes, Move move) const {
  uint64_t done = 0;
  for (const Segment& segment : segments_) {
    if (done == nbytes) break;
    if (offset >= segment.nbytes) {
      offset -= segment.nbytes;
      continue;
    }
    const uint64_t step = std::min(nbytes - done, segment.nbytes - offset);
    if (int error = move(segment.address + offset, done, step)) return error;
    done += step;
    offset = 0;
  }
  return 0;
}

int CommandMemory::read(const ByteRange& range, bool may_wait, IoFailure& failure) {
  const auto move = [&](std::byte* memory, uint64_t done, uint64_t step) {
    const uint64_t from = range.offset + done;
    const int error = storage_.read_nowait(from, memory, step, &failure);
    return error == EAGAIN && may_wait ? storage_.read(from, memory, step, &failure) : error;
  };
  if (int error = for_each_part(0, range.take, move)) return error;
  zero_tail(range);
  return 0;
}

int CommandMemory::write(const ByteRange& range, bool durable, IoFailure& failure) {
  const auto move = [&](std::byte* memory, uint64_t done, uint64_t step) {
    return storage_.write(range.offset + done, memory, step, &failure);
  };
  if (int error = for_each_part(0, range.take, move)) return error;
  return durable ? storage_.flush_range(range.offset, range.take, &failure) : 0;
}

void CommandMemory::zero_tail(const ByteRange& range) {
  for_each_part(range.take, range.total - range.take, [](std::byte* memory, uint64_t, uint64_t n) {
    atomic::fill_plain(memory, 0, n);
    return 0;
  });
}

void CommandMemory::copy_to(uint64_t offset, const void* data, uint64_t nbytes) {
  auto* source = static_cast<const std::byte*>(data);
  for_each_part(offset, nbytes, [source](std::byte* memory, uint64_t done, uint64_t step) {
    atomic::copy_plain(memory, source + done, step);
    return 0;
  });
}

void CommandMemory::copy_from(uint64_t offset, void* data, uint64_t nbytes) const {
  auto* target = static_cast<std::byte*>(data);
  for_each_part(offset, nbytes, [target](std::byte* memory, uint64_t done, uint64_t step) {
    atomic::copy_plain(target + done, memory, step);
    return 0;
  });
}

}  // namespace fw::native
