// fw::shared<T>: an array whose lines threads keep in their own buffers, coherently.
//
//   fw::shared<float> s(data, table);
//   if (s.acquire(i, buffer) == fw::nvme::kSuccess) {   // `buffer`: one line, this thread's
//     s.store(i, s.load(j) + 1);                        // i and j are on that line: in the buffer
//     s.release();
//   }
//
// The first thread that acquires a line owns its copy: the thread's buffer is filled and stands for
// the line. Threads that acquire the line later use the owner's buffer, and not their own. When the
// owner releases, it waits until the other users have released. If any thread stored to the buffer,
// the owner writes it back to the cache, whole, so the line is not read first.
//
// Accesses through views of one table are coherent with each other, whether or not their thread has
// acquired the line: `load` and `store` look in the table first, then in the cache. Plain accesses
// to the array see a copy's stores after the owner's `release` has returned. A plain store to a
// line with a copy is not seen there, and is lost if the copy is written back. To read the newest
// bytes meanwhile, construct a view and load through it.
//
// A view belongs to one thread and holds at most one line. A thread may have any number of views,
// and lanes may call in divergent code. To acquire a line, or to access a line that it does not
// hold, a thread may have to wait until an owner has released it. To avoid deadlock, a thread does
// so while it holds no other line, or all threads take lines in ascending order. `try_acquire` does
// not wait. A thread with several views releases those that are not owners first. Every wait drains
// completions and has the time limit of the array.
//
// If FW_SHARE_TABLE is 0 or kOn is false, the same source compiles to plain accesses.
#pragma once

#include "flashwarp/array/view.cuh"
#include "flashwarp/cache/share_table.cuh"

#if !defined(FW_SHARE_TABLE)
#define FW_SHARE_TABLE 1
#endif

