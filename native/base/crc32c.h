// CRC-32C (Castagnoli polynomial, RFC 3720), the checksum of stored bytes, by the processor's own
// instruction if it has one.
//
// Values are those of every other implementation: reflected, with an initial and a final inversion,
// so that the checksum of "123456789" is e3069283. All functions are pure; any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fw::native {

// Extends the checksum `crc` of some bytes by `n` more; 0 is the checksum of no bytes.
uint32_t crc32c(uint32_t crc, const void* data, size_t n);

// The same without the processor's instruction.
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t n);

// The checksum of two byte strings one behind the other, of which the second has `second_nbytes`.
uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t second_nbytes);

// "sse4.2", "armv8" or "portable": what `crc32c` uses here.
const char* crc32c_engine();

}  // namespace fw::native
