// What a run prints and writes: the progress line, the table, JSON lines, the summary.
#pragma once

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "train/trainer.hpp"

namespace skim::tool {

// 1234567 -> "1.23 MB" (MB = 10^6 bytes).
std::string human_bytes(double bytes);
std::string human_seconds(double seconds);

// JSON lines to a file, or to standard output for "-"; nothing for an empty path. Every line is
// written through at once, so that metrics survive whatever ends the run.
class MetricsFile {
 public:
  // keep_existing: go on behind what is there (resume). Throws: Error.
  MetricsFile(const std::filesystem::path& path, bool keep_existing);
  void write(const nlohmann::json& line);  // throws: Error, with the system's reason
  // Removes the lines of `run` after `step`: what a stopped run recorded behind its checkpoint.
  void forget_after(const std::string& run, std::int64_t step);

 private:
  std::filesystem::path path_;
  std::FILE* file_ = nullptr;
  struct Closer {
    void operator()(std::FILE* f) const { std::fclose(f); }
  };
  std::unique_ptr<std::FILE, Closer> owned_;
};

nlohmann::json to_json(const std::string& run, const train::StepRecord& r);
nlohmann::json to_json(const std::string& run, const train::Evaluation& e, bool text);

// A live line on a terminal; elsewhere a plain line now and then.
class Progress {
 public:
  // columns: of the terminal; 0: none.
  Progress(std::FILE* out, int columns, std::string run, bool text);
  void step(const train::StepRecord& r);
  void evaluated(const train::Evaluation& e);
  void say(const std::string& what);  // a line of its own
  void end();                         // the live line is done with

 private:
  std::string line(const train::StepRecord& r) const;
  std::FILE* out_;
  int columns_;
  std::string run_;
  bool text_;
  std::string quality_;  // of the last evaluation
  std::int64_t first_step_ = -1;
  std::uint64_t saved_bytes_ = 0;
  std::chrono::steady_clock::time_point started_, shown_;
};

// Tells the choices of auto to both, which must outlive it.
train::OnDecision decisions_to(MetricsFile& metrics, Progress& progress, const std::string& run);

// One finished run.
struct Row {
  std::string name;
  train::TrainOptions options;
  train::Summary summary;
};
nlohmann::json to_json(const Row& row, int ranks);
void print_table(std::FILE* out, const std::vector<Row>& rows, int ranks, bool text);

}  // namespace skim::tool
