// What the native test programs share: a check, and turns that a seed draws.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>

namespace fw::stress {

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::abort();
}

template <typename T>
uint64_t address(const T* p) {
  return reinterpret_cast<uint64_t>(p);
}

// The budget of a program.
inline double seconds() {
  const char* text = std::getenv("FLASHWARP_STRESS_SECONDS");
  return text != nullptr ? std::atof(text) : 5.0;
}

// The program's argument, or 1; it is printed.
inline uint32_t seed_of(int count, char** arguments) {
  const uint32_t seed = count > 1 ? uint32_t(std::atoi(arguments[1])) : 1;
  std::printf("seed %u\n", seed);
  std::fflush(stdout);
  return seed;
}

// Takes turns until `seconds()` have passed, and some at least.
inline int take_turns(int count, char** arguments, const char* of_what,
                      const std::function<void(uint32_t turn, std::mt19937& random)>& turn_of,
                      uint32_t turns_min = 1) {
  std::mt19937 random(seed_of(count, arguments));
  const auto start = std::chrono::steady_clock::now();
  const auto spent = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  uint32_t turn = 0;
  for (; turn < turns_min || spent() < seconds(); ++turn) turn_of(turn, random);
  std::printf("%u %s in %.1f s\n", turn, of_what, spent());
  return EXIT_SUCCESS;
}

}  // namespace fw::stress
