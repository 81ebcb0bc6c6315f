// Batches of rows: blocks submit and wait, a polling thread takes requests, workers move rows.
#include <algorithm>
#include <set>
#include <vector>

#include "flashwarp/batch.cuh"
#include "flashwarp/batch/host_regions.cuh"
#include "simulator/machine.h"

using namespace fw::simulator;
using fw::batch::kNotWaited;
using fw::batch::kOldest;
using fw::batch::kRefused;

namespace {

constexpr uint32_t kRowsOfTable = 24;
constexpr uint32_t kWorkers = 2;
constexpr uint64_t kNobody = ~uint64_t(0);

template <typename T>
T* allocate(uint64_t count, const char* name, Sharing sharing, uint32_t cell_bytes = 8) {
  Region region = {name, nullptr, count * sizeof(T)};
  region.element_bytes = sizeof(T) == 4 ? 4 : 8;
  region.cell_bytes = cell_bytes;
  region.sharing = sharing;
  return reinterpret_cast<T*>(memory.allocate(region));
}

struct Setup {
  uint32_t slots = 4;
  uint32_t rows_max = 4;          // statuses of a slot fill a cell of 8 bytes
  uint32_t bad_percent = 10;      // of rows that the storage fails
  uint64_t stop_after = kNobody;  // tickets of a direction that the engine takes
  uint64_t timeout_ns = 50'000'000;
};

// One direction: what kernels hold, and the host's engine.
class Side {
 public:
  Side(const Setup& setup, bool is_write, uint64_t* table, const Random& random)
      : setup_(setup), is_write_(is_write), table_(table), random_(random), jobs_(setup.slots) {
    const uint64_t all = uint64_t(setup.slots) * setup.rows_max;
    regions_.requests = allocate<fw::batch::request>(setup.slots, "requests", Sharing::kChecked);
    regions_.results = allocate<fw::batch::result>(setup.slots, "results", Sharing::kChecked);
    regions_.lists = allocate<int64_t>(all, "lists", Sharing::kChecked);
    regions_.all_statuses = allocate<uint16_t>(all, "statuses", Sharing::kChecked);
    regions_.count = setup.slots;
    regions_.rows_max = setup.rows_max;
    direction_ = allocate<fw::batch::direction>(1, "direction", Sharing::kAtomic, 4);
    direction_->shared = regions_;
    direction_->states =
        allocate<fw::batch::slot_state>(setup.slots, "slot_states", Sharing::kAtomic);
    direction_->failures =
        allocate<fw::cache::failure>(fw::cache::kFailuresKept, "failures", Sharing::kChecked);
    direction_->limit.timeout_ns = setup.timeout_ns;
    direction_->row_bytes = sizeof(uint64_t);
    left_ = allocate<uint32_t>(setup.slots, "parts_left", Sharing::kAtomic, 4);
    dealt_ = allocate<uint64_t>(1, "dealt", Sharing::kAtomic);
    ended_ = allocate<uint64_t>(1, "ended", Sharing::kAtomic);
  }

  // Batches come after those of the other direction that they name.
  void meet(Side& other) {
    other_ = &other;
    direction_->other = other.direction_;
  }

  fw::batch::direction& direction() { return *direction_; }
  void resume() { setup_.stop_after = kNobody; }

  // The polling thread: takes what is ready. Returns whether it took something.
  bool poll() {
    if (taken_ >= setup_.stop_after) return false;
    fw::batch::request request;
    if (!regions_.take(taken_ + 1, request)) return false;
    // Acquire: what those have moved.
    if (other_ != nullptr && fw::atomic::load_acquire(other_->ended_) < request.after) return false;
    ++taken_;
    const uint32_t slot = regions_.slot(request);
    slot_of_.push_back(slot);
    Job& job = jobs_[slot];
    if (request.rows > setup_.rows_max) scheduler.fail("a request of more rows than a slot has");
    job.request = request;
    job.statuses.assign(request.rows, 0);
    fw::atomic::store_relaxed(&left_[slot], kWorkers);
    // Release: the job, which workers acquire.
    fw::atomic::store_release(dealt_, taken_);
    return true;
  }

