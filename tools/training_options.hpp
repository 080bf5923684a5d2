// The options of a training run: how a command declares them, and checks that they fit together.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/command_line.hpp"
#include "tools/run_output.hpp"
#include "train/options.hpp"

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

}  // namespace skim::tool
