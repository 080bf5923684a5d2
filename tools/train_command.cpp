// skim train: parses the options, starts the ranks, runs the training, prints the table.
#include "tools/train_command.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <ranges>
#include <span>
#include <thread>
#include <vector>

#include "skim/error.hpp"
#include "skim/version.hpp"
#include "tools/commands.hpp"
#include "tools/failure.hpp"
#include "tools/folder_lock.hpp"
#include "tools/json_file.hpp"
#include "tools/keep_beside.hpp"
#include "tools/launcher.hpp"
#include "tools/one_line.hpp"
#include "tools/repetition.hpp"
#include "tools/restarts.hpp"
#include "tools/run_output.hpp"
#include "tools/torch_part.hpp"
#include "tools/trace_file.hpp"
#include "tools/training_options.hpp"
#include "tools/units.hpp"
#include "train/checkpoint.hpp"
#include "train/gather.hpp"
#include "train/model_options.hpp"
#include "train/options_json.hpp"
#include "train/trace.hpp"
#include "train/trainer.hpp"

namespace skim::tool {
namespace {

using train::exchange_name;
using train::TrainOptions;

constexpr int kMostLocalRanks = 256;

std::atomic<bool> g_stop{false};
std::atomic<std::int64_t> g_deadline_ns{std::numeric_limits<std::int64_t>::max()};
std::atomic<int> g_signal{0};

std::int64_t steady_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);  // safe in a signal handler
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

// How long a rank still waits for others after a signal. mpirun sends SIGTERM when a rank has died,
// and the others must not wait for that one for long.
std::atomic<std::int64_t> g_grace_ns{0}, g_grace_of_sigterm_ns{0};
constexpr double kOfMpirun = 2.0;  // seconds

// One rank without MPI has no launcher that ends it at a second signal, or after so many seconds.
std::atomic<unsigned> g_grace_alone_s{0};  // 0: it is not alone
void end_at_once(int /*signal*/) { _exit(status_of_signal(g_signal.load())); }

// Asks the loop to end after this step. The launcher passes every signal on as SIGUSR1.
void on_stop(int signal) {
  const bool is_first = g_signal.exchange(signal) == 0;
  g_stop.store(true);
  if (const unsigned grace = g_grace_alone_s.load(); grace > 0) {
    if (!is_first) end_at_once(signal);
    alarm(grace);
  }
  const auto& grace = signal == SIGTERM ? g_grace_of_sigterm_ns : g_grace_ns;
  g_deadline_ns.store(std::min(g_deadline_ns.load(), steady_ns() + grace.load()));
}

// The reader of the output is gone, which every write says again.
void on_closed_output(int signal) {
  if (g_signal.load() == 0) on_stop(signal);
}

// Before ranks are started, and in each of them.
bool is_started_by_srun() {
  return std::getenv("SLURM_PROCID") != nullptr && std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr;
}

void stop_at_signals(double grace, bool is_alone) {
  if (is_alone) {
    g_grace_alone_s.store(static_cast<unsigned>(std::clamp(std::ceil(grace), 1.0, 1e9)));
    handle_signals({SIGALRM}, end_at_once);
    handle_signals({SIGPIPE}, on_closed_output, SA_RESTART);
  }
  const auto ns = [](double seconds) { return static_cast<std::int64_t>(1e9 * seconds); };
  const double of_ranks = 0.9 * grace;  // so that they can still say why
  g_grace_ns.store(ns(of_ranks));
  g_grace_of_sigterm_ns.store(ns(is_started_by_srun() ? of_ranks : std::min(of_ranks, kOfMpirun)));
  handle_signals({SIGINT, SIGTERM, SIGHUP, SIGUSR1}, on_stop, SA_RESTART);
}

struct Arguments {
  TrainOptions train;
  int ranks = 1;
  double timeout = 300.0;
  double grace = 20.0;  // seconds
  RestartOptions restarts;
  std::vector<std::string> compare;
  std::string summary;
  std::filesystem::path report, trace, tensorboard;
  std::string command;        // that repeats what this one does
  std::vector<Row> repeated;  // the runs of the summary that --config names
};

void declare(CLI::App& app, Arguments& a, const TrainingCommand& command) {
  CommandLine line(app);
  describe_config(app, "repeat the runs of a file that --summary wrote");
  if (command.declare) command.declare(line);
  line.group("Runs");
  line.option("--ranks", a.ranks, "P",
              "ranks to start on this machine; not needed under mpirun or srun, where it must be "
              "the number of ranks that they started")
      ->check(positive());
  line.plain("--compare", a.compare, "RUN,RUN,...",
             "run these one after another from the same seed and print a table; a RUN is "
             "EXCHANGE, EXCHANGE:DENSITY or EXCHANGE:DENSITY:SELECT, as in "
             "dense,allgather:0.01,gtopk:0.01:gaussian")
      ->delimiter(',');
  const auto seconds = [&line](const char* name, double& x, const char* what) {
    line.call(name, [&x, name](const std::string& t) { x = parse_seconds(name, t); }, "TIME", what);
  };
  const auto set_timeout = [&a](const std::string& given) {
    const bool has_unit = !given.empty() && std::isalpha(static_cast<unsigned char>(given.back())) != 0;
    a.timeout = parse_seconds("--timeout", has_unit ? given : given + "s");
    if (!(a.timeout >= 1e-3)) {
      throw InvalidArgument("--timeout: expected a time of at least 1ms, got '" + given + "'");
    }
  };
  line.call("--timeout", set_timeout, "TIME",
            "how long a rank waits for another, and the command for all ranks to start; as 30 "
            "(seconds) or 2min")
      ->default_str(fmt::format("{:g}s", a.timeout));
  seconds("--grace", a.grace,
          "from a signal to the end of the run, at most: for the step and the checkpoint [20s]");
  line.plain("--restarts", a.restarts.restarts, "N",
             "if the run fails, start it again from its newest checkpoint, at most N times [0]")
      ->check(positive());
  seconds("--restart-within", a.restarts.within,
          "limit --restarts to so many within this time, as 1h [the whole run]");
  line.plain("--min-ranks", a.restarts.min_ranks, "P",
             "start again without the ranks that were lost, on at least so many [on all]")
      ->check(positive());
  line.plain("--summary", a.summary, "FILE",
             "JSON array, one object a run; -: standard output. --config FILE repeats these runs");
  line.plain("--report", a.report, "FILE.html",
             "page with curves and times of the runs, written every few seconds; skim report makes "
             "the same from --metrics");
  line.plain("--tensorboard", a.tensorboard, "DIR",
             "event files for TensorBoard with the numbers of --metrics, in DIR/RUN for each run");
  line.plain("--trace", a.trace, "FILE.json",
             fmt::format("trace of all ranks for Perfetto or chrome://tracing: the latest {} steps "
                         "of each run, written at the end or when stopped",
                         train::Trace::kSteps));
  add_training_options(line, a.train);
  app.footer(
      "Ctrl-C, SIGTERM, SIGUSR1, or a terminal that closes (SIGHUP; not under nohup) end the\n"
      "run after the step, with a checkpoint if --checkpoint is given; a second signal ends it\n"
      "at once. SKIM_MPIRUN in the environment names another mpirun for --ranks.\n\n"
      "Exit status: 0 success; 1 the run failed; 2 wrong usage or input; 75 stopped by\n"
      "SIGUSR1, to be started again with --resume; 128+N stopped by another signal N.\n\n" +
      command.example);
}

// Whether the name leads to a folder inside another one, as "gtopk:accordion=0.001/0.01" does.
bool is_name_of_a_run(const std::string& name) {
  const std::filesystem::path path = name;
  const bool is_printed = std::ranges::none_of(
      name, [](char c) { return std::iscntrl(static_cast<unsigned char>(c)) != 0; });
  return is_printed && path.is_relative() && path.has_filename() && *path.begin() != "." &&
         *path.begin() != ".." && path.lexically_normal().native() == name;
}

// The runs to do: those of --compare, or the one that the options describe.
std::vector<Row> plan(const Arguments& a) {
  std::vector<Row> rows;
  if (a.compare.empty()) rows = a.repeated;
  if (a.compare.empty() && rows.empty()) {
    rows.push_back({.name = exchange_name(a.train), .options = a.train, .summary = {}});
  }
  for (Row& r : rows) {
    if (rows.size() > 1 && !r.options.checkpoint.empty()) r.options.checkpoint /= r.name;
  }
  for (const std::string& entry : a.compare) {
    Row row{.name = entry, .options = a.train, .summary = {}};
    const std::size_t colon = entry.find(':');
    set_exchange(row.options, entry.substr(0, colon), "--compare " + entry);
    if (colon != std::string::npos) {
      const std::size_t second = std::min(entry.find(':', colon + 1), entry.size());
      const std::string text = entry.substr(colon + 1, second - colon - 1);
      if (second < entry.size()) {
        row.options.select.rule =
            from_name<SelectRule>(entry.substr(second + 1), "--compare " + entry);
      }
      row.options.density = train::density_rule(text, "--compare " + entry);
    }
    if (!row.options.checkpoint.empty()) row.options.checkpoint /= entry;
    rows.push_back(std::move(row));
  }
  // Checkpoints, event files and the lines of --metrics go by the name.
  for (const Row& r : rows) {
    if (!is_name_of_a_run(r.name)) {
      throw InvalidArgument("--config: a run cannot be named " + nlohmann::json(r.name).dump() +
                            ", because its folders have its name; change the 'run' in the file");
    }
    if (std::ranges::count(rows, r.name, &Row::name) == 1) continue;
    throw InvalidArgument(a.compare.empty() ? "--config: two runs are named '" + r.name +
                                                  "'; change the 'run' of one in the file"
                                            : "--compare: '" + r.name + "' is given twice");
  }
  check_budget(rows);
  for (const Row& r : rows) {
    // These throw for unknown names and impossible values.
    make_selector(train::reducer_options(r.options).select);
    train::density_schedule(r.options);
  }
  return rows;
}

void check_restarts(const Arguments& a) {
  const RestartOptions& r = a.restarts;
  if (r.restarts == 0) {
    const char* const needs = r.within > 0.0     ? "--restart-within"
                              : r.min_ranks > 0 ? "--min-ranks"
                                                : nullptr;
    if (needs != nullptr) throw InvalidArgument(std::string(needs) + " needs --restarts N");
    return;
  }
  if (a.train.checkpoint.empty()) throw InvalidArgument("--restarts needs --checkpoint DIR");
  if (!a.compare.empty() || a.repeated.size() > 1) {
    throw InvalidArgument("--restarts takes one run, not several (--compare, --config)");
  }
  if (r.min_ranks > a.ranks) {
    throw InvalidArgument("--min-ranks " + std::to_string(r.min_ranks) + " is more than --ranks " +
                          std::to_string(a.ranks));
  }
  if (is_launched() && !is_launched_by_skim()) {
    throw InvalidArgument(
        "--restarts needs ranks that skim starts itself (--ranks P); ranks of mpirun or srun end "
        "with it, so run it again with --resume");
  }
}

// The files that a run writes, by their options.
std::array<std::pair<const char*, std::filesystem::path>, 4> files_of(const Arguments& a) {
  return {{{"--metrics", a.train.metrics},
           {"--summary", a.summary},
           {"--report", a.report},
           {"--trace", a.trace}}};
}

void check(const Arguments& a) {
  check_training_options(a.train);
  check_restarts(a);
  if (a.report == "-") throw InvalidArgument("--report: expected a file, got '-'");
  if (a.trace == "-") throw InvalidArgument("--trace: expected a file, got '-'");
  if (a.tensorboard == "-") throw InvalidArgument("--tensorboard: expected a folder, got '-'");
  const auto files = files_of(a);
  for (auto one = files.begin(); one != files.end(); ++one) {
    for (auto other = files.begin(); other != one; ++other) {
      if (!is_one_file(one->second, other->second)) continue;
      throw InvalidArgument(fmt::format("{} and {} are one file: '{}'", one->first, other->first,
                                        one->second.string()));
    }
  }
}

[[noreturn]] void refuse_output(const char* option, const std::filesystem::path& path,
                                const std::error_code& why) {
  throw InvalidArgument(std::string(option) + ": cannot open '" + path.string() +
                        "': " + why.message());
}

void expect_writable(const char* option, const std::filesystem::path& path) {
  if (path.empty() || path == "-") return;
  std::error_code code;  // set if the name itself is impossible
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  const std::filesystem::path tried = std::filesystem::exists(path, code) ? path : folder;
  if (!code && access(tried.c_str(), W_OK) != 0) code = {errno, std::generic_category()};
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) code = {EISDIR, std::generic_category()};
  if (code) refuse_output(option, path, code);
  expect_no_standard_output(option, path);
}

