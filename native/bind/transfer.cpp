// Python bindings of the host's copies: by a thread in order, and gathered by several threads.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <tuple>
#include <vector>

#include "base/require.h"
#include "bind/unlocked.h"
#include "transfer/gatherer.h"
#include "transfer/host_copier.h"

namespace nb = nanobind;
using fw::native::CopyPiece;
using fw::native::Gatherer;
using fw::native::HostCopier;
using fw::native::require;
using fw::native::Unlocked;
using fw::native::unlocked;

void bind_transfer(nb::module_& m);

namespace {

using Pieces = std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>;

// No line of Python runs between the two steps, so no signal handler does.
uint64_t copy_and_append(HostCopier& copier, const Pieces& pieces, nb::object entries,
                         nb::object entry) {
  std::vector<CopyPiece> each;
  each.reserve(pieces.size());
  for (const auto& [target, source, nbytes] : pieces) each.push_back({target, source, nbytes});
  const uint64_t number = copier.copy(std::move(each));
  entry.attr("number") = number;
  entries.attr("append")(entry);
  return number;
}

std::vector<std::tuple<uint64_t, int64_t, uint64_t, bool>> results(const HostCopier& copier) {
  std::vector<std::tuple<uint64_t, int64_t, uint64_t, bool>> found;
  for (const HostCopier::Ended& each : copier.results()) {
    found.emplace_back(each.number, each.failed, each.nanoseconds, each.withdrawn);
  }
  return found;
}

Gatherer::Pieces pieces_of(uint64_t buffer, uint64_t offsets, uint64_t count,
                           uint64_t piece_bytes) {
  require(piece_bytes > 0, "pieces must have one byte at least");
  return {buffer, reinterpret_cast<const int64_t*>(offsets), count, piece_bytes};
}

// The errno value of the first piece that failed, or 0, and its index.
using Outcome = std::tuple<int, uint64_t>;

// `offsets` is the address of `count` integers of 64 bits, and `checksums` that of as many of 32,
// or 0.
Outcome gather_pieces(Gatherer& gatherer, uint64_t buffer, uint64_t base, uint64_t offsets,
                      uint64_t count, uint64_t piece_bytes, uint64_t checksums) {
  const Gatherer::Pieces pieces = pieces_of(buffer, offsets, count, piece_bytes);
  auto* const sums = reinterpret_cast<uint32_t*>(checksums);
  const Gatherer::Outcome outcome = unlocked([&] { return gatherer.gather(base, pieces, sums); });
  return {outcome.error, outcome.piece};
}

Outcome read_pieces(Gatherer& gatherer, uint64_t buffer, int fd, uint64_t offsets, uint64_t count,
                    uint64_t piece_bytes) {
  const Gatherer::Pieces pieces = pieces_of(buffer, offsets, count, piece_bytes);
  const Gatherer::Outcome outcome = unlocked([&] { return gatherer.read(fd, pieces); });
  return {outcome.error, outcome.piece};
}

// Words that the host and streams share.

uint64_t load_word(uint64_t address) {
  // Acquire: what was copied before the word was stored is visible after it.
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(address))
      .load(std::memory_order_acquire);
}

void store_word(uint64_t address, uint64_t value) {
  // Release: who sees the word sees what this thread has written before.
  std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(address))
      .store(value, std::memory_order_release);
}

}  // namespace

void bind_transfer(nb::module_& m) {
  nb::class_<HostCopier>(m, "HostCopier")
      .def(nb::init<>())
      .def("copy_and_append", &copy_and_append, nb::arg("pieces"), nb::arg("entries"),
           nb::arg("entry"))
      .def("wait_word", &HostCopier::wait_word, nb::arg("word"), nb::arg("value"))
      .def("write_word", &HostCopier::write_word, nb::arg("word"), nb::arg("value"))
      .def_prop_ro("ended", &HostCopier::ended)
      .def("wait", &HostCopier::wait, nb::arg("number"), nb::arg("microseconds"),
           nb::call_guard<Unlocked>())
      .def("results", &results)
      .def("forget", &HostCopier::forget, nb::arg("last_number"))
      .def_prop_ro("ended_address", &HostCopier::ended_address)
      .def("stop", &HostCopier::stop, nb::call_guard<Unlocked>());
  nb::class_<Gatherer>(m, "Gatherer")
      .def(nb::init<uint32_t, uint32_t>(), nb::arg("threads"),
           nb::arg("in_flight") = Gatherer::kInFlight)
      .def_prop_ro("threads", &Gatherer::threads)
      .def_prop_ro("file_engine", &Gatherer::file_engine)
      .def("gather", &gather_pieces, nb::arg("buffer"), nb::arg("base"), nb::arg("offsets"),
           nb::arg("count"), nb::arg("piece_bytes"), nb::arg("checksums") = 0)
      .def("read", &read_pieces, nb::arg("buffer"), nb::arg("fd"), nb::arg("offsets"),
           nb::arg("count"), nb::arg("piece_bytes"))
      .def("stop", &Gatherer::stop, nb::call_guard<Unlocked>());
  m.def("load_word", &load_word, nb::arg("address"));
  m.def("store_word", &store_word, nb::arg("address"), nb::arg("value"));
}
