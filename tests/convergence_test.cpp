// Training to the end on a problem whose optimum is known: least squares, each rank with rows of
// its own, so that the ranks' gradients do not vanish at the optimum. Every exchange that keeps all
// mass must come as near to it as the dense sum does; without error feedback it must not, or this
// test would prove nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "group.hpp"
#include "skim/reducer.hpp"

namespace skim {
namespace {

constexpr std::size_t kUnknowns = 128, kRows = 96;  // of a rank
constexpr int kRanks = 4, kSteps = 2500;
constexpr double kRate = 0.02, kDensity = 0.05;
using Vector = std::vector<double>;

struct Rows {
  std::vector<Vector> a;
  Vector b;
};

Rows rows_of(int rank) {
  std::mt19937_64 rng(static_cast<std::uint64_t>(rank) + 11);
  std::normal_distribution<double> normal;
  Rows rows;
  for (std::size_t i = 0; i < kRows; ++i) {
    Vector a(kUnknowns);
    for (double& v : a) v = normal(rng);
    double b = 0.5 * normal(rng);
    for (std::size_t j = 0; j < kUnknowns; ++j) b += a[j] * std::sin(static_cast<double>(j));
    rows.a.push_back(std::move(a));
    rows.b.push_back(b);
  }
  return rows;
}

// Gradient of the rank's mean of (a x - b)^2 / 2; its value is returned.
double gradient(const Rows& rows, const Vector& x, Vector& g) {
  g.assign(kUnknowns, 0.0);
  double value = 0.0;
  for (std::size_t i = 0; i < kRows; ++i) {
    double error = -rows.b[i];
    for (std::size_t j = 0; j < kUnknowns; ++j) error += rows.a[i][j] * x[j];
    value += 0.5 * error * error;
    for (std::size_t j = 0; j < kUnknowns; ++j) g[j] += error * rows.a[i][j];
  }
  for (double& v : g) v /= kRows;
  return value / kRows;
}

// The mean over the ranks.
double loss(const std::vector<Rows>& all, const Vector& x, Vector& g) {
  Vector of_rank;
  double value = 0.0;
  g.assign(kUnknowns, 0.0);
  for (const Rows& rows : all) {
    value += gradient(rows, x, of_rank) / kRanks;
    for (std::size_t j = 0; j < kUnknowns; ++j) g[j] += of_rank[j] / kRanks;
  }
  return value;
}

// The optimum, by conjugate gradients on the same quadratic.
double least_loss(const std::vector<Rows>& all) {
  Vector x(kUnknowns), zero(kUnknowns), r, p, offset, product;
  loss(all, zero, offset);  // gradient at 0, which is -A^T b
  loss(all, x, r);
  for (double& v : r) v = -v;
  p = r;
  const auto dot = [](const Vector& u, const Vector& v) {
    double sum = 0.0;
    for (std::size_t j = 0; j < u.size(); ++j) sum += u[j] * v[j];
    return sum;
  };
  double rr = dot(r, r);
  for (std::size_t i = 0; i < 2 * kUnknowns && rr > 1e-28; ++i) {
    loss(all, p, product);
    for (std::size_t j = 0; j < kUnknowns; ++j) product[j] -= offset[j];
    const double alpha = rr / dot(p, product);
    for (std::size_t j = 0; j < kUnknowns; ++j) {
      x[j] += alpha * p[j];
      r[j] -= alpha * product[j];
    }
    const double next = dot(r, r);
    for (std::size_t j = 0; j < kUnknowns; ++j) p[j] = r[j] + next / rr * p[j];
    rr = next;
  }
  Vector g;
  return loss(all, x, g);
}

// F - F* after training.
double distance(const std::vector<Rows>& all, double least, const ReducerOptions& options) {
  double end = 0.0;
  test::run_threads(kRanks, [&](Communicator& comm) {
    const Rows& mine = all[static_cast<std::size_t>(comm.rank())];
    ReducerParts parts;
    parts.schedule = constant_density(kDensity);
    Reducer reducer(options, std::move(parts), comm);
    reducer.set_layout(std::vector<Bucket>{{.slot = 0, .parameters = {{"x", 0, kUnknowns}}}});
    Vector x(kUnknowns), g;
    std::vector<float> grad(kUnknowns);
    for (int step = 0; step < kSteps; ++step) {
      gradient(mine, x, g);
      for (std::size_t j = 0; j < kUnknowns; ++j) grad[j] = static_cast<float>(g[j]);
      reducer.reduce(0, std::span(grad));
      ASSERT_TRUE(reducer.end_step(0.0));
      for (std::size_t j = 0; j < kUnknowns; ++j) x[j] -= kRate * double{grad[j]};
    }
    if (comm.rank() == 0) end = loss(all, x, g) - least;
  });
  return end;
}

TEST(convergence, every_exchange_that_keeps_all_mass_trains_as_far_as_dense) {
  std::vector<Rows> all;
  for (int r = 0; r < kRanks; ++r) all.push_back(rows_of(r));
  const double least = least_loss(all);
  Vector g;
  const double start = loss(all, Vector(kUnknowns), g) - least;
  ReducerOptions options;
  options.dense_below = 0;

  options.exchange.kind = ExchangeKind::dense;
  const double dense = distance(all, least, options);
  EXPECT_GT(dense, 0.0);
  EXPECT_LT(dense, 1e-6 * start);

  struct Case {
    std::string name;
    ExchangeKind kind;
    DropPolicy drop;
  };
  for (const Case& c : {Case{"allgather", ExchangeKind::allgather, DropPolicy::survivors},
                        Case{"survivors", ExchangeKind::gtopk, DropPolicy::survivors},
                        Case{"merger keeps", ExchangeKind::gtopk, DropPolicy::merger_keeps}}) {
    options.exchange.kind = c.kind;
    options.exchange.drop = c.drop;
    const double reached = distance(all, least, options);
    EXPECT_LT(reached, 1e-3 * start) << c.name << ", dense " << dense << ", start " << start;
  }

  // Rounded to a few bits, by senders and mergers.
  options.exchange.kind = ExchangeKind::gtopk;
  options.exchange.drop = DropPolicy::survivors;
  for (const ValueCode value : {ValueCode::q4, ValueCode::q2}) {
    for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic}) {
      options.exchange.codec.value = value;
      options.exchange.codec.rounding = rounding;
      EXPECT_LT(distance(all, least, options), 1e-3 * start)
          << name_of(value) << ' ' << name_of(rounding);
    }
  }
  options.exchange.codec = {};

  options.feedback.enabled = false;
  options.exchange.kind = ExchangeKind::allgather;
  EXPECT_GT(distance(all, least, options), 0.01 * start) << "without feedback";
}

}  // namespace
}  // namespace skim
