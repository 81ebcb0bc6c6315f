// Transfers that a thread starts now and waits for later: between storage and the cache, and
// between an array and the thread's buffer.
//
//   fw::token t = data.read_async(i, n, buffer);   // commands are on their way
//   compute();
//   t.wait();                                      // `buffer` holds the elements
//
// A token is a value of 64 bytes. A thread may hold any number of tokens, drop them, wait twice, or
// end without waiting: a token holds no lock, pin, buffer or slot. Starting a transfer starts fills
// of lines, and the warps that drain their completions put the lines into the cache. `wait` copies
// between the cache and the buffer. So the buffer is unused until then, and a read returns what a
// load at the time of `wait` would.
//
// If the device reads the storage itself ("in_place"), there is nothing to wait for: some warp has
// to copy the lines, so the one that starts the transfer does, and the token is over at once.
//
// The entries of the array's queue pairs (`queue_pairs` times `depth` of its controller) bound the
// commands in flight. A thread that finds no free entry drains completions until one is free, so
// threads that start many transfers before they wait cannot block each other.
//
// Lanes that call together share the work. Every wait has the time limit of the array's queues.
#pragma once

#include "flashwarp/array/span.cuh"

namespace fw {

// Status of a token whose transfer is not over. Vendor specific, never on the wire.
inline constexpr uint32_t kPending = 0x7FE;

namespace detail {

enum class task : uint32_t { kNone, kFetch, kRead, kWrite, kWriteBack };

// An operation without effect: the access only makes the line resident.
struct touch_line {
  static constexpr bool kStores = false;
  FW_DEVICE void visit(lanes, lanes, uint64_t) {}
};

// Starts the fills of each lane's lines.
FW_DEVICE_NOINLINE void fetch_span(cache::line_cache* c, cache::volume* v, const span& s,
                                   lines which) {
  const lanes here = active_on(v);
  cache::tally count;
  for (walk at(c->geometry, s); here.any(at.more()); at.line += at.stride) {
    const bool wants = at.more() && is_meant(*c, *v, s, at.line, which);
    cache::prefetch<policy>(*c, *v, here, wants, v->line_begin + at.line, count);
  }
  count.add_kernel_to(*v, here);
  here.sync();
}

// Waits until each lane's lines have been resident. Returns the lane's first failure.
FW_DEVICE_NOINLINE uint32_t touch_span(cache::line_cache* c, cache::volume* v, const span& s) {
  const lanes here = active_on(v);
  cache::tally count;
  uint32_t status = 0;
  for (walk at(c->geometry, s); here.any(at.more()); at.line += at.stride) {
    touch_line op;
    const uint32_t got = cache::access<policy>({c->geometry, *c, *v, here},
                                               {v->line_begin + at.line, at.more()}, op, count);
    if (at.more() && status == nvme::kSuccess) status = got;
  }
  count.add_kernel_to(*v, here);
  here.sync();
  return status;
}

// Moves those lines of each lane's span that are in `which`.
template <bool kToFrame>
FW_DEVICE_NOINLINE uint32_t move_part(cache::line_cache* c, cache::volume* v, const span& s,
                                      lines which) {
  return move_span<kToFrame>(c, v, active_on(v), s, which);
}

// Starts write-backs of the dirty lines in each lane's span.
FW_DEVICE void clean_span(cache::line_cache* c, cache::volume* v, lanes here, const span& s) {
  if (base::kAsksOwner && c->owner != nullptr) return;
  for (walk at(c->geometry, s); here.any(at.more()); at.line += at.stride) {
    const uint64_t line = v->line_begin + at.line;
    cache::place where = {0, 0, false};
    if (at.more()) where = cache::probe(c->geometry, line);
    const bool taken = where.found && cache::begin_write(&c->geometry.tags[where.way], line);
    const lanes members = here.ballot(taken);
    if (members) cache::write_back(*c, *v, here, members, {line, where.way}, true);
  }
  here.sync();
}

// Waits until no line of each lane's span is dirty or WRITING. Returns the lane's first failure.
FW_DEVICE uint32_t wait_clean(cache::line_cache* c, cache::volume* v, lanes here, const span& s) {
  if (base::kAsksOwner && c->owner != nullptr) {
    // The lines are the owner's, who writes them back.
    cache::record_error(*v, cache::kOwnersAlone, nvme::kWrite, v->line_begin);
    return cache::kOwnersAlone;
  }
  uint32_t step = 0;
  uint32_t status = 0;
  for (walk at(c->geometry, s); here.any(at.more()); at.line += at.stride) {
    nvme::deadline limit(v->queues[0].data);
    const uint64_t line = v->line_begin + at.line;
    bool pending = at.more();
    while (here.any(pending)) {
      cache::place where = {0, 0, false};
      if (pending) where = cache::probe(c->geometry, line);
      const bool in_flight = where.found && (where.word & cache::tag::kWriting) != 0;
      // Dirty again: a store came later, or the write-back failed. Write it back once more, and
      // wait no longer whatever comes of it.
      const bool dirty = where.found && !in_flight && (where.word & cache::tag::kDirty) != 0;
      const bool taken = dirty && cache::begin_write(&c->geometry.tags[where.way], line);
      const lanes members = here.ballot(taken);
      if (members) {
        const uint32_t got = cache::write_back(*c, *v, here, members, {line, where.way}, false);
        if (taken && status == nvme::kSuccess) status = got;
      }
      // If another warp began to write the line back since the look, wait for that.
      pending = pending && (in_flight || (dirty && !taken));
      if (!here.any(pending) || members) continue;
      if (here.any(limit.passed() || cache::has_failed(*v))) {
        if (pending) cache::record_error(*v, nvme::kTimedOut, nvme::kWrite, line);
        if (pending) status = nvme::kTimedOut;
        pending = false;
        break;
      }
      base::opaque (&cache::help_any)(*c, *v, here, step++);
    }
  }
  here.sync();
  return status;
}

// Both, for lanes that call together as they come.
FW_DEVICE_NOINLINE void clean_own(cache::line_cache* c, cache::volume* v, const span& s) {
  clean_span(c, v, active_on(v), s);
}
FW_DEVICE_NOINLINE uint32_t wait_own(cache::line_cache* c, cache::volume* v, const span& s) {
  return wait_clean(c, v, active_on(v), s);
}

// Whether the lane's lines are in the cache or, for a write-back, clean.
FW_DEVICE bool is_there(const cache::line_cache* c, const cache::volume* v, const span& s,
                        task what) {
  const lines which = what == task::kWrite ? lines::kPartial : lines::kAll;
  bool there = true;
  for (walk at(c->geometry, s); at.more() && there; at.line += at.stride) {
    if (!is_meant(*c, *v, s, at.line, which)) continue;
    const cache::place where = cache::probe(c->geometry, v->line_begin + at.line);
    const bool clean = (where.word & (cache::tag::kWriting | cache::tag::kDirty)) == 0;
    there = what == task::kWriteBack ? !where.found || clean : where.found;
  }
  return there;
}

// As `is_there`, and does one step of helping before a lane hears no; `step` numbers the steps.
FW_DEVICE_NOINLINE bool has_arrived(cache::line_cache* c, cache::volume* v, const span& s,
                                    task what, uint32_t step) {
  const lanes here = active_on(v);
  bool there = is_there(c, v, s, what);
  if (here.any(!there)) {
    help_any(*c, *v, here, step);
    there = there || is_there(c, v, s, what);
  }
  here.sync();
  return there;
}

}  // namespace detail

// A transfer that has started. Copies of a token are of the same transfer, each with its own
// status.
class token {
 public:
  // A token of no transfer: done, with success.
  token() = default;

