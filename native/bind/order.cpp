// The order of the accesses of an array, for Python: see cuda/order.h.
#include "cuda/order.h"

#include <nanobind/nanobind.h>

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
// `refuse` raises what the driver has returned.
nb::object call(Order& order, uintptr_t stream, bool stores, uint64_t begin, uint64_t end,
                nb::handle queue, nb::handle refuse) {
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
      .def("call", &call, nb::arg("stream"), nb::arg("stores"), nb::arg("begin"), nb::arg("end"),
           nb::arg("queue"), nb::arg("refuse"))
      .def("done", &Order::done)
      .def("close", &Order::close);
}
