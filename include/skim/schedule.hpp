// Schedules: they choose the density of each training step.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "skim/names.hpp"
#include "skim/types.hpp"

namespace skim {

struct Density {
  double up = 1.0;         // k/n, in (0, 1]; 1: the bucket goes dense, unless down is less
  double down = 0.0;       // density of the result, if the exchange compresses it; 0: same as up
  float threshold = 0.0F;  // if > 0: keep only entries at least this large, at most up * n
  // If a selector picks more than k entries, the smallest stay behind. So the bytes of a step have
  // a bound with any selector.
  bool at_most_k = false;
};

// The input of a schedule. It is equal on every rank, so every rank decides alike.
struct Progress {
  std::uint64_t step = 0, total_steps = 0;  // total 0: not known
  double epoch = 0.0;                       // fractional; negative or NaN counts as 0
  // Of the previous step, over all slots, even if it was skipped. If that step reduced no bucket,
  // these are all 0, but for sent_bytes, which stays. After Reducer::abandon_step, these and `used`
  // are of the step before the abandoned one.
  GroupStats last = {};
  Density used = {.up = 0.0};  // density of the last step that reduced a bucket; up 0: none did
  // The most bytes that the busiest rank can have sent besides last.sent_bytes: the sum of
  // DensitySchedule::max_bytes over the steps whose bytes are not known yet.
  double unknown_bytes = 0.0;
};

class DensitySchedule {
 public:
  virtual ~DensitySchedule() = default;
  // Called at least once for every step, in the order of steps. Must return the same answer for the
  // same p. A schedule may remember only values that follow from its arguments, because those are
  // equal on all ranks. Throws: InvalidArgument at the first call that tells total_steps, if the
  // schedule cannot take that many steps.
  virtual Density density(const Progress& p) = 0;
  // One word or a short phrase for reports: "0.001", "0.25 0.0625 ... then 0.001".
  virtual std::string describe() const = 0;
  // The fraction of the budget that was spent before the step of the last answer, as far as it is
  // known. < 0: the schedule has no budget.
  virtual double spent() const noexcept { return -1.0; }
  // The most bytes that the busiest rank can send in one step of this density, which density() has
  // answered. 0: the schedule has no budget in bytes.
  virtual double max_bytes(const Density&) const { return 0.0; }

