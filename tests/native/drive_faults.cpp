// The driver of drives against a controller that misbehaves: never ready, silent, fatal, gone.
//
// The controller of this test knows the specification and nothing of the driver. Its IOMMU is a
// table, and an access to memory that is not mapped ends the test: so does a transfer after an
// unmap.
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "flashwarp/base/atomic.cuh"
#include "turns.h"
#include "vfio/drive.h"
#include "vfio/drive_queues.h"
#include "vfio/iova_space.h"
#include "vfio/namespace_storage.h"

using namespace fw;
using namespace fw::native;
using namespace fw::native::vfio;
using stress::require;
using Kind = DriveError::Kind;

namespace {

constexpr size_t kBarBytes = 8192;
constexpr uint64_t kPage = 4096;
constexpr uint32_t kLbas = 4096;
constexpr uint16_t kQueues = 8;

// Memory that the controller may reach, by IO virtual address.
class Iommu {
 public:
  uint64_t map(uint64_t address, uint64_t nbytes) {
    const std::lock_guard guard(lock_);
    const uint64_t iova = next_;
    next_ += nbytes + kPage;
    mapped_[iova] = {address, nbytes};
    return iova;
  }
  void unmap(uint64_t iova, uint64_t nbytes) {
    const std::lock_guard guard(lock_);
    const auto found = mapped_.find(iova);
    require(found != mapped_.end() && found->second.second == nbytes, "unmapped as it was mapped");
    mapped_.erase(found);
  }
  template <typename Act>
  void reach(uint64_t iova, uint64_t nbytes, Act act) {
    const std::lock_guard guard(lock_);
    auto place = mapped_.upper_bound(iova);
    require(place != mapped_.begin(), "the address is mapped");
    --place;
    const uint64_t offset = iova - place->first;
    require(offset + nbytes <= place->second.second, "the transfer stays inside of its mapping");
    act(reinterpret_cast<std::byte*>(place->second.first + offset));
  }
  size_t count() {
    const std::lock_guard guard(lock_);
    return mapped_.size();
  }

 private:
  std::mutex lock_;
  std::map<uint64_t, std::pair<uint64_t, uint64_t>> mapped_;
  uint64_t next_ = 1 << 20;
};

struct Faults {
  std::atomic<bool> never_ready{false}, fatal{false}, gone{false}, silent{false};
  std::atomic<bool> silent_io{false}, obeys_abort{false};
  std::atomic<int> fails_opcode{-1};  // of admin commands
};

// A controller in memory, with a thread that is its firmware.
class FakeFunction final : public PciFunction {
 public:
  FakeFunction() : medium_(kLbas * 512) {
    fd_ = memfd_create("bar", 0);
    require(ftruncate(fd_, kBarBytes) == 0, "memory for the registers");
    bar_ = map_registers();
    // 64 entries; ready within 500 ms; the NVM command set.
    bar_->write_pair(kCap, 63 | uint64_t(1) << 24 | uint64_t(1) << 37);
    firmware_ = std::thread([this] { run(); });
  }
  ~FakeFunction() override {
    ending_ = true;
    firmware_.join();
    ::close(fd_);
    require(iommu_.count() == 0, "nothing stays mapped");
  }

