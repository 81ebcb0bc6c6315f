// Files and block devices; see file_storage.h.
#include "storage/file_storage.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/alignment.h"
#include "storage/file_lock.h"
#include "storage/open_file.h"
#include "storage/page_cache_window.h"
#include "storage/read_census.h"

namespace fw::native {
namespace {

constexpr int64_t kRefreshNs = 1'000'000;

bool is_same_file(int one, int other) {
  struct stat first, second;
  return fstat(one, &first) == 0 && fstat(other, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

// Whether a system call is not available for this file, in this kernel or in this sandbox.
bool is_unavailable(int error) { return error == EOPNOTSUPP || error == ENOSYS || error == EPERM; }

// Reads from these file systems never wait, and some refuse RWF_NOWAIT.
bool is_memory_file_system(int fd) {
  constexpr long kTmpfsMagic = 0x01021994;
  constexpr long kRamfsMagic = 0x858458f6;
  struct statfs information;
  if (fstatfs(fd, &information) != 0) return false;
  return information.f_type == kTmpfsMagic || information.f_type == kRamfsMagic;
}

}  // namespace

// Descriptors and facts of a file that passed every check of `open`.
struct FileStorage::Opened {
  std::string path;
  int fd = -1;
  FileIo::Direct direct;
  uint64_t offset = 0;
  uint64_t nbytes = 0;
  uint64_t size = 0;
  struct stat information = {};
  bool block_device = false;
  bool memory_file_system = false;
  std::unique_ptr<FileLock> lock;
  const FileOptions& options;

  Opened(std::string file, const FileOptions& asked) : path(std::move(file)), options(asked) {}
  Opened(const Opened&) = delete;
  ~Opened() {
    lock.reset();
    if (fd >= 0) close(fd);
    if (direct.fd >= 0) close(direct.fd);
  }

  [[noreturn]] void refuse(int error, const std::string& why) const {
    throw OpenError(error, why, path);
  }

  void find_range() {
    if (fstat(fd, &information) != 0) refuse(errno, error_text(errno));
    if (options.lock) lock = FileLock::take(fd, information, options.writable, path);
    block_device = S_ISBLK(information.st_mode);
    memory_file_system = is_memory_file_system(fd);
    size = size_of(fd, information);
    offset = options.offset;
    if (offset > size) refuse(EINVAL, "the offset lies beyond the end of the file");
    nbytes = options.nbytes != 0 ? options.nbytes : size - offset;
    if (nbytes > size - offset) refuse(EINVAL, "the byte range ends beyond the end of the file");
  }

  void open_direct() {
    try {
      direct.fd = open_file(path, options.writable, O_DIRECT);
    } catch (const OpenError& error) {
      refuse(error.error, std::string("open with O_DIRECT: ") + error.what());
    }
    if (!is_same_file(fd, direct.fd)) refuse(ESTALE, "was replaced while it was opened");
    const DirectAlignment found = alignment_of(direct.fd);
    if (!found.error.empty()) refuse(EINVAL, found.error);
    direct.alignment = std::max(found.memory, found.offset);
    direct.write_alignment = std::max(direct.alignment, found.write);
    if (!options.writable) return;
    direct.blocks = FileLock::blocks_of(information);
    // Read ahead, Linux would keep many pages in one folio, which is dirty if one of them is.
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
  }
};

std::shared_ptr<FileStorage> FileStorage::open(const std::string& path,
                                               const FileOptions& options) {
  if (options.map_address != 0 && options.writable) {
    throw std::invalid_argument("only a read-only file can be served from a mapping");
  }
  if (options.may_change && (options.writable || options.map_address != 0)) {
    throw std::invalid_argument("only a read-only file without a mapping can change its way");
  }
  Opened opened(path, options);
  opened.fd = open_file(path, options.writable);
  opened.find_range();
  if (options.direct || options.may_change) opened.open_direct();
  if (!options.name.empty()) opened.path = options.name;
  return std::shared_ptr<FileStorage>(new FileStorage(std::move(opened)));
}

FileStorage::FileStorage(Opened&& opened)
    : Storage(opened.nbytes, opened.options.writable),
      path_(opened.path),
      io_(std::exchange(opened.fd, -1), std::exchange(opened.direct, {}), opened.size),
      file_offset_(opened.offset),
      block_device_(opened.block_device),
      memory_file_system_(opened.memory_file_system),
      mapped_base_(opened.options.map_address == 0
                       ? nullptr
                       : reinterpret_cast<std::byte*>(opened.options.map_address + opened.offset)),
      direct_(opened.options.direct),
      lock_(std::move(opened.lock)) {
  if (opened.options.may_change) census_ = std::make_unique<ReadCensus>(nbytes());
  if (direct() && !opened.options.may_change) return;
  if (opened.options.copies_cached) {
    window_ = PageCacheWindow::open(fd(), file_offset_, nbytes(), window_refusal_);
  } else {
    window_refusal_ = "as configured";
  }
}

FileStorage::~FileStorage() {
  lock_.reset();
  close(fd());
  if (direct_fd() >= 0) close(direct_fd());
}

void FileStorage::refresh_backing(int64_t now_ns) {
  // If the file is neither mapped nor written here, reads find out by themselves.
  if (mapped_base_ == nullptr && (!writable() || block_device_)) return;
  // Acquire: a thread that sees the time of a look sees its result. Two threads may look at once.
  if (now_ns - refreshed_ns_.load(std::memory_order_acquire) < kRefreshNs) return;
  look_at_size();
  // Release: after the look, so that other threads do not rely on an older result.
  refreshed_ns_.store(now_ns, std::memory_order_release);
}

// Returns how many bytes of the namespace the file has now.
uint64_t FileStorage::look_at_size() {
  struct stat information;
  const uint64_t size = fstat(fd(), &information) == 0 ? size_of(fd(), information) : 0;
  if (!block_device_) io_.note_end(size);
  const uint64_t backed = size <= file_offset_ ? 0 : std::min(nbytes(), size - file_offset_);
  set_backed_nbytes(backed);
  return backed;
}

// Returns kTruncated if a write of [offset, offset + n) would extend a file that another process
// has truncated: the bytes in between would read as zeros. A look at the size costs half of a small
// write, so one look serves all writes of a millisecond. If one of these extends the file, the file
// is still too short, and `flush` finds that. Only a write of the last byte could make it long
// enough, so such a write always looks.
int FileStorage::check_extent(uint64_t offset, uint64_t n) {
  if (block_device_) return 0;
  const bool reaches_end = offset + n == nbytes();
  if (!reaches_end) refresh_backing(monotonic_ns());
  const bool fits = !reaches_end && offset + n <= backed_nbytes();
  if (!fits && offset + n > look_at_size()) return kTruncated;
  // Relaxed: a flush comes after the writes that it is about.
  if (!written_.load(std::memory_order_relaxed)) written_.store(true, std::memory_order_relaxed);
  return 0;
}

// The errors that a flush reports although the medium has all that was written: kTruncated if a
// write may have extended a truncated file, kReplaced if another file has taken its name.
int FileStorage::check_kept() {
  if (!written_.load(std::memory_order_relaxed)) return 0;
  if (look_at_size() < nbytes()) return kTruncated;
  struct stat mine, named;
  if (fstat(fd(), &mine) != 0) return errno;
  // A file that was removed and not replaced is scratch, which is no error.
  return mine.st_nlink == 0 && stat(path_.c_str(), &named) == 0 ? kReplaced : 0;
}

int FileStorage::validate(uint64_t offset, uint64_t n, IoFailure* failure) {
  return fail(Storage::validate(offset, n, failure), offset, n, failure);
}

int FileStorage::fail(int error, uint64_t offset, uint64_t n, IoFailure* failure) const {
  if (block_device_) error = error_of_block_device(error);
  if (error != 0 && failure != nullptr) *failure = {path_, file_offset_ + offset, n};
  return error;
}

bool FileStorage::choose_direct(bool direct) {
  if (census_ == nullptr) return false;
  direct_.store(direct, std::memory_order_relaxed);
  return true;
}

void FileStorage::note_read(uint64_t offset, uint64_t n, bool waited) const {
  if (census_ != nullptr) census_->note(offset, n, waited);
}

int FileStorage::read(uint64_t offset, void* data, size_t n, IoFailure* failure) {
  if (int status = check_range(offset, n)) return fail(status, offset, n, failure);
  note_read(offset, n, true);
  return fail(io_.read(direct(), file_offset_ + offset, data, n), offset, n, failure);
}

int FileStorage::read_nowait(uint64_t offset, void* data, size_t n, IoFailure* failure) {
  if (direct()) return EAGAIN;
  if (int status = check_range(offset, n)) return fail(status, offset, n, failure);
  if (window_ != nullptr && window_->read(offset, data, n)) {
    note_read(offset, n, false);
    return 0;
  }
  if (memory_file_system_) return read(offset, data, n, failure);
  // Relaxed: the flag only saves a system call that would be refused again.
  if (nowait_refused_.load(std::memory_order_relaxed)) return EAGAIN;
  const iovec target = {data, n};
  const uint64_t from = file_offset_ + offset;
  // preadv2 takes the offset as two longs, low half first; 64-bit kernels ignore the second.
  const long result = syscall(SYS_preadv2, fd(), &target, 1, from, 0, RWF_NOWAIT);
  if (result == long(n)) {
    note_read(offset, n, false);
    return 0;
  }
  if (result < 0 && is_unavailable(errno)) nowait_refused_.store(true, std::memory_order_relaxed);
  // Short, refused or not cached: the waiting path finds out which.
  return EAGAIN;
}

void FileStorage::copy_cached(base::host_copy* copies, uint32_t count) {
  if (direct() || window_ == nullptr) return;
  window_->read_each(copies, count);
  if (census_ == nullptr) return;
  for (uint32_t i = 0; i < count; ++i) {
    if (copies[i].done) note_read(copies[i].offset, copies[i].count * copies[i].bytes, false);
  }
}

bool FileStorage::has_cached(uint64_t offset, uint64_t n) {
  return !direct() && window_ != nullptr && window_->has(offset, n);
}

int FileStorage::write(uint64_t offset, const void* data, size_t n, IoFailure* failure) {
  if (int status = check_write(offset, n)) return fail(status, offset, n, failure);
  if (int status = check_extent(offset, n)) return fail(status, offset, n, failure);
  return fail(io_.write(direct(), file_offset_ + offset, data, n), offset, n, failure);
}

Piece FileStorage::piece(uint64_t file_offset, uint64_t n, uint32_t request_offset,
                         bool through_cache) const {
  Piece piece;
  piece.fd = through_cache ? fd() : direct_fd();
  piece.buffered_fd = fd();
  piece.alignment = through_cache ? 1 : io_.alignment();
  piece.block_device = block_device_;
  piece.nbytes = uint32_t(n);
  piece.request_offset = request_offset;
  piece.file_offset = file_offset;
  piece.path = &path_;
  return piece;
}

bool FileStorage::resolve(const Request& request, PieceList& pieces) {
  // The blocking call reports it.
  if (request.is_write && check_extent(request.offset, request.nbytes) != 0) return false;
  const uint64_t start = file_offset_ + request.offset;
  const uint64_t end = start + request.nbytes;
  const uint32_t at = request.request_offset;
  if (!request.is_write) note_read(request.offset, request.nbytes, true);
  if (!direct()) return pieces.add(piece(start, request.nbytes, at, true));
  if (!request.is_write) return pieces.add(piece(start, request.nbytes, at, false));

  for (uint64_t from = start; from != end;) {
    const BlockClaim claim = io_.claim_of(from, end - from);
    const bool is_tail = claim.kind == BlockClaim::Kind::kTail;
    Piece next = piece(from, claim.nbytes, at + uint32_t(from - start), is_tail);
    next.claim = claim;
    if (claim.kind == BlockClaim::Kind::kPart) next.block_bytes = io_.write_alignment();
    if (!pieces.add(next)) return false;
    from += claim.nbytes;
  }
  return true;
}

bool FileStorage::resolve_flush(PieceList& pieces) {
  // The blocking call reports it.
  if (check_kept() != 0) return false;
  return pieces.add(piece(file_offset_, 0, 0, true));
}

int FileStorage::flush(IoFailure* failure) {
  if (in_forked_child()) return fail(kForked, 0, 0, failure);
  if (fdatasync(fd()) != 0) return fail(errno, 0, nbytes(), failure);
  return fail(check_kept(), 0, nbytes(), failure);
}

int FileStorage::discard(uint64_t offset, uint64_t n, IoFailure* failure) {
  if (int status = check_write(offset, n)) return fail(status, offset, n, failure);
  // A block device takes whole blocks only, and the bytes beside them are not the caller's. A file
  // system would make parts of pages zeros in the page cache.
  const uint64_t unit = block_device_ || direct() ? kPageBytes : 1;
  const uint64_t first = round_up(file_offset_ + offset, unit);
  const uint64_t last = round_down(file_offset_ + offset + n, unit);
  if (first >= last) return 0;
  const int error = io_.deallocate(FALLOC_FL_PUNCH_HOLE, first, last - first);
  // Deallocation is a hint (NVM command set, Dataset Management), so it succeeds on a medium that
  // does not have it.
  return is_unavailable(error) ? 0 : fail(error, offset, n, failure);
}

int FileStorage::write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) {
  if (int status = check_write(offset, n)) return fail(status, offset, n, failure);
  if (n == 0) return 0;
  if (int status = check_extent(offset, n)) return fail(status, offset, n, failure);
  const uint64_t unit = direct() ? kPageBytes : 1;
  // In the file: the pages' first one may begin before the storage does.
  const uint64_t end = file_offset_ + offset + n;
  const uint64_t first = std::min(round_up(file_offset_ + offset, unit), end) - file_offset_;
  const uint64_t last = std::max(first + file_offset_, round_down(end, unit)) - file_offset_;
  if (int status = zero_by_writing(offset, first - offset, failure)) return status;
  if (int status = zero_by_writing(last, offset + n - last, failure)) return status;
  if (first == last) return 0;
  const int error = io_.deallocate(FALLOC_FL_ZERO_RANGE, file_offset_ + first, last - first);
  // Block devices return EINVAL for a range that is no multiple of their sectors.
  if (!is_unavailable(error) && error != EINVAL) return fail(error, offset, n, failure);
  return zero_by_writing(first, last - first, failure);
}

int FileStorage::zero_by_writing(uint64_t offset, uint64_t n, IoFailure* failure) {
  alignas(kPageBytes) static const std::byte zeros[64 * 1024] = {};
  while (n != 0) {
    const size_t step = std::min<uint64_t>(n, sizeof(zeros));
    if (int status = write(offset, zeros, step, failure)) return status;
    offset += step;
    n -= step;
  }
  return 0;
}

void FileStorage::collect_files(std::vector<int>& files) const {
  files.push_back(fd());
  if (direct_fd() >= 0) files.push_back(direct_fd());
}

Description FileStorage::describe() const {
  Description description;
  description.add("kind", std::string(block_device_ ? "block device" : "file"));
  description.add("path", path_);
  description.add("offset", file_offset_);
  description.add("nbytes", nbytes());
  description.add("writable", writable());
  description.add("o_direct", direct());
  if (direct()) description.add("alignment", uint64_t(io_.alignment()));
  description.add("in_place", mapped_base_ != nullptr);
  if (writable()) {
    description.add("lock", lock_ != nullptr ? lock_->state() : std::string("none, as asked for"));
  }
  if (direct() || mapped_base_ != nullptr) return description;
  description.add("cached reads", window_ != nullptr ? std::string("copied in place")
                                                     : "by system calls: " + window_refusal_);
  return description;
}

}  // namespace fw::native
