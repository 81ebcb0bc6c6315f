// What a drive says of itself: Identify data and the error log, decoded.
//
// Pure functions of the bytes that a drive returns, which are not trusted: every value is checked
// where it is used. Byte offsets are those of the NVM Express Base Specification 2.0 (figures 206
// and 275) and of the NVM Command Set Specification 1.0 (figure 97).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace fw::native {

using DataPage = std::span<const std::byte, 4096>;

struct DriveIdentity {
  std::string model, serial, firmware, subsystem;
  uint16_t controller = 0;
  uint32_t version = 0;
  uint64_t transfer_bytes_max = 0;  // MDTS; 0: without limit
  uint32_t namespaces_max = 0;
  uint32_t error_log_entries = 0;
  uint32_t shutdown_limit_us = 0;  // RTD3E; 0: not said
  bool has_dataset_management = false;
  bool has_write_zeroes = false;
  bool has_volatile_cache = false;

  static DriveIdentity decode(DataPage data, uint64_t page_bytes_min);
};

struct NamespaceIdentity {
  uint64_t lbas = 0;  // 0: the namespace is not active
  uint32_t lba_shift = 0;
  uint32_t metadata_bytes = 0;  // of each block
  bool protection = false;      // end-to-end protection information
  bool write_protected = false;
  bool discards_to_zeroes = false;  // deallocated blocks read as zeros (DLFEAT)
  bool shared = false;              // other controllers of the subsystem may reach it

  static NamespaceIdentity decode(DataPage data);
};

// The active namespaces of a list, in ascending order.
std::vector<uint32_t> decode_namespace_list(DataPage data);

struct ErrorLogEntry {
  uint64_t count = 0;  // a number for life; 0: no entry
  uint16_t queue = 0;
  uint16_t cid = 0;
  uint16_t status = 0;  // without the phase tag
  uint64_t lba = 0;
  uint32_t nsid = 0;
};
inline constexpr size_t kErrorLogEntryBytes = 64;

std::vector<ErrorLogEntry> decode_error_log(std::span<const std::byte> data);

}  // namespace fw::native
