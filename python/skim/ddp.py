"""Skim as the communication hook of PyTorch's DistributedDataParallel."""

from __future__ import annotations

import gc
import os
import pickle
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch.nn.parallel import DistributedDataParallel

from skim import _core
from skim._checks import has_method
from skim._compression import Compression, Unit
from skim._hook import raising_at_the_end, set_hook
from skim._momentum import expect_trains
from skim._options import Options
from skim._parameters import Trainable, buckets_of, expect_parameters
from skim._report import Report
from skim._shards import expect_no_replicate, is_sharded
from skim._states import STATE, expect_state, json_tensor, json_value
from skim.dry_run import DryRun, steps_of
from skim.elastic import ElasticGroup
from skim.fsdp import FsdpCompression
from skim.tensor_half import stream_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from typing_extensions import Unpack

    from skim._options import AttachOptions, ReducerOptions
    from skim.protocols import OwnLocalHalf, OwnSchedule, OwnSelector

BUCKET_BYTES = 25e6
BUCKETS = "buckets"  # a key of states: the names of the parameters of each bucket of DDP, in JSON
FSDP_ADVICE = (
    "skim.attach: a model with fully_shard needs between=, the process group of the ranks that have the same shards, "
    "one in each island; fully_shard over the slow links themselves sends whole parameters: shard inside islands, or "
    "use skim.LocalSteps"
)

# All that are attached, until Python frees them.
_attached: weakref.WeakSet[DdpCompression | FsdpCompression] = weakref.WeakSet()


class _Attachment:
    """What attach() made of a model. The model keeps it, so that Python frees both, even if each refers to the other. A copy
    of the model gets an empty one."""

    NAME = "_skim"  # of the model's attribute

    def __init__(self, made: DdpCompression | FsdpCompression | DryRun | None = None) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return _Attachment, ()

    @staticmethod
    def of(model: torch.nn.Module) -> DdpCompression | FsdpCompression | DryRun | None:
        found = model.__dict__.get(_Attachment.NAME)
        return None if found is None else found.made

    @staticmethod
    def set(model: torch.nn.Module, made: DdpCompression | FsdpCompression | DryRun | None) -> None:
        model.__dict__[_Attachment.NAME] = _Attachment(made)


