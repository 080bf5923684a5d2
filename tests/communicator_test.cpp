// Communicator: point-to-point and collectives against slow oracles, bytes and rounds against the
// formulas, and what happens when a rank is late, leaves or aborts. One body for threads and
// mpirun.
#include "skim/communicator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <latch>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <string>

#include "allocations.hpp"
#include "exchange_oracle.hpp"
#include "fault.hpp"
#include "group.hpp"
#include "oracle.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

using namespace std::chrono_literals;
using test::FaultyCommunicator;
using test::group_sizes;
using test::log2_ceil;
using test::run_group;

constexpr bool kMpi =
#ifdef SKIM_TEST_MPI
    true;
#else
    false;
#endif

using Message = std::vector<std::byte>;

// Different for every seed, also in the first bytes.
Message message_of(std::size_t length, std::uint64_t seed) {
  std::uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15U;
  Message m(length);
  for (std::size_t i = 0; i < length; i += sizeof(x)) {
    x ^= x << 13U;
    x ^= x >> 7U;
    x ^= x << 17U;
    std::memcpy(m.data() + i, &x, std::min(sizeof(x), length - i));
  }
  return m;
}

std::uint64_t pair_seed(int from, int to, std::size_t i) {
  return (static_cast<std::uint64_t>(from) * 64 + static_cast<std::uint64_t>(to)) * 1000 + i;
}

std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
std::uint64_t count(int x) { return static_cast<std::uint64_t>(x); }

// Traffic of `f` alone.
template <class F>
Traffic traffic_of(const Communicator& comm, F&& f) {
  const Traffic before = comm.traffic();
  f();
  const Traffic after = comm.traffic();
  return {after.sent_bytes - before.sent_bytes, after.received_bytes - before.received_bytes,
          after.messages - before.messages, after.rounds - before.rounds};
}

