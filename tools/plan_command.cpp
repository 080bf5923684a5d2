// skim plan: what the cost model predicts for a model, a link and a number of ranks.
#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "skim/cost.hpp"
#include "skim/error.hpp"
#include "skim/exchange.hpp"
#include "skim/quality.hpp"
#include "tools/command_line.hpp"
#include "tools/commands.hpp"
#include "tools/fit.hpp"
#include "tools/json_file.hpp"
#include "tools/training_options.hpp"
#include "tools/units.hpp"

namespace skim::tool {
namespace {

// A step that is at most this factor longer than the shortest step counts as equally fast.
constexpr double kAsFast = 1.05;
// Published runs with S = density x steps >= kParity reached dense accuracy. quality.hpp has Skim's
// own measurements.
constexpr double kParity = 50.0;

struct PlanOptions {
  double parameters = 25.6e6;
  int ranks = 32;
  int hosts = 0;
  std::int64_t steps = 0;  // 0: not given
  std::string link, latency, compute, fit, json;
  std::string inside_link, inside_latency = "0us";
  std::vector<double> densities{0.01, 0.001, 0.0001};
  double overlap = 0.0;
  CodecOptions codec;
  // In ns per entry.
  double select_ns = 0.35, merge_ns = 10.0, add_ns = 0.35;
};

// Numbers on the command line override those of the fit.
Fit machine_of(const PlanOptions& o, const CLI::App& app) {
  const auto given = [&](const char* name) { return app.count(name) > 0; };
  if (o.fit.empty() && !given("--link")) {
    throw InvalidArgument("expected --link RATE, or --fit FILE of skim bench network");
  }
  Fit m;
  const bool fitted = !o.fit.empty();
  if (fitted) m = read_fit(o.fit);
  if (given("--link")) m.link.beta_s_per_byte = parse_link("--link", o.link);
  if (given("--latency")) m.link.alpha_s = parse_seconds("--latency", o.latency);
  if (!fitted || given("--select-ns")) m.local.select_s = 1e-9 * o.select_ns;
  if (!fitted || given("--merge-ns")) m.local.merge_s = 1e-9 * o.merge_ns;
  if (!fitted || given("--add-ns")) m.local.add_s = 1e-9 * o.add_ns;
  return m;
}

struct Prediction {
  ExchangeKind kind = ExchangeKind::dense;
  double density = 1.0;
  Cost cost;
  double step_s = 0.0, speed_up = 1.0;

