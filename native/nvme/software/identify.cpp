// Fills Identify data at the byte offsets of the NVM Express Base Specification 2.0 (figure 275)
// and of the NVM Command Set Specification 1.0 (figure 97).
#include "nvme/software/identify.h"

#include <bit>
#include <cstring>
#include <string_view>

#include "flashwarp/nvme/command.cuh"

namespace fw::native {
namespace {

// CAP.MPSMIN: the smallest memory page of NVMe.
constexpr uint64_t kMinimumPageBytes = 4096;

template <typename Value>
void put(IdentifyData& data, size_t offset, Value value) {
  std::memcpy(data.data() + offset, &value, sizeof value);
}

// Text fields are ASCII, left-justified and padded with spaces.
void put_text(IdentifyData& data, size_t offset, size_t width, std::string_view text) {
  std::memset(data.data() + offset, ' ', width);
  std::memcpy(data.data() + offset, text.data(), text.size());
}

}  // namespace

IdentifyData identify_controller(uint64_t max_transfer_bytes) {
  IdentifyData data = {};
  put_text(data, 4, 20, "1");                               // SN
  put_text(data, 24, 40, "flashwarp software controller");  // MN
  put_text(data, 64, 8, "0.1");                             // FR
  // MDTS: a power of two in units of CAP.MPSMIN.
  put<uint8_t>(data, 77, uint8_t(std::bit_width(max_transfer_bytes / kMinimumPageBytes) - 1));
  put<uint32_t>(data, 80, 0x00020000);            // VER: 2.0
  put<uint8_t>(data, 111, 1);                     // CNTRLTYPE: I/O controller
  put<uint8_t>(data, 512, 0x66);                  // SQES: 2^6 bytes
  put<uint8_t>(data, 513, 0x44);                  // CQES: 2^4 bytes
  put<uint32_t>(data, 516, 1);                    // NN
  put<uint16_t>(data, 520, (1 << 2) | (1 << 3));  // ONCS: Dataset Mgmt., Write Zeroes
  put<uint8_t>(data, 525, 1);                     // VWC: completed writes need a Flush
  return data;
}

IdentifyData identify_namespace(uint64_t nbytes, bool writable) {
  IdentifyData data = {};
  const uint64_t lbas = (nbytes + nvme::kLbaBytes - 1) / nvme::kLbaBytes;
  put<uint64_t>(data, 0, lbas);                     // NSZE
  put<uint64_t>(data, 8, lbas);                     // NCAP
  put<uint64_t>(data, 16, lbas);                    // NUSE
  put<uint64_t>(data, 48, nbytes);                  // NVMCAP, low half
  put<uint8_t>(data, 99, writable ? 0 : 1);         // NSATTR: write protected
  put<uint32_t>(data, 128, nvme::kLbaShift << 16);  // LBAF0: LBADS
  return data;
}

IdentifyData identify_active_namespaces(uint32_t after_nsid) {
  IdentifyData data = {};
  if (after_nsid < nvme::kNamespaceId) put<uint32_t>(data, 0, nvme::kNamespaceId);
  return data;
}

}  // namespace fw::native
