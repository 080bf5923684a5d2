// Where the time of each step went, on every rank: the spans of --trace.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "skim/communicator.hpp"
#include "skim/names.hpp"
#include "skim/report.hpp"
#include "train/trainer.hpp"

namespace skim::train {

// The parts of a step, as docs/metrics.md names their times. The first four follow one another on
// the training thread. The others are on the communication thread.
enum class Work : std::uint8_t { batch, compute, exposed, optimizer, select, exchange, apply };
constexpr bool is_communication(Work work) { return work >= Work::select; }

struct Span {
  std::int64_t step = 0;
  std::int64_t begin_ns = 0, length_ns = 0;
  Slot bucket = 0;  // 0 on the training thread
  Work work = Work::batch;
};

// A rank's clock, compared with rank 0's at one time.
struct ClockOffset {
  std::int64_t at_ns = 0;      // by the rank's clock
  std::int64_t offset_ns = 0;  // the rank's clock minus rank 0's
  std::int64_t bound_ns = 0;   // the offset is wrong by at most this much
};

// Compares the clocks by pings of rank 0, as NTP does, and takes the ping with the shortest round
// trip: its offset is wrong by at most half of that, however unequal the two ways are. Returns on
// rank 0 one offset for each rank, elsewhere nothing. Collective.
// Source: Mills, Internet time synchronization: the Network Time Protocol, IEEE Transactions on
// Communications 39, 1991.
std::vector<ClockOffset> compare_clocks(Communicator& comm,
                                        const std::function<std::int64_t()>& now_ns);

// What one rank did. After Trace::gather, spans are by rank 0's clock.
struct RankTrace {
  std::vector<Span> spans;
  ClockOffset first, last;  // before the first step and after the last one
};

// By rank 0's clock, the time that a rank's clock shows as `ns`. The offset is taken on the line
// through both comparisons, because clocks drift.
std::int64_t on_clock_of_rank_0(std::int64_t ns, const ClockOffset& first, const ClockOffset& last);

// A step of this rank.
struct TracedStep {
  const StepRecord& record;
  std::chrono::steady_clock::time_point begin, compute_begin;
  std::span<const StepReport> reports;  // of its buckets
  bool optimizer_is_first = false;      // else it follows the exposed part
};

// The spans of this rank's latest steps.
class Trace {
 public:
  static constexpr std::size_t kSteps = 1000;  // earlier ones are forgotten

  // Compares the clocks. Collective. comm must outlive the trace.
  explicit Trace(Communicator& comm);
  // For ReducerOptions::on_phase. The reducer's communication thread calls it.
  void on_phase(const char* phase);
  // Call when the reducer has no open bucket.
  void add(const TracedStep& step);
  // Compares the clocks again. Returns on rank 0 what each rank did, elsewhere nothing. Collective.
  // Throws: CommError.
  std::vector<RankTrace> gather();

 private:
  std::vector<ClockOffset> compare_clocks();

  Communicator& comm_;
  std::vector<ClockOffset> first_;
  std::vector<std::int64_t> phases_;  // of the step: when each phase of each bucket began
  std::deque<std::vector<Span>> steps_;
};

}  // namespace skim::train

namespace skim {
template <>
std::span<const std::string_view> names_of<train::Work>() noexcept;
}  // namespace skim
