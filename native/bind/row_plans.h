// The plans of an array's launches, kept from call to call: see launch/plan.h. Needs the GIL, and
// for plans of rows the turn of the array's cache.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "bind/cuda.h"
#include "launch/plan.h"
#include "nvme/controller.h"

namespace fw::native {

namespace nb = nanobind;

// The name of an attribute, for look-ups.
inline nb::object interned(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }

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
  // `deferral` knows how many blocks fetch what launches of at least `count_min` defer; or None.
  RowPlans(const RowMembers& members, nb::object deferral, uint64_t count_min)
      : members_(members), deferral_(std::move(deferral)), count_min_(count_min) {}

  // The plan of calls of one size, whose rows begin at an address. Makes it by `prepare_rows` of
  // the array's launcher if there is none. May call code of Python first, and none behind it.
  PreparedRows& of(nb::handle launcher, RowSize size, uint64_t rows);
  // Launches on the CPU device, and returns at the end of the launch.
  void run(nb::handle launcher, const RowSize& size, const RowOperands& operands,
           uint64_t strays = 0);

 private:
  const RowMembers members_;
  const nb::object deferral_;
  const uint64_t count_min_;
  const nb::object wake_ = interned("wake"), look_ahead_ = interned("look_ahead");
  Plans<RowSize, PreparedRows, RowSizeHash> plans_;
};

const char* name_of(RowSize::Verb verb);
RowSize::Verb verb_of(std::string_view name);

using Counting = std::array<uint64_t, 3>;  // see `RowSize`

// The controllers among what a launch uses: memory, and controllers, which waiting threads serve.
// The caller's argument keeps all of it alive until the launch has ended, even if it is closed
// meanwhile.
std::vector<Controller*> controllers_of(nb::handle uses);

}  // namespace fw::native
