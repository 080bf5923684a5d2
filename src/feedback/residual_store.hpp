// Internal: residuals in fewer bits than a float.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "skim/feedback.hpp"

namespace skim {

// Holds n floats in the code bf16 or q8 (ResidualCode).
//
// Both round stochastically: x becomes the next code below or above, each with the probability that
// makes x the mean. The random bits are a hash of the bits of x and of its place, so a run can be
// repeated. A code becomes itself, so what is stored again unchanged does not change.
class ResidualStore {
 public:
  static constexpr std::size_t kBlock = 64;  // entries that share an exponent (q8)

  ResidualStore() = default;
  // Zeros. Requires: n is a multiple of kBlock, and the code is not f32.
  ResidualStore(ResidualCode code, std::size_t n);

  // Entries [at, at + out.size()).
  void load(std::size_t at, std::span<float> out) const;
  // Requires: at is a multiple of kBlock, and the entries up to the end of the last block belong to
  // no one else.
  void store(std::size_t at, std::span<const float> in);

 private:
  std::vector<std::uint16_t> halves_;   // bf16
  std::vector<std::int8_t> bytes_;      // q8: x = byte * 2^exponent
  std::vector<std::int8_t> exponents_;  // of each block
};

}  // namespace skim
