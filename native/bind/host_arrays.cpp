#include "bind/host_arrays.h"

#include <algorithm>
#include <utility>

#include "bind/unlocked.h"

namespace fw::native {
namespace {

template <typename Integer>
Bounds look(const HostArray& indices, int64_t length) {
  const auto* begin = reinterpret_cast<const Integer*>(indices.address());
  const auto* end = begin + indices.nbytes() / sizeof(Integer);
  // By sign bits, without a branch, so that the compiler looks at several at a time.
  uint64_t below_zero = 0, outside = 0;
  const uint64_t count = uint64_t(length);
  for (const Integer* each = begin; each != end; ++each) {
    const uint64_t index = uint64_t(int64_t(*each));
    below_zero |= index;
    outside |= (index + count) | (count - 1 - index);
  }
  Bounds found = {.negative = int64_t(below_zero) < 0};
  if (int64_t(outside) >= 0) return found;
  found.stray = *std::find_if(begin, end, [&](int64_t i) { return i < -length || i >= length; });
  return found;
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

Bounds bounds_of(const HostArray& indices, int64_t length) {
  return indices.index_bytes() == 4 ? look<int32_t>(indices, length)
                                    : look<int64_t>(indices, length);
}

HostArrays::HostArrays(nb::object dtype) : dtype_(std::move(dtype)) {
  if (dtype_.is_none()) return;
  const nb::module_ numpy = nb::module_::import_("numpy");
  type_ = numpy.attr("ndarray");
  integer_ = numpy.attr("int64");
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

std::optional<int64_t> HostArrays::integer(nb::handle object) const {
  const bool known =
      PyLong_CheckExact(object.ptr()) ||
      (integer_ && Py_TYPE(object.ptr()) == reinterpret_cast<PyTypeObject*>(integer_.ptr()));
  if (!known) return {};
  const Py_ssize_t value = PyNumber_AsSsize_t(object.ptr(), PyExc_OverflowError);
  if (value != -1 || PyErr_Occurred() == nullptr) return value;
  PyErr_Clear();
  return {};
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
