// Error feedback: what was not sent this step is added to the next one.
#pragma once

#include <iosfwd>
#include <memory>
#include <span>

#include "skim/types.hpp"

namespace skim {

struct FeedbackOptions {
  bool enabled = true;  // false: nothing is kept ("none", for comparison)
};

// Holds one residual per slot: one float per parameter, in one arena with a table of parameter
// names. Not thread-safe.
//
// Law (tested for every Exchange; at f32 on integer-valued gradients bit by bit). With `delivered`
// the exchange's sum and `held` what a stateful exchange keeps, over all ranks:
//   residual_after + held_after + delivered  ==  residual_before + held_before + grad
// No gradient mass is created or lost.
class ErrorFeedback {
 public:
  explicit ErrorFeedback(FeedbackOptions options = {});
  ~ErrorFeedback();
  ErrorFeedback(ErrorFeedback&&) noexcept;
  ErrorFeedback& operator=(ErrorFeedback&&) noexcept;

  const FeedbackOptions& options() const noexcept;

  // Declares all buckets, or, after a rebuild, declares them anew: residuals move with the names of
  // their parameters; a parameter that is no longer there loses its residual, a new one starts at
  // 0. Throws: InvalidArgument (nothing changed) if a slot or a name stands twice, segments overlap
  // or leave a gap, a name has a new length, the device is not the CPU, or a step is open (see
  // end_step).
  void set_layout(std::span<const Bucket> buckets, Device device = Device::cpu);
  // The bucket's parameters, ascending by offset. Throws: InvalidArgument: unknown slot.
  std::span<const Segment> layout(Slot slot) const;
  // The bucket's length. Throws: InvalidArgument: unknown slot.
  std::size_t size(Slot slot) const;

  // The residual of a slot [n], which is also the accumulator: a Selector adds the gradient to it.
  // Empty if !enabled. Valid until set_layout. Throws: InvalidArgument: unknown slot.
  DenseView residual(Slot slot);

  // residual -= sent, then residual += returned.
  //   sent      what this rank handed to the exchange, already rounded to wire precision
  //   returned  the part of the group's mass the exchange gave back to this rank
  // Returns the change of |residual|^2. Does nothing and returns 0 if !enabled.
  // Cost: O(nnz). Throws: InvalidArgument: unknown slot, a dim that differs.
  double commit(Slot slot, const SparseView& sent, const SparseView& returned);

  // The whole residual was delivered (a dense sum). It becomes zero at end_step(), so that until
  // then it can be rolled back without a copy.
  void commit_all(Slot slot);

  // A step commits bucket by bucket and is whole only at its end. rollback_step() takes back what
  // was committed since (sparse journal, O(k)): the residual then holds the finite part of this
  // step's gradients too, so nothing of a step that the trainer skips is lost or counted as
  // delivered.
  void end_step() noexcept;
  void rollback_step();

  // Training state, by parameter name (little-endian, versioned, checksummed). load reads what all
  // ranks of the run that saved wrote, in rank order; for the same number of ranks each takes its
  // own back. With another group size, what every rank keeps is (1/P) times the sum over the old
  // P ranks: that is what the model still has to receive. Layout must be set; buckets may differ.
  // Throws: StateError (nothing changed) if a stream is damaged or foreign, or names or lengths do
  // not fit the layout.
  void save(std::ostream& out) const;
  void load(std::span<std::istream* const> of_old_ranks, int rank, int size);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace skim
