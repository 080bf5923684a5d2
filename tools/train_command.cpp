// skim train: options, ranks, runs, table.
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <thread>

#include "skim/error.hpp"
#include "skim/version.hpp"
#include "tools/commands.hpp"
#include "tools/launcher.hpp"
#include "tools/report.hpp"
#include "train/models.hpp"
#include "train/trainer.hpp"

namespace skim::tool {
namespace {

using train::TrainOptions;

constexpr int kUsageError = 2, kRunError = 1;
constexpr int kMostLocalRanks = 256;

std::atomic<bool> g_stop{false};
std::atomic<std::int64_t> g_deadline_ns{std::numeric_limits<std::int64_t>::max()};
std::atomic<int> g_signal{0};

std::int64_t steady_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);  // safe in a signal handler
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

// Asks the loop to end after this step. A rank that waits for one that is gone must not wait for
// ever: mpirun sends SIGTERM when a rank has died, the launcher SIGUSR1 for the user's Ctrl-C.
void on_stop(int signal) {
  g_signal.store(signal == SIGUSR1 ? SIGINT : signal);
  g_stop.store(true);
  const std::int64_t seconds = signal == SIGTERM ? 2 : 18;
  g_deadline_ns.store(std::min(g_deadline_ns.load(), steady_ns() + seconds * 1'000'000'000));
}

struct Arguments {
  TrainOptions train;
  int ranks = 1;
  double timeout = 300.0;
  std::vector<std::string> compare;
  std::string summary;
};

template <class Names>
std::vector<std::string> strings(const Names& names) {
  return {std::begin(names), std::end(names)};
}

// CLI11's own messages for ranges print the largest double.
CLI::Validator at_least(double least, bool itself, const std::string& words) {
  return CLI::Validator(
      [=](std::string& text) {
        char* end = nullptr;
        const double x = std::strtod(text.c_str(), &end);
        const bool good = !text.empty() && *end == '\0' && (itself ? x >= least : x > least);
        return good ? std::string() : "expected a number " + words + ", got '" + text + "'";
      },
      words);
}
const CLI::Validator kPositive = at_least(0.0, false, "> 0");
const CLI::Validator kNotNegative = at_least(0.0, true, ">= 0");

// The command line. Names are checked here, with the valid ones listed.
void declare(CLI::App& app, Arguments& a) {
  TrainOptions& t = a.train;
  app.get_formatter()->column_width(34);
  app.set_version_flag("--version", "skim " SKIM_VERSION);
  app.set_config("--config", "", "read options from a TOML file: long names without dashes");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.option_defaults()->always_capture_default();

  const char* group = "What is trained";
  app.add_option("--model", t.model, "model")
      ->check(CLI::IsMember(strings(train::model_names())))
      ->group(group);
  app.add_option("--data", t.data.name, "data set")
      ->check(CLI::IsMember(strings(train::data_names())))
      ->group(group);
  app.add_option("--data-dir", t.data.dir,
                 "folder with <name>/ in it, or the text file; default: $SKIM_DATA")
      ->always_capture_default(false)
      ->group(group);
  app.add_option("--batch", t.batch, "examples per rank and step")->check(kPositive)->group(group);
  app.add_option("--epochs", t.epochs, "passes over the training set")
      ->check(kPositive)
      ->group(group);
  app.add_option("--steps", t.steps, "steps, instead of epochs")
      ->check(kPositive)
      ->always_capture_default(false)
      ->group(group);
  app.add_option("--seed", t.seed, "of parameters, order of examples, augmentation, dropout")
      ->group(group);
  app.add_flag("--augment", t.data.augment, "cifar10: random crops and flips")->group(group);
  app.add_option("--sequence", t.data.sequence_length, "text: characters in a window")
      ->check(kPositive)
      ->group(group);
  app.add_option("--generated-train", t.data.generated_train, "generated: training images")
      ->check(kPositive)
      ->group(group);
  app.add_option("--generated-test", t.data.generated_test, "generated: test images")
      ->check(kPositive)
      ->group(group);
  for (const auto& [name, value, what] :
       {std::tuple{"--layers", &t.layers, "lstm, gpt: layers; 0: the model's default"},
        std::tuple{"--hidden", &t.hidden, "lstm: size of the state; 0: default"},
        std::tuple{"--embedding", &t.embedding, "lstm, gpt: size of the embedding; 0: default"},
        std::tuple{"--heads", &t.heads, "gpt: attention heads; 0: default"}}) {
    app.add_option(name, *value, what)->check(kNotNegative)->group(group);
  }

  group = "Optimizer";
  app.add_option("--optimizer", t.optimizer, "sgd, adam or adamw; works on the mean gradient")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, train::OptimizerKind>{{"sgd", train::OptimizerKind::sgd},
                                                      {"adam", train::OptimizerKind::adam},
                                                      {"adamw", train::OptimizerKind::adamw}}))
      ->default_str("sgd")
      ->always_capture_default(false)
      ->group(group);
  app.add_option("--lr", t.learning_rate.base, "learning rate")->check(kPositive)->group(group);
  app.add_option("--lr-schedule", t.learning_rate.kind, "constant, steps or cosine")
      ->transform(CLI::CheckedTransformer(std::map<std::string, train::LearningRateKind>{
          {"constant", train::LearningRateKind::constant},
          {"steps", train::LearningRateKind::steps},
          {"cosine", train::LearningRateKind::cosine}}))
      ->default_str("constant")
      ->always_capture_default(false)
      ->group(group);
  app.add_option("--lr-warmup", t.learning_rate.warmup_epochs, "epochs of linear rise")
      ->check(kNotNegative)
      ->group(group);
  app.add_option("--lr-drops", t.learning_rate.drop_epochs, "steps: epochs at which it drops")
      ->delimiter(',')
      ->always_capture_default(false)
      ->group(group);
  app.add_option("--lr-gamma", t.learning_rate.gamma, "steps: factor of a drop")
      ->check(CLI::Range(0.0, 1.0))
      ->group(group);
  app.add_option("--momentum", t.momentum, "of sgd, after aggregation")
      ->check(CLI::Range(0.0, 1.0))
      ->group(group);
  app.add_flag("--nesterov", t.nesterov, "Nesterov momentum")->group(group);
  app.add_option("--weight-decay", t.weight_decay, "weight decay")
      ->check(kNotNegative)
      ->group(group);
  app.add_flag("!--no-bias-decay", t.decay_biases,
               "no weight decay on biases and normalisation layers")
      ->group(group);
  app.add_option("--clip-norm", t.clip_norm, "limit of the mean gradient's norm; 0: none")
      ->check(kNotNegative)
      ->group(group);

  group = "Exchange";
  app.add_option("--ranks", a.ranks, "ranks to start on this machine; under mpirun or srun: theirs")
      ->check(kPositive)
      ->group(group);
  app.add_option("--exchange", t.exchange, "how gradients are summed")
      ->check(CLI::IsMember(strings(exchange_kind_names())))
      ->group(group);
  app.add_option("--select", t.select, "how entries are chosen")
      ->check(CLI::IsMember(strings(select_algo_names())))
      ->group(group);
  app.add_option("--density", t.density, "kept fraction k/n, in (0, 1]; 1 is dense")->group(group);
  app.add_option(
         "--density-warmup", t.density_warmup,
         "none; dgc, gaussiank, gtopk (the papers' lists); geometric:EPOCHS; or a list, one "
         "an epoch: 0.25,0.06")
      ->group(group);
  app.add_option("--drop", t.drop, "gtopk: who keeps what a merge drops")
      ->check(CLI::IsMember(strings(drop_policy_names())))
      ->group(group);
  app.add_option("--feedback", t.feedback, "what is not sent: kept as residual, or lost (none)")
      ->check(CLI::IsMember(train::feedback_names()))
      ->group(group);
  app.add_option("--dense-sum", t.dense_sum, "dense: Skim's ring, or MPI's all-reduce")
      ->check(CLI::IsMember(train::dense_sum_names()))
      ->group(group);
  app.add_option("--dense-below", t.dense_below, "buckets of fewer entries go dense")->group(group);
  app.add_option("--bucket-mb", t.bucket_mb, "size of a bucket, in 10^6 bytes; 0: one for all")
      ->check(kNotNegative)
      ->group(group);
  app.add_option("--non-finite", t.non_finite,
                 "a step with NaN or infinity: skip it, raise an error, or pass it on")
      ->check(CLI::IsMember(train::non_finite_names()))
      ->group(group);
  app.add_option("--compare", a.compare,
                 "run these exchanges one after another from the same seed, NAME or NAME:DENSITY, "
                 "and print a table: dense,allgather,gtopk:0.01")
      ->delimiter(',')
      ->always_capture_default(false)
      ->group(group);

  group = "Run";
  app.add_option("--threads", t.threads, "threads per rank; 0: cores of a host over its ranks")
      ->check(kNotNegative)
      ->group(group);
  app.add_option("--eval-epochs", t.eval_epochs, "epochs between evaluations; 0: at the end only")
      ->check(kNotNegative)
      ->group(group);
  app.add_option("--eval-examples", t.eval_examples, "test examples to take; 0: all")
      ->check(kNotNegative)
      ->group(group);
  app.add_option("--metrics", t.metrics, "JSON lines, one a step; -: standard output")
      ->always_capture_default(false)
      ->group(group);
  app.add_option("--summary", a.summary, "JSON array, one object a run; -: standard output")
      ->always_capture_default(false)
      ->group(group);
  app.add_option("--checkpoint", t.checkpoint,
                 "folder for checkpoints: at the end, when stopped, and as --checkpoint-steps says")
      ->always_capture_default(false)
      ->group(group);
  app.add_option("--checkpoint-steps", t.checkpoint_steps, "steps between checkpoints; 0: none")
      ->check(kNotNegative)
      ->group(group);
  app.add_flag("--resume", t.resume, "continue from the checkpoint in --checkpoint")->group(group);
  app.add_option("--timeout", a.timeout, "seconds that a rank waits for another")
      ->check(kPositive)
      ->group(group);
  // Of an option that stands twice the last counts, so that scripts can be given more arguments.
  for (CLI::Option* option : app.get_options()) {
    if (option->get_items_expected_max() == 1) {
      option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    }
  }
  app.footer(
      "Ctrl-C or SIGTERM end the run after the step, with a checkpoint if --checkpoint is given; "
      "a second one ends it at once.\n"
      "Exit status: 0 success; 1 the run failed; 2 wrong usage or input; 128+N stopped by signal "
      "N.\n"
      "Example: skim train --ranks 4 --model lenet5 --data generated --epochs 2 --lr 0.05 "
      "--compare dense,gtopk:0.01");
}

// The runs: the one that the options describe, or those to compare.
std::vector<Row> plan(const Arguments& a) {
  std::vector<Row> rows;
  if (a.compare.empty()) {
    rows.push_back({.name = a.train.exchange, .options = a.train, .summary = {}});
  }
  for (const std::string& entry : a.compare) {
    Row row{.name = entry, .options = a.train, .summary = {}};
    const std::size_t colon = entry.find(':');
    row.options.exchange = entry.substr(0, colon);
    if (colon != std::string::npos) {
      const std::string text = entry.substr(colon + 1);
      char* end = nullptr;
      row.options.density = std::strtod(text.c_str(), &end);
      if (text.empty() || *end != '\0') {
        throw InvalidArgument("--compare: '" + text + "' in '" + entry + "' is no density");
      }
    }
    for (const Row& r : rows) {
      if (r.name == entry) throw InvalidArgument("--compare: '" + entry + "' stands twice");
    }
    if (!row.options.checkpoint.empty()) row.options.checkpoint /= entry;
    rows.push_back(std::move(row));
  }
  for (const Row& r : rows) {
    if (!(r.options.density > 0.0 && r.options.density <= 1.0)) {
      throw InvalidArgument("--density: expected a number in (0, 1], got " +
                            nlohmann::json(r.options.density).dump());
    }
    train::reducer_options(r.options);  // throw for names that do not exist
    train::density_schedule(r.options);
  }
  return rows;
}

void check(const Arguments& a) {
  const TrainOptions& t = a.train;
  if (t.resume && t.checkpoint.empty()) throw InvalidArgument("--resume needs --checkpoint DIR");
  if (t.resume && !a.compare.empty())
    throw InvalidArgument("--resume and --compare exclude each other");
  if (t.checkpoint_steps > 0 && t.checkpoint.empty()) {
    throw InvalidArgument("--checkpoint-steps needs --checkpoint DIR");
  }
  if (t.nesterov && t.momentum <= 0.0) throw InvalidArgument("--nesterov needs --momentum > 0");
  if (!a.summary.empty() && a.summary == t.metrics.string()) {
    throw InvalidArgument("--summary and --metrics are one file: '" + a.summary + "'");
  }
  if (t.dense_sum == "mpi" && !is_available(Backend::mpi)) {
    throw InvalidArgument("--dense-sum mpi: this build has no MPI");
  }
}

int threads_per_rank(Communicator& comm) {
  MessageList hosts;
  const int mine = comm.host();
  comm.allgather(std::as_bytes(std::span(&mine, 1)), hosts);
  int ranks_here = 0;
  for (std::size_t r = 0; r < hosts.size(); ++r) {
    int host = 0;
    std::memcpy(&host, hosts[r].data(), sizeof host);
    ranks_here += host == mine ? 1 : 0;
  }
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, cores / std::max(1, ranks_here));
}