void expect_writable_folder(const char* option, const std::filesystem::path& path) {
  if (path.empty()) return;
  std::error_code code;
  std::filesystem::create_directories(path, code);
  if (!code && access(path.c_str(), W_OK) != 0) code = {errno, std::generic_category()};
  if (code) refuse_output(option, path, code);
}

void expect_writable_outputs(const Arguments& a, const std::vector<Row>& rows) {
  // Files may be in the folders, which this makes.
  expect_writable_folder("--tensorboard", a.tensorboard);
  for (const Row& r : rows) {
    std::error_code ignored;
    const std::filesystem::path& folder = r.options.checkpoint;
    // A run that resumes from a folder that is not there says so, and must not make it.
    if (r.options.resume && !std::filesystem::exists(folder, ignored)) continue;
    expect_writable_folder("--checkpoint", folder);
  }
  for (const auto& [option, path] : files_of(a)) expect_writable(option, path);
}

int threads_per_rank(Communicator& comm) {
  const auto ranks_here = std::ranges::count(train::gather_values(comm.host(), comm), comm.host());
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, cores / static_cast<int>(ranks_here));
}

nlohmann::json summary_of(const std::vector<Row>& rows, int ranks) {
  nlohmann::json all = nlohmann::json::array();
  for (const Row& r : rows) all.push_back(to_json(r, ranks));
  return all;
}

