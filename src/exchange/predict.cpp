// What an exchange costs, and which exchange costs the least.
#include <algorithm>
#include <string>
#include <vector>

#include "skim/error.hpp"
#include "skim/exchange.hpp"

namespace skim {

Cost predict(const ExchangeOptions& options, const Load& load, const Link& link,
             const LocalSpeeds& local) {
  check_load(load);
  const ExchangeRow& row = row_of(options.kind);
  const CostTerms terms = load.ranks > 1 ? row.terms(options, load) : CostTerms{};
  return cost_of(terms, row.make != nullptr, load, link, local);
}

Choice cheapest(std::span<const ExchangeKind> among, const ExchangeOptions& options,
                const Load& load, const Link& link, const LocalSpeeds& local) {
  SKIM_EXPECTS(!among.empty(), "cost: no exchange to choose from");
  struct Candidate {
    ExchangeKind kind;
    Cost cost;
  };
  std::vector<Candidate> order;
  for (const ExchangeKind kind : among) {
    ExchangeOptions of_kind = options;
    of_kind.kind = kind;
    order.push_back({kind, predict(of_kind, load, link, local)});
  }
  std::ranges::stable_sort(order, {}, [](const Candidate& c) { return c.cost.total_s(); });

  // Names the best exchange and the runner-up, and dense if it is neither.
  const auto entry = [](const Candidate& c) {
    std::string text = std::string(name_of(c.kind)) + " " + duration_text(c.cost.total_s());
    if (c.cost.select_s > 0.0) text += " (selection " + duration_text(c.cost.select_s) + ")";
    return text;
  };
  Choice best{order.front().kind, order.front().cost, entry(order.front())};
  for (std::size_t i = 1; i < order.size(); ++i) {
    if (i == 1 || order[i].kind == ExchangeKind::dense) best.reason += ", " + entry(order[i]);
  }
  if (best.exchange == ExchangeKind::dense) best.reason += ": do not compress";
  return best;
}

}  // namespace skim
