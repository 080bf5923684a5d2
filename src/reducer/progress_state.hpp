// Internal: the progress of a run, as saved.
#pragma once

#include <cstdint>
#include <iosfwd>

#include "skim/schedule.hpp"
#include "state.hpp"

namespace skim {

struct SavedProgress {
  Progress progress;
  std::uint64_t sent_bytes = 0;    // by this rank, in all steps so far
  std::int32_t ranks_of_mean = 1;  // of the group
};

void save_progress(const SavedProgress& saved, std::ostream& out);
// Reads the progress that all ranks of the saving run wrote, in rank order. Step, statistics and
// ranks_of_mean are those of the first state. In another group, every rank continues with the bytes
// of the busiest one. If the mean was over another number of ranks than now, the group is another
// one though its size be the same, and old_ranks.size becomes 0.
// now, ranks_of_mean: of the loading run. Throws: StateError.
SavedProgress load_progress(OldRanks& old_ranks, const Progress& now, int ranks_of_mean);

}  // namespace skim