  // A worker: moves its share of the next ticket. Returns whether there was one.
  bool work(uint32_t worker) {
    const uint64_t ticket = done_[worker] + 1;
    if (fw::atomic::load_acquire(dealt_) < ticket) return false;
    const uint32_t slot = slot_of_[ticket - 1];
    Job& job = jobs_[slot];
    for (uint64_t i = worker; i < job.request.rows; i += kWorkers) move(job, slot, i);
    ++done_[worker];
    // Release and acquire: who ends the batch has seen what both workers have moved.
    if (fw::atomic::add_release(&left_[slot], ~0u) != 1) return true;
    fw::atomic::fence_system();
    const uint64_t failed = uint64_t(
        std::count_if(job.statuses.begin(), job.statuses.end(), [](uint16_t s) { return s != 0; }));
    if (failed != 0) regions_.report(job.request, job.statuses.data(), job.statuses.size());
    // Release: see `poll`. Both workers end tickets in their order.
    fw::atomic::store_release(ended_, ticket);
    regions_.finish(job.request, failed);
    return true;
  }

 private:
  struct Job {
    fw::batch::request request;
    std::vector<uint16_t> statuses;
  };

  void move(Job& job, uint32_t slot, uint64_t i) {
    const bool sequence = job.request.kind == fw::batch::kSequence;
    const uint64_t id = sequence ? job.request.first + i
                                 : uint64_t(fw::atomic::load_plain(&regions_.list(slot)[i]));
    uint64_t* row = reinterpret_cast<uint64_t*>(job.request.buffer) + i;
    if (id >= kRowsOfTable) {
      job.statuses[i] = fw::nvme::kLbaOutOfRange;
      if (!is_write_) fw::atomic::store_plain(row, uint64_t(0));
    } else if (is_write_) {
      fw::atomic::store_plain(&table_[id], fw::atomic::load_plain(row));
    } else if (random_.chance(setup_.bad_percent)) {
      job.statuses[i] = fw::nvme::kUnrecoveredReadError;
      fw::atomic::store_plain(row, uint64_t(0));
    } else {
      fw::atomic::store_plain(row, fw::atomic::load_plain(&table_[id]));
    }
  }

  Setup setup_;
  const bool is_write_;
  uint64_t* table_;
  Random random_;
  fw::batch::host_regions regions_;
  fw::batch::direction* direction_;
  std::vector<Job> jobs_;          // by slot
  std::vector<uint32_t> slot_of_;  // by ticket, from 1 on
  uint32_t* left_;
  uint64_t* dealt_;
  uint64_t* ended_;
  Side* other_ = nullptr;
  uint64_t taken_ = 0;
  uint64_t done_[kWorkers] = {};
};

uint64_t value_of(uint64_t id, uint64_t version) { return (version << 32 | id) + (1u << 20); }

class Engine {
 public:
  Engine(Run& run, const Setup& setup)
      : table_(allocate<uint64_t>(kRowsOfTable, "table", Sharing::kRacy)),
        reads_(setup, false, table_, Random(run.seed, 601)),
        writes_(setup, true, table_, Random(run.seed, 602)),
        seed_(run.seed) {
    for (uint32_t i = 0; i < kRowsOfTable; ++i) table_[i] = value_of(i, 0);
    reads_.meet(writes_);
    writes_.meet(reads_);
    pipeline_ = {&reads_.direction(), &writes_.direction()};
    scheduler.let_time_pass(setup.stop_after != kNobody);
  }

  const fw::pipeline<uint64_t>& pipeline() const { return pipeline_; }
  Side& reads() { return reads_; }
  uint64_t stored(uint32_t row) const { return table_[row]; }

  // Runs blocks of so many warps beside the engine's threads.
  void launch(uint32_t blocks, uint32_t warps, const std::function<void(uint32_t block)>& work) {
    const uint32_t threads = blocks * warps * kWidth;
    auto* barriers = allocate<block_barrier>(blocks, "barriers", Sharing::kAtomic);
    scheduler.launch(
        threads, kWidth,
        [&](uint32_t index) {
          become(index, threads, warps, barriers);
          work(index / kWidth / warps);
        },
        1 + kWorkers,
        [&](uint32_t index) {
          while (!scheduler.stopping()) {
            const bool moved = index == 0 ? reads_.poll() | writes_.poll()
                                          : reads_.work(index - 1) | writes_.work(index - 1);
            if (!moved) scheduler.pause(0);
          }
        });
  }

