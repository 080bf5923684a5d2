// Bounds against the table of their values, closed forms against samples, measures against
// definitions.
#include "skim/analysis.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numbers>
#include <random>
#include <string>
#include <vector>

#include "normal.hpp"
#include "oracle.hpp"
#include "skim/error.hpp"

namespace skim::analysis {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- samples of unimodal, symmetric distributions -------------------------------------------

using Rng = std::mt19937_64;
struct Shape {
  std::string name;
  std::function<double(Rng&)> draw;
};

double normal(Rng& rng) { return std::normal_distribution<double>()(rng); }
double laplace(Rng& rng) {
  const double x = std::exponential_distribution<double>()(rng);
  return std::bernoulli_distribution()(rng) ? x : -x;
}
std::function<double(Rng&)> student_t(double freedom) {
  return [=](Rng& rng) { return std::student_t_distribution<double>(freedom)(rng); };
}
// Of two draws, the first with probability p.
std::function<double(Rng&)> mixture(double p, std::function<double(Rng&)> a,
                                    std::function<double(Rng&)> b) {
  return [=](Rng& rng) { return std::bernoulli_distribution(p)(rng) ? a(rng) : b(rng); };
}

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all{
      {"normal", normal},
      {"laplace", laplace},
      {"student_t4", student_t(4.0)},
      {"student_t2.5", student_t(2.5)},
      {"cauchy", student_t(1.0)},
      {"uniform", [](Rng& r) { return std::uniform_real_distribution<double>(-1.0, 1.0)(r); }},
      {"triangle",
       [](Rng& r) {
         std::uniform_real_distribution<double> half(-0.5, 0.5);
         return half(r) + half(r);
       }},
      {"two_normals", mixture(0.9, normal, [](Rng& r) { return 5.0 * normal(r); })},
      {"zeros_and_laplace", mixture(
                                0.7, [](Rng&) { return 0.0; }, laplace)},
      {"uniform_and_normal",
       mixture(
           0.5, [](Rng& r) { return std::uniform_real_distribution<double>(-2.0, 2.0)(r); },
           normal)},
  };
  return all;
}

std::vector<float> sample(const std::function<double(Rng&)>& draw, std::size_t d,
                          std::uint64_t seed) {
  Rng rng(seed);
  std::vector<float> u(d);
  for (float& v : u) v = static_cast<float>(draw(rng));
  return u;
}

// ---- closed forms -----------------------------------------------------------------------------

TEST(normal_quantile, known_values) {
  // NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.1, and well-known quantiles.
  const std::vector<std::pair<double, double>> known{
      {0.5, 0.0},
      {0.25, 0.6744897501960817},
      {0.1, 1.2815515655446004},
      {0.05, 1.6448536269514722},
      {0.025, 1.959963984540054},
      {0.01, 2.3263478740408408},
      {0.005, 2.575829303548901},
      {0.001, 3.090232306167813},
      {0.0005, 3.2905267314918945},
  };
  for (const auto& [q, z] : known) {
    EXPECT_NEAR(normal_upper_quantile(q), z, 4e-15 * std::max(1.0, z)) << q;
    EXPECT_NEAR(normal_upper_quantile(1.0 - q), -z, 1e-12) << q;
  }
  EXPECT_EQ(normal_upper_quantile(0.0), std::numeric_limits<double>::infinity());
  EXPECT_EQ(normal_upper_quantile(1.0), -std::numeric_limits<double>::infinity());
}

TEST(normal_quantile, is_the_inverse_of_the_tail_down_to_the_smallest_densities) {
  for (double q = 0.5; q > 1e-300; q *= 0.37) {
    const double z = normal_upper_quantile(q);
    // d(tail)/tail is about -z dz: as many digits as z allows.
    EXPECT_NEAR(0.5 * std::erfc(z / std::numbers::sqrt2) / q, 1.0, 1e-14 * (1.0 + z * z)) << q;
  }
}

struct Values {
  double kappa, general, bell, unimodal, normal, laplace;
};
// Computed independently of this code; the normal distribution's at 0.05 to four digits.
constexpr std::array<Values, 6> kTable{{
    {1e-4, .9999, .9998, .9997, .998297, .994737},
    {1e-3, .999, .998001, .997003, .987304, .968234},
    {1e-2, .99, .9801, .970299, .915508, .837910},
    {.05, .95, .9025, .857375, .7209, .575853},
    {.1, .9, .81, .729, .560714, .404647},
    {.3, .7, .49, .343, .216693, .121376},
}};

