// `topruns` sends whole runs of neighbours. Their indices take 2 to 4 bits in place of 8, so equal
// bytes carry more entries.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "select/rule.hpp"

namespace skim {
namespace {

using selectors::Rule;

// Runs of `run` entries, of which the last may be shorter, in the order of their norms, ties to the
// lower index. They are taken until there are k entries. Of the last run that is taken, only the
// largest entries may be among these k.
class TopRuns final : public Rule {
 public:
  // No bucket has more entries than an Index can count.
  explicit TopRuns(std::size_t run)
      : Rule(SelectRule::topruns),
        run_(std::min<std::size_t>(run, std::numeric_limits<Index>::max())) {}

 private:
  Room room(std::size_t n, std::size_t k) const override {
    return {k + std::min(run_, n), std::max(runs_of(n), std::min(run_, n))};
  }

  std::size_t runs_of(std::size_t n) const { return n / run_ + (n % run_ > 0 ? 1 : 0); }
  std::size_t begin_of(std::size_t run) const { return run * run_; }
  std::size_t end_of(std::size_t run) const { return std::min(begin_of(run) + run_, values_.n); }

  float value(std::size_t i) const {
    return floats_ != nullptr ? floats_[i] : kernels::result(values_, i);
  }
  bool is_candidate(float v) const { return kernels::order(v) > floor_; }
  std::size_t candidates_in(std::size_t run) const {
    std::size_t count = 0;
    for (std::size_t i = begin_of(run); i < end_of(run); ++i) count += is_candidate(value(i));
    return count;
  }

  // The norm of the run's candidates. A sum of exact squares in double has the same bits on every
  // CPU target.
  float norm_of(std::size_t run) const {
    double sum = 0.0;
    for (std::size_t i = begin_of(run); i < end_of(run); ++i) {
      const float v = value(i);
      if (floor_ == 0 || is_candidate(v)) sum += double{v} * double{v};
    }
    const double norm = std::sqrt(sum);
    // Only a run with an entry that is infinite or NaN has such a norm.
    constexpr double kMost = std::numeric_limits<float>::max();
    return static_cast<float>(std::isfinite(norm) ? std::min(norm, kMost) : norm);
  }

  void pick(const SelectTask& task) override {
    const std::size_t k = task.keep.k, runs = runs_of(task.grad.n);
    norms_.resize(runs);
    taken_.reserve(runs);
    accumulate();
    ++passes_;
    const bool are_floats = values_.type == DType::f32 && values_.reciprocal == 1.0F;
    floats_ = are_floats ? static_cast<const float*>(values_.grad) : nullptr;
    for (std::size_t r = 0; r < runs; ++r) norms_[r] = norm_of(r);
    take(k);
    for (const Index r : taken_) append(r);
  }

  // taken_ = the runs that have k entries together, ascending. last_ is the smallest of them, and
  // may give only last_gives_ entries.
  void take(std::size_t k) {
    const std::size_t runs = norms_.size();
    // Runs with zeros have fewer entries, so more runs may be needed.
    for (std::size_t most = (k + run_ - 1) / run_ + 1;; most *= 2) {
      most = std::min(most, runs);
      largest(most);
      last_gives_ = k;
      auto last = taken_.begin();
      for (; last != taken_.end(); ++last) {
        const std::size_t count = candidates_in(*last);
        if (count >= last_gives_) break;
        last_gives_ -= count;
      }
      if (last == taken_.end() && most < runs) continue;
      last_ = last == taken_.end() ? runs : *last;  // runs: all give all that they have
      if (last != taken_.end()) taken_.erase(last + 1, taken_.end());
      break;
    }
    std::ranges::sort(taken_);
  }

  // taken_ = the `most` largest runs, the largest first.
  void largest(std::size_t most) {
    selectors::Cut cut{0, norms_.size()};
    if (most < norms_.size()) cut = selectors::cut_of(norms_.data(), norms_.size(), most, orders_);
    taken_.clear();
    for (std::size_t r = 0; r < norms_.size(); ++r) {
      const std::uint32_t order = kernels::order(norms_[r]);
      if (order > cut.order || (order == cut.order && cut.ties > 0)) {
        if (order == cut.order) --cut.ties;
        taken_.push_back(static_cast<Index>(r));
      }
    }
    std::ranges::sort(taken_, [&](Index a, Index b) {
      const std::uint32_t of_a = kernels::order(norms_[a]), of_b = kernels::order(norms_[b]);
      return of_a != of_b ? of_a > of_b : a < b;
    });
  }

  // Appends a run's candidates; of the last run only the largest.
  void append(std::size_t run) {
    selectors::Cut cut{floor_, 0};
    if (run == last_) {
      std::size_t count = 0;
      for (std::size_t i = begin_of(run); i < end_of(run); ++i) {
        orders_[count++] = kernels::order(value(i));
      }
      cut = selectors::cut_of({orders_.data(), count}, last_gives_);
    }
    for (std::size_t i = begin_of(run); i < end_of(run); ++i) {
      const float v = value(i);
      const std::uint32_t order = kernels::order(v);
      if (order < cut.order || order <= floor_ || (order == cut.order && cut.ties == 0)) continue;
      if (order == cut.order) --cut.ties;
      candidates_.index[candidates_.count] = static_cast<Index>(i);
      candidates_.value[candidates_.count++] = v;
    }
  }

  std::size_t run_;
  const float* floats_ = nullptr;  // what is selected from, if it is floats as they are
  std::vector<float> norms_;       // of all runs
  std::vector<Index> taken_;       // runs
  std::size_t last_ = 0, last_gives_ = 0;
};

}  // namespace

std::unique_ptr<Selector> selectors::make_topruns(std::size_t run) {
  return std::make_unique<TopRuns>(run);
}

}  // namespace skim