  // Whether the transfer is over; then `status` has its result. Waits for I/O only if a line was
  // evicted since it came, or has not come after very many calls.
  FW_DEVICE bool done() {
    detail::call_for(warp::active(), status_ == kPending, [&] { look(); });
    return status_ != kPending;
  }

  // Waits until the transfer is over, and drains completions meanwhile. Returns the NVMe status:
  // kSuccess, or the first failure, which the host also raises after the launch. May be called
  // again.
  FW_DEVICE uint32_t wait() {
    detail::call_for(warp::active(), status_ == kPending, [&] { status_ = finish(); });
    return status_;
  }

  // The status that `done` or `wait` has seen last: kPending until one of them saw the end.
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
    // Lines that are overwritten whole need no reading: store their elements now.
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
  // A fill is skipped if no frame is free. Each 64th look asks for the lines again, and after 64
  // such requests `look` waits for them.
  static constexpr uint32_t kPollsPerAsk = 64;
  static constexpr uint32_t kAsksMax = 64 * kPollsPerAsk;

  FW_DEVICE void ask() {
    if (task_ == detail::task::kWriteBack) {
      base::opaque (&detail::clean_own)(cache_, volume_, span_);
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
        return base::opaque(&detail::wait_own)(cache_, volume_, span_);
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

namespace detail {
FW_DEVICE_NOINLINE void refresh(cache::line_cache* c, cache::volume* v) {
  cache::refresh(*c, *v, active_on(v));
}
}  // namespace detail

// Drops lines that were cached before another program was let to write the array's file. Costs a
// look at one word until that happens for the first time, and nothing for arrays without a lease.
// The library's kernels do this as they begin. Yours may: call it in every thread, before the first
// access, if a CUDA graph replays the kernel; or now and then, if the kernel runs for long.
template <typename T>
FW_DEVICE void refresh(const array<T>& a) {
  const bool needed = cache::epoch_of(*a.volume) != 0;
  detail::call_for(warp::active(), needed,
                   [&] { base::opaque (&detail::refresh)(a.cache, a.volume); });
}

// Starts the fills of the lines of the elements i .. i + n - 1, as far as these exist. `wait`
// returns when each line has been in the cache.
template <typename T>
FW_DEVICE token array<T, 1>::prefetch(uint64_t i, uint64_t n) const {
  if (i >= length) return {};
  return token::start(*this, detail::task::kFetch,
                      span_of(i, n < length - i ? n : length - i, nullptr));
}

// Starts to copy the elements i .. i + n - 1 to `to`.
template <typename T>
FW_DEVICE token array<T, 1>::read_async(uint64_t i, uint64_t n, value_type* to) const {
  if (!holds(i, n)) return token::refused(*this);
  return token::start(*this, detail::task::kRead, span_of(i, n, to));
}

// Starts to store `from` to the elements i .. i + n - 1. Lines that it overwrites whole are stored
// now and not read; the rest is stored by `wait`.
template <typename T>
FW_DEVICE token array<T, 1>::write_async(uint64_t i, uint64_t n, const value_type* from) const {
  static_assert(!kReadOnly, "fw::array<const T> is read-only: take an fw::array<T>");
  if (!holds(i, n)) return token::refused(*this);
  return token::start(*this, detail::task::kWrite, span_of(i, n, from));
}

// Starts to write back the dirty lines of the elements i .. i + n - 1. `wait` returns when they are
// written. The host's `flush` makes them durable.
template <typename T>
FW_DEVICE token array<T, 1>::write_back(uint64_t i, uint64_t n) const {
  static_assert(!kReadOnly, "fw::array<const T> is read-only: take an fw::array<T>");
  if (!holds(i, n)) return token::refused(*this);
  return token::start(*this, detail::task::kWriteBack, span_of(i, n, nullptr));
}

namespace warp {

// As the methods. All lanes that are active together call with the same arguments, and wait
// together.
template <typename T>
FW_DEVICE token read_async(const array<T>& a, uint64_t i, uint64_t n,
                           typename array<T>::value_type* to) {
  if (!a.holds(i, n)) return token::refused(a);
  return token::start(a, detail::task::kRead,
                      detail::dealt(detail::active_on(a.volume), a.span_of(i, n, to), 0, 1));
}
template <typename T>
FW_DEVICE token write_async(const array<T>& a, uint64_t i, uint64_t n,
                            const typename array<T>::value_type* from) {
  static_assert(!array<T>::kReadOnly, "fw::array<const T> is read-only: take an fw::array<T>");
  if (!a.holds(i, n)) return token::refused(a);
  return token::start(a, detail::task::kWrite,
                      detail::dealt(detail::active_on(a.volume), a.span_of(i, n, from), 0, 1));
}

}  // namespace warp

}  // namespace fw
