// The page of skim report and of --report: one HTML file that needs nothing else.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace skim::tool {

// What one run recorded. Memory is bounded: a long run is kept as means over blocks of steps.
class RecordedRun {
 public:
  static constexpr std::size_t kMostPoints = 2000;
  static constexpr std::size_t kMostDecisions = 200;  // the latest

  // Takes an object of --metrics. Throws: nlohmann::json::exception: a key is missing or has
  // another type.
  void add(const nlohmann::json& record);
  // Removes steps, evaluations and decisions after `step`. A block of steps goes as a whole.
  void forget_after(std::int64_t step);
  bool has_steps() const noexcept { return !points_.empty(); }
  nlohmann::json to_json() const;

 private:
  // The keys of a step that are drawn.
  static constexpr std::array kKeys{"loss",       "density",   "capture",     "residual_norm",
                                    "step_ms",    "compute_ms", "exposed_ms", "optimizer_ms",
                                    "select_ms",  "exchange_ms", "apply_ms"};
  // Consecutive steps. Totals count from the beginning of the run to the last of them.
  struct Point {
    std::int64_t step = 0;  // the last one
    double seconds = 0.0, sent_bytes = 0.0, dense_bytes = 0.0;  // totals
    std::int64_t steps = 0, skipped = 0;
    std::array<double, kKeys.size()> sums{};
    std::array<std::int64_t, kKeys.size()> counts{};  // of finite values
    void merge(const Point& next);
  };
  struct Evaluation {
    std::int64_t step = 0;
    double seconds = 0.0, sent_bytes = 0.0;  // totals of the run
    nlohmann::json record;
  };
  Point total() const;
  void add_step(const nlohmann::json& record);
  void add_comparison(const nlohmann::json& record);

  std::vector<Point> points_;
  std::int64_t steps_per_point_ = 1;
  std::vector<Evaluation> evaluations_;
  std::vector<nlohmann::json> decisions_;
  std::size_t left_out_decisions_ = 0;
  nlohmann::json beginnings_ = nlohmann::json::array();  // of the processes that did the run
  std::vector<double> waited_ms_;                        // by rank
  double compared_ms_ = 0.0;
};

// Runs side by side.
class ReportPage {
 public:
  // Takes an object of --metrics. `file`: where it comes from; may be empty.
  // Throws: InvalidArgument: it is none.
  void add(const nlohmann::json& record, const std::string& file = {});
  // Takes all objects of a file. Ignores an incomplete last line, which is still being written.
  // Returns whether the file has steps. Throws: InvalidArgument that names the file and the line.
  bool add_file(const std::filesystem::path& path);
  void forget_after(const std::string& run, std::int64_t step);
  // is_live: the run goes on, so the page loads itself again.
  std::string html(bool is_live) const;

 private:
  struct Named {
    std::string file, run;
    RecordedRun recorded;
  };
  std::vector<Named> runs_;
};

// The file of --report, which is replaced while the run goes on.
class LiveReport {
 public:
  // An empty path writes nothing. metrics: the file of --metrics; empty: none. goes_on: the records
  // that it has already stand on the page, too. Throws: Error, InvalidArgument.
  LiveReport(std::filesystem::path path, std::filesystem::path metrics, bool goes_on);
  // A run that failed gets its last page, too.
  ~LiveReport();
  LiveReport(const LiveReport&) = delete;
  LiveReport& operator=(const LiveReport&) = delete;
  void add(const nlohmann::json& record);  // throws: Error
  // Reads the file of --metrics anew, whose lines after `step` are gone.
  void forget_after(const std::string& run, std::int64_t step);
  void end();  // the last page. Throws: Error

 private:
  std::filesystem::path path_, metrics_;
  ReportPage page_;
  std::chrono::steady_clock::time_point written_;
  bool has_ended_ = false;
};

}  // namespace skim::tool
