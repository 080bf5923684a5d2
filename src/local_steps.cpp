#include "skim/local_steps.hpp"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <string>
#include <string_view>

#include "skim/error.hpp"
#include "state.hpp"

namespace skim {
namespace {

constexpr std::string_view kMagic = "SKIMLOCA";
constexpr std::uint32_t kVersion = 1;

}  // namespace

double outer_lr_for(int ranks, double density) {
  SKIM_EXPECTS(ranks >= 1, "outer_lr_for: ranks must be >= 1");
  SKIM_EXPECTS(density >= 0.0 && density <= 1.0, "outer_lr_for: density must be in [0, 1]");
  return std::sqrt(ranks / (1.0 + (ranks - 1) * density));
}

struct LocalSteps::Impl {
  struct Part {
    Slot slot;
    std::vector<float> x, v;  // [n]; v: empty without momentum
  };

  Impl(const LocalStepsOptions& o, Reducer& r)
      : ahead(static_cast<float>(o.ahead)),
        follows_density(o.outer_lr == 0.0 && o.outer_momentum == 0.0),
        outer_lr(o.outer_lr == 0.0 ? 1.0F : static_cast<float>(o.outer_lr)),
        outer_momentum(static_cast<float>(o.outer_momentum)),
        reducer(r) {
    SKIM_EXPECTS(o.ahead >= 0.0 && o.ahead <= 1.0, "local steps: ahead must be in [0, 1]");
    SKIM_EXPECTS(o.outer_lr >= 0.0 && o.outer_lr <= double{std::numeric_limits<float>::max()},
                 "local steps: outer_lr must be >= 0, and finite as a float");
    SKIM_EXPECTS(o.outer_momentum >= 0.0 && o.outer_momentum < 1.0,
                 "local steps: outer_momentum must be in [0, 1)");
    for (const Slot slot : reducer.local().slots()) {
      const std::size_t n = reducer.local().size(slot);
      parts.push_back({slot, std::vector<float>(n), std::vector<float>(momentum() ? n : 0)});
    }
    SKIM_EXPECTS(!parts.empty(), "local steps: the reducer has no layout yet");
  }

  bool momentum() const { return outer_momentum > 0.0F; }

  Part& part(Slot slot, std::size_t n) {
    const auto found = std::ranges::find(parts, slot, &Part::slot);
    SKIM_EXPECTS(found != parts.end(),
                 "local steps: slot " + std::to_string(slot) + " is not in the layout");
    SKIM_EXPECTS(n == found->x.size(), "local steps: slot " + std::to_string(slot) + " has " +
                                           std::to_string(found->x.size()) + " entries, not " +
                                           std::to_string(n));
    SKIM_EXPECTS(n == reducer.local().size(slot),
                 "local steps: slot " + std::to_string(slot) + " has " +
                     std::to_string(reducer.local().size(slot)) +
                     " entries in the reducer's layout, and had " + std::to_string(n) +
                     "; make LocalSteps anew after set_layout");
    return *found;
  }

  // Calls f(i, x_i - a e_i) for each entry.
  template <class F>
  void each_start(const Part& p, F f) {
    const std::span<const float> e =
        ahead > 0.0F ? reducer.local().residual(p.slot).span() : std::span<const float>();
    if (e.empty()) {
      for (std::size_t i = 0; i < p.x.size(); ++i) f(i, p.x[i]);
    } else {
      for (std::size_t i = 0; i < p.x.size(); ++i) f(i, p.x[i] - ahead * e[i]);
    }
  }

  // r for a bucket in a round.
  float outer_lr_of(const StepReport& report) const {
    if (!follows_density) return outer_lr;
    if (report.n == 0) return 1.0F;
    const double density = static_cast<double>(report.k) / static_cast<double>(report.n);
    return static_cast<float>(outer_lr_for(reducer.ranks_of_mean(), density));
  }

  void outer_step(Part& p, std::span<const float> mean, float r) const {
    for (std::size_t i = 0; i < mean.size(); ++i) {
      float step = mean[i];
      if (momentum()) {
        p.v[i] = outer_momentum * p.v[i] + mean[i];
        step += outer_momentum * p.v[i];
      }
      p.x[i] -= r * step;
    }
  }

