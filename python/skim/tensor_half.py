"""The local half of a step in PyTorch: gradients and residuals stay on the device where they are."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from skim import _core
from skim._kept import Coded, InPlace, Kept, Offloaded
from skim._passes import (
    HEAD, KERNELS, LARGEST, LAST, Collected, collect_k_largest, finite_part, has_triton, kernels_for, select_from,
)  # fmt: skip
from skim.protocols import OwnLocalHalf

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Unpack

    from skim._options import FeedbackOptions
    from skim.protocols import Entries

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class TensorLocalHalf(OwnLocalHalf):
    """A local half for tensors on any device. It selects as select="exact" does.

    skim.protocols.OwnLocalHalf has the contracts of its methods.

    Only selected entries and a few numbers leave the device, and only entries of the mean come to it: see moved_bytes.
    A bucket waits for the device once. If the largest entries changed much since the last step, it waits twice. The
    exchange "shared-indices" waits once more.
    A dense sum moves the whole bucket.

    Residuals and means are those of the built-in local half, bit for bit. Norms may differ in their last bits, and so
    may what local_clip makes of them. A saved state can be loaded by the built-in local half, and the other way round.

    Takes 4 bytes of the device's memory per parameter (residual_code="bf16": 2, "q8": 1, and 4 for each entry of the
    largest bucket), 4 more with momentum_correction, and beside that O(k) and 0.02 for each entry of the largest bucket.
    With offload it takes 8 for each entry of the largest bucket (16 with momentum_correction) instead, and the 4 or 8
    bytes per parameter of the host's memory.
    All work is queued on the current stream of the gradient's device.
    """

    def __init__(self, *, kernels: str | None = None, offload: bool = False, **options: Unpack[FeedbackOptions]) -> None:
        """
        kernels: "triton", "pytorch", or None for the faster one that runs there.
        offload: keep residuals and velocities in the host's memory. Each step copies them to the device and back, beside
            the device's work. When a bucket is done, the one that came next in the step before is copied ahead.
        options: those of skim.ErrorFeedback.
        Raises InvalidArgument if an option is out of its range.
        """
        _core.ErrorFeedback(**options)  # checks them
        expect_floats(offload, options)
        if kernels not in KERNELS:
            raise _core.InvalidArgument(f"skim: kernels: must be 'triton', 'pytorch' or None, not {kernels!r}")
        self.options = options
        self.kernels = kernels
        self.keeps_residuals: bool = options.get("feedback", True)
        self._clip = float(np.float32(options.get("local_clip", 0.0)))
        self._momentum = float(np.float32(options.get("momentum_correction", 0.0)))
        self._decay = float(np.float32(options.get("residual_decay", 1.0)))
        self._layout: list[tuple[int, list[tuple[str, int]]]] = []
        self._lengths: dict[int, int] = {}
        code = options.get("residual_code", "f32")
        floats = Offloaded if offload else InPlace
        self._residuals: Kept = floats() if code == "f32" else Coded(code, kernels != "pytorch")
        self._velocities: Kept | None = floats() if self._momentum > 0.0 else None
        self._carried: dict[int, Carried] = {}
        self._sent: dict[int, Selected] = {}  # the selection of each slot in this step
        # Changes of residuals and velocities: which of both, the slot, indices, values before.
        self._journal: list[tuple[Kept, int, torch.Tensor, torch.Tensor]] = []
        self._delivered: set[int] = set()  # slots whose whole residual was delivered in this step
        self._buffers: dict[torch.device, Buffers] = {}
        self._accumulated: torch.Tensor | None = None  # what accumulate() has added up, until whole()

    @property
    def moved_bytes(self) -> int:
        """Bytes that were copied between device and host so far. On a CPU: those that would have been."""
        return sum(x.moved_bytes for x in (*self._buffers.values(), *self._kept()))

    # ---- the layout -----------------------------------------------------------------------------

    @torch.no_grad()
    def set_layout(self, layout: list[tuple[int, list[tuple[str, int]]]]) -> None:
        before, self._layout = self._layout, layout
        self._lengths = {slot: sum(n for _, n in parameters) for slot, parameters in layout}
        self._carried = {slot: Carried() for slot in self._lengths}
        for buffers in self._buffers.values():
            buffers.forget_slots()
        if self.keeps_residuals:
            self._residuals = self._residuals.moved_to(layout, before)
        if self._velocities is not None:
            self._velocities = self._velocities.moved_to(layout, before)

    def check(self, grad: Any, n: int) -> None:
        """Raises InvalidArgument if select, accumulate and apply cannot take `grad` as n entries."""
        if not isinstance(grad, torch.Tensor) or grad.dtype not in FLOATS:
            raise _core.InvalidArgument("skim: the gradient must be a tensor of float32, float16 or bfloat16")
        if grad.numel() != n or not grad.is_contiguous():
            raise _core.InvalidArgument(f"skim: the gradient must be contiguous and have {n} entries")
        if n >= 1 << 31:
            raise _core.InvalidArgument(f"skim: at most 2^31 - 1 entries at once, not {n}; use smaller buckets")
        has_triton(grad.device, self.kernels)  # raises if the kernels cannot run there

    def _kept(self) -> list[Kept]:
        return [self._residuals] if self._velocities is None else [self._residuals, self._velocities]

    def _end_bucket(self) -> None:
        for kept in self._kept():
            kept.applied()

    def _put_back(self) -> None:
        for kept in self._kept():
            kept.close()

    # ---- a bucket -------------------------------------------------------------------------------

    @torch.no_grad()
    def select(self, task: _core.LocalTask, grad: torch.Tensor) -> tuple[Any, Any, _core.SelectReport]:
        buffers, carried, n, k = self._buffers_of(grad.device), self._carried[task.slot], task.n, task.k
        words = buffers.words(task.slot, k)
        # The largest float that entries must exceed to reach the threshold of the task, or to be no zeros.
        floor = float(np.nextafter(np.float32(task.threshold), np.float32(0.0))) if task.threshold > 0.0 else 0.0
        above = max(floor, carried.above(n, k))
        collected, residual = self._add(task, grad, above, buffers, words)
        if k:
            buffers.kernels.select(collected, k, residual, words.there)
        found = buffers.selected(words)
        if k and above > floor:
            carried.adapt(found.count / k)
        if found.count > collected.keys.numel() or (found.count < k and above > floor):
            collect_k_largest(residual, k, task.threshold, collected.keys.zero_())
            select_from(collected.keys, k, residual, words.there)
            found = buffers.selected(words)
        carried.update(n, k, found.threshold if found.values.size == k else 0.0)
        self._sent[task.slot] = found
        report = _core.SelectReport(threshold=found.threshold, kept_norm2=found.norm2, **words.measured())
        return found.indices, found.values, report

    @torch.no_grad()
    def gather(self, slot: int, indices: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
        """The residual's values at these indices (ascending), which take the place of the selection."""
        residual = self._residuals.read(slot)
        buffers = self._buffers_of(residual.device)
        [on_device] = buffers.put([indices])
        there = residual[on_device.to(torch.int64)]
        values = there.cpu().numpy()
        buffers.moved_bytes += values.nbytes
        before = self._sent[slot]
        self._sent[slot] = Selected(before.count, indices.copy(), values, on_device, there, before.threshold, norm2(values))
        return values

    @torch.no_grad()
    def accumulate(self, task: _core.LocalTask, grad: torch.Tensor) -> _core.SelectReport:
        buffers = self._buffers_of(grad.device)
        words = buffers.words(task.slot, 0)
        _, self._accumulated = self._add(task, grad, math.inf, buffers, words)
        buffers.fetch(words)
        return _core.SelectReport(**words.measured())

    def _add(
        self, task: _core.LocalTask, grad: torch.Tensor, above: float, buffers: Buffers, words: Words
    ) -> tuple[Collected, torch.Tensor]:
        """Adds the gradient to the residual, which it returns, too. Collects the entries larger than `above`."""
        slot, gradient = task.slot, grad.view(-1)
        if self.keeps_residuals:
            residual = self._residuals.open(slot, grad.device)
        else:
            residual = torch.zeros(task.n, dtype=torch.float32, device=grad.device)
        into = Collected(buffers.keys(words.k), words.counts.zero_(), words.norms2)
        factor, measured = float(np.float32(1.0) / np.float32(task.scale)), None
        if self._clip > 0.0 or self._momentum > 0.0:
            x, bad = finite_part(gradient, factor)
            measured = x.to(torch.float64).square_().sum(), bad
            gradient, factor = self._changed(task, gradient, measured[0]), 1.0
        buffers.kernels.add(gradient, residual, factor, self._decay, above, into)
        if measured is not None:  # the report is about the gradient as it was
            into.norms2[1], into.counts[1] = measured
        return into, residual

    def _changed(self, task: _core.LocalTask, gradient: torch.Tensor, squared: torch.Tensor) -> torch.Tensor:
        """What local clipping and momentum correction make of the gradient. squared: |gradient / scale|^2."""
        scale = torch.full((), task.scale, dtype=torch.float32, device=gradient.device)
        if self._clip > 0.0:
            limit = self._clip * math.sqrt(task.n / (task.ranks * sum(self._lengths.values())))
            excess = (squared.sqrt() / limit).clamp(min=1.0)
            scale = (excess * task.scale).clamp(max=LARGEST).to(torch.float32)
        part = np.float32(1.0) - np.float32(self.options.get("momentum_dampening", 0.0))
        x, _ = finite_part(gradient, torch.full_like(scale, float(part)) / scale)
        return x if self._velocities is None else self._advanced(self._velocities.open(task.slot, x.device), x)

    def _advanced(self, velocity: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Adds x to the velocity, and returns what the residual gets."""
        if not self.options.get("nesterov_correction", False):
            return velocity.mul_(self._momentum).add_(x).clamp_(-LARGEST, LARGEST)
        velocity.add_(x).clamp_(-LARGEST, LARGEST).mul_(self._momentum)
        return x.add_(velocity).clamp_(-LARGEST, LARGEST)

    @torch.no_grad()
    def whole(self, slot: int, grad: torch.Tensor) -> npt.NDArray[np.float32]:
        assert self._accumulated is not None
        residual, self._accumulated = self._accumulated, None
        self._buffers_of(residual.device).moved_bytes += 4 * residual.numel()
        return residual.to("cpu", copy=True).numpy()

    @torch.no_grad()
    def commit(self, slot: int, sent: Entries, returned: Entries) -> float:
        if not self.keeps_residuals:
            return 0.0
        residual, selected = self._residuals.of(slot), self._sent.pop(slot, None)
        change, after = 0.0, None  # after: of the sent entries; None: all are 0
        if sent[0].size:
            if selected is not None and np.array_equal(selected.indices, sent[0]):
                index, there = selected.on_device.to(torch.int64), selected.values_there
                before, before_norm2 = selected.values, selected.norm2
            else:
                index, _ = self._entries_to(residual.device, sent)
                there = residual[index]
                before = there.cpu().numpy()
                before_norm2 = norm2(before)
            if np.array_equal(before, sent[1]):  # nothing was rounded
                self._journal.append((self._residuals, slot, index, there))
                residual.index_fill_(0, index, 0.0)
            else:
                [by] = self._to(residual.device, sent[1])
                self._change(slot, index, there, -by)
                after = finite_sum(before, -sent[1])
                change += norm2(after)
            change -= before_norm2
            if self._velocities is not None and self.options.get("factor_masking", True):
                self._mask(self._velocities, slot, index, sent, returned)
        if returned[0].size:
            index, by = self._entries_to(residual.device, returned)
            place = np.searchsorted(sent[0], returned[0])
            if sent[0].size and np.array_equal(sent[0][np.minimum(place, sent[0].size - 1)], returned[0]):
                before = np.zeros(place.size, np.float32) if after is None else after[place]
            else:
                before = residual[index].cpu().numpy()
            self._change(slot, index, residual[index], by)
            change += norm2(finite_sum(before, returned[1])) - norm2(before)
        return change

    def _change(self, slot: int, index: torch.Tensor, before: torch.Tensor, by: torch.Tensor) -> None:
        """Adds to entries of the residual, which are `before`."""
        residual = self._residuals.of(slot)
        self._journal.append((self._residuals, slot, index, before))
        total = before + by
        # As in the library: a sum of NaN changes nothing.
        residual[index] = torch.where(total.isnan(), before, total.clamp(-LARGEST, LARGEST))

    def _mask(self, velocities: Kept, slot: int, index: torch.Tensor, sent: Entries, returned: Entries) -> None:
        """Clears the velocity of entries that were delivered: sent, and not given back whole."""
        velocity, delivered = velocities.of(slot), sent[1] != 0.0
        _, here, there = np.intersect1d(sent[0], returned[0], assume_unique=True, return_indices=True)
        delivered[here] &= sent[1][here] != returned[1][there]
        [keeps] = self._to(velocity.device, np.where(delivered, np.float32(0.0), np.float32(1.0)))
        before = velocity[index]
        self._journal.append((velocities, slot, index, before))
        velocity[index] = torch.where(keeps > 0.0, before, 0.0)

    def commit_all(self, slot: int) -> None:
        if self.keeps_residuals:
            self._delivered.add(slot)

    @torch.no_grad()
    def apply(self, slot: int, sum: Entries, factor: float, grad: torch.Tensor) -> bool:
        flat = grad.view(-1).zero_()
        if sum[0].size:
            index, values = self._entries_to(grad.device, sum)
            flat[index] = rounded(values, factor, grad.dtype)
        self._end_bucket()
        return bool(np.isfinite(sum[1]).all())

    @torch.no_grad()
    def apply_dense(self, slot: int, sum: npt.NDArray[np.float32], factor: float, grad: torch.Tensor) -> bool:
        [values] = self._to(grad.device, sum)
        grad.view(-1).copy_(rounded(values, factor, grad.dtype))
        self._end_bucket()
        return bool(np.isfinite(sum).all())

    @torch.no_grad()
    def apply_nan(self, grad: torch.Tensor) -> None:
        grad.view(-1)[:1].fill_(math.nan)

    @torch.no_grad()
    def end_step(self) -> None:
        for slot in self._delivered:
            self._residuals.of(slot).zero_()
        self._close()

    @torch.no_grad()
    def rollback_step(self) -> None:
        for kept, slot, index, before in reversed(self._journal):
            kept.of(slot)[index] = before
        self._close()

    def _close(self) -> None:
        self._put_back()
        self._journal.clear()
        self._delivered.clear()
        self._sent.clear()

    # ---- the state ------------------------------------------------------------------------------

    def as_feedback(self) -> _core.ErrorFeedback:
        """A copy of all residuals and velocities."""
        feedback = _core.ErrorFeedback(**self.options)
        feedback.set_layout(self._layout)
        for slot in self._lengths:
            if self.keeps_residuals:
                np.copyto(feedback.residual(slot), self._residuals.read(slot).cpu().numpy())
            if self._velocities is not None:
                np.copyto(feedback.velocity(slot), self._velocities.read(slot).cpu().numpy())
        self._put_back()
        return feedback

    @torch.no_grad()
    def take_feedback(self, feedback: _core.ErrorFeedback) -> None:
        """Replaces all residuals and velocities by copies of these."""
        for slot in self._lengths:
            if self.keeps_residuals:
                self._residuals.of(slot).copy_(torch.from_numpy(feedback.residual(slot)))
            if self._velocities is not None:
                self._velocities.of(slot).copy_(torch.from_numpy(feedback.velocity(slot)))
        self._put_back()

    def residual(self, slot: int) -> npt.NDArray[np.float32]:
        return self.residual_tensor(slot).to("cpu", copy=True).numpy()

    def residual_tensor(self, slot: int) -> torch.Tensor:
        """The slot's residual [n] itself, to read, on its device: the one of its last gradient. [0] if none is kept.

        Valid until the layout changes; with another residual_code than f32, or with offload, until any other call.
        """
        return self._residuals.read(slot) if self.keeps_residuals else torch.zeros(0, dtype=torch.float32, device="cpu")

    # ---- between device and host ----------------------------------------------------------------

    def _buffers_of(self, device: torch.device) -> Buffers:
        if device not in self._buffers:
            self._buffers[device] = Buffers(device, self.kernels)
        return self._buffers[device]

    def _to(self, device: torch.device, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Copies arrays of 32-bit numbers to the device, in one copy, as float32."""
        return [t.view(torch.float32) for t in self._buffers_of(device).put(arrays)]

    def _entries_to(self, device: torch.device, entries: Entries) -> tuple[torch.Tensor, torch.Tensor]:
        index, values = self._to(device, *entries)
        return index.view(torch.int32).to(torch.int64), values


@dataclasses.dataclass
class Selected:
    """The entries that a bucket selects, ascending. Valid until its slot's next selection."""

    count: int  # of all entries that passed
    indices: npt.NDArray[np.uint32]
    values: npt.NDArray[np.float32]
    on_device: torch.Tensor  # the indices, int32
    values_there: torch.Tensor  # the values, on the device
    threshold: float  # the smallest magnitude of the values; 0: there are none
    norm2: float  # of the values


class Words:
    """What a slot's step takes to the host in one copy: the 32-bit words of a device, and pinned memory for them."""

    def __init__(self, k: int, device: torch.device) -> None:
        self.room = self.k = k
        self._device = torch.zeros(HEAD + 2 * k, dtype=torch.int32, device=device)
        self._host = pinned(HEAD + 2 * k, device)

    @property
    def there(self) -> torch.Tensor:
        return self._device[: HEAD + 2 * self.k]

    @property
    def here(self) -> torch.Tensor:
        return self._host[: HEAD + 2 * self.k]

    @property
    def counts(self) -> torch.Tensor:
        return self._device[:2]

    @property
    def norms2(self) -> torch.Tensor:
        return self._device[2:LAST].view(torch.float64)

    def measured(self) -> dict[str, Any]:
        """Of the last pass, once its words were fetched."""
        total, gradient = self._host[2:LAST].view(torch.float64).tolist()
        return {"total_norm2": total, "gradient_norm2": gradient, "non_finite": int(self._host[1])}

    def selected(self) -> Selected:
        k, host = self.k, self.here.numpy()
        size = k - int(np.searchsorted(host[HEAD : HEAD + k], 0))  # those of no entry come first
        first, end = HEAD + k - size, HEAD + k
        indices, values = host[first:end].view(np.uint32), host[first + k :].view(np.float32)
        if size == k and k:
            threshold = float(host[LAST].view(np.float32))
        else:
            threshold = float(np.abs(values).min()) if size else 0.0
        there = self.there[first + k :].view(torch.float32)
        return Selected(int(host[0]), indices, values, self.there[first:end], there, threshold, norm2(values))


class Buffers:
    """Memory of one device, and pinned memory of the host. It grows and never shrinks."""

    def __init__(self, device: torch.device, kernels: str | None) -> None:
        self.device = device
        self.kernels = kernels_for(device, kernels)
        self._keys = torch.zeros(0, dtype=torch.int64, device=device)
        self._words: dict[int, Words] = {}
        self._waiting = torch.zeros(0, dtype=torch.int32, device="cpu")  # what is on its way to the device
        self._used = 0  # words of it
        self.moved_bytes = 0

    def words(self, slot: int, k: int) -> Words:
        """The slot's words, for k entries. The last ones are not valid any more."""
        words = self._words.get(slot)
        if words is None or words.room < k:
            words = self._words[slot] = Words(k, self.device)
        words.k = k
        return words

    def forget_slots(self) -> None:
        self._words.clear()

    def keys(self, k: int) -> torch.Tensor:
        """With room for more candidates than the k that are selected. All slots share them."""
        room = 2 * k + 4096
        if self._keys.numel() < room:
            self._keys = torch.zeros(room, dtype=torch.int64, device=self.device)
        return self._keys[:room]

    def selected(self, words: Words) -> Selected:
        """What was selected into the words, on the host. Waits for the device."""
        self.fetch(words)
        return words.selected()

    def fetch(self, words: Words) -> None:
        """Copies the words to the host. Waits for the device."""
        words.here.copy_(words.there, non_blocking=True)
        self.wait()
        self.moved_bytes += 4 * words.here.numel()

    def put(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Copies arrays of 32-bit numbers to the device, one behind the other. Does not wait."""
        lengths = [a.size for a in arrays]
        total = sum(lengths)
        if self._waiting.numel() < self._used + total:
            # PyTorch keeps the old one until its copies have ended.
            self._waiting, self._used = pinned(2 * (self._used + total), self.device), 0
        host = self._waiting[self._used : self._used + total]
        self._used += total
        self.moved_bytes += 4 * total
        np.concatenate([a.view(np.int32) for a in arrays], out=host.numpy())
        return list(host.to(self.device, copy=True, non_blocking=True).split(lengths))

    def wait(self) -> None:
        """As wait_for(), which also frees the memory of what was on its way."""
        wait_for(self.device)
        self._used = 0


def wait_for(device: torch.device) -> None:
    """Waits for what has been queued on the device's current stream."""
    if device.type != "cpu":
        (stream_of(device) or getattr(torch, device.type)).synchronize()


def stream_of(device: torch.device) -> Any:
    """The device's current stream. None: it has no streams, as a CPU."""
    kind = None if device.type == "cpu" else getattr(torch, device.type)
    return kind.current_stream(device) if hasattr(kind, "current_stream") else None


def streams_of(devices: Iterable[torch.device]) -> list[Any]:
    """The current stream of each of these devices that has streams."""
    return [stream for device in set(devices) if (stream := stream_of(device)) is not None]


@contextlib.contextmanager
def on_streams(streams: Iterable[Any]) -> Iterator[None]:
    """In the block, what this thread queues comes in the order of these streams. A thread begins with streams of its own."""
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(getattr(torch, stream.device.type).stream(stream))
        yield


def pinned(words: int, device: torch.device) -> torch.Tensor:
    """int32 [words], zeros, in the host's memory."""
    return torch.zeros(words, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")


@dataclasses.dataclass
class Carried:
    """What the selection of a slot keeps between steps: where the next pass may begin to collect."""

    n: int = 0
    k: int = 0
    threshold: float = 0.0  # the k-th magnitude; 0: there was none
    growth: float = 1.0  # the expected ratio of the next threshold to this one
    margin: float = 0.1  # the next pass begins this fraction below the expected threshold

    def above(self, n: int, k: int) -> float:
        if n != self.n or self.threshold == 0.0:
            return 0.0
        t = self.threshold * self.growth * (1.0 - self.margin)
        if k > self.k:
            t *= math.sqrt(self.k / k)
        return float(np.float32(min(t, LARGEST)))

    def adapt(self, ratio: float) -> None:
        """ratio: collected entries / k. It settles where a second pass is rare; there is room for 2 k."""
        if ratio < 1.0:
            self.margin *= 2.0
        elif ratio < 1.25:
            self.margin *= 1.25
        elif ratio > 1.6:
            self.margin *= 0.8
        self.margin = min(max(self.margin, 0.001), 0.5)

    def update(self, n: int, k: int, threshold: float) -> None:
        follows = self.n == n and self.k == k and self.threshold > 0.0
        grown = threshold / self.threshold if follows else 1.0
        self.growth = 0.5 * (self.growth + grown) if 0.8 <= grown <= 1.25 else 1.0
        self.n, self.k, self.threshold = n, k, threshold


def expect_floats(offload: bool, options: Mapping[str, Any]) -> None:
    """Raises InvalidArgument if offload and residual_code are both given."""
    if offload and options.get("residual_code", "f32") != "f32":
        raise _core.InvalidArgument("skim: offload keeps residuals as floats: leave out residual_code")


def norm2(x: npt.NDArray[np.float32]) -> float:
    return float(np.einsum("i,i->", x, x, dtype=np.float64))


def finite_sum(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """As _change."""
    total = a + b
    if np.isfinite(total).all():
        return total
    return np.where(np.isnan(total), a, np.clip(total, -LARGEST, LARGEST)).astype(np.float32)


def rounded(values: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """values * factor in dtype. What is finite stays finite."""
    product = values * factor
    if dtype == torch.float32 and abs(factor) <= 1.0:  # cannot overflow
        return product
    largest = torch.finfo(dtype).max
    return torch.where(values.isfinite(), product.clamp(-largest, largest), product).to(dtype)

