// Python bindings of the requests of a client of a shared cache.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "base/require.h"
#include "bind/unlocked.h"
#include "sharing/requests.h"

namespace nb = nanobind;
using fw::cache::asked_request;
using fw::native::RequestClient;
using fw::native::RequestServer;
using fw::native::RequestTable;
using fw::native::require;
using fw::native::Unlocked;
using fw::native::unlocked;

void bind_sharing(nb::module_& m);

namespace {

// The requests as bytes: structures `cache::asked_request`.
nb::bytes wait(RequestServer& server) {
  const std::vector<asked_request> found = unlocked([&] { return server.wait(); });
  return nb::bytes(found.data(), found.size() * sizeof(asked_request));
}

// `begins` and `sizes` are the addresses of `count` numbers of 64 bits.
uint32_t move(RequestClient& client, uint32_t operation, uint64_t begins, uint64_t sizes,
              uint64_t count, uint64_t memory, uint64_t limit_ns) {
  require(operation >= fw::cache::kOwnerRead && operation <= fw::cache::kOwnerPrefetch,
          "there is no such operation");
  return unlocked([&] {
    return client.move(
        fw::cache::owner_operation(operation), reinterpret_cast<const uint64_t*>(begins),
        reinterpret_cast<const uint64_t*>(sizes), count, reinterpret_cast<char*>(memory), limit_ns);
  });
}

}  // namespace

void bind_sharing(nb::module_& m) {
  nb::class_<RequestServer>(m, "RequestServer")
      .def(nb::init<uint64_t, uint32_t, uint64_t>(), nb::arg("address"), nb::arg("count"),
           nb::arg("line_bytes"))
      .def("wait", &wait)
      .def("collect", &RequestServer::collect, nb::arg("slots"), nb::arg("bytes"),
           nb::arg("target"))
      .def("hand_out", &RequestServer::hand_out, nb::arg("slots"), nb::arg("bytes"),
           nb::arg("source"))
      .def("answer", &RequestServer::answer, nb::arg("slots"), nb::arg("status"))
      .def("stop", &RequestServer::stop);
  nb::class_<RequestClient>(m, "RequestClient")
      .def(nb::init<uint64_t, uint32_t, uint64_t>(), nb::arg("address"), nb::arg("count"),
           nb::arg("line_bytes"))
      .def_prop_ro("address", &RequestClient::address)
      .def("move", &move, nb::arg("operation"), nb::arg("begins"), nb::arg("sizes"),
           nb::arg("count"), nb::arg("memory"), nb::arg("limit_ns"))
      .def("lose", &RequestClient::lose);
  m.def("request_bytes", &RequestTable::bytes, nb::arg("count"), nb::arg("line_bytes"));
}