namespace fw {

using share_table = cache::share_table;

// Statuses of shared<T>, besides those of NVMe. Vendor specific, never on the wire.
inline constexpr uint32_t kShareLater = 0x7FD;        // try_*: it would have to wait; try again
inline constexpr uint32_t kShareFull = 0x7FC;         // every entry of the table is taken
inline constexpr uint32_t kShareMisaligned = 0x7FB;   // the buffer is not at kShareAlignment
inline constexpr uint32_t kShareUnreachable = 0x7FA;  // the buffer is on the thread's stack
inline constexpr uint32_t kShareTimedOut = 0x7F9;     // other users did not release in time

// How often a thread looks at a closing copy before it joins the copy's users all the same. This
// takes about as long as a transfer, and longer than users are likely to need.
inline constexpr uint32_t kSharePatience = 64;

// The alignment of buffers in bytes: a lane copies this much at a time.
inline constexpr uint32_t kShareAlignment = 16;

namespace detail {

// A line that a view holds.
struct held_line {
  uint64_t line;    // global
  uint64_t buffer;  // the owner's
  uint32_t entry;   // of the table; kShareNowhere: nothing is held
  bool owner;
  bool stored;  // this view has stored to the line
};

// The active lanes that use the same array and table.
FW_DEVICE lanes active_on(const cache::volume* v, const cache::share_table& t) {
  return active_on(v).match(reinterpret_cast<uint64_t>(t.words));
}

// Joins the copy of `line` for `count` lanes, or claims its entry for a copy at `buffer`.
FW_DEVICE cache::share_outcome join_or_claim(const cache::share_table& t, uint64_t line,
                                             uint64_t buffer, uint32_t count, bool patient) {
  using cache::share_result;
  const cache::share_place at = cache::share_find(t, line);
  if (at.entry == cache::kShareNowhere) {
    const cache::share_outcome out = cache::share_claim(t, line);
    if (out.result == share_result::kClaimed) {
      atomic::store_plain(&t.copies[out.entry], {buffer, base::scope_of(buffer), 0});
    }
    return out;
  }
  if (!cache::share_join(t, at.entry, line, count, patient)) {
    return {share_result::kWait, at.entry};
  }
  const uint32_t scope = atomic::load_plain(&t.copies[at.entry]).scope;
  if (scope == 0 || scope == base::own_scope()) return {share_result::kJoined, at.entry};
  // In another block's shared memory: wait until that block has released it.
  cache::share_drop(t, at.entry, count, false);
  return {share_result::kWait, at.entry};
}

// Tries once to acquire each lane's line. Never waits for other users, but fills what it claims.
// Lanes that want the same line claim it once. Returns kShareLater if the lane has to try again.
FW_DEVICE_NOINLINE uint32_t try_acquire_line(cache::share_table t, cache::line_cache* c,
                                             cache::volume* v, uint64_t line, uint64_t buffer,
                                             bool patient, held_line& held) {
  using cache::share_result;
  const lanes here = active_on(v, t);
  const lanes group = here.match(line);
  const uint32_t leader = group.leader();
  const bool leads = group.leads();
  cache::share_outcome mine = {share_result::kWait, cache::kShareNowhere};
  if (leads) mine = join_or_claim(t, line, buffer, group.count(), patient);
  const bool claimed = mine.result == share_result::kClaimed;
  uint32_t status = 0;
  if (here.any(claimed)) {
    copy_piece<false> op = {0, claimed ? cache::bytes_of_line(*c, *v, line) : 0, buffer};
    cache::tally count;
    status = cache::access<policy>({c->geometry, *c, *v, here}, {line, claimed}, op, count);
    count.add_kernel_to(*v, here);
    if (claimed && status == nvme::kSuccess) {
      cache::share_open(t, mine.entry, line, group.count() - 1, base::scope_of(buffer) != 0);
    } else if (claimed) {
      // Threads that wait for the line then try to fill it, and get the error too.
      cache::share_end(t, mine.entry, line);
    }
  }
  if (leads && mine.result == share_result::kWait) status = kShareLater;
  if (leads && mine.result == share_result::kFull) status = kShareFull;
  uint64_t copy = 0;
  if (leads && status == nvme::kSuccess) copy = atomic::load_plain(&t.copies[mine.entry]).buffer;
  // The leader has acquired the copy for its group.
  here.sync();
  status = here.take(status, leader);
  copy = here.take(copy, leader);
  const uint32_t entry = here.take(mine.entry, leader);
  if (status == nvme::kSuccess) held = {line, copy, entry, leads && claimed, false};
  return status;
}

// Tries once to release each lane's line. Returns kShareLater to an owner whose copy has users.
// Writes a modified copy to the cache if the owner wants to `keep` it.
FW_DEVICE_NOINLINE uint32_t try_release_line(cache::share_table t, cache::line_cache* c,
                                             cache::volume* v, held_line held, bool keep) {
  const lanes here = active_on(v, t);
  // The loads and stores of all lanes come before the release by one lane for all.
  here.sync();
  const lanes users = here.ballot(!held.owner);
  const lanes stored = here.ballot(held.stored);
  if (!held.owner) {
    const lanes group = users.match(held.entry);
    if (group.leads()) {
      cache::share_drop(t, held.entry, group.count(), bool(stored & group));
    }
  }
  const uint64_t word = held.owner ? cache::share_close(t, held.entry) : 0;
  const bool alone = held.owner && cache::share::references(word) == 0;
  const bool modified = (word & cache::share::kModified) != 0 || held.stored;
  const bool writes = alone && modified && keep;
  uint32_t status = 0;
  if (here.any(writes)) {
    copy_piece<true> op = {0, writes ? cache::bytes_of_line(*c, *v, held.line) : 0, held.buffer};
    cache::tally count;
    status =
        cache::access<policy>({c->geometry, *c, *v, here}, {held.line, writes, writes}, op, count);
    count.add_kernel_to(*v, here);
  }
  if (!held.owner) return nvme::kSuccess;
  if (!alone) return kShareLater;
  if (status == nvme::kSuccess) {
    cache::share_end(t, held.entry, held.line);
  } else {
    // Only this buffer has the newest bytes: it stays the copy.
    cache::share_reopen(t, held.entry, true);
  }
  return status;
}

// Tries once to load from a copy that the lane has found but does not hold.
template <uint32_t kBytes>
FW_DEVICE_NOINLINE uint32_t try_load_copy(cache::share_table t, uint32_t entry, uint64_t line,
                                          uint64_t offset, bool patient,
                                          typename atomic::raw<kBytes>::type& value) {
  if (!cache::share_join(t, entry, line, 1, patient)) return kShareLater;
  const cache::share_copy copy = atomic::load_plain(&t.copies[entry]);
  const bool reachable = copy.scope == 0 || copy.scope == base::own_scope();
  if (reachable) {
    value = atomic::raw<kBytes>::load_any(reinterpret_cast<const char*>(copy.buffer) + offset);
  }
  cache::share_drop(t, entry, 1, false);
  return reachable ? uint32_t(nvme::kSuccess) : kShareLater;
}

// Tries once to store to a line that the lane does not hold: to its copy, or to the cache while an
// entry keeps other threads from making a copy.
template <uint32_t kBytes>
FW_DEVICE_NOINLINE uint32_t try_store_copy(cache::share_table t, cache::line_cache* c,
                                           cache::volume* v, uint64_t line, bool patient,
                                           const store_element<kBytes>& element) {
  using cache::share_result;
  const lanes here = active_on(v, t);
  const cache::share_outcome mine = join_or_claim(t, line, 0, 1, patient);
  if (mine.result == share_result::kJoined) {
    char* copy = reinterpret_cast<char*>(atomic::load_plain(&t.copies[mine.entry]).buffer);
    atomic::raw<kBytes>::store_any(copy + element.offset, element.value);
    cache::share_drop(t, mine.entry, 1, true);
  }
  const bool claimed = mine.result == share_result::kClaimed;
  uint32_t status = mine.result == share_result::kJoined ? uint32_t(nvme::kSuccess) : kShareLater;
  if (here.any(claimed)) {
    store_element<kBytes> op = element;
    cache::tally count;
    const uint32_t got =
        cache::access<policy>({c->geometry, *c, *v, here}, {line, claimed}, op, count);
    count.add_kernel_to(*v, here);
    if (claimed) {
      status = got;
      cache::share_end(t, mine.entry, line);
    }
  }
  return status;
}

// Does one step of a wait for other users of a table.
FW_DEVICE_NOINLINE void help_share(cache::line_cache* c, cache::volume* v, uint32_t step) {
  cache::help_any(*c, *v, active_on(v), step);
}

// The wait of one thread for other users of a table.
class share_wait {
 public:
  FW_DEVICE share_wait(cache::line_cache* c, cache::volume* v)
      : cache_(c), volume_(v), limit_(v->queues[0].data) {}

