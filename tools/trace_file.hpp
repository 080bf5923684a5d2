// The file of --trace: what all ranks did, in the trace event format of Chrome and Perfetto.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "train/trace.hpp"

namespace skim::tool {

// The spans of one run.
struct RunTrace {
  std::string run;
  std::vector<train::RankTrace> ranks;
};

// Writes the file. An old one is kept beside it. An empty path writes nothing. Every rank of every
// run is a process of the trace, with a track for training and one for communication.
// docs/report.md describes the file. Throws: Error, with the system's reason.
// Source: Trace Event Format, https://perfetto.dev/docs/getting-started/other-formats
void write_trace(const std::filesystem::path& path, const std::vector<RunTrace>& runs);

}  // namespace skim::tool
