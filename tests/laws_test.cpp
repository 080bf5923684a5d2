// The eight laws, on groups of 1, 2, 3, 4, 5 and 8 ranks in this process, and, as laws_mpi, on the
// ranks that mpirun started. Every rank has data of its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "exchange_oracle.hpp"
#include "group.hpp"
#include "half.hpp"
#include "oracle.hpp"
#include "parts.hpp"
#include "skim/error.hpp"
#include "skim/reducer.hpp"

namespace skim {
namespace {

using test::buckets;
using test::gather;
using test::group_sizes;
using test::kept_by;
using test::residual_of;
using test::run_group;
using test::same_bits;
using Floats = std::vector<float>;

std::uint64_t seed_of(int rank, std::uint64_t step, Slot slot) {
  return 1000003 * step + 1009 * slot + static_cast<std::uint64_t>(rank);
}

struct Kind {
  std::string name;
  ExchangeOptions options;
};
std::vector<Kind> kinds() {
  std::vector<Kind> all = {{"dense", {.kind = ExchangeKind::dense}}};
  for (const auto& o : test::sparse_exchanges()) all.push_back({test::name_of(o), o});
  return all;
}

// Every lossy value code; chance where it is coarsest, and where it is finest.
std::vector<CodecOptions> lossy_codecs() {
  std::vector<CodecOptions> all;
  const auto add = [&](ValueCode value, Rounding rounding) {
    CodecOptions& codec = all.emplace_back();
    codec.value = value;
    codec.rounding = rounding;
    codec.seed = 9;
  };
  for (std::size_t value = 1; value < names_of<ValueCode>().size(); ++value) {
    add(static_cast<ValueCode>(value), Rounding::nearest);
  }
  for (const ValueCode value : {ValueCode::f16, ValueCode::q4, ValueCode::q2}) {
    add(value, Rounding::stochastic);
  }
  return all;
}
std::string name_of(const CodecOptions& codec) {
  return std::string(name_of(codec.value)) + ' ' + std::string(name_of(codec.rounding));
}

void expect_different_on_every_rank(Communicator& comm, const Floats& mine) {
  const auto all = gather(comm, mine);
  for (std::size_t a = 0; a < all.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      EXPECT_NE(all[a], all[b]) << "ranks " << a << " and " << b << " have the same data";
    }
  }
}

// ---- 1: residual after + delivered = residual before + gradients --------------------------------

float rounded(float v, DType type) {
  if (type == DType::f32) return v;
  return type == DType::f16 ? from_f16(to_f16(v)) : from_bf16(to_bf16(v));
}

// What was delivered, from the mean that a rank got. Sums are whole numbers of 3 bits less than the
// type has, so that the sum is the only whole number whose mean, rounded twice or three times,
// this can be.
double delivered(float mean, int ranks, DType type) {
  const double sum = std::nearbyint(double{mean} * ranks);
  EXPECT_LT(std::fabs(sum), type == DType::f32   ? 0x1p21
                            : type == DType::f16 ? 0x1p9
                                                 : 0x1p6)
      << "too large for this test";
  const float factor = 1.0F / static_cast<float>(ranks);
  EXPECT_EQ(rounded(factor * static_cast<float>(sum), type), mean) << "no mean of whole numbers";
  return sum;
}

// g in the type's bits, and back.
struct Typed {
  Typed(Floats& g, DType t) : floats(g), type(t) {
    if (type == DType::f32) return;
    for (const float v : g) bits.push_back(type == DType::f16 ? to_f16(v) : to_bf16(v));
  }
  GradView view() {
    GradView grad = std::span(floats);
    grad.dtype = type;
    if (type != DType::f32) grad.data = bits.data();
    return grad;
  }
  void read() {
    for (std::size_t i = 0; i < bits.size(); ++i) floats[i] = test::meaning(bits[i], type);
  }
  Floats& floats;
  DType type;
  std::vector<std::uint16_t> bits;
};

struct Imbalance {
  double largest = 0.0;  // of one entry, over all steps
  std::size_t entries = 0, steps = 0, dense_steps = 0, dense_buckets = 0, rolled_back = 0;
};

// Steps on whole numbers, with all that may come between: unequal and empty selections, a rank
// without a gradient, steps rolled back, densities 1 in between, a bucket that always goes dense.
// Rank 0 returns how far the two sides of the law are apart. Under a sanitizer, which looks at the
// course of a step and not at its numbers, half as many: 20 still have each of these twice.
constexpr std::uint64_t kSteps = test::kSanitized ? 20 : 40;
constexpr std::size_t kRolledBack = test::kSanitized ? 5 : 9;
constexpr std::size_t kDenseSteps = kSteps / 5;

Imbalance imbalance(Communicator& comm, const ExchangeOptions& options, bool correlated,
                    DType type = DType::f32, const std::optional<ChooserOptions>& chooser = {}) {
  // 16 bits hold small sums only.
  const int limit = type == DType::f32 ? 400 : type == DType::f16 ? 3 : 1;
  const std::vector<std::size_t> sizes = {40, 300, 999};
  const int ranks = comm.size(), rank = comm.rank();
  ReducerOptions o;
  o.exchange = options;
  o.chooser = chooser;
  o.dense_below = 64;
  ReducerParts parts;
  parts.schedule = std::make_unique<test::ScheduleBy>([](const Progress& p) {
    const bool dense = p.step % 10 == 3 || p.step % 10 == 4;
    return Density{.up = dense ? 1.0 : (p.step % 4 == 0 ? 0.2 : 0.02)};
  });
  parts.selector = std::make_unique<test::CountBy>([rank](const SelectTask& t) -> std::size_t {
    const std::uint64_t choice = (static_cast<std::uint64_t>(rank) + t.id.step) % 5;
    if (choice == 0) return 0;
    if (choice == 1) return std::min(t.grad.n, 3 * t.keep.k);
    return choice == 2 ? t.keep.k / 2 : t.keep.k;
  });
  Reducer reducer(o, std::move(parts), comm);
  reducer.set_layout(buckets(sizes));

  Imbalance result;
  std::vector<Floats> before;
  for (Slot s = 0; s < sizes.size(); ++s) before.emplace_back(sizes[s], 0.0F);
  for (std::uint64_t step = 0; step < kSteps; ++step) {
    std::vector<Floats> grads, means;
    std::size_t dense = 0;
    for (Slot s = 0; s < sizes.size(); ++s) {
      Floats g = test::integers(sizes[s], seed_of(rank, step, s), limit);
      if (correlated) {
        const Floats common = test::integers(sizes[s], 7 + s, 2 * limit);
        for (std::size_t i = 0; i < g.size(); ++i) g[i] += common[i];
      }
      if (step % 3 == 1 && rank == static_cast<int>(step / 3) % ranks) {
        g.assign(g.size(), 0.0F);
      }
      if (step == 0) expect_different_on_every_rank(comm, g);
      grads.push_back(g);
      Typed typed(g, type);
      dense += reducer.reduce(s, typed.view()).dense ? 1U : 0U;
      typed.read();
      means.push_back(g);
    }
    const bool roll_back = step % 7 == 5 || step % 10 == 4;  // sparse steps and dense ones
    if (roll_back) {
      reducer.rollback_step(0.0);
    } else {
      EXPECT_TRUE(reducer.end_step(0.0));
    }
    ++result.steps;
    result.dense_buckets += dense;
    result.dense_steps += dense == sizes.size() ? 1U : 0U;
    result.rolled_back += roll_back ? 1U : 0U;

    Floats given;  // by this rank, bucket after bucket: exact, as all are whole numbers
    for (Slot s = 0; s < sizes.size(); ++s) {
      const Floats after = kept_by(reducer, s);
      Floats whole = before[s];
      for (std::size_t i = 0; i < whole.size(); ++i) whole[i] += grads[s][i];
      if (roll_back) {  // the residual then holds this rank's gradient, and nothing was delivered
        EXPECT_EQ(after, whole) << "rank " << rank << " step " << step;
      }
      for (std::size_t i = 0; i < whole.size(); ++i) given.push_back(whole[i] - after[i]);
      before[s] = after;
    }
    const auto all_given = gather(comm, given);
    for (std::size_t s = 0, at = 0; rank == 0 && s < sizes.size(); ++s) {
      for (std::size_t i = 0; i < sizes[s]; ++i, ++at) {
        double left = 0.0;
        for (const Floats& g : all_given) left += double{g[at]};
        const double right = roll_back ? 0.0 : delivered(means[s][i], ranks, type);
        result.largest = std::max(result.largest, std::fabs(left - right));
        ++result.entries;
      }
    }
  }
  return result;
}

TEST(laws, conservation) {
  for (const int ranks : group_sizes()) {
    for (const Kind& kind : kinds()) {
      if (kind.options.drop == DropPolicy::sender_keeps) continue;  // has a test of its own
      for (const bool correlated : {false, true}) {
        run_group(ranks, [&](Communicator& comm) {
          SCOPED_TRACE(kind.name + " on " + std::to_string(ranks) + " ranks");
          const Imbalance found = imbalance(comm, kind.options, correlated);
          if (comm.rank() != 0) return;
          EXPECT_EQ(found.largest, 0.0);
          EXPECT_EQ(found.entries, kSteps * 1339U);
          EXPECT_EQ(found.rolled_back, kRolledBack);
          EXPECT_EQ(found.dense_steps, kind.name == "dense" ? kSteps : kDenseSteps);
        });
      }
    }
  }
}

// Whatever it changes to and from: dense where a fifth is kept, sparse where a fiftieth is; and
// with trials, among all, whatever the clocks of this machine say.
TEST(laws, conservation_where_auto_changes_its_choice) {
  for (const int ranks : group_sizes()) {
    for (const bool trials : {false, true}) {
      run_group(ranks, [&](Communicator& comm) {
        SCOPED_TRACE(std::to_string(ranks) + " ranks");
        ChooserOptions chooser{
            .link = Link{0.0, 1e-9},
            .local_speeds = {.select_s = 1e-9 * (8.0 * (ranks - 1) / ranks - 0.45 * ranks)},
            .trial_share = 1.0};
        if (ranks == 1) chooser.local_speeds = {};
        if (!trials) {
          chooser.among = {ExchangeKind::dense, ExchangeKind::allgather};
          chooser.trial_share = 0.0;
        }
        const Imbalance found = imbalance(comm, {}, true, DType::f32, chooser);
        if (comm.rank() != 0) return;
        EXPECT_EQ(found.largest, 0.0);
        if (ranks == 1 || trials) return;
        const std::size_t always =
            kSteps + kDenseSteps * 2;  // the short bucket, and the steps of density 1
        EXPECT_GT(found.dense_buckets, always);
        EXPECT_LT(found.dense_buckets, 3 * kSteps);
      });
    }
  }
}

// Residuals and sums are float32 for 16-bit gradients too; only the mean is rounded.
TEST(laws, conservation_with_16_bit_gradients) {
  for (const int ranks : group_sizes()) {
    for (const Kind& kind : kinds()) {
      if (kind.options.drop == DropPolicy::sender_keeps) continue;
      for (const DType type : {DType::f16, DType::bf16}) {
        run_group(ranks, [&](Communicator& comm) {
          SCOPED_TRACE(kind.name + " on " + std::to_string(ranks) + " ranks");
          const Imbalance found = imbalance(comm, kind.options, false, type);
          if (comm.rank() != 0) return;
          EXPECT_EQ(found.largest, 0.0);
          EXPECT_EQ(found.entries, kSteps * 1339U);
        });
      }
    }
  }
}

// The law in double, on real numbers, for values that are rounded where they are selected and where
// sums are sent on. Floats are added, a few times a rank, to something like 2^-24 of the largest
// sum; a rounding error that were lost, or counted twice, would be 2^-11 of a value (f16) to a
// third.
TEST(laws, conservation_at_every_value_code) {
  constexpr double kTolerance = 0x1p-18;  // of the largest accumulated magnitude times P
  constexpr std::size_t kSize = 900;
  for (const int ranks : group_sizes()) {
    for (ExchangeOptions options : test::sparse_exchanges()) {
      if (options.drop == DropPolicy::sender_keeps && ranks > 2) continue;
      for (const CodecOptions& codec : lossy_codecs()) {
        options.codec = codec;
        run_group(ranks, [&](Communicator& comm) {
          SCOPED_TRACE(test::name_of(options) + ", " + name_of(codec) + ", on " +
                       std::to_string(ranks) + " ranks");
          ReducerOptions o;
          o.exchange = options;
          o.dense_below = 0;
          ReducerParts parts;
          parts.schedule = listed_density({0.1, 0.02}, 0.2);
          Reducer reducer(o, std::move(parts), comm);
          reducer.set_layout(buckets({kSize}));
          Floats before(kSize, 0.0F);
          for (std::uint64_t step = 0; step < 6; ++step) {
            Floats g = test::normal(kSize, step);
            const Floats own = test::normal(kSize, seed_of(comm.rank(), step, 0));
            for (std::size_t i = 0; i < kSize; ++i) g[i] = g[i] * g[i] * g[i] + own[i];
            const auto all_before = gather(comm, before), all_grads = gather(comm, g);
            const StepReport report = reducer.reduce(0, std::span(g));
            EXPECT_TRUE(reducer.end_step(static_cast<double>(step + 1) / 2.0));
            before = kept_by(reducer, 0);
            const auto all_after = gather(comm, before);
            if (comm.rank() != 0) continue;
            double worst = 0.0, largest = 0.0, norm2 = 0.0;
            for (std::size_t i = 0; i < kSize; ++i) {
              double left = 0.0, right = double{g[i]} * ranks;
              for (std::size_t r = 0; r < all_before.size(); ++r) {
                const double accumulated = double{all_before[r][i]} + double{all_grads[r][i]};
                largest = std::max(largest, std::fabs(accumulated));
                left += accumulated;
                right += double{all_after[r][i]};
              }
              worst = std::max(worst, std::fabs(left - right));
            }
            for (const float r : residual_of(reducer, 0)) norm2 += double{r} * double{r};
            EXPECT_LE(worst, kTolerance * largest * ranks) << "step " << step;
            EXPECT_NEAR(report.residual_norm, std::sqrt(norm2), 1e-5 * std::sqrt(norm2));
          }
        });
      }
    }
  }
}

// The rule as published: an index that survives on one branch and is dropped on another loses what
// was dropped. With one merge there is no other branch.
TEST(laws, conservation_fails_for_sender_keeps_from_three_ranks_on) {
  for (const int ranks : group_sizes()) {
    run_group(ranks, [&](Communicator& comm) {
      const Imbalance found =
          imbalance(comm, {.kind = ExchangeKind::gtopk, .drop = DropPolicy::sender_keeps}, true);
      if (comm.rank() != 0) return;
      if (ranks <= 2) {
        EXPECT_EQ(found.largest, 0.0) << ranks << " ranks";
      } else {
        EXPECT_GE(found.largest, 1.0) << ranks << " ranks";
      }
    });
  }
}

// ---- 2: bitwise equal on every rank
// ---------------------------------------------------------------

TEST(laws, agreement) {
  struct Case {
    Kind kind;
    DType type;
    FeedbackOptions feedback;
  };
  std::vector<Case> cases;
  for (const Kind& kind : kinds()) {
    cases.push_back({kind, DType::f32, {}});
    for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
      cases.push_back({kind,
                       type,
                       {.momentum_correction = 0.9F,
                        .nesterov_correction = true,
                        .local_clip = 1e20F,
                        .residual_decay = 0.9F}});
    }
  }
  for (Kind kind : kinds()) {
    if (kind.options.kind == ExchangeKind::dense) continue;
    const std::vector<CodecOptions> codecs = lossy_codecs();
    for (std::size_t c = 0; c < codecs.size(); c += 2) {  // every other one will do here
      const CodecOptions& codec = codecs[c];
      kind.options.codec = codec;
      cases.push_back({{kind.name + ", " + name_of(codec), kind.options}, DType::f32, {}});
    }
  }
  for (const int ranks : group_sizes()) {
    for (const auto& [kind, type, feedback] : cases) {
      run_group(ranks, [&](Communicator& comm) {
        SCOPED_TRACE(kind.name + " on " + std::to_string(ranks) + " ranks");
        ReducerOptions o;
        o.exchange = kind.options;
        o.dense_below = 64;
        o.feedback = feedback;
        ReducerParts parts;
        parts.schedule = listed_density({0.05, 1.0, 0.3}, 0.02);
        Reducer reducer(o, std::move(parts), comm);
        const std::vector<std::size_t> sizes = {33, 777};
        reducer.set_layout(buckets(sizes));
        for (std::uint64_t step = 0; step < (test::kSanitized ? 5U : 8U); ++step) {
          Floats both;
          for (Slot s = 0; s < sizes.size(); ++s) {
            Floats g = test::normal(sizes[s], seed_of(comm.rank(), step, s));
            // Denormals and huge values among them.
            for (std::size_t i = 0; i < g.size(); i += 5) {
              g[i] = std::ldexp(g[i], static_cast<int>(i % 240) - 140);
            }
            if (step == 0) expect_different_on_every_rank(comm, g);
            Typed typed(g, type);
            const StepReport report = reducer.reduce(s, typed.view());
            typed.read();
            both.insert(both.end(), g.begin(), g.end());
            // What ranks must agree on beside the mean.
            const Floats told = {static_cast<float>(report.group.gradient_norm2),
                                 static_cast<float>(report.group.accumulated_norm2),
                                 static_cast<float>(report.group.sent_norm2),
                                 static_cast<float>(report.group.sent_bytes),
                                 static_cast<float>(report.sum_entries),
                                 report.dense ? 1.0F : 0.0F};
            both.insert(both.end(), told.begin(), told.end());
          }
          EXPECT_TRUE(reducer.end_step(static_cast<double>(step + 1) / 2.0));
          const auto all = gather(comm, both);
          for (std::size_t r = 0; r < all.size(); ++r) {
            EXPECT_TRUE(same_bits(all[r], both))
                << "step " << step << ", ranks " << r << " and " << comm.rank();
          }
        }
      });
    }
  }
}

