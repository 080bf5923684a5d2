// exchange.hpp: every exchange against its oracle, and what it refuses.
#include "skim/exchange.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "exchange_oracle.hpp"
#include "group.hpp"
#include "oracle.hpp"
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
  };
}

GroupStats stats_of(std::size_t rank) {
  const auto r = static_cast<double>(rank);
  return {.gradient_norm2 = 1.0 + 0.1 * r,
          .accumulated_norm2 = 2.0 + r,
          .sent_norm2 = 3.0 + r,
          .sent_bytes = 100 + rank,
          .non_finite = static_cast<std::uint32_t>(rank),
          .signals = 1U << rank};
}

// Sum, returned mass, statistics and traffic, on every rank, twice with one object.
TEST(exchange, is_its_oracle) {
  for (const int ranks : test::group_sizes()) {
    for (const ExchangeOptions& options : test::sparse_exchanges()) {
      for (const Case& c : cases()) {
        const auto p = static_cast<std::size_t>(ranks);
        std::vector<SparseBuffer> selected;
        std::vector<SparseView> views;
        for (std::size_t r = 0; r < p; ++r) selected.push_back(c.select(r, p));
        for (const auto& s : selected) views.push_back(s.view());
        const ExchangeOutcome expected = test::oracle(options, views, c.k);
        run_group(ranks, [&](Communicator& comm) {
          SCOPED_TRACE(test::name_of(options) + ", " + c.name + ", rank " +
                       std::to_string(comm.rank()) + " of " + std::to_string(ranks));
          const auto exchange = make_exchange(options);
          const auto me = static_cast<std::size_t>(comm.rank());
          for (std::uint64_t step = 0; step < 2; ++step) {
            const Traffic before = comm.traffic();
            GroupStats stats = stats_of(me);
            const ExchangeResult got = exchange->run({step, 0}, views[me], {.k = c.k}, stats, comm);
            EXPECT_TRUE(test::same(got.sum, expected.sum.view()));
            EXPECT_TRUE(is_canonical(got.returned));
            EXPECT_EQ(got.returned.dim, c.n);
            EXPECT_TRUE(
                test::same(test::without_zeros(got.returned).view(), expected.returned[me].view()));
            EXPECT_EQ(got.contributors, ranks);

            const Traffic& after = comm.traffic();
            EXPECT_EQ(after.sent_bytes - before.sent_bytes, expected.traffic[me].sent_bytes);
            EXPECT_EQ(after.received_bytes - before.received_bytes,
                      expected.traffic[me].received_bytes);
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
      EXPECT_TRUE(std::ranges::any_of(got.sum.value, [](float v) { return std::isnan(v); }))
          << test::name_of(options);
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

TEST(exchange, names_and_options) {
  EXPECT_EQ(make_exchange({.kind = ExchangeKind::allgather})->name(), "allgather");
  EXPECT_EQ(make_exchange({.kind = ExchangeKind::gtopk})->name(), "gtopk");
  ASSERT_EQ(exchange_kind_names().size(), 3U);
  EXPECT_EQ(exchange_kind_names()[static_cast<std::size_t>(ExchangeKind::gtopk)], "gtopk");
  ASSERT_EQ(drop_policy_names().size(), 3U);
  EXPECT_EQ(drop_policy_names()[static_cast<std::size_t>(DropPolicy::sender_keeps)],
            "sender-keeps");
  EXPECT_THROW(make_exchange({.kind = ExchangeKind::dense}), InvalidArgument);
  EXPECT_THROW(make_exchange({.kind = static_cast<ExchangeKind>(77)}), InvalidArgument);
  EXPECT_THROW(make_exchange({.kind = ExchangeKind::gtopk, .drop = static_cast<DropPolicy>(9)}),
               InvalidArgument);
}

}  // namespace
}  // namespace skim
