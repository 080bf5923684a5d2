// exchange.hpp: every exchange against its oracle, and what it refuses.
#include "skim/exchange.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "exchange_oracle.hpp"
#include "fault.hpp"
#include "group.hpp"
#include "oracle.hpp"
#include "parts.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

using test::ExchangeOutcome;
using test::run_group;

struct Case {
  std::string name;
  std::size_t n, k;
  std::function<SparseBuffer(std::size_t rank, std::size_t ranks)> select;
};

std::vector<Case> cases() {
  const auto correlated = [](std::size_t n, std::size_t rank) {
    std::vector<float> x = test::normal(n, 1);
    const std::vector<float> own = test::normal(n, 100 + rank);
    for (std::size_t i = 0; i < n; ++i) x[i] += 0.5F * own[i];
    return x;
  };
  return {
      {"independent", 200, 12,
       [](std::size_t r, std::size_t) { return test::top_k(test::normal(200, r), 12); }},
      {"correlated", 100, 9,
       [=](std::size_t r, std::size_t) { return test::top_k(correlated(100, r), 9); }},
      {"unequal counts, more and fewer than k", 100, 9,
       [=](std::size_t r, std::size_t) {
         return test::top_k(correlated(100, r), std::array<std::size_t, 4>{0, 30, 5, 9}[r % 4]);
       }},
      {"nobody has anything", 30, 3,
       [](std::size_t, std::size_t) { return test::top_k(std::vector<float>(30), 3); }},
      {"one rank alone has something", 30, 3,
       [](std::size_t r, std::size_t ranks) {
         return test::top_k(r + 1 == ranks ? test::normal(30, r) : std::vector<float>(30), 3);
       }},
      {"k = n", 25, 25,
       [](std::size_t r, std::size_t) { return test::top_k(test::integers(25, r), 25); }},
      {"all ranks alike, all magnitudes equal", 20, 4,
       [](std::size_t, std::size_t) { return test::top_k(std::vector<float>(20, -1.0F), 4); }},
      {"neighbours cancel", 20, 4,
       [](std::size_t r, std::size_t) {
         std::vector<float> x = test::integers(20, r / 2);
         for (float& v : x) v *= r % 2 == 0 ? 1.0F : -1.0F;
         return test::top_k(x, 4);
       }},
      {"k = 1", 50, 1,
       [](std::size_t r, std::size_t) { return test::top_k(test::normal(50, r), 1); }},
      {"k = 0", 50, 0,
       [](std::size_t r, std::size_t) { return test::top_k(test::normal(50, r), 2); }},
      {"n = 0", 0, 0, [](std::size_t, std::size_t) { return test::top_k({}, 0); }},
      {"the largest in one place", 40000, 2200,
       [](std::size_t r, std::size_t ranks) {
         SparseBuffer s;
         s.reset(40000);
         for (std::size_t e = 0; e < 2200; ++e) {
           const std::size_t i = r + e * ranks;  // nobody else's
           s.append(static_cast<Index>(i), 1.0F / static_cast<float>(1 + i));
         }
         return s;
       }},
  };
}

GroupStats stats_of(std::size_t rank) {
  const auto r = static_cast<double>(rank);
  return {.gradient_norm2 = 1.0 + 0.1 * r,
          .accumulated_norm2 = 2.0 + r,
          .sent_norm2 = 3.0 + r,
          .sent_bytes = 100 + rank,
          .non_finite = static_cast<std::uint32_t>(rank),
          .signals = 1U << rank,
          .bucket_s = 0.5F + static_cast<float>(rank),
          .pair_s = 1.0F};
}

// P = 1 to 9 and 16.
std::vector<int> exchange_sizes() {
#ifdef SKIM_TEST_MPI
  return test::group_sizes();
#else
  if (test::kSanitized) return test::group_sizes();
  return {1, 2, 3, 4, 5, 6, 7, 8, 9, 16};
#endif
}

// The sum of an exchange, of either form, with all n entries where it is dense.
SparseBuffer sum_of(const ExchangeResult& got) {
  SparseBuffer s;
  if (got.dense_sum.empty()) {
    s.assign(got.sum);
    return s;
  }
  s.reset(got.dense_sum.n);
  for (std::size_t i = 0; i < got.dense_sum.n; ++i) {
    s.append(static_cast<Index>(i), got.dense_sum.data[i]);
  }
  return s;
}