// Of several runs, those without a checkpoint begin anew, as rank 0 sees it. If none has one, the
// first says so when it is resumed. Collective.
void resume_those_with_checkpoints(std::vector<Row>& rows, Communicator& comm) {
  std::string found;
  for (const Row& r : rows) {
    found += train::checkpoints_of(r.options.checkpoint).empty() ? '0' : '1';
  }
  found = train::gather_texts(found, comm)[0];
  if (found.find('1') == std::string::npos) return;
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i].options.resume = found[i] == '1';
}

// Locks the folders of checkpoints. Keeps old ones beside them, of runs that do not continue.
std::vector<FolderLock> take_folders(const std::vector<Row>& rows) {
  std::vector<FolderLock> locks;
  for (const Row& r : rows) {
    const std::filesystem::path& folder = r.options.checkpoint;
    if (folder.empty()) continue;
    FolderLock lock("--checkpoint", folder);
    if (!r.options.resume && !train::checkpoints_of(folder).empty()) {
      put_beside("--checkpoint", folder);  // with the files of the last run that are in it
      expect_writable_folder("--checkpoint", folder);
      locks.emplace_back("--checkpoint", folder);
    } else {
      locks.push_back(std::move(lock));
    }
  }
  return locks;
}

// The data set of one run after another. It is loaded again only for a run that has other data.
class Data {
 public:
  // comm: null: there are no ranks yet.
  explicit Data(Communicator* comm) : comm_(comm) {}

