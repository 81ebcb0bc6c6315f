// fw::shared<T>: an array of which threads keep lines in buffers of their own, coherently.
//
//   fw::shared<float> s(data, table);
//   if (s.acquire(i, buffer) == fw::nvme::kSuccess) {   // `buffer`: one line, of this thread's
//     s.store(i, s.load(j) + 1);                        // i and j on that line: in the buffer
//     s.release();
//   }
//
// Who acquires a line first is its owner: its buffer is filled and becomes the line. Who comes
// later uses the owner's buffer, and its own stays as it is. An owner that releases waits until the
// others have, writes the buffer back to the cache if anybody stored to it (whole, so nothing is
// read), and the line is the cache's again. What is coherent with what:
//   - all accesses through views of one table, whether their thread has acquired the line or not:
//     `load` and `store` of any element look into the table first, then into the cache;
//   - plain accesses to the array see a copy's stores once its owner's release has returned. Plain
//     stores to a line that has a copy are not seen there, and are lost if the copy is written
//     back. Plain readers who must not wait for that construct a view and load through it.
// A view belongs to one thread, any thread may have any number of them, and lanes may call in
// divergent code. A view holds one line at most. Who acquires a line, or loads or stores elements
// of one that it does not hold, may have to wait until an owner has its copy back from others: so a
// thread does so while it holds no other line, or all threads go through lines in ascending order;
// `try_acquire` does not wait. Of several views, release those that are not owners first. Every
// wait drains completions and has the time limit of the array.
//
// Where FW_SHARE_TABLE is 0, or kOn is false, the same source is plain accesses to the array.
#pragma once

#include "flashwarp/array/view.cuh"
#include "flashwarp/cache/share_table.cuh"

#if !defined(FW_SHARE_TABLE)
#define FW_SHARE_TABLE 1
#endif