// The CommError that f throws.
template <class F>
std::optional<CommError> error_of(F&& f) {
  try {
    f();
  } catch (const CommError& e) {
    return e;
  }
  return std::nullopt;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// f on every size of group, from `least` ranks up.
void each_group(int least, const test::Body& f, const CommOptions& options = {.timeout = 20s}) {
  for (const int ranks : group_sizes()) {
    if (ranks < least) continue;
    run_group(
        ranks,
        [&](Communicator& comm) {
          SCOPED_TRACE("P=" + std::to_string(ranks) + " rank=" + std::to_string(comm.rank()));
          f(comm);
        },
        options);
  }
}

TEST(phase, text) {
  EXPECT_EQ((Phase{"gtopk: merge", 2, 3}.text()), "gtopk: merge 2 of 3");
  EXPECT_EQ((Phase{"gather"}.text()), "gather");
  EXPECT_EQ(Phase{}.text(), "");
}

TEST(communicator, knows_its_place) {
  each_group(1, [](Communicator& comm) {
    EXPECT_GE(comm.rank(), 0);
    EXPECT_LT(comm.rank(), comm.size());
    MessageList all;
    const Message mine{static_cast<std::byte>(comm.rank())};
    comm.allgather(mine, all);
    ASSERT_EQ(all.size(), at(comm.size()));
    for (int r = 0; r < comm.size(); ++r) EXPECT_EQ(all[at(r)][0], static_cast<std::byte>(r));
    const std::int64_t first = comm.now_ns();
    EXPECT_LE(first, comm.now_ns());
  });
}

TEST(communicator, refuses_bad_arguments_before_sending) {
  each_group(1, [](Communicator& comm) {
    Message m(3);
    MessageList all;
    for (const int peer : {-1, comm.rank(), comm.size(), comm.size() + 7}) {
      EXPECT_THROW(comm.isend(m, peer), InvalidArgument) << peer;
      EXPECT_THROW(comm.ireceive(m, peer), InvalidArgument) << peer;
    }
    EXPECT_THROW(comm.broadcast(m, -1), InvalidArgument);
    EXPECT_THROW(comm.broadcast(m, comm.size()), InvalidArgument);
    EXPECT_THROW(comm.split(-1), InvalidArgument);
    for (const Ticket ticket : {Ticket{0}, Ticket{1}, ~Ticket{0}}) {
      EXPECT_THROW(comm.wait(ticket), InvalidArgument) << ticket;
    }
    EXPECT_EQ(comm.traffic().messages, 0U);
    EXPECT_EQ(comm.traffic().sent_bytes, 0U);
    EXPECT_EQ(m.size(), 3U);
  });
}

TEST(communicator, refuses_tickets_that_are_not_open) {
  each_group(2, [](Communicator& comm) {
    if (comm.rank() > 1) return;
    const int peer = 1 - comm.rank();
    Message in;
    const Message out = message_of(10, 1);
    for (int i = 0; i < 3; ++i) {  // entries are used again: an old ticket must stay closed
      const Ticket sending = comm.isend(out, peer);
      const Ticket receiving = comm.ireceive(in, peer);
      EXPECT_NE(sending, Ticket{0});
      EXPECT_NE(sending, receiving);
      EXPECT_THROW(comm.split(0), InvalidArgument);  // transfers are open
      comm.wait(sending);
      EXPECT_THROW(comm.wait(sending), InvalidArgument);
      comm.wait(receiving);
      EXPECT_THROW(comm.wait(receiving), InvalidArgument);
      EXPECT_EQ(in, out);
    }
  });
}

TEST(point_to_point, keeps_order_length_and_content_whatever_the_order_of_waits) {
  const std::vector<std::size_t> lengths{5, 0, 1, 4096, 0, 70000, std::size_t{1} << 20U, 3};
  for (const std::uint64_t seed : {1U, 2U}) {
    each_group(2, [&](Communicator& comm) {
      SCOPED_TRACE("seed=" + std::to_string(seed));
      const int me = comm.rank();
      struct Open {
        Ticket ticket;
        int from;  // -1: a send
        std::size_t i;
      };
      std::vector<Open> open;
      std::vector<Message> out;
      std::vector<std::vector<Message>> in(at(comm.size()), std::vector<Message>(lengths.size()));
      out.reserve(at(comm.size()) * lengths.size());
      const Traffic traffic = traffic_of(comm, [&] {
        for (std::size_t i = 0; i < lengths.size(); ++i) {
          for (int peer = 0; peer < comm.size(); ++peer) {
            if (peer == me) continue;
            in[at(peer)][i] = message_of(i * 100, 77);  // is overwritten, shorter or longer
            const auto receive = [&] {
              open.push_back({comm.ireceive(in[at(peer)][i], peer), peer, i});
            };
            if (me < peer) receive();
            out.push_back(message_of(lengths[i], pair_seed(me, peer, i)));
            open.push_back({comm.isend(out.back(), peer), -1, i});
            if (me > peer) receive();
          }
        }
        std::mt19937_64 rng(seed * 100 + count(me));
        std::ranges::shuffle(open, rng);
        for (const Open& o : open) {
          comm.wait(o.ticket);
          if (o.from < 0) continue;
          EXPECT_TRUE(in[at(o.from)][o.i] == message_of(lengths[o.i], pair_seed(o.from, me, o.i)))
              << "message " << o.i << " from " << o.from << ", " << in[at(o.from)][o.i].size()
              << " bytes";
        }
      });
      const std::uint64_t peers = count(comm.size() - 1);
      const std::uint64_t total = std::accumulate(lengths.begin(), lengths.end(), std::uint64_t{0});
      EXPECT_EQ(traffic.sent_bytes, peers * total);
      EXPECT_EQ(traffic.received_bytes, peers * total);
      EXPECT_EQ(traffic.messages, peers * lengths.size());
      EXPECT_EQ(traffic.rounds, 0U);
    });
  }
}

// Both ranks wait for their own send first: it can only end if a wait also drives the receive.
TEST(point_to_point, wait_drives_other_transfers) {
  each_group(2, [](Communicator& comm) {
    if (comm.rank() > 1) return;
    const int peer = 1 - comm.rank();
    const Message out = message_of(std::size_t{1} << 20U, count(comm.rank()));
    Message in;
    const Ticket receiving = comm.ireceive(in, peer);
    comm.wait(comm.isend(out, peer));
    comm.wait(receiving);
    EXPECT_TRUE(in == message_of(std::size_t{1} << 20U, count(peer)));
  });
}

TEST(point_to_point, rounds_are_counted_by_the_algorithm) {
  each_group(1, [](Communicator& comm) {
    comm.end_round();
    comm.end_round();
    EXPECT_EQ(comm.traffic().rounds, 2U);
  });
}

TEST(collectives, nobody_leaves_a_barrier_before_all_have_entered) {
  each_group(1, [](Communicator& comm) {
    for (int i = 0; i < 2 * comm.size(); ++i) {
      // One rank is late by some work.
      if (i % comm.size() == comm.rank()) {
        ASSERT_EQ(message_of(2000000, 1).size(), 2000000U);
      }
      std::array<std::int64_t, 2> times{comm.now_ns(), 0};
      const Traffic traffic = traffic_of(comm, [&] { comm.barrier(); });
      times[1] = comm.now_ns();
      EXPECT_EQ(traffic.rounds, log2_ceil(at(comm.size())));
      EXPECT_EQ(traffic.messages, log2_ceil(at(comm.size())));
      EXPECT_EQ(traffic.sent_bytes + traffic.received_bytes, 0U);
      MessageList all;
      comm.allgather(std::as_bytes(std::span(times)), all);
      std::int64_t last_entered = std::numeric_limits<std::int64_t>::min();
      std::int64_t first_left = std::numeric_limits<std::int64_t>::max();
      for (int r = 0; r < comm.size(); ++r) {
        ASSERT_EQ(all[at(r)].size(), sizeof(times));
        std::memcpy(times.data(), all[at(r)].data(), sizeof(times));
        last_entered = std::max(last_entered, times[0]);
        first_left = std::min(first_left, times[1]);
      }
      EXPECT_LE(last_entered, first_left) << "barrier " << i;
    }
  });
}

TEST(collectives, broadcast_from_every_root) {
  each_group(1, [](Communicator& comm) {
    for (int root = 0; root < comm.size(); ++root) {
      for (const std::size_t length :
           {std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{200000}}) {
        const Message sent = message_of(length, count(root) + length);
        Message m = comm.rank() == root ? sent : message_of(at(comm.rank()) * 7, 5);
        const Traffic traffic = traffic_of(comm, [&] { comm.broadcast(m, root); });
        EXPECT_TRUE(m == sent) << "root " << root << ", " << length << " bytes";
        EXPECT_EQ(traffic.rounds, log2_ceil(at(comm.size())));
        EXPECT_EQ(traffic.received_bytes, comm.rank() == root ? 0 : length);
        // One to each child. A long message is sent to one child after the other, so each but a
        // parent's last one says when it has it.
        const int from_root = (comm.rank() - root + comm.size()) % comm.size();
        std::uint64_t messages = 0;
        for (int have = 1; have < comm.size(); have *= 2) {
          if (from_root < have && from_root + have < comm.size()) ++messages;
          const bool receives = have <= from_root && from_root < 2 * have;
          if (receives && from_root + have < comm.size() && length >= 65536) ++messages;
        }
        EXPECT_EQ(traffic.messages, messages);
        MessageList all;
        comm.allgather(std::as_bytes(std::span(&traffic.sent_bytes, 1)), all);
        std::uint64_t total = 0;
        for (int r = 0; r < comm.size(); ++r) {
          std::uint64_t bytes = 0;
          std::memcpy(&bytes, all[at(r)].data(), sizeof(bytes));
          total += bytes;
        }
        EXPECT_EQ(total, length * at(comm.size() - 1));
      }
    }
  });
}

TEST(collectives, allgather_of_variable_lengths) {
  each_group(1, [](Communicator& comm) {
    const int size = comm.size();
    MessageList all;
    for (std::size_t turn = 0; turn < 6; ++turn) {
      // Some empty, in the last turn all; the longest moves on from rank to rank.
      const auto length = [&](int r) {
        return turn == 5 ? 0 : (at(r) + turn) % at(size + 1) * (turn % 2 == 0 ? 3 : 30011);
      };
      std::uint64_t total = 0;
      for (int r = 0; r < size; ++r) total += length(r);
      const Message mine = message_of(length(comm.rank()), count(comm.rank()) + turn * 100);
      const Traffic traffic = traffic_of(comm, [&] { comm.allgather(mine, all); });
      ASSERT_EQ(all.size(), at(size));
      for (int r = 0; r < size; ++r) {
        EXPECT_TRUE(std::ranges::equal(all[at(r)], message_of(length(r), count(r) + turn * 100)))
            << "turn " << turn << ", from " << r;
      }
      EXPECT_EQ(traffic.rounds, count(size - 1));
      EXPECT_EQ(traffic.messages, count(size - 1));
      EXPECT_EQ(traffic.received_bytes, total - mine.size());
      // All but what the right neighbour has of its own.
      EXPECT_EQ(traffic.sent_bytes, size == 1 ? 0 : total - length((comm.rank() + 1) % size));
    }
  });
}

// Messages known to be short: P = 1 to 9 and 16, so doubling, and Bruck's form with every
// remainder.
TEST(collectives, allgather_of_short_messages) {
  const auto body = [](Communicator& comm) {
    const int size = comm.size();
    MessageList all;
    for (std::size_t turn = 0; turn < 4; ++turn) {
      const auto length = [&](int r) { return turn == 3 ? 0 : (at(r) + turn) % 5 * 37; };
      std::vector<std::uint64_t> lengths;
      for (int r = 0; r < size; ++r) lengths.push_back(length(r));
      const Message mine = message_of(length(comm.rank()), count(comm.rank()) + turn * 100);
      const Traffic traffic = traffic_of(comm, [&] { comm.allgather(mine, all, 150); });
      ASSERT_EQ(all.size(), at(size));
      for (int r = 0; r < size; ++r) {
        EXPECT_TRUE(std::ranges::equal(all[at(r)], message_of(length(r), count(r) + turn * 100)))
            << "turn " << turn << ", from " << r;
      }
      const Traffic expected = test::gather_traffic(lengths, at(comm.rank()));
      EXPECT_EQ(traffic.rounds, size <= 3 ? count(size - 1) : log2_ceil(at(size)));
      EXPECT_EQ(traffic.rounds, expected.rounds);
      EXPECT_EQ(traffic.messages, expected.messages);
      EXPECT_EQ(traffic.sent_bytes, expected.sent_bytes);
      EXPECT_EQ(traffic.received_bytes, expected.received_bytes);
    }
  };
#ifdef SKIM_TEST_MPI
  each_group(1, body);
#else
  for (const int ranks : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16}) test::run_threads(ranks, body);
#endif
}

