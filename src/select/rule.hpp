// Internal: what every rule but `exact` shares: the course of a step.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "select/per_slot.hpp"
#include "select/selectors.hpp"
#include "select/statistics.hpp"

namespace skim::selectors {

// A rule is one function, pick(); select() checks, prepares and reports around it.
class Rule : public Selector {
 public:
  explicit Rule(SelectAlgo algo) noexcept : algo_(algo) {}
  std::string_view name() const noexcept final;
  SelectReport select(const SelectTask& task, SparseBuffer& out) final;

 protected:
  struct Room {
    std::size_t candidates;  // more of them drop to the k largest; n: as many as there are
    std::size_t orders;      // entries that keep_largest() or a sample looks at
  };
  // For rules of at most about k entries: pruning, O(k), frees room for k more (see exact.cpp).
  static Room room_for(std::size_t n, std::size_t k);

  virtual Room room(std::size_t n, std::size_t) const { return {n, 0}; }
  // Preconditions of its own. Throws: InvalidArgument.
  virtual void require(const SelectTask&) const {}
  // Calls accumulate() once, after anything that may throw, and leaves its selection, ascending and
  // without zeros, in candidates_. Requires: 0 < k <= n.
  virtual void pick(const SelectTask& task) = 0;

  // Dense passes. Candidates become the entries above a threshold and above keep.threshold.
  void accumulate(std::uint32_t above = kernels::kAboveAll);  // the gradient to the residual
  void collect(std::uint32_t above);                          // again, from the result
  kernels::Moments moments();
  void count_above(std::span<const std::uint32_t> above, std::span<std::size_t> counts);

  // Leaves the k largest candidates, ties to the lower index. Returns the order of the k-th.
  // Requires: 0 < k <= count.
  std::uint32_t keep_largest(std::size_t k);
  // The values of the candidates, for kernels.
  kernels::Pass candidate_values() const noexcept {
    return {.grad = candidates_.value, .n = candidates_.count};
  }
  // |values|^2 over the finite ones.
  double norm2() const noexcept { return pass_.residual == nullptr ? sums_.gradient : sums_.total; }

  std::vector<std::uint32_t> orders_;  // scratch
  kernels::Candidates candidates_;
  kernels::Pass pass_;    // the accumulation
  kernels::Pass values_;  // reads its result, once that is done
  kernels::Sums sums_;
  std::uint32_t floor_ = 0;  // entries up to this order are never candidates: keep.threshold, zeros
  int passes_ = 0;
  bool pruned_ = false;  // the last pass dropped candidates for want of room

 private:
  void collect_all(const kernels::Pass& pass, std::uint32_t above, kernels::Sums& sums);

  SelectAlgo algo_;
  std::size_t k_ = 0;
  // Never shrunk, and not initialised: pages that are never written cost no memory.
  std::unique_ptr<Index[]> index_;
  std::unique_ptr<float[]> value_;
  std::size_t held_ = 0;
};

// A threshold as an order. Not above 0, or NaN: everything but zeros passes.
std::uint32_t order_of(double threshold) noexcept;

}  // namespace skim::selectors
