"""Makes gloo groups that only Skim uses."""

from __future__ import annotations

import contextlib
import datetime
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from skim import _core
from skim._checks import expect_timeout

_NOBODY = -1


class _Waits:
    """Tells the other ranks, through the store, whom this rank waits for.

    A rank that times out follows these names to the one that all wait for. gloo cannot be polled, so a thread
    publishes a wait that has lasted for one to two periods, and withdraws it within a period of its end. A period is
    an eighth of the timeout, at most 1 s.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._period = min(timeout / 8, 1.0)
        self._number = 0  # of the newest wait
        self._current: tuple[int, int] | None = None  # that wait's number and peer, until it ends well
        self._ended = threading.Event()
        self._tell(_NOBODY)
        threading.Thread(target=self._publish, name="skim-waits", daemon=True).start()

    def begin(self, peer: int) -> None:
        self._number += 1
        self._current = self._number, peer

    def end(self) -> None:
        """Not after a wait that failed: it is this rank's last one, and the others may still ask for it."""
        self._current = None

    def ran_out(self) -> None:
        """Tells the others that this rank's wait has timed out: it will name the rank that all wait for."""
        with contextlib.suppress(RuntimeError):  # the store ended with the process that kept it
            self._store.add(f"ran-out{self._rank}", 1)

    def has_run_out(self, rank: int) -> bool:
        return self._store.add(f"ran-out{rank}", 0) > 0

    def close(self) -> None:
        self._ended.set()

    def until(self, is_so: Callable[[], bool], periods: int) -> bool:
        """Waits until is_so(), at most so many periods. Returns whether it is."""
        end = time.monotonic() + periods * self._period
        while not is_so():
            if time.monotonic() > end or self._ended.wait(self._period / 8):
                return False
        return True

    def chain(self, peer: int) -> list[int]:
        """peer, the rank that it waits for, and so on, at most `size` ranks further.

        Takes three periods if the last one waits for nobody, because its wait might be about to be published.
        """
        chain = [peer]
        try:
            while len(chain) <= self._size and (following := self._told_by(chain[-1])) != _NOBODY:
                chain.append(following)
        except RuntimeError:  # the store ended with the process that kept it
            pass
        return chain

    def _told_by(self, rank: int) -> int:
        for _ in range(3):
            peer = int(self._store.get(f"waits{rank}"))
            if peer != _NOBODY:
                return peer
            self._ended.wait(self._period)
        return int(self._store.get(f"waits{rank}"))

    def _tell(self, peer: int) -> None:
        # Never deletes the key. A rank that reads a key which has just gone would wait for the store's timeout.
        self._store.set(f"waits{self._rank}", str(peer))

    def _publish(self) -> None:
        seen = published = None
        try:
            while not self._ended.wait(self._period):
                now = self._current
                lasting = now if now == seen else None
                if lasting != published:
                    self._tell(_NOBODY if lasting is None else lasting[1])
                    published = lasting
                seen = now
        except RuntimeError:  # the store ended with the process that kept it
            pass


