// What moves a worker's runs: copies of what lies in memory, and queue pairs for the rest.
//
// One thread at a time; no two movers share a queue pair. If the storage is no drive behind a
// controller, the mover serves its queue pair itself, so alignment, short transfers, replicas and
// faults are handled as for arrays. Nothing here throws after construction.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "io/io_engine.h"
#include "nvme/software/queue_server.h"
#include "nvme/software/software_controller.h"
#include "pipeline/host_queue_pair.h"
#include "storage/storage.h"

namespace fw::native::pipeline {

struct Chunk;

// Whole rows that are neighbours in the storage and in memory, or a part of one row.
struct Run {
  Chunk* chunk = nullptr;
  uint64_t offset = 0;  // in the namespace of the drive
  uint64_t memory = 0;
  uint32_t nbytes = 0;
  uint32_t drive = 0;
  uint32_t first_row = 0;  // of the batch
  uint32_t rows = 1;
};

struct EndedRun {
  Run run;
  uint16_t status;  // of NVMe, without the phase tag
};

// The most bytes of a run, and so of a command.
inline constexpr uint32_t kRunBytesMax = 256 << 10;

// Drives with a controller each, whose queue pairs movers use. Fixed once made; it outlives movers.
struct Drives {
  std::vector<std::unique_ptr<SoftwareController>> controllers;
  bool served_by_workers = false;  // the controllers have no threads
  // Queue pairs of mover m on drive d; each is used by that mover only.
  std::vector<std::vector<std::unique_ptr<HostQueuePair>>> pairs;
};

class Mover {
 public:
  struct Options {
    std::shared_ptr<Storage> storage;
    Drives* drives = nullptr;                           // null: the mover serves the storage itself
    IoEngineFactory* engines = nullptr;                 // null: no file to read
    std::vector<std::pair<uint64_t, uint64_t>> memory;  // that runs may name
    uint32_t index = 0;
    uint32_t depth = 128;
    uint32_t row_bytes = 0;
    bool is_write = false;  // may be asked to write: then it has queue pairs for that, too
  };
  explicit Mover(const Options& options);

  // Whether it needs more runs to be busy.
  bool hungry() const { return backlog_.size() == next_ && in_flight_ <= slots_.size() / 2; }
  bool idle() const { return backlog_.size() == next_ && in_flight_ == 0; }

  void add(const Run& run, bool is_write) { backlog_.push_back({run, is_write, false}); }

  // Starts what there is room for and appends what has ended. Never waits, but for storages whose
  // calls block. Returns whether anything moved.
  bool work(std::vector<EndedRun>& ended);

  // Ends all runs, those in flight by the means of the controller, within a few seconds. Returns
  // false if some do not end: then this mover and the memory of its runs must not be used again.
  bool abort(std::vector<EndedRun>& ended);

  std::vector<ErrorRecord> take_errors();

 private:
  struct Waiting {
    Run run;
    bool is_write;
    bool tried;  // the page cache was asked
  };
  // A command in flight, by its identifier.
  struct Slot {
    Run run;
    uint32_t lead = 0;
    bool is_write = false;
    bool bounced = false;
  };

  void copy_mapped(std::vector<EndedRun>& ended);
  void copy_cached(std::vector<EndedRun>& ended);
  bool start(const Waiting& waiting, std::vector<EndedRun>& ended);
  void post(HostQueuePair& pair, const Waiting& waiting);
  void reap(HostQueuePair& pair, std::vector<EndedRun>& ended);
  void finish(const Run& run, bool is_write, uint16_t status, std::vector<EndedRun>& ended);
  void write_blocking(const Run& run, std::vector<EndedRun>& ended);
  void note(const Run& run, bool is_write, int error, const IoFailure& failure);
  HostQueuePair& pair_of(uint32_t drive);
  std::byte* bounce(uint16_t cid);

  const std::shared_ptr<Storage> storage_;
  Drives* const drives_;
  const uint32_t index_;
  const uint32_t depth_;
  const uint32_t row_bytes_;
  const bool in_memory_;  // reads are copies
  ControllerContext context_;
  // Of a storage that the mover serves itself.
  std::unique_ptr<HostQueuePair> own_pair_;
  std::unique_ptr<QueueServer> server_;

  std::vector<Waiting> backlog_;
  size_t next_ = 0;  // the first of the backlog that has not started
  size_t tried_ = 0;
  uint32_t in_flight_ = 0;
  uint32_t writes_ = 0;  // of these
  std::vector<Slot> slots_;
  std::vector<uint16_t> free_cids_;
  std::unique_ptr<HostMemory> bounce_;
};

}  // namespace fw::native::pipeline
