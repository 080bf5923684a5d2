// The seam between a rank's own memory and the exchange: a second local half, whose gradients and
// residuals the library cannot touch, gives what the library's own gives, bit for bit.
#include "skim/local_half.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "local_half_cases.hpp"
#include "skim/error.hpp"
#include "skim/reducer.hpp"

namespace skim {
namespace {

using test::elsewhere;
using test::layout;
using test::options_of;
using test::parts_of;
using Floats = std::vector<float>;

// The slow and obvious local half: a map of residuals, a full sort, a copy of everything for
// rollback.
class OracleHalf final : public LocalHalf {
 public:
  void set_layout(std::span<const Bucket> buckets) override {
    std::map<std::string, Floats> by_name;
    for (const auto& [slot, parameters] : layout_) {
      for (const Segment& p : parameters) {
        const auto from = residual_[slot].begin() + static_cast<std::ptrdiff_t>(p.offset);
        by_name[p.name] = {from, from + static_cast<std::ptrdiff_t>(p.length)};
      }
    }
    layout_.clear();
    residual_.clear();
    slots_.clear();
    for (const Bucket& b : buckets) {
      layout_[b.slot] = b.parameters;
      slots_.push_back(b.slot);
      for (const Segment& p : b.parameters) {
        Floats& r = residual_[b.slot];
        Floats& old = by_name[p.name];
        old.resize(p.length, 0.0F);
        r.resize(p.offset);
        r.insert(r.end(), old.begin(), old.end());
      }
      residual_[b.slot];
    }
  }
  std::span<const Slot> slots() const noexcept override { return slots_; }
  std::span<const Segment> layout(Slot slot) const override {
    SKIM_EXPECTS(layout_.contains(slot), "unknown slot");
    return layout_.at(slot);
  }
  void check(const GradView& grad) const override {
    SKIM_EXPECTS(grad.device == Device::other && grad.dtype == DType::f32, "not where I look");
  }

  SelectReport select(const Task& task, SparseBuffer& mine) override {
    SelectReport report = accumulate(task);
    mine = test::top_k(residual_[task.id.slot], task.keep.k);
    report.threshold = mine.nnz() > 0 ? std::numeric_limits<float>::max() : 0.0F;
    for (const float v : mine.view().value) {
      report.threshold = std::min(report.threshold, std::abs(v));
      report.kept_norm2 += double{v} * double{v};
    }
    return report;
  }
  SelectReport accumulate(const Task& task) override {
    SelectReport report;
    EXPECT_EQ(task.grad.context, task.grad.data);
    Floats& r = residual_[task.id.slot];
    const auto* const g = static_cast<const float*>(task.grad.data);
    for (std::size_t i = 0; i < r.size(); ++i) {
      if (!std::isfinite(g[i])) {
        ++report.non_finite;
        continue;
      }
      const float x = g[i] * (1.0F / task.grad.scale);
      report.gradient_norm2 += double{x} * double{x};
      r[i] += x;
      report.total_norm2 += double{r[i]} * double{r[i]};
    }
    return report;
  }
  std::span<float> whole(StepId id, const GradView&) override {
    host_ = residual_[id.slot];
    return host_;
  }
  double commit(Slot slot, const SparseView& sent, const SparseView& returned) override {
    // The gradient stays in the residual when a step is rolled back.
    before_.try_emplace(slot, residual_[slot]);
    Floats& r = residual_[slot];
    const auto norm2 = [&] {
      double sum = 0.0;
      for (const float v : r) sum += double{v} * double{v};
      return sum;
    };
    const double was = norm2();
    for (std::size_t e = 0; e < sent.nnz(); ++e) r[sent.index[e]] -= sent.value[e];
    for (std::size_t e = 0; e < returned.nnz(); ++e) r[returned.index[e]] += returned.value[e];
    return norm2() - was;
  }
  void commit_all(Slot slot) override { delivered_.push_back(slot); }

  bool apply(StepId, const SparseView& sum, float factor, const GradView& grad) override {
    return apply({}, std::span<const float>(test::dense(sum)), factor, grad);
  }
  bool apply(StepId, std::span<const float> sum, float factor, const GradView& grad) override {
    EXPECT_EQ(grad.context, grad.data);
    bool finite = true;
    auto* const g = static_cast<float*>(grad.data);
    for (std::size_t i = 0; i < sum.size(); ++i) {
      finite = finite && std::isfinite(sum[i]);
      g[i] = factor * sum[i];
    }
    return finite;
  }
  void apply_nan(const GradView& grad) override {
    static_cast<float*>(grad.data)[0] = std::numeric_limits<float>::quiet_NaN();
  }
  void end_step() noexcept override {
    for (const Slot slot : delivered_) std::ranges::fill(residual_[slot], 0.0F);
    delivered_.clear();
    before_.clear();
  }
  void rollback_step() override {
    for (auto& [slot, r] : before_) residual_[slot] = r;
    delivered_.clear();
    before_.clear();
  }
  void save(std::ostream& out) const override {
    for (const auto& [slot, r] : residual_) {
      out.write(reinterpret_cast<const char*>(r.data()),
                static_cast<std::streamsize>(r.size() * sizeof(float)));
    }
  }
  LoadReport load(std::span<std::istream* const> of_old_ranks, int rank, int size,
                  const LoadOptions&) override {
    if (of_old_ranks.size() != static_cast<std::size_t>(size)) throw StateError("another group");
    for (auto& [slot, r] : residual_) {
      of_old_ranks[static_cast<std::size_t>(rank)]->read(
          reinterpret_cast<char*>(r.data()),
          static_cast<std::streamsize>(r.size() * sizeof(float)));
    }
    return {};
  }
  DenseView residual(Slot slot) override { return std::span(residual_[slot]); }

