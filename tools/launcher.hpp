// Starts a command's own MPI ranks, passes on their output, and says in one line why they failed.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "skim/communicator.hpp"

namespace skim::tool {

// True if this process was started as one rank of several (mpirun, srun). Throws: InvalidArgument
// if srun started several processes that MPI does not know of.
bool is_launched();

// Runs `arguments` (argv[1..] of this program) as `ranks` ranks of this program on this machine.
// This also works as root and with more ranks than cores. If not all ranks have started after
// start_limit, the run ends, and the message says so. SIGINT and SIGTERM ask the ranks to end
// after their step. A second signal, or 20 seconds, ends them at once. The exit status is 0 if all
// ranks ended well, otherwise the ranks' own status, or 128 + the signal that stopped them. The
// environment variable SKIM_MPIRUN overrides the mpirun that the build found.
int launch(int ranks, const std::vector<std::string>& arguments,
           std::chrono::milliseconds start_limit);

// The rank's side: reports its status for the launcher's one line. Does nothing in a process that
// the launcher did not start.
class RankStatus {
 public:
  explicit RankStatus(int rank);
  // The rank ended in order with this exit status. If the status is 0, the rank has left MPI.
  void finished(int code);
  // The rank failed. cause: the failure is this rank's own; otherwise it saw that of another rank.
  // code: the exit status that the run should have. Returns true if the launcher will print the
  // message.
  bool failed(const std::string& message, bool cause, int code);

 private:
  std::string path_;
};

// Joins the MPI ranks that this process was started with and runs `body`. Returns 0. If `body`
// throws, this prints one line about the error that begins with the command's name. Then it ends
// the process, and with it all ranks, with status 2 for InvalidArgument and 1 for other errors.
int run_as_rank(const std::string& command, const std::function<void(Communicator&)>& body);

// Columns of the terminal that people look at; 0: no terminal. On a rank, this is the launcher's
// terminal.
int terminal_columns(bool to_stderr);

}  // namespace skim::tool
