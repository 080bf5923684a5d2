// Saves and restores held mass.
#include "reducer/held_mass.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <vector>

namespace skim {
namespace {

constexpr std::string_view kMagic = "SKIMHELD";
constexpr std::uint32_t kVersion = 2;

}  // namespace

// A section (state.hpp): the number of pieces; then for each piece: name of the parameter, its
// entries [first, first + length), is_rounding, values.
void save_held(const LocalHalf& local, HeldMass* holder, std::ostream& out) {
  struct Piece {
    const Segment* parameter;
    std::size_t first;
    std::span<const float> values;
    bool is_rounding;
  };
  std::vector<Piece> pieces;
  for (const Slot slot : local.slots()) {
    const HeldMass::Piece held = holder != nullptr ? holder->held(slot) : HeldMass::Piece{};
    const std::size_t end = held.first + held.mass.n;
    for (const Segment& p : local.layout(slot)) {
      const std::size_t first = std::max(p.offset, held.first);
      const std::size_t last = std::min(p.offset + p.length, end);
      if (first >= last) continue;
      pieces.push_back(
          {&p, first - p.offset, held.mass.span().subspan(first - held.first, last - first),
           held.is_rounding});
    }
  }
  SectionWriter w(out, kMagic, kVersion);
  w.put(static_cast<std::uint64_t>(pieces.size()));
  for (const Piece& p : pieces) {
    w.put(p.parameter->name);
    w.put(static_cast<std::uint64_t>(p.first));
    w.put(static_cast<std::uint64_t>(p.values.size()));
    w.put(static_cast<std::uint8_t>(p.is_rounding));
    w.put(p.values);
  }
  w.end();
}

LoadedMass load_held(const OldRanks& old_ranks, const LocalHalf& local, float share) {
  struct Place {
    Slot slot;
    std::size_t offset, length;
  };
  std::map<std::string, Place, std::less<>> places;
  for (const Slot slot : local.slots()) {
    for (const Segment& p : local.layout(slot)) {
      places.emplace(p.name, Place{slot, p.offset, p.length});
    }
  }
  struct Loaded {
    std::vector<float> mass;  // [n]
    std::size_t first = std::numeric_limits<std::size_t>::max(), last = 0;
    bool is_rounding = true;
  };
  std::map<Slot, Loaded> loaded;
  if (old_ranks.same_group()) share = 1.0F;
  LoadedMass result;
  std::vector<float> values;
  for (std::size_t old = 0; old < old_ranks.states.size(); ++old) {
    SectionReader in(*old_ranks.states[old], "held mass of rank " + std::to_string(old), kMagic,
                     kVersion);
    const auto pieces = in.get<std::uint64_t>();
    for (std::uint64_t i = 0; i < pieces; ++i) {
      const std::string name = in.get_string();
      const auto first = in.get<std::uint64_t>(), length = in.get<std::uint64_t>();
      const bool is_rounding = in.get<std::uint8_t>() != 0;
      const auto found = places.find(name);
      if (found == places.end()) {
        double& norm2 = result.lost_norm2[name];
        for (std::uint64_t j = 0; j < length; ++j) {
          const double v = in.get<float>();
          if (old_ranks.takes(old)) norm2 += double{share} * double{share} * v * v;
        }
        continue;
      }
      const Place& at = found->second;
      if (first > at.length || length > at.length - first) {
        in.fail("'" + name + "' has not the entries from " + std::to_string(first) + " on, " +
                std::to_string(length) + " of them");
      }
      values.resize(length);
      in.get(std::span<float>(values));
      if (!old_ranks.takes(old)) continue;
      Loaded& to = loaded[at.slot];
      to.mass.resize(local.size(at.slot));
      to.first = std::min(to.first, at.offset + first);
      to.last = std::max(to.last, at.offset + first + length);
      to.is_rounding = to.is_rounding && is_rounding;
      for (std::size_t j = 0; j < length; ++j) {
        to.mass[at.offset + first + j] += share * values[j];
      }
    }
    in.end();
  }
  for (auto& [slot, from] : loaded) {
    const auto begin = from.mass.begin();
    result.of[slot] = {.first = from.first,
                       .mass = {begin + static_cast<std::ptrdiff_t>(from.first),
                                begin + static_cast<std::ptrdiff_t>(from.last)},
                       .is_rounding = from.is_rounding};
  }
  return result;
}

void drop_held(HeldMass& holder, std::span<const Slot> slots) {
  for (const Slot slot : slots) holder.hold(slot, 0, {}, false);
}

void hold_or_keep(const LoadedMass& loaded, LocalHalf& local, HeldMass* holder) {
  SparseBuffer nothing, mass;
  for (const auto& [slot, piece] : loaded.of) {
    if (holder != nullptr) {
      holder->hold(slot, piece.first, piece.mass, piece.is_rounding);
      continue;
    }
    nothing.reset(local.size(slot));
    mass.reset(local.size(slot));
    for (std::size_t i = 0; i < piece.mass.size(); ++i) {
      if (piece.mass[i] != 0.0F) {
        mass.append(static_cast<Index>(piece.first + i), piece.mass[i]);
      }
    }
    local.commit(slot, nothing.view(), mass.view());
  }
  local.end_step();
}

}  // namespace skim