// Sum, returned mass, statistics and traffic, on every rank, three times with one object.
void expect_oracle(int ranks, const ExchangeOptions& options, const Case& c,
                   const test::ExchangeOracle::HostOf& host_of) {
  const auto p = static_cast<std::size_t>(ranks);
  std::vector<SparseBuffer> selected;
  std::vector<SparseView> views;
  for (std::size_t r = 0; r < p; ++r) selected.push_back(c.select(r, p));
  for (const auto& s : selected) views.push_back(s.view());
  test::ExchangeOracle oracle(options, host_of);
  // Of an exchange that keeps nothing between steps one outcome tells all: the oracles are slow.
  const bool keeps = options.kind == ExchangeKind::oktopk ||
                     options.kind == ExchangeKind::hierarchical ||
                     options.kind == ExchangeKind::param_server;
  std::vector<ExchangeOutcome> outcomes;
  for (int run = 0; run < (keeps ? 3 : 1); ++run) outcomes.push_back(oracle.run(views, c.k));
  run_group(ranks, [&](Communicator& whole) {
    test::OnHost comm(whole, host_of(static_cast<std::size_t>(whole.rank())));
    SCOPED_TRACE(test::name_of(options) + ", " + c.name + ", rank " + std::to_string(comm.rank()) +
                 " of " + std::to_string(ranks));
    const auto exchange = make_exchange(options);
    const auto me = static_cast<std::size_t>(comm.rank());
    for (std::uint64_t step = 0; step < 3; ++step) {
      const ExchangeOutcome& expected = outcomes[keeps ? step : 0];
      const Traffic before = comm.traffic();
      GroupStats stats = stats_of(me);
      const ExchangeResult got = exchange->run({step, 0}, views[me], {.k = c.k}, stats, comm);
      exchange->end_step();
      EXPECT_EQ(!got.dense_sum.empty(), expected.dense);
      EXPECT_TRUE(test::same(sum_of(got).view(), expected.sum.view())) << "step " << step;
      EXPECT_TRUE(is_canonical(got.returned));
      EXPECT_EQ(got.returned.dim, c.n);
      EXPECT_TRUE(test::same(test::without_zeros(got.returned).view(),
                             test::without_zeros(expected.returned[me].view()).view()));

      const Traffic& after = comm.traffic();
      EXPECT_EQ(after.sent_bytes - before.sent_bytes, expected.traffic[me].sent_bytes);
      EXPECT_EQ(after.received_bytes - before.received_bytes, expected.traffic[me].received_bytes);
      EXPECT_EQ(after.messages - before.messages, expected.traffic[me].messages);
      EXPECT_EQ(after.rounds - before.rounds, expected.traffic[me].rounds);

      double norms = 0.0;
      for (std::size_t r = 0; r < p; ++r) norms += stats_of(r).gradient_norm2;
      EXPECT_NEAR(stats.gradient_norm2, norms, 1e-12);
      EXPECT_EQ(stats.accumulated_norm2, static_cast<double>(2 * p + p * (p - 1) / 2));
      EXPECT_EQ(stats.sent_norm2, static_cast<double>(3 * p + p * (p - 1) / 2));
      EXPECT_EQ(stats.sent_bytes, 100 + p - 1);
      EXPECT_EQ(stats.non_finite, p * (p - 1) / 2);
      EXPECT_EQ(stats.signals, (1U << p) - 1);
    }
  });
}

TEST(exchange, is_its_oracle) {
  for (const int ranks : exchange_sizes()) {
    for (const ExchangeOptions& options : test::sparse_exchanges()) {
      for (const Case& c : cases())
        expect_oracle(ranks, options, c, [](std::size_t) { return 0U; });
    }
  }
}

// Hosts of equal and unequal size, with ranks that are neighbours and ranks that are not, with each
// exchange inside and between.
TEST(exchange, hierarchical_is_its_oracle_on_any_hosts) {
  const std::vector<test::ExchangeOracle::HostOf> hosts = {
      [](std::size_t r) { return r / 3; }, [](std::size_t r) { return r % 2; },
      [](std::size_t r) { return r < 2 ? r : 7; }, [](std::size_t r) { return 100 - r; },
      [](std::size_t r) { return r / 2 - 5; }};  // also negative ones
  using K = ExchangeKind;
  std::vector<HierarchyOptions> parts;
  for (const K kind : {K::allgather, K::gtopk, K::global_topk, K::oktopk, K::sparcml}) {
    parts.push_back({.inside = K::allgather, .between = kind});
    if (kind != K::allgather) parts.push_back({.inside = kind, .between = K::gtopk});
  }
  for (const int ranks : exchange_sizes()) {
    for (const auto& host_of : hosts) {
      for (const HierarchyOptions& h : parts) {
        const ExchangeOptions options{
            .kind = K::hierarchical, .hierarchy = h, .codec = {.index = IndexCode::raw32}};
        const std::vector<Case> all = cases();
        for (const std::size_t c : {1U, 2U, 4U}) expect_oracle(ranks, options, all[c], host_of);
      }
    }
  }
}

