"""Groups whose ranks may leave, be lost and join while the others go on training.

The ranks of one time are a generation. A store (torch.distributed.TCPStore), which a process of its own keeps, has the list
of each generation's ranks. Whoever writes the list first decides it, so no two ranks see different generations. Messages between
ranks go over gloo, in a group that each generation makes anew.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dataclasses
import datetime
import io
import itertools
import json
import logging
import os
import pickle
import re
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from skim import _core
from skim._checks import expect_positive, expect_timeout, expect_whole
from skim._transport import GlooTransport

if TYPE_CHECKING:
    from skim._elastic_steps import ElasticSteps

# Keys of the store. {} is the number of a generation or the name of a rank.
RECENT = "recent"  # the number of a generation, not much older than the newest
RANKS = "ranks/{}"  # a generation's ranks: a list of names in the order of rank
PRESENT = "present/{}/{}"  # a rank is ready for this generation: TRAINS or LEAVES
ASKED = "asked"  # the names of all ranks that have ever asked to join, in lines
ADMITTED = "admitted/{}"  # the generation with which a rank joins
PULSE = "pulse/{}"  # counts up while the rank lives; then LEFT or FAILED
TAKEN = "taken/{}/{}"  # in this generation: "yes" or "no": another rank has the residual of this one, which leaves
LEFT, FAILED = "left", "failed"
TRAINS, LEAVES = "trains", "leaves"  # what the rank wants
STORE_WAIT_S = 10.0  # a rank may start a little before its store
MOST_PORT = 65535
PIECE_BYTES = 16 << 20  # of a state, in one message
STATE_TAG = 1 << 20  # of messages that are not the communicator's; its tags are small

_open: weakref.WeakSet[ElasticGroup] = weakref.WeakSet()


class _Store:
    """A connection to the store. Raises CommError if the store has ended."""

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self._where = host, port, timeout
        self.has_ended = False
        self._expect_listener(min(timeout, STORE_WAIT_S))
        limit = datetime.timedelta(seconds=timeout)
        made: concurrent.futures.Future[dist.TCPStore] = concurrent.futures.Future()

        def make() -> None:
            try:
                made.set_result(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit))
            except BaseException as e:  # noqa: BLE001 - the waiting thread raises it
                made.set_exception(e)

        # Its timeout does not bound the wait for a listener that never answers.
        threading.Thread(target=make, name="skim-connect", daemon=True).start()
        try:
            self.tcp = made.result(max(timeout, STORE_WAIT_S))
        except (RuntimeError, concurrent.futures.TimeoutError):
            raise _core.CommError(
                f"skim.ElasticGroup: what listens at {host}:{port} does not answer as a store of torch.distributed; start "
                "one at another port with: python -m skim.store PORT"
            ) from None

    def _expect_listener(self, patience: float) -> None:
        """TCPStore itself would write pages to stderr."""
        host, port, _ = self._where
        ends = time.monotonic() + patience
        while True:
            try:
                socket.create_connection((host, port), patience).close()
                return
            except (OSError, UnicodeError) as e:  # a name that cannot be one
                if isinstance(e, ConnectionRefusedError) and time.monotonic() < ends:
                    time.sleep(0.1)  # it may be about to start
                    continue
                raise _core.CommError(
                    f"skim.ElasticGroup: no store at {host}:{port} ({getattr(e, 'strerror', None) or e}); start one with: "
                    f"python -m skim.store {port}"
                ) from None

    def another(self) -> _Store:
        """Another connection, for another thread."""
        return _Store(*self._where)

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self.tcp.set(key, value))

    def get(self, key: str) -> str:
        return str(self._ask(lambda: self.tcp.get(key)).decode())

    def has(self, key: str) -> bool:
        return bool(self._ask(lambda: self.tcp.check([key])))

    def append(self, key: str, text: str) -> None:
        self._ask(lambda: self.tcp.append(key, text))

    def decide(self, key: str, value: str) -> str:
        """Sets the key, unless it has a value. Returns its value then."""
        return str(self._ask(lambda: self.tcp.compare_set(key, "", value)).decode())

    def has_soon(self, key: str, seconds: float) -> bool:
        """Waits for a key, for at most so long. Returns whether it is there."""
        ends = time.monotonic() + seconds
        while not self.has(key):
            if time.monotonic() >= ends:
                return False
            time.sleep(0.01)  # the store's own wait writes warnings to stderr
        return True

    def _ask(self, ask: Callable[[], Any]) -> Any:
        if not self.has_ended:  # PyTorch writes a page to stderr for each call that fails
            try:
                return ask()
            except RuntimeError:
                self.has_ended = True
        raise _core.CommError("skim: the store of the group has ended")


class _Pulse:
    """Shows that this rank lives, on a thread and a connection of its own."""

    def __init__(self, store: _Store, name: str, every: float) -> None:
        self._store, self._key, self._every = store.another(), PULSE.format(name), every
        self._ends = threading.Event()
        self._store.set(self._key, "0")
        self._thread = threading.Thread(target=self._beat, name="skim-pulse", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        try:
            for count in itertools.count(1):
                if self._ends.wait(self._every):
                    return
                self._store.set(self._key, str(count))
        except _core.CommError:
            return

    def end(self, how: str) -> None:
        self._ends.set()
        self._thread.join()
        with contextlib.suppress(_core.CommError):
            self._store.set(self._key, how)


@dataclasses.dataclass
class _Seen:
    """A rank's pulse, as the last look found it."""

    pulse: str
    at: float  # when that was
    silence: float = 0.0  # seconds in which the pulse has not changed
    has_changed: bool = False  # since the first look


