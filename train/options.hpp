// The options of a training run. train/fields.hpp lists their names on the command line, in config
// files and in JSON.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "skim/local_steps.hpp"
#include "skim/names.hpp"
#include "skim/reducer.hpp"
#include "train/data.hpp"

namespace skim::train {

enum class OptimizerKind : std::uint8_t { sgd, adam, adamw };
enum class LearningRateKind : std::uint8_t { constant, steps, cosine };

// Which examples a rank takes (Sampler).
enum class Split : std::uint8_t { iid, partition, shards };

// The values that residuals accumulate.
enum class Memory : std::uint8_t {
  gradients,
  updates,  // gradients times the learning rate
};

// The seeds that random selection rules use on the ranks.
enum class SelectSeeds : std::uint8_t { same, own };
// What a run does whose loss has diverged (watchdog.hpp).
enum class OnDivergence : std::uint8_t { ignore, stop, rollback };

// The learning rate over a run: linear warm-up, then constant, steps or cosine.
struct LearningRate {
  double base = 0.1;
  LearningRateKind kind = LearningRateKind::constant;
  // Rises linearly from base / steps of the warm-up.
  double warmup_epochs = 0.0;
  std::vector<double> drop_epochs{};  // for steps: multiplies by `gamma` at each
  double gamma = 0.1;

  // The rate of the step that starts at `epoch` (fractional) of `epochs`. cosine falls to 0 at the
  // end.
  double at(double epoch, double epochs, std::int64_t steps_per_epoch) const;
};

// The density of each step: a number, or the rule that chooses it.
struct DensityRule {
  enum class Kind : std::uint8_t { constant, adaptive, capture, accordion, descent_per_bit };
  Kind kind = Kind::constant;
  double value = 0.001;  // the density; capture: the share; accordion: the lower density
  double high = 0.0;     // accordion

  DensityRule() = default;
  DensityRule(double density) : value(density) {}  // NOLINT: implicit on purpose
  bool is_constant() const { return kind == Kind::constant; }
  bool operator==(const DensityRule&) const = default;
};

// The densities of the first epochs.
struct WarmUp {
  enum class Kind : std::uint8_t { none, dgc, gaussiank, gtopk, geometric, list };
  Kind kind = Kind::none;
  double epochs = 0.0;            // geometric
  std::vector<double> densities;  // list: one an epoch
  bool operator==(const WarmUp&) const = default;
};

// The text that people write: "0.001", "accordion=0.001/0.1"; "geometric:4", "0.25,0.0625".
std::string to_text(const DensityRule& rule);
std::string to_text(const WarmUp& warm_up);
// Both throw: InvalidArgument whose message begins with `who`.
DensityRule density_rule(std::string_view text, const std::string& who = "--density");
WarmUp warm_up(std::string_view text, const std::string& who = "--density-warmup");

// Amounts that people write with a unit. 0 means not given.
struct ByteCount {
  double bytes = 0.0;
  bool operator==(const ByteCount&) const = default;
};
struct Duration {
  double seconds = 0.0;
  bool operator==(const Duration&) const = default;
};

struct TrainOptions {
  // What is trained
  std::string model = "lenet5";  // one of model_names()
  DataOptions data;
  Split split = Split::iid;
  std::int64_t shards_per_rank = 2;                               // for the split shards
  std::int64_t layers = 0, hidden = 0, embedding = 0, heads = 0;  // text models; 0: default
  std::int64_t batch = 32;                                        // per rank
  double epochs = 1.0;
  std::int64_t steps = 0;  // if > 0, used instead of epochs
  std::uint64_t seed = 1;  // for parameters, order of examples, augmentation, dropout, selection

  // How it is trained
  OptimizerKind optimizer = OptimizerKind::sgd;
  LearningRate learning_rate;
  double momentum = 0.0, weight_decay = 0.0;
  bool nesterov = false;
  bool bias_decay = true;  // false: no weight decay on biases and normalisation
  double clip_norm = 0.0;  // limit of the norm of the gradient that the optimizer gets; 0: none
  // Steps of a round, in which each rank trains by itself (skim/local_steps.hpp). 0: no rounds; the
  // ranks exchange gradients in every step.
  std::int64_t local_steps = 0;
  LocalStepsOptions local;

  // Exchange. `seed` sets the seeds of these structs.
  SelectOptions select;
  SelectSeeds select_seeds = SelectSeeds::same;
  ExchangeOptions exchange{.kind = ExchangeKind::gtopk};
  // `chooser` chooses the exchange, and exchange.kind is ignored.
  bool automatic = false;
  // `target_time` uses its link and local speeds, too.
  ChooserOptions chooser;
  // With `automatic`, on as many ranks: these choices of an earlier run, in place of `chooser`.
  std::optional<Choices> replay = {};
  FeedbackOptions feedback;
  std::optional<Memory> memory = {};  // none: use memory_of()
  DensityRule density;
  WarmUp density_warmup;
  // For rules other than accordion.
  double density_min = AdaptiveOptions().density_min, density_max = AdaptiveOptions().density_max;
  // Of the result, in (0, 1]; 0: as up. The chooser then has only exchanges with cuts_result().
  double down_density = 0.0;
  // For adaptive. One of these must be > 0. They limit the whole run: bytes sent by the busiest
  // rank, or predicted seconds.
  ByteCount budget;
  Duration target_time;
  std::optional<AdaptiveForm> adaptive_form = {};  // none: use form_of()
  double contraction = AdaptiveOptions().contraction;
  // Forward and backward of a step, for target_time and for a simulation, which measures it if it
  // is none.
  std::optional<Duration> compute = {};
  DenseSum dense_sum = DenseSum::ring;
  std::size_t dense_below = 4096;
  NonFinite non_finite = NonFinite::skip;
  double bucket_mb = 25.0;  // 0: one bucket for the whole model

