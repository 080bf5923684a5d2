// skim bench select: how long selection takes, compared with the bare pass r += g.
#include <fmt/format.h>
#include <hwy/targets.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "bench/cases.hpp"
#include "bench/local_step.hpp"
#include "bench/measure.hpp"
#include "select/kernels.hpp"
#include "skim/error.hpp"
#include "skim/names.hpp"
#include "skim/schedule.hpp"
#include "tools/command_line.hpp"
#include "tools/commands.hpp"
#include "tools/json_file.hpp"
#include "tools/npy.hpp"
#include "tools/torch_part.hpp"

namespace skim::tool {
namespace {

using train::kTorchTopk;

constexpr std::string_view kNthElement = "std::nth_element";

// ---- baselines: common ways to select without Skim

// Computes residual += gradient and the k-th magnitude. Selects the entries above it, and ties from
// the left.
class NthElement final : public Selector {
 public:
  std::string_view name() const noexcept override { return kNthElement; }
  SelectReport select(const SelectTask& task, SparseBuffer& out) override {
    const std::span<float> r = task.residual.span();
    bench::add(r.data(), task.grad.f32().data(), r.size());
    magnitude_.resize(r.size());
    std::ranges::transform(r, magnitude_.begin(), [](float v) { return std::abs(v); });
    const auto kth = magnitude_.begin() + static_cast<std::ptrdiff_t>(task.keep.k - 1);
    std::nth_element(magnitude_.begin(), kth, magnitude_.end(), std::greater<>());
    const float t = *kth;
    auto ties = static_cast<std::size_t>(std::count(magnitude_.begin(), kth + 1, t));
    out.reset(r.size());
    for (std::size_t i = 0; i < r.size(); ++i) {
      const float m = std::abs(r[i]);
      if (m < t || (m == t && ties == 0)) continue;
      if (m == t) --ties;
      out.append(static_cast<Index>(i), r[i]);
    }
    SelectReport report;
    report.threshold = bench::smallest_magnitude(out.view().value);
    return report;
  }

 private:
  std::vector<float> magnitude_;
};

// ---- one case

constexpr double kAddBytes = 12.0;  // per entry: two reads and a write

struct BenchCase {
  std::string rule, shape;
  std::size_t n = 0;
  double density = 0.0;
  int threads = 1;
};

bool is_baseline(std::string_view rule) {
  const auto names = names_of<SelectRule>();
  return std::ranges::find(names, rule) == names.end();
}
bool is_exact(std::string_view rule) { return rule == "exact" || is_baseline(rule); }

// threshold: for the rule `threshold`; other rules ignore it.
std::unique_ptr<Selector> selector_of(const BenchCase& c, float threshold) {
  if (c.rule == kNthElement) return std::make_unique<NthElement>();
  if (c.rule == kTorchTopk) return torch_part().topk(c.threads);
  SelectOptions options;
  options.rule = from_name<SelectRule>(c.rule, "--select");
  options.threshold = threshold;
  return make_selector(options);
}

// Threads that run a job together. The caller is one of them.
class Team {
 public:
  explicit Team(int size) : size_(size), gate_(size) {
    for (int t = 1; t < size; ++t) {
      others_.emplace_back([this, t] {
        for (;;) {
          gate_.arrive_and_wait();
          if (job_ == nullptr) return;
          (*job_)(t);
          gate_.arrive_and_wait();
        }
      });
    }
  }
  ~Team() {
    job_ = nullptr;
    if (size_ > 1) gate_.arrive_and_wait();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Runs job(thread) on all threads. Returns the time until all have ended, in ns.
  double run(const std::function<void(int)>& job) {
    job_ = &job;
    const auto start = std::chrono::steady_clock::now();
    if (size_ > 1) gate_.arrive_and_wait();
    job(0);
    if (size_ > 1) gate_.arrive_and_wait();
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start)
        .count();
  }

