// A contiguous buffer of any Python object, for the duration of a call.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

class BufferView {
 public:
  explicit BufferView(nanobind::handle object, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
      throw nanobind::python_error();
    }
  }
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;

  void* data() const { return view_.buf; }
  size_t nbytes() const { return size_t(view_.len); }

 private:
  Py_buffer view_;
};
