// Internal: the state of a reducer, as saved: its progress, and the state of each of its parts.
#pragma once

#include <iosfwd>
#include <memory>
#include <span>
#include <string>

#include "reducer/progress_state.hpp"
#include "skim/exchange.hpp"
#include "skim/local_half.hpp"
#include "skim/schedule.hpp"

namespace skim {

struct SavedParts {
  LocalHalf& local;
  HeldMass* holder;                                      // may be null
  std::span<const std::unique_ptr<Exchange>> exchanges;  // null: dense
  DensitySchedule& schedule;
  const std::string& fresh;  // fresh_state() of exchanges and schedule before the first step
};
// Exchanges and schedule load it to start anew, which they do with a state of another group.
std::string fresh_state(std::span<const std::unique_ptr<Exchange>> exchanges,
                        const DensitySchedule& schedule);

// Reducer::save, load and take_over have the contract. now: the progress of the loading run.
void save_state(const SavedProgress& progress, const SavedParts& parts, std::ostream& out);
struct LoadedState {
  SavedProgress saved;
  Density density;  // of the step that comes next
  LoadReport report;
};
LoadedState load_state(std::span<std::istream* const> of_old_ranks, const Progress& now,
                       const SavedParts& parts, int rank, int size, bool strict);
LoadedState take_over_state(std::span<std::istream* const> states, const Progress& now,
                            const SavedParts& parts, float share);

}  // namespace skim
