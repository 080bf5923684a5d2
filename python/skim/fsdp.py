"""Skim between islands: each island shards the model with fully_shard, and exchanges its shards' gradients with others."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from skim import _core
from skim._compression import Compression, Unit
from skim._momentum import expect_trains
from skim._options import Options
from skim._parameters import Trainable, expect_dense
from skim._shards import Shard, is_sharded, make_equal, reshard
from skim._states import expect_state
from skim.tensor_half import stream_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class FsdpCompression(Compression):
    """The compression of one model that is sharded inside an island, between islands. skim.attach makes it.

    Every module with fully_shard is a bucket: the gradient of its shards on this rank. A step ends when all modules have
    been reduced, or when one of them comes again.

    If the density is a schedule that depends on epochs, set `epoch` at the start of each one, on every rank. It counts
    from the second step on, because a step chooses the density of the next one.
    """

    def __init__(
        self, model: FSDPModule, between: dist.ProcessGroup, options: Options, unit: Unit, timeout: float, writer: Any
    ) -> None:
        expect_dense(model.named_buffers())  # type: ignore[attr-defined]
        reshard(model)  # type: ignore[arg-type] # a forward leaves the parameters of the root whole
        modules = {name: m for name, m in model.named_modules() if is_sharded(m)}  # type: ignore[attr-defined]
        names = {p: name.replace("_orig_mod.", "") for name, p in model.named_parameters()}  # type: ignore[attr-defined]
        shards: dict[str, torch.Tensor] = {}
        buckets: list[tuple[int, ...]] = []
        hooked: list[tuple[str, FSDPModule, int]] = []
        self._groups: list[Any] = []  # by bucket: what FSDP keeps of the module's parameters
        for of_module, module in modules.items():
            group = _group_of(of_module, module)
            trainable = _trainable(group)
            if not trainable or any(group is other for other in self._groups):  # fully_shard([a, b]) makes one of both
                continue
            first = len(shards)
            for p in trainable:
                shards[names[p.sharded_param]] = _stand_in(p)
            buckets.append(tuple(range(first, len(shards))))
            self._groups.append(group)
            hooked.append((of_module, module, len(buckets) - 1))
        self.trained = [p for p in names if p.requires_grad]
        expect_trains(options.optimizer, {names[p]: p for p in self.trained})
        shard = Shard.of(names)
        assert shard is not None
        if wholes := shard.wholes(names):
            raise _core.InvalidArgument(
                f"skim.attach: several ranks of an island have '{list(names.values())[min(wholes)]}' whole, beside shards of "
                "others, and would send different entries of it; use skim.LocalSteps with exchange='allgather'"
            )
        self._shard = shard
        self.mark = shard.prefix
        super().__init__(shards, options, between, timeout, writer, unit, [f"shard={shard.described}"])
        self.inside = shard.connect(timeout)
        self._trainable = Trainable(((name, p) for p, name in names.items()), "call skim.detach, and attach anew")
        self._scale_now = 1.0  # of this step
        self._reduced: set[int] = set()  # buckets of this step
        self._begun: set[int] = set()  # buckets of this backward
        self._set_layout(buckets)
        make_equal(model, between, self.comm)  # type: ignore[arg-type]
        me = weakref.ref(self)
        for name, module, index in hooked:
            module.set_all_reduce_hook(_hook_of(me, name, index))
        self._modules = weakref.WeakSet(module for _, module, _ in hooked)
        self._between = between
        self.take_over_momentum()

    def rollback(self) -> None:
        """Call it on every rank or on none, if your loop skips the step whose backward has just ended. Nothing of the
        step then counts as delivered, and residuals keep its gradients. Without effect after state_dict() and residuals(),
        which end the step."""
        self.finish_step(skip=True)

    def detach(self) -> None:
        """Use skim.detach(model), which calls it. Ends the last step, gives the optimizer its momentum back, and averages
        whole gradients between the islands."""
        super().detach()
        between = self._between

        def average(reduced: torch.Tensor) -> None:
            dist.all_reduce(reduced.div_(between.size()), group=between)

        for module in self._modules:
            module.set_all_reduce_hook(average)

    def state_dict(self, *, gather: bool = False) -> dict[str, torch.Tensor]:
        """As skim.state_dict(model), without gather. Ends the open step, if there is one. A rollback() after it changes
        nothing."""
        if gather:
            raise _core.InvalidArgument(
                "skim: no gather with fully_shard: save what every rank has with torch.distributed.checkpoint"
            )
        return self._shard.marked(super().state_dict())

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> _core.LoadReport:
        """As skim.load_state_dict(model, state, strict)."""
        expect_state(state, strict)
        return super().load_state_dict(self._shard.own(state), strict)

    def finish_step(self, *, skip: bool = False) -> None:
        """As Compression.finish_step(). Collective inside the island if some modules had no gradient."""
        with self.lock:
            was_open = self.step_is_open
            if was_open and len(self._reduced) < len(self.buckets or ()):
                self.end_of_step()  # some modules had no gradient in this step
            super().finish_step(skip=skip)
            self._reduced.clear()
            if was_open:
                self._trainable.warn_of_changes()

    def reduce_bucket(self, name: str, index: int, flat: torch.Tensor) -> None:
        """Replaces the gradient of a module's shards by its mean over the islands. Collective over the islands.

        FSDP calls it in backward. It returns at once if the mean may come until the end of backward.
        """
        device = flat.device
        stream = stream_of(device)
        ready = None if stream is None else stream.record_event()

        def job() -> None:
            try:
                with self.after(ready, device):
                    self._reduce(name, index, flat)
            except BaseException as e:  # noqa: BLE001 - backward raises it
                self.fail(e)

        # Every module queues it, because what a failed backward had queued never runs.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(device))
        self._begun.add(index)
        # Backward has nothing left to overlap with the last bucket, so a change of threads would only cost time.
        if len(self._begun) < len(self._groups) and self._may_come_late(index, flat):
            self.submit(job)
        else:
            self._wait(device, job)
            if stream is not None:  # FSDP may convert it on this stream, and free it on another one
                flat.record_stream(stream)

    def _may_come_late(self, index: int, flat: torch.Tensor) -> bool:
        """Whether the gradient stays in flat until backward ends. Not if FSDP divides or converts it after the hook, adds it
        to another one, copies it to the host, or calls hooks of the user."""
        group = self._groups[index]
        is_divided = (
            flat.dtype not in (torch.float32, torch.bfloat16)  # a sum might overflow
            or getattr(group, "gradient_divide_factor", None) is not None
            or getattr(group, "force_sum_reduction_for_comms", False)
        )
        return not is_divided and all(
            p.orig_dtype == flat.dtype
            and p.sharded_param.grad is None
            and not p.offload_to_cpu
            and not getattr(p.sharded_param, "_post_accumulate_grad_hooks", None)
            for p in _trainable(group)
        )

    def _wait(self, device: torch.device, job: Callable[[], None]) -> None:
        """Waits for all exchanges that have begun. Then runs the job. Raises what failed."""
        start = time.perf_counter()
        self.run_after_others(job)
        if (stream := self._streams.get(device)) is not None:
            stream_of(device).wait_stream(stream)
        self.statistics.exposed_s += time.perf_counter() - start
        self.raise_failure()

    def _end_backward(self, device: torch.device) -> None:
        """FSDP is ready for the next backward by now, so a step that was taken back does not end the run."""
        self._wait(device, self._begun.clear)
        self.raise_if_taken_back()
        if len(self._reduced) == len(self._groups) and not self._finite:
            self._show_that_not_finite()

    def _show_that_not_finite(self) -> None:
        """Every gradient gets a NaN: other shards may have been the ones that are not finite, and each optimizer looks at its
        own parameters only."""
        for group in self._groups:
            for p in _trainable(group):
                grad = p.sharded_param.grad
                if grad is not None and (own := grad.to_local()).numel() > 0:
                    own[(0,) * own.dim()] = math.nan

    def _reduce(self, name: str, index: int, flat: torch.Tensor) -> None:
        assert self.buckets is not None
        members = self.buckets[index]
        expected = sum(self.lengths[i] for i in members)
        if flat.numel() != expected:
            raise _core.InvalidArgument(
                f"skim: module '{name}' reduces {flat.numel()} entries instead of {expected}: a parameter has no gradient "
                "in this step; call model.set_reduce_scatter_unused_params(True)"
            )
        self.expect_no_gradient_of_a_server([flat])
        with self.lock:
            if index in self._reduced:
                self.finish_step()
            opens = not self.step_is_open
            self.begin_bucket(index, members, opens_step=opens)
            if opens:
                self._scale_now = self.unit.scale()
            self._reduced.add(index)
            mine = 1 << index % 32
            for slot, offset, length in self.slots_of(members, index):
                self.reducer.raise_signal(mine)
                report = self.reduce_part(slot, flat[offset : offset + length], self._scale_now)
                if report.signals != mine:
                    raise _core.InvalidArgument(
                        f"skim: this island reduced module '{name}', and another island another module at the same time: in a "
                        "step all islands must use the same modules, in the same order"
                    )
            if len(self._reduced) == len(self.buckets):
                self.end_of_step()
                self.take_back_if_not_finite()


def _hook_of(of: weakref.ref[FsdpCompression], name: str, index: int) -> Any:
    """The hook of one module. It runs in backward, after the reduce-scatter inside the island."""

    def hook(reduced: torch.Tensor) -> None:
        compression = of()
        if compression is None:
            return
        try:
            compression.reduce_bucket(name, index, reduced)
        except BaseException as e:
            compression.fail(e)
            raise

    return hook


def _group_of(name: str, module: FSDPModule) -> Any:
    """What FSDP keeps of a module's own parameters; None: it has none. Raises InvalidArgument for what Skim cannot serve."""
    if not hasattr(module, "set_all_reduce_hook"):
        raise _core.InvalidArgument(f"skim.attach: fully_shard of PyTorch {torch.__version__} has no hook; use 2.7 or later")
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older versions of PyTorch have one
        groups = [g for g in (state._fsdp_param_group,) if g is not None]
    if len(groups) > 1:
        raise _core.InvalidArgument(
            f"skim.attach: module '{name}' has parameters on several meshes (shard_placement_fn), which its hook cannot serve"
        )
    if any(g._is_hsdp for g in groups):
        raise _core.InvalidArgument(
            f"skim.attach: module '{name}' is also replicated by fully_shard, which sends whole gradients between islands; "
            "give fully_shard the mesh of the island alone: mesh=mesh['inside'] of a mesh ('between', 'inside')"
        )
    return groups[0] if groups else None


def _trainable(group: Any) -> list[Any]:
    """What FSDP keeps of each parameter that is trained."""
    return [] if group is None else [p for p in group.fsdp_params if p.sharded_param.requires_grad]


def _stand_in(p: Any) -> torch.Tensor:
    """A tensor with type, device and length of the gradient of a parameter's shard, which FSDP pads. Takes no memory."""
    tensor: torch.Tensor = p.sharded_param
    dtype = p.mp_policy.reduce_dtype or tensor.dtype
    return torch.zeros(1, dtype=dtype, device=tensor.device).expand(p.padded_sharded_param_size.numel())
