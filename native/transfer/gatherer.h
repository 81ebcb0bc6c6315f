// Host threads that collect scattered pieces of one size, of memory or a file, in one contiguous
// buffer, in the buffer's order.
//
// Any number of threads may call; each call takes part in its own work and returns when all of it
// is done. Waits for no lock while data moves.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/fork_guard.h"
#include "io/io_engine.h"

namespace fw::native {

class Gatherer {
 public:
  // Pieces [0, count) of `piece_bytes` at `offsets` of a source; piece i belongs to
  // buffer + i * piece_bytes.
  struct Pieces {
    uint64_t buffer = 0;
    const int64_t* offsets = nullptr;
    uint64_t count = 0;
    uint64_t piece_bytes = 0;
  };
  // The first piece that failed, by its index; `error` is 0, or an errno value. EFAULT: a page of a
  // mapping is gone. ENODATA: the file ends before the piece does.
  struct Outcome {
    int error = 0;
    uint64_t piece = 0;
  };

  // Reads in flight by one thread.
  static constexpr uint32_t kInFlight = 64;

  // At most `threads` threads work at a time, the caller among them.
  explicit Gatherer(uint32_t threads, uint32_t in_flight = kInFlight);
  ~Gatherer();
  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  uint32_t threads() const { return threads_; }
  // How files are read: "io_uring", or a thread pool and why.
  std::string file_engine();

  // The memory at `base`, such as a mapped file: its pages may have gone. `checksums` gets the
  // CRC-32C of each piece, unless it is null or the call fails.
  Outcome gather(uint64_t base, const Pieces& pieces, uint32_t* checksums = nullptr);
  // A file. With O_DIRECT, the caller sees to alignment.
  Outcome read(int fd, const Pieces& pieces);

  // Calls `act` for parts of [0, count), at most `step` each, by all threads.
  using Act = std::function<Outcome(uint64_t begin, uint64_t end)>;
  Outcome run(uint64_t count, uint64_t step, Act act);

  // Ends the threads, after the work that has begun; later calls throw std::runtime_error.
  void stop();

 private:
  struct Task;
  struct State;

  void serve();
  static void work(Task& task);
  Outcome read_range(int fd, const Pieces& pieces, uint64_t begin, uint64_t end);
  std::unique_ptr<IoEngine> take_engine();
  void give_engine(std::unique_ptr<IoEngine> engine);

  const uint32_t threads_;
  const uint32_t in_flight_;
  std::unique_ptr<State> state_;
  ForkGuard fork_guard_;
};

}  // namespace fw::native
