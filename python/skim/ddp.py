"""Skim as the communication hook of PyTorch's DistributedDataParallel."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from skim import _core
from skim._compression import STATE, Compression, Options, same_on_all_ranks, set_hook
from skim._report import Report
from skim.dry_run import DryRun

LEAST_RATE = 1e-20  # stands for 0 where there was no other yet

_attached: weakref.WeakKeyDictionary[DistributedDataParallel, DdpCompression] = weakref.WeakKeyDictionary()


def attach(
    model: Any,
    density: Any = 0.001,
    exchange: Any = "auto",
    *,
    chooser: Any = None,
    select: Any = "exact",
    values: str = "f32",
    scaler: Any = None,
    updates_of: Any = None,
    momentum_correction: float = 0.0,
    nesterov_correction: bool = False,
    local_clip: float = 0.0,
    error_feedback: bool = True,
    residual_decay: float = 1.0,
    dense_below: int = 4096,
    non_finite: str = "pass-on",
    total_steps: int = 0,
    local: Any = None,
    timeout: float = 1800.0,
    writer: Any = None,
    dry_run: bool | int = False,
) -> Any:
    """Compresses the gradients of a DistributedDataParallel model from now on.

    Call it once, on every rank, with the same arguments, before or between training steps. The
    optimizer then gets the mean over the ranks of what was sent; what was not sent stays in this
    rank's residual, and is added to the next step's gradient.

    density: the share k/n of gradient entries that each rank sends, in (0, 1]; or a schedule, also
        of your own (skim.protocols).
    exchange: "auto", a name of skim.exchanges, or skim.ExchangeOptions.
    chooser: skim.ChooserOptions: what "auto" may choose, and at what cost.
    select: the rule that chooses them: one of skim.select_algos, or skim.SelectOptions, or an
        object of your own (skim.protocols).
    values: how values travel: one of skim.value_codes. With skim.ExchangeOptions their codec says it.
    scaler: the GradScaler, if there is one: residuals are kept unscaled.
    updates_of: the optimizer (SGD): residuals then hold gradients times its learning rate, that of its
        first group, so that a rate that falls does not shrink what waits.
    momentum_correction, nesterov_correction: momentum correction, instead of the optimizer's momentum.
    local_clip: of this rank's gradient, before it is compressed; 0: none.
    error_feedback: False: what is not sent is lost.
    residual_decay: factor of the residual in every step, in (0, 1]; below 1 what waits is forgotten.
    dense_below: buckets with fewer entries are summed whole.
    non_finite: what a NaN or an infinity in a gradient of any rank does. The step is taken back on
        all ranks. "pass-on": the gradient then holds a NaN, for a GradScaler (or the user) to see;
        "raise": backward raises on all ranks.
    total_steps: for schedules that plan ahead.
    local: a function without arguments that makes a local half of your own (skim.protocols), once for
        this model. It gets the gradients as tensors on their device. Not with select, momentum_correction,
        nesterov_correction, local_clip, error_feedback and residual_decay, which are its own business.
    timeout: seconds that a rank waits for another. A rank that ends is noticed at once.
    writer: a TensorBoard SummaryWriter, or whatever has add_scalar(tag, value, step).
    dry_run: True, or a number of steps (True: 20): trains as before, without compression, measures
        those steps and the link, and prints on rank 0 whether compression would pay, how, and how
        much. The other options do not count then.

    Returns the DdpCompression (or DryRun), which state_dict and the others find by the model.
    Raises InvalidArgument where the model or an option cannot work, with what to do instead.
    """
    ddp = _unwrapped(model)
    if ddp in _attached:
        raise _core.InvalidArgument("skim.attach: this model has been attached already")
    if non_finite not in ("pass-on", "raise"):
        raise _core.InvalidArgument(f"non_finite: no '{non_finite}'; there are: pass-on, raise")
    if dry_run:
        return DryRun(ddp, 20 if dry_run is True else dry_run, timeout)
    options = Options(
        density=density,
        exchange=exchange,
        chooser=chooser,
        select=select,
        values=values,
        momentum_correction=momentum_correction,
        nesterov_correction=nesterov_correction,
        local_clip=local_clip,
        error_feedback=error_feedback,
        residual_decay=residual_decay,
        dense_below=dense_below,
        non_finite=non_finite,
        total_steps=total_steps,
        local=local,
    )
    if updates_of is not None and local_clip > 0.0:
        raise _core.InvalidArgument(
            "skim.attach: updates_of and local_clip exclude each other: the limit is one of gradients"
        )
    if updates_of is not None and not hasattr(updates_of, "param_groups"):
        raise _core.InvalidArgument(
            f"skim.attach: updates_of must be an optimizer, with param_groups, not {type(updates_of).__name__}"
        )
    compression = DdpCompression(ddp, options, scaler, updates_of, timeout, writer)
    _attached[ddp] = compression
    return compression


def compression_of(model: Any) -> DdpCompression:
    """What attach(model) returned."""
    found = _attached.get(_unwrapped(model))
    if found is None:
        raise _core.InvalidArgument("skim: this model has not been attached; call skim.attach(model) first")
    return found


def report(model: Any) -> Report:
    """Bytes, times and decisions of this rank so far; print it for a table."""
    return compression_of(model).report()


def state_dict(model: Any) -> dict[str, torch.Tensor]:
    """This rank's residuals and all else that compression goes on from: one tensor of bytes, whose
    key names the rank and the number of ranks. Every rank saves its own."""
    return compression_of(model).state_dict()


def load_state_dict(model: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Goes on from what state_dict gave: this rank's, or, on another number of ranks, those of all
    ranks of the saved run in one dict; every rank then has (1/P) of the sum of their residuals.
    Names of parameters count, buckets do not. Raises StateError, and nothing has changed."""
    compression_of(model).load_state_dict(state)