class _Watch:
    """Tells which ranks live, by their pulses since the watch began.

    One look counts for at most a quarter of lost_after. If the store or this rank has stood still, all pulses seem to
    have stopped, and the next look would find all ranks silent. A store stands still for seconds wherever a
    connection is new and the name service does not answer, because TCPStore looks up the name of every new peer.
    """

    def __init__(self, store: _Store, lost_after: float) -> None:
        self._store, self._lost_after = store, lost_after
        self._seen: dict[str, _Seen] = {}

    def lives(self, name: str) -> bool:
        """The pulse has changed since the first look at it, and not long ago."""
        return not self.is_gone(name) and self._seen[name].has_changed

    def is_gone(self, name: str, after: float | None = None) -> bool:
        """The rank has ended, or its pulse has not changed for so many seconds. None: lost_after."""
        seen = self._look(name)
        return seen.pulse in (LEFT, FAILED) or seen.silence >= (self._lost_after if after is None else after)

    def _look(self, name: str) -> _Seen:
        pulse, now = self._store.get(PULSE.format(name)), time.monotonic()
        old = self._seen.get(name)
        if old is None:
            self._seen[name] = _Seen(pulse, now)
        elif old.pulse != pulse:
            self._seen[name] = _Seen(pulse, now, has_changed=True)
        else:
            old.silence += min(now - old.at, self._lost_after / 4)
            old.at = now
        return self._seen[name]


