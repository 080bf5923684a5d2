// The chooser: alike on all ranks, by what the step waits for, near the best single exchange, and
// what trying may cost.
#include "skim/chooser.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "allocations.hpp"
#include "fault.hpp"
#include "group.hpp"
#include "message_of.hpp"
#include "oracle.hpp"
#include "parts.hpp"
#include "simulated.hpp"
#include "skim/error.hpp"
#include "skim/reducer.hpp"

namespace skim {
namespace {

using test::message_of;

using K = ExchangeKind;
// Of the buckets of one slot, in order.
struct Kinds : std::vector<K> {
  using std::vector<K>::vector;
  std::string at_the_end;  // what it went by then, trials aside
  int changes = 0;         // of that
};
std::string first_word(std::string_view text) {
  return std::string(text.substr(0, text.find(' ')));
}

constexpr std::size_t kN = 100'000, kK = 100;

// Buckets of one slot whose times are given: seconds(kind, bucket, rank). Returns what every rank
// was told to take. `link` is what the chooser finds if it measures, on a virtual clock.
using Seconds = std::function<double(K, int, int)>;
std::vector<Kinds> drive(int ranks, int buckets, const ChooserOptions& options,
                         const Seconds& seconds, const Link& link = {1e-4, 1e-8}) {
  std::vector<Kinds> taken(static_cast<std::size_t>(ranks));
  test::run_simulated(ranks, {link, false}, [&](Communicator& comm) {
    const auto chooser = make_chooser({}, options);
    for (int b = 0; b < buckets; ++b) {
      const StepId id{static_cast<std::uint64_t>(b), 0};
      const std::array mine{chooser->told(0)};
      const std::size_t chosen = chooser->choose(id, kN, {.k = kK}, comm);
      // As in the frames of the bucket.
      MessageList all;
      comm.allgather(std::as_bytes(std::span(mine)), all);
      Chooser::Times heard;
      for (std::size_t r = 0; r < all.size(); ++r) {
        Chooser::Times of_rank;
        std::memcpy(&of_rank, all[r].data(), sizeof of_rank);
        heard.bucket_s += of_rank.bucket_s;
        heard.pair_s += of_rank.pair_s;
      }
      const K kind = chooser->candidates()[chosen].kind;
      taken[static_cast<std::size_t>(comm.rank())].push_back(kind);
      chooser->took(id, static_cast<std::int64_t>(1e9 * seconds(kind, b, comm.rank())), heard);
      Kinds& own = taken[static_cast<std::size_t>(comm.rank())];
      const std::string now = first_word(chooser->decision(0));
      own.changes += b > 0 && now != own.at_the_end;
      own.at_the_end = now;
    }
  });
  for (const Kinds& of_rank : taken)
    EXPECT_TRUE(std::ranges::equal(of_rank, taken[0])) << "ranks must choose alike";
  return taken;
}
std::ptrdiff_t count(const Kinds& kinds, K kind) { return std::ranges::count(kinds, kind); }

const Link kSlow{.alpha_s = 1e-4, .beta_s_per_byte = 1e-8};

TEST(chooser, begins_with_what_the_model_finds_cheapest) {
  const ChooserOptions options{.link = kSlow, .trial_share = 0.0};
  const Load load{.ranks = 3, .n = kN, .k = kK, .frame = frame_size({})};
  Kinds among;
  for (const ExchangeRow& row : exchange_rows()) {
    if (row.delivers_all) among.push_back(row.kind);
  }
  const Choice best = cheapest(among, {}, load, kSlow, options.local_speeds);
  // At 4 times the prediction the chooser would measure the link.
  const double seconds = 3.0 * best.cost.total_s();
  const auto taken = drive(3, 50, options, [=](K, int, int) { return seconds; });
  EXPECT_EQ(count(taken[0], best.exchange), 50) << "without trials it stays";
}

// With k_down = n, oktopk returns every entry that was sent, and allgather is shorter.
TEST(chooser, predicts_for_the_entries_of_the_result) {
  const ChooserOptions options{
      .among = {K::oktopk, K::allgather}, .link = Link{1e-6, 1e-7}, .trial_share = 0.0};
  test::run_group(8, [&](Communicator& comm) {
    const auto chooser = make_chooser({}, options);
    const auto chosen = [&](std::size_t k_down) {
      const std::size_t c = chooser->choose({0, 0}, kN, {.k = 5000, .k_down = k_down}, comm);
      return name_of(chooser->candidates()[c].kind);
    };
    EXPECT_EQ(chosen(0), "oktopk");
    EXPECT_EQ(chosen(kN), "allgather");
    EXPECT_EQ(chosen(0), "oktopk");
  });
}

// The shortest exchange of any rank says nothing: the step ends with what all of them wait for.
TEST(chooser, any_numbers_may_name_hosts) {
  const ChooserOptions options{.among = {K::hierarchical, K::allgather}, .trial_share = 0.0};
  const auto decision_on = [&](const std::array<int, 4>& hosts) {
    std::array<std::string, 4> decisions;
    test::run_simulated(4, {{1e-4, 1e-8}, false}, [&](Communicator& whole) {
      const auto rank = static_cast<std::size_t>(whole.rank());
      test::OnHost comm(whole, static_cast<std::size_t>(hosts[rank]));
      const auto chooser = make_chooser({}, options);
      chooser->choose({0, 0}, kN, {.k = kK}, comm);
      decisions[rank] = chooser->decision(0);
    });
    for (const std::string& d : decisions) EXPECT_EQ(d, decisions[0]);
    return decisions[0];
  };
  const std::string of_two_hosts = decision_on({0, 0, 1, 1});
  EXPECT_NE(of_two_hosts.find("hierarchical"), std::string::npos) << of_two_hosts;
  EXPECT_EQ(decision_on({-5, -5, 7, 7}), of_two_hosts);
  EXPECT_EQ(decision_on({INT_MIN, INT_MIN, -1, -1}), of_two_hosts);
}

TEST(chooser, goes_by_what_the_step_waits_for) {
  const ChooserOptions options{
      .among = {K::gtopk, K::allgather}, .link = kSlow, .trial_share = 1.0};
  const auto taken = drive(4, 200, options, [](K kind, int, int rank) {
    if (kind == K::allgather) return 0.020;
    return rank == 0 ? 0.005 : 0.030;
  });
  EXPECT_EQ(taken[0].at_the_end, name_of(K::allgather));
  EXPECT_GT(count(taken[0], K::allgather), 150);
}

TEST(chooser, finds_the_best_whatever_the_model_says) {
  const Kinds among{K::dense, K::allgather, K::gtopk, K::gtopk_tree, K::oktopk, K::sparcml};
  for (const K best : among) {
    SCOPED_TRACE(name_of(best));
    const ChooserOptions options{.among = among, .link = kSlow, .trial_share = 1.0};
    const auto taken =
        drive(2, 300, options, [&](K kind, int, int) { return kind == best ? 0.001 : 0.0013; });
    EXPECT_EQ(taken[0].at_the_end, name_of(best));
    EXPECT_GT(count(taken[0], best), 150);
  }
}

// After one bucket if it is far worse, after two if it is worse.
TEST(chooser, ends_a_bad_trial_after_a_step_or_two) {
  for (const auto& [bad_s, most] : {std::pair(0.1, 1), std::pair(0.002, 2)}) {
    const ChooserOptions options{
        .among = {K::gtopk, K::gtopk_tree}, .link = kSlow, .trial_share = 1.0};
    const double bad = bad_s;
    const auto taken =
        drive(2, 60, options, [=](K kind, int, int) { return kind == K::gtopk ? 0.001 : bad; });
    EXPECT_GE(count(taken[0], K::gtopk_tree), 1);
    EXPECT_LE(count(taken[0], K::gtopk_tree), most);
  }
}

// What learns in its first bucket is not judged by that one.
TEST(chooser, the_first_bucket_of_a_trial_does_not_count) {
  const ChooserOptions options{.among = {K::gtopk, K::oktopk}, .link = kSlow, .trial_share = 1.0};
  std::vector<int> tried(2, 0);
  const auto taken = drive(2, 100, options, [&](K kind, int, int rank) {
    if (kind == K::gtopk) return 0.001;
    return tried[static_cast<std::size_t>(rank)]++ == 0 ? 0.0028 : 0.0005;
  });
  EXPECT_EQ(taken[0].at_the_end, name_of(K::oktopk));
}

TEST(chooser, notices_when_the_link_changes) {
  const ChooserOptions options{
      .among = {K::gtopk, K::allgather}, .link = kSlow, .trial_share = 1.0};
  // From bucket 300 on the one that was better takes ten times as long.
  const auto taken = drive(3, 600, options, [](K kind, int bucket, int) {
    const bool late = bucket >= 300;
    if (kind == K::gtopk) return late ? 0.010 : 0.001;
    return late ? 0.004 : 0.002;
  });
  EXPECT_EQ(taken[0][299], K::gtopk);
  EXPECT_EQ(taken[0].at_the_end, name_of(K::allgather));
  const Kinds late(taken[0].begin() + 300, taken[0].end());
  EXPECT_GT(count(late, K::allgather), 200) << "within 100 buckets";
}

// Wherever in its life the link slows down a hundred times: what takes long then runs a few times
// at most, and the incumbent as long as a change takes to be noticed.
TEST(chooser, a_link_that_slows_down_costs_little) {
  constexpr int kAfter = 400;
  const Link fast{2e-5, 1e-9}, slow{2e-4, 1e-7};
  for (const int change : {2, 7, 12, 20, 40, 75, 300}) {
    SCOPED_TRACE("slow from bucket " + std::to_string(change) + " on");
    const auto seconds = [&](K kind, int bucket, int) {
      const Load load{.ranks = 3, .n = kN, .k = kK, .frame = frame_size({})};
      return predict({.kind = kind}, load, bucket < change ? fast : slow, {}).total_s();
    };
    const auto taken = drive(3, change + kAfter, {.link = fast}, seconds, slow)[0];
    double best_s = seconds(taken[0], change, 0), lost_s = 0.0;
    for (const K kind : candidates({})) best_s = std::min(best_s, seconds(kind, change, 0));
    const K incumbent = taken[static_cast<std::size_t>(change) - 1];
    std::map<K, int> bad;
    for (int b = change; b < change + kAfter; ++b) {
      const K kind = taken[static_cast<std::size_t>(b)];
      const double s = seconds(kind, b, 0);
      lost_s += s - best_s;
      if (s > 3.0 * best_s) ++bad[kind];
    }
    for (const auto& [kind, times] : bad) {
      EXPECT_LE(times, kind == incumbent ? 12 : 2) << name_of(kind);
    }
    EXPECT_LE(lost_s, 0.1 * kAfter * best_s + 12.0 * seconds(K::dense, change, 0));
  }
}

// Scattering measurements must not make it change all the time.
TEST(chooser, noise_does_not_move_it) {
  const ChooserOptions options{.link = kSlow, .trial_share = 1.0};
  const auto taken = drive(2, 400, options, [](K, int bucket, int rank) {
    const auto noise = static_cast<double>((bucket * 7919 + rank * 104729) % 1000) / 1000.0;
    return 0.001 * (0.9 + 0.2 * noise);
  });
  EXPECT_LE(taken[0].changes, 3);
}

// Real exchanges on a virtual clock: how long the buckets took, and what each went by.
std::int64_t run_buckets(int ranks, const Link& link, int buckets, const ReducerOptions& options,
                         std::map<std::string, int>* names = nullptr) {
  constexpr std::size_t n = 20'000;
  return test::run_simulated(ranks, {link, false}, [&](Communicator& comm) {
    ReducerParts parts;
    parts.schedule = constant_density(0.01);
    Reducer reducer(options, std::move(parts), comm);
    reducer.set_layout(std::vector<Bucket>{{0, {{"w", 0, n}}}});
    std::vector<float> gradient(n);
    for (int b = 0; b < buckets; ++b) {
      const auto shift = static_cast<std::size_t>(comm.rank() * 104729 + b * 31);
      for (std::size_t i = 0; i < n; ++i) {
        gradient[i] = static_cast<float>((i * 7919 + shift) % 2003) - 1001.0F;
      }
      reducer.reduce(0, std::span(gradient));
      reducer.end_step(0.0);
      if (names != nullptr && comm.rank() == 0) ++(*names)[first_word(reducer.decision(0))];
    }
  });
}

// With all that trying costs it is near the best single one, and hopeless candidates are not tried.
TEST(chooser, is_near_the_best_single_exchange) {
  for (const int ranks : {4, 6}) {
    for (const Link& link : {Link{1e-3, 1e-9}, Link{1e-5, 1e-7}}) {
      constexpr int kBuckets = 400;
      std::map<std::int64_t, std::string_view> single;
      for (const ExchangeRow& row : exchange_rows()) {
        if (!row.delivers_all || row.kind == K::dense) continue;
        single[run_buckets(ranks, link, kBuckets, {.exchange = {.kind = row.kind}})] = row.name;
      }
      std::map<std::string, int> names;
      const ChooserOptions chooser{.link = link, .local_speeds = {}};
      const std::int64_t with = run_buckets(ranks, link, kBuckets, {.chooser = chooser}, &names);
      const auto [best, name] = *single.begin();
      EXPECT_LE(static_cast<double>(with), 1.05 * static_cast<double>(best))
          << ranks << " ranks, best " << name;
      EXPECT_EQ(names.count("dense"), 0U);
    }
  }
}

// A told link that is a thousand times too fast makes dense look cheap; the run finds out.
TEST(chooser, measurements_correct_a_wrong_link) {
  std::map<std::string, int> names;
  const ChooserOptions chooser{.link = Link{1e-9, 1e-13}, .local_speeds = {.select_s = 1e-10}};
  run_buckets(4, {1e-5, 1e-8}, 50, {.chooser = chooser}, &names);
  EXPECT_GE(names["dense"], 4);
  EXPECT_LT(names["dense"], 10);
}

// Two buckets a step. A trial whose next bucket is a trial, too, says nothing, and is made again.
TEST(chooser, slots_that_try_at_the_same_time) {
  std::vector<std::array<std::string, 2>> ends(2);
  test::run_group(2, [&](Communicator& comm) {
    const auto chooser =
        make_chooser({}, {.among = {K::gtopk, K::allgather}, .link = kSlow, .trial_share = 1.0});
    for (int b = 0; b < 200; ++b) {
      for (Slot slot = 0; slot < 2; ++slot) {
        const StepId id{static_cast<std::uint64_t>(b), slot};
        const std::size_t chosen = chooser->choose(id, kN, {.k = kK}, comm);
        const bool best = chooser->candidates()[chosen].kind == K::gtopk;
        const Chooser::Times told = chooser->told(slot);  // equal on both ranks
        chooser->took(id, best ? 1'000'000 : 1'200'000, {2 * told.bucket_s, 2 * told.pair_s});
      }
    }
    auto& end = ends[static_cast<std::size_t>(comm.rank())];
    for (Slot slot = 0; slot < 2; ++slot) end[slot] = first_word(chooser->decision(slot));
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end[0], "gtopk");
    EXPECT_EQ(end[1], "gtopk");
  }
}

TEST(chooser, no_allocation_once_warm) {
  std::size_t before = 0, after = 0;
  test::run_group(2, [&](Communicator& comm) {
    const auto chooser =
        make_chooser({}, {.among = {K::gtopk, K::allgather}, .link = kSlow, .trial_share = 1.0});
    for (int b = 0; b < 400; ++b) {
      if (b == 100) {
        comm.barrier();
        if (comm.rank() == 0) before = test::allocations();
        comm.barrier();
      }
      const StepId id{static_cast<std::uint64_t>(b), 0};
      chooser->choose(id, kN, {.k = kK}, comm);
      const Chooser::Times told = chooser->told(0);
      chooser->took(id, 1'000'000, {2 * told.bucket_s, 2 * told.pair_s});
    }
    comm.barrier();
    if (comm.rank() == 0) after = test::allocations();
  });
  EXPECT_EQ(after, before);
}

// Rank 0's link counts; that others have none, or another, must not lead to another choice.
TEST(chooser, options_of_other_ranks) {
  std::vector<std::vector<std::size_t>> taken(3);
  test::run_group(3, [&](Communicator& comm) {
    ChooserOptions options{.trial_share = 1.0};
    if (comm.rank() == 0) options.link = Link{1e-9, 1e-13};
    if (comm.rank() == 1) options.link = kSlow;
    const auto chooser = make_chooser({}, options);
    for (int b = 0; b < 50; ++b) {
      const StepId id{static_cast<std::uint64_t>(b), 0};
      auto& own = taken[static_cast<std::size_t>(comm.rank())];
      own.push_back(chooser->choose(id, kN, {.k = kK}, comm));
      const bool told = chooser->told(0).bucket_s > 0.0F;
      chooser->took(id, 1'000'000, told ? Chooser::Times{3e-3F, 6e-3F} : Chooser::Times{});
    }
  });
  EXPECT_EQ(taken[1], taken[0]);
  EXPECT_EQ(taken[2], taken[0]);
}

TEST(chooser, a_single_candidate) {
  const auto taken =
      drive(2, 10, {.among = {K::dense}, .link = kSlow}, [](K, int, int) { return 1e-3; });
  EXPECT_EQ(count(taken[0], K::dense), 10);
}

// One rank has nothing to send: selection and residual must work all the same.
TEST(chooser, one_rank_takes_a_sparse_exchange) {
  test::run_group(1, [](Communicator& comm) {
    const auto chooser = make_chooser({}, {.among = {K::dense, K::gtopk}});
    EXPECT_EQ(chooser->choose({}, 10, {.k = 1}, comm), 1U);
    EXPECT_EQ(chooser->decision(0), "");
  });
}

TEST(chooser, refuses_a_link_and_speeds_below_zero) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const double bad : {-1.0, kNan}) {
    EXPECT_THROW(make_chooser({}, {.link = Link{.alpha_s = bad}}), InvalidArgument) << bad;
    EXPECT_THROW(make_chooser({}, {.link = Link{.beta_s_per_byte = bad}}), InvalidArgument) << bad;
    EXPECT_THROW(make_chooser({}, {.local_speeds = {.merge_s = bad}}), InvalidArgument) << bad;
  }
}

