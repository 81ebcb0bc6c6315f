// For the sanitizers: submitters, controller threads and helping waiters on the same queue pairs.
//
// Each submitter owns some rings and a part of the namespace, writes patterns that contain their
// place and version, reads them back and checks every byte. While it waits it serves the
// controller, as waiting device threads do. Every kind of storage, both I/O engines and modelled
// drives are tested in turn, and the controller stops and starts again in between.
// FLASHWARP_STRESS_SECONDS is divided among them.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/host_memory.h"
#include "nvme/software/software_controller.h"
#include "storage/composite_storage.h"
#include "storage/file_storage.h"
#include "storage/memory_storage.h"
#include "testing/fault_plan.h"
#include "testing/faulty_storage.h"
#include "turns.h"

using namespace fw::native;
namespace nvme = fw::nvme;
using fw::stress::require;

namespace {

constexpr uint32_t kSubmitters = 3;
constexpr uint32_t kDepth = 16;
constexpr uint32_t kChunkBytes = 8192;    // one command's data
constexpr uint32_t kChunks = kDepth - 1;  // a submitter's part: one chunk a slot
constexpr uint64_t kPartBytes = uint64_t(kChunks) * kChunkBytes;
constexpr uint64_t kNamespaceBytes = kSubmitters * kPartBytes;
constexpr uint32_t kRoundsMin = 8;  // however slow the machine
constexpr uint32_t kLives = 2;      // starts of one controller
constexpr uint32_t kCases = 29;     // calls of `stress`
constexpr uint64_t kPageBytes = 4096;

class Submitter {
 public:
  explicit Submitter(uint32_t number)
      : number_(number),
        sq_(take<nvme::command>(kDepth * sizeof(nvme::command))),
        cq_(take<nvme::completion>(kDepth * sizeof(nvme::completion))),
        bells_(take<uint32_t>(4096)),
        buffers_(take<std::byte>(kPartBytes)) {}

  QueuePairAddresses addresses() const {
    return {reinterpret_cast<uint64_t>(sq_),
            reinterpret_cast<uint64_t>(cq_),
            reinterpret_cast<uint64_t>(&bells_[0]),
            reinterpret_cast<uint64_t>(&bells_[16]),
            kDepth,
            uint16_t(number_ + 1)};
  }
  std::pair<uint64_t, uint64_t> region() const {
    return {reinterpret_cast<uint64_t>(buffers_), kPartBytes};
  }

  // Writes every chunk, flushes, and reads every chunk back, some entries at each ring of the bell.
  void round(Controller& controller, uint32_t version, std::mt19937& random) {
    for (uint32_t i = 0; i < kChunks; ++i) fill(i, version);
    run(controller, nvme::kWrite, random);
    if (version % 16 == 0) run(controller, nvme::kFlush, random);
    std::memset(buffers_, 0xEE, kPartBytes);
    run(controller, nvme::kRead, random);
    for (uint32_t i = 0; i < kChunks; ++i) verify(i, version);
  }

  // Rings the bell for reads and leaves them alone; `collect` takes their completions.
  void leave_reads() {
    for (uint32_t i = 0; i < kChunks; ++i) {
      pending_ |= 1u << i;
      write_entry(nvme::kRead, i);
    }
    ring();
  }

  void collect() {
    for (uint32_t i = 0; i < kChunks; ++i) {
      const uint16_t status = take();
      require(status == nvme::kSuccess || status == nvme::kCommandAborted, "status after stop");
    }
    require(!is_ready(), "one completion a command");
  }

 private:
  template <typename Value>
  Value* take(uint64_t nbytes) {
    return static_cast<Value*>(memory_.emplace_back(nbytes, 4096).address());
  }
  uint64_t* words(uint32_t chunk) {
    return reinterpret_cast<uint64_t*>(buffers_ + uint64_t(chunk) * kChunkBytes);
  }
  uint64_t pattern(uint32_t chunk, uint32_t version, uint32_t word) const {
    return uint64_t(version) << 40 | uint64_t(number_) << 32 | chunk << 16 | word;
  }
  void fill(uint32_t chunk, uint32_t version) {
    for (uint32_t i = 0; i < kChunkBytes / 8; ++i) words(chunk)[i] = pattern(chunk, version, i);
  }
  void verify(uint32_t chunk, uint32_t version) {
    for (uint32_t i = 0; i < kChunkBytes / 8; ++i) {
      require(words(chunk)[i] == pattern(chunk, version, i), "data read is data written");
    }
  }

