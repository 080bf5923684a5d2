// Analysis of the error that top-k leaves: published bounds, closed forms for two distributions,
// and measures of a gradient to compare with them. It is for experiments. Training does not use it.
//
// u is the vector that top-k selects from: residual plus gradient. It has d entries; k of them are
// kept, and kappa = k / d in [0, 1]. Top_k(u) holds the k entries of largest magnitude, Rand_k(u) k
// entries chosen at random. The "ratio" is |u - Top_k(u)|^2 / |u|^2, the part that stays behind. It
// is 0 for u = 0.
//
// Shi: S. Shi, X. Chu, K. C. Cheung, S. See, "Understanding Top-k Sparsification in Distributed
//      Deep Learning", arXiv 1911.08772, 2019.
//
// All functions are pure and may be called from any thread.
// Throws: InvalidArgument: an argument is outside its range, or u holds NaN or infinity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace skim::analysis {

// ---- bounds on the ratio ------------------------------------------------------------------------

// 1 - kappa. Holds for every u, with equality if all magnitudes are equal. It is also the mean
// ratio of Rand_k. S. Stich, J. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", arXiv
// 1809.07599, Lemma A.1.
double general_bound(double kappa);

// (1 - kappa)^2. Holds if the sorted squared magnitudes are convex. This is Shi's bound for
// bell-shaped u. It fails for magnitudes that gather away from 0, such as signs.
double bell_bound(double kappa);

// (1 - kappa)^3. Holds if the density of |u| does not increase, for example if u is symmetric about
// 0 and has its only mode there. The uniform distribution reaches it. Derived: the sorted
// magnitudes are then convex. So they lie above their chord through k and d to the left of k, and
// below it to the right. The chord alone gives the ratio ((d - k) / d)^3. The bound holds for the
// distribution; a sample of d entries strays from it by noise of order 1 / sqrt(d).
double unimodal_bound(double kappa);

// delta = (2 k d - k^2) / d^2, the contraction of bell_bound: ratio <= 1 - delta (Shi).
// Requires: k <= d, d > 0.
double bell_contraction(std::size_t k, std::size_t d);

// ---- the ratio of a distribution, as d grows (derived) ------------------------------------------

// Normal with mean 0: 1 - (kappa + 2 z phi(z)), where P(N > z) = kappa / 2 and phi is the density.
double normal_ratio(double kappa);

// Laplace with mean 0: 1 - kappa (1 + tau + tau^2 / 2), tau = ln(1 / kappa).
double laplace_ratio(double kappa);

// ---- convergence --------------------------------------------------------------------------------

// Bounds min over t <= T of E|grad f(x_t)|^2, for SGD with error feedback at step size
// 1 / sqrt(T + 1):
//   (2 (f(x_0) - f*) + L s2) / sqrt(T + 1) + 4 L^2 s2 (1 - delta) / (delta^2 (T + 1))
// S. P. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi, "Error Feedback Fixes SignSGD and other
// Gradient Compression Schemes", arXiv 1901.09847, Theorem II, at that step size (derived).
struct Convergence {
  double gap = 0.0;            // f(x_0) - f*, >= 0
  double smoothness = 0.0;     // L, >= 0
  double second_moment = 0.0;  // s2: of |g|, bounds E|g|^2, >= 0
  double delta = 1.0;          // contraction of the compression, in (0, 1]
  double steps = 0.0;          // T, >= 0
};
double convergence_bound(const Convergence& c);

// Bounds E[f(x_T)] - f* for x_{t+1} = x_t - eta Top_k(g_t), where K_t may change from step to step:
//   a^T gap + eta / 2 (sqrt(R) + sqrt(S))^2,  a = 1 - mu eta,
//   R = sum_t a^(T-1-t) E|g_t - Top_k(g_t)|^2,  S = sum_t a^(T-1-t) noise.
// Without noise the bound is a^T gap + eta / 2 sum_t a^(T-1-t) phi(K_t) |g_t|^2. Adaptive densities
// (schedule.hpp) minimise it. It holds if f is L-smooth with |grad f|^2 >= 2 mu (f - f*), eta is at
// most 1 / L, and noise >= E|g_t - grad f(x_t)|^2. Derived: docs/adaptive.md. It does not cover
// error feedback; feedback_bound() does.
struct SparseDescent {
  double gap = 0.0;                    // f(x_0) - f*, >= 0
  double mu = 0.0, step_size = 0.0;    // eta; both >= 0, mu eta <= 1
  std::span<const double> left_out{};  // [T]: |g_t - Top_k(g_t)|^2, >= 0
  double noise = 0.0;                  // >= 0
};
double error_bound(const SparseDescent& d);

