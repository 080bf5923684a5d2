"""What top-k loses: the published bounds, closed forms for two distributions, and measures of a gradient to
hold against them.

u is what is selected from, residual plus gradient, of length d; kappa = k / d in [0, 1]. Raises InvalidArgument
for an argument outside its range, and for NaN or infinity in u.
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
