// Aligned, zero-filled host memory, and what is resident of a mapping.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fw::native {

// Zero-filled memory at a multiple of `alignment` (a power of two). Pages come when they are
// touched; large blocks ask for huge pages. Throws std::bad_alloc, or invalid_argument for an
// alignment that is no power of two.
void* allocate_aligned(size_t nbytes, size_t alignment);

// Gives back memory of `allocate_aligned`; false when the address is not one.
bool free_aligned(void* address);

// The part of the pages of [address, address + nbytes) that are in memory, 0 to 1; -errno on
// failure.
double residency(uint64_t address, uint64_t nbytes);

// Puts zero pages, which are only read, in the place of the mapping at [address, address + nbytes):
// at once for every thread that reads there. 0, or an errno value.
int replace_mapping(uint64_t address, uint64_t nbytes);

}  // namespace fw::native
