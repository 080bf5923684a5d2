// Choosing which k of n gradient entries to send.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "skim/types.hpp"

namespace skim {

enum class SelectAlgo : std::uint8_t {
  exact,  // the k largest magnitudes, always
};
// The names that make_selector's options and the command line know, in enumerator order.
std::span<const std::string_view> select_algo_names() noexcept;

struct SelectOptions {
  SelectAlgo algo = SelectAlgo::exact;
};

struct SelectTask {
  StepId id;
  GradView grad;       // [n]  read only, of any type; any alignment; n < 2^32
  DenseView residual;  // [n]  what was not sent before; or empty: selects from grad alone
  std::span<const Segment> layout;  // the bucket's parameters; may be empty
  Keep keep;                        // 0 <= k <= n
  float decay = 1.0F;               // of the residual, before the addition; in [0, 1]
};

struct SelectReport {
  float threshold = 0.0F;  // smallest magnitude kept; 0 if nothing was kept
  int passes = 0;          // dense passes: full reads of n values
  // Over finite entries, the same bits on every CPU target.
  double kept_norm2 = 0.0;       // |out|^2
  double total_norm2 = 0.0;      // |residual|^2 before anything is taken out; without one, of grad
  double gradient_norm2 = 0.0;   // |grad / scale|^2
  std::uint64_t non_finite = 0;  // entries of grad that were NaN or infinite
};

// Not thread-safe (owns scratch and, per slot, the last threshold); one per thread.
class Selector {
 public:
  virtual ~Selector() = default;
  virtual std::string_view name() const noexcept = 0;

  // residual = decay * residual + grad / scale, computed as grad * (1 / scale); out = its entries
  // of largest magnitude. out is overwritten, canonical, without zeros; residual keeps everything
  // (see ErrorFeedback::commit).
  //
  // Count:  exact -> min(k, number of non-zeros), less those below keep.threshold
  // Ties:   equal magnitudes keep the lower index.
  // NaN:    a non-finite entry of grad adds 0 to residual and is counted; it never enters one. A
  // sum
  //         that overflows is clamped to the largest finite float. Without a residual, non-finite
  //         entries are counted and selected like any other: NaN is larger than infinity.
  // Same inputs and options give the same entries, bit for bit, on every CPU target.
  // Cost:   exact: one dense pass in the steady state, at most 3; no allocation once warm.
  // Throws: InvalidArgument (nothing changed) if k > n, n >= 2^32, lengths or devices differ, the
  //         gradient is not on the CPU, scale or 1 / scale is not finite and > 0, decay is not in
  //         [0, 1], or the threshold is NaN.
  virtual SelectReport select(const SelectTask& task, SparseBuffer& out) = 0;

  // What carries over between steps (thresholds), part of a checkpoint. Results do not depend on it
  // for `exact`, only speed.
  virtual void save(std::ostream&) const {}
  virtual void load(std::istream&) {}
};

std::unique_ptr<Selector> make_selector(const SelectOptions& options);

// The k largest magnitudes of a sparse gradient, by the same rule (ties to the lower index, NaN
// above infinity, zeros are not kept): what a merge keeps. kept and dropped together hold every
// entry of s that is not zero. Both are overwritten, canonical; neither may alias s.
// Cost: O(nnz). Not thread-safe for one scratch.
void split_top_k(const SparseView& s, std::size_t k, SparseBuffer& kept, SparseBuffer& dropped,
                 std::vector<std::uint32_t>& scratch);

}  // namespace skim
