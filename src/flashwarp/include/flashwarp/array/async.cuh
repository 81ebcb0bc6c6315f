// Transfers that a thread starts now and waits for later: between storage and the cache's lines,
// and between an array and memory of the thread's own.
//
//   fw::token t = data.read_async(i, n, buffer);   // commands are on their way
//   compute();
//   t.wait();                                      // `buffer` holds the elements
//
// A token is a value of 64 bytes: a thread may hold any number of them, drop them, wait twice,
// or end without waiting, and nothing is held meanwhile, no lock, pin, buffer or slot.
// What a token stands for in the array is only lines on their way; whoever drains their
// completions puts them into the cache. `wait` moves the elements between there and the buffer, so
// it is the thread's own until then, and a read returns what a load at the time of `wait` would.
// What bounds the commands in flight is the entries of the array's queue pairs (`queue_pairs` times
// `depth` of its controller): a thread that finds them taken drains completions until some are
// free, so threads that start more before they wait for any cannot stop each other.
//
// Lanes that call together share the work. Every wait has the time limit of the array's queues.
#pragma once

#include "flashwarp/array/span.cuh"

namespace fw {

// Status of a token whose transfer is not over. Vendor specific, never on the wire.
inline constexpr uint32_t kPending = 0x7FE;

namespace detail {

enum class task : uint32_t { kNone, kFetch, kRead, kWrite, kWriteBack };

// Makes a line resident and does nothing with it.
struct touch_line {
  static constexpr bool kStores = false;
  FW_DEVICE void visit(uint32_t, uint32_t, uint64_t) {}
};

// Starts the fills of each lane's lines.
FW_DEVICE_NOINLINE void fetch_span(cache::line_cache* c, cache::volume* v, const span& s,
                                   lines which) {
  const uint32_t mask = active_on(v);
  cache::tally count;
  for (walk at(c->geometry, s); warp::any(mask, at.more()); at.line += at.stride) {
    const bool wants = at.more() && is_meant(*c, *v, s, at.line, which);
    cache::prefetch<policy>(*c, *v, mask, wants, v->line_begin + at.line, count);
  }
  count.add_kernel_to(*v, mask);
  warp::sync(mask);
}

// Waits until each lane's lines have been resident. Returns the lane's first failure.
FW_DEVICE_NOINLINE uint32_t touch_span(cache::line_cache* c, cache::volume* v, const span& s) {
  const uint32_t mask = active_on(v);
  cache::tally count;
  uint32_t status = 0;
  for (walk at(c->geometry, s); warp::any(mask, at.more()); at.line += at.stride) {
    touch_line op;
    const uint32_t got = cache::access<policy>(c->geometry, *c, *v, mask, at.more(),
                                               v->line_begin + at.line, false, op, count);
    if (at.more() && status == nvme::kSuccess) status = got;
  }
  count.add_kernel_to(*v, mask);
  warp::sync(mask);
  return status;
}

// Moves the lines of each lane's span that `which` means.
template <bool kToFrame>
FW_DEVICE_NOINLINE uint32_t move_part(cache::line_cache* c, cache::volume* v, const span& s,
                                      lines which) {
  return move_span<kToFrame>(c, v, active_on(v), s, which);
}

// Starts write-backs of each lane's dirty lines.
FW_DEVICE_NOINLINE void clean_span(cache::line_cache* c, cache::volume* v, const span& s) {
  const uint32_t mask = active_on(v);
  for (walk at(c->geometry, s); warp::any(mask, at.more()); at.line += at.stride) {
    const uint64_t line = v->line_begin + at.line;
    cache::place where = {0, 0, false};
    if (at.more()) where = cache::probe(c->geometry, line);
    const bool taken = where.found && cache::begin_write(&c->geometry.tags[where.way], line);
    const uint32_t members = warp::ballot(mask, taken);
    if (members != 0) cache::write_back(*c, *v, mask, members, {line, where.way}, true);
  }
  warp::sync(mask);
}

// Waits until no line of each lane's span is dirty or being written. Returns its first failure.
FW_DEVICE_NOINLINE uint32_t wait_clean(cache::line_cache* c, cache::volume* v, const span& s) {
  const uint32_t mask = active_on(v);
  uint32_t step = 0;
  uint32_t status = 0;
  for (walk at(c->geometry, s); warp::any(mask, at.more()); at.line += at.stride) {
    nvme::deadline limit(v->queues[0].data);
    const uint64_t line = v->line_begin + at.line;
    bool pending = at.more();
    while (warp::any(mask, pending)) {
      cache::place where = {0, 0, false};
      if (pending) where = cache::probe(c->geometry, line);
      const bool in_flight = where.found && (where.word & cache::tag::kWriting) != 0;
      // Stored to since, or a write-back that failed: once more, and then it is over either way.
      const bool taken = where.found && !in_flight && (where.word & cache::tag::kDirty) != 0 &&
                         cache::begin_write(&c->geometry.tags[where.way], line);
      const uint32_t members = warp::ballot(mask, taken);
      if (members != 0) {
        const uint32_t got = cache::write_back(*c, *v, mask, members, {line, where.way}, false);
        if (taken && status == nvme::kSuccess) status = got;
      }
      pending = pending && in_flight;
      if (!warp::any(mask, pending) || members != 0) continue;
      if (warp::any(mask, limit.passed() || cache::has_failed(*v))) {
        if (pending) cache::record_error(*v, nvme::kTimedOut, nvme::kWrite, line);
        if (pending) status = nvme::kTimedOut;
        pending = false;
        break;
      }
      base::opaque (&cache::help_any)(*c, *v, mask, step++);
    }
  }
  warp::sync(mask);
  return status;
}

// Whether each lane's lines are where its token wants them. Helps once, `step` times so far.
FW_DEVICE_NOINLINE bool has_arrived(cache::line_cache* c, cache::volume* v, const span& s,
                                    task what, uint32_t step) {
  const uint32_t mask = active_on(v);
  help_any(*c, *v, mask, step);
  const lines which = what == task::kWrite ? lines::kPartial : lines::kAll;
  bool there = true;
  for (walk at(c->geometry, s); at.more() && there; at.line += at.stride) {
    if (!is_meant(*c, *v, s, at.line, which)) continue;
    const cache::place where = cache::probe(c->geometry, v->line_begin + at.line);
    const bool clean = (where.word & (cache::tag::kWriting | cache::tag::kDirty)) == 0;
    there = what == task::kWriteBack ? !where.found || clean : where.found;
  }
  warp::sync(mask);
  return there;
}

}  // namespace detail

// A transfer on its way. Copies of a token stand for the same transfer, each with its own status.
class token {
 public:
  // Of a transfer of nothing: done, with success.
  token() = default;

