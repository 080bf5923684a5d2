// Converts options to reducer options, to schedules, and to and from text.
#include "train/options.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <numbers>
#include <numeric>
#include <optional>
#include <utility>

#include "skim/error.hpp"
#include "train/random.hpp"
#include "train/watchdog.hpp"

namespace skim::train {
namespace {

bool holds_updates(const TrainOptions& o) { return memory_of(o) == Memory::updates; }

// "1%" is 0.01.
std::optional<double> number(std::string_view text) {
  double value = 0.0;
  if (text.ends_with('%')) {
    text.remove_suffix(1);
    if (text.ends_with('%')) return std::nullopt;
    const std::optional<double> percent = number(text);
    return percent ? std::optional(*percent / 100.0) : std::nullopt;
  }
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

constexpr std::string_view kAdaptive = "adaptive", kDescentPerBit = "descent-per-bit";
constexpr std::string_view kCapture = "capture=", kAccordion = "accordion=";
constexpr std::string_view kGeometric = "geometric:";

bool is_share(const std::optional<double>& x) { return x && *x > 0.0 && *x < 1.0; }
bool is_density(const std::optional<double>& x) { return x && *x > 0.0 && *x <= 1.0; }

// The shortest text that parses to x.
std::string text_of(double x) {
  char buffer[32];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, x).ptr};
}

// Throws: InvalidArgument if other options do not fit the density rule.
void expect_possible(const TrainOptions& o, const ReducerOptions& r) {
  const std::string rule = "--density " + to_text(o.density);
  if (o.density_warmup.kind != WarmUp::Kind::none) {
    throw InvalidArgument(rule + " has no warm-up: --density-warmup needs a number as --density");
  }
  if (o.density_min > o.density_max) {
    throw InvalidArgument("--density-min is above --density-max");
  }
  if (o.density.kind == DensityRule::Kind::descent_per_bit && r.chooser) {
    throw InvalidArgument(rule +
                          " cannot compare the cost of densities with --exchange auto; name "
                          "one exchange");
  }
  if (!is_adaptive(o)) return;
  if (!(o.budget.bytes > 0.0) && !(o.target_time.seconds > 0.0)) {
    throw InvalidArgument(rule + " needs --budget or --target-time");
  }
  if (o.budget.bytes > 0.0 && o.target_time.seconds > 0.0) {
    throw InvalidArgument("--budget and --target-time exclude each other");
  }
  const bool may_go_dense =
      r.chooser && std::ranges::count(candidates(*r.chooser), ExchangeKind::dense) > 0;
  if (o.budget.bytes > 0.0 && may_go_dense) {
    throw InvalidArgument(
        "--budget: --exchange auto may choose the dense sum at any density; leave dense out of "
        "--among");
  }
  const bool has_compute = o.compute && o.compute->seconds > 0.0;
  if (o.target_time.seconds > 0.0 && (!o.chooser.link || !has_compute)) {
    throw InvalidArgument(
        "--target-time uses predictions, so it needs the link (--fit FILE) and --compute TIME");
  }
}

// Throws: InvalidArgument if other options do not go with local steps.
void expect_local_steps(const TrainOptions& o) {
  const auto refuse = [](const char* option, const char* why) {
    throw InvalidArgument(std::string(option) + " and --local-steps exclude each other: " + why);
  };
  if (o.memory == Memory::gradients) refuse("--memory gradients", "what is exchanged are updates");
  if (o.feedback.local_clip > 0.0F) refuse("--local-clip", "it is for gradients; take --clip-norm");
  if (o.non_finite == NonFinite::pass_on) {
    refuse("--non-finite pass-on", "the NaN would stay in the parameters");
  }
  if (o.local_steps > 1 && o.feedback.momentum_correction > 0.0F) {
    throw InvalidArgument(
        "--momentum-correction needs --local-steps 1, or none: between exchanges the optimizer "
        "has its own momentum");
  }
}

// Leaves the chooser only the exchanges that select from the sum, of --among or of all.
// Throws: InvalidArgument if there are none.
void expect_cut(const TrainOptions& o, ReducerOptions& r) {
  if (r.chooser) {
    std::vector<ExchangeKind> among = r.chooser->among;
    if (among.empty()) {
      for (const ExchangeRow& row : exchange_rows()) {
        if (!row.holds_mass) among.push_back(row.kind);
      }
    }
    std::erase_if(among, [&](ExchangeKind exchange) {
      ExchangeOptions options = o.exchange;
      options.kind = exchange;
      return !cuts_result(options);
    });
    if (among.empty()) {
      throw InvalidArgument("--down-density: no exchange in --among selects from the sum; add " +
                            name_list(names_where([](const ExchangeRow& row) {
                              return !row.holds_mass && cuts_result({.kind = row.kind});
                            })));
    }
    r.chooser->among = std::move(among);
    return;
  }
  if (cuts_result(o.exchange)) return;
  const bool depends = row_of(o.exchange.kind).cuts_result != nullptr;
  throw InvalidArgument(
      "--down-density: " + exchange_name(o) + (depends ? " with these options" : "") +
      " does not select from the sum; take one of " + name_list(names_that_cut()));
}

std::unique_ptr<DensitySchedule> rule_schedule(const TrainOptions& o, int ranks,
                                               std::vector<std::size_t> lengths,
                                               const RunLength& run,
                                               std::shared_ptr<const std::int64_t> shift) {
  const ReducerOptions r = reducer_options(o);
  expect_possible(o, r);
  using Kind = DensityRule::Kind;
  if (o.density.kind == Kind::capture) {
    return capture_density(o.density.value, o.density_min, o.density_max);
  }
  if (o.density.kind == Kind::accordion) return accordion_density(o.density.value, o.density.high);
  if (o.density.kind == Kind::descent_per_bit) {
    return descent_per_bit_density(max_step_bytes(r, ranks, std::move(lengths), o.down_density),
                                   o.density_min, o.density_max);
  }
  const bool in_bytes = o.budget.bytes > 0.0;
  const std::int64_t every = steps_per_exchange(o);
  const std::size_t n = std::accumulate(lengths.begin(), lengths.end(), std::size_t{0});
  const auto rate_at = [run, shift = std::move(shift), rate = o.learning_rate,
                        every](std::uint64_t counted) {
    const auto exchange = static_cast<std::int64_t>(counted) + (shift ? *shift : 0);
    return run.rate(rate, every * exchange);
  };
  AdaptiveOptions a{.form = form_of(o),
                    .budget = in_bytes ? o.budget.bytes : o.target_time.seconds,
                    .cost = {},
                    .in_bytes = in_bytes,
                    .density_min = o.density_min,
                    .density_max = o.density_max,
                    .contraction = o.contraction,
                    .learning_rate = rate_at,
                    .norms_of_updates = holds_updates(o),
                    .n = std::max<std::size_t>(1, n),
                    .ranks = ranks};
  a.cost = in_bytes ? max_step_bytes(r, ranks, std::move(lengths), o.down_density)
                    : predicted_seconds(r, ranks, std::move(lengths),
                                        static_cast<double>(every) * o.compute->seconds,
                                        *o.chooser.link, o.chooser.local_speeds, o.down_density);
  return adaptive_density(std::move(a));
}

std::unique_ptr<DensitySchedule> up_schedule(const TrainOptions& o, int ranks,
                                             std::vector<std::size_t> lengths, const RunLength& run,
                                             std::shared_ptr<const std::int64_t> shift) {
  if (is_dense(o)) return constant_density(1.0);
  if (!o.density.is_constant()) {
    return rule_schedule(o, ranks, std::move(lengths), run, std::move(shift));
  }
  const double last = o.density.value;
  switch (o.density_warmup.kind) {
    case WarmUp::Kind::none:
      return constant_density(last);
    case WarmUp::Kind::dgc:
      return listed_density(dgc_warm_up(), last);
    case WarmUp::Kind::gaussiank:
      return listed_density(gaussiank_warm_up(), last);
    case WarmUp::Kind::gtopk:
      return listed_density(gtopk_warm_up(), last);
    case WarmUp::Kind::geometric:
      return geometric_density(std::max(0.25, last), last, o.density_warmup.epochs);
    case WarmUp::Kind::list:
      return listed_density(o.density_warmup.densities, last);
  }
  throw InvalidArgument("--density-warmup: unknown kind");
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
  constexpr double kMostSteps = 0x1p53;  // as many as --steps takes
  const auto per_epoch = static_cast<double>(steps_per_epoch);
  const auto steps = [&](double epochs) {
    return std::max<std::int64_t>(1, std::llround(std::min(epochs * per_epoch, kMostSteps)));
  };
  const std::int64_t total = o.steps > 0 ? o.steps : steps(o.epochs);
  return {.per_epoch = steps_per_epoch,
          .total = total,
          .evaluation = o.eval_epochs > 0.0 ? steps(o.eval_epochs) : total};
}

bool is_dense(const TrainOptions& o) {
  return !o.automatic && o.exchange.kind == ExchangeKind::dense;
}
bool is_adaptive(const TrainOptions& o) { return o.density.kind == DensityRule::Kind::adaptive; }

std::int64_t steps_per_exchange(const TrainOptions& o) {
  return std::max<std::int64_t>(1, o.local_steps);
}

std::int64_t exchanges_of(const TrainOptions& o, std::int64_t steps) {
  const std::int64_t every = steps_per_exchange(o);
  return (steps + every - 1) / every;
}

std::string exchange_name(const TrainOptions& o) {
  return std::string(o.automatic ? kAuto : name_of(o.exchange.kind));
}

std::vector<std::string> names_that_cut() {
  return names_where([](const ExchangeRow& row) { return cuts_result({.kind = row.kind}); });
}

void set_exchange(TrainOptions& o, std::string_view name, const std::string& who) {
  o.automatic = name == kAuto;
  if (!o.automatic) o.exchange.kind = from_name<ExchangeKind>(name, who);
}

ReducerOptions reducer_options(const TrainOptions& o, int rank) {
  ReducerOptions r;
  r.select = o.select;
  r.select.seed = o.select_seeds == SelectSeeds::same
                      ? o.seed
                      : mix(mix(o.seed) + static_cast<std::uint64_t>(rank));
  if (o.select.rule == SelectRule::threshold && !(o.select.threshold > 0.0F)) {
    throw InvalidArgument("--select threshold needs --select-threshold > 0");
  }
  r.exchange = o.exchange;
  r.exchange.codec.seed = o.seed;
  if (o.automatic) r.chooser = o.chooser;
  if (o.down_density > 0.0) expect_cut(o, r);
  if (o.local_steps > 0) {
    expect_local_steps(o);
  } else if (holds_updates(o)) {
    if (o.optimizer != OptimizerKind::sgd) {
      throw InvalidArgument(
          "--memory updates needs --optimizer sgd: with other optimizers, the update is not the "
          "gradient times the learning rate");
    }
    if (o.feedback.local_clip > 0.0F) {
      throw InvalidArgument(
          "--memory updates and --local-clip exclude each other: the limit is for gradients");
    }
  }
  if (!o.feedback.enabled && o.feedback.momentum_correction > 0.0F) {
    throw InvalidArgument("--momentum-correction needs residuals: leave out --no-feedback");
  }
  if (!o.feedback.enabled && o.feedback.residual_decay < 1.0F) {
    throw InvalidArgument("--residual-decay needs residuals: leave out --no-feedback");
  }
  if (!o.feedback.enabled && o.feedback.residual_code != ResidualCode::f32) {
    throw InvalidArgument("--residual-code needs residuals: leave out --no-feedback");
  }
  r.feedback = o.feedback;
  if (o.feedback.momentum_correction > 0.0F) {
    if (o.optimizer == OptimizerKind::sgd && o.momentum > 0.0) {
      throw InvalidArgument(
          "--momentum and --momentum-correction exclude each other: both are the momentum of sgd; "
          "leave out --momentum");
    }
    // Adam's first moment is a mean, not a sum.
    if (o.optimizer != OptimizerKind::sgd && o.feedback.momentum_dampening == 0.0F) {
      r.feedback.momentum_dampening = o.feedback.momentum_correction;
    }
  }
  if (is_dense(o)) {
    r.feedback.residual_decay = 1.0F;
    r.feedback.residual_code = ResidualCode::f32;
    // A dense sum leaves nothing behind: without momentum it needs no second copy of the gradient.
    r.feedback.enabled = o.feedback.enabled && o.feedback.momentum_correction > 0.0F;
  }
  r.dense_sum = o.dense_sum;
  r.dense_below = o.dense_below;
  r.non_finite = o.non_finite;
  return r;
}

std::int64_t rollback_steps(const TrainOptions& o) { return Watchdog::kRollback + o.local_steps; }

int training_ranks(const TrainOptions& o, int ranks) {
  if (o.automatic || !row_of(o.exchange.kind).holds_mass) return ranks;
  const std::unique_ptr<Exchange> exchange = make_exchange(o.exchange);
  const HeldMass* const holder = exchange->held_mass();
  return holder != nullptr ? holder->contributors(ranks) : ranks;
}

float gradient_scale(const TrainOptions& o, double learning_rate) {
  constexpr double kLeastRate = 1e-20;
  if (!holds_updates(o) || o.local_steps > 0) return 1.0F;
  return static_cast<float>(1.0 / std::max(learning_rate, kLeastRate));
}

AdaptiveForm form_of(const TrainOptions& o) {
  return o.adaptive_form.value_or(o.feedback.enabled ? AdaptiveForm::feedback
                                                     : AdaptiveForm::measured);
}

Memory memory_of(const TrainOptions& o) {
  if (o.memory) return *o.memory;
  if (o.local_steps > 0) return Memory::updates;
  const bool late = o.feedback.enabled && is_adaptive(o) && form_of(o) == AdaptiveForm::feedback;
  const bool allowed = o.optimizer == OptimizerKind::sgd && !(o.feedback.local_clip > 0.0F);
  return late && allowed ? Memory::updates : Memory::gradients;
}

LocalStepsOptions outer_step_of(const TrainOptions& o) {
  LocalStepsOptions found = o.local;
  if (o.optimizer == OptimizerKind::sgd && o.local_steps > 1 && found.outer_lr == 0.0) {
    found.outer_lr = 1.0;
  }
  return found;
}

std::string to_text(const DensityRule& rule) {
  switch (rule.kind) {
    case DensityRule::Kind::constant:
      return text_of(rule.value);
    case DensityRule::Kind::adaptive:
      return std::string(kAdaptive);
    case DensityRule::Kind::capture:
      return std::string(kCapture) + text_of(rule.value);
    case DensityRule::Kind::accordion:
      return std::string(kAccordion) + text_of(rule.value) + "/" + text_of(rule.high);
    case DensityRule::Kind::descent_per_bit:
      return std::string(kDescentPerBit);
  }
  return "?";
}

DensityRule density_rule(std::string_view text, const std::string& who) {
  const std::optional<double> constant = number(text);
  if (is_density(constant)) return *constant;
  DensityRule rule;
  if (text == kAdaptive) {
    rule.kind = DensityRule::Kind::adaptive;
    return rule;
  }
  if (text == kDescentPerBit) {
    rule.kind = DensityRule::Kind::descent_per_bit;
    return rule;
  }
  if (text.starts_with(kCapture)) {
    const std::optional<double> share = number(text.substr(kCapture.size()));
    if (is_share(share)) {
      rule.kind = DensityRule::Kind::capture;
      rule.value = *share;
      return rule;
    }
  }
  if (text.starts_with(kAccordion)) {
    const std::string_view levels = text.substr(kAccordion.size());
    const std::size_t slash = std::min(levels.find('/'), levels.size());
    const auto low = number(levels.substr(0, slash));
    const auto high = number(levels.substr(std::min(slash + 1, levels.size())));
    if (is_density(low) && is_density(high) && *low <= *high) {
      rule.kind = DensityRule::Kind::accordion;
      rule.value = *low;
      rule.high = *high;
      return rule;
    }
  }
  throw InvalidArgument(who + ": '" + std::string(text) +
                        "' is no density: expected a number in (0, 1], adaptive, capture=SHARE, "
                        "accordion=LOW/HIGH or descent-per-bit");
}

namespace {
// The names of the warm-ups without parameters, in the order of WarmUp::Kind.
constexpr std::array<std::string_view, 4> kWarmUps{"none", "dgc", "gaussiank", "gtopk"};
}  // namespace

std::string to_text(const WarmUp& w) {
  if (w.kind == WarmUp::Kind::geometric) return std::string(kGeometric) + text_of(w.epochs);
  if (w.kind != WarmUp::Kind::list) return std::string(kWarmUps[static_cast<std::size_t>(w.kind)]);
  std::string text;
  for (const double d : w.densities) text += (text.empty() ? "" : ",") + text_of(d);
  return text;
}

WarmUp warm_up(std::string_view text, const std::string& who) {
  const auto part = [&](std::string_view number_text) {
    if (const std::optional<double> value = number(number_text)) return *value;
    throw InvalidArgument(
        who + ": '" + std::string(number_text) + "' in '" + std::string(text) +
        "' is not a number; expected none, dgc, gaussiank, gtopk, geometric:EPOCHS "
        "or a list of densities such as 0.25,0.0625");
  };
  WarmUp w;
  if (const auto* const found = std::ranges::find(kWarmUps, text); found != kWarmUps.end()) {
    w.kind = static_cast<WarmUp::Kind>(found - kWarmUps.begin());
    return w;
  }
  if (text.starts_with(kGeometric)) {
    w.kind = WarmUp::Kind::geometric;
    w.epochs = part(text.substr(kGeometric.size()));
    if (!(w.epochs >= 0.0) || !std::isfinite(w.epochs)) {
      throw InvalidArgument(who + ": '" + std::string(text) +
                            "' needs a number of epochs >= 0, as geometric:4");
    }
    return w;
  }
  w.kind = WarmUp::Kind::list;
  for (std::string_view rest = text;;) {
    const std::size_t comma = rest.find(',');
    w.densities.push_back(part(rest.substr(0, comma)));
    if (!is_density(w.densities.back())) {
      throw InvalidArgument(who + ": '" + std::string(rest.substr(0, comma)) + "' in '" +
                            std::string(text) + "' is no density: expected numbers in (0, 1]");
    }
    if (comma == std::string_view::npos) return w;
    rest.remove_prefix(comma + 1);
  }
}

double largest_density(const TrainOptions& o) {
  if (is_dense(o)) return 1.0;
  if (o.density.kind == DensityRule::Kind::accordion) return o.density.high;
  if (!o.density.is_constant()) return o.density_max;
  // Densities fall during a warm-up, so the first one is the largest.
  return std::max(o.density.value, density_schedule(o)->density({}).up);
}

std::unique_ptr<DensitySchedule> density_schedule(const TrainOptions& o, int ranks,
                                                  std::vector<std::size_t> lengths,
                                                  const RunLength& run,
                                                  std::shared_ptr<const std::int64_t> shift) {
  auto up = up_schedule(o, ranks, std::move(lengths), run, std::move(shift));
  return o.down_density > 0.0 ? with_down_density(std::move(up), o.down_density) : std::move(up);
}

}  // namespace skim::train

namespace skim {

template <>
std::span<const std::string_view> names_of<train::OptimizerKind>() noexcept {
  static constexpr std::array<std::string_view, 3> kNames{"sgd", "adam", "adamw"};
  return kNames;
}
template <>
std::span<const std::string_view> names_of<train::LearningRateKind>() noexcept {
  static constexpr std::array<std::string_view, 3> kNames{"constant", "steps", "cosine"};
  return kNames;
}
template <>
std::span<const std::string_view> names_of<train::Split>() noexcept {
  static constexpr std::array<std::string_view, 3> kNames{"iid", "partition", "shards"};
  return kNames;
}
template <>
std::span<const std::string_view> names_of<train::Memory>() noexcept {
  static constexpr std::array<std::string_view, 2> kNames{"gradients", "updates"};
  return kNames;
}
template <>
std::span<const std::string_view> names_of<train::SelectSeeds>() noexcept {
  static constexpr std::array<std::string_view, 2> kNames{"same", "own"};
  return kNames;
}
template <>
std::span<const std::string_view> names_of<train::OnDivergence>() noexcept {
  static constexpr std::array<std::string_view, 3> kNames{"ignore", "stop", "rollback"};
  return kNames;
}

}  // namespace skim