  std::string_view name() const { return name_of(kind); }
};

// The dense sum first, then every exchange at every density. Exchanges that need hosts with several
// ranks are left out if there are no such hosts.
std::vector<Prediction> predictions(const PlanOptions& o, const Fit& m, double compute_s,
                                    const std::vector<double>& densities) {
  Link inside;
  if (o.hosts > 0) {
    inside = {.alpha_s = parse_seconds("--inside-latency", o.inside_latency),
              .beta_s_per_byte = parse_link("--inside-link", o.inside_link)};
  }
  std::vector<Prediction> all;
  const auto add = [&](ExchangeKind kind, double density) {
    const Load load{.ranks = o.ranks,
                    .n = o.parameters,
                    .k = std::max(1.0, density * o.parameters),
                    .frame = frame_size(o.codec),
                    .hosts = o.hosts,
                    .inside_link = inside};
    Prediction p;
    p.kind = kind;
    p.density = density;
    p.cost = predict({.kind = kind, .codec = o.codec}, load, m.link, m.local);
    p.step_s = step_seconds(compute_s, p.cost, o.overlap);
    const double dense_s = all.empty() ? p.step_s : all.front().step_s;
    p.speed_up = p.step_s == dense_s ? 1.0 : dense_s / p.step_s;  // both may be 0
    all.push_back(p);
  };
  add(ExchangeKind::dense, 1.0);
  for (const double d : densities) {
    for (const ExchangeRow& row : exchange_rows()) {
      if (row.kind == ExchangeKind::dense || (row.needs_hosts && o.hosts == 0)) continue;
      add(row.kind, d);
    }
  }
  return all;
}

const Prediction& fastest(const std::vector<Prediction>& all) {
  return *std::ranges::min_element(all, {}, &Prediction::step_s);
}

// The largest density whose step is about as short as the shortest, with its fastest exchange. The
// smallest density has the shortest step nearly always, but it delivers the least of the gradients.
const Prediction& advised(const std::vector<Prediction>& all) {
  const double limit = kAsFast * fastest(all).step_s;
  const Prediction* best = &all.front();  // dense
  if (best->step_s <= limit) return *best;
  best = nullptr;
  for (const Prediction& p : all) {
    if (p.step_s > limit) continue;
    if (best == nullptr || p.density > best->density ||
        (p.density == best->density && p.step_s < best->step_s)) {
      best = &p;
    }
  }
  return *best;
}

nlohmann::json to_json(const Prediction& p, bool is_advised, std::int64_t steps) {
  nlohmann::json row{{"exchange", p.name()},        {"density", p.density},
                     {"step_s", p.step_s},          {"exchange_s", p.cost.exchange_s()},
                     {"link_s", p.cost.link_s},     {"merge_s", p.cost.merge_s},
                     {"select_s", p.cost.select_s}, {"speed_up", p.speed_up},
                     {"bytes", p.cost.bytes},       {"rounds", p.cost.rounds},
                     {"advised", is_advised},       {"entry_sends", nullptr}};
  if (steps > 0) row["entry_sends"] = p.density * static_cast<double>(steps);
  return row;
}

void print_table(std::FILE* out, const std::vector<Prediction>& all, const Prediction& advice) {
  fmt::print(out, "{:>8} {:<20} {:>10} {:>12} {:>12} {:>12} {:>9}\n", "density", "exchange",
             "bytes", "exchange ms", "select ms", "step ms", "speed-up");
  for (const Prediction& p : all) {
    fmt::print(out, "{:>8g} {:<20} {:>10.4g} {:>12.4g} {:>12.4g} {:>12.5g} {:>9.2f}{}\n", p.density,
               p.name(), p.cost.bytes, 1e3 * p.cost.exchange_s(), 1e3 * p.cost.select_s,
               1e3 * p.step_s, p.speed_up, &p == &advice ? "  <- advised" : "");
  }
}

// If the advised exchange delivers only a part of what is sent, names the fastest one that delivers
// all of it at the same density.
void print_delivery(std::FILE* out, const std::vector<Prediction>& all, const Prediction& advice) {
  const auto delivers_all = [](const Prediction& p) { return row_of(p.kind).delivers_all; };
  if (delivers_all(advice)) return;
  const Prediction* other = nullptr;
  for (const Prediction& p : all) {
    if (p.density != advice.density || !delivers_all(p)) continue;
    if (other == nullptr || p.step_s < other->step_s) other = &p;
  }
  fmt::print(out,
             "{} delivers about k entries of all that the ranks send. {} delivers all of them, "
             "which trains\nbetter at equal density: a step of {:.5g} ms.\n",
             advice.name(), other->name(), 1e3 * other->step_s);
}

void print_advice(std::FILE* out, const std::vector<Prediction>& all, const Prediction& advice) {
  const Prediction& shortest = fastest(all);
  if (advice.kind == ExchangeKind::dense) {
    fmt::print(out, "do not compress: {}\n",
               &advice == &shortest ? "the dense sum has the shortest step"
                                    : "the step of the dense sum is within 5 % of the shortest");
    return;
  }
  fmt::print(out,
             "advised: {} at density {:g}: a step of {:.5g} ms, {:.2f} times as fast as dense\n",
             advice.name(), advice.density, 1e3 * advice.step_s, advice.speed_up);
  if (shortest.step_s < advice.step_s) {
    fmt::print(out, "The shortest step, {} at density {:g}, is {:.2g} % shorter.\n",
               shortest.name(), shortest.density, 100.0 * (1.0 - shortest.step_s / advice.step_s));
  }
  print_delivery(out, all, advice);
}

// Prints what is known about the quality of runs with the advised density.
void print_quality(std::FILE* out, const PlanOptions& o, const Fit& m, double compute_s,
                   double density) {
  if (o.steps == 0) {
    fmt::print(out,
               "quality: density {:g} needs {} steps for S = density x steps = {:g}.\n"
               "S is how often a rank sends the average entry in the run. With momentum correction "
               "four small\nmodels ended level with dense at S = {:g}. Published runs did from "
               "S = {:g} on. --steps N judges\nyour run.\n",
               density, steps_of_sends(kLevelSends, density), kLevelSends, kLevelSends,
               kParity);
    return;
  }
  const auto steps = static_cast<std::uint64_t>(o.steps);
  fmt::print(out, "quality: {}\n", quality_note(density, steps));
  const double sends = density * static_cast<double>(o.steps);
  if (reaches(sends, kParity)) {
    fmt::print(out, "Published runs with S >= {:g} reached dense accuracy, too.\n", kParity);
  }
  if (reaches(sends, kLevelSends)) return;
  const std::optional<double> level = density_of_sends(kLevelSends, steps);
  if (!level) return;
  const std::vector<Prediction> all = predictions(o, m, compute_s, {*level});
  const Prediction& p = fastest(all);
  if (p.kind == ExchangeKind::dense) {
    fmt::print(out, "At that density dense is the fastest exchange.\n");
    return;
  }
  fmt::print(out, "{} at that density: a step of {:.5g} ms, {:.2f} times as fast as dense.\n",
             p.name(), 1e3 * p.step_s, p.speed_up);
}

int run(const PlanOptions& o, const CLI::App& app) {
  for (const double d : o.densities) {
    if (!(d > 0.0 && d <= 1.0)) {
      throw InvalidArgument(fmt::format("--density: expected numbers in (0, 1], got {:g}", d));
    }
  }
  if (!(o.parameters >= 1.0)) {
    throw InvalidArgument(fmt::format("--parameters: expected at least 1, got {:g}", o.parameters));
  }
  if (o.hosts > o.ranks) {
    throw InvalidArgument(fmt::format(
        "--hosts {}: more than --ranks {}; take at most one for a rank", o.hosts, o.ranks));
  }
  if ((o.hosts > 0) == o.inside_link.empty()) {
    throw InvalidArgument("expected --hosts H and --inside-link RATE together, or neither");
  }
  const Fit m = machine_of(o, app);
  const double compute_s = parse_seconds("--compute", o.compute);
  JsonFile json(o.json);
  const std::vector<Prediction> all = predictions(o, m, compute_s, o.densities);
  const Prediction& advice = advised(all);

  std::FILE* const people = o.json == "-" ? stderr : stdout;
  fmt::print(people,
             "{:g} parameters, {} ranks, {:.4g} ns/byte, {:.4g} ms a message; compute {:.4g} ms; "
             "{}\nan entry: selection {:.3g} ns, merge {:.3g} ns, dense sum {:.3g} ns; "
             "index code {}\n",
             o.parameters, o.ranks, 1e9 * m.link.beta_s_per_byte, 1e3 * m.link.alpha_s,
             1e3 * compute_s,
             o.overlap > 0.0 ? fmt::format("the link may hide behind {:g} of it", o.overlap)
                             : "nothing overlaps",
             1e9 * m.local.select_s, 1e9 * m.local.merge_s, 1e9 * m.local.add_s,
             name_or_auto(o.codec.index));
  print_table(people, all, advice);
  print_advice(people, all, advice);
  if (advice.kind != ExchangeKind::dense) print_quality(people, o, m, compute_s, advice.density);
  nlohmann::json array = nlohmann::json::array();
  for (const Prediction& p : all) array.push_back(to_json(p, &p == &advice, o.steps));
  json.write(array);
  return 0;
}

void declare(CLI::App& app, PlanOptions& o) {
  CommandLine line(app);
  line.group("What is trained");
  line.option("--parameters", o.parameters, "N", "parameters of the model")->check(positive());
  line.option("--ranks", o.ranks, "P", "ranks")->check(CLI::Range(1, 1 << 20));
  line.plain("--compute", o.compute, "TIME", "time of a step without exchange, as 200ms or 0.2s")
      ->required();
  line.option("--density", o.densities, "D,D,...", "k/n")->delimiter(',');
  line.plain("--steps", o.steps, "N", "steps of the planned run, to judge its accuracy")
      ->check(positive());

  line.group("The link of a rank, full duplex");
  line.plain(
      "--link", o.link, "RATE",
      "rate of payload, as 100mbit or 1gbit; TCP over Ethernet leaves 95 % of the line's rate");
  line.plain("--latency", o.latency, "TIME", "latency of a message, as 50us or 0.4ms [0]");
  line.plain("--hosts", o.hosts, "H",
             "number of hosts, with the ranks spread evenly over them; adds hierarchical")
      ->check(positive());
  line.plain("--inside-link", o.inside_link, "RATE",
             "with --hosts: rate between ranks of one host");
  line.option("--inside-latency", o.inside_latency, "TIME",
              "with --hosts: latency between ranks of one host");
  line.plain("--fit", o.fit, "FILE",
             "file with link and local speeds, from skim bench network --json");

  line.group("Local work and assumptions");
  line.option("--select-ns", o.select_ns, "X", "ns to select, per entry of the model")
      ->check(not_negative());
  line.option("--merge-ns", o.merge_ns, "X", "ns to encode, decode and sum, per entry sent")
      ->check(not_negative());
  line.option("--add-ns", o.add_ns, "X", "ns of a dense sum, per entry")->check(not_negative());
  line.option("--overlap", o.overlap, "X", "fraction of --compute that can hide time of the link")
      ->check(in_range(kFraction));
  add_codec_options(line, o.codec, {"index_code", "value_code"});
  line.plain("--json", o.json, "FILE", "JSON array, one object a row; -: standard output");
}

}  // namespace

int plan_command(int argc, char** argv) {
  PlanOptions o;
  CLI::App app(
      "Predicts, with an alpha-beta-gamma model, how long a training step takes with every "
      "exchange and density. Advises the largest density whose step is within 5 % of the "
      "shortest, and says when not to compress.",
      "skim plan");
  declare(app, o);
  app.footer(
      "The model assumes that all ranks are alike, that one switch connects them, and that\n"
      "their selections have no index in common. Formulas: docs/algorithms.md, \"Cost\".\n\n"
      "Example:\n"
      "  skim plan --parameters 25.6e6 --ranks 32 --link 1gbit --latency 0.4ms --compute 0.2s");
  return parse_and_run(app, argc, argv, [&] { return run(o, app); });
}

}  // namespace skim::tool
