// The one switch over exchanges, and their names.
#include <array>

#include "exchange/factories.hpp"
#include "skim/error.hpp"

namespace skim {

std::span<const std::string_view> exchange_kind_names() noexcept {
  static constexpr std::array<std::string_view, 7> kNames{
      "dense", "allgather", "gtopk", "global-topk", "oktopk", "sparcml", "hierarchical"};
  return kNames;
}

std::span<const std::string_view> drop_policy_names() noexcept {
  static constexpr std::array<std::string_view, 3> kNames{"survivors", "merger-keeps",
                                                          "sender-keeps"};
  return kNames;
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
    case ExchangeKind::dense:
      break;
  }
  throw InvalidArgument("make_exchange: dense is no sparse exchange; the Reducer sums densely");
}

}  // namespace skim
