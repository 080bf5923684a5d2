// reducer.hpp: the whole path, its options, its report, and its wrong uses.
#include "skim/reducer.hpp"

#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <sstream>
#include <stdexcept>
#include <streambuf>
#include <string>
#include <vector>

#include "allocations.hpp"
#include "exchange_oracle.hpp"
#include "fault.hpp"
#include "group.hpp"
#include "half.hpp"
#include "oracle.hpp"
#include "parts.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

using test::buckets;
using test::gather;
using test::residual_of;
using test::run_group;
using test::same_bits;
using Floats = std::vector<float>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

std::uint64_t seed_of(int rank, std::uint64_t step, Slot slot) {
  return 1000003 * step + 1009 * slot + static_cast<std::uint64_t>(rank);
}

ReducerParts with_density(double d) {
  ReducerParts parts;
  parts.schedule = constant_density(d);
  return parts;
}

ReducerOptions options_of(ExchangeKind kind, std::size_t dense_below = 0) {
  ReducerOptions o;
  o.exchange.kind = kind;
  o.dense_below = dense_below;
  return o;
}

const std::vector<ExchangeKind> kKinds = test::kinds_of_table();

double norm2(std::span<const float> x) {
  double sum = 0.0;
  for (const float v : x) sum += double{v} * double{v};
  return sum;
}

// reduce(), directly or through the communication thread.
StepReport reduce(Reducer& reducer, bool async, Slot slot, GradView grad) {
  return async ? reducer.wait(reducer.start(slot, grad)) : reducer.reduce(slot, grad);
}

void load(Reducer& reducer, const std::vector<std::string>& states) {
  std::vector<std::istringstream> streams;
  for (const auto& s : states) streams.emplace_back(s);
  std::vector<std::istream*> in;
  for (auto& s : streams) in.push_back(&s);
  reducer.load(in);
}
std::string saved(const Reducer& reducer) {
  std::ostringstream out;
  reducer.save(out);
  return out.str();
}

// ---- what comes out -----------------------------------------------------------------------------

TEST(reducer, one_rank_at_density_1_is_the_identity) {
  for (const ExchangeKind kind : kKinds) {
    run_group(1, [&](Communicator& comm) {
      Reducer reducer(options_of(kind), with_density(1.0), comm);
      reducer.set_layout(buckets({500}));
      for (std::uint64_t step = 0; step < 3; ++step) {
        const Floats g = test::normal(500, step);
        Floats mean = g;
        const StepReport report = reducer.reduce(0, std::span(mean));
        EXPECT_TRUE(same_bits(mean, g)) << name_of(kind);
        EXPECT_EQ(report.sent_bytes + report.received_bytes + report.rounds, 0U);
        EXPECT_TRUE(reducer.end_step(0.0));
        EXPECT_EQ(residual_of(reducer, 0), Floats(500, 0.0F));
      }
    });
  }
}

TEST(reducer, one_rank_gets_what_it_selects_and_keeps_the_rest) {
  run_group(1, [&](Communicator& comm) {
    for (const ExchangeKind kind : {ExchangeKind::allgather, ExchangeKind::gtopk}) {
      Reducer reducer(options_of(kind), with_density(0.1), comm);
      reducer.set_layout(buckets({200}));
      Floats residual(200, 0.0F);
      for (std::uint64_t step = 0; step < 10; ++step) {
        Floats g = test::normal(200, step);
        for (std::size_t i = 0; i < 200; ++i) residual[i] += g[i];
        const SparseBuffer kept = test::top_k(residual, 20);
        for (const Index i : kept.view().index) residual[i] = 0.0F;
        reducer.reduce(0, std::span(g));
        EXPECT_TRUE(reducer.end_step(0.0));
        EXPECT_EQ(g, test::dense(kept.view()));
        EXPECT_EQ(residual_of(reducer, 0), residual);
      }
    }
  });
}

// The whole path against a slow version of itself: selection, exchange, commit, mean.
TEST(reducer, is_its_oracle) {
  const std::size_t n = 300;
  const int ranks = 5;
  for (const ExchangeOptions& exchange : test::sparse_exchanges()) {
    const std::size_t k = entries(0.05, n);
    std::vector<Floats> residual(ranks, Floats(n, 0.0F));
    std::vector<std::vector<Floats>> means, residuals;  // [step], [step][rank]
    means.resize(1);
    test::ExchangeOracle oracle(exchange);
    for (std::uint64_t step = 0; step < 12; ++step) {
      std::vector<SparseBuffer> selected;
      std::vector<SparseView> views;
      for (std::size_t r = 0; r < ranks; ++r) {
        const Floats g = test::normal(n, seed_of(static_cast<int>(r), step, 0));
        for (std::size_t i = 0; i < n; ++i) residual[r][i] += g[i];
        selected.push_back(test::top_k(residual[r], k));
      }
      if (exchange.kind == ExchangeKind::shared_indices) selected = test::at_shared_indices(residual, k);
      for (const auto& s : selected) views.push_back(s.view());
      const test::ExchangeOutcome got = oracle.run(views, k);
      for (std::size_t r = 0; r < ranks; ++r) {
        for (const Index i : views[r].index) residual[r][i] = 0.0F;
        const SparseView back = got.returned[r].view();
        for (std::size_t e = 0; e < back.nnz(); ++e) residual[r][back.index[e]] += back.value[e];
      }
      Floats mean = test::dense(got.sum.view());
      for (float& v : mean) v *= 1.0F / ranks;
      means[0].push_back(mean);
      residuals.push_back(residual);
    }
    run_group(ranks, [&](Communicator& comm) {
      ReducerOptions o;
      o.exchange = exchange;
      o.dense_below = 0;
      Reducer reducer(o, with_density(0.05), comm);
      reducer.set_layout(buckets({n}));
      for (std::uint64_t step = 0; step < 12; ++step) {
        SCOPED_TRACE(test::name_of(exchange) + ", step " + std::to_string(step));
        Floats g = test::normal(n, seed_of(comm.rank(), step, 0));
        reducer.reduce(0, std::span(g));
        EXPECT_TRUE(reducer.end_step(0.0));
        EXPECT_EQ(g, means[0][step]);
        EXPECT_EQ(residual_of(reducer, 0), residuals[step][static_cast<std::size_t>(comm.rank())]);
      }
    });
  }
}

// Same slots, same order: through the thread, with waits in any order, nothing differs.
TEST(reducer, sync_is_async_bit_for_bit) {
  const int ranks = 3;
  std::mt19937_64 rng(11);
  std::vector<std::size_t> sizes = {0, 1, 4096, 17};
  while (sizes.size() < 12) sizes.push_back(rng() % 1500);
  for (const ExchangeKind kind : kKinds) {
    std::vector<std::vector<Floats>> sync(ranks), async(ranks);
    for (const bool through_thread : {false, true}) {
      run_group(ranks, [&](Communicator& comm) {
        auto& out = (through_thread ? async : sync)[static_cast<std::size_t>(comm.rank())];
        std::mt19937_64 order(static_cast<std::uint64_t>(comm.rank()));  // its own on each rank
        ReducerParts parts;
        parts.schedule = listed_density({0.1, 1.0, 0.02}, 0.01);
        Reducer reducer(options_of(kind, 256), std::move(parts), comm);
        reducer.set_layout(buckets(sizes));
        for (std::uint64_t step = 0; step < 8; ++step) {
          std::vector<Floats> grads;
          for (Slot s = 0; s < sizes.size(); ++s) {
            grads.push_back(test::normal(sizes[s], seed_of(comm.rank(), step, s)));
          }
          std::vector<StepReport> reports(sizes.size());
          if (through_thread) {
            std::vector<std::pair<BucketTicket, Slot>> tickets;
            for (Slot s = 0; s < sizes.size(); ++s) {
              tickets.emplace_back(reducer.start(s, std::span(grads[s])), s);
              if (step % 2 == 0 && order() % 3 == 0) {  // some are collected on the way
                const std::size_t at = order() % tickets.size();
                reports[tickets[at].second] = reducer.wait(tickets[at].first);
                tickets.erase(tickets.begin() + static_cast<std::ptrdiff_t>(at));
              }
            }
            std::ranges::shuffle(tickets, order);
            for (const auto& [ticket, slot] : tickets) reports[slot] = reducer.wait(ticket);
          } else {
            for (Slot s = 0; s < sizes.size(); ++s) {
              reports[s] = reducer.reduce(s, std::span(grads[s]));
            }
          }
          if (step % 3 == 2) {
            reducer.rollback_step(static_cast<double>(step) / 2.0);
          } else {
            EXPECT_TRUE(reducer.end_step(static_cast<double>(step) / 2.0));
          }
          for (Slot s = 0; s < sizes.size(); ++s) {
            const StepReport& r = reports[s];
            EXPECT_EQ(r.id.slot, s) << "a ticket is its own bucket's";
            EXPECT_EQ(r.id.step, step);
            out.push_back(grads[s]);
            out.push_back(residual_of(reducer, s));
            out.push_back({static_cast<float>(r.k), static_cast<float>(r.sent_entries),
                           static_cast<float>(r.sum_entries), static_cast<float>(r.sent_bytes),
                           static_cast<float>(r.received_bytes), static_cast<float>(r.rounds),
                           static_cast<float>(r.capture), static_cast<float>(r.residual_norm),
                           r.threshold, r.dense ? 1.0F : 0.0F,
                           static_cast<float>(r.group.accumulated_norm2)});
          }
        }
      });
    }
    for (std::size_t r = 0; r < ranks; ++r) {
      EXPECT_GT(sync[r].size(), 100U);
      EXPECT_EQ(sync[r], async[r]) << name_of(kind) << " rank " << r;
    }
  }
}

TEST(reducer, a_dense_step_delivers_the_residual_too) {
  for (const int ranks : {1, 2, 3}) {
    run_group(ranks, [&](Communicator& comm) {
      ReducerParts parts;
      parts.schedule = listed_density({0.05, 0.05, 1.0}, 0.05);
      Reducer reducer(options_of(ExchangeKind::allgather), std::move(parts), comm);
      reducer.set_layout(buckets({100}));
      Floats g;
      for (std::uint64_t step = 0; step < 2; ++step) {
        g = test::integers(100, seed_of(comm.rank(), step, 0));
        EXPECT_FALSE(reducer.reduce(0, std::span(g)).dense);
        EXPECT_TRUE(reducer.end_step(static_cast<double>(step + 1)));
      }
      const auto residuals = gather(comm, residual_of(reducer, 0));
      EXPECT_NE(residuals[0], Floats(100, 0.0F));
      g = test::integers(100, seed_of(comm.rank(), 2, 0));
      const auto grads = gather(comm, g);
      Floats expected(100, 0.0F);
      for (std::size_t r = 0; r < grads.size(); ++r) {
        for (std::size_t i = 0; i < 100; ++i) expected[i] += residuals[r][i] + grads[r][i];
      }
      for (float& v : expected) v *= 1.0F / static_cast<float>(ranks);
      const StepReport report = reducer.reduce(0, std::span(g));
      EXPECT_TRUE(report.dense);
      EXPECT_EQ(g, expected);
      EXPECT_EQ(report.residual_norm, 0.0);
      EXPECT_TRUE(reducer.end_step(3.0));
      EXPECT_EQ(residual_of(reducer, 0), Floats(100, 0.0F));
    });
  }
}

