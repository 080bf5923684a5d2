// skim train: options, ranks, runs, table.
#include "tools/train_command.hpp"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "skim/error.hpp"
#include "skim/version.hpp"
#include "tools/commands.hpp"
#include "tools/fit.hpp"
#include "tools/launcher.hpp"
#include "tools/report.hpp"
#include "tools/units.hpp"
#include "train/models.hpp"
#include "train/trainer.hpp"

namespace skim::tool {
namespace {

using train::TrainOptions;

constexpr int kUsageError = 2, kRunError = 1;
constexpr int kMostLocalRanks = 256;

// In the order of their enumerators.
constexpr std::array<std::string_view, 3> kOptimizers{"sgd", "adam", "adamw"};
constexpr std::array<std::string_view, 3> kLrSchedules{"constant", "steps", "cosine"};

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

std::vector<std::string> exchanges_but(std::initializer_list<ExchangeKind> kinds) {
  std::vector<std::string> names(exchange_kind_names().begin(), exchange_kind_names().end());
  for (const ExchangeKind k : kinds) {
    std::erase(names, exchange_kind_names()[static_cast<std::size_t>(k)]);
  }
  return names;
}
std::vector<std::string> parts_of_a_hierarchy() {
  return exchanges_but({ExchangeKind::dense, ExchangeKind::hierarchical, ExchangeKind::param_server,
                        ExchangeKind::automatic});
}
std::vector<std::string> choices_of_auto() {
  return exchanges_but(
      {ExchangeKind::hierarchical, ExchangeKind::param_server, ExchangeKind::automatic});
}

bool is_adaptive(const train::TrainOptions& o) { return o.density_rule == "adaptive"; }

}  // namespace

void add_training_options(CommandLine& line, train::TrainOptions& t) {
  line.group("What is trained");
  line.choice("--model", t.model, "model", train::model_names());
  line.choice("--data", t.data.name, "data set", train::data_names());
  line.plain("--data-dir", t.data.dir, "DIR",
             "folder with NAME/ of the data set in it, or the text file [$SKIM_DATA]");
  line.option("--batch", t.batch, "N", "examples per rank and step")->check(positive());
  line.option("--epochs", t.epochs, "X", "passes over the training set")->check(positive());
  line.plain("--steps", t.steps, "N", "steps, instead of epochs")->check(positive());
  line.choice(
      "--split", t.split,
      "iid: every rank draws from all examples; partition: from its own, dealt at random once; "
      "shards: from its own, which are cut from the examples sorted by label",
      train::split_names());
  line.option("--shards-per-rank", t.shards_per_rank, "N", "shards: how many a rank gets")
      ->check(positive());
  line.option("--seed", t.seed, "N", "of parameters, order of examples, augmentation and dropout");
  line.flag("--augment", t.data.augment, "cifar10: random crops and flips");
  line.option("--sequence", t.data.sequence_length, "N", "text: characters in a window")
      ->check(positive());
  line.option("--generated-train", t.data.generated_train, "N", "generated: training images")
      ->check(positive());
  line.option("--generated-test", t.data.generated_test, "N", "generated: test images")
      ->check(positive());
  line.plain("--layers", t.layers, "N", "lstm, gpt: layers [lstm 1, gpt 4]")->check(positive());
  line.plain("--hidden", t.hidden, "N", "lstm: size of the state [256]")->check(positive());
  line.plain("--embedding", t.embedding, "N", "lstm, gpt: size of the embedding [lstm 64, gpt 128]")
      ->check(positive());
  line.plain("--heads", t.heads, "N", "gpt: attention heads [4]")->check(positive());

  line.group("Optimizer");
  line.choice("--optimizer", t.optimizer, "works on the mean gradient", kOptimizers);
  line.option("--lr", t.learning_rate.base, "X", "learning rate")->check(positive());
  line.choice("--lr-schedule", t.learning_rate.kind, "after the warm-up", kLrSchedules);
  line.option("--lr-warmup", t.learning_rate.warmup_epochs, "X", "epochs of linear rise")
      ->check(not_negative());
  line.plain("--lr-drops", t.learning_rate.drop_epochs, "X,X,...",
             "steps: epochs at which it drops")
      ->delimiter(',');
  line.option("--lr-gamma", t.learning_rate.gamma, "X", "steps: factor of a drop")
      ->check(positive());
  line.option("--momentum", t.momentum, "X", "of sgd, after aggregation")->check(not_negative());
  line.flag("--nesterov", t.nesterov, "Nesterov momentum");
  line.option("--weight-decay", t.weight_decay, "X", "weight decay")->check(not_negative());
  line.flag("!--no-bias-decay", t.decay_biases,
            "no weight decay on biases and normalisation layers");
  line.option("--clip-norm", t.clip_norm, "X", "limit of the mean gradient's norm; 0: none")
      ->check(not_negative());

  line.group("Exchange");
  line.choice("--exchange", t.exchange, "how gradients are summed", exchange_kind_names());
  line.choice("--select", t.select, "how entries are chosen", select_algo_names());
  line.plain("--select-threshold", t.select_threshold, "X",
             "threshold: what is at least this large is chosen, whatever the density")
      ->check(positive());
  line.option("--select-block", t.select_block, "N", "blocktopk: entries of a block")
      ->check(positive());
  line.plain("--select-stages", t.select_stages, "N", "sidco: stages of its fit [adapted]")
      ->check(positive());
  line.choice("--select-seeds", t.select_seeds,
              "what a rule draws on the ranks, for randomk the indices",
              train::select_seeds_names());
  line.flag("--per-layer", t.per_layer, "choose inside every parameter, not over a whole bucket");
  const auto set = [&t](const std::string& text) { train::set_density(t, "--density", text); };
  line.call("--density", set, "D",
            "kept fraction k/n, in (0, 1]; 1 is dense; or what chooses it at every step: adaptive "
            "(the least error for a budget: docs/adaptive.md); capture=SHARE (of |u|^2); "
            "accordion=LOW/HIGH; descent-per-bit")
      ->default_str("0.001");
  line.option("--density-warmup", t.density_warmup, "SPEC",
              "densities before that: none; dgc, gaussiank, gtopk (the lists of their papers); "
              "geometric:EPOCHS; or a list, one an epoch: 0.25,0.06");
  const auto budget = [&t](const std::string& text) {
    t.budget_bytes = parse_bytes("--budget", text);
  };
  line.call("--budget", budget, "BYTES",
            "adaptive: what the busiest rank sends in the whole run, as 50MB or 2GB");
  const auto time = [&t](const std::string& text) {
    t.target_s = parse_seconds("--target-time", text);
  };
  line.call("--target-time", time, "TIME",
            "adaptive: instead, how long the run is predicted to take, as 10min; with --fit and "
            "--compute");
  line.choice(
      "--adaptive-form", t.adaptive_form,
      "adaptive: what is assumed of the entries that are left out; auto: feedback with error "
      "feedback, else measured",
      train::adaptive_form_choices());
  line.option("--density-min", t.density_min, "D", "the least that a rule but accordion gives")
      ->check(CLI::Range(1e-12, 1.0));
  line.option("--density-max", t.density_max, "D", "and the most")->check(CLI::Range(1e-12, 1.0));
  line.option("--contraction", t.contraction, "A",
              "adaptive: factor of the error in a step, in (0, 1]; below 1 late steps weigh more")
      ->check(CLI::Range(1e-12, 1.0));
  line.choice("--drop", t.drop, "gtopk: who keeps what a merge drops", drop_policy_names());
  line.choice("--gtopk-form", t.gtopk_form,
              "gtopk: the published tree, or a butterfly, of half the rounds", gtopk_form_names());
  line.flag("--oktopk-exact", t.oktopk.exact,
            "oktopk: the largest of the exact sum, at a volume without a bound");
  line.option("--oktopk-cut-every", t.oktopk.cut_every, "N",
              "oktopk: steps until the cut is found anew")
      ->check(positive());
  line.option("--oktopk-regions-every", t.oktopk.regions_every, "N",
              "oktopk: steps until the ranks' index ranges are")
      ->check(positive());
  line.choice(
      "--server", t.server,
      "param-server: rank 0, which trains or only serves (dedicated), or all ranks, each for "
      "a range of indices (sharded)",
      server_placement_names());
  line.plain(
          "--down-density", t.down_density, "D",
          "kept fraction of the result, in (0, 1]: of what a server sends back (1: all that came "
          "in), or gtopk, global-topk and oktopk leave [as up]")
      ->check(positive());
  line.choice("--inside-hosts", t.inside_hosts, "hierarchical: among the ranks of a host",
              parts_of_a_hierarchy());
  line.choice("--between-hosts", t.between_hosts, "hierarchical: among one rank of each host",
              parts_of_a_hierarchy());
  line.plain("--auto-among", t.auto_among, "NAME,...",
             "auto: what it may choose [dense,allgather,gtopk,oktopk,sparcml]")
      ->delimiter(',')
      ->check(CLI::IsMember(choices_of_auto()));
  const auto read = [&t](const std::string& path) {
    const Fit fit = read_fit(path);
    t.auto_link = fit.link;
    t.auto_local = fit.local;
  };
  line.call("--fit", read, "FILE",
            "auto: link and local speeds as skim bench network --json wrote them; without, the "
            "link is measured");
  line.choice("--index-code", t.index_code,
              "indices in frames; auto: the smallest for each that is worth its time",
              train::index_code_choices());
  line.choice("--value-code", t.value_code, "values in frames: q8, q4, q2 with scales for blocks",
              value_code_names());
  line.choice("--rounding", t.rounding, "to the value code, by --seed where stochastic",
              rounding_names());
  line.choice("--feedback", t.feedback, "what is not sent is kept, or lost",
              train::feedback_names());
  line.choice("--memory", t.memory,
              "residuals of gradients, or of updates: gradients times the learning rate; auto: "
              "updates with --density adaptive, where the run allows it, else gradients",
              train::memory_choices());
  line.option("--momentum-correction", t.momentum_correction, "X",
              "momentum of each rank, before selection, in place of --momentum; 0: none")
      ->check(not_negative());
  line.flag("--nesterov-correction", t.nesterov_correction, "Nesterov form of it");
  line.flag("!--no-factor-masking", t.factor_masking,
            "keep the momentum of entries that were delivered");
  line.option("--local-clip", t.local_clip, "X",
              "each rank's gradient is clipped to a norm of X / sqrt(P) before selection; 0: none")
      ->check(not_negative());
  line.option("--residual-decay", t.residual_decay, "X",
              "factor of the residual in every step, in [0, 1]")
      ->check(not_negative());
  line.choice("--dense-sum", t.dense_sum, "dense: Skim's ring, or MPI's own sum",
              train::dense_sum_names());
  line.option("--dense-below", t.dense_below, "N", "buckets of fewer entries go dense");
  line.option("--bucket-mb", t.bucket_mb, "X",
              "size of a bucket in 10^6 bytes; 0: one for the whole model")
      ->check(not_negative());
  line.choice("--non-finite", t.non_finite, "a step with NaN or infinity, on all ranks",
              train::non_finite_names());

  line.group("Run");
  line.plain("--threads", t.threads, "N", "threads per rank [cores of the host / ranks on it]")
      ->check(positive());
  line.option("--eval-epochs", t.eval_epochs, "X", "epochs between evaluations; 0: at the end only")
      ->check(not_negative());
  line.plain("--eval-examples", t.eval_examples, "N", "test examples to take [all]")
      ->check(positive());
  line.plain("--metrics", t.metrics, "FILE", "JSON lines, one a step; -: standard output");
  line.plain("--checkpoint", t.checkpoint, "DIR",
             "checkpoints: at the end, when stopped, and as --checkpoint-steps says");
  line.plain("--checkpoint-steps", t.checkpoint_steps, "N", "steps between checkpoints")
      ->check(positive());
  line.flag("--resume", t.resume, "continue from the checkpoint in --checkpoint");
}

void check_training_options(const train::TrainOptions& t) {
  if (t.resume && t.checkpoint.empty()) throw InvalidArgument("--resume needs --checkpoint DIR");
  if (t.checkpoint_steps > 0 && t.checkpoint.empty()) {
    throw InvalidArgument("--checkpoint-steps needs --checkpoint DIR");
  }
  if (t.momentum >= 1.0) throw InvalidArgument("--momentum: expected a number in [0, 1)");
  if (t.nesterov && t.momentum <= 0.0) throw InvalidArgument("--nesterov needs --momentum > 0");
  if (t.momentum_correction >= 1.0) {
    throw InvalidArgument("--momentum-correction: expected a number in [0, 1)");
  }
  if (t.momentum_correction <= 0.0 && (t.nesterov_correction || !t.factor_masking)) {
    throw InvalidArgument(
        std::string(t.nesterov_correction ? "--nesterov-correction" : "--no-factor-masking") +
        " needs --momentum-correction > 0");
  }
  if (t.residual_decay > 1.0) {
    throw InvalidArgument("--residual-decay: expected a number in [0, 1]");
  }
  if (t.dense_sum == "mpi" && !is_available(Backend::mpi)) {
    throw InvalidArgument("--dense-sum mpi: this build has no MPI");
  }
}

void check_budget(const std::vector<Row>& rows) {
  bool used = false;
  for (const Row& r : rows)
    used = used || (is_adaptive(r.options) && r.options.exchange != "dense");
  const train::TrainOptions& o = rows.front().options;
  if (used) return;
  if (is_adaptive(o)) {
    throw InvalidArgument("--density adaptive: --exchange dense sends everything in every step");
  }
  if (o.budget_bytes > 0.0 || o.target_s > 0.0) {
    throw InvalidArgument(std::string(o.budget_bytes > 0.0 ? "--budget" : "--target-time") +
                          " needs --density adaptive");
  }
}

std::string note_on_budget(const train::TrainOptions& o, int ranks) {
  if (ranks > 1 || o.exchange == "dense" || !is_adaptive(o) || !(o.budget_bytes > 0.0)) return {};
  return fmt::format("one rank sends nothing: --budget is not used, the density is {:g}",
                     o.density_max);
}

namespace {

void declare(CLI::App& app, Arguments& a, const TrainingCommand& command) {
  CommandLine line(app);
  if (command.declare) command.declare(line);
  line.group("Runs");
  line.option("--ranks", a.ranks, "P",
              "ranks to start on this machine; under mpirun or srun their number, which then need "
              "not be given")
      ->check(positive());
  line.plain("--compare", a.compare, "RUN,RUN,...",
             "run these one after another from the same seed and print a table; a RUN is "
             "EXCHANGE, EXCHANGE:DENSITY or EXCHANGE:DENSITY:SELECT, as in "
             "dense,allgather:0.01,gtopk:0.01:gaussian")
      ->delimiter(',');
  const auto compute = [&a](const std::string& text) {
    a.train.compute_s = parse_seconds("--compute", text);
  };
  line.call("--compute", compute, "TIME",
            "--target-time: what forward and backward of a step take, as 20ms");
  line.option("--timeout", a.timeout, "SECONDS", "how long a rank waits for another")
      ->check(positive());
  line.plain("--summary", a.summary, "FILE", "JSON array, one object a run; -: standard output");
  add_training_options(line, a.train);
  app.footer(
      "Ctrl-C or SIGTERM end the run after the step, with a checkpoint if --checkpoint\n"
      "is given; a second one ends it at once. SKIM_MPIRUN in the environment names another\n"
      "mpirun for --ranks.\n\n"
      "Exit status: 0 success; 1 the run failed; 2 wrong usage or input; 128+N\n"
      "stopped by signal N.\n\n" +
      command.example);
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
      const std::size_t second = std::min(entry.find(':', colon + 1), entry.size());
      const std::string text = entry.substr(colon + 1, second - colon - 1);
      if (second < entry.size()) row.options.select = entry.substr(second + 1);
      train::set_density(row.options, "--compare " + entry, text);
    }
    for (const Row& r : rows) {
      if (r.name == entry) throw InvalidArgument("--compare: '" + entry + "' stands twice");
    }
    if (!row.options.checkpoint.empty()) row.options.checkpoint /= entry;
    rows.push_back(std::move(row));
  }
  check_budget(rows);
  for (const Row& r : rows) {
    // Throw for names that do not exist and values that nothing can be made from.
    make_selector(train::reducer_options(r.options).select);
    train::density_schedule(r.options);
  }
  return rows;
}