TEST(collectives, allgather_form_depends_on_ranks_and_length) {
  for (const int ranks : {1, 2, 3}) EXPECT_EQ(allgather_form(ranks, 1), AllgatherForm::ring);
  EXPECT_EQ(allgather_form(4, 1), AllgatherForm::doubling);
  EXPECT_EQ(allgather_form(5, 1), AllgatherForm::bruck);
  EXPECT_EQ(allgather_form(16, 1000), AllgatherForm::doubling);
  for (const int ranks : {4, 5, 16, 1000}) {
    EXPECT_EQ(allgather_form(ranks, 0), AllgatherForm::ring) << "of unknown length";
    const std::size_t packed = std::size_t{1} << 20U;
    EXPECT_NE(allgather_form(ranks, packed), AllgatherForm::ring);
    EXPECT_EQ(allgather_form(ranks, packed + 1), AllgatherForm::ring);
  }
}

#ifndef SKIM_TEST_MPI
// Two messages in one: the length in front says more than there is.
TEST(collectives, allgather_refuses_what_is_no_pack_of_messages) {
  std::vector<std::string> errors(4);
  test::run_threads(4, [&](Communicator& comm) {
    test::FaultyCommunicator faulty(
        comm,
        {.fault = comm.rank() == 1 ? test::Fault::truncate : test::Fault::none, .at_send = 1});
    MessageList all;
    const auto e = error_of([&] { faulty.allgather(Message(4), all, 4); });
    if (e) {
      errors[at(comm.rank())] = e->what();
      faulty.abort(e->peer());
    }
  });
  EXPECT_TRUE(contains(errors[3],
                       "rank 3: a message of 8 bytes from rank 1 does not hold those of 2 ranks in "
                       "'all-gather 2 of 2'"))
      << errors[3];
}
#endif

std::vector<float> addend(int rank, std::size_t n, bool integers) {
  return integers ? test::integers(n, count(rank) * 7919 + n)
                  : test::normal(n, count(rank) * 7919 + n);
}
Message note_of(int rank) { return message_of(at(rank) * 13 % 64, count(rank) + 500); }

// Chunk c of P of a ring sum.
std::size_t chunk_length(std::size_t n, int c, int size) {
  const std::size_t p = at(size);
  const std::size_t i = at((c + size) % size);
  return n * (i + 1) / p - n * i / p;
}

void expect_ring_traffic(const Traffic& traffic, const Communicator& comm, std::size_t n,
                         std::uint64_t sent_notes, std::uint64_t received_notes,
                         std::uint64_t extra_rounds) {
  const int size = comm.size();
  const int r = comm.rank();
  const auto length = [&](int c) { return chunk_length(n, c, size); };
  const std::uint64_t floats = size == 1 ? 0 : 2 * n - length(r);
  EXPECT_EQ(traffic.sent_bytes, (size == 1 ? 0 : 4 * (floats - length(r + 1))) + sent_notes);
  EXPECT_EQ(traffic.received_bytes,
            (size == 1 ? 0 : 4 * (floats - length(r - 1))) + received_notes);
  EXPECT_EQ(traffic.rounds, count(2 * (size - 1)) + extra_rounds);
  EXPECT_EQ(traffic.messages, count(2 * (size - 1)) + extra_rounds);
  if (n % at(size) == 0 && sent_notes == 0) {
    EXPECT_EQ(traffic.sent_bytes, 2 * count(size - 1) * n / count(size) * 4);
  }
}

// That every rank has bit for bit what rank 0 has.
void expect_equal_everywhere(Communicator& comm, const std::vector<float>& data) {
  MessageList all;
  comm.allgather(std::as_bytes(std::span(data)), all);
  for (int r = 0; r < comm.size(); ++r) {
    EXPECT_TRUE(std::ranges::equal(all[at(r)], all[0])) << "rank " << r << " differs from rank 0";
  }
}