TEST(reducer, short_buckets_go_dense) {
  run_group(2, [&](Communicator& comm) {
    Reducer reducer(options_of(ExchangeKind::allgather, 100), with_density(0.01), comm);
    reducer.set_layout(buckets({99, 100, 0}));
    for (const auto& [slot, dense] :
         {std::pair(0U, true), std::pair(1U, false), std::pair(2U, true)}) {
      Floats g = test::normal(reducer.local().size(slot), slot);
      EXPECT_EQ(reducer.reduce(slot, std::span(g)).dense, dense) << slot;
    }
    Reducer none(options_of(ExchangeKind::allgather, 0), with_density(0.01), comm);
    none.set_layout(buckets({1, 0}));
    for (const Slot slot : {0U, 1U}) {  // also nothing at all can be exchanged
      Floats g(none.local().size(slot), 1.0F);
      EXPECT_FALSE(none.reduce(slot, std::span(g)).dense);
      EXPECT_EQ(g, Floats(g.size(), 1.0F));
    }
    EXPECT_EQ(ReducerOptions().dense_below, 4096U);
    Reducer dense(options_of(ExchangeKind::dense), with_density(0.01), comm);
  });
}

// The vendor's sum (in this process: the same ring) gives the same conclusions.
TEST(reducer, dense_by_the_vendor) {
  run_group(3, [&](Communicator& comm) {
    ReducerOptions o = options_of(ExchangeKind::dense);
    o.dense_sum = DenseSum::vendor;
    Reducer reducer(o, {}, comm);
    reducer.set_layout(buckets({50}));
    Floats g = test::integers(50, static_cast<std::uint64_t>(comm.rank()));
    const auto all = gather(comm, g);
    reducer.reduce(0, std::span(g));
    for (std::size_t i = 0; i < 50; ++i) {
      EXPECT_EQ(g[i], (all[0][i] + all[1][i] + all[2][i]) * (1.0F / 3.0F));
    }
  });
}

TEST(reducer, without_feedback_nothing_is_kept) {
  for (const ExchangeKind kind : kKinds) {
    if (kind == ExchangeKind::shared_indices) continue;  // it needs a residual
    run_group(2, [&](Communicator& comm) {
      ReducerOptions o = options_of(kind);
      o.feedback.enabled = false;
      Reducer reducer(o, with_density(0.1), comm);
      reducer.set_layout(buckets({100}));
      for (std::uint64_t step = 0; step < 3; ++step) {
        Floats g = test::integers(100, seed_of(comm.rank(), step, 0));
        for (float& v : g) v *= 4.0F;
        GradView scaled = std::span(g);
        scaled.scale = 4.0F;
        const auto all = gather(comm, g);
        const StepReport report = reducer.reduce(0, scaled);
        EXPECT_EQ(report.residual_norm, 0.0);
        EXPECT_TRUE(reducer.end_step(0.0));
        if (kind == ExchangeKind::dense) {
          for (std::size_t i = 0; i < 100; ++i) EXPECT_EQ(g[i], (all[0][i] + all[1][i]) / 2.0F);
        } else if (kind == ExchangeKind::allgather) {
          const Floats a = test::dense(test::top_k(all[0], 10).view()),
                       b = test::dense(test::top_k(all[1], 10).view());
          for (std::size_t i = 0; i < 100; ++i) EXPECT_EQ(g[i], (a[i] + b[i]) / 2.0F);
        }
      }
    });
  }
}

// A loss scale of a power of two moves exponents only: same residuals, means in the same scale.
TEST(reducer, shared_indices_need_a_residual) {
  run_group(2, [&](Communicator& comm) {
    ReducerOptions o = options_of(ExchangeKind::shared_indices);
    o.feedback.enabled = false;
    EXPECT_THROW(Reducer(o, with_density(0.1), comm), InvalidArgument);
  });
}

TEST(reducer, a_bucket_without_entries_is_reduced_by_every_exchange) {
  for (const ExchangeKind kind : kKinds) {
    run_group(2, [&](Communicator& comm) {
      Reducer reducer(options_of(kind), with_density(0.1), comm);
      reducer.set_layout(std::vector<Bucket>{{0, {}}, {1, {{"w", 0, 60}}}});
      const StepReport report = reducer.reduce(0, std::span<float>());
      EXPECT_EQ(report.sent_entries, 0U) << name_of(kind);
      EXPECT_EQ(report.sum_entries, 0U) << name_of(kind);
      Floats g(60, 1.0F);
      EXPECT_GT(reducer.reduce(1, std::span(g)).sum_entries, 0U) << name_of(kind);
      EXPECT_TRUE(reducer.end_step(0.0));
    });
  }
}

TEST(reducer, loss_scale) {
  for (const ExchangeKind kind : kKinds) {
    for (const float scale : {1024.0F, 1.0F / 64.0F}) {
      run_group(3, [&](Communicator& comm) {
        Reducer plain(options_of(kind), with_density(0.05), comm),
            scaled(options_of(kind), with_density(0.05), comm);
        plain.set_layout(buckets({400}));
        scaled.set_layout(buckets({400}));
        for (std::uint64_t step = 0; step < 6; ++step) {
          Floats g = test::normal(400, seed_of(comm.rank(), step, 0)), big = g;
          for (float& v : big) v *= scale;
          GradView view = std::span(big);
          view.scale = scale;
          const StepReport a = plain.reduce(0, std::span(g)), b = scaled.reduce(0, view);
          EXPECT_TRUE(plain.end_step(0.0) && scaled.end_step(0.0));
          for (float& v : g) v *= scale;
          EXPECT_TRUE(same_bits(g, big)) << name_of(kind);
          EXPECT_TRUE(same_bits(residual_of(plain, 0), residual_of(scaled, 0)));
          EXPECT_EQ(a.threshold, b.threshold);
          EXPECT_EQ(a.group.gradient_norm2, b.group.gradient_norm2);
        }
      });
    }
  }
}

// ---- 16-bit gradients
// -----------------------------------------------------------------------------

std::vector<std::uint16_t> rounded(const Floats& x, DType type) {
  std::vector<std::uint16_t> bits(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    bits[i] = type == DType::f16 ? to_f16(x[i]) : to_bf16(x[i]);
  }
  return bits;
}
Floats widened(const std::vector<std::uint16_t>& bits, DType type) {
  Floats x(bits.size());
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = test::meaning(bits[i], type);
  return x;
}
GradView view_of(std::vector<std::uint16_t>& bits, DType type, float scale = 1.0F) {
  GradView grad;
  grad.data = bits.data();
  grad.n = bits.size();
  grad.dtype = type;
  grad.scale = scale;
  return grad;
}

// All that differs from the same numbers as floats is that the mean is rounded.
TEST(reducer, sixteen_bit_gradients_are_reduced_as_floats) {
  for (const ExchangeKind kind : kKinds) {
    for (const bool feedback : {true, false}) {
      if (kind == ExchangeKind::shared_indices && !feedback) continue;  // it needs a residual
      for (const DType type : {DType::f16, DType::bf16}) {
        for (const float scale : {1.0F, 256.0F}) {
          run_group(3, [&](Communicator& comm) {
            SCOPED_TRACE(name_of(kind));
            ReducerOptions o = options_of(kind, 64);
            o.feedback.enabled = feedback;
            const auto parts = [] {
              ReducerParts p;
              p.schedule = listed_density({0.1, 1.0, 0.05}, 0.02);
              return p;
            };
            Reducer narrow(o, parts(), comm), wide(o, parts(), comm);
            const std::vector<std::size_t> sizes = {50, 400};
            narrow.set_layout(buckets(sizes));
            wide.set_layout(buckets(sizes));
            for (std::uint64_t step = 0; step < 6; ++step) {
              for (Slot s = 0; s < sizes.size(); ++s) {
                Floats g = test::normal(sizes[s], seed_of(comm.rank(), step, s));
                for (float& v : g) v *= scale;
                std::vector<std::uint16_t> bits = rounded(g, type);
                g = widened(bits, type);
                GradView floats = std::span(g);
                floats.scale = scale;
                const StepReport a = narrow.reduce(s, view_of(bits, type, scale)),
                                 b = wide.reduce(s, floats);
                EXPECT_EQ(bits, rounded(g, type));
                EXPECT_EQ(a.dense, b.dense);
                EXPECT_EQ(a.sent_bytes, b.sent_bytes);
                EXPECT_EQ(a.group.gradient_norm2, b.group.gradient_norm2);
                EXPECT_EQ(a.residual_norm, b.residual_norm);
                EXPECT_TRUE(same_bits(residual_of(narrow, s), residual_of(wide, s)));
              }
              EXPECT_TRUE(narrow.end_step(static_cast<double>(step + 1)));
              EXPECT_TRUE(wide.end_step(static_cast<double>(step + 1)));
            }
          });
        }
      }
    }
  }
}

// The sum of residuals may be more than a half can hold, while all that is known is finite.
TEST(reducer, a_mean_beyond_16_bits_is_the_largest_and_not_infinite) {
  for (const ExchangeKind kind : kKinds) {
    run_group(2, [&](Communicator& comm) {
      Reducer reducer(options_of(kind), with_density(0.1), comm);
      reducer.set_layout(buckets({10}));
      std::vector<std::uint16_t> bits(10, 0);
      bits[3] = 0x7bff;
      bits[4] = 0xfbff;
      const float before = kind == ExchangeKind::dense ? 0.0F : 65504.0F;
      std::ranges::fill(reducer.local().residual(0).span().subspan(3, 1), 65504.0F);
      const StepReport report = reducer.reduce(0, view_of(bits, DType::f16));
      EXPECT_EQ(report.group.non_finite, 0U);
      EXPECT_EQ(bits[3], 0x7bff);
      EXPECT_EQ(bits[4], kind == ExchangeKind::dense ? 0xfbff : 0);
      EXPECT_TRUE(reducer.end_step(0.0));
      EXPECT_EQ(residual_of(reducer, 0)[3], 0.0F) << "delivered, not kept: " << before;
    });
  }
}

// The sum fits into a float, but the sum times the loss scale does not.
TEST(reducer, a_mean_beyond_32_bits_is_the_largest_and_not_infinite) {
  constexpr float kMax = std::numeric_limits<float>::max();
  for (const ExchangeKind kind : kKinds) {
    run_group(2, [&](Communicator& comm) {
      Reducer reducer(options_of(kind), with_density(0.1), comm);
      reducer.set_layout(buckets({10}));
      std::ranges::fill(reducer.local().residual(0).span().subspan(3, 1), 1e38F);
      Floats g(10, 0.0F);
      GradView grad(g);
      grad.scale = 65536.0F;
      const StepReport report = reducer.reduce(0, grad);
      EXPECT_TRUE(report.finite);
      EXPECT_EQ(g[3], kMax) << name_of(kind);
      EXPECT_TRUE(std::ranges::all_of(g, [](float v) { return std::isfinite(v); }));
      EXPECT_TRUE(reducer.end_step(0.0));
    });
  }
}

