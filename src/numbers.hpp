// Internal: small functions of numbers that several modules need.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>
#include <span>

namespace skim {

// ceil(log2 x). Requires: x >= 1.
inline int log2_ceil(int x) noexcept {
  return static_cast<int>(std::bit_width(static_cast<unsigned>(x - 1)));
}

// v, or the largest or least finite float beyond; NaN stays. std::clamp has branches that keep loops
// from being vectorised.
inline float clamped(float v) noexcept {
  constexpr float kMax = std::numeric_limits<float>::max();
  return std::min(std::max(v, -kMax), kMax);
}

// The middle value, or the mean of the two in the middle; 0 if there are none. Reorders x.
inline double median(std::span<double> x) {
  if (x.empty()) return 0.0;
  const auto middle = x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2);
  std::ranges::nth_element(x, middle);
  if (x.size() % 2 == 1) return *middle;
  return 0.5 * (*middle + *std::max_element(x.begin(), middle));
}

}  // namespace skim