  // Collective. Throws: train::DataError: cannot be loaded; Error: differs between ranks.
  const train::Dataset& of(const Row& row) {
    train::DataOptions options = row.options.data;
    options.seed = row.options.seed;
    if (loaded_ && options == options_) return *loaded_;
    loaded_.reset();  // before the next one takes memory
    const train::Dataset& now = loaded_.emplace(train::load_data(options));
    options_ = std::move(options);
    if (comm_ != nullptr) {
      train::expect_equal_on_all_ranks(
          {{"examples",
            fmt::format("{} to train, {} to test", now.info().train_size, now.info().test_size)},
           {"hash", fmt::format("{:016x}", now.hash())}},
          "data set", *comm_);
    }
    return now;
  }

 private:
  Communicator* comm_;
  train::DataOptions options_;
  std::optional<train::Dataset> loaded_;
};

// Loads the data of every run, those of the first run last. Throws: train::DataError: cannot be
// loaded; InvalidArgument: runs on images and on text.
void expect_data(std::span<const Row> rows, Data& data) {
  std::vector<train::InputKind> kinds;
  for (const Row& r : std::views::reverse(rows)) kinds.push_back(data.of(r).info().kind);
  if (std::ranges::adjacent_find(kinds, std::ranges::not_equal_to()) == kinds.end()) return;
  throw InvalidArgument(
      "--config: it has runs on images and runs on text; give each kind its own file");
}

