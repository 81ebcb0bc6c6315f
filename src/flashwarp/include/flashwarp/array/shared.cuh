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
#pragma once

#include "flashwarp/array/view.cuh"
#include "flashwarp/cache/share_table.cuh"

namespace fw {

using share_table = cache::share_table;

// Statuses of shared<T>, besides those of NVMe. Vendor specific, never on the wire.
inline constexpr uint32_t kShareLater = 0x7FD;        // try_*: it would have to wait; try again
inline constexpr uint32_t kShareFull = 0x7FC;         // every entry of the line's bucket is taken
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

// Counts `count` lanes as users of a copy that was found. Returns the copy's buffer; or 0 if the
// lanes have to wait, as for a copy in another block's shared memory.
FW_DEVICE uint64_t join_copy(const cache::share_table& t, uint32_t entry, uint64_t line,
                             uint32_t count, bool patient) {
  if (!cache::share_join(t, entry, line, count, patient)) return 0;
  const cache::share_copy copy = atomic::load_plain(&t.copies[entry]);
  if (copy.scope == 0 || copy.scope == base::own_scope()) return copy.buffer;
  cache::share_drop(t, entry, count, false);
  return 0;
}

// Runs `op` on the frame of the line that each lane asks for. All lanes of `here` call together.
template <typename Op>
FW_DEVICE uint32_t access_frame(cache::line_cache* c, cache::volume* v, lanes here,
                                const cache::request& asked, Op op) {
  if (!here.any(asked.wants)) return nvme::kSuccess;
  cache::tally count;
  const uint32_t status = cache::access<policy>({c->geometry, *c, *v, here}, asked, op, count);
  count.add_kernel_to(*v, here);
  return status;
}

// Tries once to acquire each lane's line. Never waits for other users, but fills what it claims.
// Lanes that want the same line claim it once. Returns kShareLater if the lane has to try again.
FW_DEVICE_NOINLINE uint32_t try_acquire_line(cache::share_table t, cache::line_cache* c,
                                             cache::volume* v, uint64_t line, uint64_t buffer,
                                             bool patient, held_line& held) {
  const lanes here = active_on(v, t);
  const lanes group = here.match(line);
  const uint32_t users = group.count();
  const uint32_t leader = group.leader();
  uint32_t status = kShareLater;
  uint32_t entry = cache::kShareNowhere;
  uint64_t copy = 0;
  bool claimed = false;
  if (group.leads()) {
    entry = cache::share_find(t, line).entry;
    if (entry != cache::kShareNowhere) {
      copy = join_copy(t, entry, line, users, patient);
      if (copy != 0) status = nvme::kSuccess;
    } else if (cache::share_lock(t, line)) {
      entry = cache::share_claim(t, line);
      cache::share_unlock(t, line);
      claimed = entry != cache::kShareNowhere;
      if (!claimed) status = kShareFull;
    }
  }
  const copy_piece<false> op = {0, claimed ? cache::bytes_of_line(*c, *v, line) : 0, buffer};
  const uint32_t filled = access_frame(c, v, here, {line, claimed}, op);
  if (claimed) {
    status = filled;
    copy = buffer;
    // Threads that wait for a line that could not be read try to fill it, and get the error too.
    if (filled == nvme::kSuccess) cache::share_open(t, entry, line, users - 1, buffer);
    if (filled != nvme::kSuccess) cache::share_end(t, entry);
  }
  // The leader has acquired the copy for its group.
  here.sync();
  status = here.take(status, leader);
  copy = here.take(copy, leader);
  entry = here.take(entry, leader);
  if (status == nvme::kSuccess) held = {line, copy, entry, claimed, false};
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
  const copy_piece<true> op = {0, writes ? cache::bytes_of_line(*c, *v, held.line) : 0,
                               held.buffer};
  const uint32_t status = access_frame(c, v, here, {held.line, writes, writes}, op);
  if (!held.owner) return nvme::kSuccess;
  if (!alone) return kShareLater;
  // If it could not be written, only this buffer has the newest bytes: it stays the copy.
  if (status == nvme::kSuccess) cache::share_end(t, held.entry);
  if (status != nvme::kSuccess) cache::share_reopen(t, held.entry, true);
  return status;
}

// Tries once to load from a copy that the lane has found but does not hold.
template <uint32_t kBytes>
FW_DEVICE_NOINLINE uint32_t try_load_copy(cache::share_table t, uint32_t entry, uint64_t line,
                                          uint64_t offset, bool patient,
                                          typename atomic::raw<kBytes>::type& value) {
  const uint64_t copy = join_copy(t, entry, line, 1, patient);
  if (copy == 0) return kShareLater;
  value = atomic::raw<kBytes>::load_any(reinterpret_cast<const char*>(copy) + offset);
  cache::share_drop(t, entry, 1, false);
  return nvme::kSuccess;
}

// Tries once to store to a line that the lane does not hold: to its copy, or to the cache while the
// lock of its bucket keeps other threads from making a copy.
template <uint32_t kBytes>
FW_DEVICE_NOINLINE uint32_t try_store_copy(cache::share_table t, cache::line_cache* c,
                                           cache::volume* v, uint64_t line, bool patient,
                                           store_element<kBytes> element) {
  const lanes here = active_on(v, t);
  const uint32_t entry = cache::share_find(t, line).entry;
  uint32_t status = kShareLater;
  bool locked = false;
  if (entry == cache::kShareNowhere) {
    locked = cache::share_lock(t, line);
  } else if (const uint64_t copy = join_copy(t, entry, line, 1, patient)) {
    atomic::raw<kBytes>::store_any(reinterpret_cast<char*>(copy) + element.offset, element.value);
    cache::share_drop(t, entry, 1, true);
    status = nvme::kSuccess;
  }
  const uint32_t stored = access_frame(c, v, here, {line, locked}, element);
  if (!locked) return status;
  cache::share_unlock(t, line);
  return stored;
}

// Does one step of a wait for other users of a table.
FW_DEVICE_NOINLINE void help_share(cache::line_cache* c, cache::volume* v, uint32_t step) {
  cache::help_any(*c, *v, active_on(v), step);
}

}  // namespace detail

