// Training as a group would do it, in one process: one model, a gradient and a residual for each
// rank, the real selection and exchange, and time by a virtual clock.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "skim/communicator.hpp"
#include "skim/exchange.hpp"
#include "train/data.hpp"
#include "train/options.hpp"
#include "train/trainer.hpp"

namespace skim::train {

class Model;  // models.hpp

struct SimulationOptions {
  int ranks = 1;
  VirtualTime time = {};
  // Of forward and backward of a step; none: measured, in each step the median over the ranks.
  std::optional<double> compute_s = {};
  std::int64_t measure_delta = 0;      // every so many steps; 0: never
  std::int64_t measure_constants = 0;  // likewise
};

struct SimulatedStep {
  // Of rank 0. select, exchange and apply are on the virtual clock. exposed is from the last rank's
  // begin to the last one's end; step = compute + exposed: nothing overlaps, and the optimizer
  // takes no time.
  StepRecord record;
  double mean_loss = 0.0;  // over the ranks
  std::uint64_t max_sent_bytes = 0;
  std::size_t union_entries = 0;  // StepReport::union_nnz, over all ranks and buckets
  double total_s = 0.0;           // simulated, since the beginning
  double wall_ms = 0.0;           // of this machine
  // With x the sum over the ranks of what each selected from, s the exchange's sum, and buckets b:
  //   sum_b |x_b - s_b|^2  /  sum_b (1 - k_b/n_b) |x_b|^2,
  // the second being the mean of |x - RandK(x)|^2. The convergence proof of gTop-k assumes that it
  // is at most 1 (Shi et al., A Convergence Analysis of Distributed SGD with
  // Communication-Efficient Gradient Sparsification, IJCAI 2019). None where it was not asked for,
  // the step was skipped, or nothing could be left out.
  std::optional<double> delta;
  // analysis::one_way_constant and two_way_constant of what the ranks selected from, on the scale
  // of --memory; none where delta would be none, the second also where everything is sent back.
  std::optional<double> one_way, two_way;
};

// Called by the thread that simulates.
struct SimulationObserver {
  std::function<void(const SimulatedStep&)> on_step = {};
  std::function<void(const Evaluation&)> on_evaluation = {};
  OnDecision on_decision = {};
};

struct SimulationSummary {
  Summary run;  // medians of times as in SimulatedStep::record
  double total_s = 0.0, wall_s = 0.0;
  std::shared_ptr<Model> model;  // as evaluated last
};

// Trains as `ranks` ranks of train() would: with the same options, data and number of torch's
// threads the parameters are the same, bit for bit. Checkpoints are not written or read. The means
// that the ranks end with are compared in every step.
// `stop` becoming true ends it before the next batch of a rank; what the step had is thrown away.
// Thread: the caller's computes; each rank has one that exchanges. Memory: a gradient, residual and
// velocity a rank, and what the exchange holds.
// Throws: InvalidArgument, also if this machine has not the memory; DataError, CommError,
// NonFiniteError; Error that names the ranks whose mean is not rank 0's.
SimulationSummary simulate(const TrainOptions& options, const Dataset& data,
                           const SimulationOptions& simulation, const std::atomic<bool>& stop,
                           const SimulationObserver& observer);

// What an exchange on `ranks` ranks of this process holds at once besides their gradients, in
// bytes: roughly, and rather too much. The most of these kinds.
double exchange_memory(std::span<const ExchangeKind> kinds, int ranks, std::size_t n,
                       std::size_t k);
// Throws: InvalidArgument, "`who` needs about ...: `remedy`", if that is more than this machine has
// to give.
void expect_memory(double bytes, const std::string& who, const std::string& remedy);

}  // namespace skim::train
