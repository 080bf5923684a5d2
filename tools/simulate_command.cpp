// skim simulate: the real selection and exchanges on many ranks of one process, on a link that is
// not there.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
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
#include "skim/select.hpp"
#include "tools/command_line.hpp"
#include "tools/commands.hpp"
#include "tools/json_file.hpp"
#include "tools/units.hpp"

namespace skim::tool {
namespace {

constexpr std::uint64_t kWarm = 2;  // room is made, and oktopk finds regions and cut

struct SimulateOptions {
  std::size_t params = 1'000'000;
  std::vector<int> ranks{8};
  std::vector<std::string> exchanges;
  double density = 0.001, common = 0.5;
  std::string link, latency = "0us", json;
  std::uint64_t steps = 5;
  bool link_only = false;
};

// No hierarchical: all ranks would be one host's.
std::vector<std::string> exchanges() {
  std::vector<std::string> names(exchange_kind_names().begin(), exchange_kind_names().end());
  std::erase(names, "hierarchical");
  return names;
}

// What every rank selected from a gradient of its own, and the processor time that it took.
struct Selections {
  std::vector<SparseBuffer> of_rank;
  double seconds = 0.0;  // the median
};

double processor_s() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// One after another, so that memory is needed for one gradient and one residual. A gradient is
// sqrt(common) times what all have, plus what this rank has: normal, and as long on every rank.
Selections select(const SimulateOptions& o, int ranks, std::size_t k) {
  constexpr std::size_t kShift = 61;
  const std::size_t n = o.params;
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
  all.seconds = bench::median(std::move(seconds));
  return all;
}

struct Outcome {
  double exchange_s = 0.0;  // the median step, of the rank that is done last
  Traffic most;             // in one step, by the busiest rank
};

// One rank's steps. Its traffic and the time in ns after every step.
struct Course {
  std::vector<std::int64_t> end_ns;
  Traffic before, after;  // the last step
};

Course steps(const SimulateOptions& o, ExchangeKind kind, const SparseView& mine, std::size_t k,
             Communicator& comm) {
  Course course;
  std::unique_ptr<Exchange> exchange;
  std::vector<float> gradient;
  if (kind == ExchangeKind::dense) {
    gradient.resize(o.params);
  } else {
    exchange = make_exchange({.kind = kind});
  }
  const std::vector<std::byte> note(kFrameStatsBytes);
  MessageList notes;
  for (std::uint64_t step = 0; step < kWarm + o.steps; ++step) {
    course.before = comm.traffic();
    if (exchange) {
      GroupStats stats;
      exchange->run({step, 0}, mine, {.k = k}, stats, comm);
      exchange->end_step();
    } else {
      comm.allreduce_sum(gradient, DenseSum::ring, note, notes);
    }
    course.after = comm.traffic();
    course.end_ns.push_back(comm.now_ns());
  }
  return course;
}

Outcome simulate(const SimulateOptions& o, ExchangeKind kind, const Selections& selections,
                 std::size_t k, const Link& link) {
  const std::size_t ranks = selections.of_rank.size();
  // Waits are of real time, and all ranks share the cores of this machine.
  auto group =
      make_simulated_group(static_cast<int>(ranks), {link, !o.link_only}, {std::chrono::hours(1)});
  std::vector<Course> courses(ranks);
  std::vector<std::exception_ptr> failed(ranks);
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        try {
          courses[r] = steps(o, kind, selections.of_rank[r].view(), k, *group[r]);
        } catch (...) {
          failed[r] = std::current_exception();
          group[r]->abort(static_cast<int>(r));
        }
      });
    }
  }
  for (const auto& e : failed) {
    if (e) std::rethrow_exception(e);
  }
  Outcome outcome;
  std::vector<double> seconds;
  std::int64_t begin = 0;
  for (std::size_t step = 0; step < kWarm + o.steps; ++step) {
    std::int64_t end = 0;
    for (const Course& c : courses) end = std::max(end, c.end_ns[step]);
    if (step >= kWarm) seconds.push_back(1e-9 * static_cast<double>(end - begin));
    begin = end;
  }
  outcome.exchange_s = bench::median(std::move(seconds));
  for (const Course& c : courses) {
    outcome.most.sent_bytes =
        std::max(outcome.most.sent_bytes, c.after.sent_bytes - c.before.sent_bytes);
    outcome.most.rounds = std::max(outcome.most.rounds, c.after.rounds - c.before.rounds);
  }
  return outcome;
}

// What the ranks hold at once, in bytes: roughly, and rather too much.
double memory(ExchangeKind kind, int ranks, std::size_t n, std::size_t k) {
  const double p = ranks, entries = static_cast<double>(k);
  switch (kind) {
    case ExchangeKind::dense:
      return p * static_cast<double>(n) * sizeof(float) * (1.0 + 4.0 / p);
    case ExchangeKind::allgather:
    case ExchangeKind::global_topk:
    case ExchangeKind::sparcml:
      return p * p * entries * 60.0;
    default:
      return p * entries * 200.0;
  }
}

