// The requests of Linux's iommufd that the driver makes, and of VFIO devices opened by themselves.
//
// From the kernel's documented interface (since 6.2, 6.6 and 6.13); distributions whose headers are
// older than their kernel lack them.
#pragma once

#include <linux/vfio.h>
#include <sys/ioctl.h>

#include <cstdint>

namespace fw::native::vfio::abi {

struct IoasAlloc {
  uint32_t size;
  uint32_t flags;
  uint32_t ioas_id;
};
static_assert(sizeof(IoasAlloc) == 12);

struct IovaRanges {
  uint32_t size;
  uint32_t ioas_id;
  uint32_t count;
  uint32_t reserved;
  uint64_t ranges;
  uint64_t alignment;
};
static_assert(sizeof(IovaRanges) == 32);

struct IoasMap {
  uint32_t size;
  uint32_t flags;
  uint32_t ioas_id;
  uint32_t reserved;
  uint64_t address;
  uint64_t nbytes;
  uint64_t iova;
};
static_assert(sizeof(IoasMap) == 40);

struct IoasUnmap {
  uint32_t size;
  uint32_t ioas_id;
  uint64_t iova;
  uint64_t nbytes;
};
static_assert(sizeof(IoasUnmap) == 24);

// Takes memfds; and dma-bufs, since 6.19, of the exporters that the kernel trusts to revoke them.
struct IoasMapFile {
  uint32_t size;
  uint32_t flags;
  uint32_t ioas_id;
  int32_t file;
  uint64_t begin;
  uint64_t nbytes;
  uint64_t iova;
};
static_assert(sizeof(IoasMapFile) == 40);

struct BindIommufd {
  uint32_t argsz;
  uint32_t flags;
  int32_t iommufd;
  uint32_t device_id;
};
static_assert(sizeof(BindIommufd) == 16);

struct AttachPageTable {
  uint32_t argsz;
  uint32_t flags;
  uint32_t pt_id;
};
static_assert(sizeof(AttachPageTable) == 12);

inline constexpr uint32_t kMapFixed = 1, kMapWritable = 2, kMapReadable = 4;

inline constexpr unsigned long kIoasAlloc = _IO(';', 0x81);
inline constexpr unsigned long kIovaRanges = _IO(';', 0x84);
inline constexpr unsigned long kIoasMap = _IO(';', 0x85);
inline constexpr unsigned long kIoasUnmap = _IO(';', 0x86);
inline constexpr unsigned long kIoasMapFile = _IO(';', 0x8F);
inline constexpr unsigned long kBindIommufd = _IO(VFIO_TYPE, VFIO_BASE + 18);
inline constexpr unsigned long kAttachPageTable = _IO(VFIO_TYPE, VFIO_BASE + 19);

}  // namespace fw::native::vfio::abi
