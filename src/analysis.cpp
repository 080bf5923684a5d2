// Bounds, closed forms and measures of skim/analysis.hpp.
#include "skim/analysis.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <string>

#include "normal.hpp"
#include "skim/error.hpp"

namespace skim::analysis {
namespace {

void expect_fraction(double kappa, const char* function) {
  SKIM_EXPECTS(
      kappa >= 0.0 && kappa <= 1.0,
      std::string(function) + ": kappa = k / d must be in [0, 1], got " + std::to_string(kappa));
}

void expect_finite(std::span<const float> u, const char* function) {
  for (std::size_t i = 0; i < u.size(); ++i) {
    SKIM_EXPECTS(std::isfinite(u[i]), std::string(function) + ": u[" + std::to_string(i) + "] is " +
                                          std::to_string(u[i]) + ", expected finite entries");
  }
}

double sum_of_squares(std::span<const float> x) {
  double sum = 0.0;
  for (const float v : x) sum += double{v} * double{v};
  return sum;
}

}  // namespace

double general_bound(double kappa) {
  expect_fraction(kappa, "general_bound");
  return 1.0 - kappa;
}

double bell_bound(double kappa) {
  expect_fraction(kappa, "bell_bound");
  return (1.0 - kappa) * (1.0 - kappa);
}

double unimodal_bound(double kappa) {
  expect_fraction(kappa, "unimodal_bound");
  return (1.0 - kappa) * (1.0 - kappa) * (1.0 - kappa);
}

double bell_contraction(std::size_t k, std::size_t d) {
  SKIM_EXPECTS(d > 0 && k <= d, "bell_contraction: k must be <= d, and d > 0 (k=" +
                                    std::to_string(k) + ", d=" + std::to_string(d) + ")");
  const double kappa = static_cast<double>(k) / static_cast<double>(d);
  return kappa * (2.0 - kappa);
}

double normal_ratio(double kappa) {
  expect_fraction(kappa, "normal_ratio");
  if (0.5 * kappa == 0.0) return 1.0;
  const double z = normal_upper_quantile(0.5 * kappa);
  const double density = std::exp(-0.5 * z * z) / std::sqrt(2.0 * std::numbers::pi);
  return 1.0 - (kappa + 2.0 * z * density);
}

double laplace_ratio(double kappa) {
  expect_fraction(kappa, "laplace_ratio");
  if (kappa == 0.0) return 1.0;
  const double tau = -std::log(kappa);
  return std::max(0.0, 1.0 - kappa * (1.0 + tau + 0.5 * tau * tau));
}

double convergence_bound(const Convergence& c) {
  SKIM_EXPECTS(c.delta > 0.0 && c.delta <= 1.0,
               "convergence_bound: delta must be in (0, 1], got " + std::to_string(c.delta));
  SKIM_EXPECTS(c.gap >= 0.0 && c.smoothness >= 0.0 && c.second_moment >= 0.0 && c.steps >= 0.0,
               "convergence_bound: gap, smoothness, second_moment and steps must be >= 0");
  const double iterates = c.steps + 1.0;
  const double noise = c.smoothness * c.second_moment;
  return (2.0 * c.gap + noise) / std::sqrt(iterates) +
         4.0 * c.smoothness * noise * (1.0 - c.delta) / (c.delta * c.delta * iterates);
}

double error_bound(const SparseDescent& d) {
  SKIM_EXPECTS(d.gap >= 0.0 && d.mu >= 0.0 && d.step_size >= 0.0 && d.noise >= 0.0,
               "error_bound: gap, mu, step_size and noise must be >= 0");
  const double a = 1.0 - d.mu * d.step_size;
  SKIM_EXPECTS(a >= 0.0, "error_bound: mu * step_size must be <= 1, got " +
                             std::to_string(d.mu * d.step_size));
  double gap = d.gap, left_out = 0.0, noise = 0.0;
  for (const double r : d.left_out) {
    SKIM_EXPECTS(r >= 0.0, "error_bound: left_out must be >= 0, got " + std::to_string(r));
    gap *= a;
    left_out = a * left_out + r;
    noise = a * noise + d.noise;
  }
  const double root = std::sqrt(left_out) + std::sqrt(noise);
  return gap + 0.5 * d.step_size * root * root;
}

double feedback_bound(const FeedbackDescent& d) {
  constexpr const char* kWho = "feedback_bound";
  SKIM_EXPECTS(d.gap >= 0.0 && d.noise >= 0.0, std::string(kWho) + ": gap and noise must be >= 0");
  SKIM_EXPECTS(d.mu >= 0.0 && d.mu <= d.smoothness,
               std::string(kWho) + ": needs 0 <= mu <= smoothness");
  SKIM_EXPECTS(d.step_sizes.size() == d.residuals.size(),
               std::string(kWho) + ": one residual for every step size, got " +
                   std::to_string(d.residuals.size()) + " for " +
                   std::to_string(d.step_sizes.size()));
  // Rounding of a step size that is meant as 1 / L.
  constexpr double kMost = 1.0 + 1e-12;
  double error = d.gap;
  for (std::size_t t = 0; t < d.step_sizes.size(); ++t) {
    const double eta = d.step_sizes[t], e2 = d.residuals[t], l = d.smoothness;
    SKIM_EXPECTS(eta >= 0.0 && l * eta <= kMost,
                 std::string(kWho) + ": step sizes must be in [0, 1 / smoothness], got " +
                     std::to_string(eta));
    SKIM_EXPECTS(e2 >= 0.0,
                 std::string(kWho) + ": residuals must be >= 0, got " + std::to_string(e2));
    error = std::max(0.0, 1.0 - d.mu * eta) * error + 0.5 * l * l * eta * e2 +
            0.5 * l * eta * eta * d.noise;
  }
  return error;
}

namespace {

// Everything but the k entries of largest magnitude becomes 0.
template <class T>
void keep_top_k(std::vector<T>& x, std::size_t k) {
  std::vector<std::size_t> order(x.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto kept_end = order.begin() + static_cast<std::ptrdiff_t>(k);
  std::nth_element(order.begin(), kept_end, order.end(), [&](std::size_t a, std::size_t b) {
    return std::abs(x[a]) > std::abs(x[b]) || (std::abs(x[a]) == std::abs(x[b]) && a < b);
  });
  std::for_each(kept_end, order.end(), [&](std::size_t i) { x[i] = 0; });
}

// The mean over the ranks of u_p, and of Top_k(u_p).
struct Means {
  std::vector<double> whole, selected;
};
Means means_of(std::span<const std::span<const float>> u, std::span<const float> g, std::size_t k,
               const char* function) {
  SKIM_EXPECTS(!u.empty() && k <= g.size(),
               std::string(function) +
                   ": needs a rank, and k <= d (ranks=" + std::to_string(u.size()) +
                   ", k=" + std::to_string(k) + ", d=" + std::to_string(g.size()) + ")");
  expect_finite(g, function);
  Means m{std::vector<double>(g.size()), std::vector<double>(g.size())};
  const auto ranks = static_cast<double>(u.size());
  std::vector<float> top;
  for (const std::span<const float> of_rank : u) {
    SKIM_EXPECTS(of_rank.size() == g.size(), std::string(function) + ": lengths differ (" +
                                                 std::to_string(of_rank.size()) + " and " +
                                                 std::to_string(g.size()) + ")");
    expect_finite(of_rank, function);
    top.assign(of_rank.begin(), of_rank.end());
    keep_top_k(top, k);
    for (std::size_t i = 0; i < g.size(); ++i) {
      m.whole[i] += double{of_rank[i]} / ranks;
      m.selected[i] += double{top[i]} / ranks;
    }
  }
  return m;
}

double distance_over(const std::vector<double>& a, const std::vector<double>& b,
                     std::span<const float> g) {
  const double norm2 = sum_of_squares(g);
  double distance2 = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) distance2 += (a[i] - b[i]) * (a[i] - b[i]);
  return norm2 > 0.0 ? std::sqrt(distance2 / norm2) : 0.0;
}

}  // namespace

double one_way_constant(std::span<const std::span<const float>> u, std::span<const float> g,
                        std::size_t k) {
  Means m = means_of(u, g, k, "one_way_constant");
  keep_top_k(m.whole, k);
  return distance_over(m.whole, m.selected, g);
}

double two_way_constant(std::span<const std::span<const float>> u, std::span<const float> g,
                        std::span<const float> h, std::size_t k, std::size_t k_down) {
  Means m = means_of(u, g, k, "two_way_constant");
  SKIM_EXPECTS(
      h.size() == g.size() && k_down <= g.size(),
      "two_way_constant: h must have d entries, and k_down <= d (h=" + std::to_string(h.size()) +
          ", k_down=" + std::to_string(k_down) + ", d=" + std::to_string(g.size()) + ")");
  expect_finite(h, "two_way_constant");
  for (std::size_t i = 0; i < h.size(); ++i) {
    m.whole[i] += double{h[i]};
    m.selected[i] += double{h[i]};
  }
  keep_top_k(m.whole, k_down);
  keep_top_k(m.selected, k_down);
  return distance_over(m.whole, m.selected, g);
}

double top_k_ratio(std::span<const float> u, std::size_t k) {
  SKIM_EXPECTS(k <= u.size(), "top_k_ratio: k must be <= d (k=" + std::to_string(k) +
                                  ", d=" + std::to_string(u.size()) + ")");
  expect_finite(u, "top_k_ratio");
  const double total = sum_of_squares(u);
  if (total == 0.0) return 0.0;
  std::vector<float> sorted(u.begin(), u.end());
  const auto kept_end = sorted.begin() + static_cast<std::ptrdiff_t>(k);
  std::nth_element(sorted.begin(), kept_end, sorted.end(),
                   [](float a, float b) { return std::abs(a) > std::abs(b); });
  // The rest is summed itself: total less kept would cancel.
  return sum_of_squares({kept_end, sorted.end()}) / total;
}

Moments moments(std::span<const float> u) {
  SKIM_EXPECTS(!u.empty(), "moments: u is empty");
  expect_finite(u, "moments");
  const auto d = static_cast<double>(u.size());
  Moments m;
  m.mean = std::accumulate(u.begin(), u.end(), 0.0) / d;
  double second = 0.0, third = 0.0, fourth = 0.0;
  for (const float v : u) {
    const double x = double{v} - m.mean;
    second += x * x;
    third += x * x * x;
    fourth += x * x * x * x;
  }
  const double variance = second / d;
  m.std = std::sqrt(variance);
  if (variance > 0.0) {
    m.skewness = third / d / (variance * m.std);
    m.excess_kurtosis = fourth / d / (variance * variance) - 3.0;
  }
  return m;
}

double Histogram::edge(std::size_t b) const {
  const auto bins = static_cast<double>(count.size());
  return b == count.size() ? high : low + (high - low) * (static_cast<double>(b) / bins);
}

Histogram histogram(std::span<const float> u, double low, double high, std::size_t bins) {
  SKIM_EXPECTS(
      low < high && std::isfinite(high - low) && bins > 0,
      "histogram: low must be < high, high - low finite, and bins > 0 (low=" + std::to_string(low) +
          ", high=" + std::to_string(high) + ", bins=" + std::to_string(bins) + ")");
  expect_finite(u, "histogram");
  Histogram h{.low = low, .high = high, .below = 0, .above = 0, .count = {}};
  h.count.assign(bins, 0);
  const double per_width = static_cast<double>(bins) / (high - low);
  for (const float v : u) {
    if (v < low) {
      ++h.below;
    } else if (v > high) {
      ++h.above;
    } else {
      std::size_t b = std::min(bins - 1, static_cast<std::size_t>((v - low) * per_width));
      // The product is rounded; the edges are what counts.
      while (b > 0 && v < h.edge(b)) --b;
      while (b + 1 < bins && v >= h.edge(b + 1)) ++b;
      ++h.count[b];
    }
  }
  return h;
}

std::vector<double> cumulative(const Histogram& h) {
  std::vector<std::uint64_t> below{h.below};
  for (const std::uint64_t c : h.count) below.push_back(below.back() + c);
  const std::uint64_t total = below.back() + h.above;
  SKIM_EXPECTS(total > 0, "cumulative: the histogram has no entries");
  std::vector<double> fractions;
  fractions.reserve(below.size());
  for (const std::uint64_t c : below) {
    fractions.push_back(static_cast<double>(c) / static_cast<double>(total));
  }
  return fractions;
}

double distance_from_unimodal(std::span<const float> u) {
  expect_finite(u, "distance_from_unimodal");
  std::vector<float> x(u.size());
  std::ranges::transform(u, x.begin(), [](float v) { return std::abs(v); });
  std::ranges::sort(x);
  // The points of the empirical distribution: (value, number of entries at most it).
  struct Point {
    double x = 0.0, count = 0.0;
  };
  std::vector<Point> points{{0.0, 0.0}};
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (double{x[i]} > points.back().x) points.push_back({x[i], 0.0});
    points.back().count = static_cast<double>(i + 1);
  }
  // Their upper hull is the least concave majorant.
  std::vector<std::size_t> hull;
  for (std::size_t p = 0; p < points.size(); ++p) {
    const auto is_below_chord = [&](const Point& a, const Point& b, const Point& c) {
      return (b.x - a.x) * (c.count - a.count) >= (c.x - a.x) * (b.count - a.count);
    };
    while (hull.size() >= 2 &&
           is_below_chord(points[hull[hull.size() - 2]], points[hull.back()], points[p])) {
      hull.pop_back();
    }
    hull.push_back(p);
  }
  // The distribution jumps at its points: the distance is largest just before one.
  double largest = 0.0;
  for (std::size_t h = 1; h < hull.size(); ++h) {
    const Point& a = points[hull[h - 1]];
    const Point& b = points[hull[h]];
    const double slope = (b.count - a.count) / (b.x - a.x);
    for (std::size_t p = hull[h - 1] + 1; p <= hull[h]; ++p) {
      largest = std::max(largest, a.count + slope * (points[p].x - a.x) - points[p - 1].count);
    }
  }
  return x.empty() ? 0.0 : largest / static_cast<double>(x.size());
}

}  // namespace skim::analysis
