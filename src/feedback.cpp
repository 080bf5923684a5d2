// Residuals and velocities. One arena each holds the values of all slots. Journals record the
// changes of the open step. States are saved and loaded by parameter name.
#include "skim/feedback.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <new>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "assert.hpp"
#include "half.hpp"
#include "numbers.hpp"
#include "feedback/load_report.hpp"
#include "feedback/residual_store.hpp"
#include "skim/error.hpp"
#include "state.hpp"

namespace skim {
namespace {

constexpr std::string_view kMagic = "SKIMRESI";
constexpr std::uint32_t kVersion = 2;
// Flags: the parts that a saved state holds of each parameter, in this order.
constexpr std::uint8_t kHasResidual = 1, kHasVelocity = 2;
constexpr std::size_t kTooLong = std::size_t{1} << 32;  // every slot is shorter
constexpr std::size_t kSlotAlign = 4096;                // bytes: a page
constexpr std::size_t kPiece = 1 << 16;                 // floats that load() reads at once

// Zeroed floats. Their addresses matter for the speed of a pass over them (measured on a Zen 4):
//   - If a gradient has the same offset in its page as its residual, loads wait for stores to the
//     other array, which costs 15 %. Large allocations tend to have equal offsets.
//   - Huge pages save another 10 to 20 %, and a third of the time of a commit.
class Arena {
 public:
  Arena() = default;
  explicit Arena(std::size_t n) : memory_(allocate(n), &std::free), n_(n) {
    if (n > 0) std::memset(data(), 0, n * sizeof(float));
  }
  float* data() const noexcept { return memory_ ? memory_.get() + kSkew : nullptr; }
  std::size_t size() const noexcept { return n_; }

 private:
  static constexpr std::size_t kSkew = kSlotAlign / 2 / sizeof(float);  // offset in a page

