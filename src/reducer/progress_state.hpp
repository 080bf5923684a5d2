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
  std::int32_t servers = 0;      // ranks of the group that the mean does not count
};

void save_progress(const SavedProgress& saved, std::ostream& out);
// Reads the progress that all ranks of the saving run wrote, in rank order. Step, statistics and
// servers are those of the first state. In another group, every rank continues with the bytes of
// the busiest one. A group with another number of servers is another one, also if its size is the
// same: old_ranks.size becomes 0.
// now, servers: of the loading run. Throws: StateError.
SavedProgress load_progress(OldRanks& old_ranks, const Progress& now, int servers);

}  // namespace skim