void sum_and_check(Communicator& comm, std::size_t n, DenseSum how, bool integers) {
  SCOPED_TRACE("n=" + std::to_string(n) + (how == DenseSum::ring ? " ring" : " vendor") +
               (integers ? " integers" : " normal"));
  const int size = comm.size();
  std::vector<double> expected(n, 0.0);
  std::vector<double> magnitude(n, 0.0);
  std::set<std::vector<float>> distinct;
  for (int r = 0; r < size; ++r) {
    const std::vector<float> x = addend(r, n, integers);
    distinct.insert(x);
    for (std::size_t i = 0; i < n; ++i) {
      expected[i] += static_cast<double>(x[i]);
      magnitude[i] += std::abs(static_cast<double>(x[i]));
    }
  }
  if (n >= 3) {
    ASSERT_EQ(distinct.size(), at(size)) << "ranks must not have equal data";
  }

  std::vector<float> data = addend(comm.rank(), n, integers);
  const Message note = note_of(comm.rank());
  MessageList notes;
  const Traffic traffic = traffic_of(comm, [&] { comm.allreduce_sum(data, how, note, notes); });

  for (std::size_t i = 0; i < n; ++i) {
    const double error = std::abs(static_cast<double>(data[i]) - expected[i]);
    const double bound =
        integers ? 0.0 : static_cast<double>(size) * magnitude[i] * 0x1p-24;  // one rounding an add
    ASSERT_LE(error, bound) << "entry " << i << ": " << data[i] << " for " << expected[i];
  }
  expect_equal_everywhere(comm, data);

  ASSERT_EQ(notes.size(), at(size));
  std::uint64_t all_notes = 0;
  for (int r = 0; r < size; ++r) {
    EXPECT_TRUE(std::ranges::equal(notes[at(r)], note_of(r))) << "note of rank " << r;
    all_notes += note_of(r).size();
  }
  const bool vendor = kMpi && how == DenseSum::vendor && size > 1;
  const std::uint64_t hash = vendor ? 8 : 0;  // goes with a note
  all_notes += hash * count(size);
  const auto held = [&](int r) { return note_of((r + size) % size).size() + hash; };
  expect_ring_traffic(traffic, comm, n, size == 1 ? 0 : all_notes - held(comm.rank() + 1),
                      size == 1 ? 0 : all_notes - held(comm.rank()), vendor ? count(size - 1) : 0);
}

TEST(collectives, allreduce_sum) {
  each_group(1, [](Communicator& comm) {
    const std::size_t p = at(comm.size());
    for (const std::size_t n : {std::size_t{0}, std::size_t{1}, p - 1, p, p + 1, 3 * p + 2,
                                std::size_t{1000}, std::size_t{5040}}) {
      for (const DenseSum how : {DenseSum::ring, DenseSum::vendor}) {
        sum_and_check(comm, n, how, true);
        sum_and_check(comm, n, how, false);
      }
    }
  });
}

TEST(collectives, allreduce_sum_without_notes_has_exactly_the_bytes_of_a_ring) {
  each_group(1, [](Communicator& comm) {
    const std::size_t n = 840;  // divisible by every size up to 8
    std::vector<float> data = addend(comm.rank(), n, true);
    MessageList notes;
    const Traffic traffic =
        traffic_of(comm, [&] { comm.allreduce_sum(data, DenseSum::ring, {}, notes); });
    expect_ring_traffic(traffic, comm, n, 0, 0, 0);
    ASSERT_EQ(notes.size(), at(comm.size()));
    for (int r = 0; r < comm.size(); ++r) EXPECT_TRUE(notes[at(r)].empty());
  });
}

TEST(collectives, allreduce_sum_of_non_finite_is_equal_everywhere) {
  each_group(2, [](Communicator& comm) {
    for (const DenseSum how : {DenseSum::ring, DenseSum::vendor}) {
      std::vector<float> data = addend(comm.rank(), 100, false);
      const float inf = std::numeric_limits<float>::infinity();
      if (comm.rank() == 0) data[10] = std::numeric_limits<float>::quiet_NaN();
      if (comm.rank() == 1) data[20] = inf;
      data[30] = comm.rank() == 0 ? inf : -inf;
      MessageList notes;
      comm.allreduce_sum(data, how, {}, notes);
      EXPECT_TRUE(std::isnan(data[10]));
      EXPECT_EQ(data[20], inf);
      EXPECT_TRUE(std::isnan(data[30]));
      expect_equal_everywhere(comm, data);
    }
  });
}

// Has a vendor sum; on rank `wrong` its last entry is one bit off.
class VendorCommunicator final : public test::ForwardingCommunicator {
 public:
  VendorCommunicator(Communicator& to, int wrong) : ForwardingCommunicator(to), wrong_(wrong) {}

 private:
  bool do_allreduce_sum(std::span<float> data) override {
    for (std::size_t i = 0; i < data.size(); ++i) {
      data[i] = static_cast<float>(i) + 0.25F;
    }
    if (rank() == wrong_) data.back() = std::nextafter(data.back(), 0.0F);
    return true;
  }

  int wrong_;
};

TEST(collectives, vendor_sum_is_made_equal_on_all_ranks) {
  each_group(2, [](Communicator& inner) {
    const std::size_t n = 840;
    for (int wrong = -1; wrong < inner.size(); ++wrong) {
      VendorCommunicator comm(inner, wrong);
      std::vector<float> data = addend(comm.rank(), n, true);
      MessageList notes;
      const Message note = note_of(comm.rank());
      const Traffic traffic =
          traffic_of(comm, [&] { comm.allreduce_sum(data, DenseSum::vendor, note, notes); });
      // What rank 0 had.
      float last = 839.25F;
      if (wrong == 0) last = std::nextafter(last, 0.0F);
      EXPECT_EQ(data.back(), last) << "wrong on rank " << wrong;
      EXPECT_EQ(data.front(), 0.25F);
      for (int r = 0; r < comm.size(); ++r) {
        EXPECT_TRUE(std::ranges::equal(notes[at(r)], note_of(r)));
      }
      const std::uint64_t repair = wrong < 0 ? 0 : log2_ceil(at(comm.size()));
      EXPECT_EQ(traffic.rounds, count(3 * (comm.size() - 1)) + repair);
    }
  });
}

TEST(group, host_is_equal_for_ranks_of_one_machine) {
  each_group(1, [](Communicator& comm) {
    const int host = comm.host();
    MessageList all;
    comm.allgather(std::as_bytes(std::span(&host, 1)), all);
    for (int r = 0; r < comm.size(); ++r) {
      EXPECT_TRUE(std::ranges::equal(all[at(r)], all[0])) << "these tests run on one machine";
    }
    EXPECT_EQ(comm.split(host)->size(), comm.size());
  });
}

TEST(group, uncounted_traffic_leaves_the_counts_as_they_were) {
  each_group(2, [](Communicator& comm) {
    comm.barrier();
    const Traffic before = comm.traffic();
    {
      const UncountedTraffic uncounted(comm);
      comm.barrier();
      EXPECT_GT(comm.traffic().rounds, before.rounds);
    }
    EXPECT_EQ(comm.traffic().sent_bytes, before.sent_bytes);
    EXPECT_EQ(comm.traffic().received_bytes, before.received_bytes);
    EXPECT_EQ(comm.traffic().messages, before.messages);
    EXPECT_EQ(comm.traffic().rounds, before.rounds);
  });
}

