// One NVMe controller that this process drives: reset, admin commands, I/O queues, its end.
//
// Made ready by the constructor. When the drive is lost (fatal status, removed, reset, closed),
// every wait ends with DriveError::kLost, and so do those of its queue pairs; `reset` makes it
// ready again for new ones. Any thread may call. In a forked child every call fails, and nothing is
// touched.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/fork_guard.h"
#include "flashwarp/nvme/command.cuh"
#include "io/nvme_identity.h"
#include "vfio/host_queue.h"
#include "vfio/registers.h"

namespace fw::native::vfio {

// Who uses queues of a drive and must hear of its loss.
class DriveUser {
 public:
  virtual ~DriveUser() = default;
  // The drive completes nothing any more. Called once at most, without locks of the user's.
  virtual void lose(const std::string& why) = 0;
};

// An I/O queue pair, as the drive is told of it.
struct QueuePairPlace {
  uint16_t id;
  uint32_t depth;
  uint64_t sq_iova, cq_iova;
};

class Drive {
 public:
  // `limit_ms` bounds each command of the host's own. Throws DriveError.
  Drive(std::shared_ptr<PciFunction> function, int64_t limit_ms);
  ~Drive();
  Drive(const Drive&) = delete;
  Drive& operator=(const Drive&) = delete;

  const std::shared_ptr<PciFunction>& function() const { return function_; }
  const Capabilities& capabilities() const { return capabilities_; }
  const DriveIdentity& identity() const { return identity_; }
  uint32_t queue_pairs_max() const { return queues_max_; }
  std::string name() const { return function_->name(); }
  bool in_forked_child() const { return fork_guard_.in_child(); }

  // Bytes that one command may move, by the drive and by the format of commands.
  uint64_t transfer_bytes_max(uint32_t lba_shift) const;

  std::vector<uint32_t> namespaces();
  NamespaceIdentity identify_namespace(uint32_t nsid);
  // The newest entries first.
  std::vector<ErrorLogEntry> error_log();
  // Asks for the end of a command; returns whether the drive aborted it.
  bool abort(uint16_t queue, uint16_t cid);

  // Runs an I/O command of the host's, on a queue pair of its own. Its data is the first `nbytes`
  // of `buffer`; 0: it has none. Returns its status.
  uint16_t io(nvme::command entry, uint64_t nbytes);
  // Held by callers around the use of `buffer` and `io`.
  std::recursive_mutex& io_lock() { return io_lock_; }
  std::byte* buffer() const { return buffer_->as<std::byte>(); }
  uint64_t buffer_bytes() const { return buffer_->region().nbytes(); }

  // Numbers of I/O queue pairs that nobody has; throws DriveError if they are too few.
  std::vector<uint16_t> take_ids(uint32_t count);
  void give_ids(const std::vector<uint16_t>& ids);

  // Creates CQ and SQ of each pair, in this order; if one fails, deletes the others.
  void create(const std::vector<QueuePairPlace>& pairs, DriveUser& user);
  // Deletes SQs and then CQs. By then the drive has aborted or completed every command; or it is
  // lost, and disabled.
  void remove(const std::vector<QueuePairPlace>& pairs, DriveUser& user) noexcept;

  // Why it completes nothing any more; empty while it does.
  std::string lost() const;

  // Ends all queue pairs, and makes the controller ready again: after a reset of the controller
  // alone, or of its PCI function.
  void reset(bool function);

  // Ends all queue pairs, notifies the controller of the shutdown, and gives it back. Twice is
  // once.
  void close() noexcept;

 private:
  void bring_up();
  void enable();
  void disable();
  void wait_ready(bool ready, const char* what);
  uint32_t status();
  void identify();
  void negotiate_queues();
  void make_io_queue();
  nvme::completion admin(nvme::command entry, const char* what);
  nvme::completion admin_locked(nvme::command entry, const char* what);
  void create_pair(const QueuePairPlace& pair);
  void delete_pair(const QueuePairPlace& pair, const char* what);
  void identify_page(uint32_t cns, uint32_t nsid, const char* what);
  DataPage page() const;
  void lose(const std::string& why);
  void throw_lost() const;
  void shut_down();
  void quiet() noexcept;
  void watch();
  std::string trouble();

  const std::shared_ptr<PciFunction> function_;
  const int64_t limit_ms_;
  ForkGuard fork_guard_;
  std::shared_ptr<Registers> registers_;
  Capabilities capabilities_;
  DriveIdentity identity_;
  uint32_t queues_max_ = 0;
  std::unique_ptr<DmaMemory> page_;  // data of admin commands
  std::unique_ptr<DmaMemory> buffer_;
  std::unique_ptr<DmaMemory> buffer_prps_;

  // Recursive: `reset` holds both while it sends commands. The order is I/O, admin, state.
  std::recursive_mutex admin_lock_;  // the admin queue, its page, the controller's state
  std::unique_ptr<HostQueue> admin_;
  std::recursive_mutex io_lock_;
  std::unique_ptr<HostQueue> io_;

  mutable std::mutex state_lock_;
  std::string why_lost_;
  std::set<DriveUser*> users_;
  std::set<uint16_t> ids_;  // taken
  bool closed_ = false;
  std::atomic<bool> lost_{false};
  // While the controller's state is changed on purpose, its registers say nothing.
  std::atomic<bool> watched_{false};
  std::atomic<bool> ending_{false};
  std::thread watcher_;
};

}  // namespace fw::native::vfio
