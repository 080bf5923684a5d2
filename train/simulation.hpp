// Simulates the training of a group in one process. There is one model, a gradient and a residual
// per rank, the real selection and exchange, and a virtual clock.
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
  std::int64_t measure_delta = 0;      // measure in every so many steps; 0: never
  std::int64_t measure_constants = 0;  // likewise
};

struct SimulatedStep {
  // Rank 0's record. select, exchange and apply are on the virtual clock. exposed runs from the
  // last rank's begin to the last rank's end. step = compute + exposed, because nothing overlaps
  // and the optimizer takes no time.
  StepRecord record;
  double mean_loss = 0.0;  // over the ranks
  std::uint64_t max_sent_bytes = 0;
  std::size_t union_entries = 0;  // StepReport::union_entries, over all ranks and buckets
  double total_s = 0.0;           // simulated, since the start
  double wall_ms = 0.0;           // on this machine
  // The ratio that the convergence proof of gTop-k assumes to be at most 1 (Shi et al., A
  // Convergence Analysis of Distributed SGD with Communication-Efficient Gradient Sparsification,
  // IJCAI 2019):
  //   sum_b |x_b - s_b|^2  /  sum_b (1 - k_b/n_b) |x_b|^2
  // b runs over the buckets. x is the sum over the ranks of the vectors that they selected from,
  // and s is the exchange's sum. The denominator is the mean of |x - RandK(x)|^2. None if it was
  // not asked for, if the step was skipped, or if nothing could be left out.
  std::optional<double> delta;
  // analysis::one_way_constant and two_way_constant of the vectors that the ranks selected from, on
  // the scale of --memory. None if delta would be none. two_way is also none if everything is sent
  // back.
  std::optional<double> one_way, two_way;
};

// The simulating thread calls these.
struct SimulationObserver {
  std::function<void(const SimulatedStep&)> on_step = {};
  std::function<void(const Evaluation&)> on_evaluation = {};
  OnDecision on_decision = {};
};

struct SimulationSummary {
  Summary run;  // times are medians, defined as in SimulatedStep::record
  double total_s = 0.0, wall_s = 0.0;
  std::shared_ptr<Model> model;  // as last evaluated
};

// Trains like `ranks` ranks of train(). A step computes for options.compute or, if it is none, for
// the measured median over the ranks. With the same options, data and number of torch's threads,
// the parameters are the same, bit for bit. Checkpoints are neither written nor read. Every step
// compares the means that the ranks end with.
// If `stop` becomes true, the simulation ends before the next batch of a rank and discards that
// step.
// Thread: the caller's thread computes; each rank has a thread that exchanges.
// Memory: a gradient, residual and velocity per rank, and the memory of the exchange.
// Throws: InvalidArgument, also if this machine has too little memory; DataError, CommError,
// NonFiniteError; Error that names the ranks whose mean differs from rank 0's.
SimulationSummary simulate(const TrainOptions& options, const Dataset& data,
                           const SimulationOptions& simulation, const std::atomic<bool>& stop,
                           const SimulationObserver& observer);

}  // namespace skim::train
