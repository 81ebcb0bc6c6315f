// Python bindings of storages, and of what files and host memory need.
//
// Every call that may wait releases the GIL. Failed I/O raises OSError with errno, path and the
// attribute `offset`; use in a forked child raises RuntimeError, since the threads that would do
// the work stayed in the parent.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/host_memory.h"
#include "bind/buffer_view.h"
#include "bind/convert.h"
#include "bind/unlocked.h"
#include "io/io_uring.h"
#include "io/nvme_command.h"
#include "storage/composite_storage.h"
#include "storage/file_io.h"
#include "storage/file_lock.h"
#include "storage/file_storage.h"
#include "storage/image_storage.h"
#include "storage/mapped_storage.h"
#include "storage/memory_storage.h"
#include "storage/nvme_passthrough.h"
#include "storage/open_file.h"
#include "storage/read_census.h"

namespace nb = nanobind;
using namespace fw::native;

void bind_storage(nb::module_& m);

namespace {

[[noreturn]] void raise_os_error(int error, const std::string& text, const std::string& path) {
  PyErr_SetObject(PyExc_OSError, nb::make_tuple(error, text, path).ptr());
  throw nb::python_error();
}

[[noreturn]] void raise_io_error(int error, const std::string& text, const IoFailure& failure) {
  nb::object raised = nb::borrow(PyExc_OSError)(errno_of(error), text, failure.path);
  raised.attr("offset") = failure.file_offset;
  raised.attr("nbytes") = failure.nbytes;
  if (is_nvme_status(error)) raised.attr("status") = status_of(error);
  PyErr_SetObject(PyExc_OSError, raised.ptr());
  throw nb::python_error();
}

void check(const Storage& storage, int error, const IoFailure& failure) {
  if (error == 0) return;
  if (error == kForked) throw std::runtime_error(kForkMessage);
  if (error == kOutOfRange) {
    throw nb::value_error(
        ("the range is outside of the storage's " + std::to_string(storage.nbytes()) + " bytes")
            .c_str());
  }
  std::string text = error_text(error);
  text += " at byte " + std::to_string(failure.file_offset) + " (" +
          std::to_string(failure.nbytes) + " bytes)";
  raise_io_error(error, text, failure);
}

// Runs act(failure) without the GIL and raises what it returns.
template <typename Act>
void run(Storage& storage, Act act) {
  IoFailure failure;
  const int error = unlocked([&] { return act(&failure); });
  check(storage, error, failure);
}

template <int (Storage::*kAct)(uint64_t, uint64_t, IoFailure*)>
void run_on_range(Storage& storage, uint64_t offset, uint64_t nbytes) {
  run(storage, [&](IoFailure* failure) { return (storage.*kAct)(offset, nbytes, failure); });
}

// A callable that threads without the GIL call, and drop. Commands that a kernel waits for must not
// need one: whoever has the GIL may wait for the kernel, and Python's collector runs anything.
class OwnerCall {
 public:
  explicit OwnerCall(nb::object call) : call_(std::make_shared<Held>(std::move(call))) {}

  template <typename... Arguments>
  int operator()(Arguments... arguments) const {
    if (!Py_IsInitialized()) return ECANCELED;
    return staying([&] {
      const nb::gil_scoped_acquire guard;
      try {
        return nb::cast<int>(call_->object(arguments...));
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("an image's owner");
        return EIO;
      }
    });
  }