TEST(reducer, non_finite_16_bit_gradients) {
  for (const ExchangeKind kind : kKinds) {
    for (const DType type : {DType::f16, DType::bf16}) {
      for (const NonFinite policy : {NonFinite::skip, NonFinite::pass_on}) {
        run_group(3, [&](Communicator& comm) {
          ReducerOptions o = options_of(kind);
          o.non_finite = policy;
          Reducer reducer(o, with_density(0.1), comm);
          reducer.set_layout(buckets({100}));
          std::vector<std::uint16_t> bits = rounded(test::normal(100, 1), type);
          Floats expected = widened(bits, type);
          if (comm.rank() == 1) {
            bits[7] = type == DType::f16 ? 0x7c00 : 0x7f80;  // infinity
            bits[9] = 0xffff;                                // NaN
            expected[7] = expected[9] = 0.0F;
          }
          const StepReport report = reducer.reduce(0, view_of(bits, type));
          EXPECT_EQ(report.non_finite, comm.rank() == 1 ? 2U : 0U);
          EXPECT_EQ(report.group.non_finite, 2U);
          EXPECT_EQ(std::isnan(test::meaning(bits[0], type)), policy == NonFinite::pass_on);
          EXPECT_EQ(reducer.end_step(0.0), policy == NonFinite::pass_on);
          if (policy == NonFinite::skip) {
            EXPECT_EQ(residual_of(reducer, 0), expected);
          }
        });
      }
    }
  }
}

// ---- local options
// --------------------------------------------------------------------------------

const std::vector<FeedbackOptions> kLocal = {
    {.momentum_correction = 0.9F},
    {.momentum_correction = 0.9F, .nesterov_correction = true},
    {.momentum_correction = 0.5F, .factor_masking = false},
    {.momentum_correction = 0.9F, .momentum_dampening = 0.9F},
    {.local_clip = 2.0F},
    {.residual_decay = 0.5F},
    {.momentum_correction = 0.9F,
     .nesterov_correction = true,
     .local_clip = 2.0F,
     .residual_decay = 0.9F},
};

// Deep Gradient Compression on all ranks, entry by entry, in double where it measures norms.
TEST(reducer, local_options_are_their_reference) {
  const std::vector<std::size_t> sizes = {100, 300};
  const int ranks = 4;
  const auto density_at = [](std::uint64_t step) { return step % 5 == 3 ? 1.0 : 0.05; };
  for (const FeedbackOptions& o : kLocal) {
    std::vector<std::vector<Floats>> m(ranks), v(ranks);  // [rank][slot]
    for (std::size_t r = 0; r < ranks; ++r) {
      for (const std::size_t n : sizes) {
        m[r].emplace_back(n, 0.0F);
        v[r].emplace_back(n, 0.0F);
      }
    }
    std::vector<std::vector<Floats>> means, residuals;  // [step][slot], [step][rank * 2 + slot]
    for (std::uint64_t step = 0; step < 14; ++step) {
      means.emplace_back();
      residuals.emplace_back();
      for (Slot s = 0; s < sizes.size(); ++s) {
        const std::size_t n = sizes[s];
        const bool dense = density_at(step) == 1.0, skipped = step == 8;
        Floats sum(n, 0.0F);
        for (int rank = 0; rank < ranks; ++rank) {
          Floats &mr = m[static_cast<std::size_t>(rank)][s],
                 &vr = v[static_cast<std::size_t>(rank)][s];
          const Floats g = test::normal(n, seed_of(rank, step, s));
          const double norm = std::sqrt(norm2(g)),
                       limit =
                           double{o.local_clip} * std::sqrt(static_cast<double>(n) / 400.0 / ranks);
          const float scale =
              o.local_clip > 0.0F && norm > limit ? static_cast<float>(norm / limit) : 1.0F;
          for (std::size_t i = 0; i < n; ++i) {
            const float x = g[i] * ((1.0F - o.momentum_dampening) / scale);
            float add = x;
            if (o.nesterov_correction) {
              mr[i] = o.momentum_correction * (mr[i] + x);
              add = mr[i] + x;
            } else if (o.momentum_correction > 0.0F) {
              add = mr[i] = o.momentum_correction * mr[i] + x;
            }
            vr[i] = o.residual_decay * vr[i] + add;
          }
          const SparseBuffer sent = dense ? test::top_k(vr, n) : test::top_k(vr, entries(0.05, n));
          for (std::size_t e = 0; e < sent.nnz(); ++e) {
            const Index i = sent.view().index[e];
            sum[i] += sent.view().value[e];
            if (skipped) continue;
            vr[i] = 0.0F;
            if (o.factor_masking && !dense) mr[i] = 0.0F;
          }
        }
        for (float& x : sum) x *= 1.0F / ranks;
        means.back().push_back(sum);
      }
      for (std::size_t r = 0; r < ranks; ++r) {
        for (Slot s = 0; s < sizes.size(); ++s) residuals.back().push_back(v[r][s]);
      }
    }
    run_group(ranks, [&](Communicator& comm) {
      ReducerOptions options = options_of(ExchangeKind::allgather);
      options.feedback = o;
      ReducerParts parts;
      parts.schedule = std::make_unique<test::ScheduleBy>(
          [&](const Progress& p) { return Density{.up = density_at(p.step)}; });
      Reducer reducer(options, std::move(parts), comm);
      reducer.set_layout(buckets(sizes));
      for (std::uint64_t step = 0; step < 14; ++step) {
        std::vector<Floats> got;
        for (Slot s = 0; s < sizes.size(); ++s) {
          Floats g = test::normal(sizes[s], seed_of(comm.rank(), step, s));
          reducer.reduce(s, std::span(g));
          got.push_back(g);
        }
        if (step == 8) {
          reducer.rollback_step(0.0);
        } else {
          EXPECT_TRUE(reducer.end_step(0.0));
        }
        for (Slot s = 0; s < sizes.size(); ++s) {
          const Floats& want = means[step][s];
          const Floats r = residual_of(reducer, s);
          const Floats& kept = residuals[step][static_cast<std::size_t>(comm.rank()) * 2 + s];
          // Norms in single blocks of floats, and dense sums in the ring's order, are rounded
          // otherwise.
          for (std::size_t i = 0; i < want.size(); ++i) {
            ASSERT_NEAR(got[s][i], want[i], 2e-5F) << "step " << step << " entry " << i;
            ASSERT_NEAR(r[i], kept[i], 2e-5F) << "step " << step << " entry " << i;
          }
          EXPECT_NE(want, Floats(want.size(), 0.0F));
        }
      }
    });
  }
}

// With all of them, ranks agree bit by bit, resume bit by bit, and count what is not finite though
// the velocity hides it.
TEST(reducer, local_options_agree_on_all_ranks_and_resume) {
  for (const ExchangeKind kind : kKinds) {
    for (const FeedbackOptions& o : kLocal) {
      for (const DType type : {DType::f32, DType::bf16}) {
        run_group(3, [&](Communicator& comm) {
          ReducerOptions options = options_of(kind, 64);
          options.feedback = o;
          Reducer whole(options, with_density(0.05), comm),
              first(options, with_density(0.05), comm), second(options, with_density(0.05), comm);
          const std::vector<std::size_t> sizes = {50, 500};
          for (Reducer* r : {&whole, &first, &second}) r->set_layout(buckets(sizes));
          Reducer* parted = &first;
          for (std::uint64_t step = 0; step < 10; ++step) {
            if (step == 6) {
              load(second, gather(comm, saved(first)));
              parted = &second;
            }
            const bool bad = step == 4;
            for (Slot s = 0; s < sizes.size(); ++s) {
              Floats g = test::normal(sizes[s], seed_of(comm.rank(), step, s));
              if (bad && comm.rank() == 2 && s == 1) g[8] = kNan, g[9] = kInf;
              Floats again = g;
              std::vector<std::uint16_t> bits = rounded(g, type), bits_again = bits;
              const auto view = [&](Floats& x, std::vector<std::uint16_t>& b) {
                return type == DType::f32 ? GradView(std::span(x)) : view_of(b, type);
              };
              const StepReport a = whole.reduce(s, view(g, bits)),
                               b = parted->reduce(s, view(again, bits_again));
              EXPECT_EQ(a.group.non_finite, bad && s == 1 ? 2U : 0U);
              EXPECT_EQ(a.non_finite, bad && s == 1 && comm.rank() == 2 ? 2U : 0U);
              EXPECT_EQ(a.threshold, b.threshold);
              if (type == DType::bf16) g = widened(bits, type), again = widened(bits_again, type);
              EXPECT_TRUE(bad || same_bits(g, again));
              for (const Floats& of_rank : gather(comm, g))
                EXPECT_TRUE(bad || same_bits(of_rank, g));
            }
            EXPECT_EQ(whole.end_step(0.0), !bad);
            EXPECT_EQ(parted->end_step(0.0), !bad);
            for (Slot s = 0; s < sizes.size(); ++s) {
              const std::span<float> m = whole.local().velocity(s).span(),
                                     again = parted->local().velocity(s).span();
              EXPECT_TRUE(same_bits(m, again));
              EXPECT_TRUE(same_bits(residual_of(whole, s), residual_of(*parted, s)));
              EXPECT_TRUE(std::ranges::all_of(m, [](float v) { return std::isfinite(v); }));
            }
          }
        });
      }
    }
  }
}

// A sum of velocities is the velocity of the sum.
TEST(reducer, momentum_correction_in_a_dense_run_is_momentum_after_the_sum) {
  run_group(3, [&](Communicator& comm) {
    ReducerOptions plain = options_of(ExchangeKind::dense), corrected = plain;
    corrected.feedback = {.momentum_correction = 0.9F, .momentum_dampening = 0.5F};
    Reducer a(plain, {}, comm), b(corrected, {}, comm);
    a.set_layout(buckets({200}));
    b.set_layout(buckets({200}));
    Floats velocity(200, 0.0F);
    for (std::uint64_t step = 0; step < 6; ++step) {
      Floats g = test::normal(200, seed_of(comm.rank(), step, 0)), got = g;
      a.reduce(0, std::span(g));
      b.reduce(0, std::span(got));
      EXPECT_TRUE(a.end_step(0.0) && b.end_step(0.0));
      for (std::size_t i = 0; i < g.size(); ++i) {
        velocity[i] = 0.9F * velocity[i] + 0.5F * g[i];
        ASSERT_NEAR(got[i], velocity[i], 2e-6F);
      }
    }
  });
}

// What a schedule sees is the gradient as the framework gave it.
TEST(reducer, clipped_gradients_are_reported_whole_and_sent_small) {
  for (const ExchangeKind kind : kKinds) {
    for (const bool enabled : {true, false}) {
      if (kind == ExchangeKind::shared_indices && !enabled) continue;  // it needs a residual
      run_group(2, [&](Communicator& comm) {
        SCOPED_TRACE(name_of(kind));
        ReducerOptions o = options_of(kind);
        o.feedback = {.enabled = enabled, .local_clip = 0.5F};
        Reducer reducer(o, with_density(1.0 - 1e-13), comm);  // k = n, sparse
        reducer.set_layout(buckets({3000}));
        Floats g = test::normal(3000, seed_of(comm.rank(), 0, 0));
        GradView grad = std::span(g);
        grad.scale = 2.0F;
        const double whole = norm2(g) / 4.0;
        const auto all = gather(comm, g);
        const StepReport report = reducer.reduce(0, grad);
        const double limit = 0.5 / std::sqrt(2.0);
        EXPECT_NEAR(report.group.gradient_norm2, (norm2(all[0]) + norm2(all[1])) / 4.0, 1e-3);
        EXPECT_NEAR(report.group.accumulated_norm2, 2 * limit * limit, 1e-5) << "of both";
        for (std::size_t i = 0; i < 5; ++i) {
          double mean = 0.0;
          for (const Floats& x : all) mean += double{x[i]} * limit / std::sqrt(norm2(x));
          EXPECT_NEAR(g[i], 2.0 * mean / 2.0, 1e-6) << "in the scale that it came in";
        }
        EXPECT_GT(whole, limit);
      });
    }
  }
}

