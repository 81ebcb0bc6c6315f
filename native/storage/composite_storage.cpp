// Striping, concatenation and replication; see composite_storage.h.
#include "storage/composite_storage.h"

#include <algorithm>
#include <cerrno>

#include "io/io_engine.h"

namespace fw::native {
namespace {

// A stripe smaller than a page would split every line and break direct I/O.
constexpr uint32_t kStripeBytesMin = 4096;

constexpr uint64_t kBlockBytes = 512;

void require_members(const StorageList& members) {
  if (members.empty()) throw std::invalid_argument("at least one member storage is needed");
  for (const auto& member : members) {
    if (member == nullptr) throw std::invalid_argument("a member storage is None");
  }
}

bool all_writable(const StorageList& members) {
  return std::all_of(members.begin(), members.end(), [](auto& m) { return m->writable(); });
}

uint64_t striped_nbytes(const StorageList& members, uint32_t stripe_bytes, uint64_t asked) {
  require_members(members);
  if (stripe_bytes < kStripeBytesMin || stripe_bytes % kStripeBytesMin != 0) {
    throw std::invalid_argument("stripe_bytes must be a multiple of 4096");
  }
  uint64_t smallest = members.front()->nbytes();
  for (const auto& member : members) smallest = std::min(smallest, member->nbytes());
  const uint64_t held = smallest / stripe_bytes * stripe_bytes * members.size();
  if (asked > held) {
    throw std::invalid_argument("nbytes=" + std::to_string(asked) + ", but whole stripes of " +
                                std::to_string(stripe_bytes) + " bytes on all members hold " +
                                std::to_string(held));
  }
  // A member of one block stands for an empty file.
  if (held == 0 && smallest > kBlockBytes) {
    throw std::invalid_argument("the smallest member has " + std::to_string(smallest) +
                                " bytes, less than a stripe of " + std::to_string(stripe_bytes) +
                                ": give a shorter stripe");
  }
  return asked != 0 ? asked : held;
}

uint64_t concatenated_nbytes(const StorageList& members) {
  require_members(members);
  uint64_t sum = 0;
  for (const auto& member : members) {
    if (member->nbytes() > uint64_t(INT64_MAX) - sum) {
      throw std::invalid_argument("the members have more than 2^63 - 1 bytes together");
    }
    sum += member->nbytes();
  }
  return sum;
}

uint64_t replicated_nbytes(const StorageList& members) {
  require_members(members);
  for (const auto& member : members) {
    if (member->nbytes() != members.front()->nbytes()) {
      throw std::invalid_argument("replicas differ in size: one has " +
                                  std::to_string(members.front()->nbytes()) + " bytes, another " +
                                  std::to_string(member->nbytes()));
    }
  }
  return members.front()->nbytes();
}

std::byte* at(void* data, uint64_t offset) { return static_cast<std::byte*>(data) + offset; }
const std::byte* at(const void* data, uint64_t offset) {
  return static_cast<const std::byte*>(data) + offset;
}

}  // namespace

CompositeStorage::CompositeStorage(StorageList members, uint64_t nbytes)
    : Storage(nbytes, all_writable(members)), members_(std::move(members)) {}

template <typename Act>
int CompositeStorage::on_all(IoFailure* failure, Act act) const {
  int first_error = 0;
  for (const auto& member : members_) {
    const int status = act(*member, first_error == 0 ? failure : nullptr);
    if (first_error == 0) first_error = status;
  }
  return first_error;
}

bool CompositeStorage::writes_inline() const {
  return std::all_of(members_.begin(), members_.end(), [](auto& m) { return m->writes_inline(); });
}

bool CompositeStorage::resolve_flush(PieceList& pieces) {
  return std::all_of(members_.begin(), members_.end(),
                     [&](auto& member) { return member->resolve_flush(pieces); });
}

int CompositeStorage::discard(uint64_t offset, uint64_t n, IoFailure* failure) {
  const int status = check_write(offset, n);
  return status != 0 ? status : clear(&Storage::discard, offset, n, failure);
}

int CompositeStorage::write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) {
  const int status = check_write(offset, n);
  return status != 0 ? status : clear(&Storage::write_zeroes, offset, n, failure);
}

int CompositeStorage::flush(IoFailure* failure) {
  return on_all(failure, [](Storage& member, IoFailure* first) { return member.flush(first); });
}

void CompositeStorage::collect_files(std::vector<int>& files) const {
  for (const auto& member : members_) member->collect_files(files);
}

bool CompositeStorage::takes_nvme_commands() const {
  return std::any_of(members_.begin(), members_.end(),
                     [](auto& member) { return member->takes_nvme_commands(); });
}

std::unique_ptr<IoEngine> CompositeStorage::decorate(std::unique_ptr<IoEngine> engine) {
  for (const auto& member : members_) engine = member->decorate(std::move(engine));
  return engine;
}

Description CompositeStorage::describe_members(const char* kind) const {
  Description description = describe_as(kind);
  for (const auto& member : members_) description.children.push_back(member->describe());
  return description;
}

template <typename Visit>
int PartitionedStorage::for_each_part(uint64_t offset, uint64_t n, Visit visit) const {
  uint64_t done = 0;
  while (done != n) {
    const Place place = locate(offset + done);
    const uint64_t step = std::min(n - done, place.run_bytes);
    if (int status = visit(*members_[place.member], place.offset, step, done)) return status;
    done += step;
  }
  return 0;
}

