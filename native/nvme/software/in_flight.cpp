#include "nvme/software/in_flight.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "base/alignment.h"
#include "io/nvme_command.h"
#include "storage/file_io.h"

namespace fw::native {
namespace {

// Scratch areas start at a page, which satisfies direct I/O alignments up to this.
constexpr uint64_t kScratchAlignment = 4096;

// How long `drain` waits before and after it cancels what is in flight.
constexpr int64_t kDrainNs = 2'000'000'000;
constexpr int64_t kCancelNs = 3'000'000'000;

// How long commands that the kernel cancels are sent again.
constexpr int64_t kResubmitNs = 10'000'000'000;

// How long a blocking write waits for the transfers of its own queue.
constexpr int64_t kOwnWritesNs = 60'000'000'000;

// The bits of an operation's token that have the piece's index.
constexpr uint32_t kPieceBits = 8;
static_assert(PieceList::kCountMax <= 1u << kPieceBits);
uint32_t index_of(uint64_t token) { return token & ((1u << kPieceBits) - 1); }

}  // namespace

// How far a piece is that holds blocks.
enum class Stage : uint8_t { kNone, kWaiting, kReading, kWriting };

struct InFlight::Command {
  nvme::command entry;
  ByteRange range;
  uint32_t index = 0;
  uint32_t turn = 0;
  int64_t due_ns = 0;  // when the modelled drive completes it
  uint32_t attempt = 0;
  uint32_t remaining = 0;  // pieces without a result
  int error = 0;
  int64_t resubmit_until_ns = 0;
  bool is_write = false;
  bool is_flush = false;
  bool durable = false;
  bool cancelled = false;
  std::byte* memory = nullptr;  // null: through scratch
  IoFailure failure;
  PieceList pieces;
  uint64_t scratch_offset[PieceList::kCountMax];
  uint32_t lead[PieceList::kCountMax] = {};      // bytes that widening put before the piece
  uint32_t io_bytes[PieceList::kCountMax] = {};  // bytes that are transferred, widening included
  Stage stage[PieceList::kCountMax] = {};
};

InFlight::InFlight(const ControllerContext& context, uint32_t depth,
                   std::unique_ptr<IoEngine> engine, CommandMemory& memory,
                   Completions& completions, QueueCounters& counters, std::atomic<uint32_t>& count)
    : storage_(*context.storage),
      memory_(memory),
      completions_(completions),
      counters_(counters),
      count_(count),
      engine_(std::move(engine)) {
  const uint32_t commands = depth - 1;
  contexts_ =
      std::make_unique_for_overwrite<std::byte[]>(commands * sizeof(Command) + alignof(Command));
  for (uint32_t i = commands; i-- > 0;) free_contexts_.push_back(i);
  // Room for the transfer, and for the pages that widening and alignment add to each piece.
  scratch_stride_ = round_up(context.max_transfer_bytes, kScratchAlignment) +
                    2 * kScratchAlignment * PieceList::kCountMax;
  scratch_nbytes_ = scratch_stride_ * commands;
  void* scratch = mmap(nullptr, scratch_nbytes_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  // Without address space for it, commands that need scratch take the blocking path.
  scratch_ = scratch == MAP_FAILED ? nullptr : static_cast<std::byte*>(scratch);
}

InFlight::~InFlight() {
  // The engine ends first, because the operating system may still write into scratch.
  engine_.reset();
  if (scratch_ != nullptr) munmap(scratch_, scratch_nbytes_);
}

InFlight::Command& InFlight::context_of(uint32_t index) const {
  void* place = contexts_.get();
  size_t space = ~size_t(0);
  std::align(alignof(Command), sizeof(Command), place, space);
  return static_cast<Command*>(place)[index];
}

InFlight::Command& InFlight::acquire(const nvme::command& entry, const ByteRange& range) {
  const uint32_t index = free_contexts_.back();
  free_contexts_.pop_back();
  auto* command = std::construct_at(&context_of(index));
  command->entry = entry;
  command->range = range;
  command->index = index;
  command->turn = turn_++;
  command->due_ns = completions_.due_ns();
  count_.store(count() + 1, std::memory_order_relaxed);
  return *command;
}

void InFlight::release(Command& command) {
  const uint32_t index = command.index;
  std::destroy_at(&command);
  free_contexts_.push_back(index);
  count_.store(count() - 1, std::memory_order_relaxed);
}

void InFlight::start(const nvme::command& entry, const ByteRange& range, bool is_write,
                     bool durable) {
  Command& command = acquire(entry, range);
  command.is_write = is_write;
  command.durable = durable;
  if (prepare(command)) {
    submit(command);
  } else {
    run_blocking(command);
  }
}

void InFlight::start_flush(const nvme::command& entry) {
  Command& command = acquire(entry, ByteRange{});
  command.is_flush = true;
  command.is_write = true;
  if (!storage_.resolve_flush(command.pieces)) {
    run_blocking(command);
  } else if (command.pieces.size() == 0) {
    command_done(command);
  } else {
    submit(command);
  }
}

// Finds the pieces of a transfer and their memory. Returns false if blocking calls have to move it.
bool InFlight::prepare(Command& command) {
  Request request;
  request.offset = command.range.offset;
  request.nbytes = command.range.take;
  request.is_write = command.is_write;
  request.turn = command.turn;
  request.attempt = command.attempt;
  command.pieces.clear();
  if (!storage_.resolve(request, command.pieces)) return false;

  command.memory = memory_.contiguous();
  for (uint32_t i = 0; i < command.pieces.size(); ++i) {
    const Piece& piece = command.pieces[i];
    const uint64_t address = reinterpret_cast<uint64_t>(command.memory) + piece.request_offset;
    const uint64_t bits = address | piece.file_offset | piece.nbytes;
    if (!is_aligned(bits, piece.alignment) || piece.block_bytes != 0) command.memory = nullptr;
    command.lead[i] = 0;
    command.io_bytes[i] = piece.nbytes;
  }
  return command.memory != nullptr || lay_out_scratch(command);
}

bool InFlight::lay_out_scratch(Command& command) {
  if (scratch_ == nullptr) return false;
  uint64_t position = 0;
  for (uint32_t i = 0; i < command.pieces.size(); ++i) {
    const Piece& piece = command.pieces[i];
    command.scratch_offset[i] = position;
    // A part of a block is kept behind the room for its block.
    const uint32_t kept = piece.block_bytes == 0 ? 0 : piece.nbytes;
    const uint32_t unit = std::max(piece.block_bytes, command.is_write ? 1 : piece.alignment);
    command.lead[i] = uint32_t(piece.file_offset & (unit - 1));
    command.io_bytes[i] = uint32_t(round_up(command.lead[i] + piece.nbytes, unit));
    position = round_up(position + command.io_bytes[i] + kept, kScratchAlignment);
    if (position > scratch_stride_ || std::max(piece.alignment, unit) > kScratchAlignment) {
      return false;
    }
  }
  if (!command.is_write) return true;
  for (uint32_t i = 0; i < command.pieces.size(); ++i) {
    const Piece& piece = command.pieces[i];
    std::byte* const whole = memory_of(command, i);
    std::byte* const part = whole - command.lead[i] + command.io_bytes[i];
    memory_.copy_from(piece.request_offset, piece.block_bytes == 0 ? whole : part, piece.nbytes);
  }
  return true;
}

// Changes the block that was read by the part of it that was kept.
void InFlight::merge(Command& command, uint32_t index) const {
  std::byte* const whole = memory_of(command, index);
  std::memcpy(whole, whole - command.lead[index] + command.io_bytes[index],
              command.pieces[index].nbytes);
}

// The address of a piece's data, after the bytes that widening put before it.
std::byte* InFlight::memory_of(Command& command, uint32_t index) const {
  if (command.memory != nullptr) return command.memory + command.pieces[index].request_offset;
  return scratch_ + command.index * scratch_stride_ + command.scratch_offset[index] +
         command.lead[index];
}

void InFlight::submit(Command& command) {
  // One more than the pieces, so that the command does not end before all are submitted: pieces in
  // host memory are done at once.
  const uint32_t count = command.pieces.size();
  command.remaining = count + 1;
  for (uint32_t i = 0; i < count; ++i) submit_piece(command, i);
  if (--command.remaining == 0) command_done(command);
}

// Takes the blocks that a piece writes. If it cannot have them now, it waits among others.
bool InFlight::hold(Command& command, uint32_t index) {
  Piece& piece = command.pieces[index];
  Stage& stage = command.stage[index];
  if (piece.claim.blocks == nullptr || stage > Stage::kWaiting) return true;
  if (!piece.claim.take()) {
    stage = Stage::kWaiting;
    waiting_.push_back(uint64_t(command.index) << kPieceBits | index);
    return false;
  }
  stage = piece.block_bytes != 0 ? Stage::kReading : Stage::kWriting;
  ++holding_;
  return true;
}

void InFlight::submit_waiting() {
  std::vector<uint64_t> tokens;
  tokens.swap(waiting_);
  for (const uint64_t token : tokens) {
    if (engine_->free_slots() == 0) {
      waiting_.push_back(token);
    } else {
      submit_piece(context_of(uint32_t(token >> kPieceBits)), index_of(token));
    }
  }
}

void InFlight::submit_piece(Command& command, uint32_t index) {
  Piece& piece = command.pieces[index];
  if (!hold(command, index)) return;
  if (piece.fd < 0 || engine_->free_slots() == 0) {
    // Host memory; or a retry, when the engine is full.
    const int error = finish_piece(command, index, 0);
    return piece_done(command, index, error == 0 ? int32_t(command.io_bytes[index]) : -error);
  }
  IoOperation operation;
  const bool reads = !command.is_write || command.stage[index] == Stage::kReading;
  operation.kind = command.is_flush ? IoOperation::Kind::kSync
                   : reads          ? IoOperation::Kind::kRead
                                    : IoOperation::Kind::kWrite;
  // The last bytes of a file leave the page cache clean for the writes beside them.
  operation.durable = !reads && (command.durable || piece.claim.kind == BlockClaim::Kind::kTail);
  operation.fd = piece.fd;
  operation.nvme = piece.nvme;
  operation.token = uint64_t(command.index) << kPieceBits | index;
  if (!command.is_flush) {
    operation.nbytes = command.io_bytes[index];
    operation.offset = piece.file_offset - command.lead[index];
    operation.memory = memory_of(command, index) - command.lead[index];
  }
  counters_.engine_operations.add(1);
  engine_->submit(operation);
}

void InFlight::kick() {
  const uint64_t before = engine_->kernel_enters();
  engine_->kick();
  counters_.kernel_enters.add(engine_->kernel_enters() - before);
}

uint32_t InFlight::reap() {
  const uint32_t moved = reap_results();
  if (!waiting_.empty()) submit_waiting();
  return moved;
}

uint32_t InFlight::reap_results() {
  IoResult results[kReapMax];
  uint32_t moved = 0;
  while (const uint32_t count = engine_->reap(results, kReapMax)) {
    for (uint32_t i = 0; i < count; ++i) {
      Command& command = context_of(uint32_t(results[i].token >> kPieceBits));
      piece_done(command, index_of(results[i].token), results[i].result);
      if (command.remaining == 0) moved += command_done(command);
    }
  }
  return moved;
}

void InFlight::piece_done(Command& command, uint32_t index, int32_t result) {
  --command.remaining;
  Piece& piece = command.pieces[index];
  int error = result < 0 ? -result : 0;
  const bool is_read = command.stage[index] == Stage::kReading;
  if (is_read && result == int32_t(command.io_bytes[index])) {
    merge(command, index);
    command.stage[index] = Stage::kWriting;
    ++command.remaining;
    return submit_piece(command, index);
  }
  const uint32_t lead = command.is_write ? 0 : command.lead[index];
  const uint32_t wanted = command.is_write ? command.io_bytes[index] : lead + piece.nbytes;
  if (piece.nvme != nullptr && is_cancelled(error) && may_resubmit(command)) {
    ++command.remaining;
    return submit_piece(command, index);
  }
  if (error == ECANCELED && draining_) {
    command.cancelled = true;
  } else if (error == EAGAIN || error == EINTR || error == ECANCELED || error == EFAULT ||
             (error == EOPNOTSUPP && piece.nvme != nullptr)) {
    // The operating system gave the piece up without an error of the file. A thread that ends takes
    // the work that it submitted with it (ECANCELED), or its address space (EFAULT, from a read of
    // the page cache). A kernel may have NVMe commands by ioctl only (EOPNOTSUPP). So this thread
    // moves the piece itself. Bad memory fails again.
    counters_.engine_fallbacks.add(1);
    error = finish_piece(command, index, 0);
  } else if (error == 0 && uint32_t(result) < wanted) {
    error = finish_piece(command, index, uint32_t(result) > lead ? uint32_t(result) - lead : 0);
  }
  if (command.stage[index] > Stage::kWaiting) {
    piece.claim.release();
    --holding_;
  }
  if (error == 0 || command.error != 0) return;
  if (piece.block_device) error = error_of_block_device(error);
  command.error = error;
  command.failure = {*piece.path, piece.file_offset, piece.nbytes};
}

// Whether a command that the kernel cancelled, to reset the controller, is sent again. By the
// engine: a blocking call would wait for the end of the reset, and this thread has others to take
// back.
bool InFlight::may_resubmit(Command& command) {
  const int64_t now = monotonic_ns();
  if (command.resubmit_until_ns == 0) command.resubmit_until_ns = now + kResubmitNs;
  return !draining_ && now < command.resubmit_until_ns;
}

// Moves the rest of a piece, from `done` on, by blocking calls: reads through the page cache, and
// writes as they were begun.
int InFlight::finish_piece(Command& command, uint32_t index, uint32_t done) {
  const Piece& piece = command.pieces[index];
  if (command.is_flush) return storage_.flush();
  std::byte* memory = memory_of(command, index) + done;
  const uint32_t nbytes = piece.nbytes - done;
  if (piece.memory != nullptr) {
    atomic::copy_plain(command.is_write ? piece.memory + done : memory,
                       command.is_write ? memory : piece.memory + done, nbytes);
    return 0;
  }
  if (piece.nvme != nullptr) {
    const uint32_t lead = command.lead[index];
    return run_nvme(*piece.nvme,
                    nvme_transfer(*piece.nvme, command.is_write, piece.file_offset - lead,
                                  memory - lead, command.io_bytes[index], command.durable));
  }
  if (!command.is_write) {
    return read_fully(piece.buffered_fd, memory, nbytes, piece.file_offset + done);
  }
  const uint32_t lead = command.lead[index];
  const uint64_t offset = piece.file_offset - lead;
  std::byte* const whole = memory_of(command, index) - lead;
  if (command.stage[index] == Stage::kReading) {
    if (int error = read_fully(piece.fd, whole, command.io_bytes[index], offset)) return error;
    merge(command, index);
  }
  const uint64_t begun = round_down(done, std::max(piece.alignment, piece.block_bytes));
  const int error =
      write_fully(piece.fd, whole + begun, command.io_bytes[index] - begun, offset + begun);
  if (error != 0) return error;
  const bool durable = command.durable || piece.claim.kind == BlockClaim::Kind::kTail;
  return durable && fdatasync(piece.buffered_fd) != 0 ? errno : 0;
}

// Returns true if the command is completed, false if it continues on another replica.
bool InFlight::command_done(Command& command) {
  if (command.error != 0 && retry_on_replica(command)) return false;
  if (command.error == 0 && !command.is_write) deliver(command);
  finish(command);
  return true;
}

void InFlight::finish(Command& command) {
  const int error = command.cancelled ? ECANCELED : command.error;
  completions_.set_due_ns(command.due_ns);
  completions_.finish_io(command.entry, command.range, command.is_write, error, command.failure);
  release(command);
}

bool InFlight::retry_on_replica(Command& command) {
  const bool exhausted = command.attempt + 1 >= storage_.replica_count();
  if (command.is_write || command.cancelled || exhausted) return false;
  completions_.record(command.entry, nvme::kSuccess, command.error, command.failure,
                      std::strerror(command.error), true);
  ++command.attempt;
  command.error = 0;
  // Find the memory again. The PRP entries were valid when the command was fetched.
  if (memory_.walk(command.entry, command.range.total) != nvme::kSuccess || !prepare(command)) {
    command.error = EIO;
    return false;
  }
  submit(command);
  return true;
}

// Runs a command that pieces cannot describe, by the storage's blocking calls.
void InFlight::run_blocking(Command& command) {
  if (command.is_flush) {
    command.error = storage_.flush(&command.failure);
  } else if (command.is_write) {
    end_own_writes(command);
    if (command.error == 0) {
      command.error = memory_.write(command.range, command.durable, command.failure);
    }
  } else {
    command.error = memory_.read(command.range, true, command.failure);
  }
  finish(command);
}

// A blocking call waits for blocks, so no transfer of this queue may hold them, or come first.
void InFlight::end_own_writes(Command& command) {
  if (holding_ == 0 && waiting_.empty()) return;
  for (const uint64_t token : waiting_) {
    Command& other = context_of(uint32_t(token >> kPieceBits));
    other.pieces[index_of(token)].claim.withdraw();
  }
  const int64_t end = monotonic_ns() + kOwnWritesNs;
  while (holding_ != 0 && monotonic_ns() < end) {
    kick();
    if (reap_results() == 0) std::this_thread::yield();
  }
  if (holding_ != 0) command.error = ETIMEDOUT;
  // What was reaped has used the memory of its own command.
  if (memory_.walk(command.entry, command.range.total) != nvme::kSuccess) command.error = EFAULT;
}

// Copies a finished read from scratch to the command's memory, and clears what is past the end.
void InFlight::deliver(Command& command) {
  const bool whole = command.range.take == command.range.total;
  if (command.memory != nullptr && whole) return;
  if (memory_.walk(command.entry, command.range.total) != nvme::kSuccess) {
    command.error = EFAULT;
    return;
  }
  if (command.memory == nullptr) {
    for (uint32_t i = 0; i < command.pieces.size(); ++i) {
      const Piece& piece = command.pieces[i];
      memory_.copy_to(piece.request_offset, memory_of(command, i), piece.nbytes);
    }
  }
  memory_.zero_tail(command.range);
}

// Ends pieces that wait for blocks.
void InFlight::end_waiting() {
  std::vector<uint64_t> tokens;
  tokens.swap(waiting_);
  for (const uint64_t token : tokens) {
    Command& command = context_of(uint32_t(token >> kPieceBits));
    command.pieces[index_of(token)].claim.withdraw();
    piece_done(command, index_of(token), -ECANCELED);
    if (command.remaining == 0) command_done(command);
  }
}

void InFlight::drain() {
  draining_ = true;
  kick();
  const int64_t start = monotonic_ns();
  bool asked = false;
  while (count() != 0) {
    if (reap() != 0) continue;
    kick();
    const int64_t waited = monotonic_ns() - start;
    if (waited > kDrainNs && !asked) {
      engine_->cancel_all();
      end_waiting();
      asked = true;
    }
    if (waited > kDrainNs + kCancelNs) break;
    std::this_thread::yield();
  }
  draining_ = false;
}

}  // namespace fw::native
