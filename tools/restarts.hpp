// Runs that start again after a failure.
#pragma once

#include <filesystem>

#include "tools/launcher.hpp"

namespace skim::tool {

struct RestartOptions {
  int restarts = 0;     // the most; 0: none
  double within = 0.0;  // seconds in which so many may happen; 0: the whole run
  int min_ranks = 0;    // start again without lost ranks, on at least so many; 0: always on all
};

// Launches a run of skim train until it ends well, or a signal stops it, or it may not start again.
// It starts again from the newest checkpoint in the folder, or from the beginning if there is none.
// Each restart prints a line, and the end prints all of them. Usage errors are final, and so is a
// failure that comes again word for word with no checkpoint since. Returns the exit status.
int launch_with_restarts(LaunchOptions launch, const RestartOptions& options,
                         const std::filesystem::path& checkpoint);

}  // namespace skim::tool
