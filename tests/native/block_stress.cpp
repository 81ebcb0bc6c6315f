// For the sanitizers: threads that share, own and wait for the blocks of one file.
//
// Each block is a plain word that its owner changes and those who share it read, so a race is an
// owner who is not alone. Whoever cannot have blocks looks again, and gives up now and then.
// FLASHWARP_STRESS_SECONDS bounds the time.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "storage/block_locks.h"
#include "turns.h"

using namespace fw;
using native::BlockClaim;
using native::BlockLocks;

namespace {

constexpr uint64_t kPages = 32;
constexpr uint32_t kClaims = 2000;  // of a thread in a turn
constexpr uint32_t kTriesMax = 1'000'000;

struct File {
  BlockLocks locks;
  uint64_t words[kPages] = {};
  uint64_t tail = 0;
  uint64_t owned[4] = {};  // by thread
};

BlockClaim draw(BlockLocks& locks, std::mt19937& random) {
  BlockClaim claim = {&locks};
  claim.kind = BlockClaim::Kind(random() % 8 == 0 ? 2 : random() % 2);
  claim.beside_tail = claim.kind != BlockClaim::Kind::kTail && random() % 4 == 0;
  claim.offset = random() % kPages * BlockLocks::kPageBytes + random() % 100;
  claim.nbytes = 1 + random() % 3000;
  if (claim.kind == BlockClaim::Kind::kWhole) {
    claim.nbytes += random() % 8 * BlockLocks::kPageBytes;
    claim.nbytes = std::min(claim.nbytes, kPages * BlockLocks::kPageBytes - claim.offset);
  }
  return claim;
}

uint64_t use(File& file, const BlockClaim& claim) {
  uint64_t sum = claim.beside_tail ? file.tail : 0;
  if (claim.kind == BlockClaim::Kind::kTail) return ++file.tail;
  const uint64_t first = claim.offset / BlockLocks::kPageBytes;
  if (claim.kind == BlockClaim::Kind::kPart) return ++file.words[first];
  const uint64_t last = (claim.offset + claim.nbytes - 1) / BlockLocks::kPageBytes;
  for (uint64_t page = first; page <= last; ++page) sum += file.words[page];
  return sum;
}

uint64_t work(File& file, uint32_t seed) {
  std::mt19937 random(seed);
  uint64_t owned = 0;
  [[maybe_unused]] volatile uint64_t seen = 0;  // so that what is shared is read
  for (uint32_t n = 0; n < kClaims; ++n) {
    BlockClaim claim = draw(file.locks, random);
    bool taken = claim.take();
    for (uint32_t tries = 0; !taken && random() % 1000 != 0; ++tries) {
      if (tries == kTriesMax) std::abort();
      std::this_thread::yield();
      taken = claim.take();
    }
    if (!taken) {
      claim.withdraw();
      continue;
    }
    seen = use(file, claim);
    claim.release();
    owned += claim.kind != BlockClaim::Kind::kWhole;
  }
  return owned;
}

void play(std::mt19937& random) {
  File file;
  std::vector<std::thread> threads;
  for (uint64_t& owned : file.owned) {
    threads.emplace_back([&file, &owned, seed = uint32_t(random())] { owned = work(file, seed); });
  }
  for (std::thread& thread : threads) thread.join();
  uint64_t changes = file.tail, owned = 0;
  for (uint64_t word : file.words) changes += word;
  for (uint64_t each : file.owned) owned += each;
  bool free = true;
  for (uint64_t page = 0; page < kPages; ++page) {
    BlockClaim claim = {&file.locks, BlockClaim::Kind::kPart, true};
    claim.offset = page * BlockLocks::kPageBytes;
    claim.nbytes = 1;
    free = free && claim.take();
    if (free) claim.release();
  }
  if (changes == owned && free) return;
  std::fprintf(stderr, "failed: %lu changes of %lu owners, or a block that nobody gave back\n",
               changes, owned);
  std::abort();
}

}  // namespace

int main(int count, char** arguments) {
  return stress::take_turns(count, arguments, "claims",
                            [](uint32_t, std::mt19937& random) { play(random); });
}
