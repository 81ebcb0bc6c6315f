// The workers: they take parts of chunks, move their rows, and end chunks and batches.
#include <sys/prctl.h>

#include <algorithm>
#include <cstring>

#include "base/fault_guard.h"
#include "nvme/software/completions.h"
#include "pipeline/core.h"
#include "storage/composite_storage.h"

namespace fw::native::pipeline {
namespace {

// Between looks at queue pairs with commands in flight: a few of them end meanwhile. Naps become
// longer while none ends, as with large ones, so that waiting takes little of a core.
constexpr int64_t kShortNapNs = 5'000, kLongNapNs = 40'000;
constexpr uint32_t kLooksPerNap = 32;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void Batch::fail(uint64_t row, uint16_t status) {
  const std::lock_guard guard(lock);
  if (statuses.empty()) statuses.resize(request.rows);
  if (statuses[row] == nvme::kSuccess) {
    if (failed == 0 || row < first_failed) first_failed = row;
    ++failed;
  }
  statuses[row] = status;
}

void Batch::fail_whole(std::string why) {
  const std::lock_guard guard(lock);
  overdue.store(true, std::memory_order_relaxed);
  if (reason.empty()) reason = std::move(why);
}

// Whether rows wait for batches that have not ended. If it is overdue, they do so no more.
bool Batch::must_wait() {
  bool must = false;
  for (std::shared_ptr<Batch>& each : before) {
    if (each == nullptr) continue;
    if (overdue.load(std::memory_order_relaxed) || each->ended.load(std::memory_order_seq_cst)) {
      each.reset();
    } else {
      must = true;
    }
  }
  return must;
}

void BatchEngine::Core::work(uint32_t index) {
  const GuardedVisit visit;
  // The default slack of 50 us would make naps ten times as long.
  prctl(PR_SET_TIMERSLACK, 1'000, 0, 0, 0);
  Mover& mover = *movers[index];
  std::vector<EndedRun> ended;
  uint32_t aborts_seen = 0, looks = 0;
  int64_t idle_since_ns = 0, nap_ns = kShortNapNs;
  while (true) {
    // Before the look for work, so that a wake-up after it is not missed.
    const uint32_t epoch = sleepers[index]->epoch();
    // Acquire: the batches that are overdue are marked.
    if (const uint32_t now = aborts.load(std::memory_order_acquire); now != aborts_seen) {
      aborts_seen = now;
      // What does not end now never does; the polling thread gives up on it.
      mover.abort(ended);
      settle(mover, ended);
    }
    bool moved = fetch(index, mover, ended);
    moved |= mover.work(ended);
    settle(mover, ended);
    if (moved) {
      looks = 0;
      idle_since_ns = 0;
      nap_ns = kShortNapNs;
      continue;
    }
    if (workers_end.load(std::memory_order_acquire)) return;
    relax();
    if (++looks % kLooksPerNap != 0) continue;
    if (!mover.idle()) {
      const timespec nap = {0, nap_ns};
      nanosleep(&nap, nullptr);
      nap_ns = std::min(2 * nap_ns, kLongNapNs);
      continue;
    }
    const int64_t now_ns = monotonic_ns();
    if (idle_since_ns == 0) idle_since_ns = now_ns;
    if (now_ns - idle_since_ns > kSpinNs) sleepers[index]->sleep(epoch, 0);
  }
}

// Takes parts until the mover has enough. Returns whether it took one.
bool BatchEngine::Core::fetch(uint32_t index, Mover& mover, std::vector<EndedRun>& ended) {
  bool took = false;
  const bool owns = !own_queues.empty();
  while (mover.hungry() && (owns || index < meter.active())) {
    std::shared_ptr<Deal> deal;
    uint32_t part = index;
    {
      const std::lock_guard guard(queue_lock);
      auto& from = owns ? own_queues[index] : queue;
      while (!owns && !from.empty() &&
             (part = from.front()->next.fetch_add(1)) >= from.front()->chunk->parts) {
        from.pop_front();
      }
      if (from.empty()) break;
      deal = from.front();
      if (owns) from.pop_front();
    }
    fill(*deal, part, index, mover);
    took = true;
    if (!ended.empty()) break;
  }
  return took;
}

// Gives the rows of a part to the mover, neighbours as one run. Rows that do not exist fail here.
void BatchEngine::Core::fill(const Deal& deal, uint32_t part, uint32_t index, Mover& mover) {
  Chunk& chunk = *deal.chunk;
  const uint64_t row_bytes = options.row_bytes;
  uint64_t position = chunk.begin + (chunk.by_owner ? 0 : part * chunk.part_bytes);
  const uint64_t end =
      chunk.by_owner ? chunk.end : std::min(chunk.end, position + chunk.part_bytes);
  uint64_t ended_bytes = 0;
  Run last;
  if (chunk.waits) {
    const std::vector<RowSpan>& waits = chunk.batch->waits;
    auto next = std::ranges::upper_bound(waits, position / row_bytes, {}, &RowSpan::end);
    for (; next != waits.end() && next->begin * row_bytes < end; ++next) {
      const uint64_t from = std::max(position, next->begin * row_bytes);
      const uint64_t to = std::min(end, next->end * row_bytes);
      ended_bytes += deal.late ? fill_bytes(chunk, from, to, index, mover, last)
                               : fill_bytes(chunk, position, from, index, mover, last);
      position = to;
    }
  }
  if (!deal.late) ended_bytes += fill_bytes(chunk, position, end, index, mover, last);
  add_run(last, mover);
  if (ended_bytes != 0) end_bytes(chunk, ended_bytes);
}

// Does so for the bytes of a batch up to `end`. Returns the bytes of which nothing moves.
uint64_t BatchEngine::Core::fill_bytes(Chunk& chunk, uint64_t position, uint64_t end,
                                       uint32_t index, Mover& mover, Run& last) {
  Batch& batch = *chunk.batch;
  const Port& port = *batch.port;
  const uint64_t row_bytes = options.row_bytes;
  const uint32_t owners = chunk.by_owner ? chunk.parts : 1;
  const bool sequence = batch.request.kind == batch::kSequence;
  const int64_t* ids = port.options.regions.list(port.options.regions.slot(batch.request));
  // Divisions cost as much as the copy of a narrow row, so the loops have none.
  uint64_t row = position / row_bytes, inside = position % row_bytes;
  const uint64_t rows_end = (end + row_bytes - 1) / row_bytes;
  uint64_t ended_bytes = 0;
  while (position < end) {
    const uint64_t id = sequence ? batch.request.first + row : uint64_t(ids[row]);
    const uint64_t rows_left = rows_end - row;
    const uint64_t count = id >= options.rows ? 1
                           : sequence         ? std::min(rows_left, options.rows - id)
                                              : neighbours(ids + row, id, rows_left);
    Span span;
    span.chunk = &chunk;
    span.first_row = row;
    span.inside = inside;
    span.memory = chunk.memory + (position - chunk.begin);
    span.nbytes = std::min(count * row_bytes - inside, end - position);
    position += span.nbytes;
    row += count;
    inside = 0;
    if (id < options.rows) {
      span.offset = id * row_bytes + span.inside;
      ended_bytes += add_span(span, owners, index, mover, last);
      continue;
    }
    // It lies on no drive, so the first of the owners has it.
    if (owners != 1 && index != 0) continue;
    batch.fail(span.first_row, nvme::kLbaOutOfRange);
    const bool overdue = batch.overdue.load(std::memory_order_relaxed);
    if (!overdue && !port.options.is_write) {
      std::memset(reinterpret_cast<void*>(span.memory), 0, span.nbytes);
    }
    ended_bytes += span.nbytes;
  }
  return ended_bytes;
}

// Counts the rows from `id` on that follow each other in a list, the first one included.
uint64_t BatchEngine::Core::neighbours(const int64_t* ids, uint64_t id, uint64_t most) const {
  most = std::min(most, options.rows - id);
  uint64_t count = 1;
  while (count != most && uint64_t(ids[count]) == id + count) ++count;
  return count;
}

// Cuts a span into runs, and joins those of the worker's drives to the last run or adds that one to
// the mover. Returns the bytes of runs that do not begin because the batch is overdue.
uint64_t BatchEngine::Core::add_span(const Span& span, uint32_t owners, uint32_t index,
                                     Mover& mover, Run& last) {
  Batch& batch = *span.chunk->batch;
  const uint64_t row_bytes = options.row_bytes;
  const auto* striped = drives.controllers.size() > 1
                            ? static_cast<const PartitionedStorage*>(options.storage.get())
                            : nullptr;
  uint64_t ended_bytes = 0;
  uint64_t row = span.first_row, inside = span.inside;
  for (uint64_t done = 0, step = 0; done != span.nbytes; done += step) {
    Run run;
    run.chunk = span.chunk;
    run.memory = span.memory + done;
    run.first_row = uint32_t(row);
    run.offset = span.offset + done;
    step = std::min<uint64_t>(span.nbytes - done, kRunBytesMax);
    if (striped != nullptr) {
      const auto place = striped->locate(run.offset);
      step = std::min(step, place.run_bytes);
      run.offset = place.offset;
      run.drive = uint32_t(place.member);
    }
    if (inside == 0 && step >= row_bytes) {
      run.rows = step == row_bytes ? 1 : uint32_t(step / row_bytes);
      step = run.rows * row_bytes;
      row += run.rows;
    } else {
      // A part of a row is a run of its own.
      run.rows = 0;
      step = std::min(step, row_bytes - inside);
      inside += step;
      if (inside == row_bytes) {
        inside = 0;
        ++row;
      }
    }
    run.nbytes = uint32_t(step);
    if (run.drive % owners != (owners == 1 ? 0 : index)) continue;
    if (batch.overdue.load(std::memory_order_relaxed)) {
      for (uint32_t i = 0; i < std::max(1u, run.rows); ++i) {
        batch.fail(run.first_row + i, nvme::kCommandAborted);
      }
      ended_bytes += step;
      continue;
    }
    const bool joins = last.rows != 0 && run.rows != 0 && last.drive == run.drive &&
                       last.offset + last.nbytes == run.offset &&
                       last.memory + last.nbytes == run.memory &&
                       last.nbytes + run.nbytes <= kRunBytesMax;
    if (joins) {
      last.nbytes += run.nbytes;
      last.rows += run.rows;
    } else {
      add_run(last, mover);
      last = run;
    }
  }
  return ended_bytes;
}

void BatchEngine::Core::add_run(Run run, Mover& mover) {
  if (run.nbytes == 0) return;
  run.rows = std::max(1u, run.rows);
  mover.add(run, run.chunk->batch->port->options.is_write);
}

// Counts what has ended. What was aborted for another batch's sake begins again.
void BatchEngine::Core::settle(Mover& mover, std::vector<EndedRun>& ended) {
  // Before the end of a batch, so that who has waited for it finds them.
  if (!ended.empty()) runs.fetch_add(ended.size(), std::memory_order_relaxed);
  uint64_t nbytes = 0;
  Chunk* chunk = nullptr;
  for (const EndedRun& each : ended) {
    const Run& run = each.run;
    if (each.status != nvme::kSuccess) {
      Batch& batch = *run.chunk->batch;
      const bool is_write = batch.port->options.is_write;
      // Relaxed: the abort was requested behind the mark.
      const bool overdue = batch.overdue.load(std::memory_order_relaxed);
      if (each.status == nvme::kCommandAborted && !overdue &&
          !stopping.load(std::memory_order_relaxed)) {
        mover.add(run, is_write);
        continue;
      }
      for (uint32_t i = 0; i < run.rows; ++i) batch.fail(run.first_row + i, each.status);
      if (!is_write && !overdue) {
        std::memset(reinterpret_cast<void*>(run.memory), 0, run.nbytes);
      }
    }
    if (chunk != run.chunk && chunk != nullptr) {
      end_bytes(*chunk, nbytes);
      nbytes = 0;
    }
    chunk = run.chunk;
    nbytes += run.nbytes;
  }
  if (chunk != nullptr) end_bytes(*chunk, nbytes);
  ended.clear();
}

void BatchEngine::Core::end_bytes(Chunk& chunk, uint64_t nbytes) {
  chunk.batch->port->moves();
  // Acquire and release: who ends the chunk sees what all workers have moved.
  if (chunk.remaining.fetch_sub(nbytes, std::memory_order_acq_rel) == nbytes) chunk_done(chunk);
}

// Stores the word of the ring for chunks that are complete, in their order, and ends batches.
void BatchEngine::Core::chunk_done(Chunk& done) {
  Port& port = *done.batch->port;
  {
    const std::lock_guard guard(port.lock);
    done.complete = true;
    while (!port.open.empty() && port.open.front()->complete) {
      // Kept until the end of the round.
      const std::shared_ptr<Chunk> chunk = std::move(port.open.front());
      port.open.pop_front();
      meter.chunk_closes(monotonic_ns());
      Batch& batch = *chunk->batch;
      if (port.step_bytes != 0) {
        const uint64_t word = port.options.is_write ? port.options.emptied : port.options.filled;
        // Release: who sees the word sees the data, or may overwrite it.
        atomic::store_release(reinterpret_cast<uint64_t*>(word), chunk->q);
      }
      // The batches of a direction end in their order, as their chunks do.
      if (++batch.completed == batch.chunks && !(port.options.copies && !port.options.is_write)) {
        finish(port, batch);
      }
    }
  }
  // The stream side is fed by the polling thread, and the ring may have room.
  if (port.step_bytes != 0 || stopping.load(std::memory_order_relaxed)) polling.wake();
}

// Ends a batch: its statuses, its outcome and its word. Under the port's lock.
void BatchEngine::Core::finish(Port& port, Batch& batch) {
  Outcome outcome;
  const batch::request& request = batch.request;
  const uint32_t direction = port.options.is_write ? 1 : 0;
  {
    const std::lock_guard guard(batch.lock);
    outcome = {request.ready, batch.failed, batch.first_failed, 0, batch.reason};
    if (!batch.statuses.empty()) {
      outcome.status = batch.statuses[batch.first_failed];
      port.options.regions.report(request, batch.statuses.data(), batch.statuses.size());
    }
  }
  port.outcomes[port.options.regions.slot(request)] = outcome;
  batches_ended[direction].fetch_add(1, std::memory_order_relaxed);
  rows_ended[direction].fetch_add(request.rows, std::memory_order_relaxed);
  bytes_ended[direction].fetch_add(batch.nbytes, std::memory_order_relaxed);
  rows_failed[direction].fetch_add(outcome.failed, std::memory_order_relaxed);
  const bool changed = meter.batch_ends(monotonic_ns(), batch.nbytes);
  const bool by_stream = port.options.copies && !port.options.is_write && batch.chunks != 0;
  if (!by_stream || !finish_by_stream(port, batch, outcome.failed)) {
    port.options.regions.finish(request, outcome.failed);
  }
  // Before the look whether rows wait for it; see `deal_waiting`.
  batch.ended.store(true, std::memory_order_seq_cst);
  if (rows_wait.load(std::memory_order_seq_cst)) polling.wake();
  std::erase_if(port.batches, [&](const auto& each) { return each.get() == &batch; });
  waiters.wake();
  if (changed) wake_workers(meter.active());
}

// Ends a batch whose last chunk the engine's stream still copies. Under the port's lock.
bool BatchEngine::Core::finish_by_stream(Port& port, const Batch& batch, uint64_t failed) {
  const batch::request request = batch.request;
  port.options.regions.set_failed(request, failed);
  return stream->finish(
      port.options.regions.done_word(request), request.ready, [this, &port, request] {
        const batch::host_regions& regions = port.options.regions;
        const uint32_t slot = regions.slot(request);
        std::fill_n(regions.statuses(slot), request.rows, uint16_t(nvme::kDataTransferError));
        regions.set_failed(request, request.rows);
        const std::lock_guard guard(port.lock);
        port.outcomes[slot] = {
            request.ready, request.rows, 0, nvme::kDataTransferError,
            "the stream that copies between the ring and the device: " + stream->failure()};
      });
}

// Wakes as many workers as have parts to take.
void BatchEngine::Core::wake_workers(uint32_t parts) {
  const uint32_t count = own_queues.empty() ? std::min(parts, meter.active()) : parts;
  for (uint32_t i = 0; i < count && i < sleepers.size(); ++i) sleepers[i]->wake();
}

}  // namespace fw::native::pipeline
