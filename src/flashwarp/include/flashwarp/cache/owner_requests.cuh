// What a client of a shared cache asks the owner, another process, by: a table of requests in
// memory that both map, and a buffer for each.
//
// A client reads the owner's tags and frames as every hit does, and can store to neither. A thread
// whose line is absent takes a slot, asks, and waits. A host thread of the owner makes the access
// by the owner's own cache, copies the line to the slot's buffer, and answers. So the thread has
// the bytes whatever is evicted meanwhile: nothing is tried again, and no pin of the owner's cache
// depends on a client. A store's bytes go the other way, through the buffer.
//
// Who may do what:
//   state     ANSWERED -> ASKED by the thread that holds the slot; ASKED -> ANSWERED by the owner.
//             Whose turn it is writes the slot's other words and its buffer; nobody else does.
//   holders   words of the client alone, which the owner never sees:
//             FREE -> HELD -> FREE by the holding thread, or HELD -> LENT behind a hint, for whose
//             answer nobody waits. Then the next thread that finds the answer takes the slot over.
// The client frees slots. The owner frees the memory, when the client's connection has ended: the
// table is of one client, so of one that has died at any instruction nothing is left to recover. A
// thread that gives up keeps its slot held for ever, because a late answer may still write there.
//
// A table and no ring: answers come in any order, and a slot that is never freed is in nobody's
// way. The owner believes nothing: it copies a request once, and checks the copy.
#pragma once

#include "flashwarp/base/atomic.cuh"

