// skim bench select: how long selection takes, beside the bare pass r += g.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <hwy/targets.h>
#include <torch/torch.h>

#include <algorithm>
#include <barrier>
#include <cerrno>
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
#include "select/kernels.hpp"
#include "skim/error.hpp"
#include "tools/commands.hpp"
#include "tools/npy.hpp"
#include "tools/train_command.hpp"

namespace skim::tool {
namespace {

constexpr int kUsageError = 2, kRunError = 1;
constexpr std::string_view kNthElement = "std::nth_element", kTorchTopk = "torch.topk";

// ---- baselines: what one does without Skim, as selectors

// residual += gradient; the k-th magnitude by `kth`; the entries above it, and ties from the left.
class Baseline : public Selector {
 public:
  SelectReport select(const SelectTask& task, SparseBuffer& out) override {
    const std::span<float> r = task.residual.span();
    bench::add(r.data(), task.grad.f32().data(), r.size());
    out.reset(r.size());
    choose(r, task.keep.k, out);
    SelectReport report;
    report.threshold = std::numeric_limits<float>::infinity();
    for (const float v : out.view().value) {
      report.threshold = std::min(report.threshold, std::abs(v));
    }
    return report;
  }

 private:
  virtual void choose(std::span<const float> r, std::size_t k, SparseBuffer& out) = 0;
};

class NthElement final : public Baseline {
  std::string_view name() const noexcept override { return kNthElement; }
  void choose(std::span<const float> r, std::size_t k, SparseBuffer& out) override {
    magnitude_.resize(r.size());
    std::ranges::transform(r, magnitude_.begin(), [](float v) { return std::abs(v); });
    const auto kth = magnitude_.begin() + static_cast<std::ptrdiff_t>(k - 1);
    std::nth_element(magnitude_.begin(), kth, magnitude_.end(), std::greater<>());
    const float t = *kth;
    auto ties = static_cast<std::size_t>(std::count(magnitude_.begin(), kth + 1, t));
    for (std::size_t i = 0; i < r.size(); ++i) {
      const float m = std::abs(r[i]);
      if (m < t || (m == t && ties == 0)) continue;
      if (m == t) --ties;
      out.append(static_cast<Index>(i), r[i]);
    }
  }
  std::vector<float> magnitude_;
};

class TorchTopk final : public Baseline {
  std::string_view name() const noexcept override { return kTorchTopk; }
  void choose(std::span<const float> r, std::size_t k, SparseBuffer& out) override {
    const torch::NoGradGuard no_grad;
    const torch::Tensor x =
        torch::from_blob(const_cast<float*>(r.data()), {static_cast<std::int64_t>(r.size())});
    const auto top = x.abs().topk(static_cast<std::int64_t>(k), 0, true, /*sorted=*/false);
    const torch::Tensor index = std::get<0>(std::get<1>(top).sort());
    const auto* const at = index.data_ptr<std::int64_t>();
    for (std::size_t e = 0; e < k; ++e) {
      out.append(static_cast<Index>(at[e]), r[static_cast<std::size_t>(at[e])]);
    }
  }
};

// ---- one case

struct BenchCase {
  std::string algo, shape;
  std::size_t n = 0;
  double density = 0.0;
  int threads = 1;
};

bool is_baseline(std::string_view algo) { return algo == kNthElement || algo == kTorchTopk; }
bool is_exact(std::string_view algo) { return algo == "exact" || is_baseline(algo); }

// threshold: of the rule that is told one.
std::unique_ptr<Selector> selector_of(const std::string& algo, float threshold) {
  if (algo == kNthElement) return std::make_unique<NthElement>();
  if (algo == kTorchTopk) return std::make_unique<TorchTopk>();
  const auto names = select_algo_names();
  SelectOptions options;
  options.algo = static_cast<SelectAlgo>(std::ranges::find(names, algo) - names.begin());
  options.threshold = threshold;
  return make_selector(options);
}

// Threads that do a job together; the caller is one of them.
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

