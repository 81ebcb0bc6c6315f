#include "bind/row_calls.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <poll.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "bind/cuda.h"

void bind_row_calls(nanobind::module_& m);

namespace fw::native {

using cuda::Handle;
using cuda::kCaptured;
using cuda::kCaptureImplicit;
using cuda::kSuccess;
using cuda::Result;

namespace {

// A wait asks without a pause for this long: most end within it.
constexpr int64_t kPollUs = 200;

// Handles between these bounds are given to the driver. `stream_handle` judges all others.
constexpr uintptr_t kLeastAddress = 4096, kAddresses = uintptr_t{1} << 47;

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

}  // namespace

uintptr_t Names::stream_of(nb::handle stream) const {
  const nb::object held = PyLong_CheckExact(stream.ptr())
                              ? nb::borrow(stream)
                              : nb::getattr(stream, cuda_stream, nb::none());
  uintptr_t found = 0;
  if (PyLong_CheckExact(held.ptr()) && nb::try_cast(held, found) &&
      (found <= 2 || found - kLeastAddress < kAddresses)) {
    return found;
  }
  return staying([&] {
    const nb::object take = nb::module_::import_("flashwarp.device").attr("stream_handle");
    return nb::cast<uintptr_t>(take(stream));
  });
}

struct RowCalls::Operands {
  uint64_t indices = 0, rows = 0, count = 0;
  uint32_t index_bytes = 0;
  uintptr_t stream = 0;
  // The axes of the indices; those of the result follow.
  int axes = 0;
  int64_t shape[Tensor::kAxesMax] = {};
  nb::object out;

  // Whether indices and rows have no byte in common.
  bool apart(uint64_t row_bytes) const {
    return indices + count * index_bytes <= rows || rows + count * row_bytes <= indices;
  }
  RowSize size(RowSize::Verb verb) const {
    return {.verb = verb, .index_bytes = uint8_t(index_bytes), .count = count};
  }
  RowOperands packed(uint64_t row_bytes) const { return {indices, count, rows, row_bytes}; }
};

bool ArrayLaunch::run() {
  const nb::object here = nb::cast(stream), launch = prepared.launch;
  const Plan plan = prepared.plan;
  // `close` always waits for our own stream.
  const bool notes = stream != launching.own;
  std::vector<RowCalls*> fresh;
  std::vector<cuda::Accessed> ordered;
  for (const Access& each : accesses) {
    // Before the launch: if a signal handler raises behind it, `close` must wait all the same.
    if (notes && !each.array->note_stream(here)) fresh.push_back(each.array);
    if (each.array->order() != nullptr) ordered.push_back({each.array->order(), each.stores});
  }
  Result recorded = kSuccess;
  const auto refuse = [&](Result why, const char* name) {
    staying([&] { launch.attr("refuse")(int(why), stream, name); });
  };
  const Result result = unlocked([&] {
    const cuda::Context& context = launching.context;
    const Result made =
        context.launch_among(others, both_ways, handle(launching.mark), plan.function, plan.blocks,
                             plan.block_threads, params, handle(stream), ordered);
    if (made == kSuccess && end) recorded = context.record(handle(end->event), handle(stream));
    if (made == kSuccess && wait_us != 0) waited = context.poll(handle(stream), wait_us);
    return made;
  });
  if (result == kSuccess) {
    for (const Access& each : accesses) {
      if (notes && wait_us == 0) each.array->keep_stream(here);
    }
    if (end) end->entries.attr("append")(end->entry);
    if (recorded != kSuccess) refuse(recorded, "cuEventRecord");
    return true;
  }
  for (RowCalls* each : fresh) each->forget_stream(here);  // which may not exist
  if (result != kCaptured && result != kCaptureImplicit) refuse(result, "cuLaunchKernel");
  return false;
}

RowCalls::RowCalls(const Launching* launching, std::vector<int64_t> row_shape, uint64_t row_bytes,
                   int64_t length, nb::object dtype, nb::object dtype_name, nb::object launcher,
                   nb::object streams)
    : number_(next_number()),
      launching_(launching),
      row_shape_(std::move(row_shape)),
      row_bytes_(row_bytes),
      length_(length),
      dtype_name_(std::move(dtype_name)),
      streams_(std::move(streams)),
      launcher_(std::move(launcher)),
      watchers_(launcher_.attr("watchers")),
      service_(launcher_.attr("service")),
      moved_object_(launcher_.attr("moved")),
      plans_object_(launcher_.attr("plans")),
      moved_(nb::cast<Moved&>(moved_object_)),
      plans_(nb::cast<RowPlans&>(plans_object_)),
      host_(launching == nullptr ? std::move(dtype) : nb::none()) {
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
    mark_objects_.push_back(volume.attr(name).attr("mark"));
    marks_.push_back(nb::cast<const FailureMark*>(mark_objects_.back()));
  }
}

