// Selection: against the sort-based oracle, on every CPU target, and its laws.
#include "skim/select.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <cctype>
#include <cmath>
#include <limits>
#include <numeric>
#include <sstream>
#include <string>

#include "allocations.hpp"
#include "oracle.hpp"
#include "select/kernels.hpp"
#include "selection.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

using test::fill;
using test::Floats;
using test::ForcedTarget;
using test::kDenormal;
using test::kInf;
using test::kMax;
using test::kNan;
using test::kShapes;
using test::same_bits;
using test::Shape;
using test::targets;

// ---- CPU targets

TEST(select_targets, the_forced_one_runs) {
  ASSERT_FALSE(targets().empty());
  for (const std::int64_t target : targets()) {
    const ForcedTarget forced(target);
    EXPECT_EQ(kernels::running_target(), target) << hwy::TargetName(target);
  }
  // Otherwise the differential tests below compare one target with itself. A build for one CPU only
  // (-march=native) drops the others, unless HWY_COMPILE_ALL_ATTAINABLE is defined.
#if defined(__x86_64__) && !defined(__SSSE3__)
  EXPECT_GT(std::popcount(static_cast<std::uint64_t>(kernels::compiled_targets())), 2);
#endif
}

// A copy at an address that is 4 bytes off any vector's alignment, between sentinels.
class Guarded {
 public:
  explicit Guarded(const Floats& x, std::size_t off = 1) : at_(kGuard + off), n_(x.size()) {
    all_.assign(at_ + n_ + kGuard, kSentinel);
    std::copy(x.begin(), x.end(), all_.begin() + static_cast<std::ptrdiff_t>(at_));
  }
  std::span<float> span() { return {all_.data() + at_, n_}; }
  Floats copy() { return {span().begin(), span().end()}; }
  bool intact() const {
    for (std::size_t i = 0; i < all_.size(); ++i) {
      if ((i < at_ || i >= at_ + n_) && all_[i] != kSentinel) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr float kSentinel = -12345.0F;
  std::size_t at_, n_;
  Floats all_;
};

// ---- the oracle

struct Expected {
  SparseBuffer out;
  Floats residual;  // empty without one
  std::uint64_t non_finite = 0;
  double gradient_norm2 = 0.0, total_norm2 = 0.0, kept_norm2 = 0.0;
};

double norm2(const Floats& x) {
  long double sum = 0.0L;
  for (const float v : x) {
    if (std::isfinite(v)) sum += static_cast<long double>(v) * static_cast<long double>(v);
  }
  return static_cast<double>(sum);
}

Expected expected(const Floats& grad, const Floats& residual, const Keep& keep,
                  float scale = 1.0F) {
  const auto clamp = [](float v) { return std::isinf(v) ? std::copysign(kMax, v) : v; };
  Expected e;
  Floats x(grad.size()), result(grad.size());
  for (std::size_t i = 0; i < grad.size(); ++i) {
    const bool finite = std::isfinite(grad[i]);
    if (!finite) ++e.non_finite;
    const float v = grad[i] * (1.0F / scale);
    x[i] = finite ? clamp(v) : 0.0F;
    result[i] = !residual.empty() ? clamp(residual[i] + x[i]) : finite ? x[i] : v;
  }
  const SparseBuffer top = test::top_k(result, keep.k);
  e.out.reset(grad.size());
  for (std::size_t i = 0; i < top.nnz(); ++i) {
    const float v = top.view().value[i];
    if (keep.threshold > 0.0F && std::abs(v) < keep.threshold) continue;
    e.out.append(top.view().index[i], v);
  }
  if (!residual.empty()) e.residual = result;
  e.gradient_norm2 = norm2(x);
  e.total_norm2 = residual.empty() ? e.gradient_norm2 : norm2(result);
  e.kept_norm2 = norm2({e.out.view().value.begin(), e.out.view().value.end()});
  return e;
}

bool near(double a, double b) { return std::abs(a - b) <= 1e-5 * std::abs(b); }

SelectTask task_of(std::span<float> grad, std::span<float> residual, const Keep& keep,
                   Slot slot = 0) {
  return {{0, slot}, grad, residual.empty() ? DenseView() : DenseView(residual), {}, keep};
}

// One step of `selector` against the oracle, on unaligned, guarded copies.
SelectReport step(Selector& selector, const Floats& grad, Floats& residual, const Keep& keep,
                  const Expected& want, float scale = 1.0F, Slot slot = 0) {
  Guarded g(grad, 1), r(residual, 3);
  SparseBuffer out;
  out.append(7, 7.0F);  // must be overwritten
  SelectTask task = task_of(g.span(), r.span(), keep, slot);
  task.grad.scale = scale;
  const SelectReport got = selector.select(task, out);
  EXPECT_TRUE(test::same(out.view(), want.out.view()));
  EXPECT_TRUE(is_canonical(out.view()));
  EXPECT_TRUE(same_bits(r.copy(), want.residual));
  EXPECT_TRUE(same_bits(g.copy(), grad)) << "the gradient is read only";
  EXPECT_TRUE(g.intact() && r.intact()) << "written outside the arrays";
  EXPECT_EQ(got.non_finite, want.non_finite);
  EXPECT_LE(got.passes, 3);
  EXPECT_GE(got.passes, grad.empty() ? 0 : 1);
  EXPECT_TRUE(near(got.gradient_norm2, want.gradient_norm2)) << got.gradient_norm2;
  EXPECT_TRUE(near(got.total_norm2, want.total_norm2)) << got.total_norm2;
  EXPECT_TRUE(near(got.kept_norm2, want.kept_norm2)) << got.kept_norm2;
  std::uint32_t least = out.nnz() == 0 ? 0 : ~0U;
  for (const float v : out.view().value) least = std::min(least, test::order(v));
  EXPECT_EQ(test::order(got.threshold), least);
  residual = r.copy();
  return got;
}

bool same_report(const SelectReport& a, const SelectReport& b) {
  const auto bits = [](auto v) {
    if constexpr (sizeof v == 4) return std::uint64_t{std::bit_cast<std::uint32_t>(v)};
    if constexpr (sizeof v == 8) return std::bit_cast<std::uint64_t>(v);
  };
  return bits(a.threshold) == bits(b.threshold) && a.passes == b.passes &&
         bits(a.kept_norm2) == bits(b.kept_norm2) && bits(a.total_norm2) == bits(b.total_norm2) &&
         bits(a.gradient_norm2) == bits(b.gradient_norm2) && a.non_finite == b.non_finite;
}

// One first step on every target: all equal the oracle, and one another in every bit.
void on_every_target(const Floats& grad, const Floats& residual, const Keep& keep,
                     float scale = 1.0F) {
  static const std::vector<std::int64_t> kTargets = targets();
  const Expected want = expected(grad, residual, keep, scale);
  SelectReport first;
  for (const std::int64_t target : kTargets) {
    SCOPED_TRACE(hwy::TargetName(target));
    const ForcedTarget forced(target);
    const auto selector = make_selector({});
    Floats r = residual;
    const SelectReport got = step(*selector, grad, r, keep, want, scale);
    if (target == kTargets.front()) first = got;
    EXPECT_TRUE(same_report(first, got)) << "differs from " << hwy::TargetName(kTargets.front());
  }
}

std::string label(const Shape& shape, std::size_t n, std::size_t k, std::uint64_t seed) {
  return std::string(shape.name) + ", n=" + std::to_string(n) + ", k=" + std::to_string(k) +
         ", seed=" + std::to_string(seed);
}

// Small residuals of the gradient's kind keep its ties.
Floats residual_of(const Shape& shape, std::size_t n, std::uint64_t seed) {
  Floats r = shape.make(n, seed);
  for (float& v : r) {
    if (!std::isfinite(v)) v = 0.25F;
  }
  return r;
}

class select_shapes : public testing::TestWithParam<std::size_t> {};

TEST_P(select_shapes, every_short_length) {
  const Shape& shape = kShapes[GetParam()];
  for (std::size_t n = 0; n <= 2 * 16 * 4 + 3; ++n) {
    for (const std::size_t k : {std::size_t{0}, std::size_t{1}, n / 10, n / 2, n}) {
      if (k > n) continue;
      const std::uint64_t seed = n * 7 + k;
      SCOPED_TRACE(label(shape, n, k, seed));
      const Floats grad = shape.make(n, seed);
      on_every_target(grad, {}, {k});
      on_every_target(grad, residual_of(shape, n, seed + 1), {k});
      if (HasFailure()) return;
    }
  }
}

TEST_P(select_shapes, longer_lengths) {
  const Shape& shape = kShapes[GetParam()];
  const std::vector<std::pair<std::size_t, std::size_t>> sizes = {
      {1023, 10}, {1024, 1024}, {1025, 0},   {4099, 4098},  {20011, 20},
      {20011, 1}, {40009, 900}, {65537, 65}, {100000, 100}, {100003, 9999}};
  for (const auto& [n, k] : sizes) {
    const std::uint64_t seed = n + k;
    SCOPED_TRACE(label(shape, n, k, seed));
    const Floats grad = shape.make(n, seed);
    on_every_target(grad, {}, {k});
    on_every_target(grad, residual_of(shape, n, seed + 1), {k});
    if (HasFailure()) return;
  }
}

// The carried threshold is far too high, far too low, or about right: never a wrong result, and
// never more than three passes.
TEST_P(select_shapes, jumps_between_steps) {
  const Shape& shape = kShapes[GetParam()];
  const std::size_t n = 70001, k = 70;
  for (const bool with_residual : {false, true}) {
    const auto selector = make_selector({});
    Floats residual(with_residual ? n : 0, 0.0F);
    const std::array factors = {1.0F, 1.0F, 1e6F, 1e6F, 1.0F, 1e-6F, 1e-6F, 1.0F, 0.9F};
    for (std::size_t s = 0; s < factors.size(); ++s) {
      SCOPED_TRACE(label(shape, n, k, s) + ", factor " + std::to_string(factors[s]));
      Floats grad = shape.make(n, s);
      for (float& v : grad) v *= factors[s];
      // A residual would hide a drop: forget it where the gradient shrinks.
      if (with_residual && factors[s] == 1e-6F) std::fill(residual.begin(), residual.end(), 0.0F);
      const Expected want = expected(grad, residual, {k});
      step(*selector, grad, residual, {k}, want);
      for (std::size_t e = 0; with_residual && e < want.out.nnz(); ++e) {
        residual[want.out.view().index[e]] -= want.out.view().value[e];
      }
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, select_shapes, testing::Range(std::size_t{0}, kShapes.size()),
    [](const testing::TestParamInfo<std::size_t>& at) {
      std::string name = kShapes[at.param].name;
      std::ranges::replace_if(
          name, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
      return name;
    });

// ---- passes

TEST(select, a_drop_costs_a_second_pass_and_says_so) {
  const std::size_t n = 30011;
  const auto selector = make_selector({});
  Floats none;
  Floats grad = test::normal(n, 1);
  EXPECT_EQ(step(*selector, grad, none, {30}, expected(grad, none, {30})).passes, 1);
  EXPECT_EQ(step(*selector, grad, none, {30}, expected(grad, none, {30})).passes, 1);
  for (float& v : grad) v *= 1e-6F;
  EXPECT_EQ(step(*selector, grad, none, {30}, expected(grad, none, {30})).passes, 2);
  EXPECT_EQ(step(*selector, grad, none, {30}, expected(grad, none, {30})).passes, 1);
  // Slots do not share thresholds, and a slot of a new length starts anew.
  EXPECT_EQ(step(*selector, test::normal(n, 2), none, {30},
                 expected(test::normal(n, 2), none, {30}), 1.0F, 5)
                .passes,
            1);
  grad.resize(n - 1);
  for (float& v : grad) v *= 1e-6F;
  EXPECT_EQ(step(*selector, grad, none, {30}, expected(grad, none, {30})).passes, 1);
}

// Large values lie exactly where a strided sample looks: it suggests far too much, and only the
// last pass, from zero, finds k entries.
TEST(select, a_misled_sample_costs_a_pass_and_says_so) {
  const std::size_t n = 1U << 17, k = n / 4;
  Floats grad = test::normal(n, 1), none;
  for (std::size_t i = 0; i < n; i += n / 16384) grad[i] = 100.0F + static_cast<float>(i % 7);
  const auto selector = make_selector({});
  const Keep keep{k};
  EXPECT_EQ(step(*selector, grad, none, keep, expected(grad, none, keep)).passes, 2);
  EXPECT_EQ(step(*selector, grad, none, keep, expected(grad, none, keep)).passes, 1);
  for (float& v : grad) v *= 1e-6F;
  EXPECT_LE(step(*selector, grad, none, keep, expected(grad, none, keep)).passes, 3);
  Floats residual(n, 0.0F);
  EXPECT_EQ(step(*selector, grad, residual, keep, expected(grad, residual, keep)).passes, 1);
}

// No threshold is carried from a step that found fewer than k: the next would seem to find too few.
TEST(select, fewer_non_zeros_than_k_cost_no_second_pass) {
  const auto selector = make_selector({});
  Floats none;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const Floats grad = kShapes[3].make(20011, seed);
    const Keep keep{5000};
    EXPECT_EQ(step(*selector, grad, none, keep, expected(grad, none, keep)).passes, 1);
  }
}

// Error feedback with four gradients in turn, as training does: nearly always one pass.
TEST(select, one_pass_in_the_steady_state) {
  const std::size_t n = 60013, steps = 40;
  std::vector<Floats> grads;
  for (std::uint64_t s = 0; s < 4; ++s) grads.push_back(test::normal(n, s));
  for (const std::size_t k : {std::size_t{60}, std::size_t{600}, std::size_t{6000}}) {
    const auto selector = make_selector({});
    Floats residual(n, 0.0F);
    SparseBuffer out;
    int passes = 0;
    for (std::size_t s = 0; s < steps; ++s) {
      passes += selector->select(task_of(grads[s % 4], residual, {k}), out).passes;
      for (std::size_t e = 0; e < out.nnz(); ++e) {
        residual[out.view().index[e]] -= out.view().value[e];
      }
    }
    EXPECT_LE(passes, static_cast<int>(steps) + 4) << "k=" << k;
  }
}

// As training has it: what is not sent stays in the residual, which grows for many steps, and the
// threshold with it.
TEST(select, one_pass_and_few_candidates_while_residuals_fill_up) {
  const std::size_t n = 200003;
  for (const std::size_t k : {std::size_t{200}, std::size_t{2000}, std::size_t{20000}}) {
    const auto selector = make_selector({});
    Floats residual(n, 0.0F);
    SparseBuffer out;
    int second_passes = 0;
    for (std::uint64_t s = 0; s < 40; ++s) {
      Floats grad = test::normal(n, s % 4);
      const SelectReport got = selector->select(task_of(grad, residual, {k}), out);
      ASSERT_EQ(out.nnz(), k);
      ASSERT_LE(got.passes, 2);
      if (s >= 5) second_passes += got.passes - 1;
      for (std::size_t e = 0; e < k; ++e) residual[out.view().index[e]] -= out.view().value[e];
    }
    EXPECT_LE(second_passes, 4) << "k=" << k;
  }
}

TEST(select, k_may_change_between_steps) {
  const std::size_t n = 40009;
  const auto selector = make_selector({});
  Floats residual(n, 0.0F);
  std::uint64_t seed = 0;
  for (const std::size_t k :
       std::vector<std::size_t>{40, 4000, 1, 0, 40009, 400, 401, 399, 20000}) {
    SCOPED_TRACE("k=" + std::to_string(k));
    const Floats grad = test::normal(n, ++seed);
    const Expected want = expected(grad, residual, {k});
    step(*selector, grad, residual, {k}, want);
  }
}

// ---- thresholds, scales, overflow, non-finite entries

TEST(select, threshold_drops_what_is_below_it) {
  const std::size_t n = 3001;
  for (const float threshold : {kDenormal, 0.5F, 1.0F, 2.0F, 3.0F, 100.0F, kMax, kInf}) {
    for (const std::size_t k : {std::size_t{0}, std::size_t{10}, std::size_t{1000}, n}) {
      SCOPED_TRACE("threshold=" + std::to_string(threshold) + ", k=" + std::to_string(k));
      on_every_target(test::integers(n, 3, 4), {}, {k, threshold});
      on_every_target(test::normal(n, 4), test::normal(n, 5), {k, threshold});
      on_every_target(kShapes[6].make(n, 6), {}, {k, threshold});
    }
  }
  const auto selector = make_selector({});
  Floats none;
  for (const float threshold : {2.0F, 1e-3F, 3.5F, 0.0F, -1.0F}) {  // carried from step to step
    const Floats grad = test::normal(n, 7);
    const Keep keep{50, threshold};
    step(*selector, grad, none, keep, expected(grad, none, keep));
  }
}

TEST(select, gradient_is_divided_by_its_scale) {
  for (const float scale : {2.0F, 65536.0F, 3.0F, 0.5F, 1e-3F, 1e30F}) {
    SCOPED_TRACE("scale=" + std::to_string(scale));
    for (const Shape& shape : kShapes) {
      SCOPED_TRACE(shape.name);
      const Floats grad = shape.make(1301, 11);
      on_every_target(grad, {}, {13}, scale);
      on_every_target(grad, residual_of(shape, 1301, 12), {13}, scale);
    }
  }
}

TEST(select, sums_that_overflow_are_clamped) {
  Floats grad = {kMax, -kMax, kMax, 1.0F};
  Floats residual = {kMax, -kMax, -kMax, 1.0F};
  const auto selector = make_selector({});
  SparseBuffer out;
  const SelectReport got = selector->select(task_of(grad, residual, {2}), out);
  EXPECT_EQ(residual, (Floats{kMax, -kMax, 0.0F, 2.0F}));
  EXPECT_EQ(got.non_finite, 0U);
  EXPECT_EQ(got.threshold, kMax);
  EXPECT_TRUE(std::isfinite(got.total_norm2));
  EXPECT_TRUE(near(got.total_norm2, 2.0 * static_cast<double>(kMax) * static_cast<double>(kMax)));
}

TEST(select, non_finite_never_enters_a_residual) {
  const Shape& shape = kShapes[6];
  ASSERT_STREQ(shape.name, "not finite");
  const std::size_t n = 5003;
  Floats residual = test::normal(n, 1);
  const Floats before = residual;
  Floats grad = shape.make(n, 2);
  const auto selector = make_selector({});
  SparseBuffer out;
  const SelectReport got = selector->select(task_of(grad, residual, {n}), out);
  std::uint64_t bad = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (std::isfinite(grad[i])) continue;
    ++bad;
    EXPECT_EQ(residual[i], before[i]);
  }
  EXPECT_GT(bad, 100U);
  EXPECT_EQ(got.non_finite, bad);
  EXPECT_TRUE(std::ranges::all_of(residual, [](float v) { return std::isfinite(v); }));
}

TEST(select, nan_is_above_infinity_and_ties) {
  Floats grad = {
      1.0F, kInf, -kNan, kMax, kNan, -kInf, std::bit_cast<float>(std::uint32_t{0x7fffffff})};
  const auto selector = make_selector({});
  SparseBuffer out;
  const std::vector<std::vector<Index>> kept = {{2}, {2, 4}, {2, 4, 6}, {1, 2, 4, 6}};
  for (std::size_t k = 1; k <= kept.size(); ++k) {
    const SelectReport got = selector->select(task_of(grad, {}, {k}), out);
    EXPECT_TRUE(std::ranges::equal(out.view().index, kept[k - 1])) << "k=" << k;
    EXPECT_EQ(std::isnan(got.threshold), k < 4);
    EXPECT_EQ(got.non_finite, 5U);
  }
}

// Squares over- and underflow in float long before the values do.
// The order of additions that kernels.hpp promises, so that others can reproduce the bits.
double norm2_in_groups(const Floats& x) {
  double groups = 0.0, group = 0.0;
  for (std::size_t block = 0; block * 1024 < x.size(); ++block) {
    std::array<float, 32> lane{};
    for (std::size_t i = block * 1024; i < std::min(x.size(), (block + 1) * 1024); ++i) {
      const float square = x[i] * x[i];
      lane[i % 32] = lane[i % 32] + square;
    }
    for (std::size_t width = 16; width > 0; width /= 2) {
      for (std::size_t i = 0; i < width; ++i) lane[i] += lane[i + width];
    }
    group += double{lane[0]};
    if (block % 256 == 255) {
      groups += group;
      group = 0.0;
    }
  }
  return groups + group;
}

TEST(select, norms_add_up_in_groups_of_blocks_on_every_target) {
  const std::size_t n = 3 * 256 * 1024 + 5003;
  const Floats grad = test::normal(n, 1), start = test::normal(n, 2);
  Floats sum(n);
  for (std::size_t i = 0; i < n; ++i) sum[i] = start[i] + grad[i];
  const double of_grad = norm2_in_groups(grad), of_sum = norm2_in_groups(sum);
  for (const std::int64_t target : targets()) {
    const ForcedTarget forced(target);
    for (const bool resumes : {false, true}) {
      Floats given = grad, residual = start;
      const auto selector = make_selector({});
      SparseBuffer out;
      if (resumes) {  // a threshold of a far smaller gradient: the pass stops for room again and
                      // again
        Floats small = grad, none(n, 0.0F);
        for (float& v : small) v *= 1e-6F;
        selector->select(task_of(small, none, {50}), out);
      }
      const SelectReport got = selector->select(task_of(given, residual, {50}), out);
      EXPECT_EQ(got.gradient_norm2, of_grad) << hwy::TargetName(target) << resumes;
      EXPECT_EQ(got.total_norm2, of_sum) << hwy::TargetName(target) << resumes;
    }
  }
}

TEST(select, norms_of_extreme_gradients) {
  for (const float factor : {1e25F, 1e-18F, 1e-22F, 1e-30F, 1e-40F}) {
    SCOPED_TRACE("factor=" + std::to_string(factor));
    Floats grad = test::normal(3333, 1), residual = test::normal(3333, 2);
    for (float& v : grad) v *= factor;
    for (float& v : residual) v *= factor;
    grad[100] = 1.0F;  // its block drowns the others'
    on_every_target(grad, residual, {33});
    on_every_target(grad, {}, {33});
  }
}

// ---- laws

TEST(select_laws, kept_are_at_least_as_large_as_dropped_and_the_error_contracts) {
  for (const Shape& shape : kShapes) {
    for (const std::size_t k : {std::size_t{1}, std::size_t{77}, std::size_t{5000}}) {
      const std::size_t n = 9001;
      SCOPED_TRACE(label(shape, n, k, 3));
      Floats grad = residual_of(shape, n, 3);
      const auto selector = make_selector({});
      SparseBuffer out;
      selector->select(task_of(grad, {}, {k}), out);
      Floats dropped = grad;
      float least = kMax;
      for (std::size_t e = 0; e < out.nnz(); ++e) {
        least = std::min(least, std::abs(out.view().value[e]));
        dropped[out.view().index[e]] = 0.0F;
      }
      const std::size_t non_zero =
          n - static_cast<std::size_t>(std::count(grad.begin(), grad.end(), 0.0F));
      EXPECT_EQ(out.nnz(), std::min(k, non_zero));
      for (const float v : dropped) EXPECT_LE(std::abs(v), least);
      const double bound = 1.0 - static_cast<double>(k) / static_cast<double>(n);
      EXPECT_LE(norm2(dropped), bound * norm2(grad) * (1.0 + 1e-12));
    }
  }
}

TEST(select_laws, permuting_distinct_magnitudes_permutes_the_selection) {
  const std::size_t n = 7001, k = 70;
  Floats x(n);
  for (std::size_t i = 0; i < n; ++i) x[i] = (i % 2 ? 1.0F : -1.0F) * static_cast<float>(i + 1);
  std::mt19937_64 rng(5);
  const auto selector = make_selector({});
  SparseBuffer out;
  for (int round = 0; round < 5; ++round) {
    std::shuffle(x.begin(), x.end(), rng);
    selector->select(task_of(x, {}, {k}), out);
    Floats kept(out.view().value.begin(), out.view().value.end());
    std::ranges::sort(kept, {}, [](float v) { return -std::abs(v); });
    ASSERT_EQ(kept.size(), k);
    for (std::size_t i = 0; i < k; ++i) EXPECT_EQ(std::abs(kept[i]), static_cast<float>(n - i));
    for (std::size_t e = 0; e < k; ++e) EXPECT_EQ(x[out.view().index[e]], out.view().value[e]);
  }
}

// ---- resources

TEST(select, a_warm_step_allocates_nothing) {
  const std::size_t n = 50021, k = 300;
  std::array<Floats, 3> grads = {test::normal(n, 1), test::normal(n, 2), test::normal(n, 3)};
  for (float& v : grads[1]) v *= 1e6F;  // prunes
  for (float& v : grads[2]) v *= 1e-6F;
  Floats residual(n, 0.0F);
  const auto selector = make_selector({});
  SparseBuffer out;
  const auto round = [&](std::uint64_t s) {
    for (Slot slot = 0; slot < 3; ++slot) {
      const std::span<float> no_residual;
      const SelectReport got = selector->select(
          task_of(grads[(s + slot) % 3], slot == 1 ? no_residual : residual, {k}, slot), out);
      ASSERT_GT(got.kept_norm2, 0.0);
    }
  };
  round(0);
  const std::uint64_t before = test::allocations();
  ASSERT_GT(before, 0U) << "nothing is counted";
  for (std::uint64_t s = 1; s < 10; ++s) round(s);
  EXPECT_EQ(test::allocations(), before);
}

TEST(select, sixteen_bit_gradients_are_the_floats_they_stand_for_on_every_target) {
  for (const DType type : {DType::f16, DType::bf16}) {
    std::vector<std::uint16_t> half(65536);  // every pattern
    std::iota(half.begin(), half.end(), std::uint16_t{0});
    std::mt19937_64 rng(5);
    std::shuffle(half.begin(), half.end(), rng);
    half.resize(65531);
    Floats wide(half.size());
    for (std::size_t i = 0; i < half.size(); ++i) wide[i] = test::meaning(half[i], type);
    for (const std::int64_t target : targets()) {
      const ForcedTarget forced(target);
      for (const bool kept : {true, false}) {
        const Floats start = test::normal(half.size(), 4);
        Floats residual = start, expected_residual = start;
        const auto selector = make_selector({}), other = make_selector({});
        SparseBuffer out, expected;
        SelectTask task;
        task.grad.data = half.data();
        task.grad.n = half.size();
        task.grad.dtype = type;
        task.grad.scale = 4.0F;
        task.keep.k = 500;
        if (kept) task.residual = DenseView(residual);
        const SelectReport got = selector->select(task, out);
        task.grad.data = wide.data();
        task.grad.dtype = DType::f32;
        if (kept) task.residual = DenseView(expected_residual);
        const SelectReport wanted = other->select(task, expected);
        EXPECT_TRUE(same_bits(residual, expected_residual)) << hwy::TargetName(target);
        EXPECT_TRUE(std::ranges::equal(out.view().index, expected.view().index));
        EXPECT_EQ(got.non_finite, wanted.non_finite);
        EXPECT_EQ(got.gradient_norm2, wanted.gradient_norm2);
        EXPECT_EQ(got.total_norm2, wanted.total_norm2);
      }
    }
  }
}

TEST(select, decay_shrinks_the_residual_before_the_addition) {
  const std::size_t n = 5003;
  const Floats grad = test::normal(n, 1), start = test::normal(n, 2);
  for (const std::int64_t target : targets()) {
    const ForcedTarget forced(target);
    const auto selector = make_selector({});
    Floats residual = start;
    SparseBuffer out;
    Floats given = grad;
    SelectTask task = task_of(given, residual, {50});
    task.decay = 0.95F;
    selector->select(task, out);
    for (std::size_t i = 0; i < n; ++i) {
      ASSERT_EQ(residual[i], 0.95F * start[i] + grad[i]) << i << hwy::TargetName(target);
    }
  }
}

TEST(select, refuses_bad_arguments_before_anything_changes) {
  const auto selector = make_selector({});
  Floats grad = test::normal(10, 1), residual = test::normal(10, 2), shorter(9, 1.0F);
  const Floats before = residual;
  SparseBuffer out;
  out.reset(3);
  out.append(1, 2.0F);
  const auto refused = [&](SelectTask task, const std::string& words) {
    try {
      selector->select(task, out);
      ADD_FAILURE() << "accepted: " << words;
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    }
    EXPECT_EQ(residual, before);
    EXPECT_EQ(out.nnz(), 1U);
  };
  const SelectTask good = task_of(grad, residual, {3});
  SelectTask task = good;
  task.keep.k = 11;
  refused(task, "select: k must be <= n (k=11, n=10)");
  task = good;
  task.residual = DenseView(shorter);
  refused(task, "residual 9, gradient 10");
  task = good;
  task.grad.n = std::size_t{1} << 32;
  task.residual.n = task.grad.n;
  refused(task, "n must be < 2^32");
  task = good;
  task.decay = 1.5F;
  refused(task, "decay must be in [0, 1]");
  task = good;
  task.grad.device = Device::other;
  refused(task, "CPU");
  task = good;
  task.residual.device = Device::other;
  refused(task, "CPU");
  task = good;
  task.grad.data = nullptr;
  refused(task, "null");
  for (const float scale : {0.0F, -1.0F, kInf, kNan, kDenormal}) {
    task = good;
    task.grad.scale = scale;
    refused(task, "scale");
  }
  task = good;
  task.keep.threshold = kNan;
  refused(task, "threshold");
  EXPECT_NO_THROW(selector->select(good, out));
}

TEST(select, algorithms_have_names) {
  EXPECT_EQ(name_of(SelectRule::exact), "exact");
  EXPECT_EQ(make_selector({})->name(), "exact");
  const std::size_t last = static_cast<std::size_t>(SelectRule::blocktopk);
  ASSERT_EQ(names_of<SelectRule>().size(), last + 1);
  for (std::size_t a = 0; a <= last; ++a) {
    EXPECT_EQ(make_selector({.rule = static_cast<SelectRule>(a)})->name(),
              names_of<SelectRule>()[a]);
  }
  EXPECT_THROW(make_selector({.rule = static_cast<SelectRule>(99)}), InvalidArgument);
}

// ---- saved thresholds

std::string saved(const Selector& s) {
  std::ostringstream out;
  s.save(out);
  return out.str();
}

TEST(select_state, saved_thresholds_carry_over) {
  const std::size_t n = 20011;
  Floats grad = test::normal(n, 1), small = grad;
  for (float& v : small) v *= 1e-6F;
  SparseBuffer out;
  const auto selector = make_selector({});
  for (Slot slot : {9U, 2U}) selector->select(task_of(grad, {}, {20}, slot), out);
  const std::string bytes = saved(*selector);

  const auto other = make_selector({});
  std::istringstream in(bytes + "more");
  other->load(in);
  EXPECT_EQ(saved(*other), bytes);
  EXPECT_EQ(in.peek(), 'm') << "reads its own bytes only";
  // A threshold was carried: it is too high for a gradient that shrank.
  EXPECT_EQ(other->select(task_of(small, {}, {20}, 2), out).passes, 2);
  EXPECT_EQ(make_selector({})->select(task_of(small, {}, {20}, 2), out).passes, 1);
}

TEST(select_state, bad_bytes_are_refused_and_change_nothing) {
  SparseBuffer out;
  Floats grad = test::normal(5000, 1);
  const auto source = make_selector({}), selector = make_selector({});
  source->select(task_of(grad, {}, {20}, 3), out);
  selector->select(task_of(grad, {}, {50}, 4), out);
  const std::string good = saved(*source), before = saved(*selector);
  const auto refused = [&](const std::string& bytes) {
    std::istringstream in(bytes);
    EXPECT_THROW(selector->load(in), StateError);
    EXPECT_EQ(saved(*selector), before);
  };
  for (std::size_t length = 0; length < good.size(); ++length) refused(good.substr(0, length));
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x11);
    refused(bad);
  }
}

// ---- split_top_k

void split_equals_oracle(const Floats& x, std::size_t k, std::vector<std::uint32_t>& scratch) {
  SparseBuffer s, kept, dropped;
  s.reset(3 * x.size() + 1);
  Floats spread(3 * x.size() + 1, 0.0F);
  for (std::size_t i = 0; i < x.size(); ++i) {
    s.append(static_cast<Index>(3 * i + 1), x[i]);
    spread[3 * i + 1] = x[i];
  }
  kept.append(0, 1.0F);
  dropped.append(0, 1.0F);
  split_top_k(s.view(), k, kept, dropped, scratch);
  const SparseBuffer want = test::top_k(spread, k);
  EXPECT_TRUE(test::same(kept.view(), want.view()));
  for (const Index i : want.view().index) spread[i] = 0.0F;
  const SparseBuffer rest = test::top_k(spread, spread.size());
  EXPECT_TRUE(test::same(dropped.view(), rest.view()));
}

TEST(split_top_k, equals_the_oracle) {
  std::vector<std::uint32_t> scratch;
  for (const Shape& shape : kShapes) {
    for (const std::size_t n : std::vector<std::size_t>{0, 1, 2, 17, 1000, 10007}) {
      for (const std::size_t k : {std::size_t{0}, std::size_t{1}, n / 2, n, n + 5}) {
        SCOPED_TRACE(label(shape, n, k, n));
        split_equals_oracle(shape.make(n, n), k, scratch);
      }
    }
  }
}

TEST(split_top_k, a_warm_call_allocates_nothing) {
  SparseBuffer s, kept, dropped;
  std::vector<std::uint32_t> scratch;
  const Floats x = test::normal(5000, 1);
  s.reset(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) s.append(static_cast<Index>(i), x[i]);
  split_top_k(s.view(), 2000, kept, dropped, scratch);
  const std::uint64_t before = test::allocations();
  for (int i = 0; i < 3; ++i) split_top_k(s.view(), 2000, kept, dropped, scratch);
  EXPECT_EQ(test::allocations(), before);
}

// ---- the longest gradient

// Reading untouched private pages maps the one zero page again and again, so 16 GiB cost little.
TEST(select_huge, indices_up_to_the_last) {
  const std::size_t n = std::numeric_limits<Index>::max();
  void* memory = mmap(nullptr, n * sizeof(float), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no 16 GiB of address space without swap reservation";
  madvise(memory, n * sizeof(float), MADV_NOHUGEPAGE);  // a write would make 2 MiB resident
  const std::span<float> grad(static_cast<float*>(memory), n);
  const std::vector<Index> at = {0, 1U << 31, (1U << 31) + 1, 4294967293U, 4294967294U};
  const Floats values = {1.0F, -4.0F, 3.0F, 2.0F, -2.0F};
  for (std::size_t i = 0; i < at.size(); ++i) grad[at[i]] = values[i];
  const auto selector = make_selector({});
  SparseBuffer out;
  const SelectReport got = selector->select({{}, grad, {}, {}, {3}}, out);
  munmap(memory, n * sizeof(float));
  EXPECT_TRUE(
      std::ranges::equal(out.view().index, std::vector{1U << 31, (1U << 31) + 1, 4294967293U}));
  EXPECT_TRUE(std::ranges::equal(out.view().value, Floats{-4.0F, 3.0F, 2.0F}));
  EXPECT_EQ(got.gradient_norm2, 34.0);
  EXPECT_EQ(got.passes, 1);
}

}  // namespace
}  // namespace skim
