// The stream side of a GPU: one thread queues copies and words on a stream of its own.
//
// Kernels' batches need it, because their buffers are known from the regions only. No other thread
// of the engine calls CUDA. While a kernel runs that waits for a batch, no thread of the program
// may make a call of CUDA that waits for the device while it holds the driver, such as cuMemFree:
// this thread would wait for it, and the kernel for this thread. The time limit of the kernel's
// wait ends that with an error. The library's own calls wait for the kernel first (_jit/driver.py).
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>

#include "cuda/context.h"
#include "pipeline/batch_engine.h"

namespace fw::native::pipeline {

class CudaStream final : public StreamSide {
 public:
  // The caller keeps the context, the stream and the event (for use in calls) until `stop`.
  CudaStream(const cuda::Context& context, cuda::Handle stream, cuda::Handle event);
  ~CudaStream() override { stop(); }

  bool copy(uint64_t target, uint64_t source, uint64_t nbytes) override;
  bool store(uint64_t word, uint64_t value) override;
  bool finish(uint64_t word, uint64_t value, std::function<void()> failed) override;
  std::string failure() override;
  void stop() override;

 private:
  struct Job {
    uint64_t target = 0, source = 0, nbytes = 0;  // a copy, unless `nbytes` is 0
    uint64_t word = 0, value = 0;
    std::function<void()> failed;  // called before the word is stored if a copy has failed
  };

  bool queue(Job job);
  void run();
  void run_job(const Job& job);
  void fail(const char* call, cuda::Result result);

  const cuda::Context& context_;
  const cuda::Handle stream_, event_;
  std::mutex lock_;
  std::condition_variable work_;
  std::deque<Job> jobs_;
  bool stopping_ = false;
  std::string failure_;  // under the lock
  std::thread thread_;
};

}  // namespace fw::native::pipeline
