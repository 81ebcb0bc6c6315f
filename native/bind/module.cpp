// The extension module `flashwarp._native`: CPU device, storages and the software controller.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bind/unlocked.h"
#include "cpu/cpu_device.h"
#include "cpu/cpu_program.h"

namespace nb = nanobind;
using fw::native::CpuPool;
using fw::native::CpuProgram;
using fw::native::Unlocked;
using fw::native::unlocked;

nb::dict layouts();
void bind_checkpoint(nb::module_& m);
void bind_checksum(nb::module_& m);
void bind_endings(nb::module_& m);
void bind_controller(nb::module_& m);
void bind_cuda(nb::module_& m);
void bind_order(nb::module_& m);
void bind_kernel_calls(nb::module_& m);
void bind_pipeline(nb::module_& m);
void bind_storage(nb::module_& m);
void bind_vfio(nb::module_& m);
void bind_row_calls(nb::module_& m);
void bind_row_plans(nb::module_& m);
void bind_sharing(nb::module_& m);
void bind_testing(nb::module_& m);
void bind_transfer(nb::module_& m);

namespace {

// Each kernel's mangled name, and the sizes of each parameter and of its elements.
nb::list program_kernels(const CpuProgram& program) {
  nb::list kernels;
  for (uint32_t i = 0; i < program.kernel_count(); i++) {
    const fw::entry& kernel = program.kernel(i);
    nb::list params;
    for (uint32_t k = 0; k < kernel.param_count; k++) {
      params.append(nb::make_tuple(kernel.params[k].bytes, kernel.params[k].element_bytes));
    }
    kernels.append(nb::make_tuple(kernel.name, params));
  }
  return kernels;
}

}  // namespace

NB_MODULE(_native, m) {
  // Objects that a script still holds when Python ends are not leaks.
  nb::set_leak_warnings(false);
  m.doc() =
      "The C++ extension: CPU device, storages, controllers. See `native/bind/`.\n\n"
      "Addresses are ints. Calls that may wait release the GIL; failed I/O raises OSError.";
  nb::class_<CpuPool>(m, "CpuPool")
      .def(nb::init<uint32_t>(), nb::arg("threads"))
      .def("close", &CpuPool::close, nb::call_guard<Unlocked>())
      .def_prop_ro("threads", &CpuPool::threads);
  nb::class_<CpuProgram>(m, "CpuProgram")
      .def(
          "__init__",
          [](CpuProgram* self, nb::bytes code) {
            new (self) CpuProgram(std::string_view(code.c_str(), code.size()));
          },
          nb::arg("code"))
      .def_static(
          "installed",
          [](std::string path) { return CpuProgram::installed(std::move(path)).release(); },
          nb::arg("path"), nb::rv_policy::take_ownership)
      .def_prop_ro("kernels", &program_kernels);
  m.def("demangle", &fw::native::demangle, nb::arg("name"));
  m.def("layouts", &layouts);
  bind_checkpoint(m);
  bind_checksum(m);
  bind_endings(m);
  bind_storage(m);
  bind_controller(m);
  bind_vfio(m);
  bind_cuda(m);
  bind_order(m);
  bind_row_plans(m);
  bind_row_calls(m);
  bind_kernel_calls(m);
  bind_testing(m);
  bind_pipeline(m);
  bind_transfer(m);
  bind_sharing(m);
}
