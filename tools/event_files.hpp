// The files of --tensorboard: the numbers of --metrics, as TensorBoard reads them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "train/trainer.hpp"

namespace skim::tool {

// Writes an event file into FOLDER/RUN for each run. Every record is flushed at once, so a running
// TensorBoard shows it, and a run that is killed loses none. docs/report.md lists the tags. Numbers
// that are not finite are left out.
// Source: the comments of record_writer.h, event.proto and summary.proto of TensorFlow.
class EventFiles {
 public:
  // An empty path writes nothing. goes_on: runs continue in their folders (resume). Otherwise a
  // run's folder that has event files is kept beside the new one.
  EventFiles(std::filesystem::path folder, bool goes_on);
  // Takes an object of --metrics. Throws: Error, with the system's reason.
  void add(const nlohmann::json& record);
  // Makes TensorBoard drop what the run recorded after this checkpoint. Totals count on from there.
  // Throws: Error.
  void forget_after(const std::string& run, const train::Resumed& from);

 private:
  // Over the steps of a run, on rank 0.
  struct Totals {
    double sent_bytes = 0.0, dense_bytes = 0.0, skipped = 0.0;
  };
  static Totals totals_until(const std::filesystem::path& folder, std::int64_t step);
  void open(const std::string& run);
  void write(const std::string& event);

  std::filesystem::path folder_;
  bool goes_on_;
  std::string run_;             // whose file is open; empty: none
  std::filesystem::path path_;  // of that file
  std::ofstream out_;
  Totals totals_;
};

}  // namespace skim::tool
