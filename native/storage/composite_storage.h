// Storages made of storages: striped over several, one behind another, or copied to several.
//
// They own no bytes. They translate offsets and call their members, so every guarantee of storage.h
// that the members give holds here too.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "storage/storage.h"

namespace fw::native {

using StorageList = std::vector<std::shared_ptr<Storage>>;

class CompositeStorage : public Storage {
 public:
  bool writes_inline() const override;
  bool resolve_flush(PieceList& pieces) override;
  int flush(IoFailure* failure) override;
  int discard(uint64_t offset, uint64_t n, IoFailure* failure) override;
  int write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) override;
  void collect_files(std::vector<int>& files) const override;
  bool takes_nvme_commands() const override;
  std::unique_ptr<IoEngine> decorate(std::unique_ptr<IoEngine> engine) override;

 protected:
  CompositeStorage(StorageList members, uint64_t nbytes);

  // Calls act(member, failure) on every member; returns the first error after all have been tried,
  // which is the one that `failure` describes.
  template <typename Act>
  int on_all(IoFailure* failure, Act act) const;
  Description describe_members(const char* kind) const;

  // Calls `discard` or `write_zeroes` of the members that hold a range.
  using Clear = int (Storage::*)(uint64_t offset, uint64_t n, IoFailure* failure);
  virtual int clear(Clear act, uint64_t offset, uint64_t n, IoFailure* failure) = 0;

  const StorageList members_;
};

// Each byte lies in one member, which `locate` finds. A transfer is split where the member changes.
class PartitionedStorage : public CompositeStorage {
 public:
  int read(uint64_t offset, void* data, size_t n, IoFailure* failure) override;
  int write(uint64_t offset, const void* data, size_t n, IoFailure* failure) override;
  int read_nowait(uint64_t offset, void* data, size_t n, IoFailure* failure) override;
  bool resolve(const Request& request, PieceList& pieces) override;
  uint32_t replica_count() const override;

  // Where a byte of the namespace lies, and how many bytes of the namespace follow there.
  struct Place {
    size_t member;
    uint64_t offset;
    uint64_t run_bytes;
  };
  virtual Place locate(uint64_t offset) const = 0;

 protected:
  using CompositeStorage::CompositeStorage;
  int clear(Clear act, uint64_t offset, uint64_t n, IoFailure* failure) override;

 private:
  // Calls visit(member, member offset, bytes, offset in the request) until one returns non-zero.
  template <typename Visit>
  int for_each_part(uint64_t offset, uint64_t n, Visit visit) const;
};

// Stripe k of the namespace is stripe k / members of member k mod members.
class StripedStorage final : public PartitionedStorage {
 public:
  // `nbytes` 0 means all whole stripes that every member can hold.
  StripedStorage(StorageList members, uint32_t stripe_bytes, uint64_t nbytes);

  Description describe() const override;
  Place locate(uint64_t offset) const override;

 private:
  const uint32_t stripe_bytes_;
};

// The members one behind another, in order.
class ConcatenatedStorage final : public PartitionedStorage {
 public:
  explicit ConcatenatedStorage(StorageList members);

  Description describe() const override;
  Place locate(uint64_t offset) const override;

 private:
  std::vector<uint64_t> ends_;  // of each member, in the namespace
};

// Every member holds the whole namespace. Reads take turns and try the next member after an error;
// writes go to all, and one that fails anywhere is reported as failed.
class ReplicatedStorage final : public CompositeStorage {
 public:
  explicit ReplicatedStorage(StorageList members);

  int read(uint64_t offset, void* data, size_t n, IoFailure* failure) override;
  int write(uint64_t offset, const void* data, size_t n, IoFailure* failure) override;
  int read_nowait(uint64_t offset, void* data, size_t n, IoFailure* failure) override;
  bool resolve(const Request& request, PieceList& pieces) override;
  uint32_t replica_count() const override { return uint32_t(members_.size()); }
  Description describe() const override;

 private:
  int clear(Clear act, uint64_t offset, uint64_t n, IoFailure* failure) override;

  std::atomic<uint32_t> turn_{0};
};

}  // namespace fw::native
