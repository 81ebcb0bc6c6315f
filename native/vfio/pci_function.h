// A PCI function that this process drives: its registers, the memory that it may reach, its resets.
//
// vfio_function.h is the one that Linux gives to a process. Tests drive a controller of their own.
// Errors are DriveErrors. Any thread may call; calls for one mapping come one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/fork_guard.h"
#include "vfio/drive_error.h"

namespace fw::native::vfio {

// A mapping of BAR 0 of its own. When the drive is lost, memory takes the place of the registers:
// late stores of device code then go nowhere, also not to a queue that has the number by then.
class Registers {
 public:
  Registers(void* address, size_t nbytes) : address_(address), nbytes_(nbytes) {}
  ~Registers();
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;

  uint64_t address() const { return reinterpret_cast<uint64_t>(address_); }
  size_t nbytes() const { return nbytes_; }

  // Single accesses of 32 bits, as registers need them. The orderings are against memory: what was
  // written before a register is there when the controller looks.
  uint32_t read(uint32_t offset) const { return __atomic_load_n(at(offset), __ATOMIC_ACQUIRE); }
  void write(uint32_t offset, uint32_t value) {
    __atomic_store_n(at(offset), value, __ATOMIC_RELEASE);
  }
  // In two halves: not every controller takes accesses of 64 bits.
  uint64_t read_pair(uint32_t offset) const {
    return read(offset) | uint64_t(read(offset + 4)) << 32;
  }
  void write_pair(uint32_t offset, uint64_t value) {
    write(offset, uint32_t(value));
    write(offset + 4, uint32_t(value >> 32));
  }

  // Puts memory of zeros in the place of the registers, in one step. May be called twice.
  void detach();

 private:
  volatile uint32_t* at(uint32_t offset) const {
    return reinterpret_cast<volatile uint32_t*>(static_cast<char*>(address_) + offset);
  }

  void* const address_;
  const size_t nbytes_;
};

class PciFunction {
 public:
  virtual ~PciFunction() = default;
  PciFunction(const PciFunction&) = delete;
  PciFunction& operator=(const PciFunction&) = delete;

  virtual std::shared_ptr<Registers> map_registers() = 0;

  // Lets the function read and write host memory, and returns the IO virtual address of its begin.
  // Address and size are multiples of the host's page.
  virtual uint64_t map(uint64_t address, uint64_t nbytes) = 0;

  // The same for the first bytes of a file of memory, such as a GPU's dma-buf.
  virtual uint64_t map_file(int file, uint64_t nbytes) = 0;

  // Ends it. Afterwards the IOMMU keeps the function out, whatever its state.
  virtual void unmap(uint64_t iova, uint64_t nbytes) noexcept = 0;

  // Whether the function may access memory at all.
  virtual void set_bus_master(bool on) = 0;

  // Resets the function, or its slot. Registers and configuration are as after power-on.
  virtual void reset() = 0;

  // Waits at most `limit_ms`, or until `interrupt`. Returns what the system says against further
  // use (the device is to be removed, or its link failed), else "".
  virtual std::string watch(int limit_ms) = 0;
  virtual void interrupt() = 0;

  // Gives the function back to the system; nothing else may be called then. May be called twice.
  virtual void close() noexcept = 0;

  // How memory is mapped: "type1" or "iommufd".
  virtual std::string iommu() const = 0;
  virtual std::string name() const = 0;

 protected:
  PciFunction() = default;
};

}  // namespace fw::native::vfio
