// Densities that follow measurements: under a budget, and rules to compare with it.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>

#include "schedule/shortest.hpp"
#include "skim/analysis.hpp"
#include "skim/error.hpp"
#include "skim/schedule.hpp"
#include "state.hpp"

namespace skim {
namespace {

constexpr std::string_view kMagic = "SKIMSCHE";
constexpr std::uint32_t kVersion = 1, kBudgetVersion = 2;

void expect_range(double least, double most, const char* who) {
  SKIM_EXPECTS(least > 0.0 && least <= most && most <= 1.0,
               std::string(who) + ": densities must be in (0, 1], min <= max (min " +
                   shortest(least) + ", max " + shortest(most) + ")");
}

// Whether the step has norms to learn from. A skipped step may have none.
bool has_norms(const GroupStats& s) {
  return s.non_finite == 0 && std::isfinite(s.accumulated_norm2) && s.accumulated_norm2 > 0.0 &&
         std::isfinite(s.gradient_norm2) && s.gradient_norm2 > 0.0 && std::isfinite(s.sent_norm2);
}

// ---- the tail ---------------------------------------------------------------------------------

// The share of the squares that the largest fraction exp(-tau) of Laplace magnitudes holds.
double share_of(double tau) { return 1.0 - analysis::laplace_ratio(std::exp(-tau)); }

// The inverse of share_of, for a share in (0, 1).
double tau_of(double share) {
  double low = 0.0, high = 64.0;  // share_of falls
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (low + high);
    (share_of(middle) > share ? low : high) = middle;
  }
  return 0.5 * (low + high);
}

// Models u: a fraction exp(log_width) of its entries are Laplace, and the others are 0. A selection
// of kappa n entries is then the largest fraction exp(-tau) of the Laplace entries, with tau =
// log_width - ln kappa. The model has one parameter because one measured share determines no more.
// A width above 1 stands for a lighter tail.
class Tail {
 public:
  double log_width() const noexcept { return log_width_; }
  double share(double log_kappa) const { return share_of(std::max(0.0, log_width_ - log_kappa)); }

  // The tau at which a Laplace tail would give the selection its measured share of |u|^2.
  static std::optional<double> tau(const GroupStats& s) {
    if (!has_norms(s)) return std::nullopt;
    return tau_of(std::clamp(s.sent_norm2 / s.accumulated_norm2, 1e-9, 1.0 - 1e-9));
  }
  void observe(double log_width) {
    constexpr double kRate = 0.1;
    log_width_ += (known_ ? kRate : 1.0) * (log_width - log_width_);
    known_ = true;
  }
  // Call after a step that kept the fraction p.used.up.
  void observe(const Progress& p) {
    const std::optional<double> at = tau(p.last);
    if (at && p.used.up > 0.0 && p.used.up < 1.0) observe(std::log(p.used.up) + *at);
  }

  void save(SectionWriter& out) const {
    out.put(log_width_);
    out.put(static_cast<std::uint8_t>(known_));
  }
  void load(SectionReader& in) {
    log_width_ = in.get<double>();
    known_ = in.get<std::uint8_t>() != 0;
  }

 private:
  double log_width_ = 0.0;
  bool known_ = false;
};

// ---- the trend --------------------------------------------------------------------------------

// Extrapolates ln |g|^2. A trend seen over n steps says little beyond about n more steps, so this
// extrapolates the slope against ln(step), not the slope against the step. Two running means have
// weights 9/(i + 9) and 2/(i + 2). After i steps of a straight line, they lag it by i/10 and i/3
// steps. Their difference gives the slope, without a window to choose.
//
// Only a falling trend counts. Norms also grow because little is sent: the residual by the entries
// held back, the gradient because nothing is learned. A schedule that sends less because norms grow
// would make them grow further. For the same reason this does not follow |u|^2.
class Trend {
 public:
  void observe(double norm2) {
    const double x = std::log(norm2);
    last_ = x;
    if (count_ == 0.0) near_ = far_ = x;
    near_ += kNear / (count_ + kNear) * (x - near_);
    far_ += kFar / (count_ + kFar) * (x - far_);
    count_ += 1.0;
  }
  // How far the last value lies above the trend; at least 0.
  double excess() const noexcept { return std::max(0.0, last_ - near_ - power() / (kNear + 1.0)); }
  // The change that the trend expects over the next `steps` steps; <= 0. The first steps of a run
  // count little, because they say little.
  double growth(double steps) const noexcept {
    constexpr double kMost = 4.0, kFew = 20.0;
    if (count_ < 2.0) return 0.0;
    const double sure = count_ / (count_ + kFew);
    return std::clamp(sure * power() * std::log1p(steps / count_), -kMost, 0.0);
  }