void write_summary(const std::string& path, const std::vector<Row>& rows, int ranks) {
  nlohmann::json all = nlohmann::json::array();
  for (const Row& r : rows) all.push_back(to_json(r, ranks));
  const std::string text = all.dump(2) + "\n";
  std::FILE* const file = path == "-" ? stdout : std::fopen(path.c_str(), "w");
  const bool written = file != nullptr &&
                       std::fwrite(text.data(), 1, text.size(), file) == text.size() &&
                       std::fflush(file) == 0;
  const int code = errno;
  if (file != nullptr && file != stdout) std::fclose(file);
  if (!written) throw Error("--summary: cannot write '" + path + "': " + std::strerror(code));
}

// All runs of one rank. Returns the exit status.
int run_rank(Arguments& a, std::vector<Row>& rows, Communicator& comm) {
  const bool first = comm.rank() == 0;
  const bool to_stderr = a.summary == "-" || a.train.metrics == "-";
  std::FILE* const people = to_stderr ? stderr : stdout;
  train::expect_equal_on_all_ranks({{"version", SKIM_VERSION},
                                    {"compare", a.compare},
                                    {"epochs", a.train.epochs},
                                    {"steps", a.train.steps},
                                    {"eval_epochs", a.train.eval_epochs},
                                    {"eval_examples", a.train.eval_examples},
                                    {"checkpoint", a.train.checkpoint.string()},
                                    {"checkpoint_steps", a.train.checkpoint_steps},
                                    {"resume", a.train.resume}},
                                   "command line", comm);
  const int threads = a.train.threads > 0 ? a.train.threads : threads_per_rank(comm);
  at::set_num_threads(threads);

  a.train.data.seed = a.train.seed;
  const train::Dataset data = train::load_data(a.train.data);
  const bool text = data.info().kind == train::InputKind::text;
  MetricsFile metrics(first ? a.train.metrics : std::filesystem::path(), a.train.resume);
  const int columns = terminal_columns(to_stderr);

  for (std::size_t i = 0; i < rows.size(); ++i) {
    Row& row = rows[i];
    row.options.data = a.train.data;
    row.options.threads = threads;
    Progress progress(people, columns, row.name, text);
    train::Observer observer;
    observer.on_step = [&](const train::StepRecord& r) {
      metrics.write(to_json(row.name, r));
      progress.step(r);
    };
    observer.on_evaluation = [&](const train::Evaluation& e) {
      metrics.write(to_json(row.name, e, text));
      progress.evaluated(e);
    };
    observer.on_resume = [&](std::int64_t step) {
      metrics.forget_after(row.name, step);
      std::fprintf(people, "%s  resumed after step %lld\n", row.name.c_str(),
                   static_cast<long long>(step));
    };
    row.summary = train::train(row.options, data, comm, g_stop, observer);
    if (first) progress.end();
    if (row.summary.stopped || g_stop.load()) {
      rows.resize(i + 1);
      break;
    }
  }
  const bool stopped = rows.back().summary.stopped;
  if (!first) return stopped ? kRunError : 0;
  if (!a.summary.empty()) write_summary(a.summary, rows, comm.size());
  print_table(people, rows, comm.size(), text);
  if (stopped) {
    const train::Summary& s = rows.back().summary;
    std::fprintf(stderr, "skim: stopped after step %lld; %s\n", static_cast<long long>(s.steps),
                 s.checkpoint.empty()
                     ? "no checkpoint was asked for"
                     : ("checkpoint " + s.checkpoint + "; --resume continues").c_str());
    return kRunError;
  }
  return 0;
}

