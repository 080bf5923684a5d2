// Error feedback: each step adds to its gradient the entries that earlier steps did not send.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "skim/names.hpp"
#include "skim/types.hpp"

namespace skim {

// How residuals are kept between steps. A step works on floats: those of one slot at a time.
//   f32   4 bytes for each entry
//   bf16  2 bytes. Rounding changes an entry by less than 2^-7 of it, or 2^-133.
//   q8    1 + 1/64 bytes: multiples of a power of two, in blocks of 64 entries. Rounding changes an
//         entry by less than 1/63 of the largest of its block, or 2^-126.
// Rounding is stochastic: the mean of what it makes of an entry is the entry. So the law below
// holds in the mean, and for each entry and step within these bounds. A step that is rolled back
// may round an entry twice.
enum class ResidualCode : std::uint8_t { f32, bf16, q8 };
template <>
std::span<const std::string_view> names_of<ResidualCode>() noexcept;

struct FeedbackOptions {
  bool enabled = true;  // false: no residual is kept ("none", for comparison)

  // The options below are off by default. They change what this rank adds to its residual.

  // Momentum correction (Lin et al., Deep Gradient Compression, ICLR 2018, section 3.2), in [0, 1).
  // 0 turns it off. Each entry has a velocity m, a residual v and a gradient g:
  //   g' = (1 - momentum_dampening) * g
  //   m = momentum_correction * m + g';  v = v + m
  //   with nesterov_correction:  m = momentum_correction * (m + g');  v = v + (m + g')
  // Use it in place of the optimizer's momentum: SGD's, or the first moment of Adam, for which
  // momentum_correction and momentum_dampening are both beta1. It takes one more float per
  // parameter. nesterov_correction takes another float for each entry of the largest bucket.
  float momentum_correction = 0.0F;
  float momentum_dampening = 0.0F;  // in [0, 1)
  bool nesterov_correction = false;
  // Momentum factor masking (section 3.3): m becomes 0 for each entry of this rank that was
  // selected and delivered. An entry was not delivered if the exchange gives it back whole, or if
  // it was rounded to 0. A dense sum masks nothing: no entry waited, so no velocity is stale.
  bool factor_masking = true;
  // Local gradient clipping (section 3.2); 0 turns it off. The gradient of a bucket with n of the
  // model's N entries is scaled down to a norm of at most local_clip * sqrt(n / (P * N)). If one
  // bucket is the whole model, this is the paper's rule. Otherwise each bucket gets its share of
  // that norm.
  float local_clip = 0.0F;
  // v = residual_decay * v + g, in [0, 1]: SelectTask::decay (the error feedback of SparseLoCo,
  // arXiv 2508.15706).
  float residual_decay = 1.0F;
  ResidualCode residual_code = ResidualCode::f32;

  bool operator==(const FeedbackOptions&) const = default;
};

// How a saved state is taken.
struct LoadOptions {
  // If the number of ranks has changed: the factor of the sum over the old ranks, finite and >= 0.
  // Empty: 1/P of the P old ranks, which on all ranks is the mass that the model still has to
  // receive.
  std::optional<float> share = {};
  // false: takes the parameters that are both in the state and in the layout. LoadReport has the
  // others. true: refuses a state of other parameters.
  bool strict = true;
};

// The parameters in which a saved state and the layout differ. Equal on all ranks but for norms.
struct LoadReport {
  std::vector<std::string> missing;  // the layout's, which begin at 0, in the layout's order
  // The state's, which are lost: by name, the norm of what this rank would have got of them. For
  // mass that a server held, it counts as entries of their own.
  std::map<std::string, double> unexpected;

  bool fits() const noexcept { return missing.empty() && unexpected.empty(); }
  // One line: how many parameters differ, and the first ones' names. Empty if fits().
  std::string text() const;
};

// Holds one residual per slot. All residuals lie in one arena, with one float per parameter (see
// ResidualCode) and a table of parameter names. Not thread-safe.
//
// Law: no gradient mass is created or lost. Summed over all ranks,
//   residual_after + held_after + delivered  ==  residual_before + held_before + grad
// `delivered` is the exchange's sum, and `held` is the mass that a stateful exchange keeps. The law
// is tested for every Exchange; at f32 on integer-valued gradients it holds bit by bit. With the
// local options, `grad` is the view that begin() returns, divided by its scale, and residual_before
// is multiplied by `residual_decay`.
class ErrorFeedback {
 public:
  // Throws: InvalidArgument: an option is out of its range, momentum_correction or residual_decay
  // is set without a residual, or momentum_dampening or nesterov_correction without
  // momentum_correction.
  explicit ErrorFeedback(FeedbackOptions options = {});
  ~ErrorFeedback();
  ErrorFeedback(ErrorFeedback&&) noexcept;
  ErrorFeedback& operator=(ErrorFeedback&&) noexcept;