// All runs of one rank. Returns the exit status.
int run_rank(const TrainingCommand& command, Arguments& a, std::vector<Row>& rows,
             Communicator& comm) {
  const bool first = comm.rank() == 0;
  const bool to_stderr = a.summary == "-" || a.train.metrics == "-";
  std::FILE* const people = to_stderr ? stderr : stdout;
  nlohmann::json session = train::options_json(a.train, FieldScope::session);
  session["version"] = SKIM_VERSION;
  for (const Row& r : rows) session["runs"].push_back(r.name);
  session["trace"] = !a.trace.empty();
  train::expect_equal_on_all_ranks(session, "version or command line", comm);
  const int threads = threads_per_rank(comm);
  Data loaded(&comm);
  expect_data(rows, loaded);
  const bool text = loaded.of(rows[0]).info().kind == train::InputKind::text;
  if (a.train.resume && rows.size() > 1) resume_those_with_checkpoints(rows, comm);
  std::vector<FolderLock> folders;
  if (first) {
    expect_writable_outputs(a, rows);
    folders = take_folders(rows);
  }
  const std::filesystem::path none;
  MetricsFile metrics(first ? a.train.metrics : none, a.train.resume, g_stop,
                      first ? a.report : none, first ? a.tensorboard : none);
  JsonFile summary(first ? a.summary : "", "--summary");
  std::vector<RunTrace> traces;
  std::string failure;  // to write the outputs
  const auto add_failure = [&failure](const std::string& what) {
    if (!what.empty()) failure += (failure.empty() ? "" : "; ") + what;
  };
  // Each output is tried, whatever happened to the others.
  const auto attempt = [&add_failure](const auto& write) {
    try {
      write();
    } catch (const Error& e) {
      add_failure(e.what());
    }
  };
  int signal = 0;  // that a rank got; 0: none
  bool stopped = false;

  for (std::size_t i = 0; i < rows.size(); ++i) {
    Row& row = rows[i];
    const train::Dataset& data = loaded.of(row);
    row.options.data.seed = row.options.seed;
    if (row.options.threads == 0) row.options.threads = threads;
    Progress progress(people, row.name, text);
    train::Observer observer;
    observer.on_step = [&](const train::StepRecord& r) {
      metrics.write(to_json(row.name, r));
      progress.step(r);
    };
    observer.on_evaluation = [&](const train::Evaluation& e) {
      metrics.write(to_json(row.name, e, text));
      progress.evaluated(e);
    };
    std::optional<std::int64_t> begun;  // after which step this process began, if it has
    const auto begin = [&](std::int64_t step) {
      if (begun) return;
      if (first) metrics.write(beginning_json(row, step, comm.size(), a.command));
      begun = step;
    };
    if (!row.options.resume) {
      // Lines of a process that left no checkpoint.
      if (a.train.resume) metrics.forget_after(row.name, {.step = 0, .saved_step = -1});
      begin(0);
    }
    observer.on_resume = [&](const train::Resumed& from) {
      metrics.forget_after(row.name, from);
      // To a checkpoint of an earlier process, whose records are all that is left.
      if (begun && (from.step < *begun || from.saved_ranks != comm.size())) begun.reset();
      begin(from.step);
      progress.say(fmt::format("resumed after step {}", from.step));
    };
    observer.on_decision = decisions_to(metrics, progress, row.name);
    observer.on_comparison = [&](std::int64_t step, std::span<const double> waited_s,
                                 double seconds) {
      metrics.write(comparison_json(row.name, step, waited_s, seconds));
    };
    observer.on_warning = [&](const std::string& what) { progress.warn(what); };
    const std::string warning = warning_on_data(data.info());
    if (first && i == 0 && !warning.empty()) progress.warn(warning);
    const std::string note = note_on_budget(row.options, comm.size());
    if (first && !note.empty()) progress.say(note);
    if (first && command.attach) command.attach(row, comm.size(), observer);
    std::optional<train::Trace> trace;
    if (!a.trace.empty()) observer.trace = &trace.emplace(comm);
    row.summary = torch_part().train(row.options, data, comm, g_stop, observer);
    if (trace) traces.push_back({row.name, trace->gather()});
    if (first) progress.end();
    add_failure(metrics.failure());
    if (first && command.after) attempt([&] { command.after(people); });
    failure = train::gather_texts(failure, comm)[0];
    // It may have come after the run's last step, and to one rank alone.
    signal = std::ranges::max(train::gather_values(g_signal.load(), comm));
    if (row.summary.stopped || !row.summary.checkpoint_failure.empty() || !failure.empty() ||
        signal != 0) {
      stopped = row.summary.stopped || (signal != 0 && i + 1 < rows.size());
      rows.resize(i + 1);
      break;
    }
  }
  const train::Summary& last = rows.back().summary;
  for (const Row& r : rows) {
    if (failure.empty() && last.checkpoint_failure.empty() && !stopped) failure = divergence_of(r);
  }
  const bool all_ranks_fail = !failure.empty() || !last.checkpoint_failure.empty();
  if (first) {
    print_table(people, rows, comm.size(), text);
    attempt([&] { summary.write(summary_of(rows, comm.size())); });
    if (metrics.failure().empty()) attempt([&] { metrics.end(); });
    attempt([&] { write_trace(a.trace, traces); });
  }
  const std::string where =
      (last.stopped ? fmt::format("stopped after step {}", last.steps)
                    : fmt::format("stopped after {}, before the next run", rows.back().name)) +
      (last.checkpoint.empty() ? std::string("; no checkpoint was asked for")
                               : "; checkpoint " + last.checkpoint + "; --resume continues");
  if (!last.checkpoint_failure.empty()) {
    add_failure(last.checkpoint_failure);
  } else if (!failure.empty() && stopped) {
    add_failure(where);
  }
  if (!failure.empty()) {
    std::fflush(people);
    // A rank that fails ends the others, and the table must be out.
    if (all_ranks_fail) comm.barrier();
    throw Error(failure);
  }
  if (first && stopped) std::fprintf(stderr, "skim: %s\n", where.c_str());
  return stopped ? status_of_signal(signal) : 0;
}