  // ns until all have done job(thread).
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
  std::vector<std::jthread> others_;  // last: they end before what they use
};

double median(std::vector<double> x) {
  const auto middle = x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2);
  std::ranges::nth_element(x, middle);
  return *middle;
}

struct Result {
  BenchCase of;
  std::size_t k = 0, selected = 0;
  double ns = 0.0, worst_ns = 0.0, local_ns = 0.0, cold_ns = 0.0;
  double add_ns = 0.0, add_and_clear_ns = 0.0, triad_ns = 0.0;
  int passes = 0;
  std::string input;

  double ratio() const { return ns / add_ns; }
  double local_ratio() const { return local_ns / add_and_clear_ns; }
};

// What was judged wrong before a case was timed.
struct WrongResult : Error {
  using Error::Error;
};

// One bucket, in as many parts as there are threads.
class Run {
 public:
  Run(const BenchCase& c, const bench::Gradients& gradients) : case_(c), team_(c.threads) {
    const auto parts = static_cast<std::size_t>(c.threads);
    for (std::size_t t = 0; t < parts; ++t) {
      const std::size_t first = c.n * t / parts, n = c.n * (t + 1) / parts - first;
      const float threshold = c.algo == "threshold" ? known_threshold(gradients, first, n) : 0.0F;
      steps_.push_back(std::make_unique<bench::LocalStep>(selector_of(c.algo, threshold), gradients,
                                                          first, n, bench::kept(c.density, n)));
    }
    reports_.resize(parts);
  }

  Result measure(double seconds) {
    constexpr std::uint64_t kStepsBefore = 20;
    constexpr std::size_t kLeast = bench::Gradients::kInTurn, kMost = 400;
    Result result;
    result.of = case_;
    std::uint64_t step = 0;
    load(step);
    result.cold_ns = select();
    // A baseline carries nothing from step to step but the residual.
    while (++step < (is_baseline(case_.algo) ? bench::Gradients::kInTurn : kStepsBefore)) {
      load(step);
      select();
    }
    verify(step++);

    std::vector<double> ns, local, add, add_and_clear, triad;
    std::array<std::vector<double>, bench::Gradients::kInTurn> of_turn;
    const auto start = std::chrono::steady_clock::now();
    const auto spent = [&] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    // Interleaved, so that what else the machine does falls on all alike.
    while (ns.size() < kLeast || (ns.size() < kMost && spent() < seconds)) {
      load(step);
      add.push_back(each([](bench::LocalStep& s) { s.bare(); }));
      triad.push_back(each([](bench::LocalStep& s) { s.triad(); }));
      // In this order and the other, so that each gets all gradients in turn.
      const bool whole_first = ns.size() / 2 % 2 == 1;
      for (const bool is_whole : {whole_first, !whole_first}) {
        load(step);
        if (is_whole) {
          local.push_back(whole());
        } else {
          ns.push_back(select());
          of_turn[step % bench::Gradients::kInTurn].push_back(ns.back());
        }
        for (const SelectReport& r : reports_) result.passes = std::max(result.passes, r.passes);
        ++step;
      }
      load(step);
      add_and_clear.push_back(each([](bench::LocalStep& s) { s.bare_local(); }));
    }
    for (const auto& s : steps_) {
      result.k += s->k();
      result.selected += s->selection().nnz();
    }
    result.ns = median(ns);
    for (const auto& turn : of_turn) result.worst_ns = std::max(result.worst_ns, median(turn));
    result.local_ns = median(local);
    result.add_ns = median(add);
    result.add_and_clear_ns = median(add_and_clear);
    result.triad_ns = median(triad);
    return result;
  }

