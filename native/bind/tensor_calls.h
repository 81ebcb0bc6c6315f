// The short way of an array's calls whose operands are tensors of torch on its GPU, and what
// launches of callers' kernels need of an array.
//
// A small gather takes less time than describing its operands in Python. Here no line of Python
// runs unless something needs to be made first, and the driver is asked as little as possible.
// Whatever is unusual goes the ordinary way, which also raises the errors. Python keeps the state
// of the array; this looks at it.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "base/fork_guard.h"
#include "bind/tensors.h"
#include "bind/unlocked.h"
#include "cuda/context.h"
#include "cuda/order.h"

namespace fw::native {

namespace nb = nanobind;

inline cuda::Handle handle(uintptr_t value) { return reinterpret_cast<cuda::Handle>(value); }

// How many calls of an array moved rows, and how many rows.
struct Moved {
  std::atomic<uint64_t> calls{0}, rows{0};

  void add(uint64_t count) {
    calls.fetch_add(1, std::memory_order_relaxed);
    rows.fetch_add(count, std::memory_order_relaxed);
  }
};

// Where the launches of a GPU go.
struct Launching {
  nb::object owner;  // of the context
  const cuda::Context& context;
  uintptr_t own;   // the library's own stream
  uintptr_t mark;  // an event, for orders of streams
  int ordinal;

  Launching(nb::object context, uintptr_t own, uintptr_t mark, int ordinal)
      : owner(context),
        context(nb::cast<const cuda::Context&>(context)),
        own(own),
        mark(mark),
        ordinal(ordinal) {}
};

// A launch of one kernel and one size, as `Device.prepare` made it.
struct Prepared {
  nb::object launch;  // owns what follows
  cuda::Handle function = nullptr;
  uint32_t blocks = 0, block_threads = 0;

  Prepared() = default;
  explicit Prepared(nb::object made);
};

// Takes a lock of Python's and gives it back; no signal handler runs between.
class Turn {
 public:
  Turn(nb::handle acquire, nb::handle release) : release_(release) {
    staying([&] { acquire(); });
  }
  ~Turn() {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject* free = staying([&] { return PyObject_CallNoArgs(release_.ptr()); });
    if (free == nullptr) PyErr_WriteUnraisable(release_.ptr());
    Py_XDECREF(free);
    PyErr_Restore(type, value, trace);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  nb::handle release_;
};

// Attributes that every call reads.
struct Names {
  nb::object changes = name("changes"), needs_wake = name("needs_wake"), read = name("_read"),
             cuda_stream = name("cuda_stream"), requires_grad = name("requires_grad"),
             own_changes = name("_changes"), attachment = name("_attachment"),
             tensors = name("tensors"), closed = name("_closed");

  static nb::object name(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }
  // The handle of a stream in any common form; raises ArgumentError.
  uintptr_t stream_of(nb::handle stream) const;
};

// A sequence of failures, see `FailureSequence`.
class Noted {
 public:
  explicit Noted(nb::object sequence) : sequence_(sequence) {
    const nb::tuple where(sequence.attr("numbers_at"));
    first_ = nb::cast<uintptr_t>(where[0]);
    stride_ = nb::cast<uint64_t>(where[1]);
    kept_ = nb::cast<uint64_t>(where[2]);
  }
  bool unread(const Names& names) const {
    const uint64_t done = read(names);
    const auto* number =
        reinterpret_cast<const volatile uint32_t*>(first_ + done % kept_ * stride_);
    return *number == uint32_t(done + 1);
  }
  // Whether kernels may have found the record full; then the host must ask the device.
  bool may_be_full(const Names& names) const { return read(names) >= kept_; }

 private:
  uint64_t read(const Names& names) const { return nb::cast<uint64_t>(sequence_.attr(names.read)); }

  nb::object sequence_;
  uintptr_t first_;
  uint64_t stride_, kept_;
};

class TensorCalls {
 public:
  TensorCalls(Launching launching, std::vector<int64_t> row_shape, uint64_t row_bytes,
              nb::object dtype_name, nb::object launcher, nb::object streams,
              size_t own_members_at);

  ~TensorCalls();

  // Sees the asynchronous calls of the array, and errors that wait to be raised.
  void follow(nb::object in_flight, nb::object lost);
  // The array is closed.
  void shut() { closed_ = true; }

  // Returns the rows; None if it goes the ordinary way, and then does nothing. Without a stream it
  // waits for a moment. `end` is told of a launch that has not ended then, or failed.
  nb::object gather(nb::handle idx, nb::handle out, nb::handle stream, nb::handle changes,
                    nb::handle end);
  bool prefetch(nb::handle idx, nb::handle stream, nb::handle changes, nb::handle end);
  // Returns what an asynchronous gather needs: result, stream, and address of the indices, their
  // number and size, and address of the result. None if it goes the ordinary way.
  nb::object operands(nb::handle idx, nb::handle out, nb::handle stream);

  // Launches of callers' kernels. No other array of the process has this number.
  uint64_t number() const { return number_; }
  nb::handle acquire() const { return acquire_; }
  nb::handle release() const { return release_; }
  // Null: it keeps no order.
  cuda::Order* order() const { return order_; }
  bool takes_turns_with(const TensorCalls& other) const { return turn_.is(other.turn_); }
  // Whether a launch may use the array, in the turn; if so, wakes what serves it.
  bool ready(nb::handle changes);
  // Notes before a launch that there may be work on a stream; returns whether that was known.
  bool note_stream(nb::handle stream);
  // The launch on a caller's stream has been made, or there is no work on it.
  void keep_stream(nb::handle stream);
  void forget_stream(nb::handle stream);

 private:
  enum class Verb : int;
  struct Operands;
  struct PreparedRows;

  bool quiet(nb::handle changes);
  bool failed() const;
  void wake() const;
  bool look_at_indices(nb::handle idx, Operands& operands);
  bool look(nb::handle idx, nb::handle out, nb::handle stream, Operands& operands);
  void know_dtypes();
  PreparedRows& prepared(Verb verb, const Operands& operands);
  bool launched(Verb verb, const Operands& operands, bool on_stream, nb::handle end);

  const uint64_t number_;
  const Launching launching_;
  const std::vector<int64_t> row_shape_;
  const uint64_t row_bytes_;
  const nb::object dtype_name_;
  const size_t own_members_at_;
  const nb::object streams_;
  const nb::object launcher_, watchers_, service_, moved_object_;
  Moved& moved_;
  nb::object order_object_;
  cuda::Order* order_ = nullptr;
  nb::object turn_, acquire_, release_, all_streams_, in_flight_, lost_;
  std::vector<Noted> noted_;
  const Names names_;
  const ForkGuard fork_;
  bool closed_ = false;

  Torch torch_;
  nb::object torch_dtype_;
  uint64_t dtype_ = 0, int32_ = 0, int64_ = 0;
  std::unordered_map<uint64_t, PreparedRows> prepared_;
};

}  // namespace fw::native
