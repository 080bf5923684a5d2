// Ranks come and go: nothing that anyone kept is lost or counted twice, wherever a rank is lost.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "fault.hpp"
#include "group.hpp"
#include "oracle.hpp"
#include "parts.hpp"
#include "skim/error.hpp"
#include "skim/reducer.hpp"

namespace skim {
namespace {

using Floats = std::vector<float>;
using Sum = std::vector<double>;

const std::vector<std::size_t> kSizes{640, 40, 400};
constexpr int kWarmSteps = 2;

// The second bucket goes dense.
ReducerOptions options_of(ExchangeKind kind, float momentum) {
  ReducerOptions o;
  o.exchange.kind = kind;
  o.dense_below = 64;
  o.feedback.momentum_correction = momentum;
  return o;
}

std::unique_ptr<Reducer> reducer_of(ExchangeKind kind, Communicator& comm, float momentum = 0.0F) {
  ReducerParts parts;
  parts.schedule = constant_density(0.05);
  auto reducer = std::make_unique<Reducer>(options_of(kind, momentum), std::move(parts), comm);
  reducer->set_layout(test::buckets(kSizes));
  return reducer;
}

std::vector<Floats> gradients(int step, int rank) {
  std::vector<Floats> grads;
  for (std::size_t s = 0; s < kSizes.size(); ++s) {
    grads.push_back(test::normal(kSizes[s], 1000 * s + 10 * static_cast<std::size_t>(step) +
                                                static_cast<std::size_t>(rank)));
  }
  return grads;
}

void add(Sum& to, const Floats& values, double factor = 1.0) {
  to.resize(std::max(to.size(), values.size()));
  for (std::size_t i = 0; i < values.size(); ++i) to[i] += factor * double{values[i]};
}
void expect_equal(const Sum& a, const Sum& b) {
  ASSERT_EQ(a.size(), b.size());
  double most = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  EXPECT_LT(most, 2e-5);
}

// All slots in a row.
Sum in_a_row(const std::vector<Floats>& of_slots) {
  Floats all;
  for (const Floats& f : of_slots) all.insert(all.end(), f.begin(), f.end());
  Sum sum;
  add(sum, all);
  return sum;
}
Sum kept_by(Reducer& reducer) {
  std::vector<Floats> kept;
  for (Slot s = 0; s < kSizes.size(); ++s) kept.push_back(test::kept_by(reducer, s));
  return in_a_row(kept);
}
Sum operator+(Sum a, const Sum& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}
Sum operator*(double factor, Sum a) {
  for (double& x : a) x *= factor;
  return a;
}

std::string saved(const Reducer& reducer) {
  std::ostringstream out;
  reducer.save(out);
  return out.str();
}
void take_over(Reducer& reducer, const std::vector<std::string>& states, float share) {
  std::vector<std::istringstream> streams;
  for (const std::string& s : states) streams.emplace_back(s);
  std::vector<std::istream*> pointers;
  for (std::istringstream& s : streams) pointers.push_back(&s);
  reducer.take_over(pointers, share);
}

// Reduces every bucket. `busiest` becomes the bytes that the busiest rank sent before the step, as
// the ranks told one another. After a failure the gradients of the buckets that had been reduced are
// zeros, as the residual has them.
bool reduce_all(Reducer& reducer, std::vector<Floats>& grads, std::uint64_t* busiest = nullptr) {
  Slot s = 0;
  try {
    for (; s < kSizes.size(); ++s) {
      const StepReport report = reducer.reduce(s, std::span(grads[s]));
      if (busiest != nullptr) *busiest = report.group.sent_bytes;
    }
  } catch (const CommError&) {
    while (s > 0) std::ranges::fill(grads[--s], 0.0F);
    return false;
  }
  return true;
}

// What a rank has after a step in which another one was lost.
struct After {
  std::string state;
  Sum kept;
  std::vector<Floats> untaken;
  std::uint64_t step = 0;
  std::uint64_t sent_bytes = 0;  // in all steps
};

// The sends of a rank: those of the warm steps, and with those of the step after them.
struct Sends {
  std::uint64_t warm = 0, all = 0;
};

// Runs the warm steps and one more, in which `victim` fails at its at_send-th send, counted from
// the start of the run. What the others then have; nothing for a rank that is lost.
std::vector<std::optional<After>> lose(ExchangeKind kind, int ranks, int victim,
                                       std::uint64_t at_send, Sends* sends = nullptr) {
  std::vector<std::optional<After>> all(static_cast<std::size_t>(ranks));
  std::barrier warmed(ranks);  // the failure must not catch a rank in the steps before
  test::run_threads(ranks, [&](Communicator& comm) {
    const int rank = comm.rank();
    test::FaultyCommunicator faulty(
        comm, {.fault = rank == victim ? test::Fault::raise : test::Fault::none,
               .at_send = at_send,
               .until = {}});
    const auto reducer = reducer_of(kind, faulty);
    for (int step = 0; step < kWarmSteps; ++step) {
      auto grads = gradients(step, rank);
      ASSERT_TRUE(reduce_all(*reducer, grads));
      ASSERT_TRUE(reducer->end_step(0.0));
    }
    warmed.arrive_and_wait();
    if (rank == victim && sends != nullptr) sends->warm = faulty.sends();
    const Sum before = kept_by(*reducer);
    auto grads = gradients(kWarmSteps, rank);
    const Sum mine = in_a_row(grads);
    const bool reduced = reduce_all(*reducer, grads);
    if (rank == victim && sends != nullptr) sends->all = faulty.sends();
    if (rank == victim) return;
    // Whoever got through gives the step up, too.
    if (reduced) {
      for (Floats& g : grads) std::ranges::fill(g, 0.0F);
    }
    reducer->abandon_step(0.0);
    expect_equal(kept_by(*reducer) + in_a_row(grads), before + mine);
    all[static_cast<std::size_t>(rank)] = {saved(*reducer), kept_by(*reducer), grads,
                                           reducer->step(), faulty.traffic().sent_bytes};
  });
  return all;
}

// The ranks that are left, and `joiners` new ones, take the step again.
void go_on(ExchangeKind kind, const std::vector<std::optional<After>>& before, int joiners) {
  std::vector<const After*> left;
  for (const auto& a : before) {
    if (a) left.push_back(&*a);
  }
  const int ranks = static_cast<int>(left.size()) + joiners;
  const float share = static_cast<float>(ranks) / static_cast<float>(before.size());
  std::uint64_t most = 0;
  for (const After* a : left) most = std::max(most, a->sent_bytes);
  test::run_threads(ranks, [&](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    const bool joins = rank >= left.size();
    const auto reducer = reducer_of(kind, comm);
    const After& mine = *left[joins ? 0 : rank];
    take_over(*reducer, {mine.state}, joins ? 0.0F : share);
    EXPECT_EQ(reducer->step(), mine.step);
    const Sum owed = kept_by(*reducer);
    expect_equal(owed, (joins ? 0.0 : double{share}) * mine.kept);
    auto grads = joins ? gradients(kWarmSteps, 77) : mine.untaken;
    const Sum given = in_a_row(grads);
    std::uint64_t busiest = 0;
    ASSERT_TRUE(reduce_all(*reducer, grads, &busiest));
    ASSERT_TRUE(reducer->end_step(0.0));
    EXPECT_EQ(busiest, most);

    Sum all_given, all_kept, delivered = in_a_row(grads);
    const auto floats = [](const Sum& sum) { return Floats(sum.begin(), sum.end()); };
    for (const Floats& f : test::gather(comm, floats(owed + given))) add(all_given, f);
    for (const Floats& f : test::gather(comm, floats(kept_by(*reducer)))) add(all_kept, f);
    expect_equal(all_kept + static_cast<double>(ranks) * delivered, all_given);
    for (const Floats& f : test::gather(comm, floats(delivered))) {
      EXPECT_TRUE(test::same_bits(f, floats(delivered)));
    }
  });
}

TEST(membership, a_lost_rank_takes_only_what_was_its_own) {
  for (const ExchangeKind kind : test::kinds_of_table()) {
    for (const int victim : {0, 2, 3}) {
      Sends sends;
      lose(kind, 4, victim, std::numeric_limits<std::uint64_t>::max(), &sends);
      ASSERT_GT(sends.all, sends.warm);
      const std::uint64_t stride = test::kSanitized ? 3 : 1;
      for (std::uint64_t at = sends.warm; at < sends.all; at += stride) {
        SCOPED_TRACE(std::string(name_of(kind)) + ", rank " + std::to_string(victim) + ", send " +
                     std::to_string(at - sends.warm));
        const auto left = lose(kind, 4, victim, at);
        for (const int joiners : {0, 1}) go_on(kind, left, joiners);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(membership, who_leaves_hands_over_what_it_kept) {
  for (const ExchangeKind kind : test::kinds_of_table()) {
    SCOPED_TRACE(name_of(kind));
    // Nobody fails: the step is given up by all, and its gradients stay in the residuals.
    auto all = lose(kind, 3, -1, 0);
    Sum owed;
    for (const auto& a : all) owed = owed.empty() ? a->kept : owed + a->kept;
    test::run_threads(2, [&](Communicator& comm) {
      const auto rank = static_cast<std::size_t>(comm.rank());
      const auto reducer = reducer_of(kind, comm);
      std::vector<std::string> states{all[rank]->state};
      if (rank == 0) states.push_back(all[2]->state);
      take_over(*reducer, states, 2.0F / 3.0F);
      Sum now;
      const Sum mine = kept_by(*reducer);
      for (const Floats& f : test::gather(comm, Floats(mine.begin(), mine.end()))) add(now, f);
      expect_equal(now, (2.0 / 3.0) * owed);
    });
  }
}

TEST(membership, step_and_statistics_are_those_of_the_first_state) {
  const auto group = make_in_process_group(1);
  Progress seen;
  const auto train_one = [&](double epoch, int gradient) {
    const auto reducer = reducer_of(ExchangeKind::allgather, *group[0]);
    auto grads = gradients(0, gradient);
    EXPECT_TRUE(reduce_all(*reducer, grads));
    reducer->end_step(epoch);
    return saved(*reducer);
  };
  const std::string a = train_one(1.5, 0), b = train_one(7.5, 1);
  const auto after_taking = [&](const std::vector<std::string>& states) {
    ReducerParts parts;
    parts.schedule = std::make_unique<test::ScheduleBy>([&](const Progress& p) {
      seen = p;
      return Density{.up = 0.05};
    });
    Reducer reducer(options_of(ExchangeKind::allgather, 0.0F), std::move(parts), *group[0]);
    reducer.set_layout(test::buckets(kSizes));
    take_over(reducer, states, 0.5F);
    return seen;
  };
  const Progress of_a = after_taking({a}), of_b = after_taking({b});
  EXPECT_NE(of_a.last.gradient_norm2, of_b.last.gradient_norm2);
  for (const auto& [states, first] : {std::pair(std::vector{a, b}, of_a),
                                      std::pair(std::vector{b, a}, of_b)}) {
    const Progress p = after_taking(states);
    EXPECT_EQ(p.step, 1U);
    EXPECT_EQ(p.epoch, first.epoch);
    EXPECT_EQ(p.last.gradient_norm2, first.last.gradient_norm2);
  }
}

TEST(membership, velocities_are_taken_over_like_residuals) {
  const auto group = make_in_process_group(1);
  const auto before = reducer_of(ExchangeKind::allgather, *group[0], 0.9F);
  auto grads = gradients(0, 0);
  ASSERT_TRUE(reduce_all(*before, grads));
  before->end_step(0.0);
  const auto after = reducer_of(ExchangeKind::allgather, *group[0], 0.9F);
  take_over(*after, {saved(*before)}, 0.5F);
  for (Slot s = 0; s < kSizes.size(); ++s) {
    Sum was, is;
    const std::span<float> v = before->local().velocity(s).span();
    add(was, {v.begin(), v.end()});
    const std::span<float> w = after->local().velocity(s).span();
    add(is, {w.begin(), w.end()});
    ASSERT_GT(std::ranges::max(was), 0.0);
    expect_equal(is, 0.5 * was);
  }
}

TEST(membership, what_cannot_be_taken_over_is_refused_and_changes_nothing) {
  const auto group = make_in_process_group(1);
  const auto reducer = reducer_of(ExchangeKind::allgather, *group[0]);
  auto grads = gradients(0, 0);
  ASSERT_TRUE(reduce_all(*reducer, grads));
  EXPECT_THROW(take_over(*reducer, {"x"}, 1.0F), InvalidArgument);  // a step is open
  reducer->end_step(0.0);
  const std::string state = saved(*reducer);
  const Sum kept = kept_by(*reducer);
  EXPECT_THROW(take_over(*reducer, {}, 1.0F), InvalidArgument);
  EXPECT_THROW(take_over(*reducer, {state}, -1.0F), InvalidArgument);
  EXPECT_THROW(take_over(*reducer, {state}, std::numeric_limits<float>::quiet_NaN()),
               InvalidArgument);
  EXPECT_THROW(take_over(*reducer, {state, state.substr(0, state.size() / 2)}, 1.0F), StateError);
  EXPECT_TRUE(saved(*reducer) == state);
  expect_equal(kept_by(*reducer), kept);
}

}  // namespace
}  // namespace skim
