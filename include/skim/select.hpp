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

// Rules for selecting entries. "count" is the number of entries that a rule selects. A rule is
// "ordered" if every entry that it keeps is at least as large as every entry that it drops. z is
// the number of non-zeros; with keep.threshold > 0, the number of entries at least that large.
// docs/algorithms.md, "Selectors", describes the rules, their passes and their sources.
//
//   rule                count                                    ordered
//   exact               min(k, z)                                yes; ties: the lower index
//   gaussian            ceil(2k/3) to floor(4k/3); z if less     yes; ties: the lower index
//   gaussian_two_sided  0 to z; aims at k                        yes; equal entries: all or none
//   gaussian_one_sided  0 to z; aims at k                        yes; equal entries: all or none
//   dgc                 ceil(0.8 k) to k; z if less              yes; ties: the lower index
//   redsync             0 to z; aims at k to 2k                  yes; equal entries: all or none
//   redsync_trim        min(k, z) to z                           yes; equal entries: all or none
//   sidco               0 to z; aims at k                        yes; equal entries: all or none
//   mstopk              min(k, z)                                except a run near the threshold
//   threshold           all that reach it, for any k > 0         yes
//   randomk             k minus the zeros that were drawn        no
//   blocktopk           k; less if a chunk has few non-zeros     in each chunk; ties: lower index
enum class SelectRule : std::uint8_t {
  exact,
  gaussian,            // Gaussian_k in a robust form
  gaussian_two_sided,  // as in the authors' released code
  gaussian_one_sided,  // as in their paper
  dgc,                 // takes the threshold from a sample
  redsync,
  redsync_trim,
  sidco,      // takes the threshold from an exponential fit
  mstopk,     // finds the threshold by bisection
  threshold,  // has a fixed threshold
  randomk,
  blocktopk,  // exact in each chunk
};
// The names that make_selector's options and the command line know, in enumerator order.
template <>
std::span<const std::string_view> names_of<SelectRule>() noexcept;

struct SelectOptions {
  SelectRule rule = SelectRule::exact;
  // dgc, mstopk, randomk: the seed of their random draws. A draw depends only on the seed, the step
  // and the slot, so ranks with the same seed draw alike (randomk: the same indices).
  std::uint64_t seed = 0;
  float threshold = 0.0F;    // threshold: >= 0; the larger of this and keep.threshold counts
  std::size_t block = 4096;  // blocktopk: entries of a chunk, > 0; the last one may be shorter
  int stages = 0;            // sidco: >= 1; 0: starts at 1 and adapts to the counts achieved
  // Applies the rule to each parameter of the bucket (SelectTask::layout) instead of to the whole
  // bucket. Each parameter gets a part of k in proportion to its length, by largest remainder, ties
  // to the lower offset. The parts sum to k. The promised counts then hold for each parameter.
  bool per_parameter = false;

  bool operator==(const SelectOptions&) const = default;
};

struct SelectTask {
  StepId id = {};
  GradView grad = {};  // [n]  of any type; any alignment; n < 2^32; read only, unless clear is set
  DenseView residual = {};  // [n]  entries not sent before; or empty: selects from grad alone
  std::span<const Segment> layout = {};  // the bucket's parameters; may be empty
  Keep keep = {};                        // 0 <= k <= n
  float decay = 1.0F;  // in [0, 1]; multiplies the residual before the gradient is added
  // Allows the selector to overwrite grad with zeros in the pass that reads it, if there is a
  // residual. The selector does so if few entries are kept, because clearing grad later costs more
  // then. SelectReport::cleared says whether it did.
  bool clear = false;
};

struct SelectReport {
  float threshold = 0.0F;  // smallest magnitude kept; 0 if nothing was kept
  int passes = 0;          // reads of all n values; per_parameter: the most for any parameter
  // The norms cover finite entries only. They have the same bits on every CPU target.
  double kept_norm2 = 0.0;       // |out|^2
  double total_norm2 = 0.0;      // |residual|^2 before entries are removed; without one, of grad
  double gradient_norm2 = 0.0;   // |grad / scale|^2
  std::uint64_t non_finite = 0;  // entries of grad that were NaN or infinite
  bool cleared = false;          // grad is all zeros now (SelectTask::clear)
};

// Not thread-safe, because it owns scratch memory and the last threshold of each slot. Use one per
// thread. Scratch memory is O(k), for randomk n bits, for dgc n/8 bytes. Rules that may select
// every entry reserve O(n) address space, but touch only as much of it as they select.
class Selector {
 public:
  virtual ~Selector() = default;
  virtual std::string_view name() const noexcept = 0;

  // residual = decay * residual + grad / scale, computed as grad * (1 / scale). Then `out` gets the
  // entries of the residual that the rule selects. `out` is overwritten, canonical and without
  // zeros. The residual keeps all its entries; ErrorFeedback::commit subtracts the sent ones.
  //
  // Count, ties: SelectRule. k = 0 selects nothing.
  // NaN:    A non-finite entry of grad adds 0 to the residual and is counted, so a residual never
  //         holds one. A sum that overflows is clamped to the largest finite float. Without a
  //         residual, non-finite entries are counted and selected like any other: NaN is larger
  //         than infinity.
  // Same inputs, options and state give the same entries, bit for bit, on every CPU target.
  // Cost:   exact: one dense pass in the steady state, at most 3; no allocation once warm.
  // Throws: InvalidArgument (nothing changed):
  //         - k > n, n >= 2^32, or lengths or devices differ;
  //         - the gradient is not on the CPU;
  //         - scale or 1 / scale is not finite and > 0, or decay is not in [0, 1];
  //         - the threshold is NaN; for `threshold`, neither of its two thresholds is > 0;
  //         - for per_parameter, a layout that is not empty does not cover [0, n) in ascending
  //           order without overlap, the slot is above 65535, or there are more than 65536
  //           parameters.
  virtual SelectReport select(const SelectTask& task, SparseBuffer& out) = 0;

  // The state that carries over between steps, as part of a checkpoint: the thresholds of exact and
  // gaussian, the stages of sidco. For `exact` the state affects only speed, not results. load
  // needs the options that saved the state. Throws: StateError (nothing changed).
  virtual void save(std::ostream&) const {}
  virtual void load(std::istream&) {}
};

// Throws: InvalidArgument: an option is out of its range.
std::unique_ptr<Selector> make_selector(const SelectOptions& options);

// Does only the step that every rule does before it selects: residual = decay * residual + grad /
// scale, and the report. It selects nothing and ignores task.keep and task.layout. Without a
// residual it only measures. Cost: one dense pass. Throws: InvalidArgument as Selector::select.
SelectReport accumulate(const SelectTask& task);

// Splits a sparse gradient as a merge does: `kept` gets the k largest magnitudes by the rule of
// `exact` (ties to the lower index, NaN above infinity), `dropped` the rest. Neither gets zeros.
// Both are overwritten and canonical, and neither may alias s.
// Cost: O(nnz). Use one scratch per thread.
void split_top_k(const SparseView& s, std::size_t k, SparseBuffer& kept, SparseBuffer& dropped,
                 std::vector<std::uint32_t>& scratch);

}  // namespace skim
