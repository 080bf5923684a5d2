// Internal: the base class of every rule except `exact`.
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

// A rule implements one function, pick(). select() checks the task, prepares the step, calls pick()
// and makes the report.
class Rule : public Selector {
 public:
  explicit Rule(SelectRule rule) noexcept : rule_(rule) {}
  std::string_view name() const noexcept final;
  SelectReport select(const SelectTask& task, SparseBuffer& out) final;

 protected:
  struct Room {
    std::size_t candidates;  // beyond this, only the k largest stay; n: no limit
    std::size_t orders;      // the most entries that keep_largest() or a sample reads
  };
  // For rules that select at most about k entries. Pruning takes O(k) and frees room for k more
  // (see exact.cpp).
  static Room room_for(std::size_t n, std::size_t k);

  virtual Room room(std::size_t n, std::size_t) const { return {n, 0}; }
  // Checks the rule's own preconditions. Throws: InvalidArgument.
  virtual void require(const SelectTask&) const {}
  // Calls accumulate() once, after everything that may throw. Leaves the selection in candidates_,
  // ascending and without zeros. Requires: 0 < k <= n.
  virtual void pick(const SelectTask& task) = 0;

  // Each of these is a pass over all n entries. accumulate() adds the gradient to the residual.
  // collect() reads the result again. Both replace the candidates by the entries above `above` and
  // above keep.threshold.
  void accumulate(std::uint32_t above = kernels::kAboveAll);
  void collect(std::uint32_t above);
  kernels::Moments moments();
  void count_above(std::span<const std::uint32_t> above, std::span<std::size_t> counts);

  // Keeps only the k largest candidates; ties go to the lower index. Returns the order of the k-th.
  // Requires: 0 < k <= count.
  std::uint32_t keep_largest(std::size_t k);
  // The values of the candidates, as input for the loops in statistics.hpp.
  kernels::Pass candidate_values() const noexcept {
    return {.grad = candidates_.value, .n = candidates_.count};
  }
  // |values|^2 over the finite values.
  double norm2() const noexcept { return pass_.residual == nullptr ? sums_.gradient : sums_.total; }

  std::vector<std::uint32_t> orders_;  // scratch
  kernels::Candidates candidates_;
  kernels::Pass pass_;    // the accumulation
  kernels::Pass values_;  // reads the result of pass_ afterwards
  kernels::Sums sums_;
  std::uint32_t floor_ = 0;  // entries up to this order are never candidates: keep.threshold, zeros
  int passes_ = 0;
  bool pruned_ = false;  // whether the last pass dropped candidates because the room was full

 private:
  void collect_all(const kernels::Pass& pass, std::uint32_t above, kernels::Sums& sums);

  SelectRule rule_;
  std::size_t k_ = 0;
  // These arrays never shrink. They are not initialised, because pages that are never written cost
  // no memory.
  std::unique_ptr<Index[]> index_;
  std::unique_ptr<float[]> value_;
  std::size_t capacity_ = 0;  // of both
};

// A threshold as an order. If the threshold is NaN or at most 0, this is 0, which all non-zeros
// exceed.
std::uint32_t order_of(double threshold) noexcept;

}  // namespace skim::selectors
