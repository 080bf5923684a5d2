// The CUDA selector, its kernels run by an emulation on the CPU: against the CPU's selectors, bit
// for bit. And what a build without CUDA says. Devices are tested in cuda_device_test.cpp.
#include "cuda_emulation.hpp"
//
#include <gtest/gtest.h>

#include <array>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "cuda_cases.hpp"
#include "cuda_emulated.hpp"
#include "half.hpp"
#include "select/cuda_kernels.cuh"
#include "select/cuda_rules.hpp"
#include "skim/cuda.hpp"
#include "skim/error.hpp"
#include "skim/feedback.hpp"

namespace skim {
namespace {

using test::emulated;
using test::EmulatedEngine;
using test::Floats;
using test::Grid;
using test::kInf;
using test::kMax;
using test::kNan;

// ---- the emulation

TEST(cuda_emulation, threads_exchange_and_wait) {
  std::vector<unsigned> out(128), grid(2, 0);
  emulation::launch(2, 64, [&] {
    const unsigned t = blockIdx.x * 64 + threadIdx.x, lane = threadIdx.x % 32;
    unsigned& sum = cuda::shared<unsigned>();
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, t);
    __syncthreads();
    grid[blockIdx.x] = sum;
    cuda::grid_sync();
    const unsigned total = grid[0] + grid[1];                // 0 + ... + 127
    const unsigned up = __shfl_up_sync(~0U, t, 3);           // t - 3, or t
    const unsigned down = __shfl_down_sync(~0U, t, 5);       // t + 5, or t
    const unsigned odd = __ballot_sync(~0U, lane % 2 == 1);  // 0xaaaaaaaa
    const bool right = total == 8128 && up == (lane < 3 ? t : t - 3) &&
                       down == (lane > 26 ? t : t + 5) && odd == 0xaaaaaaaaU &&
                       __shfl_sync(~0U, t, 7) == t - lane + 7 && __all_sync(~0U, t < 128) &&
                       !__all_sync(~0U, lane != 9) && __any_sync(~0U, lane == 9);
    out[t] = right ? 1 : 0;
  });
  EXPECT_EQ(out, std::vector<unsigned>(128, 1));
}

TEST(cuda_emulation, says_so_when_threads_wait_forever) {
  EXPECT_THROW(emulation::launch(1, 32,
                                 [] {
                                   if (threadIdx.x > 0) __syncthreads();
                                 }),
               std::runtime_error);
}

// ---- twins

std::vector<float> patterns() {
  std::vector<float> v;
  for (const std::uint32_t exponent :
       {0U, 1U, 27U, 102U, 112U, 113U, 126U, 127U, 142U, 143U, 200U, 254U, 255U}) {
    for (const std::uint32_t mantissa :
         {0U, 1U, 0xfffU, 0x1000U, 0x7fffU, 0x8000U, 0x7fffffU, 0x7ff000U}) {
      v.push_back(std::bit_cast<float>(exponent << 23U | mantissa));
      v.push_back(-v.back());
    }
  }
  std::mt19937 rng(1);
  for (int i = 0; i < 20000; ++i)
    v.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(rng())));
  return v;
}

bool same(float a, float b) {  // whatever the payload of a NaN
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

TEST(cuda_math, is_the_arithmetic_of_the_cpu) {
  const std::vector<float> v = patterns();
  for (std::size_t i = 0; i < v.size(); ++i) {
    const float a = v[i], b = v[(i * 7919 + 13) % v.size()];
    ASSERT_EQ(cuda::order(a), kernels::order(a));
    ASSERT_EQ(cuda::is_finite(a), std::isfinite(a));
    ASSERT_TRUE(same(cuda::clamped(a), clamped(a)));
    ASSERT_TRUE(same(cuda::accumulated(a, b), kernels::accumulated(a, b))) << a << ' ' << b;
    ASSERT_TRUE(same(cuda::product(a, b), product(a, b))) << a << ' ' << b;
    ASSERT_EQ(cuda::to_f16(a), to_f16(a)) << a;
    ASSERT_EQ(cuda::to_bf16(a), to_bf16(a)) << a;
    if (std::isfinite(a)) {
      ASSERT_TRUE(same(cuda::scaled(a, b), kernels::scaled(a, b)));
    }
  }
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    ASSERT_TRUE(same(cuda::from_f16(half), from_f16(half)));
    ASSERT_TRUE(same(cuda::from_bf16(half), from_bf16(half)));
  }
}

// ---- the selectors

// The emulated device's memory is the CPU's.
struct Emulated {
  std::unique_ptr<Selector> selector;

