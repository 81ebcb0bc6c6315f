// For the sanitizers: batches of rows by the engine, in both directions, through buffers and rings.
//
// Callers submit from several threads, and as a kernel or a stream does, while consumers move
// chunks; engines are stopped in the middle, and storages fail, hang and lose rows. What has
// arrived is compared with what was there. FLASHWARP_STRESS_SECONDS bounds the time.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "base/host_memory.h"
#include "pipeline/batch_engine.h"
#include "pipeline/host_stream.h"
#include "storage/composite_storage.h"
#include "storage/memory_storage.h"
#include "turns.h"

using namespace fw;
using namespace fw::native::pipeline;
using native::HostCopier;
using native::HostMemory;
using native::MemoryStorage;
using native::Storage;
using stress::address;
using stress::require;

namespace {

constexpr uint32_t kSlots = 4;
constexpr uint32_t kRowsMax = 256;
constexpr int64_t kWaitNs = 60'000'000'000;

// Blocking calls that fail, or are slow, now and then. It has no mapping, so commands reach it.
class Unreliable final : public Storage {
 public:
  Unreliable(std::shared_ptr<Storage> inner, uint32_t one_in)
      : Storage(inner->nbytes(), true), inner_(std::move(inner)), one_in_(one_in) {}
  int read(uint64_t offset, void* data, size_t n, native::IoFailure* failure) override {
    return fails() ? EIO : inner_->read(offset, data, n, failure);
  }
  int write(uint64_t offset, const void* data, size_t n, native::IoFailure* failure) override {
    return fails() ? EIO : inner_->write(offset, data, n, failure);
  }
  int read_nowait(uint64_t, void*, size_t, native::IoFailure*) override { return EAGAIN; }
  bool writes_inline() const override { return false; }
  bool resolve(const native::Request&, native::PieceList&) override { return false; }
  bool resolve_flush(native::PieceList&) override { return false; }
  int flush(native::IoFailure*) override { return 0; }
  int discard(uint64_t, uint64_t, native::IoFailure*) override { return 0; }
  int write_zeroes(uint64_t, uint64_t, native::IoFailure*) override { return 0; }
  native::Description describe() const override { return {}; }

 private:
  bool fails() {
    const uint32_t call = calls_.fetch_add(1, std::memory_order_relaxed);
    if (call % 64 == 1) std::this_thread::sleep_for(std::chrono::microseconds(50));
    return one_in_ != 0 && call % one_in_ == one_in_ - 1;
  }

  const std::shared_ptr<Storage> inner_;
  const uint32_t one_in_;
  std::atomic<uint32_t> calls_{0};
};

// One direction's memory.
struct Memory {
  HostMemory requests{kSlots * 64, 64}, results{kSlots * 64, 64};
  HostMemory lists{kSlots * kRowsMax * 8, 64}, statuses{kSlots * kRowsMax * 2, 64};
  HostMemory words{128, 64};
  std::unique_ptr<HostMemory> ring;

  PortOptions port(bool is_write, uint64_t chunk_bytes, uint32_t chunks, bool copies) {
    PortOptions port;
    port.regions = {{.requests = static_cast<batch::request*>(requests.address()),
                     .results = static_cast<batch::result*>(results.address()),
                     .lists = static_cast<int64_t*>(lists.address()),
                     .all_statuses = static_cast<uint16_t*>(statuses.address()),
                     .count = kSlots,
                     .rows_max = kRowsMax}};
    port.is_write = is_write;
    if (chunks == 0) return port;
    ring = std::make_unique<HostMemory>(chunk_bytes * chunks, 4096);
    port.ring = address(ring->address());
    port.chunk_bytes = chunk_bytes;
    port.chunks = chunks;
    port.filled = address(words.address());
    port.emptied = port.filled + 64;
    port.copies = copies;
    return port;
  }
};

struct Table {
  uint32_t row_bytes, rows;
  std::vector<uint8_t> data;

