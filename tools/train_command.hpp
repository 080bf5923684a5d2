// The options of a command that trains.
#pragma once

#include <cstdio>
#include <functional>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/command_line.hpp"
#include "tools/report.hpp"
#include "train/options.hpp"
#include "train/trainer.hpp"

namespace skim::tool {

// Adds the options of a training run, in the groups "What is trained", "Optimizer", "Exchange" and
// "Run".
void add_training_options(CommandLine& line, train::TrainOptions& options);

// Adds the options of these names, as "index_code", with the library's names and help.
void add_codec_options(CommandLine& line, CodecOptions& codec,
                       std::initializer_list<std::string_view> names);

// Lets --epochs of the command line precede the steps of a run that --config names. Throws:
// InvalidArgument: both --epochs and --steps are given.
void choose_length(const CLI::App& app, train::TrainOptions& options);

// Checks that the options fit together. Throws: InvalidArgument.
void check_training_options(const train::TrainOptions& options);

// Throws: InvalidArgument: an option of a run that was given has an effect on none of the runs.
// of_command: options that the command itself uses.
void expect_effects(const CLI::App& app, const std::vector<Row>& rows,
                    std::span<const std::string_view> of_command = {});

// Checks --budget and --target-time against the densities of all runs. Throws: InvalidArgument.
void check_budget(const std::vector<Row>& rows);
// A note to print before a run; may be empty.
std::string note_on_budget(const train::TrainOptions& options, int ranks);
// A warning to print before a run; may be empty.
std::string warning_on_data(const train::DataInfo& data);

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