// ---- NaN and infinity
// -----------------------------------------------------------------------------

// Three buckets, only one rank has bad entries, only in bucket 1.
TEST(reducer, non_finite_gradients_are_decided_alike) {
  const std::vector<std::size_t> sizes = {80, 200, 300};
  for (const ExchangeKind kind : kKinds) {
    for (const NonFinite policy : {NonFinite::skip, NonFinite::raise, NonFinite::pass_on}) {
      for (const bool async : {false, true}) {
        run_group(3, [&](Communicator& comm) {
          SCOPED_TRACE(std::string(name_of(kind)) + ", policy " +
                       std::to_string(static_cast<int>(policy)) + (async ? ", async" : ""));
          ReducerOptions o = options_of(kind, 100);
          o.non_finite = policy;
          Reducer reducer(o, with_density(0.05), comm);
          reducer.set_layout(buckets(sizes));
          for (std::uint64_t step = 0; step < 6; ++step) {
            std::vector<Floats> before, grads, means;
            const bool bad_step = step % 2 == 1;
            for (Slot s = 0; s < sizes.size(); ++s) {
              before.push_back(residual_of(reducer, s));
              Floats g = test::integers(sizes[s], seed_of(comm.rank(), step, s));
              if (bad_step && comm.rank() == 1 && s == 1) g[3] = kNan, g[70] = kInf, g[71] = -kInf;
              grads.push_back(g);
              const StepReport report = reduce(reducer, async, s, std::span(g));
              means.push_back(g);
              EXPECT_EQ(report.non_finite, bad_step && comm.rank() == 1 && s == 1 ? 3U : 0U);
              EXPECT_EQ(report.group.non_finite, bad_step && s == 1 ? 3U : 0U);
            }
            for (Slot s = 0; s < sizes.size(); ++s) {
              const bool concerned = bad_step && s == 1 && policy == NonFinite::pass_on;
              EXPECT_EQ(std::ranges::any_of(means[s], [](float v) { return !std::isfinite(v); }),
                        concerned);
              EXPECT_EQ(std::isnan(means[s][0]), concerned) << "where a loss scaler sees it";
            }
            if (bad_step && policy == NonFinite::raise) {
              try {
                reducer.end_step(0.0);
                ADD_FAILURE() << "nothing was thrown";
              } catch (const NonFiniteError& e) {
                EXPECT_EQ(std::string(e.what()), "step " + std::to_string(step) +
                                                     ": 3 gradient entries of the group are NaN or "
                                                     "infinite");
              }
            } else {
              EXPECT_EQ(reducer.end_step(0.0), !bad_step || policy == NonFinite::pass_on);
            }
            EXPECT_EQ(reducer.step(), step + 1);
            for (Slot s = 0; s < sizes.size(); ++s) {
              const Floats after = residual_of(reducer, s);
              EXPECT_TRUE(std::ranges::all_of(after, [](float v) { return std::isfinite(v); }));
              if (!bad_step || policy == NonFinite::pass_on) continue;
              Floats expected = before[s];
              for (std::size_t i = 0; i < expected.size(); ++i) {
                if (std::isfinite(grads[s][i])) expected[i] += grads[s][i];
              }
              EXPECT_EQ(after, expected) << "before + the finite part, bucket " << s;
            }
          }
        });
      }
    }
  }
}

// Every gradient is finite, their sum is not: all ranks see that in the sum.
TEST(reducer, a_sum_that_overflows_is_not_finite) {
  for (const ExchangeKind kind : kKinds) {
    for (const NonFinite policy : {NonFinite::skip, NonFinite::raise, NonFinite::pass_on}) {
      for (const DropPolicy drop : {DropPolicy::survivors, DropPolicy::merger_keeps}) {
        run_group(4, [&](Communicator& comm) {
          ReducerOptions o = options_of(kind);
          o.non_finite = policy;
          o.exchange.drop = drop;
          Reducer reducer(o, with_density(0.01), comm);  // k = 1
          reducer.set_layout(buckets({100}));
          // Two infinities meet in the last merge of gTop-k, and one is dropped.
          Floats g(100, 0.0F);
          g[comm.rank() < 2 ? 4 : 5] = 3e38F;
          const Floats mine = g;
          const StepReport report = reducer.reduce(0, std::span(g));
          EXPECT_EQ(report.group.non_finite, 0U);
          EXPECT_EQ(std::isnan(g[0]), policy == NonFinite::pass_on);
          if (policy == NonFinite::raise) {
            EXPECT_THROW(reducer.end_step(0.0), NonFiniteError);
          } else {
            EXPECT_EQ(reducer.end_step(0.0), policy == NonFinite::pass_on);
          }
          const Floats after = residual_of(reducer, 0);
          EXPECT_TRUE(std::ranges::all_of(after, [](float v) { return std::isfinite(v); }))
              << name_of(kind);
          if (policy != NonFinite::pass_on) {
            EXPECT_EQ(after, mine);
          }
        });
      }
    }
  }
}

// A code of blocks makes NaN of a whole block that holds infinity. What the server holds of the
// other entries stays, and the next step is finite.
TEST(reducer, a_sum_that_overflows_leaves_no_nan_with_a_server) {
  constexpr std::size_t kN = 256;
  for (const ValueCode code : {ValueCode::q8, ValueCode::q4, ValueCode::q2, ValueCode::f32}) {
    run_group(2, [&](Communicator& comm) {
      ReducerOptions o = options_of(ExchangeKind::param_server);
      o.non_finite = NonFinite::pass_on;
      o.exchange.codec.value = code;
      ReducerParts parts;
      parts.schedule = constant_density(32.0 / kN, 16.0 / kN);
      Reducer reducer(o, std::move(parts), comm);
      reducer.set_layout(buckets({kN}));
      for (int step = 0; step < 6; ++step) {
        Floats g(kN, 0.0F);
        for (std::size_t i = 0; i < kN && step < 2; ++i) {
          g[i] = static_cast<float>(1 + (i * 37 + static_cast<std::size_t>(step) * 11) % 101);
        }
        if (step == 2) g[7] = 3e38F;
        const StepReport report = reducer.reduce(0, std::span(g));
        EXPECT_EQ(report.finite, step != 2) << name_of(code) << ", step " << step;
        EXPECT_TRUE(reducer.end_step(0.0));
        const Floats held = test::whole(reducer.held(0), kN);
        EXPECT_TRUE(std::ranges::all_of(held, [](float v) { return std::isfinite(v); }))
            << name_of(code) << ", step " << step;
      }
    });
  }
}

// ---- parts of a user's own
// ------------------------------------------------------------------------

// An exchange that delivers nothing: all comes back.
class ReturnsAll final : public Exchange {
 public:
  std::string_view name() const noexcept override { return "returns all"; }
  ExchangeResult run(StepId, const SparseView& mine, const Keep& keep, GroupStats&,
                     Communicator&) override {
    none_.reset(mine.dim);
    k = keep.k;
    k_down = keep.k_down;
    threshold = keep.threshold;
    return {.sum = none_.view(), .returned = mine};
  }
  void end_step() noexcept override { ++ended; }
  void rollback_step() override { ++rolled_back; }
  void save(std::ostream& out) const override { out << "mine"; }
  void load(std::istream& in) override {
    std::string word(4, ' ');
    in.read(word.data(), 4);
    loaded = word;
  }
  std::size_t k = 0, k_down = 0;
  float threshold = 0.0F;
  int ended = 0, rolled_back = 0;
  std::string loaded;

 private:
  SparseBuffer none_;
};

TEST(reducer, parts_of_ones_own) {
  run_group(1, [&](Communicator& comm) {
    auto owned = std::make_unique<ReturnsAll>();
    ReturnsAll& exchange = *owned;
    std::vector<Progress> seen;
    ReducerParts parts;
    parts.exchange = std::move(owned);
    parts.schedule = std::make_unique<test::ScheduleBy>([&](const Progress& p) {
      seen.push_back(p);
      return Density{.up = 0.25, .down = 0.5, .threshold = 2.0F};
    });
    parts.selector = std::make_unique<test::CountBy>([](const SelectTask& t) {
      EXPECT_EQ(t.keep.k, 25U);
      EXPECT_EQ(t.layout.size(), 2U);
      EXPECT_EQ(t.layout[1].name, "0.b");
      return std::size_t{3};
    });
    Reducer reducer(options_of(ExchangeKind::allgather), std::move(parts), comm);
    reducer.set_layout(buckets({100}));
    reducer.set_total_steps(77);
    ASSERT_FALSE(seen.empty());
    EXPECT_EQ(seen.back().total_steps, 77U) << "the first step knows, too";
    EXPECT_EQ(reducer.density().up, 0.25);

    Floats g = test::integers(100, 1);
    const Floats mine = g;
    const StepReport report = reducer.reduce(0, std::span(g));
    EXPECT_EQ(report.k, 25U);
    EXPECT_EQ(report.sent_entries, 3U);
    EXPECT_EQ(report.sum_entries, 0U);
    EXPECT_EQ(exchange.k, 25U);
    EXPECT_EQ(exchange.k_down, 50U);
    EXPECT_EQ(exchange.threshold, 2.0F);
    EXPECT_EQ(g, Floats(100, 0.0F));
    EXPECT_EQ(residual_of(reducer, 0), mine);
    EXPECT_TRUE(reducer.end_step(0.75));
    EXPECT_EQ(exchange.ended, 1);
    EXPECT_EQ(seen.back().step, 1U);
    EXPECT_EQ(seen.back().epoch, 0.75);
    EXPECT_NEAR(seen.back().last.gradient_norm2, norm2(mine), 1e-6 * norm2(mine));
    EXPECT_NEAR(seen.back().last.accumulated_norm2, norm2(mine), 1e-6 * norm2(mine));
    reducer.rollback_step(0.8);
    EXPECT_EQ(exchange.rolled_back, 1);
    load(reducer, {saved(reducer)});
    EXPECT_EQ(exchange.loaded, "mine");
  });
}

// An exchange of one's own whose result is not what the reducer relies on.
class Wrong final : public Exchange {
 public:
  using Spoil = std::function<void(SparseBuffer& sum, SparseBuffer& returned, Floats& dense)>;
  explicit Wrong(Spoil spoil) : spoil_(std::move(spoil)) {}
  std::string_view name() const noexcept override { return "wrong"; }
  ExchangeResult run(StepId, const SparseView& mine, const Keep&, GroupStats&,
                     Communicator&) override {
    sum_.assign(mine);
    returned_.reset(mine.dim);
    spoil_(sum_, returned_, dense_);
    return {.sum = sum_.view(), .dense_sum = std::span(dense_), .returned = returned_.view()};
  }

