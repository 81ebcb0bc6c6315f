// The cost of one command without data for the controller's thread.
//
// `alone`: one thread rings whole queues and then serves them with warm caches, which measures the
// instructions. `fed`: a second thread acts as the device, as fast as it can. Every line of the
// rings then crosses between cores, as if a GPU wrote it over PCIe.
// `modelled`: alone, with completions held for a modelled drive of 64 units.
// `cached`: 4 KiB reads of a file in the page cache, against the same reads by plain pread().
// Expected: 5 ns alone, 11 ns fed (90 M commands/s), 30 ns modelled, a pread and 5 % cached. Prints
// all; fails if alone, fed or modelled take ten times that.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "base/host_memory.h"
#include "flashwarp/nvme/command.cuh"
#include "nvme/software/software_controller.h"
#include "storage/file_storage.h"
#include "storage/memory_storage.h"

using namespace fw::native;
namespace nvme = fw::nvme;

namespace {

constexpr uint32_t kDepth = 1024;
constexpr uint32_t kQueues = 16;
constexpr uint64_t kNamespaceBytes = 64 << 20;
constexpr uint32_t kChunk = 32;  // the feeder consumes as a warp does

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Rings {
  HostMemory sq_memory{kDepth * 64, 4096};
  HostMemory cq_memory{kDepth * 16, 4096};
  HostMemory bells_memory{4096, 4096};
  nvme::command* sq = static_cast<nvme::command*>(sq_memory.address());
  nvme::completion* cq = static_cast<nvme::completion*>(cq_memory.address());
  uint32_t* bells = static_cast<uint32_t*>(bells_memory.address());
  uint32_t tail = 0;
  uint32_t head = 0;
  uint16_t phase = 1;

  explicit Rings(uint64_t base) {
    for (uint32_t i = 0; i < kDepth; ++i) write(i, base);
  }

  void write(uint32_t slot, uint64_t base) {
    const uint64_t lba = (slot * 7919ull) % (kNamespaceBytes / 512 - 8);
    sq[slot] = nvme::block_command(nvme::kRead, uint16_t(slot), lba, 8, base + lba * 512, 0);
  }

  void ring() { __atomic_store_n(&bells[0], tail, __ATOMIC_RELEASE); }

  // Consumes one chunk when it is complete.
  bool consume() {
    const uint32_t last = (head + kChunk - 1) % kDepth;
    const uint16_t status = __atomic_load_n(&cq[last].status, __ATOMIC_ACQUIRE);
    if ((status & 1) != phase) return false;
    head = (head + kChunk) % kDepth;
    if (head == 0) phase ^= 1;
    __atomic_store_n(&bells[16], head, __ATOMIC_RELEASE);
    return true;
  }

  QueuePairAddresses addresses(uint16_t id) const {
    return {reinterpret_cast<uint64_t>(sq),
            reinterpret_cast<uint64_t>(cq),
            reinterpret_cast<uint64_t>(&bells[0]),
            reinterpret_cast<uint64_t>(&bells[16]),
            kDepth,
            id};
  }
};

// Service times from 7 to 20 us, as an Optane's, divided by 20 so that the drive, with 64 units, is
// faster than what is measured.
SsdParameters drive() {
  const SsdDirection direction = {{{512, 1e9}}, 1e15, {350, 450, 500, 600, 1000}};
  return {direction, direction, 64, 1};
}

struct Setup {
  HostMemory memory{kNamespaceBytes, 2 << 20};
  uint64_t base = reinterpret_cast<uint64_t>(memory.address());
  std::vector<std::unique_ptr<Rings>> rings;
  std::unique_ptr<SoftwareController> controller;

