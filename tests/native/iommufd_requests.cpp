// What the driver asks of iommufd, against its documented interface: a kernel stands here that
// checks sizes, flags and order of the requests, and keeps what is mapped.
//
// It takes files of memory as Linux does: memfds, and nothing else.
#include <linux/vfio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "turns.h"
#include "vfio/iommu.h"

using namespace fw::native::vfio;
using fw::stress::require;

namespace {

// The kernel. Numbers and layouts are those of <linux/iommufd.h>, written down once more.
struct Kernel {
  bool offers_iommufd = true, is_bound = false, is_attached = false, maps_files = true;
  int iommufd = -1, device = -1;
  uint32_t spaces = 0;
  std::map<uint64_t, uint64_t> mapped;  // IO virtual address, size
} kernel;

constexpr unsigned long request_of(unsigned char type, unsigned number) {
  return static_cast<unsigned long>(type) << 8 | number;
}

uint64_t field(const void* request, size_t offset, size_t nbytes) {
  uint64_t value = 0;
  std::memcpy(&value, static_cast<const char*>(request) + offset, nbytes);
  return value;
}

int fail(int error) {
  errno = error;
  return -1;
}

int map(const void* request, uint64_t begin, uint64_t nbytes, uint64_t iova) {
  require(field(request, 0, 4) == 40, "the size of the request");
  require(field(request, 4, 4) == 7, "a fixed address, readable and writable");
  require(field(request, 8, 4) == kernel.spaces, "the space that was made");
  if (begin % 4096 != 0 || nbytes == 0 || nbytes % 4096 != 0 || iova % 4096 != 0) {
    return fail(EINVAL);
  }
  if (kernel.mapped.contains(iova)) return fail(EEXIST);
  kernel.mapped[iova] = nbytes;
  return 0;
}

int map_file(void* request) {
  if (!kernel.maps_files) return fail(ENOTTY);
  const int file = int(field(request, 12, 4));
  if (fcntl(file, F_GET_SEALS) < 0) return fail(EBADF);  // no memfd
  require(field(request, 16, 8) == 0, "from the begin of the file");
  struct stat status;
  const uint64_t nbytes = field(request, 24, 8);
  if (fstat(file, &status) != 0 || uint64_t(status.st_size) < nbytes) return fail(EINVAL);
  return map(request, 0, nbytes, field(request, 32, 8));
}

int answer(int fd, unsigned long request, void* argument) {
  auto* bytes = static_cast<char*>(argument);
  if (request == request_of(';', 0x81)) {
    require(fd == kernel.iommufd && field(argument, 0, 4) == 12, "IOMMU_IOAS_ALLOC");
    const uint32_t id = ++kernel.spaces;
    std::memcpy(bytes + 8, &id, 4);
    return 0;
  }
  if (request == request_of(';', 0x84)) {
    require(fd == kernel.iommufd && field(argument, 0, 4) == 32, "IOMMU_IOAS_IOVA_RANGES");
    const uint64_t range[] = {0x1000, 0xFEDF'FFFF};
    require(field(argument, 8, 4) >= 1, "room for a range");
    std::memcpy(reinterpret_cast<void*>(field(argument, 16, 8)), range, sizeof range);
    const uint32_t count = 1;
    std::memcpy(bytes + 8, &count, 4);
    return 0;
  }
  if (request == request_of(';', 0x85)) {
    require(kernel.is_attached, "memory is mapped once the device has the space");
    require(field(argument, 12, 4) == 0, "nothing reserved is set");
    return map(argument, field(argument, 16, 8), field(argument, 24, 8), field(argument, 32, 8));
  }
  if (request == request_of(';', 0x86)) {
    require(field(argument, 0, 4) == 24 && field(argument, 4, 4) == kernel.spaces, "IOAS_UNMAP");
    const auto found = kernel.mapped.find(field(argument, 8, 8));
    if (found == kernel.mapped.end() || found->second != field(argument, 16, 8)) {
      return fail(ENOENT);
    }
    kernel.mapped.erase(found);
    return 0;
  }
  if (request == request_of(';', 0x8F)) return map_file(argument);
  if (request == request_of(VFIO_TYPE, VFIO_BASE + 18)) {
    require(fd == kernel.device && field(argument, 0, 4) == 16, "VFIO_DEVICE_BIND_IOMMUFD");
    require(int(field(argument, 8, 4)) == kernel.iommufd, "by the iommufd");
    if (kernel.is_bound) return fail(EBUSY);
    kernel.is_bound = true;
    return 0;
  }
  if (request == request_of(VFIO_TYPE, VFIO_BASE + 19)) {
    require(kernel.is_bound && field(argument, 0, 4) == 12, "VFIO_DEVICE_ATTACH_IOMMUFD_PT");
    require(field(argument, 8, 4) == kernel.spaces, "the space that was made");
    kernel.is_attached = true;
    return 0;
  }
  require(false, "a request that iommufd knows");
  return -1;
}

}  // namespace

extern "C" int open(const char* path, int flags, ...) {
  const std::string name = path;
  if (name == "/dev/iommu") {
    if (!kernel.offers_iommufd) return fail(ENOENT);
    return kernel.iommufd = memfd_create("iommufd", 0);
  }
  if (name == "/dev/vfio/devices/vfio7") return kernel.device = memfd_create("device", 0);
  return int(syscall(SYS_openat, AT_FDCWD, path, flags, 0));
}

extern "C" int ioctl(int fd, unsigned long request, ...) {
  va_list arguments;
  va_start(arguments, request);
  void* argument = va_arg(arguments, void*);
  va_end(arguments);
  return answer(fd, request, argument);
}

namespace {

int new_memfd(uint64_t nbytes) {
  const int file = memfd_create("memory", MFD_ALLOW_SEALING);
  require(ftruncate(file, off_t(nbytes)) == 0, "memory for the file");
  return file;
}

void memory_and_files_are_mapped_and_unmapped() {
  const auto iommu = open_iommufd("0000:01:00.0", "vfio7");
  require(std::string(iommu->kind()) == "iommufd" && iommu->device() == kernel.device, "a device");
  const auto ranges = iommu->ranges();
  require(ranges.size() == 1 && ranges[0].last == 0xFEDF'FFFF, "the range that the kernel names");
  const OpenFile memory(new_memfd(1 << 20)), other(::open("/dev/null", O_RDWR));
  require(iommu->map(1 << 20, 0x7000'0000, 8192) == 0, "memory of the process");
  require(iommu->map_file(2 << 20, memory.get(), 1 << 20) == 0, "a file of memory");
  require(iommu->map_file(2 << 20, memory.get(), 4096) == EEXIST, "no address twice");
  require(iommu->map_file(4 << 20, memory.get(), 2 << 20) == EINVAL, "not beyond its end");
  require(iommu->map_file(4 << 20, other.get(), 4096) == EBADF, "no other file");
  kernel.maps_files = false;
  require(iommu->map_file(4 << 20, memory.get(), 4096) == ENOTTY, "a kernel before 6.13");
  kernel.maps_files = true;
  require(iommu->unmap(1 << 20, 4096) == ENOENT, "not a part");
  require(iommu->unmap(1 << 20, 8192) == 0 && iommu->unmap(2 << 20, 1 << 20) == 0, "as mapped");
  require(kernel.mapped.empty(), "nothing stays");
}

void second_process_is_refused() {
  try {
    open_iommufd("0000:01:00.0", "vfio7");
    require(false, "a device has one process");
  } catch (const DriveError& error) {
    require(error.error == EBUSY, "which is told apart");
    require(std::string(error.what()).find("fuser -v") != std::string::npos, "and found");
  }
}

void kernel_is_asked_without_a_device() {
  const OpenFile memory(new_memfd(4096)), other(::open("/dev/null", O_RDWR));
  require(try_iommufd(memory.get(), 4096) == 0, "it takes memfds");
  kernel.mapped.clear();
  require(try_iommufd(other.get(), 4096) == EBADF, "and nothing else");
  kernel.offers_iommufd = false;
  require(try_iommufd(memory.get(), 4096) == ENOENT, "no iommufd");
}

}  // namespace

int main() {
  memory_and_files_are_mapped_and_unmapped();
  second_process_is_refused();
  kernel_is_asked_without_a_device();
  std::puts("iommufd requests: all as documented");
}
