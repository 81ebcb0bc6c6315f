#include "history.h"

#include <algorithm>
#include <cstdio>

#include "memory.h"
#include "scheduler.h"

namespace fw::simulator {
namespace {

constexpr uint64_t kNever = ~uint64_t(0);
constexpr uint32_t kStorage = ~0u;  // in place of a fibre

std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%#llx", (unsigned long long)value);
  return text;
}

}  // namespace

uint32_t History::begin(uint32_t element, bool is_store, uint64_t value, uint64_t initial,
                        bool loose) {
  const uint32_t fibre = scheduler.current()->id;
  Operation o = {element, fibre, value, scheduler.accesses(), kNever, 0, 0, is_store,
                 loose,   false, false};
  if (memory.weak() && !loose) o.before = memory.snapshot(fibre);
  Register& r = registers_.try_emplace(element, Register{initial, {}, {}}).first->second;
  r.operations.push_back(uint32_t(operations_.size()));
  operations_.push_back(o);
  ++count_;
  return uint32_t(operations_.size() - 1);
}

void History::end(uint32_t operation, uint64_t value, bool happened) {
  Operation& o = operations_[operation];
  o.end = scheduler.accesses();
  if (memory.weak()) {
    o.time_end = memory.own_time(o.fibre);
    // Later operations do not happen before what other fibres learn from this one.
    memory.snapshot(o.fibre);
  }
  if (!o.is_store) o.value = value;
  o.ended = true;
  o.happened = happened;
}

void History::check() {
  for (auto& [element, r] : registers_) {
    if (r.operations.empty()) continue;
    check_register(element, r);
    if (memory.weak()) r.last = possible_last(r);
  }
}

void History::check_register(uint32_t element, const Register& r) const {
  check_values(element, r);
  if (memory.weak()) {
    check_order(element, r);
  } else {
    check_zones(element, r);
  }
}

void History::settle(uint32_t element, uint64_t value) {
  Register& r = registers_[element];
  // The storage, as a load after everything else.
  const Operation last = {element, kStorage, value, scheduler.accesses(), kNever - 1, 0, 0, false,
                          false,   true,     true};
  r.operations.push_back(uint32_t(operations_.size()));
  operations_.push_back(last);
  check_values(element, r);
  if (!memory.weak()) {
    check_zones(element, r);
  } else if (std::find(r.last.begin(), r.last.end(), value) == r.last.end()) {
    report(element, r, "the storage holds " + hex(value) + ", which was overwritten");
  }
  r.operations.clear();
  r.initial = value;
}

std::vector<uint32_t> History::touched() const {
  std::vector<uint32_t> elements;
  for (const auto& [element, r] : registers_) {
    if (!r.operations.empty()) elements.push_back(element);
  }
  return elements;
}

void History::check_values(uint32_t element, const Register& r) const {
  for (uint32_t number : r.operations) {
    const Operation& load = operations_[number];
    if (load.is_store || !load.happened || load.value == r.initial) continue;
    const auto store = std::find_if(r.operations.begin(), r.operations.end(), [&](uint32_t n) {
      return operations_[n].is_store && operations_[n].value == load.value;
    });
    if (store == r.operations.end()) {
      report(element, r, "a load returned " + hex(load.value) + ", which nobody stored there");
    }
    if (operations_[*store].begin > load.end) {
      report(element, r, "a load returned " + hex(load.value) + " before it was stored");
    }
  }
}

