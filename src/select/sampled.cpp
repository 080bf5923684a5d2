// Rules that use random numbers: the sampled threshold of DGC, and random-k.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "random.hpp"
#include "select/rule.hpp"

namespace skim {
namespace {

using selectors::Rule;

// Y. Lin et al., "Deep Gradient Compression", ICLR 2018, section 5: the threshold is the value that
// a fraction k/n of a strided sample exceeds. The sample is drawn before the accumulating pass, so
// that the pass can collect candidates.
//
// With more than k candidates, the k largest are kept. The paper does this only above 1.3 k; below,
// it keeps the first k by index, which favours low indices. With fewer than 0.8 k candidates, the
// threshold falls by factors of 0.8, as published. One pass counts seven such thresholds. If none
// of them is low enough, every entry becomes a candidate.
class Dgc final : public Rule {
 public:
  explicit Dgc(std::uint64_t seed) : Rule(SelectRule::dgc), seed_(seed) {}

 private:
  static constexpr std::size_t kLeastStride = 33;  // see sampled()

  Room room(std::size_t n, std::size_t k) const override {
    Room r = room_for(n, k);
    r.orders = std::max(r.orders, n / kLeastStride + 1);
    return r;
  }

  // The smallest order in the sample's top k/n. The sample has about 1 % of the entries, or more if
  // k is small.
  std::uint32_t sampled(StepId id, std::size_t k) {
    const std::size_t n = pass_.n;
    const std::size_t wanted = std::max(n / 100, (2 * n + k - 1) / k);
    // A multiple of 32 plus 1, so that it does not divide the row length of a weight matrix.
    const std::size_t stride = (n + 32 * wanted - 1) / (32 * wanted) * 32 + 1;
    std::size_t size = 0;
    for (std::size_t i = Random(seed_, id).below(std::min(stride, n)); i < n; i += stride) {
      orders_[size++] = kernels::order(kernels::result(pass_, i));
    }
    const double share = static_cast<double>(k) / static_cast<double>(n);
    const auto top = static_cast<std::size_t>(std::ceil(share * static_cast<double>(size)));
    const auto at = orders_.begin() + static_cast<std::ptrdiff_t>(std::min(top, size) - 1);
    std::nth_element(orders_.begin(), at, orders_.begin() + static_cast<std::ptrdiff_t>(size),
                     std::greater<>());
    return *at;
  }

  void pick(const SelectTask& task) override {
    const std::size_t k = task.keep.k;
    const std::uint32_t threshold = sampled(task.id, k);
    // Entries that equal the threshold must pass as well.
    const std::uint32_t above = threshold == 0 ? 0 : threshold - 1;
    accumulate(above);
    if (10 * candidates_.count < 8 * k && above > floor_) {
      std::array<std::uint32_t, 7> orders;
      double lower = static_cast<double>(
          selectors::magnitude_of(std::min(threshold, kernels::kLargestFinite)));
      for (std::uint32_t& o : orders) o = selectors::order_of(lower *= 0.8);
      std::array<std::size_t, orders.size()> counts;
      count_above(orders, counts);
      std::size_t at = 0;
      while (at < orders.size() && 10 * counts[at] < 8 * k) ++at;
      collect(at < orders.size() ? orders[at] : 0);
    }
    if (candidates_.count > k) keep_largest(k);
  }

  std::uint64_t seed_;
};

// Selects k indices; every set of k has the same probability (rand_k of S. U. Stich, J.-B.
// Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018). It uses R. W. Floyd's
// algorithm (CACM 30, 1987) with one bit per entry as the set. So k draws and a scan of n / 64
// words give the indices in order.
class RandomK final : public Rule {
 public:
  explicit RandomK(std::uint64_t seed) : Rule(SelectRule::randomk), seed_(seed) {}

 private:
  Room room(std::size_t, std::size_t k) const override { return {k, 0}; }

  void pick(const SelectTask& task) override {
    const std::size_t n = task.grad.n, k = task.keep.k;
    if (chosen_.size() < n / 64 + 1) chosen_.resize(n / 64 + 1);
    Random random(seed_, task.id);
    const auto insert = [&](std::size_t i) {
      const std::uint64_t bit = std::uint64_t{1} << i % 64;
      const bool is_new = (chosen_[i / 64] & bit) == 0;
      chosen_[i / 64] |= bit;
      return is_new;
    };
    for (std::size_t last = n - k; last < n; ++last) {
      if (!insert(random.below(last + 1))) insert(last);
    }
    accumulate();
    for (std::size_t w = 0; w <= (n - 1) / 64; ++w) {
      for (std::uint64_t bits = std::exchange(chosen_[w], 0); bits != 0; bits &= bits - 1) {
        const std::size_t i = 64 * w + static_cast<std::size_t>(std::countr_zero(bits));
        const float value = kernels::result(values_, i);
        if (kernels::order(value) <= floor_) continue;
        candidates_.index[candidates_.count] = static_cast<Index>(i);
        candidates_.value[candidates_.count] = value;
        ++candidates_.count;
      }
    }
  }

  std::uint64_t seed_;
  std::vector<std::uint64_t> chosen_;  // all 0 between steps
};

}  // namespace

std::unique_ptr<Selector> selectors::make_dgc(std::uint64_t seed) {
  return std::make_unique<Dgc>(seed);
}
std::unique_ptr<Selector> selectors::make_randomk(std::uint64_t seed) {
  return std::make_unique<RandomK>(seed);
}

}  // namespace skim