  void write_entry(uint8_t opcode, uint32_t chunk) {
    const uint64_t lba = (number_ * kPartBytes + uint64_t(chunk) * kChunkBytes) / nvme::kLbaBytes;
    const auto address = reinterpret_cast<uint64_t>(words(chunk));
    sq_[tail_] = nvme::block_command(opcode, uint16_t(chunk), lba, kChunkBytes / nvme::kLbaBytes,
                                     address, address + kPageBytes);
    tail_ = (tail_ + 1) % kDepth;
  }
  void ring() { __atomic_store_n(&bells_[0], tail_, __ATOMIC_RELEASE); }

  // The upper half of the entry at the head: sqhd, sqid, cid, status. One acquire load of the size
  // that the controller stores, which is what the thread sanitizer pairs with it.
  uint64_t upper_half() const {
    const auto* words = reinterpret_cast<const uint64_t*>(&cq_[head_]);
    return __atomic_load_n(&words[1], __ATOMIC_ACQUIRE);
  }
  bool is_ready() const { return (upper_half() >> 48 & 1) == phase_; }

  uint16_t take() {
    require(is_ready(), "a completion is there");
    const uint64_t entry = upper_half();
    const uint16_t cid = uint16_t(entry >> 32);
    const uint16_t status = uint16_t(entry >> 49);
    require((pending_ >> cid & 1) != 0, "a completion is for a pending command");
    pending_ &= ~(1u << cid);
    head_ = (head_ + 1) % kDepth;
    if (head_ == 0) phase_ ^= 1;
    __atomic_store_n(&bells_[16], head_, __ATOMIC_RELEASE);
    return status;
  }

  void run(Controller& controller, uint8_t opcode, std::mt19937& random) {
    uint32_t submitted = 0;
    while (submitted < kChunks || pending_ != 0) {
      const uint32_t burst = std::min(kChunks - submitted, uint32_t(random() % 5));
      for (uint32_t i = 0; i < burst; ++i) {
        pending_ |= 1u << submitted;
        write_entry(opcode, submitted++);
      }
      if (burst != 0) ring();
      while (is_ready()) require(take() == nvme::kSuccess, "status");
      require(controller.serve_some(number_) >= 0, "the controller serves");
    }
  }