  SelectReport operator()(const test::Step& step, Floats& residual, SparseBuffer& out) {
    SelectTask task = step.task(residual);
    task.grad.device = task.residual.device = Device::cuda;
    return selector->select(task, out);
  }
};

class cuda_shapes : public testing::TestWithParam<std::size_t> {};

TEST_P(cuda_shapes, exact_is_the_cpus) {
  test::lengths(test::kShapes[GetParam()],
                [](std::size_t spare) { return Emulated{emulated(SelectRule::exact, {}, spare)}; });
}
TEST_P(cuda_shapes, thresholds_are_carried_through_jumps) {
  for (const SelectRule rule : {SelectRule::exact, SelectRule::gaussian}) {
    test::jumps(test::kShapes[GetParam()], rule, 5003, 50, Emulated{emulated(rule)});
    test::jumps(test::kShapes[GetParam()], rule, 3001, 30, Emulated{emulated(rule, {}, 300)});
  }
}
INSTANTIATE_TEST_SUITE_P(All, cuda_shapes, testing::Range(std::size_t{0}, test::kShapes.size()),
                         [](const testing::TestParamInfo<std::size_t>& at) {
                           return test::identifier(test::kShapes[at.param].name);
                         });

TEST(cuda_select, settings) {
  test::settings([](SelectRule rule) { return Emulated{emulated(rule, {2, 32})}; });
}

TEST(cuda_select, any_grid_gives_the_same) {
  for (const Grid grid : {Grid{1, 32}, Grid{5, 32}, Grid{1, 256}, Grid{3, 128}}) {
    SCOPED_TRACE(std::to_string(grid.blocks) + " x " + std::to_string(grid.threads));
    for (const std::size_t spare : {std::size_t{0}, std::size_t{65536}}) {
      test::jumps(test::shape("few values"), SelectRule::exact, 10007, 100,
                  Emulated{emulated(SelectRule::exact, grid, spare)}, 3);
    }
  }
}

// Norms of more than one group, and a sample that suggests the first threshold.
TEST(cuda_select, a_long_gradient) {
  const std::size_t n = 2 * kernels::kBlock * kernels::Norm2::kGroup + 777, k = 500;
  Emulated device{emulated(SelectRule::exact, {1, 64})};
  const auto cpu = make_selector({});
  Floats residual = test::normal(n, 2);
  EXPECT_EQ(test::step(*cpu, device, {test::normal(n, 1), {k}}, residual).passes, 1);
}

TEST(cuda_select, passes_are_counted) {
  const std::size_t n = 70001, k = 70;
  Emulated device{emulated()};
  const auto cpu = make_selector({});
  Floats none, grad = test::normal(n, 1);
  EXPECT_EQ(test::step(*cpu, device, {grad, {k}}, none).passes, 1) << "from a sample";
  EXPECT_EQ(test::step(*cpu, device, {grad, {k}}, none).passes, 1) << "carried";
  for (float& v : grad) v *= 1e-6F;
  EXPECT_EQ(test::step(*cpu, device, {grad, {k}}, none).passes, 6) << "too high";
  EXPECT_EQ(test::step(*cpu, device, {grad, {k}}, none).passes, 1);
  std::fill(grad.begin(), grad.end(), 1.0F);
  EXPECT_EQ(test::step(*cpu, device, {grad, {k}}, none).passes, 6) << "all pass";
}

TEST(cuda_select, state_is_saved_and_fits_the_cpu) {
  const auto saved = [](const Selector& selector) {
    std::ostringstream out;
    selector.save(out);
    return out.str();
  };
  for (const SelectRule rule : {SelectRule::exact, SelectRule::gaussian}) {
    Emulated device{emulated(rule)}, other{emulated(rule)};
    const auto cpu = make_selector({.rule = rule});
    Floats none;
    for (std::uint64_t s = 0; s < 3; ++s) {
      test::step(*cpu, device, {test::normal(5000, s), {50}}, none);
    }
    std::istringstream in(saved(*device.selector));
    other.selector->load(in);
    EXPECT_EQ(saved(*other.selector), saved(*device.selector));
    EXPECT_EQ(test::step(*cpu, other, {test::normal(5000, 4), {50}}, none).passes, 1);
    if (rule == SelectRule::gaussian) {
      EXPECT_EQ(saved(*other.selector), saved(*cpu));
    }
    std::istringstream of_cpu(saved(*cpu)), of_device(saved(*other.selector));
    other.selector->load(of_cpu);
    cpu->load(of_device);
    test::step(*cpu, other, {test::normal(5000, 5), {50}}, none);
  }
}

