// What a training run and its simulation share: the parts of a step that do not depend on where
// the ranks are.
#pragma once

#include <torch/optim/optimizer.h>

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

// The model that the options describe, for this data.
std::shared_ptr<Model> make_model(const TrainOptions& options, const DataInfo& data);
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const TrainOptions& options, Model& model);
void set_learning_rate(torch::optim::Optimizer& optimizer, double rate);

// Floating-point buffers of a model (batch norm's running statistics), flat.
std::vector<torch::Tensor> float_buffers(Model& model);

// Throws: InvalidArgument, also for shards of data without labels.
Sampler make_sampler(const TrainOptions& options, const Dataset& data, int ranks);

// The masks of one rank in one step: Model::seed_dropout.
std::uint64_t dropout_seed(std::uint64_t seed, std::int64_t step, int rank);

// Scales the mean gradient to at most `limit` in norm. Equal on all ranks, as the gradient is.
void clip(const std::vector<torch::Tensor>& buffers, double limit);

// A rank's part of the test set, in a model that is in evaluation mode. Sums over its predictions.
struct TestSums {
  double loss = 0.0, correct = 0.0, predictions = 0.0;
};
// Ends early once `stop` is true: the sums are then of a part.
TestSums test_part(const TrainOptions& options, const Dataset& data, Model& model, int rank,
                   int ranks, const std::atomic<bool>& stop);

// What a ring all-reduce of n floats sends, of each rank.
double ring_bytes(std::size_t n, int ranks);
// Fills in what the reports of a step's buckets say.
void add_reports(std::span<const StepReport> reports, StepRecord& record);

// What the chooser decides, told once.
class Decisions {
 public:
  // Tells the decisions about the buckets of a step that are new. Nothing for a null
  // `on_decision`.
  void tell(std::int64_t step, std::span<const StepReport> reports, const Reducer& reducer,
            const OnDecision& on_decision);

 private:
  std::map<Slot, std::string> told_;
};

double median(std::vector<double>& values);  // reorders them; 0 if there are none
std::uint64_t peak_rss_bytes();

}  // namespace skim::train
