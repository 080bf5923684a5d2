// Internal: the loops over n of selection, written once for every CPU target (kernels.cpp).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

#include "half.hpp"
#include "skim/types.hpp"

namespace skim::kernels {

// Magnitudes are compared as integers: the bits of a float without its sign order like its
// magnitude, -0 equals 0, and NaN stands above infinity. All NaN get one order, so that they tie.
inline constexpr std::uint32_t kLargestFinite = 0x7f7fffff;
inline constexpr std::uint32_t kOrderOfNan = 0x7f800001;
inline constexpr std::uint32_t kAboveAll = 0x7fffffff;  // nothing has a larger order
inline std::uint32_t order(float v) noexcept {
  return std::min(std::bit_cast<std::uint32_t>(v) & 0x7fffffffU, kOrderOfNan);
}

// The arithmetic of selection, by which the vector loops are judged.
inline float clamped(float v) noexcept {
  constexpr float kMax = std::numeric_limits<float>::max();
  return std::clamp(v, -kMax, kMax);  // NaN stays
}
// grad / scale is g times the reciprocal; a product that overflows is clamped. Requires: g finite.
inline float scaled(float g, float reciprocal) noexcept { return clamped(g * reciprocal); }
// NaN can only come from a residual that held one (a caller's mistake): it ends here.
inline float accumulated(float residual, float x) noexcept {
  const float sum = clamped(residual + x);
  return std::isnan(sum) ? 0.0F : sum;
}

// Sums over n are the same on every target because a block is added up in virtual lanes, whatever
// the length of a vector, and the lanes [kVirtualLanes] as a tree. Overwrites them.
inline constexpr std::size_t kVirtualLanes = 32;
inline double fold(float* lanes) noexcept {
  for (std::size_t width = kVirtualLanes / 2; width > 0; width /= 2) {
    for (std::size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return static_cast<double>(lanes[0]);
}

inline constexpr std::size_t kBlock = 1024;  // entries between two looks at the room left
inline constexpr std::size_t kSlack = 64;    // entries that a store may write past the last one

// Entries that may be among the k largest, ascending by index. The arrays are kSlack longer than
// room.
struct Candidates {
  Index* index = nullptr;
  float* value = nullptr;
  std::size_t count = 0, room = 0;
};

// A sum of squares, block by block: those of a group in order, then the groups in order, so that
// others who add up groups at the same time (a GPU) get the same bits.
class Norm2 {
 public:
  static constexpr std::size_t kGroup = 256;  // blocks
  void add(double block) noexcept {
    group_ += block;
    if (++blocks_ % kGroup == 0) {
      groups_ += group_;
      group_ = 0.0;
    }
  }
  operator double() const noexcept { return groups_ + group_; }  // NOLINT: it is that number

 private:
  double groups_ = 0.0, group_ = 0.0;  // of whole groups; of the open one
  std::size_t blocks_ = 0;
};

// Of the blocks so far; part of the state of a pass that goes on.
struct Sums {
  Norm2 gradient;                // |grad / scale|^2 over the finite entries
  Norm2 total;                   // |residual|^2 after the addition
  std::uint64_t non_finite = 0;  // entries of grad
};

// One pass over a gradient: residual = decay * residual + grad / scale if there is a residual, and
// a candidate for each result above a threshold (in order()).
//
// Sums are the same bit for bit on every target: 32 virtual lanes add squares in float over a
// block, lanes add up as a tree, blocks add up in double as Norm2 has it; a block whose squares
// over- or underflow in float is done again in double, entry by entry.
struct Pass {
  const void* grad = nullptr;
  DType type = DType::f32;    // of grad
  float reciprocal = 1.0F;    // of the scale
  float decay = 1.0F;         // of the residual, in [0, 1]
  float* residual = nullptr;  // null: selects from grad alone
  std::size_t n = 0;
  void* clear = nullptr;  // grad, if zeros are to be left in it: while a block is in the cache

  // An entry of grad, as a float.
  float gradient(std::size_t i) const noexcept { return entry(type, grad, i); }
};
// Goes on at `first`, stops at n or before a block that might not find room; returns where.
// Requires: first is a multiple of kBlock.
std::size_t collect(const Pass& pass, std::size_t first, std::uint32_t above,
                    Candidates& candidates, Sums& sums);

// |x|^2 over the finite entries, with the sums of collect().
double norm2(const float* x, std::size_t n);

// The smallest order of x. Requires: n > 0.
std::uint32_t smallest(const float* x, std::size_t n);

// Writes the orders of x that lie in [low, high] to `middle` (room: n + kSlack).
struct Bracket {
  std::size_t above = 0;   // orders > high
  std::size_t inside = 0;  // written
};
Bracket bracket(const float* x, std::size_t n, std::uint32_t low, std::uint32_t high,
                std::uint32_t* middle);

// Copies the candidates above `cut` and the first `ties` that equal it to `to`: other arrays,
// kSlack longer than that, or the same.
void keep_above(const Candidates& candidates, std::uint32_t cut, std::size_t ties, Candidates& to);
inline void keep_above(Candidates& candidates, std::uint32_t cut, std::size_t ties) {
  keep_above(candidates, cut, ties, candidates);
}

// For tests: bits of Highway's targets that were compiled, and the one that runs now.
std::int64_t compiled_targets() noexcept;
std::int64_t running_target() noexcept;

}  // namespace skim::kernels
