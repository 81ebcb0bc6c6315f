// How a drive names blocks and memory, where that differs from the software controller.
//
// Device code builds commands for blocks of 512 bytes and device addresses. A drive has its own
// block size and namespace, sees memory at IO virtual addresses, and has pages of 4 KiB, so that a
// line may need a PRP list. The lists are made when an array opens: entry i of one table names page
// i + 1 of the data, so that a transfer's list lies in the table where its first page does.
//
// A file by its block map has extents: a kernel then counts bytes of the file, and its commands
// name the blocks of the drive where they lie. No command crosses the end of an extent, because
// each extent but the last ends at a multiple of a line (`nvme/drive_extents.py` refuses others).
#pragma once

#include "flashwarp/nvme/command.cuh"
#include "flashwarp/nvme/namespace_part.cuh"

namespace fw::nvme {

struct drive_addressing {
  uint64_t begin;        // device address of the first page of the data
  uint64_t iova_offset;  // IO virtual address of a byte of the data, less its device address
  uint64_t lists;        // IO virtual address of the table of PRP entries
  uint32_t page_bytes;   // CC.MPS
  uint32_t nsid;
  uint32_t lba_shift;  // at least kLbaShift
  uint32_t reserved;
  const namespace_part* extents;  // their places: bytes of the drive; null: lines lie as they count
  uint64_t extent_count;
};
static_assert(sizeof(drive_addressing) == 56);

// The second PRP entry of a transfer at IO virtual address `prp1`. If it takes more than two pages,
// it lies inside of one line, which begins at a multiple of its size behind `begin`. A line is a
// power of two of at most 512 pages, so no list goes on in another page of the table.
FW_HOST_DEVICE uint64_t drive_prp2(const drive_addressing& d, uint64_t prp1, uint64_t bytes) {
  const uint64_t second = second_prp(prp1, bytes, d.page_bytes);
  if (second == 0 || prp1 + bytes <= second + d.page_bytes) return second;
  const uint64_t page = (prp1 - d.iova_offset - d.begin) / d.page_bytes;
  return d.lists + page * sizeof(uint64_t);
}

// The byte of the drive that has byte `at` of the namespace.
FW_HOST_DEVICE uint64_t byte_on_drive(const drive_addressing& d, uint64_t at) {
  if (d.extents == nullptr) return at;
  return at + d.extents[find_part(d.extents, d.extent_count, at)].base;
}

// Turns a command into the drive's terms: its namespace, and for Read and Write its blocks and
// addresses. The transfer begins at one of the drive's blocks, and takes whole ones: what follows
// the end of a namespace in its last block comes along.
FW_HOST_DEVICE void address_for_drive(command& entry, const drive_addressing& d) {
  const uint8_t opcode = uint8_t(entry.opcode_cid);
  entry.nsid = d.nsid;
  if (opcode != kRead && opcode != kWrite) return;
  const uint32_t shift = d.lba_shift - kLbaShift;
  const uint64_t asked = (entry.cdw12 & (kLbaCountMax - 1)) + 1;
  const uint64_t blocks = (asked + (uint64_t(1) << shift) - 1) >> shift;
  const uint64_t at = (uint64_t(entry.cdw11) << 32 | entry.cdw10) << kLbaShift;
  const uint64_t lba = byte_on_drive(d, at) >> d.lba_shift;
  entry.cdw10 = uint32_t(lba);
  entry.cdw11 = uint32_t(lba >> 32);
  entry.cdw12 = uint32_t(entry.cdw12 & ~(kLbaCountMax - 1)) | uint32_t(blocks - 1);
  entry.prp1 += d.iova_offset;
  entry.prp2 = drive_prp2(d, entry.prp1, blocks << d.lba_shift);
}

}  // namespace fw::nvme