 private:
  int size_;
  const std::function<void(int)>* job_ = nullptr;
  std::barrier<> gate_;
  std::vector<std::jthread> others_;  // last member: the threads end before the members they use
};

struct Result {
  BenchCase of;
  bench::Times times;
  std::string input;
};

// One bucket on the CPU, divided into one part for each thread.
class CpuSteps final : public bench::Timed {
 public:
  CpuSteps(const BenchCase& c, const bench::Gradients& gradients) : case_(c), team_(c.threads) {
    const auto parts = static_cast<std::size_t>(c.threads);
    for (std::size_t t = 0; t < parts; ++t) {
      const std::size_t first = c.n * t / parts, n = c.n * (t + 1) / parts - first;
      const float threshold = c.rule == "threshold" ? known_threshold(gradients, first, n) : 0.0F;
      steps_.push_back(std::make_unique<bench::LocalStep>(selector_of(c, threshold), gradients,
                                                          first, n, entries(c.density, n)));
    }
    reports_.resize(parts);
  }

  void load(std::uint64_t step) override {
    each([step](bench::LocalStep& s) { s.load(step); });
  }
  double select() override {
    return team_.run([&](int t) {
      const auto at = static_cast<std::size_t>(t);
      reports_[at] = steps_[at]->select();
    });
  }
  double whole() override {
    return team_.run([&](int t) {
      const auto at = static_cast<std::size_t>(t);
      reports_[at] = steps_[at]->whole();
    });
  }
  double bare() override {
    return each([](bench::LocalStep& s) { s.bare(); });
  }
  double bare_local() override {
    return each([](bench::LocalStep& s) { s.bare_local(); });
  }
  double memory_rate() override {
    const double ns = each([](bench::LocalStep& s) { s.triad(); });
    return 1e9 * kAddBytes * static_cast<double>(case_.n) / ns;
  }
  void verify() override {
    std::vector<std::vector<float>> expected(steps_.size());
    for (std::size_t t = 0; t < steps_.size(); ++t) expected[t] = steps_[t]->accumulated();
    select();
    for (std::size_t t = 0; t < steps_.size(); ++t) {
      bench::verify(case_.rule, is_exact(case_.rule), case_.shape, expected[t], steps_[t]->k(),
                    steps_[t]->selection(), reports_[t].threshold);
    }
  }

  std::size_t k() const override {
    std::size_t k = 0;
    for (const auto& s : steps_) k += s->k();
    return k;
  }
  std::size_t selected() const override {
    std::size_t selected = 0;
    for (const auto& s : steps_) selected += s->selection().nnz();
    return selected;
  }
  int passes() const override {
    return std::ranges::max(reports_, {}, &SelectReport::passes).passes;
  }

 private:
  // The k-th magnitude that `exact` finds in the same steady state.
  static float known_threshold(const bench::Gradients& gradients, std::size_t first, std::size_t n,
                               std::size_t k) {
    bench::LocalStep exact(make_selector({}), gradients, first, n, k);
    SelectReport last;
    for (std::uint64_t step = 0; step < bench::kStepsBefore; ++step) {
      exact.load(step);
      last = exact.select();
    }
    return last.threshold;
  }
  float known_threshold(const bench::Gradients& gradients, std::size_t first, std::size_t n) const {
    return known_threshold(gradients, first, n, entries(case_.density, n));
  }

  double each(const std::function<void(bench::LocalStep&)>& job) {
    return team_.run([&](int t) { job(*steps_[static_cast<std::size_t>(t)]); });
  }

  BenchCase case_;
  Team team_;
  std::vector<std::unique_ptr<bench::LocalStep>> steps_;
  std::vector<SelectReport> reports_;
};

// ---- the command

struct BenchOptions {
  std::vector<std::string> rules, shapes;
  std::vector<std::size_t> lengths;
  std::vector<double> densities;
  std::vector<int> threads;
  std::filesystem::path recorded;
  std::string target, json;
  double seconds = 0.0;
  bool quick = false;
};

std::vector<std::string> algorithms() {
  const auto names = names_of<SelectRule>();
  return {names.begin(), names.end()};
}

std::vector<std::string> shapes(std::size_t count) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < count; ++i) names.emplace_back(bench::kShapes[i].name);
  return names;
}

