#include "train/trace.hpp"

#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

namespace skim {

template <>
std::span<const std::string_view> names_of<train::Work>() noexcept {
  static constexpr std::array<std::string_view, 7> kNames{
      "batch", "compute", "exposed", "optimizer", "select", "exchange", "apply"};
  return kNames;
}

namespace train {
namespace {

// Pings of one rank: at least so many, and for so long, because a ping is slow where the processor
// does something else.
constexpr int kLeastPings = 30;
constexpr std::int64_t kPingsNs = 20'000'000;

template <class T>
void send(std::span<const T> values, int to, Communicator& comm) {
  comm.wait(comm.isend(std::as_bytes(values), to));
}

template <class T>
std::vector<T> receive(int from, Communicator& comm) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<std::byte> message;
  comm.wait(comm.ireceive(message, from));
  if (message.size() % sizeof(T) != 0) {
    refuse_message(comm, from, "trace", "it has " + std::to_string(message.size()) + " bytes");
  }
  std::vector<T> values(message.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), message.data(), message.size());
  return values;
}

struct Ping {
  bool is_last = false;
};
// The rank's answer: when the ping came and when the answer left.
struct Pong {
  std::int64_t received_ns = 0, sent_ns = 0;
};

ClockOffset send_ping(Ping ping, int rank, Communicator& comm,
                      const std::function<std::int64_t()>& now_ns) {
  const std::int64_t sent = now_ns();
  send(std::span<const Ping>(&ping, 1), rank, comm);
  const std::vector<Pong> answer = receive<Pong>(rank, comm);
  const std::int64_t received = now_ns();
  if (answer.size() != 1) refuse_message(comm, rank, "answer to a ping", "it is not one");
  const auto& [there_received, there_sent] = answer[0];
  const std::int64_t under_way = (received - sent) - (there_sent - there_received);
  return {.at_ns = there_sent,
          .offset_ns = ((there_received - sent) + (there_sent - received)) / 2,
          .bound_ns = (under_way + 1) / 2 + 1};  // and the rounding of both halves
}

void answer_pings(Communicator& comm, const std::function<std::int64_t()>& now_ns) {
  bool is_last = false;
  while (!is_last) {
    const std::vector<Ping> ping = receive<Ping>(0, comm);
    const Pong answer{.received_ns = now_ns(), .sent_ns = now_ns()};
    send(std::span(&answer, 1), 0, comm);
    if (ping.size() != 1) refuse_message(comm, 0, "ping", "it is not one");
    is_last = ping[0].is_last;
  }
}

}  // namespace

std::vector<ClockOffset> compare_clocks(Communicator& comm,
                                        const std::function<std::int64_t()>& now_ns) {
  comm.set_phase({"comparison of clocks"});
  if (comm.rank() != 0) {
    answer_pings(comm, now_ns);
    return {};
  }
  std::vector<ClockOffset> offsets(static_cast<std::size_t>(comm.size()));
  offsets[0].at_ns = now_ns();
  for (int r = 1; r < comm.size(); ++r) {
    ClockOffset& best = offsets[static_cast<std::size_t>(r)];
    const std::int64_t end = now_ns() + kPingsNs;
    bool is_last = false;
    for (int pings = 1; !is_last; ++pings) {
      is_last = pings >= kLeastPings && now_ns() >= end;
      const ClockOffset offset = send_ping({is_last}, r, comm, now_ns);
      if (pings == 1 || offset.bound_ns < best.bound_ns) best = offset;
    }
  }
  return offsets;
}

std::int64_t on_clock_of_rank_0(std::int64_t ns, const ClockOffset& first,
                                const ClockOffset& last) {
  const auto between = static_cast<double>(last.at_ns - first.at_ns);
  const double part =
      between > 0.0 ? static_cast<double>(ns - first.at_ns) / between : 0.0;
  const auto drift = static_cast<double>(last.offset_ns - first.offset_ns);
  return ns - first.offset_ns - std::llround(part * drift);
}

Trace::Trace(Communicator& comm) : comm_(comm), first_(compare_clocks()) {}

std::vector<ClockOffset> Trace::compare_clocks() {
  return train::compare_clocks(comm_, [this] { return comm_.now_ns(); });
}

void Trace::on_phase(const char* phase) {
  if (phase != nullptr) phases_.push_back(comm_.now_ns());
}

void Trace::add(const TracedStep& step) {
  const StepRecord& r = step.record;
  std::vector<Span> spans;
  spans.reserve(4 + 3 * step.reports.size());
  const auto add_span = [&](Work work, std::int64_t begin_ns, std::int64_t length_ns, Slot bucket) {
    spans.push_back({.step = r.step,
                     .begin_ns = begin_ns,
                     .length_ns = length_ns,
                     .bucket = bucket,
                     .work = work});
  };
  std::int64_t now_ns = std::chrono::nanoseconds(step.begin.time_since_epoch()).count();
  const auto follow = [&](Work work, std::chrono::nanoseconds length) {
    add_span(work, now_ns, length.count(), 0);
    now_ns += length.count();
  };
  const auto ns = [](double milliseconds) {
    return std::chrono::nanoseconds(std::llround(1e6 * milliseconds));
  };
  follow(Work::batch, step.compute_begin - step.begin);
  follow(Work::compute, ns(r.compute_ms));
  if (step.optimizer_is_first) follow(Work::optimizer, ns(r.optimizer_ms));
  follow(Work::exposed, ns(r.exposed_ms));
  if (!step.optimizer_is_first) follow(Work::optimizer, ns(r.optimizer_ms));
  std::size_t phase = 0;
  for (const StepReport& b : step.reports) {
    add_span(Work::select, phases_.at(phase++), b.select_ns, b.id.slot);
    add_span(Work::exchange, phases_.at(phase++), b.exchange_ns, b.id.slot);
    add_span(Work::apply, phases_.at(phase++), b.apply_ns, b.id.slot);
  }
  phases_.clear();
  steps_.push_back(std::move(spans));
  if (steps_.size() > kSteps) steps_.pop_front();
}

std::vector<RankTrace> Trace::gather() {
  const std::vector<ClockOffset> last = compare_clocks();
  comm_.set_phase({"gathering of the trace"});
  std::vector<Span> mine;
  for (const std::vector<Span>& spans : steps_) mine.insert(mine.end(), spans.begin(), spans.end());
  if (comm_.rank() != 0) {
    send(std::span<const Span>(mine), 0, comm_);
    return {};
  }
  std::vector<RankTrace> all;
  for (std::size_t r = 0; r < last.size(); ++r) {
    all.push_back({.spans = r == 0 ? mine : receive<Span>(static_cast<int>(r), comm_),
                   .first = first_[r],
                   .last = last[r]});
    for (Span& s : all.back().spans) {
      // Both ends, so that spans that follow one another still do.
      const std::int64_t end = on_clock_of_rank_0(s.begin_ns + s.length_ns, first_[r], last[r]);
      s.begin_ns = on_clock_of_rank_0(s.begin_ns, first_[r], last[r]);
      s.length_ns = end - s.begin_ns;
    }
  }
  return all;
}

}  // namespace train
}  // namespace skim