  static float* allocate(std::size_t n) {
    if (n == 0) return nullptr;
    constexpr std::size_t kHugePage = std::size_t{1} << 21;
    const std::size_t least = (n + kSkew) * sizeof(float);
    const std::size_t align = least >= 4 * kHugePage ? kHugePage : kSlotAlign;
    const std::size_t bytes = (least + align - 1) / align * align;
    void* p = std::aligned_alloc(align, bytes);
    if (p == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (align == kHugePage) madvise(p, bytes, MADV_HUGEPAGE);  // if refused, only slower
#endif
    return static_cast<float*>(p);
  }
  std::unique_ptr<float, decltype(&std::free)> memory_{nullptr, &std::free};
  std::size_t n_ = 0;
};

// The floats of a slot's place in the arena.
constexpr std::size_t padded(std::size_t n) {
  return (n * sizeof(float) + kSlotAlign - 1) / kSlotAlign * kSlotAlign / sizeof(float);
}

struct SlotState {
  std::vector<Segment> parameters;  // ascending by offset
  std::size_t at = 0, n = 0;        // place in the arena
  bool delivered = false;  // commit_all ran in the open step: end_step() sets the residual to zero
};

struct Place {
  std::size_t at = 0, length = 0;  // in the arena
};

struct Layout {
  std::unordered_map<Slot, SlotState> slots;
  std::vector<Slot> order;                           // in the order of declaration
  std::map<std::string, Place, std::less<>> places;  // of parameters
  std::size_t total = 0;                             // floats of the arena
  std::size_t entries = 0, largest = 0;              // of all slots; of the largest
};

// Throws: InvalidArgument: the buckets are not what ErrorFeedback::set_layout expects.
Layout layout_of(std::span<const Bucket> buckets) {
  Layout all;
  for (const Bucket& b : buckets) {
    SlotState s;
    s.parameters = b.parameters;
    // Puts empty parameters first among equal offsets.
    std::ranges::sort(s.parameters, {},
                      [](const Segment& p) { return std::pair(p.offset, p.length); });
    s.at = all.total;
    for (const Segment& p : s.parameters) {
      SKIM_EXPECTS(p.offset == s.n, "set_layout: slot " + std::to_string(b.slot) + ": '" + p.name +
                                        "' starts at " + std::to_string(p.offset) + ", expected " +
                                        std::to_string(s.n) + " (overlap or gap)");
      SKIM_EXPECTS(p.name.size() <= kLongestName, "set_layout: a name of slot " +
                                                      std::to_string(b.slot) + " is longer than " +
                                                      std::to_string(kLongestName) + " bytes");
      SKIM_EXPECTS(p.length < kTooLong - s.n,
                   "set_layout: slot " + std::to_string(b.slot) + " has 2^32 entries or more");
      SKIM_EXPECTS(all.places.try_emplace(p.name, Place{s.at + p.offset, p.length}).second,
                   "set_layout: the name '" + p.name + "' stands twice");
      s.n += p.length;
    }
    all.entries += s.n;
    all.largest = std::max(all.largest, s.n);
    all.total += padded(s.n);
    all.order.push_back(b.slot);
    SKIM_EXPECTS(all.slots.try_emplace(b.slot, std::move(s)).second,
                 "set_layout: slot " + std::to_string(b.slot) + " stands twice");
  }
  return all;
}

// A residual stays finite, as in Selector::select: a sum that overflows becomes the largest float.
// v is non-finite only where the group's sum is, too.
float finite_sum(float residual, float v) {
  const float sum = residual + v;
  if (std::isfinite(sum)) return sum;
  return std::isnan(sum) ? residual : std::copysign(std::numeric_limits<float>::max(), sum);
}

// The values that commits of the open step overwrote, in order. The arrays never shrink, and
// growing does not fill them, because a commit at 10 % density moves as many bytes as the pass that
// made it.
class Journal {
 public:
  bool empty() const noexcept { return runs_.empty(); }
  struct Entries {
    Index* index;
    float* before;  // the earlier value
  };
  // Room for `count` entries of a slot, which the caller fills.
  Entries extend(Slot slot, std::size_t count) {
    // The number of returned entries differs between steps. So a step gets room for four times the
    // first step's entries, and a warm step does not grow the arrays.
    const std::size_t needed = std::max(used_ + count, 4 * first_step_);
    if (index_.size() < needed) {
      index_.resize(needed);
      before_.resize(needed);
    }
    if (count > 0) runs_.push_back({slot, used_});
    used_ += count;
    return {index_.data() + used_ - count, before_.data() + used_ - count};
  }
  // Goes backwards, so that an entry that changed twice gets its first value. values_of(slot): where
  // the slot's values are.
  template <class ValuesOf>
  void undo(const ValuesOf& values_of) const {
    std::size_t end = used_;
    for (auto run = runs_.rbegin(); run != runs_.rend(); ++run) {
      float* const values = values_of(run->slot);
      while (end > run->first) {
        --end;
        values[index_[end]] = before_[end];
      }
    }
  }
  void clear() noexcept {
    runs_.clear();
    if (first_step_ == 0) first_step_ = used_;
    used_ = 0;
  }

