// What loads and stores of array elements returned, and whether that is possible.
//
// Each store has a value of its own. In `sc` mode an element is a register, and its history must be
// linearizable over the steps at which operations began and ended (Gibbons and Korach's zones). In
// `weak` mode a load must not return a value that it knows to be overwritten: a store that the
// value's own store happened before, and that happened before the load. Then there are no values
// from elsewhere, and none that nobody stored.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fw::simulator {

class History {
 public:
  explicit History(std::string name) : name_(std::move(name)) {}

  // Around the operation, on its fibre. Returns its number. `initial` is what the element holds
  // before its first operation. A `loose` one was done by several threads together: it knows
  // nothing of what others did before, nor they of it.
  uint32_t begin(uint32_t element, bool is_store, uint64_t value, uint64_t initial,
                 bool loose = false);
  // `happened` is false for what failed: a load without a value, a store that may or may not be.
  void end(uint32_t operation, uint64_t value, bool happened);

  // Right after a launch: throws Failure.
  void check();
  // After a flush: `value` is what the storage holds, and where the next launch begins.
  void settle(uint32_t element, uint64_t value);
  // Forgets all elements: what follows begins with other values.
  void restart() { registers_.clear(); }
  std::vector<uint32_t> touched() const;
  uint64_t operations() const { return count_; }

 private:
  struct Operation {
    uint32_t element;
    uint32_t fibre;
    uint64_t value;
    uint64_t begin;
    uint64_t end;
    uint32_t before;    // weak: what the fibre knew when it began, a snapshot
    uint32_t time_end;  // weak: the fibre's own time when it ended
    bool is_store;
    bool loose;
    bool ended;
    bool happened;
  };
  struct Register {
    uint64_t initial = 0;
    std::vector<uint32_t> operations;
    std::vector<uint64_t> last;  // weak: values that no store is known to have overwritten
  };

  void check_register(uint32_t element, const Register& r) const;
  void check_values(uint32_t element, const Register& r) const;
  void check_zones(uint32_t element, const Register& r) const;
  void check_order(uint32_t element, const Register& r) const;
  bool precedes(const Operation& a, const Operation& b) const;
  std::vector<uint64_t> possible_last(const Register& r) const;
  [[noreturn]] void report(uint32_t element, const Register& r, const std::string& what) const;

  std::string name_;
  std::vector<Operation> operations_;
  std::map<uint32_t, Register> registers_;
  uint64_t count_ = 0;
};

}  // namespace fw::simulator
