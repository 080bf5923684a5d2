// Exchanges over a group.
#include "skim/exchange.hpp"

#include <nanobind/stl/optional.h>

#include <optional>

#include "python/bindings/arrays.hpp"
#include "python/bindings/keywords.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;

class BoundExchange {
 public:
  BoundExchange(const ExchangeOptions& options, Communicator& group)
      : comm(group), exchange(make_exchange(options)), codec_(options.codec) {}

  // Checks what Exchange::run requires of its input. Throws: InvalidArgument.
  SparseView read(StepId id, const Numbers& indices, const Floats& values, std::size_t n) {
    read_sparse("run", indices, values, n, mine_);
    if (codec_.options().value == ValueCode::f32) return mine_.view();
    rounded_.assign(mine_.view());
    codec_.quantize(rounded_, id, comm.rank());
    SKIM_EXPECTS(std::ranges::equal(rounded_.values(), mine_.values()),
                 "run: values must be as Codec.quantize leaves them (with stream=" +
                     std::to_string(comm.rank()) + ")");
    return mine_.view();
  }

  Communicator& comm;
  std::unique_ptr<Exchange> exchange;

 private:
  Codec codec_;
  SparseBuffer mine_, rounded_;
};

struct Result {
  std::optional<Array<Index>> indices;
  std::optional<Array<float>> values, dense;
  Array<Index> returned_indices;
  Array<float> returned_values;
  GroupStats stats;
};

Result run(BoundExchange& self, const Numbers& indices, const Floats& values, std::size_t n,
           std::size_t k, std::size_t k_down, std::uint64_t step, Slot slot, GroupStats stats) {
  SKIM_EXPECTS(0 < k && k <= n && k_down <= n,
               "run: needs 0 < k <= n and k_down <= n (k=" + std::to_string(k) +
                   ", k_down=" + std::to_string(k_down) + ", n=" + std::to_string(n) + ")");
  const SparseView mine = self.read({step, slot}, indices, values, n);
  ExchangeResult got;
  {
    const nb::gil_scoped_release no_gil;
    got = self.exchange->run({step, slot}, mine, {.k = k, .k_down = k_down}, stats, self.comm);
  }
  Result r{{}, {}, {}, to_array(got.returned.index), to_array(got.returned.value), stats};
  if (got.dense_sum.empty()) {
    r.indices = to_array(got.sum.index);
    r.values = to_array(got.sum.value);
  } else {
    r.dense = to_array(std::span<const float>(got.dense_sum.span()));
  }
  return r;
}

std::pair<std::size_t, Array<float>> held(BoundExchange& self, Slot slot) {
  HeldMass* const holder = self.exchange->held_mass();
  const HeldMass::Piece h = holder != nullptr ? holder->held(slot) : HeldMass::Piece{};
  return {h.first, to_array(std::span<const float>(h.mass.span()))};
}

Sparse flush(BoundExchange& self, Slot slot, std::size_t n) {
  SparseBuffer returned;
  returned.reset(n);
  if (HeldMass* const holder = self.exchange->held_mass()) holder->flush(slot, returned);
  return to_arrays(returned.view());
}

}  // namespace

