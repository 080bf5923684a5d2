// types.hpp: canonical form, sums in fixed order, scatter, statistics.
#include "skim/types.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "half.hpp"
#include "message_of.hpp"
#include "oracle.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

using test::message_of;

SparseBuffer sparse(std::size_t dim, const std::vector<std::pair<Index, float>>& entries) {
  SparseBuffer s;
  s.reset(dim);
  for (const auto& [i, v] : entries) s.append(i, v);
  return s;
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

// Long gradients are summed a window of 2^15 indices at a time: at its ends, across empty ones,
// with neighbours and far apart.
TEST(types, sum_of_long_parts) {
  const std::size_t n = 0xffffffffU;
  for (const std::size_t parts : {3U, 7U, 66U}) {
    std::mt19937_64 rng(parts);
    std::vector<SparseBuffer> part;
    std::vector<SparseView> views;
    for (std::size_t p = 0; p < parts; ++p) {
      std::map<Index, float> entries;
      for (const Index window : {0U, 1U, 2U, 900U, 901U, 0xffffU}) {
        for (const Index at : {0U, 1U, 63U, 64U, 4095U, 4096U, 0x7fffU, 0x8000U, 0xffffU}) {
          if (rng() % 3 > 0 && window * 0x10000U + at < n) entries[window * 0x10000U + at] = 1.0F;
        }
        for (int i = 0; i < 20; ++i)
          entries[window * 0x10000U + static_cast<Index>(rng() % 0xffffU)] = 1.0F;
      }
      for (auto& [i, v] : entries) v = std::normal_distribution<float>()(rng);
      part.push_back(sparse(n, {entries.begin(), entries.end()}));
    }
    for (const auto& p : part) views.push_back(p.view());
    SparseBuffer out;
    sum(views, out);
    EXPECT_TRUE(is_canonical(out.view()));
    EXPECT_TRUE(test::same(out.view(), test::sum(views).view())) << parts;
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

TEST(types, sum_keeps_the_sign_of_a_zero) {
  const Index far = 100000;
  const SparseBuffer a = sparse(far + 1, {{0, -0.0F}, {1, -0.0F}, {2, 1.0F}, {far, -0.0F}}),
                     b = sparse(far + 1, {{1, -0.0F}, {2, -1.0F}, {3, 0.0F}}),
                     c = sparse(far + 1, {{2, -0.0F}, {3, -0.0F}});
  SparseBuffer out;
  for (int again = 0; again < 2; ++again) {
    sum(std::vector{a.view(), b.view(), c.view()}, out);
    std::vector<bool> negative;
    for (const float v : out.view().value) {
      EXPECT_EQ(v, 0.0F);
      negative.push_back(std::signbit(v));
    }
    EXPECT_EQ(negative, (std::vector<bool>{true, true, false, false, true}));
  }
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
  EXPECT_EQ(why, "sum: parts must have one dim (5 and 4)");
}

TEST(types, scatter_overwrites_all) {
  std::vector<float> dense(6, 9.0F);
  scatter(sparse(6, {{0, 2.0F}, {5, -4.0F}}).view(), 0.25F, std::span(dense));
  EXPECT_EQ(dense, (std::vector<float>{0.5F, 0, 0, 0, 0, -1.0F}));
  scatter(sparse(6, {}).view(), 0.25F, std::span(dense));
  EXPECT_EQ(dense, std::vector<float>(6, 0.0F));
  scatter(sparse(0, {}).view(), 1.0F, GradView());
}

// Every pattern of both types, there and back.
TEST(types, sixteen_bits_are_the_floats_they_stand_for) {
  for (const DType type : {DType::f16, DType::bf16}) {
    const std::uint16_t infinity = type == DType::f16 ? 0x7c00 : 0x7f80;
    const std::uint16_t quiet = type == DType::f16 ? 0x7e00 : 0x7fc0;
    for (unsigned pattern = 0; pattern < 65536; ++pattern) {
      const auto bits = static_cast<std::uint16_t>(pattern);
      const float v = type == DType::f16 ? from_f16(bits) : from_bf16(bits);
      const std::uint16_t back = type == DType::f16 ? to_f16(v) : to_bf16(v);
      if ((bits & 0x7fff) > infinity) {
        ASSERT_TRUE(std::isnan(v)) << pattern;
        ASSERT_EQ(back, quiet | (bits & 0x8000)) << pattern;
      } else {
        ASSERT_TRUE(std::bit_cast<std::uint32_t>(v) ==
                    std::bit_cast<std::uint32_t>(test::meaning(bits, type)))
            << pattern;
        ASSERT_EQ(back, bits);
      }
    }
  }
}

// Between each number of the type and the next: half-way goes to the even one, anything else to
// the nearer; beyond the largest there is none, unless it is infinite.
TEST(types, sixteen_bits_are_the_nearest_ties_to_even) {
  for (const DType type : {DType::f16, DType::bf16}) {
    const auto to = [&](float v) { return type == DType::f16 ? to_f16(v) : to_bf16(v); };
    const std::uint16_t largest = type == DType::f16 ? 0x7bff : 0x7f7f;
    for (std::uint16_t low = 0; low < largest; ++low) {
      const auto high = static_cast<std::uint16_t>(low + 1);
      const float a = test::meaning(low, type), b = test::meaning(high, type);
      const auto half_way = static_cast<float>((double{a} + double{b}) / 2);
      const float below = std::nextafter(half_way, 0.0F), above = std::nextafter(half_way, b);
      ASSERT_EQ(double{half_way}, (double{a} + double{b}) / 2) << "exact, so that it is a tie";
      for (const int sign : {0, 0x8000}) {
        const auto of = [&](float v) { return to(sign == 0 ? v : -v) - sign; };
        ASSERT_EQ(of(half_way), low % 2 == 0 ? low : high);
        ASSERT_EQ(of(below), low);
        ASSERT_EQ(of(above), high);
        ASSERT_EQ(of(std::nextafter(b, 0.0F)), high);
      }
    }
    const float last = test::meaning(largest, type), max = std::numeric_limits<float>::max();
    for (const float v : {std::nextafter(last, max), last + last / 4096, max}) {
      EXPECT_EQ(to(v), largest) << v;
      EXPECT_EQ(to(-v), largest | 0x8000) << v;
    }
    EXPECT_EQ(to(type == DType::f16 ? 65520.0F : max), largest) << "no carry into infinity";
    const float inf = std::numeric_limits<float>::infinity();
    EXPECT_EQ(to(inf), largest + 1);
    EXPECT_EQ(to(-inf), (largest + 1) | 0x8000);
  }
}

// Few entries and many are written in different ways.
TEST(types, scatter_is_the_dense_form_at_every_density) {
  const std::size_t n = 5003;
  for (const std::size_t nnz : std::vector<std::size_t>{1, 100, 156, 157, 1000, 5003}) {
    const SparseBuffer s = test::top_k(test::normal(n, nnz), nnz);
    std::vector<float> dense(n, 7.0F), expected = test::dense(s.view());
    for (float& v : expected) v *= 0.5F;
    scatter(s.view(), 0.5F, std::span(dense));
    EXPECT_EQ(dense, expected) << nnz;
  }
}

TEST(types, scatter_into_zeros_writes_its_entries_only) {
  std::vector<float> dense(6, 7.0F);  // not zeros, to see what is written
  scatter(sparse(6, {{0, 2.0F}, {5, -4.0F}}).view(), 0.5F, std::span(dense), true);
  EXPECT_EQ(dense, (std::vector<float>{1.0F, 7.0F, 7.0F, 7.0F, 7.0F, -2.0F}));
  std::vector<std::uint16_t> bits(3, 9);
  GradView half;
  half.data = bits.data();
  half.n = 3;
  half.dtype = DType::bf16;
  scatter(sparse(3, {{1, 1.0F}}).view(), 1.0F, half, true);
  EXPECT_EQ(bits, (std::vector<std::uint16_t>{9, 0x3f80, 9}));
}

TEST(types, scatter_rounds_to_the_gradients_type) {
  const float max = std::numeric_limits<float>::max();
  const float inf = std::numeric_limits<float>::infinity();
  const SparseBuffer s = sparse(
      8, {{0, 2049.0F}, {2, -3.0F}, {3, 1e30F}, {4, max}, {5, -max}, {6, inf}, {7, std::nanf("")}});
  for (const float factor : {1.0F, 0.25F, 1e6F}) {
    for (const DType type : {DType::f16, DType::bf16}) {
      std::vector<std::uint16_t> dense(8, 0x1234);
      GradView view;
      view.data = dense.data();
      view.n = dense.size();
      view.dtype = type;
      scatter(s.view(), factor, view);
      const auto to = [&](float v) { return type == DType::f16 ? to_f16(v) : to_bf16(v); };
      EXPECT_EQ(dense[0], to(2049.0F * factor));
      EXPECT_EQ(dense[1], 0);
      EXPECT_EQ(dense[2], to(-3.0F * factor));
      EXPECT_EQ(dense[3], to(std::min(1e30F * factor, max)));
      EXPECT_EQ(dense[4], to(factor < 1.0F ? max * factor : max)) << "finite stays finite";
      EXPECT_EQ(dense[5], dense[4] | 0x8000);
      EXPECT_EQ(dense[6], to(inf)) << "but infinity is no secret";
      EXPECT_TRUE(std::isnan(test::meaning(dense[7], type)));
    }
  }
}

TEST(types, scatter_keeps_finite_values_finite) {
  constexpr float kMax = std::numeric_limits<float>::max();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const std::size_t n : {std::size_t{4}, std::size_t{4000}}) {  // few and many zeros between
    for (const bool is_zero : {false, true}) {
      const std::vector<Index> index{0, 1, 2, 3};
      const std::vector<float> value{3e38F, -3e38F, kInf, 0.5F};
      std::vector<float> dense(n, 0.0F);
      scatter({index, value, n}, 1024.0F, std::span(dense), is_zero);
      dense.resize(4);
      EXPECT_EQ(dense, (std::vector<float>{kMax, -kMax, kInf, 512.0F}));
    }
  }
}

TEST(types, scatter_refuses_what_it_cannot_write) {
  std::vector<float> dense(6, 9.0F);
  const std::vector<float> before = dense;
  const SparseBuffer s = sparse(5, {{0, 2.0F}});
  EXPECT_THROW(scatter(s.view(), 1.0F, std::span(dense)), InvalidArgument);
  const SparseBuffer fits = sparse(6, {{0, 2.0F}});
  GradView odd = std::span(dense);
  odd.dtype = static_cast<DType>(9);
  EXPECT_THROW(scatter(fits.view(), 1.0F, odd), InvalidArgument);
  GradView half = std::span(dense).first(5);
  half.dtype = DType::f16;
  EXPECT_THROW(scatter(fits.view(), 1.0F, half), InvalidArgument);
  GradView gpu = std::span(dense);
  gpu.device = Device::other;
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
               .signals = 0b0101,
               .bucket_s = 0.25F,
               .pair_s = 1.0F};
  const GroupStats b{.gradient_norm2 = 0.5,
                     .accumulated_norm2 = 0.25,
                     .sent_norm2 = 0.125,
                     .sent_bytes = 7,
                     .non_finite = 2,
                     .signals = 0b0110,
                     .bucket_s = 1.5F,
                     .pair_s = 2.0F};
  combine(a, b);
  EXPECT_EQ(a.gradient_norm2, 1.5);
  EXPECT_EQ(a.accumulated_norm2, 2.25);
  EXPECT_EQ(a.sent_norm2, 3.125);
  EXPECT_EQ(a.sent_bytes, 10U) << "the maximum";
  EXPECT_EQ(a.non_finite, 0xffffffffU);
  EXPECT_EQ(a.signals, 0b0111U);
  EXPECT_EQ(a.bucket_s, 1.75F);
  EXPECT_EQ(a.pair_s, 3.0F);
  combine(a, b);
  EXPECT_EQ(a.non_finite, 0xffffffffU) << "stays at the largest";
}

}  // namespace
}  // namespace skim
