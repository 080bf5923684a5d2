#include "tools/trace_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "skim/error.hpp"
#include "tools/keep_beside.hpp"

namespace skim::tool {
namespace {

// The tracks of a process. Perfetto knows a track by its number alone, and takes one with the
// number 0, or with that of a process, for a main thread.
std::size_t training_track(std::size_t pid) { return 1000 + 2 * pid; }
std::size_t communication_track(std::size_t pid) { return training_track(pid) + 1; }

double in_us(std::int64_t ns) { return 1e-3 * static_cast<double>(ns); }

// Names a process or one of its tracks.
nlohmann::json name_event(const char* what, std::size_t pid, std::size_t tid,
                          const std::string& name) {
  return {{"ph", "M"}, {"name", what}, {"pid", pid}, {"tid", tid}, {"args", {{"name", name}}}};
}

// Times count from `zero_ns`. A length is written 1 ns too short: viewers cut both times to whole
// nanoseconds, and Perfetto drops a span that begins before the one before it has ended.
std::string event(const train::Span& s, std::size_t pid, std::int64_t zero_ns) {
  const bool communicates = train::is_communication(s.work);
  const std::string bucket = communicates ? fmt::format(R"(,"bucket":{})", s.bucket) : "";
  return fmt::format(R"({{"ph":"X","name":"{}","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f},)"
                     R"("args":{{"step":{}{}}}}})",
                     name_of(s.work), pid,
                     communicates ? communication_track(pid) : training_track(pid),
                     in_us(s.begin_ns - zero_ns), in_us(std::max<std::int64_t>(s.length_ns - 1, 0)),
                     s.step, bucket);
}

std::int64_t begin_of(const std::vector<RunTrace>& runs) {
  std::int64_t begin = std::numeric_limits<std::int64_t>::max();
  for (const RunTrace& run : runs) {
    for (const train::RankTrace& rank : run.ranks) {
      for (const train::Span& s : rank.spans) begin = std::min(begin, s.begin_ns);
    }
  }
  return begin;
}

nlohmann::json clocks_of(const RunTrace& run) {
  nlohmann::json clocks = nlohmann::json::array();
  for (std::size_t r = 0; r < run.ranks.size(); ++r) {
    const auto& [spans, first, last] = run.ranks[r];
    clocks.push_back({{"run", run.run},
                      {"rank", r},
                      {"offset_us", {in_us(first.offset_ns), in_us(last.offset_ns)}},
                      {"bound_us", {in_us(first.bound_ns), in_us(last.bound_ns)}}});
  }
  return clocks;
}

}  // namespace

void write_trace(const std::filesystem::path& path, const std::vector<RunTrace>& runs) {
  if (path.empty()) return;
  keep_beside("--trace", path);
  errno = 0;
  std::ofstream out(path);
  const std::int64_t zero_ns = begin_of(runs);
  nlohmann::json clocks = nlohmann::json::array();
  std::size_t pid = 0;
  out << "{\"traceEvents\":[";
  const char* separator = "\n";
  const auto write = [&](const std::string& text) {
    out << separator << text;
    separator = ",\n";
  };
  for (const RunTrace& run : runs) {
    for (std::size_t r = 0; r < run.ranks.size(); ++r, ++pid) {
      const std::string who = fmt::format("{}: rank {}", run.run, r);
      write(name_event("process_name", pid, training_track(pid), who).dump());
      write(name_event("thread_name", pid, training_track(pid), "training").dump());
      write(name_event("thread_name", pid, communication_track(pid), "communication").dump());
      for (const train::Span& s : run.ranks[r].spans) write(event(s, pid, zero_ns));
    }
    std::ranges::copy(clocks_of(run), std::back_inserter(clocks));
  }
  const nlohmann::json about{{"steps_kept", train::Trace::kSteps}, {"clocks", std::move(clocks)}};
  out << "\n],\n\"displayTimeUnit\":\"ms\",\n\"otherData\":" << about.dump() << "}\n";
  out.close();
  if (!out) {
    throw Error("--trace: cannot write '" + path.string() +
                "': " + std::strerror(errno != 0 ? errno : EIO));
  }
}

}  // namespace skim::tool
