// Decides which operations of a storage fail, and how: rules, a seed and counters.
//
// For tests of what lies above a storage. Whether operation number k meets a rule depends on the
// seed, the rule and k alone, so a run in which operations come in the same order fails in the same
// way. Any thread may ask; one lock guards the counters.
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
  kError,  // nothing is transferred, `error` is returned
  kTorn,   // a part of a write lands, then EIO
  kShort,  // the kernel transfers a part and says so; whoever asked goes on
  kDelay,  // it takes `delay_us` longer
  kFlip,   // a bit of what is read is wrong
  kHang,   // no answer until the controller stops
};

struct FaultRule {
  FaultOperation operation = FaultOperation::kAny;
  FaultKind kind = FaultKind::kNone;
  int error = 0;
  uint64_t delay_us = 0;
  double probability = 1;
  std::vector<uint64_t> numbers;  // from 1 on, counted per operation; empty: all
  uint64_t first = 0;             // operations that touch [first, last) of the namespace
  uint64_t last = ~uint64_t(0);
};

// What shall happen to one operation. `draw` are random bits for what is left to choose.
struct Fault {
  FaultKind kind = FaultKind::kNone;
  int error = 0;
  uint64_t delay_us = 0;
  uint64_t draw = 0;
};

class FaultPlan {
 public:
  FaultPlan(uint64_t seed, std::vector<FaultRule> rules);

  // Takes the place of seed and rules; counting starts again.
  void replace(uint64_t seed, std::vector<FaultRule> rules);

  // Counts an operation on [offset, offset + nbytes) and says what the first rule that it meets
  // wants.
  Fault next(FaultOperation operation, uint64_t offset, uint64_t nbytes);

  // How many operations each rule has hit, in the order of the rules, since `replace`.
  std::vector<uint64_t> hits() const;

  // How many operations of each kind were counted since `replace`.
  std::array<uint64_t, kFaultOperations> operations() const;

 private:
  mutable std::mutex lock_;
  uint64_t seed_;
  std::vector<FaultRule> rules_;
  std::vector<uint64_t> hits_;
  std::array<uint64_t, kFaultOperations> counts_ = {};
};

// Whether the kernel answers so for reasons of its own and the operation shall be tried again.
bool is_transient(int error);

// How many of `nbytes` a torn or short transfer moves: whole units, fewer than all.
uint64_t partial_nbytes(uint64_t draw, uint64_t nbytes, uint64_t unit);

}  // namespace fw::native
