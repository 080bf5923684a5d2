// The local half of a step in host memory.
#include "skim/local_half.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "half.hpp"
#include "select/kernels.hpp"
#include "select/selectors.hpp"
#include "skim/error.hpp"
#include "state.hpp"

namespace skim {
namespace {

bool all_finite(std::span<const float> values) {
  bool finite = true;
  for (const float v : values) finite = finite && std::isfinite(v);
  return finite;
}

// out = factor * sum, converted to `type`. out has sum.size() entries. Returns whether the sum is
// finite.
bool scale_into(std::span<const float> sum, float factor, DType type, void* out) {
  // No branch, so that the loop is vectorised.
  std::uint32_t bad = 0;
  const auto is_bad = [](float v) {
    return std::abs(v) <= std::numeric_limits<float>::max() ? 0U : 1U;
  };
  if (type == DType::f32) {
    auto* const floats = static_cast<float*>(out);
    for (std::size_t i = 0; i < sum.size(); ++i) {
      bad |= is_bad(sum[i]);
      floats[i] = product(sum[i], factor);
    }
  } else {
    for (std::size_t i = 0; i < sum.size(); ++i) {
      bad |= is_bad(sum[i]);
      set_entry(type, out, i, product(sum[i], factor));
    }
  }
  return bad == 0;
}

// Drops the smallest entries of a selection. They stay in the residual, like every entry that is
// not committed.
class AtMost {
 public:
  void cut(std::size_t k, SparseBuffer& mine, SelectReport& report) {
    split_top_k(mine.view(), k, kept_, dropped_, scratch_);
    std::swap(mine, kept_);
    const std::span<const float> kept = mine.view().value;
    report.kept_norm2 = kernels::norm2(kept.data(), kept.size());
    report.threshold =
        kept.empty() ? 0.0F : selectors::magnitude_of(kernels::smallest(kept.data(), kept.size()));
  }

 private:
  SparseBuffer kept_, dropped_;
  std::vector<std::uint32_t> scratch_;
};

class HostLocalHalf final : public LocalHalf {
 public:
  HostLocalHalf(const SelectOptions& select, const FeedbackOptions& feedback,
                std::unique_ptr<Selector> selector)
      : feedback_(feedback), selector_(selector ? std::move(selector) : make_selector(select)) {
    fresh_ = state_of(*selector_);
  }

  void set_layout(std::span<const Bucket> buckets) override { feedback_.set_layout(buckets); }
  std::span<const Slot> slots() const noexcept override { return feedback_.slots(); }
  std::span<const Segment> layout(Slot slot) const override { return feedback_.layout(slot); }

  void check(const GradView& grad) const override {
    if (grad.dtype == DType::f32) {
      grad.f32();
    } else {
      grad.bits16();
    }
  }

  SelectReport select(const Task& task, SparseBuffer& mine) override {
    const Incoming in = begin(task);
    // The mean will replace the gradient, so the gradient may be cleared once the residual has it.
    // With momentum a velocity takes the gradient's place, and it must not be cleared.
    SelectReport report = selector_->select({.id = task.id,
                                             .grad = in.grad,
                                             .residual = feedback_.residual(task.id.slot),
                                             .layout = feedback_.layout(task.id.slot),
                                             .keep = task.keep,
                                             .decay = feedback_.options().residual_decay,
                                             .clear = in.grad.data == task.grad.data},
                                            mine);
    is_cleared_ = report.cleared;
    if (task.at_most_k && mine.nnz() > task.keep.k) at_most_.cut(task.keep.k, mine, report);
    return in.of(report);
  }

  SelectReport accumulate(const Task& task) override {
    const Incoming in = begin(task);
    is_cleared_ = false;
    accumulated_ = in.grad;
    return in.of(skim::accumulate({.id = task.id,
                                   .grad = in.grad,
                                   .residual = feedback_.residual(task.id.slot),
                                   .layout = feedback_.layout(task.id.slot),
                                   .decay = feedback_.options().residual_decay}));
  }

