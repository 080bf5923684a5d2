// Groups: ranks as threads of this process, and what every communicator can do.
#include "skim/communicator.hpp"

#include "bindings.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;
using NoGil = nb::call_guard<nb::gil_scoped_release>;

CommOptions with_timeout(double timeout_s) {
  SKIM_EXPECTS(timeout_s > 0.0 && timeout_s < 1e9,
               "timeout must be > 0 seconds (timeout=" + std::to_string(timeout_s) + ")");
  CommOptions o;
  o.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1e3));
  return o;
}

nb::list listed(std::vector<std::unique_ptr<Communicator>> group) {
  nb::list list;
  for (auto& comm : group) list.append(nb::cast(std::move(comm)));
  return list;
}

Bytes bytes_of(const nb::bytes& b) { return std::as_bytes(std::span(b.c_str(), b.size())); }
nb::bytes to_python(Bytes b) { return nb::bytes(b.data(), b.size()); }

}  // namespace

void bind_communicator(nb::module_& m) {
  nb::class_<Traffic>(m, "Traffic", "Payload bytes of a rank, as passed to the transport.")
      .def_ro("sent_bytes", &Traffic::sent_bytes)
      .def_ro("received_bytes", &Traffic::received_bytes)
      .def_ro("messages", &Traffic::messages)
      .def_ro("rounds", &Traffic::rounds);

  nb::class_<Communicator>(
      m, "Communicator",
      "One rank of a group. Collectives are called by all ranks in the same order, by one thread.")
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("traffic", &Communicator::traffic, nb::rv_policy::copy)
      .def("barrier", &Communicator::barrier, NoGil())
      .def(
          "broadcast",
          [](Communicator& self, const nb::bytes& message, int root) {
            std::vector<std::byte> data;
            const Bytes mine = bytes_of(message);
            if (self.rank() == root) data.assign(mine.begin(), mine.end());
            {
              const nb::gil_scoped_release no_gil;
              self.broadcast(data, root);
            }
            return to_python(data);
          },
          "message"_a, "root"_a = 0, "The root's bytes, on every rank.")
      .def(
          "allgather",
          [](Communicator& self, const nb::bytes& message) {
            MessageList all;
            const Bytes mine = bytes_of(message);
            {
              const nb::gil_scoped_release no_gil;
              self.allgather(mine, all);
            }
            nb::list list;
            for (std::size_t r = 0; r < all.size(); ++r) list.append(to_python(all[r]));
            return list;
          },
          "message"_a, "Every rank's bytes, by rank.")
      .def(
          "allreduce_sum",
          [](Communicator& self, FloatArray data) {
            const nb::gil_scoped_release no_gil;
            MessageList notes;
            self.allreduce_sum({data.data(), data.size()}, DenseSum::ring, {}, notes);
          },
          "data"_a, "Sums over the ranks, in place; bitwise equal on all of them.")
      .def("split", &Communicator::split, NoGil(), "color"_a,
           "The ranks of equal color >= 0, as a group of their own. Collective.")
      .def("abort", &Communicator::abort, "culprit"_a,
           "Ends what the other ranks wait for: they get a CommError that names culprit.");

  m.def(
      "in_process_group",
      [](int size, double timeout) {
        return listed(make_in_process_group(size, with_timeout(timeout)));
      },
      "size"_a, nb::kw_only(), "timeout"_a = 60.0,
      nb::sig("def in_process_group(size: int, *, timeout: float = 60.0) -> list[Communicator]"),
      "A whole group in this process: element r is for a thread of its own.");
}

}  // namespace skim::python