@overload
def attach(
    model: torch.nn.Module,
    density: float | _core.DensitySchedule | OwnSchedule = 0.01,
    exchange: str = "auto",
    *,
    dry_run: Literal[False] = False,
    **options: Unpack[AttachOptions],
) -> DdpCompression | FsdpCompression: ...
@overload
def attach(
    model: torch.nn.Module,
    density: float | _core.DensitySchedule | OwnSchedule = 0.01,
    exchange: str = "auto",
    *,
    dry_run: Literal[True] | int,
    **options: Unpack[AttachOptions],
) -> DryRun: ...
def attach(
    model: torch.nn.Module,
    density: float | _core.DensitySchedule | OwnSchedule = 0.01,
    exchange: str = "auto",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    updates_of: torch.optim.Optimizer | None = None,
    total_steps: int = 0,
    non_finite: str = "pass-on",
    selector: OwnSelector | None = None,
    local: Callable[[], OwnLocalHalf] | Literal["device", "host"] | None = None,
    offload: bool = False,
    replay: dict[str, Any] | None = None,
    process_group: ElasticGroup | None = None,
    between: Any = None,
    timeout: float = 1800.0,
    writer: Any = None,
    dry_run: bool | int = False,
    **options: Unpack[ReducerOptions],
) -> DdpCompression | FsdpCompression | DryRun:
    """Compresses the gradients of a model from now on: of a DistributedDataParallel, or one with fully_shard.

    Call it once, on every rank, with the same arguments, before or between training steps. Each rank
    then sends only the largest entries of its gradient. It keeps the rest in a residual, which it adds
    to the gradient of the next step. The optimizer gets the mean over the ranks of the entries sent.

    density: the fraction k/n of gradient entries that each rank sends, in (0, 1]. Or a schedule, such
        as skim.listed_density(...) or an object of your own (skim.protocols).
    exchange: "auto" chooses the fastest exchange for each bucket. Or a name of skim.exchanges.
    optimizer: the model's torch.optim.SGD, Adam or AdamW. Give it: sparse training then ends much closer
        to dense training (docs/pytorch.md). Momentum correction replaces its momentum (Adam: its first
        moment). The optimizer's own momentum becomes 0, so that no momentum counts twice. For SGD,
        residuals also hold updates (updates_of), and weight_decay is multiplied by
        (1 - dampening) / (1 - momentum), because momentum no longer sums it up. Multiply a weight_decay
        that you set later by it, too. Not together with momentum_correction, momentum_dampening,
        nesterov_correction and a local half of your own.
    scaler: the GradScaler, if you use one. Residuals are then kept unscaled.
    updates_of: the optimizer (SGD). Residuals then hold updates: gradients times the largest learning
        rate of its groups. A learning rate that falls then does not shrink entries that wait.
        Not together with local_clip.
    total_steps: the number of steps of the run; 0: not known. Schedules plan ahead with it. If the
        density is a number, rank 0 warns of a run in which the average entry is sent too rarely.
    non_finite: if a gradient of any rank holds NaN or infinity, the step is taken back on all ranks.
        "pass-on": the mean then holds a NaN, for a GradScaler or your loop to see. "raise": backward
        raises NonFiniteError on all ranks. Set the gradients to None then, and go on if you like.
    selector: an object of your own that selects the entries (skim.protocols).
    local: where residuals are kept and entries are selected. "device": where the gradients are
        (skim.TensorLocalHalf; it selects as select="exact" does). "host": in host memory, to which each
        gradient is copied whole. None: "device" on a GPU if it has the options, otherwise "host".
        Or a function without arguments that makes a local half of your own (skim.protocols). It is
        called once for this model. It gets the gradients as tensors on their device, and selects and
        keeps residuals itself, so leave out the options for that.
    offload: True: with local="device", residuals and the velocities of momentum correction are in the host's memory.
        Each step copies them to the device and back, beside its work. Two buckets of them are on the device at a time.
        Not together with residual_code, nor with a local half of your own. Without local="device" they are in the
        host's memory anyway.
    replay: skim.report(model).choices of an earlier run, for exchange="auto". This run then takes the same exchange
        for every bucket of every step, and has the same bits on the same data. After the last recorded change it stays
        with what was chosen. Model, buckets and number of ranks must be the same.
    options: any option of skim.Reducer, which help(skim.Reducer) lists. Among them:
        select: the rule that selects the entries: one of skim.select_rules.
        value_code: of values on the wire: one of skim.value_codes. The default here is "q4": 4-bit values
            with scales for blocks. The rounding error stays in the residual.
        momentum_correction: in [0, 1); 0: none. Use it instead of the optimizer's momentum.
        local_clip: this rank's gradient of a bucket with n of the model's N parameters is scaled down to a norm of at most
            local_clip * sqrt(n / (P N)), before compression; 0: no limit.
        feedback: False: there is no residual, and entries that are not sent are lost.
        residual_decay: factor of the residual in every step, in (0, 1]. Below 1, old entries fade.
        dense_below: buckets with fewer entries are summed whole.
        server: for exchange="param-server": "rank0", which also trains, "dedicated", or "sharded". A dedicated server is
            rank 0, which has no gradient: it hands in zeros, as by (0 * loss).backward(), and anything else is refused.
        among, trial_share: for exchange="auto": the exchanges that it may choose, and the part of the
            time that it may spend on trials.
    process_group: a skim.ElasticGroup, whose ranks may change. The process group of DDP is then one of this rank
        alone, and the exchange begins when backward ends. The group has its own timeout. None: the ranks are those
        of DDP.
    between: for a model that is sharded inside an island of fast links (fully_shard, with the mesh of the island):
        the process group of the ranks that have the same shards, one in each island. Skim then exchanges their
        gradients over the slow links. Or, for exchange="hierarchical", the name of the exchange between hosts.
    timeout: seconds that a rank waits for another. A rank that ends is noticed in about a second.
    writer: a TensorBoard SummaryWriter, or any object with add_scalar(tag, value, step).
    dry_run: True (20 steps) or a number of steps >= 1. Trains without compression, as before, and
        measures that many steps and the link. Then rank 0 prints whether compression would pay, with
        which density and exchange, and the predicted speed-up. With total_steps it also says what is
        known about the quality. Ignores the other options.

    Returns the DdpCompression, FsdpCompression or DryRun. You need not keep it: skim.compression_of(model) and the
    other functions find it by the model.
    Raises InvalidArgument if the model or an option cannot work. The message says what to do instead.
    """
    from skim.local_steps import expect_no_local_steps  # which imports this module

    if isinstance(model, torch.nn.Module):
        expect_no_replicate("skim.attach", model)
    inner = _unwrapped(model)
    if isinstance(between, str):  # the option of skim.Reducer
        options["between"], between = between, None
    if isinstance(_Attachment.of(inner), Compression):
        raise _core.InvalidArgument("skim.attach: this model has been attached already")
    expect_no_local_steps("skim.attach", inner)
    is_ddp = isinstance(inner, DistributedDataParallel)
    if is_ddp == (between is not None):
        raise _core.InvalidArgument(
            "skim.attach: between is for models with fully_shard; DDP has its process group" if is_ddp else FSDP_ADVICE
        )
    if getattr(inner, "skip_all_reduce_unused_params", False):
        raise _core.InvalidArgument(
            "skim.attach: DDP hides which bucket is the last one of a step; make DDP without "
            "skip_all_reduce_unused_params"
        )
    if dry_steps := steps_of(dry_run):
        if not isinstance(inner, DistributedDataParallel):
            raise _core.InvalidArgument("skim.attach: dry_run needs DistributedDataParallel")
        expect_parameters(_trained_by(inner))
        _expect_dense(inner)
        watcher = DryRun(inner, dry_steps, timeout, total_steps)
        _Attachment.set(inner, watcher)
        return watcher
    compressed = Options(
        density=density, optimizer=optimizer, total_steps=total_steps, selector=selector, local=local,
        offload=offload, replay=replay, non_finite=non_finite, others={"exchange": exchange, **options},
    )  # fmt: skip
    local_clip = options.get("local_clip", 0.0)
    if updates_of is None and isinstance(compressed.optimizer, torch.optim.SGD) and not local_clip:
        updates_of = compressed.optimizer
    if updates_of is not None and local_clip:
        raise _core.InvalidArgument(
            "skim.attach: updates_of and local_clip exclude each other: the limit is for gradients"
        )
    if updates_of is not None and not hasattr(updates_of, "param_groups"):
        raise _core.InvalidArgument(
            f"skim.attach: updates_of must be an optimizer, with param_groups, not {type(updates_of).__name__}"
        )
    if scaler is not None and not has_method(scaler, "get_scale"):
        raise _core.InvalidArgument(f"skim.attach: scaler must be a GradScaler, with get_scale(), not {scaler!r}")
    unit = Unit(scaler, updates_of)
    compression: DdpCompression | FsdpCompression
    if isinstance(inner, DistributedDataParallel):
        if process_group is not None:
            _expect_elastic(inner, process_group)
        compression = DdpCompression(inner, compressed, unit, process_group, timeout, writer)
    else:
        if process_group is not None:
            raise _core.InvalidArgument("skim.attach: no ElasticGroup for a model with fully_shard")
        compression = FsdpCompression(cast("FSDPModule", inner), between, compressed, unit, timeout, writer)
    _Attachment.set(inner, compression)
    _attached.add(compression)
    if compression.comm.rank == 0 and total_steps > 0 and isinstance(density, (int, float)):
        if density * total_steps < _core.level_sends:
            warnings.warn("skim.attach: " + _core.quality_note(density, total_steps), stacklevel=2)
    return compression


