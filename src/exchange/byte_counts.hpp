// Internal: byte counts that several exchanges need for their bounds and for the cost model.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "skim/codec.hpp"
#include "skim/communicator.hpp"
#include "skim/cost.hpp"

namespace skim {

// The most bytes that a rank sends in an all-gather. Each message has at most `each` bytes, and all
// together have at most `all`. longest: the bound passed to Communicator::allgather.
inline double max_gathered_bytes(int ranks, double each, double all, std::size_t longest) {
  const int p = ranks;
  if (allgather_form(p, longest) == AllgatherForm::ring) return std::min((p - 1) * each, all);
  double bytes = 0.0;
  for (int have = 1; have < p; have *= 2) {  // messages that a rank has, and sends
    const int count = std::min(have, p - have);
    bytes += std::min(count * each, all) + 8.0 * (count - 1);
  }
  return bytes;
}

// The same for a dense sum around a ring, including its statistics.
inline double max_dense_bytes(std::size_t n, int ranks) {
  const auto p = static_cast<std::size_t>(ranks);
  return static_cast<double>(2 * sizeof(float) * (n - n / p) + (p - 1) * kFrameStatsBytes);
}

// Entries of the result of an exchange that cuts it.
inline std::size_t result_entries(const Keep& keep) {
  return keep.k_down > 0 ? keep.k_down : keep.k;
}

inline double result_of(const Load& load) { return load.k_down > 0 ? load.k_down : load.k; }

// Bytes of a frame of nnz entries in the cost model, with statistics.
inline double frame_bytes(const Load& load, double nnz) {
  return load.frame.bytes(nnz, load.n) + load.frame.stats_bytes;
}

// The form of an all-gather of frames with at most nnz entries.
inline AllgatherForm form_of_frames(const CodecOptions& codec, const Load& load, double nnz) {
  const auto most = static_cast<std::size_t>(std::ceil(nnz)), n = static_cast<std::size_t>(load.n);
  return allgather_form(load.ranks, Codec(codec).max_encoded_bytes(most, n));
}

}  // namespace skim
