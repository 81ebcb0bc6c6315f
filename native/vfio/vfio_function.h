// A PCI function that Linux's VFIO gives to this process.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "vfio/iommu.h"
#include "vfio/iova_space.h"
#include "vfio/pci_function.h"

namespace fw::native::vfio {

class VfioFunction final : public PciFunction {
 public:
  // `bdf` is its address, as "0000:00:04.0".
  VfioFunction(std::string bdf, std::unique_ptr<Iommu> iommu);
  ~VfioFunction() override { close(); }

  std::shared_ptr<Registers> map_registers() override;
  uint64_t map(uint64_t address, uint64_t nbytes) override;
  uint64_t map_file(int file, uint64_t nbytes) override;
  void unmap(uint64_t iova, uint64_t nbytes) noexcept override;
  void set_bus_master(bool on) override;
  void reset() override;
  std::string watch(int limit_ms) override;
  void interrupt() override;
  void close() noexcept override;
  std::string iommu() const override { return kind_; }
  std::string name() const override { return bdf_; }

 private:
  void listen(uint32_t index, const OpenFile& event);
  void reset_slot(int device);
  uint64_t take_iova(uint64_t nbytes);
  int device() const;

  const std::string bdf_;
  const std::string kind_;
  mutable std::mutex lock_;
  std::unique_ptr<Iommu> iommu_;  // null: closed
  IovaSpace space_;
  OpenFile request_, failure_, interrupt_;  // eventfds
};

}  // namespace fw::native::vfio
