// Random numbers that are a pure function of a key, the same on every machine, rank and thread. The
// distributions of <random> differ between standard libraries, and torch's differ between CPUs.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "src/random.hpp"

namespace skim::train {

// The first part of a key of the data, different for each use of random numbers.
enum Purpose : std::uint64_t { kOrder = 1, kAugment, kOffset, kGlyph, kImage, kDeal };

// SplitMix64 started from a key, for example {seed, purpose, epoch, example}. Distinct keys give
// unrelated streams, so any example can be made without those before it.
class Random {
 public:
  constexpr Random(std::initializer_list<std::uint64_t> key) noexcept {
    for (const std::uint64_t part : key) state_ = mix(state_ + part + kSplitMixStride);
  }

  constexpr std::uint64_t next() noexcept { return mix(state_ += kSplitMixStride); }

  // In [0, n). Requires: 0 < n < 2^32. The bias is below n / 2^32, which is negligible here.
  constexpr std::uint64_t below(std::uint64_t n) noexcept { return ((next() >> 32U) * n) >> 32U; }

  // In [0, 1), multiples of 2^-24, so exact in float.
  constexpr float uniform() noexcept { return static_cast<float>(next() >> 40U) * 0x1p-24F; }
  constexpr float uniform(float first, float last) noexcept {
    return first + (last - first) * uniform();
  }

  // Mean 0, variance 1, bounded by 3.5: the sum of four uniforms. It avoids the logarithm, whose
  // last bit depends on the machine.
  constexpr float bell() noexcept {
    const float sum = (uniform() + uniform()) + (uniform() + uniform());
    return (sum - 2.0F) * 1.7320508F;
  }

 private:
  std::uint64_t state_ = 0;
};

}  // namespace skim::train
