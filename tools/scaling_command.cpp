// skim bench scaling: measures how training scales over a real link with every exchange, and
// compares it with the cost model.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "bench/cases.hpp"
#include "bench/local_step.hpp"
#include "bench/measure.hpp"
#include "bench/network.hpp"
#include "bench/scaling.hpp"
#include "skim/cost.hpp"
#include "skim/error.hpp"
#include "skim/exchange.hpp"
#include "skim/schedule.hpp"
#include "skim/select.hpp"
#include "tools/command_line.hpp"
#include "tools/commands.hpp"
#include "tools/fit.hpp"
#include "tools/json_file.hpp"
#include "tools/launcher.hpp"
#include "tools/run_dir.hpp"
#include "tools/summation.hpp"
#include "tools/training_options.hpp"
#include "tools/units.hpp"
#include "train/gather.hpp"

namespace skim::tool {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();  // null in JSON
// Selection is timed on four arrays of at most this many entries. For larger models, the time is
// scaled up in proportion.
constexpr std::size_t kMostTimed = std::size_t{1} << 26;

struct ScalingOptions {
  std::size_t parameters = 0;
  std::string compute;
  double density = 0.001;
  std::vector<std::string> exchanges{"dense", "allgather", "gtopk", "oktopk", "auto"};
  bool no_vendor_sum = false;
  CodecOptions codec;
  int rounds = 5;
  double time_scale = 1.0;
  std::string longest_wait;
  std::string gradient_folder;
  bool keep_gradient = false;
  std::string fit;
  int shared_cores = 0;
  std::string json;
};

// The options after parsing and checking.
struct Setting {
  double compute_s = 0.0;
  double longest_wait_s = std::numeric_limits<double>::infinity();
  std::filesystem::path folder;
  std::optional<Fit> fit;
};

Setting read(const ScalingOptions& o) {
  Setting s;
  if (!(o.density > 0.0 && o.density <= 1.0)) {
    throw InvalidArgument(
        fmt::format("--density: expected a number in (0, 1], got {:g}", o.density));
  }
  s.compute_s = parse_seconds("--compute", o.compute);
  if (!o.longest_wait.empty()) s.longest_wait_s = parse_seconds("--longest-wait", o.longest_wait);
  s.folder = o.gradient_folder.empty() ? temporary_folder()
                                       : std::filesystem::path(o.gradient_folder);
  if (!o.fit.empty()) s.fit = read_fit(o.fit);
  return s;
}

// The factor by which ranks are slower when they all work at once on the cores of one machine.
double sharing(const ScalingOptions& o, int ranks) {
  return o.shared_cores > 0 ? std::max(1.0, static_cast<double>(ranks) / o.shared_cores) : 1.0;
}

// The local speeds of a rank, for choosing between exchanges on the measured link. This link is
// time_scale times slower than the real one, but selection is not. So the time of selection is
// multiplied by time_scale.
LocalSpeeds speeds(const ScalingOptions& o, const Fit& fit, int ranks) {
  return {.select_s = fit.local.select_s * o.time_scale,
          .merge_s = fit.local.merge_s * sharing(o, ranks),
          .add_s = fit.local.add_s * sharing(o, ranks)};
}

// One way to sum gradients, and the results of its rounds.
struct Contender {
  std::string name;  // "dense-ring", "dense-vendor", "gtopk"
  std::unique_ptr<Summation> summation;
  DenseSum sum = DenseSum::ring;
  bool dense = false;
  std::vector<double> seconds = {};  // on this rank; after take_slowest, on the slowest rank
  double sent_bytes = 0.0;           // in the last round; after take_slowest, by the busiest rank
  std::size_t result_entries = 0;
  bench::ProcessorTicks ticks = {};  // of the whole machine, during the rounds
};

// The measurement on one rank.
struct Trial {
  int ranks = 1;
  std::size_t k = 0, frame_bytes = 0, select_n = 0;
  double select_s = 0.0, waited_s = 0.0;
  std::vector<Contender> contenders = {};
};

std::vector<Contender> contenders(const ScalingOptions& o, const Setting& s, int ranks) {
  ChooserOptions chooser{.among = among(o.exchanges)};
  if (s.fit) {
    chooser.link = s.fit->link;
    chooser.local_speeds = speeds(o, *s.fit, ranks);
  }
  const auto sum_by = [&](const std::string& name) {
    return std::make_unique<Summation>(name, ExchangeOptions{.codec = o.codec}, chooser);
  };
  std::vector<Contender> all;
  for (const std::string& name : o.exchanges) {
    if (name != name_of(ExchangeKind::dense)) {
      all.push_back({.name = name, .summation = sum_by(name)});
      continue;
    }
    for (const DenseSum sum : {DenseSum::ring, DenseSum::vendor}) {
      if (o.no_vendor_sum && sum == DenseSum::vendor) continue;
      all.push_back({.name = name + "-" + std::string(name_of(sum)),
                     .summation = sum_by(name),
                     .sum = sum,
                     .dense = true});
    }
  }
  return all;
}

SparseBuffer select(const ScalingOptions& o, const Setting& s, std::size_t n, std::size_t k,
                    Communicator& comm) {
  const bench::SharedGradient gradient(s.folder, n, o.keep_gradient, comm);
  SparseBuffer mine;
  make_selector({})->select(
      {.id = {}, .grad = gradient.of(comm.rank()), .residual = {}, .layout = {}, .keep = {.k = k}},
      mine);
  return mine;
}

// Rank 0 measures the time of selection while the others wait. Returns rank 0's result on all
// ranks.
double time_selection(std::size_t timed, std::size_t n, Communicator& comm) {
  double seconds = 0.0;
  if (comm.rank() == 0) {
    seconds = bench::measure_local(timed).select_s * static_cast<double>(n);
  }
  return train::gather_values(seconds, comm)[0];
}

// Replaces the times of the rounds by those of the slowest rank, and the bytes by those of the
// busiest. Collective.
void take_slowest(std::vector<Contender>& all, Communicator& comm) {
  std::vector<double> figures;
  for (const Contender& c : all) {
    figures.insert(figures.end(), c.seconds.begin(), c.seconds.end());
    figures.push_back(c.sent_bytes);
  }
  MessageList of_ranks;
  comm.allgather(std::as_bytes(std::span(figures)), of_ranks);
  std::vector<double> other(figures.size());
  for (std::size_t r = 0; r < of_ranks.size(); ++r) {
    if (of_ranks[r].size() != figures.size() * sizeof(double)) {
      throw InvalidArgument(fmt::format("rank {} was started with other options", r));
    }
    std::memcpy(other.data(), of_ranks[r].data(), of_ranks[r].size());
    std::ranges::transform(figures, other, figures.begin(),
                           [](double a, double b) { return std::max(a, b); });
  }
  auto figure = figures.begin();
  for (Contender& c : all) {
    for (double& seconds : c.seconds) seconds = *figure++;
    c.sent_bytes = *figure++;
  }
}

// Runs every contender once, each after a wait in place of the step's computing. The order rotates
// from round to round.
void run_round(const ScalingOptions& o, Trial& t, std::uint64_t round, const SparseView& mine,
               std::span<float> dense, Communicator& comm) {
  const StepId id{round, 0};
  const Keep keep{.k = t.k};
  std::string line;
  for (std::size_t i = 0; i < t.contenders.size(); ++i) {
    Contender& c = t.contenders[(round + i) % t.contenders.size()];
    comm.barrier();
    std::this_thread::sleep_for(std::chrono::duration<double>(t.waited_s));
    comm.barrier();
    const bench::ProcessorTicks ticks = bench::processor_ticks();
    const std::uint64_t sent = comm.traffic().sent_bytes;
    const Summation::Outcome sum =
        c.summation->run(id, mine, keep, dense, c.sum, t.select_s * o.time_scale, comm);
    c.result_entries = sum.entries;
    const double seconds = 1e-9 * static_cast<double>(sum.ns);
    line += fmt::format("{}{} {}", line.empty() ? "" : ", ", c.name, duration_text(seconds));
    if (round == 0) continue;  // not timed: it connects, allocates, and sets up the exchanges
    c.seconds.push_back(seconds);
    c.sent_bytes = static_cast<double>(comm.traffic().sent_bytes - sent);
    const bench::ProcessorTicks now = bench::processor_ticks();
    c.ticks.idle += now.idle - ticks.idle;
    c.ticks.all += now.all - ticks.all;
  }
  if (comm.rank() == 0) {
    const std::string which =
        round == 0 ? "warm-up" : fmt::format("round {} of {}", round, o.rounds);
    fmt::print(stderr, "{}: {}\n", which, line);
  }
}

Trial measure(const ScalingOptions& o, const Setting& s, Communicator& comm) {
  Trial t{.ranks = comm.size(),
          .k = entries(o.density, o.parameters),
          .select_n = std::min(o.parameters, kMostTimed),
          .waited_s = std::min(s.compute_s * o.time_scale, s.longest_wait_s)};
  if (comm.rank() == 0) fmt::print(stderr, "selection of {} entries\n", t.k);
  const SparseBuffer selected = select(o, s, o.parameters, t.k, comm);
  const SparseView mine = selected.view();
  const GroupStats stats;
  std::vector<std::byte> frame;
  t.frame_bytes = Codec(o.codec).encode(mine, &stats, frame);
  comm.barrier();  // the other ranks now wait, so rank 0 has the machine to itself
  t.select_s = time_selection(t.select_n, o.parameters, comm);

  t.contenders = contenders(o, s, comm.size());
  const auto can_be_dense = [](const Contender& c) { return c.summation->may_be_dense(); };
  const bench::AlignedFloats dense(
      std::ranges::any_of(t.contenders, can_be_dense) ? o.parameters : 0);
  std::ranges::fill(dense.span(), 0.0F);
  for (int round = 0; round <= o.rounds; ++round) {
    run_round(o, t, static_cast<std::uint64_t>(round), mine, dense.span(), comm);
  }
  take_slowest(t.contenders, comm);
  return t;
}

// ---- evaluation, on rank 0 ----------------------------------------------------------------------

// Compares `auto` with the best single exchange, round by round.
struct Paired {
  std::string best;
  double median = 0.0;
  bench::MedianInterval interval;
};

// All seconds are for the real network: the measured time divided by time_scale. The time of
// selection is not divided.
struct Row {
  std::string name, counts_as;   // counts_as: name in comparisons; empty: the slower dense sum
  ExchangeKind chosen = {};      // the exchange that ran last
  std::string decision = {};     // of auto
  std::vector<double> rounds_s;  // of the exchange
  double select_s = 0.0, exchange_s = 0.0;
  double link_s = kUnknown, merge_s = kUnknown;  // predicted
  double efficiency = 0.0, over_dense = kUnknown, busy = kUnknown;
  double sent_bytes = 0.0;
  std::size_t result_entries = 0;
  std::optional<Paired> paired = {};

