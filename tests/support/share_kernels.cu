// Kernels of the share table's tests, for the CPU device and a GPU: thread 0 and thread `other`
// meet on element 5, in an order that `turn` tells; the others have nothing to do.
#include "flashwarp/array/shared.cuh"

using words = fw::array<uint64_t>;
using view = fw::shared<uint64_t>;

namespace {

constexpr uint64_t kElement = 5;

// Release and acquire: whoever has been told knows what the teller did.
FW_DEVICE void tell(uint32_t* turn) {
  fw::atomic::fence();
  fw::atomic::add(turn, 1u);
}
FW_DEVICE void await(uint32_t* turn, uint32_t count) {
  while (fw::atomic::load_acquire(turn) < count) fw::base::pause(fw::nvme::kBackOffNs);
}

// The thread's part in a hazard: 0, 1 or none; and its own buffer of one line.
FW_DEVICE uint32_t role_of(uint64_t other) {
  const uint32_t index = fw::base::thread_index();
  return index == 0 ? 0 : index == other ? 1 : 2;
}
FW_DEVICE uint64_t line_words(const words& x) { return fw::cache::line_bytes(x.geometry) / 8; }

}  // namespace

// Read after write: 1 reads what 0 has stored and still holds.
FW_KERNEL read_after_write(words x, fw::share_table t, uint64_t* own, uint32_t* turn,
                           uint64_t* seen, uint64_t other) {
  const uint32_t role = role_of(other);
  if (role > 1) return;
  view s(x, t);
  if (role == 0) {
    seen[0] = s.acquire(kElement, own);
    s.store(kElement, 100);
    tell(turn);
    seen[1] = s.release();
  } else {
    await(turn, 1);
    seen[2] = s.acquire(kElement, own + line_words(x));
    seen[3] = s[kElement];
    seen[4] = s.release();
  }
}

// Write after read: 1 has read the old value before 0 stores, and reads the new one then.
FW_KERNEL write_after_read(words x, fw::share_table t, uint64_t* own, uint32_t* turn,
                           uint64_t* seen, uint64_t other) {
  const uint32_t role = role_of(other);
  if (role > 1) return;
  view s(x, t);
  seen[role] = s.acquire(kElement, own + role * line_words(x));
  if (role == 0) {
    await(turn, 1);
    s.store(kElement, 100);
    tell(turn);
  } else {
    seen[2] = s[kElement];
    tell(turn);
    await(turn, 2);
    seen[3] = s[kElement];
  }
  seen[4 + role] = s.release();
}

// Write after write: both hold the line, 0 stores, then 1, and 0 lets go first.
FW_KERNEL write_after_write(words x, fw::share_table t, uint64_t* own, uint32_t* turn,
                            uint64_t* seen, uint64_t other) {
  const uint32_t role = role_of(other);
  if (role > 1) return;
  view s(x, t);
  seen[role] = s.acquire(kElement, own + role * line_words(x));
  seen[2 + role] = s.owns_line();
  tell(turn);
  await(turn, 2);
  if (role == 0) {
    s.store(kElement, 100);
    tell(turn);
  } else {
    await(turn, 3);
    s.store(kElement, 200);
    s.store(kElement + 1, 201);
  }
  seen[4 + role] = s.release();
}

// Every thread adds to elements of its own in lines that all of them use, from one line to the
// next: lines are handed over, shared, or used without a buffer where the table is full.
FW_KERNEL add_everywhere(words x, fw::share_table t, uint64_t* own, uint64_t rounds, uint64_t* full,
                         uint64_t* failed) {
  const uint64_t line = line_words(x);
  const uint64_t lines = x.size() / line;
  const uint64_t thread = fw::base::thread_index();
  if (thread >= line) return;
  view s(x, t);
  for (uint64_t r = 0; r < rounds; r++) {
    const uint64_t at = (thread * 7 + r * (thread % 5 + 1)) % lines;
    const uint64_t i = at * line + thread;
    const uint32_t got = s.acquire(i, own + thread * line);
    if (got == fw::kShareFull) fw::atomic::add(full, uint64_t(1));
    uint32_t status = s.store(i, s[i] + 1);
    // Elsewhere too, in the right order: nothing is held that others may wait for.
    if (got == fw::nvme::kSuccess && status == fw::nvme::kSuccess) status = s.release();
    if (status != fw::nvme::kSuccess) fw::atomic::add(failed, uint64_t(1));
  }
}

