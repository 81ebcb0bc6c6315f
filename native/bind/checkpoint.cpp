// The choice of a window in a checkpoint cache, on columns that numpy holds.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "checkpoint/window.h"

namespace nb = nanobind;
using fw::native::best_window;
using fw::native::Fragments;
using fw::native::kNever;
using fw::native::kUrgencyOfGap;
using fw::native::Window;

void bind_checkpoint(nb::module_& m);

namespace {

using Column = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// None, or (first, last, wait_ns, urgency, evicted_bytes).
nb::object window(const Column& nbytes, const Column& ready_ns, const Column& urgency,
                  const Column& pinned, int64_t size, int64_t now_ns, int64_t keep_urgency) {
  const size_t count = nbytes.size();
  if (ready_ns.size() != count || urgency.size() != count || pinned.size() != count) {
    throw nb::value_error("the columns differ in length");
  }
  if (size <= 0) throw nb::value_error("nbytes must be positive");
  const Fragments table{nbytes.data(), ready_ns.data(), urgency.data(), pinned.data(), count};
  const auto found = best_window(table, {size, now_ns, keep_urgency});
  if (!found) return nb::none();
  return nb::make_tuple(found->first, found->last, found->wait_ns, found->urgency,
                        found->evicted_bytes);
}

}  // namespace

void bind_checkpoint(nb::module_& m) {
  m.attr("NEVER_NS") = kNever;
  m.attr("URGENCY_OF_GAP") = kUrgencyOfGap;
  m.def("best_window", &window, nb::arg("nbytes"), nb::arg("ready_ns"), nb::arg("urgency"),
        nb::arg("pinned"), nb::kw_only(), nb::arg("size"), nb::arg("now_ns"),
        nb::arg("keep_urgency"),
        nb::sig(
            "def best_window(nbytes: Any, ready_ns: Any, urgency: Any, pinned: Any, *, size: int, "
            "now_ns: int, keep_urgency: int) -> "
            "tuple[int, int, int, int, int] | None"));
}
