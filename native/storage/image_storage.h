// The data of an image (docs/files.md): blocks in slots of a file, and which ranges were written.
//
// It translates and allocates; the image's owner reads and writes all tables. A write first looks
// whether its ranges are marked as written since the last sync. If not, the owner must make the
// marks durable. To sync, the owner calls `pause`: then no write is under way and none begins. So
// the tables that it takes name all blocks that were written, and the marks of the next generation
// miss no write.
//
// If the data is fixed, block n lies in slot n, and nothing is allocated. Otherwise a block without
// a slot reads as zeros, and gets a slot at its first write. A slot that was freed is taken again
// only after the next sync, because the tables on the disk still name it.
#pragma once

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "storage/storage.h"

namespace fw::native {

struct ImageLayout {
  uint64_t data_begin;   // of slot 0 in the file
  uint64_t block_bytes;  // of a slot, and of a block: a power of two
  uint64_t range_bytes;  // that one mark stands for: a power of two
  uint64_t slots;        // the most
  uint32_t table_slots;  // consecutive slots of one table
};

class ImageStorage final : public Storage {
 public:
  static constexpr uint64_t kTableBlocks = 500;  // blocks that one table names
  static constexpr uint64_t kNoSlot = ~uint64_t(0);

  // What only the owner can do. Each returns 0 or an errno value. `mark` makes durable that ranges
  // [first, end) may have been written; one call at a time. `sync` makes all durable.
  struct Owner {
    std::function<int(uint64_t first, uint64_t end)> mark;
    std::function<int()> sync;
  };
  struct Table {
    uint64_t slot = kNoSlot;
    std::vector<uint64_t> entries;  // the slot plus one, or 0; kTableBlocks of them
    bool changed = false;
  };

  // `file` is the whole data of a fixed image, from slot 0 on; else null. `fd` stays the caller's,
  // as long as the storage is in use.
  ImageStorage(std::shared_ptr<Storage> file, int fd, const ImageLayout& layout, uint64_t nbytes,
               bool writable, std::string path, Owner owner);

  int read(uint64_t offset, void* data, size_t n, IoFailure* failure) override;
  int write(uint64_t offset, const void* data, size_t n, IoFailure* failure) override;
  // Of reads alone: marks may have to become durable before a write.
  bool resolve(const Request& request, PieceList& pieces) override;
  int flush(IoFailure* failure) override;
  // Frees whole blocks; zeros what remains.
  int discard(uint64_t offset, uint64_t n, IoFailure* failure) override;
  int write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) override;
  void collect_files(std::vector<int>& files) const override;
  Description describe() const override;

  // For the owner.

  // Adds a table that was read from the file, with its slots. Throws invalid_argument if a slot is
  // none or is in use.
  void load_table(uint64_t index, uint64_t slot, std::vector<uint64_t> entries);
  // The words of the bitmap of slots, as many as have a bit set.
  std::vector<uint64_t> used() const;

  // Waits until no write is under way, and lets none begin before `resume`.
  int pause(uint32_t limit_ms);
  // `synced`: the tables that were taken are durable, so all marks end and freed slots are free.
  void resume(bool synced);
  // While paused: the tables that have changed since the last sync.
  std::vector<std::pair<uint64_t, Table>> changed() const;

  // Drops the owner: marks and syncs fail from now on.
  void detach();

 private:
  class Turn;
  struct Part {
    uint64_t slot;
    uint64_t inside;  // offset in the slot
    uint64_t nbytes;
    uint64_t done;  // bytes before it
  };

  uint64_t slot_of(uint64_t block) const;  // under map_
  uint64_t place(const Part& part) const {
    return layout_.data_begin + part.slot * layout_.block_bytes + part.inside;
  }
  // Calls act(part) for runs of neighbouring slots, or of blocks without, until one fails.
  template <typename Act>
  int for_each_part(uint64_t offset, uint64_t n, Act act) const;
  int mark(uint64_t offset, uint64_t n);
  int make_blocks(uint64_t offset, uint64_t n);
  int make_block(uint64_t block);
  int take(uint32_t count, uint64_t& slot);
  bool is_used(uint64_t slot) const;
  void set_used(uint64_t slot);
  int store(uint64_t offset, const std::byte* data, uint64_t n, IoFailure* failure);
  int store_in_slots(uint64_t offset, const std::byte* data, uint64_t n, IoFailure* failure);
  int fail(int error, uint64_t offset, uint64_t n, IoFailure* failure) const;

  const std::shared_ptr<Storage> file_;
  const int fd_;
  const ImageLayout layout_;
  const std::string path_;

  mutable std::shared_mutex map_;  // the tables; shared while slots are read or written
  std::unordered_map<uint64_t, Table> tables_;
  std::vector<uint64_t> used_;   // guarded by map_
  uint64_t search_from_ = 0;     // no slot before it is free; guarded by map_
  uint64_t file_end_ = 0;        // of the file; the slots behind are zeros; guarded by map_
  std::vector<uint64_t> freed_;  // slots; guarded by map_

  std::mutex marking_;  // one call of `mark` at a time
  uint32_t marks_ = 0;  // calls of `mark` since the last sync, guarded by marking_
  std::vector<std::atomic<uint64_t>> marked_;

  std::mutex turns_;
  std::condition_variable turn_ends_;
  std::shared_ptr<const Owner> owner_;  // guarded by turns_, as is the next
  uint32_t writing_ = 0;
  bool paused_ = false;
};

}  // namespace fw::native
