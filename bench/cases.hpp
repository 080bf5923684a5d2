// The inputs of all benchmarks: shapes of gradients, lengths and densities.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numbers>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "skim/error.hpp"
#include "src/random.hpp"

namespace skim::bench {

struct Shape {
  std::string_view name, what;
};
inline constexpr std::array<Shape, 9> kShapes{{
    {"normal", "standard normal"},
    {"laplace", "Laplace"},
    {"heavy", "magnitudes u^-3 with u uniform in (0, 1): the largest hold nearly all the mass"},
    {"zeros", "49 of 50 entries are zero, the others normal"},
    {"equal", "every entry is 1.5"},
    {"leading-bits", "magnitudes that differ in the last 4 bits only"},
    {"recorded", "a gradient of training: from a file, or rows of Laplace with lognormal scales"},
    {"nonfinite", "normal, with one entry in 50 NaN or infinite"},
    {"jump", "normal, times 1, 10^6, -10^6 and 1 in turn"},
}};
// The full run of `exact` takes the first 7 shapes at every length and density, and all shapes at
// kMiddleLength.
inline constexpr std::size_t kShapesOfFullRun = 7;

inline constexpr std::array<double, 4> kDensities{0.1, 0.01, 0.001, 0.0001};
// Powers of four.
inline constexpr std::array<std::size_t, 7> kLengths{
    std::size_t{1} << 16, std::size_t{1} << 18, std::size_t{1} << 20, std::size_t{1} << 22,
    std::size_t{1} << 24, std::size_t{1} << 26, std::size_t{1} << 28};
// The length at which selectors are compared: a model of 25 million parameters in one bucket.
inline constexpr std::size_t kMiddleLength = 25'000'000;

// A counter-based generator (SplitMix64), so entry i of an array needs no earlier entry.
inline std::uint64_t hash(std::uint64_t i) noexcept { return mix((i + 1) * kSplitMixStride); }

// Draws magnitudes from a table of their quantiles, with linear interpolation. This is fast, and
// the same on all machines.
class Magnitudes {
 public:
  // quantile: ascending on (0, 1).
  explicit Magnitudes(const std::function<double(double)>& quantile) {
    for (std::size_t i = 0; i <= kCells; ++i) {
      const double u =
          std::min(static_cast<double>(i) / kCells, 1.0 - 0.25 / kCells);  // the end is cut off
      table_[i] = static_cast<float>(quantile(u));
    }
  }
  // The upper bits of `random` choose the magnitude, the lowest bit chooses the sign.
  float draw(std::uint64_t random) const noexcept {
    const std::size_t cell = random >> 48U;
    const float part = static_cast<float>(random >> 24U & 0xffffffU) * 0x1p-24F;
    const float m = table_[cell] + part * (table_[cell + 1] - table_[cell]);
    return (random & 1U) != 0 ? -m : m;
  }

 private:
  static constexpr std::size_t kCells = 65536;
  std::vector<float> table_ = std::vector<float>(kCells + 1);
};

// The u-quantile of |x| for a standard normal x, by Newton's method on erf, from below.
inline double half_normal_quantile(double u) {
  double z = 0.0;
  for (int i = 0; i < 60; ++i) {
    const double error = std::erf(z / std::sqrt(2.0)) - u;
    const double slope = std::sqrt(2.0 / std::numbers::pi) * std::exp(-0.5 * z * z);
    const double step = error / slope;
    z -= step;
    if (std::abs(step) < 1e-12) break;
  }
  return z;
}

// Four gradients of one shape, which take turns. They share one array to save memory: entry i of
// gradient t is entry i + t * kShift of the array.
class Gradients {
 public:
  static constexpr std::size_t kInTurn = 4, kShift = 4099;
  static constexpr std::size_t kRow = 576;  // entries with one scale in a generated "recorded"

