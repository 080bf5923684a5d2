// Internal: the mass that exchanges hold, saved by parameter name like residuals.
#pragma once

#include <cstddef>
#include <iosfwd>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "skim/exchange.hpp"
#include "skim/local_half.hpp"
#include "state.hpp"

namespace skim {

// Saves the mass of the slots that `local` declares. If holder is null, there is none.
void save_held(const LocalHalf& local, HeldMass* holder, std::ostream& out);

struct LoadedMass {
  struct Piece {
    std::size_t first = 0;
    std::vector<float> mass;
    bool is_rounding = true;
  };
  std::map<Slot, Piece> of;
  std::map<std::string, double> lost_norm2;  // of parameters that are not in the layout
};
// Reads the state that all ranks of the saving run wrote, in rank order. If the group has the same
// size, each rank gets the mass that it held. Otherwise this rank gets `share` of all of it, as with
// residuals. Call between steps only. Throws: StateError (nothing changed).
LoadedMass load_held(const OldRanks& old_ranks, const LocalHalf& local, float share);
// Makes holder forget what it holds of the slots. Call between steps only.
void drop_held(HeldMass& holder, std::span<const Slot> slots);
// Gives the mass to holder. If holder is null, the mass joins the residual.
void hold_or_keep(const LoadedMass& loaded, LocalHalf& local, HeldMass* holder);

}  // namespace skim