int guarded_rank(Arguments& a, std::vector<Row>& rows) {
  struct sigaction action {};
  action.sa_handler = on_stop;
  action.sa_flags = SA_RESTART;
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) sigaction(signal, &action, nullptr);

  const CommOptions comm_options{
      .timeout = std::chrono::milliseconds(static_cast<std::int64_t>(a.timeout * 1000.0)),
      .deadline_ns = &g_deadline_ns};
  const bool with_mpi = is_launched();
  std::unique_ptr<Communicator> comm;
  std::unique_ptr<RankStatus> status;
  std::string failure;
  bool cause = true;
  int code = kRunError;
  try {
    if (with_mpi && !is_available(Backend::mpi)) {
      throw InvalidArgument("started as one of several ranks, but this build has no MPI");
    }
    comm = connect(with_mpi ? Backend::mpi : Backend::in_process, comm_options);
    status = std::make_unique<RankStatus>(comm->rank());
    if (a.ranks > 1 && a.ranks != comm->size()) {
      throw InvalidArgument("--ranks " + std::to_string(a.ranks) + ", but mpirun or srun started " +
                            std::to_string(comm->size()));
    }
    code = run_rank(a, rows, *comm);
  } catch (const CommError& e) {
    failure = e.what();
    cause = false;
  } catch (const InvalidArgument& e) {
    failure = e.what();
    code = kUsageError;
  } catch (const train::DataError& e) {
    failure = e.what();
    code = kUsageError;
  } catch (const c10::Error& e) {
    failure = e.what_without_backtrace();
  } catch (const std::bad_alloc&) {
    failure = "out of memory";
  } catch (const std::exception& e) {
    failure = e.what();
  }
  if (failure.empty()) {
    if (status) status->finished();
    if (code != 0 && g_signal.load() != 0) code = 128 + g_signal.load();
    if (comm && with_mpi && code != 0) comm->barrier();  // nobody is cut off by mpirun
    return code;
  }
  const std::string line = failure.substr(0, failure.find('\n'));
  const std::string who = comm && comm->size() > 1 && !line.starts_with("rank ")
                              ? "rank " + std::to_string(comm->rank()) + ": " + line
                              : line;
  if (!status || !status->failed(who, cause, code)) std::fprintf(stderr, "skim: %s\n", who.c_str());
  std::fflush(nullptr);
  if (comm) comm->abort(comm->rank());
  if (with_mpi) {
    comm.reset();
    _exit(code);  // MPI_Finalize would wait for ranks that are gone
  }
  return code;
}

}  // namespace

