// The elements of a machine's volume, with a history that checks each load.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "flashwarp/array.cuh"
#include "history.h"
#include "machine.h"

namespace fw::simulator {

// The elements of one volume, with a history: every value names its place and its version. Those of
// 8 bytes have the version at both ends, so that a value of two parts of different stores shows.
template <typename T = uint64_t>
class Elements {
  static_assert(sizeof(T) == 8 || sizeof(T) == 4);

 public:
  Elements(Machine& machine, uint32_t volume)
      : machine_(machine),
        volume_(volume),
        array_(machine.array<T>(volume)),
        history_("volume " + std::to_string(volume)),
        versions_(array_.length, 0),
        initial_(array_.length, 0) {
    for (uint32_t r = 0; r < machine.replicas(); ++r) {
      for (uint32_t i = 0; i < array_.length; ++i) *stored(i, r) = value_of(i, 0);
    }
    machine.at_rest([this] { check_storage(); });
  }
  Elements(const Elements&) = delete;
  Elements& operator=(const Elements&) = delete;

  const fw::array<T>& array() const { return array_; }
  uint32_t length() const { return uint32_t(array_.length); }

  // An element of any line, at one of three places in it, so that threads use the same elements.
  uint32_t pick(Random& random) const {
    constexpr uint32_t kPerLine = kLineBytes / sizeof(T);
    const uint32_t line = random.below(machine_.shape().lines);
    const uint32_t end = std::min((line + 1) * kPerLine, length());
    const uint32_t places[] = {line * kPerLine, line * kPerLine + 1, end - 1};
    return random.pick(places);
  }

  void load(uint32_t i) {
    load_by(i, "load", [&](uint32_t j) { return array_[j]; });
  }
  // Through any reader of one element.
  template <typename Read>
  void load_by(uint32_t i, const char* verb, Read read) {
    note(verb, i);
    const uint32_t operation = history_.begin(i, false, 0, first_value(i));
    const T value = read(i);
    // A failed transfer yields T(), which no store has.
    if (value == T() && !machine_.faulty()) scheduler.fail("a load failed without a fault");
    history_.end(operation, value, value != T());
    check_owner(i, value);
  }
  // Returns the value stored.
  T store(uint32_t i) {
    // As array::store, which leaves the status to the host.
    return store_by(i, "store", [&](uint32_t j, T value) {
      detail::store_element<sizeof(T)> op = {array_.offset_of(j), value};
      return detail::access_slow(array_.cache, array_.volume, array_.line_of(j), op, false);
    });
  }
  // Through any writer of one element, which returns its status. Returns the value stored.
  template <typename Write>
  T store_by(uint32_t i, const char* verb, Write write) {
    note(verb, i);
    const T value = next_value(i);
    const uint32_t operation = history_.begin(i, true, value, first_value(i));
    const uint32_t status = write(i, value);
    if (status != nvme::kSuccess && !machine_.faulty()) {
      scheduler.fail("a store failed without a fault");
    }
    history_.end(operation, value, status == nvme::kSuccess);
    return value;
  }
  void prefetch(uint32_t i) {
    note("prefetch", i);
    array_.prefetch(i);
  }

  // Stores to some element, loads it or prefetches it: of 100 times, `stores`, the rest up to
  // `loads`, and the rest.
  void use(Random& random, uint32_t stores = 50, uint32_t loads = 100) {
    const uint32_t i = pick(random);
    const uint32_t dice = random.below(100);
    if (dice < stores) {
      store(i);
    } else if (dice < loads) {
      load(i);
    } else {
      prefetch(i);
    }
  }

  // The caller's part of a kernel that moves many at once.
  uint32_t begin(uint32_t i, bool is_store, T value) {
    return history_.begin(i, is_store, value, first_value(i), true);
  }
  void end(uint32_t operation, uint32_t i, T value) {
    check_owner(i, value);
    history_.end(operation, value, value != T());
  }
  T next_value(uint32_t i) { return value_of(i, ++versions_[i]); }
  void check_owner(uint32_t i, T value) const {
    if (value == T()) return;
    if (sizeof(T) == 8 && uint16_t(value) != uint16_t(uint64_t(value) >> 48)) {
      scheduler.fail("element " + std::to_string(i) + " of volume " + std::to_string(volume_) +
                     " yields parts of two stores");
    }
    if (value != value_of(i, uint16_t(value))) {
      scheduler.fail("element " + std::to_string(i) + " of volume " + std::to_string(volume_) +
                     " yields a value of another place: " + std::to_string(value));
    }
  }
  // After each launch, before anything else.
  void check() { history_.check(); }

  // Changes the storage, as another program would. Between launches, while no line is cached.
  void restart() {
    history_.restart();
    for (uint32_t i = 0; i < length(); ++i) {
      initial_[i] = ++versions_[i];
      for (uint32_t r = 0; r < machine_.replicas(); ++r) {
        *stored(i, r) = value_of(i, initial_[i]);
      }
    }
  }

 private:
  T value_of(uint32_t i, uint32_t version) const {
    const uint64_t place = uint64_t(volume_ + 1) << (sizeof(T) == 8 ? 24 : 12) | i;
    const uint64_t ends = uint64_t(version) << 48 | version;
    return T(place << 16 | (sizeof(T) == 8 ? ends : version));
  }
  T first_value(uint32_t i) const { return value_of(i, initial_[i]); }
  void note(const char* verb, uint32_t i) {
    scheduler.current()->doing =
        std::string(verb) + " " + std::to_string(volume_) + "[" + std::to_string(i) + "]";
  }
  T* stored(uint32_t i, uint32_t replica) const {
    return reinterpret_cast<T*>(machine_.stored(volume_, i * sizeof(T), replica));
  }
  void check_storage() {
    for (uint32_t r = 0; r < machine_.replicas(); ++r) {
      for (uint32_t i = 0; i < length(); ++i) {
        if (*stored(i, r) != *stored(i, 0)) scheduler.fail("replicas differ");
        check_owner(i, *stored(i, r));
      }
    }
    for (uint32_t i : history_.touched()) history_.settle(i, *stored(i, 0));
  }

  Machine& machine_;
  const uint32_t volume_;
  const fw::array<T> array_;
  History history_;
  std::vector<uint32_t> versions_;
  std::vector<uint32_t> initial_;  // versions in the storage before the first store
};

// Those of all volumes.
inline std::vector<std::unique_ptr<Elements<>>> elements_of(Machine& machine) {
  std::vector<std::unique_ptr<Elements<>>> volumes;
  for (uint32_t v = 0; v < machine.shape().volumes; ++v) {
    volumes.push_back(std::make_unique<Elements<>>(machine, v));
  }
  return volumes;
}

}  // namespace fw::simulator