 private:
  // The k-th magnitude of a run of `exact` in the same steady state.
  static float known_threshold(const bench::Gradients& gradients, std::size_t first, std::size_t n,
                               std::size_t k) {
    bench::LocalStep exact(make_selector({}), gradients, first, n, k);
    SelectReport last;
    for (std::uint64_t step = 0; step < 20; ++step) {
      exact.load(step);
      last = exact.select();
    }
    return last.threshold;
  }
  float known_threshold(const bench::Gradients& gradients, std::size_t first, std::size_t n) const {
    return known_threshold(gradients, first, n, bench::kept(case_.density, n));
  }

  double each(const std::function<void(bench::LocalStep&)>& job) {
    return team_.run([&](int t) { job(*steps_[static_cast<std::size_t>(t)]); });
  }
  void load(std::uint64_t step) {
    each([step](bench::LocalStep& s) { s.load(step); });
  }
  double select() {
    return team_.run([&](int t) {
      const auto at = static_cast<std::size_t>(t);
      reports_[at] = steps_[at]->select();
    });
  }
  double whole() {
    return team_.run([&](int t) {
      const auto at = static_cast<std::size_t>(t);
      reports_[at] = steps_[at]->whole();
    });
  }

  void verify(std::uint64_t step) {
    load(step);
    std::vector<std::vector<float>> expected(steps_.size());
    for (std::size_t t = 0; t < steps_.size(); ++t) expected[t] = steps_[t]->accumulated();
    select();
    for (std::size_t t = 0; t < steps_.size(); ++t) {
      const SparseView chosen = steps_[t]->selection();
      std::string wrong = bench::wrong_entries(expected[t], chosen, reports_[t].threshold);
      if (wrong.empty() && is_exact(case_.algo)) {
        wrong = bench::not_the_largest(expected[t], steps_[t]->k(), chosen, reports_[t].threshold);
      }
      if (!wrong.empty()) {
        throw WrongResult("bench select: " + case_.algo + " on " + case_.shape +
                          ", n=" + std::to_string(case_.n) + ": " + wrong);
      }
    }
  }

  BenchCase case_;
  Team team_;
  std::vector<std::unique_ptr<bench::LocalStep>> steps_;
  std::vector<SelectReport> reports_;
};

// ---- the command

struct BenchOptions {
  std::vector<std::string> algos, shapes;
  std::vector<std::size_t> lengths;
  std::vector<double> densities;
  std::vector<int> threads;
  std::filesystem::path recorded;
  std::string target, json;
  double seconds = 0.0;
  bool quick = false;
};

std::vector<std::string> algorithms() {
  const auto names = select_algo_names();
  return {names.begin(), names.end()};
}

std::vector<std::string> shapes(std::size_t count) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < count; ++i) names.emplace_back(bench::kShapes[i].name);
  return names;
}

// CPU targets that can be asked for, best first.
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