RowCalls::~RowCalls() = default;

void RowCalls::follow(nb::object in_flight, nb::object lost) {
  in_flight_ = std::move(in_flight);
  lost_ = std::move(lost);
}

nb::object RowCalls::gather(nb::handle idx, nb::handle out, nb::handle stream, nb::handle end) {
  if (launching_ == nullptr) {
    return stream.is_none() ? gather_on_host(idx, out, end) : nb::object(nb::none());
  }
  if (!torch_.is_tensor(idx) || fork_.in_child()) return nb::none();
  const Turn turn(acquire_, release_);
  Operands operands;
  if (!quiet() || !look(idx, out, stream, operands)) return nb::none();
  const RowSize size = operands.size(RowSize::Verb::kGather);
  if (!launched(size, operands, launching_->own, stream.is_none(), end)) return nb::none();
  moved_.add(operands.count);
  return operands.out;
}

bool RowCalls::queue(const RowSize& size, uint64_t indices, uint64_t rows, uintptr_t stream,
                     uintptr_t after) {
  if (launching_ == nullptr || size.count == 0 || row_bytes_ == 0 || fork_.in_child()) return false;
  const Turn turn(acquire_, release_);
  Operands operands;
  operands.indices = indices;
  operands.rows = rows;
  operands.count = size.count;
  operands.stream = stream;
  if (!quiet() || !launched(size, operands, after, false, {})) return false;
  moved_.add(size.count);
  return true;
}

// Prefetches on the CPU device go the ordinary way.
bool RowCalls::prefetch(nb::handle idx, nb::handle stream, nb::handle end) {
  if (launching_ == nullptr || !torch_.is_tensor(idx) || fork_.in_child()) return false;
  const Turn turn(acquire_, release_);
  Operands operands;
  if (!quiet() || !look_at_indices(idx, operands)) return false;
  operands.stream =
      stream.is_none() ? torch_.current_stream(launching_->ordinal) : names_.stream_of(stream);
  const RowSize size = operands.size(RowSize::Verb::kPrefetch);
  return launched(size, operands, launching_->own, stream.is_none(), end);
}

nb::object RowCalls::operands(nb::handle idx, nb::handle out, nb::handle stream) {
  Operands found;
  if (launching_ == nullptr || !torch_.is_tensor(idx) || nb::len(watchers_) != 0 ||
      !look(idx, out, stream, found)) {
    return nb::none();
  }
  const nb::tuple which = nb::make_tuple(found.indices, found.count, found.index_bytes, found.rows);
  return nb::make_tuple(found.out, found.stream, which);
}

nb::object RowCalls::gather_on_host(nb::handle idx, nb::handle out, nb::handle end) {
  if (!host_.is_array(idx) || fork_.in_child()) return nb::none();
  const Turn turn(acquire_, release_);
  Operands operands;
  HostArray indices, rows;
  if (!quiet() || !look_on_host(idx, out, operands, indices, rows)) return nb::none();
  plans_.run(launcher_, operands.size(RowSize::Verb::kGather), operands.packed(row_bytes_));
  moved_.add(operands.count);
  if (failed()) staying([&] { end("gather", nb::none()); });
  return operands.out;
}

