// A failure of one rank reaches every rank in time, as a CommError that names a peer and a phase;
// and everything can be destroyed afterwards. No test here waits for a fixed time.
#include "fault.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "group.hpp"
#include "oracle.hpp"
#include "parts.hpp"
#include "skim/error.hpp"
#include "skim/reducer.hpp"

namespace skim {
namespace {

using test::buckets;
using test::Fault;
using test::FaultPlan;
using test::FaultyCommunicator;
using Clock = std::chrono::steady_clock;
using Floats = std::vector<float>;

// Where a rank can only notice by the clock, the clock is short; where word of the failure must
// arrive, it is so long that the test fails if that word is what is missing.
constexpr auto kShort = std::chrono::milliseconds(200);
constexpr auto kLong = std::chrono::seconds(100);
// A busy machine may take this much longer than the timeout says.
constexpr auto kGrace = std::chrono::seconds(30);

struct Ending {
  bool comm_error = false;
  std::string what, phase;
  int peer = -1;
  bool returned = false;
  bool other_error = false;
};

using RankBody = std::function<void(Communicator&)>;

// Every rank is a thread that owns its communicator: when it ends, it is gone. Nobody aborts but
// the library.
std::vector<Ending> endings(int ranks, std::chrono::milliseconds timeout, const RankBody& body) {
  const auto begin = Clock::now();
  std::vector<Ending> all(static_cast<std::size_t>(ranks));
  {
    auto group = make_in_process_group(ranks, {.timeout = timeout});
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < group.size(); ++r) {
      threads.emplace_back([&, r, comm = std::move(group[r])] {
        try {
          body(*comm);
          all[r].returned = true;
        } catch (const CommError& e) {
          all[r].comm_error = true;
          all[r].what = e.what();
          all[r].phase = e.phase();
          all[r].peer = e.peer();
        } catch (const std::exception& e) {
          all[r].other_error = true;
          all[r].what = e.what();
        }
      });
    }
  }
  EXPECT_LT(Clock::now() - begin, (timeout == kLong ? std::chrono::seconds(0) : timeout) + kGrace);
  return all;
}

void expect_named(const Ending& e, int rank) {
  EXPECT_TRUE(e.comm_error) << "rank " << rank << " did not fail: " << e.what;
  EXPECT_GE(e.peer, 0) << e.what;
  EXPECT_NE(e.phase, "") << e.what;
  EXPECT_NE(e.what.find("rank " + std::to_string(e.peer)), std::string::npos) << e.what;
  EXPECT_NE(e.what.find("'" + e.phase + "'"), std::string::npos) << e.what;
}

// Some steps of training. A rank that was not told of a failure in one step is told in the next.
class Training {
 public:
  Training(Communicator& comm, ExchangeKind kind, bool async, ReducerParts parts = {})
      : async_(async),
        rank_(comm.rank()),
        reducer_(options(kind), with_density(std::move(parts)), comm) {
    reducer_.set_layout(buckets({64, 40}));
  }
  void steps(int count) {
    for (int step = 0; step < count; ++step) {
      std::vector<Floats> grads;
      std::vector<Ticket> tickets;
      for (Slot s = 0; s < 2; ++s) {
        grads.push_back(
            test::normal(s == 0 ? 64 : 40, static_cast<std::uint64_t>(100 * step + rank_)));
      }
      for (Slot s = 0; s < 2; ++s) {
        if (async_) {
          tickets.push_back(reducer_.start(s, std::span(grads[s])));
        } else {
          reducer_.reduce(s, std::span(grads[s]));
        }
      }
      std::exception_ptr failed;
      for (const Ticket t :
           tickets) {  // all: grads must not go before the reducer is done with them
        try {
          reducer_.wait(t);
        } catch (...) {
          if (!failed) failed = std::current_exception();
        }
      }
      if (failed) std::rethrow_exception(failed);
      reducer_.end_step(0.0);
    }
  }
  Reducer& reducer() { return reducer_; }