// Ordered so that cases of one input follow one another.
std::vector<BenchCase> cases_of(const BenchOptions& o) {
  std::vector<BenchCase> list;
  const auto add = [&](const std::vector<std::string>& algos, const std::vector<std::size_t>& ns,
                       const std::vector<std::string>& of_shapes,
                       const std::vector<double>& densities, const std::vector<int>& threads) {
    for (const std::size_t n : ns) {
      for (const std::string& shape : of_shapes) {
        for (const double d : densities) {
          for (const int t : threads) {
            for (const std::string& algo : algos) {
              if (is_baseline(algo) && shape == "nonfinite") continue;  // they add NaN up
              list.push_back({algo, shape, n, d, t});
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

  std::vector<std::string> others = or_else(o.algos, algorithms());
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
    if (o.threads.empty() && !o.quick) add({"exact"}, {middle}, {"normal"}, all_densities, {2});
  }
  if (o.algos.empty()) {
    others.emplace_back(kNthElement);
    others.emplace_back(kTorchTopk);
  }
  add(others, or_else(o.lengths, {middle}), or_else(o.shapes, {"normal", "recorded"}),
      or_else(o.densities, {0.01, 0.001}), threads);
  return list;
}

// Bytes that a step must move: the passes, the entries and the journal of the commit. Counted, not
// measured: what caches save or reload is not in it.
nlohmann::json to_json(const Result& r) {
  const auto n = static_cast<double>(r.of.n), kept = static_cast<double>(r.selected);
  const double add_bytes = 12.0 * n;
  nlohmann::json j{{"algo", r.of.algo},
                   {"n", r.of.n},
                   {"density", r.of.density},
                   {"k", r.k},
                   {"selected", r.selected},
                   {"shape", r.of.shape},
                   {"input", r.input},
                   {"target", hwy::TargetName(kernels::running_target())},
                   {"threads", r.of.threads},
                   {"ns", r.ns},
                   {"worst_ns", r.worst_ns},
                   {"add_pass_ns", r.add_ns},
                   {"ratio", r.ratio()},
                   {"local_step_ns", r.local_ns},
                   {"add_and_clear_pass_ns", r.add_and_clear_ns},
                   {"local_step_ratio", r.local_ratio()},
                   {"cold_ns", r.cold_ns},
                   {"memory_bytes_per_second", 1e9 * add_bytes / r.triad_ns},
                   {"add_pass_of_memory_rate", r.triad_ns / r.add_ns}};
  if (is_baseline(r.of.algo)) {
    j["target"] = r.of.algo == kTorchTopk ? "torch" : "g++";
    return j;
  }
  j["passes"] = r.passes;
  j["bytes_read"] = 8.0 * n + 4.0 * n * (r.passes - 1) + 12.0 * kept;
  j["bytes_written"] = 4.0 * n + 20.0 * kept;
  return j;
}

void print_header(std::FILE* out) {
  fmt::print(out,
             "{:<18} {:<12} {:>10} {:>8} {:>9} {:>2} {:>10} {:>10} {:>7} {:>7} {:>7} {:>10} {}\n",
             "algo", "shape", "n", "density", "selected", "T", "ms", "r+=g ms", "ratio", "worst",
             "local", "cold ms", "passes");
}
void print_row(std::FILE* out, const Result& r) {
  fmt::print(
      out,
      "{:<18} {:<12} {:>10} {:>8g} {:>9} {:>2} {:>10.4f} {:>10.4f} {:>7.3f} {:>7.3f} {:>7.3f} "
      "{:>10.3f} {}\n",
      r.of.algo, r.of.shape, r.of.n, r.of.density, r.selected, r.of.threads, 1e-6 * r.ns,
      1e-6 * r.add_ns, r.ratio(), r.worst_ns / r.add_ns, r.local_ratio(), 1e-6 * r.cold_ns,
      is_baseline(r.of.algo) ? std::string("-") : std::to_string(r.passes));
  std::fflush(out);
}

// The file is opened first: a run of minutes must not end with "cannot open".
class JsonFile {
 public:
  explicit JsonFile(const std::string& path) : path_(path) {
    if (path.empty() || path == "-") return;
    file_.reset(std::fopen(path.c_str(), "w"));
    if (!file_) {
      throw InvalidArgument("--json: cannot open '" + path + "': " + std::strerror(errno));
    }
  }
  void write(const nlohmann::json& array) {
    if (path_.empty()) return;
    std::FILE* const out = file_ ? file_.get() : stdout;
    const std::string text = array.dump(1) + "\n";
    if (std::fwrite(text.data(), 1, text.size(), out) != text.size() || std::fflush(out) != 0) {
      throw Error("--json: cannot write '" + path_ + "': " + std::strerror(errno));
    }
  }

 private:
  struct Closer {
    void operator()(std::FILE* f) const { std::fclose(f); }
  };
  std::string path_;
  std::unique_ptr<std::FILE, Closer> file_;
};

int run(const BenchOptions& o) {
  for (const double d : o.densities) {
    if (!(d > 0.0 && d <= 1.0)) {
      throw InvalidArgument("--density: expected numbers in (0, 1], got " +
                            nlohmann::json(d).dump());
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
  // One case alone has more time than one of hundreds.
  const double seconds = o.seconds > 0.0 ? o.seconds : list.size() > 16 ? 0.25 : 2.0;

  nlohmann::json results = nlohmann::json::array();
  std::unique_ptr<bench::Gradients> gradients;
  print_header(people);
  for (const BenchCase& c : list) {
    if (!gradients || gradients->shape() != c.shape || gradients->n() != c.n) {
      gradients.reset();  // first, so that two are never there
      gradients = std::make_unique<bench::Gradients>(c.shape, c.n, recorded);
    }
    at::set_num_threads(c.threads);
    Result result = Run(c, *gradients).measure(seconds);
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

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& n : names) text += (text.empty() ? "" : ", ") + n;
  return text;
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
  list("--algo", o.algos, "NAME",
       fmt::format("rules: {} [all, and two baselines: {}, {}]", joined(names), kNthElement,
                   kTorchTopk))
      ->check(CLI::IsMember(names));
  list("--n", o.lengths, "N", "entries of the gradient [exact: 4^8 .. 4^14; others: 25000000]")
      ->check(CLI::Range(std::size_t{1}, std::size_t{std::numeric_limits<Index>::max()}));
  list("--density", o.densities, "D", "k/n [exact: 0.1 .. 0.0001; others: 0.01,0.001]");
  list("--shape", o.shapes, "NAME", "gradients: " + described + " [others: normal,recorded]")
      ->check(CLI::IsMember(shapes(bench::kShapes.size())));
  list("--threads", o.threads, "T", "selectors on T parts of the bucket, in T threads [1]")
      ->check(CLI::Range(1, 1024));

  line.group("How");
  line.plain("--recorded", o.recorded, "FILE",
             "a gradient of training, .npy, for the shape recorded; repeated to the length");
  line.plain("--target", o.target, "NAME",
             fmt::format("CPU target: {} [the best]", joined(target_names)))
      ->check(CLI::IsMember(target_names));
  line.plain("--seconds", o.seconds, "X", "to repeat each case for [2; 0.25 of many]")
      ->check(positive());
  line.flag("--quick", o.quick, "the full run, but for 4^11 entries at most");
  line.plain("--json", o.json, "FILE", "JSON array, one object a case; -: standard output");
}

}  // namespace

int bench_command(int argc, char** argv) {
  BenchOptions o;
  CLI::App app(
      "Times selection with error feedback beside the bare pass r += g, in the steady state "
      "of training.",
      "skim bench select");
  declare(app, o);
  app.footer(
      "A gradient that needs no steps before it does not occur in training: every case\n"
      "takes 20 steps with 4 gradients in turn, is checked against an oracle, and is\n"
      "then timed step by step, in turn with the bare passes.\n\n"
      "Example:\n"
      "  skim bench select --algo exact --n 25000000 --density 0.001 --shape normal");
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (what != "select" && what != "--help" && what != "-h") {
    std::fprintf(stderr, "skim bench: expected select%s%s (skim bench --help)\n",
                 what.empty() ? "" : ", got ", std::string(what).c_str());
    return kUsageError;
  }
  try {
    app.parse(what == "select" ? argc - 1 : argc, what == "select" ? argv + 1 : argv);
  } catch (const CLI::CallForHelp& e) {
    return app.exit(e);
  } catch (const CLI::CallForVersion& e) {
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    std::fprintf(stderr, "skim bench select: %s (skim bench select --help lists all options)\n",
                 e.what());
    return kUsageError;
  }
  try {
    return run(o);
  } catch (const InvalidArgument& e) {
    std::fprintf(stderr, "skim bench select: %s\n", e.what());
    return kUsageError;
  } catch (const train::DataError& e) {
    std::fprintf(stderr, "skim bench select: %s\n", e.what());
    return kUsageError;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "skim bench select: out of memory\n");
    return kRunError;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "skim bench select: %s\n", e.what());
    return kRunError;
  }
}

}  // namespace skim::tool