// The CPU targets that this machine can run, best first.
std::vector<std::pair<std::string, std::int64_t>> targets() {
  std::vector<std::pair<std::string, std::int64_t>> list;
  std::int64_t bits = kernels::compiled_targets() & hwy::SupportedTargets();
  for (; bits != 0; bits &= bits - 1)
    list.emplace_back(hwy::TargetName(bits & -bits), bits & -bits);
  return list;
}

template <class T>
std::vector<T> or_else(const std::vector<T>& given, std::vector<T> otherwise) {
  return given.empty() ? std::move(otherwise) : given;
}

// The cases are ordered so that those with the same input are adjacent.
std::vector<BenchCase> cases_of(const BenchOptions& o) {
  std::vector<BenchCase> list;
  const auto add = [&](const std::vector<std::string>& rules, const std::vector<std::size_t>& ns,
                       const std::vector<std::string>& of_shapes,
                       const std::vector<double>& densities, const std::vector<int>& threads) {
    for (const std::size_t n : ns) {
      for (const std::string& shape : of_shapes) {
        for (const double d : densities) {
          for (const int t : threads) {
            for (const std::string& rule : rules) {
              // Baselines accumulate NaN.
              if (is_baseline(rule) && shape == "nonfinite") continue;
              list.push_back({rule, shape, n, d, t});
            }
          }
        }
      }
    }
  };
  const std::vector<double> all_densities(bench::kDensities.begin(), bench::kDensities.end());
  std::vector<std::size_t> lengths(bench::kLengths.begin(), bench::kLengths.end());
  if (o.quick) std::erase_if(lengths, [](std::size_t n) { return n > std::size_t{1} << 22U; });
  const std::size_t middle = o.quick ? lengths.back() : bench::kMiddleLength;
  const std::vector<int> threads = or_else(o.threads, {1});

  std::vector<std::string> others = or_else(o.rules, algorithms());
  const bool with_exact = std::erase(others, "exact") > 0;
  const bool axes_given = !(o.lengths.empty() && o.shapes.empty() && o.densities.empty());
  if (with_exact && axes_given) {
    add({"exact"}, or_else(o.lengths, {middle}), or_else(o.shapes, {"normal"}),
        or_else(o.densities, {0.001}), threads);
  } else if (with_exact) {
    add({"exact"}, lengths, shapes(bench::kShapesOfFullRun), all_densities, threads);
    if (!o.quick) {
      add({"exact"}, {middle}, {"normal", "recorded"}, {0.1, 0.01, 0.0001}, threads);
    }
    add({"exact"}, {middle}, shapes(bench::kShapes.size()), {0.001}, threads);
    if (o.threads.empty() && !o.quick) {
      add({"exact"}, {middle}, {"normal"}, all_densities, {2});
    }
  }
  if (o.rules.empty()) {
    others.emplace_back(kNthElement);
    others.emplace_back(kTorchTopk);
  }
  add(others, or_else(o.lengths, {middle}), or_else(o.shapes, {"normal", "recorded"}),
      or_else(o.densities, {0.01, 0.001}), threads);
  return list;
}

