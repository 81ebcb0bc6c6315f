// Python bindings of controllers and of the modelled drive.
//
// Calls that may wait release the GIL; use in a forked child raises RuntimeError, since the threads
// that would do the work stayed in the parent.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/convert.h"
#include "nvme/controller.h"
#include "nvme/model/ssd_model.h"
#include "nvme/sleepers.h"
#include "nvme/software/heart.h"
#include "nvme/software/identify.h"
#include "nvme/software/software_controller.h"

namespace nb = nanobind;
using namespace fw::native;

void bind_controller(nb::module_& m);

namespace {

nb::dict stats_of(SoftwareController& controller) {
  const ControllerCounters counters = controller.counters();
  nb::dict commands;
  for (size_t kind = 0; kind < kCommandKinds; ++kind) {
    commands[command_name(CommandKind(kind))] = counters.commands[kind];
  }
  nb::dict queues;
  for (const auto& [id, count] : counters.queues) queues[nb::int_(id)] = count;
  nb::dict result;
  result["commands"] = commands;
  result["queues"] = queues;
  result["bytes_read"] = counters.bytes_read;
  result["bytes_written"] = counters.bytes_written;
  result["errors"] = counters.errors;
  result["errors_dropped"] = controller.errors_dropped();
  result["doorbell_reads"] = counters.doorbell_reads;
  result["sleeps"] = counters.sleeps;
  result["wakes"] = counters.wakes;
  result["engine_operations"] = counters.engine_operations;
  result["engine_fallbacks"] = counters.engine_fallbacks;
  result["io_uring_enters"] = counters.kernel_enters;
  result["held"] = counters.held;
  return result;
}

nb::dict describe_software(const SoftwareController& controller) {
  nb::dict result = to_dict(controller.describe());
  result["storage"] = to_dict(controller.storage().describe());
  return result;
}

nb::bytes to_bytes(const IdentifyData& data) { return nb::bytes(data.data(), data.size()); }

void require_parent(const Controller& controller) {
  if (controller.in_forked_child()) throw std::runtime_error(kForkMessage);
}

}  // namespace

void bind_controller(nb::module_& m) {
  using Ceilings = std::vector<std::pair<uint32_t, double>>;
  nb::class_<SsdDirection>(m, "SsdDirection")
      .def(nb::init<Ceilings, double, std::vector<float>>(), nb::arg("ceilings"),
           nb::arg("bytes_per_s"), nb::arg("service_ns"));
  nb::class_<SsdParameters>(m, "SsdParameters")
      .def(nb::init<const SsdDirection&, const SsdDirection&, uint32_t, uint64_t>(),
           nb::arg("read"), nb::arg("write"), nb::arg("units"), nb::arg("seed"));
  nb::class_<SsdModel>(m, "SsdModel")
      .def(nb::init<const SsdParameters&>(), nb::arg("parameters"))
      .def("admit", &SsdModel::admit, nb::arg("now_ns"), nb::arg("is_write"), nb::arg("blocks"));

  nb::class_<QueuePairAddresses>(m, "QueuePair")
      .def(nb::init<uint64_t, uint64_t, uint64_t, uint64_t, uint32_t, uint16_t, uint64_t>(),
           nb::kw_only(), nb::arg("sq"), nb::arg("cq"), nb::arg("sq_doorbell"),
           nb::arg("cq_doorbell"), nb::arg("depth"), nb::arg("id"), nb::arg("heartbeat") = 0)
      .def_ro("sq", &QueuePairAddresses::sq)
      .def_ro("cq", &QueuePairAddresses::cq)
      .def_ro("sq_doorbell", &QueuePairAddresses::sq_doorbell)
      .def_ro("cq_doorbell", &QueuePairAddresses::cq_doorbell)
      .def_ro("depth", &QueuePairAddresses::depth)
      .def_ro("id", &QueuePairAddresses::id);

  m.def("shared_heartbeat", [] { return reinterpret_cast<uintptr_t>(Heart::shared_word()); });

  nb::class_<Controller>(m, "Controller")
      .def("start",
           [](Controller& c) {
             require_parent(c);
             unlocked([&] { c.start(); });
           })
      .def("stop", &Controller::stop, WithoutGil())
      .def("wake", &Controller::wake)
      .def("launch_begins", &Controller::launch_begins)
      .def("launch_ends", &Controller::launch_ends)
      .def("hear_launches", &Controller::hear_launches, nb::arg("all"))
      .def(
          "serve_some",
          [](Controller& c, uint32_t first_queue) {
            require_parent(c);
            return unlocked([&] { return c.serve_some(first_queue); });
          },
          nb::arg("first_queue") = 0)
      .def("progress",
           [](Controller& c) {
             const ControllerProgress progress = c.progress();
             return std::pair(progress.commands, progress.waited);
           })
      .def("take_errors", &take_errors<Controller>)
      .def("describe", [](const Controller& c) { return to_dict(c.describe()); })
      .def_prop_ro("queue_pairs", &Controller::queue_pairs)
      .def_prop_ro("serving", &Controller::serving);

  nb::class_<WakeCall>(m, "WakeCall")
      .def(
          "__init__",
          [](WakeCall* self, const std::vector<Controller*>& controllers) {
            std::vector<std::shared_ptr<Sleepers>> all;
            for (Controller* controller : controllers) {
              if (auto sleepers = controller->sleepers()) all.push_back(std::move(sleepers));
            }
            new (self) WakeCall(std::move(all));
          },
          nb::arg("controllers"))
      .def_prop_ro(
          "function",
          [](const WakeCall&) { return reinterpret_cast<uintptr_t>(WakeCall::function()); })
      .def_prop_ro("argument",
                   [](WakeCall& call) { return reinterpret_cast<uintptr_t>(call.argument()); });

  using Regions = std::vector<std::pair<uint64_t, uint64_t>>;
  nb::class_<SoftwareController, Controller>(m, "SoftwareController")
      .def(
          "__init__",
          [](SoftwareController* self, std::shared_ptr<Storage> storage,
             std::vector<QueuePairAddresses> queue_pairs, Regions dma_regions, uint32_t threads,
             uint64_t page_bytes, uint64_t max_transfer_bytes, int64_t spin_ns, bool yields,
             std::optional<SsdParameters> model, nb::object) {
            const ControllerOptions options = {.threads = threads,
                                               .page_bytes = page_bytes,
                                               .max_transfer_bytes = max_transfer_bytes,
                                               .spin_ns = spin_ns,
                                               .yields = yields,
                                               .model = std::move(model)};
            const Unlocked unlocked;
            new (self) SoftwareController(std::move(storage), std::move(queue_pairs),
                                          std::move(dma_regions), options);
          },
          nb::arg("storage"), nb::arg("queue_pairs"), nb::arg("dma_regions") = Regions(),
          nb::arg("threads") = 1, nb::arg("page_bytes") = uint64_t(2) << 20,
          nb::arg("max_transfer_bytes") = uint64_t(2) << 20, nb::arg("spin_ns") = 100'000,
          nb::arg("yields") = false, nb::arg("model") = nb::none(), nb::arg("keeps") = nb::none(),
          // What holds the rings and the memory that commands name: it outlives the threads.
          nb::keep_alive<1, 11>())
      .def_prop_ro("stats", &stats_of)
      .def("describe", &describe_software)
      .def("identify_controller",
           [](SoftwareController& c) { return to_bytes(c.identify_controller_data()); })
      .def("identify_namespace",
           [](SoftwareController& c) { return to_bytes(c.identify_namespace_data()); });
}