 private:
  std::map<Slot, std::vector<Segment>> layout_;
  std::map<Slot, Floats> residual_, before_;
  std::vector<Slot> slots_, delivered_;
  Floats host_;
};

std::unique_ptr<LocalHalf> oracle() { return std::make_unique<OracleHalf>(); }

TEST(local_half, another_one_gives_the_same) { test::gives_the_same(oracle, test::group_sizes()); }
TEST(local_half, a_new_layout_and_a_saved_state) { test::moves_and_saves(oracle); }
TEST(local_half, non_finite_gradients_roll_the_step_back) { test::rolls_back(oracle); }

// Without a residual, overflow of grad / scale is clamped in a dense sum as in a selection.
TEST(local_half, a_dense_sum_without_a_residual_stays_finite) {
  const auto half = make_local_half({}, {.enabled = false});
  half->set_layout(std::vector<Bucket>{{0, {{"a", 0, 2}}}});
  const float max = std::numeric_limits<float>::max();
  Floats grad{2e38F, -3.0F};
  GradView view{std::span(grad)};
  view.scale = 0.25F;
  half->accumulate({.id = {0, 0}, .grad = view, .keep = {}});
  const std::span<float> whole = half->whole({0, 0}, view);
  EXPECT_EQ(Floats(whole.begin(), whole.end()), (Floats{max, -12.0F}));
}

TEST(local_half, the_report_of_a_cut_selection_is_that_of_what_is_left) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::size_t nans : {1U, 5U}) {
    Floats grad(8, 5.0F);
    std::fill_n(grad.begin(), nans, nan);
    SelectReport cut, exact;
    for (const auto& [rule, report] :
         {std::pair(SelectRule::redsync, &cut), std::pair(SelectRule::exact, &exact)}) {
      const auto half = make_local_half({.rule = rule}, {.enabled = false});
      half->set_layout(std::vector<Bucket>{{0, {{"a", 0, 8}}}});
      Floats own = grad;
      SparseBuffer mine;
      *report = half->select(
          {.id = {0, 0}, .grad = std::span(own), .keep = {.k = 2}, .at_most_k = true}, mine);
      EXPECT_EQ(mine.nnz(), 2U);
    }
    EXPECT_EQ(cut.kept_norm2, exact.kept_norm2) << nans;
    EXPECT_EQ(std::isnan(cut.threshold), std::isnan(exact.threshold)) << nans;
    if (!std::isnan(exact.threshold)) {
      EXPECT_EQ(cut.threshold, exact.threshold);
    }
  }
}

TEST(local_half, refuses_what_it_cannot_read) {
  test::run_group(1, [](Communicator& comm) {
    Reducer own(options_of(ExchangeKind::gtopk), parts_of(nullptr), comm);
    own.set_layout(layout());
    Floats g(test::kSizes[1], 1.0F);
    EXPECT_THROW(own.reduce(1, elsewhere(g)), InvalidArgument);
    Reducer other(options_of(ExchangeKind::gtopk), parts_of(std::make_unique<OracleHalf>()), comm);
    other.set_layout(layout());
    EXPECT_THROW(other.reduce(1, std::span(g)), InvalidArgument);
    EXPECT_THROW(other.reduce(9, elsewhere(g)), InvalidArgument);
  });
}

TEST(local_half, brings_its_own_selector) {
  test::run_group(1, [](Communicator& comm) {
    ReducerParts parts = parts_of(std::make_unique<OracleHalf>());
    parts.selector = make_selector({});
    EXPECT_THROW(Reducer({}, std::move(parts), comm), InvalidArgument);
    ReducerOptions select, feedback;  // nobody would look at them
    select.select.seed = 7;
    feedback.feedback.residual_decay = 0.5F;
    for (const ReducerOptions& options : {select, feedback}) {
      EXPECT_THROW(Reducer(options, parts_of(std::make_unique<OracleHalf>()), comm),
                   InvalidArgument);
    }
    ReducerParts exchange;
    exchange.exchange = make_exchange({});
    EXPECT_THROW(Reducer({.chooser = ChooserOptions{}}, std::move(exchange), comm),
                 InvalidArgument);
  });
}

}  // namespace
}  // namespace skim
