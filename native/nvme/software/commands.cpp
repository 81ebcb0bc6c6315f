#include "nvme/software/commands.h"

#include <algorithm>
#include <array>
#include <cerrno>

#include "nvme/software/identify.h"

namespace fw::native {
namespace {

constexpr uint32_t kBroadcastNamespace = 0xFFFFFFFF;
constexpr size_t kDatasetRangesMax = 256;
constexpr uint32_t kIdentifyNamespace = 0;
constexpr uint32_t kIdentifyController = 1;
constexpr uint32_t kIdentifyActiveNamespaces = 2;

uint32_t lba_count(const nvme::command& entry) { return (entry.cdw12 & kNlbMask) + 1; }

// The one reason for which a command is rejected with a status here.
const char* reason_of(uint16_t status) {
  switch (status) {
    case nvme::kInvalidNamespace:
      return "there is one namespace, 1";
    case nvme::kInvalidField:
      return "longer than MDTS";
    case nvme::kLbaOutOfRange:
      return "beyond the end of the namespace";
    case nvme::kNamespaceWriteProtected:
      return "the namespace is read-only";
    case nvme::kPrpOffsetInvalid:
      return "a PRP entry is not aligned";
    default:
      return "a PRP entry names memory that is not registered";
  }
}

}  // namespace

Commands::Commands(const ControllerContext& context, uint16_t queue, CommandMemory& memory,
                   Completions& completions, DriveQueue* drive, InFlight* in_flight)
    : storage_(*context.storage),
      mapped_base_(context.storage->mapped_base()),
      lbas_(context.lbas()),
      max_transfer_bytes_(context.max_transfer_bytes),
      queue_(queue),
      memory_(memory),
      completions_(completions),
      drive_(drive),
      in_flight_(in_flight) {}

// Passes the current command to the modelled drive, if there is one.
void Commands::admit(bool is_write, uint32_t blocks) {
  if (drive_ != nullptr) drive_->admit(is_write, blocks);
}

void Commands::execute(const nvme::command& entry) {
  const uint8_t flags = uint8_t(entry.opcode_cid >> 8);
  if (flags != 0) return completions_.reject(entry, nvme::kInvalidField, "fused commands and SGLs");
  if (queue_ == 0) return execute_admin(entry);
  const CommandKind kind = kind_of(queue_, entry);
  if (kind == CommandKind::kOther) {
    return completions_.reject(entry, nvme::kInvalidOpcode, "opcode not supported");
  }
  const bool any_namespace = kind == CommandKind::kFlush && entry.nsid == kBroadcastNamespace;
  if (entry.nsid != nvme::kNamespaceId && !any_namespace) {
    return reject(entry, nvme::kInvalidNamespace);
  }
  if (kind == CommandKind::kRead) return execute_read(entry);
  if (kind == CommandKind::kWrite) return execute_write(entry);
  if (kind == CommandKind::kFlush) return execute_flush(entry);
  if (kind == CommandKind::kWriteZeroes) return execute_write_zeroes(entry);
  execute_dataset_management(entry);
}

void Commands::execute_admin(const nvme::command& entry) {
  if (opcode_of(entry) != nvme::kIdentify) {
    return completions_.reject(entry, nvme::kInvalidOpcode, "admin opcode not supported");
  }
  IdentifyData data;
  const uint32_t structure = entry.cdw10 & 0xFF;
  if (structure == kIdentifyController) {
    data = identify_controller(max_transfer_bytes_);
  } else if (structure == kIdentifyNamespace) {
    if (entry.nsid != nvme::kNamespaceId) return reject(entry, nvme::kInvalidNamespace);
    data = identify_namespace(storage_.nbytes(), storage_.writable());
  } else if (structure == kIdentifyActiveNamespaces) {
    data = identify_active_namespaces(entry.nsid);
  } else {
    return completions_.reject(entry, nvme::kInvalidField, "CNS not supported");
  }
  if (uint16_t status = memory_.walk(entry, data.size())) return reject(entry, status);
  memory_.copy_to(0, data.data(), data.size());
  completions_.finish(entry, nvme::kSuccess);
}

uint16_t Commands::block_range(const nvme::command& entry, bool moves_data,
                               ByteRange& range) const {
  const uint64_t lba = first_lba(entry);
  const uint64_t blocks = lba_count(entry);
  range.total = uint32_t(blocks * nvme::kLbaBytes);
  if (moves_data && range.total > max_transfer_bytes_) return nvme::kInvalidField;
  if (lba >= lbas_ || blocks > lbas_ - lba) return nvme::kLbaOutOfRange;
  range.offset = lba * nvme::kLbaBytes;
  range.take = uint32_t(std::min<uint64_t>(range.total, storage_.nbytes() - range.offset));
  return nvme::kSuccess;
}

void Commands::reject(const nvme::command& entry, uint16_t status) {
  completions_.reject(entry, status, reason_of(status));
}

bool Commands::is_identity(const nvme::command& entry, uint64_t offset) const {
  return mapped_base_ != nullptr && entry.prp1 == reinterpret_cast<uint64_t>(mapped_base_) + offset;
}

void Commands::execute_read(const nvme::command& entry) {
  ByteRange range;
  if (uint16_t status = block_range(entry, true, range)) return reject(entry, status);
  admit(false, lba_count(entry));
  IoFailure failure;
  if (is_identity(entry, range.offset)) {
    const bool backed = range.offset + range.take <= storage_.backed_nbytes();
    return completions_.finish_io(entry, range, false, backed ? 0 : kTruncated, failure);
  }
  if (uint16_t status = memory_.walk(entry, range.total)) return reject(entry, status);
  const int error = memory_.read(range, in_flight_ == nullptr, failure);
  if (error == EAGAIN && in_flight_ != nullptr)
    return in_flight_->start(entry, range, false, false);
  completions_.finish_io(entry, range, false, error, failure);
}

void Commands::execute_write(const nvme::command& entry) {
  ByteRange range;
  if (uint16_t status = block_range(entry, true, range)) return reject(entry, status);
  if (!storage_.writable()) return reject(entry, nvme::kNamespaceWriteProtected);
  admit(true, lba_count(entry));
  IoFailure failure;
  if (is_identity(entry, range.offset))
    return completions_.finish_io(entry, range, true, 0, failure);
  if (uint16_t status = memory_.walk(entry, range.total)) return reject(entry, status);
  const bool durable = (entry.cdw12 & nvme::kForceUnitAccess) != 0;
  const bool waits = durable || !storage_.writes_inline();
  if (waits && in_flight_ != nullptr) return in_flight_->start(entry, range, true, durable);
  completions_.finish_io(entry, range, true, memory_.write(range, durable, failure), failure);
}

void Commands::execute_write_zeroes(const nvme::command& entry) {
  ByteRange range;
  if (uint16_t status = block_range(entry, false, range)) return reject(entry, status);
  if (!storage_.writable()) return reject(entry, nvme::kNamespaceWriteProtected);
  admit(true, 0);
  IoFailure failure;
  const int error = storage_.write_zeroes(range.offset, range.take, &failure);
  completions_.finish_io(entry, range, true, error, failure);
}

void Commands::execute_dataset_management(const nvme::command& entry) {
  std::array<nvme::dataset_range, kDatasetRangesMax> ranges;
  const size_t count = (entry.cdw10 & 0xFF) + 1;
  if (uint16_t status = memory_.walk(entry, count * sizeof(nvme::dataset_range))) {
    return reject(entry, status);
  }
  memory_.copy_from(0, ranges.data(), count * sizeof(nvme::dataset_range));
  if ((entry.cdw11 & nvme::kAttributeDeallocate) == 0)
    return completions_.finish(entry, nvme::kSuccess);
  if (!storage_.writable()) return reject(entry, nvme::kNamespaceWriteProtected);
  for (size_t i = 0; i < count; ++i) {
    if (ranges[i].lba > lbas_ || ranges[i].lba_count > lbas_ - ranges[i].lba) {
      return reject(entry, nvme::kLbaOutOfRange);
    }
  }
  admit(true, 0);
  IoFailure failure;
  int error = 0;
  for (size_t i = 0; i < count && error == 0; ++i) {
    const uint64_t offset = std::min(ranges[i].lba * nvme::kLbaBytes, storage_.nbytes());
    const uint64_t nbytes = uint64_t(ranges[i].lba_count) * nvme::kLbaBytes;
    error = storage_.discard(offset, std::min(nbytes, storage_.nbytes() - offset), &failure);
  }
  completions_.finish_io(entry, ByteRange{}, true, error, failure);
}

void Commands::execute_flush(const nvme::command& entry) {
  admit(true, 0);
  if (in_flight_ != nullptr) return in_flight_->start_flush(entry);
  IoFailure failure;
  completions_.finish_io(entry, ByteRange{}, true, storage_.flush(&failure), failure);
}

}  // namespace fw::native