TEST(group, split_by_parity_and_again) {
  each_group(1, [](Communicator& comm) {
    const int parity = comm.rank() % 2;
    const auto half = comm.split(parity);
    EXPECT_EQ(half->size(), (comm.size() + 1 - parity) / 2);
    EXPECT_EQ(half->rank(), comm.rank() / 2);
    EXPECT_EQ(half->host(), comm.host());
    EXPECT_EQ(half->traffic().messages, 0U);
    EXPECT_EQ(comm.traffic().sent_bytes + comm.traffic().received_bytes, 0U);
    EXPECT_EQ(comm.traffic().messages + comm.traffic().rounds, 0U);

    MessageList all;
    const int me = comm.rank();
    half->allgather(std::as_bytes(std::span(&me, 1)), all);
    ASSERT_EQ(all.size(), at(half->size()));
    for (int r = 0; r < half->size(); ++r) {
      const int expected = 2 * r + parity;
      EXPECT_TRUE(std::ranges::equal(all[at(r)], std::as_bytes(std::span(&expected, 1))));
    }

    // Down to groups of one.
    const auto quarter = half->split(half->rank() % 2);
    const auto single = quarter->split(quarter->rank());
    EXPECT_EQ(single->size(), 1);
    EXPECT_EQ(single->rank(), 0);
    std::vector<float> data{static_cast<float>(me)};
    MessageList notes;
    quarter->allreduce_sum(data, DenseSum::ring, {}, notes);
    float expected = 0.0F;
    for (int r = me % 4; r < comm.size(); r += 4) expected += static_cast<float>(r);
    EXPECT_EQ(data[0], expected);
    single->barrier();
    comm.barrier();
    // Again from the same group, other colors.
    EXPECT_EQ(comm.split(1000)->size(), comm.size());
  });
}

TEST(group, messages_of_a_group_and_its_parts_do_not_meet) {
  each_group(2, [](Communicator& comm) {
    const auto part = comm.split(0);
    if (comm.rank() > 1) return;
    const int peer = 1 - comm.rank();
    const Message to_whole = message_of(200000, count(comm.rank()));
    const Message to_part = message_of(200000, count(comm.rank()) + 10);
    Message from_whole;
    Message from_part;
    // Started in one order, received in the other; and each wait drives both groups.
    const Ticket a = comm.isend(to_whole, peer);
    const Ticket b = part->isend(to_part, peer);
    const Ticket c = part->ireceive(from_part, peer);
    const Ticket d = comm.ireceive(from_whole, peer);
    part->wait(b);
    comm.wait(a);
    comm.wait(d);
    part->wait(c);
    EXPECT_TRUE(from_whole == message_of(200000, count(peer)));
    EXPECT_TRUE(from_part == message_of(200000, count(peer) + 10));
  });
}

// ---- failures

TEST(failure, timeout_names_peer_phase_and_time) {
  each_group(2,
             [](Communicator& comm) {
               if (comm.rank() != 0) return;  // and so send nothing
               const int silent = comm.size() - 1;
               comm.set_phase({"gtopk: merge", 1, 2});
               Message m(5);
               const Ticket ticket = comm.ireceive(m, silent);
               const auto e = error_of([&] { comm.wait(ticket); });
               ASSERT_TRUE(e);
               EXPECT_EQ(e->peer(), silent);
               EXPECT_EQ(e->phase(), "gtopk: merge 1 of 2");
               const std::string what = e->what();
               EXPECT_TRUE(contains(
                   what, "rank 0: no message from rank " + std::to_string(silent) + " within 0."))
                   << what;
               EXPECT_TRUE(contains(what, "in 'gtopk: merge 1 of 2'")) << what;
               EXPECT_EQ(what.find('\n'), std::string::npos);
               // Broken for good.
               EXPECT_TRUE(error_of([&] { comm.wait(ticket); }));
               EXPECT_TRUE(error_of([&] { comm.isend(m, silent); }));
               EXPECT_TRUE(error_of([&] { comm.barrier(); }));
             },
             {.timeout = 150ms});
}

TEST(failure, timeout_of_a_send) {
  // Too long for any MPI to buffer. Outlives the group, as MPI may go on reading it.
  const Message m = message_of(std::size_t{4} << 20U, 1);
  each_group(2,
             [&](Communicator& comm) {
               if (comm.rank() != 1) return;
               const Ticket ticket = comm.isend(m, 0);
               const auto e = error_of([&] { comm.wait(ticket); });
               ASSERT_TRUE(e);
               EXPECT_EQ(e->peer(), 0);
               EXPECT_TRUE(contains(e->what(), "rank 1: rank 0 took no message within 0."))
                   << e->what();
             },
             {.timeout = 150ms});
}

TEST(failure, timeout_in_a_collective_names_it_where_the_caller_has_not) {
  each_group(2,
             [](Communicator& comm) {
               if (comm.rank() == 1) return;
               MessageList all;
               const auto e = error_of([&] { comm.allgather({}, all); });
               ASSERT_TRUE(e);
               EXPECT_TRUE(contains(e->phase(), "all-gather ")) << e->phase();
               if (comm.rank() == 2) {
                 EXPECT_EQ(e->peer(), 1);
               }
             },
             {.timeout = 150ms});
  each_group(1, [](Communicator& comm) {
    comm.barrier();
    EXPECT_EQ(comm.phase().text(), "") << "left behind by a collective that succeeded";
    comm.set_phase({"mine", 1, 2});
    comm.barrier();
    EXPECT_EQ(comm.phase().text(), "mine 1 of 2");
  });
}

TEST(failure, deadline_ends_a_wait) {
  for (const bool while_waiting : {false, true}) {
    std::atomic<std::int64_t> deadline = std::numeric_limits<std::int64_t>::max();
    each_group(
        2,
        [&](Communicator& comm) {
          if (comm.rank() != 0) return;
          Message m;
          const Ticket ticket = comm.ireceive(m, 1);
          std::optional<CommError> e;
          if (while_waiting) {
            // As a signal handler would. That it comes before the wait is possible, and no harm.
            const std::jthread setter([&] { deadline = comm.now_ns(); });
            e = error_of([&] { comm.wait(ticket); });
          } else {
            deadline = comm.now_ns() + 30'000'000;
            e = error_of([&] { comm.wait(ticket); });
            EXPECT_GT(comm.now_ns(), deadline);
          }
          ASSERT_TRUE(e);
          EXPECT_TRUE(contains(e->what(), "no message from rank 1 by the deadline, after 0."))
              << e->what();
        },
        {.timeout = 10min, .deadline_ns = &deadline});
    deadline = std::numeric_limits<std::int64_t>::max();
  }
}

