// Identify, and transfers by blocking commands; see nvme_passthrough.h.
#include "storage/nvme_passthrough.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/nvme_ioctl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/alignment.h"
#include "flashwarp/nvme/command.cuh"
#include "io/nvme_identity.h"
#include "storage/file_io.h"
#include "storage/file_lock.h"

namespace fw::native {
namespace {

constexpr uint32_t kIdentifyNamespace = 0;
constexpr uint32_t kIdentifyController = 1;

// Without MDTS and without a limit of the kernel: what every kernel accepts.
constexpr uint64_t kTransferBytesMax = 128 << 10;

// The granularity at which a drive's DMA takes addresses: PRP entries have two bits less.
constexpr uint64_t kAddressAlignment = 4;

}  // namespace

// Descriptors and geometry on the way to a storage, which takes them over.
class NvmePassthrough::Opening {
 public:
  Opening(const std::string& path, const PassthroughOptions& options)
      : path_(path), options_(options) {}
  ~Opening() {
    if (where.fd >= 0) close(where.fd);
    if (block_fd >= 0) close(block_fd);
    if (claim_fd >= 0) close(claim_fd);
  }
  Opening(const Opening&) = delete;

  void open() {
    open_character_device();
    std::byte* const data = thread_scratch();
    if (data == nullptr) refuse(ENOMEM);
    read_namespace(data);
    read_controller(data);
    if (options_.writable && geometry.write_protected) {
      refuse(EROFS, "the drive has write-protected this namespace");
    }
    block_fd = ::open(options_.block_device.c_str(), O_RDONLY | O_CLOEXEC);
    if (options_.lock) take_lock();
    if (options_.writable) claim_block_device();
    // What was written through the block device may still be in the page cache only.
    if (block_fd >= 0) fsync(block_fd);
  }

  NvmeNamespace where;
  Geometry geometry;
  int block_fd = -1;
  int claim_fd = -1;
  std::string claim = "none";
  std::unique_ptr<FileLock> lock;
  const std::string& path() const { return path_; }

 private:
  [[noreturn]] void refuse(int error) { refuse(error, std::strerror(error)); }
  [[noreturn]] void refuse(int error, const std::string& why) {
    throw OpenError(error, why, path_);
  }

