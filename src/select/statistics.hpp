// Internal: moments and counts over n values, for rules that fit a threshold. Written once for
// every CPU target (statistics.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "select/kernels.hpp"

namespace skim::kernels {

// Entry i as collect() computes it: the new residual or, without a residual, the scaled gradient.
inline float result(const Pass& pass, std::size_t i) noexcept {
  const float g = pass.gradient(i);
  const bool finite = std::isfinite(g);
  if (pass.residual == nullptr) return finite ? scaled(g, pass.reciprocal) : g * pass.reciprocal;
  return accumulated(pass.decay * pass.residual[i], finite ? scaled(g, pass.reciprocal) : 0.0F);
}

// Moments of the finite entries whose order is above a threshold.
struct Moments {
  std::size_t count = 0;
  double sum = 0.0, sum_abs = 0.0;
  float least_abs = 0.0F, largest_abs = 0.0F;  // 0 if there is none
};
// Gives the same bits on every target (see Sums). Requires, here and below: values has no residual.
Moments moments(const Pass& values, std::uint32_t above);

// counts[t] = the number of entries whose order is above above[t]. One pass counts all thresholds.
void count_above(const Pass& values, std::span<const std::uint32_t> above,
                 std::span<std::size_t> counts);

}  // namespace skim::kernels
