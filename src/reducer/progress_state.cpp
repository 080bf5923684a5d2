#include "reducer/progress_state.hpp"

#include <algorithm>
#include <string>
#include <string_view>

namespace skim {
namespace {

constexpr std::string_view kMagic = "SKIMREDU";
constexpr std::uint32_t kVersion = 7;

// Calls f for each field in the order of the file, to write or to read it.
template <class Saved, class F>
void each_field(Saved& s, F f) {
  f(s.progress.step);
  f(s.sent_bytes);
  f(s.progress.epoch);
  f(s.progress.last.gradient_norm2);
  f(s.progress.last.accumulated_norm2);
  f(s.progress.last.sent_norm2);
  f(s.progress.last.sent_bytes);
  f(s.progress.last.non_finite);
  f(s.progress.used.up);
  f(s.progress.used.down);
  f(s.progress.used.threshold);
  f(s.progress.unknown_bytes);
  f(s.servers);
}

}  // namespace

void save_progress(const SavedProgress& saved, std::ostream& out) {
  SectionWriter w(out, kMagic, kVersion);
  each_field(saved, [&](const auto& field) { w.put(field); });
  w.end();
}

SavedProgress load_progress(OldRanks& old_ranks, const Progress& now, int servers) {
  SavedProgress all{.progress = now}, own;
  for (std::size_t old = 0; old < old_ranks.states.size(); ++old) {
    SectionReader in(*old_ranks.states[old], "reducer state of rank " + std::to_string(old), kMagic,
                     kVersion);
    SavedProgress one{.progress = now};
    each_field(one, [&](auto& field) { field = in.get<std::remove_cvref_t<decltype(field)>>(); });
    in.end();
    if (old > 0 && one.progress.step != all.progress.step) {
      in.fail("it is of step " + std::to_string(one.progress.step) + ", rank 0's of step " +
              std::to_string(all.progress.step));
    }
    if (old == 0) all = one;
    all.sent_bytes = std::max(all.sent_bytes, one.sent_bytes);
    if (old_ranks.takes(old)) own = one;
  }
  const bool is_whole_group = old_ranks.size > 0;
  if (all.servers != servers) old_ranks.size = 0;
  if (old_ranks.same_group()) {
    all.sent_bytes = own.sent_bytes;
  } else if (is_whole_group) {
    // This rank has read the bytes that all ranks sent, so none are unknown.
    all.progress.last.sent_bytes = all.sent_bytes;
    all.progress.used = {.up = 0.0};
    all.progress.unknown_bytes = 0.0;
  }
  return all;
}

}  // namespace skim
