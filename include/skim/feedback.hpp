// Error feedback: what was not sent this step is added to the next one.
#pragma once

#include <iosfwd>
#include <memory>
#include <span>

#include "skim/types.hpp"

namespace skim {

struct FeedbackOptions {
  bool enabled = true;  // false: nothing is kept ("none", for comparison)

  // Local options, off by default: they change what this rank adds to its residual.
  //
  // Momentum correction (Lin et al., Deep Gradient Compression, ICLR 2018, section 3.2), in [0, 1),
  // 0: off. With velocity m, residual v and gradient g of each entry:
  //   m = momentum_correction * m + g;  v = v + m
  //   with nesterov_correction:  m = momentum_correction * (m + g);  v = v + (m + g)
  // It takes the place of the optimizer's momentum, and one more float per parameter;
  // nesterov_correction another one for each entry of the largest bucket.
  float momentum_correction = 0.0F;
  bool nesterov_correction = false;
  // Momentum factor masking (section 3.3): where an entry of this rank was delivered, m becomes 0.
  // An entry that the exchange gives back whole, or that was rounded to 0, was not.
  bool factor_masking = true;
  // Local gradient clipping (section 3.2), 0: off. A bucket's gradient is scaled down to a norm of
  // at most local_clip * sqrt(n / (P * N)), n of N entries: the paper's rule where one bucket is
  // the whole model, and its share of that norm where it is not.
  float local_clip = 0.0F;
  // v = residual_decay * v + g, in [0, 1]: SelectTask::decay (the error feedback of SparseLoCo,
  // arXiv 2508.15706).
  float residual_decay = 1.0F;
};

// Holds one residual per slot: one float per parameter, in one arena with a table of parameter
// names. Not thread-safe.
//
// Law (tested for every Exchange; at f32 on integer-valued gradients bit by bit). With `delivered`
// the exchange's sum and `held` what a stateful exchange keeps, over all ranks:
//   residual_after + held_after + delivered  ==  residual_before + held_before + grad
// No gradient mass is created or lost. With local options it holds for what they leave: `grad` is
// what begin() returns, over its scale, and residual_before is times `residual_decay`.
class ErrorFeedback {
 public:
  // Throws: InvalidArgument: an option out of its range, or momentum_correction or
  // residual_decay without a residual.
  explicit ErrorFeedback(FeedbackOptions options = {});
  ~ErrorFeedback();
  ErrorFeedback(ErrorFeedback&&) noexcept;
  ErrorFeedback& operator=(ErrorFeedback&&) noexcept;

  const FeedbackOptions& options() const noexcept;

  // Declares all buckets, or, after a rebuild, declares them anew: residuals move with the names of
  // their parameters; a parameter that is no longer there loses its residual, a new one starts at
  // 0. Throws: InvalidArgument (nothing changed) if a slot or a name stands twice, segments overlap
  // or leave a gap, a name has a new length, or a step is open (see end_step).
  void set_layout(std::span<const Bucket> buckets);
  // The slots that are declared, in that order.
  std::span<const Slot> slots() const noexcept;
  // The bucket's parameters, ascending by offset. Throws: InvalidArgument: unknown slot.
  std::span<const Segment> layout(Slot slot) const;
  // The bucket's length. Throws: InvalidArgument: unknown slot.
  std::size_t size(Slot slot) const;

  // The residual of a slot [n], which is also the accumulator: a Selector adds the gradient to it.
  // Empty if !enabled. Valid until set_layout. Throws: InvalidArgument: unknown slot.
  DenseView residual(Slot slot);
  // The velocity m of a slot [n]; empty without momentum. Valid and throws as residual().
  DenseView velocity(Slot slot);

  // What a Selector is to add to the residual in this step for this rank's gradient: grad itself,
  // with another scale where it is clipped; with momentum a float32 view of scale 1, valid until
  // the next begin() or commit(). Without those options it does nothing.
  //   grad   [n]  on the CPU, of any type; a non-finite entry counts as 0
  //   norm2  |grad / scale|^2 over its finite entries; looked at with local_clip only
  //   ranks  P
  // Once per slot and step: m takes the gradient in, and a rollback leaves it there, as it leaves
  // it in the residual.
  // Cost: O(n) with momentum.
  // Throws: InvalidArgument: unknown slot, another length, not on the CPU.
  GradView begin(Slot slot, GradView grad, double norm2, int ranks);

  // residual -= sent, then residual += returned.
  //   sent      what this rank handed to the exchange, already rounded to wire precision
  //   returned  the part of the group's mass the exchange gave back to this rank
  // The velocity becomes 0 where something was delivered (factor_masking).
  // Returns the change of |residual|^2. Does nothing and returns 0 if !enabled.
  // Cost: O(nnz). Throws: InvalidArgument: unknown slot, a dim that differs.
  double commit(Slot slot, const SparseView& sent, const SparseView& returned);

  // The whole residual was delivered (a dense sum). It becomes zero at end_step(), as does the
  // velocity with factor_masking, so that until then it can be rolled back without a copy.
  void commit_all(Slot slot);

  // A step commits bucket by bucket and is whole only at its end. rollback_step() takes back what
  // was committed since (sparse journal, O(k)): the residual then holds the finite part of this
  // step's gradients too, so nothing of a step that the trainer skips is lost or counted as
  // delivered. So does the velocity, and nothing of it is masked.
  void end_step() noexcept;
  void rollback_step();

  // Training state, by parameter name (little-endian, versioned, checksummed). load reads what all
  // ranks of the run that saved wrote, in rank order; for the same number of ranks each takes its
  // own back. With another group size, what every rank keeps is (1/P) times the sum over the old
  // P ranks: that is what the model still has to receive. Velocities likewise; where the saved run
  // had none they start at 0. Layout must be set; buckets may differ.
  // Throws: StateError (nothing changed) if a stream is damaged or foreign, or names or lengths do
  // not fit the layout.
  void save(std::ostream& out) const;
  void load(std::span<std::istream* const> of_old_ranks, int rank, int size);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace skim
