// The plans of an array's launches, kept from call to call: see launch/plan.h. Needs the GIL, and
// for plans of rows the turn of the array's cache.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <tuple>
#include <vector>

#include "bind/cuda.h"
#include "launch/plan.h"
#include "nvme/controller.h"

namespace fw::native {

namespace nb = nanobind;

// A plan, and the launch of Python's that owns what it names.
struct Prepared {
  nb::object launch;
  Plan plan;

  Prepared() = default;
  explicit Prepared(nb::object made);
};

struct PreparedRows : Prepared {
  RowParameter parameter;

  PreparedRows() = default;
  PreparedRows(nb::object made, const nb::bytes& parameter, const RowMembers& members);
};

// The plans of launches on the rows of one array.
class RowPlans {
 public:
  explicit RowPlans(const RowMembers& members) : members_(members) {}

  // The plan of calls of one size, whose rows begin at an address. Makes it by `prepare_rows` of
  // the array's launcher if there is none.
  PreparedRows& of(nb::handle launcher, RowSize size, uint64_t rows);

 private:
  const RowMembers members_;
  Plans<RowSize, PreparedRows, RowSizeHash> plans_;
};

const char* name_of(RowSize::Verb verb);

// Operands of a gather that the GPU reaches: address of the indices, their number and size, and
// address of the rows.
using Which = std::tuple<uint64_t, uint64_t, uint8_t, uint64_t>;
using Counting = std::array<uint64_t, 3>;  // see `RowSize`

// The controllers among what a launch uses: memory, and controllers, which waiting threads serve.
// The caller's argument keeps all of it alive until the launch has ended, even if it is closed
// meanwhile.
std::vector<Controller*> controllers_of(nb::handle uses);

}  // namespace fw::native
