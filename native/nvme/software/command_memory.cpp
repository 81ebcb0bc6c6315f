#include "nvme/software/command_memory.h"

#include <algorithm>
#include <cerrno>

#include "flashwarp/base/atomic.cuh"

namespace fw::native {

CommandMemory::CommandMemory(const ControllerContext& context)
    : context_(context), storage_(*context.storage) {
  segments_.reserve(context.max_transfer_bytes / context.page_bytes + 2);
}

uint16_t CommandMemory::walk(const nvme::command& entry, uint64_t nbytes) {
  return walk_prps(entry, nbytes, context_.page_bytes, context_.regions, segments_);
}

int CommandMemory::read(const ByteRange& range, bool may_wait, IoFailure& failure) {
  uint64_t done = 0;
  for (const Segment& segment : segments_) {
    const uint64_t step = std::min<uint64_t>(segment.nbytes, range.take - done);
    if (step == 0) break;
    const uint64_t from = range.offset + done;
    int error = storage_.read_nowait(from, segment.address, step, &failure);
    if (error == EAGAIN && may_wait) error = storage_.read(from, segment.address, step, &failure);
    if (error != 0) return error;
    done += step;
  }
  zero_tail(range);
  return 0;
}

int CommandMemory::write(const ByteRange& range, bool durable, IoFailure& failure) {
  uint64_t done = 0;
  for (const Segment& segment : segments_) {
    const uint64_t step = std::min<uint64_t>(segment.nbytes, range.take - done);
    if (step == 0) break;
    if (int error = storage_.write(range.offset + done, segment.address, step, &failure)) {
      return error;
    }
    done += step;
  }
  return durable ? storage_.flush_range(range.offset, range.take, &failure) : 0;
}

void CommandMemory::zero_tail(const ByteRange& range) {
  if (range.take == range.total) return;
  uint64_t skip = range.take;
  for (const Segment& segment : segments_) {
    if (skip < segment.nbytes) atomic::fill_plain(segment.address + skip, 0, segment.nbytes - skip);
    skip -= std::min(skip, segment.nbytes);
  }
}

// Calls move(address, done, nbytes) for each part of the bytes from `offset` on.
template <typename Move>
void CommandMemory::for_each_part(uint64_t offset, uint64_t nbytes, Move move) const {
  uint64_t done = 0;
  for (const Segment& segment : segments_) {
    if (done == nbytes) return;
    if (offset >= segment.nbytes) {
      offset -= segment.nbytes;
      continue;
    }
    const uint64_t step = std::min(nbytes - done, segment.nbytes - offset);
    move(segment.address + offset, done, step);
    done += step;
    offset = 0;
  }
}

void CommandMemory::copy_to(uint64_t offset, const void* data, uint64_t nbytes) {
  auto* source = static_cast<const std::byte*>(data);
  for_each_part(offset, nbytes, [source](std::byte* memory, uint64_t done, uint64_t step) {
    atomic::copy_plain(memory, source + done, step);
  });
}

void CommandMemory::copy_from(uint64_t offset, void* data, uint64_t nbytes) const {
  auto* target = static_cast<std::byte*>(data);
  for_each_part(offset, nbytes, [target](std::byte* memory, uint64_t done, uint64_t step) {
    atomic::copy_plain(target + done, memory, step);
  });
}

}  // namespace fw::native
