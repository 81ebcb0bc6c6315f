// Tensors of torch, described in nanoseconds. Needs the GIL.
//
// Since 2.10 torch has a table of functions for that, the exchange API of DLPack; older versions
// are asked for attributes. Nothing here imports torch.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

namespace fw::native {

namespace nb = nanobind;

// A dense tensor on a GPU. Valid while the tensor lives and nobody changes it.
struct Tensor {
  static constexpr int kAxesMax = 8;

  uint64_t address = 0;
  int ordinal = 0;
  uint64_t dtype = 0;  // compares with `Torch::dtype`
  int axes = 0;
  int64_t shape[kAxesMax] = {};
  int64_t count = 0;
};

class Torch {
 public:
  // Whether this is a tensor, and no object of a subclass. Looks for torch until it is imported.
  bool is_tensor(nb::handle object);
  // False if it is not dense, not on a GPU, or has very many axes. Only for what `is_tensor` is.
  bool describe(nb::handle tensor, Tensor& seen) const;
  // Whether torch uses GPUs.
  bool is_initialized();
  // The stream on which torch runs now.
  uintptr_t current_stream(int ordinal) const;
  // torch's dtype of this name, or none; and how `Tensor` has it.
  nb::object dtype_named(const char* name) const;
  uint64_t dtype(nb::handle torch_dtype) const;
  // Allocates on the current stream, on the device of another tensor.
  nb::object empty(const int64_t* shape, int axes, nb::handle dtype, nb::handle like) const;

 private:
  struct Exchange;

  void find();
  bool describe_by_attributes(nb::handle tensor, Tensor& seen) const;

  nb::object module_, tensor_type_;
  const Exchange* exchange_ = nullptr;
  bool initialized_ = false;
};

}  // namespace fw::native
