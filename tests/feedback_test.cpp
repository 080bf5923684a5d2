// feedback.hpp: what a residual keeps through commits, rollbacks, new layouts and saved states.
#include "skim/feedback.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "message_of.hpp"
#include "oracle.hpp"
#include "parts.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

using test::message_of;

using test::buckets;
using Floats = std::vector<float>;

Floats residual(ErrorFeedback& f, Slot slot) {
  const std::span<float> r = f.residual(slot).span();
  return {r.begin(), r.end()};
}

void fill(ErrorFeedback& f, Slot slot, const Floats& values) {
  std::ranges::copy(values, f.residual(slot).span().begin());
}

std::string saved(const ErrorFeedback& f) {
  std::ostringstream out;
  f.save(out);
  return out.str();
}

// As a run of old.size() ranks saved it; `rank` of `size` loads.
LoadReport load(ErrorFeedback& f, const std::vector<std::string>& old, int rank, int size,
                bool strict = true, std::optional<float> share = {}) {
  std::vector<std::istringstream> streams;
  for (const auto& s : old) streams.emplace_back(s);
  std::vector<std::istream*> in;
  for (auto& s : streams) in.push_back(&s);
  return f.load(in, rank, size, {.share = share, .strict = strict});
}

// Two buckets of 40 and 7 entries, with whole numbers in them.
ErrorFeedback example(std::uint64_t seed) {
  ErrorFeedback f;
  f.set_layout(buckets({40, 7}));
  fill(f, 0, test::integers(40, seed));
  fill(f, 1, test::integers(7, seed + 100));
  return f;
}

TEST(feedback, starts_at_zero_with_the_layout_in_order) {
  ErrorFeedback f;
  const std::vector<Bucket> shuffled = {{9, {{"late", 3, 4}, {"early", 0, 3}}}, {2, {{"x", 0, 5}}}};
  f.set_layout(shuffled);
  EXPECT_EQ(f.size(9), 7U);
  EXPECT_EQ(f.size(2), 5U);
  EXPECT_EQ(residual(f, 9), Floats(7, 0.0F));
  EXPECT_EQ(residual(f, 2), Floats(5, 0.0F));
  ASSERT_EQ(f.layout(9).size(), 2U);
  EXPECT_EQ(f.layout(9)[0].name, "early");
  EXPECT_EQ(f.layout(9)[1].name, "late");
  for (const Slot slot : {9U, 2U}) {
    const auto at = reinterpret_cast<std::uintptr_t>(f.residual(slot).data);
    EXPECT_EQ(at % 64, 0U) << "a slot starts on a cache line";
  }
}

TEST(feedback, unknown_slots_are_refused) {
  ErrorFeedback f = example(1);
  const SparseBuffer none;
  EXPECT_THROW(f.layout(5), InvalidArgument);
  EXPECT_THROW(f.size(5), InvalidArgument);
  EXPECT_THROW(f.residual(5), InvalidArgument);
  EXPECT_THROW(f.commit(5, none.view(), none.view()), InvalidArgument);
  EXPECT_THROW(f.commit_all(5), InvalidArgument);
  EXPECT_NE(message_of([&] { f.size(5); }).find("slot 5 is not in the layout"), std::string::npos);
}

TEST(feedback, commit_takes_sent_and_puts_returned_back) {
  ErrorFeedback f = example(2);
  const Floats before = residual(f, 0);
  const SparseBuffer sent = test::top_k(before, 6);
  SparseBuffer returned;
  returned.reset(40);
  returned.append(sent.view().index[2], 3.0F);  // also one that was sent
  returned.append(39, -8.0F);

  Floats expected = before;
  for (const Index i : sent.view().index) expected[i] = 0.0F;
  for (std::size_t e = 0; e < returned.nnz(); ++e) {
    expected[returned.view().index[e]] += returned.view().value[e];
  }
  double change = 0.0;
  for (std::size_t i = 0; i < 40; ++i) {
    change += double{expected[i]} * double{expected[i]} - double{before[i]} * double{before[i]};
  }
  EXPECT_EQ(f.commit(0, sent.view(), returned.view()), change);
  EXPECT_EQ(residual(f, 0), expected);
  f.end_step();
  EXPECT_EQ(residual(f, 0), expected);
  f.rollback_step();  // nothing is open
  EXPECT_EQ(residual(f, 0), expected);
}

// Few entries and many are fetched in different ways.
TEST(feedback, commit_subtracts_at_every_density_and_rolls_back) {
  const std::size_t n = 5003;
  for (const std::size_t nnz : std::vector<std::size_t>{1, 100, 156, 157, 1000, 5003}) {
    ErrorFeedback f;
    f.set_layout(buckets({40, n}));
    const Floats before = test::integers(n, nnz);
    fill(f, 1, before);
    const SparseBuffer sent = test::top_k(before, nnz);
    SparseBuffer returned = test::top_k(test::integers(n, nnz + 1), nnz);
    Floats expected = before;
    for (std::size_t e = 0; e < sent.nnz(); ++e) {
      expected[sent.view().index[e]] -= sent.view().value[e];
    }
    for (std::size_t e = 0; e < returned.nnz(); ++e) {
      expected[returned.view().index[e]] += returned.view().value[e];
    }
    double change = 0.0;
    for (std::size_t i = 0; i < n; ++i) {
      change += double{expected[i]} * double{expected[i]} - double{before[i]} * double{before[i]};
    }
    EXPECT_EQ(f.commit(1, sent.view(), returned.view()), change) << nnz;
    EXPECT_EQ(residual(f, 1), expected) << nnz;
    f.rollback_step();
    EXPECT_EQ(residual(f, 1), before) << nnz;
  }
}

TEST(feedback, commit_refuses_other_lengths_and_changes_nothing) {
  ErrorFeedback f = example(3);
  const Floats before = residual(f, 0);
  SparseBuffer right, wrong;
  right.reset(40);
  right.append(0, 1.0F);
  wrong.reset(39);
  wrong.append(0, 1.0F);
  EXPECT_THROW(f.commit(0, right.view(), wrong.view()), InvalidArgument);
  EXPECT_THROW(f.commit(0, wrong.view(), right.view()), InvalidArgument);
  EXPECT_EQ(residual(f, 0), before);
}

