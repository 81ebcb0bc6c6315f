// The order of the accesses of an array, for Python: see cuda/order.h.
#include "cuda/order.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <optional>
#include <utility>

#include "bind/row_calls.h"

namespace nb = nanobind;
using fw::native::handle;
using fw::native::staying;
using fw::native::cuda::Context;
using fw::native::cuda::kSuccess;
using fw::native::cuda::Order;
using fw::native::cuda::Result;

void bind_order(nb::module_& m);

namespace {

// Calls `queue` between the beginning and the end of an access, which no signal handler can part.
// If the driver refuses the stream, `refuse` is called with its result, and raises. An access
// without a stream is on our `own`.
nb::object call(Order& order, nb::handle refuse, uintptr_t own, std::optional<uintptr_t> on,
                bool stores, std::pair<uint64_t, uint64_t> lines, nb::handle queue) {
  const auto [begin, end] = lines;
  const uintptr_t stream = on.value_or(own);
  Order::Access access;
  // With the GIL: no call of the driver waits in it, and giving it up would cost more.
  Result result = order.begin(handle(stream), stores, {begin, end}, access);
  if (result != kSuccess) {
    staying([&] { refuse(result, stream); });
    return nb::none();
  }
  PyObject* queued = staying([&] { return PyObject_CallNoArgs(queue.ptr()); });
  result = order.end(handle(stream), access);
  if (queued == nullptr) nb::raise_python_error();
  nb::object found = nb::steal(queued);
  if (result != kSuccess) staying([&] { refuse(result, stream); });
  return found;
}

}  // namespace

void bind_order(nb::module_& m) {
  nb::class_<Order>(m, "Order")
      .def(nb::init<const Context&>(), nb::arg("context"), nb::keep_alive<1, 2>())
      .def("call", &call, nb::arg("refuse"), nb::arg("own"), nb::arg("stream").none(),
           nb::arg("stores"), nb::arg("lines"), nb::arg("queue"))
      .def("done", &Order::done)
      .def("close", &Order::close);
}