def _expect_elastic(ddp: DistributedDataParallel, group: Any) -> None:
    if not isinstance(group, ElasticGroup):
        raise _core.InvalidArgument(
            f"skim.attach: process_group: a skim.ElasticGroup or None, not {type(group).__name__}; DDP has the group "
            "of ranks that do not change"
        )
    if ddp.process_group.size() != 1:
        raise _core.InvalidArgument(
            "skim.attach: with an ElasticGroup, DDP needs a process group of this rank alone: torch.distributed."
            'init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)'
        )
    if ddp.find_unused_parameters:
        raise _core.InvalidArgument(
            "skim.attach: no find_unused_parameters with an ElasticGroup: DDP would not apply a mean where this rank "
            "alone has no gradient; use skim.Aggregator"
        )


def expect_not_attached(parameters: Iterable[torch.Tensor]) -> None:
    """Raises InvalidArgument if skim.attach has the gradients of one of these parameters exchanged."""
    mine = set(parameters)

    def is_attached() -> bool:
        return any(not mine.isdisjoint(compression.trained) for compression in _attached)

    if is_attached():
        gc.collect()  # in case that only Python still has the other model
        if is_attached():
            raise _core.InvalidArgument(
                "skim.LocalSteps: skim.attach exchanges the gradients of this model in every step; call "
                "skim.detach(model) first"
            )