  // The residual keeps the delivered values until the end of the step, so a rollback needs no copy.
  std::span<float> whole(StepId id, const GradView& grad) override {
    if (grad.dtype != DType::f32) staging_.resize(std::max(staging_.size(), grad.n));
    const std::span<float> data =
        grad.dtype == DType::f32 ? grad.f32() : std::span(staging_).first(grad.n);
    const DenseView residual = feedback_.residual(id.slot);
    if (!residual.empty()) {
      std::memcpy(data.data(), residual.data, data.size_bytes());
    } else if (grad.dtype != DType::f32 || accumulated_.scale != 1.0F) {
      for (std::size_t i = 0; i < grad.n; ++i) {
        data[i] = product(entry(grad.dtype, grad.data, i), 1.0F / accumulated_.scale);
      }
    }
    return data;
  }

  double commit(Slot slot, const SparseView& sent, const SparseView& returned) override {
    return feedback_.commit(slot, sent, returned);
  }
  void commit_all(Slot slot) override { feedback_.commit_all(slot); }

  bool apply(StepId, const SparseView& sum, float factor, const GradView& grad) override {
    scatter(sum, factor, grad, is_cleared_);
    return all_finite(sum.value);
  }
  bool apply(StepId, std::span<const float> sum, float factor, const GradView& grad) override {
    return scale_into(sum.first(grad.n), factor, grad.dtype, grad.data);
  }
  void apply_nan(const GradView& grad) override {
    if (grad.n > 0) {
      set_entry(grad.dtype, grad.data, 0, std::numeric_limits<float>::quiet_NaN());
    }
  }

  void end_step() noexcept override { feedback_.end_step(); }
  void rollback_step() override { feedback_.rollback_step(); }

  void save(std::ostream& out) const override {
    feedback_.save(out);
    save_part(*selector_, out);
  }
  LoadReport load(std::span<std::istream* const> of_old_ranks, int rank, int size,
                  const LoadOptions& options) override {
    const LoadReport report = feedback_.load(of_old_ranks, rank, size, options);
    if (!load_own_part(*selector_, {of_old_ranks, rank, size})) {
      std::istringstream fresh(fresh_);
      selector_->load(fresh);
    }
    return report;
  }

  DenseView residual(Slot slot) override { return feedback_.residual(slot); }
  DenseView velocity(Slot slot) override { return feedback_.velocity(slot); }

 private:
  // This rank's gradient after its local options. If those options change the norms, `raw` has the
  // norms from before.
  struct Incoming {
    GradView grad;
    bool is_measured = false;
    SelectReport raw;

    SelectReport of(SelectReport report) const {
      if (is_measured) {
        report.gradient_norm2 = raw.gradient_norm2;
        report.non_finite = raw.non_finite;
      }
      return report;
    }
  };
  Incoming begin(const Task& task) {
    Incoming in;
    const FeedbackOptions& o = feedback_.options();
    in.is_measured = o.local_clip > 0.0F || o.momentum_correction > 0.0F;
    // Without a residual, skim::accumulate only measures.
    if (in.is_measured) in.raw = skim::accumulate({.id = task.id, .grad = task.grad});
    in.grad = feedback_.begin(task.id.slot, task.grad, in.raw.gradient_norm2, task.ranks);
    return in;
  }

  ErrorFeedback feedback_;
  std::unique_ptr<Selector> selector_;
  std::string fresh_;        // the selector's state before its first step
  bool is_cleared_ = false;  // the bucket's gradient holds zeros (SelectReport::cleared)
  GradView accumulated_;     // the last gradient that accumulate() added
  AtMost at_most_;
  std::vector<float> staging_;  // for dense sums of 16-bit gradients
};

}  // namespace

void LocalHalf::gather(Slot slot, std::span<const Index> indices, SparseBuffer& mine) {
  const DenseView values = residual(slot);
  mine.reset(values.n);
  mine.resize(indices.size());
  std::ranges::copy(indices, mine.indices().begin());
  for (std::size_t e = 0; e < indices.size(); ++e) mine.values()[e] = values.data[indices[e]];
}

std::unique_ptr<LocalHalf> make_local_half(const SelectOptions& select,
                                           const FeedbackOptions& feedback,
                                           std::unique_ptr<Selector> selector) {
  return std::make_unique<HostLocalHalf>(select, feedback, std::move(selector));
}

}  // namespace skim