  // recorded: the values of the shape "recorded", repeated as needed. If it is empty, they are
  // generated. Throws: InvalidArgument: unknown shape.
  Gradients(std::string_view shape, std::size_t n, std::span<const float> recorded = {})
      : shape_(shape), n_(n), from_file_(!recorded.empty()) {
    const std::size_t total = n + (kInTurn - 1) * kShift;
    values_.resize(total);
    if (shape == "recorded" && from_file_) {
      for (std::size_t i = 0; i < total; ++i) values_[i] = recorded[i % recorded.size()];
      return;
    }
    const auto all = [&](auto&& value) {
      for (std::size_t i = 0; i < total; ++i) values_[i] = value(hash(i));
    };
    if (shape == "normal" || shape == "zeros" || shape == "nonfinite" || shape == "jump") {
      const Magnitudes normal(half_normal_quantile);
      all([&](std::uint64_t r) { return normal.draw(r); });
      if (shape == "zeros") {
        for (std::size_t i = 0; i < total; ++i) {
          if (hash(~i) % 50 != 0) values_[i] = 0.0F;
        }
      } else if (shape == "nonfinite") {
        constexpr float kInf = std::numeric_limits<float>::infinity();
        constexpr std::array kOdd{std::numeric_limits<float>::quiet_NaN(), kInf, -kInf};
        for (std::size_t i = 0; i < total; ++i) {
          if (const std::uint64_t r = hash(~i); r % 50 == 0) values_[i] = kOdd[r / 50 % 3];
        }
      }
    } else if (shape == "laplace" || shape == "recorded") {
      const Magnitudes laplace([](double u) { return -std::log1p(-u); });
      all([&](std::uint64_t r) { return laplace.draw(r); });
    } else if (shape == "heavy") {
      const Magnitudes heavy([](double u) { return std::pow(1.0 - u, -3.0); });
      all([&](std::uint64_t r) { return heavy.draw(r); });
    } else if (shape == "equal") {
      std::ranges::fill(values_, 1.5F);
    } else if (shape == "leading-bits") {
      all([](std::uint64_t r) {
        const float m = std::bit_cast<float>(std::bit_cast<std::uint32_t>(1.0F) +
                                             static_cast<std::uint32_t>(r >> 60U));
        return (r & 1U) != 0 ? -m : m;
      });
    } else {
      std::string names;
      for (const Shape& s : kShapes) names += (names.empty() ? "" : ", ") + std::string(s.name);
      throw InvalidArgument("unknown shape '" + std::string(shape) + "', expected one of " + names);
    }
  }

  std::string_view shape() const noexcept { return shape_; }
  std::size_t n() const noexcept { return n_; }

  // Writes entries [first, first + out.size()) of gradient t mod 4.
  void write(std::uint64_t t, std::size_t first, std::span<float> out) const {
    const std::size_t turn = t % kInTurn;
    const float* const from = values_.data() + first + turn * kShift;
    if (shape_ == "jump") {
      constexpr std::array<float, kInTurn> kFactors{1.0F, 1e6F, -1e6F, 1.0F};
      // The third gradient cancels the second, so large residuals become small again.
      const float* const same = turn == 2 ? from - kShift : from;
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = kFactors[turn] * same[i];
    } else if (shape_ == "recorded" && !from_file_) {
      for (std::size_t i = 0; i < out.size();) {
        const std::size_t row = (first + i) / kRow;
        const std::size_t end = std::min(out.size(), (row + 1) * kRow - first);
        const float scale = scale_of(row);
        for (; i < end; ++i) out[i] = scale * from[i];
      }
    } else {
      std::memcpy(out.data(), from, out.size_bytes());
    }
  }

 private:
  // exp of a normal number with deviation 1.5. A sum of 12 uniform numbers stands for a normal one.
  static float scale_of(std::size_t row) {
    double sum = -6.0;
    for (std::uint64_t j = 0; j < 12; ++j) {
      sum += static_cast<double>(hash(12 * row + j) >> 11U) * 0x1p-53;
    }
    return static_cast<float>(1e-3 * std::exp(1.5 * sum));
  }

  std::string_view shape_;
  std::size_t n_;
  bool from_file_;
  std::vector<float> values_;
};

}  // namespace skim::bench