  void check_no_faults() {
    if (noted() != 0) throw Failure("a call in a kernel was refused\n");
  }
  uint32_t noted() const { return pipeline_.reads->log.noted + pipeline_.writes->log.noted; }

 private:
  uint64_t* table_;
  Side reads_, writes_;
  const uint64_t seed_;
  fw::pipeline<uint64_t> pipeline_;
};

// The rows of one batch, and where they go.
struct Batch {
  int64_t* ids;
  uint64_t* buffer;
  uint16_t* statuses;
  std::vector<int64_t> wanted;
  bool sequence = false;
  uint64_t ticket = 0;

  explicit Batch(uint32_t rows)
      : ids(allocate<int64_t>(rows, "ids", Sharing::kChecked)),
        buffer(allocate<uint64_t>(rows, "buffer", Sharing::kChecked)),
        // Neighbouring lanes store two bytes each of one cell.
        statuses(allocate<uint16_t>(rows, "statuses_out", Sharing::kRacy)) {}

  // The threads `rank` of `ranks` write the ids.
  void draw(Random random, uint32_t rows, uint32_t begin, uint32_t end, uint32_t rank,
            uint32_t ranks) {
    const uint32_t n = random.below(rows + 1);
    sequence = random.chance(25);
    wanted.clear();
    for (uint32_t i = 0; i < n; ++i) {
      int64_t id = sequence && i != 0 ? wanted[0] + i : int64_t(begin + random.below(end - begin));
      if (!sequence && random.chance(5)) id = kRowsOfTable;
      wanted.push_back(id);
    }
    for (uint32_t i = rank; i < n; i += ranks) fw::atomic::store_plain(&ids[i], wanted[i]);
  }
  uint64_t first() const { return wanted.empty() ? 0 : uint64_t(wanted[0]); }

