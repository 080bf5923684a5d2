#include "reducer/saved_state.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "feedback/load_report.hpp"
#include "reducer/held_mass.hpp"

namespace skim {
namespace {

constexpr std::string_view kMagic = "SKIMEXCH";

bool is_sparse(const std::unique_ptr<Exchange>& exchange) { return exchange != nullptr; }

// The states of exchanges and schedule.
struct Rest {
  std::vector<PartState> exchanges;
  std::string schedule;
};
// A section (state.hpp): the state of the schedule, and the number of exchanges. Then their states.
void save_rest(std::span<const std::unique_ptr<Exchange>> exchanges,
               const DensitySchedule& schedule, std::ostream& out) {
  SectionWriter w(out, kMagic, 2);
  w.put_state(state_of(schedule));
  w.put(static_cast<std::uint64_t>(std::ranges::count_if(exchanges, &is_sparse)));
  w.end();
  for (const auto& exchange : exchanges) {
    if (is_sparse(exchange)) save_part(*exchange, out);
  }
}
Rest read_rest(std::istream& in) {
  SectionReader r(in, "saved state of schedule and exchanges", kMagic, 2);
  Rest rest{.exchanges = {}, .schedule = r.get_state()};
  const auto count = r.get<std::uint64_t>();
  r.end();
  for (std::uint64_t e = 0; e < count; ++e) rest.exchanges.push_back(read_part(in));
  return rest;
}
// Loads the first state of this name, and takes it out of the list. Returns whether there is one.
bool load_from(std::vector<PartState>& states, Exchange& exchange) {
  const auto found = std::ranges::find(states, exchange.name(), &PartState::name);
  if (found == states.end()) return false;
  const PartState own = std::move(*found);
  states.erase(found);
  return load_part(exchange, own);
}
// Without held mass, which is loaded last. The local half comes at the end, because one of a user's
// own may read no stream but this rank's.
void save_parts(const SavedParts& parts, std::ostream& out) {
  save_rest(parts.exchanges, parts.schedule, out);
  parts.local.save(out);
}

// Reads the rest of every old rank, so that all ranks find the same damage.
LoadReport load_parts(const OldRanks& old_ranks, const SavedParts& parts,
                      const LoadOptions& options) {
  std::istringstream fresh(parts.fresh);
  Rest at_first = read_rest(fresh);
  Rest saved{.exchanges = {}, .schedule = at_first.schedule};
  for (std::istream* const in : old_ranks.states) {
    Rest one = read_rest(*in);
    if (in == old_ranks.own()) saved = std::move(one);
  }
  LoadReport report = parts.local.load(old_ranks.states, old_ranks.rank, old_ranks.size, options);
  for (const auto& exchange : parts.exchanges) {
    if (is_sparse(exchange) && !load_from(saved.exchanges, *exchange)) {
      load_from(at_first.exchanges, *exchange);
    }
  }
  std::istringstream schedule(saved.schedule);
  parts.schedule.load(schedule);
  return report;
}

// given_share: what this rank takes of all that the old ranks kept. None: if it is another group,
// each rank that the mean counts takes 1 / (their old number), so that the mean owes what it owed.
LoadedState load_all(OldRanks old_ranks, const Progress& now, const SavedParts& parts,
                     std::optional<float> given_share, bool strict) {
  const int size = old_ranks.size;
  const int servers = parts.holder != nullptr ? size - parts.holder->contributors(size) : 0;
  LoadedState loaded{.saved = load_progress(old_ranks, now, servers), .density = {}, .report = {}};
  const int counted = std::max(1, static_cast<int>(old_ranks.states.size()) - loaded.saved.servers);
  const float share =
      given_share.value_or(old_ranks.rank < servers ? 0.0F : 1.0F / static_cast<float>(counted));
  const LoadedMass held = load_held(old_ranks, parts.local, share);
  // One part may be damaged, or the schedule refuse, while those before did not. Then all go back.
  std::stringstream before;
  save_parts(parts, before);
  try {
    loaded.report = load_parts(old_ranks, parts, {.share = share, .strict = strict});
    for (const auto& [name, norm2] : held.lost_norm2) {
      double& norm = loaded.report.unexpected[name];
      norm = std::hypot(norm, std::sqrt(norm2));
    }
    if (strict) expect_fits(loaded.report);
    loaded.density = parts.schedule.density(loaded.saved.progress);
  } catch (...) {
    const std::array<std::istream*, 1> own{&before};
    load_parts({own, 0, 1}, parts, {});
    throw;
  }
  if (parts.holder != nullptr) drop_held(*parts.holder, parts.local.slots());
  hold_or_keep(held, parts.local, old_ranks.same_group() ? parts.holder : nullptr);
  return loaded;
}

}  // namespace

std::string fresh_state(std::span<const std::unique_ptr<Exchange>> exchanges,
                        const DensitySchedule& schedule) {
  std::ostringstream out;
  save_rest(exchanges, schedule, out);
  return out.str();
}

void save_state(const SavedProgress& progress, const SavedParts& parts, std::ostream& out) {
  save_progress(progress, out);
  save_held(parts.local, parts.holder, out);
  save_parts(parts, out);
}

LoadedState load_state(std::span<std::istream* const> of_old_ranks, const Progress& now,
                       const SavedParts& parts, int rank, int size, bool strict) {
  return load_all({of_old_ranks, rank, size}, now, parts, std::nullopt, strict);
}

LoadedState take_over_state(std::span<std::istream* const> states, const Progress& now,
                            const SavedParts& parts, float share) {
  return load_all({states, 0, 0}, now, parts, share, true);
}

}  // namespace skim
