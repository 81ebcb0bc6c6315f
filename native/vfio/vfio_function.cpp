// Requests to a VFIO device; see vfio_function.h.
#include "vfio/vfio_function.h"

#include <linux/pci_regs.h>
#include <linux/vfio.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

#include "base/alignment.h"

namespace fw::native::vfio {
namespace {

constexpr uint64_t kHugePageBytes = uint64_t(2) << 20;

vfio_region_info region_of(int device, uint32_t index) {
  vfio_region_info info = {};
  info.argsz = sizeof info;
  info.index = index;
  if (ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &info) != 0) {
    throw_system("VFIO_DEVICE_GET_REGION_INFO", errno);
  }
  return info;
}

OpenFile new_event() {
  OpenFile event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (event.get() < 0) throw_system("eventfd", errno);
  return event;
}

}  // namespace

VfioFunction::VfioFunction(std::string bdf, std::unique_ptr<Iommu> iommu)
    : bdf_(std::move(bdf)),
      kind_(iommu->kind()),
      iommu_(std::move(iommu)),
      space_(iommu_->ranges()),
      request_(new_event()),
      failure_(new_event()),
      interrupt_(new_event()) {
  listen(VFIO_PCI_REQ_IRQ_INDEX, request_);
  listen(VFIO_PCI_ERR_IRQ_INDEX, failure_);
}

// Not every kernel and device has these events. Without them, only the registers say that it is
// gone.
void VfioFunction::listen(uint32_t index, const OpenFile& event) {
  alignas(vfio_irq_set) std::byte bytes[sizeof(vfio_irq_set) + sizeof(int32_t)] = {};
  vfio_irq_set head = {};
  head.argsz = sizeof bytes;
  head.flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER;
  head.index = index;
  head.count = 1;
  const int32_t fd = event.get();
  std::memcpy(bytes, &head, sizeof head);
  std::memcpy(bytes + offsetof(vfio_irq_set, data), &fd, sizeof fd);
  (void)ioctl(iommu_->device(), VFIO_DEVICE_SET_IRQS, bytes);
}

int VfioFunction::device() const {
  if (iommu_ == nullptr) throw DriveError(DriveError::Kind::kLost, bdf_ + " is closed");
  return iommu_->device();
}

std::shared_ptr<Registers> VfioFunction::map_registers() {
  const std::lock_guard guard(lock_);
  const vfio_region_info bar = region_of(device(), VFIO_PCI_BAR0_REGION_INDEX);
  if (bar.size < 2 * kPageBytes || (bar.flags & VFIO_REGION_INFO_FLAG_MMAP) == 0) {
    throw DriveError(DriveError::Kind::kUnfit,
                     "BAR 0 of " + bdf_ + " cannot be mapped: its " + std::to_string(bar.size) +
                         " bytes hold no registers of an NVMe controller");
  }
  void* memory =
      mmap(nullptr, bar.size, PROT_READ | PROT_WRITE, MAP_SHARED, device(), off_t(bar.offset));
  if (memory == MAP_FAILED) throw_system("mmap of BAR 0 of " + bdf_, errno);
  return std::make_shared<Registers>(memory, bar.size);
}

uint64_t VfioFunction::take_iova(uint64_t nbytes) {
  (void)device();
  const uint64_t alignment = nbytes >= kHugePageBytes ? kHugePageBytes : kPageBytes;
  const uint64_t iova = space_.take(nbytes, alignment);
  if (iova == 0) {
    throw DriveError(DriveError::Kind::kUnfit, "the IOMMU has no room for " +
                                                   std::to_string(nbytes) +
                                                   " more bytes: take a smaller cache");
  }
  return iova;
}