// ---- 3: oracles
// -------------------------------------------------------------------------------------

// With k = n, everything that is sparse is the dense sum; and so is the dense path.
TEST(laws, oracle_with_everything_kept) {
  const std::size_t n = 500;
  for (const int ranks : group_sizes()) {
    for (const Kind& kind : kinds()) {
      for (const double density : {1.0 - 1e-12, 1.0}) {
        run_group(ranks, [&](Communicator& comm) {
          SCOPED_TRACE(kind.name + " on " + std::to_string(ranks) + " ranks");
          ReducerOptions o;
          o.exchange = kind.options;
          o.dense_below = 0;
          ReducerParts parts;
          parts.schedule = constant_density(density);
          Reducer reducer(o, std::move(parts), comm);
          reducer.set_layout(buckets({n}));
          Floats expected(n, 0.0F);
          for (int r = 0; r < ranks; ++r) {
            const Floats g = test::integers(n, seed_of(r, 0, 0));
            for (std::size_t i = 0; i < n; ++i) expected[i] += g[i];
          }
          for (float& v : expected) v *= 1.0F / static_cast<float>(ranks);
          Floats g = test::integers(n, seed_of(comm.rank(), 0, 0));
          const StepReport report = reducer.reduce(0, std::span(g));
          EXPECT_EQ(report.dense, density == 1.0 || kind.name == "dense");
          EXPECT_EQ(report.k, n);
          EXPECT_EQ(g, expected);
          EXPECT_TRUE(reducer.end_step(0.0));
          EXPECT_EQ(kept_by(reducer, 0), Floats(n, 0.0F));
        });
      }
    }
  }
}

