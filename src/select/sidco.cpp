// SIDCo with the exponential model: A. M. Abdelmoniem, A. Elzanaty, M.-S. Alouini, M. Canini, "An
// Efficient Statistical-based Gradient Compression Technique for Distributed Training Systems",
// MLSys 2021.
#include <algorithm>
#include <array>
#include <cmath>

#include "select/rule.hpp"

namespace skim {
namespace {

// The rule assumes that magnitudes are exponential, so that a fraction r of them exceeds -mean ln
// r. With several stages, the first one keeps a quarter of the entries. Each further stage fits the
// entries that exceed the threshold before it. More stages follow the tail more closely.
class Sidco final : public selectors::Rule {
 public:
  explicit Sidco(int stages) : Rule(SelectRule::sidco), stages_(stages) {}
  void save(std::ostream& out) const override { slots_.save(out, kMagic); }
  void load(std::istream& in) override { slots_.load(in, kMagic); }

 private:
  static constexpr std::string_view kMagic = "SKIMSIDC";
  static constexpr double kFirst = 0.25;
  static constexpr std::uint32_t kPeriod = 5, kMostStages = 8;

  struct Adaptation {
    std::uint32_t stages = 1, steps = 0;  // steps: done in this period
    double achieved = 0.0;                // sum of count / k over these steps
    // |ln(achieved / wanted)| of the last period with 1, 2, ... stages; 0 if not tried yet.
    std::array<double, kMostStages> error{};

    template <class Self, class F>
    static void each(Self& self, F f) {
      f(self.stages);
      f(self.steps);
      f(self.achieved);
      for (auto& e : self.error) f(e);
    }
    bool valid() const {
      return stages >= 1 && stages <= kMostStages && steps < kPeriod && std::isfinite(achieved) &&
             achieved >= 0.0 &&
             std::ranges::all_of(error, [](double e) { return std::isfinite(e) && e >= 0.0; });
    }

    // As published, the number of stages may change every kPeriod steps, if the mean count is off
    // by more than 20 %. How the new number is chosen is our own: each number is tried once, then
    // the best so far is used. The count alone does not tell the direction. If too many entries are
    // sent, a tail heavier than exponential needs more stages, and a lighter tail needs fewer.
    void observe(double ratio) {
      achieved += ratio;
      if (++steps < kPeriod) return;
      const double mean = achieved / kPeriod;
      error[stages - 1] = std::abs(std::log(std::max(mean, 1e-6)));
      if (std::abs(mean - 1.0) > 0.2) {
        stages = static_cast<std::uint32_t>(std::ranges::min_element(error) - error.begin()) + 1;
      }
      steps = 0;
      achieved = 0.0;
    }
  };

  void pick(const SelectTask& task) override {
    const double n = static_cast<double>(task.grad.n), k = static_cast<double>(task.keep.k);
    Adaptation& slot = slots_[task.id.slot];
    const double ratio = k / n;
    int stages = stages_ > 0 ? stages_ : static_cast<int>(slot.stages);
    if (ratio >= kFirst) stages = 1;

    accumulate();
    collect(selectors::order_of(-moments().sum_abs / n * std::log(stages > 1 ? kFirst : ratio)));
    const double rest = std::log(ratio / kFirst) / (stages - 1);
    for (int stage = 2; stage <= stages; ++stage) {
      const kernels::Moments m = kernels::moments(candidate_values(), 0);
      if (m.count == 0) break;
      const double least = static_cast<double>(m.least_abs);
      const double excess = m.sum_abs / static_cast<double>(m.count) - least;
      kernels::keep_above(candidates_, selectors::order_of(least - excess * rest), 0);
    }
    const bool chosen = stages_ == 0 && ratio < kFirst;  // else one stage ran, whatever slot has
    if (chosen) slot.observe(static_cast<double>(candidates_.count) / k);
  }

  int stages_;
  selectors::PerSlot<Adaptation> slots_;
};

}  // namespace

std::unique_ptr<Selector> selectors::make_sidco(int stages) {
  return std::make_unique<Sidco>(stages);
}

}  // namespace skim
