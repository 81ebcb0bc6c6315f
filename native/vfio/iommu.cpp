// Requests to Linux; see iommu.h.
#include "vfio/iommu.h"

#include <linux/vfio.h>
#include <sys/ioctl.h>

#include <cstddef>

#include "vfio/iommufd_abi.h"

namespace fw::native::vfio {
namespace {

[[noreturn]] void refuse(const std::string& text, int error) {
  throw DriveError(DriveError::Kind::kSystem, text, error);
}

class Type1 final : public Iommu {
 public:
  Type1(const std::string& bdf, const std::string& group) {
    container_ = open_or_throw("/dev/vfio/vfio", "load the module first: sudo modprobe vfio-pci");
    if (ioctl(container_.get(), VFIO_GET_API_VERSION) != VFIO_API_VERSION) {
      refuse("/dev/vfio/vfio speaks another version of VFIO than this driver", EPROTO);
    }
    if (ioctl(container_.get(), VFIO_CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU) == 0) {
      refuse("this kernel's VFIO has no IOMMU driver: sudo modprobe vfio_iommu_type1", ENODEV);
    }
    open_group(bdf, group);
    if (ioctl(container_.get(), VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU) != 0) {
      const int error = errno;
      refuse(error == EPERM
                 ? "the IOMMU remaps no interrupts, so VFIO does not let a process drive devices: "
                   "enable interrupt remapping in the firmware, or accept the risk with sudo "
                   "modprobe vfio_iommu_type1 allow_unsafe_interrupts=1"
                 : std::string("VFIO_SET_IOMMU: ") + std::strerror(error),
             error);
    }
    device_ = OpenFile(ioctl(group_.get(), VFIO_GROUP_GET_DEVICE_FD, bdf.c_str()));
    if (device_.get() < 0) throw_system("VFIO_GROUP_GET_DEVICE_FD of " + bdf, errno);
  }
  ~Type1() override {
    // In this order the kernel resets the device before its memory is unmapped.
    device_.close();
    group_.close();
  }

  const char* kind() const override { return "type1"; }