// Whatever bits are there come back, also where an entry changed several times and sums were
// rounded.
TEST(feedback, rollback_restores_every_bit) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    std::mt19937_64 rng(seed);
    ErrorFeedback f = example(seed);
    const Floats real = test::normal(40, seed);
    fill(f, 0, real);
    f.residual(0).span()[3] = std::numeric_limits<float>::denorm_min();
    const Floats a = residual(f, 0), b = residual(f, 1);
    for (int commits = 0; commits < 4; ++commits) {
      f.commit(0, test::top_k(residual(f, 0), rng() % 40).view(),
               test::top_k(test::normal(40, rng()), rng() % 40).view());
      f.commit(1, test::top_k(residual(f, 1), rng() % 8).view(),
               test::top_k(test::normal(7, rng()), rng() % 8).view());
    }
    EXPECT_FALSE(test::same_bits(residual(f, 0), a)) << "seed " << seed;
    f.rollback_step();
    EXPECT_TRUE(test::same_bits(residual(f, 0), a)) << "seed " << seed;
    EXPECT_TRUE(test::same_bits(residual(f, 1), b)) << "seed " << seed;
  }
}

TEST(feedback, a_delivered_slot_is_zero_after_the_step_or_whole_after_rollback) {
  ErrorFeedback f = example(4);
  const Floats a = residual(f, 0), b = residual(f, 1);
  f.commit_all(0);
  EXPECT_EQ(residual(f, 0), a) << "until the step ends";
  f.rollback_step();
  EXPECT_EQ(residual(f, 0), a);
  f.end_step();
  EXPECT_EQ(residual(f, 0), a) << "a step that was rolled back is over";
  f.commit_all(0);
  f.end_step();
  EXPECT_EQ(residual(f, 0), Floats(40, 0.0F));
  EXPECT_EQ(residual(f, 1), b);
}

TEST(feedback, disabled_keeps_nothing) {
  ErrorFeedback f({.enabled = false});
  f.set_layout(buckets({40, 7}));
  EXPECT_FALSE(f.options().enabled);
  EXPECT_TRUE(f.residual(0).empty());
  EXPECT_EQ(f.size(0), 40U);
  const SparseBuffer sent = test::top_k(test::normal(40, 1), 5);
  SparseBuffer none;
  none.reset(40);
  EXPECT_EQ(f.commit(0, sent.view(), none.view()), 0.0);
  f.commit_all(1);
  f.rollback_step();
  f.end_step();
  EXPECT_THROW(f.residual(3), InvalidArgument);
  // Its state loads into a run that keeps residuals, and the other way round.
  ErrorFeedback on = example(5);
  load(on, {saved(f)}, 0, 1);
  EXPECT_EQ(residual(on, 0), Floats(40, 0.0F));
  load(f, {saved(example(5))}, 0, 1);
  EXPECT_TRUE(f.residual(0).empty());
}

