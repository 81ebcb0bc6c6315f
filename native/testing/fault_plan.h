// Decides which operations of a storage fail, and how, by rules, a seed and counters. For tests.
//
// Whether a rule applies to operation number k depends only on the seed, the rule and k. So runs
// with the same order of operations fail in the same way. Any thread may call; one lock guards the
// counters.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace fw::native {

enum class FaultOperation : uint8_t { kRead, kWrite, kFlush, kDiscard, kWriteZeroes, kAny };
inline constexpr size_t kFaultOperations = size_t(FaultOperation::kAny);

enum class FaultKind : uint8_t {
  kNone,
  kError,  // transfers nothing and returns `error`
  kTorn,   // writes a part, then returns EIO
  kShort,  // the kernel transfers a part and returns its length; the caller continues
  kDelay,  // takes `delay_us` longer
  kFlip,   // changes a bit of what is read
  kHang,   // gives no result until the controller stops
};

struct FaultRule {
  FaultOperation operation = FaultOperation::kAny;
  FaultKind kind = FaultKind::kNone;
  int error = 0;
  uint64_t delay_us = 0;
  double probability = 1;
  std::vector<uint64_t> numbers;  // from 1, counted for each kind of operation; empty: all
  uint64_t first = 0;             // operations on bytes of [first, last) of the namespace
  uint64_t last = ~uint64_t(0);
};

// The fault of one operation. `draw` has random bits, for example for the length of a part.
struct Fault {
  FaultKind kind = FaultKind::kNone;
  int error = 0;
  uint64_t delay_us = 0;
  uint64_t draw = 0;
};

class FaultPlan {
 public:
  FaultPlan(uint64_t seed, std::vector<FaultRule> rules);

  // Replaces seed and rules, and starts to count again.
  void replace(uint64_t seed, std::vector<FaultRule> rules);

  // Counts an operation on [offset, offset + nbytes). Returns the fault of the first rule that
  // applies.
  Fault next(FaultOperation operation, uint64_t offset, uint64_t nbytes);

  // How often each rule has applied since `replace`, in the order of the rules.
  std::vector<uint64_t> hits() const;

  // How many operations of each kind there were since `replace`.
  std::array<uint64_t, kFaultOperations> operations() const;

 private:
  mutable std::mutex lock_;
  uint64_t seed_;
  std::vector<FaultRule> rules_;
  std::vector<uint64_t> hits_;
  std::array<uint64_t, kFaultOperations> counts_ = {};
};

// Whether an operation with this error must be tried again.
bool is_transient(int error);

// Drives write whole sectors: between two of them a write is torn, and a buffered transfer stops.
constexpr uint64_t kSectorBytes = 512;

// How many of `nbytes` a torn or short transfer moves: whole units, fewer than all.
uint64_t partial_nbytes(uint64_t draw, uint64_t nbytes, uint64_t unit);

}  // namespace fw::native