// ---- replay

// A chooser whose clock is chance. It decides as if exchanges had taken that long.
class ByChance final : public Chooser {
 public:
  ByChance(std::unique_ptr<Chooser> inside, int rank, std::uint64_t seed)
      : inside_(std::move(inside)), random_(seed + static_cast<std::uint64_t>(rank)) {}
  std::span<const ExchangeOptions> candidates() const noexcept override {
    return inside_->candidates();
  }
  std::size_t choose(StepId id, std::size_t n, const Keep& keep, Communicator& comm) override {
    return inside_->choose(id, n, keep, comm);
  }
  Times told(Slot slot) const noexcept override { return inside_->told(slot); }
  void took(StepId id, std::int64_t, const Times& heard) noexcept override {
    inside_->took(id, std::uniform_int_distribution<std::int64_t>(1'000'000, 9'000'000)(random_),
                  heard);
  }
  std::string_view decision(Slot slot) const noexcept override { return inside_->decision(slot); }

 private:
  std::unique_ptr<Chooser> inside_;
  std::mt19937_64 random_;
};

struct Trained {
  Choices choices;
  std::vector<std::vector<float>> all;  // the mean and the residual after every bucket
};

// Some steps of two buckets.
Trained train(Communicator& comm, std::unique_ptr<Chooser> chooser, int steps,
              std::size_t second = 500) {
  Trained run{.choices = {.ranks = comm.size(), .of = {}}, .all = {}};
  ReducerParts parts;
  parts.chooser = std::move(chooser);
  parts.schedule = constant_density(0.02);
  Reducer reducer({.dense_below = 64}, std::move(parts), comm);
  const std::vector<std::size_t> lengths = {900, second};
  reducer.set_layout(test::buckets(lengths));
  for (int step = 0; step < steps; ++step) {
    for (Slot s = 0; s < 2; ++s) {
      std::vector<float> g = test::normal(
          lengths[s], 1000 * static_cast<std::uint64_t>(step) + 10 * s +
                          static_cast<std::uint64_t>(comm.rank()));
      run.choices.add(reducer.reduce(s, std::span(g)));
      run.all.push_back(g);
      run.all.push_back(test::kept_by(reducer, s));
    }
    EXPECT_TRUE(reducer.end_step(0.0));
  }
  return run;
}
const ChooserOptions kTriesAll{.among = {K::dense, K::allgather, K::gtopk, K::oktopk},
                               .link = kSlow,
                               .trial_share = 1.0};