// Finds what would end all ranks before their first step, before any of them starts. Ranks find it
// themselves, too, because no launcher starts those on other machines.
void expect_to_start(const Arguments& a, const std::vector<Row>& rows) {
  expect_writable_outputs(a, rows);
  Data loaded(nullptr);
  try {
    expect_data(rows, loaded);
    for (const Row& r : rows) {
      const train::DataInfo& data = loaded.of(r).info();
      if (r.options.checkpoint.empty()) continue;
      const std::uint64_t parameters = torch_part().count_parameters(r.options, data);
      const FeedbackOptions f = train::reducer_options(r.options).feedback;
      const int kept = (f.enabled ? 1 : 0) + (f.momentum_correction > 0.0F ? 1 : 0);
      const auto ranks = static_cast<std::uint64_t>(a.ranks * kept);
      train::expect_space(r.options.checkpoint, sizeof(float) * parameters * (1 + ranks));
    }
  } catch (const train::DataError& e) {
    throw InvalidArgument(e.what());
  }
}

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000.0));
}

int guarded_rank(const TrainingCommand& command, Arguments& a, std::vector<Row>& rows) {
  const bool with_mpi = is_launched();
  stop_at_signals(a.grace, !with_mpi);
  const CommOptions comm_options{
      .timeout = milliseconds_of(a.timeout),
      .deadline_ns = &g_deadline_ns};
  std::unique_ptr<Communicator> comm;
  std::unique_ptr<RankStatus> status;
  std::optional<Failure> failure;
  int code = 0;
  try {
    if (with_mpi && !is_available(Backend::mpi)) {
      throw InvalidArgument("started as one of several ranks, but this build has no MPI");
    }
    torch_part();  // it takes long to load, so before the other ranks wait for this one
    comm = connect(with_mpi ? Backend::mpi : Backend::in_process, comm_options);
    status = std::make_unique<RankStatus>(comm->rank());
    if (status->is_told_to_stop()) on_stop(SIGUSR1);  // before the launcher knew this process
    if (a.ranks > 1 && a.ranks != comm->size()) {
      throw InvalidArgument("--ranks " + std::to_string(a.ranks) + ", but mpirun or srun started " +
                            std::to_string(comm->size()));
    }
    code = run_rank(command, a, rows, *comm);
  } catch (...) {
    failure = current_failure();
  }
  if (!failure && code == 0) {
    status->succeeded();
    comm.reset();
    status->ended();
    return 0;
  }
  if (!failure) {
    const bool launcher_knows = status->stopped(code);
    try {
      if (with_mpi) comm->barrier();  // so that mpirun does not end ranks that still work
    } catch (const CommError&) {  // a rank that failed says so itself
    }
    return launcher_knows ? 0 : code;
  }
  std::string& line = failure->message;
  line.resize(std::min(line.find('\n'), line.size()));
  if (comm && comm->size() > 1 && !line.starts_with("rank ")) {
    line.insert(0, "rank " + std::to_string(comm->rank()) + ": ");
  }
  if (!status || !status->failed(*failure)) std::fprintf(stderr, "skim: %s\n", line.c_str());
  std::fflush(nullptr);
  if (comm) comm->abort(failure->culprit >= 0 ? failure->culprit : comm->rank());
  if (with_mpi) {
    comm.reset();
    _exit(failure->code);  // MPI_Finalize would wait for ranks that have ended
  }
  return failure->code;
}

