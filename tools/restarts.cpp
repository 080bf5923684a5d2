#include "tools/restarts.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "tools/failure.hpp"
#include "tools/run_output.hpp"
#include "train/checkpoint.hpp"

namespace fs = std::filesystem;

namespace skim::tool {
namespace {

using Clock = std::chrono::steady_clock;

struct Restart {
  Clock::time_point at;
  std::string from;     // a checkpoint's name, or "the beginning"
  int ranks = 0;        // after it
  std::string failure;  // before it
};

std::string newest_name(const fs::path& checkpoint) {
  const std::vector<fs::path> all = train::checkpoints_of(checkpoint);
  return all.empty() ? std::string() : all.front().filename().string();
}

std::string seconds_between(Clock::time_point begin, Clock::time_point end) {
  return human_seconds(std::chrono::duration<double>(end - begin).count());
}

// Why the run may not start again; empty: it may. `log` has the restarts so far.
std::string objection(const Outcome& outcome, const std::string& from, int ranks,
                      const RestartOptions& options, const std::vector<Restart>& log) {
  const auto recent = std::ranges::count_if(log, [&](const Restart& r) {
    return options.within <= 0.0 ||
           std::chrono::duration<double>(Clock::now() - r.at).count() < options.within;
  });
  if (recent >= options.restarts) {
    return std::to_string(recent) + " restart" + (recent == 1 ? "" : "s") +
           (options.within > 0.0 ? " within " + human_seconds(options.within) : std::string()) +
           " did not help (--restarts)";
  }
  if (!log.empty() && log.back().failure == outcome.failure && log.back().from == from) {
    return "the failure came again from the same checkpoint, so a restart does not help";
  }
  if (ranks < options.min_ranks) {
    return "fewer ranks are left (" + std::to_string(ranks) + ") than --min-ranks " +
           std::to_string(options.min_ranks);
  }
  return {};
}

}  // namespace

int launch_with_restarts(LaunchOptions launch, const RestartOptions& options,
                         const fs::path& checkpoint) {
  constexpr const char* kBeginning = "the beginning";
  const Clock::time_point begin = Clock::now();
  const std::vector<std::string> arguments = launch.arguments;
  std::vector<Restart> log;
  for (;;) {
    const Outcome outcome = tool::launch(launch);
    const std::string newest = newest_name(checkpoint);
    const std::string from = newest.empty() ? kBeginning : newest;
    const int ranks = launch.ranks - (options.min_ranks > 0 ? outcome.lost_ranks : 0);
    const bool failed = !outcome.failure.empty() && !outcome.is_stopped;
    std::string why;
    if (failed && outcome.code != kUsageError) why = objection(outcome, from, ranks, options, log);
    if (!failed || outcome.code == kUsageError || !why.empty()) {
      if (!log.empty()) std::fprintf(stderr, "skim: restarts:\n");
      for (const Restart& r : log) {
        std::fprintf(stderr, "  after %s, from %s on %d ranks: %s\n",
                     seconds_between(begin, r.at).c_str(), r.from.c_str(), r.ranks,
                     r.failure.c_str());
      }
      if (!why.empty()) std::fprintf(stderr, "skim: not started again: %s\n", why.c_str());
      return conclude(outcome);
    }
    log.push_back({.at = Clock::now(), .from = from, .ranks = ranks, .failure = outcome.failure});
    std::fprintf(stderr, "skim: %s; restart %zu from %s on %d ranks\n", outcome.failure.c_str(),
                 log.size(), from.c_str(), ranks);
    launch.ranks = ranks;
    // The last one of an option counts.
    launch.arguments = arguments;
    launch.arguments.insert(launch.arguments.end(), {"--ranks", std::to_string(ranks)});
    if (!newest.empty()) launch.arguments.push_back("--resume");
  }
}

}  // namespace skim::tool
