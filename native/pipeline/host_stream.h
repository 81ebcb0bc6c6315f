// The stream side of the CPU device: a thread that copies and stores words in order.
#pragma once

#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>

#include "pipeline/batch_engine.h"
#include "transfer/host_copier.h"

namespace fw::native::pipeline {

class HostStream final : public StreamSide {
 public:
  bool copy(uint64_t target, uint64_t source, uint64_t nbytes) override {
    return queue([&] { return copier_.copy({{target, source, nbytes}}); });
  }
  bool store(uint64_t word, uint64_t value) override {
    return queue([&] { return copier_.write_word(word, value); });
  }
  bool finish(uint64_t word, uint64_t value, std::function<void()>) override {
    // Its copies are between host memories that the engine's callers keep: none fails.
    return store(word, value);
  }
  std::string failure() override { return "the thread that copies was stopped"; }
  void stop() override { copier_.stop(); }

 private:
  template <typename Queue>
  bool queue(Queue queue) {
    try {
      copier_.forget(copier_.ended());
      queue();
      return true;
    } catch (const std::runtime_error&) {  // also of a thread that cannot be started
      return false;
    }
  }

  HostCopier copier_;
};

}  // namespace fw::native::pipeline