  double least_s() const { return std::ranges::min(rounds_s); }
  double most_s() const { return std::ranges::max(rounds_s); }
  double added_s() const { return select_s + exchange_s; }
  double predicted_s() const { return link_s + merge_s; }
};

Row row_for(const Contender& c, const ScalingOptions& o, const Setting& s, const Trial& t) {
  Row r{.name = c.name, .counts_as = c.name, .rounds_s = c.seconds};
  for (double& seconds : r.rounds_s) seconds /= o.time_scale;
  std::vector<double> any_order = r.rounds_s;
  r.exchange_s = median(any_order);
  r.sent_bytes = c.sent_bytes;
  r.result_entries = c.result_entries;
  constexpr double kFewestTicks = 50.0;  // usually of 10 ms; fewer are not reliable
  if (c.ticks.all >= kFewestTicks) r.busy = 1.0 - c.ticks.idle / c.ticks.all;
  r.chosen = c.summation->exchange();
  r.decision = c.summation->decision();
  if (r.chosen != ExchangeKind::dense) r.select_s = t.select_s;
  if (s.fit) {
    const Load load{.ranks = t.ranks,
                    .n = static_cast<double>(o.parameters),
                    .k = static_cast<double>(t.k),
                    .frame = frame_size(o.codec)};
    const Cost cost = predict({.kind = r.chosen, .codec = o.codec}, load, s.fit->link,
                              speeds(o, *s.fit, t.ranks));
    r.link_s = cost.link_s / o.time_scale;
    r.merge_s = cost.merge_s / o.time_scale;
  }
  r.efficiency = s.compute_s / (s.compute_s + r.added_s());
  return r;
}

// Compares the time that a step takes beyond its computing, round by round.
std::optional<Paired> pair_with_best(const Row& automatic, const std::vector<Row>& rows) {
  const Row* best = nullptr;
  for (const Row& r : rows) {
    if (r.counts_as.empty() || &r == &automatic) continue;
    if (best == nullptr || r.added_s() < best->added_s()) best = &r;
  }
  if (best == nullptr) return std::nullopt;
  std::vector<double> ratios;
  for (std::size_t i = 0; i < automatic.rounds_s.size(); ++i) {
    ratios.push_back((automatic.select_s + automatic.rounds_s[i]) /
                     (best->select_s + best->rounds_s[i]));
  }
  return Paired{best->name, median(ratios), bench::median_interval(ratios)};
}

std::vector<Row> rows_of(const ScalingOptions& o, const Setting& s, const Trial& t) {
  std::vector<Row> rows;
  for (const Contender& c : t.contenders) rows.push_back(row_for(c, o, s, t));
  Row* dense = nullptr;  // the faster sum
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!t.contenders[i].dense) continue;
    rows[i].counts_as.clear();
    if (dense == nullptr || rows[i].exchange_s < dense->exchange_s) dense = &rows[i];
  }
  if (dense != nullptr) dense->counts_as = "dense";
  for (Row& r : rows) {
    if (dense != nullptr) r.over_dense = r.efficiency / dense->efficiency;
    if (r.counts_as == "auto") r.paired = pair_with_best(r, rows);
  }
  return rows;
}