 private:
  static ReducerOptions options(ExchangeKind kind) {
    ReducerOptions o;
    o.exchange.kind = kind;
    o.dense_below = 0;
    return o;
  }
  static ReducerParts with_density(ReducerParts parts) {
    if (!parts.schedule) parts.schedule = constant_density(0.1);
    return parts;
  }
  bool async_;
  int rank_;
  Reducer reducer_;
};

const std::vector<ExchangeKind> kKinds =
    test::kinds_of_table([](const ExchangeRow& row) { return row.holds_mass; });
std::string text_of(ExchangeKind kind, bool async) {
  return std::string(name_of(kind)) + (async ? ", async" : ", sync");
}

enum class Mistake : std::uint8_t { error, invalid_argument, unsorted, beyond, other_length };
constexpr std::array kMistakes{Mistake::error, Mistake::invalid_argument, Mistake::unsorted,
                               Mistake::beyond, Mistake::other_length};

class Mistaken final : public Selector {
 public:
  Mistaken(Mistake mistake, std::uint64_t at_step)
      : exact_(make_selector({})), mistake_(mistake), at_step_(at_step) {}
  std::string_view name() const noexcept override { return "mistaken"; }
  SelectReport select(const SelectTask& task, SparseBuffer& out) override {
    const SelectReport report = exact_->select(task, out);
    if (task.id.step != at_step_) return report;
    switch (mistake_) {
      case Mistake::error: throw std::runtime_error("a selector's own error");
      case Mistake::invalid_argument: throw InvalidArgument("a selector's own error");
      case Mistake::unsorted: std::ranges::reverse(out.indices()); break;
      case Mistake::beyond: out.indices().back() = static_cast<Index>(task.grad.n); break;
      case Mistake::other_length:
        out.reset(task.grad.n + 1);
        out.append(0, 1.0F);
        break;
    }
    return report;
  }

