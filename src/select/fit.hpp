// Internal: what `gaussian` carries from one step of a slot to the next, on any device.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "normal.hpp"
#include "select/kernels.hpp"

namespace skim::selectors {

// The deviation of the normal distribution around 0 whose tail agrees with the count
// and the smallest entry of the last selection. Derived: as gradients are not normal, it is not
// their deviation, but it follows them when they or k change a little.
struct Fit {
  std::uint64_t n = 0;
  double deviation = 0.0;  // 0: there were too few non-zeros

  // Of a normal distribution around 0 with deviation 1, the magnitude that `count` of n entries
  // pass.
  static double quantile(double count, std::size_t n) {
    return normal_upper_quantile(0.5 * count / static_cast<double>(n));
  }
  // If `count` of n entries have this order or a larger one; 0 if none would be finite.
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
