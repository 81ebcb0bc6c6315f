// Numbers of fewer than 32 bits: from their bits to float, and from float to their bits.
//
// The same text for the GPU and the CPU, so both give the same bits. A shift brings exponent and
// mantissa to their places in a float, and a product corrects the exponent's bias; that is exact,
// for subnormal numbers too. Rounding is to the nearest, ties to even.
#pragma once

#include "flashwarp/base/platform.cuh"

namespace fw::base {

// How a number is stored. The host has the same values.
enum class number : uint32_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kBfloat16 = 2,
  kFloat8E4m3 = 3,  // OCP FP8 E4M3: finite, but for one not-a-number of each sign
  kFloat8E5m2 = 4,  // OCP FP8 E5M2: as float16, cut
  kInt8 = 5,
  kFloat4E2m1 = 6,  // OCP FP4: two in a byte, the first in its low half; all are finite
  kFloat8E8m0 = 7,  // OCP E8M0: powers of two and one not-a-number; for scales
};

FW_HOST_DEVICE constexpr uint32_t bits_in(number n) {
  if (n == number::kFloat32) return 32;
  if (n == number::kFloat16 || n == number::kBfloat16) return 16;
  return n == number::kFloat4E2m1 ? 4 : 8;
}

// Of a number that has whole bytes.
FW_HOST_DEVICE constexpr uint32_t bytes_of(number n) { return bits_in(n) / 8; }

FW_HOST_DEVICE uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
FW_HOST_DEVICE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline constexpr uint32_t kInfinityBits = 0x7f800000u;
inline constexpr uint32_t kQuietBit = 0x00400000u;  // of a float that is no number

FW_HOST_DEVICE float float_of_float16(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t rest = (bits & 0x7fffu) << 13;
  // 2^112: the bias of 127 in place of 15.
  uint32_t value = bits_of(float_of(rest) * float_of(0x77800000u));
  // The exponent of infinity, which is above 65504.
  if (rest >= 0x0f800000u) value |= kInfinityBits;
  return float_of(sign | value);
}

FW_HOST_DEVICE float float_of_float8_e4m3(uint32_t bits) {
  const uint32_t sign = (bits & 0x80u) << 24;
  const uint32_t rest = (bits & 0x7fu) << 20;
  // 2^120: the bias of 127 in place of 7.
  uint32_t value = bits_of(float_of(rest) * float_of(0x7b800000u));
  if (rest == 0x7fu << 20) value = kInfinityBits | kQuietBit;
  return float_of(sign | value);
}

FW_HOST_DEVICE float float_of_float4_e2m1(uint32_t bits) {
  // 2^126: the bias of 127 in place of 1.
  const float value = float_of((bits & 7u) << 22) * float_of(0x7e800000u);
  return float_of(bits_of(value) | (bits & 8u) << 28);
}

FW_HOST_DEVICE float float_of_float8_e8m0(uint32_t bits) {
  if (bits == 0xffu) return float_of(kInfinityBits | kQuietBit);
  // Zero is the exponent of 2^-127, which a float has as a subnormal number.
  return float_of(bits == 0 ? 0x00400000u : bits << 23);
}

// The number in the low bits of `bits`, whose other bits may be anything.
template <number kNumber>
FW_HOST_DEVICE float to_float(uint32_t bits) {
  if constexpr (kNumber == number::kFloat32) return float_of(bits);
  if constexpr (kNumber == number::kFloat16) return float_of_float16(bits & 0xffffu);
  if constexpr (kNumber == number::kBfloat16) return float_of(bits << 16);
  if constexpr (kNumber == number::kFloat8E4m3) return float_of_float8_e4m3(bits & 0xffu);
  if constexpr (kNumber == number::kFloat8E5m2) return float_of_float16((bits & 0xffu) << 8);
  if constexpr (kNumber == number::kInt8) return float(int8_t(bits & 0xffu));
  if constexpr (kNumber == number::kFloat4E2m1) return float_of_float4_e2m1(bits);
  if constexpr (kNumber == number::kFloat8E8m0) return float_of_float8_e8m0(bits & 0xffu);
}

FW_HOST_DEVICE uint32_t float16_of(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > kInfinityBits) return sign | 0x7e00u;
  // From 65520 on, the middle of 65504 and what would be next, to infinity.
  if (rest >= 0x477ff000u) return sign | 0x7c00u;
  // Below 2^-14 the units of the result are 2^-24, those of a float in [0.5, 1): the sum rounds.
  if (rest < 0x38800000u) return sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f));
  return sign | ((rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1u)) >> 13);
}

FW_HOST_DEVICE uint32_t bfloat16_of(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > kInfinityBits) return ((bits >> 16) & 0x8000u) | 0x7fc0u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

}  // namespace fw::base
