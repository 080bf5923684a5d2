// The output of a run: the progress line, the table, JSON lines, the summary.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/event_files.hpp"
#include "tools/report_page.hpp"
#include "train/trainer.hpp"

namespace skim::tool {

// 1234567 -> "1.23 MB" (MB = 10^6 bytes).
std::string human_bytes(double bytes);
std::string human_seconds(double seconds);

// A run, and its outcome when it has finished.
struct Row {
  std::string name;
  train::TrainOptions options;
  train::Summary summary;
};

// Writes JSON lines to a file, or to standard output for "-". An empty path writes nothing. Every
// line is flushed at once, so metrics survive however the run ends. The page of --report shows
// the same lines, and the event files of --tensorboard have their numbers.
class MetricsFile {
 public:
  // keep_existing: append to the file (resume). stop: asks the run to end; set to true if a line
  // cannot be written, so that a full disk does not cost the state of the run. Throws: Error.
  MetricsFile(const std::filesystem::path& path, bool keep_existing, std::atomic<bool>& stop,
              const std::filesystem::path& report = {},
              const std::filesystem::path& tensorboard = {});
  // Writes nothing after a failure. Throws: InvalidArgument: --tensorboard cannot be opened.
  void write(const nlohmann::json& line);
  // Why a line could not be written, with the system's reason; empty: all were.
  const std::string& failure() const { return failure_; }
  // Removes what `run` recorded after this checkpoint: later lines of the process that saved it, and
  // all lines of processes that came after that one. If this fails, or the process dies meanwhile,
  // the file still has all its lines. A pipe or a device keeps what it got. Throws: Error.
  void forget_after(const std::string& run, const train::Resumed& from);
  void end();  // writes the last page of the report; throws: Error

 private:
  void write_all(const nlohmann::json& line);
  void rewrite_until(const std::string& run, const train::Resumed& from);

  std::filesystem::path path_;
  std::atomic<bool>& stop_;
  std::string failure_;
  std::FILE* file_ = nullptr;
  struct Closer {
    void operator()(std::FILE* f) const { std::fclose(f); }
  };
  std::unique_ptr<std::FILE, Closer> owned_;
  LiveReport report_;
  EventFiles events_;
};

nlohmann::json to_json(const std::string& run, const train::StepRecord& r);
nlohmann::json to_json(const std::string& run, const train::Evaluation& e, bool text);
// A process begins a run, or goes on with it, after `step`.
nlohmann::json beginning_json(const Row& row, std::int64_t step, int ranks,
                              const std::string& command);
// As Observer::on_comparison.
nlohmann::json comparison_json(const std::string& run, std::int64_t step,
                               std::span<const double> waited_s, double seconds);

// Prints a live line on a terminal, never wider than the terminal is at the time. Elsewhere it prints
// a plain line now and then.
class Progress {
 public:
  // out: stdout or stderr.
  Progress(std::FILE* out, std::string run, bool text);
  ~Progress() { end(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void step(const train::StepRecord& r);
  void evaluated(const train::Evaluation& e);
  void say(const std::string& what);   // prints a line of its own
  void warn(const std::string& what);  // the same, on standard error
  void end();                          // removes the live line

 private:
  std::string line(const train::StepRecord& r) const;
  int columns() const;  // of the terminal, now
  std::FILE* out_;
  bool on_terminal_;
  bool is_drawn_ = false;  // the live line stands
  std::string run_;
  bool text_;
  std::string quality_;  // at the last evaluation
  std::int64_t first_step_ = -1;
  std::uint64_t saved_bytes_ = 0;
  std::chrono::steady_clock::time_point started_, shown_;
};

// Reports the choices of auto to both arguments, which must outlive the returned function.
train::OnDecision decisions_to(MetricsFile& metrics, Progress& progress, const std::string& run);

// Why a run that came to its end is no success: its test loss is not finite. Empty: it is one, or
// the options let such a run go on.
std::string divergence_of(const Row& row);

nlohmann::json to_json(const Row& row, int ranks);
// The lines above the numbers of a run: its model, data, ranks and length.
void print_heading(std::FILE* out, const train::TrainOptions& options,
                   const train::Summary& summary, int ranks);
void print_table(std::FILE* out, const std::vector<Row>& rows, int ranks, bool text);

}  // namespace skim::tool
