// The order of the stores to one array, and of its loads behind them, over the streams of a GPU.
//
// Each access of a writable array marks its end by an event, which is recorded with the access and
// never later: the handle of a stream may be gone by then, or belong to another one. A load waits
// for the stores before it, and a store for stores and loads, if they touch lines in common, ran on
// another stream and are not over. So a stream that goes on alone costs an event, and no wait.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "cuda/context.h"

namespace fw::native::cuda {

class Order {
 public:
  // Lines of the array, up to `end`.
  struct Lines {
    uint64_t begin = 0, end = UINT64_MAX;
  };

  // What an access needs between its beginning and its end. Accesses of several threads overlap.
  struct Access {
    bool stores = false;
    Lines lines;
    uint64_t stream = 0;   // a number that no other stream of the process, or the capture, has
    uint64_t capture = 0;  // the number of the capture that it is in, or 0
    uint64_t behind = 0;   // marks up to this one come first
    Handle event = nullptr;
  };

  explicit Order(const Context& context) : context_(context) {}
  Order(const Order&) = delete;
  Order& operator=(const Order&) = delete;

  // Makes later work on a stream wait for what comes before a load or a store. Returns kCaptured if
  // the stream is in a capture and something outside of it is not over. `end` must follow success.
  // Whoever knows that the stream is in none, says so.
  Result begin(Handle stream, bool stores, Lines lines, Access& access, bool in_none = false);
  // Marks the present end of the stream as that of the access.
  Result end(Handle stream, const Access& access);
  // Whether all accesses outside of captures are over: kSuccess, kNotReady, or what has failed.
  Result done();
  // Destroys the events. Nothing may begin any more.
  void close();

 private:
  struct Mark {
    uint64_t number = 0;  // in the order of the marks
    Access access;
  };

  static bool precedes(const Mark& mark, const Access& access);
  static bool replaces(const Access& access, const Mark& mark);
  Result begin_now(Handle stream, Access& access);
  Result look_at_capture(Handle stream, Access& access);
  Result end_now(Handle stream, const Access& access);
  Result take_event(Handle& event);
  void forget(size_t k);
  void make_room();

  const Context& context_;
  std::mutex mutex_;
  uint64_t last_ = 0;  // the number of the last mark
  std::vector<Mark> marks_;
  std::vector<Handle> free_;  // events
};

}  // namespace fw::native::cuda
