// The short way of launches of callers' kernels on a GPU.
//
// The ordinary way checks and packs arguments of any kind. This one knows by each parameter what
// the ordinary way has accepted: arrays, dtypes of tensors, and sizes of launches. It packs such
// arguments, and numbers, and launches. It leaves everything else to the ordinary way, which also
// raises the errors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bind/row_calls.h"

void bind_kernel_calls(nanobind::module_& m);

namespace fw::native {
namespace {

using cuda::Handle;
using cuda::kCaptured;
using cuda::kCaptureImplicit;
using cuda::kSuccess;
using cuda::Result;

// Arguments beyond that go the ordinary way.
constexpr size_t kParamsMax = 32;
constexpr size_t kBytesMax = 1024;
constexpr size_t kAlignment = 16;

// Arrays and dtypes that a parameter remembers.
constexpr size_t kKnownMax = 8;

using Arguments = nb::typed<nb::tuple, nb::object, nb::ellipsis>;

// What arguments have led to so far.
struct Packing {
  alignas(kAlignment) uint8_t bytes[kBytesMax];
  void* params[kParamsMax];
  Access accesses[kParamsMax];
  nb::object owners[kParamsMax];  // of the arrays
  size_t array_count = 0;
  bool meets_torch = false;
};

struct Param {
  enum Kind { kArray, kPointer, kInteger, kFloat, kBool, kBytes };
  struct Known {
    uint64_t number = 0;
    std::string bytes;
  };

  Kind kind;
  size_t nbytes = 0, at = 0;
  bool with_sign = false;
  bool stores = false;  // to the array
  std::vector<Known> arrays;
  std::vector<uint64_t> dtypes;
  size_t next = 0;  // of what is known, to be replaced
};

template <typename T>
bool store(uint8_t* place, T value) {
  std::memcpy(place, &value, sizeof value);
  return true;
}

bool pack_integer(const Param& param, nb::handle argument, uint8_t* place) {
  if (!PyLong_CheckExact(argument.ptr())) return false;
  const int bits = int(8 * param.nbytes);
  if (param.with_sign) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(argument.ptr(), &overflow);
    const long long most = std::numeric_limits<long long>::max() >> (64 - bits);
    if (overflow != 0 || value > most || value < -most - 1) return false;
    std::memcpy(place, &value, param.nbytes);  // little-endian
    return true;
  }
  const unsigned long long value = PyLong_AsUnsignedLongLong(argument.ptr());
  if (value == ~0ull && PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  if (value > ~0ull >> (64 - bits)) return false;
  std::memcpy(place, &value, param.nbytes);
  return true;
}

bool pack_float(const Param& param, nb::handle argument, uint8_t* place) {
  if (!PyFloat_CheckExact(argument.ptr())) return false;
  const double value = PyFloat_AsDouble(argument.ptr());
  if (param.nbytes == sizeof(double)) return store(place, value);
  if (param.nbytes == 2) {
    // PyFloat_Pack2 would do, but the limited API lacks it.
    const nb::object half = nb::steal(PyObject_CallMethod(nb::module_::import_("struct").ptr(),
                                                          "pack", "sO", "<e", argument.ptr()));
    if (half.is_valid()) {
      std::memcpy(place, PyBytes_AsString(half.ptr()), param.nbytes);
      return true;
    }
    PyErr_Clear();  // it is too large
    return false;
  }
  const float narrow = float(value);
  return !(std::isinf(narrow) && !std::isinf(value)) && store(place, narrow);
}

bool pack_bool(nb::handle argument, uint8_t* place) {
  return PyBool_Check(argument.ptr()) && store(place, uint8_t(argument.is(Py_True)));
}

// Packs one of Python's numbers. Returns false for what is none, or does not fit.
bool pack_number(const Param& param, nb::handle argument, uint8_t* place) {
  switch (param.kind) {
    case Param::kInteger:
      return pack_integer(param, argument, place);
    case Param::kFloat:
      return pack_float(param, argument, place);
    case Param::kBool:
      return pack_bool(argument, place);
    default:
      return false;
  }
}

Param param_of(const std::string& kind, size_t nbytes) {
  Param param;
  param.kind = Param::kBytes;
  if (kind == "array" || kind == "const array") param.kind = Param::kArray;
  if (kind == "pointer") param.kind = Param::kPointer;
  if (kind == "i" || kind == "u") param.kind = Param::kInteger;
  if (kind == "f") param.kind = Param::kFloat;
  if (kind == "b") param.kind = Param::kBool;
  param.with_sign = kind == "i";
  param.stores = kind == "array";
  param.nbytes = nbytes;
  return param;
}

// For the ordinary way: the bytes of a number, or None.
std::optional<nb::bytes> number_bytes(const std::string& kind, size_t nbytes, nb::handle number) {
  uint8_t bytes[sizeof(uint64_t)];
  if (nbytes > sizeof bytes || !pack_number(param_of(kind, nbytes), number, bytes)) {
    return std::nullopt;
  }
  return nb::bytes(bytes, nbytes);
}

class KernelCalls {
 public:
  // Each parameter: its kind, as a dtype's or "array", "const array", "pointer" or "bytes", and how
  // many bytes.
  // `calls_of` returns the `RowCalls` of an array, which it may open; None: it has none.
  KernelCalls(nb::object device, const Launching& launching, nb::object calls_of,
              std::vector<std::tuple<std::string, size_t>> params)
      : device_(std::move(device)), launching_(launching), calls_of_(std::move(calls_of)) {
    size_t end = 0;
    for (const auto& [kind, nbytes] : params) {
      Param param = param_of(kind, nbytes);
      param.at = end;
      end += (nbytes + kAlignment - 1) / kAlignment * kAlignment;
      params_.push_back(param);
    }
    usable_ = params_.size() <= kParamsMax && end <= kBytesMax;
  }