// A cluster is a store with the loads that returned its value; its zone reaches from the first end
// to the last begin in it. Linearizable exactly when no two forward zones overlap and no backward
// zone lies inside a forward one.
void History::check_zones(uint32_t element, const Register& r) const {
  struct Zone {
    uint64_t value;
    uint64_t first_end;
    uint64_t last_begin;
  };
  std::vector<Zone> zones;
  zones.push_back({r.initial, 0, 0});
  for (uint32_t number : r.operations) {
    const Operation& o = operations_[number];
    if (o.is_store) zones.push_back({o.value, o.happened ? o.end : kNever, o.begin});
  }
  std::vector<bool> counts(zones.size(), true);
  for (uint32_t i = 1; i < zones.size(); ++i) counts[i] = zones[i].first_end != kNever;
  for (uint32_t number : r.operations) {
    const Operation& o = operations_[number];
    if (o.is_store || !o.happened) continue;
    for (uint32_t i = 0; i < zones.size(); ++i) {
      if (zones[i].value != o.value) continue;
      zones[i].first_end = std::min(zones[i].first_end, o.end);
      zones[i].last_begin = std::max(zones[i].last_begin, o.begin);
      counts[i] = true;  // seen, so a store that failed did happen
      break;
    }
  }
  for (uint32_t i = 0; i < zones.size(); ++i) {
    const Zone& a = zones[i];
    if (!counts[i] || a.first_end >= a.last_begin) continue;
    for (uint32_t j = 0; j < zones.size(); ++j) {
      const Zone& b = zones[j];
      if (i == j || !counts[j]) continue;
      if (a.first_end < b.last_begin && b.first_end < a.last_begin) {
        report(element, r,
               "no order of the operations explains " + hex(a.value) + " and " + hex(b.value));
      }
    }
  }
}

// Happens-before: the end of `a` is known where `b` begins.
bool History::precedes(const Operation& a, const Operation& b) const {
  return a.ended && !a.loose && memory.snapshot_knows(b.before, a.fibre, a.time_end);
}

std::vector<uint64_t> History::possible_last(const Register& r) const {
  std::vector<uint64_t> values;
  bool stored = false;
  for (uint32_t s : r.operations) {
    const Operation& store = operations_[s];
    if (!store.is_store) continue;
    stored = stored || store.happened;
    const bool overwritten = std::any_of(r.operations.begin(), r.operations.end(), [&](uint32_t n) {
      const Operation& later = operations_[n];
      return later.is_store && later.happened && precedes(store, later);
    });
    if (!overwritten) values.push_back(store.value);
  }
  if (!stored) values.push_back(r.initial);
  return values;
}

void History::check_order(uint32_t element, const Register& r) const {
  for (uint32_t l : r.operations) {
    const Operation& load = operations_[l];
    if (load.is_store || !load.happened) continue;
    const Operation* source = nullptr;
    for (uint32_t s : r.operations) {
      if (operations_[s].is_store && operations_[s].value == load.value) source = &operations_[s];
    }
    for (uint32_t n : r.operations) {
      const Operation& between = operations_[n];
      if (!between.happened || !precedes(between, load) || between.value == load.value) continue;
      // A later store, or a load of one, that this load knows of.
      const Operation* newer = &between;
      if (!between.is_store) {
        newer = nullptr;
        for (uint32_t s : r.operations) {
          const Operation& store = operations_[s];
          if (store.is_store && store.value == between.value) newer = &store;
        }
      }
      if (newer == nullptr || newer == source) continue;
      if (source == nullptr || precedes(*source, *newer)) {
        report(element, r,
               "a load returned " + hex(load.value) + " although it knows of " + hex(newer->value));
      }
    }
  }
}

void History::report(uint32_t element, const Register& r, const std::string& what) const {
  std::string text = name_ + "[" + std::to_string(element) + "]: " + what + "\n  it held " +
                     hex(r.initial) + " at first; then, by step and thread:\n";
  for (uint32_t number : r.operations) {
    const Operation& o = operations_[number];
    text += "    " + std::to_string(o.begin) + " to " +
            (o.ended ? o.end >= kNever - 1 ? "the end" : std::to_string(o.end) : "never") + ": ";
    text += o.fibre == kStorage ? "the storage after a flush" : "thread " + std::to_string(o.fibre);
    text += (o.is_store ? " stores " : " loads ") + hex(o.value);
    if (o.ended && !o.happened) text += ", which failed";
    text += "\n";
  }
  throw Failure(text);
}

}  // namespace fw::simulator
