// Internal: the rules `exact` and `gaussian` on a CUDA device. This file decides the kernel's
// arguments and evaluates its report. The selection itself is in cuda_kernels.cuh. Tests replace
// the Engine by an emulated device.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "select/cuda_kernels.cuh"
#include "select/fit.hpp"
#include "select/rule.hpp"
#include "skim/error.hpp"

namespace skim::cuda {

// Runs select_entries on one device.
class Engine {
 public:
  virtual ~Engine() = default;
  // Sets the device and stream of the next calls. Throws: InvalidArgument if there is no such
  // device, or if the engine has worked on another one.
  virtual void use(int ordinal, void* stream) = 0;
  // Allocates the memory that run() needs. Throws: Error.
  virtual void reserve(std::size_t n, std::size_t k, std::size_t most) = 0;
  // Runs the kernel and waits for it. Throws: Error. Requires: pass.n > 0, and reserve() for this
  // n.
  virtual const Report& run(const kernels::Pass& pass, const Wanted& wanted) = 0;
  // The result of the last run: the kept indices, then the kept values.
  virtual const std::uint32_t* body() const = 0;

  // The number of candidates that fit. It settles near k. Thanks to the constant, all entries of a
  // small bucket fit.
  static std::size_t room(std::size_t n, std::size_t k) { return std::min(2 * k + 65536, n); }
};

// The part of a step that both rules share.
class CudaSelector : public Selector {
 public:
  CudaSelector(SelectRule rule, std::unique_ptr<Engine> engine)
      : rule_(rule), engine_(std::move(engine)) {}
  std::string_view name() const noexcept final { return name_of(rule_); }
  SelectReport select(const SelectTask& task, SparseBuffer& out) final;

 protected:
  // Runs the engine, several times if needed, until the selection is complete. Returns the report
  // of the run that added the gradient. Requires: n > 0.
  virtual Report pick(const SelectTask& task) = 0;
  // Updates the slot's state after a selection. least: the order of its smallest entry, or 0 if it
  // is empty.
  virtual void learn(const SelectTask& task, std::size_t kept, std::uint32_t least) = 0;
  // The largest number of entries that a selection may keep.
  virtual std::size_t most(std::size_t n, std::size_t k) const = 0;

  Report run(const Wanted& wanted) {
    const Report report = engine_->run(pass_, wanted);
    passes_ += report.dense != 0 ? 6 : 1;  // dense adds three histograms, a count and the output
    kept_ = report.kept;
    return report;
  }
  std::uint32_t floor_ = 0;  // entries up to this order are never kept: keep.threshold, zeros

 private:
  static void check(const SelectTask& task);

  SelectRule rule_;
  std::unique_ptr<Engine> engine_;
  kernels::Pass pass_;
  int passes_ = 0;
  std::size_t kept_ = 0;
};

inline void CudaSelector::check(const SelectTask& task) {
  SKIM_EXPECTS(task.grad.device == Device::cuda,
               "select: the gradient must be on a CUDA device; this selector is for those");
  SKIM_EXPECTS(task.residual.empty() || task.residual.device == Device::cuda,
               "select: the residual must be on a CUDA device, as the gradient");
  SelectTask same = task;  // the other preconditions are those of the CPU
  same.grad.device = same.residual.device = Device::cpu;
  selectors::check(same);
  const auto aligned = [](const void* p, std::size_t to) {
    return reinterpret_cast<std::uintptr_t>(p) % to == 0;
  };
  SKIM_EXPECTS(aligned(task.grad.data, task.grad.dtype == DType::f32 ? 4 : 2) &&
                   aligned(task.residual.data, 4),
               "select: gradient and residual must be aligned to their types");
}

inline SelectReport CudaSelector::select(const SelectTask& task, SparseBuffer& out) {
  check(task);
  engine_->use(task.grad.ordinal, task.grad.stream);
  const std::size_t n = task.grad.n, k = task.keep.k;
  if (n > 0) engine_->reserve(n, k, most(n, k));
  out.reset(n);
  out.reserve(most(n, k));
  if (n == 0) return {};
  pass_ = selectors::accumulation(task);
  floor_ = task.keep.threshold > 0.0F ? std::bit_cast<std::uint32_t>(task.keep.threshold) - 1 : 0;
  passes_ = 0;
  const Report report = pick(task);

  out.resize(kept_);
  if (kept_ > 0) {
    std::memcpy(out.indices().data(), engine_->body(), kept_ * sizeof(Index));
    std::memcpy(out.values().data(), engine_->body() + kept_, kept_ * sizeof(float));
  }
  const float* const values = out.values().data();
  const std::uint32_t least = kept_ > 0 ? kernels::smallest(values, kept_) : 0;
  if (k > 0) learn(task, kept_, least);
  return {.threshold = kept_ > 0 ? selectors::magnitude_of(least) : 0.0F,
          .passes = passes_,
          .kept_norm2 = kernels::norm2(values, kept_),
          .total_norm2 = report.norms.total,
          .gradient_norm2 = report.norms.gradient,
          .non_finite = report.non_finite};
}

// The state of `exact` for a slot, in the saved format of the CPU. On a GPU, candidates are cheap
// and a second pass over all entries is expensive. Therefore the margin settles where there are
// 1.25 to 2 k candidates, more than on the CPU.
struct Carried {
  std::uint64_t n = 0, k = 0;
  float threshold = 0.0F;  // the k-th magnitude; 0 if there was none
  float growth = 1.0F;     // used on the CPU only
  float margin = 0.04F;    // the next pass starts this fraction below the threshold

