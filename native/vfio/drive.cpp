// Life and admin commands of a controller; see drive.h.
#include "vfio/drive.h"

#include <algorithm>
#include <ctime>

#include "io/nvme_command.h"
#include "storage/storage.h"

namespace fw::native::vfio {
namespace {

using Kind = DriveError::Kind;

// Admin opcodes (figure 138 of the Base Specification), and values of their fields.
constexpr uint8_t kDeleteSq = 0x00, kCreateSq = 0x01, kGetLogPage = 0x02, kDeleteCq = 0x04,
                  kCreateCq = 0x05, kAbort = 0x08, kSetFeatures = 0x09;
constexpr uint32_t kCnsNamespace = 0, kCnsController = 1, kCnsActiveNamespaces = 2;
constexpr uint32_t kFeatureQueues = 0x07;
constexpr uint32_t kErrorLog = 0x01;
constexpr uint32_t kContiguous = 1;  // PC of a queue
constexpr uint32_t kQueuesMax = 0xFFFE;

// The buffer of the host's own transfers: long enough that its commands cost little.
constexpr uint64_t kBufferBytes = 512 << 10;

// How often the registers are looked at. The look is a PCIe read of about a microsecond.
constexpr int kWatchMs = 20;
// The least time for a change of CSTS.RDY, where CAP.TO says less.
constexpr int64_t kReadyLimitMinMs = 1000;
// How long a shutdown may take, if the drive does not say.
constexpr int64_t kShutdownLimitMs = 5000;
// How long an aborted command may take to end.
constexpr int64_t kAbortLimitMs = 1000;

void nap(int64_t ns) {
  const timespec time = {0, ns};
  nanosleep(&time, nullptr);
}

nvme::command admin_command(uint8_t opcode) {
  nvme::command entry = {};
  entry.opcode_cid = opcode;
  return entry;
}

}  // namespace

Drive::Drive(std::shared_ptr<PciFunction> function, int64_t limit_ms)
    : function_(std::move(function)),
      limit_ms_(limit_ms),
      registers_(function_->map_registers()),
      page_(std::make_unique<DmaMemory>(function_, kMemoryPageBytes)) {
  capabilities_ = Capabilities::decode(registers_->read_pair(kCap));
  try {
    bring_up();
  } catch (const DriveError&) {
    quiet();
    throw;
  }
  watched_ = true;
  watcher_ = std::thread([this] { watch(); });
}

Drive::~Drive() {
  close();
  // The thread is the parent's, and can be neither joined nor destroyed here.
  if (in_forked_child()) (void)new std::thread(std::move(watcher_));
}

// Bringing it up.

void Drive::bring_up() {
  if (status() == kAllOnes) {
    throw DriveError(Kind::kLost, name() + " does not answer: its registers read as ones");
  }
  if (!capabilities_.nvm_commands || capabilities_.page_bytes_min > kMemoryPageBytes) {
    throw DriveError(Kind::kUnfit, name() +
                                       " has no NVM command set, or no memory pages of 4096 "
                                       "bytes");
  }
  function_->set_bus_master(false);
  disable();
  admin_ = std::make_unique<HostQueue>(function_, registers_, capabilities_.doorbell_stride, 0);
  function_->set_bus_master(true);
  enable();
  identify();
  negotiate_queues();
  make_io_queue();
}

uint32_t Drive::status() { return registers_->read(kStatus); }

void Drive::disable() {
  const uint32_t cc = registers_->read(kConfiguration);
  // A controller that is about to become ready must not be disabled before it is.
  if ((cc & kEnable) != 0 && (status() & (kReady | kFatal)) == 0) {
    const int64_t end = monotonic_ns() + capabilities_.ready_limit_ms * int64_t(1'000'000);
    while ((status() & (kReady | kFatal)) == 0 && monotonic_ns() < end) nap(1'000'000);
  }
  registers_->write(kConfiguration, cc & ~(kEnable | kShutdownMask));
  wait_ready(false, "disabled");
}

void Drive::enable() {
  registers_->write(kInterruptMaskSet, kAllOnes);
  registers_->write(kAdminQueueAttributes, (HostQueue::kDepth - 1) | (HostQueue::kDepth - 1) << 16);
  registers_->write_pair(kAdminSq, admin_->sq_iova());
  registers_->write_pair(kAdminCq, admin_->cq_iova());
  registers_->write(kConfiguration, kEnable | kEntrySizes);
  wait_ready(true, "ready");
}

void Drive::wait_ready(bool ready, const char* what) {
  const int64_t limit_ms = std::max<int64_t>(capabilities_.ready_limit_ms, kReadyLimitMinMs);
  const int64_t end = monotonic_ns() + limit_ms * 1'000'000;
  while (true) {
    const uint32_t csts = status();
    if (csts == kAllOnes) throw DriveError(Kind::kLost, name() + " was removed");
    if (ready && (csts & kFatal) != 0) {
      throw DriveError(Kind::kLost, name() + " has a fatal status (CSTS.CFS): power it off and on");
    }
    if (((csts & kReady) != 0) == ready) return;
    if (monotonic_ns() > end) {
      throw DriveError(Kind::kTimeout, name() + " did not become " + what + " within " +
                                           std::to_string(limit_ms) +
                                           " ms, its own limit (CAP.TO): reset it (echo 1 | sudo "
                                           "tee /sys/bus/pci/devices/" +
                                           name() + "/reset), or power it off and on");
    }
    nap(200'000);
  }
}

DataPage Drive::page() const { return DataPage(page_->as<std::byte>(), kMemoryPageBytes); }

void Drive::identify_page(uint32_t cns, uint32_t nsid, const char* what) {
  nvme::command entry = admin_command(nvme::kIdentify);
  entry.nsid = nsid;
  entry.prp1 = page_->iova();
  entry.cdw10 = cns;
  (void)admin_locked(entry, what);
}

void Drive::identify() {
  const std::lock_guard guard(admin_lock_);
  identify_page(kCnsController, 0, "Identify Controller");
  identity_ = DriveIdentity::decode(page(), capabilities_.page_bytes_min);
}

void Drive::negotiate_queues() {
  nvme::command entry = admin_command(kSetFeatures);
  entry.cdw10 = kFeatureQueues;
  entry.cdw11 = (kQueuesMax - 1) | (kQueuesMax - 1) << 16;
  const uint32_t got = admin(entry, "Set Features (Number of Queues)").dw0;
  // Both are zero-based. The doorbells must lie in the BAR, too.
  const uint32_t granted = std::min(got & 0xFFFF, got >> 16) + 1;
  const uint64_t room = (registers_->nbytes() - kDoorbells) / capabilities_.doorbell_stride / 2;
  queues_max_ = uint32_t(std::min<uint64_t>(granted, room - 1));
}

void Drive::make_io_queue() {
  if (buffer_ == nullptr) {
    const uint64_t most = transfer_bytes_max(nvme::kLbaShift);
    buffer_ = std::make_unique<DmaMemory>(function_, std::min(kBufferBytes, most));
    buffer_prps_ = std::make_unique<DmaMemory>(function_, kMemoryPageBytes);
    auto* entries = buffer_prps_->as<uint64_t>();
    const uint64_t pages = buffer_->region().nbytes() / kMemoryPageBytes;
    for (uint64_t i = 0; i + 1 < pages; ++i) {
      entries[i] = buffer_->iova() + (i + 1) * kMemoryPageBytes;
    }
  }
  const std::lock_guard io(io_lock_);
  io_ = std::make_unique<HostQueue>(function_, registers_, capabilities_.doorbell_stride, 1);
  create_pair({1, HostQueue::kDepth, io_->sq_iova(), io_->cq_iova()});
  const std::lock_guard guard(state_lock_);
  ids_.insert(1);
}

uint64_t Drive::transfer_bytes_max(uint32_t lba_shift) const {
  const uint64_t blocks = uint64_t(nvme::kLbaCountMax) << lba_shift;
  const uint64_t mdts = identity_.transfer_bytes_max;
  return mdts == 0 ? blocks : std::min(blocks, mdts);
}

// Commands.

nvme::completion Drive::admin(nvme::command entry, const char* what) {
  const std::lock_guard guard(admin_lock_);
  return admin_locked(entry, what);
}

nvme::completion Drive::admin_locked(nvme::command entry, const char* what) {
  if (in_forked_child()) throw DriveError(Kind::kLost, "the drive belongs to the parent process");
  throw_lost();
  nvme::completion result;
  if (!admin_->wait(admin_->submit(entry), limit_ms_, lost_, result)) {
    throw_lost();
    const std::string text =
        name() + " did not complete " + what + " within " + std::to_string(limit_ms_) + " ms";
    lose(text);
    throw DriveError(Kind::kTimeout, text + ": reset it (VfioController.reset)");
  }
  const uint16_t status = result.status >> 1 & 0x7FF;
  if (status != nvme::kSuccess) {
    throw DriveError(Kind::kStatus, name() + ": " + what + " failed: " + nvme_status_text(status),
                     0, status);
  }
  return result;
}

uint16_t Drive::io(nvme::command entry, uint64_t nbytes) {
  if (in_forked_child()) throw DriveError(Kind::kLost, "the drive belongs to the parent process");
  throw_lost();
  if (nbytes != 0) {
    entry.prp1 = buffer_->iova();
    entry.prp2 = nbytes > 2 * kMemoryPageBytes
                     ? buffer_prps_->iova()
                     : nvme::second_prp(entry.prp1, nbytes, kMemoryPageBytes);
  }
  const uint16_t cid = io_->submit(entry);
  nvme::completion result;
  if (!io_->wait(cid, limit_ms_, lost_, result)) {
    throw_lost();
    const bool aborted = abort(io_->id(), cid);
    if (!io_->wait(cid, kAbortLimitMs, lost_, result)) {
      throw_lost();
      const std::string text = name() + " did not complete a command within " +
                               std::to_string(limit_ms_) + " ms, nor when it was asked to abort it";
      lose(text);
      throw DriveError(Kind::kTimeout, text + (aborted ? " (it said that it did)" : ""));
    }
  }
  return result.status >> 1 & 0x7FF;
}

std::vector<uint32_t> Drive::namespaces() {
  const std::lock_guard guard(admin_lock_);
  std::vector<uint32_t> all;
  // A page has 1024; the next one begins behind the last of them.
  while (all.size() % 1024 == 0) {
    identify_page(kCnsActiveNamespaces, all.empty() ? 0 : all.back(), "Identify (namespace list)");
    const std::vector<uint32_t> more = decode_namespace_list(page());
    if (more.empty()) break;
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

NamespaceIdentity Drive::identify_namespace(uint32_t nsid) {
  const std::lock_guard guard(admin_lock_);
  identify_page(kCnsNamespace, nsid, "Identify Namespace");
  return NamespaceIdentity::decode(page());
}

std::vector<ErrorLogEntry> Drive::error_log() {
  const std::lock_guard guard(admin_lock_);
  const uint64_t nbytes =
      std::min<uint64_t>(identity_.error_log_entries * kErrorLogEntryBytes, kMemoryPageBytes);
  const uint32_t dwords = uint32_t(nbytes / 4 - 1);
  nvme::command entry = admin_command(kGetLogPage);
  entry.nsid = 0xFFFFFFFF;
  entry.prp1 = page_->iova();
  entry.cdw10 = kErrorLog | dwords << 16;
  (void)admin_locked(entry, "Get Log Page (Error Information)");
  return decode_error_log(page().first(nbytes));
}

bool Drive::abort(uint16_t queue, uint16_t cid) {
  nvme::command entry = admin_command(kAbort);
  entry.cdw10 = queue | uint32_t(cid) << 16;
  // Bit 0 of the result: the command was not aborted.
  return (admin(entry, "Abort").dw0 & 1) == 0;
}

// I/O queues.

std::vector<uint16_t> Drive::take_ids(uint32_t count) {
  const std::lock_guard guard(state_lock_);
  std::vector<uint16_t> found;
  for (uint32_t id = 1; id <= queues_max_ && found.size() < count; ++id) {
    if (!ids_.contains(uint16_t(id))) found.push_back(uint16_t(id));
  }
  if (found.size() < count) {
    throw DriveError(Kind::kUnfit, name() + " has " + std::to_string(queues_max_) +
                                       " I/O queue pairs, of which " +
                                       std::to_string(found.size()) + " are free, fewer than " +
                                       std::to_string(count) + ": ask for fewer");
  }
  ids_.insert(found.begin(), found.end());
  return found;
}

void Drive::give_ids(const std::vector<uint16_t>& ids) {
  const std::lock_guard guard(state_lock_);
  for (uint16_t id : ids) ids_.erase(id);
}

void Drive::create_pair(const QueuePairPlace& pair) {
  nvme::command cq = admin_command(kCreateCq);
  cq.prp1 = pair.cq_iova;
  cq.cdw10 = pair.id | (pair.depth - 1) << 16;
  cq.cdw11 = kContiguous;  // interrupts stay off
  (void)admin(cq, "Create I/O Completion Queue");
  nvme::command sq = admin_command(kCreateSq);
  sq.prp1 = pair.sq_iova;
  sq.cdw10 = cq.cdw10;
  sq.cdw11 = kContiguous | uint32_t(pair.id) << 16;
  try {
    (void)admin(sq, "Create I/O Submission Queue");
  } catch (const DriveError&) {
    nvme::command entry = admin_command(kDeleteCq);
    entry.cdw10 = pair.id;
    if (!lost_) (void)admin(entry, "Delete I/O Completion Queue");
    throw;
  }
}

void Drive::delete_pair(const QueuePairPlace& pair, const char* what) {
  for (uint8_t opcode : {kDeleteSq, kDeleteCq}) {
    nvme::command entry = admin_command(opcode);
    entry.cdw10 = pair.id;
    (void)admin(entry, what);
  }
}

void Drive::create(const std::vector<QueuePairPlace>& pairs, DriveUser& user) {
  // Known from the begin, so that it hears of a loss in between.
  {
    const std::lock_guard guard(state_lock_);
    if (!why_lost_.empty()) throw DriveError(Kind::kLost, why_lost_);
    users_.insert(&user);
  }
  size_t made = 0;
  try {
    for (; made < pairs.size(); ++made) create_pair(pairs[made]);
  } catch (const DriveError&) {
    remove({pairs.begin(), pairs.begin() + int64_t(made)}, user);
    throw;
  }
}

void Drive::remove(const std::vector<QueuePairPlace>& pairs, DriveUser& user) noexcept {
  {
    // A user that has been lost is not among them any more: its queues ended with a reset.
    const std::lock_guard guard(state_lock_);
    if (users_.erase(&user) == 0 || lost_) return;
  }
  try {
    for (const QueuePairPlace& pair : pairs) delete_pair(pair, "Delete I/O Queue");
  } catch (const DriveError& error) {
    // It may still write: to their memory, which its user is about to unmap, and to its blocks.
    lose(error.what());
    const std::lock_guard guard(admin_lock_);
    if (lost_) quiet();
  }
}

// Losses.

std::string Drive::lost() const {
  const std::lock_guard guard(state_lock_);
  return why_lost_;
}

void Drive::throw_lost() const {
  // Acquire: pairs with `lose`; the reason is read under its lock anyway.
  if (!lost_.load(std::memory_order_acquire)) return;
  throw DriveError(Kind::kLost, lost());
}

void Drive::lose(const std::string& why) {
  const std::lock_guard guard(state_lock_);
  if (!why_lost_.empty()) return;
  why_lost_ = why;
  lost_.store(true, std::memory_order_release);
  for (DriveUser* user : users_) user->lose(why);
  users_.clear();
}

std::string Drive::trouble() {
  const uint32_t csts = status();
  if (csts == kAllOnes) return name() + " was removed: its registers read as ones";
  if ((csts & kFatal) != 0) return name() + " has a fatal status (CSTS.CFS)";
  if ((csts & kReady) == 0) return name() + " was reset by someone else (CSTS.RDY is 0)";
  return "";
}

void Drive::watch() {
  while (!ending_) {
    const std::string told = function_->watch(kWatchMs);
    if (ending_ || !watched_) continue;
    const std::string why = told.empty() ? trouble() : name() + ": " + told;
    // Whether the look was before a reset began: then it says nothing.
    if (why.empty() || !watched_) continue;
    lose(why);
    watched_ = false;
    if (told.empty()) continue;
    // The system waits until the device is given back.
    registers_->detach();
    function_->close();
    return;
  }
}

void Drive::reset(bool function) {
  if (in_forked_child()) throw DriveError(Kind::kLost, "the drive belongs to the parent process");
  watched_ = false;
  lose(name() + " was reset");
  const std::scoped_lock guard(io_lock_, admin_lock_);
  {
    const std::lock_guard state(state_lock_);
    if (closed_) throw DriveError(Kind::kLost, name() + " is closed");
  }
  if (function) function_->reset();
  {
    const std::lock_guard state(state_lock_);
    why_lost_.clear();
    lost_ = false;
  }
  try {
    bring_up();
  } catch (const DriveError& error) {
    quiet();
    lose(error.what());
    throw;
  }
  watched_ = true;
}

// What the controller still does must not meet memory that is about to be unmapped, nor blocks that
// become another's.
void Drive::quiet() noexcept {
  registers_->write(kConfiguration, 0);
  try {
    function_->set_bus_master(false);
  } catch (const DriveError&) {
    // It is gone, or the end of its file unmaps its memory.
  }
}

void Drive::shut_down() {
  const uint32_t cc = registers_->read(kConfiguration);
  if (cc == kAllOnes || (status() & (kReady | kFatal)) != kReady) return;
  registers_->write(kConfiguration, (cc & ~kShutdownMask) | kShutdownNormal);
  const int64_t said_ms = identity_.shutdown_limit_us / 1000;
  const int64_t end = monotonic_ns() + std::max(said_ms, kShutdownLimitMs) * 1'000'000;
  while (monotonic_ns() < end) {
    const uint32_t csts = status();
    if (csts == kAllOnes || (csts & kShutdownStatusMask) == kShutdownComplete) break;
    nap(200'000);
  }
}

void Drive::close() noexcept {
  if (in_forked_child()) return;
  lose(name() + " was closed");
  watched_ = false;
  ending_ = true;
  function_->interrupt();
  if (watcher_.joinable()) watcher_.join();
  const std::scoped_lock guard(io_lock_, admin_lock_);
  {
    const std::lock_guard state(state_lock_);
    if (closed_) return;
    closed_ = true;
  }
  shut_down();
  quiet();
  registers_->detach();
  function_->close();
}

}  // namespace fw::native::vfio
