// Python bindings of drives that this process drives itself.
//
// What goes wrong with a drive is a DriveFailure, whose arguments are the kind of failure (see
// vfio/drive_error.h), the text, an errno and an NVMe status. `nvme/vfio.py` makes typed errors of
// it. Calls that may wait release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>

#include "bind/convert.h"
#include "bind/unlocked.h"
#include "vfio/drive.h"
#include "vfio/drive_queues.h"
#include "vfio/iommu.h"
#include "vfio/namespace_storage.h"
#include "vfio/vfio_function.h"

namespace nb = nanobind;
using namespace fw::native;
using namespace fw::native::vfio;

void bind_vfio(nb::module_& m);

namespace {

PyObject* drive_failure = nullptr;

const char* name_of(DriveError::Kind kind) {
  switch (kind) {
    case DriveError::Kind::kSystem:
      return "system";
    case DriveError::Kind::kTimeout:
      return "timeout";
    case DriveError::Kind::kLost:
      return "lost";
    case DriveError::Kind::kStatus:
      return "status";
    case DriveError::Kind::kUnfit:
      return "unfit";
  }
  return "";
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const DriveError& error) {
    const nb::tuple arguments =
        nb::make_tuple(name_of(error.kind), error.what(), error.error, error.status);
    PyErr_SetObject(drive_failure, arguments.ptr());
  }
}

std::shared_ptr<Drive> open_drive(const std::string& bdf, const std::string& group,
                                  const std::string& cdev, int64_t limit_ms) {
  const Unlocked unlocked;
  auto iommu = cdev.empty() ? open_type1(bdf, group) : open_iommufd(bdf, cdev);
  return std::make_shared<Drive>(std::make_shared<VfioFunction>(bdf, std::move(iommu)), limit_ms);
}

nb::dict identity_of(const Drive& drive) {
  const DriveIdentity& d = drive.identity();
  const Capabilities& c = drive.capabilities();
  nb::dict result;
  result["model"] = d.model;
  result["serial"] = d.serial;
  result["firmware"] = d.firmware;
  result["subsystem"] = d.subsystem;
  result["controller"] = d.controller;
  result["version"] = d.version;
  result["transfer_bytes_max"] = d.transfer_bytes_max;
  result["namespaces_max"] = d.namespaces_max;
  result["write_zeroes"] = d.has_write_zeroes;
  result["dataset_management"] = d.has_dataset_management;
  result["volatile_cache"] = d.has_volatile_cache;
  result["queue_pairs_max"] = drive.queue_pairs_max();
  result["entries_max"] = c.entries_max;
  result["ready_limit_ms"] = c.ready_limit_ms;
  result["doorbell_stride"] = c.doorbell_stride;
  result["iommu"] = drive.function()->iommu();
  return result;
}

nb::dict identity_of(const NamespaceIdentity& n) {
  nb::dict result;
  result["lbas"] = n.lbas;
  result["lba_shift"] = n.lba_shift;
  result["metadata_bytes"] = n.metadata_bytes;
  result["protection"] = n.protection;
  result["write_protected"] = n.write_protected;
  result["shared"] = n.shared;
  return result;
}

nb::list error_log_of(Drive& drive) {
  nb::list result;
  for (const ErrorLogEntry& e : unlocked([&] { return drive.error_log(); })) {
    nb::dict entry;
    entry["count"] = e.count;
    entry["queue"] = e.queue;
    entry["cid"] = e.cid;
    entry["status"] = uint16_t(e.status & 0x7FF);
    entry["lba"] = e.lba;
    entry["nsid"] = e.nsid;
    result.append(entry);
  }
  return result;
}

using Range = std::pair<uint64_t, uint64_t>;

}  // namespace