uint64_t VfioFunction::map(uint64_t address, uint64_t nbytes) {
  const std::lock_guard guard(lock_);
  const uint64_t iova = take_iova(nbytes);
  if (const int error = iommu_->map(iova, address, nbytes); error != 0) {
    space_.give(iova);
    const char* hint = error == ENOMEM
                           ? "; raise the limit of locked memory (ulimit -l unlimited), "
                             "or take a smaller cache"
                           : "";
    throw DriveError(DriveError::Kind::kSystem,
                     "mapping " + std::to_string(nbytes) + " bytes of memory for " + bdf_ + ": " +
                         std::strerror(error) + hint,
                     error);
  }
  return iova;
}

uint64_t VfioFunction::map_file(int file, uint64_t nbytes) {
  const std::lock_guard guard(lock_);
  const uint64_t iova = take_iova(nbytes);
  if (const int error = iommu_->map_file(iova, file, nbytes); error != 0) {
    space_.give(iova);
    throw DriveError(DriveError::Kind::kSystem,
                     "mapping " + std::to_string(nbytes) + " bytes of another device for " + bdf_ +
                         " (" + kind_ + "): " + std::strerror(error),
                     error);
  }
  return iova;
}

void VfioFunction::unmap(uint64_t iova, uint64_t nbytes) noexcept {
  const std::lock_guard guard(lock_);
  // The end of the container or address space unmaps everything.
  if (iommu_ == nullptr) return;
  if (iommu_->unmap(iova, nbytes) == 0) space_.give(iova);
}

void VfioFunction::set_bus_master(bool on) {
  const std::lock_guard guard(lock_);
  const vfio_region_info config = region_of(device(), VFIO_PCI_CONFIG_REGION_INDEX);
  const off_t place = off_t(config.offset + PCI_COMMAND);
  uint16_t command = 0;
  if (pread(device(), &command, sizeof command, place) != sizeof command) {
    throw_system("reading the command register of " + bdf_, errno);
  }
  command = uint16_t(command & ~PCI_COMMAND_MASTER);
  if (on) command |= PCI_COMMAND_MASTER | PCI_COMMAND_MEMORY;
  if (pwrite(device(), &command, sizeof command, place) != sizeof command) {
    throw_system("writing the command register of " + bdf_, errno);
  }
}

void VfioFunction::reset() {
  const std::lock_guard guard(lock_);
  if (ioctl(device(), VFIO_DEVICE_RESET) != 0) reset_slot(device());
}

// For functions without a reset of their own: all functions behind the same bridge.
void VfioFunction::reset_slot(int device) {
  const std::vector<int32_t> groups = iommu_->groups();
  vfio_pci_hot_reset head = {};
  head.argsz = uint32_t(sizeof head + groups.size() * sizeof(int32_t));
  head.count = uint32_t(groups.size());
  std::vector<std::byte> bytes(head.argsz);
  std::memcpy(bytes.data(), &head, sizeof head);
  if (!groups.empty()) {
    std::memcpy(&bytes[sizeof head], groups.data(), groups.size() * sizeof(int32_t));
  }
  if (ioctl(device, VFIO_DEVICE_PCI_HOT_RESET, bytes.data()) != 0) {
    throw_system("resetting " + bdf_ + " (VFIO_DEVICE_RESET and VFIO_DEVICE_PCI_HOT_RESET)", errno);
  }
}

std::string VfioFunction::watch(int limit_ms) {
  pollfd events[] = {
      {request_.get(), POLLIN, 0}, {failure_.get(), POLLIN, 0}, {interrupt_.get(), POLLIN, 0}};
  if (poll(events, 3, limit_ms) <= 0) return "";
  if (events[0].revents != 0) return "the system asks to remove it";
  if (events[1].revents != 0) return "its PCIe link reports an error that cannot be corrected";
  return "";
}

void VfioFunction::interrupt() {
  const uint64_t one = 1;
  (void)!write(interrupt_.get(), &one, sizeof one);
}

void VfioFunction::close() noexcept {
  const std::lock_guard guard(lock_);
  iommu_.reset();
}

}  // namespace fw::native::vfio
