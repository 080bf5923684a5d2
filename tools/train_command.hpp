// Runs a command that trains.
#pragma once

#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/command_line.hpp"
#include "tools/run_output.hpp"
#include "train/trainer.hpp"

namespace skim::tool {

// A command that trains and does something more. A null function does nothing.
struct TrainingCommand {
  std::string name;
  std::string description;
  std::string example;  // the last lines of --help
  std::vector<std::string_view> uses = {};  // options of a run that the command uses, too
  // Declares the command's own options, which precede those of the run.
  std::function<void(CommandLine&)> declare = {};
  // Called after parsing, on every rank. Throws InvalidArgument if the command cannot run. A value
  // is the exit status of a command that needs no training after all.
  std::function<std::optional<int>(const std::vector<Row>&)> before = {};
  // Called on rank 0, before and after a run. `people`: the stream for lines that people read.
  std::function<void(const Row&, int ranks, train::Observer&)> attach = {};
  std::function<void(std::FILE* people)> after = {};
};
int run_training_command(const TrainingCommand& command, int argc, char** argv);

}  // namespace skim::tool
