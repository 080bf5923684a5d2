"""Takes the steps of a compression in a group whose ranks change."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from skim import _core
from skim.elastic import ElasticGroup, GenerationFailed, TooFewRanks, packed, unpacked

if TYPE_CHECKING:
    from skim._compression import Compression

# So many failures without a step that is done, and with the same ranks, end the run: they cannot reach one another.
MOST_FAILURES = 10


class ElasticSteps:
    """Either all ranks count a step as done or none does, whenever a rank is lost.

    The ranks meet before each step, where some may leave and others join. A rank counts a step as done when it knows
    that all ranks have reduced it (a barrier). If a rank is lost, some may know that and others not. They tell one
    another in the next generation: if one rank has counted the step, or if all have reduced it, it is done. Otherwise all
    abandon it and take it again.

    The model gets the mean of a step only when run() has returned. So a rank that joins while a step is counted gets the
    state of the others at their next step.
    """

    def __init__(self, compression: Compression, group: ElasticGroup) -> None:
        group.bind(self)
        self.compression, self.group = compression, group
        self.more: Callable[[], Mapping[str, torch.Tensor]] = dict  # what else a rank that joins gets
        self.received: dict[str, torch.Tensor] = {}  # the same, on the rank that joins
        # Takes part in a step that the others have begun, before this rank leaves.
        self.last_exchange: Callable[[], object] = compression.reduce_nothing
        # Called when residuals are about to change with the ranks. What it returns is called afterwards.
        self.before_change: Callable[[], Callable[[], None]] = lambda: lambda: None
        self._has_state = False  # has trained, or has the state of those that have
        self._leaves = False  # leave() has begun
        self._helps = False  # but takes part in one more step before
        self._met = False  # has met the others for the step to come
        self._reduced = False  # has reduced the open step, and does not know if all have
        self._done = False
        self._counted = 0  # steps that were done, the same for a rank that joined later
        self._owes_mean = False  # the last step is done, and the model has not got its mean yet
        self._dropped_mean = False  # and never gets it, because this rank leaves
        self._failures = 0  # since the last step that was done, or the last change of ranks
        self._size = 1  # what residuals count for: the mean is over so many ranks
        self._taken: list[bytes] = []  # from ranks that have left

    def start(self) -> None:
        """Joins the group."""
        try:
            try:
                self._settle(self.group.join())
            except GenerationFailed as e:
                self._go_on(e)
            self._meet_until(lambda: self._has_state)
        except BaseException:
            self.group.close("failed")
            raise

    def meet(self) -> None:
        """Meets the others before a step, unless that has happened. The model has the mean of the step before."""
        self.group.expect_member()
        self._owes_mean = False
        self._meet_until(lambda: self._met)

    def _meet_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            try:
                self._meet()
            except _core.CommError as e:
                self._go_on(e)

    def run(self, buckets: Sequence[int], reduce: Callable[[int], None], clear: Callable[[int], None]) -> None:
        """Takes a step. clear: sets the gradients of a bucket to zero, because residuals have taken them."""
        self._done = False
        while not self._done:
            self.meet()
            reduced: list[int] = []
            try:
                for bucket in buckets:
                    reduce(bucket)
                    reduced.append(bucket)
                self._reduced = True
                self.compression.comm.barrier()
                self._finish()
                self._met = False
            except _core.CommError as e:
                self._go_on(e)
                if not self._done:
                    for bucket in reduced:
                        clear(bucket)

    def leave(self) -> None:
        """Ends this rank's part in the run."""
        self._leaves, self._owes_mean = True, False
        while True:
            try:
                self._helps = self._met
                if self._helps:
                    self.last_exchange()
                    self._owes_mean, self._dropped_mean = False, True
                    continue
                if self._meet():
                    return
            except _core.CommError as e:
                self._go_on(e)

    @property
    def _leaves_now(self) -> bool:
        return self._leaves and not self._helps

    def _finish(self) -> None:
        self.compression.finish_step()
        self._counted += 1
        self._reduced, self._done, self._owes_mean, self._failures = False, True, True, 0

    def _meet(self) -> bool:
        """Returns whether this rank has left."""
        group, c = self.group, self.compression
        leavers, joiners, all_have_state = group.meet(c.comm, c.residual_norm(), self._leaves_now, self._has_state)
        stay = [name for name in group.members if name not in leavers]
        if not stay and not joiners:
            return True
        if not stay:  # the new ranks must have the state before the last ones leave
            leavers, stay = [], group.members
        for i, leaver in enumerate(leavers):
            taker = stay[i % len(stay)]
            if leaver == group.name:
                if group.hand_over(c.reducer.save(), taker):
                    return True
                raise _core.CommError(f"skim: {taker} was lost before it had this rank's residual")
            if taker == group.name:
                self._taken.append(group.take(leaver))
        # All know who has what before one of them decides who goes on: a leaver whose residual nobody took stays.
        for i, leaver in enumerate(leavers):
            if not group.was_taken(leaver, stay[i % len(stay)]):
                raise _core.CommError(f"skim: {leaver} has not handed over its residual")
        if leavers or joiners or not all_have_state:
            self._settle(group.regroup([*stay, *joiners]))
        else:
            self._met = True
        return False

    def _go_on(self, failure: _core.CommError) -> None:
        """After a failure: goes on with the ranks that are left."""
        if isinstance(failure, TooFewRanks):
            raise failure
        while True:
            self._failures += 1
            if self._failures > MOST_FAILURES:
                raise failure
            before = self.group.members
            self.group.abort()
            try:
                self._settle(self.group.regroup(leaves=self._leaves))
                return
            except GenerationFailed as e:
                failure = e
            finally:
                if self.group.members != before:
                    self._failures = 0

    def _settle(self, comm: _core.Communicator) -> None:
        """Goes on with the ranks of a new generation. Collective.

        If new ranks get no state yet, or all ranks leave now, all must meet again before a step.
        """
        try:
            all_have_state, all_leave_now = self._settle_with(comm)
        except _core.CommError as e:
            raise GenerationFailed(str(e)) from None
        self.group.tell()
        self._has_state, self._met = self._has_state or all_have_state, all_have_state and not all_leave_now

    def _settle_with(self, comm: _core.Communicator) -> tuple[bool, bool]:
        """Returns whether all ranks have a state now, and whether all leave now."""
        c, rank = self.compression, comm.rank
        mine = {
            "has_state": self._has_state, "counted": self._counted, "reduced": self._reduced,
            "owes_mean": self._owes_mean, "dropped_mean": self._dropped_mean, "leaves_now": self._leaves_now,
            "step": c.reducer.step, "is_open": c.step_is_open,
        }  # fmt: skip
        of_all = [json.loads(m) for m in comm.allgather(json.dumps(mine).encode())]
        # If nobody has trained, rank 0's state becomes that of all.
        holders = [r for r, of in enumerate(of_all) if of["has_state"]] or [0]
        latest = max(of_all[r]["counted"] for r in holders)
        current = [r for r in holders if of_all[r]["counted"] == latest]
        some_know = len(current) < len(holders)  # that all have reduced the step
        all_reduced = not some_know and all(of_all[r]["reduced"] for r in current)
        if self._has_state:
            if all_reduced or mine["counted"] < latest:
                self._finish()
            if not all_reduced:
                # This rank may have abandoned the step before, in a generation that failed.
                next_step = max(of_all[r]["step"] + of_all[r]["is_open"] for r in current)
                while c.reducer.step < next_step:
                    c.abandon_step()
                    self._reduced = False
            states = [c.reducer.save(), *self._taken]
            after_change = self.before_change()
            c.rebuild(comm)
            c.reducer.take_over(states, comm.size / self._size)
            self._taken = []
            after_change()
        else:
            c.rebuild(comm)
        self._size = comm.size
        c.expect_equal(like=current[0])
        newcomers = [r for r, of in enumerate(of_all) if not of["has_state"] and r != current[0]]
        if newcomers and (all_reduced or some_know or any(of_all[r]["owes_mean"] for r in current)):
            return False, False
        sources = [r for r in current if not of_all[r]["dropped_mean"]] or current
        for i, r in enumerate(newcomers):
            source = sources[i % len(sources)]
            if rank == source:
                self._send_state(r)
            elif rank == r:
                self._receive_state(source)
                self._counted = latest
        return True, all(of["leaves_now"] for of in of_all)

    def _send_state(self, to: int) -> None:
        """If the state cannot be sent, the other rank gets the reason instead, and this one goes on."""
        saved = torch.frombuffer(bytearray(self.compression.reducer.save()), dtype=torch.uint8)
        try:
            messages = [message for _, message in self.group.packed_state()]
        except _core.InvalidArgument as e:
            self.group.record(str(e), once=True)
            messages = [packed("the reason", str(e))]
        else:
            kept = {"reducer": saved, "unit": self.compression.unit.state_dict(), "more": dict(self.more())}
            messages.append(packed("residuals", kept))
        for message in messages:
            self.group.send(message, to)

    def _receive_state(self, source: int) -> None:
        state = self.group.receive_state(source)
        found = unpacked("residuals", self.group.receive(source))
        self.group.set_state(state)
        self.compression.reducer.take_over([bytes(found["reducer"].numpy())], 0.0)
        self.compression.unit.load_state_dict(found["unit"])
        self.received = found["more"]
