// Internal: the arithmetic of selection on one entry, for device code. The functions are copies of
// those in kernels.hpp, half.hpp and feedback.cpp, which nvcc compiles for the host only.
// tests/cuda_test.cpp compares each copy with its original.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "select/kernels.hpp"

#ifdef __CUDACC__
#define SKIM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SKIM_HOST_DEVICE inline
#endif

namespace skim::cuda {

SKIM_HOST_DEVICE std::uint32_t bits_of(float v) { return std::bit_cast<std::uint32_t>(v); }
SKIM_HOST_DEVICE float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

SKIM_HOST_DEVICE std::uint32_t order(float v) {
  const std::uint32_t magnitude = bits_of(v) & 0x7fffffffU;
  return magnitude < kernels::kOrderOfNan ? magnitude : kernels::kOrderOfNan;
}
SKIM_HOST_DEVICE bool is_finite(float v) {
  return (bits_of(v) & 0x7fffffffU) <= kernels::kLargestFinite;
}

// Not fminf and fmaxf, which turn NaN into a number.
SKIM_HOST_DEVICE float clamped(float v) {
  constexpr float kMax = std::numeric_limits<float>::max();
  return v < -kMax ? -kMax : v > kMax ? kMax : v;  // NaN stays
}
SKIM_HOST_DEVICE float scaled(float g, float reciprocal) { return clamped(g * reciprocal); }
SKIM_HOST_DEVICE float accumulated(float residual, float x) {
  const float sum = clamped(residual + x);
  return sum == sum ? sum : 0.0F;
}
SKIM_HOST_DEVICE float product(float v, float factor) {
  const float p = v * factor;
  return is_finite(v) ? clamped(p) : p;
}
SKIM_HOST_DEVICE float finite_sum(float residual, float v) {
  const float sum = residual + v;
  return sum == sum ? clamped(sum) : residual;
}

SKIM_HOST_DEVICE float from_f16(std::uint16_t h) {
  const std::uint32_t magnitude = h & 0x7fffU, sign = (h & 0x8000U) << 16U;
  std::uint32_t bits = bits_of(float_of(magnitude << 13U) * 0x1p112F);
  if (magnitude >= 0x7c00U) bits |= 0x7f800000U;
  return float_of(bits | sign);
}
SKIM_HOST_DEVICE float from_bf16(std::uint16_t b) {
  return float_of(static_cast<std::uint32_t>(b) << 16U);
}
SKIM_HOST_DEVICE std::uint16_t to_f16(float v) {
  const std::uint32_t bits = bits_of(v);
  const std::uint32_t sign = bits >> 16U & 0x8000U, magnitude = bits & 0x7fffffffU;
  std::uint32_t half = 0;
  if (magnitude < 0x38800000U) {
    half = bits_of(float_of(magnitude) + 0.5F) - 0x3f000000U;
  } else if (magnitude < 0x477ff000U) {
    half = (magnitude + 0xfffU + (magnitude >> 13U & 1U) - (112U << 23U)) >> 13U;
  } else if (magnitude < 0x7f800000U) {
    half = 0x7bffU;
  } else {
    half = magnitude == 0x7f800000U ? 0x7c00U : 0x7e00U;
  }
  return static_cast<std::uint16_t>(sign | half);
}
SKIM_HOST_DEVICE std::uint16_t to_bf16(float v) {
  const std::uint32_t bits = bits_of(v);
  const std::uint32_t sign = bits >> 16U & 0x8000U, magnitude = bits & 0x7fffffffU;
  std::uint32_t half = 0;
  if (magnitude < 0x7f7f8000U) {
    half = (magnitude + 0x7fffU + (magnitude >> 16U & 1U)) >> 16U;
  } else if (magnitude < 0x7f800000U) {
    half = 0x7f7fU;
  } else {
    half = magnitude == 0x7f800000U ? 0x7f80U : 0x7fc0U;
  }
  return static_cast<std::uint16_t>(sign | half);
}

// Entry i of a gradient.
template <DType kType>
SKIM_HOST_DEVICE float entry(const void* data, std::size_t i) {
  if constexpr (kType == DType::f32) {
    return static_cast<const float*>(data)[i];
  } else {
    const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[i];
    return kType == DType::f16 ? from_f16(bits) : from_bf16(bits);
  }
}
template <DType kType>
SKIM_HOST_DEVICE void set_entry(void* data, std::size_t i, float v) {
  if constexpr (kType == DType::f32) {
    static_cast<float*>(data)[i] = v;
  } else {
    static_cast<std::uint16_t*>(data)[i] = kType == DType::f16 ? to_f16(v) : to_bf16(v);
  }
}

// Whether a block's float sum of squares has neither over- nor underflowed, as in kernels.cpp.
SKIM_HOST_DEVICE bool trusted(float sum) {
  return sum >= 0x1p-100F && sum <= std::numeric_limits<float>::max();
}

}  // namespace skim::cuda