// All-gather is the sum in rank order, gTop-k the recursive merge, both bit by bit on real values.
TEST(laws, oracle_of_each_exchange) {
  const std::size_t n = 400, k = 20;
  for (const int ranks : group_sizes()) {
    for (const ExchangeOptions& options : test::sparse_exchanges()) {
      std::vector<SparseBuffer> selected;
      for (int r = 0; r < ranks; ++r) {
        Floats x = test::normal(n, 5);
        const Floats own = test::normal(n, seed_of(r, 0, 0));
        for (std::size_t i = 0; i < n; ++i) x[i] += own[i];
        selected.push_back(test::top_k(x, k));
      }
      std::vector<SparseView> views;
      for (const auto& s : selected) views.push_back(s.view());
      const test::ExchangeOutcome expected = test::ExchangeOracle(options).run(views, k);
      run_group(ranks, [&](Communicator& comm) {
        const auto me = static_cast<std::size_t>(comm.rank());
        GroupStats stats;
        const auto exchange = make_exchange(options);
        const ExchangeResult got = exchange->run({}, views[me], {.k = k}, stats, comm);
        EXPECT_EQ(!got.dense_sum.empty(), expected.dense);
        if (expected.dense) return;  // its bits: exchange_test
        EXPECT_TRUE(test::same(got.sum, expected.sum.view())) << test::name_of(options);
      });
    }
  }
}