  std::shared_ptr<Registers> map_registers() override {
    void* memory = mmap(nullptr, kBarBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    require(memory != MAP_FAILED, "a mapping of the registers");
    const std::lock_guard guard(lock_);
    return mappings_.emplace_back(std::make_shared<Registers>(memory, kBarBytes));
  }
  uint64_t map(uint64_t address, uint64_t nbytes) override { return iommu_.map(address, nbytes); }
  uint64_t map_file(int file, uint64_t nbytes) override {
    void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    require(memory != MAP_FAILED, "a mapping of the file");
    const uint64_t iova = iommu_.map(reinterpret_cast<uint64_t>(memory), nbytes);
    const std::lock_guard guard(lock_);
    files_[iova] = memory;
    return iova;
  }
  void unmap(uint64_t iova, uint64_t nbytes) noexcept override {
    iommu_.unmap(iova, nbytes);
    const std::lock_guard guard(lock_);
    if (files_.contains(iova)) munmap(files_[iova], nbytes);
    files_.erase(iova);
  }
  void set_bus_master(bool on) override { master_ = on; }
  void reset() override {
    bar_->write(kConfiguration, 0);
    while (bar_->read(kStatus) != 0) std::this_thread::yield();
  }
  std::string watch(int limit_ms) override {
    timespec time = {0, limit_ms * 100'000};  // a tenth, for short tests
    nanosleep(&time, nullptr);
    return "";
  }
  void interrupt() override {}
  // The registers of a removed drive read as ones all at once.
  void remove() {
    faults.gone = true;
    while (bar_->read(kDoorbells - 4) != kAllOnes) std::this_thread::yield();
  }
  void close() noexcept override { closed_ = true; }
  std::string iommu() const override { return "table"; }
  std::string name() const override { return "fake"; }

  Faults faults;
  std::atomic<bool> closed_{false}, shut_down{false};

 private:
  struct Queue {
    uint64_t sq = 0, cq = 0;
    uint32_t depth = 0;
    std::vector<uint16_t> held;  // commands that are never completed
    uint32_t head = 0, tail = 0;
    uint16_t phase = 1;
  };

  void run() {
    while (!ending_) {
      std::this_thread::yield();
      if (faults.gone) {
        for (uint32_t at = 0; at < kDoorbells; at += 4) bar_->write(at, kAllOnes);
        continue;
      }
      const uint32_t cc = look(kConfiguration);
      if ((cc & kEnable) == 0) {
        queues_.clear();
        for (uint64_t at = kDoorbells; at < kBarBytes; at += 4) bar_->write(uint32_t(at), 0);
        bar_->write(kStatus, 0);
        continue;
      }
      if (faults.fatal) bar_->write(kStatus, kReady | kFatal);
      if (faults.never_ready || faults.fatal) continue;
      if (queues_.empty()) {
        const uint32_t depth = (bar_->read(kAdminQueueAttributes) & 0xFFF) + 1;
        queues_[0] = {bar_->read_pair(kAdminSq), bar_->read_pair(kAdminCq), depth, {}};
        bar_->write(kStatus, kReady);
      }
      if ((cc & kShutdownMask) != 0) {
        shut_down = true;
        bar_->write(kStatus, kReady | kShutdownComplete);
      }
      for (uint16_t id = 0; id <= kQueues; ++id) {
        if (queues_.contains(id)) serve(id);
      }
    }
  }

  // Reads a register by every mapping of it: ThreadSanitizer knows addresses, not pages.
  uint32_t look(uint32_t offset) {
    const std::lock_guard guard(lock_);
    for (const auto& mapping : mappings_) (void)mapping->read(offset);
    return bar_->read(offset);
  }

  void serve(uint16_t id) {
    if (id == 0 && faults.silent) return;
    if (!master_) return;
    const uint32_t tail = look(uint32_t(sq_doorbell(4, id)));
    while (queues_.contains(id) && queues_[id].head != tail) {
      Queue& q = queues_[id];
      nvme::command entry;
      iommu_.reach(q.sq + q.head * 64, 64, [&](auto* from) { std::memcpy(&entry, from, 64); });
      q.head = (q.head + 1) % q.depth;
      const uint16_t cid = uint16_t(entry.opcode_cid >> 16);
      if (id != 0 && faults.silent_io) {
        q.held.push_back(cid);
        continue;
      }
      uint32_t dw0 = 0;
      const uint16_t status = id == 0 ? admin(entry, dw0) : io(entry);
      complete(id, cid, status, dw0);
    }
  }

  void complete(uint16_t id, uint16_t cid, uint16_t status, uint32_t dw0) {
    Queue& q = queues_[id];
    const uint64_t upper = uint64_t(q.head) | uint64_t(id) << 16 | uint64_t(cid) << 32 |
                           uint64_t(uint16_t(status << 1 | q.phase)) << 48;
    iommu_.reach(q.cq + q.tail * 16, 16, [&](auto* to) {
      auto* words = reinterpret_cast<uint64_t*>(to);
      words[0] = dw0;
      __atomic_store_n(&words[1], upper, __ATOMIC_RELEASE);
    });
    q.tail = (q.tail + 1) % q.depth;
    if (q.tail == 0) q.phase ^= 1;
  }

  uint16_t admin(const nvme::command& entry, uint32_t& dw0) {
    const uint8_t opcode = uint8_t(entry.opcode_cid);
    const uint16_t id = uint16_t(entry.cdw10);
    if (faults.fails_opcode == opcode) return nvme::kInvalidField;
    switch (opcode) {
      case nvme::kIdentify:
        identify(entry);
        break;
      case 0x09:
        dw0 = (kQueues - 1) | (kQueues - 1) << 16;
        break;
      case 0x05:
        pending_cq_[id] = entry.prp1;
        break;
      case 0x01:
        require(pending_cq_.contains(id), "a CQ is created before its SQ");
        queues_[id] = {entry.prp1, pending_cq_[id], (entry.cdw10 >> 16) + 1, {}};
        break;
      case 0x00:
        queues_.erase(id);
        break;
      case 0x04:
        require(!queues_.contains(id), "an SQ is deleted before its CQ");
        pending_cq_.erase(id);
        break;
      case 0x08:
        dw0 = abort(id, uint16_t(entry.cdw10 >> 16));
        break;
      default:
        return nvme::kInvalidOpcode;
    }
    return nvme::kSuccess;
  }

  uint32_t abort(uint16_t id, uint16_t cid) {
    if (!faults.obeys_abort || !queues_.contains(id)) return 1;
    std::erase(queues_[id].held, cid);
    complete(id, cid, nvme::kCommandAborted, 0);
    return 0;
  }

  void identify(const nvme::command& entry) {
    iommu_.reach(entry.prp1, kPage, [&](auto* to) {
      std::memset(to, 0, kPage);
      auto put = [&](size_t at, auto value) { std::memcpy(to + at, &value, sizeof value); };
      if (entry.cdw10 == 1) {
        std::memcpy(to + 24, "fake drive  ", 12);
        put(77, uint8_t(4));  // MDTS: 64 KiB
        put(520, uint16_t(0xC));
      } else if (entry.cdw10 == 2) {
        if (entry.nsid < 1) put(0, uint32_t(1));
      } else if (entry.nsid == 1) {
        put(0, uint64_t(kLbas));
        put(128, uint32_t(9 << 16));
      }
    });
  }

  uint16_t io(const nvme::command& entry) {
    const uint8_t opcode = uint8_t(entry.opcode_cid);
    if (opcode != nvme::kRead && opcode != nvme::kWrite) return nvme::kSuccess;
    const uint64_t lba = entry.cdw10, blocks = (entry.cdw12 & 0xFFFF) + 1;
    if (lba + blocks > kLbas) return nvme::kLbaOutOfRange;
    uint64_t left = blocks * 512, page = entry.prp1, list = entry.prp2;
    std::byte* at = &medium_[lba * 512];
    bool first = true, listed = false;
    while (left != 0) {
      const uint64_t n = std::min(left, kPage - page % kPage);
      iommu_.reach(page, n, [&](auto* memory) {
        if (opcode == nvme::kRead) std::memcpy(memory, at, n);
        if (opcode == nvme::kWrite) std::memcpy(at, memory, n);
      });
      at += n;
      left -= n;
      if (first) listed = left > kPage;
      first = false;
      page = entry.prp2;
      if (listed) {
        iommu_.reach(list, 8, [&](auto* from) { std::memcpy(&page, from, 8); });
        list += 8;
      }
    }
    return nvme::kSuccess;
  }

  Iommu iommu_;
  std::mutex lock_;
  std::vector<std::shared_ptr<Registers>> mappings_;
  int fd_ = -1;
  std::shared_ptr<Registers> bar_;
  std::map<uint64_t, void*> files_;  // mappings by IO virtual address
  std::map<uint16_t, Queue> queues_;
  std::map<uint16_t, uint64_t> pending_cq_;
  std::vector<std::byte> medium_;
  std::atomic<bool> master_{false}, ending_{false};
  std::thread firmware_;
};

template <typename Act>
DriveError failure_of(Act act) {
  try {
    act();
  } catch (const DriveError& error) {
    return error;
  }
  require(false, "a DriveError");
  std::abort();
}

std::shared_ptr<Drive> open(const std::shared_ptr<FakeFunction>& fake, int64_t limit_ms = 5000) {
  return std::make_shared<Drive>(fake, limit_ms);
}

// An array's queue pairs: rings in memory of their own.
struct Rings {
  explicit Rings(const std::shared_ptr<Drive>& drive)
      : memory(4 * kPage, kPage), data_memory(64 * kPage, kPage) {
    lease = std::make_shared<QueueLease>(drive, 2);
    const auto begin = reinterpret_cast<uint64_t>(memory.address());
    std::vector<QueuePairAddresses> pairs;
    for (size_t i = 0; i < 2; ++i) {
      const auto [sq, cq] = lease->doorbells()[i];
      const uint64_t at = begin + 2 * kPage * i;
      pairs.push_back({at, at + kPage, sq, cq, 16, lease->ids()[i]});
    }
    const auto data_begin = reinterpret_cast<uint64_t>(data_memory.address());
    data = std::make_shared<DataRegion>(drive->function(), data_begin, 64 * kPage, 64 * kPage);
    queues = std::make_unique<DriveQueues>(lease, pairs, std::pair(begin, 4 * kPage), data);
    queues->set_failed_words({reinterpret_cast<uint64_t>(&failed)});
  }
  HostMemory memory, data_memory;
  std::shared_ptr<QueueLease> lease;
  std::shared_ptr<DataRegion> data;
  std::unique_ptr<DriveQueues> queues;
  uint32_t failed = 0;
};

bool waits_for(const uint32_t& word) {
  for (int i = 0; i < 10'000 && __atomic_load_n(&word, __ATOMIC_RELAXED) == 0; ++i) {
    const timespec time = {0, 1'000'000};
    nanosleep(&time, nullptr);
  }
  return __atomic_load_n(&word, __ATOMIC_RELAXED) != 0;
}

// What goes right.

void data_passes_and_ends_orderly() {
  auto fake = std::make_shared<FakeFunction>();
  auto drive = open(fake);
  require(drive->identity().model == "fake drive", "the model without its padding");
  require(drive->namespaces() == std::vector<uint32_t>{1}, "one namespace");
  require(drive->queue_pairs_max() == kQueues, "as many queue pairs as granted");
  NamespaceStorage storage(drive, 1, drive->identify_namespace(1), true);
  std::vector<char> out(300'000), in(out.size());
  for (size_t i = 0; i < out.size(); ++i) out[i] = char(i * 7 % 251);
  for (uint64_t n : {1, 512, 4096, 4097, 8192, 8193, 65536, 300'000}) {
    require(storage.write(n + 3, out.data(), n, nullptr) == 0, "a write");
    require(storage.read(n + 3, in.data(), n, nullptr) == 0, "a read");
    require(std::memcmp(in.data(), out.data(), n) == 0, "the bytes that were written");
  }
  require(storage.read(kLbas * 512, in.data(), 1, nullptr) == kOutOfRange, "beyond the end");
  Rings rings(drive);
  rings.queues->start();
  rings.queues->stop();
  rings.queues->stop();
  require(rings.queues->lost().empty(), "a stop is no loss");
  drive->close();
  drive->close();
  require(fake->shut_down && fake->closed_, "the shutdown was announced, the function given back");
  require(storage.read(0, in.data(), 1, nullptr) == ENODEV, "a closed drive");
  require(failure_of([&] { drive->reset(false); }).kind == Kind::kLost, "closed for good");
}

// What goes wrong at the begin.

void faults_at_the_begin_are_told() {
  auto fake = std::make_shared<FakeFunction>();
  fake->faults.never_ready = true;
  DriveError error = failure_of([&] { open(fake); });
  require(error.kind == Kind::kTimeout, "never ready");
  require(std::string(error.what()).find("CAP.TO") != std::string::npos, "whose limit it is");
  fake->faults.never_ready = false;
  fake->faults.fatal = true;
  require(failure_of([&] { open(fake); }).kind == Kind::kLost, "fatal");
  fake->faults.fatal = false;
  fake->faults.silent = true;
  require(failure_of([&] { open(fake, 50); }).kind == Kind::kTimeout, "silent");
  fake->faults.silent = false;
  for (int opcode : {0x06, 0x09, 0x05, 0x01}) {
    fake->faults.fails_opcode = opcode;
    require(failure_of([&] { open(fake); }).kind == Kind::kStatus, "a failed admin command");
  }
  fake->faults.fails_opcode = -1;
  open(fake);
  fake->remove();
  require(failure_of([&] { open(fake); }).kind == Kind::kLost, "gone");
}

// What goes wrong later.

void losses_end_waits_and_a_reset_recovers() {
  auto fake = std::make_shared<FakeFunction>();
  auto drive = open(fake, 2000);
  NamespaceStorage storage(drive, 1, drive->identify_namespace(1), true);
  char byte = 0;
  for (int turn = 0; turn < 3; ++turn) {
    Rings rings(drive);
    rings.queues->start();
    require(storage.read(0, &byte, 1, nullptr) == 0, "a read before");
    if (turn == 0) drive->reset(false);
    if (turn == 1) drive->reset(true);
    if (turn == 2) fake->faults.fatal = true;
    require(waits_for(rings.failed), "the waits of device code end");
    require(!rings.queues->lost().empty(), "it says why");
    // A late doorbell goes nowhere.
    const uint64_t doorbell = rings.queues->queue_pairs()[0].sq_doorbell;
    atomic::store_mmio(reinterpret_cast<uint32_t*>(doorbell), uint32_t(5));
    if (turn == 2) {
      require(storage.read(0, &byte, 1, nullptr) == ENODEV, "a read from a lost drive");
      require(failure_of([&] { drive->namespaces(); }).kind == Kind::kLost, "an admin command");
      fake->faults.fatal = false;
      drive->reset(false);
    }
    require(storage.read(0, &byte, 1, nullptr) == 0, "a read behind the reset");
    rings.queues->stop();
  }
  Rings last(drive);
  last.queues->start();
  fake->faults.gone = true;
  require(waits_for(last.failed), "a removed drive");
  require(last.queues->lost().find("removed") != std::string::npos, "it says so");
}

void commands_that_never_end_are_aborted() {
  auto fake = std::make_shared<FakeFunction>();
  auto drive = open(fake, 50);
  NamespaceStorage storage(drive, 1, drive->identify_namespace(1), true);
  char byte = 0;
  fake->faults.silent_io = true;
  fake->faults.obeys_abort = true;
  require(storage.read(0, &byte, 1, nullptr) == ECANCELED, "aborted");
  fake->faults.silent_io = false;
  require(storage.read(0, &byte, 1, nullptr) == 0, "the next one passes");
  fake->faults.silent_io = true;
  fake->faults.obeys_abort = false;
  require(storage.read(0, &byte, 1, nullptr) == ETIMEDOUT, "not even aborted");
  require(!drive->lost().empty(), "so the drive is lost");
  fake->faults.silent_io = false;
  drive->reset(false);
  require(storage.read(0, &byte, 1, nullptr) == 0, "and found again");
}

void queues_that_cannot_be_made_or_deleted() {
  auto fake = std::make_shared<FakeFunction>();
  auto drive = open(fake, 2000);
  {
    Rings rings(drive);
    fake->faults.fails_opcode = 0x01;
    require(failure_of([&] { rings.queues->start(); }).kind == Kind::kStatus, "no SQ");
    fake->faults.fails_opcode = -1;
  }
  for (int i = 0; i < 3; ++i) {
    Rings rings(drive);  // the numbers come back each time
    rings.queues->start();
    require(rings.lease->ids()[0] == 2, "the lowest number");
  }
  require(failure_of([&] { QueueLease(drive, kQueues); }).kind == Kind::kUnfit,
          "one is the host's");
  Rings stuck(drive);
  stuck.queues->start();
  fake->faults.fails_opcode = 0x00;
  stuck.queues->stop();
  require(!drive->lost().empty(), "a queue that stays may write to memory: the drive is lost");
}

// Puts a write of one block of ones into the ring of the first pair, and rings for `tail` entries.
void submit_write(const Rings& rings, uint32_t tail) {
  const nvme::drive_addressing place = rings.data->addressing(1, 9);
  const auto data = reinterpret_cast<uint64_t>(rings.data_memory.address());
  std::memset(rings.data_memory.address(), 1, 512);
  nvme::command entry = nvme::block_command(nvme::kWrite, uint16_t(tail - 1), 0, 1, data, 0);
  nvme::address_for_drive(entry, place);
  const QueuePairAddresses& pair = rings.queues->queue_pairs()[0];
  reinterpret_cast<nvme::command*>(pair.sq)[tail - 1] = entry;
  atomic::fence_system();
  atomic::store_mmio(reinterpret_cast<uint32_t*>(pair.sq_doorbell), tail);
}

void blocks_that_become_anothers_are_left_first() {
  for (bool fails : {false, true}) {
    auto fake = std::make_shared<FakeFunction>();
    auto drive = open(fake, 2000);
    NamespaceStorage storage(drive, 1, drive->identify_namespace(1), true);
    char byte = 7;
    require(storage.write(0, &byte, 1, nullptr) == 0, "a write by the host");
    Rings rings(drive), others(drive);
    rings.queues->start();
    others.queues->start();
    fake->faults.silent_io = true;
    submit_write(rings, 1);  // in flight
    if (fails) fake->faults.fails_opcode = 0x00;
    rings.queues->retire("the blocks are another's");
    fake->faults.silent_io = false;
    fake->faults.fails_opcode = -1;
    require(__atomic_load_n(&rings.failed, __ATOMIC_RELAXED) != 0, "waits end");
    require(rings.queues->lost() == "the blocks are another's", "it says why");
    submit_write(rings, 2);  // a late one
    if (fails) {
      require(!drive->lost().empty(), "the drive may not have stopped");
      require((fake->map_registers()->read(kConfiguration) & kEnable) == 0, "so it is disabled");
      drive->reset(false);
    } else {
      require(drive->lost().empty() && others.queues->lost().empty(), "others go on");
      submit_write(others, 1);
    }
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    do {
      require(storage.read(0, &byte, 1, nullptr) == 0, "a read by the host");
    } while (!fails && byte != 1 && std::chrono::steady_clock::now() < limit);
    require(byte == (fails ? 7 : 1), "only the others' write came");
    rings.queues->retire("again");
    rings.queues->stop();
    rings.queues->retire("and again");
  }
}

void threads_meet_a_reset() {
  auto fake = std::make_shared<FakeFunction>();
  auto drive = open(fake, 2000);
  auto storage = std::make_shared<NamespaceStorage>(drive, 1, drive->identify_namespace(1), true);
  std::atomic<bool> done{false};
  std::vector<std::thread> readers;
  for (int t = 0; t < 2; ++t) {
    readers.emplace_back([&] {
      std::vector<char> memory(70'000);
      while (!done) {
        const int error = storage->read(100, memory.data(), memory.size(), nullptr);
        require(error == 0 || error == ENODEV, "data, or the loss");
      }
    });
  }
  for (int i = 0; i < 5; ++i) {
    Rings rings(drive);
    rings.queues->start();
    drive->reset(i % 2 == 0);
    require(waits_for(rings.failed), "the loss");
  }
  done = true;
  for (auto& reader : readers) reader.join();
}

// Rings and data of a GPU: memory that the drive reaches by a file, and registers that stay mapped.
struct FileMemory {
  explicit FileMemory(uint64_t size) : nbytes(size), file(memfd_create("gpu", 0)) {
    require(ftruncate(file, off_t(size)) == 0, "memory for the file");
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    require(memory != MAP_FAILED, "a mapping of the file");
    address = reinterpret_cast<uint64_t>(memory);
  }
  ~FileMemory() {
    munmap(reinterpret_cast<void*>(address), nbytes);
    ::close(file);
  }
  const uint64_t nbytes;
  const int file;
  uint64_t address;
};

void memory_of_a_gpu_is_reached_by_its_file() {
  auto fake = std::make_shared<FakeFunction>();
  auto drive = open(fake);
  NamespaceStorage storage(drive, 1, drive->identify_namespace(1), true);
  std::vector<char> out(4 * kPage);
  for (size_t i = 0; i < out.size(); ++i) out[i] = char(i * 7 % 251);
  require(storage.write(0, out.data(), out.size(), nullptr) == 0, "a write by the host");
  FileMemory rings(2 * kPage), frames(4 * kPage);
  auto lease = std::make_shared<QueueLease>(drive, 1);
  lease->hold();
  const auto [sq_doorbell, cq_doorbell] = lease->doorbells()[0];
  auto data = std::make_shared<DataRegion>(drive->function(), frames.address, 4 * kPage, 4 * kPage,
                                           frames.file);
  const nvme::drive_addressing place = data->addressing(1, 9);
  DriveQueues queues(
      lease,
      {{rings.address, rings.address + kPage, sq_doorbell, cq_doorbell, 16, lease->ids()[0]}},
      {rings.address, rings.nbytes}, data, rings.file);
  queues.start();
  nvme::command entry = nvme::block_command(nvme::kRead, 0, 0, 32, frames.address, 0);
  nvme::address_for_drive(entry, place);
  *reinterpret_cast<nvme::command*>(rings.address) = entry;
  atomic::fence_system();
  atomic::store_mmio(reinterpret_cast<uint32_t*>(sq_doorbell), uint32_t(1));
  const auto* upper = reinterpret_cast<const uint64_t*>(rings.address + kPage) + 1;
  for (int i = 0; i < 10'000 && atomic::load_acquire(upper) == 0; ++i) {
    const timespec time = {0, 1'000'000};
    nanosleep(&time, nullptr);
  }
  require(atomic::load_acquire(upper) >> 48 == 1, "a completion without an error");
  require(std::memcmp(reinterpret_cast<void*>(frames.address), out.data(), out.size()) == 0,
          "the bytes that were written");
  drive->reset(false);
  require(!queues.lost().empty(), "a loss");
  require(lease->registers().read(kCap) != 0, "the registers stay as long as the GPU has them");
  queues.stop();
  require(lease->registers().read(kCap) != 0, "also when the queues are gone");
  lease->release();
  require(lease->registers().read(kCap) == 0, "until the lease ends");
}

// Pure code.

void addresses_are_given_once() {
  IovaSpace space({{0, 0xFFFF}, {0x100000, 0x1FFFFF}});
  require(space.take(0x1000, 0x1000) == 0x1000, "never page zero");
  require(space.take(0x8000, 0x1000) == 0x2000, "the next");
  require(space.take(0x8000, 0x1000) == 0x100000, "not across a gap");
  require(space.take(0x80000, 0x80000) == 0x180000, "aligned");
  require(space.take(0x100000, 0x1000) == 0, "no room");
  space.give(0x2000);
  require(space.take(0x9000, 0x1000) == 0x2000, "given back");
  IovaSpace all({{0, ~uint64_t(0)}});
  require(all.take(uint64_t(1) << 63, uint64_t(1) << 62) == uint64_t(1) << 62, "large ones");
  require(all.take(uint64_t(1) << 63, 0x1000) == 0, "no sum wraps");
}

void commands_are_put_in_the_drives_terms() {
  const nvme::drive_addressing d = {0x10000, 0x500000, 0x900000, 4096, 3, 12, 0, nullptr, 0};
  for (uint64_t bytes : {4096, 8192, 16384, 65536}) {
    for (uint64_t line = 0; line < 4; ++line) {
      const uint64_t address = d.begin + line * bytes;
      nvme::command entry =
          nvme::block_command(nvme::kRead, 7, 8 * 1000, uint32_t(bytes / 512), address, 0);
      nvme::address_for_drive(entry, d);
      require(entry.nsid == 3 && entry.opcode_cid >> 16 == 7, "namespace and identifier");
      require(entry.cdw10 == 1000 && entry.cdw12 + 1 == bytes / 4096, "blocks of 4 KiB");
      require(entry.prp1 == address + d.iova_offset, "the IO virtual address");
      const uint64_t list = d.lists + line * (bytes / 4096) * 8;
      const uint64_t second = entry.prp1 + 4096;
      require(entry.prp2 == (bytes == 4096 ? 0 : bytes == 8192 ? second : list), "PRP2");
      require(bytes <= 8192 || list / 4096 == (list + bytes / 4096 * 8 - 9) / 4096, "one page");
    }
  }
}

void extents_say_where_blocks_lie() {
  // Three extents of 3, 1 and 4 blocks of 4 KiB; the second lies before the first.
  const nvme::namespace_part extents[] = {
      {3 * kPage, 100 * kPage}, {4 * kPage, (10 - 3) * kPage}, {8 * kPage, (1000 - 4) * kPage}};
  const uint64_t places[] = {100, 101, 102, 10, 1000, 1001, 1002, 1003};
  for (uint32_t shift : {9, 12}) {
    const nvme::drive_addressing d = {0x10000, 0, 0, 4096, 1, shift, 0, extents, 3};
    for (uint64_t block = 0; block < 8; ++block) {
      for (uint64_t part = 0; part < (shift == 12 ? 1 : 8); ++part) {
        nvme::command entry = nvme::block_command(nvme::kWrite, 0, block * 8 + part, 1, d.begin, 0);
        nvme::address_for_drive(entry, d);
        require(entry.cdw10 == (places[block] * kPage + part * 512) >> shift, "the extent's block");
        require((entry.cdw12 & 0xFFFF) == 0, "one block");
      }
    }
    require(nvme::byte_on_drive(d, 3 * kPage - 1) == 103 * kPage - 1, "the last byte of an extent");
  }
  // The places on a drive of 16 TiB fit, too.
  const nvme::namespace_part far[] = {{kPage, uint64_t(1) << 44}};
  const nvme::drive_addressing d = {0, 0, 0, 4096, 1, 9, 0, far, 1};
  nvme::command entry = nvme::block_command(nvme::kRead, 0, 1, 1, 0, 0);
  nvme::address_for_drive(entry, d);
  require(entry.cdw10 == 1 && entry.cdw11 == 8, "64 bits");
}

void wild_bytes_decode_to_something() {
  std::vector<std::byte> page(4096, std::byte(0xFF));
  const DataPage data(page);
  require(DriveIdentity::decode(data, 4096).transfer_bytes_max == 0, "an MDTS beyond sense");
  require(NamespaceIdentity::decode(data).lba_shift == 0xFF, "a shift that callers refuse");
  require(decode_namespace_list(data).size() == 1024, "a full list");
  require(decode_error_log(data).size() == 64, "a full log");
  require(Capabilities::decode(~uint64_t(0)).entries_max == 65536, "the largest ring");
}

}  // namespace

int main() {
  addresses_are_given_once();
  commands_are_put_in_the_drives_terms();
  extents_say_where_blocks_lie();
  wild_bytes_decode_to_something();
  data_passes_and_ends_orderly();
  faults_at_the_begin_are_told();
  losses_end_waits_and_a_reset_recovers();
  commands_that_never_end_are_aborted();
  queues_that_cannot_be_made_or_deleted();
  blocks_that_become_anothers_are_left_first();
  threads_meet_a_reset();
  memory_of_a_gpu_is_reached_by_its_file();
  std::printf("a drive that misbehaves, met\n");
  return EXIT_SUCCESS;
}