TEST(bounds, table_of_values) {
  for (const Values& v : kTable) {
    EXPECT_NEAR(general_bound(v.kappa), v.general, 1e-6) << v.kappa;
    EXPECT_NEAR(bell_bound(v.kappa), v.bell, 1e-6) << v.kappa;
    EXPECT_NEAR(unimodal_bound(v.kappa), v.unimodal, 1e-6) << v.kappa;
    EXPECT_NEAR(normal_ratio(v.kappa), v.normal, v.kappa == .05 ? 5e-5 : 1e-6) << v.kappa;
    EXPECT_NEAR(laplace_ratio(v.kappa), v.laplace, 1e-6) << v.kappa;
  }
}

TEST(bounds, at_the_ends) {
  for (const auto f : {general_bound, bell_bound, unimodal_bound, normal_ratio, laplace_ratio}) {
    EXPECT_EQ(f(0.0), 1.0);
    EXPECT_EQ(f(1.0), 0.0);
    EXPECT_THROW(f(-1e-9), InvalidArgument);
    EXPECT_THROW(f(1.0 + 1e-9), InvalidArgument);
    EXPECT_THROW(f(std::numeric_limits<double>::quiet_NaN()), InvalidArgument);
  }
}

TEST(bounds, each_is_sharper_than_the_one_before) {
  for (double kappa = 1e-6; kappa < 1.0; kappa = std::min(1.0, kappa * 1.7)) {
    EXPECT_LT(bell_bound(kappa), general_bound(kappa));
    EXPECT_LT(unimodal_bound(kappa), bell_bound(kappa));
    EXPECT_LT(normal_ratio(kappa), unimodal_bound(kappa));
    EXPECT_LT(laplace_ratio(kappa), normal_ratio(kappa));
  }
}

