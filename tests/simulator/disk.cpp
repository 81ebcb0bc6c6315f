#include "disk.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "flashwarp/base/atomic.cuh"
#include "storage/file_io.h"

namespace fw::simulator {
namespace {

// Descriptors of disks are numbers that no process has open; slot i is descriptor kFirst + i.
constexpr uint32_t kFirstDescriptor = 1 << 20;
std::vector<Disk*> open_disks;

uint32_t open_descriptor(Disk* disk) {
  const auto free = std::find(open_disks.begin(), open_disks.end(), nullptr);
  const uint32_t index = uint32_t(free - open_disks.begin());
  if (free == open_disks.end()) open_disks.push_back(nullptr);
  open_disks[index] = disk;
  return kFirstDescriptor + index;
}

Disk& disk_of(int descriptor) { return *open_disks[uint32_t(descriptor) - kFirstDescriptor]; }

}  // namespace

Disk::Disk(char* data, uint64_t nbytes, char* mapped, const Faults& faults, uint64_t seed)
    : Storage(nbytes, true),
      data_(reinterpret_cast<std::byte*>(data)),
      mapped_(reinterpret_cast<std::byte*>(mapped)),
      faults_(faults),
      random_(seed, 3),
      descriptor_(open_descriptor(this)) {}

Disk::~Disk() { open_disks[descriptor_ - kFirstDescriptor] = nullptr; }

int Disk::error(bool is_write) {
  if (faults_.errors == 0 || !random_.chance(faults_.errors)) return 0;
  constexpr int kWriteErrors[] = {EIO, ENOSPC, EIO};
  return is_write ? random_.pick(kWriteErrors) : EIO;
}

int Disk::read(uint64_t offset, void* data, size_t n, native::IoFailure*) {
  if (int status = check_range(offset, n)) return status;
  if (int status = error(false)) return status;
  atomic::copy_plain(data, data_ + offset, n);
  return 0;
}

int Disk::read_nowait(uint64_t offset, void* data, size_t n, native::IoFailure* failure) {
  return waits() ? EAGAIN : read(offset, data, n, failure);
}

int Disk::write(uint64_t offset, const void* data, size_t n, native::IoFailure*) {
  if (int status = check_write(offset, n)) return status;
  const int status = error(true);
  // A write that fails may have written its beginning.
  const size_t written = status == 0 ? n : random_.below(uint32_t(n / 8)) * 8;
  atomic::copy_plain(data_ + offset, data, written);
  return status;
}

bool Disk::resolve(const native::Request& request, native::PieceList& pieces) {
  // One piece or two, through the page cache or past it.
  constexpr uint32_t kAlignments[] = {1, 512, 4096};
  const uint32_t alignment = random_.pick(kAlignments);
  const uint32_t cut = request.nbytes >= 16 && random_.chance(30) ? request.nbytes / 16 * 8 : 0;
  for (uint32_t from = 0; from < request.nbytes;) {
    const uint32_t to = from < cut ? cut : request.nbytes;
    native::Piece piece;
    piece.fd = piece.buffered_fd = int(descriptor_);
    piece.alignment = request.is_write ? 1 : alignment;
    piece.nbytes = to - from;
    piece.request_offset = request.request_offset + from;
    piece.file_offset = request.offset + from;
    piece.path = &name_;
    if (!pieces.add(piece)) return false;
    from = to;
  }
  return true;
}

bool Disk::resolve_flush(native::PieceList& pieces) {
  if (!waits()) return true;
  native::Piece piece;
  piece.fd = piece.buffered_fd = int(descriptor_);
  piece.path = &name_;
  return pieces.add(piece);
}

int Disk::flush(native::IoFailure*) { return error(true); }

int Disk::discard(uint64_t offset, uint64_t n, native::IoFailure* failure) {
  return write_zeroes(offset, n, failure);
}

int Disk::write_zeroes(uint64_t offset, uint64_t n, native::IoFailure*) {
  if (int status = check_write(offset, n)) return status;
  atomic::fill_plain(data_ + offset, 0, n);
  return 0;
}

int32_t Disk::transfer(const native::IoOperation& operation) {
  const bool is_write = operation.kind != native::IoOperation::Kind::kRead;
  const bool torn = faults_.torn != 0 && random_.chance(faults_.torn);
  // The kernel may have its own reasons to give up; the controller then does it by itself.
  constexpr int kOwnReasons[] = {EAGAIN, EINTR, ECANCELED};
  if (torn && random_.chance(30)) return -random_.pick(kOwnReasons);
  if (int status = error(is_write)) return -status;
  if (operation.kind == native::IoOperation::Kind::kSync || operation.offset >= nbytes()) return 0;
  uint32_t n = uint32_t(std::min<uint64_t>(operation.nbytes, nbytes() - operation.offset));
  if (torn) n = random_.below(n / 8 + 1) * 8;
  std::byte* there = data_ + operation.offset;
  if (is_write) {
    atomic::copy_plain(there, operation.memory, n);
  } else if (memory.contains(operation.memory)) {
    atomic::copy_plain(operation.memory, there, n);
  } else {
    // Into the controller's scratch, widened for alignment: it also reads neighbours that others
    // may be writing, and drops them.
    std::memcpy(operation.memory, there, n);
  }
  return int32_t(n);
}

void DiskEngine::submit(const native::IoOperation& operation) {
  waiting_.push_back({operation, disk_.draw_delay()});
  ++in_flight_;
}

uint32_t DiskEngine::reap(native::IoResult* results, uint32_t limit) {
  uint32_t count = 0;
  for (size_t i = 0; i < waiting_.size() && count < limit;) {
    if (waiting_[i].sweeps != 0) {
      --waiting_[i++].sweeps;
      continue;
    }
    const native::IoOperation operation = waiting_[i].operation;
    waiting_.erase(waiting_.begin() + ptrdiff_t(i));
    results[count++] = {operation.token, disk_.transfer(operation)};
    --in_flight_;
  }
  return count;
}

}  // namespace fw::simulator

// What the controller does by itself when an operation ended early. It stands in for file_io.cpp,
// which is not linked: descriptors of disks are not the kernel's. Defined by their whole names, so
// that a declaration that changes ends the build.
namespace {
void refuse_to_count(const size_t* moved) {
  if (moved != nullptr) fw::simulator::scheduler.fail("disks do not count the bytes they move");
}
}  // namespace

int fw::native::read_fully(int fd, void* data, size_t n, uint64_t offset, size_t* moved) {
  refuse_to_count(moved);
  return simulator::disk_of(fd).read(offset, data, n, nullptr);
}
int fw::native::write_fully(int fd, const void* data, size_t n, uint64_t offset, size_t* moved) {
  refuse_to_count(moved);
  return simulator::disk_of(fd).write(offset, data, n, nullptr);
}
