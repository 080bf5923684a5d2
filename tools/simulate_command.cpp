// skim simulate: runs the real selection and exchanges of many ranks in one process, over a
// simulated link. It runs the exchanges alone or, with --train, in training.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "bench/cases.hpp"
#include "bench/local_step.hpp"
#include "bench/measure.hpp"
#include "skim/communicator.hpp"
#include "skim/cost.hpp"
#include "skim/error.hpp"
#include "skim/exchange.hpp"
#include "skim/schedule.hpp"
#include "skim/select.hpp"
#include "tools/command_line.hpp"
#include "tools/commands.hpp"
#include "tools/failure.hpp"
#include "tools/json_file.hpp"
#include "tools/launcher.hpp"
#include "tools/one_line.hpp"
#include "tools/repetition.hpp"
#include "tools/run_output.hpp"
#include "tools/summation.hpp"
#include "tools/torch_part.hpp"
#include "tools/training_options.hpp"
#include "tools/units.hpp"
#include "train/data.hpp"
#include "train/memory.hpp"
#include "train/options_json.hpp"
#include "train/rethrow_cause.hpp"
#include "train/simulation.hpp"

namespace skim::tool {
namespace {

constexpr std::int64_t kWarm = 2;  // untimed steps: memory is allocated, oktopk finds its regions

// The link of a rank, and the file for the result.
struct LinkOptions {
  Link link{};
  bool link_only = false;
  std::string json;

