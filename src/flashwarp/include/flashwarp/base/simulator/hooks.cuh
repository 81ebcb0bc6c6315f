// The functions that device and controller code calls in the simulator (FW_SIMULATOR).
//
// tests/simulator defines them. Each call is a scheduling point; of the `_data` calls the seed
// chooses some. The simulator runs lanes and controller threads as fibres of one thread. Outside of
// a launch the functions are plain accesses.
#pragma once

namespace fw::simulator {

// The source line of an access, for reports.
struct site {
  const char* file;
  uint32_t line;
};

enum class order : uint8_t { kPlain, kRelaxed, kAcquire, kRelease, kAcqRel };
enum class scope : uint8_t { kDevice, kSystem };
enum class fence_kind : uint8_t { kAcquire, kDevice, kSequential, kSystem, kSequentialSystem };

// Integers of 1, 2, 4 or 8 bytes, naturally aligned.
uint64_t load(const void* p, uint32_t bytes, order o, scope s, site at);
void store(void* p, uint64_t value, uint32_t bytes, order o, scope s, site at);
uint64_t add(void* p, uint64_t value, uint32_t bytes, order o, site at);
uint64_t set_bits(void* p, uint64_t bits, uint32_t bytes, order o, site at);
uint64_t keep_bits(void* p, uint64_t bits, uint32_t bytes, order o, site at);
bool compare_and_swap(void* p, uint64_t expected, uint64_t desired, uint32_t bytes, order o,
                      site at);
void fence(fence_kind kind, site at);

// Bulk data: contents of frames, buffers and queue entries.
uint64_t load_data(const void* p, uint32_t bytes, order o, site at);
void store_data(void* p, uint64_t value, uint32_t bytes, order o, site at);
void copy_data(void* to, const void* from, uint64_t bytes, site at);
void fill_data(void* to, uint8_t value, uint64_t bytes, site at);

// Collectives of the lanes in `mask`.
uint32_t ballot(uint32_t mask, bool predicate, site at);
uint32_t match(uint32_t mask, uint64_t value, site at);
uint64_t take(uint32_t mask, uint64_t value, uint32_t source, site at);
void sync(uint32_t mask, site at);
uint32_t active(site at);

// Whether an address is in the simulated shared memory of the caller's block.
bool is_of_block(const void* p);

// The multiprocessor of the caller, which may change from call to call.
uint32_t spread_index();

uint64_t clock_ns();
void pause(uint32_t ns);
[[noreturn]] void fail_assertion(const char* condition, site at);

// The barriers that the warps of one block meet at, one after the other. It lies in simulated
// memory.
struct block_barrier {
  uint64_t arrived;    // warps, ever
  uint64_t counts[4];  // of lanes, at the barrier with this number modulo 4
};

// The place of the running lane in its launch.
struct thread_place {
  uint32_t lane = 0;
  uint32_t index = 0;  // of the thread in the launch
  uint32_t count = 1;
  uint32_t spread = 0;
  uint32_t block_warps = 1;
  block_barrier* barrier = nullptr;  // the block's; not used if a block is one warp
};
extern thread_place* here;

}  // namespace fw::simulator

// As a last parameter: the line of the caller.
#define FW_SITE ::fw::simulator::site at = {__builtin_FILE(), uint32_t(__builtin_LINE())}