TEST(failure, abort_reaches_every_rank) {
  each_group(2, [](Communicator& comm) {
    const int culprit = comm.size() - 1;
    if (comm.rank() == 0) {  // tells of another rank's failure; with two ranks of the waiting one's
      comm.set_phase({"oktopk: reduce", 2, 5});
      comm.abort(culprit);
      Message m;
      EXPECT_TRUE(error_of([&] { comm.wait(comm.ireceive(m, 1)); })) << "its own waits end too";
      return;
    }
    comm.set_phase({"oktopk: gather"});
    // Waits for each other in a ring, nobody for rank 0 except rank 1: only the abort ends them.
    Message m;
    const auto e =
        error_of([&] { comm.wait(comm.ireceive(m, comm.rank() == 1 ? 0 : comm.rank() - 1)); });
    ASSERT_TRUE(e);
    EXPECT_EQ(e->peer(), culprit);
    EXPECT_EQ(e->phase(), "oktopk: reduce 2 of 5");
    const std::string what = e->what();
    EXPECT_TRUE(contains(what, "rank " + std::to_string(comm.rank()) +
                                   ": the group was aborted because of rank " +
                                   std::to_string(culprit) + " in 'oktopk: reduce 2 of 5'"))
        << what;
    EXPECT_TRUE(contains(what, "this rank was in 'oktopk: gather'")) << what;
    EXPECT_TRUE(error_of([&] { comm.wait(comm.ireceive(m, 0)); })) << "later waits";
    EXPECT_TRUE(error_of([&] { comm.split(0); }));
  });
}

TEST(failure, abort_ends_collectives) {
  each_group(3, [](Communicator& comm) {
    if (comm.rank() == 1) {
      comm.abort(1);
      return;
    }
    std::vector<float> data(5000, 1.0F);
    MessageList notes;
    const auto e = error_of([&] {
      for (;;) {
        if (comm.rank() == 0) {
          comm.allreduce_sum(data, DenseSum::ring, {}, notes);
        } else {
          comm.split(0);
        }
      }
    });
    ASSERT_TRUE(e);
    EXPECT_EQ(e->peer(), 1);
    comm.abort(e->peer());  // once more does no harm
    comm.abort(-1);
    comm.abort(comm.size());
  });
}

TEST(failure, abort_of_a_part_reaches_the_whole_and_back) {
  each_group(3, [](Communicator& comm) {
    const auto part = comm.split(comm.rank() % 2);
    const int last = comm.size() - 1;
    Message m;
    if (comm.rank() == last) {  // rank (P - 1) / 2 of its part
      for (int r = 0; r < last; ++r) comm.wait(comm.ireceive(m, r));  // all have left split
      part->set_phase({"inside"});
      part->abort(part->rank());
      return;
    }
    const auto e = error_of([&] {
      comm.wait(comm.isend({}, last));
      comm.wait(comm.ireceive(m, comm.rank() == 0 ? 1 : 0));
    });
    ASSERT_TRUE(e);
    EXPECT_EQ(e->peer(), last) << e->what();
    EXPECT_EQ(e->phase(), "inside");
    if (part->size() == 1) return;
    const auto in_part =
        error_of([&] { part->wait(part->ireceive(m, part->rank() == 0 ? 1 : 0)); });
    ASSERT_TRUE(in_part);
    const bool together = comm.rank() % 2 == last % 2;
    EXPECT_EQ(in_part->peer(), together ? last / 2 : -1) << in_part->what();
    EXPECT_TRUE(together ||
                contains(in_part->what(), "rank " + std::to_string(last) + " of the whole group"))
        << in_part->what();
  });
}

// The ends of a transfer that nobody ended: a rank leaves with both kinds open.
TEST(failure, leaving_with_open_transfers_harms_nobody) {
  each_group(2,
             [](Communicator& comm) {
               auto part = comm.split(0);
               if (comm.rank() > 1) return;
               const int peer = 1 - comm.rank();
               auto in = std::make_unique<Message>(100);
               auto out = std::make_unique<Message>(message_of(1000, 3));
               if (comm.rank() == 1) {
                 part->ireceive(*in, peer);
                 part->ireceive(*in, peer);
                 part.reset();
                 in.reset();
                 comm.wait(comm.isend(*out, peer));  // "I have left"
                 return;
               }
               Message left;
               comm.wait(comm.ireceive(left, peer));
               part->isend(*out, peer);
               const auto e = error_of([&] { part->wait(part->ireceive(*in, peer)); });
               ASSERT_TRUE(e);
               EXPECT_EQ(e->peer(), peer);
               part->abort(peer);
             },
             {.timeout = 200ms});
}

#ifndef SKIM_TEST_MPI
TEST(failure, late_rank_finds_the_group_aborted) {
  std::latch given_up(1);
  std::optional<CommError> at_late;
  EXPECT_THROW(test::run_threads(2,
                                 [&](Communicator& comm) {
                                   Message m(10);
                                   if (comm.rank() == 1) {
                                     given_up.wait();
                                     at_late = error_of([&] { comm.wait(comm.isend(m, 0)); });
                                     return;
                                   }
                                   const auto e = error_of([&] { comm.wait(comm.ireceive(m, 1)); });
                                   comm.abort(1);
                                   given_up.count_down();
                                   if (e) throw CommError(*e);
                                 },
                                 {.timeout = 100ms}),
               CommError);
  ASSERT_TRUE(at_late);
  EXPECT_TRUE(contains(at_late->what(), "rank 1: the group was aborted because of rank 1"))
      << at_late->what();
}

TEST(failure, destroyed_while_a_peer_waits) {
  auto group = make_in_process_group(3, {.timeout = 300ms});
  std::latch waiting(1);
  std::optional<CommError> timeout;
  std::jthread peer([&] {
    Message m;
    const Ticket sending = group[0]->isend(m, 1);
    const Ticket receiving = group[0]->ireceive(m, 2);
    waiting.count_down();
    timeout = error_of([&] {
      group[0]->wait(sending);
      group[0]->wait(receiving);
    });
  });
  waiting.wait();
  group[1].reset();
  group[2].reset();
  peer.join();
  ASSERT_TRUE(timeout);
  EXPECT_EQ(timeout->peer(), 1);
}

TEST(group, refuses_bad_options) {
  EXPECT_THROW(make_in_process_group(0), InvalidArgument);
  EXPECT_THROW(make_in_process_group(-3), InvalidArgument);
  EXPECT_THROW(make_in_process_group(2, {.timeout = 0ms}), InvalidArgument);
  EXPECT_EQ(make_in_process_group(2, {.timeout = std::chrono::milliseconds::max()}).size(), 2U);
}
#endif

