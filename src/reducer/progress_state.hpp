// Internal: the progress of a run, as saved.
#pragma once

#include <cstdint>
#include <iosfwd>

#include "skim/schedule.hpp"
#include "state.hpp"

namespace skim {

struct SavedProgress {
  Progress progress;
  std::uint64_t sent_bytes = 0;  // by this rank, in all steps so far
};

void save_progress(const SavedProgress& saved, std::ostream& out);
// Reads the progress that all ranks of the saving run wrote, in rank order. Step and statistics are
// those of the first state. In a group of another size, every rank continues with the bytes of the
// busiest one. Size 0: the states are of single ranks, not of a whole group. now: the progress of
// the loading run. Throws: StateError.
SavedProgress load_progress(const OldRanks& old_ranks, const Progress& now);

}  // namespace skim