// No mass is made or lost, whole numbers bit by bit, on any number of ranks and hosts.
TEST(exchange, conserves) {
  const std::size_t n = 120, k = 9;
  for (const int ranks : exchange_sizes()) {
    for (const ExchangeOptions& options : test::sparse_exchanges()) {
      if (options.drop == DropPolicy::sender_keeps) continue;
      for (const bool hosts : {false, true}) {
        if (hosts && options.kind != ExchangeKind::hierarchical) continue;
        run_group(ranks, [&](Communicator& whole) {
          test::OnHost comm(whole, hosts ? static_cast<std::size_t>(whole.rank()) / 2 : 0U);
          SCOPED_TRACE(test::name_of(options) + " on " + std::to_string(ranks) + " ranks");
          const auto exchange = make_exchange(options);
          for (std::uint64_t step = 0; step < 20; ++step) {
            const auto me = static_cast<std::uint64_t>(comm.rank());
            std::vector<float> x = test::integers(n, 50, 500);
            const std::vector<float> own = test::integers(n, 100 * step + me, 400);
            for (std::size_t i = 0; i < n; ++i) x[i] += own[i];
            const std::size_t count = std::array<std::size_t, 5>{9, 9, 12, 0, 40}[(me + step) % 5];
            const SparseBuffer mine = test::top_k(x, count);
            GroupStats stats;
            const std::vector<float> held_before = test::held_by(*exchange, n);
            const ExchangeResult got = exchange->run({step, 0}, mine.view(), {.k = k}, stats, comm);
            std::vector<float> left = test::dense(mine.view());
            const std::vector<float> back = test::dense(got.returned);
            for (std::size_t i = 0; i < n; ++i) left[i] -= back[i];  // what this rank delivered
            const std::vector<float> result = test::dense(sum_of(got).view());
            // What went into the exchange has come out, or is held.
            const std::vector<float> held = test::held_by(*exchange, n);
            for (std::size_t i = 0; i < n; ++i) left[i] -= held[i] - held_before[i];
            const auto all = test::gather(whole, left), results = test::gather(whole, result);
            std::vector<float> delivered(n, 0.0F);
            for (const auto& of_rank : all) {
              for (std::size_t i = 0; i < n; ++i) delivered[i] += of_rank[i];
            }
            EXPECT_EQ(result, delivered) << "step " << step;
            for (const auto& other : results) EXPECT_TRUE(test::same_bits(other, result));
            if (step % 3 == 2) {
              exchange->rollback_step();
              EXPECT_EQ(test::held_by(*exchange, n), held_before);
            } else {
              exchange->end_step();
            }
          }
        });
      }
    }
  }
}

TEST(exchange, decode_frame_wants_statistics_if_the_caller_does) {
  const auto group = make_in_process_group(2);
  SparseBuffer entries, out;
  entries.reset(10);
  entries.append(3, 1.5F);
  GroupStats stats, got;
  stats.signals = 6;
  const Codec codec;
  std::vector<std::byte> with, without;
  codec.encode(entries.view(), &stats, with);
  codec.encode(entries.view(), nullptr, without);
  decode_frame(codec, with, 10, out, got, *group[0], 1);
  EXPECT_TRUE(test::same(out.view(), entries.view()));
  EXPECT_EQ(got.signals, 6U);
  for (const auto& frame : {with, without}) {
    decode_frame(codec, frame, 10, out, *group[0], 1);
    EXPECT_TRUE(test::same(out.view(), entries.view()));
  }
  try {
    decode_frame(codec, without, 10, out, got, *group[0], 1);
    ADD_FAILURE() << "a frame without statistics";
  } catch (const CommError& e) {
    EXPECT_EQ(e.peer(), 1);
    EXPECT_NE(std::string(e.what()).find("without statistics"), std::string::npos) << e.what();
  }
}

