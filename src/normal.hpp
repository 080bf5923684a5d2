// Internal: the tail of the normal distribution, for rules and closed forms that assume one.
#pragma once

#include <cmath>
#include <limits>
#include <numbers>

namespace skim {

// The z with P(N > z) = q, N standard normal; at q = 0 infinity. Within 4e-15 of the exact value,
// relative to max(1, |z|). Requires: 0 <= q <= 1.
//
// Start: M. Abramowitz, I. Stegun, "Handbook of Mathematical Functions", 26.2.23 (error < 4.5e-4).
// Then two steps of Halley's method on P(N > z) - q, each of which cubes the error. With the tail
// as argument, not the probability below z, small q keep all their digits.
inline double normal_upper_quantile(double q) noexcept {
  if (q > 0.5) return -normal_upper_quantile(1.0 - q);
  if (q <= 0.0) return std::numeric_limits<double>::infinity();
  const double t = std::sqrt(-2.0 * std::log(q));
  double z = t - (2.515517 + t * (0.802853 + t * 0.010328)) /
                     (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
  for (int i = 0; i < 2; ++i) {
    const double density = std::exp(-0.5 * z * z) / std::sqrt(2.0 * std::numbers::pi);
    const double step = (0.5 * std::erfc(z / std::numbers::sqrt2) - q) / density;
    z += step / (1.0 - 0.5 * z * step);
  }
  return z;
}

}  // namespace skim
