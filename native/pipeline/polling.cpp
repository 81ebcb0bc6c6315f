// The polling thread: it takes requests, deals chunks, and sees to the time limits.
#include <sys/prctl.h>

#include <algorithm>

#include "pipeline/core.h"

namespace fw::native::pipeline {
namespace {

// Naps while words are watched that a stream stores, and while kernels run that may submit.
constexpr int64_t kNapMinNs = 2'000;
constexpr int64_t kNapRingNs = 20'000;
constexpr int64_t kNapKernelsNs = 100'000;
// Between looks at the time limits, while workers move what was dealt.
constexpr int64_t kLookNs = 10'000'000;
// The longest time that counts between two looks.
constexpr int64_t kStepNs = 100'000'000;

// A part of a chunk: 40 us of copying, against which taking it is nothing.
constexpr uint64_t kPartBytes = 256 << 10;
constexpr uint64_t kPartBytesMin = 32 << 10;

uint64_t load_word(uint64_t address) {
  // Acquire: the data that a word speaks of was written, or read, before.
  return atomic::load_acquire(reinterpret_cast<const uint64_t*>(address));
}

double seconds(int64_t ns) { return double(ns) / 1e9; }

std::string text_of(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

}  // namespace

void BatchEngine::Core::poll() {
  prctl(PR_SET_TIMERSLACK, 1'000, 0, 0, 0);
  int64_t idle_since_ns = 0, nap_ns = kNapMinNs;
  while (!stopping.load(std::memory_order_acquire)) {
    const uint32_t epoch = polling.epoch();
    bool moved = false;
    bool watches = kernels.load(std::memory_order_relaxed) != 0;
    bool awaits = false, open = false;
    for (const auto& port : ports) {
      moved |= take(*port);
      moved |= deal_waiting(*port);
      moved |= deal(*port);
      if (stream != nullptr) moved |= feed_stream(*port);
      awaits |= port->expected.load(std::memory_order_relaxed) > port->taken;
      const std::lock_guard guard(port->lock);
      open |= !port->batches.empty();
      awaits |= !port->batches.empty() && port->step_bytes != 0;
    }
    if (open) check_limits(monotonic_ns());
    if (moved) {
      idle_since_ns = 0;
      nap_ns = kNapMinNs;
      continue;
    }
    const int64_t now_ns = monotonic_ns();
    if (idle_since_ns == 0) idle_since_ns = now_ns;
    if (awaits || watches) {
      if (now_ns - idle_since_ns < kSpinNs) continue;
      polling.sleep(epoch, nap_ns);
      nap_ns = std::min(2 * nap_ns, awaits ? kNapRingNs : kNapKernelsNs);
      // A ticket that was announced long ago is not awaited at full speed.
      if (now_ns - idle_since_ns > 1'000'000) nap_ns = kNapKernelsNs;
    } else {
      polling.sleep(epoch, open ? kLookNs : 0);
      idle_since_ns = 0;
    }
  }
  end_everything();
}

// Takes requests that are ready.
bool BatchEngine::Core::take(Port& port) {
  bool took = false;
  while (take_next(port, true)) took = true;
  if (took && broken.load(std::memory_order_relaxed)) give_up(broken_reason);
  return took;
}

// Takes a request, if it is ready; one that `follows` behind those of the other direction that its
// submitter has seen.
bool BatchEngine::Core::take_next(Port& port, bool follows) {
  const batch::host_regions& regions = port.options.regions;
  const uint64_t ticket = port.taken + 1;
  batch::request request;
  if (!regions.take(ticket, request)) return false;
  for (const auto& other : ports) {
    // No more tickets are in use than there are slots: others come from a stray store.
    if (!follows || other.get() == &port || request.after > other->taken + regions.slots()) {
      continue;
    }
    while (other->taken < request.after) {
      if (!take_next(*other, false)) return false;
    }
  }
  port.taken = ticket;
  auto batch = std::make_shared<Batch>();
  batch->port = &port;
  batch->request = request;
  if (request.rows > regions.rows_max) {
    batch->fail_whole("a batch of " + std::to_string(request.rows) + " rows, more than " +
                      std::to_string(regions.rows_max));
    batch->failed = request.rows;
    batch->request.rows = 0;
  }
  batch->nbytes = batch->request.rows * options.row_bytes;
  const uint64_t step = port.step_bytes;
  batch->chunks = batch->nbytes == 0 ? 0 : step == 0 ? 1 : (batch->nbytes + step - 1) / step;
  port.moves();
  if (batch->chunks != 0 && overlaps != nullptr) overlaps->add(batch);
  const std::lock_guard guard(port.lock);
  port.batches.push_back(batch);
  if (batch->chunks == 0) finish(port, *batch);
  return true;
}

// Deals the chunks for which the ring has room, or data.
bool BatchEngine::Core::deal(Port& port) {
  bool dealt = false;
  while (true) {
    std::shared_ptr<Batch> batch;
    {
      const std::lock_guard guard(port.lock);
      const auto next = std::ranges::find_if(
          port.batches, [](const auto& each) { return each->dealt != each->chunks; });
      if (next == port.batches.end()) return dealt;
      batch = *next;
    }
    if (!may_deal(port, *batch)) return dealt;
    deal_next(port, batch);
    dealt = true;
  }
}

bool BatchEngine::Core::may_deal(const Port& port, const Batch& batch) const {
  if (port.step_bytes == 0 || batch.overdue.load(std::memory_order_relaxed)) return true;
  const uint64_t q = port.next_q;
  if (port.options.is_write) return load_word(port.options.filled) >= q;
  return q <= port.options.chunks || load_word(port.options.emptied) >= q - port.options.chunks;
}

void BatchEngine::Core::deal_next(Port& port, const std::shared_ptr<Batch>& batch) {
  auto chunk = std::make_shared<Chunk>();
  const uint64_t step = port.step_bytes;
  chunk->batch = batch;
  chunk->q = port.next_q++;
  chunk->begin = batch->dealt * step;
  chunk->end = step == 0 ? batch->nbytes : std::min(batch->nbytes, chunk->begin + step);
  chunk->memory = step == 0 ? batch->request.buffer
                            : port.options.ring +
                                  (chunk->q - 1) % port.options.chunks * port.options.chunk_bytes;
  const uint64_t nbytes = chunk->end - chunk->begin;
  chunk->remaining.store(nbytes, std::memory_order_relaxed);
  ++batch->dealt;
  const uint32_t active = meter.active();
  if (!own_queues.empty()) {
    chunk->by_owner = true;
    chunk->parts = active;
  } else {
    // Each worker gets two at least, so that they end at the same time.
    const uint64_t share = std::clamp(nbytes / (2 * active), kPartBytesMin, kPartBytes);
    const uint64_t row = options.row_bytes;
    chunk->part_bytes = row <= share ? share / row * row : (row > kPartBytes ? kPartBytes : row);
    chunk->parts = uint32_t((nbytes + chunk->part_bytes - 1) / chunk->part_bytes);
  }
  const int64_t now_ns = monotonic_ns();
  port.moves();
  {
    const std::lock_guard guard(port.lock);
    port.open.push_back(chunk);
  }
  meter.chunk_opens(now_ns);
  if (batch->must_wait()) {
    const auto first = std::ranges::find_if(batch->waits, [&](const RowSpan& each) {
      return each.end * options.row_bytes > chunk->begin;
    });
    chunk->waits = first != batch->waits.end() && first->begin * options.row_bytes < chunk->end;
    if (chunk->waits) port.waiting.push_back(chunk);
  }
  hand_out(std::move(chunk), false);
}

// Gives a chunk to the workers.
void BatchEngine::Core::hand_out(std::shared_ptr<Chunk> chunk, bool late) {
  const uint32_t parts = chunk->parts;
  auto deal = std::make_shared<Deal>();
  deal->chunk = std::move(chunk);
  deal->late = late;
  {
    const std::lock_guard guard(queue_lock);
    if (own_queues.empty()) {
      queue.push_back(std::move(deal));
    } else {
      for (uint32_t i = 0; i < parts; ++i) own_queues[i].push_back(deal);
    }
  }
  wake_workers(parts);
}

// Deals rows that have waited, once what they come after has ended.
bool BatchEngine::Core::deal_waiting(Port& port) {
  if (port.waiting.empty()) return false;
  // Before the look, so that an end after it wakes this thread.
  rows_wait.store(true, std::memory_order_seq_cst);
  bool dealt = false;
  while (!port.waiting.empty() && !port.waiting.front()->batch->must_wait()) {
    hand_out(std::move(port.waiting.front()), true);
    port.waiting.pop_front();
    port.moves();
    dealt = true;
  }
  const auto waits = [](const auto& each) { return !each->waiting.empty(); };
  if (std::ranges::none_of(ports, waits)) rows_wait.store(false, std::memory_order_relaxed);
  return dealt;
}

// Gives the engine's own stream the chunks that it may move: those of reads that have data, and
// for writes those of the ring that are free.
bool BatchEngine::Core::feed_stream(Port& port) {
  if (!port.options.copies) return false;
  bool fed = false;
  while (true) {
    std::shared_ptr<Batch> batch;
    {
      const std::lock_guard guard(port.lock);
      const auto next = std::ranges::find_if(
          port.batches, [](const auto& each) { return each->copied != each->chunks; });
      if (next == port.batches.end()) return fed;
      batch = *next;
    }
    const bool is_write = port.options.is_write;
    const uint64_t q = port.copied_q + 1;
    const bool overdue = batch->overdue.load(std::memory_order_relaxed);
    if (is_write && !overdue && q > port.options.chunks &&
        load_word(port.options.emptied) < q - port.options.chunks) {
      return fed;
    }
    if (!is_write && load_word(port.options.filled) < q) return fed;
    const uint64_t begin = batch->copied * port.step_bytes;
    const uint64_t nbytes = std::min(batch->nbytes - begin, port.step_bytes);
    const uint64_t buffer = batch->request.buffer + begin;
    const uint64_t chunk =
        port.options.ring + (q - 1) % port.options.chunks * port.options.chunk_bytes;
    bool queued =
        overdue || stream->copy(is_write ? chunk : buffer, is_write ? buffer : chunk, nbytes);
    queued = queued && stream->store(is_write ? port.options.filled : port.options.emptied, q);
    if (!queued && !overdue) {
      batch->fail_whole("the stream that copies between the ring and the device: " +
                        stream->failure());
    }
    port.copied_q = q;
    ++batch->copied;
    fed = true;
    port.moves();
    if (is_write || batch->copied != batch->chunks) continue;
    const std::lock_guard guard(port.lock);
    finish(port, *batch);
  }
}

// Ends what has not moved for too long.
void BatchEngine::Core::check_limits(int64_t now_ns) {
  // A clock that stands still while the process is stopped.
  ran_ns += std::min(now_ns - looked_ns, kStepNs);
  looked_ns = now_ns;
  for (const auto& each : ports) {
    Port& port = *each;
    if (const uint64_t seen = port.progress.load(std::memory_order_relaxed);
        seen != port.progress_seen) {
      port.progress_seen = seen;
      port.progress_ns = ran_ns;
    }
    std::shared_ptr<Batch> oldest;
    {
      const std::lock_guard guard(port.lock);
      if (port.batches.empty()) continue;
      oldest = port.batches.front();
    }
    // What an earlier batch of the other direction keeps waiting has its time when that has ended.
    if (oldest->must_wait()) port.progress_ns = ran_ns;
    if (ran_ns - port.progress_ns <= options.limit_ns) continue;
    end_overdue(port, oldest, waited_for(port, *oldest));
  }
  if (aborted_ns == 0) return;
  bool open = false;
  for (const auto& port : ports) {
    const std::lock_guard guard(port->lock);
    open |= std::ranges::any_of(port->open, [](const auto& chunk) {
      return chunk->batch->overdue.load(std::memory_order_relaxed);
    });
  }
  if (!open) {
    aborted_ns = 0;
  } else if (ran_ns - aborted_ns > options.abort_ns) {
    give_up("a call of the storage does not return, and its thread cannot be ended");
  }
}

std::string BatchEngine::Core::waited_for(Port& port, const Batch& batch) {
  const std::lock_guard guard(port.lock);
  const std::string limit = "after " + text_of(seconds(options.limit_ns)) + " s without progress ";
  const std::string ticket = "ticket " + std::to_string(batch.request.ready);
  uint64_t bytes = 0;
  for (const auto& chunk : port.open) bytes += chunk->remaining.load(std::memory_order_relaxed);
  if (bytes != 0) {
    return limit + ticket + " waits for the storage, which has not " +
           (port.options.is_write ? "written " : "read ") + std::to_string(bytes) + " bytes";
  }
  const char* what = port.options.is_write ? " to be filled" : " to be emptied";
  return limit + ticket + " waits for a chunk of the ring" + what + " by the stream: chunk " +
         std::to_string(port.next_q);
}

// Ends a batch with an error: its rows that have not been moved fail.
void BatchEngine::Core::end_overdue(Port& port, const std::shared_ptr<Batch>& batch,
                                    std::string why) {
  const bool first = !batch->overdue.load(std::memory_order_relaxed);
  batch->fail_whole(std::move(why));
  port.moves();
  if (!first) return;
  overdue.fetch_add(1, std::memory_order_relaxed);
  if (aborted_ns == 0) aborted_ns = ran_ns;
  // Release: workers that see it see the mark.
  aborts.fetch_add(1, std::memory_order_release);
  for (const auto& each : sleepers) each->wake();
}

// Ends all batches although workers do not: what they move now must not be used again.
void BatchEngine::Core::give_up(const std::string& why) {
  if (broken_reason.empty()) broken_reason = why;
  broken.store(true, std::memory_order_relaxed);
  aborted_ns = 0;
  for (const auto& each : ports) {
    Port& port = *each;
    const std::lock_guard guard(port.lock);
    for (const auto& chunk : port.open) abandoned.push_back(chunk);
    port.waiting.clear();
    uint64_t closed = port.open.size();
    port.open.clear();
    for (; closed != 0; --closed) meter.chunk_closes(monotonic_ns());
    while (!port.batches.empty()) {
      const std::shared_ptr<Batch> batch = port.batches.front();
      batch->fail_whole(why);
      for (uint64_t row = 0; row < batch->request.rows; ++row) {
        batch->fail(row, nvme::kCommandAborted);
      }
      port.next_q += batch->chunks - batch->dealt;
      batch->dealt = batch->copied = batch->chunks;
      finish(port, *batch);
    }
    port.copied_q = port.next_q - 1;
    if (port.step_bytes == 0) continue;
    const uint64_t word = port.options.is_write ? port.options.emptied : port.options.filled;
    atomic::store_release(reinterpret_cast<uint64_t*>(word), port.next_q - 1);
  }
}

// The end of the engine: what has begun is aborted, and what has not fails.
void BatchEngine::Core::end_everything() {
  const std::string why = "the engine was stopped";
  const auto mark = [&] {
    bool open = false;
    for (const auto& each : ports) {
      Port& port = *each;
      take(port);
      std::vector<std::shared_ptr<Batch>> batches;
      {
        const std::lock_guard guard(port.lock);
        batches.assign(port.batches.begin(), port.batches.end());
      }
      for (const auto& batch : batches) end_overdue(port, batch, why);
      deal_waiting(port);
      deal(port);
      if (stream != nullptr) feed_stream(port);
      open |= !batches.empty();
    }
    return open;
  };
  const int64_t start_ns = monotonic_ns();
  while (mark()) {
    if (monotonic_ns() - start_ns > options.abort_ns) {
      give_up(why + ", and a call of the storage does not return");
      break;
    }
    polling.sleep(polling.epoch(), kNapKernelsNs);
  }
  // Release: workers that see it have nothing left to do.
  workers_end.store(true, std::memory_order_release);
  for (const auto& each : sleepers) each->wake();
}

}  // namespace fw::native::pipeline
