// Starts a command's own MPI ranks, passes on what they print, and says in one line why they
// failed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "skim/communicator.hpp"

namespace skim::tool {

// True if this process was started as one rank of several (mpirun, srun). Throws: InvalidArgument
// if srun started several processes that MPI does not know of.
bool is_launched();

// Runs `arguments` (argv[1..] of this program) as `ranks` ranks of this program on this machine,
// also as root and with more ranks than cores. SIGINT and SIGTERM ask the ranks to end after their
// step; a second one, or 20 seconds, ends them at once. Returns the exit status: 0 if all ranks
// ended well; what the ranks returned; 128 + the signal that stopped them. SKIM_MPIRUN in the
// environment names another mpirun than the one that the build found.
int launch(int ranks, const std::vector<std::string>& arguments);

// On the ranks' side, for the launcher's one line. No-ops for a process that it did not start.
class RankStatus {
 public:
  explicit RankStatus(int rank);
  // Orderly, with this exit status. Where it is 0, the rank has left MPI.
  void finished(int code);
  // cause: this rank's own failure; otherwise it only saw that of another. True if the launcher
  // will print it. code: the exit status that the run should have.
  bool failed(const std::string& message, bool cause, int code);

 private:
  std::string path_;
};

// Joins the MPI ranks that this process was started with and runs `body`. Returns 0, or ends the
// process, and with it all ranks, after one line about what was thrown that begins with the
// command's name: status 2 for InvalidArgument, 1 for the rest.
int run_as_rank(const std::string& command, const std::function<void(Communicator&)>& body);

// Columns of the terminal that people look at; 0: none. The launcher's terminal on a rank.
int terminal_columns(bool to_stderr);

}  // namespace skim::tool
