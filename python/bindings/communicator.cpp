// Groups: ranks as threads of this process, and what every communicator can do.
#include "skim/communicator.hpp"

#include <array>
#include <cstring>

#include "python/bindings/bindings.hpp"
#include "skim/cost.hpp"

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

Link measure_link(Communicator& comm, std::size_t largest, double budget_s) {
  // fit_link needs two lengths. Checked on all ranks, because only rank 0 would fail.
  SKIM_EXPECTS(largest >= 4, "measure_link: largest must be at least 4 bytes (largest=" +
                                 std::to_string(largest) + ")");
  const std::vector<LinkSample> samples = ping_pong(comm, largest, budget_s);
  std::array<double, 2> numbers{};
  if (comm.rank() == 0) {
    const Link fitted = fit_link(samples);
    numbers = {fitted.alpha_s, fitted.beta_s_per_byte};
  }
  const Bytes mine = std::as_bytes(std::span(numbers));
  std::vector<std::byte> message(mine.begin(), mine.end());
  comm.broadcast(message, 0);
  std::memcpy(numbers.data(), message.data(), sizeof numbers);
  return {numbers[0], numbers[1]};
}

}  // namespace

void bind_communicator(nb::module_& m) {
  nb::class_<Traffic>(m, "Traffic",
                      "The payload that a rank has passed to the transport, without the "
                      "transport's own headers.")
      .def_ro("sent_bytes", &Traffic::sent_bytes)
      .def_ro("received_bytes", &Traffic::received_bytes)
      .def_ro("messages", &Traffic::messages)
      .def_ro("rounds", &Traffic::rounds);

  nb::class_<Communicator>(
      m, "Communicator",
      "One rank of a group. All ranks call collectives in the same order. Use it from one thread "
      "at a time. After a CommError the group cannot be used.")
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
          "message"_a, "root"_a = 0, "Returns the root's bytes on every rank. Collective.")
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
          "message"_a, nb::sig("def allgather(self, message: bytes) -> list[bytes]"),
          "Returns every rank's bytes, in rank order. Collective.")
      .def(
          "allreduce_sum",
          [](Communicator& self, FloatArray data) {
            const nb::gil_scoped_release no_gil;
            MessageList notes;
            self.allreduce_sum({data.data(), data.size()}, DenseSum::ring, {}, notes);
          },
          "data"_a.noconvert(),
          "Sums float32 data [n] over the ranks, in place. The sum is bitwise equal on all ranks. "
          "Collective.")
      .def("split", &Communicator::split, NoGil(), "color"_a,
           "Returns a communicator for the ranks that give the same color >= 0, ordered by rank. "
           "Collective.")
      .def_prop_ro("now_ns", &Communicator::now_ns,
                   "The time of this group's clock, in nanoseconds. In a simulated group it is "
                   "the time that links and processors would have taken.")
      .def("measure_link", &measure_link, NoGil(), nb::kw_only(), "largest"_a = 1 << 22,
           "budget_s"_a = 0.1,
           "Measures the link between rank 0 and the last rank, and returns it on every rank. "
           "Sends messages of up to `largest` bytes there and back, for about budget_s seconds "
           "per length. Collective. Raises InvalidArgument: fewer than two ranks, or largest < 4.")
      .def("abort", &Communicator::abort, "culprit"_a,
           "Ends the group. The other ranks' current and later waits raise a CommError that "
           "names the rank `culprit`.");

  m.def(
      "in_process_group",
      [](int size, double timeout) {
        return listed(make_in_process_group(size, with_timeout(timeout)));
      },
      "size"_a, nb::kw_only(), "timeout"_a = 60.0,
      nb::sig("def in_process_group(size: int, *, timeout: float = 60.0) -> list[Communicator]"),
      "Makes a whole group in this process. Element r is rank r's communicator; use each from a "
      "thread of its own. timeout: the longest time of one wait, in seconds.");
  m.def(
      "simulated_group",
      [](int size, const Link& link, bool processor_time, double timeout) {
        return listed(make_simulated_group(size, {link, processor_time}, with_timeout(timeout)));
      },
      "size"_a, "link"_a, nb::kw_only(), "processor_time"_a = true, "timeout"_a = 60.0,
      nb::sig("def simulated_group(size: int, link: Link, *, processor_time: bool = True, timeout: "
              "float = 60.0) -> list[Communicator]"),
      "Makes an in-process group on a simulated network. Communicator.now_ns gives the time that "
      "this network would take. processor_time=False: only the link takes time, so every run "
      "takes the same time. timeout is in real seconds.");
}

}  // namespace skim::python