  // Waits for all, also if one fails.
  void wait_for_tickets(std::vector<StepReport>& reports) {
    std::exception_ptr first;
    reports.clear();
    for (const BucketTicket ticket : tickets) {
      try {
        reports.push_back(reducer.wait(ticket));
      } catch (...) {
        if (!first) first = std::current_exception();
      }
    }
    if (first) std::rethrow_exception(first);
  }

  float ahead;
  bool follows_density;  // r is outer_lr_for(), not outer_lr
  float outer_lr, outer_momentum;
  Reducer& reducer;
  std::vector<Part> parts;  // in the order of the layout
  std::vector<BucketTicket> tickets;
};

LocalSteps::LocalSteps(const LocalStepsOptions& options, Reducer& reducer)
    : impl_(std::make_unique<Impl>(options, reducer)) {}
LocalSteps::~LocalSteps() = default;

void LocalSteps::set_shared(Slot slot, std::span<const float> x) {
  std::ranges::copy(x, impl_->part(slot, x.size()).x.begin());
}

std::span<const float> LocalSteps::shared(Slot slot) const {
  return impl_->part(slot, impl_->reducer.local().size(slot)).x;
}

void LocalSteps::start(Slot slot, std::span<float> replica) {
  impl_->each_start(impl_->part(slot, replica.size()),
                    [&](std::size_t i, float at) { replica[i] = at; });
}

bool LocalSteps::exchange(std::span<const std::span<float>> replicas, double epoch,
                          std::vector<StepReport>& reports) {
  Impl& self = *impl_;
  SKIM_EXPECTS(replicas.size() == self.parts.size(),
               "local steps: exchange needs " + std::to_string(self.parts.size()) +
                   " replicas, one for each slot, not " + std::to_string(replicas.size()));
  for (std::size_t b = 0; b < replicas.size(); ++b) {
    self.part(self.parts[b].slot, replicas[b].size());
  }
  SKIM_EXPECTS(self.reducer.is_between_steps(),
               "local steps: exchange needs the whole step of the reducer, but the caller has "
               "reduced or started a bucket; call end_step or rollback_step first");
  // All residuals are read before the first bucket starts. From then on the local half belongs to
  // the reducer's thread.
  for (std::size_t b = 0; b < replicas.size(); ++b) {
    const std::span<float> p = replicas[b];
    self.each_start(self.parts[b], [&](std::size_t i, float at) { p[i] = at - p[i]; });
  }
  self.tickets.clear();
  for (std::size_t b = 0; b < replicas.size(); ++b) {
    self.tickets.push_back(self.reducer.start(self.parts[b].slot, replicas[b]));
  }
  self.wait_for_tickets(reports);
  const auto start_all = [&] {
    for (std::size_t b = 0; b < replicas.size(); ++b) start(self.parts[b].slot, replicas[b]);
  };
  bool applied = false;
  try {
    applied = self.reducer.end_step(epoch);
  } catch (const NonFiniteError&) {
    start_all();
    throw;
  }
  if (applied) {
    for (std::size_t b = 0; b < replicas.size(); ++b) {
      self.outer_step(self.parts[b], replicas[b], self.outer_lr_of(reports[b]));
    }
  }
  start_all();
  return applied;
}

void LocalSteps::save(std::ostream& out) const {
  SectionWriter w(out, kMagic, kVersion);
  w.put(static_cast<std::uint64_t>(impl_->parts.size()));
  for (const Impl::Part& p : impl_->parts) {
    w.put(static_cast<std::uint64_t>(p.v.size()));
    w.put(std::span<const float>(p.v));
  }
  w.end();
}

void LocalSteps::load(std::istream& in) {
  SectionReader reader(in, "state of local steps", kMagic, kVersion);
  std::vector<std::vector<float>> all;
  if (reader.get<std::uint64_t>() != impl_->parts.size()) {
    reader.fail("it is of other buckets");
  }
  for (const Impl::Part& p : impl_->parts) {
    if (reader.get<std::uint64_t>() != p.v.size()) {
      reader.fail("it is of other buckets, or of a run " +
                  std::string(impl_->momentum() ? "without" : "with") + " outer momentum");
    }
    reader.get(std::span<float>(all.emplace_back(p.v.size())));
  }
  reader.end();
  for (std::size_t b = 0; b < all.size(); ++b) impl_->parts[b].v = std::move(all[b]);
}

}  // namespace skim
