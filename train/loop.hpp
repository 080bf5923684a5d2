// The code that a training run and its simulation share: the parts of a step that do not depend on
// where the ranks are.
#pragma once

#include <torch/optim/optimizer.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "skim/reducer.hpp"
#include "train/data.hpp"
#include "train/models.hpp"
#include "train/options.hpp"
#include "train/trainer.hpp"

namespace skim::train {

using Clock = std::chrono::steady_clock;
double milliseconds(Clock::duration d);

// Makes the model that the options describe, for this data.
std::shared_ptr<Model> make_model(const TrainOptions& options, const DataInfo& data);
// With momentum correction the optimizer has no momentum, and sgd's weight decay is as large as
// momentum would make it in the long run. (With local steps the updates have the decay in them, so
// momentum correction sums it up, too.)
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const TrainOptions& options, Model& model);
void set_learning_rate(torch::optim::Optimizer& optimizer, double rate);

// The floating-point buffers of a model (batch norm's running statistics), flat.
std::vector<torch::Tensor> float_buffers(Model& model);

// Throws: InvalidArgument, also if the data has no labels and the split is shards.
Sampler make_sampler(const TrainOptions& options, const Dataset& data, int ranks);

// The seed of one rank's dropout masks in one step, for Model::seed_dropout.
std::uint64_t dropout_seed(std::uint64_t seed, std::int64_t step, int rank);

// Scales the mean gradient to a norm of at most `limit`. The result is equal on all ranks, because
// the gradient is.
void clip(const std::vector<torch::Tensor>& buffers, double limit);

// Whether there is neither NaN nor infinity in them.
bool are_finite(const std::vector<torch::Tensor>& buffers);

// Sums over the predictions for a rank's part of the test set. The model must be in evaluation
// mode.
struct TestSums {
  double loss = 0.0, correct = 0.0, predictions = 0.0;
};
// Ends early once `stop` is true. The sums then cover only a part.
TestSums test_part(const TrainOptions& options, const Dataset& data, Model& model, int rank,
                   int ranks, const std::atomic<bool>& stop);

// Counts skipped steps.
class Skips {
 public:
  explicit Skips(std::int64_t limit) : limit_(limit) {}
  // After a step, or a round of local steps.
  // Throws: Error if the limit is reached: the run has diverged.
  void count(bool skipped, std::int64_t step);
  std::uint64_t all = 0;  // in the run

 private:
  std::int64_t limit_;  // in a row; 0: none
  std::int64_t in_a_row_ = 0;
};

// The bytes that each rank sends in a ring all-reduce of n floats.
double ring_bytes(std::size_t n, int ranks);
// Fills in the fields that come from the reports of a step's buckets.
void add_reports(std::span<const StepReport> reports, StepRecord& record);

// The times of a sample of the steps so far: every step of a short run, every 2^j-th of a long one.
// Its memory is bounded.
class StepTimes {
 public:
  // together: the mean of so many steps in a row counts as a step, because one of them exchanges
  // for all.
  explicit StepTimes(std::int64_t together = 1) : together_(together) {}
  void add(const StepRecord& step);
  // Writes the median of each time.
  void medians(StepRecord& to);

 private:
  static constexpr std::array kTimes{&StepRecord::compute_ms,  &StepRecord::select_ms,
                                     &StepRecord::exchange_ms, &StepRecord::apply_ms,
                                     &StepRecord::exposed_ms,  &StepRecord::optimizer_ms,
                                     &StepRecord::step_ms};
  static constexpr std::size_t kMost = 8192;  // steps in the sample
  std::int64_t together_, summed_ = 0;        // summed_: steps in sums_
  std::array<double, kTimes.size()> sums_{};  // as kTimes
  std::array<std::vector<double>, kTimes.size()> of_;
  std::uint64_t steps_ = 0, every_ = 1;
};

// Reports each decision of the chooser once.
class Decisions {
 public:
  // Reports the new decisions about the buckets of a step. Does nothing if `on_decision` is null.
  void tell(std::int64_t step, std::span<const StepReport> reports, const Reducer& reducer,
            const OnDecision& on_decision);

 private:
  std::map<Slot, std::string> told_;
};

std::uint64_t peak_rss_bytes();

}  // namespace skim::train
