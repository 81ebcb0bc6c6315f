#include "nvme/software/counters.h"

namespace fw::native {

const char* command_name(CommandKind kind) {
  static constexpr const char* kNames[kCommandKinds] = {
      "flush", "write", "read", "write_zeroes", "dataset_management", "identify", "other"};
  return kNames[size_t(kind)];
}

CommandKind kind_of(uint16_t queue, const nvme::command& entry) {
  const uint8_t opcode = uint8_t(entry.opcode_cid);
  if (queue == 0) return opcode == nvme::kIdentify ? CommandKind::kIdentify : CommandKind::kOther;
  switch (opcode) {
    case nvme::kFlush:
      return CommandKind::kFlush;
    case nvme::kWrite:
      return CommandKind::kWrite;
    case nvme::kRead:
      return CommandKind::kRead;
    case nvme::kWriteZeroes:
      return CommandKind::kWriteZeroes;
    case nvme::kDatasetManagement:
      return CommandKind::kDatasetManagement;
    default:
      return CommandKind::kOther;
  }
}

}  // namespace fw::native