  // Returns false, and does nothing, if it goes the ordinary way.
  bool launch(Arguments arguments, nb::handle warps, nb::handle block_threads, nb::handle stream) {
    const std::optional<uint64_t> size = size_of(warps, block_threads);
    if (!size || arguments.size() != params_.size()) return false;
    const Prepared* found = sizes_.find(*size);
    if (found == nullptr || fork_.in_child() || launching_.closed) return false;
    Packing packing;
    for (size_t i = 0; i < params_.size(); ++i) {
      const Param& param = params_[i];
      packing.params[i] = packing.bytes + param.at;
      if (!pack(param, arguments[i], packing)) return false;
    }
    const Prepared prepared = *found;
    if (packing.array_count == 0) return launched(prepared, packing, stream);
    const RowCalls* const first = packing.accesses[0].array;
    for (size_t i = 1; i < packing.array_count; ++i) {
      // Two turns are taken in one order, which the ordinary way knows.
      if (!packing.accesses[i].array->takes_turns_with(*first)) return false;
    }
    const Turn turn(first->acquire(), first->release());
    for (size_t i = 0; i < packing.array_count; ++i) {
      if (!packing.accesses[i].array->ready()) return false;
    }
    return launched(prepared, packing, stream);
  }

  // The ordinary way has made such a launch, with these bytes as parameters.
  void learn(Arguments arguments, Arguments packed, nb::handle warps, nb::handle block_threads,
             nb::object prepared) {
    const std::optional<uint64_t> size = size_of(warps, block_threads);
    if (!usable_ || !size) return;
    Prepared made(std::move(prepared));
    if (made.plan.blocks == 0) return;
    for (size_t i = 0; i < params_.size(); ++i) {
      Param& param = params_[i];
      if (param.kind == Param::kArray) {
        learn_array(param, arguments[i], nb::bytes(packed[i]));
      } else if (param.kind == Param::kPointer) {
        learn_dtype(param, arguments[i]);
      }
    }
    sizes_.keep(*size, std::move(made));
  }

 private:
  // None if they are no plain ints.
  static std::optional<uint64_t> size_of(nb::handle warps, nb::handle block_threads) {
    constexpr uint64_t kAll = 0xFFFFFFFF;  // as many warps as run at a time
    const auto number = [](nb::handle value) {
      const long found = PyLong_CheckExact(value.ptr()) ? PyLong_AsLong(value.ptr()) : -1;
      if (found < 0) PyErr_Clear();
      return found;
    };
    const long count = warps.is_none() ? long(kAll) : number(warps),
               threads = number(block_threads);
    if (count < 0 || threads < 0 || count > long(kAll) || threads > 1024) return std::nullopt;
    return uint64_t(count) << 32 | uint64_t(threads);
  }

  bool pack(const Param& param, nb::handle argument, Packing& packing) {
    uint8_t* place = packing.bytes + param.at;
    switch (param.kind) {
      case Param::kArray:
        return pack_array(param, argument, packing, place);
      case Param::kPointer:
        return pack_pointer(param, argument, packing, place);
      case Param::kBytes:
        break;
      default:
        return pack_number(param, argument, place);
    }
    if (!PyBytes_CheckExact(argument.ptr()) ||
        size_t(PyBytes_Size(argument.ptr())) != param.nbytes) {
      return false;
    }
    std::memcpy(place, PyBytes_AsString(argument.ptr()), param.nbytes);
    return true;
  }

  bool pack_array(const Param& param, nb::handle argument, Packing& packing, uint8_t* place) {
    if (Py_TYPE(argument.ptr()) != array_type_) return false;
    RowCalls* calls = nullptr;
    nb::object owner = staying([&] { return calls_of_(argument); });
    if (!nb::try_cast(owner, calls) || calls == nullptr) return false;
    for (const Param::Known& known : param.arrays) {
      if (known.number != calls->number()) continue;
      std::memcpy(place, known.bytes.data(), param.nbytes);
      packing.owners[packing.array_count] = std::move(owner);
      packing.accesses[packing.array_count++] = {calls, param.stores};
      return true;
    }
    return false;
  }

