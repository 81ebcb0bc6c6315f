// A controller that is not the library's, served by launches of the CPU device through the
// contract.
//
// It has no threads: only threads of a launch that wait make it move, each on its own queue pair.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "cpu/cpu_device.h"
#include "flashwarp/base/atomic.cuh"
#include "flashwarp/base/platform.cuh"
#include "flashwarp/nvme/command.cuh"
#include "nvme/controller.h"
#include "turns.h"

using namespace fw;
using native::Controller;
using native::QueuePairAddresses;
using stress::require;

namespace {

constexpr uint32_t kQueues = 4;
constexpr uint32_t kDepth = 8;
constexpr uint32_t kReads = 5000;  // of each thread
constexpr uint32_t kBlocks = 256;

struct alignas(64) Queue {
  nvme::command sq[kDepth];
  nvme::completion cq[kDepth];
  uint32_t sq_doorbell = 0, cq_doorbell = 0;
  std::mutex lock;
  uint32_t head = 0;
  uint16_t phase = 1;
};

std::vector<QueuePairAddresses> addresses_of(std::vector<Queue>& queues) {
  std::vector<QueuePairAddresses> pairs;
  for (Queue& q : queues) {
    pairs.push_back({reinterpret_cast<uint64_t>(q.sq), reinterpret_cast<uint64_t>(q.cq),
                     reinterpret_cast<uint64_t>(&q.sq_doorbell),
                     reinterpret_cast<uint64_t>(&q.cq_doorbell), kDepth,
                     uint16_t(pairs.size() + 1)});
  }
  return pairs;
}

// Reads of host memory, one at a time; every hundredth fails.
class OtherController final : public Controller {
 public:
  OtherController(std::vector<Queue>& queues, const std::vector<char>& medium)
      : Controller(addresses_of(queues)), queues_(queues), medium_(medium) {}

  void start() override { serving_ = true; }
  void stop() override { serving_ = false; }
  bool serving() const override { return serving_; }
  void launch_begins() override { ++launches_; }
  void launch_ends() override { --launches_; }
  native::ControllerProgress progress() const override { return {commands_, 0}; }
  native::Description describe() const override { return {}; }
  uint32_t launches() const { return launches_; }

  std::vector<native::ErrorRecord> take_errors() override {
    const std::lock_guard guard(log_);
    return std::exchange(errors_, {});
  }

  int serve_some(uint32_t first_queue) override {
    if (!serving_) return -1;
    for (uint32_t i = 0; i < queues_.size(); ++i) {
      if (serve(queues_[(first_queue + i) % queues_.size()])) return 1;
    }
    return 0;
  }

 private:
  bool serve(Queue& q) {
    const std::unique_lock guard(q.lock, std::try_to_lock);
    if (!guard || atomic::load_acquire(&q.sq_doorbell) == q.head) return false;
    const nvme::command entry = q.sq[q.head];
    const bool fails = ++commands_ % 100 == 0;
    if (fails) {
      const std::lock_guard log(log_);
      native::ErrorRecord& record = errors_.emplace_back();
      record.operation = "read";
      record.lba = entry.cdw10;
      record.status = nvme::kUnrecoveredReadError;
    } else {
      std::memcpy(reinterpret_cast<void*>(entry.prp1), &medium_[entry.cdw10 * nvme::kLbaBytes],
                  nvme::kLbaBytes);
    }
    const uint16_t status = fails ? nvme::kUnrecoveredReadError : nvme::kSuccess;
    auto* words = reinterpret_cast<uint64_t*>(&q.cq[q.head]);
    q.head = (q.head + 1) % kDepth;
    atomic::store_release(&words[1], uint64_t(q.head) | uint64_t(entry.opcode_cid >> 16) << 32 |
                                         uint64_t(uint16_t(status << 1 | q.phase)) << 48);
    if (q.head == 0) q.phase ^= 1;
    return true;
  }

  std::vector<Queue>& queues_;
  const std::vector<char>& medium_;
  std::atomic<bool> serving_{false};
  std::atomic<uint32_t> launches_{0};
  std::atomic<uint64_t> commands_{0};
  std::mutex log_;
  std::vector<native::ErrorRecord> errors_;
};

struct Run {
  const std::vector<QueuePairAddresses>& pairs;
  const OtherController& controller;
  std::atomic<uint32_t> failures{0};
};

// What a thread of the launch does: a read at a time on its own pair, found by its addresses.
void read_blocks(Run* here) {
  Run& run = *here;
  require(run.controller.launches() == 1, "the controller knows of the launch");
  const QueuePairAddresses& pair = run.pairs[base::thread_index()];
  auto* sq = reinterpret_cast<nvme::command*>(pair.sq);
  auto* cq = reinterpret_cast<uint64_t*>(pair.cq);
  auto* doorbell = reinterpret_cast<uint32_t*>(pair.sq_doorbell);
  std::vector<char> block(nvme::kLbaBytes);
  for (uint32_t i = 0; i < kReads; ++i) {
    const uint32_t slot = i % kDepth, lba = (i * 7 + pair.id) % kBlocks;
    const uint64_t phase = i / kDepth % 2 == 0 ? 1 : 0;
    sq[slot] = nvme::block_command(nvme::kRead, uint16_t(i), lba, 1,
                                   reinterpret_cast<uint64_t>(block.data()), 0);
    atomic::store_release(doorbell, (slot + 1) % kDepth);
    uint64_t word = 0;
    while (word = atomic::load_acquire(&cq[2 * slot + 1]), (word >> 48 & 1) != phase) {
      base::pause(0);
    }
    require(uint16_t(word >> 32) == uint16_t(i), "the completion of this command");
    if (word >> 49 != nvme::kSuccess) {
      run.failures.fetch_add(1);
      continue;
    }
    require(block.front() == char(lba) && block.back() == char(lba), "the block's bytes");
  }
}

}  // namespace

int main() {
  std::vector<char> medium(kBlocks * nvme::kLbaBytes);
  for (size_t i = 0; i < medium.size(); ++i) medium[i] = char(i / nvme::kLbaBytes);
  std::vector<Queue> queues(kQueues);
  OtherController controller(queues, medium);
  native::CpuPool pool(kQueues);
  Run run{controller.queue_pairs(), controller};
  Run* const argument = &run;
  const void* const arguments[] = {&argument};

  controller.start();
  require(pool.launch(make_entry<&read_blocks>("read_blocks"), arguments, kQueues, {&controller}),
          "the pool is open");
  require(controller.launches() == 0, "the launch has ended");
  require(controller.progress().commands == kQueues * kReads, "each command once");
  const auto errors = controller.take_errors();
  require(errors.size() == run.failures && run.failures == kQueues * kReads / 100, "each failure");
  require(controller.take_errors().empty(), "once");
  controller.stop();
  require(controller.serve_some(0) == -1, "it has stopped");
  std::printf("%u reads, %u failures\n", kQueues * kReads, run.failures.load());
  return EXIT_SUCCESS;
}
