// Local steps: every rank trains by itself, and the ranks exchange how far their parameters have
// moved. The options give published methods. With outer_lr = 1: with one step a round, error
// feedback of updates (ahead = 0) and step-ahead (ahead = 1; arXiv 2008.05823, 2601.20738); with 30
// steps a round and ahead = 0, SparseLoCo (2508.15706). At density 1 with outer_momentum: DiLoCo
// (2311.08105). docs/pytorch.md ("Local steps") has all their options.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <span>
#include <vector>

#include "skim/reducer.hpp"

namespace skim {

struct LocalStepsOptions {
  double ahead = 1.0;           // in [0, 1]: a
  // >= 0, finite as a float: r. 0: outer_lr_for(), but 1 with outer_momentum.
  double outer_lr = 0.0;
  double outer_momentum = 0.0;  // in [0, 1): b

  bool operator==(const LocalStepsOptions&) const = default;
};

// The factor r of the mean that suits a density: sqrt(P / (1 + (P - 1) density)).
//
// The mean over all P ranks is too small for an entry that few ranks have sent, and the mean over
// the ranks that sent it is too large, because their updates are noisy. On average
// 1 + (P - 1) density ranks send an entry that one rank sends, if they choose independently of each
// other. r times the mean is the geometric mean of both. r is 1 at density 1 and sqrt(P) near 0.
// docs/results/quality.md compares it with other factors: it suits Adam, and rounds of one step of
// SGD. Rounds of several steps of SGD do better with 1.
// Throws: InvalidArgument unless ranks >= 1 and density is in [0, 1].
double outer_lr_for(int ranks, double density);

// All ranks have the same shared parameters x. Each rank has a replica p of them, which its own
// optimizer moves, and a residual e, in the reducer. A round:
//   p = x - a e                       where this rank starts
//   ... the caller's local steps move p ...
//   u = (x - a e) - p                 exchange(): the reducer gets u as gradient
//   m = mean over the ranks of the part of e + u that was sent;  e = the rest
//   x = x - r m                       with b > 0:  v = b v + m;  x = x - r (m + b v)  (Nesterov)
// Where r follows the density, it is that of the bucket in this round: k / n of its StepReport. A
// dedicated server does not count in P.
// x is bitwise equal on all ranks after every round. Between rounds evaluate and save x, not p.
//
// Law: at r = 1, b = 0 no move is created or lost. Over P ranks, P x = sum of e - sum of all u so
// far, if x began at 0.
//
// Memory beyond the reducer's: one float per parameter (x), and another one with outer_momentum.
// Cost beyond the reducer's: O(n) for each bucket and round. Not thread-safe.
class LocalSteps {
 public:
  // The reducer must have its layout, keep it, and outlive this object. Each of its steps is a
  // round, so the caller reduces no bucket.
  // It must not pass NaN on (NonFinite::pass_on), because the NaN would reach x.
  // Throws: InvalidArgument: an option is out of its range.
  LocalSteps(const LocalStepsOptions& options, Reducer& reducer);
  ~LocalSteps();
  LocalSteps(const LocalSteps&) = delete;
  LocalSteps& operator=(const LocalSteps&) = delete;

  // Sets and returns x of a slot [n], which is 0 at first. Between rounds only. All ranks must set
  // equal bits.
  // Throws: InvalidArgument: unknown slot, another length.
  void set_shared(Slot slot, std::span<const float> x);
  std::span<const float> shared(Slot slot) const;
  // Writes x - a e, where this rank starts a round, to replica [n]. Throws: as set_shared.
  void start(Slot slot, std::span<float> replica);

  // Ends a round. Collective.
  //   replicas [slots][n]  in the order of the layout. In: p. Out: where the next round starts.
  //   epoch                the next round's, for schedules
  //   reports              one per slot; overwritten
  // Returns false if a parameter of any rank has become NaN or infinite. x then stays as it was,
  // and the residuals hold the finite moves.
  // Throws: InvalidArgument (nothing changed); NonFiniteError instead of false, with
  // NonFinite::raise: x and replicas are then as after false; CommError and others, as
  // Reducer::wait: replicas then hold no parameters, and x is as before.
  bool exchange(std::span<const std::span<float>> replicas, double epoch,
                std::vector<StepReport>& reports);

  // Saves and loads v, which is equal on all ranks. Save x as the model, and the reducer by itself.
  // load throws: StateError (nothing changed).
  void save(std::ostream& out) const;
  void load(std::istream& in);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace skim