def state_template(checkpoint_id: Any, prefix: str = "skim") -> dict[str, torch.Tensor]:
    """Empty tensors for the states of all ranks in a torch.distributed.checkpoint, to load into:

        state = {"skim": skim.state_template(folder)}
        torch.distributed.checkpoint.load(state, checkpoint_id=folder)
        skim.load_state_dict(model, state["skim"])

    prefix: what state_dict was saved as.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    known = FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
    found = {}
    for key, value in known.items():
        head, _, name = key.rpartition(".")
        if head == prefix and STATE.match(name):
            found[name] = torch.empty(value.size, dtype=torch.uint8)  # type: ignore[union-attr]
    if not found:
        raise _core.StateError(f"skim: no state of Skim is called '{prefix}' in '{checkpoint_id}'")
    return found


class DdpCompression(Compression):
    """What skim.attach returns."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        options: Options,
        scaler: Any,
        updates_of: Any,
        timeout: float,
        writer: Any,
    ) -> None:
        named = {
            name.replace("_orig_mod.", ""): p
            for name, p in ddp.module.named_parameters()
            if p.requires_grad and name not in ddp.parameters_to_ignore
        }
        for name, module in ddp.module.named_modules():
            if getattr(module, "sparse", False) is True and isinstance(
                module, (torch.nn.Embedding, torch.nn.EmbeddingBag)
            ):
                raise _core.InvalidArgument(
                    f"skim.attach: '{name}' makes sparse gradients, which the hook cannot take; use sparse=False"
                )
        super().__init__(named, options, ddp.process_group, timeout, writer)
        whose = "None" if updates_of is None else type(updates_of).__name__
        same_on_all_ranks(self.comm, "options", [f"updates_of={whose}"])
        self._index_of = {p: i for i, p in enumerate(named.values())}
        self._scaler = scaler
        self._updates_of = updates_of
        self._rate = LEAST_RATE  # of the last step with one above 0
        self._finds_unused = ddp.find_unused_parameters and not ddp.static_graph
        self._seen: list[tuple[int, ...]] = []  # buckets of this step
        self._seen_before: list[tuple[int, ...]] = []
        set_hook(ddp, _hook, self)

    def rollback(self) -> None:
        """The trainer skips the step whose backward has just ended: nothing of it counts as
        delivered. On every rank or on none. A step that a GradScaler skips needs no call."""
        self.finish_step(skip=True)

    def report(self) -> Report:
        with self.lock:
            return self.statistics

    def finish_step(self, *, skip: bool = False) -> None:
        with self.lock:
            was_open = self._step_open
            super().finish_step(skip=skip)
            # DDP forms its buckets anew after the first step; then they stay.
            if was_open and self.buckets is None and self._seen == self._seen_before:
                self._set_layout(list(self._seen))
                self.statistics.buckets_stand()
            if was_open:
                self._seen_before, self._seen = self._seen, []

    def _reduce_bucket(self, index: int, last: bool, members: tuple[int, ...], flat: torch.Tensor) -> None:
        with self.lock:
            self.begin_bucket(index, members)
            self._seen.append(members)
            scale = self._scale()
            unused = self._unused_by_all(members, flat) if self._finds_unused else []
            for slot, offset, length in self.slots_of(members, index):
                self.reduce_part(slot, flat[offset : offset + length], scale)
                for begin, end in unused:
                    if offset <= begin and end <= offset + length:
                        self.give_back(slot, begin - offset, flat[begin:end].clone(), scale)
            if last:
                self.end_of_step()
                if not self._finite and self.options.non_finite == "raise":
                    self.finish_step()
                    raise _core.NonFiniteError("skim: a gradient entry of the group is NaN or infinite")

    def _scale(self) -> float:
        """By which the gradients of this step are larger than what residuals hold."""
        scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
        if self._updates_of is None:
            return scale
        # At 0 what is sent moves nothing, and what waits cannot be told in gradients of that rate.
        self._rate = float(self._updates_of.param_groups[0]["lr"]) or self._rate
        return scale / self._rate

    def _unused_by_all(self, members: tuple[int, ...], flat: torch.Tensor) -> list[tuple[int, int]]:
        """[begin, end) in the bucket of parameters without a gradient on any rank: DDP will not
        apply what comes of them."""
        parts = []
        offset = 0
        for i in members:
            parts.append((offset, offset + self.lengths[i]))
            offset += self.lengths[i]
        used = bytes(bool(flat[a:b].any()) for a, b in parts)
        of_all = self.comm.allgather(used)
        return [part for j, part in enumerate(parts) if not any(u[j] for u in of_all)]


