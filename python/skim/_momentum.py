"""Moves an optimizer's momentum to where gradients are compressed: momentum correction takes its place."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from skim import _core

# A key of a parameter group, and so of the optimizer's state_dict. Its value is the momentum, dampening and
# Nesterov form that the optimizer had, and the factor by which its weight_decay was multiplied. Old states lack the
# factor. A group with this key has no momentum of its own any more.
KEY = "skim_momentum"


@dataclasses.dataclass(frozen=True)
class Correction:
    """Options of skim.Reducer."""

    momentum_correction: float = 0.0
    momentum_dampening: float = 0.0
    nesterov_correction: bool = False


def inner_optimizer(optimizer: Any) -> Any:
    """The torch.optim optimizer inside a wrapper that keeps it as `optimizer`, as accelerate's does."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def correction_for(optimizer: Any) -> Correction:
    """The momentum of an SGD, Adam or AdamW, also if it was taken out before. Changes nothing.

    Raises InvalidArgument for another optimizer, and if parameter groups differ in momentum.
    """
    if not isinstance(optimizer, (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)):
        raise _core.InvalidArgument(
            f"skim: optimizer must be torch.optim.SGD, Adam or AdamW, not {type(optimizer).__name__}; for another one "
            "leave out optimizer, and set its momentum to 0 if you pass momentum_correction"
        )
    found = {_of_group(group) for group in optimizer.param_groups}
    if len(found) > 1:
        values = ", ".join(str(c.momentum_correction) for c in sorted(found, key=lambda c: c.momentum_correction))
        raise _core.InvalidArgument(
            f"skim: the optimizer's parameter groups differ in momentum ({values}), and there is one momentum "
            "correction for the whole model; make them equal"
        )
    return found.pop()


def expect_trains(optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
    """Call it before take_out(). Raises InvalidArgument if the optimizer does not train one of the parameters, to which
    momentum correction will be applied. Warns if it trains others, which will have no momentum. optimizer: None: passes."""
    if optimizer is None:
        return
    correction_for(inner := inner_optimizer(optimizer))
    trains = {p for group in inner.param_groups for p in group["params"]}
    others = [name for name, p in parameters.items() if p not in trains]
    if others:
        raise _core.InvalidArgument(
            f"skim: the optimizer does not train {len(others)} of the model's parameters, '{others[0]}' among them, so momentum "
            "correction would add to the momentum of the optimizer that does; give one that trains all, or leave out optimizer"
        )
    if more := sum(p.requires_grad for p in trains - set(parameters.values())):
        warnings.warn(
            f"skim: the optimizer also trains parameters of another model ({more} in all). They have no momentum any more, "
            "unless Skim gets this optimizer with that model, too",
            stacklevel=4,
        )


def take_out(optimizer: Any, of_updates: bool) -> None:
    """Sets the momentum of every group to 0, and remembers it under KEY. A second call changes nothing.

    SGD's momentum also sums up the weight decay, to (1 - dampening) / (1 - momentum) of it. So the group's
    weight_decay is multiplied by this factor, unless updates are compressed, because updates contain the
    decay. If momentum was taken out for the other case, weight_decay is converted.
    """
    for group in optimizer.param_groups:
        had, before, now = _of_group(group), 1.0, dict[str, Any]()
        if KEY in group:
            before = _decay_factor(group, of_updates)
        elif "betas" in group:
            now["betas"] = (0.0, group["betas"][1])
        else:
            now |= {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
        factor = _factor_for(group, had, of_updates)
        if factor != before:
            now["weight_decay"] = group["weight_decay"] * (factor / before)
        now[KEY] = (*dataclasses.astuple(had), factor)
        group.update(now)  # all at once, so that no signal handler finds a part of it


def put_back(optimizer: Any, of_updates: bool) -> None:
    """Undoes take_out(). The optimizer's sums of gradients begin at 0. of_updates: for old states, which lack the factor."""
    for group in getattr(optimizer, "param_groups", ()):
        if KEY not in group:
            continue
        had, factor, now = _of_group(group), _decay_factor(group, of_updates), dict[str, Any]()
        if factor != 1.0:
            now["weight_decay"] = group["weight_decay"] / factor
        if "betas" in group:
            now["betas"] = (had.momentum_correction, group["betas"][1])
        else:
            now["momentum"], now["dampening"] = had.momentum_correction, had.momentum_dampening
            now["nesterov"] = had.nesterov_correction
        group.update({**now, KEY: (*dataclasses.astuple(had), 1.0)})  # all at once, as in take_out()
        for p in group["params"]:  # without momentum, SGD leaves its sum as it was, and Adam's is the last gradient
            sums = optimizer.state.get(p, {})
            sums.pop("momentum_buffer", None)
            if "exp_avg" in sums:
                sums["exp_avg"].zero_()
        del group[KEY]


def expect_taken_out(optimizer: Any, correction: Correction, of_updates: bool) -> None:
    """Call it before a step. Takes momentum out again if a state_dict has brought it back.

    Raises InvalidArgument if something else sets the momentum, or if the momentum has changed.
    """
    now = correction_for(optimizer)
    if now != correction:
        raise _core.InvalidArgument(
            f"skim: the optimizer's momentum was {correction} when skim got it and is {now} now; load its state "
            "before skim.attach"
        )
    for group in optimizer.param_groups:
        if KEY in group and (group["betas"][0] if "betas" in group else group["momentum"]) != 0.0:
            raise _core.InvalidArgument(
                "skim: something sets the optimizer's momentum, which momentum correction has replaced, so it would "
                "count twice; make the learning-rate scheduler with cycle_momentum=False, or leave out optimizer"
            )
    take_out(optimizer, of_updates)


def _of_group(group: Mapping[str, Any]) -> Correction:
    if KEY in group:
        return Correction(*group[KEY][:3])
    if "betas" in group:  # the first moment is a mean of gradients, not a sum
        return Correction(float(group["betas"][0]), float(group["betas"][0]))
    return Correction(float(group["momentum"]), float(group["dampening"]), bool(group["nesterov"]))


def _factor_for(group: Mapping[str, Any], had: Correction, of_updates: bool) -> float:
    """What take_out() multiplies the weight decay by."""
    if of_updates or "betas" in group:
        return 1.0
    return (1.0 - had.momentum_dampening) / (1.0 - had.momentum_correction)


def _decay_factor(group: Mapping[str, Any], of_updates: bool) -> float:
    """What the weight decay of a group with KEY has been multiplied by."""
    had = group[KEY]
    return float(had[3]) if len(had) > 3 else _factor_for(group, _of_group(group), of_updates)