  static constexpr float kLeastMargin = 0.001F, kLargestMargin = 0.5F;

  // The order above which entries become candidates of the next step; 0 if unknown.
  std::uint32_t start(std::size_t next_n, std::size_t next_k) const {
    if (next_n != n || threshold == 0.0F) return 0;
    float t = threshold * (1.0F - margin);
    // This is exact if the number of entries above t falls as 1/t^2. Lighter tails give more
    // candidates.
    if (next_k > k) t *= std::sqrt(static_cast<float>(k) / static_cast<float>(next_k));
    return kernels::order(t);
  }
  void adapt(std::size_t found, std::size_t wanted) {
    const double ratio = static_cast<double>(found) / static_cast<double>(wanted);
    const float change = ratio < 1.0 ? 2.0F : ratio < 1.25 ? 1.25F : ratio > 2.0 ? 0.8F : 1.0F;
    margin = std::clamp(change * margin, kLeastMargin, kLargestMargin);
  }

  template <class Self, class F>
  static void each(Self& self, F f) {
    f(self.n);
    f(self.k);
    f(self.threshold);
    f(self.growth);
    f(self.margin);
  }
  bool valid() const {
    return n <= std::numeric_limits<Index>::max() && k <= n && std::isfinite(threshold) &&
           threshold >= 0.0F && growth >= 0.8F && growth <= 1.25F && margin >= kLeastMargin &&
           margin <= kLargestMargin;
  }
};

class CudaExact final : public CudaSelector {
 public:
  explicit CudaExact(std::unique_ptr<Engine> engine)
      : CudaSelector(SelectRule::exact, std::move(engine)) {}
  void save(std::ostream& out) const override { carried_.save(out, kMagic); }
  void load(std::istream& in) override { carried_.load(in, kMagic); }

 private:
  static constexpr std::string_view kMagic = "SKIMEXAC";

  std::size_t most(std::size_t, std::size_t k) const override { return k; }

  Report pick(const SelectTask& task) override {
    const std::size_t n = task.grad.n, k = task.keep.k;
    Wanted wanted{.k = static_cast<std::uint32_t>(k),
                  .most = static_cast<std::uint32_t>(k),
                  .floor = floor_,
                  .above = kernels::kAboveAll};
    if (k == 0) return run(wanted);
    Carried& carried = carried_[task.id.slot];
    const std::uint32_t last = carried.start(n, k);
    wanted.above = std::max(floor_, last);
    if (last == 0) wanted.sample_rank = sample_rank(n, k);
    const Report report = run(wanted);
    if (last > floor_) carried.adapt(report.found, k);
    return report;
  }

