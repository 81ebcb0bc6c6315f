// Three checksums at a time, joined by multiplication modulo the polynomial; see crc32c.h.
#include "base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__SSE4_2__)
#include <nmmintrin.h>
#define FW_CRC32C_TARGET
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define FW_CRC32C_TARGET __attribute__((target("+crc")))
#endif

namespace fw::native {
namespace {

// The Castagnoli polynomial without its leading term. As in all reflected checksums, the highest
// bit of a word is the coefficient of x^0.
constexpr uint32_t kPolynomial = 0x82f63b78;
constexpr uint32_t kOne = uint32_t(1) << 31;

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ (a & 1 ? kPolynomial : 0); }

// a * b modulo the polynomial.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int bit = 31; bit >= 0; bit--) {
    if ((a >> bit) & 1) product ^= b;
    b = times_x(b);
  }
  return product;
}

// x^(8 n): what shifts a checksum by n bytes.
constexpr uint32_t byte_shift(uint64_t n) {
  uint32_t result = kOne;
  uint32_t power = kOne >> 8;  // x^8
  for (; n != 0; n >>= 1) {
    if (n & 1) result = multiply(power, result);
    power = multiply(power, power);
  }
  return result;
}

constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables = {};
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; bit++) value = times_x(value);
    tables[0][i] = value;
  }
  for (uint32_t k = 1; k < 8; k++) {
    for (uint32_t i = 0; i < 256; i++) {
      const uint32_t before = tables[k - 1][i];
      tables[k][i] = (before >> 8) ^ tables[0][before & 255];
    }
  }
  return tables;
}

constexpr auto kTables = make_tables();

uint64_t load(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

#ifdef FW_CRC32C_TARGET

// The products of byte_shift(kNbytes) with each value of each byte of a checksum: shifts by a fixed
// number of bytes.
template <size_t kNbytes>
struct Shift {
  static constexpr std::array<std::array<uint32_t, 256>, 4> kProducts = [] {
    std::array<std::array<uint32_t, 256>, 4> products = {};
    const uint32_t shift = byte_shift(kNbytes);
    for (uint32_t k = 0; k < 4; k++) {
      for (uint32_t i = 0; i < 256; i++) products[k][i] = multiply(shift, i << (8 * k));
    }
    return products;
  }();

  static uint32_t apply(uint32_t crc) {
    return kProducts[0][crc & 255] ^ kProducts[1][(crc >> 8) & 255] ^
           kProducts[2][(crc >> 16) & 255] ^ kProducts[3][crc >> 24];
  }
};

FW_CRC32C_TARGET uint32_t step(uint32_t crc, uint64_t word) {
#if defined(__SSE4_2__)
  return uint32_t(_mm_crc32_u64(crc, word));
#else
  return __crc32cd(crc, word);
#endif
}

FW_CRC32C_TARGET uint32_t step_byte(uint32_t crc, uint8_t byte) {
#if defined(__SSE4_2__)
  return _mm_crc32_u8(crc, byte);
#else
  return __crc32cb(crc, byte);
#endif
}

// Three strands of kStrandBytes side by side, as often as they fit. The instruction takes 3 cycles,
// and a new one can start each cycle.
template <size_t kStrandBytes>
FW_CRC32C_TARGET uint32_t three_strands(uint32_t crc, const uint8_t*& at, size_t& n) {
  for (; n >= 3 * kStrandBytes; n -= 3 * kStrandBytes, at += 3 * kStrandBytes) {
    uint32_t second = 0, third = 0;
    for (size_t i = 0; i < kStrandBytes; i += 8) {
      crc = step(crc, load(at + i));
      second = step(second, load(at + kStrandBytes + i));
      third = step(third, load(at + 2 * kStrandBytes + i));
    }
    crc = Shift<kStrandBytes>::apply(crc) ^ second;
    crc = Shift<kStrandBytes>::apply(crc) ^ third;
  }
  return crc;
}

FW_CRC32C_TARGET uint32_t crc32c_instruction(uint32_t crc, const void* data, size_t n) {
  const auto* at = static_cast<const uint8_t*>(data);
  crc = ~crc;
  // Long strands for the prefetchers of the processor, which follow streams; then short ones.
  crc = three_strands<(64 << 10)>(crc, at, n);
  crc = three_strands<(4 << 10)>(crc, at, n);
  crc = three_strands<256>(crc, at, n);
  for (; n >= 8; n -= 8, at += 8) crc = step(crc, load(at));
  for (; n != 0; n--, at++) crc = step_byte(crc, *at);
  return ~crc;
}

bool has_instruction() {
#if defined(__SSE4_2__)
  return true;  // x86-64-v2, the least that the package runs on, has it
#else
  constexpr unsigned long kHwcapCrc32 = 1 << 7;
  static const bool found = (getauxval(AT_HWCAP) & kHwcapCrc32) != 0;
  return found;
#endif
}

#endif  // FW_CRC32C_TARGET

}  // namespace

uint32_t crc32c_portable(uint32_t crc, const void* data, size_t n) {
  const auto* at = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; n >= 8; n -= 8, at += 8) {
    uint32_t next = 0;
    for (int i = 0; i < 8; i++) {
      const uint32_t byte = at[i] ^ (i < 4 ? (crc >> (8 * i)) & 255 : 0);
      next ^= kTables[7 - i][byte];
    }
    crc = next;
  }
  for (; n != 0; n--, at++) crc = (crc >> 8) ^ kTables[0][(crc ^ *at) & 255];
  return ~crc;
}

#ifdef FW_CRC32C_TARGET

uint32_t crc32c(uint32_t crc, const void* data, size_t n) {
  return has_instruction() ? crc32c_instruction(crc, data, n) : crc32c_portable(crc, data, n);
}

const char* crc32c_engine() {
#if defined(__SSE4_2__)
  return "sse4.2";
#else
  return has_instruction() ? "armv8" : "portable";
#endif
}

#else

uint32_t crc32c(uint32_t crc, const void* data, size_t n) { return crc32c_portable(crc, data, n); }

const char* crc32c_engine() { return "portable"; }

#endif

uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t second_nbytes) {
  return multiply(byte_shift(second_nbytes), first) ^ second;
}

}  // namespace fw::native