nlohmann::json to_json(const Row& r, const ScalingOptions& o, const Setting& s, const Trial& t) {
  const auto text = [](std::string_view word) {
    return word.empty() ? nlohmann::json() : nlohmann::json(word);
  };
  nlohmann::json j{{"parameters", o.parameters},
                   {"k", t.k},
                   {"density", o.density},
                   {"ranks", t.ranks},
                   {"exchange", r.name},
                   {"counts_as", text(r.counts_as)},
                   {"chosen", name_of(r.chosen)},
                   {"decision", text(r.decision)},
                   {"compute_s", s.compute_s},
                   {"select_s", r.select_s},
                   {"select_n", t.select_n},
                   {"exchange_s", r.exchange_s},
                   {"exchange_least_s", r.least_s()},
                   {"exchange_most_s", r.most_s()},
                   {"rounds_s", r.rounds_s},
                   {"predicted_s", r.predicted_s()},
                   {"predicted_link_s", r.link_s},
                   {"predicted_merge_s", r.merge_s},
                   {"measured_over_predicted", r.exchange_s / r.predicted_s()},
                   {"efficiency", r.efficiency},
                   {"speed_up_over_dense", r.over_dense},
                   {"busy", r.busy},
                   {"bytes", r.sent_bytes},
                   {"result_entries", r.result_entries},
                   {"frame_bytes", t.frame_bytes},
                   {"index_code", name_or_auto(o.codec.index)},
                   {"time_scale", o.time_scale},
                   {"waited_s", t.waited_s},
                   {"shared_cores", o.shared_cores},
                   {"alpha_s", s.fit ? s.fit->link.alpha_s : kUnknown},
                   {"beta_s_per_byte", s.fit ? s.fit->link.beta_s_per_byte : kUnknown}};
  if (r.paired) {
    const bench::MedianInterval& i = r.paired->interval;
    j["over_best"] = {{"best", r.paired->best},
                      {"median", r.paired->median},
                      {"low", i.low},
                      {"high", i.high},
                      {"j", i.j},
                      {"coverage", i.coverage}};
  }
  return j;
}

