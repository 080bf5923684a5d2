// How many entries to keep at a given moment of training.
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
  double up = 1.0;         // k/n, in (0, 1]; 1: this bucket goes dense, unless down is less
  double down = 0.0;       // of the result, where the exchange compresses it; 0: as up
  float threshold = 0.0F;  // if > 0: keep what is at least this large, at most up * n
  // If a selector picks more than k entries, the smallest stay behind, so that the bytes of a step
  // have a bound whatever the selector.
  bool at_most_k = false;
};

// Equal on every rank, so that every rank decides alike.
struct Progress {
  std::uint64_t step = 0, total_steps = 0;  // total 0: not known
  double epoch = 0.0;                       // fractional
  GroupStats last = {};        // of the step before, over all slots; a skipped one's, too
  Density used = {.up = 0.0};  // what the step before went by; up 0: there was none
};

class DensitySchedule {
 public:
  virtual ~DensitySchedule() = default;
  // Called once or more for every step, in their order, with the same answer for the same p. What a
  // schedule remembers follows from what it was given, which is equal on all ranks.
  // Throws: InvalidArgument: where total_steps is told first, for steps that cannot be taken.
  virtual Density density(const Progress& p) = 0;
  // One word or a short phrase for reports: "0.001", "0.25 0.0625 ... then 0.001".
  virtual std::string describe() const = 0;
  // The share of its budget that the steps before the last answer's have spent, as far as that is
  // known; < 0: there is none.
  virtual double spent() const noexcept { return -1.0; }

  // What it remembers, part of a checkpoint. load reads what the same options saved; a run that
  // goes on with another number of ranks starts without. Throws: StateError (nothing changed).
  virtual void save(std::ostream&) const {}
  virtual void load(std::istream&) {}
};

// Throw InvalidArgument for a density outside (0, 1].
std::unique_ptr<DensitySchedule> constant_density(double up, double down = 0.0);
// One density an epoch, then `last`. The lists of the papers are below.
std::unique_ptr<DensitySchedule> listed_density(std::vector<double> per_epoch, double last);
// Falls geometrically from `from` to `to` over the first `epochs` (>= 0), then stays:
// from * (to / from)^(epoch / epochs).
std::unique_ptr<DensitySchedule> geometric_density(double from, double to, double epochs);
// What `up` gives, with this Density::down in every step.
std::unique_ptr<DensitySchedule> with_down(std::unique_ptr<DensitySchedule> up, double down);

// Deep gradient compression (Lin et al., ICLR 2018): 0.25, 0.0625, 0.015625, 0.004; then 0.001.
std::vector<double> dgc_warm_up();
// Gaussian_k (arXiv 1911.08772), released settings: 0.015625, 0.004, 0.001; then 0.001.
std::vector<double> gaussiank_warm_up();
// gTop-k (arXiv 1901.04359), released settings: 0.004; then 0.001.
std::vector<double> gtopk_warm_up();

// ---- densities that follow what is measured -----------------------------------------------------

// The most that one step costs the busiest rank at a density in (0, 1]; finite, > 0 or all 0, and
// not falling. most_bytes() and predicted_seconds() of reducer.hpp make it.
using StepCost = std::function<double(double density)>;

// How what top-k leaves behind depends on kappa = k/n: phi(kappa) = |u - Top_k(u)|^2 / |u|^2.
enum class AdaptiveForm : std::uint8_t {
  even,           // does not matter: all steps alike, the constant density that fits the budget
  water_filling,  // (1 - kappa)^2, the bound for bell-shaped u (analysis::bell_bound)
  laplace,        // of a Laplace distribution over so many of the entries as fits what was measured
  measured,       // as it is: one threshold for all ranks and buckets, and k what reaches it
  // With error feedback what is left out is late, not lost: kappa^-2, by what top-k surely captures
  // of u in a step, kappa. The optimum has k in proportion to the learning rate to the power 2/3.
  feedback,
};
// The names that the command line knows, in enumerator order.
template <>
std::span<const std::string_view> names_of<AdaptiveForm>() noexcept;

