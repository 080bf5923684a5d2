// The times, bytes and counts of one bucket in one step, for logs and benchmarks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "skim/types.hpp"

namespace skim {

// Times by the communicator's clock.
struct StepReport {
  StepId id;
  std::size_t n = 0, k = 0;  // k: asked for; n where the bucket went dense
  std::size_t sent_entries = 0, sum_entries = 0;
  std::size_t union_entries = 0;                     // HeldMass::union_entries
  std::uint64_t sent_bytes = 0, received_bytes = 0;  // passed to the transport
  std::uint64_t rounds = 0;
  std::int64_t select_ns = 0, exchange_ns = 0, apply_ns = 0;
  double capture = 0.0;          // |selected|^2 / |accumulated|^2; 1 if nothing accumulated
  double residual_norm = 0.0;    // |residual| after the commit, to about 1e-3 of |accumulated|
  float threshold = 0.0F;        // smallest magnitude selected
  std::uint64_t non_finite = 0;  // entries of this rank's gradient
  bool dense = false;
  std::string_view chosen;  // by a chooser: the exchange's name; empty: there was no choice
  // No rank's gradient had a NaN or an infinity, and the sum over the ranks has none. Equal on all
  // ranks. The step is applied if all its buckets are finite (NonFinite).
  bool finite = true;
  GroupStats group;  // over all ranks, equal on all
};

}  // namespace skim
