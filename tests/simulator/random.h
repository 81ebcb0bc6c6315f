// Reproducible random numbers: the same on every machine, and streams that do not disturb another.
#pragma once

#include <cstdint>

namespace fw::simulator {

inline uint64_t mix(uint64_t x) {  // SplitMix64's finalizer
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// xorshift64*: one multiplication a number, because every scheduling point asks for one.
class Random {
 public:
  explicit Random(uint64_t seed = 0, uint64_t stream = 0) : state_(mix(seed ^ mix(stream)) | 1) {}

  uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1Du;
  }
  // In [0, n); n is small, so that the bias does not matter.
  uint32_t below(uint32_t n) { return uint32_t(((next() >> 32) * n) >> 32); }
  bool chance(uint32_t percent) { return below(100) < percent; }
  template <typename T, uint32_t kCount>
  T pick(const T (&choices)[kCount]) {
    return choices[below(kCount)];
  }

 private:
  uint64_t state_;
};

}  // namespace fw::simulator