// Neighbouring bytes of the array, or cells at equal distances, and the axes that they have.
struct RowCalls::Item {
  // Cells of which numpy selects some are read so many bytes at a time: into memory that stays in
  // the caches of a core, where fresh memory would cost more than the copies.
  static constexpr uint64_t kSelectedBytes = 256 << 10;

  uint64_t begin = 0, nbytes = 0, count = 1, stride = 0;
  std::vector<int64_t> shape;
  // What numpy selects of them: by steps, and behind the first axis that a slice cuts.
  nb::list rest;
  bool backwards = false, cut = false, selects = false;
  bool is_scalar = true;

  bool is_range() const { return count == 1 || stride == nbytes; }
  RowSize size() const {
    if (is_range()) return {.index_bytes = 0, .count = count * nbytes};
    return {.verb = RowSize::Verb::kCells,
            .index_bytes = 0,
            .count = count,
            .counting = {0, stride, nbytes}};
  }
};

// A launch of few bytes runs in the calling thread.
nb::object RowCalls::item(nb::handle key, nb::handle end) {
  Item item;
  if (launching_ != nullptr || !find_item(key, item) || fork_.in_child()) return nb::none();
  const Turn turn(acquire_, release_);
  if (!quiet()) return nb::none();
  if (item.selects) return select(item, end);
  nb::object out = host_.empty(item.shape);
  HostArray rows;
  if (!out.is_valid() || !rows.take(out, true)) return nb::none();
  read(item, rows, end);
  return item.is_scalar ? nb::object(out[nb::tuple()]) : out;
}

void RowCalls::read(const Item& item, const HostArray& rows, nb::handle end) {
  const RowSize size = item.size();
  plans_.run(launcher_, size, {0, size.count, rows.address(), item.begin});
  moved_.add(item.count);
  if (failed()) staying([&] { end("gather", nb::none()); });
}

nb::object RowCalls::select(const Item& item, nb::handle end) {
  Item block = item;
  block.count = std::clamp<uint64_t>(Item::kSelectedBytes / item.nbytes, 1, item.count);
  const uint64_t at_once = block.count;
  if (item.count > 1) block.shape[0] = int64_t(at_once);
  const nb::object held = host_.empty(block.shape);
  HostArray rows;
  if (!held.is_valid() || !rows.take(held, true)) return nb::none();
  const nb::tuple chosen(item.rest);
  nb::object out;
  for (uint64_t done = 0; done < item.count; done += block.count) {
    block.begin = item.begin + done * item.stride;
    block.count = std::min(at_once, item.count - done);
    read(block, rows, end);
    const auto part = [&] {
      nb::object read_rows = held;
      if (block.count != at_once) read_rows = held[nb::slice(Py_ssize_t(block.count))];
      return nb::object(read_rows[chosen]);
    };
    if (at_once == item.count) return staying([&] { return part().attr("copy")(); });
    if (!out.is_valid()) {
      auto shape = nb::cast<std::vector<int64_t>>(part().attr("shape"));
      shape[0] = int64_t(item.count);
      out = host_.empty(shape);
      if (!out.is_valid()) return nb::none();
    }
    const uint64_t first = item.backwards ? item.count - done - block.count : done;
    staying([&] { out[nb::slice(Py_ssize_t(first), Py_ssize_t(first + block.count))] = part(); });
  }
  return out;
}

bool RowCalls::find_item(nb::handle key, Item& item) const {
  const bool several = PyTuple_CheckExact(key.ptr());
  const size_t count = several ? size_t(PyTuple_Size(key.ptr())) : 1, axes = row_shape_.size() + 1;
  if (row_bytes_ == 0 || count == 0) return false;
  item.nbytes = row_bytes_;
  size_t axis = 0, left_out = axes + 1;
  for (size_t i = 0; i < count; ++i) {
    const nb::handle part = several ? PyTuple_GetItem(key.ptr(), Py_ssize_t(i)) : key.ptr();
    if (part.ptr() != Py_Ellipsis) {
      if (axis == axes || !find_part(part, axis++, item)) return false;
      continue;
    }
    if (left_out < count) return false;  // numpy takes one of them
    const nb::object all = nb::steal(PySlice_New(nullptr, nullptr, nullptr));
    for (left_out -= count; left_out != 0; --left_out) {
      if (!find_part(all, axis++, item)) return false;
    }
    item.is_scalar = false;
  }
  item.shape.insert(item.shape.end(), row_shape_.begin() + std::ptrdiff_t(axis) - 1,
                    row_shape_.end());
  item.is_scalar = item.is_scalar && item.shape.empty();
  return true;
}