// Entries of one list that are, or are not, in another: across windows of 2^18 indices, and at
// their ends.
TEST(exchange, filter_is_set_intersection_and_difference) {
  std::mt19937_64 rng(4);
  const std::size_t n = 5'000'000;
  for (const std::size_t count : {0U, 1U, 40U, 3000U}) {
    const auto draw = [&] {
      std::map<Index, float> entries;
      for (const Index at : {0U, 63U, 64U, 0x3ffffU, 0x40000U, 4'999'999U}) {
        if (rng() % 2 == 0) entries[at] = 1.0F;
      }
      while (entries.size() < count) {
        entries[static_cast<Index>((rng() % 4 * 1'200'000 + rng() % 5000) % n)] = 2.0F;
      }
      SparseBuffer s;
      s.reset(n);
      for (const auto& [i, v] : entries) s.append(i, v);
      return s;
    };
    const SparseBuffer a = draw(), b = draw();
    const std::set<Index> in_b = test::indices_of(b.view());
    SparseBuffer out;
    for (const bool wanted : {true, false}) {
      (wanted ? entries_in : entries_not_in)(a.view(), b.view(), out);
      const auto expected =
          test::entries_where(a.view(), [&](Index i) { return in_b.contains(i) == wanted; });
      EXPECT_TRUE(test::same(out.view(), expected.view())) << count << wanted;
    }
  }
}

// Values that are rounded where they are selected, and where sums of them are sent on. (Exchanges
// of which the oracle does not round: laws, conservation_at_every_value_code.)
TEST(exchange, is_its_oracle_with_rounded_values) {
  for (const int ranks : test::group_sizes()) {
    for (ExchangeOptions options : test::sparse_exchanges()) {
      using K = ExchangeKind;
      if (options.kind != K::allgather && options.kind != K::gtopk &&
          options.kind != K::global_topk) {
        continue;
      }
      for (const ValueCode value : {ValueCode::f16, ValueCode::q4, ValueCode::q2}) {
        options.codec.value = value;
        for (const Case& c : cases()) {
          const auto p = static_cast<std::size_t>(ranks);
          std::vector<SparseBuffer> selected;
          std::vector<SparseView> views;
          for (std::size_t r = 0; r < p; ++r) {
            selected.push_back(c.select(r, p));
            Codec(options.codec).quantize(selected.back(), {}, static_cast<int>(r));
          }
          for (const auto& s : selected) views.push_back(s.view());
          const ExchangeOutcome expected = test::ExchangeOracle(options).run(views, c.k);
          run_group(ranks, [&](Communicator& comm) {
            SCOPED_TRACE(test::name_of(options) + ", " + std::string(name_of(value)) + ", " +
                         c.name + ", rank " + std::to_string(comm.rank()) + " of " +
                         std::to_string(ranks));
            const auto me = static_cast<std::size_t>(comm.rank());
            GroupStats stats = stats_of(me);
            const auto exchange = make_exchange(options);
            const ExchangeResult got = exchange->run({}, views[me], {.k = c.k}, stats, comm);
            EXPECT_TRUE(test::same(got.sum, expected.sum.view()));
            EXPECT_TRUE(is_canonical(got.returned));
            EXPECT_TRUE(test::same(test::without_zeros(got.returned).view(),
                                   test::without_zeros(expected.returned[me].view()).view()));
          });
        }
      }
    }
  }
}

// A merge gives NaN and infinity the highest rank, so that they reach every rank and are seen.
TEST(exchange, non_finite_values_arrive) {
  for (const ExchangeOptions& options : test::sparse_exchanges()) {
    run_group(4, [&](Communicator& comm) {
      SparseBuffer mine;
      mine.reset(40);
      const auto at = static_cast<Index>(10 * comm.rank());
      mine.append(at, 1.0F);
      mine.append(at + 1, comm.rank() == 3 ? std::numeric_limits<float>::quiet_NaN() : 2.0F);
      GroupStats stats;
      const auto exchange = make_exchange(options);
      const ExchangeResult got = exchange->run({}, mine.view(), {.k = 2}, stats, comm);
      EXPECT_TRUE(std::ranges::any_of(sum_of(got).view().value, [](float v) {
        return std::isnan(v);
      })) << test::name_of(options);
    });
  }
}

// Who reads the other length first says so; the others learn of the abort.
TEST(exchange, another_length_is_an_error_on_every_rank) {
  for (const ExchangeOptions& options : test::sparse_exchanges()) {
    std::vector<std::string> errors(3);
    test::run_threads(3, [&](Communicator& comm) {
      SparseBuffer mine;
      mine.reset(comm.rank() == 2 ? 41 : 40);
      GroupStats stats;
      const auto exchange = make_exchange(options);
      try {
        exchange->run({}, mine.view(), {.k = 2}, stats, comm);
      } catch (const CommError& e) {
        EXPECT_GE(e.peer(), 0);
        EXPECT_NE(e.phase(), "");
        errors[static_cast<std::size_t>(comm.rank())] = e.what();
      }
    });
    for (const auto& e : errors) EXPECT_NE(e, "") << test::name_of(options);

    EXPECT_TRUE(std::ranges::any_of(errors, [](const std::string& e) {
      return e.find("another dense length") != std::string::npos;
    })) << errors[0];
  }
}

