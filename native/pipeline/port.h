// One direction of the engine: its regions, its ring, and the batches and chunks under way.
//
// A batch is moved in chunks, in order. Behind a ring, chunk q of the direction (1, 2, ... for
// ever) lies at ring + ((q - 1) mod chunks) * chunk_bytes; without one, a batch is one chunk in the
// caller's buffer. A chunk has `step_bytes` of its batch, the last one what is left.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "flashwarp/batch/host_regions.cuh"

namespace fw::native::pipeline {

struct PortOptions {
  batch::host_regions regions;  // where requests come from
  bool is_write = false;        // a buffer's rows go to the storage
  uint64_t ring = 0;            // 0: workers use the caller's buffer themselves
  uint64_t chunk_bytes = 0;
  uint32_t chunks = 0;
  uint64_t filled = 0;   // address of the word: chunks up to this one have data
  uint64_t emptied = 0;  // address of the word: the data of chunks up to this one was taken
  bool copies = false;   // the engine's own stream moves chunks, as kernels' batches need
};

struct Port;

// Rows of a batch.
struct RowSpan {
  uint64_t begin = 0, end = 0;
};

struct Batch {
  Port* port = nullptr;
  batch::request request = {};
  uint64_t nbytes = 0;
  uint64_t chunks = 0;
  uint64_t dealt = 0;      // the polling thread's
  uint64_t copied = 0;     // likewise: chunks that the engine's stream was given
  uint64_t completed = 0;  // under the port's lock
  // Set under the port's lock. Release: what it has moved.
  std::atomic<bool> ended{false};

  // The polling thread's, see overlaps.h. `waits` is not changed once chunks were dealt.
  uint64_t number = 0;
  bool entered = false;
  std::vector<RowSpan> waits;        // rows that wait until these have ended; in order
  std::shared_ptr<Batch> before[2];  // of each direction; null: none, or it has ended
  bool must_wait();
  // Its rows fail from now on, and its memory is not touched. Relaxed: a worker that sees it late
  // only moves a few more.
  std::atomic<bool> overdue{false};

  // Under `lock`.
  std::mutex lock;
  uint64_t failed = 0;
  uint64_t first_failed = 0;
  std::vector<uint16_t> statuses;  // empty while no row has failed
  std::string reason;              // why the batch as a whole failed

  void fail(uint64_t row, uint16_t status);
  void fail_whole(std::string why);
};

struct Chunk {
  std::shared_ptr<Batch> batch;
  uint64_t q = 0;
  uint64_t begin = 0, end = 0;  // bytes of the batch
  uint64_t memory = 0;          // of byte `begin`
  uint64_t part_bytes = 0;
  uint32_t parts = 0;  // by bytes, or one for each worker that owns drives
  bool by_owner = false;
  bool waits = false;                  // some of its rows do
  bool complete = false;               // under the port's lock
  std::atomic<uint64_t> remaining{0};  // bytes
};

// A chunk in the hands of workers. If some of its rows wait, it is so twice: first without them.
struct Deal {
  std::shared_ptr<Chunk> chunk;
  bool late = false;  // only the rows that have waited
  std::atomic<uint32_t> next{0};
};

// What became of a ticket, for the host.
struct Outcome {
  uint64_t ticket = 0;
  uint64_t failed = 0;
  uint64_t first_failed = 0;
  uint16_t status = 0;  // of that row
  std::string reason;   // empty: the errors of the storage say why
};

struct Port {
  PortOptions options;
  uint64_t step_bytes = 0;  // 0: a batch is one chunk

  std::atomic<uint64_t> expected{0};  // tickets up to this one were announced
  // The polling thread's.
  uint64_t taken = 0;
  uint64_t next_q = 1;
  uint64_t copied_q = 0;  // chunks of the ring that the engine's own stream was given
  std::deque<std::shared_ptr<Chunk>> waiting;  // dealt without the rows that wait

  std::mutex lock;
  std::deque<std::shared_ptr<Batch>> batches;  // taken and not ended
  std::deque<std::shared_ptr<Chunk>> open;     // dealt, the first one not complete
  std::vector<Outcome> outcomes;               // by slot
  uint64_t submitted = 0;                      // by the host

  // Counts what moved. Relaxed: it orders nothing.
  std::atomic<uint64_t> progress{0};
  // The polling thread's: what it has seen of that, and when.
  uint64_t progress_seen = 0;
  int64_t progress_ns = 0;
  void moves() { progress.fetch_add(1, std::memory_order_relaxed); }
};

}  // namespace fw::native::pipeline