// Adds the part of a key for one axis; false if it selects nothing or has other objects than
// integers, whose code would run.
bool RowCalls::find_part(nb::handle part, size_t axis, Item& item) const {
  const int64_t length = axis == 0 ? length_ : row_shape_[axis - 1];
  if (axis != 0 && !item.cut) item.nbytes /= uint64_t(length);
  if (!PySlice_Check(part.ptr())) {
    auto index = host_.integer(part);
    if (!index || *index < -length || *index >= length) return false;
    if (item.cut) {
      item.shape.push_back(length);
      item.rest.append(part);
      item.selects = true;
    } else {
      item.begin += uint64_t(*index < 0 ? *index + length : *index) * item.nbytes;
    }
    return true;
  }
  for (const char* bound : {"start", "stop", "step"}) {
    const nb::object value = part.attr(bound);
    if (!value.is_none() && !host_.integer(value)) return false;
  }
  Py_ssize_t start, stop, step;
  if (PySlice_Unpack(part.ptr(), &start, &stop, &step) != 0) {
    PyErr_Clear();
    return false;
  }
  const Py_ssize_t count = PySlice_AdjustIndices(length, &start, &stop, step);
  if (count == 0) return false;
  const uint64_t first = uint64_t(step < 0 ? start + (count - 1) * step : start);
  const uint64_t apart = count == 1 ? 1 : uint64_t(std::abs(step));
  // Rows lie apart, and columns from the first to the last side by side.
  const auto held = axis == 0 ? count : item.cut ? length : Py_ssize_t((count - 1) * apart + 1);
  item.shape.push_back(held);
  if (axis == 0) {
    item.begin = first * row_bytes_;
    item.count = uint64_t(count);
    item.stride = apart * row_bytes_;
    item.backwards = step < 0;
  } else if (!item.cut) {
    item.begin += first * item.nbytes;
    item.nbytes *= uint64_t(held);
  }
  const bool whole = held == count && step > 0;
  if (item.cut && !whole) {
    item.rest.append(part);
  } else {
    const nb::int_ by(axis == 0 ? (step < 0 ? -1 : 1) : step);
    item.rest.append(nb::steal(PySlice_New(nullptr, nullptr, whole ? nullptr : by.ptr())));
  }
  item.cut = item.cut || axis != 0;
  item.selects = item.selects || !whole;
  return true;
}

// Looks at operands of the CPU device, and makes the result.
bool RowCalls::look_on_host(nb::handle idx, nb::handle out, Operands& operands, HostArray& indices,
                            HostArray& rows) {
  if (row_bytes_ == 0 || !indices.take(idx, false)) return false;
  operands.index_bytes = indices.index_bytes();
  if (operands.index_bytes == 0 || indices.nbytes() == 0) return false;
  operands.count = indices.nbytes() / operands.index_bytes;
  operands.indices = indices.address();
  if (bounds_of(indices, length_).stray) return false;
  std::vector<int64_t> shape(indices.shape(), indices.shape() + indices.axes());
  shape.insert(shape.end(), row_shape_.begin(), row_shape_.end());
  operands.out = out.is_none() ? host_.empty(shape) : nb::borrow(out);
  if (!operands.out.is_valid()) return false;
  const bool given = !out.is_none();
  if (given && (!host_.is_array(out) || !host_.has_dtype(out))) return false;
  if (!rows.take(operands.out, true)) return false;
  if (given && !std::equal(shape.begin(), shape.end(), rows.shape(), rows.shape() + rows.axes())) {
    return false;
  }
  operands.rows = rows.address();
  return operands.apart(row_bytes_);
}

