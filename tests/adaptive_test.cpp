// Densities that follow what is measured: the law of the budget over every exchange, how near the
// optimum they come where it is known, and the rules to compare them with.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numbers>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "allocations.hpp"
#include "group.hpp"
#include "oracle.hpp"
#include "parts.hpp"
#include "skim/analysis.hpp"
#include "skim/error.hpp"
#include "skim/reducer.hpp"
#include "skim/schedule.hpp"

namespace skim {
namespace {

using test::buckets;
using Floats = std::vector<float>;

constexpr std::array kForms{AdaptiveForm::even, AdaptiveForm::water_filling, AdaptiveForm::laplace,
                            AdaptiveForm::measured, AdaptiveForm::feedback};

// ---- the law over groups ----------------------------------------------------------------------

const std::vector<std::size_t> kLengths{1500, 40, 600};  // one of them below dense_below

struct Case {
  ExchangeOptions exchange = {};
  int ranks = 2;
  AdaptiveForm form = AdaptiveForm::laplace;
  double mean_density = 0.03;  // the budget is what all steps cost at this one
  std::uint64_t steps = 30;
  std::function<double(std::uint64_t)> scale = [](std::uint64_t) { return 1.0; };  // of gradients
  SelectRule select = SelectRule::exact;
  std::uint64_t bad_step = std::numeric_limits<std::uint64_t>::max();    // a NaN on one rank
  std::uint64_t stop_after = std::numeric_limits<std::uint64_t>::max();  // then saved and loaded
  double contraction = 1.0;
  double down = 0.0;
  std::vector<std::size_t> lengths = kLengths;
};

ReducerOptions options_of(const Case& c) {
  ReducerOptions o;
  o.exchange = c.exchange;
  o.select.rule = c.select;
  o.dense_below = 64;
  return o;
}

struct Outcome {
  double budget = 0.0;
  std::uint64_t sent = 0;     // by the busiest rank
  std::uint64_t largest = 0;  // its bytes in one step
  double largest_cost = 0.0;  // what one was allowed
  std::vector<Density> used;  // [step]
};

Outcome run(const Case& c) {
  const StepCost cost = max_step_bytes(options_of(c), c.ranks, c.lengths, c.down);
  Outcome out;
  out.budget = static_cast<double>(c.steps) * cost(c.mean_density);
  const auto p = static_cast<std::size_t>(c.ranks);
  std::vector<std::vector<std::uint64_t>> sent(p);  // [rank][step]
  std::vector<std::vector<Density>> used(p);
  std::vector<std::string> states(p);
  const auto parts = [&] {
    ReducerParts made;
    made.schedule =
        adaptive_density({.form = c.form,
                          .budget = out.budget,
                          .cost = cost,
                          .density_min = 0.002,
                          .density_max = 0.4,
                          .contraction = c.contraction,
                          .n = std::accumulate(c.lengths.begin(), c.lengths.end(), std::size_t{0}),
                          .ranks = c.ranks});
    if (c.down > 0.0) made.schedule = with_down_density(std::move(made.schedule), c.down);
    return made;
  };
  const auto steps = [&](std::uint64_t from, std::uint64_t to) {
    test::run_threads(c.ranks, [&](Communicator& comm) {
      const auto me = static_cast<std::size_t>(comm.rank());
      Reducer reducer(options_of(c), parts(), comm);
      reducer.set_layout(buckets(c.lengths));
      reducer.set_total_steps(c.steps);
      if (from > 0) {
        std::vector<std::istringstream> streams(states.begin(), states.end());
        std::vector<std::istream*> in;
        for (auto& s : streams) in.push_back(&s);
        reducer.load(in);
      }
      for (std::uint64_t step = from; step < to; ++step) {
        used[me].push_back(reducer.density());
        std::uint64_t bytes = 0;
        for (Slot s = 0; s < c.lengths.size(); ++s) {
          Floats g = test::normal(c.lengths[s], 1000 * step + 10 * s + me);
          for (float& v : g) v *= static_cast<float>(c.scale(step)) * v * v;  // a heavier tail
          if (step == c.bad_step && me == 0 && s == 0) g[3] = std::nanf("");
          bytes += reducer.reduce(s, std::span(g)).sent_bytes;
        }
        EXPECT_EQ(reducer.end_step(static_cast<double>(step)), step != c.bad_step);
        sent[me].push_back(bytes);
        EXPECT_LE(static_cast<double>(bytes), cost(used[me].back().up));
      }
      std::ostringstream state;
      reducer.save(state);
      states[me] = state.str();
    });
  };
  steps(0, std::min(c.steps, c.stop_after));
  if (c.stop_after < c.steps) steps(c.stop_after, c.steps);
  for (std::size_t r = 0; r < p; ++r) {
    out.sent =
        std::max(out.sent, std::accumulate(sent[r].begin(), sent[r].end(), std::uint64_t{0}));
    for (const std::uint64_t b : sent[r]) out.largest = std::max(out.largest, b);
    for (std::size_t t = 0; t < used[r].size(); ++t) {
      EXPECT_EQ(used[r][t].up, used[0][t].up) << "rank " << r << ", step " << t;
      EXPECT_EQ(used[r][t].threshold, used[0][t].threshold);
    }
  }
  out.used = used[0];
  for (const Density& d : out.used) out.largest_cost = std::max(out.largest_cost, cost(d.up));
  return out;
}

// Where the bound is what is sent, but for a few bytes, so is the frame that may be missing.
bool has_a_tight_bound(ExchangeKind kind) {
  return kind == ExchangeKind::allgather || kind == ExchangeKind::gtopk ||
         kind == ExchangeKind::gtopk_tree || kind == ExchangeKind::global_topk;
}

void expect_law(const Case& c, const Outcome& got) {
  const auto sent = static_cast<double>(got.sent);
  EXPECT_LE(sent, got.budget);
  const double frame =
      has_a_tight_bound(c.exchange.kind) ? static_cast<double>(got.largest) : got.largest_cost;
  EXPECT_GE(sent, got.budget - frame)
      << "a step: " << got.largest << ", at most " << got.largest_cost;
}

const std::vector<ExchangeKind> kKinds =
    test::kinds_of_table([](const ExchangeRow& row) { return row.make == nullptr; });
ExchangeOptions exchange_of_kind(ExchangeKind kind, bool coded, ValueCode value = ValueCode::f32) {
  ExchangeOptions o{.kind = kind};
  if (!coded) o.codec.index = IndexCode::raw32;
  o.codec.value = value;
  return o;
}

TEST(adaptive, bytes_of_the_busiest_rank_end_within_a_frame_below_the_budget) {
  const std::vector<int> sizes = test::kSanitized ? std::vector{2, 5} : std::vector{2, 3, 4, 5, 8};
  for (const ExchangeKind kind : kKinds) {
    for (const int ranks : sizes) {
      for (const AdaptiveForm form : kForms) {
        for (const bool coded : {false, true}) {
          // A form is arithmetic: the sanitizers see all of them in the tests below.
          if ((coded || test::kSanitized) && form != AdaptiveForm::laplace) continue;
          Case c;
          c.exchange = exchange_of_kind(kind, coded);
          c.ranks = ranks;
          c.form = form;
          // Where the bound is far above what is sent, the latter must still reach the budget.
          if (!has_a_tight_bound(kind)) {
            c.lengths = {10000, 40, 4000};
            c.steps = 50;
          }
          SCOPED_TRACE(std::string(name_of(kind)) + " on " + std::to_string(ranks) + " ranks, " +
                       std::string(name_of(form)) + (coded ? ", coded" : ", raw"));
          expect_law(c, run(c));
        }
      }
    }
  }
}

TEST(adaptive, the_law_holds_for_a_sharded_server_and_a_downlink_of_its_own) {
  for (const int ranks : {2, 3, 5, 8}) {
    for (const ServerPlacement server : {ServerPlacement::rank0, ServerPlacement::sharded}) {
      for (const double down : {0.0, 0.003, 1.0}) {
        Case c;
        c.exchange = exchange_of_kind(ExchangeKind::param_server, false);
        c.exchange.server.placement = server;
        c.ranks = ranks;
        c.form = AdaptiveForm::laplace;
        c.down = down;
        c.lengths = {10000, 40, 4000};
        c.steps = 50;
        SCOPED_TRACE(std::to_string(ranks) + " ranks, down " + std::to_string(down));
        expect_law(c, run(c));
      }
    }
  }
}

TEST(adaptive, the_law_holds_whatever_norms_do) {
  const std::vector<std::pair<std::string, std::function<double(std::uint64_t)>>> scales{
      {"fall", [](std::uint64_t t) { return std::exp(-0.1 * static_cast<double>(t)); }},
      {"rise", [](std::uint64_t t) { return std::exp(0.1 * static_cast<double>(t)); }},
      {"jump up", [](std::uint64_t t) { return t < 20 ? 1.0 : 30.0; }},
      {"jump down", [](std::uint64_t t) { return t < 20 ? 1.0 : 0.03; }},
      {"jump at the end", [](std::uint64_t t) { return t < 37 ? 1.0 : 30.0; }},
      {"scatter", [](std::uint64_t t) { return t % 3 == 0 ? 5.0 : 0.5; }},
  };
  for (const auto& [name, scale] : scales) {
    for (const AdaptiveForm form : kForms) {
      for (const double mean : {0.004, 0.05, 0.3}) {
        for (const double contraction : {1.0, 0.9}) {
          Case c;
          c.exchange = exchange_of_kind(ExchangeKind::gtopk, false);
          c.ranks = 3;
          c.form = form;
          c.steps = 40;
          c.scale = scale;
          c.mean_density = mean;
          c.contraction = contraction;
          SCOPED_TRACE(name + ", " + std::string(name_of(form)) + ", " + std::to_string(mean) +
                       ", " + std::to_string(contraction));
          expect_law(c, run(c));
        }
      }
    }
  }
}

TEST(adaptive, the_law_holds_for_values_in_codes_and_for_every_selector) {
  for (const ValueCode value : {ValueCode::f16, ValueCode::q4}) {
    for (const ExchangeKind kind : {ExchangeKind::allgather, ExchangeKind::gtopk}) {
      Case c;
      c.exchange = exchange_of_kind(kind, true, value);
      c.ranks = 4;
      SCOPED_TRACE(name_of(kind));
      expect_law(c, run(c));
    }
  }
  for (std::size_t rule = 0; rule < names_of<SelectRule>().size(); ++rule) {
    if (static_cast<SelectRule>(rule) == SelectRule::threshold) continue;  // has no k
    Case c;
    c.exchange = exchange_of_kind(ExchangeKind::allgather, false);
    c.select = static_cast<SelectRule>(rule);
    c.steps = 20;
    SCOPED_TRACE(std::string(names_of<SelectRule>()[rule]));
    const Outcome got = run(c);
    EXPECT_LE(static_cast<double>(got.sent), got.budget);
    EXPECT_GE(static_cast<double>(got.sent), got.budget - got.largest_cost);
  }
}

TEST(adaptive, a_step_that_is_skipped_has_spent_its_bytes_and_teaches_nothing_else) {
  for (const AdaptiveForm form : kForms) {
    Case c;
    c.exchange = exchange_of_kind(ExchangeKind::allgather, false);
    c.ranks = 4;
    c.form = form;
    c.bad_step = 7;
    SCOPED_TRACE(name_of(form));
    const Outcome got = run(c);
    expect_law(c, got);
    for (const Density& d : got.used) EXPECT_TRUE(d.up >= 0.002 && d.up <= 0.4) << d.up;
  }
}

TEST(adaptive, a_run_that_stopped_goes_on_as_if_it_had_not) {
  for (const AdaptiveForm form : kForms) {
    for (const std::uint64_t stop : {1U, 2U, 13U, 29U}) {
      Case c;
      c.exchange = exchange_of_kind(ExchangeKind::gtopk, true);
      c.ranks = 3;
      c.form = form;
      c.scale = [](std::uint64_t t) { return 1.0 / (1.0 + 0.1 * static_cast<double>(t)); };
      const Outcome whole = run(c);
      c.stop_after = stop;
      const Outcome parted = run(c);
      SCOPED_TRACE(std::string(name_of(form)) + ", stopped after " + std::to_string(stop));
      expect_law(c, parted);
      EXPECT_EQ(whole.sent, parted.sent);
      ASSERT_EQ(whole.used.size(), parted.used.size());
      for (std::size_t t = 0; t < whole.used.size(); ++t) {
        EXPECT_EQ(whole.used[t].up, parted.used[t].up) << "step " << t;
        EXPECT_EQ(whole.used[t].threshold, parted.used[t].threshold) << "step " << t;
      }
    }
  }
}

// What was spent is known; tail, trend and costs are learned anew.
TEST(adaptive, a_run_that_goes_on_with_another_number_of_ranks_keeps_to_its_budget) {
  for (const int later : {2, 6}) {
    constexpr std::uint64_t kSteps = 40, kStop = 15;
    constexpr int kEarlier = 4;
    const ReducerOptions options{.dense_below = 0};
    const double budget = kSteps * max_step_bytes(options, 6, {1500})(0.02);
    std::vector<std::string> states(kEarlier);
    const auto steps = [&](int ranks, std::uint64_t from, std::uint64_t to,
                           std::uint64_t& busiest) {
      std::vector<std::uint64_t> sent(static_cast<std::size_t>(ranks), 0);
      std::vector<std::string> left(sent.size());
      test::run_threads(ranks, [&](Communicator& comm) {
        const auto me = static_cast<std::size_t>(comm.rank());
        ReducerParts parts;
        parts.schedule = adaptive_density({.budget = budget,
                                           .cost = max_step_bytes(options, ranks, {1500}),
                                           .density_min = 0.002});
        Reducer reducer(options, std::move(parts), comm);
        reducer.set_layout(buckets({1500}));
        reducer.set_total_steps(kSteps);
        if (from > 0) {
          std::vector<std::istringstream> streams(states.begin(), states.end());
          std::vector<std::istream*> in;
          for (auto& s : streams) in.push_back(&s);
          reducer.load(in);
        }
        for (std::uint64_t step = from; step < to; ++step) {
          Floats g = test::normal(1500, 10 * step + me);
          sent[me] += reducer.reduce(0, std::span(g)).sent_bytes;
          EXPECT_TRUE(reducer.end_step(0.0));
        }
        std::ostringstream state;
        reducer.save(state);
        left[me] = state.str();
      });
      states = left;
      busiest += *std::ranges::max_element(sent);
    };
    std::uint64_t busiest = 0;
    steps(kEarlier, 0, kStop, busiest);
    steps(later, kStop, kSteps, busiest);
    EXPECT_LE(static_cast<double>(busiest), budget) << later;
    EXPECT_GT(static_cast<double>(busiest), 0.9 * budget) << later;
  }
}

// The bytes of a step are known one step later. Steps that end otherwise must not hide them.
enum class Gap { rolled_back, ended, abandoned };

TEST(adaptive, the_law_holds_if_steps_reduce_nothing_or_are_abandoned) {
  constexpr std::uint64_t kSteps = 20;
  constexpr int kRanks = 3;
  const ReducerOptions options{.dense_below = 0};
  const StepCost cost = max_step_bytes(options, kRanks, {1500});
  const double budget = kSteps * cost(0.02);
  for (const AdaptiveForm form : kForms) {
    for (const Gap gap : {Gap::rolled_back, Gap::ended, Gap::abandoned}) {
      for (const std::uint64_t at : {0U, 1U, 9U, 17U, 18U}) {
        std::vector<std::uint64_t> sent(kRanks);
        test::run_threads(kRanks, [&](Communicator& comm) {
          ReducerParts parts;
          parts.schedule = adaptive_density({.form = form,
                                             .budget = budget,
                                             .cost = cost,
                                             .density_min = 0.002,
                                             .n = 1500,
                                             .ranks = kRanks});
          Reducer reducer(options, std::move(parts), comm);
          reducer.set_layout(buckets({1500}));
          reducer.set_total_steps(kSteps);
          const auto me = static_cast<std::size_t>(comm.rank());
          for (std::uint64_t step = 0; step < kSteps; ++step) {
            const bool is_gap = step == at || step == at + 1;
            if (is_gap && gap == Gap::rolled_back) {
              reducer.rollback_step(0.0);
              continue;
            }
            if (!is_gap || gap == Gap::abandoned) {
              Floats g = test::normal(1500, 10 * step + me);
              sent[me] += reducer.reduce(0, std::span(g)).sent_bytes;
            }
            if (is_gap && gap == Gap::abandoned) {
              reducer.abandon_step(0.0);
            } else {
              EXPECT_TRUE(reducer.end_step(0.0));
            }
          }
        });
        EXPECT_LE(static_cast<double>(*std::ranges::max_element(sent)), budget)
            << name_of(form) << ", gap " << static_cast<int>(gap) << " at step " << at;
      }
    }
  }
}

// Each rank that is left knows its own bytes only, and a step cost more in the group before.
TEST(adaptive, the_law_holds_when_ranks_leave_after_a_step_or_in_it) {
  constexpr std::uint64_t kSteps = 20;
  constexpr std::size_t kBefore = 4, kAfter = 2;
  const ReducerOptions options{.dense_below = 0};
  const double budget = kSteps * max_step_bytes(options, kBefore, {1500})(0.02);
  for (const bool abandons : {false, true}) {
    for (const std::uint64_t last : {0U, 9U, 18U}) {  // the last step of the group before
      std::vector<std::string> states(kBefore);
      std::vector<std::uint64_t> sent(kBefore);
      const auto steps = [&](std::size_t ranks, std::uint64_t from, std::uint64_t to) {
        test::run_threads(static_cast<int>(ranks), [&](Communicator& comm) {
          const auto me = static_cast<std::size_t>(comm.rank());
          ReducerParts parts;
          parts.schedule = adaptive_density(
              {.form = AdaptiveForm::even,
               .budget = budget,
               .cost = max_step_bytes(options, static_cast<int>(ranks), {1500}),
               .density_min = 0.002,
               .density_max = 0.9});
          Reducer reducer(options, std::move(parts), comm);
          reducer.set_layout(buckets({1500}));
          reducer.set_total_steps(kSteps);
          if (from > 0) {
            std::istringstream mine(states[me]);
            const std::array<std::istream*, 1> in{&mine};
            reducer.take_over(in, 0.5F);
          }
          for (std::uint64_t step = from; step < to; ++step) {
            Floats g = test::normal(1500, 10 * step + me);
            sent[me] += reducer.reduce(0, std::span(g)).sent_bytes;
            if (abandons && step == last) {
              reducer.abandon_step(0.0);
            } else {
              EXPECT_TRUE(reducer.end_step(0.0));
            }
          }
          std::ostringstream state;
          reducer.save(state);
          states[me] = state.str();
        });
      };
      steps(kBefore, 0, last + 1);
      steps(kAfter, last + 1, kSteps);
      const auto busiest = static_cast<double>(std::max(sent[0], sent[1]));
      EXPECT_LE(busiest, budget) << "abandons " << abandons << ", last step " << last;
      EXPECT_GT(busiest, 0.9 * budget) << "abandons " << abandons << ", last step " << last;
    }
  }
}

// The measured form is one threshold: ranks send unequal numbers of entries.
TEST(adaptive, the_measured_form_lets_ranks_differ) {
  Case c;
  c.exchange = exchange_of_kind(ExchangeKind::allgather, false);
  c.form = AdaptiveForm::measured;
  const Outcome got = run(c);
  const auto with =
      std::ranges::count_if(got.used, [](const Density& d) { return d.threshold > 0; });
  EXPECT_GT(with, 20);
  EXPECT_EQ(got.used.back().threshold, 0.0F) << "the last steps close the budget";
}

TEST(adaptive, one_rank_sends_nothing_and_gets_the_most) {
  const StepCost cost = max_step_bytes({}, 1, kLengths);
  EXPECT_EQ(cost(0.001), 0.0);
  EXPECT_EQ(cost(1.0), 0.0);
  const auto s = adaptive_density({.budget = 1.0, .cost = cost, .density_max = 0.3});
  EXPECT_DOUBLE_EQ(s->density({.total_steps = 10}).up, 0.3);
}

// ---- one schedule, driven by hand ---------------------------------------------------------------

// A step that costs its entries: what a schedule is told, and when.
struct Driver {
  DensitySchedule& schedule;
  std::uint64_t steps;
  // Takes the density; returns entries kept, |u|^2 and |kept|^2.
  struct Step {
    double kept = 0.0, norm2 = 0.0, kept_norm2 = 0.0;
  };
  double drive(const std::function<Step(std::uint64_t, const Density&)>& take) {
    Progress p{.total_steps = steps};
    double sent = 0.0;
    for (std::uint64_t t = 0; t < steps; ++t) {
      p.step = t;
      const Density d = schedule.density(p);
      const Density again = schedule.density(p);
      EXPECT_EQ(d.up, again.up) << "asked twice";
      EXPECT_EQ(d.threshold, again.threshold);
      const Step s = take(t, d);
      p.last = {
          .gradient_norm2 = s.norm2, .accumulated_norm2 = s.norm2, .sent_norm2 = s.kept_norm2};
      p.last.sent_bytes = static_cast<std::uint64_t>(sent);
      p.used = d;
      sent += s.kept;
    }
    return sent;
  }
};

// Norms and a Laplace tail that are known. The optimum by bisection on the multiplier.
TEST(adaptive, comes_within_5_percent_of_the_optimum_for_norms_that_are_known) {
  constexpr std::uint64_t kSteps = 400;
  constexpr double kN = 1e6, kMin = 1e-4, kMax = 0.5;
  struct Shape {
    std::string name;
    std::function<double(double)> norm2;  // at a part of the run in [0, 1]
    double worse = 1.05;                  // than the optimum, at most
  };
  for (const Shape& shape : std::vector<Shape>{
           {"flat", [](double) { return 1.0; }},
           {"falls to a half", [](double x) { return std::exp(-1.4 * x); }},
           // A rise is not counted on.
           {"doubles", [](double x) { return std::exp(1.4 * x); }, 1.07},
           {"a power of the step", [](double x) { return std::pow(1.0 + 400.0 * x, -0.25); }},
       }) {
    for (const double width : {0.3, 1.0}) {
      for (const double a : {1.0, 0.998}) {
        for (const double mean : {0.001, 0.02}) {
          const auto weight = [&](std::uint64_t t) {
            return shape.norm2(static_cast<double>(t) / kSteps) *
                   std::pow(a, static_cast<double>(kSteps - 1 - t));
          };
          const auto left = [&](double kappa) {
            return analysis::laplace_ratio(std::min(1.0, kappa / width));
          };
          const auto error_of = [&](const std::vector<double>& kappa) {
            double sum = 0.0;
            for (std::uint64_t t = 0; t < kSteps; ++t) sum += weight(t) * left(kappa[t]);
            return sum;
          };
          std::vector<double> best(kSteps);
          double low = 0.0, high = 1e3;
          for (int i = 0; i < 200; ++i) {
            const double x = 0.5 * (low + high);
            double sum = 0.0;
            for (std::uint64_t t = 0; t < kSteps; ++t) {
              best[t] = std::clamp(width * std::exp(-x / std::sqrt(weight(t))), kMin, kMax);
              sum += best[t];
            }
            (sum > mean * kSteps ? low : high) = x;
          }
          const auto schedule =
              adaptive_density({.form = AdaptiveForm::laplace,
                                .budget = mean * kN * kSteps,
                                .cost = [&](double d) { return std::floor(d * kN); },
                                .density_min = kMin,
                                .density_max = kMax,
                                .contraction = a});
          std::vector<double> kappa;
          const double sent =
              Driver{*schedule, kSteps}.drive([&](std::uint64_t t, const Density& d) {
                kappa.push_back(d.up);
                const double norm2 = shape.norm2(static_cast<double>(t) / kSteps);
                return Driver::Step{std::floor(d.up * kN), norm2, norm2 * (1.0 - left(d.up))};
              });
          SCOPED_TRACE(shape.name + ", width " + std::to_string(width) + ", a " +
                       std::to_string(a) + ", mean density " + std::to_string(mean));
          EXPECT_LE(sent, mean * kN * kSteps);
          EXPECT_LE(error_of(kappa), shape.worse * error_of(best));
        }
      }
    }
  }
}

// With error feedback: sum_t eta_t^2 kappa_t^-2 is least for kappa_t in proportion to eta_t^(2/3).
TEST(adaptive, the_feedback_form_comes_within_1_percent_of_its_optimum_under_any_rate) {
  constexpr std::uint64_t kSteps = 400;
  constexpr double kN = 1e6, kMin = 1e-4, kMax = 0.5;
  using OfRun = std::function<double(double)>;  // at a part of the run in [0, 1)
  const std::vector<std::pair<std::string, OfRun>> norms{
      {"flat", [](double) { return 1.0; }},
      {"fall", [](double x) { return std::exp(-9.0 * x); }},
      {"jump", [](double x) { return x < 0.5 ? 1.0 : 100.0; }},
  };
  const std::vector<std::pair<std::string, OfRun>> rates{
      {"constant", [](double) { return 0.1; }},
      {"cosine", [](double x) { return 0.1 * (1.0 + std::cos(std::numbers::pi * x)); }},
      {"steps", [](double x) { return x < 0.5    ? 0.1
                                      : x < 0.75 ? 0.01
                                                 : 0.001; }},
      {"warm-up", [](double x) { return std::min(1.0, 10.0 * x + 0.01); }},
      {"pauses", [](double x) { return x < 0.2 || x > 0.3 ? 0.1 : 0.0; }},
  };
  for (const auto& [norm_name, norm2] : norms) {
    for (const auto& [rate_name, rate] : rates) {
      for (const double mean : {0.001, 0.02}) {
        SCOPED_TRACE(norm_name + ", " + rate_name + ", mean density " + std::to_string(mean));
        const auto at = [](std::uint64_t t) { return static_cast<double>(t) / kSteps; };
        const auto weight = [&](std::uint64_t t) { return std::pow(rate(at(t)), 2.0); };
        const auto error_of = [&](const std::vector<double>& kappa) {
          double sum = 0.0;
          for (std::uint64_t t = 0; t < kSteps; ++t) sum += weight(t) / kappa[t] / kappa[t];
          return sum;
        };
        std::vector<double> best(kSteps);
        double low = 0.0, high = 1e9;
        for (int i = 0; i < 300; ++i) {
          const double x = 0.5 * (low + high);
          double sum = 0.0;
          for (std::uint64_t t = 0; t < kSteps; ++t) {
            best[t] = std::clamp(x * std::cbrt(weight(t)), kMin, kMax);
            sum += best[t];
          }
          (sum < mean * kSteps ? low : high) = x;
        }
        const auto schedule = adaptive_density({
            .budget = mean * kN * kSteps,
            .cost = [&](double d) { return std::floor(d * kN); },
            .density_min = kMin,
            .density_max = kMax,
            .learning_rate = [&](std::uint64_t t) { return rate(at(t)); },
        });
        std::vector<double> kappa;
        const double sent = Driver{*schedule, kSteps}.drive([&](std::uint64_t t, const Density& d) {
          kappa.push_back(d.up);
          return Driver::Step{std::floor(d.up * kN), norm2(at(t)), 0.5 * norm2(at(t))};
        });
        EXPECT_LE(sent, mean * kN * kSteps);
        EXPECT_LE(error_of(kappa), 1.01 * error_of(best));
      }
    }
  }
}

// Residuals of updates: the norms that are told fall with the rate, and the weights do not twice.
TEST(adaptive, norms_of_updates_say_what_those_of_gradients_do) {
  constexpr std::uint64_t kSteps = 100;
  constexpr double kN = 1e5;
  const auto rate = [](std::uint64_t t) { return 0.1 * (1.0 - static_cast<double>(t) / kSteps); };
  for (const AdaptiveForm form : kForms) {
    if (form == AdaptiveForm::measured) continue;  // its threshold is in units of u
    const auto densities = [&](bool of_updates) {
      const auto schedule = adaptive_density({.form = form,
                                              .budget = 0.01 * kN * kSteps,
                                              .cost = [&](double d) { return std::floor(d * kN); },
                                              .learning_rate = rate,
                                              .norms_of_updates = of_updates,
                                              .n = static_cast<std::size_t>(kN),
                                              .ranks = 1});
      std::vector<double> found;
      Driver{*schedule, kSteps}.drive([&](std::uint64_t t, const Density& d) {
        found.push_back(d.up);
        const double scale = of_updates ? rate(t) : 1.0;
        const double norm2 = scale * scale / (1.0 + static_cast<double>(t));
        return Driver::Step{std::floor(d.up * kN), norm2, 0.3 * norm2};
      });
      return found;
    };
    const std::vector<double> gradients = densities(false), updates = densities(true);
    for (std::uint64_t t = 0; t < kSteps; ++t) {
      EXPECT_NEAR(updates[t], gradients[t], 1e-9) << name_of(form) << ", step " << t;
    }
  }
}

// Every form spends by the rate: what a step loses counts as much as it would have moved.
TEST(adaptive, a_falling_rate_spends_early_and_a_constant_one_changes_nothing) {
  constexpr std::uint64_t kSteps = 100;
  constexpr double kN = 1e5;
  for (const AdaptiveForm form : kForms) {
    const auto densities = [&](const std::function<double(std::uint64_t)>& rate) {
      const auto schedule = adaptive_density({.form = form,
                                              .budget = 0.01 * kN * kSteps,
                                              .cost = [&](double d) { return std::floor(d * kN); },
                                              .learning_rate = rate,
                                              .n = static_cast<std::size_t>(kN),
                                              .ranks = 1});
      std::vector<double> found;
      Driver{*schedule, kSteps}.drive([&](std::uint64_t, const Density& d) {
        found.push_back(d.up);
        return Driver::Step{std::floor(d.up * kN), 1.0, 0.3};
      });
      return found;
    };
    SCOPED_TRACE(name_of(form));
    const std::vector<double> none = densities({});
    EXPECT_EQ(densities([](std::uint64_t) { return 0.05; }), none);
    const std::vector<double> falling =
        densities([](std::uint64_t t) { return 1.0 - static_cast<double>(t) / kSteps; });
    const auto first = [](const std::vector<double>& d) {
      return std::accumulate(d.begin(), d.begin() + kSteps / 2, 0.0);
    };
    if (form == AdaptiveForm::even) {
      EXPECT_EQ(falling, none);
    } else {
      EXPECT_GT(first(falling), 1.1 * first(none));
    }
  }
}

// f(x) = 1/2 sum mu x_i^2 by top-k gradient descent: a pick multiplies x_i by 1 - eta mu. For so
// many picks, at most one of a coordinate in a step, the least f takes the largest gain every time.
struct Quadratic {
  std::vector<double> x;
  double factor = 0.7;  // 1 - eta mu