TEST(cuda_select, refuses_bad_arguments_before_anything_changes) {
  const auto selector = emulated();
  Floats grad = test::normal(10, 1), residual = test::normal(10, 2);
  const Floats before = residual;
  SparseBuffer out;
  out.reset(3);
  out.append(1, 2.0F);
  SelectTask good{{}, std::span(grad), std::span(residual), {}, {3}};
  good.grad.device = good.residual.device = Device::cuda;
  const auto refused = [&](const SelectTask& task, const std::string& words) {
    try {
      selector->select(task, out);
      ADD_FAILURE() << "accepted: " << words;
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    }
    EXPECT_EQ(residual, before);
    EXPECT_EQ(out.nnz(), 1U);
  };
  SelectTask task = good;
  task.grad.device = Device::cpu;
  refused(task, "the gradient must be on a CUDA device");
  task = good;
  task.residual.device = Device::cpu;
  refused(task, "the residual must be on a CUDA device");
  task = good;
  task.keep.k = 11;
  refused(task, "select: k must be <= n (k=11, n=10)");
  task = good;
  task.grad.data = reinterpret_cast<char*>(grad.data()) + 2;
  refused(task, "aligned");
  EXPECT_THROW(emulated(SelectRule::dgc), InvalidArgument);
  EXPECT_THROW(cuda::make_rule({.per_parameter = true}, std::make_unique<EmulatedEngine>()),
               InvalidArgument);
  EXPECT_EQ(selector->name(), "exact");
  selector->select(good, out);
  EXPECT_EQ(out.nnz(), 3U);
}

// ---- delivery

SparseBuffer some_entries(std::size_t n, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  const Floats x = test::normal(n, seed);
  const std::array odd = {kMax, -kMax, kInf, -kInf, kNan, 1e-41F, 70000.0F};
  SparseBuffer s;
  s.reset(n);
  for (std::size_t i = rng() % 5; i < n; i += 1 + rng() % 9) {
    s.append(static_cast<Index>(i), rng() % 8 == 0 ? odd[rng() % odd.size()] : x[i]);
  }
  return s;
}

TEST(cuda_delivery, scatter_is_the_cpus) {
  const std::size_t n = 1003;
  const SparseBuffer s = some_entries(n, 3);
  const auto count = static_cast<std::uint32_t>(s.nnz());
  for (const float factor : {1.0F, 0.25F, 1e20F}) {
    for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
      Floats want(n), got(n, 0.0F);
      GradView dense(want);
      dense.dtype = type;
      scatter(s.view(), factor, dense);
      emulation::launch((count + 63) / 64, 64, [&] {
        const auto [index, value, dim] = s.view();
        if (type == DType::f32)
          cuda::scatter_entries<DType::f32>(index.data(), value.data(), count, factor, got.data());
        if (type == DType::f16)
          cuda::scatter_entries<DType::f16>(index.data(), value.data(), count, factor, got.data());
        if (type == DType::bf16)
          cuda::scatter_entries<DType::bf16>(index.data(), value.data(), count, factor, got.data());
      });
      EXPECT_EQ(std::memcmp(got.data(), want.data(), n * (type == DType::f32 ? 4 : 2)), 0)
          << factor;
    }
  }
}

TEST(cuda_delivery, commit_is_the_cpus) {
  const std::size_t n = 1003;
  const SparseBuffer sent = some_entries(n, 4), returned = some_entries(n, 5);
  ErrorFeedback feedback;
  feedback.set_layout(std::vector<Bucket>{{0, {{"p", 0, n}}}});
  const Floats start = test::shape("huge").make(n, 6);
  std::copy(start.begin(), start.end(), feedback.residual(0).data);
  feedback.commit(0, sent.view(), returned.view());
  Floats got = start;
  for (const bool back : {false, true}) {
    const SparseView s = back ? returned.view() : sent.view();
    const auto count = static_cast<std::uint32_t>(s.nnz());
    emulation::launch((count + 63) / 64, 64, [&] {
      back ? cuda::add_entries<1>(s.index.data(), s.value.data(), count, got.data())
           : cuda::add_entries<-1>(s.index.data(), s.value.data(), count, got.data());
    });
  }
  const std::span<const float> want = feedback.residual(0).span();
  EXPECT_TRUE(test::same_bits(got, {want.begin(), want.end()}));
}

#ifndef SKIM_TEST_CUDA
TEST(no_cuda, says_so) {
  EXPECT_EQ(cuda_device_count(), 0);
  EXPECT_THROW(make_cuda_selector({}), InvalidArgument);
  EXPECT_THROW(CudaDelivery(0), InvalidArgument);
  EXPECT_THROW(make_cuda_local_half({}, {}, 0), InvalidArgument);
}
#endif

}  // namespace
}  // namespace skim