TEST(feedback, a_new_layout_keeps_residuals_by_name) {
  ErrorFeedback f;
  const std::vector<Bucket> before = {{0, {{"a", 0, 3}, {"b", 3, 4}}},
                                      {1, {{"c", 0, 2}, {"d", 2, 1}}}};
  f.set_layout(before);
  fill(f, 0, {1, 2, 3, 4, 5, 6, 7});
  fill(f, 1, {8, 9, 10});
  // d goes, e comes, the rest changes places.
  const std::vector<Bucket> after = {{5, {{"c", 0, 2}, {"a", 2, 3}}},
                                     {0, {{"e", 0, 2}, {"b", 2, 4}}}};
  f.set_layout(after);
  EXPECT_EQ(residual(f, 5), (Floats{8, 9, 1, 2, 3}));
  EXPECT_EQ(residual(f, 0), (Floats{0, 0, 4, 5, 6, 7}));
  EXPECT_THROW(f.residual(1), InvalidArgument);
  f.set_layout(before);
  EXPECT_EQ(residual(f, 0), (Floats{1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(residual(f, 1), (Floats{8, 9, 0})) << "d was away, so it starts at 0";
}

TEST(feedback, bad_layouts_are_refused_and_change_nothing) {
  const std::size_t huge = std::numeric_limits<std::size_t>::max();
  struct Row {
    std::string why;
    std::vector<Bucket> layout;
  };
  const std::vector<Row> rows = {
      {"slot 3 stands twice", {{3, {{"x", 0, 1}}}, {3, {{"y", 0, 1}}}}},
      {"the name 'x' stands twice", {{3, {{"x", 0, 1}}}, {4, {{"x", 0, 1}}}}},
      {"the name 'x' stands twice", {{3, {{"x", 0, 1}, {"x", 1, 1}}}}},
      {"(overlap or gap)", {{3, {{"x", 0, 3}, {"y", 2, 3}}}}},
      {"(overlap or gap)", {{3, {{"x", 0, 3}, {"y", 4, 3}}}}},
      {"(overlap or gap)", {{3, {{"x", 1, 3}}}}},
      {"2^32 entries or more", {{3, {{"x", 0, std::size_t{1} << 32}}}}},
      // Lengths whose sum wraps to a small number.
      {"2^32 entries or more", {{3, {{"x", 0, huge - 4}, {"y", huge - 4, 10}}}}},
      {"before 13", {{3, {{"0.a", 0, 12}}}}},
      {"longer than", {{3, {{std::string(5000, 'x'), 0, 1}}}}},
  };
  for (const Row& row : rows) {
    ErrorFeedback f = example(6);
    const std::string before = saved(f);
    const std::string why = message_of([&] { f.set_layout(row.layout); });
    EXPECT_NE(why.find(row.why), std::string::npos) << why;
    EXPECT_EQ(saved(f), before);
    EXPECT_EQ(f.size(0), 40U);
  }
}

TEST(feedback, empty_parameters_and_slots_are_allowed) {
  ErrorFeedback f;
  // Sorted by offset alone, "none" may come behind "all" and look like an overlap.
  for (const bool first : {false, true}) {
    Bucket b{0, {{"all", 0, 5}, {"none", 0, 0}}};
    if (first) std::swap(b.parameters[0], b.parameters[1]);
    f.set_layout(std::vector{b, Bucket{1, {}}});
    EXPECT_EQ(f.size(0), 5U);
    EXPECT_EQ(f.size(1), 0U);
  }
  SparseBuffer none;
  EXPECT_EQ(f.commit(1, none.view(), none.view()), 0.0);
  f.commit_all(1);
  f.end_step();
}

TEST(feedback, nothing_moves_while_a_step_is_open) {
  ErrorFeedback f = example(7);
  const std::string state = saved(f);
  const auto refused = [&] {
    std::ostringstream out;
    EXPECT_THROW(f.set_layout(buckets({40, 7})), InvalidArgument);
    EXPECT_THROW(f.save(out), InvalidArgument);
    EXPECT_THROW(load(f, {state}, 0, 1), InvalidArgument);
    EXPECT_TRUE(out.str().empty());
  };
  SparseBuffer none;
  none.reset(40);
  f.commit(0, test::top_k(residual(f, 0), 1).view(), none.view());
  refused();
  f.rollback_step();
  EXPECT_EQ(saved(f), state);
  f.commit_all(1);
  refused();
  f.rollback_step();
  EXPECT_EQ(saved(f), state);
}

TEST(feedback, the_same_number_of_ranks_takes_its_own_back) {
  std::vector<std::string> all;
  for (std::uint64_t r = 0; r < 3; ++r) all.push_back(saved(example(10 + r)));
  for (int r = 0; r < 3; ++r) {
    ErrorFeedback was = example(10 + static_cast<std::uint64_t>(r)), f = example(99);
    load(f, all, r, 3);
    EXPECT_EQ(saved(f), all[static_cast<std::size_t>(r)]);
    EXPECT_EQ(residual(f, 0), residual(was, 0));
  }
}

// With another number of ranks: (1/P) times the sum, in rank order, also over real values.
TEST(feedback, another_number_of_ranks_takes_the_mean) {
  for (const std::size_t old_ranks : {1U, 2U, 3U, 4U, 7U}) {
    std::vector<std::string> all;
    Floats expected(40, 0.0F);
    for (std::size_t r = 0; r < old_ranks; ++r) {
      ErrorFeedback was = example(20 + r);
      const Floats x = test::normal(40, 20 + r);
      fill(was, 0, x);
      all.push_back(saved(was));
      for (std::size_t i = 0; i < 40; ++i) expected[i] += x[i] / static_cast<float>(old_ranks);
    }
    for (const int size : {5, 6}) {
      ErrorFeedback first = example(99), last = example(98);
      load(first, all, 0, size);
      load(last, all, size - 1, size);
      EXPECT_EQ(saved(first), saved(last)) << "all new ranks start alike";
      for (std::size_t i = 0; i < 40; ++i) {
        EXPECT_NEAR(residual(first, 0)[i], expected[i], 1e-6F)
            << old_ranks << " ranks, entry " << i;
      }
    }
  }
}

TEST(feedback, a_rank_outside_the_group_and_an_impossible_share_are_refused) {
  const std::vector<std::string> all{saved(example(1)), saved(example(2))};
  ErrorFeedback f = example(3);
  const std::string had = saved(f);
  const float inf = std::numeric_limits<float>::infinity();
  for (const int rank : {-1, 2, 700000}) EXPECT_THROW(load(f, all, rank, 2), InvalidArgument);
  for (const float share : {-1.0F, inf, std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_THROW(load(f, all, 0, 3, true, share), InvalidArgument) << share;
  }
  EXPECT_EQ(saved(f), had);
}

TEST(feedback, a_sum_of_old_ranks_that_overflows_becomes_the_largest_float) {
  const float max = std::numeric_limits<float>::max();
  ErrorFeedback was;
  was.set_layout(buckets({3}));
  fill(was, 0, {max, -max, 1.0F});
  const std::vector<std::string> all(2, saved(was));
  for (const float share : {1.0F, 4.0F}) {
    ErrorFeedback f;
    f.set_layout(buckets({3}));
    load(f, all, 0, 3, true, share);
    EXPECT_EQ(residual(f, 0), (Floats{max, -max, 2.0F * share}));
  }
}

TEST(feedback, loads_into_other_buckets) {
  ErrorFeedback f;
  f.set_layout(std::vector<Bucket>{{4, {{"1.b", 0, 5}, {"0.a", 5, 13}, {"1.a", 18, 2}}},
                                   {7, {{"0.b", 0, 27}}}});
  ErrorFeedback was = example(30);
  load(f, {saved(was)}, 0, 1);
  const Floats a = residual(was, 0), b = residual(was, 1);
  const Floats mixed = residual(f, 4), rest = residual(f, 7);
  EXPECT_TRUE(std::ranges::equal(std::span(mixed).first(5), std::span(b).subspan(2)));
  EXPECT_TRUE(std::ranges::equal(std::span(mixed).subspan(5, 13), std::span(a).first(13)));
  EXPECT_TRUE(std::ranges::equal(std::span(mixed).subspan(18), std::span(b).first(2)));
  EXPECT_TRUE(std::ranges::equal(rest, std::span(a).subspan(13)));
}

// The layouts of a model before and after its head was replaced: '1.a' and '1.b' are gone, 'new' is
// there, and the other parameters are in other slots.
const std::vector<Bucket> kOtherHead{{0, {{"new", 0, 9}}},
                                     {5, {{"0.b", 0, 27}, {"0.a", 27, 13}}}};

TEST(feedback, loads_the_parameters_that_remain_if_not_strict) {
  for (const ResidualCode code : {ResidualCode::f32, ResidualCode::bf16, ResidualCode::q8}) {
    const FeedbackOptions options{.momentum_correction = 0.5F, .residual_code = code};
    const auto make = [&](std::uint64_t seed, const std::vector<Bucket>& layout) {
      ErrorFeedback f(options);
      f.set_layout(layout);
      for (const Slot slot : f.slots()) {
        fill(f, slot, test::integers(f.size(slot), seed + slot));
        std::ranges::copy(test::integers(f.size(slot), seed + slot + 7),
                          f.velocity(slot).span().begin());
      }
      return f;
    };
    ErrorFeedback was = make(60, buckets({40, 7})), f = make(70, kOtherHead);
    const LoadReport report = load(f, {saved(was)}, 0, 1, false);

    const Floats old_rest = residual(was, 0), old_head = residual(was, 1);
    EXPECT_EQ(residual(f, 0), Floats(9, 0.0F)) << "new parameters begin at 0";
    const Floats rest = residual(f, 5);
    EXPECT_TRUE(std::ranges::equal(std::span(rest).first(27), std::span(old_rest).subspan(13)));
    EXPECT_TRUE(std::ranges::equal(std::span(rest).subspan(27), std::span(old_rest).first(13)));
    const std::span<float> m = f.velocity(5).span(), old_m = was.velocity(0).span();
    EXPECT_TRUE(std::ranges::equal(m.first(27), old_m.subspan(13)));
    EXPECT_TRUE(std::ranges::equal(m.subspan(27), old_m.first(13)));
    EXPECT_TRUE(std::ranges::all_of(f.velocity(0).span(), [](float v) { return v == 0.0F; }));

    EXPECT_EQ(report.missing, std::vector<std::string>{"new"});
    ASSERT_EQ(report.unexpected.size(), 2U);
    const auto norm_of = [&](std::size_t first, std::size_t count) {
      double norm2 = 0.0;
      for (const float v : std::span(old_head).subspan(first, count)) norm2 += double{v} * v;
      return std::sqrt(norm2);
    };
    EXPECT_DOUBLE_EQ(report.unexpected.at("1.a"), norm_of(0, 2));
    EXPECT_DOUBLE_EQ(report.unexpected.at("1.b"), norm_of(2, 5));
  }
}

// What is lost on another number of ranks is lost of the sum.
TEST(feedback, loads_the_parameters_that_remain_on_another_number_of_ranks) {
  std::vector<std::string> all;
  Floats rest(40, 0.0F), head(7, 0.0F);
  for (std::uint64_t r = 0; r < 4; ++r) {
    ErrorFeedback was = example(80 + r);
    all.push_back(saved(was));
    for (std::size_t i = 0; i < 40; ++i) rest[i] += residual(was, 0)[i] / 4.0F;
    for (std::size_t i = 0; i < 7; ++i) head[i] += residual(was, 1)[i] / 4.0F;
  }
  ErrorFeedback f;
  f.set_layout(std::vector<Bucket>{{0, {{"0.a", 0, 13}, {"0.b", 13, 27}}}, {1, {{"new", 0, 3}}}});
  const LoadReport report = load(f, all, 2, 3, false);
  EXPECT_EQ(residual(f, 0), rest);
  EXPECT_EQ(residual(f, 1), Floats(3, 0.0F));
  double norm2 = 0.0;
  for (std::size_t i = 2; i < 7; ++i) norm2 += double{head[i]} * head[i];
  EXPECT_DOUBLE_EQ(report.unexpected.at("1.b"), std::sqrt(norm2));
}

TEST(feedback, is_not_strict_only_about_names) {
  ErrorFeedback f = example(90);
  const std::string before = saved(f);
  EXPECT_TRUE(load(f, {before}, 0, 1, false).fits());
  EXPECT_EQ(saved(f), before);

  ErrorFeedback longer, other;
  longer.set_layout(buckets({40, 10}));
  other.set_layout(kOtherHead);
  EXPECT_NE(message_of<StateError>([&] {
              load(f, {saved(longer)}, 0, 1, false);
            }).find("'1.a' has 3 entries, the model's 2"),
            std::string::npos);
  EXPECT_NE(message_of<StateError>([&] {
              load(f, {before, saved(other)}, 0, 2, false);
            }).find("residuals of rank 1: it has other parameters than rank 0's"),
            std::string::npos);
  // Damage of a parameter that is left out, its length above all.
  const std::string good = saved(other);
  for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_THROW(load(f, {bad}, 0, 1, false), StateError) << "bit " << bit;
  }
  EXPECT_EQ(saved(f), before);
}

TEST(feedback, damaged_states_are_refused_and_change_nothing) {
  const std::string good = saved(example(40));
  ErrorFeedback f = example(41);
  const std::string before = saved(f);
  for (std::size_t length = 0; length < good.size(); ++length) {
    EXPECT_THROW(load(f, {good.substr(0, length)}, 0, 1), StateError) << "cut to " << length;
  }
  for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_THROW(load(f, {bad}, 0, 1), StateError) << "bit " << bit;
  }
  // The damage may be in what another rank wrote.
  std::string bad = good;
  bad[bad.size() / 2] = static_cast<char>(bad[bad.size() / 2] ^ 1);
  EXPECT_THROW(load(f, {good, bad}, 0, 2), StateError);
  EXPECT_THROW(load(f, {good, good, bad}, 0, 2), StateError);
  EXPECT_EQ(saved(f), before);
}

TEST(feedback, foreign_states_are_refused_and_change_nothing) {
  ErrorFeedback f = example(42);
  const std::string before = saved(f);
  const auto why = [&](const std::vector<Bucket>& theirs) {
    ErrorFeedback other;
    other.set_layout(theirs);
    return message_of<StateError>([&] { load(f, {saved(other)}, 0, 1); });
  };
  EXPECT_EQ(why(buckets({40})),
            "residuals: the state does not have 2 parameters of the model ('1.a', '1.b'); load "
            "with strict=false to take the other parameters");
  EXPECT_NE(why(buckets({40, 10})).find("'1.a' has 3 entries, the model's 2"), std::string::npos);
  std::vector<Bucket> renamed = buckets({40, 7});
  renamed[1].parameters[0].name = "else";
  EXPECT_EQ(why(renamed),
            "residuals: the model does not have 1 parameter of the state ('else'), and the state "
            "does not have 1 parameter of the model ('1.a'); load with strict=false to take the "
            "other parameters");
  std::vector<Bucket> more = buckets({40, 7});
  for (const char* name : {"p", "q", "r", "s", "t"}) {
    more.push_back({static_cast<Slot>(more.size()), {{name, 0, 1}}});
  }
  EXPECT_NE(why(more).find("5 parameters of the state ('p', 'q', 'r' and 2 more);"),
            std::string::npos);
  EXPECT_NE(message_of<StateError>([&] {
              load(f, {"SOMETHINGELSE---------------"}, 0, 1);
            }).find("residuals of rank 0: it does not start with 'SKIMRESI'"),
            std::string::npos);
  EXPECT_THROW(f.load({}, 0, 1), InvalidArgument);
  EXPECT_EQ(saved(f), before);
}

// load stops behind the residuals, where other state stands; save that fails says so.
TEST(feedback, streams) {
  const ErrorFeedback was = example(50);
  std::istringstream in(saved(was) + "next");
  std::istream* one = &in;
  ErrorFeedback f = example(51);
  f.load({&one, 1}, 0, 1);
  std::string rest;
  in >> rest;
  EXPECT_EQ(rest, "next");

  std::ostringstream full;
  full.setstate(std::ios::badbit);
  EXPECT_THROW(was.save(full), StateError);
}

// A residual never holds what is not finite, also where merged sums of huge values come back.
TEST(feedback, never_keeps_infinity) {
  ErrorFeedback f;
  f.set_layout(buckets({4}));
  const float max = std::numeric_limits<float>::max(), inf = std::numeric_limits<float>::infinity();
  fill(f, 0, {max, -max, 0.0F, 1.0F});
  SparseBuffer none, returned;
  none.reset(4);
  returned.reset(4);
  returned.append(0, max);
  returned.append(1, -max);
  returned.append(2, inf);
  returned.append(3, std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(std::isfinite(f.commit(0, none.view(), returned.view())));
  for (const float v : residual(f, 0)) EXPECT_TRUE(std::isfinite(v)) << v;
  f.rollback_step();
  EXPECT_EQ(residual(f, 0), (Floats{max, -max, 0.0F, 1.0F}));
}

// ---- local options ------------------------------------------------------------------------------

Floats velocity(ErrorFeedback& f, Slot slot) {
  const std::span<float> m = f.velocity(slot).span();
  return {m.begin(), m.end()};
}

// One step of one bucket, as a reducer does it; the exchange returns `returned`.
SparseBuffer step(ErrorFeedback& f, Slot slot, GradView grad, std::size_t k,
                  const SparseView& returned) {
  SparseBuffer sent;
  const GradView incoming = f.begin(slot, grad, 0.0, 1);
  make_selector({})->select({.id = {},
                             .grad = incoming,
                             .residual = f.residual(slot),
                             .layout = {},
                             .keep = {.k = k},
                             .decay = f.options().residual_decay},
                            sent);
  f.commit(slot, sent.view(), returned);
  return sent;
}

SparseView nothing(std::size_t dim) { return {.index = {}, .value = {}, .dim = dim}; }

// Deep Gradient Compression, algorithm by algorithm, entry by entry.
struct Reference {
  FeedbackOptions options;
  Floats m, v;

  SparseBuffer step(const Floats& g, std::size_t k) {
    for (std::size_t i = 0; i < g.size(); ++i) {
      float add = g[i];
      if (options.momentum_correction > 0.0F) {
        const float x = g[i] * (1.0F - options.momentum_dampening);
        if (options.nesterov_correction) {
          m[i] = options.momentum_correction * (m[i] + x);
          add = m[i] + x;
        } else {
          add = m[i] = options.momentum_correction * m[i] + x;
        }
      }
      v[i] = options.residual_decay * v[i] + add;
    }
    const SparseBuffer sent = test::top_k(v, k);
    for (const Index i : sent.view().index) {
      v[i] = 0.0F;
      if (options.factor_masking) m[i] = 0.0F;
    }
    return sent;
  }
};

TEST(feedback, local_options_are_their_reference) {
  const std::size_t n = 300, k = 12;
  for (const float momentum : {0.0F, 0.5F, 0.9F}) {
    for (const bool nesterov : {false, true}) {
      for (const bool masking : {false, true}) {
        for (const float decay : {1.0F, 0.95F, 0.0F}) {
          const FeedbackOptions options{.momentum_correction = momentum,
                                        .momentum_dampening = decay < 1.0F ? momentum : 0.0F,
                                        .nesterov_correction = nesterov && momentum > 0.0F,
                                        .factor_masking = masking,
                                        .residual_decay = decay};
          ErrorFeedback f(options);
          f.set_layout(buckets({n}));
          Reference expected{options, Floats(n, 0.0F), Floats(n, 0.0F)};
          for (std::uint64_t s = 0; s < 12; ++s) {
            Floats g = test::normal(n, 60 + s);
            const SparseBuffer want = expected.step(g, k);
            const SparseBuffer sent = step(f, 0, std::span(g), k, nothing(n));
            f.end_step();
            ASSERT_TRUE(test::same(sent.view(), want.view())) << momentum << " step " << s;
            ASSERT_TRUE(test::same_bits(residual(f, 0), expected.v));
            if (momentum > 0.0F) {
              ASSERT_TRUE(test::same_bits(velocity(f, 0), expected.m));
            }
          }
          EXPECT_EQ(f.velocity(0).empty(), momentum == 0.0F);
        }
      }
    }
  }
}

// On constant gradients, without masking and with everything sent: what is delivered is what
// momentum SGD adds, the closed form of a geometric series.
TEST(feedback, momentum_is_that_of_sgd) {
  ErrorFeedback f({.momentum_correction = 0.5F, .factor_masking = false});
  f.set_layout(buckets({8}));
  Floats g(8, 1.0F);
  double delivered = 0.0;
  for (int s = 0; s < 10; ++s) {
    const SparseBuffer sent = step(f, 0, std::span(g), 8, nothing(8));
    delivered += double{sent.view().value[0]};
    f.end_step();
    EXPECT_EQ(velocity(f, 0)[0], 2.0F - std::ldexp(1.0F, -s));
  }
  EXPECT_EQ(delivered, 20.0 - 2.0 + std::ldexp(1.0, -9));
}

TEST(feedback, without_options_the_gradient_passes_untouched) {
  ErrorFeedback f = example(61);
  std::vector<std::uint16_t> half(40, 0x7e00);  // NaN: nobody looks
  GradView grad;
  grad.data = half.data();
  grad.n = half.size();
  grad.dtype = DType::f16;
  grad.scale = 8.0F;
  const GradView same = f.begin(0, grad, 1e9, 4);
  EXPECT_EQ(same.data, grad.data);
  EXPECT_EQ(same.dtype, DType::f16);
  EXPECT_EQ(same.scale, 8.0F);
  EXPECT_TRUE(f.velocity(0).empty());
  EXPECT_THROW(f.velocity(9), InvalidArgument);
  EXPECT_THROW(f.begin(9, grad, 0.0, 1), InvalidArgument);
  EXPECT_THROW(f.begin(1, grad, 0.0, 1), InvalidArgument) << "its length is 7";
  grad.device = Device::other;
  EXPECT_THROW(f.begin(0, grad, 0.0, 1), InvalidArgument);
}

TEST(feedback, options_out_of_range_are_refused) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<std::pair<std::string, FeedbackOptions>> rows = {
      {"momentum", {.momentum_correction = 1.0F}},
      {"momentum", {.momentum_correction = -0.1F}},
      {"momentum", {.momentum_correction = nan}},
      {"momentum_dampening", {.momentum_correction = 0.9F, .momentum_dampening = 1.0F}},
      {"momentum_dampening", {.momentum_correction = 0.9F, .momentum_dampening = nan}},
      {"momentum_dampening", {.momentum_dampening = 0.5F}},
      {"nesterov_correction", {.nesterov_correction = true}},
      {"local_clip", {.local_clip = -1.0F}},
      {"local_clip", {.local_clip = inf}},
      {"local_clip", {.local_clip = nan}},
      {"decay", {.residual_decay = 1.1F}},
      {"decay", {.residual_decay = -0.1F}},
      {"decay", {.residual_decay = nan}},
      {"need a residual", {.enabled = false, .momentum_correction = 0.9F}},
      {"need a residual", {.enabled = false, .residual_decay = 0.9F}},
      {"needs a residual", {.enabled = false, .residual_code = ResidualCode::bf16}},
      {"residual_code", {.residual_code = static_cast<ResidualCode>(7)}},
  };
  for (const auto& [word, options] : rows) {
    const auto& o = options;
    const std::string why = message_of([&] { ErrorFeedback f(o); });
    EXPECT_NE(why.find(word), std::string::npos) << why;
  }
  EXPECT_NO_THROW(ErrorFeedback({.enabled = false, .local_clip = 1.0F}));
}

// m is masked where something was delivered: not where the exchange gives the entry back whole, or
// where what was sent had been rounded to 0.
TEST(feedback, masks_what_was_delivered) {
  ErrorFeedback f({.momentum_correction = 0.5F});
  f.set_layout(buckets({6}));
  Floats g = {1, 2, 3, 4, 5, 6};
  SparseBuffer sent, returned;
  sent.reset(6);
  for (const Index i : {1U, 2U, 3U, 4U, 5U}) sent.append(i, i == 4 ? 0.0F : g[i]);  // rounded to 0
  returned.reset(6);
  returned.append(0, 7.0F);  // of another rank
  returned.append(2, 3.0F);  // whole
  returned.append(3, 1.0F);  // in part
  const GradView incoming = f.begin(0, std::span(g), 0.0, 1);
  std::ranges::copy(incoming.f32(), f.residual(0).data);
  f.commit(0, sent.view(), returned.view());
  EXPECT_EQ(velocity(f, 0), (Floats{1, 0, 3, 0, 5, 0}));
  EXPECT_EQ(residual(f, 0), (Floats{8, 0, 3, 1, 5, 0}));
  f.end_step();
  EXPECT_EQ(velocity(f, 0), (Floats{1, 0, 3, 0, 5, 0}));
}

// After a rollback both hold the step's gradient, bit by bit as if nothing had been selected.
TEST(feedback, rollback_takes_the_masks_back) {
  for (const bool nesterov : {false, true}) {
    for (const bool dense : {false, true}) {
      ErrorFeedback f({.momentum_correction = 0.9F, .nesterov_correction = nesterov}),
          selects_nothing = ErrorFeedback(f.options());
      for (ErrorFeedback* each : {&f, &selects_nothing}) each->set_layout(buckets({200}));
      for (std::uint64_t s = 0; s < 6; ++s) {
        Floats g = test::normal(200, 70 + s);
        step(selects_nothing, 0, std::span(g), 0, nothing(200));
        selects_nothing.end_step();
        if (dense) {
          step(f, 0, std::span(g), 0, nothing(200));
          f.commit_all(0);
        } else {
          step(f, 0, std::span(g), 20, nothing(200));
          f.commit(0, test::top_k(residual(f, 0), 30).view(), nothing(200));  // some twice
          EXPECT_FALSE(test::same_bits(velocity(f, 0), velocity(selects_nothing, 0)));
        }
        f.rollback_step();
        ASSERT_TRUE(test::same_bits(velocity(f, 0), velocity(selects_nothing, 0)));
        ASSERT_TRUE(test::same_bits(residual(f, 0), residual(selects_nothing, 0)));
      }
      f.end_step();
      EXPECT_TRUE(test::same_bits(velocity(f, 0), velocity(selects_nothing, 0)));
    }
  }
}

// Nothing waits, so nothing is stale: masking would leave a dense run without momentum.
TEST(feedback, a_dense_delivery_keeps_the_velocity) {
  for (const bool masking : {true, false}) {
    ErrorFeedback f({.momentum_correction = 0.9F, .factor_masking = masking});
    f.set_layout(buckets({40, 7}));
    Floats g = test::normal(40, 80), other = test::normal(7, 81);
    step(f, 0, std::span(g), 0, nothing(40));
    step(f, 1, std::span(other), 0, nothing(7));
    f.commit_all(0);
    f.end_step();
    EXPECT_EQ(velocity(f, 0), g);
    EXPECT_EQ(residual(f, 0), Floats(40, 0.0F));
    EXPECT_EQ(velocity(f, 1), other);
  }
}

TEST(feedback, velocity_takes_any_type_and_stays_finite) {
  const float max = std::numeric_limits<float>::max(), inf = std::numeric_limits<float>::infinity();
  for (const bool nesterov : {false, true}) {
    for (const DType type : {DType::f16, DType::bf16}) {
      ErrorFeedback f({.momentum_correction = 0.9F, .nesterov_correction = nesterov}),
          wide = ErrorFeedback(f.options());
      f.set_layout(buckets({65536}));
      wide.set_layout(buckets({65536}));
      std::vector<std::uint16_t> half(65536);
      Floats g(65536);
      for (std::size_t i = 0; i < g.size(); ++i) {
        half[i] = static_cast<std::uint16_t>(i);
        g[i] = test::meaning(half[i], type);
        if (!std::isfinite(g[i])) g[i] = 0.0F;
      }
      GradView narrow;
      narrow.data = half.data();
      narrow.n = half.size();
      narrow.dtype = type;
      for (const float scale : {1.0F, 1024.0F, 0x1p-100F}) {
        GradView plain = std::span(g);
        narrow.scale = plain.scale = scale;
        const GradView a = f.begin(0, narrow, 0.0, 1), b = wide.begin(0, plain, 0.0, 1);
        EXPECT_EQ(a.scale, 1.0F);
        EXPECT_TRUE(test::same_bits(a.f32(), b.f32()));
        EXPECT_TRUE(test::same_bits(velocity(f, 0), velocity(wide, 0)));
      }
    }
    ErrorFeedback f({.momentum_correction = 0.75F, .nesterov_correction = nesterov});
    f.set_layout(buckets({4}));
    Floats g = {max, -max, inf, std::nanf("")};
    for (int s = 0; s < 10; ++s) {
      const GradView incoming = f.begin(0, std::span(g), 0.0, 1);
      EXPECT_EQ(incoming.f32()[0], max);
      EXPECT_EQ(incoming.f32()[1], -max);
      EXPECT_EQ(incoming.f32()[2], 0.0F);
      EXPECT_EQ(incoming.f32()[3], 0.0F);
    }
    EXPECT_EQ(velocity(f, 0)[0], nesterov ? 0.75F * max : max);
  }
}

TEST(feedback, clipping_limits_the_norm) {
  ErrorFeedback f({.enabled = false, .local_clip = 10.0F});
  f.set_layout(buckets({400, 100}));
  for (const float scale : {1.0F, 64.0F}) {
    for (const int ranks : {1, 4, 7}) {
      for (const Slot slot : {0U, 1U}) {
        Floats g = test::normal(f.size(slot), 90 + slot);
        double norm2 = 0.0;
        for (float& v : g) {
          norm2 += double{v} * double{v};
          v *= scale;
        }
        GradView grad = std::span(g);
        grad.scale = scale;
        const double limit = 10.0 * std::sqrt(static_cast<double>(f.size(slot)) / 500.0 / ranks);
        const GradView clipped = f.begin(slot, grad, norm2, ranks);
        EXPECT_EQ(clipped.data, grad.data) << "nothing is written";
        const double after = std::sqrt(norm2) * double{scale} / double{clipped.scale};
        EXPECT_NEAR(after, std::min(limit, std::sqrt(norm2)), 1e-6 * limit);
        EXPECT_EQ(f.begin(slot, grad, 0.99 * limit * limit, ranks).scale, scale) << "short enough";
        EXPECT_EQ(f.begin(slot, grad, 0.0, ranks).scale, scale);
      }
    }
  }
  // Together the buckets have the paper's norm, clip_norm / sqrt(P).
  // What scale a float cannot be is the largest: still a gradient that can be accumulated.
  Floats g(400, 1.0F);
  const GradView far = f.begin(0, std::span(g), 1e90, 2);
  EXPECT_EQ(far.scale, std::numeric_limits<float>::max());
  EXPECT_GT(1.0F / far.scale, 0.0F);
}

TEST(feedback, velocities_are_saved_loaded_and_laid_out_as_residuals) {
  const auto momentum = [](std::uint64_t seed) {
    ErrorFeedback f({.momentum_correction = 0.9F, .nesterov_correction = true});
    f.set_layout(buckets({40, 7}));
    for (Slot slot : {0U, 1U}) {
      fill(f, slot, test::integers(f.size(slot), seed + slot));
      std::ranges::copy(test::integers(f.size(slot), seed + slot + 50), f.velocity(slot).data);
    }
    return f;
  };
  std::vector<std::string> all;
  for (std::uint64_t r = 0; r < 4; ++r) all.push_back(saved(momentum(1000 * r)));
  for (int r = 0; r < 4; ++r) {
    ErrorFeedback f = momentum(9);
    load(f, all, r, 4);
    EXPECT_EQ(saved(f), all[static_cast<std::size_t>(r)]);
  }
  for (const int size : {3, 5}) {
    ErrorFeedback f = momentum(9);
    load(f, all, size - 1, size);
    for (Slot slot : {0U, 1U}) {
      Floats v(f.size(slot), 0.0F), m = v;
      for (std::uint64_t r = 0; r < 4; ++r) {
        ErrorFeedback was = momentum(1000 * r);
        for (std::size_t i = 0; i < v.size(); ++i) {
          v[i] += residual(was, slot)[i] / 4.0F;
          m[i] += velocity(was, slot)[i] / 4.0F;
        }
      }
      EXPECT_EQ(residual(f, slot), v);
      EXPECT_EQ(velocity(f, slot), m);
    }
  }
  // Into other buckets, by load and by set_layout.
  const std::vector<Bucket> other = {{4, {{"1.b", 0, 5}, {"0.a", 5, 13}, {"1.a", 18, 2}}},
                                     {7, {{"0.b", 0, 27}}}};
  ErrorFeedback loaded({.momentum_correction = 0.9F}), moved = momentum(0);
  loaded.set_layout(other);
  load(loaded, {all[0]}, 0, 1);
  moved.set_layout(other);
  const Floats a = velocity(moved, 4);
  ErrorFeedback was = momentum(0);
  const Floats first = velocity(was, 0);
  EXPECT_TRUE(std::ranges::equal(std::span(a).subspan(5, 13), std::span(first).first(13)));
  EXPECT_TRUE(std::ranges::equal(velocity(moved, 7), std::span(first).subspan(13)));
  EXPECT_EQ(velocity(loaded, 4), a);
  EXPECT_EQ(velocity(loaded, 7), velocity(moved, 7));
  EXPECT_EQ(residual(loaded, 7), residual(moved, 7));

  // A run without momentum leaves them; one with it starts at 0 from a state without.
  ErrorFeedback plain = example(1);
  load(plain, {all[2]}, 0, 1);
  EXPECT_EQ(residual(plain, 0), test::integers(40, 2000));
  ErrorFeedback fresh = momentum(9);
  load(fresh, {saved(example(1))}, 0, 1);
  EXPECT_EQ(velocity(fresh, 0), Floats(40, 0.0F));
  ErrorFeedback before = example(1);
  EXPECT_EQ(residual(fresh, 0), residual(before, 0));
}

// ---- residuals in fewer bits ----

constexpr ResidualCode kCodes[] = {ResidualCode::bf16, ResidualCode::q8};

ErrorFeedback coded(ResidualCode code, const std::vector<std::size_t>& lengths) {
  ErrorFeedback f({.residual_code = code});
  f.set_layout(buckets(lengths));
  return f;
}

// What is left of `values` after a step.
Floats kept(ResidualCode code, const Floats& values) {
  ErrorFeedback f = coded(code, {values.size()});
  fill(f, 0, values);
  f.end_step();
  return residual(f, 0);
}

// Both codes hold whole numbers of up to 127 exactly, so that the laws are equalities.
TEST(feedback, codes_lose_nothing_of_small_whole_numbers) {
  const std::vector<std::size_t> lengths = {40, 200, 64, 1};
  for (const ResidualCode code : kCodes) {
    ErrorFeedback f = coded(code, lengths);
    std::vector<Floats> expected;
    for (const std::size_t n : lengths) expected.emplace_back(n, 0.0F);
    std::mt19937_64 rng(1);
    for (int step = 0; step < 30; ++step) {
      const bool taken_back = step % 7 == 3;
      for (Slot slot = 0; slot < lengths.size(); ++slot) {
        Floats& r = expected[slot];
        const std::span<float> values = f.residual(slot).span();
        SparseBuffer sent, returned;
        sent.reset(r.size());
        returned.reset(r.size());
        for (std::size_t i = 0; i < r.size(); ++i) {
          values[i] += static_cast<float>(static_cast<int>(rng() % 5) - 2);
          r[i] += values[i] - r[i];
          if (rng() % 3 != 0 && std::abs(r[i]) < 100.0F) continue;
          sent.append(static_cast<Index>(i), r[i]);
          if (rng() % 4 == 0) returned.append(static_cast<Index>(i), 1.0F);
        }
        if (step % 11 == 5 && slot == 1) {
          f.commit_all(slot);
          if (!taken_back) std::ranges::fill(r, 0.0F);
          continue;
        }
        f.commit(slot, sent.view(), returned.view());
        if (taken_back) continue;
        for (const Index i : sent.view().index) r[i] = 0.0F;
        for (const Index i : returned.view().index) r[i] += 1.0F;
      }
      if (taken_back) {
        f.rollback_step();
      } else {
        f.end_step();
      }
      for (Slot slot = 0; slot < lengths.size(); ++slot) {
        EXPECT_EQ(residual(f, slot), expected[slot]) << name_of(code) << ' ' << step << ' ' << slot;
      }
    }
  }
}

TEST(feedback, what_a_code_holds_does_not_change_any_more) {
  Floats values = test::normal(5000, 1);
  const float extremes[] = {0.0F,   -0.0F, 1e-45F, -1e-38F, std::numeric_limits<float>::max(),
                            -3e38F, 127.0F, 128.0F, 255.0F, 1e30F};
  for (std::size_t i = 0; i < std::size(extremes); ++i) values[70 * i] = extremes[i];
  for (const ResidualCode code : kCodes) {
    const Floats once = kept(code, values);
    EXPECT_EQ(kept(code, once), once) << name_of(code);
    for (const float v : once) EXPECT_TRUE(std::isfinite(v));
  }
}

TEST(feedback, codes_round_within_their_bounds_and_to_both_sides) {
  const std::size_t n = 1 << 16, block = 64;
  const Floats values = test::normal(n, 2);
  for (const ResidualCode code : kCodes) {
    const Floats found = kept(code, values);
    double sum = 0.0, variance = 0.0;
    for (std::size_t first = 0; first < n; first += block) {
      float largest = 0.0F;
      for (std::size_t i = first; i < first + block; ++i) {
        largest = std::max(largest, std::abs(values[i]));
      }
      for (std::size_t i = first; i < first + block; ++i) {
        const double error = double{found[i]} - double{values[i]};
        const double bound = code == ResidualCode::bf16 ? std::abs(values[i]) / 128.0 : largest / 63.0;
        EXPECT_LT(std::abs(error), bound) << name_of(code) << ' ' << i;
        sum += error;
        variance += error * error;
      }
    }
    EXPECT_GT(variance, 0.0);
    EXPECT_LT(std::abs(sum), 4.0 * std::sqrt(variance)) << name_of(code);
  }
}

TEST(feedback, a_state_of_each_code_loads_into_each_other) {
  const ResidualCode all[] = {ResidualCode::f32, ResidualCode::bf16, ResidualCode::q8};
  for (const ResidualCode from : all) {
    ErrorFeedback f({.residual_code = from});
    f.set_layout(buckets({40, 7}));
    fill(f, 0, test::integers(40, 1, 100));
    fill(f, 1, test::integers(7, 2, 100));
    const std::string state = saved(f);
    for (const ResidualCode to : all) {
      ErrorFeedback other({.residual_code = to});
      other.set_layout(buckets({40, 7}));
      load(other, {state}, 0, 1);
      EXPECT_EQ(residual(other, 0), residual(f, 0)) << name_of(from) << ' ' << name_of(to);
      EXPECT_EQ(residual(other, 1), residual(f, 1)) << name_of(from) << ' ' << name_of(to);
      other.set_layout(buckets({40, 7}));
      EXPECT_EQ(residual(other, 0), residual(f, 0));
    }
  }
}

TEST(feedback, codes_move_with_their_parameters) {
  for (const ResidualCode code : kCodes) {
    ErrorFeedback f({.residual_code = code});
    f.set_layout(std::vector<Bucket>{{0, {{"a", 0, 130}, {"b", 130, 7}}}, {1, {{"c", 0, 200}}}});
    const Floats first = test::integers(137, 1, 100), second = test::integers(200, 2, 100);
    fill(f, 0, first);
    fill(f, 1, second);  // and so the first slot is put back
    f.set_layout(std::vector<Bucket>{{5, {{"new", 0, 3}, {"c", 3, 200}, {"b", 203, 7}}}});
    Floats expected(3, 0.0F);
    expected.insert(expected.end(), second.begin(), second.end());
    expected.insert(expected.end(), first.begin() + 130, first.end());
    EXPECT_EQ(residual(f, 5), expected) << name_of(code);
  }
}

TEST(feedback, a_state_of_the_version_before_is_refused) {
  std::string old = saved(example(1));
  old[8] = 1;  // after the magic
  ErrorFeedback f = example(2);
  EXPECT_EQ(message_of<StateError>([&] { load(f, {old}, 0, 1); }),
            "residuals of rank 0: it has version 1, expected 2");
}

}  // namespace
}  // namespace skim