  // Whether the thread still leaves a closing copy to its owner.
  FW_DEVICE bool patient() const { return looks_ < kSharePatience; }

  // Does one step. Returns false after the time limit, which it records for `line`.
  FW_DEVICE bool again(uint64_t line, uint32_t opcode) {
    if (limit_.passed()) {
      cache::record_error(*volume_, kShareTimedOut, opcode, line);
      return false;
    }
    base::opaque (&help_share)(cache_, volume_, step_++);
    looks_++;
    return true;
  }

 private:
  cache::line_cache* cache_;
  cache::volume* volume_;
  nvme::deadline limit_;
  uint32_t looks_ = 0;
  uint32_t step_ = 2 * (warp::index() + base::spread_index());
};

}  // namespace detail

template <typename T, bool kOn = FW_SHARE_TABLE != 0>
class shared {
 public:
  using value_type = typename array<T>::value_type;
  static_assert(array<T>::kWord, "elements of a shared line are words of 1, 2, 4, 8 or 16 bytes");

  FW_DEVICE shared(const array<T>& a, const share_table& t) : array_(a), table_(t) {}

  // Acquires the line of element `i`: reads it into `own`, or uses the owner's buffer if the line
  // has a copy. `own` has the bytes of a line, in global memory or the block's shared memory, at
  // kShareAlignment, and belongs to the table until `release`. First releases another line that the
  // view holds; if that fails, so does this. Returns kSuccess, or the status of a failed transfer,
  // or kShareFull, kShareMisaligned or kShareUnreachable. After a failure the view does not hold
  // the line, and `load` and `store` access it wherever it is.
  FW_DEVICE uint32_t acquire(uint64_t i, value_type* own) { return acquire(i, own, true); }
  // As `acquire`, but returns kShareLater instead of waiting for other threads.
  FW_DEVICE uint32_t try_acquire(uint64_t i, value_type* own) { return acquire(i, own, false); }

