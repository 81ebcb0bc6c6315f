// NVMe commands that the kernel's driver passes to a drive: through a namespace's character device
// (/dev/ngXnY), by ioctl or io_uring, past file systems, page cache and block layer.
//
// A failure is an int, as everywhere: an errno value, or the status field of a completion in the
// range of its own that `error_of_status` maps it to.
#pragma once

#include <linux/io_uring.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace fw::native {

struct NvmeNamespace {
  int fd = -1;
  uint32_t nsid = 0;
  uint32_t lba_shift = 9;
};

// One I/O command without metadata.
struct NvmeCommand {
  uint8_t opcode = 0;
  uint64_t lba = 0;  // CDW10 and CDW11
  uint32_t cdw12 = 0;
  void* memory = nullptr;
  uint32_t nbytes = 0;
};

// Read, Write or Flush of whole logical blocks.
NvmeCommand nvme_transfer(const NvmeNamespace& where, bool is_write, uint64_t offset, void* memory,
                          uint32_t nbytes, bool durable);
NvmeCommand nvme_flush();

// Runs a command and waits for it. Returns 0, an errno value, or that of a status. While the kernel
// resets the controller, it cancels commands: each is sent again, for some seconds at most.
int run_nvme(const NvmeNamespace& where, const NvmeCommand& command);

// Fills an entry of a ring whose entries are large (IORING_SETUP_SQE128).
void fill_nvme(io_uring_sqe* entry, const NvmeNamespace& where, const NvmeCommand& command);

// Runs Identify with a controller or namespace structure (CNS) into 4096 bytes.
int identify_nvme(int fd, uint32_t nsid, uint32_t cns, std::byte* data);

// Status fields: status code in bits 7:0, status code type in bits 10:8; more bits are ignored.
int error_of_status(uint32_t status);
bool is_nvme_status(int error);
uint16_t status_of(int error);

// Whether the kernel gave a command up without an answer of the drive, as it does when it resets
// the controller: it may be sent again.
bool is_cancelled(int error);

// The errno value that stands for an error, where there is room for nothing else.
int errno_of(int error);

// For people: the specification's name of a status, if it is a usual one.
std::string nvme_status_text(uint16_t status);

}  // namespace fw::native