 private:
  Spoil spoil_;
  SparseBuffer sum_, returned_;
  Floats dense_;
};

TEST(reducer, results_of_ones_own_exchange_are_checked) {
  const auto why = [](Wrong::Spoil spoil) {
    std::string what = "nothing was thrown";
    run_group(1, [&](Communicator& comm) {
      ReducerParts parts = with_density(0.1);
      parts.exchange = std::make_unique<Wrong>(std::move(spoil));
      Reducer reducer(options_of(ExchangeKind::allgather), std::move(parts), comm);
      reducer.set_layout(buckets({100}));
      Floats g = test::integers(100, 1);
      try {
        reducer.reduce(0, std::span(g));
      } catch (const InvalidArgument& e) {
        what = e.what();
      }
    });
    return what;
  };
  const auto expect = [](const std::string& what, const char* words) {
    EXPECT_NE(what.find(words), std::string::npos) << what;
  };
  const char* const of_sum = "the sum of the exchange: indices must ascend";
  expect(why([](auto& sum, auto&, auto&) { std::ranges::reverse(sum.indices()); }), of_sum);
  expect(why([](auto& sum, auto&, auto&) { sum.indices().back() = 100; }), of_sum);
  expect(why([](auto& sum, auto&, auto&) {
           sum.reset(101);
           sum.append(0, 1.0F);
         }),
         of_sum);
  expect(why([](auto&, auto& returned, auto&) {
           returned.append(7, 1.0F);
           returned.append(7, 1.0F);
         }),
         "the mass that the exchange returned: indices must ascend");
  expect(why([](auto&, auto&, auto& dense) { dense.assign(99, 0.0F); }),
         "the dense sum of the exchange must have 100 entries, not 99");
  expect(why([](auto&, auto&, auto&) {}), "nothing was thrown");
}

// Leaves what it has to give unsaid where there is nothing.
class SaysLittle final : public Exchange {
 public:
  explicit SaysLittle(bool sends) : sends_(sends) {}
  std::string_view name() const noexcept override { return "says little"; }
  ExchangeResult run(StepId, const SparseView& mine, const Keep&, GroupStats&,
                     Communicator&) override {
    if (sends_) return {.sum = mine, .returned = {}};
    return {.sum = {}, .returned = mine};
  }

 private:
  bool sends_;
};

TEST(reducer, results_without_entries_need_no_dim) {
  for (const bool sends : {true, false}) {
    run_group(1, [&](Communicator& comm) {
      ReducerParts parts = with_density(0.1);
      parts.exchange = std::make_unique<SaysLittle>(sends);
      Reducer reducer(options_of(ExchangeKind::allgather), std::move(parts), comm);
      reducer.set_layout(buckets({100}));
      Floats g = test::integers(100, 1);
      const Floats mine = g;
      const StepReport report = reducer.reduce(0, std::span(g));
      EXPECT_EQ(report.sum_entries, sends ? 10U : 0U);
      Floats all = residual_of(reducer, 0);
      for (std::size_t i = 0; i < all.size(); ++i) all[i] += g[i];
      EXPECT_EQ(all, mine);
    });
  }
}

// The exchange may have kept what it was given, though the step reduced no bucket.
TEST(reducer, a_step_that_failed_in_its_first_bucket_must_be_abandoned) {
  run_group(1, [&](Communicator& comm) {
    bool fails = true;
    ReducerParts parts = with_density(0.1);
    parts.selector = std::make_unique<test::CountBy>([&](const SelectTask&) {
      if (fails) throw std::runtime_error("a selector's own error");
      return std::size_t{3};
    });
    Reducer reducer(options_of(ExchangeKind::allgather), std::move(parts), comm);
    reducer.set_layout(buckets({100}));
    const std::string before = saved(reducer);
    Floats g = test::integers(100, 1);
    EXPECT_THROW(reducer.reduce(0, std::span(g)), std::runtime_error);
    EXPECT_FALSE(reducer.is_between_steps());
    const auto refused = [&](const std::function<void()>& call) {
      try {
        call();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const InvalidArgument& e) {
        EXPECT_NE(std::string(e.what()).find("call abandon_step first"), std::string::npos)
            << e.what();
      }
    };
    refused([&] { reducer.end_step(0.0); });
    refused([&] { saved(reducer); });
    refused([&] { load(reducer, {before}); });
    refused([&] { reducer.set_layout(buckets({100})); });
    reducer.abandon_step(0.0);
    EXPECT_TRUE(reducer.is_between_steps());
    saved(reducer);
  });
}

// Of two exchanges that hold mass, the reducer could save and flush neither.
TEST(reducer, a_chooser_of_ones_own_cannot_choose_what_holds_mass) {
  struct Fixed final : Chooser {
    std::array<ExchangeOptions, 2> both{ExchangeOptions{.kind = ExchangeKind::param_server},
                                        ExchangeOptions{.kind = ExchangeKind::allgather}};
    std::span<const ExchangeOptions> candidates() const noexcept override { return both; }
    std::size_t choose(StepId, std::size_t, const Keep&, Communicator&) override { return 0; }
    Times told(Slot) const noexcept override { return {}; }
    void took(StepId, std::int64_t, const Times&) noexcept override {}
    std::string_view decision(Slot) const noexcept override { return {}; }
  };
  run_group(1, [&](Communicator& comm) {
    ReducerParts parts;
    parts.chooser = std::make_unique<Fixed>();
    try {
      Reducer({}, std::move(parts), comm);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find("cannot choose param-server, which holds mass"),
                std::string::npos)
          << e.what();
    }
  });
}

// Whatever the exchange, and wherever the disk becomes full.
TEST(reducer, a_state_that_cannot_be_written_is_an_error) {
  struct Full final : std::streambuf {
    explicit Full(std::size_t room) : room_(room) {}
    std::streamsize xsputn(const char*, std::streamsize count) override {
      const auto n = std::min(room_, static_cast<std::size_t>(count));
      room_ -= n;
      return static_cast<std::streamsize>(n);
    }
    int overflow(int c) override {
      if (room_ == 0) return std::char_traits<char>::eof();
      --room_;
      return c;
    }
    std::size_t room_;
  };
  for (const ExchangeKind kind : test::kinds_of_table()) {
    run_group(2, [&](Communicator& comm) {
      Reducer reducer(options_of(kind), with_density(0.1), comm);
      reducer.set_layout(buckets({100}));
      Floats g = test::integers(100, 1);
      reducer.reduce(0, std::span(g));
      reducer.end_step(0.0);
      const std::size_t length = saved(reducer).size();
      for (std::size_t room = 0; room <= length; ++room) {
        Full full(room);
        std::ostream out(&full);
        if (room < length) {
          EXPECT_THROW(reducer.save(out), StateError) << name_of(kind) << ", " << room;
        } else {
          EXPECT_NO_THROW(reducer.save(out));
        }
      }
    });
  }
}

TEST(reducer, the_schedule_sees_the_groups_statistics_over_all_buckets) {
  run_group(3, [&](Communicator& comm) {
    Progress seen;
    ReducerParts parts;
    parts.schedule = std::make_unique<test::ScheduleBy>([&](const Progress& p) {
      seen = p;
      return Density{.up = 0.1};
    });
    Reducer reducer(options_of(ExchangeKind::gtopk, 50), std::move(parts), comm);
    reducer.set_layout(buckets({40, 100}));
    GroupStats expected;
    for (std::uint64_t step = 0; step < 3; ++step) {
      expected = {};
      for (Slot s = 0; s < 2; ++s) {
        Floats g = test::normal(s == 0 ? 40 : 100, seed_of(comm.rank(), step, s));
        const auto all = gather(comm, g);
        double sum = 0.0;
        for (const Floats& of_rank : all) sum += norm2(of_rank);
        const StepReport report = reducer.reduce(s, std::span(g));
        EXPECT_NEAR(report.group.gradient_norm2, sum, 1e-6 * sum);
        combine(expected, report.group);
      }
      EXPECT_TRUE(reducer.end_step(0.0));
      EXPECT_EQ(seen.last.gradient_norm2, expected.gradient_norm2);
      EXPECT_EQ(seen.last.accumulated_norm2, expected.accumulated_norm2);
      EXPECT_EQ(seen.last.sent_norm2, expected.sent_norm2);
      EXPECT_EQ(seen.last.sent_bytes, expected.sent_bytes);
    }
  });
}

// What a schedule with a budget goes by: complete steps, and what the last one was.
TEST(reducer, the_schedule_sees_the_bytes_of_complete_steps_and_the_density_used) {
  run_group(3, [&](Communicator& comm) {
    Progress seen;
    std::uint64_t asked = 0;
    ReducerParts parts;
    parts.schedule = std::make_unique<test::ScheduleBy>([&](const Progress& p) {
      seen = p;
      return Density{.up = 0.1 + 0.01 * static_cast<double>(asked++)};
    });
    Reducer reducer(options_of(ExchangeKind::gtopk), std::move(parts), comm);
    reducer.set_layout(buckets({200, 100}));
    EXPECT_EQ(seen.used.up, 0.0) << "there was none";
    std::uint64_t sent = 0;
    for (std::uint64_t step = 0; step < 4; ++step) {
      const std::uint64_t before = sent;
      const double used = reducer.density().up;
      for (Slot s = 0; s < 2; ++s) {
        Floats g = test::normal(s == 0 ? 200 : 100, seed_of(comm.rank(), step, s));
        sent += reducer.reduce(s, std::span(g)).sent_bytes;
      }
      reducer.end_step(0.0);
      EXPECT_EQ(seen.used.up, used);
      const auto all = gather(comm, Floats{static_cast<float>(before)});
      float most = 0.0F;
      for (const Floats& of_rank : all) most = std::max(most, of_rank[0]);
      EXPECT_EQ(static_cast<float>(seen.last.sent_bytes), most);
    }
  });
}

// Density::cut: the largest k of what a selector chose; the rest stays.
TEST(reducer, a_selection_above_k_is_cut_where_the_schedule_says_so) {
  for (const bool cut : {true, false}) {
    run_group(2, [&](Communicator& comm) {
      ReducerParts parts;
      parts.schedule = std::make_unique<test::ScheduleBy>(
          [&](const Progress&) { return Density{.up = 0.1, .at_most_k = cut}; });
      parts.selector =
          std::make_unique<test::CountBy>([](const SelectTask& t) { return 3 * t.keep.k; });
      Reducer reducer(options_of(ExchangeKind::allgather), std::move(parts), comm);
      reducer.set_layout(buckets({100}));
      Floats g = test::integers(100, 3);  // alike on both ranks
      const Floats mine = g;
      const StepReport report = reducer.reduce(0, std::span(g));
      EXPECT_TRUE(reducer.end_step(0.0));
      const SparseBuffer kept = test::top_k(mine, cut ? 10 : 30);
      EXPECT_EQ(report.sent_entries, kept.nnz());
      EXPECT_EQ(g, test::dense(kept.view()));
      Floats rest = mine;
      for (const Index i : kept.view().index) rest[i] = 0.0F;
      EXPECT_EQ(residual_of(reducer, 0), rest);
      EXPECT_NEAR(report.capture, norm2(kept.view().value) / norm2(mine), 1e-6);
      float smallest = kInf;
      for (const float v : kept.view().value) smallest = std::min(smallest, std::fabs(v));
      EXPECT_EQ(report.threshold, smallest);
    });
  }
}