struct AdaptiveOptions {
  AdaptiveForm form = AdaptiveForm::feedback;
  double budget = 0.0;  // of the whole run, in the unit of cost; > 0
  StepCost cost;
  // True: cost is in bytes, and what was spent is what the group's statistics tell. False: it is in
  // predicted seconds, and cost itself is what was spent: clocks differ between ranks.
  bool in_bytes = true;
  double density_min = 1e-4, density_max = 0.25;  // in (0, 1], min <= max
  // a = 1 - mu eta in (0, 1], by which a step of size eta shrinks the error where the loss is
  // mu-PL: what a step leaves out weighs a^(steps that follow). 1: all steps alike. Not with
  // feedback, where errors are taken to shrink as the rate does.
  double contraction = 1.0;
  // eta of a step, >= 0, the same on all ranks and in a resumed run; empty: the same in all steps.
  std::function<double(std::uint64_t step)> learning_rate{};
  // GroupStats::gradient_norm2 is of gradients times eta, as with GradView::scale = 1 / eta.
  bool norms_of_updates = false;
  std::size_t n = 0;  // measured: entries of a gradient, over all buckets; > 0
  int ranks = 0;      // measured: P; > 0
};
// Chooses the density of every step so that the bound on the final error (analysis::error_bound) is
// least for the budget: docs/adaptive.md has the derivation. From the group's norms and bytes of
// the step before; a step that was skipped counts for its bytes alone.
//
// Law: with in_bytes, where cost bounds what the busiest rank sends in a step, its bytes over all
// total_steps never exceed the budget, and fall short of it by less than the largest cost of a step
// taken; unless all steps at density_max cost less. With seconds the same holds for predictions.
// total_steps 0: density_min.
// Cost: O(1) evaluations of `cost`; no allocation after the first step.
// Throws: InvalidArgument: an option out of range; at the first step, a budget that is less than
// all steps take at density_min.
// Source: the problem is that of M. Ruan, G. Yan, Y. Xiao, L. Song, W. Xu, "Adaptive Top-K in SGD
// for Communication-Efficient Distributed Learning", arXiv 2210.13532; the solution is derived.
std::unique_ptr<DensitySchedule> adaptive_density(AdaptiveOptions options);

// The density at which the selection has this share of |u|^2, in (0, 1), by the tail that the step
// before measured. Derived.
std::unique_ptr<DensitySchedule> capture_density(double share, double density_min,
                                                 double density_max);

// Two levels: `high` while the gradient changes, else `low`; from one epoch to the next, and for
// the first two, it changes if the root mean square norm of gradients differs by `change` or more
// of that before. S. Agarwal, H. Wang, K. Lee, S. Venkataraman, D. Papailiopoulos, "Accordion:
// Adaptive Gradient Communication via Critical Learning Regime Identification", arXiv 2010.16248,
// there with change = 0.5.
std::unique_ptr<DensitySchedule> accordion_density(double low, double high, double change = 0.5);

// The density with the most |selected|^2 / |u|^2 for what a step costs, by the tail that the step
// before measured. S. Khirirat, S. Magnusson, A. Aytekin, M. Johansson, "A Flexible Framework for
// Communication-Efficient Machine Learning", arXiv 2003.06377.
std::unique_ptr<DensitySchedule> descent_per_bit_density(StepCost cost, double density_min,
                                                         double density_max);

// k of a bucket of n entries: floor(density * n), at least 1 and at most n (n = 0: 0), as
// arXiv 1911.08772 rounds it. A product within 1e-9 below an integer counts as that integer, so
// that 0.29 of 100 is 29. Throws: InvalidArgument for a density outside (0, 1].
std::size_t entries(double density, std::size_t n);

}  // namespace skim
