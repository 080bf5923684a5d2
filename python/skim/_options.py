"""The types of the keywords that skim.attach, Aggregator and LocalSteps pass on: for type checkers, and for messages.

skim.Reducer has their meanings, ranges and defaults; a test compares the names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

import torch

from skim import _core
from skim.elastic import ElasticGroup
from skim.protocols import OwnLocalHalf, OwnSelector


class FeedbackOptions(TypedDict, total=False):
    feedback: bool
    momentum_correction: float
    momentum_dampening: float
    nesterov_correction: bool
    factor_masking: bool
    local_clip: float
    residual_decay: float
    residual_code: str


class ReducerOptions(FeedbackOptions, total=False):
    select: str
    select_threshold: float
    select_block: int
    select_stages: int
    select_seed: int
    per_parameter: bool
    drop: str
    inside: str
    between: str
    server: str
    oktopk_exact: bool
    cut_every: int
    regions_every: int
    index_code: str
    value_code: str
    rounding: str
    rounding_seed: int
    among: Sequence[str]
    trial_share: float
    link: _core.Link | None
    local_speeds: _core.LocalSpeeds
    dense_sum: str
    dense_below: int


class CompressionOptions(ReducerOptions, total=False):
    total_steps: int
    non_finite: str
    selector: OwnSelector | None
    local: Callable[[], OwnLocalHalf] | Literal["device", "host"] | None
    offload: bool
    replay: dict[str, Any] | None
    timeout: float
    writer: Any


class AttachOptions(CompressionOptions, total=False):
    optimizer: torch.optim.Optimizer | None
    scaler: Any
    updates_of: torch.optim.Optimizer | None
    process_group: ElasticGroup | None
    between: Any


class LocalStepsOptions(CompressionOptions, total=False):
    ahead: float
    outer_lr: float
    outer_momentum: float
    bucket_mb: float
