#include "cuda/order.h"

#include <algorithm>

namespace fw::native::cuda {

namespace {

// With more marks those that are over are forgotten, and a stream's others made one.
constexpr size_t kMarksKept = 16;

bool same_work(const Order::Access& one, const Order::Access& other) {
  return one.stream == other.stream && one.capture == other.capture;
}

}  // namespace

// Replays of graphs are the caller's to order: only within a capture its own marks count.
bool Order::precedes(const Mark& mark, const Access& access) {
  const Access& made = mark.access;
  if (made.capture != 0 && made.capture != access.capture) return false;
  return (access.stores || made.stores) && !same_work(made, access) &&
         made.lines.begin < access.lines.end && access.lines.begin < made.lines.end;
}

// Whether whoever waits for the access waits for the mark, too.
bool Order::replaces(const Access& access, const Mark& mark) {
  const Access& made = mark.access;
  const bool waited =
      access.stores && mark.number <= access.behind && made.capture == access.capture;
  return (waited || (same_work(made, access) && made.stores == access.stores)) &&
         access.lines.begin <= made.lines.begin && made.lines.end <= access.lines.end;
}

void Order::forget(size_t k) {
  free_.push_back(marks_[k].access.event);
  marks_.erase(marks_.begin() + std::ptrdiff_t(k));
}

Result Order::take_event(Handle& event) {
  if (free_.empty()) return context_.create_event(event);
  event = free_.back();
  free_.pop_back();
  return kSuccess;
}

Result Order::begin(Handle stream, bool stores, Lines lines, Access& access, bool in_none) {
  access.stores = stores;
  access.lines = lines;
  return context_.within([&] {
    const Result result = in_none ? kSuccess : look_at_capture(stream, access);
    return result == kSuccess ? begin_now(stream, access) : result;
  });
}

Result Order::look_at_capture(Handle stream, Access& access) {
  const Capture capture = context_.capture(stream);
  access.capture = capture.active ? capture.id : 0;
  return capture.result;
}

Result Order::begin_now(Handle stream, Access& access) {
  // The driver tells no number of a stream in a capture, which keeps its handle until it ends.
  access.stream = uint64_t(reinterpret_cast<uintptr_t>(stream));
  Result result = access.capture != 0 ? kSuccess : context_.number(stream, access.stream);
  if (result != kSuccess) return result;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t k = marks_.size(); k-- > 0;) {
    if (marks_[k].access.capture != 0 || !precedes(marks_[k], access)) continue;
    result = context_.event_done(marks_[k].access.event);
    if (result == kSuccess) {
      forget(k);
    } else if (result != kNotReady) {
      return result;
    } else if (access.capture != 0) {
      return kCaptured;
    }
  }
  for (const Mark& mark : marks_) {
    if (!precedes(mark, access)) continue;
    result = context_.wait_event(stream, mark.access.event);
    if (result != kSuccess) return result;
  }
  access.behind = last_;
  return take_event(access.event);
}

Result Order::end(Handle stream, const Access& access) {
  return context_.within([&] { return end_now(stream, access); });
}

Result Order::end_now(Handle stream, const Access& access) {
  const Result result = context_.record(access.event, stream);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (result != kSuccess) {
    free_.push_back(access.event);
    return result;
  }
  for (size_t k = marks_.size(); k-- > 0;) {
    if (replaces(access, marks_[k])) forget(k);
  }
  marks_.push_back({++last_, access});
  if (marks_.size() > kMarksKept) make_room();
  return kSuccess;
}

void Order::make_room() {
  const Access newest = marks_.back().access;
  for (size_t k = marks_.size() - 1; k-- > 0;) {
    const Access& made = marks_[k].access;
    // What was captured elsewhere has most likely ended: a capture takes no turns with others.
    const bool over = made.capture != 0 ? made.capture != newest.capture
                                        : context_.event_done(made.event) == kSuccess;
    if (over) forget(k);
  }
  for (size_t k = marks_.size() - 1; marks_.size() > kMarksKept && k-- > 0;) {
    const Access made = marks_[k].access;
    if (!same_work(made, newest) || made.stores != newest.stores) continue;
    Lines& lines = marks_.back().access.lines;
    lines = {std::min(lines.begin, made.lines.begin), std::max(lines.end, made.lines.end)};
    forget(k);
  }
}

Result Order::done() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Result left = kSuccess;
  for (size_t k = marks_.size(); k-- > 0;) {
    if (marks_[k].access.capture != 0) continue;
    const Result result = context_.event_done(marks_[k].access.event);
    if (result == kSuccess) {
      forget(k);
    } else if (left == kSuccess || left == kNotReady) {
      left = result;
    }
  }
  return left;
}

void Order::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Mark& mark : marks_) free_.push_back(mark.access.event);
  marks_.clear();
  for (const Handle event : free_) context_.destroy_event(event);
  free_.clear();
}

}  // namespace fw::native::cuda