  bool pack_pointer(const Param& param, nb::handle argument, Packing& packing, uint8_t* place) {
    if (argument.is_none()) return store(place, uint64_t{0});
    Tensor seen;
    if (!torch_.is_tensor(argument) || !torch_.describe(argument, seen) ||
        seen.ordinal != launching_.ordinal) {
      return false;
    }
    for (const uint64_t dtype : param.dtypes) {
      if (dtype != seen.dtype) continue;
      packing.meets_torch = true;
      return store(place, seen.address);
    }
    return false;
  }

  void learn_array(Param& param, nb::handle argument, const nb::bytes& packed) {
    RowCalls* calls = nullptr;
    const nb::object owner = calls_of_(argument);
    if (!nb::try_cast(owner, calls) || calls == nullptr) return;
    array_type_ = Py_TYPE(argument.ptr());
    for (const Param::Known& known : param.arrays) {
      if (known.number == calls->number()) return;
    }
    Param::Known known{calls->number(), std::string(packed.c_str(), packed.size())};
    if (param.arrays.size() < kKnownMax) {
      param.arrays.push_back(std::move(known));
    } else {
      param.arrays[param.next++ % kKnownMax] = std::move(known);
    }
  }

  void learn_dtype(Param& param, nb::handle argument) {
    Tensor seen;
    if (!torch_.is_tensor(argument) || !torch_.describe(argument, seen)) return;
    for (const uint64_t dtype : param.dtypes) {
      if (dtype == seen.dtype) return;
    }
    param.dtypes.push_back(seen.dtype);
  }

  // Whether a library's current stream is being captured, into which the launch would not go.
  bool libraries_capture(const Packing& packing) {
    const int ordinal = launching_.ordinal;
    const auto captures = [&](uintptr_t stream) {
      const cuda::Capture found = launching_.context.capture(handle(stream));
      return found.result != kSuccess || found.active;
    };
    // `launch_among` asks about the streams that it waits for.
    if (!packing.meets_torch && torch_.is_initialized() && captures(torch_.current_stream(ordinal)))
      return true;
    PyObject* cupy = PyDict_GetItemString(PyImport_GetModuleDict(), "cupy");  // borrowed
    return cupy != nullptr && staying([&] { return captures(cupy_stream(cupy)); });
  }

  uintptr_t cupy_stream(nb::handle cupy) {
    try {
      if (!cupy_stream_) cupy_stream_ = cupy.attr("cuda").attr("get_current_stream");
      return nb::cast<uintptr_t>(cupy_stream_(launching_.ordinal).attr("ptr"));
    } catch (nb::python_error&) {  // older versions take no device
      return nb::cast<uintptr_t>(device_.attr("current_stream")("cupy").attr("handle"));
    }
  }

  bool launched(const Prepared& prepared, Packing& packing, nb::handle on) {
    const bool chosen = !on.is_none();
    if (!chosen && libraries_capture(packing)) return false;
    const uintptr_t run = chosen ? names_.stream_of(on) : launching_.own;
    const uintptr_t other = chosen                ? launching_.own
                            : packing.meets_torch ? torch_.current_stream(launching_.ordinal)
                                                  : run;
    const Handle others[] = {handle(other)};
    ArrayLaunch launch = {.launching = launching_,
                          .prepared = prepared,
                          .params = params_.empty() ? nullptr : packing.params,
                          .stream = run,
                          .others = {others, other == run ? 0u : 1u},
                          .both_ways = !chosen,
                          .accesses = {packing.accesses, packing.array_count}};
    return launch.run();
  }

  const nb::object device_;
  nb::object cupy_stream_;      // cupy's function, once it is known
  const Launching& launching_;  // the device's
  const nb::object calls_of_;
  const Names names_;
  const ForkGuard fork_;
  Torch torch_;
  std::vector<Param> params_;
  bool usable_ = true;
  Plans<uint64_t, Prepared> sizes_;
  const PyTypeObject* array_type_ = nullptr;
};

}  // namespace
}  // namespace fw::native

void bind_kernel_calls(nanobind::module_& m) {
  namespace nb = nanobind;
  using fw::native::KernelCalls;
  m.def("number_bytes", &fw::native::number_bytes, nb::arg("kind"), nb::arg("nbytes"),
        nb::arg("number"));
  nb::class_<KernelCalls>(m, "KernelCalls")
      .def(nb::init<nb::object, const fw::native::Launching&, nb::object,
                    std::vector<std::tuple<std::string, size_t>>>(),
           nb::arg("device"), nb::arg("launching"), nb::arg("calls_of"), nb::arg("params"),
           nb::keep_alive<1, 3>())
      .def("launch", &KernelCalls::launch, nb::arg("arguments"), nb::arg("warps").none(),
           nb::arg("block_threads"), nb::arg("stream").none())
      .def("learn", &KernelCalls::learn, nb::arg("arguments"), nb::arg("packed"),
           nb::arg("warps").none(), nb::arg("block_threads"), nb::arg("prepared"));
}