  // Output
  int threads = 0;                    // per rank; 0: cores of the host / ranks on it
  double eval_epochs = 1.0;           // epochs between evaluations; the end is evaluated, too
  std::int64_t eval_examples = 0;     // of the test set; 0: all
  std::filesystem::path metrics;      // JSON lines; empty: none; "-": standard output
  std::filesystem::path checkpoint;   // folder; empty: none
  std::int64_t checkpoint_steps = 0;  // between checkpoints; 0: only at the end and when stopped
  Duration checkpoint_time;           // between checkpoints; 0: by steps only
  std::int64_t keep = 2;              // checkpoints
  bool resume = false;
  std::int64_t skip_limit = 20;  // skipped steps in a row that end the run; 0: no limit
  OnDivergence on_divergence = OnDivergence::ignore;
  double divergence_factor = 3.0;  // > 1; of Watchdog
};

// Whether every bucket goes dense.
bool is_dense(const TrainOptions& options);
bool is_adaptive(const TrainOptions& options);
// How many steps an exchange is for: those of a round, or 1.
std::int64_t steps_per_exchange(const TrainOptions& options);
// The exchanges of a run of that many steps: one a step, or one a round.
std::int64_t exchanges_of(const TrainOptions& options, std::int64_t steps);
// The exchange's name, or kAuto.
std::string exchange_name(const TrainOptions& options);
// The exchanges that select from the sum, if their options are the defaults.
std::vector<std::string> names_that_cut();
// Throws: InvalidArgument whose message begins with `who`.
void set_exchange(TrainOptions& options, std::string_view name, const std::string& who);

// The length of a run, in steps.
struct RunLength {
  std::int64_t per_epoch = 1, total = 1;
  std::int64_t evaluation = 1;  // from one evaluation to the next

  double epoch(std::int64_t step) const;  // fractional
  double rate(const LearningRate& by, std::int64_t step) const;
};
RunLength run_length(const TrainOptions& options, std::int64_t steps_per_epoch);

// The options of the library's reducer on this rank. A dense exchange delivers everything in every
// step, so it gets no residual and no decay, except for momentum correction. With momentum
// correction, Adam's velocity gets 1 - beta1 of each gradient, unless momentum_dampening is set.
// Throws: InvalidArgument: options that do not go together.
ReducerOptions reducer_options(const TrainOptions& options, int rank = 0);

// The number of ranks that have gradients: all of them, except for a dedicated server (rank 0).
int training_ranks(const TrainOptions& options, int ranks);

// A rollback goes back at least so many steps: to before the recent losses that the watchdog took
// for diverged, which the ranks tell one another at the end of a round of local steps.
std::int64_t rollback_steps(const TrainOptions& options);

// GradView::scale of this step's gradients. Residuals of updates hold gradient times rate, as if
// the gradient were in units of 1 / rate. A rate of 0 counts as a very small rate. With local steps
// it is 1, because what is exchanged are the updates themselves.
float gradient_scale(const TrainOptions& options, double learning_rate);

// The schedule for a group, buckets of these lengths and a run of this length.
// shift: the exchanges of the run minus those that the reducer counts, which differ after a resume
// on another number of ranks; null: 0. The schedule reads it in every step.
// Throws: InvalidArgument, also for options that do not go together.
std::unique_ptr<DensitySchedule> density_schedule(const TrainOptions& options, int ranks = 1,
                                                  std::vector<std::size_t> lengths = {},
                                                  const RunLength& run = {},
                                                  std::shared_ptr<const std::int64_t> shift = {});
// The form of --density adaptive: the named one, or the form whose bound fits the run's feedback.
AdaptiveForm form_of(const TrainOptions& options);
// The named one, gradients or updates. With local steps it is updates. If none is named: updates,
// if the form of --density adaptive is feedback and --optimizer and --local-clip allow it (its
// bound is for updates); otherwise gradients.
Memory memory_of(const TrainOptions& options);
// `local`; where outer_lr is 0 and the plain mean trains better (SGD in rounds of several steps,
// docs/results/quality.md), it has become 1.
LocalStepsOptions outer_step_of(const TrainOptions& options);
// The largest density that the schedule may give.
double largest_density(const TrainOptions& options);

}  // namespace skim::train

namespace skim {
template <>
std::span<const std::string_view> names_of<train::OptimizerKind>() noexcept;
template <>
std::span<const std::string_view> names_of<train::LearningRateKind>() noexcept;
template <>
std::span<const std::string_view> names_of<train::Split>() noexcept;
template <>
std::span<const std::string_view> names_of<train::Memory>() noexcept;
template <>
std::span<const std::string_view> names_of<train::SelectSeeds>() noexcept;
template <>
std::span<const std::string_view> names_of<train::OnDivergence>() noexcept;
}  // namespace skim
