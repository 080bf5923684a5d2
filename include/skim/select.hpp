// Choosing which k of n gradient entries to send.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "skim/names.hpp"
#include "skim/types.hpp"

namespace skim {

// How many entries a rule selects, and whether what it keeps is at least as large as what it drops.
// z is the number of non-zeros (with keep.threshold > 0, of entries at least that large). What the
// rules do, their passes and their sources: docs/algorithms.md, "Selectors".
//
//   rule                count                                    ordered
//   exact               min(k, z)                                yes; ties: the lower index
//   gaussian            ceil(2k/3) to floor(4k/3); z if less     yes; ties: the lower index
//   gaussian_two_sided  0 to z; aims at k                        yes; all or none of equal ones
//   gaussian_one_sided  0 to z; aims at k                        yes; all or none of equal ones
//   dgc                 ceil(0.8 k) to k; z if less              yes; ties: the lower index
//   redsync             0 to z; aims at k to 2k                  yes; all or none of equal ones
//   redsync_trim        min(k, z) to z                           yes; all or none of equal ones
//   sidco               0 to z; aims at k                        yes; all or none of equal ones
//   mstopk              min(k, z)                                but for a run near the threshold
//   threshold           all that reach it, whatever k > 0 is     yes
//   randomk             k less the zeros that were drawn         no
//   blocktopk           k less what chunks lack in non-zeros     in each chunk; ties: lower index
enum class SelectAlgo : std::uint8_t {
  exact,
  gaussian,            // Gaussian_k in a robust form
  gaussian_two_sided,  // as its authors released it
  gaussian_one_sided,  // as their paper has it
  dgc,                 // threshold from a sample
  redsync,
  redsync_trim,
  sidco,      // threshold from an exponential fit
  mstopk,     // bisection
  threshold,  // a fixed one
  randomk,
  blocktopk,  // exact in each chunk
};
// The names that make_selector's options and the command line know, in enumerator order.
template <>
std::span<const std::string_view> names_of<SelectAlgo>() noexcept;

struct SelectOptions {
  SelectAlgo algo = SelectAlgo::exact;
  // dgc, mstopk, randomk: what they draw depends on it, the step and the slot alone, so ranks with
  // one seed draw alike (for randomk: the same indices).
  std::uint64_t seed = 0;
  float threshold = 0.0F;    // threshold: >= 0; the larger of it and keep.threshold counts
  std::size_t block = 4096;  // blocktopk: entries of a chunk, > 0; the last one may be shorter
  int stages = 0;            // sidco: >= 1; 0: from 1, adapted to the counts achieved
  // Selects inside every parameter of the bucket (SelectTask::layout), not over all of it. k is
  // shared out in proportion to length, by largest remainder, ties to the lower offset, and sums to
  // k. Counts are then promised for every parameter.
  bool per_parameter = false;
};

struct SelectTask {
  StepId id = {};
  GradView grad = {};       // [n]  read only (but see clear), of any type; any alignment; n < 2^32
  DenseView residual = {};  // [n]  what was not sent before; or empty: selects from grad alone
  std::span<const Segment> layout = {};  // the bucket's parameters; may be empty
  Keep keep = {};                        // 0 <= k <= n
  float decay = 1.0F;                    // of the residual, before the addition; in [0, 1]
  // With a residual, grad may be overwritten by zeros behind the pass that reads it. Where few
  // entries are kept that is cheaper than later, and done: SelectReport::cleared says whether.
  bool clear = false;
};

struct SelectReport {
  float threshold = 0.0F;  // smallest magnitude kept; 0 if nothing was kept
  int passes = 0;          // dense passes: full reads of n values; per_parameter: the most of any
  // Over finite entries, the same bits on every CPU target.
  double kept_norm2 = 0.0;       // |out|^2
  double total_norm2 = 0.0;      // |residual|^2 before anything is taken out; without one, of grad
  double gradient_norm2 = 0.0;   // |grad / scale|^2
  std::uint64_t non_finite = 0;  // entries of grad that were NaN or infinite
  bool cleared = false;          // grad is all zeros now (SelectTask::clear)
};

// Not thread-safe (owns scratch and, per slot, the last threshold); one per thread. Scratch is
// O(k), but O(n) address space for rules that may select all, of which they touch what they select.
class Selector {
 public:
  virtual ~Selector() = default;
  virtual std::string_view name() const noexcept = 0;

  // residual = decay * residual + grad / scale, computed as grad * (1 / scale); out = what the rule
  // takes of its entries. out is overwritten, canonical, without zeros; residual keeps everything
  // (see ErrorFeedback::commit).
  //
  // Count, ties: SelectAlgo. k = 0 selects nothing.
  // NaN:    a non-finite entry of grad adds 0 to residual and is counted; it never enters one. A
  //         sum that overflows is clamped to the largest finite float. Without a residual,
  //         non-finite entries are counted and selected like any other: NaN is larger than
  //         infinity.
  // Same inputs, options and state give the same entries, bit for bit, on every CPU target.
  // Cost:   exact: one dense pass in the steady state, at most 3; no allocation once warm.
  // Throws: InvalidArgument (nothing changed) if k > n, n >= 2^32, lengths or devices differ, the
  //         gradient is not on the CPU, scale or 1 / scale is not finite and > 0, decay is not in
  //         [0, 1], or the threshold is NaN; for `threshold`, if none is > 0; for per_parameter, if
  //         a layout that is not empty does not cover [0, n) in ascending order without overlap, or
  //         the slot is above 65535, or there are more than 65536 parameters.
  virtual SelectReport select(const SelectTask& task, SparseBuffer& out) = 0;

  // What carries over between steps, part of a checkpoint: thresholds of exact and gaussian, stages
  // of sidco. Results of `exact` do not depend on it, only speed. load reads what the same options
  // saved. Throws: StateError (nothing changed).
  virtual void save(std::ostream&) const {}
  virtual void load(std::istream&) {}
};

// Throws: InvalidArgument for options outside their range.
std::unique_ptr<Selector> make_selector(const SelectOptions& options);

// What every rule does before it picks, alone: residual = decay * residual + grad / scale, and the
// report. Selects nothing; task.keep and task.layout are not looked at. Without a residual it only
// measures. Cost: one dense pass. Throws: InvalidArgument as Selector::select.
SelectReport accumulate(const SelectTask& task);

// The k largest magnitudes of a sparse gradient, by the same rule (ties to the lower index, NaN
// above infinity, zeros are not kept): what a merge keeps. kept and dropped together hold every
// entry of s that is not zero. Both are overwritten, canonical; neither may alias s.
// Cost: O(nnz). Not thread-safe for one scratch.
void split_top_k(const SparseView& s, std::size_t k, SparseBuffer& kept, SparseBuffer& dropped,
                 std::vector<std::uint32_t>& scratch);

}  // namespace skim