std::string number(const char* format, double x) {
  return std::isnan(x) ? "-" : fmt::format(fmt::runtime(format), x);
}

void print(std::FILE* out, const std::vector<Row>& rows, const Trial& t, const ScalingOptions& o,
           const Setting& s) {
  fmt::print(out, "\n{} parameters, k {} (a frame: {} bytes), {} ranks; compute {}, selection {}",
             o.parameters, t.k, t.frame_bytes, t.ranks, duration_text(s.compute_s),
             duration_text(t.select_s));
  if (o.time_scale != 1.0) {
    fmt::print(out, "; measured on a link {0:g} times slower, and divided by {0:g}", o.time_scale);
  }
  fmt::print(out, "\n{:<12} {:>12} {:>22} {:>12} {:>6} {:>11} {:>7} {:>5} {:>12}\n",
             "exchange", "exchange ms", "min .. max", "predicted", "ratio", "efficiency", "/dense",
             "busy", "bytes");
  for (const Row& r : rows) {
    fmt::print(out, "{:<12} {:>12.4g} {:>22} {:>12} {:>6} {:>10.1f}% {:>7} {:>5} {:>12.0f}\n",
               r.name, 1e3 * r.exchange_s,
               fmt::format("{:.4g} .. {:.4g}", 1e3 * r.least_s(), 1e3 * r.most_s()),
               number("{:.4g}", 1e3 * r.predicted_s()),
               number("{:.2f}", r.exchange_s / r.predicted_s()), 100.0 * r.efficiency,
               number("{:.2f}", r.over_dense), number("{:.0f}%", 100.0 * r.busy), r.sent_bytes);
  }
  for (const Row& r : rows) {
    if (!r.decision.empty()) fmt::print(out, "{}: {}\n", r.name, r.decision);
    if (r.paired) {
      fmt::print(
          out,
          "{} over {}, selection included, round by round: {:.3f} [{:.3f}, {:.3f}] at {:.1f}%\n",
          r.name, r.paired->best, r.paired->median, r.paired->interval.low, r.paired->interval.high,
          100.0 * r.paired->interval.coverage);
    }
  }
  std::fflush(out);
}

