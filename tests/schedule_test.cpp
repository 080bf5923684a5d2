// schedule.hpp: densities over training, and how many entries that makes.
#include "skim/schedule.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "skim/error.hpp"

namespace skim {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

double at(DensitySchedule& s, double epoch) { return s.density({.epoch = epoch}).up; }

TEST(schedule, constant) {
  const auto s = constant_density(0.01, 0.02);
  for (const double epoch : {0.0, 0.5, 100.0}) {
    EXPECT_EQ(s->density({.epoch = epoch}).up, 0.01);
    EXPECT_EQ(s->density({.epoch = epoch}).down, 0.02);
    EXPECT_EQ(s->density({.epoch = epoch}).threshold, 0.0F);
  }
  EXPECT_EQ(s->describe(), "0.01");
  EXPECT_EQ(constant_density(1.0)->density({}).up, 1.0);
  EXPECT_EQ(constant_density(1.0)->density({}).down, 0.0);
}

// The lists as the papers and their released settings have them.
TEST(schedule, lists_of_the_papers) {
  struct Row {
    std::vector<double> warm_up, by_epoch;
    std::string text;
  };
  const std::vector<Row> rows = {
      {dgc_warm_up(),
       {0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001},
       "0.25 0.0625 0.015625 0.004 then 0.001"},
      {gaussiank_warm_up(), {0.015625, 0.004, 0.001, 0.001}, "0.015625 0.004 0.001 then 0.001"},
      {gtopk_warm_up(), {0.004, 0.001, 0.001}, "0.004 then 0.001"},
  };
  for (const Row& row : rows) {
    const auto s = listed_density(row.warm_up, 0.001);
    EXPECT_EQ(s->describe(), row.text);
    for (std::size_t e = 0; e < row.by_epoch.size(); ++e) {
      EXPECT_EQ(at(*s, static_cast<double>(e)), row.by_epoch[e]) << row.text << " epoch " << e;
      EXPECT_EQ(at(*s, static_cast<double>(e) + 0.999), row.by_epoch[e]) << row.text;
    }
    EXPECT_EQ(at(*s, 1e18), 0.001);
  }
  EXPECT_EQ(at(*listed_density({}, 0.5), 0.0), 0.5);
}

TEST(schedule, geometric_formula) {
  const auto s = geometric_density(0.25, 0.001, 4.0);
  EXPECT_EQ(at(*s, 0.0), 0.25);
  EXPECT_EQ(at(*s, 4.0), 0.001);
  EXPECT_EQ(at(*s, 1000.0), 0.001);
  for (const double epoch : {0.5, 1.0, 2.0, 3.0, 3.99}) {
    EXPECT_DOUBLE_EQ(at(*s, epoch), 0.25 * std::pow(0.001 / 0.25, epoch / 4.0));
    EXPECT_NEAR(std::log(at(*s, epoch)),
                std::log(0.25) + epoch / 4.0 * (std::log(0.001) - std::log(0.25)), 1e-12);
  }
  EXPECT_EQ(s->describe(), "0.25 to 0.001 over 4 epochs");
  EXPECT_EQ(at(*geometric_density(0.25, 0.001, 0.0), 0.0), 0.001) << "no epochs: at once";
  const auto rises = geometric_density(0.3, 1.0, 1.0);
  EXPECT_LE(at(*rises, std::nextafter(1.0, 0.0)), 1.0);
}

// A schedule is only asked for a density that a Reducer can use.
TEST(schedule, odd_epochs_count_as_the_start) {
  for (const double epoch : {-1.0, -1e300, -kInf, kNan}) {
    EXPECT_EQ(at(*listed_density({0.25, 0.5}, 0.001), epoch), 0.25) << epoch;
    EXPECT_EQ(at(*geometric_density(0.25, 0.001, 4.0), epoch), 0.25) << epoch;
  }
  EXPECT_EQ(at(*listed_density({0.25, 0.5}, 0.001), kInf), 0.001);
  EXPECT_EQ(at(*geometric_density(0.25, 0.001, 4.0), kInf), 0.001);
}

TEST(schedule, refuses_bad_densities) {
  for (const double bad : {0.0, -0.1, 1.0000001, kNan, kInf, -kInf}) {
    EXPECT_THROW(constant_density(bad), InvalidArgument) << bad;
    EXPECT_THROW(listed_density({0.5, bad}, 0.001), InvalidArgument) << bad;
    EXPECT_THROW(listed_density({0.5}, bad), InvalidArgument) << bad;
    EXPECT_THROW(geometric_density(bad, 0.001, 1.0), InvalidArgument) << bad;
    EXPECT_THROW(geometric_density(0.1, bad, 1.0), InvalidArgument) << bad;
    EXPECT_THROW(entries(bad, 100), InvalidArgument) << bad;
    if (bad != 0.0) {  // down 0 means: as up
      EXPECT_THROW(constant_density(0.1, bad), InvalidArgument) << bad;
    }
  }
  for (const double bad : {-1.0, kNan, kInf}) {
    EXPECT_THROW(geometric_density(0.1, 0.01, bad), InvalidArgument) << bad;
  }
  try {
    constant_density(1.5);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const InvalidArgument& e) {
    EXPECT_NE(
        std::string(e.what()).find("constant_density: a density must lie in (0, 1] (got 1.5)"),
        std::string::npos)
        << e.what();
  }
}

TEST(schedule, entries_rounds_down_but_not_to_nothing) {
  struct Row {
    double density;
    std::size_t n, k;
  };
  for (const Row& row : std::vector<Row>{
           {0.29, 100, 29},  // 28.999999999999996 in floating point
           {0.57, 100, 57},  // 56.99999999999999
           {0.001, 25557032, 25557},
           {0.001, 1000, 1},
           {0.001, 999, 1},  // at least one
           {1e-12, 10, 1},
           {0.999, 1000, 999},
           {0.9999, 1000, 999},
           {1.0, 7, 7},
           {1.0 - 1e-12, 100, 100},
           {0.5, 1, 1},
           {0.5, 3, 1},
           {0.3, 0, 0},
           {1.0, 0, 0},
           {1.0, 4294967295U, 4294967295U},
           {0.5, 4294967295U, 2147483647U},
       }) {
    EXPECT_EQ(entries(row.density, row.n), row.k) << row.density << " of " << row.n;
  }
  // Every hundredth of a hundred is the whole number it is written as.
  for (std::size_t percent = 1; percent <= 100; ++percent) {
    EXPECT_EQ(entries(static_cast<double>(percent) / 100.0, 100), percent);
    EXPECT_EQ(entries(static_cast<double>(percent) / 100.0, 10000), 100 * percent);
    EXPECT_EQ(entries(static_cast<double>(percent) / 100.0, 100'000'000), 1'000'000 * percent);
    EXPECT_EQ(entries(static_cast<double>(percent) / 100.0, 4'000'000'000), 40'000'000 * percent);
  }
}

TEST(schedule, with_down_density_changes_nothing_but_the_downlink) {
  const auto plain = geometric_density(0.25, 0.01, 2.0);
  const auto both = with_down_density(geometric_density(0.25, 0.01, 2.0), 0.002);
  for (std::uint64_t step = 0; step < 8; ++step) {
    const Progress p{.step = step, .epoch = 0.5 * static_cast<double>(step)};
    EXPECT_EQ(both->density(p).up, plain->density(p).up);
    EXPECT_EQ(both->density(p).down, 0.002);
  }
  EXPECT_EQ(both->describe(), plain->describe() + ", 0.002 of the result");
  struct WithBudget final : DensitySchedule {
    Density density(const Progress&) override { return {.up = 0.1}; }
    std::string describe() const override { return "a budget"; }
    double spent() const noexcept override { return 0.75; }
    double max_bytes(const Density& d) const override { return 1000.0 * d.up; }
  };
  const auto of_budget = with_down_density(std::make_unique<WithBudget>(), 0.002);
  EXPECT_EQ(of_budget->spent(), 0.75);
  EXPECT_EQ(of_budget->max_bytes({.up = 0.5}), 500.0);
  EXPECT_LT(both->spent(), 0.0);
  EXPECT_THROW(with_down_density(nullptr, 0.1), InvalidArgument);
  EXPECT_THROW(with_down_density(constant_density(0.1), 0.0), InvalidArgument);
}

}  // namespace
}  // namespace skim
