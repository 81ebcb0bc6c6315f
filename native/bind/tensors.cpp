#include "bind/tensors.h"

#include <string>

namespace fw::native {

using nb::dlpack::dltensor;

// DLPackExchangeAPI of dlpack.h, version 1.
struct Torch::Exchange {
  uint32_t major, minor;
  const Exchange* older;
  void* allocate;
  void* export_managed;
  void* import_managed;
  int (*describe)(void* object, dltensor* seen);
  int (*current_stream)(int32_t device_type, int32_t device, void** stream);
};

namespace {

constexpr int kOnGpu = 2;  // kDLCUDA

uint64_t key_of(nb::dlpack::dtype dtype) {
  return dtype.code | uint64_t(dtype.bits) << 8 | uint64_t(dtype.lanes) << 16;
}

bool is_dense(const dltensor& seen) {
  int64_t expected = 1;
  for (int i = seen.ndim; seen.strides != nullptr && i-- > 0;) {
    if (seen.shape[i] != 1 && seen.strides[i] != expected) return false;
    expected *= seen.shape[i];
  }
  return true;
}

}  // namespace

bool Torch::is_tensor(nb::handle object) {
  if (!tensor_type_) find();
  return tensor_type_ && Py_TYPE(object.ptr()) == (PyTypeObject*)tensor_type_.ptr();
}

void Torch::find() {
  PyObject* modules = PyImport_GetModuleDict();  // borrowed
  PyObject* found = PyDict_GetItemString(modules, "torch");
  // An incomplete one is just being imported.
  if (found == nullptr || !PyObject_HasAttrString(found, "cuda")) return;
  module_ = nb::borrow(found);
  tensor_type_ = module_.attr("Tensor");
  nb::object capsule = nb::getattr(tensor_type_, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return;
  const auto* table =
      static_cast<const Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (table != nullptr && table->major > 1) table = table->older;
  if (table != nullptr && table->major == 1 && table->describe != nullptr) exchange_ = table;
}

bool Torch::describe(nb::handle tensor, Tensor& seen) const {
  if (exchange_ == nullptr) return describe_by_attributes(tensor, seen);
  dltensor found;
  if (exchange_->describe(tensor.ptr(), &found) != 0) {
    PyErr_Clear();  // such as a sparse tensor
    return false;
  }
  if (found.device.device_type != kOnGpu || found.ndim > Tensor::kAxesMax || !is_dense(found)) {
    return false;
  }
  seen.address = reinterpret_cast<uint64_t>(found.data) + found.byte_offset;
  seen.ordinal = found.device.device_id;
  seen.dtype = key_of(found.dtype);
  seen.axes = found.ndim;
  seen.count = 1;
  for (int i = 0; i < found.ndim; ++i) seen.count *= seen.shape[i] = found.shape[i];
  return true;
}

bool Torch::describe_by_attributes(nb::handle tensor, Tensor& seen) const {
  seen.ordinal = nb::cast<int>(tensor.attr("get_device")());  // -1: on the host
  if (seen.ordinal < 0 || !tensor.attr("layout").is(module_.attr("strided"))) return false;
  if (!nb::cast<bool>(tensor.attr("is_contiguous")())) return false;
  const nb::tuple shape(tensor.attr("shape"));
  if (shape.size() > Tensor::kAxesMax) return false;
  seen.axes = int(shape.size());
  seen.count = 1;
  for (int i = 0; i < seen.axes; ++i) seen.count *= seen.shape[i] = nb::cast<int64_t>(shape[i]);
  seen.dtype = reinterpret_cast<uint64_t>(nb::object(tensor.attr("dtype")).ptr());
  seen.address = nb::cast<uint64_t>(tensor.attr("data_ptr")());
  return true;
}

bool Torch::is_initialized() {
  if (!tensor_type_) find();
  if (!initialized_ && tensor_type_) {
    initialized_ = nb::cast<bool>(module_.attr("cuda").attr("is_initialized")());
  }
  return initialized_;
}

uintptr_t Torch::current_stream(int ordinal) const {
  void* stream = nullptr;
  if (exchange_ != nullptr) {
    if (exchange_->current_stream(kOnGpu, ordinal, &stream) != 0) throw nb::python_error();
    return reinterpret_cast<uintptr_t>(stream);
  }
  return nb::cast<uintptr_t>(module_.attr("_C").attr("_cuda_getCurrentRawStream")(ordinal));
}

nb::object Torch::dtype_named(const char* name) const {
  nb::object found = nb::getattr(module_, name, nb::none());
  return nb::isinstance(found, module_.attr("dtype")) ? found : nb::none();
}

uint64_t Torch::dtype(nb::handle torch_dtype) const {
  if (exchange_ == nullptr) return reinterpret_cast<uint64_t>(torch_dtype.ptr());
  const nb::object example = module_.attr("empty")(0, nb::arg("dtype") = torch_dtype);
  dltensor found;
  if (exchange_->describe(example.ptr(), &found) != 0) throw nb::python_error();
  return key_of(found.dtype);
}

nb::object Torch::empty(const int64_t* shape, int axes, nb::handle dtype, nb::handle like) const {
  const nb::object lengths = nb::steal(PyTuple_New(axes));
  for (int i = 0; i < axes; ++i) {
    PyTuple_SetItem(lengths.ptr(), i, PyLong_FromLongLong(shape[i]));
  }
  return module_.attr("empty")(lengths, nb::arg("dtype") = dtype,
                               nb::arg("device") = like.attr("device"));
}

}  // namespace fw::native