  Table(std::mt19937& random, bool blocks)
      : row_bytes(blocks ? 512 * (1 + random() % 3) : 1 + random() % 2000),
        rows(1 + random() % 300),
        data(uint64_t(rows) * row_bytes) {
    for (uint8_t& each : data) each = uint8_t(random());
  }
};

// The stream's side of a ring, as a GPU's copy engine has it.
struct Consumer {
  HostCopier copier;
  PortOptions port;
  uint64_t step = 0;
  uint64_t q = 0;

  void move(uint8_t* buffer, uint64_t nbytes) {
    for (uint64_t begin = 0; begin < nbytes; begin += step) {
      ++q;
      const uint64_t n = std::min(step, nbytes - begin);
      const uint64_t chunk = port.ring + (q - 1) % port.chunks * port.chunk_bytes;
      if (port.is_write) {
        if (q > port.chunks) copier.wait_word(port.emptied, q - port.chunks);
        copier.copy({{chunk, address(buffer + begin), n}});
        copier.write_word(port.filled, q);
      } else {
        copier.wait_word(port.filled, q);
        copier.copy({{address(buffer + begin), chunk, n}});
        copier.write_word(port.emptied, q);
      }
    }
  }
  void wait() {
    const uint64_t last = copier.write_word(address(&ended_), 1);
    require(copier.wait(last, kWaitNs / 1000), "the consumer ends");
  }