// ---- oktopk

// A gradient that drifts, as in training: a part that all ranks share, one of each rank, and noise.
std::vector<float> drifting(std::size_t n, std::uint64_t step, std::uint64_t rank,
                            bool concentrated) {
  std::vector<float> x = test::normal(n, 3);
  const std::vector<float> own = test::normal(n, 100 + rank),
                           noise = test::normal(n, 977 * step + rank);
  for (std::size_t i = 0; i < n; ++i) {
    x[i] += 0.3F * own[i] + 0.3F * noise[i];
    // Where the large ones are moves on, and not on all ranks alike.
    if (concentrated) {
      const std::size_t from = (37 * step + n / 3 * rank) % n;
      x[i] *= (i + n - from) % n < n / 8 ? 20.0F : 1.0F;
    }
  }
  return x;
}

// Tells what is moved in each phase.
class CountsByPhase final : public test::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  std::map<std::string, std::uint64_t> sent, received;

 private:
  Ticket do_isend(Bytes message, int peer) override {
    sent[phase().name] += message.size();
    return forward_isend(message, peer);
  }
  std::size_t do_wait(Ticket ticket) override {
    const std::size_t bytes = forward_wait(ticket);
    received[phase().name] += bytes;
    return bytes;
  }
};

// A rank sends, and receives, at most (4/3) 3 k (P - 1)/P entries in a run, up to one for each
// other rank and two: an entry is an index and a value, so that is a third above the 6 k (P - 1)/P
// of the paper. Also where what is large moves from rank to rank, and where more than k are
// selected.
TEST(oktopk, volume_is_bounded) {
  const std::size_t n = 1500, k = 90;
  for (const int ranks : exchange_sizes()) {
    if (ranks == 1) continue;
    for (const bool concentrated : {false, true}) {
      run_group(ranks, [&](Communicator& whole) {
        SCOPED_TRACE(std::to_string(ranks) + " ranks");
        const auto p = static_cast<std::uint64_t>(ranks);
        const auto exchange =
            make_exchange({.kind = ExchangeKind::oktopk, .codec = {.index = IndexCode::raw32}});
        std::size_t cut_stood = 0, held_back = 0;
        for (std::uint64_t step = 0; step < 70; ++step) {
          const SparseBuffer mine =
              test::top_k(drifting(n, step, static_cast<std::uint64_t>(whole.rank()), concentrated),
                          step % 7 == 3 ? 2 * k : k);
          CountsByPhase comm(whole);
          GroupStats stats;
          const ExchangeResult got = exchange->run({step, 0}, mine.view(), {.k = k}, stats, comm);
          exchange->end_step();
          EXPECT_LE(got.sum.nnz(), 4 * k / 3);
          const std::set<Index> kept = test::indices_of(got.sum);
          for (const Index i : got.returned.index) held_back += kept.contains(i) ? 1U : 0U;

          const std::uint64_t packs = p <= 3 ? 0 : 8 * (p - 1 - test::log2_ceil(p));
          const std::uint64_t entries = 4 * k * (p - 1) / p + (p - 1) + 2;
          const std::uint64_t headers = (64 + 24 + 24) * (p - 1) + packs;
          for (auto* moved : {&comm.sent, &comm.received}) {
            auto& bytes = *moved;
            EXPECT_LE(bytes["oktopk: reduce"] + bytes["oktopk: balance"] + bytes["oktopk: gather"],
                      8 * entries + headers);
            EXPECT_LE(bytes["oktopk: count"], 24 * (p - 1) + packs);
          }
          cut_stood += comm.sent["oktopk: cut"] == 0 ? 1U : 0U;
        }
        EXPECT_GT(cut_stood, concentrated ? 0U : 40U);
        if (concentrated) {
          EXPECT_GT(held_back, 0U) << "the limit of a part was never reached";
        }
      });
    }
  }
}

