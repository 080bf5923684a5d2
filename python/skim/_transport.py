"""Makes gloo groups that only Skim uses."""

from __future__ import annotations

import datetime
import itertools
import re
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from skim import _core

# Counts the groups that this process has made for each list of ranks. All ranks make them in the same
# order, so the names of their stores agree.
_made: dict[str, itertools.count[int]] = {}


class GlooTransport:
    """The transport for _core.communicator_over, which has the contract of its methods."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        """store: only this group writes to it. timeout: in seconds, to connect and for every wait."""
        self.rank = rank
        self.size = size
        self._store = store
        self._timeout = timeout
        # Nothing else refers to it. Setting it to None closes its connections, which wakes waiting ranks.
        self._gloo: Any = None
        self.host = rank
        if self.size == 1:
            return
        self._gloo = dist.ProcessGroupGloo(store, rank, self.size, datetime.timedelta(seconds=timeout))
        store.set(f"host{rank}", socket.gethostname())
        hosts = [store.get(f"host{r}") for r in range(self.size)]
        self.host = hosts.index(hosts[rank])

    def send(self, memory: memoryview, to: int, tag: int) -> Any:
        return self._open().send([torch.frombuffer(memory, dtype=torch.uint8)], to, tag)

    def receive(self, memory: memoryview, source: int, tag: int) -> Any:
        return self._open().recv([torch.frombuffer(memory, dtype=torch.uint8)], source, tag)

    def wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as e:
            text = str(e)
            if "imed out" in text:
                raise TimeoutError(f"timed out after {self._timeout:g} s") from None
            if re.search("onnection (closed|reset)|Broken pipe|not connected", text):
                raise ConnectionError("its connection is closed: it has ended or failed") from None
            raise

    def abort(self, culprit: int, phase: str, known: bool) -> None:
        try:
            if self.size > 1 and not known and self.told() is None:
                self._store.set("abort", f"{culprit} {phase}")
        finally:
            self._gloo = None

    def waits(self, peer: int) -> list[int]:
        chain = [peer]
        try:
            self._store.set(f"waits{self.rank}", str(peer))
            while len(chain) <= self.size:
                key = f"waits{chain[-1]}"
                # Ranks that wait for one another run out of time within moments.
                self._store.wait([key], datetime.timedelta(seconds=1))
                chain.append(int(self._store.get(key)))
        except RuntimeError:  # the last one waits for nobody, or the store has ended
            pass
        return chain

    def told(self) -> tuple[int, str] | None:
        try:
            if self.size == 1 or not self._store.check(["abort"]):
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
    timeout: seconds that a rank waits for another. A rank that ends is noticed at once.

    Raises InvalidArgument if torch.distributed has no process group yet.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise _core.InvalidArgument(
            "skim: torch.distributed has no process group yet; call torch.distributed."
            "init_process_group first (torchrun sets the environment variables that it needs)"
        )
    group = process_group if process_group is not None else dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    name = ",".join(map(str, ranks))
    number = next(_made.setdefault(name, itertools.count()))
    store = distributed_c10d.PrefixStore(f"skim/{name}/{number}", distributed_c10d._get_default_store())
    return _core.communicator_over(GlooTransport(store, dist.get_rank(group), len(ranks), timeout))
