// How a benchmark sums gradients: by one exchange, by the dense sum, or as a chooser decides.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "exchange/dense_sum.hpp"
#include "skim/chooser.hpp"
#include "skim/exchange.hpp"

namespace skim::tool {

// The names that benchmarks accept: auto, and the exchanges that can run with each rank on a host
// of its own.
inline std::vector<std::string> summation_names() {
  std::vector<std::string> names;
  for (const ExchangeRow& row : exchange_rows()) {
    if (!row.needs_hosts) names.emplace_back(row.name);
  }
  names.emplace_back(kAuto);
  return names;
}

// The exchanges that `auto` chooses among where `names` are compared: the others. Empty, which
// means the chooser's default, if `auto` stands alone.
inline std::vector<ExchangeKind> among(const std::vector<std::string>& names) {
  std::vector<ExchangeKind> others;
  for (const std::string& name : names) {
    if (name == kAuto) continue;
    const auto kind = from_name<ExchangeKind>(name, "--exchange");
    if (!row_of(kind).holds_mass) others.push_back(kind);
  }
  return others;
}

class Summation {
 public:
  // Throws: InvalidArgument if there is no such name.
  Summation(std::string_view name, ExchangeOptions options, const ChooserOptions& chooser) {
    if (name == kAuto) {
      chooser_ = make_chooser(options, chooser);
      for (const ExchangeOptions& o : chooser_->candidates()) add(o);
    } else {
      options.kind = from_name<ExchangeKind>(name, "--exchange");
      add(options);
    }
  }

  bool may_be_dense() const {
    for (const auto& e : exchanges_) {
      if (!e) return true;
    }
    return false;
  }
  struct Outcome {
    std::int64_t ns = 0;  // of choice and exchange, by the communicator's clock
    std::size_t entries = 0;
  };
  // Sums one bucket: `mine` by an exchange, or all of `dense`. Collective.
  //   select_s  the time that selection took, or would have taken, for the chooser. A dense sum is
  //             charged none, as in the cost model.
  Outcome run(StepId id, const SparseView& mine, const Keep& keep, std::span<float> dense,
              DenseSum how, double select_s, Communicator& comm) {
    const std::int64_t begin = comm.now_ns();
    GroupStats stats;
    now_ = 0;
    if (chooser_) {
      const Chooser::Times told = chooser_->told(id.slot);
      stats.bucket_s = told.bucket_s;
      stats.pair_s = told.pair_s;
      now_ = chooser_->choose(id, mine.dim, keep, comm);
    }
    Exchange* const exchange = exchanges_[now_].get();
    Outcome out;
    if (exchange == nullptr) {
      sum_dense(dense, how, stats, notes_, comm);
      out.entries = dense.size();
    } else {
      const ExchangeResult result = exchange->run(id, mine, keep, stats, comm);
      out.entries = result.nnz();
    }
    out.ns = comm.now_ns() - begin;
    if (chooser_) {
      const std::int64_t select_ns = exchange != nullptr ? std::llround(1e9 * select_s) : 0;
      chooser_->took(id, select_ns + out.ns, {stats.bucket_s, stats.pair_s});
    }
    if (exchange != nullptr) exchange->end_step();
    return out;
  }
  // The exchange of the last bucket.
  ExchangeKind exchange() const { return kinds_[now_]; }
  // The chooser's decision, or empty without a chooser. Valid until the next run().
  std::string_view decision() const {
    return chooser_ ? chooser_->decision(0) : std::string_view();
  }

 private:
  void add(const ExchangeOptions& o) {
    kinds_.push_back(o.kind);
    exchanges_.push_back(make_exchange_or_null(o));
  }
  std::unique_ptr<Chooser> chooser_;
  std::vector<ExchangeKind> kinds_;
  std::vector<std::unique_ptr<Exchange>> exchanges_;  // null: the dense sum
  std::size_t now_ = 0;
  MessageList notes_;
};

}  // namespace skim::tool
