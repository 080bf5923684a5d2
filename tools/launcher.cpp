// Runs mpirun as a child process. The child has its own process group, so that Ctrl-C reaches only
// the launcher.
//
// Launcher and ranks communicate through files in a folder, whose name is in SKIM_RUN_DIR:
// - A rank writes `rank-R.pid` when it starts.
// - When its work has succeeded, it writes `rank-R.succeeded`, and then leaves MPI. If it failed, it
//   writes `rank-R.cause` or `rank-R.effect`, with one line: its exit status and the message. If a
//   signal stopped it, it writes `rank-R.stopped`, with the exit status.
// - At its end it removes `rank-R.pid`. If this file still exists after the run and the rank has not
//   succeeded, the rank died without a message.
#include "tools/launcher.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sysexits.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "skim/error.hpp"
#include "tools/run_dir.hpp"
#include "tools/standard_output.hpp"

namespace fs = std::filesystem;

namespace skim::tool {
namespace {

constexpr const char* kRunDir = "SKIM_RUN_DIR";
constexpr const char* kStopping = "stopping";  // a file in it: the ranks have been told to stop
// The terminals of the launcher's standard output and standard error: "COLUMNS FILE", with the
// columns at the start; 0: it is no terminal.
constexpr const char *kStdoutTerminal = "SKIM_STDOUT_TERMINAL",
                     *kStderrTerminal = "SKIM_STDERR_TERMINAL";
// How long mpirun may take to end after the last rank, or after SIGTERM.
constexpr std::chrono::seconds kToEnd{12};
// Open files that mpirun needs for itself and for each rank: twice what Open MPI 4.1 did with.
constexpr rlim_t kDescriptors = 64, kDescriptorsOfARank = 16;
// Address space that a rank needs beside what the launcher has: libtorch and a small model took 500
// to 640 MB.
constexpr rlim_t kMemoryOfARank = rlim_t{640} << 20;

// Whether SIGHUP was ignored when the process began. Looked up before the libraries begin: UCX,
// which Open MPI 5 brings, has a handler of its own for SIGHUP.
bool g_under_nohup = false;
void look_for_nohup() {
  struct sigaction at_start {};
  sigaction(SIGHUP, nullptr, &at_start);
  g_under_nohup = at_start.sa_handler == SIG_IGN;
}
[[gnu::section(".preinit_array"), gnu::used]] void (*const g_look_for_nohup)() = look_for_nohup;

std::atomic<int> g_signals{0}, g_last_signal{0};
void on_signal(int signal) {
  g_signals.fetch_add(1);
  g_last_signal.store(signal);
}
// The reader of the output is gone, which every write would say again.
std::atomic_flag g_is_output_closed;
void on_closed_output(int signal) {
  if (!g_is_output_closed.test_and_set()) on_signal(signal);
}

bool is_started_by_mpi() {
  return std::ranges::any_of(
      std::array{"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"},
      [](const char* name) { return std::getenv(name) != nullptr; });
}

int columns_of(int fd) {
  winsize size{};
  if (isatty(fd) == 0) return 0;
  return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// Sets the variables with which Open MPI 4 and 5 start ranks as root, start more ranks than cores,
// and keep all their files in folders of this run. MPICH does not need them.
void set_environment(const RunDir& dir) {
  const auto set = [](const char* name, const char* value) { setenv(name, value, 0); };
  for (const char* name : {"OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_tmpdir_base"}) {
    set(name, dir.path().c_str());
  }
  for (const char* name : {"OMPI_MCA_btl_vader_backing_directory",
                           "OMPI_MCA_btl_sm_backing_directory"}) {
    set(name, dir.shared_memory().c_str());
  }
  set("OMPI_ALLOW_RUN_AS_ROOT", "1");
  set("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
  set("OMPI_MCA_rmaps_base_oversubscribe", "1");
  set("OMPI_MCA_hwloc_base_binding_policy", "none");
  set("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe");
  // Containers often forbid the cross-memory attach that shared memory uses by default.
  set("OMPI_MCA_btl_vader_single_copy_mechanism", "none");
  // When one rank dies, the others get this time to report what they were doing. Open MPI 5 kills
  // them after half a second.
  set("OMPI_MCA_odls_base_sigkill_timeout", "3");
  // All ranks are on this machine. So they need no TCP, and no port that strangers can reach.
  set("OMPI_MCA_btl", "self,vader");
  set("PMIX_MCA_ptl_base_if_include", "lo");
  // Nor a remote shell. Open MPI 4 does not start without one, so it gets a shell that exists.
  set("OMPI_MCA_plm_rsh_agent", "/bin/sh");
  setenv(kRunDir, dir.path().c_str(), 1);
  const auto tell = [](const char* name, int fd) {
    const std::string file = "/proc/" + std::to_string(getppid()) + "/fd/" + std::to_string(fd);
    setenv(name, (std::to_string(columns_of(fd)) + " " + file).c_str(), 1);
  };
  tell(kStdoutTerminal, STDOUT_FILENO);
  tell(kStderrTerminal, STDERR_FILENO);
}

// Erases the live line on a stream; -1: there is none.
void erase(int live) {
  if (live >= 0) (void)!::write(live, kEraseLive.data(), kEraseLive.size());
}

// Removes the newlines behind live lines from a stream.
class LiveLines {
 public:
  // In place. Returns how many letters are left.
  std::size_t strip(char* data, std::size_t size) {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < size; ++i) {
      if (matched_ == kEndOfLive.size()) {
        if (data[i] == '\r') continue;  // the rank's terminal writes one before a newline
        matched_ = 0;
        if (data[i] == '\n') continue;
      }
      matched_ = data[i] == kEndOfLive[matched_] ? matched_ + 1 : data[i] == kEndOfLive[0] ? 1 : 0;
      data[kept++] = data[i];
    }
    return kept;
  }

 private:
  std::size_t matched_ = 0;  // letters of kEndOfLive that the stream ended with
};

// Holds back mpirun's explanations of a failure, which are between lines of dashes, and the errors
// of PMIx, because the launcher prints a better one.
class StderrFilter {
 public:
  void pass(const char* data, std::size_t size) {
    if (!in_block_ && line_.empty() && std::memchr(data, '\n', size) == nullptr && size > 0 &&
        data[0] != '-') {
      (void)!::write(STDERR_FILENO, data, size);  // a progress line, still without a newline
      return;
    }
    for (std::size_t i = 0; i < size; ++i) {
      line_ += data[i];
      if (data[i] == '\n') end_line();
    }
  }
  void end() {
    if (!line_.empty()) end_line();
  }
  // The first line of mpirun's explanation, with what it announces; or else that of PMIx, which
  // Open MPI 5 starts ranks with.
  const std::string& explanation() const { return explanation_.empty() ? of_pmix_ : explanation_; }
  // The rank that died by a signal before mpirun ended the others; -1: unknown.
  int first_dead() const { return first_dead_; }

 private:
  void end_line() {
    const bool dashes = line_.size() > 20 && line_.find_first_not_of("-\n") == std::string::npos;
    if (dashes) {
      in_block_ = !in_block_;
    } else if (in_block_ || line_.starts_with("mpirun") || line_.starts_with("mpiexec")) {
      constexpr std::string_view kNoticed = "noticed that process rank ";
      const std::size_t at = line_.find(kNoticed);
      if (first_dead_ < 0 && at != std::string::npos) {
        first_dead_ = std::atoi(line_.c_str() + at + kNoticed.size());
      }
      const std::size_t first = line_.find_first_not_of(" \n");
      const bool goes_on = explanation_.ends_with(':');
      if (first != std::string::npos && (explanation_.empty() || goes_on)) {
        explanation_ += (goes_on ? " " : "") + line_.substr(first, line_.size() - 1 - first);
      }
    } else if (line_.starts_with('[') && line_.find("] PMIX ERROR: ") != std::string::npos) {
      if (of_pmix_.empty()) of_pmix_ = line_.substr(0, line_.size() - 1);
    } else {
      (void)!::write(STDERR_FILENO, line_.data(), line_.size());
    }
    line_.clear();
  }
  std::string line_, explanation_, of_pmix_;
  bool in_block_ = false;
  int first_dead_ = -1;
};

std::string mpirun() {
  if (const char* given = std::getenv("SKIM_MPIRUN"); given != nullptr && *given != '\0') {
    return given;
  }
  const std::string built_with = SKIM_MPIRUN;
  if (!built_with.empty() && access(built_with.c_str(), X_OK) == 0) return built_with;
  return "mpirun";
}

// Runs in the child. Never returns.
[[noreturn]] void exec_mpirun(const LaunchOptions& options, const RunDir& dir, int out, int err,
                              int report) {
  set_environment(dir);
  setpgid(0, 0);                     // so that Ctrl-C reaches only the launcher
  prctl(PR_SET_PDEATHSIG, SIGTERM);  // ends the run if the launcher dies
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  std::error_code ignored;
  std::string self = fs::read_symlink("/proc/self/exe", ignored).string();
  std::vector<std::string> words{mpirun(), "-n", std::to_string(options.ranks), self};
  words.insert(words.end(), options.arguments.begin(), options.arguments.end());
  std::vector<char*> argv;
  for (std::string& w : words) argv.push_back(w.data());
  argv.push_back(nullptr);
  execvp(argv[0], argv.data());
  const int code = errno;
  (void)!::write(report, &code, sizeof code);
  _exit(127);
}

// mpirun waits for ever if it cannot open a file. Throws: InvalidArgument: too few may be open.
void expect_descriptors(int ranks) {
  const rlim_t needed = kDescriptors + kDescriptorsOfARank * static_cast<rlim_t>(ranks);
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
  const rlim_t was = limit.rlim_cur;
  limit.rlim_cur = std::min(needed, limit.rlim_max);
  if (setrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur >= needed) return;
  throw InvalidArgument("--ranks " + std::to_string(ranks) + " needs " + std::to_string(needed) +
                        " open files, and this machine allows " + std::to_string(was) +
                        ": raise the limit with ulimit -n " + std::to_string(needed));
}

// MPI says little if it gets no memory. Throws: InvalidArgument: a process may have too little.
void expect_memory() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  std::ifstream sizes("/proc/self/statm");
  rlim_t pages = 0;
  sizes >> pages;
  const rlim_t needed = pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + kMemoryOfARank;
  if (limit.rlim_cur >= needed) return;
  const std::string kib = std::to_string(needed >> 10);
  throw InvalidArgument("a rank needs at least " + kib + " KiB of address space, and a process may " +
                        "have " + std::to_string(limit.rlim_cur >> 10) +
                        ": raise the limit with ulimit -v " + kib + " or more");
}

std::string seconds_text(std::chrono::milliseconds t) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", 1e-3 * static_cast<double>(t.count()));
  return text.data();
}

// Whether a rank has said how it ended.
bool has_ended(const RunDir& dir, int rank) {
  return std::ranges::any_of(std::array{"succeeded", "stopped", "cause", "effect"},
                             [&](const char* kind) { return dir.read(rank, kind).has_value(); });
}

// How many ranks have started.
int started(const RunDir& dir, int ranks) {
  int count = 0;
  for (int r = 0; r < ranks; ++r) {
    if (has_ended(dir, r) || dir.read(r, "pid")) ++count;
  }
  return count;
}

void signal_ranks(const RunDir& dir, int ranks, int signal) {
  for (int r = 0; r < ranks; ++r) {
    if (const auto pid = dir.read(r, "pid")) kill(std::atoi(pid->c_str()), signal);
  }
}

bool all_succeeded(const RunDir& dir, int ranks) {
  for (int r = 0; r < ranks; ++r) {
    if (!dir.read(r, "succeeded")) return false;
  }
  return true;
}

// "rank 0, rank 2": those that neither succeeded nor stopped in order.
std::string unfinished(const RunDir& dir, int ranks) {
  std::string names;
  for (int r = 0; r < ranks; ++r) {
    if (dir.read(r, "succeeded") || dir.read(r, "stopped")) continue;
    names += (names.empty() ? "rank " : ", rank ") + std::to_string(r);
  }
  return names;
}

bool is_running(const std::string& pid) {
  std::ifstream in("/proc/" + pid + "/stat");
  std::string stat;
  std::getline(in, stat);
  const std::size_t name_end = stat.rfind(')');
  return name_end != std::string::npos && stat.compare(name_end, 3, ") Z") != 0;
}

std::vector<std::string> pids_of(const RunDir& dir, int ranks) {
  std::vector<std::string> pids;
  for (int r = 0; r < ranks; ++r) {
    if (const auto pid = dir.read(r, "pid")) pids.push_back(*pid);
  }
  return pids;
}

// mpirun ends a little before the processes that it has killed. They are its children, so waitpid
// does not know them here.
void wait_for_end(const std::vector<std::string>& pids) {
  using std::chrono::milliseconds;
  const auto limit = std::chrono::steady_clock::now() + kToEnd;
  for (const std::string& pid : pids) {
    const auto fd = static_cast<int>(syscall(SYS_pidfd_open, std::atoi(pid.c_str()), 0));
    if (fd < 0) continue;  // it has ended
    pollfd ended{.fd = fd, .events = POLLIN, .revents = 0};
    for (;;) {
      const auto left =
          std::chrono::duration_cast<milliseconds>(limit - std::chrono::steady_clock::now());
      const int wait_ms = static_cast<int>(std::max(left, milliseconds{0}).count());
      if (poll(&ended, 1, wait_ms) >= 0 || errno != EINTR) break;
    }
    close(fd);
  }
}

// Whether no rank has anything left to do. mpirun then ends by itself, but a stranger who connects
// to its port can keep it from that.
bool is_over(const RunDir& dir, int ranks) {
  for (int r = 0; r < ranks; ++r) {
    if (has_ended(dir, r)) continue;
    const auto pid = dir.read(r, "pid");
    if (pid && is_running(*pid)) return false;
  }
  return true;
}

// The exit status of a run that a signal to one of the ranks stopped; 0: none did.
int status_of_stop(const RunDir& dir, int ranks) {
  for (int r = 0; r < ranks; ++r) {
    if (const auto code = dir.read(r, "stopped")) return std::atoi(code->c_str());
  }
  return 0;
}

// What a rank said about a failure: "cause", its own, or "effect", that of another rank.
std::optional<Outcome> failure_of(const RunDir& dir, int rank, const char* kind) {
  const auto line = dir.read(rank, kind);
  if (!line) return std::nullopt;
  return Outcome{std::atoi(line->c_str()), line->substr(line->find(' ') + 1)};
}

std::optional<Outcome> own_failure(const RunDir& dir, int ranks) {
  for (int r = 0; r < ranks; ++r) {
    if (auto cause = failure_of(dir, r, "cause")) return cause;
  }
  return std::nullopt;
}

// The outcome of a run that failed. A rank's own failure comes first, then ranks that died without
// a message, then failures that ranks saw of others, and last what ranks were told.
// (mpirun kills ranks that do not end in time. Those are not the failure.)
Outcome explain(const RunDir& dir, int ranks, int code, const StderrFilter& of_mpirun) {
  const bool one_is_known = dir.read(of_mpirun.first_dead(), "pid").has_value();
  std::string dead;
  int deaths = 0;
  std::optional<Outcome> effect, told;
  if (const auto cause = own_failure(dir, ranks)) return *cause;
  for (int r = 0; r < ranks; ++r) {
    const auto pid = dir.read(r, "pid");
    const bool died = pid && !dir.read(r, "succeeded");
    if (died && (!one_is_known || r == of_mpirun.first_dead())) {
      dead += (dead.empty() ? "rank " : ", rank ") + std::to_string(r) + " (pid " + *pid + ")";
      ++deaths;
    }
    std::optional<Outcome> seen = failure_of(dir, r, "effect");
    if (!seen) continue;
    seen->lost_ranks = 1;
    auto& into = seen->failure.find("was aborted because of") == std::string::npos ? effect : told;
    if (!into) into = seen;
  }
  if (!effect) effect = told;
  if (!dead.empty()) return {code, dead + " died" + (effect ? "; " + effect->failure : ""), deaths};
  if (effect) return *effect;
  if (!of_mpirun.explanation().empty()) return {code, of_mpirun.explanation(), 0};
  return {code, "'" + mpirun() + "' ended without an error message, but not all ranks have run", 0};
}

}  // namespace