  static Quadratic heavy(std::size_t n, double power, double factor) {
    Quadratic q{.x = {}, .factor = factor};
    std::mt19937_64 rng(5);
    std::normal_distribution<double> normal;
    for (std::size_t i = 0; i < n; ++i) {
      const double v = normal(rng);
      q.x.push_back(std::copysign(std::pow(std::abs(v), power), v));
    }
    return q;
  }
  double f() const { return 0.5 * std::inner_product(x.begin(), x.end(), x.begin(), 0.0); }
  // Of at most k coordinates, the largest that reach the threshold.
  Driver::Step step(std::size_t k, double threshold) {
    std::vector<std::size_t> order(x.size());
    std::iota(order.begin(), order.end(), 0U);
    std::ranges::sort(
        order, [&](std::size_t a, std::size_t b) { return std::abs(x[a]) > std::abs(x[b]); });
    Driver::Step s{.norm2 = 2.0 * f()};
    for (std::size_t i = 0; i < k && std::abs(x[order[i]]) >= threshold; ++i) {
      double& v = x[order[i]];
      s.kept += 1.0;
      s.kept_norm2 += v * v;
      v *= factor;
    }
    return s;
  }
  double least_f(std::uint64_t steps, double picks) const {
    std::vector<std::pair<double, std::uint64_t>> heap;  // |x_i| now, picks of it
    for (const double v : x) heap.emplace_back(std::abs(v), 0);
    std::ranges::make_heap(heap);
    double f = 0.0;
    for (double p = 0.0; p < picks && !heap.empty(); p += 1.0) {
      std::ranges::pop_heap(heap);
      auto [v, count] = heap.back();
      heap.pop_back();
      v *= factor;
      if (++count == steps) {
        f += 0.5 * v * v;
        continue;
      }
      heap.emplace_back(v, count);
      std::ranges::push_heap(heap);
    }
    for (const auto& [v, count] : heap) f += 0.5 * v * v;
    return f;
  }
};

TEST(adaptive, comes_within_5_percent_of_the_optimum_on_a_quadratic) {
  constexpr std::size_t kN = 3000;
  for (const std::uint64_t steps : {30U, 100U}) {
    for (const double power : {1.0, 2.0, 3.0}) {
      for (const double factor : {0.9, 0.5}) {
        for (const double mean : {0.01, 0.05}) {
          const Quadratic start = Quadratic::heavy(kN, power, factor);
          const double picks = std::floor(mean * kN) * static_cast<double>(steps);
          const double best = start.least_f(steps, picks);
          Quadratic constant = start;
          for (std::uint64_t t = 0; t < steps; ++t) {
            constant.step(static_cast<std::size_t>(std::floor(mean * kN)), 0.0);
          }
          for (const AdaptiveForm form :
               {AdaptiveForm::laplace, AdaptiveForm::measured, AdaptiveForm::feedback}) {
            const auto schedule = adaptive_density(
                {.form = form,
                 .budget = picks,
                 .cost = [](double d) { return static_cast<double>(entries(d, kN)); },
                 .density_min = 1.0 / kN,
                 .density_max = 0.5,
                 .n = kN,
                 .ranks = 1});
            Quadratic q = start;
            const double sent =
                Driver{*schedule, steps}.drive([&](std::uint64_t, const Density& d) {
                  return q.step(entries(d.up, kN), double{d.threshold});
                });
            SCOPED_TRACE(std::string(name_of(form)) + ", " + std::to_string(steps) +
                         " steps, power " + std::to_string(power) + ", factor " +
                         std::to_string(factor) + ", mean " + std::to_string(mean));
            EXPECT_LE(sent, picks);
            EXPECT_LE(q.f(), 1.05 * best) << "constant: " << constant.f() / best;
            EXPECT_LE(q.f(), 1.01 * constant.f());
          }
        }
      }
    }
  }
}

// ---- options ------------------------------------------------------------------------------------

TEST(adaptive, refuses_what_cannot_be) {
  const StepCost cost = [](double d) { return 1000.0 * d; };
  const AdaptiveOptions good{
      .budget = 10.0, .cost = cost, .density_min = 0.001, .density_max = 0.1};
  const auto why = [&](const std::function<void(AdaptiveOptions&)>& change) {
    AdaptiveOptions o = good;
    change(o);
    try {
      adaptive_density(o);
    } catch (const InvalidArgument& e) {
      return std::string(e.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_EQ(why([](AdaptiveOptions&) {}), "nothing was thrown");
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const double bad : {0.0, -1.0, kNan, std::numeric_limits<double>::infinity()}) {
    EXPECT_NE(why([&](AdaptiveOptions& o) { o.budget = bad; }).find("budget"), std::string::npos);
  }
  for (const double bad : {0.0, -1.0, 1.1, kNan}) {
    EXPECT_NE(why([&](AdaptiveOptions& o) { o.contraction = bad; }).find("contraction"),
              std::string::npos);
    EXPECT_NE(why([&](AdaptiveOptions& o) { o.density_min = bad; }).find("min"), std::string::npos);
    EXPECT_NE(why([&](AdaptiveOptions& o) { o.density_max = bad; }).find("max"), std::string::npos);
  }
  EXPECT_NE(why([](AdaptiveOptions& o) { o.cost = nullptr; }).find("cost"), std::string::npos);
  EXPECT_NE(why([](AdaptiveOptions& o) { o.form = AdaptiveForm::measured; }).find("needs n"),
            std::string::npos);
  // As of an exchange that does not say.
  EXPECT_THROW(
      adaptive_density(
          {.budget = 10.0, .cost = [](double) { return std::numeric_limits<double>::infinity(); }})
          ->density({.total_steps = 1}),
      InvalidArgument);
  // 11 steps at density_min take 11.
  const auto s = adaptive_density(good);
  EXPECT_EQ(s->density({}).up, 0.001) << "steps not known";
  EXPECT_NO_THROW(s->density({.total_steps = 10}));
  try {
    adaptive_density(good)->density({.total_steps = 11});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find("a budget of 10 bytes is too small: 11 steps at the least "
                                         "density, 0.001, take 11 bytes"),
              std::string::npos)
        << e.what();
  }
  EXPECT_EQ(s->describe(), "adaptive (feedback), budget 10 bytes");
  EXPECT_EQ(adaptive_density({.budget = 1.5, .cost = [](double d) { return d; }, .in_bytes = false})
                ->describe(),
            "adaptive (feedback), budget 1.5 predicted seconds");
  EXPECT_NE(why([](AdaptiveOptions& o) { o.norms_of_updates = true; }).find("learning rate"),
            std::string::npos);
}

TEST(adaptive, a_budget_above_what_all_steps_can_take_is_not_used_up) {
  const auto s = adaptive_density(
      {.budget = 1e9, .cost = [](double d) { return 1000.0 * d; }, .density_max = 0.2});
  Driver{*s, 20}.drive([](std::uint64_t, const Density& d) {
    EXPECT_DOUBLE_EQ(d.up, 0.2);
    return Driver::Step{200.0, 1.0, 0.5};
  });
}

// Where the budget is seconds, nothing is measured: what cost says is what was spent.
TEST(adaptive, seconds_are_those_predicted) {
  const ReducerOptions options{.exchange = {.kind = ExchangeKind::allgather}};
  const Link link{.alpha_s = 1e-4, .beta_s_per_byte = 1e-8};
  const LocalSpeeds local{.select_s = 1e-9, .merge_s = 1e-8, .add_s = 1e-9};
  const StepCost cost = predicted_seconds(options, 4, {1000000}, 0.01, link, local);
  const Load load{.ranks = 4, .n = 1e6, .k = 1e4, .frame = frame_size({})};
  EXPECT_DOUBLE_EQ(cost(0.01), 0.01 + predict(options.exchange, load, link, local).total_s());
  // auto: no dearer than what it may choose.
  const StepCost least =
      predicted_seconds({.chooser = ChooserOptions{}}, 4, {1000000}, 0.01, link, local);
  EXPECT_LE(least(0.01), cost(0.01));

  // Refused when it is made, not when it is called.
  const auto with = [&](const ReducerOptions& o, int ranks, const Link& l) {
    return predicted_seconds(o, ranks, {1000000}, 0.01, l, local);
  };
  EXPECT_THROW(with(options, 0, link), InvalidArgument);
  EXPECT_THROW(with(options, 4, {.alpha_s = -1.0}), InvalidArgument);
  ReducerOptions never_cut{.exchange = {.kind = ExchangeKind::oktopk}};
  never_cut.exchange.oktopk.cut_every = 0;
  EXPECT_THROW(with(never_cut, 4, link), InvalidArgument);

  const double budget = 50 * cost(0.02);
  const auto s = adaptive_density({.budget = budget, .cost = cost, .in_bytes = false});
  double spent = 0.0, largest = 0.0;
  Driver{*s, 50}.drive([&](std::uint64_t t, const Density& d) {
    spent += cost(d.up);
    largest = std::max(largest, cost(d.up));
    return Driver::Step{1e9, std::exp(-0.02 * static_cast<double>(t)), 0.1};
  });
  EXPECT_LE(spent, budget * (1.0 + 1e-12));
  EXPECT_GE(spent, budget - largest);
}

// Also of steps that reduce nothing, are abandoned, or follow a run of another number of ranks.
TEST(adaptive, seconds_are_never_more_than_the_budget) {
  constexpr std::uint64_t kSteps = 20;
  const StepCost cost = [](double d) { return 0.1 + d; };
  const double budget = kSteps * cost(0.02);
  // A rate that jumps: a step may cost far more, or far less, than the one before.
  const auto rate = [](std::uint64_t step) { return step < 5 || step == 9 ? 1.0 : 0.01; };
  for (const AdaptiveForm form : kForms) {
    for (const Gap gap : {Gap::rolled_back, Gap::ended, Gap::abandoned}) {
      for (const std::uint64_t at : {0U, 1U, 8U, 9U, 17U, 18U}) {
        double spent = 0.0, largest = 0.0;
        test::run_threads(1, [&](Communicator& comm) {
          ReducerParts parts;
          parts.schedule = adaptive_density({.form = form,
                                             .budget = budget,
                                             .cost = cost,
                                             .in_bytes = false,
                                             .density_min = 0.002,
                                             .learning_rate = rate,
                                             .n = 1500,
                                             .ranks = 1});
          Reducer reducer({.dense_below = 0}, std::move(parts), comm);
          reducer.set_layout(buckets({1500}));
          reducer.set_total_steps(kSteps);
          for (std::uint64_t step = 0; step < kSteps; ++step) {
            const double step_cost = cost(reducer.density().up);
            spent += step_cost;
            largest = std::max(largest, step_cost);
            const bool is_gap = step == at || step == at + 1;
            if (!is_gap || gap == Gap::abandoned) {
              Floats g = test::normal(1500, 10 * step);
              reducer.reduce(0, std::span(g));
            }
            if (is_gap && gap == Gap::rolled_back) {
              reducer.rollback_step(0.0);
            } else if (is_gap && gap == Gap::abandoned) {
              reducer.abandon_step(0.0);
            } else {
              EXPECT_TRUE(reducer.end_step(0.0));
            }
          }
        });
        EXPECT_LE(spent, budget * (1.0 + 1e-12))
            << name_of(form) << ", gap " << static_cast<int>(gap) << " at step " << at;
        EXPECT_GE(spent, budget - largest)
            << name_of(form) << ", gap " << static_cast<int>(gap) << " at step " << at;
      }
    }
  }
}

TEST(adaptive, seconds_of_a_run_that_goes_on_with_another_number_of_ranks_follow_its_progress) {
  constexpr std::uint64_t kSteps = 20;
  const StepCost cost = [](double d) { return 0.1 + d; };
  const double budget = kSteps * cost(0.02);
  for (const std::uint64_t stop : {1U, 2U, 9U}) {
    std::array<std::string, 2> states;
    double spent = budget * static_cast<double>(stop) / kSteps;
    const auto steps = [&](int ranks, std::uint64_t from, std::uint64_t to) {
      test::run_threads(ranks, [&](Communicator& comm) {
        ReducerParts parts;
        parts.schedule = adaptive_density(
            {.budget = budget, .cost = cost, .in_bytes = false, .density_min = 0.002});
        Reducer reducer({.dense_below = 0}, std::move(parts), comm);
        reducer.set_layout(buckets({1500}));
        reducer.set_total_steps(kSteps);
        if (from > 0) {
          std::istringstream first(states[0]), second(states[1]);
          const std::array<std::istream*, 2> in{&first, &second};
          reducer.load(in);
        }
        for (std::uint64_t step = from; step < to; ++step) {
          if (from > 0) spent += cost(reducer.density().up);
          Floats g = test::normal(1500, step);
          reducer.reduce(0, std::span(g));
          EXPECT_TRUE(reducer.end_step(0.0));
        }
        std::ostringstream state;
        reducer.save(state);
        if (from == 0) states[static_cast<std::size_t>(comm.rank())] = state.str();
      });
    };
    steps(2, 0, stop);
    steps(1, stop, kSteps);
    EXPECT_LE(spent, budget * (1.0 + 1e-12)) << "stopped after " << stop;
  }
}

TEST(adaptive, a_number_of_steps_that_is_refused_changes_nothing) {
  const StepCost cost = [](double d) { return 0.1 + d; };
  const auto make = [&] {
    return adaptive_density({.budget = 4.0, .cost = cost, .in_bytes = false, .density_min = 0.002});
  };
  const auto asked = make(), other = make();
  const Progress later{.step = 10, .total_steps = 20};
  EXPECT_THROW(asked->density({.step = 10, .total_steps = 1000}), InvalidArgument);
  EXPECT_EQ(asked->density(later).up, other->density(later).up);
  EXPECT_EQ(asked->spent(), other->spent());
}

TEST(adaptive, no_allocation_after_the_first_step) {
  const StepCost bytes = max_step_bytes({.dense_below = 0}, 4, {10000, 500});
  const StepCost seconds =
      predicted_seconds({}, 4, {10000, 500}, 0.01, {.alpha_s = 1e-4, .beta_s_per_byte = 1e-8}, {});
  for (const AdaptiveForm form : kForms) {
    for (const bool in_bytes : {true, false}) {
      const StepCost& cost = in_bytes ? bytes : seconds;
      const auto s = adaptive_density({.form = form,
                                       .budget = 100 * cost(0.01),
                                       .cost = cost,
                                       .in_bytes = in_bytes,
                                       .n = 10500,
                                       .ranks = 4});
      std::uint64_t before = 0;
      Driver{*s, 100}.drive([&](std::uint64_t t, const Density& d) {
        if (t == 0) before = test::allocations();
        const double norm2 = 1.0 / static_cast<double>(t + 1);
        return Driver::Step{bytes(d.up), norm2, 0.3 * norm2};
      });
      EXPECT_EQ(test::allocations(), before)
          << name_of(form) << (in_bytes ? ", bytes" : ", seconds");
    }
  }
}

// ---- rules to compare with ----------------------------------------------------------------------

TEST(adaptive, capture_reaches_its_share_where_the_tail_is_laplace) {
  for (const double share : {0.3, 0.9}) {
    for (const double width : {0.2, 1.0}) {
      const auto s = capture_density(share, 1e-5, 1.0 - 1e-9);
      double last = 0.0;
      Driver{*s, 60}.drive([&](std::uint64_t, const Density& d) {
        last = 1.0 - analysis::laplace_ratio(std::min(1.0, d.up / width));
        return Driver::Step{1.0, 2.0, 2.0 * last};
      });
      EXPECT_NEAR(last, share, 0.01) << width;
    }
  }
  EXPECT_EQ(capture_density(0.9, 0.01, 0.02)->density({}).up, 0.02) << "no more than the most";
  EXPECT_EQ(capture_density(0.9, 0.01, 0.02)->describe(), "capture 0.9");
  EXPECT_THROW(capture_density(1.0, 0.01, 0.02), InvalidArgument);
  EXPECT_THROW(capture_density(0.5, 0.03, 0.02), InvalidArgument);
}

TEST(adaptive, accordion_goes_low_where_norms_stand_and_high_where_they_change) {
  const auto s = accordion_density(0.01, 0.1);
  // Norms of epochs: 10, 9 (stands), 4 (changes by more than half), 4.1 (stands).
  const std::vector<double> norms{10.0, 9.0, 4.0, 4.1, 4.0};
  const std::vector<double> expected{0.1, 0.1, 0.01, 0.1, 0.01};
  Progress p;
  constexpr std::uint64_t kInEpoch = 4;
  for (std::uint64_t t = 0; t < kInEpoch * norms.size(); ++t) {
    const std::uint64_t epoch = t / kInEpoch;
    p.step = t;
    p.epoch = static_cast<double>(t) / kInEpoch;
    EXPECT_EQ(s->density(p).up, expected[epoch]) << "step " << t;
    EXPECT_EQ(s->density(p).up, expected[epoch]) << "asked twice";
    const double norm2 = norms[epoch] * norms[epoch];
    p.last = {.gradient_norm2 = norm2, .accumulated_norm2 = norm2, .sent_norm2 = 1.0};
  }
  EXPECT_EQ(s->describe(), "accordion 0.01/0.1");
  EXPECT_THROW(accordion_density(0.1, 0.01), InvalidArgument);
  EXPECT_THROW(accordion_density(0.0, 0.01), InvalidArgument);
  EXPECT_THROW(accordion_density(0.01, 0.1, 0.0), InvalidArgument);
}

TEST(adaptive, descent_per_bit_is_the_best_of_all_densities) {
  const double width = 0.4;
  for (const double overhead : {1.0, 100.0}) {
    const StepCost cost = [&](double d) { return overhead + 1e4 * d; };
    const auto s = descent_per_bit_density(cost, 1e-4, 0.5);
    double last = 0.0;
    const auto share = [&](double d) {
      return 1.0 - analysis::laplace_ratio(std::min(1.0, d / width));
    };
    Driver{*s, 80}.drive([&](std::uint64_t, const Density& d) {
      last = d.up;
      return Driver::Step{1.0, 1.0, share(d.up)};
    });
    double best = 0.0;
    for (double d = 1e-4; d <= 0.5; d *= 1.01) best = std::max(best, share(d) / cost(d));
    EXPECT_GT(share(last) / cost(last), 0.99 * best) << overhead;
  }
  EXPECT_EQ(descent_per_bit_density([](double) { return 1.0; }, 0.1, 0.2)->describe(),
            "descent per bit");
  EXPECT_THROW(descent_per_bit_density(nullptr, 0.1, 0.2), InvalidArgument);
}

TEST(adaptive, a_saved_state_says_what_it_is_and_a_damaged_one_changes_nothing) {
  const StepCost cost = [](double d) { return 1000.0 * d; };
  const std::vector<std::function<std::unique_ptr<DensitySchedule>()>> make{
      [&] { return adaptive_density({.budget = 1000.0, .cost = cost}); },
      [] { return capture_density(0.5, 0.001, 0.9); }, [] { return accordion_density(0.01, 0.1); },
      [&] { return descent_per_bit_density(cost, 0.001, 0.9); }};
  for (const auto& made : make) {
    const auto trained = made(), other = made();
    Progress p{.total_steps = 50};
    for (std::uint64_t t = 0; t < 20; ++t) {
      p.step = t;
      p.epoch = 0.3 * static_cast<double>(t);
      p.used = trained->density(p);
      const double norm2 = 5.0 / static_cast<double>(t + 1);
      p.last = {.gradient_norm2 = norm2,
                .accumulated_norm2 = norm2,
                .sent_norm2 = 0.4 * norm2,
                .sent_bytes = 10 * t};
    }
    p.step = 20;
    const Density next = trained->density(p);
    std::ostringstream out;
    trained->save(out);
    SCOPED_TRACE(trained->describe());
    for (std::size_t length = 0; length < out.str().size(); length += 5) {
      std::istringstream part(out.str().substr(0, length));
      EXPECT_THROW(other->load(part), StateError) << length;
    }
    std::istringstream in(out.str());
    other->load(in);
    EXPECT_EQ(other->density(p).up, next.up);
    std::ostringstream again;
    other->save(again);
    EXPECT_EQ(again.str(), out.str());
  }
}

}  // namespace
}  // namespace skim
