#include "reducer/saved_state.hpp"

#include <array>
#include <cstddef>
#include <sstream>

#include "reducer/held_mass.hpp"

namespace skim {
namespace {

// Without held mass, which is loaded last.
void save_parts(const SavedParts& parts, std::ostream& out) {
  parts.local.save(out);
  for (const auto& exchange : parts.exchanges) {
    if (exchange) exchange->save(out);
  }
  parts.schedule.save(out);
}

void load_parts(std::span<std::istream* const> of_old_ranks, const SavedParts& parts, int rank,
                int size, float share) {
  parts.local.load(of_old_ranks, rank, size, share);
  if (of_old_ranks.size() != static_cast<std::size_t>(size)) return;
  std::istream& own = *of_old_ranks[static_cast<std::size_t>(rank)];
  for (const auto& exchange : parts.exchanges) {
    if (exchange) exchange->load(own);
  }
  parts.schedule.load(own);
}

// What this rank takes of the sum of all that the old ranks kept, if their number has changed. The
// mean is over the ranks that have gradients. So if each of these takes that sum divided by their
// old number, the mean of now owes what the old one owed.
float share_of(HeldMass* holder, int old_size, int rank, int size) {
  if (holder == nullptr) return 1.0F / static_cast<float>(old_size);
  const int servers = size - holder->contributors(size);
  return rank < servers ? 0.0F : 1.0F / static_cast<float>(holder->contributors(old_size));
}

// Size 0: the states are of single ranks, not of a whole group.
SavedProgress load_all(std::span<std::istream* const> states, const Progress& now,
                       const SavedParts& parts, int rank, int size, float share) {
  const SavedProgress saved = load_progress(states, now, rank, size);
  const LoadedMass held = load_held(states, parts.local, rank, size, share);
  // One part may be damaged while those before it were not. Then all go back.
  std::stringstream before;
  save_parts(parts, before);
  try {
    load_parts(states, parts, rank, size, share);
  } catch (...) {
    const std::array<std::istream*, 1> own{&before};
    load_parts(own, parts, 0, 1, 1.0F);
    throw;
  }
  const bool same_group = states.size() == static_cast<std::size_t>(size);
  hold_or_keep(held, parts.local, same_group ? parts.holder : nullptr);
  return saved;
}

}  // namespace

void save_state(const SavedProgress& progress, const SavedParts& parts, std::ostream& out) {
  save_progress(progress, out);
  save_held(parts.local, parts.holder, out);
  save_parts(parts, out);
}

SavedProgress load_state(std::span<std::istream* const> of_old_ranks, const Progress& now,
                         const SavedParts& parts, int rank, int size) {
  const float share = share_of(parts.holder, static_cast<int>(of_old_ranks.size()), rank, size);
  SavedProgress saved = load_all(of_old_ranks, now, parts, rank, size, share);
  // Every rank has read the bytes that all ranks sent, so none are unknown.
  if (of_old_ranks.size() != static_cast<std::size_t>(size)) {
    saved.progress.last.sent_bytes = saved.sent_bytes;
    saved.progress.used = {.up = 0.0};
  }
  return saved;
}

SavedProgress take_over_state(std::span<std::istream* const> states, const Progress& now,
                              const SavedParts& parts, float share) {
  return load_all(states, now, parts, 0, 0, share);
}

}  // namespace skim