  // Releases the line. An owner waits for the other users, and writes back what any of them stored.
  // Returns kSuccess or the failure. After a failure the view still holds the line with all stores
  // to it, and `release` may be called again. Without a line it does nothing.
  FW_DEVICE uint32_t release() { return release(true, true); }
  // As `release`, but returns kShareLater instead of waiting for other users. Patient threads do
  // not join the copy meanwhile.
  FW_DEVICE uint32_t try_release() { return release(true, false); }
  // As `release`, but an owner drops what was stored: the cache has the line as it was before.
  FW_DEVICE uint32_t discard() { return release(false, true); }

  // Loads element `i`, from its line's copy or from the cache.
  FW_DEVICE value_type load(uint64_t i) const {
    if (i >= array_.length) return array_.refuse(i);
    if (holds(array_.line_of(i))) {
      const char* from = reinterpret_cast<const char*>(held_.buffer) + array_.offset_of(i);
      return detail::bit_cast<value_type>(raw::load_any(from));
    }
    return load_elsewhere(i);
  }
  FW_DEVICE value_type operator[](uint64_t i) const { return load(i); }

  // Stores element `i`, to its line's copy or to the cache. Returns kSuccess, or why nothing was
  // stored, which the host raises too.
  FW_DEVICE uint32_t store(uint64_t i, value_type value) {
    static_assert(!array<T>::kReadOnly, "fw::shared<const T> is read-only: take an fw::shared<T>");
    if (i >= array_.length) {
      array_.refuse(i);
      return nvme::kLbaOutOfRange;
    }
    const word bits = detail::bit_cast<word>(value);
    if (holds(array_.line_of(i))) {
      raw::store_any(reinterpret_cast<char*>(held_.buffer) + array_.offset_of(i), bits);
      held_.stored = true;
      return nvme::kSuccess;
    }
    return store_elsewhere(i, bits);
  }

  // What the view holds. Other users may store to `buffer`, which has the elements of the line.
  FW_DEVICE bool holds_line() const { return held_.entry != cache::kShareNowhere; }
  FW_DEVICE bool owns_line() const { return held_.owner; }
  FW_DEVICE const value_type* buffer() const {
    return reinterpret_cast<const value_type*>(held_.buffer);
  }

 private:
  using raw = atomic::raw<sizeof(T)>;
  using word = typename raw::type;

  static constexpr detail::held_line kNothing = {0, 0, cache::kShareNowhere, false, false};

  FW_DEVICE bool holds(uint64_t line) const { return holds_line() && held_.line == line; }

  FW_DEVICE uint32_t acquire(uint64_t i, value_type* own, bool waits) {
    if (i >= array_.length) {
      array_.refuse(i);
      return nvme::kLbaOutOfRange;
    }
    const uint64_t line = array_.line_of(i);
    if (holds(line)) return nvme::kSuccess;
    const uint64_t buffer = reinterpret_cast<uint64_t>(own);
    if (buffer == 0 || buffer % kShareAlignment != 0) return kShareMisaligned;
    if (base::is_private(buffer)) return kShareUnreachable;
    const uint32_t released = release(true, waits);
    if (released != nvme::kSuccess) return released;
    detail::share_wait wait(array_.cache, array_.volume);
    while (true) {
      // Pass the address of a copy, so that `held_` stays in registers.
      detail::held_line found = kNothing;
      const uint32_t got = base::opaque(&detail::try_acquire_line)(
          table_, array_.cache, array_.volume, line, buffer, waits && wait.patient(), found);
      held_ = found;
      if (got != kShareLater || !waits) return got;
      if (!wait.again(line, nvme::kRead)) return kShareTimedOut;
    }
  }

