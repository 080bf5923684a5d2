// skim bench network: measures the link between two ranks and the local speeds of a rank, for the
// cost model.
#include <fmt/format.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/network.hpp"
#include "skim/cost.hpp"
#include "skim/error.hpp"
#include "tools/command_line.hpp"
#include "tools/commands.hpp"
#include "tools/json_file.hpp"
#include "tools/launcher.hpp"
#include "train/gather.hpp"

namespace skim::tool {
namespace {

constexpr std::chrono::minutes kStartLimit{5};

struct NetworkOptions {
  int ranks = 2;
  std::size_t largest = std::size_t{1} << 24;
  std::size_t entries = std::size_t{1} << 24;
  std::string json;
};

// Whether the two ranks of the ping-pong are on one host, so that no network is measured.
// Collective.
bool on_one_host(Communicator& comm) {
  const std::vector<int> hosts = train::gather_values(comm.host(), comm);
  return hosts.front() == hosts.back();
}

void report(const NetworkOptions& o, int ranks, bool one_host,
            const std::vector<LinkSample>& samples, const LocalSpeeds& local, JsonFile& json) {
  const Link link = fit_link(samples);
  std::FILE* const out = o.json == "-" ? stderr : stdout;
  fmt::print(out, "{:>10} {:>14} {:>14} {:>10}\n", "bytes", "one way us", "fit us", "residual");
  nlohmann::json rows = nlohmann::json::array();
  for (const LinkSample& s : samples) {
    const double fit = link.alpha_s + s.bytes * link.beta_s_per_byte;
    fmt::print(out, "{:>10g} {:>14.2f} {:>14.2f} {:>9.1f}%\n", s.bytes, 1e6 * s.seconds, 1e6 * fit,
               100.0 * (s.seconds / fit - 1.0));
    rows.push_back({{"bytes", s.bytes}, {"seconds", s.seconds}, {"fit_s", fit}});
  }
  fmt::print(out, "alpha {:.2f} us, beta {:.4f} ns/byte ({:.1f} Mbit/s)\n", 1e6 * link.alpha_s,
             1e9 * link.beta_s_per_byte, 8e-6 / link.beta_s_per_byte);
  fmt::print(out, "selection {:.3f} ns an entry, merge {:.2f} ns, dense sum {:.3f} ns\n",
             1e9 * local.select_s, 1e9 * local.merge_s, 1e9 * local.add_s);
  if (one_host) fmt::print(out, "the two ranks share a host: no network was measured\n");
  json.write({{"alpha_s", link.alpha_s},
              {"beta_s_per_byte", link.beta_s_per_byte},
              {"select_s", local.select_s},
              {"merge_s", local.merge_s},
              {"add_s", local.add_s},
              {"ranks", ranks},
              {"one_host", one_host},
              {"samples", rows}});
}

void run_rank(const NetworkOptions& o, Communicator& comm) {
  if (comm.size() < 2) throw InvalidArgument("a ping-pong needs two ranks");
  const bool first = comm.rank() == 0;
  JsonFile json(first ? o.json : "");
  const bool one_host = on_one_host(comm);
  constexpr double kBudget = 1.0;  // seconds for each length
  const std::vector<LinkSample> samples = ping_pong(comm, o.largest, kBudget);
  comm.barrier();  // the other ranks now wait, so rank 0 has the machine to itself
  if (first) report(o, comm.size(), one_host, samples, bench::measure_local(o.entries), json);
  comm.barrier();
}

void declare(CLI::App& app, NetworkOptions& o) {
  CommandLine line(app);
  line.group("What is measured");
  line.option("--ranks", o.ranks, "P", "ranks to start on this machine; not used under mpirun")
      ->check(CLI::Range(2, 64));
  line.option("--largest", o.largest, "BYTES", "longest message")
      ->check(CLI::Range(std::size_t{1} << 10, std::size_t{1} << 30));
  line.option("--entries", o.entries, "N", "length of the gradient for measuring local speeds")
      ->check(CLI::Range(std::size_t{10'000}, std::size_t{1} << 28));
  line.plain("--json", o.json, "FILE",
             "the fit as a JSON object, for skim plan --fit; -: standard output");
}

}  // namespace

int bench_network_command(int argc, char** argv) {
  NetworkOptions o;
  CLI::App app(
      "Measures the link between rank 0 and the last rank by a ping-pong, and how fast a rank "
      "selects, merges and adds. Fits the cost model to the results.",
      "skim bench network");
  declare(app, o);
  app.footer(
      "alpha is the time of short messages. beta is the slope over messages of 256 KiB and "
      "more.\n\n"
      "Example:\n"
      "  mpirun -np 2 --host a,b skim bench network --json fit.json\n"
      "  skim plan --parameters 25.6e6 --ranks 32 --compute 0.2s --fit fit.json");
  return parse_and_run(app, argc, argv, [&] {
    if (is_launched()) {
      return run_as_rank("skim bench network", [&](Communicator& comm) { run_rank(o, comm); });
    }
    if (!is_available(Backend::mpi)) {
      throw InvalidArgument("this build has no MPI; build with SKIM_MPI=ON");
    }
    std::vector<std::string> arguments{"bench", "network"};
    arguments.insert(arguments.end(), argv + 1, argv + argc);
    return conclude(launch({.ranks = o.ranks,
                            .arguments = arguments,
                            .start_limit = kStartLimit,
                            .has_steps = false}));
  });
}

}  // namespace skim::tool