 private:
  struct Held {
    explicit Held(nb::object held) : object(std::move(held)) {}
    ~Held() {
      if (!Py_IsInitialized()) {
        object.release();
        return;
      }
      staying([&] {
        const nb::gil_scoped_acquire guard;
        object.reset();
      });
    }
    nb::object object;
  };
  std::shared_ptr<Held> call_;
};

void bind_image_storage(nb::module_& m) {
  nb::class_<ImageStorage, Storage>(m, "ImageStorage")
      .def(
          "__init__",
          [](ImageStorage* self, std::shared_ptr<Storage> file, int fd,
             std::tuple<uint64_t, uint64_t, uint64_t, uint32_t> layout, uint64_t nbytes,
             bool writable, const std::string& path,
             std::tuple<uint64_t, uint64_t, nb::bytes, uint64_t, nb::bytes> marks,
             nb::object sync) {
            const auto& [data_begin, block_bytes, slots, table_slots] = layout;
            const auto& [begin, range_bytes, identity, generation, marked] = marks;
            new (self)
                ImageStorage(std::move(file), fd, {data_begin, block_bytes, slots, table_slots},
                             nbytes, writable, path,
                             std::make_unique<ImageMarks>(
                                 fd, ImageMarks::Layout{begin, range_bytes, nbytes},
                                 std::string(identity.c_str(), identity.size()), generation,
                                 std::string(marked.c_str(), marked.size())),
                             OwnerCall(sync));
          },
          nb::arg("file").none(), nb::arg("fd"), nb::arg("layout"), nb::arg("nbytes"),
          nb::arg("writable"), nb::arg("path"), nb::arg("marks"), nb::arg("sync"))
      .def(
          "load_table",
          [](ImageStorage& s, uint64_t index, uint64_t slot, nb::handle entries) {
            const BufferView view(entries);
            const auto* words = static_cast<const uint64_t*>(view.data());
            std::vector<uint64_t> list(words, words + view.nbytes() / sizeof(uint64_t));
            unlocked([&] { s.load_table(index, slot, std::move(list)); });
          },
          nb::arg("index"), nb::arg("slot"), nb::arg("entries"))
      .def("used",
           [](const ImageStorage& s) {
             const std::vector<uint64_t> words = unlocked([&] { return s.used(); });
             return nb::bytes(words.data(), words.size() * sizeof(uint64_t));
           })
      .def(
          "begin_sync",
          [](ImageStorage& s, uint64_t generation, uint32_t limit_ms) {
            ImageStorage::Snapshot taken;
            const int error = unlocked([&] { return s.begin_sync(generation, limit_ms, taken); });
            if (error == kForked) throw std::runtime_error(kForkMessage);
            if (error != 0) raise_os_error(error, error_text(error), "");
            nb::list tables;
            for (const auto& [index, table] : taken.tables) {
              const size_t nbytes = table.entries.size() * sizeof(uint64_t);
              tables.append(
                  nb::make_tuple(index, table.slot, nb::bytes(table.entries.data(), nbytes)));
            }
            const size_t nbytes = taken.used.size() * sizeof(uint64_t);
            return nb::make_tuple(tables, nb::bytes(taken.used.data(), nbytes));
          },
          nb::arg("generation"), nb::arg("limit_ms"))
      .def(
          "end_sync", [](ImageStorage& s, bool synced) { unlocked([&] { s.end_sync(synced); }); },
          nb::arg("synced"))
      .def_prop_ro("marked", [](ImageStorage& s) { return s.marks().any(); })
      .def_prop_ro("broken", [](ImageStorage& s) { return s.marks().broken(); })
      .def(
          "break_off", [](ImageStorage& s, int error) { s.marks().break_off(error); },
          nb::arg("error"))
      .def("detach", [](ImageStorage& s) { unlocked([&] { s.detach(); }); });
}

void bind_storages(nb::module_& m) {
  nb::class_<Storage>(m, "Storage")
      .def_prop_ro("nbytes", &Storage::nbytes)
      .def_prop_ro("writable", &Storage::writable)
      .def_prop_ro("mapped_base",
                   [](Storage& s) { return reinterpret_cast<uintptr_t>(s.mapped_base()); })
      .def("describe", [](const Storage& s) { return to_dict(s.describe()); })
      .def(
          "read",
          [](Storage& s, uint64_t offset, size_t nbytes) {
            if (nbytes > s.nbytes()) check(s, kOutOfRange, {});
            nb::bytes result(nullptr, nbytes);
            char* data = PyBytes_AsString(result.ptr());
            run(s, [&](IoFailure* failure) { return s.read(offset, data, nbytes, failure); });
            return result;
          },
          nb::arg("offset"), nb::arg("nbytes"))
      .def(
          "read_into",
          [](Storage& s, uint64_t offset, nb::handle target) {
            const BufferView view(target, PyBUF_WRITABLE);
            run(s, [&](IoFailure* failure) {
              return s.read(offset, view.data(), view.nbytes(), failure);
            });
          },
          nb::arg("offset"), nb::arg("target"))
      .def(
          "write",
          [](Storage& s, uint64_t offset, nb::handle source) {
            const BufferView view(source);
            run(s, [&](IoFailure* failure) {
              return s.write(offset, view.data(), view.nbytes(), failure);
            });
          },
          nb::arg("offset"), nb::arg("source"))
      .def("flush", [](Storage& s) { run(s, [&](IoFailure* f) { return s.flush(f); }); })
      .def("discard", &run_on_range<&Storage::discard>, nb::arg("offset"), nb::arg("nbytes"))
      .def("write_zeroes", &run_on_range<&Storage::write_zeroes>, nb::arg("offset"),
           nb::arg("nbytes"))
      .def("validate", &run_on_range<&Storage::validate>, nb::arg("offset"), nb::arg("nbytes"));

  nb::class_<MemoryStorage, Storage>(m, "MemoryStorage")
      .def(
          "__init__",
          [](MemoryStorage* self, uintptr_t address, uint64_t nbytes, bool writable, nb::object) {
            new (self) MemoryStorage(reinterpret_cast<void*>(address), nbytes, writable);
          },
          nb::arg("address"), nb::arg("nbytes"), nb::arg("writable") = true,
          nb::arg("owner") = nb::none(), nb::keep_alive<1, 5>());

  nb::class_<FileStorage, Storage>(m, "FileStorage")
      .def(nb::new_([](const std::string& path, uint64_t offset, uint64_t nbytes, bool writable,
                       const std::string& mode, uintptr_t map_address, bool copies_cached,
                       bool lock, const std::string& name, bool may_change) {
             if (mode != "direct" && mode != "buffered") {
               throw nb::value_error("mode must be 'direct' or 'buffered'");
             }
             const FileOptions options = {offset,      nbytes,        writable, mode == "direct",
                                          map_address, copies_cached, lock,     name,
                                          may_change};
             return unlocked([&] { return FileStorage::open(path, options); });
           }),
           nb::arg("path"), nb::arg("offset") = 0, nb::arg("nbytes") = 0,
           nb::arg("writable") = false, nb::arg("mode") = "buffered", nb::arg("map_address") = 0,
           nb::arg("copies_cached") = true, nb::arg("lock") = false, nb::arg("name") = "",
           nb::arg("may_change") = false)
      .def(
          "choose_direct",
          [](FileStorage& file, bool direct) {
            if (!file.choose_direct(direct)) throw nb::value_error("this file keeps its way");
          },
          nb::arg("direct"))
      .def("read_figures",
           [](const FileStorage& file) {
             const ReadCensus* census = file.census();
             const auto found = census == nullptr ? ReadCensus::Figures{} : census->figures();
             return nb::make_tuple(found.reads, found.nbytes, found.waited_nbytes, found.near_reads,
                                   found.touched_nbytes, found.busy_ns);
           })
      .def("restart_figures",
           [](FileStorage& file) {
             if (file.census() != nullptr) file.census()->restart();
           })
      .def_prop_ro("nbytes_noted",
                   [](const FileStorage& file) {
                     return file.census() == nullptr ? 0 : file.census()->nbytes();
                   })
      .def_prop_ro("path", &FileStorage::path)
      .def_prop_ro("o_direct", &FileStorage::direct)
      .def_prop_ro("fd", &FileStorage::fd)
      .def_prop_ro("direct_fd", &FileStorage::direct_fd);

  nb::class_<NvmePassthrough, Storage>(m, "NvmePassthrough")
      .def(nb::new_([](const std::string& path, uint64_t offset, uint64_t nbytes, bool writable,
                       bool lock, bool claim, const std::string& block_device,
                       uint64_t max_transfer_bytes) {
             const PassthroughOptions options = {offset, nbytes,       writable,          lock,
                                                 claim,  block_device, max_transfer_bytes};
             return unlocked([&] { return NvmePassthrough::open(path, options); });
           }),
           nb::arg("path"), nb::arg("offset"), nb::arg("nbytes"), nb::arg("writable"),
           nb::arg("lock"), nb::arg("claim"), nb::arg("block_device"),
           nb::arg("max_transfer_bytes"))
      .def_prop_ro("lba_bytes", &NvmePassthrough::lba_bytes);

  nb::class_<MappedStorage, Storage>(m, "MappedStorage")
      .def(
          "__init__",
          [](MappedStorage* self, std::shared_ptr<Storage> device,
             const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& extents, uint64_t nbytes,
             bool writable, const std::string& name) {
            std::vector<FileExtent> list;
            for (const auto& [logical, physical, n] : extents)
              list.push_back({logical, physical, n});
            new (self) MappedStorage(std::move(device), std::move(list), nbytes, writable, name);
          },
          nb::arg("device"), nb::arg("extents"), nb::arg("nbytes"), nb::arg("writable"),
          nb::arg("name"))
      .def(
          "revoke",
          [](MappedStorage& s, uint32_t limit_ms) {
            const int error = unlocked([&] { return s.revoke(limit_ms); });
            if (error != 0) raise_os_error(errno_of(error), error_text(error), "");
          },
          nb::arg("limit_ms"));

  nb::class_<StripedStorage, Storage>(m, "StripedStorage")
      .def(nb::init<StorageList, uint32_t, uint64_t>(), nb::arg("members"), nb::arg("stripe_bytes"),
           nb::arg("nbytes") = 0);
  nb::class_<ConcatenatedStorage, Storage>(m, "ConcatenatedStorage")
      .def(nb::init<StorageList>(), nb::arg("members"));
  nb::class_<ReplicatedStorage, Storage>(m, "ReplicatedStorage")
      .def(nb::init<StorageList>(), nb::arg("members"));
}

nb::object direct_io_alignment(const std::string& path) {
  const DirectAlignment found = probe_direct_alignment(path);
  if (!found.error.empty()) return nb::cast(found.error);
  return nb::make_tuple(found.memory, found.offset);
}

double residency_of(uint64_t address, uint64_t nbytes) {
  const double part = unlocked([&] { return residency(address, nbytes); });
  if (part < 0) raise_os_error(int(-part), std::strerror(int(-part)), "");
  return part;
}

int64_t cached_pages_of(int fd, uint64_t offset, uint64_t nbytes) {
  const int64_t pages = unlocked([&] { return cached_pages(fd, offset, nbytes); });
  if (pages < 0) raise_os_error(int(-pages), std::strerror(int(-pages)), "");
  return pages;
}

// Bytes that are moved between two looks at signals: some milliseconds.
constexpr size_t kStepBytes = 16 << 20;

// Calls act(place, n, offset, &moved) for the steps of a transfer of an open file, without the GIL.
// Returns how many bytes were moved: all, unless a file that is read ends before.
template <typename Act>
size_t move_in_steps(Act act, const BufferView& view, uint64_t offset, const std::string& path) {
  size_t done = 0;
  while (true) {
    const size_t step = std::min(kStepBytes, view.nbytes() - done);
    size_t moved = 0;
    const int error = unlocked([&] {
      return act(static_cast<std::byte*>(view.data()) + done, step, offset + done, &moved);
    });
    done += moved;
    if (error == kTruncated || done == view.nbytes()) return done;
    if (error != 0) {
      raise_io_error(error, std::strerror(error), {path, offset + done, view.nbytes() - done});
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

void bind_open_files(nb::module_& m) {
  m.def(
      "read_file",
      [](int fd, uint64_t offset, nb::handle target, const std::string& path) {
        const BufferView view(target, PyBUF_WRITABLE);
        const auto read = [fd](void* data, size_t n, uint64_t at, size_t* moved) {
          return read_fully(fd, data, n, at, moved);
        };
        return move_in_steps(read, view, offset, path);
      },
      nb::arg("fd"), nb::arg("offset"), nb::arg("target"), nb::arg("path") = "");
  m.def(
      "write_file",
      [](int fd, uint64_t offset, nb::handle source, const std::string& path,
         uint64_t piece_bytes) {
        const BufferView view(source);
        const auto write = [=](std::byte* data, size_t n, uint64_t at, size_t* moved) {
          if (piece_bytes == 0) return write_fully(fd, data, n, at, moved);
          int error = 0;
          while (*moved != n && error == 0) {
            const uint64_t begin = at + *moved;
            size_t written = 0;
            error = write_fully(fd, data + *moved,
                                std::min(n - *moved, piece_bytes - begin % piece_bytes), begin,
                                &written);
            *moved += written;
          }
          return error;
        };
        move_in_steps(write, view, offset, path);
      },
      nb::arg("fd"), nb::arg("offset"), nb::arg("source"), nb::arg("path") = "",
      nb::arg("piece_bytes") = 0);
}

void bind_host_memory(nb::module_& m) {
  m.def("lock_for_writing", &lock_for_writing, WithoutGil(), nb::arg("fd"));
  m.def(
      "open_file", [](const std::string& path, bool writable) { return open_file(path, writable); },
      WithoutGil(), nb::arg("path"), nb::arg("writable") = false);
  m.def("cached_pages", &cached_pages_of, nb::arg("fd"), nb::arg("offset"), nb::arg("nbytes"));
  m.def("residency", &residency_of, nb::arg("address"), nb::arg("nbytes"));
  m.def(
      "replace_mapping",
      [](uint64_t address, uint64_t nbytes) {
        const int error = unlocked([&] { return replace_mapping(address, nbytes); });
        if (error != 0) raise_os_error(error, std::strerror(error), "");
      },
      nb::arg("address"), nb::arg("nbytes"));
  m.def(
      "allocate",
      [](int fd, uint64_t nbytes) {
        // Not posix_fallocate, which writes into every block if the file system cannot do it.
        const int error = unlocked([&] {
          while (fallocate(fd, 0, 0, off_t(nbytes)) != 0) {
            if (errno != EINTR) return errno;
          }
          return 0;
        });
        if (error != 0) raise_os_error(error, std::strerror(error), "");
      },
      nb::arg("fd"), nb::arg("nbytes"));
  m.def("direct_io_alignment", &direct_io_alignment, nb::arg("path"));
  m.def("io_uring_available", [] {
    const std::string refusal = probe_io_uring();
    return std::make_pair(refusal.empty(), refusal.empty() ? "io_uring" : refusal);
  });
  nb::class_<HostMemory>(m, "HostMemory")
      .def(nb::init<size_t, size_t>(), nb::arg("nbytes"), nb::arg("alignment") = 4096)
      .def(nb::init<size_t, size_t, int, bool>(), nb::arg("nbytes"), nb::arg("alignment"),
           nb::arg("fd"), nb::arg("writable"))
      .def("keep_from_children", &HostMemory::keep_from_children)
      .def(
          "take_huge_page",
          [](const HostMemory& h, size_t begin) {
            return unlocked([&] { return h.take_huge_page(begin); });
          },
          nb::arg("begin"))
      .def_prop_ro("address",
                   [](HostMemory& h) { return reinterpret_cast<uintptr_t>(h.address()); })
      .def_prop_ro("nbytes", &HostMemory::nbytes);
}

}  // namespace

void bind_storage(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const OpenError& e) {
      PyErr_SetObject(PyExc_OSError, nb::make_tuple(e.error, std::string(e.what()), e.path).ptr());
    }
  });
  bind_storages(m);
  bind_image_storage(m);
  bind_open_files(m);
  bind_host_memory(m);
}