  VirtualTime time() const { return {link, !link_only}; }
};

void declare(CommandLine& line, LinkOptions& o) {
  line.group("The link of a rank, full duplex");
  const auto rate = [&o](const std::string& given) {
    o.link.beta_s_per_byte = parse_link("--link", given);
  };
  const auto latency = [&o](const std::string& given) {
    o.link.alpha_s = parse_seconds("--latency", given);
  };
  const bool repeats = o.link.beta_s_per_byte > 0.0;  // the run of a file, which has the link
  line.call("--link", rate, "RATE", "rate of payload, as 100mbit or 1gbit")->required(!repeats);
  line.call("--latency", latency, "TIME", "latency of a message, as 50us or 0.4ms")
      ->default_str("0us");
  line.flag("--link-only", o.link_only,
            "count no processor time, only the link's: every run gives the same result");
  line.plain("--json", o.json, "FILE", "JSON array, one object a row; -: standard output");
}

// ---- exchanges alone --------------------------------------------------------------------------

struct SimulateOptions {
  std::size_t parameters = 1'000'000;
  std::vector<int> ranks{8};
  std::vector<std::string> exchanges;
  double density = 0.001, common = 0.5;
  LinkOptions link;
  std::int64_t steps = 5;
};

// The exchanges that run by default. `auto` is left out, because it only chooses one of the others.
std::vector<std::string> default_exchanges() {
  std::vector<std::string> names = summation_names();
  std::erase(names, kAuto);
  return names;
}

// The selection of every rank from its own gradient, and the processor time of a selection.
struct Selections {
  std::vector<SparseBuffer> of_rank;
  double seconds = 0.0;  // the median
};

double processor_s() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Selects for one rank after another, so that it needs memory for only one gradient and one
// residual. Each gradient is normal: sqrt(common) times a vector that all ranks share, plus a
// vector of its own. The weights are such that all gradients have the same expected norm.
Selections select(const SimulateOptions& o, int ranks, std::size_t k) {
  constexpr std::size_t kShift = 61;
  const std::size_t n = o.parameters;
  const bench::Gradients values("normal", n + (static_cast<std::size_t>(ranks) + 1) * kShift);
  bench::AlignedFloats own(n), residual(n);
  std::vector<float> shared(n);
  values.write(0, 0, shared);
  const auto a = static_cast<float>(std::sqrt(o.common));
  const auto b = static_cast<float>(std::sqrt(1.0 - o.common));
  const auto selector = make_selector({});
  Selections all;
  std::vector<double> seconds;
  for (int r = 0; r < ranks; ++r) {
    values.write(0, static_cast<std::size_t>(r + 1) * kShift, own.span());
    for (std::size_t i = 0; i < n; ++i) own.span()[i] = a * shared[i] + b * own.span()[i];
    std::ranges::fill(residual.span(), 0.0F);
    const double start = processor_s();
    selector->select({.id = {static_cast<std::uint64_t>(r), 0},
                      .grad = own.span(),
                      .residual = residual.span(),
                      .layout = {},
                      .keep = {.k = k}},
                     all.of_rank.emplace_back());
    seconds.push_back(processor_s() - start);
  }
  all.seconds = median(seconds);
  return all;
}

struct Outcome {
  double exchange_s = 0.0;  // the median over steps, on the rank that ends last
  Traffic most;             // of the busiest rank in one step
  std::string decision;     // of auto
};

// The steps of one rank: the time in ns after every step, and its traffic.
struct Course {
  std::vector<std::int64_t> end_ns;
  Traffic before, after;  // before and after the last step
  std::string decision;
};

Course steps(const SimulateOptions& o, const std::string& name, const SparseView& mine,
             std::size_t k, const VirtualTime& time, double select_s, Communicator& comm) {
  Course course;
  const LocalSpeeds speeds = time.processor_time ? ChooserOptions().local_speeds : LocalSpeeds();
  Summation summation(
      name, {}, {.among = among(o.exchanges), .link = time.link, .local_speeds = speeds});
  std::vector<float> gradient;
  if (summation.may_be_dense()) gradient.resize(o.parameters);
  const Keep keep{.k = k};
  for (std::int64_t step = 0; step < kWarm + o.steps; ++step) {
    const StepId id{static_cast<std::uint64_t>(step), 0};
    course.before = comm.traffic();
    summation.run(id, mine, keep, gradient, DenseSum::ring, select_s, comm);
    course.after = comm.traffic();
    course.end_ns.push_back(comm.now_ns());
  }
  course.decision = summation.decision();
  return course;
}

Outcome simulate(const SimulateOptions& o, const std::string& name, const Selections& selections,
                 std::size_t k, const VirtualTime& time, double select_s) {
  const std::size_t ranks = selections.of_rank.size();
  // The timeout is long because it is in real time, and all ranks share the cores of this machine.
  auto group = make_simulated_group(static_cast<int>(ranks), time, {std::chrono::hours(1)});
  std::vector<Course> courses(ranks);
  std::vector<std::exception_ptr> failed(ranks);
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        try {
          courses[r] = steps(o, name, selections.of_rank[r].view(), k, time, select_s, *group[r]);
        } catch (...) {
          failed[r] = std::current_exception();
          group[r]->abort(static_cast<int>(r));
        }
      });
    }
  }
  train::rethrow_cause(failed);
  Outcome outcome;
  outcome.decision = courses[0].decision;
  std::vector<double> seconds;
  std::int64_t begin = 0;
  for (std::int64_t step = 0; step < kWarm + o.steps; ++step) {
    std::int64_t end = 0;
    for (const Course& c : courses) end = std::max(end, c.end_ns[static_cast<std::size_t>(step)]);
    if (step >= kWarm) seconds.push_back(1e-9 * static_cast<double>(end - begin));
    begin = end;
  }
  outcome.exchange_s = median(seconds);
  for (const Course& c : courses) {
    outcome.most.sent_bytes =
        std::max(outcome.most.sent_bytes, c.after.sent_bytes - c.before.sent_bytes);
    outcome.most.rounds = std::max(outcome.most.rounds, c.after.rounds - c.before.rounds);
  }
  return outcome;
}

