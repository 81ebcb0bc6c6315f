// The short way of an array's calls whose operands are tensors of torch on its GPU.
//
// A small gather takes less time than describing its operands in Python. Here no line of Python
// runs, and the driver is asked as little as possible. Whatever is unusual goes the ordinary way,
// which also raises the errors. Python keeps the state of the array; this looks at it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/fork_guard.h"
#include "bind/cuda.h"
#include "bind/tensors.h"
#include "bind/unlocked.h"

namespace nb = nanobind;
using fw::native::ForkGuard;
using fw::native::staying;
using fw::native::Tensor;
using fw::native::Torch;
using fw::native::unlocked;
using fw::native::cuda::Context;
using fw::native::cuda::Handle;
using fw::native::cuda::kCaptured;
using fw::native::cuda::kCaptureImplicit;
using fw::native::cuda::kSuccess;
using fw::native::cuda::Result;

void bind_tensor_calls(nb::module_& m);

namespace {

Handle handle(uintptr_t value) { return reinterpret_cast<Handle>(value); }

// How many calls moved rows, and how many rows.
struct Moved {
  std::atomic<uint64_t> calls{0}, rows{0};

  void add(uint64_t count) {
    calls.fetch_add(1, std::memory_order_relaxed);
    rows.fetch_add(count, std::memory_order_relaxed);
  }
};

// Launches that are kept prepared: one for each size of call.
constexpr size_t kPreparedMax = 256;

// What a buffer's address must be known of to choose the kernel.
constexpr uint64_t kAlignmentMax = 16;

// Members of the parameters that differ between calls of one size: indices, count, buffer.
constexpr size_t kOwnMembers = 3;

enum class Verb : int { kGather, kPrefetch };
constexpr const char* kNames[] = {"gather", "prefetch"};

struct Prepared {
  nb::object launch;  // owns what follows
  Handle function = nullptr;
  uint32_t blocks = 0, block_threads = 0;
  std::vector<uint8_t> params;
};

// The operands of a call.
struct Operands {
  uint64_t indices = 0, rows = 0, count = 0;
  uint32_t index_bytes = 0;
  uintptr_t stream = 0;
  // The axes of the indices; those of the result follow.
  int axes = 0;
  int64_t shape[Tensor::kAxesMax] = {};
  nb::object out;
};

// Takes a lock of Python's and gives it back; no signal handler runs between.
class Turn {
 public:
  Turn(nb::handle acquire, nb::handle release) : release_(release) {
    fw::native::staying([&] { acquire(); });
  }
  ~Turn() {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject* free = fw::native::staying([&] { return PyObject_CallNoArgs(release_.ptr()); });
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
             cuda_stream = name("cuda_stream"), requires_grad = name("requires_grad");

  static nb::object name(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }
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
  TensorCalls(nb::object context, uintptr_t own, uintptr_t mark, int ordinal,
              std::vector<int64_t> row_shape, uint64_t row_bytes, nb::object dtype_name,
              nb::object launcher, nb::object streams, size_t own_members_at)
      : context_object_(context),
        context_(nb::cast<const Context&>(context)),
        own_(own),
        mark_(mark),
        ordinal_(ordinal),
        row_shape_(std::move(row_shape)),
        row_bytes_(row_bytes),
        dtype_name_(dtype_name),
        own_members_at_(own_members_at),
        streams_(streams),
        launcher_(launcher),
        watchers_(launcher.attr("watchers")),
        service_(launcher.attr("service")),
        moved_object_(launcher.attr("moved")),
        moved_(nb::cast<Moved&>(moved_object_)) {
    const nb::object volume = launcher.attr("volume"), cache = volume.attr("cache");
    acquire_ = cache.attr("turn").attr("acquire");
    release_ = cache.attr("turn").attr("release");
    all_streams_ = cache.attr("streams");
    if (nb::cast<uint64_t>(launcher.attr("splitting").attr("rows")) != 0) {
      splits_ = launcher.attr("splitting").attr("on");
    }
    for (const char* name : {"commands", "indices"}) {
      noted_.emplace_back(nb::object(volume.attr(name)));
    }
  }

  // Sees the asynchronous calls of the array, and errors that wait to be raised.
  void follow(nb::object in_flight, nb::object lost) {
    in_flight_ = in_flight;
    lost_ = lost;
  }

  void shut() { closed_ = true; }

  // Returns the rows; None if it goes the ordinary way, and then does nothing. Without a stream it
  // waits for a moment. `end` is told of a launch that has not ended then, or failed.
  nb::object gather(nb::handle idx, nb::handle out, nb::handle stream, nb::handle changes,
                    nb::handle end) {
    if (!torch_.is_tensor(idx) || fork_.in_child()) return nb::none();
    const Turn turn(acquire_, release_);
    Operands operands;
    if (!quiet(changes) || !look(idx, out, stream, operands)) return nb::none();
    if (!launched(Verb::kGather, operands, !stream.is_none(), end)) return nb::none();
    moved_.add(operands.count);
    return operands.out;
  }

  bool prefetch(nb::handle idx, nb::handle stream, nb::handle changes, nb::handle end) {
    if (!torch_.is_tensor(idx) || fork_.in_child()) return false;
    const Turn turn(acquire_, release_);
    Operands operands;
    if (!quiet(changes) || !look_at_indices(idx, operands)) return false;
    operands.stream = stream.is_none() ? torch_.current_stream(ordinal_) : stream_of(stream);
    return launched(Verb::kPrefetch, operands, !stream.is_none(), end);
  }

  // Returns what an asynchronous gather needs: result, stream, and address of the indices, their
  // number and size, and address of the result. None if it goes the ordinary way.
  nb::object operands(nb::handle idx, nb::handle out, nb::handle stream) {
    Operands found;
    if (!torch_.is_tensor(idx) || nb::len(watchers_) != 0 || splits() ||
        !look(idx, out, stream, found)) {
      return nb::none();
    }
    const nb::tuple which =
        nb::make_tuple(found.indices, found.count, found.index_bytes, found.rows);
    return nb::make_tuple(found.out, found.stream, which);
  }

 private:
  bool splits() const {
    return splits_ && staying([&] { return nb::cast<bool>(splits_()); });
  }

  // Whether nothing needs to be raised or done before a call.
  bool quiet(nb::handle changes) {
    if (closed_ || nb::len(watchers_) != 0 || nb::len(lost_) != 0 || splits()) return false;
    for (const Noted& each : noted_) {
      if (each.unread(names_)) return false;
    }
    for (size_t i = 0, n = nb::len(in_flight_); i < n; ++i) {
      if (nb::len(nb::handle(PyList_GET_ITEM(in_flight_.ptr(), i))) == 0) continue;
      if (fw::native::end_calls(context_, in_flight_) != fw::native::kNothing) return false;
      break;
    }
    return staying([&] { return service_.attr(names_.changes).equal(changes); });
  }

  bool look_at_indices(nb::handle idx, Operands& operands) {
    Tensor seen;
    if (!torch_.describe(idx, seen) || seen.ordinal != ordinal_ || seen.count == 0 ||
        row_bytes_ == 0) {
      return false;
    }
    know_dtypes();
    if (seen.dtype != int64_ && seen.dtype != int32_) return false;
    operands.indices = seen.address;
    operands.count = seen.count;
    operands.index_bytes = seen.dtype == int64_ ? 8 : 4;
    operands.axes = seen.axes;
    std::copy(seen.shape, seen.shape + seen.axes, operands.shape);
    return true;
  }

  bool look(nb::handle idx, nb::handle out, nb::handle stream, Operands& operands) {
    if (!look_at_indices(idx, operands) || dtype_ == 0) return false;
    const int axes = operands.axes + int(row_shape_.size());
    if (axes > Tensor::kAxesMax) return false;
    std::copy(row_shape_.begin(), row_shape_.end(), operands.shape + operands.axes);
    const bool follows = stream.is_none();
    const uintptr_t current = follows || out.is_none() ? torch_.current_stream(ordinal_) : 0;
    operands.stream = follows ? current : stream_of(stream);
    Tensor seen;
    if (out.is_none()) {
      // torch lends memory for its current stream.
      if (operands.stream != current) return false;
      operands.out = torch_.empty(operands.shape, axes, torch_dtype_, idx);
      if (!torch_.describe(operands.out, seen)) return false;
    } else {
      if (!torch_.is_tensor(out) || !torch_.describe(out, seen) || seen.ordinal != ordinal_ ||
          seen.dtype != dtype_ || seen.axes != axes ||
          !std::equal(seen.shape, seen.shape + axes, operands.shape) ||
          nb::cast<bool>(out.attr(names_.requires_grad))) {
        return false;
      }
      operands.out = nb::borrow(out);
    }
    operands.rows = seen.address;
    return operands.indices + operands.count * operands.index_bytes <= seen.address ||
           seen.address + operands.count * row_bytes_ <= operands.indices;
  }

  void know_dtypes() {
    if (int64_ != 0) return;
    torch_dtype_ =
        dtype_name_.is_none() ? nb::none() : torch_.dtype_named(nb::cast<const char*>(dtype_name_));
    if (!torch_dtype_.is_none()) dtype_ = torch_.dtype(torch_dtype_);
    int32_ = torch_.dtype(torch_.dtype_named("int32"));
    int64_ = torch_.dtype(torch_.dtype_named("int64"));
  }

  uintptr_t stream_of(nb::handle stream) const {
    if (PyLong_CheckExact(stream.ptr())) return number(stream);
    const nb::object held = nb::getattr(stream, names_.cuda_stream, nb::none());
    if (PyLong_CheckExact(held.ptr())) return number(held);
    const nb::object take = nb::module_::import_("flashwarp.device").attr("stream_handle");
    return nb::cast<uintptr_t>(take(stream));
  }

  static uintptr_t number(nb::handle value) { return nb::cast<uintptr_t>(value); }

  Prepared& prepared(Verb verb, const Operands& operands) {
    const uint64_t key = operands.count << 8 | (operands.rows & (kAlignmentMax - 1)) << 2 |
                         uint64_t(operands.index_bytes == 8) << 1 | uint64_t(verb);
    const auto found = prepared_.find(key);
    if (found != prepared_.end()) return found->second;
    const nb::tuple made = staying([&] {
      return nb::tuple(launcher_.attr("prepare_rows")(kNames[int(verb)], operands.count,
                                                      operands.index_bytes, operands.rows));
    });
    Prepared fresh;
    fresh.launch = made[0];
    const nb::tuple size(fresh.launch.attr("size"));
    fresh.function = handle(nb::cast<uintptr_t>(size[0]));
    fresh.blocks = nb::cast<uint32_t>(size[1]);
    fresh.block_threads = nb::cast<uint32_t>(size[2]);
    const nb::bytes params(made[1]);
    fresh.params.assign(params.c_str(), params.c_str() + params.size());
    // Another one needs its own parameters.
    if (!nb::cast<bool>(made[2])) return once_ = std::move(fresh);
    if (prepared_.size() >= kPreparedMax) prepared_.clear();
    return prepared_[key] = std::move(fresh);
  }

  void wake() const {
    staying([&] {
      if (nb::cast<bool>(service_.attr(names_.needs_wake))) service_.attr("wake")();
    });
  }

  // Launches, and returns false if the stream is being captured. In the turn.
  bool launched(Verb verb, const Operands& operands, bool on_stream, nb::handle end) {
    wake();
    Prepared& found = prepared(verb, operands);
    // No code of Python runs from here to the launch, so no signal handler makes another call.
    const uint64_t own[kOwnMembers] = {operands.indices, operands.count, operands.rows};
    std::memcpy(found.params.data() + own_members_at_, own, sizeof own);
    const nb::object stream = nb::cast(operands.stream);
    const bool known = add(streams_, stream);
    void* params[] = {found.params.data()};
    Result result = kSuccess, waited = kSuccess;
    unlocked([&] {
      const Handle here = handle(operands.stream), before[] = {handle(own_)};
      result = context_.launch_among({before, 1}, false, handle(mark_), found.function,
                                     found.blocks, found.block_threads, params, here);
      if (result == kSuccess && !on_stream) waited = context_.poll(here, kPollUs);
    });
    if (result != kSuccess && !known) PySet_Discard(streams_.ptr(), stream.ptr());
    if (result == kCaptured || result == kCaptureImplicit) return false;
    if (result == kSuccess && on_stream) {
      add(all_streams_, stream);
    } else if (result == kSuccess && waited == kSuccess && !failed()) {
      PySet_Discard(streams_.ptr(), stream.ptr());
    } else {
      const nb::object launch = found.launch;
      staying([&] { end(kNames[int(verb)], operands.stream, launch, int(result)); });
    }
    return true;
  }

  bool failed() const {
    for (const Noted& each : noted_) {
      if (each.unread(names_) || each.may_be_full(names_)) return true;
    }
    return false;
  }

  // Returns whether the set had it.
  static bool add(nb::handle set, nb::handle value) {
    const Py_ssize_t before = PySet_GET_SIZE(set.ptr());
    if (PySet_Add(set.ptr(), value.ptr()) != 0) throw nb::python_error();
    return PySet_GET_SIZE(set.ptr()) == before;
  }

  // A wait asks without a pause for this long: most end within it.
  static constexpr int64_t kPollUs = 200;

  const nb::object context_object_;
  const Context& context_;
  const uintptr_t own_, mark_;
  const int ordinal_;
  const std::vector<int64_t> row_shape_;
  const uint64_t row_bytes_;
  const nb::object dtype_name_;
  const size_t own_members_at_;
  const nb::object streams_;
  const nb::object launcher_, watchers_, service_, moved_object_;
  Moved& moved_;
  nb::object acquire_, release_, all_streams_, splits_, in_flight_, lost_;
  std::vector<Noted> noted_;
  const Names names_;
  const ForkGuard fork_;
  bool closed_ = false;

  Torch torch_;
  nb::object torch_dtype_;
  uint64_t dtype_ = 0, int32_ = 0, int64_ = 0;
  std::unordered_map<uint64_t, Prepared> prepared_;
  Prepared once_;
};

}  // namespace

void bind_tensor_calls(nb::module_& m) {
  nb::class_<Moved>(m, "Moved")
      .def(nb::init<>())
      .def("add", &Moved::add, nb::arg("rows"))
      .def_prop_ro("calls", [](const Moved& moved) { return moved.calls.load(); })
      .def_prop_ro("rows", [](const Moved& moved) { return moved.rows.load(); });
  nb::class_<TensorCalls>(m, "TensorCalls")
      .def(nb::init<nb::object, uintptr_t, uintptr_t, int, std::vector<int64_t>, uint64_t,
                    nb::object, nb::object, nb::object, size_t>(),
           nb::arg("context"), nb::arg("own"), nb::arg("mark"), nb::arg("ordinal"),
           nb::arg("row_shape"), nb::arg("row_bytes"), nb::arg("dtype_name").none(),
           nb::arg("launcher"), nb::arg("streams"), nb::arg("own_members_at"))
      .def("follow", &TensorCalls::follow, nb::arg("in_flight"), nb::arg("lost"))
      .def("shut", &TensorCalls::shut)
      .def("gather", &TensorCalls::gather, nb::arg("idx").none(), nb::arg("out").none(),
           nb::arg("stream").none(), nb::arg("changes"), nb::arg("end"))
      .def("prefetch", &TensorCalls::prefetch, nb::arg("idx").none(), nb::arg("stream").none(),
           nb::arg("changes"), nb::arg("end"))
      .def("operands", &TensorCalls::operands, nb::arg("idx").none(), nb::arg("out").none(),
           nb::arg("stream").none());
}
