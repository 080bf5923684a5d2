// The cost of a step at a given density, in bytes and in seconds. Schedules with a budget use it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "exchange/byte_counts.hpp"
#include "reducer/keep.hpp"
#include "skim/cost.hpp"
#include "skim/error.hpp"
#include "skim/reducer.hpp"

namespace skim {
namespace {

std::vector<ExchangeOptions> candidates_of(const ReducerOptions& options) {
  if (!options.chooser) return {options.exchange};
  std::vector<ExchangeOptions> all;
  for (const ExchangeKind exchange : candidates(*options.chooser)) {
    all.push_back(options.exchange);
    all.back().kind = exchange;
  }
  return all;
}

}  // namespace

StepCost max_step_bytes(const ReducerOptions& options, int ranks, std::vector<std::size_t> lengths,
                        double down_density) {
  SKIM_EXPECTS(ranks >= 1,
               "max_step_bytes: ranks must be >= 1 (got " + std::to_string(ranks) + ")");
  std::vector<std::shared_ptr<const Exchange>> exchanges;
  for (const ExchangeOptions& o : candidates_of(options)) {
    exchanges.push_back(make_exchange_or_null(o));
  }
  return [=, lengths = std::move(lengths)](double up) {
    const Density density{.up = up, .down = down_density};
    double bytes = 0.0;
    for (const std::size_t n : lengths) {
      if (goes_dense(options, density, n)) {
        bytes += max_dense_bytes(n, ranks);
        continue;
      }
      double most = 0.0;
      for (const auto& exchange : exchanges) {
        most = std::max(most, exchange ? exchange->max_sent_bytes(n, keep_of(density, n), ranks)
                                       : max_dense_bytes(n, ranks));
      }
      bytes += most;
    }
    return bytes;
  };
}

StepCost predicted_seconds(const ReducerOptions& options, int ranks,
                           std::vector<std::size_t> lengths, double compute_s, const Link& link,
                           const LocalSpeeds& local, double down_density) {
  SKIM_EXPECTS(compute_s >= 0.0 && std::isfinite(compute_s),
               "predicted_seconds: compute_s must be finite and >= 0");
  const std::vector<ExchangeOptions> all = candidates_of(options);
  for (const ExchangeOptions& o : all) {  // refuse now what would be refused later
    make_exchange_or_null(o);
    predict(o, {.ranks = ranks, .n = 1.0, .k = 1.0, .frame = frame_size(o.codec)}, link, local);
  }
  const auto of_bucket = [=](double up, std::size_t n) {
    const std::size_t k = entries(up, n);
    const std::size_t k_down = down_density > 0.0 ? entries(down_density, n) : 0;
    const Load load{.ranks = ranks,
                    .n = static_cast<double>(n),
                    .k = static_cast<double>(k),
                    .k_down = static_cast<double>(k_down),
                    .frame = frame_size(options.exchange.codec)};
    const auto seconds = [&](const ExchangeOptions& o) {
      return predict(o, load, link, local).total_s();
    };
    if (goes_dense(options, {.up = up, .down = down_density}, n)) {
      return seconds({.kind = ExchangeKind::dense});
    }
    double least = std::numeric_limits<double>::infinity();
    for (const ExchangeOptions& o : all) least = std::min(least, seconds(o));
    return least;
  };
  return [=, lengths = std::move(lengths)](double up) {
    double seconds = compute_s;
    for (const std::size_t n : lengths) seconds += n > 0 ? of_bucket(up, n) : 0.0;
    return seconds;
  };
}

}  // namespace skim