// ---- the report
// -------------------------------------------------------------------------------------

TEST(reducer, reports_what_happened) {
  for (const ExchangeKind kind : kKinds) {
    run_group(3, [&](Communicator& comm) {
      SCOPED_TRACE(name_of(kind));
      Reducer reducer(options_of(kind), with_density(0.05), comm);
      const std::size_t n = 400, k = 20;
      reducer.set_layout(buckets({n}));
      for (std::uint64_t step = 0; step < 5; ++step) {
        Floats g = test::normal(n, seed_of(comm.rank(), step, 0));
        Floats accumulated = residual_of(reducer, 0);
        for (std::size_t i = 0; i < n; ++i) accumulated[i] += g[i];
        const auto me = static_cast<std::size_t>(comm.rank());
        const SparseBuffer kept = kind == ExchangeKind::shared_indices
                                      ? test::at_shared_indices(gather(comm, accumulated), k)[me]
                                      : test::top_k(accumulated, k);
        const double gradient2 = norm2(g), accumulated2 = norm2(accumulated);
        const Traffic before = comm.traffic();
        const StepReport r = reducer.reduce(0, std::span(g));
        const Traffic after = comm.traffic();
        EXPECT_TRUE(reducer.end_step(0.0));

        EXPECT_EQ(r.id.step, step);
        EXPECT_EQ(r.id.slot, 0U);
        EXPECT_EQ(r.n, n);
        EXPECT_EQ(r.sent_bytes, after.sent_bytes - before.sent_bytes);
        EXPECT_EQ(r.received_bytes, after.received_bytes - before.received_bytes);
        EXPECT_EQ(r.rounds, after.rounds - before.rounds);
        EXPECT_GT(r.sent_bytes, 0U);
        EXPECT_GE(r.select_ns, 0);
        EXPECT_GE(r.exchange_ns, 0);
        EXPECT_GE(r.apply_ns, 0);
        EXPECT_EQ(r.non_finite, 0U);
        EXPECT_EQ(r.dense, kind == ExchangeKind::dense);

        const auto non_zero =
            static_cast<std::size_t>(std::ranges::count_if(g, [](float v) { return v != 0.0F; }));
        if (r.dense) {
          EXPECT_EQ(r.k, n);
          EXPECT_EQ(r.sent_entries, n);
          EXPECT_EQ(r.sum_entries, n);
          EXPECT_EQ(r.capture, 1.0);
          EXPECT_EQ(r.residual_norm, 0.0);
        } else {
          EXPECT_EQ(r.k, k);
          EXPECT_EQ(r.sent_entries, kept.nnz());
          EXPECT_EQ(r.sum_entries, non_zero);
          float smallest = kInf;
          for (const float v : kept.view().value) smallest = std::min(smallest, std::fabs(v));
          EXPECT_EQ(r.threshold, smallest);
          EXPECT_NEAR(r.capture, norm2(kept.view().value) / accumulated2, 1e-6);
          const double left = std::sqrt(norm2(residual_of(reducer, 0)));
          EXPECT_NEAR(r.residual_norm, left, 1e-6 * left);
        }
        const auto all =
            gather(comm, Floats{static_cast<float>(gradient2), static_cast<float>(accumulated2)});
        double gradients = 0.0, accumulations = 0.0;
        for (const Floats& of_rank : all) {
          gradients += double{of_rank[0]};
          accumulations += double{of_rank[1]};
        }
        EXPECT_NEAR(r.group.gradient_norm2, gradients, 1e-5 * gradients);
        EXPECT_NEAR(r.group.accumulated_norm2, accumulations, 1e-5 * accumulations);
      }
    });
  }
}

// Norms are sums of floats: near its ends, the report stays in its range.
TEST(reducer, tells_of_its_phases) {
  for (const ExchangeKind kind : kKinds) {
    run_group(2, [&](Communicator& comm) {
      SCOPED_TRACE(name_of(kind));
      std::string phases;
      ReducerOptions o = options_of(kind);
      o.on_phase = [&](const char* phase) { phases.append(phase ? phase : "end").append(" "); };
      Reducer reducer(o, with_density(0.1), comm);
      reducer.set_layout(buckets({50}));
      Floats g(50, 1.0F);
      reducer.reduce(0, std::span(g));
      EXPECT_EQ(phases, "select exchange apply end ");
      phases.clear();
      EXPECT_THROW(reducer.reduce(0, std::span(g).first(49)), InvalidArgument);
      EXPECT_EQ(phases, "");
    });
  }
}

TEST(reducer, reports_within_the_range_when_all_is_sent) {
  run_group(2, [&](Communicator& comm) {
    // With the last of these seeds, what is kept seems larger than all.
    const std::size_t n = 2654;
    for (const std::uint64_t seed : {1U, 2U, 3U, 18578U}) {
      Reducer reducer(options_of(ExchangeKind::allgather), with_density(1.0 - 1e-13), comm);
      reducer.set_layout(buckets({n}));
      Floats g = test::normal(n, seed);
      const double all = std::sqrt(norm2(g));
      const std::size_t non_zero = test::top_k(g, n).nnz();
      const StepReport r = reducer.reduce(0, std::span(g));
      EXPECT_EQ(r.sent_entries, non_zero);
      EXPECT_LE(r.capture, 1.0) << "seed " << seed;
      EXPECT_GE(r.capture, 1.0 - 1e-6);
      EXPECT_GE(r.residual_norm, 0.0);
      EXPECT_LE(r.residual_norm, 1e-3 * all);
    }
  });
}

TEST(reducer, the_threshold_of_an_empty_selection_is_0) {
  for (const ExchangeKind kind : kKinds) {
    run_group(2, [&](Communicator& comm) {
      Reducer reducer(options_of(kind), with_density(0.1), comm);
      reducer.set_layout(buckets({60}));
      Floats g(60, 0.0F);
      EXPECT_EQ(reducer.reduce(0, std::span(g)).threshold, 0.0F) << name_of(kind);
    });
  }
}

TEST(reducer, capture_of_nothing_is_all) {
  run_group(2, [&](Communicator& comm) {
    Reducer reducer(options_of(ExchangeKind::allgather), with_density(0.1), comm);
    reducer.set_layout(buckets({50}));
    Floats g(50, 0.0F);
    const StepReport r = reducer.reduce(0, std::span(g));
    EXPECT_EQ(r.capture, 1.0);
    EXPECT_EQ(r.threshold, 0.0F);
    EXPECT_EQ(r.sent_entries, 0U);
    EXPECT_EQ(r.residual_norm, 0.0);
  });
}

// ---- signals
// ----------------------------------------------------------------------------------------

TEST(reducer, signals_reach_all_ranks_at_the_end_of_the_step) {
  for (const int ranks : {1, 2, 5}) {
    for (const ExchangeKind kind : kKinds) {
      for (const bool async : {false, true}) {
        run_group(ranks, [&](Communicator& comm) {
          Reducer reducer(options_of(kind), with_density(0.1), comm);
          reducer.set_layout(buckets({60, 70}));
          const auto step = [&](std::uint32_t first, std::uint32_t second) {
            for (Slot s = 0; s < 2; ++s) {
              if (const std::uint32_t bits = s == 0 ? first : second) reducer.raise_signal(bits);
              Floats g = test::normal(s == 0 ? 60 : 70, seed_of(comm.rank(), reducer.step(), s));
              reduce(reducer, async, s, std::span(g));
            }
            EXPECT_TRUE(reducer.end_step(0.0));
            return reducer.signals();
          };
          const auto r = static_cast<std::uint32_t>(comm.rank());
          EXPECT_EQ(reducer.signals(), 0U);
          EXPECT_EQ(step(0, 0), 0U);
          EXPECT_EQ(step(1U << r, 0), (1U << ranks) - 1);
          EXPECT_EQ(step(0, 0), 0U) << "each rides once";
          EXPECT_EQ(step(0, r + 1 == static_cast<std::uint32_t>(ranks) ? 0x80000000U : 0U),
                    0x80000000U);
          reducer.raise_signal(2);
          reducer.raise_signal(8);
          reducer.rollback_step(0.0);  // no bucket took them along
          EXPECT_EQ(reducer.signals(), 0U);
          EXPECT_EQ(step(0, 0), 10U);
          // In a step that failed some ranks may have heard what others have not.
          reducer.raise_signal(4);
          Floats g(60, 1.0F);
          reduce(reducer, async, 0, std::span(g));
          reducer.abandon_step(0.0);
          EXPECT_EQ(reducer.signals(), 0U);
        });
      }
    }
  }
}

// ---- memory
// -----------------------------------------------------------------------------------------

// By all ranks together, in steps 10 to 40; every rank and step has gradients of its own, but all
// ranks have the same ones before step 10 if alike_at_first.
std::uint64_t allocations_when_warm(int ranks, const ExchangeOptions& exchange, double density,
                                    bool async, const FeedbackOptions& feedback = {},
                                    DType type = DType::f32, int ranks_on_a_host = 100,
                                    bool alike_at_first = false) {
  const std::vector<std::size_t> sizes = {50, 3000, 5000};
  std::barrier<> together(ranks);
  std::uint64_t before = 0, after = 0;
  run_group(ranks, [&](Communicator& whole) {
    test::OnHost comm(whole, static_cast<std::size_t>(whole.rank() / ranks_on_a_host));
    ReducerOptions o = options_of(exchange.kind, 100);
    o.feedback = feedback;
    o.exchange = exchange;
    Reducer reducer(o, with_density(density), comm);
    reducer.set_layout(buckets(sizes));
    std::vector<std::vector<Floats>> grads(40);
    for (std::uint64_t step = 0; step < grads.size(); ++step) {
      for (Slot s = 0; s < sizes.size(); ++s) {
        const int rank = alike_at_first && step < 10 ? 0 : comm.rank();
        grads[step].push_back(test::normal(sizes[s], seed_of(rank, step, s)));
      }
    }
    std::vector<BucketTicket> tickets(sizes.size());
    for (std::size_t step = 0; step < grads.size(); ++step) {
      if (step == 10) {
        together.arrive_and_wait();
        if (comm.rank() == 0) before = test::allocations();
        together.arrive_and_wait();
      }
      for (Slot s = 0; s < sizes.size(); ++s) {
        GradView grad = std::span(grads[step][s]);
        grad.dtype = type;  // 16-bit: the numbers that stand in its first half
        if (async) {
          tickets[s] = reducer.start(s, grad);
        } else {
          reducer.reduce(s, grad);
        }
      }
      for (Slot s = 0; async && s < sizes.size(); ++s) reducer.wait(tickets[s]);
      if (step % 8 == 7) {
        reducer.rollback_step(0.0);
      } else {
        reducer.end_step(0.0);
      }
    }
    together.arrive_and_wait();
    if (comm.rank() == 0) after = test::allocations();
    together.arrive_and_wait();
  });
  return after - before;
}

