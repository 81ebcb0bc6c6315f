// The extension module `flashwarp._native`: CPU device, storages and the software controller.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "cpu_device.h"

namespace nb = nanobind;
using fw::native::CpuPool;

void bind_engine(nb::module_& m);
void bind_testing(nb::module_& m);

namespace {

void cpu_launch(CpuPool& pool, const std::string& name, nb::bytes params, uint32_t threads,
                const std::vector<uintptr_t>& controllers) {
  const fw::native::CpuKernel* kernel = fw::native::find_cpu_kernel(name);
  if (kernel == nullptr) throw nb::key_error(("no CPU kernel named " + name).c_str());
  if (params.size() != kernel->params_bytes) {
    throw nb::value_error((name + " takes " + std::to_string(kernel->params_bytes) +
                           " bytes of parameters, not " + std::to_string(params.size()))
                              .c_str());
  }
  // A copy: aligned as the structure wants it.
  alignas(64) char copy[1024];
  if (params.size() > sizeof copy) throw nb::value_error("kernel parameters exceed 1024 bytes");
  memcpy(copy, params.c_str(), params.size());
  std::vector<void*> served;
  for (uintptr_t address : controllers) served.push_back(reinterpret_cast<void*>(address));
  nb::gil_scoped_release release;
  pool.launch(*kernel, copy, threads, std::move(served));
}

nb::dict layouts() {
  nb::dict result;
  for (const fw::native::MemberLayout& entry : fw::native::structure_layouts()) {
    result[nb::make_tuple(entry.structure, entry.member)] = entry.bytes;
  }
  return result;
}

}  // namespace

NB_MODULE(_native, m) {
  // Objects that a script still holds when Python ends are not leaks.
  nb::set_leak_warnings(false);
  m.doc() = "Native half of flashwarp: CPU device, storages, software controller.";
  nb::class_<CpuPool>(m, "CpuPool")
      .def(nb::init<uint32_t>(), nb::arg("threads"))
      .def("launch", &cpu_launch, nb::arg("name"), nb::arg("params"), nb::arg("threads") = 0,
           nb::arg("controllers") = std::vector<uintptr_t>())
      .def("close", &CpuPool::close, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("threads", &CpuPool::threads);
  m.def("cpu_kernels", [] {
    std::vector<std::string> names;
    for (std::string_view name : fw::native::cpu_kernel_names()) names.emplace_back(name);
    return names;
  });
  m.def("layouts", &layouts);
  bind_engine(m);
  bind_testing(m);
}
