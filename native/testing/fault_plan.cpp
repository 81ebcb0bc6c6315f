// Matching of rules; see fault_plan.h.
#include "testing/fault_plan.h"

#include <algorithm>
#include <cerrno>

namespace fw::native {
namespace {

// SplitMix64's finalizer: neighbouring operation numbers give unrelated bits.
uint64_t mix(uint64_t value) {
  value += 0x9E3779B97F4A7C15;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

double to_unit_interval(uint64_t bits) { return double(bits >> 11) * 0x1p-53; }

bool applies(const FaultRule& rule, FaultOperation operation, uint64_t number, uint64_t offset,
             uint64_t nbytes) {
  if (rule.operation != FaultOperation::kAny && rule.operation != operation) return false;
  if (!rule.numbers.empty() &&
      std::find(rule.numbers.begin(), rule.numbers.end(), number) == rule.numbers.end()) {
    return false;
  }
  return offset < rule.last && offset + nbytes > rule.first;
}

}  // namespace

FaultPlan::FaultPlan(uint64_t seed, std::vector<FaultRule> rules) {
  replace(seed, std::move(rules));
}

void FaultPlan::replace(uint64_t seed, std::vector<FaultRule> rules) {
  const std::lock_guard guard(lock_);
  seed_ = seed;
  rules_ = std::move(rules);
  hits_.assign(rules_.size(), 0);
  counts_ = {};
}

Fault FaultPlan::next(FaultOperation operation, uint64_t offset, uint64_t nbytes) {
  const std::lock_guard guard(lock_);
  ++counts_[size_t(operation)];
  uint64_t total = 0;
  for (uint64_t count : counts_) total += count;
  for (size_t i = 0; i < rules_.size(); ++i) {
    const FaultRule& rule = rules_[i];
    const uint64_t number =
        rule.operation == FaultOperation::kAny ? total : counts_[size_t(operation)];
    if (!applies(rule, operation, number, offset, nbytes)) continue;
    const uint64_t draw = mix(mix(mix(seed_) ^ i) ^ number);
    if (to_unit_interval(draw) >= rule.probability) continue;
    ++hits_[i];
    return {rule.kind, rule.error, rule.delay_us, mix(draw)};
  }
  return {};
}

std::vector<uint64_t> FaultPlan::hits() const {
  const std::lock_guard guard(lock_);
  return hits_;
}

std::array<uint64_t, kFaultOperations> FaultPlan::operations() const {
  const std::lock_guard guard(lock_);
  return counts_;
}

bool is_transient(int error) { return error == EINTR || error == EAGAIN; }

uint64_t partial_nbytes(uint64_t draw, uint64_t nbytes, uint64_t unit) {
  const uint64_t units = (nbytes + unit - 1) / unit;
  return units == 0 ? 0 : std::min(nbytes, draw % units * unit);
}

}  // namespace fw::native
