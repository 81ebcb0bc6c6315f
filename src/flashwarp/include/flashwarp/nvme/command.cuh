// NVMe wire structures, opcodes and status codes, exact to the byte.
//
// The 64-byte submission queue entry and the 16-byte completion queue entry are those of the NVM
// Express Base Specification 2.0 (figures 87 and 95). Device code, the CPU device and the software
// controller all include this file, so both ends of a ring agree. Little-endian hosts only.
#pragma once

#include "flashwarp/base/platform.cuh"

namespace fw::nvme {

// Submission queue entry. `opcode_cid` is CDW0: opcode in bits 7:0, FUSE 9:8, PSDT 15:14, CID
// 31:16.
struct alignas(64) command {
  uint32_t opcode_cid;
  uint32_t nsid;
  uint32_t cdw2;
  uint32_t cdw3;
  uint64_t mptr;
  uint64_t prp1;
  uint64_t prp2;
  uint32_t cdw10;
  uint32_t cdw11;
  uint32_t cdw12;
  uint32_t cdw13;
  uint32_t cdw14;
  uint32_t cdw15;
};
static_assert(sizeof(command) == 64);
FW_CHECK_OFFSET(command, nsid, 4);
FW_CHECK_OFFSET(command, mptr, 16);
FW_CHECK_OFFSET(command, prp1, 24);
FW_CHECK_OFFSET(command, prp2, 32);
FW_CHECK_OFFSET(command, cdw10, 40);
FW_CHECK_OFFSET(command, cdw15, 60);

// Completion queue entry. Bit 0 of `status` is the phase tag, bits 15:1 the status field.
struct alignas(16) completion {
  uint32_t dw0;
  uint32_t dw1;
  uint16_t sqhd;
  uint16_t sqid;
  uint16_t cid;
  uint16_t status;
};
static_assert(sizeof(completion) == 16);
FW_CHECK_OFFSET(completion, sqhd, 8);
FW_CHECK_OFFSET(completion, sqid, 10);
FW_CHECK_OFFSET(completion, cid, 12);
FW_CHECK_OFFSET(completion, status, 14);

// One range of a Dataset Management command.
struct dataset_range {
  uint32_t attributes;
  uint32_t lba_count;
  uint64_t lba;
};
static_assert(sizeof(dataset_range) == 16);

enum opcode : uint8_t {
  kFlush = 0x00,
  kWrite = 0x01,
  kRead = 0x02,
  kWriteZeroes = 0x08,
  kDatasetManagement = 0x09,
};

enum admin_opcode : uint8_t { kIdentify = 0x06 };

// Status field without the phase tag: status code in bits 7:0, status code type in bits 10:8.
enum status : uint16_t {
  kSuccess = 0x000,
  kInvalidOpcode = 0x001,
  kInvalidField = 0x002,
  kDataTransferError = 0x004,
  kCommandAborted = 0x007,
  kInvalidNamespace = 0x00B,
  kPrpOffsetInvalid = 0x013,
  kNamespaceWriteProtected = 0x020,
  kLbaOutOfRange = 0x080,
  kCapacityExceeded = 0x081,
  kWriteFault = 0x280,
  kUnrecoveredReadError = 0x281,
};

// The namespace identifier in every command: each controller has one namespace.
inline constexpr uint32_t kNamespaceId = 1;

// Logical block size: the smallest NVMe format, so that 512-byte lines are one block.
inline constexpr uint32_t kLbaShift = 9;
inline constexpr uint32_t kLbaBytes = 1u << kLbaShift;

// The Number of Logical Blocks field is 16 bits and zero-based (NVM command set, Read, CDW12).
inline constexpr uint32_t kLbaCountMax = 1u << 16;

// Of CDW12 of a Write: it completes when its data is durable (FUA).
inline constexpr uint32_t kForceUnitAccess = 1u << 30;

// Attribute of Dataset Management (CDW11 bit 2) that deallocates the ranges.
inline constexpr uint32_t kAttributeDeallocate = 1u << 2;

// The second PRP entry of a transfer (section 4.1.1 of the Base Specification): 0 inside one memory
// page (CC.MPS), else the second page. No transfer has more pages, so none needs a list.
FW_HOST_DEVICE uint64_t second_prp(uint64_t address, uint64_t bytes, uint64_t page_bytes) {
  const uint64_t first = page_bytes - (address & (page_bytes - 1));
  return bytes <= first ? 0 : address + first;
}

// Builds the block commands Read, Write and Write Zeroes.
FW_HOST_DEVICE command block_command(uint8_t opcode, uint16_t cid, uint64_t lba, uint32_t lba_count,
                                     uint64_t prp1, uint64_t prp2) {
  command entry = {};
  entry.opcode_cid = uint32_t(opcode) | (uint32_t(cid) << 16);
  entry.nsid = kNamespaceId;
  entry.prp1 = prp1;
  entry.prp2 = prp2;
  entry.cdw10 = uint32_t(lba);
  entry.cdw11 = uint32_t(lba >> 32);
  entry.cdw12 = lba_count - 1;
  return entry;
}

}  // namespace fw::nvme
