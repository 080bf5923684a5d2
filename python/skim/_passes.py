"""The pass over a bucket that adds its gradient to its residual, and the selection, on any device: in PyTorch, and in Triton.

Both do the same float32 additions, and select the same entries. They sum norms in another order, so norms may differ in
their last bits.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import threading
import warnings
from typing import Protocol

import numpy as np
import torch

from skim import _core

LARGEST = torch.finfo(torch.float32).max
NO_INDEX = 0xFFFFFFFF  # all indices are smaller
HEAD = 7  # 32-bit words before the selected entries: two counts, two norms in float64, the magnitude of the last entry
LAST = 6
KERNELS = (None, "triton", "pytorch")
CHUNK = 1 << 22  # entries of a bucket that PyTorch works on at once: they bound its temporary memory


@dataclasses.dataclass
class Collected:
    """What a pass finds. It fills these tensors on the bucket's device."""

    # int64. The keys (see key_of) of the entries larger than `above`, in any order, as many as there is room for.
    keys: torch.Tensor
    # int32 [2], zeros before. The number of such entries, and of entries of the gradient that are not finite.
    counts: torch.Tensor
    # float64 [2]. |residual|^2 and |gradient * factor|^2, of what is finite.
    norms2: torch.Tensor


class Kernels(Protocol):
    """What a device runs. The memory that it keeps is for one bucket at a time."""

    def add(
        self, gradient: torch.Tensor, residual: torch.Tensor, factor: float, decay: float, above: float, into: Collected
    ) -> None:
        """residual = decay * residual + gradient * factor.

        gradient: [n], float32, float16 or bfloat16. An entry that is not finite adds 0 and is counted.
        residual: float32 [n]. A sum that overflows becomes the largest float.
        above: the magnitude that entries must exceed to be collected.
        """
        ...

    def select(self, collected: Collected, k: int, residual: torch.Tensor, words: torch.Tensor) -> None:
        """Writes the k > 0 largest of what the last add() collected where one copy takes them to the host.

        words: int32 [HEAD + 2 k]. Gets from HEAD on k indices, ascending, and then k values. If fewer than k entries
            were collected, the first indices are -1. Otherwise words[LAST] gets the least magnitude of the values. If
            more entries were collected than there is room for, the words mean nothing.
        """
        ...