  // Whether `wait` would return at once; does not wait for data. A transfer that fails again and
  // again is over too: its status tells.
  FW_DEVICE bool done() {
    detail::call_for(warp::active(), status_ == kPending, [&] { look(); });
    return status_ != kPending;
  }

  // Blocks until the transfer is over, draining completions meanwhile. Returns the NVMe status:
  // kSuccess, or the first failure, which the host raises after the launch too. May be called
  // again.
  FW_DEVICE uint32_t wait() {
    detail::call_for(warp::active(), status_ == kPending, [&] { status_ = finish(); });
    return status_;
  }

  // The status now, without looking: kPending until `done` or `wait` has seen the end.
  FW_DEVICE uint32_t status() const { return status_; }

  template <typename T>
  FW_DEVICE static token start(const array<T>& a, detail::task what, const detail::span& s) {
    token t;
    t.cache_ = a.cache;
    t.volume_ = a.volume;
    t.span_ = s;
    t.task_ = what;
    t.status_ = kPending;
    t.ask();
    // Lines that are covered need no reading: their elements are in the cache from now on.
    if (what == detail::task::kWrite) {
      t.early_ =
          base::opaque(&detail::move_part<true>)(t.cache_, t.volume_, s, detail::lines::kWhole);
    }
    return t;
  }

  template <typename T>
  FW_DEVICE static token refused(const array<T>&) {
    token t;
    t.status_ = nvme::kLbaOutOfRange;
    return t;
  }

 private:
  // A fill that was skipped for want of a frame is asked for again at each 64th look; one that does
  // not come after 64 of these is waited for.
  static constexpr uint32_t kPollsPerAsk = 64;
  static constexpr uint32_t kAsksMax = 64 * kPollsPerAsk;

  FW_DEVICE void ask() {
    if (task_ == detail::task::kWriteBack) {
      base::opaque (&detail::clean_span)(cache_, volume_, span_);
    } else {
      const bool writes = task_ == detail::task::kWrite;
      base::opaque (&detail::fetch_span)(cache_, volume_, span_,
                                         writes ? detail::lines::kPartial : detail::lines::kAll);
    }
  }