 private:
  std::unique_ptr<Selector> exact_;
  Mistake mistake_;
  std::uint64_t at_step_;
};

// Runs a group in which one rank has such a selector, and expects that all ranks end at once.
void expect_told(ExchangeKind kind, bool async, int culprit, std::uint64_t at_step,
                 Mistake mistake) {
  SCOPED_TRACE(text_of(kind, async) + ", rank " + std::to_string(culprit) + ", mistake " +
               std::to_string(static_cast<int>(mistake)));
  const auto all = endings(3, kLong, [&](Communicator& comm) {
    ReducerParts parts;
    if (comm.rank() == culprit) parts.selector = std::make_unique<Mistaken>(mistake, at_step);
    Training(comm, kind, async, std::move(parts)).steps(3);
  });
  for (int r = 0; r < 3; ++r) {
    const Ending& e = all[static_cast<std::size_t>(r)];
    if (r == culprit) {
      EXPECT_TRUE(e.other_error);
      const bool throws = mistake == Mistake::error || mistake == Mistake::invalid_argument;
      const char* const why =
          throws ? "a selector's own error" : "the selector: indices must ascend";
      EXPECT_NE(e.what.find(why), std::string::npos) << e.what;
      continue;
    }
    expect_named(e, r);
    EXPECT_EQ(e.peer, culprit) << e.what;
    EXPECT_EQ(e.phase, "reduce: selection");
  }
}

TEST(fault, a_rank_with_a_mistaken_selector_takes_the_others_along_at_once) {
  for (const ExchangeKind kind : kKinds) {
    if (kind == ExchangeKind::dense) continue;  // it has no selector
    for (const bool async : {false, true}) {
      for (const int culprit : {0, 2}) {
        for (const std::uint64_t at_step : {0U, 1U}) {
          for (const Mistake mistake : kMistakes) {
            expect_told(kind, async, culprit, at_step, mistake);
          }
        }
      }
    }
  }
}

TEST(fault, a_rank_that_is_gone_is_noticed_by_the_clock) {
  for (const ExchangeKind kind : kKinds) {
    for (const bool async : {false, true}) {
      for (const int gone : {0, 1, 3}) {
        SCOPED_TRACE(text_of(kind, async) + ", rank " + std::to_string(gone));
        // Ranks that are still on their way to their wait when the time is over look as if gone.
        const auto all = endings(4, std::chrono::milliseconds(500), [&](Communicator& comm) {
          Training(comm, kind, async).steps(comm.rank() == gone ? 1 : 3);
        });
        for (int r = 0; r < 4; ++r) {
          const Ending& e = all[static_cast<std::size_t>(r)];
          if (r == gone) {
            EXPECT_TRUE(e.returned);
          } else {
            expect_named(e, r);
            EXPECT_EQ(e.peer, gone) << e.what;
          }
        }
      }
      const auto pair = endings(2, kShort, [&](Communicator& comm) {
        Training(comm, kind, async).steps(comm.rank() == 1 ? 1 : 3);
      });
      expect_named(pair[0], 0);
      EXPECT_EQ(pair[0].peer, 1) << pair[0].what;
    }
  }
}

// As when backward throws while buckets are on their way. Whether the thread gets through all of
// them before it is stopped is a race, which it hardly ever wins; then all ranks are done, and it
// counts for nothing.
TEST(fault, a_rank_that_ends_with_open_tickets_tells_the_others) {
  const std::vector<std::size_t> sizes(8, 40);
  for (const ExchangeKind kind : {ExchangeKind::allgather, ExchangeKind::gtopk}) {
    bool left_work = false;
    for (int attempt = 0; attempt < 100 && !left_work; ++attempt) {
      std::atomic<std::size_t> begun = 0;  // by rank 1
      const auto all = endings(3, kLong, [&](Communicator& comm) {
        std::latch started(1);
        ReducerParts parts;
        parts.schedule = constant_density(0.05);
        if (comm.rank() == 1) {
          parts.selector = std::make_unique<test::CountBy>([&](const SelectTask& task) {
            started.wait();
            ++begun;
            return task.keep.k;
          });
        }
        ReducerOptions o;
        o.exchange.kind = kind;
        o.dense_below = 0;
        std::vector<Floats> grads(sizes.size(), test::normal(40, 1));
        std::vector<Ticket> tickets;
        Reducer reducer(o, std::move(parts), comm);
        reducer.set_layout(buckets(sizes));
        for (Slot s = 0; s < sizes.size(); ++s) {
          tickets.push_back(reducer.start(s, std::span(grads[s])));
        }
        if (comm.rank() == 1) {
          started.count_down();
          throw std::runtime_error("backward failed");
        }
        for (const Ticket t : tickets) reducer.wait(t);
      });
      EXPECT_EQ(all[1].what, "backward failed");
      left_work = begun < sizes.size();
      for (const int r : {0, 2}) {
        const Ending& e = all[static_cast<std::size_t>(r)];
        EXPECT_EQ(e.comm_error, left_work);
        if (!left_work) continue;
        expect_named(e, r);
        EXPECT_EQ(e.peer, 1);
        EXPECT_EQ(e.phase, "reducer: destroyed with open tickets");
      }
    }
    EXPECT_TRUE(left_work);
  }
}

// Each way to spoil a message, at each of the first sends of a rank.
TEST(fault, a_spoiled_message_fails_on_every_rank) {
  struct Row {
    Fault fault;
    const char* name;
    bool by_the_clock;
  };
  for (const Row& row : std::vector<Row>{{Fault::drop, "drop", true},
                                         {Fault::truncate, "truncate", false},
                                         {Fault::corrupt, "corrupt", false},
                                         {Fault::raise, "raise", false}}) {
    for (const ExchangeKind kind : kKinds) {
      // A dense chunk carries no checksum: the transport is trusted to keep bits.
      if (kind == ExchangeKind::dense && row.fault == Fault::corrupt) continue;
      for (const bool async : {false, true}) {
        for (const int culprit : {0, 1, 2}) {
          for (const std::uint64_t at_send : {0U, 1U, 3U}) {
            if (row.by_the_clock && (async || at_send == 3)) continue;  // each waits for the clock
            SCOPED_TRACE(std::string(row.name) + ", " + text_of(kind, async) + ", rank " +
                         std::to_string(culprit) + ", send " + std::to_string(at_send));
            bool happened = false;
            const auto all =
                endings(3, row.by_the_clock ? std::chrono::milliseconds(kShort) : kLong,
                        [&](Communicator& comm) {
                          if (comm.rank() != culprit) {
                            Training(comm, kind, async).steps(8);
                            return;
                          }
                          FaultyCommunicator faulty(comm, {.fault = row.fault, .at_send = at_send});
                          try {
                            Training(faulty, kind, async).steps(8);
                          } catch (...) {
                            happened = faulty.happened();
                            throw;
                          }
                        });
            EXPECT_TRUE(happened);
            for (int r = 0; r < 3; ++r) {
              const Ending& e = all[static_cast<std::size_t>(r)];
              if (row.fault == Fault::raise && r == culprit) {
                EXPECT_EQ(e.what, "rank " + std::to_string(r) + ": injected fault at send " +
                                      std::to_string(at_send));
              } else {
                expect_named(e, r);
              }
            }
          }
        }
      }
    }
  }
}

// A rank that comes later than the timeout finds the group broken.
TEST(fault, a_late_rank_finds_the_group_aborted) {
  for (const ExchangeKind kind : kKinds) {
    std::latch others_failed(2);
    const auto all = endings(3, kShort, [&](Communicator& comm) {
      if (comm.rank() == 1) {
        FaultyCommunicator late(
            comm, {.fault = Fault::delay, .at_send = 0, .until = [&] { others_failed.wait(); }});
        Training(late, kind, false).steps(2);
        return;
      }
      try {
        Training(comm, kind, false).steps(2);
      } catch (...) {
        others_failed.count_down();
        throw;
      }
      others_failed.count_down();
    });
    for (int r = 0; r < 3; ++r) expect_named(all[static_cast<std::size_t>(r)], r);
  }
}

// Changes one byte of one message, or cuts it.
class Garbage final : public test::ForwardingCommunicator {
 public:
  enum class How { flip, cut, append };
  Garbage(Communicator& to, How how, std::size_t at)
      : ForwardingCommunicator(to), how_(how), at_(at) {}

