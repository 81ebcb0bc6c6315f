// Python bindings of the storages that `flashwarp.testing` offers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "bind/unlocked.h"
#include "testing/faulty_storage.h"
#include "testing/recording_storage.h"

namespace nb = nanobind;
using namespace fw::native;

void bind_testing(nb::module_& m);

namespace {

constexpr const char* kOperationNames[] = {"read",    "write",        "flush",
                                           "discard", "write_zeroes", "any"};
static_assert(std::size(kOperationNames) == kFaultOperations + 1);
constexpr const char* kKindNames[] = {"none", "error", "torn", "short", "delay", "flip", "hang"};
static_assert(std::size(kKindNames) == size_t(FaultKind::kHang) + 1);
constexpr const char* kEventNames[] = {"write", "discard",     "write_zeroes",
                                       "flush", "flush_range", "mark"};
static_assert(std::size(kEventNames) == size_t(RecordingStorage::Kind::kMark) + 1);

template <typename Value, size_t Count>
Value value_of(const char* const (&names)[Count], const std::string& name) {
  for (size_t i = 0; i < Count; ++i) {
    if (name == names[i]) return Value(i);
  }
  throw nb::value_error(("unknown name: " + name).c_str());
}

// operation, kind, errno, delay in us, probability, numbers, first byte, last byte + 1
using RuleTuple = std::tuple<std::string, std::string, int, uint64_t, double, std::vector<uint64_t>,
                             uint64_t, uint64_t>;

std::vector<FaultRule> to_rules(const std::vector<RuleTuple>& tuples) {
  std::vector<FaultRule> rules;
  for (const auto& [operation, kind, error, delay_us, probability, numbers, first, last] : tuples) {
    rules.push_back({value_of<FaultOperation>(kOperationNames, operation),
                     value_of<FaultKind>(kKindNames, kind), error, delay_us, probability, numbers,
                     first, last});
  }
  return rules;
}

nb::dict operations_of(FaultyStorage& storage) {
  nb::dict result;
  const auto counts = storage.plan().operations();
  for (size_t i = 0; i < counts.size(); ++i) result[kOperationNames[i]] = counts[i];
  return result;
}

nb::list events_of(const RecordingStorage& storage) {
  nb::list result;
  for (const RecordingStorage::Event& event : storage.events()) {
    result.append(nb::make_tuple(kEventNames[size_t(event.kind)], event.failed, event.begin,
                                 event.end, event.offset, event.nbytes,
                                 nb::bytes(event.data.data(), event.data.size())));
  }
  return result;
}

}  // namespace

void bind_testing(nb::module_& m) {
  nb::class_<FaultyStorage, Storage>(m, "FaultyStorage")
      .def(
          "__init__",
          [](FaultyStorage* self, std::shared_ptr<Storage> inner, uint64_t seed,
             const std::vector<RuleTuple>& rules, bool blocking) {
            auto plan = std::make_shared<FaultPlan>(seed, to_rules(rules));
            new (self) FaultyStorage(std::move(inner), std::move(plan), blocking);
          },
          nb::arg("inner"), nb::arg("seed"), nb::arg("rules"), nb::arg("blocking") = false)
      .def(
          "inject",
          [](FaultyStorage& s, uint64_t seed, const std::vector<RuleTuple>& rules) {
            s.plan().replace(seed, to_rules(rules));
          },
          nb::arg("seed"), nb::arg("rules"))
      .def("hits", [](FaultyStorage& s) { return s.plan().hits(); })
      .def("operations", &operations_of);

  nb::class_<RecordingStorage, Storage>(m, "RecordingStorage")
      .def(nb::init<std::shared_ptr<Storage>, uint64_t>(), nb::arg("inner"),
           nb::arg("data_nbytes_max"))
      .def("events", &events_of)
      .def("clear", &RecordingStorage::clear)
      .def("mark", &RecordingStorage::mark, nb::arg("label"), nb::call_guard<Unlocked>());
}
