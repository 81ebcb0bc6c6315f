// Checks of maps, and transfers by them; see mapped_storage.h.
#include "storage/mapped_storage.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "base/alignment.h"

namespace fw::native {
namespace {

constexpr uint64_t kBlock = MappedStorage::kBlockBytes;

[[noreturn]] void refuse(const FileExtent& extent, const std::string& why) {
  throw std::invalid_argument("the extent of bytes [" + std::to_string(extent.logical) + ", +" +
                              std::to_string(extent.nbytes) + ") at byte " +
                              std::to_string(extent.physical) + " of the device " + why);
}

std::vector<FileExtent> checked(std::vector<FileExtent> extents, uint64_t nbytes,
                                uint64_t device_nbytes) {
  uint64_t end = 0;
  for (const FileExtent& extent : extents) {
    if (extent.logical != end) refuse(extent, "does not follow the one before it");
    if (extent.nbytes == 0 || !is_aligned(extent.physical | extent.nbytes, kBlock)) {
      refuse(extent, "is no whole number of blocks of 4096 bytes");
    }
    if (extent.physical > device_nbytes || extent.nbytes > device_nbytes - extent.physical) {
      refuse(extent, "ends beyond its " + std::to_string(device_nbytes) + " bytes");
    }
    end += extent.nbytes;  // at most the device's size for each, so it cannot wrap before `nbytes`
    if (end >= nbytes + kBlock) refuse(extent, "lies beyond the end of the file");
  }
  if (end < nbytes) {
    throw std::invalid_argument("the extents cover " + std::to_string(end) + " of " +
                                std::to_string(nbytes) + " bytes");
  }
  std::vector<FileExtent> places = extents;
  std::sort(places.begin(), places.end(),
            [](const auto& a, const auto& b) { return a.physical < b.physical; });
  for (size_t i = 1; i < places.size(); ++i) {
    if (places[i].physical < places[i - 1].physical + places[i - 1].nbytes) {
      refuse(places[i], "overlaps another");
    }
  }
  return extents;
}

std::shared_ptr<Storage> writable_enough(std::shared_ptr<Storage> device, bool writable) {
  device = require_storage(std::move(device));
  if (writable && !device->writable()) throw std::invalid_argument("the device takes no writes");
  return device;
}

}  // namespace

class MappedStorage::Turn {
 public:
  explicit Turn(MappedStorage& storage) : storage_(storage) {
    if (storage.in_forked_child()) {
      error_ = kForked;
      return;
    }
    const std::lock_guard guard(storage.turns_);
    error_ = storage.revoked_ ? kRevoked : 0;
    if (error_ == 0) ++storage.in_flight_;
  }
  ~Turn() {
    if (error_ != 0) return;
    const std::lock_guard guard(storage_.turns_);
    if (--storage_.in_flight_ == 0) storage_.none_in_flight_.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  int error() const { return error_; }

 private:
  MappedStorage& storage_;
  int error_;
};

MappedStorage::MappedStorage(std::shared_ptr<Storage> device, std::vector<FileExtent> extents,
                             uint64_t nbytes, bool writable, std::string name)
    : Storage(nbytes, writable),
      device_(writable_enough(std::move(device), writable)),
      extents_(checked(std::move(extents), nbytes, device_->nbytes())),
      name_(std::move(name)) {}

int MappedStorage::fail(int error, uint64_t offset, uint64_t n, IoFailure* failure) const {
  // The file's name and offset are what people know; the device's own are not told.
  if (error != 0 && failure != nullptr) *failure = {name_, offset, n};
  return error;
}

int MappedStorage::revoke(uint32_t limit_ms) {
  if (in_forked_child()) return 0;
  std::unique_lock guard(turns_);
  revoked_ = true;
  const auto limit = std::chrono::milliseconds(limit_ms);
  if (!none_in_flight_.wait_for(guard, limit, [&] { return in_flight_ == 0; })) return ETIMEDOUT;
  return writable() ? device_->flush(nullptr) : 0;
}

template <typename Act>
int MappedStorage::for_each_part(uint64_t offset, uint64_t n, Act act) const {
  uint64_t done = 0;
  while (done != n) {
    const uint64_t at = offset + done;
    // The last extent that does not begin behind it; the first begins at 0.
    const auto behind =
        std::upper_bound(extents_.begin(), extents_.end(), at,
                         [](uint64_t value, const auto& extent) { return value < extent.logical; });
    const FileExtent& extent = *std::prev(behind);
    const uint64_t inside = at - extent.logical;
    const uint64_t step = std::min(n - done, extent.nbytes - inside);
    if (const int error = act(extent.physical + inside, step, done)) return error;
    done += step;
  }
  return 0;
}

template <typename Act>
int MappedStorage::transfer(int refusal, uint64_t offset, uint64_t n, IoFailure* failure, Act act) {
  if (refusal != 0) return fail(refusal, offset, n, failure);
  const Turn turn(*this);
  return fail(turn.error() != 0 ? turn.error() : for_each_part(offset, n, act), offset, n, failure);
}

int MappedStorage::read(uint64_t offset, void* data, size_t n, IoFailure* failure) {
  const auto part = [&](uint64_t from, uint64_t step, uint64_t done) {
    return device_->read(from, static_cast<std::byte*>(data) + done, step, nullptr);
  };
  return transfer(check_range(offset, n), offset, n, failure, part);
}

int MappedStorage::write(uint64_t offset, const void* data, size_t n, IoFailure* failure) {
  const auto part = [&](uint64_t to, uint64_t step, uint64_t done) {
    return device_->write(to, static_cast<const std::byte*>(data) + done, step, nullptr);
  };
  return transfer(check_write(offset, n), offset, n, failure, part);
}

int MappedStorage::write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) {
  const auto part = [&](uint64_t to, uint64_t step, uint64_t) {
    return device_->write_zeroes(to, step, nullptr);
  };
  return transfer(check_write(offset, n), offset, n, failure, part);
}

int MappedStorage::flush(IoFailure* failure) {
  const Turn turn(*this);
  if (turn.error() != 0) return fail(turn.error(), 0, nbytes(), failure);
  return fail(writable() ? device_->flush(nullptr) : 0, 0, nbytes(), failure);
}

int MappedStorage::discard(uint64_t offset, uint64_t n, IoFailure* failure) {
  return fail(check_write(offset, n), offset, n, failure);
}

Description MappedStorage::describe() const {
  Description description = describe_as("file by its block map", name_);
  description.add("extents", uint64_t(extents_.size()));
  description.children.push_back(device_->describe());
  return description;
}

}  // namespace fw::native