TEST(bounds, contraction_is_what_the_bell_bound_leaves) {
  for (const auto& [k, d] : {std::pair<std::size_t, std::size_t>{0, 7},
                             {1, 1},
                             {1, 1000},
                             {25'000, 25'000'000},
                             {3, 4}}) {
    const double kappa = static_cast<double>(k) / static_cast<double>(d);
    EXPECT_NEAR(bell_contraction(k, d), 1.0 - bell_bound(kappa), 1e-15);
  }
  EXPECT_EQ(bell_contraction(1, 2), 0.75);  // (2 * 1 * 2 - 1) / 4
  EXPECT_THROW(bell_contraction(2, 1), InvalidArgument);
  EXPECT_THROW(bell_contraction(0, 0), InvalidArgument);
}

TEST(convergence, is_its_formula) {
  // (2 * 3 + 2 * 5) / sqrt(4) + 4 * 4 * 5 * 0.5 / (0.25 * 4) = 8 + 40
  const Convergence c{
      .gap = 3.0, .smoothness = 2.0, .second_moment = 5.0, .delta = 0.5, .steps = 3.0};
  EXPECT_DOUBLE_EQ(convergence_bound(c), 48.0);
  EXPECT_THROW(convergence_bound({.delta = 0.0}), InvalidArgument);
  EXPECT_THROW(convergence_bound({.gap = -1.0}), InvalidArgument);
}

TEST(convergence, without_compression_it_is_that_of_sgd_and_with_it_only_the_second_term_grows) {
  Convergence c{.gap = 1.0, .smoothness = 1.0, .second_moment = 1.0, .delta = 1.0, .steps = 99.0};
  EXPECT_DOUBLE_EQ(convergence_bound(c), 3.0 / 10.0);
  // The step from which the first term leads grows with 1 / delta^2: four times sooner with the
  // contraction of bell-shaped gradients than with k / d.
  const auto second_term = [&](double delta, double steps) {
    c.delta = delta;
    c.steps = steps;
    return convergence_bound(c) - 3.0 / std::sqrt(steps + 1.0);
  };
  const double general = second_term(0.001, 1e6),
               bell = second_term(bell_contraction(1, 1000), 1e6);
  EXPECT_NEAR(general / bell, 4.0, 0.01);
}

// ---- the ratio of samples -----------------------------------------------------------------------

TEST(ratio, is_its_definition) {
  for (const std::size_t d : {std::size_t{1}, std::size_t{2}, std::size_t{17}, std::size_t{1000}}) {
    const std::vector<float> u = test::normal(d, d);
    for (std::size_t k = 0; k <= d; k += std::max<std::size_t>(1, d / 7)) {
      const std::vector<float> kept = test::dense(test::top_k(u, k).view());
      double lost = 0.0, total = 0.0;
      for (std::size_t i = 0; i < d; ++i) {
        lost += std::pow(double{u[i]} - double{kept[i]}, 2.0);
        total += std::pow(double{u[i]}, 2.0);
      }
      EXPECT_NEAR(top_k_ratio(u, k), lost / total, 1e-13) << d << " " << k;
    }
  }
}

TEST(ratio, edges) {
  const std::vector<float> u{3.0F, -4.0F};
  EXPECT_EQ(top_k_ratio(u, 0), 1.0);
  EXPECT_EQ(top_k_ratio(u, 1), 9.0 / 25.0);
  EXPECT_EQ(top_k_ratio(u, 2), 0.0);
  EXPECT_EQ(top_k_ratio({}, 0), 0.0);
  EXPECT_EQ(top_k_ratio(std::vector<float>(5, 0.0F), 2), 0.0);
  EXPECT_THROW(top_k_ratio(u, 3), InvalidArgument);
  EXPECT_THROW(top_k_ratio(std::vector<float>{1.0F, kNaN}, 1), InvalidArgument);
  EXPECT_THROW(top_k_ratio(std::vector<float>{1.0F, -kInfinity}, 1), InvalidArgument);
  // No overflow: squares of the largest floats, no loss of the smallest.
  const float largest = std::numeric_limits<float>::max();
  EXPECT_EQ(top_k_ratio(std::vector<float>{largest, -largest}, 1), 0.5);
  const float smallest = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(top_k_ratio(std::vector<float>{smallest, smallest}, 1), 0.5);
}

TEST(ratio, closed_forms_agree_with_samples) {
  constexpr std::size_t kD = 2'000'000;
  const std::vector<float> normal_u = sample(normal, kD, 1), laplace_u = sample(laplace, kD, 2);
  // Samples without noise: every entry at the middle of its share of the probability.
  std::vector<float> normal_grid(kD), laplace_grid(kD);
  for (std::size_t i = 0; i < kD; ++i) {
    const double above = (static_cast<double>(i) + 0.5) / kD;
    normal_grid[i] = static_cast<float>(normal_upper_quantile(above));
    laplace_grid[i] =
        static_cast<float>(above < 0.5 ? -std::log(2.0 * above) : std::log(2.0 * (1.0 - above)));
  }
  for (const Values& v : kTable) {
    const auto k = static_cast<std::size_t>(v.kappa * kD + 0.5);
    EXPECT_NEAR(top_k_ratio(normal_grid, k), normal_ratio(v.kappa), 2e-5) << v.kappa;
    EXPECT_NEAR(top_k_ratio(laplace_grid, k), laplace_ratio(v.kappa), 5e-5) << v.kappa;
    // The standard error of |u|^2 alone is sqrt(2 / d) = 0.001 of it for the normal distribution,
    // and sqrt(5 / d) = 0.0016 for the Laplace distribution: three digits.
    EXPECT_NEAR(top_k_ratio(normal_u, k), normal_ratio(v.kappa), 1e-3) << v.kappa;
    EXPECT_NEAR(top_k_ratio(laplace_u, k), laplace_ratio(v.kappa), 2e-3) << v.kappa;
  }
}

TEST(ratio, unimodal_samples_stay_below_the_cubic_bound) {
  constexpr std::size_t kD = 200'000;
  for (const Shape& s : shapes()) {
    const std::vector<float> u = sample(s.draw, kD, 3);
    for (const double kappa : {1e-4, 1e-3, 1e-2, 0.05, 0.1, 0.3, 0.7}) {
      const auto k = static_cast<std::size_t>(kappa * kD + 0.5);
      // Noise of a sum over k of d random entries; only the uniform distribution comes near.
      const double noise = 5.0 * std::sqrt(kappa * (1.0 - kappa) / kD);
      EXPECT_LE(top_k_ratio(u, k), unimodal_bound(kappa) + noise) << s.name << " " << kappa;
    }
  }
}

TEST(ratio, the_uniform_distribution_reaches_the_cubic_bound) {
  constexpr std::size_t kD = 200'000;
  std::vector<float> u(kD);  // a grid: no noise
  for (std::size_t i = 0; i < kD; ++i) u[i] = (static_cast<float>(i) + 0.5F) / kD - 0.5F;
  for (const double kappa : {1e-3, 0.1, 0.5}) {
    EXPECT_NEAR(top_k_ratio(u, static_cast<std::size_t>(kappa * kD)), unimodal_bound(kappa), 1e-5);
  }
}

TEST(ratio, signs_reach_the_general_bound_and_break_the_others) {
  constexpr std::size_t kD = 10'000;
  std::vector<float> u(kD);
  for (std::size_t i = 0; i < kD; ++i) u[i] = i % 3 == 0 ? -1.0F : 1.0F;
  for (const std::size_t k : {std::size_t{1}, std::size_t{10}, std::size_t{3'000}}) {
    const double kappa = static_cast<double>(k) / kD;
    EXPECT_DOUBLE_EQ(top_k_ratio(u, k), general_bound(kappa));
    EXPECT_GT(top_k_ratio(u, k), bell_bound(kappa));
  }
}

// ---- measures
// -------------------------------------------------------------------------------------

TEST(moments_of, small_sets_by_hand) {
  const Moments m = moments(std::vector<float>{1.0F, 2.0F, 3.0F, 6.0F});
  EXPECT_DOUBLE_EQ(m.mean, 3.0);
  EXPECT_DOUBLE_EQ(m.std, std::sqrt(3.5));                        // (4 + 1 + 0 + 9) / 4
  EXPECT_DOUBLE_EQ(m.skewness, 4.5 / std::pow(3.5, 1.5));         // (-8 - 1 + 0 + 27) / 4
  EXPECT_DOUBLE_EQ(m.excess_kurtosis, 24.5 / (3.5 * 3.5) - 3.0);  // (16 + 1 + 0 + 81) / 4
  const Moments constant = moments(std::vector<float>(9, 2.5F));
  EXPECT_EQ(constant.mean, 2.5);
  EXPECT_EQ(constant.std, 0.0);
  EXPECT_EQ(constant.skewness, 0.0);
  EXPECT_EQ(constant.excess_kurtosis, 0.0);
  EXPECT_THROW(moments({}), InvalidArgument);
  EXPECT_THROW(moments(std::vector<float>{kNaN}), InvalidArgument);
}

TEST(moments_of, known_distributions) {
  constexpr std::size_t kD = 1'000'000;
  const Moments n = moments(sample(normal, kD, 4));
  EXPECT_NEAR(n.mean, 0.0, 0.005);
  EXPECT_NEAR(n.std, 1.0, 0.005);
  EXPECT_NEAR(n.skewness, 0.0, 0.02);
  EXPECT_NEAR(n.excess_kurtosis, 0.0, 0.05);
  const Moments l = moments(sample(laplace, kD, 5));
  EXPECT_NEAR(l.std, std::sqrt(2.0), 0.01);
  EXPECT_NEAR(l.excess_kurtosis, 3.0, 0.2);
}

TEST(bounds, stay_ratios_next_to_the_ends) {
  for (const auto f : {normal_ratio, laplace_ratio}) {
    for (const double least : {5e-324, 1e-310, 1e-300}) EXPECT_EQ(f(least), 1.0) << least;
    for (double kappa = 1.0; kappa > 1.0 - 1e-12; kappa = std::nextafter(kappa, 0.0)) {
      ASSERT_GE(f(kappa), 0.0) << kappa;
    }
  }
}

TEST(histogram_of, a_range_that_overflows_is_refused) {
  const std::vector<float> u{1.0F};
  EXPECT_THROW(histogram(u, -1e308, 1e308, 4), InvalidArgument);
  EXPECT_THROW(histogram(u, 0.0, std::numeric_limits<double>::infinity(), 4), InvalidArgument);
}

TEST(histogram_of, every_entry_is_in_the_bin_of_its_edges) {
  std::vector<float> u = test::normal(20'000, 6);
  for (const float edge : {-0.7F, -0.1F, 0.0F, 0.3F, 0.7F}) u.push_back(edge);
  const Histogram h = histogram(u, -0.7F, 0.7F, 14);
  ASSERT_EQ(h.count.size(), 14U);
  EXPECT_EQ(h.edge(0), double{-0.7F});
  EXPECT_EQ(h.edge(14), double{0.7F});
  const auto count_if = [&](const auto& rule) {
    return static_cast<std::uint64_t>(std::ranges::count_if(u, rule));
  };
  EXPECT_EQ(h.below, count_if([&](float v) { return v < h.low; }));
  EXPECT_EQ(h.above, count_if([&](float v) { return v > h.high; }));
  for (std::size_t b = 0; b < 14; ++b) {
    const bool last = b == 13;
    EXPECT_EQ(h.count[b], count_if([&](float v) {
                return v >= h.edge(b) && (v < h.edge(b + 1) || (last && v == h.high));
              }))
        << b;
  }
  const std::vector<double> c = cumulative(h);
  ASSERT_EQ(c.size(), 15U);
  for (std::size_t b = 0; b < 14; ++b) {
    EXPECT_DOUBLE_EQ(c[b] * static_cast<double>(u.size()),
                     static_cast<double>(count_if([&](float v) { return v < h.edge(b); })));
  }
  EXPECT_DOUBLE_EQ(c[14], 1.0 - static_cast<double>(h.above) / static_cast<double>(u.size()));
}

TEST(histogram_of, what_is_refused) {
  const std::vector<float> u{1.0F};
  EXPECT_THROW(histogram(u, 1.0, 1.0, 3), InvalidArgument);
  EXPECT_THROW(histogram(u, 0.0, 1.0, 0), InvalidArgument);
  EXPECT_THROW(histogram(u, 0.0, std::numeric_limits<double>::infinity(), 3), InvalidArgument);
  EXPECT_THROW(histogram(std::vector<float>{kNaN}, 0.0, 1.0, 3), InvalidArgument);
  EXPECT_THROW(cumulative(histogram({}, 0.0, 1.0, 3)), InvalidArgument);
}

TEST(distance_from_unimodal, is_noise_for_unimodal_samples) {
  constexpr std::size_t kD = 200'000;
  for (const Shape& s : shapes()) {
    // 1.95 / sqrt(d): what the Kolmogorov distance of a sample exceeds once in 1000 times.
    EXPECT_LT(distance_from_unimodal(sample(s.draw, kD, 7)), 1.95 / std::sqrt(kD)) << s.name;
  }
}

TEST(distance_from_unimodal, shapes_with_another_mode_are_far) {
  // All magnitudes 1: the distribution jumps there, the concave function above it is x itself.
  EXPECT_NEAR(distance_from_unimodal(std::vector<float>{-1.0F, 1.0F, 1.0F}), 1.0, 1e-6);
  // |u| uniform on [1, 2]: 0 up to 1, where the concave function x / 2 is 1/2.
  std::vector<float> u(100'001);
  for (std::size_t i = 0; i < u.size(); ++i) u[i] = 1.0F + static_cast<float>(i) * 1e-5F;
  EXPECT_NEAR(distance_from_unimodal(u), 0.5, 1e-4);
  // A quarter of zeros agrees with the assumption: the rest decides.
  EXPECT_NEAR(distance_from_unimodal(std::vector<float>{0.0F, 0.0F, 2.0F, 2.0F}), 0.5, 1e-6);
  EXPECT_EQ(distance_from_unimodal({}), 0.0);
  EXPECT_EQ(distance_from_unimodal(std::vector<float>(4, 0.0F)), 0.0);
}

// ---- the bound that adaptive densities minimise ------------------------------------------------

// f(x) = 1/2 sum_j c_j y_j^2, y the coordinates of x turned by 45 degrees in pairs: top-k does not
// look along the axes of f. Curvatures c_j from mu to L = 1.
struct Turned {
  double mu = 0.1;
  std::vector<double> x;

  static double curvature(double mu, std::size_t j, std::size_t n) {
    return mu + (1.0 - mu) * static_cast<double>(j) / static_cast<double>(n - 1);
  }
  static std::vector<double> turned(std::vector<double> v) {
    for (std::size_t j = 0; j + 1 < v.size(); j += 2) {
      const double a = v[j], b = v[j + 1];
      v[j] = (a + b) / std::numbers::sqrt2;
      v[j + 1] = (a - b) / std::numbers::sqrt2;
    }
    return v;
  }
  double f() const {
    const std::vector<double> y = turned(x);
    double sum = 0.0;
    for (std::size_t j = 0; j < y.size(); ++j) sum += curvature(mu, j, y.size()) * y[j] * y[j];
    return 0.5 * sum;
  }
  // A step with the k largest of the gradient and noise of this deviation in each entry. Returns
  // what was left out, squared.
  double step(double eta, std::size_t k, double deviation, Rng& rng) {
    std::vector<double> y = turned(x);
    for (std::size_t j = 0; j < y.size(); ++j) y[j] *= curvature(mu, j, y.size());
    std::vector<double> g = turned(y);
    std::normal_distribution<double> normal;
    if (deviation > 0.0) {
      for (double& v : g) v += deviation * normal(rng);
    }
    std::vector<std::size_t> order(g.size());
    for (std::size_t i = 0; i < g.size(); ++i) order[i] = i;
    std::ranges::sort(
        order, [&](std::size_t a, std::size_t b) { return std::abs(g[a]) > std::abs(g[b]); });
    double left = 0.0;
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (i < k) {
        x[order[i]] -= eta * g[order[i]];
      } else {
        left += g[order[i]] * g[order[i]];
      }
    }
    return left;
  }
};

Turned start_of(std::size_t n, double mu) {
  Turned t{.mu = mu, .x = std::vector<double>(n)};
  Rng rng(17);
  std::normal_distribution<double> normal;
  for (double& v : t.x) v = std::pow(normal(rng), 3.0);
  return t;
}

TEST(error_bound, holds_at_every_step_of_a_quadratic) {
  constexpr std::size_t kN = 200;
  for (const double mu : {0.01, 0.1, 0.5}) {
    for (const double eta : {1.0, 0.3}) {
      for (const std::size_t base : {1U, 10U, 60U}) {
        Turned q = start_of(kN, mu);
        Rng rng(1);
        const double gap = q.f();
        std::vector<double> left;
        for (std::size_t t = 0; t < 100; ++t) {
          left.push_back(q.step(eta, 1 + (base * (1 + t % 5)) % kN, 0.0, rng));
          const double bound =
              error_bound({.gap = gap, .mu = mu, .step_size = eta, .left_out = left});
          EXPECT_LE(q.f(), bound * (1.0 + 1e-12)) << mu << " " << eta << " " << base << " " << t;
        }
      }
    }
  }
}

// One curvature, eta = 1 / L: what a step leaves out is all that remains.
TEST(error_bound, is_reached) {
  Turned q = start_of(50, 1.0);
  Rng rng(1);
  std::vector<double> left;
  const double gap = q.f();
  for (std::size_t t = 0; t < 4; ++t) {
    left.push_back(q.step(1.0, 7, 0.0, rng));
    EXPECT_NEAR(q.f(), error_bound({.gap = gap, .mu = 1.0, .step_size = 1.0, .left_out = left}),
                1e-12 * gap);
  }
}

TEST(error_bound, holds_on_average_with_noise) {
  constexpr std::size_t kN = 100, kSteps = 40, kRuns = 200;
  constexpr double kDeviation = 0.5;
  for (const std::size_t k : {5U, 30U}) {
    Rng rng(2);
    double f = 0.0, gap = 0.0;
    std::vector<double> left(kSteps, 0.0);
    for (std::size_t run = 0; run < kRuns; ++run) {
      Turned q = start_of(kN, 0.1);
      gap = q.f();
      for (double& l : left) l += q.step(0.5, k, kDeviation, rng) / kRuns;
      f += q.f() / kRuns;
    }
    const double noise = kDeviation * kDeviation * kN;
    EXPECT_LE(f, error_bound(
                     {.gap = gap, .mu = 0.1, .step_size = 0.5, .left_out = left, .noise = noise}));
    EXPECT_GT(f, error_bound({.gap = gap, .mu = 0.1, .step_size = 0.5, .left_out = {}}) / 1e3);
  }
}

TEST(error_bound, its_formula_and_what_it_refuses) {
  const std::vector<double> left{8.0, 4.0};
  // a = 1/2: 16/4 + 1/2 (sqrt(8/2 + 4) + 0)^2
  EXPECT_DOUBLE_EQ(error_bound({.gap = 16.0, .mu = 0.5, .step_size = 1.0, .left_out = left}), 8.0);
  // and noise 3 + 3/2
  EXPECT_DOUBLE_EQ(
      error_bound({.gap = 16.0, .mu = 0.5, .step_size = 1.0, .left_out = left, .noise = 3.0}),
      4.0 + 0.5 * std::pow(std::sqrt(8.0) + std::sqrt(4.5), 2.0));
  EXPECT_EQ(error_bound({.gap = 3.0}), 3.0);
  const std::vector<double> bad{-1.0};
  EXPECT_THROW(error_bound({.left_out = bad}), InvalidArgument);
  EXPECT_THROW(error_bound({.gap = -1.0}), InvalidArgument);
  EXPECT_THROW(error_bound({.mu = 2.0, .step_size = 1.0}), InvalidArgument);
  EXPECT_THROW(error_bound({.noise = std::nan("")}), InvalidArgument);
}

// Descent on the same quadratic (L = 1) with error feedback: x takes the k largest of e + eta g.
struct WithFeedback {
  Turned q;
  std::vector<double> e = std::vector<double>(q.x.size(), 0.0);

  // Returns |e|^2 before the step.
  double step(double eta, std::size_t k, double deviation, Rng& rng) {
    double held = 0.0;
    for (const double v : e) held += v * v;
    Turned whole = q;
    whole.step(eta, q.x.size(), deviation, rng);  // eta g, by what it moves
    for (std::size_t i = 0; i < e.size(); ++i) e[i] += q.x[i] - whole.x[i];
    std::vector<std::size_t> order(e.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::sort(
        order, [&](std::size_t a, std::size_t b) { return std::abs(e[a]) > std::abs(e[b]); });
    for (std::size_t i = 0; i < k; ++i) {
      q.x[order[i]] -= e[order[i]];
      e[order[i]] = 0.0;
    }
    return held;
  }
  double virtual_f() const {
    Turned at = q;
    for (std::size_t i = 0; i < e.size(); ++i) at.x[i] -= e[i];
    return at.f();
  }
};

TEST(feedback_bound, holds_at_every_step_of_a_quadratic) {
  constexpr std::size_t kN = 200;
  for (const double mu : {0.0, 0.05, 0.5}) {
    for (const double eta : {1.0, 0.2}) {
      for (const std::size_t base : {1U, 10U, 60U}) {
        WithFeedback run{start_of(kN, mu)};
        Rng rng(1);
        const double gap = run.q.f();
        std::vector<double> sizes, held;
        for (std::size_t t = 0; t < 100; ++t) {
          sizes.push_back(eta / (1.0 + 0.05 * static_cast<double>(t)));
          held.push_back(run.step(sizes.back(), 1 + (base * (1 + t % 5)) % kN, 0.0, rng));
          const double bound = feedback_bound(
              {.gap = gap, .mu = mu, .smoothness = 1.0, .step_sizes = sizes, .residuals = held});
          EXPECT_LE(run.virtual_f(), bound * (1.0 + 1e-12)) << mu << " " << eta << " " << t;
        }
      }
    }
  }
}

TEST(feedback_bound, holds_on_average_with_noise) {
  constexpr std::size_t kN = 100, kSteps = 40, kRuns = 200;
  constexpr double kDeviation = 0.5;
  for (const std::size_t k : {5U, 30U}) {
    Rng rng(2);
    double f = 0.0, gap = 0.0;
    const std::vector<double> sizes(kSteps, 0.5);
    std::vector<double> held(kSteps, 0.0);
    for (std::size_t i = 0; i < kRuns; ++i) {
      WithFeedback run{start_of(kN, 0.1)};
      gap = run.q.f();
      for (double& h : held) h += run.step(0.5, k, kDeviation, rng) / kRuns;
      f += run.virtual_f() / kRuns;
    }
    EXPECT_LE(f, feedback_bound({.gap = gap,
                                 .mu = 0.1,
                                 .smoothness = 1.0,
                                 .step_sizes = sizes,
                                 .residuals = held,
                                 .noise = kDeviation * kDeviation * kN}));
  }
}

TEST(feedback_bound, its_formula_and_what_it_refuses) {
  const std::vector<double> sizes{0.5, 0.25}, held{0.0, 4.0};
  // L = 2, mu = 1: 16 1/2 3/4 + 2 1/4 4, and noise 8: (1/4 8) 3/4 + 1/16 8.
  FeedbackDescent d{
      .gap = 16.0, .mu = 1.0, .smoothness = 2.0, .step_sizes = sizes, .residuals = held};
  EXPECT_DOUBLE_EQ(feedback_bound(d), 6.0 + 2.0);
  d.noise = 8.0;
  EXPECT_DOUBLE_EQ(feedback_bound(d), 8.0 + 1.5 + 0.5);
  EXPECT_EQ(feedback_bound({.gap = 3.0}), 3.0);
  const auto refused = [&](auto change) {
    FeedbackDescent bad = d;
    change(bad);
    EXPECT_THROW(feedback_bound(bad), InvalidArgument);
  };
  const std::vector<double> negative{0.1, -1.0};
  refused([](FeedbackDescent& b) { b.gap = -1.0; });
  refused([](FeedbackDescent& b) { b.mu = 3.0; });
  refused([](FeedbackDescent& b) { b.smoothness = 3.0; });
  refused([](FeedbackDescent& b) { b.noise = std::nan(""); });
  refused([&](FeedbackDescent& b) { b.residuals = std::span(held).first(1); });
  refused([&](FeedbackDescent& b) { b.residuals = negative; });
  refused([&](FeedbackDescent& b) { b.step_sizes = negative; });
}

// Three entries, two ranks, by hand.
TEST(analysis, constants_of_both_links) {
  const std::vector<float> a{4, 1, 0}, b{-2, 3, 0}, g{0, 3, 4}, none(3, 0.0F);
  const std::vector<std::span<const float>> u{a, b};
  // Means (1, 2, 0) and (2, 1.5, 0): the largest are (0, 2, 0) and, of what is sent, all.
  EXPECT_DOUBLE_EQ(analysis::one_way_constant(u, g, 1), std::hypot(2.0, 0.5) / 5.0);
  EXPECT_DOUBLE_EQ(analysis::two_way_constant(u, g, none, 1, 1), std::hypot(2.0, 2.0) / 5.0);
  EXPECT_DOUBLE_EQ(analysis::two_way_constant(u, g, none, 1, 3), std::hypot(1.0, 0.5) / 5.0);
  // The server holds so much of the last entry that both send it.
  const std::vector<float> h{0, 0, -9};
  EXPECT_DOUBLE_EQ(analysis::two_way_constant(u, g, h, 1, 1), 0.0);
  // Everything is sent; one rank; no gradient.
  EXPECT_DOUBLE_EQ(analysis::one_way_constant(u, g, 3), 0.0);
  EXPECT_DOUBLE_EQ(analysis::one_way_constant(std::span(u).first(1), g, 1), 0.0);
  EXPECT_DOUBLE_EQ(analysis::one_way_constant(u, none, 1), 0.0);
  // Of equal magnitudes the lower index is kept: (3, -3, 0) and (3, 0, 0) leave (3, 0, 0).
  const std::vector<float> c{3, -3, 0}, d{3, 0, 0};
  EXPECT_DOUBLE_EQ(analysis::one_way_constant(std::vector<std::span<const float>>{c, d}, g, 1),
                   0.0);
  EXPECT_THROW(analysis::one_way_constant(u, g, 4), InvalidArgument);
  EXPECT_THROW(analysis::one_way_constant({}, g, 1), InvalidArgument);
  EXPECT_THROW(analysis::two_way_constant(u, g, g, 1, 4), InvalidArgument);
  EXPECT_THROW(analysis::two_way_constant(u, g, std::span(h).first(2), 1, 1), InvalidArgument);
}

}  // namespace
}  // namespace skim::analysis
