// The heartbeats of this process: words by which device code knows that the process runs.
//
// One thread of the process advances them all, while there are any. It waits for nothing else: a
// hanging storage blocks threads that serve, but not this one; a stopped process stops it too. So
// it also looks at the doorbells of all controllers that sleep.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "base/fork_guard.h"

namespace fw::native {

class Heart {
 public:
  // A forked child has one of its own.
  static Heart& of_process();

  // A word for all arrays whose device reads this process's own memory.
  static uint32_t* shared_word();

  // Advances a word until `remove`, which stores 0: there is no heartbeat. A word that was added
  // several times ends with the last removal. Throws std::system_error if no thread can be started.
  void add(uint32_t* word);
  void remove(uint32_t* word);

  // Calls `look`, which must not block, every few milliseconds until `unwatch`. Whoever watches has
  // added a word, and removes it later.
  void watch(const void* who, std::function<void()> look);
  void unwatch(const void* who);

 private:
  Heart() = default;
  void beat(uint32_t thread);

  const ForkGuard fork_guard_;
  std::mutex mutex_;
  std::condition_variable ends_;
  std::map<uint32_t*, uint32_t> words_;  // how often each was added
  std::map<const void*, std::function<void()>> looks_;
  uint32_t beats_ = 1;
  uint32_t current_ = 0;  // counts threads: all but the last one end
  std::thread thread_;
};

}  // namespace fw::native
