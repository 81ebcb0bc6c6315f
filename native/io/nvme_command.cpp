#include "io/nvme_command.h"

#include <linux/nvme_ioctl.h>
#include <sys/ioctl.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "flashwarp/nvme/command.cuh"

namespace fw::native {
namespace {

constexpr uint32_t kForceUnitAccess = 1u << 30;
constexpr uint32_t kStatusMask = 0x7FF;

// Where the command begins in an entry of 128 bytes: its last 16 and the 64 that are added.
constexpr size_t kCommandOffset = 48;

// Above every errno value of Linux (MAX_ERRNO is 4095).
constexpr int kFirstStatus = 0x1000;

constexpr int kHostPathError = 0x370;
constexpr int kAbortedByHost = 0x371;

// A reset takes a drive some hundred milliseconds; CAP.TO allows up to 127 s.
constexpr int kAttemptsMax = 50;
constexpr auto kPause = std::chrono::milliseconds(100);

struct StatusName {
  uint16_t status;
  int error;
  const char* name;
};

// Figures 94 to 97 of the NVM Express Base Specification 2.0. What is not here is EIO.
constexpr std::array kStatusNames = {
    StatusName{0x001, EOPNOTSUPP, "invalid command opcode"},
    StatusName{0x002, EINVAL, "invalid field in command"},
    StatusName{0x004, EIO, "data transfer error"},
    StatusName{0x005, EIO, "aborted: loss of power"},
    StatusName{0x006, EIO, "internal error"},
    StatusName{0x007, EIO, "command abort requested"},
    StatusName{0x00B, EINVAL, "invalid namespace or format"},
    StatusName{0x020, EROFS, "namespace is write protected"},
    StatusName{0x080, EINVAL, "LBA out of range"},
    StatusName{0x081, ENOSPC, "capacity exceeded"},
    StatusName{0x082, EIO, "namespace not ready"},
    StatusName{0x083, EBUSY, "reservation conflict"},
    StatusName{0x280, EIO, "write fault"},
    StatusName{0x281, EIO, "unrecovered read error"},
    StatusName{0x282, EIO, "end-to-end guard check error"},
    StatusName{0x286, EACCES, "access denied"},
    StatusName{0x287, EIO, "deallocated or unwritten logical block"},
    StatusName{0x370, EIO, "host path error"},
    StatusName{0x371, EIO, "command aborted by host"},
};

const StatusName* find(uint16_t status) {
  for (const StatusName& each : kStatusNames) {
    if (each.status == status) return &each;
  }
  return nullptr;
}

int run_once(const NvmeNamespace& where, const NvmeCommand& command) {
  nvme_passthru_cmd64 entry = {};
  entry.opcode = command.opcode;
  entry.nsid = where.nsid;
  entry.addr = reinterpret_cast<uint64_t>(command.memory);
  entry.data_len = command.nbytes;
  entry.cdw10 = uint32_t(command.lba);
  entry.cdw11 = uint32_t(command.lba >> 32);
  entry.cdw12 = command.cdw12;
  const int result = ioctl(where.fd, NVME_IOCTL_IO64_CMD, &entry);
  if (result < 0) return errno;
  return result == 0 ? 0 : error_of_status(uint32_t(result));
}

}  // namespace

NvmeCommand nvme_transfer(const NvmeNamespace& where, bool is_write, uint64_t offset, void* memory,
                          uint32_t nbytes, bool durable) {
  NvmeCommand command;
  command.opcode = is_write ? nvme::kWrite : nvme::kRead;
  command.lba = offset >> where.lba_shift;
  command.cdw12 = ((nbytes >> where.lba_shift) - 1) | (durable ? kForceUnitAccess : 0);
  command.memory = memory;
  command.nbytes = nbytes;
  return command;
}

NvmeCommand nvme_flush() {
  NvmeCommand command;
  command.opcode = nvme::kFlush;
  return command;
}

bool is_cancelled(int error) {
  return error == EINTR || error == kFirstStatus + kHostPathError ||
         error == kFirstStatus + kAbortedByHost;
}

int run_nvme(const NvmeNamespace& where, const NvmeCommand& command) {
  int error = run_once(where, command);
  for (int attempt = 1; is_cancelled(error) && attempt < kAttemptsMax; ++attempt) {
    std::this_thread::sleep_for(kPause);
    error = run_once(where, command);
  }
  return error;
}

void fill_nvme(io_uring_sqe* entry, const NvmeNamespace& where, const NvmeCommand& command) {
  entry->opcode = IORING_OP_URING_CMD;
  entry->cmd_op = NVME_URING_CMD_IO;
  nvme_uring_cmd passed = {};
  passed.opcode = command.opcode;
  passed.nsid = where.nsid;
  passed.addr = reinterpret_cast<uint64_t>(command.memory);
  passed.data_len = command.nbytes;
  passed.cdw10 = uint32_t(command.lba);
  passed.cdw11 = uint32_t(command.lba >> 32);
  passed.cdw12 = command.cdw12;
  static_assert(kCommandOffset + sizeof passed <= 2 * sizeof *entry);
  std::memcpy(reinterpret_cast<std::byte*>(entry) + kCommandOffset, &passed, sizeof passed);
}

int identify_nvme(int fd, uint32_t nsid, uint32_t cns, std::byte* data) {
  nvme_passthru_cmd entry = {};
  entry.opcode = nvme::kIdentify;
  entry.nsid = nsid;
  entry.addr = reinterpret_cast<uint64_t>(data);
  entry.data_len = 4096;
  entry.cdw10 = cns;
  const int result = ioctl(fd, NVME_IOCTL_ADMIN_CMD, &entry);
  if (result < 0) return errno;
  return result == 0 ? 0 : error_of_status(uint32_t(result));
}

int error_of_status(uint32_t status) { return kFirstStatus + int(status & kStatusMask); }

bool is_nvme_status(int error) {
  return error >= kFirstStatus && error <= kFirstStatus + int(kStatusMask);
}

uint16_t status_of(int error) { return uint16_t(error - kFirstStatus); }

int errno_of(int error) {
  if (!is_nvme_status(error)) return error;
  const StatusName* known = find(status_of(error));
  return known == nullptr ? EIO : known->error;
}

std::string nvme_status_text(uint16_t status) {
  if (const StatusName* known = find(status)) return known->name;
  char number[32];
  std::snprintf(number, sizeof number, "NVMe status %#05x", status);
  return number;
}

}  // namespace fw::native
