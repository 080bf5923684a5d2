#include "tools/training_options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>

#include "skim/communicator.hpp"
#include "skim/error.hpp"
#include "tools/fit.hpp"
#include "tools/units.hpp"
#include "train/fields.hpp"
#include "train/watchdog.hpp"

namespace skim::tool {
namespace {

using train::is_adaptive;
using train::is_dense;
using train::TrainOptions;

// Declares an option for each field that it is called with.
class Declare {
 public:
  explicit Declare(CommandLine& line) : line_(line) {}

  template <class T>
  void operator()(const char* field, T& member, const FieldInfo& info) const {
    std::string name = std::string("--") + field;
    std::ranges::replace(name, '_', '-');
    if (!line_.has(name)) add(name, member, info);  // a command's own option has precedence
  }

 private:
  void add(const std::string& name, bool& x, const FieldInfo& info) const {
    const std::string no = ",!--no-" + name.substr(2);
    line_.flag((name + (x ? no : "")).c_str(), x, info.what + std::string(x ? " [on]" : ""));
  }
  template <class T>
  requires std::is_arithmetic_v<T>
  void add(const std::string& name, T& x, const FieldInfo& info) const {
    const bool is_density = info.range.high == 1.0 && !info.range.with_low;
    const char* const type = std::is_integral_v<T> ? "N" : is_density ? "D" : "X";
    CLI::Option* const option = info.range.holds(static_cast<double>(x))
                                    ? line_.option(name.c_str(), x, type, info.what)
                                    : line_.plain(name.c_str(), x, type, info.what);
    if (!info.range.holds(-1.0)) option->check(in_range(info.range));
    if (std::is_floating_point_v<T>) option->check(fits_float());
  }
  void add(const std::string& name, std::string& x, const FieldInfo& info) const {
    line_.choice(name.c_str(), x, info.what, info.names());
  }
  void add(const std::string& name, std::filesystem::path& x, const FieldInfo& info) const {
    line_.plain(name.c_str(), x, "PATH", info.what);
  }
  template <class E>
  requires std::is_enum_v<E>
  void add(const std::string& name, E& e, const FieldInfo& info) const {
    line_.choice(name.c_str(), e, info.what,
                 info.names != nullptr ? info.names() : std::vector<std::string>());
  }
  template <class E>
  void add(const std::string& name, std::optional<E>& e, const FieldInfo& info) const {
    std::vector<std::string> valid{std::string(kAuto)};
    for (const std::string_view n : names_of<E>()) valid.emplace_back(n);
    const auto set = [&e, name](const std::string& given) {
      e = from_name_or_auto<E>(given, name);
    };
    line_.choice(name.c_str(), set, name_or_auto(e), info.what, valid);
  }
  void add(const std::string& name, const KindOrAuto<ExchangeKind, bool>& x,
           const FieldInfo& info) const {
    std::vector<std::string> valid;
    for (const std::string_view n : names_of<ExchangeKind>()) valid.emplace_back(n);
    valid.emplace_back(kAuto);
    const auto set = [x, name](const std::string& given) { x.set(given, name); };
    line_.choice(name.c_str(), set, x.name(), info.what, valid);
  }
  void add(const std::string& name, std::vector<double>& x, const FieldInfo& info) const {
    line_.plain(name.c_str(), x, "X,X,...", info.what)->delimiter(',')->check(in_range(info.range));
  }
  void add(const std::string& name, std::vector<ExchangeKind>& x, const FieldInfo& info) const {
    const auto set = [&x, name](const std::vector<std::string>& given) {
      x.clear();
      for (const std::string& n : given) x.push_back(from_name<ExchangeKind>(n, name));
    };
    line_.list(name.c_str(), set, "NAME,...", info.what)->check(CLI::IsMember(info.names()));
  }
  void add(const std::string& name, train::DensityRule& x, const FieldInfo& info) const {
    const auto set = [&x, name](const std::string& given) { x = train::density_rule(given, name); };
    line_.call(name.c_str(), set, "D", info.what)->default_str(to_text(x));
  }
  void add(const std::string& name, train::WarmUp& x, const FieldInfo& info) const {
    const auto set = [&x, name](const std::string& given) { x = train::warm_up(given, name); };
    line_.call(name.c_str(), set, "SPEC", info.what)->default_str(to_text(x));
  }
  void add(const std::string& name, train::ByteCount& x, const FieldInfo& info) const {
    const auto set = [&x, name](const std::string& given) { x.bytes = parse_bytes(name, given); };
    line_.call(name.c_str(), set, "BYTES", info.what);
  }
  void add(const std::string& name, train::Duration& x, const FieldInfo& info) const {
    const auto set = [&x, name](const std::string& given) {
      x.seconds = parse_seconds(name, given);
    };
    line_.call(name.c_str(), set, "TIME", info.what);
  }
  void add(const std::string& name, std::optional<train::Duration>& x,
           const FieldInfo& info) const {
    const auto set = [&x, name](const std::string& given) {
      x = train::Duration{parse_seconds(name, given)};
    };
    line_.call(name.c_str(), set, "TIME", info.what);
  }
  // These fields have no option of their own. They come from --fit or from a summary.
  void add(const std::string&, std::optional<Link>&, const FieldInfo&) const {}
  void add(const std::string&, LocalSpeeds&, const FieldInfo&) const {}