class GlooTransport:
    """The transport for _core.communicator_over, which has the contract of its methods."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        """store: only this group writes to it. timeout: in seconds, to connect and for every wait.

        Raises CommError, which names a rank that has not come.
        """
        self.rank = rank
        self.size = size
        self._store = store
        self._timeout = timeout
        # Nothing else refers to it. Setting it to None closes its connections, which wakes waiting ranks.
        self._gloo: Any = None
        self._has_listened = False  # to what a peer that is gone had to say
        self.host = rank
        if self.size == 1:
            return
        began = time.monotonic()
        try:
            store.add(f"came{rank}", 1)
            self._gloo = dist.ProcessGroupGloo(store, rank, self.size, datetime.timedelta(seconds=timeout))
        except RuntimeError as e:
            raise self._not_connected(e, time.monotonic() - began) from None
        self._waits = _Waits(store, rank, size, timeout)
        weakref.finalize(self, self._waits.close)
        store.set(f"host{rank}", socket.gethostname())  # after what _Waits has set
        hosts = [store.get(f"host{r}") for r in range(self.size)]
        self.host = hosts.index(hosts[rank])

    def _not_connected(self, error: RuntimeError, waited_s: float) -> _core.CommError:
        missing = []
        if waited_s > 0.9 * self._timeout:  # otherwise it is not for a rank that gloo gave up
            with contextlib.suppress(RuntimeError):  # the store ended with the process that kept it
                missing = [r for r in range(self.size) if self._store.add(f"came{r}", 0) == 0]
        if missing:
            why = (
                f"rank {missing[0]} did not make this group in {self._timeout:g} s; all ranks make their groups of Skim in "
                "one order"
            )
        else:
            why = f"the ranks could not connect: {str(error).splitlines()[0]}"
        failure = _core.CommError(f"rank {self.rank}: {why}")
        failure.peer = missing[0] if missing else -1
        return failure

    def send(self, memory: memoryview, to: int, tag: int) -> Any:
        with self._explained(to):
            return self._open().send([torch.frombuffer(memory, dtype=torch.uint8)], to, tag), to

    def receive(self, memory: memoryview, source: int, tag: int) -> Any:
        with self._explained(source):
            return self._open().recv([torch.frombuffer(memory, dtype=torch.uint8)], source, tag), source

    def wait(self, work: Any) -> None:
        transfer, peer = work
        self._waits.begin(peer)
        with self._explained(peer):
            transfer.wait()
        self._waits.end()

    @contextlib.contextmanager
    def _explained(self, peer: int) -> Iterator[None]:
        """Raises the errors of gloo in words of its own. A transfer fails as it starts if its peer left earlier."""
        try:
            yield
        except RuntimeError as e:
            text = str(e)
            if "imed out" in text:
                self._waits.ran_out()
                raise TimeoutError(f"timed out after {self._timeout:g} s") from None
            if re.search("onnection (closed|reset)|Broken pipe|not connected", text):
                self._hear_from(peer)
                raise ConnectionError("its connection is closed: it has ended or failed") from None
            raise

    def _hear_from(self, peer: int) -> None:
        """Gives a peer that has closed its connection the time to say why, which told() then has.

        Gloo closes all connections of a rank whose wait times out. The rank then takes three periods or more to find
        the one that all wait for. A rank that has died says nothing: one period is enough.
        """
        if self._has_listened:  # it is about to abort, and sends a word to all, also to those that are gone
            return
        self._has_listened = True
        with contextlib.suppress(RuntimeError):  # the store ended with the process that kept it
            if self._waits.until(lambda: self._waits.has_run_out(peer) or self.told() is not None, 1):
                self._waits.until(lambda: self.told() is not None, 8)

    def abort(self, culprit: int, phase: str) -> None:
        try:
            if self.size > 1 and self.told() is None:
                self._store.set("abort", f"{culprit} {phase}")
                self._store.add("aborts", 1)
        finally:
            self._gloo = None
            if self.size > 1:
                self._waits.close()

    def waits(self, peer: int) -> list[int]:
        return self._waits.chain(peer)

    def told(self) -> tuple[int, str] | None:
        try:
            if self.size == 1 or self._store.add("aborts", 0) == 0:  # without Store.check, for old PyTorch
                return None
            culprit, _, phase = self._store.get("abort").decode().partition(" ")
            return int(culprit), phase
        except RuntimeError:  # the store ended with the process that kept it
            return None

    def _open(self) -> Any:
        if self._gloo is None:
            raise ConnectionError("this rank has left the group")
        return self._gloo


def connect(process_group: Any = None, *, timeout: float = 1800.0) -> _core.Communicator:
    """A communicator for the ranks of a process group, over gloo connections of its own.

    Collective: every rank of the process group calls it. For several groups, call it in the same order
    on all ranks.

    process_group: of any backend, because Skim sends from host memory. None: the default process group.
    timeout: seconds that a rank waits for another, at most 1e6. A rank that ends is noticed in about a second.

    Raises InvalidArgument if torch.distributed has no process group yet, or an argument cannot work. Raises CommError,
    which names the rank, if a rank does not call it within the timeout.
    """
    expect_timeout("skim: timeout", timeout)
    if not dist.is_available() or not dist.is_initialized():
        raise _core.InvalidArgument(
            "skim: torch.distributed has no process group yet; call torch.distributed."
            "init_process_group first (torchrun sets the environment variables that it needs)"
        )
    group = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise _core.InvalidArgument(
            f"skim: the process group must be one of torch.distributed, with this rank in it, not {process_group!r}"
        )
    try:
        ranks = dist.get_process_group_ranks(group)
    except KeyError:
        raise _core.InvalidArgument(
            "skim: the process group has ended: destroy_process_group() was called; make a new one, and wrap the model in "
            "DDP anew"
        ) from None
    name = ",".join(map(str, ranks))
    rank, store = dist.get_rank(group), distributed_c10d._get_default_store()
    # All ranks make the groups of one list of ranks in the same order, so their counts agree. The counts are in the store,
    # because a process may leave its default group and join another one, in which other processes are new.
    number = store.add(f"skim/{name}/made by {rank}", 1)
    of_group = distributed_c10d.PrefixStore(f"skim/{name}/{number}", store)
    return _core.communicator_over(GlooTransport(of_group, rank, len(ranks), timeout))
