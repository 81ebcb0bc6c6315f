// An array's calls on rows that need no line of Python: of tensors of torch on its GPU, and of
// numpy arrays on the CPU device. And what launches of callers' kernels need of an array.
//
// A small gather takes less time than describing its operands in Python. Here no line of Python
// runs unless something needs to be made first, and the driver is asked as little as possible.
// Whatever is unusual goes the ordinary way, which also raises the errors.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/fork_guard.h"
#include "bind/host_arrays.h"
#include "bind/row_plans.h"
#include "bind/tensors.h"
#include "bind/unlocked.h"
#include "cuda/context.h"
#include "cuda/order.h"

namespace fw::native {

namespace nb = nanobind;

// Where the launches of a GPU go.
struct Launching {
  nb::object owner;  // of the context
  const cuda::Context& context;
  uintptr_t own;   // the library's own stream
  uintptr_t mark;  // an event, for orders of streams
  int ordinal;
  bool closed = false;

  Launching(nb::object context, uintptr_t own, uintptr_t mark, int ordinal)
      : owner(context),
        context(nb::cast<const cuda::Context&>(context)),
        own(own),
        mark(mark),
        ordinal(ordinal) {}
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
  nb::object changes = interned("changes"), needs_wake = interned("needs_wake"),
             cuda_stream = interned("cuda_stream"), requires_grad = interned("requires_grad");

  // The handle of a stream in any common form; raises ArgumentError.
  uintptr_t stream_of(nb::handle stream) const;
};

// How far the host has read a sequence of failures, see `FailureSequence`.
struct FailureMark {
  uintptr_t first = 0;  // the address of the first entry's number
  uint64_t stride = 0, kept = 0;
  uint64_t read = 0;

  bool unread() const {
    const auto* number = reinterpret_cast<const volatile uint32_t*>(first + read % kept * stride);
    return *number == uint32_t(read + 1);
  }
  // Whether kernels may have found the record full; then the host must ask the device.
  bool may_be_full() const { return read >= kept; }
};

class RowCalls;

// An array that a launch loads from, or stores to.
struct Access {
  RowCalls* array = nullptr;
  bool stores = false;
};

// What marks the end of a launch: an event, and an entry that is appended to a list.
struct End {
  uintptr_t event;
  nb::object entries, entry;
};

// A launch on arrays of a GPU, in their turns: by their own calls, lookups, pipelines and callers'
// kernels.
struct ArrayLaunch {
  const Launching& launching;
  const Prepared& prepared;
  void** params;
  uintptr_t stream;
  // Their present work comes first; with `both_ways` their later work comes behind.
  std::span<const cuda::Handle> others;
  bool both_ways = false;
  std::span<const Access> accesses;
  std::optional<End> end = {};
  // How long the caller then waits for the stream; `waited` says whether it is done.
  int64_t wait_us = 0;
  cuda::Result waited = cuda::kSuccess;

  // Launches in the order of the accesses. The arrays note that there may be work on the stream.
  // Returns false, and does nothing, if one of the streams is being captured. Raises why the driver
  // refused it; if it refused the event alone, the launch runs, and the list has the entry. No line
  // of Python runs between these steps, so no signal handler does.
  bool run();
};

class RowCalls {
 public:
  // `launching`: of the array's GPU; null on the CPU device. `dtype_name`: torch's, or none.
  RowCalls(const Launching* launching, std::vector<int64_t> row_shape, uint64_t row_bytes,
           int64_t length, nb::object dtype, nb::object dtype_name, nb::object launcher,
           nb::object streams);

  ~RowCalls();

  // Sees the asynchronous calls of the array, and errors that wait to be raised.
  void follow(nb::object in_flight, nb::object lost);
  // The array is closed.
  void shut() { closed_ = true; }
  // The changes of its storage, as its service counts them, that the array knows. -1: the array was
  // handed over, and all calls are refused.
  int64_t changes = 0;
  // Of a client of a shared cache: descriptors, each with events for poll(2), that show that the
  // owner has gone. What a call has read is good only if they show nothing at its end.
  std::vector<std::pair<int, short>> signs;