class ElasticGroup:
    """The ranks of a run that goes on while ranks leave, are lost, and join.

        # once, on a machine that all ranks reach, for the whole run:  python -m skim.store 29400
        progress = {"step": 0}
        group = skim.ElasticGroup(
            "10.0.0.1:29400", min_ranks=2, state={"model": model, "optimizer": optimizer, "progress": progress}
        )
        local = skim.LocalSteps(model, optimizer, every=15, process_group=group)
        while progress["step"] < 10_000:
            ...
            local.step()
            progress["step"] += 1
        group.leave()

    Give it to skim.LocalSteps, skim.Aggregator or skim.attach as process_group, each group to one of them. Its
    constructor then waits until the ranks that train admit this one, at the start of their next step (LocalSteps:
    round), or until min_ranks new ranks are there. A rank that joins gets the others' `state`, and starts with a
    residual of zeros. If no rank is left that trains, new ranks start with the state of the lowest of them.

    - A rank that calls leave() hands its residual over to another rank.
    - If a rank is lost, the others take the open step again without it, with the gradients that they have. What its
      residual held is lost. A warning says how much that was, as the norm of the residual after its last step.
    - Residuals of the ranks that stay are multiplied by (ranks now) / (ranks before). So the mean over the ranks of all
      that waits to be sent stays as it was, except for what was lost.

    rank, size, members: of the moment; they change. events: a line for each change, as the logger `skim` has them.

    address: "host:port" of the store. Without the store a run goes on until its ranks change.
    state: what a rank that joins must have: objects with state_dict() and load_state_dict(), and dicts. It must be all
        that is equal on all ranks: the model, the optimizer, a learning-rate scheduler, the place in the data. Tensors,
        numbers, strings, lists and dicts can be sent, as torch.load(weights_only=True) reads them, but not NumPy's.
        The names must be equal on all ranks. The constructor packs every part once, to see whether it can be sent.
    min_ranks: fewer ranks wait for new ones, unless they all leave.
    timeout: seconds that a rank waits for a message before it looks which ranks are left, or for the store before the
        store counts as ended. At most 1e6.
    lost_after: seconds without a sign of life after which a rank counts as lost.
    patience: seconds that ranks wait for new ranks, or for a rank that lives and does not come.

    Raises InvalidArgument if an option cannot work, CommError if the store cannot be reached.
    """

    def __init__(
        self,
        address: str,
        state: Mapping[str, Any],
        *,
        min_ranks: int = 1,
        timeout: float = 60.0,
        lost_after: float = 10.0,
        patience: float = 1800.0,
    ) -> None:
        if not hasattr(dist.TCPStore, "check"):
            raise _core.InvalidArgument(
                f"skim.ElasticGroup: PyTorch {torch.__version__} is too old, its TCPStore has no check(); use 2.4 or newer"
            )
        host, _, port = str(address).rpartition(":")
        if not host or not re.fullmatch("[0-9]{1,9}", port):
            raise _core.InvalidArgument(f"skim.ElasticGroup: address: must be 'host:port', not {address!r}")
        if not 1 <= int(port) <= MOST_PORT:
            raise _core.InvalidArgument(
                f"skim.ElasticGroup: address: the port must be in [1, {MOST_PORT}], not {port}"
            )
        expect_whole("skim.ElasticGroup: min_ranks", min_ranks, 1)
        expect_timeout("skim.ElasticGroup: timeout", timeout)
        for name, value in (("lost_after", lost_after), ("patience", patience)):
            expect_positive(f"skim.ElasticGroup: {name}", value)
        if not isinstance(state, Mapping):
            raise _core.InvalidArgument(
                f"skim.ElasticGroup: state: must be a dict such as {{'model': model, 'optimizer': optimizer}}, not "
                f"{type(state).__name__}"
            )
        for name, part in state.items():
            if not isinstance(part, dict) and not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise _core.InvalidArgument(
                    f"skim.ElasticGroup: state: '{name}' must be a dict or have state_dict() and load_state_dict(), "
                    f"but is {type(part).__name__}"
                )
        self.state = dict(state)
        for name, message in self.packed_state():
            unpacked(f"state: '{name}'", message)  # raises if it is nothing that a rank that joins could read
        self.min_ranks, self.timeout, self.patience = min_ranks, timeout, patience
        self.lost_after = lost_after
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self.generation, self.members = 0, [self.name]
        self.events: list[str] = []
        self._store = _Store(host, int(port), timeout)
        self._pulse: _Pulse | None = None
        self._watch = self._new_watch()  # of those who want to join
        self._transport: GlooTransport | None = None
        self._comm: _core.Communicator | None = None  # over it; None: this generation has ended
        self._steps: ElasticSteps | None = None  # not a weak reference: leave() needs it when training is over
        self._known = 0  # so many of those who have asked to join have been admitted, or have given up
        self._told: tuple[int, list[str]] = 0, []  # the last generation that tell() has told of, and its ranks
        self._norms: dict[str, float] = {}  # by name: of the residuals, when the ranks last met
        self._left = False

    @property
    def rank(self) -> int:
        """This rank's place among the members, from 0 on. It may change with them."""
        return self.members.index(self.name)

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.members)

    def __enter__(self) -> ElasticGroup:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.leave()
        else:
            self.close(FAILED)

    def leave(self) -> None:
        """Leaves in good order: after the open step, hands this rank's residual over to a rank that stays.

        Returns when that rank has it, which may be one step (LocalSteps: one round) later. If all ranks leave at
        once, as at the end of a run, nobody takes anything; but if others wait to join, they join first. Training is over
        after it. Not inside a step.
        """
        if self._steps is None:
            return
        self._steps.leave()
        self.close(LEFT)

    # ---- for ElasticSteps -----------------------------------------------------------------------

    def bind(self, steps: ElasticSteps) -> None:
        """Keeps what leave() needs, until this rank's part ends. Raises InvalidArgument if there was a model before."""
        if self._steps is not None or self._left:
            raise _core.InvalidArgument("skim.ElasticGroup: it has a model already; make a group for each model")
        self._steps = steps

    def join(self) -> _core.Communicator:
        """Waits to be admitted. Returns the communicator of the generation."""
        self._pulse = _Pulse(self._store, self.name, min(1.0, self.lost_after / 50))
        _open.add(self)
        self._store.append(ASKED, self.name + "\n")
        mine, ends, watch = ADMITTED.format(self.name), time.monotonic() + self.patience, self._new_watch()
        while not self._has(mine):
            newest = self._newest()
            if self.name in self._ranks_of(newest):  # whoever decided that may be lost, and cannot tell it any more
                return self._connect(newest)
            if all(watch.is_gone(name) for name in self._ranks_of(newest)):  # nobody is there who could admit
                self._propose(newest + 1, [], ends, at_least=self.min_ranks)
                if self.name in self._ranks_of(newest + 1):
                    return self._connect(newest + 1)
            if time.monotonic() >= ends:
                raise _core.CommError(f"skim: not admitted within {self.patience:g} s")
        return self._connect(int(self._store.get(mine)))

    def regroup(self, ranks: Sequence[str] | None = None, *, leaves: bool = False) -> _core.Communicator:
        """Agrees on the next generation. Returns its communicator.

        ranks: its ranks, if all ranks know them. None: after a failure, those that are left.
        leaves: this rank does not want to train any more. If none of them does, they need not be min_ranks.
        """
        generation, ends = self.generation + 1, time.monotonic() + self.patience
        if ranks is None:
            self._store.set(PRESENT.format(generation, self.name), LEAVES if leaves else TRAINS)
            watch = self._new_watch()
            while not self._has(RANKS.format(generation)):
                missing = [r for r in self.members if not self._store.has(PRESENT.format(generation, r))]
                if time.monotonic() >= ends or all(watch.is_gone(r) for r in missing):
                    left = [r for r in self.members if r not in missing]
                    all_leave = all(self._store.get(PRESENT.format(generation, r)) == LEAVES for r in left)
                    self._propose(generation, left, ends, at_least=1 if all_leave else self.min_ranks)
        else:
            self._propose(generation, ranks, ends, at_least=self.min_ranks)
        return self._connect(generation)

    def expect_member(self) -> None:
        """Raises InvalidArgument if this rank's part has ended."""
        if self._left:
            raise _core.InvalidArgument("skim.ElasticGroup: no step after leave(), or after an error that has ended this rank's part")

    def meet(
        self, comm: _core.Communicator, norm: float, leaves: bool, has_state: bool
    ) -> tuple[list[str], list[str], bool]:
        """(those who leave, those who join, whether all have a state), the same on all ranks. Collective.

        norm: of this rank's residual.
        """
        joins: list[str] = []
        if comm.rank == 0:
            try:
                joins = self._candidates(sure=leaves)
            except _core.CommError as e:
                self.record(f"{e}; no rank can join any more", once=True)
        message = {"norm": norm, "leaves": leaves, "joins": joins, "has_state": has_state}
        of_all = [json.loads(m) for m in comm.allgather(json.dumps(message).encode())]
        self._norms = {name: m["norm"] for name, m in zip(self.members, of_all)}
        leavers = [n for n, m in zip(self.members, of_all) if m["leaves"]]
        return leavers, of_all[0]["joins"], all(m["has_state"] for m in of_all)

    def hand_over(self, state: bytes, to: str) -> bool:
        """Sends what this rank has kept to a rank of this generation. Returns whether that rank has it."""
        assert self._transport is not None
        try:
            self.send(bytearray(state), self.members.index(to))
        except _core.CommError:
            pass  # the other rank knows what has arrived
        key, watch = TAKEN.format(self.generation, self.name), self._new_watch()
        while not self._has(key):
            if watch.is_gone(to) or self._store.has(PRESENT.format(self.generation + 1, to)):
                self._store.decide(key, "no")
        return self._store.get(key) == "yes"

    def was_taken(self, leaver: str, taker: str) -> bool:
        """Whether one rank has handed over to the other, when that is decided. If nobody is left to decide it, the
        residual was not taken."""
        key, watch = TAKEN.format(self.generation, leaver), self._new_watch()
        failed = PRESENT.format(self.generation + 1, taker)  # by a taker, after it has decided what it takes
        while not self._has(key):
            if watch.is_gone(leaver) and (watch.is_gone(taker) or self._store.has(failed)):
                self._store.decide(key, "no")
        return self._store.get(key) == "yes"

    def take(self, source: str) -> bytes:
        """The other end of hand_over. Raises CommError if the state has not arrived whole; then its owner keeps it."""
        key = TAKEN.format(self.generation, source)
        try:
            state = self.receive(self.members.index(source))
        except _core.CommError:
            self._store.decide(key, "no")
            raise
        if self._store.decide(key, "yes") != "yes":
            raise _core.CommError(f"skim: {source} did not wait until its residual was taken")
        return bytes(state)

    def send(self, message: bytearray, to: int) -> None:
        """Returns when the message is on its way. Raises CommError if the other rank is lost."""
        length = bytearray(len(message).to_bytes(8, "little"))
        for piece in (memoryview(length), *_pieces(message)):
            self._wait(lambda t, piece=piece: t.send(piece, to, STATE_TAG))

    def receive(self, source: int) -> bytearray:
        """The next message that the other rank has sent. Raises CommError if that rank is lost."""
        length = bytearray(8)
        self._wait(lambda t: t.receive(memoryview(length), source, STATE_TAG))
        message = bytearray(int.from_bytes(length, "little"))
        for piece in _pieces(message):
            self._wait(lambda t, piece=piece: t.receive(piece, source, STATE_TAG))
        return message

    def described(self) -> list[str]:
        """What must be equal on all ranks."""
        return [f"state={self._names()}"]

    def packed_state(self) -> Iterator[tuple[str, bytearray]]:
        """The names and messages of all parts, in an order that is the same on all ranks."""
        for name in self._names():
            part = self.state[name]
            yield name, packed(f"state: '{name}'", dict(part) if isinstance(part, dict) else part.state_dict())

    def receive_state(self, source: int) -> dict[str, Any]:
        """What packed_state() of another rank has sent. Raises InvalidArgument with the text that is there instead."""
        found = {}
        for name in self._names():
            found[name] = unpacked(f"state: '{name}'", self.receive(source))
            if isinstance(found[name], str):
                raise _core.InvalidArgument(found[name])
        return found

    def _names(self) -> list[str]:
        return sorted(self.state, key=str)

    def set_state(self, found: Mapping[str, Any]) -> None:
        """Puts what receive_state() has returned into `state`."""
        for name, part in self.state.items():
            if isinstance(part, dict):
                part.clear()
                part.update(found[name])
            else:
                part.load_state_dict(found[name])

    def tell(self) -> None:
        """Records how the ranks have changed since the last call."""
        lines = []
        told, before = self._told
        for name in before:
            if name in self.members:
                continue
            keys = [TAKEN.format(generation, name) for generation in range(told, self.generation)]
            if any(self._store.has(key) and self._store.get(key) == "yes" for key in keys):
                lines.append(f"{name} left and handed over its residual")
            else:
                norm = f"{self._norms[name]:.3g}" if name in self._norms else "unknown"
                lines.append(f"{name} is lost, and with it a residual of norm {norm}")
        lines += [f"{name} joined" for name in self.members if before and name not in before]
        if not before:
            lines.append(f"{self.name} is rank {self.rank}")
        for line in lines:
            self.record(f"skim: {line}; {self.size} rank{'s' if self.size > 1 else ''} now")
        self._told = self.generation, self.members

    def record(self, event: str, once: bool = False) -> None:
        """Adds a line to `events`, and logs it: on rank 0 as a warning. once: not if the line is there already."""
        if once and event in self.events:
            return
        self.events.append(event)
        logging.getLogger("skim").log(logging.WARNING if self.rank == 0 else logging.DEBUG, event)

    def abort(self) -> None:
        """Ends this generation, and wakes the ranks that wait for this one."""
        if self._comm is not None:
            self._comm.abort(self._comm.rank)
            self._comm = None

    # ---- the store ------------------------------------------------------------------------------

    def _has(self, key: str) -> bool:
        return self._store.has_soon(key, min(0.2, self.lost_after / 10))

    def _new_watch(self) -> _Watch:
        return _Watch(self._store, self.lost_after)

    def _newest(self) -> int:
        generation = int(self._store.get(RECENT)) if self._store.has(RECENT) else 0
        while self._store.has(RANKS.format(generation + 1)):
            generation += 1
        return generation

    def _ranks_of(self, generation: int) -> list[str]:
        return list(json.loads(self._store.get(RANKS.format(generation)))) if generation > 0 else []

    def _candidates(self, *, sure: bool = False) -> list[str]:
        """Names of ranks that live and wait to join. sure: waits until it is known of each whether it lives."""
        asked = self._store.get(ASKED).splitlines()
        waiting = [  # also who is silent for a while: it may go on, and has asked already
            n
            for n in asked[self._known :]
            if not self._store.has(ADMITTED.format(n)) and not self._watch.is_gone(n, self.patience)
        ]
        self._known = asked.index(waiting[0]) if waiting else len(asked)
        while sure and not all(self._watch.lives(n) or self._watch.is_gone(n) for n in waiting):
            if self._has(RANKS.format(self.generation + 1)):
                break
        return [n for n in waiting if self._watch.lives(n)]

    def _propose(self, generation: int, ranks: Sequence[str], ends: float, *, at_least: int) -> None:
        """Decides a generation's ranks, unless another rank has: `ranks`, and new ones as long as they are too few."""
        key = RANKS.format(generation)
        ranks = list(ranks)
        while len(ranks) < at_least:
            ranks += [n for n in self._candidates() if n not in ranks]
            if len(ranks) >= at_least:
                break
            if self._has(key):
                return
            if time.monotonic() >= ends:
                raise TooFewRanks(
                    f"skim: {len(ranks)} rank(s), but min_ranks is {self.min_ranks}, and no others came in "
                    f"{self.patience:g} s"
                )
        self._store.decide(key, json.dumps(ranks))

    def _connect(self, generation: int) -> _core.Communicator:
        """The communicator of a generation that is decided. Raises CommError if this rank is not in it."""
        ranks = self._ranks_of(generation)
        if self.name not in ranks:
            raise _core.CommError(
                f"skim: the others went on without this rank, which gave no sign of life for {self.lost_after:g} s; "
                "start it again, and it joins"
            )
        self._store.set(RECENT, str(generation))
        for name in ranks:
            if name not in self.members or self.generation == 0:
                self._store.decide(ADMITTED.format(name), str(generation))
        self.generation, self.members = generation, ranks
        # gloo would wait for its timeout if a rank were lost before it connects.
        self._store.decide(PRESENT.format(generation, self.name), TRAINS)
        watch, ends = self._new_watch(), time.monotonic() + self.patience
        for name in ranks:
            while not self._has(PRESENT.format(generation, name)):
                if watch.is_gone(name) or time.monotonic() >= ends:
                    raise GenerationFailed(f"skim: {name} was lost before it had joined")
        store = dist.PrefixStore(f"generation/{generation}", self._store.tcp)
        try:
            self._transport = GlooTransport(store, self.rank, self.size, self.timeout)
        except RuntimeError as e:
            raise GenerationFailed(str(e)) from None
        self._comm = _core.communicator_over(self._transport)
        return self._comm

    def _wait(self, start: Callable[[GlooTransport], Any]) -> None:
        transport = self._transport
        assert transport is not None
        try:
            transport.wait(start(transport))
        except (RuntimeError, OSError, TimeoutError) as e:
            raise _core.CommError(f"skim: {e}") from None

    def close(self, how: str) -> None:
        """Ends this rank's part, and tells the others. how: LEFT, or FAILED, which also ends the step that is open."""
        if self._left:
            return
        self._left = True
        if self._pulse is not None:
            self._pulse.end(how)
        if how == FAILED:
            self.abort()
        self._comm = self._transport = self._steps = None
        _open.discard(self)


