"""The base of skim.attach and skim.Aggregator: a reducer with its layout, communication thread and state."""

from __future__ import annotations

import atexit
import contextlib
import copy
import dataclasses
import hashlib
import json
import logging
import math
import numbers
import queue
import struct
import threading
import time
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from skim import _core
from skim._checks import has_method
from skim._elastic_steps import ElasticSteps
from skim._momentum import expect_taken_out, put_back, take_out
from skim._options import Options
from skim._parameters import array, expect_parameters, in_one
from skim._report import Report
from skim._states import STATE, expect_bytes, expect_state
from skim._transport import connect
from skim.elastic import ElasticGroup
from skim.tensor_half import TensorLocalHalf, on_streams

RATE = "rate"  # a key of states: the last learning rate above 0, if residuals hold updates
Jobs: typing.TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"  # None ends the thread
COMPARED_EVERY = 100  # steps between comparisons of how long the ranks waited
LEAST_RATE = 1e-20  # stands for a learning rate of 0 until the first rate above 0
LAST_WAIT_S = 10.0  # close(), and Python's end, wait at most this long for threads that still wait for another rank
# The communication threads and their jobs, also those of compressions that are gone.
_threads: weakref.WeakKeyDictionary[threading.Thread, Jobs] = weakref.WeakKeyDictionary()


def expect_same(comm: _core.Communicator, what: str, mine: Sequence[str], like: int | None = None) -> None:
    """Raises InvalidArgument if the lists differ between ranks. Collective.

    what: the plural noun that names the list in the message.
    like: raises only on the ranks whose lists differ from this rank's. None: on every rank.
    """
    # Compare digests first, because they are short however long the lists are.
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    if len(set(comm.allgather(digest))) == 1:
        return
    lists = [text.decode().split("\n") for text in comm.allgather("\n".join(mine).encode())]
    right = like or 0
    for r, lines in enumerate(lists):
        if like is not None and r != comm.rank:
            continue
        for i in range(max(len(lines), len(lists[right]))):
            here = lines[i] if i < len(lines) else "nothing"
            there = lists[right][i] if i < len(lists[right]) else "nothing"
            if here != there:
                raise _core.InvalidArgument(
                    f"skim: {what} differ between ranks: rank {right} has {there}, rank {r} has {here}"
                )


class Unit:
    """What residuals are measured in, compared with the gradients that backward leaves.

    scaler: a GradScaler, whose scale residuals do not have; or None.
    updates_of: an optimizer. Residuals then hold updates: gradients times its learning rate. Or None.
    """

    def __init__(self, scaler: Any, updates_of: torch.optim.Optimizer | None) -> None:
        self._scaler = scaler
        self._updates_of = updates_of
        self._rate = LEAST_RATE  # learning rate of the last step in which it was above 0

    def described(self) -> list[str]:
        """What must be equal on all ranks."""
        given = {"updates_of": self._updates_of, "scaler": self._scaler}
        return [f"{name}={None if part is None else type(part).__name__}" for name, part in given.items()]

    @property
    def holds_updates(self) -> bool:
        return self._updates_of is not None

    def scale(self) -> float:
        """The gradients of this step divided by the unit: loss scale / learning rate, if set. On a GPU it waits."""
        scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
        if self._updates_of is None:
            return scale
        # At a rate of 0, updates cannot be converted to gradients, so keep the last rate above 0. The
        # entries that such a step sends change no parameter. Schedulers round a rate of 0, also to one below 0.
        rate = max(float(group["lr"]) for group in self._updates_of.param_groups)
        self._rate = rate if rate > LEAST_RATE else self._rate
        return scale / self._rate

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a run that resumes at a rate of 0, or a rank that joins then, must know."""
        return {} if self._updates_of is None else {RATE: torch.tensor([self._rate], dtype=torch.float64, device="cpu")}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Without the key nothing changes. Raises StateError if its value is no rate; nothing has changed then."""
        if self._updates_of is None or RATE not in state:
            return
        value = state[RATE]
        is_rate = isinstance(value, torch.Tensor) and value.numel() == 1 and 0.0 < float(value) < math.inf
        if not is_rate:
            raise _core.StateError(f"skim: '{RATE}' must be a tensor with one learning rate above 0, not {value!r}")
        self._rate = float(value)