 private:
  alignas(8) uint64_t ended_ = 0;
};

EngineOptions options_for(const Table& table, std::shared_ptr<Storage> storage,
                          std::mt19937& random) {
  EngineOptions options;
  options.storage = std::move(storage);
  options.row_bytes = table.row_bytes;
  options.rows = table.rows;
  options.workers.high = 1 + random() % 4;
  options.workers.low = 1 + random() % options.workers.high;
  options.limit_ns = kWaitNs;
  options.depth = 2 + random() % 64;
  return options;
}

// Reads by several threads, each with tickets of its own, from a storage that may fail.
void read_by_threads(std::mt19937& random) {
  Table table(random, false);
  auto memory = std::make_shared<MemoryStorage>(table.data.data(), table.data.size(), true);
  std::shared_ptr<Storage> storage = memory;
  const bool fails = random() % 2 == 0;
  if (fails) storage = std::make_shared<Unreliable>(memory, random() % 2 == 0 ? 7 : 0);
  EngineOptions options = options_for(table, storage, random);
  Memory regions;
  const bool ring = random() % 2 == 0;
  options.ports = {regions.port(false, 4096, ring ? 2 + random() % 3 : 0, ring)};
  BatchEngine engine(options, ring ? std::make_unique<HostStream>() : nullptr);
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, seed = uint32_t(random())] {
      std::mt19937 own(seed);
      for (uint32_t n = 0; n < 20; ++n) {
        std::vector<int64_t> ids(own() % kRowsMax);
        for (int64_t& id : ids) id = int64_t(own() % (table.rows + 1));
        std::vector<uint8_t> buffer(ids.size() * table.row_bytes + 1, 77);
        uint64_t ticket = 0;
        while ((ticket = engine.submit(false, ids.data(), ids.size(), 0, address(buffer.data()))) ==
               0) {
          std::this_thread::yield();
        }
        require(engine.wait(false, ticket, kWaitNs), "a ticket ends");
        for (size_t i = 0; i < ids.size(); ++i) {
          const uint8_t* row = &buffer[i * table.row_bytes];
          const bool is_row = uint64_t(ids[i]) < table.rows &&
                              std::memcmp(row, &table.data[uint64_t(ids[i]) * table.row_bytes],
                                          table.row_bytes) == 0;
          const bool is_zero =
              std::all_of(row, row + table.row_bytes, [](uint8_t byte) { return byte == 0; });
          const bool may_fail = fails || uint64_t(ids[i]) >= table.rows;
          require(is_row || (may_fail && is_zero), "a row is what it was, or zeros");
        }
        require(buffer.back() == 77, "nothing behind the buffer");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Batches of both directions through rings that a stream moves, with drives now and then.
void relay(std::mt19937& random) {
  const bool drives = random() % 2 == 0;
  Table table(random, drives);
  const uint32_t members = 1 + random() % 3;
  std::vector<std::vector<uint8_t>> parts;
  native::StorageList list;
  const uint64_t part_bytes = (table.data.size() / 4096 / members + 2) * 4096;
  for (uint32_t i = 0; i < members; ++i) {
    parts.emplace_back(part_bytes);
    list.push_back(std::make_shared<MemoryStorage>(parts.back().data(), part_bytes, true));
  }
  auto storage = std::make_shared<native::StripedStorage>(list, 4096, table.data.size());
  require(storage->write(0, table.data.data(), table.data.size(), nullptr) == 0, "filled");
  EngineOptions options = options_for(table, storage, random);
  if (drives) {
    options.drive_threads = random() % 2;
    for (const auto& member : list) options.drives.push_back({member, std::nullopt});
    if (random() % 2 == 0) {
      native::SsdDirection direction;
      direction.ceilings = {{512, 1e6}};
      direction.bytes_per_s = 1e10;
      direction.service_ns = {1000, 20000};
      options.drives.back().model = native::SsdParameters{direction, direction, 8, 1};
    }
  }
  Memory regions[2];
  for (const bool is_write : {false, true}) {
    options.ports.push_back(regions[is_write].port(is_write, 4096, 2 + random() % 3, false));
  }
  const std::vector<PortOptions> ports = options.ports;
  BatchEngine engine(options);
  Consumer consumers[2];
  for (const bool is_write : {false, true}) {
    consumers[is_write].port = ports[is_write];
    consumers[is_write].step = engine.step_bytes(is_write);
  }
  for (uint32_t n = 0; n < 12; ++n) {
    const bool is_write = random() % 2 == 0;
    const uint64_t rows = random() % (std::min(table.rows, kRowsMax) + 1);
    const uint64_t first = random() % (table.rows - rows + 1);
    std::vector<uint8_t> buffer(rows * table.row_bytes);
    for (uint8_t& each : buffer) each = uint8_t(random());
    consumers[is_write].move(buffer.data(), buffer.size());
    // As a stream does: the request, then `ready`, then the host's word that a ticket comes.
    const uint64_t ticket = engine.submit(is_write, nullptr, rows, first, 0);
    require(engine.wait(is_write, ticket, kWaitNs), "a ticket ends");
    consumers[is_write].wait();
    require(engine.outcome(is_write, ticket)->failed == 0, "no row fails");
    uint8_t* place = table.data.data() + first * table.row_bytes;
    if (is_write) {
      std::copy(buffer.begin(), buffer.end(), place);
    } else {
      require(std::equal(buffer.begin(), buffer.end(), place), "the rows arrived");
    }
  }
  std::vector<uint8_t> found(table.data.size());
  require(storage->read(0, found.data(), found.size(), nullptr) == 0, "read");
  require(found == table.data, "the storage has what was written");
}

// A batch of a model: what its buffer has, or must have.
struct Expected {
  bool is_write = false;
  std::vector<int64_t> ids;
  std::vector<uint8_t> buffer, wanted;
  uint64_t ticket = 0;
};

// Batches that share rows, many in flight: each sees what came before it, and nothing later.
void overlap(std::mt19937& random) {
  Table table(random, random() % 2 == 0);
  auto memory = std::make_shared<MemoryStorage>(table.data.data(), table.data.size(), true);
  std::vector<uint8_t> model = table.data;
  std::shared_ptr<Storage> storage = memory;
  if (random() % 2 == 0) storage = std::make_shared<Unreliable>(memory, 0);
  EngineOptions options = options_for(table, storage, random);
  Memory regions[2];
  const bool ring = random() % 2 == 0;
  for (const bool is_write : {false, true}) {
    options.ports.push_back(
        regions[is_write].port(is_write, 4096, ring ? 2 + random() % 3 : 0, false));
  }
  const std::vector<PortOptions> ports = options.ports;
  BatchEngine engine(options);
  Consumer consumers[2];
  for (const bool is_write : {false, true}) {
    consumers[is_write].port = ports[is_write];
    consumers[is_write].step = engine.step_bytes(is_write);
  }
  std::deque<std::unique_ptr<Expected>> flying;
  const auto end_oldest = [&] {
    const Expected& batch = *flying.front();
    require(engine.wait(batch.is_write, batch.ticket, kWaitNs), "a ticket ends");
    if (ring) consumers[batch.is_write].wait();
    require(engine.outcome(batch.is_write, batch.ticket)->failed == 0, "no row fails");
    require(batch.is_write || batch.buffer == batch.wanted, "a batch sees what came before it");
    flying.pop_front();
  };
  const uint64_t width = table.row_bytes;
  for (uint32_t n = 0; n < 60; ++n) {
    auto batch = std::make_unique<Expected>();
    batch->is_write = random() % 2 == 0;
    const bool sequence = random() % 3 == 0;
    const uint64_t rows = 1 + random() % std::min(table.rows, random() % 2 == 0 ? 8 : kRowsMax);
    std::vector<int64_t> all(table.rows);
    std::iota(all.begin(), all.end(), 0);
    if (sequence) {
      const auto first = all.begin() + int64_t(random() % (table.rows - rows + 1));
      batch->ids.assign(first, first + int64_t(rows));
    } else {
      std::shuffle(all.begin(), all.end(), random);
      batch->ids.assign(all.begin(), all.begin() + int64_t(rows));
    }
    batch->buffer.resize(rows * width);
    for (uint8_t& each : batch->buffer) each = uint8_t(random());
    for (uint64_t i = 0; i < rows; ++i) {
      uint8_t* place = &model[uint64_t(batch->ids[i]) * width];
      if (batch->is_write) {
        std::copy_n(&batch->buffer[i * width], width, place);
      } else {
        batch->wanted.insert(batch->wanted.end(), place, place + width);
      }
    }
    // A slot is used again only when its outcome was looked at.
    while (std::ranges::count(flying, batch->is_write,
                              [](const auto& each) { return each->is_write; }) == kSlots) {
      end_oldest();
    }
    batch->ticket =
        engine.submit(batch->is_write, sequence ? nullptr : batch->ids.data(), rows,
                      uint64_t(batch->ids[0]), ring ? 0 : address(batch->buffer.data()));
    require(batch->ticket != 0, "there is a slot");
    if (ring) consumers[batch->is_write].move(batch->buffer.data(), batch->buffer.size());
    flying.push_back(std::move(batch));
  }
  while (!flying.empty()) end_oldest();
  require(table.data == model, "the storage has the last of all writes");
}

// Stops in the middle: every ticket that was taken ends, and nothing is touched afterwards.
void stop_in_the_middle(std::mt19937& random) {
  Table table(random, false);
  auto memory = std::make_shared<MemoryStorage>(table.data.data(), table.data.size(), true);
  EngineOptions options = options_for(table, std::make_shared<Unreliable>(memory, 0), random);
  Memory regions;
  const bool ring = random() % 2 == 0;
  options.ports = {regions.port(false, 4096, ring ? 2 : 0, false)};
  BatchEngine engine(options);
  const uint64_t nbytes = uint64_t(kRowsMax) * table.row_bytes;
  std::vector<uint8_t> buffer(kSlots * nbytes);
  std::thread submitter([&] {
    try {
      for (uint32_t n = 0; n < kSlots; ++n) {
        engine.submit(false, nullptr, std::min(table.rows, kRowsMax), 0,
                      address(buffer.data() + n * nbytes));
      }
    } catch (const std::runtime_error&) {  // it was stopped
    }
  });
  std::thread waiter([&] { engine.wait(false, 1, 2'000'000'000); });
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
  engine.stop();
  submitter.join();
  std::fill(buffer.begin(), buffer.end(), uint8_t(1));
  waiter.join();
}

// Kernels' requests: a thread fills the regions itself and looks at the result.
void submit_as_kernels(std::mt19937& random) {
  Table table(random, false);
  auto memory = std::make_shared<MemoryStorage>(table.data.data(), table.data.size(), true);
  EngineOptions options = options_for(table, memory, random);
  Memory regions;
  options.ports = {regions.port(false, 0, 0, false)};
  const batch::host_regions view = options.ports[0].regions;
  BatchEngine engine(options);
  engine.kernels_begin();
  std::vector<uint8_t> buffer(table.row_bytes);
  for (uint64_t ticket = 1; ticket < 10; ++ticket) {
    const int64_t id = int64_t(random() % table.rows);
    view.list(view.slot(ticket))[0] = id;
    view.submit(ticket, {0, address(buffer.data()), 1, 0, batch::kRows, 0, 0});
    while (!view.ended(ticket)) std::this_thread::yield();
    require(std::equal(buffer.begin(), buffer.end(), &table.data[uint64_t(id) * table.row_bytes]),
            "the row arrived");
  }
  engine.kernels_end();
}

// A call that does not return until it is released.
class Stuck final : public Storage {
 public:
  explicit Stuck(uint64_t nbytes) : Storage(nbytes, false) {}
  int read(uint64_t, void*, size_t, native::IoFailure*) override {
    while (!released.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ended.store(true);
    return EIO;
  }
  int write(uint64_t, const void*, size_t, native::IoFailure*) override { return EROFS; }
  int read_nowait(uint64_t, void*, size_t, native::IoFailure*) override { return EAGAIN; }
  bool writes_inline() const override { return false; }
  bool resolve(const native::Request&, native::PieceList&) override { return false; }
  bool resolve_flush(native::PieceList&) override { return false; }
  int flush(native::IoFailure*) override { return 0; }
  int discard(uint64_t, uint64_t, native::IoFailure*) override { return EROFS; }
  int write_zeroes(uint64_t, uint64_t, native::IoFailure*) override { return EROFS; }
  native::Description describe() const override { return {}; }

  std::atomic<bool> released{false}, ended{false};
};

// A call of the storage never returns: all batches end, later ones at once, and so does the engine.
void give_up() {
  // The thread uses them for ever.
  static Memory regions;
  static std::vector<uint8_t> buffer(4 * 512);
  const auto storage = std::make_shared<Stuck>(4 * 512);
  {
    EngineOptions options;
    options.storage = storage;
    options.row_bytes = 512;
    options.rows = 4;
    options.limit_ns = options.abort_ns = 50'000'000;
    options.ports = {regions.port(false, 4096, 2, true)};
    BatchEngine engine(options, std::make_unique<HostStream>());
    for (uint32_t n = 0; n < 3; ++n) {
      const uint64_t ticket = engine.submit(false, nullptr, 4, 0, address(buffer.data()));
      require(engine.wait(false, ticket, kWaitNs), "a ticket ends");
      const Outcome outcome = *engine.outcome(false, ticket);
      require(outcome.failed == 4 && !outcome.reason.empty(), "all rows fail, with a reason");
    }
    engine.stop();
    require(engine.leaked(), "a thread remains");
  }
  storage->released.store(true);
  while (!storage->ended.load()) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

void play(std::mt19937& random) {
  switch (random() % 5) {
    case 0:
      return read_by_threads(random);
    case 1:
      return relay(random);
    case 2:
      return stop_in_the_middle(random);
    case 3:
      return overlap(random);
    default:
      return submit_as_kernels(random);
  }
}

}  // namespace

int main(int count, char** arguments) {
  give_up();
  return stress::take_turns(count, arguments, "turns of batches",
                            [](uint32_t, std::mt19937& random) { play(random); });
}
