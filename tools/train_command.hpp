// The options of a command that trains.
#pragma once

#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tools/command_line.hpp"
#include "tools/report.hpp"
#include "train/options.hpp"
#include "train/trainer.hpp"

namespace skim::tool {

// What a training run is told: groups "What is trained", "Optimizer", "Exchange" and "Run".
void add_training_options(CommandLine& line, train::TrainOptions& options);

// What options cannot check one by one. Throws: InvalidArgument.
void check_training_options(const train::TrainOptions& options);

// --budget and --target-time against the densities of all runs. Throws: InvalidArgument.
void check_budget(const std::vector<Row>& rows);
// What there is to say before a run; empty: nothing.
std::string note_on_budget(const train::TrainOptions& options, int ranks);

// A command that is a training run and something more. Null functions: nothing more.
struct TrainingCommand {
  std::string name;
  std::string description;
  std::string example;  // the last lines of --help
  // Options of its own, in front of those of the run.
  std::function<void(CommandLine&)> declare = {};
  // After parsing, on every rank: throws InvalidArgument for what it cannot do; a value is the exit
  // status of a command that needs no training after all.
  std::function<std::optional<int>(const std::vector<Row>&)> before = {};
  // On rank 0, before and after a run. `people`: where lines for them go.
  std::function<void(const Row&, int ranks, train::Observer&)> attach = {};
  std::function<void(std::FILE* people)> after = {};
};
int run_training_command(const TrainingCommand& command, int argc, char** argv);

}  // namespace skim::tool
