// Rules that need no model of the entries: a fixed threshold, and the top of every chunk.
#include <algorithm>

#include "select/rule.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

using kernels::Candidates;
using selectors::Rule;

// N. Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", INTERSPEECH
// 2015. Selects all entries of at least the threshold, however many there are.
class Threshold final : public Rule {
 public:
  explicit Threshold(float threshold) : Rule(SelectRule::threshold), threshold_(threshold) {}

 private:
  void require(const SelectTask& task) const override {
    SKIM_EXPECTS(threshold_ > 0.0F || task.keep.threshold > 0.0F,
                 "select: the rule 'threshold' needs a threshold > 0; set select_threshold");
  }
  void pick(const SelectTask&) override {
    accumulate(threshold_ > 0.0F ? kernels::order(threshold_) - 1 : 0);
  }

  float threshold_;
};

// Selects the largest entries of every chunk of `block` entries, as in SparseLoCo (arXiv
// 2508.15706) and DeMo (B. Peng, J. Quesnelle, D. P. Kingma, arXiv 2411.19870). The first x entries
// get floor(x k / n) of the k, so the number for a chunk is proportional to its size, to within
// one. Each chunk is accumulated and cut while it is in the cache. Its threshold for candidates
// comes from the cut of the chunk before.
class BlockTopK final : public Rule {
 public:
  explicit BlockTopK(std::size_t block) : Rule(SelectRule::blocktopk), block_(block) {}

 private:
  Room room(std::size_t n, std::size_t k) const override {
    const std::size_t chunk = std::min(block_, n);
    return {k + chunk, chunk};
  }

  // Entries [at, at + n) of a pass.
  static kernels::Pass part(kernels::Pass pass, std::size_t at, std::size_t n) {
    const std::size_t skipped = at * bytes_of(pass.type);
    pass.grad = static_cast<const std::byte*>(pass.grad) + skipped;
    if (pass.clear != nullptr) pass.clear = static_cast<std::byte*>(pass.clear) + skipped;
    if (pass.residual != nullptr) pass.residual += at;
    pass.n = n;
    return pass;
  }

  void pick(const SelectTask& task) override {
    const std::size_t n = task.grad.n, k = task.keep.k;
    std::size_t read = 0, given = 0;
    std::uint32_t last_cut = 0;
    for (std::size_t at = 0; at < n; at += block_) {
      const std::size_t size = std::min(block_, n - at);
      const std::size_t share = (at + size) * k / n - given;
      given += share;
      Candidates chunk{candidates_.index + candidates_.count, candidates_.value + candidates_.count,
                       0, size + kernels::kBlock};
      // The last cut less a quarter of an octave: 2^21 is a quarter of the step from one exponent
      // to the next.
      std::uint32_t above = std::max(floor_, last_cut - std::min(last_cut, 1U << 21U));
      if (share == 0) above = kernels::kAboveAll;
      kernels::collect(part(pass_, at, size), 0, above, chunk, sums_);
      read += size;
      if (chunk.count < share && above > floor_) {
        kernels::Sums unused;
        chunk.count = 0;
        kernels::collect(part(values_, at, size), 0, floor_, chunk, unused);
        read += size;
      }
      if (chunk.count > share) {
        const selectors::Cut cut = selectors::cut_of(chunk.value, chunk.count, share, orders_);
        kernels::keep_above(chunk, cut.order, cut.ties);
        last_cut = cut.order;
      }
      for (std::size_t i = 0; i < chunk.count; ++i) chunk.index[i] += static_cast<Index>(at);
      candidates_.count += chunk.count;
    }
    passes_ = static_cast<int>((read + n - 1) / n);
  }

  std::size_t block_;
};

}  // namespace

std::unique_ptr<Selector> selectors::make_threshold(float threshold) {
  return std::make_unique<Threshold>(threshold);
}
std::unique_ptr<Selector> selectors::make_blocktopk(std::size_t block) {
  return std::make_unique<BlockTopK>(block);
}

}  // namespace skim
