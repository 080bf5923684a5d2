// Internal: the state that `gaussian` carries from one step of a slot to the next, on any device.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "normal.hpp"
#include "select/kernels.hpp"

namespace skim::selectors {

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

}  // namespace skim::selectors
