// The cases that a CUDA selector, on a device or emulated, must pass: every result equals the CPU
// selector's, bit for bit.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cctype>
#include <string>
#include <string_view>
#include <vector>

#include "half.hpp"
#include "selection.hpp"
#include "skim/select.hpp"

namespace skim::test {

// What one step is given, but for the residual.
struct Step {
  Floats grad;
  Keep keep;
  float scale = 1.0F, decay = 1.0F;
  std::vector<std::uint16_t> half = {};  // if not empty, the gradient, of type
  DType type = DType::f32;

  std::size_t n() const { return half.empty() ? grad.size() : half.size(); }
  // On the CPU. The gradient is only read.
  SelectTask task(Floats& residual) const {
    SelectTask t;
    t.grad.data = half.empty() ? static_cast<void*>(const_cast<float*>(grad.data()))
                               : const_cast<std::uint16_t*>(half.data());
    t.grad.n = n();
    t.grad.dtype = half.empty() ? DType::f32 : type;
    t.grad.scale = scale;
    if (!residual.empty()) t.residual = std::span(residual);
    t.keep = keep;
    t.decay = decay;
    return t;
  }
};

// One step of both, then a commit of what was selected. on_device(step, residual, out) selects.
// Returns the device's report.
template <class OnDevice>
SelectReport step(Selector& cpu, OnDevice& on_device, const Step& step, Floats& residual) {
  Floats copy = residual;
  SparseBuffer want, got;
  got.append(7, 7.0F);  // must be overwritten
  const SelectReport a = cpu.select(step.task(residual), want);
  const SelectReport b = on_device(step, copy, got);
  EXPECT_TRUE(same(want.view(), got.view())) << want.nnz() << " and " << got.nnz();
  EXPECT_TRUE(same_bits(residual, copy));
  const auto bits = [](double v) { return std::bit_cast<std::uint64_t>(v); };
  EXPECT_EQ(order(a.threshold), order(b.threshold));
  EXPECT_EQ(bits(a.gradient_norm2), bits(b.gradient_norm2))
      << a.gradient_norm2 << ' ' << b.gradient_norm2;
  EXPECT_EQ(bits(a.total_norm2), bits(b.total_norm2)) << a.total_norm2 << ' ' << b.total_norm2;
  EXPECT_EQ(bits(a.kept_norm2), bits(b.kept_norm2)) << a.kept_norm2 << ' ' << b.kept_norm2;
  EXPECT_EQ(a.non_finite, b.non_finite);
  for (std::size_t e = 0; !residual.empty() && e < want.nnz(); ++e) {
    residual[want.view().index[e]] -= want.view().value[e];
  }
  return b;
}

// Small residuals of the gradient's kind keep its ties.
inline Floats residual_of(const Shape& shape, std::size_t n, std::uint64_t seed) {
  Floats r = shape.make(n, seed);
  for (float& v : r) {
    if (!std::isfinite(v)) v = 0.25F;
  }
  return r;
}

inline std::string identifier(std::string_view name) {
  std::string s(name);
  for (char& c : s) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return s;
}

// `exact`, first steps. make(spare) is a device with room for 2 k + spare candidates, if it lets
// tests choose.
template <class Make>
void lengths(const Shape& shape, const Make& make) {
  const std::vector<std::pair<std::size_t, std::size_t>> sizes = {
      {0, 0},       {1, 0},    {1, 1},     {31, 4},   {33, 33},     {1023, 10},
      {1024, 1024}, {1025, 0}, {8191, 81}, {8192, 1}, {8193, 4000}, {20011, 20}};
  for (const auto& [n, k] : sizes) {
    for (const std::size_t spare : {std::size_t{65536}, std::size_t{40}}) {
      SCOPED_TRACE(std::string(shape.name) + ", n=" + std::to_string(n) +
                   ", k=" + std::to_string(k) + ", spare=" + std::to_string(spare));
      auto device = make(spare);
      const auto cpu = make_selector({});
      Floats none, residual = residual_of(shape, n, n + k + 1);
      step(*cpu, device, {shape.make(n, n + k), {k}}, none);
      step(*cpu, device, {shape.make(n, n + k), {k}}, residual);
      if (testing::Test::HasFailure()) return;
    }
  }
}

// Carried thresholds that are far too high, far too low, or about right.
template <class OnDevice>
void jumps(const Shape& shape, SelectRule rule, std::size_t n, std::size_t k, OnDevice&& device,
           std::size_t steps = 9) {
  const std::array factors = {1.0F, 1.0F, 1e6F, 1e6F, 1.0F, 1e-6F, 1e-6F, 1.0F, 0.9F};
  const auto cpu = make_selector({.rule = rule});
  for (const bool with_residual : {false, true}) {
    Floats residual(with_residual ? n : 0, 0.0F);
    for (std::size_t s = 0; s < steps; ++s) {
      SCOPED_TRACE(std::string(shape.name) + ", step " + std::to_string(s));
      Step given{shape.make(n, s), {k}};
      for (float& v : given.grad) v *= factors[s];
      // A residual would hide a drop: forget it where the gradient shrinks.
      if (with_residual && factors[s] == 1e-6F) std::fill(residual.begin(), residual.end(), 0.0F);
      step(*cpu, device, given, residual);
      if (testing::Test::HasFailure()) return;
    }
  }
}

// k, thresholds, scales, decay, types, extreme norms, odd values.
template <class Make>
void settings(const Make& make) {
  const std::size_t n = 5003;
  for (const SelectRule rule : {SelectRule::exact, SelectRule::gaussian}) {
    auto device = make(rule);
    const auto cpu = make_selector({.rule = rule});
    Floats residual(n, 0.0F), none;
    std::uint64_t seed = 0;
    for (const std::size_t k : std::vector<std::size_t>{50, 2500, 1, 0, n, 400, 401, 399}) {
      SCOPED_TRACE("k=" + std::to_string(k));
      step(*cpu, device, {normal(n, ++seed), {k}}, residual);
    }
    for (const float threshold : {kDenormal, 0.5F, 1.0F, 3.0F, kMax, kInf, -1.0F}) {
      SCOPED_TRACE("threshold=" + std::to_string(threshold));
      for (const std::size_t k : {std::size_t{10}, n}) {
        step(*cpu, device, {integers(n, 3, 4), {k, threshold}}, none);
        step(*cpu, device, {normal(n, 4), {k, threshold}}, residual);
      }
    }
    for (const float scale : {65536.0F, 3.0F, 1e-3F, 1e30F}) {
      for (const char* name : {"normal", "not finite", "huge", "denormal"}) {
        SCOPED_TRACE(name + std::string(", scale=") + std::to_string(scale));
        step(*cpu, device, {shape(name).make(n, 11), {13}, scale, 0.9F}, residual);
        step(*cpu, device, {shape(name).make(n, 11), {13}, scale}, none);
      }
    }
    for (const float factor : {1e25F, 1e-18F, 1e-22F, 1e-40F}) {
      SCOPED_TRACE("factor=" + std::to_string(factor));
      Step given{normal(n, 1), {33}};
      Floats start = normal(n, 2);
      for (float& v : given.grad) v *= factor;
      for (float& v : start) v *= factor;
      given.grad[100] = 1.0F;  // its block drowns the others'
      step(*cpu, device, given, start);
      step(*cpu, device, given, none);
    }
    std::mt19937_64 rng(5);
    Step sixteen{{}, {50}, 4.0F};
    for (std::size_t i = 0; i < n; ++i) sixteen.half.push_back(static_cast<std::uint16_t>(rng()));
    for (const DType type : {DType::f16, DType::bf16}) {
      sixteen.type = type;
      residual = normal(n, 4);
      step(*cpu, device, sixteen, residual);
      step(*cpu, device, sixteen, none);
    }
    Floats broken = {kInf, -kInf, kNan,
                     kMax, -kMax, 1.0F};  // a residual that no step of ours leaves
    step(*cpu, device, {{1.0F, 1.0F, 1.0F, kMax, kInf, kNan}, {3}}, broken);
  }
}

}  // namespace skim::test
