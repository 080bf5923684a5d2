// Internal: helpers for every local half of the library, wherever its memory is.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "half.hpp"
#include "skim/select.hpp"
#include "skim/types.hpp"

namespace skim {

inline bool all_finite(std::span<const float> values) {
  bool finite = true;
  for (const float v : values) finite = finite && std::isfinite(v);
  return finite;
}

// out = factor * sum, converted to `type`. out has sum.size() entries. Returns whether the sum is
// finite.
inline bool scale_into(std::span<const float> sum, float factor, DType type, void* out) {
  // No branch, so that the loop is vectorised.
  std::uint32_t bad = 0;
  const auto is_bad = [](float v) {
    return std::abs(v) <= std::numeric_limits<float>::max() ? 0U : 1U;
  };
  if (type == DType::f32) {
    auto* const floats = static_cast<float*>(out);
    for (std::size_t i = 0; i < sum.size(); ++i) {
      bad |= is_bad(sum[i]);
      floats[i] = sum[i] * factor;
    }
  } else {
    for (std::size_t i = 0; i < sum.size(); ++i) {
      bad |= is_bad(sum[i]);
      set_entry(type, out, i, product(sum[i], factor));
    }
  }
  return bad == 0;
}

// Drops the smallest entries of a selection. They stay in the residual, like every entry that is
// not committed.
class AtMost {
 public:
  void cut(std::size_t k, SparseBuffer& mine, SelectReport& report) {
    split_top_k(mine.view(), k, kept_, dropped_, scratch_);
    std::swap(mine, kept_);
    report.kept_norm2 = 0.0;
    report.threshold = std::numeric_limits<float>::max();
    for (const float v : mine.view().value) {
      report.kept_norm2 += double{v} * double{v};
      report.threshold = std::min(report.threshold, std::abs(v));
    }
  }

 private:
  SparseBuffer kept_, dropped_;
  std::vector<std::uint32_t> scratch_;
};

}  // namespace skim
