// The spans of a run: clocks of the ranks, the limit of steps, the order of the parts.
#include "train/trace.hpp"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "skim/communicator.hpp"

namespace skim::train {
namespace {

// Runs body(comm) as every rank of a group of threads.
template <class Body>
void run_ranks(int size, Body&& body) {
  auto comms = make_in_process_group(size);
  std::vector<std::jthread> ranks;
  for (auto& comm : comms) ranks.emplace_back([&body, &comm] { body(*comm); });
}

TEST(trace, offsets_of_clocks_are_within_their_bound) {
  constexpr std::int64_t kHour = 3'600'000'000'000;
  std::vector<ClockOffset> found;
  run_ranks(4, [&](Communicator& comm) {
    const auto own = [&] { return comm.now_ns() - comm.rank() * kHour; };
    auto offsets = compare_clocks(comm, own);
    if (comm.rank() == 0) {
      found = std::move(offsets);
    } else {
      EXPECT_TRUE(offsets.empty());
    }
  });
  ASSERT_EQ(found.size(), 4U);
  for (std::size_t r = 0; r < found.size(); ++r) {
    const std::int64_t error = found[r].offset_ns + static_cast<std::int64_t>(r) * kHour;
    EXPECT_LE(std::abs(error), found[r].bound_ns) << "rank " << r;
    EXPECT_LT(found[r].bound_ns, kHour / 3600);
  }
}

TEST(trace, a_clock_that_drifts_is_corrected_between_both_comparisons) {
  // The rank's clock is 5 us ahead at first, and gains 1 ns in 1000.
  const ClockOffset first{.at_ns = 0, .offset_ns = 5'000, .bound_ns = 1};
  const ClockOffset last{.at_ns = 1'001'000'000, .offset_ns = 1'005'000, .bound_ns = 1};
  EXPECT_EQ(on_clock_of_rank_0(0, first, last), -5'000);
  EXPECT_EQ(on_clock_of_rank_0(1'001'000'000, first, last), 999'995'000);
  EXPECT_EQ(on_clock_of_rank_0(500'500'000, first, last), 499'995'000);
  EXPECT_EQ(on_clock_of_rank_0(7'000, first, first), 2'000);
}

// A step of 2 buckets that begins at `begin_ns` and takes 10 ms on the training thread.
void add_step(Trace& trace, std::int64_t step, std::int64_t begin_ns, bool optimizer_is_first) {
  StepRecord r;
  r.step = step;
  r.compute_ms = 6.0;
  r.exposed_ms = 2.5;
  r.optimizer_ms = 0.5;
  std::vector<StepReport> reports(2);
  for (Slot b = 0; b < 2; ++b) {
    reports[b].id.slot = b;
    reports[b].select_ns = 100 + b;
    reports[b].exchange_ns = 200 + b;
    reports[b].apply_ns = 300 + b;
    for (const char* phase : {"select", "exchange", "apply"}) trace.on_phase(phase);
    trace.on_phase(nullptr);  // the bucket's end
  }
  const std::chrono::steady_clock::time_point begin{std::chrono::nanoseconds(begin_ns)};
  trace.add({r, begin, begin + std::chrono::milliseconds(1), reports, optimizer_is_first});
}

TEST(trace, the_parts_of_a_step_follow_one_another) {
  for (const bool optimizer_is_first : {false, true}) {
    auto comms = make_in_process_group(1);
    Trace trace(*comms[0]);
    const std::int64_t before = comms[0]->now_ns();
    add_step(trace, 7, 50'000'000, optimizer_is_first);
    const auto all = trace.gather();
    ASSERT_EQ(all.size(), 1U);
    const std::vector<Span>& spans = all[0].spans;
    ASSERT_EQ(spans.size(), 4U + 2U * 3U);
    const std::vector<Work> training{Work::batch, Work::compute,
                                     optimizer_is_first ? Work::optimizer : Work::exposed,
                                     optimizer_is_first ? Work::exposed : Work::optimizer};
    const std::array communication{Work::select, Work::exchange, Work::apply};
    for (std::size_t i = 0; i < training.size(); ++i) EXPECT_EQ(spans[i].work, training[i]);
    for (std::size_t i = 1; i < training.size(); ++i) {
      EXPECT_EQ(spans[i].begin_ns, spans[i - 1].begin_ns + spans[i - 1].length_ns) << i;
    }
    EXPECT_EQ(spans[0].begin_ns, 50'000'000);
    EXPECT_EQ(spans[3].begin_ns + spans[3].length_ns, 60'000'000);
    for (std::size_t i = 4; i < spans.size(); ++i) {
      const auto bucket = static_cast<Slot>((i - 4) / 3);
      const std::size_t phase = (i - 4) % 3;
      EXPECT_EQ(spans[i].work, communication[phase]);
      EXPECT_EQ(spans[i].length_ns, static_cast<std::int64_t>(100 * (1 + phase) + bucket));
      EXPECT_EQ(spans[i].bucket, bucket);
      EXPECT_LE(spans[i].begin_ns, comms[0]->now_ns());
      EXPECT_GE(spans[i].begin_ns, i > 4 ? spans[i - 1].begin_ns : before);
    }
    for (const Span& s : spans) EXPECT_EQ(s.step, 7);
  }
}

TEST(trace, the_latest_steps_of_every_rank_stay) {
  constexpr auto kAll = static_cast<std::int64_t>(Trace::kSteps) + 50;
  std::vector<RankTrace> found;
  run_ranks(3, [&](Communicator& comm) {
    Trace trace(comm);
    for (std::int64_t s = 1; s <= kAll; ++s) add_step(trace, s, s * 10'000'000, false);
    auto all = trace.gather();
    if (comm.rank() == 0) {
      found = std::move(all);
    } else {
      EXPECT_TRUE(all.empty());
    }
  });
  ASSERT_EQ(found.size(), 3U);
  for (const RankTrace& rank : found) {
    EXPECT_EQ(rank.spans.size(), 10 * Trace::kSteps);
    EXPECT_EQ(rank.spans.front().step, 51);
    EXPECT_EQ(rank.spans.back().step, kAll);
  }
}

}  // namespace
}  // namespace skim::train