// Whether nothing needs to be raised or done before a call.
bool RowCalls::quiet() {
  if (closed_ || nb::len(watchers_) != 0 || nb::len(lost_) != 0) return false;
  for (const FailureMark* each : marks_) {
    if (each->unread()) return false;
  }
  for (nb::handle calls : in_flight_) {
    if (nb::len(calls) == 0) continue;
    if (launching_ == nullptr) return false;  // the call may have to come behind these
    if (end_calls(launching_->context, in_flight_) != Left::kNothing) return false;
    break;
  }
  return unchanged();
}

bool RowCalls::unchanged() const {
  return staying([&] { return nb::cast<int64_t>(service_.attr(names_.changes)) == changes; });
}

bool RowCalls::failed() const {
  for (const FailureMark* each : marks_) {
    if (each->unread() || each->may_be_full()) return true;
  }
  return owner_has_gone();
}

bool RowCalls::owner_has_gone() const {
  std::array<pollfd, 2> looks;
  const size_t count = std::min(signs.size(), looks.size());
  for (size_t i = 0; i < count; ++i) looks[i] = {signs[i].first, signs[i].second, 0};
  return count != 0 && poll(looks.data(), count, 0) != 0;
}

void RowCalls::wake() const {
  staying([&] {
    if (nb::cast<bool>(service_.attr(names_.needs_wake))) service_.attr("wake")();
  });
}

bool RowCalls::ready() {
  if (closed_ || fork_.in_child() || !unchanged()) return false;
  wake();
  return true;
}

bool RowCalls::note_stream(nb::handle stream) { return add(streams_, stream); }

void RowCalls::keep_stream(nb::handle stream) { add(all_streams_, stream); }

void RowCalls::forget_stream(nb::handle stream) { PySet_Discard(streams_.ptr(), stream.ptr()); }

