// For the sanitizers: threads of a client ask the owner's thread for lines, and send it stores,
// while a thread of the owner uses and evicts the same lines.
//
// Each element has one thread that stores to it, and its value names the element and a version. A
// reader checks that the value belongs to the element, is no older than the last store that had
// finished, and never goes backwards. At the end the storage has every last value.
// FLASHWARP_STRESS_SECONDS is the budget (default 5).
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "device_threads.h"
#include "sharing/requests.h"

using namespace fw::stress;
namespace cache = fw::cache;
namespace nvme = fw::nvme;

namespace {

constexpr uint32_t kLineBytes = 512;
constexpr uint32_t kLineWords = kLineBytes / 8;
constexpr uint32_t kSlots = 3;

[[noreturn]] void fail(const char* what, uint64_t element, uint64_t got, uint64_t expected) {
  std::fprintf(stderr, "failed: %s: element %llu holds %#llx, not %#llx\n", what,
               (unsigned long long)element, (unsigned long long)got, (unsigned long long)expected);
  std::abort();
}

uint64_t value_of(uint64_t element, uint32_t version) { return (element + 1) << 32 | version; }

// Moves a part of a line between a frame and a request's buffer.
template <bool kToFrame>
struct serve_part {
  static constexpr bool kStores = kToFrame;
  uint64_t offset;
  uint64_t bytes;
  uint64_t buffer;

  void visit(fw::lanes here, fw::lanes members, uint64_t frame) {
    if (!members) return;
    const uint64_t inside = frame + offset;
    fw::warp::copy<kToFrame ? fw::warp::source::kStream : fw::warp::source::kFrame>(
        here, kToFrame ? inside : buffer, kToFrame ? buffer : inside, bytes);
  }
};

class Rig {
 public:
  Rig(uint32_t lines, uint32_t path)
      : elements_(lines * kLineWords - 10),
        memory_(fw::native::RequestTable::bytes(kSlots, kLineBytes), 4096),
        requests_(fw::native::RequestTable::at(address(memory_.address()), kSlots, kLineBytes)
                      .for_client(holders_)) {
    cache_ = make_cache(arena_, 1, 4, kLineBytes);
    attach(path);
    attach_client();
    buffer_ = std::vector<uint64_t>(kSlots * kLineWords);
  }
  Controllers& controllers() { return controllers_; }

  void use(uint32_t thread, uint32_t operations, uint32_t seed) {
    if (thread == 0) return serve();
    std::mt19937 random(seed * kThreads + thread);
    std::vector<uint32_t> seen(elements_, 0);
    const fw::array<uint64_t>& array = thread == 1 ? array_ : theirs_;
    for (uint32_t n = 0; n < operations; ++n) {
      const uint32_t element = random() % elements_;
      const uint32_t mine = element - element % kThreads + thread;
      const uint32_t dice = random() % 10;
      if (dice < 3 && mine < elements_) {
        store(array, mine);
      } else if (dice == 3 && thread != 1) {
        array.prefetch(element);
      } else {
        load(array, element, seen);
      }
    }
    if (++ended_ == kThreads - 1) server_->stop();
  }

  void begin(bool bell) {
    ended_ = 0;
    server_ = std::make_unique<fw::native::RequestServer>(address(memory_.address()), kSlots,
                                                          kLineBytes, bell);
  }

  void settle() {
    controllers_.flush(cache_, &cache_->volumes[0]);
    if (client_volume_.commands.noted != 0) fail("a request", 0, client_volume_.commands.noted, 0);
    for (uint32_t i = 0; i < elements_; ++i) {
      const uint64_t expected = value_of(i, finished_[i]);
      if (data_[i] != expected) fail("storage after flush", i, data_[i], expected);
    }
  }

