// `exact` always selects the k largest magnitudes. It works in three steps, with the loops in
// kernels.cpp:
//   1. One pass adds the gradient to the residual and collects every entry above a threshold. The
//      threshold comes from the last step or from a sample, and should leave a few more than k
//      candidates. (start, collect_all)
//   2. When the candidates fill their room, only the k largest of them stay, and the k-th becomes
//      the threshold. A later entry must exceed it, because ties go to the lower index. So every
//      input needs only O(k) memory, and a threshold that is too low does no harm. (prune)
//   3. If there are fewer than k candidates, the threshold was too high. A second pass takes its
//      threshold from a sample of the residual. If that is too high as well, a third pass starts
//      from zero, which always succeeds. The k largest candidates are the result.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string_view>
#include <vector>

#include "assert.hpp"
#include "select/kernels.hpp"
#include "select/per_slot.hpp"
#include "select/selectors.hpp"
#include "select/statistics.hpp"

namespace skim {
namespace {

using kernels::Candidates;
using selectors::Cut;
using selectors::cut_of;

// The state of one slot between steps.
struct Carried {
  std::uint64_t n = 0, k = 0;
  float threshold = 0.0F;  // the k-th magnitude; 0 if there was none
  float growth = 1.0F;     // expected ratio of the next threshold to this one: residuals fill up
  float margin = 0.04F;    // the next pass starts this fraction below the expected threshold

  static constexpr float kLeastMargin = 0.001F, kLargestMargin = 0.5F;
  static constexpr float kLargestGrowth = 1.25F;  // more is a jump, which predicts nothing

  // The order above which entries become candidates of the next step.
  std::uint32_t start(std::size_t next_n, std::size_t next_k) const {
    if (next_n != n || threshold == 0.0F) return 0;
    float t = threshold * growth * (1.0F - margin);
    // This is exact if the number of entries above t falls as 1/t^2. Lighter tails give too many
    // candidates, which are pruned. Heavier tails, which are rare, cost a second pass.
    if (next_k > k) t *= std::sqrt(static_cast<float>(k) / static_cast<float>(next_k));
    return kernels::order(t);
  }

  // ratio: candidates / k. The margin settles where the ratio is 1.08 to 1.3. Fewer candidates risk
  // a second pass, and more cost time.
  void adapt(double ratio) {
    if (ratio < 1.0) {
      margin *= 2.0F;
    } else if (ratio < 1.08) {
      margin *= 1.25F;
    } else if (ratio > 1.3) {
      margin *= 0.8F;
    }
    margin = std::clamp(margin, kLeastMargin, kLargestMargin);
  }

  // Records the result of a step. A threshold of 0 means that the step found none.
  void update(std::size_t new_n, std::size_t new_k, float new_threshold) {
    const bool follows = n == new_n && k == new_k && threshold > 0.0F;
    const float grown = follows ? new_threshold / threshold : 1.0F;
    const bool is_jump = !(grown <= kLargestGrowth && grown >= 1.0F / kLargestGrowth);
    growth = is_jump ? 1.0F : 0.5F * (growth + grown);
    n = new_n;
    k = new_k;
    threshold = new_threshold;
  }

  template <class Self, class F>
  static void each(Self& self, F f) {
    f(self.n);
    f(self.k);
    f(self.threshold);
    f(self.growth);
    f(self.margin);
  }
  bool valid() const {
    return n <= std::numeric_limits<Index>::max() && k <= n && std::isfinite(threshold) &&
           threshold >= 0.0F && growth >= 1.0F / kLargestGrowth && growth <= kLargestGrowth &&
           margin >= kLeastMargin && margin <= kLargestMargin;
  }
};

class Exact final : public Selector {
 public:
  std::string_view name() const noexcept override { return "exact"; }
  SelectReport select(const SelectTask& task, SparseBuffer& out) override;
  void save(std::ostream& out) const override { carried_.save(out, kMagic); }
  void load(std::istream& in) override { carried_.load(in, kMagic); }

 private:
  static constexpr std::string_view kMagic = "SKIMEXAC";

  void reserve(std::size_t n, std::size_t k, SparseBuffer& out);
  std::uint32_t sampled(const kernels::Pass& pass, std::size_t k);
  std::uint32_t prune(std::size_t k);
  void collect_all(const kernels::Pass& pass, std::uint32_t above, std::size_t k,
                   kernels::Sums& sums);