def compression_of(model: torch.nn.Module) -> DdpCompression | FsdpCompression:
    """What attach(model) returned. Raises InvalidArgument if the model is not attached."""
    found = _Attachment.of(_unwrapped(model))
    if isinstance(found, DryRun):
        raise _core.InvalidArgument(
            "skim: this model is in a dry run, which compresses nothing; call skim.attach(model) without dry_run first"
        )
    if found is None:
        raise _core.InvalidArgument("skim: this model has not been attached; call skim.attach(model) first")
    return found


def report(model: torch.nn.Module) -> Report:
    """This rank's bytes, times and decisions so far. print() shows them as a table."""
    return compression_of(model).report()


def state_dict(model: torch.nn.Module, *, gather: bool = False) -> dict[str, torch.Tensor]:
    """This rank's residuals and all other state of compression: one tensor of bytes, under the key rank_R_of_P, or
    shard_S_of_W_rank_R_of_P with fully_shard. Every rank must save its own.

    Ends the open step, if there is one. If your loop skips that step, call rollback() before you save. DDP's buckets
    are settled after its third step, with static_graph after its fifth. From then on the key "buckets" has them, and a
    run that resumes goes on bit for bit. With updates_of, the key "rate" has the last learning rate above 0.

    gather: True, for scripts that save on rank 0: rank 0 gets the states of all ranks, and the others an empty dict.
        Collective. For a moment every rank holds P times its residuals. Not with fully_shard.
    """
    return compression_of(model).state_dict(gather=gather)


def load_state_dict(
    model: torch.nn.Module, state: Mapping[str, torch.Tensor], strict: bool = True
) -> _core.LoadReport:
    """Restores what state_dict returned.

    state: the state of this rank. If the number of ranks has changed: the states of all P ranks of the
        saved run, in one dict. Each residual then becomes (1/P) times the sum of the saved ones.
    strict: False, on all ranks: the model may have other parameters than the saved one. Parameters that both have
        get their residuals back. Those that only the model has begin at 0. The residuals of those that only the state
        has are lost.

    Returns (missing_keys, unexpected_keys), as Module.load_state_dict of PyTorch. unexpected_keys is a dict with
    the norm of each lost residual of this rank. Both are empty if strict.
    A parameter must have as many entries as in the saved run. Buckets, exchange and rule may differ. A schedule with a
    state, such as an adaptive one, must have the same options. Raises StateError if the state is damaged or does not
    fit. After this error nothing has changed.
    """
    return compression_of(model).load_state_dict(state, strict)


def detach(model: torch.nn.Module) -> None:
    """Ends what attach(model) began. Call it on every rank, between steps. Later steps average whole gradients, and the
    model may be attached anew.

    The optimizer that attach got has its own momentum again, which begins at 0. The gradients that the residuals
    hold are lost: use density 1 for a last step if they matter. Not in an ElasticGroup.
    """
    compression = compression_of(model)
    compression.detach()
    _attached.discard(compression)
    _Attachment.set(_unwrapped(model), None)


