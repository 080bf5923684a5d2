"""Compression of any list of tensors, for training loops without DistributedDataParallel."""

from __future__ import annotations

import numbers
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from skim import _core
from skim._checks import expect_positive, expect_whole
from skim._compression import Compression
from skim._momentum import expect_trains
from skim._options import Options
from skim._parameters import buckets_of
from skim._shards import are_equal
from skim.elastic import ElasticGroup
from skim.tensor_half import FLOATS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from skim._options import ReducerOptions
    from skim.protocols import OwnLocalHalf, OwnSchedule, OwnSelector

SCALES = 1e-37, 1e38  # of losses: 1 / scale, too, must be a float32


class Aggregator(Compression):
    """Averages tensors over the ranks, but sends only some of their entries. The rest stays in a
    residual, which is added to the tensors of the next call.

        aggregator = skim.Aggregator(model.parameters(), density=0.01)
        loss.backward()
        if aggregator.step():
            optimizer.step()

    Collective: every rank makes it with tensors of the same lengths in the same order, and calls
    step or reduce equally often. Parameters must be equal on all ranks. Rank 0 warns if they are not.

    tensors: parameters, or other float32, float16 or bfloat16 tensors with the shapes that reduce()
        will get. Or pairs (name, tensor), as from model.named_parameters(). A saved state names each
        residual by this name, or by the tensor's position if there are no names.
    fragments: parts of nearly equal size, cut between tensors, that reduce() takes one at a time. There may be
        fewer, if single tensors are large. A fragment's reduce() is a step of schedules and of the report.
    bucket_mb: tensors are compressed together in buckets of up to this many MB (10^6 bytes).
    process_group: a process group of torch.distributed, or a skim.ElasticGroup, whose ranks may change. None: the
        default group.
    of_updates: True: the tensors are not gradients but updates, by which the optimizer has moved parameters.
    density, exchange and all others: as in skim.attach. There is no scaler and no updates_of: use
        the argument scale of step() and reduce() instead, also if the optimizer is given.

    Raises InvalidArgument if a tensor or an option cannot work.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        density: float | _core.DensitySchedule | OwnSchedule = 0.01,
        exchange: str = "auto",
        *,
        optimizer: torch.optim.Optimizer | None = None,
        of_updates: bool = False,
        total_steps: int = 0,
        non_finite: str = "pass-on",
        selector: OwnSelector | None = None,
        local: Callable[[], OwnLocalHalf] | Literal["device", "host"] | None = None,
        offload: bool = False,
        replay: dict[str, Any] | None = None,
        fragments: int = 1,
        bucket_mb: float = 25.0,
        process_group: dist.ProcessGroup | ElasticGroup | None = None,
        timeout: float = 1800.0,
        writer: Any = None,
        **options: Unpack[ReducerOptions],
    ) -> None:
        expect_whole("skim.Aggregator: fragments", fragments, 1)
        expect_positive("skim.Aggregator: bucket_mb", bucket_mb)
        if fragments > 1 and isinstance(process_group, ElasticGroup):
            raise _core.InvalidArgument("skim.Aggregator: an ElasticGroup needs fragments=1")
        named = _named(tensors)
        compressed = Options(
            density=density, optimizer=optimizer, of_updates=of_updates, total_steps=total_steps, selector=selector,
            local=local, offload=offload, replay=replay, non_finite=non_finite, others={"exchange": exchange, **options},
        )  # fmt: skip
        if not of_updates:
            expect_trains(optimizer, {name: t for name, t in named.items() if isinstance(t, torch.nn.Parameter)})
        also_equal = [f"fragments={fragments}", f"bucket_mb={float(bucket_mb)}", *self._described()]
        super().__init__(named, compressed, process_group, timeout, writer, also_equal=also_equal)
        self.tensors = list(named.values())
        # The indices of each fragment's tensors, in the order of its buckets, and of these buckets.
        self.fragments: list[tuple[int, ...]] = []
        buckets: list[tuple[int, ...]] = []
        self._buckets_of: list[range] = []
        for members in _fragments(self.tensors, fragments):
            first = len(buckets)
            for together in self._apart(members):
                buckets += buckets_of(self.tensors, together, bucket_mb * 1e6)
            self._buckets_of.append(range(first, len(buckets)))
            self.fragments.append(tuple(i for bucket in buckets[first:] for i in bucket))
        self._set_layout(buckets)
        frozen = [name for name, t in named.items() if isinstance(t, torch.nn.Parameter) and not t.requires_grad]
        differ = False
        if self.elastic is None and not of_updates:
            differ = not are_equal((t for t in self.tensors if isinstance(t, torch.nn.Parameter)), self.comm)
        # After all that ranks do together, because a program may make errors of warnings.
        if frozen and self.comm.rank == 0:
            warnings.warn(
                f"skim.Aggregator: frozen parameters take memory and time as others do ({len(frozen)} here, such as "
                f"'{frozen[0]}'); leave them out if they stay frozen",
                stacklevel=2,
            )
        if differ and self.comm.rank == 0:
            warnings.warn(
                "skim.Aggregator: the parameters differ between ranks, and equal gradients keep them apart; give all ranks "
                "those of one: load one checkpoint, or call torch.distributed.broadcast",
                stacklevel=2,
            )
        self.take_over_momentum()

    _is_exposed = True  # whether reduce() runs while nothing else goes on; if not, its caller counts what is not hidden

    def _described(self) -> Sequence[str]:
        """Options of a derived class, as "name=value", that must be equal on all ranks."""
        return ()

    def _apart(self, members: Sequence[int]) -> list[Sequence[int]]:
        """The members of a fragment in parts. Members of different parts get into different buckets."""
        return [members]

    def step(self, *, scale: float = 1.0) -> bool:
        """Replaces every tensor's grad by the mean over the ranks of the entries sent. Collective.

        A grad that is None counts as zeros, and becomes a tensor if the parameter requires a gradient.
        scale: the loss scale in the gradients, in [1e-37, 1e38].
        Returns whether to apply the gradients. False: a gradient of the group held NaN or infinity. Then
        nothing was delivered, and the residuals keep the finite entries. With non_finite="raise", raises
        NonFiniteError on all ranks instead.
        """
        if len(self.fragments) > 1:
            raise _core.InvalidArgument(
                "skim.Aggregator: step needs fragments=1, because a step is applied whole or not at all; call reduce"
            )
        grads = []
        for t in self.tensors:
            grad = torch.zeros_like(t) if t.grad is None else t.grad
            if t.requires_grad:  # an optimizer would change a frozen parameter that has a gradient, by its weight decay
                t.grad = grad
            grads.append(grad)
        return self.reduce(grads, scale=scale)

    @torch.no_grad()
    def reduce(self, tensors: Iterable[torch.Tensor], *, fragment: int = 0, scale: float = 1.0) -> bool:
        """As step(), but in place for the given tensors: those of a fragment, with their first shapes and order.

        Raises InvalidArgument if it cannot take an argument. Then nothing has changed, and a right call works.
        """
        self._expect_fragment(fragment)
        scale = _scale(scale)
        tensors = _dense(tensors)
        lengths = [self.lengths[i] for i in self.fragments[fragment]]
        if [t.numel() for t in tensors] != lengths:
            raise _core.InvalidArgument(
                f"skim.Aggregator: reduce needs {len(lengths)} tensors with the lengths that it was made for"
            )
        self.expect_no_gradient_of_a_server(tensors)
        tensor_of = dict(zip(self.fragments[fragment], tensors))
        with self.lock:
            began = time.perf_counter()
            try:
                self.reduce_buckets(self._buckets_of[fragment], tensor_of, scale)
            except BaseException as e:
                self.fail(e)
                raise
            if self._is_exposed:
                self.statistics.exposed_s += time.perf_counter() - began
            self.end_of_step()
            self.finish_step()
            self.raise_if_not_finite()
            return self.was_finite

    def residuals_of(self, fragment: int) -> list[torch.Tensor]:
        """As residuals_of_buckets(copied=False), for the tensors of a fragment, in their order."""
        self._expect_fragment(fragment)
        return list(self.residuals_of_buckets(self._buckets_of[fragment], copied=False).values())

    def densities(self, fragment: int = 0) -> list[float]:
        """k / n of the bucket of each tensor of a fragment, in its last reduce(); 1: it went dense, 0: it has no entries.
        Equal on all ranks."""
        self._expect_fragment(fragment)
        assert self.buckets is not None
        of_bucket = {index: self.statistics.buckets[index] for index in self._buckets_of[fragment]}
        return [b.k / max(1, b.n) for index, b in of_bucket.items() for _ in self.buckets[index]]

    def _expect_fragment(self, fragment: int) -> None:
        expect_whole("skim.Aggregator: fragment", fragment, 0, len(self.fragments) - 1)


def _named(tensors: Iterable[Any]) -> Mapping[str, torch.Tensor]:
    wrong = "skim.Aggregator: tensors: must be tensors, or pairs (name, tensor) as from model.named_parameters()"
    if not isinstance(tensors, Iterable) or isinstance(tensors, torch.Tensor):
        raise _core.InvalidArgument(f"{wrong}, not {type(tensors).__name__}")
    named: dict[str, torch.Tensor] = {}
    name_of: dict[torch.Tensor, str] = {}
    for place, item in enumerate(tensors):
        name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (str(place), item)
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            kinds = ", ".join(type(part).__name__ for part in item) if isinstance(item, tuple) else ""
            raise _core.InvalidArgument(f"{wrong}; item {place} is {f'({kinds})' if kinds else type(item).__name__}")
        if name in named:
            raise _core.InvalidArgument(f"skim.Aggregator: two tensors are called '{name}'")
        if isinstance(tensor, torch.nn.Parameter) and tensor in name_of:
            raise _core.InvalidArgument(
                f"skim.Aggregator: '{name_of[tensor]}' and '{name}' are one parameter, whose gradient would count "
                "twice; give it once"
            )
        named[name] = tensor
        name_of[tensor] = name
    return named


def _scale(given: Any) -> float:
    value = given.item() if isinstance(given, torch.Tensor) and given.numel() == 1 else given
    if not isinstance(value, numbers.Real) or not SCALES[0] <= value <= SCALES[1]:
        raise _core.InvalidArgument(
            f"skim.Aggregator: scale: must be a number in [{SCALES[0]:g}, {SCALES[1]:g}], not {given!r}"
        )
    return float(value)


def _dense(given: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, into which means can be written."""
    tensors = list(given) if isinstance(given, Iterable) else [given]
    for t in tensors:
        if not isinstance(t, torch.Tensor):
            raise _core.InvalidArgument(f"skim.Aggregator: reduce takes tensors, not {type(t).__name__}")
        kind = t.dtype if t.layout is torch.strided else t.layout
        if kind not in FLOATS:
            raise _core.InvalidArgument(
                f"skim.Aggregator: the tensors that reduce takes are dense and float32, float16 or bfloat16, not {kind}"
            )
        if t.is_meta:
            raise _core.InvalidArgument("skim.Aggregator: reduce takes tensors with memory, not on 'meta'")
        if t.is_inference() and not torch.is_inference_mode_enabled():
            raise _core.InvalidArgument(
                "skim.Aggregator: reduce cannot write into a tensor of torch.inference_mode(); give a clone() of it"
            )
        if any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape)):
            raise _core.InvalidArgument(
                "skim.Aggregator: reduce cannot write into a tensor with entries that share memory, as after expand(); "
                "give a clone() of it"
            )
    return tensors


def _fragments(tensors: list[torch.Tensor], count: int) -> list[tuple[int, ...]]:
    """The indices of each fragment's tensors. A tensor belongs to the fragment in which its middle entry lies."""
    total = sum(t.numel() for t in tensors)
    found: dict[int, list[int]] = {}
    before = 0
    for i, t in enumerate(tensors):
        found.setdefault(min(count - 1, count * (2 * before + t.numel()) // max(1, 2 * total)), []).append(i)
        before += t.numel()
    return [tuple(members) for members in found.values()]