// Saved between two runs, continued by another object: the same bits; a step that is rolled back
// leaves no trace.
TEST(oktopk, state_is_saved_and_rolled_back) {
  for (const int ranks : {2, 5}) {
    run_group(ranks, [&](Communicator& comm) {
      const ExchangeOptions options{.kind = ExchangeKind::oktopk,
                                    .oktopk = {.cut_every = 4, .regions_every = 6}};
      const auto run = [&](Exchange& exchange, std::uint64_t step) {
        const SparseBuffer mine =
            test::top_k(drifting(300, step, static_cast<std::uint64_t>(comm.rank()), false), 20);
        GroupStats stats;
        SparseBuffer sum;
        sum.assign(exchange.run({step, 3}, mine.view(), {.k = 20}, stats, comm).sum);
        return sum;
      };
      const auto saved = [](const Exchange& exchange) {
        std::ostringstream out;
        exchange.save(out);
        return out.str();
      };
      const auto whole = make_exchange(options);
      auto parted = make_exchange(options);
      std::string last = saved(*parted);
      for (std::uint64_t step = 0; step < 20; ++step) {
        const SparseBuffer expected = run(*whole, step);
        whole->end_step();
        if (step > 0) {
          run(*parted, 100 + step);
          run(*parted, 200 + step);
          EXPECT_NE(saved(*parted), last);
          parted->rollback_step();
          EXPECT_EQ(saved(*parted), last);
        }
        EXPECT_TRUE(test::same(run(*parted, step).view(), expected.view())) << "step " << step;
        parted->end_step();
        last = saved(*parted);
        EXPECT_EQ(last, saved(*whole));
        parted = make_exchange(options);
        std::istringstream in(last);
        parted->load(in);
      }
      std::string damaged = last;
      damaged[damaged.size() / 2] ^= 1;
      std::istringstream in(damaged);
      EXPECT_THROW(parted->load(in), StateError);
      EXPECT_EQ(saved(*parted), last);
    });
  }
}

// Two hosts of four ranks have the same selections. Their sums are the same, but they must not be
// rounded alike. If they were, the errors of many hosts would add up.
TEST(exchange, hosts_do_not_round_alike) {
  using K = ExchangeKind;
  const std::size_t n = 400, k = 100;
  for (const K inside : {K::gtopk, K::gtopk_tree, K::oktopk, K::sparcml}) {
    for (const K between : {K::allgather, K::gtopk}) {
      const ExchangeOptions options{
          .kind = K::hierarchical,
          .hierarchy = {.inside = inside, .between = between},
          .codec = {.value = ValueCode::q4, .rounding = Rounding::stochastic}};
      SCOPED_TRACE(std::string(name_of(inside)) + " inside, " + std::string(name_of(between)) +
                   " between");
      run_group(8, [&](Communicator& whole) {
        const auto me = static_cast<std::size_t>(whole.rank());
        test::OnHost comm(whole, me / 4);
        SparseBuffer mine = test::top_k(drifting(n, 1, me % 4, false), k);
        Codec(options.codec).quantize(mine, {1, 0}, static_cast<int>(me % 4));
        const auto exchange = make_exchange(options);
        GroupStats stats;
        const ExchangeResult got = exchange->run({1, 0}, mine.view(), {.k = k}, stats, comm);
        const std::vector<float> back = test::dense(got.returned);
        std::vector<float> delivered = test::dense(mine.view());
        for (std::size_t i = 0; i < n; ++i) delivered[i] -= back[i];
        const std::vector<float> result = test::dense(sum_of(got).view());
        std::vector<double> sum(n);
        for (const auto& of_rank : test::gather(whole, delivered)) {
          for (std::size_t i = 0; i < n; ++i) sum[i] += of_rank[i];
        }
        for (std::size_t i = 0; i < n; ++i) ASSERT_NEAR(result[i], sum[i], 1e-4);
        for (const auto& other : test::gather(whole, result)) {
          EXPECT_TRUE(test::same_bits(other, result));
        }
        const auto returned = test::gather(whole, back);
        std::size_t alike = 0;
        for (std::size_t r = 1; r < 4; ++r) alike += returned[r] == returned[r + 4] ? 1U : 0U;
        // Not every rank rounds. A rank that does not gets back what was dropped.
        EXPECT_LT(alike, 3U);
      });
    }
  }
}

