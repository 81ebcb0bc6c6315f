// The driver's calls of `cuda/context.h` for Python: handles and addresses are ints.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "bind/cuda.h"
#include "bind/unlocked.h"

namespace nb = nanobind;
using fw::native::handle;
using fw::native::Handles;
using fw::native::handles;
using fw::native::Left;
using fw::native::ParamBytes;
using fw::native::Params;
using fw::native::unlocked;
using fw::native::cuda::Capture;
using fw::native::cuda::Context;
using fw::native::cuda::GraphCount;
using fw::native::cuda::Handle;
using fw::native::cuda::kCaptured;
using fw::native::cuda::kNotReady;
using fw::native::cuda::kSuccess;
using fw::native::cuda::Memory;
using fw::native::cuda::Result;

void bind_cuda(nb::module_& m);

namespace {

// What is counted lives as long as the object here, or a graph.
struct Graphs {
  std::shared_ptr<GraphCount> count = std::make_shared<GraphCount>(0);
};

Result launch(const Context& context, uintptr_t function, uint32_t blocks, uint32_t block_threads,
              ParamBytes arguments, uintptr_t stream) {
  Params params(arguments);
  // The driver waits for room if very many launches are queued.
  return unlocked([&] {
    return context.launch(handle(function), blocks, block_threads, params.data(), handle(stream));
  });
}

using Pieces = std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>;

// Copies pieces, and appends an entry to a list. No line of Python runs between these steps, so no
// signal handler does. The entry is appended if anything may have been queued. Returns the result,
// and whether the event `end` was recorded.
std::tuple<Result, bool> copy_and_append(const Context& context, Handles others, uintptr_t mark,
                                         const Pieces& pieces, uintptr_t begin, uintptr_t end,
                                         uintptr_t stream, nb::object entries, nb::object entry) {
  const std::vector<Handle> among = handles(others);
  std::vector<fw::native::cuda::Piece> each;
  each.reserve(pieces.size());
  for (const auto& [target, source, nbytes] : pieces) each.push_back({target, source, nbytes});
  bool recorded = false;
  const Result result = unlocked([&] {
    return context.copy(among, handle(mark), each, handle(begin), handle(end), handle(stream),
                        recorded);
  });
  if (recorded) entries.attr("append")(entry);
  return {result, recorded};
}

// Whether a call at the head of its queue is over, and of those that need nothing more.
Left look_at(const Context& context, const nb::object& call, bool& over) {
  over = false;
  if (!nb::cast<bool>(call.attr("quick"))) return Left::kSlow;
  const nb::tuple watched(call.attr("seat").attr("watched"));
  const Result result = context.event_done(handle(nb::cast<uintptr_t>(watched[0])));
  if (result == kNotReady) return Left::kNothing;
  if (result != kSuccess) return Left::kFailed;
  for (size_t i = 1; i < watched.size(); ++i) {
    const auto* noted = reinterpret_cast<const volatile uint32_t*>(nb::cast<uintptr_t>(watched[i]));
    if (*noted != 0) return Left::kFailed;
  }
  over = true;
  return Left::kNothing;
}

std::tuple<Result, bool, uint64_t> capture(const Context& context, uintptr_t stream) {
  const Capture found = context.capture(handle(stream));
  return {found.result, found.active, found.id};
}

}  // namespace

// Ends the calls that are over and need nothing more, each queue's from the front: no line of
// Python runs, so no signal handler and no other thread comes between. What it leaves needs a
// thread: kSlow if a callback, a waiter of another library or a copy to the host does, kFailed if a
// failure of a call that is over does.
Left fw::native::end_calls(const Context& context, nb::handle queues) {
  Left found = Left::kNothing;
  for (nb::handle each : queues) {
    const auto calls = nb::borrow<nb::object>(each);
    while (nb::len(calls) != 0) {
      const nb::object call = calls[0];
      bool over = false;
      const Left looked = look_at(context, call, over);
      if (looked > found) found = looked;
      if (!over) break;
      const nb::object future = call.attr("future");
      // Whoever holds it is about to wait for the future, or to add a callback. The first who does
      // makes it, by lines of Python; whoever is about to sees then that the future is done.
      const nb::dict known(future.attr("__dict__"));
      const nb::object lock = known.get("_condition", nb::none());
      if (!lock.is_none() && !nb::cast<bool>(lock.attr("acquire")(false))) break;
      const bool hurried = nb::cast<bool>(future.attr("hurried"));
      if (!hurried) {
        future.attr("_result") = call.attr("result");
        future.attr("_state") = "FINISHED";
        call.attr("seat") = nb::none();
        calls.attr("popleft")();
      }
      if (!lock.is_none()) lock.attr("release")();
      if (hurried) {
        if (found == Left::kNothing) found = Left::kSlow;
        break;
      }
    }
  }
  return found;
}

void bind_cuda(nb::module_& m) {
  nb::class_<Graphs>(m, "CudaGraphs")
      .def(nb::init<>())
      .def_prop_ro("count", [](const Graphs& graphs) { return graphs.count->load(); });
  nb::class_<Context>(m, "CudaContext")
      .def(
          "__init__", [](Context* self, uintptr_t context) { new (self) Context(handle(context)); },
          nb::arg("context"))
      .def(
          "set_own", [](Context& context, uintptr_t stream) { context.set_own(handle(stream)); },
          nb::arg("stream"))
      .def("note_own", &Context::note_own, nb::arg("always"))
      .def("enter", &Context::enter)
      .def("exit", &Context::exit)
      .def("launch", &launch, nb::arg("function"), nb::arg("blocks"), nb::arg("block_threads"),
           nb::arg("arguments"), nb::arg("stream"))
      .def(
          "end_calls",
          [](const Context& context, nb::typed<nb::list, nb::object> queues) {
            return int(fw::native::end_calls(context, queues));
          },
          nb::arg("queues"))
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
      .def("copy_and_append", &copy_and_append, nb::arg("others"), nb::arg("mark"),
           nb::arg("pieces"), nb::arg("begin"), nb::arg("end"), nb::arg("stream"),
           nb::arg("entries"), nb::arg("entry"))
      .def_prop_ro("copies_batches", &Context::copies_batches)
      .def(
          "memory",
          [](const Context& context, uint64_t address) {
            Memory kind = Memory::kUnknown;
            const Result result = context.memory(address, kind);
            return std::tuple(result, int(kind));
          },
          nb::arg("address"))
      .def(
          "wait_word",
          [](const Context& context, uint64_t address, uint64_t value, uintptr_t stream) {
            return context.wait_word(address, value, handle(stream));
          },
          nb::arg("address"), nb::arg("value"), nb::arg("stream"))
      .def(
          "write_word",
          [](const Context& context, uint64_t address, uint64_t value, uintptr_t stream) {
            return context.write_word(address, value, handle(stream));
          },
          nb::arg("address"), nb::arg("value"), nb::arg("stream"))
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
