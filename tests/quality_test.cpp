// What quality_note promises: figures of the table in docs/results, and advice that helps.
#include "skim/quality.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "skim/error.hpp"

namespace skim {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(quality, rare_sends_never_help) {
  const auto all = measured_quality();
  ASSERT_GE(all.size(), 2U);
  for (std::size_t i = 1; i < all.size(); ++i) {
    EXPECT_LT(all[i - 1].entry_sends, all[i].entry_sends);
    EXPECT_GE(all[i - 1].correction, all[i].correction);
    EXPECT_GE(all[i - 1].step_ahead, all[i].step_ahead);
    EXPECT_GE(all[i - 1].after_sum, all[i].after_sum);
  }
  EXPECT_TRUE(std::ranges::any_of(
      all, [](const MeasuredQuality& m) { return m.entry_sends == kLevelSends; }));
}

TEST(quality, the_density_of_sends_is_the_smallest_of_two_digits) {
  EXPECT_DOUBLE_EQ(*density_of_sends(28.0, 1000), 0.028);
  EXPECT_DOUBLE_EQ(*density_of_sends(50.0, 714), 0.071);  // 0.07003
  EXPECT_DOUBLE_EQ(*density_of_sends(50.0, 5'000'000), 1e-5);
  EXPECT_FALSE(density_of_sends(28.0, 28).has_value());
  EXPECT_THROW(static_cast<void>(density_of_sends(28.0, 0)), InvalidArgument);
}

TEST(quality, the_steps_of_sends_are_the_fewest) {
  EXPECT_EQ(steps_of_sends(28.0, 0.028), 1000U);  // 28 / 0.028 is a little more in floating point
  EXPECT_EQ(steps_of_sends(28.0, 0.03), 934U);    // 933.3
  EXPECT_EQ(steps_of_sends(28.0, 1.0), 28U);
  EXPECT_GT(steps_of_sends(28.0, 1e-19), std::uint64_t{1} << 62);  // no overflow
  EXPECT_TRUE(reaches(0.07 * 400.0, 28.0));
  EXPECT_TRUE(reaches(0.03 * 934.0, 28.0));
  EXPECT_FALSE(reaches(0.03 * 933.0, 28.0));
  EXPECT_THROW(static_cast<void>(steps_of_sends(28.0, 0.0)), InvalidArgument);
}

TEST(quality, the_note_goes_by_the_largest_measured_s_that_the_run_reaches) {
  const std::string rare = quality_note(0.0035, 1000);
  EXPECT_TRUE(contains(rare, "S = density x steps = 3.5")) << rare;
  EXPECT_TRUE(contains(rare, "At S = 3 a small GPT")) << rare;
  EXPECT_TRUE(contains(rare, "needs density 0.028, ")) << rare;
  EXPECT_TRUE(rare.ends_with("level with dense.")) << rare;
  // Less than was ever measured: the worst row.
  EXPECT_TRUE(contains(quality_note(0.0001, 1000), "At S = 1 a small GPT"));
  EXPECT_TRUE(contains(quality_note(0.003, 1000), "At S = 3 a small GPT"));
  // Level: no other density is advised.
  const std::string level = quality_note(0.028, 1000);
  EXPECT_TRUE(contains(level, "level with dense at S = 28")) << level;
  EXPECT_FALSE(contains(level, "needs density")) << level;
  EXPECT_TRUE(contains(quality_note(0.5, 28), "Only dense exchange reaches S = 28"));
  const std::string short_run = quality_note(0.5, 27);  // no density reaches it
  EXPECT_FALSE(contains(short_run, "Only dense exchange")) << short_run;
  EXPECT_TRUE(short_run.ends_with("from S = 28 on, which takes more steps.")) << short_run;
  EXPECT_THROW(static_cast<void>(quality_note(2.0, 100)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(quality_note(0.0, 100)), InvalidArgument);
}

TEST(quality, lines_fit_a_terminal) {
  for (const double density : {1e-5, 0.003, 0.01, 0.028, 0.5, 1.0}) {
    std::istringstream lines(quality_note(density, 1000));
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100U) << line;
  }
}

}  // namespace
}  // namespace skim