// Bit by bit, trials included, although the clocks say something else. Two runs by their own
// clocks differ.
TEST(replay, a_run_has_the_bits_of_the_recorded_one) {
  for (const int ranks : {1, 2, 3, 4}) {
    test::run_group(ranks, [&](Communicator& comm) {
      const auto by_chance = [&](std::uint64_t seed) {
        return std::make_unique<ByChance>(make_chooser({}, kTriesAll), comm.rank(), seed);
      };
      const Trained first = train(comm, by_chance(1), 60), other = train(comm, by_chance(1000), 60);
      if (ranks > 1) {
        EXPECT_GT(first.choices.of.at(0).size(), 3U) << "there were trials";
        EXPECT_NE(first.choices.of, other.choices.of);
        EXPECT_NE(first.all, other.all);
      }
      const Trained again = train(comm, make_replay({}, first.choices, ranks), 60);
      EXPECT_EQ(again.all, first.all);
      EXPECT_EQ(again.choices.of, first.choices.of) << "a replay is recorded like any run";
    });
  }
}

TEST(replay, stays_with_the_last_choice) {
  test::run_group(2, [](Communicator& comm) {
    Choices choices{.ranks = 2, .of = {}};
    choices.of[0] = {{0, 900, K::gtopk}, {3, 900, K::dense}, {4, 900, K::allgather}};
    choices.of[1] = {{0, 500, K::oktopk}};
    const Trained run = train(comm, make_replay({}, choices, 2), 20);
    EXPECT_EQ(run.choices.of, choices.of);
  });
}

