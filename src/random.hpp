// Internal: random numbers that are a pure function of a key, on every machine the same.
#pragma once

#include <cstddef>
#include <cstdint>

#include "skim/types.hpp"

namespace skim {

// SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators",
// OOPSLA 2014): what its state grows by, 2^64 / golden ratio; and its finaliser, a bijection that
// spreads every bit.
inline constexpr std::uint64_t kSplitMixStride = 0x9e3779b97f4a7c15U;
constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31U);
}

// SplitMix64 started from seed, step and slot; and from a further number, such as a rank, where
// equal ones must not draw alike.
class Random {
 public:
  Random(std::uint64_t seed, StepId id) noexcept : state_(seed) {
    state_ = next() ^ id.step;
    state_ = next() ^ id.slot;
  }
  Random(std::uint64_t seed, StepId id, std::uint64_t stream) noexcept : Random(seed, id) {
    state_ = next() ^ stream;
  }
  std::uint64_t next() noexcept { return mix(state_ += kSplitMixStride); }
  // Uniform in [0, bound), exactly (D. Lemire, "Fast Random Integer Generation in an Interval",
  // 2019). Requires: 0 < bound < 2^32.
  std::size_t below(std::size_t bound) noexcept {
    const std::uint64_t rejected = (std::uint64_t{1} << 32U) % bound;
    std::uint64_t product = 0;
    do {
      product = (next() >> 32U) * bound;
    } while ((product & 0xffffffffU) < rejected);
    return static_cast<std::size_t>(product >> 32U);
  }

 private:
  std::uint64_t state_;
};

}  // namespace skim