template <typename T>
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
    const uint64_t line = array_.line_of(i);
    const detail::store_element<sizeof(T)> element = {array_.offset_of(i),
                                                      detail::bit_cast<word>(value)};
    if (holds(line)) {
      raw::store_any(reinterpret_cast<char*>(held_.buffer) + element.offset, element.value);
      held_.stored = true;
      return nvme::kSuccess;
    }
    return retry(line, nvme::kWrite, true, [&](bool patient) {
      return base::opaque(&detail::try_store_copy<sizeof(T)>)(table_, array_.cache, array_.volume,
                                                              line, patient, element);
    });
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

  // Calls `attempt(patient)` until it returns anything but kShareLater; once unless it `waits`.
  // After the time limit, which it records for `line`, it returns kShareTimedOut.
  template <typename Attempt>
  FW_DEVICE uint32_t retry(uint64_t line, uint32_t opcode, bool waits, Attempt attempt) const {
    nvme::deadline limit(array_.volume->queues[0].data);
    uint32_t step = 2 * (warp::index() + base::spread_index());
    for (uint32_t looks = 0;; looks++) {
      const uint32_t got = attempt(waits && looks < kSharePatience);
      if (got != kShareLater || !waits) return got;
      if (limit.passed()) {
        cache::record_error(*array_.volume, kShareTimedOut, opcode, line);
        return kShareTimedOut;
      }
      base::opaque (&detail::help_share)(array_.cache, array_.volume, step++);
    }
  }

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
    return retry(line, nvme::kRead, waits, [&](bool patient) {
      // Pass the address of a copy, so that `held_` stays in registers.
      detail::held_line found = kNothing;
      const uint32_t got = base::opaque(&detail::try_acquire_line)(
          table_, array_.cache, array_.volume, line, buffer, patient, found);
      held_ = found;
      return got;
    });
  }

  FW_DEVICE uint32_t release(bool keep, bool waits) {
    if (!holds_line()) return nvme::kSuccess;
    const uint32_t got = retry(held_.line, nvme::kWrite, waits, [&](bool) {
      return base::opaque(&detail::try_release_line)(table_, array_.cache, array_.volume, held_,
                                                     keep);
    });
    if (got == kShareTimedOut) cache::share_reopen(table_, held_.entry, false);
    if (got == nvme::kSuccess) held_ = kNothing;
    return got;
  }

  FW_DEVICE value_type load_elsewhere(uint64_t i) const {
    const uint64_t line = array_.line_of(i);
    word value = {};
    bool cached = false;
    const uint32_t got = retry(line, nvme::kRead, true, [&](bool patient) {
      const cache::share_place at = cache::share_find(table_, line);
      // No thread has stored to a copy that is FILLING: the cache has the newest bytes.
      cached = at.entry == cache::kShareNowhere ||
               cache::share::state_of(at.word) == cache::share::kFilling;
      if (cached) return uint32_t(nvme::kSuccess);
      word copied;
      const uint32_t status = base::opaque(&detail::try_load_copy<sizeof(T)>)(
          table_, at.entry, line, array_.offset_of(i), patient, copied);
      value = copied;
      return status;
    });
    if (cached) return array_[i];
    return got == nvme::kSuccess ? detail::bit_cast<value_type>(value) : value_type();
  }

  array<T> array_;
  share_table table_;
  detail::held_line held_ = kNothing;
};

namespace warp {

// As the methods. All lanes of the warp call together, each with its own view and with the same
// arguments, and use one line. When `release` has returned to any lane, `own` is free again.
template <typename T>
FW_DEVICE uint32_t acquire(fw::shared<T>& s, uint64_t i, typename array<T>::value_type* own) {
  const uint32_t status = s.acquire(i, own);
  lanes::all().sync();
  return status;
}
template <typename T>
FW_DEVICE uint32_t release(fw::shared<T>& s) {
  // Each lane's uses of the line come before any lane's release.
  lanes::all().sync();
  const uint32_t status = s.release();
  lanes::all().sync();
  const lanes failed = lanes::all().ballot(status != nvme::kSuccess);
  return failed ? lanes::all().broadcast(status, failed.leader()) : status;
}

}  // namespace warp

}  // namespace fw