class InEpochs:
    """Has an epoch, which the user sets."""

    _epoch = 0.0

    @property
    def epoch(self) -> float:
        """The epoch, for a density schedule that goes by it."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: float) -> None:
        if not isinstance(value, numbers.Real):
            raise _core.InvalidArgument(f"skim: epoch: must be a number, not {value!r}")
        self._epoch = value


class Compression(InEpochs):
    """Compresses the gradients of named parameters. Made by skim.attach and skim.Aggregator.

    Layout: until the buckets are known, each parameter is a bucket of its own, and parameter i has
    slot i. After that, bucket b has slot (number of parameters) + b. When the layout changes,
    residuals move with the names of their parameters.
    """

    mark = ""  # before rank_R_of_P in the names of this rank's states: whose they are, if ranks share the parameters

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        options: Options,
        process_group: Any,
        timeout: float,
        writer: Any = None,
        unit: Unit | None = None,
        also_equal: Sequence[str] = (),
    ) -> None:
        """unit: of the residuals; None: that of the tensors. also_equal: descriptions of other options, which must be equal
        on all ranks."""
        expect_parameters(parameters)
        if writer is not None and not has_method(writer, "add_scalar"):
            raise _core.InvalidArgument(f"skim: writer: must have add_scalar(tag, value, step), not {writer!r}")
        self.names = list(parameters)
        self.lengths = [p.numel() for p in parameters.values()]
        self.unit = unit or Unit(None, None)
        also_equal = [*self.unit.described(), *also_equal]
        is_elastic = isinstance(process_group, ElasticGroup)
        if is_elastic:
            options.expect_elastic()
            also_equal = [*also_equal, *process_group.described()]
        # An elastic group begins with this rank alone, which checks the options before it joins.
        self.comm = _core.in_process_group(1)[0] if is_elastic else connect(process_group, timeout=timeout)
        self._device = next(iter(parameters.values())).device
        self.local = options.local_half(self._device)
        self.reducer = options.reducer(self.comm, self.local)
        self.momentum = options.momentum()
        given = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name != "others"}
        if isinstance(self.local, TensorLocalHalf):
            # As Reducer.options has them: the shortest number that is the same float32.
            options_of_device = self.local.options.items()
            own = {k: v if isinstance(v, (bool, str)) else float(str(np.float32(v))) for k, v in options_of_device}
            given = {**own, **given}
        if options.replay is not None:
            given["replay"] = hashlib.sha256(json.dumps(options.replay).encode()).hexdigest()
        given = {**self.reducer.options, **given}
        self._equal = [f"{name}={_text(value)}" for name, value in given.items()] + list(also_equal)
        self.expect_equal()
        self.options = options
        self.writer = writer
        self._epoch_of_step = 0.0  # when the open step began: a rank may end it before the next epoch is set, or after
        self.statistics = Report(self.comm.rank, self.comm.size)
        self._compared_at, self._exposed_before = time.perf_counter(), 0.0
        self.error: BaseException | None = None
        self._trace: types.TracebackType | None = None  # of the error, when it was kept
        self.lock = threading.RLock()  # guards the reducer and the members below
        self.buckets: list[tuple[int, ...]] | None = None  # indices of each bucket's parameters; None: not known yet
        self._is_detached = False
        self.step_is_open = False  # the last step can still be taken back
        self._finite = True
        self._raises = False  # raise_if_taken_back() does
        self._give_back: list[tuple[int, int, torch.Tensor, float]] = []
        self._moved_before = 0
        self.inside: list[_core.Communicator] = []  # if the parameters are shards: among the ranks that share them
        self._streams: dict[torch.device, torch.Stream] = {}  # for the work of `local`
        self._jobs: Jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._set_layout(None)
        self.was_finite = True  # the last step that has ended
        self._failed = False  # a bucket of the open step
        self.ranks_of_mean = self.reducer.ranks_of_mean  # that reduced the last step; an elastic group may have others by now
        self._residual_norms: dict[int, float] = {}  # by slot, after its last step
        self.elastic: ElasticSteps | None = None
        if is_elastic:
            self.elastic = ElasticSteps(self, process_group)
            self.elastic.start()

    def take_over_momentum(self) -> None:
        """Ends the making of a compression. An error before that, or an interrupt, leaves the optimizer as it was."""
        if self.options.optimizer is None:
            return
        try:
            take_out(self.options.optimizer, self.options.of_updates)
        except BaseException:
            put_back(self.options.optimizer, self.options.of_updates)
            raise

    def keep_momentum_out(self) -> None:
        """Takes the optimizer's momentum out again if a state_dict has brought it back. Raises as
        expect_taken_out()."""
        if self.options.optimizer is not None and not self._is_detached:
            expect_taken_out(self.options.optimizer, self.momentum, self.options.of_updates)

    def expect_equal(self, like: int | None = None) -> None:
        """Raises InvalidArgument if options or parameters differ between ranks. Collective. like: see expect_same."""
        expect_same(self.comm, "options", self._equal, like)
        named = [f"'{n}' of {k} entries" for n, k in zip(self.names, self.lengths)]
        expect_same(self.comm, "parameters", named, like)

    def rebuild(self, comm: _core.Communicator) -> None:
        """Begins anew, without residuals, on other ranks. Between steps only."""
        self.comm = comm
        self.local, self._moved_before = self.options.local_half(self._device), 0
        self.reducer = self.options.reducer(comm, self.local)
        self._set_layout(self.buckets)
        self.statistics.rank, self.statistics.size = comm.rank, comm.size

    # ---- the layout -----------------------------------------------------------------------------

    def _set_layout(self, buckets: list[tuple[int, ...]] | None) -> None:
        """Sets the indices of each bucket's parameters. None: each parameter is a bucket. Between steps only."""
        before, self.buckets = self.buckets, buckets
        try:
            self._declare_buckets()
        except BaseException:  # by a signal handler, for example
            self.buckets = before
            self._declare_buckets()
            raise

    def _declare_buckets(self) -> None:
        self.reducer.set_layout(
            [
                (slot, [(self.names[i], self.lengths[i]) for i in members])
                for slot, members in enumerate(self._members_of_slots(), self._first_slot)
            ]
        )

    @property
    def _first_slot(self) -> int:
        return 0 if self.buckets is None else len(self.names)

    def _members_of_slots(self) -> list[tuple[int, ...]]:
        """The indices of the parameters of each slot, from the first slot on."""
        return [(i,) for i in range(len(self.names))] if self.buckets is None else self.buckets

    def slots_of(self, members: tuple[int, ...], index: int) -> list[tuple[int, int, int]]:
        """(slot, offset, length), in entries, of each piece of a bucket that is reduced by itself.

        index, members: the bucket's number and the indices of its parameters.
        """
        if self.buckets is not None:
            return [(self._first_slot + index, 0, sum(self.lengths[i] for i in members))]
        parts, offset = [], 0
        for i in members:
            parts.append((i, offset, self.lengths[i]))
            offset += self.lengths[i]
        return parts

    # ---- a step ---------------------------------------------------------------------------------

    def run_after_others(self, job: Callable[[], None]) -> None:
        """Runs job on the calling thread, after the communication thread has finished its queued jobs."""
        if self._thread is not None:
            idle = threading.Event()
            self._jobs.put(idle.set)
            idle.wait()
        job()

    def submit(self, job: Callable[[], None]) -> None:
        """Queues job for the communication thread, which runs jobs in order. Starts the thread if needed."""
        if self._thread is None:
            # The thread refers to the queue only. So this object can be garbage-collected, which ends the thread.
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="skim", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
            _threads[self._thread] = self._jobs
        self._jobs.put(job)

    def expect_no_gradient_of_a_server(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raises InvalidArgument if this rank only serves, and an entry of the tensors is not 0."""
        serves = self.comm.rank < self.comm.size - self.reducer.ranks_of_mean
        if serves and any(bool(t.any()) for t in tensors):
            raise _core.InvalidArgument(
                f"skim: rank {self.comm.rank} is a dedicated server, and has a gradient, which no mean would count: give it a "
                "gradient of zeros, as by (0 * loss).backward() or LocalSteps.step(idle=True), or use server='rank0', which "
                "trains, too"
            )

    def begin_bucket(self, index: int, members: tuple[int, ...], *, opens_step: bool) -> None:
        """Call it before reducing the pieces of a bucket. opens_step: it is the first bucket of a step."""
        self.raise_failure()
        if opens_step:
            self.finish_step()
            self.keep_momentum_out()
        if self.buckets is not None and self.buckets[index : index + 1] != [members]:
            if not opens_step:
                raise _core.Error(
                    f"skim: bucket {index} has other parameters than in the steps before, in the middle of a step"
                )
            self._set_layout(None)
        if opens_step:
            self.step_is_open, self._epoch_of_step = True, self.epoch

    def reduce_part(self, slot: int, flat: torch.Tensor, scale: float) -> _core.StepReport:
        """Replaces flat [n], on any device, by the mean over the ranks. scale: the loss scale in flat. Collective."""
        is_taken_as_it_is = flat.device.type == "cpu" or self.local is not None
        given = flat if is_taken_as_it_is else flat.to("cpu")
        listener = _Phases() if _is_profiling() else None
        try:
            report = self.reducer.reduce(slot, array(given), scale, on_phase=listener)
        except BaseException:
            self._failed = True
            raise
        finally:
            if given is not flat:
                flat.copy_(given)
        self._residual_norms[slot] = report.residual_norm
        self._finite = self._finite and report.finite
        self.statistics.add(slot - self._first_slot, report, self.reducer.decision(slot))
        if isinstance(self.local, TensorLocalHalf):
            self.statistics.moved_bytes += self.local.moved_bytes - self._moved_before
            self._moved_before = self.local.moved_bytes
        return report

    def reduce_buckets(self, indices: Sequence[int], tensor_of: Mapping[int, torch.Tensor], scale: float) -> None:
        """Replaces tensors by their means, as a step. Collective. tensor_of: by the index of the parameter."""
        assert self.buckets is not None
        buckets = self.buckets

        def reduce(index: int) -> None:
            members = buckets[index]
            self.begin_bucket(index, members, opens_step=index == indices[0])
            self.ranks_of_mean = self.reducer.ranks_of_mean
            tensors = [tensor_of[i] for i in members]
            whole = in_one(tensors)
            flat = torch.cat([t.reshape(-1) for t in tensors]) if whole is None else whole
            try:
                for slot, offset, length in self.slots_of(members, index):
                    self.reduce_part(slot, flat[offset : offset + length], scale)
            finally:
                if whole is None:
                    for t, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors])):
                        t.copy_(part.view(t.shape))

        def clear(index: int) -> None:
            for i in buckets[index]:
                tensor_of[i].zero_()

        if self.elastic is not None:
            self.elastic.run(indices, reduce, clear)
        else:
            for index in indices:
                reduce(index)

    def reduce_nothing(self) -> None:
        """Takes part in a step without gradients, and drops the mean. Collective."""
        assert self.buckets is not None
        nothing = {i: torch.zeros(length, dtype=torch.float32, device="cpu") for i, length in enumerate(self.lengths)}
        self.reduce_buckets(range(len(self.buckets)), nothing, 1.0)

    def end_of_step(self) -> None:
        """Call it after the last bucket of a step. It counts the step and writes the statistics.

        Collective among the ranks that share the parameters: a step is finite on all of them or on none.
        """
        for comm in self.inside:
            try:
                of_all = comm.allgather(bytes([self._finite]))
            except _core.CommError as e:
                comm.abort(e.peer)
                failure = _core.CommError(f"inside the island: {e}")
                failure.peer = self.comm.rank  # for the other islands, which do not know e.peer
                raise failure from None
            self._finite = all(m[0] for m in of_all)
        self.statistics.steps += 1
        if self.elastic is None and self.comm.size > 1 and self.statistics.steps % COMPARED_EVERY == 0:
            self._compare_waits()
        if self.writer is not None:
            for tag, value in self.statistics.scalars().items():
                self.writer.add_scalar(f"skim/{tag}", value, self.reducer.step)

    def _compare_waits(self) -> None:
        now, exposed = time.perf_counter(), self.statistics.exposed_s
        of_all = self.comm.allgather(struct.pack("<d", exposed - self._exposed_before))
        slow = self.statistics.compare([struct.unpack("<d", m)[0] for m in of_all], now - self._compared_at)
        if slow and self.comm.rank == 0:
            logging.getLogger("skim").warning(slow)
        self._compared_at, self._exposed_before = now, exposed

    @contextlib.contextmanager
    def after(self, ready: torch.Event | None, device: torch.device) -> Iterator[None]:
        """In the block, this thread's work on the device comes after the event, and beside other work there."""
        if ready is not None and self.local is None:
            ready.synchronize()
            ready = None
        if ready is not None and device not in self._streams:
            self._streams[device] = getattr(torch, device.type).Stream(device)
        # All of them, because the first bucket of a step ends the step before, on every device. The bucket's own comes last,
        # which makes its device the current one.
        with on_streams(self._streams[d] for d in sorted(self._streams, key=lambda d: d == device)):
            if ready is not None:
                ready.wait()
            yield

    def residuals(self) -> dict[str, torch.Tensor]:
        """A copy of this rank's residual of each parameter: a flat float32 tensor on the CPU, by name.

        Ends the open step, if there is one. A rollback() after it changes nothing. Summed over the P ranks, the
        residuals are all gradients so far minus P times the means that were delivered. They are zeros with
        feedback=False.
        """
        found = {name: residual.cpu() for name, residual in self.residuals_of_buckets().items()}
        return {name: found[name] for name in self.names}

    def residuals_of_buckets(
        self, indices: Iterable[int] | None = None, *, copied: bool = True
    ) -> dict[str, torch.Tensor]:
        """As residuals(), in the order of the buckets, and on the device where the residuals are. indices: of buckets.

        copied=False: to read, and until the layout changes; then these are the residuals themselves, where possible.
        """
        self.finish_step()
        is_stored_as_floats = self.options.others.get("residual_code", "f32") == "f32" and not self.options.offload
        as_it_is = not copied and is_stored_as_floats and not self._holds_mass
        with self.lock:
            found = {}
            groups = self._members_of_slots()
            for index in range(len(groups)) if indices is None else indices:
                members, slot = groups[index], self._first_slot + index
                if isinstance(self.local, TensorLocalHalf) and not self._holds_mass:
                    kept = self.local.residual_tensor(slot)
                    kept = kept if as_it_is else kept.clone()
                elif as_it_is and self.local is None:
                    kept = torch.from_numpy(self.reducer._residual_view(slot))
                else:
                    kept = torch.from_numpy(self.reducer.residual(slot))
                lengths = [self.lengths[i] for i in members]
                if len(kept) == 0:  # feedback=False
                    kept = torch.zeros(sum(lengths), dtype=torch.float32, device="cpu")
                for i, part in zip(members, torch.split(kept, lengths)):
                    found[self.names[i]] = part
            return found

    @property
    def _holds_mass(self) -> bool:
        """Whether this rank may hold mass as a server. Reducer.residual() counts it."""
        row = _core.exchanges.get(str(self.options.others.get("exchange")))
        return row is not None and row.holds_mass

    def give_back(self, slot: int, offset: int, mean: torch.Tensor, scale: float) -> None:
        """Adds mean / scale to this rank's residual when the step ends, because nobody applies this mean.

        Call it on every rank. offset: the entry of the slot that mean[0] belongs to.
        """
        self._give_back.append((slot, offset, mean.float().cpu(), scale))

    def finish_step(self, *, skip: bool = False) -> None:
        """Ends the open step, if there is one. It is taken back if `skip`, if it held NaN or infinity, or if a bucket of it
        failed. Otherwise what it sent counts as delivered, and a rollback() after it changes nothing. The next step does
        this by itself."""
        with self.lock:
            if self._failed:
                self.abandon_step()
            if not self.step_is_open:
                return
            self.step_is_open = False
            self.was_finite = self._finite
            if skip or not self._finite:
                self.reducer.rollback_step(self._epoch_of_step)
                self.statistics.skipped += 1
            else:
                self.reducer.end_step(self._epoch_of_step)
                for slot, offset, mean, scale in self._give_back:
                    self.reducer.add_residual(slot, offset, array(mean), scale)
            self._give_back.clear()
            self._finite = True

    def abandon_step(self) -> None:
        """Ends a step in which a bucket failed: takes it back, with the statistics that ranks may not agree on."""
        with self.lock:
            self.step_is_open = self._failed = False
            self.reducer.abandon_step(self.epoch)
            self._give_back.clear()
            self._finite = True

    def residual_norm(self) -> float:
        """The norm of this rank's residual after the last step, with what it holds as a server."""
        norms = self._residual_norms
        if self._holds_mass:
            norms = {slot: float(np.linalg.norm(self.reducer.residual(slot))) for slot in norms}
        return math.sqrt(sum(norm * norm for norm in norms.values()))

    def raise_if_not_finite(self) -> None:
        """Call it after end_of_step. With non_finite="raise", takes back a step with NaN or infinity, and raises."""
        self.take_back_if_not_finite()
        self.raise_if_taken_back()

    def take_back_if_not_finite(self) -> None:
        """Call it after end_of_step. With non_finite="raise", takes back a step with NaN or infinity. raise_if_taken_back()
        then raises."""
        finite = self._finite if self.step_is_open else self.was_finite
        if not finite and self.options.non_finite == "raise":
            self.finish_step()
            self._raises = True

    def raise_if_taken_back(self) -> None:
        """Raises NonFiniteError if take_back_if_not_finite() has taken a step back since the last call."""
        if self._raises:
            self._raises = False
            raise _core.NonFiniteError("skim: a gradient entry of the group is NaN or infinite")

    def fail(self, error: BaseException) -> None:
        """Keeps the first failure, which all later buckets raise too, and aborts the group."""
        if self.error is None:
            self.error, self._trace = error, error.__traceback__
            culprit = getattr(error, "peer", -1)  # of a CommError
            self.comm.abort(culprit if culprit >= 0 else self.comm.rank)
            for comm in self.inside:
                comm.abort(comm.rank)

    def raise_failure(self) -> None:
        """Raises the failure that fail() keeps, if there is one."""
        if self.error is not None:
            raise self.error.with_traceback(self._trace)  # which each raise would make longer

    def report(self) -> Report:
        """This rank's bytes, times and decisions so far. print() shows them as a table."""
        with self.lock:
            self.statistics.choices = self.reducer.choices
            return self.statistics

    # ---- state ----------------------------------------------------------------------------------

    def state_dict(self, *, gather: bool = False) -> dict[str, torch.Tensor]:
        """This rank's residuals and all other state of compression, for load_state_dict(): one tensor of bytes, under the key
        rank_R_of_P. Every rank must save its own. If residuals hold updates, the key "rate" has the last learning rate above 0.

        Ends the open step, if there is one. A rollback() after it changes nothing.
        gather: True: rank 0 gets the states of all ranks, and the others an empty dict. Collective.
        """
        if gather and self.elastic is not None:
            raise _core.InvalidArgument(
                "skim: no gather in an ElasticGroup: a rank may leave meanwhile; save what every rank has"
            )
        self.finish_step()
        with self.lock:
            saved = bytearray(self.reducer.save())
            if gather:
                of_all = [bytearray(m) for m in self.comm.allgather(bytes(saved))]
                states = enumerate(of_all) if self.comm.rank == 0 else ()
            else:
                states = ((self.comm.rank, saved),)
        found = {f"rank_{r}_of_{self.comm.size}": torch.frombuffer(s, dtype=torch.uint8) for r, s in states}
        return {**found, **self.unit.state_dict()} if found else {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> _core.LoadReport:
        """Restores what state_dict() returned. skim.load_state_dict describes arguments, result and errors."""
        expect_state(state, strict)
        found: dict[int, dict[int, torch.Tensor]] = {}
        for key, value in state.items():
            if isinstance(key, str) and (match := STATE.search(key)):
                expect_bytes(key, value)
                if int(match[1]) >= int(match[2]):
                    raise _core.StateError(f"skim: '{key}': there is no such rank")
                found.setdefault(int(match[2]), {})[int(match[1])] = value
        if not found:
            raise _core.StateError(
                "skim: not a state of Skim: no entry is called rank_R_of_P; there are: "
                + (", ".join(map(str, list(state)[:5])) or "none")
            )
        if len(found) > 1:
            raise _core.StateError(
                f"skim: these states are of runs with {' and '.join(map(str, sorted(found)))} ranks; "
                "give those of one run"
            )
        [(old_size, by_rank)] = found.items()
        rank, size = self.comm.rank, self.comm.size
        if old_size == size and rank in by_rank:
            # load() reads one state per rank, but takes only its own if the number of ranks is equal. So
            # this rank's state can stand in for states that are missing here.
            states = [by_rank.get(r, by_rank[rank]) for r in range(size)]
        else:
            missing = [f"rank_{r}_of_{old_size}" for r in range(old_size) if r not in by_rank]
            if missing:
                raise _core.StateError(
                    f"skim: the state is of {old_size} ranks, this is rank {rank} of {size}; give the states of all "
                    f"{old_size} ranks in one dict ({missing[0]} is missing)"
                )
            states = [by_rank[r] for r in range(old_size)]
        if (RATE in state) != self.unit.holds_updates:
            kinds = ("gradients", "updates")
            raise _core.StateError(
                f"skim: the residuals of this state are {kinds[RATE in state]}, those of this run are "
                f"{kinds[self.unit.holds_updates]}, which differ by the factor of the learning rate; give optimizer=, local_clip= "
                "and updates_of= as in the saved run, or do not load this state, so that residuals begin at 0"
            )
        self.finish_step()
        unit = copy.copy(self.unit)
        unit.load_state_dict(state)
        with self.lock:
            report = self.reducer.load([array(s.detach().cpu().contiguous()) for s in states], strict=strict)
            self.unit = unit
        return report

    # ---- the end --------------------------------------------------------------------------------

    def detach(self) -> None:
        """Ends the last step, and gives the optimizer its momentum back."""
        self.finish_step()
        self.close()
        self._is_detached = True
        if self.options.optimizer is not None:
            put_back(self.options.optimizer, self.options.of_updates)

    def close(self) -> None:
        """Ends the communication thread after its queued jobs. Waits for at most LAST_WAIT_S seconds."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(LAST_WAIT_S)


class _Phases:
    """Marks the phases of one bucket for PyTorch's profiler.

    The profiler sees only the thread that started it, unless it was made with
    torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)).
    """

    def __init__(self) -> None:
        self._open: Any = None

    def __call__(self, phase: str | None) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
        if phase is not None:
            self._open = torch.profiler.record_function(f"skim::{phase}")
            self._open.__enter__()


def _is_profiling() -> bool:
    # PyTorch 2.0 lacks this flag. There phases are always marked, which costs microseconds.
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() == 1:  # a density may be one
        value = value.item()
    return str(value) if isinstance(value, (str, int, float, tuple, np.generic)) else type(value).__name__


def _serve(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # frees its tensors before the wait for the next job


@atexit.register
def _close_all() -> None:
    """Ends the communication threads before Python unloads its modules. Then a thread could not go on."""
    for jobs in list(_threads.values()):
        jobs.put(None)
    ends = time.monotonic() + LAST_WAIT_S
    for thread in list(_threads):
        thread.join(max(0.0, ends - time.monotonic()))
