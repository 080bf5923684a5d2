"""Compression of any list of tensors, for training loops without DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from skim import _core
from skim._compression import Compression, Options
from skim._report import Report


class Aggregator(Compression):
    """Averages tensors over the ranks, and sends only a part of them: what is left is added to the
    next call's.

        aggregator = skim.Aggregator(model.parameters(), density=0.01)
        loss.backward()
        if aggregator.step():
            optimizer.step()

    Collective: every rank makes it with tensors of the same lengths in the same order, and calls
    step or reduce equally often.

    tensors: parameters, or any tensors whose shapes those of reduce() will have; or pairs
        (name, tensor), as model.named_parameters() gives them. By their names (without any: their
        places) residuals are saved.
    bucket_mb: tensors are compressed together, up to so many MB at a time.
    process_group, timeout, writer, and the options: as skim.attach has them.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        density: Any = 0.001,
        exchange: Any = "auto",
        *,
        bucket_mb: float = 25.0,
        process_group: Any = None,
        timeout: float = 1800.0,
        writer: Any = None,
        **options: Any,
    ) -> None:
        named = _named(tensors)
        super().__init__(
            named, Options(density=density, exchange=exchange, **options), process_group, timeout, writer
        )
        self.tensors = list(named.values())
        self._set_layout(_buckets(self.tensors, bucket_mb * 1e6))

    def step(self, *, scale: float = 1.0) -> bool:
        """Every tensor's grad becomes the mean over the ranks of what was sent.

        A tensor without one counts as zeros, and gets one if there is something for it. scale: the
        loss scale in the gradients. False: a gradient of the group was NaN or infinite; do not
        apply them. Nothing of them was delivered, then, and the finite part is kept.
        """
        grads = []
        for t in self.tensors:
            if t.grad is None:
                t.grad = torch.zeros_like(t)
            grads.append(t.grad)
        return self.reduce(grads, scale=scale)

    @torch.no_grad()
    def reduce(self, tensors: Sequence[torch.Tensor], *, scale: float = 1.0) -> bool:
        """The same for tensors of any kind, in place; shapes and order as given at the start."""
        if [t.numel() for t in tensors] != self.lengths:
            raise _core.InvalidArgument(
                f"skim.Aggregator: reduce needs {len(self.lengths)} tensors of the lengths that it was made for"
            )
        with self.lock:
            try:
                assert self.buckets is not None
                for index, members in enumerate(self.buckets):
                    self._reduce_bucket(index, members, [tensors[i] for i in members], scale)
            except BaseException as e:
                self.fail(e)
                raise
            self.end_of_step()
            applied = self._finite
            self.finish_step()
            return applied

    def report(self) -> Report:
        """Bytes, times and decisions of this rank so far; print it for a table."""
        return self.statistics

    def _reduce_bucket(
        self, index: int, members: tuple[int, ...], tensors: list[torch.Tensor], scale: float
    ) -> None:
        self.begin_bucket(index, members)
        whole = tensors[0].view(-1) if len(tensors) == 1 and tensors[0].is_contiguous() else None
        flat = torch.cat([t.reshape(-1) for t in tensors]) if whole is None else whole
        for slot, offset, length in self.slots_of(members, index):
            self.reduce_part(slot, flat[offset : offset + length], scale)
        if whole is None:
            for t, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors])):
                t.copy_(part.view(t.shape))


def _named(tensors: Iterable[Any]) -> Mapping[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    for place, t in enumerate(tensors):
        name, tensor = t if isinstance(t, tuple) else (str(place), t)
        if name in named:
            raise _core.InvalidArgument(f"skim.Aggregator: two tensors are called '{name}'")
        named[name] = tensor
    return named


def _buckets(tensors: list[torch.Tensor], most_bytes: float) -> list[tuple[int, ...]]:
    """In order; a bucket's tensors are of one type and on one device."""
    buckets: list[list[int]] = []
    size, kind = 0.0, None
    for i, t in enumerate(tensors):
        bytes_of = t.numel() * t.element_size()
        if not buckets or kind != (t.dtype, t.device) or size + bytes_of > most_bytes:
            buckets.append([])
            size, kind = 0.0, (t.dtype, t.device)
        buckets[-1].append(i)
        size += bytes_of
    return [tuple(b) for b in buckets]