// ---- 4, 5, 6: one each; the bulk is in codec_test and select_test
// ---------------------------------

TEST(laws, round_trip) {
  std::vector<CodecOptions> codecs = lossy_codecs();
  codecs.emplace_back();
  for (std::uint64_t seed = 0; seed < 50 * codecs.size(); ++seed) {
    const Codec codec(codecs[seed % codecs.size()]);
    SparseBuffer s = test::top_k(test::normal(300, seed), seed % 50 * 6);
    codec.quantize(s, {seed, 0}, 0);
    SparseBuffer again;
    again.assign(s.view());
    codec.quantize(again, {seed, 0}, 0);
    EXPECT_TRUE(test::same(again.view(), s.view())) << "quantize twice is quantize once";
    std::vector<std::byte> frame;
    EXPECT_LE(codec.encode(s.view(), nullptr, frame), codec.max_encoded_bytes(s.nnz(), 300));
    SparseBuffer out;
    EXPECT_EQ(codec.decode(frame, 300, out, nullptr).error, DecodeError::none);
    EXPECT_TRUE(test::same(out.view(), s.view()));
  }
}

TEST(laws, selection_and_contraction) {
  const std::size_t n = 1000;
  const auto select = [&](Floats g, std::size_t k) {
    SparseBuffer out;
    Floats residual(n, 0.0F);
    make_selector({})->select({.id = {},
                               .grad = std::span(g),
                               .residual = std::span(residual),
                               .layout = {},
                               .keep = {.k = k}},
                              out);
    return out;
  };
  for (const std::size_t k : {1U, 10U, 500U, 1000U}) {
    const Floats x = test::normal(n, k);
    const SparseBuffer kept = select(x, k);
    EXPECT_TRUE(test::same(kept.view(), test::top_k(x, k).view()));

    // |x - top_k(x)|^2 <= (1 - k/n) |x|^2
    double all = 0.0, rest = 0.0;
    for (const float v : x) all += double{v} * double{v};
    rest = all;
    for (const float v : kept.view().value) rest -= double{v} * double{v};
    EXPECT_LE(rest, (1.0 - static_cast<double>(k) / static_cast<double>(n)) * all + 1e-9 * all);

    // A permutation of distinct magnitudes permutes the selection.
    std::vector<Index> to(n);
    std::iota(to.begin(), to.end(), Index{0});
    std::shuffle(to.begin(), to.end(), std::mt19937_64(k));
    Floats moved(n);
    for (std::size_t i = 0; i < n; ++i) moved[to[i]] = x[i];
    Floats expected(n, 0.0F);
    for (std::size_t e = 0; e < kept.nnz(); ++e) {
      expected[to[kept.view().index[e]]] = kept.view().value[e];
    }
    EXPECT_EQ(test::dense(select(moved, k).view()), expected);
  }
}

