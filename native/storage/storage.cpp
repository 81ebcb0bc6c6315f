// What all storages share; see storage.h.
#include "storage/storage.h"

#include <cstring>
#include <ctime>

#include "io/io_engine.h"
#include "io/nvme_command.h"

namespace fw::native {

std::string error_text(int error) {
  if (error == kTruncated) return "truncated: the file is shorter than it was";
  if (error == kReplaced) return "replaced: another file has its name, and what was written none";
  if (error == kRevoked) return "stale block map: another process wanted the file; open it again";
  if (is_nvme_status(error)) return nvme_status_text(status_of(error));
  return std::strerror(error);
}

std::shared_ptr<Storage> require_storage(std::shared_ptr<Storage> storage) {
  if (storage == nullptr) throw std::invalid_argument("the storage is None");
  return storage;
}

int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

int Storage::validate(uint64_t offset, uint64_t n, IoFailure*) {
  if (int status = check_range(offset, n)) return status;
  refresh_backing(monotonic_ns());
  const uint64_t backed = backed_nbytes();
  return offset <= backed && n <= backed - offset ? 0 : kTruncated;
}

std::unique_ptr<IoEngine> Storage::decorate(std::unique_ptr<IoEngine> engine) { return engine; }

Description Storage::describe_as(std::string kind, const std::string& path) const {
  Description description;
  description.add("kind", std::move(kind));
  if (!path.empty()) description.add("path", path);
  description.add("nbytes", nbytes());
  description.add("writable", writable());
  return description;
}

int Storage::check_range(uint64_t offset, uint64_t n) const {
  if (in_forked_child()) return kForked;
  return offset <= nbytes_ && n <= nbytes_ - offset ? 0 : kOutOfRange;
}

int Storage::check_write(uint64_t offset, uint64_t n) const {
  if (!writable_) return EROFS;
  return check_range(offset, n);
}

}  // namespace fw::native
