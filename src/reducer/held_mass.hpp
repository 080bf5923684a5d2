// Internal: mass that exchanges hold, as saved: by name, like residuals.
#pragma once

#include <cstddef>
#include <iosfwd>
#include <map>
#include <span>
#include <vector>

#include "skim/exchange.hpp"
#include "skim/local_half.hpp"

namespace skim {

// Of the slots that `local` declares. holder may be null: then of none.
void save_held(const LocalHalf& local, HeldMass* holder, std::ostream& out);

struct LoadedMass {
  struct Piece {
    std::size_t first = 0;
    std::vector<float> mass;
  };
  std::map<Slot, Piece> of;
};
// Reads what all ranks of the run that saved wrote, in rank order. In a group of the same size each
// rank gets what it held; in another one, 1/P of all of it, as of residuals. Between steps only.
// Throws: StateError (nothing changed).
LoadedMass load_held(std::span<std::istream* const> of_old_ranks, const LocalHalf& local, int rank,
                     int size);
// holder goes on to hold the mass. Without one it joins the residual.
void hold_or_keep(const LoadedMass& loaded, LocalHalf& local, HeldMass* holder);

}  // namespace skim
