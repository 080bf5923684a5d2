// Tells from a rank's losses that training has diverged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

namespace skim::train {

// Compares the median of the last kRecent losses with the median of the kBefore losses before
// those. NaN and infinite losses count as infinite. Cost: O(kBefore) a step, which is nothing
// beside the step.
class Watchdog {
 public:
  static constexpr std::size_t kRecent = 10, kBefore = 200;
  static constexpr std::int64_t kRollback = 2 * kRecent;  // a rollback goes back so many steps
  static constexpr std::size_t kFewest = 50;              // of the losses before, for a comparison

  // factor > 1: how far above counts as diverged.
  explicit Watchdog(double factor) : factor_(factor) {}

  // After each step. True: the recent median is not finite, or above `factor` times the one before.
  bool add(double loss);
  // The run goes back by this many steps.
  void forget(std::size_t steps);
  // The medians. 0: no losses yet.
  double recent() const;
  double before() const;

 private:
  double median_of(std::size_t first, std::size_t last) const;
  std::size_t split() const;  // the first recent loss
  double factor_;
  std::deque<double> losses_;
};

}  // namespace skim::train
