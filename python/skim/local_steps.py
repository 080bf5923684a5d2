"""Local steps: ranks train by themselves, and exchange how far their parameters have moved."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from skim import _core
from skim._checks import expect_whole, has_method
from skim._compression import InEpochs
from skim._momentum import correction_for, expect_trains, inner_optimizer, put_back
from skim._parameters import expect_dense
from skim._report import Report
from skim._shards import Shard, expect_no_replicate, local, make_equal, reshard
from skim._states import expect_state, json_tensor, json_value
from skim.aggregator import Aggregator
from skim.ddp import expect_not_attached
from skim.elastic import ElasticGroup
from skim.tensor_half import on_streams, streams_of

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle
    from typing_extensions import Unpack

    from skim._options import LocalStepsOptions
    from skim.protocols import OwnSchedule

PARAMETERS = "parameters"  # a key of states: the names and lengths of the parameters, in JSON
OF_RANK = re.compile(r"(replica|moved|sent_from)_(\d+)_(\d+)$")


@dataclasses.dataclass
class _Arrived:
    """The result of an exchange: one tensor for each parameter of the fragment."""

    applied: bool  # False: the update of some rank was NaN or infinite
    means: Sequence[torch.Tensor]  # times outer_lr_for(), if outer_lr follows the density
    residuals: Sequence[torch.Tensor | None]  # this rank's, afterwards; None: not needed
    error: _core.NonFiniteError | None = None


@dataclasses.dataclass
class _Flight:
    """An exchange of a fragment that has begun."""

    steps_left: int  # until its mean is applied
    sent_from: Sequence[torch.Tensor] | None  # this rank's parameters when it began; None: they do not move until it ends
    arrived: Future[_Arrived]


class _UpdateAggregator(Aggregator):
    """Also compares the options of LocalSteps between the ranks.

    wholes: the indices of parameters that several ranks of an island have whole, beside shards of others. These ranks must
    send the same entries of them, so no shard gets into their buckets.
    """

    def __init__(self, options: Mapping[str, Any], wholes: set[int], *arguments: Any, **keywords: Any) -> None:
        self._of_local_steps = [f"{name}={value}" for name, value in options.items()]
        self._wholes = wholes
        super().__init__(*arguments, **keywords)

    _is_exposed = False  # it may run beside training

    def _described(self) -> Sequence[str]:
        return self._of_local_steps

    def _apart(self, members: Sequence[int]) -> list[Sequence[int]]:
        parts = [[i for i in members if (i in self._wholes) == whole] for whole in (True, False)]
        return [part for part in parts if part]


class LocalSteps(InEpochs):
    """Lets every rank take steps of its own optimizer, and averages the updates over the ranks.

        local = skim.LocalSteps(model, optimizer, every=15, density=0.01)
        loss.backward()
        local.step()                   # in place of optimizer.step()
        ...
        with local.shared():
            evaluate(model)
        local.finish()                 # after the last step

    A round is `every` steps. All ranks have the same shared parameters x, and each has a residual e. A rank
    starts the round at x - ahead * e and moves by -u in its local steps. Then the ranks exchange e + u. Each
    sends the largest entries and keeps the rest as its new e:

        x = x - outer_lr * (mean over the ranks of the entries sent)

    The default outer_lr is skim.outer_lr_for(P, density): an entry that few of the P ranks have sent counts little
    in the mean, and this factor makes up for a part of it. A dedicated server does not count in P. For SGD with
    every > 1 it is 1, which trains better (docs/results/quality.md). With outer_momentum, x follows Nesterov
    momentum over these means, as torch.optim.SGD with nesterov=True.

        every=1, ahead=0, outer_lr=1
                            error feedback of updates
        every=1, ahead=1, outer_lr=1
                            step-ahead (arXiv 2008.05823, 2601.20738), as in CocktailSGD
        every=30, density=0.0156, value_code="q2", residual_decay=0.95, ahead=0, outer_lr=1
                            SparseLoCo (arXiv 2508.15706), without its chunks
        every=100, density=1.0, exchange="dense", outer_lr=0.7, outer_momentum=0.9
                            DiLoCo (arXiv 2311.08105)
        the same with fragments=3, delay=5
                            Streaming DiLoCo (arXiv 2501.18512), without its mixing factor

    With delay > 0 an exchange runs on a thread of its own beside the next steps, and its mean is applied `delay`
    steps later. A rank keeps the moves that it has made in the meantime. An exchange that takes no longer than
    `delay` steps costs no time. With fragments > 1 the parameters are exchanged in that many parts, in turn, over
    the steps of a round. The exchange of a part takes less time, so a smaller delay is enough.

    Between rounds the ranks' parameters differ. `shared()` and model.state_dict() give x, so that nobody
    evaluates or saves one rank's replica by mistake; model.load_state_dict() loads x. Both may be called on a part
    of the model, or on a module that contains it. Buffers, such as those of batch norm, stay each rank's own.

    x and e are float32. A rank with parameters in 16 bits starts at x - ahead * e, rounded. What rounding takes off is
    not exchanged, except that of moves which a rank has made beside an exchange (delay).

    model: any module that is whole on every rank, but not a DistributedDataParallel, nor one that skim.attach
        exchanges gradients of. All ranks take rank 0's parameters and buffers at the start.
    optimizer: any optimizer. Its state is never exchanged. With every=1, momentum correction replaces the
        momentum of an SGD, as in skim.attach(optimizer=...): the velocity of an entry becomes 0 when it is sent.
    every: the number of steps of a round, at least 1.
    density: the fraction of entries that each rank sends in a round, or a schedule (skim.attach). For a schedule that goes
        by epochs set `epoch` at the start of each epoch, on every rank: local.epoch = 3. It counts from the second
        exchange afterwards, because an exchange chooses the density of the next one.
    ahead: in [0, 1]: the part of its residual that a rank applies to its own parameters at once [1]. 0 with feedback=False,
        which keeps no residual: a rank starts every round at x, and the entries that it does not send are lost.
    outer_lr: >= 0; 0: skim.outer_lr_for() with the density of each bucket, but 1 with outer_momentum, and for SGD
        with every > 1 [0].
    outer_momentum: in [0, 1) [0].
    delay: in [0, every]: steps from the start of an exchange to the application of its mean.
    fragments: in [1, every]: the number of parts, which have nearly equal sizes and are cut between parameters.
        Each part is exchanged once a round.
    exchange, value_code, residual_decay, and the other options: as in skim.Aggregator.

    Memory for each parameter: one float for x and one for the residual. outer_momentum takes one more. With
    every=1 the update takes one more. With a larger every, or with delay, a parameter that is being exchanged
    takes up to three more. Not thread-safe. Collective: the constructor, finish(), exchange(), load_state_dict(),
    the last step of each round, and with delay the step in which the mean is applied.
    Raises InvalidArgument if the model or an option cannot work.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int = 1,
        density: float | _core.DensitySchedule | OwnSchedule = 0.01,
        *,
        delay: int = 0,
        fragments: int = 1,
        exchange: str = "auto",
        process_group: dist.ProcessGroup | ElasticGroup | None = None,
        **keywords: Unpack[LocalStepsOptions],
    ) -> None:
        options: dict[str, Any] = dict(keywords)
        if not isinstance(model, torch.nn.Module):
            raise _core.InvalidArgument(
                f"skim.LocalSteps: model must be a torch.nn.Module, not {type(model).__name__}; for a list of tensors use "
                "skim.Aggregator"
            )
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise _core.InvalidArgument(
                "skim.LocalSteps: DistributedDataParallel exchanges the gradients of every step; give the model "
                "without it"
            )
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise _core.InvalidArgument(
                "skim.LocalSteps: FullyShardedDataParallel gives every rank other parameters, which have no mean; use "
                "torch.distributed.fsdp.fully_shard inside islands, and process_group="
            )
        expect_no_replicate("skim.LocalSteps", model)
        expect_no_local_steps("skim.LocalSteps", model)
        expect_whole("skim.LocalSteps: every", every, 1)
        expect_whole("skim.LocalSteps: delay", delay, 0, every, "every")
        expect_whole("skim.LocalSteps: fragments", fragments, 1, every, "every")
        expect_dense([*model.named_parameters(), *model.named_buffers()])
        for name in ("momentum_correction", "momentum_dampening", "nesterov_correction"):
            if options.get(name):
                raise _core.InvalidArgument(
                    f"skim.LocalSteps: no {name} here: the optimizer has its momentum on every rank"
                )
        for name in ("tensors", "of_updates"):
            if name in options:
                raise _core.InvalidArgument(
                    f"skim.LocalSteps: no {name} here: it exchanges the updates of the model's parameters; leave it out"
                )
        if isinstance(process_group, ElasticGroup) and (delay > 0 or fragments > 1):
            raise _core.InvalidArgument("skim.LocalSteps: an ElasticGroup needs delay=0 and fragments=1")
        own = _core.local_steps_options(
            **{name: options.pop(name) for name in _core.local_steps_options() if name in options}
        )
        self.model, self.optimizer = model, optimizer
        self.every, self.delay = every, delay = int(every), int(delay)
        if own["outer_lr"] > (most := torch.finfo(torch.float32).max):
            raise _core.InvalidArgument(f"skim.LocalSteps: outer_lr: must be at most {most:.3g}, not {own['outer_lr']}")
        self.ahead, self.outer_lr, self.outer_momentum = own["ahead"], own["outer_lr"], own["outer_momentum"]
        if options.get("feedback") is False:
            self.ahead = 0.0
        takes_mean = self.outer_momentum > 0.0 or (every > 1 and isinstance(inner_optimizer(optimizer), torch.optim.SGD))
        self._follows_density = self.outer_lr == 0.0 and not takes_mean
        reshard(model)  # a forward leaves the parameters of the root whole
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._of_model = list(named.values())
        expect_not_attached(self._of_model)
        self._names = [name.replace("_orig_mod.", "") for name in named]  # torch.compile puts it there
        self._shard = Shard.of(self._of_model)
        if self._shard is not None and not isinstance(process_group, dist.ProcessGroup):
            raise _core.InvalidArgument(
                "skim.LocalSteps: the parameters are shards: give process_group= the ranks that have the same shards, one "
                "in each island (not an ElasticGroup)"
            )
        shard = {} if self._shard is None else {"shard": self._shard.described}
        wholes = set[int]() if self._shard is None else self._shard.wholes(self._of_model)
        if wholes and exchange == "auto":
            raise _core.InvalidArgument(
                f"skim.LocalSteps: several ranks of an island have '{self._names[min(wholes)]}' whole, and exchange='auto' may "
                "choose another exchange on each, so that they drift apart; name one: exchange='allgather'"
            )
        _expect_local(optimizer, self._of_model)
        corrected = optimizer if every == 1 and _is_sgd_with_momentum(optimizer) else None
        expect_trains(corrected, named)
        self._aggregator = _UpdateAggregator(
            {"every": self.every, "delay": self.delay, **own, **shard}, wholes, zip(self._names, self._parameters), density=density,
            exchange=exchange, process_group=process_group, fragments=int(fragments), optimizer=corrected,
            of_updates=True, **options,
        )  # fmt: skip
        self._needs_momentum = corrected is None  # in the optimizer itself
        self._fragments = self._aggregator.fragments
        self._kept_updates: list[torch.Tensor] = []  # with every=1: room for them
        self._flights: dict[int, _Flight] = {}  # by fragment
        self._steps = 0  # of the open round
        self._own: list[torch.Tensor] | None = None  # inside shared(): this rank's replica
        self._finished = False
        self._has_forgotten = False  # what the optimizer had of a parameter that was not finite
        self._hooks: list[RemovableHandle] = []
        try:
            self._place_momentum()
            if self._shard is not None:
                self._aggregator.inside = self._shard.connect(options.get("timeout", 1800.0))
            self._share(process_group)
            self._register_hooks()
        except BaseException:
            self._leave()
            raise

    def _share(self, process_group: dist.ProcessGroup | ElasticGroup | None) -> None:
        """Makes x of the parameters of rank 0, or of those of the ranks that have trained before."""
        self._elastic = self._aggregator.elastic
        with torch.no_grad():
            if self._elastic is None:
                assert not isinstance(process_group, ElasticGroup)
                make_equal(self.model, process_group, self._aggregator.comm)
            self._shared = [p.detach().clone().to(torch.float32) for p in self._parameters]
            self._momentum = [torch.zeros_like(x) for x in self._shared] if self.outer_momentum > 0.0 else []
            if self._elastic is not None:
                # The model's state has x, but rounded if the parameters have 16 bits.
                is_rounded = any(p.dtype != torch.float32 for p in self._parameters)
                kept = {"outer_momentum": self._momentum, "shared": self._shared if is_rounded else []}
                for name, tensors in kept.items():
                    if name in self._elastic.received:
                        _into(tensors, self._elastic.received[name])
                self._elastic.more = lambda: {name: _flat(tensors) for name, tensors in kept.items() if tensors}
                self._elastic.last_exchange = self._last_exchange
                self._elastic.before_change = self._moved

    def _register_hooks(self) -> None:
        place_of = {p: i for i, p in enumerate(self._of_model)}
        for module in self.model.modules():
            for hook in self._hooks_of(module, place_of):
                self._hooks.append(hook)
        if isinstance(inner := inner_optimizer(self.optimizer), torch.optim.Optimizer):  # GradScaler.step may call it
            self._hooks.append(inner.register_step_pre_hook(self._place_momentum))

    def _leave(self) -> None:
        """Gives the optimizer its momentum back, and the model the ways in which it was saved and loaded before."""
        self._aggregator.detach()
        self._finished = True
        for hook in self._hooks:
            hook.remove()

    @property
    def _parameters(self) -> list[torch.Tensor]:
        """This rank's parts of the parameters, which share memory with the model."""
        return [local(p) for p in self._of_model]

    # ---- training -------------------------------------------------------------------------------

    def step(self, *, idle: bool = False) -> None:
        """optimizer.step(), and the exchange if it ends a round.

        idle: True: this rank has no batch for this step, and its parameters stay as they are. It still takes
        part in the exchange. So ranks with unequal numbers of batches can take equally many steps.
        """
        self._expect_training("step")
        self._meet_before_round()
        self._place_momentum()  # PyTorch 2.0 calls no hook of optimizers any more once a model was compiled
        if not idle:
            self.optimizer.step()
        self.after_step()

    def after_step(self) -> None:
        """Call it instead of step() if the optimizer has already made its step, as after GradScaler.step.

        With delay it may wait. If a signal handler raises meanwhile, x and the round are as they were before this call.
        Then save a state, or call after_step() again to go on. If one raises in an exchange, or before it has begun, the
        group ends, and every later exchange raises.
        """
        self._expect_training("step")
        self._meet_before_round()
        self._place_momentum()
        # A loaded state may be from late in a longer round, with an exchange that takes longer than a round does now.
        steps, count = min(self._steps + 1, self.every), len(self._fragments)
        due = [f for f in range(count) if steps == -(-(f + 1) * self.every // count)]
        # First the wait: if something is raised meanwhile, the step has not been counted, and this may be called again.
        self._land(f for f, flight in self._flights.items() if flight.steps_left == 1 or f in due)
        self._steps = 0 if steps == self.every else steps
        for flight in self._flights.values():
            flight.steps_left -= 1
        for f in due:
            self._depart(f, self.delay)

    @torch.no_grad()
    def _moved(self) -> Callable[[], None]:
        """The other ranks are about to change, and with them the residual. Returns a function that afterwards moves
        this rank's parameters to where the same local steps from its new start would have led."""
        if self._finished:
            return lambda: None
        parameters = list(enumerate(self._parameters))
        moves = [p.to(torch.float32) - self._start(i, e).to(p.dtype) for (i, p), e in zip(parameters, self._residuals(0))]

        @torch.no_grad()
        def move() -> None:
            for (i, p), moved, e in zip(parameters, moves, self._residuals(0)):
                p.copy_(self._start(i, e) + moved)

        return move

    def _last_exchange(self) -> None:
        if self._finished:
            self._aggregator.reduce_nothing()
        else:
            self.exchange()

    def _place_momentum(self, *_: Any) -> None:
        """Puts the momentum where it belongs: into the optimizer, or with momentum correction out of it. A state
        that was loaded since may have changed that."""
        if self._needs_momentum:
            put_back(inner_optimizer(self.optimizer), of_updates=True)
        else:
            self._aggregator.keep_momentum_out()

    def _meet_before_round(self) -> None:
        """In an elastic group, ranks leave and join before a round."""
        if self._elastic is not None and self._steps == 0:
            self._elastic.meet()

    def exchange(self) -> bool:
        """Ends the round now. Collective. With fragments=1 ranks may have taken different numbers of steps in it.

        Returns False if the parameters of a rank have become NaN or infinite. Nothing was delivered then. x stays
        as it was, and the residuals keep the finite updates. With non_finite="raise", raises NonFiniteError
        instead.
        """
        self._expect_training("exchange")
        applied = self._land(self._flights)
        self._steps = 0
        for f in range(len(self._fragments)):
            applied = self._depart(f, 0) and applied
        return applied

    @torch.no_grad()
    def _depart(self, f: int, delay: int) -> bool:
        """Begins the exchange of a fragment. Without delay it also ends the exchange. Returns as exchange()."""
        here = [local(self._of_model[i]).detach().to(torch.float32, copy=delay > 0) for i in self._fragments[f]]
        flight = self._flights[f] = _Flight(delay, here if delay > 0 else None, Future())
        streams = streams_of(p.device for p in here)
        epoch = self.epoch  # now, because it may be set on some ranks before the job ends, and on others later

        def job() -> None:
            if not flight.arrived.set_running_or_notify_cancel():
                return
            try:
                self._aggregator.epoch = epoch
                with on_streams(streams):
                    arrived = self._reduce(f, here)
                flight.arrived.set_result(arrived)
            except BaseException as e:
                flight.arrived.set_exception(e)

        began = time.perf_counter()
        try:
            (self._aggregator.submit if delay > 0 else self._aggregator.run_after_others)(job)
        except BaseException as e:
            if flight.arrived.cancel():  # by a signal handler, before the exchange that the other ranks wait for has begun
                del self._flights[f]
                self._aggregator.fail(e)
            raise
        if delay > 0:
            return True
        self._aggregator.statistics.exposed_s += time.perf_counter() - began
        return self._land([f])

    @torch.no_grad()
    def _reduce(self, f: int, here: Sequence[torch.Tensor]) -> _Arrived:
        updates = self._room_for_updates(f)
        for i, e, p, update in zip(self._fragments[f], self._residuals(f), here, updates):
            # The start as the replica had it: what is lost when it is rounded to 16 bits is no update.
            torch.sub(self._start(i, e, update).to(self._of_model[i].dtype), p, out=update)
        try:
            applied, error = self._aggregator.reduce(updates, fragment=f), None
        except _core.NonFiniteError as e:
            applied, error = False, e
        if self._follows_density:
            for update, density in zip(updates, self._aggregator.densities(f)):
                update.mul_(_core.outer_lr_for(self._aggregator.ranks_of_mean, density))
        return _Arrived(applied, updates, self._residuals(f), error)

    def _room_for_updates(self, f: int) -> list[torch.Tensor]:
        """A tensor for each parameter of a fragment. They lie in one, so that no bucket has to be put together."""
        if self._kept_updates:
            return self._kept_updates
        shapes = [self._shared[i] for i in self._fragments[f]]
        if len({x.device for x in shapes}) > 1:
            return [torch.empty_like(x) for x in shapes]
        lengths = [x.numel() for x in shapes]
        parts = torch.split(shapes[0].new_empty(sum(lengths)), lengths)
        room = [part.view(x.shape) for part, x in zip(parts, shapes)]
        if self.every == 1:
            self._kept_updates = room
        return room

    @torch.no_grad()
    def _land(self, fragments: Iterable[int]) -> bool:
        """Waits for the exchanges of these fragments and applies their means. Returns as exchange()."""
        applied, error = True, None
        for f in sorted(fragments):
            flight = self._flights[f]
            began = time.perf_counter()
            failure = flight.arrived.exception()  # waits; the flight stays if something is raised meanwhile
            self._aggregator.statistics.exposed_s += time.perf_counter() - began
            if failure is not None:
                del self._flights[f]
                raise failure
            arrived = flight.arrived.result()
            for place, (i, mean, e) in enumerate(zip(self._fragments[f], arrived.means, arrived.residuals)):
                p = local(self._of_model[i])
                if arrived.applied:
                    self._outer_step(i, mean)
                elif not p.isfinite().all():
                    self._forget_state(i)
                if flight.sent_from is None:
                    p.copy_(self._start(i, e, p))
                    continue
                since = p.to(torch.float32) - flight.sent_from[place]
                if not arrived.applied:
                    since.nan_to_num_(0.0, 0.0, 0.0)  # a replica with NaN goes on without it
                p.copy_(since.add_(self._start(i, e)))
            del self._flights[f]
            applied, error = applied and arrived.applied, error or arrived.error
        self._reshard()
        if error is not None:
            raise error
        return applied

    def _forget_state(self, i: int) -> None:
        """The optimizer forgets what it has of a parameter that is not finite: a moment with NaN would stay so for ever."""
        state = self.optimizer.state.get(self._of_model[i], {})
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                local(value).zero_()
            elif name == "step":  # of optimizers that count in Python
                state[name] = 0
        if not self._has_forgotten:
            self._has_forgotten = True
            logging.getLogger("skim").warning(
                "skim.LocalSteps: parameters of this rank are NaN or infinite, so the round was taken back on all ranks; the "
                "optimizer's state of these parameters begins anew (said once)"
            )

    def _outer_step(self, i: int, mean: torch.Tensor) -> None:
        if self._momentum:
            self._momentum[i].mul_(self.outer_momentum).add_(mean)
            mean = mean + self.outer_momentum * self._momentum[i]
        self._shared[i].sub_(mean, alpha=self.outer_lr or 1.0)

    def _residuals(self, f: int) -> Sequence[torch.Tensor | None]:
        return self._aggregator.residuals_of(f) if self.ahead > 0.0 else [None] * len(self._fragments[f])

    def _start(self, i: int, residual: torch.Tensor | None, room: torch.Tensor | None = None) -> torch.Tensor:
        """Where this rank starts, or started, its round: x - ahead * e. room: for the result, if it is a new tensor."""
        x = self._shared[i]
        if residual is None or residual.numel() == 0:
            return x
        out = room if room is not None and room.dtype == x.dtype else None
        return torch.sub(x, residual.view(x.shape).to(x.device), alpha=self.ahead, out=out)

    @torch.no_grad()
    def _restart(self, which: set[int]) -> None:
        residuals: Mapping[str, torch.Tensor] = {}
        if self.ahead > 0.0:
            buckets = [b for b, members in enumerate(self._aggregator.buckets or ()) if not which.isdisjoint(members)]
            residuals = self._aggregator.residuals_of_buckets(buckets, copied=False)
        for i in which:
            p = local(self._of_model[i])
            p.copy_(self._start(i, residuals.get(self._names[i]), p))
        self._reshard()

    def _expect_replica(self, what: str) -> None:
        if self._own is not None:
            raise _core.InvalidArgument(f"skim.LocalSteps: {what} inside shared(): the model holds x, not this rank's replica")

    def _expect_training(self, what: str) -> None:
        self._expect_replica(what)
        if self._finished:
            raise _core.InvalidArgument(f"skim.LocalSteps: {what} after finish()")
        if trained := next((name for name, p in self._frozen if p.requires_grad), None):
            raise _core.InvalidArgument(
                f"skim.LocalSteps: '{trained}' was frozen when LocalSteps was made, so it would not be exchanged; call finish() "
                "before you set its requires_grad, and make LocalSteps anew"
            )

    # ---- the shared parameters ------------------------------------------------------------------

    @contextlib.contextmanager
    @torch.no_grad()
    def shared(self) -> Iterator[torch.nn.Module]:
        """In the block, the model's parameters are x, which is equal on all ranks. After it, they are this rank's own.

        step(), exchange(), finish() and both load_state_dict() raise InvalidArgument in the block.
        """
        if self._own is not None or self._finished:
            yield self.model
            return
        self._own = own = [p.detach().clone() for p in self._parameters]
        try:  # a signal handler may raise while x is put there
            self._put(self._shared)
            yield self.model
        finally:
            try:
                self._put(own)
            except BaseException:  # by a signal handler: a second one is left to the user
                self._put(own)
                raise
            finally:
                self._own = None

    @torch.no_grad()
    def _put(self, values: Iterable[torch.Tensor]) -> None:
        for p, value in zip(self._parameters, values):
            p.copy_(value)
        self._reshard()

    def _reshard(self) -> None:
        if self._shard is not None:
            reshard(self.model)

    def _hooks_of(self, module: torch.nn.Module, place_of: Mapping[torch.Tensor, int]) -> Iterator[RemovableHandle]:
        """Makes x of what a module saves and loads. Each module has them, because it may be saved and loaded by itself."""
        places = {name: place_of[p] for name, p in module._parameters.items() if p is not None and p in place_of}
        loaded: set[int] = set()  # those of them that are in the state
        is_trained = any(p in place_of for p in module.parameters())

        @torch.no_grad()
        def is_replica() -> bool:
            if self._own is not None or self._finished:
                return False
            pairs = ((local(self._of_model[i]), self._shared[i]) for i in places.values())
            return not all(torch.equal(p, x.to(p.dtype)) for p, x in pairs)

        def replace(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            for name, i in places.items():
                if prefix + name in state:
                    replaced = state[prefix + name] = state[prefix + name].detach().clone()
                    local(replaced).copy_(self._shared[i])

        @torch.no_grad()
        def begin_load(state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
            self._expect_training("load_state_dict")
            if is_trained and metadata.get("assign_to_params_buffers"):
                raise _core.InvalidArgument(
                    "skim.LocalSteps: load_state_dict with assign=True would put new parameters into the model, which the "
                    "optimizer does not train; load without assign=True"
                )
            if self._flights:
                self._land(self._flights)
            loaded.clear()
            loaded.update(i for name, i in places.items() if prefix + name in state)
            for i in loaded:
                local(self._of_model[i]).copy_(self._shared[i])  # in case that what is in the state does not fit

        @torch.no_grad()
        def end_load(_module: Any, _keys: Any) -> None:
            if loaded:
                for i in loaded:
                    self._shared[i].copy_(local(self._of_model[i]))
                self._steps = 0
                self._restart(loaded)

        yield module._register_state_dict_hook(_Hook(replace, is_replica))
        yield module._register_load_state_dict_pre_hook(_Hook(begin_load))
        yield module.register_load_state_dict_post_hook(_Hook(end_load))

    def finish(self) -> None:
        """Ends an open round, and leaves x in the model. Collective. Training is over after it.

        The optimizer gets its momentum back, if momentum correction has replaced it.
        The mass in the residuals is lost. A last exchange at density 1 would deliver it, but usually does not
        help.
        """
        if self._finished:
            return
        self._expect_replica("finish")
        self._land(self._flights)
        is_open = self._steps > 0 or len(self._fragments) > 1
        if self._elastic is None:  # in an elastic group all ranks have taken equally many steps
            is_open = any(of[0] for of in self._aggregator.comm.allgather(bytes([is_open])))
        if is_open:
            self.exchange()
        with torch.no_grad():
            self._put(self._shared)
        self._leave()

    # ---- state ----------------------------------------------------------------------------------

    def residuals(self) -> dict[str, torch.Tensor]:
        """A copy of this rank's residual e of each parameter, by name: flat, float32, on the CPU. Waits for the
        exchanges that have begun."""
        self._await_exchanges()
        return self._aggregator.residuals()

    def _await_exchanges(self) -> None:
        """Waits for the exchanges that have begun, because they change the residual."""
        for flight in self._flights.values():
            flight.arrived.exception()

    def report(self) -> Report:
        """This rank's bytes, times and decisions so far. A step of the report is an exchange."""
        return self._aggregator.report()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state from which a run continues, without the optimizer's: x, the residual, the place in the round.

        Every rank must save its own, and its optimizer's state too. It is the same inside shared() and outside.
        """
        rank, size = self._aggregator.comm.rank, self._aggregator.comm.size
        arrived = {f: flight.arrived.result() for f, flight in self._flights.items()}
        found = dict(self._aggregator.state_dict())
        found["round"] = torch.tensor([self._steps], device="cpu")
        steps_left = [self._flights[f].steps_left if f in self._flights else 0 for f in range(len(self._fragments))]
        found["steps_left"] = torch.tensor(steps_left, device="cpu")
        found[PARAMETERS] = json_tensor([(name, x.numel()) for name, x in zip(self._names, self._shared)])
        found["shared"] = _flat(self._shared)
        if self._momentum:
            found["outer_momentum"] = _flat(self._momentum)
        if self._steps > 0 or self._flights or len(self._fragments) > 1:
            own = self._parameters if self._own is None else self._own
            found[f"replica_{rank}_{size}"] = _flat([p.detach().to(torch.float32) for p in own])
            found[f"moved_{rank}_{size}"] = _flat([s - p.detach() for s, p in zip(self._starts(), own)])
        if self._flights:
            found["applied"] = torch.tensor([arrived[f].applied for f in sorted(arrived)], device="cpu")
            found["means"] = _flat([mean for f in sorted(arrived) for mean in arrived[f].means])
            sent_from = [here for f in sorted(self._flights) for here in self._flights[f].sent_from or ()]
            found[f"sent_from_{rank}_{size}"] = _flat(sent_from)
        return found if self._shard is None else self._shard.marked(found)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> _core.LoadReport:
        """Restores a state_dict(): this rank's, or, if the number of ranks has changed, those of all ranks in one dict.

        If you load the model's state, load it before this. On another number of ranks every rank starts with the
        mean of the old residuals and, in the middle of a round, the mean of how far the old replicas had moved in it.

        strict, and what is returned: as in skim.load_state_dict. Parameters that only the model has keep their values.
        A state with exchanges under way (delay) does not fit other parameters.

        Raises StateError if the state does not fit; nothing has changed then.
        """
        self._expect_training("load_state_dict")
        expect_state(state, strict)
        self._place_momentum()
        state = {key: t for key, t in state.items() if isinstance(key, str)}
        if self._shard is not None:
            state = self._shard.own(state)
        state = self._fitted(state, strict)
        n, count = sum(x.numel() for x in self._shared), len(self._fragments)
        self._expect_in_state(state, {"round": 1, "shared": n, "steps_left": count})
        steps_left = {f: left for f, left in enumerate(state["steps_left"].tolist()) if left > 0}
        shapes = [self._shared[i] for f in steps_left for i in self._fragments[f]]
        under_way = sum(x.numel() for x in shapes)
        if steps_left:
            self._expect_in_state(state, {"applied": len(steps_left), "means": under_way})
        if self._momentum and "outer_momentum" in state:
            self._expect_in_state(state, {"outer_momentum": n})
        replica, moved = (self._own_or_mean(what, state, n) for what in ("replica", "moved"))
        sent_from = self._own_or_mean("sent_from", state, under_way)
        if steps_left and sent_from is None:
            comm = self._aggregator.comm
            self._expect_in_state(state, {f"sent_from_{comm.rank}_{comm.size}": under_way})
        self._await_exchanges()
        try:
            report = self._aggregator.load_state_dict(state, strict)
        except BaseException:
            for f, flight in self._flights.items():  # the residuals are back, but maybe in other memory
                if flight.arrived.exception() is None:
                    flight.arrived.result().residuals = self._residuals(f)
            raise
        self._flights.clear()  # their means belong to the x that is replaced
        _into(self._shared, state["shared"])
        if self._momentum and "outer_momentum" in state:
            _into(self._momentum, state["outer_momentum"])
        self._steps = int(state["round"])
        if replica is None:
            self._restart({*range(len(self._of_model))})
        else:
            self._go_on_from(replica, moved, {i for f in steps_left for i in self._fragments[f]})
        if not steps_left or sent_from is None:
            return report
        means, heres = ([torch.empty_like(x) for x in shapes] for _ in range(2))
        _into(means, state["means"])
        _into(heres, sent_from)
        for (f, left), applied in zip(steps_left.items(), state["applied"].tolist()):
            k = len(self._fragments[f])
            flight = self._flights[f] = _Flight(left, heres[:k], Future())
            flight.arrived.set_result(_Arrived(applied, means[:k], self._residuals(f)))
            means, heres = means[k:], heres[k:]
        return report

    def _go_on_from(self, replica: torch.Tensor, moved: torch.Tensor | None, in_flight: set[int]) -> None:
        """Puts a saved replica into the model. If the start of the round is another one now, with another `ahead` or
        residual, the replica is where the same moves lead from there. What is being exchanged has no start yet.
        moved: None: an old state has none."""
        _into(self._parameters, replica)
        if moved is None:
            return
        moves = torch.split(moved, [x.numel() for x in self._shared])
        for i, (p, start, move) in enumerate(zip(self._parameters, self._starts(), moves)):
            move = move.view(p.shape).to(p.device)
            if i not in in_flight and not torch.equal(start - p.to(torch.float32), move):
                p.copy_(start - move)

    def _starts(self) -> list[torch.Tensor]:
        """Where this rank's replica started the round, in float32 but rounded as the parameters are."""
        residuals = {i: e for f, of in enumerate(self._fragments) for i, e in zip(of, self._residuals(f))}
        starts = (self._start(i, residuals[i]).to(p.dtype) for i, p in enumerate(self._of_model))
        return [start.to(torch.float32) for start in starts]

    def _fitted(self, state: Mapping[str, torch.Tensor], strict: bool) -> Mapping[str, torch.Tensor]:
        """The state with tensors for this model's parameters, in their order. Raises StateError if there is none."""
        try:
            saved = dict(json_value(state[PARAMETERS]))
        except (KeyError, ValueError, TypeError):
            return state  # and let the lengths decide
        now = {name: x.flatten().cpu() for name, x in zip(self._names, self._shared)}
        if [*saved.items()] == [(name, x.numel()) for name, x in now.items()]:
            return state
        for name, x in now.items():
            if saved.get(name, x.numel()) != x.numel():
                raise _core.StateError(
                    f"skim.LocalSteps: '{name}' has {saved[name]} entries in the state, {x.numel()} in the model"
                )
        report = _core.LoadReport([n for n in now if n not in saved], {n: 0.0 for n in saved if n not in now})
        if strict and (report.missing_keys or report.unexpected_keys):
            raise _core.StateError(
                f"skim.LocalSteps: {report}; load with strict=False to take the other parameters"
            )
        if "steps_left" in state and state["steps_left"].any():
            raise _core.StateError(
                "skim.LocalSteps: the state has exchanges under way, which do not fit other parameters; save one after "
                "exchange()"
            )
        fitted = {**state, "steps_left": torch.zeros(len(self._fragments), dtype=torch.int64, device="cpu")}
        for key, flat in state.items():
            is_change = key == "outer_momentum" or key.startswith("moved_")
            if not is_change and key != "shared" and not key.startswith("replica_"):
                continue
            self._expect_in_state(state, {key: sum(saved.values())})
            parts = dict(zip(saved, torch.split(flat.cpu(), list(saved.values()))))
            new = {name: torch.zeros_like(x) for name, x in now.items()} if is_change else now
            fitted[key] = torch.cat([parts.get(name, new[name]) for name in now])
        return fitted

    def _expect_in_state(self, state: Mapping[str, torch.Tensor], lengths: Mapping[str, int]) -> None:
        for key, length in lengths.items():
            if not isinstance(state.get(key), torch.Tensor) or state[key].numel() != length:
                raise _core.StateError(
                    f"skim.LocalSteps: not a state of this model in {len(self._fragments)} fragments: no '{key}' of "
                    f"length {length}"
                )

    def _own_or_mean(self, what: str, state: Mapping[str, torch.Tensor], length: int) -> torch.Tensor | None:
        """This rank's tensor `what`; if the state is of another number of ranks, the mean over its ranks."""
        found = {
            (int(m[2]), int(m[3])): t for key, t in state.items() if (m := OF_RANK.search(key)) and m[1] == what
        }
        self._expect_in_state(state, {f"{what}_{rank}_{size}": length for rank, size in found})
        comm = self._aggregator.comm
        if not found or (comm.rank, comm.size) in found:
            return found.get((comm.rank, comm.size))
        return torch.stack(list(found.values())).mean(0)


def expect_no_local_steps(what: str, model: torch.nn.Module) -> None:
    """Raises InvalidArgument if the model, or a part of it, takes local steps. what: who asks."""
    hooks = (hook for module in model.modules() for hook in module._state_dict_hooks.values())
    if any(isinstance(hook, _Hook) and hook.call for hook in hooks):
        raise _core.InvalidArgument(f"{what}: this model has LocalSteps already; call finish() first")


def _expect_local(optimizer: Any, parameters: Sequence[torch.Tensor]) -> None:
    """Raises InvalidArgument if the optimizer cannot train these parameters on this rank alone."""
    kind = type(optimizer).__name__
    if not has_method(optimizer, "step"):
        raise _core.InvalidArgument(f"skim.LocalSteps: optimizer must be an optimizer, with step(), not {optimizer!r}")
    if kind in ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"):
        raise _core.InvalidArgument(
            f"skim.LocalSteps: the step of {kind} makes parameters equal on all ranks; give the optimizer that it is made of"
        )
    groups = getattr(inner_optimizer(optimizer), "param_groups", None)
    if groups is not None and parameters and not {p for group in groups for p in group["params"]} & set(parameters):
        raise _core.InvalidArgument("skim.LocalSteps: the optimizer trains none of the model's parameters")


def _is_sgd_with_momentum(optimizer: Any) -> bool:
    inner = inner_optimizer(optimizer)
    return isinstance(inner, torch.optim.SGD) and correction_for(inner).momentum_correction > 0.0


class _Hook:
    """A hook of the model. Local steps do not train a copy of the model, so a copy of the hook does nothing.

    is_replica: tells whether the module has parameters now that other ranks do not have.
    """

    def __init__(self, call: Any = None, is_replica: Callable[[], bool] = lambda: False) -> None:
        self.call, self.is_replica = call, is_replica

    def __call__(self, *arguments: Any) -> None:
        if self.call is not None:
            self.call(*arguments)

    def __reduce__(self) -> Any:
        if self.is_replica():
            warnings.warn(
                "skim.LocalSteps: a copy of the model has the parameters of this rank alone. Copy or save it inside "
                "shared() to get those that all ranks share, or save model.state_dict()",
                stacklevel=2,
            )
        return _Hook, ()


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().flatten().cpu() for t in tensors])


def _into(tensors: list[torch.Tensor], flat: torch.Tensor) -> None:
    for t, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors])):
        t.copy_(part.view(t.shape))
