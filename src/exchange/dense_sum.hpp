// Internal: the dense sum, with the ranks' statistics.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>

#include "skim/codec.hpp"
#include "skim/communicator.hpp"

namespace skim {

// Communicator::allreduce_sum of data. The statistics travel with the sum.
//   stats  in: this rank's; out: the group's
//   notes  scratch memory
// Throws: CommError.
inline void sum_dense(std::span<float> data, DenseSum how, GroupStats& stats, MessageList& notes,
                      Communicator& comm) {
  std::array<std::byte, kFrameStatsBytes> note{};
  encode_stats(stats, note);
  comm.set_phase({"dense: sum"});
  comm.allreduce_sum(data, how, note, notes);
  if (comm.size() == 1) return;
  stats = {};
  for (std::size_t r = 0; r < notes.size(); ++r) {
    if (notes[r].size() != kFrameStatsBytes) {
      refuse_message(comm, static_cast<int>(r), "note",
                     "it has " + std::to_string(notes[r].size()) + " bytes");
    }
    combine(stats, decode_stats(notes[r].first<kFrameStatsBytes>()));
  }
}

}  // namespace skim
