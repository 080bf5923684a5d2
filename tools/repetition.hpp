// --config FILE, where FILE is the summary of runs that shall be repeated.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace skim::tool {

// The runs of --config FILE if FILE is a summary, and the arguments without this option.
struct Repetition {
  std::string file;
  std::vector<nlohmann::json> runs;  // empty if FILE is no summary; CLI11 then reads it as TOML
  std::vector<char*> arguments;

  std::string who() const { return "--config " + file; }
};

// Throws: InvalidArgument, if FILE is JSON but no summary.
Repetition repetition_of(int argc, char** argv);

// The help of --config for a command that repeats runs.
void describe_config(CLI::App& app, const std::string& what_it_repeats);

}  // namespace skim::tool