  explicit Setup(uint32_t threads, bool modelled = false) {
    std::vector<QueuePairAddresses> pairs;
    for (uint32_t i = 0; i < kQueues; ++i) {
      rings.push_back(std::make_unique<Rings>(base));
      pairs.push_back(rings.back()->addresses(uint16_t(i + 1)));
    }
    ControllerOptions options;
    options.threads = threads;
    if (modelled) options.model = drive();
    auto storage = std::make_shared<MemoryStorage>(memory.address(), kNamespaceBytes, true);
    controller = std::make_unique<SoftwareController>(
        storage, pairs, std::vector<std::pair<uint64_t, uint64_t>>(), options);
    controller->start();
  }
};

double alone_ns(bool modelled) {
  Setup setup(0, modelled);
  uint64_t served = 0;
  double spent = 0;
  while (spent < 0.5) {
    for (auto& rings : setup.rings) {
      rings->tail = (rings->tail + kDepth - kChunk) % kDepth;
      rings->ring();
    }
    const double start = now_s();
    if (modelled) {
      // Each command moves twice: it is fetched, and its completion is posted.
      const uint64_t all = 2 * kQueues * (kDepth - kChunk);
      for (uint64_t moved = 0; moved < all;) moved += uint64_t(setup.controller->serve_some(0));
      served += all / 2;
    } else {
      while (const int moved = setup.controller->serve_some(0)) served += uint64_t(moved);
    }
    spent += now_s() - start;
    for (auto& rings : setup.rings) {
      while (rings->consume()) {
      }
    }
  }
  return spent / double(served) * 1e9;
}

double fed_ns(bool rewrite, bool modelled = false) {
  Setup setup(1, modelled);
  uint64_t done = 0;
  for (auto& rings : setup.rings) {
    rings->tail = kDepth - kChunk;
    rings->ring();
  }
  const double start = now_s();
  double end = start;
  while (end - start < 1.0) {
    for (int pass = 0; pass < 64; ++pass) {
      for (auto& rings : setup.rings) {
        uint32_t chunks = 0;
        while (chunks < 8 && rings->consume()) {
          for (uint32_t i = 0; rewrite && i < kChunk; ++i) {
            rings->write((rings->tail + i) % kDepth, setup.base);
          }
          rings->tail = (rings->tail + kChunk) % kDepth;
          ++chunks;
        }
        if (chunks != 0) rings->ring();
        done += chunks * kChunk;
      }
    }
    end = now_s();
  }
  setup.controller->stop();
  return (end - start) / double(done) * 1e9;
}

// A file in the page cache, removed when it is closed.
std::string make_file() {
  std::string path = "/tmp/flashwarp_cost_XXXXXX";
  const int fd = mkstemp(path.data());
  std::vector<char> block(1 << 20, 'x');
  for (uint64_t at = 0; at < kNamespaceBytes; at += block.size()) {
    write_fully(fd, block.data(), block.size(), at);
  }
  close(fd);
  return path;
}

double pread_ns(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY);
  const HostMemory memory(kDepth * 4096, 4096);
  auto* buffer = static_cast<char*>(memory.address());
  const double start = now_s();
  uint64_t done = 0;
  for (; now_s() - start < 0.5;) {
    for (uint32_t i = 0; i < kDepth; ++i, ++done) {
      const uint64_t lba = (i * 7919ull) % (kNamespaceBytes / 512 - 8);
      read_fully(fd, buffer + i * 4096, 4096, lba * 512);
    }
  }
  const double spent = now_s() - start;
  close(fd);
  return spent / double(done) * 1e9;
}

double cached_ns(const std::string& path) {
  const HostMemory memory(kDepth * 4096, 4096);
  auto* buffer = static_cast<char*>(memory.address());
  const auto base = reinterpret_cast<uint64_t>(buffer);
  Rings rings(0);
  for (uint32_t i = 0; i < kDepth; ++i) rings.sq[i].prp1 = base + i * 4096;
  SoftwareController controller(FileStorage::open(path, {}), {rings.addresses(1)},
                                {{base, kDepth * 4096}}, {.threads = 0});
  uint64_t served = 0;
  double spent = 0;
  while (spent < 0.5) {
    rings.tail = (rings.tail + kDepth - kChunk) % kDepth;
    rings.ring();
    const double start = now_s();
    while (const int moved = controller.serve_some(0)) served += uint64_t(moved);
    spent += now_s() - start;
    while (rings.consume()) {
    }
  }
  return spent / double(served) * 1e9;
}

}  // namespace

int main() {
  const std::string path = make_file();
  const double plain = pread_ns(path);
  const double cached = cached_ns(path);
  unlink(path.c_str());
  const double alone = alone_ns(false);
  const double modelled = alone_ns(true);
  const double fed = fed_ns(false);
  const double rewritten = fed_ns(true);
  std::printf("alone %.2f ns, fed %.2f ns (%.1f M/s), fed with rewritten entries %.2f ns\n", alone,
              fed, 1e3 / fed, rewritten);
  std::printf("modelled %.2f ns, fed %.2f ns\n", modelled, fed_ns(false, true));
  std::printf("cached 4 KiB read %.0f ns, pread %.0f ns\n", cached, plain);
  return alone < 50 && fed < 110 && modelled < 300 ? EXIT_SUCCESS : EXIT_FAILURE;
}