// ---- 7: rounds and bytes are the oracle's
// -----------------------------------------------------------

// On disjoint selections of k entries. The Reducer adds nothing to what the exchange sends.
TEST(laws, traffic) {
  const std::size_t n = 1003, k = 7;
  for (const int ranks : group_sizes()) {
    const auto p = static_cast<std::size_t>(ranks);
    std::vector<SparseBuffer> selections(p);
    std::vector<SparseView> views;
    std::vector<Floats> gradients;
    for (std::size_t r = 0; r < p; ++r) {
      selections[r].reset(n);
      for (std::size_t e = 0; e < k; ++e) {
        selections[r].append(static_cast<Index>(r + e * p), static_cast<float>(1 + r + e));
      }
      views.push_back(selections[r].view());
      gradients.push_back(test::dense(views[r]));
    }
    for (const Kind& kind : kinds()) {
      std::vector<Traffic> expected;
      std::vector<SparseBuffer> shared;
      if (kind.options.kind == ExchangeKind::dense) {
        for (std::size_t r = 0; r < p; ++r) expected.push_back(test::ring_traffic(n, r, p));
      } else {
        std::vector<SparseView> sent = views;
        if (kind.options.kind == ExchangeKind::shared_indices && ranks > 1) {
          shared = test::at_shared_indices(gradients, k);
          std::ranges::transform(shared, sent.begin(), &SparseBuffer::view);
        }
        expected = test::ExchangeOracle(kind.options).run(sent, k).traffic;
      }
      run_group(ranks, [&](Communicator& comm) {
        SCOPED_TRACE(kind.name + " on " + std::to_string(ranks) + " ranks");
        const auto r = static_cast<std::size_t>(comm.rank());
        ReducerOptions o;
        o.exchange = kind.options;
        o.exchange.codec.index = IndexCode::raw32;  // the one whose bytes follow from k alone
        o.dense_below = 0;
        ReducerParts parts;
        parts.schedule = constant_density(static_cast<double>(k) / static_cast<double>(n));
        Reducer reducer(o, std::move(parts), comm);
        reducer.set_layout(buckets({n}));
        Floats g(n, 0.0F);
        for (std::size_t e = 0; e < k; ++e) g[views[r].index[e]] = views[r].value[e];
        const Traffic before = comm.traffic();
        const StepReport report = reducer.reduce(0, std::span(g));
        EXPECT_EQ(report.sent_bytes, expected[r].sent_bytes);
        EXPECT_EQ(report.received_bytes, expected[r].received_bytes);
        EXPECT_EQ(report.rounds, expected[r].rounds);
        EXPECT_EQ(comm.traffic().messages - before.messages, expected[r].messages);
        EXPECT_EQ(comm.traffic().sent_bytes - before.sent_bytes, expected[r].sent_bytes);
      });
    }
  }
}

