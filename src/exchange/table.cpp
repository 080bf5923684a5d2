// The table of exchanges, and the functions that read it. An exchange's own file defines its make
// and terms functions. No other file of the library names an exchange, except as a default.
#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <vector>

#include "skim/error.hpp"
#include "skim/exchange.hpp"

namespace skim {

std::unique_ptr<Exchange> make_allgather(const ExchangeOptions&);
std::unique_ptr<Exchange> make_global_topk(const ExchangeOptions&);
std::unique_ptr<Exchange> make_gtopk(const ExchangeOptions&);
std::unique_ptr<Exchange> make_hierarchical(const ExchangeOptions&);
std::unique_ptr<Exchange> make_oktopk(const ExchangeOptions&);
std::unique_ptr<Exchange> make_param_server(const ExchangeOptions&);
std::unique_ptr<Exchange> make_shared_indices(const ExchangeOptions&);
std::unique_ptr<Exchange> make_sparcml(const ExchangeOptions&);
CostTerms allgather_terms(const ExchangeOptions&, const Load&);
CostTerms global_topk_terms(const ExchangeOptions&, const Load&);
CostTerms gtopk_terms(const ExchangeOptions&, const Load&);
CostTerms hierarchical_terms(const ExchangeOptions&, const Load&);
CostTerms oktopk_terms(const ExchangeOptions&, const Load&);
CostTerms param_server_terms(const ExchangeOptions&, const Load&);
CostTerms shared_indices_terms(const ExchangeOptions&, const Load&);
CostTerms sparcml_terms(const ExchangeOptions&, const Load&);
bool hierarchical_cuts_result(const ExchangeOptions&);

namespace {

// Around a ring: reduce-scatter, then all-gather.
CostTerms dense_terms(const ExchangeOptions&, const Load& load) {
  const double p = load.ranks;
  const double bytes = 2 * (p - 1) / p * sizeof(float) * load.n + (p - 1) * load.frame.stats_bytes;
  return {.rounds = 2 * (p - 1),
          .sent_bytes = bytes,
          .chain_bytes = bytes,
          .added = (p - 1) / p * load.n,
          .result = load.n};
}

// Bytes of scratch memory for one entry: in a frame, decoded, and in one or two sums.
constexpr double kEntry = 60.0;
double of_dense(const Load& load) { return 4.0 * sizeof(float) * load.n / load.ranks; }
double of_all_frames(const Load& load) { return kEntry * load.ranks * load.k; }
double of_union(const Load& load) { return kEntry * std::min(load.ranks * load.k, load.n); }
double of_few_frames(const Load& load) { return 200.0 * load.k; }

bool always(const ExchangeOptions&) { return true; }

using K = ExchangeKind;
constexpr std::array kRows{
    ExchangeRow{.kind = K::dense,
                .name = "dense",
                .make = nullptr,
                .terms = dense_terms,
                .memory = of_dense,
                .delivers_all = true},
    ExchangeRow{.kind = K::allgather,
                .name = "allgather",
                .make = make_allgather,
                .terms = allgather_terms,
                .memory = of_all_frames,
                .delivers_all = true,
                .nests = true},
    ExchangeRow{.kind = K::gtopk,
                .name = "gtopk",
                .make = make_gtopk,
                .terms = gtopk_terms,
                .memory = of_few_frames,
                .nests = true},
    ExchangeRow{.kind = K::gtopk_tree,
                .name = "gtopk-tree",
                .make = make_gtopk,
                .terms = gtopk_terms,
                .memory = of_few_frames,
                .nests = true},
    ExchangeRow{.kind = K::global_topk,
                .name = "global-topk",
                .make = make_global_topk,
                .terms = global_topk_terms,
                .memory = of_all_frames,
                .cuts_result = always,
                .nests = true},
    ExchangeRow{.kind = K::oktopk,
                .name = "oktopk",
                .make = make_oktopk,
                .terms = oktopk_terms,
                .memory = of_few_frames,
                .cuts_result = always,
                .nests = true},
    ExchangeRow{.kind = K::sparcml,
                .name = "sparcml",
                .make = make_sparcml,
                .terms = sparcml_terms,
                .memory = of_all_frames,
                .delivers_all = true,
                .nests = true},
    ExchangeRow{.kind = K::hierarchical,
                .name = "hierarchical",
                .make = make_hierarchical,
                .terms = hierarchical_terms,
                .memory = of_few_frames,
                .cuts_result = hierarchical_cuts_result,
                .needs_hosts = true},
    ExchangeRow{.kind = K::param_server,
                .name = "param-server",
                .make = make_param_server,
                .terms = param_server_terms,
                .memory = of_union,
                .cuts_result = always,
                .holds_mass = true},
    ExchangeRow{.kind = K::shared_indices,
                .name = "shared-indices",
                .make = make_shared_indices,
                .terms = shared_indices_terms,
                .memory = of_few_frames},
};
static_assert(
    [] {
      for (std::size_t i = 0; i < kRows.size(); ++i) {
        if (static_cast<std::size_t>(kRows[i].kind) != i) return false;
      }
      return true;
    }(),
    "rows stand in the order of the enumerators");

constexpr auto kNames = [] {
  std::array<std::string_view, kRows.size()> names;
  for (std::size_t i = 0; i < kRows.size(); ++i) names[i] = kRows[i].name;
  return names;
}();

}  // namespace

template <>
std::span<const std::string_view> names_of<ExchangeKind>() noexcept {
  return kNames;
}

template <>
std::span<const std::string_view> names_of<DropPolicy>() noexcept {
  static constexpr std::array<std::string_view, 3> kPolicies{"survivors", "merger-keeps",
                                                             "sender-keeps"};
  return kPolicies;
}

template <>
std::span<const std::string_view> names_of<ServerPlacement>() noexcept {
  static constexpr std::array<std::string_view, 3> kPlacements{"rank0", "dedicated", "sharded"};
  return kPlacements;
}

std::span<const ExchangeRow> exchange_rows() noexcept { return kRows; }

const ExchangeRow& row_of(ExchangeKind kind) {
  SKIM_EXPECTS(is_named(kind),
               "exchange: unknown kind (" + std::to_string(static_cast<int>(kind)) + ")");
  return kRows[static_cast<std::size_t>(kind)];
}

std::vector<std::string> names_where(const std::function<bool(const ExchangeRow&)>& property) {
  std::vector<std::string> names;
  for (const ExchangeRow& row : kRows) {
    if (property(row)) names.emplace_back(row.name);
  }
  return names;
}

bool cuts_result(const ExchangeOptions& options) {
  const ExchangeRow& row = row_of(options.kind);
  return row.cuts_result != nullptr && row.cuts_result(options);
}

std::unique_ptr<Exchange> make_exchange(const ExchangeOptions& options) {
  const ExchangeRow& row = row_of(options.kind);
  SKIM_EXPECTS(row.make != nullptr,
               "make_exchange: '" + std::string(row.name) +
                   "' is no sparse exchange; the Reducer sums whole gradients itself");
  return row.make(options);
}
std::unique_ptr<Exchange> make_exchange_or_null(const ExchangeOptions& options) {
  return options.kind == ExchangeKind::dense ? nullptr : make_exchange(options);
}

}  // namespace skim
