#include "bind/host_arrays.h"

#include <cstring>
#include <utility>

#include "bind/unlocked.h"

namespace fw::native {
namespace {

template <typename Integer>
bool within(const HostArray& indices, int64_t length) {
  const auto* values = reinterpret_cast<const Integer*>(indices.address());
  const uint64_t count = indices.nbytes() / sizeof(Integer);
  bool strays = false;
  // Without a branch, so that the compiler looks at several at a time.
  for (uint64_t i = 0; i < count; ++i) {
    strays |= (int64_t(values[i]) < -length) | (int64_t(values[i]) >= length);
  }
  return !strays;
}

}  // namespace

bool HostArray::take(nb::handle array, bool writable) {
  const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
  taken_ = PyObject_GetBuffer(array.ptr(), &view_, flags) == 0;
  if (!taken_) PyErr_Clear();
  return taken_;
}

uint32_t HostArray::index_bytes() const {
  const char kind = view_.format[0];
  if ((kind != 'i' && kind != 'l' && kind != 'q') || view_.format[1] != 0) return 0;
  return view_.itemsize == 4 || view_.itemsize == 8 ? uint32_t(view_.itemsize) : 0;
}

bool all_within(const HostArray& indices, int64_t length) {
  return indices.index_bytes() == 4 ? within<int32_t>(indices, length)
                                    : within<int64_t>(indices, length);
}

HostArrays::HostArrays(nb::object dtype) : dtype_(std::move(dtype)) {
  if (dtype_.is_none()) return;
  const nb::module_ numpy = nb::module_::import_("numpy");
  type_ = numpy.attr("ndarray");
  empty_ = numpy.attr("empty");
  name_ = nb::steal(PyUnicode_InternFromString("dtype"));
}

bool HostArrays::is_array(nb::handle object) const {
  return type_ && Py_TYPE(object.ptr()) == reinterpret_cast<PyTypeObject*>(type_.ptr());
}

bool HostArrays::has_dtype(nb::handle array) const {
  const nb::object dtype = array.attr(name_);
  return dtype.is(dtype_) || dtype.equal(dtype_);
}

nb::object HostArrays::empty(const std::vector<int64_t>& shape) const {
  const nb::object lengths = nb::steal(PyTuple_New(Py_ssize_t(shape.size())));
  for (size_t i = 0; i < shape.size(); ++i) {
    PyTuple_SetItem(lengths.ptr(), Py_ssize_t(i), PyLong_FromLongLong(shape[i]));
  }
  try {
    return staying([&] { return empty_(lengths, dtype_); });
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_MemoryError)) throw;
    return {};
  }
}

}  // namespace fw::native