// ---- 8: a stopped run continues as if it had not stopped
// --------------------------------------------

std::string saved(const Reducer& reducer) {
  std::ostringstream out;
  reducer.save(out);
  return out.str();
}
LoadReport load(Reducer& reducer, const std::vector<std::string>& states, bool strict = true) {
  std::vector<std::istringstream> streams;
  for (const auto& s : states) streams.emplace_back(s);
  std::vector<std::istream*> in;
  for (auto& s : streams) in.push_back(&s);
  return reducer.load(in, strict);
}

struct History {
  std::vector<Floats> means;  // of every bucket of every step
  std::vector<Floats> residuals;
  std::vector<StepReport> reports;
};

class Training {
 public:
  Training(Communicator& comm, const ExchangeOptions& exchange,
           const std::vector<std::size_t>& sizes)
      : comm_(comm), sizes_(sizes), reducer_(options(exchange), parts(), comm) {
    reducer_.set_layout(buckets(sizes));
  }
  void run(std::uint64_t first, std::uint64_t last, History& into) {
    for (std::uint64_t step = first; step < last; ++step) {
      EXPECT_EQ(reducer_.step(), step);
      for (Slot s = 0; s < sizes_.size(); ++s) {
        Floats g = test::normal(sizes_[s], seed_of(comm_.rank(), step, s));
        into.reports.push_back(reducer_.reduce(s, std::span(g)));
        into.means.push_back(g);
      }
      EXPECT_TRUE(reducer_.end_step(static_cast<double>(step + 1) / 3.0));
    }
    into.residuals.clear();
    for (Slot s = 0; s < sizes_.size(); ++s) into.residuals.push_back(kept_by(reducer_, s));
  }
  std::string save() const { return saved(reducer_); }
  void load(const std::vector<std::string>& states) { skim::load(reducer_, states); }
  Reducer& reducer() { return reducer_; }

 private:
  static ReducerOptions options(const ExchangeOptions& exchange) {
    ReducerOptions o;
    o.exchange = exchange;
    o.dense_below = 64;
    return o;
  }
  // Depends on all that Progress holds: if any of it were not saved, k would differ.
  static ReducerParts parts() {
    ReducerParts p;
    p.schedule = std::make_unique<test::ScheduleBy>([](const Progress& at) {
      if (at.step % 6 == 4) return Density{.up = 1.0};
      const double norms =
          at.last.gradient_norm2 + 2.0 * at.last.accumulated_norm2 + 3.0 * at.last.sent_norm2;
      const double mixed = norms + at.epoch + static_cast<double>(at.last.sent_bytes);
      return Density{.up = 0.01 + 0.1 * (mixed / 50.0 - std::floor(mixed / 50.0))};
    });
    return p;
  }
  Communicator& comm_;
  std::vector<std::size_t> sizes_;
  Reducer reducer_;
};