namespace fw::cache {

enum owner_operation : uint32_t {
  kOwnerRead = 1,      // copies bytes of the cache's lines to the buffer
  kOwnerStore = 2,     // stores the first bytes of the buffer
  kOwnerPrefetch = 3,  // a hint: no buffer, and no failure
};

enum slot_state : uint32_t { kAnswered = 0, kAsked = 1 };
enum slot_holder : uint32_t { kFree = 0, kHeld = 1, kLent = 2 };

// In shared memory.
struct alignas(64) request_slot {
  uint32_t state;
  uint32_t operation;
  uint64_t begin;   // of the bytes, counted over all lines of the cache from line number 0
  uint64_t bytes;   // at most a line, but for hints
  uint32_t status;  // the answer's: an NVMe status
  uint32_t reserved[9];
};
static_assert(sizeof(request_slot) == 64);

// In shared memory, before the slots: changes with each request, for an owner that sleeps.
struct alignas(64) request_bell {
  uint32_t rings;
  uint32_t reserved[15];
};
static_assert(sizeof(request_bell) == 64);

// Statuses of the client's own, vendor specific: the owner could not do it and can say why; or the
// operation cannot be described to it.
inline constexpr uint32_t kOwnerFailed = 0x7FD;
inline constexpr uint32_t kOwnersAlone = 0x7FC;

// How the threads of a client reach the table; in the client's own memory.
struct owner_requests {
  request_bell* bell;
  request_slot* slots;
  char* buffers;
  uint64_t buffer_bytes;  // of each: a line
  uint32_t* holders;
  uint32_t count;
  uint32_t next;  // where the next thread begins to look
};
static_assert(sizeof(owner_requests) == 48);

inline constexpr uint32_t kNoSlot = ~uint32_t(0);

FW_HOST_DEVICE char* buffer_of(const owner_requests& o, uint32_t slot) {
  return o.buffers + slot * o.buffer_bytes;
}

// The client's end.

FW_DEVICE bool is_answered(const owner_requests& o, uint32_t slot) {
  return atomic::load_relaxed_system(&o.slots[slot].state) == kAnswered;
}

// How many slots a thread looks at for one that is free. Of a GPU's threads a hundred thousand may
// look at the same time, and would keep the cache of the GPU from those that have their answers.
inline constexpr uint32_t kLooksMax = FW_ON_GPU ? 64 : ~uint32_t(0);

// Takes a slot for the calling thread, which looks at each slot once at most and waits for nothing.
// So a thread may hold slots while it takes another.
FW_DEVICE uint32_t take_slot(owner_requests& o) {
  const uint32_t first = atomic::add_relaxed(&o.next, 1u);
  const uint32_t looks = o.count < kLooksMax ? o.count : kLooksMax;
  for (uint32_t k = 0; k < looks; k++) {
    const uint32_t slot = (first + k) % o.count;
    const uint32_t seen = atomic::load_relaxed(&o.holders[slot]);
    if (seen == kHeld || (seen == kLent && !is_answered(o, slot))) continue;
    // Acquire: the last holder has read the buffer before we store to it.
    if (!atomic::cas_acq_rel(&o.holders[slot], seen, uint32_t(kHeld))) continue;
    // Look again: between the look and the claim another thread may have had it, and asked.
    if (seen == kFree || is_answered(o, slot)) return slot;
    atomic::store_release(&o.holders[slot], uint32_t(kLent));
  }
  return kNoSlot;
}

// Asks. The caller holds the slot, and has what others put in the buffer behind a sync.
FW_DEVICE void ask(owner_requests& o, uint32_t slot, owner_operation operation, uint64_t begin,
                   uint64_t bytes) {
  request_slot& s = o.slots[slot];
  atomic::store_relaxed(&s.operation, uint32_t(operation));
  atomic::store_relaxed(&s.begin, begin);
  atomic::store_relaxed(&s.bytes, bytes);
  // The request, and a store's bytes in the buffer, come before the owner sees that it is asked.
  atomic::fence_system();
  atomic::store_relaxed_system(&s.state, uint32_t(kAsked));
  if constexpr (FW_ON_GPU) return;  // it cannot wake the owner, who looks at the slots
  // Release: an owner that sees this ring looks at the slots behind it, and finds the request.
  atomic::add_release(&o.bell->rings, 1u);
  base::wake(&o.bell->rings);
}

// Whether the owner has answered; then what it wrote may be read.
FW_DEVICE bool has_answer(const owner_requests& o, uint32_t slot, uint32_t& status) {
  if (!is_answered(o, slot)) return false;
  // The owner's status and bytes come before our loads of them.
  atomic::fence_system();
  status = atomic::load_relaxed(&o.slots[slot].status);
  return true;
}

// Gives the slot of an answered request back. Release: the reads of its buffer come before.
FW_DEVICE void free_slot(owner_requests& o, uint32_t slot) {
  atomic::store_release(&o.holders[slot], uint32_t(kFree));
}

// Asks for a prefetch, if there is a slot.
FW_DEVICE void ask_ahead(owner_requests& o, uint64_t begin, uint64_t bytes) {
  const uint32_t slot = take_slot(o);
  if (slot == kNoSlot) return;
  ask(o, slot, kOwnerPrefetch, begin, bytes);
  // Release: who takes the slot over has our request behind it.
  atomic::store_release(&o.holders[slot], uint32_t(kLent));
}

// The owner's end, in one host thread.

// A request as the owner has copied it.
struct asked_request {
  uint64_t begin;
  uint64_t bytes;
  uint32_t slot;
  uint32_t operation;
};
static_assert(sizeof(asked_request) == 24);

// Copies the requests that are there; returns how many.
FW_DEVICE uint32_t look_for_requests(const request_slot* slots, uint32_t count,
                                     asked_request* found) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < count; i++) {
    const request_slot& s = slots[i];
    if (atomic::load_relaxed_system(&s.state) != kAsked) continue;
    // The client's request comes before our loads of it.
    atomic::fence_system();
    found[n++] = {atomic::load_relaxed(&s.begin), atomic::load_relaxed(&s.bytes), i,
                  atomic::load_relaxed(&s.operation)};
  }
  return n;
}

// Answers. What the owner has put in the buffer comes before.
FW_DEVICE void answer_request(request_slot& s, uint32_t status) {
  atomic::store_relaxed(&s.status, status);
  // The client reads status and buffer behind the state.
  atomic::fence_system();
  atomic::store_relaxed_system(&s.state, uint32_t(kAnswered));
}

}  // namespace fw::cache
