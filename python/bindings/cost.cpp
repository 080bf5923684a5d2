// The cost model, and the choice of the cheapest exchange.
#include "skim/cost.hpp"

#include "python/bindings/keywords.hpp"
#include "skim/exchange.hpp"
#include "skim/quality.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;

Load load(int ranks, double n, double k, double k_down, int hosts, const Link& inside_link,
          const CodecOptions& codec) {
  return {.ranks = ranks,
          .n = n,
          .k = k,
          .k_down = k_down,
          .frame = frame_size(codec),
          .hosts = hosts,
          .inside_link = inside_link};
}

}  // namespace

void bind_cost(nb::module_& m) {
  nb::class_<Link>(m, "Link",
                   "A network link. A message takes alpha_s + bytes * beta_s_per_byte seconds.")
      .def(
          "__init__",
          [](Link* self, double alpha_s, double beta_s_per_byte) {
            new (self) Link{alpha_s, beta_s_per_byte};
          },
          "alpha_s"_a, "beta_s_per_byte"_a)
      .def_rw("alpha_s", &Link::alpha_s)
      .def_rw("beta_s_per_byte", &Link::beta_s_per_byte);
  nb::class_<LocalSpeeds>(m, "LocalSpeeds", "Seconds per entry of local work on one rank; 0: free.")
      .def(
          "__init__",
          [](LocalSpeeds* self, double select_s, double merge_s, double add_s) {
            new (self) LocalSpeeds{select_s, merge_s, add_s};
          },
          nb::kw_only(), "select_s"_a = 0.0, "merge_s"_a = 0.0, "add_s"_a = 0.0)
      .def_ro("select_s", &LocalSpeeds::select_s,
              "Per entry of n: adding it to the residual, and finding the largest.")
      .def_ro("merge_s", &LocalSpeeds::merge_s, "Per entry of a frame: decoding, and summing.")
      .def_ro("add_s", &LocalSpeeds::add_s, "Per entry of a dense sum.");

  m.attr("typical_local_speeds") = nb::cast(ChooserOptions{}.local_speeds);

  nb::class_<Cost>(m, "Cost", "The predicted cost of one exchange. Times are in seconds.")
      .def_ro("rounds", &Cost::rounds, "Dependent communication steps, one after the other.")
      .def_ro("bytes", &Cost::bytes, "Bytes that the busiest rank sends.")
      .def_ro("link_s", &Cost::link_s,
              "Messages on the longest chain of messages that wait for one another.")
      .def_ro("merge_s", &Cost::merge_s, "Decoding, sums and merges on that chain.")
      .def_ro("select_s", &Cost::select_s, "Selection, before the exchange.")
      .def_prop_ro("exchange_s", &Cost::exchange_s)
      .def_prop_ro("total_s", &Cost::total_s);

  nb::class_<Choice>(m, "Choice", "The cheapest exchange.")
      .def_prop_ro(
          "exchange", [](const Choice& c) { return name_of(c.exchange); }, "The exchange's name.")
      .def_ro("cost", &Choice::cost)
      .def_ro("reason", &Choice::reason, "The cheapest exchanges and their times, in one line.");

  const auto help = KeywordHelp::of<ExchangeOptions>();
  const std::string load_signature =
      "ranks: int, n: float, k: float, link: Link, k_down: float = 0.0, local_speeds: LocalSpeeds "
      "= ..., hosts: int = 0, inside_link: Link = ..., ";
  m.def(
      "predict",
      [](const nb::object& exchange, int ranks, double n, double k, const Link& link, double k_down,
         const LocalSpeeds& local_speeds, int hosts, const Link& inside_link, nb::kwargs options) {
        options["exchange"] = exchange;
        const auto o = read_keywords<ExchangeOptions>("skim.predict", options);
        return predict(o, load(ranks, n, k, k_down, hosts, inside_link, o.codec), link,
                       local_speeds);
      },
      "exchange"_a, nb::kw_only(), "ranks"_a, "n"_a, "k"_a, "link"_a, "k_down"_a = 0.0,
      "local_speeds"_a = LocalSpeeds{}, "hosts"_a = 0, "inside_link"_a = Link{}, "options"_a,
      nb::sig(("def predict(exchange: str, *, " + load_signature +
               help.signature_without({"exchange"}) + ") -> Cost")
                  .c_str()),
      "Predicts the cost of one exchange in which each rank sends k of n entries.\n"
      "  exchange     a name of skim.exchanges\n"
      "  k            in (0, n]; 'dense' ignores it\n"
      "  k_down       entries of the result, if the exchange compresses it, in (0, n]; 0: k\n"
      "  hosts        for 'hierarchical': number of hosts, in [0, ranks]; 0: each rank has its "
      "own\n"
      "  inside_link  for 'hierarchical': the link between two ranks of one host\n"
      "Other arguments: the options of the Exchange.\n"
      "Raises InvalidArgument: a number is out of range.");
  m.def(
      "cheapest",
      [](int ranks, double n, double k, const Link& link, const std::vector<std::string>& among,
         double k_down, const LocalSpeeds& local_speeds, int hosts, const Link& inside_link,
         const nb::kwargs& options) {
        std::vector<ExchangeKind> kinds;
        for (const std::string& name : among) {
          kinds.push_back(from_name<ExchangeKind>(name, "among"));
        }
        const auto o = read_keywords<ExchangeOptions>("skim.cheapest", options);
        return cheapest(kinds, o, load(ranks, n, k, k_down, hosts, inside_link, o.codec), link,
                        local_speeds);
      },
      nb::kw_only(), "ranks"_a, "n"_a, "k"_a, "link"_a, "among"_a, "k_down"_a = 0.0,
      "local_speeds"_a = LocalSpeeds{}, "hosts"_a = 0, "inside_link"_a = Link{}, "options"_a,
      nb::sig(("def cheapest(*, among: collections.abc.Sequence[str], " + load_signature +
               help.signature_without({"exchange"}) + ") -> Choice")
                  .c_str()),
      "Returns the exchange with the least total_s; among equals, the first. among: names of "
      "skim.exchanges. Other arguments: as in predict. Raises InvalidArgument as predict, or if "
      "`among` is empty.");
  m.def("step_seconds", &step_seconds, "compute_s"_a, "cost"_a, "overlap"_a = 0.0,
        "Seconds of a step: compute_s, selection and exchange. A fraction `overlap` of "
        "compute_s, in [0, 1], can hide time of the link.");
  m.def("duration_text", &duration_text, "seconds"_a,
        "The duration as text, such as '8.9 ms' or '1.35 s'.");
  m.attr("level_sends") = kLevelSends;
  m.def("quality_note", &quality_note, "density"_a, "steps"_a,
        "What to expect of a run of so many steps, by S = density * steps: how often a rank sends "
        "the average entry. steps > 0.");
}

}  // namespace skim::python