def state_template(checkpoint_id: str | os.PathLike[str], prefix: str = "skim") -> dict[str, torch.Tensor]:
    """Empty tensors into which torch.distributed.checkpoint can load the states of all ranks, also of LocalSteps:

        state = {"skim": skim.state_template(folder)}
        torch.distributed.checkpoint.load(state, checkpoint_id=folder)
        skim.load_state_dict(model, state["skim"])

    checkpoint_id: the folder of the checkpoint.
    prefix: the key under which the state was saved.
    Raises StateError if there is no checkpoint, or if it has no such state.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not isinstance(checkpoint_id, (str, os.PathLike)):
        raise _core.InvalidArgument(
            f"skim.state_template: checkpoint_id: must be a folder's path, not {checkpoint_id!r}"
        )
    try:
        known = FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
    except (OSError, EOFError, pickle.UnpicklingError) as e:
        raise _core.StateError(
            f"skim.state_template: no checkpoint in '{checkpoint_id}' ({e}); give a folder that "
            "torch.distributed.checkpoint.save has written"
        ) from None
    found = {}
    for key, value in known.items():
        head, _, name = key.rpartition(".")
        if head == prefix and isinstance(value, TensorStorageMetadata):
            found[name] = torch.empty(value.size, dtype=value.properties.dtype, device="cpu")
    if not any(map(STATE.search, found)):
        raise _core.StateError(f"skim: no state of Skim is called '{prefix}' in '{checkpoint_id}'")
    return found


class DdpCompression(Compression):
    """The compression of one model. skim.attach makes it.

    If the density is a schedule that depends on epochs, set `epoch` at the start of each one, on every rank. It counts
    from the second step on, because a step chooses the density of the next one.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        options: Options,
        unit: Unit,
        elastic: ElasticGroup | None,
        timeout: float,
        writer: Any,
    ) -> None:
        self._parameters = _trained_by(ddp)
        expect_trains(options.optimizer, self._parameters)
        # DDP keeps a gradient in the order of its parameter's memory, and so do residuals. Their names say so: a state
        # in another order does not fit.
        named = {name + _order_of(p): p for name, p in self._parameters.items()}
        _expect_dense(ddp)
        _expect_found_by(ddp, self._parameters)
        ranks = ddp.process_group if elastic is None else elastic
        super().__init__(named, options, ranks, timeout, writer, unit)
        self._index_of = {p: i for i, p in enumerate(named.values())}
        self.trained = list(named.values())
        self._trainable = Trainable(
            ((name, p) for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore),
            "call skim.detach, wrap the model in DDP anew, and attach",
        )
        self._scale_now = 1.0  # of this step
        self._finds_unused = ddp.find_unused_parameters and not ddp.static_graph
        self._used: set[int] = set()  # the parameters that have got a gradient since the last step, if it does
        self._used_before: set[int] = set()  # in the last step, by any rank
        self._missing: set[int] = set()  # the parameters whose buckets have not come in this step
        self._arrived = 0  # buckets of this step that have come
        self._seen: list[tuple[int, ...]] = []  # buckets of this step that were reduced
        self._seen_before: list[tuple[int, ...]] = []
        self._stand = 0  # for so many steps in a row DDP had the same buckets
        # DDP forms them anew after its first step, with a static graph after its second.
        self._settled_after = 3 if ddp.static_graph else 2
        # Whether the whole step is reduced at once, in self.buckets, whatever buckets DDP has. In an elastic group, because
        # a step may have to be taken twice, and DDP's buckets may differ between ranks. After load_state_dict, until DDP has
        # the buckets of the saved run.
        self._collects = elastic is not None
        self._gradients: dict[int, torch.Tensor] = {}  # of this step, by the index of the parameter
        # What DDP waits for, with its result, until the step is reduced.
        self.held_back: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        if elastic is not None:
            parameters = list(named.values())
            self._set_layout(buckets_of(parameters, range(len(parameters)), BUCKET_BYTES))
        self._ddp = weakref.ref(ddp)
        set_hook(ddp, self._on_bucket)
        self._notes = [
            _accumulator(p).register_prehook(_noting(i, self._used)) for i, p in enumerate(named.values()) if self._finds_unused
        ]
        for note in self._notes:  # the parameters may outlive DDP
            weakref.finalize(self, note.remove).atexit = False
        self.take_over_momentum()

    def residuals(self) -> dict[str, torch.Tensor]:
        in_memory = super().residuals().values()
        return {
            name: torch.as_strided(r, p.shape, p.stride()).flatten() if _order_of(p) else r
            for (name, p), r in zip(self._parameters.items(), in_memory)
        }

    residuals.__doc__ = Compression.residuals.__doc__

    def detach(self) -> None:
        """Use skim.detach(model), which calls it. Ends the last step, gives the optimizer its momentum back, and lets DDP
        average whole gradients."""
        if self.elastic is not None:
            raise _core.InvalidArgument("skim.detach: not in an ElasticGroup: its DDP has a process group of this rank alone")
        super().detach()
        for note in self._notes:
            note.remove()
        if (ddp := self._ddp()) is not None:
            set_hook(ddp, None)

    def _on_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        try:
            return self._begin_bucket(bucket)
        except BaseException as e:  # by a signal handler, before the exchange that the other ranks wait for has begun
            self.fail(e)
            raise

    def _begin_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        flat = bucket.buffer()
        members = tuple(self._index_of[p] for p in bucket.parameters())
        index, last = self._place_of(members)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=None if flat.device.type == "cpu" else [flat.device]
        )
        stream = stream_of(flat.device)
        ready = None if stream is None else stream.record_event()
        start = time.perf_counter_ns()
        if torch._C._current_graph_task_id() < 0:
            # Not in backward: DDP's join stands in for a rank that has no more inputs. DDP counts so, too.
            self._used.update(self._used_before)

        def end() -> None:
            """After the last bucket, completes the futures, whether or not the buckets were reduced. Otherwise backward would
            wait for ever. Not earlier, because only then is it known whether the means must have a NaN, and backward
            looks at none of them before."""
            self.held_back.append((done, flat))
            if not last:
                return
            self._used.clear()
            # If a signal handler raises here, end() runs again. So all futures stay in the list until they are done.
            for future, mean in self.held_back:
                if future.done():
                    continue
                try:
                    future.set_result(mean)
                except BaseException as e:  # noqa: BLE001 - an error of the device, which then records no event
                    self.fail(e)
                    future.set_result(torch.zeros_like(mean, device="cpu"))
            self.held_back.clear()

        def job() -> None:
            try:
                with self.after(ready, flat.device):
                    self._reduce_bucket(index, last, members, flat)
                    if last:
                        self.statistics.exposed_s += (time.perf_counter_ns() - start) * 1e-9
                    end()  # the future notes the stream of this block
            except BaseException as e:  # noqa: BLE001 - backward raises it
                self.fail(e)
                end()

        answer = raising_at_the_end(done, self._raise_what_failed) if last else done
        # After the last bucket backward has nothing left to overlap with, so a change of threads would only cost time.
        # With a second attached model this could deadlock: two ranks might reach the models' last buckets in different
        # orders, and each would wait for the other.
        (self.run_after_others if last and len(_attached) == 1 else self.submit)(job)
        return answer

    def _place_of(self, members: tuple[int, ...]) -> tuple[int, bool]:
        """The number of the bucket that comes next in this step, and whether it is the last one. In the first step of a
        static graph DDP gives the number 0 to all buckets. members: the indices of its parameters."""
        if not self._missing.issuperset(members):  # a new step
            self._missing, self._arrived = set(range(len(self.names))), 0
        self._missing.difference_update(members)
        self._arrived += 1
        return self._arrived - 1, not self._missing

    def _raise_what_failed(self) -> None:
        """At the end of backward, when DDP is ready for the next one."""
        self.raise_failure()
        self.raise_if_taken_back()

    def rollback(self) -> None:
        """Call this if your loop skips the step whose backward has just ended. Nothing of the step then
        counts as delivered, and residuals keep its gradients. Call it on every rank or on none. A step
        that a GradScaler skips needs no call. Without effect after state_dict() and residuals(), which
        end the step. Not in an ElasticGroup, where a step ends with backward."""
        if self.elastic is not None:
            raise _core.InvalidArgument("skim: no rollback in an ElasticGroup: the step ended with backward")
        self.finish_step(skip=True)

    def state_dict(self, *, gather: bool = False) -> dict[str, torch.Tensor]:
        """As skim.state_dict(model). Ends the open step, if there is one. A rollback() after it changes nothing."""
        found = super().state_dict(gather=gather)
        if found and self.buckets is not None and self.elastic is None:
            found[BUCKETS] = json_tensor([[self.names[i] for i in members] for members in self.buckets])
        return found

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> _core.LoadReport:
        """As skim.load_state_dict(model, state, strict)."""
        expect_state(state, strict)
        saved = self._buckets_in(state)
        if saved is None:
            return super().load_state_dict(state, strict)
        self.finish_step()
        with self.lock:
            before = self.buckets
            try:
                self._set_layout(saved)
                report = super().load_state_dict(state, strict)
            except BaseException:
                self._set_layout(before)
                raise
            self.statistics.buckets_stand()
            self._collects, self._seen_before = True, []
            return report

    def _buckets_in(self, state: Mapping[str, torch.Tensor]) -> list[tuple[int, ...]] | None:
        """The buckets of the saved run. None: it has none, they are not of this model, or they cannot be kept."""
        if BUCKETS not in state or self.elastic is not None:
            return None
        try:
            names = json_value(state[BUCKETS])
            index = {name: i for i, name in enumerate(self.names)}
            found = [tuple(index[name] for name in members) for members in names]
        except (ValueError, TypeError, KeyError):
            return None
        return found if sorted(i for members in found for i in members) == list(range(len(self.names))) else None

    def finish_step(self, *, skip: bool = False) -> None:
        """As Compression.finish_step(). DDP's buckets may be settled by then, which changes the layout."""
        with self.lock:
            was_open = self.step_is_open
            super().finish_step(skip=skip)
            if not was_open:
                return
            self._stand = self._stand + 1 if self._seen == self._seen_before else 1
            if self.elastic is None and (self.buckets is None or self._collects):
                self._settle()
            self._seen_before, self._seen = self._seen, []
            self._trainable.warn_of_changes()

    def _settle(self) -> None:
        """Takes DDP's buckets once some steps in a row had the same ones, or one step had those of a saved run."""
        if self._seen == self.buckets:
            self._collects = False
        elif self._stand >= self._settled_after:
            self._set_layout(list(self._seen))
            self.statistics.buckets_stand()
            self._collects = False

    def _reduce_bucket(self, index: int, last: bool, members: tuple[int, ...], flat: torch.Tensor) -> None:
        if index == 0:
            self.finish_step()
            self._gradients.clear()
        self.expect_no_gradient_of_a_server([flat])
        if self._collects:
            self._seen.append(members)
            self._gradients.update(zip(members, torch.split(flat, [self.lengths[i] for i in members])))
            if last:
                with self.lock:
                    self._reduce_collected(self._gradients)
                    self._end_step()
            return
        with self.lock:
            self.begin_bucket(index, members, opens_step=index == 0)
            if index == 0:  # once a step, because a scaler on a GPU waits for it
                self._scale_now = self.unit.scale()
            self._seen.append(members)
            scale = self._scale_now
            gradients = dict(zip(members, torch.split(flat, [self.lengths[i] for i in members])))
            self._gradients.update(gradients)
            unused = self._unused_by_all(gradients)
            for slot, offset, length in self.slots_of(members, index):
                self.reduce_part(slot, flat[offset : offset + length], scale)
                of_slot = members if self.buckets is not None else (slot,)
                self._give_back_unused(slot, of_slot, gradients, unused, scale)
            if last:
                self._end_step()

    def _end_step(self) -> None:
        self.end_of_step()
        self.take_back_if_not_finite()
        if not self._finite:  # each optimizer, and GradScaler for each, looks at its own parameters only
            for gradient in self._gradients.values():
                gradient[:1] = torch.nan
        self._gradients.clear()

    def _reduce_collected(self, gradients: dict[int, torch.Tensor]) -> None:
        assert self.buckets is not None
        scale, unused = self.unit.scale(), self._unused_by_all(gradients)
        self.reduce_buckets(range(len(self.buckets)), gradients, scale)
        for index, members in enumerate(self.buckets):
            self._give_back_unused(self._first_slot + index, members, gradients, unused, scale)

    def _unused_by_all(self, gradients: Mapping[int, torch.Tensor]) -> set[int]:
        """The parameters that no rank has used since the last step: DDP does not apply their means. Collective, if DDP
        looks for such parameters."""
        if not self._finds_unused:
            return set()
        used = bytes(i in self._used for i in gradients)
        of_all = self.comm.allgather(used)
        unused = {i for j, i in enumerate(gradients) if not any(u[j] for u in of_all)}
        self._used_before = self._used_before.union(gradients) - unused
        return unused

    def _give_back_unused(
        self, slot: int, members: Sequence[int], means: Mapping[int, torch.Tensor], unused: set[int], scale: float
    ) -> None:
        offset, marked = 0, False
        for i in members:
            if i in unused:
                self.give_back(slot, offset, means[i].clone(), scale)
                marked = marked or bool(means[i][:1].isnan().any())
            offset += self.lengths[i]
        if marked:  # the NaN that says that the step is not finite: it must be where DDP applies a mean
            for i in members:
                if i not in unused:
                    means[i][:1] = torch.nan


