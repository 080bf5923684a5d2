// The cost model: what an exchange costs, and the choice that follows.
#include "skim/cost.hpp"

#include "python/bindings/bindings.hpp"
#include "skim/exchange.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;

Scheme scheme(const std::string& name) { return enum_of<Scheme>("scheme", name, scheme_names()); }

Load load(int ranks, double n, double k, double k_down, const CodecOptions& codec) {
  return {.ranks = ranks, .n = n, .k = k, .k_down = k_down, .frame = frame_size(codec)};
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

  nb::class_<Choice>(m, "Choice", "The cheapest scheme.")
      .def_prop_ro("scheme",
                   [](const Choice& c) {
                     return std::string(scheme_names()[static_cast<std::size_t>(c.scheme)]);
                   })
      .def_ro("cost", &Choice::cost)
      .def_ro("reason", &Choice::reason, "All of them, in one line, from the cheapest on.");

  m.attr("schemes") = names_tuple(scheme_names());
  m.def(
      "exchange_of", [](const std::string& name) { return exchange_of(scheme(name)); }, "scheme"_a,
      "The exchange of a scheme: 'allgather' of 'allgather-ring'.");
  m.def(
      "is_possible",
      [](const std::string& name, int ranks) { return is_possible(scheme(name), ranks); },
      "scheme"_a, "ranks"_a);
  m.def(
      "predict",
      [](const std::string& name, int ranks, double n, double k, const Link& link, double k_down,
         const CodecOptions& codec, const LocalSpeeds& local) {
        return predict(scheme(name), load(ranks, n, k, k_down, codec), link, local);
      },
      "scheme"_a, nb::kw_only(), "ranks"_a, "n"_a, "k"_a, "link"_a, "k_down"_a = 0.0,
      "codec"_a = CodecOptions{}, "local"_a = LocalSpeeds{},
      "The cost of one exchange (a scheme: one of skim.schemes) of k of n entries from each rank. "
      "Raises InvalidArgument: a scheme that does not work for so many ranks, numbers out of "
      "range.");
  m.def(
      "cheapest",
      [](int ranks, double n, double k, const Link& link, const std::vector<std::string>& among,
         double k_down, const CodecOptions& codec, const LocalSpeeds& local) {
        std::vector<Scheme> schemes;
        for (const std::string& name : among) schemes.push_back(scheme(name));
        return cheapest(schemes, load(ranks, n, k, k_down, codec), link, local);
      },
      nb::kw_only(), "ranks"_a, "n"_a, "k"_a, "link"_a, "among"_a, "k_down"_a = 0.0,
      "codec"_a = CodecOptions{}, "local"_a = LocalSpeeds{},
      "The scheme of `among` with the least total_s, the first of equals; those that are not "
      "possible for so many ranks are passed over.");
  m.def("step_seconds", &step_seconds, "compute_s"_a, "cost"_a, "overlap"_a = 0.0,
        "Seconds of a step; the part `overlap`, in [0, 1], of the computing may hide time of the "
        "link.");
  m.def("duration_text", &duration_text, "seconds"_a, "'8.9 ms'");
}

}  // namespace skim::python