TEST(group, connect_in_process_is_a_group_of_one) {
  EXPECT_TRUE(is_available(Backend::in_process));
  const auto comm = connect(Backend::in_process);
  EXPECT_EQ(comm->size(), 1);
  EXPECT_EQ(comm->rank(), 0);
  Message m = message_of(10, 1);
  comm->broadcast(m, 0);
  EXPECT_EQ(m, message_of(10, 1));
  EXPECT_EQ(comm->traffic().messages, 0U);
  EXPECT_EQ(comm->traffic().rounds, 0U);
  EXPECT_THROW(connect(Backend::in_process, {.timeout = -1ms}), InvalidArgument);
  EXPECT_FALSE(is_available(static_cast<Backend>(200)));
  EXPECT_THROW(connect(static_cast<Backend>(200)), InvalidArgument);
  if (!is_available(Backend::mpi)) {
    EXPECT_THROW(connect(Backend::mpi), InvalidArgument);
  }
}

#ifdef SKIM_TEST_MPI
TEST(mpi, connect_joins_the_whole_job) {
  ASSERT_TRUE(is_available(Backend::mpi));
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const auto comm = connect(Backend::mpi);
  EXPECT_EQ(comm->size(), size);
  comm->barrier();
}

TEST(mpi, refuses_bad_arguments) {
  EXPECT_THROW(make_mpi_communicator(MPI_COMM_NULL), InvalidArgument);
  EXPECT_THROW(make_mpi_communicator(MPI_COMM_WORLD, {}, 0), InvalidArgument);
  EXPECT_THROW(make_mpi_communicator(MPI_COMM_WORLD, {}, (std::size_t{1} << 30U) + 1),
               InvalidArgument);
  EXPECT_THROW(make_mpi_communicator(MPI_COMM_WORLD, {.timeout = 0ms}), InvalidArgument);
}

TEST(mpi, pieces_of_any_length) {
  const std::vector<std::size_t> lengths{0,  1,  6,   7,   8,   13,  14,   15, 21,   63,
                                         64, 65, 127, 128, 129, 448, 1000, 0,  2500, 7};
  for (const std::size_t piece_bytes : {std::size_t{1}, std::size_t{7}, std::size_t{64}}) {
    const auto comm = make_mpi_communicator(MPI_COMM_WORLD, {.timeout = 20s}, piece_bytes);
    SCOPED_TRACE("piece_bytes=" + std::to_string(piece_bytes));
    const int me = comm->rank();
    std::vector<Message> out;
    std::vector<Message> in(at(comm->size()) * lengths.size());
    std::vector<Ticket> tickets;
    out.reserve(in.size());
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      for (int peer = 0; peer < comm->size(); ++peer) {
        if (peer == me) continue;
        out.push_back(message_of(lengths[i], pair_seed(me, peer, i)));
        tickets.push_back(comm->isend(out.back(), peer));
        tickets.push_back(comm->ireceive(in[at(peer) * lengths.size() + i], peer));
      }
    }
    std::ranges::reverse(tickets);  // the last is waited for first: pieces must not mix
    for (const Ticket t : tickets) comm->wait(t);
    for (int peer = 0; peer < comm->size(); ++peer) {
      for (std::size_t i = 0; peer != me && i < lengths.size(); ++i) {
        EXPECT_TRUE(in[at(peer) * lengths.size() + i] ==
                    message_of(lengths[i], pair_seed(peer, me, i)))
            << "message " << i << " of " << lengths[i] << " bytes from " << peer;
      }
    }
    // Bytes are the messages', without pieces.
    std::uint64_t total = 0;
    for (const std::size_t length : lengths) total += length * at(comm->size() - 1);
    EXPECT_EQ(comm->traffic().sent_bytes, total);
    EXPECT_EQ(comm->traffic().received_bytes, total);
    EXPECT_EQ(comm->traffic().messages, lengths.size() * at(comm->size() - 1));
    sum_and_check(*comm, 1000, DenseSum::ring, true);
    sum_and_check(*comm, 1000, DenseSum::vendor, false);
  }
}

TEST(mpi, message_over2_to31_bytes) {
  if (std::getenv("SKIM_TEST_HUGE") == nullptr) {
    GTEST_SKIP() << "needs about 9 GB of memory; set SKIM_TEST_HUGE=1 to run it";
  }
  each_group(2,
             [](Communicator& comm) {
               const std::size_t length = (std::size_t{1} << 31U) + 5;
               if (comm.rank() > 1) return;
               Message m;
               if (comm.rank() == 0) {
                 m.resize(length, std::byte{1});
                 m[std::size_t{1} << 30U] = std::byte{2};
                 m.back() = std::byte{3};
                 comm.wait(comm.isend(m, 1));
                 EXPECT_EQ(comm.traffic().sent_bytes, length);
                 return;
               }
               comm.wait(comm.ireceive(m, 0));
               EXPECT_EQ(comm.traffic().received_bytes, length);
               ASSERT_EQ(m.size(), length);
               EXPECT_EQ(m[std::size_t{1} << 30U], std::byte{2});
               EXPECT_EQ(m.back(), std::byte{3});
               EXPECT_EQ(static_cast<std::size_t>(std::ranges::count(m, std::byte{1})), length - 2);
             },
             {.timeout = 5min});
}
#endif

#ifdef SKIM_TEST_STREAMS
// Rank 0 of 2. Rank 1's stream has these bytes and then breaks. `asked`: the most bytes that rank 0
// has asked for beyond those that have arrived.
std::unique_ptr<Communicator> over_a_stream_of(const Message& bytes, std::size_t& asked) {
  ByteStreams streams;
  streams.send = [](int, Bytes) { return 0; };
  streams.receive = [&bytes, &asked, at = std::size_t{0}](int, std::span<std::byte> data) mutable {
    asked = std::max(asked, data.size());
    if (data.size() > bytes.size() - at) return 7;
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), data.size(), data.begin());
    at += data.size();
    return 0;
  };
  return make_stream_communicator(0, 2, 0, std::move(streams));
}
// As src/communicator/streams.cpp writes it.
void put_header(std::int32_t context, std::uint64_t length, Message& stream) {
  struct {
    std::uint32_t kind = 0x4d4b5331;
    std::int32_t context = 0;
    std::uint64_t length = 0;
  } const header{.context = context, .length = length};
  const auto bytes = std::as_bytes(std::span(&header, 1));
  stream.insert(stream.end(), bytes.begin(), bytes.end());
}

TEST(streams, messages_of_any_length_arrive) {
  Message stream;
  const std::vector<std::size_t> lengths{0, 5'000'003, 1, 1 << 20, (1 << 20) + 1, 9'000'000, 7};
  for (const std::size_t length : lengths) {
    put_header(0, length, stream);
    const Message message = message_of(length, length);
    stream.insert(stream.end(), message.begin(), message.end());
  }
  std::size_t asked = 0;
  const auto comm = over_a_stream_of(stream, asked);
  Message message;
  for (const std::size_t length : lengths) {
    comm->wait(comm->ireceive(message, 1));
    EXPECT_EQ(message, message_of(length, length));
  }
}

