// Used by several bindings: descriptions and errors as dicts, and the message for a forked child.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <variant>

#include "bind/unlocked.h"
#include "nvme/error_log.h"
#include "storage/storage.h"

namespace fw::native {

namespace nb = nanobind;

using WithoutGil = nb::call_guard<Unlocked>;
inline constexpr const char* kForkMessage =
    "opened before fork(): its threads exist in the parent process only; open it again here";

inline nb::dict to_dict(const Description& description) {
  nb::dict result;
  for (const auto& [name, value] : description.facts) {
    std::visit([&](const auto& fact) { result[name.c_str()] = nb::cast(fact); }, value);
  }
  if (!description.children.empty()) {
    nb::list members;
    for (const Description& child : description.children) members.append(to_dict(child));
    result["members"] = members;
  }
  return result;
}

template <typename Server>
nb::list take_errors(Server& server) {
  nb::list result;
  for (const ErrorRecord& record : server.take_errors()) {
    nb::dict one;
    one["op"] = record.operation;
    one["path"] = record.path;
    one["offset"] = record.file_offset;
    one["nbytes"] = record.nbytes;
    one["errno"] = record.error;
    one["reason"] = record.reason;
    one["status"] = record.status;
    one["lba"] = record.lba;
    one["queue"] = record.queue;
    one["cid"] = record.cid;
    one["recovered"] = record.recovered;
    one["time"] = record.unix_time;
    result.append(one);
  }
  return result;
}

}  // namespace fw::native