 private:
  Ticket do_isend(Bytes message, int peer) override {
    if (done_) return forward_isend(message, peer);
    done_ = true;
    bad_.assign(message.begin(), message.end());
    EXPECT_LT(at_, bad_.size());
    if (how_ == How::flip) bad_[at_] ^= std::byte{0xff};
    if (how_ == How::cut) bad_.resize(at_);
    if (how_ == How::append) bad_.resize(bad_.size() + at_ + 1, std::byte{0});
    return forward_isend(bad_, peer);
  }
  How how_;
  std::size_t at_;
  bool done_ = false;
  std::vector<std::byte> bad_;
};

TEST(fault, every_byte_of_a_frame_counts) {
  // 24 of the header, 40 of the statistics, two entries.
  const std::size_t frame = 24 + 40 + 2 * 8;
  for (const ExchangeKind kind : {ExchangeKind::allgather, ExchangeKind::gtopk,
                                  ExchangeKind::global_topk, ExchangeKind::sparcml}) {
    for (const auto how : {Garbage::How::flip, Garbage::How::cut, Garbage::How::append}) {
      for (std::size_t at = 0; at < frame; ++at) {
        SCOPED_TRACE(text_of(kind, false) + ", byte " + std::to_string(at) + ", way " +
                     std::to_string(static_cast<int>(how)));
        const auto all = endings(2, kLong, [&](Communicator& comm) {
          const auto run = [&](Communicator& c) {
            ReducerParts parts;
            parts.schedule = constant_density(0.05);
            ReducerOptions o;
            o.exchange.kind = kind;
            o.exchange.codec.index = IndexCode::raw32;
            o.dense_below = 0;
            Reducer reducer(o, std::move(parts), c);
            reducer.set_layout(buckets({40}));  // k = 2
            for (std::uint64_t step = 0; step < 2; ++step) {
              Floats g = test::normal(40, 10 * step + static_cast<std::uint64_t>(c.rank()));
              reducer.reduce(0, std::span(g));
              reducer.end_step(0.0);
            }
          };
          if (comm.rank() == 0) {
            run(comm);
          } else {
            Garbage bad(comm, how, at);
            run(bad);
          }
        });
        expect_named(all[0], 0);
        expect_named(all[1], 1);
        EXPECT_EQ(all[0].peer, 1) << all[0].what;
        EXPECT_NE(all[0].what.find("bad frame from rank 1"), std::string::npos) << all[0].what;
      }
    }
  }
}

// Sends each frame that travels alone without its statistics, as another encoder might.
class WithoutStatistics final : public test::ForwardingCommunicator {
 public:
  explicit WithoutStatistics(Communicator& to) : ForwardingCommunicator(to) {}
  bool happened() const noexcept { return happened_; }