void bind_exchange(nb::module_& m) {
  nb::class_<Result>(m, "ExchangeResult", "The result of one exchange on this rank.")
      .def_ro("indices", &Result::indices, nb::rv_policy::reference,
              "uint32: indices of the sum over the ranks, equal on all ranks; None if the sum is "
              "dense.")
      .def_ro("values", &Result::values, nb::rv_policy::reference,
              "float32: values of the sum (not of the mean), bitwise equal on all ranks; None if "
              "the sum is dense.")
      .def_ro("dense", &Result::dense, nb::rv_policy::reference,
              "float32 [n]: the sum, if the exchange made it dense; None otherwise.")
      .def_ro("returned_indices", &Result::returned_indices, nb::rv_policy::reference)
      .def_ro("returned_values", &Result::returned_values, nb::rv_policy::reference,
              "Values that the exchange gives back at returned_indices. Add them to this rank's "
              "residual: ErrorFeedback.commit(returned=...).")
      .def_ro("stats", &Result::stats, "Statistics over all ranks, equal on all ranks.");

  nb::class_<ExchangeRow>(m, "ExchangeRow",
                          "The properties of an exchange. skim.exchanges has one for each name.")
      .def_prop_ro("name", [](const ExchangeRow& r) { return r.name; })
      .def_prop_ro(
          "selects", [](const ExchangeRow& r) { return r.make != nullptr; },
          "Whether ranks select entries. False only for 'dense', which sums whole gradients.")
      .def_ro("holds_mass", &ExchangeRow::holds_mass,
              "Whether it keeps mass from step to step, as a server does.")
      .def_prop_ro(
          "cuts_result", [](const ExchangeRow& r) { return cuts_result({.kind = r.kind}); },
          "Whether it selects from the sum with its default options, so that k_down counts.")
      .def_ro("nests", &ExchangeRow::nests, "Whether it may be a part of 'hierarchical'.")
      .def_ro("needs_hosts", &ExchangeRow::needs_hosts,
              "Whether it differs from its parts only if hosts have several ranks.")
      .def_ro("delivers_all", &ExchangeRow::delivers_all,
              "Whether the result has every entry that any rank sent. A chooser takes these "
              "exchanges by default.")
      .def("__repr__",
           [](const ExchangeRow& r) { return "<skim.ExchangeRow '" + std::string(r.name) + "'>"; });
  nb::dict rows;
  for (const ExchangeRow& row : exchange_rows()) {
    rows[nb::str(row.name.data(), row.name.size())] = nb::cast(&row, nb::rv_policy::reference);
  }
  m.attr("exchanges") = nb::module_::import_("types").attr("MappingProxyType")(rows);

  const auto help = KeywordHelp::of<ExchangeOptions>();
  const std::string signature =
      "def __init__(self, comm: Communicator, " + help.signature("*, ") + ") -> None";
  nb::class_<BoundExchange>(
      m, "Exchange",
      "Sums sparse gradients over a group. All ranks call run() in the same order, with equal "
      "step, slot, n, k and k_down. Use it from one thread at a time.")
      .def(
          "__init__",
          [](BoundExchange* self, Communicator& comm, const nb::object& kind, nb::kwargs options) {
            options["exchange"] = kind;
            new (self)
                BoundExchange(read_keywords<ExchangeOptions>("skim.Exchange", options), comm);
          },
          "comm"_a, "exchange"_a = name_of(ExchangeOptions{}.kind), "options"_a,
          nb::keep_alive<1, 2>(), nb::sig(signature.c_str()),
          (help.text() +
           "Raises InvalidArgument: exchange='dense' (use Communicator.allreduce_sum); an option "
           "out of range.")
              .c_str())
      .def("run", &run, "indices"_a, "values"_a, "n"_a, nb::kw_only(), "k"_a, "k_down"_a = 0,
           "step"_a = 0, "slot"_a = 0, "stats"_a = GroupStats{},
           "Sums sparse gradients over the ranks. Collective.\n"
           "  indices  strictly ascending, each below n; ranks may pass different numbers of "
           "them, or none\n"
           "  values   float32, as Codec.quantize returned them with stream=rank\n"
           "  n        entries of the bucket\n"
           "  k        entries per rank that the selector was asked for, in (0, n]\n"
           "  k_down   entries of the result, if the exchange compresses it too; 0: k\n"
           "  stats    this rank's statistics; ExchangeResult.stats has the group's\n"
           "Raises InvalidArgument, before anything is sent; CommError.")
      .def_prop_ro("name",
                   [](const BoundExchange& self) { return std::string(self.exchange->name()); })
      .def_prop_ro(
          "contributors",
          [](BoundExchange& self) {
            HeldMass* const holder = self.exchange->held_mass();
            const int ranks = self.comm.size();
            return holder != nullptr ? holder->contributors(ranks) : ranks;
          },
          "The number of ranks that have gradients: the divisor of the mean.")
      .def_prop_ro(
          "union_entries",
          [](BoundExchange& self) {
            HeldMass* const holder = self.exchange->held_mass();
            return holder != nullptr ? holder->union_entries() : 0;
          },
          "The number of distinct indices that this rank summed on behalf of the group in the last "
          "run(); 0 if it summed none.")
      .def(
          "max_sent_bytes",
          [](const BoundExchange& self, std::size_t n, std::size_t k, std::size_t k_down) {
            return self.exchange->max_sent_bytes(n, {.k = k, .k_down = k_down}, self.comm.size());
          },
          "n"_a, nb::kw_only(), "k"_a, "k_down"_a = 0,
          "The most bytes that a rank sends in one run(), if no rank selects more than k entries; "
          "inf: there is no bound.")
      .def("held", &held, "slot"_a,
           "Returns the mass that this rank holds of the slot, as a server: the index of its "
           "first entry, and a copy of the values.")
      .def("flush", &flush, "slot"_a, "n"_a,
           "Gives up the held mass. Returns its indices and values; add them to this rank's "
           "residual. n: entries of the slot.")
      .def(
          "end_step", [](BoundExchange& self) { self.exchange->end_step(); },
          "Makes the changes of this step permanent. Call it together with "
          "ErrorFeedback.end_step().")
      .def("rollback_step", [](BoundExchange& self) { self.exchange->rollback_step(); })
      .def(
          "save",
          [](const BoundExchange& self) {
            return saved([&](std::ostream& out) { self.exchange->save(out); });
          },
          "Returns the state that carries over between steps, as bytes. It does not include held "
          "mass: flush that first.")
      .def(
          "load",
          [](BoundExchange& self, const State& state) {
            self.exchange->load(States(state).front());
          },
          "state"_a,
          "state: from save() of an Exchange with the same options, on the same rank of a group "
          "of the same size.");
}

}  // namespace skim::python