TEST(streams, a_length_that_no_rank_sent_is_an_error_of_the_peer) {
  for (const std::int32_t context : {0, 3}) {  // 3: for another communicator of the family
    for (const int bits : {35, 46, 62}) {
      Message stream;
      put_header(context, std::uint64_t{1} << bits, stream);
      stream.resize(stream.size() + 5'000'000);
      std::size_t asked = 0;
      const auto comm = over_a_stream_of(stream, asked);
      Message message;
      try {
        comm->wait(comm->ireceive(message, 1));
        ADD_FAILURE() << "a message of 2^" << bits << " bytes";
      } catch (const CommError& e) {
        EXPECT_EQ(e.peer(), 1);
      }
      EXPECT_LE(asked, 2 * stream.size());
    }
  }
}
#endif

TEST(communicator, allocates_nothing_once_warm) {
  each_group(1, [](Communicator& comm) {
    std::vector<float> data(5000, 1.0F);
    MessageList all;
    MessageList notes;
    Message m;
    Message from_left;
    const Message mine = message_of(at(comm.rank()) * 1000 + 5, 1);
    const auto step = [&] {
      comm.set_phase({"step", 1, 2});
      m.assign(mine.begin(), mine.end());
      comm.broadcast(m, 0);
      comm.allgather(mine, all);
      comm.allgather(mine, all, 9000);
      comm.allreduce_sum(data, DenseSum::ring, mine, notes);
      comm.allreduce_sum(data, DenseSum::vendor, mine, notes);
      if (comm.size() > 1) {
        const Ticket receiving =
            comm.ireceive(from_left, (comm.rank() + comm.size() - 1) % comm.size());
        comm.wait(comm.isend(mine, (comm.rank() + 1) % comm.size()));
        comm.wait(receiving);
      }
      comm.barrier();
    };
    for (int i = 0; i < 4; ++i) step();
    // All threads' allocations count, so they begin and end together.
    comm.barrier();
    const std::uint64_t before = test::allocations();
    comm.barrier();
    for (int i = 0; i < 10; ++i) step();
    comm.barrier();
    const std::uint64_t after = test::allocations();
    comm.barrier();
    EXPECT_EQ(after, before);
    all.clear();
    const std::uint64_t counted = test::allocations();
    ::operator delete(::operator new(1000));  // clang leaves out a vector that is not used
    EXPECT_GT(test::allocations(), counted) << "allocations are not being counted";
  });
}

// ---- the tests' own tools

TEST(faulty_communicator, without_a_fault_is_the_communicator) {
  each_group(1, [](Communicator& inner) {
    FaultyCommunicator comm(inner, {});
    for (const std::size_t n : {std::size_t{10}, std::size_t{1000}}) {
      std::vector<float> data = addend(comm.rank(), n, true);
      MessageList notes;
      comm.allreduce_sum(data, DenseSum::ring, {}, notes);
      expect_equal_everywhere(comm, data);
    }
    EXPECT_EQ(comm.traffic().sent_bytes, inner.traffic().sent_bytes);
    EXPECT_EQ(comm.traffic().received_bytes, inner.traffic().received_bytes);
    EXPECT_EQ(comm.sends(), comm.traffic().messages);
    EXPECT_FALSE(comm.happened());
  });
}

TEST(faulty_communicator, spoils_exactly_one_send) {
  using test::Fault;
  for (const Fault fault : {Fault::truncate, Fault::corrupt, Fault::delay}) {
    each_group(2, [&](Communicator& inner) {
      if (inner.rank() > 1) return;
      int delays = 0;
      FaultyCommunicator comm(inner, {fault, 1, [&] { ++delays; }});
      for (std::uint64_t i = 0; i < 3; ++i) {
        const Message out = message_of(100, i);
        Message in;
        if (comm.rank() == 0) {
          comm.wait(comm.isend(out, 1));
          EXPECT_EQ(comm.happened(), i >= 1);
          continue;
        }
        comm.wait(comm.ireceive(in, 0));
        Message expected = out;
        if (i == 1 && fault == Fault::truncate) expected.resize(50);
        if (i == 1 && fault == Fault::corrupt) expected[50] ^= std::byte{0x10};
        EXPECT_EQ(in, expected) << "message " << i;
      }
      EXPECT_EQ(delays, comm.rank() == 0 && fault == Fault::delay ? 1 : 0);
    });
  }
}

TEST(faulty_communicator, drops_a_message) {
  each_group(2,
             [](Communicator& inner) {
               if (inner.rank() > 1) return;
               FaultyCommunicator comm(inner, {test::Fault::drop, 0});
               const Message out = message_of(100, 1);
               Message in;
               if (comm.rank() == 0) {
                 comm.wait(comm.isend(out, 1));
                 return;
               }
               comm.set_phase({"dropped"});
               const auto e = error_of([&] { comm.wait(comm.ireceive(in, 0)); });
               ASSERT_TRUE(e);
               EXPECT_EQ(e->peer(), 0);
               EXPECT_EQ(e->phase(), "dropped");
             },
             {.timeout = 150ms});
}

TEST(faulty_communicator, truncated_or_missing_data_of_a_sum_is_an_error_not_a_sum) {
  using test::Fault;
  for (const Fault fault : {Fault::truncate, Fault::raise, Fault::drop}) {
    each_group(3,
               [&](Communicator& inner) {
                 // The last send of the reduce-scatter, on rank 1.
                 const bool spoils = inner.rank() == 1;
                 FaultyCommunicator comm(
                     inner, {spoils ? fault : Fault::none, count(inner.size() - 2), [] {}});
                 std::vector<float> data = addend(comm.rank(), 840, true);
                 MessageList notes;
                 const auto e = error_of([&] {
                   comm.allreduce_sum(data, DenseSum::ring, {}, notes);
                   comm.barrier();
                 });
                 ASSERT_TRUE(e);
                 EXPECT_EQ(comm.happened(), spoils);
                 if (comm.rank() == 2 && fault == Fault::truncate) {
                   EXPECT_EQ(e->peer(), 1);
                   EXPECT_TRUE(contains(e->what(), "bytes from rank 1, expected ")) << e->what();
                 }
                 if (spoils && fault == Fault::raise) {
                   EXPECT_EQ(e->peer(), 1);
                 }
                 comm.abort(e->peer());
               },
               {.timeout = fault == Fault::drop ? 300ms : 5000ms});
  }
}

}  // namespace
}  // namespace skim
