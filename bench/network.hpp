// Measures a rank's own speeds, for `skim bench network`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "bench/local_step.hpp"
#include "bench/measure.hpp"
#include "skim/codec.hpp"
#include "skim/cost.hpp"
#include "skim/schedule.hpp"

namespace skim::bench {

// The speeds of this thread, on a normal gradient of n entries at density 0.001, in the steady
// state. Takes a second or two.
inline LocalSpeeds measure_local(std::size_t n) {
  const auto seconds_of = [](const std::function<void()>& job) {
    const auto start = std::chrono::steady_clock::now();
    job();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  constexpr std::uint64_t kSteps = 16;
  const Gradients gradients("normal", n, {});
  LocalStep step(make_selector({}), gradients, 0, n, entries(0.001, n));
  std::vector<double> select, add, merge;
  for (std::uint64_t t = 0; t < kStepsBefore + kSteps; ++t) {
    step.load(t);
    const double add_s = seconds_of([&] { step.bare(); });
    const double select_s = seconds_of([&] { step.select(); });
    if (t < kStepsBefore) continue;
    add.push_back(add_s);
    select.push_back(select_s);
  }

  // A merge as in an exchange: a frame is encoded, decoded, and added to another selection.
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
  return {.select_s = median(select) / entries,
          .merge_s = median(merge) / sparse,
          .add_s = median(add) / entries};
}

}  // namespace skim::bench
