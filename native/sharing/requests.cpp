#include "sharing/requests.h"

#include <algorithm>
#include <thread>

#include "base/require.h"
#include "nvme/sleepers.h"

namespace fw::native {

namespace {

constexpr uint64_t kBuffersAlignment = 4096;
// The owner looks at least so often whether it was stopped: the bell is the client's, too.
constexpr int64_t kLookNs = 100'000'000;

// For requests that ring no bell it looks all the time at first, because the next ones mostly
// follow the last answers. Then it sleeps between looks for an eighth of the time in which there
// was none, so that one is found late by that part at most; no longer than two milliseconds, about
// a turn of a process on a GPU.
constexpr uint64_t kAwakeNs = 400'000;
constexpr uint64_t kSleepMaxNs = 2'000'000;

uint64_t buffers_at(uint32_t count) {
  const uint64_t end = sizeof(cache::request_bell) + count * sizeof(cache::request_slot);
  return (end + kBuffersAlignment - 1) / kBuffersAlignment * kBuffersAlignment;
}

}  // namespace

RequestTable RequestTable::at(uint64_t address, uint32_t count, uint64_t line_bytes) {
  char* const base = reinterpret_cast<char*>(address);
  auto* const bell = reinterpret_cast<cache::request_bell*>(base);
  return {bell, reinterpret_cast<cache::request_slot*>(bell + 1), base + buffers_at(count), count,
          line_bytes};
}

uint64_t RequestTable::bytes(uint32_t count, uint64_t line_bytes) {
  return buffers_at(count) + count * line_bytes;
}

cache::owner_requests RequestTable::for_client(uint32_t* holders) const {
  return {bell, slots, buffers, line_bytes, holders, count, 0};
}

RequestServer::RequestServer(uint64_t address, uint32_t count, uint64_t line_bytes, bool bell)
    : table_(RequestTable::at(address, count, line_bytes)), bell_(bell), found_(count) {}

std::vector<cache::asked_request> RequestServer::wait() {
  auto& rings = reinterpret_cast<std::atomic<uint32_t>&>(table_.bell->rings);
  const uint64_t begin = base::clock_ns();
  while (!stopped_.load(std::memory_order_relaxed)) {
    // Acquire, and before the look: a request that the look misses rings later, and the bell then
    // differs from what was seen.
    const uint32_t seen = rings.load(std::memory_order_acquire);
    const uint32_t count = cache::look_for_requests(table_.slots, table_.count, found_.data());
    if (count != 0) return {found_.begin(), found_.begin() + count};
    const uint64_t idle = base::clock_ns() - begin;
    if (!bell_ && idle < kAwakeNs) {
      std::this_thread::yield();
    } else {
      futex_wait(rings, seen, bell_ ? kLookNs : int64_t(std::min(idle / 8, kSleepMaxNs)), true);
    }
  }
  return {};
}

void RequestServer::check(const std::vector<uint32_t>& slots, uint64_t bytes) const {
  require(bytes <= table_.line_bytes, "a buffer holds one line");
  for (const uint32_t slot : slots) require(slot < table_.count, "there is no such slot");
}

void RequestServer::collect(const std::vector<uint32_t>& slots, uint64_t bytes,
                            uint64_t target) const {
  check(slots, bytes);
  char* to = reinterpret_cast<char*>(target);
  for (const uint32_t slot : slots) {
    atomic::copy_plain(to, table_.buffers + slot * table_.line_bytes, bytes);
    to += bytes;
  }
}

void RequestServer::hand_out(const std::vector<uint32_t>& slots, uint64_t bytes,
                             uint64_t source) const {
  check(slots, bytes);
  const char* from = reinterpret_cast<const char*>(source);
  for (const uint32_t slot : slots) {
    atomic::copy_plain(table_.buffers + slot * table_.line_bytes, from, bytes);
    from += bytes;
  }
}

bool RequestServer::read(Gatherer& threads, Storage& storage, const std::vector<uint32_t>& slots,
                         const std::vector<uint64_t>& offsets, uint64_t bytes,
                         uint64_t step) const {
  check(slots, bytes);
  require(offsets.size() == slots.size() && step > 0, "each slot has an offset");
  const auto act = [&](uint64_t begin, uint64_t end) -> Gatherer::Outcome {
    for (uint64_t i = begin; i < end; ++i) {
      char* const buffer = table_.buffers + slots[i] * table_.line_bytes;
      const int error = storage.read(offsets[i], buffer, bytes);
      if (error != 0) return {error, i};
    }
    return {};
  };
  return threads.run(slots.size(), step, act).error == 0;
}

void RequestServer::answer(const std::vector<uint32_t>& slots, uint32_t status) {
  check(slots, 0);
  for (const uint32_t slot : slots) cache::answer_request(table_.slots[slot], status);
}

void RequestServer::stop() {
  stopped_.store(true, std::memory_order_relaxed);
  atomic::add_release(&table_.bell->rings, 1u);
  base::wake(&table_.bell->rings);
}

}  // namespace fw::native
