// Starts a command's own MPI ranks, passes on their output, and says in one line why they failed.
#pragma once

#include <chrono>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "skim/communicator.hpp"
#include "tools/failure.hpp"

namespace skim::tool {

// True if this process was started as one rank of several (mpirun, srun). Throws: InvalidArgument
// if srun started several processes that MPI does not know of.
bool is_launched();

// True if such a process was started by launch().
bool is_launched_by_skim();

// Calls `handler` at each of these signals. SIGHUP stays ignored if it was, as under nohup. flags:
// those of sigaction.
void handle_signals(std::initializer_list<int> signals, void (*handler)(int), int flags = 0);

struct LaunchOptions {
  int ranks = 2;
  std::vector<std::string> arguments;     // argv[1..] of this program
  std::chrono::milliseconds start_limit;  // for all ranks to start
  // Between a signal and the end of the run.
  std::chrono::milliseconds grace{20'000};
  std::string to_output{};  // the option that writes to standard output; empty: none has to
  bool has_steps = true;    // false: there is no step to end, so the first signal ends the ranks
};

struct Outcome {
  int code = 0;         // the exit status for the command
  std::string failure;  // one line; empty: all ranks ended well, or a signal stopped them
  int lost_ranks = 0;   // how many ranks have died or hang; one that failed itself is not lost
  bool is_stopped = false;  // a signal asked the run to end, so it must not start again
};

// Runs `arguments` as `ranks` ranks of this program on this machine. This also works as root and
// with more ranks than cores. SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask the ranks to end after their
// step, and so does standard output that cannot be written, if `to_output` needs it. A second
// signal, or the end of `grace`, ends them at once. The code is 0 if all ranks ended well, otherwise
// the ranks' own status, or status_of_signal(). The environment variable SKIM_MPIRUN overrides the
// mpirun that the build found. Prints no failure.
// Throws: InvalidArgument: too few open files or too little memory is allowed; Error: there is no
// mpirun.
Outcome launch(const LaunchOptions& options);

// The exit status of a run that a signal stopped: for SIGUSR1 EX_TEMPFAIL of sysexits.h (75), which
// tells a batch system to start it again; 128 + the signal for others.
int status_of_signal(int signal);

// Prints the failure, if there is one, and returns the code.
int conclude(const Outcome& outcome);

// The rank's side: reports its status for the launcher's one line. Does nothing in a process that
// the launcher did not start.
class RankStatus {
 public:
  explicit RankStatus(int rank);
  // The rank's work has succeeded. It leaves MPI next.
  void succeeded();
  // The rank ends in order, whatever its exit status.
  void ended();
  // The rank failed, and the run should have the failure's code. Returns true if the launcher will
  // print the message.
  bool failed(const Failure& failure);
  // A signal stopped the run, which should have this exit status. Returns true if the launcher sees
  // to that. The rank then ends with 0: mpirun waits for seconds if one does not.
  bool stopped(int code);
  // Whether the launcher got a signal, maybe before it knew of this rank.
  bool is_told_to_stop() const;

 private:
  std::string folder_, path_;
};

// Joins the MPI ranks that this process was started with and runs `body`. Returns 0. If `body`
// throws, this prints one line about the error that begins with the command's name. Then it ends
// the process, and with it all ranks, with the code of current_failure().
int run_as_rank(const std::string& command, const std::function<void(Communicator&)>& body);

// The columns, now, of the terminal that people look at; 0: none, or one that only prints
// (TERM=dumb). On a rank, this is the launcher's terminal. A rank of the user's own mpirun has none.
int terminal_columns(bool to_stderr);

// Erases a live line, which left the cursor at its first letter (\r), in all rows that it takes.
inline constexpr std::string_view kEraseLive = "\r\x1b[J";
// How a live line ends. A rank that the launcher has started writes a newline behind it, because
// Open MPI 5 holds back what is no whole line. The launcher removes this newline.
inline constexpr std::string_view kEndOfLive = "\x1b[?7h\r";

}  // namespace skim::tool
