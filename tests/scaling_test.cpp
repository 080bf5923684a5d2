// What bench scaling computes from its samples.
#include "bench/scaling.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

namespace skim::bench {
namespace {

// The samples 1, 2, .., n, so that low and high name their ranks.
std::vector<double> ranks(std::size_t n) {
  std::vector<double> x(n);
  std::iota(x.begin(), x.end(), 1.0);
  return x;
}

TEST(median_interval, is_that_of_the_tables) {
  // Of binomial tables: the largest j with 1 - 2 P(Binomial(n, 1/2) < j) >= 0.95, and this coverage.
  struct Known {
    std::size_t n, j;
    double coverage;
  };
  for (const Known& k : {Known{6, 1, 0.96875}, Known{9, 2, 0.9609375}, Known{20, 6, 0.958610535},
                         Known{50, 18, 0.967160862}}) {
    const MedianInterval i = median_interval(ranks(k.n));
    EXPECT_EQ(i.j, k.j) << k.n;
    EXPECT_NEAR(i.coverage, k.coverage, 1e-6) << k.n;
    EXPECT_EQ(i.low, static_cast<double>(k.j));
    EXPECT_EQ(i.high, static_cast<double>(k.n - k.j + 1));
  }
}

TEST(median_interval, of_few_samples_spans_them) {
  const MedianInterval i = median_interval(ranks(3));
  EXPECT_EQ(i.j, 1U);
  EXPECT_EQ(i.coverage, 0.75);
}

TEST(median_interval, of_many_samples_is_that_of_the_normal_distribution) {
  for (const std::size_t n : std::vector<std::size_t>{1000, 1100, 5000, 100000}) {
    const MedianInterval i = median_interval(ranks(n));
    const auto size = static_cast<double>(n);
    EXPECT_NEAR(static_cast<double>(i.j), 0.5 * (size - 1.959964 * std::sqrt(size)), 1.0) << n;
    EXPECT_GE(i.coverage, 0.95);
    EXPECT_LE(i.coverage, 0.96);
  }
}

}  // namespace
}  // namespace skim::bench
