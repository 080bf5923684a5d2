// Slow and obvious versions of what the library does, kept for good: tests compare with them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "skim/types.hpp"

namespace skim::test {

// Magnitude as an order: NaN above infinity, -0 equal to 0.
inline std::uint32_t magnitude(float v) { return std::bit_cast<std::uint32_t>(v) & 0x7fffffffU; }
// All NaN are equal, whatever their payload.
inline std::uint32_t order(float v) {
  return std::isnan(v) ? std::uint32_t{0x7fffffff} : magnitude(v);
}

// Top-k by a full sort: larger magnitude first, then lower index; zeros are never kept.
inline SparseBuffer top_k(const std::vector<float>& x, std::size_t k) {
  std::vector<Index> by;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (magnitude(x[i]) != 0) by.push_back(static_cast<Index>(i));
  }
  std::stable_sort(by.begin(), by.end(),
                   [&](Index a, Index b) { return order(x[a]) > order(x[b]); });
  by.resize(std::min(k, by.size()));
  std::sort(by.begin(), by.end());
  SparseBuffer out;
  out.reset(x.size());
  for (const Index i : by) out.append(i, x[i]);
  return out;
}

inline SparseBuffer sum(const std::vector<SparseView>& parts) {
  std::map<Index, float> total;
  for (const SparseView& p : parts) {
    for (std::size_t e = 0; e < p.nnz(); ++e) {
      const auto [at, fresh] = total.try_emplace(p.index[e], p.value[e]);
      if (!fresh) at->second += p.value[e];
    }
  }
  SparseBuffer out;
  out.reset(parts.front().dim);
  for (const auto& [i, v] : total) out.append(i, v);
  return out;
}

inline std::vector<float> dense(const SparseView& s) {
  std::vector<float> out(s.dim, 0.0F);
  for (std::size_t e = 0; e < s.nnz(); ++e) out[s.index[e]] = s.value[e];
  return out;
}

// Bit for bit.
inline bool same(const SparseView& a, const SparseView& b) {
  return a.dim == b.dim && std::ranges::equal(a.index, b.index) &&
         std::ranges::equal(a.value, b.value, [](float x, float y) {
           return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
         });
}

// What a 16-bit float means, by the book.
inline float meaning(std::uint16_t bits, DType type) {
  const int mantissa_bits = type == DType::f16 ? 10 : 7;
  const int bias = type == DType::f16 ? 15 : 127;
  const int exponents = type == DType::f16 ? 31 : 255;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const float sign = (bits & 0x8000) != 0 ? -1.0F : 1.0F;
  if (exponent == exponents) {
    return mantissa == 0 ? sign * std::numeric_limits<float>::infinity()
                         : std::numeric_limits<float>::quiet_NaN();
  }
  const int whole = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
  return sign * std::ldexp(static_cast<float>(whole), std::max(exponent, 1) - bias - mantissa_bits);
}

inline std::vector<float> normal(std::size_t n, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> d;
  std::vector<float> x(n);
  for (float& v : x) v = d(rng);
  return x;
}

// Whole numbers: float sums of them are exact, so that laws hold bit for bit.
inline std::vector<float> integers(std::size_t n, std::uint64_t seed, int limit = 1000) {
  std::mt19937_64 rng(seed);
  std::uniform_int_distribution<int> d(-limit, limit);
  std::vector<float> x(n);
  for (float& v : x) v = static_cast<float>(d(rng));
  return x;
}

}  // namespace skim::test