  void learn(const SelectTask& task, std::size_t kept, std::uint32_t least) override {
    Carried& carried = carried_[task.id.slot];
    carried.n = task.grad.n;
    carried.k = task.keep.k;
    const bool is_kth = kept == carried.k && least <= kernels::kLargestFinite;
    carried.threshold = is_kth ? selectors::magnitude_of(least) : 0.0F;
    carried.growth = 1.0F;
  }

  // The rank in a sample of the order that about k of n entries exceed, and hardly ever fewer. 0 if
  // n is too small or k too large for a sample.
  static std::uint32_t sample_rank(std::size_t n, std::size_t k) {
    if (n < 4 * std::size_t{kSample}) return 0;
    // The sample contains about x of the k largest, with a standard deviation below sqrt(x).
    const double x = double{kSample} / static_cast<double>(n) * static_cast<double>(k);
    const double rank = x + 4.0 * std::sqrt(x) + 5.0;
    return rank <= double{kSample} ? static_cast<std::uint32_t>(rank) : 0;
  }

  selectors::PerSlot<Carried> carried_;
};

// The same rule as in gaussian.cpp.
class CudaGaussian final : public CudaSelector {
 public:
  explicit CudaGaussian(std::unique_ptr<Engine> engine)
      : CudaSelector(SelectRule::gaussian, std::move(engine)) {}
  void save(std::ostream& out) const override { fits_.save(out, kMagic); }
  void load(std::istream& in) override { fits_.load(in, kMagic); }

 private:
  static constexpr std::string_view kMagic = "SKIMGAUS";

  static std::size_t least(std::size_t k) { return (2 * k + 2) / 3; }
  std::size_t most(std::size_t n, std::size_t k) const override { return std::min(4 * k / 3, n); }

  Report pick(const SelectTask& task) override {
    const std::size_t n = task.grad.n, k = task.keep.k;
    std::uint32_t above = kernels::kAboveAll;
    Wanted wanted{.k = static_cast<std::uint32_t>(k),
                  .most = static_cast<std::uint32_t>(most(n, k)),
                  .floor = floor_,
                  .above = above,
                  .falls_back = false};
    if (k == 0) return run(wanted);
    const selectors::Fit& fit = fits_[task.id.slot];
    // A little more than k, because too many candidates cost less than too few.
    const double count = static_cast<double>(k) + 2.0 * std::sqrt(static_cast<double>(k));
    const double z = selectors::Fit::quantile(std::min(count, static_cast<double>(n)), n);
    if (fit.n == n) above = selectors::order_of(fit.deviation * z);
    wanted.above = std::max(above, floor_);
    const Report first = run(wanted);
    if (first.found >= least(k) || above <= floor_) return first;

    double deviation = std::sqrt(first.norms.total / static_cast<double>(n));
    if (first.found > 0)
      deviation = std::min(deviation, selectors::Fit::deviation_of(above, first.found, n));
    const std::uint32_t lower = selectors::order_of(deviation * z);
    above = lower < above ? lower : 0;
    wanted.accumulates = false;
    wanted.above = std::max(above, floor_);
    if (run(wanted).found < least(k) && above > floor_) {
      wanted.above = floor_;
      run(wanted);
    }
    return first;
  }

  void learn(const SelectTask& task, std::size_t kept, std::uint32_t order) override {
    const std::size_t n = task.grad.n;
    fits_[task.id.slot] = {
        n, kept < least(task.keep.k) ? 0.0 : selectors::Fit::deviation_of(order, kept, n)};
  }

  selectors::PerSlot<selectors::Fit> fits_;
};

inline std::unique_ptr<Selector> make_rule(const SelectOptions& options,
                                           std::unique_ptr<Engine> engine) {
  SKIM_EXPECTS(!options.per_parameter, "select: per_parameter is for the CPU only");
  if (options.rule == SelectRule::exact) return std::make_unique<CudaExact>(std::move(engine));
  SKIM_EXPECTS(options.rule == SelectRule::gaussian,
               "select: on a CUDA device there are `exact` and `gaussian` only");
  return std::make_unique<CudaGaussian>(std::move(engine));
}

}  // namespace skim::cuda