  void save(SectionWriter& out) const {
    for (const double x : {near_, far_, last_, count_}) out.put(x);
  }
  void load(SectionReader& in) {
    for (double* x : {&near_, &far_, &last_, &count_}) *x = in.get<double>();
  }

 private:
  static constexpr double kNear = 9.0, kFar = 2.0;
  double power() const noexcept {
    return (near_ - far_) / (1.0 / (kFar + 1.0) - 1.0 / (kNear + 1.0));
  }
  double near_ = 0.0, far_ = 0.0, last_ = 0.0, count_ = 0.0;
};

// ---- costs ------------------------------------------------------------------------------------

// A cost as a table over ln density, to sum the costs of future steps quickly.
class CostTable {
 public:
  CostTable(const StepCost& cost, double density_min, double density_max)
      : low_(std::log(density_min)), step_((std::log(density_max) - low_) / (kPoints - 1)) {
    for (std::size_t i = 0; i < kPoints; ++i) cost_[i] = cost(density(i));
  }
  static constexpr std::size_t kPoints = 129;
  double log_density(std::size_t i) const noexcept { return low_ + step_ * static_cast<double>(i); }
  double density(std::size_t i) const noexcept { return std::min(1.0, std::exp(log_density(i))); }
  double at_point(std::size_t i) const noexcept { return cost_[i]; }
  double operator()(double log_kappa) const noexcept {
    const double at = step_ > 0.0 ? (log_kappa - low_) / step_ : 0.0;
    if (!(at > 0.0)) return cost_.front();
    const auto i = static_cast<std::size_t>(at);
    if (i + 1 >= kPoints) return cost_.back();
    return cost_[i] + (at - static_cast<double>(i)) * (cost_[i + 1] - cost_[i]);
  }

 private:
  double low_, step_;
  std::array<double, kPoints> cost_{};
};

// ---- under a budget ---------------------------------------------------------------------------

class Adaptive final : public DensitySchedule {
 public:
  explicit Adaptive(AdaptiveOptions options) : o_(std::move(options)) {
    constexpr const char* kWho = "adaptive_density";
    SKIM_EXPECTS(is_named(o_.form), std::string(kWho) + ": unknown form");
    expect_range(o_.density_min, o_.density_max, kWho);
    SKIM_EXPECTS(std::isfinite(o_.budget) && o_.budget > 0.0,
                 std::string(kWho) + ": the budget must be finite and > 0 (got " +
                     shortest(o_.budget) + ")");
    SKIM_EXPECTS(o_.contraction > 0.0 && o_.contraction <= 1.0,
                 std::string(kWho) + ": the contraction must be in (0, 1] (got " +
                     shortest(o_.contraction) + ")");
    SKIM_EXPECTS(o_.cost != nullptr, std::string(kWho) + ": needs a cost");
    SKIM_EXPECTS(o_.form != AdaptiveForm::measured || (o_.n > 0 && o_.ranks > 0),
                 std::string(kWho) + ": measured needs n and ranks");
    SKIM_EXPECTS(!o_.norms_of_updates || o_.learning_rate != nullptr,
                 std::string(kWho) + ": norms of updates need a learning rate");
  }

  Density density(const Progress& p) override {
    if (p.total_steps == 0) return {.up = o_.density_min, .at_most_k = true};
    if (!table_) table_.emplace(o_.cost, o_.density_min, o_.density_max);
    expect_enough(p);
    observe(p);
    return choose(p);
  }

  std::string describe() const override {
    return "adaptive (" + std::string(name_of(o_.form)) + "), budget " + in_unit(o_.budget);
  }

  double spent() const noexcept override { return share_; }
  double max_bytes(const Density& d) const override { return o_.in_bytes ? o_.cost(d.up) : 0.0; }

