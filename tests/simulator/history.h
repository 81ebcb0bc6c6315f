// The history of loads and stores of array elements, and whether it is possible.
//
// Each store has a unique value. In `sc` mode an element is a register, and its history must be
// linearizable over the steps at which operations began and ended (Gibbons and Korach's zones). In
// `weak` mode a load must not return the value of a store if another store happened after that
// store and before the load. In both modes every loaded value was stored to that element.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fw::simulator {

class History {
 public:
  explicit History(std::string name) : name_(std::move(name)) {}

  // Call begin and end around the operation, on its fibre. Returns its number. `initial` is the
  // element's value before its first operation. A `loose` operation is the work of several threads
  // together: nothing happens before it or after it.
  uint32_t begin(uint32_t element, bool is_store, uint64_t value, uint64_t initial,
                 bool loose = false);
  // `happened` is false if it failed: a load without a value, or a store that may or may not be
  // done.
  void end(uint32_t operation, uint64_t value, bool happened);

  // Right after a launch: throws Failure.
  void check();
  // After a flush: `value` is the storage's, with which the next launch begins.
  void settle(uint32_t element, uint64_t value);
  // Forgets all elements, because their values change without operations.
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