# Without annotations: DDP compares them with the types themselves, which these are not as strings.
def _hook(state, bucket):  # type: ignore[no-untyped-def]
    compression = state.owner
    flat = bucket.buffer()
    members = tuple(compression._index_of[p] for p in bucket.parameters())
    index, last = bucket.index(), bucket.is_last()
    devices = None if flat.device.type == "cpu" else [flat.device]
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    failure: list[BaseException] = []
    ready = None if devices is None else torch.cuda.current_stream(flat.device).record_event()
    start = time.perf_counter_ns()

    def job() -> None:
        try:
            if ready is not None:
                ready.synchronize()
            compression._reduce_bucket(index, last, members, flat)
            if last:
                compression.statistics.exposed_s += (time.perf_counter_ns() - start) * 1e-9
        except BaseException as e:  # noqa: BLE001 - backward raises it
            compression.fail(e)
            failure.append(e)
        done.set_result(flat)

    def finish(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        if failure:
            raise failure[0]
        return future.value()

    # A future that set_exception was called on ends in DDP as a tensor of a wrong type; one whose
    # callback raises ends as what was raised.
    answer = done.then(finish)
    if last and len(_attached) == 1:
        # Backward has nothing left to hide it behind, so a change of threads would only cost time. Not
        # with a second model: its last bucket might be first on another rank, and each wait for the other.
        compression.run_after_others(job)
    else:
        compression.submit(job)
    return answer


def _unwrapped(model: Any) -> DistributedDataParallel:
    """The DDP model itself. Raises InvalidArgument for what is none, with what to use instead."""
    inner = model
    if isinstance(model, torch.nn.Module):
        inner = model._modules.get("_orig_mod", model)  # of torch.compile
    if isinstance(inner, DistributedDataParallel):
        return inner
    kind = type(inner).__name__
    if any(t.__name__ in ("FullyShardedDataParallel", "FSDPModule") for t in type(inner).__mro__):
        raise _core.InvalidArgument(
            f"skim: {kind} shards its gradients, which Skim does not exchange; use DistributedDataParallel, "
            "or skim.Aggregator on a model that is whole on every rank"
        )
    if isinstance(inner, torch.nn.Module):
        raise _core.InvalidArgument(
            f"skim: the model must be a DistributedDataParallel, not {kind}; wrap it, or use "
            "skim.Aggregator(model.parameters())"
        )
    raise _core.InvalidArgument(f"skim: the model must be a DistributedDataParallel, not {kind}")