  void save(std::ostream& out) const override {
    SectionWriter w(out, kMagic, kBudgetVersion);
    w.put(seen_);
    for (const double x :
         {sent_, spent_, answer_cost_, ratio_, planned_, planned_last_, mean_square_}) {
      w.put(x);
    }
    tail_.save(w);
    trend_.save(w);
    w.end();
  }
  void load(std::istream& in) override {
    SectionReader r(in, "adaptive density: the saved state", kMagic, kBudgetVersion);
    Adaptive loaded(o_);
    loaded.seen_ = r.get<std::uint64_t>();
    for (double* x : {&loaded.sent_, &loaded.spent_, &loaded.answer_cost_, &loaded.ratio_,
                      &loaded.planned_, &loaded.planned_last_, &loaded.mean_square_}) {
      *x = r.get<double>();
    }
    loaded.tail_.load(r);
    loaded.trend_.load(r);
    r.end();
    *this = std::move(loaded);
  }

 private:
  // Checks that the budget covers all steps at density_min. It then also does so after every step,
  // because no step costs more than it was allowed.
  void expect_enough(const Progress& p) {
    if (p.total_steps == total_ && (p.step <= seen_ || follows(p))) return;
    const double least = table_->at_point(0);
    SKIM_EXPECTS(std::isfinite(least), "adaptive_density: the cost has no bound");
    const double steps = left(p), need = steps * least;
    const double has = o_.budget - known(p) - unknown(p);
    const bool is_over = p.step >= p.total_steps;  // then no step has to fit
    if (!is_over && need > has * (1.0 + 1e-12)) {
      throw InvalidArgument("adaptive density: a budget of " + in_unit(o_.budget) +
                            " is too small: " + shortest(steps) + " steps at the least density, " +
                            shortest(o_.density_min) + ", take " + in_unit(need) +
                            (has < o_.budget ? ", and " + shortest(has) + " is left" : ""));
    }
    total_ = p.total_steps;
  }
  std::string in_unit(double cost) const {
    return shortest(cost) + (o_.in_bytes ? " bytes" : " predicted seconds");
  }
  static double left(const Progress& p) {
    return p.total_steps > p.step ? static_cast<double>(p.total_steps - p.step) : 1.0;
  }

  // The last answer was for the step before. Otherwise the steps since then were of another group,
  // which had other costs, or their number was not known.
  bool follows(const Progress& p) const { return p.step == seen_ + 1 && planned_ > 0.0; }

  // The cost that is certain, and the largest possible cost of the last steps, whose bytes are not
  // known yet. The group may have had another size in these steps, and so another cost.
  double known(const Progress& p) const {
    if (o_.in_bytes) return static_cast<double>(p.last.sent_bytes);
    if (p.step <= seen_) return spent_;
    if (follows(p)) return spent_ + answer_cost_;
    // After a run on another number of ranks, only its progress is known.
    return o_.budget * static_cast<double>(p.step) / static_cast<double>(p.total_steps);
  }
  double unknown(const Progress& p) const {
    if (!o_.in_bytes) return 0.0;
    return std::max(p.unknown_bytes, p.used.up > 0.0 ? o_.cost(p.used.up) : 0.0);
  }

  void observe(const Progress& p) {
    if (p.step <= seen_) return;
    spent_ = known(p);
    if (!follows(p)) planned_ = 0.0;
    seen_ = p.step;
    if (o_.in_bytes) {
      const auto sent = static_cast<double>(p.last.sent_bytes);
      if (planned_ > 0.0 && planned_last_ > 0.0) {
        const double expected = (*table_)(std::log(planned_last_));
        constexpr double kRate = 0.2;
        if (expected > 0.0) ratio_ += kRate * ((sent - sent_) / expected - ratio_);
      }
      sent_ = sent;
    }
    planned_last_ = planned_;
    if (!has_norms(p.last)) return;
    // Divides the norm by the learning rate of the step before. The schedule knows future rates, so
    // the trend must not contain them.
    const double unit = o_.norms_of_updates ? rate(p.step - 1) : 1.0;
    trend_.observe(p.last.gradient_norm2 / unit / unit);
    mean_square_ = p.last.accumulated_norm2 / (static_cast<double>(o_.n) * o_.ranks);
    if (o_.form == AdaptiveForm::measured && p.used.threshold > 0.0F) {
      observe_threshold(p);
    } else {
      tail_.observe(p);
    }
  }

