// Checksums of buffers, without the GIL.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>

#include "base/crc32c.h"
#include "bind/buffer_view.h"
#include "bind/unlocked.h"

namespace nb = nanobind;
using namespace fw::native;

void bind_checksum(nb::module_& m);

namespace {

// The checksums of pieces of `chunk_bytes`, of which the first has `first_bytes` and the last what
// is left, as uint32 of this machine one behind the other.
nb::bytes chunk_checksums(nb::handle source, uint64_t chunk_bytes, uint64_t first_bytes) {
  if (chunk_bytes == 0 || first_bytes == 0) throw nb::value_error("a chunk has at least one byte");
  const BufferView view(source);
  const size_t n = view.nbytes();
  size_t count = n == 0 ? 0 : 1;
  if (n > first_bytes) count += (n - first_bytes + chunk_bytes - 1) / chunk_bytes;
  nb::bytes result(nullptr, count * sizeof(uint32_t));
  auto* into = reinterpret_cast<uint32_t*>(PyBytes_AsString(result.ptr()));
  unlocked([&] {
    const auto* at = static_cast<const uint8_t*>(view.data());
    size_t left = n;
    for (size_t i = 0; i < count; i++) {
      const size_t piece = std::min<size_t>(left, i == 0 ? first_bytes : chunk_bytes);
      into[i] = crc32c(0, at, piece);
      at += piece;
      left -= piece;
    }
  });
  return result;
}

}  // namespace

void bind_checksum(nb::module_& m) {
  m.def(
      "crc32c",
      [](nb::handle source, uint32_t value) {
        const BufferView view(source);
        return unlocked([&] { return crc32c(value, view.data(), view.nbytes()); });
      },
      nb::arg("source"), nb::arg("value") = 0);
  m.def(
      "crc32c_portable",
      [](nb::handle source, uint32_t value) {
        const BufferView view(source);
        return unlocked([&] { return crc32c_portable(value, view.data(), view.nbytes()); });
      },
      nb::arg("source"), nb::arg("value") = 0);
  m.def("crc32c_combine", &crc32c_combine, nb::arg("first"), nb::arg("second"),
        nb::arg("second_nbytes"));
  m.def("crc32c_chunks", &chunk_checksums, nb::arg("source"), nb::arg("chunk_bytes"),
        nb::arg("first_bytes"));
  m.def("crc32c_engine", &crc32c_engine);
}
