// The wheel of held completions against a sorted list, over random times and steps of the clock.
//
// Each entry is released once, unchanged, never before its time, and at the latest at the first
// look one tick (256 ns) after it. The wheel's next time is never past an entry's release.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>

#include "nvme/model/held_completions.h"
#include "turns.h"

using fw::native::HeldCompletions;
using fw::stress::require;

namespace {

constexpr uint32_t kCapacity = 300;
constexpr uint32_t kSteps = 200'000;
constexpr int64_t kTickNs = 256;

// From nanoseconds to minutes, each order of magnitude as likely as any other.
int64_t random_ns(std::mt19937_64& random) { return int64_t(random() >> (26 + random() % 38)); }

struct Expected {
  uint16_t status;
  int64_t due_ns;
};

void run(std::mt19937_64& random, int64_t now) {
  HeldCompletions held(kCapacity, now);
  std::map<uint16_t, Expected> expected;
  for (uint32_t step = 0; step < kSteps; ++step) {
    if (held.size() < kCapacity && random() % 3 != 0) {
      const uint16_t cid = uint16_t(random());
      if (expected.count(cid) != 0) continue;
      const Expected entry = {uint16_t(random()), now + 1 + random_ns(random)};
      held.hold(entry.due_ns, cid, entry.status);
      expected[cid] = entry;
    } else {
      now = random() % 4 == 0 && held.size() != 0 ? std::max(now, held.next_ns())
                                                  : now + random_ns(random) / 8;
      const uint32_t count = held.release_until(now, [&](uint16_t cid, uint16_t status) {
        const auto found = expected.find(cid);
        require(found != expected.end() && found->second.status == status, "what was held");
        require(found->second.due_ns <= now, "not before its time");
        expected.erase(found);
      });
      require(count <= kCapacity && held.size() == expected.size(), "each one once");
      for (const auto& [cid, entry] : expected) {
        require(entry.due_ns + kTickNs > now, "not later than a tick");
        require(held.next_ns() < entry.due_ns + kTickNs, "the next one is not overlooked");
      }
    }
  }
  held.release_all([&](uint16_t cid, uint16_t) { expected.erase(cid); });
  require(expected.empty() && held.size() == 0, "all come out");
  require(held.next_ns() == HeldCompletions::kNever, "an empty wheel names no time");
}

}  // namespace

int main(int count, char** arguments) {
  std::mt19937_64 random(fw::stress::seed_of(count, arguments));
  for (const int64_t start : {int64_t(0), int64_t(1) << 44, (int64_t(1) << 44) - 1}) {
    run(random, start);
  }
  return EXIT_SUCCESS;
}
