// types.hpp: canonical form, sums in fixed order, scatter, statistics.
#include "skim/types.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "oracle.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

SparseBuffer sparse(std::size_t dim, const std::vector<std::pair<Index, float>>& entries) {
  SparseBuffer s;
  s.reset(dim);
  for (const auto& [i, v] : entries) s.append(i, v);
  return s;
}

std::string message_of(const auto& body) {
  try {
    body();
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "nothing was thrown";
}

TEST(types, canonical_form) {
  const std::vector<float> two{1.0F, 2.0F};
  const auto check = [&](std::vector<Index> index, std::size_t dim) {
    return is_canonical({index, std::span(two).first(std::min(index.size(), two.size())), dim});
  };
  EXPECT_TRUE(check({}, 0));
  EXPECT_TRUE(check({}, 5));
  EXPECT_TRUE(check({0}, 1));
  EXPECT_TRUE(check({0, 4}, 5));
  EXPECT_TRUE(check({0, 0xfffffffeU}, 0xffffffffU));
  EXPECT_FALSE(check({0}, 0)) << "index is not below dim";
  EXPECT_FALSE(check({0, 5}, 5)) << "the last index is dim";
  EXPECT_FALSE(check({3, 3}, 5)) << "one index twice";
  EXPECT_FALSE(check({4, 0}, 5)) << "descending";
  EXPECT_FALSE(check({0, 1, 2}, 5)) << "fewer values than indices";
}

TEST(types, buffer_keeps_its_capacity_and_assigns_copies) {
  SparseBuffer s = sparse(10, {{1, 1.0F}, {9, 2.0F}});
  const float* const where = s.view().value.data();
  const SparseBuffer other = sparse(7, {{0, 5.0F}});
  s.reset(7);
  EXPECT_EQ(s.nnz(), 0U);
  s.assign(other.view());
  EXPECT_TRUE(test::same(s.view(), other.view()));
  EXPECT_EQ(s.view().value.data(), where) << "reset gave the memory away";
  EXPECT_NE(s.view().value.data(), other.view().value.data());
}

TEST(types, sum_is_the_oracle_for_any_number_of_parts) {
  for (const std::size_t parts : {1U, 2U, 3U, 4U, 5U, 8U, 63U, 64U, 65U, 200U}) {
    std::mt19937_64 rng(parts);
    SCOPED_TRACE("parts and seed " + std::to_string(parts));
    std::vector<SparseBuffer> part(parts);
    std::vector<SparseView> views;
    for (std::size_t p = 0; p < parts; ++p) {
      // Very different densities, one in five empty.
      const std::size_t n = 500;
      part[p].reset(n);
      const double density = p % 5 == 4 ? 0.0 : std::pow(0.5, static_cast<double>(rng() % 7));
      std::normal_distribution<float> value(0.0F, std::ldexp(1.0F, static_cast<int>(rng() % 30)));
      for (Index i = 0; i < n; ++i) {
        if (std::bernoulli_distribution(density)(rng)) part[p].append(i, value(rng));
      }
    }
    for (const auto& p : part) views.push_back(p.view());
    SparseBuffer out = sparse(3, {{1, 1.0F}});  // overwritten
    sum(views, out);
    EXPECT_TRUE(is_canonical(out.view()));
    EXPECT_TRUE(test::same(out.view(), test::sum(views).view()));
  }
}

// 2^24 + 1 rounds back to 2^24, so every order of these has a sum of its own.
TEST(types, sum_adds_in_the_order_of_the_parts) {
  const float big = 16777216.0F;
  const SparseBuffer a = sparse(4, {{1, big}, {2, 1.0F}}), b = sparse(4, {{1, 1.0F}, {2, big}}),
                     c = sparse(4, {{1, 1.0F}, {2, 1.0F}}), d = sparse(4, {{1, -big}, {2, -big}});
  SparseBuffer out;
  sum(std::vector{a.view(), b.view(), c.view(), d.view()}, out);
  EXPECT_TRUE(test::same(out.view(), sparse(4, {{1, 0.0F}, {2, 2.0F - 2.0F}}).view()) ||
              out.view().value[0] == (((big + 1.0F) + 1.0F) - big));
  EXPECT_EQ(out.view().value[0], ((big + 1.0F) + 1.0F) - big);
  EXPECT_EQ(out.view().value[1], ((1.0F + big) + 1.0F) - big);
  sum(std::vector{d.view(), a.view(), b.view(), c.view()}, out);
  EXPECT_EQ(out.view().value[0], 2.0F);
  sum(std::vector{b.view(), c.view(), a.view(), d.view()}, out);
  EXPECT_EQ(out.view().value[0], 2.0F);
  // The order holds across the border between the two ways that parts are merged.
  std::vector<SparseView> many(70, c.view());
  many.front() = a.view();
  many.back() = d.view();
  sum(many, out);
  EXPECT_EQ(out.view().value[0], 0.0F);
  EXPECT_EQ(out.view().value[1], 69.0F - big);
}

TEST(types, sum_keeps_an_index_whose_values_cancel) {
  const SparseBuffer a = sparse(4, {{0, 1.0F}, {2, 3.0F}}), b = sparse(4, {{2, -3.0F}});
  SparseBuffer out;
  sum(std::vector{a.view(), b.view()}, out);
  EXPECT_TRUE(test::same(out.view(), sparse(4, {{0, 1.0F}, {2, 0.0F}}).view()));
}

TEST(types, sum_of_the_highest_indices) {
  const std::size_t n = 0xffffffffU;
  const SparseBuffer a = sparse(n, {{0, 1.0F}, {0xfffffffeU, 3.0F}}),
                     b = sparse(n, {{0x80000000U, 2.0F}, {0xfffffffeU, 4.0F}});
  SparseBuffer out;
  sum(std::vector{a.view(), b.view()}, out);
  EXPECT_TRUE(test::same(out.view(),
                         sparse(n, {{0, 1.0F}, {0x80000000U, 2.0F}, {0xfffffffeU, 7.0F}}).view()));
}

TEST(types, sum_refuses_no_parts_and_unequal_lengths) {
  SparseBuffer out;
  EXPECT_THROW(sum({}, out), InvalidArgument);
  const SparseBuffer a = sparse(4, {}), b = sparse(5, {});
  const std::string why = message_of([&] { sum(std::vector{a.view(), b.view()}, out); });
  EXPECT_NE(why.find("sum: parts must have one dim (5 and 4)"), std::string::npos) << why;
  EXPECT_NE(why.find("types.cpp:"), std::string::npos) << why;
}

TEST(types, scatter_overwrites_all) {
  std::vector<float> dense(6, 9.0F);
  scatter(sparse(6, {{0, 2.0F}, {5, -4.0F}}).view(), 0.25F, std::span(dense));
  EXPECT_EQ(dense, (std::vector<float>{0.5F, 0, 0, 0, 0, -1.0F}));
  scatter(sparse(6, {}).view(), 0.25F, std::span(dense));
  EXPECT_EQ(dense, std::vector<float>(6, 0.0F));
  scatter(sparse(0, {}).view(), 1.0F, GradView());
}

TEST(types, scatter_refuses_what_it_cannot_write) {
  std::vector<float> dense(6, 9.0F);
  const std::vector<float> before = dense;
  const SparseBuffer s = sparse(5, {{0, 2.0F}});
  EXPECT_THROW(scatter(s.view(), 1.0F, std::span(dense)), InvalidArgument);
  const SparseBuffer fits = sparse(6, {{0, 2.0F}});
  GradView half = std::span(dense);
  half.dtype = DType::f16;
  EXPECT_THROW(scatter(fits.view(), 1.0F, half), InvalidArgument);
  GradView gpu = std::span(dense);
  gpu.device = Device::cuda;
  EXPECT_THROW(scatter(fits.view(), 1.0F, gpu), InvalidArgument);
  GradView null;
  null.n = 6;
  EXPECT_THROW(scatter(fits.view(), 1.0F, null), InvalidArgument);
  EXPECT_EQ(dense, before);
}

TEST(types, statistics_add_up_and_saturate) {
  GroupStats a{.gradient_norm2 = 1.0,
               .accumulated_norm2 = 2.0,
               .sent_norm2 = 3.0,
               .sent_bytes = 10,
               .non_finite = 0xfffffffdU,
               .signals = 0b0101};
  const GroupStats b{.gradient_norm2 = 0.5,
                     .accumulated_norm2 = 0.25,
                     .sent_norm2 = 0.125,
                     .sent_bytes = 7,
                     .non_finite = 2,
                     .signals = 0b0110};
  combine(a, b);
  EXPECT_EQ(a.gradient_norm2, 1.5);
  EXPECT_EQ(a.accumulated_norm2, 2.25);
  EXPECT_EQ(a.sent_norm2, 3.125);
  EXPECT_EQ(a.sent_bytes, 10U) << "the maximum";
  EXPECT_EQ(a.non_finite, 0xffffffffU);
  EXPECT_EQ(a.signals, 0b0111U);
  combine(a, b);
  EXPECT_EQ(a.non_finite, 0xffffffffU) << "stays at the largest";
}

}  // namespace
}  // namespace skim
