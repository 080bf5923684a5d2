// The factory of selectors, and the parts they share.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <string_view>

#include "assert.hpp"
#include "select/kernels.hpp"
#include "select/selectors.hpp"
#include "skim/error.hpp"

namespace skim {
namespace selectors {

void check(const SelectTask& task) {
  const std::size_t n = task.grad.n, k = task.keep.k;
  SKIM_EXPECTS(n <= std::numeric_limits<Index>::max(),
               "select: n must be < 2^32 (n=" + std::to_string(n) + ")");
  SKIM_EXPECTS(k <= n,
               "select: k must be <= n (k=" + std::to_string(k) + ", n=" + std::to_string(n) + ")");
  SKIM_EXPECTS(task.grad.device == Device::cpu, "select: the gradient must be on the CPU");
  SKIM_EXPECTS(n == 0 || task.grad.data != nullptr, "select: the gradient is null");
  SKIM_EXPECTS(task.residual.empty() || task.residual.n == n,
               "select: residual and gradient must have one length (residual " +
                   std::to_string(task.residual.n) + ", gradient " + std::to_string(n) + ")");
  SKIM_EXPECTS(task.residual.empty() || task.residual.device == Device::cpu,
               "select: the residual must be on the CPU, as the gradient");
  SKIM_EXPECTS(task.residual.empty() || task.residual.data != nullptr,
               "select: the residual is null");
  const float scale = task.grad.scale;
  SKIM_EXPECTS(
      scale > 0.0F && std::isfinite(scale) && std::isfinite(1.0F / scale),
      "select: scale must be > 0, and it and 1/scale finite (scale=" + std::to_string(scale) + ")");
  SKIM_EXPECTS(!std::isnan(task.keep.threshold), "select: keep.threshold must not be NaN");
  SKIM_EXPECTS(task.decay >= 0.0F && task.decay <= 1.0F,
               "select: decay must be in [0, 1] (decay=" + std::to_string(task.decay) + ")");
}

kernels::Pass accumulation(const SelectTask& task) noexcept {
  // If most cache lines get an entry of the mean, it is cheaper to write the zeros together with
  // the mean.
  const bool clear = task.clear && !task.residual.empty() && task.keep.k < task.grad.n / 32;
  return {.grad = task.grad.data,
          .type = task.grad.dtype,
          .reciprocal = 1.0F / task.grad.scale,
          .decay = task.decay,
          .residual = task.residual.empty() ? nullptr : task.residual.data,
          .n = task.grad.n,
          .clear = clear ? task.grad.data : nullptr};
}

Cut cut_of(std::span<std::uint32_t> orders, std::size_t k) {
  const auto kth = orders.begin() + static_cast<std::ptrdiff_t>(k - 1);
  std::nth_element(orders.begin(), kth, orders.end(), std::greater<>());
  const std::uint32_t order = *kth;
  // All larger orders are to the left of the k-th.
  const auto above = std::count_if(orders.begin(), kth, [&](std::uint32_t o) { return o > order; });
  return {order, k - static_cast<std::size_t>(above)};
}

// A sample brackets the k-th so narrowly that only few orders must be partitioned (Floyd and Rivest
// 1975). If the bracket misses the k-th, all orders are partitioned.
Cut cut_of(const float* value, std::size_t n, std::size_t k, std::vector<std::uint32_t>& scratch) {
  constexpr std::size_t kSmall = 4096, kSample = 2048;
  if (n > kSmall) {
    const std::size_t size = std::min(kSample * (1 + n / (std::size_t{1} << 18)), n / 4);
    const std::size_t stride = n / size;
    for (std::size_t i = 0; i < size; ++i) scratch[i] = kernels::order(value[i * stride]);
    const std::span sample(scratch.data(), size);
    // The k-th has about rank q size in the sample, with a deviation of sqrt(q (1-q) size).
    const double q = static_cast<double>(k) / static_cast<double>(n);
    const double m = static_cast<double>(size);
    const double margin = 4.0 * std::sqrt(q * (1.0 - q) * m) + 2.0;
    const double first = std::floor(q * m - margin), last = std::ceil(q * m + margin);
    std::uint32_t high = kernels::kAboveAll, low = 0;
    auto begin = sample.begin();
    if (first >= 0.0 && first < m) {
      begin += static_cast<std::ptrdiff_t>(first);
      std::nth_element(sample.begin(), begin, sample.end(), std::greater<>());
      high = *begin;
    }
    if (last < m) {
      const auto at = sample.begin() + static_cast<std::ptrdiff_t>(last);
      std::nth_element(begin, at, sample.end(), std::greater<>());
      low = *at;
    }
    const kernels::Bracket found = kernels::bracket(value, n, low, high, scratch.data());
    if (found.above < k && k <= found.above + found.inside) {
      return cut_of({scratch.data(), found.inside}, k - found.above);
    }
  }
  for (std::size_t i = 0; i < n; ++i) scratch[i] = kernels::order(value[i]);
  return cut_of({scratch.data(), n}, k);
}

float magnitude_of(std::uint32_t order) {
  if (order == kernels::kOrderOfNan) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(order);
}

}  // namespace selectors

template <>
std::span<const std::string_view> names_of<SelectRule>() noexcept {
  static constexpr std::array<std::string_view, 12> kNames = {"exact",
                                                              "gaussian",
                                                              "gaussian-two-sided",
                                                              "gaussian-one-sided",
                                                              "dgc",
                                                              "redsync",
                                                              "redsync-trim",
                                                              "sidco",
                                                              "mstopk",
                                                              "threshold",
                                                              "randomk",
                                                              "blocktopk"};
  return kNames;
}

namespace {

std::unique_ptr<Selector> make_rule(const SelectOptions& options) {
  switch (options.rule) {
    case SelectRule::exact:
      return selectors::make_exact();
    case SelectRule::gaussian:
      return selectors::make_gaussian();
    case SelectRule::gaussian_two_sided:
      return selectors::make_published_gaussian(true);
    case SelectRule::gaussian_one_sided:
      return selectors::make_published_gaussian(false);
    case SelectRule::dgc:
      return selectors::make_dgc(options.seed);
    case SelectRule::redsync:
      return selectors::make_redsync(false);
    case SelectRule::redsync_trim:
      return selectors::make_redsync(true);
    case SelectRule::sidco:
      return selectors::make_sidco(options.stages);
    case SelectRule::mstopk:
      return selectors::make_mstopk(options.seed);
    case SelectRule::threshold:
      return selectors::make_threshold(options.threshold);
    case SelectRule::randomk:
      return selectors::make_randomk(options.seed);
    case SelectRule::blocktopk:
      return selectors::make_blocktopk(options.block);
  }
  throw_invalid("select: unknown rule (" + std::to_string(static_cast<unsigned>(options.rule)) +
                ")");
}

}  // namespace

SelectReport accumulate(const SelectTask& task) {
  selectors::check(task);
  kernels::Pass pass = selectors::accumulation(task);
  pass.clear = nullptr;
  // No entry passes the threshold, but a store may write past the last candidate.
  std::array<Index, kernels::kBlock + kernels::kSlack> index{};
  std::array<float, kernels::kBlock + kernels::kSlack> value{};
  kernels::Candidates none{index.data(), value.data(), 0, kernels::kBlock};
  kernels::Sums sums;
  const std::size_t end = kernels::collect(pass, 0, kernels::kAboveAll, none, sums);
  SKIM_ASSERT(end == pass.n);
  static_cast<void>(end);
  return {.passes = pass.n > 0 ? 1 : 0,
          .total_norm2 = pass.residual != nullptr ? sums.total : sums.gradient,
          .gradient_norm2 = sums.gradient,
          .non_finite = sums.non_finite};
}

std::unique_ptr<Selector> make_selector(const SelectOptions& options) {
  SKIM_EXPECTS(options.threshold >= 0.0F, "select: threshold must be >= 0 (threshold=" +
                                              std::to_string(options.threshold) + ")");
  SKIM_EXPECTS(options.block > 0, "select: block must be > 0");
  SKIM_EXPECTS(options.stages >= 0,
               "select: stages must be >= 0 (stages=" + std::to_string(options.stages) + ")");
  std::unique_ptr<Selector> rule = make_rule(options);
  return options.per_parameter ? selectors::make_per_parameter(std::move(rule)) : std::move(rule);
}

void split_top_k(const SparseView& s, std::size_t k, SparseBuffer& kept, SparseBuffer& dropped,
                 std::vector<std::uint32_t>& scratch) {
  const std::size_t nnz = s.nnz();
  const auto non_zero = static_cast<std::size_t>(
      std::ranges::count_if(s.value, [](float v) { return kernels::order(v) > 0; }));
  selectors::Cut cut{kernels::kAboveAll, 0};
  if (k >= non_zero) {
    cut = {0, 0};  // keeps all non-zeros; zeros, whose order is 0, go to neither list
  } else if (k > 0) {
    scratch.resize(nnz);
    cut = selectors::cut_of(s.value.data(), nnz, k, scratch);
  }
  const std::size_t most_kept = std::min(k, non_zero);
  kept.set_dim(s.dim);
  dropped.set_dim(s.dim);
  // Entries that tie with the k-th are kept if they come before this place.
  std::size_t tie_end = 0;
  for (std::size_t ties = cut.ties; ties > 0; ++tie_end) {
    ties -= kernels::order(s.value[tie_end]) == cut.order ? 1U : 0U;
  }
  // Every entry is written to both lists, and then counted in at most one. This avoids branches on
  // the values, which would be mispredicted. So each list needs room for one more entry than it
  // will have.
  kept.resize(most_kept + 1);
  dropped.resize(non_zero - most_kept + 1);
  const Index* const index = s.index.data();
  const float* const value = s.value.data();
  Index* const __restrict kept_index = kept.indices().data(), * const __restrict dropped_index =
                                                                  dropped.indices().data();
  float* const __restrict kept_value = kept.values().data(), * const __restrict dropped_value =
                                                                 dropped.values().data();
  std::size_t keeps = 0, drops = 0;
  for (std::size_t e = 0; e < nnz; ++e) {
    const std::uint32_t o = kernels::order(value[e]);
    const bool keep = (o > cut.order) | ((o == cut.order) & (e < tie_end));
    kept_index[keeps] = dropped_index[drops] = index[e];
    kept_value[keeps] = dropped_value[drops] = value[e];
    keeps += keep ? 1U : 0U;
    drops += (!keep & (o > 0)) ? 1U : 0U;
  }
  kept.resize(keeps);
  dropped.resize(drops);
}

}  // namespace skim
