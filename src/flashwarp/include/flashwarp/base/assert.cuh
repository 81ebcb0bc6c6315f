// Asserts internal invariants, in debug builds (FW_DEBUG) and in the simulator. What users can
// cause is an error and never an assertion.
#pragma once

#include "flashwarp/base/platform.cuh"

#if defined(FW_SIMULATOR)
#define FW_ASSERT(condition)                                                             \
  do {                                                                                   \
    if (!(condition)) ::fw::simulator::fail_assertion(#condition, {__FILE__, __LINE__}); \
  } while (0)
#elif defined(FW_DEBUG) && FW_ON_GPU
#define FW_ASSERT(condition)    \
  do {                          \
    if (!(condition)) __trap(); \
  } while (0)
#elif defined(FW_DEBUG)
#include <cassert>
#define FW_ASSERT(condition) assert(condition)
#else
#define FW_ASSERT(condition) \
  do {                       \
  } while (0)
#endif