  FW_DEVICE void look() {
    const bool arrived =
        base::opaque(&detail::has_arrived)(cache_, volume_, span_, task_, asked_) ||
        asked_ >= kAsksMax;
    if (arrived) {
      status_ = finish();
    } else {
      asked_++;
      if (asked_ % kPollsPerAsk == 0) ask();
    }
  }

  FW_DEVICE uint32_t finish() {
    switch (task_) {
      case detail::task::kNone:
        return nvme::kSuccess;
      case detail::task::kFetch:
        return base::opaque(&detail::touch_span)(cache_, volume_, span_);
      case detail::task::kRead:
        return base::opaque(&detail::move_part<false>)(cache_, volume_, span_, detail::lines::kAll);
      case detail::task::kWrite: {
        const uint32_t got =
            base::opaque(&detail::move_part<true>)(cache_, volume_, span_, detail::lines::kPartial);
        return early_ != nvme::kSuccess ? early_ : got;
      }
      case detail::task::kWriteBack:
        return base::opaque(&detail::wait_clean)(cache_, volume_, span_);
    }
    return nvme::kSuccess;
  }

  cache::line_cache* cache_ = nullptr;
  cache::volume* volume_ = nullptr;
  detail::span span_ = {0, 0, 0};
  detail::task task_ = detail::task::kNone;
  uint32_t status_ = nvme::kSuccess;
  uint32_t early_ = nvme::kSuccess;  // of the whole lines of a write
  uint32_t asked_ = 0;
};

static_assert(sizeof(token) == 64);

// Starts bringing in the lines of the elements i .. i + n - 1. What lies past the end is left out.
// `wait` returns when each of them has been in the cache.
template <typename T>
FW_DEVICE token array<T, 1>::prefetch(uint64_t i, uint64_t n) const {
  if (i >= length) return {};
  return token::start(*this, detail::task::kFetch,
                      span_of(i, n < length - i ? n : length - i, nullptr));
}

// Starts copying the elements i .. i + n - 1 to `to`.
template <typename T>
FW_DEVICE token array<T, 1>::read_async(uint64_t i, uint64_t n, value_type* to) const {
  if (!holds(i, n)) return token::refused(*this);
  return token::start(*this, detail::task::kRead, span_of(i, n, to));
}

// Starts storing `from` to the elements i .. i + n - 1. Lines that are covered take their elements
// at once and are not read; the others when they have come.
template <typename T>
FW_DEVICE token array<T, 1>::write_async(uint64_t i, uint64_t n, const value_type* from) const {
  static_assert(!kReadOnly, "fw::array<const T> is read-only: take an fw::array<T>");
  if (!holds(i, n)) return token::refused(*this);
  return token::start(*this, detail::task::kWrite, span_of(i, n, from));
}

// Starts writing the lines of the elements i .. i + n - 1 to the storage, where they are dirty.
// `wait` returns when they are written; the host's `flush` makes them durable.
template <typename T>
FW_DEVICE token array<T, 1>::write_back(uint64_t i, uint64_t n) const {
  static_assert(!kReadOnly, "fw::array<const T> is read-only: take an fw::array<T>");
  if (!holds(i, n)) return token::refused(*this);
  return token::start(*this, detail::task::kWriteBack, span_of(i, n, nullptr));
}

namespace warp {

// As the methods, by all lanes that are active together, with the same arguments; so is `wait`.
template <typename T>
FW_DEVICE token read_async(const array<T>& a, uint64_t i, uint64_t n,
                           typename array<T>::value_type* to) {
  if (!a.holds(i, n)) return token::refused(a);
  return token::start(a, detail::task::kRead, detail::dealt(a.volume, a.span_of(i, n, to), 0, 1));
}
template <typename T>
FW_DEVICE token write_async(const array<T>& a, uint64_t i, uint64_t n,
                            const typename array<T>::value_type* from) {
  static_assert(!array<T>::kReadOnly, "fw::array<const T> is read-only: take an fw::array<T>");
  if (!a.holds(i, n)) return token::refused(a);
  return token::start(a, detail::task::kWrite,
                      detail::dealt(a.volume, a.span_of(i, n, from), 0, 1));
}

}  // namespace warp

}  // namespace fw