// Sets the options to those of this run. The command line is parsed afterwards and overrides them.
void take_over(const Repetition& r, std::size_t run, Arguments& a) {
  train::read_options(r.runs[run], a.train, r.who());
  train::read_option(r.runs[run], "ranks", a.ranks, {"", kPositive}, r.who());
}

}  // namespace

int run_training_command(const TrainingCommand& command, int argc, char** argv) {
  Arguments a;
  if (const char* dir = std::getenv("SKIM_DATA")) a.train.data.dir = dir;
  const Arguments defaults = a;
  Repetition repetition;
  try {
    repetition = repetition_of(argc, argv);
    if (!repetition.runs.empty()) take_over(repetition, 0, a);
  } catch (const InvalidArgument& e) {
    std::fprintf(stderr, "skim %s: %s\n", command.name.c_str(), one_line(e.what()).c_str());
    return kUsageError;
  }
  CLI::App app(command.description, "skim " + command.name);
  declare(app, a, command);
  std::vector<char*> arguments = repetition.arguments;
  return parse_and_run(app, static_cast<int>(arguments.size()), arguments.data(), [&] {
    for (std::size_t i = 0; i < repetition.runs.size(); ++i) {
      // For each run, the command line overrides the file.
      Arguments one = defaults;
      take_over(repetition, i, one);
      CLI::App again;
      declare(again, one, command);
      again.parse(static_cast<int>(arguments.size()), arguments.data());
      choose_length(again, one.train);
      check_training_options(one.train);
      if (one.ranks != a.ranks) {
        throw InvalidArgument(
            fmt::format("{}: its runs are of {} and {} ranks; give --ranks P for all of them",
                        repetition.who(), a.ranks, one.ranks));
      }
      if (const auto& run = repetition.runs[i];
          run.contains("choices") && again.count("--exchange") == 0) {
        one.train.replay = train::choices_of(run["choices"], repetition.who() + ": choices");
      }
      a.repeated.push_back({.name = repetition.runs[i].value("run", exchange_name(one.train)),
                            .options = one.train,
                            .summary = {}});
    }
    choose_length(app, a.train);
    check(a);
    a.command = command_text(argc, argv);
    std::vector<Row> rows = plan(a);
    expect_effects(app, rows, command.uses);
    if (command.before) {
      if (const std::optional<int> status = command.before(rows)) return *status;
    }
    const bool restarts = a.restarts.restarts > 0;
    if (is_launched() || (a.ranks == 1 && !restarts)) return guarded_rank(command, a, rows);
    if (!is_available(Backend::mpi)) {
      throw InvalidArgument("--ranks " + std::to_string(a.ranks) +
                            ": this build has no MPI; build with SKIM_MPI=ON, or take --ranks 1");
    }
    if (a.ranks > kMostLocalRanks) {
      throw InvalidArgument("--ranks " + std::to_string(a.ranks) + ": at most " +
                            std::to_string(kMostLocalRanks) +
                            " on one machine; for more, start skim under mpirun with a host file");
    }
    expect_to_start(a, rows);
    std::vector<std::string> all{command.name};
    all.insert(all.end(), argv + 1, argv + argc);
    const LaunchOptions launched{.ranks = a.ranks,
                                 .arguments = all,
                                 .start_limit = milliseconds_of(a.timeout),
                                 .grace = milliseconds_of(a.grace),
                                 .to_output = a.train.metrics == "-" ? "--metrics" : ""};
    if (!restarts) return conclude(launch(launched));
    take_folders(rows);  // keeps old ones now, or a restart would continue another run
    return launch_with_restarts(launched, a.restarts, a.train.checkpoint);
  });
}

int train_command(int argc, char** argv) {
  return run_training_command(
      {.name = "train",
       .description = "Trains a model on several ranks that exchange top-k gradients.",
       .example = "Example: 4 ranks, two exchanges from one seed, a table at the end:\n"
                  "  skim train --ranks 4 --model lenet5 --epochs 2 --compare dense,gtopk:0.01"},
      argc, argv);
}

}  // namespace skim::tool
