// The driver's calls of `cuda/context.h` for Python: handles and addresses are ints.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "bind/unlocked.h"
#include "cuda/context.h"

namespace nb = nanobind;
using fw::native::unlocked;
using fw::native::cuda::Capture;
using fw::native::cuda::Context;
using fw::native::cuda::GraphCount;
using fw::native::cuda::Handle;
using fw::native::cuda::kSuccess;
using fw::native::cuda::Result;

void bind_cuda(nb::module_& m);

namespace {

Handle handle(uintptr_t value) { return reinterpret_cast<Handle>(value); }

// What is counted lives as long as the object here, or a graph.
struct Graphs {
  std::shared_ptr<GraphCount> count = std::make_shared<GraphCount>(0);
};

Result launch(const Context& context, uintptr_t function, uint32_t blocks, uint32_t block_threads,
              const std::vector<nb::bytes>& arguments, uintptr_t stream) {
  std::vector<void*> params;
  params.reserve(arguments.size());
  for (const nb::bytes& each : arguments) params.push_back(const_cast<char*>(each.c_str()));
  // The driver waits for room if very many launches are queued.
  return unlocked([&] {
    return context.launch(handle(function), blocks, block_threads, params.data(), handle(stream));
  });
}

Result launch_after(const Context& context, uintptr_t before, uintptr_t event, uintptr_t function,
                    uint32_t blocks, uint32_t block_threads, nb::bytes argument, uintptr_t stream) {
  void* params[] = {const_cast<char*>(argument.c_str())};
  return unlocked([&] {
    return context.launch_after(handle(before), handle(event), handle(function), blocks,
                                block_threads, params, handle(stream));
  });
}

// No line of Python runs between these steps, so no signal handler does.
Result launch_and_append(const Context& context, uintptr_t function, uint32_t blocks,
                         uint32_t block_threads, const std::vector<nb::bytes>& arguments,
                         uintptr_t stream, uintptr_t event, nb::object calls, nb::object call) {
  Result result = launch(context, function, blocks, block_threads, arguments, stream);
  if (result != kSuccess) return result;
  result = context.record(handle(event), handle(stream));
  calls.attr("append")(call);
  return result;
}

std::tuple<Result, bool, uint64_t> capture(const Context& context, uintptr_t stream) {
  const Capture found = context.capture(handle(stream));
  return {found.result, found.active, found.id};
}

}  // namespace

void bind_cuda(nb::module_& m) {
  nb::class_<Graphs>(m, "CudaGraphs")
      .def(nb::init<>())
      .def_prop_ro("count", [](const Graphs& graphs) { return graphs.count->load(); });
  nb::class_<Context>(m, "CudaContext")
      .def(
          "__init__", [](Context* self, uintptr_t context) { new (self) Context(handle(context)); },
          nb::arg("context"))
      .def("enter", &Context::enter)
      .def("exit", &Context::exit)
      .def("launch", &launch, nb::arg("function"), nb::arg("blocks"), nb::arg("block_threads"),
           nb::arg("arguments"), nb::arg("stream"))
      .def("launch_after", &launch_after, nb::arg("before"), nb::arg("event"), nb::arg("function"),
           nb::arg("blocks"), nb::arg("block_threads"), nb::arg("argument"), nb::arg("stream"))
      .def("launch_and_append", &launch_and_append, nb::arg("function"), nb::arg("blocks"),
           nb::arg("block_threads"), nb::arg("arguments"), nb::arg("stream"), nb::arg("event"),
           nb::arg("calls"), nb::arg("call"))
      .def(
          "order",
          [](const Context& context, uintptr_t before, uintptr_t after, uintptr_t event) {
            return context.order(handle(before), handle(after), handle(event));
          },
          nb::arg("before"), nb::arg("after"), nb::arg("event"))
      .def(
          "record",
          [](const Context& context, uintptr_t event, uintptr_t stream) {
            return context.record(handle(event), handle(stream));
          },
          nb::arg("event"), nb::arg("stream"))
      .def(
          "done",
          [](const Context& context, uintptr_t stream) { return context.done(handle(stream)); },
          nb::arg("stream"))
      .def(
          "event_done",
          [](const Context& context, uintptr_t event) { return context.event_done(handle(event)); },
          nb::arg("event"))
      .def(
          "wait_any",
          [](const Context& context, const std::vector<uintptr_t>& events, int64_t microseconds) {
            std::vector<Handle> handles;
            for (const uintptr_t each : events) handles.push_back(handle(each));
            return unlocked([&] { return context.wait_any(handles, microseconds); });
          },
          nb::arg("events"), nb::arg("microseconds"))
      .def(
          "poll",
          [](const Context& context, uintptr_t stream, int64_t microseconds) {
            return unlocked([&] { return context.poll(handle(stream), microseconds); });
          },
          nb::arg("stream"), nb::arg("microseconds"))
      .def(
          "fill",
          [](const Context& context, uint64_t address, uint32_t word, size_t count,
             uintptr_t stream) { return context.fill(address, word, count, handle(stream)); },
          nb::arg("address"), nb::arg("word"), nb::arg("count"), nb::arg("stream"))
      .def("capture", &capture, nb::arg("stream"))
      .def(
          "capture_call",
          [](const Context& context, uintptr_t stream, uintptr_t call, uintptr_t argument) {
            return context.capture_call(handle(stream), reinterpret_cast<void (*)(void*)>(call),
                                        reinterpret_cast<void*>(argument));
          },
          nb::arg("stream"), nb::arg("call"), nb::arg("argument"))
      .def(
          "capture_count",
          [](const Context& context, uintptr_t stream, const Graphs& graphs) {
            return context.capture_count(handle(stream), graphs.count);
          },
          nb::arg("stream"), nb::arg("graphs"));
}