int run(const SimulateOptions& o) {
  if (!(o.density > 0.0 && o.density <= 1.0)) {
    throw InvalidArgument(
        fmt::format("--density: expected a number in (0, 1], got {:g}", o.density));
  }
  const VirtualTime time = o.link.time();
  const std::size_t k = entries(o.density, o.parameters);
  const std::vector<std::string> names = o.exchanges.empty() ? default_exchanges() : o.exchanges;
  for (const int ranks : o.ranks) {
    for (const std::string& name : names) {
      const std::vector<ExchangeKind> exchanges =
          name == kAuto ? candidates({}) : std::vector{from_name<ExchangeKind>(name, "--exchange")};
      const bool may_be_dense = std::ranges::count(exchanges, ExchangeKind::dense) > 0;
      const double gradients = may_be_dense ? 4.0 * ranks * static_cast<double>(o.parameters) : 0.0;
      train::expect_memory(gradients + train::exchange_memory(exchanges, ranks, o.parameters, k),
                           fmt::format("{} on {} ranks", name, ranks),
                           "take fewer ranks, --parameters or --density");
    }
  }
  JsonFile json(o.link.json);
  std::FILE* const people = o.link.json == "-" ? stderr : stdout;
  fmt::print(people, "{:>6} {:<14} {:>12} {:>8} {:>12} {:>12} {:>12}\n", "ranks", "exchange",
             "bytes", "rounds", "exchange ms", "select ms", "both ms");
  nlohmann::json rows = nlohmann::json::array();
  for (const int ranks : o.ranks) {
    const Selections selections = select(o, ranks, k);
    for (const std::string& name : names) {
      const bool selects = name != name_of(ExchangeKind::dense);
      double select_s = selects && time.processor_time ? selections.seconds : 0.0;
      const Outcome got = simulate(o, name, selections, k, time, select_s);
      if (got.decision.starts_with("dense ")) select_s = 0.0;  // the choice of auto
      fmt::print(people, "{:>6} {:<14} {:>12} {:>8} {:>12.4g} {:>12.4g} {:>12.4g}\n", ranks, name,
                 got.most.sent_bytes, got.most.rounds, 1e3 * got.exchange_s, 1e3 * select_s,
                 1e3 * (got.exchange_s + select_s));
      if (!got.decision.empty()) fmt::print(people, "       auto: {}\n", got.decision);
      std::fflush(people);
      rows.push_back({{"ranks", ranks},
                      {"exchange", name},
                      {"parameters", o.parameters},
                      {"k", k},
                      {"density", o.density},
                      {"exchange_s", got.exchange_s},
                      {"select_s", select_s},
                      {"bytes", got.most.sent_bytes},
                      {"rounds", got.most.rounds}});
      if (!got.decision.empty()) rows.back()["decision"] = got.decision;
    }
  }
  json.write(rows);
  return 0;
}

// Declares the flags only for --help. simulate_command has already looked for them.
void declare_form(CommandLine& line, bool& training) {
  line.group("Form");
  line.flag("--train", training,
            "train a model on these ranks, with the options of skim train: skim simulate --train "
            "--help lists them");
}

void declare(CLI::App& app, SimulateOptions& o, bool& training) {
  CommandLine line(app);
  declare_form(line, training);
  line.group("What is exchanged");
  line.option("--parameters", o.parameters, "N", "entries of a gradient")
      ->check(CLI::Range(std::size_t{1}, std::size_t{1} << 31));
  line.option("--ranks", o.ranks, "P,P,...", "ranks, each a thread")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096));
  line.plain("--exchange", o.exchanges, "NAME,...",
             fmt::format("exchanges: {}; auto chooses among the others [all but auto]",
                         fmt::join(summation_names(), ", ")))
      ->delimiter(',')
      ->check(CLI::IsMember(summation_names()));
  line.option("--density", o.density, "D", "k/n");
  line.option("--common", o.common, "X", "fraction of |gradient|^2 that all ranks share")
      ->check(in_range(kFraction));
  line.option("--steps", o.steps, "N", "timed steps, after two that are not timed")
      ->check(positive());
  declare(line, o.link);
}

// ---- in training ------------------------------------------------------------------------------

struct TrainingOptions {
  train::TrainOptions train;
  train::SimulationOptions simulation;
  LinkOptions link;
};

// The options that only a simulation has, by their names in its summary.
template <class Options, class F>
void each_simulation_field(Options& o, F&& f) {
  f("ranks", o.simulation.ranks, kPositive);
  f("alpha_s", o.link.link.alpha_s, kNotNegative);
  f("beta_s_per_byte", o.link.link.beta_s_per_byte, kPositive);
  f("link_only", o.link.link_only, FieldRange());
  f("measure_delta", o.simulation.measure_delta, kPositive);
  f("measure_constants", o.simulation.measure_constants, kPositive);
}

// Sets the options to those of the file's run. The command line is parsed afterwards and overrides
// them.
void take_over(const Repetition& r, TrainingOptions& o) {
  if (r.runs.empty()) return;
  if (r.runs.size() > 1) {
    throw InvalidArgument(fmt::format("{} has {} runs; skim simulate repeats a file with one",
                                      r.who(), r.runs.size()));
  }
  train::read_options(r.runs[0], o.train, r.who());
  each_simulation_field(o, [&](const char* name, auto& member, const FieldRange& range) {
    train::read_option(r.runs[0], name, member, {"", range}, r.who());
  });
}

