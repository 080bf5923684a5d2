// skim.analysis: the error that top-k leaves.
#include "skim/analysis.hpp"

#include "python/bindings/arrays.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;
namespace an = analysis;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<std::span<const float>> spans(const std::vector<Floats>& arrays) {
  std::vector<std::span<const float>> all;
  for (const Floats& a : arrays) all.push_back(span_of(a));
  return all;
}

}  // namespace

void bind_analysis(nb::module_& m) {
  m.def("general_bound", &an::general_bound, "kappa"_a,
        "1 - kappa, with kappa = k/d in [0, 1]: an upper bound of the ratio for every u.");
  m.def("bell_bound", &an::bell_bound, "kappa"_a,
        "(1 - kappa)^2: bounds the ratio if the sorted squared magnitudes are convex (arXiv "
        "1911.08772).");
  m.def("unimodal_bound", &an::unimodal_bound, "kappa"_a,
        "(1 - kappa)^3: bounds the ratio if the density of |u| does not increase. It holds for "
        "the distribution; a sample of d entries may exceed it by noise of order 1 / sqrt(d).");
  m.def("bell_contraction", &an::bell_contraction, "k"_a, "d"_a,
        "delta = (2 k d - k^2) / d^2, so bell_bound is 1 - delta. Requires k <= d and d > 0.");
  m.def("normal_ratio", &an::normal_ratio, "kappa"_a,
        "The ratio for a normal distribution with mean 0, as d grows.");
  m.def("laplace_ratio", &an::laplace_ratio, "kappa"_a,
        "The ratio for a Laplace distribution with mean 0, as d grows.");
  m.def(
      "convergence_bound",
      [](double gap, double smoothness, double second_moment, double delta, double steps) {
        return an::convergence_bound({gap, smoothness, second_moment, delta, steps});
      },
      nb::kw_only(), "gap"_a, "smoothness"_a, "second_moment"_a, "delta"_a, "steps"_a,
      "An upper bound of the smallest E|grad f|^2 among `steps` steps of SGD with error "
      "feedback, at step size 1 / sqrt(steps + 1) (arXiv 1901.09847, Theorem II).\n"
      "  gap            f(x_0) - f*, >= 0\n"
      "  smoothness     L, >= 0\n"
      "  second_moment  upper bound of E|g|^2, >= 0\n"
      "  delta          contraction of the compression, in (0, 1]");
  m.def(
      "error_bound",
      [](double gap, double mu, double step_size, const Doubles& left_out, double noise) {
        return an::error_bound({gap, mu, step_size, {left_out.data(), left_out.size()}, noise});
      },
      nb::kw_only(), "gap"_a, "mu"_a, "step_size"_a, "left_out"_a, "noise"_a = 0.0,
      "An upper bound of E[f(x_T)] - f* for top-k descent without error feedback "
      "(docs/adaptive.md).\n"
      "  gap        f(x_0) - f*, >= 0\n"
      "  mu         constant of the PL inequality, >= 0; mu * step_size <= 1\n"
      "  step_size  of every step, >= 0\n"
      "  left_out   [T]: |g_t - Top_k(g_t)|^2\n"
      "  noise      upper bound of E|g_t - grad f(x_t)|^2, >= 0");
  m.def(
      "feedback_bound",
      [](double gap, double mu, double smoothness, const Doubles& step_sizes,
         const Doubles& residuals, double noise) {
        return an::feedback_bound({gap,
                                   mu,
                                   smoothness,
                                   {step_sizes.data(), step_sizes.size()},
                                   {residuals.data(), residuals.size()},
                                   noise});
      },
      nb::kw_only(), "gap"_a, "mu"_a, "smoothness"_a, "step_sizes"_a, "residuals"_a,
      "noise"_a = 0.0,
      "The bound with error feedback. It is for x_T minus the mass that the residual still "
      "holds.\n"
      "  gap, mu, noise  as in error_bound\n"
      "  smoothness      L, with mu <= L\n"
      "  step_sizes      [T]: >= 0, and at most 1 / L\n"
      "  residuals       [T]: |e_t|^2 before step t, in units of x");
  m.def(
      "one_way_constant",
      [](const std::vector<Floats>& u, const Floats& g, std::size_t k) {
        return an::one_way_constant(spans(u), span_of(g), k);
      },
      "u"_a, "g"_a, "k"_a,
      "|Top_k(mean u_p) - mean Top_k(u_p)| / |g|: the cost of top-k at the ranks (arXiv "
      "2209.15203); 0 for g = 0.\n"
      "  u  an array [d] for each rank: the vector that it selects from\n"
      "  g  [d]: the mean over the ranks of the gradients that this step added to u\n"
      "  k  at most d");
  m.def(
      "two_way_constant",
      [](const std::vector<Floats>& u, const Floats& g, const Floats& h, std::size_t k,
         std::size_t k_down) {
        return an::two_way_constant(spans(u), span_of(g), span_of(h), k, k_down);
      },
      "u"_a, "g"_a, "h"_a, nb::kw_only(), "k"_a, "k_down"_a,
      "The same with top-k at the server too: |Top_kd(h + mean u_p) - Top_kd(h + mean "
      "Top_k(u_p))| / |g|.\n"
      "  u, g, k  as in one_way_constant\n"
      "  h        [d]: the mass that the server holds, as a mean over the ranks\n"
      "  k_down   entries that the server sends back, at most d");
  m.def(
      "top_k_ratio", [](const Floats& u, std::size_t k) { return an::top_k_ratio(span_of(u), k); },
      "u"_a, "k"_a,
      "|u - Top_k(u)|^2 / |u|^2: the fraction of u [d] that stays behind, summed in double; 0 "
      "for u = 0. Requires k <= d.");
  nb::class_<an::Moments>(m, "Moments", "Moments of the entries as a population: std divides by d.")
      .def_ro("mean", &an::Moments::mean)
      .def_ro("std", &an::Moments::std)
      .def_ro("skewness", &an::Moments::skewness)
      .def_ro("excess_kurtosis", &an::Moments::excess_kurtosis,
              "0 for a normal distribution, 3 for a Laplace distribution.");
  m.def(
      "moments", [](const Floats& u) { return an::moments(span_of(u)); }, "u"_a);
  m.def(
      "distance_from_unimodal",
      [](const Floats& u) { return an::distance_from_unimodal(span_of(u)); }, "u"_a,
      "The distance of |u| from a density that does not increase, in [0, 1). Near 0, the "
      "assumption of unimodal_bound holds.");
}

}  // namespace skim::python