// When a run resumes, its ranks may be on other hosts. Then the parts begin anew. On the same hosts
// the run continues bit by bit.
TEST(exchange, hierarchical_goes_on_from_a_saved_state_on_any_hosts) {
  const std::vector<test::ExchangeOracle::HostOf> placements = {
      [](std::size_t r) { return r / 2; }, [](std::size_t r) { return r % 2; },
      [](std::size_t r) { return r; }, [](std::size_t) { return 0U; }};
  using K = ExchangeKind;
  const ExchangeOptions options{.kind = K::hierarchical,
                                .hierarchy = {.inside = K::oktopk, .between = K::oktopk}};
  for (const int ranks : {4, 5}) {
    run_group(ranks, [&](Communicator& whole) {
      const auto me = static_cast<std::size_t>(whole.rank());
      const auto run = [&](Exchange& exchange, std::uint64_t step, Communicator& comm) {
        const SparseBuffer mine = test::top_k(drifting(300, step, me, false), 20);
        GroupStats stats;
        const ExchangeResult got = exchange.run({step, 3}, mine.view(), {.k = 20}, stats, comm);
        std::array<SparseBuffer, 2> outcome;
        outcome[0].assign(got.sum);
        outcome[1].assign(got.returned);
        exchange.end_step();
        return outcome;
      };
      const auto saved = [](const Exchange& exchange) {
        std::ostringstream out;
        exchange.save(out);
        return out.str();
      };
      for (std::size_t from = 0; from < placements.size(); ++from) {
        for (std::size_t to = 0; to < placements.size(); ++to) {
          SCOPED_TRACE("from hosts " + std::to_string(from) + " to hosts " + std::to_string(to));
          test::OnHost before(whole, placements[from](me)), after(whole, placements[to](me));
          const auto first = make_exchange(options), fresh = make_exchange(options);
          std::uint64_t step = 0;
          for (; step < 4; ++step) run(*first, step, before);
          const std::string state = saved(*first);
          // Also into an exchange that has run, and back.
          const auto second = make_exchange(options);
          run(*second, step, after);
          const std::string own = saved(*second);
          std::istringstream cut(state.substr(0, state.size() - 1)), in(state);
          EXPECT_THROW(second->load(cut), StateError);
          EXPECT_EQ(saved(*second), own) << "loaded in part";
          second->load(in);
          EXPECT_EQ(saved(*second), state);
          Exchange& expected = from == to ? *first : *fresh;
          Communicator& on = from == to ? before : after;
          for (; step < 8; ++step) {
            const auto a = run(expected, step, on), b = run(*second, step, after);
            EXPECT_TRUE(test::same(a[0].view(), b[0].view())) << "step " << step;
            EXPECT_TRUE(test::same(a[1].view(), b[1].view())) << "step " << step;
            EXPECT_EQ(saved(expected), saved(*second));
          }
        }
      }
    });
  }
}

// A row says truly whether k_down counts: then it changes the result, and else it changes nothing.
TEST(exchange, k_down_counts_where_the_row_says_so) {
  using K = ExchangeKind;
  const std::size_t n = 200, k = 12;
  std::vector<ExchangeOptions> all = test::sparse_exchanges();
  for (const ExchangeRow& part : exchange_rows()) {
    if (!part.nests) continue;
    all.push_back({.kind = K::hierarchical, .hierarchy = {.inside = part.kind}});
    all.push_back({.kind = K::hierarchical, .hierarchy = {.between = part.kind}});
  }
  std::atomic<bool> is_run = false;
  run_group(4, [&](Communicator&) { is_run = true; });
  if (!is_run) GTEST_SKIP() << "under mpirun it needs 4 ranks";
  const auto entries_of = [&](const ExchangeOptions& options, std::size_t k_down) {
    std::atomic<std::size_t> entries = 0;  // the same on all ranks
    run_group(4, [&](Communicator& whole) {
      test::OnHost comm(whole, static_cast<std::size_t>(whole.rank()) / 2);
      const auto exchange = make_exchange(options);
      const auto r = static_cast<std::size_t>(whole.rank());
      const SparseBuffer mine = test::top_k(test::normal(n, r), k);
      GroupStats stats;
      const ExchangeResult result =
          exchange->run({0, 0}, mine.view(), {.k = k, .k_down = k_down}, stats, comm);
      entries = result.dense_sum.empty() ? result.sum.nnz() : n;
    });
    return entries.load();
  };
  for (const ExchangeOptions& options : all) {
    const bool changes = entries_of(options, 2) != entries_of(options, 0);
    EXPECT_EQ(cuts_result(options), changes)
        << test::name_of(options) << ", inside " << name_of(options.hierarchy.inside)
        << ", between " << name_of(options.hierarchy.between);
  }
  EXPECT_FALSE(cuts_result({.kind = K::dense}));
  EXPECT_FALSE(cuts_result({.kind = K::hierarchical, .hierarchy = {.between = K::hierarchical}}));
}

