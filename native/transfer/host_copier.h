// Copies in host memory by a thread, in the order in which they were queued: the copy engine of the
// CPU device, and as a stream of a GPU it can wait for a word of memory and store one.
//
// Any thread may call. The caller keeps the memory of a copy valid until the copy has ended.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/fork_guard.h"

namespace fw::native {

struct CopyPiece {
  uint64_t target = 0;
  uint64_t source = 0;
  uint64_t nbytes = 0;
};

class HostCopier {
 public:
  static constexpr int64_t kNone = -1;

  // What became of a job.
  struct Ended {
    uint64_t number = 0;
    int64_t failed = kNone;  // the first piece whose source could not be read
    uint64_t nanoseconds = 0;
    bool withdrawn = false;  // the copier was stopped before the job ran
  };

  HostCopier();
  ~HostCopier();
  HostCopier(const HostCopier&) = delete;
  HostCopier& operator=(const HostCopier&) = delete;

  // Each queues a job, and returns its number: 1, 2, ... Throws std::system_error if no thread can
  // be started, and std::runtime_error after `stop` or in a forked child.
  uint64_t copy(std::vector<CopyPiece> pieces);
  // Later jobs wait until the word is `value` or more.
  uint64_t wait_word(uint64_t word, uint64_t value);
  uint64_t write_word(uint64_t word, uint64_t value);

  // Jobs up to this number have ended. The address is that of a word, for `wait_word` of another
  // copier that ends before this one.
  uint64_t ended() const;
  uint64_t ended_address() const;
  // Waits until job `number` has ended, at most this long.
  bool wait(uint64_t number, int64_t microseconds) const;
  // The jobs that have ended and are not forgotten, in order.
  std::vector<Ended> results() const;
  void forget(uint64_t last_number);

  // Ends the thread after the piece that it copies. Jobs that have not run are withdrawn.
  void stop();

 private:
  struct Job {
    enum class Kind : uint8_t { kCopy, kWait, kWrite };
    Kind kind = Kind::kCopy;
    uint64_t number = 0;
    std::vector<CopyPiece> pieces;
    uint64_t word = 0;
    uint64_t value = 0;
  };
  struct State {
    std::mutex lock;
    std::condition_variable work;   // for the thread
    std::condition_variable moved;  // for those who wait
    std::deque<Job> jobs;
    std::deque<Ended> results;
    uint64_t queued = 0;
    // Stored under the lock. Read without it by copiers that wait for this one.
    std::atomic<uint64_t> ended{0};
    bool stopping = false;
    std::thread thread;
  };

  uint64_t queue(Job job);
  void run();
  Ended run_job(const Job& job);
  bool stopping() const;

  std::unique_ptr<State> state_ = std::make_unique<State>();
  ForkGuard fork_guard_;
};

}  // namespace fw::native
