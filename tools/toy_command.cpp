// skim simulate --toy: top-k on both links, on a problem that is small enough to check by hand.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "bench/two_way_toy.hpp"
#include "tools/command_line.hpp"
#include "tools/commands.hpp"
#include "tools/json_file.hpp"

namespace skim::tool {
namespace {

struct ToyOptions {
  int seeds = 20, steps = 1000;
  ServerPlacement server = ServerPlacement::rank0;
  std::string json;
};

int run(const ToyOptions& o) {
  JsonFile json(o.json);
  std::FILE* const people = o.json == "-" ? stderr : stdout;
  struct Method {
    std::string_view name;
    double up, down;
  };
  constexpr Method kMethods[]{
      {"one way (up)", 0.01, 1.0}, {"both ways", 0.01, 0.01}, {"one way (down)", 1.0, 0.01}};
  nlohmann::json rows = nlohmann::json::array();
  fmt::print(people, "{:<16} {:>10} {:>10}\n", "top-k", "F - F*", "deviation");
  for (const Method& m : kMethods) {
    double sum = 0.0, squares = 0.0;
    for (int seed = 1; seed <= o.seeds; ++seed) {
      const double gap = bench::run_two_way_toy({.up = m.up,
                                                 .down = m.down,
                                                 .server = o.server,
                                                 .steps = o.steps,
                                                 .seed = static_cast<std::uint64_t>(seed)});
      sum += gap;
      squares += gap * gap;
    }
    const double mean = sum / o.seeds;
    const double deviation = std::sqrt(std::max(0.0, squares / o.seeds - mean * mean));
    fmt::print(people, "{:<16} {:>10.3f} {:>10.3f}\n", m.name, mean, deviation);
    rows.push_back({{"method", m.name},
                    {"density", m.up},
                    {"down_density", m.down},
                    {"gap", mean},
                    {"deviation", deviation},
                    {"seeds", o.seeds},
                    {"steps", o.steps}});
  }
  fmt::print(
      people,
      "Three ranks, f(x) = |x - a|^2 / 2 with a = 1, 5, 10 in each of 100 entries, rate 0.01,\n"
      "one entry a link; mean of the last 100 steps, over the seeds of x_0 = 20 + N(0, 1).\n");
  json.write(rows);
  return 0;
}

}  // namespace

int simulate_toy(int argc, char** argv) {
  ToyOptions o;
  bool toy = false;
  CLI::App app(
      "Trains three ranks on the toy problem of top-k on both links of a parameter server (Zou, De "
      "Sterck and Liu, arXiv 2209.15203).",
      "skim simulate");
  CommandLine line(app);
  line.group("Form");
  line.flag("--toy", toy, "run the toy problem");
  line.group("What is run");
  line.option("--seeds", o.seeds, "N", "starting points")->check(positive());
  line.option("--steps", o.steps, "N", "steps from each starting point; at least 100")
      ->check(CLI::Range(100, 1 << 30));
  line.choice("--server", o.server, "who sums");
  line.plain("--json", o.json, "FILE", "JSON array, one object a method; -: standard output");
  return parse_and_run(app, argc, argv, [&] { return run(o); });
}

}  // namespace skim::tool
