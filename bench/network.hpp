// What `skim bench network` measures: the link between two ranks of a group, and a rank's own
// speeds. The numbers that the cost model needs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "bench/local_step.hpp"
#include "bench/measure.hpp"
#include "skim/codec.hpp"
#include "skim/communicator.hpp"
#include "skim/cost.hpp"

namespace skim::bench {

// Half the time of the round trips of a message of so many bytes between rank 0 and the last one:
// on rank 0 the median, elsewhere 0. Collective; the group needs two ranks.
inline double ping_pong(Communicator& comm, std::size_t bytes, int repetitions) {
  const int last = comm.size() - 1;
  const std::vector<std::byte> out(bytes);
  std::vector<std::byte> in;
  std::vector<double> seconds;
  for (int i = -1; i < repetitions; ++i) {  // the first makes connections
    const std::int64_t start = comm.now_ns();
    if (comm.rank() == 0) {
      comm.wait(comm.isend(out, last));
      comm.wait(comm.ireceive(in, last));
      if (i >= 0) seconds.push_back(0.5e-9 * static_cast<double>(comm.now_ns() - start));
    } else if (comm.rank() == last) {
      comm.wait(comm.ireceive(in, 0));
      comm.wait(comm.isend(out, 0));
    }
  }
  return seconds.empty() ? 0.0 : median(std::move(seconds));
}

// Lengths 1, 4, 16 .. up to largest. On rank 0; elsewhere the times are 0. Collective.
inline std::vector<LinkSample> measure_link(Communicator& comm, std::size_t largest) {
  std::vector<LinkSample> samples;
  for (std::size_t bytes = 1; bytes <= largest; bytes *= 4) {
    const int repetitions = bytes < (1U << 16U) ? 51 : bytes < (1U << 20U) ? 21 : 7;
    samples.push_back({static_cast<double>(bytes), ping_pong(comm, bytes, repetitions)});
  }
  return samples;
}

// Of this thread, on a normal gradient of n entries at density 0.001, in the steady state. Seconds
// of processor work, a second or two in all.
inline LocalSpeeds measure_local(std::size_t n) {
  const auto seconds_of = [](const std::function<void()>& job) {
    const auto start = std::chrono::steady_clock::now();
    job();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  constexpr std::uint64_t kSteps = 16;
  const Gradients gradients("normal", n, {});
  LocalStep step(make_selector({}), gradients, 0, n, kept(0.001, n));
  std::vector<double> select, add, merge;
  for (std::uint64_t t = 0; t < kStepsBefore + kSteps; ++t) {
    step.load(t);
    const double add_s = seconds_of([&] { step.bare(); });
    const double select_s = seconds_of([&] { step.select(); });
    if (t < kStepsBefore) continue;
    add.push_back(add_s);
    select.push_back(select_s);
  }

  // A merge as an exchange has it: an encoded frame comes in and is summed with what is there.
  const Codec codec;
  SparseBuffer held, incoming, merged;
  held.assign(step.selection());
  step.load(kStepsBefore + kSteps);
  step.select();
  GroupStats stats;
  std::vector<std::byte> frame;
  for (std::uint64_t t = 0; t < kSteps; ++t) {
    merge.push_back(seconds_of([&] {
      frame.clear();
      codec.encode(step.selection(), &stats, frame);
      const DecodeResult got = codec.decode(frame, n, incoming, &stats);
      if (!got) throw Error("bench network: a frame does not decode");
      const std::array parts{held.view(), incoming.view()};
      sum(parts, merged);
    }));
  }
  const auto entries = static_cast<double>(n);
  const auto sparse = static_cast<double>(held.nnz() + incoming.nnz());
  return {.select_s = median(std::move(select)) / entries,
          .merge_s = median(std::move(merge)) / sparse,
          .add_s = median(std::move(add)) / entries};
}

}  // namespace skim::bench
