// Python bindings of the engine of batches. Calls that may wait release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/convert.h"
#include "cuda/context.h"
#include "pipeline/batch_engine.h"
#include "pipeline/cuda_stream.h"
#include "pipeline/host_stream.h"

namespace nb = nanobind;
using namespace fw::native;
using namespace fw::native::pipeline;

void bind_pipeline(nb::module_& m);

namespace {

const char* text_of(WorkerReason reason) {
  switch (reason) {
    case WorkerReason::kIoBound:
      return "workers had no pause";
    case WorkerReason::kIdle:
      return "fewer are enough";
    case WorkerReason::kSlowed:
      return "batches came later with the other count";
    default:
      return "";
  }
}

nb::dict to_dict(const EngineStats& stats) {
  nb::dict result;
  result["workers"] = stats.workers;
  for (const uint32_t i : {0, 1}) {
    nb::dict each;
    each["batches"] = stats.batches[i];
    each["rows"] = stats.rows[i];
    each["nbytes"] = stats.nbytes[i];
    each["failed"] = stats.failed[i];
    result[i == 0 ? "prefetch" : "write_back"] = each;
  }
  result["transfers"] = stats.runs;
  result["overdue"] = stats.overdue;
  result["io_s"] = double(stats.io_ns) / 1e9;
  result["idle_s"] = double(stats.idle_ns) / 1e9;
  result["worker_cpu_s"] = double(stats.worker_cpu_ns) / 1e9;
  result["polling_cpu_s"] = double(stats.polling_cpu_ns) / 1e9;
  result["polling_sleeps"] = stats.polling_sleeps;
  result["engine"] = stats.engine;
  result["decision_count"] = stats.decision_count;
  nb::list decisions;
  for (const WorkerDecision& each : stats.decisions) {
    nb::dict one;
    one["time_s"] = double(each.time_ns) / 1e9;
    one["from"] = each.from;
    one["to"] = each.to;
    one["reason"] = text_of(each.reason);
    one["io_s"] = double(each.io_ns) / 1e9;
    one["idle_s"] = double(each.idle_ns) / 1e9;
    decisions.append(one);
  }
  result["decisions"] = decisions;
  return result;
}

using Drive = std::tuple<std::shared_ptr<Storage>, std::optional<SsdParameters>>;

void make_engine(BatchEngine* self, std::shared_ptr<Storage> storage, uint64_t row_bytes,
                 uint64_t rows, std::vector<PortOptions> ports,
                 std::pair<uint32_t, uint32_t> workers, int64_t limit_ns, std::vector<Drive> drives,
                 uint32_t drive_threads, uint32_t depth, const cuda::Context* context,
                 uint64_t stream_handle, uint64_t event_handle, nb::object) {
  EngineOptions options;
  options.storage = std::move(storage);
  options.row_bytes = row_bytes;
  options.rows = rows;
  options.ports = std::move(ports);
  options.workers = {workers.first, workers.second};
  options.limit_ns = limit_ns;
  for (auto& [each, model] : drives) options.drives.push_back({each, model});
  options.drive_threads = drive_threads;
  options.depth = depth;
  const Unlocked unlocked;
  std::unique_ptr<StreamSide> stream;
  for (const PortOptions& port : options.ports) {
    if (!port.copies || stream != nullptr) continue;
    if (context == nullptr) {
      stream = std::make_unique<HostStream>();
    } else {
      stream = std::make_unique<CudaStream>(*context, reinterpret_cast<cuda::Handle>(stream_handle),
                                            reinterpret_cast<cuda::Handle>(event_handle));
    }
  }
  new (self) BatchEngine(std::move(options), std::move(stream));
}

using Fate = std::tuple<uint64_t, uint64_t, uint16_t, std::string>;

}  // namespace

