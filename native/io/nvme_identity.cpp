// Byte offsets; see nvme_identity.h.
#include "io/nvme_identity.h"

#include <algorithm>
#include <cstring>

namespace fw::native {
namespace {

template <typename Value>
Value get(std::span<const std::byte> data, size_t offset) {
  Value value;
  std::memcpy(&value, &data[offset], sizeof value);
  return value;
}

// ASCII, padded with spaces or zeros; other characters become '?'.
std::string get_text(std::span<const std::byte> data, size_t offset, size_t width) {
  std::string text(reinterpret_cast<const char*>(&data[offset]), width);
  text.resize(std::min(text.size(), text.find('\0')));
  text.resize(text.find_last_not_of(' ') + 1);
  std::replace_if(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

}  // namespace

DriveIdentity DriveIdentity::decode(DataPage data, uint64_t page_bytes_min) {
  DriveIdentity d;
  d.serial = get_text(data, 4, 20);
  d.model = get_text(data, 24, 40);
  d.firmware = get_text(data, 64, 8);
  const uint8_t mdts = get<uint8_t>(data, 77);
  d.transfer_bytes_max = mdts == 0 || mdts > 30 ? 0 : page_bytes_min << mdts;
  d.controller = get<uint16_t>(data, 78);
  d.version = get<uint32_t>(data, 80);
  d.shutdown_limit_us = get<uint32_t>(data, 88);
  d.error_log_entries = get<uint8_t>(data, 262) + 1u;
  d.namespaces_max = get<uint32_t>(data, 516);
  const uint16_t oncs = get<uint16_t>(data, 520);
  d.has_dataset_management = (oncs >> 2 & 1) != 0;
  d.has_write_zeroes = (oncs >> 3 & 1) != 0;
  d.has_volatile_cache = (get<uint8_t>(data, 525) & 1) != 0;
  d.subsystem = get_text(data, 768, 256);
  return d;
}

NamespaceIdentity NamespaceIdentity::decode(DataPage data) {
  NamespaceIdentity n;
  n.lbas = get<uint64_t>(data, 0);
  const uint8_t flbas = get<uint8_t>(data, 26);
  // Bits 6:5 extend the index where there are more than 16 formats.
  const size_t format = (flbas & 0xF) | (get<uint8_t>(data, 25) > 15 ? flbas >> 1 & 0x30 : 0);
  const uint32_t lbaf = get<uint32_t>(data, 128 + 4 * format);
  n.metadata_bytes = lbaf & 0xFFFF;
  n.lba_shift = lbaf >> 16 & 0xFF;
  n.protection = (get<uint8_t>(data, 29) & 7) != 0;
  n.shared = (get<uint8_t>(data, 30) & 1) != 0;
  n.discards_to_zeroes = (get<uint8_t>(data, 33) & 7) == 1;
  n.write_protected = (get<uint8_t>(data, 99) & 1) != 0;
  return n;
}

std::vector<uint32_t> decode_namespace_list(DataPage data) {
  std::vector<uint32_t> list;
  for (size_t at = 0; at < data.size(); at += sizeof(uint32_t)) {
    const uint32_t nsid = get<uint32_t>(data, at);
    if (nsid == 0) break;
    list.push_back(nsid);
  }
  return list;
}

std::vector<ErrorLogEntry> decode_error_log(std::span<const std::byte> data) {
  std::vector<ErrorLogEntry> entries;
  for (size_t at = 0; at + kErrorLogEntryBytes <= data.size(); at += kErrorLogEntryBytes) {
    ErrorLogEntry e;
    e.count = get<uint64_t>(data, at);
    e.queue = get<uint16_t>(data, at + 8);
    e.cid = get<uint16_t>(data, at + 10);
    e.status = uint16_t(get<uint16_t>(data, at + 12) >> 1);
    e.lba = get<uint64_t>(data, at + 16);
    e.nsid = get<uint32_t>(data, at + 24);
    if (e.count != 0) entries.push_back(e);
  }
  return entries;
}

}  // namespace fw::native
