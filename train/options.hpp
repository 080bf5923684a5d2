// What a training run is told: one struct, filled by the command line.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "skim/reducer.hpp"
#include "train/data.hpp"

namespace skim::train {

enum class OptimizerKind : std::uint8_t { sgd, adam, adamw };
enum class LearningRateKind : std::uint8_t { constant, steps, cosine };

// The learning rate over a run: linear warm-up, then constant, steps or cosine.
struct LearningRate {
  double base = 0.1;
  LearningRateKind kind = LearningRateKind::constant;
  double warmup_epochs = 0.0;         // rises linearly from base / steps of the warm-up
  std::vector<double> drop_epochs{};  // steps: times `gamma` at each of these
  double gamma = 0.1;

  // At the step that starts at `epoch` (fractional) of `epochs`; cosine falls to 0 at the end.
  double at(double epoch, double epochs, std::int64_t steps_per_epoch) const;
};

struct TrainOptions {
  // What is trained
  std::string model = "lenet5";
  DataOptions data;
  std::string split = "iid";         // which examples a rank takes: of split_names()
  std::int64_t shards_per_rank = 2;  // shards
  std::int64_t layers = 0, hidden = 0, embedding = 0, heads = 0;  // text models; 0: their default
  std::int64_t batch = 32;                                        // per rank
  double epochs = 1.0;
  std::int64_t steps = 0;  // if > 0: instead of epochs
  std::uint64_t seed = 1;  // of parameters, order of examples, augmentation, dropout

  // How
  OptimizerKind optimizer = OptimizerKind::sgd;
  LearningRate learning_rate;
  double momentum = 0.0, weight_decay = 0.0;
  bool nesterov = false;
  bool decay_biases = true;  // false: no weight decay on biases and normalisation
  double clip_norm = 0.0;    // of the mean gradient; 0: none

  // Exchange
  std::string exchange = "gtopk";
  std::string select = "exact";
  double select_threshold = 0.0;      // threshold
  std::size_t select_block = 4096;    // blocktopk
  int select_stages = 0;              // sidco
  std::string select_seeds = "same";  // or "own": what rules draw, on the ranks
  bool per_layer = false;             // select inside every parameter
  std::string drop = "survivors";
  std::string gtopk_form = "butterfly";
  OkTopKOptions oktopk = {};
  std::string inside_hosts = "allgather", between_hosts = "gtopk";  // hierarchical
  std::string server = "rank0";                                     // param-server
  double down_density = 0.0;  // of the result, in (0, 1]; 0: as up
  // What residuals are made of: "gradients", or "updates", gradients times the learning rate.
  // "auto": what memory_of() says.
  std::string memory = "auto";
  std::vector<std::string> auto_among{};  // empty: AutoOptions::among
  // What auto predicts from, on rank 0; none: it measures the link. And what target_s does.
  std::optional<Link> auto_link = {};
  LocalSpeeds auto_local = AutoOptions().local;
  std::string index_code = "auto";  // of frames; auto: the smallest, found for each
  std::string value_code = "f32", rounding = "nearest";  // of values in frames
  std::string feedback = "residual";                     // or "none"
  double momentum_correction = 0.0;                      // FeedbackOptions::momentum, and so on
  bool nesterov_correction = false;
  bool factor_masking = true;
  double local_clip = 0.0;
  double residual_decay = 1.0;
  double density = 0.001;
  // Instead of a number: adaptive, capture=SHARE, accordion=LOW/HIGH, descent-per-bit.
  std::string density_rule{};
  std::string density_warmup = "none";
  double density_min = 1e-4, density_max = 0.25;  // of rules but accordion
  // adaptive: one of these is > 0. Bytes by the busiest rank, and predicted seconds, of the run.
  double budget_bytes = 0.0, target_s = 0.0;
  std::string adaptive_form = "auto";
  double contraction = 1.0;
  double compute_s = 0.0;          // target_s: of forward and backward of a step
  std::string dense_sum = "ring";  // or "mpi"
  std::string non_finite = "skip";
  std::size_t dense_below = 4096;
  double bucket_mb = 25.0;  // 0: one bucket for the whole model

  // Where it goes
  int threads = 0;                    // per rank; 0: cores of the host / ranks on it
  double eval_epochs = 1.0;           // evaluate every so many epochs, and at the end
  std::int64_t eval_examples = 0;     // of the test set; 0: all
  std::filesystem::path metrics;      // JSON lines; empty: none; "-": standard output
  std::filesystem::path checkpoint;   // folder; empty: none
  std::int64_t checkpoint_steps = 0;  // every so many steps; 0: only at the end and when stopped
  bool resume = false;
};

// A run in steps.
struct RunLength {
  std::int64_t per_epoch = 1, total = 1;
  std::int64_t evaluation = 1;  // from one evaluation to the next

  double epoch(std::int64_t step) const;  // fractional
  double rate(const LearningRate& by, std::int64_t step) const;
};
RunLength run_length(const TrainOptions& options, std::int64_t steps_per_epoch);

// What must be equal on all ranks, and between a checkpoint and the run that resumes it.
nlohmann::json identity(const TrainOptions& options);

// Valid names of the options that are names, for messages and help.
std::vector<std::string> split_names();
std::vector<std::string> feedback_names();
std::vector<std::string> memory_choices();         // auto, then gradients and updates
std::vector<std::string> adaptive_form_choices();  // auto, then those of the library
std::vector<std::string> index_code_choices();     // auto, then those of the library
std::vector<std::string> select_seeds_names();
std::vector<std::string> dense_sum_names();
std::vector<std::string> non_finite_names();

// The parts of the library's reducer that the options describe, on this rank. A dense exchange
// delivers everything in every step: a residual, its decay and, unless it matters without anything
// held back, momentum correction are then left out.
// Throws: InvalidArgument that lists the valid names or says what else is wrong.
ReducerOptions reducer_options(const TrainOptions& options, int rank = 0);

// How many of so many ranks have gradients: all, but for a dedicated server, which is rank 0.
int training_ranks(const TrainOptions& options, int ranks);

// The scale of this step's gradients (GradView::scale): residuals of updates hold a gradient times
// the rate, as if it were in units of 1 / rate. A rate of 0 counts as very small.
float gradient_scale(const TrainOptions& options, double learning_rate);

// density or density_rule from `text`. Throws: InvalidArgument, "`who`: 'text' is no density: ...".
void set_density(TrainOptions& options, const std::string& who, const std::string& text);

// For a group, buckets of these lengths and a run of this length. Warm-ups: `none`; `dgc`,
// `gaussiank`, `gtopk` (their papers' lists); `geometric:EPOCHS` (from 0.25); or a list of
// densities, one an epoch: "0.25,0.0625". The run's density follows.
// Throws: InvalidArgument, also for options that do not go together.
std::unique_ptr<DensitySchedule> density_schedule(const TrainOptions& options, int ranks = 1,
                                                  std::vector<std::size_t> lengths = {},
                                                  const RunLength& run = {});
// The form of --density adaptive: as named, or the one whose bound is for the run's feedback.
AdaptiveForm adaptive_form(const TrainOptions& options);
// gradients or updates: as named, or updates where the form of --density adaptive is feedback,
// whose bound is of those, and --optimizer and --local-clip allow it.
std::string memory_of(const TrainOptions& options);
// The largest that the schedule may give.
double largest_density(const TrainOptions& options);

}  // namespace skim::train