void bind_vfio(nb::module_& m) {
  // By the name that the module was imported by, which is another one where its types are written.
  const std::string name = nb::cast<std::string>(m.attr("__name__")) + ".DriveFailure";
  drive_failure = PyErr_NewExceptionWithDoc(
      name.c_str(), "Arguments: kind, text, errno, NVMe status.", PyExc_RuntimeError, nullptr);
  m.attr("DriveFailure") = nb::handle(drive_failure);
  nb::register_exception_translator(&translate);

  nb::class_<Drive>(m, "Drive")
      .def_static("open", &open_drive, nb::arg("bdf"), nb::arg("group"), nb::arg("cdev"),
                  nb::arg("limit_ms"))
      .def("identity", [](const Drive& d) { return identity_of(d); })
      .def("namespaces", &Drive::namespaces, WithoutGil())
      .def(
          "identify_namespace",
          [](Drive& d, uint32_t nsid) {
            return identity_of(unlocked([&] { return d.identify_namespace(nsid); }));
          },
          nb::arg("nsid"))
      .def("error_log", &error_log_of)
      .def("abort", &Drive::abort, nb::arg("queue"), nb::arg("cid"), WithoutGil())
      .def("transfer_bytes_max", &Drive::transfer_bytes_max, nb::arg("lba_shift"))
      .def("reset", &Drive::reset, nb::arg("function"), WithoutGil())
      .def("close", &Drive::close, WithoutGil())
      .def_prop_ro("lost", &Drive::lost);

  m.def("try_iommufd", &try_iommufd, nb::arg("file"), nb::arg("nbytes"), WithoutGil());

  nb::class_<NamespaceStorage, Storage>(m, "NamespaceStorage")
      .def(
          "__init__",
          [](NamespaceStorage* self, std::shared_ptr<Drive> drive, uint32_t nsid, bool writable) {
            const Unlocked unlocked;
            const NamespaceIdentity identity = drive->identify_namespace(nsid);
            new (self) NamespaceStorage(std::move(drive), nsid, identity, writable);
          },
          nb::arg("drive"), nb::arg("nsid"), nb::arg("writable"));

  nb::class_<DataRegion>(m, "DriveData")
      .def(
          "__init__",
          [](DataRegion* self, const std::shared_ptr<Drive>& drive, Range range,
             uint64_t transfer_bytes_max, int file) {
            const Unlocked unlocked;
            new (self)
                DataRegion(drive->function(), range.first, range.second, transfer_bytes_max, file);
          },
          nb::arg("drive"), nb::arg("range"), nb::arg("transfer_bytes_max"),
          nb::arg("file") = kNoFile)
      .def(
          "addressing",
          [](const DataRegion& region, uint32_t nsid, uint32_t lba_shift) {
            const fw::nvme::drive_addressing d = region.addressing(nsid, lba_shift);
            return nb::bytes(reinterpret_cast<const char*>(&d), sizeof d);
          },
          nb::arg("nsid"), nb::arg("lba_shift"));

  nb::class_<QueueLease>(m, "QueueLease")
      .def(nb::init<std::shared_ptr<Drive>, uint32_t>(), nb::arg("drive"), nb::arg("count"))
      .def_prop_ro("ids", &QueueLease::ids)
      .def_prop_ro("doorbells", &QueueLease::doorbells)
      .def_prop_ro("registers",
                   [](const QueueLease& lease) {
                     return Range(lease.registers().address(), lease.registers().nbytes());
                   })
      .def("hold", &QueueLease::hold)
      .def("release", &QueueLease::release);

  nb::class_<DriveQueues, Controller>(m, "DriveQueues")
      .def(
          "__init__",
          [](DriveQueues* self, std::shared_ptr<QueueLease> lease,
             std::vector<QueuePairAddresses> queue_pairs, Range rings,
             std::shared_ptr<DataRegion> data, nb::object, int rings_file) {
            const Unlocked unlocked;
            new (self) DriveQueues(std::move(lease), std::move(queue_pairs), rings, std::move(data),
                                   rings_file);
          },
          nb::arg("lease"), nb::arg("queue_pairs"), nb::arg("rings"), nb::arg("data"),
          nb::arg("keeps") = nb::none(), nb::arg("rings_file") = kNoFile,
          // What holds the rings and the memory that commands name: the drive outlives no queue.
          nb::keep_alive<1, 6>())
      .def("retire", &DriveQueues::retire, nb::arg("why"), WithoutGil())
      .def("set_failed_words", &DriveQueues::set_failed_words, nb::arg("addresses"))
      .def_prop_ro("lost", &DriveQueues::lost);
}