// A row says truly whether every entry that was sent is delivered: then no rank gets one back.
TEST(exchange, delivers_all_where_the_row_says_so) {
  std::atomic<bool> is_run = false;
  for (const ExchangeRow& row : exchange_rows()) {
    if (row.kind == ExchangeKind::dense) continue;
    run_group(4, [&](Communicator& whole) {
      is_run = true;
      test::OnHost comm(whole, static_cast<std::size_t>(whole.rank()) / 2);
      const auto exchange = make_exchange({.kind = row.kind});
      const auto r = static_cast<std::size_t>(whole.rank());
      const SparseBuffer mine = test::top_k(test::normal(200, r), 12);
      GroupStats stats;
      const ExchangeResult result = exchange->run({0, 0}, mine.view(), {.k = 12}, stats, comm);
      const bool all_is_delivered =
          exchange->held_mass() == nullptr && test::without_zeros(result.returned).nnz() == 0;
      const std::array said{std::byte{all_is_delivered}};
      MessageList of_ranks;
      whole.allgather(said, of_ranks);
      bool everywhere = true;
      for (std::size_t i = 0; i < of_ranks.size(); ++i) {
        everywhere = everywhere && of_ranks[i][0] == std::byte{1};
      }
      EXPECT_EQ(row.delivers_all, everywhere) << row.name;
    });
    if (!is_run) GTEST_SKIP() << "under mpirun it needs 4 ranks";
  }
  EXPECT_TRUE(row_of(ExchangeKind::dense).delivers_all);
}

TEST(exchange, names_and_options) {
  EXPECT_EQ(make_exchange({.kind = ExchangeKind::allgather})->name(), "allgather");
  EXPECT_EQ(make_exchange({.kind = ExchangeKind::gtopk})->name(), "gtopk");
  using K = ExchangeKind;
  for (const ExchangeRow& row : exchange_rows()) {
    if (row.make == nullptr) continue;
    const auto exchange = make_exchange({.kind = row.kind});
    EXPECT_EQ(exchange->name(), row.name);
    EXPECT_EQ(exchange->held_mass() != nullptr, row.holds_mass) << row.name;
    if (row.nests) {
      EXPECT_NO_THROW(make_exchange({.kind = K::hierarchical, .hierarchy = {.inside = row.kind}}));
    } else {
      EXPECT_THROW(make_exchange({.kind = K::hierarchical, .hierarchy = {.inside = row.kind}}),
                   InvalidArgument);
    }
  }
  ASSERT_EQ(names_of<ExchangeKind>().size(), exchange_rows().size());
  ASSERT_EQ(names_of<ServerPlacement>().size(), 3U);
  EXPECT_EQ(name_of(ServerPlacement::sharded), "sharded");
  EXPECT_EQ(name_of(ExchangeKind::gtopk), "gtopk");
  ASSERT_EQ(names_of<DropPolicy>().size(), 3U);
  EXPECT_EQ(name_of(DropPolicy::sender_keeps), "sender-keeps");
  EXPECT_THROW(make_exchange({.kind = ExchangeKind::dense}), InvalidArgument);
  EXPECT_THROW(make_exchange({.kind = static_cast<ExchangeKind>(77)}), InvalidArgument);
  EXPECT_THROW(make_exchange({.kind = ExchangeKind::gtopk, .drop = static_cast<DropPolicy>(9)}),
               InvalidArgument);
  EXPECT_THROW(make_chooser({}, {.trial_share = -0.1}), InvalidArgument);
  EXPECT_THROW(make_chooser({}, {.trial_share = 1.1}), InvalidArgument);
  EXPECT_THROW(make_exchange({.kind = K::oktopk, .oktopk = {.cut_every = 0}}), InvalidArgument);
  EXPECT_THROW(make_exchange({.kind = K::oktopk, .oktopk = {.regions_every = 0}}), InvalidArgument);
  EXPECT_THROW(make_exchange({.kind = K::hierarchical, .hierarchy = {.between = K::dense}}),
               InvalidArgument);
  EXPECT_THROW(make_exchange({.kind = K::hierarchical, .hierarchy = {.inside = K::hierarchical}}),
               InvalidArgument);
  EXPECT_THROW(make_exchange({.kind = K::hierarchical, .hierarchy = {.between = K::param_server}}),
               InvalidArgument);
  EXPECT_THROW(make_chooser({}, {.among = {K::param_server}}), InvalidArgument);
  EXPECT_THROW(make_exchange({.kind = K::param_server,
                              .server = {.placement = static_cast<ServerPlacement>(9)}}),
               InvalidArgument);
}

}  // namespace
}  // namespace skim