namespace fw {

using share_table = cache::share_table;

// Statuses of shared<T>, besides those of NVMe. Vendor specific, never on the wire.
inline constexpr uint32_t kShareLater = 0x7FD;        // try_*: others come first; try again
inline constexpr uint32_t kShareFull = 0x7FC;         // every entry of the table is taken
inline constexpr uint32_t kShareMisaligned = 0x7FB;   // the buffer is not at kShareAlignment
inline constexpr uint32_t kShareUnreachable = 0x7FA;  // it is memory of the thread's alone
inline constexpr uint32_t kShareTimedOut = 0x7F9;     // others did not let go of the line in time

// Looks at a copy that its owner wants back, before a thread that needs it joins its other users
// instead: about as long as a transfer takes, and more than the others are likely to need.
inline constexpr uint32_t kSharePatience = 64;

// Of a buffer, in bytes: what a lane copies at a time.
inline constexpr uint32_t kShareAlignment = 16;

namespace detail {

// A line in somebody's buffer, as one of its users holds it.
struct held_line {
  uint64_t line;    // global
  uint64_t buffer;  // the owner's
  uint32_t entry;   // of the table; kShareNowhere: nothing is held
  bool owner;
  bool stored;  // by this user
};

// The lanes that are here together and mean the same array and table.
FW_DEVICE uint32_t active_on(const cache::volume* v, const cache::share_table& t) {
  return warp::match(active_on(v), reinterpret_cast<uint64_t>(t.words));
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
  // In another block's shared memory: the cache will have it when that block is done.
  cache::share_drop(t, at.entry, count, false);
  return {share_result::kWait, at.entry};
}

// One try of each lane for its line; never waits for other users, but fills what it claims. Lanes
// that want one line count as one. Returns kShareLater where another try is due.
FW_DEVICE_NOINLINE uint32_t try_acquire_line(cache::share_table t, cache::line_cache* c,
                                             cache::volume* v, uint64_t line, uint64_t buffer,
                                             bool patient, held_line& held) {
  using cache::share_result;
  const uint32_t mask = active_on(v, t);
  const uint32_t group = warp::match(mask, line);
  const uint32_t leader = base::lowest_bit(group);
  const bool leads = warp::lane() == leader;
  cache::share_outcome mine = {share_result::kWait, cache::kShareNowhere};
  if (leads) mine = join_or_claim(t, line, buffer, base::popcount(group), patient);
  const bool claimed = mine.result == share_result::kClaimed;
  uint32_t status = 0;
  if (warp::any(mask, claimed)) {
    copy_piece<false> op = {0, claimed ? cache::bytes_of_line(*c, *v, line) : 0, buffer};
    cache::tally count;
    status = cache::access<policy>(c->geometry, *c, *v, mask, claimed, line, false, op, count);
    count.add_kernel_to(*v, mask);
    if (claimed && status == nvme::kSuccess) {
      cache::share_open(t, mine.entry, line, base::popcount(group) - 1,
                        base::scope_of(buffer) != 0);
    } else if (claimed) {
      // Others that wait for the line will try themselves, and meet the error themselves.
      cache::share_end(t, mine.entry, line);
    }
  }
  if (leads && mine.result == share_result::kWait) status = kShareLater;
  if (leads && mine.result == share_result::kFull) status = kShareFull;
  uint64_t copy = 0;
  if (leads && status == nvme::kSuccess) copy = atomic::load_plain(&t.copies[mine.entry]).buffer;
  // The leader has acquired the copy for its group.
  warp::sync(mask);
  status = warp::take(mask, status, leader);
  copy = warp::take(mask, copy, leader);
  const uint32_t entry = warp::take(mask, mine.entry, leader);
  if (status == nvme::kSuccess) held = {line, copy, entry, leads && claimed, false};
  return status;
}

// Lets go of each lane's line, or tries to: an owner whose copy has other users is told
// kShareLater. What a copy's users stored goes to the cache, unless the owner does not want it
// kept.
FW_DEVICE_NOINLINE uint32_t try_release_line(cache::share_table t, cache::line_cache* c,
                                             cache::volume* v, held_line held, bool keep) {
  const uint32_t mask = active_on(v, t);
  // All lanes' loads and stores before the one that lets go for them.
  warp::sync(mask);
  const uint32_t users = warp::ballot(mask, !held.owner);
  const uint32_t stored = warp::ballot(mask, held.stored);
  if (!held.owner) {
    const uint32_t group = warp::match(users, held.entry);
    if (warp::lane() == base::lowest_bit(group)) {
      cache::share_drop(t, held.entry, base::popcount(group), (stored & group) != 0);
    }
  }
  const uint64_t word = held.owner ? cache::share_close(t, held.entry) : 0;
  const bool alone = held.owner && cache::share::references(word) == 0;
  const bool modified = (word & cache::share::kModified) != 0 || held.stored;
  const bool writes = alone && modified && keep;
  uint32_t status = 0;
  if (warp::any(mask, writes)) {
    copy_piece<true> op = {0, writes ? cache::bytes_of_line(*c, *v, held.line) : 0, held.buffer};
    cache::tally count;
    status = cache::access<policy>(c->geometry, *c, *v, mask, writes, held.line, writes, op, count);
    count.add_kernel_to(*v, mask);
  }
  if (!held.owner) return nvme::kSuccess;
  if (!alone) return kShareLater;
  if (status == nvme::kSuccess) {
    cache::share_end(t, held.entry, held.line);
  } else {
    // Still the only one with these bytes: it stays the line's copy.
    cache::share_reopen(t, held.entry, true);
  }
  return status;
}

// One try of each lane to load from a copy that it has seen but does not hold.
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

// One try of each lane to store to a line that it does not hold: to the copy, or to the cache while
// an entry keeps others from bringing the line to a buffer.
template <uint32_t kBytes>
FW_DEVICE_NOINLINE uint32_t try_store_copy(cache::share_table t, cache::line_cache* c,
                                           cache::volume* v, uint64_t line, bool patient,
                                           const store_element<kBytes>& element) {
  using cache::share_result;
  const uint32_t mask = active_on(v, t);
  const cache::share_outcome mine = join_or_claim(t, line, 0, 1, patient);
  if (mine.result == share_result::kJoined) {
    char* copy = reinterpret_cast<char*>(atomic::load_plain(&t.copies[mine.entry]).buffer);
    atomic::raw<kBytes>::store_any(copy + element.offset, element.value);
    cache::share_drop(t, mine.entry, 1, true);
  }
  const bool claimed = mine.result == share_result::kClaimed;
  uint32_t status = mine.result == share_result::kJoined ? uint32_t(nvme::kSuccess) : kShareLater;
  if (warp::any(mask, claimed)) {
    store_element<kBytes> op = element;
    cache::tally count;
    const uint32_t got =
        cache::access<policy>(c->geometry, *c, *v, mask, claimed, line, false, op, count);
    count.add_kernel_to(*v, mask);
    if (claimed) {
      status = got;
      cache::share_end(t, mine.entry, line);
    }
  }
  return status;
}

// One step of a wait for other users of a table.
FW_DEVICE_NOINLINE void help_share(cache::line_cache* c, cache::volume* v, uint32_t step) {
  cache::help_any(*c, *v, active_on(v), step);
}

// A wait of one thread for other users of a table.
class share_wait {
 public:
  FW_DEVICE share_wait(cache::line_cache* c, cache::volume* v)
      : cache_(c), volume_(v), limit_(v->queues[0].data) {}