TEST(reducer, a_warm_step_allocates_nothing) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const ExchangeKind kind : kKinds) {
      for (const bool async : {false, true}) {
        EXPECT_EQ(allocations_when_warm(ranks, {.kind = kind}, 0.01, async), 0U)
            << name_of(kind) << (async ? " async on " : " sync on ") << ranks << " ranks";
      }
    }
  }
}

// At first all ranks name the same indices, and then their list grows to P times its length.
TEST(reducer, a_warm_step_allocates_nothing_when_lists_of_indices_grow) {
  for (const int ranks : {2, 4}) {
    EXPECT_EQ(allocations_when_warm(ranks, {.kind = ExchangeKind::shared_indices}, 0.05, false, {},
                                    DType::f32, 100, true),
              0U)
        << ranks << " ranks";
  }
}

TEST(reducer, a_warm_step_allocates_nothing_with_local_options_and_16_bits) {
  const FeedbackOptions all{.momentum_correction = 0.9F,
                            .nesterov_correction = true,
                            .local_clip = 1.0F,
                            .residual_decay = 0.9F};
  for (const int ranks : {1, 3}) {
    for (const ExchangeKind kind : kKinds) {
      for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
        EXPECT_EQ(allocations_when_warm(ranks, {.kind = kind}, 0.01, false, all, type), 0U)
            << name_of(kind) << " on " << ranks << " ranks";
      }
    }
  }
}

TEST(reducer, a_warm_step_allocates_nothing_with_rounded_values) {
  CodecOptions codec;
  codec.value = ValueCode::q4;
  codec.rounding = Rounding::stochastic;
  for (const ExchangeKind kind : kKinds) {
    EXPECT_EQ(allocations_when_warm(3, {.kind = kind, .codec = codec}, 0.01, false), 0U)
        << name_of(kind);
  }
}

// The sums that hosts exchange have more entries than k, and each step another number of them.
TEST(reducer, a_warm_step_allocates_nothing_between_hosts) {
  for (const ExchangeKind between : kKinds) {
    if (!row_of(between).nests) continue;
    for (const int ranks : {4, 5, 6}) {
      const ExchangeOptions exchange{.kind = ExchangeKind::hierarchical,
                                     .hierarchy = {.between = between}};
      EXPECT_EQ(allocations_when_warm(ranks, exchange, 0.01, false, {}, DType::f32, 2), 0U)
          << name_of(between) << " on " << ranks << " ranks";
    }
  }
}

// One float per parameter is what a layout costs; nothing if feedback is off.
TEST(reducer, memory_is_one_float_per_parameter) {
  const auto in_use = [] {
    const struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
  };
  if (in_use() == 0) GTEST_SKIP() << "the sanitizer's allocator does not tell what is in use";
  run_group(1, [&](Communicator& comm) {
    const std::size_t n = 1 << 22;
    struct Row {
      FeedbackOptions feedback;
      std::size_t arrays, floats;
    };
    const std::vector<Row> rows = {
        {{}, 1, n},
        {{.enabled = false}, 0, 0},
        {{.local_clip = 1.0F, .residual_decay = 0.5F}, 1, n},
        {{.momentum_correction = 0.9F}, 2, 2 * n},
        {{.momentum_correction = 0.9F, .nesterov_correction = true}, 3, 2 * n + n / 2}};
    for (const auto& [feedback, arrays, floats] : rows) {
      ReducerOptions o;
      o.feedback = feedback;
      Reducer reducer(o, {}, comm);
      const std::size_t before = in_use();
      reducer.set_layout(buckets({n / 2, n / 4, n / 4}));
      const std::size_t used = in_use() - before;
      const std::size_t huge_pages = std::size_t{4} << 20;  // an array begins and ends with one
      EXPECT_LT(used, floats * sizeof(float) + arrays * huge_pages + 20480);
      EXPECT_GE(used, floats * sizeof(float));
    }
  });
}

// ---- wrong use
// --------------------------------------------------------------------------------------

TEST(reducer, wrong_use_is_refused_and_changes_nothing) {
  for (const bool async : {false, true}) {
    run_group(2, [&](Communicator& comm) {
      Reducer reducer(options_of(ExchangeKind::allgather, 100), with_density(0.1), comm);
      reducer.set_layout(buckets({200, 300, 50}));
      Floats g = test::integers(200, static_cast<std::uint64_t>(comm.rank()));
      reduce(reducer, async, 0, std::span(g));
      const Floats residual = residual_of(reducer, 1);
      const std::uint64_t sent = comm.traffic().sent_bytes;
      Floats other = test::integers(300, 1), mean = other;

      reducer.raise_signal(4);
      const auto refused = [&](const char* why, Slot slot, GradView grad) {
        try {
          reduce(reducer, async, slot, grad);
          ADD_FAILURE() << "nothing was thrown; expected: " << why;
        } catch (const InvalidArgument& e) {
          EXPECT_NE(std::string(e.what()).find(why), std::string::npos) << e.what();
        }
        EXPECT_EQ(mean, other);
        EXPECT_EQ(residual_of(reducer, 1), residual);
        EXPECT_EQ(comm.traffic().sent_bytes, sent);
      };
      refused("slot 9 is not in the layout", 9, std::span(mean));
      refused("the gradient of slot 1 has 299 entries, its layout 300", 1,
              std::span(mean).first(299));
      refused("slot 0 was reduced in this step already", 0, std::span(g));
      for (const float scale : {0.0F, -1.0F, kNan, kInf, 1e-45F}) {
        GradView bad = std::span(mean);
        bad.scale = scale;
        refused("scale", 1, bad);
      }
      GradView odd = std::span(mean), gpu = odd, null;
      odd.dtype = static_cast<DType>(3);
      gpu.device = Device::other;
      null.n = 300;
      refused("must be f16 or bf16", 1, odd);
      refused("must be on the CPU", 1, gpu);
      refused("null", 1, null);

      std::ostringstream out;
      EXPECT_THROW(reducer.set_layout(buckets({200, 300, 50})), InvalidArgument);
      EXPECT_THROW(reducer.save(out), InvalidArgument);
      EXPECT_TRUE(out.str().empty()) << "nothing was written";
      EXPECT_THROW(load(reducer, {"x"}), InvalidArgument);
      EXPECT_THROW(reducer.load({}), InvalidArgument);
      EXPECT_THROW(reducer.set_total_steps(5), InvalidArgument);

      // The step goes on as if nothing had been; the signal was not lost either.
      const auto all = gather(comm, other);
      const StepReport report = reduce(reducer, async, 1, std::span(mean));
      EXPECT_EQ(report.group.signals, 4U);
      EXPECT_EQ(mean, test::dense(test::top_k(all[0], 30).view()));
      Floats small = test::integers(50, 1);
      EXPECT_TRUE(reduce(reducer, async, 2, std::span(small)).dense);
      EXPECT_TRUE(reducer.end_step(0.0));
      EXPECT_EQ(reducer.step(), 1U);
    });
  }
}

// A bucket that goes dense twice in a step would be delivered twice.
TEST(reducer, a_slot_is_reduced_once_a_step) {
  run_group(2, [&](Communicator& comm) {
    for (const double density : {0.1, 1.0}) {
      Reducer reducer(options_of(ExchangeKind::allgather), with_density(density), comm);
      reducer.set_layout(buckets({50}));
      for (int step = 0; step < 4; ++step) {
        Floats g = test::integers(50, 1);
        reducer.reduce(0, std::span(g));
        EXPECT_THROW(reducer.reduce(0, std::span(g)), InvalidArgument);
        if (step % 2 == 0) {
          EXPECT_TRUE(reducer.end_step(0.0));
        } else {
          reducer.rollback_step(0.0);
        }
      }
    }
  });
}

TEST(reducer, tickets_are_waited_for_once_and_before_the_end_of_the_step) {
  run_group(2, [&](Communicator& comm) {
    Reducer reducer(options_of(ExchangeKind::allgather), with_density(0.1), comm);
    reducer.set_layout(buckets({200, 300}));
    EXPECT_THROW(reducer.wait(1), InvalidArgument);
    Floats a = test::normal(200, 1), b = test::normal(300, 2);
    const BucketTicket first = reducer.start(0, std::span(a)),
                       second = reducer.start(1, std::span(b));
    EXPECT_NE(first, 0U);
    EXPECT_NE(second, 0U);
    EXPECT_NE(first, second);
    EXPECT_THROW(reducer.end_step(0.0), InvalidArgument);
    EXPECT_THROW(reducer.rollback_step(0.0), InvalidArgument);
    EXPECT_THROW(reducer.set_layout({}), InvalidArgument);
    EXPECT_EQ(reducer.wait(second).id.slot, 1U);
    EXPECT_THROW(reducer.wait(second), InvalidArgument) << "waited for already";
    EXPECT_THROW(reducer.wait(second + 7), InvalidArgument);
    EXPECT_THROW(reducer.end_step(0.0), InvalidArgument);
    EXPECT_EQ(reducer.wait(first).id.slot, 0U);
    EXPECT_THROW(reducer.wait(first), InvalidArgument);
    EXPECT_TRUE(reducer.end_step(0.0));
    EXPECT_EQ(reducer.step(), 1U);
  });
}

// What is started behind a mistake fails with it, so that no rank skips a bucket that its peers
// exchange; with the last ticket that is over.
TEST(reducer, what_is_started_behind_a_mistake_fails_with_it) {
  run_group(2, [&](Communicator& comm) {
    Reducer reducer(options_of(ExchangeKind::allgather), with_density(0.1), comm);
    reducer.set_layout(buckets({200, 300}));
    Floats a = test::normal(200, 1), b = test::normal(300, 2), short_one(7);
    const BucketTicket good = reducer.start(0, std::span(a));
    const BucketTicket bad = reducer.start(1, std::span(short_one));
    const BucketTicket behind = reducer.start(1, std::span(b));
    EXPECT_THROW(reducer.wait(behind), InvalidArgument);
    EXPECT_THROW(reducer.wait(bad), InvalidArgument);
    EXPECT_EQ(reducer.wait(good).n, 200U);
    EXPECT_EQ(reducer.wait(reducer.start(1, std::span(b))).n, 300U);
    EXPECT_TRUE(reducer.end_step(0.0));
  });
}

// Otherwise some ranks would go on from a state, and others not.
TEST(reducer, a_state_that_is_damaged_anywhere_is_refused_by_all_ranks) {
  for (const ExchangeKind kind : {ExchangeKind::oktopk, ExchangeKind::hierarchical}) {
    run_group(2, [&](Communicator& comm) {
      ReducerOptions options = options_of(kind);
      options.select.rule = SelectRule::sidco;
      ReducerParts parts;  // each part has a state
      parts.schedule = adaptive_density(
          {.budget = 1.0, .cost = [](double) { return 0.01; }, .density_min = 0.1});
      Reducer reducer(options, std::move(parts), comm);
      reducer.set_layout(buckets({40}));
      const auto step = [&] {
        Floats g = test::integers(40, seed_of(comm.rank(), reducer.step(), 0));
        reducer.reduce(0, std::span(g));
        EXPECT_TRUE(reducer.end_step(0.0));
      };
      step();
      const auto good = gather(comm, saved(reducer));
      step();
      const std::string before = saved(reducer);
      for (const std::size_t rank : {0U, 1U}) {
        auto states = good;
        std::string& bad = states[rank];
        for (std::size_t byte = 0; byte < good[rank].size(); ++byte) {
          bad[byte] = static_cast<char>(bad[byte] ^ 1);
          EXPECT_THROW(load(reducer, states), StateError) << "rank " << rank << ", byte " << byte;
          bad[byte] = good[rank][byte];
        }
        for (std::size_t length = 0; length < good[rank].size(); ++length) {
          bad = good[rank].substr(0, length);
          EXPECT_THROW(load(reducer, states), StateError) << "rank " << rank << " to " << length;
        }
      }
      EXPECT_EQ(saved(reducer), before);
      load(reducer, good);
      EXPECT_EQ(saved(reducer), good[static_cast<std::size_t>(comm.rank())]);
    });
  }
}

