// The parts of a run that watch it: losses, slow ranks, times, values of all ranks.
#include "train/loop.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "skim/error.hpp"
#include "train/gather.hpp"
#include "train/stragglers.hpp"
#include "train/watchdog.hpp"

namespace skim::train {
namespace {

// The index of the first loss at which the watchdog speaks; -1: it does not.
int first_alarm(Watchdog watchdog, const std::vector<double>& losses) {
  for (std::size_t i = 0; i < losses.size(); ++i) {
    if (watchdog.add(losses[i])) return static_cast<int>(i);
  }
  return -1;
}

std::vector<double> losses(std::size_t n, double value) { return std::vector<double>(n, value); }

TEST(Watchdog, a_jump_is_seen_once_most_of_the_recent_losses_have_it) {
  std::vector<double> all = losses(300, 1.0);
  all.insert(all.end(), 50, 3.1);
  // 5 of 10 give a median of 2.05, and 6 of 3.1.
  EXPECT_EQ(first_alarm(Watchdog(3.0), all), 305);
  EXPECT_EQ(first_alarm(Watchdog(3.2), all), -1);
}

TEST(Watchdog, single_outliers_and_slow_changes_are_no_alarm) {
  std::vector<double> all;
  for (int i = 0; i < 2000; ++i) {
    const bool outlier = i % 4 == 0;
    all.push_back(outlier ? 1000.0 : 1.0 + 0.001 * i);
    if (i % 50 == 0) all.back() = std::numeric_limits<double>::quiet_NaN();
  }
  EXPECT_EQ(first_alarm(Watchdog(3.0), all), -1);
}

TEST(Watchdog, needs_some_losses_before_it_compares) {
  for (const bool enough : {false, true}) {
    std::vector<double> all = losses(Watchdog::kFewest - (enough ? 0 : 1), 1.0);
    all.insert(all.end(), Watchdog::kRecent, 100.0);
    EXPECT_EQ(first_alarm(Watchdog(3.0), all) >= 0, enough);
  }
}

// Otherwise a run that goes back and diverges again would be compared with nothing.
TEST(Watchdog, still_compares_after_a_rollback) {
  Watchdog watchdog(3.0);
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(watchdog.add(1.0));
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(watchdog.add(9.0));
  EXPECT_TRUE(watchdog.add(9.0));
  watchdog.forget(20);
  EXPECT_EQ(watchdog.recent(), 1.0);
  for (int i = 0; i < 14; ++i) EXPECT_FALSE(watchdog.add(1.0));
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(watchdog.add(9.0));
  EXPECT_TRUE(watchdog.add(9.0));
  watchdog.forget(1000);
  EXPECT_EQ(watchdog.recent(), 0.0);
}

TEST(Watchdog, losses_that_are_not_finite_are_an_alarm_from_the_start) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(first_alarm(Watchdog(3.0), losses(30, nan)), Watchdog::kRecent - 1);
  std::vector<double> half = losses(100, 1.0);
  for (std::size_t i = 0; i < half.size(); i += 2) half[i] = i % 4 == 0 ? nan : 1.0 / 0.0;
  EXPECT_GE(first_alarm(Watchdog(3.0), half), 9);
}

TEST(Stragglers, the_slowest_rank_is_charged_with_what_the_median_of_the_others_waited) {
  Stragglers s;
  EXPECT_EQ(s.add(std::vector{1.0, 2.0, 3.0, 7.0}, 10.0), "");
  EXPECT_EQ(s.add(std::vector{5.0, 2.0, 4.0, 2.0}, 12.0), "");
  EXPECT_EQ(s.waited(), (std::vector{3.0, 0.0, 0.0, 5.0}));
  EXPECT_EQ(s.seconds(), 22.0);
}

TEST(Stragglers, a_lasting_one_is_named_once) {
  Stragglers s;
  const std::vector slow{1.0, 2.5, 1.0}, even{1.0, 1.9, 1.0};
  for (int i = 0; i < 5; ++i) EXPECT_EQ(s.add(slow, 10.0), "");
  EXPECT_EQ(s.add(even, 10.0), "") << "a break";
  for (int i = 0; i < 5; ++i) EXPECT_EQ(s.add(slow, 10.0), "");
  const std::string told = s.add(slow, 10.0);
  EXPECT_NE(told.find("rank 1 has been slow for 60 s"), std::string::npos) << told;
  EXPECT_NE(told.find("2.5 times"), std::string::npos) << told;
  for (int i = 0; i < 20; ++i) EXPECT_EQ(s.add(slow, 10.0), "");
  EXPECT_EQ(s.add(even, 10.0), "");
  for (int i = 0; i < 5; ++i) EXPECT_EQ(s.add(slow, 10.0), "");
  EXPECT_NE(s.add(slow, 10.0), "");
}

TEST(Stragglers, a_server_is_no_rank_that_computes_less) {
  Stragglers s(1);
  const std::vector compute{0.5, 1.0, 3.0, 1.0};
  for (int i = 0; i < 5; ++i) EXPECT_EQ(s.add(compute, 10.0), "");
  const std::string told = s.add(compute, 10.0);
  EXPECT_NE(told.find("rank 2 has been slow"), std::string::npos) << told;
  EXPECT_NE(told.find("3.0 times"), std::string::npos) << told;
  EXPECT_EQ(s.waited(), (std::vector{0.0, 0.0, 12.0, 0.0}));
  Stragglers alone(1);
  EXPECT_EQ(alone.add(std::vector{0.5, 1.0}, 10.0), "");
  EXPECT_EQ(alone.waited(), (std::vector{0.0, 0.0}));
}

TEST(Stragglers, one_rank_waits_for_nobody) {
  Stragglers s;
  for (int i = 0; i < 20; ++i) EXPECT_EQ(s.add(std::vector{3.0}, 10.0), "");
  EXPECT_EQ(s.waited(), std::vector{0.0});
}

TEST(StepTimes, medians_of_a_long_run_come_from_all_of_it) {
  StepTimes times;
  constexpr int kSteps = 1'000'000;
  for (int i = 0; i < kSteps; ++i) {
    StepRecord r;
    r.step_ms = i;
    r.compute_ms = kSteps - i;
    times.add(r);
  }
  StepRecord medians;
  times.medians(medians);
  EXPECT_NEAR(medians.step_ms, kSteps / 2, 0.01 * kSteps);
  EXPECT_NEAR(medians.compute_ms, kSteps / 2, 0.01 * kSteps);
}

TEST(StepTimes, medians_of_a_short_run_are_exact) {
  StepTimes times;
  for (const double ms : {5.0, 1.0, 9.0}) {
    StepRecord r;
    r.step_ms = ms;
    times.add(r);
  }
  StepRecord medians;
  times.medians(medians);
  EXPECT_EQ(medians.step_ms, 5.0);
}

TEST(StepTimes, a_round_counts_as_its_mean_step) {
  const auto of_steps = [](std::initializer_list<double> all, StepTimes times) {
    for (const double ms : all) {
      StepRecord r;
      r.exchange_ms = ms;
      times.add(r);
    }
    StepRecord medians;
    times.medians(medians);
    return medians.exchange_ms;
  };
  EXPECT_EQ(of_steps({0, 0, 3, 0, 0, 6, 0, 0, 30, 0, 0}, StepTimes(3)), 2.0);
  EXPECT_EQ(of_steps({0, 5}, StepTimes(3)), 2.5) << "no round has ended";
  EXPECT_EQ(of_steps({}, StepTimes(3)), 0.0);
}

TEST(TargetTime, counts_the_computing_of_all_steps_of_a_round) {
  TrainOptions o;
  o.exchange.kind = ExchangeKind::allgather;
  o.density.kind = DensityRule::Kind::adaptive;
  o.local_steps = 8;
  o.steps = 80;
  o.compute = Duration{0.02};
  o.chooser.link = Link{};
  const auto first = [&](double seconds) {
    o.target_time.seconds = seconds;
    const auto schedule = density_schedule(o, 4, {1000}, run_length(o, 100));
    return schedule->density({.step = 0, .total_steps = 10}).up;
  };
  EXPECT_GT(first(1.61), 0.0);
  EXPECT_THROW(first(1.59), InvalidArgument);
}

TEST(RunLength, more_epochs_than_steps_can_count_are_no_short_run) {
  TrainOptions o;
  o.epochs = o.eval_epochs = 1e300;
  const RunLength length = run_length(o, 10);
  EXPECT_EQ(length.total, std::int64_t{1} << 53);
  EXPECT_EQ(length.evaluation, std::int64_t{1} << 53);
}

TEST(gather, values_come_by_rank) {
  auto comms = make_in_process_group(3);
  std::vector<std::jthread> ranks;
  for (auto& comm : comms) {
    ranks.emplace_back([&comm] {
      EXPECT_EQ(gather_values(10 * comm->rank(), *comm), (std::vector{0, 10, 20}));
      const std::string text(static_cast<std::size_t>(comm->rank()), 'x');
      EXPECT_EQ(gather_texts(text, *comm), (std::vector<std::string>{"", "x", "xx"}));
    });
  }
}

TEST(gather, a_value_of_another_length_names_its_rank) {
  auto comms = make_in_process_group(2);
  std::vector<std::jthread> ranks;
  ranks.emplace_back([&] {
    try {
      gather_values(1.0, *comms[0]);
      ADD_FAILURE() << "the value of rank 1 was taken";
    } catch (const CommError& e) {
      EXPECT_EQ(e.peer(), 1);
    }
  });
  ranks.emplace_back([&] { EXPECT_THROW(gather_values('x', *comms[1]), CommError); });
}

}  // namespace
}  // namespace skim::train
