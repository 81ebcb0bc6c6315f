// Threads write, read and discard an image while others sync it and look at its tables.
//
// Each thread owns the blocks whose number is its own, modulo the threads, and knows what they
// hold. The owner only looks at what it is told, while writes go on.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "storage/image_storage.h"
#include "turns.h"

namespace {

using fw::native::ImageMarks;
using fw::native::ImageStorage;
using fw::stress::require;

constexpr uint64_t kBlock = 4096;
constexpr uint64_t kBlocks = 1200;  // three tables
constexpr uint64_t kThreads = 4;
constexpr int kRounds = 1500;

// All slots that the tables name are different, and those of the bitmap.
void check_tables(const ImageStorage::Snapshot& taken, std::vector<std::set<uint64_t>>& known) {
  for (const auto& [index, table] : taken.tables) {
    require(index < known.size(), "a table behind the end");
    known[index].clear();
    known[index].insert(table.slot);
    known[index].insert(table.slot + 1);
    for (const uint64_t entry : table.entries) {
      if (entry != 0) require(known[index].insert(entry - 1).second, "a slot has two blocks");
    }
  }
  std::set<uint64_t> all;
  for (const auto& slots : known) {
    for (const uint64_t slot : slots) require(all.insert(slot).second, "a slot has two tables");
  }
  uint64_t bits = 0;
  for (const uint64_t word : taken.used) bits += uint64_t(std::popcount(word));
  require(bits == all.size(), "the bitmap has other slots than the tables");
}

void run() {
  char path[] = "/tmp/image_stress.XXXXXX";
  const int fd = mkstemp(path);
  require(fd >= 0, "no file");
  unlink(path);
  ImageStorage* made = nullptr;
  std::mutex syncing;
  uint64_t generation = 0;  // by syncing
  std::vector<std::set<uint64_t>> known(kBlocks / ImageStorage::kTableBlocks + 1);
  const auto sync = [&] {
    const std::lock_guard guard(syncing);
    ImageStorage::Snapshot taken;
    require(made->begin_sync(generation + 1, 60'000, taken) == 0, "writes do not end");
    check_tables(taken, known);
    // Some syncs fail; the next one takes all of it again.
    const bool synced = std::rand() % 4 != 0;
    generation += synced ? 1 : 0;
    made->end_sync(synced);
    return 0;
  };
  auto marks =
      std::make_unique<ImageMarks>(fd, ImageMarks::Layout{4096, 4 * kBlock, kBlocks * kBlock},
                                   std::string(16, 'i'), generation, std::string());
  ImageStorage image(nullptr, fd, {8192, kBlock, 2 * kBlocks, 2}, kBlocks * kBlock, true, path,
                     std::move(marks), sync);
  made = &image;
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (uint64_t own = 0; own < kThreads; ++own) {
    threads.emplace_back([&, own] {
      std::mt19937_64 random(own);
      std::vector<uint8_t> value(kBlocks);
      std::vector<uint8_t> buffer(kBlock);
      for (int round = 0; round < kRounds; ++round) {
        const uint64_t block = random() % (kBlocks / kThreads) * kThreads + own;
        const uint64_t inside = random() % 4096;
        switch (random() % 4) {
          case 0:
          case 1:
            std::memset(buffer.data(), int(value[block] = uint8_t(1 + random() % 255)), kBlock);
            require(image.write(block * kBlock, buffer.data(), kBlock, nullptr) == 0, "no write");
            break;
          case 2:
            require(image.discard(block * kBlock, kBlock, nullptr) == 0, "no discard");
            value[block] = 0;
            break;
          default:
            require(
                image.read(block * kBlock + inside, buffer.data(), kBlock - inside, nullptr) == 0,
                "no read");
            for (uint64_t i = 0; i < kBlock - inside; ++i) {
              require(buffer[i] == value[block], "a block holds what nobody wrote there");
            }
        }
      }
    });
  }
  std::thread syncer([&] {
    while (!stop) require(image.flush(nullptr) == 0, "no flush");
  });
  for (auto& thread : threads) thread.join();
  stop = true;
  syncer.join();
  require(image.flush(nullptr) == 0, "no flush");
  require(image.write(0, "x", 1, nullptr) == 0 && image.marks().any(), "no mark");
  image.detach();
  require(image.write(0, "x", 1, nullptr) == ECANCELED, "a write without an owner");
  close(fd);
}

}  // namespace

int main() {
  run();
  std::puts("image_stress: passed");
}
