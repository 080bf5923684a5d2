// Residuals: one arena for all slots, a journal of the open step, save and load by parameter name.
#include "skim/feedback.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

#include "assert.hpp"
#include "skim/error.hpp"
#include "state.hpp"

namespace skim {
namespace {

constexpr std::string_view kMagic = "SKIMRESI";
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kTooLong = std::size_t{1} << 32;  // a slot is shorter
constexpr std::size_t kAlign = 64;  // of every slot: a cache line, and the widest vector

// Zeroed floats, aligned.
class Arena {
 public:
  Arena() = default;
  explicit Arena(std::size_t n) : data_(allocate(n), &std::free), n_(n) {
    if (n > 0) std::memset(data_.get(), 0, n * sizeof(float));
  }
  float* data() const noexcept { return data_.get(); }
  std::size_t size() const noexcept { return n_; }

 private:
  static float* allocate(std::size_t n) {
    if (n == 0) return nullptr;
    const std::size_t bytes = (n * sizeof(float) + kAlign - 1) / kAlign * kAlign;
    void* p = std::aligned_alloc(kAlign, bytes);
    if (p == nullptr) throw std::bad_alloc();
    return static_cast<float*>(p);
  }
  std::unique_ptr<float, decltype(&std::free)> data_{nullptr, &std::free};
  std::size_t n_ = 0;
};

struct SlotState {
  std::vector<Segment> parameters;  // ascending by offset
  std::size_t at = 0, n = 0;        // in the arena
  bool delivered = false;           // commit_all in the open step: zero at its end
};

// A residual stays finite, as in Selector::select: a sum that overflows becomes the largest float.
// v is not finite only where the group's sum is not either.
float finite_sum(float residual, float v) {
  const float sum = residual + v;
  if (std::isfinite(sum)) return sum;
  return std::isnan(sum) ? residual : std::copysign(std::numeric_limits<float>::max(), sum);
}

struct JournalEntry {
  Slot slot;
  Index index;
  float before;
};

}  // namespace

struct ErrorFeedback::Impl {
  FeedbackOptions options;
  std::unordered_map<Slot, SlotState> slots;
  std::vector<Slot> order;  // as declared
  Arena arena;
  std::vector<JournalEntry> journal;
  bool open_dense = false;  // some slot is `delivered`

