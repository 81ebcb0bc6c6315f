#include "bind/row_plans.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "bind/unlocked.h"
#include "cpu/cpu_program.h"

void bind_row_plans(nanobind::module_& m);

namespace fw::native {
namespace {

// As `cache.sizes` has it.
constexpr uint64_t kLineBytesMin = 512;

Plan gpu_plan(uintptr_t function, uint32_t blocks, uint32_t block_threads) {
  Plan plan;
  plan.function = handle(function);
  plan.blocks = blocks;
  plan.block_threads = block_threads;
  return plan;
}

Plan cpu_plan(CpuPool& pool, const CpuProgram& program, uint32_t index, uint32_t threads) {
  if (index >= program.kernel_count()) throw nb::index_error("the program has no such kernel");
  Plan plan;
  plan.pool = &pool;
  plan.kernel = &program.kernel(index);
  plan.threads = threads;
  return plan;
}

// Runs a plan of the CPU device.
void run(const Plan& plan, const std::vector<nb::bytes>& arguments, nb::handle uses) {
  const entry& kernel = *plan.kernel;
  if (arguments.size() != kernel.param_count) {
    throw nb::value_error(("the kernel takes " + std::to_string(kernel.param_count) +
                           " arguments, not " + std::to_string(arguments.size()))
                              .c_str());
  }
  std::vector<const void*> addresses;
  for (uint32_t i = 0; i < kernel.param_count; i++) {
    if (arguments[i].size() != kernel.params[i].bytes) {
      throw nb::value_error(("argument " + std::to_string(i) + " has " +
                             std::to_string(arguments[i].size()) + " bytes, not " +
                             std::to_string(kernel.params[i].bytes))
                                .c_str());
    }
    addresses.push_back(arguments[i].c_str());
  }
  const std::vector<Controller*> controllers = controllers_of(uses);
  if (!unlocked(
          [&] { return plan.pool->launch(kernel, addresses.data(), plan.threads, controllers); })) {
    throw std::runtime_error("the pool was closed, or belongs to the parent process");
  }
}

constexpr const char* kVerbs[] = {"gather", "stream", "prefetch", "scatter", "cells"};

}  // namespace

Prepared::Prepared(nb::object made) : launch(std::move(made)) {
  plan = nb::cast<const Plan&>(launch.attr("plan"));
}

PreparedRows::PreparedRows(nb::object made, const nb::bytes& parameter, const RowMembers& members)
    : Prepared(std::move(made)), parameter(parameter.c_str(), parameter.size(), members) {}

PreparedRows& RowPlans::of(nb::handle launcher, RowSize size, uint64_t rows) {
  size.alignment = uint8_t(rows % RowSize::kAlignmentMax);
  if (!deferral_.is_none() && size.count >= count_min_) {
    // A lease may have broken, or the route past the page cache changed, since a plan was made.
    size.drain_blocks = staying([&] { return nb::cast<uint8_t>(deferral_.attr("blocks")); });
  }
  if (PreparedRows* found = plans_.find(size)) return *found;
  const nb::tuple made = staying([&] {
    const nb::object counting =
        size.counting == Counting{} ? nb::none() : nb::cast(nb::tuple(nb::cast(size.counting)));
    const nb::object sms = size.sms == 0 ? nb::none() : nb::cast(size.sms);
    return nb::tuple(launcher.attr("prepare_rows")(name_of(size.verb), size.count, size.index_bytes,
                                                   rows, counting, sms, size.one_by_one,
                                                   size.drain_blocks));
  });
  return plans_.keep(size, PreparedRows(made[0], nb::bytes(made[1]), members_));
}

void RowPlans::run(nb::handle launcher, const RowSize& size, const RowOperands& operands,
                   uint64_t strays) {
  // The launcher wakes what serves the array, and says what the launch uses.
  const nb::object uses = staying([&] { return launcher.attr(wake_)(); });
  // An element, or a short row, has no lines to look ahead to.
  const bool few =
      size.index_bytes == 0 && size.verb != RowSize::Verb::kCells && size.count <= kLineBytesMin;
  const uint64_t ahead =
      few ? 0 : staying([&] { return nb::cast<uint64_t>(launcher.attr(look_ahead_)()); });
  // A copy: the plan may be forgotten meanwhile.
  PreparedRows found = of(launcher, size, operands.rows);
  found.parameter.point_to(operands, ahead, strays);
  const std::vector<Controller*> controllers = controllers_of(uses);
  const void* const arguments[] = {found.parameter.data()};
  const Plan& plan = found.plan;
  if (!unlocked(
          [&] { return plan.pool->launch(*plan.kernel, arguments, plan.threads, controllers); })) {
    staying([&] { found.launch.attr("refuse")(0, 0, "launch"); });
  }
}

const char* name_of(RowSize::Verb verb) { return kVerbs[size_t(verb)]; }

RowSize::Verb verb_of(std::string_view name) {
  const auto found = std::find(std::begin(kVerbs), std::end(kVerbs), name);
  if (found == std::end(kVerbs)) throw nb::value_error("there is no such verb");
  return RowSize::Verb(found - std::begin(kVerbs));
}

std::vector<Controller*> controllers_of(nb::handle uses) {
  std::vector<Controller*> result;
  for (nb::handle each : uses) {
    Controller* controller = nullptr;
    if (nb::try_cast(each, controller)) result.push_back(controller);
  }
  return result;
}

}  // namespace fw::native

void bind_row_plans(nanobind::module_& m) {
  namespace nb = nanobind;
  using namespace fw::native;
  nb::class_<Moved>(m, "Moved")
      .def(nb::init<>())
      .def("add", &Moved::add, nb::arg("rows"))
      .def_prop_ro("calls", [](const Moved& moved) { return moved.calls.load(); })
      .def_prop_ro("rows", [](const Moved& moved) { return moved.rows.load(); });
  m.def("launch_number", &launch_number);
  nb::class_<Plan>(m, "Plan")
      .def_static("on_gpu", &gpu_plan, nb::arg("function"), nb::arg("blocks"),
                  nb::arg("block_threads"))
      .def_static("on_cpu", &cpu_plan, nb::arg("pool"), nb::arg("program"), nb::arg("index"),
                  nb::arg("threads"), nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>())
      .def("run", &run, nb::arg("arguments"), nb::arg("uses"));
  nb::class_<RowPlans>(m, "RowPlans")
      .def(
          "__init__",
          [](RowPlans* self, size_t own_members_at, size_t look_ahead_at, nb::object deferral,
             uint64_t count_min) {
            new (self) RowPlans({own_members_at, look_ahead_at}, std::move(deferral), count_min);
          },
          nb::arg("own_members_at"), nb::arg("look_ahead_at"), nb::arg("deferral").none(),
          nb::arg("count_min"));
}