void run(const ScalingOptions& o, const Setting& s, Communicator& comm) {
  if (comm.size() < 2) throw InvalidArgument("expected two ranks or more, got one");
  const bool first = comm.rank() == 0;
  JsonFile json(first ? o.json : "");
  const Trial trial = measure(o, s, comm);
  if (first) {
    const std::vector<Row> rows = rows_of(o, s, trial);
    print(o.json == "-" ? stderr : stdout, rows, trial, o, s);
    nlohmann::json array = nlohmann::json::array();
    for (const Row& r : rows) array.push_back(to_json(r, o, s, trial));
    json.write(array);
  }
  comm.barrier();
}

void declare(CLI::App& app, ScalingOptions& o) {
  CommandLine line(app);
  line.group("What is trained");
  line.plain("--parameters", o.parameters, "N", "parameters of the model")
      ->required()
      ->check(CLI::Range(std::size_t{1}, std::size_t{1} << 31));
  line.plain("--compute", o.compute, "TIME", "time of a step without exchange, as 200ms")
      ->required();
  line.option("--density", o.density, "D", "k/n");

  line.group("How it is exchanged");
  line.option("--exchange", o.exchanges, "NAME,...",
              fmt::format("exchanges: {}; auto chooses among the others",
                          fmt::join(summation_names(), ", ")))
      ->delimiter(',')
      ->check(CLI::IsMember(summation_names()));
  line.flag("--no-vendor-sum", o.no_vendor_sum,
            "for dense, use only the ring, even if MPI's all-reduce is faster");
  add_codec_options(line, o.codec, {"index_code"});

  line.group("How it is measured");
  line.option("--rounds", o.rounds, "N",
              "rounds with every exchange once, after one that is not timed")
      ->check(CLI::Range(1, 100'000));
  line.option("--time-scale", o.time_scale, "X",
              "the measured link is X times slower than the real one: computing is slowed down as "
              "much, and measured times are divided by X")
      ->check(positive());
  line.plain("--longest-wait", o.longest_wait, "TIME",
             "limit of the wait in place of computing; results count the whole --compute [no "
             "limit]");
  line.plain("--gradient-folder", o.gradient_folder, "DIR",
             "folder for a file with the ranks' gradients, 4 bytes a parameter [the system's]")
      ->check(CLI::ExistingDirectory);
  line.flag("--keep-gradient", o.keep_gradient, "keep this file for the next run");

  line.group("What is predicted");
  line.plain("--fit", o.fit, "FILE",
             "file with link and local speeds, from skim bench network --json");
  line.option(
          "--shared-cores", o.shared_cores, "C",
          "all ranks share C cores, so merging on P ranks takes P/C times as long; 0: no sharing")
      ->check(CLI::Range(0, 1 << 20));
  line.plain("--json", o.json, "FILE", "JSON array, one object a row; -: standard output");
}

}  // namespace

int bench_scaling_command(int argc, char** argv) {
  ScalingOptions o;
  CLI::App app(
      "Measures the exchanges of training steps, in turn, on the network between MPI's ranks, and "
      "compares them with the cost model. Waits take the place of computing.",
      "skim bench scaling");
  declare(app, o);
  app.footer(
      "The time of an exchange is from a barrier until the slowest rank has the sum. Selection\n"
      "is timed separately. Efficiency = computing / (computing + selection + exchange).\n\n"
      "Example:\n"
      "  scripts/cluster/cluster up 4 1gbit\n"
      "  scripts/cluster/cluster run build/release/skim bench network --json fit.json\n"
      "  scripts/cluster/cluster run build/release/skim bench scaling --parameters 25557032 \\\n"
      "    --compute 200ms --fit fit.json");
  return parse_and_run(app, argc, argv, [&] {
    const Setting s = read(o);
    if (!is_launched()) {
      throw InvalidArgument(
          "expected two ranks or more: start it with mpirun or scripts/cluster/cluster run");
    }
    return run_as_rank("skim bench scaling", [&](Communicator& comm) { run(o, s, comm); });
  });
}

}  // namespace skim::tool
