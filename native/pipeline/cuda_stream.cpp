#include "pipeline/cuda_stream.h"

#include <atomic>
#include <chrono>

namespace fw::native::pipeline {
namespace {

// What a link moves in this time is more than any ring has.
constexpr std::chrono::seconds kDrainLimit{10};
constexpr int64_t kPollMicroseconds = 1000;

}  // namespace

CudaStream::CudaStream(const cuda::Context& context, cuda::Handle stream, cuda::Handle event)
    : context_(context), stream_(stream), event_(event), thread_([this] { run(); }) {}

bool CudaStream::copy(uint64_t target, uint64_t source, uint64_t nbytes) {
  return queue({target, source, nbytes, 0, 0, {}});
}

bool CudaStream::store(uint64_t word, uint64_t value) { return queue({0, 0, 0, word, value, {}}); }

bool CudaStream::finish(uint64_t word, uint64_t value, std::function<void()> failed) {
  return queue({0, 0, 0, word, value, std::move(failed)});
}

std::string CudaStream::failure() {
  const std::lock_guard guard(lock_);
  return failure_.empty() ? "it was stopped" : failure_;
}

bool CudaStream::queue(Job job) {
  {
    const std::lock_guard guard(lock_);
    if (stopping_) return false;
    jobs_.push_back(std::move(job));
  }
  work_.notify_one();
  return true;
}

void CudaStream::run() {
  std::unique_lock guard(lock_);
  while (true) {
    work_.wait(guard, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    guard.unlock();
    run_job(job);
    guard.lock();
  }
}

// After a failure nothing is copied any more, and this thread stores the words, so that nobody
// waits for a stream that is lost.
void CudaStream::run_job(const Job& job) {
  bool lost;
  {
    const std::lock_guard guard(lock_);
    lost = !failure_.empty();
  }
  if (job.nbytes != 0) {
    if (lost) return;
    bool recorded = false;
    const cuda::Result result = context_.copy({}, event_, {{job.target, job.source, job.nbytes}},
                                              nullptr, event_, stream_, recorded);
    if (result != cuda::kSuccess) fail("a copy", result);
    return;
  }
  if (!lost) {
    const cuda::Result result = context_.write_word(job.word, job.value, stream_);
    if (result == cuda::kSuccess) return;
    fail("cuStreamWriteValue64", result);
  }
  if (job.failed) job.failed();
  // Release: who sees the word sees the failure.
  std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(job.word))
      .store(job.value, std::memory_order_release);
}

void CudaStream::fail(const char* call, cuda::Result result) {
  const std::lock_guard guard(lock_);
  if (failure_.empty()) failure_ = std::string(call) + " returned " + std::to_string(result);
}

void CudaStream::stop() {
  {
    const std::lock_guard guard(lock_);
    stopping_ = true;
  }
  work_.notify_one();
  if (!thread_.joinable()) return;
  thread_.join();
  // The copies that were queued use the ring.
  const auto start = std::chrono::steady_clock::now();
  while (context_.poll(stream_, kPollMicroseconds) == cuda::kNotReady &&
         std::chrono::steady_clock::now() - start < kDrainLimit) {
  }
}

}  // namespace fw::native::pipeline