 private:
  // The owner's thread.
  void serve() {
    cache::volume& v = cache_->volumes[0];
    const fw::lanes here = fw::lanes::all();
    while (true) {
      const auto asked = server_->wait();
      if (asked.empty()) return;
      for (const cache::asked_request& each : asked) {
        const uint64_t line = each.begin / kLineBytes;
        const uint64_t part = each.begin % kLineBytes;
        cache::tally events;
        uint32_t status = nvme::kSuccess;
        if (each.operation == cache::kOwnerPrefetch) {
          cache::prefetch<fw::policy>(*cache_, v, here, true, line, events);
        } else if (each.operation == cache::kOwnerRead) {
          serve_part<false> op = {part, each.bytes, address(buffer_.data())};
          status =
              cache::access<fw::policy>({cache_->geometry, *cache_, v, here}, {line}, op, events);
          server_->hand_out({each.slot}, each.bytes, address(buffer_.data()));
        } else {
          server_->collect({each.slot}, each.bytes, address(buffer_.data()));
          serve_part<true> op = {part, each.bytes, address(buffer_.data())};
          status =
              cache::access<fw::policy>({cache_->geometry, *cache_, v, here}, {line}, op, events);
        }
        server_->answer({each.slot}, status);
      }
    }
  }

  void store(const fw::array<uint64_t>& array, uint32_t mine) {
    const uint32_t version = finished_[mine].load(std::memory_order_relaxed) + 1;
    array.store(mine, value_of(mine, version));
    finished_[mine].store(version, std::memory_order_release);
  }

  void load(const fw::array<uint64_t>& array, uint32_t element, std::vector<uint32_t>& seen) {
    const uint32_t finished = finished_[element].load(std::memory_order_acquire);
    const uint64_t got = array[element];
    const uint64_t oldest = value_of(element, std::max(finished, seen[element]));
    if (got >> 32 != oldest >> 32) fail("a value of another place", element, got, oldest);
    if (got < oldest) fail("an old value", element, got, oldest);
    seen[element] = uint32_t(got);
  }

  void attach(uint32_t path) {
    data_ = arena_.allocate<uint64_t>(elements_);
    finished_ = std::make_unique<std::atomic<uint32_t>[]>(elements_);
    for (uint32_t i = 0; i < elements_; ++i) data_[i] = value_of(i, 0);
    const uint64_t bytes = uint64_t(elements_) * 8;
    cache::volume* v = attach_volume(arena_, cache_, bytes, 1, path);
    Regions regions;
    const auto pair = make_queue_pair(arena_, v->queues[0], 1, 2, data_, kLineBytes, path, regions);
    controllers_.start(data_, bytes, {pair}, regions, {});
    array_ = {cache_->geometry, cache_, v, 0, elements_};
  }

  void attach_client() {
    auto* queue = arena_.allocate<nvme::queue_pair>(1);
    queue->depth_log2 = 1;
    queue->data.timeout_ns = kTimeoutNs;
    client_volume_ = cache_->volumes[0];
    client_volume_.queues = queue;
    client_volume_.events = arena_.allocate<cache::counters>(cache::kCounterShards);
    client_volume_.errors = arena_.allocate<cache::error_record>(1);
    client_cache_.geometry = cache_->geometry;
    client_cache_.volumes = &client_volume_;
    client_cache_.volume_end = 1;
    client_cache_.owner = &requests_;
    theirs_ = {cache_->geometry, &client_cache_, &client_volume_, 0, elements_};
  }

  const uint32_t elements_;
  Arena arena_;
  fw::native::HostMemory memory_;
  uint32_t holders_[kSlots] = {};
  cache::owner_requests requests_;
  std::unique_ptr<fw::native::RequestServer> server_;
  cache::line_cache* cache_ = nullptr;
  cache::line_cache client_cache_ = {};
  cache::volume client_volume_ = {};
  uint64_t* data_ = nullptr;
  std::vector<uint64_t> buffer_;
  std::unique_ptr<std::atomic<uint32_t>[]> finished_;
  std::atomic<uint32_t> ended_{0};
  Controllers controllers_;
  fw::array<uint64_t> array_ = {};
  fw::array<uint64_t> theirs_ = {};
};

}  // namespace

int main(int count, char** arguments) {
  return take_turns(count, arguments, "clients", [](uint32_t turn, std::mt19937& random) {
    Rig rig(5 + random() % 8, turn % 2 == 0 ? nvme::kInPlace : nvme::kBounce);
    for (uint32_t round = 0; round < 2; ++round) {
      const uint32_t round_seed = uint32_t(random());
      rig.begin(round == 0);
      rig.controllers().launch(
          [&](uint32_t thread) { rig.use(thread, FW_TSAN ? 200 : 1000, round_seed); });
      rig.settle();
    }
  });
}
