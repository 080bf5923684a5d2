// What top-k loses: bounds, and measures of a gradient (skim.analysis).
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
        "1 - kappa, for kappa = k/d: the most of |u|^2 that top-k leaves behind, whatever u is.");
  m.def("bell_bound", &an::bell_bound, "kappa"_a,
        "(1 - kappa)^2: where the squared magnitudes, sorted, are convex (arXiv 1911.08772).");
  m.def("unimodal_bound", &an::unimodal_bound, "kappa"_a,
        "(1 - kappa)^3: where the density of |u| does not increase; of distributions, not of "
        "samples.");
  m.def("bell_contraction", &an::bell_contraction, "k"_a, "d"_a,
        "delta = (2 k d - k^2) / d^2: bell_bound is 1 - delta.");
  m.def("normal_ratio", &an::normal_ratio, "kappa"_a,
        "The share of |u|^2 that top-k leaves behind of a normal distribution with mean 0.");
  m.def("laplace_ratio", &an::laplace_ratio, "kappa"_a, "The same of a Laplace distribution.");
  m.def(
      "convergence_bound",
      [](double gap, double smoothness, double second_moment, double delta, double steps) {
        return an::convergence_bound({gap, smoothness, second_moment, delta, steps});
      },
      nb::kw_only(), "gap"_a, "smoothness"_a, "second_moment"_a, "delta"_a, "steps"_a,
      "Bounds the least E|grad f|^2 of so many steps of SGD with error feedback at step size "
      "1 / sqrt(steps + 1) (arXiv 1901.09847, Theorem II).\n"
      "  gap  f(x_0) - f*; smoothness  L; second_moment  bounds E|g|^2; delta  contraction");
  m.def(
      "error_bound",
      [](double gap, double mu, double step_size, const Doubles& left_out, double noise) {
        return an::error_bound({gap, mu, step_size, {left_out.data(), left_out.size()}, noise});
      },
      nb::kw_only(), "gap"_a, "mu"_a, "step_size"_a, "left_out"_a, "noise"_a = 0.0,
      "Bounds E[f(x_T)] - f* of top-k descent, without error feedback (docs/adaptive.md).\n"
      "  left_out  [T] of |g_t - Top_k(g_t)|^2; mu  of the PL inequality");
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
      "The same with error feedback, of x_T less what the residual still holds.\n"
      "  residuals  [T] of |e_t|^2 before step t, in units of x; step_sizes  [T]");
  m.def(
      "one_way_constant",
      [](const std::vector<Floats>& u, const Floats& g, std::size_t k) {
        return an::one_way_constant(spans(u), span_of(g), k);
      },
      "u"_a, "g"_a, "k"_a,
      "|Top_k(mean u_p) - mean Top_k(u_p)| / |g|: what top-k at the ranks costs "
      "(arXiv 2209.15203). u: an array [d] of each rank, what it selects from; g: the mean of what "
      "they added to it.");
  m.def(
      "two_way_constant",
      [](const std::vector<Floats>& u, const Floats& g, const Floats& h, std::size_t k,
         std::size_t k_down) {
        return an::two_way_constant(spans(u), span_of(g), span_of(h), k, k_down);
      },
      "u"_a, "g"_a, "h"_a, nb::kw_only(), "k"_a, "k_down"_a,
      "The same with top-k at the server too, which holds h [d].");
  m.def(
      "top_k_ratio", [](const Floats& u, std::size_t k) { return an::top_k_ratio(span_of(u), k); },
      "u"_a, "k"_a,
      "|u - Top_k(u)|^2 / |u|^2: what stays behind of u [d], summed in double; 0 for u = 0.");
  nb::class_<an::Moments>(m, "Moments", "Of the entries as a population.")
      .def_ro("mean", &an::Moments::mean)
      .def_ro("std", &an::Moments::std)
      .def_ro("skewness", &an::Moments::skewness)
      .def_ro("excess_kurtosis", &an::Moments::excess_kurtosis,
              "0 of a normal distribution, 3 of a Laplace distribution.");
  m.def(
      "moments", [](const Floats& u) { return an::moments(span_of(u)); }, "u"_a);
  m.def(
      "distance_from_unimodal",
      [](const Floats& u) { return an::distance_from_unimodal(span_of(u)); }, "u"_a,
      "How far |u| is from a density that does not increase, in [0, 1): the assumption of "
      "unimodal_bound.");
}

}  // namespace skim::python
