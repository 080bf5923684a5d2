// The cost model: what an exchange costs, and the choice that follows.
#include "skim/cost.hpp"

#include "python/bindings/parts.hpp"
#include "skim/exchange.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;

Load load(int ranks, double n, double k, double k_down, int hosts, const Link& inside,
          const CodecOptions& codec) {
  return {.ranks = ranks,
          .n = n,
          .k = k,
          .k_down = k_down,
          .frame = frame_size(codec),
          .hosts = hosts,
          .inside = inside};
}

}  // namespace

void bind_cost(nb::module_& m) {
  nb::class_<LocalSpeeds>(m, "LocalSpeeds", "Seconds an entry takes on one rank; 0: free.")
      .def(
          "__init__",
          [](LocalSpeeds* self, double select_s, double merge_s, double add_s) {
            new (self) LocalSpeeds{select_s, merge_s, add_s};
          },
          nb::kw_only(), "select_s"_a = 0.0, "merge_s"_a = 0.0, "add_s"_a = 0.0)
      .def_ro("select_s", &LocalSpeeds::select_s,
              "Of n: added to the residual, and the largest found.")
      .def_ro("merge_s", &LocalSpeeds::merge_s, "Of a frame: decoded and summed.")
      .def_ro("add_s", &LocalSpeeds::add_s, "Of a dense sum.");

  nb::class_<Cost>(m, "Cost", "What the model predicts of one exchange.")
      .def_ro("rounds", &Cost::rounds, "Dependent steps.")
      .def_ro("bytes", &Cost::bytes, "Sent by the busiest rank.")
      .def_ro("link_s", &Cost::link_s, "Messages on the longest chain of dependent ones.")
      .def_ro("merge_s", &Cost::merge_s, "On that chain: decoding, sums, merges.")
      .def_ro("select_s", &Cost::select_s, "Before the exchange.")
      .def_prop_ro("exchange_s", &Cost::exchange_s)
      .def_prop_ro("total_s", &Cost::total_s);

  nb::class_<Choice>(m, "Choice", "The cheapest exchange.")
      .def_prop_ro(
          "kind", [](const Choice& c) { return name_of(c.kind); }, "Its name.")
      .def_ro("cost", &Choice::cost)
      .def_ro("reason", &Choice::reason, "The cheapest ones and their times, in one line.");

  m.def(
      "predict",
      [](const ExchangeChoice& exchange, int ranks, double n, double k, const Link& link,
         double k_down, const LocalSpeeds& local, int hosts, const Link& inside) {
        const ExchangeOptions o = options_of(exchange);
        return predict(o, load(ranks, n, k, k_down, hosts, inside, o.codec), link, local);
      },
      "exchange"_a, nb::kw_only(), "ranks"_a, "n"_a, "k"_a, "link"_a, "k_down"_a = 0.0,
      "local"_a = LocalSpeeds{}, "hosts"_a = 0, "inside"_a = Link{},
      "The cost of one exchange of k of n entries from each rank.\n"
      "  exchange  a name of skim.exchanges, or ExchangeOptions\n"
      "  hosts     for 'hierarchical': the ranks are spread over so many hosts; 0: one rank each\n"
      "  inside    the link between two ranks of one host\n"
      "Raises InvalidArgument: numbers out of range.");
  m.def(
      "cheapest",
      [](int ranks, double n, double k, const Link& link, const std::vector<std::string>& among,
         double k_down, const LocalSpeeds& local, int hosts, const Link& inside,
         const ExchangeOptions& options) {
        std::vector<ExchangeKind> kinds;
        for (const std::string& name : among) {
          kinds.push_back(from_name<ExchangeKind>(name, "among"));
        }
        return cheapest(kinds, options, load(ranks, n, k, k_down, hosts, inside, options.codec),
                        link, local);
      },
      nb::kw_only(), "ranks"_a, "n"_a, "k"_a, "link"_a, "among"_a, "k_down"_a = 0.0,
      "local"_a = LocalSpeeds{}, "hosts"_a = 0, "inside"_a = Link{},
      "options"_a = ExchangeOptions{},
      "The exchange of `among`, a list of names, with the least total_s; the first of equals. Each "
      "has these options but for the kind.");
  m.def("step_seconds", &step_seconds, "compute_s"_a, "cost"_a, "overlap"_a = 0.0,
        "Seconds of a step; the part `overlap`, in [0, 1], of the computing may hide time of the "
        "link.");
  m.def("duration_text", &duration_text, "seconds"_a, "'8.9 ms'");
}

}  // namespace skim::python
