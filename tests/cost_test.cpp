// The cost model: the published values, what is asked of every formula, the choice, the fit.
#include "skim/cost.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "skim/error.hpp"
#include "skim/exchange.hpp"

namespace skim {
namespace {

// arXiv 1901.04359: 1 Gbit/s Ethernet, and a message of 2k words of 4 bytes for k entries.
constexpr Link kPaperLink{.alpha_s = 0.436e-3, .beta_s_per_byte = 9e-9};
constexpr FrameSize kPaperFrame{.header_bytes = 0.0,
                                .stats_bytes = 0.0,
                                .length_bytes = 0.0,
                                .value_bytes = 4.0,
                                .index_bytes = 4.0};

std::vector<ExchangeKind> all_kinds() {
  std::vector<ExchangeKind> all;
  for (const ExchangeRow& row : exchange_rows()) all.push_back(row.kind);
  return all;
}
Cost predict(ExchangeKind kind, const Load& load, const Link& link, const LocalSpeeds& local = {}) {
  return skim::predict(ExchangeOptions{.kind = kind}, load, link, local);
}
Choice cheapest(const std::vector<ExchangeKind>& among, const Load& load, const Link& link,
                const LocalSpeeds& local = {}) {
  return skim::cheapest(among, {}, load, link, local);
}
// An all-gather in the form that the paper has.
double doubling_s(const Load& load, const Link& link) {
  CostTerms terms;
  add_allgather(terms, AllgatherForm::doubling, load.ranks, load.frame.bytes(load.k, load.n),
                load.frame.length_bytes);
  return cost_of(terms, true, load, link, {}).total_s();
}

// The model of the paper with its measured alpha and beta, for 25 million parameters at density
// 0.001, in ms: 2(P-1) a + 2(P-1)/P n b;  a log P + 2(P-1) k b;  2 a log P + 4 k b log P.
TEST(cost, published_values) {
  struct Row {
    int ranks;
    double dense, topk, gtopk;
  };
  for (const Row& row :
       {Row{4, 1352.6, 6.3, 8.9}, Row{8, 1581.1, 13.9, 13.4}, Row{16, 1700.6, 28.7, 17.9},
        Row{32, 1770.8, 58.0, 22.4}, Row{64, 1826.8, 116.0, 26.8}, Row{128, 1896.7, 231.7, 31.3}}) {
    const Load load{.ranks = row.ranks, .n = 25e6, .k = 25e3, .frame = kPaperFrame};
    const auto ms = [&](ExchangeKind kind) {
      return 1e3 * predict(kind, load, kPaperLink).total_s();
    };
    EXPECT_NEAR(ms(ExchangeKind::dense), row.dense, 0.05);
    EXPECT_NEAR(1e3 * doubling_s(load, kPaperLink), row.topk, 0.05);
    EXPECT_NEAR(ms(ExchangeKind::gtopk_tree), row.gtopk, 0.05);
  }
}

TEST(cost, one_rank_selects_and_sends_nothing) {
  const Load load{.ranks = 1, .n = 1e6, .k = 1e3};
  for (const ExchangeKind kind : all_kinds()) {
    const Cost c = predict(kind, load, kPaperLink, {.select_s = 1e-9, .merge_s = 1, .add_s = 1});
    EXPECT_EQ(c.rounds, 0.0);
    EXPECT_EQ(c.bytes, 0.0);
    EXPECT_EQ(c.exchange_s(), 0.0);
    EXPECT_DOUBLE_EQ(c.total_s(), kind == ExchangeKind::dense ? 0.0 : 1e-3);
  }
}

// More ranks, more entries, a slower link or slower ranks never make an exchange cheaper.
TEST(cost, grows_with_everything_that_costs) {
  const LocalSpeeds local{.select_s = 3e-10, .merge_s = 5e-9, .add_s = 3e-10};
  for (const ExchangeKind kind : all_kinds()) {
    for (int ranks = 2; ranks <= 1024; ranks *= 2) {
      const Load load{.ranks = ranks, .n = 1e7, .k = 1e4};
      const Cost base = predict(kind, load, kPaperLink, local);
      EXPECT_DOUBLE_EQ(base.total_s(), base.link_s + base.merge_s + base.select_s);
      const auto more = [&](Load l, Link link, LocalSpeeds speeds) {
        return predict(kind, l, link, speeds).total_s() - base.total_s();
      };
      Load wider = load, longer = load;
      wider.ranks *= 2;
      longer.n *= 2;
      longer.k *= 2;
      EXPECT_GT(more(wider, kPaperLink, local), 0.0) << name_of(kind);
      EXPECT_GT(more(longer, kPaperLink, local), 0.0);
      EXPECT_NEAR(more(load, {2 * kPaperLink.alpha_s, kPaperLink.beta_s_per_byte}, local),
                  base.rounds * kPaperLink.alpha_s, 1e-12);
      EXPECT_GT(more(load, {kPaperLink.alpha_s, 2 * kPaperLink.beta_s_per_byte}, local), 0.0);
      EXPECT_GT(more(load, kPaperLink, {6e-10, 1e-8, 6e-10}), 0.0);
    }
  }
}

// 2(P - 1) against 4 log2 P frames: equal between 6 and 7 ranks.
TEST(cost, allgather_and_gtopk_cross_where_the_paper_says) {
  const Link no_latency{.alpha_s = 0.0, .beta_s_per_byte = 9e-9};
  for (const int ranks : {2, 4, 8, 16, 32, 64}) {
    const Load load{.ranks = ranks, .n = 25e6, .k = 25e3, .frame = kPaperFrame};
    const double tree = predict(ExchangeKind::gtopk_tree, load, no_latency).total_s();
    EXPECT_EQ(tree < doubling_s(load, no_latency), ranks >= 8) << ranks;
  }
}

TEST(cost, subset_bits_is_the_logarithm_of_a_binomial_coefficient) {
  EXPECT_NEAR(subset_bits(2, 5), std::log2(10.0), 1e-12);
  EXPECT_NEAR(subset_bits(3, 40), std::log2(9880.0), 1e-12);
  EXPECT_EQ(subset_bits(0, 7), 0.0);
  EXPECT_EQ(subset_bits(7, 7), 0.0);
  // Near n H(k/n), from which it differs by log2 sqrt(2 pi k (1 - k/n)).
  const double n = 25e6, k = 25e3, d = k / n;
  const double entropy = n * (-d * std::log2(d) - (1 - d) * std::log2(1 - d));
  const double expected = entropy - 0.5 * std::log2(2 * std::acos(-1.0) * k * (1 - d));
  EXPECT_NEAR(subset_bits(k, n), expected, 1e-3);
}

TEST(cost, frame_sizes) {
  EXPECT_DOUBLE_EQ(FrameSize{}.bytes(1000, 1e6), 24 + 8 * 1000);
  const FrameSize coded{.value_bytes = 2.0, .index_bytes = -1.0};
  EXPECT_DOUBLE_EQ(coded.bytes(1000, 1e6), 24 + 2 * 1000 + subset_bits(1000, 1e6) / 8);
  EXPECT_EQ(coded.bytes(0, 1e6), 24.0);
  EXPECT_EQ(coded.bytes(1000, 1000), 24.0 + 2 * 1000) << "all of them: indices say nothing";
}

TEST(cost, nothing_hides_behind_computing_unless_it_is_said) {
  const Cost c{.link_s = 0.3, .merge_s = 0.01, .select_s = 0.02};
  EXPECT_DOUBLE_EQ(step_seconds(0.2, c), 0.53);
  EXPECT_DOUBLE_EQ(step_seconds(0.2, c, 0.5), 0.43);
  EXPECT_DOUBLE_EQ(step_seconds(0.4, c, 1.0), 0.43) << "only the link's time can hide";
  EXPECT_THROW(step_seconds(0.2, c, 1.1), InvalidArgument);
  EXPECT_THROW(step_seconds(-1.0, c), InvalidArgument);
}

TEST(cost, a_fast_link_is_told_not_to_compress) {
  // 400 Gbit/s, 10 us; selection at 0.4 ns an entry takes longer than the dense sum.
  const Link fast{.alpha_s = 1e-5, .beta_s_per_byte = 2e-11};
  const LocalSpeeds local{.select_s = 4e-10, .merge_s = 5e-9, .add_s = 1e-10};
  const Load load{.ranks = 4, .n = 25e6, .k = 25e3};
  const std::vector kinds{ExchangeKind::dense, ExchangeKind::allgather, ExchangeKind::gtopk_tree};
  const Choice best = cheapest(kinds, load, fast, local);
  EXPECT_EQ(best.exchange, ExchangeKind::dense);
  EXPECT_NE(best.reason.find("do not compress"), std::string::npos) << best.reason;
  EXPECT_NE(best.reason.find("selection 10 ms"), std::string::npos) << best.reason;

  const Choice slow = cheapest(kinds, load, kPaperLink, local);
  EXPECT_NE(slow.exchange, ExchangeKind::dense);
  EXPECT_EQ(slow.reason.find("do not compress"), std::string::npos) << slow.reason;
  EXPECT_NE(slow.reason.find("dense 1.35 s"), std::string::npos) << slow.reason;
  for (const ExchangeKind kind : kinds) {
    EXPECT_LE(slow.cost.total_s(), predict(kind, load, kPaperLink, local).total_s());
  }
}

TEST(cost, forms_of_an_allgather) {
  const auto terms = [](AllgatherForm form, int ranks) {
    CostTerms t;
    add_allgather(t, form, ranks, 100.0);
    return t;
  };
  EXPECT_EQ(terms(AllgatherForm::ring, 6).rounds, 5.0);
  EXPECT_EQ(terms(AllgatherForm::bruck, 6).rounds, 3.0);
  EXPECT_EQ(terms(AllgatherForm::doubling, 8).rounds, 3.0);
  EXPECT_EQ(terms(AllgatherForm::ring, 6).sent_bytes, 500.0);
  EXPECT_EQ(terms(AllgatherForm::bruck, 6).sent_bytes, 500.0 + 2 * 8.0) << "lengths of packed ones";
}

TEST(cost, the_first_of_equals_is_chosen) {
  const Load load{.ranks = 6, .n = 1e6, .k = 1e3};
  using K = ExchangeKind;
  EXPECT_EQ(cheapest({K::gtopk_tree, K::gtopk}, load, {}).exchange, K::gtopk_tree);
  EXPECT_EQ(cheapest({K::gtopk, K::gtopk_tree}, load, {}).exchange, K::gtopk);
  EXPECT_THROW(cheapest({}, load, {}), InvalidArgument);
}

// On a fast link inside hosts and a slow one between them, the exchange between hosts is all that
// counts; with a host for every rank, or one for all, it is one of its parts.
TEST(cost, hierarchical) {
  const ExchangeOptions options{
      .kind = ExchangeKind::hierarchical,
      .hierarchy = {.inside = ExchangeKind::allgather, .between = ExchangeKind::gtopk}};
  Load load{.ranks = 32, .n = 25e6, .k = 25e3, .frame = kPaperFrame, .hosts = 4};
  const auto of = [](ExchangeKind kind, const Load& l) {
    return predict(kind, l, kPaperLink).total_s();
  };
  // Eight ranks of a host have up to eight times as many entries. gTop-k cuts them at its first
  // merge, an all-gather never.
  ExchangeOptions gathered = options;
  gathered.hierarchy.between = ExchangeKind::allgather;
  Load between = load;
  between.ranks = 4;
  const double first = 7 * kPaperLink.beta_s_per_byte *
                       (kPaperFrame.bytes(2 * load.k, load.n) - kPaperFrame.bytes(load.k, load.n));
  const double expected = of(ExchangeKind::gtopk, between) + first;
  EXPECT_DOUBLE_EQ(skim::predict(options, load, kPaperLink).total_s(), expected);
  between.k *= 8;
  EXPECT_DOUBLE_EQ(skim::predict(gathered, load, kPaperLink).total_s(),
                   of(ExchangeKind::allgather, between));
  load.inside_link = {.alpha_s = 1e-6, .beta_s_per_byte = 1e-10};
  EXPECT_GT(skim::predict(options, load, kPaperLink).total_s(), expected);
  load.hosts = 0;
  EXPECT_DOUBLE_EQ(skim::predict(options, load, kPaperLink).total_s(),
                   of(ExchangeKind::gtopk, load));
  load.hosts = 33;
  EXPECT_THROW(skim::predict(options, load, kPaperLink), InvalidArgument);
}

TEST(cost, arguments) {
  const Load good{.ranks = 2, .n = 10, .k = 1};
  const auto bad = [](Load load, Link link = {}, LocalSpeeds local = {}) {
    EXPECT_THROW(predict(ExchangeKind::dense, load, link, local), InvalidArgument);
  };
  bad({.ranks = 0, .n = 10, .k = 1});
  bad({.ranks = 2, .n = 0, .k = 0});
  bad({.ranks = 2, .n = 10, .k = 11});
  bad({.ranks = 2, .n = 10, .k = std::nan("")});
  bad(good, {.alpha_s = -1e-3});
  bad(good, {.beta_s_per_byte = INFINITY});
  bad(good, {}, {.merge_s = -1});
}

// Ok-Topk moves 2k entries whatever P, the others more with every rank; with enough ranks and a
// link without latency it is the cheapest.
TEST(cost, oktopk_needs_the_bytes_of_two_selections) {
  for (const int ranks : {4, 32, 256}) {
    const double p = ranks;
    const Load load{.ranks = ranks, .n = 25e6, .k = 25e3, .frame = kPaperFrame};
    const Cost c = predict(ExchangeKind::oktopk, load, kPaperLink);
    EXPECT_NEAR(c.bytes, 2 * 8 * 25e3 * (p - 1) / p + 24 * (p - 1), 1e-6);
    EXPECT_EQ(c.rounds, p - 1 + 2 * std::log2(p)) << "parts, counts, and shares";
    EXPECT_EQ(cheapest(all_kinds(), load, {.beta_s_per_byte = 9e-9}).exchange,
              ExchangeKind::oktopk);
  }
}

// 1, 2, 4 .. selections, until more than half of the gradient would be there: then all of it. What
// a full frame says of indices is nothing.
TEST(cost, sparcml_fills_up) {
  FrameSize coded = kPaperFrame;
  coded.index_bytes = -1.0;
  const Load load{.ranks = 16, .n = 1000, .k = 100, .frame = coded};
  const auto frame = [](double k) { return 4 * k + subset_bits(k, 1000) / 8; };
  const Cost c = predict(ExchangeKind::sparcml, load, kPaperLink);
  EXPECT_EQ(c.rounds, 4.0);
  EXPECT_DOUBLE_EQ(c.bytes, frame(100) + frame(200) + frame(400) + 4 * 1000);

  // Six ranks: the two above four give theirs to the two lowest, and get the result from them.
  Load six = load;
  six.ranks = 6;
  six.k = 10;
  const Cost folded = predict(ExchangeKind::sparcml, six, kPaperLink);
  EXPECT_EQ(folded.rounds, 4.0);
  EXPECT_DOUBLE_EQ(folded.bytes, frame(20) + frame(40) + frame(60));
  EXPECT_DOUBLE_EQ(folded.link_s, 4 * kPaperLink.alpha_s +
                                      kPaperLink.beta_s_per_byte * (frame(10) + folded.bytes));
}

// ---- the fit

TEST(cost, fit_of_a_link_that_keeps_to_the_model) {
  std::vector<LinkSample> samples;
  for (double m = 1; m <= 1 << 24; m *= 4) samples.push_back({m, 3e-4 + m * 8.4e-9});
  const Link link = fit_link(samples);
  EXPECT_NEAR(link.alpha_s, 3e-4, 1e-9);
  EXPECT_NEAR(link.beta_s_per_byte, 8.4e-9, 1e-14);
}

// A shaper lets a burst of 64 KiB through at once: a line through the large messages alone says
// that an empty one takes less than no time.
TEST(cost, fit_of_a_link_with_a_burst) {
  std::vector<LinkSample> samples;
  for (double m = 1; m <= 1 << 24; m *= 4) {
    samples.push_back({m, 4e-5 + std::max(0.0, m - 65536) * 8.4e-9});
  }
  const Link link = fit_link(samples);
  EXPECT_NEAR(link.alpha_s, 4e-5, 3e-6);
  EXPECT_NEAR(link.beta_s_per_byte, 8.4e-9, 1e-12);
}

TEST(cost, fit_needs_two_lengths) {
  EXPECT_THROW(fit_link(std::vector<LinkSample>{}), InvalidArgument);
  EXPECT_THROW(fit_link(std::vector<LinkSample>{{100, 1e-3}, {100, 2e-3}}), InvalidArgument);
  EXPECT_THROW(fit_link(std::vector<LinkSample>{{100, 1e-3}, {1000, 0.0}}), InvalidArgument);
  const Link link = fit_link(std::vector<LinkSample>{{1000, 2e-3}, {2000, 3e-3}});
  EXPECT_NEAR(link.alpha_s, 1e-3, 1e-12) << "no short message: the shortest must do";
  EXPECT_NEAR(link.beta_s_per_byte, 1e-6, 1e-12);
}

}  // namespace
}  // namespace skim
