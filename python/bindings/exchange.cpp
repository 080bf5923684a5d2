// Exchanges over a group.
#include "skim/exchange.hpp"

#include <nanobind/stl/optional.h>

#include <optional>

#include "python/bindings/arrays.hpp"
#include "python/bindings/parts.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;

class BoundExchange {
 public:
  BoundExchange(const ExchangeOptions& options, Communicator& group)
      : comm(group), exchange(make_exchange(options)), codec_(options.codec) {}

  // Checked, as Exchange::run requires it. Throws: InvalidArgument.
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
  nb::class_<Result>(m, "ExchangeResult", "What one exchange gave this rank.")
      .def_ro("indices", &Result::indices, nb::rv_policy::reference,
              "Of the sum over the ranks, bitwise equal on all of them; None if it came dense.")
      .def_ro("values", &Result::values, nb::rv_policy::reference, "Of the sum, not of the mean.")
      .def_ro("dense", &Result::dense, nb::rv_policy::reference,
              "The sum [n], where it filled up; None otherwise.")
      .def_ro("returned_indices", &Result::returned_indices, nb::rv_policy::reference)
      .def_ro("returned_values", &Result::returned_values, nb::rv_policy::reference,
              "Mass that belongs to this rank's residual: ErrorFeedback.commit(returned=...).")
      .def_ro("stats", &Result::stats, "Over all ranks, equal on all of them.");

  nb::class_<ExchangeRow>(m, "ExchangeRow", "What is known of an exchange: skim.exchanges.")
      .def_prop_ro("name", [](const ExchangeRow& r) { return r.name; })
      .def_prop_ro(
          "selects", [](const ExchangeRow& r) { return r.make != nullptr; },
          "False: 'dense', which sums whole gradients.")
      .def_ro("holds_mass", &ExchangeRow::holds_mass, "A server keeps mass from step to step.")
      .def_ro("cuts_result", &ExchangeRow::cuts_result, "Selects from the sum: k_down counts.")
      .def_ro("nests", &ExchangeRow::nests, "May be a part of 'hierarchical'.")
      .def_ro("needs_hosts", &ExchangeRow::needs_hosts,
              "Differs from its parts only where hosts have several ranks.")
      .def_ro("is_candidate", &ExchangeRow::is_candidate,
              "A chooser tries it unless told otherwise.")
      .def("__repr__",
           [](const ExchangeRow& r) { return "<skim.ExchangeRow '" + std::string(r.name) + "'>"; });
  nb::dict rows;
  for (const ExchangeRow& row : exchange_rows()) {
    rows[nb::str(row.name.data(), row.name.size())] = nb::cast(&row, nb::rv_policy::reference);
  }
  m.attr("exchanges") = nb::module_::import_("types").attr("MappingProxyType")(rows);

  nb::class_<BoundExchange>(
      m, "Exchange",
      "Sums sparse gradients over a group. All ranks call run() with equal steps, slots, n, k and "
      "k_down, in one order; from one thread at a time.")
      .def(
          "__init__",
          [](BoundExchange* self, const ExchangeChoice& options, Communicator& comm) {
            new (self) BoundExchange(options_of(options), comm);
          },
          "options"_a, "comm"_a, nb::keep_alive<1, 3>(),
          "Raises InvalidArgument: 'dense', which is no exchange (Communicator.allreduce_sum).")
      .def("run", &run, "indices"_a, "values"_a, "n"_a, nb::kw_only(), "k"_a, "k_down"_a = 0,
           "step"_a = 0, "slot"_a = 0, "stats"_a = GroupStats{},
           "The sum over the ranks of their values at indices of n entries; values as "
           "Codec.quantize leaves them. How many a rank selected may differ, and be none.\n"
           "  k       entries per rank, as the selector was asked\n"
           "  k_down  entries of the result, where the exchange compresses it too; 0: k\n"
           "  stats   this rank's, for ExchangeResult.stats\n"
           "Collective. Raises InvalidArgument, before anything is sent; CommError.")
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
          "union_nnz",
          [](BoundExchange& self) {
            HeldMass* const holder = self.exchange->held_mass();
            return holder != nullptr ? holder->union_nnz() : 0;
          },
          "The number of distinct indices that this rank summed on behalf of the group in the last "
          "run(); 0 if it summed none.")
      .def(
          "max_sent_bytes",
          [](const BoundExchange& self, std::size_t n, std::size_t k, std::size_t k_down) {
            return self.exchange->max_sent_bytes(n, {.k = k, .k_down = k_down}, self.comm.size());
          },
          "n"_a, nb::kw_only(), "k"_a, "k_down"_a = 0,
          "The most bytes that a rank sends in one run(); inf: there is no bound.")
      .def("held", &held, "slot"_a,
           "Mass that a server keeps from step to step: the index of its first entry, and a copy.")
      .def("flush", &flush, "slot"_a, "n"_a,
           "Gives that mass back, indices and values, for this rank's residual.")
      .def(
          "end_step", [](BoundExchange& self) { self.exchange->end_step(); },
          "As ErrorFeedback's, and together with it.")
      .def("rollback_step", [](BoundExchange& self) { self.exchange->rollback_step(); })
      .def(
          "save",
          [](const BoundExchange& self) {
            return saved([&](std::ostream& out) { self.exchange->save(out); });
          },
          "What carries over between steps; not the mass of held(): flush it before.")
      .def(
          "load",
          [](BoundExchange& self, const State& state) {
            self.exchange->load(States(state).front());
          },
          "state"_a, "What the same options saved, on this rank of an equal group.");
}

}  // namespace skim::python