  std::vector<IovaRange> ranges() const override {
    vfio_iommu_type1_info head = {};
    head.argsz = sizeof head;
    if (ioctl(container_.get(), VFIO_IOMMU_GET_INFO, &head) != 0) {
      throw_system("VFIO_IOMMU_GET_INFO", errno);
    }
    std::vector<std::byte> all(head.argsz);
    std::memcpy(all.data(), &head, sizeof head);
    if (ioctl(container_.get(), VFIO_IOMMU_GET_INFO, all.data()) != 0) {
      throw_system("VFIO_IOMMU_GET_INFO", errno);
    }
    std::memcpy(&head, all.data(), sizeof head);
    std::vector<IovaRange> found;
    uint32_t at = (head.flags & VFIO_IOMMU_INFO_CAPS) != 0 ? head.cap_offset : 0;
    while (at != 0 && at + sizeof(vfio_info_cap_header) <= all.size()) {
      vfio_info_cap_header cap;
      std::memcpy(&cap, &all[at], sizeof cap);
      if (cap.id == VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE) append_ranges(all, at, found);
      at = cap.next;
    }
    // A kernel before 5.4 does not say: the lowest 4 GiB less the window of interrupts.
    if (found.empty()) found = {{0, 0xFEDF'FFFF}};
    return found;
  }

  int map(uint64_t iova, uint64_t address, uint64_t nbytes) override {
    vfio_iommu_type1_dma_map request = {};
    request.argsz = sizeof request;
    request.flags = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE;
    request.vaddr = address;
    request.iova = iova;
    request.size = nbytes;
    return ioctl(container_.get(), VFIO_IOMMU_MAP_DMA, &request) == 0 ? 0 : errno;
  }

  int unmap(uint64_t iova, uint64_t nbytes) override {
    vfio_iommu_type1_dma_unmap request = {};
    request.argsz = sizeof request;
    request.iova = iova;
    request.size = nbytes;
    return ioctl(container_.get(), VFIO_IOMMU_UNMAP_DMA, &request) == 0 ? 0 : errno;
  }

  int map_file(uint64_t, int, uint64_t) override { return EOPNOTSUPP; }

  std::vector<int32_t> groups() const override { return {group_.get()}; }

 private:
  void open_group(const std::string& bdf, const std::string& group) {
    const std::string path = "/dev/vfio/" + group;
    group_ = OpenFile(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (group_.get() < 0) {
      const int error = errno;
      if (error == EBUSY) {
        refuse(path + " is open in another process, which drives " + bdf + ": fuser -v " + path,
               error);
      }
      refuse(path + " cannot be opened (" + std::strerror(error) + "): sudo chown $USER " + path,
             error);
    }
    vfio_group_status status = {};
    status.argsz = sizeof status;
    if (ioctl(group_.get(), VFIO_GROUP_GET_STATUS, &status) != 0) {
      throw_system("VFIO_GROUP_GET_STATUS", errno);
    }
    if ((status.flags & VFIO_GROUP_FLAGS_VIABLE) == 0) {
      refuse("another device of IOMMU group " + group +
                 " has a driver of the kernel's: bind all of them to vfio-pci, see ls "
                 "/sys/kernel/iommu_groups/" +
                 group + "/devices",
             EBUSY);
    }
    const int container = container_.get();
    if (ioctl(group_.get(), VFIO_GROUP_SET_CONTAINER, &container) != 0) {
      throw_system("VFIO_GROUP_SET_CONTAINER of group " + group, errno);
    }
  }

  static void append_ranges(const std::vector<std::byte>& all, uint32_t at,
                            std::vector<IovaRange>& found) {
    vfio_iommu_type1_info_cap_iova_range cap;
    constexpr size_t kHead = offsetof(vfio_iommu_type1_info_cap_iova_range, iova_ranges);
    if (at + kHead > all.size()) return;
    std::memcpy(&cap, &all[at], kHead);
    for (uint32_t i = 0; i < cap.nr_iovas; ++i) {
      vfio_iova_range range;
      const size_t place = at + kHead + i * sizeof range;
      if (place + sizeof range > all.size()) return;
      std::memcpy(&range, &all[place], sizeof range);
      found.push_back({range.start, range.end});
    }
  }

  OpenFile container_, group_;
};

uint32_t new_ioas(const OpenFile& iommufd) {
  abi::IoasAlloc space = {sizeof space, 0, 0};
  if (ioctl(iommufd.get(), abi::kIoasAlloc, &space) != 0) throw_system("IOMMU_IOAS_ALLOC", errno);
  return space.ioas_id;
}

int map_file_into(const OpenFile& iommufd, uint32_t ioas, uint64_t iova, int file,
                  uint64_t nbytes) {
  const uint32_t flags = abi::kMapFixed | abi::kMapWritable | abi::kMapReadable;
  abi::IoasMapFile request = {sizeof request, flags, ioas, file, 0, nbytes, iova};
  return ioctl(iommufd.get(), abi::kIoasMapFile, &request) == 0 ? 0 : errno;
}

class Iommufd final : public Iommu {
 public:
  Iommufd(const std::string& bdf, const std::string& name) {
    const std::string path = "/dev/vfio/devices/" + name;
    iommufd_ = open_or_throw("/dev/iommu", "sudo modprobe iommufd; sudo chown $USER /dev/iommu");
    device_ = open_or_throw(path, "sudo chown $USER " + path);
    abi::BindIommufd bind = {sizeof bind, 0, iommufd_.get(), 0};
    if (ioctl(device_.get(), abi::kBindIommufd, &bind) != 0) {
      const int error = errno;
      refuse("VFIO_DEVICE_BIND_IOMMUFD of " + bdf + ": " + std::strerror(error) +
                 (error == EBUSY ? "; another process may drive it: fuser -v " + path : ""),
             error);
    }
    ioas_ = new_ioas(iommufd_);
    abi::AttachPageTable attach = {sizeof attach, 0, ioas_};
    if (ioctl(device_.get(), abi::kAttachPageTable, &attach) != 0) {
      throw_system("VFIO_DEVICE_ATTACH_IOMMUFD_PT of " + bdf, errno);
    }
  }
  ~Iommufd() override { device_.close(); }

  const char* kind() const override { return "iommufd"; }

  std::vector<IovaRange> ranges() const override {
    std::vector<IovaRange> found(64);
    abi::IovaRanges request = {sizeof request,
                               ioas_,
                               uint32_t(found.size()),
                               0,
                               reinterpret_cast<uint64_t>(found.data()),
                               0};
    if (ioctl(iommufd_.get(), abi::kIovaRanges, &request) != 0) {
      throw_system("IOMMU_IOAS_IOVA_RANGES", errno);
    }
    found.resize(request.count);
    return found;
  }

  int map(uint64_t iova, uint64_t address, uint64_t nbytes) override {
    const uint32_t flags = abi::kMapFixed | abi::kMapWritable | abi::kMapReadable;
    abi::IoasMap request = {sizeof request, flags, ioas_, 0, address, nbytes, iova};
    return ioctl(iommufd_.get(), abi::kIoasMap, &request) == 0 ? 0 : errno;
  }

  int map_file(uint64_t iova, int file, uint64_t nbytes) override {
    return map_file_into(iommufd_, ioas_, iova, file, nbytes);
  }

  int unmap(uint64_t iova, uint64_t nbytes) override {
    abi::IoasUnmap request = {sizeof request, ioas_, iova, nbytes};
    return ioctl(iommufd_.get(), abi::kIoasUnmap, &request) == 0 ? 0 : errno;
  }

 private:
  OpenFile iommufd_;
  uint32_t ioas_ = 0;
};

}  // namespace

std::unique_ptr<Iommu> open_type1(const std::string& bdf, const std::string& group) {
  return std::make_unique<Type1>(bdf, group);
}

std::unique_ptr<Iommu> open_iommufd(const std::string& bdf, const std::string& device) {
  return std::make_unique<Iommufd>(bdf, device);
}

int try_iommufd(int file, uint64_t nbytes) {
  // Any address does: the space is empty, and ends with its file.
  constexpr uint64_t kIova = uint64_t(1) << 30;
  try {
    const OpenFile iommufd = open_or_throw("/dev/iommu", "");
    return map_file_into(iommufd, new_ioas(iommufd), kIova, file, nbytes);
  } catch (const DriveError& error) {
    return error.error;
  }
}

}  // namespace fw::native::vfio
