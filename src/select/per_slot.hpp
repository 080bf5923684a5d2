// Internal: the state that a selector carries from step to step, and its saved format.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "skim/types.hpp"
#include "state.hpp"

namespace skim::selectors {

// A rule's state for every slot. State must have each(state, f), which calls f for every field, and
// valid(). The saved section (state.hpp) has the number of slots, then each slot and its fields, in
// ascending order of slots.
template <class State>
class PerSlot {
 public:
  State& operator[](Slot slot) { return states_[slot]; }

  void save(std::ostream& out, std::string_view magic) const {
    SectionWriter section(out, magic, kVersion);
    section.put(static_cast<std::uint64_t>(states_.size()));
    for (const auto& [slot, state] : states_) {
      section.put(slot);
      State::each(state, [&](const auto& field) { section.put(field); });
    }
    section.end();
  }
  // Throws: StateError; nothing has changed then.
  void load(std::istream& in, std::string_view magic) {
    SectionReader section(in, "select: the saved thresholds", magic, kVersion);
    const auto slots = section.get<std::uint64_t>();
    std::map<Slot, State> loaded;
    for (std::uint64_t s = 0; s < slots; ++s) {
      const auto slot = section.get<Slot>();
      State state;
      State::each(state, [&](auto& field) {
        field = section.template get<std::remove_reference_t<decltype(field)>>();
      });
      if (!state.valid() || (!loaded.empty() && loaded.rbegin()->first >= slot)) {
        section.fail("slot " + std::to_string(slot) + " is damaged");
      }
      loaded.emplace_hint(loaded.end(), slot, state);
    }
    section.end();
    states_ = std::move(loaded);
  }

 private:
  static constexpr std::uint32_t kVersion = 1;
  std::map<Slot, State> states_;
};

}  // namespace skim::selectors
