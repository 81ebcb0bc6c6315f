#include "sharing/requests.h"

#include <cstring>
#include <deque>

#include "base/require.h"
#include "flashwarp/nvme/command.cuh"
#include "flashwarp/nvme/queue_pair.cuh"
#include "nvme/sleepers.h"

namespace fw::native {

namespace {

constexpr uint64_t kBuffersAlignment = 4096;
// The owner looks at least so often whether it was stopped: the bell is the client's, too.
constexpr int64_t kLookNs = 100'000'000;

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

RequestServer::RequestServer(uint64_t address, uint32_t count, uint64_t line_bytes)
    : table_(RequestTable::at(address, count, line_bytes)), found_(count) {}

std::vector<cache::asked_request> RequestServer::wait() {
  auto& rings = reinterpret_cast<std::atomic<uint32_t>&>(table_.bell->rings);
  while (!stopped_.load(std::memory_order_relaxed)) {
    // Acquire, and before the look: a request that the look misses rings later, and the bell then
    // differs from what was seen.
    const uint32_t seen = rings.load(std::memory_order_acquire);
    const uint32_t count = cache::look_for_requests(table_.slots, table_.count, found_.data());
    if (count != 0) return {found_.begin(), found_.begin() + count};
    futex_wait(rings, seen, kLookNs, true);
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

void RequestServer::answer(const std::vector<uint32_t>& slots, uint32_t status) {
  check(slots, 0);
  for (const uint32_t slot : slots) cache::answer_request(table_.slots[slot], status);
}

void RequestServer::stop() {
  stopped_.store(true, std::memory_order_relaxed);
  atomic::add_release(&table_.bell->rings, 1u);
  base::wake(&table_.bell->rings);
}

RequestClient::RequestClient(uint64_t address, uint32_t count, uint64_t line_bytes)
    : holders_(std::make_unique<uint32_t[]>(count)) {
  const RequestTable table = RequestTable::at(address, count, line_bytes);
  requests_ = {table.bell, table.slots, table.buffers, line_bytes, holders_.get(), count, 0};
}

uint32_t RequestClient::move(cache::owner_operation operation, const uint64_t* begins,
                             const uint64_t* sizes, uint64_t count, char* memory,
                             uint64_t limit_ns) {
  struct Asked {
    uint32_t slot;
    char* memory;
    uint64_t bytes;
  };
  cache::owner_requests& o = requests_;
  std::deque<Asked> asked;
  uint32_t failed = nvme::kSuccess;
  uint64_t next = 0;
  uint64_t moved_ns = base::clock_ns();
  while (next < count || !asked.empty()) {
    bool moves = false;
    if (!asked.empty()) {
      const Asked& first = asked.front();
      uint32_t status;
      if (cache::has_answer(o, first.slot, status)) {
        if (operation == cache::kOwnerRead && status == nvme::kSuccess) {
          std::memcpy(first.memory, cache::buffer_of(o, first.slot), first.bytes);
        }
        if (failed == nvme::kSuccess) failed = status;
        cache::free_slot(o, first.slot);
        asked.pop_front();
        moves = true;
      }
    }
    const uint32_t slot = next < count ? cache::take_slot(o) : cache::kNoSlot;
    if (slot != cache::kNoSlot) {
      const uint64_t bytes = sizes[next];
      if (operation == cache::kOwnerStore) {
        std::memcpy(cache::buffer_of(o, slot), memory, bytes);
      }
      cache::ask(o, slot, operation, begins[next], bytes);
      asked.push_back({slot, memory, bytes});
      if (operation != cache::kOwnerPrefetch) memory += bytes;
      next++;
      moves = true;
    }
    if (moves) {
      moved_ns = base::clock_ns();
      continue;
    }
    // The slots of what was asked stay held: an answer may still come.
    const bool late = base::clock_ns() - moved_ns > limit_ns;
    if (late || lost_.load(std::memory_order_relaxed)) return nvme::kTimedOut;
    base::pause(nvme::kBackOffNs);
  }
  return failed;
}

}  // namespace fw::native