  // The schedule's state, as part of a checkpoint. load needs the options that saved the state. A
  // run that resumes with another number of ranks starts without it.
  // Throws: StateError (nothing changed).
  virtual void save(std::ostream&) const {}
  virtual void load(std::istream&) {}
};

// The functions below throw InvalidArgument for a density outside (0, 1].
std::unique_ptr<DensitySchedule> constant_density(double up, double down_density = 0.0);
// One density per epoch, then `last`. The lists of the papers are below.
std::unique_ptr<DensitySchedule> listed_density(std::vector<double> per_epoch, double last);
// Falls geometrically from `from` to `to` over the first `epochs` (>= 0), then stays at `to`:
// from * (to / from)^(epoch / epochs).
std::unique_ptr<DensitySchedule> geometric_density(double from, double to, double epochs);
// The schedule `up`, with down_density as Density::down in every step.
std::unique_ptr<DensitySchedule> with_down_density(std::unique_ptr<DensitySchedule> up,
                                                   double down_density);

// Deep gradient compression (Lin et al., ICLR 2018): 0.25, 0.0625, 0.015625, 0.004; then 0.001.
std::vector<double> dgc_warm_up();
// Gaussian_k (arXiv 1911.08772), released settings: 0.015625, 0.004, 0.001; then 0.001.
std::vector<double> gaussiank_warm_up();
// gTop-k (arXiv 1901.04359), released settings: 0.004; then 0.001.
std::vector<double> gtopk_warm_up();

// ---- densities that follow measurements ---------------------------------------------------------

// The most that one step can cost the busiest rank at a density in (0, 1]. The costs are finite and
// do not fall as the density rises, but at 1, where a dense sum may cost less than nearly all
// entries: with a density_max of 1 a budget may then buy fewer entries than it could. They are all
// > 0, or all 0. max_step_bytes() and predicted_seconds() of reducer.hpp make such functions.
using StepCost = std::function<double(double density)>;

// Models of the error that top-k leaves at kappa = k/n: phi(kappa) = |u - Top_k(u)|^2 / |u|^2.
enum class AdaptiveForm : std::uint8_t {
  even,           // no model: every step gets the constant density that fits the budget
  water_filling,  // (1 - kappa)^2, the bound for bell-shaped u (analysis::bell_bound)
  laplace,        // a Laplace distribution over the fraction of entries that fits the measurements
  measured,       // as measured: ranks and buckets share one threshold, and k entries reach it
  // With error feedback, entries that are left out are late but not lost. kappa is the part of u
  // that top-k surely captures in a step, and phi is kappa^-2. The optimal k is proportional
  // to the learning rate to the power 2/3.
  feedback,
};
// The names that the command line knows, in enumerator order.
template <>
std::span<const std::string_view> names_of<AdaptiveForm>() noexcept;

struct AdaptiveOptions {
  AdaptiveForm form = AdaptiveForm::feedback;
  double budget = 0.0;  // of the whole run, in the unit of `cost`; > 0
  StepCost cost;
  // True: cost is in bytes, and the group's statistics tell how many were spent. False: cost is in
  // predicted seconds, and the predictions count as spent, because clocks differ between ranks.
  bool in_bytes = true;
  double density_min = 1e-4, density_max = 0.25;  // in (0, 1], min <= max
  // a = 1 - mu eta in (0, 1]. A step of size eta shrinks the error by this factor if the loss is
  // mu-PL, so the error that a step leaves weighs a^(steps that follow). 1: all steps weigh alike.
  // Not with the form `feedback`, which assumes that errors shrink as the rate does.
  double contraction = 1.0;
  // eta of a step, >= 0, the same on all ranks and in a resumed run. Empty: the same in all steps.
  std::function<double(std::uint64_t step)> learning_rate{};
  // True: GroupStats::gradient_norm2 is of gradients times eta, as with GradView::scale = 1 / eta.
  bool norms_of_updates = false;
  std::size_t n = 0;  // measured: entries of a gradient, over all buckets; > 0
  int ranks = 0;      // measured: P; > 0
};
// Spends a budget over a run. It chooses the density of every step so that the bound on the final
// error (analysis::error_bound) is least. docs/adaptive.md has the derivation. Its input is the
// group's norms and bytes of the previous step. If that step was skipped, only its bytes count.
//
// Law (with in_bytes, if `cost` bounds the bytes that the busiest rank sends in a step): the bytes
// of the busiest rank over all total_steps never exceed the budget. They fall short of it by less
// than the largest cost of a step taken, unless all steps at density_max cost less than the budget.
// With seconds, the same holds for the predicted seconds.
// If total_steps is 0, every step gets density_min.
// Cost: O(1) evaluations of `cost`; no allocation after the first step.
// Throws: InvalidArgument: an option is out of range; at the first step, the budget is less than
// the cost of all steps at density_min.
// Source: the problem is from M. Ruan, G. Yan, Y. Xiao, L. Song, W. Xu, "Adaptive Top-K in SGD for
// Communication-Efficient Distributed Learning", arXiv 2210.13532; the solution is derived.
std::unique_ptr<DensitySchedule> adaptive_density(AdaptiveOptions options);

// Chooses the density at which the selection captures `share`, in (0, 1), of |u|^2. It estimates
// this from the tail that the previous step measured. Derived.
std::unique_ptr<DensitySchedule> capture_density(double share, double density_min,
                                                 double density_max);

// Two levels: `high` while the gradient changes, `low` otherwise. It compares the root mean square
// norm of the gradients of one epoch with that of the epoch before. The gradient changes if the two
// differ by at least `change` times the earlier one. The first two epochs count as changing.
// Source: S. Agarwal, H. Wang, K. Lee, S. Venkataraman, D. Papailiopoulos, "Accordion: Adaptive
// Gradient Communication via Critical Learning Regime Identification", arXiv 2010.16248, with
// change = 0.5.
std::unique_ptr<DensitySchedule> accordion_density(double low, double high, double change = 0.5);

// Chooses the density with the most |selected|^2 / |u|^2 per unit of the step's cost. It estimates
// this from the tail that the previous step measured.
// Source: S. Khirirat, S. Magnusson, A. Aytekin, M. Johansson, "A Flexible Framework for
// Communication-Efficient Machine Learning", arXiv 2003.06377.
std::unique_ptr<DensitySchedule> descent_per_bit_density(StepCost cost, double density_min,
                                                         double density_max);

// Returns k for a bucket of n entries: floor(density * n), at least 1 and at most n (0 if n is 0).
// arXiv 1911.08772 rounds the same way. A product that lies below an integer only by rounding (by
// at most 1e-9, or 2^-51 of itself) counts as that integer, so 0.29 of 100 is 29.
// Throws: InvalidArgument for a density outside (0, 1].
std::size_t entries(double density, std::size_t n);

}  // namespace skim
