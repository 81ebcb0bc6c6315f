// Python bindings of the requests of a client of a shared cache.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "bind/unlocked.h"
#include "sharing/requests.h"

namespace nb = nanobind;
using fw::cache::asked_request;
using fw::cache::owner_requests;
using fw::native::RequestServer;
using fw::native::RequestTable;
using fw::native::Unlocked;
using fw::native::unlocked;

void bind_sharing(nb::module_& m);

namespace {

// The requests as bytes: structures `cache::asked_request`.
nb::bytes wait(RequestServer& server) {
  const std::vector<asked_request> found = unlocked([&] { return server.wait(); });
  return nb::bytes(found.data(), found.size() * sizeof(asked_request));
}

// The structure `cache::owner_requests` as bytes; see `RequestTable::for_client`.
nb::bytes requests_of(uint64_t address, uint32_t count, uint64_t line_bytes, uint64_t holders) {
  const RequestTable table = RequestTable::at(address, count, line_bytes);
  const owner_requests made = table.for_client(reinterpret_cast<uint32_t*>(holders));
  return nb::bytes(&made, sizeof(made));
}

}  // namespace

void bind_sharing(nb::module_& m) {
  nb::class_<RequestServer>(m, "RequestServer")
      .def(nb::init<uint64_t, uint32_t, uint64_t, bool>(), nb::arg("address"), nb::arg("count"),
           nb::arg("line_bytes"), nb::arg("bell"))
      .def("wait", &wait)
      .def("collect", &RequestServer::collect, nb::arg("slots"), nb::arg("bytes"),
           nb::arg("target"))
      .def("hand_out", &RequestServer::hand_out, nb::arg("slots"), nb::arg("bytes"),
           nb::arg("source"))
      .def("read", &RequestServer::read, nb::arg("threads"), nb::arg("storage"), nb::arg("slots"),
           nb::arg("offsets"), nb::arg("nbytes"), nb::arg("step"), nb::call_guard<Unlocked>())
      .def("answer", &RequestServer::answer, nb::arg("slots"), nb::arg("status"))
      .def("stop", &RequestServer::stop);
  m.def("request_bytes", &RequestTable::bytes, nb::arg("count"), nb::arg("line_bytes"));
  m.def("requests_of", &requests_of, nb::arg("address"), nb::arg("count"), nb::arg("line_bytes"),
        nb::arg("holders"));
}
