// Options as JSON, as parts of the reducer, as schedules.
#include "train/options.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <numeric>
#include <optional>
#include <utility>

#include "skim/error.hpp"
#include "skim/version.hpp"
#include "train/random.hpp"

namespace skim::train {
namespace {

constexpr std::string_view kAuto = "auto";

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& n : names) text += (text.empty() ? "" : ", ") + n;
  return text;
}

std::vector<std::string> auto_and(std::span<const std::string_view> names) {
  std::vector<std::string> all{std::string(kAuto)};
  all.insert(all.end(), names.begin(), names.end());
  return all;
}

constexpr std::string_view kGradients = "gradients", kUpdates = "updates";
bool holds_updates(const TrainOptions& o) { return memory_of(o) == kUpdates; }

template <class Names>
std::size_t index_of(const std::string& name, const Names& names, const char* option) {
  const auto found = std::ranges::find(names, name);
  if (found == std::ranges::end(names)) {
    throw InvalidArgument(std::string(option) + ": unknown name '" + name + "', expected one of " +
                          join({std::ranges::begin(names), std::ranges::end(names)}));
  }
  return static_cast<std::size_t>(found - std::ranges::begin(names));
}

std::optional<double> number(std::string_view text) {
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

double number_of_warmup(std::string_view text, const std::string& whole) {
  if (const std::optional<double> value = number(text)) return *value;
  throw InvalidArgument("--density-warmup: '" + std::string(text) + "' in '" + whole +
                        "' is no number; expected none, dgc, gaussiank, gtopk, geometric:EPOCHS "
                        "or a list of densities such as 0.25,0.0625");
}

constexpr std::string_view kAdaptive = "adaptive", kDescentPerBit = "descent-per-bit";
constexpr std::string_view kCapture = "capture=", kAccordion = "accordion=";

bool is_share(const std::optional<double>& x) { return x && *x > 0.0 && *x < 1.0; }
bool is_density(const std::optional<double>& x) { return x && *x > 0.0 && *x <= 1.0; }

// The numbers of a rule, behind its name. None: they are not what it needs.
std::optional<double> share_of_capture(std::string_view rule) {
  const std::optional<double> share = number(rule.substr(kCapture.size()));
  return is_share(share) ? share : std::nullopt;
}
std::optional<std::pair<double, double>> levels_of_accordion(std::string_view rule) {
  const std::string_view levels = rule.substr(kAccordion.size());
  const std::size_t slash = std::min(levels.find('/'), levels.size());
  const auto low = number(levels.substr(0, slash));
  const auto high = number(levels.substr(std::min(slash + 1, levels.size())));
  if (!is_density(low) || !is_density(high) || *low > *high) return std::nullopt;
  return std::pair{*low, *high};
}

// What does not go together with density_rule.
void expect_possible(const TrainOptions& o, const ReducerOptions& r) {
  const std::string rule = "--density " + o.density_rule;
  if (o.density_warmup != "none") {
    throw InvalidArgument(rule + " has no warm-up: --density-warmup goes with a number");
  }
  if (o.density_min > o.density_max) {
    throw InvalidArgument("--density-min is above --density-max");
  }
  if (o.density_rule == kDescentPerBit && r.exchange.kind == ExchangeKind::automatic) {
    throw InvalidArgument(rule + ": --exchange auto has no cost to compare densities by");
  }
  if (o.density_rule != kAdaptive) return;
  if (!(o.budget_bytes > 0.0) && !(o.target_s > 0.0)) {
    throw InvalidArgument(rule + " needs --budget or --target-time");
  }
  if (o.budget_bytes > 0.0 && o.target_s > 0.0) {
    throw InvalidArgument("--budget and --target-time exclude each other");
  }
  const bool may_go_dense =
      r.exchange.kind == ExchangeKind::automatic &&
      std::ranges::count(choices(r.exchange.automatic), ExchangeKind::dense) > 0;
  if (o.budget_bytes > 0.0 && may_go_dense) {
    throw InvalidArgument(
        "--budget: --exchange auto may go dense, whatever the density; leave dense out of "
        "--auto-among");
  }
  if (o.target_s > 0.0 && (!o.auto_link || !(o.compute_s > 0.0))) {
    throw InvalidArgument(
        "--target-time goes by predictions: it needs the link (--fit FILE) and --compute TIME");
  }
}

std::unique_ptr<DensitySchedule> rule_schedule(const TrainOptions& o, int ranks,
                                               std::vector<std::size_t> lengths,
                                               const RunLength& run) {
  const ReducerOptions r = reducer_options(o);
  expect_possible(o, r);
  const std::string_view rule = o.density_rule;
  if (rule.starts_with(kCapture)) {
    return capture_density(share_of_capture(rule).value(), o.density_min, o.density_max);
  }
  if (rule.starts_with(kAccordion)) {
    const auto [low, high] = levels_of_accordion(rule).value();
    return accordion_density(low, high);
  }
  if (rule == kDescentPerBit) {
    return descent_per_bit_density(most_bytes(r, ranks, std::move(lengths), o.down_density),
                                   o.density_min, o.density_max);
  }
  const bool in_bytes = o.budget_bytes > 0.0;
  const std::size_t n = std::accumulate(lengths.begin(), lengths.end(), std::size_t{0});
  AdaptiveOptions a{.form = adaptive_form(o),
                    .budget = in_bytes ? o.budget_bytes : o.target_s,
                    .cost = {},
                    .in_bytes = in_bytes,
                    .density_min = o.density_min,
                    .density_max = o.density_max,
                    .contraction = o.contraction,
                    .learning_rate =
                        [run, rate = o.learning_rate](std::uint64_t step) {
                          return run.rate(rate, static_cast<std::int64_t>(step));
                        },
                    .norms_of_updates = holds_updates(o),
                    .n = std::max<std::size_t>(1, n),
                    .ranks = ranks};
  a.cost = in_bytes ? most_bytes(r, ranks, std::move(lengths), o.down_density)
                    : predicted_seconds(r, ranks, std::move(lengths), o.compute_s, *o.auto_link,
                                        o.auto_local, o.down_density);
  return adaptive_density(std::move(a));
}

std::unique_ptr<DensitySchedule> up_schedule(const TrainOptions& o, int ranks,
                                             std::vector<std::size_t> lengths,
                                             const RunLength& run) {
  const std::string& spec = o.density_warmup;
  if (o.exchange == "dense") return constant_density(1.0);
  if (!o.density_rule.empty()) return rule_schedule(o, ranks, std::move(lengths), run);
  if (spec == "none") return constant_density(o.density);
  if (spec == "dgc") return listed_density(dgc_warm_up(), o.density);
  if (spec == "gaussiank") return listed_density(gaussiank_warm_up(), o.density);
  if (spec == "gtopk") return listed_density(gtopk_warm_up(), o.density);
  constexpr std::string_view kGeometric = "geometric:";
  if (spec.starts_with(kGeometric)) {
    const double epochs = number_of_warmup(std::string_view(spec).substr(kGeometric.size()), spec);
    return geometric_density(std::max(0.25, o.density), o.density, epochs);
  }
  std::vector<double> list;
  std::string_view rest = spec;
  while (true) {
    const std::size_t comma = rest.find(',');
    list.push_back(number_of_warmup(rest.substr(0, comma), spec));
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  return listed_density(std::move(list), o.density);
}

}  // namespace

double LearningRate::at(double epoch, double epochs, std::int64_t steps_per_epoch) const {
  double factor = 1.0;
  if (kind == LearningRateKind::steps) {
    for (const double drop : drop_epochs) factor *= epoch >= drop ? gamma : 1.0;
  } else if (kind == LearningRateKind::cosine && epochs > 0.0) {
    factor = 0.5 * (1.0 + std::cos(std::numbers::pi * std::min(1.0, epoch / epochs)));
  }
  if (epoch < warmup_epochs) {
    const double step = 1.0 / static_cast<double>(steps_per_epoch);
    factor *= std::min(1.0, (epoch + step) / warmup_epochs);
  }
  return base * factor;
}

double RunLength::epoch(std::int64_t step) const {
  return static_cast<double>(step) / static_cast<double>(per_epoch);
}
double RunLength::rate(const LearningRate& by, std::int64_t step) const {
  return by.at(epoch(step), epoch(total), per_epoch);
}

RunLength run_length(const TrainOptions& o, std::int64_t steps_per_epoch) {
  const auto per_epoch = static_cast<double>(steps_per_epoch);
  const auto steps = [&](double epochs) {
    return std::max<std::int64_t>(1, std::llround(epochs * per_epoch));
  };
  const std::int64_t total = o.steps > 0 ? o.steps : steps(o.epochs);
  return {.per_epoch = steps_per_epoch,
          .total = total,
          .evaluation = o.eval_epochs > 0.0 ? steps(o.eval_epochs) : total};
}

std::vector<std::string> split_names() { return {"iid", "partition", "shards"}; }
std::vector<std::string> feedback_names() { return {"residual", "none"}; }
std::vector<std::string> memory_choices() {
  return auto_and(std::array<std::string_view, 2>{kGradients, kUpdates});
}
std::vector<std::string> adaptive_form_choices() { return auto_and(adaptive_form_names()); }
std::vector<std::string> index_code_choices() { return auto_and(index_code_names()); }
std::vector<std::string> select_seeds_names() { return {"same", "own"}; }
std::vector<std::string> dense_sum_names() { return {"ring", "mpi"}; }
std::vector<std::string> non_finite_names() { return {"skip", "raise", "pass"}; }

nlohmann::json identity(const TrainOptions& o) {
  return {
      {"version", SKIM_VERSION},
      {"model", o.model},
      {"data", o.data.name},
      {"sequence_length", o.data.sequence_length},
      {"augment", o.data.augment},
      {"generated_train", o.data.generated_train},
      {"split", o.split},
      {"shards_per_rank", o.shards_per_rank},
      {"layers", o.layers},
      {"hidden", o.hidden},
      {"embedding", o.embedding},
      {"heads", o.heads},
      {"batch", o.batch},
      {"seed", o.seed},
      {"optimizer", static_cast<int>(o.optimizer)},
      {"lr", o.learning_rate.base},
      {"lr_schedule", static_cast<int>(o.learning_rate.kind)},
      {"lr_warmup", o.learning_rate.warmup_epochs},
      {"lr_drops", o.learning_rate.drop_epochs},
      {"lr_gamma", o.learning_rate.gamma},
      {"momentum", o.momentum},
      {"weight_decay", o.weight_decay},
      {"nesterov", o.nesterov},
      {"decay_biases", o.decay_biases},
      {"clip_norm", o.clip_norm},
      {"exchange", o.exchange},
      {"select", o.select},
      {"select_threshold", o.select_threshold},
      {"select_block", o.select_block},
      {"select_stages", o.select_stages},
      {"select_seeds", o.select_seeds},
      {"per_layer", o.per_layer},
      {"drop", o.drop},
      {"gtopk_form", o.gtopk_form},
      {"oktopk_exact", o.oktopk.exact},
      {"oktopk_cut_every", o.oktopk.cut_every},
      {"oktopk_regions_every", o.oktopk.regions_every},
      {"inside_hosts", o.inside_hosts},
      {"between_hosts", o.between_hosts},
      {"server", o.server},
      {"down_density", o.down_density},
      {"memory", o.memory},
      {"auto_among", o.auto_among},
      {"value_code", o.value_code},
      {"rounding", o.rounding},
      {"feedback", o.feedback},
      {"momentum_correction", o.momentum_correction},
      {"nesterov_correction", o.nesterov_correction},
      {"factor_masking", o.factor_masking},
      {"local_clip", o.local_clip},
      {"residual_decay", o.residual_decay},
      {"density", o.density},
      {"density_rule", o.density_rule},
      {"density_warmup", o.density_warmup},
      {"density_min", o.density_min},
      {"density_max", o.density_max},
      {"budget_bytes", o.budget_bytes},
      {"target_s", o.target_s},
      {"adaptive_form", o.adaptive_form},
      {"contraction", o.contraction},
      {"compute_s", o.compute_s},
      {"dense_sum", o.dense_sum},
      {"non_finite", o.non_finite},
      {"dense_below", o.dense_below},
      {"bucket_mb", o.bucket_mb},
  };
}

ReducerOptions reducer_options(const TrainOptions& o, int rank) {
  ReducerOptions r;
  r.select.algo = static_cast<SelectAlgo>(index_of(o.select, select_algo_names(), "--select"));
  const bool same_seeds = index_of(o.select_seeds, select_seeds_names(), "--select-seeds") == 0;
  r.select.seed = same_seeds ? o.seed : mix(mix(o.seed) + static_cast<std::uint64_t>(rank));
  r.select.threshold = static_cast<float>(o.select_threshold);
  r.select.block = o.select_block;
  r.select.stages = o.select_stages;
  r.select.per_parameter = o.per_layer;
  if (r.select.algo == SelectAlgo::threshold && !(r.select.threshold > 0.0F)) {
    throw InvalidArgument("--select threshold needs --select-threshold > 0");
  }
  r.exchange.kind =
      static_cast<ExchangeKind>(index_of(o.exchange, exchange_kind_names(), "--exchange"));
  r.exchange.drop = static_cast<DropPolicy>(index_of(o.drop, drop_policy_names(), "--drop"));
  r.exchange.gtopk_form =
      static_cast<GTopKForm>(index_of(o.gtopk_form, gtopk_form_names(), "--gtopk-form"));
  r.exchange.oktopk = o.oktopk;
  const auto kind_of = [](const std::string& name, const char* option) {
    return static_cast<ExchangeKind>(index_of(name, exchange_kind_names(), option));
  };
  r.exchange.hierarchy = {.inside = kind_of(o.inside_hosts, "--inside-hosts"),
                          .between = kind_of(o.between_hosts, "--between-hosts")};
  r.exchange.server.placement =
      static_cast<ServerPlacement>(index_of(o.server, server_placement_names(), "--server"));
  if (o.down_density > 1.0) throw InvalidArgument("--down-density: expected a number in (0, 1]");
  using K = ExchangeKind;
  const K kind = r.exchange.kind;
  if (o.down_density > 0.0 && (kind == K::dense || kind == K::allgather || kind == K::sparcml)) {
    throw InvalidArgument("--down-density: " + o.exchange +
                          " returns all that was sent; it needs an exchange that selects from the "
                          "sum, such as param-server");
  }
  index_of(o.memory, memory_choices(), "--memory");
  if (holds_updates(o)) {
    if (o.optimizer != OptimizerKind::sgd) {
      throw InvalidArgument(
          "--memory updates needs --optimizer sgd: the update of another is not the gradient times "
          "the learning rate");
    }
    if (o.local_clip > 0.0) {
      throw InvalidArgument(
          "--memory updates and --local-clip exclude each other: the limit is one of gradients");
    }
  }
  for (const std::string& name : o.auto_among) {
    r.exchange.automatic.among.push_back(kind_of(name, "--auto-among"));
  }
  r.exchange.automatic.link = o.auto_link;
  r.exchange.automatic.local = o.auto_local;
  if (const std::size_t code = index_of(o.index_code, index_code_choices(), "--index-code");
      code > 0) {
    r.exchange.codec.index = static_cast<IndexCode>(code - 1);
  }
  r.exchange.codec.value =
      static_cast<ValueCode>(index_of(o.value_code, value_code_names(), "--value-code"));
  r.exchange.codec.rounding =
      static_cast<Rounding>(index_of(o.rounding, rounding_names(), "--rounding"));
  r.exchange.codec.seed = o.seed;
  const bool keeps = index_of(o.feedback, feedback_names(), "--feedback") == 0;
  const bool dense = r.exchange.kind == ExchangeKind::dense;
  if (!keeps && o.momentum_correction > 0.0) {
    throw InvalidArgument("--momentum-correction needs --feedback residual");
  }
  if (!keeps && o.residual_decay < 1.0) {
    throw InvalidArgument("--residual-decay needs --feedback residual");
  }
  // Where all of it is masked in every step, the velocity is the gradient; but for Nesterov's step
  // ahead.
  if (!dense || o.nesterov_correction || !o.factor_masking) {
    r.feedback.momentum = static_cast<float>(o.momentum_correction);
    r.feedback.nesterov = o.nesterov_correction;
    r.feedback.factor_masking = o.factor_masking;
  }
  r.feedback.clip_norm = static_cast<float>(o.local_clip);
  if (!dense) r.feedback.decay = static_cast<float>(o.residual_decay);
  // A dense sum leaves nothing behind: without feedback it needs no second copy of the gradient.
  r.feedback.enabled = keeps && (!dense || r.feedback.momentum > 0.0F);
  r.dense_sum = static_cast<DenseSum>(index_of(o.dense_sum, dense_sum_names(), "--dense-sum"));
  r.non_finite = static_cast<NonFinite>(index_of(o.non_finite, non_finite_names(), "--non-finite"));
  r.dense_below = o.dense_below;
  return r;
}

int training_ranks(const TrainOptions& o, int ranks) {
  const auto dedicated =
      server_placement_names()[static_cast<std::size_t>(ServerPlacement::dedicated)];
  const auto server = exchange_kind_names()[static_cast<std::size_t>(ExchangeKind::param_server)];
  return ranks > 1 && o.exchange == server && o.server == dedicated ? ranks - 1 : ranks;
}

float gradient_scale(const TrainOptions& o, double learning_rate) {
  constexpr double kLeastRate = 1e-20;
  if (!holds_updates(o)) return 1.0F;
  return static_cast<float>(1.0 / std::max(learning_rate, kLeastRate));
}

AdaptiveForm adaptive_form(const TrainOptions& o) {
  if (o.adaptive_form == kAuto) {
    return o.feedback == feedback_names()[0] ? AdaptiveForm::feedback : AdaptiveForm::measured;
  }
  return static_cast<AdaptiveForm>(
      index_of(o.adaptive_form, adaptive_form_names(), "--adaptive-form"));
}

std::string memory_of(const TrainOptions& o) {
  if (o.memory != kAuto) return o.memory;
  const bool late = o.feedback == feedback_names()[0] && o.density_rule == kAdaptive &&
                    adaptive_form(o) == AdaptiveForm::feedback;
  const bool allowed = o.optimizer == OptimizerKind::sgd && !(o.local_clip > 0.0);
  return std::string(late && allowed ? kUpdates : kGradients);
}

void set_density(TrainOptions& o, const std::string& who, const std::string& text) {
  const std::optional<double> constant = number(text);
  const bool rule = text == kAdaptive || text == kDescentPerBit ||
                    (text.starts_with(kCapture) && share_of_capture(text)) ||
                    (text.starts_with(kAccordion) && levels_of_accordion(text));
  if (!is_density(constant) && !rule) {
    throw InvalidArgument(who + ": '" + text +
                          "' is no density: expected a number in (0, 1], adaptive, capture=SHARE, "
                          "accordion=LOW/HIGH or descent-per-bit");
  }
  o.density = constant.value_or(o.density);
  o.density_rule = constant ? std::string() : text;
}

double largest_density(const TrainOptions& o) {
  if (o.exchange == "dense") return 1.0;
  const std::string_view rule = o.density_rule;
  if (rule.starts_with(kAccordion)) return levels_of_accordion(rule).value().second;
  if (!rule.empty()) return o.density_max;
  // Warm-ups fall.
  return std::max(o.density, density_schedule(o)->density({}).up);
}

std::unique_ptr<DensitySchedule> density_schedule(const TrainOptions& o, int ranks,
                                                  std::vector<std::size_t> lengths,
                                                  const RunLength& run) {
  auto up = up_schedule(o, ranks, std::move(lengths), run);
  return o.down_density > 0.0 ? with_down(std::move(up), o.down_density) : std::move(up);
}

}  // namespace skim::train