int PartitionedStorage::read(uint64_t offset, void* data, size_t n, IoFailure* failure) {
  if (int status = check_range(offset, n)) return status;
  return for_each_part(offset, n, [&](Storage& member, uint64_t from, uint64_t step, uint64_t to) {
    return member.read(from, at(data, to), step, failure);
  });
}

int PartitionedStorage::read_nowait(uint64_t offset, void* data, size_t n, IoFailure* failure) {
  if (int status = check_range(offset, n)) return status;
  return for_each_part(offset, n, [&](Storage& member, uint64_t from, uint64_t step, uint64_t to) {
    return member.read_nowait(from, at(data, to), step, failure);
  });
}

int PartitionedStorage::write(uint64_t offset, const void* data, size_t n, IoFailure* failure) {
  if (int status = check_write(offset, n)) return status;
  return for_each_part(offset, n, [&](Storage& member, uint64_t to, uint64_t step, uint64_t from) {
    return member.write(to, at(data, from), step, failure);
  });
}

bool PartitionedStorage::resolve(const Request& request, PieceList& pieces) {
  const auto add = [&](Storage& member, uint64_t from, uint64_t step, uint64_t done) {
    Request part = request;
    part.offset = from;
    part.nbytes = uint32_t(step);
    part.request_offset = request.request_offset + uint32_t(done);
    return member.resolve(part, pieces) ? 0 : E2BIG;
  };
  return for_each_part(request.offset, request.nbytes, add) == 0;
}

uint32_t PartitionedStorage::replica_count() const {
  uint32_t count = 1;
  for (const auto& member : members_) count = std::max(count, member->replica_count());
  return count;
}

int PartitionedStorage::clear(Clear act, uint64_t offset, uint64_t n, IoFailure* failure) {
  return for_each_part(offset, n, [&](Storage& member, uint64_t from, uint64_t step, uint64_t) {
    return (member.*act)(from, step, failure);
  });
}

StripedStorage::StripedStorage(StorageList members, uint32_t stripe_bytes, uint64_t nbytes)
    : PartitionedStorage(members, striped_nbytes(members, stripe_bytes, nbytes)),
      stripe_bytes_(stripe_bytes) {}

StripedStorage::Place StripedStorage::locate(uint64_t offset) const {
  const uint64_t stripe = offset / stripe_bytes_;
  const uint64_t inside = offset % stripe_bytes_;
  const uint64_t row = stripe / members_.size();
  return {stripe % members_.size(), row * stripe_bytes_ + inside, stripe_bytes_ - inside};
}

Description StripedStorage::describe() const {
  Description description = describe_members("striped");
  description.add("stripe_bytes", uint64_t(stripe_bytes_));
  return description;
}

ConcatenatedStorage::ConcatenatedStorage(StorageList members)
    : PartitionedStorage(members, concatenated_nbytes(members)) {
  uint64_t end = 0;
  for (const auto& member : members_) ends_.push_back(end += member->nbytes());
}

ConcatenatedStorage::Place ConcatenatedStorage::locate(uint64_t offset) const {
  // The first member that ends behind the byte; so members without bytes are passed over.
  const auto found = std::upper_bound(ends_.begin(), ends_.end(), offset);
  const size_t member = size_t(found - ends_.begin());
  const uint64_t begin = member == 0 ? 0 : ends_[member - 1];
  return {member, offset - begin, *found - offset};
}

Description ConcatenatedStorage::describe() const { return describe_members("concatenated"); }

ReplicatedStorage::ReplicatedStorage(StorageList members)
    : CompositeStorage(members, replicated_nbytes(members)) {}

int ReplicatedStorage::read(uint64_t offset, void* data, size_t n, IoFailure* failure) {
  if (int status = check_range(offset, n)) return status;
  // Relaxed: the turn spreads load, it orders nothing.
  const uint32_t turn = turn_.fetch_add(1, std::memory_order_relaxed);
  int status = EIO;
  for (uint32_t attempt = 0; attempt < members_.size() && status != 0; ++attempt) {
    status = members_[(turn + attempt) % members_.size()]->read(offset, data, n, failure);
  }
  return status;
}

int ReplicatedStorage::read_nowait(uint64_t offset, void* data, size_t n, IoFailure* failure) {
  if (int status = check_range(offset, n)) return status;
  const uint32_t turn = turn_.fetch_add(1, std::memory_order_relaxed);
  const int status = members_[turn % members_.size()]->read_nowait(offset, data, n, failure);
  // An error here is found again, and survived, by the waiting path.
  return status == 0 ? 0 : EAGAIN;
}

int ReplicatedStorage::write(uint64_t offset, const void* data, size_t n, IoFailure* failure) {
  if (int status = check_write(offset, n)) return status;
  return on_all(failure, [&](Storage& member, IoFailure* first) {
    return member.write(offset, data, n, first);
  });
}

bool ReplicatedStorage::resolve(const Request& request, PieceList& pieces) {
  if (request.is_write) {
    return std::all_of(members_.begin(), members_.end(),
                       [&](auto& member) { return member->resolve(request, pieces); });
  }
  Request one = request;
  one.attempt = 0;
  return members_[(request.turn + request.attempt) % members_.size()]->resolve(one, pieces);
}

int ReplicatedStorage::clear(Clear act, uint64_t offset, uint64_t n, IoFailure* failure) {
  return on_all(failure,
                [&](Storage& member, IoFailure* first) { return (member.*act)(offset, n, first); });
}

Description ReplicatedStorage::describe() const { return describe_members("replicated"); }

}  // namespace fw::native
