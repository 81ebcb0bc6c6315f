// What other bindings use of `bind/cuda.cpp`.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <iterator>
#include <vector>

#include "cuda/context.h"

namespace fw::native {

using ParamBytes = nanobind::typed<nanobind::tuple, nanobind::bytes, nanobind::ellipsis>;
using Handles = nanobind::typed<nanobind::tuple, nanobind::int_, nanobind::ellipsis>;

inline cuda::Handle handle(uintptr_t value) { return reinterpret_cast<cuda::Handle>(value); }

inline std::vector<cuda::Handle> handles(const nanobind::tuple& values) {
  std::vector<cuda::Handle> found;
  found.reserve(values.size());
  for (nanobind::handle each : values) found.push_back(handle(nanobind::cast<uintptr_t>(each)));
  return found;
}

// The parameters of a launch, as the driver takes them. Each is a bytes object.
class Params {
 public:
  explicit Params(const nanobind::tuple& arguments) : count_(arguments.size()) {
    if (count_ > std::size(few_)) many_.resize(count_);
    for (size_t i = 0; i < count_; ++i) {
      data()[i] = PyBytes_AsString(arguments[i].ptr());
      if (data()[i] == nullptr) throw nanobind::python_error();
    }
  }
  // Null if there are none.
  void** data() { return count_ == 0 ? nullptr : many_.empty() ? few_ : many_.data(); }

 private:
  size_t count_;
  void* few_[16] = {};
  std::vector<void*> many_;
};

// What `end_calls` has left: nothing, calls that need a thread, or a call that has failed.
enum Left : int { kNothing, kSlow, kFailed };

// Ends the asynchronous calls that are over and need nothing more. `queues` is a list of deques.
Left end_calls(const cuda::Context& context, nanobind::handle queues);

}  // namespace fw::native