int run(const SimulateOptions& o) {
  if (!(o.density > 0.0 && o.density <= 1.0)) {
    throw InvalidArgument(
        fmt::format("--density: expected a number in (0, 1], got {:g}", o.density));
  }
  const Link link{.alpha_s = parse_seconds("--latency", o.latency),
                  .beta_s_per_byte = parse_link("--link", o.link)};
  const std::size_t k = bench::kept(o.density, o.params);
  const auto names = exchange_kind_names();
  std::vector<ExchangeKind> kinds;
  for (const std::string& name : o.exchanges.empty() ? exchanges() : o.exchanges) {
    kinds.push_back(static_cast<ExchangeKind>(std::ranges::find(names, name) - names.begin()));
  }
  const double room =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  for (const int ranks : o.ranks) {
    for (const ExchangeKind kind : kinds) {
      if (const double needed = memory(kind, ranks, o.params, k); needed > 0.8 * room) {
        throw InvalidArgument(fmt::format(
            "{} on {} ranks needs about {:.0f} GB, and this machine has {:.0f}: take fewer ranks, "
            "--params or --density",
            names[static_cast<std::size_t>(kind)], ranks, 1e-9 * needed, 1e-9 * room));
      }
    }
  }
  JsonFile json(o.json);
  std::FILE* const people = o.json == "-" ? stderr : stdout;
  fmt::print(people, "{:>6} {:<14} {:>12} {:>8} {:>12} {:>12} {:>12}\n", "ranks", "exchange",
             "bytes", "rounds", "exchange ms", "select ms", "both ms");
  nlohmann::json rows = nlohmann::json::array();
  for (const int ranks : o.ranks) {
    const Selections selections = select(o, ranks, k);
    for (const ExchangeKind kind : kinds) {
      const Outcome got = simulate(o, kind, selections, k, link);
      const double select_s = kind == ExchangeKind::dense || o.link_only ? 0.0 : selections.seconds;
      const std::string_view name = names[static_cast<std::size_t>(kind)];
      fmt::print(people, "{:>6} {:<14} {:>12} {:>8} {:>12.4g} {:>12.4g} {:>12.4g}\n", ranks, name,
                 got.most.sent_bytes, got.most.rounds, 1e3 * got.exchange_s, 1e3 * select_s,
                 1e3 * (got.exchange_s + select_s));
      std::fflush(people);
      rows.push_back({{"ranks", ranks},
                      {"exchange", name},
                      {"params", o.params},
                      {"k", k},
                      {"density", o.density},
                      {"exchange_s", got.exchange_s},
                      {"select_s", select_s},
                      {"bytes", got.most.sent_bytes},
                      {"rounds", got.most.rounds}});
    }
  }
  json.write(rows);
  return 0;
}

void declare(CLI::App& app, SimulateOptions& o) {
  CommandLine line(app);
  line.group("What is exchanged");
  line.option("--params", o.params, "N", "entries of a gradient")
      ->check(CLI::Range(std::size_t{1}, std::size_t{1} << 31));
  line.option("--ranks", o.ranks, "P,P,...", "ranks, each a thread")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096));
  line.plain("--exchange", o.exchanges, "NAME,...",
             "of: " + fmt::format("{} [all]", fmt::join(exchanges(), ", ")))
      ->delimiter(',')
      ->check(CLI::IsMember(exchanges()));
  line.option("--density", o.density, "D", "k/n");
  line.option("--common", o.common, "X", "part of the gradients' energy that all ranks share")
      ->check(CLI::Range(0.0, 1.0));
  line.option("--steps", o.steps, "N", "that are timed, after two that are not")->check(positive());

  line.group("The link of a rank, full duplex");
  line.plain("--link", o.link, "RATE", "of payload, as 100mbit or 1gbit")->required();
  line.option("--latency", o.latency, "TIME", "of a message, as 50us or 0.4ms");
  line.flag("--link-only", o.link_only,
            "work of processors takes no time: the same result every time");
  line.plain("--json", o.json, "FILE", "JSON array, one object a row; -: standard output");
}

}  // namespace

int simulate_command(int argc, char** argv) {
  SimulateOptions o;
  CLI::App app(
      "Runs the selection and the exchanges of many ranks in this process, on a virtual clock: the "
      "processor time of each rank plus what an alpha-beta link would take.",
      "skim simulate");
  declare(app, o);
  app.footer(
      "Nothing is trained: gradients are normal, and selections the same in every step.\n\n"
      "Example:\n"
      "  skim simulate --params 1000000 --ranks 16,128 --link 1gbit --latency 0.4ms");
  return parse_and_run(app, argc, argv, [&] { return run(o); });
}

}  // namespace skim::tool