// Reads past a copy, as the array does, and through a view that has acquired nothing.
FW_KERNEL look_first(words x, fw::share_table t, uint64_t* own, uint32_t* turn, uint64_t* seen,
                     uint64_t other) {
  const uint32_t role = role_of(other);
  if (role > 1) return;
  view s(x, t);
  if (role == 0) {
    s.acquire(kElement, own);
    s.store(kElement, 100);
    tell(turn);
    await(turn, 2);
    seen[0] = s[kElement + 1];
    s.release();
    seen[1] = x[kElement];
    seen[2] = x[kElement + 1];
  } else {
    await(turn, 1);
    seen[3] = x[kElement];
    seen[4] = s[kElement];
    seen[5] = s.store(kElement + 1, 101);
    tell(turn);
  }
}

FW_KERNEL refusals(words x, fw::share_table t, uint64_t* own, uint64_t* seen) {
  if (fw::base::thread_index() != 0) return;
  view s(x, t);
  seen[0] = s.acquire(kElement, own + 1);
  seen[1] = s.acquire(kElement, nullptr);
  seen[2] = s.holds_line();
  seen[3] = s.release();
  seen[4] = s.acquire(x.size(), own);
}

// Leaves lines in the table: the first of them modified by a user that has gone.
FW_KERNEL leave(words x, fw::share_table t, uint64_t* own, uint64_t count) {
  if (fw::base::thread_index() != 0) return;
  const uint64_t line = line_words(x);
  for (uint64_t k = 0; k < count; k++) {
    view s(x, t);
    s.acquire(k * line, own + k * line);
  }
  view user(x, t);
  user.store(1, 77);
}

// Holds four lines, asks for a fifth, and again when one of the four is free.
FW_KERNEL fill_table(words x, fw::share_table t, uint64_t* own, uint64_t* seen) {
  if (fw::base::thread_index() != 0) return;
  const uint64_t line = line_words(x);
  view s[5] = {view(x, t), view(x, t), view(x, t), view(x, t), view(x, t)};
  for (uint64_t k = 0; k < 5; k++) seen[k] = s[k].acquire(k * line, own + k * line);
  seen[5] = s[4][4 * line + 1];
  seen[6] = s[2].release();
  seen[7] = s[4].acquire(4 * line, own + 4 * line);
  for (view& held : s) seen[8] |= held.release();
}

// Waits for itself: an owner releases before the user of its own copy.
FW_KERNEL wait_for_itself(words x, fw::share_table t, uint64_t* own, uint64_t* seen) {
  if (fw::base::thread_index() != 0) return;
  view owner(x, t);
  view user(x, t);
  owner.acquire(kElement, own);
  user.acquire(kElement, own + line_words(x));
  user.store(kElement, 100);
  seen[0] = owner.try_release();
  seen[1] = owner.release();
  seen[2] = owner.holds_line();
  seen[3] = user.release();
  seen[4] = owner.release();
}

// Takes one line, and gives up what it stored, or keeps it.
FW_KERNEL change(words x, fw::share_table t, uint64_t* own, uint64_t value, uint64_t keep,
                 uint64_t* seen) {
  if (fw::base::thread_index() != 0) return;
  view s(x, t);
  seen[0] = s.acquire(kElement, own);
  if (seen[0] != fw::nvme::kSuccess) return;
  s.store(kElement, value);
  seen[1] = keep != 0 ? s.release() : s.discard();
  if (seen[1] != fw::nvme::kSuccess) {
    // It is ours still; nobody else may have it from us.
    seen[2] = s.holds_line();
    seen[3] = s[kElement];
    seen[4] = s.discard();
  }
}
