// Range checks shared by all storages, and the storage that is plain host memory.
#include "storage/storage.h"

#include <cerrno>
#include <cstring>
#include <ctime>

#include "flashwarp/base/atomic.cuh"
#include "io/io_engine.h"

namespace fw::native {

static_assert(kTruncated == ENODATA);
static_assert(kReplaced == ESTALE);
static_assert(kForked == ENOTRECOVERABLE);
static_assert(kOutOfRange == ERANGE);

std::string error_text(int error) {
  if (error == kTruncated) return "truncated: the file is shorter than it was";
  if (error == kReplaced) return "replaced: another file has its name, and what was written none";
  return std::strerror(error);
}

int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

int Storage::validate(uint64_t offset, uint64_t n, IoFailure*) {
  if (int status = check_range(offset, n)) return status;
  refresh_backing(monotonic_ns());
  const uint64_t backed = backed_nbytes();
  return offset <= backed && n <= backed - offset ? 0 : kTruncated;
}

std::unique_ptr<IoEngine> Storage::decorate(std::unique_ptr<IoEngine> engine) { return engine; }

int Storage::check_range(uint64_t offset, uint64_t n) const {
  if (in_forked_child()) return kForked;
  return offset <= nbytes_ && n <= nbytes_ - offset ? 0 : kOutOfRange;
}

int Storage::check_write(uint64_t offset, uint64_t n) const {
  if (!writable_) return EROFS;
  return check_range(offset, n);
}

MemoryStorage::MemoryStorage(void* address, uint64_t nbytes, bool writable)
    : Storage(nbytes, writable), base_(static_cast<std::byte*>(address)) {
  if (address == nullptr && nbytes != 0) throw std::invalid_argument("memory address is null");
}

int MemoryStorage::read(uint64_t offset, void* data, size_t n, IoFailure*) {
  if (int status = check_range(offset, n)) return status;
  atomic::copy_plain(data, base_ + offset, n);
  return 0;
}

int MemoryStorage::read_nowait(uint64_t offset, void* data, size_t n, IoFailure* failure) {
  return read(offset, data, n, failure);
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

int MemoryStorage::discard(uint64_t offset, uint64_t n, IoFailure* failure) {
  return write_zeroes(offset, n, failure);
}

int MemoryStorage::write_zeroes(uint64_t offset, uint64_t n, IoFailure*) {
  if (int status = check_write(offset, n)) return status;
  atomic::fill_plain(base_ + offset, 0, n);
  return 0;
}

Description MemoryStorage::describe() const {
  Description description;
  description.add("kind", std::string("memory"));
  description.add("path", name_);
  description.add("nbytes", nbytes());
  description.add("writable", writable());
  description.add("in_place", true);
  return description;
}

}  // namespace fw::native