bool RowCalls::look_at_indices(nb::handle idx, Operands& operands) {
  Tensor seen;
  if (!torch_.describe(idx, seen) || seen.ordinal != launching_->ordinal || seen.count == 0 ||
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

bool RowCalls::look(nb::handle idx, nb::handle out, nb::handle stream, Operands& operands) {
  if (!look_at_indices(idx, operands) || dtype_ == 0) return false;
  const int axes = operands.axes + int(row_shape_.size());
  if (axes > Tensor::kAxesMax) return false;
  std::copy(row_shape_.begin(), row_shape_.end(), operands.shape + operands.axes);
  const bool follows = stream.is_none();
  const uintptr_t current =
      follows || out.is_none() ? torch_.current_stream(launching_->ordinal) : 0;
  operands.stream = follows ? current : names_.stream_of(stream);
  Tensor seen;
  if (out.is_none()) {
    // torch lends memory for its current stream.
    if (operands.stream != current) return false;
    operands.out = staying([&] { return torch_.empty(operands.shape, axes, torch_dtype_, idx); });
    if (!torch_.describe(operands.out, seen)) return false;
  } else {
    if (!torch_.is_tensor(out) || !torch_.describe(out, seen) ||
        seen.ordinal != launching_->ordinal || seen.dtype != dtype_ || seen.axes != axes ||
        !std::equal(seen.shape, seen.shape + axes, operands.shape) ||
        nb::cast<bool>(out.attr(names_.requires_grad))) {
      return false;
    }
    operands.out = nb::borrow(out);
  }
  operands.rows = seen.address;
  return operands.apart(row_bytes_);
}

void RowCalls::know_dtypes() {
  if (int64_ != 0) return;
  torch_dtype_ =
      dtype_name_.is_none() ? nb::none() : torch_.dtype_named(nb::cast<const char*>(dtype_name_));
  if (!torch_dtype_.is_none()) dtype_ = torch_.dtype(torch_dtype_);
  int32_ = torch_.dtype(torch_.dtype_named("int32"));
  int64_ = torch_.dtype(torch_.dtype_named("int64"));
}

// Launches behind our own stream and another one, in the turn.
bool RowCalls::launched(const RowSize& size, const Operands& operands, uintptr_t after, bool waits,
                        nb::handle end) {
  wake();
  PreparedRows& found = plans_.of(launcher_, size, operands.rows);
  // No code of Python runs from here to the launch, so no signal handler makes another call.
  found.parameter.point_to(operands.packed(row_bytes_));
  void* params[] = {found.parameter.data()};
  const Handle others[] = {handle(launching_->own), handle(after)};
  const Access accesses[] = {{this}};
  ArrayLaunch launch = {.launching = *launching_,
                        .prepared = found,
                        .params = params,
                        .stream = operands.stream,
                        .others = {others, after == launching_->own ? 1u : 2u},
                        .accesses = accesses,
                        .wait_us = waits ? kPollUs : 0};
  if (!launch.run()) return false;
  if (!waits) return true;
  if (launch.waited == kSuccess && !failed()) {
    forget_stream(nb::cast(operands.stream));
  } else {
    staying([&] { end(name_of(size.verb), operands.stream); });
  }
  return true;
}

namespace {

// Operands that kernels reach: address, number and size of the indices, and address of the rows.
using Which = std::tuple<uint64_t, uint64_t, uint8_t, uint64_t>;

bool queue(RowCalls& calls, const std::string& verb, const Which& which, uintptr_t stream,
           uintptr_t after, uint16_t sms, const std::optional<Counting>& counting) {
  const auto& [indices, count, index_bytes, rows] = which;
  const RowSize size = {
      .verb = verb_of(verb),
      .index_bytes = index_bytes,
      .sms = sms,
      .count = count,
      .counting = counting.value_or(Counting{}),
  };
  return calls.queue(size, indices, rows, stream, after);
}

// Launches on rows in the turn of whoever calls, for calls that Python has prepared. Of a range the
// indices have no size, and are bytes; the last of `which` is its first byte, else bytes of a row.
// Returns false, and does nothing, if there are `others`, or an `end`, and a stream is captured.
bool launch_rows(RowPlans& plans, nb::handle launcher, const Launching* launching,
                 const std::string& verb,
                 const std::tuple<uint64_t, uint64_t, uint8_t, uint64_t, uint64_t>& which,
                 std::optional<uintptr_t> stream, Handles others,
                 std::optional<std::tuple<uintptr_t, nb::object, nb::object>> end, uint16_t sms,
                 const std::optional<Counting>& counting, bool one_by_one, uint64_t strays) {
  const auto& [indices, count, index_bytes, rows, row_bytes] = which;
  const RowSize size = {
      .verb = verb_of(verb),
      .index_bytes = index_bytes,
      .one_by_one = one_by_one,
      .sms = sms,
      .count = count,
      .counting = counting.value_or(Counting{}),
  };
  const RowOperands operands = {indices, count, rows, row_bytes};
  if (launching == nullptr) {
    plans.run(launcher, size, operands, strays);
    return true;
  }
  staying([&] { launcher.attr("wake")(); });
  PreparedRows& found = plans.of(launcher, size, rows);
  found.parameter.point_to(operands, 0, strays);
  void* params[] = {found.parameter.data()};
  const uintptr_t run = stream.value_or(launching->own);
  const std::vector<Handle> among = handles(others);
  if (end || !among.empty()) {
    ArrayLaunch made = {.launching = *launching,
                        .prepared = found,
                        .params = params,
                        .stream = run,
                        .others = among};
    if (end) made.end = std::make_from_tuple<End>(*end);
    return made.run();
  }
  const nb::object launch = found.launch;
  const Plan& plan = found.plan;
  const Result result = unlocked([&] {
    return launching->context.launch(plan.function, plan.blocks, plan.block_threads, params,
                                     handle(run));
  });
  if (result != kSuccess) {
    staying([&] { launch.attr("refuse")(int(result), run, "cuLaunchKernel"); });
  }
  return true;
}

std::tuple<bool, std::optional<int64_t>> index_bounds(nb::handle array, int64_t length) {
  HostArray indices;
  if (!indices.take(array, false)) throw nb::type_error("the indices are not dense");
  const Bounds found = bounds_of(indices, length);
  return {found.negative, found.stray};
}

// A launch of Python's with arguments that Python has packed.
bool launch_among(const Launching& launching, nb::object launch, ParamBytes arguments,
                  uintptr_t stream, Handles others, bool both_ways,
                  nb::typed<nb::sequence, RowCalls> arrays) {
  const Prepared prepared(std::move(launch));
  if (prepared.plan.blocks == 0) return true;
  Params params(arguments);
  const std::vector<Handle> among = handles(others);
  std::vector<Access> accesses;
  for (nb::handle each : arrays) accesses.push_back({&nb::cast<RowCalls&>(each)});
  ArrayLaunch made = {.launching = launching,
                      .prepared = prepared,
                      .params = params.data(),
                      .stream = stream,
                      .others = among,
                      .both_ways = both_ways,
                      .accesses = accesses};
  return made.run();
}

}  // namespace
}  // namespace fw::native

void bind_row_calls(nanobind::module_& m) {
  namespace nb = nanobind;
  using fw::native::FailureMark;
  using fw::native::Launching;
  using fw::native::RowCalls;
  nb::class_<Launching>(m, "Launching")
      .def(nb::init<nb::object, uintptr_t, uintptr_t, int>(), nb::arg("context"), nb::arg("own"),
           nb::arg("mark"), nb::arg("ordinal"))
      .def_rw("closed", &Launching::closed);
  m.def("index_bounds", &fw::native::index_bounds, nb::arg("indices"), nb::arg("length"));
  m.def("launch_among", &fw::native::launch_among, nb::arg("launching"), nb::arg("launch"),
        nb::arg("arguments"), nb::arg("stream"), nb::arg("others"), nb::arg("both_ways"),
        nb::arg("arrays"));
  m.def("launch_rows", &fw::native::launch_rows, nb::arg("plans"), nb::arg("launcher"),
        nb::arg("launching").none(), nb::arg("verb"), nb::arg("which"), nb::arg("stream").none(),
        nb::arg("others"), nb::arg("end").none(), nb::arg("sms"), nb::arg("counting").none(),
        nb::arg("one_by_one"), nb::arg("strays"));
  nb::class_<FailureMark>(m, "FailureMark")
      .def(nb::init<uintptr_t, uint64_t, uint64_t>(), nb::arg("first"), nb::arg("stride"),
           nb::arg("kept"))
      .def_rw("read", &FailureMark::read)
      .def_prop_ro("unread", &FailureMark::unread);
  nb::class_<RowCalls>(m, "RowCalls")
      .def(nb::init<const Launching*, std::vector<int64_t>, uint64_t, int64_t, nb::object,
                    nb::object, nb::object, nb::object>(),
           nb::arg("launching").none(), nb::arg("row_shape"), nb::arg("row_bytes"),
           nb::arg("length"), nb::arg("dtype").none(), nb::arg("dtype_name").none(),
           nb::arg("launcher"), nb::arg("streams"), nb::keep_alive<1, 2>())
      .def_rw("changes", &RowCalls::changes)
      .def_rw("signs", &RowCalls::signs)
      .def("follow", &RowCalls::follow, nb::arg("in_flight"), nb::arg("lost"))
      .def("shut", &RowCalls::shut)
      .def("gather", &RowCalls::gather, nb::arg("idx").none(), nb::arg("out").none(),
           nb::arg("stream").none(), nb::arg("end"))
      .def("item", &RowCalls::item, nb::arg("key").none(), nb::arg("end"))
      .def("prefetch", &RowCalls::prefetch, nb::arg("idx").none(), nb::arg("stream").none(),
           nb::arg("end"))
      .def("queue", &fw::native::queue, nb::arg("verb"), nb::arg("which"), nb::arg("stream"),
           nb::arg("after"), nb::arg("sms") = 0, nb::arg("counting") = nb::none())
      .def("operands", &RowCalls::operands, nb::arg("idx").none(), nb::arg("out").none(),
           nb::arg("stream").none());
}
