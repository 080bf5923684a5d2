// The local half of a step: all work on this rank's gradient and residual, wherever their memory
// is. The other half, the exchange, sees only sparse entries in host memory.
//
//   select      residual += gradient; returns the entries to send  (dense: accumulate, whole;
//               indices that ranks share: gather)
//   commit      residual -= sent, residual += returned
//   apply       gradient = factor * sum
//   end_step or rollback_step
//
// make_local_half keeps everything in host memory. For gradients in other memory (Device::other),
// on a GPU for example, give the Reducer a local half of your own in ReducerParts::local.
#pragma once

#include <iosfwd>
#include <memory>
#include <span>

#include "skim/feedback.hpp"
#include "skim/select.hpp"
#include "skim/types.hpp"

namespace skim {

// The Reducer calls these functions for one bucket at a time, in the order above. Not thread-safe.
class LocalHalf {
 public:
  virtual ~LocalHalf() = default;

  // Declares all buckets, or declares them anew: ErrorFeedback::set_layout. Between steps only.
  virtual void set_layout(std::span<const Bucket> buckets) = 0;
  // The declared slots, in the order of their declaration.
  virtual std::span<const Slot> slots() const noexcept = 0;
  // The bucket's parameters, ascending by offset. Throws: InvalidArgument: unknown slot.
  virtual std::span<const Segment> layout(Slot slot) const = 0;

  // Throws: InvalidArgument: select, accumulate and apply do not take this gradient (its device,
  // its type, or null).
  virtual void check(const GradView& grad) const = 0;

  // residual += grad / scale, then mine = the entries to send: at most keep.k of them if at_most_k.
  // grad may be overwritten. mine is overwritten: canonical, in host memory, not yet rounded. In
  // the report, threshold and kept_norm2 describe mine. Its other norms and counts describe this
  // rank's gradient as the caller gave it.
  // Throws: InvalidArgument (nothing changed, but for the velocity of momentum correction, which
  // may have taken the gradient).
  struct Task {
    StepId id;
    GradView grad;  // [n]
    Keep keep;
    bool at_most_k = false;  // drop the smallest entries if the rule selects more
    int ranks = 1;           // P, for local clipping
  };
  virtual SelectReport select(const Task& task, SparseBuffer& mine) = 0;

  // Called after select if the ranks share their indices (SharedIndices): mine = the residual's
  // entries at these indices, zeros too, in host memory, not yet rounded. They take the place of
  // the selection. Override it where residual() is dear.
  // Requires: indices ascend strictly below the slot's length, and a residual is kept.
  virtual void gather(Slot slot, std::span<const Index> indices, SparseBuffer& mine);

  // Called instead of select, for a dense sum: residual += grad / scale.
  virtual SelectReport accumulate(const Task& task) = 0;
  // Called after accumulate. Returns residual and gradient together [n], in host memory that the
  // caller may overwrite. It may be the gradient's own memory. Valid until apply.
  virtual std::span<float> whole(StepId id, const GradView& grad) = 0;

  // residual -= sent, then residual += returned. Returns the change of |residual|^2.
  // Throws: InvalidArgument: unknown slot, a dim that differs.
  virtual double commit(Slot slot, const SparseView& sent, const SparseView& returned) = 0;
  // Says that the whole residual was delivered. It becomes 0 at end_step.
  virtual void commit_all(Slot slot) = 0;

  // grad = factor * sum, in grad's type (scatter() of types.hpp), zeros elsewhere. Returns whether
  // the sum is finite.
  virtual bool apply(StepId id, const SparseView& sum, float factor, const GradView& grad) = 0;
  // The same for a dense sum. `sum` may be the memory that whole() returned.
  virtual bool apply(StepId id, std::span<const float> sum, float factor, const GradView& grad) = 0;
  // Leaves a NaN in grad, for a loss scaler to see (NonFinite::pass_on).
  virtual void apply_nan(const GradView& grad) = 0;

  // end_step makes the step's commits permanent, rollback_step undoes them. ErrorFeedback has the
  // contract.
  virtual void end_step() noexcept = 0;
  virtual void rollback_step() = 0;

  // Saves and loads the state that carries over between steps: residuals by the names of
  // parameters, and the selector's state. load reads the streams of all ranks of the old run, in
  // rank order, as ErrorFeedback::load. With another number of ranks, selectors begin anew. The
  // same happens with size 0: the streams are of single ranks.
  // Throws: StateError; residuals of a damaged part are not taken, but if the selector's part alone
  // is damaged, residuals have been. InvalidArgument: as ErrorFeedback::load; a local half that
  // cannot load parameters one by one, with options that are not strict.
  virtual void save(std::ostream& out) const = 0;
  virtual LoadReport load(std::span<std::istream* const> of_old_ranks, int rank, int size,
                          const LoadOptions& options) = 0;

  // The slot's residual, and the velocity of momentum correction, in the memory where they lie.
  // Empty if none is kept. Valid until set_layout.
  virtual DenseView residual(Slot slot) = 0;
  virtual DenseView velocity(Slot /*slot*/) { return {}; }
  // Whether residuals are kept. Override it where residual() is dear.
  virtual bool keeps_residual(Slot slot) { return !residual(slot).empty(); }

  // The bucket's length. Throws: InvalidArgument: unknown slot.
  std::size_t size(Slot slot) const {
    const std::span<const Segment> parameters = layout(slot);
    return parameters.empty() ? 0 : parameters.back().offset + parameters.back().length;
  }
};

// Makes a local half in host memory, of an ErrorFeedback and a selector. A null selector is made
// from the options.
// Throws: InvalidArgument: an option is out of its range.
std::unique_ptr<LocalHalf> make_local_half(const SelectOptions& select,
                                           const FeedbackOptions& feedback,
                                           std::unique_ptr<Selector> selector = nullptr);

}  // namespace skim