  selectors::PerSlot<Carried> carried_;
  std::vector<std::uint32_t> orders_;  // scratch, one for each candidate; never shrinks
  Candidates candidates_;              // of this step
  bool pruned_ = false;                // whether this pass has dropped candidates
};

// Candidates are stored in the output. With room for 2 k, each prune takes O(k) and frees room for
// k more. The constant keeps prunes rare for small k.
void Exact::reserve(std::size_t n, std::size_t k, SparseBuffer& out) {
  const std::size_t room = std::min(2 * k + 16384, n) + kernels::kBlock;
  if (orders_.size() < room + kernels::kSlack) orders_.resize(room + kernels::kSlack);
  out.set_dim(n);
  out.resize(room + kernels::kSlack);
  candidates_ = {out.indices().data(), out.values().data(), 0, room};
}

// A threshold that about k entries exceed, and hardly ever fewer. 0 if n is too small or k too
// large for a sample.
std::uint32_t Exact::sampled(const kernels::Pass& pass, std::size_t k) {
  constexpr std::size_t kSample = 16384;  // fits in orders_ for every k
  if (pass.n < 4 * kSample) return 0;
  // The sample contains about x of the k largest, with a standard deviation below sqrt(x).
  const double x =
      static_cast<double>(kSample) / static_cast<double>(pass.n) * static_cast<double>(k);
  const auto rank = static_cast<std::size_t>(x + 4.0 * std::sqrt(x) + 4.0);
  if (rank >= kSample) return 0;
  const std::size_t stride = pass.n / kSample;
  for (std::size_t s = 0; s < kSample; ++s) {
    orders_[s] = kernels::order(kernels::result(pass, s * stride));
  }
  const auto at = orders_.begin() + static_cast<std::ptrdiff_t>(rank);
  std::nth_element(orders_.begin(), at, orders_.begin() + kSample, std::greater<>());
  // Entries that equal the threshold must pass as well.
  return *at == 0 ? 0 : *at - 1;
}

// Keeps only the k largest candidates. Returns the order of the k-th. Requires: 0 < k < count.
std::uint32_t Exact::prune(std::size_t k) {
  const Cut cut = cut_of(candidates_.value, candidates_.count, k, orders_);
  kernels::keep_above(candidates_, cut.order, cut.ties);
  SKIM_ASSERT(candidates_.count == k);
  pruned_ = true;
  return cut.order;
}

void Exact::collect_all(const kernels::Pass& pass, std::uint32_t above, std::size_t k,
                        kernels::Sums& sums) {
  candidates_.count = 0;
  pruned_ = false;
  std::size_t at = 0;
  while ((at = kernels::collect(pass, at, above, candidates_, sums)) < pass.n) {
    above = prune(k);  // room ran out, so count > k
  }
}

SelectReport Exact::select(const SelectTask& task, SparseBuffer& out) {
  selectors::check(task);
  const std::size_t n = task.grad.n, k = task.keep.k;
  // Everything that may throw comes before the residual changes.
  Carried& carried = carried_[task.id.slot];
  reserve(n, k, out);

  const bool has_residual = !task.residual.empty();
  const kernels::Pass pass = selectors::accumulation(task);
  // Entries below keep.threshold, and zeros, are never candidates.
  const std::uint32_t floor =
      task.keep.threshold > 0.0F ? std::bit_cast<std::uint32_t>(task.keep.threshold) - 1 : 0;
  const std::uint32_t last = carried.start(n, k);
  const bool is_carried = k > 0 && last > floor;
  std::uint32_t above = kernels::kAboveAll;
  if (k > 0) above = std::max(floor, last > 0 ? last : sampled(pass, k));

  SelectReport report;
  kernels::Sums sums;
  collect_all(pass, above, k, sums);
  report.passes = n > 0 ? 1 : 0;
  if (is_carried) {
    const std::size_t found = pruned_ ? candidates_.room : candidates_.count;
    carried.adapt(static_cast<double>(found) / static_cast<double>(k));
  }
  while (candidates_.count < k && above > floor) {
    const kernels::Pass again =
        has_residual ? kernels::Pass{.grad = task.residual.data, .n = n} : pass;
    const std::uint32_t lower = report.passes == 1 ? sampled(again, k) : 0;
    above = std::max(floor, lower < above ? lower : 0);
    kernels::Sums unused;
    collect_all(again, above, k, unused);
    ++report.passes;
  }
  const std::size_t kept = std::min(k, candidates_.count);
  Cut cut;  // keeps all candidates, because none is zero
  if (candidates_.count > k) {
    cut = cut_of(candidates_.value, candidates_.count, k, orders_);
    report.threshold = selectors::magnitude_of(cut.order);
  } else if (kept > 0) {
    report.threshold = selectors::magnitude_of(kernels::smallest(candidates_.value, kept));
  }
  if (candidates_.count > kept) kernels::keep_above(candidates_, cut.order, cut.ties);
  SKIM_ASSERT(candidates_.count == kept);
  out.resize(kept);
  report.kept_norm2 = kernels::norm2(out.values().data(), kept);
  report.total_norm2 = has_residual ? sums.total : sums.gradient;
  report.gradient_norm2 = sums.gradient;
  report.non_finite = sums.non_finite;
  report.cleared = pass.clear != nullptr;

  const bool is_kth = kept == k && std::isfinite(report.threshold);
  carried.update(n, k, is_kth ? report.threshold : 0.0F);
  return report;
}

}  // namespace

std::unique_ptr<Selector> selectors::make_exact() { return std::make_unique<Exact>(); }

}  // namespace skim
