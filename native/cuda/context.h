// The calls of the CUDA driver that a step of a program makes: launches, the order of streams,
// waits and captures.
//
// Python makes all other calls of the driver. These are here because one call through Python takes
// as long as a small kernel. The driver is found at run time: the module is imported on machines
// without one. Every call returns the driver's result, and Python makes an exception of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/fork_guard.h"

namespace fw::native::cuda {

// CUresult. Negative ones are ours.
using Result = int;
inline constexpr Result kSuccess = 0;
inline constexpr Result kNotReady = 600;
inline constexpr Result kCaptureImplicit = 906;  // the work would be drawn into a capture
inline constexpr Result kForked = -1;            // the context belongs to the parent process
inline constexpr Result kCaptured = -2;  // a stream in a capture cannot wait for another one

// CUstream, CUfunction, CUevent, CUgraph, CUcontext.
using Handle = void*;

struct Driver;

// How many CUDA graphs exist that use something. The driver's threads count graphs down.
using GraphCount = std::atomic<int64_t>;

// What is captured on a stream at the moment.
struct Capture {
  Result result = kSuccess;
  bool active = false;
  uint64_t id = 0;  // of the capture, unique in the process
};

// One piece of a copy.
struct Piece {
  uint64_t target = 0;
  uint64_t source = 0;
  size_t nbytes = 0;
};

// CUmemorytype. Memory that the driver does not know is the host's, and not pinned.
enum class Memory : int { kUnknown = 0, kPinned = 1, kDevice = 2 };

class Order;

// An array that a launch loads from, or stores to; null: it keeps no order.
struct Accessed {
  Order* order = nullptr;
  bool stores = false;
};

// One GPU's primary context. Any thread may call; each call makes the context current for as long
// as it runs.
class Context {
 public:
  // Throws std::runtime_error if the driver, or one of the calls, is not there.
  explicit Context(Handle context);

  // Names the library's own stream. Work waits for it only after calls that have used it.
  void set_own(Handle stream);
  // Says that others have queued work on the own stream; with `always` they may do so at any time.
  void note_own(bool always) const;

  // Makes the context current until `exit`, and lets this thread call what would otherwise break a
  // capture on another stream. The calls nest.
  Result enter() const;
  void exit() const;

  // Calls a function while the context is current, so that calls inside it need not make it so.
  Result within(const std::function<Result()>& act) const;

  Result launch(Handle function, uint32_t blocks, uint32_t block_threads, void** params,
                Handle stream) const;
  // Makes later work on `after` wait for the present work on `before`; an idle one costs no event.
  // `event` is used inside the call only, so threads may share it.
  Result order(Handle before, Handle after, Handle event) const;
  // Launches after the present work on other streams; with `both_ways` their later work waits for
  // the launch, too. If one of all these streams is being captured, it does nothing, and returns
  // kCaptured. `event` is as for `order`. It launches in the order of the accesses to `arrays`,
  // too.
  Result launch_among(std::span<const Handle> others, bool both_ways, Handle event, Handle function,
                      uint32_t blocks, uint32_t block_threads, void** params, Handle stream,
                      std::span<const Accessed> arrays = {}) const;
  Result record(Handle event, Handle stream) const;
  Result done(Handle stream) const;
  Result event_done(Handle event) const;
  // Events without times.
  Result create_event(Handle& event) const;
  void destroy_event(Handle event) const;
  // Makes later work on a stream wait for what an event has recorded, perhaps in the same capture.
  Result wait_event(Handle stream, Handle event) const;
  // The number of a stream, which no other one of the process gets, even with the same handle.
  Result number(Handle stream, uint64_t& found) const;
  // Asks again and again whether a stream is done, for at most this long.
  Result poll(Handle stream, int64_t microseconds) const;
  // Waits until one of these events is done, at most this long; at first it asks without a pause.
  Result wait_any(const std::vector<Handle>& events, int64_t microseconds) const;
  Result fill(uint64_t address, uint32_t word, size_t count, Handle stream) const;

  // Copies. A default stream takes one piece at a time, and no others before it; `event` is as for
  // `order`.
  //
  // Copies pieces on `stream` after the present work on other streams. Records `begin` before the
  // first piece, and `end` behind the last, unless they are null. `recorded` says whether `end`
  // was: then what was queued before a failure ends before it.
  Result copy(const std::vector<Handle>& others, Handle event, const std::vector<Piece>& pieces,
              Handle begin, Handle end, Handle stream, bool& recorded) const;
  // Whether the driver copies many pieces in one call.
  bool copies_batches() const;
  Result memory(uint64_t address, Memory& kind) const;
  // The order of a stream and of threads of the host, by words in pinned memory. Later work on the
  // stream waits until the word is at least `value`, or stores it after the present work.
  Result wait_word(uint64_t address, uint64_t value, Handle stream) const;
  Result write_word(uint64_t address, uint64_t value, Handle stream) const;

  // Captures. A stream that is not being captured must not be given to the last two.
  Capture capture(Handle stream) const;
  // Each replay calls `call(argument)` on a thread of the driver's, after what the stream has
  // queued so far and beside what it queues next.
  Result capture_call(Handle stream, void (*call)(void*), void* argument) const;
  // Counts the graph in `graphs` for as long as it, or what was instantiated from it, exists.
  Result capture_count(Handle stream, std::shared_ptr<GraphCount> graphs) const;

 private:
  class Current;

  void used(Handle stream) const;
  bool idle(Handle stream, Result& result) const;
  Result is_captured(Handle stream) const;
  // Makes streams wait for the present work on one, whatever they are.
  Result wait_now(Handle before, std::span<const Handle> after, Handle event) const;
  Result order_now(Handle before, Handle after, Handle event) const;
  Result launch_ordered(Handle function, uint32_t blocks, uint32_t block_threads, void** params,
                        Handle stream, std::span<const Accessed> arrays) const;
  Result copy_pieces(const std::vector<Piece>& pieces, Handle stream) const;

  const Driver& driver_;
  Handle context_;
  ForkGuard fork_;
  Handle own_ = nullptr;
  // Work was queued on the own stream so many times. It was done after so many: the stream is idle
  // while these are equal. Asking the driver takes half as long as a launch.
  mutable std::atomic<uint64_t> own_uses_{0}, own_done_{0};
  mutable std::atomic<bool> own_shared_{false};
  // Another thread must not record the event of `order` between its record and the wait for it.
  mutable std::mutex ordering_;
};

}  // namespace fw::native::cuda