  // Returns the rows; None if it goes the ordinary way, and then does nothing. Without a stream it
  // waits for a moment; if the launch has not ended then, or has failed, it calls `end`.
  nb::object gather(nb::handle idx, nb::handle out, nb::handle stream, nb::handle end);
  bool prefetch(nb::handle idx, nb::handle stream, nb::handle end);
  // Returns the elements at a key of integers for the first axes, of which the first may be a slice
  // instead; on the CPU device. None if it goes the ordinary way.
  nb::object item(nb::handle key, nb::handle end);
  // Returns what an asynchronous gather needs: result, stream, and address of the indices, their
  // number and size, and address of the result. None if it goes the ordinary way.
  nb::object operands(nb::handle idx, nb::handle out, nb::handle stream);
  // Queues a gather on a stream, after the present work of another one. The GPU reaches indices and
  // rows. Returns false if it goes the ordinary way, and then does nothing.
  bool queue(const RowSize& size, uint64_t indices, uint64_t rows, uintptr_t stream,
             uintptr_t after);

  // Launches of callers' kernels. No other array of the process has this number.
  uint64_t number() const { return number_; }
  nb::handle acquire() const { return acquire_; }
  nb::handle release() const { return release_; }
  // Null: it keeps no order.
  cuda::Order* order() const { return order_; }
  bool takes_turns_with(const RowCalls& other) const { return turn_.is(other.turn_); }
  // Whether a launch may use the array, in the turn; if so, wakes what serves it.
  bool ready();
  // Notes before a launch that there may be work on a stream; returns whether that was known.
  bool note_stream(nb::handle stream);
  // A launch that nobody waits for has been made there, or there is no work on it.
  void keep_stream(nb::handle stream);
  void forget_stream(nb::handle stream);

 private:
  struct Operands;

  struct Item;

  bool find_item(nb::handle key, Item& item) const;
  // Both raise by `end` what went wrong.
  void read(const Item& item, const HostArray& rows, nb::handle end);
  // None: there is no memory.
  nb::object select(const Item& item, nb::handle end);
  bool find_part(nb::handle part, size_t axis, Item& item) const;
  nb::object gather_on_host(nb::handle idx, nb::handle out, nb::handle end);
  bool look_on_host(nb::handle idx, nb::handle out, Operands& operands, HostArray& indices,
                    HostArray& rows);
  bool quiet();
  bool unchanged() const;
  bool failed() const;
  bool owner_has_gone() const;
  void wake() const;
  bool look_at_indices(nb::handle idx, Operands& operands);
  bool look(nb::handle idx, nb::handle out, nb::handle stream, Operands& operands);
  void know_dtypes();
  bool launched(const RowSize& size, const Operands& operands, uintptr_t after, bool waits,
                nb::handle end);

  const uint64_t number_;
  const Launching* const launching_;  // null: on the CPU device
  const std::vector<int64_t> row_shape_;
  const uint64_t row_bytes_;
  const int64_t length_;
  const nb::object dtype_name_;
  const nb::object streams_;
  const nb::object launcher_, watchers_, service_, moved_object_, plans_object_;
  Moved& moved_;
  RowPlans& plans_;
  nb::object order_object_;
  cuda::Order* order_ = nullptr;
  nb::object turn_, acquire_, release_, all_streams_, in_flight_, lost_;
  std::vector<nb::object> mark_objects_;
  std::vector<const FailureMark*> marks_;
  const Names names_;
  const ForkGuard fork_;
  bool closed_ = false;

  Torch torch_;
  nb::object torch_dtype_;
  uint64_t dtype_ = 0, int32_ = 0, int64_ = 0;
  HostArrays host_;
};

}  // namespace fw::native