  const SlotState& at(Slot slot, const char* who) const {
    const auto found = slots.find(slot);
    SKIM_EXPECTS(found != slots.end(), std::string(who) + ": slot " + std::to_string(slot) +
                                           " is not in the layout (set_layout declares it)");
    return found->second;
  }
  SlotState& at(Slot slot, const char* who) {
    return const_cast<SlotState&>(std::as_const(*this).at(slot, who));
  }
  bool open() const { return !journal.empty() || open_dense; }
};

ErrorFeedback::ErrorFeedback(FeedbackOptions options) : impl_(std::make_unique<Impl>()) {
  impl_->options = options;
}
ErrorFeedback::~ErrorFeedback() = default;
ErrorFeedback::ErrorFeedback(ErrorFeedback&&) noexcept = default;
ErrorFeedback& ErrorFeedback::operator=(ErrorFeedback&&) noexcept = default;

const FeedbackOptions& ErrorFeedback::options() const noexcept { return impl_->options; }

void ErrorFeedback::set_layout(std::span<const Bucket> buckets, Device device) {
  SKIM_EXPECTS(device == Device::cpu, "set_layout: residuals on a GPU are not in this build");
  SKIM_EXPECTS(!impl_->open(), "set_layout: a step is open; call end_step or rollback_step first");

  std::unordered_map<Slot, SlotState> slots;
  std::vector<Slot> order;
  std::map<std::string, std::pair<std::size_t, std::size_t>, std::less<>> place;  // at, length
  std::size_t total = 0;
  for (const Bucket& b : buckets) {
    SlotState s;
    s.parameters = b.parameters;
    // Of equal offsets, the empty ones first.
    std::ranges::sort(s.parameters, {},
                      [](const Segment& p) { return std::pair(p.offset, p.length); });
    s.at = total;
    for (const Segment& p : s.parameters) {
      SKIM_EXPECTS(p.offset == s.n, "set_layout: slot " + std::to_string(b.slot) + ": '" + p.name +
                                        "' starts at " + std::to_string(p.offset) + ", expected " +
                                        std::to_string(s.n) + " (overlap or gap)");
      SKIM_EXPECTS(p.name.size() <= kLongestName, "set_layout: a name of slot " +
                                                      std::to_string(b.slot) + " is longer than " +
                                                      std::to_string(kLongestName) + " bytes");
      SKIM_EXPECTS(p.length < kTooLong - s.n,
                   "set_layout: slot " + std::to_string(b.slot) + " has 2^32 entries or more");
      SKIM_EXPECTS(place.try_emplace(p.name, s.at + s.n, p.length).second,
                   "set_layout: the name '" + p.name + "' stands twice");
      s.n += p.length;
    }
    total += (s.n * sizeof(float) + kAlign - 1) / kAlign * kAlign / sizeof(float);
    order.push_back(b.slot);
    SKIM_EXPECTS(slots.try_emplace(b.slot, std::move(s)).second,
                 "set_layout: slot " + std::to_string(b.slot) + " stands twice");
  }
  for (const auto& [slot, old] : impl_->slots) {
    for (const Segment& p : old.parameters) {
      const auto found = place.find(p.name);
      SKIM_EXPECTS(found == place.end() || found->second.second == p.length,
                   "set_layout: '" + p.name + "' has " + std::to_string(found->second.second) +
                       " entries, before " + std::to_string(p.length));
    }
  }

  if (impl_->options.enabled) {
    Arena arena(total);
    for (const auto& [slot, old] : impl_->slots) {
      for (const Segment& p : old.parameters) {
        const auto found = place.find(p.name);
        if (found == place.end() || p.length == 0) continue;
        std::memcpy(arena.data() + found->second.first, impl_->arena.data() + old.at + p.offset,
                    p.length * sizeof(float));
      }
    }
    impl_->arena = std::move(arena);
  }
  impl_->slots = std::move(slots);
  impl_->order = std::move(order);
}

std::span<const Segment> ErrorFeedback::layout(Slot slot) const {
  return impl_->at(slot, "layout").parameters;
}

std::size_t ErrorFeedback::size(Slot slot) const { return impl_->at(slot, "size").n; }

DenseView ErrorFeedback::residual(Slot slot) {
  const SlotState& s = impl_->at(slot, "residual");
  if (!impl_->options.enabled) return {};
  return std::span<float>(impl_->arena.data() + s.at, s.n);
}

double ErrorFeedback::commit(Slot slot, const SparseView& sent, const SparseView& returned) {
  const SlotState& s = impl_->at(slot, "commit");
  SKIM_EXPECTS(sent.dim == s.n && returned.dim == s.n,
               "commit: dims must be the slot's length (sent " + std::to_string(sent.dim) +
                   ", returned " + std::to_string(returned.dim) + ", expected " +
                   std::to_string(s.n) + ")");
  if (!impl_->options.enabled) return 0.0;
  float* const r = impl_->arena.data() + s.at;
  double change = 0.0;
  const auto add = [&](Index i, float v) {
    const float before = r[i];
    impl_->journal.push_back({slot, i, before});
    r[i] = finite_sum(before, v);
    change += double{r[i]} * double{r[i]} - double{before} * double{before};
  };
  for (std::size_t e = 0; e < sent.nnz(); ++e) add(sent.index[e], -sent.value[e]);
  for (std::size_t e = 0; e < returned.nnz(); ++e) add(returned.index[e], returned.value[e]);
  return change;
}

void ErrorFeedback::commit_all(Slot slot) {
  SlotState& s = impl_->at(slot, "commit_all");
  if (!impl_->options.enabled) return;
  s.delivered = true;
  impl_->open_dense = true;
}

void ErrorFeedback::end_step() noexcept {
  impl_->journal.clear();
  if (!impl_->open_dense) return;
  for (auto& [slot, s] : impl_->slots) {
    if (s.delivered && s.n > 0) std::memset(impl_->arena.data() + s.at, 0, s.n * sizeof(float));
    s.delivered = false;
  }
  impl_->open_dense = false;
}

void ErrorFeedback::rollback_step() {
  // Backwards, so that an entry that changed twice gets its first value.
  for (auto e = impl_->journal.rbegin(); e != impl_->journal.rend(); ++e) {
    impl_->arena.data()[impl_->slots.at(e->slot).at + e->index] = e->before;
  }
  impl_->journal.clear();
  for (auto& [slot, s] : impl_->slots) s.delivered = false;
  impl_->open_dense = false;
}

void ErrorFeedback::save(std::ostream& out) const {
  SKIM_EXPECTS(!impl_->open(), "save: a step is open; call end_step or rollback_step first");
  SectionWriter w(out, kMagic, kVersion);
  std::uint64_t count = 0;
  for (const auto& [slot, s] : impl_->slots) count += s.parameters.size();
  w.put(static_cast<std::uint8_t>(impl_->options.enabled ? 1 : 0));
  w.put(count);
  for (const Slot slot : impl_->order) {
    const SlotState& s = impl_->slots.at(slot);
    for (const Segment& p : s.parameters) {
      w.put(p.name);
      w.put(static_cast<std::uint64_t>(p.length));
      if (impl_->options.enabled) {
        w.put(std::span<const float>(impl_->arena.data() + s.at + p.offset, p.length));
      }
    }
  }
  w.end();
}

void ErrorFeedback::load(std::span<std::istream* const> of_old_ranks, int rank, int size) {
  SKIM_EXPECTS(!of_old_ranks.empty(), "load: needs the state of at least one rank");
  SKIM_EXPECTS(!impl_->open(), "load: a step is open; call end_step or rollback_step first");
  std::map<std::string, std::pair<std::size_t, std::size_t>, std::less<>> place;  // at, length
  for (const auto& [slot, s] : impl_->slots) {
    for (const Segment& p : s.parameters)
      place.emplace(p.name, std::pair(s.at + p.offset, p.length));
  }
  const bool same_group = of_old_ranks.size() == static_cast<std::size_t>(size);
  const float share = same_group ? 1.0F : 1.0F / static_cast<float>(of_old_ranks.size());
  Arena arena(impl_->options.enabled ? impl_->arena.size() : 0);
  std::vector<float> values;
  // Every stream is read, also of ranks whose residual is not wanted: they stand before other
  // state.
  for (std::size_t old = 0; old < of_old_ranks.size(); ++old) {
    SectionReader in(*of_old_ranks[old], "residuals of rank " + std::to_string(old), kMagic,
                     kVersion);
    const bool kept = in.get<std::uint8_t>() != 0;
    const auto count = in.get<std::uint64_t>();
    if (count != place.size()) {
      in.fail("it has " + std::to_string(count) + " parameters, the model " +
              std::to_string(place.size()));
    }
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::string name = in.get_string();
      const auto length = in.get<std::uint64_t>();
      const auto found = place.find(name);
      if (found == place.end()) in.fail("the model has no parameter '" + name + "'");
      if (found->second.second != length) {
        in.fail("'" + name + "' has " + std::to_string(length) + " entries, the model's " +
                std::to_string(found->second.second));
      }
      if (!kept) continue;
      values.resize(length);
      in.get(std::span<float>(values));
      if (!impl_->options.enabled || (same_group && old != static_cast<std::size_t>(rank)))
        continue;
      float* const r = arena.data() + found->second.first;
      for (std::size_t j = 0; j < length; ++j) r[j] += share * values[j];
    }
    in.end();
  }
  if (impl_->options.enabled) impl_->arena = std::move(arena);
}

}  // namespace skim
