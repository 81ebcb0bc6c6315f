// A namespace of a drive as a storage, moved by commands of the host's own.
//
// It finds what is on the drive, fills it, and lets the software controller serve it. Arrays on the
// drive's own queue pairs move their data past it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "storage/storage.h"
#include "vfio/drive.h"

namespace fw::native::vfio {

class NamespaceStorage final : public Storage {
 public:
  NamespaceStorage(std::shared_ptr<Drive> drive, uint32_t nsid, const NamespaceIdentity& identity,
                   bool writable);

  int read(uint64_t offset, void* data, size_t n, IoFailure* failure) override;
  int write(uint64_t offset, const void* data, size_t n, IoFailure* failure) override;
  int flush(IoFailure* failure) override;
  int discard(uint64_t offset, uint64_t n, IoFailure* failure) override;
  int write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) override;
  Description describe() const override;

 private:
  // Runs a command on blocks; its data is in the drive's buffer. Returns 0 or an errno value.
  int run(uint8_t opcode, uint64_t offset, uint64_t nbytes, uint64_t data_bytes,
          IoFailure* failure);
  int submit(const nvme::command& entry, uint64_t data_bytes);
  template <typename Act>
  int for_each_part(uint64_t offset, uint64_t n, uint64_t most, Act act);
  int write_part(uint64_t begin, uint64_t skip, const void* data, uint64_t n, IoFailure* failure);

  const std::shared_ptr<Drive> drive_;
  const uint32_t nsid_;
  const uint32_t lba_shift_;
  const std::string name_;
};

}  // namespace fw::native::vfio
