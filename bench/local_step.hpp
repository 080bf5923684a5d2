// One rank's step without the exchange, and the bare passes that benchmarks compare it with.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bench/cases.hpp"
#include "skim/error.hpp"
#include "skim/feedback.hpp"
#include "skim/select.hpp"

namespace skim::bench {

// The bare passes. They are plain loops, because loads of 16 bytes reach more of the memory's rate
// than wider ones.
inline void add(float* __restrict r, const float* __restrict g, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) r[i] += g[i];
}
// STREAM's triad in place. It moves the same bytes as add(), at the memory's rate.
inline void triad(float* __restrict a, const float* __restrict b, float scale, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) a[i] = b[i] + scale * a[i];
}
inline void add_and_clear(float* __restrict r, float* __restrict g, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    r[i] += g[i];
    g[i] = 0.0F;
  }
}

// The residual after the gradient is added to it.
inline std::vector<float> accumulated(std::span<const float> residual,
                                      std::span<const float> grad) {
  std::vector<float> sum(residual.begin(), residual.end());
  for (std::size_t i = 0; i < sum.size(); ++i) {
    if (std::isfinite(grad[i])) sum[i] += grad[i];
  }
  return sum;
}

// Floats with any content, aligned as a framework's tensors are.
class AlignedFloats {
 public:
  explicit AlignedFloats(std::size_t n)
      : data_(static_cast<float*>(std::aligned_alloc(64, (n / 16 + 1) * 64)), &std::free), n_(n) {
    if (!data_) throw std::bad_alloc();
  }
  std::span<float> span() const noexcept { return {data_.get(), n_}; }

 private:
  std::unique_ptr<float, decltype(&std::free)> data_;
  std::size_t n_;
};

// One bucket of n entries, from entry `first` of the gradients on.
class LocalStep {
 public:
  // The step and the bare passes have a residual each. Both lie in one arena, so that their memory
  // is of the same kind. Requires: first + n <= gradients.n(); gradients outlives this.
  LocalStep(std::unique_ptr<Selector> selector, const Gradients& gradients, std::size_t first,
            std::size_t n, std::size_t k)
      : selector_(std::move(selector)), gradients_(gradients), first_(first), k_(k), grad_(n) {
    feedback_.set_layout(std::vector<Bucket>{{0, {{"step", 0, n}}}, {1, {{"bare", 0, n}}}});
    nothing_.reset(n);
  }

  // Writes the gradient of step t, as backward does. Not timed.
  void load(std::uint64_t t) {
    step_ = t;
    gradients_.write(t, first_, grad_.span());
  }
  // Adds the gradient to the residual, selects, and subtracts the selection from the residual.
  SelectReport select(bool clear = false) {
    const SelectReport report = selector_->select(
        {{step_, 0}, grad_.span(), feedback_.residual(0), feedback_.layout(0), {k_}, 1.0F, clear},
        out_);
    feedback_.commit(0, out_.view(), nothing_.view());
    feedback_.end_step();
    return report;
  }
  // As select(). Then the gradient becomes the sum over the ranks; there is one rank here.
  SelectReport whole() {
    const SelectReport report = select(true);
    scatter(out_.view(), 1.0F, grad_.span(), report.cleared);
    return report;
  }

  void bare() { add(feedback_.residual(1).data, grad_.span().data(), grad_.span().size()); }
  void triad() {
    bench::triad(feedback_.residual(1).data, grad_.span().data(), 0.5F, grad_.span().size());
  }
  void bare_local() {
    add_and_clear(feedback_.residual(1).data, grad_.span().data(), grad_.span().size());
  }

  std::vector<float> accumulated() {
    return bench::accumulated(feedback_.residual(0).span(), grad_.span());
  }
  SparseView selection() const { return out_.view(); }
  std::size_t k() const { return k_; }

 private:
  std::unique_ptr<Selector> selector_;
  const Gradients& gradients_;
  std::size_t first_, k_;
  std::uint64_t step_ = 0;
  AlignedFloats grad_;
  ErrorFeedback feedback_;
  SparseBuffer out_, nothing_;
};

// 0 if there are no values.
inline float smallest_magnitude(std::span<const float> values) {
  float least = values.empty() ? 0.0F : std::numeric_limits<float>::infinity();
  for (const float v : values) least = std::min(least, std::abs(v));
  return least;
}

// Returns an error that no rule may make, in words; empty if there is none.
// accumulated: the residual with the gradient, before the selection is subtracted.
inline std::string wrong_entries(std::span<const float> accumulated, const SparseView& out,
                                 float threshold) {
  if (!is_canonical(out) || out.dim != accumulated.size()) return "the indices are not canonical";
  for (std::size_t e = 0; e < out.nnz(); ++e) {
    if (accumulated[out.index[e]] != out.value[e]) {
      return "a wrong value at " + std::to_string(out.index[e]);
    }
  }
  if (const float least = smallest_magnitude(out.value); least != threshold) {
    return "the threshold is " + std::to_string(threshold) + ", the smallest entry " +
           std::to_string(least);
  }
  return {};
}

// The same for a selection that should be the k largest. O(n): it does not sort, but checks that
// the threshold is the k-th magnitude.
inline std::string not_the_largest(std::span<const float> accumulated, std::size_t k,
                                   const SparseView& out, float threshold) {
  std::size_t above = 0, equal = 0, non_zero = 0, above_kept = 0;
  for (const float v : accumulated) {
    const float m = std::abs(v);
    above += m > threshold ? 1U : 0U;
    equal += m == threshold ? 1U : 0U;
    non_zero += m != 0.0F ? 1U : 0U;
  }
  for (const float v : out.value) above_kept += std::abs(v) > threshold ? 1U : 0U;
  if (out.nnz() != std::min(k, non_zero)) {
    return "selected " + std::to_string(out.nnz()) + " entries, expected " +
           std::to_string(std::min(k, non_zero));
  }
  if (above_kept != above || (out.nnz() > 0 && above + equal < out.nnz())) {
    return "of " + std::to_string(above) + " entries above the threshold " +
           std::to_string(above_kept) + " are selected";
  }
  return {};
}

// is_exact: the rule finds the k largest. Throws: Error, which names what is wrong.
inline void verify(std::string_view rule, bool is_exact, std::string_view shape,
                   std::span<const float> accumulated, std::size_t k, const SparseView& out,
                   float threshold) {
  std::string wrong = wrong_entries(accumulated, out, threshold);
  if (wrong.empty() && is_exact) wrong = not_the_largest(accumulated, k, out, threshold);
  if (!wrong.empty()) {
    throw Error("wrong result of " + std::string(rule) + " on " + std::string(shape) +
                ", n=" + std::to_string(accumulated.size()) + ": " + wrong);
  }
}

}  // namespace skim::bench
