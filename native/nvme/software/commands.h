// Executes NVMe commands on a storage.
//
// Commands that move no data, or only data in memory or the page cache, complete at once. The rest
// goes to `InFlight`. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nvme/model/drive_queue.h"
#include "nvme/software/command_memory.h"
#include "nvme/software/completions.h"
#include "nvme/software/in_flight.h"

namespace fw::native {

class Commands {
 public:
  // `drive` and `in_flight` may be null. Without `in_flight`, transfers that have to wait block the
  // serving thread.
  Commands(const ControllerContext& context, uint16_t queue, CommandMemory& memory,
           Completions& completions, DriveQueue* drive, InFlight* in_flight);

  void execute(const nvme::command& entry);

 private:
  void execute_admin(const nvme::command& entry);
  void execute_read(const nvme::command& entry);
  void execute_write(const nvme::command& entry);
  void execute_write_zeroes(const nvme::command& entry);
  void execute_dataset_management(const nvme::command& entry);
  void execute_flush(const nvme::command& entry);

  uint16_t block_range(const nvme::command& entry, bool moves_data, ByteRange& range) const;
  bool is_identity(const nvme::command& entry, uint64_t offset) const;
  void admit(bool is_write, uint32_t blocks);

  void reject(const nvme::command& entry, uint16_t status);

  Storage& storage_;
  std::byte* const mapped_base_;
  const uint64_t lbas_;
  const uint64_t max_transfer_bytes_;
  const uint16_t queue_;
  CommandMemory& memory_;
  Completions& completions_;
  DriveQueue* const drive_;
  InFlight* const in_flight_;
};

}  // namespace fw::native
