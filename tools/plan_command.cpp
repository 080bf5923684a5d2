// skim plan: what the cost model predicts for a model, a link and a number of ranks.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "skim/cost.hpp"
#include "skim/error.hpp"
#include "tools/command_line.hpp"
#include "tools/commands.hpp"
#include "tools/fit.hpp"
#include "tools/json_file.hpp"
#include "tools/units.hpp"

namespace skim::tool {
namespace {

struct PlanOptions {
  double params = 25.6e6;
  int ranks = 32;
  std::string link, latency, compute, fit, json;
  std::vector<double> densities{0.01, 0.001, 0.0001};
  double overlap = 0.0;
  std::string frames = "coded";
  std::string value_code = "f32";
  // ns an entry.
  double select_ns = 0.35, merge_ns = 10.0, add_ns = 0.35;
};

// A number given on the command line wins over the fit's.
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
  Scheme scheme = Scheme::dense;
  double density = 1.0;
  Cost cost;
  double step_s = 0.0, speed_up = 1.0;

  std::string_view name() const { return exchange_of(scheme); }
};

// Dense first, then every exchange at every density, in its best form.
std::vector<Prediction> predictions(const PlanOptions& o, const Fit& m, double compute_s) {
  CodecOptions codec;
  codec.value = static_cast<ValueCode>(std::ranges::find(value_code_names(), o.value_code) -
                                       value_code_names().begin());
  if (o.frames == "raw") codec.index = IndexCode::raw32;
  const FrameSize frame = frame_size(codec);
  std::vector<Prediction> all;
  const auto add = [&](Scheme scheme, double density) {
    Load load{.ranks = o.ranks, .n = o.params, .k = std::max(1.0, density * o.params)};
    load.frame = frame;
    Prediction p;
    p.scheme = scheme;
    p.density = density;
    p.cost = predict(scheme, load, m.link, m.local);
    p.step_s = step_seconds(compute_s, p.cost, o.overlap);
    p.speed_up = all.empty() ? 1.0 : all.front().step_s / p.step_s;
    if (!all.empty() && all.back().name() == p.name() && all.back().density == density) {
      if (p.step_s < all.back().step_s) all.back() = p;
      return;
    }
    all.push_back(p);
  };
  add(Scheme::dense, 1.0);
  for (const double d : o.densities) {
    for (std::size_t s = 1; s < scheme_names().size(); ++s) {
      const auto scheme = static_cast<Scheme>(s);
      if (is_possible(scheme, o.ranks)) add(scheme, d);
    }
  }
  return all;
}

nlohmann::json to_json(const Prediction& p) {
  return {{"exchange", p.name()},
          {"scheme", scheme_names()[static_cast<std::size_t>(p.scheme)]},
          {"density", p.density},
          {"step_s", p.step_s},
          {"exchange_s", p.cost.exchange_s()},
          {"link_s", p.cost.link_s},
          {"merge_s", p.cost.merge_s},
          {"select_s", p.cost.select_s},
          {"speed_up", p.speed_up},
          {"bytes", p.cost.bytes},
          {"rounds", p.cost.rounds}};
}

void print(std::FILE* out, const std::vector<Prediction>& all) {
  fmt::print(out, "{:>8} {:<20} {:>10} {:>12} {:>12} {:>12} {:>9}\n", "density", "exchange",
             "bytes", "exchange ms", "select ms", "step ms", "speed-up");
  for (const Prediction& p : all) {
    fmt::print(out, "{:>8g} {:<20} {:>10.4g} {:>12.4g} {:>12.4g} {:>12.5g} {:>9.2f}\n", p.density,
               p.name(), p.cost.bytes, 1e3 * p.cost.exchange_s(), 1e3 * p.cost.select_s,
               1e3 * p.step_s, p.speed_up);
  }
  const Prediction& best =
      *std::ranges::min_element(all, {}, [](const Prediction& p) { return p.step_s; });
  if (best.scheme == Scheme::dense) {
    fmt::print(out, "do not compress: the dense sum has the shortest step\n");
  } else {
    fmt::print(out, "best: {} at density {:g}, a step {:.2f} times as fast as dense\n", best.name(),
               best.density, best.speed_up);
  }
}

int run(const PlanOptions& o, const CLI::App& app) {
  for (const double d : o.densities) {
    if (!(d > 0.0 && d <= 1.0)) {
      throw InvalidArgument(fmt::format("--density: expected numbers in (0, 1], got {:g}", d));
    }
  }
  if (!(o.params >= 1.0)) {
    throw InvalidArgument(fmt::format("--params: expected at least 1, got {:g}", o.params));
  }
  const Fit m = machine_of(o, app);
  const double compute_s = parse_seconds("--compute", o.compute);
  JsonFile json(o.json);
  const std::vector<Prediction> all = predictions(o, m, compute_s);

  std::FILE* const people = o.json == "-" ? stderr : stdout;
  fmt::print(people,
             "{:g} parameters, {} ranks, {:.4g} ns/byte, {:.4g} ms a message; compute {:.4g} ms; "
             "{}\nan entry: selection {:.3g} ns, merge {:.3g} ns, dense sum {:.3g} ns; {} frames\n",
             o.params, o.ranks, 1e9 * m.link.beta_s_per_byte, 1e3 * m.link.alpha_s, 1e3 * compute_s,
             o.overlap > 0.0 ? fmt::format("the link may hide behind {:g} of it", o.overlap)
                             : "nothing overlaps",
             1e9 * m.local.select_s, 1e9 * m.local.merge_s, 1e9 * m.local.add_s, o.frames);
  print(people, all);
  nlohmann::json array = nlohmann::json::array();
  for (const Prediction& p : all) array.push_back(to_json(p));
  json.write(array);
  return 0;
}

void declare(CLI::App& app, PlanOptions& o) {
  CommandLine line(app);
  line.group("What is trained");
  line.option("--params", o.params, "N", "parameters of the model")->check(positive());
  line.option("--ranks", o.ranks, "P", "ranks")->check(CLI::Range(1, 1 << 20));
  line.plain("--compute", o.compute, "TIME", "of a step without any exchange, as 200ms or 0.2s")
      ->required();
  line.option("--density", o.densities, "D,D,...", "k/n")->delimiter(',');

  line.group("The link of a rank, full duplex");
  line.plain("--link", o.link, "RATE",
             "as 100mbit or 1gbit: of payload; TCP over Ethernet leaves 95 % of the line's rate");
  line.plain("--latency", o.latency, "TIME", "of a message, as 50us or 0.4ms [0]");
  line.plain("--fit", o.fit, "FILE",
             "link and local speeds as skim bench network --json wrote them");

  line.group("Local work, and what is assumed");
  line.option("--select-ns", o.select_ns, "X", "selection, of an entry of the model")
      ->check(not_negative());
  line.option("--merge-ns", o.merge_ns, "X", "encoding, decoding and summing, of an entry sent")
      ->check(not_negative());
  line.option("--add-ns", o.add_ns, "X", "a dense sum, of an entry")->check(not_negative());
  line.option("--overlap", o.overlap, "X", "part of the computing that may hide time of the link")
      ->check(CLI::Range(0.0, 1.0));
  line.choice("--frames", o.frames, "indices at their entropy, or 4 bytes each",
              std::array<std::string_view, 2>{"coded", "raw"});
  line.choice("--value-code", o.value_code, "of values in frames", value_code_names());
  line.plain("--json", o.json, "FILE", "JSON array, one object a row; -: standard output");
}

}  // namespace

int plan_command(int argc, char** argv) {
  PlanOptions o;
  CLI::App app(
      "Predicts, with an alpha-beta-gamma model, how long a training step takes with every "
      "exchange and density, and says when not to compress.",
      "skim plan");
  declare(app, o);
  app.footer(
      "Ranks are taken to be alike, their links to have one switch between them, and their\n"
      "selections to have no index in common. Formulas: docs/algorithms.md, \"Cost\".\n\n"
      "Example:\n"
      "  skim plan --params 25.6e6 --ranks 32 --link 1gbit --latency 0.4ms --compute 0.2s");
  return parse_and_run(app, argc, argv, [&] { return run(o, app); });
}

}  // namespace skim::tool
