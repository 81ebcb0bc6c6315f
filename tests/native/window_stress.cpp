// For the sanitizers: threads read a file in the page cache in place while it is truncated. If the
// file system has O_DIRECT, the reads switch between the page cache and O_DIRECT meanwhile.
//
// No byte of the file is zero, so a read that succeeds must return no zero, and a read of bytes
// that are still there must succeed in the end. FLASHWARP_STRESS_SECONDS bounds the time.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "storage/file_storage.h"
#include "turns.h"

using namespace fw::native;
using fw::stress::require;

namespace {

constexpr uint32_t kReaders = 3;
constexpr uint32_t kRoundsMin = 20;  // however slow the machine
constexpr uint64_t kFileBytes = 5 << 20;
constexpr uint64_t kReadBytesMax = 16384;
constexpr uint32_t kCuts = 12;
constexpr unsigned char kContent = 0xA5;

void write_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  require(fd >= 0, "the file is made");
  const std::vector<unsigned char> content(kFileBytes, kContent);
  require(write_fully(fd, content.data(), content.size(), 0) == 0, "the file is written");
  close(fd);
}

struct Round {
  FileStorage& storage;
  std::atomic<uint64_t> least{kFileBytes};  // no cut so far, nor the one being made, goes below
  std::atomic<bool> over{false};
  std::atomic<uint64_t> copied{0};
};

void read_and_check(Round& round, uint64_t seed) {
  std::mt19937 random(seed);
  std::vector<unsigned char> target(kReadBytesMax);
  while (!round.over.load(std::memory_order_acquire)) {
    const uint64_t n = 1 + random() % kReadBytesMax;
    const uint64_t offset = random() % (kFileBytes - n);
    const int status = round.storage.read_nowait(offset, target.data(), n, nullptr);
    if (status == 0) {
      const auto end = target.begin() + int64_t(n);
      require(std::all_of(target.begin(), end, [](unsigned char c) { return c == kContent; }),
              "what was read is what was written");
      round.copied.fetch_add(1, std::memory_order_relaxed);
    } else {
      const int truth = round.storage.read(offset, target.data(), n, nullptr);
      const bool there = offset + n <= round.least.load(std::memory_order_acquire);
      require(truth == 0 || (truth == kTruncated && !there), "only missing bytes fail");
    }
  }
}

uint64_t play(const std::string& path, std::mt19937& random) {
  write_file(path);
  FileOptions options;
  options.may_change = probe_direct_alignment(path).error.empty();
  const std::shared_ptr<FileStorage> storage = FileStorage::open(path, options);
  Round round{*storage};
  std::vector<std::thread> readers;
  for (uint32_t i = 0; i < kReaders; ++i) {
    readers.emplace_back([&round, seed = random()] { read_and_check(round, seed); });
  }
  uint64_t size = kFileBytes;
  for (uint32_t i = 0; i < kCuts; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    require(storage->choose_direct(random() % 4 == 0) == options.may_change, "the way changes");
    size -= random() % (size / 3);
    round.least.store(size, std::memory_order_release);
    require(truncate(path.c_str(), off_t(size)) == 0, "the file is cut");
  }
  storage->choose_direct(false);
  std::this_thread::sleep_for(std::chrono::microseconds(500));
  round.over.store(true, std::memory_order_release);
  for (std::thread& reader : readers) reader.join();
  return round.copied.load();
}

}  // namespace

int main(int count, char** arguments) {
  char path[] = "/tmp/flashwarp-window-XXXXXX";
  const int fd = mkstemp(path);
  require(fd >= 0, "a temporary file");
  close(fd);
  uint64_t copied = 0;
  const int status = fw::stress::take_turns(
      count, arguments, "rounds",
      [&](uint32_t, std::mt19937& random) { copied += play(path, random); }, kRoundsMin);
  unlink(path);
  require(copied != 0, "some reads succeed");
  return status;
}