int train_command(int argc, char** argv) {
  Arguments a;
  if (const char* dir = std::getenv("SKIM_DATA")) a.train.data.dir = dir;
  CLI::App app("Trains a model on several ranks that exchange top-k gradients.", "skim train");
  declare(app, a);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& e) {
    return app.exit(e);
  } catch (const CLI::CallForVersion& e) {
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    std::fprintf(stderr, "skim train: %s (skim train --help lists all options)\n", e.what());
    return kUsageError;
  }
  try {
    check(a);
    std::vector<Row> rows = plan(a);
    if (a.ranks == 1 || is_launched()) return guarded_rank(a, rows);
    if (!is_available(Backend::mpi)) {
      throw InvalidArgument("--ranks " + std::to_string(a.ranks) +
                            ": this build has no MPI; build with SKIM_MPI=ON, or take --ranks 1");
    }
    if (a.ranks > kMostLocalRanks) {
      throw InvalidArgument("--ranks " + std::to_string(a.ranks) + ": at most " +
                            std::to_string(kMostLocalRanks) +
                            " on one machine; for more, start skim under mpirun with a host file");
    }
    std::vector<std::string> arguments{"train"};
    arguments.insert(arguments.end(), argv + 1, argv + argc);
    return launch(a.ranks, arguments);
  } catch (const InvalidArgument& e) {
    std::fprintf(stderr, "skim train: %s\n", e.what());
    return kUsageError;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "skim train: %s\n", e.what());
    return kRunError;
  }
}

}  // namespace skim::tool