  // Whether to leave a copy to the owner that wants it back.
  FW_DEVICE bool patient() const { return looks_ < kSharePatience; }

  // False when time has run out, which the host will raise for `line`.
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

  // Brings the line of element `i` to `own`, or finds it in another thread's buffer. `own` has the
  // bytes of a line, in global memory or the block's shared memory, at kShareAlignment, and is the
  // table's until `release`. Releases the line held before, if it is another; fails as that does.
  // Returns kSuccess, the status of a failed transfer, or one of kShareFull, kShareMisaligned and
  // kShareUnreachable; the line is not held then, and `load` and `store` go to where it is.
  FW_DEVICE uint32_t acquire(uint64_t i, value_type* own) { return acquire(i, own, true); }
  // The same, but kShareLater where it would wait for what others do with the line.
  FW_DEVICE uint32_t try_acquire(uint64_t i, value_type* own) { return acquire(i, own, false); }

  // Lets go of the line. An owner waits for the others, and then writes back what was stored.
  // Returns kSuccess; or why not, and then the line is still held, with everything stored to it,
  // and `release` may be called again. Without a line it does nothing.
  FW_DEVICE uint32_t release() { return release(true, true); }
  // The same, but kShareLater where it would wait for other users: fewer and fewer join them.
  FW_DEVICE uint32_t try_release() { return release(true, false); }
  // As `release`, but an owner gives up what was stored: the cache has the line as it was before.
  FW_DEVICE uint32_t discard() { return release(false, true); }

  // Loads element `i`, whoever has its line.
  FW_DEVICE value_type load(uint64_t i) const {
    if (i >= array_.length) return array_.refuse(i);
    if (holds(array_.line_of(i))) {
      const char* from = reinterpret_cast<const char*>(held_.buffer) + array_.offset_of(i);
      return detail::bit_cast<value_type>(raw::load_any(from));
    }
    return load_elsewhere(i);
  }
  FW_DEVICE value_type operator[](uint64_t i) const { return load(i); }

  // Stores element `i`, whoever has its line. Returns kSuccess, or why nothing was stored, which
  // the host raises too.
  FW_DEVICE uint32_t store(uint64_t i, value_type value) {
    static_assert(!array<T>::kReadOnly, "fw::shared<const T> is read-only: take an fw::shared<T>");
    if (i >= array_.length) {
      array_.refuse(i);
      return nvme::kLbaOutOfRange;
    }
    const word bits = detail::bit_extend<word>(value);
    if (holds(array_.line_of(i))) {
      raw::store_any(reinterpret_cast<char*>(held_.buffer) + array_.offset_of(i), bits);
      held_.stored = true;
      return nvme::kSuccess;
    }
    return store_elsewhere(i, bits);
  }

  // What is held. `buffer` has the elements `first` .. of the line; others store to it meanwhile.
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
      // A copy, whose address may be taken, so that `held_` stays in registers.
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
      // Nobody has stored to a copy that is not filled.
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

// Without a table: what the array does, and nothing else. What only a copy can do is missing:
// `discard`, `buffer`, `holds_line` and `owns_line`.
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
  // Failures are the host's to raise, as those of array::store are.
  FW_DEVICE uint32_t store(uint64_t i, value_type value) {
    array_.store(i, value);
    return nvme::kSuccess;
  }

 private:
  array<T> array_;
};

namespace warp {

// As the methods, by all lanes of the warp together, with one view each, and with the same
// arguments. The lanes use one line; when `release` returns, to any lane, `own` is free again.
template <typename T, bool kOn>
FW_DEVICE uint32_t acquire(fw::shared<T, kOn>& s, uint64_t i, typename array<T>::value_type* own) {
  const uint32_t status = s.acquire(i, own);
  if constexpr (kOn) sync(kFullMask);
  return status;
}
template <typename T, bool kOn>
FW_DEVICE uint32_t release(fw::shared<T, kOn>& s) {
  uint32_t status = 0;
  if constexpr (kOn) {
    // Each lane's uses of the line before any lane lets go of it.
    sync(kFullMask);
    status = s.release();
    sync(kFullMask);
    const uint32_t failed = ballot(kFullMask, status != nvme::kSuccess);
    if (failed != 0) status = broadcast(kFullMask, status, base::lowest_bit(failed));
  }
  return status;
}

}  // namespace warp

}  // namespace fw
