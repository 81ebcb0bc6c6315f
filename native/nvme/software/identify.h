// The Identify data of the software controller and its one namespace.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fw::native {

inline constexpr size_t kIdentifyBytes = 4096;
using IdentifyData = std::array<std::byte, kIdentifyBytes>;

IdentifyData identify_controller(uint64_t max_transfer_bytes);
IdentifyData identify_namespace(uint64_t nbytes, bool writable);
IdentifyData identify_active_namespaces(uint32_t after_nsid);

}  // namespace fw::native
