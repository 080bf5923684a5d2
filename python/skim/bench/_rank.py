"""One rank of python -m skim.bench ddp: a process that takes its turn when it is told to.

The program's argument is its end of a multiprocessing pipe, by number. It is sent what to do (Task) and, on ranks above
0, the port of rank 0's store, which rank 0 answers with; when it is ready it answers None. Then it is sent numbers of
steps, to each of which it answers with a Turn; then None, to which it answers with Outcome; then None, and it ends. An
exception is sent instead of an answer.
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
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import skim

BATCH, WIDTH, LAYERS, CLASSES = 32, 1024, 6, 10
BATCHES = 8  # that a rank has ready
SETTLE = 2  # steps before those that count, after others had the processor and its caches


@dataclasses.dataclass
class Task:
    hook: str  # none, allreduce, fp16, bf16, powersgd, skim
    exchange: str
    density: float
    rank: int
    ranks: int
    bucket_mb: float
    warm_up: int
    address: str  # of rank 0
    timeout: float


@dataclasses.dataclass
class Turn:
    seconds: list[float]  # of each step
    sent_bytes: int | None  # in all of these steps


@dataclasses.dataclass
class Outcome:
    weights: str  # a hash
    buckets: int
    parts_s: dict[str, float]  # a step; skim's
    decisions: list[str]  # of each bucket; skim's


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
        before = _sent_bytes()
        seconds = trainer.train(steps)
        after = _sent_bytes()
        pipe.send(Turn(seconds, None if before is None or after is None else after - before))
    pipe.send(trainer.outcome())
    pipe.recv()  # nobody leaves before all have answered
    if trainer.compression is not None:
        trainer.compression.close()
    dist.destroy_process_group()


class _Trainer:
    def __init__(self, task: Task) -> None:
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for _ in range(LAYERS):
            layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
        self.ddp = DistributedDataParallel(
            torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, CLASSES)), bucket_cap_mb=task.bucket_mb
        )
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)
        torch.manual_seed(1 + task.rank)
        self.batches = [
            (torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))) for _ in range(BATCHES)
        ]
        self.steps = 0
        self.compression: Any = None
        if task.hook == "skim":
            self.compression = skim.attach(
                self.ddp, density=task.density, exchange=task.exchange, timeout=task.timeout
            )
        elif task.hook == "powersgd":
            # From the first step after the one that forms buckets anew: the default is 1000 dense steps.
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
            torch.nn.functional.cross_entropy(self.ddp(x), y).backward()
            self.optimizer.step()
            seconds.append(time.perf_counter() - start)
            self.steps += 1
        return seconds

    def outcome(self) -> Outcome:
        digest = hashlib.sha256()
        for p in self.ddp.parameters():
            digest.update(p.detach().numpy().tobytes())
        formed = self.ddp._get_ddp_logging_data()
        sizes = formed.get("rebuilt_bucket_sizes") or formed["bucket_sizes"]
        parts: dict[str, float] = {}
        decisions: list[str] = []
        if self.compression is not None:
            report = self.compression.report()
            steps = max(1, report.steps)
            for part in ("select", "exchange", "apply"):
                parts[part] = sum(getattr(b, f"{part}_s") for b in report.buckets.values()) / steps
            parts["exposed"] = report.exposed_s / steps
            decisions = [b.decision for _, b in sorted(report.buckets.items())]
        return Outcome(digest.hexdigest(), len(sizes.split(",")), parts, decisions)


# Without annotations: DDP compares them with the types themselves, which these are not as strings.
def _no_exchange(state, bucket):  # type: ignore[no-untyped-def]
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _wait_only(state, bucket):  # type: ignore[no-untyped-def]
    """What every exchange costs at least: each rank waits, bucket by bucket, for the slowest."""
    met = dist.all_reduce(torch.zeros(1), async_op=True).get_future()
    return met.then(lambda _: bucket.buffer())


def _sent_bytes() -> int | None:
    """What this process has sent over the TCP connections that it has now; None where that is not told."""
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(fd := int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as s:
                if s.type == socket.SOCK_STREAM and s.family in (socket.AF_INET, socket.AF_INET6):
                    # tcpi_bytes_acked of struct tcp_info in Linux's include/uapi/linux/tcp.h
                    total += struct.unpack_from("=Q", s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128), 120)[0]
        except (OSError, struct.error):  # closed by now, not connected, or an older kernel
            pass
    return total


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    try:
        serve(pipe)
    except EOFError:  # whoever measured has gone
        os._exit(1)
    except Exception as e:  # noqa: BLE001 - it is told, whatever it is
        pipe.send(RuntimeError(f"{type(e).__name__}: {e}"))
        os._exit(1)  # without waiting for threads of a hook that is stuck