void bind_pipeline(nb::module_& m) {
  nb::class_<PortOptions>(m, "BatchPort")
      .def(
          "__init__",
          [](PortOptions* self, bool is_write, uint64_t requests, uint64_t results, uint64_t lists,
             uint64_t statuses, uint32_t slots, uint64_t rows_max, uint64_t ring,
             uint64_t chunk_bytes, uint32_t chunks, uint64_t filled, uint64_t emptied,
             bool copies) {
            new (self) PortOptions();
            self->regions = {{.requests = reinterpret_cast<fw::batch::request*>(requests),
                              .results = reinterpret_cast<fw::batch::result*>(results),
                              .lists = reinterpret_cast<int64_t*>(lists),
                              .all_statuses = reinterpret_cast<uint16_t*>(statuses),
                              .count = slots,
                              .rows_max = rows_max}};
            self->is_write = is_write;
            self->ring = ring;
            self->chunk_bytes = chunk_bytes;
            self->chunks = chunks;
            self->filled = filled;
            self->emptied = emptied;
            self->copies = copies;
          },
          nb::kw_only(), nb::arg("is_write"), nb::arg("requests"), nb::arg("results"),
          nb::arg("lists"), nb::arg("statuses"), nb::arg("slots"), nb::arg("rows_max"),
          nb::arg("ring") = 0, nb::arg("chunk_bytes") = 0, nb::arg("chunks") = 0,
          nb::arg("filled") = 0, nb::arg("emptied") = 0, nb::arg("copies") = false);
  nb::class_<BatchEngine>(m, "BatchEngine")
      .def("__init__", &make_engine, nb::arg("storage"), nb::arg("row_bytes"), nb::arg("rows"),
           nb::arg("ports"), nb::arg("workers"), nb::arg("limit_ns"), nb::arg("drives"),
           nb::arg("drive_threads"), nb::arg("depth"), nb::arg("context").none() = nb::none(),
           nb::arg("stream") = 0, nb::arg("event") = 0, nb::arg("keeps") = nb::none(),
           // What holds the regions, the ring and the context: it outlives the threads.
           nb::keep_alive<1, 14>())
      .def(
          "submit",
          [](BatchEngine& engine, bool is_write, uint64_t ids, uint64_t rows, uint64_t first,
             uint64_t buffer) {
            return engine.submit(is_write, reinterpret_cast<const int64_t*>(ids), rows, first,
                                 buffer);
          },
          nb::arg("is_write"), nb::arg("ids"), nb::arg("rows"), nb::arg("first"), nb::arg("buffer"))
      .def("announce", &BatchEngine::announce, nb::arg("is_write"), nb::arg("ticket"))
      .def("kernels_begin", &BatchEngine::kernels_begin)
      .def("kernels_end", &BatchEngine::kernels_end)
      .def("wait", &BatchEngine::wait, nb::arg("is_write"), nb::arg("ticket"), nb::arg("limit_ns"),
           WithoutGil())
      .def("ended", &BatchEngine::ended, nb::arg("is_write"), nb::arg("ticket"))
      .def(
          "outcome",
          [](BatchEngine& engine, bool is_write, uint64_t ticket) -> std::optional<Fate> {
            const std::optional<Outcome> found = engine.outcome(is_write, ticket);
            if (!found) return std::nullopt;
            return Fate(found->failed, found->first_failed, found->status, found->reason);
          },
          nb::arg("is_write"), nb::arg("ticket"))
      .def("take_errors", &take_errors<BatchEngine>)
      .def_prop_ro("stats", [](BatchEngine& engine) { return to_dict(engine.stats()); })
      .def_prop_ro("decision_count", &BatchEngine::decision_count)
      .def_prop_ro("leaked", &BatchEngine::leaked)
      .def("stop", &BatchEngine::stop, WithoutGil())
      .def("let_go", &BatchEngine::let_go, WithoutGil());
  m.def(
      "decide_workers",
      [](std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, double, double, uint32_t> state,
         int64_t io_ns, int64_t idle_ns, uint64_t nbytes, uint32_t low, uint32_t high) {
        const auto& [count, calm, patience, before, before_io, before_idle, hold] = state;
        const WorkerState next = decide_workers(
            {count, calm, patience, before, before_io, before_idle, hold, WorkerReason::kNone},
            {io_ns, idle_ns, nbytes}, {low, high});
        return std::tuple(std::tuple(next.count, next.calm, next.patience, next.before,
                                     next.before_io, next.before_idle, next.hold),
                          std::string(text_of(next.reason)));
      },
      nb::arg("state"), nb::arg("io_ns"), nb::arg("idle_ns"), nb::arg("nbytes"), nb::arg("low"),
      nb::arg("high"));
}
