// Gaussian_k takes its threshold from a fitted normal distribution. This file has a robust form and
// the two published forms: S. Shi, X. Chu, K. C. Cheung, S. See, "Understanding Top-k
// Sparsification in Distributed Deep Learning", arXiv 1911.08772.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "normal.hpp"
#include "select/rule.hpp"

namespace skim {
namespace {

using selectors::order_of;
using selectors::Rule;

// The standard deviation of a normal distribution around 0 whose tail has the count and the
// smallest entry of the last selection. Gradients are not normal, so this is not their deviation.
// It still gives a good threshold when the gradients or k change a little. The published rule has
// no such fit.
struct Fit {
  std::uint64_t n = 0;
  double deviation = 0.0;  // 0 if there were too few non-zeros

  // The magnitude that `count` of n entries exceed, under a normal distribution around 0 with
  // deviation 1.
  static double quantile(double count, std::size_t n) {
    return normal_upper_quantile(0.5 * count / static_cast<double>(n));
  }
  // The deviation at which `count` of n entries have this order or a larger one; 0 if it would not
  // be finite.
  static double deviation_of(std::uint32_t order, std::size_t count, std::size_t n) {
    const double z = quantile(static_cast<double>(count), n);
    if (order > kernels::kLargestFinite || z <= 0.0) return 0.0;
    return static_cast<double>(std::bit_cast<float>(order)) / z;
  }

  template <class Self, class F>
  static void each(Self& self, F f) {
    f(self.n);
    f(self.deviation);
  }
  bool valid() const {
    return n <= std::numeric_limits<Index>::max() && std::isfinite(deviation) && deviation >= 0.0;
  }
};

// The robust form, which is not in the paper. The accumulating pass collects the entries above the
// threshold of the last fit. If there are too many candidates, the k largest are kept. If there are
// too few, a second pass uses a fit to this step's entries. If these are far from normal and there
// are still too few, a third pass starts from zero, which always succeeds.
class Gaussian final : public Rule {
 public:
  Gaussian() : Rule(SelectRule::gaussian) {}
  void save(std::ostream& out) const override { fits_.save(out, kMagic); }
  void load(std::istream& in) override { fits_.load(in, kMagic); }

 private:
  static constexpr std::string_view kMagic = "SKIMGAUS";

  Room room(std::size_t n, std::size_t k) const override { return room_for(n, k); }

  void pick(const SelectTask& task) override {
    const std::size_t n = task.grad.n, k = task.keep.k;
    const std::size_t least = (2 * k + 2) / 3, most = 4 * k / 3;
    Fit& fit = fits_[task.id.slot];
    // A little more than k, because too many candidates cost less than too few.
    const double wanted = static_cast<double>(k) + 2.0 * std::sqrt(static_cast<double>(k));
    const double z = Fit::quantile(std::min(wanted, static_cast<double>(n)), n);

    std::uint32_t above = fit.n == n ? order_of(fit.deviation * z) : kernels::kAboveAll;
    accumulate(above);
    if (candidates_.count < least && above > floor_) {
      double deviation = std::sqrt(norm2() / static_cast<double>(n));
      if (const std::size_t found = candidates_.count; found > 0) {
        deviation = std::min(deviation, Fit::deviation_of(above, found, n));
      }
      const std::uint32_t lower = order_of(deviation * z);
      above = lower < above ? lower : 0;
      collect(above);
      if (candidates_.count < least && above > floor_) collect(0);
    }
    // After pruning, the count no longer tells how many entries passed the threshold.
    if (candidates_.count > most || (pruned_ && candidates_.count > k)) keep_largest(k);
    const std::size_t kept = candidates_.count;
    fit.n = n;
    fit.deviation =
        kept < least ? 0.0 : Fit::deviation_of(kernels::smallest(candidates_.value, kept), kept, n);
  }

  selectors::PerSlot<Fit> fits_;
};

// The published form. The first threshold follows from the mean and the deviation of this step's
// entries. At most three rounds then halve the threshold or raise it by half. All entries above the
// last threshold are sent, however many there are.
class PublishedGaussian final : public Rule {
 public:
  explicit PublishedGaussian(bool two_sided)
      : Rule(two_sided ? SelectRule::gaussian_two_sided : SelectRule::gaussian_one_sided),
        two_sided_(two_sided) {}

 private:
  void pick(const SelectTask& task) override {
    const std::size_t k = task.keep.k;
    const double n = static_cast<double>(task.grad.n);
    accumulate();
    const double mean = moments().sum / n;
    const double variance = n > 1.0 ? std::max(0.0, norm2() - n * mean * mean) / (n - 1.0) : 0.0;
    const double tail = static_cast<double>(k) / n;
    const double threshold =
        mean + std::sqrt(variance) * normal_upper_quantile(two_sided_ ? 0.5 * tail : tail);

    // All factors that three rounds can reach. Round r (from 0), after u raises, counts with factor
    // number r (r + 1) / 2 + u.
    constexpr std::array kFactors = {1.0, 0.5, 1.5, 0.25, 0.75, 2.25};
    std::array<std::uint32_t, kFactors.size()> orders;
    std::array<std::size_t, kFactors.size()> counts;
    for (std::size_t f = 0; f < orders.size(); ++f) orders[f] = order_of(threshold * kFactors[f]);
    count_above(orders, counts);
    std::size_t at = 0;
    for (std::size_t round = 0; round < 2; ++round) {
      if (3 * counts[at] < 2 * k) {
        at += round + 1;
      } else if (3 * counts[at] > 4 * k) {
        at += round + 2;
      } else {
        break;
      }
    }
    collect(orders[at]);
  }

  bool two_sided_;
};

}  // namespace

std::unique_ptr<Selector> selectors::make_gaussian() { return std::make_unique<Gaussian>(); }
std::unique_ptr<Selector> selectors::make_published_gaussian(bool two_sided) {
  return std::make_unique<PublishedGaussian>(two_sided);
}

}  // namespace skim
