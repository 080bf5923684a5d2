// skim bench: calls the benchmark that the command line names.
#include <cstdio>
#include <string>
#include <string_view>

#include "tools/commands.hpp"
#include "tools/failure.hpp"

namespace skim::tool {
namespace {

constexpr const char* kHelp =
    R"(skim bench - measurements on your own machine

usage: skim bench BENCHMARK [OPTIONS]

benchmarks:
  select      how long selection takes, compared with the bare pass r += g
  wire        bytes and times of the codes of indices and values
  network     latency and bandwidth between the ranks, and the speeds of local work
  scaling     step times of the exchanges for a growing number of ranks

skim bench BENCHMARK --help describes a benchmark and all its options.
)";

}  // namespace

int bench_command(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (what == "select") return bench_select_command(argc - 1, argv + 1);
  if (what == "wire") return bench_wire_command(argc - 1, argv + 1);
  if (what == "network") return bench_network_command(argc - 1, argv + 1);
  if (what == "scaling") return bench_scaling_command(argc - 1, argv + 1);
  if (what == "--help" || what == "-h") {
    std::fputs(kHelp, stdout);
    return 0;
  }
  std::fprintf(stderr,
               "skim bench: expected select, wire, network or scaling%s%s (skim bench --help)\n",
               what.empty() ? "" : ", got ", std::string(what).c_str());
  return kUsageError;
}

}  // namespace skim::tool
