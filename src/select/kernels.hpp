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
#include "numbers.hpp"
#include "skim/types.hpp"

namespace skim::kernels {

// Magnitudes are compared as integers, called orders: the bits of a float without its sign. They
// sort like the magnitudes. -0 equals 0, and NaN is above infinity. All NaN get the same order, so
// that they tie.
inline constexpr std::uint32_t kLargestFinite = 0x7f7fffff;
inline constexpr std::uint32_t kOrderOfNan = 0x7f800001;
inline constexpr std::uint32_t kAboveAll = 0x7fffffff;  // nothing has a larger order
inline std::uint32_t order(float v) noexcept {
  return std::min(std::bit_cast<std::uint32_t>(v) & 0x7fffffffU, kOrderOfNan);
}

// The arithmetic of selection. Tests compare the vector loops with these functions.
// grad / scale, computed as g times the reciprocal. A product that overflows is clamped. Requires:
// g is finite.
inline float scaled(float g, float reciprocal) noexcept { return clamped(g * reciprocal); }
// Replaces NaN by 0. NaN can only come from a residual that already held one, which is a caller's
// mistake.
inline float accumulated(float residual, float x) noexcept {
  const float sum = clamped(residual + x);
  return std::isnan(sum) ? 0.0F : sum;
}

// Adds up the lanes [kVirtualLanes] as a tree, and overwrites them. Every target sums a block in
// this many virtual lanes, whatever the length of its vectors. So sums over n are the same on every
// target.
inline constexpr std::size_t kVirtualLanes = 32;
inline double fold(float* lanes) noexcept {
  for (std::size_t width = kVirtualLanes / 2; width > 0; width /= 2) {
    for (std::size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return static_cast<double>(lanes[0]);
}

inline constexpr std::size_t kBlock = 1024;  // entries between two checks of the room left
inline constexpr std::size_t kSlack = 64;    // entries that a store may write past the last one

// Entries that may be among the k largest, ascending by index. The arrays have kSlack entries more
// than `room`.
struct Candidates {
  Index* index = nullptr;
  float* value = nullptr;
  std::size_t count = 0, room = 0;
};

// A sum of squares over blocks: the blocks of each group in order, then the groups in order.
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
  operator double() const noexcept { return groups_ + group_; }  // NOLINT: implicit on purpose

 private:
  double groups_ = 0.0, group_ = 0.0;  // the sum of the complete groups; of the open group
  std::size_t blocks_ = 0;
};

// Sums over the blocks so far. They are part of the state of an unfinished pass.
struct Sums {
  Norm2 gradient;                // |grad / scale|^2 over the finite entries
  Norm2 total;                   // |residual|^2 after the addition
  std::uint64_t non_finite = 0;  // number of such entries in grad
};

// One pass over a gradient. It computes residual = decay * residual + grad / scale, if there is a
// residual. Every result whose order() is above a threshold becomes a candidate.
//
// Sums are the same bit for bit on every target. 32 virtual lanes add the squares of a block in
// float, the lanes are added as a tree, and the blocks are added in double by Norm2. If the squares
// of a block over- or underflow in float, the block is computed again in double, entry by entry.
struct Pass {
  const void* grad = nullptr;
  DType type = DType::f32;    // of grad
  float reciprocal = 1.0F;    // of the scale
  float decay = 1.0F;         // of the residual, in [0, 1]
  float* residual = nullptr;  // null: selects from grad alone
  std::size_t n = 0;
  void* clear = nullptr;  // grad, to zero each block while it is in the cache; null: keep it

  // An entry of grad, as a float.
  float gradient(std::size_t i) const noexcept { return entry(type, grad, i); }
};
// Continues at `first`. Stops at n, or before a block for which the room may be too small. Returns
// the place where it stopped. Requires: first is a multiple of kBlock.
std::size_t collect(const Pass& pass, std::size_t first, std::uint32_t above,
                    Candidates& candidates, Sums& sums);

// |x|^2 over the finite entries, with the sums of collect().
double norm2(const float* x, std::size_t n);

// The smallest order of x. Requires: n > 0.
std::uint32_t smallest(const float* x, std::size_t n);

// Writes the orders of x that lie in [low, high] to `middle` (room: n).
struct Bracket {
  std::size_t above = 0;   // orders > high
  std::size_t inside = 0;  // written
};
Bracket bracket(const float* x, std::size_t n, std::uint32_t low, std::uint32_t high,
                std::uint32_t* middle);

// Copies the candidates above `cut`, and the first `ties` that equal it, to `to`. `to` has either
// the same arrays or others with room for them and kSlack more.
void keep_above(const Candidates& candidates, std::uint32_t cut, std::size_t ties, Candidates& to);
inline void keep_above(Candidates& candidates, std::uint32_t cut, std::size_t ties) {
  keep_above(candidates, cut, ties, candidates);
}

// For tests: bits of Highway's targets that were compiled, and the one that runs now.
std::int64_t compiled_targets() noexcept;
std::int64_t running_target() noexcept;

}  // namespace skim::kernels