TEST(laws, resume) {
  std::vector<Kind> all = kinds();
  CodecOptions by_chance;
  by_chance.value = ValueCode::q2;
  by_chance.rounding = Rounding::stochastic;
  all.push_back({"gtopk, q2", {.kind = ExchangeKind::gtopk, .codec = by_chance}});
  for (const int ranks : group_sizes()) {
    for (const Kind& kind : all) {
      run_group(ranks, [&](Communicator& comm) {
        SCOPED_TRACE(kind.name + " on " + std::to_string(ranks) + " ranks");
        const std::vector<std::size_t> sizes = {50, 400, 700};
        History whole, parted;
        Training(comm, kind.options, sizes).run(0, 14, whole);

        std::vector<std::string> states;
        {
          Training before(comm, kind.options, sizes);
          before.run(0, 8, parted);
          states = gather(comm, before.save());
        }
        Training after(comm, kind.options, sizes);
        after.load(states);
        EXPECT_EQ(after.save(), states[static_cast<std::size_t>(comm.rank())]);
        after.run(8, 14, parted);

        EXPECT_EQ(whole.means, parted.means);
        EXPECT_EQ(whole.residuals, parted.residuals);
        for (std::size_t i = 0; i < whole.reports.size(); ++i) {
          const StepReport &a = whole.reports[i], &b = parted.reports[i];
          EXPECT_EQ(a.id.step, b.id.step);
          EXPECT_EQ(a.k, b.k) << "report " << i;
          EXPECT_EQ(a.sent_bytes, b.sent_bytes);
          EXPECT_EQ(a.threshold, b.threshold);
          EXPECT_EQ(a.capture, b.capture);
          EXPECT_EQ(a.residual_norm, b.residual_norm);
          EXPECT_EQ(a.group.accumulated_norm2, b.group.accumulated_norm2);
          EXPECT_EQ(a.group.sent_bytes, b.group.sent_bytes);
        }
      });
    }
  }
}

// A model whose head was replaced. The other parameters keep their mass bit for bit, also what a
// server held, and no mass is lost in the steps after that. Both slots had other lengths before.
TEST(laws, resume_with_other_parameters) {
  for (const int ranks : group_sizes()) {
    for (const Kind& kind : kinds()) {
      if (kind.options.drop == DropPolicy::sender_keeps) continue;  // loses mass in every step
      run_group(ranks, [&](Communicator& comm) {
        SCOPED_TRACE(kind.name + " on " + std::to_string(ranks) + " ranks");
        const auto make = [&](const std::vector<Bucket>& layout) {
          ReducerParts parts;
          parts.schedule = constant_density(0.05);
          auto reducer = std::make_unique<Reducer>(
              ReducerOptions{.exchange = kind.options, .dense_below = 64}, std::move(parts), comm);
          reducer->set_layout(layout);
          return reducer;
        };
        const auto kept = [](Reducer& reducer) {
          return std::array{kept_by(reducer, 0), kept_by(reducer, 1)};
        };
        const auto steps = [&](Reducer& reducer, int count) {
          for (; count > 0; --count) {
            const auto had = kept(reducer);
            std::array<Floats, 2> grads, means;
            for (Slot s = 0; s < 2; ++s) {
              grads[s] = test::integers(had[s].size(), seed_of(comm.rank(), reducer.step(), s));
              means[s] = grads[s];
              reducer.reduce(s, std::span(means[s]));
            }
            EXPECT_TRUE(reducer.end_step(0.0));
            const auto has = kept(reducer);
            for (Slot s = 0; s < 2; ++s) {
              Floats given = grads[s];
              for (std::size_t i = 0; i < given.size(); ++i) given[i] += had[s][i] - has[s][i];
              const auto of_all = gather(comm, given);
              for (std::size_t i = 0; i < given.size(); ++i) {
                double sum = 0.0;
                for (const Floats& of_rank : of_all) sum += double{of_rank[i]};
                EXPECT_EQ(sum, delivered(means[s][i], ranks, DType::f32));
              }
            }
          }
        };
        const auto before = make(buckets({150, 400}));
        steps(*before, 4);
        const auto old = kept(*before);
        const auto states = gather(comm, saved(*before));

        const auto after =
            make({{0, {{"new", 0, 300}}}, {1, {{"0.b", 0, 100}, {"0.a", 100, 50}}}});
        const std::string fresh = saved(*after);
        EXPECT_THROW(load(*after, states), StateError);
        EXPECT_EQ(saved(*after), fresh) << "a state that is refused changes nothing";

        const LoadReport report = load(*after, states, false);
        EXPECT_EQ(after->step(), 4U);
        EXPECT_EQ(report.missing, std::vector<std::string>{"new"});
        ASSERT_EQ(report.unexpected.size(), 2U);
        // The norm counts held mass as entries of their own.
        const bool holds = !before->held(1).mass.empty();
        for (const auto& [name, part] : {std::pair("1.a", std::span(old[1]).first(133)),
                                         std::pair("1.b", std::span(old[1]).subspan(133))}) {
          double norm2 = 0.0;
          for (const float v : part) norm2 += double{v} * double{v};
          if (!holds) {
            EXPECT_DOUBLE_EQ(report.unexpected.at(name), std::sqrt(norm2));
          }
        }
        Floats moved = old[0];
        std::ranges::rotate(moved, moved.begin() + 50);
        EXPECT_EQ(kept(*after), (std::array{Floats(300, 0.0F), moved}));
        steps(*after, 3);
      });
    }
  }
}

// An exchange that keeps nothing, and those that do.
std::vector<ExchangeOptions> residual_keepers() {
  return {{},
          {.kind = ExchangeKind::param_server},
          {.kind = ExchangeKind::param_server, .server = {.placement = ServerPlacement::sharded}}};
}

