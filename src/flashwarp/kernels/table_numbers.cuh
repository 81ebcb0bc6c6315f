// The numbers of rows: converted from words, and stored as numbers of the output.
#pragma once

#include "flashwarp/array.cuh"
#include "flashwarp/base/number.cuh"

namespace fw::kernels {

FW_DEVICE_NOINLINE float byte_number(base::number kind, uint32_t bits) {
  return kind == base::number::kFloat8E4m3 ? base::to_float<base::number::kFloat8E4m3>(bits)
                                           : base::to_float<base::number::kFloat8E8m0>(bits);
}

// Of scales and factors; those that the host lets through.
FW_DEVICE float number_at(const void* numbers, base::number kind, uint64_t k) {
  if (kind == base::number::kFloat32) return static_cast<const float*>(numbers)[k];
  if (base::bytes_of(kind) == 1) {
    return base::opaque(&byte_number)(kind, static_cast<const uint8_t*>(numbers)[k]);
  }
  const uint32_t bits = static_cast<const uint16_t*>(numbers)[k];
  return kind == base::number::kFloat16 ? base::to_float<base::number::kFloat16>(bits)
                                        : base::to_float<base::number::kBfloat16>(bits);
}

// The `i`-th number of a word. `i` is a constant after unrolling.
template <base::number kNumber>
FW_DEVICE float number_in(const atomic::word16& word, uint32_t i) {
  constexpr uint32_t kPerPart = 32 / base::bits_in(kNumber);
  const uint32_t part = i / kPerPart;
  const uint32_t bits = part == 0 ? word.x : part == 1 ? word.y : part == 2 ? word.z : word.w;
  return base::to_float<kNumber>(bits >> (i % kPerPart * base::bits_in(kNumber)));
}

// Numbers in so many bytes of a row.
template <base::number kNumber>
FW_DEVICE uint32_t numbers_in(uint32_t bytes) {
  return bytes * 8 / base::bits_in(kNumber);
}

// The bits of a value as a number of the output.
FW_DEVICE uint32_t bits_as(base::number kind, float value) {
  if (kind == base::number::kFloat32) return base::bits_of(value);
  return kind == base::number::kFloat16 ? base::float16_of(value) : base::bfloat16_of(value);
}

// Values that a lane stores; a copy of them may be in memory.
template <uint32_t kCount>
struct lane_values {
  float numbers[kCount];
};

// Stores the first `count` of the values as numbers of the output, one after the other.
template <uint32_t kCount>
FW_DEVICE_NOINLINE void store_each(char* to, base::number kind, const lane_values<kCount>& values,
                                   uint32_t count) {
  const bool wide = kind == base::number::kFloat32;
  for (uint32_t i = 0; i < count; i++) {
    const uint32_t bits = bits_as(kind, values.numbers[i]);
    if (wide) {
      atomic::raw<4>::store_plain(to + i * 4, bits);
    } else {
      atomic::raw<2>::store_plain(to + i * 2, uint16_t(bits));
    }
  }
}

// Stores the first `count` of the values as numbers of the output.
template <uint32_t kCount>
FW_DEVICE void store_numbers(char* to, base::number kind, const float (&values)[kCount],
                             uint32_t count) {
  const uint64_t address = reinterpret_cast<uint64_t>(to);
  if (count != kCount || address % 16 != 0) {
    lane_values<kCount> copy;
    FW_UNROLL
    for (uint32_t i = 0; i < kCount; i++) copy.numbers[i] = values[i];
    base::opaque (&store_each<kCount>)(to, kind, copy, count);
    return;
  }
  if (kind == base::number::kFloat32) {
    FW_UNROLL
    for (uint32_t i = 0; i < kCount; i += 4) {
      atomic::raw<16>::store_plain(to + i * 4,
                                   {base::bits_of(values[i]), base::bits_of(values[i + 1]),
                                    base::bits_of(values[i + 2]), base::bits_of(values[i + 3])});
    }
    return;
  }
  FW_UNROLL
  for (uint32_t i = 0; i < kCount; i += 4) {
    const uint32_t low = bits_as(kind, values[i]) | bits_as(kind, values[i + 1]) << 16;
    const uint32_t high = bits_as(kind, values[i + 2]) | bits_as(kind, values[i + 3]) << 16;
    atomic::raw<8>::store_plain(to + i * 2, uint64_t(high) << 32 | low);
  }
}

// Stores the first `bytes` of a word to an address that is not aligned to it.
FW_DEVICE_NOINLINE void store_halves(char* to, atomic::word16 word, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += 2) {
    const uint32_t part = i < 4 ? word.x : i < 8 ? word.y : i < 12 ? word.z : word.w;
    atomic::raw<2>::store_plain(to + i, uint16_t(part >> i % 4 * 8));
  }
}

// Stores the first `bytes` of a word, numbers of two bytes or four, as they are.
FW_DEVICE void store_bits(char* to, const atomic::word16& word, uint32_t bytes) {
  if (bytes == 16 && reinterpret_cast<uint64_t>(to) % 16 == 0) {
    atomic::raw<16>::store_plain(to, word);
  } else {
    base::opaque (&store_halves)(to, word, bytes);
  }
}

}  // namespace fw::kernels
