// The one switch over exchanges, and their names.
#include <array>

#include "exchange/factories.hpp"
#include "skim/error.hpp"

namespace skim {

std::span<const std::string_view> exchange_kind_names() noexcept {
  static constexpr std::array<std::string_view, 9> kNames{"dense",        "allgather",    "gtopk",
                                                          "global-topk",  "oktopk",       "sparcml",
                                                          "hierarchical", "param-server", "auto"};
  return kNames;
}

std::span<const std::string_view> drop_policy_names() noexcept {
  static constexpr std::array<std::string_view, 3> kNames{"survivors", "merger-keeps",
                                                          "sender-keeps"};
  return kNames;
}

std::span<const std::string_view> gtopk_form_names() noexcept {
  static constexpr std::array<std::string_view, 2> kNames{"tree", "butterfly"};
  return kNames;
}

std::span<const std::string_view> server_placement_names() noexcept {
  static constexpr std::array<std::string_view, 3> kNames{"rank0", "dedicated", "sharded"};
  return kNames;
}

std::optional<Scheme> scheme_of(const ExchangeOptions& options, int ranks, std::size_t n,
                                std::size_t k) {
  switch (options.kind) {
    case ExchangeKind::dense:
      return Scheme::dense;
    case ExchangeKind::allgather:
      switch (allgather_form(ranks, Codec(options.codec).max_encoded_bytes(k, n))) {
        case AllgatherForm::ring:
          return Scheme::allgather_ring;
        case AllgatherForm::doubling:
          return Scheme::allgather_doubling;
        case AllgatherForm::bruck:
          return Scheme::allgather_bruck;
      }
      break;
    case ExchangeKind::gtopk:
      return options.gtopk_form == GTopKForm::tree ? Scheme::gtopk_tree : Scheme::gtopk_butterfly;
    case ExchangeKind::global_topk:
      return Scheme::global_topk;
    case ExchangeKind::oktopk:
      return Scheme::oktopk;
    case ExchangeKind::sparcml:
      return Scheme::sparcml;
    case ExchangeKind::param_server:
      return options.server.placement == ServerPlacement::sharded ? Scheme::param_server_sharded
                                                                  : Scheme::param_server;
    case ExchangeKind::hierarchical:
    case ExchangeKind::automatic:
      break;
  }
  return std::nullopt;
}

std::unique_ptr<Exchange> make_exchange(const ExchangeOptions& options) {
  switch (options.kind) {
    case ExchangeKind::allgather:
      return make_allgather(options);
    case ExchangeKind::gtopk:
      return make_gtopk(options);
    case ExchangeKind::global_topk:
      return make_global_topk(options);
    case ExchangeKind::oktopk:
      return make_oktopk(options);
    case ExchangeKind::sparcml:
      return make_sparcml(options);
    case ExchangeKind::hierarchical:
      return make_hierarchical(options);
    case ExchangeKind::param_server:
      return make_param_server(options);
    case ExchangeKind::automatic:
      return make_automatic(options);
    case ExchangeKind::dense:
      break;
  }
  throw InvalidArgument("make_exchange: dense is no sparse exchange; the Reducer sums densely");
}

}  // namespace skim
