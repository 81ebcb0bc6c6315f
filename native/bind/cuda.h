// What other bindings use of `bind/cuda.cpp`.
#pragma once

#include <nanobind/nanobind.h>

#include "cuda/context.h"

namespace fw::native {

// What `end_calls` has left: nothing, calls that need a thread, or a call that has failed.
enum Left : int { kNothing, kSlow, kFailed };

// Ends the asynchronous calls that are over and need nothing more. `queues` is a list of deques.
Left end_calls(const cuda::Context& context, nanobind::handle queues);

}  // namespace fw::native
