// Options, by keyword; enumerators are the names that the command line knows.
#include <nanobind/stl/optional.h>

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
  if (index != "auto") o.index = enum_of<IndexCode>("index", index, index_code_names());
  o.value = enum_of<ValueCode>("value", value, value_code_names());
  o.rounding = enum_of<Rounding>("rounding", rounding, rounding_names());
  o.seed = seed;
  return o;
}

Link link(double alpha_s, double beta_s_per_byte) { return {alpha_s, beta_s_per_byte}; }

}  // namespace

void bind_options(nb::module_& m) {
  nb::class_<SelectOptions>(m, "SelectOptions", "Which entries: skim.select_algos has the rules.")
      .def(
          "__init__",
          [](SelectOptions* self, const std::string& algo, std::uint64_t seed, float threshold,
             std::size_t block, int stages, bool per_parameter) {
            new (self) SelectOptions{enum_of<SelectAlgo>("select", algo, select_algo_names()),
                                     seed,
                                     threshold,
                                     block,
                                     stages,
                                     per_parameter};
          },
          "algo"_a = "exact", nb::kw_only(), "seed"_a = 0, "threshold"_a = 0.0F, "block"_a = 4096,
          "stages"_a = 0, "per_parameter"_a = false);

  nb::class_<FeedbackOptions>(m, "FeedbackOptions",
                              "Error feedback, and what this rank does to its gradient before it.")
      .def(
          "__init__",
          [](FeedbackOptions* self, bool enabled, float momentum, bool nesterov,
             bool factor_masking, float clip_norm, float decay) {
            new (self)
                FeedbackOptions{enabled, momentum, nesterov, factor_masking, clip_norm, decay};
          },
          nb::kw_only(), "enabled"_a = true, "momentum"_a = 0.0F, "nesterov"_a = false,
          "factor_masking"_a = true, "clip_norm"_a = 0.0F, "decay"_a = 1.0F);

  nb::class_<CodecOptions>(m, "CodecOptions", "How entries become bytes.")
      .def(
          "__init__",
          [](CodecOptions* self, const std::string& index, const std::string& value,
             const std::string& rounding,
             std::uint64_t seed) { new (self) CodecOptions(codec(index, value, rounding, seed)); },
          nb::kw_only(), "index"_a = "auto", "value"_a = "f32", "rounding"_a = "nearest",
          "seed"_a = 0);

  nb::class_<Link>(m, "Link", "Seconds that a message takes: alpha_s + bytes * beta_s_per_byte.")
      .def(
          "__init__",
          [](Link* self, double alpha_s, double beta) { new (self) Link(link(alpha_s, beta)); },
          "alpha_s"_a, "beta_s_per_byte"_a)
      .def_rw("alpha_s", &Link::alpha_s)
      .def_rw("beta_s_per_byte", &Link::beta_s_per_byte);

  nb::class_<ExchangeOptions>(m, "ExchangeOptions", "How ranks sum what they selected.")
      .def(
          "__init__",
          [](ExchangeOptions* self, const std::string& kind, const CodecOptions& codec_options,
             const std::string& drop, const std::string& gtopk_form, const std::string& server,
             const std::vector<std::string>& among, std::optional<Link> link_of_auto,
             std::uint32_t review_every, std::uint32_t first_review, bool oktopk_exact,
             const std::string& inside, const std::string& between) {
            ExchangeOptions o;
            const auto kind_of = [](const char* what, const std::string& name) {
              return enum_of<ExchangeKind>(what, name, exchange_kind_names());
            };
            o.kind = kind_of("exchange", kind);
            o.codec = codec_options;
            o.drop = enum_of<DropPolicy>("drop", drop, drop_policy_names());
            o.gtopk_form = enum_of<GTopKForm>("gtopk_form", gtopk_form, gtopk_form_names());
            o.server.placement =
                enum_of<ServerPlacement>("server", server, server_placement_names());
            for (const std::string& name : among)
              o.automatic.among.push_back(kind_of("among", name));
            o.automatic.link = link_of_auto;
            o.automatic.review_every = review_every;
            o.automatic.first_review = first_review;
            o.oktopk.exact = oktopk_exact;
            o.hierarchy = {kind_of("inside", inside), kind_of("between", between)};
            new (self) ExchangeOptions(std::move(o));
          },
          "kind"_a = "allgather", nb::kw_only(), "codec"_a = CodecOptions{}, "drop"_a = "survivors",
          "gtopk_form"_a = "butterfly", "server"_a = "rank0",
          "among"_a = std::vector<std::string>{}, "link"_a = nb::none(), "review_every"_a = 32,
          "first_review"_a = 8, "oktopk_exact"_a = false, "inside"_a = "allgather",
          "between"_a = "gtopk");

  m.attr("select_algos") = names_tuple(select_algo_names());
  m.attr("exchange_kinds") = names_tuple(exchange_kind_names());
  m.attr("value_codes") = names_tuple(value_code_names());
  m.attr("index_codes") = names_tuple(index_code_names());
}

}  // namespace skim::python