def _pieces(message: bytearray) -> Iterator[memoryview]:
    """The parts that are sent one after another, so that the timeout is for each and not for a large state."""
    for begin in range(0, len(message), PIECE_BYTES):
        yield memoryview(message)[begin : begin + PIECE_BYTES]


def packed(what: str, value: Any) -> bytearray:
    """A value as a message. Raises InvalidArgument if it cannot be one. what: says in the error which value it is."""
    out = io.BytesIO()
    try:
        torch.save(value, out)
    except Exception as e:  # noqa: BLE001 - objects of the user's may raise anything
        raise _not_sent(what, str(e)) from None
    return bytearray(out.getbuffer())


def unpacked(what: str, message: bytearray) -> Any:
    """The value in a message. Raises InvalidArgument if torch.load(weights_only=True) refuses a type in it."""
    try:
        return torch.load(io.BytesIO(message), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        refused = re.search(r"GLOBAL (\S+)", str(e))
        raise _not_sent(what, refused[1] if refused else str(e)) from None


def _not_sent(what: str, why: str) -> _core.InvalidArgument:
    return _core.InvalidArgument(
        f"skim.ElasticGroup: {what} cannot be sent to a rank that joins ({why.partition(chr(10))[0]}); it may have "
        "tensors, numbers, strings, lists and dicts"
    )


class TooFewRanks(_core.CommError):
    """No new ranks came in time. This ends the run."""


class GenerationFailed(_core.CommError):
    """A rank of a new generation was lost before the generation could train. The ranks that are left agree on another one."""


@atexit.register
def _close_all() -> None:
    """Ranks that end without leave() are lost. This tells the others at once."""
    for group in list(_open):
        group.close(FAILED)


def _end_in_child() -> None:
    """The child of a fork is no rank. Its end must not tell the others that its parent has failed."""
    for group in list(_open):
        group._left = True
    _open.clear()


os.register_at_fork(after_in_child=_end_in_child)
