// Host memory; see memory_storage.h.
#include "storage/memory_storage.h"

#include "flashwarp/base/atomic.cuh"

namespace fw::native {

MemoryStorage::MemoryStorage(void* address, uint64_t nbytes, bool writable)
    : Storage(nbytes, writable), base_(static_cast<std::byte*>(address)) {
  if (address == nullptr && nbytes != 0) throw std::invalid_argument("memory address is null");
}

int MemoryStorage::read(uint64_t offset, void* data, size_t n, IoFailure*) {
  if (int status = check_range(offset, n)) return status;
  atomic::copy_plain(data, base_ + offset, n);
  return 0;
}

int MemoryStorage::write(uint64_t offset, const void* data, size_t n, IoFailure*) {
  if (int status = check_write(offset, n)) return status;
  atomic::copy_plain(base_ + offset, data, n);
  return 0;
}

bool MemoryStorage::resolve(const Request& request, PieceList& pieces) {
  Piece piece;
  piece.nbytes = request.nbytes;
  piece.request_offset = request.request_offset;
  piece.file_offset = request.offset;
  piece.memory = base_ + request.offset;
  piece.path = &name_;
  return pieces.add(piece);
}

int MemoryStorage::write_zeroes(uint64_t offset, uint64_t n, IoFailure*) {
  if (int status = check_write(offset, n)) return status;
  atomic::fill_plain(base_ + offset, 0, n);
  return 0;
}

Description MemoryStorage::describe() const {
  Description description = describe_as("memory", name_);
  description.add("in_place", true);
  return description;
}

}  // namespace fw::native