def _trained_by(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """The parameters whose gradients DDP exchanges, by name."""
    return {
        name.replace("_orig_mod.", ""): p
        for name, p in ddp.module.named_parameters()
        if p.requires_grad and name not in ddp.parameters_to_ignore
    }


def _expect_dense(ddp: DistributedDataParallel) -> None:
    for name, module in ddp.module.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(
            module, (torch.nn.Embedding, torch.nn.EmbeddingBag)
        ):
            raise _core.InvalidArgument(
                f"skim.attach: '{name}' makes sparse gradients, which the hook cannot take; use sparse=False"
            )


def _expect_found_by(ddp: DistributedDataParallel, trainable: Mapping[str, torch.Tensor]) -> None:
    """Raises InvalidArgument if DDP exchanges the gradients of other parameters, as far as their number or bytes differ."""
    found = ddp._get_ddp_logging_data()
    bytes_now = sum(p.numel() * p.element_size() for p in trainable.values())
    if (found["num_parameter_tensors"], found["total_parameter_size_bytes"]) == (len(trainable), bytes_now):
        return
    raise _core.InvalidArgument(
        f"skim.attach: requires_grad has changed since DDP was made: {found['num_parameter_tensors']} parameters were "
        f"trainable then, and {len(trainable)} are now; wrap the model in DDP anew"
    )


@torch.enable_grad()
def _accumulator(p: torch.Tensor) -> Any:
    """What adds to the parameter's gradient. DDP keeps it. Hooks of the parameter would run in torch.autograd.grad, too,
    which adds to no gradient."""
    return p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _noting(i: int, used: set[int]) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """A hook of parameter i's accumulator, which says that it was used, also where its gradient has zeros only."""

    def note(gradients: Sequence[torch.Tensor | None]) -> None:
        if gradients[0] is not None:
            used.add(i)

    return note


def _order_of(p: torch.Tensor) -> str:
    """ "": the gradient's entries are in memory in the order of their indices. Otherwise the order of dimensions, which DDP
    takes from a parameter without gaps in memory."""
    order = sorted(range(p.dim()), key=lambda d: -p.stride(d))
    return f" in the order {order}" if not p.is_contiguous() and p.permute(order).is_contiguous() else ""


def _unwrapped(model: Any) -> torch.nn.Module:
    """Returns the DDP model, or the one with fully_shard. Raises InvalidArgument for other objects, and says what to use instead."""
    inner = model
    if isinstance(model, torch.nn.Module):
        inner = model._modules.get("_orig_mod", model)  # torch.compile wraps the model
    if isinstance(inner, DistributedDataParallel) or (isinstance(inner, torch.nn.Module) and is_sharded(inner)):
        return inner
    kind = type(inner).__name__
    if kind == "FullyShardedDataParallel":
        raise _core.InvalidArgument(
            "skim: FullyShardedDataParallel shards its gradients, which Skim does not exchange; use "
            "torch.distributed.fsdp.fully_shard and skim.attach(model, between=group), or DistributedDataParallel"
        )
    if isinstance(inner, torch.nn.Module):
        if any(is_sharded(m) for m in inner.modules()):
            raise _core.InvalidArgument(
                f"skim: parts of the model have fully_shard, but the model itself, {kind}, has not; call fully_shard on it, too"
            )
        raise _core.InvalidArgument(
            f"skim: the model must be a DistributedDataParallel, not {kind}; wrap it, or use "
            "skim.Aggregator(model.parameters())"
        )
    raise _core.InvalidArgument(f"skim: the model must be a DistributedDataParallel, not {kind}")