  const uint32_t number_;
  std::deque<HostMemory> memory_;
  nvme::command* const sq_;
  nvme::completion* const cq_;
  uint32_t* const bells_;
  std::byte* const buffers_;
  uint32_t tail_ = 0;
  uint32_t head_ = 0;
  uint16_t phase_ = 1;
  uint32_t pending_ = 0;
};

// A drive of some microseconds, whose completions overtake each other.
SsdParameters drive(uint32_t seed) {
  const SsdDirection direction = {{{512, 1e6}}, 1e10, {1'000, 5'000, 20'000, 60'000}};
  return {direction, direction, 8, seed};
}

void stress(const char* name, std::shared_ptr<Storage> storage, uint32_t threads, uint32_t seed,
            bool modelled = false) {
  std::vector<std::unique_ptr<Submitter>> submitters;
  std::vector<QueuePairAddresses> pairs;
  std::vector<std::pair<uint64_t, uint64_t>> regions;
  for (uint32_t i = 0; i < kSubmitters; ++i) {
    submitters.push_back(std::make_unique<Submitter>(i));
    pairs.push_back(submitters.back()->addresses());
    regions.push_back(submitters.back()->region());
  }
  ControllerOptions options;
  options.threads = threads;
  options.page_bytes = kPageBytes;
  if (modelled) options.model = drive(seed);
  SoftwareController controller(std::move(storage), pairs, regions, options);
  const std::chrono::duration<double> share(fw::stress::seconds() / (kCases * kLives));
  std::atomic<uint64_t> rounds = 0;
  std::printf("%s, %s, %u threads%s\n", name, controller.engine_description().c_str(), threads,
              modelled ? ", modelled drive" : "");
  for (uint32_t life = 0; life < kLives; ++life) {
    controller.start();
    const auto end = std::chrono::steady_clock::now() + share;
    std::vector<std::thread> workers;
    for (uint32_t i = 0; i < kSubmitters; ++i) {
      workers.emplace_back([&, i] {
        std::mt19937 random(seed + i);
        uint32_t v = 0;
        while (v < kRoundsMin || std::chrono::steady_clock::now() < end) {
          submitters[i]->round(controller, ++v, random);
        }
        rounds += v;
      });
    }
    for (std::thread& worker : workers) worker.join();
    for (auto& submitter : submitters) submitter->leave_reads();
    controller.stop();
    for (auto& submitter : submitters) submitter->collect();
  }
  require(controller.counters().commands[size_t(CommandKind::kWrite)] == rounds * kChunks,
          "every write was counted once");
}

// A file of the namespace's size that is gone when the program ends.
std::shared_ptr<Storage> open_file(bool direct, uint64_t offset) {
  std::string path = "/tmp/flashwarp_stress_XXXXXX";
  const int fd = mkstemp(path.data());
  require(fd >= 0 && ftruncate(fd, off_t(kNamespaceBytes + offset)) == 0, "temporary file");
  close(fd);
  FileOptions options;
  options.offset = offset;
  options.writable = true;
  options.direct = direct;
  std::shared_ptr<Storage> storage;
  try {
    storage = FileStorage::open(path, options);
  } catch (const OpenError& refused) {
    std::printf("skipped: %s\n", refused.what());
  }
  unlink(path.c_str());
  return storage;
}

// What a kernel may do to any transfer: interrupt it, cut it short, finish it late.
std::shared_ptr<Storage> with_faults(std::shared_ptr<Storage> storage, uint32_t seed) {
  std::vector<FaultRule> rules(4);
  rules[0] = {FaultOperation::kAny, FaultKind::kError, EINTR, 0, 0.1, {}};
  rules[1] = {FaultOperation::kRead, FaultKind::kShort, 0, 0, 0.1, {}};
  rules[2] = {FaultOperation::kWrite, FaultKind::kShort, 0, 0, 0.1, {}};
  rules[3] = {FaultOperation::kAny, FaultKind::kDelay, 0, 50, 0.02, {}};
  auto plan = std::make_shared<FaultPlan>(seed, std::move(rules));
  return std::make_shared<FaultyStorage>(std::move(storage), std::move(plan), false);
}

void stress_files(uint32_t seed) {
  stress("buffered file", open_file(false, 0), 2, seed, true);
  for (const bool direct : {false, true}) {
    if (auto file = open_file(direct, 128)) stress("faulty file", with_faults(file, seed), 2, seed);
    for (const uint64_t offset : {uint64_t(0), uint64_t(128)}) {
      auto file = open_file(direct, offset);
      if (file == nullptr) continue;
      stress(direct ? "direct file" : "buffered file", file, 2, seed);
    }
    auto first = open_file(direct, 0);
    auto second = open_file(direct, 0);
    if (first == nullptr || second == nullptr) continue;
    auto replicated = std::make_shared<ReplicatedStorage>(StorageList{first, second});
    stress("replicated files", replicated, 1, seed);
    auto striped = std::make_shared<StripedStorage>(StorageList{first, second}, 4096, 0);
    stress("striped files", striped, 2, seed);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const uint32_t seed = fw::stress::seed_of(count, arguments);
  const HostMemory memory(kNamespaceBytes, 4096);
  for (const uint32_t threads : {0u, 1u, 3u}) {
    auto storage = std::make_shared<MemoryStorage>(memory.address(), kNamespaceBytes, true);
    stress("memory", storage, threads, seed);
    stress("memory", storage, threads, seed, true);
  }
  auto plain = std::make_shared<MemoryStorage>(memory.address(), kNamespaceBytes, true);
  stress("faulty memory", with_faults(plain, seed), 2, seed);
  stress_files(seed);
  setenv("FLASHWARP_IO_ENGINE", "threads", 1);
  stress_files(seed);
  return EXIT_SUCCESS;
}