  const FeedbackOptions& options() const noexcept;

  // Declares all buckets. A later call declares them anew: each residual moves with its parameter's
  // name, a parameter that is gone loses its residual, and a new parameter starts at 0.
  // Throws: InvalidArgument (nothing changed) if a slot or a name appears twice, segments overlap
  // or leave a gap, a name has a new length, or a step is open (see end_step).
  void set_layout(std::span<const Bucket> buckets);
  // The declared slots, in the order of their declaration.
  std::span<const Slot> slots() const noexcept;
  // The bucket's parameters, ascending by offset. Throws: InvalidArgument: unknown slot.
  std::span<const Segment> layout(Slot slot) const;
  // The bucket's length. Throws: InvalidArgument: unknown slot.
  std::size_t size(Slot slot) const;

  // The residual of a slot [n]. It is also the accumulator: a Selector adds the gradient to it.
  // Empty if !enabled. Valid until set_layout; with another residual_code than f32, until any other
  // call. Throws: InvalidArgument: unknown slot.
  DenseView residual(Slot slot);
  // The velocity m of a slot [n]; empty without momentum. Valid until set_layout. Errors: as
  // residual().
  DenseView velocity(Slot slot);

  // Prepares this rank's gradient and returns the view that a Selector must add to the residual in
  // this step. With clipping this is grad with another scale. With momentum it is a float32 view of
  // scale 1, valid until the next begin() or commit(). Without both it is grad itself.
  //   grad   [n]  on the CPU, of any type; a non-finite entry counts as 0
  //   norm2  |grad / scale|^2 over the finite entries; used only with local_clip
  //   ranks  P
  // Call it once per slot and step, because it adds the gradient to m. A rollback keeps that
  // addition, as it keeps the gradient in the residual.
  // Cost: O(n) with momentum.
  // Throws: InvalidArgument: unknown slot, another length, not on the CPU.
  GradView begin(Slot slot, GradView grad, double norm2, int ranks);

  // residual -= sent, then residual += returned.
  //   sent      the entries that this rank handed to the exchange, rounded to wire precision
  //   returned  the part of the group's mass that the exchange gave back to this rank
  // With factor_masking the velocity of the entries that were delivered becomes 0.
  // Returns the change of |residual|^2. If !enabled, does nothing and returns 0.
  // Cost: O(nnz). Throws: InvalidArgument: unknown slot, a dim that differs.
  double commit(Slot slot, const SparseView& sent, const SparseView& returned);

  // Says that the whole residual was delivered (a dense sum). end_step() sets the residual to zero.
  // It keeps its values until then, so a rollback needs no copy. The velocity stays as it is.
  void commit_all(Slot slot);

  // A step commits bucket by bucket, and end_step() completes it. rollback_step() undoes the step's
  // commits with a sparse journal, in O(k). The residual then also holds the finite part of this
  // step's gradients, so a step that the trainer skips loses no mass and counts none as delivered.
  // The velocity keeps those gradients too, and none of its entries is masked.
  void end_step() noexcept;
  void rollback_step();

  // Training state by parameter name (little-endian, versioned, checksummed). Call load after
  // set_layout, with the streams that all ranks of the old run saved, in rank order. The buckets
  // may differ from the old run's. With the same number of ranks, each rank takes back its own
  // residual. With another number, this rank gets a share of the sum (LoadOptions). Velocities
  // follow the same rule, and start at 0 if the saved run had none. The report fits if the options
  // are strict.
  // Throws: StateError (nothing changed) if a stream is damaged or foreign, a parameter has another
  // length than in the layout, the old ranks had different parameters, or names do not fit the
  // layout and the options are strict. InvalidArgument (nothing changed): rank is not in [0, size),
  // unless size is 0; a share that is not finite or < 0; a step is open.
  void save(std::ostream& out) const;
  LoadReport load(std::span<std::istream* const> of_old_ranks, int rank, int size,
                  const LoadOptions& options = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace skim
