"""The parameters whose gradients Skim compresses: checks, buckets, and their memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from skim import _core
from skim.tensor_half import FLOATS

if TYPE_CHECKING:
    import numpy.typing as npt


def expect_parameters(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises InvalidArgument if Skim cannot compress the gradients of one of the parameters, or if there is none."""
    if not parameters:
        raise _core.InvalidArgument("skim: there is no parameter that requires a gradient")
    expect_dense(parameters.items())
    for name, p in parameters.items():
        if p.dtype not in FLOATS:
            raise _core.InvalidArgument(
                f"skim: parameter '{name}' is {p.dtype}; gradients must be float32, float16 or bfloat16"
            )
        if hasattr(p, "to_local"):
            raise _core.InvalidArgument(
                f"skim: parameter '{name}' is a DTensor: use skim.LocalSteps, skim.attach(model, between=group) on a "
                "model with fully_shard, or skim.Aggregator on the parameters' to_local()"
            )
        if p.device.type == "meta":
            raise _core.InvalidArgument(f"skim: parameter '{name}' is on 'meta', without memory")


def expect_dense(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises InvalidArgument if one of the tensors is sparse, or has no shape yet. tensors: with their names."""
    for name, t in tensors:
        if torch.nn.parameter.is_lazy(t):
            raise _core.InvalidArgument(
                f"skim: '{name}' has no shape yet, because its module is lazy; call the model once on every rank before"
            )
        if t.layout is not torch.strided:
            raise _core.InvalidArgument(
                f"skim: '{name}' is {t.layout}; parameters and buffers must be dense: use to_dense(), or keep a tensor that "
                "is equal on all ranks as a plain attribute of its module"
            )


def buckets_of(tensors: Sequence[torch.Tensor], members: Sequence[int], most_bytes: float) -> list[tuple[int, ...]]:
    """The indices of each bucket's tensors, in order. A bucket has one dtype and one device."""
    buckets: list[list[int]] = []
    size, kind = 0.0, None
    for i in members:
        t = tensors[i]
        bytes_of = t.numel() * t.element_size()
        if not buckets or kind != (t.dtype, t.device) or size + bytes_of > most_bytes:
            buckets.append([])
            size, kind = 0.0, (t.dtype, t.device)
        buckets[-1].append(i)
        size += bytes_of
    return [tuple(b) for b in buckets]


def in_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A flat tensor in the memory of all these tensors, if they lie there without gaps, in their order."""
    first = tensors[0]
    if len(tensors) == 1:
        return first.view(-1) if first.is_contiguous() else None
    if any(type(t) is not torch.Tensor for t in tensors):
        return None  # a subclass may have no memory of its own
    end, memory = first.data_ptr(), first.untyped_storage().data_ptr()
    for t in tensors:
        if not t.is_contiguous() or (t.data_ptr(), t.untyped_storage().data_ptr(), t.dtype) != (end, memory, first.dtype):
            return None
        end += t.numel() * t.element_size()
    return first.as_strided((sum(t.numel() for t in tensors),), (1,))


class Trainable:
    """Which parameters require a gradient. Warns once if that changes, because the layout stays as it is.

    advice: what to do then.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]], advice: str) -> None:
        self._parameters = [(name, p, p.requires_grad) for name, p in parameters]
        self._advice = advice
        self._has_warned = False

    def warn_of_changes(self) -> None:
        if self._has_warned:
            return
        changed = [name for name, p, trainable in self._parameters if p.requires_grad != trainable]
        if changed:
            self._has_warned = True
            warnings.warn(
                f"skim: requires_grad has changed since attach for {len(changed)} parameters, '{changed[0]}' among them: "
                f"their gradients are not exchanged as you may expect; {self._advice}",
                stacklevel=3,
            )


def array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Only for type checkers: _core takes a tensor by DLPack where its stubs ask for an array."""
    return cast("npt.NDArray[Any]", tensor)