TEST(replay, refuses_choices_of_another_run) {
  Choices choices{.ranks = 2, .of = {}};
  choices.of[0] = {{5, 900, K::gtopk}};
  const auto making = [&](const Choices& c, int ranks) {
    return message_of([&] { make_replay({}, c, ranks); });
  };
  EXPECT_EQ(making(choices, 3), "replay: the choices are of 2 ranks, this run has 3");
  EXPECT_NE(making({.ranks = 2, .of = {}}, 2).find("there are no choices"), std::string::npos);
  Choices bad = choices;
  bad.of[0].push_back({5, 900, K::dense});
  EXPECT_EQ(making(bad, 2), "replay: slot 0: steps must ascend");
  bad.of[0] = {{0, 900, K::param_server}};
  EXPECT_EQ(making(bad, 2), "replay: slot 0: no chooser can choose param-server");

  test::run_group(2, [&](Communicator& comm) {
    const auto choosing = [&](StepId id, std::size_t n) {
      return message_of([&] { make_replay({}, choices, 2)->choose(id, n, {.k = 9}, comm); });
    };
    EXPECT_EQ(choosing({6, 0}, 901),
              "replay: slot 0 in step 6 has 901 entries, in the record 900; replay it with the "
              "same model and buckets");
    EXPECT_NE(choosing({4, 0}, 900).find("slot 0 in step 4 is not in the record"),
              std::string::npos);
    EXPECT_NE(choosing({6, 1}, 900).find("slot 1 in step 6 is not in the record"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace skim