def key_of(magnitude: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Keys in the order of selection: the larger magnitude, then the lower index. 0 is less than the key of any entry."""
    return (magnitude.view(torch.int32).to(torch.int64) << 32) | (NO_INDEX - index)


def finite_part(gradient: torch.Tensor, factor: float | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gradient * factor in float32, with 0 where gradient is not finite, and the number of those entries."""
    x = gradient.to(torch.float32)
    finite = torch.isfinite(x)
    return torch.where(finite, x, 0.0).mul_(factor).clamp_(-LARGEST, LARGEST), (~finite).sum()


def collect_k_largest(residual: torch.Tensor, k: int, least: float, keys: torch.Tensor) -> None:
    """Collects the k largest entries of at least the magnitude `least`, whatever they are.

    Takes memory for 3 n more floats. keys: int64, zeros, at least 2 k.
    """
    magnitude = residual.abs()
    larger, index = magnitude.topk(k)
    kth = larger[-1]
    passes = (larger > kth) & (larger >= least)
    keys[:k] = torch.where(passes, key_of(larger, index), 0)
    # Of the entries that equal the k-th, topk takes any. Here the first k of them follow.
    equal = (magnitude == kth) & (magnitude >= least) & (magnitude > 0.0)
    place = equal.cumsum(0, dtype=torch.int32)
    first_k = torch.searchsorted(place, torch.arange(1, k + 1, device=place.device, dtype=torch.int32))
    there = first_k < residual.numel()
    keys[k : 2 * k] = torch.where(there, key_of(kth.expand(k), first_k), 0)


class InPyTorch:
    def add(
        self, gradient: torch.Tensor, residual: torch.Tensor, factor: float, decay: float, above: float, into: Collected
    ) -> None:
        """Takes memory for n more floats."""
        into.norms2.zero_()
        magnitude = torch.empty_like(residual)
        for first in range(0, residual.numel(), CHUNK):
            r, m = residual[first : first + CHUNK], magnitude[first : first + CHUNK]
            x, bad = finite_part(gradient[first : first + CHUNK], factor)
            into.counts[1:].add_(bad)
            if decay != 1.0:
                r.mul_(decay)
            r.add_(x).clamp_(-LARGEST, LARGEST)
            into.norms2[0].add_(r.to(torch.float64).square_().sum())
            into.norms2[1].add_(x.to(torch.float64).square_().sum())
            torch.abs(r, out=m)
            into.counts[:1].add_(torch.count_nonzero(m > above))
        largest, index = magnitude.topk(min(into.keys.numel(), residual.numel()), sorted=False)
        into.keys[: index.numel()] = torch.where(largest > above, key_of(largest, index), 0)
        into.keys[index.numel() :].zero_()

    def select(self, collected: Collected, k: int, residual: torch.Tensor, words: torch.Tensor) -> None:
        select_from(collected.keys, k, residual, words)


def select_from(keys: torch.Tensor, k: int, residual: torch.Tensor, words: torch.Tensor) -> None:
    """Kernels.select, from keys that are in any order, with zeros for no entry."""
    # On a GPU these sorts take a fraction of the time of topk.
    largest = keys.sort(descending=True).values[:k].view(torch.int32)
    # The lower halves are -1 - index. So zeros, which stand for no entry, come first.
    low = largest[::2].sort(descending=True).values
    index, values = words[HEAD : HEAD + k], words[HEAD + k : HEAD + 2 * k].view(torch.float32)
    words[LAST:HEAD].copy_(largest[2 * k - 1 :])
    torch.bitwise_not(low, out=index)
    torch.index_select(residual, 0, index.clamp(min=0), out=values)


def kernels_for(device: torch.device, kernels: str | None) -> Kernels:
    """The kernels for a device. Raises: as has_triton."""
    if not has_triton(device, kernels):
        return InPyTorch()
    from skim import _triton_pass

    return _triton_pass.InTriton(device)


@functools.cache
def has_triton(device: torch.device, kernels: str | None) -> bool:
    """Whether Triton does the work there. kernels: of KERNELS. None: Triton where it can run, otherwise PyTorch.

    Warns if it should run there, and fails. The first call for a device may take seconds.
    Raises InvalidArgument if it is "triton" and cannot run.
    """
    if kernels == "pytorch":
        return False
    missing = _why_no_triton(device)
    failure = "" if missing else _what_fails(device)
    if kernels == "triton" and (missing or failure):
        raise _core.InvalidArgument(f"skim: kernels: no triton here: {missing or failure}; use pytorch")
    if failure:
        warnings.warn(
            f"skim: Triton does not work on {device} ({failure}). Operations of PyTorch do the same, slower", stacklevel=2
        )
    return not missing and not failure


_ONE_TRIAL = threading.Lock()


def _what_fails(device: torch.device) -> str:
    """What goes wrong when Triton's kernels run on the device; "": nothing."""
    from skim import _triton_trial  # it imports this module

    with _ONE_TRIAL:  # one thread compiles
        return _triton_trial.what_fails(device)


def _why_no_triton(device: torch.device) -> str:
    """What Triton needs and is not there; "": nothing."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not is_interpreted:
        return "it needs a GPU of CUDA or ROCm"
    if importlib.util.find_spec("triton") is None:
        return "it is not installed"
    import triton

    if int(triton.__version__.split(".")[0]) < 3:
        return f"its version {triton.__version__} is older than 3"
    if device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) < (7, 0):
        return "the GPU is older than compute capability 7.0"
    return ""
