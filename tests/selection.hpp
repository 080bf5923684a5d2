// What the tests of selection share: CPU targets, and inputs from harmless to hostile.
#pragma once

#include <hwy/targets.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string_view>
#include <vector>

#include "oracle.hpp"
#include "select/kernels.hpp"

namespace skim::test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kMax = std::numeric_limits<float>::max();
inline constexpr float kDenormal = std::numeric_limits<float>::denorm_min();
using Floats = std::vector<float>;

inline bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// ---- CPU targets

// Those that were compiled into kernels.cpp and that this CPU can run; the fallback always can.
inline std::vector<std::int64_t> targets() {
  hwy::SetSupportedTargetsForTest(0);
  const std::int64_t fallback = HWY_SCALAR | HWY_EMU128;
  std::int64_t bits = kernels::compiled_targets() & (hwy::SupportedTargets() | fallback);
  std::vector<std::int64_t> list;
  for (; bits != 0; bits &= bits - 1) list.push_back(bits & -bits);
  return list;
}

class ForcedTarget {
 public:
  explicit ForcedTarget(std::int64_t target) { hwy::SetSupportedTargetsForTest(target); }
  ~ForcedTarget() { hwy::SetSupportedTargetsForTest(0); }
  ForcedTarget(const ForcedTarget&) = delete;
  ForcedTarget& operator=(const ForcedTarget&) = delete;
};

// ---- inputs

struct Shape {
  const char* name;
  Floats (*make)(std::size_t n, std::uint64_t seed);
};

template <typename F>
Floats fill(std::size_t n, std::uint64_t seed, F value) {
  std::mt19937_64 rng(seed);
  Floats x(n);
  for (std::size_t i = 0; i < n; ++i) x[i] = value(rng, i);
  return x;
}

inline const std::array kShapes = {
    Shape{"normal", [](std::size_t n, std::uint64_t seed) { return normal(n, seed); }},
    Shape{"all equal",
          [](std::size_t n, std::uint64_t seed) {
            return fill(n, seed, [](auto& rng, std::size_t) { return rng() % 2 ? 1.5F : -1.5F; });
          }},
    Shape{"all zero",
          [](std::size_t n, std::uint64_t seed) {
            return fill(n, seed, [](auto& rng, std::size_t) { return rng() % 2 ? 0.0F : -0.0F; });
          }},
    Shape{"mostly zero",
          [](std::size_t n, std::uint64_t seed) {
            return fill(n, seed, [](auto& rng, std::size_t) {
              return rng() % 50 ? -0.0F : static_cast<float>(static_cast<int>(rng() % 2001) - 1000);
            });
          }},
    Shape{"same leading bits",
          [](std::size_t n, std::uint64_t seed) {
            return fill(n, seed, [](auto& rng, std::size_t) {
              const auto bits =
                  std::bit_cast<std::uint32_t>(1.0F) + static_cast<std::uint32_t>(rng() % 16);
              return std::bit_cast<float>(bits);
            });
          }},
    Shape{"few values",
          [](std::size_t n, std::uint64_t seed) { return integers(n, seed, 3); }},
    Shape{"not finite",
          [](std::size_t n, std::uint64_t seed) {
            Floats x = normal(n, seed);
            std::mt19937_64 rng(seed);
            for (float& v : x) {
              const std::array odd = {kNan, -kNan, kInf, -kInf};
              if (const auto d = rng() % 40; d < 4) v = odd[d];
            }
            return x;
          }},
    Shape{"all infinite",
          [](std::size_t n, std::uint64_t seed) {
            return fill(n, seed, [](auto& rng, std::size_t) { return rng() % 2 ? kInf : -kInf; });
          }},
    Shape{"denormal",
          [](std::size_t n, std::uint64_t seed) {
            return fill(n, seed, [](auto& rng, std::size_t) {
              return kDenormal * static_cast<float>(static_cast<int>(rng() % 4001) - 2000);
            });
          }},
    Shape{"heavy tail",
          [](std::size_t n, std::uint64_t seed) {
            return fill(n, seed, [](auto& rng, std::size_t) {
              const double u = (static_cast<double>(rng() % 1000000) + 0.5) / 1e6;
              return static_cast<float>((rng() % 2 ? 1.0 : -1.0) * std::pow(u, -3.0));
            });
          }},
    Shape{"huge",
          [](std::size_t n, std::uint64_t seed) {
            return fill(n, seed, [](auto& rng, std::size_t) {
              return kMax * (static_cast<float>(rng() % 2001) / 1000.0F - 1.0F);
            });
          }},
    Shape{"ascending",
          [](std::size_t n, std::uint64_t seed) {
            return fill(n, seed, [](auto&, std::size_t i) { return static_cast<float>(i + 1); });
          }},
    Shape{"descending",
          [](std::size_t n, std::uint64_t seed) {
            return fill(n, seed, [n](auto&, std::size_t i) {
              return static_cast<float>(i) - static_cast<float>(n);
            });
          }},
    Shape{"laplace",
          [](std::size_t n, std::uint64_t seed) {
            return fill(n, seed, [d = std::exponential_distribution<float>()](
                                     auto& rng, std::size_t) mutable {
              const float v = d(rng);
              return rng() % 2 ? v : -v;
            });
          }},
    Shape{"student t4",
          [](std::size_t n, std::uint64_t seed) {
            return fill(n, seed, [d = std::student_t_distribution<float>(4.0F)](
                                     auto& rng, std::size_t) mutable { return d(rng); });
          }},
    Shape{"student t2.5",
          [](std::size_t n, std::uint64_t seed) {
            return fill(n, seed, [d = std::student_t_distribution<float>(2.5F)](
                                     auto& rng, std::size_t) mutable { return d(rng); });
          }},
    Shape{"uniform",
          [](std::size_t n, std::uint64_t seed) {
            return fill(n, seed, [d = std::uniform_real_distribution<float>(-1.0F, 1.0F)](
                                     auto& rng, std::size_t) mutable { return d(rng); });
          }},
};

// By name, so that a test says what it needs.
inline const Shape& shape(std::string_view name) {
  return *std::find_if(kShapes.begin(), kShapes.end(),
                       [&](const Shape& s) { return s.name == name; });
}

}  // namespace skim::test
