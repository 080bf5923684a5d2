// What a step costs at a density, in bytes and in seconds: for schedules with a budget.
#include "reducer/step_cost.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "exchange/frames.hpp"
#include "skim/cost.hpp"
#include "skim/error.hpp"

namespace skim {

bool goes_dense(const ReducerOptions& options, const Density& density, std::size_t n) {
  const bool cuts_the_result = density.down > 0.0 && density.down < 1.0;
  return (density.up >= 1.0 && !cuts_the_result) || n < options.dense_below;
}
Keep keep_of(const Density& density, std::size_t n) {
  return {.k = entries(density.up, n),
          .threshold = density.threshold,
          .k_down = density.down > 0.0 ? entries(density.down, n) : 0};
}

StepCost most_bytes(const ReducerOptions& options, int ranks, std::vector<std::size_t> lengths,
                    double down) {
  SKIM_EXPECTS(ranks >= 1, "most_bytes: ranks must be >= 1 (got " + std::to_string(ranks) + ")");
  const std::shared_ptr<const Exchange> exchange =
      options.exchange.kind == ExchangeKind::dense ? nullptr : make_exchange(options.exchange);
  return [=, lengths = std::move(lengths)](double up) {
    const Density density{.up = up, .down = down};
    double bytes = 0.0;
    for (const std::size_t n : lengths) {
      bytes += !exchange || goes_dense(options, density, n)
                   ? most_dense_bytes(n, ranks)
                   : exchange->most_bytes(n, keep_of(density, n), ranks);
    }
    return bytes;
  };
}

StepCost predicted_seconds(const ReducerOptions& options, int ranks,
                           std::vector<std::size_t> lengths, double compute_s, const Link& link,
                           const LocalSpeeds& local, double down) {
  SKIM_EXPECTS(compute_s >= 0.0 && std::isfinite(compute_s),
               "predicted_seconds: compute_s must be finite and >= 0");
  std::vector<ExchangeOptions> ways{options.exchange};
  if (options.exchange.kind == ExchangeKind::automatic) {
    ways.clear();
    for (const ExchangeKind kind : choices(options.exchange.automatic)) {
      ways.push_back(options.exchange);
      ways.back().kind = kind;
    }
  }
  for (const ExchangeOptions& way : ways) {
    SKIM_EXPECTS(scheme_of(way, ranks, 1, 1).has_value(),
                 "predicted_seconds: there is no model of " +
                     std::string(exchange_kind_names()[static_cast<std::size_t>(way.kind)]));
  }
  const auto of_bucket = [=](double up, std::size_t n) {
    const std::size_t k = entries(up, n);
    const Load load{.ranks = ranks,
                    .n = static_cast<double>(n),
                    .k = static_cast<double>(k),
                    .k_down = down > 0.0 ? static_cast<double>(entries(down, n)) : 0.0,
                    .frame = frame_size(options.exchange.codec)};
    const auto seconds = [&](Scheme s) { return predict(s, load, link, local).total_s(); };
    if (goes_dense(options, {.up = up, .down = down}, n)) return seconds(Scheme::dense);
    double least = std::numeric_limits<double>::infinity();
    for (const ExchangeOptions& way : ways) {
      least = std::min(least, seconds(*scheme_of(way, ranks, n, k)));
    }
    return least;
  };
  return [=, lengths = std::move(lengths)](double up) {
    double seconds = compute_s;
    for (const std::size_t n : lengths) seconds += n > 0 ? of_bucket(up, n) : 0.0;
    return seconds;
  };
}

}  // namespace skim