  // With a Laplace scale b, the selection above a threshold thr has tau = thr / b. The mean square
  // over all entries is 2 b^2 width. Together they give the width. If the step kept fewer entries
  // than reached the threshold, the kept fraction gives a smaller width.
  void observe_threshold(const Progress& p) {
    const std::optional<double> tau = Tail::tau(p.last);
    if (!tau || !(*tau > 0.0)) return;
    const double scale = double{p.used.threshold} / *tau;
    const double width = mean_square_ / (2.0 * scale * scale);
    if (width > 0.0) tail_.observe(std::min(std::log(width), std::log(p.used.up) + *tau));
  }

  Density choose(const Progress& p) {
    const double steps = left(p);
    const double least = table_->at_point(0);
    const double room = o_.budget - known(p) - unknown(p) - (steps - 1.0) * least;
    const double last =
        o_.in_bytes && planned_last_ > 0.0 ? ratio_ * (*table_)(std::log(planned_last_)) : 0.0;
    const double expected = o_.budget - known(p) - last;
    share_ = 1.0 - expected / o_.budget;
    // The plan reserves more for a step than the step costs. The excess is free again two steps
    // later, which is too late at the end of the run. So the plan ends earlier, the looser the
    // bound is, and the last steps take all the room there is.
    const double early = std::floor(4.0 * std::max(0.0, 1.0 / ratio_ - 1.0));
    const double planned_steps = std::max(1.0, steps - early);
    const double x = multiplier(p.step, planned_steps, expected);
    const double wanted = planned_steps > 1.0 ? std::clamp(std::exp(log_kappa(x, factor(0.0))),
                                                           o_.density_min, o_.density_max)
                                              : o_.density_max;

    Density d{.up = wanted, .at_most_k = true};
    // A threshold leaves the number of entries open. It is not used in the last steps, which must
    // close the budget. It is also not used where later steps could not make up for an expensive
    // one.
    constexpr double kClosing = 4.0, kMostShare = 0.5;
    const bool open =
        planned_steps > kClosing &&
        expected < kMostShare * ratio_ * steps * table_->at_point(CostTable::kPoints - 1);
    if (o_.form == AdaptiveForm::measured && open) {
      // If a norm scatters upwards, the threshold stays at the trend's, so k grows with the norm. A
      // norm that fell may stay low, so the threshold follows it.
      const double mean_square = mean_square_ * std::exp(-trend_.excess());
      d.threshold =
          static_cast<float>(x * std::sqrt(0.5 * mean_square / std::exp(tail_.log_width())));
      // Leaves room for a norm that jumps. Its possible cost stays reserved until the step is
      // known.
      constexpr double kRoom = 2.0;
      if (d.threshold > 0.0F) d.up = std::min(kRoom * wanted, o_.density_max);
    }
    d.up = within(d.up, room);
    planned_ = std::min(wanted, d.up);
    if (!o_.in_bytes) answer_cost_ = o_.cost(d.up);
    return d;
  }

  // The largest density up to `wanted` that costs at most `room`, but at least density_min.
  double within(double wanted, double room) const {
    if (o_.cost(wanted) <= room) return wanted;
    double low = std::log(o_.density_min), high = std::log(wanted);
    for (int i = 0; i < 50; ++i) {
      const double middle = 0.5 * (low + high);
      (o_.cost(std::exp(middle)) <= room ? low : high) = middle;
    }
    return std::max(o_.density_min, std::exp(low));
  }

  // ln kappa of a step, for a multiplier x >= 0; it falls as x grows. `factor` is factor() of the
  // step's log weight relative to this step. The result minimises
  // sum_s w_s phi(kappa_s) + lambda kappa_s:
  //   water_filling  2 w (1 - kappa) = lambda        x = lambda / (2 w_0)
  //   laplace        w tau^2 / (2 width) = lambda    x = tau of this step
  //   feedback       2 w / kappa^3 = lambda          x = -ln kappa of this step
  double log_kappa(double x, double factor) const {
    switch (o_.form) {
      case AdaptiveForm::even:
        return -x;
      case AdaptiveForm::feedback:
        return factor - x;
      case AdaptiveForm::water_filling: {
        const double kappa = 1.0 - x * factor;
        return kappa > 0.0 ? std::log(kappa) : -std::numeric_limits<double>::infinity();
      }
      case AdaptiveForm::laplace:
      case AdaptiveForm::measured:
        break;
    }
    return tail_.log_width() - x * factor;
  }
  double factor(double log_weight) const {
    if (o_.form == AdaptiveForm::feedback) return log_weight / 3.0;
    return std::exp(o_.form == AdaptiveForm::water_filling ? -log_weight : -0.5 * log_weight);
  }
  double rate(std::uint64_t step) const {
    // A rate of 0 learns nothing and has no logarithm, so a tiny rate replaces it.
    constexpr double kLeast = 1e-100;
    return o_.learning_rate ? std::max(kLeast, o_.learning_rate(step)) : 1.0;
  }
  // ln of the weight of the step `ahead` steps later, relative to the weight of this step.
  //   feedback    w_t = eta_t^2. A late entry is eta |g|, which counts squared and times eta. Later
  //               steps shrink its error as fast as the loss that noise leaves, which is about eta.
  //   the others  w_t = eta_t |g_t|^2 a^-t
  double log_weight(std::uint64_t step, double ahead) const {
    const double rates = std::log(rate(step + static_cast<std::uint64_t>(ahead)) / rate(step));
    if (o_.form == AdaptiveForm::feedback) return 2.0 * rates;
    return rates + trend_.growth(ahead) - ahead * std::log(o_.contraction);
  }
  // The multiplier at which this step gets density_min.
  double largest_multiplier() const {
    if (o_.form == AdaptiveForm::water_filling) return 1.0;
    return std::max(0.0, log_kappa(0.0, 1.0) - std::log(o_.density_min));
  }

