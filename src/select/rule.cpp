// One step of a rule.
#include "select/rule.hpp"

#include <algorithm>

#include "assert.hpp"

namespace skim::selectors {

using kernels::kBlock;
using kernels::kSlack;

std::string_view Rule::name() const noexcept { return name_of(rule_); }

Rule::Room Rule::room_for(std::size_t n, std::size_t k) {
  const std::size_t room = std::min(2 * k + 16384, n);
  return {room, room + kBlock};
}

SelectReport Rule::select(const SelectTask& task, SparseBuffer& out) {
  check(task);
  require(task);
  const std::size_t n = task.grad.n;
  k_ = task.keep.k;
  // Everything that may throw comes before the residual changes.
  const Room wanted = room(n, k_);
  const std::size_t needed = wanted.candidates + kBlock + kSlack;
  if (capacity_ < needed) {
    capacity_ = 0;
    index_ = std::make_unique_for_overwrite<Index[]>(needed);
    value_ = std::make_unique_for_overwrite<float[]>(needed);
    capacity_ = needed;
  }
  if (orders_.size() < wanted.orders + kSlack) orders_.resize(wanted.orders + kSlack);
  out.reset(n);
  out.reserve(wanted.candidates);

  pass_ = accumulation(task);
  values_ = pass_.residual == nullptr ? pass_ : kernels::Pass{.grad = pass_.residual, .n = n};
  candidates_ = {index_.get(), value_.get(), 0, wanted.candidates + kBlock};
  sums_ = {};
  floor_ = task.keep.threshold > 0.0F ? std::bit_cast<std::uint32_t>(task.keep.threshold) - 1 : 0;
  passes_ = 0;
  if (k_ > 0) {
    pick(task);
  } else {
    accumulate();
  }

  const std::size_t kept = candidates_.count;
  out.assign({{candidates_.index, kept}, {candidates_.value, kept}, n});
  SelectReport report;
  report.threshold = kept > 0 ? magnitude_of(kernels::smallest(candidates_.value, kept)) : 0.0F;
  report.passes = n > 0 ? passes_ : 0;
  report.kept_norm2 = kernels::norm2(candidates_.value, kept);
  report.total_norm2 = norm2();
  report.gradient_norm2 = sums_.gradient;
  report.non_finite = sums_.non_finite;
  report.cleared = pass_.clear != nullptr;
  return report;
}

void Rule::collect_all(const kernels::Pass& pass, std::uint32_t above, kernels::Sums& sums) {
  candidates_.count = 0;
  pruned_ = false;
  above = std::max(above, floor_);
  std::size_t at = 0;
  while ((at = kernels::collect(pass, at, above, candidates_, sums)) < pass.n) {
    above = keep_largest(k_);  // room ran out, so count > k
    pruned_ = true;
  }
  ++passes_;
}

void Rule::accumulate(std::uint32_t above) { collect_all(pass_, above, sums_); }

void Rule::collect(std::uint32_t above) {
  kernels::Sums unused;
  collect_all(values_, above, unused);
}

kernels::Moments Rule::moments() {
  ++passes_;
  return kernels::moments(values_, 0);
}

void Rule::count_above(std::span<const std::uint32_t> above, std::span<std::size_t> counts) {
  ++passes_;
  kernels::count_above(values_, above, counts);
}

std::uint32_t Rule::keep_largest(std::size_t k) {
  SKIM_ASSERT(candidates_.count + kSlack <= orders_.size());
  const Cut cut = cut_of(candidates_.value, candidates_.count, k, orders_);
  kernels::keep_above(candidates_, cut.order, cut.ties);
  SKIM_ASSERT(candidates_.count == k);
  return cut.order;
}

std::uint32_t order_of(double threshold) noexcept {
  if (!(threshold > 0.0)) return 0;
  constexpr double kMax = std::numeric_limits<float>::max();
  return kernels::order(static_cast<float>(std::min(threshold, kMax)));
}

}  // namespace skim::selectors
