// Arrays of numpy, as operands of calls on the CPU device. Needs the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fw::native {

namespace nb = nanobind;

// The memory of a dense numpy array, which nobody resizes meanwhile.
class HostArray {
 public:
  HostArray() = default;
  ~HostArray() {
    if (taken_) PyBuffer_Release(&view_);
  }
  HostArray(const HostArray&) = delete;
  HostArray& operator=(const HostArray&) = delete;

  // Returns false for what is not dense, not writable if it must be, or of a dtype that the buffer
  // protocol does not know.
  bool take(nb::handle array, bool writable);
  uint64_t address() const { return reinterpret_cast<uint64_t>(view_.buf); }
  uint64_t nbytes() const { return uint64_t(view_.len); }
  int axes() const { return view_.ndim; }
  const Py_ssize_t* shape() const { return view_.shape; }
  // The size of integers with a sign, in the byte order of the machine; 0: they are none.
  uint32_t index_bytes() const;

 private:
  Py_buffer view_;
  bool taken_ = false;
};

// Whether some indices count from the end of an axis, and the first that is out of bounds.
struct Bounds {
  bool negative = false;
  std::optional<int64_t> stray = {};
};
Bounds bounds_of(const HostArray& indices, int64_t length);

// Takes and makes arrays of one dtype.
class HostArrays {
 public:
  // None: it takes and makes none.
  explicit HostArrays(nb::object dtype);

  // Whether this is an array of numpy, and no object of a subclass.
  bool is_array(nb::handle object) const;
  bool has_dtype(nb::handle array) const;
  // The value of an integer of Python's or numpy's usual one; none for everything else.
  std::optional<int64_t> integer(nb::handle object) const;
  // A new array; null if there is no memory for it.
  nb::object empty(const std::vector<int64_t>& shape) const;

 private:
  const nb::object dtype_;
  nb::object type_, integer_, empty_, name_;
};

}  // namespace fw::native
