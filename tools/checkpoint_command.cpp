// skim checkpoint verify: compares checkpoints with their manifests.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "skim/error.hpp"
#include "tools/command_line.hpp"
#include "tools/commands.hpp"
#include "tools/failure.hpp"
#include "train/checkpoint.hpp"

namespace fs = std::filesystem;

namespace skim::tool {
namespace {

// The checkpoints in a folder, or the one that the folder is. Throws: InvalidArgument: none.
std::vector<fs::path> named_by(const fs::path& dir) {
  std::error_code ignored;
  if (!fs::is_directory(dir, ignored)) {
    throw InvalidArgument("DIR: no folder '" + dir.string() + "'; give the one of --checkpoint");
  }
  std::vector<fs::path> found = train::checkpoints_of(dir);
  if (found.empty() && train::is_checkpoint(dir)) found.push_back(dir);
  if (found.empty()) {
    throw InvalidArgument("DIR: no checkpoint in '" + dir.string() +
                          "'; give the folder of --checkpoint");
  }
  return found;
}

// Returns whether all checkpoints are good.
bool verify(const fs::path& dir) {
  bool all_good = true;
  for (const fs::path& checkpoint : named_by(dir)) {
    const std::string fault = train::fault_of(checkpoint);
    all_good = all_good && fault.empty();
    fmt::print("{}  {}\n", checkpoint.filename().string(), fault.empty() ? "good" : fault);
  }
  return all_good;
}

}  // namespace

int checkpoint_command(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (what != "verify" && !what.starts_with("-")) {
    fmt::print(stderr, "skim checkpoint: expected verify{}{} (skim checkpoint --help)\n",
               what.empty() ? "" : ", got ", what);
    return kUsageError;
  }
  CLI::App app("The checkpoints of skim train.", "skim checkpoint");
  const CommandLine line(app);
  app.require_subcommand(1);
  fs::path dir;
  CLI::App* const command = app.add_subcommand(
      "verify", "reads every file of all checkpoints and compares it with the manifest");
  command->fallthrough();  // the options of skim checkpoint may stand behind it
  command->add_option("DIR", dir, "the folder of --checkpoint, or one checkpoint in it")
      ->required();
  app.footer(
      "Exit status: 0 all are good; 1 one is damaged; 2 wrong usage, or there is none.");
  return parse_and_run(app, argc, argv, [&] { return verify(dir) ? 0 : 1; });
}

}  // namespace skim::tool