// Residuals of another number of ranks become (1/P) times their sum, here of P + 1 and 2P ranks; in
// other buckets, too. What a server held is a part of it.
TEST(laws, resume_on_another_number_of_ranks) {
  for (const ExchangeOptions& exchange : residual_keepers()) {
    for (const int ranks : group_sizes()) {
      run_group(ranks, [&](Communicator& comm) {
        SCOPED_TRACE(test::name_of(exchange) + " on " + std::to_string(ranks) + " ranks");
        const std::vector<std::size_t> sizes = {50, 400};
        History run;
        Training before(comm, exchange, sizes);
        before.run(0, 4, run);
        const auto states = gather(comm, before.save());
        const auto small = gather(comm, run.residuals[0]), large = gather(comm, run.residuals[1]);
        for (const int extra : {1, ranks}) {
          std::vector<std::string> old = states;
          std::vector<std::size_t> of;  // the rank that wrote old[i]
          for (std::size_t r = 0; r < states.size(); ++r) of.push_back(r);
          for (std::size_t e = 0; e < static_cast<std::size_t>(extra); ++e) {
            old.push_back(states[e]);
            of.push_back(e);
          }
          Reducer after({}, {}, comm);
          const std::size_t third = 400 / 3, sixteen = 50 / 3;
          // 1.b, then both of slot 0; and 1.a.
          after.set_layout(std::vector<Bucket>{{3,
                                                {{"1.b", 0, 400 - third},
                                                 {"0.a", 400 - third, sixteen},
                                                 {"0.b", 400 - third + sixteen, 50 - sixteen}}},
                                               {1, {{"1.a", 0, third}}}});
          load(after, old);
          EXPECT_EQ(after.step(), 4U);

          const auto mean_of = [&](const std::vector<Floats>& all, std::size_t i) {
            double sum = 0.0;
            for (const std::size_t r : of) sum += double{all[r][i]};
            return sum / static_cast<double>(of.size());
          };
          const Floats mixed = kept_by(after, 3), rest = kept_by(after, 1);
          double worst = 0.0;
          for (std::size_t i = 0; i < 400 - third; ++i) {
            worst = std::max(worst, std::fabs(mixed[i] - mean_of(large, third + i)));
          }
          for (std::size_t i = 0; i < 50; ++i) {
            worst = std::max(worst, std::fabs(mixed[400 - third + i] - mean_of(small, i)));
          }
          for (std::size_t i = 0; i < third; ++i) {
            worst = std::max(worst, std::fabs(rest[i] - mean_of(large, i)));
          }
          EXPECT_LT(worst, 1e-6) << extra << " more ranks than now";
          EXPECT_TRUE(std::ranges::any_of(rest, [](float v) { return v != 0.0F; }));
          const auto everybody = gather(comm, mixed);
          for (const Floats& x : everybody) EXPECT_EQ(x, mixed) << "all ranks start alike";
        }
      });
    }
  }
}

#ifndef SKIM_TEST_MPI
// The same, with groups that really differ; what is still to be delivered to the model stays: the
// next dense step delivers (1/P) times all the old residuals beside its gradients.
TEST(laws, resume_on_another_number_of_ranks_delivers_the_same_mean) {
  for (const ExchangeOptions& exchange : residual_keepers()) {
    for (const int old_ranks : {1, 2, 4, 8}) {
      std::vector<std::string> states(static_cast<std::size_t>(old_ranks));
      std::vector<Floats> residuals(states.size());
      test::run_threads(old_ranks, [&](Communicator& comm) {
        ReducerParts parts;
        parts.schedule = constant_density(0.05);
        Reducer reducer({.exchange = exchange, .dense_below = 0}, std::move(parts), comm);
        reducer.set_layout(buckets({300}));
        for (std::uint64_t step = 0; step < 4; ++step) {
          Floats g = test::integers(300, seed_of(comm.rank(), step, 0));
          reducer.reduce(0, std::span(g));
          EXPECT_TRUE(reducer.end_step(0.0));
        }
        std::ostringstream out;
        reducer.save(out);
        states[static_cast<std::size_t>(comm.rank())] = out.str();
        residuals[static_cast<std::size_t>(comm.rank())] = kept_by(reducer, 0);
      });
      Floats mean(300, 0.0F);  // exact: a sum of whole numbers over a power of two
      for (const Floats& r : residuals) {
        for (std::size_t i = 0; i < mean.size(); ++i)
          mean[i] += r[i] / static_cast<float>(old_ranks);
      }
      for (const int ranks : {1, 2, 4, 8}) {
        if (ranks == old_ranks) continue;
        test::run_threads(ranks, [&](Communicator& comm) {
          ReducerParts parts;
          parts.schedule = constant_density(1.0);
          Reducer reducer({}, std::move(parts), comm);
          reducer.set_layout(buckets({300}));
          load(reducer, states);
          Floats nothing(300, 0.0F);
          reducer.reduce(0, std::span(nothing));
          EXPECT_EQ(nothing, mean) << old_ranks << " ranks, then " << ranks;
        });
      }
    }
  }
}
#endif

}  // namespace
}  // namespace skim
