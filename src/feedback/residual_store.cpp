#include "feedback/residual_store.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "half.hpp"

namespace skim {
namespace {

constexpr std::string_view kResidualCodes[] = {"f32", "bf16", "q8"};

// So that 2^exponent and 2^-exponent are normal floats, and 127 * 2^exponent is finite.
constexpr int kLeastExponent = -126, kLargestExponent = 121;

// 16 random bits for the entry x at place i of what is stored.
std::uint32_t random_bits(float x, std::size_t i) noexcept {
  std::uint32_t h =
      std::bit_cast<std::uint32_t>(x) + static_cast<std::uint32_t>(i) * 0x9e3779b9U;
  h = (h ^ h >> 16U) * 0x7feb352dU;
  h = (h ^ h >> 15U) * 0x846ca68bU;
  return h >> 16U;
}

// Rounds the magnitude to one of the two next bfloat16 numbers.
std::uint16_t rounded_to_bf16(float x, std::size_t i) noexcept {
  constexpr float kLargest = 0x1.fep127F;
  const float v = std::min(std::max(x, -kLargest), kLargest);
  return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(v) + random_bits(x, i)) >> 16U);
}

float power_of_two(int exponent) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23U);
}

// The smallest exponent for which 127 * 2^exponent is at least `largest`, if there is one.
int exponent_for(float largest) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(largest);
  const int floor_log2 = static_cast<int>(bits >> 23U) - 127;
  constexpr std::uint32_t kMantissaOf127 = 0x7e0000U;
  const int exponent = floor_log2 - ((bits & 0x7fffffU) <= kMantissaOf127 ? 6 : 5);
  return std::clamp(exponent, kLeastExponent, kLargestExponent);
}

}  // namespace

template <>
std::span<const std::string_view> names_of<ResidualCode>() noexcept {
  return kResidualCodes;
}

ResidualStore::ResidualStore(ResidualCode code, std::size_t n) {
  if (code == ResidualCode::bf16) {
    halves_.resize(n);
  } else {
    bytes_.resize(n);
    exponents_.resize(n / kBlock, static_cast<std::int8_t>(kLeastExponent));
  }
}

void ResidualStore::load(std::size_t at, std::span<float> out) const {
  if (!halves_.empty()) {
    const std::uint16_t* const from = halves_.data() + at;
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = from_bf16(from[i]);
    return;
  }
  for (std::size_t first = 0; first < out.size();) {
    const std::size_t place = at + first;
    const std::size_t n = std::min(kBlock - place % kBlock, out.size() - first);
    const float unit = power_of_two(exponents_[place / kBlock]);
    const std::int8_t* const from = bytes_.data() + place;
    for (std::size_t i = 0; i < n; ++i) out[first + i] = static_cast<float>(from[i]) * unit;
    first += n;
  }
}

void ResidualStore::store(std::size_t at, std::span<const float> in) {
  if (!halves_.empty()) {
    std::uint16_t* const to = halves_.data() + at;
    for (std::size_t i = 0; i < in.size(); ++i) to[i] = rounded_to_bf16(in[i], i);
    return;
  }
  for (std::size_t first = 0; first < in.size(); first += kBlock) {
    const std::size_t n = std::min(kBlock, in.size() - first);
    float largest = 0.0F;
    for (std::size_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(in[first + i]));
    const int exponent = exponent_for(largest);
    exponents_[(at + first) / kBlock] = static_cast<std::int8_t>(exponent);
    const float units = power_of_two(-exponent);
    std::int8_t* const to = bytes_.data() + at + first;
    for (std::size_t i = 0; i < n; ++i) {
      const float x = in[first + i];
      const float random = static_cast<float>(random_bits(x, first + i)) * 0x1p-16F;  // in [0, 1)
      const int magnitude = std::min(static_cast<int>(std::abs(x) * units + random), 127);
      to[i] = static_cast<std::int8_t>(x < 0.0F ? -magnitude : magnitude);
    }
  }
}

}  // namespace skim