std::atomic<bool> g_stop{false};
std::atomic<int> g_signal{0};
// A second signal, also one of another kind, ends the process as if nothing handled it.
void on_stop(int signal) {
  if (g_signal.exchange(signal) != 0) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
  g_stop.store(true);
}

Row row_of(const train::TrainOptions& o) {
  return {.name = train::exchange_name(o), .options = o, .summary = {}};
}

// The options of a run that the simulation uses whatever the run is.
constexpr std::array<std::string_view, 1> kUses{"--compute"};

// Checks the options, except for conditions that only the simulation can check.
void check(TrainingOptions& o) {
  check_training_options(o.train);
  if (!o.train.checkpoint.empty()) {
    throw InvalidArgument("--checkpoint: a simulation has no checkpoints; leave it out");
  }
  if (o.train.on_divergence != train::OnDivergence::ignore) {
    throw InvalidArgument("--on-divergence: a simulation does not watch its losses; leave it out");
  }
  if (is_one_file(o.link.json, o.train.metrics)) {
    throw InvalidArgument("--json and --metrics are one file: '" + o.link.json + "'");
  }
  o.simulation.time = o.link.time();
  check_budget({row_of(o.train)});
  if (o.train.target_time.seconds > 0.0) {  // predictions use the simulated link and speeds
    o.train.chooser.link = o.simulation.time.link;
    if (!o.simulation.time.processor_time) o.train.chooser.local_speeds = {};
  }
  // These throw for impossible values, before data is read.
  make_selector(train::reducer_options(o.train).select);
  train::density_schedule(o.train);
}

nlohmann::json step_json(const std::string& run, const train::SimulatedStep& s) {
  nlohmann::json j = to_json(run, s.record);
  j["mean_loss"] = std::isfinite(s.mean_loss) ? nlohmann::json(s.mean_loss) : nlohmann::json();
  j["max_sent_bytes"] = s.max_sent_bytes;
  j["union_entries"] = s.union_entries;
  j["total_s"] = s.total_s;
  j["wall_ms"] = s.wall_ms;
  if (s.delta) j["delta"] = *s.delta;
  if (s.one_way) j["one_way_constant"] = *s.one_way;
  if (s.two_way) j["two_way_constant"] = *s.two_way;
  return j;
}

void print(std::FILE* out, const TrainingOptions& o, const train::SimulationSummary& s) {
  const train::Summary& r = s.run;
  print_heading(out, o.train, r, o.simulation.ranks);
  fmt::print(out,
             "simulated: {:.4g} s; a step {:.4g} ms = compute {:.4g} + exchange {:.4g} (medians); "
             "sent {} a rank and step\n",
             s.total_s, r.median.step_ms, r.median.compute_ms, r.median.exposed_ms,
             human_bytes(r.sent_bytes_per_step));
  fmt::print(out, "on this machine: {:.4g} s, {} of memory\n", s.wall_s,
             human_bytes(static_cast<double>(r.peak_rss_bytes)));
  std::fflush(out);
}

// command: the one that repeats this run.
int run(TrainingOptions& o, const std::string& command) {
  if (o.train.threads == 0) {
    o.train.threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }
  o.train.data.seed = o.train.seed;
  const train::Dataset data = train::load_data(o.train.data);
  const bool text = data.info().kind == train::InputKind::text;

  JsonFile json(o.link.json);
  MetricsFile metrics(o.train.metrics, false, g_stop);
  const bool to_stderr = o.link.json == "-" || o.train.metrics == "-";
  std::FILE* const people = to_stderr ? stderr : stdout;
  const std::string name = train::exchange_name(o.train);
  Progress progress(people, name, text);
  Row row{.name = name, .options = o.train, .summary = {}};
  metrics.write(beginning_json(row, 0, o.simulation.ranks, command));

  const std::string warning = warning_on_data(data.info());
  if (!warning.empty()) progress.warn(warning);
  const std::string note = note_on_budget(o.train, o.simulation.ranks);
  if (!note.empty()) progress.say(note);

  handle_signals({SIGINT, SIGTERM, SIGHUP}, on_stop, SA_RESTART);

  train::SimulationObserver observer;
  observer.on_step = [&](const train::SimulatedStep& step) {
    metrics.write(step_json(name, step));
    progress.step(step.record);
  };
  observer.on_evaluation = [&](const train::Evaluation& e) {
    metrics.write(to_json(name, e, text));
    progress.evaluated(e);
  };
  observer.on_decision = decisions_to(metrics, progress, name);
  const train::SimulationSummary s =
      torch_part().simulate(o.train, data, o.simulation, g_stop, observer);
  progress.end();
  row.summary = s.run;
  nlohmann::json summary = to_json(row, o.simulation.ranks);
  each_simulation_field(o, [&](const char* field, const auto& member, const FieldRange&) {
    summary[field] = member;
  });
  summary["total_s"] = s.total_s;
  summary["wall_s"] = s.wall_s;
  print(people, o, s);
  json.write(nlohmann::json::array({summary}));
  if (!metrics.failure().empty()) throw Error(metrics.failure());
  if (const std::string why = divergence_of(row); !s.run.stopped && !why.empty()) throw Error(why);
  if (!s.run.stopped) return 0;
  fmt::print(stderr, "skim simulate: stopped after step {}\n", s.run.steps);
  return 128 + g_signal.load();
}

