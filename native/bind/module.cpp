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
#include "nvme/controller.h"

namespace nb = nanobind;
using fw::native::Controller;
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
void bind_tensor_calls(nb::module_& m);
void bind_testing(nb::module_& m);
void bind_transfer(nb::module_& m);

namespace {

// What a launch uses: memory, and controllers, which waiting threads serve. The caller's argument
// keeps all of it alive until the launch has ended, even if it is closed meanwhile.
using Uses = std::vector<nb::object>;

std::vector<Controller*> controllers_of(const Uses& uses) {
  std::vector<Controller*> result;
  for (const nb::object& each : uses) {
    Controller* controller = nullptr;
    if (nb::try_cast(each, controller)) result.push_back(controller);
  }
  return result;
}

const fw::entry& program_kernel(const CpuProgram& program, uint32_t index) {
  if (index >= program.kernel_count()) throw nb::index_error("the program has no such kernel");
  return program.kernel(index);
}

void cpu_launch_program(CpuPool& pool, const CpuProgram& program, uint32_t index,
                        const std::vector<nb::bytes>& arguments, uint32_t threads,
                        const Uses& uses) {
  const fw::entry& kernel = program_kernel(program, index);
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
  if (!unlocked([&] { return pool.launch(kernel, addresses.data(), threads, controllers); })) {
    throw std::runtime_error("the pool was closed, or belongs to the parent process");
  }
}

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
      .def("launch_program", &cpu_launch_program, nb::arg("program"), nb::arg("index"),
           nb::arg("arguments"), nb::arg("threads") = 0, nb::arg("uses") = Uses())
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
  bind_tensor_calls(m);
  bind_kernel_calls(m);
  bind_testing(m);
  bind_pipeline(m);
  bind_transfer(m);
}