  // The x at which the remaining steps are expected to cost `budget`, or the largest x if even that
  // costs more. If many steps remain, kNodes of them represent all: each lies in the middle of the
  // steps that it represents.
  double multiplier(std::uint64_t step, double steps, double budget) const {
    constexpr std::size_t kNodes = 64;
    std::array<double, kNodes> factors{}, count{};
    const auto nodes = static_cast<std::size_t>(std::min<double>(steps, kNodes));
    factors[0] = factor(0.0);  // this step
    count[0] = 1.0;
    for (std::size_t i = 1; i < nodes; ++i) {
      count[i] = (steps - 1.0) / static_cast<double>(nodes - 1);
      const double at = 0.5 + (static_cast<double>(i) - 0.5) * count[i];
      factors[i] = factor(log_weight(step, at));
    }
    const auto cost = [&](double x) {
      double sum = 0.0;
      for (std::size_t i = 0; i < nodes; ++i) sum += count[i] * (*table_)(log_kappa(x, factors[i]));
      return ratio_ * sum;
    };
    double low = 0.0, high = largest_multiplier();
    for (int i = 0; i < 60; ++i) {
      const double middle = 0.5 * (low + high);
      (cost(middle) > budget ? low : high) = middle;
    }
    return high;
  }

  AdaptiveOptions o_;
  std::optional<CostTable> table_;
  std::uint64_t total_ = 0;  // total steps for which the budget was checked
  double share_ = 0.0;       // of the budget, spent

  std::uint64_t seen_ = 0;    // the step up to which the members below have learned
  double sent_ = 0.0;         // bytes, as last reported
  double spent_ = 0.0;        // as known() said when this step began
  double answer_cost_ = 0.0;  // predicted, of the last answer
  double ratio_ = 1.0;        // of the bytes of a step to its cost
  // Expected densities of this step and the last; 0: there was no such step.
  double planned_ = 0.0, planned_last_ = 0.0;
  double mean_square_ = 0.0;  // of the entries of u, over the group
  Tail tail_;
  Trend trend_;
};

// ---- rules to compare with --------------------------------------------------------------------

// Rules that compute the density from the tail.
class OfTail : public DensitySchedule {
 public:
  Density density(const Progress& p) final {
    if (p.step > seen_) tail_.observe(p);
    seen_ = p.step;
    return {.up = choose(tail_)};
  }
  void save(std::ostream& out) const final {
    SectionWriter w(out, kMagic, kVersion);
    w.put(seen_);
    tail_.save(w);
    w.end();
  }
  void load(std::istream& in) final {
    SectionReader r(in, describe() + ": the saved state", kMagic, kVersion);
    const auto seen = r.get<std::uint64_t>();
    Tail tail;
    tail.load(r);
    r.end();
    seen_ = seen;
    tail_ = tail;
  }

 private:
  virtual double choose(const Tail& tail) const = 0;
  std::uint64_t seen_ = 0;
  Tail tail_;
};

class Capture final : public OfTail {
 public:
  Capture(double share, double least, double most) : share_(share), least_(least), most_(most) {
    expect_range(least, most, "capture_density");
    SKIM_EXPECTS(share > 0.0 && share < 1.0,
                 "capture_density: the share must be in (0, 1) (got " + shortest(share) + ")");
  }
  std::string describe() const override { return "capture " + shortest(share_); }