 private:
  struct Run {
    Slot slot;
    std::size_t first;  // of its entries in index_ and before_
  };
  std::vector<Run> runs_;
  std::vector<Index> index_;
  std::vector<float> before_;
  std::size_t used_ = 0, first_step_ = 0;
};

// Momentum correction of one bucket (FeedbackOptions::momentum_correction). `next(i)` returns an
// entry of the gradient. `ahead` is the output of Nesterov's form, and null for the plain form.
template <class Next>
void advance(const Next& next, float factor, float momentum, std::size_t n, float* m,
             float* ahead) {
  const auto finite = [&](std::size_t i) {
    // The product comes first: inside the condition it would not be vectorised.
    const float g = next(i), x = clamped(g * factor);
    return std::abs(g) <= std::numeric_limits<float>::max() ? x : 0.0F;
  };
  if (ahead == nullptr) {
    for (std::size_t i = 0; i < n; ++i) m[i] = clamped(momentum * m[i] + finite(i));
    return;
  }
  for (std::size_t i = 0; i < n; ++i) {
    const float g = finite(i);
    m[i] = momentum * clamped(m[i] + g);
    ahead[i] = clamped(m[i] + g);
  }
}

}  // namespace

struct ErrorFeedback::Impl {
  FeedbackOptions options;
  Layout layout;
  Arena arena;           // of residuals in f32
  ResidualStore stored;  // of residuals in another code
  Arena working;         // the residual of the slot `held`, if it is in another code
  std::optional<Slot> held;
  Arena velocity;  // laid out as arena; empty without momentum
  Arena ahead;     // Nesterov: begin() returns it
  Journal journal;
  Journal masked;           // changes of velocities
  bool open_dense = false;  // some slot is `delivered`

  const SlotState& at(Slot slot, const char* who) const {
    const auto found = layout.slots.find(slot);
    SKIM_EXPECTS(found != layout.slots.end(),
                 std::string(who) + ": slot " + std::to_string(slot) +
                     " is not in the layout (set_layout declares it)");
    return found->second;
  }
  SlotState& at(Slot slot, const char* who) {
    return const_cast<SlotState&>(std::as_const(*this).at(slot, who));
  }
  bool open() const { return !journal.empty() || open_dense; }

  // The slot's residual, valid until it is called for another slot, or put_back.
  float* residual(Slot slot) {
    const SlotState& s = layout.slots.at(slot);
    if (options.residual_code == ResidualCode::f32) return arena.data() + s.at;
    if (held != slot) {
      put_back();
      stored.load(s.at, {working.data(), s.n});
      held = slot;
    }
    return working.data();
  }
  void put_back() {
    if (!held) return;
    const SlotState& s = layout.slots.at(*held);
    stored.store(s.at, {working.data(), s.n});
    held.reset();
  }
  // Takes residuals as floats, in the layout of now.
  void take(Arena all) {
    if (options.residual_code == ResidualCode::f32) {
      arena = std::move(all);
      return;
    }
    held.reset();
    for (const auto& [slot, s] : layout.slots) stored.store(s.at, {all.data() + s.at, s.n});
  }

