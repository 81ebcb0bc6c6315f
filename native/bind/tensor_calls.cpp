#include "bind/tensor_calls.h"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "bind/cuda.h"

void bind_tensor_calls(nanobind::module_& m);

namespace fw::native {

using cuda::Handle;
using cuda::kCaptured;
using cuda::kCaptureImplicit;
using cuda::kSuccess;
using cuda::Result;

namespace {

// Launches that are kept prepared: one for each size of call.
constexpr size_t kPreparedMax = 256;

// What a buffer's address must be known of to choose the kernel.
constexpr uint64_t kAlignmentMax = 16;

// Members of the parameters that differ between calls of one size: indices, count, buffer.
constexpr size_t kOwnMembers = 3;

// A wait asks without a pause for this long: most end within it.
constexpr int64_t kPollUs = 200;

constexpr const char* kNames[] = {"gather", "prefetch"};

// Returns whether the set had it.
bool add(nb::handle set, nb::handle value) {
  const Py_ssize_t before = PySet_Size(set.ptr());
  if (PySet_Add(set.ptr(), value.ptr()) != 0) throw nb::python_error();
  return PySet_Size(set.ptr()) == before;
}

uint64_t next_number() {
  static std::atomic<uint64_t> numbers{1};
  return numbers.fetch_add(1, std::memory_order_relaxed);
}

// No two launches that run at a time have one number. Device code has 41 bits for it.
uint64_t launch_number() {
  static std::atomic<uint64_t> numbers{1};
  return numbers.fetch_add(1, std::memory_order_relaxed) & ((uint64_t{1} << 41) - 1);
}

// How a launch uses the list of misses, `cache::list_use`, as the last member of its parameters.
struct ListUse {
  uint64_t list, launch;
  uint32_t blocks, batch;
};

// Gives a launch that defers its misses a number of its own.
void renumber(std::vector<uint8_t>& params) {
  ListUse use;
  uint8_t* const place = params.data() + params.size() - sizeof use;
  std::memcpy(&use, place, sizeof use);
  if (use.list == 0) return;
  use.launch = launch_number();
  std::memcpy(place, &use, sizeof use);
}

}  // namespace

Prepared::Prepared(nb::object made) : launch(std::move(made)) {
  const nb::tuple size(launch.attr("size"));
  function = handle(nb::cast<uintptr_t>(size[0]));
  blocks = nb::cast<uint32_t>(size[1]);
  block_threads = nb::cast<uint32_t>(size[2]);
}

uintptr_t Names::stream_of(nb::handle stream) const {
  const nb::object held = PyLong_CheckExact(stream.ptr())
                              ? nb::borrow(stream)
                              : nb::getattr(stream, cuda_stream, nb::none());
  uintptr_t found = 0;
  if (PyLong_CheckExact(held.ptr()) && nb::try_cast(held, found)) return found;
  return staying([&] {
    const nb::object take = nb::module_::import_("flashwarp.device").attr("stream_handle");
    return nb::cast<uintptr_t>(take(stream));
  });
}

enum class TensorCalls::Verb : int { kGather, kPrefetch };

struct TensorCalls::Operands {
  uint64_t indices = 0, rows = 0, count = 0;
  uint32_t index_bytes = 0;
  uintptr_t stream = 0;
  // The axes of the indices; those of the result follow.
  int axes = 0;
  int64_t shape[Tensor::kAxesMax] = {};
  nb::object out;
};

struct TensorCalls::PreparedRows : Prepared {
  std::vector<uint8_t> params;
};

TensorCalls::TensorCalls(Launching launching, std::vector<int64_t> row_shape, uint64_t row_bytes,
                         nb::object dtype_name, nb::object launcher, nb::object streams,
                         size_t own_members_at)
    : number_(next_number()),
      launching_(std::move(launching)),
      row_shape_(std::move(row_shape)),
      row_bytes_(row_bytes),
      dtype_name_(std::move(dtype_name)),
      own_members_at_(own_members_at),
      streams_(std::move(streams)),
      launcher_(std::move(launcher)),
      watchers_(launcher_.attr("watchers")),
      service_(launcher_.attr("service")),
      moved_object_(launcher_.attr("moved")),
      moved_(nb::cast<Moved&>(moved_object_)) {
  const nb::object volume = launcher_.attr("volume"), cache = volume.attr("cache");
  turn_ = cache.attr("turn");
  acquire_ = turn_.attr("acquire");
  release_ = turn_.attr("release");
  all_streams_ = cache.attr("streams");
  if (!launcher_.attr("order").is_none()) {
    order_object_ = launcher_.attr("order").attr("native");
    order_ = nb::cast<cuda::Order*>(order_object_);
  }
  for (const char* name : {"commands", "indices"}) {
    noted_.emplace_back(nb::object(volume.attr(name)));
  }
}

TensorCalls::~TensorCalls() = default;

void TensorCalls::follow(nb::object in_flight, nb::object lost) {
  in_flight_ = std::move(in_flight);
  lost_ = std::move(lost);
}

nb::object TensorCalls::gather(nb::handle idx, nb::handle out, nb::handle stream,
                               nb::handle changes, nb::handle end) {
  if (!torch_.is_tensor(idx) || fork_.in_child()) return nb::none();
  const Turn turn(acquire_, release_);
  Operands operands;
  if (!quiet(changes) || !look(idx, out, stream, operands)) return nb::none();
  if (!launched(Verb::kGather, operands, !stream.is_none(), end)) return nb::none();
  moved_.add(operands.count);
  return operands.out;
}

bool TensorCalls::prefetch(nb::handle idx, nb::handle stream, nb::handle changes, nb::handle end) {
  if (!torch_.is_tensor(idx) || fork_.in_child()) return false;
  const Turn turn(acquire_, release_);
  Operands operands;
  if (!quiet(changes) || !look_at_indices(idx, operands)) return false;
  operands.stream =
      stream.is_none() ? torch_.current_stream(launching_.ordinal) : names_.stream_of(stream);
  return launched(Verb::kPrefetch, operands, !stream.is_none(), end);
}

nb::object TensorCalls::operands(nb::handle idx, nb::handle out, nb::handle stream) {
  Operands found;
  if (!torch_.is_tensor(idx) || nb::len(watchers_) != 0 || !look(idx, out, stream, found)) {
    return nb::none();
  }
  const nb::tuple which = nb::make_tuple(found.indices, found.count, found.index_bytes, found.rows);
  return nb::make_tuple(found.out, found.stream, which);
}

// Whether nothing needs to be raised or done before a call.
bool TensorCalls::quiet(nb::handle changes) {
  if (closed_ || nb::len(watchers_) != 0 || nb::len(lost_) != 0) return false;
  for (const Noted& each : noted_) {
    if (each.unread(names_)) return false;
  }
  for (nb::handle calls : in_flight_) {
    if (nb::len(calls) == 0) continue;
    if (end_calls(launching_.context, in_flight_) != Left::kNothing) return false;
    break;
  }
  return staying([&] { return service_.attr(names_.changes).equal(changes); });
}

bool TensorCalls::failed() const {
  for (const Noted& each : noted_) {
    if (each.unread(names_) || each.may_be_full(names_)) return true;
  }
  return false;
}

void TensorCalls::wake() const {
  staying([&] {
    if (nb::cast<bool>(service_.attr(names_.needs_wake))) service_.attr("wake")();
  });
}

bool TensorCalls::ready(nb::handle changes) {
  if (closed_ || fork_.in_child()) return false;
  if (!staying([&] { return service_.attr(names_.changes).equal(changes); })) return false;
  wake();
  return true;
}

bool TensorCalls::note_stream(nb::handle stream) { return add(streams_, stream); }

void TensorCalls::keep_stream(nb::handle stream) { add(all_streams_, stream); }

void TensorCalls::forget_stream(nb::handle stream) { PySet_Discard(streams_.ptr(), stream.ptr()); }

bool TensorCalls::look_at_indices(nb::handle idx, Operands& operands) {
  Tensor seen;
  if (!torch_.describe(idx, seen) || seen.ordinal != launching_.ordinal || seen.count == 0 ||
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

bool TensorCalls::look(nb::handle idx, nb::handle out, nb::handle stream, Operands& operands) {
  if (!look_at_indices(idx, operands) || dtype_ == 0) return false;
  const int axes = operands.axes + int(row_shape_.size());
  if (axes > Tensor::kAxesMax) return false;
  std::copy(row_shape_.begin(), row_shape_.end(), operands.shape + operands.axes);
  const bool follows = stream.is_none();
  const uintptr_t current =
      follows || out.is_none() ? torch_.current_stream(launching_.ordinal) : 0;
  operands.stream = follows ? current : names_.stream_of(stream);
  Tensor seen;
  if (out.is_none()) {
    // torch lends memory for its current stream.
    if (operands.stream != current) return false;
    operands.out = staying([&] { return torch_.empty(operands.shape, axes, torch_dtype_, idx); });
    if (!torch_.describe(operands.out, seen)) return false;
  } else {
    if (!torch_.is_tensor(out) || !torch_.describe(out, seen) ||
        seen.ordinal != launching_.ordinal || seen.dtype != dtype_ || seen.axes != axes ||
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

void TensorCalls::know_dtypes() {
  if (int64_ != 0) return;
  torch_dtype_ =
      dtype_name_.is_none() ? nb::none() : torch_.dtype_named(nb::cast<const char*>(dtype_name_));
  if (!torch_dtype_.is_none()) dtype_ = torch_.dtype(torch_dtype_);
  int32_ = torch_.dtype(torch_.dtype_named("int32"));
  int64_ = torch_.dtype(torch_.dtype_named("int64"));
}

TensorCalls::PreparedRows& TensorCalls::prepared(Verb verb, const Operands& operands) {
  const uint64_t key = operands.count << 8 | (operands.rows & (kAlignmentMax - 1)) << 2 |
                       uint64_t(operands.index_bytes == 8) << 1 | uint64_t(verb);
  const auto found = prepared_.find(key);
  if (found != prepared_.end()) return found->second;
  const nb::tuple made = staying([&] {
    return nb::tuple(launcher_.attr("prepare_rows")(kNames[int(verb)], operands.count,
                                                    operands.index_bytes, operands.rows));
  });
  PreparedRows fresh{Prepared(made[0]), {}};
  const nb::bytes params(made[1]);
  fresh.params.assign(params.c_str(), params.c_str() + params.size());
  if (prepared_.size() >= kPreparedMax) prepared_.clear();
  return prepared_[key] = std::move(fresh);
}

// Launches, and returns false if the stream is being captured. In the turn.
bool TensorCalls::launched(Verb verb, const Operands& operands, bool on_stream, nb::handle end) {
  wake();
  PreparedRows& found = prepared(verb, operands);
  // No code of Python runs from here to the launch, so no signal handler makes another call.
  const uint64_t own[kOwnMembers] = {operands.indices, operands.count, operands.rows};
  std::memcpy(found.params.data() + own_members_at_, own, sizeof own);
  renumber(found.params);
  const nb::object stream = nb::cast(operands.stream);
  const bool known = note_stream(stream);
  void* params[] = {found.params.data()};
  Result result = kSuccess, waited = kSuccess;
  unlocked([&] {
    const cuda::Context& context = launching_.context;
    const Handle here = handle(operands.stream), before[] = {handle(launching_.own)};
    const cuda::Accessed accessed[] = {{order_, false}};
    result = context.launch_among(before, false, handle(launching_.mark), found.function,
                                  found.blocks, found.block_threads, params, here,
                                  {accessed, order_ == nullptr ? 0u : 1u});
    if (result == kSuccess && !on_stream) waited = context.poll(here, kPollUs);
  });
  if (result != kSuccess && !known) forget_stream(stream);  // which may not exist
  if (result == kCaptured || result == kCaptureImplicit) return false;
  if (result == kSuccess && on_stream) {
    keep_stream(stream);
  } else if (result == kSuccess && waited == kSuccess && !failed()) {
    forget_stream(stream);
  } else {
    const nb::object launch = found.launch;
    staying([&] { end(kNames[int(verb)], operands.stream, launch, int(result)); });
  }
  return true;
}

}  // namespace fw::native

void bind_tensor_calls(nanobind::module_& m) {
  namespace nb = nanobind;
  using fw::native::Launching;
  using fw::native::Moved;
  using fw::native::TensorCalls;
  nb::class_<Moved>(m, "Moved")
      .def(nb::init<>())
      .def("add", &Moved::add, nb::arg("rows"))
      .def_prop_ro("calls", [](const Moved& moved) { return moved.calls.load(); })
      .def_prop_ro("rows", [](const Moved& moved) { return moved.rows.load(); });
  m.def("launch_number", &fw::native::launch_number);
  nb::class_<Launching>(m, "Launching")
      .def(nb::init<nb::object, uintptr_t, uintptr_t, int>(), nb::arg("context"), nb::arg("own"),
           nb::arg("mark"), nb::arg("ordinal"));
  nb::class_<TensorCalls>(m, "TensorCalls")
      .def(nb::init<Launching, std::vector<int64_t>, uint64_t, nb::object, nb::object, nb::object,
                    size_t>(),
           nb::arg("launching"), nb::arg("row_shape"), nb::arg("row_bytes"),
           nb::arg("dtype_name").none(), nb::arg("launcher"), nb::arg("streams"),
           nb::arg("own_members_at"))
      .def("follow", &TensorCalls::follow, nb::arg("in_flight"), nb::arg("lost"))
      .def("shut", &TensorCalls::shut)
      .def("gather", &TensorCalls::gather, nb::arg("idx").none(), nb::arg("out").none(),
           nb::arg("stream").none(), nb::arg("changes"), nb::arg("end"))
      .def("prefetch", &TensorCalls::prefetch, nb::arg("idx").none(), nb::arg("stream").none(),
           nb::arg("changes"), nb::arg("end"))
      .def("operands", &TensorCalls::operands, nb::arg("idx").none(), nb::arg("out").none(),
           nb::arg("stream").none());
}