 private:
  double choose(const Tail& tail) const override {
    return std::clamp(std::exp(tail.log_width() - tau_of(share_)), least_, most_);
  }
  double share_, least_, most_;
};

class DescentPerBit final : public OfTail {
 public:
  DescentPerBit(const StepCost& cost, double least, double most) : table_(cost, least, most) {}
  std::string describe() const override { return "descent per bit"; }

 private:
  double choose(const Tail& tail) const override {
    std::size_t best = 0;
    double most = -1.0;
    for (std::size_t i = 0; i < CostTable::kPoints; ++i) {
      const double cost = table_.at_point(i);
      const double gain = cost > 0.0 ? tail.share(table_.log_density(i)) / cost : 0.0;
      if (gain > most) {
        most = gain;
        best = i;
      }
    }
    return table_.density(best);
  }
  CostTable table_;
};

class Accordion final : public DensitySchedule {
 public:
  Accordion(double low, double high, double change) : low_(low), high_(high), change_(change) {
    expect_range(low, high, "accordion_density");
    SKIM_EXPECTS(change > 0.0 && std::isfinite(change),
                 "accordion_density: the change must be > 0 (got " + shortest(change) + ")");
  }
  Density density(const Progress& p) override {
    if (p.step > seen_) observe(p);
    seen_ = p.step;
    return {.up = changes_ ? high_ : low_};
  }
  std::string describe() const override {
    return "accordion " + shortest(low_) + "/" + shortest(high_);
  }
  void save(std::ostream& out) const override {
    SectionWriter w(out, kMagic, kVersion);
    w.put(seen_);
    for (const double x : {epoch_, sum_, count_, before_}) w.put(x);
    w.put(static_cast<std::uint8_t>(changes_));
    w.end();
  }
  void load(std::istream& in) override {
    SectionReader r(in, "accordion density: the saved state", kMagic, kVersion);
    Accordion loaded = *this;
    loaded.seen_ = r.get<std::uint64_t>();
    for (double* x : {&loaded.epoch_, &loaded.sum_, &loaded.count_, &loaded.before_}) {
      *x = r.get<double>();
    }
    loaded.changes_ = r.get<std::uint8_t>() != 0;
    r.end();
    *this = loaded;
  }

 private:
  void observe(const Progress& p) {
    if (has_norms(p.last)) {
      sum_ += p.last.gradient_norm2;
      count_ += 1.0;
    }
    const double epoch = std::floor(p.epoch > 0.0 ? p.epoch : 0.0);
    if (!(epoch > epoch_) || count_ == 0.0) return;
    const double norm = std::sqrt(sum_ / count_);
    changes_ = !(before_ > 0.0) || std::abs(before_ - norm) >= change_ * before_;
    before_ = norm;
    sum_ = count_ = 0.0;
    epoch_ = epoch;
  }

  double low_, high_, change_;
  std::uint64_t seen_ = 0;
  double epoch_ = 0.0, sum_ = 0.0, count_ = 0.0;  // of this epoch
  double before_ = 0.0;                           // norm in the epoch before; 0: none
  bool changes_ = true;
};

}  // namespace

template <>
std::span<const std::string_view> names_of<AdaptiveForm>() noexcept {
  static constexpr std::array<std::string_view, 5> kNames{"even", "water-filling", "laplace",
                                                          "measured", "feedback"};
  return kNames;
}

std::unique_ptr<DensitySchedule> adaptive_density(AdaptiveOptions options) {
  return std::make_unique<Adaptive>(std::move(options));
}
std::unique_ptr<DensitySchedule> capture_density(double share, double density_min,
                                                 double density_max) {
  return std::make_unique<Capture>(share, density_min, density_max);
}
std::unique_ptr<DensitySchedule> accordion_density(double low, double high, double change) {
  return std::make_unique<Accordion>(low, high, change);
}
std::unique_ptr<DensitySchedule> descent_per_bit_density(StepCost cost, double density_min,
                                                         double density_max) {
  expect_range(density_min, density_max, "descent_per_bit_density");
  SKIM_EXPECTS(cost != nullptr, "descent_per_bit_density: needs a cost");
  return std::make_unique<DescentPerBit>(cost, density_min, density_max);
}

}  // namespace skim