  CommandLine& line_;
};

}  // namespace

void add_codec_options(CommandLine& line, CodecOptions& codec,
                       std::initializer_list<std::string_view> names) {
  const Declare declare_field(line);
  each_field(codec, [&](const char* name, auto& member, const FieldInfo& info) {
    if (std::ranges::count(names, name) > 0) declare_field(name, member, info);
  });
}

void add_training_options(CommandLine& line, train::TrainOptions& t) {
  const Declare declare_field(line);
  line.group("What is trained");
  each_model_field(t, declare_field);
  line.group("Optimizer");
  each_optimizer_field(t, declare_field);
  line.group("Exchange");
  each_exchange_field(t, declare_field);
  const auto read = [&t](const std::string& path) {
    const Fit fit = read_fit(path);
    t.chooser.link = fit.link;
    t.chooser.local_speeds = fit.local;
  };
  line.call("--fit", read, "FILE",
            "auto: file with link and local speeds, from skim bench network --json; without it, "
            "the link is measured");
  line.group("Run");
  each_run_field(t, declare_field);
}

namespace {

// Whether a run may take this exchange.
template <ExchangeKind kKind>
bool may_be(const TrainOptions& o) {
  const HierarchyOptions& h = o.exchange.hierarchy;
  const bool nests = o.exchange.kind == ExchangeKind::hierarchical;
  return o.automatic || o.exchange.kind == kKind ||
         (nests && (h.inside == kKind || h.between == kKind));
}
template <SelectRule kRule>
bool selects_by(const TrainOptions& o) {
  return o.select.rule == kRule;
}
bool selects_at_random(const TrainOptions& o) {
  return selects_by<SelectRule::dgc>(o) || selects_by<SelectRule::mstopk>(o) ||
         selects_by<SelectRule::randomk>(o);
}
bool has_density_limits(const TrainOptions& o) {
  using Kind = train::DensityRule::Kind;
  return o.density.kind != Kind::constant && o.density.kind != Kind::accordion;
}
bool is_auto(const TrainOptions& o) { return o.automatic; }
bool is_lstm(const TrainOptions& o) { return o.model == "lstm"; }
bool is_gpt(const TrainOptions& o) { return o.model == "gpt"; }
bool is_lstm_or_gpt(const TrainOptions& o) { return is_lstm(o) || is_gpt(o); }
bool has_drops(const TrainOptions& o) {
  return o.learning_rate.kind == train::LearningRateKind::steps;
}
bool has_rounds(const TrainOptions& o) { return o.local_steps > 0; }
bool has_checkpoints(const TrainOptions& o) { return !o.checkpoint.empty(); }
bool has_target_time(const TrainOptions& o) { return o.target_time.seconds > 0.0; }

// The options that only some runs use.
struct Effect {
  const char* option;
  const char* needs;
  bool (*is_there)(const TrainOptions&);
};
constexpr Effect kEffects[] = {
    {"--shards-per-rank", "--split shards",
     [](const TrainOptions& o) { return o.split == train::Split::shards; }},
    {"--augment", "--data cifar10",
     [](const TrainOptions& o) { return o.data.name == "cifar10"; }},
    {"--skip-limit", "--non-finite skip",
     [](const TrainOptions& o) { return o.non_finite == NonFinite::skip; }},
    {"--sequence-length", "--data text",
     [](const TrainOptions& o) { return o.data.name == "text"; }},
    {"--layers", "--model lstm or gpt", is_lstm_or_gpt},
    {"--hidden", "--model lstm", is_lstm},
    {"--embedding", "--model lstm or gpt", is_lstm_or_gpt},
    {"--heads", "--model gpt", is_gpt},
    {"--lr-drops", "--lr-schedule steps", has_drops},
    {"--lr-gamma", "--lr-schedule steps", has_drops},
    {"--ahead", "--local-steps H", has_rounds},
    {"--outer-lr", "--local-steps H", has_rounds},
    {"--outer-momentum", "--local-steps H", has_rounds},
    {"--among", "--exchange auto", is_auto},
    {"--trial-share", "--exchange auto", is_auto},
    {"--fit", "--exchange auto or --target-time",
     [](const TrainOptions& o) { return is_auto(o) || has_target_time(o); }},
    {"--drop", "--exchange gtopk or gtopk-tree",
     [](const TrainOptions& o) {
       return may_be<ExchangeKind::gtopk>(o) || may_be<ExchangeKind::gtopk_tree>(o);
     }},
    {"--inside", "--exchange hierarchical", may_be<ExchangeKind::hierarchical>},
    {"--between", "--exchange hierarchical", may_be<ExchangeKind::hierarchical>},
    {"--server", "--exchange param-server", may_be<ExchangeKind::param_server>},
    {"--oktopk-exact", "--exchange oktopk", may_be<ExchangeKind::oktopk>},
    {"--cut-every", "--exchange oktopk", may_be<ExchangeKind::oktopk>},
    {"--regions-every", "--exchange oktopk", may_be<ExchangeKind::oktopk>},
    {"--rounding", "a --value-code other than f32",
     [](const TrainOptions& o) { return o.exchange.codec.value != ValueCode::f32; }},
    {"--select-threshold", "--select threshold", selects_by<SelectRule::threshold>},
    {"--select-block", "--select blocktopk", selects_by<SelectRule::blocktopk>},
    {"--select-stages", "--select sidco", selects_by<SelectRule::sidco>},
    {"--select-seeds", "--select dgc, mstopk or randomk", selects_at_random},
    {"--density-min", "--density adaptive, capture=SHARE or descent-per-bit", has_density_limits},
    {"--density-max", "--density adaptive, capture=SHARE or descent-per-bit", has_density_limits},
    {"--adaptive-form", "--density adaptive", is_adaptive},
    {"--contraction", "--density adaptive", is_adaptive},
    {"--compute", "--target-time", has_target_time},
    {"--checkpoint-steps", "--checkpoint DIR", has_checkpoints},
    {"--checkpoint-time", "--checkpoint DIR", has_checkpoints},
    {"--keep", "--checkpoint DIR", has_checkpoints},
    {"--divergence-factor", "--on-divergence stop or rollback",
     [](const TrainOptions& o) { return o.on_divergence != train::OnDivergence::ignore; }},
};

}  // namespace

void expect_effects(const CLI::App& app, const std::vector<Row>& rows,
                    std::span<const std::string_view> of_command) {
  for (const Effect& e : kEffects) {
    if (app.count(e.option) == 0 || std::ranges::count(of_command, e.option) > 0) continue;
    if (std::ranges::any_of(rows, [&](const Row& r) { return e.is_there(r.options); })) continue;
    throw InvalidArgument(fmt::format("{} needs {}; it has no effect here, so leave it out",
                                      e.option, e.needs));
  }
}

void choose_length(const CLI::App& app, train::TrainOptions& t) {
  if (app.count("--epochs") == 0) return;
  if (app.count("--steps") > 0) throw InvalidArgument("--epochs and --steps exclude each other");
  t.steps = 0;
}

void check_training_options(const train::TrainOptions& t) {
  if (t.resume && t.checkpoint.empty()) throw InvalidArgument("--resume needs --checkpoint DIR");
  if (t.on_divergence == train::OnDivergence::rollback &&
      (t.checkpoint.empty() || (t.checkpoint_steps == 0 && t.checkpoint_time.seconds <= 0.0))) {
    throw InvalidArgument(
        "--on-divergence rollback needs --checkpoint DIR, and --checkpoint-steps or "
        "--checkpoint-time");
  }
  // The oldest checkpoint that is kept is at least so many steps old.
  const std::int64_t back = train::rollback_steps(t);
  const std::int64_t least_age =
      std::min(t.keep - 1, back) * std::min(t.checkpoint_steps, back) + 1;
  if (t.on_divergence == train::OnDivergence::rollback && t.checkpoint_time.seconds <= 0.0 &&
      least_age < back) {
    throw InvalidArgument(fmt::format(
        "--on-divergence rollback goes back {} steps: with --checkpoint-steps {} it needs --keep "
        "{}",
        back, t.checkpoint_steps, 1 + (back - 2 + t.checkpoint_steps) / t.checkpoint_steps));
  }
  const bool has_steps = t.learning_rate.kind == train::LearningRateKind::steps;
  if (has_steps && t.learning_rate.drop_epochs.empty()) {
    throw InvalidArgument("--lr-schedule steps needs --lr-drops EPOCH,EPOCH,...");
  }
  const double last_rate = t.learning_rate.at(std::numeric_limits<double>::infinity(), 0.0, 1);
  if (!(last_rate <= std::numeric_limits<float>::max())) {
    throw InvalidArgument(
        fmt::format("--lr and --lr-gamma: expected a rate of at most 3.4e38 after all --lr-drops, "
                    "got {:g}",
                    last_rate));
  }
  if (t.momentum > 0.0 && t.optimizer != train::OptimizerKind::sgd) {
    throw InvalidArgument("--momentum is for --optimizer sgd; Adam has a momentum of its own");
  }
  if (t.nesterov && t.momentum <= 0.0) throw InvalidArgument("--nesterov needs --momentum > 0");
  const FeedbackOptions& f = t.feedback;
  if (f.momentum_correction <= 0.0F) {
    const char* const needs = f.nesterov_correction          ? "--nesterov-correction"
                              : !f.factor_masking            ? "--no-factor-masking"
                              : f.momentum_dampening != 0.0F ? "--momentum-dampening"
                                                             : nullptr;
    if (needs != nullptr) {
      throw InvalidArgument(std::string(needs) + " needs --momentum-correction > 0");
    }
  }
  if (t.dense_sum == DenseSum::vendor && !is_available(Backend::mpi)) {
    throw InvalidArgument("--dense-sum vendor: this build has no MPI");
  }
}

void check_budget(const std::vector<Row>& rows) {
  bool used = false;
  for (const Row& r : rows) used = used || (is_adaptive(r.options) && !is_dense(r.options));
  const train::TrainOptions& o = rows.front().options;
  if (used) return;
  if (is_adaptive(o)) {
    throw InvalidArgument("--density adaptive: --exchange dense sends everything in every step");
  }
  if (o.budget.bytes > 0.0 || o.target_time.seconds > 0.0) {
    throw InvalidArgument(std::string(o.budget.bytes > 0.0 ? "--budget" : "--target-time") +
                          " needs --density adaptive");
  }
}

std::string note_on_budget(const train::TrainOptions& o, int ranks) {
  if (ranks > 1 || is_dense(o) || !is_adaptive(o) || !(o.budget.bytes > 0.0)) return {};
  return fmt::format("one rank sends nothing: --budget is not used, the density is {:g}",
                     o.density_max);
}

std::string warning_on_data(const train::DataInfo& data) {
  if (data.missing.empty()) return {};
  return fmt::format("{} has no {}: training on the {} images of the other files", data.name,
                     fmt::join(data.missing, ", "), data.train_size);
}

}  // namespace skim::tool
