#include "nvme/software/completions.h"

#include <cerrno>
#include <cstring>
#include <ctime>
#include <string>
#include <utility>

#include "io/nvme_command.h"

namespace fw::native {

uint16_t status_of_error(int error, bool is_write) {
  if (error == 0) return nvme::kSuccess;
  if (is_nvme_status(error)) return status_of(error);
  if (error == EROFS) return nvme::kNamespaceWriteProtected;
  if (error == ECANCELED || error == kForked) return nvme::kCommandAborted;
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) return nvme::kCapacityExceeded;
  return is_write ? nvme::kWriteFault : nvme::kUnrecoveredReadError;
}

void Completions::finish(const nvme::command& entry, uint16_t status) {
  counters_.commands[size_t(kind_of(rings_.id(), entry))].add(1);
  if (status != nvme::kSuccess) counters_.errors.add(1);
  complete(cid_of(entry), status);
}

void Completions::finish_io(const nvme::command& entry, const ByteRange& range, bool is_write,
                            int error, const IoFailure& failure) {
  const uint16_t status = status_of_error(error, is_write);
  if (error != 0) {
    record(entry, status, error, failure, std::strerror(error), false);
  } else if (opcode_of(entry) == nvme::kRead) {
    counters_.bytes_read.add(range.take);
  } else if (opcode_of(entry) == nvme::kWrite) {
    counters_.bytes_written.add(range.take);
  }
  finish(entry, status);
}

void Completions::reject(const nvme::command& entry, uint16_t status, const char* reason) {
  record(entry, status, 0, IoFailure{}, reason, false);
  finish(entry, status);
}

void Completions::record(const nvme::command& entry, uint16_t status, int error,
                         const IoFailure& failure, const char* reason, bool recovered) {
  ErrorRecord record;
  record.operation = command_name(kind_of(rings_.id(), entry));
  record.path = failure.path;
  record.reason = error == 0 ? std::string(reason) : error_text(error);
  record.file_offset = failure.file_offset;
  record.nbytes = failure.nbytes;
  record.lba = first_lba(entry);
  record.error = errno_of(error);
  record.status = status;
  record.queue = rings_.id();
  record.cid = cid_of(entry);
  record.recovered = recovered;
  record.unix_time = double(std::time(nullptr));
  errors_.add(std::move(record));
}

}  // namespace fw::native
