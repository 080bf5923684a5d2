#include "reducer/saved_state.hpp"

#include <cstddef>

#include "reducer/held_mass.hpp"

namespace skim {

void save_state(const SavedProgress& progress, const SavedParts& parts, std::ostream& out) {
  save_progress(progress, out);
  save_held(parts.local, parts.holder, out);
  parts.local.save(out);
  for (const auto& exchange : parts.exchanges) {
    if (exchange) exchange->save(out);
  }
  parts.schedule.save(out);
}

SavedProgress load_state(std::span<std::istream* const> of_old_ranks, const Progress& now,
                         const SavedParts& parts, int rank, int size) {
  const SavedProgress saved = load_progress(of_old_ranks, now, rank, size);
  const LoadedMass held = load_held(of_old_ranks, parts.local, rank, size);
  parts.local.load(of_old_ranks, rank, size);
  const bool same_group = of_old_ranks.size() == static_cast<std::size_t>(size);
  hold_or_keep(held, parts.local, same_group ? parts.holder : nullptr);
  if (same_group) {
    std::istream& own = *of_old_ranks[static_cast<std::size_t>(rank)];
    for (const auto& exchange : parts.exchanges) {
      if (exchange) exchange->load(own);
    }
    parts.schedule.load(own);
  }
  return saved;
}

}  // namespace skim
