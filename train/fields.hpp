// The one list of a training run's options. The command line, config files and the summary come
// from it, and so do the comparisons between ranks and with checkpoints. To add an option, add its
// line here (or in skim/fields.hpp, if the library has it) and the code that uses it.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "skim/fields.hpp"
#include "train/model_options.hpp"
#include "train/options.hpp"

namespace skim::train {

template <auto kNames>
std::vector<std::string> strings_of() {
  const auto names = kNames();
  return {names.begin(), names.end()};
}

template <OptionsOf<TrainOptions> Options, class F>
void each_model_field(Options& o, F&& f) {
  f("model", o.model, FieldInfo{.what = "model", .names = strings_of<model_names>});
  f("data", o.data.name, FieldInfo{.what = "data set", .names = strings_of<data_names>});
  f("data_dir", o.data.dir,
    FieldInfo{.what = "folder that contains the data set's folder, or the text file [$SKIM_DATA]",
              .scope = FieldScope::rank});
  f("batch", o.batch, FieldInfo{"examples per rank and step", kPositive});
  f("epochs", o.epochs,
    FieldInfo{
        .what = "passes over the training set", .range = kPositive, .scope = FieldScope::session});
  f("steps", o.steps,
    FieldInfo{
        .what = "steps, instead of epochs", .range = kPositive, .scope = FieldScope::session});
  f("split", o.split,
    FieldInfo{"iid: every rank draws from all examples; partition: each rank has its own examples, "
              "assigned at random once; shards: each rank has its own, cut from the examples "
              "sorted by label"});
  f("shards_per_rank", o.shards_per_rank,
    FieldInfo{"shards: number of shards for each rank", kPositive});
  f("seed", o.seed,
    FieldInfo{"seed of parameters, order of examples, augmentation, dropout, random selection and "
              "rounding"});
  f("augment", o.data.augment, FieldInfo{"cifar10: random crops and flips"});
  f("sequence_length", o.data.sequence_length,
    FieldInfo{"text: characters in a window", kPositive});
  f("generated_train", o.data.generated_train, FieldInfo{"generated: training images", kPositive});
  f("generated_test", o.data.generated_test, FieldInfo{"generated: test images", kPositive});
  f("layers", o.layers, FieldInfo{"lstm, gpt: layers [lstm 1, gpt 4]", kPositive});
  f("hidden", o.hidden, FieldInfo{"lstm: size of the state [256]", kPositive});
  f("embedding", o.embedding,
    FieldInfo{"lstm, gpt: size of the embedding [lstm 64, gpt 128]", kPositive});
  f("heads", o.heads, FieldInfo{"gpt: attention heads [4]", kPositive});
}

template <OptionsOf<TrainOptions> Options, class F>
void each_optimizer_field(Options& o, F&& f) {
  f("optimizer", o.optimizer,
    FieldInfo{"optimizer of the mean gradient; with --local-steps, of each rank's own gradient"});
  f("lr", o.learning_rate.base, FieldInfo{"learning rate", kPositive});
  f("lr_schedule", o.learning_rate.kind, FieldInfo{"learning rate after the warm-up"});
  f("lr_warmup", o.learning_rate.warmup_epochs,
    FieldInfo{"epochs in which the learning rate rises linearly", kNotNegative});
  f("lr_drops", o.learning_rate.drop_epochs,
    FieldInfo{"steps: epochs at which the learning rate drops", kNotNegative});
  f("lr_gamma", o.learning_rate.gamma, FieldInfo{"steps: factor of a drop", kPositive});
  f("momentum", o.momentum, FieldInfo{"momentum of sgd, applied to the mean gradient", kBelowOne});
  f("nesterov", o.nesterov, FieldInfo{"Nesterov momentum"});
  f("weight_decay", o.weight_decay, FieldInfo{"weight decay", kNotNegative});
  f("bias_decay", o.bias_decay, FieldInfo{"weight decay also on biases and normalisation layers"});
  f("clip_norm", o.clip_norm,
    FieldInfo{"limit of the norm of the gradient that the optimizer gets; 0: none", kNotNegative});
  f("local_steps", o.local_steps,
    FieldInfo{"steps that each rank takes by itself, with its own optimizer, until the ranks "
              "exchange how far their parameters moved [gradients are exchanged in every step]",
              kPositive});
  each_field(o.local, f);
}

template <OptionsOf<TrainOptions> Options, class F>
void each_exchange_field(Options& o, F&& f) {
  const auto of_library = [&](const char* name, auto& member, const FieldInfo& info) {
    const std::string_view is(name);
    if (is == "select_seed" || is == "rounding_seed") return;  // `seed` sets them
    f(name, member, info);
  };
  each_field_or_auto(o.exchange, o.automatic, of_library);
  each_field(o.chooser, of_library);
  each_field(o.select, of_library);
  f("select_seeds", o.select_seeds,
    FieldInfo{"random selection: same seed on all ranks, so that randomk chooses the same indices "
              "on all, or own seeds"});
  f("density", o.density,
    FieldInfo{
        "kept fraction k/n, in (0, 1]; 1 is dense. Or a rule that chooses the density of each "
        "step: adaptive (the least error for a budget: docs/adaptive.md); capture=SHARE (keeps "
        "this fraction of |u|^2); accordion=LOW/HIGH; descent-per-bit"});
  f("density_warmup", o.density_warmup,
    FieldInfo{"densities of the first epochs: none; dgc, gaussiank, gtopk (the lists in their "
              "papers); geometric:EPOCHS; or a list with one density per epoch: 0.25,0.06"});
  each_adaptive_field(o, o.adaptive_form, of_library);
  f("down_density", o.down_density,
    FieldInfo{"density of the result, for exchanges that select from the sum (" +
                  name_list(names_that_cut()) + "); 1: every entry [as --density]",
              kDensityRange});
  f("budget", o.budget,
    FieldInfo{"adaptive: the most that any rank sends over the whole run, as 50MB or 2GB"});
  f("target_time", o.target_time,
    FieldInfo{"adaptive: instead of --budget, limit of the run's predicted time, as 10min; needs "
              "--fit and --compute"});
  f("compute", o.compute,
    FieldInfo{"target-time and skim simulate: time of forward and backward in a step, as 20ms "
              "[skim simulate: the measured median over the ranks]"});
  each_field(o.feedback, of_library);
  f("memory", o.memory,
    FieldInfo{
        "what residuals accumulate: gradients, or updates (gradients times the learning "
        "rate); auto: updates with --density adaptive, if the run allows it, else gradients"});
  each_reducer_field(o, of_library);
  f("bucket_mb", o.bucket_mb,
    FieldInfo{"size of a bucket in 10^6 bytes; 0: one bucket for the whole model", kNotNegative});
}

template <OptionsOf<TrainOptions> Options, class F>
void each_run_field(Options& o, F&& f) {
  using S = FieldScope;
  f("threads", o.threads,
    FieldInfo{.what = "threads per rank [cores of the host / ranks on it]",
              .range = {.low = 1, .high = 1024},
              .scope = S::rank});
  f("eval_epochs", o.eval_epochs,
    FieldInfo{.what = "epochs between evaluations; 0: at the end only",
              .range = kNotNegative,
              .scope = S::session});
  f("eval_examples", o.eval_examples,
    FieldInfo{.what = "test examples to evaluate [all]", .range = kPositive, .scope = S::session});
  f("metrics", o.metrics,
    FieldInfo{.what = "file of JSON lines, one per step; -: standard output",
              .scope = S::rank,
              .is_place = true});
  f("checkpoint", o.checkpoint,
    FieldInfo{.what = "folder for checkpoints: at the end, when stopped, and by "
                      "--checkpoint-steps and --checkpoint-time",
              .scope = S::session,
              .is_place = true});
  f("checkpoint_steps", o.checkpoint_steps,
    FieldInfo{.what = "steps between checkpoints",
              .range = kPositive,
              .scope = S::session,
              .is_place = true});
  f("checkpoint_time", o.checkpoint_time,
    FieldInfo{.what = "time between checkpoints, as 10min", .scope = S::session, .is_place = true});
  f("keep", o.keep,
    FieldInfo{.what = "the number of checkpoints that stay in --checkpoint",
              .range = kPositive,
              .scope = S::session,
              .is_place = true});
  f("resume", o.resume,
    FieldInfo{.what = "continue from the newest good checkpoint in --checkpoint",
              .scope = S::session,
              .is_place = true});
  f("skip_limit", o.skip_limit,
    FieldInfo{.what = "end the run when so many steps in a row were skipped, because gradients "
                      "were NaN or infinite; 0: never",
              .range = kNotNegative,
              .scope = S::session});
  f("on_divergence", o.on_divergence,
    FieldInfo{.what = "when the median of 10 losses is not finite, or far above that of the 200 "
                      "before them: ignore; stop, with the state in --checkpoint; rollback, which "
                      "continues from a checkpoint with other examples",
              .scope = S::session});
  f("divergence_factor", o.divergence_factor,
    FieldInfo{.what = "how many times as large is far above",
              .range = {.low = 1.0, .with_low = false},
              .scope = S::session});
}

template <OptionsOf<TrainOptions> Options, class F>
void each_field(Options& o, F&& f) {
  each_model_field(o, f);
  each_optimizer_field(o, f);
  each_exchange_field(o, f);
  each_run_field(o, f);
}

}  // namespace skim::train