  // The threads look at their rows.
  void check(uint64_t failed, const std::vector<uint64_t>& expected, uint32_t rank,
             uint32_t ranks) const {
    if (failed == kNotWaited) return;
    if (failed > wanted.size()) scheduler.fail("more rows failed than the batch has");
    uint64_t count = 0;
    for (uint32_t i = 0; i < wanted.size(); ++i) {
      const uint16_t status = fw::atomic::raw<2>::load(&statuses[i]);
      if (status != 0) ++count;
      if (i % ranks != rank) continue;
      const uint64_t row = fw::atomic::load_plain(&buffer[i]);
      const bool bad = uint64_t(wanted[i]) >= kRowsOfTable;
      if (bad && status != fw::nvme::kLbaOutOfRange) scheduler.fail("a row without its status");
      if (status != 0 && row != 0) scheduler.fail("a row that failed is not zero");
      if (status == 0 && row != expected[wanted[i]]) scheduler.fail("a row is not its own");
    }
    if (count != failed) scheduler.fail("the statuses do not match their count");
  }
};

std::vector<uint64_t> first_values() {
  std::vector<uint64_t> values;
  for (uint32_t i = 0; i < kRowsOfTable; ++i) values.push_back(value_of(i, 0));
  return values;
}

uint32_t rank_here() { return fw::block::rank(); }
uint32_t ranks_here() { return fw::block::size(); }

Setup draw_setup(Run& run) {
  Setup setup;
  constexpr uint32_t kPercents[] = {0, 10, 40};
  setup.bad_percent = run.random.pick(kPercents);
  return setup;
}

uint32_t draw_warps(Run& run) { return kWidth == 32 ? 1 : 1 + run.random.below(2); }

// Blocks with batches of their own, `ahead` of which are in flight when the block waits for one.
void run_blocks(Run& run, const Setup& setup, uint32_t blocks, uint32_t warps, uint32_t ahead,
                uint32_t rows) {
  Engine engine(run, setup);
  const bool stops = setup.stop_after != kNobody;
  const uint32_t rounds = kWidth == 32 ? 3 : 4;
  std::vector<std::vector<std::vector<Batch>>> batches(blocks);
  // Each lane has a view of its own of what is host memory here.
  for (auto& each : batches) {
    for (uint32_t n = 0; n <= ahead; ++n) {
      const Batch shared(std::max(rows, 1u));
      each.emplace_back(warps * kWidth, shared);
    }
  }
  const std::vector<uint64_t> expected = first_values();
  engine.launch(blocks, warps, [&](uint32_t block) {
    const uint32_t rank = rank_here(), ranks = ranks_here();
    const auto& p = engine.pipeline();
    const auto batch_of = [&](uint32_t n) -> Batch& {
      return batches[block][n % (ahead + 1)][rank];
    };
    for (uint32_t n = 0; n < rounds + ahead; ++n) {
      if (n < rounds) {
        Batch& b = batch_of(n);
        b.draw(Random(run.seed, 10'000 + 100 * block + n), rows, 0, kRowsOfTable, rank, ranks);
        b.ticket = b.sequence ? fw::block::prefetch_seq(p, b.first(), b.wanted.size(), b.buffer)
                              : fw::block::prefetch(p, b.ids, b.wanted.size(), b.buffer);
        if (b.ticket == kRefused && !stops) scheduler.fail("a batch was refused");
      }
      if (n < ahead) continue;
      Batch& b = batch_of(n - ahead);
      if (b.ticket == kRefused) return;
      const uint64_t failed = fw::block::prefetch_wait(p, b.ticket, b.statuses);
      if (failed == kNotWaited && !stops) scheduler.fail("a batch was not waited for");
      // What the engine may still write must not be used again.
      if (failed == kNotWaited) return;
      b.check(failed, expected, rank, ranks);
      fw::block::sync();
    }
  });
  if (!stops) engine.check_no_faults();
}

}  // namespace

FW_SCENARIO(batches, "blocks with batches of their own, in slots that are used again") {
  Setup setup = draw_setup(run);
  const uint32_t warps = draw_warps(run);
  if (run.random.chance(50)) {
    // One in flight each, and fewer slots than blocks.
    const uint32_t blocks = kWidth == 32 ? 2 : 2 + run.random.below(2);
    setup.slots = 1u << run.random.below(2);
    run_blocks(run, setup, blocks, warps, 0, setup.rows_max * setup.slots);
  } else {
    const uint32_t blocks = 1 + run.random.below(2);
    setup.slots = 4;
    run_blocks(run, setup, blocks, warps, 1, blocks == 1 ? 2 * setup.rows_max : setup.rows_max);
  }
}

FW_SCENARIO(batches_grid, "all blocks of a launch prefetch, look at the rows, and write them") {
  Setup setup = draw_setup(run);
  setup.slots = 4;
  setup.bad_percent = 0;
  Engine engine(run, setup);
  const uint32_t warps = draw_warps(run);
  const uint32_t blocks = kWidth == 32 ? 2 : 1 + run.random.below(3);
  const uint32_t rows = 2 * setup.rows_max;
  const uint32_t threads = blocks * warps * kWidth;
  const uint32_t rounds = kWidth == 32 ? 2 : 3;
  std::vector<std::vector<Batch>> batches(2);
  for (auto& each : batches) {
    const Batch shared(rows);
    each.assign(threads, shared);
  }
  const std::vector<uint64_t> expected = first_values();
  std::vector<uint64_t> stored = expected;
  engine.launch(blocks, warps, [&](uint32_t) {
    const uint32_t rank = fw::base::thread_index();
    const auto& p = engine.pipeline();
    std::vector<uint64_t> now = expected;
    const auto draw = [&](uint32_t n) {
      Batch& b = batches[n % 2][rank];
      // Disjoint rows for the two batches in flight, so that reads and writes do not meet.
      const uint32_t half = kRowsOfTable / 2;
      b.draw(Random(run.seed, 10'000 + n), rows, n % 2 * half, (n % 2 + 1) * half - rows, rank,
             threads);
      // A list with a row once only, because it is written.
      std::set<int64_t> once(b.wanted.begin(), b.wanted.end());
      if (once.size() != b.wanted.size()) b.sequence = true;
      for (uint32_t i = 0; b.sequence && i < b.wanted.size(); ++i) {
        b.wanted[i] = b.wanted[0] + i;
      }
    };
    const auto prefetch = [&](uint32_t n) {
      Batch& b = batches[n % 2][rank];
      draw(n);
      const uint64_t ticket = b.sequence ? p.prefetch_seq(b.first(), b.wanted.size(), b.buffer)
                                         : p.prefetch(b.ids, b.wanted.size(), b.buffer);
      if (ticket == kRefused) scheduler.fail("a batch was refused");
    };
    prefetch(0);
    for (uint32_t n = 0; n < rounds; ++n) {
      if (n + 1 < rounds) prefetch(n + 1);
      Batch& b = batches[n % 2][rank];
      const uint64_t failed = p.prefetch_wait(kOldest, b.statuses);
      if (failed == kNotWaited) scheduler.fail("a batch was not waited for");
      b.check(failed, now, rank, threads);
      // Each thread changes its own rows.
      for (uint32_t i = 0; i < b.wanted.size(); ++i) {
        const bool exists = uint64_t(b.wanted[i]) < kRowsOfTable;
        if (i % threads == rank) {
          const uint64_t row = exists ? value_of(b.wanted[i], n + 1) : 0;
          fw::atomic::store_plain(&b.buffer[i], row);
        }
        if (exists) now[b.wanted[i]] = value_of(b.wanted[i], n + 1);
      }
      const uint64_t ticket = b.sequence ? p.write_back_seq(b.first(), b.wanted.size(), b.buffer)
                                         : p.write_back(b.ids, b.wanted.size(), b.buffer);
      if (ticket == kRefused) scheduler.fail("a write was refused");
      const uint64_t lost = p.write_back_wait();
      if (lost == kNotWaited || lost != failed) scheduler.fail("rows were not written");
    }
    if (rank == 0) stored = now;
  });
  engine.check_no_faults();
  for (uint32_t i = 0; i < kRowsOfTable; ++i) {
    if (engine.stored(i) != stored[i]) throw Failure("the table lacks a row that was written\n");
  }
}

FW_SCENARIO(batches_order,
            "blocks that store and load rows without a wait: in the order of calls") {
  Setup setup = draw_setup(run);
  setup.slots = 4;
  setup.bad_percent = 0;
  Engine engine(run, setup);
  const uint32_t warps = draw_warps(run);
  const uint32_t blocks = 2, rounds = 2, rows = 1 + run.random.below(setup.rows_max);
  std::vector<std::vector<Batch>> stored(blocks), loaded(blocks);
  for (uint32_t b = 0; b < blocks; ++b) {
    for (uint32_t n = 0; n < rounds; ++n)
      stored[b].emplace_back(rows), loaded[b].emplace_back(rows);
  }
  engine.launch(blocks, warps, [&](uint32_t block) {
    const auto& p = engine.pipeline();
    const uint32_t first = block * setup.rows_max;
    uint64_t stores[rounds], loads[rounds];
    for (uint32_t n = 0; n < rounds; ++n) {
      for (uint32_t i = rank_here(); i < rows; i += ranks_here()) {
        fw::atomic::store_plain(&stored[block][n].buffer[i], value_of(first + i, n + 1));
      }
      stores[n] = fw::block::write_back_seq(p, first, rows, stored[block][n].buffer);
      loads[n] = fw::block::prefetch_seq(p, first, rows, loaded[block][n].buffer);
      if (stores[n] == kRefused || loads[n] == kRefused) scheduler.fail("a batch was refused");
    }
    for (uint32_t n = 0; n < rounds; ++n) {
      if (fw::block::prefetch_wait(p, loads[n]) != 0) scheduler.fail("rows failed");
      if (fw::block::write_back_wait(p, stores[n]) != 0) scheduler.fail("rows failed");
      for (uint32_t i = rank_here(); i < rows; i += ranks_here()) {
        if (fw::atomic::load_plain(&loaded[block][n].buffer[i]) != value_of(first + i, n + 1)) {
          scheduler.fail("a load does not see the stores before it, or sees later ones");
        }
      }
    }
  });
  engine.check_no_faults();
}

FW_SCENARIO(batches_oldest,
            "blocks that take whatever batch is the oldest: each one is taken once") {
  Setup setup = draw_setup(run);
  setup.slots = 4;
  setup.bad_percent = 0;
  // Two parts each, so that slots form chains.
  constexpr uint32_t kRows = 6;
  Engine engine(run, setup);
  const uint32_t warps = draw_warps(run);
  const uint32_t blocks = kWidth == 32 ? 2 : 2 + run.random.below(2);
  std::vector<Batch> batches;
  for (uint32_t b = 0; b < blocks; ++b) batches.emplace_back(kRows);
  std::vector<uint64_t> seen;
  const bool by_ticket = run.random.chance(50);
  engine.launch(blocks, warps, [&](uint32_t block) {
    const auto& p = engine.pipeline();
    const uint32_t rank = rank_here();
    // As many rows fail as the block's number says.
    for (uint32_t i = rank; i < kRows; i += ranks_here()) {
      fw::atomic::store_plain(&batches[block].ids[i], int64_t(i <= block ? kRowsOfTable : i));
    }
    const uint64_t ticket =
        fw::block::prefetch(p, batches[block].ids, kRows, batches[block].buffer);
    // The first block may ask for its own one: then others must not get it.
    const bool own = by_ticket && block == 0;
    const uint64_t failed = fw::block::prefetch_wait(p, own ? ticket : kOldest);
    if (rank == 0) seen.push_back(failed);
  });
  // One block may have taken the batch that the first one asks for; then the record says so.
  const bool refused = std::find(seen.begin(), seen.end(), kNotWaited) != seen.end();
  if (refused != (engine.noted() != 0)) throw Failure("the record does not say what happened\n");
  if (refused && !by_ticket) throw Failure("a batch was not found\n");
  std::sort(seen.begin(), seen.end());
  if (std::adjacent_find(seen.begin(), seen.end()) != seen.end()) {
    throw Failure("a batch was waited for twice\n");
  }
}

FW_SCENARIO(batches_stop, "the engine stops: no wait lasts for ever, and nothing wrong is seen") {
  Setup setup = draw_setup(run);
  setup.slots = 1u << run.random.below(2);
  setup.stop_after = run.random.below(4);
  setup.timeout_ns = 20'000;
  run_blocks(run, setup, 2, draw_warps(run), 0, setup.rows_max);
}

FW_SCENARIO(batches_missing,
            "a block that does not come: the others leave, and the next launch is well") {
  Setup setup = draw_setup(run);
  setup.bad_percent = 0;
  setup.timeout_ns = 20'000;
  Engine engine(run, setup);
  scheduler.let_time_pass(true);
  Batch batch(1);
  const uint32_t blocks = kWidth == 32 ? 2 : 2 + run.random.below(2);
  engine.launch(blocks, 1, [&](uint32_t block) {
    if (block == 0) return;
    const uint64_t ticket = engine.pipeline().prefetch_seq(0, 1, batch.buffer);
    if (ticket != kRefused) scheduler.fail("a call that not all blocks have made was accepted");
  });
  if (engine.noted() != blocks - 1) throw Failure("the record lacks a block that has waited\n");
  engine.pipeline().reads->limit.timeout_ns = 50'000'000;
  scheduler.let_time_pass(false);
  engine.launch(blocks, 1, [&](uint32_t) {
    const uint64_t ticket = engine.pipeline().prefetch_seq(5, 1, batch.buffer);
    if (ticket == kRefused) scheduler.fail("a batch was refused");
    if (engine.pipeline().prefetch_wait(ticket) != 0) scheduler.fail("a batch failed");
    if (fw::atomic::load_plain(batch.buffer) != value_of(5, 0)) scheduler.fail("a wrong row");
  });
}

// Fails unless a call of a block takes a time in some limits: of the first thread, which waits.
template <typename Call>
void check_time(uint64_t at_least, uint64_t at_most, Call call) {
  fw::block::sync();
  const uint64_t begin = fw::base::clock_ns();
  call();
  const uint64_t taken = fw::base::clock_ns() - begin;
  if (rank_here() != 0) return;
  if (taken < at_least) scheduler.fail("a wait fails at once although something has changed");
  if (taken > at_most) scheduler.fail("a wait behind one that was in vain takes its time again");
}

// As the host does when it raises what was noted. One block.
void look_as_the_host(const fw::batch::direction& d) {
  auto& log = const_cast<fw::batch::direction&>(d).log;
  if (rank_here() == 0) {
    fw::atomic::store_relaxed_system(&log.read, fw::atomic::load_relaxed(&log.noted));
  }
  fw::block::sync();
}

FW_SCENARIO(batches_late,
            "the engine is late: waits fail at once until it answers or the host has looked, and "
            "a batch that was not waited for is waited for again") {
  Setup setup = draw_setup(run);
  setup.bad_percent = 0;
  setup.stop_after = 0;
  setup.timeout_ns = 100'000;
  Engine engine(run, setup);
  const uint32_t warps = draw_warps(run);
  Batch batch(6), other(12);
  const bool host_looks = run.random.chance(50);
  uint64_t ticket = kRefused;
  const auto& p = engine.pipeline();
  const auto in_vain = [&] {
    if (fw::block::prefetch_wait(p, ticket) != kNotWaited) {
      scheduler.fail("a batch was waited for that nobody has moved");
    }
  };
  engine.launch(1, warps, [&](uint32_t) {
    const uint64_t mine = fw::block::prefetch_seq(p, 3, 6, batch.buffer);
    if (mine == kRefused) scheduler.fail("a batch was refused");
    ticket = mine;
    in_vain();
    check_time(0, setup.timeout_ns / 2, in_vain);
    if (host_looks) {
      look_as_the_host(*p.reads);
      check_time(setup.timeout_ns, kNobody, in_vain);
    } else {
      // The slots that are left, and one more.
      const auto fill = [&] {
        for (uint32_t n = 0; n < 3; ++n) {
          const uint64_t more = fw::block::prefetch_seq(p, n, 4, other.buffer + 4 * n);
          if ((more == kRefused) != (n == 2)) scheduler.fail("a batch in a slot that is not free");
        }
      };
      check_time(0, setup.timeout_ns / 2, fill);
      engine.reads().resume();
      uint64_t failed = kNotWaited;
      for (uint32_t n = 0; failed == kNotWaited; ++n) {
        if (n > 1000) scheduler.fail("a batch is not waited for, however often it is asked for");
        fw::base::pause(1000);
        failed = fw::block::prefetch_wait(p, ticket);
      }
      if (failed != 0) scheduler.fail("rows failed");
    }
  });

  // From here on each wait succeeds at its first try.
  engine.reads().resume();
  engine.pipeline().reads->limit.timeout_ns = 50'000'000;
  scheduler.let_time_pass(false);
  engine.launch(1, warps, [&](uint32_t) {
    if (host_looks) {
      look_as_the_host(*p.reads);
      if (fw::block::prefetch_wait(p, ticket) != 0) scheduler.fail("a batch was given up");
    } else {
      for (uint32_t n = 0; n < 2; ++n) {
        if (fw::block::prefetch_wait(p) != 0) scheduler.fail("a batch was given up");
      }
    }
    for (uint32_t i = rank_here(); i < 6; i += ranks_here()) {
      if (fw::atomic::load_plain(&batch.buffer[i]) != value_of(3 + i, 0)) {
        scheduler.fail("a row is not its own");
      }
    }
    for (uint32_t n = 0; n < 6; ++n) {
      const uint64_t next = fw::block::prefetch_seq(p, n, 4, other.buffer);
      if (next == kRefused) scheduler.fail("a batch was refused");
      if (fw::block::prefetch_wait(p, next) != 0) scheduler.fail("a batch was given up");
    }
  });
}

FW_SCENARIO(batches_full,
            "nobody gives slots back: later waits for one fail at once, until somebody does") {
  Setup setup = draw_setup(run);
  setup.bad_percent = 0;
  setup.slots = 2;
  setup.timeout_ns = 100'000;
  Engine engine(run, setup);
  scheduler.let_time_pass(true);
  const uint32_t warps = draw_warps(run);
  const bool host_looks = run.random.chance(50);
  Batch batch(8);
  const auto& p = engine.pipeline();
  const auto begin = [&](uint32_t place) {
    return fw::block::prefetch_seq(p, 3, 4, batch.buffer + 4 * place);
  };
  const auto in_vain = [&] {
    if (begin(0) != kRefused) scheduler.fail("a batch in a slot that is not free");
  };
  engine.launch(1, warps, [&](uint32_t) {
    if (begin(0) == kRefused || begin(1) == kRefused) scheduler.fail("a batch was refused");
    in_vain();
    check_time(0, setup.timeout_ns / 2, in_vain);
    if (host_looks) {
      look_as_the_host(*p.reads);
      check_time(setup.timeout_ns, kNobody, in_vain);
    }
    for (uint32_t n = 0; fw::block::prefetch_wait(p) == kNotWaited; ++n) {
      if (n > 20) scheduler.fail("a batch is not waited for, however often it is waited for");
    }
    // A slot is free; and then none is, in another state of the tickets.
    if (begin(0) == kRefused) scheduler.fail("a batch was refused although a slot is free");
    check_time(setup.timeout_ns, kNobody, in_vain);
  });
}