void declare(CLI::App& app, TrainingOptions& o, bool& training) {
  CommandLine line(app);
  describe_config(app, "repeat the run of a file that --json wrote");
  declare_form(line, training);
  line.group("Ranks");
  line.option("--ranks", o.simulation.ranks, "P", "ranks, each a thread that exchanges")
      ->check(CLI::Range(1, 4096));
  line.plain("--measure-delta", o.simulation.measure_delta, "N",
             "every N steps, measure |x - sum|^2 / the mean of |x - RandK(x)|^2; x is the sum of "
             "the vectors that the ranks selected from")
      ->check(positive());
  line.plain("--measure-constants", o.simulation.measure_constants, "N",
             "param-server: every N steps, measure the constants of top-k on one and on both links")
      ->check(positive());
  declare(line, o.link);
  add_training_options(line, o.train);
}

int simulate_exchanges(int argc, char** argv) {
  SimulateOptions o;
  bool training = false;
  CLI::App app(
      "Runs the selection and the exchanges of many ranks in this process, on a virtual clock: the "
      "processor time of each rank plus what an alpha-beta link would take.",
      "skim simulate");
  declare(app, o, training);
  app.footer(
      "Nothing is trained. Gradients are normal, and every step exchanges the same selections.\n\n"
      "Example:\n"
      "  skim simulate --parameters 1000000 --ranks 16,128 --link 1gbit --latency 0.4ms");
  return parse_and_run(app, argc, argv, [&] {
    if (training) throw InvalidArgument("--train must stand alone on the command line");
    return run(o);
  });
}

int simulate_training(int argc, char** argv) {
  TrainingOptions o;
  bool training = false;
  if (const char* dir = std::getenv("SKIM_DATA")) o.train.data.dir = dir;
  Repetition repetition;
  try {
    repetition = repetition_of(argc, argv);
    take_over(repetition, o);
  } catch (const InvalidArgument& e) {
    fmt::print(stderr, "skim simulate: {}\n", one_line(e.what()));
    return kUsageError;
  }
  CLI::App app(
      "Trains like a group of ranks, but in this process, with one copy of the parameters and the "
      "real selection and exchange. The time of a step is simulated: computing, plus the processor "
      "time of each rank's exchange, plus the time that an alpha-beta link would take.",
      "skim simulate");
  declare(app, o, training);
  app.footer(
      "Ctrl-C, SIGTERM, or a terminal that closes (SIGHUP; not under nohup) end the run before\n"
      "the next rank's batch; a second signal ends it at once.\n"
      "Exit status: 0 success; 1 the run failed; 2 wrong usage or input; 128+N\n"
      "stopped by signal N.\n\n"
      "Example:\n"
      "  skim simulate --train --ranks 100 --link 1gbit --latency 0.4ms --model mlp --steps 20");
  return parse_and_run(app, static_cast<int>(repetition.arguments.size()),
                       repetition.arguments.data(),
                       [&] {
                         choose_length(app, o.train);
                         check(o);
                         expect_effects(app, {row_of(o.train)}, kUses);
                         return run(o, command_text(argc, argv));
                       });
}

}  // namespace

int simulate_command(int argc, char** argv) {
  const bool training =
      std::any_of(argv, argv + argc, [](std::string_view a) { return a == "--train"; });
  return training ? simulate_training(argc, argv) : simulate_exchanges(argc, argv);
}

}  // namespace skim::tool
