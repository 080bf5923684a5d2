"""One rank of python -m skim.bench ddp: a process that trains when it is told to.

The program's argument is the file descriptor of its end of a multiprocessing pipe. The messages are:

1. It receives a Task. Rank 0 answers with the port of its store; the other ranks then receive this port.
2. When it is ready to train, it answers None.
3. It receives a number of steps, trains them, and answers with a Turn. This repeats.
4. It receives None and answers with an Outcome. It receives None again, and ends.

If it fails, it sends an exception instead of an answer.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import os
import socket
import stat
import struct
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import skim
from skim._shards import whole

LAYERS, CLASSES = 6, 10
BATCHES = 8  # prepared on each rank, and used in turn
SETTLE = 2  # untimed steps at the start of a turn, because other processes had the processor and its caches


@dataclasses.dataclass
class Task:
    hook: str  # none, barrier, allreduce, fp16, bf16, powersgd, skim, localsteps
    exchange: str
    density: float
    rank: int
    ranks: int
    bucket_mb: float
    warm_up: int
    address: str  # of rank 0
    timeout: float
    width: int = 1024  # of the model's layers
    batch: int = 32  # examples per rank
    local: Literal["host", "device"] = "host"  # of skim
    islands: int = 0  # of ranks that share the parameters by fully_shard, with the hook between islands; 0: DDP
    device: str = "cpu"  # or cuda
    value_code: str | None = None  # of skim; None: the default of skim.attach
    counts_far: bool = False  # count only what goes to another host


@dataclasses.dataclass
class Turn:
    seconds: list[float]  # of each step
    sent_bytes: int | None  # in all these steps together; None: not known


@dataclasses.dataclass
class Outcome:
    weights: str  # hash of the parameters
    buckets: int
    parts_s: dict[str, float]  # skim: seconds per step of its phases
    decisions: list[str]  # skim: the last decision for each bucket


def serve(pipe: Connection) -> None:
    task = pipe.recv()
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=task.timeout)
    port = 0 if task.rank == 0 else pipe.recv()
    store = dist.TCPStore(task.address, port, task.ranks, task.rank == 0, patience, wait_for_workers=False)
    if task.rank == 0:
        pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.ranks, timeout=patience)
    trainer = _Trainer(task)
    trainer.train(task.warm_up)
    pipe.send(None)
    while (steps := pipe.recv()) is not None:
        trainer.train(SETTLE)
        dist.barrier()
        before = _sent_bytes(task.counts_far)
        seconds = trainer.train(steps)
        after = _sent_bytes(task.counts_far)
        pipe.send(Turn(seconds, None if before is None or after is None else after - before))
    pipe.send(trainer.outcome())
    pipe.recv()  # no rank leaves before all have answered
    if trainer.compression is not None:
        trainer.compression.close()


class _Trainer:
    def __init__(self, task: Task) -> None:
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for _ in range(LAYERS):
            layers += [torch.nn.Linear(task.width, task.width), torch.nn.ReLU()]
        layers.append(torch.nn.Linear(task.width, CLASSES))
        self.device = torch.device(task.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", task.rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.model = torch.nn.Sequential(*layers).to(self.device)
        self.compression: Any = None
        self.local_steps: skim.LocalSteps | None = None
        self.buckets = 0
        if task.islands:
            self._shard(task)
        elif task.hook != "localsteps":
            self._hook(task)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        if task.hook == "localsteps":
            self.local_steps = skim.LocalSteps(
                self.model, self.optimizer, every=1, density=task.density, exchange=task.exchange,
                bucket_mb=task.bucket_mb, timeout=task.timeout, **self._code(task),
            )  # fmt: skip
        torch.manual_seed(1 + task.rank)
        self.batches = [
            (
                torch.randn(task.batch, task.width).to(self.device),
                torch.randint(CLASSES, (task.batch,)).to(self.device),
            )
            for _ in range(BATCHES)
        ]
        self.steps = 0

    @staticmethod
    def _code(task: Task) -> dict[str, Any]:
        return {} if task.value_code is None else {"value_code": task.value_code}

    def _skim(self, task: Task, **options: Any) -> None:
        self.compression = skim.attach(
            self.model, density=task.density, exchange=task.exchange, local=task.local, timeout=task.timeout,
            **self._code(task), **options,
        )  # fmt: skip

    def _shard(self, task: Task) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # since PyTorch 2.2
        from torch.distributed.fsdp import fully_shard  # since PyTorch 2.6

        shape = (task.islands, task.ranks // task.islands)
        mesh = init_device_mesh(task.device, shape, mesh_dim_names=("between", "inside"))
        # With the whole mesh, fully_shard sums the gradients of islands itself.
        own = mesh if task.hook == "allreduce" else mesh["inside"]
        for layer in [m for m in self.model if isinstance(m, torch.nn.Linear)]:
            fully_shard(layer, mesh=own)
            self.buckets += 1
        fully_shard(self.model, mesh=own)
        if task.hook == "skim":
            self._skim(task, between=mesh["between"].get_group())

    def _hook(self, task: Task) -> None:
        self.model = self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=task.bucket_mb)
        if task.hook == "skim":
            self._skim(task)
        elif task.hook == "powersgd":
            # Start right after the step that rebuilds the buckets. The default is after 1000 dense steps.
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            self.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            hooks = {
                "none": _no_exchange,
                "barrier": _wait_only,
                "allreduce": default_hooks.allreduce_hook,
                "fp16": default_hooks.fp16_compress_hook,
                "bf16": default_hooks.bf16_compress_hook,
            }
            self.ddp.register_comm_hook(None, hooks[task.hook])

    def train(self, steps: int) -> list[float]:
        """The seconds of each step."""
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            x, y = self.batches[self.steps % BATCHES]
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(x), y).backward()
            (self.local_steps or self.optimizer).step()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - start)
            self.steps += 1
        return seconds

    def outcome(self) -> Outcome:
        if self.local_steps is not None:
            self.local_steps.finish()  # leaves the shared parameters in the model
        digest = hashlib.sha256()
        for p in self.model.parameters():
            digest.update(whole(p).numpy().tobytes())
        measured = self.compression or self.local_steps
        if self.local_steps is not None:
            self.buckets = len(self.local_steps.report().buckets)
        if not self.buckets:
            formed = self.ddp._get_ddp_logging_data()
            self.buckets = len((formed.get("rebuilt_bucket_sizes") or formed["bucket_sizes"]).split(","))
        parts: dict[str, float] = {}
        decisions: list[str] = []
        if measured is not None:
            report = measured.report()
            for part in ("select", "exchange", "apply"):  # of the steps since the buckets have stood
                parts[part] = sum(getattr(b, f"{part}_s") / max(1, b.steps) for b in report.buckets.values())
            parts["exposed"] = report.exposed_s / max(1, report.steps)
            decisions = [b.decision for _, b in sorted(report.buckets.items())]
        return Outcome(digest.hexdigest(), self.buckets, parts, decisions)


# No annotations: DDP compares them with types, but here they would be strings (see the __future__ import).
def _no_exchange(state, bucket):  # type: ignore[no-untyped-def]
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _wait_only(state, bucket):  # type: ignore[no-untyped-def]
    """Waits for the slowest rank at each bucket, which every exchange must do. Exchanges no gradient."""
    met = dist.all_reduce(torch.zeros(1), async_op=True).get_future()
    return met.then(lambda _: bucket.buffer())


def _sent_bytes(only_far: bool = False) -> int | None:
    """Bytes that this process has written to its open TCP connections; None if the system does not count them.

    Those that the peer has not acknowledged count, those that were sent again do not, so the figure does not depend on
    the moment. only_far: over those to other hosts.
    """
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(fd := int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as s:
                if s.type == socket.SOCK_STREAM and s.family in (socket.AF_INET, socket.AF_INET6):
                    if only_far and s.getpeername()[0] == s.getsockname()[0]:
                        continue
                    # struct tcp_info of Linux's include/uapi/linux/tcp.h, as far as Linux 4.19 fills it
                    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
                    if len(info) < 216:
                        return None
                    (not_sent,) = struct.unpack_from("=I", info, 144)
                    sent, sent_again = struct.unpack_from("=QQ", info, 200)
                    total += sent - sent_again + not_sent
        except OSError:  # closed by now, or not connected
            pass
    return total


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    try:
        serve(pipe)
        dist.destroy_process_group()  # when the model is gone (docs/pytorch.md)
    except EOFError:  # the measuring process has ended
        os._exit(1)
    except Exception as e:  # noqa: BLE001 - every failure is reported
        pipe.send(RuntimeError(f"{type(e).__name__}: {e}"))
        os._exit(1)  # does not wait for threads of a hook that hangs