 private:
  Ticket do_isend(Bytes message, int peer) override {
    std::uint32_t dim = 0;
    if (message.size() >= kFrameHeaderBytes) std::memcpy(&dim, &message[8], sizeof dim);
    SparseBuffer entries;
    GroupStats stats;
    stats.signals = 1;  // none of the ranks raises it
    const DecodeResult got = Codec().decode(message, dim, entries, &stats);
    if (!got || stats.signals == 1) return forward_isend(message, peer);
    happened_ = true;
    frame_.clear();
    Codec().encode(entries.view(), nullptr, frame_);
    return forward_isend(frame_, peer);
  }
  std::vector<std::byte> frame_;
  bool happened_ = false;
};

TEST(fault, a_frame_without_statistics_is_refused_where_they_are_needed) {
  for (const ExchangeKind kind : kKinds) {
    using K = ExchangeKind;
    const bool sends_frames_alone = kind == K::gtopk || kind == K::gtopk_tree ||
                                    kind == K::oktopk || kind == K::sparcml ||
                                    kind == K::param_server || kind == K::shared_indices;
    if (!sends_frames_alone) continue;
    SCOPED_TRACE(text_of(kind, false));
    bool happened = false;
    const auto all = endings(2, kLong, [&](Communicator& comm) {
      if (comm.rank() == 0) {
        Training(comm, kind, false).steps(2);
        return;
      }
      WithoutStatistics bare(comm);
      try {
        Training(bare, kind, false).steps(2);
      } catch (...) {
        happened = bare.happened();
        throw;
      }
    });
    EXPECT_TRUE(happened);
    for (int r = 0; r < 2; ++r) expect_named(all[static_cast<std::size_t>(r)], r);
    EXPECT_EQ(all[0].peer, 1) << all[0].what;
    EXPECT_NE(all[0].what.find("statistics"), std::string::npos) << all[0].what;
  }
}

// A rank whose parts of the group lose a message, and do not know to whom.
class LosesInItsParts final : public test::ForwardingCommunicator {
 public:
  explicit LosesInItsParts(Communicator& to) : ForwardingCommunicator(to) {}

 private:
  class Part final : public test::ForwardingCommunicator {
   public:
    explicit Part(std::unique_ptr<Communicator> to) : ForwardingCommunicator(std::move(to)) {}

   private:
    std::size_t do_wait(Ticket) override { throw CommError("lost", -1, phase().text()); }
  };
  std::unique_ptr<Communicator> do_split(int color) override {
    return std::make_unique<Part>(ForwardingCommunicator::do_split(color));
  }
};

TEST(fault, a_failure_of_unknown_cause_in_a_part_of_the_group_is_told_to_all) {
  for (const int ranks : {2, 3}) {
    const auto all = endings(ranks, kLong, [&](Communicator& comm) {
      if (comm.rank() > 0) return Training(comm, ExchangeKind::hierarchical, false).steps(2);
      LosesInItsParts lossy(comm);
      Training(lossy, ExchangeKind::hierarchical, false).steps(2);
    });
    EXPECT_EQ(all[0].what, "lost");
    for (int r = 1; r < ranks; ++r) {
      expect_named(all[static_cast<std::size_t>(r)], r);
      EXPECT_EQ(all[static_cast<std::size_t>(r)].peer, 0);
    }
  }
}

}  // namespace
}  // namespace skim