  FW_DEVICE uint32_t release(bool keep, bool waits) {
    if (!holds_line()) return nvme::kSuccess;
    detail::share_wait wait(array_.cache, array_.volume);
    uint32_t got = kShareLater;
    while (true) {
      got =
          base::opaque(&detail::try_release_line)(table_, array_.cache, array_.volume, held_, keep);
      if (got != kShareLater || !waits) break;
      if (!wait.again(held_.line, nvme::kWrite)) {
        cache::share_reopen(table_, held_.entry, false);
        return kShareTimedOut;
      }
    }
    if (got == nvme::kSuccess) held_ = kNothing;
    return got;
  }

  FW_DEVICE value_type load_elsewhere(uint64_t i) const {
    const uint64_t line = array_.line_of(i);
    detail::share_wait wait(array_.cache, array_.volume);
    while (true) {
      const cache::share_place at = cache::share_find(table_, line);
      // No thread has stored to a copy that is FILLING: the cache has the newest bytes.
      if (at.entry == cache::kShareNowhere ||
          cache::share::state_of(at.word) == cache::share::kFilling) {
        return array_[i];
      }
      word value;
      const uint32_t got = base::opaque(&detail::try_load_copy<sizeof(T)>)(
          table_, at.entry, line, array_.offset_of(i), wait.patient(), value);
      if (got == nvme::kSuccess) return detail::bit_cast<value_type>(value);
      if (!wait.again(line, nvme::kRead)) return value_type();
    }
  }

  FW_DEVICE uint32_t store_elsewhere(uint64_t i, word bits) const {
    const uint64_t line = array_.line_of(i);
    const detail::store_element<sizeof(T)> element = {array_.offset_of(i), bits};
    detail::share_wait wait(array_.cache, array_.volume);
    while (true) {
      const uint32_t got = base::opaque(&detail::try_store_copy<sizeof(T)>)(
          table_, array_.cache, array_.volume, line, wait.patient(), element);
      if (got != kShareLater) return got;
      if (!wait.again(line, nvme::kWrite)) return kShareTimedOut;
    }
  }

  array<T> array_;
  share_table table_;
  detail::held_line held_ = kNothing;
};

// Without a table: plain accesses to the array. Has no `discard`, `buffer`, `holds_line` and
// `owns_line`, which need a copy.
template <typename T>
class shared<T, false> {
 public:
  using value_type = typename array<T>::value_type;

  FW_DEVICE shared(const array<T>& a, const share_table&) : array_(a) {}
  FW_DEVICE uint32_t acquire(uint64_t, value_type*) { return nvme::kSuccess; }
  FW_DEVICE uint32_t try_acquire(uint64_t, value_type*) { return nvme::kSuccess; }
  FW_DEVICE uint32_t release() { return nvme::kSuccess; }
  FW_DEVICE uint32_t try_release() { return nvme::kSuccess; }
  FW_DEVICE value_type load(uint64_t i) const { return array_[i]; }
  FW_DEVICE value_type operator[](uint64_t i) const { return array_[i]; }
  // The host raises failures, as it does for array::store.
  FW_DEVICE uint32_t store(uint64_t i, value_type value) {
    array_.store(i, value);
    return nvme::kSuccess;
  }

 private:
  array<T> array_;
};

namespace warp {

// As the methods. All lanes of the warp call together, each with its own view and with the same
// arguments, and use one line. When `release` has returned to any lane, `own` is free again.
template <typename T, bool kOn>
FW_DEVICE uint32_t acquire(fw::shared<T, kOn>& s, uint64_t i, typename array<T>::value_type* own) {
  const uint32_t status = s.acquire(i, own);
  if constexpr (kOn) lanes::all().sync();
  return status;
}
template <typename T, bool kOn>
FW_DEVICE uint32_t release(fw::shared<T, kOn>& s) {
  uint32_t status = 0;
  if constexpr (kOn) {
    // Each lane's uses of the line come before any lane's release.
    lanes::all().sync();
    status = s.release();
    lanes::all().sync();
    const lanes failed = lanes::all().ballot(status != nvme::kSuccess);
    if (failed) status = lanes::all().broadcast(status, failed.leader());
  }
  return status;
}

}  // namespace warp

}  // namespace fw
