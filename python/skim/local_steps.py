"""Local steps: ranks train by themselves, and exchange how far their parameters have moved."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from skim import _core
from skim._momentum import correction_for, inner_optimizer
from skim._report import Report
from skim.aggregator import Aggregator

REPLICA = re.compile(r"replica_(\d+)_(\d+)$")


class LocalSteps:
    """Lets every rank take steps of its own optimizer, and averages the updates over the ranks.

        local = skim.LocalSteps(model, optimizer, every=15, density=0.01)
        loss.backward()
        local.step()                   # in place of optimizer.step()
        ...
        with local.shared():
            evaluate(model)
        local.finish()                 # after the last step

    A round is `every` steps. All ranks have the same shared parameters x, and each has a residual e. A rank
    starts the round at x - ahead * e and moves by -u in its local steps. Then the ranks exchange e + u, of
    which each sends the largest entries and keeps the rest as its new e:

        x = x - outer_lr * (mean over the ranks of what was sent)

    With outer_momentum, x follows Nesterov momentum over these means, as torch.optim.SGD with nesterov=True.

        every=1, ahead=0    error feedback of updates
        every=1, ahead=1    step-ahead (arXiv 2008.05823, 2601.20738), as in CocktailSGD
        every=15 to 50, density 0.01 to 0.03, value_code="q2", residual_decay=0.95, ahead=0
                            SparseLoCo (arXiv 2508.15706)
        every=50 to 500, density=1.0, exchange="dense", outer_lr=0.7, outer_momentum=0.9
                            DiLoCo (arXiv 2311.08105)

    Between rounds the ranks' parameters differ. `shared()` and model.state_dict() give x, so that nobody
    evaluates or saves one rank's replica by mistake; model.load_state_dict() loads x. Buffers, such as those of
    batch norm, stay each rank's own.

    model: any module that is whole on every rank; not a DistributedDataParallel. All ranks take rank 0's
        parameters at the start.
    optimizer: any; its state is never exchanged. With every=1, momentum correction takes the place of the
        momentum of an SGD, as in skim.attach(optimizer=...): an entry that was sent has no velocity any more.
    every: steps of a round, at least 1.
    density: the fraction of entries that each rank sends in a round, or a schedule (skim.attach).
    ahead: in [0, 1]: the part of its residual that a rank applies to its own parameters at once.
    outer_lr: > 0.  outer_momentum: in [0, 1).
    exchange, value_code, residual_decay, and the other options: as in skim.Aggregator.

    Memory, in floats for each parameter: x, the residual, and with outer_momentum one more; during an exchange
    one or two more. Not thread-safe. Collective: the constructor, finish(), load_state_dict(), and the last
    step of each round. Raises InvalidArgument if the model or an option cannot work.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int = 1,
        density: Any = 0.01,
        *,
        ahead: float = 1.0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        exchange: Any = "auto",
        process_group: Any = None,
        **options: Any,
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            raise _core.InvalidArgument(
                "skim.LocalSteps: DistributedDataParallel exchanges the gradients of every step; give the model "
                "without it"
            )
        for name, value, allowed, is_allowed in (
            ("every", every, "a whole number of at least 1", isinstance(every, int) and every >= 1),
            ("ahead", ahead, "in [0, 1]", 0.0 <= ahead <= 1.0),
            ("outer_lr", outer_lr, "> 0", outer_lr > 0.0),
            ("outer_momentum", outer_momentum, "in [0, 1)", 0.0 <= outer_momentum < 1.0),
        ):
            if not is_allowed:
                raise _core.InvalidArgument(f"skim.LocalSteps: {name} must be {allowed}, not {value}")
        for name in ("momentum_correction", "momentum_dampening", "nesterov_correction"):
            if options.get(name):
                raise _core.InvalidArgument(
                    f"skim.LocalSteps: no {name} here: the optimizer has its momentum on every rank"
                )
        self.model, self.optimizer = model, optimizer
        self.every, self.ahead = every, ahead
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names, self._parameters = list(named), list(named.values())
        self._aggregator = Aggregator(
            named.items(), density=density, exchange=exchange, process_group=process_group,
            optimizer=optimizer if every == 1 and _is_sgd_with_momentum(optimizer) else None, **options
        )  # fmt: skip
        with torch.no_grad():
            for p in self._parameters:
                dist.broadcast(p, dist.get_global_rank(process_group, 0) if process_group else 0, group=process_group)
            self._shared = [p.detach().clone().to(torch.float32) for p in self._parameters]
            self._momentum = [torch.zeros_like(x) for x in self._shared] if outer_momentum > 0.0 else []
        self._steps = 0  # of the open round
        self._is_shared = False  # inside shared()
        self._finished = False
        self._hooks = [
            model._register_state_dict_hook(_Hook(self._replace_in_state)),
            model.register_load_state_dict_post_hook(_Hook(self._take_loaded)),
        ]

    # ---- training -------------------------------------------------------------------------------

    def step(self, *, idle: bool = False) -> None:
        """optimizer.step(), and the exchange if it ends a round.

        idle: this rank has no batch for this step, and leaves its parameters as they are. It still takes part
        in the exchange. So ranks with unequal numbers of batches can take equally many steps.
        """
        if not idle:
            self._expect_training("step")
            self.optimizer.step()
        self.after_step()

    def after_step(self) -> None:
        """As step, if the optimizer has made its step already (GradScaler.step does)."""
        self._expect_training("step")
        self._steps += 1
        if self._steps >= self.every:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> bool:
        """Ends the round now. Collective. Ranks may have taken different numbers of steps in it.

        Returns False if the parameters of a rank have become NaN or infinite. Nothing was delivered then: x is as
        it was, and the finite updates are kept in the residuals. With non_finite="raise", raises NonFiniteError.
        """
        self._expect_training("exchange")
        self._steps = 0
        updates = [x - p.to(torch.float32) for x, p in zip(self._start(), self._parameters)]
        try:
            applied = self._aggregator.reduce(updates)
        except _core.NonFiniteError:
            self._restart()
            raise
        if applied:
            self._outer_step(updates)
        self._restart()
        return applied

    def _outer_step(self, means: list[torch.Tensor]) -> None:
        for i, (x, mean) in enumerate(zip(self._shared, means)):
            if self._momentum:
                self._momentum[i].mul_(self.outer_momentum).add_(mean)
                mean = mean + self.outer_momentum * self._momentum[i]
            x.sub_(mean, alpha=self.outer_lr)

    def _start(self) -> list[torch.Tensor]:
        """Where this rank starts, or started, its round: x - ahead * e."""
        if self.ahead == 0.0:
            return self._shared
        residuals = self._aggregator.residuals().values()
        return [
            torch.sub(x, e.view(x.shape).to(x.device), alpha=self.ahead) if e.numel() else x
            for x, e in zip(self._shared, residuals)
        ]

    def _restart(self) -> None:
        for p, start in zip(self._parameters, self._start()):
            p.copy_(start)

    def _expect_training(self, what: str) -> None:
        if self._is_shared:
            raise _core.InvalidArgument(f"skim.LocalSteps: {what} inside shared(): the model holds x, not this rank's replica")
        if self._finished:
            raise _core.InvalidArgument(f"skim.LocalSteps: {what} after finish()")

    # ---- the shared parameters ------------------------------------------------------------------

    @contextlib.contextmanager
    @torch.no_grad()
    def shared(self) -> Iterator[torch.nn.Module]:
        """Inside, the model's parameters are x, which all ranks have in common. Afterwards they are this rank's again."""
        if self._is_shared or self._finished:
            yield self.model
            return
        own = [p.detach().clone() for p in self._parameters]
        self._is_shared = True
        for p, x in zip(self._parameters, self._shared):
            p.copy_(x)
        try:
            yield self.model
        finally:
            with torch.no_grad():
                for p, kept in zip(self._parameters, own):
                    p.copy_(kept)
            self._is_shared = False

    @torch.no_grad()
    def _take_loaded(self, _module: Any, _keys: Any) -> None:
        for p, x in zip(self._parameters, self._shared):
            x.copy_(p)
        self._steps = 0
        self._restart()

    def _replace_in_state(self, _module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, p, x in zip(self._names, self._parameters, self._shared):
            if prefix + name in state:
                state[prefix + name] = x.to(p.dtype, copy=True)

    def finish(self) -> None:
        """Ends an open round, and leaves x in the model. Collective. Training is over after it.

        What the residuals still hold is lost. A last exchange at density 1 would deliver it, but does not help as
        a rule.
        """
        if self._finished:
            return
        is_open = self._aggregator.comm.allgather(bytes([self._steps > 0]))
        if any(of_rank[0] for of_rank in is_open):
            self.exchange()
        with torch.no_grad():
            for p, x in zip(self._parameters, self._shared):
                p.copy_(x)
        self._finished = True
        for hook in self._hooks:
            hook.remove()

    # ---- state ----------------------------------------------------------------------------------

    def residuals(self) -> dict[str, torch.Tensor]:
        """A copy of this rank's residual e of each parameter, by name: flat, float32, on the CPU."""
        return self._aggregator.residuals()

    def report(self) -> Report:
        """This rank's bytes, times and decisions so far. A step of the report is a round."""
        return self._aggregator.report()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All that a run goes on from, besides the optimizer: x, the residual, the place in the round.

        Every rank saves its own. The optimizer's state is each rank's own, too.
        """
        rank, size = self._aggregator.comm.rank, self._aggregator.comm.size
        found = dict(self._aggregator.state_dict())
        found["round"] = torch.tensor([self._steps])
        found["shared"] = _flat(self._shared)
        if self._momentum:
            found["outer_momentum"] = _flat(self._momentum)
        if self._steps > 0:
            found[f"replica_{rank}_{size}"] = _flat([p.detach().to(torch.float32) for p in self._parameters])
        return found

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Goes on from state_dict(): this rank's, on as many ranks; or those of all ranks of the saved run in one dict.

        Load the model's state, if at all, before this. On another number of ranks every rank starts with the
        means over the old ranks: of their residuals, and in the middle of a round of their replicas. Raises StateError, and nothing has changed.
        """
        n = sum(x.numel() for x in self._shared)
        for key in ("round", "shared"):
            if key not in state or (key == "shared" and state[key].numel() != n):
                raise _core.StateError(f"skim.LocalSteps: not a state of this model: no '{key}' of its length")
        rank, size = self._aggregator.comm.rank, self._aggregator.comm.size
        replicas = {tuple(map(int, m.groups())): t for key, t in state.items() if (m := REPLICA.search(key))}
        self._aggregator.load_state_dict(state)
        _into(self._shared, state["shared"])
        if self._momentum and "outer_momentum" in state:
            _into(self._momentum, state["outer_momentum"])
        self._steps = int(state["round"][0])
        if (rank, size) in replicas:
            _into(self._parameters, replicas[rank, size])
        elif replicas:
            _into(self._parameters, torch.stack(list(replicas.values())).mean(0))
        else:
            self._restart()


def _is_sgd_with_momentum(optimizer: Any) -> bool:
    inner = inner_optimizer(optimizer)
    return isinstance(inner, torch.optim.SGD) and correction_for(inner).momentum_correction > 0.0


class _Hook:
    """What the model calls. A copy of the model is not trained by local steps, so a copy of this does nothing."""

    def __init__(self, call: Any = None) -> None:
        self.call = call

    def __call__(self, *arguments: Any) -> None:
        if self.call is not None:
            self.call(*arguments)

    def __reduce__(self) -> Any:
        return _Hook, ()


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().flatten().cpu() for t in tensors])


def _into(tensors: list[torch.Tensor], flat: torch.Tensor) -> None:
    for t, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors])):
        t.copy_(part.view(t.shape))
