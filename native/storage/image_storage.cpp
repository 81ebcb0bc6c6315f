// Translation and allocation; see image_storage.h.
#include "storage/image_storage.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "storage/file_io.h"

namespace fw::native {
namespace {

// A sync takes its tables in much less.
constexpr std::chrono::minutes kPauseLimit{5};
constexpr size_t kZeroBytes = 256 << 10;
constexpr uint32_t kWordBits = 64;

int write_zeros(int fd, uint64_t offset, uint64_t n) {
  static const std::vector<std::byte> zeros(kZeroBytes);
  while (n != 0) {
    const size_t step = std::min<uint64_t>(n, zeros.size());
    if (const int error = write_fully(fd, zeros.data(), step, offset)) return error;
    offset += step;
    n -= step;
  }
  return 0;
}

[[noreturn]] void refuse(uint64_t table, const std::string& why) {
  throw std::invalid_argument("table " + std::to_string(table) + " of the block map " + why);
}

}  // namespace

// A write under way, or why it must not begin.
class ImageStorage::Turn {
 public:
  explicit Turn(ImageStorage& storage) : storage_(storage) {
    if (storage.in_forked_child()) {
      error_ = kForked;
      return;
    }
    std::unique_lock guard(storage.turns_);
    if (!storage.turn_ends_.wait_for(guard, kPauseLimit, [&] { return !storage.paused_; })) {
      error_ = ETIMEDOUT;
      return;
    }
    if (storage.sync_ == nullptr) {
      error_ = ECANCELED;
      return;
    }
    ++storage.writing_;
  }
  ~Turn() {
    if (error_ != 0) return;
    const std::lock_guard guard(storage_.turns_);
    if (--storage_.writing_ == 0) storage_.turn_ends_.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  int error() const { return error_; }

 private:
  ImageStorage& storage_;
  int error_ = 0;
};

ImageStorage::ImageStorage(std::shared_ptr<Storage> file, int fd, const ImageLayout& layout,
                           uint64_t nbytes, bool writable, std::string path,
                           std::unique_ptr<ImageMarks> marks, Sync sync)
    : Storage(nbytes, writable),
      file_(std::move(file)),
      fd_(fd),
      layout_(layout),
      path_(std::move(path)),
      marks_(std::move(marks)),
      sync_(std::make_shared<const Sync>(std::move(sync))) {
  if (!std::has_single_bit(layout.block_bytes)) {
    throw std::invalid_argument("blocks are powers of two");
  }
  if (file_ != nullptr && file_->nbytes() != nbytes) {
    throw std::invalid_argument("the file has another size than the image");
  }
  struct stat status;
  if (fstat(fd, &status) != 0) throw OpenError(errno, error_text(errno), path_);
  file_end_ = uint64_t(status.st_size);
}

int ImageStorage::fail(int error, uint64_t offset, uint64_t n, IoFailure* failure) const {
  if (error != 0 && failure != nullptr) *failure = {path_, offset, n};
  return error;
}

// Slots.

bool ImageStorage::is_used(uint64_t slot) const {
  const uint64_t word = slot / kWordBits;
  return word < used_.size() && (used_[word] >> slot % kWordBits & 1) != 0;
}

void ImageStorage::set_used(uint64_t slot) {
  const uint64_t word = slot / kWordBits;
  if (word >= used_.size()) used_.resize(word + 1);
  used_[word] |= uint64_t(1) << slot % kWordBits;
}

// Takes `count` consecutive free slots, which are zeros then.
int ImageStorage::take(uint32_t count, uint64_t& slot) {
  while (search_from_ < layout_.slots && is_used(search_from_)) ++search_from_;
  slot = search_from_;
  for (uint32_t found = 0; found != count;) {
    if (slot + count > layout_.slots) return ENOSPC;
    if (is_used(slot + found)) {
      slot += found + 1;
      found = 0;
    } else {
      ++found;
    }
  }
  const uint64_t begin = place({slot, 0, 0, 0});
  const uint64_t end = begin + count * layout_.block_bytes;
  if (begin < file_end_) {
    const uint64_t left = std::min(end, file_end_) - begin;
    if (const int error = write_zeros(fd_, begin, left)) return error;
  }
  if (end > file_end_) {
    if (ftruncate(fd_, off_t(end)) != 0) return errno;
    file_end_ = end;
  }
  for (uint32_t i = 0; i != count; ++i) set_used(slot + i);
  return 0;
}

uint64_t ImageStorage::slot_of(uint64_t block) const {
  const auto found = tables_.find(block / kTableBlocks);
  if (found == tables_.end()) return kNoSlot;
  return found->second.entries[block % kTableBlocks] - 1;
}

int ImageStorage::make_block(uint64_t block) {
  Table& table = tables_[block / kTableBlocks];
  if (table.entries.empty()) table.entries.resize(kTableBlocks);
  if (table.slot == kNoSlot) {
    if (const int error = take(layout_.table_slots, table.slot)) {
      table.slot = kNoSlot;
      return error;
    }
    table.changed = true;
  }
  uint64_t& entry = table.entries[block % kTableBlocks];
  if (entry != 0) return 0;
  uint64_t slot;
  if (const int error = take(1, slot)) return error;
  entry = slot + 1;
  table.changed = true;
  return 0;
}

// Gives all blocks of a range their slots.
int ImageStorage::make_blocks(uint64_t offset, uint64_t n) {
  const uint64_t first = offset / layout_.block_bytes;
  const uint64_t end = (offset + n - 1) / layout_.block_bytes + 1;
  {
    const std::shared_lock guard(map_);
    uint64_t block = first;
    while (block != end && slot_of(block) != kNoSlot) ++block;
    if (block == end) return 0;
  }
  const std::unique_lock guard(map_);
  for (uint64_t block = first; block != end; ++block) {
    if (const int error = make_block(block)) return error;
  }
  return 0;
}

template <typename Act>
int ImageStorage::for_each_part(uint64_t offset, uint64_t n, Act act) const {
  for (uint64_t done = 0; done != n;) {
    const uint64_t at = offset + done;
    uint64_t block = at / layout_.block_bytes;
    const uint64_t inside = at % layout_.block_bytes;
    Part part = {slot_of(block), inside, std::min(n - done, layout_.block_bytes - inside), done};
    while (part.nbytes != n - done) {
      const uint64_t next = slot_of(++block);
      const uint64_t wanted =
          part.slot == kNoSlot ? kNoSlot : part.slot + (inside + part.nbytes) / layout_.block_bytes;
      if (next != wanted) break;
      part.nbytes += std::min(n - done - part.nbytes, layout_.block_bytes);
    }
    if (const int error = act(part)) return error;
    done += part.nbytes;
  }
  return 0;
}

// Transfers.

int ImageStorage::read(uint64_t offset, void* data, size_t n, IoFailure* failure) {
  if (const int error = check_range(offset, n)) return fail(error, offset, n, failure);
  if (file_ != nullptr) return file_->read(offset, data, n, failure);
  auto* to = static_cast<std::byte*>(data);
  const std::shared_lock guard(map_);
  const int error = for_each_part(offset, n, [&](const Part& part) {
    if (part.slot != kNoSlot) return read_fully(fd_, to + part.done, part.nbytes, place(part));
    std::memset(to + part.done, 0, part.nbytes);
    return 0;
  });
  return fail(error, offset, n, failure);
}

bool ImageStorage::resolve(const Request& request, PieceList& pieces) {
  if (request.is_write) return false;
  if (file_ != nullptr) return file_->resolve(request, pieces);
  const std::shared_lock guard(map_);
  return for_each_part(request.offset, request.nbytes, [&](const Part& part) {
           if (part.slot == kNoSlot) return 1;
           Piece piece;
           piece.fd = piece.buffered_fd = fd_;
           piece.nbytes = uint32_t(part.nbytes);
           piece.request_offset = request.request_offset + uint32_t(part.done);
           piece.file_offset = place(part);
           piece.path = &path_;
           return pieces.add(piece) ? 0 : 1;
         }) == 0;
}

int ImageStorage::write(uint64_t offset, const void* data, size_t n, IoFailure* failure) {
  return store(offset, static_cast<const std::byte*>(data), n, failure);
}

int ImageStorage::store(uint64_t offset, const std::byte* data, uint64_t n, IoFailure* failure) {
  const int error = store_in_slots(offset, data, n, failure);
  const auto has_freed = [&] {
    const std::shared_lock guard(map_);
    return !freed_.empty();
  };
  // The slots of discarded blocks can be taken after a sync, which must not name them any more. It
  // runs Python, but only an image that is full comes here.
  if (error != ENOSPC || !has_freed()) return error;
  if (const int failed = flush(failure)) return failed;
  return store_in_slots(offset, data, n, failure);
}

int ImageStorage::store_in_slots(uint64_t offset, const std::byte* data, uint64_t n,
                                 IoFailure* failure) {
  if (const int error = check_write(offset, n)) return fail(error, offset, n, failure);
  if (n == 0) return 0;
  const Turn turn(*this);
  if (turn.error() != 0) return fail(turn.error(), offset, n, failure);
  if (const int error = marks_->make(offset, n)) return fail(error, offset, n, failure);
  if (file_ != nullptr) return file_->write(offset, data, n, failure);
  if (const int error = make_blocks(offset, n)) return fail(error, offset, n, failure);
  const std::shared_lock guard(map_);
  const int error = for_each_part(offset, n, [&](const Part& part) {
    // A block that a discard has freed meanwhile.
    if (part.slot == kNoSlot) return 0;
    return write_fully(fd_, data + part.done, part.nbytes, place(part));
  });
  return fail(error, offset, n, failure);
}

int ImageStorage::write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) {
  return discard(offset, n, failure);
}

int ImageStorage::discard(uint64_t offset, uint64_t n, IoFailure* failure) {
  if (const int error = check_write(offset, n)) return fail(error, offset, n, failure);
  if (n == 0) return 0;
  const Turn turn(*this);
  if (turn.error() != 0) return fail(turn.error(), offset, n, failure);
  if (const int error = marks_->make(offset, n)) return fail(error, offset, n, failure);
  if (file_ != nullptr) return file_->write_zeroes(offset, n, failure);
  const std::unique_lock guard(map_);
  const int error = for_each_part(offset, n, [&](const Part& part) {
    if (part.slot == kNoSlot) return 0;
    for (uint64_t done = 0; done != part.nbytes;) {
      const uint64_t at = offset + part.done + done;
      const uint64_t inside = at % layout_.block_bytes;
      const uint64_t step = std::min(part.nbytes - done, layout_.block_bytes - inside);
      const uint64_t block = at / layout_.block_bytes;
      Table& table = tables_.find(block / kTableBlocks)->second;
      uint64_t& entry = table.entries[block % kTableBlocks];
      if (step == layout_.block_bytes) {
        freed_.push_back(entry - 1);
        entry = 0;
        table.changed = true;
      } else if (const int failed = write_zeros(fd_, place({entry - 1, inside, 0, 0}), step)) {
        return failed;
      }
      done += step;
    }
    return 0;
  });
  return fail(error, offset, n, failure);
}

int ImageStorage::flush(IoFailure* failure) {
  if (in_forked_child()) return fail(kForked, 0, nbytes(), failure);
  if (!writable()) return 0;
  std::shared_ptr<const Sync> sync;
  {
    const std::lock_guard guard(turns_);
    sync = sync_;
  }
  return fail(sync == nullptr ? ECANCELED : (*sync)(), 0, nbytes(), failure);
}

void ImageStorage::collect_files(std::vector<int>& files) const {
  if (file_ != nullptr) return file_->collect_files(files);
  files.push_back(fd_);
}

Description ImageStorage::describe() const {
  Description description;
  description.add("kind", std::string("GVDK image"));
  description.add("path", path_);
  description.add("type", std::string(file_ != nullptr ? "fixed" : "sparse"));
  description.add("nbytes", nbytes());
  description.add("block", layout_.block_bytes);
  description.add("writable", writable());
  if (file_ != nullptr) description.children.push_back(file_->describe());
  return description;
}

// The owner's calls.

void ImageStorage::load_table(uint64_t index, uint64_t slot, std::vector<uint64_t> entries) {
  const std::unique_lock guard(map_);
  if (entries.size() != kTableBlocks) refuse(index, "has another number of entries");
  if (tables_.contains(index)) refuse(index, "is there twice");
  const auto claim = [&](uint64_t taken) {
    if (taken >= layout_.slots) {
      refuse(index, "names slot " + std::to_string(taken) + " of " + std::to_string(layout_.slots));
    }
    if (place({taken + 1, 0, 0, 0}) > file_end_) {
      refuse(index, "names slot " + std::to_string(taken) +
                        ", behind the end of the file: it was cut short");
    }
    if (is_used(taken)) refuse(index, "names slot " + std::to_string(taken) + ", which is in use");
    set_used(taken);
  };
  if (slot > layout_.slots) refuse(index, "lies outside of the file");
  for (uint32_t i = 0; i != layout_.table_slots; ++i) claim(slot + i);
  for (const uint64_t entry : entries) {
    if (entry != 0) claim(entry - 1);
  }
  tables_.emplace(index, Table{slot, std::move(entries), false});
}

std::vector<uint64_t> ImageStorage::used() const {
  const std::shared_lock guard(map_);
  std::vector<uint64_t> words = used_;
  while (!words.empty() && words.back() == 0) words.pop_back();
  return words;
}

int ImageStorage::begin_sync(uint64_t generation, uint32_t limit_ms, Snapshot& snapshot) {
  if (in_forked_child()) return kForked;
  std::unique_lock guard(turns_);
  paused_ = true;
  const bool alone = turn_ends_.wait_for(guard, std::chrono::milliseconds(limit_ms),
                                         [&] { return writing_ == 0; });
  if (alone) {
    const std::unique_lock tables(map_);
    take_back();  // of a sync that never ended
    for (auto& [index, table] : tables_) {
      if (!table.changed || table.slot == kNoSlot) continue;
      table.changed = false;
      syncing_tables_.push_back(index);
      snapshot.tables.emplace_back(index, table);
    }
    syncing_freed_.swap(freed_);
    snapshot.used = used_;
    // Nothing names them any more in these tables.
    for (const uint64_t slot : syncing_freed_) {
      snapshot.used[slot / kWordBits] &= ~(uint64_t(1) << slot % kWordBits);
    }
    while (!snapshot.used.empty() && snapshot.used.back() == 0) snapshot.used.pop_back();
    marks_->begin(generation);
  }
  paused_ = false;
  turn_ends_.notify_all();
  return alone ? 0 : ETIMEDOUT;
}

// Returns the tables and freed slots of a failed sync to the next one. The caller holds map_.
void ImageStorage::take_back() {
  for (const uint64_t index : syncing_tables_) tables_[index].changed = true;
  freed_.insert(freed_.end(), syncing_freed_.begin(), syncing_freed_.end());
  syncing_tables_.clear();
  syncing_freed_.clear();
}

void ImageStorage::end_sync(bool synced) {
  const std::unique_lock guard(map_);
  if (!synced) return take_back();
  for (const uint64_t slot : syncing_freed_) {
    used_[slot / kWordBits] &= ~(uint64_t(1) << slot % kWordBits);
    search_from_ = std::min(search_from_, slot);
  }
  syncing_tables_.clear();
  syncing_freed_.clear();
  marks_->forget_older();
}

void ImageStorage::detach() {
  const std::lock_guard guard(turns_);
  sync_ = nullptr;
}

}  // namespace fw::native
