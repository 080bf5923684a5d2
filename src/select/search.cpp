// RedSync and MSTopK, which search for a threshold below the largest magnitude. RedSync starts from
// the mean, MSTopK from zero. One pass counts seven thresholds, which is enough for three rounds of
// bisection.
#include <algorithm>
#include <array>

#include "random.hpp"
#include "select/rule.hpp"

namespace skim {
namespace {

using selectors::order_of;
using selectors::Rule;

// J. Fang, H. Fu, G. Yang, C.-J. Hsieh, "RedSync", arXiv 1808.04357, as implemented by the authors
// of arXiv 1911.08772 for their comparison. Its thresholds are mean |u| + ratio (max |u| - mean
// |u|).
class RedSync final : public Rule {
 public:
  explicit RedSync(bool trim)
      : Rule(trim ? SelectRule::redsync_trim : SelectRule::redsync), trim_(trim) {}

 private:
  void pick(const SelectTask& task) override {
    accumulate();
    const kernels::Moments m = moments();
    const double mean = m.sum_abs / static_cast<double>(task.grad.n);
    const double range = static_cast<double>(m.largest_abs) - mean;
    const auto at = [&](double ratio) { return order_of(mean + ratio * range); };
    collect(trim_ ? trimmed(at, task.keep.k) : bisected(at, task.keep.k));
  }

  // The ratio starts at 0.8 and falls by 0.2 until k entries pass. After ratio 0, the next
  // threshold would hardly ever be above zero, so everything is sent.
  template <class F>
  std::uint32_t trimmed(F at, std::size_t k) {
    std::array<std::uint32_t, 5> orders;
    for (std::size_t i = 0; i < orders.size(); ++i)
      orders[i] = at(0.2 * static_cast<double>(4 - i));
    std::array<std::size_t, orders.size()> counts;
    count_above(orders, counts);
    for (std::size_t i = 0; i < orders.size(); ++i) {
      if (counts[i] >= k) return orders[i];
    }
    return 0;
  }

  // Bisects the ratio in [0, 1] until the count lies between k and 2 k, or the interval is at most
  // 0.2 wide. That takes at most three rounds, so multiples of 1/8 are enough.
  template <class F>
  std::uint32_t bisected(F at, std::size_t k) {
    std::array<std::uint32_t, 7> orders;
    for (std::size_t i = 0; i < orders.size(); ++i)
      orders[i] = at(static_cast<double>(i + 1) / 8.0);
    std::array<std::size_t, orders.size()> counts;
    count_above(orders, counts);
    std::size_t low = 0, high = 8, middle = 0;
    while (high - low > 1) {
      middle = (low + high) / 2;
      const std::size_t count = counts[middle - 1];
      if (k < count && count < 2 * k) break;
      (2 * count < k ? high : low) = middle;
    }
    return orders[middle - 1];
  }

  bool trim_;
};

// S. Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters",
// arXiv 2010.10458. It bisects for two thresholds: the lowest that at most k entries pass, and the
// highest that more than k pass. It selects all entries above the former. The rest is a run, at a
// random place, of the entries between the two. The bisection starts from 0 instead of the mean,
// because fewer than k entries may be above the mean.
class MsTopK final : public Rule {
 public:
  explicit MsTopK(std::uint64_t seed) : Rule(SelectRule::mstopk), seed_(seed) {}

 private:
  static constexpr int kRounds = 30;

  // The state of a bisection: more than k entries pass low, and at most k pass high.
  struct Interval {
    double low, high;
    std::uint32_t low_order, high_order;
    std::size_t above_low, above_high;
  };

  template <class Count>
  static void three_rounds(Interval& in, std::size_t k, Count count) {
    std::array<double, 7> thresholds;
    std::array<std::uint32_t, 7> orders;
    std::array<std::size_t, 7> counts;
    for (std::size_t i = 0; i < orders.size(); ++i) {
      thresholds[i] = in.low + (in.high - in.low) * static_cast<double>(i + 1) / 8.0;
      orders[i] = order_of(thresholds[i]);
    }
    count(orders, counts);
    for (std::size_t i = 0; i < orders.size(); ++i) {
      if (counts[i] <= k) {
        in.high = thresholds[i];
        in.high_order = orders[i];
        in.above_high = counts[i];
        return;
      }
      in.low = thresholds[i];
      in.low_order = orders[i];
      in.above_low = counts[i];
    }
  }

  void pick(const SelectTask& task) override {
    const std::size_t n = task.grad.n, k = task.keep.k;
    accumulate();
    const kernels::Moments m = moments();
    // This is an upper bound. Some entries may be below keep.threshold. With a residual, the
    // non-finite gradient entries are counted although they add nothing.
    const std::size_t non_zero = m.count + sums_.non_finite;
    Interval in{static_cast<double>(selectors::magnitude_of(floor_)),
                static_cast<double>(m.largest_abs),
                floor_,
                kernels::kAboveAll,
                non_zero,
                0};
    int rounds = 0;
    // Bisect over all entries until there are few enough to collect.
    while (rounds < kRounds && in.low < in.high && in.above_low > std::max(4 * k, n / 64)) {
      three_rounds(in, k, [&](auto orders, std::span<std::size_t> c) { count_above(orders, c); });
      rounds += 3;
    }
    collect(in.low_order);
    in.above_low = candidates_.count;
    if (in.above_low <= k) return;  // there are at most k non-zeros
    for (; rounds < kRounds && in.above_high < k; rounds += 3) {
      three_rounds(in, k, [&](auto orders, std::span<std::size_t> c) {
        kernels::count_above(candidate_values(), orders, c);
      });
    }

    const std::size_t fill = k - in.above_high, between = in.above_low - in.above_high;
    const std::size_t begin = Random(seed_, task.id).below(between - fill + 1);
    std::size_t kept = 0, seen = 0;
    for (std::size_t i = 0; i < candidates_.count; ++i) {
      const std::uint32_t o = kernels::order(candidates_.value[i]);
      if (o <= in.low_order) continue;
      if (o <= in.high_order) {
        const std::size_t place = seen++;
        if (place < begin || place >= begin + fill) continue;
      }
      candidates_.index[kept] = candidates_.index[i];
      candidates_.value[kept] = candidates_.value[i];
      ++kept;
    }
    candidates_.count = kept;
  }

  std::uint64_t seed_;
};

}  // namespace

std::unique_ptr<Selector> selectors::make_redsync(bool trim) {
  return std::make_unique<RedSync>(trim);
}
std::unique_ptr<Selector> selectors::make_mstopk(std::uint64_t seed) {
  return std::make_unique<MsTopK>(seed);
}

}  // namespace skim
