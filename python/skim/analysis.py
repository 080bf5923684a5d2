"""The error that top-k leaves: published bounds, closed forms for two distributions, and measures of a gradient to
compare with them.

u is the vector that top-k selects from: residual plus gradient, with d entries. k of them are kept, and kappa = k / d
is in [0, 1]. Top_k(u) has the k entries of largest magnitude, and zeros elsewhere. The ratio is
|u - Top_k(u)|^2 / |u|^2, the fraction that stays behind.

All functions raise InvalidArgument for an argument outside its range, and for NaN or infinity in u.
"""

from skim._core import (
    Moments,
    bell_bound,
    bell_contraction,
    convergence_bound,
    distance_from_unimodal,
    error_bound,
    feedback_bound,
    general_bound,
    laplace_ratio,
    moments,
    normal_ratio,
    one_way_constant,
    top_k_ratio,
    two_way_constant,
    unimodal_bound,
)

__all__ = [
    "Moments",
    "bell_bound",
    "bell_contraction",
    "convergence_bound",
    "distance_from_unimodal",
    "error_bound",
    "feedback_bound",
    "general_bound",
    "laplace_ratio",
    "moments",
    "normal_ratio",
    "one_way_constant",
    "top_k_ratio",
    "two_way_constant",
    "unimodal_bound",
]
