"""The options of a compression, and the types of the keywords that skim.attach, Aggregator and LocalSteps pass on.

skim.Reducer has their meanings, ranges and defaults; a test compares the names.
"""

from __future__ import annotations

import dataclasses
import numbers
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, cast

import numpy as np
import torch

from skim import _core
from skim._checks import expect_float32, expect_steps_of_run
from skim._momentum import Correction, correction_for, inner_optimizer
from skim.elastic import ElasticGroup
from skim.protocols import OwnLocalHalf, OwnSelector
from skim.tensor_half import TensorLocalHalf, expect_floats


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


# These defaults differ from those of skim.Reducer. At equal bytes, 4-bit values carry three times the entries,
# and training ends closer to dense (docs/results/quality.md).
DEFAULTS = {"value_code": "q4"}
FEEDBACK = FeedbackOptions.__annotations__
TYPES = {**typing.get_type_hints(CompressionOptions), "exchange": str}  # of options, by name
# What an option of a type must be, in words and in types.
KINDS: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("True or False", (bool,)),
    int: ("a whole number", (int, np.integer)),
    float: ("a number", (numbers.Real,)),
    str: ("a string", (str,)),
    Sequence[str]: (f"a list of names among {', '.join(_core.exchanges)}", (list, tuple)),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """How gradients are compressed. Equal on all ranks. skim.attach describes the fields."""

    density: Any
    optimizer: Any = None
    of_updates: bool = False  # the optimizer has already turned gradients into updates
    total_steps: int = 0
    selector: Any = None
    local: Any = None  # "device", "host", a function that makes a local half, or None
    offload: bool = False  # residuals in the host's memory
    replay: dict[str, Any] | None = None  # Report.choices
    # If a gradient is NaN or infinite: "pass-on" or "raise".
    non_finite: str = "pass-on"
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # keywords of skim.Reducer

    def __post_init__(self) -> None:
        own = {name: getattr(self, name) for name in ("non_finite", "offload")}
        for name, value in {**own, **self.others}.items():
            what, kinds = KINDS.get(TYPES.get(name), ("", ()))
            if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
                raise _core.InvalidArgument(f"skim: {name}: must be {what}, not {value!r}")
            if numbers.Real in kinds:
                expect_float32(f"skim: {name}", value)
        if self.others.get("residual_decay") == 0:
            raise _core.InvalidArgument(
                "skim: residual_decay: 0 would forget what is not sent; use feedback=False for that, or a number in (0, 1]"
            )
        expect_steps_of_run("skim: total_steps", self.total_steps)
        if self.non_finite not in ("pass-on", "raise"):
            raise _core.InvalidArgument(f"non_finite: no '{self.non_finite}'; there are: pass-on, raise")
        if self.local not in (None, "device", "host") and not callable(self.local):
            raise _core.InvalidArgument(
                f"skim: local: must be 'device', 'host', None or a function that makes a local half, not {self.local!r}"
            )
        self._expect_threshold()
        if self.local == "device" and (missing := self._not_on_a_device()):
            raise _core.InvalidArgument(f"skim: local='device' has no {missing}; use local='host'")
        if self.offload and callable(self.local):
            raise _core.InvalidArgument("skim: offload and a local half of your own exclude each other")
        expect_floats(self.offload, self.others)  # also where the local half turns out to be the built-in one
        if self.optimizer is None:
            return
        object.__setattr__(self, "optimizer", inner_optimizer(self.optimizer))
        given = {"local": callable(self.local), **self.others}
        for name in ("momentum_correction", "momentum_dampening", "nesterov_correction", "local"):
            if given.get(name):
                raise _core.InvalidArgument(
                    f"skim: optimizer and {name} exclude each other: momentum correction is then the optimizer's momentum"
                )

    def _expect_threshold(self) -> None:
        is_own_schedule = not isinstance(self.density, (numbers.Real, _core.DensitySchedule))  # it may give a threshold
        selects_itself = self.selector is not None or callable(self.local)
        if self.others.get("select") != "threshold" or is_own_schedule or selects_itself:
            return
        if self.others.get("select_threshold", 0.0) == 0.0:
            raise _core.InvalidArgument(
                "skim: select_threshold: must be above 0 with select='threshold', which sends the entries that are at "
                "least this large"
            )

    def momentum(self) -> Correction | None:
        """The momentum correction that replaces the optimizer's momentum; None without an optimizer."""
        return None if self.optimizer is None else correction_for(self.optimizer)

    def expect_elastic(self) -> None:
        """Raises InvalidArgument if these options cannot work in an elastic group."""
        for name in ("selector", "density", "exchange"):
            value = getattr(self, name, None) or self.others.get(name)
            if value is not None and not isinstance(value, (str, int, float, _core.DensitySchedule)):
                raise _core.InvalidArgument(
                    f"skim: no {name} of your own in an ElasticGroup: a rank that joins could not get its state"
                )
        if self.replay is not None:
            raise _core.InvalidArgument("skim: no replay in an ElasticGroup: its ranks may change, and with them the choices")
        if self.others.get("feedback") is False:
            raise _core.InvalidArgument("skim: an ElasticGroup needs feedback: a step may have to be taken twice")
        if self.others.get("server") == "dedicated":
            raise _core.InvalidArgument("skim: no dedicated server in an ElasticGroup: it might be lost; use 'sharded'")

    def _not_on_a_device(self) -> str:
        """An option that TensorLocalHalf does not have; "": there is none."""
        if self.selector is not None:
            return "selector of your own"
        if self.others.get("per_parameter"):
            return "per_parameter"
        rule = self.others.get("select", "exact")
        return "" if rule == "exact" else f"select={rule!r}"

    def local_half(self, device: torch.device) -> OwnLocalHalf | None:
        """Makes the local half for gradients on this device. None: the built-in one, in host memory."""
        if callable(self.local):
            made: OwnLocalHalf | None = self.local()
            if made is None:
                raise _core.InvalidArgument("skim: local: the function returned no local half, but None")
            return made
        if self.local == "host" or (self.local is None and (device.type == "cpu" or self._not_on_a_device())):
            return None
        options = cast(FeedbackOptions, {k: v for k, v in self._keywords().items() if k in FEEDBACK})
        return TensorLocalHalf(offload=self.offload, **options)

    def _keywords(self) -> dict[str, Any]:
        momentum = self.momentum()
        return {**DEFAULTS, **self.others, **({} if momentum is None else dataclasses.asdict(momentum))}

    def reducer(self, comm: _core.Communicator, local: OwnLocalHalf | None) -> _core.Reducer:
        """local: what local_half() made."""
        has_feedback = isinstance(local, TensorLocalHalf) and not callable(self.local)
        reducer = _core.Reducer(
            comm,
            density=self.density,
            selector=self.selector,
            local=local,
            replay=self.replay,
            non_finite="pass-on",  # self.non_finite is heeded when the step ends
            **{k: v for k, v in self._keywords().items() if not (has_feedback and k in FEEDBACK)},
        )
        if self.total_steps:
            reducer.set_total_steps(self.total_steps)
        return reducer
