// Internal: 16-bit floats, and gradients of any type, entry by entry.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "numbers.hpp"
#include "skim/types.hpp"

namespace skim {

constexpr std::size_t bytes_of(DType type) noexcept { return type == DType::f32 ? 4 : 2; }

// The float that the bits of a half or a bfloat16 stand for, exactly; NaN stays NaN.
inline float from_f16(std::uint16_t h) noexcept {
  const std::uint32_t magnitude = h & 0x7fffU, sign = (h & 0x8000U) << 16U;
  // Shifted into place, the exponent is 127 - 15 too small, for subnormal halves as well.
  std::uint32_t bits =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 13U) * 0x1p112F);
  if (magnitude >= 0x7c00U) bits |= 0x7f800000U;
  return std::bit_cast<float>(bits | sign);
}
inline float from_bf16(std::uint16_t b) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(b) << 16U);
}

// The nearest of the type, ties to even. A finite v stays finite: beyond the range it becomes the
// largest finite one. Infinity stays, NaN becomes the quiet NaN.
inline std::uint16_t to_f16(float v) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(v);
  const std::uint32_t sign = bits >> 16U & 0x8000U, magnitude = bits & 0x7fffffffU;
  std::uint32_t half = 0;
  if (magnitude < 0x38800000U) {
    // Below 2^-14, where halves are multiples of 2^-24, as floats in [0.5, 1) are: the addition
    // rounds.
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3f000000U;
  } else if (magnitude < 0x477ff000U) {  // 65520, half-way to what would be 2^16
    half = (magnitude + 0xfffU + (magnitude >> 13U & 1U) - (112U << 23U)) >> 13U;
  } else if (magnitude < 0x7f800000U) {
    half = 0x7bffU;
  } else {
    half = magnitude == 0x7f800000U ? 0x7c00U : 0x7e00U;
  }
  return static_cast<std::uint16_t>(sign | half);
}
inline std::uint16_t to_bf16(float v) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(v);
  const std::uint32_t sign = bits >> 16U & 0x8000U, magnitude = bits & 0x7fffffffU;
  std::uint32_t half = 0;
  if (magnitude < 0x7f7f8000U) {  // half-way to what would be 2^128
    half = (magnitude + 0x7fffU + (magnitude >> 16U & 1U)) >> 16U;
  } else if (magnitude < 0x7f800000U) {
    half = 0x7f7fU;
  } else {
    half = magnitude == 0x7f800000U ? 0x7f80U : 0x7fc0U;
  }
  return static_cast<std::uint16_t>(sign | half);
}

// What is finite stays finite: a product that overflows becomes the largest float.
inline float product(float v, float factor) noexcept {
  const float p = v * factor;
  return std::isfinite(v) ? clamped(p) : p;
}

// Entry i of a gradient on the CPU, as it stands there: without its scale.
inline float entry(DType type, const void* data, std::size_t i) noexcept {
  if (type == DType::f32) return static_cast<const float*>(data)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[i];
  return type == DType::f16 ? from_f16(bits) : from_bf16(bits);
}
// Rounds to the gradient's type.
inline void set_entry(DType type, void* data, std::size_t i, float v) noexcept {
  if (type == DType::f32) {
    static_cast<float*>(data)[i] = v;
  } else {
    static_cast<std::uint16_t*>(data)[i] = type == DType::f16 ? to_f16(v) : to_bf16(v);
  }
}

}  // namespace skim