// bytes_read and bytes_written are the bytes that a step must move: the passes, the entries and the
// journal of the commit. They are calculated and ignore the effects of caches.
nlohmann::json to_json(const Result& r) {
  const bench::Times& t = r.times;
  const auto n = static_cast<double>(r.of.n), kept = static_cast<double>(t.selected);
  nlohmann::json j{{"select", r.of.rule},
                   {"n", r.of.n},
                   {"density", r.of.density},
                   {"k", t.k},
                   {"selected", t.selected},
                   {"shape", r.of.shape},
                   {"input", r.input},
                   {"target", hwy::TargetName(kernels::running_target())},
                   {"threads", r.of.threads},
                   {"ns", t.ns},
                   {"worst_ns", t.worst_ns},
                   {"add_pass_ns", t.add_ns},
                   {"ratio", t.ratio()},
                   {"local_step_ns", t.local_ns},
                   {"add_and_clear_pass_ns", t.add_and_clear_ns},
                   {"local_step_ratio", t.local_ratio()},
                   {"cold_ns", t.cold_ns},
                   {"memory_bytes_per_second", t.memory_rate},
                   {"add_pass_of_memory_rate", 1e9 * kAddBytes * n / t.add_ns / t.memory_rate}};
  if (is_baseline(r.of.rule)) {
    if (r.of.rule == kTorchTopk) j["target"] = "torch";
    if (r.of.rule == kNthElement) j["target"] = "g++";
    return j;
  }
  j["passes"] = t.passes;
  j["bytes_read"] = 8.0 * n + 4.0 * n * (t.passes - 1) + 12.0 * kept;
  j["bytes_written"] = 4.0 * n + 20.0 * kept;
  return j;
}

void print_header(std::FILE* out) {
  fmt::print(out,
             "{:<18} {:<12} {:>10} {:>8} {:>9} {:>2} {:>10} {:>10} {:>7} {:>7} {:>7} {:>10} {}\n",
             "select", "shape", "n", "density", "selected", "T", "ms", "r+=g ms", "ratio", "worst",
             "local", "cold ms", "passes");
}
void print_row(std::FILE* out, const Result& r) {
  const bench::Times& t = r.times;
  fmt::print(
      out,
      "{:<18} {:<12} {:>10} {:>8g} {:>9} {:>2} {:>10.4f} {:>10.4f} {:>7.3f} {:>7.3f} {:>7.3f} "
      "{:>10.3f} {}\n",
      r.of.rule, r.of.shape, r.of.n, r.of.density, t.selected, r.of.threads, 1e-6 * t.ns,
      1e-6 * t.add_ns, t.ratio(), t.worst_ns / t.add_ns, t.local_ratio(), 1e-6 * t.cold_ns,
      is_baseline(r.of.rule) ? std::string("-") : std::to_string(t.passes));
  std::fflush(out);
}

bench::Times measure(const BenchCase& c, const bench::Gradients& gradients, double seconds) {
  // A baseline carries only the residual from step to step.
  const std::uint64_t before =
      is_baseline(c.rule) ? bench::Gradients::kInTurn : bench::kStepsBefore;
  CpuSteps steps(c, gradients);
  return bench::measure(steps, before, seconds);
}

int run(const BenchOptions& o) {
  for (const double d : o.densities) {
    if (!(d > 0.0 && d <= 1.0)) {
      throw InvalidArgument(fmt::format("--density: expected numbers in (0, 1], got {}", d));
    }
  }
  for (const int t : o.threads) {
    for (const std::size_t n : o.lengths) {
      if (n < static_cast<std::size_t>(t)) {
        throw InvalidArgument("--n: expected at least one entry a thread (n=" + std::to_string(n) +
                              ", threads=" + std::to_string(t) + ")");
      }
    }
  }
  const std::vector<BenchCase> list = cases_of(o);
  std::vector<float> recorded;
  if (!o.recorded.empty()) recorded = read_npy(o.recorded);
  JsonFile json(o.json);
  if (!o.target.empty()) {
    for (const auto& [name, bit] : targets()) {
      if (name == o.target) hwy::SetSupportedTargetsForTest(bit);
    }
  }
  std::FILE* const people = o.json == "-" ? stderr : stdout;
  // A few cases get more time each than hundreds do.
  const double seconds = o.seconds > 0.0 ? o.seconds : list.size() > 16 ? 0.25 : 2.0;

  nlohmann::json results = nlohmann::json::array();
  std::unique_ptr<bench::Gradients> gradients;
  print_header(people);
  for (const BenchCase& c : list) {
    if (!gradients || gradients->shape() != c.shape || gradients->n() != c.n) {
      gradients.reset();  // frees the old ones before the new ones are made
      gradients = std::make_unique<bench::Gradients>(c.shape, c.n, recorded);
    }
    Result result{c, measure(c, *gradients, seconds), {}};
    result.input = c.shape != "recorded" ? "generated"
                   : recorded.empty()    ? "generated: rows of Laplace, lognormal scales"
                                         : o.recorded.filename().string();
    print_row(people, result);
    results.push_back(to_json(result));
  }
  fmt::print(people,
             "ms: accumulate + select + commit, median; ratio: over the pass r += g; worst: the "
             "slowest of the 4 gradients\nin turn; local: with the sum scattered into the zeroed "
             "gradient, over r += g, g = 0. CPU target: {}.\n",
             hwy::TargetName(kernels::running_target()));
  json.write(results);
  return 0;
}

