// Transfers by whole blocks; see namespace_storage.h.
#include "vfio/namespace_storage.h"

#include <algorithm>
#include <cstring>

#include "base/alignment.h"

namespace fw::native::vfio {
namespace {

int error_of(uint16_t status) {
  switch (status) {
    case nvme::kSuccess:
      return 0;
    case nvme::kCapacityExceeded:
      return ENOSPC;
    case nvme::kNamespaceWriteProtected:
      return EROFS;
    case nvme::kCommandAborted:
      return ECANCELED;
    default:
      return EIO;
  }
}

int error_of(const DriveError& error) {
  if (error.kind == DriveError::Kind::kTimeout) return ETIMEDOUT;
  return error.kind == DriveError::Kind::kLost ? ENODEV : EIO;
}

// The most blocks of a Write Zeroes or Deallocate at a time.
constexpr uint64_t kRangeBlocksMax = nvme::kLbaCountMax;

}  // namespace

NamespaceStorage::NamespaceStorage(std::shared_ptr<Drive> drive, uint32_t nsid,
                                   const NamespaceIdentity& identity, bool writable)
    : Storage(identity.lbas << identity.lba_shift, writable),
      drive_(std::move(drive)),
      nsid_(nsid),
      lba_shift_(identity.lba_shift),
      name_(drive_->name() + "/n" + std::to_string(nsid)) {}

int NamespaceStorage::submit(const nvme::command& entry, uint64_t data_bytes) {
  try {
    return error_of(drive_->io(entry, data_bytes));
  } catch (const DriveError& error) {
    return error_of(error);
  }
}

int NamespaceStorage::run(uint8_t opcode, uint64_t offset, uint64_t nbytes, uint64_t data_bytes,
                          IoFailure* failure) {
  nvme::command entry =
      nvme::block_command(opcode, 0, offset >> lba_shift_, uint32_t(nbytes >> lba_shift_), 0, 0);
  entry.nsid = nsid_;
  const int error = submit(entry, data_bytes);
  if (error != 0 && failure != nullptr) *failure = {name_, offset, nbytes};
  return error;
}

// Calls act(begin, skip, part) for parts of at most `most` bytes, which `act` may shorten. `begin`
// is where the first block of a part begins, `skip` bytes before the part.
template <typename Act>
int NamespaceStorage::for_each_part(uint64_t offset, uint64_t n, uint64_t most, Act act) {
  const uint64_t block = uint64_t(1) << lba_shift_;
  const std::lock_guard guard(drive_->io_lock());
  while (n != 0) {
    const uint64_t begin = round_down(offset, block);
    const uint64_t skip = offset - begin;
    uint64_t part = std::min(n, most - skip);
    if (const int error = act(begin, skip, part); error != 0) return error;
    offset += part;
    n -= part;
  }
  return 0;
}

int NamespaceStorage::read(uint64_t offset, void* data, size_t n, IoFailure* failure) {
  if (const int error = check_range(offset, n)) return error;
  auto* to = static_cast<std::byte*>(data);
  return for_each_part(offset, n, drive_->buffer_bytes(), [&](auto begin, auto skip, auto part) {
    const uint64_t whole = round_up(skip + part, uint64_t(1) << lba_shift_);
    if (const int error = run(nvme::kRead, begin, whole, whole, failure)) return error;
    std::memcpy(to, drive_->buffer() + skip, part);
    to += part;
    return 0;
  });
}

int NamespaceStorage::write(uint64_t offset, const void* data, size_t n, IoFailure* failure) {
  if (const int error = check_write(offset, n)) return error;
  const auto* from = static_cast<const std::byte*>(data);
  return for_each_part(offset, n, drive_->buffer_bytes(), [&](auto begin, auto skip, auto part) {
    const int error = write_part(begin, skip, from, part, failure);
    from += part;
    return error;
  });
}

// Writes part of some blocks; null `data`: zeros. What else they hold is read first.
int NamespaceStorage::write_part(uint64_t begin, uint64_t skip, const void* data, uint64_t n,
                                 IoFailure* failure) {
  const uint64_t whole = round_up(skip + n, uint64_t(1) << lba_shift_);
  if (skip != 0 || whole != n) {
    if (const int error = run(nvme::kRead, begin, whole, whole, failure)) return error;
  }
  if (data != nullptr) {
    std::memcpy(drive_->buffer() + skip, data, n);
  } else {
    std::memset(drive_->buffer() + skip, 0, n);
  }
  return run(nvme::kWrite, begin, whole, whole, failure);
}

int NamespaceStorage::flush(IoFailure* failure) {
  if (in_forked_child()) return kForked;
  const std::lock_guard guard(drive_->io_lock());
  nvme::command entry = {};
  entry.opcode_cid = nvme::kFlush;
  entry.nsid = nsid_;
  const int error = submit(entry, 0);
  if (error != 0 && failure != nullptr) *failure = {name_, 0, 0};
  return error;
}

int NamespaceStorage::discard(uint64_t offset, uint64_t n, IoFailure* failure) {
  if (const int error = check_write(offset, n)) return error;
  if (!drive_->identity().has_dataset_management) return 0;  // a hint
  const uint64_t block = uint64_t(1) << lba_shift_;
  const uint64_t begin = round_up(offset, block), end = round_down(offset + n, block);
  const std::lock_guard guard(drive_->io_lock());
  for (uint64_t at = begin; at < end;) {
    const uint64_t blocks = std::min((end - at) >> lba_shift_, kRangeBlocksMax);
    const nvme::dataset_range range = {0, uint32_t(blocks), at >> lba_shift_};
    std::memcpy(drive_->buffer(), &range, sizeof range);
    nvme::command entry = {};
    entry.opcode_cid = nvme::kDatasetManagement;
    entry.nsid = nsid_;
    entry.cdw11 = nvme::kAttributeDeallocate;
    if (const int error = submit(entry, sizeof range); error != 0) {
      if (failure != nullptr) *failure = {name_, at, blocks << lba_shift_};
      return error;
    }
    at += blocks << lba_shift_;
  }
  return 0;
}

int NamespaceStorage::write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) {
  if (const int error = check_write(offset, n)) return error;
  const bool has_command = drive_->identity().has_write_zeroes;
  const uint64_t most = has_command ? kRangeBlocksMax << lba_shift_ : drive_->buffer_bytes();
  const uint64_t block = uint64_t(1) << lba_shift_;
  return for_each_part(offset, n, most, [&](uint64_t begin, uint64_t skip, uint64_t& part) {
    const bool whole = skip == 0 && part >= block;
    if (has_command && whole) {
      part = round_down(part, block);
      return run(nvme::kWriteZeroes, begin, part, 0, failure);
    }
    part = std::min(part, (has_command ? block : drive_->buffer_bytes()) - skip);
    return write_part(begin, skip, nullptr, part, failure);
  });
}

Description NamespaceStorage::describe() const {
  Description d = describe_as("namespace of a drive", name_);
  d.add("lba_bytes", uint64_t(1) << lba_shift_);
  d.add("model", drive_->identity().model);
  d.add("serial", drive_->identity().serial);
  return d;
}

}  // namespace fw::native::vfio
