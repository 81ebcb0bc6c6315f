// The data of an image (docs/files.md): blocks in slots of a file, and which ranges were written.
//
// It translates, allocates and marks (image_marks.h); the image's owner reads and writes all
// tables. To sync, the owner calls `begin_sync`, which takes the tables at a moment when no write
// is under way: so they name all blocks that were written, and all later writes make marks that
// count under the next header, too. Writes go on while the owner makes tables and header durable.
// Then it calls `end_sync`.
//
// If the data is fixed, block n lies in slot n, and nothing is allocated. Otherwise a block without
// a slot reads as zeros, and gets a slot at its first write. A slot that was freed is taken again
// only after the next sync, because the tables on the disk still name it.
#pragma once

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

#include "storage/image_marks.h"
#include "storage/storage.h"

namespace fw::native {

struct ImageLayout {
  uint64_t data_begin;   // of slot 0 in the file
  uint64_t block_bytes;  // of a slot, and of a block: a power of two
  uint64_t slots;        // the most
  uint32_t table_slots;  // consecutive slots of one table
};

class ImageStorage final : public Storage {
 public:
  static constexpr uint64_t kTableBlocks = 500;  // blocks that one table names
  static constexpr uint64_t kNoSlot = ~uint64_t(0);

  // Makes all durable, which only the owner can: returns 0 or an errno value. It runs Python, so
  // no kernel should wait for it.
  using Sync = std::function<int()>;
  struct Table {
    uint64_t slot = kNoSlot;
    std::vector<uint64_t> entries;  // the slot plus one, or 0; kTableBlocks of them
    bool changed = false;           // since the last sync
  };
  // What a sync makes durable.
  struct Snapshot {
    std::vector<std::pair<uint64_t, Table>> tables;  // that have changed since the last sync
    std::vector<uint64_t> used;                      // see `used`
  };

  // `file` is the whole data of a fixed image, from slot 0 on; else null. `fd` stays the caller's,
  // as long as the storage is in use.
  ImageStorage(std::shared_ptr<Storage> file, int fd, const ImageLayout& layout, uint64_t nbytes,
               bool writable, std::string path, std::unique_ptr<ImageMarks> marks, Sync sync);

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

  // Copies the tables that have changed, while no write is under way; the header of `generation` is
  // to make them durable. Waits at most `limit_ms` for writes that have begun. Returns 0 or an
  // errno value. One sync at a time.
  int begin_sync(uint64_t generation, uint32_t limit_ms, Snapshot& snapshot);
  // `synced`: that header is durable, so older marks end, and slots that were freed before are
  // free. Otherwise the next sync takes all of it again.
  void end_sync(bool synced);

  ImageMarks& marks() { return *marks_; }

  // Drops the owner: writes and syncs fail from now on.
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
  int make_blocks(uint64_t offset, uint64_t n);
  int make_block(uint64_t block);
  int take(uint32_t count, uint64_t& slot);
  void take_back();
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
  std::vector<uint64_t> used_;           // guarded by map_
  uint64_t search_from_ = 0;             // no slot before it is free; guarded by map_
  uint64_t file_end_ = 0;                // of the file; the slots behind are zeros; guarded by map_
  std::vector<uint64_t> freed_;          // slots, since the last sync began; guarded by map_
  std::vector<uint64_t> syncing_freed_;  // slots, before the sync that is under way; by map_
  std::vector<uint64_t> syncing_tables_;  // that it takes; by map_

  const std::unique_ptr<ImageMarks> marks_;

  std::mutex turns_;
  std::condition_variable turn_ends_;
  std::shared_ptr<const Sync> sync_;  // guarded by turns_, as are the next; null: detached
  uint32_t writing_ = 0;
  bool paused_ = false;
};

}  // namespace fw::native
