// Mappings of registers; see pci_function.h.
#include "vfio/pci_function.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fw::native::vfio {

Registers::~Registers() { munmap(address_, nbytes_); }

void Registers::detach() {
  // If it fails, for want of memory, the mapping stays: a lost drive ignores stores, or the kernel
  // has taken the pages away. Not by mmap(), which ThreadSanitizer takes for a store that races
  // with those that it is for.
  (void)syscall(SYS_mmap, address_, nbytes_, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

}  // namespace fw::native::vfio