bool is_launched() {
  if (is_started_by_mpi()) return true;
  // Only srun sets this variable. Without MPI, each of its tasks would train a model of its own.
  const char* tasks = std::getenv("SLURM_STEP_NUM_TASKS");
  if (tasks != nullptr && std::string_view(tasks) != "1") {
    throw InvalidArgument("srun started " + std::string(tasks) +
                          " tasks without MPI between them: use srun --mpi=pmix (srun --mpi=list "
                          "prints the choices)");
  }
  return false;
}

void handle_signals(std::initializer_list<int> signals, void (*handler)(int), int flags) {
  struct sigaction action {};
  for (const int signal : signals) {
    action.sa_handler = signal == SIGHUP && g_under_nohup ? SIG_IGN : handler;
    action.sa_flags = flags;
    sigaction(signal, &action, nullptr);
  }
}

bool is_launched_by_skim() { return std::getenv(kRunDir) != nullptr; }

int terminal_columns(bool to_stderr) {
  const char* const term = std::getenv("TERM");
  if (term != nullptr && std::string_view(term) == "dumb") return 0;
  const char* const launchers = std::getenv(to_stderr ? kStderrTerminal : kStdoutTerminal);
  if (launchers == nullptr) {
    // Open MPI gives a rank a terminal of its own, which says nothing about the output of mpirun.
    if (is_started_by_mpi()) return 0;
    return columns_of(to_stderr ? STDERR_FILENO : STDOUT_FILENO);
  }
  char* file = nullptr;
  const auto columns = static_cast<int>(std::strtol(launchers, &file, 10));
  if (columns == 0) return 0;
  const int terminal = open(file + 1, O_RDONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  if (terminal < 0) return columns;  // another user's, after su
  const int now = columns_of(terminal);
  close(terminal);
  return now;
}

Outcome launch(const LaunchOptions& options) {
  const int ranks = options.ranks;
  expect_descriptors(ranks);
  expect_memory();
  // No SA_RESTART, so that a signal ends poll(). Before the folder, which must not stay.
  handle_signals({SIGINT, SIGTERM, SIGHUP, SIGUSR1}, on_signal);
  handle_signals({SIGPIPE}, on_closed_output);
  const RunDir dir;
  std::array<int, 2> out{}, err{}, report{};
  if (pipe(out.data()) != 0 || pipe(err.data()) != 0 || pipe2(report.data(), O_CLOEXEC) != 0) {
    throw Error(std::string("cannot make a pipe: ") + std::strerror(errno));
  }
  const pid_t child = fork();
  if (child < 0) throw Error(std::string("cannot start a process: ") + std::strerror(errno));
  if (child == 0) {
    close(out[0]);
    close(err[0]);
    exec_mpirun(options, dir, out[1], err[1], report[1]);
  }
  close(out[1]);
  close(err[1]);
  close(report[1]);
  int exec_error = 0;
  ssize_t reported = 0;
  do {
    reported = read(report[0], &exec_error, sizeof exec_error);
  } while (reported < 0 && errno == EINTR);
  if (reported == sizeof exec_error) {
    waitpid(child, nullptr, 0);
    throw Error("cannot start " + std::to_string(ranks) + " ranks: '" + mpirun() +
                "': " + std::strerror(exec_error) + " (install openmpi-bin, or take --ranks 1)");
  }
  close(report[0]);

  std::array<LiveLines, 2> live_lines;
  StderrFilter filter;
  // The ranks' output, which waits until what came before is written.
  std::array<pollfd, 3> fds{{{out[0], POLLIN, 0}, {err[0], POLLIN, 0}, {-1, POLLOUT, 0}}};
  pollfd &from_out = fds[0], &to_out = fds[2];
  std::string unwritten;
  std::array<char, 1 << 16> chunk{};
  int open = 2, seen_signals = 0;
  int live = -1;  // the stream that ends with a live line
  bool is_out_open = true, ending = false, all_started = false, over = false;
  bool is_grace_over = false;  // ranks were ended because they did not stop in time
  using Clock = std::chrono::steady_clock;
  Clock::time_point deadline = Clock::time_point::max();
  const Clock::time_point must_have_started = Clock::now() + options.start_limit;
  std::string late;  // why the run was ended before it began
  std::vector<std::string> pids;
  while (open > 0 || !unwritten.empty()) {
    if (!all_started && started(dir, ranks) == ranks) {
      all_started = true;
      pids = pids_of(dir, ranks);
    }
    if (!all_started && late.empty() && Clock::now() >= must_have_started) {
      late = "only " + std::to_string(started(dir, ranks)) + " of " + std::to_string(ranks) +
             " ranks started within " + seconds_text(options.start_limit) + " s";
      deadline = Clock::now();
    }
    const int signals = g_signals.load();
    if (signals > seen_signals) {
      if (seen_signals == 0 && options.has_steps) {
        erase(live);
        std::fputs("\nskim: stopping after this step; once more to end at once\n", stderr);
        std::ofstream(dir.path() / kStopping) << '\n';
        signal_ranks(dir, ranks, SIGUSR1);
        deadline = Clock::now() + options.grace;
      }
      if (signals > 1 || !options.has_steps) deadline = Clock::now();
      seen_signals = options.has_steps ? signals : std::max(2, signals);
    }
    if (Clock::now() >= deadline) {
      is_grace_over = is_grace_over || (!ending && seen_signals == 1);
      kill(child, ending ? SIGKILL : SIGTERM);
      if (ending) signal_ranks(dir, ranks, SIGKILL);
      if (ending && seen_signals > 0) unwritten.clear();  // nobody reads it
      ending = true;
      deadline = Clock::now() + kToEnd;
    }
    from_out.fd = unwritten.empty() && is_out_open ? out[0] : -1;
    to_out.fd = unwritten.empty() ? -1 : STDOUT_FILENO;
    if (poll(fds.data(), fds.size(), 200) <= 0) {
      if (!over && unwritten.empty() && all_started && is_over(dir, ranks)) {
        over = ending = true;
        deadline = std::min(deadline, Clock::now() + kToEnd);
      }
      continue;
    }
    if (to_out.fd >= 0 && to_out.revents != 0) {
      unwritten.erase(0, write_to_standard_output(unwritten));
      if (!options.to_output.empty() && standard_output_error() != 0) on_closed_output(SIGPIPE);
    }
    for (pollfd& fd : std::span(fds).first(2)) {
      if (fd.fd < 0 || fd.revents == 0) continue;
      const ssize_t got = read(fd.fd, chunk.data(), chunk.size());
      if (got > 0) {
        LiveLines& lines = live_lines[&fd == &from_out ? 0 : 1];
        const std::size_t size = lines.strip(chunk.data(), static_cast<std::size_t>(got));
        if (size == 0) continue;
        live = chunk[size - 1] != '\r' ? -1 : &fd == &from_out ? STDOUT_FILENO : STDERR_FILENO;
        if (&fd == &from_out) {
          unwritten.assign(chunk.data(), size);
        } else {
          filter.pass(chunk.data(), size);
        }
      } else if (got == 0 || errno != EINTR) {
        close(fd.fd);
        if (&fd == &from_out) is_out_open = false;
        fd.fd = -1;
        --open;
      }
    }
  }
  filter.end();
  erase(live);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  wait_for_end(pids);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  // Open MPI 4 sometimes fails although all ranks have succeeded (open-mpi/ompi#7833). A signal may
  // have come too late to stop anything.
  if (all_succeeded(dir, ranks)) return {};
  const int stopped = seen_signals > 0 ? status_of_signal(g_last_signal.load())
                                       : status_of_stop(dir, ranks);
  // mpirun has statuses of its own. Ours would mean something else.
  const bool by_signal = code > 128 && code <= 128 + SIGRTMAX;
  const auto explained = [&] {
    return explain(dir, ranks, by_signal ? code : kRunError, filter);
  };
  if (!late.empty() && seen_signals == 0) return {1, late, 0};  // that signal was the launcher's
  if (stopped == 0) return explained();
  Outcome outcome{stopped, {}};
  const std::string missing = unfinished(dir, ranks);
  if (is_grace_over && !missing.empty()) {
    outcome.failure = missing + " did not stop within " + seconds_text(options.grace) +
                      " s of the signal (--grace): the newest checkpoint is one from before it";
  } else if (seen_signals < 2 && !missing.empty()) {
    outcome = explained();
  }
  const int lost = options.to_output.empty() ? 0 : standard_output_error();
  if (lost != 0 && lost != EPIPE) {
    outcome = {kRunError, options.to_output + ": cannot write '-': " + std::strerror(lost)};
  }
  if (const auto cause = own_failure(dir, ranks)) outcome = *cause;
  outcome.is_stopped = true;
  return outcome;
}

int status_of_signal(int signal) { return signal == SIGUSR1 ? EX_TEMPFAIL : 128 + signal; }

int conclude(const Outcome& outcome) {
  if (!outcome.failure.empty()) std::fprintf(stderr, "skim: %s\n", outcome.failure.c_str());
  return outcome.code;
}

RankStatus::RankStatus(int rank) {
  const char* dir = std::getenv(kRunDir);
  if (dir == nullptr) return;
  folder_ = dir;
  path_ = folder_ + "/rank-" + std::to_string(rank);
  std::ofstream(path_ + ".pid") << getpid() << '\n';
}

void RankStatus::succeeded() {
  if (!path_.empty()) std::ofstream(path_ + ".succeeded") << '\n';
}

bool RankStatus::stopped(int code) {
  if (path_.empty()) return false;
  std::ofstream(path_ + ".stopped") << code << '\n';
  ended();
  return true;
}

bool RankStatus::is_told_to_stop() const {
  return !folder_.empty() && std::filesystem::exists(std::filesystem::path(folder_) / kStopping);
}

void RankStatus::ended() {
  if (!path_.empty()) std::remove((path_ + ".pid").c_str());
}

bool RankStatus::failed(const Failure& failure) {
  if (path_.empty()) return false;
  std::ofstream(path_ + (failure.is_cause ? ".cause" : ".effect"))
      << failure.code << ' ' << failure.message << '\n';
  ended();
  return true;
}

int run_as_rank(const std::string& command, const std::function<void(Communicator&)>& body) {
  std::unique_ptr<Communicator> comm;
  std::unique_ptr<RankStatus> status;
  Failure failure;
  try {
    if (!is_available(Backend::mpi)) throw InvalidArgument("this build has no MPI");
    comm = connect(Backend::mpi, {.timeout = std::chrono::minutes(5)});
    status = std::make_unique<RankStatus>(comm->rank());
    body(*comm);
    status->succeeded();
    comm.reset();
    status->ended();
    return 0;
  } catch (...) {
    failure = current_failure();
  }
  if (!status || !status->failed(failure)) {
    std::fprintf(stderr, "%s: %s\n", command.c_str(), failure.message.c_str());
  }
  std::fflush(nullptr);
  if (comm) comm->abort(failure.culprit >= 0 ? failure.culprit : comm->rank());
  comm.reset();
  _exit(failure.code);  // MPI_Finalize would wait for ranks that have ended
}

}  // namespace skim::tool
