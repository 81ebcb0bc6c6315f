// The registers of an NVMe controller (NVM Express Base Specification 2.0, section 3.1), decoded.
//
// Pure functions of values; drive.cpp reads and writes the registers themselves.
#pragma once

#include <cstdint>

namespace fw::native::vfio {

// Byte offsets in BAR 0.
inline constexpr uint32_t kCap = 0x00;
inline constexpr uint32_t kVersion = 0x08;
inline constexpr uint32_t kInterruptMaskSet = 0x0C;
inline constexpr uint32_t kConfiguration = 0x14;
inline constexpr uint32_t kStatus = 0x1C;
inline constexpr uint32_t kAdminQueueAttributes = 0x24;
inline constexpr uint32_t kAdminSq = 0x28;
inline constexpr uint32_t kAdminCq = 0x30;
inline constexpr uint32_t kDoorbells = 0x1000;

// What a read returns from a device that is gone.
inline constexpr uint32_t kAllOnes = 0xFFFFFFFF;

// CC: enable, shutdown notification, entry sizes of 2^6 and 2^4 bytes, pages of 2^(12 + MPS).
inline constexpr uint32_t kEnable = 1u << 0;
inline constexpr uint32_t kShutdownNormal = 1u << 14;
inline constexpr uint32_t kShutdownMask = 3u << 14;
inline constexpr uint32_t kEntrySizes = 6u << 16 | 4u << 20;

// CSTS.
inline constexpr uint32_t kReady = 1u << 0;
inline constexpr uint32_t kFatal = 1u << 1;
inline constexpr uint32_t kShutdownStatusMask = 3u << 2;
inline constexpr uint32_t kShutdownComplete = 2u << 2;

// CAP: what the controller can do.
struct Capabilities {
  uint32_t entries_max = 0;      // of a ring (MQES)
  uint32_t ready_limit_ms = 0;   // of a change of CSTS.RDY (TO, in units of 500 ms)
  uint32_t doorbell_stride = 0;  // bytes between doorbells (DSTRD)
  uint64_t page_bytes_min = 0;   // MPSMIN
  uint64_t page_bytes_max = 0;   // MPSMAX
  bool nvm_commands = false;     // CSS: the NVM command set
  bool subsystem_reset = false;  // NSSRS

  static Capabilities decode(uint64_t cap) {
    Capabilities c;
    c.entries_max = uint32_t(cap & 0xFFFF) + 1;
    c.ready_limit_ms = uint32_t(cap >> 24 & 0xFF) * 500;
    c.doorbell_stride = 4u << (cap >> 32 & 0xF);
    c.subsystem_reset = (cap >> 36 & 1) != 0;
    c.nvm_commands = (cap >> 37 & 1) != 0;
    c.page_bytes_min = uint64_t(4096) << (cap >> 48 & 0xF);
    c.page_bytes_max = uint64_t(4096) << (cap >> 52 & 0xF);
    return c;
  }
};

// Byte offsets of a queue pair's doorbells.
inline uint64_t sq_doorbell(uint32_t stride, uint16_t id) {
  return kDoorbells + uint64_t(2 * id) * stride;
}
inline uint64_t cq_doorbell(uint32_t stride, uint16_t id) {
  return kDoorbells + uint64_t(2 * id + 1) * stride;
}

}  // namespace fw::native::vfio
