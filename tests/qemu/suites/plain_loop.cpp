// The least that a driver must do: one thread reads random blocks by one queue pair of a drive.
//
// It shares no code with flashwarp, whose rate stands beside its own. Each turn fills the window
// and rings once, then takes all completions that are there and rings once. Commands end in any
// order. No block crosses a page.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace {

struct command {
  uint32_t opcode_cid, nsid;
  uint64_t reserved, metadata, prp1, prp2;
  uint32_t cdw10, cdw11, cdw12, cdw13, cdw14, cdw15;
};
static_assert(sizeof(command) == 64);

struct completion {
  uint32_t dw0, dw1;
  uint16_t sqhd, sqid, cid, status;
};
static_assert(sizeof(completion) == 16);

constexpr uint32_t kRead = 2, kLbaBytes = 512;
constexpr auto kLimit = std::chrono::seconds(20);

}  // namespace

// Returns how many commands failed; all that are missing if the drive does not answer.
extern "C" uint64_t read_blocks(command* sq, volatile completion* cq,
                                volatile uint32_t* sq_doorbell, volatile uint32_t* cq_doorbell,
                                uint32_t depth, uint32_t window, uint64_t commands, uint64_t data,
                                uint32_t nsid, uint64_t blocks, uint32_t block_bytes) {
  const uint32_t lbas = block_bytes / kLbaBytes;
  std::vector<uint16_t> unused;
  for (uint32_t cid = 0; cid < window; cid++) unused.push_back(uint16_t(cid));
  uint64_t issued = 0, done = 0, failed = 0, random = 88172645463325252ULL;
  uint32_t tail = 0, head = 0;
  uint16_t phase = 1;
  auto answered = std::chrono::steady_clock::now();
  while (done < commands) {
    const uint64_t before = issued;
    for (; issued < commands && !unused.empty(); issued++) {
      random ^= random << 13;
      random ^= random >> 7;
      random ^= random << 17;
      const uint64_t lba = random % blocks * lbas;
      const uint16_t cid = unused.back();
      unused.pop_back();
      sq[tail] = command{kRead | uint32_t(cid) << 16,
                         nsid,
                         0,
                         0,
                         data + uint64_t(cid) * block_bytes,
                         0,
                         uint32_t(lba),
                         uint32_t(lba >> 32),
                         lbas - 1,
                         0,
                         0,
                         0};
      tail = (tail + 1) % depth;
    }
    if (issued != before) {
      std::atomic_thread_fence(std::memory_order_seq_cst);
      *sq_doorbell = tail;
    }
    const uint64_t ended = done;
    while ((cq[head].status & 1) == phase) {
      std::atomic_thread_fence(std::memory_order_acquire);
      failed += cq[head].status >> 1 != 0;
      unused.push_back(uint16_t(cq[head].cid));
      head = (head + 1) % depth;
      if (head == 0) phase ^= 1;
      done++;
    }
    if (done != ended) {
      *cq_doorbell = head;
      answered = std::chrono::steady_clock::now();
    } else if (std::chrono::steady_clock::now() - answered > kLimit) {
      return commands - done;
    }
  }
  return failed;
}
