// The tool's main(): skim COMMAND ...
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "skim/version.hpp"
#include "tools/commands.hpp"
#include "tools/one_line.hpp"
#include "tools/standard_output.hpp"

namespace {

constexpr const char* kHelp =
    R"(skim - data-parallel training over slow links by top-k sparsified gradients

usage: skim COMMAND [OPTIONS]

commands:
  train       train a model on several ranks and report accuracy, bytes and times
  inspect     measure what selection sees and loses, while training or on saved gradients
  bench       measure how fast selection is on this machine, and the network between the ranks
  plan        predict from a link and a model whether compression pays, and which exchange
  simulate    run the exchanges of many ranks in one process, on a link that is not there
  report      draw recorded runs as one HTML page
  checkpoint  verify the checkpoints of a run
  version     print the version

skim COMMAND --help describes a command and all its options.

exit status: 0 success; 1 the run failed; 2 wrong usage or input; 128+N stopped by signal N
)";

int run(int argc, char** argv) {
  const std::string_view command = argc > 1 ? argv[1] : "--help";
  if (command == "help" && argc > 2) {
    std::string help = "--help";
    std::vector<char*> words{argv[0]};
    words.insert(words.end(), argv + 2, argv + argc);
    words.push_back(help.data());
    return run(static_cast<int>(words.size()), words.data());
  }
  if (command == "train") return skim::tool::train_command(argc - 1, argv + 1);
  if (command == "inspect") return skim::tool::inspect_command(argc - 1, argv + 1);
  if (command == "bench") return skim::tool::bench_command(argc - 1, argv + 1);
  if (command == "plan") return skim::tool::plan_command(argc - 1, argv + 1);
  if (command == "simulate") return skim::tool::simulate_command(argc - 1, argv + 1);
  if (command == "report") return skim::tool::report_command(argc - 1, argv + 1);
  if (command == "checkpoint") return skim::tool::checkpoint_command(argc - 1, argv + 1);
  if (command == "version" || command == "--version") {
    const std::string_view word = argc > 2 ? argv[2] : "--help";
    if (word != "--help" && word != "-h") {
      std::fprintf(stderr, "skim: %s takes no words behind it, got '%s'\n", argv[1],
                   skim::tool::one_line(argv[2]).c_str());
      return 2;
    }
    std::puts("skim " SKIM_VERSION);
    return 0;
  }
  if (command == "--help" || command == "-h" || command == "help") {
    std::fputs(kHelp, stdout);
    return argc > 1 ? 0 : 2;
  }
  std::fprintf(stderr,
               "skim: unknown command '%s', expected one of train, inspect, bench, plan, simulate, "
               "report, checkpoint, version\n",
               skim::tool::one_line(argv[1]).c_str());
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  skim::tool::hold_standard_descriptors();
  return skim::tool::end_standard_output(run(argc, argv));
}
