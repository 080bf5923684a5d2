// Virtual time: the clock of a simulated group, and the exchanges on it beside the cost model.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <ctime>
#include <string>
#include <utility>
#include <vector>

#include "bench/network.hpp"
#include "fault.hpp"
#include "group.hpp"
#include "simulated.hpp"
#include "skim/cost.hpp"
#include "skim/error.hpp"
#include "skim/exchange.hpp"

namespace skim {
namespace {

// Whole nanoseconds, so that sums are exact.
constexpr Link kLink{.alpha_s = 5e-5, .beta_s_per_byte = 8e-9};
constexpr std::int64_t kAlpha = 50'000, kBeta = 8;
constexpr VirtualTime kLinkOnly{.link = kLink, .processor_time = false};

using Message = std::vector<std::byte>;

using test::run_simulated;

// ---- the clock

TEST(virtual_time, starts_at_zero_and_stands_still_without_messages) {
  EXPECT_EQ(run_simulated(3, kLinkOnly, [](Communicator& comm) { EXPECT_EQ(comm.now_ns(), 0); }),
            0);
}

TEST(virtual_time, a_message_takes_alpha_and_its_bytes) {
  run_simulated(2, kLinkOnly, [](Communicator& comm) {
    Message m(1000);
    if (comm.rank() == 0) {
      const Ticket t = comm.isend(m, 1);
      EXPECT_EQ(comm.now_ns(), 0) << "starting costs nothing";
      comm.wait(t);
      EXPECT_EQ(comm.now_ns(), 1000 * kBeta) << "the link is free again";
    } else {
      comm.wait(comm.ireceive(m, 0));
      EXPECT_EQ(comm.now_ns(), kAlpha + 1000 * kBeta);
    }
  });
}

TEST(virtual_time, both_directions_at_once) {
  const auto took = run_simulated(2, kLinkOnly, [](Communicator& comm) {
    Message out(1000), in;
    const Ticket sending = comm.isend(out, 1 - comm.rank());
    comm.wait(comm.ireceive(in, 1 - comm.rank()));
    comm.wait(sending);
  });
  EXPECT_EQ(took, kAlpha + 1000 * kBeta);
}

TEST(virtual_time, refuses_a_time_that_its_clock_does_not_hold) {
  for (const Link& link : {Link{.alpha_s = 1e10}, Link{.beta_s_per_byte = 1e300}}) {
    std::atomic<int> refused = 0;
    run_simulated(2, {.link = link, .processor_time = false}, [&](Communicator& comm) {
      Message m(1000);
      try {
        comm.wait(comm.rank() == 0 ? comm.isend(m, 1) : comm.ireceive(m, 0));
      } catch (const InvalidArgument&) {
        ++refused;
        comm.abort(comm.rank());
      } catch (const CommError&) {  // the other rank was refused
      }
    });
    EXPECT_EQ(refused, 1);
  }
}

// One link out and one link in: three messages to three ranks, and from three, take turns.
TEST(virtual_time, a_link_carries_one_message_at_a_time) {
  for (const bool scatters : {true, false}) {
    const auto took = run_simulated(4, kLinkOnly, [&](Communicator& comm) {
      std::vector<Message> parts(4, Message(500));
      std::vector<Ticket> open;
      if (comm.rank() == 0) {
        for (int r = 1; r < 4; ++r) {
          auto& m = parts[static_cast<std::size_t>(r)];
          open.push_back(scatters ? comm.isend(m, r) : comm.ireceive(m, r));
        }
      } else {
        open.push_back(scatters ? comm.ireceive(parts[0], 0) : comm.isend(parts[0], 0));
      }
      for (const Ticket t : open) comm.wait(t);
    });
    EXPECT_EQ(took, kAlpha + 3 * 500 * kBeta);
  }
}

TEST(virtual_time, a_late_receiver_loses_nothing) {
  run_simulated(3, kLinkOnly, [](Communicator& comm) {
    Message m(100), large(100'000);
    if (comm.rank() == 0) comm.wait(comm.isend(m, 2));
    if (comm.rank() == 1) comm.wait(comm.isend(large, 2));
    if (comm.rank() != 2) return;
    comm.wait(comm.ireceive(large, 1));
    const std::int64_t before = comm.now_ns();
    comm.wait(comm.ireceive(m, 0));
    EXPECT_EQ(comm.now_ns() - before, 100 * kBeta) << "its first byte was there long ago";
  });
}

// In one thread: it would never come back from a wait for the other rank. A ring sum of many ranks
// relies on it for its speed; and what was sent is what stood there then.
TEST(virtual_time, a_short_message_needs_no_receiver_to_be_sent) {
  const auto group = make_simulated_group(2, kLinkOnly, {std::chrono::milliseconds(200)});
  for (int round = 0; round < 20; ++round) {  // more messages than there is room for at once
    for (std::size_t bytes : {std::size_t{0}, std::size_t{1000}, std::size_t{1} << 16U}) {
      Message m(bytes, std::byte{1}), in;
      const std::int64_t before = group[0]->now_ns();
      group[0]->wait(group[0]->isend(m, 1));
      EXPECT_EQ(group[0]->now_ns() - before, static_cast<std::int64_t>(bytes) * kBeta);
      std::ranges::fill(m, std::byte{2});
      group[0]->wait(group[0]->isend(m, 1));
      for (const std::byte first : {std::byte{1}, std::byte{2}}) {
        group[1]->wait(group[1]->ireceive(in, 0));
        EXPECT_EQ(in, Message(bytes, first));
      }
    }
  }
}

// Where there is no more room the sender waits for its receiver, and order and times are the same.
TEST(virtual_time, many_messages_that_nobody_takes_yet) {
  constexpr int kMessages = 100;
  for (const std::size_t bytes : {std::size_t{100}, (std::size_t{1} << 16U) + 1}) {
    const auto ns = static_cast<std::int64_t>(bytes) * kBeta;
    run_simulated(3, kLinkOnly, [&](Communicator& comm) {
      Message m(bytes);
      for (int i = 0; i < kMessages; ++i) {
        if (comm.rank() == 2) {
          comm.wait(comm.ireceive(m, 0));
          EXPECT_EQ(m, Message(bytes, static_cast<std::byte>(i)));
          EXPECT_EQ(comm.now_ns(), kAlpha + (i + 1) * ns);
        } else if (comm.rank() == 0) {
          std::ranges::fill(m, static_cast<std::byte>(i));
          comm.wait(comm.isend(m, 2));
          EXPECT_EQ(comm.now_ns(), (i + 1) * ns);
        }
      }
    });
  }
}

TEST(virtual_time, ranks_that_are_split_off_keep_clock_and_link) {
  run_simulated(4, kLinkOnly, [](Communicator& comm) {
    Message m(100);
    const auto half = comm.split(comm.rank() % 2);
    if (half->rank() == 0) {
      half->wait(half->isend(m, 1));
    } else {
      half->wait(half->ireceive(m, 0));
      EXPECT_EQ(half->now_ns(), kAlpha + 100 * kBeta);
    }
    EXPECT_EQ(comm.now_ns(), half->now_ns());
  });
}

// Work counts where the thread does it, and not where it waits for others.
TEST(virtual_time, processor_time_between_calls) {
  constexpr std::int64_t kWork = 20'000'000;
  const auto processor_ns = [] {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return std::int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
  };
  const VirtualTime time{.link = kLink, .processor_time = true};
  run_simulated(2, time, [&](Communicator& comm) {
    Message m(1000);
    const std::int64_t start = comm.now_ns();
    if (comm.rank() == 0) {
      for (const std::int64_t from = processor_ns(); processor_ns() - from < kWork;) {
      }
      const std::int64_t worked = comm.now_ns() - start;
      EXPECT_GE(worked, kWork);
      comm.wait(comm.isend(m, 1));
    } else {
      comm.wait(comm.ireceive(m, 0));
      EXPECT_GE(comm.now_ns(), kWork + kAlpha + 1000 * kBeta);
      const std::int64_t idle = comm.now_ns();
      Message again;
      EXPECT_LT(comm.now_ns() - idle, kWork) << "the other rank's work is not counted twice";
    }
  });
}

TEST(virtual_time, arguments) {
  EXPECT_THROW(make_simulated_group(0, kLinkOnly), InvalidArgument);
  EXPECT_THROW(make_simulated_group(2, {.link = {.alpha_s = -1e-3}}), InvalidArgument);
  EXPECT_THROW(make_simulated_group(2, {.link = {.beta_s_per_byte = 1.0 / 0.0}}), InvalidArgument);
}

// ---- the exchanges beside their cost

constexpr int kSizes[] = {2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 31, 32, 64};
constexpr std::size_t kKept = 50;

struct Measured {
  double seconds = 0.0;
  Traffic most;  // of the ranks, each number for itself
};

Traffic most_of(const std::vector<Traffic>& of_ranks) {
  Traffic most;
  for (const Traffic& t : of_ranks) {
    most.sent_bytes = std::max(most.sent_bytes, t.sent_bytes);
    most.rounds = std::max(most.rounds, t.rounds);
  }
  return most;
}

Measured measure(int ranks, const test::Body& body) {
  std::vector<Traffic> traffic(static_cast<std::size_t>(ranks));
  Measured m;
  m.seconds = 1e-9 * static_cast<double>(run_simulated(ranks, kLinkOnly, [&](Communicator& comm) {
                body(comm);
                traffic[static_cast<std::size_t>(comm.rank())] = comm.traffic();
              }));
  m.most = most_of(traffic);
  return m;
}

std::size_t length_for(int ranks) { return static_cast<std::size_t>(ranks) * 400; }

// The real exchange code, on selections of kKept entries that have no index in common.
void run_once(const ExchangeOptions& options, Communicator& comm) {
  const auto p = static_cast<std::size_t>(comm.size()), r = static_cast<std::size_t>(comm.rank());
  SparseBuffer mine;
  mine.reset(length_for(comm.size()));
  for (std::size_t e = 0; e < kKept; ++e) {
    mine.append(static_cast<Index>(r + e * p * 8), static_cast<float>(1 + r + e));
  }
  GroupStats stats;
  make_exchange(options)->run({}, mine.view(), {.k = kKept}, stats, comm);
}
Measured measure(int ranks, const ExchangeOptions& options) {
  return measure(ranks, [&](Communicator& comm) { run_once(options, comm); });
}

Cost predicted(const ExchangeOptions& options, int ranks) {
  return predict(options, {.ranks = ranks, .n = static_cast<double>(length_for(ranks)), .k = kKept},
                 kLink);
}

void expect_equal(const Measured& got, const Cost& expected) {
  EXPECT_DOUBLE_EQ(static_cast<double>(got.most.sent_bytes), expected.bytes);
  EXPECT_DOUBLE_EQ(static_cast<double>(got.most.rounds), expected.rounds);
  EXPECT_NEAR(got.seconds, expected.exchange_s(), 1e-9);
}

// The same, but where ranks are no power of two a message may set out before a rank has done all of
// its round: the formula is then an upper bound, and that of the next lower power a lower one.
void expect_at_most(const Measured& got, const ExchangeOptions& options, int ranks) {
  const Cost expected = predicted(options, ranks);
  if (std::has_single_bit(static_cast<unsigned>(ranks))) {
    expect_equal(got, expected);
    return;
  }
  EXPECT_DOUBLE_EQ(static_cast<double>(got.most.sent_bytes), expected.bytes);
  EXPECT_DOUBLE_EQ(static_cast<double>(got.most.rounds), expected.rounds);
  EXPECT_LE(got.seconds, expected.exchange_s() + 1e-9);
  const auto below = static_cast<int>(std::bit_floor(static_cast<unsigned>(ranks)));
  EXPECT_GE(got.seconds, predicted(options, below).exchange_s());
}

ExchangeOptions raw(ExchangeKind kind) {
  return {.kind = kind, .codec = {.index = IndexCode::raw32, .value = ValueCode::f32}};
}

TEST(cost_of_exchange, dense) {
  for (const int ranks : kSizes) {
    SCOPED_TRACE(ranks);
    const Measured got = measure(ranks, [&](Communicator& comm) {
      std::vector<float> x(length_for(ranks), 1.0F);
      const std::vector<std::byte> note(kFrameStatsBytes);
      MessageList notes;
      comm.allreduce_sum(x, DenseSum::ring, note, notes);
    });
    expect_equal(got, predicted(raw(ExchangeKind::dense), ranks));
  }
}

TEST(cost_of_exchange, allgather) {
  for (const int ranks : kSizes) {
    SCOPED_TRACE(ranks);
    const Measured got = measure(ranks, raw(ExchangeKind::allgather));
    expect_equal(got, predicted(raw(ExchangeKind::allgather), ranks));
  }
}

TEST(cost_of_exchange, global_topk) {
  for (const int ranks : kSizes) {
    SCOPED_TRACE(ranks);
    expect_equal(measure(ranks, raw(ExchangeKind::global_topk)),
                 predicted(raw(ExchangeKind::global_topk), ranks));
  }
}

// All in the table, but for those whose first run is not a typical one, or that have no single
// link.
TEST(cost_of_exchange, of_the_table) {
  for (const ExchangeRow& row : exchange_rows()) {
    using K = ExchangeKind;
    if (row.make == nullptr || row.needs_hosts || row.holds_mass || row.kind == K::oktopk ||
        row.kind == K::shared_indices) {
      continue;
    }
    for (const int ranks : kSizes) {
      SCOPED_TRACE(std::string(row.name) + " on " + std::to_string(ranks));
      expect_at_most(measure(ranks, raw(row.kind)), raw(row.kind), ranks);
    }
  }
}

// Exact in bytes; each rank has its share of both levels.
TEST(cost_of_exchange, hierarchical) {
  using K = ExchangeKind;
  for (const auto& [ranks, hosts] :
       {std::pair(4, 2), std::pair(8, 2), std::pair(8, 4), std::pair(16, 4), std::pair(32, 8)}) {
    for (const K between : {K::allgather, K::gtopk, K::gtopk_tree, K::global_topk}) {
      SCOPED_TRACE(std::string(name_of(between)) + " between " + std::to_string(hosts) +
                   " hosts of " + std::to_string(ranks) + " ranks");
      ExchangeOptions options = raw(K::hierarchical);
      options.hierarchy.between = between;
      std::vector<Traffic> traffic(static_cast<std::size_t>(ranks));
      run_simulated(ranks, kLinkOnly, [&, local = ranks / hosts](Communicator& whole) {
        test::OnHost comm(whole, static_cast<std::size_t>(whole.rank() / local));
        run_once(options, comm);
        traffic[static_cast<std::size_t>(comm.rank())] = comm.traffic();
      });
      const Cost expected = predict(options,
                                    {.ranks = ranks,
                                     .n = static_cast<double>(length_for(ranks)),
                                     .k = kKept,
                                     .hosts = hosts,
                                     .inside_link = kLink},
                                    kLink);
      EXPECT_DOUBLE_EQ(static_cast<double>(most_of(traffic).sent_bytes), expected.bytes);
    }
  }
}

// Every rank has entries at all k indices, and names k / P that no other rank names.
TEST(cost_of_exchange, shared_indices) {
  for (const int ranks : kSizes) {
    SCOPED_TRACE(ranks);
    const std::size_t p = static_cast<std::size_t>(ranks), k = 3 * p, n = 100 * k;
    const Measured got = measure(ranks, [&](Communicator& comm) {
      const auto r = static_cast<std::size_t>(comm.rank());
      SparseBuffer mine;
      mine.reset(n);
      for (std::size_t e = 0; e < k; ++e) {
        mine.append(static_cast<Index>(7 * e), e % p == r ? 2.0F : 1.0F);
      }
      GroupStats stats;
      make_exchange(raw(ExchangeKind::shared_indices))
          ->run({}, mine.view(), {.k = k}, stats, comm);
    });
    expect_equal(got, predict(raw(ExchangeKind::shared_indices),
                              {.ranks = ranks,
                               .n = static_cast<double>(n),
                               .k = static_cast<double>(k)},
                              kLink));
  }
}

// In the third run, whose cut and regions stand. Every region has two entries of every rank. The
// largest sums are those of rank 0, and then those of the last rank.
TEST(cost_of_exchange, oktopk) {
  for (const int ranks : kSizes) {
    const std::size_t p = static_cast<std::size_t>(ranks), k = 2 * p, n = 8 * k * p;
    for (const std::size_t k_down : {std::size_t{0}, 2 * k}) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, k_down " + std::to_string(k_down));
      const auto measure_runs = [&](int runs) {
        return measure(ranks, [&](Communicator& comm) {
          const auto r = static_cast<std::size_t>(comm.rank());
          SparseBuffer mine;
          mine.reset(n);
          for (std::size_t e = 0; e < k; ++e) {
            mine.append(static_cast<Index>(r + e * p * 8),
                        static_cast<float>((r == 0 ? 1'000'000 : 0) + r * k + e + 1));
          }
          const auto exchange = make_exchange(raw(ExchangeKind::oktopk));
          for (int i = 0; i < runs; ++i) {
            GroupStats stats;
            exchange->run({static_cast<std::uint64_t>(i), 0}, mine.view(),
                          {.k = k, .k_down = k_down}, stats, comm);
            exchange->end_step();
          }
        });
      };
      const Measured two = measure_runs(2), three = measure_runs(3);
      const Cost expected = predict(raw(ExchangeKind::oktopk),
                                    {.ranks = ranks,
                                     .n = static_cast<double>(n),
                                     .k = static_cast<double>(k),
                                     .k_down = static_cast<double>(k_down)},
                                    kLink);
      EXPECT_EQ(static_cast<double>(three.most.sent_bytes - two.most.sent_bytes), expected.bytes);
      EXPECT_EQ(static_cast<double>(three.most.rounds - two.most.rounds), expected.rounds);
      EXPECT_NEAR(three.seconds - two.seconds, expected.exchange_s(), 1e-9);
    }
  }
}

// The ping-pong finds the link that it ran on.
TEST(cost_of_exchange, the_link_is_measured_as_it_is) {
  run_simulated(3, kLinkOnly, [](Communicator& comm) {
    const std::vector<LinkSample> samples = ping_pong(comm, std::size_t{1} << 20, 1.0);
    if (comm.rank() != 0) return;
    ASSERT_EQ(samples.size(), 11U);
    for (const LinkSample& s : samples) {
      EXPECT_NEAR(s.seconds, kLink.alpha_s + s.bytes * kLink.beta_s_per_byte, 1e-15);
    }
    const Link link = fit_link(samples);
    EXPECT_NEAR(link.alpha_s, kLink.alpha_s, 1e-12);
    EXPECT_NEAR(link.beta_s_per_byte, kLink.beta_s_per_byte, 1e-15);
  });
}

// Long messages that would take too long are left out, but two lengths are there.
TEST(cost_of_exchange, the_measurement_of_a_link_has_a_budget) {
  for (const double budget : {1e-9, 1e-3}) {
    run_simulated(2, kLinkOnly, [&](Communicator& comm) {
      const std::vector<LinkSample> samples = ping_pong(comm, std::size_t{1} << 24, budget);
      EXPECT_EQ(samples.empty(), comm.rank() != 0);
      if (comm.rank() != 0) return;
      ASSERT_GE(samples.size(), 2U);
      for (std::size_t i = 1; i + 1 < samples.size(); ++i) EXPECT_LE(samples[i].seconds, budget);
      EXPECT_LT(samples.size(), 13U);
      EXPECT_NEAR(fit_link(samples).alpha_s, kLink.alpha_s, 1e-9);
    });
  }
}

TEST(cost_of_exchange, local_speeds_are_measured) {
  const LocalSpeeds local = bench::measure_local(20'000);
  for (const double s : {local.select_s, local.merge_s, local.add_s}) {
    EXPECT_GT(s, 0.0);
    EXPECT_LT(s, 1e-3) << "seconds an entry";
  }
}

// The same code twice gives the same time, whatever the threads did meanwhile.
TEST(cost_of_exchange, link_time_is_deterministic) {
  const double first = measure(13, raw(ExchangeKind::gtopk)).seconds;
  for (int i = 0; i < 5; ++i) EXPECT_EQ(measure(13, raw(ExchangeKind::gtopk)).seconds, first);
}

}  // namespace
}  // namespace skim
