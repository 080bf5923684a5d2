"""The measurement of python -m skim.bench ddp: the processes of each hook, their turns, and the statistics."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing.connection
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any

from skim.bench._rank import Outcome, Task, Turn

NAME, NET = "skimddp", "10.77.9"  # prefixes of the namespaces' names and of the addresses in them
SCRIPT = pathlib.Path(__file__).with_name("cluster")  # installed copy of scripts/cluster/cluster

# Not python -m: classes of a module that runs as __main__ cannot be unpickled at the other end of the pipe.
RANK = "from skim.bench import _rank; _rank.main()"


class NoLink(Exception):
    """The requested link cannot be made. The message says why."""


class Failed(Exception):
    """A rank of a group crashed, refused or did not answer. The message says which and why."""


class Loopback:
    """Ranks on this machine, over its loopback device."""

    name = "loopback"
    device = "lo"
    address = "127.0.0.1"

    def on_host(self, host: int) -> list[str]:
        """The words to put before a command that is to run on a host."""
        return []


class Namespaces(Loopback):
    """Ranks on the hosts of a cluster that link_of has made."""

    device = "e0"
    address = f"{NET}.1"

    def __init__(self, shape: str) -> None:
        self.name = shape

    def on_host(self, host: int) -> list[str]:
        return ["bash", str(SCRIPT), "enter", str(host)]


@contextlib.contextmanager
def link_of(rate: str | None, latency: str | None, hosts: int) -> Iterator[Loopback]:
    """Makes the link, and removes it at the end of the block. Raises NoLink."""
    if rate is None:
        yield Loopback()
        return
    shape = rate if latency is None else f"{rate}+{latency}"
    os.environ.update(SKIM_CLUSTER=NAME, SKIM_CLUSTER_NET=NET)

    def cluster(*arguments: str) -> None:
        # In its own session, so that Ctrl-C reaches only this process. It then waits for the clean-up.
        done = subprocess.run(
            ["bash", str(SCRIPT), *arguments], capture_output=True, text=True, start_new_session=True
        )
        if done.returncode:
            raise NoLink((done.stderr.strip().splitlines() or [f"cluster {arguments[0]} failed"])[-1])

    cluster("up", str(hosts), shape)
    try:
        yield Namespaces(shape)
    finally:
        cluster("down")


class Group:
    """The processes of one hook, from their start until end(). All methods but end() raise Failed."""

    def __init__(self, task: Task, link: Loopback, timeout: float) -> None:
        self._timeout = timeout
        self.processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Any] = []
        self._logs: list[IO[bytes]] = []
        try:
            on_host = task.ranks // task.islands if task.islands else 1
            for rank in range(task.ranks):
                self._start(rank, link, link.on_host(rank // on_host))
                self._pipes[rank].send(dataclasses.replace(task, rank=rank, address=link.address))
            [port] = self._answers(self._pipes[:1])
            self._tell(port, self._pipes[1:])
            self._answers(self._pipes)
        except BaseException:
            self.end()
            raise

    def _start(self, rank: int, link: Loopback, on_host: list[str]) -> None:
        ours, theirs = multiprocessing.connection.Pipe()
        self._pipes.append(ours)
        self._logs.append(tempfile.TemporaryFile())
        with theirs:
            self.processes.append(
                subprocess.Popen(
                    [*on_host, sys.executable, "-c", RANK, str(theirs.fileno())],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": link.device},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=self._logs[rank],
                    stderr=self._logs[rank],
                    start_new_session=True,  # Ctrl-C reaches only this process, which then ends them
                )
            )

    def train(self, steps: int) -> list[Turn]:
        """Trains so many steps and returns each rank's times."""
        self._tell(steps, self._pipes)
        return self._answers(self._pipes)

    def finish(self) -> list[Outcome]:
        self._tell(None, self._pipes)
        outcomes = self._answers(self._pipes)
        self._tell(None, self._pipes)
        for rank, process in enumerate(self.processes):
            try:
                process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                raise Failed(f"rank {rank} did not end within {self._timeout:g} s") from None
            if process.returncode:
                raise Failed(self._reason(self._epitaph(rank)))
        return outcomes

    def end(self) -> None:
        """Kills the processes that still run."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for thing in (*self._pipes, *self._logs):
            thing.close()

    def _tell(self, what: Any, pipes: list[Any]) -> None:
        for pipe in pipes:
            with contextlib.suppress(OSError):  # the rank has ended, and _answers will report it
                pipe.send(what)

    def _answers(self, pipes: list[Any]) -> list[Any]:
        """One answer from each pipe, in order. Raises Failed as soon as one rank fails."""
        answers: dict[Any, Any] = {}
        deadline = time.monotonic() + self._timeout
        while len(answers) < len(pipes):
            waiting = [p for p in pipes if p not in answers]
            ready: list[Any] = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = " and ".join(str(self._pipes.index(p)) for p in waiting)
                raise Failed(f"no answer from rank {late} within {self._timeout:g} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    answers[pipe] = pipe.recv()
                except (EOFError, OSError):
                    raise Failed(self._reason(self._epitaph(rank))) from None
                if isinstance(answers[pipe], Exception):
                    raise Failed(self._reason(f"rank {rank}: {answers[pipe]}"))
        return [answers[p] for p in pipes]

    def _reason(self, first: str) -> str:
        """Says which rank crashed, if one did; otherwise returns `first`.

        After a crash the other ranks fail too, and may be heard before the rank that crashed.
        """
        deadline = time.monotonic() + 2
        for rank, process in enumerate(self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                if process.wait(max(0.0, deadline - time.monotonic())) < 0:
                    return self._epitaph(rank)
        return first

    def _epitaph(self, rank: int) -> str:
        try:
            status = self.processes[rank].wait(self._timeout)
        except subprocess.TimeoutExpired:
            return f"rank {rank} closed its connection, but did not end within {self._timeout:g} s"
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        self._logs[rank].seek(0)
        said = self._logs[rank].read().decode(errors="replace").strip().splitlines()
        return f"rank {rank} ended {how}" + (f": {said[-1][:300]}" if said else "")


class Hook:
    """The measurements of one hook."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name = name
        base, _, where = name.partition("@")
        kind, _, exchange = base.partition("-")
        self.is_skim = kind in ("skim", "localsteps")
        self.task = Task(
            hook=kind,
            exchange=exchange or arguments.exchange,
            density=arguments.density,
            rank=0,
            ranks=arguments.ranks,
            bucket_mb=arguments.bucket_mb,
            warm_up=arguments.warm_up,
            address="",
            timeout=arguments.timeout,
            width=arguments.width,
            batch=arguments.batch,
            local="device" if where or arguments.device == "cuda" else "host",
            islands=arguments.islands,
            device=arguments.device,
            value_code=arguments.value_code,
            counts_far=bool(arguments.islands and arguments.rate),
        )
        self.steps_s: dict[tuple[int, int], list[float]] = {}  # (run, round): seconds of each step, on the slowest rank
        self.sent: list[float] = []  # bytes per step in each round, of the rank that sent most
        self.failures: list[str] = []
        self.equal: list[bool] = []  # for each run that it completed: whether all weights were equal
        self.outcomes: list[Outcome] = []  # of the last run that it completed

    def add(self, run: int, round_: int, turns: list[Turn]) -> None:
        self.steps_s[run, round_] = [max(of_ranks) for of_ranks in zip(*(t.seconds for t in turns))]
        sent = [t.sent_bytes for t in turns]
        if None not in sent:
            self.sent.append(max(sent) / len(turns[0].seconds))  # type: ignore[type-var, operator]

    def add_outcomes(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        self.equal.append(len({o.weights for o in outcomes}) == 1)

    def row(self, link: Loopback, runs: int, none: Hook | None) -> dict[str, Any]:
        steps = [1e3 * s for of_round in self.steps_s.values() for s in of_round]
        medians = {when: statistics.median(of_round) for when, of_round in self.steps_s.items()}
        ratios = []
        if none is not None:
            ratios = [m / statistics.median(none.steps_s[w]) for w, m in medians.items() if w in none.steps_s]
        parts = [o.parts_s for o in self.outcomes]
        return {
            "hook": self.name,
            "exchange": self.task.exchange if self.is_skim else None,
            "link": link.name,
            "ranks": self.task.ranks,
            "density": self.task.density if self.is_skim else None,
            "buckets": self.outcomes[0].buckets if self.outcomes else None,
            "step_ms": statistics.median(steps) if steps else None,
            "min_ms": min(steps, default=None),
            "ratio_to_none": statistics.median(ratios) if ratios else None,
            "runs": runs,
            "failures": len(self.failures),
            "failure": self.failures[0] if self.failures else None,
            "weights_equal": all(self.equal) if self.equal and self.name not in ("none", "barrier") else None,
            "sent_bytes": statistics.median(self.sent) if self.sent else None,
            "parts_ms": {k: 1e3 * max(p[k] for p in parts) for k in parts[0]} if self.is_skim and parts else None,
            "decisions": self.outcomes[0].decisions if self.is_skim and self.outcomes else None,
        }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the JSON file. Raises NoLink."""
    hooks = [Hook(name, arguments) for name in arguments.hooks]
    with link_of(arguments.rate, arguments.latency, arguments.islands or arguments.ranks) as link:
        for run in range(arguments.runs):
            _measure_once(hooks, link, run, arguments)
    none = next((h for h in hooks if h.name == "none"), None)
    return [h.row(link, arguments.runs, none) for h in hooks]


def _measure_once(hooks: list[Hook], link: Loopback, run: int, arguments: argparse.Namespace) -> None:
    of_run = f"run {run + 1} of {arguments.runs}: "
    groups: dict[Hook, Group] = {}

    @contextlib.contextmanager
    def turn(hook: Hook, doing: str) -> Iterator[None]:
        _progress(f"{of_run}{hook.name}: {doing}")
        try:
            yield
        except Failed as e:
            _progress(f"{of_run}{hook.name} failed: {e}", stays=True)
            hook.failures.append(str(e))
            if hook in groups:
                groups.pop(hook).end()

    try:
        for hook in hooks:
            with turn(hook, "start"):
                groups[hook] = Group(hook.task, link, arguments.timeout)
        for round_ in range(arguments.rounds):
            first = round_ % len(hooks)  # so that no hook always follows the same one
            for hook in hooks[first:] + hooks[:first]:
                if hook in groups:
                    with turn(hook, f"round {round_ + 1} of {arguments.rounds}"):
                        hook.add(run, round_, groups[hook].train(arguments.steps))
        for hook in hooks:
            if hook in groups:
                with turn(hook, "end"):
                    hook.add_outcomes(groups[hook].finish())
    finally:
        for group in groups.values():
            group.end()
        _progress("")


def _progress(text: str, *, stays: bool = False) -> None:
    """Prints a line that the next one replaces on a terminal. Elsewhere prints only lines with `stays`."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\n" if stays else "", file=sys.stderr, flush=True)
    elif stays:
        print(text, file=sys.stderr, flush=True)