void check(const Arguments& a) {
  check_training_options(a.train);
  if (a.train.resume && !a.compare.empty()) {
    throw InvalidArgument("--resume and --compare exclude each other");
  }
  if (!a.summary.empty() && a.summary == a.train.metrics.string()) {
    throw InvalidArgument("--summary and --metrics are one file: '" + a.summary + "'");
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
int run_rank(const TrainingCommand& command, Arguments& a, std::vector<Row>& rows,
             Communicator& comm) {
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
                                   "version or command line", comm);
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
      progress.say(fmt::format("resumed after step {}", step));
    };
    observer.on_decision = decisions_to(metrics, progress, row.name);
    const std::string note = note_on_budget(row.options, comm.size());
    if (first && !note.empty()) progress.say(note);
    if (first && command.attach) command.attach(row, comm.size(), observer);
    row.summary = train::train(row.options, data, comm, g_stop, observer);
    if (first) progress.end();
    if (first && command.after) command.after(people);
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

int guarded_rank(const TrainingCommand& command, Arguments& a, std::vector<Row>& rows) {
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
    code = run_rank(command, a, rows, *comm);
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
    if (code != 0 && g_signal.load() != 0) code = 128 + g_signal.load();
    if (code == 0) comm.reset();
    if (status) status->finished(code);
    if (comm && with_mpi) comm->barrier();  // nobody is cut off by mpirun
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

int run_training_command(const TrainingCommand& command, int argc, char** argv) {
  Arguments a;
  if (const char* dir = std::getenv("SKIM_DATA")) a.train.data.dir = dir;
  CLI::App app(command.description, "skim " + command.name);
  declare(app, a, command);
  return parse_and_run(app, argc, argv, [&] {
    check(a);
    std::vector<Row> rows = plan(a);
    if (command.before) {
      if (const std::optional<int> status = command.before(rows)) return *status;
    }
    if (a.ranks == 1 || is_launched()) return guarded_rank(command, a, rows);
    if (!is_available(Backend::mpi)) {
      throw InvalidArgument("--ranks " + std::to_string(a.ranks) +
                            ": this build has no MPI; build with SKIM_MPI=ON, or take --ranks 1");
    }
    if (a.ranks > kMostLocalRanks) {
      throw InvalidArgument("--ranks " + std::to_string(a.ranks) + ": at most " +
                            std::to_string(kMostLocalRanks) +
                            " on one machine; for more, start skim under mpirun with a host file");
    }
    std::vector<std::string> arguments{command.name};
    arguments.insert(arguments.end(), argv + 1, argv + argc);
    return launch(a.ranks, arguments);
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