  void mask(Slot slot, const SlotState& s, const SparseView& sent, const SparseView& returned) {
    float* const m = velocity.data() + s.at;
    const Journal::Entries was = masked.extend(slot, sent.nnz());
    std::size_t back = 0;
    for (std::size_t e = 0; e < sent.nnz(); ++e) {
      const Index i = sent.index[e];
      while (back < returned.nnz() && returned.index[back] < i) ++back;
      const bool all_came_back = back < returned.nnz() && returned.index[back] == i &&
                                 returned.value[back] == sent.value[e];
      was.index[e] = i;
      was.before[e] = m[i];
      if (!all_came_back && sent.value[e] != 0.0F) m[i] = 0.0F;
    }
  }
};

ErrorFeedback::ErrorFeedback(FeedbackOptions options) : impl_(std::make_unique<Impl>()) {
  const auto in_range = [](float v, float most) { return v >= 0.0F && v <= most; };
  SKIM_EXPECTS(in_range(options.momentum_correction, 1.0F) && options.momentum_correction != 1.0F,
               "feedback: momentum_correction must be in [0, 1) (" +
                   std::to_string(options.momentum_correction) + ")");
  SKIM_EXPECTS(in_range(options.momentum_dampening, 1.0F) && options.momentum_dampening != 1.0F,
               "feedback: momentum_dampening must be in [0, 1) (" +
                   std::to_string(options.momentum_dampening) + ")");
  SKIM_EXPECTS(options.momentum_correction > 0.0F || options.momentum_dampening == 0.0F,
               "feedback: momentum_dampening needs momentum_correction > 0");
  SKIM_EXPECTS(options.momentum_correction > 0.0F || !options.nesterov_correction,
               "feedback: nesterov_correction needs momentum_correction > 0");
  SKIM_EXPECTS(
      in_range(options.local_clip, std::numeric_limits<float>::max()),
      "feedback: local_clip must be finite and >= 0 (" + std::to_string(options.local_clip) + ")");
  SKIM_EXPECTS(in_range(options.residual_decay, 1.0F),
               "feedback: residual_decay must be in [0, 1] (" +
                   std::to_string(options.residual_decay) + ")");
  SKIM_EXPECTS(
      options.enabled || (options.momentum_correction == 0.0F && options.residual_decay == 1.0F),
      "feedback: momentum_correction and residual_decay need a residual (enabled)");
  SKIM_EXPECTS(is_named(options.residual_code), "feedback: unknown residual_code");
  SKIM_EXPECTS(options.enabled || options.residual_code == ResidualCode::f32,
               "feedback: residual_code needs a residual (enabled)");
  impl_->options = options;
}
ErrorFeedback::~ErrorFeedback() = default;
ErrorFeedback::ErrorFeedback(ErrorFeedback&&) noexcept = default;
ErrorFeedback& ErrorFeedback::operator=(ErrorFeedback&&) noexcept = default;

const FeedbackOptions& ErrorFeedback::options() const noexcept { return impl_->options; }

void ErrorFeedback::set_layout(std::span<const Bucket> buckets) {
  SKIM_EXPECTS(!impl_->open(), "set_layout: a step is open; call end_step or rollback_step first");

  Layout next = layout_of(buckets);
  for (const auto& [name, old] : impl_->layout.places) {
    const auto found = next.places.find(name);
    SKIM_EXPECTS(found == next.places.end() || found->second.length == old.length,
                 "set_layout: '" + name + "' has " + std::to_string(found->second.length) +
                     " entries, before " + std::to_string(old.length));
  }

  impl_->put_back();
  const auto& before = impl_->layout.places;
  // The values of a slot, each parameter from where it was. load(at, out) gives the earlier values.
  const auto fill = [&](const SlotState& s, const auto& load, float* to) {
    for (const Segment& p : s.parameters) {
      const auto found = before.find(p.name);
      if (found != before.end()) load(found->second.at, std::span(to + p.offset, p.length));
    }
  };
  const auto moved = [&](const Arena& from) {
    Arena to(next.total);
    const auto load = [&](std::size_t at, std::span<float> out) {
      std::copy_n(from.data() + at, out.size(), out.data());
    };
    for (const auto& [slot, s] : next.slots) fill(s, load, to.data() + s.at);
    return to;
  };
  const FeedbackOptions& o = impl_->options;
  const bool is_coded = o.enabled && o.residual_code != ResidualCode::f32;
  Arena residuals = o.enabled && !is_coded ? moved(impl_->arena) : Arena();
  Arena velocity = o.momentum_correction > 0.0F ? moved(impl_->velocity) : Arena();
  Arena ahead(o.momentum_correction > 0.0F && o.nesterov_correction ? next.largest : 0);
  Arena working(is_coded ? next.largest : 0);
  ResidualStore stored;
  if (is_coded) {  // slot by slot, because all slots as floats would take the memory that a code saves
    stored = ResidualStore(o.residual_code, next.total);
    const auto load = [&](std::size_t at, std::span<float> out) { impl_->stored.load(at, out); };
    for (const auto& [slot, s] : next.slots) {
      std::fill_n(working.data(), s.n, 0.0F);
      fill(s, load, working.data());
      stored.store(s.at, {working.data(), s.n});
    }
  }
  impl_->arena = std::move(residuals);
  impl_->stored = std::move(stored);
  impl_->working = std::move(working);
  impl_->velocity = std::move(velocity);
  impl_->ahead = std::move(ahead);
  impl_->layout = std::move(next);
}

std::span<const Slot> ErrorFeedback::slots() const noexcept { return impl_->layout.order; }

std::span<const Segment> ErrorFeedback::layout(Slot slot) const {
  return impl_->at(slot, "layout").parameters;
}

std::size_t ErrorFeedback::size(Slot slot) const { return impl_->at(slot, "size").n; }

DenseView ErrorFeedback::residual(Slot slot) {
  const SlotState& s = impl_->at(slot, "residual");
  if (!impl_->options.enabled) return {};
  return std::span<float>(impl_->residual(slot), s.n);
}

DenseView ErrorFeedback::velocity(Slot slot) {
  const SlotState& s = impl_->at(slot, "velocity");
  if (impl_->options.momentum_correction == 0.0F) return {};
  return std::span<float>(impl_->velocity.data() + s.at, s.n);
}

GradView ErrorFeedback::begin(Slot slot, GradView grad, double norm2, int ranks) {
  const SlotState& s = impl_->at(slot, "begin");
  SKIM_EXPECTS(grad.n == s.n, "begin: the gradient must have the slot's length (" +
                                  std::to_string(grad.n) + ", expected " + std::to_string(s.n) +
                                  ")");
  SKIM_EXPECTS(grad.device == Device::cpu, "begin: the gradient must be on the CPU");
  const FeedbackOptions& o = impl_->options;
  if (o.local_clip > 0.0F) {
    const auto entries = static_cast<double>(impl_->layout.entries);
    const double share = static_cast<double>(s.n) / (ranks * entries);
    const double limit = double{o.local_clip} * std::sqrt(share), norm = std::sqrt(norm2);
    if (norm > limit) {
      grad.scale = static_cast<float>(
          std::min(double{grad.scale} * (norm / limit), double{std::numeric_limits<float>::max()}));
    }
  }
  if (o.momentum_correction == 0.0F) return grad;

  float* const m = impl_->velocity.data() + s.at;
  float* const ahead = o.nesterov_correction ? impl_->ahead.data() : nullptr;
  const auto run = [&](const auto& next) {
    advance(next, (1.0F - o.momentum_dampening) / grad.scale, o.momentum_correction, s.n, m, ahead);
  };
  const auto* const floats = static_cast<const float*>(grad.data);
  const auto* const bits = static_cast<const std::uint16_t*>(grad.data);
  if (grad.dtype == DType::f32) {
    run([=](std::size_t i) { return floats[i]; });
  } else if (grad.dtype == DType::f16) {
    run([=](std::size_t i) { return from_f16(bits[i]); });
  } else {
    run([=](std::size_t i) { return from_bf16(bits[i]); });
  }
  return std::span<float>(o.nesterov_correction ? ahead : m, s.n);
}

double ErrorFeedback::commit(Slot slot, const SparseView& sent, const SparseView& returned) {
  const SlotState& s = impl_->at(slot, "commit");
  SKIM_EXPECTS(sent.dim == s.n && returned.dim == s.n,
               "commit: dims must be the slot's length (sent " + std::to_string(sent.dim) +
                   ", returned " + std::to_string(returned.dim) + ", expected " +
                   std::to_string(s.n) + ")");
  if (!impl_->options.enabled) return 0.0;
  float* const r = impl_->residual(slot);
  // Two sums, because one would wait for its own additions longer than for memory.
  double even = 0.0, odd = 0.0;
  const auto add = [&](const SparseView& part, float sign) {
    const std::size_t nnz = part.nnz();
    const Journal::Entries was = impl_->journal.extend(slot, nnz);
    // Entries lie far apart, and a cache miss takes as long as hundreds of instructions. A sparse
    // commit prefetches single entries some way ahead. A dense one loads whole blocks.
    constexpr std::size_t kAhead = 64, kBlock = 1024, kLine = 16;
    const bool is_dense = nnz > s.n / 32;
    std::size_t fetched = 0;  // memory before this entry has been loaded
    const auto change = [&](std::size_t e) {
      const Index i = part.index[e];
      if (!is_dense) {
        __builtin_prefetch(r + part.index[std::min(e + kAhead, nnz - 1)], 1, 2);
      } else if (i >= fetched) {
        const std::size_t first = i / kBlock * kBlock;
        fetched = std::min(first + kBlock, s.n);
        for (std::size_t at = first; at < fetched; at += kLine) {
          static_cast<void>(*static_cast<const volatile float*>(r + at));
        }
      }
      const float old = r[i], now = finite_sum(old, sign * part.value[e]);
      was.index[e] = i;
      was.before[e] = old;
      r[i] = now;
      return double{now} * double{now} - double{old} * double{old};
    };
    std::size_t e = 0;
    for (; e + 1 < nnz; e += 2) {
      even += change(e);
      odd += change(e + 1);
    }
    if (e < nnz) even += change(e);
  };
  add(sent, -1.0F);
  add(returned, 1.0F);
  if (impl_->options.momentum_correction > 0.0F && impl_->options.factor_masking) {
    impl_->mask(slot, s, sent, returned);
  }
  return even + odd;
}

void ErrorFeedback::commit_all(Slot slot) {
  SlotState& s = impl_->at(slot, "commit_all");
  if (!impl_->options.enabled) return;
  s.delivered = true;
  impl_->open_dense = true;
}

void ErrorFeedback::end_step() noexcept {
  impl_->journal.clear();
  impl_->masked.clear();
  if (impl_->open_dense) {
    for (auto& [slot, s] : impl_->layout.slots) {
      if (s.delivered && s.n > 0) std::memset(impl_->residual(slot), 0, s.n * sizeof(float));
      s.delivered = false;
    }
    impl_->open_dense = false;
  }
  impl_->put_back();
}

void ErrorFeedback::rollback_step() {
  impl_->journal.undo([&](Slot slot) { return impl_->residual(slot); });
  impl_->journal.clear();
  impl_->put_back();
  impl_->masked.undo(
      [&](Slot slot) { return impl_->velocity.data() + impl_->layout.slots.at(slot).at; });
  impl_->masked.clear();
  for (auto& [slot, s] : impl_->layout.slots) s.delivered = false;
  impl_->open_dense = false;
}

void ErrorFeedback::save(std::ostream& out) const {
  SKIM_EXPECTS(!impl_->open(), "save: a step is open; call end_step or rollback_step first");
  SectionWriter w(out, kMagic, kVersion);
  const bool has_residual = impl_->options.enabled,
             has_velocity = impl_->options.momentum_correction > 0.0F;
  w.put(static_cast<std::uint8_t>((has_residual ? kHasResidual : 0) |
                                  (has_velocity ? kHasVelocity : 0)));
  w.put(static_cast<std::uint64_t>(impl_->layout.places.size()));
  for (const Slot slot : impl_->layout.order) {
    const SlotState& s = impl_->layout.slots.at(slot);
    for (const Segment& p : s.parameters) {
      w.put(p.name);
      w.put(static_cast<std::uint64_t>(p.length));
      const std::size_t at = s.at + p.offset;
      if (has_residual) {
        w.put(std::span<const float>(impl_->residual(slot) + p.offset, p.length));
      }
      if (has_velocity) w.put(std::span<const float>(impl_->velocity.data() + at, p.length));
    }
  }
  impl_->put_back();
  w.end();
}

LoadReport ErrorFeedback::load(std::span<std::istream* const> of_old_ranks, int rank, int size,
                               const LoadOptions& options) {
  SKIM_EXPECTS(!of_old_ranks.empty(), "load: needs the state of at least one rank");
  SKIM_EXPECTS(size == 0 || (rank >= 0 && rank < size),
               "load: rank must be in [0, size) (rank=" + std::to_string(rank) +
                   ", size=" + std::to_string(size) + ")");
  SKIM_EXPECTS(
      !options.share || (std::isfinite(*options.share) && *options.share >= 0.0F),
      "load: share must be finite and >= 0 (share=" + std::to_string(*options.share) + ")");
  SKIM_EXPECTS(!impl_->open(), "load: a step is open; call end_step or rollback_step first");
  const OldRanks old_ranks{of_old_ranks, rank, size};
  const float share = old_ranks.same_group()
                          ? 1.0F
                          : options.share.value_or(1.0F / static_cast<float>(of_old_ranks.size()));
  // The size is 0 if the state is not kept.
  Arena arena(impl_->options.enabled ? impl_->layout.total : 0), velocity(impl_->velocity.size());
  std::map<std::string, std::vector<float>> lost;  // residuals of parameters without a place
  std::map<std::string, std::uint64_t, std::less<>> saved;  // rank 0's parameters; their lengths
  std::vector<float> piece;
  // Reads every stream, even if this rank does not want its residual, because other state follows
  // in the stream.
  for (std::size_t old = 0; old < of_old_ranks.size(); ++old) {
    SectionReader in(*of_old_ranks[old], "residuals of rank " + std::to_string(old), kMagic,
                     kVersion);
    const bool is_wanted = old_ranks.takes(old);
    const auto has = in.get<std::uint8_t>();
    if (has > (kHasResidual | kHasVelocity)) in.fail("it holds what this version does not know");
    const auto count = in.get<std::uint64_t>();
    std::map<std::string, std::uint64_t, std::less<>> parameters;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::string name = in.get_string();
      const auto length = in.get<std::uint64_t>();
      if (!parameters.emplace(name, length).second) in.fail("'" + name + "' stands twice");
      const auto found = impl_->layout.places.find(name);
      const bool has_place = found != impl_->layout.places.end();
      if (has_place && found->second.length != length) {
        in.fail("'" + name + "' has " + std::to_string(length) + " entries, the model's " +
                std::to_string(found->second.length));
      }
      std::vector<float>* const without_place = has_place ? nullptr : &lost[name];
      for (const auto& [bit, arena_of_bit] :
           {std::pair(kHasResidual, &arena), std::pair(kHasVelocity, &velocity)}) {
        if ((has & bit) == 0) continue;
        // In pieces: the length of a parameter without a place may be damaged.
        for (std::uint64_t first = 0; first < length; first += piece.size()) {
          piece.resize(std::min<std::uint64_t>(length - first, kPiece));
          in.get(std::span<float>(piece));
          if (!is_wanted) continue;
          float* to = nullptr;
          if (has_place) {
            if (arena_of_bit->size() > 0) to = arena_of_bit->data() + found->second.at + first;
          } else if (bit == kHasResidual) {
            without_place->resize(std::max(without_place->size(), first + piece.size()));
            to = without_place->data() + first;
          }
          if (to == nullptr) continue;
          for (std::size_t j = 0; j < piece.size(); ++j) {
            to[j] = clamped(to[j] + clamped(share * piece[j]));
          }
        }
      }
    }
    in.end();
    if (old == 0) saved = parameters;
    if (parameters != saved) in.fail("it has other parameters than rank 0's");
  }
  LoadReport report;
  for (const Slot slot : impl_->layout.order) {
    for (const Segment& p : impl_->layout.slots.at(slot).parameters) {
      if (!saved.contains(p.name)) report.missing.push_back(p.name);
    }
  }
  for (const auto& [name, residual] : lost) {
    double norm2 = 0.0;
    for (const float v : residual) norm2 += double{v} * double{v};
    report.unexpected[name] = std::sqrt(norm2);
  }
  if (options.strict) expect_fits(report);
  impl_->take(std::move(arena));
  impl_->velocity = std::move(velocity);
  return report;
}

}  // namespace skim