TEST(reducer, states_that_do_not_fit_are_refused) {
  run_group(2, [&](Communicator& comm) {
    ReducerOptions options = options_of(ExchangeKind::oktopk);
    options.select.rule = SelectRule::gaussian;
    ReducerParts parts;  // each part has a state
    parts.schedule =
        adaptive_density({.budget = 1.0, .cost = [](double) { return 0.01; }, .density_min = 0.1});
    Reducer reducer(options, std::move(parts), comm);
    reducer.set_layout(buckets({40}));
    const auto step = [&] {
      Floats g = test::integers(40, seed_of(comm.rank(), reducer.step(), 0));
      reducer.reduce(0, std::span(g));
      EXPECT_TRUE(reducer.end_step(0.0));
    };
    step();
    const auto early = gather(comm, saved(reducer));
    step();
    const auto late = gather(comm, saved(reducer));
    const auto why = [&](const std::vector<std::string>& states) {
      try {
        load(reducer, states);
      } catch (const StateError& e) {
        return std::string(e.what());
      }
      return std::string("nothing was thrown");
    };
    EXPECT_NE(why({late[0], early[1]})
                  .find("reducer state of rank 1: it is of step 1, rank 0's of "
                        "step 2"),
              std::string::npos);
    EXPECT_NE(why({early[0], "SKIMFISH" + std::string(100, ' ')}).find("does not start with"),
              std::string::npos);
    const std::string self = early[static_cast<std::size_t>(comm.rank())];
    for (std::size_t length = 0; length < self.size(); length += 3) {
      EXPECT_NE(why({self.substr(0, length), self.substr(0, length)}), "nothing was thrown");
      EXPECT_EQ(saved(reducer), late[static_cast<std::size_t>(comm.rank())])
          << "something has changed, after " << length << " bytes";
    }
    EXPECT_EQ(reducer.step(), 2U);
    EXPECT_EQ(why(early), "nothing was thrown");
    EXPECT_EQ(reducer.step(), 1U);
    EXPECT_EQ(saved(reducer).substr(0, 20), early[0].substr(0, 20));
  });
}

TEST(reducer, a_run_resumes_with_another_exchange_and_another_rule) {
  struct Kind {
    ExchangeOptions exchange;
    SelectRule rule;
  };
  std::vector<Kind> kinds;
  for (const ExchangeKind kind : kKinds) kinds.push_back({{.kind = kind}, SelectRule::exact});
  for (const SelectRule rule : {SelectRule::gaussian, SelectRule::sidco, SelectRule::dgc}) {
    kinds.push_back({{.kind = ExchangeKind::allgather}, rule});
  }
  kinds.push_back({{.kind = ExchangeKind::hierarchical}, SelectRule::exact});
  kinds.back().exchange.hierarchy.between = ExchangeKind::oktopk;
  run_group(2, [&](Communicator& comm) {
    const auto make = [&](const Kind& kind) {
      ReducerOptions o;
      o.exchange = kind.exchange;
      o.select.rule = kind.rule;
      auto reducer = std::make_unique<Reducer>(o, with_density(0.1), comm);
      reducer->set_layout(buckets({600}));
      return reducer;
    };
    const auto train = [&](Reducer& reducer) {
      Floats g = test::normal(600, seed_of(comm.rank(), reducer.step(), 0));
      reducer.reduce(0, std::span(g));
      EXPECT_TRUE(reducer.end_step(0.0));
      return g;
    };
    for (const Kind& before : kinds) {
      const auto first = make(before);
      train(*first);
      train(*first);
      const auto states = gather(comm, saved(*first));
      for (const Kind& after : kinds) {
        const auto second = make(after);
        load(*second, states);
        EXPECT_EQ(second->step(), 2U);
        const std::string names = std::string(name_of(before.exchange.kind)) + " to " +
                                  std::string(name_of(after.exchange.kind));
        EXPECT_TRUE(same_bits(second->residual(0), first->residual(0))) << names;
        train(*second);
      }
      const auto same = make(before);
      load(*same, states);
      EXPECT_TRUE(saved(*same) == saved(*first)) << name_of(before.exchange.kind);
    }
  });
}

// Ranks that were there before and new ones must go on alike.
TEST(reducer, after_a_state_of_another_group_nothing_depends_on_what_was_before) {
  run_group(2, [&](Communicator& comm) {
    ReducerOptions options = options_of(ExchangeKind::oktopk);
    options.select.rule = SelectRule::gaussian;
    const auto make = [&] {
      ReducerParts parts;
      parts.schedule = capture_density(0.5, 1e-3, 0.5);
      auto reducer = std::make_unique<Reducer>(options, std::move(parts), comm);
      reducer->set_layout(buckets({600}));
      return reducer;
    };
    const auto train = [&](Reducer& reducer, std::uint64_t steps) {
      for (std::uint64_t step = 0; step < steps; ++step) {
        Floats g = test::normal(600, seed_of(comm.rank(), reducer.step(), 0));
        reducer.reduce(0, std::span(g));
        reducer.end_step(0.0);
      }
    };
    const auto source = make();
    train(*source, 3);
    const std::string state = saved(*source);
    for (const bool takes_over : {false, true}) {
      const auto fresh = make(), used = make();
      train(*used, 20);
      for (Reducer* const reducer : {fresh.get(), used.get()}) {
        std::istringstream stream(state), again(state), third(state);
        if (takes_over) {
          const std::array<std::istream*, 1> in{&stream};
          reducer->take_over(in, 0.5F);
        } else {
          const std::array<std::istream*, 3> in{&stream, &again, &third};
          reducer->load(in);
        }
      }
      for (int step = 0; step < 3; ++step) {
        EXPECT_EQ(used->density().up, fresh->density().up);
        EXPECT_TRUE(saved(*used) == saved(*fresh)) << takes_over << ", after " << step << " steps";
        train(*used, 1);
        train(*fresh, 1);
      }
    }
  });
}

// A schedule that refuses is the last to be asked, so all else must go back.
TEST(reducer, what_the_schedule_refuses_changes_nothing) {
  run_group(2, [&](Communicator& comm) {
    const ReducerOptions options = options_of(ExchangeKind::param_server);
    const StepCost cost = max_step_bytes(options, 2, {60});
    const auto schedule = [&](double budget) {
      ReducerParts parts;
      parts.schedule = adaptive_density({.form = AdaptiveForm::even,
                                         .budget = budget,
                                         .cost = cost,
                                         .density_min = 0.02});
      return parts;
    };
    const auto train = [&](Reducer& reducer, std::uint64_t steps) {
      for (std::uint64_t step = 0; step < steps; ++step) {
        Floats g = test::integers(60, seed_of(comm.rank(), step, 0));
        reducer.reduce(0, std::span(g));
        reducer.end_step(0.0);
      }
    };
    Reducer rich(options, schedule(1e6), comm);
    rich.set_layout(buckets({60}));
    rich.set_total_steps(10);
    train(rich, 5);
    const auto states = gather(comm, saved(rich));

    Reducer poor(options, schedule(10.0 * cost(0.02)), comm);
    poor.set_layout(buckets({60}));
    EXPECT_THROW(poor.set_total_steps(11), InvalidArgument);
    EXPECT_EQ(poor.density().up, 0.02);
    poor.set_total_steps(10);
    train(poor, 2);
    const std::string before = saved(poor);
    const Floats kept = poor.residual(0);
    const double density = poor.density().up;
    std::istringstream one(states[0]);
    const std::array<std::istream*, 1> in{&one};
    EXPECT_THROW(poor.take_over(in, 1.0F), InvalidArgument);
    EXPECT_THROW(load(poor, states), InvalidArgument);
    EXPECT_THROW(load(poor, {states[0], states[0], states[0]}), InvalidArgument);
    EXPECT_THROW(poor.set_total_steps(1000), InvalidArgument);
    EXPECT_TRUE(saved(poor) == before);
    EXPECT_EQ(poor.residual(0), kept);
    EXPECT_EQ(poor.density().up, density);
    EXPECT_EQ(poor.step(), 2U);
    train(poor, 8);
    EXPECT_EQ(poor.step(), 10U);
  });
}

// At the end of its budget, so that not one more step would fit.
TEST(reducer, a_finished_run_loads_its_state) {
  run_group(2, [&](Communicator& comm) {
    const ReducerOptions options = options_of(ExchangeKind::allgather);
    const StepCost cost = max_step_bytes(options, 2, {60});
    const auto schedule = [&] {
      ReducerParts parts;
      parts.schedule = adaptive_density({.form = AdaptiveForm::even,
                                         .budget = 3.0 * cost(0.02),
                                         .cost = cost,
                                         .density_min = 0.02});
      return parts;
    };
    Reducer reducer(options, schedule(), comm), resumed(options, schedule(), comm);
    for (Reducer* each : {&reducer, &resumed}) {
      each->set_layout(buckets({60}));
      each->set_total_steps(3);
    }
    for (std::uint64_t step = 0; step < 3; ++step) {
      Floats g = test::integers(60, seed_of(comm.rank(), step, 0));
      reducer.reduce(0, std::span(g));
      reducer.end_step(0.0);
    }
    const auto states = gather(comm, saved(reducer));
    load(resumed, states);
    EXPECT_EQ(saved(resumed), saved(reducer));
    EXPECT_EQ(resumed.density().up, reducer.density().up);
  });
}

TEST(reducer, a_new_layout_between_steps_keeps_the_residuals) {
  run_group(2, [&](Communicator& comm) {
    Reducer reducer(options_of(ExchangeKind::allgather), with_density(0.1), comm);
    reducer.set_layout(buckets({30, 60}));
    for (Slot s = 0; s < 2; ++s) {
      Floats g = test::integers(s == 0 ? 30 : 60, seed_of(comm.rank(), 0, s));
      reducer.reduce(s, std::span(g));
    }
    EXPECT_TRUE(reducer.end_step(0.0));
    const Floats a = residual_of(reducer, 0), b = residual_of(reducer, 1);
    reducer.set_layout(std::vector<Bucket>{
        {8, {{"1.a", 0, 20}, {"1.b", 20, 40}, {"0.a", 60, 10}, {"0.b", 70, 20}}}});
    Floats both = b;
    both.insert(both.end(), a.begin(), a.end());
    EXPECT_EQ(residual_of(reducer, 8), both);
    Floats g(90, 0.0F);
    EXPECT_EQ(reducer.reduce(8, std::span(g)).n, 90U);
    EXPECT_THROW(reducer.reduce(0, std::span(g).first(30)), InvalidArgument);
  });
}

}  // namespace
}  // namespace skim