  void open_character_device() {
    struct stat information;
    if (stat(path_.c_str(), &information) != 0) refuse(errno);
    constexpr char kNoNamespace[] = "is no character device of an NVMe namespace (/dev/ng0n1)";
    if (!S_ISCHR(information.st_mode)) refuse(ENOTTY, kNoNamespace);
    const int access = options_.writable ? O_RDWR : O_RDONLY;
    where.fd = ::open(path_.c_str(), access | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (where.fd < 0) refuse(errno);
    const int kept = fcntl(where.fd, F_GETFL);
    if (kept < 0 || fcntl(where.fd, F_SETFL, kept & ~O_NONBLOCK) != 0) refuse(errno);
    const int nsid = ioctl(where.fd, NVME_IOCTL_ID);
    if (nsid <= 0) refuse(ENOTTY, kNoNamespace);
    where.nsid = uint32_t(nsid);
  }

  void identify(uint32_t nsid, uint32_t cns, std::byte* data) {
    const int error = identify_nvme(where.fd, nsid, cns, data);
    if (error == 0) return;
    if (error == EACCES || error == EPERM) {
      refuse(error,
             "the kernel takes no NVMe commands from this user: before Linux 6.2 they need "
             "CAP_SYS_ADMIN");
    }
    refuse(errno_of(error), "Identify failed: " + error_text(error));
  }

  void read_namespace(std::byte* data) {
    identify(where.nsid, kIdentifyNamespace, data);
    const NamespaceIdentity found = NamespaceIdentity::decode(DataPage(data, kPageBytes));
    geometry.lba_shift = found.lba_shift;
    if (found.metadata_bytes != 0) {
      refuse(EOPNOTSUPP, "its logical blocks have " + std::to_string(found.metadata_bytes) +
                             " bytes of metadata each: format it without (nvme format --lbaf)");
    }
    if (geometry.lba_shift < 9 || geometry.lba_shift > 16) {
      refuse(EOPNOTSUPP, "its logical blocks have 2^" + std::to_string(geometry.lba_shift) +
                             " bytes: 512 to 65536 are supported");
    }
    where.lba_shift = geometry.lba_shift;
    geometry.nbytes = found.lbas << found.lba_shift;
    geometry.discard_zeroes = found.discards_to_zeroes;
    geometry.write_protected = found.write_protected;
  }

  void read_controller(std::byte* data) {
    identify(0, kIdentifyController, data);
    // No drive in use has larger least pages (CAP.MPSMIN) than 4 KiB. Larger ones allow more.
    const DriveIdentity found = DriveIdentity::decode(DataPage(data, kPageBytes), kPageBytes);
    geometry.serial = found.serial;
    geometry.model = found.model;
    geometry.has_write_zeroes = found.has_write_zeroes;
    geometry.discard_zeroes = geometry.discard_zeroes && found.has_dataset_management;
    uint64_t bytes = found.transfer_bytes_max == 0 ? kScratchBytes : found.transfer_bytes_max;
    bytes = std::min(
        bytes, options_.max_transfer_bytes == 0 ? kTransferBytesMax : options_.max_transfer_bytes);
    const uint64_t lba = uint64_t(1) << geometry.lba_shift;
    geometry.max_transfer_bytes =
        std::max(lba, round_down(std::min<uint64_t>(bytes, kScratchBytes), lba));
  }

  // On the block device, whose users then exclude this one too.
  void take_lock() {
    const int fd = block_fd >= 0 ? block_fd : where.fd;
    struct stat information;
    if (fstat(fd, &information) != 0) refuse(errno);
    lock = FileLock::take(fd, information, options_.writable, path_);
  }

  // The kernel refuses O_EXCL where something is mounted or otherwise used, also on a partition,
  // and while this descriptor is open it refuses such use.
  void claim_block_device() {
    claim_fd = ::open(options_.block_device.c_str(), O_RDONLY | O_EXCL | O_CLOEXEC);
    const int error = claim_fd >= 0 ? 0 : errno;
    claim = error == 0 ? "held" : std::string("none: ") + std::strerror(error);
    if (error == 0 || !options_.claim) return;
    if (error == EBUSY) refuse(EBUSY, "is in use by the kernel");
    refuse(error, "whether it is in use cannot be found out, since " + options_.block_device +
                      " cannot be opened: " + std::strerror(error));
  }

  const std::string& path_;
  const PassthroughOptions& options_;
};

std::shared_ptr<NvmePassthrough> NvmePassthrough::open(const std::string& path,
                                                       const PassthroughOptions& options) {
  Opening opening(path, options);
  opening.open();
  const uint64_t all = opening.geometry.nbytes;
  const uint64_t lba = uint64_t(1) << opening.geometry.lba_shift;
  if (options.offset % lba != 0) {
    throw std::invalid_argument("offset=" + std::to_string(options.offset) +
                                " is no multiple of the logical block size, " +
                                std::to_string(lba));
  }
  if (options.offset >= all || options.nbytes > all - options.offset) {
    throw std::invalid_argument("bytes from " + std::to_string(options.offset) + " on, " +
                                std::to_string(options.nbytes) + " of them: the namespace has " +
                                std::to_string(all));
  }
  return std::shared_ptr<NvmePassthrough>(new NvmePassthrough(opening, options));
}

NvmePassthrough::NvmePassthrough(Opening& opened, const PassthroughOptions& options)
    : Storage(options.nbytes != 0 ? options.nbytes : opened.geometry.nbytes - options.offset,
              options.writable),
      path_(opened.path()),
      where_(opened.where),
      geometry_(opened.geometry),
      base_(options.offset),
      block_fd_(opened.block_fd),
      claim_fd_(opened.claim_fd),
      claim_(opened.claim),
      lock_(std::move(opened.lock)) {
  opened.where.fd = opened.block_fd = opened.claim_fd = -1;
}

NvmePassthrough::~NvmePassthrough() {
  lock_.reset();
  if (block_fd_ >= 0) {
    // The page cache may have what was there before. A user without the right drops clean pages.
    if (writable() && ioctl(block_fd_, BLKFLSBUF) != 0) {
      posix_fadvise(block_fd_, 0, 0, POSIX_FADV_DONTNEED);
    }
    close(block_fd_);
  }
  if (claim_fd_ >= 0) close(claim_fd_);
  close(where_.fd);
}

int NvmePassthrough::fail(int error, uint64_t offset, uint64_t n, IoFailure* failure) const {
  if (error != 0 && failure != nullptr) *failure = {path_, base_ + offset, n};
  return error;
}

// Moves whole blocks, from byte `place` of the namespace on, in commands that the drive takes.
int NvmePassthrough::move(bool is_write, uint64_t place, void* data, uint64_t n) const {
  auto* memory = static_cast<std::byte*>(data);
  while (n != 0) {
    const uint64_t step = std::min(n, geometry_.max_transfer_bytes);
    const auto command = nvme_transfer(where_, is_write, place, memory, uint32_t(step), false);
    if (int error = run_nvme(where_, command)) return error;
    place += step;
    memory += step;
    n -= step;
  }
  return 0;
}

int NvmePassthrough::read(uint64_t offset, void* data, size_t n, IoFailure* failure) {
  if (int status = check_range(offset, n)) return fail(status, offset, n, failure);
  return fail(move_through(false, base_ + offset, static_cast<std::byte*>(data), n), offset, n,
              failure);
}

int NvmePassthrough::write(uint64_t offset, const void* data, size_t n, IoFailure* failure) {
  if (int status = check_write(offset, n)) return fail(status, offset, n, failure);
  auto* source = static_cast<std::byte*>(const_cast<void*>(data));
  return fail(move_through(true, base_ + offset, source, n), offset, n, failure);
}

// As `move`, with any alignment.
int NvmePassthrough::move_through(bool is_write, uint64_t place, std::byte* data, size_t n) {
  const uint64_t lba = lba_bytes();
  if (is_aligned(place | n, lba) &&
      is_aligned(reinterpret_cast<uint64_t>(data), kAddressAlignment)) {
    return move(is_write, place, data, n);
  }
  std::byte* scratch = thread_scratch();
  if (scratch == nullptr) return ENOMEM;
  while (n != 0) {
    const uint64_t start = round_down(place, lba);
    const uint64_t lead = place - start;
    const size_t take = std::min<size_t>(n, kScratchBytes - lead);
    int error = 0;
    if (is_write) {
      error = change_blocks(start, lead, data, take, scratch);
    } else {
      error = move(false, start, scratch, round_up(lead + take, lba));
      if (error == 0) std::memcpy(data, scratch + lead, take);
    }
    if (error != 0) return error;
    place += take;
    data += take;
    n -= take;
  }
  return 0;
}

// Writes `n` bytes, `lead` bytes behind the beginning of a block, and keeps what is beside them.
int NvmePassthrough::change_blocks(uint64_t start, uint64_t lead, const std::byte* data, size_t n,
                                   std::byte* blocks) {
  const uint64_t lba = lba_bytes();
  const uint64_t end = lead + n;
  const uint64_t total = round_up(end, lba);
  std::unique_lock guard(partial_blocks_, std::defer_lock);
  if (lead != 0 || end != total) guard.lock();
  if (lead != 0) {
    if (int error = move(false, start, blocks, lba)) return error;
  }
  if (end != total && (lead == 0 || total > lba)) {
    if (int error = move(false, start + total - lba, blocks + total - lba, lba)) return error;
  }
  std::memcpy(blocks + lead, data, n);
  return move(true, start, blocks, total);
}

bool NvmePassthrough::resolve(const Request& request, PieceList& pieces) {
  const uint64_t lba = lba_bytes();
  uint64_t place = base_ + request.offset;
  const uint64_t end = place + request.nbytes;
  // A part of a block is written by the blocking call.
  if (request.is_write && !is_aligned(place | end, lba)) return false;
  while (place != end) {
    const uint64_t stop = std::min(end, round_down(place, lba) + geometry_.max_transfer_bytes);
    Piece piece;
    piece.fd = where_.fd;
    piece.nvme = &where_;
    piece.alignment = uint32_t(lba);
    piece.nbytes = uint32_t(stop - place);
    piece.request_offset = request.request_offset + uint32_t(place - base_ - request.offset);
    piece.file_offset = place;
    piece.path = &path_;
    if (!pieces.add(piece)) return false;
    place = stop;
  }
  return true;
}

bool NvmePassthrough::resolve_flush(PieceList& pieces) {
  Piece piece;
  piece.fd = where_.fd;
  piece.nvme = &where_;
  piece.path = &path_;
  return pieces.add(piece);
}

int NvmePassthrough::flush(IoFailure* failure) {
  if (in_forked_child()) return fail(kForked, 0, 0, failure);
  return fail(run_nvme(where_, nvme_flush()), 0, nbytes(), failure);
}

int NvmePassthrough::discard(uint64_t offset, uint64_t n, IoFailure* failure) {
  if (int status = check_write(offset, n)) return fail(status, offset, n, failure);
  // Deallocation is a hint, and blocks that do not read as zeros afterwards would be neither what
  // they were nor zeros.
  if (!geometry_.discard_zeroes) return 0;
  const uint64_t lba = lba_bytes();
  uint64_t place = round_up(base_ + offset, lba);
  const uint64_t end = round_down(base_ + offset + n, lba);
  while (place < end) {
    const uint64_t blocks = std::min<uint64_t>((end - place) / lba, UINT32_MAX);
    nvme::dataset_range range = {0, uint32_t(blocks), place / lba};
    NvmeCommand command;
    command.opcode = nvme::kDatasetManagement;
    command.lba = uint64_t(nvme::kAttributeDeallocate) << 32;  // CDW11; CDW10: one range
    command.memory = &range;
    command.nbytes = sizeof range;
    if (int error = run_nvme(where_, command)) return fail(error, offset, n, failure);
    place += blocks * lba;
  }
  return 0;
}

int NvmePassthrough::write_zeroes(uint64_t offset, uint64_t n, IoFailure* failure) {
  if (int status = check_write(offset, n)) return fail(status, offset, n, failure);
  const uint64_t lba = lba_bytes();
  const uint64_t begin = base_ + offset;
  const uint64_t first = round_up(begin, lba);
  const uint64_t last = round_down(begin + n, lba);
  if (first >= last || !geometry_.has_write_zeroes) {
    return fail(zero_by_writing(begin, n), offset, n, failure);
  }
  if (int error = zero_by_writing(begin, first - begin)) return fail(error, offset, n, failure);
  for (uint64_t place = first; place < last;) {
    const uint64_t blocks = std::min<uint64_t>((last - place) / lba, nvme::kLbaCountMax);
    NvmeCommand command;
    command.opcode = nvme::kWriteZeroes;
    command.lba = place / lba;
    command.cdw12 = uint32_t(blocks - 1);
    const int error = run_nvme(where_, command);
    // More than the drive takes at a time (WZSL), or not supported after all.
    const bool refused = is_nvme_status(error) && (status_of(error) == nvme::kInvalidField ||
                                                   status_of(error) == nvme::kInvalidOpcode);
    if (refused) return fail(zero_by_writing(place, begin + n - place), offset, n, failure);
    if (error != 0) return fail(error, offset, n, failure);
    place += blocks * lba;
  }
  return fail(zero_by_writing(last, begin + n - last), offset, n, failure);
}

int NvmePassthrough::zero_by_writing(uint64_t place, uint64_t n) {
  alignas(kPageBytes) static std::byte zeros[64 << 10] = {};
  while (n != 0) {
    const size_t step = std::min<uint64_t>(n, sizeof zeros - place % lba_bytes());
    if (int error = move_through(true, place, zeros, step)) return error;
    place += step;
    n -= step;
  }
  return 0;
}

Description NvmePassthrough::describe() const {
  Description description;
  description.add("kind", std::string("NVMe namespace, by passthrough"));
  description.add("path", path_);
  description.add("model", geometry_.model);
  description.add("serial", geometry_.serial);
  description.add("nsid", uint64_t(where_.nsid));
  description.add("offset", base_);
  description.add("nbytes", nbytes());
  description.add("namespace_nbytes", geometry_.nbytes);
  description.add("lba_bytes", uint64_t(lba_bytes()));
  description.add("max_transfer_bytes", geometry_.max_transfer_bytes);
  description.add("writable", writable());
  if (writable()) {
    description.add("claim", claim_);
    description.add("lock", lock_ != nullptr ? lock_->state() : std::string("none, as asked for"));
  }
  return description;
}

}  // namespace fw::native