// The bound with error feedback. It is for the virtual iterate x~_T = x_T - e_T, which has already
// taken the mass that the residual e_T still holds: x~_{t+1} = x~_t - eta_t g_t.
// Bounds E[f(x~_T)] - f* by
//   A_0 gap + sum_t A_{t+1} (L^2 / 2 eta_t |e_t|^2 + L / 2 eta_t^2 noise),
//   A_t = (1 - mu eta_t) ... (1 - mu eta_{T-1}).
// An entry that is left out counts in every step in which it is late. Over P ranks, e and g are
// means. It holds for f as above, and eta_t <= 1 / L. Derived: docs/adaptive.md.
struct FeedbackDescent {
  double gap = 0.0;                      // f(x_0) - f*, >= 0
  double mu = 0.0, smoothness = 0.0;     // 0 <= mu <= L
  std::span<const double> step_sizes{};  // [T]: eta_t >= 0, L eta_t <= 1
  std::span<const double> residuals{};   // [T]: |e_t|^2 >= 0, in units of x, before step t
  double noise = 0.0;                    // >= 0
};
double feedback_bound(const FeedbackDescent& d);

// ---- top-k on both links of a parameter server -------------------------------------------------

// Constants that bound the cost of top-k at the ranks, with one link compressed and with both. They
// are measured as in the program of H. Zou, H. De Sterck, J. Liu (arXiv 2209.15203), but both on
// the scale of means over the ranks. (The program's second constant divides a mean by a sum, so it
// is P times too small.)
//   one way    |Top_k(mean_p u_p) - mean_p Top_k(u_p)| / |g|
//   both ways  |Top_kd(h + mean_p u_p) - Top_kd(h + mean_p Top_k(u_p))| / |g|
//
//   u_p [d]  the vector that rank p selects from
//   g   [d]  the mean over the ranks of the gradients (or updates) that this step adds to the u_p
//   h   [d]  the mass that the server holds, as a mean (the sum over P)
// Ties as in a Selector. 0 for g = 0. Requires: equal lengths, k and k_down <= d. Cost: O(P d).
double one_way_constant(std::span<const std::span<const float>> u, std::span<const float> g,
                        std::size_t k);
double two_way_constant(std::span<const std::span<const float>> u, std::span<const float> g,
                        std::span<const float> h, std::size_t k, std::size_t k_down);

// ---- measures of u ------------------------------------------------------------------------------

// The ratio of u, summed in double. Ties do not change it.
// Requires: k <= d. Cost: O(d), a copy of u.
double top_k_ratio(std::span<const float> u, std::size_t k);

// Moments of the entries as a population: std divides by d. Skewness and excess kurtosis are 0 for
// the normal distribution; the Laplace distribution has 0 and 3. Both are 0 if std is 0.
struct Moments {
  double mean = 0.0, std = 0.0, skewness = 0.0, excess_kurtosis = 0.0;
};
Moments moments(std::span<const float> u);  // requires: u not empty

// Counts in bins of equal width. Bin b holds [edge(b), edge(b + 1)).
// The last bin also holds `high`.
struct Histogram {
  double low = 0.0, high = 0.0;
  std::uint64_t below = 0, above = 0;  // outside [low, high]
  std::vector<std::uint64_t> count;

  double edge(std::size_t b) const;  // b in [0, count.size()]
};
// Requires: low < high, high - low is finite, bins > 0.
Histogram histogram(std::span<const float> u, double low, double high, std::size_t bins);
// [bins + 1]: the fraction of entries below each edge. At the last edge, entries equal to it count
// too. Requires: at least one entry was counted.
std::vector<double> cumulative(const Histogram& h);

// The distance of |u| from a density that does not increase, which unimodal_bound assumes, in
// [0, 1). It is the largest distance between the cumulative distribution of |u| and the least
// concave function above that distribution. Near 0 the magnitudes are bell-shaped, up to noise of
// order 1 / sqrt(d). Entries that are 0 agree with the assumption. (The estimate is U. Grenander's,
// 1956.) Cost: O(d log d).
double distance_from_unimodal(std::span<const float> u);

}  // namespace skim::analysis
