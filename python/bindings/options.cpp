// Options, by keyword. Enumerators have the names that the command line knows.
#include "python/bindings/bindings.hpp"
#include "skim/exchange.hpp"
#include "skim/feedback.hpp"
#include "skim/reducer.hpp"
#include "skim/select.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;

CodecOptions codec(const std::string& index, const std::string& value, const std::string& rounding,
                   std::uint64_t seed) {
  CodecOptions o;
  if (index != "auto") o.index = from_name<IndexCode>(index, "index");
  o.value = from_name<ValueCode>(value, "value");
  o.rounding = from_name<Rounding>(rounding, "rounding");
  o.seed = seed;
  return o;
}

const ExchangeOptions kExchange;

Link link(double alpha_s, double beta_s_per_byte) { return {alpha_s, beta_s_per_byte}; }

}  // namespace

void bind_options(nb::module_& m) {
  nb::class_<SelectOptions>(m, "SelectOptions",
                            "Options of a Selector.\n"
                            "  algo           the rule: one of skim.select_algos\n"
                            "  seed           of random draws; ranks with the same seed draw "
                            "alike\n"
                            "  threshold      of the rule 'threshold'; >= 0\n"
                            "  block          entries per chunk of the rule 'blocktopk'; > 0\n"
                            "  stages         of the rule 'sidco'; 0: it adapts them\n"
                            "  per_parameter  True: applies the rule to each parameter of a "
                            "bucket by itself")
      .def(
          "__init__",
          [](SelectOptions* self, const std::string& algo, std::uint64_t seed, float threshold,
             std::size_t block, int stages, bool per_parameter) {
            new (self) SelectOptions{from_name<SelectAlgo>(algo, "select"),
                                     seed,
                                     threshold,
                                     block,
                                     stages,
                                     per_parameter};
          },
          "algo"_a = "exact", nb::kw_only(), "seed"_a = 0, "threshold"_a = 0.0F, "block"_a = 4096,
          "stages"_a = 0, "per_parameter"_a = false);

  nb::class_<FeedbackOptions>(m, "FeedbackOptions",
                              "Options of ErrorFeedback.\n"
                              "  enabled              False: no residual is kept\n"
                              "  momentum_correction  in [0, 1); 0: off. Use it in place of the "
                              "optimizer's momentum\n"
                              "  momentum_dampening   in [0, 1): the velocity gets 1 - this of "
                              "each gradient. For Adam, beta1\n"
                              "  nesterov_correction  True: momentum correction in the Nesterov "
                              "form\n"
                              "  factor_masking       True: the velocity of an entry becomes 0 "
                              "when the entry is delivered\n"
                              "  local_clip           limits the gradient's norm in a bucket of n "
                              "of the model's N entries to\n"
                              "                       local_clip * sqrt(n / (P * N)); 0: off\n"
                              "  residual_decay       factor of the residual in every step, in "
                              "[0, 1]")
      .def(
          "__init__",
          [](FeedbackOptions* self, bool enabled, float momentum_correction,
             float momentum_dampening, bool nesterov_correction, bool factor_masking,
             float local_clip, float residual_decay) {
            new (self) FeedbackOptions{
                enabled,        momentum_correction, momentum_dampening, nesterov_correction,
                factor_masking, local_clip,          residual_decay};
          },
          nb::kw_only(), "enabled"_a = true, "momentum_correction"_a = 0.0F,
          "momentum_dampening"_a = 0.0F, "nesterov_correction"_a = false, "factor_masking"_a = true,
          "local_clip"_a = 0.0F, "residual_decay"_a = 1.0F);

  nb::class_<CodecOptions>(m, "CodecOptions",
                           "Options of a Codec.\n"
                           "  index     one of skim.index_codes, or 'auto': the smallest for each "
                           "frame\n"
                           "  value     one of skim.value_codes\n"
                           "  rounding  'nearest' or 'stochastic'\n"
                           "  seed      of stochastic rounding")
      .def(
          "__init__",
          [](CodecOptions* self, const std::string& index, const std::string& value,
             const std::string& rounding,
             std::uint64_t seed) { new (self) CodecOptions(codec(index, value, rounding, seed)); },
          nb::kw_only(), "index"_a = "auto", "value"_a = "f32", "rounding"_a = "nearest",
          "seed"_a = 0);

  nb::class_<Link>(m, "Link",
                   "A network link. A message takes alpha_s + bytes * beta_s_per_byte seconds.")
      .def(
          "__init__",
          [](Link* self, double alpha_s, double beta) { new (self) Link(link(alpha_s, beta)); },
          "alpha_s"_a, "beta_s_per_byte"_a)
      .def_rw("alpha_s", &Link::alpha_s)
      .def_rw("beta_s_per_byte", &Link::beta_s_per_byte);

  nb::class_<ExchangeOptions>(m, "ExchangeOptions",
                              "Options of an Exchange.\n"
                              "  kind             one of skim.exchanges\n"
                              "  codec            the CodecOptions of its frames\n"
                              "  drop             'gtopk', 'gtopk-tree': who takes back an entry "
                              "that a merge drops\n"
                              "  server           'param-server': which rank is the server\n"
                              "  oktopk_exact     'oktopk': True: the result of 'global-topk'\n"
                              "  inside, between  'hierarchical': the exchanges inside a host and "
                              "between hosts")
      .def(
          "__init__",
          [](ExchangeOptions* self, const std::string& kind, const CodecOptions& codec_options,
             const std::string& drop, const std::string& server, bool oktopk_exact,
             const std::string& inside, const std::string& between) {
            ExchangeOptions o;
            o.kind = from_name<ExchangeKind>(kind, "exchange");
            o.codec = codec_options;
            o.drop = from_name<DropPolicy>(drop, "drop");
            o.server.placement = from_name<ServerPlacement>(server, "server");
            o.oktopk.exact = oktopk_exact;
            o.hierarchy = {from_name<ExchangeKind>(inside, "inside"),
                           from_name<ExchangeKind>(between, "between")};
            new (self) ExchangeOptions(o);
          },
          "kind"_a = name_of(kExchange.kind), nb::kw_only(), "codec"_a = CodecOptions{},
          "drop"_a = name_of(kExchange.drop), "server"_a = name_of(kExchange.server.placement),
          "oktopk_exact"_a = false, "inside"_a = name_of(kExchange.hierarchy.inside),
          "between"_a = name_of(kExchange.hierarchy.between));

  m.attr("select_algos") = names_tuple(names_of<SelectAlgo>());
  m.attr("value_codes") = names_tuple(names_of<ValueCode>());
  m.attr("index_codes") = names_tuple(names_of<IndexCode>());
}

}  // namespace skim::python