void declare(CLI::App& app, BenchOptions& o) {
  CommandLine line(app);
  const auto list = [&](const char* name, auto& value, const char* type, const std::string& what) {
    return line.plain(name, value, type, what)->delimiter(',');
  };
  const std::vector<std::string> names = algorithms();
  std::vector<std::string> target_names;
  for (const auto& [name, bit] : targets()) target_names.push_back(name);
  std::string described;
  for (const bench::Shape& s : bench::kShapes) {
    described += fmt::format("{}{} ({})", described.empty() ? "" : "; ", s.name, s.what);
  }

  line.group("What is timed (each a list A,B,...; without any of them: the full run)");
  list("--select", o.rules, "NAME",
       fmt::format("rules: {} [all, and two baselines: {}, {}]", name_list(names), kNthElement,
                   kTorchTopk))
      ->check(CLI::IsMember(names));
  list("--n", o.lengths, "N", "entries of the gradient [exact: 4^8 .. 4^14; others: 25000000]")
      ->check(CLI::Range(std::size_t{1}, std::size_t{std::numeric_limits<Index>::max()}));
  list("--density", o.densities, "D", "k/n [exact: 0.1 .. 0.0001; others: 0.01,0.001]");
  list("--shape", o.shapes, "NAME", "gradients: " + described + " [others: normal,recorded]")
      ->check(CLI::IsMember(shapes(bench::kShapes.size())));
  list("--threads", o.threads, "T", "split the bucket into T parts, with a thread for each [1]")
      ->check(CLI::Range(1, 1024));

  line.group("How");
  line.plain("--recorded", o.recorded, "FILE",
             "for --shape recorded: .npy file with a gradient of training, repeated to N entries");
  line.plain("--target", o.target, "NAME",
             fmt::format("CPU target: {} [the best]", name_list(target_names)))
      ->check(CLI::IsMember(target_names));
  line.plain("--seconds", o.seconds, "X",
             "how long to repeat each case [2; 0.25 for more than 16 cases]")
      ->check(positive());
  line.flag("--quick", o.quick, "the full run, with at most 4^11 entries");
  line.plain("--json", o.json, "FILE", "JSON array, one object a case; -: standard output");
}

}  // namespace

int bench_select_command(int argc, char** argv) {
  BenchOptions o;
  CLI::App app(
      "Times selection with error feedback, and the bare pass r += g for comparison, in the steady "
      "state of training.",
      "skim bench select");
  declare(app, o);
  app.footer(
      "Every case first runs 20 steps with 4 gradients in turn, to reach the state of a\n"
      "training run. Its result is checked. Then steps and bare passes are timed in turn.\n\n"
      "Example:\n"
      "  skim bench select --select exact --n 25000000 --density 0.001 --shape normal");
  return parse_and_run(app, argc, argv, [&] { return run(o); });
}

}  // namespace skim::tool
